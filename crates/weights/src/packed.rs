//! The packed container: what is where.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::encoding::Encoding;
use crate::manifest::Manifest;

/// Pieces of a record and tensors of the trunk start at multiples of this.
pub(crate) const PIECE_ALIGN: u64 = 64;
/// Records start at multiples of this and are padded to it with zeros.
pub(crate) const RECORD_ALIGN: u64 = 4096;

/// Ending of the folder in which a container grows.
pub(crate) const PARTIAL: &str = ".partial";

/// The folder in which the container at `path` grows; nothing when the path has no name.
pub(crate) fn partial_path(path: &Path) -> Option<PathBuf> {
    let mut name = path.file_name()?.to_owned();
    name.push(PARTIAL);
    Some(path.with_file_name(name))
}

/// One matrix inside an expert's record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertPiece {
    /// What it is: `gate`, `up`, `down`, …
    pub role: String,
    /// How its rows are stored.
    pub encoding: Encoding,
    /// Rows.
    pub d_out: usize,
    /// Values in a row.
    pub d_in: usize,
    /// First byte in the record.
    pub offset: u64,
}

/// The routed experts of one layer: records of equal size, one after the other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertLayer {
    /// Index of the layer in the model.
    pub layer: u32,
    /// Number of records.
    pub n_experts: u32,
    /// Bytes of a record without its padding.
    pub record_bytes: u64,
    /// Distance between records, a multiple of 4096.
    pub stride: u64,
    /// First byte of expert 0 in the experts file.
    pub offset: u64,
    /// What a record consists of.
    pub pieces: Vec<ExpertPiece>,
}

/// What a packed checkpoint has beyond tensors.
#[derive(Debug)]
pub struct Packed {
    pub(crate) manifest: Box<Manifest>,
    pub(crate) digests: Vec<[u8; 32]>,
    pub(crate) experts_file: u32,
}

impl Packed {
    /// Name of the model family.
    pub fn family(&self) -> &str {
        &self.manifest.family
    }

    /// Layers with routed experts, ascending.
    pub fn expert_layers(&self) -> &[ExpertLayer] {
        &self.manifest.layers
    }

    /// The experts of one layer.
    pub fn expert_layer(&self, layer: u32) -> Option<&ExpertLayer> {
        let layers = self.expert_layers();
        let at = layers.binary_search_by_key(&layer, |l| l.layer).ok()?;
        Some(&layers[at])
    }

    /// Index of the file with the records in [`crate::Checkpoint::files`].
    pub fn experts_file(&self) -> u32 {
        self.experts_file
    }

    /// Where the weights came from: whatever the plan said.
    pub fn provenance(&self) -> &Value {
        &self.manifest.provenance
    }

    /// Tensors that keep the encoding of the source because the group does not divide a row.
    pub fn kept(&self) -> &[String] {
        &self.manifest.kept
    }

    /// Names of the sidecars.
    pub fn sidecars(&self) -> impl Iterator<Item = &str> {
        self.manifest.sidecars.iter().map(|s| s.name.as_str())
    }

    /// Identifies source, options and layout, not the weights.
    pub fn plan_digest(&self) -> [u8; 32] {
        self.manifest.plan.0
    }

    /// BLAKE3 of a tensor of the trunk.
    pub fn tensor_digest(&self, name: &str) -> Option<[u8; 32]> {
        self.manifest.tensors.iter().find(|t| t.name == name).map(|t| t.blake3.0)
    }

    /// BLAKE3 of a record without its padding.
    ///
    /// # Panics
    ///
    /// If there is no such expert.
    pub fn record_digest(&self, layer: u32, expert: u32) -> [u8; 32] {
        let mut first = 0;
        for l in self.expert_layers() {
            if l.layer == layer {
                let n = l.n_experts;
                assert!(expert < n, "layer {layer} has {n} experts, asked for {expert}");
                return self.digests[first + expert as usize];
            }
            first += l.n_experts as usize;
        }
        panic!("layer {layer} has no routed experts")
    }
}

impl ExpertLayer {
    /// Bytes of a piece.
    ///
    /// # Panics
    ///
    /// If the piece is not of a checked layer.
    pub fn piece_bytes(&self, piece: &ExpertPiece) -> u64 {
        piece.encoding.row_bytes(piece.d_in) as u64 * piece.d_out as u64
    }

    /// The piece with that role.
    pub fn piece(&self, role: &str) -> Option<&ExpertPiece> {
        self.pieces.iter().find(|p| p.role == role)
    }

    /// First byte of an expert's record in the experts file.
    pub fn record_offset(&self, expert: u32) -> u64 {
        self.offset + u64::from(expert) * self.stride
    }
}
