//! Causal attention over paged keys and values.
//!
//! **Numerics.** For each (row, head), pages of keys on absolute positions, ascending. A score is
//! the chain of `canonical::dot`, times the scale. For each page: its greatest score updates the
//! running maximum; what was before is multiplied by `exp(old - new)`, result and sum (the sum
//! fused with the next step); weights `exp(score - new)` are added up in sixteen lanes (position
//! `i` and `i + 16` of the page first, then the usual tree); values are added in token order,
//! fused. The result is divided by the sum at the end. So nothing depends on which rows or heads
//! are computed together.
//!
//! Tokens that a row does not see keep their place in a page, with score minus infinity and weight
//! zero, but their keys and values are not read; a page without any is left out. So seeing
//! everything gives the same bits, however it is said. A sink begins the running maximum and sum.
#![allow(unsafe_code)]

use crate::dot::{Brain, Element, Half, Products, Single, WeightRows};
use crate::isa::Isa;
use crate::math::{exp, exp_in_lane};
use crate::simd::{Kernel, LANES, Simd, dispatch};
use crate::view::Mat;
use snowmelt_backend::{BufType, PAGE_TOKENS, Rows};
use std::marker::PhantomData;
use std::ops::Range;

/// Heads that read a page together.
pub(crate) const HEADS: usize = 8;

/// A cache by pointer: `[n_pages, PAGE_TOKENS, width]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cache {
    pub(crate) ptr: *mut u8,
    pub(crate) ty: BufType,
}

// SAFETY: a pointer; threads write disjoint tokens and read after a join.
unsafe impl Send for Cache {}
// SAFETY: as above.
unsafe impl Sync for Cache {}

/// Writes rows of K or V into a cache, rounded to its type.
#[derive(Clone, Debug)]
pub(crate) struct Store<'a> {
    pub(crate) x: Mat,
    pub(crate) cache: Cache,
    /// Elements of a token.
    pub(crate) width: usize,
    pub(crate) rows: &'a Rows,
    pub(crate) range: Range<usize>,
}

impl Kernel for Store<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.cache.ty {
            BufType::F32 => self.store::<S, Single>(s),
            BufType::F16 => self.store::<S, Half>(s),
            BufType::Bf16 => self.store::<S, Brain>(s),
        }
    }
}

impl Store<'_> {
    #[inline(always)]
    fn store<S: Simd, E: Element>(&self, s: S) {
        for t in self.range.clone() {
            let row = self.rows.rows()[t];
            let sequence = &self.rows.sequences()[row.sequence as usize];
            let at = self.rows.token_row(sequence, row.position) * self.width;
            for i in (0..self.width).step_by(LANES) {
                let n = (self.width - i).min(LANES);
                // SAFETY: the verb has checked the rows, and the cache for every page.
                unsafe {
                    let to = self.cache.ptr.add((at + i) * E::BYTES);
                    E::store_part(s, to, n, s.load_part(self.x.at(t, i), n));
                }
            }
        }
    }
}

/// Some (row, head) of a step, after K and V of all rows were written.
#[derive(Clone, Debug)]
pub(crate) struct Attend<'a> {
    pub(crate) isa: Isa,
    pub(crate) q: Mat,
    pub(crate) out: Mat,
    pub(crate) k: Cache,
    pub(crate) v: Cache,
    pub(crate) n_heads: usize,
    pub(crate) n_kv_heads: usize,
    pub(crate) d_key: usize,
    pub(crate) d_value: usize,
    /// Elements from one head's values to the next in `v`: `d_value`, or `d_key` within keys.
    pub(crate) v_head: usize,
    pub(crate) scale: f32,
    /// A score of each head.
    pub(crate) sinks: Option<&'a [f32]>,
    pub(crate) sight: Sight,
    pub(crate) rows: &'a Rows,
    /// (row, head), row first.
    pub(crate) items: Range<usize>,
    /// `[HEADS, d_value]`, this thread's own.
    pub(crate) scratch: *mut f32,
}

impl Kernel for Attend<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let group = self.n_heads / self.n_kv_heads;
        let mut item = self.items.start;
        while item < self.items.end {
            let (t, head) = (item / self.n_heads, item % self.n_heads);
            let n = (group - head % group).min(self.items.end - item).min(HEADS);
            // SAFETY: the verb has checked rows, caches and pages.
            unsafe {
                match (self.k.ty, self.v.ty) {
                    (BufType::F32, BufType::F32) => self.heads::<S, Single>(s, t, head, n),
                    (BufType::F16, BufType::F16) => self.heads::<S, Half>(s, t, head, n),
                    (BufType::Bf16, BufType::Bf16) => self.heads::<S, Brain>(s, t, head, n),
                    (k, v) => panic!("keys are {k:?}, values {v:?}: they must be of one type"),
                }
            }
            item += n;
        }
    }
}

/// Which tokens queries see, of those up to their own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sight {
    /// So many at the end.
    pub(crate) window: Option<usize>,
    /// `[n, 1 + top]`: a count, then blocks, ascending; and tokens of a block.
    pub(crate) selection: Option<(Mat, usize)>,
}

impl Sight {
    /// What row `t` of `tokens` tokens sees. Ids lie as `index_select` wrote them, at most `top`.
    #[inline(always)]
    unsafe fn row<'a>(&self, t: usize, tokens: usize) -> Seen<'a> {
        let first = self.window.map_or(0, |window| tokens.saturating_sub(window));
        let Some((ids, ratio)) = self.selection else {
            return Seen { first, tokens, blocks: &[], ratio: 1, rest: 0 };
        };
        // SAFETY: as the caller promises.
        let blocks = unsafe {
            let row = ids.row(t).cast::<u32>().cast_const();
            let count = (*row as usize).min(ids.stride - 1);
            std::slice::from_raw_parts(row.add(1), count)
        };
        Seen { first, tokens, blocks, ratio, rest: tokens / ratio * ratio }
    }
}

/// What one row sees.
#[derive(Clone, Copy)]
struct Seen<'a> {
    /// First token of the window.
    first: usize,
    /// One more than the last.
    tokens: usize,
    /// Blocks that were chosen and not yet passed.
    blocks: &'a [u32],
    ratio: usize,
    /// From this token on no choice is needed.
    rest: usize,
}

/// Bits of `range`, which lies in a page that begins at `first`.
#[inline(always)]
fn bits(range: Range<usize>, first: usize) -> u32 {
    let from = range.start.max(first) - first;
    let to = range.end.min(first + PAGE_TOKENS).saturating_sub(first);
    if from >= to { 0 } else { u32::MAX >> (PAGE_TOKENS - (to - from)) << from }
}

impl Seen<'_> {
    /// First page that the window touches.
    #[inline(always)]
    fn first_page(&self) -> usize {
        self.first / PAGE_TOKENS
    }

    /// One bit for each token of a page; pages are asked for in ascending order.
    #[inline(always)]
    fn page(&mut self, page: usize) -> u32 {
        let first = page * PAGE_TOKENS;
        let mut seen = bits(self.rest..self.tokens, first);
        while let [block, blocks @ ..] = self.blocks {
            let from = *block as usize * self.ratio;
            if from >= first + PAGE_TOKENS {
                break;
            }
            seen |= bits(from..(from + self.ratio).min(self.rest), first);
            if from + self.ratio > first + PAGE_TOKENS {
                break;
            }
            self.blocks = blocks;
        }
        seen & bits(self.first..self.tokens, first)
    }
}

/// Runs of adjacent tokens of a page.
#[inline(always)]
fn runs(mut seen: u32) -> impl Iterator<Item = Range<usize>> {
    std::iter::from_fn(move || {
        if seen == 0 {
            return None;
        }
        let start = seen.trailing_zeros();
        let end = start + (seen >> start).trailing_ones();
        seen &= u32::MAX.checked_shl(end).unwrap_or(0);
        Some(start as usize..end as usize)
    })
}

/// What one head carries from page to page.
#[derive(Clone, Copy)]
struct Running {
    max: f32,
    sum: f32,
}

impl Attend<'_> {
    /// Before the first page.
    #[inline(always)]
    fn running(&self, head: usize) -> Running {
        match self.sinks {
            Some(sinks) => Running { max: sinks[head], sum: 1.0 },
            None => Running { max: f32::NEG_INFINITY, sum: 0.0 },
        }
    }

    /// `n` heads of row `t` from `head` on, which share keys and values.
    #[inline(always)]
    unsafe fn heads<S: Simd, E: Element>(&self, s: S, t: usize, head: usize, n: usize) {
        let (d_key, d_value) = (self.d_key, self.d_value);
        let row = self.rows.rows()[t];
        let sequence = &self.rows.sequences()[row.sequence as usize];
        let tokens = row.position as usize + 1;
        let (k_width, v_width) = (self.n_kv_heads * d_key, self.n_kv_heads * self.v_head);
        let kv_head = head / (self.n_heads / self.n_kv_heads);
        let mut weights = [[0.0f32; PAGE_TOKENS]; HEADS];
        let mut q = [std::ptr::null(); HEADS];
        let mut running = [self.running(head); HEADS];
        for h in 0..n {
            q[h] = self.q.at(t, (head + h) * d_key).cast_const();
            running[h] = self.running(head + h);
        }
        // SAFETY: scratch has `HEADS * d_value`; pages hold `PAGE_TOKENS` rows of either width.
        unsafe {
            let mut sight = self.sight.row(t, tokens);
            std::ptr::write_bytes(self.scratch, 0, n * d_value);
            let pages = self.rows.pages(sequence);
            for b in sight.first_page()..tokens.div_ceil(PAGE_TOKENS) {
                let seen = sight.page(b);
                if seen == 0 {
                    continue;
                }
                let first = pages[b] as usize * PAGE_TOKENS;
                let keys = self.k.ptr.add((first * k_width + kv_head * d_key) * E::BYTES);
                self.products::<E>(keys, &q[..n], seen, &mut weights);
                let values = WeightRows {
                    ptr: self.v.ptr.add((first * v_width + kv_head * self.v_head) * E::BYTES),
                    stride: v_width * E::BYTES,
                    count: PAGE_TOKENS,
                    d_in: d_value,
                };
                for h in 0..n {
                    let factor = self.weigh(s, &mut running[h], &mut weights[h], seen);
                    let out = self.scratch.add(h * d_value);
                    add_values::<S, E>(s, values, seen, &weights[h], factor, out);
                }
            }
            for h in 0..n {
                let sum = s.splat(running[h].sum);
                let (from, to) =
                    (self.scratch.add(h * d_value), self.out.at(t, (head + h) * d_value));
                for i in (0..d_value).step_by(LANES) {
                    let n = (d_value - i).min(LANES);
                    s.store_part(to.add(i), n, s.div(s.load_part(from.add(i), n), sum));
                }
            }
        }
    }

    /// Products of the queries with the keys of a page that are seen, each in its place.
    #[inline(always)]
    unsafe fn products<E: Element>(
        &self,
        keys: *const u8,
        q: &[*const f32],
        seen: u32,
        weights: &mut [[f32; PAGE_TOKENS]; HEADS],
    ) {
        let (d_in, stride) = (self.d_key, self.n_kv_heads * self.d_key * E::BYTES);
        for run in runs(seen) {
            let mut to = [std::ptr::null_mut(); HEADS];
            for (to, weights) in to.iter_mut().zip(weights.iter_mut()) {
                *to = weights[run.start..].as_mut_ptr();
            }
            let ptr = keys.wrapping_add(run.start * stride);
            let w = WeightRows { ptr, stride, count: run.len(), d_in };
            let (x, out) = (q, &to[..q.len()]);
            dispatch(self.isa, Products::<E> { w, x, out, element: PhantomData });
        }
    }

    /// Turns the products of a page into weights and returns the factor of what came before.
    #[inline(always)]
    fn weigh<S: Simd>(
        &self,
        s: S,
        running: &mut Running,
        weights: &mut [f32; PAGE_TOKENS],
        seen: u32,
    ) -> f32 {
        let p = weights.as_mut_ptr();
        // SAFETY: a page is two vectors.
        unsafe {
            let scale = s.splat(self.scale);
            s.store(p, s.mul(s.load(p), scale));
            s.store(p.add(LANES), s.mul(s.load(p.add(LANES)), scale));
        }
        fill_unseen(weights, seen, f32::NEG_INFINITY);
        let p = weights.as_mut_ptr();
        let old = running.max;
        // SAFETY: as above.
        unsafe {
            let (a, b) = (s.load(p), s.load(p.add(LANES)));
            let greatest = s.fold_max(s.max(a, b));
            running.max = if greatest > old { greatest } else { old };
            let max = s.splat(running.max);
            s.store(p, exp(s, s.sub(a, max)));
            s.store(p.add(LANES), exp(s, s.sub(b, max)));
        }
        fill_unseen(weights, seen, 0.0);
        let factor = exp_in_lane(s, old - running.max);
        // SAFETY: as above.
        let sum = unsafe {
            let p = weights.as_ptr();
            s.fold_add(s.add(s.load(p), s.load(p.add(LANES))))
        };
        running.sum = running.sum.mul_add(factor, sum);
        factor
    }
}

/// Writes a value where a token is not seen.
#[inline(always)]
fn fill_unseen(weights: &mut [f32; PAGE_TOKENS], seen: u32, value: f32) {
    for run in runs(!seen) {
        weights[run].fill(value);
    }
}

/// `out = out * factor + sum of weight * value`, tokens in order.
#[inline(always)]
unsafe fn add_values<S: Simd, E: Element>(
    s: S,
    values: WeightRows,
    seen: u32,
    weights: &[f32; PAGE_TOKENS],
    factor: f32,
    out: *mut f32,
) {
    let d = values.d_in;
    let mut i = 0;
    // SAFETY: `count` values of `d`, and `d` elements of out.
    unsafe {
        while i + 4 * LANES <= d {
            columns::<S, E, 4>(s, values, seen, weights, factor, out.add(i), i);
            i += 4 * LANES;
        }
        while i + LANES <= d {
            columns::<S, E, 1>(s, values, seen, weights, factor, out.add(i), i);
            i += LANES;
        }
        if i < d {
            let n = d - i;
            let mut acc = s.mul(s.load_part(out.add(i), n), s.splat(factor));
            for token in runs(seen).flatten() {
                let v = E::load_part(s, values.ptr.add(token * values.stride + i * E::BYTES), n);
                acc = s.fma(s.splat(weights[token]), v, acc);
            }
            s.store_part(out.add(i), n, acc);
        }
    }
}

/// `C` vectors of columns, from column `i` of the values on.
#[inline(always)]
unsafe fn columns<S: Simd, E: Element, const C: usize>(
    s: S,
    values: WeightRows,
    seen: u32,
    weights: &[f32; PAGE_TOKENS],
    factor: f32,
    out: *mut f32,
    i: usize,
) {
    let mut acc = [s.zero(); C];
    // SAFETY: as the caller promises.
    unsafe {
        for c in 0..C {
            acc[c] = s.mul(s.load(out.add(c * LANES)), s.splat(factor));
        }
        for run in runs(seen) {
            let mut at = values.ptr.add(run.start * values.stride + i * E::BYTES);
            for weight in &weights[run] {
                let weight = s.splat(*weight);
                for c in 0..C {
                    acc[c] = s.fma(weight, E::load(s, at.add(c * LANES * E::BYTES)), acc[c]);
                }
                at = at.wrapping_add(values.stride);
            }
        }
        for c in 0..C {
            s.store(out.add(c * LANES), acc[c]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sight_by_hand() {
        let seen = |first, blocks, ratio: usize, tokens: usize| Seen {
            first,
            tokens,
            blocks,
            ratio,
            rest: tokens / ratio * ratio,
        };
        let all = |mut seen: Seen<'_>, pages: usize| -> Vec<usize> {
            let page = |p: usize| p * PAGE_TOKENS;
            (seen.first_page()..pages)
                .flat_map(|p| runs(seen.page(p)).flatten().map(move |token| page(p) + token))
                .collect()
        };
        let none = Seen { first: 0, tokens: 70, blocks: &[], ratio: 1, rest: 0 };
        assert_eq!(all(none, 3), (0..70).collect::<Vec<_>>());
        assert_eq!(all(Seen { first: 69, ..none }, 3), [69]);
        assert_eq!(all(Seen { first: 31, tokens: 34, ..none }, 3), [31, 32, 33]);
        // Blocks of three: one lies across a page, the last token is in none.
        assert_eq!(all(seen(0, &[0, 10, 21], 3, 67), 3), [0, 1, 2, 30, 31, 32, 63, 64, 65, 66]);
        assert_eq!(all(seen(31, &[0, 10, 21], 3, 67), 3), [31, 32, 63, 64, 65, 66]);
        assert_eq!(all(seen(0, &[], 3, 2), 1), [0, 1]);
        assert_eq!(all(seen(0, &[0], 64, 64), 2), (0..64).collect::<Vec<_>>());
        assert_eq!(all(seen(0, &[1, 5], 1, 6), 1), [1, 5]);
    }
}
