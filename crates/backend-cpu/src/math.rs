//! Elementary functions in vector operations: the same bits on every machine.

use crate::simd::{Scalar, Simd};

/// `e^x`. Overflow gives infinity, underflow passes through the subnormals to zero, NaN stays NaN.
///
/// **Numerics.** Cody-Waite reduction by `n ln 2`, a polynomial of degree 6 on half of `ln 2` to
/// each side, and two exact multiplications by powers of two; error below one unit in the last
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

/// `0.5 x (1 + tanh(u))` with `u = sqrt(2/pi) (x + 0.044715 x^3)`, which is `x / (1 + e^-2u)`.
#[inline(always)]
pub(crate) fn gelu_tanh<S: Simd>(s: S, x: S::V) -> S::V {
    let cubic = s.fma(s.mul(s.splat(0.044_715), x), x, s.splat(1.0));
    // -2 sqrt(2/pi)
    let power = s.mul(s.mul(s.splat(-1.595_769_2), x), cubic);
    s.div(x, s.add(s.splat(1.0), exp(s, power)))
}

/// `tanh(x)`, accurate relative to the result; NaN stays NaN.
///
/// **Numerics.** An odd polynomial over an even one, beyond 7.9 that of the border, which is 1.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(s: S, x: S::V) -> S::V {
    let x = s.max(s.splat(-7.905_311), s.min(s.splat(7.905_311), x));
    let square = s.mul(x, x);
    let mut p = s.splat(-2.760_768_5e-16);
    for c in [
        2.000_188e-13,
        -8.604_672e-11,
        5.122_297e-8,
        1.485_722_4e-5,
        6.372_619_3e-4,
        4.893_524_6e-3,
    ] {
        p = s.fma(p, square, s.splat(c));
    }
    let mut q = s.splat(1.198_258_4e-6);
    for c in [1.185_347_1e-4, 2.268_434_6e-3, 4.893_525e-3] {
        q = s.fma(q, square, s.splat(c));
    }
    s.div(s.mul(x, p), q)
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

/// [`sigmoid`] of one number from within a kernel, the same bits.
#[inline(always)]
pub(crate) fn sigmoid_in_lane<S: Simd>(s: S, x: f32) -> f32 {
    s.fold_max(sigmoid(s, s.splat(x)))
}

/// [`exp()`] of one number from within a kernel, the same bits.
#[inline(always)]
pub(crate) fn exp_in_lane<S: Simd>(s: S, x: f32) -> f32 {
    s.fold_max(exp(s, s.splat(x)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use crate::simd::{Kernel, dispatch};

    struct ExpOf<'a> {
        x: &'a [f32],
        out: &'a mut [f32],
    }

    impl Kernel for ExpOf<'_> {
        #[inline(always)]
        #[expect(unsafe_code, reason = "vectors are read through pointers")]
        fn run<S: Simd>(self, s: S) {
            for (x, out) in self.x.chunks_exact(16).zip(self.out.chunks_exact_mut(16)) {
                // SAFETY: chunks of sixteen.
                unsafe { s.store(out.as_mut_ptr(), exp(s, s.load(x.as_ptr()))) };
            }
        }
    }

    fn exp_of(isa: Isa, x: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; x.len()];
        dispatch(isa, ExpOf { x, out: &mut out });
        out
    }

    /// Every number of the range, but in steps of some bits.
    fn sweep() -> Vec<f32> {
        let magnitudes = (0..0x42d2_0000u32).step_by(499).map(f32::from_bits);
        let mut all: Vec<f32> = magnitudes.flat_map(|x| [x, -x]).collect();
        all.resize(all.len().next_multiple_of(16), 0.0);
        all
    }

    #[test]
    fn exp_is_accurate() {
        let x = sweep();
        let mut worst = 0.0f64;
        for (x, y) in x.iter().zip(exp_of(Isa::Scalar, &x)) {
            let wanted = libm::exp(f64::from(*x));
            if wanted > f64::from(f32::MAX) {
                assert!(y == f32::INFINITY || y >= 3.4e38, "exp({x}) = {y}");
                continue;
            }
            // One unit in the last place, at least that of the subnormals.
            let ulp = f64::from(f32::EPSILON) * 2f64.powi(libm::ilogb(wanted).max(-126));
            let error = (f64::from(y) - wanted).abs() / ulp;
            assert!(error < 1.0, "exp({x}) = {y}, wanted {wanted}");
            worst = worst.max(error);
        }
        println!("exp: at most {worst:.3} units in the last place");
    }

    #[test]
    fn exp_is_the_same_everywhere() {
        let x = sweep();
        let wanted = exp_of(Isa::Scalar, &x);
        for isa in Isa::available() {
            let found = exp_of(isa, &x);
            assert!(wanted.iter().zip(&found).all(|(a, b)| a.to_bits() == b.to_bits()), "{isa}");
        }
    }

    fn tanh_one(x: f32) -> f32 {
        tanh(Scalar, [x; 16])[0]
    }

    fn gelu_one(x: f32) -> f32 {
        gelu_tanh(Scalar, [x; 16])[0]
    }

    #[test]
    fn tanh_and_gelu_are_accurate() {
        for x in sweep() {
            let close = |found: f32, wanted: f64, name: &str| {
                let error = (f64::from(found) - wanted).abs() / wanted.abs().max(1e-30);
                assert!(error < 2e-6, "{name}({x}) = {found}, wanted {wanted}");
            };
            let wide = f64::from(x);
            close(tanh_one(x), libm::tanh(wide), "tanh");
            // Below, the relative error is that of a large exponent.
            if x > -3.0 {
                let inner = 0.797_884_560_802_865_4 * (wide + 0.044_715 * wide * wide * wide);
                close(gelu_one(x), 0.5 * wide * (1.0 + libm::tanh(inner)), "gelu");
            }
        }
        assert!(tanh_one(f32::NAN).is_nan() && gelu_one(f32::NAN).is_nan());
        let infinite = [f32::INFINITY, f32::NEG_INFINITY].map(tanh_one);
        assert!(infinite[0] > 0.999_999 && infinite[1] < -0.999_999);
        assert_eq!([gelu_one(100.0), gelu_one(0.0), gelu_one(-100.0)], [100.0, 0.0, -0.0]);
    }

    #[test]
    fn limits_are_kept() {
        const INF: f32 = f32::INFINITY;
        assert_eq!(
            [exp_one(INF), exp_one(89.0), exp_one(-INF), exp_one(-110.0)],
            [INF, INF, 0.0, 0.0]
        );
        assert_eq!([exp_one(0.0), exp_one(-0.0)], [1.0, 1.0]);
        assert!(exp_one(f32::NAN).is_nan() && sigmoid_one(f32::NAN).is_nan());
        assert_eq!([sigmoid_one(INF), sigmoid_one(-INF), sigmoid_one(0.0)], [1.0, 0.0, 0.5]);
        assert_eq!([softplus(INF), softplus(-INF), softplus(100.0)], [INF, 0.0, 100.0]);
        assert!(softplus(f32::NAN).is_nan());
        assert_eq!(softplus(0.0), std::f32::consts::LN_2);
        for isa in Isa::available() {
            let mut x = [f32::NAN; 16];
            x[..4].copy_from_slice(&[INF, -INF, 200.0, -200.0]);
            let y = exp_of(isa, &x);
            assert_eq!(y[..4], [INF, 0.0, INF, 0.0], "{isa}");
            assert!(y[4..].iter().all(|y| y.is_nan()), "{isa}");
        }
    }
}
