//! Elementary functions in vector operations: the same bits on every machine.

use crate::simd::{Scalar, Simd};

/// `e^x`. Overflow gives infinity, underflow passes through the subnormals to zero, NaN stays NaN.
///
/// **Numerics.** Cody-Waite reduction by `n ln 2`, a polynomial of degree 6 on half of `ln 2` to
/// each side, and two exact multiplications by powers of two; error below 1.5 units in the last
/// place where the result is normal.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    // Beyond these the result no longer changes. NaN passes: it is the second operand.
    let x = s.min(s.splat(89.0), s.max(s.splat(-104.0), x));
    let n = s.round(s.mul(x, s.splat(std::f32::consts::LOG2_E)));
    // ln 2 in two parts: the first has few bits, so that its product with n is exact.
    let r = s.fma(n, s.splat(-0.693_359_4), x);
    let r = s.fma(n, s.splat(2.121_944_4e-4), r);
    let mut p = s.splat(1.987_569_1e-4);
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
        p = s.fma(p, r, s.splat(c));
    }
    let p = s.add(s.fma(p, s.mul(r, r), r), s.splat(1.0));
    s.ldexp(p, n)
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid<S: Simd>(s: S, x: S::V) -> S::V {
    let one = s.splat(1.0);
    s.div(one, s.add(one, exp(s, s.sub(s.zero(), x))))
}

/// `x / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn silu<S: Simd>(s: S, x: S::V) -> S::V {
    s.div(x, s.add(s.splat(1.0), exp(s, s.sub(s.zero(), x))))
}

/// [`exp()`] of one number, the same bits.
pub(crate) fn exp_one(x: f32) -> f32 {
    exp(Scalar, [x; 16])[0]
}

/// [`sigmoid`] of one number, the same bits.
pub(crate) fn sigmoid_one(x: f32) -> f32 {
    sigmoid(Scalar, [x; 16])[0]
}

/// `ln(1 + e^x)`, without overflow.
pub(crate) fn softplus(x: f32) -> f32 {
    let tail = libm::log1pf(libm::expf(-x.abs()));
    if x > 0.0 { x + tail } else { tail }
}

/// [`exp()`] of one number from within a kernel, the same bits.
#[inline(always)]
pub(crate) fn exp_in_lane<S: Simd>(s: S, x: f32) -> f32 {
    s.fold_max(exp(s, s.splat(x)))
}
