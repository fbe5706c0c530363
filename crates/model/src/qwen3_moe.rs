//! Qwen3-MoE: grouped-query attention with q and k norms, softmax routing.
//!
//! ```text
//! x += o_proj(attention(rope(norm q), rope(norm k), v))
//! x += sum of top_k experts, or a dense MLP in the layers that `mlp_only_layers` names
//! ```
//! Source: transformers `models/qwen3_moe/modeling_qwen3_moe.py`.
//! Checkpoints: Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder-30B-A3B and 480B-A35B.

use crate::blocks::{
    Attention, AttentionShape, AttentionWork, Ffn, LayerParts, LoadedAs, Mixer, Mlp, Moe, MoeShape,
    PreNorm, PreNormParts, RouterShape, Works,
};
use crate::config::{
    ExpertSizes, Heads, Result, Trunk, positive, refuse, require_silu, text_config,
};
use crate::loader::Loader;
use crate::rotary::Rotary;
use snowmelt_backend::Glu;
use snowmelt_weights::ConfigView;

pub(crate) fn load<L: Loader>(config: &ConfigView<'_>, l: &mut L) -> LoadedAs<L> {
    let text = text_config(config)?;
    require_silu(&text)?;
    if text.opt_bool("use_sliding_window")?.unwrap_or(false) {
        return refuse("use_sliding_window", true, "`false`");
    }
    let trunk = Trunk::read(config, &text)?;
    let (d_model, eps) = (trunk.d_model, trunk.eps);
    let heads = Heads::read(&text, d_model)?;
    let rotary = Rotary::read(&text, heads.d_head, trunk.context_max)?;
    let plain = AttentionShape::plain(heads, d_model, eps);
    let attention = AttentionShape { norm_plus: Some(0.0), ..plain };
    let renormalise = text.opt_bool("norm_topk_prob")?.unwrap_or(false);
    let sizes = ExpertSizes::read(&text)?;
    let moe = MoeShape::silu(d_model, sizes, RouterShape::softmax(renormalise));
    let dense = dense_layers(&text, trunk.n_layers)?;
    let d_mlp = match dense.contains(&true) {
        true => positive("intermediate_size", text.usize("intermediate_size")?)?,
        false => 0,
    };
    let used = dense.contains(&false).then_some(moe);
    let parts = PreNormParts { trunk, norm_plus: 0.0, moe: used, d_mlp };
    let works = |l: &mut L| Works {
        attention: Some(AttentionWork::load(l, attention, &rotary)),
        ..Works::default()
    };
    let model = PreNorm::load(l, &parts, works, |l, index| {
        let mixer = Attention::load(l, attention, index, &format!("layers.{index}.self_attn"))?;
        let name = format!("layers.{index}.mlp");
        let ffn = match dense[index] {
            true => Ffn::Mlp(Mlp::load(l, Glu::Silu, [d_model, d_mlp], &name)?),
            false => Ffn::Moe(Moe::load(l, moe, index, &name)?),
        };
        Ok(LayerParts { mixer: Mixer::Attention(mixer), ffn })
    })?;
    Ok((model, trunk))
}

/// Layers with a dense MLP instead of experts: those that `mlp_only_layers` names, and all but
/// every `decoder_sparse_step`-th.
pub(crate) fn dense_layers(text: &ConfigView<'_>, n_layers: usize) -> Result<Vec<bool>> {
    let step = positive("decoder_sparse_step", text.usize_or("decoder_sparse_step", 1)?)?;
    let named = text.opt_usizes("mlp_only_layers")?.unwrap_or_default();
    let is_dense = |layer: usize| named.contains(&layer) || !(layer + 1).is_multiple_of(step);
    Ok((0..n_layers).map(is_dense).collect())
}
