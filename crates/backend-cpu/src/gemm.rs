//! Products of quantised weights and rounded activations: eight weight rows at a time.
//!
//! Every output is the chain of `canonical::dot_quantised`. The eight rows of a tile are the eight
//! lanes of one vector, so their chains run side by side; integer sums are exact, so how an
//! instruction set forms them is its own affair.
#![allow(unsafe_code)]

use crate::quantise::{Quantised, Rounding};
use crate::simd::{Params, Simd};

/// Rows of a tile.
pub(crate) const TILE: usize = 8;

/// Bytes of the codes of two blocks at most.
const PAIR_MAX: usize = 64;

/// How a row of quantised weights is stored.
pub(crate) trait Format: 'static {
    /// Bytes of the codes of two blocks.
    const PAIR_BYTES: usize;
    /// Blocks that share a scale: 1 or 2.
    const GROUP_BLOCKS: usize;
    /// Whether biases follow the scales.
    const BIASED: bool;
    /// Codes of two blocks, unpacked.
    type Codes<S: Simd, A: Activation>: Copy;
    /// Unpacks the codes of two blocks.
    unsafe fn codes<S: Simd, A: Activation>(s: S, p: *const u8) -> Self::Codes<S, A>;
    /// Exact products of two blocks.
    unsafe fn dot<S: Simd, A: Activation>(s: S, codes: Self::Codes<S, A>, x: *const u8) -> S::Sums;
}

/// Signed bytes.
#[derive(Debug)]
pub(crate) struct Q8;
/// Nibbles, `GROUP` blocks to a scale.
#[derive(Debug)]
pub(crate) struct Q4<const GROUP: usize>;

impl Format for Q8 {
    const PAIR_BYTES: usize = 64;
    const GROUP_BLOCKS: usize = 1;
    const BIASED: bool = false;
    type Codes<S: Simd, A: Activation> = A::Q8<S>;
    #[inline(always)]
    unsafe fn codes<S: Simd, A: Activation>(s: S, p: *const u8) -> A::Q8<S> {
        // SAFETY: as the caller promises.
        unsafe { A::q8(s, p) }
    }
    #[inline(always)]
    unsafe fn dot<S: Simd, A: Activation>(s: S, codes: A::Q8<S>, x: *const u8) -> S::Sums {
        // SAFETY: as the caller promises.
        unsafe { A::dot_q8(s, codes, x) }
    }
}

impl<const GROUP: usize> Format for Q4<GROUP> {
    const PAIR_BYTES: usize = 32;
    const GROUP_BLOCKS: usize = GROUP;
    const BIASED: bool = true;
    type Codes<S: Simd, A: Activation> = S::Q4;
    #[inline(always)]
    unsafe fn codes<S: Simd, A: Activation>(s: S, p: *const u8) -> S::Q4 {
        // SAFETY: as the caller promises.
        unsafe { s.q4(p) }
    }
    #[inline(always)]
    unsafe fn dot<S: Simd, A: Activation>(s: S, codes: S::Q4, x: *const u8) -> S::Sums {
        // SAFETY: as the caller promises.
        unsafe { A::dot_q4(s, codes, x) }
    }
}

/// How activations are rounded.
pub(crate) trait Activation: 'static {
    /// Which.
    const ROUNDING: Rounding;
    /// Signed bytes of two weight blocks, unpacked.
    type Q8<S: Simd>: Copy;
    /// Unpacks them.
    unsafe fn q8<S: Simd>(s: S, p: *const u8) -> Self::Q8<S>;
    /// Products with them.
    unsafe fn dot_q8<S: Simd>(s: S, codes: Self::Q8<S>, x: *const u8) -> S::Sums;
    /// Products with nibbles.
    unsafe fn dot_q4<S: Simd>(s: S, codes: S::Q4, x: *const u8) -> S::Sums;
}

/// To 16 bits.
#[derive(Debug)]
pub(crate) struct Wide;
/// To 8 bits.
#[derive(Debug)]
pub(crate) struct Narrow;

impl Activation for Wide {
    const ROUNDING: Rounding = Rounding::Wide;
    type Q8<S: Simd> = S::Q8Wide;
    #[inline(always)]
    unsafe fn q8<S: Simd>(s: S, p: *const u8) -> S::Q8Wide {
        // SAFETY: as the caller promises.
        unsafe { s.q8_wide(p) }
    }
    #[inline(always)]
    unsafe fn dot_q8<S: Simd>(s: S, codes: S::Q8Wide, x: *const u8) -> S::Sums {
        // SAFETY: as the caller promises.
        unsafe { s.q8_wide_dot(codes, x) }
    }
    #[inline(always)]
    unsafe fn dot_q4<S: Simd>(s: S, codes: S::Q4, x: *const u8) -> S::Sums {
        // SAFETY: as the caller promises.
        unsafe { s.q4_wide_dot(codes, x) }
    }
}

impl Activation for Narrow {
    const ROUNDING: Rounding = Rounding::Narrow;
    type Q8<S: Simd> = S::Q8Narrow;
    #[inline(always)]
    unsafe fn q8<S: Simd>(s: S, p: *const u8) -> S::Q8Narrow {
        // SAFETY: as the caller promises.
        unsafe { s.q8_narrow(p) }
    }
    #[inline(always)]
    unsafe fn dot_q8<S: Simd>(s: S, codes: S::Q8Narrow, x: *const u8) -> S::Sums {
        // SAFETY: as the caller promises.
        unsafe { s.q8_narrow_dot(codes, x) }
    }
    #[inline(always)]
    unsafe fn dot_q4<S: Simd>(s: S, codes: S::Q4, x: *const u8) -> S::Sums {
        // SAFETY: as the caller promises.
        unsafe { s.q4_narrow_dot(codes, x) }
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
        let pairs = t * x.pairs();
        let sums = if F::GROUP_BLOCKS == 1 {
            x.sums.wrapping_add(2 * pairs)
        } else {
            x.pair_sums.wrapping_add(pairs)
        };
        Self {
            codes: x.codes.wrapping_add(pairs * A::ROUNDING.pair_bytes()),
            scales: x.scales.wrapping_add(2 * pairs),
            sums,
        }
    }
}

/// Eight weight rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows8 {
    pub(crate) rows: [*const u8; TILE],
    /// Where the next eight begin, or anything else worth having in the cache.
    pub(crate) next: *const u8,
    /// Blocks of a row.
    pub(crate) blocks: usize,
}

/// Chains of a tile: one for products and one for biases.
#[derive(Clone, Copy)]
struct Chains<H, const N: usize> {
    acc: [H; N],
    bias: [H; N],
}

/// Eight weight rows times `N` rows of x.
///
/// # Safety
/// Every row of weights has `blocks` blocks; x has as many, completed to pairs.
#[inline(always)]
pub(crate) unsafe fn tile<S: Simd, F: Format, A: Activation, const N: usize>(
    s: S,
    w: &Rows8,
    x: &[XRow; N],
) -> [S::H; N] {
    let blocks = w.blocks;
    let groups = blocks / F::GROUP_BLOCKS;
    let mut chains = Chains { acc: [s.h_splat(0.0); N], bias: [s.h_splat(0.0); N] };
    let mut params: [Params; 2] = [[[0.0; 8]; 8]; 2];
    let mut first = 0;
    while first < groups {
        let count = (groups - first).min(8);
        let after_codes = blocks * (F::PAIR_BYTES / 2) + 2 * first;
        // SAFETY: scales follow the codes, and biases the scales, one for each group.
        unsafe {
            s.params(&w.rows.map(|w| w.add(after_codes)), count, &mut params[0]);
            if F::BIASED {
                let after_scales = after_codes + 2 * groups;
                s.params(&w.rows.map(|w| w.add(after_scales)), count, &mut params[1]);
            }
        }
        let step = 2 / F::GROUP_BLOCKS;
        for k in (0..count).step_by(step) {
            let pair = (first + k) / step;
            // SAFETY: pairs below the count that every row has; the last may be half a one.
            unsafe {
                if 2 * pair + 2 <= blocks {
                    let from = w.rows.map(|w| w.add(pair * F::PAIR_BYTES));
                    ahead::<S, F, N>(s, w, pair);
                    add_pair::<S, F, A, N>(s, &from, x, [pair, 2, k], &params, &mut chains);
                } else {
                    let mut last = [[0u8; PAIR_MAX]; TILE];
                    for (last, w) in last.iter_mut().zip(w.rows) {
                        let codes = w.add(pair * F::PAIR_BYTES);
                        last.as_mut_ptr().copy_from_nonoverlapping(codes, F::PAIR_BYTES / 2);
                    }
                    let from: [*const u8; TILE] = std::array::from_fn(|r| last[r].as_ptr());
                    add_pair::<S, F, A, N>(s, &from, x, [pair, 1, k], &params, &mut chains);
                }
            }
        }
        first += 8;
    }
    if F::BIASED {
        for j in 0..N {
            chains.acc[j] = s.h_add(chains.acc[j], chains.bias[j]);
        }
    }
    chains.acc
}

/// Adds `count` blocks of a pair to the chains of a tile; `k` is their first group in `params`.
#[inline(always)]
unsafe fn add_pair<S: Simd, F: Format, A: Activation, const N: usize>(
    s: S,
    w: &[*const u8; TILE],
    x: &[XRow; N],
    [pair, count, k]: [usize; 3],
    params: &[Params; 2],
    chains: &mut Chains<S::H, N>,
) {
    let mut sums = [[s.sums_zero(); TILE]; N];
    for r in 0..TILE {
        // SAFETY: the caller's rows have this pair.
        unsafe {
            let codes = F::codes::<S, A>(s, w[r]);
            for j in 0..N {
                let x = x[j].codes.add(pair * A::ROUNDING.pair_bytes());
                sums[j][r] = F::dot::<S, A>(s, codes, x);
            }
        }
    }
    for j in 0..N {
        let d = s.reduce(&sums[j]);
        // SAFETY: eight f32 in each group of `params`; x has this pair.
        unsafe {
            for b in 0..count {
                let scale = s.h_load(params[0][k + b / F::GROUP_BLOCKS].as_ptr());
                let s_x = s.h_splat(*x[j].scales.add(2 * pair + b));
                chains.acc[j] = s.h_fma(d[b], s.h_mul(scale, s_x), chains.acc[j]);
            }
            if F::BIASED {
                for g in 0..count / F::GROUP_BLOCKS {
                    let bias = s.h_load(params[1][k + g].as_ptr());
                    let sum = s.h_splat(*x[j].sums.add(2 * pair / F::GROUP_BLOCKS + g));
                    chains.bias[j] = s.h_fma(bias, sum, chains.bias[j]);
                }
            }
        }
    }
}

/// Asks for that share of the next eight rows which corresponds to this pair of the present ones:
/// with eight streams at a time the machine's own prefetch is late.
#[inline(always)]
fn ahead<S: Simd, F: Format, const N: usize>(s: S, w: &Rows8, pair: usize) {
    if N == 1 {
        let params = 2 / F::GROUP_BLOCKS * if F::BIASED { 4 } else { 2 };
        let bytes = TILE * (F::PAIR_BYTES + params);
        for line in 0..bytes.div_ceil(64) {
            s.prefetch(w.next.wrapping_add(pair * bytes + 64 * line));
        }
    }
}
