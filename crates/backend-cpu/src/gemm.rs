//! Products of quantised weights and rounded activations: eight weight rows at a time.
//!
//! Every output is the chain of `canonical::dot_quantised`. The eight rows of a tile are the eight
//! lanes of one vector, so their chains run side by side; integer sums are exact, so how an
//! instruction set forms them is its own affair.
#![allow(unsafe_code)]

use crate::canonical::BLOCK;
use crate::quantise::Quantised;
use crate::simd::{Params, Simd};

/// Rows of a tile.
pub(crate) const TILE: usize = 8;

/// How a row of quantised weights is stored.
pub(crate) trait Format: 'static {
    /// Bytes of the codes of one block of 32.
    const BLOCK_BYTES: usize;
    /// Blocks that share a scale.
    const GROUP_BLOCKS: usize;
    /// Whether biases follow the scales.
    const BIASED: bool;
    /// Codes of a block beside i16 activations.
    unsafe fn wide<S: Simd>(s: S, p: *const u8) -> S::Wide;
    /// Codes of a block beside i8 activations.
    unsafe fn narrow<S: Simd>(s: S, p: *const u8) -> S::Narrow;
    /// Product with i8 activations.
    unsafe fn narrow_dot<S: Simd>(s: S, codes: S::Narrow, x: *const i8) -> S::Sums;
}

/// Signed bytes.
#[derive(Debug)]
pub(crate) struct Q8;
/// Nibbles, `GROUP` blocks to a scale.
#[derive(Debug)]
pub(crate) struct Q4<const GROUP: usize>;

impl Format for Q8 {
    const BLOCK_BYTES: usize = 32;
    const GROUP_BLOCKS: usize = 1;
    const BIASED: bool = false;
    #[inline(always)]
    unsafe fn wide<S: Simd>(s: S, p: *const u8) -> S::Wide {
        // SAFETY: as the caller promises.
        unsafe { s.wide_q8(p) }
    }
    #[inline(always)]
    unsafe fn narrow<S: Simd>(s: S, p: *const u8) -> S::Narrow {
        // SAFETY: as the caller promises.
        unsafe { s.narrow_q8(p) }
    }
    #[inline(always)]
    unsafe fn narrow_dot<S: Simd>(s: S, codes: S::Narrow, x: *const i8) -> S::Sums {
        // SAFETY: as the caller promises.
        unsafe { s.narrow_dot_q8(codes, x) }
    }
}

impl<const GROUP: usize> Format for Q4<GROUP> {
    const BLOCK_BYTES: usize = 16;
    const GROUP_BLOCKS: usize = GROUP;
    const BIASED: bool = true;
    #[inline(always)]
    unsafe fn wide<S: Simd>(s: S, p: *const u8) -> S::Wide {
        // SAFETY: as the caller promises.
        unsafe { s.wide_q4(p) }
    }
    #[inline(always)]
    unsafe fn narrow<S: Simd>(s: S, p: *const u8) -> S::Narrow {
        // SAFETY: as the caller promises.
        unsafe { s.narrow_q4(p) }
    }
    #[inline(always)]
    unsafe fn narrow_dot<S: Simd>(s: S, codes: S::Narrow, x: *const i8) -> S::Sums {
        // SAFETY: as the caller promises.
        unsafe { s.narrow_dot_q4(codes, x) }
    }
}

/// How activations are stored beside the codes.
pub(crate) trait Activation: 'static {
    /// Bytes of a block.
    const BLOCK_BYTES: usize;
    /// Codes of a weight block, unpacked.
    type Codes<S: Simd>: Copy;
    /// Unpacks one block.
    unsafe fn codes<S: Simd, F: Format>(s: S, p: *const u8) -> Self::Codes<S>;
    /// Exact product of one block.
    unsafe fn dot<S: Simd, F: Format>(s: S, codes: Self::Codes<S>, x: *const u8) -> S::Sums;
}

/// i16, even elements before odd ones.
#[derive(Debug)]
pub(crate) struct Wide;
/// i8, in order.
#[derive(Debug)]
pub(crate) struct Narrow;

impl Activation for Wide {
    const BLOCK_BYTES: usize = 2 * BLOCK;
    type Codes<S: Simd> = S::Wide;
    #[inline(always)]
    unsafe fn codes<S: Simd, F: Format>(s: S, p: *const u8) -> S::Wide {
        // SAFETY: as the caller promises.
        unsafe { F::wide(s, p) }
    }
    #[inline(always)]
    unsafe fn dot<S: Simd, F: Format>(s: S, codes: S::Wide, x: *const u8) -> S::Sums {
        // SAFETY: as the caller promises; loads need no alignment.
        unsafe { s.wide_dot(codes, x.cast()) }
    }
}

impl Activation for Narrow {
    const BLOCK_BYTES: usize = BLOCK;
    type Codes<S: Simd> = S::Narrow;
    #[inline(always)]
    unsafe fn codes<S: Simd, F: Format>(s: S, p: *const u8) -> S::Narrow {
        // SAFETY: as the caller promises.
        unsafe { F::narrow(s, p) }
    }
    #[inline(always)]
    unsafe fn dot<S: Simd, F: Format>(s: S, codes: S::Narrow, x: *const u8) -> S::Sums {
        // SAFETY: as the caller promises.
        unsafe { F::narrow_dot(s, codes, x.cast()) }
    }
}

/// One row of rounded activations.
#[derive(Clone, Copy, Debug)]
pub(crate) struct XRow {
    codes: *const u8,
    scales: *const f32,
    /// One sum for each group of the weights.
    sums: *const f32,
}

impl XRow {
    /// Row `t`, for weights of `F`.
    #[inline(always)]
    pub(crate) fn of<F: Format, A: Activation>(x: &Quantised, t: usize) -> Self {
        let sums = if F::GROUP_BLOCKS == 1 {
            x.sums.wrapping_add(t * x.blocks)
        } else {
            x.pair_sums.wrapping_add(t * (x.blocks / 2))
        };
        Self {
            codes: x.codes.wrapping_add(t * x.blocks * A::BLOCK_BYTES),
            scales: x.scales.wrapping_add(t * x.blocks),
            sums,
        }
    }
}

/// Eight weight rows times `N` rows of x.
///
/// # Safety
/// Every row has `blocks` blocks.
#[inline(always)]
pub(crate) unsafe fn tile<S: Simd, F: Format, A: Activation, const N: usize>(
    s: S,
    w: &[*const u8; TILE],
    x: &[XRow; N],
    blocks: usize,
) -> [S::H; N] {
    let groups = blocks / F::GROUP_BLOCKS;
    let mut acc = [s.h_splat(0.0); N];
    let mut bias = [s.h_splat(0.0); N];
    let (mut scales, mut biases): (Params, Params) = ([[0.0; 8]; 8], [[0.0; 8]; 8]);
    let mut first = 0;
    while first < groups {
        let count = (groups - first).min(8);
        let after_codes = blocks * F::BLOCK_BYTES + 2 * first;
        // SAFETY: scales follow the codes, and biases the scales, one for each group.
        unsafe {
            s.params(&w.map(|w| w.add(after_codes)), count, &mut scales);
            if F::BIASED {
                s.params(&w.map(|w| w.add(after_codes + 2 * groups)), count, &mut biases);
            }
        }
        for k in 0..count {
            let g = first + k;
            // SAFETY: eight f32; blocks and groups below the counts that every row has.
            unsafe {
                let scale = s.h_load(scales[k].as_ptr());
                for b in g * F::GROUP_BLOCKS..(g + 1) * F::GROUP_BLOCKS {
                    block::<S, F, A, N>(s, w, x, b, scale, &mut acc);
                }
                if F::BIASED {
                    let of_group = s.h_load(biases[k].as_ptr());
                    for j in 0..N {
                        bias[j] = s.h_fma(of_group, s.h_splat(*x[j].sums.add(g)), bias[j]);
                    }
                }
            }
        }
        first += 8;
    }
    if F::BIASED {
        for j in 0..N {
            acc[j] = s.h_add(acc[j], bias[j]);
        }
    }
    acc
}

/// Adds block `b` to the chains of a tile.
#[inline(always)]
unsafe fn block<S: Simd, F: Format, A: Activation, const N: usize>(
    s: S,
    w: &[*const u8; TILE],
    x: &[XRow; N],
    b: usize,
    scale: S::H,
    acc: &mut [S::H; N],
) {
    let mut sums = [[s.sums_zero(); TILE]; N];
    for r in 0..TILE {
        // SAFETY: the caller's rows have block `b`.
        unsafe {
            let codes = A::codes::<S, F>(s, w[r].add(b * F::BLOCK_BYTES));
            for j in 0..N {
                sums[j][r] = A::dot::<S, F>(s, codes, x[j].codes.add(b * A::BLOCK_BYTES));
            }
        }
    }
    for j in 0..N {
        // SAFETY: as above.
        let s_x = s.h_splat(unsafe { *x[j].scales.add(b) });
        acc[j] = s.h_fma(s.reduce(&sums[j]), s.h_mul(scale, s_x), acc[j]);
    }
}
