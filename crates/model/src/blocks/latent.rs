//! Multi-head latent attention (arXiv 2405.04434) in absorbed form, with or without an indexer of
//! tokens (DeepSeek-V3.2).

use crate::config::{Result, multiple, positive, refuse};
use crate::loader::{Loader, StateKind, Use};
use crate::probe::show;
use crate::registry::Step;
use crate::rotary::Rotary;
use snowmelt_backend::{Attention, Backend, HeadRows, IndexSelect, Norm, Pairing, Selection, View};
use snowmelt_weights::ConfigView;

/// Epsilon of the norms of latents, whatever the config says.
const LATENT_EPS: f32 = 1e-6;

/// Sizes of the indexer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IndexShape {
    n_heads: usize,
    d: usize,
    top: usize,
}

/// Sizes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LatentShape {
    pub(crate) d_model: usize,
    pub(crate) n_heads: usize,
    /// Width of the query latent; none: queries are projected directly.
    pub(crate) q_lora: Option<usize>,
    pub(crate) kv_lora: usize,
    /// Part of a head that is not rotated.
    pub(crate) d_nope: usize,
    /// Part of a head that is.
    pub(crate) d_rope: usize,
    pub(crate) d_value: usize,
    pub(crate) pairing: Pairing,
    /// `o_proj` and the first projections have biases.
    pub(crate) biased: bool,
    pub(crate) scale: f32,
    pub(crate) index: Option<IndexShape>,
}

impl LatentShape {
    /// Reads the fields; `rotary` was read for `qk_rope_head_dim`.
    pub(crate) fn read(text: &ConfigView<'_>, d_model: usize, indexed: bool) -> Result<Self> {
        let field = |name: &'static str| positive(name, text.usize(name)?);
        let q_lora = match text.opt_usize("q_lora_rank")? {
            Some(rank) => Some(positive("q_lora_rank", rank)?),
            None => None,
        };
        let d_rope = multiple("qk_rope_head_dim", field("qk_rope_head_dim")?, "2", 2)?;
        let d_nope = field("qk_nope_head_dim")?;
        let index = match indexed {
            true => Some(IndexShape {
                n_heads: field("index_n_heads")?,
                d: field("index_head_dim")?,
                top: field("index_topk")?,
            }),
            false => None,
        };
        if let Some(index) = index {
            if index.d < d_rope {
                let expected = format!("at least `qk_rope_head_dim` = {d_rope}");
                return refuse("index_head_dim", index.d, expected);
            }
            if q_lora.is_none() {
                return refuse("q_lora_rank", "null", "a rank: the indexer reads that latent");
            }
        }
        Ok(Self {
            d_model,
            n_heads: field("num_attention_heads")?,
            q_lora,
            kv_lora: field("kv_lora_rank")?,
            d_nope,
            d_rope,
            d_value: field("v_head_dim")?,
            pairing: match text.opt_bool("rope_interleave")?.unwrap_or(true) {
                true => Pairing::Adjacent,
                false => Pairing::Half,
            },
            biased: text.opt_bool("attention_bias")?.unwrap_or(false),
            scale: softmax_scale(text, d_nope + d_rope)?,
            index,
        })
    }

    /// A key in the cache: the latent, then the rotated part.
    fn key(&self) -> usize {
        self.kv_lora + self.d_rope
    }

    fn head(&self) -> usize {
        self.d_nope + self.d_rope
    }
}

/// `d^-1/2`, times `m(factor, mscale_all_dim)^2` where positions are stretched by `YaRN`.
fn softmax_scale(text: &ConfigView<'_>, d: usize) -> Result<f32> {
    let plain = (d as f64).powf(-0.5);
    let nested = match text.opt_object("rope_parameters")? {
        Some(nested) => Some(nested),
        None => text.opt_object("rope_scaling")?,
    };
    let Some(nested) = nested else { return Ok(plain as f32) };
    let kind = nested.opt_str("rope_type")?.or(nested.opt_str("type")?).unwrap_or("default");
    let all_dim = nested.opt_f64("mscale_all_dim")?.unwrap_or(0.0);
    let factor = nested.opt_f64("factor")?.unwrap_or(1.0);
    if kind == "default" || all_dim == 0.0 || factor <= 1.0 {
        return Ok(plain as f32);
    }
    let m = 0.1 * all_dim * factor.ln() + 1.0;
    Ok((plain * m * m) as f32)
}

/// Queries by way of their latent, or directly.
#[derive(Debug)]
enum Query<W, Buf> {
    Direct(W),
    Latent { down: W, bias: Option<Buf>, norm: W, up: W },
}

#[derive(Debug)]
struct Indexer<W> {
    shape: IndexShape,
    q: W,
    k: W,
    k_norm: [W; 2],
    weights: W,
    state: usize,
}

/// ```text
/// q = q_b_proj(norm(q_a_proj x)), each head [nope | rope]; latent, k_rope = kv_a_proj x
/// key = [norm(latent) | rope(k_rope)], one for all heads: that is what the cache holds
/// q_h = [W_k,h^T nope | rope(rope part)]; y_h = attention over keys, values are the latents
/// out = o_proj(W_v,h y_h)
/// ```
/// `W_k,h` and `W_v,h` are the rows of head `h` in `kv_b_proj`.
#[derive(Debug)]
pub(crate) struct Latent<W, Buf> {
    layer: usize,
    shape: LatentShape,
    query: Query<W, Buf>,
    kv_down: W,
    kv_bias: Option<Buf>,
    kv_norm: W,
    kv_up: W,
    o: W,
    o_bias: Option<Buf>,
    index: Option<Indexer<W>>,
    state: usize,
}

/// Scratch and angles, shared by the layers of a model.
#[derive(Debug)]
pub(crate) struct LatentWork<W, Buf> {
    inv_freq: W,
    rotary_scale: f32,
    d_rope: usize,
    angles: Buf,
    q_latent: Buf,
    q: Buf,
    absorbed: Buf,
    key: Buf,
    mixed: Buf,
    values: Buf,
    index: Option<IndexWork<Buf>>,
}

#[derive(Debug)]
struct IndexWork<Buf> {
    q: Buf,
    k: Buf,
    weights: Buf,
    ids: Buf,
}

impl<W, Buf> LatentWork<W, Buf> {
    pub(crate) fn load<L>(l: &mut L, shape: LatentShape, rotary: &Rotary) -> Self
    where
        L: Loader<Weight = W, Buf = Buf>,
    {
        let heads = shape.n_heads;
        let index = shape.index.map(|index| IndexWork {
            q: l.scratch(index.n_heads * index.d),
            k: l.scratch(index.d),
            weights: l.scratch(index.n_heads),
            ids: l.scratch(1 + index.top),
        });
        Self {
            inv_freq: l.constants(&rotary.inv_freq),
            rotary_scale: rotary.scale,
            d_rope: rotary.d,
            angles: l.scratch(rotary.d),
            q_latent: l.scratch(shape.q_lora.unwrap_or(0)),
            q: l.scratch(heads * shape.head()),
            absorbed: l.scratch(heads * shape.key()),
            key: l.scratch(shape.key()),
            mixed: l.scratch(heads * shape.kv_lora),
            values: l.scratch(heads * shape.d_value),
            index,
        }
    }

    /// Once a step, before the layers.
    pub(crate) fn begin<B, F>(&self, step: &mut Step<'_, B, F>)
    where
        B: Backend<Weight = W, Buf = Buf>,
    {
        let out = View::of(&self.angles, self.d_rope);
        step.b.rotary_table(step.p, &self.inv_freq, self.rotary_scale, step.rows, out);
    }
}

impl<W, Buf> Latent<W, Buf> {
    /// `name`: `layers.3.self_attn`.
    pub(crate) fn load<L>(l: &mut L, shape: LatentShape, layer: usize, name: &str) -> Result<Self>
    where
        L: Loader<Weight = W, Buf = Buf>,
    {
        let limits = l.limits();
        limits.n_heads = limits.n_heads.max(shape.n_heads);
        limits.d_head = limits.d_head.max(shape.key());
        let (d, heads) = (shape.d_model, shape.n_heads);
        let of = |l: &L, part: &str| l.tensors().trunk(&format!("{name}.{part}"));
        let matrix = |l: &mut L, part: &str, shape: [usize; 2]| {
            l.matrix(&of(l, &format!("{part}.weight")), shape, Use::Projection, &[])
        };
        let vector = |l: &mut L, part: &str, len| l.vector(&of(l, part), len, 0.0);
        let bias = |l: &mut L, part: &str, len| match shape.biased {
            true => l.bias(&of(l, &format!("{part}.bias")), len, &[]).map(Some),
            false => Ok(None),
        };
        let query = match shape.q_lora {
            None => Query::Direct(matrix(l, "q_proj", [heads * shape.head(), d])?),
            Some(rank) => Query::Latent {
                down: matrix(l, "q_a_proj", [rank, d])?,
                bias: bias(l, "q_a_proj", rank)?,
                norm: vector(l, "q_a_layernorm.weight", rank)?,
                up: matrix(l, "q_b_proj", [heads * shape.head(), rank])?,
            },
        };
        let up = [heads * (shape.d_nope + shape.d_value), shape.kv_lora];
        let state = |l: &mut L, which: &str, width| {
            l.state(format!("layers.{layer}.{which}"), StateKind::PerToken { width })
        };
        let index = match shape.index {
            Some(index) => {
                let limits = l.limits();
                limits.index_ratio = 1;
                limits.d_index = limits.d_index.max(index.d);
                limits.n_heads = limits.n_heads.max(index.n_heads);
                limits.d_head = limits.d_head.max(index.d);
                let rank = shape.q_lora.expect("checked with the config");
                let weights = of(l, "indexer.weights_proj.weight");
                Some(Indexer {
                    shape: index,
                    q: matrix(l, "indexer.wq_b", [index.n_heads * index.d, rank])?,
                    k: matrix(l, "indexer.wk", [index.d, d])?,
                    k_norm: [
                        vector(l, "indexer.k_norm.weight", index.d)?,
                        vector(l, "indexer.k_norm.bias", index.d)?,
                    ],
                    weights: l.matrix(&weights, [index.n_heads, d], Use::Exact, &[])?,
                    state: state(l, "index", index.d),
                })
            }
            None => None,
        };
        Ok(Self {
            layer,
            shape,
            query,
            kv_down: matrix(l, "kv_a_proj_with_mqa", [shape.key(), d])?,
            kv_bias: bias(l, "kv_a_proj_with_mqa", shape.key())?,
            kv_norm: vector(l, "kv_a_layernorm.weight", shape.kv_lora)?,
            kv_up: matrix(l, "kv_b_proj", up)?,
            o: matrix(l, "o_proj", [d, heads * shape.d_value])?,
            o_bias: bias(l, "o_proj", d)?,
            index,
            state: state(l, "latent", shape.key()),
        })
    }

    /// `x, out: [n, d_model]`
    pub(crate) fn forward<B, F>(
        &self,
        step: &mut Step<'_, B, F>,
        work: &LatentWork<W, B::Buf>,
        x: View<'_, B::Buf>,
        out: View<'_, B::Buf>,
    ) where
        B: Backend<Weight = W, Buf = Buf>,
    {
        let (b, n, s) = (step.b, step.rows.len(), &self.shape);
        self.queries(step, work, x);
        let selection = self.index.as_ref().map(|index| index.select(step, work, s, x));
        let p = &mut *step.p;
        let (heads, key, head) = (s.n_heads, s.key(), s.head());
        let angles = View::of(&work.angles, work.d_rope);
        let keys = View::of(&work.key, key);
        b.linear(p, x, &self.kv_down, n, keys);
        if let Some(bias) = &self.kv_bias {
            b.add(p, keys, View::row(bias), key, n);
        }
        b.norm(p, keys, &Norm::rms(Some(&self.kv_norm), [1, s.kv_lora], LATENT_EPS), n, keys);
        b.rope(p, keys, [1, key, s.kv_lora, s.d_rope], angles, s.pairing, n);
        let (q, absorbed) =
            (View::of(&work.q, heads * head), View::of(&work.absorbed, heads * key));
        let stride = s.d_nope + s.d_value;
        let up = HeadRows {
            heads,
            stride,
            first: 0,
            rows: s.d_nope,
            x_head: head,
            out_head: key,
            transposed: true,
        };
        b.linear_heads(p, q, &self.kv_up, &up, n, absorbed);
        let turned = absorbed.column(s.kv_lora);
        b.copy_heads(p, q.column(s.d_nope), [heads, head, key, s.d_rope], n, turned);
        b.rope(p, absorbed, [heads, key, s.kv_lora, s.d_rope], angles, s.pairing, n);
        let mixed = View::of(&work.mixed, heads * s.kv_lora);
        let args = Attention {
            q: absorbed,
            k: Some(keys),
            v: None,
            k_cache: &step.state[self.state],
            v_cache: None,
            n_heads: heads,
            n_kv_heads: 1,
            d_key: key,
            d_value: s.kv_lora,
            scale: s.scale,
            window: None,
            sinks: None,
            selection: selection.as_ref(),
        };
        b.attention(p, &args, step.rows, mixed);
        for (name, view, width) in [
            ("attention.q", absorbed, heads * key),
            ("attention.k", keys, key),
            ("attention.v", keys, s.kv_lora),
            ("attention.out", mixed, heads * s.kv_lora),
        ] {
            show(&mut step.probe, p, step.rows, (self.layer, name), (view, width));
        }
        let down = HeadRows {
            first: s.d_nope,
            rows: s.d_value,
            x_head: s.kv_lora,
            out_head: s.d_value,
            transposed: false,
            ..up
        };
        let values = View::of(&work.values, heads * s.d_value);
        b.linear_heads(p, mixed, &self.kv_up, &down, n, values);
        b.linear(p, values, &self.o, n, out);
        if let Some(bias) = &self.o_bias {
            b.add(p, out, View::row(bias), s.d_model, n);
        }
    }

    fn queries<B, F>(
        &self,
        step: &mut Step<'_, B, F>,
        work: &LatentWork<W, B::Buf>,
        x: View<'_, B::Buf>,
    ) where
        B: Backend<Weight = W, Buf = Buf>,
    {
        let (b, n, s) = (step.b, step.rows.len(), &self.shape);
        let p = &mut *step.p;
        let q = View::of(&work.q, s.n_heads * s.head());
        match &self.query {
            Query::Direct(w) => b.linear(p, x, w, n, q),
            Query::Latent { down, bias, norm, up } => {
                let rank = s.q_lora.expect("there is a latent");
                let latent = View::of(&work.q_latent, rank);
                b.linear(p, x, down, n, latent);
                if let Some(bias) = bias {
                    b.add(p, latent, View::row(bias), rank, n);
                }
                b.norm(p, latent, &Norm::rms(Some(norm), [1, rank], LATENT_EPS), n, latent);
                b.linear(p, latent, up, n, q);
            }
        }
    }
}

impl<W> Indexer<W> {
    /// The tokens that each row sees; reads the query latent of [`Latent::queries`].
    fn select<B, F>(
        &self,
        step: &mut Step<'_, B, F>,
        work: &LatentWork<W, B::Buf>,
        s: &LatentShape,
        x: View<'_, B::Buf>,
    ) -> Selection<B::Buf>
    where
        B: Backend<Weight = W>,
    {
        let (b, n) = (step.b, step.rows.len());
        let p = &mut *step.p;
        let IndexShape { n_heads, d, top } = self.shape;
        let scratch = work.index.as_ref().expect("loaded with the indexer");
        let latent = View::of(&work.q_latent, s.q_lora.expect("checked with the config"));
        let (q, k) = (View::of(&scratch.q, n_heads * d), View::of(&scratch.k, d));
        let weights = View::of(&scratch.weights, n_heads);
        let angles = View::of(&work.angles, work.d_rope);
        b.linear(p, latent, &self.q, n, q);
        b.rope(p, q, [n_heads, d, 0, s.d_rope], angles, Pairing::Half, n);
        b.linear(p, x, &self.k, n, k);
        b.norm(p, k, &Norm::layer(&self.k_norm[0], &self.k_norm[1], d, LATENT_EPS), n, k);
        b.rope(p, k, [1, d, 0, s.d_rope], angles, Pairing::Half, n);
        b.linear(p, x, &self.weights, n, weights);
        let args = IndexSelect {
            q,
            k,
            k_cache: &step.state[self.state],
            weights: Some(weights),
            n_heads,
            d,
            scale: (d as f32).sqrt().recip(),
            sum_scale: (n_heads as f32).sqrt().recip(),
            pool: None,
            top,
            ids: &scratch.ids,
        };
        b.index_select(p, &args, step.rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_scale_grows_with_the_stretch() {
        // DeepSeek-V3: factor 40, mscale_all_dim 1, heads of 192.
        let config = json!({"rope_scaling": {"type": "yarn", "factor": 40, "mscale_all_dim": 1.0}});
        let view = ConfigView::new(&config, "config.json").expect("an object");
        let m = 0.1 * 40f64.ln() + 1.0;
        let scale = softmax_scale(&view, 192).expect("fields are there");
        assert!((f64::from(scale) - m * m / 192f64.sqrt()).abs() < 1e-8, "{scale}");
        let plain = json!({"rope_theta": 1e4});
        let view = ConfigView::new(&plain, "config.json").expect("an object");
        let scale = softmax_scale(&view, 192).expect("fields are there");
        assert!((f64::from(scale) - 1.0 / 192f64.sqrt()).abs() < 1e-8, "{scale}");
    }
}
