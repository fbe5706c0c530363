//! Checkpoints as files: what opens, what is refused and how, packing, resuming, verifying.

mod common;
mod container;
mod huggingface;
mod oracle;
mod properties;
