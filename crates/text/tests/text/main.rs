//! Tests of the crate's public interface.
#![allow(clippy::unwrap_used, missing_docs)]

mod chat;
mod detokenizer;
mod stop;
mod support;
mod templates;
mod tokenizer;
