//! The router, and the sum of what its experts returned.
#![allow(unsafe_code)]

use crate::math::{exp, sigmoid};
use crate::simd::{Kernel, LANES, Simd};
use crate::view::Mat;
use std::ops::Range;

/// Softmax over experts, then the greatest.
///
/// **Numerics.** `exp(x - greatest)`, added up in sixteen lanes and the usual tree, divided by the
/// sum; chosen weights are added in their order.
#[derive(Clone, Debug)]
pub(crate) struct Route {
    pub(crate) logits: Mat,
    /// `[n, top_k]` u32 bits.
    pub(crate) ids: Mat,
    /// `[n, top_k]`
    pub(crate) weights: Mat,
    pub(crate) n_experts: usize,
    pub(crate) top_k: usize,
    pub(crate) renormalise: bool,
    pub(crate) rows: Range<usize>,
    /// `n_experts` f32 and a vector's worth, this thread's own.
    pub(crate) scratch: *mut f32,
}

impl Kernel for Route {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for t in self.rows.clone() {
            // SAFETY: the verb has checked logits and results, and that `top_k <= n_experts`.
            unsafe {
                softmax(s, self.logits.row(t), self.n_experts, self.scratch);
                let all = std::slice::from_raw_parts(self.scratch, self.n_experts);
                let ids = std::slice::from_raw_parts_mut(self.ids.row(t).cast(), self.top_k);
                choose(all, ids);
                let weights = std::slice::from_raw_parts_mut(self.weights.row(t), self.top_k);
                for (weight, id) in weights.iter_mut().zip(ids.iter()) {
                    *weight = all[*id as usize];
                }
                if self.renormalise {
                    let sum = weights.iter().fold(0.0, |sum, w| sum + w);
                    for weight in weights {
                        *weight /= sum;
                    }
                }
            }
        }
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

/// The greatest, descending; of equal ones the lower index first. Where nothing can be compared
/// (NaN), the first.
fn choose(all: &[f32], ids: &mut [u32]) {
    let k = ids.len();
    for (i, w) in all.iter().enumerate() {
        let mut at = k.min(i);
        // Later ones pass only those that they exceed.
        while at > 0 && *w > all[ids[at - 1] as usize] {
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
    }

    #[test]
    fn choices_are_ordered_by_expert() {
        let mut order = [0; 4];
        ascending(&[7, 2, 9, 0], &mut order);
        assert_eq!(order, [3, 1, 0, 2]);
    }
}
