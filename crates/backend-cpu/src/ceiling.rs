//! What memory can deliver: the yardstick of every kernel that reads weights.
#![allow(unsafe_code)]

use crate::isa::Isa;
use crate::memory::Memory;
use crate::pool::{Pool, share};
use crate::simd::{Kernel, LANES, Simd, dispatch};
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Bytes that are read over and over: far more than any cache.
const BYTES: usize = 256 << 20;

/// Bytes a second that `threads` threads (0: all) read from memory in a bare loop of vector loads,
/// the best of the passes that fit into `seconds`.
///
/// # Panics
/// When the system refuses memory or threads.
pub fn memory_read_ceiling(threads: usize, seconds: f64) -> f64 {
    let threads = match threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        threads => threads,
    };
    let pool = Pool::new(threads).expect("threads for the ceiling");
    let isa = Isa::available().next().expect("scalar at least");
    let mut memory = Memory::paged(BYTES, false);
    memory.poison();
    let first = memory.ptr().expose_provenance();
    let total = AtomicU64::new(0);
    let mut best = f64::INFINITY;
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    while best.is_infinite() || Instant::now() < end {
        let begin = Instant::now();
        pool.run(&|thread| {
            let share = share(BYTES / 4 / UNIT, thread, threads);
            let from = std::ptr::with_exposed_provenance::<f32>(first);
            let (from, units) = (from.wrapping_add(share.start * UNIT), share.len());
            dispatch(isa, Sum { from, units, total: &total });
        });
        best = best.min(begin.elapsed().as_secs_f64());
    }
    black_box(total.into_inner());
    BYTES as f64 / best
}

/// Elements of one turn of the loop.
const UNIT: usize = 8 * LANES;

struct Sum<'a> {
    from: *const f32,
    units: usize,
    total: &'a AtomicU64,
}

impl Kernel for Sum<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut acc = [s.zero(); 8];
        for unit in 0..self.units {
            for (i, acc) in acc.iter_mut().enumerate() {
                // SAFETY: units of the memory.
                let v = unsafe { s.load(self.from.add(unit * UNIT + i * LANES)) };
                *acc = s.max(v, *acc);
            }
        }
        let sum = acc.map(|acc| s.fold_max(acc)).iter().map(|x| u64::from(x.to_bits())).sum();
        self.total.fetch_add(sum, Relaxed);
    }
}
