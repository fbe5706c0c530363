//! The verb `linear_heads`: a matrix of its own for each head.
#![allow(unsafe_code)]

use crate::backend::Run;
use crate::buf::{CpuBuf, CpuWeight};
use crate::linear::{Decode, FLOAT_ROWS, Input, Linear, Matrix};
use crate::scratch::{Sizes, thread_floats};
use crate::simd::{Kernel, LANES, Simd, dispatch};
use crate::view::Mat;
use snowmelt_backend::{HeadRows, View};
use std::ops::Range;

/// Columns of a piece of a transposed product are a multiple of this.
const COLUMNS: usize = 4 * LANES;

/// See [`Backend::linear_heads`](snowmelt_backend::Backend::linear_heads).
pub(crate) fn linear_heads(
    run: &mut Run<'_>,
    x: View<'_, CpuBuf>,
    w: &CpuWeight,
    heads: &HeadRows,
    n: usize,
    out: View<'_, CpuBuf>,
) {
    let &HeadRows { stride, first, rows, transposed, .. } = heads;
    let Some(last) = heads.heads.checked_sub(1) else { return };
    let w = w.matrix();
    let (d_in, end) = (w.d_in, last * stride + first + rows);
    assert!(end <= w.d_out, "heads end at row {end} of {}", w.d_out);
    let (x_width, out_width) = if transposed { (rows, d_in) } else { (d_in, rows) };
    let x = run.mat(x, n, last * heads.x_head + x_width);
    let out = run.mat(out, n, last * heads.out_head + out_width);
    run.reserve(Sizes { thread: thread_floats(d_in, 0, 0, 0), ..Sizes::default() });
    let areas = run.scratch.thread_areas();
    let isa = run.tools.isa;
    // Enough pieces of a head for all threads.
    let pieces = run.tools.threads().div_ceil(heads.heads);
    let work = n * heads.heads * rows * d_in;
    let of = |h: usize| Matrix { ptr: w.row(h * stride + first), d_out: rows, ..w };
    let columns = |mat: Mat, h: usize| Mat { ptr: mat.at(0, h), ..mat };
    if !transposed {
        let units = of(0).units();
        let pieces = pieces.min(units).max(1);
        run.tools.split(heads.heads * pieces, work, |thread, share| {
            for item in share {
                let (h, piece) = (item / pieces, item % pieces);
                let (x, out) = (columns(x, h * heads.x_head), columns(out, h * heads.out_head));
                let (w, scratch) = (of(h), areas.of(thread));
                let outputs = w.outputs(units * piece / pieces..units * (piece + 1) / pieces);
                let linear = Linear::new(w, Input::Float(x), out);
                Linear { n, outputs, scratch, ..linear }.compute(isa);
            }
        });
        return;
    }
    let units = d_in.div_ceil(COLUMNS);
    let pieces = pieces.min(units).max(1);
    run.tools.split(heads.heads * pieces, work, |thread, share| {
        for item in share {
            let (h, piece) = (item / pieces, item % pieces);
            let (x, out) = (columns(x, h * heads.x_head), columns(out, h * heads.out_head));
            let units = units * piece / pieces..units * (piece + 1) / pieces;
            let columns = units.start * COLUMNS..(units.end * COLUMNS).min(d_in);
            let w = of(h);
            let scratch = areas.of(thread);
            for first in (0..rows).step_by(FLOAT_ROWS) {
                let count = FLOAT_ROWS.min(rows - first);
                for r in 0..count {
                    let to = scratch.wrapping_add(r * d_in);
                    let row = w.row(first + r);
                    dispatch(isa, Decode { encoding: w.encoding, row, d_in, out: to });
                }
                let x = Mat { ptr: x.at(0, first), ..x };
                let w = Mat { ptr: scratch, stride: d_in };
                let columns = columns.clone();
                dispatch(isa, AddRows { w, count, x, out, n, columns, begin: first == 0 });
            }
        }
    });
}

/// `out += sum over rows of x[r] * w[r]`, for all rows of x.
///
/// **Numerics.** One chain of fused multiply-adds from zero over the rows of `w`.
struct AddRows {
    w: Mat,
    count: usize,
    x: Mat,
    out: Mat,
    n: usize,
    columns: Range<usize>,
    /// Whether the chain begins here.
    begin: bool,
}

impl Kernel for AddRows {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Range { start, end } = self.columns;
        // SAFETY: the verb has checked rows and columns of all three.
        unsafe {
            let mut i = start;
            while i + COLUMNS <= end {
                let mut t = 0;
                while t + 2 <= self.n {
                    self.tile::<S, 2, 4>(s, t, i);
                    t += 2;
                }
                if t < self.n {
                    self.tile::<S, 1, 4>(s, t, i);
                }
                i += COLUMNS;
            }
            while i < end {
                for t in 0..self.n {
                    self.part(s, t, i, LANES.min(end - i));
                }
                i += LANES;
            }
        }
    }
}

impl AddRows {
    /// `C` vectors of columns from `i` on, of `N` rows from `t` on.
    #[inline(always)]
    unsafe fn tile<S: Simd, const N: usize, const C: usize>(&self, s: S, t: usize, i: usize) {
        let mut acc = [[s.zero(); C]; N];
        // SAFETY: as the caller promises.
        unsafe {
            if !self.begin {
                for j in 0..N {
                    for c in 0..C {
                        acc[j][c] = s.load(self.out.at(t + j, i + c * LANES));
                    }
                }
            }
            for r in 0..self.count {
                let w = self.w.at(r, i);
                for j in 0..N {
                    let x = s.splat(*self.x.at(t + j, r));
                    for c in 0..C {
                        acc[j][c] = s.fma(x, s.load(w.add(c * LANES)), acc[j][c]);
                    }
                }
            }
            for j in 0..N {
                for c in 0..C {
                    s.store(self.out.at(t + j, i + c * LANES), acc[j][c]);
                }
            }
        }
    }

    /// The `n <= 16` columns from `i` on of row `t`.
    #[inline(always)]
    unsafe fn part<S: Simd>(&self, s: S, t: usize, i: usize, n: usize) {
        let mut acc = s.zero();
        let out = self.out.at(t, i);
        // SAFETY: as the caller promises.
        unsafe {
            if !self.begin {
                acc = s.load_part(out, n);
            }
            for r in 0..self.count {
                let x = s.splat(*self.x.at(t, r));
                acc = s.fma(x, s.load_part(self.w.at(r, i), n), acc);
            }
            s.store_part(out, n, acc);
        }
    }
}
