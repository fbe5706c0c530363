//! Tests of the crate's public interface.
#![allow(clippy::unwrap_used, missing_docs)]

mod templates;
