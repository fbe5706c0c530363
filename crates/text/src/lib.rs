//! Pure functions of strings and token ids: tokenizer, chat templates, incremental detokeniser,
//! stop strings.
//!
//! ```text
//! messages ── ChatTemplate::render ──► prompt ── Tokenizer::encode ──► token ids
//!         └────────── Tokenizer::encode_chat (both, forgery-proof) ──────┘
//! token ids ── Detokenizer::push ──► text ── StopStrings::push ──► text for the client
//! ```
//!
//! Nothing here reads a file: callers hand over bytes, and a name (`origin`) to put into messages.
//! Nothing here panics on bad input either; every refusal is a [`TextError`].
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod added;
mod chat;
mod decoder;
mod detokenizer;
mod error;
mod model;
mod stop;
mod template;
mod tokenizer;

pub use chat::ChatPrompt;
pub use detokenizer::Detokenizer;
pub use error::TextError;
pub use stop::{StopOutcome, StopStrings};
pub use template::{ChatTemplate, Message, RenderOptions};
pub use tokenizer::{Specials, Tokenizer};
