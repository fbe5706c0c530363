//! Gemma 4: sliding and full attention by layer, each with its own head width and rotation; norms
//! before and after every half; a dense MLP beside routed experts (26B-A4B), or per-layer inputs
//! and shared keys and values (E2B, E4B). Plain norm weights, scores unscaled.
//!
//! ```text
//! x = embed(token) sqrt(d)
//! x += post_attention_norm(o_proj(attention(rope norm q, rope norm k, norm v)))
//! y = norm_1(mlp(norm x)) + norm_2(experts(norm x)), or mlp(norm x) alone
//! x += post_feedforward_norm(y)
//! x += norm(per_layer_projection(gelu(per_layer_input_gate x) * per_layer_input))
//! x *= layer_scalar
//! logits = cap tanh(lm_head(norm x) / cap)
//! ```
//! Full-attention layers may take their values from the keys, before norm and rotation.
//! Source: transformers `models/gemma4/modeling_gemma4.py`.
//! Checkpoints: Gemma-4-26B-A4B, E2B, E4B, 31B.

use crate::blocks::Mlp;
use crate::config::{
    ExpertSizes, Heads, Result, Trunk, positive, refuse, sliding_layers, text_config,
};
use crate::experts::{ExpertShape, Fused};
use crate::loader::{Loader, StateKind, Use};
use crate::probe::show;
use crate::registry::{Decoder, Step};
use crate::rotary::Rotary;
use snowmelt_backend::{
    Attention, Backend, ExpertFetch, ExpertLayout, Glu, MoeBlock, Norm, Pairing, Router, Rows,
    StepError, Unary, View, moe_block,
};
use snowmelt_weights::ConfigView;
use std::ops::Range;

/// What a layer attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Sliding,
    Full,
}

/// Fields of `config.json`.
#[derive(Debug)]
struct Config {
    trunk: Trunk,
    kinds: Vec<Kind>,
    heads: Vec<Heads>,
    sliding_window: usize,
    k_eq_v: bool,
    d_mlp: usize,
    double_wide: bool,
    n_shared: usize,
    moe: Option<ExpertSizes>,
    /// Width of the per-layer inputs, and rows of their table.
    per_layer: Option<[usize; 2]>,
    softcap: Option<f32>,
    rotary: [Rotary; 2],
}

impl Config {
    fn read(config: &ConfigView<'_>) -> Result<Self> {
        let text = text_config(config)?;
        let mut trunk = Trunk::read(config, &text)?;
        if !text.has("tie_word_embeddings") && !config.has("tie_word_embeddings") {
            trunk.tied = true;
        }
        match text.opt_str("hidden_activation")? {
            None | Some("gelu_pytorch_tanh") => {}
            Some(other) => return refuse("hidden_activation", other, "`gelu_pytorch_tanh`"),
        }
        let kinds = kinds(&text, trunk.n_layers)?;
        let heads = (0..trunk.n_layers)
            .map(|layer| Heads::of_layer(&text, trunk.d_model, layer, kinds[layer] == Kind::Full))
            .collect::<Result<Vec<_>>>()?;
        let field = |name: &'static str| positive(name, text.usize(name)?);
        let moe = match text.opt_bool("enable_moe_block")?.unwrap_or(false) {
            true => Some(ExpertSizes {
                n_experts: field("num_experts")?,
                top_k: field("top_k_experts")?,
                d_expert: field("moe_intermediate_size")?,
            }),
            false => None,
        };
        if let Some(ExpertSizes { n_experts, top_k, .. }) = moe
            && top_k > n_experts
        {
            return refuse("top_k_experts", top_k, format!("at most `num_experts` = {n_experts}"));
        }
        let n_shared = text.usize_or("num_kv_shared_layers", 0)?;
        if n_shared >= trunk.n_layers {
            let expected = format!("less than `num_hidden_layers` = {}", trunk.n_layers);
            return refuse("num_kv_shared_layers", n_shared, expected);
        }
        let per_layer = match text.usize_or("hidden_size_per_layer_input", 0)? {
            0 => None,
            width => {
                let rows = text.usize_or("vocab_size_per_layer_input", trunk.n_vocab)?;
                if rows < trunk.n_vocab {
                    let expected = format!("at least `vocab_size` = {}", trunk.n_vocab);
                    return refuse("vocab_size_per_layer_input", rows, expected);
                }
                Some([width, rows])
            }
        };
        let softcap = match text.opt_f64("final_logit_softcapping")? {
            Some(cap) if !(cap.is_finite() && cap > 0.0) => {
                return refuse("final_logit_softcapping", cap, "a number above 0, or null");
            }
            softcap => softcap,
        };
        let rotary = [Kind::Sliding, Kind::Full]
            .map(|kind| rotary(&text, kind, &kinds, &heads, trunk.context_max));
        let [sliding, full] = rotary;
        Ok(Self {
            trunk,
            sliding_window: match kinds.contains(&Kind::Sliding) {
                true => field("sliding_window")?,
                false => 0,
            },
            k_eq_v: text.opt_bool("attention_k_eq_v")?.unwrap_or(false),
            d_mlp: field("intermediate_size")?,
            double_wide: text.opt_bool("use_double_wide_mlp")?.unwrap_or(false),
            n_shared,
            moe,
            per_layer,
            softcap: softcap.map(|cap| cap as f32),
            rotary: [sliding?, full?],
            kinds,
            heads,
        })
    }

    fn is_shared(&self, layer: usize) -> bool {
        layer >= self.trunk.n_layers - self.n_shared
    }

    /// Inner width of the dense MLP of a layer.
    fn mlp_width(&self, layer: usize) -> usize {
        if self.double_wide && self.is_shared(layer) { 2 * self.d_mlp } else { self.d_mlp }
    }

    /// The layer whose keys and values a layer reads: its own, or the last of its kind before the
    /// shared ones.
    fn kv_layer(&self, layer: usize) -> Result<usize> {
        if !self.is_shared(layer) {
            return Ok(layer);
        }
        let own = self.trunk.n_layers - self.n_shared;
        match (0..own).rev().find(|&other| self.kinds[other] == self.kinds[layer]) {
            Some(other) => Ok(other),
            None => refuse(
                "num_kv_shared_layers",
                self.n_shared,
                format!("a layer before them that attends as layer {layer} does"),
            ),
        }
    }

    /// Width of the widest layer's vector.
    fn widest(&self, width: impl Fn(&Heads) -> usize) -> usize {
        self.heads.iter().map(width).max().unwrap_or(0)
    }
}

fn kinds(text: &ConfigView<'_>, n_layers: usize) -> Result<Vec<Kind>> {
    // Five sliding ones, then a full one; the last is always full.
    let full = |layer: usize| (layer + 1).is_multiple_of(6) || layer + 1 == n_layers;
    let sliding = sliding_layers(text, n_layers)?;
    let sliding = sliding.unwrap_or_else(|| (0..n_layers).map(|layer| !full(layer)).collect());
    let kind = |sliding| if sliding { Kind::Sliding } else { Kind::Full };
    Ok(sliding.into_iter().map(kind).collect())
}

/// The rotation of a kind of layers; all of a kind must have heads of one width.
fn rotary(
    text: &ConfigView<'_>,
    kind: Kind,
    kinds: &[Kind],
    heads: &[Heads],
    context_max: usize,
) -> Result<Rotary> {
    let mut widths = kinds.iter().zip(heads).filter(|(k, _)| **k == kind).map(|(_, h)| h.d_head);
    let d_head = widths.next().unwrap_or(2);
    if let Some(other) = widths.find(|&other| other != d_head) {
        return refuse("head_dim", other, format!("{d_head} in every layer of a kind"));
    }
    let name = if kind == Kind::Full { "full_attention" } else { "sliding_attention" };
    Rotary::of_kind(text, name, d_head, context_max)
}

/// A layer's attention. `k, v, k_norm` are absent where another layer's cache is read.
#[derive(Debug)]
struct Mixer<W> {
    heads: Heads,
    window: Option<usize>,
    kind: Kind,
    q: W,
    q_norm: W,
    own: Option<Keys<W>>,
    o: W,
    /// State of keys, then of values.
    states: [usize; 2],
}

#[derive(Debug)]
struct Keys<W> {
    k: W,
    k_norm: W,
    /// None: values are the keys, before norm and rotation.
    v: Option<W>,
}

/// The routed half of a layer.
#[derive(Debug)]
struct Experts<W> {
    layer: u32,
    sizes: ExpertSizes,
    /// Weight of the norm before the router.
    scale: W,
    router: W,
    expert_factor: W,
    layout: ExpertLayout,
    /// After the dense MLP; before and after the experts.
    norms: [W; 3],
}

#[derive(Debug)]
struct PerLayer<W> {
    gate: W,
    projection: W,
    norm: W,
}

#[derive(Debug)]
struct Layer<W> {
    input_norm: W,
    mixer: Mixer<W>,
    post_attention_norm: W,
    pre_norm: W,
    mlp: Mlp<W>,
    mlp_width: usize,
    experts: Option<Experts<W>>,
    post_norm: W,
    own_input: Option<PerLayer<W>>,
    scalar: f32,
}

/// The table of inputs of each layer, and what is mixed into it.
#[derive(Debug)]
struct PerLayerTable<W> {
    table: W,
    projection: W,
    norm: W,
}

/// Scratch.
#[derive(Debug)]
struct Work<Buf> {
    x: Buf,
    normed: Buf,
    mixed: Buf,
    joined: Buf,
    q: Buf,
    k: Buf,
    v: Buf,
    out: Buf,
    gate: Buf,
    up: Buf,
    /// Of sliding, then full layers.
    angles: [Buf; 2],
    /// `[n, n_layers * width]`, twice.
    inputs: [Buf; 2],
    logits: Buf,
    ids: Buf,
    weights: Buf,
    parts: Buf,
    chosen: Buf,
    head: Buf,
}

/// The loaded model; see the module.
#[derive(Debug)]
pub(crate) struct Gemma4<W, Buf> {
    config: Config,
    embed: W,
    per_layer: Option<PerLayerTable<W>>,
    layers: Vec<Layer<W>>,
    norm: W,
    /// None: tied to the embedding.
    head: Option<W>,
    inv_freq: [W; 2],
    work: Work<Buf>,
}

type LoadedGemma<L> = Result<(Gemma4<<L as Loader>::Weight, <L as Loader>::Buf>, Trunk)>;

pub(crate) fn load<L: Loader>(config: &ConfigView<'_>, l: &mut L) -> LoadedGemma<L> {
    let config = Config::read(config)?;
    let trunk = config.trunk;
    let d = trunk.d_model;
    l.limits().d_model = d;
    let of = |l: &L, name: &str| l.tensors().trunk(name);
    let embed = of(l, "embed_tokens.weight");
    let embed = l.matrix(&embed, [trunk.n_vocab, d], Use::Projection, &[])?;
    let per_layer = match config.per_layer {
        Some([width, rows]) => {
            let all = trunk.n_layers * width;
            let table = of(l, "embed_tokens_per_layer.weight");
            let projection = of(l, "per_layer_model_projection.weight");
            let norm = of(l, "per_layer_projection_norm.weight");
            Some(PerLayerTable {
                table: l.matrix(&table, [rows, all], Use::Projection, &[])?,
                projection: l.matrix(&projection, [all, d], Use::Projection, &[])?,
                norm: l.vector(&norm, width, 0.0)?,
            })
        }
        None => None,
    };
    let mut layers: Vec<Layer<L::Weight>> = Vec::with_capacity(trunk.n_layers);
    for index in 0..trunk.n_layers {
        let kv = match config.kv_layer(index)? {
            own if own == index => None,
            other => Some(layers[other].mixer.states),
        };
        layers.push(load_layer(l, &config, index, kv)?);
    }
    let norm = of(l, "norm.weight");
    let norm = l.vector(&norm, d, 0.0)?;
    let head = match trunk.tied {
        true => None,
        false => Some(l.matrix("lm_head.weight", [trunk.n_vocab, d], Use::Projection, &[])?),
    };
    let inv_freq = [0, 1].map(|i| l.constants(&config.rotary[i].inv_freq));
    let work = scratch(l, &config);
    Ok((Gemma4 { config, embed, per_layer, layers, norm, head, inv_freq, work }, trunk))
}

fn scratch<L: Loader>(l: &mut L, config: &Config) -> Work<L::Buf> {
    let (d, n_layers) = (config.trunk.d_model, config.trunk.n_layers);
    let q_width = config.widest(|heads| heads.n_heads * heads.d_head);
    let kv_width = config.widest(|heads| heads.n_kv_heads * heads.d_head);
    let d_mlp = (0..n_layers).map(|layer| config.mlp_width(layer)).max().unwrap_or(0);
    let width = config.per_layer.map_or(0, |[width, _]| width);
    let (n_experts, top_k) = config.moe.map_or((0, 0), |moe| (moe.n_experts, moe.top_k));
    Work {
        x: l.scratch(d),
        normed: l.scratch(d),
        mixed: l.scratch(d),
        joined: l.scratch(d),
        q: l.scratch(q_width),
        k: l.scratch(kv_width),
        v: l.scratch(kv_width),
        out: l.scratch(q_width),
        gate: l.scratch(d_mlp.max(width)),
        up: l.scratch(d_mlp),
        angles: [0, 1].map(|i| l.scratch(config.rotary[i].d)),
        inputs: [0, 1].map(|_| l.scratch(n_layers * width)),
        logits: l.scratch(n_experts),
        ids: l.scratch(top_k),
        weights: l.scratch(top_k),
        parts: l.scratch(top_k * d),
        chosen: l.outputs(d),
        head: l.outputs(config.trunk.n_vocab),
    }
}

fn load_layer<L: Loader>(
    l: &mut L,
    config: &Config,
    index: usize,
    kv: Option<[usize; 2]>,
) -> Result<Layer<L::Weight>> {
    let d = config.trunk.d_model;
    let of = |l: &L, part: &str| l.tensors().trunk(&format!("layers.{index}.{part}"));
    let norm = |l: &mut L, part: &str| l.vector(&of(l, &format!("{part}.weight")), d, 0.0);
    let mlp_width = config.mlp_width(index);
    let experts = match config.moe {
        Some(sizes) => {
            let limits = l.limits();
            limits.top_k = limits.top_k.max(sizes.top_k);
            let ExpertSizes { n_experts, d_expert, .. } = sizes;
            let layer = index as u32;
            let shape = ExpertShape {
                layer,
                n_experts,
                d_model: d,
                d_expert,
                glu: Glu::GeluTanh,
                fused: Fused::Halves,
            };
            let router = of(l, "router.proj.weight");
            Some(Experts {
                layer,
                sizes,
                scale: l.vector(&of(l, "router.scale"), d, 0.0)?,
                router: l.matrix(&router, [n_experts, d], Use::Exact, &[])?,
                expert_factor: l.vector(&of(l, "router.per_expert_scale"), n_experts, 0.0)?,
                layout: l.experts(&shape, &of(l, "experts"))?,
                norms: [
                    norm(l, "post_feedforward_layernorm_1")?,
                    norm(l, "pre_feedforward_layernorm_2")?,
                    norm(l, "post_feedforward_layernorm_2")?,
                ],
            })
        }
        None => None,
    };
    let own_input = match config.per_layer {
        Some([width, _]) => {
            let (gate, projection) =
                (of(l, "per_layer_input_gate.weight"), of(l, "per_layer_projection.weight"));
            Some(PerLayer {
                gate: l.matrix(&gate, [width, d], Use::Exact, &[])?,
                projection: l.matrix(&projection, [d, width], Use::Exact, &[])?,
                norm: norm(l, "post_per_layer_input_norm")?,
            })
        }
        None => None,
    };
    let mlp = format!("layers.{index}.mlp");
    Ok(Layer {
        input_norm: norm(l, "input_layernorm")?,
        mixer: load_mixer(l, config, index, kv)?,
        post_attention_norm: norm(l, "post_attention_layernorm")?,
        pre_norm: norm(l, "pre_feedforward_layernorm")?,
        mlp: Mlp::load(l, Glu::GeluTanh, [d, mlp_width], &mlp)?,
        mlp_width,
        experts,
        post_norm: norm(l, "post_feedforward_layernorm")?,
        own_input,
        scalar: l.scalar(&of(l, "layer_scalar"))?,
    })
}

fn load_mixer<L: Loader>(
    l: &mut L,
    config: &Config,
    index: usize,
    kv: Option<[usize; 2]>,
) -> Result<Mixer<L::Weight>> {
    let (heads, kind, d) = (config.heads[index], config.kinds[index], config.trunk.d_model);
    let Heads { n_heads, n_kv_heads, d_head, biased } = heads;
    if biased {
        return refuse("attention_bias", true, "`false`");
    }
    let limits = l.limits();
    limits.n_heads = limits.n_heads.max(n_heads);
    limits.d_head = limits.d_head.max(d_head);
    let (q_width, kv_width) = (n_heads * d_head, n_kv_heads * d_head);
    let of =
        |l: &L, part: &str| l.tensors().trunk(&format!("layers.{index}.self_attn.{part}.weight"));
    let matrix = |l: &mut L, part: &str, shape: [usize; 2]| {
        l.matrix(&of(l, part), shape, Use::Projection, &[])
    };
    let own = match kv {
        Some(_) => None,
        None => Some(Keys {
            k: matrix(l, "k_proj", [kv_width, d])?,
            k_norm: l.vector(&of(l, "k_norm"), d_head, 0.0)?,
            v: match config.k_eq_v && kind == Kind::Full {
                true => None,
                false => Some(matrix(l, "v_proj", [kv_width, d])?),
            },
        }),
    };
    let states = kv.unwrap_or_else(|| {
        ["k", "v"].map(|which| {
            let name = format!("layers.{index}.{which}");
            let state = l.state(name, StateKind::PerToken { width: kv_width });
            if kind == Kind::Sliding {
                l.window(state, config.sliding_window);
            }
            state
        })
    });
    Ok(Mixer {
        heads,
        window: (kind == Kind::Sliding).then_some(config.sliding_window),
        kind,
        q: matrix(l, "q_proj", [q_width, d])?,
        q_norm: l.vector(&of(l, "q_norm"), d_head, 0.0)?,
        own,
        o: matrix(l, "o_proj", [d, q_width])?,
        states,
    })
}

impl<W, Buf> Gemma4<W, Buf> {
    /// Rows of the residual stream.
    fn row<'a>(&self, buf: &'a Buf) -> View<'a, Buf> {
        View::of(buf, self.config.trunk.d_model)
    }

    /// Per-layer inputs of this step, from the scaled embedding `x`.
    fn per_layer_inputs<B, F>(&self, step: &mut Step<'_, B, F>, x: View<'_, B::Buf>)
    where
        B: Backend<Weight = W, Buf = Buf>,
    {
        let (Some(table), Some([width, _])) = (&self.per_layer, self.config.per_layer) else {
            return;
        };
        let Trunk { n_layers, d_model, eps, .. } = self.config.trunk;
        let (b, n, all) = (step.b, step.rows.len(), n_layers * width);
        let [inputs, mixed] = self.work.inputs.each_ref().map(|buf| View::of(buf, all));
        b.embed(step.p, &table.table, step.rows, inputs);
        b.activate(step.p, Unary::Scale((width as f32).sqrt()), inputs, all, n);
        b.linear(step.p, x, &table.projection, n, mixed);
        b.activate(step.p, Unary::Scale((d_model as f32).sqrt().recip()), mixed, all, n);
        let norm = Norm::rms(Some(&table.norm), [n_layers, width], eps);
        b.norm(step.p, mixed, &norm, n, mixed);
        b.add(step.p, inputs, mixed, all, n);
        b.activate(step.p, Unary::Scale(0.5_f32.sqrt()), inputs, all, n);
    }

    /// `out = attention(x)`
    fn attend<B, F>(
        &self,
        step: &mut Step<'_, B, F>,
        layer: usize,
        x: View<'_, B::Buf>,
        out: View<'_, B::Buf>,
    ) where
        B: Backend<Weight = W, Buf = Buf>,
    {
        let (b, n, eps) = (step.b, step.rows.len(), self.config.trunk.eps);
        let mixer = &self.layers[layer].mixer;
        let (p, work) = (&mut *step.p, &self.work);
        let Heads { n_heads, n_kv_heads, d_head, .. } = mixer.heads;
        let (q_width, kv_width) = (n_heads * d_head, n_kv_heads * d_head);
        let [q, mixed] = [&work.q, &work.out].map(|buf| View::of(buf, q_width));
        let [k, v] = [&work.k, &work.v].map(|buf| View::of(buf, kv_width));
        let which = usize::from(mixer.kind == Kind::Full);
        let d = self.config.rotary[which].d;
        let angles = View::of(&work.angles[which], d);
        b.linear(p, x, &mixer.q, n, q);
        b.norm(p, q, &Norm::rms(Some(&mixer.q_norm), [n_heads, d_head], eps), n, q);
        b.rope(p, q, [n_heads, d_head, 0, d], angles, Pairing::Half, n);
        if let Some(own) = &mixer.own {
            b.linear(p, x, &own.k, n, k);
            let heads = [n_kv_heads, d_head];
            let raw = match &own.v {
                Some(weight) => {
                    b.linear(p, x, weight, n, v);
                    v
                }
                None => k,
            };
            b.norm(p, raw, &Norm::rms(None, heads, eps), n, v);
            b.norm(p, k, &Norm::rms(Some(&own.k_norm), heads, eps), n, k);
            b.rope(p, k, [n_kv_heads, d_head, 0, d], angles, Pairing::Half, n);
        }
        let [k_cache, v_cache] = mixer.states.map(|state| &step.state[state]);
        let written = mixer.own.is_some();
        let args = Attention {
            q,
            k: written.then_some(k),
            v: written.then_some(v),
            k_cache,
            v_cache: Some(v_cache),
            n_heads,
            n_kv_heads,
            d_key: d_head,
            d_value: d_head,
            scale: 1.0,
            window: mixer.window,
            sinks: None,
            selection: None,
        };
        b.attention(p, &args, step.rows, mixed);
        show(&mut step.probe, p, step.rows, (layer, "attention.q"), (q, q_width));
        if written {
            show(&mut step.probe, p, step.rows, (layer, "attention.k"), (k, kv_width));
            show(&mut step.probe, p, step.rows, (layer, "attention.v"), (v, kv_width));
        }
        show(&mut step.probe, p, step.rows, (layer, "attention.out"), (mixed, q_width));
        b.linear(p, mixed, &mixer.o, n, out);
    }

    /// `out = norm_1(dense) + norm_2(experts(norm x))`; `out` holds the result of the dense MLP.
    fn mix_experts<B, F>(
        &self,
        step: &mut Step<'_, B, F>,
        experts: &Experts<W>,
        x: View<'_, B::Buf>,
        out: View<'_, B::Buf>,
    ) -> Result<(), StepError>
    where
        B: Backend<Weight = W, Buf = Buf>,
        F: ExpertFetch<B>,
    {
        let Trunk { d_model: d, eps, .. } = self.config.trunk;
        let (b, n, work) = (step.b, step.rows.len(), &self.work);
        let ExpertSizes { n_experts, top_k, .. } = experts.sizes;
        let [normed, joined] = [&work.normed, &work.joined].map(|buf| self.row(buf));
        let [dense_norm, pre_norm, post_norm] =
            experts.norms.each_ref().map(|w| Norm::rms(Some(w), [1, d], eps));
        b.norm(step.p, out, &dense_norm, n, out);
        let factor = (d as f32).sqrt().recip();
        let scaled = Norm { factor, ..Norm::rms(Some(&experts.scale), [1, d], eps) };
        b.norm(step.p, x, &scaled, n, normed);
        let logits = View::of(&work.logits, n_experts);
        b.linear(step.p, normed, &experts.router, n, logits);
        let expert_factor = Some(&experts.expert_factor);
        let router = Router { expert_factor, ..Router::softmax([n_experts, top_k], true) };
        let routed = b.route(step.p, logits, &router, n, [&work.ids, &work.weights]);
        let layer = experts.layer as usize;
        step.show(layer, "router.logits", logits, n_experts);
        step.show(layer, "router.ids", View::of(&routed.ids, top_k), top_k);
        step.show(layer, "router.weights", View::of(&routed.weights, top_k), top_k);
        b.norm(step.p, x, &pre_norm, n, normed);
        let block = MoeBlock {
            layer: experts.layer,
            x: normed,
            routed: &routed,
            layout: &experts.layout,
            parts: &work.parts,
        };
        moe_block(b, step.p, step.fetch, step.work, &block, |_| {})?;
        b.clear(step.p, &work.joined, 0..n * d);
        b.moe_join(step.p, &routed, &work.parts, None, d, joined);
        b.norm(step.p, joined, &post_norm, n, joined);
        b.add(step.p, out, joined, d, n);
        Ok(())
    }

    fn layer<B, F>(&self, step: &mut Step<'_, B, F>, index: usize) -> Result<(), StepError>
    where
        B: Backend<Weight = W, Buf = Buf>,
        F: ExpertFetch<B>,
    {
        let Trunk { d_model: d, n_layers, eps, .. } = self.config.trunk;
        let (b, n, work, layer) = (step.b, step.rows.len(), &self.work, &self.layers[index]);
        let [x, normed, mixed] = [&work.x, &work.normed, &work.mixed].map(|buf| self.row(buf));
        let rms = |w| Norm::rms(Some(w), [1, d], eps);
        step.show(index, "layer.input", x, d);
        b.norm(step.p, x, &rms(&layer.input_norm), n, normed);
        self.attend(step, index, normed, mixed);
        b.norm(step.p, mixed, &rms(&layer.post_attention_norm), n, mixed);
        b.add(step.p, x, mixed, d, n);
        step.show(index, "layer.mixed", x, d);
        b.norm(step.p, x, &rms(&layer.pre_norm), n, normed);
        let [gate, up] = [&work.gate, &work.up].map(|buf| View::of(buf, layer.mlp_width));
        layer.mlp.forward(b, step.p, n, [normed, gate, up, mixed]);
        if let Some(experts) = &layer.experts {
            self.mix_experts(step, experts, x, mixed)?;
        }
        b.norm(step.p, mixed, &rms(&layer.post_norm), n, mixed);
        b.add(step.p, x, mixed, d, n);
        if let (Some(own), Some([width, _])) = (&layer.own_input, self.config.per_layer) {
            let gate = View::of(&work.gate, width);
            let inputs = View::of(&work.inputs[0], n_layers * width).column(index * width);
            b.linear(step.p, x, &own.gate, n, gate);
            b.glu(step.p, Glu::GeluTanh, gate, inputs, width, n, gate);
            b.linear(step.p, gate, &own.projection, n, mixed);
            b.norm(step.p, mixed, &rms(&own.norm), n, mixed);
            b.add(step.p, x, mixed, d, n);
        }
        b.activate(step.p, Unary::Scale(layer.scalar), x, d, n);
        step.show(index, "layer.output", x, d);
        Ok(())
    }
}

impl<B, F> Decoder<B, F> for Gemma4<B::Weight, B::Buf>
where
    B: Backend,
    F: ExpertFetch<B>,
{
    fn forward(&self, step: &mut Step<'_, B, F>) -> Result<(), StepError> {
        let (b, n, d) = (step.b, step.rows.len(), self.config.trunk.d_model);
        let x = self.row(&self.work.x);
        b.embed(step.p, &self.embed, step.rows, x);
        b.activate(step.p, Unary::Scale((d as f32).sqrt()), x, d, n);
        self.per_layer_inputs(step, x);
        for (i, rotary) in self.config.rotary.iter().enumerate() {
            let out = View::of(&self.work.angles[i], rotary.d);
            b.rotary_table(step.p, &self.inv_freq[i], rotary.scale, step.rows, out);
        }
        (0..self.layers.len()).try_for_each(|index| self.layer(step, index))
    }

    fn head(&self, b: &B, p: &mut B::Pass, rows: &Rows, outputs: Range<usize>) -> &B::Buf {
        let Trunk { d_model: d, eps, n_vocab, .. } = self.config.trunk;
        let (n, chosen) = (outputs.len(), self.row(&self.work.chosen));
        let logits = View::of(&self.work.head, n_vocab);
        b.select_outputs(p, self.row(&self.work.x), d, rows, outputs.start, n, chosen);
        b.norm(p, chosen, &Norm::rms(Some(&self.norm), [1, d], eps), n, chosen);
        b.linear(p, chosen, self.head.as_ref().unwrap_or(&self.embed), n, logits);
        if let Some(cap) = self.config.softcap {
            b.activate(p, Unary::Softcap(cap), logits, n_vocab, n);
        }
        &self.work.head
    }
}
