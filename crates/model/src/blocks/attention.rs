//! Grouped-query attention with per-head q and k norms, with or without an output gate.

use crate::config::{Heads, Result};
use crate::loader::{Loader, StateKind, Use};
use crate::registry::Step;
use crate::rotary::Rotary;
use snowmelt_backend::{self as backend, Backend, Pairing, View};
use std::ops::Range;

/// Sizes and variants.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionShape {
    pub(crate) heads: Heads,
    pub(crate) d_model: usize,
    /// `q_proj` yields, for each head, `d_head` queries and then `d_head` gates.
    pub(crate) gated: bool,
    /// Added to the norms' weights: 1 where they are stored centred on zero.
    pub(crate) norm_plus: f32,
    pub(crate) eps: f32,
}

/// ```text
/// q, gate = q_proj x; k = k_proj x; v = v_proj x    (with biases, where the config has them)
/// q = rope(norm q); k = rope(norm k)
/// out = o_proj(attention(q, k, v) * sigmoid(gate))
/// ```
#[derive(Debug)]
pub(crate) struct Attention<W, Buf> {
    shape: AttentionShape,
    q: W,
    k: W,
    v: W,
    o: W,
    q_norm: W,
    k_norm: W,
    /// Of q (and gate), k, v, o.
    biases: Option<[Buf; 4]>,
    k_state: usize,
    v_state: usize,
}

/// Scratch and angles, shared by the layers of a model.
#[derive(Debug)]
pub(crate) struct AttentionWork<W, Buf> {
    d_rotary: usize,
    rotary_scale: f32,
    inv_freq: W,
    /// `[n, 2, d_rotary / 2]`
    angles: Buf,
    /// `[n, n_heads * d_head]`, twice as wide with a gate.
    q: Buf,
    k: Buf,
    v: Buf,
    out: Buf,
}

impl<W, Buf> AttentionWork<W, Buf> {
    pub(crate) fn load<L>(l: &mut L, shape: AttentionShape, rotary: &Rotary) -> Self
    where
        L: Loader<Weight = W, Buf = Buf>,
    {
        let Heads { n_heads, n_kv_heads, d_head, .. } = shape.heads;
        let q_width = n_heads * d_head * if shape.gated { 2 } else { 1 };
        Self {
            d_rotary: rotary.d,
            rotary_scale: rotary.scale,
            inv_freq: l.constants(&rotary.inv_freq),
            angles: l.scratch(rotary.d),
            q: l.scratch(q_width),
            k: l.scratch(n_kv_heads * d_head),
            v: l.scratch(n_kv_heads * d_head),
            out: l.scratch(n_heads * d_head),
        }
    }

    /// Once a step, before the layers.
    pub(crate) fn begin<B, F>(&self, step: &mut Step<'_, B, F>)
    where
        B: Backend<Weight = W, Buf = Buf>,
    {
        let out = View::of(&self.angles, self.d_rotary);
        step.b.rotary_table(step.p, &self.inv_freq, self.rotary_scale, step.rows, out);
    }
}

/// Rows of `q_proj` so that all queries come first, then all gates.
fn queries_then_gates(heads: Heads) -> Vec<Range<usize>> {
    let d = heads.d_head;
    let half = |which: usize| {
        (0..heads.n_heads).map(move |head| {
            let first = (2 * head + which) * d;
            first..first + d
        })
    };
    half(0).chain(half(1)).collect()
}

impl<W, Buf> Attention<W, Buf> {
    /// `name`: `layers.3.self_attn`.
    pub(crate) fn load<L>(
        l: &mut L,
        shape: AttentionShape,
        layer: usize,
        name: &str,
    ) -> Result<Self>
    where
        L: Loader<Weight = W, Buf = Buf>,
    {
        let Heads { n_heads, n_kv_heads, d_head, biased } = shape.heads;
        let limits = l.limits();
        limits.n_heads = limits.n_heads.max(n_heads);
        limits.d_head = limits.d_head.max(d_head);
        let (q_width, kv_width, d) = (n_heads * d_head, n_kv_heads * d_head, shape.d_model);
        let of = |l: &L, part: &str| l.tensors().trunk(&format!("{name}.{part}.weight"));
        let (q_rows, order) = match shape.gated {
            true => (2 * q_width, queries_then_gates(shape.heads)),
            false => (q_width, Vec::new()),
        };
        let kv = |l: &mut L, which: &str| {
            let name = format!("layers.{layer}.{which}");
            l.state(name, StateKind::PerToken { width: kv_width })
        };
        let biases = match biased {
            true => {
                let mut bias = |part: &str, len, order: &[Range<usize>]| {
                    let name = l.tensors().trunk(&format!("{name}.{part}.bias"));
                    l.bias(&name, len, order)
                };
                let (q, k) = (bias("q_proj", q_rows, &order)?, bias("k_proj", kv_width, &[])?);
                Some([q, k, bias("v_proj", kv_width, &[])?, bias("o_proj", d, &[])?])
            }
            false => None,
        };
        Ok(Self {
            shape,
            biases,
            q: l.matrix(&of(l, "q_proj"), [q_rows, d], Use::Projection, &order)?,
            k: l.matrix(&of(l, "k_proj"), [kv_width, d], Use::Projection, &[])?,
            v: l.matrix(&of(l, "v_proj"), [kv_width, d], Use::Projection, &[])?,
            o: l.matrix(&of(l, "o_proj"), [d, q_width], Use::Projection, &[])?,
            q_norm: l.vector(&of(l, "q_norm"), d_head, shape.norm_plus)?,
            k_norm: l.vector(&of(l, "k_norm"), d_head, shape.norm_plus)?,
            k_state: kv(l, "k"),
            v_state: kv(l, "v"),
        })
    }

    /// `x, out: [n, d_model]`
    pub(crate) fn forward<B, F>(
        &self,
        step: &mut Step<'_, B, F>,
        work: &AttentionWork<W, B::Buf>,
        x: View<'_, B::Buf>,
        out: View<'_, B::Buf>,
    ) where
        B: Backend<Weight = W, Buf = Buf>,
    {
        let (b, n, eps) = (step.b, step.rows.len(), self.shape.eps);
        let p = &mut *step.p;
        let Heads { n_heads, n_kv_heads, d_head, .. } = self.shape.heads;
        let (q_width, kv_width) = (n_heads * d_head, n_kv_heads * d_head);
        let q = View::of(&work.q, if self.shape.gated { 2 * q_width } else { q_width });
        let (k, v) = (View::of(&work.k, kv_width), View::of(&work.v, kv_width));
        let mixed = View::of(&work.out, q_width);
        b.linear(p, x, &self.q, n, q);
        b.linear(p, x, &self.k, n, k);
        b.linear(p, x, &self.v, n, v);
        if let Some([q_bias, k_bias, v_bias, _]) = &self.biases {
            b.add(p, q, View::row(q_bias), q.stride, n);
            b.add(p, k, View::row(k_bias), kv_width, n);
            b.add(p, v, View::row(v_bias), kv_width, n);
        }
        b.rms_norm(p, q, &self.q_norm, n_heads, eps, n, q);
        b.rms_norm(p, k, &self.k_norm, n_kv_heads, eps, n, k);
        let (d, angles) = (work.d_rotary, View::of(&work.angles, work.d_rotary));
        b.rope(p, q, [n_heads, d_head, d], angles, Pairing::Half, n);
        b.rope(p, k, [n_kv_heads, d_head, d], angles, Pairing::Half, n);
        let args = backend::Attention {
            q,
            k,
            v,
            k_cache: &step.state[self.k_state],
            v_cache: &step.state[self.v_state],
            n_heads,
            n_kv_heads,
            d_head,
            scale: (d_head as f32).sqrt().recip(),
        };
        b.attention(p, &args, step.rows, mixed);
        if self.shape.gated {
            b.sigmoid_gate(p, mixed, q.column(q_width), q_width, n);
        }
        b.linear(p, mixed, &self.o, n, out);
        if let Some([.., o_bias]) = &self.biases {
            b.add(p, out, View::row(o_bias), self.shape.d_model, n);
        }
    }
}
