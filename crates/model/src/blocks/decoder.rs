//! The pre-norm decoder that most families are.

use super::attention::{Attention, AttentionWork};
use super::delta_net::{DeltaNet, DeltaWork};
use super::ffn::{Ffn, FfnWork, MoeShape};
use super::latent::{Latent, LatentWork};
use crate::config::{Result, Trunk};
use crate::loader::{Loader, Use};
use crate::registry::{Decoder, Step};
use snowmelt_backend::{Backend, ExpertFetch, Norm, Rows, StepError, View};
use std::ops::Range;

/// The mixing half of a layer.
#[derive(Debug)]
pub(crate) enum Mixer<W, Buf> {
    /// Softmax attention.
    Attention(Attention<W, Buf>),
    /// Gated DeltaNet.
    DeltaNet(DeltaNet<W>),
    /// Latent attention.
    Latent(Latent<W, Buf>),
}

/// Scratch of each kind of mixer that the model has.
#[derive(Debug)]
pub(crate) struct Works<W, Buf> {
    pub(crate) attention: Option<AttentionWork<W, Buf>>,
    pub(crate) delta: Option<DeltaWork<Buf>>,
    pub(crate) latent: Option<LatentWork<W, Buf>>,
}

impl<W, Buf> Default for Works<W, Buf> {
    fn default() -> Self {
        Self { attention: None, delta: None, latent: None }
    }
}

/// What a family brings for each layer.
#[derive(Debug)]
pub(crate) struct LayerParts<W, Buf> {
    pub(crate) mixer: Mixer<W, Buf>,
    pub(crate) ffn: Ffn<W, Buf>,
}

/// What a family brings for the model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PreNormParts {
    pub(crate) trunk: Trunk,
    /// Added to norm weights.
    pub(crate) norm_plus: f32,
    pub(crate) moe: Option<MoeShape>,
    /// Widest dense MLP.
    pub(crate) d_mlp: usize,
}

#[derive(Debug)]
struct Layer<W, Buf> {
    input_norm: W,
    mixer: Mixer<W, Buf>,
    post_norm: W,
    ffn: Ffn<W, Buf>,
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
    works: Works<W, Buf>,
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
    /// `layer(l, index)` loads the parts of one layer, `works(l)` the scratch of its mixers.
    pub(crate) fn load<L>(
        l: &mut L,
        parts: &PreNormParts,
        works: impl FnOnce(&mut L) -> Works<W, Buf>,
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
        let d_shared = parts.moe.map_or(0, |moe| moe.shared_width());
        Ok(Self {
            trunk: parts.trunk,
            embed,
            layers,
            norm,
            head,
            works: works(l),
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
        let works = &self.works;
        if let Some(work) = &works.attention {
            work.begin(step);
        }
        if let Some(work) = &works.latent {
            work.begin(step);
        }
        let loaded = "loaded with its scratch";
        for (index, layer) in self.layers.iter().enumerate() {
            step.show(index, "layer.input", x, d);
            b.norm(step.p, x, &Norm::rms(Some(&layer.input_norm), [1, d], eps), n, normed);
            match &layer.mixer {
                Mixer::Attention(mixer) => {
                    let work = works.attention.as_ref().expect(loaded);
                    mixer.forward(step, work, None, normed, mixed);
                }
                Mixer::DeltaNet(mixer) => {
                    mixer.forward(step, works.delta.as_ref().expect(loaded), normed, mixed);
                }
                Mixer::Latent(mixer) => {
                    mixer.forward(step, works.latent.as_ref().expect(loaded), normed, mixed);
                }
            }
            b.add(step.p, x, mixed, d, n);
            step.show(index, "layer.mixed", x, d);
            b.norm(step.p, x, &Norm::rms(Some(&layer.post_norm), [1, d], eps), n, normed);
            layer.ffn.forward(step, &self.ffn, normed, mixed, x)?;
            step.show(index, "layer.output", x, d);
        }
        Ok(())
    }

    fn head(&self, b: &B, p: &mut B::Pass, rows: &Rows, outputs: Range<usize>) -> &B::Buf {
        let Trunk { d_model: d, eps, n_vocab, .. } = self.trunk;
        let (n, chosen) = (outputs.len(), View::of(&self.chosen, d));
        b.select_outputs(p, View::of(&self.x, d), d, rows, outputs.start, n, chosen);
        b.norm(p, chosen, &Norm::rms(Some(&self.norm), [1, d], eps), n, chosen);
        let head = self.head.as_ref().unwrap_or(&self.embed);
        b.linear(p, chosen, head, n, View::of(&self.logits, n_vocab));
        &self.logits
    }
}
