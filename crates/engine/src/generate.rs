//! The decode loop.

use crate::engine::{Engine, Outputs, SessionId};
use crate::error::Result;
use crate::sampler::Sampler;
use snowmelt_backend::Backend;
use std::ops::ControlFlow;

/// When generation ends.
#[derive(Clone, Debug, Default)]
pub struct GenerateOptions {
    /// Most tokens to generate; `None`: until the context is full.
    pub tokens_max: Option<usize>,
    /// Tokens that end it; they are fed to no one and shown to no one.
    pub stop_ids: Vec<u32>,
}

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// A stop token came.
    Stop(u32),
    /// `tokens_max` was reached.
    Length,
    /// The context is full.
    Context,
    /// The caller broke off.
    Broken,
}

impl Finish {
    /// A word for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Stop(_) => "stop",
            Self::Length => "length",
            Self::Context => "context",
            Self::Broken => "interrupted",
        }
    }
}

impl<B: Backend> Engine<B> {
    /// Generates from the logits that the last step of `session` left. `emit` sees each token as
    /// soon as it is chosen. The session then holds all tokens emitted but the last.
    ///
    /// # Errors
    /// When a step fails or logits are not finite.
    pub fn generate(
        &mut self,
        session: SessionId,
        sampler: &mut Sampler,
        options: &GenerateOptions,
        emit: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Finish> {
        let mut generated = 0;
        loop {
            if options.tokens_max.is_some_and(|most| generated >= most) {
                return Ok(Finish::Length);
            }
            let token = sampler.sample(self.logits(session))?;
            if options.stop_ids.contains(&token) {
                return Ok(Finish::Stop(token));
            }
            sampler.accept(token);
            generated += 1;
            if emit(token).is_break() {
                return Ok(Finish::Broken);
            }
            if self.tokens(session).len() + 1 > self.plan().context_tokens {
                return Ok(Finish::Context);
            }
            let last = options.tokens_max == Some(generated);
            if last {
                return Ok(Finish::Length);
            }
            self.step_one(session, &[token], Outputs::Last, &mut |_, _| {})?;
        }
    }
}

/// Ids that end a text: `eos_token_id` of the generation config, else of the config or its
/// `text_config`; a number or a list of them.
pub fn end_of_text(
    generation_config: Option<&serde_json::Value>,
    config: &serde_json::Value,
) -> Vec<u32> {
    let ids = |object: &serde_json::Value| -> Vec<u32> {
        let id = |value: &serde_json::Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        match object.get("eos_token_id") {
            Some(serde_json::Value::Array(list)) => list.iter().filter_map(id).collect(),
            Some(value) => id(value).into_iter().collect(),
            None => Vec::new(),
        }
    };
    let places = [generation_config, Some(config), config.get("text_config")];
    places.into_iter().flatten().map(ids).find(|ids| !ids.is_empty()).unwrap_or_default()
}
