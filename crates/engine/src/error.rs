//! Why the engine refuses or fails.

use crate::plan::{EngineOptions, Plan};
use crate::sampler::SamplerError;
use snowmelt_backend::StepError;
use snowmelt_expert_store::StoreError;
use snowmelt_model::ModelError;
use snowmelt_weights::{Encoding, WeightsError};
use std::path::PathBuf;

/// Why the engine refuses or fails.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The model is refused.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The expert store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The sampler refused its options or the logits.
    #[error(transparent)]
    Sampler(#[from] SamplerError),
    /// A step failed; its sessions are empty again.
    #[error("{}", chain(.0))]
    Step(StepError),
    /// The budget is too small.
    #[error("{}", .plan.refusal(.options))]
    Budget {
        /// The plan that failed, with every item.
        plan: Box<Plan>,
        /// What was asked for.
        options: Box<EngineOptions>,
    },
    /// Fewer slots than a step needs.
    #[error(
        "`--slots {slots}` is too few: one token needs {top_k} experts at once, so at least \
         {fewest} slots"
    )]
    Slots {
        /// Asked for.
        slots: u32,
        /// Experts a token.
        top_k: usize,
        /// The least.
        fewest: u32,
    },
    /// A sequence would outgrow its context.
    #[error("{got} tokens do not fit into a context of {limit}")]
    Context {
        /// Tokens of the sequence.
        got: usize,
        /// Planned context.
        limit: usize,
        /// What the config allows.
        model: usize,
    },
    /// A context that the model does not have, or none at all.
    #[error("`--context {asked}` is out of range: this model takes 1 to {model} tokens")]
    ContextRange {
        /// Asked for.
        asked: usize,
        /// What the config allows.
        model: usize,
    },
    /// A step without tokens.
    #[error("the prompt is empty: a model needs at least one token to begin with")]
    EmptyPrompt,
    /// A token id outside the vocabulary.
    #[error("token id {id} at index {index} is out of range: the vocabulary has {n_vocab} tokens")]
    Token {
        /// The id.
        id: u32,
        /// Its index in what was fed.
        index: usize,
        /// Vocabulary size.
        n_vocab: usize,
    },
    /// A value inside the model is NaN or infinite; the session is empty again.
    #[error(
        "{stage} holds {value} at position {position}: the weights are damaged or do not belong \
         together\n`snowmelt verify` checks a packed model"
    )]
    NotFinite {
        /// Stage and layer.
        stage: String,
        /// Position of the token.
        position: usize,
        /// What was found.
        value: f32,
    },
    /// All sessions that were planned for are taken.
    #[error("all {sessions} planned sessions are in use")]
    Sessions {
        /// Planned.
        sessions: usize,
    },
    /// A residency that this checkpoint or machine does not allow.
    #[error("`--residency {wanted}` is not possible: {reason}")]
    Residency {
        /// Asked for.
        wanted: &'static str,
        /// Why not.
        reason: &'static str,
    },
    /// An encoding that weights can be kept in and not converted to.
    #[error(
        "weights are not converted to `{encoding}`: they are kept in it where they are stored so"
    )]
    NotMade {
        /// Asked for.
        encoding: Encoding,
    },
    /// Digests to check reads against are only in packed containers.
    #[error(
        "`--check-reads` needs the digests of a packed container, `{origin}` has none\n\
         hint: `snowmelt pack {origin} DST` makes one"
    )]
    NoDigests {
        /// The model.
        origin: String,
    },
    /// A file of the engine's own could not be handled.
    #[error("could not {action} `{}`: {source}", path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// A text too short to measure.
    #[error("a window needs {window} tokens, the text has {got}\nhint: `--window` sets it")]
    ShortText {
        /// Tokens.
        got: usize,
        /// Window.
        window: usize,
    },
}

/// An error with its causes in one line.
fn chain(error: &StepError) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

impl From<StepError> for EngineError {
    fn from(error: StepError) -> Self {
        Self::Step(error)
    }
}

/// The engine's result.
pub(crate) type Result<T, E = EngineError> = std::result::Result<T, E>;
