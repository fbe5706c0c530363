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
/// Bytes of one measurement: short, so that some fall between the work of other programs.
const PIECE: usize = 64 << 20;

/// Bytes a second that `threads` threads (0: all) read from memory in a bare loop of vector loads,
/// the best of the pieces that fit into `seconds`. Each thread reads in one, four or eight streams
/// in turn: which of them is fastest depends on the machine.
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
    'time: while best.is_infinite() || Instant::now() < end {
        for streams in [1, 4, 8] {
            for piece in (first..first + BYTES).step_by(PIECE) {
                let begin = Instant::now();
                pool.run(&|thread| {
                    let share = share(PIECE / 4 / UNIT, thread, threads);
                    let from = std::ptr::with_exposed_provenance::<f32>(piece);
                    let (from, units) = (from.wrapping_add(share.start * UNIT), share.len());
                    dispatch(isa, Sum { from, units, streams, total: &total });
                });
                best = best.min(begin.elapsed().as_secs_f64());
                if Instant::now() > end && streams == 8 {
                    break 'time;
                }
            }
        }
    }
    black_box(total.into_inner());
    PIECE as f64 / best
}

/// Elements of one turn of the loop.
const UNIT: usize = 8 * LANES;

struct Sum<'a> {
    from: *const f32,
    units: usize,
    /// 1, 4 or 8.
    streams: usize,
    total: &'a AtomicU64,
}

impl Kernel for Sum<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // Each stream takes its part of a turn's eight vectors.
        let vectors = 8 / self.streams;
        let offsets: [usize; 8] =
            std::array::from_fn(|i| (i / vectors * self.units * vectors + i % vectors) * LANES);
        let mut acc = [s.zero(); 8];
        for unit in 0..self.units {
            let at = self.from.wrapping_add(unit * vectors * LANES);
            for (offset, acc) in offsets.iter().zip(&mut acc) {
                // SAFETY: `8 * units` vectors of the memory, each once.
                *acc = s.max(unsafe { s.load(at.add(*offset)) }, *acc);
            }
        }
        let sum = acc.map(|acc| s.fold_max(acc)).iter().map(|x| u64::from(x.to_bits())).sum();
        self.total.fetch_add(sum, Relaxed);
    }
}
