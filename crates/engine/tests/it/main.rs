//! Equality, oracle and fault tests of the engine.

#![expect(clippy::unwrap_used, reason = "tests")]

mod equality;
mod oracle;
mod support;
