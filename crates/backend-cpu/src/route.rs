//! The router, and the sum of what its experts returned.
#![allow(unsafe_code)]

use crate::math::{exp, sigmoid};
use crate::simd::{Kernel, LANES, Simd};
use crate::view::Mat;
use snowmelt_backend::{Groups, Scores};
use std::ops::Range;

/// Scores of experts, the greatest of them, and their weights.
///
/// **Numerics.** A softmax is `exp(x - greatest)`, added up in sixteen lanes and the usual tree,
/// divided by the sum; chosen weights are added in their order.
#[derive(Clone, Debug)]
pub(crate) struct Route<'a> {
    pub(crate) logits: Mat,
    /// `[n, top_k]` u32 bits.
    pub(crate) ids: Mat,
    /// `[n, top_k]`
    pub(crate) weights: Mat,
    pub(crate) n_experts: usize,
    pub(crate) top_k: usize,
    pub(crate) scores: Scores,
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) groups: Option<Groups>,
    pub(crate) renormalise: Option<f32>,
    pub(crate) factor: f32,
    pub(crate) expert_factor: Option<&'a [f32]>,
    pub(crate) rows: Range<usize>,
    /// [`scratch_floats`], this thread's own.
    pub(crate) scratch: *mut f32,
}

/// Areas of scratch: scores, what the choice is by, scores of groups, kept groups.
const AREAS: usize = 4;

/// Scratch of one thread.
pub(crate) fn scratch_floats(n_experts: usize) -> usize {
    AREAS * n_experts.next_multiple_of(LANES)
}

impl Kernel for Route<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for t in self.rows.clone() {
            // SAFETY: the verb has checked logits and results, and that `top_k <= n_experts`.
            unsafe { self.row(s, t) };
        }
    }
}

impl Route<'_> {
    #[inline(always)]
    unsafe fn row<S: Simd>(&self, s: S, t: usize) {
        let n = self.n_experts;
        let area = |i: usize| self.scratch.wrapping_add(i * n.next_multiple_of(LANES));
        // SAFETY: as the caller promises; areas are disjoint, of `n` and a vector's worth.
        unsafe {
            let logits = self.logits.row(t);
            match self.scores {
                Scores::Softmax => softmax(s, logits, n, area(0)),
                Scores::Sigmoid => sigmoids(s, logits, n, area(0)),
                Scores::SoftmaxOfChosen => std::ptr::copy_nonoverlapping(logits, area(0), n),
            }
            let scores = std::slice::from_raw_parts(area(0), n);
            let ids = std::slice::from_raw_parts_mut(self.ids.row(t).cast(), self.top_k);
            if self.bias.is_none() && self.groups.is_none() {
                choose(scores, ids);
            } else {
                let by = std::slice::from_raw_parts_mut(area(1), n);
                by.copy_from_slice(scores);
                for (by, bias) in by.iter_mut().zip(self.bias.unwrap_or_default()) {
                    *by += bias;
                }
                if let Some(groups) = self.groups {
                    let of_groups = std::slice::from_raw_parts_mut(area(2), groups.count);
                    let kept = std::slice::from_raw_parts_mut(area(3).cast(), groups.kept);
                    keep_groups(by, of_groups, kept);
                }
                choose(by, ids);
            }
            let weights = std::slice::from_raw_parts_mut(self.weights.row(t), self.top_k);
            for (weight, id) in weights.iter_mut().zip(ids.iter()) {
                *weight = scores[*id as usize];
            }
            if self.scores == Scores::SoftmaxOfChosen {
                softmax(s, weights.as_ptr(), self.top_k, area(1));
                std::ptr::copy_nonoverlapping(area(1), weights.as_mut_ptr(), self.top_k);
            }
            self.finish(ids, weights);
        }
    }

    /// From chosen scores to weights.
    #[inline(always)]
    fn finish(&self, ids: &[u32], weights: &mut [f32]) {
        if let Some(eps) = self.renormalise {
            let sum = weights.iter().fold(0.0, |sum, w| sum + w) + eps;
            for weight in weights.iter_mut() {
                *weight /= sum;
            }
        }
        for (weight, id) in weights.iter_mut().zip(ids) {
            *weight *= self.factor;
            if let Some(factors) = self.expert_factor {
                *weight *= factors[*id as usize];
            }
        }
    }
}

/// Puts minus infinity where a group is not among the best `kept.len()`.
fn keep_groups(by: &mut [f32], scores: &mut [f32], kept: &mut [u32]) {
    let size = by.len() / scores.len();
    for (group, score) in by.chunks_exact(size).zip(scores.iter_mut()) {
        let mut best = [0; 2];
        let best = &mut best[..size.min(2)];
        choose(group, best);
        *score = best.iter().fold(0.0, |sum, i| sum + group[*i as usize]);
    }
    choose(scores, kept);
    for (group, by) in by.chunks_exact_mut(size).enumerate() {
        if !kept.contains(&(group as u32)) {
            by.fill(f32::NEG_INFINITY);
        }
    }
}

#[inline(always)]
unsafe fn sigmoids<S: Simd>(s: S, x: *const f32, n: usize, out: *mut f32) {
    for i in (0..n).step_by(LANES) {
        // SAFETY: `n` elements of x, and whole vectors of `out`.
        unsafe { s.store(out.add(i), sigmoid(s, s.load_part(x.add(i), LANES.min(n - i)))) };
    }
}

#[inline(always)]
unsafe fn softmax<S: Simd>(s: S, x: *const f32, n: usize, out: *mut f32) {
    // SAFETY: `n` elements of both, and whole vectors of `out`.
    unsafe {
        let mut greatest = f32::NEG_INFINITY;
        for i in 0..n {
            let x = *x.add(i);
            greatest = if x > greatest { x } else { greatest };
        }
        let max = s.splat(greatest);
        let mut sum = s.zero();
        for i in (0..n).step_by(LANES) {
            let part = LANES.min(n - i);
            let e = exp(s, s.sub(s.load_part(x.add(i), part), max));
            s.store(out.add(i), e);
            sum = s.add(sum, s.load_part(out.add(i), part));
        }
        let sum = s.splat(s.fold_add(sum));
        for i in (0..n).step_by(LANES) {
            s.store(out.add(i), s.div(s.load(out.add(i)), sum));
        }
    }
}

/// The greatest, descending; of equal ones the lower index first. NaN counts as least.
fn choose(all: &[f32], ids: &mut [u32]) {
    let k = ids.len();
    let rank = |i: usize| if all[i].is_nan() { f32::NEG_INFINITY } else { all[i] };
    for i in 0..all.len() {
        let (rank_i, mut at) = (rank(i), k.min(i));
        // Later ones pass only those that they exceed.
        while at > 0 && rank_i > rank(ids[at - 1] as usize) {
            at -= 1;
        }
        if at < k {
            ids.copy_within(at..k.min(i + 1) - 1, at + 1);
            ids[at] = i as u32;
        }
    }
}

/// Adds what experts returned, and the shared expert's, to `x`.
///
/// **Numerics.** One chain of fused multiply-adds from zero, experts ascending; the shared
/// expert's result, times the sigmoid of its gate, is added to that; then all to `x`.
#[derive(Clone, Debug)]
pub(crate) struct Join {
    pub(crate) ids: Mat,
    pub(crate) weights: Mat,
    /// `[n * top_k, d]`
    pub(crate) parts: Mat,
    pub(crate) shared: Option<(Mat, Option<Mat>)>,
    pub(crate) x: Mat,
    pub(crate) top_k: usize,
    pub(crate) d: usize,
    pub(crate) rows: Range<usize>,
    /// `top_k` elements, this thread's own.
    pub(crate) scratch: *mut f32,
}

impl Kernel for Join {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for t in self.rows.clone() {
            // SAFETY: the verb has checked all operands for these rows; scratch has `top_k`.
            unsafe {
                let ids = std::slice::from_raw_parts(self.ids.row(t).cast::<u32>(), self.top_k);
                let order = std::slice::from_raw_parts_mut(self.scratch.cast::<u32>(), self.top_k);
                ascending(ids, order);
                self.row(s, t, order);
            }
        }
    }
}

/// Choices in ascending expert index.
fn ascending(ids: &[u32], order: &mut [u32]) {
    for i in 0..ids.len() {
        let mut at = i;
        while at > 0 && ids[order[at - 1] as usize] > ids[i] {
            order[at] = order[at - 1];
            at -= 1;
        }
        order[at] = i as u32;
    }
}

impl Join {
    #[inline(always)]
    unsafe fn row<S: Simd>(&self, s: S, t: usize, order: &[u32]) {
        let weights = self.weights.row(t);
        // SAFETY: a gate has one element a row.
        let gate = self.shared.and_then(|(_, gate)| gate).map(|gate| unsafe { *gate.row(t) });
        for i in (0..self.d).step_by(LANES) {
            let n = LANES.min(self.d - i);
            // SAFETY: as the caller promises.
            unsafe {
                let mut acc = s.zero();
                for choice in order {
                    let weight = s.splat(*weights.add(*choice as usize));
                    let part = self.parts.at(t * self.top_k + *choice as usize, i);
                    acc = s.fma(weight, s.load_part(part, n), acc);
                    s.store_part(part, n, s.splat(f32::NAN));
                }
                if let Some((shared, _)) = self.shared {
                    let mut y = s.load_part(shared.at(t, i), n);
                    if let Some(gate) = gate {
                        y = s.mul(y, sigmoid(s, s.splat(gate)));
                    }
                    acc = s.add(acc, y);
                }
                let x = self.x.at(t, i);
                s.store_part(x, n, s.add(s.load_part(x, n), acc));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(all: &[f32], k: usize) -> Vec<u32> {
        let mut ids = vec![99; k];
        choose(all, &mut ids);
        ids
    }

    #[test]
    fn the_greatest_come_first_and_equals_by_index() {
        assert_eq!(chosen(&[0.1, 0.4, 0.2, 0.4, 0.3], 3), [1, 3, 4]);
        assert_eq!(chosen(&[0.5; 6], 4), [0, 1, 2, 3]);
        assert_eq!(chosen(&[1.0, 2.0, 3.0], 3), [2, 1, 0]);
        assert_eq!(chosen(&[f32::NAN; 5], 2), [0, 1]);
        assert_eq!(chosen(&[3.0, 1.0, 2.0, 4.0], 1), [3]);
        assert_eq!(chosen(&[f32::NAN, 1.0, f32::NAN, 2.0], 3), [3, 1, 0]);
    }

    #[test]
    fn choices_are_ordered_by_expert() {
        let mut order = [0; 4];
        ascending(&[7, 2, 9, 0], &mut order);
        assert_eq!(order, [3, 1, 0, 2]);
    }
}
