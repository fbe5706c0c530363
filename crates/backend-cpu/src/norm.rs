//! Norms of heads, and rotary embedding.
#![allow(unsafe_code)]

use crate::dot::product;
use crate::math::{sigmoid, silu};
use crate::simd::{Kernel, LANES, Simd};
use crate::view::Mat;
use snowmelt_backend::{Gate, Pairing};
use std::ops::Range;

/// `out = x * r * w * gate(z)` with `r = factor / sqrt(sum(x^2) * (1/d or 1) + eps)`, rounded in
/// this order; what is absent is left out.
#[derive(Clone, Debug)]
pub(crate) struct Norm<'a> {
    pub(crate) x: Mat,
    pub(crate) out: Mat,
    pub(crate) w: Option<&'a [f32]>,
    pub(crate) z: Option<(Mat, Gate)>,
    pub(crate) heads: usize,
    pub(crate) d: usize,
    pub(crate) eps: f32,
    /// Of the mean of squares rather than their sum.
    pub(crate) mean: bool,
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
    /// Nothing but heads to norm yet.
    pub(crate) fn of(x: Mat, out: Mat, heads: usize) -> Self {
        let (w, z, mean, factor) = (None, None, false, 1.0);
        Self { x, out, w, z, heads, d: 0, eps: 0.0, mean, factor, items: 0..0 }
    }

    #[inline(always)]
    unsafe fn head<S: Simd>(&self, s: S, t: usize, first: usize) {
        let (x, out) = (self.x.at(t, first), self.out.at(t, first));
        // SAFETY: `d` elements in every operand.
        unsafe {
            let sum = product(s, x, x, self.d);
            let sum = if self.mean { sum / self.d as f32 } else { sum };
            let r = s.splat(self.factor / (sum + self.eps).sqrt());
            let mut i = 0;
            while i < self.d {
                let n = (self.d - i).min(LANES);
                let mut y = s.mul(s.load_part(x.add(i), n), r);
                if let Some(w) = self.w {
                    y = s.mul(y, s.load_part(w.as_ptr().add(i), n));
                }
                if let Some((z, gate)) = self.z {
                    let z = s.load_part(z.at(t, first + i), n);
                    let gate = match gate {
                        Gate::Silu => silu(s, z),
                        Gate::Sigmoid => sigmoid(s, z),
                    };
                    y = s.mul(y, gate);
                }
                s.store_part(out.add(i), n, y);
                i += n;
            }
        }
    }
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
                        Pairing::Half => self.halves(s, x, self.table.row(t)),
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

impl Rope {
    #[inline(always)]
    unsafe fn halves<S: Simd>(&self, s: S, x: *mut f32, table: *const f32) {
        let mut i = 0;
        while i < self.half {
            let n = (self.half - i).min(LANES);
            // SAFETY: `half` pairs of x and of the table.
            unsafe {
                let (a, b) = (x.add(i), x.add(self.half + i));
                let angles =
                    [s.load_part(table.add(i), n), s.load_part(table.add(self.half + i), n)];
                let [to_a, to_b] = rotate(s, [s.load_part(a, n), s.load_part(b, n)], angles);
                s.store_part(a, n, to_a);
                s.store_part(b, n, to_b);
            }
            i += n;
        }
    }

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
