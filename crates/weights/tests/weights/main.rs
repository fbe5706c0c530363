//! Checkpoints as files: what opens, what is refused and how, packing, resuming, verifying.

#![expect(clippy::unwrap_used, reason = "tests")]

mod common;
mod container;
mod huggingface;
mod oracle;
mod properties;
