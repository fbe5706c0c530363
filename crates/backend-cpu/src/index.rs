//! The verb `index_select`: keys of blocks, their scores, and the greatest of them.
//!
//! **Numerics.** The key of a block is the sum of its tokens' keys, in order, divided by their
//! number; then normed and rotated as `norm` and `rope` do. A product with a head is the chain of
//! `canonical::dot`, times the scale; heads are added in order, fused with their factors.
#![allow(unsafe_code)]

use crate::attention::{Cache, Store};
use crate::backend::Run;
use crate::buf::{CpuBuf, CpuWeight};
use crate::dot::{Brain, Element, Half, Products, Single, WeightRows, product};
use crate::isa::Isa;
use crate::norm::rotate_halves;
use crate::scratch::{Sizes, index_floats};
use crate::simd::{Kernel, LANES, Simd, dispatch};
use crate::verbs::page_end;
use crate::view::Mat;
use snowmelt_backend::{BufType, IndexSelect, PAGE_TOKENS, Pool, Rows, Selection, Sequence};
use std::marker::PhantomData;
use std::ops::Range;

/// Keys that are scored together, as many as a page holds.
const KEYS: usize = PAGE_TOKENS;
/// Heads whose products are held at a time.
const HEADS: usize = 32;

/// See [`Backend::index_select`](snowmelt_backend::Backend::index_select).
pub(crate) fn index_select(
    run: &mut Run<'_>,
    args: &IndexSelect<'_, CpuWeight, CpuBuf>,
    rows: &Rows,
) -> Selection<CpuBuf> {
    let &IndexSelect { n_heads, d, scale, sum_scale, top, .. } = args;
    let n = rows.len();
    let (q, k) = (run.mat(args.q, n, n_heads * d), run.mat(args.k, n, d));
    let weights = args.weights.map(|weights| run.mat(weights, n, n_heads));
    let ids = run.dense(args.ids, n, 1 + top);
    let ptr = run.bytes(args.k_cache, &(0..page_end(rows) * PAGE_TOKENS * d));
    let cache = Cache { ptr, ty: args.k_cache.ty() };
    run.tools.kernels(n, n * d, |_, range| Store { x: k, cache, width: d, rows, range });
    let ratio = args.pool.as_ref().map_or(1, |pool| pool.ratio);
    let blocks_of = |t: usize| (rows.rows()[t].position as usize + 1) / ratio;
    let most = (0..n).map(blocks_of).max().unwrap_or(0);
    let pooled = if args.pool.is_some() { most * d } else { 0 };
    let thread = index_floats(most, if args.pool.is_some() { d } else { 0 });
    run.reserve(Sizes { pooled, thread, ..Sizes::default() });
    let (areas, tools) = (run.scratch.thread_areas(), run.tools);
    for sequence in rows.sequences() {
        let pages = rows.pages(sequence);
        let blocks = sequence.rows.clone().next_back().map_or(0, blocks_of);
        let mut keys = Keys::Cached { cache, pages };
        if let Some(pool) = &args.pool {
            let out = Mat { ptr: run.scratch.pooled(), stride: d };
            tools.kernels(blocks, blocks * (ratio * d + 64 * d), |thread, blocks| {
                PoolKeys::of(pool, cache, rows, sequence, out, blocks, areas.of(thread))
            });
            keys = Keys::Pooled(out);
        }
        let score = |t: usize, out: *mut f32, pieces: Range<usize>| {
            let blocks = blocks_of(t);
            let isa = tools.isa;
            let score = Score {
                isa,
                t,
                q,
                weights,
                n_heads,
                d,
                scale,
                sum_scale,
                keys,
                blocks,
                pieces,
                out,
            };
            dispatch(isa, score);
        };
        let count = sequence.rows.len();
        let work = blocks * n_heads * d;
        if count >= tools.threads() {
            tools.split(count, count * work, |thread, share| {
                for t in share.map(|i| sequence.rows.start + i) {
                    let (area, blocks) = (areas.of(thread), blocks_of(t));
                    score(t, area, 0..blocks.div_ceil(KEYS));
                    // SAFETY: this thread's area holds the scores; row `t` is its own.
                    unsafe { select(area, blocks, top, ids.row(t).cast()) };
                }
            });
            continue;
        }
        for t in sequence.rows.clone() {
            let (area, blocks) = (areas.of(0), blocks_of(t));
            tools.split(blocks.div_ceil(KEYS), work, |_, pieces| {
                // Threads write to places of their own.
                score(t, areas.of(0), pieces);
            });
            // SAFETY: as above; other threads are done.
            unsafe { select(area, blocks, top, ids.row(t).cast()) };
        }
    }
    Selection { ids: args.ids.clone(), top, ratio }
}

/// Where keys lie.
#[derive(Clone, Copy, Debug)]
enum Keys<'a> {
    /// One of each token.
    Cached { cache: Cache, pages: &'a [u32] },
    /// One of each block, f32.
    Pooled(Mat),
}

/// Makes the keys of some blocks of a sequence.
struct PoolKeys<'a> {
    cache: Cache,
    rows: &'a Rows,
    sequence: &'a Sequence,
    ratio: usize,
    d: usize,
    norm: &'a [f32],
    eps: f32,
    inv_freq: &'a [f32],
    rotary_scale: f32,
    out: Mat,
    blocks: Range<usize>,
    /// Room for `d` f32, this thread's own.
    scratch: *mut f32,
}

impl<'a> PoolKeys<'a> {
    fn of(
        pool: &Pool<'a, CpuWeight>,
        cache: Cache,
        rows: &'a Rows,
        sequence: &'a Sequence,
        out: Mat,
        blocks: Range<usize>,
        scratch: *mut f32,
    ) -> Self {
        let d = out.stride;
        let &Pool { ratio, eps, rotary_scale, .. } = pool;
        let inv_freq = pool.inv_freq.vector(pool.inv_freq.shape()[1]);
        assert!(2 * inv_freq.len() <= d, "{} rotated pairs of {d}", inv_freq.len());
        let norm = pool.norm.vector(d);
        Self {
            cache,
            rows,
            sequence,
            ratio,
            d,
            norm,
            eps,
            inv_freq,
            rotary_scale,
            out,
            blocks,
            scratch,
        }
    }

    #[inline(always)]
    unsafe fn block<S: Simd, E: Element>(&self, s: S, block: usize) {
        let (d, half) = (self.d, self.inv_freq.len());
        let (out, first) = (self.out.row(block), block * self.ratio);
        let token = |i: usize| {
            let row = self.rows.token_row(self.sequence, (first + i) as u32);
            self.cache.ptr.wrapping_add(row * d * E::BYTES).cast_const()
        };
        // SAFETY: the verb has checked the cache for every page; `d` elements of all operands.
        unsafe {
            for i in (0..d).step_by(LANES) {
                let n = LANES.min(d - i);
                let mut sum = s.zero();
                for t in 0..self.ratio {
                    sum = s.add(sum, E::load_part(s, token(t).add(i * E::BYTES), n));
                }
                s.store_part(out.add(i), n, s.div(sum, s.splat(self.ratio as f32)));
            }
            let square = product(s, out, out, d) / d as f32;
            let r = s.splat(1.0 / (square + self.eps).sqrt());
            for i in (0..d).step_by(LANES) {
                let n = LANES.min(d - i);
                let w = s.load_part(self.norm.as_ptr().add(i), n);
                s.store_part(out.add(i), n, s.mul(s.mul(s.load_part(out.add(i), n), r), w));
            }
            for (i, f) in self.inv_freq.iter().enumerate() {
                let angle = first as f32 * f;
                self.scratch.add(i).write(self.rotary_scale * libm::cosf(angle));
                self.scratch.add(half + i).write(self.rotary_scale * libm::sinf(angle));
            }
            rotate_halves(s, out, self.scratch, half);
        }
    }
}

impl Kernel for PoolKeys<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for block in self.blocks.clone() {
            // SAFETY: as the verb promises.
            unsafe {
                match self.cache.ty {
                    BufType::F32 => self.block::<S, Single>(s, block),
                    BufType::F16 => self.block::<S, Half>(s, block),
                    BufType::Bf16 => self.block::<S, Brain>(s, block),
                }
            }
        }
    }
}

/// Scores of some keys for one row.
struct Score<'a> {
    isa: Isa,
    t: usize,
    q: Mat,
    weights: Option<Mat>,
    n_heads: usize,
    d: usize,
    scale: f32,
    sum_scale: f32,
    keys: Keys<'a>,
    /// Keys that the row may choose.
    blocks: usize,
    /// Pieces of [`KEYS`].
    pieces: Range<usize>,
    /// Room for whole pieces.
    out: *mut f32,
}

impl Kernel for Score<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut products = [[0.0f32; KEYS]; HEADS];
        for piece in self.pieces.clone() {
            // SAFETY: the verb has checked queries, keys and weights.
            unsafe {
                match self.keys {
                    Keys::Pooled(keys) => {
                        let keys = keys.row(piece * KEYS).cast::<u8>().cast_const();
                        self.piece::<S, Single>(s, piece, keys, &mut products);
                    }
                    Keys::Cached { cache, pages } => {
                        let at = pages[piece] as usize * PAGE_TOKENS * self.d * cache.ty.bytes();
                        let keys = cache.ptr.add(at).cast_const();
                        match cache.ty {
                            BufType::F32 => {
                                self.piece::<S, Single>(s, piece, keys, &mut products);
                            }
                            BufType::F16 => self.piece::<S, Half>(s, piece, keys, &mut products),
                            BufType::Bf16 => self.piece::<S, Brain>(s, piece, keys, &mut products),
                        }
                    }
                }
            }
        }
    }
}

impl Score<'_> {
    #[inline(always)]
    unsafe fn piece<S: Simd, E: Element>(
        &self,
        s: S,
        piece: usize,
        keys: *const u8,
        products: &mut [[f32; KEYS]; HEADS],
    ) {
        let (d, count) = (self.d, KEYS.min(self.blocks - piece * KEYS));
        let w = WeightRows { ptr: keys, stride: d * E::BYTES, count, d_in: d };
        let (mut low, mut high) = (s.zero(), s.zero());
        for first in (0..self.n_heads).step_by(HEADS) {
            let heads = HEADS.min(self.n_heads - first);
            let (mut x, mut out) = ([std::ptr::null(); HEADS], [std::ptr::null_mut(); HEADS]);
            for h in 0..heads {
                x[h] = self.q.at(self.t, (first + h) * d).cast_const();
                out[h] = products[h].as_mut_ptr();
            }
            let (x, out) = (&x[..heads], &out[..heads]);
            dispatch(self.isa, Products::<E> { w, x, out, element: PhantomData });
            for h in 0..heads {
                // SAFETY: a row of weights has `n_heads`; a row of products is two vectors.
                unsafe {
                    let weight = self.weights.map_or(1.0, |w| *w.at(self.t, first + h));
                    let (weight, scale) = (s.splat(weight), s.splat(self.scale));
                    let of = |p: *const f32| s.max(s.mul(scale, s.load(p)), s.zero());
                    low = s.fma(weight, of(out[h]), low);
                    high = s.fma(weight, of(out[h].add(LANES)), high);
                }
            }
        }
        let sum_scale = s.splat(self.sum_scale);
        // SAFETY: there is room for whole pieces.
        unsafe {
            let to = self.out.add(piece * KEYS);
            s.store(to, s.mul(sum_scale, low));
            s.store(to.add(LANES), s.mul(sum_scale, high));
        }
    }
}

/// Writes the count, then the blocks of the greatest scores, ascending.
///
/// # Safety
/// `area` is as [`index_floats`] says and holds `blocks` scores; `ids` has `1 + top` elements.
unsafe fn select(area: *mut f32, blocks: usize, top: usize, ids: *mut u32) {
    let room = blocks.next_multiple_of(KEYS);
    // SAFETY: as the caller promises; the order lies behind the scores.
    let (scores, order, ids) = unsafe {
        let order = std::slice::from_raw_parts_mut(area.add(room).cast::<u32>(), blocks);
        let ids = std::slice::from_raw_parts_mut(ids, 1 + top);
        (std::slice::from_raw_parts(area, blocks), order, ids)
    };
    let count = top.min(blocks);
    ids[0] = count as u32;
    choose(scores, order, &mut ids[1..=count]);
}

/// The greatest scores, in ascending index; of equal ones the lower index. NaN counts as least.
fn choose(scores: &[f32], order: &mut [u32], ids: &mut [u32]) {
    let count = ids.len();
    for (i, order) in order.iter_mut().enumerate() {
        *order = i as u32;
    }
    if 0 < count && count < order.len() {
        let rank = |i: u32| match scores[i as usize] {
            score if score.is_nan() => f32::NEG_INFINITY,
            // Zeros are equal, whatever their sign.
            score => score + 0.0,
        };
        order.select_nth_unstable_by(count - 1, |a, b| {
            rank(*b).total_cmp(&rank(*a)).then_with(|| a.cmp(b))
        });
    }
    ids.copy_from_slice(&order[..count]);
    ids.sort_unstable();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(scores: &[f32], count: usize) -> Vec<u32> {
        let (mut order, mut ids) = (vec![0; scores.len()], vec![0; count]);
        choose(scores, &mut order, &mut ids);
        ids
    }

    #[test]
    fn the_greatest_are_chosen_and_equals_by_index() {
        assert_eq!(chosen(&[0.1, 0.4, 0.2, 0.4, 0.3], 3), [1, 3, 4]);
        assert_eq!(chosen(&[0.0, -0.0, 0.0, -0.0], 2), [0, 1]);
        assert_eq!(chosen(&[-0.0, 0.0, 1.0], 2), [0, 2]);
        assert_eq!(chosen(&[f32::NAN, -1.0, f32::NAN, -2.0], 3), [0, 1, 3]);
        assert_eq!(chosen(&[1.0, 2.0], 2), [0, 1]);
        assert_eq!(chosen(&[1.0, 2.0], 0), [0u32; 0]);
    }
}
