//! Flags of the sampler.

use anyhow::{Result, anyhow};
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use serde_json::Value;
use snowmelt_engine::{SamplerError, SamplerOptions};

/// How the next token is chosen. What is not given comes from the model's
/// `generation_config.json`.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Sampling", allow_negative_numbers = true)]
pub(crate) struct SamplingArgs {
    /// Divides the logits; 0 always takes the likeliest token
    #[arg(long = "temp", visible_alias = "temperature", value_name = "T")]
    #[arg(value_parser = number(|options, t| options.temperature = t))]
    pub(crate) temperature: Option<f32>,
    /// Choose among the K likeliest tokens; 0 is off
    #[arg(long, value_name = "K")]
    pub(crate) top_k: Option<u32>,
    /// Choose among the likeliest tokens that reach probability P; 1 is off
    #[arg(long, value_name = "P", value_parser = number(|options, p| options.top_p = p))]
    pub(crate) top_p: Option<f32>,
    /// Leave out tokens less likely than P times the likeliest; 0 is off
    #[arg(long, value_name = "P", value_parser = number(|options, p| options.min_p = p))]
    pub(crate) min_p: Option<f32>,
    /// Divides the logits of tokens already there; 1 is off
    #[arg(long = "repeat-penalty", visible_alias = "repetition-penalty", value_name = "X")]
    #[arg(value_parser = number(|options, x| options.repetition_penalty = x))]
    pub(crate) repetition_penalty: Option<f32>,
    /// Subtracted from the logits of generated tokens
    #[arg(long, value_name = "X")]
    #[arg(value_parser = number(|options, x| options.presence_penalty = x))]
    pub(crate) presence_penalty: Option<f32>,
    /// The same, once for each time they were generated
    #[arg(long, value_name = "X")]
    #[arg(value_parser = number(|options, x| options.frequency_penalty = x))]
    pub(crate) frequency_penalty: Option<f32>,
    /// Added to the logit of one token, `-inf` bans it; may be repeated
    #[arg(long = "logit-bias", value_name = "ID=VALUE", value_parser = bias)]
    pub(crate) logit_bias: Vec<(u32, f32)>,
    /// The same seed gives the same text
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,
    /// Ends the answer before this text; may be repeated
    #[arg(long, value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) stop: Vec<String>,
    /// Most tokens to generate [default: until the model ends or the context is full]
    #[arg(short = 'n', long, value_name = "N")]
    pub(crate) max_tokens: Option<usize>,
    /// Go on when the model says that it has finished
    #[arg(long)]
    pub(crate) ignore_eos: bool,
}

/// Parses a number for the option that `set` sets, in the range that the sampler has for it.
fn number(
    set: fn(&mut SamplerOptions, f32),
) -> impl Fn(&str) -> Result<f32, String> + Clone + Send + Sync {
    move |text| {
        let value = text.parse().map_err(|_| "expected a number".to_owned())?;
        let mut options = SamplerOptions::default();
        set(&mut options, value);
        match options.validate(1) {
            Ok(()) => Ok(value),
            Err(SamplerError::Range { expected, .. }) => Err(format!("expected {expected}")),
            Err(error) => Err(error.to_string()),
        }
    }
}

fn bias(text: &str) -> Result<(u32, f32), &'static str> {
    let (id, value) = text.split_once('=').ok_or("expected ID=VALUE, such as `42=-1.5`")?;
    let id = id.trim().parse().map_err(|_| "expected a token id before the `=`")?;
    let value: f32 = value.trim().parse().map_err(|_| "expected a number after the `=`")?;
    if value.is_nan() || value == f32::INFINITY {
        return Err("expected a finite number after the `=`, or `-inf`");
    }
    Ok((id, value))
}

impl SamplingArgs {
    /// The model's own options with these on top, checked.
    pub(crate) fn options(&self, config: Option<&Value>, n_vocab: usize) -> Result<SamplerOptions> {
        let mut options = match config {
            Some(config) => SamplerOptions::from_generation_config(config)
                .map_err(|error| anyhow!("`generation_config.json`: {error}"))?,
            None => SamplerOptions::default(),
        };
        let set = |slot: &mut f32, value: Option<f32>| *slot = value.unwrap_or(*slot);
        set(&mut options.temperature, self.temperature);
        set(&mut options.top_p, self.top_p);
        set(&mut options.min_p, self.min_p);
        set(&mut options.repetition_penalty, self.repetition_penalty);
        set(&mut options.presence_penalty, self.presence_penalty);
        set(&mut options.frequency_penalty, self.frequency_penalty);
        options.top_k = self.top_k.map_or(options.top_k, |k| k as usize);
        options.seed = self.seed.or(options.seed);
        options.logit_bias.extend_from_slice(&self.logit_bias);
        options.validate(n_vocab).map_err(|error| match error {
            SamplerError::BiasToken { token, n_vocab } => {
                anyhow!("`--logit-bias` names token {token}, expected one below {n_vocab}")
            }
            error => error.into(),
        })?;
        Ok(options)
    }

    /// Leaves a setting to the model again. False where there is none of that name.
    pub(crate) fn unset(&mut self, name: &str) -> bool {
        match name {
            "temp" | "temperature" => self.temperature = None,
            "top-k" => self.top_k = None,
            "top-p" => self.top_p = None,
            "min-p" => self.min_p = None,
            "repeat-penalty" | "repetition-penalty" => self.repetition_penalty = None,
            "presence-penalty" => self.presence_penalty = None,
            "frequency-penalty" => self.frequency_penalty = None,
            "logit-bias" => self.logit_bias.clear(),
            "seed" => self.seed = None,
            "stop" => self.stop.clear(),
            "max-tokens" => self.max_tokens = None,
            _ => return false,
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::bias;

    #[test]
    fn biases_are_read() {
        assert_eq!(bias("42=-1.5"), Ok((42, -1.5)));
        assert_eq!(bias("7=-inf"), Ok((7, f32::NEG_INFINITY)));
        for text in ["", "42", "=1", "x=1", "1=x", "-1=1", "4294967296=1", "1=nan", "1=inf"] {
            assert!(bias(text).is_err(), "{text}");
        }
    }
}
