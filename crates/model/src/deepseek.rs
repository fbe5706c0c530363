//! DeepSeek-V3 and V3.2: latent attention, sigmoid routing within groups of experts, an ungated
//! shared expert; V3.2 attends to the tokens that an indexer chooses.
//!
//! ```text
//! x += latent_attention(norm x)
//! x += sum of top_k experts + shared_experts(x), or a dense MLP in the first layers
//! ```
//! The layer after the last is a head that predicts a further token; it is not part of the trunk.
//! Source: transformers `models/deepseek_v3/` and `models/deepseek_v32/`.
//! Checkpoints: DeepSeek-V3, R1, V3.1, Kimi-K2, Cogito-v2-671B; DeepSeek-V3.2.

use crate::blocks::{
    Ffn, Latent, LatentShape, LatentWork, LayerParts, LoadedAs, Mixer, Mlp, Moe, MoeShape, PreNorm,
    PreNormParts, RouterShape, SharedShape, Works,
};
use crate::config::{
    ExpertSizes, Result, Trunk, multiple, positive, refuse, require_silu, text_config,
};
use crate::loader::Loader;
use crate::rotary::Rotary;
use snowmelt_backend::{Glu, Groups, Scores};
use snowmelt_weights::ConfigView;

/// Added to the sum of the chosen weights.
const WEIGHT_EPS: f32 = 1e-20;

pub(crate) fn load<L: Loader>(config: &ConfigView<'_>, l: &mut L) -> LoadedAs<L> {
    load_latent(config, l, false)
}

/// With the indexer.
pub(crate) mod v32 {
    use super::{ConfigView, LoadedAs, Loader, load_latent};

    pub(crate) fn load<L: Loader>(config: &ConfigView<'_>, l: &mut L) -> LoadedAs<L> {
        load_latent(config, l, true)
    }
}

fn load_latent<L: Loader>(config: &ConfigView<'_>, l: &mut L, indexed: bool) -> LoadedAs<L> {
    let text = text_config(config)?;
    require_silu(&text)?;
    let trunk = Trunk::read(config, &text)?;
    let d_model = trunk.d_model;
    let shape = LatentShape::read(&text, d_model, indexed)?;
    let rotary = Rotary::of(&text, shape.d_rope, 1.0, trunk.context_max)?;
    let dense_count = text.usize_or("first_k_dense_replace", 0)?;
    let step = positive("moe_layer_freq", text.usize_or("moe_layer_freq", 1)?)?;
    let is_dense = |layer: usize| layer < dense_count || !layer.is_multiple_of(step);
    let d_mlp = match (0..trunk.n_layers).any(is_dense) {
        true => positive("intermediate_size", text.usize("intermediate_size")?)?,
        false => 0,
    };
    let moe = match (0..trunk.n_layers).all(is_dense) {
        true => None,
        false => Some(moe_shape(&text, d_model)?),
    };
    let parts = PreNormParts { trunk, norm_plus: 0.0, moe, d_mlp };
    let works =
        |l: &mut L| Works { latent: Some(LatentWork::load(l, shape, &rotary)), ..Works::default() };
    let model = PreNorm::load(l, &parts, works, |l, index| {
        let mixer = Latent::load(l, shape, index, &format!("layers.{index}.self_attn"))?;
        let name = format!("layers.{index}.mlp");
        let ffn = match moe.filter(|_| !is_dense(index)) {
            Some(shape) => Ffn::Moe(Moe::load(l, shape, index, &name)?),
            None => Ffn::Mlp(Mlp::load(l, Glu::Silu, [d_model, d_mlp], &name)?),
        };
        Ok(LayerParts { mixer: Mixer::Latent(mixer), ffn })
    })?;
    Ok((model, trunk))
}

fn moe_shape(text: &ConfigView<'_>, d_model: usize) -> Result<MoeShape> {
    let expect = |field: &'static str, expected: &'static str| match text.opt_str(field)? {
        Some(other) if other != expected => refuse(field, other, format!("`{expected}`")),
        _ => Ok(()),
    };
    expect("topk_method", "noaux_tc")?;
    expect("scoring_func", "sigmoid")?;
    let sizes = ExpertSizes::read(text)?;
    let count = positive("n_group", text.usize_or("n_group", 1)?)?;
    multiple("n_routed_experts", sizes.n_experts, "n_group", count)?;
    let kept = positive("topk_group", text.usize_or("topk_group", count)?)?;
    if kept > count {
        return refuse("topk_group", kept, format!("at most `n_group` = {count}"));
    }
    let available = kept * (sizes.n_experts / count);
    if sizes.top_k > available {
        let expected = format!("at most the {available} experts of `topk_group` = {kept} groups");
        return refuse("num_experts_per_tok", sizes.top_k, expected);
    }
    let renormalise = text.opt_bool("norm_topk_prob")?.unwrap_or(true);
    let factor = text.opt_f64("routed_scaling_factor")?.unwrap_or(1.0);
    if !factor.is_finite() {
        return refuse("routed_scaling_factor", factor, "a finite number");
    }
    let router = RouterShape {
        scores: Scores::Sigmoid,
        choice_bias: Some("gate.e_score_correction_bias"),
        bias: None,
        groups: (count > 1).then_some(Groups { count, kept }),
        renormalise: renormalise.then_some(WEIGHT_EPS),
        factor: factor as f32,
    };
    let n_shared = text.usize_or("n_shared_experts", 0)?;
    let width = n_shared * sizes.d_expert;
    let shared = SharedShape { name: "shared_experts", width, gated: false };
    let shape = MoeShape::silu(d_model, sizes, router);
    Ok(MoeShape { shared: (n_shared > 0).then_some(shared), ..shape })
}
