//! What bytes mean: encodings and their arithmetic, safetensors folders and the packed container,
//! opened into name → (shape, encoding, file, byte range).
//!
//! No tensor maths beyond decoding and encoding rows, and no model knowledge. Everything that a
//! file says is checked here once, at open; whoever holds a [`Checkpoint`] may trust it.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod bytes;
mod checkpoint;
mod config;
mod digest;
mod encoding;
mod error;
mod huggingface;
mod journal;
mod manifest;
mod outfile;
mod packed;
mod packer;
mod plan;
mod quantise;
mod safetensors;
mod scan;
mod small_float;
mod tensor;
mod verify;

pub use bytes::{Bytes, DataFile};
pub use checkpoint::{Checkpoint, CheckpointKind};
pub use config::ConfigView;
pub use encoding::Encoding;
pub use error::WeightsError;
pub use packed::{ExpertLayer, ExpertPiece, Packed};
pub use packer::Packer;
pub use plan::{PackPlan, PlannedLayer, PlannedPiece, PlannedTensor};
pub use tensor::TensorInfo;
pub use verify::{Damage, VerifyReport, verify};
