//! Norms of heads, and rotary embedding.
#![allow(unsafe_code)]

use crate::dot::product;
use crate::elementwise::glu;
use crate::simd::{Kernel, LANES, Simd};
use crate::view::Mat;
use snowmelt_backend::{Glu, Pairing, Spread};
use std::ops::Range;

/// `out = (x - mean) * r * w + bias`, gated, with `r = factor / sqrt(square + eps)`, rounded in
/// this order; what is absent is left out. Sums are chains in sixteen lanes and the usual tree.
#[derive(Clone, Debug)]
pub(crate) struct Norm<'a> {
    pub(crate) x: Mat,
    pub(crate) out: Mat,
    pub(crate) spread: Spread,
    /// `d` elements, or `heads * d`.
    pub(crate) w: Option<&'a [f32]>,
    /// As `w`.
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) gate: Option<(Mat, Glu)>,
    pub(crate) heads: usize,
    pub(crate) d: usize,
    pub(crate) eps: f32,
    pub(crate) factor: f32,
    /// (row, head), row first.
    pub(crate) items: Range<usize>,
}

impl Kernel for Norm<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for item in self.items.clone() {
            let (t, first) = (item / self.heads, item % self.heads * self.d);
            // SAFETY: the verb has checked that all operands have these rows and heads.
            unsafe { self.head(s, t, first) };
        }
    }
}

impl Norm<'_> {
    #[inline(always)]
    unsafe fn head<S: Simd>(&self, s: S, t: usize, first: usize) {
        let (x, out) = (self.x.at(t, first), self.out.at(t, first));
        // SAFETY: `d` elements in every operand.
        unsafe {
            let (mean, square) = match self.spread {
                Spread::MeanSquare => (None, product(s, x, x, self.d) / self.d as f32),
                Spread::SumSquare => (None, product(s, x, x, self.d)),
                Spread::Variance => {
                    let mean = sum(s, x, self.d) / self.d as f32;
                    (Some(s.splat(mean)), deviation(s, x, self.d, mean) / self.d as f32)
                }
            };
            let r = s.splat(self.factor / (square + self.eps).sqrt());
            // A vector for all heads, or one for each.
            let of = |w: &[f32], i: usize| w.as_ptr().add(first % w.len() + i);
            let mut i = 0;
            while i < self.d {
                let n = (self.d - i).min(LANES);
                let mut y = s.load_part(x.add(i), n);
                if let Some(mean) = mean {
                    y = s.sub(y, mean);
                }
                y = s.mul(y, r);
                if let Some(w) = self.w {
                    y = s.mul(y, s.load_part(of(w, i), n));
                }
                if let Some(bias) = self.bias {
                    y = s.add(y, s.load_part(of(bias, i), n));
                }
                if let Some((z, f)) = self.gate {
                    y = glu(s, f, s.load_part(z.at(t, first + i), n), y);
                }
                s.store_part(out.add(i), n, y);
                i += n;
            }
        }
    }
}

/// Sum of `d` elements.
#[inline(always)]
unsafe fn sum<S: Simd>(s: S, x: *const f32, d: usize) -> f32 {
    let mut acc = s.zero();
    for i in (0..d).step_by(LANES) {
        // SAFETY: as the caller promises.
        acc = s.add(acc, unsafe { s.load_part(x.add(i), LANES.min(d - i)) });
    }
    s.fold_add(acc)
}

/// Sum of the squares of what `d` elements differ from `mean`.
#[inline(always)]
unsafe fn deviation<S: Simd>(s: S, x: *const f32, d: usize, mean: f32) -> f32 {
    let mut acc = s.zero();
    for i in (0..d).step_by(LANES) {
        let n = LANES.min(d - i);
        // What is missing in the last sixteen is as the mean, so that it counts as zero.
        let mut lanes = [mean; LANES];
        // SAFETY: as the caller promises.
        unsafe {
            std::ptr::copy_nonoverlapping(x.add(i), lanes.as_mut_ptr(), n);
            let y = s.sub(s.load(lanes.as_ptr()), s.splat(mean));
            acc = s.fma(y, y, acc);
        }
    }
    s.fold_add(acc)
}

/// `(a, b)` becomes `(a cos - b sin, b cos + a sin)`; the second product is rounded, the first is
/// fused with the sum.
#[derive(Clone, Debug)]
pub(crate) struct Rope {
    pub(crate) x: Mat,
    /// `[n, 2, half]`
    pub(crate) table: Mat,
    pub(crate) heads: usize,
    pub(crate) d_head: usize,
    /// Pairs of a head.
    pub(crate) half: usize,
    pub(crate) pairing: Pairing,
    pub(crate) rows: Range<usize>,
}

impl Kernel for Rope {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for t in self.rows.clone() {
            for h in 0..self.heads {
                let x = self.x.at(t, h * self.d_head);
                // SAFETY: the verb has checked rows, heads and table.
                unsafe {
                    match self.pairing {
                        Pairing::Half => rotate_halves(s, x, self.table.row(t), self.half),
                        Pairing::Adjacent => self.adjacent(s, x, self.table.row(t)),
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn rotate<S: Simd>(s: S, [a, b]: [S::V; 2], [cos, sin]: [S::V; 2]) -> [S::V; 2] {
    let minus = s.sub(s.zero(), s.mul(b, sin));
    [s.fma(a, cos, minus), s.fma(b, cos, s.mul(a, sin))]
}

/// Rotates `half` pairs `(i, i + half)`; `table: [2, half]`.
#[inline(always)]
pub(crate) unsafe fn rotate_halves<S: Simd>(s: S, x: *mut f32, table: *const f32, half: usize) {
    let mut i = 0;
    while i < half {
        let n = (half - i).min(LANES);
        // SAFETY: `half` pairs of x and of the table.
        unsafe {
            let (a, b) = (x.add(i), x.add(half + i));
            let angles = [s.load_part(table.add(i), n), s.load_part(table.add(half + i), n)];
            let [to_a, to_b] = rotate(s, [s.load_part(a, n), s.load_part(b, n)], angles);
            s.store_part(a, n, to_a);
            s.store_part(b, n, to_b);
        }
        i += n;
    }
}

impl Rope {
    #[inline(always)]
    unsafe fn adjacent<S: Simd>(&self, s: S, x: *mut f32, table: *const f32) {
        let mut i = 0;
        while i < self.half {
            let n = (self.half - i).min(LANES);
            let (mut a, mut b) = ([0.0f32; LANES], [0.0f32; LANES]);
            // SAFETY: `half` pairs of x and of the table.
            unsafe {
                for j in 0..n {
                    (a[j], b[j]) = (*x.add(2 * (i + j)), *x.add(2 * (i + j) + 1));
                }
                let angles =
                    [s.load_part(table.add(i), n), s.load_part(table.add(self.half + i), n)];
                let [to_a, to_b] = rotate(s, [s.load(a.as_ptr()), s.load(b.as_ptr())], angles);
                s.store(a.as_mut_ptr(), to_a);
                s.store(b.as_mut_ptr(), to_b);
                for j in 0..n {
                    *x.add(2 * (i + j)) = a[j];
                    *x.add(2 * (i + j) + 1) = b[j];
                }
            }
            i += n;
        }
    }
}
