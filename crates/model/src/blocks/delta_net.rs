//! The gated DeltaNet mixer (arXiv 2412.06464) as Qwen3-Next and Qwen3.5 have it.

use crate::config::{Result, multiple, positive};
use crate::loader::{Loader, StateKind, Use};
use crate::probe::show;
use crate::registry::Step;
use snowmelt_backend::{Backend, DeltaStep, Glu, Norm, View};
use snowmelt_weights::ConfigView;
use std::ops::Range;

/// Added to the sum of squares of q and k.
const L2_EPS: f32 = 1e-6;

/// How the input projections are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Packing {
    /// `in_proj_qkvz` and `in_proj_ba`, grouped by key head (`qwen3_next`).
    ByKeyHead,
    /// `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a` in plain order (`qwen3_5`).
    Separate,
}

/// Sizes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeltaShape {
    pub(crate) d_model: usize,
    pub(crate) n_key_heads: usize,
    pub(crate) n_value_heads: usize,
    pub(crate) d_key: usize,
    pub(crate) d_value: usize,
    pub(crate) taps: usize,
    pub(crate) eps: f32,
    /// The function of z in the last norm.
    pub(crate) gate: Glu,
}

impl DeltaShape {
    pub(crate) fn read(text: &ConfigView<'_>, d_model: usize, eps: f32) -> Result<Self> {
        let n_key_heads = text.usize("linear_num_key_heads")?;
        let n_value_heads = text.usize("linear_num_value_heads")?;
        positive("linear_num_key_heads", n_key_heads)?;
        let name = "linear_num_value_heads";
        multiple(name, n_value_heads, "linear_num_key_heads", n_key_heads)?;
        let field = |name: &'static str| positive(name, text.usize(name)?);
        Ok(Self {
            d_model,
            n_key_heads,
            n_value_heads,
            d_key: field("linear_key_head_dim")?,
            d_value: field("linear_value_head_dim")?,
            taps: field("linear_conv_kernel_dim")?,
            eps,
            gate: Glu::Silu,
        })
    }

    fn keys(&self) -> usize {
        self.n_key_heads * self.d_key
    }

    fn values(&self) -> usize {
        self.n_value_heads * self.d_value
    }

    /// Channels of the convolution: q, k and v.
    fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }

    /// q, k, v, z, b, a of a row.
    fn width(&self) -> usize {
        self.channels() + self.values() + 2 * self.n_value_heads
    }

    /// Rows of `in_proj_qkvz`, stored for each key head as q, k, v, z, in the order q, k, v, z over
    /// all heads.
    fn qkvz_rows(&self) -> Vec<Range<usize>> {
        let values = self.values() / self.n_key_heads;
        self.ungroup(&[self.d_key, self.d_key, values, values])
    }

    /// Rows of `in_proj_ba`, stored for each key head as b, a.
    fn ba_rows(&self) -> Vec<Range<usize>> {
        let heads = self.n_value_heads / self.n_key_heads;
        self.ungroup(&[heads, heads])
    }

    fn ungroup(&self, sizes: &[usize]) -> Vec<Range<usize>> {
        let group: usize = sizes.iter().sum();
        let mut rows = Vec::with_capacity(sizes.len() * self.n_key_heads);
        let mut at = 0;
        for &size in sizes {
            let of_head = |head: usize| head * group + at..head * group + at + size;
            rows.extend((0..self.n_key_heads).map(of_head));
            at += size;
        }
        rows
    }
}

/// ```text
/// q, k, v, z, b, a = in_proj x
/// q, k, v = silu(causal_conv(q, k, v))
/// q = l2(q) / sqrt(d_key); k = l2(k)
/// decay = exp(-exp(A_log) softplus(a + dt_bias)); beta = sigmoid b
/// out = out_proj(norm(delta_rule(q, k, v, decay, beta)) * silu z)
/// ```
#[derive(Debug)]
pub(crate) struct DeltaNet<W> {
    layer: usize,
    shape: DeltaShape,
    /// Each with the column of its first output.
    projections: Vec<(W, usize)>,
    conv: W,
    gates: [W; 2],
    norm: W,
    out: W,
    conv_state: usize,
    delta_state: usize,
}

/// Scratch, shared by the layers of a model.
#[derive(Debug)]
pub(crate) struct DeltaWork<Buf> {
    /// `[n, q | k | v | z | b | a]`
    wide: Buf,
    /// `[n, q | k | v]` after the convolution.
    qkv: Buf,
    mixed: Buf,
}

impl<Buf> DeltaWork<Buf> {
    pub(crate) fn load<L: Loader<Buf = Buf>>(l: &mut L, shape: DeltaShape) -> Self {
        Self {
            wide: l.scratch(shape.width()),
            qkv: l.scratch(shape.channels()),
            mixed: l.scratch(shape.values()),
        }
    }
}

impl<W> DeltaNet<W> {
    /// `name`: `layers.0.linear_attn`.
    pub(crate) fn load<L>(
        l: &mut L,
        shape: DeltaShape,
        packing: Packing,
        layer: usize,
        name: &str,
    ) -> Result<Self>
    where
        L: Loader<Weight = W>,
    {
        let limits = l.limits();
        limits.d_head = limits.d_head.max(shape.d_value).max(shape.d_key);
        let (channels, values, heads) = (shape.channels(), shape.values(), shape.n_value_heads);
        let (d, taps) = (shape.d_model, shape.taps);
        let of = |l: &L, part: &str| l.tensors().trunk(&format!("{name}.{part}"));
        let projection = |l: &mut L, part: &str, rows, usage, order: &[Range<usize>]| {
            l.matrix(&of(l, &format!("{part}.weight")), [rows, d], usage, order)
        };
        let (z, b, a) = (channels, channels + values, channels + values + heads);
        let projections = match packing {
            Packing::ByKeyHead => {
                let (qkvz, ba) = (shape.qkvz_rows(), shape.ba_rows());
                let whole = channels + values;
                vec![
                    (projection(l, "in_proj_qkvz", whole, Use::Projection, &qkvz)?, 0),
                    (projection(l, "in_proj_ba", 2 * heads, Use::Exact, &ba)?, b),
                ]
            }
            Packing::Separate => vec![
                (projection(l, "in_proj_qkv", channels, Use::Projection, &[])?, 0),
                (projection(l, "in_proj_z", values, Use::Projection, &[])?, z),
                (projection(l, "in_proj_b", heads, Use::Exact, &[])?, b),
                (projection(l, "in_proj_a", heads, Use::Exact, &[])?, a),
            ],
        };
        let conv_len = (taps - 1) * channels;
        let delta_len = heads * shape.d_key * shape.d_value;
        let state = |l: &mut L, which: &str, len| {
            l.state(format!("layers.{layer}.{which}"), StateKind::PerSequence { len })
        };
        Ok(Self {
            layer,
            shape,
            projections,
            conv: l.matrix(&of(l, "conv1d.weight"), [channels, taps], Use::Exact, &[])?,
            gates: [
                l.vector(&of(l, "A_log"), heads, 0.0)?,
                l.vector(&of(l, "dt_bias"), heads, 0.0)?,
            ],
            norm: l.vector(&of(l, "norm.weight"), shape.d_value, 0.0)?,
            out: l.matrix(&of(l, "out_proj.weight"), [d, values], Use::Projection, &[])?,
            conv_state: state(l, "conv", conv_len),
            delta_state: state(l, "delta", delta_len),
        })
    }

    /// `x, out: [n, d_model]`
    pub(crate) fn forward<B, F>(
        &self,
        step: &mut Step<'_, B, F>,
        work: &DeltaWork<B::Buf>,
        x: View<'_, B::Buf>,
        out: View<'_, B::Buf>,
    ) where
        B: Backend<Weight = W>,
    {
        let (b, n, s) = (step.b, step.rows.len(), &self.shape);
        let p = &mut *step.p;
        let (keys, values, channels) = (s.keys(), s.values(), s.channels());
        let wide = View::of(&work.wide, s.width());
        for (weight, column) in &self.projections {
            b.linear(p, x, weight, n, wide.column(*column));
        }
        let (z, beta) = (wide.column(channels), wide.column(channels + values));
        let decay = beta.column(s.n_value_heads);
        let q = View::of(&work.qkv, channels);
        let (k, v) = (q.column(keys), q.column(2 * keys));
        b.causal_conv(p, wide, &self.conv, 1, &step.state[self.conv_state], step.rows, q);
        show(&mut step.probe, p, step.rows, (self.layer, "gdn.before"), (q, channels));
        let heads = [s.n_key_heads, s.d_key];
        let q_factor = (s.d_key as f32).sqrt().recip();
        b.norm(p, q, &Norm::l2(heads, L2_EPS, q_factor), n, q);
        b.norm(p, k, &Norm::l2(heads, L2_EPS, 1.0), n, k);
        b.delta_gate(p, decay, beta, [&self.gates[0], &self.gates[1]], n);
        let args = DeltaStep {
            q,
            k,
            v,
            decay,
            beta,
            state: &step.state[self.delta_state],
            n_key_heads: s.n_key_heads,
            n_value_heads: s.n_value_heads,
            d_key: s.d_key,
            d_value: s.d_value,
        };
        let mixed = View::of(&work.mixed, values);
        b.delta_step(p, &args, step.rows, mixed);
        for (name, view, width) in [
            ("gdn.after", q, channels),
            ("gdn.decay", decay, s.n_value_heads),
            ("gdn.beta", beta, s.n_value_heads),
            ("gdn.out", mixed, values),
        ] {
            show(&mut step.probe, p, step.rows, (self.layer, name), (view, width));
        }
        let norm = Norm::rms(Some(&self.norm), [s.n_value_heads, s.d_value], s.eps);
        b.norm(p, mixed, &norm.gated(z, s.gate), n, mixed);
        b.linear(p, mixed, &self.out, n, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grouped_rows_are_put_in_plain_order() {
        let shape = DeltaShape {
            d_model: 1,
            n_key_heads: 2,
            n_value_heads: 4,
            d_key: 3,
            d_value: 5,
            taps: 4,
            eps: 1e-6,
            gate: Glu::Silu,
        };
        // A key head holds q 3, k 3, v 10, z 10.
        let rows: Vec<usize> = shape.qkvz_rows().into_iter().flatten().collect();
        assert_eq!(rows[..6], [0, 1, 2, 26, 27, 28]);
        assert_eq!(rows[6..9], [3, 4, 5]);
        assert_eq!(rows[12], 6);
        assert_eq!(rows[22], 32);
        let mut sorted = rows;
        sorted.sort_unstable();
        assert_eq!(sorted, (0..52).collect::<Vec<_>>());
        let ba: Vec<usize> = shape.ba_rows().into_iter().flatten().collect();
        assert_eq!(ba, [0, 1, 4, 5, 2, 3, 6, 7]);
    }
}
