//! Verbs that combine two rows element by element.
#![allow(unsafe_code)]

use crate::math::{sigmoid, silu};
use crate::simd::{Kernel, LANES, Simd};
use crate::view::Mat;
use std::marker::PhantomData;
use std::ops::Range;

/// What becomes of two elements.
pub(crate) trait Op: 'static {
    fn apply<S: Simd>(s: S, a: S::V, b: S::V) -> S::V;
}

/// `a + b`
#[derive(Debug)]
pub(crate) struct Add;
/// `silu(a) * b`
#[derive(Debug)]
pub(crate) struct Swiglu;
/// `a * sigmoid(b)`
#[derive(Debug)]
pub(crate) struct SigmoidGate;

impl Op for Add {
    #[inline(always)]
    fn apply<S: Simd>(s: S, a: S::V, b: S::V) -> S::V {
        s.add(a, b)
    }
}

impl Op for Swiglu {
    #[inline(always)]
    fn apply<S: Simd>(s: S, a: S::V, b: S::V) -> S::V {
        s.mul(silu(s, a), b)
    }
}

impl Op for SigmoidGate {
    #[inline(always)]
    fn apply<S: Simd>(s: S, a: S::V, b: S::V) -> S::V {
        s.mul(a, sigmoid(s, b))
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
    pub(crate) op: PhantomData<O>,
}

impl<O: Op> Zip<O> {
    /// As [`Kernel::run`], from within another kernel.
    #[inline(always)]
    pub(crate) fn compute<S: Simd>(&self, s: S) {
        let Range { start, end } = self.columns;
        for t in self.rows.clone() {
            let mut i = start;
            while i < end {
                let n = (end - i).min(LANES);
                let (a, b, out) = (self.a.at(t, i), self.b.at(t, i), self.out.at(t, i));
                // SAFETY: the verb has checked that all three have these rows and columns.
                unsafe {
                    s.store_part(out, n, O::apply(s, s.load_part(a, n), s.load_part(b, n)));
                }
                i += n;
            }
        }
    }
}

impl<O: Op> Kernel for Zip<O> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        self.compute(s);
    }
}
