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
#[expect(unreachable_pub, reason = "its `census` is handed out by the one below")]
mod registry;
mod rotary;

mod qwen3_5;
mod qwen3_moe;
mod qwen3_next;

pub use census::{Census, TrunkTensor};
pub use error::ModelError;
pub use experts::{ExpertTable, Span};
pub use loader::{Loader, StateDecl, StateKind, Use, WeightLoader};
pub use registry::{Decoder, FAMILIES, Loaded, Step, load};

use snowmelt_weights::Checkpoint;

/// What the checkpoint needs, from its headers alone.
///
/// # Errors
/// When the family is not known or not the one that the container was packed as, or a tensor or
/// config field is wrong.
pub fn census(checkpoint: &Checkpoint) -> Result<Census, ModelError> {
    let census = registry::census(checkpoint)?;
    match checkpoint.packed() {
        Some(packed) if packed.family() != census.family => Err(ModelError::PackedFamily {
            origin: checkpoint.origin().to_owned(),
            found: packed.family().to_owned(),
            expected: census.family,
        }),
        _ => Ok(census),
    }
}
