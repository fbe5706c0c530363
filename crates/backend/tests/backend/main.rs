//! The verbs: reference, suite, and the loop over experts.

mod conformance;
mod deferred;
mod experts;
mod hand;
mod moe_block;
