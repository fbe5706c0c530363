//! The suite that holds a backend to the [reference](mod@crate::reference) and to its own bits.
//!
//! [`run`] is all of it; each function beside it is one group of verbs, for a backend that grows.
//! ```no_run
//! use snowmelt_backend::{conformance, reference::Reference};
//! conformance::run(&Reference, &conformance::Tolerance::f32()).assert_ok();
//! ```
//!
//! A *case* is one verb with one shape, one encoding and seeded operands. It runs on the reference
//! once and on the backend in several *ways*: again, row by row, in chunks, each sequence alone, in
//! strided views, in place, over experts in any order. The first run is compared with the reference
//! within [`Tolerance`], the others with the first bit for bit (where `exact` says so; repetition
//! and the order of experts always).
//!
//! Everything that a verb has no business to read holds NaN: gaps of strided views, pages beyond
//! the context, other rows of per-sequence state, unused slots, the bytes between pieces. What it
//! has no business to write is compared afterwards.
//!
//! A fused override of a provided method becomes one more case: its `run` calls the method, and one
//! way more calls the unfused sequence. The reference overrides nothing, so it runs the default.

mod attention;
mod case;
mod data;
mod dense;
mod experts;
mod heads;
mod index;
mod norms;
mod recurrent;
mod report;
mod rotary;
mod routing;
mod state;
mod streams;
mod timeline;

pub use report::{Bound, Failure, Report, Tolerance};

use crate::verbs::{Backend, Limits};

/// What the suite passes to [`Backend::prepare`]; no case exceeds it.
pub const LIMITS: Limits = Limits {
    rows: 256,
    d_in: 512,
    top_k: 10,
    d_expert: 192,
    d_model: 512,
    n_experts: 512,
    context_tokens: 32_768,
    n_heads: 64,
    d_head: 128,
    d_index: 128,
    index_ratio: 1,
};

/// Every group. Some ten seconds in release.
pub fn run<B: Backend>(b: &B, tolerance: &Tolerance) -> Report {
    let groups = [
        state, dense, heads, streams, norms, rotary, attention, index, recurrent, routing, experts,
    ];
    let mut report = Report::default();
    for group in groups {
        report.append(group(b, tolerance));
    }
    report
}

/// `clear`, `write`, `copy` and host reads.
pub fn state<B: Backend>(b: &B, tolerance: &Tolerance) -> Report {
    case::group(b, tolerance, state::cases)
}

/// `embed`, `linear`, `add`, `glu`, `select_outputs`.
pub fn dense<B: Backend>(b: &B, tolerance: &Tolerance) -> Report {
    case::group(b, tolerance, dense::cases)
}

/// `linear_heads`, `copy_heads`.
pub fn heads<B: Backend>(b: &B, tolerance: &Tolerance) -> Report {
    case::group(b, tolerance, heads::cases)
}

/// `activate`, `stream_mix`, `stream_join`, `row_gate`.
pub fn streams<B: Backend>(b: &B, tolerance: &Tolerance) -> Report {
    case::group(b, tolerance, streams::cases)
}

/// `norm`.
pub fn norms<B: Backend>(b: &B, tolerance: &Tolerance) -> Report {
    case::group(b, tolerance, norms::cases)
}

/// `rotary_table`, `rope`.
pub fn rotary<B: Backend>(b: &B, tolerance: &Tolerance) -> Report {
    case::group(b, tolerance, rotary::cases)
}

/// `attention`, with the state verbs on its caches.
pub fn attention<B: Backend>(b: &B, tolerance: &Tolerance) -> Report {
    case::group(b, tolerance, attention::cases)
}

/// `index_select`.
pub fn index<B: Backend>(b: &B, tolerance: &Tolerance) -> Report {
    case::group(b, tolerance, index::cases)
}

/// `causal_conv`, `delta_gate`, `delta_step`.
pub fn recurrent<B: Backend>(b: &B, tolerance: &Tolerance) -> Report {
    case::group(b, tolerance, recurrent::cases)
}

/// `route`, `moe_join`.
pub fn routing<B: Backend>(b: &B, tolerance: &Tolerance) -> Report {
    case::group(b, tolerance, routing::cases)
}

/// Slabs, pins and `moe_ffn`; needs `route`.
pub fn experts<B: Backend>(b: &B, tolerance: &Tolerance) -> Report {
    case::group(b, tolerance, experts::cases)
}
