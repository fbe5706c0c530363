//! Model families: one file each, from `config.json` to the forward pass.
//!
//! A family file holds its `Config` (fields named as in `config.json`), its tensor names, the state
//! it keeps, and `load`. `load` is written once over [`Loader`] and runs twice: over a
//! [`Census`], which reads headers alone and answers what the model needs, and over the loader
//! of a backend, which reads weights. What three families share unchanged lies in `blocks`.
//!
//! Nothing here names a file, a thread, a cache or an environment variable.
#![forbid(unsafe_code)]

mod blocks;
mod census;
mod config;
mod error;
mod experts;
mod loader;
mod mtp;
mod ngram;
mod open;
mod outline;
mod probe;
mod quantisation;
#[expect(unreachable_pub, reason = "`open` hands out its `census`, checked")]
mod registry;
mod rotary;
mod stored;
mod tables;

mod deepseek;
mod gemma4;
mod gpt_oss;
mod llama;
mod qwen3_5;
mod qwen3_moe;
mod qwen3_next;
mod qwen4_exp;

pub use census::{Census, TrunkTensor};
pub use error::ModelError;
pub use experts::{BIAS_ROLES, ExpertTable, Span};
pub use loader::{Loader, StateDecl, StateKind, Use, WeightLoader};
pub use mtp::MtpHead;
pub use open::census;
pub use outline::{ExpertOutline, Outline};
pub use probe::{Probe, STAGES, Stage};
pub use registry::{Decoder, FAMILIES, Loaded, ModelOptions, Qsa, Step, load, outline};
pub use tables::{RowTable, TableShape, TableShard};
