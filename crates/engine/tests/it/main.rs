//! Equality, oracle and fault tests of the engine.

#![expect(clippy::unwrap_used, reason = "tests")]

mod equality;
mod faults;
mod oracle;
mod published;
mod qwen4_exp;
mod support;
mod tiny;
