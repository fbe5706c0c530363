//! Formulas of the reference on plain slices. Sums run in f64 and are rounded to f32 once.

use crate::verbs::{Gate, Pairing};

/// `sum a_i b_i`
pub(super) fn dot(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len(), "lengths of a dot product");
    a.iter().zip(b).map(|(&a, &b)| a as f64 * b as f64).sum()
}

/// `1 / (1 + exp(-z))`
pub(super) fn sigmoid(z: f64) -> f64 {
    1.0 / (1.0 + (-z).exp())
}

/// `z * sigmoid(z)`
pub(super) fn silu(z: f64) -> f64 {
    z * sigmoid(z)
}

/// `log(1 + exp(z))`, which is `z` where `exp` would overflow.
fn softplus(z: f64) -> f64 {
    z.max(0.0) + (-z.abs()).exp().ln_1p()
}

/// See [`Gate`].
pub(super) fn gate(gate: Gate, z: f64) -> f64 {
    match gate {
        Gate::Silu => silu(z),
        Gate::Sigmoid => sigmoid(z),
    }
}

/// `exp(-exp(a_log) * softplus(a + dt_bias))`
pub(super) fn decay(a: f32, a_log: f32, dt_bias: f32) -> f32 {
    (-(a_log as f64).exp() * softplus(a as f64 + dt_bias as f64)).exp() as f32
}

/// `x w^T` for one row; `w: [out.len(), x.len()]`.
pub(super) fn linear(x: &[f32], w: &[f32]) -> Vec<f32> {
    w.chunks_exact(x.len()).map(|w| dot(x, w) as f32).collect()
}

/// `silu(gate) * up`
pub(super) fn swiglu(gate: &[f32], up: &[f32]) -> Vec<f32> {
    gate.iter().zip(up).map(|(&gate, &up)| (silu(gate as f64) * up as f64) as f32).collect()
}

/// Rotates pairs of one head by the angles whose cosines and sines are given.
pub(super) fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32], pairing: Pairing) {
    let half = cos.len();
    for i in 0..half {
        let (a, b) = match pairing {
            Pairing::Half => (i, i + half),
            Pairing::Adjacent => (2 * i, 2 * i + 1),
        };
        let (x, y, cos, sin) = (head[a] as f64, head[b] as f64, cos[i] as f64, sin[i] as f64);
        head[a] = (x * cos - y * sin) as f32;
        head[b] = (y * cos + x * sin) as f32;
    }
}

/// Softmax attention of one query head over `keys` and `values`, in position order:
/// `sum_s softmax(scale * q.k_s)_s v_s`.
pub(super) fn attend(q: &[f32], keys: &[&[f32]], values: &[&[f32]], scale: f32) -> Vec<f32> {
    let scores: Vec<f64> = keys.iter().map(|k| scale as f64 * dot(q, k)).collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let weighted = |i: usize| weights.iter().zip(values).map(|(w, v)| w * v[i] as f64).sum::<f64>();
    (0..q.len()).map(|i| (weighted(i) / sum) as f32).collect()
}

/// One token of the gated delta rule (Yang et al., "Gated Delta Networks", equation 10), for one
/// head: decay, read, write, then query the *new* state. `state: [d_key, d_value]`; out:
/// `[d_value]`. The state is rounded to f32 after every token, since that is what it is stored as.
pub(super) fn delta(
    state: &mut [f32],
    q: &[f32],
    k: &[f32],
    v: &[f32],
    decay: f32,
    beta: f32,
) -> Vec<f32> {
    let d_value = v.len();
    let mut column = vec![0.0; k.len()];
    (0..d_value)
        .map(|j| {
            for (i, s) in column.iter_mut().enumerate() {
                *s = state[i * d_value + j] as f64 * decay as f64;
            }
            let memory: f64 = column.iter().zip(k).map(|(s, &k)| s * k as f64).sum();
            let write = beta as f64 * (v[j] as f64 - memory);
            for (i, s) in column.iter().enumerate() {
                state[i * d_value + j] = (s + k[i] as f64 * write) as f32;
            }
            q.iter()
                .enumerate()
                .map(|(i, &q)| state[i * d_value + j] as f64 * q as f64)
                .sum::<f64>() as f32
        })
        .collect()
}

/// Softmax over all logits, then the `top_k` greatest weights, descending; equal ones by index.
/// A NaN counts as least: a row of NaN chooses experts 0, 1, ... with weights of NaN.
pub(super) fn choose(logits: &[f32], top_k: usize, renormalise: bool) -> Vec<(u32, f32)> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let exps: Vec<f64> = logits.iter().map(|&l| (l as f64 - max as f64).exp()).collect();
    let sum: f64 = exps.iter().sum();
    let mut order: Vec<(u32, f32)> = (0..).zip(exps.iter().map(|exp| (exp / sum) as f32)).collect();
    let rank = |weight: f32| if weight.is_nan() { f32::NEG_INFINITY } else { weight };
    // A stable sort leaves equal weights in index order.
    order.sort_by(|a, b| rank(b.1).total_cmp(&rank(a.1)));
    order.truncate(top_k);
    if renormalise {
        let sum: f64 = order.iter().map(|&(_, weight)| weight as f64).sum();
        for (_, weight) in &mut order {
            *weight = (*weight as f64 / sum) as f32;
        }
    }
    order
}
