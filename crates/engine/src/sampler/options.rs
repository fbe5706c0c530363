//! What can be asked of the sampler, and why it refuses.

use serde_json::Value;

/// How the next token is chosen. The default draws from the model's own distribution:
/// temperature 1 and everything else off (Hugging Face's defaults, except its hidden `top_k` 50).
#[derive(Debug, Clone, PartialEq)]
pub struct SamplerOptions {
    /// Divides the logits; 0 takes the most likely token, the lowest id of several.
    pub temperature: f32,
    /// Keeps this many of the most likely tokens; 0 is off.
    pub top_k: usize,
    /// Keeps the most likely tokens that together reach this probability; 1 is off.
    pub top_p: f32,
    /// Drops tokens less likely than this share of the most likely one; 0 is off.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens seen in prompt or output; 1 is
    /// off.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of generated tokens; 0 is off.
    pub presence_penalty: f32,
    /// Subtracted from the logits of generated tokens once for each time; 0 is off.
    pub frequency_penalty: f32,
    /// The three penalties see this many of the last tokens, prompt included; `None` is all.
    pub penalty_window: Option<usize>,
    /// Added to the logits of these tokens; negative infinity bans one, entries for one token add
    /// up.
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of the draws; `None` takes one from the system, see
    /// [`Sampler::seed`](super::Sampler::seed).
    pub seed: Option<u64>,
}

impl Default for SamplerOptions {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            penalty_window: None,
            logit_bias: Vec::new(),
            seed: None,
        }
    }
}

impl SamplerOptions {
    /// Longest [`penalty_window`](Self::penalty_window), in tokens.
    pub const PENALTY_WINDOW_MAX: usize = 1 << 20;

    /// The most likely token, always.
    #[must_use]
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// Options from a `generation_config.json`.
    ///
    /// Absent or null fields keep the default. `do_sample: false` sets the temperature to 0 and
    /// keeps the rest; without `do_sample` the other fields decide. `top_k: -1` is off, as in vLLM.
    ///
    /// # Errors
    /// When a field has the wrong type or a value out of range.
    pub fn from_generation_config(config: &Value) -> Result<Self, SamplerError> {
        if !config.is_object() && !config.is_null() {
            return Err(mistyped("generation config", config, "an object"));
        }
        let mut options = Self::default();
        for (field, slot) in [
            ("temperature", &mut options.temperature),
            ("top_p", &mut options.top_p),
            ("min_p", &mut options.min_p),
            ("repetition_penalty", &mut options.repetition_penalty),
            ("presence_penalty", &mut options.presence_penalty),
            ("frequency_penalty", &mut options.frequency_penalty),
        ] {
            if let Some(value) = present(config, field) {
                *slot = value.as_f64().ok_or_else(|| mistyped(field, value, "a number"))? as f32;
            }
        }
        if let Some(value) = present(config, "top_k") {
            let off = (value.as_i64() == Some(-1)).then_some(0);
            options.top_k = off
                .or_else(|| value.as_u64().and_then(|k| usize::try_from(k).ok()))
                .ok_or_else(|| mistyped("top_k", value, "an integer of at least 0, or -1"))?;
        }
        options.check_ranges()?;
        if let Some(value) = present(config, "do_sample") {
            let sampled = value.as_bool().ok_or_else(|| mistyped("do_sample", value, "a bool"))?;
            if !sampled {
                options.temperature = 0.0;
            }
        }
        Ok(options)
    }

    /// Checks every field for a vocabulary of `n_vocab` tokens.
    ///
    /// # Errors
    /// Names the first field that is out of range.
    pub fn validate(&self, n_vocab: usize) -> Result<(), SamplerError> {
        if n_vocab == 0 || u32::try_from(n_vocab).is_err() {
            return Err(SamplerError::VocabSize { found: n_vocab });
        }
        self.check_ranges()?;
        for &(token, bias) in &self.logit_bias {
            if token as usize >= n_vocab {
                return Err(SamplerError::BiasToken { token, n_vocab });
            }
            if bias.is_nan() || bias == f32::INFINITY {
                return Err(SamplerError::BiasValue { token, found: bias });
            }
        }
        Ok(())
    }

    fn check_ranges(&self) -> Result<(), SamplerError> {
        let check = |ok: bool, field, found, expected| {
            if ok { Ok(()) } else { Err(SamplerError::Range { field, found, expected }) }
        };
        let (t, p, m) = (self.temperature, self.top_p, self.min_p);
        check(t.is_finite() && t >= 0.0, "temperature", t, "a finite number of at least 0")?;
        check(p > 0.0 && p <= 1.0, "top_p", p, "a number above 0 and at most 1")?;
        check((0.0..=1.0).contains(&m), "min_p", m, "a number from 0 to 1")?;
        let r = self.repetition_penalty;
        check(r.is_finite() && r > 0.0, "repetition_penalty", r, "a finite number above 0")?;
        let (p, f) = (self.presence_penalty, self.frequency_penalty);
        check(p.is_finite(), "presence_penalty", p, "a finite number")?;
        check(f.is_finite(), "frequency_penalty", f, "a finite number")?;
        match self.penalty_window {
            Some(found) if found > Self::PENALTY_WINDOW_MAX => Err(SamplerError::Window { found }),
            _ => Ok(()),
        }
    }

    pub(super) fn penalises(&self) -> bool {
        let off = self.repetition_penalty == 1.0
            && self.presence_penalty == 0.0
            && self.frequency_penalty == 0.0;
        !off && self.penalty_window != Some(0)
    }
}

fn present<'a>(config: &'a Value, field: &str) -> Option<&'a Value> {
    config.get(field).filter(|value| !value.is_null())
}

fn mistyped(field: &'static str, value: &Value, expected: &'static str) -> SamplerError {
    let found = match value {
        Value::Null => "null".to_owned(),
        Value::Bool(_) | Value::Number(_) => format!("`{value}`"),
        Value::String(_) => "a string".to_owned(),
        Value::Array(_) => "an array".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    };
    SamplerError::Type { field, found, expected }
}

/// Why options or logits are refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SamplerError {
    /// A field of the generation config has the wrong type.
    #[error("`{field}` is {found}, expected {expected}")]
    Type {
        /// Field name.
        field: &'static str,
        /// Its kind, or its value if that is short.
        found: String,
        /// What would be right.
        expected: &'static str,
    },
    /// A number is out of range.
    #[error("`{field}` is `{found}`, expected {expected}")]
    Range {
        /// Field name.
        field: &'static str,
        /// Its value.
        found: f32,
        /// What would be right.
        expected: &'static str,
    },
    /// The penalty window is too long to be held.
    #[error(
        "`penalty_window` is `{found}`, expected at most {max}\n\
         leave it out to count every token",
        max = SamplerOptions::PENALTY_WINDOW_MAX
    )]
    Window {
        /// Its value, in tokens.
        found: usize,
    },
    /// A biased token is not in the vocabulary.
    #[error("`logit_bias` names token `{token}`, expected a token below {n_vocab}")]
    BiasToken {
        /// Token id.
        token: u32,
        /// Size of the vocabulary.
        n_vocab: usize,
    },
    /// A bias is not a number, or positive infinity.
    #[error(
        "`logit_bias` of token `{token}` is `{found}`, expected a finite number, or negative \
         infinity to ban it"
    )]
    BiasValue {
        /// Token id.
        token: u32,
        /// Its bias.
        found: f32,
    },
    /// The vocabulary has no token, or more than a token id can name.
    #[error("`n_vocab` is `{found}`, expected 1 to {max}", max = u32::MAX)]
    VocabSize {
        /// Size of the vocabulary.
        found: usize,
    },
    /// The model returned a logit that is no number, or positive infinity.
    #[error("the logit of token `{index}` is `{value}`, expected a finite number")]
    NotFinite {
        /// Token id.
        index: usize,
        /// Its logit.
        value: f32,
    },
    /// No token is left: every logit is negative infinity, after bias.
    #[error("all {n_vocab} tokens are masked, expected at least one that may follow")]
    AllMasked {
        /// Size of the vocabulary.
        n_vocab: usize,
    },
    /// A saved generator state that no generator can have.
    #[error("the saved state of the sampler is all zeros\nthe snapshot is damaged")]
    RngState,
}
