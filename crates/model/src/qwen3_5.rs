//! Qwen3.5 and 3.6, with experts (`qwen3_5_moe`) or dense (`qwen3_5`): as Qwen3-Next, but the input
//! projections of the DeltaNet are separate and in plain order, and the router always
//! renormalises. With text alone the three axes of its rotary embedding are equal, so it is the
//! ordinary partial one.
//!
//! Source: transformers `models/qwen3_5_moe/modeling_qwen3_5_moe.py` and `models/qwen3_5/`.
//! Checkpoints: Qwen3.5-35B-A3B, 122B-A10B, 397B-A17B, Qwen3.6-35B-A3B; dense Qwen3.5-27B.
//! Published files are multimodal wrappers: the text config is nested, vision and MTP tensors are
//! skipped.

use crate::blocks::{LoadedAs, Packing};
use crate::config::{ExpertSizes, Trunk, text_config};
use crate::loader::Loader;
use crate::qwen3_next::load_hybrid;
use snowmelt_weights::ConfigView;

pub(crate) fn load<L: Loader>(config: &ConfigView<'_>, l: &mut L) -> LoadedAs<L> {
    let text = text_config(config)?;
    let dense = |trunk: &Trunk| Ok(vec![true; trunk.n_layers]);
    load_hybrid(config, &text, l, Packing::Separate, None, dense)
}

/// The same with experts in every layer.
pub(crate) mod moe {
    use super::{
        ConfigView, ExpertSizes, LoadedAs, Loader, Packing, Trunk, load_hybrid, text_config,
    };

    pub(crate) fn load<L: Loader>(config: &ConfigView<'_>, l: &mut L) -> LoadedAs<L> {
        let text = text_config(config)?;
        let experts = Some((ExpertSizes::read(&text)?, true));
        let dense = |trunk: &Trunk| Ok(vec![false; trunk.n_layers]);
        load_hybrid(config, &text, l, Packing::Separate, experts, dense)
    }
}
