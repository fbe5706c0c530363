//! What is checked at open, whatever the family.

use crate::census::Census;
use crate::config::{Result, refuse};
use crate::error::ModelError;
use crate::quantisation;
use crate::registry::{self, ModelOptions};
use snowmelt_weights::{Checkpoint, ConfigView, WeightsError};

/// What the checkpoint needs, from its headers alone.
///
/// # Errors
/// When the family is not known or not the one that the container was packed as, or a tensor or
/// config field is wrong.
pub fn census(checkpoint: &Checkpoint, options: ModelOptions) -> Result<Census> {
    let config = ConfigView::new(checkpoint.config(), "config.json")?;
    let text = config.opt_object("text_config")?;
    if !text.as_ref().is_some_and(|text| text.has("model_type")) {
        config.str("model_type")?;
    }
    let census =
        registry::census(checkpoint, options).map_err(|error| explained(error, &config))?;
    for view in [Some(&config), text.as_ref()].into_iter().flatten() {
        check_end_tokens(view, census.n_vocab)?;
    }
    Ok(census)
}

/// An answer would never end at a token that the model cannot say.
fn check_end_tokens(config: &ConfigView<'_>, n_vocab: usize) -> Result<()> {
    const KEY: &str = "eos_token_id";
    let ids = match config.get(KEY) {
        Some(value) if value.is_array() => config.usizes(KEY)?,
        _ => config.opt_usize(KEY)?.into_iter().collect(),
    };
    match ids.into_iter().find(|&id| id >= n_vocab) {
        Some(id) => refuse(KEY, id, format!("ids below `vocab_size` = {n_vocab}")),
        None => Ok(()),
    }
}

/// Tensors that are not as the family wants them follow from how they are quantised. A checkpoint
/// that was made plain again often keeps the field, and is fine.
fn explained(error: ModelError, config: &ConfigView<'_>) -> ModelError {
    let of_tensors = matches!(
        error,
        ModelError::Surplus { .. }
            | ModelError::Weights(
                WeightsError::MissingTensor { .. }
                    | WeightsError::WrongShape { .. }
                    | WeightsError::UnusableDtype { .. }
            )
    );
    let quantised = config.opt_object("quantization_config").ok().flatten();
    match quantised.map(|fields| fields.opt_str("quant_method").ok().flatten()) {
        Some(method)
            if of_tensors && !method.is_some_and(|m| quantisation::METHODS.contains(&m)) =>
        {
            let method = method.unwrap_or("no method").to_owned();
            ModelError::Quantised { method, source: Box::new(error) }
        }
        _ => error,
    }
}
