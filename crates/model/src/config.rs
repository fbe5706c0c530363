//! Checks that every family makes on its config.

use crate::error::ModelError;
use snowmelt_weights::ConfigView;

pub(crate) type Result<T, E = ModelError> = std::result::Result<T, E>;

/// The error of one field.
pub(crate) fn refuse<T>(
    field: &'static str,
    found: impl std::fmt::Display,
    expected: impl Into<String>,
) -> Result<T> {
    Err(ModelError::Config { field, found: found.to_string(), expected: expected.into() })
}

/// `value` is at least 1.
pub(crate) fn positive(field: &'static str, value: usize) -> Result<usize> {
    if value == 0 { refuse(field, value, "at least 1") } else { Ok(value) }
}

/// `value` is a positive multiple of `of`.
pub(crate) fn multiple(
    field: &'static str,
    value: usize,
    of_field: &str,
    of: usize,
) -> Result<usize> {
    positive(field, value)?;
    if of == 0 || !value.is_multiple_of(of) {
        return refuse(field, value, format!("a multiple of `{of_field}` = {of}"));
    }
    Ok(value)
}

/// Most elements that a row of scratch or a state of a sequence may have: above it the config is
/// wrong, and sizes made of it would not fit their types.
const ELEMENTS_MAX: usize = 1 << 31;

/// The product of sizes, the first of which is blamed where it is absurd.
pub(crate) fn product(field: &'static str, sizes: &[usize]) -> Result<usize> {
    let all = sizes.iter().try_fold(1usize, |all, size| all.checked_mul(*size));
    match all.filter(|&all| all <= ELEMENTS_MAX) {
        Some(all) => Ok(all),
        None => {
            let sizes: Vec<String> = sizes.iter().map(usize::to_string).collect();
            let expected = format!("{} to be at most {ELEMENTS_MAX}", sizes.join(" * "));
            refuse(field, sizes[0].as_str(), expected)
        }
    }
}

/// The text part of a config: itself, or `text_config` of a multimodal wrapper.
pub(crate) fn text_config<'a>(config: &ConfigView<'a>) -> Result<ConfigView<'a>> {
    Ok(config.opt_object("text_config")?.unwrap_or_else(|| config.clone()))
}

/// Refuses an activation function other than SiLU.
pub(crate) fn require_silu(config: &ConfigView<'_>) -> Result<()> {
    match config.opt_str("hidden_act")? {
        None | Some("silu" | "swish") => Ok(()),
        Some(other) => refuse("hidden_act", other, "`silu`"),
    }
}

/// More layers than any model has: a table of so many would be made before a tensor is missed.
const LAYERS_MAX: usize = 10_000;

/// Sizes of the residual stream that every family has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Trunk {
    pub(crate) n_layers: usize,
    pub(crate) d_model: usize,
    pub(crate) n_vocab: usize,
    pub(crate) eps: f32,
    pub(crate) tied: bool,
    pub(crate) context_max: usize,
}

impl Trunk {
    /// Reads the fields; `outer` is the wrapper, which may hold `tie_word_embeddings`.
    pub(crate) fn read(outer: &ConfigView<'_>, text: &ConfigView<'_>) -> Result<Self> {
        let tied = match text.opt_bool("tie_word_embeddings")? {
            Some(tied) => tied,
            None => outer.opt_bool("tie_word_embeddings")?.unwrap_or(false),
        };
        let n_layers = positive("num_hidden_layers", text.usize("num_hidden_layers")?)?;
        if n_layers > LAYERS_MAX {
            return refuse("num_hidden_layers", n_layers, format!("at most {LAYERS_MAX}"));
        }
        Ok(Self {
            n_layers,
            d_model: positive("hidden_size", text.usize("hidden_size")?)?,
            n_vocab: positive("vocab_size", text.usize("vocab_size")?)?,
            eps: norm_eps(text)?,
            tied,
            context_max: positive(
                "max_position_embeddings",
                text.usize_or("max_position_embeddings", 4096)?,
            )?,
        })
    }
}

fn norm_eps(text: &ConfigView<'_>) -> Result<f32> {
    let eps = text.opt_f64("rms_norm_eps")?.unwrap_or(1e-6);
    if !(eps.is_finite() && eps >= 0.0) {
        return refuse("rms_norm_eps", eps, "a number that is not negative");
    }
    Ok(eps as f32)
}

/// Sizes of grouped-query attention.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::struct_field_names, reason = "the symbols of the glossary")]
pub(crate) struct Heads {
    pub(crate) n_heads: usize,
    pub(crate) n_kv_heads: usize,
    pub(crate) d_head: usize,
    /// Whether q, k, v and o have biases.
    pub(crate) biased: bool,
}

impl Heads {
    pub(crate) fn read(text: &ConfigView<'_>, d_model: usize) -> Result<Self> {
        let n_heads = positive("num_attention_heads", text.usize("num_attention_heads")?)?;
        let n_kv_heads =
            positive("num_key_value_heads", text.usize_or("num_key_value_heads", n_heads)?)?;
        multiple("num_attention_heads", n_heads, "num_key_value_heads", n_kv_heads)?;
        let d_head = match text.opt_usize("head_dim")? {
            Some(d_head) => positive("head_dim", d_head)?,
            None => multiple("hidden_size", d_model, "num_attention_heads", n_heads)? / n_heads,
        };
        if d_head % 2 == 1 {
            return refuse("head_dim", d_head, "an even number: its halves are rotated together");
        }
        let biased = text.opt_bool("attention_bias")?.unwrap_or(false);
        Ok(Self { n_heads, n_kv_heads, d_head, biased })
    }

    /// Those of one layer: `per_layer_config` of it, else the global fields in `global` layers.
    pub(crate) fn of_layer(
        text: &ConfigView<'_>,
        d_model: usize,
        layer: usize,
        global: bool,
    ) -> Result<Self> {
        let base = Self::read(text, d_model)?;
        let own = match text.opt_object("per_layer_config")? {
            Some(layers) => layers.opt_object(&layer.to_string())?,
            None => None,
        };
        let of = |own_name: &'static str, global_name: &'static str| -> Result<_> {
            let own = own.as_ref().map(|own| own.opt_usize(own_name)).transpose()?.flatten();
            let global = if global { text.opt_usize(global_name)? } else { None };
            Ok(own.or(global))
        };
        let d_head = of("head_dim", "global_head_dim")?.unwrap_or(base.d_head);
        let n_kv_heads = of("num_key_value_heads", "num_global_key_value_heads")?;
        let n_kv_heads = n_kv_heads.unwrap_or(base.n_kv_heads);
        positive("head_dim", d_head)?;
        positive("num_key_value_heads", n_kv_heads)?;
        multiple("num_attention_heads", base.n_heads, "num_key_value_heads", n_kv_heads)?;
        Ok(Self { n_kv_heads, d_head, ..base })
    }
}

/// Sizes of routed experts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertSizes {
    pub(crate) n_experts: usize,
    pub(crate) top_k: usize,
    pub(crate) d_expert: usize,
}

impl ExpertSizes {
    pub(crate) fn read(text: &ConfigView<'_>) -> Result<Self> {
        let names = ["num_experts", "num_local_experts", "n_routed_experts"];
        let n_experts = positive("num_experts", text.usize_any(&names)?)?;
        let top_k = positive("num_experts_per_tok", text.usize("num_experts_per_tok")?)?;
        if top_k > n_experts {
            let expected = format!("at most `num_experts` = {n_experts}");
            return refuse("num_experts_per_tok", top_k, expected);
        }
        let d_expert = positive("moe_intermediate_size", text.usize("moe_intermediate_size")?)?;
        Ok(Self { n_experts, top_k, d_expert })
    }
}

/// `layer_types`, where the config has them: one for each layer.
fn layer_types<'a>(text: &ConfigView<'a>, n_layers: usize) -> Result<Option<Vec<&'a str>>> {
    let types = text.opt_strs("layer_types")?;
    match &types {
        Some(types) if types.len() != n_layers => {
            let expected = format!("`num_hidden_layers` = {n_layers} entries");
            refuse("layer_types", format!("{} entries", types.len()), expected)
        }
        _ => Ok(types),
    }
}

/// Which mixer each layer has: `layer_types`, else every `full_attention_interval`-th is full.
pub(crate) fn full_attention_layers(text: &ConfigView<'_>, n_layers: usize) -> Result<Vec<bool>> {
    attention_layers(text, n_layers, &["full_attention"])
}

/// The same with the spellings of layers that attend.
pub(crate) fn attention_layers(
    text: &ConfigView<'_>,
    n_layers: usize,
    spellings: &[&str],
) -> Result<Vec<bool>> {
    let Some(types) = layer_types(text, n_layers)? else {
        let interval =
            positive("full_attention_interval", text.usize_or("full_attention_interval", 4)?)?;
        return Ok((0..n_layers).map(|layer| (layer + 1).is_multiple_of(interval)).collect());
    };
    let full = |kind: &&str| match *kind {
        "linear_attention" => Ok(false),
        kind if spellings.contains(&kind) => Ok(true),
        other => {
            let attends = spellings.join("` or `");
            refuse("layer_types", other, format!("`linear_attention` or `{attends}`"))
        }
    };
    types.iter().map(full).collect()
}

/// Which layers see a window only, where `layer_types` says it.
pub(crate) fn sliding_layers(text: &ConfigView<'_>, n_layers: usize) -> Result<Option<Vec<bool>>> {
    let Some(types) = layer_types(text, n_layers)? else { return Ok(None) };
    let sliding = |kind: &&str| match *kind {
        "full_attention" => Ok(false),
        "sliding_attention" => Ok(true),
        other => refuse("layer_types", other, "`full_attention` or `sliding_attention`"),
    };
    types.iter().map(sliding).collect::<Result<_>>().map(Some)
}
