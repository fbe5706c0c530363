//! The CPU backend through its public face.

mod bits;
mod conformance;
mod workload;
