//! Verbs of several residual streams, and the gate of looked-up rows.
#![allow(unsafe_code)]

use crate::dot::product;
use crate::math::{sigmoid, sigmoid_in_lane};
use crate::simd::{Kernel, LANES, Simd};
use crate::view::Mat;
use std::ops::Range;

/// `out = mean over streams of sigmoid(gate) * x`.
///
/// **Numerics.** One chain of fused multiply-adds over the streams, then a division.
#[derive(Clone, Debug)]
pub(crate) struct Mix {
    pub(crate) x: Mat,
    pub(crate) gate: Mat,
    pub(crate) out: Mat,
    pub(crate) streams: usize,
    pub(crate) d: usize,
    pub(crate) rows: Range<usize>,
    pub(crate) columns: Range<usize>,
}

impl Kernel for Mix {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let count = s.splat(self.streams as f32);
        for t in self.rows.clone() {
            for i in self.columns.clone().step_by(LANES) {
                let n = LANES.min(self.columns.end - i);
                let mut acc = s.zero();
                // SAFETY: the verb has checked all operands for these rows and columns.
                unsafe {
                    for c in 0..self.streams {
                        let gate = s.load_part(self.gate.at(t, c * self.d + i), n);
                        let x = s.load_part(self.x.at(t, c * self.d + i), n);
                        acc = s.fma(sigmoid(s, gate), x, acc);
                    }
                    s.store_part(self.out.at(t, i), n, s.div(acc, count));
                }
            }
        }
    }
}

/// `x[c] += 2 sigmoid(inject[c] / streams) * y`, fused; without `inject` the factor is 1.
#[derive(Clone, Debug)]
pub(crate) struct AddStreams {
    pub(crate) x: Mat,
    pub(crate) y: Mat,
    pub(crate) inject: Option<Mat>,
    pub(crate) streams: usize,
    pub(crate) d: usize,
    /// (row, stream), row first.
    pub(crate) items: Range<usize>,
}

impl Kernel for AddStreams {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for item in self.items.clone() {
            let (t, c) = (item / self.streams, item % self.streams);
            // SAFETY: the verb has checked all operands for these rows and streams.
            unsafe {
                let factor = self.inject.map_or(1.0, |inject| {
                    2.0 * sigmoid_in_lane(s, *inject.at(t, c) / self.streams as f32)
                });
                let factor = s.splat(factor);
                for i in (0..self.d).step_by(LANES) {
                    let n = LANES.min(self.d - i);
                    let x = self.x.at(t, c * self.d + i);
                    let y = s.load_part(self.y.at(t, i), n);
                    s.store_part(x, n, s.fma(factor, y, s.load_part(x, n)));
                }
            }
        }
    }
}

/// `out[c] = sigmoid(sign(s) sqrt(max(|s|, 1e-6))) * value` with `s = key[c] . query[c] / sqrt(d)`;
/// the sign of zero is zero.
#[derive(Clone, Debug)]
pub(crate) struct RowGate {
    pub(crate) key: Mat,
    pub(crate) query: Mat,
    pub(crate) value: Mat,
    pub(crate) out: Mat,
    pub(crate) streams: usize,
    pub(crate) d: usize,
    /// (row, stream), row first.
    pub(crate) items: Range<usize>,
}

impl Kernel for RowGate {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for item in self.items.clone() {
            let (t, c) = (item / self.streams, item % self.streams);
            let at = c * self.d;
            // SAFETY: the verb has checked all operands for these rows and streams.
            unsafe {
                let dot = product(s, self.key.at(t, at), self.query.at(t, at), self.d);
                let score = dot / (self.d as f32).sqrt();
                let sign = if score == 0.0 { 0.0 } else { score.signum() };
                let root = sign * score.abs().max(1e-6).sqrt();
                let factor = s.splat(sigmoid_in_lane(s, root));
                for i in (0..self.d).step_by(LANES) {
                    let n = LANES.min(self.d - i);
                    let value = s.load_part(self.value.at(t, i), n);
                    s.store_part(self.out.at(t, at + i), n, s.mul(factor, value));
                }
            }
        }
    }
}
