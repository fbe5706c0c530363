//! GPT-OSS: attention with biases and sinks, a window in every second layer, experts with biases.
//!
//! ```text
//! x += o_proj(attention(rope q_proj x, rope k_proj x, v_proj x; sinks, window)), all with biases
//! w = softmax of the top_k greatest of (router x + bias)
//! x += sum of w_e (down(clamped_glu(gate x + b, up x + b)) + b)
//! ```
//! Source: transformers `models/gpt_oss/modeling_gpt_oss.py`.
//! Checkpoints: gpt-oss-20b and gpt-oss-120b (mxfp4 experts), and their bf16 conversions.

use crate::blocks::{
    Attention, AttentionShape, AttentionWork, Biases, Ffn, LayerParts, LoadedAs, Mixer, Moe,
    MoeShape, PreNorm, PreNormParts, RouterShape, Works,
};
use crate::config::{
    ExpertSizes, Heads, Result, Trunk, positive, refuse, require_silu, sliding_layers, text_config,
};
use crate::experts::Fused;
use crate::loader::Loader;
use crate::rotary::Rotary;
use snowmelt_backend::{Glu, Scores};
use snowmelt_weights::ConfigView;

/// Factor within the sigmoid where the config has none.
const ALPHA: f64 = 1.702;
/// Bound of gate and up where the config has none.
const LIMIT: f64 = 7.0;

pub(crate) fn load<L: Loader>(config: &ConfigView<'_>, l: &mut L) -> LoadedAs<L> {
    let text = text_config(config)?;
    require_silu(&text)?;
    let trunk = Trunk::read(config, &text)?;
    let (d_model, eps) = (trunk.d_model, trunk.eps);
    let heads = Heads::read(&text, d_model)?;
    if text.opt_bool("attention_bias")? == Some(false) {
        return refuse("attention_bias", false, "`true`");
    }
    let rotary = Rotary::read(&text, heads.d_head, trunk.context_max)?;
    let plain = AttentionShape::plain(heads, d_model, eps);
    let attention = AttentionShape { biases: Biases::All, sinks: true, ..plain };
    let windows = windows(&text, trunk.n_layers)?;
    let moe = moe_shape(&text, d_model)?;
    let parts = PreNormParts { trunk, norm_plus: 0.0, moe: Some(moe), d_mlp: 0 };
    let works = |l: &mut L| Works {
        attention: Some(AttentionWork::load(l, attention, &rotary)),
        ..Works::default()
    };
    let model = PreNorm::load(l, &parts, works, |l, index| {
        let shape = AttentionShape { window: windows[index], ..attention };
        let mixer = Attention::load(l, shape, index, &format!("layers.{index}.self_attn"))?;
        let moe = Moe::load(l, moe, index, &format!("layers.{index}.mlp"))?;
        Ok(LayerParts { mixer: Mixer::Attention(mixer), ffn: Ffn::Moe(moe) })
    })?;
    Ok((model, trunk))
}

fn moe_shape(text: &ConfigView<'_>, d_model: usize) -> Result<MoeShape> {
    let n_experts =
        positive("num_local_experts", text.usize_any(&["num_local_experts", "num_experts"])?)?;
    let top_k = text.usize_any(&["num_experts_per_tok", "experts_per_token"])?;
    let top_k = positive("num_experts_per_tok", top_k)?;
    if top_k > n_experts {
        let expected = format!("at most `num_local_experts` = {n_experts}");
        return refuse("num_experts_per_tok", top_k, expected);
    }
    let d_expert = positive("intermediate_size", text.usize("intermediate_size")?)?;
    let number = |field: &'static str, default: f64| {
        let value = text.opt_f64(field)?.unwrap_or(default);
        match value.is_finite() && value > 0.0 {
            true => Ok(value as f32),
            false => refuse(field, value, "a number above 0"),
        }
    };
    let glu = Glu::Clamped {
        alpha: number("swiglu_alpha", ALPHA)?,
        limit: number("swiglu_limit", LIMIT)?,
    };
    let router = RouterShape {
        scores: Scores::SoftmaxOfChosen,
        bias: Some("router.bias"),
        ..RouterShape::softmax(false)
    };
    let shape = MoeShape::silu(d_model, ExpertSizes { n_experts, top_k, d_expert }, router);
    Ok(MoeShape { glu, router_name: "router", fused: Fused::Turns, ..shape })
}

/// The window of each layer: `sliding_window` in those that `layer_types` names, else in the first
/// and every second after it.
fn windows(text: &ConfigView<'_>, n_layers: usize) -> Result<Vec<Option<usize>>> {
    let window = positive("sliding_window", text.usize_or("sliding_window", 128)?)?;
    let every_second = || (0..n_layers).map(|layer| layer.is_multiple_of(2)).collect();
    let sliding = sliding_layers(text, n_layers)?.unwrap_or_else(every_second);
    Ok(sliding.into_iter().map(|sliding| sliding.then_some(window)).collect())
}
