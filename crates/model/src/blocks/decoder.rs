//! The pre-norm decoder: what Qwen3-MoE, Qwen3-Next and Qwen3.5 have in common.

use super::attention::{Attention, AttentionShape, AttentionWork};
use super::delta_net::{DeltaNet, DeltaShape, DeltaWork};
use super::ffn::{Ffn, FfnWork, MoeShape};
use crate::config::{Result, Trunk};
use crate::loader::{Loader, Use};
use crate::registry::{Decoder, Step};
use crate::rotary::Rotary;
use snowmelt_backend::{Backend, ExpertFetch, Rows, StepError, View};
use std::ops::Range;

/// The mixing half of a layer.
#[derive(Debug)]
pub(crate) enum Mixer<W, Buf> {
    /// Softmax attention.
    Attention(Attention<W, Buf>),
    /// Gated DeltaNet.
    DeltaNet(DeltaNet<W>),
}

/// What a family brings for each layer.
#[derive(Debug)]
pub(crate) struct LayerParts<W, Buf> {
    pub(crate) mixer: Mixer<W, Buf>,
    pub(crate) ffn: Ffn<W>,
}

/// What a family brings for the model.
#[derive(Debug)]
pub(crate) struct PreNormParts<'a> {
    pub(crate) trunk: Trunk,
    /// Added to norm weights.
    pub(crate) norm_plus: f32,
    pub(crate) attention: AttentionShape,
    pub(crate) rotary: &'a Rotary,
    pub(crate) delta: Option<DeltaShape>,
    pub(crate) moe: Option<MoeShape>,
    /// Widest dense MLP.
    pub(crate) d_mlp: usize,
}

#[derive(Debug)]
struct Layer<W, Buf> {
    input_norm: W,
    mixer: Mixer<W, Buf>,
    post_norm: W,
    ffn: Ffn<W>,
}

/// ```text
/// x = embed(token)
/// each layer: x += mixer(norm x); x += ffn(norm x)
/// logits = lm_head(norm x)
/// ```
#[derive(Debug)]
pub(crate) struct PreNorm<W, Buf> {
    trunk: Trunk,
    embed: W,
    layers: Vec<Layer<W, Buf>>,
    norm: W,
    /// `None`: tied to the embedding.
    head: Option<W>,
    attention: AttentionWork<W, Buf>,
    delta: Option<DeltaWork<Buf>>,
    ffn: FfnWork<Buf>,
    x: Buf,
    normed: Buf,
    mixed: Buf,
    chosen: Buf,
    logits: Buf,
}

/// What a family's `load` returns.
pub(crate) type LoadedAs<L> = Result<(PreNorm<<L as Loader>::Weight, <L as Loader>::Buf>, Trunk)>;

impl<W, Buf> PreNorm<W, Buf> {
    /// `layer(l, index)` loads the parts of one layer.
    pub(crate) fn load<L>(
        l: &mut L,
        parts: &PreNormParts<'_>,
        mut layer: impl FnMut(&mut L, usize) -> Result<LayerParts<W, Buf>>,
    ) -> Result<Self>
    where
        L: Loader<Weight = W, Buf = Buf>,
    {
        let Trunk { n_layers, d_model: d, n_vocab, .. } = parts.trunk;
        l.limits().d_model = d;
        let of = |l: &L, name: &str| l.tensors().trunk(name);
        let embed = l.matrix(&of(l, "embed_tokens.weight"), [n_vocab, d], Use::Projection, &[])?;
        let mut layers = Vec::with_capacity(n_layers);
        for index in 0..n_layers {
            let norm = |l: &mut L, which: &str| {
                let name = of(l, &format!("layers.{index}.{which}.weight"));
                l.vector(&name, d, parts.norm_plus)
            };
            let input_norm = norm(l, "input_layernorm")?;
            let post_norm = norm(l, "post_attention_layernorm")?;
            let LayerParts { mixer, ffn } = layer(l, index)?;
            layers.push(Layer { input_norm, mixer, post_norm, ffn });
        }
        let norm = l.vector(&of(l, "norm.weight"), d, parts.norm_plus)?;
        let head = match parts.trunk.tied {
            true => None,
            false => Some(l.matrix("lm_head.weight", [n_vocab, d], Use::Projection, &[])?),
        };
        let d_shared = parts.moe.and_then(|moe| moe.d_shared).unwrap_or(0);
        Ok(Self {
            trunk: parts.trunk,
            embed,
            layers,
            norm,
            head,
            attention: AttentionWork::load(l, parts.attention, parts.rotary),
            delta: parts.delta.map(|shape| DeltaWork::load(l, shape)),
            ffn: FfnWork::load(l, parts.d_mlp.max(d_shared), parts.moe),
            x: l.scratch(d),
            normed: l.scratch(d),
            mixed: l.scratch(d),
            chosen: l.outputs(d),
            logits: l.outputs(n_vocab),
        })
    }
}

impl<B, F> Decoder<B, F> for PreNorm<B::Weight, B::Buf>
where
    B: Backend,
    F: ExpertFetch<B>,
{
    fn forward(&self, step: &mut Step<'_, B, F>) -> Result<(), StepError> {
        let (b, n) = (step.b, step.rows.len());
        let Trunk { d_model: d, eps, .. } = self.trunk;
        let (x, normed) = (View::of(&self.x, d), View::of(&self.normed, d));
        let mixed = View::of(&self.mixed, d);
        b.embed(step.p, &self.embed, step.rows, x);
        self.attention.begin(step);
        for layer in &self.layers {
            b.rms_norm(step.p, x, &layer.input_norm, 1, eps, n, normed);
            match (&layer.mixer, &self.delta) {
                (Mixer::Attention(mixer), _) => {
                    mixer.forward(step, &self.attention, normed, mixed);
                }
                (Mixer::DeltaNet(mixer), Some(work)) => mixer.forward(step, work, normed, mixed),
                (Mixer::DeltaNet(_), None) => unreachable!("loaded with its scratch"),
            }
            b.add(step.p, x, mixed, d, n);
            b.rms_norm(step.p, x, &layer.post_norm, 1, eps, n, normed);
            layer.ffn.forward(step, &self.ffn, normed, mixed, x)?;
        }
        Ok(())
    }

    fn head(&self, b: &B, p: &mut B::Pass, rows: &Rows, outputs: Range<usize>) -> &B::Buf {
        let Trunk { d_model: d, eps, n_vocab, .. } = self.trunk;
        let (n, chosen) = (outputs.len(), View::of(&self.chosen, d));
        b.select_outputs(p, View::of(&self.x, d), d, rows, outputs.start, n, chosen);
        b.rms_norm(p, chosen, &self.norm, 1, eps, n, chosen);
        let head = self.head.as_ref().unwrap_or(&self.embed);
        b.linear(p, chosen, head, n, View::of(&self.logits, n_vocab));
        &self.logits
    }
}
