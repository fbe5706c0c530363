//! Causal attention over paged keys and values.
//!
//! **Numerics.** For each (row, head), pages of keys on absolute positions, ascending. A score is
//! the chain of `canonical::dot`, times the scale. For each page: its greatest score updates the
//! running maximum; what was before is multiplied by `exp(old - new)`, result and sum (the sum
//! fused with the next step); weights `exp(score - new)` are added up in sixteen lanes (position
//! `i` and `i + 16` of the page first, then the usual tree); values are added in token order,
//! fused. The result is divided by the sum at the end. So nothing depends on which rows or heads
//! are computed together.
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

/// A cache by pointer: `[n_pages, PAGE_TOKENS, n_kv_heads * d_head]`.
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
    /// `n_kv_heads * d_head`
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
    pub(crate) d_head: usize,
    pub(crate) scale: f32,
    pub(crate) rows: &'a Rows,
    /// (row, head), row first.
    pub(crate) items: Range<usize>,
    /// `[HEADS, d_head]`, this thread's own.
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

/// What one head carries from page to page.
#[derive(Clone, Copy)]
struct Running {
    max: f32,
    sum: f32,
}

impl Attend<'_> {
    /// `n` heads of row `t` from `head` on, which share keys and values.
    #[inline(always)]
    unsafe fn heads<S: Simd, E: Element>(&self, s: S, t: usize, head: usize, n: usize) {
        let d = self.d_head;
        let row = self.rows.rows()[t];
        let sequence = &self.rows.sequences()[row.sequence as usize];
        let tokens = row.position as usize + 1;
        let width = self.n_kv_heads * d;
        let column = head / (self.n_heads / self.n_kv_heads) * d;
        let mut weights = [[0.0f32; PAGE_TOKENS]; HEADS];
        let (mut q, mut to) = ([std::ptr::null(); HEADS], [std::ptr::null_mut(); HEADS]);
        for h in 0..n {
            q[h] = self.q.at(t, (head + h) * d).cast_const();
            to[h] = weights[h].as_mut_ptr();
        }
        let mut running = [Running { max: f32::NEG_INFINITY, sum: 0.0 }; HEADS];
        // SAFETY: scratch has `HEADS * d`; pages hold `PAGE_TOKENS` rows of `width`.
        unsafe {
            std::ptr::write_bytes(self.scratch, 0, n * d);
            for (b, page) in self.rows.pages(sequence).iter().enumerate() {
                let Some(left) = tokens.checked_sub(b * PAGE_TOKENS).filter(|left| *left > 0)
                else {
                    break;
                };
                let count = left.min(PAGE_TOKENS);
                let at = (*page as usize * PAGE_TOKENS * width + column) * E::BYTES;
                let stride = width * E::BYTES;
                let keys = WeightRows { ptr: self.k.ptr.add(at), stride, count, d_in: d };
                let (x, out) = (&q[..n], &to[..n]);
                dispatch(self.isa, Products::<E> { w: keys, x, out, element: PhantomData });
                let values = WeightRows { ptr: self.v.ptr.add(at), ..keys };
                for h in 0..n {
                    let factor = self.weigh(s, &mut running[h], &mut weights[h], count);
                    let out = self.scratch.add(h * d);
                    add_values::<S, E>(s, values, &weights[h], factor, out);
                }
            }
            for h in 0..n {
                let sum = s.splat(running[h].sum);
                let (from, to) = (self.scratch.add(h * d), self.out.at(t, (head + h) * d));
                for i in (0..d).step_by(LANES) {
                    let n = (d - i).min(LANES);
                    s.store_part(to.add(i), n, s.div(s.load_part(from.add(i), n), sum));
                }
            }
        }
    }

    /// Turns the products of a page into weights and returns the factor of what came before.
    #[inline(always)]
    fn weigh<S: Simd>(
        &self,
        s: S,
        running: &mut Running,
        weights: &mut [f32; PAGE_TOKENS],
        count: usize,
    ) -> f32 {
        let p = weights.as_mut_ptr();
        // SAFETY: a page is two vectors.
        unsafe {
            let scale = s.splat(self.scale);
            s.store(p, s.mul(s.load(p), scale));
            s.store(p.add(LANES), s.mul(s.load(p.add(LANES)), scale));
        }
        weights[count..].fill(f32::NEG_INFINITY);
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
        weights[count..].fill(0.0);
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

/// `out = out * factor + sum of weight * value`, tokens in order.
#[inline(always)]
unsafe fn add_values<S: Simd, E: Element>(
    s: S,
    values: WeightRows,
    weights: &[f32; PAGE_TOKENS],
    factor: f32,
    out: *mut f32,
) {
    let d = values.d_in;
    let mut i = 0;
    // SAFETY: `count` values of `d`, and `d` elements of out.
    unsafe {
        while i + 4 * LANES <= d {
            columns::<S, E, 4>(s, values, weights, factor, out, i);
            i += 4 * LANES;
        }
        while i + LANES <= d {
            columns::<S, E, 1>(s, values, weights, factor, out, i);
            i += LANES;
        }
        if i < d {
            let n = d - i;
            let mut acc = s.mul(s.load_part(out.add(i), n), s.splat(factor));
            for (token, weight) in weights.iter().enumerate().take(values.count) {
                let v = E::load_part(s, values.ptr.add(token * values.stride + i * E::BYTES), n);
                acc = s.fma(s.splat(*weight), v, acc);
            }
            s.store_part(out.add(i), n, acc);
        }
    }
}

/// `C` vectors of columns from `i` on.
#[inline(always)]
unsafe fn columns<S: Simd, E: Element, const C: usize>(
    s: S,
    values: WeightRows,
    weights: &[f32; PAGE_TOKENS],
    factor: f32,
    out: *mut f32,
    i: usize,
) {
    let mut acc = [s.zero(); C];
    // SAFETY: as the caller promises.
    unsafe {
        for c in 0..C {
            acc[c] = s.mul(s.load(out.add(i + c * LANES)), s.splat(factor));
        }
        let mut at = values.ptr.add(i * E::BYTES);
        for weight in &weights[..values.count] {
            let weight = s.splat(*weight);
            for c in 0..C {
                acc[c] = s.fma(weight, E::load(s, at.add(c * LANES * E::BYTES)), acc[c]);
            }
            at = at.wrapping_add(values.stride);
        }
        for c in 0..C {
            s.store(out.add(i + c * LANES), acc[c]);
        }
    }
}
