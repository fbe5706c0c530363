//! What a pack will contain, before a single weight is read.

use serde_json::Value;

use crate::digest::Digest;
use crate::encoding::Encoding;
use crate::error::WeightsError;
use crate::manifest::{Fault, Manifest, Section, TrunkTensor, tensor_bytes};
use crate::packed::{ExpertLayer, ExpertPiece, PIECE_ALIGN, RECORD_ALIGN};

/// A tensor of the trunk to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedTensor {
    /// Name under which readers find it.
    pub name: String,
    /// Dimensions, slowest first.
    pub shape: Vec<usize>,
    /// How its rows will be stored.
    pub encoding: Encoding,
}

/// A matrix of a record to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedPiece {
    /// What it is: `gate`, `up`, `down`, …
    pub role: String,
    /// How its rows will be stored.
    pub encoding: Encoding,
    /// Rows.
    pub d_out: usize,
    /// Values in a row.
    pub d_in: usize,
}

/// The routed experts of one layer to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedLayer {
    /// Index of the layer in the model.
    pub layer: u32,
    /// Number of records.
    pub n_experts: u32,
    /// What a record consists of, in order.
    pub pieces: Vec<PlannedPiece>,
}

/// Everything about a pack but its weights.
///
/// Two runs with equal plans make equal directories from equal sources; so `provenance` must
/// identify the source (names, sizes, digests of headers) and must not hold a time.
#[derive(Clone, Debug)]
pub struct PackPlan {
    /// Name of the model family.
    pub family: String,
    /// The model's configuration, an object.
    pub config: Value,
    /// Resident tensors, in the order in which they will be written.
    pub trunk: Vec<PlannedTensor>,
    /// Layers with routed experts, ascending.
    pub layers: Vec<PlannedLayer>,
    /// Small files that belong to the model, with their content.
    pub sidecars: Vec<(String, Vec<u8>)>,
    /// Where the weights come from and what was asked for.
    pub provenance: Value,
    /// Tensors that keep the encoding of the source because the group does not divide a row.
    pub kept: Vec<String>,
}

impl PackPlan {
    /// The expert layers with all offsets, as readers of the container will see them.
    ///
    /// # Errors
    ///
    /// [`WeightsError::Plan`] when no container can hold the plan.
    pub fn expert_layers(&self) -> Result<Vec<ExpertLayer>, WeightsError> {
        self.manifest().map(|manifest| manifest.layers)
    }

    /// Bytes that the container will have on disk, without its manifest.
    ///
    /// # Errors
    ///
    /// [`WeightsError::Plan`] when no container can hold the plan.
    pub fn disk_bytes(&self) -> Result<u64, WeightsError> {
        let manifest = self.manifest()?;
        let sidecars = manifest.sidecars.iter().map(|s| s.len);
        let parts = [manifest.trunk.len, manifest.experts.len, manifest.digests.len];
        Ok(parts.into_iter().chain(sidecars).fold(0, u64::saturating_add))
    }

    /// The manifest with zeros for the digests of weights, and the digest of that as its plan.
    pub(crate) fn manifest(&self) -> Result<Manifest, WeightsError> {
        let mut manifest =
            Manifest::planned(self.family.clone(), self.config.clone(), self.provenance.clone());
        manifest.kept.clone_from(&self.kept);
        for tensor in &self.trunk {
            let offset = manifest.trunk.len.saturating_add(PIECE_ALIGN - 1) & !(PIECE_ALIGN - 1);
            // A shape that cannot be stored has no length; the checks below name it.
            let len = tensor_bytes(&tensor.shape, tensor.encoding).unwrap_or(0);
            manifest.trunk.len = offset.saturating_add(len);
            manifest.tensors.push(TrunkTensor {
                name: tensor.name.clone(),
                shape: tensor.shape.clone(),
                encoding: tensor.encoding,
                offset,
                len,
                blake3: Digest::default(),
            });
        }
        for layer in &self.layers {
            let layer = laid_out(layer, manifest.experts.len);
            let bytes = layer.stride.saturating_mul(u64::from(layer.n_experts));
            manifest.experts.len = manifest.experts.len.saturating_add(bytes);
            manifest.experts.records += u64::from(layer.n_experts);
            manifest.layers.push(layer);
        }
        manifest.digests.len = manifest.experts.records * 32;
        manifest.sidecars.extend(self.sidecars.iter().map(|(name, bytes)| Section {
            name: name.clone(),
            len: bytes.len() as u64,
            blake3: Digest::of(bytes),
        }));
        manifest.faults().map_err(|Fault { subject, field, wanted, got }| WeightsError::Plan {
            subject,
            field,
            wanted,
            got,
        })?;
        manifest.plan = manifest.plan_digest();
        Ok(manifest)
    }
}

fn laid_out(planned: &PlannedLayer, offset: u64) -> ExpertLayer {
    let mut record_bytes = 0u64;
    let mut pieces = Vec::with_capacity(planned.pieces.len());
    for piece in &planned.pieces {
        let start = record_bytes.saturating_add(PIECE_ALIGN - 1) & !(PIECE_ALIGN - 1);
        let len = tensor_bytes(&[piece.d_out, piece.d_in], piece.encoding).unwrap_or(0);
        record_bytes = start.saturating_add(len);
        pieces.push(ExpertPiece {
            role: piece.role.clone(),
            encoding: piece.encoding,
            d_out: piece.d_out,
            d_in: piece.d_in,
            offset: start,
        });
    }
    ExpertLayer {
        layer: planned.layer,
        n_experts: planned.n_experts,
        record_bytes,
        stride: record_bytes.saturating_add(RECORD_ALIGN - 1) & !(RECORD_ALIGN - 1),
        offset,
        pieces,
    }
}
