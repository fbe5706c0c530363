//! Rounding of activations in blocks of 32 along a row.
#![allow(unsafe_code)]

use crate::canonical::{BLOCK, NARROW_MAX, TINY, WIDE_MAX};
use crate::simd::{Kernel, LANES, Simd};
use crate::view::Mat;
use snowmelt_weights::Encoding;
use std::ops::Range;

/// Rows of rounded activations, by pointer. Strides follow from `blocks`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Quantised {
    /// `[n, pairs]` of two blocks, in a [`CodeLayout`].
    pub(crate) codes: *mut u8,
    /// `[n, pairs, 2]`
    pub(crate) scales: *mut f32,
    /// `[n, pairs, 2]`: scale times the sum of codes.
    pub(crate) sums: *mut f32,
    /// `[n, pairs]`: the same for two blocks, added.
    pub(crate) pair_sums: *mut f32,
    /// Blocks of a row; where they are odd, one more of zeros completes the last pair.
    pub(crate) blocks: usize,
}

// SAFETY: pointers into scratch; threads write disjoint rows and read after a join.
unsafe impl Send for Quantised {}
// SAFETY: as above.
unsafe impl Sync for Quantised {}

impl Quantised {
    /// Pairs of blocks of a row.
    #[inline(always)]
    pub(crate) fn pairs(&self) -> usize {
        self.blocks.div_ceil(2)
    }

    /// The rows from `first` on.
    pub(crate) fn skip(self, first: usize, rounding: Rounding) -> Self {
        let pairs = first * self.pairs();
        Self {
            codes: self.codes.wrapping_add(pairs * rounding.pair_bytes()),
            scales: self.scales.wrapping_add(2 * pairs),
            sums: self.sums.wrapping_add(2 * pairs),
            pair_sums: self.pair_sums.wrapping_add(pairs),
            blocks: self.blocks,
        }
    }
}

/// How the codes of two blocks lie: as the products with nibbles or bytes want them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CodeLayout {
    /// i8 planes: upper bytes of even elements, of odd ones, then lower bytes of either; a code is
    /// 256 times the upper one plus the lower one, which is signed.
    WideQ4,
    /// i16, for each block: even elements, then odd ones.
    WideQ8,
    /// i8: even elements of both blocks, then odd ones.
    NarrowQ4,
    /// i8, in order.
    NarrowQ8,
}

impl CodeLayout {
    /// The layout beside weights of `encoding`.
    pub(crate) fn of(rounding: Rounding, encoding: Encoding) -> Self {
        match (rounding, encoding == Encoding::Q8) {
            (Rounding::Wide, false) => Self::WideQ4,
            (Rounding::Wide, true) => Self::WideQ8,
            (Rounding::Narrow, false) => Self::NarrowQ4,
            (Rounding::Narrow, true) => Self::NarrowQ8,
        }
    }

    const fn rounding(self) -> Rounding {
        match self {
            Self::WideQ4 | Self::WideQ8 => Rounding::Wide,
            Self::NarrowQ4 | Self::NarrowQ8 => Rounding::Narrow,
        }
    }

    /// Stores the codes of two blocks.
    #[inline(always)]
    unsafe fn store(self, codes: &[[i32; BLOCK]; 2], to: *mut u8) {
        // Element `i` of a plane of even or odd ones.
        let plane = |i: usize, odd: usize| codes[i / 16][i % 16 * 2 + odd];
        // SAFETY: the caller has room for a pair in this layout, and aligned it to 64 bytes.
        unsafe {
            match self {
                Self::WideQ4 => {
                    let lower = |i, odd| plane(i, odd) as i8;
                    let upper = |i, odd| ((plane(i, odd) - i32::from(lower(i, odd))) >> 8) as i8;
                    let bytes: [[i8; 32]; 4] = [
                        std::array::from_fn(|i| upper(i, 0)),
                        std::array::from_fn(|i| upper(i, 1)),
                        std::array::from_fn(|i| lower(i, 0)),
                        std::array::from_fn(|i| lower(i, 1)),
                    ];
                    to.cast::<[[i8; 32]; 4]>().write(bytes);
                }
                Self::WideQ8 => {
                    let words: [[i16; 32]; 2] = std::array::from_fn(|b| {
                        std::array::from_fn(|i| codes[b][i % 16 * 2 + i / 16] as i16)
                    });
                    to.cast::<[[i16; 32]; 2]>().write_unaligned(words);
                }
                Self::NarrowQ4 => {
                    let bytes: [[i8; 32]; 2] = [
                        std::array::from_fn(|i| plane(i, 0) as i8),
                        std::array::from_fn(|i| plane(i, 1) as i8),
                    ];
                    to.cast::<[[i8; 32]; 2]>().write(bytes);
                }
                Self::NarrowQ8 => {
                    to.cast::<[[i8; 32]; 2]>().write(codes.map(|codes| codes.map(|q| q as i8)));
                }
            }
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
    /// Bytes of the codes of two blocks.
    pub(crate) const fn pair_bytes(self) -> usize {
        match self {
            Self::Wide => 4 * BLOCK,
            Self::Narrow => 2 * BLOCK,
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

/// Which rows are rounded; each keeps its place.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Which<'a> {
    /// The first so many.
    All(usize),
    /// These.
    These(&'a [u32]),
}

impl Which<'_> {
    /// How many.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::All(n) => *n,
            Self::These(rows) => rows.len(),
        }
    }

    #[inline(always)]
    fn row(&self, i: usize) -> usize {
        match self {
            Self::All(_) => i,
            Self::These(rows) => rows[i] as usize,
        }
    }
}

/// Rounds rows to codes for integer products; the width is a multiple of 32.
#[derive(Clone, Debug)]
pub(crate) struct RoundRows<'a> {
    pub(crate) x: Mat,
    pub(crate) layout: CodeLayout,
    pub(crate) out: Quantised,
    pub(crate) rows: Which<'a>,
    /// Those of `rows` that are this thread's.
    pub(crate) range: Range<usize>,
}

impl Kernel for RoundRows<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for i in self.range {
            let t = self.rows.row(i);
            // SAFETY: the verb has checked that `x` has these rows and reserved `out` for them.
            unsafe { round_row(s, self.x.row(t), self.layout, self.out, t) };
        }
    }
}

#[inline(always)]
unsafe fn round_row<S: Simd>(s: S, x: *const f32, layout: CodeLayout, out: Quantised, t: usize) {
    let rounding = layout.rounding();
    for pair in 0..out.pairs() {
        let (mut codes, mut scales, mut sums) = ([[0i32; BLOCK]; 2], [0.0f32; 2], [0.0f32; 2]);
        let at = t * out.pairs() + pair;
        // SAFETY: the row has `blocks` blocks in `x`, and room for all pairs in `out`.
        unsafe {
            for b in 0..2.min(out.blocks - 2 * pair) {
                let x = x.add((2 * pair + b) * BLOCK);
                let v = [s.load(x), s.load(x.add(LANES))];
                scales[b] = round_block(s, v, rounding.max(), &mut codes[b]);
                sums[b] = scales[b] * codes[b].iter().sum::<i32>() as f32;
            }
            layout.store(&codes, out.codes.add(at * rounding.pair_bytes()));
            out.scales.add(2 * at).cast::<[f32; 2]>().write(scales);
            out.sums.add(2 * at).cast::<[f32; 2]>().write(sums);
            out.pair_sums.add(at).write(sums[0] + sums[1]);
        }
    }
}

/// Rounds rows and returns them to f32, for weights that are not quantised: `scale * code`. The
/// last block may be shorter. May work in place.
#[derive(Clone, Debug)]
pub(crate) struct RoundFloats<'a> {
    pub(crate) x: Mat,
    pub(crate) out: Mat,
    pub(crate) width: usize,
    pub(crate) rounding: Rounding,
    pub(crate) rows: Which<'a>,
    /// Those of `rows` that are this thread's.
    pub(crate) range: Range<usize>,
}

impl Kernel for RoundFloats<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut codes = [0i32; BLOCK];
        for i in self.range {
            let t = self.rows.row(i);
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
    use crate::isa::Isa;
    use crate::simd::{Scalar, dispatch};

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
                let (rounding, rows) = (Rounding::Narrow, Which::All(1));
                dispatch(isa, RoundFloats { x: mat, out: mat, width, rounding, rows, range: 0..1 });
                assert_eq!(row, wanted, "{isa}");
            }
        }
    }
}
