//! The dense pre-norm transformers: Llama, Qwen2 (biases of q, k and v) and Qwen3 (norms of q and
//! k).
//!
//! ```text
//! x += o_proj(attention(rope q, rope k, v))
//! x += down_proj(silu(gate_proj x) * up_proj x)
//! ```
//! Source: transformers `models/llama/`, `models/qwen2/`, `models/qwen3/`.
//! Checkpoints: Llama 3.x, `SmolLM2`, Qwen2.5, Qwen3-0.6B to 32B.

use crate::blocks::{
    Attention, AttentionShape, AttentionWork, Biases, Ffn, LayerParts, LoadedAs, Mixer, Mlp,
    PreNorm, PreNormParts, Works,
};
use crate::config::{
    Heads, Result, Trunk, positive, refuse, require_silu, sliding_layers, text_config,
};
use crate::loader::Loader;
use crate::rotary::Rotary;
use snowmelt_backend::Glu;
use snowmelt_weights::ConfigView;

pub(crate) fn load<L: Loader>(config: &ConfigView<'_>, l: &mut L) -> LoadedAs<L> {
    let text = text_config(config)?;
    if text.opt_bool("mlp_bias")?.unwrap_or(false) {
        return refuse("mlp_bias", true, "`false`");
    }
    load_dense(config, &text, l, |plain| plain)
}

/// What the dense families share; `attention` is what each adds.
fn load_dense<L: Loader>(
    config: &ConfigView<'_>,
    text: &ConfigView<'_>,
    l: &mut L,
    attention: impl FnOnce(AttentionShape) -> AttentionShape,
) -> LoadedAs<L> {
    require_silu(text)?;
    let trunk = Trunk::read(config, text)?;
    let (d_model, eps) = (trunk.d_model, trunk.eps);
    let heads = Heads::read(text, d_model)?;
    let rotary = Rotary::read(text, heads.d_head, trunk.context_max)?;
    let attention = attention(AttentionShape::plain(heads, d_model, eps));
    let windows = windows(text, trunk.n_layers)?;
    let d_mlp = positive("intermediate_size", text.usize("intermediate_size")?)?;
    let parts = PreNormParts { trunk, norm_plus: 0.0, moe: None, d_mlp };
    let works = |l: &mut L| Works {
        attention: Some(AttentionWork::load(l, attention, &rotary)),
        ..Works::default()
    };
    let model = PreNorm::load(l, &parts, works, |l, index| {
        let shape = AttentionShape { window: windows[index], ..attention };
        let mixer = Attention::load(l, shape, index, &format!("layers.{index}.self_attn"))?;
        let mlp = Mlp::load(l, Glu::Silu, [d_model, d_mlp], &format!("layers.{index}.mlp"))?;
        Ok(LayerParts { mixer: Mixer::Attention(mixer), ffn: Ffn::Mlp(mlp) })
    })?;
    Ok((model, trunk))
}

/// The window of each layer: `sliding_window` where `use_sliding_window` is set, in the layers that
/// `layer_types` names, else from `max_window_layers` on.
fn windows(text: &ConfigView<'_>, n_layers: usize) -> Result<Vec<Option<usize>>> {
    let window = match text.opt_usize("sliding_window")? {
        Some(window) if text.opt_bool("use_sliding_window")?.unwrap_or(false) => {
            positive("sliding_window", window)?
        }
        _ => return Ok(vec![None; n_layers]),
    };
    let first = text.usize_or("max_window_layers", n_layers)?;
    let from_first = || (0..n_layers).map(|layer| layer >= first).collect();
    let sliding = sliding_layers(text, n_layers)?.unwrap_or_else(from_first);
    Ok(sliding.into_iter().map(|sliding| sliding.then_some(window)).collect())
}

/// Qwen2 and 2.5.
pub(crate) mod qwen2 {
    use super::{AttentionShape, Biases, ConfigView, LoadedAs, Loader, load_dense, text_config};

    pub(crate) fn load<L: Loader>(config: &ConfigView<'_>, l: &mut L) -> LoadedAs<L> {
        let text = text_config(config)?;
        load_dense(config, &text, l, |plain| AttentionShape { biases: Biases::Qkv, ..plain })
    }
}

/// Qwen3.
pub(crate) mod qwen3 {
    use super::{AttentionShape, ConfigView, LoadedAs, Loader, load_dense, text_config};

    pub(crate) fn load<L: Loader>(config: &ConfigView<'_>, l: &mut L) -> LoadedAs<L> {
        let text = text_config(config)?;
        load_dense(config, &text, l, |plain| AttentionShape { norm_plus: Some(0.0), ..plain })
    }
}
