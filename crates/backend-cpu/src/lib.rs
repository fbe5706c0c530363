//! The verbs on the CPU.
#![allow(clippy::needless_range_loop, reason = "an index names the same row of several arrays")]

mod attention;
mod backend;
mod buf;
mod canonical;
mod ceiling;
mod dot;
mod elementwise;
mod gemm;
mod isa;
mod linear;
mod math;
mod matmul;
mod memory;
mod moe;
mod norm;
mod pool;
mod quantise;
mod recurrent;
mod route;
mod scratch;
mod simd;
mod slab;
mod verbs;
mod view;

pub use backend::{Activations, CpuBackend, CpuOptions, CpuPass};
pub use buf::{CpuBuf, CpuWeight};
pub use ceiling::memory_read_ceiling;
pub use isa::{CpuError, Isa, IsaChoice};
pub use slab::CpuSlab;
