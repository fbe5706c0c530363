//! A loaded model, its memory and its sessions: token ids in, token ids out.
//!
//! * [`Plan`] turns a budget into slots, context and chunk, before anything is allocated.
//! * [`Engine`] holds the trunk, the expert store and the state of all sessions; one
//!   [`Engine::step`] takes rows of several sessions.
//! * [`Sampler`] turns logits into a token; [`Engine::generate`] is the decode loop.
//! * [`pack`](mod@pack) writes the packed container; [`perplexity`](mod@perplexity) measures.
#![forbid(unsafe_code)]

mod capture;
mod engine;
mod error;
mod experts;
mod files;
mod finite;
mod generate;
pub mod pack;
pub mod perplexity;
mod plan;
mod sampler;
mod state;
mod tables;

pub use capture::{Capture, CaptureOptions, Captured};
pub use engine::{Engine, Feed, Outputs, SessionId, Sources};
pub use error::EngineError;
pub use experts::{Io, StoreFetch};
pub use files::available_memory;
pub use generate::{Finish, GenerateOptions, end_of_text};
pub use plan::{EngineOptions, Item, Plan, Residency, Size};
pub use sampler::{Sampler, SamplerError, SamplerOptions, nll};
pub use snowmelt_expert_store::{LayerStats, RowStats, Scope, Stats, StrategyKind};
pub use snowmelt_model::{ModelOptions, Qsa};
