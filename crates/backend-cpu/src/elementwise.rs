//! Verbs that work element by element.
#![allow(unsafe_code)]

use crate::math::{gelu_tanh, sigmoid, silu, tanh};
use crate::simd::{Kernel, LANES, Simd};
use crate::view::Mat;
use snowmelt_backend::{Glu, Unary};
use std::ops::Range;

/// What becomes of two elements.
pub(crate) trait Op: Copy + Sync {
    fn apply<S: Simd>(self, s: S, a: S::V, b: S::V) -> S::V;
}

/// `a + b`
#[derive(Clone, Copy, Debug)]
pub(crate) struct Add;

impl Op for Add {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, a: S::V, b: S::V) -> S::V {
        s.add(a, b)
    }
}

/// `f(gate) * up`; each product is rounded. NaN stays NaN.
#[inline(always)]
pub(crate) fn glu<S: Simd>(s: S, f: Glu, gate: S::V, up: S::V) -> S::V {
    match f {
        Glu::Silu => s.mul(silu(s, gate), up),
        Glu::Sigmoid => s.mul(sigmoid(s, gate), up),
        Glu::GeluTanh => s.mul(gelu_tanh(s, gate), up),
        Glu::Clamped { alpha, limit } => {
            let (low, high, one) = (s.splat(-limit), s.splat(limit), s.splat(1.0));
            let (gate, up) = (s.min(high, gate), s.max(low, s.min(high, up)));
            s.mul(s.mul(gate, sigmoid(s, s.mul(s.splat(alpha), gate))), s.add(up, one))
        }
    }
}

impl Op for Glu {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, a: S::V, b: S::V) -> S::V {
        glu(s, self, a, b)
    }
}

/// `out = op(a, b)` for a block of rows and columns; `out` may be `a` or `b`.
#[derive(Clone, Debug)]
pub(crate) struct Zip<O> {
    pub(crate) a: Mat,
    pub(crate) b: Mat,
    pub(crate) out: Mat,
    pub(crate) rows: Range<usize>,
    pub(crate) columns: Range<usize>,
    pub(crate) op: O,
}

impl<O: Op> Kernel for Zip<O> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Range { start, end } = self.columns;
        for t in self.rows.clone() {
            let mut i = start;
            while i < end {
                let n = (end - i).min(LANES);
                let (a, b, out) = (self.a.at(t, i), self.b.at(t, i), self.out.at(t, i));
                // SAFETY: the verb has checked that all three have these rows and columns.
                unsafe {
                    let y = self.op.apply(s, s.load_part(a, n), s.load_part(b, n));
                    s.store_part(out, n, y);
                }
                i += n;
            }
        }
    }
}

/// `x = f(x)` for a block of rows and columns.
#[derive(Clone, Debug)]
pub(crate) struct Map {
    pub(crate) f: Unary,
    pub(crate) x: Mat,
    pub(crate) rows: Range<usize>,
    pub(crate) columns: Range<usize>,
}

impl Kernel for Map {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Range { start, end } = self.columns;
        for t in self.rows.clone() {
            for i in (start..end).step_by(LANES) {
                let n = (end - i).min(LANES);
                let at = self.x.at(t, i);
                // SAFETY: the verb has checked that there are these rows and columns.
                unsafe {
                    let x = s.load_part(at, n);
                    let y = match self.f {
                        Unary::Scale(factor) => s.mul(s.splat(factor), x),
                        Unary::Silu(factor) => silu(s, s.mul(s.splat(factor), x)),
                        Unary::Softcap(cap) => {
                            let cap = s.splat(cap);
                            s.mul(cap, tanh(s, s.div(x, cap)))
                        }
                    };
                    s.store_part(at, n, y);
                }
            }
        }
    }
}
