//! Parts that three families or more use unchanged.

mod attention;
mod decoder;
mod delta_net;
mod ffn;
mod latent;

pub(crate) use attention::{Attention, AttentionShape, AttentionWork, Biases};
pub(crate) use decoder::{LayerParts, LoadedAs, Mixer, PreNorm, PreNormParts, Works};
pub(crate) use delta_net::{DeltaNet, DeltaShape, DeltaWork, Packing};
pub(crate) use ffn::{Ffn, FfnWork, Mlp, Moe, MoeShape, RouterShape, SharedShape};
pub(crate) use latent::{Latent, LatentShape, LatentWork};
