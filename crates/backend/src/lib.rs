//! The verbs of a decoder step, and what a model needs of experts: the seam between families and
//! machines.
//!
//! * [`Backend`] is one trait whose grain is a step of a transformer (`attention`, `delta_step`,
//!   `moe_ffn`), neither tensor algebra nor a whole model. Verbs record into a [`Pass`]; nothing
//!   allocates, waits or reports a device error while recording.
//! * Every verb that touches state takes [`Rows`]: batching is in the signatures, so one sequence
//!   is merely a batch of one.
//! * [`ExpertFetch`] is how a model asks for routed experts; [`moe_block`] is the one loop that
//!   does it. [`RowFetch`] is how it asks for single rows of a table that stays on disk.
//! * [`reference`](mod@reference) is the naive implementation in scalar f32, the oracle;
//!   [`conformance`] holds any other backend to it.
//!
//! # What makes the bits equal
//! On a CPU backend the logits of a sequence depend on its tokens alone, never on cache size,
//! threads, chunk size or company. Every verb keeps these rules:
//! 1. Each output element is one chain of operations in a fixed order, the same for 1 and n rows;
//!    a reduction is never split over threads.
//! 2. Tails are masked, never computed by another formula; a multiply-add is fused everywhere or
//!    nowhere.
//! 3. KV blocks lie on absolute positions, and K and V are rounded to the type of the cache
//!    before *any* query reads them, inside their own chunk too.
//! 4. Recurrences run in token order.
//! 5. Kernel choice depends on encoding and machine, never on the number of rows or on what is
//!    cached.
//! 6. Results of experts are added in ascending expert index.

mod fetch;
mod layout;
mod moe;
mod rows;
mod verbs;

pub mod conformance;
pub mod reference;

pub use fetch::{ExpertFetch, ExpertSet, Failures, PinOwner, Ready, Routes, RowFetch, StepError};
pub use layout::{ExpertLayout, MatrixBytes, MatrixLayout, Order, Scales};
pub use moe::{MoeBlock, MoeWork, RouteObserver, moe_block};
pub use rows::{PAGE_TOKENS, Row, Rows, RowsDraft, Sequence};
pub use verbs::{
    Attention, Backend, BufType, DeltaStep, Experts, Glu, Groups, HeadRows, HostRecords,
    IndexSelect, Limits, MoeFfn, Norm, Pairing, Pass, Pool, Routed, Router, Scores, Selection,
    Shared, Slab, Spread, Unary, View,
};
