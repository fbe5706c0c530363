//! Qwen4-Exp (Qwen3.8-Flash-Next): a residual of several streams, gated DeltaNet in three layers of
//! four, attention to chosen blocks (QSA) in the fourth, experts in all, and embeddings of n-grams
//! (PLE) that are read from disk row by row. There is no norm but those below.
//!
//! ```text
//! R = embed(token) in each of n streams
//! each layer: R += ple(R, ids), where the layer has one
//!             R = join(R, mixer(mix R)); R = join(R, moe(mix R))
//! logits = lm_head(mix R)
//!
//! mix R:     xn = norm of each stream; gate = up silu(down xn / n)
//!            mean over streams of sigmoid(gate) xn
//! join R, y: R[c] += 2 sigmoid(inject xn / n)[c] y
//! qsa x:     q, k = index_qk_proj x; q = rope(norm q); blocks of k: mean, norm, rope at the first
//!            the `budget / ratio` blocks with the greatest sum over heads of relu(q . k)
//!            attention(q, k, v over those blocks and the incomplete one) * sigmoid(gate)
//! ple R:     e = rows of the table for the n-grams that end here
//!            u[c] = row_gate(norm(key_proj e)[c], norm(R)[c]) value_proj e
//!            u + silu(causal_conv(norm u)), dilated by the length of the n-grams
//! ```
//! All norms but the DeltaNet's own are stored centred on zero.
//! Source: transformers `models/qwen4_exp/modeling_qwen4_exp.py`.
//! Checkpoints: Qwen3.8-Flash-Next; vision and MTP tensors are skipped.

use crate::blocks::{
    Attention, AttentionShape, AttentionWork, DeltaNet, DeltaShape, DeltaWork, FfnWork, Moe,
    MoeShape, Packing, RouterShape,
};
use crate::config::{
    ExpertSizes, Heads, Result, Trunk, attention_layers, multiple, positive, product, refuse,
    require_silu, text_config,
};
use crate::loader::{Loader, StateKind, Use};
use crate::ngram::{self, NgramShape, Ngrams};
use crate::qwen3_next::gated_shared_expert;
use crate::registry::{Decoder, Qsa, Step};
use crate::rotary::Rotary;
use crate::tables::TableShape;
use snowmelt_backend::{
    Backend, ExpertFetch, Glu, IndexSelect, Norm, Pairing, Pool, Rows, Selection, StepError, Unary,
    View,
};
use snowmelt_weights::ConfigView;
use std::ops::Range;

/// The residual.
#[derive(Clone, Copy, Debug)]
struct StreamShape {
    streams: usize,
    d: usize,
    rank: usize,
    eps: f32,
}

impl StreamShape {
    fn read(text: &ConfigView<'_>, d: usize, eps: f32) -> Result<Self> {
        let streams = positive("hc_count", text.usize("hc_count")?)?;
        let rank = positive("hc_lowrank", text.usize("hc_lowrank")?)?;
        product("hc_count", &[streams, d])?;
        Ok(Self { streams, d, rank, eps })
    }

    fn width(&self) -> usize {
        self.streams * self.d
    }

    /// `[streams, d]`
    fn parts(&self) -> [usize; 2] {
        [self.streams, self.d]
    }
}

/// Sizes of an indexer of blocks.
#[derive(Clone, Copy, Debug)]
struct IndexShape {
    n_heads: usize,
    d: usize,
    ratio: usize,
    /// Most blocks that a row attends to.
    top: usize,
    d_rotary: usize,
    eps: f32,
}

impl IndexShape {
    fn read(text: &ConfigView<'_>, d_rotary: usize, eps: f32) -> Result<Self> {
        let field = |name: &'static str| positive(name, text.usize(name)?);
        let (n_heads, d) = (field("indexer_n_heads")?, field("indexer_head_dim")?);
        let kv_heads = text.usize_or("indexer_kv_heads", 1)?;
        if kv_heads != 1 {
            return refuse("indexer_kv_heads", kv_heads, "1: query heads share one key");
        }
        let (ratio, name) = (field("indexer_compress_ratio")?, "indexer_compress_ratio");
        let budget = multiple("indexer_budget", field("indexer_budget")?, name, ratio)?;
        if d_rotary > d {
            let expected = format!("at least the {d_rotary} dimensions that are rotated");
            return refuse("indexer_head_dim", d, expected);
        }
        product("indexer_n_heads", &[n_heads + 1, d])?;
        Ok(Self { n_heads, d, ratio, top: budget / ratio, d_rotary, eps })
    }

    /// Queries, then the key.
    fn width(&self) -> usize {
        (self.n_heads + 1) * self.d
    }
}

/// Sizes of the embeddings of n-grams.
#[derive(Clone, Debug)]
struct PleShape {
    ngrams: NgramShape,
    taps: usize,
    /// Layer indices, in the order of the tables.
    layers: Vec<usize>,
}

impl PleShape {
    /// `None` where no layer has one.
    fn read(
        outer: &ConfigView<'_>,
        text: &ConfigView<'_>,
        trunk: &Trunk,
        residual: &StreamShape,
    ) -> Result<Option<Self>> {
        let layers = ngram::layers(text, trunk.n_layers)?;
        if layers.is_empty() {
            return Ok(None);
        }
        let ngrams = NgramShape::read(outer, text, trunk.n_vocab)?;
        let name = "ple_conv_kernel_size";
        let taps = positive(name, text.usize(name)?)?;
        product(name, &[taps, ngrams.size, residual.width()])?;
        Ok(Some(Self { ngrams, taps, layers }))
    }

    /// Elements that the convolution keeps of a sequence.
    fn held(&self, residual: &StreamShape) -> usize {
        (self.taps - 1) * self.ngrams.size * residual.width()
    }
}

/// The function of z in the DeltaNet's last norm; unset it is `hidden_act`, which is SiLU.
fn output_gate(text: &ConfigView<'_>) -> Result<Glu> {
    match text.opt_str("output_gate_type")? {
        Some("sigmoid") => Ok(Glu::Sigmoid),
        None | Some("silu" | "swish") => Ok(Glu::Silu),
        Some(other) => refuse("output_gate_type", other, "`sigmoid` or `silu`"),
    }
}

/// Everything that the config says.
#[derive(Debug)]
struct Config {
    trunk: Trunk,
    residual: StreamShape,
    attends: Vec<bool>,
    /// Where a layer attends.
    qsa: Option<(AttentionShape, IndexShape, Rotary)>,
    delta: Option<DeltaShape>,
    moe: MoeShape,
    ple: Option<PleShape>,
}

impl Config {
    fn read(config: &ConfigView<'_>) -> Result<Self> {
        let text = text_config(config)?;
        require_silu(&text)?;
        let trunk = Trunk::read(config, &text)?;
        let (d, eps) = (trunk.d_model, trunk.eps);
        let residual = StreamShape::read(&text, d, eps)?;
        let spellings = ["full_attention", "indexed_attention"];
        let attends = attention_layers(&text, trunk.n_layers, &spellings)?;
        let qsa = match attends.contains(&true) {
            true => {
                let heads = Heads::read(&text, d)?;
                let rotary = Rotary::read(&text, heads.d_head, trunk.context_max)?;
                let plain = AttentionShape::plain(heads, d, eps);
                let attention = AttentionShape { gated: true, norm_plus: Some(1.0), ..plain };
                Some((attention, IndexShape::read(&text, rotary.d, eps)?, rotary))
            }
            false => None,
        };
        let delta = match attends.contains(&false) {
            true => {
                let gate = output_gate(&text)?;
                Some(DeltaShape { gate, ..DeltaShape::read(&text, d, eps)? })
            }
            false => None,
        };
        let renormalise = text.opt_bool("norm_topk_prob")?.unwrap_or(true);
        let router = RouterShape::softmax(renormalise);
        let plain = MoeShape::silu(d, ExpertSizes::read(&text)?, router);
        let moe = MoeShape { shared: Some(gated_shared_expert(&text)?), ..plain };
        let ple = PleShape::read(config, &text, &trunk, &residual)?;
        Ok(Self { trunk, residual, attends, qsa, delta, moe, ple })
    }
}

/// The way from the streams into a half-layer, and back where it has one.
#[derive(Debug)]
struct Connection<W> {
    norm: W,
    down: W,
    up: W,
    inject: Option<W>,
}

/// Scratch of connections.
#[derive(Debug)]
struct ConnectionWork<Buf> {
    shape: StreamShape,
    /// `[n, streams, d]`
    normed: Buf,
    /// `[n, rank]`
    low: Buf,
    /// `[n, streams, d]`
    gate: Buf,
}

impl<Buf> ConnectionWork<Buf> {
    /// `alloc(width)`: scratch of so many rows as are mixed at once.
    fn new(shape: StreamShape, mut alloc: impl FnMut(usize) -> Buf) -> Self {
        let (normed, low) = (alloc(shape.width()), alloc(shape.rank));
        Self { shape, normed, low, gate: alloc(shape.width()) }
    }

    fn normed(&self) -> View<'_, Buf> {
        View::of(&self.normed, self.shape.width())
    }
}

impl<W> Connection<W> {
    /// `name`: `layers.0.attn_hyper_connection`.
    fn load<L: Loader<Weight = W>>(
        l: &mut L,
        shape: &StreamShape,
        name: &str,
        injects: bool,
    ) -> Result<Self> {
        let (width, rank) = (shape.width(), shape.rank);
        let of = |l: &L, part: &str| l.tensors().trunk(&format!("{name}.{part}.weight"));
        let inject = of(l, "block_inject_weight");
        Ok(Self {
            norm: l.vector(&of(l, "hc_norm"), width, 1.0)?,
            down: matrix(l, &of(l, "input_mix_weight_down"), [rank, width])?,
            up: matrix(l, &of(l, "input_mix_weight_up"), [width, rank])?,
            inject: match injects {
                true => Some(l.matrix(&inject, [shape.streams, width], Use::Exact, &[])?),
                false => None,
            },
        })
    }

    /// `out = mix(x)`; `x: [n, streams, d]; out: [n, d]`
    fn mix<B: Backend<Weight = W>>(
        &self,
        b: &B,
        p: &mut B::Pass,
        work: &ConnectionWork<B::Buf>,
        n: usize,
        x: View<'_, B::Buf>,
        out: View<'_, B::Buf>,
    ) {
        let shape = &work.shape;
        let (normed, low) = (work.normed(), View::of(&work.low, shape.rank));
        let gate = View::of(&work.gate, shape.width());
        b.norm(p, x, &Norm::rms(Some(&self.norm), shape.parts(), shape.eps), n, normed);
        b.linear(p, normed, &self.down, n, low);
        b.activate(p, Unary::Silu((shape.streams as f32).recip()), low, shape.rank, n);
        b.linear(p, low, &self.up, n, gate);
        b.stream_mix(p, normed, gate, shape.parts(), n, out);
    }
}

fn matrix<L: Loader>(l: &mut L, name: &str, shape: [usize; 2]) -> Result<L::Weight> {
    l.matrix(name, shape, Use::Projection, &[])
}

/// Chooses the blocks that a layer attends to.
#[derive(Debug)]
struct Indexer<W> {
    shape: IndexShape,
    qk: W,
    q_norm: W,
    k_norm: W,
    /// Raw keys.
    state: usize,
}

/// Scratch of the attending layers.
#[derive(Debug)]
struct QsaWork<W, Buf> {
    attention: AttentionWork<W, Buf>,
    /// `[n, heads + 1, d]`
    qk: Buf,
    ids: Buf,
    mode: Qsa,
}

impl<W> Indexer<W> {
    /// `name`: `layers.3.self_attn.indexer`.
    fn load<L>(l: &mut L, shape: IndexShape, layer: usize, name: &str, d: usize) -> Result<Self>
    where
        L: Loader<Weight = W>,
    {
        let limits = l.limits();
        limits.d_index = limits.d_index.max(shape.d);
        limits.index_ratio = shape.ratio;
        limits.n_heads = limits.n_heads.max(shape.n_heads);
        limits.d_head = limits.d_head.max(shape.d);
        let of = |l: &L, part: &str| l.tensors().trunk(&format!("{name}.{part}.weight"));
        Ok(Self {
            shape,
            qk: matrix(l, &of(l, "index_qk_proj"), [shape.width(), d])?,
            q_norm: l.vector(&of(l, "q_layernorm"), shape.d, 1.0)?,
            k_norm: l.vector(&of(l, "k_layernorm"), shape.d, 1.0)?,
            state: l.state(format!("layers.{layer}.index"), StateKind::PerToken { width: shape.d }),
        })
    }

    /// What each row of `x: [n, d_model]` attends to; `None`: everything.
    fn select<B, F>(
        &self,
        step: &mut Step<'_, B, F>,
        work: &QsaWork<W, B::Buf>,
        x: View<'_, B::Buf>,
    ) -> Option<Selection<B::Buf>>
    where
        B: Backend<Weight = W>,
    {
        if work.mode == Qsa::Dense {
            return None;
        }
        let (b, n, s) = (step.b, step.rows.len(), &self.shape);
        let p = &mut *step.p;
        let (heads, d) = (s.n_heads, s.d);
        let q = View::of(&work.qk, s.width());
        b.linear(p, x, &self.qk, n, q);
        b.norm(p, q, &Norm::rms(Some(&self.q_norm), [heads, d], s.eps), n, q);
        let angles = work.attention.angles();
        b.rope(p, q, [heads, d, 0, s.d_rotary], angles, Pairing::Half, n);
        let (inv_freq, rotary_scale) = work.attention.frequencies();
        let (ratio, norm, eps) = (s.ratio, &self.k_norm, s.eps);
        let args = IndexSelect {
            q,
            k: q.column(heads * d),
            k_cache: &step.state[self.state],
            weights: None,
            n_heads: heads,
            d,
            scale: (d as f32).sqrt().recip(),
            sum_scale: 1.0,
            pool: Some(Pool { ratio, norm, eps, inv_freq, rotary_scale }),
            top: s.top,
            ids: &work.ids,
        };
        Some(b.index_select(p, &args, step.rows))
    }
}

/// Embeddings of the n-grams that end at a token.
#[derive(Debug)]
struct Ple<W> {
    table: usize,
    ngrams: Ngrams,
    /// Rows of the table that a token reads.
    heads: usize,
    key: W,
    value: W,
    /// Of key, query and the input of the convolution.
    norms: [W; 3],
    conv: W,
    dilation: usize,
    state: usize,
}

/// Scratch of the layers with embeddings of n-grams.
#[derive(Debug)]
struct PleWork<Buf> {
    d_embed: usize,
    /// `[n, d_embed]`
    embedded: Buf,
    /// `[n, streams, d]` each.
    wide: [Buf; 3],
    /// `[n, d]`
    value: Buf,
}

impl<W> Ple<W> {
    /// `rank`: its place among such layers; `name`: `layers.1.ple`.
    fn load<L: Loader<Weight = W>>(
        l: &mut L,
        shape: &PleShape,
        residual: &StreamShape,
        (rank, layer): (usize, usize),
    ) -> Result<Self> {
        let (width, d_embed) = (residual.width(), shape.ngrams.d_embed);
        let name = l.tensors().trunk(&format!("layers.{layer}.ple"));
        let of = |part: &str| format!("{name}.{part}.weight");
        let norm = |l: &mut L, part: &str| l.vector(&of(part), width, 1.0);
        // These first: they bound how many heads there can be.
        let key = matrix(l, &of("key_proj"), [width, d_embed])?;
        let value = matrix(l, &of("value_proj"), [residual.d, d_embed])?;
        let ngrams = Ngrams::new(&shape.ngrams, rank)?;
        ngrams.check(l, &format!("{name}.ple_embedding"))?;
        let heads = shape.ngrams.all_heads();
        let table = l.table(&TableShape {
            name: format!("{name}.ple_embedding.ngram_embedding"),
            parts: shape.ngrams.parts,
            rows: ngrams.rows,
            width: d_embed / heads,
            rows_a_token: heads,
        })?;
        l.history(shape.ngrams.size - 1);
        let len = shape.held(residual);
        Ok(Self {
            table,
            ngrams,
            heads,
            key,
            value,
            norms: [norm(l, "norm_key")?, norm(l, "norm_query")?, norm(l, "norm_conv")?],
            conv: l.matrix(&of("conv1d"), [width, shape.taps], Use::Exact, &[])?,
            dilation: shape.ngrams.size,
            state: l.state(format!("layers.{layer}.ple"), StateKind::PerSequence { len }),
        })
    }

    /// `x += ple(x)`; `x: [n, streams, d]`
    fn forward<B, F>(
        &self,
        step: &mut Step<'_, B, F>,
        work: &PleWork<B::Buf>,
        shape: &StreamShape,
        x: View<'_, B::Buf>,
    ) -> Result<(), StepError>
    where
        B: Backend<Weight = W>,
    {
        let (b, n, width) = (step.b, step.rows.len(), shape.width());
        let failures = &mut step.work.failures;
        let values = step.tables.wait(self.table, &mut |place, error| {
            failures.mark(std::iter::once(place / self.heads), error);
        });
        if let Some(first) = failures.first().filter(|_| failures.all()) {
            return Err(first.clone());
        }
        let p = &mut *step.p;
        b.write(p, &work.embedded, 0, values);
        let embedded = View::of(&work.embedded, work.d_embed);
        let [a, query, u] = [0, 1, 2].map(|i| View::of(&work.wide[i], width));
        let value = View::of(&work.value, shape.d);
        let norm = |i: usize| Norm::rms(Some(&self.norms[i]), shape.parts(), shape.eps);
        b.linear(p, embedded, &self.key, n, a);
        b.norm(p, a, &norm(0), n, a);
        b.linear(p, embedded, &self.value, n, value);
        b.norm(p, x, &norm(1), n, query);
        b.row_gate(p, a, query, value, shape.parts(), n, u);
        b.norm(p, u, &norm(2), n, a);
        let state = &step.state[self.state];
        b.causal_conv(p, a, &self.conv, self.dilation, state, step.rows, query);
        b.add(p, u, query, width, n);
        b.add(p, x, u, width, n);
        Ok(())
    }
}

#[derive(Debug)]
enum Mixer<W, Buf> {
    Qsa(Attention<W, Buf>, Indexer<W>),
    DeltaNet(DeltaNet<W>),
}

#[derive(Debug)]
struct Layer<W, Buf> {
    ple: Option<Ple<W>>,
    into_mixer: Connection<W>,
    mixer: Mixer<W, Buf>,
    into_moe: Connection<W>,
    moe: Moe<W, Buf>,
}

impl<W, Buf> Layer<W, Buf> {
    fn load<L>(l: &mut L, config: &Config, index: usize) -> Result<Self>
    where
        L: Loader<Weight = W, Buf = Buf>,
    {
        let shape = &config.residual;
        let connection = |l: &mut L, which: &str| {
            Connection::load(l, shape, &format!("layers.{index}.{which}_hyper_connection"), true)
        };
        let rank = |ple: &PleShape| ple.layers.iter().position(|&layer| layer == index);
        let ple = match config.ple.as_ref().and_then(|ple| Some((ple, rank(ple)?))) {
            Some((ple, rank)) => Some(Ple::load(l, ple, shape, (rank, index))?),
            None => None,
        };
        let mixer = match (&config.qsa, config.delta) {
            (Some((attention, indexer, _)), _) if config.attends[index] => {
                let name = format!("layers.{index}.self_attn");
                Mixer::Qsa(
                    Attention::load(l, *attention, index, &name)?,
                    Indexer::load(l, *indexer, index, &format!("{name}.indexer"), shape.d)?,
                )
            }
            (_, delta) => {
                let delta = delta.expect("read where a layer does not attend");
                let name = format!("layers.{index}.linear_attn");
                Mixer::DeltaNet(DeltaNet::load(l, delta, Packing::Separate, index, &name)?)
            }
        };
        Ok(Self {
            ple,
            into_mixer: connection(l, "attn")?,
            mixer,
            into_moe: connection(l, "mlp")?,
            moe: Moe::load(l, config.moe, index, &format!("layers.{index}.mlp"))?,
        })
    }
}

/// See the top of the file.
#[derive(Debug)]
pub(crate) struct Streams<W, Buf> {
    trunk: Trunk,
    shape: StreamShape,
    embed: W,
    layers: Vec<Layer<W, Buf>>,
    last: Connection<W>,
    /// `None`: tied to the embedding.
    head: Option<W>,
    qsa: Option<QsaWork<W, Buf>>,
    delta: Option<DeltaWork<Buf>>,
    ple: Option<PleWork<Buf>>,
    ffn: FfnWork<Buf>,
    connection: ConnectionWork<Buf>,
    /// `[n, streams, d]`, the residual.
    x: Buf,
    /// `[n, d]` each: input and output of a half-layer, and scratch within.
    halves: [Buf; 3],
    /// `[n, streams]`
    inject: Buf,
    /// Of output rows.
    chosen: Buf,
    last_work: ConnectionWork<Buf>,
    hidden: Buf,
    logits: Buf,
}

type LoadedAs<L> = Result<(Streams<<L as Loader>::Weight, <L as Loader>::Buf>, Trunk)>;

pub(crate) fn load<L: Loader>(config: &ConfigView<'_>, l: &mut L) -> LoadedAs<L> {
    let config = Config::read(config)?;
    let (trunk, shape) = (config.trunk, config.residual);
    let (d, n_vocab) = (trunk.d_model, trunk.n_vocab);
    l.limits().d_model = d;
    let name = l.tensors().trunk("embed_tokens.weight");
    let embed = matrix(l, &name, [n_vocab, d])?;
    let mut layers = Vec::with_capacity(trunk.n_layers);
    for index in 0..trunk.n_layers {
        layers.push(Layer::load(l, &config, index)?);
    }
    let last = Connection::load(l, &shape, "hyper_connection_mixer", false)?;
    let head = match trunk.tied {
        true => None,
        false => Some(matrix(l, "lm_head.weight", [n_vocab, d])?),
    };
    let qsa = config.qsa.as_ref().map(|(attention, index, rotary)| QsaWork {
        attention: AttentionWork::load(l, *attention, rotary),
        qk: l.scratch(index.width()),
        ids: l.scratch(1 + index.top),
        mode: l.options().qsa,
    });
    let ple = config.ple.as_ref().map(|ple| PleWork {
        d_embed: ple.ngrams.d_embed,
        embedded: l.scratch(ple.ngrams.d_embed),
        wide: [(); 3].map(|()| l.scratch(shape.width())),
        value: l.scratch(d),
    });
    let model = Streams {
        trunk,
        shape,
        embed,
        layers,
        last,
        head,
        qsa,
        delta: config.delta.map(|delta| DeltaWork::load(l, delta)),
        ple,
        ffn: FfnWork::load(l, config.moe.shared_width(), Some(config.moe)),
        connection: ConnectionWork::new(shape, |width| l.scratch(width)),
        x: l.scratch(shape.width()),
        halves: [(); 3].map(|()| l.scratch(d)),
        inject: l.scratch(shape.streams),
        chosen: l.outputs(shape.width()),
        last_work: ConnectionWork::new(shape, |width| l.outputs(width)),
        hidden: l.outputs(d),
        logits: l.outputs(n_vocab),
    };
    Ok((model, trunk))
}

impl<W, Buf> Streams<W, Buf> {
    /// `x = join(x, half(mix x))`; `half(step, input, scratch, output)`.
    fn half<B, F>(
        &self,
        step: &mut Step<'_, B, F>,
        connection: &Connection<W>,
        half: impl FnOnce(&mut Step<'_, B, F>, [View<'_, B::Buf>; 3]) -> Result<(), StepError>,
    ) -> Result<(), StepError>
    where
        B: Backend<Weight = W, Buf = Buf>,
    {
        let (b, n, shape) = (step.b, step.rows.len(), &self.shape);
        let x = View::of(&self.x, shape.width());
        let [input, scratch, output] = [0, 1, 2].map(|i| View::of(&self.halves[i], shape.d));
        let inject = View::of(&self.inject, shape.streams);
        connection.mix(b, step.p, &self.connection, n, x, input);
        let weight = connection.inject.as_ref().expect("loaded with a way back");
        b.linear(step.p, self.connection.normed(), weight, n, inject);
        half(step, [input, scratch, output])?;
        b.stream_join(step.p, x, output, Some(inject), shape.parts(), n);
        Ok(())
    }

    fn layer<B, F>(&self, step: &mut Step<'_, B, F>, index: usize) -> Result<(), StepError>
    where
        B: Backend<Weight = W, Buf = Buf>,
        F: ExpertFetch<B>,
    {
        let (loaded, layer) = ("loaded with its scratch", &self.layers[index]);
        let (d, streams, width) = (self.shape.d, self.shape.streams, self.shape.width());
        let x = View::of(&self.x, width);
        if let Some(ple) = &layer.ple {
            let work = self.ple.as_ref().expect(loaded);
            ple.forward(step, work, &self.shape, x)?;
        }
        step.show(index, "layer.input", x, width);
        self.half(step, &layer.into_mixer, |step, [input, _, output]| {
            match &layer.mixer {
                Mixer::Qsa(attention, indexer) => {
                    let work = self.qsa.as_ref().expect(loaded);
                    let selection = indexer.select(step, work, input);
                    attention.forward(step, &work.attention, selection.as_ref(), input, output);
                }
                Mixer::DeltaNet(mixer) => {
                    mixer.forward(step, self.delta.as_ref().expect(loaded), input, output);
                }
            }
            step.show(index, "hc.normed", self.connection.normed(), width);
            step.show(index, "hc.gate", View::of(&self.connection.gate, width), width);
            step.show(index, "hc.mixed", input, d);
            step.show(index, "hc.branch", output, d);
            step.show(index, "hc.inject", View::of(&self.inject, streams), streams);
            Ok(())
        })?;
        step.show(index, "hc.joined", x, width);
        step.show(index, "layer.mixed", x, width);
        self.half(step, &layer.into_moe, |step, [input, scratch, output]| {
            // The experts add to what is there.
            step.b.clear(step.p, output.buf, 0..step.rows.len() * self.shape.d);
            layer.moe.forward(step, &self.ffn, input, scratch, output)
        })?;
        step.show(index, "layer.output", x, width);
        Ok(())
    }
}

impl<B, F> Decoder<B, F> for Streams<B::Weight, B::Buf>
where
    B: Backend,
    F: ExpertFetch<B>,
{
    fn forward(&self, step: &mut Step<'_, B, F>) -> Result<(), StepError> {
        // Rows of tables first: they are read while the layers before their own are computed.
        for ple in self.layers.iter().filter_map(|layer| layer.ple.as_ref()) {
            step.tables.request(ple.table, &mut ple.ngrams.numbers(step.rows));
        }
        let x = View::of(&self.x, self.shape.width());
        for stream in 0..self.shape.streams {
            step.b.embed(step.p, &self.embed, step.rows, x.column(stream * self.shape.d));
        }
        if let Some(qsa) = &self.qsa {
            qsa.attention.begin(step);
        }
        (0..self.layers.len()).try_for_each(|index| self.layer(step, index))
    }

    fn head(&self, b: &B, p: &mut B::Pass, rows: &Rows, outputs: Range<usize>) -> &B::Buf {
        let (n, width) = (outputs.len(), self.shape.width());
        let (x, chosen) = (View::of(&self.x, width), View::of(&self.chosen, width));
        let hidden = View::of(&self.hidden, self.shape.d);
        b.select_outputs(p, x, width, rows, outputs.start, n, chosen);
        self.last.mix(b, p, &self.last_work, n, chosen, hidden);
        let head = self.head.as_ref().unwrap_or(&self.embed);
        b.linear(p, hidden, head, n, View::of(&self.logits, self.trunk.n_vocab));
        &self.logits
    }
}
