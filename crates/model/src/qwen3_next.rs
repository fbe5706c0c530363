//! Qwen3-Next: gated DeltaNet in three layers of four, gated attention in the fourth, routed
//! experts beside a gated shared one. All norms but the DeltaNet's own are stored centred on zero.
//!
//! ```text
//! x += delta_net(norm x)  or  x += o_proj(attention(q, k, v) * sigmoid(gate))
//! x += sum of top_k experts + sigmoid(shared_expert_gate x) shared_expert(x)
//! ```
//! The input projections of the DeltaNet are grouped by key head on disk.
//! Source: transformers `models/qwen3_next/modeling_qwen3_next.py`.
//! Checkpoints: Qwen3-Next-80B-A3B.

use crate::blocks::{
    Attention, AttentionShape, AttentionWork, DeltaNet, DeltaShape, DeltaWork, Ffn, LayerParts,
    LoadedAs, Mixer, Mlp, Moe, MoeShape, Packing, PreNorm, PreNormParts, RouterShape, SharedShape,
    Works,
};
use crate::config::{
    ExpertSizes, Heads, Result, Trunk, full_attention_layers, positive, require_silu, text_config,
};
use crate::loader::Loader;
use crate::qwen3_moe::dense_layers;
use crate::rotary::Rotary;
use snowmelt_backend::Glu;
use snowmelt_weights::ConfigView;

pub(crate) fn load<L: Loader>(config: &ConfigView<'_>, l: &mut L) -> LoadedAs<L> {
    let text = text_config(config)?;
    let renormalise = text.opt_bool("norm_topk_prob")?.unwrap_or(true);
    let experts = Some((ExpertSizes::read(&text)?, renormalise));
    let dense = |trunk: &Trunk| dense_layers(&text, trunk.n_layers);
    load_hybrid(config, &text, l, Packing::ByKeyHead, experts, dense)
}

/// The part that Qwen3.5 shares: everything but how projections are packed and which layers have
/// experts. `experts`: their sizes, and whether the router renormalises; none: a dense model.
pub(crate) fn load_hybrid<L: Loader>(
    config: &ConfigView<'_>,
    text: &ConfigView<'_>,
    l: &mut L,
    packing: Packing,
    experts: Option<(ExpertSizes, bool)>,
    dense: impl FnOnce(&Trunk) -> Result<Vec<bool>>,
) -> LoadedAs<L> {
    require_silu(text)?;
    let trunk = Trunk::read(config, text)?;
    let (d_model, eps) = (trunk.d_model, trunk.eps);
    let heads = Heads::read(text, d_model)?;
    let rotary = Rotary::read(text, heads.d_head, trunk.context_max)?;
    let plain = AttentionShape::plain(heads, d_model, eps);
    let attention = AttentionShape { gated: true, norm_plus: Some(1.0), ..plain };
    let full = full_attention_layers(text, trunk.n_layers)?;
    let delta = match full.contains(&false) {
        true => Some(DeltaShape::read(text, d_model, eps)?),
        false => None,
    };
    let dense = dense(&trunk)?;
    let d_mlp = match dense.contains(&true) {
        true => positive("intermediate_size", text.usize("intermediate_size")?)?,
        false => 0,
    };
    let moe = match experts.filter(|_| dense.contains(&false)) {
        Some((sizes, renormalise)) => {
            let shared = Some(gated_shared_expert(text)?);
            let plain = MoeShape::silu(d_model, sizes, RouterShape::softmax(renormalise));
            Some(MoeShape { shared, ..plain })
        }
        None => None,
    };
    let parts = PreNormParts { trunk, norm_plus: 1.0, moe, d_mlp };
    let works = |l: &mut L| Works {
        attention: Some(AttentionWork::load(l, attention, &rotary)),
        delta: delta.map(|shape| DeltaWork::load(l, shape)),
        ..Works::default()
    };
    let model = PreNorm::load(l, &parts, works, |l, index| {
        let mixer = if let Some(shape) = delta.filter(|_| !full[index]) {
            let name = format!("layers.{index}.linear_attn");
            Mixer::DeltaNet(DeltaNet::load(l, shape, packing, index, &name)?)
        } else {
            let name = format!("layers.{index}.self_attn");
            Mixer::Attention(Attention::load(l, attention, index, &name)?)
        };
        let name = format!("layers.{index}.mlp");
        let ffn = match moe.filter(|_| !dense[index]) {
            Some(shape) => Ffn::Moe(Moe::load(l, shape, index, &name)?),
            None => Ffn::Mlp(Mlp::load(l, Glu::Silu, [d_model, d_mlp], &name)?),
        };
        Ok(LayerParts { mixer, ffn })
    })?;
    Ok((model, trunk))
}

/// The shared expert of the Qwen families.
pub(crate) fn gated_shared_expert(text: &ConfigView<'_>) -> Result<SharedShape> {
    let field = "shared_expert_intermediate_size";
    let width = positive(field, text.usize(field)?)?;
    Ok(SharedShape { name: "shared_expert", width, gated: true })
}
