//! Grouped-query attention, with what families add to it: norms of q and k, biases, an output gate,
//! a window, sinks.

use crate::config::{Heads, Result};
use crate::loader::{Loader, StateKind, Use};
use crate::probe::show;
use crate::registry::Step;
use crate::rotary::Rotary;
use snowmelt_backend::{self as backend, Backend, Glu, Norm, Pairing, Selection, View};
use std::ops::Range;

/// Which projections have biases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Biases {
    None,
    /// Those of q, k and v.
    Qkv,
    /// All four.
    All,
}

/// Sizes and variants.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionShape {
    pub(crate) heads: Heads,
    pub(crate) d_model: usize,
    /// `q_proj` yields, for each head, `d_head` queries and then `d_head` gates.
    pub(crate) gated: bool,
    /// Norms of each head of q and k; the value is added to their weights: 1 where they are stored
    /// centred on zero.
    pub(crate) norm_plus: Option<f32>,
    pub(crate) biases: Biases,
    /// Each head has a sink.
    pub(crate) sinks: bool,
    /// Tokens that a query sees.
    pub(crate) window: Option<usize>,
    pub(crate) eps: f32,
}

impl AttentionShape {
    /// Nothing but heads.
    pub(crate) fn plain(heads: Heads, d_model: usize, eps: f32) -> Self {
        let biases = if heads.biased { Biases::All } else { Biases::None };
        Self {
            heads,
            d_model,
            gated: false,
            norm_plus: None,
            biases,
            sinks: false,
            window: None,
            eps,
        }
    }
}

/// ```text
/// q, gate = q_proj x; k = k_proj x; v = v_proj x    (with biases, where the family has them)
/// q = rope(norm q); k = rope(norm k)
/// out = o_proj(attention(q, k, v) * sigmoid(gate))
/// ```
#[derive(Debug)]
pub(crate) struct Attention<W, Buf> {
    layer: usize,
    shape: AttentionShape,
    q: W,
    k: W,
    v: W,
    o: W,
    /// Of q and k.
    norms: Option<[W; 2]>,
    /// Of q (and gate), k, v, o.
    biases: [Option<Buf>; 4],
    sinks: Option<W>,
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
        let out = self.angles();
        step.b.rotary_table(step.p, &self.inv_freq, self.rotary_scale, step.rows, out);
    }

    /// `[n, 2, d_rotary / 2]` of this step.
    pub(crate) fn angles(&self) -> View<'_, Buf> {
        View::of(&self.angles, self.d_rotary)
    }

    /// Frequencies and the factor of cosines and sines.
    pub(crate) fn frequencies(&self) -> (&W, f32) {
        (&self.inv_freq, self.rotary_scale)
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
        let Heads { n_heads, n_kv_heads, d_head, .. } = shape.heads;
        let limits = l.limits();
        limits.n_heads = limits.n_heads.max(n_heads);
        limits.d_head = limits.d_head.max(d_head);
        let (q_width, kv_width, d) = (n_heads * d_head, n_kv_heads * d_head, shape.d_model);
        let of = |l: &L, part: &str| l.tensors().trunk(&format!("{name}.{part}"));
        let (q_rows, order) = match shape.gated {
            true => (2 * q_width, queries_then_gates(shape.heads)),
            false => (q_width, Vec::new()),
        };
        let kv = |l: &mut L, which: &str| {
            let name = format!("layers.{layer}.{which}");
            l.state(name, StateKind::PerToken { width: kv_width })
        };
        let bias = |l: &mut L, part: &str, has: bool, len, order: &[Range<usize>]| match has {
            true => l.bias(&of(l, &format!("{part}.bias")), len, order).map(Some),
            false => Ok(None),
        };
        let (qkv, all) = (shape.biases != Biases::None, shape.biases == Biases::All);
        let biases = [
            bias(l, "q_proj", qkv, q_rows, &order)?,
            bias(l, "k_proj", qkv, kv_width, &[])?,
            bias(l, "v_proj", qkv, kv_width, &[])?,
            bias(l, "o_proj", all, d, &[])?,
        ];
        let projection = |l: &mut L, part: &str, shape, order: &[Range<usize>]| {
            l.matrix(&of(l, &format!("{part}.weight")), shape, Use::Projection, order)
        };
        let q = projection(l, "q_proj", [q_rows, d], &order)?;
        let k = projection(l, "k_proj", [kv_width, d], &[])?;
        let v = projection(l, "v_proj", [kv_width, d], &[])?;
        let o = projection(l, "o_proj", [d, q_width], &[])?;
        let norms = match shape.norm_plus {
            Some(plus) => Some([
                l.vector(&of(l, "q_norm.weight"), d_head, plus)?,
                l.vector(&of(l, "k_norm.weight"), d_head, plus)?,
            ]),
            None => None,
        };
        let sinks = match shape.sinks {
            true => Some(l.vector(&of(l, "sinks"), n_heads, 0.0)?),
            false => None,
        };
        let states = [kv(l, "k"), kv(l, "v")];
        if let Some(window) = shape.window {
            for state in states {
                l.window(state, window);
            }
        }
        Ok(Self {
            layer,
            shape,
            biases,
            norms,
            sinks,
            q,
            k,
            v,
            o,
            k_state: states[0],
            v_state: states[1],
        })
    }

    /// `x, out: [n, d_model]`; `selection`: the tokens that each row sees.
    pub(crate) fn forward<B, F>(
        &self,
        step: &mut Step<'_, B, F>,
        work: &AttentionWork<W, B::Buf>,
        selection: Option<&Selection<B::Buf>>,
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
        let parts = [(&self.q, q), (&self.k, k), (&self.v, v)];
        for ((w, y), bias) in parts.into_iter().zip(&self.biases) {
            b.linear(p, x, w, n, y);
            if let Some(bias) = bias {
                b.add(p, y, View::row(bias), y.stride, n);
            }
        }
        let (d, angles) = (work.d_rotary, work.angles());
        for (i, (y, heads)) in [(q, n_heads), (k, n_kv_heads)].into_iter().enumerate() {
            if let Some(norms) = &self.norms {
                b.norm(p, y, &Norm::rms(Some(&norms[i]), [heads, d_head], eps), n, y);
            }
            b.rope(p, y, [heads, d_head, 0, d], angles, Pairing::Half, n);
        }
        let args = backend::Attention {
            q,
            k: Some(k),
            v: Some(v),
            k_cache: &step.state[self.k_state],
            v_cache: Some(&step.state[self.v_state]),
            n_heads,
            n_kv_heads,
            d_key: d_head,
            d_value: d_head,
            scale: (d_head as f32).sqrt().recip(),
            window: self.shape.window,
            sinks: self.sinks.as_ref(),
            selection,
        };
        b.attention(p, &args, step.rows, mixed);
        for (name, view, width) in [
            ("attention.q", q, q_width),
            ("attention.k", k, kv_width),
            ("attention.v", v, kv_width),
            ("attention.out", mixed, q_width),
        ] {
            show(&mut step.probe, p, step.rows, (self.layer, name), (view, width));
        }
        if self.shape.gated {
            b.glu(p, Glu::Sigmoid, q.column(q_width), mixed, q_width, n, mixed);
        }
        b.linear(p, mixed, &self.o, n, out);
        if let Some(bias) = &self.biases[3] {
            b.add(p, out, View::row(bias), self.shape.d_model, n);
        }
    }
}
