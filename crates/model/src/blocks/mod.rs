//! Parts that three families or more use unchanged.

mod attention;
mod decoder;
mod delta_net;
mod ffn;

pub(crate) use attention::{Attention, AttentionShape};
pub(crate) use decoder::{LayerParts, LoadedAs, Mixer, PreNorm, PreNormParts};
pub(crate) use delta_net::{DeltaNet, DeltaShape, Packing};
pub(crate) use ffn::{Ffn, Mlp, Moe, MoeShape};
