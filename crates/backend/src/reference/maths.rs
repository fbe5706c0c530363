//! Formulas of the reference on plain slices. Sums run in f64 and are rounded to f32 once.

use crate::verbs::{Glu, Groups, Pairing, Scores, Spread, Unary};

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

/// `f(gate) * up`, see [`Glu`].
pub(super) fn glu(f: Glu, gate: f64, up: f64) -> f64 {
    match f {
        Glu::Silu => silu(gate) * up,
        Glu::Sigmoid => sigmoid(gate) * up,
        Glu::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044_715 * gate.powi(3));
            0.5 * gate * (1.0 + inner.tanh()) * up
        }
        Glu::Clamped { alpha, limit } => {
            let limit = limit as f64;
            let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
            gate * sigmoid(alpha as f64 * gate) * (up + 1.0)
        }
    }
}

/// See [`Unary`].
pub(super) fn unary(f: Unary, x: f64) -> f64 {
    match f {
        Unary::Scale(factor) => factor as f64 * x,
        Unary::Silu(factor) => silu(factor as f64 * x),
        Unary::Softcap(cap) => cap as f64 * (x / cap as f64).tanh(),
    }
}

/// What a part of a row is shifted and multiplied by, see [`Spread`].
pub(super) fn spread(kind: Spread, x: &[f32], eps: f32) -> (f64, f64) {
    let d = x.len() as f64;
    let (shift, square) = match kind {
        Spread::MeanSquare => (0.0, dot(x, x) / d),
        Spread::SumSquare => (0.0, dot(x, x)),
        Spread::Variance => {
            let mean = x.iter().map(|&x| x as f64).sum::<f64>() / d;
            (mean, x.iter().map(|&x| (x as f64 - mean).powi(2)).sum::<f64>() / d)
        }
    };
    (shift, 1.0 / (square + eps as f64).sqrt())
}

/// `exp(-exp(a_log) * softplus(a + dt_bias))`
pub(super) fn decay(a: f32, a_log: f32, dt_bias: f32) -> f32 {
    (-(a_log as f64).exp() * softplus(a as f64 + dt_bias as f64)).exp() as f32
}

/// `x w^T` for one row; `w: [out.len(), x.len()]`.
pub(super) fn linear(x: &[f32], w: &[f32]) -> Vec<f32> {
    w.chunks_exact(x.len()).map(|w| dot(x, w) as f32).collect()
}

/// `x w` for one row; `w: [x.len(), d]`.
pub(super) fn linear_transposed(x: &[f32], w: &[f32]) -> Vec<f32> {
    let d = w.len() / x.len();
    (0..d)
        .map(|i| {
            x.iter().enumerate().map(|(j, &x)| x as f64 * w[j * d + i] as f64).sum::<f64>() as f32
        })
        .collect()
}

/// `f(gate) * up`
pub(super) fn glu_rows(f: Glu, gate: &[f32], up: &[f32]) -> Vec<f32> {
    gate.iter().zip(up).map(|(&gate, &up)| glu(f, gate as f64, up as f64) as f32).collect()
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
/// `sum_s softmax(scale * q.k_s)_s v_s`. A `sink` is one more score, without a value.
pub(super) fn attend(
    q: &[f32],
    keys: &[&[f32]],
    values: &[&[f32]],
    scale: f32,
    sink: Option<f32>,
) -> Vec<f32> {
    let scores: Vec<f64> = keys.iter().map(|k| scale as f64 * dot(q, k)).collect();
    let sink = sink.map_or(f64::NEG_INFINITY, |sink| sink as f64);
    let max = scores.iter().copied().fold(sink, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
    let sum: f64 = weights.iter().sum::<f64>() + (sink - max).exp();
    let weighted = |i: usize| weights.iter().zip(values).map(|(w, v)| w * v[i] as f64).sum::<f64>();
    let d = values.first().map_or(0, |v| v.len());
    (0..d).map(|i| (weighted(i) / sum) as f32).collect()
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

/// Indices of the greatest `count`, descending; of equal ones the lower index first. A NaN counts
/// as least.
pub(super) fn greatest(scores: &[f32], count: usize) -> Vec<u32> {
    let rank = |i: u32| {
        let score = scores[i as usize];
        if score.is_nan() { f32::NEG_INFINITY } else { score + 0.0 }
    };
    let mut order: Vec<u32> = (0..scores.len() as u32).collect();
    // A stable sort leaves equal ones in index order.
    order.sort_by(|&a, &b| rank(b).total_cmp(&rank(a)));
    order.truncate(count);
    order
}

/// Softmax of some logits, in f64.
fn softmax(logits: impl Iterator<Item = f32> + Clone) -> Vec<f64> {
    let max = logits.clone().fold(f32::NEG_INFINITY, f32::max);
    let exps: Vec<f64> = logits.map(|l| (l as f64 - max as f64).exp()).collect();
    let sum: f64 = exps.iter().sum();
    exps.into_iter().map(|exp| exp / sum).collect()
}

/// What a router is, with its vectors as slices.
pub(super) struct Choice<'a> {
    pub(super) top_k: usize,
    pub(super) scores: Scores,
    pub(super) bias: Option<&'a [f32]>,
    pub(super) groups: Option<Groups>,
    pub(super) renormalise: Option<f32>,
    pub(super) factor: f32,
    pub(super) expert_factor: Option<&'a [f32]>,
}

impl Choice<'_> {
    /// Experts and their weights, in the order of the choice.
    pub(super) fn choose(&self, logits: &[f32]) -> Vec<(u32, f32)> {
        let scores: Vec<f32> = match self.scores {
            Scores::Softmax => {
                softmax(logits.iter().copied()).into_iter().map(|score| score as f32).collect()
            }
            Scores::Sigmoid => logits.iter().map(|&l| sigmoid(l as f64) as f32).collect(),
            Scores::SoftmaxOfChosen => logits.to_vec(),
        };
        let mut by = scores.clone();
        if let Some(bias) = self.bias {
            by.iter_mut().zip(bias).for_each(|(score, bias)| *score += bias);
        }
        if let Some(groups) = self.groups {
            keep_groups(&mut by, groups);
        }
        let chosen = greatest(&by, self.top_k);
        let of_chosen = chosen.iter().map(|&id| scores[id as usize]);
        let mut weights: Vec<f64> = match self.scores {
            Scores::SoftmaxOfChosen => softmax(of_chosen),
            _ => of_chosen.map(|score| score as f64).collect(),
        };
        if let Some(eps) = self.renormalise {
            let sum = weights.iter().sum::<f64>() + eps as f64;
            for weight in &mut weights {
                *weight /= sum;
            }
        }
        let last = |(id, weight): (u32, f64)| {
            let own = self.expert_factor.map_or(1.0, |factors| factors[id as usize] as f64);
            (id, (weight * self.factor as f64 * own) as f32)
        };
        chosen.into_iter().zip(weights).map(last).collect()
    }
}

/// Puts minus infinity where a group is not among the best.
fn keep_groups(by: &mut [f32], groups: Groups) {
    let size = by.len() / groups.count;
    let score = |group: &[f32]| {
        let best = greatest(group, 2);
        best.iter().map(|&i| group[i as usize]).fold(0.0, |sum, score| sum + score)
    };
    let scores: Vec<f32> = by.chunks_exact(size).map(score).collect();
    let kept = greatest(&scores, groups.kept);
    for (group, by) in by.chunks_exact_mut(size).enumerate() {
        if !kept.contains(&(group as u32)) {
            by.fill(f32::NEG_INFINITY);
        }
    }
}
