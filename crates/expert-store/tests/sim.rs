//! The store over real files and over files that go wrong. One binary; `alloc.rs` is another,
//! since it owns the allocator.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

#[path = "sim/faults.rs"]
mod faults;
#[path = "sim/seeded.rs"]
mod seeded;
#[path = "sim/sources.rs"]
mod sources;
#[path = "sim/world.rs"]
mod world;
