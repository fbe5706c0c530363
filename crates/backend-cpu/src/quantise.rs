//! Rounding of activations in blocks of 32 along a row.
#![allow(unsafe_code)]

use crate::canonical::{BLOCK, NARROW_MAX, TINY, WIDE_MAX};
use crate::simd::{Kernel, LANES, Simd};
use crate::view::Mat;
use std::ops::Range;

/// Rows of rounded activations, by pointer. Strides follow from `blocks`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Quantised {
    /// `[n, blocks, 32]`: i16 with even elements before odd ones, or i8 in order.
    pub(crate) codes: *mut u8,
    /// `[n, blocks]`
    pub(crate) scales: *mut f32,
    /// `[n, blocks]`: scale times the sum of codes.
    pub(crate) sums: *mut f32,
    /// `[n, blocks / 2]`: the same for two blocks, added.
    pub(crate) pair_sums: *mut f32,
    /// Blocks of a row.
    pub(crate) blocks: usize,
}

// SAFETY: pointers into scratch; threads write disjoint rows and read after a join.
unsafe impl Send for Quantised {}
// SAFETY: as above.
unsafe impl Sync for Quantised {}

impl Quantised {
    /// The rows from `first` on.
    pub(crate) fn skip(self, first: usize, rounding: Rounding) -> Self {
        let blocks = first * self.blocks;
        Self {
            codes: self.codes.wrapping_add(blocks * BLOCK * rounding.bytes()),
            scales: self.scales.wrapping_add(blocks),
            sums: self.sums.wrapping_add(blocks),
            pair_sums: self.pair_sums.wrapping_add(first * (self.blocks / 2)),
            blocks: self.blocks,
        }
    }
}

/// How activations are rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounding {
    /// 16 bits.
    Wide,
    /// 8 bits.
    Narrow,
}

impl Rounding {
    const fn bytes(self) -> usize {
        match self {
            Self::Wide => 2,
            Self::Narrow => 1,
        }
    }

    const fn max(self) -> f32 {
        match self {
            Self::Wide => WIDE_MAX,
            Self::Narrow => NARROW_MAX,
        }
    }
}

/// One block: its codes and its scale. See `canonical::round_block`.
#[inline(always)]
fn round_block<S: Simd>(s: S, v: [S::V; 2], max: f32, codes: &mut [i32; BLOCK]) -> f32 {
    let greatest = s.fold_max(s.max(s.abs(v[0]), s.abs(v[1])));
    // Infinity and NaN less themselves are NaN, all else is zero.
    let probe = s.fold_add(s.add(s.sub(v[0], v[0]), s.sub(v[1], v[1])));
    let (factor, scale) = if probe.is_nan() {
        (0.0, f32::NAN)
    } else if greatest < TINY {
        (0.0, 0.0)
    } else {
        (max / greatest, greatest / max)
    };
    if factor == 0.0 {
        *codes = [0; BLOCK];
    } else {
        let factor = s.splat(factor);
        // SAFETY: two halves of an array of 32.
        unsafe {
            s.store_i32(codes.as_mut_ptr(), s.mul(v[0], factor));
            s.store_i32(codes.as_mut_ptr().add(LANES), s.mul(v[1], factor));
        }
    }
    scale
}

/// Rounds rows to codes for integer products; the width is a multiple of 32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RoundRows {
    pub(crate) x: Mat,
    pub(crate) rounding: Rounding,
    pub(crate) out: Quantised,
}

impl RoundRows {
    /// The rows in `rows`, for one thread.
    pub(crate) fn rows(self, rows: Range<usize>) -> impl Kernel {
        RoundRange { job: self, rows }
    }
}

struct RoundRange {
    job: RoundRows,
    rows: Range<usize>,
}

impl Kernel for RoundRange {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let RoundRows { x, rounding, out } = self.job;
        for t in self.rows {
            // SAFETY: the verb has checked that `x` has these rows and reserved `out` for them.
            unsafe { round_row(s, x.row(t), rounding, out, t) };
        }
    }
}

#[inline(always)]
unsafe fn round_row<S: Simd>(s: S, x: *const f32, rounding: Rounding, out: Quantised, t: usize) {
    let blocks = out.blocks;
    let mut codes = [0i32; BLOCK];
    let mut before = 0.0;
    for b in 0..blocks {
        // SAFETY: the row has `blocks` blocks, in `x` as in `out`.
        unsafe {
            let at = x.add(b * BLOCK);
            let scale = round_block(s, [s.load(at), s.load(at.add(LANES))], rounding.max(), &mut codes);
            let first = (t * blocks + b) * BLOCK;
            match rounding {
                Rounding::Wide => {
                    let planes = std::array::from_fn(|i| codes[i % 16 * 2 + i / 16] as i16);
                    out.codes.add(2 * first).cast::<[i16; BLOCK]>().write(planes);
                }
                Rounding::Narrow => {
                    out.codes.add(first).cast::<[i8; BLOCK]>().write(codes.map(|q| q as i8));
                }
            }
            let sum = scale * codes.iter().sum::<i32>() as f32;
            out.scales.add(t * blocks + b).write(scale);
            out.sums.add(t * blocks + b).write(sum);
            if b % 2 == 1 {
                out.pair_sums.add(t * (blocks / 2) + b / 2).write(before + sum);
            }
            before = sum;
        }
    }
}

/// Rounds rows and returns them to f32, for weights that are not quantised: `scale * code`. The
/// last block may be shorter. May work in place.
#[derive(Clone, Debug)]
pub(crate) struct RoundFloats {
    pub(crate) x: Mat,
    pub(crate) out: Mat,
    pub(crate) width: usize,
    pub(crate) rounding: Rounding,
    pub(crate) rows: Range<usize>,
}

impl Kernel for RoundFloats {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut codes = [0i32; BLOCK];
        for t in self.rows {
            for first in (0..self.width).step_by(BLOCK) {
                let n = BLOCK.min(self.width - first);
                let low = n.min(LANES);
                // SAFETY: the verb has checked that both have these rows of `width`.
                unsafe {
                    let x = self.x.at(t, first);
                    let v = [s.load_part(x, low), s.load_part(x.wrapping_add(low), n - low)];
                    let scale = round_block(s, v, self.rounding.max(), &mut codes);
                    let out = self.out.at(t, first);
                    for (i, q) in codes.iter().enumerate().take(n) {
                        out.add(i).write(scale * *q as f32);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::canonical::round_block as canonical;
    use crate::simd::{Scalar, dispatch};
    use crate::isa::Isa;

    fn by_kernel(x: &[f32; 32], max: f32) -> (f32, Vec<i32>) {
        let mut codes = [0; 32];
        let halves = [x[..16].try_into().expect("16"), x[16..].try_into().expect("16")];
        let scale = round_block(Scalar, halves, max, &mut codes);
        (scale, codes.to_vec())
    }

    #[test]
    fn codes_by_hand() {
        let mut x = [0.0f32; 32];
        (x[0], x[1], x[2], x[31]) = (127.0, -63.5, 2.5, -1.5);
        let (scale, codes) = by_kernel(&x, NARROW_MAX);
        // Halves go to even.
        assert_eq!((scale, codes[0], codes[1], codes[2], codes[31]), (1.0, 127, -64, 2, -2));
        let (scale, codes) = by_kernel(&x, WIDE_MAX);
        assert_eq!((scale, codes[0], codes[1], codes[2]), (1.0 / 256.0, 32512, -16256, 640));
        assert_eq!(by_kernel(&[0.0; 32], WIDE_MAX), (0.0, vec![0; 32]));
        assert_eq!(by_kernel(&[1e-38; 32], WIDE_MAX), (0.0, vec![0; 32]));
        x[7] = f32::NEG_INFINITY;
        assert!(by_kernel(&x, WIDE_MAX).0.is_nan());
        x[7] = f32::NAN;
        assert!(by_kernel(&x, WIDE_MAX).0.is_nan());
    }

    #[test]
    fn kernels_round_as_the_definition() {
        let mut x = [0.0f32; 32];
        let mut seed = 1u32;
        for round in 0..500 {
            for x in &mut x {
                seed = seed.wrapping_mul(1664525).wrapping_add(1013904223);
                *x = (seed as i32 as f32) * (2.0f32).powi(round % 90 - 80);
            }
            for max in [NARROW_MAX, WIDE_MAX] {
                assert_eq!(by_kernel(&x, max), canonical(&x, max));
            }
        }
    }

    #[test]
    fn rounding_back_to_floats_allows_a_short_block() {
        for width in [1, 15, 16, 17, 31, 32, 33, 63, 70] {
            let x: Vec<f32> = (0..width).map(|i| (i as f32 * 0.7).sin()).collect();
            let wanted: Vec<f32> = x
                .chunks(BLOCK)
                .flat_map(|x| {
                    let (scale, codes) = canonical(x, NARROW_MAX);
                    codes.into_iter().map(move |q| scale * q as f32)
                })
                .collect();
            for isa in Isa::available() {
                let mut row = x.clone();
                let mat = Mat { ptr: row.as_mut_ptr(), stride: width };
                let rounding = Rounding::Narrow;
                dispatch(isa, RoundFloats { x: mat, out: mat, width, rounding, rows: 0..1 });
                assert_eq!(row, wanted, "{isa}");
            }
        }
    }
}
