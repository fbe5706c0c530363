//! The verbs on the CPU: SIMD chosen at run time, own thread pool.
//!
//! ```
//! use snowmelt_backend_cpu::{Activations, CpuBackend, CpuOptions};
//! let options = CpuOptions { threads: 2, activations: Activations::I16, ..CpuOptions::default() };
//! let backend = CpuBackend::new(options)?;
//! println!("{} on {} threads", backend.isa(), backend.threads());
//! # Ok::<(), snowmelt_backend_cpu::CpuError>(())
//! ```
//!
//! # One arithmetic for all instruction sets
//! Scalar code, AVX2, AVX-512 and NEON give the *same bits*, and so do one thread and many, one row
//! and hundreds. That is more than the [contract](snowmelt_backend#what-makes-the-bits-equal)
//! demands; in return every vector path is tested bit for bit against plain scalar code, and saved
//! state may move to another machine.
//!
//! * **f32.** Kernels are written once over a vector of 16 lanes, whatever the registers: lane `i`
//!   takes elements `i`, `i + 16`, ..., each by one fused multiply-add, zeros complete the last
//!   sixteen, and lanes are added 16 to 8, 4, 2, 1.
//! * **Quantised weights.** Activations are rounded in blocks of 32 along a row, to 16 bits
//!   (`greatest / 32512`) or 8 (`greatest / 127`). The sum of a block's products is an exact
//!   32-bit integer, however an instruction set forms it; then one f32 chain for each output adds
//!   the blocks in order, and a second chain the biases.
//! * **Functions.** `exp` and what follows from it is our own polynomial in the same lanes; sines,
//!   `log1p` and the like come from the `libm` crate, never from the platform.
//!
//! The private module `canonical` is the definition in scalar code; only tests run it.
//! `docs/decisions/0001-one-arithmetic-for-all-instruction-sets.md` says what it costs.
//!
//! # Where to find what
//! | module | holds |
//! |---|---|
//! | `verbs` | the implementation of [`Backend`](snowmelt_backend::Backend): checks, then splits |
//! | `matmul`, `heads`, `index`, `moe` | the same for products, `index_select` and experts |
//! | `linear`, `dot`, `gemm` | outputs of a product: f32 tiles, integer tiles |
//! | `attention`, `recurrent`, `route`, `norm`, `streams`, `elementwise` | kernels of others |
//! | `quantise`, `math`, `canonical` | arithmetic they share |
//! | `simd` | the vector type of each instruction set |
//! | `backend`, `scratch`, `buf`, `slab`, `memory`, `pool`, `isa` | memory, threads, detection |
//!
//! # Unsafe code
//! A verb checks whose a buffer is and that every row lies inside, under a lock that admits one
//! thread at a time; kernels below it work on pointers, each thread on outputs of its own.
#![allow(clippy::needless_range_loop, reason = "an index names the same row of several arrays")]

mod attention;
mod backend;
mod buf;
mod canonical;
mod ceiling;
mod dot;
mod elementwise;
mod gemm;
mod heads;
mod index;
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
mod streams;
mod verbs;
mod view;

pub use backend::{Activations, CpuBackend, CpuOptions, CpuPass};
pub use buf::{CpuBuf, CpuWeight};
pub use ceiling::memory_read_ceiling;
pub use isa::{CpuError, Isa, IsaChoice};
pub use slab::CpuSlab;
