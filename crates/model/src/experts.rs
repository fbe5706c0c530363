//! Where the routed experts of a layer lie, whatever the layout of the checkpoint.

use crate::config::Result;
use crate::error::ModelError;
use crate::loader::require;
use snowmelt_backend::{ExpertLayout, Glu, MatrixLayout};
use snowmelt_weights::{Checkpoint, Encoding, ExpertLayer, TensorInfo};

/// Pieces of a record start at multiples of this.
const PIECE_ALIGN: usize = 64;

/// A byte range of one file of the checkpoint that belongs at `record_offset` of the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Index into [`Checkpoint::files`].
    pub file: u32,
    /// Byte offset in the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Byte offset in the record.
    pub record_offset: u64,
}

/// The experts of one layer.
#[derive(Clone, Debug)]
pub struct ExpertTable {
    /// Layer index.
    pub layer: u32,
    /// What the bytes of a record mean.
    pub layout: ExpertLayout,
    /// Bytes of one record as it lies in a slot.
    pub record_bytes: usize,
    /// `[n_experts][spans]`
    pub spans: Vec<Vec<Span>>,
}

/// What a family says of the experts of a layer.
#[derive(Clone, Copy, Debug)]
pub struct ExpertShape {
    /// Layer index.
    pub layer: u32,
    /// Experts.
    pub n_experts: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Inner width.
    pub d_expert: usize,
    /// The nonlinearity.
    pub glu: Glu,
}

/// Finds the experts under `prefix` (`…layers.3.mlp.experts`): one tensor a projection of each
/// expert, or two fused ones.
pub(crate) fn locate(
    checkpoint: &Checkpoint,
    shape: &ExpertShape,
    prefix: &str,
    used: &mut dyn FnMut(&str),
) -> Result<ExpertTable> {
    if let Some(packed) = checkpoint.packed() {
        let found = packed.expert_layers().iter().find(|layer| layer.layer == shape.layer);
        let layer = found.ok_or_else(|| ModelError::PackedExperts {
            layer: shape.layer,
            found: "no experts".into(),
            expected: format!("{} experts", shape.n_experts),
        })?;
        return from_packed(layer, shape, packed.experts_file());
    }
    let fused = format!("{prefix}.gate_up_proj");
    if checkpoint.tensor(&fused).is_some() {
        from_fused(checkpoint, shape, prefix, used)
    } else {
        from_separate(checkpoint, shape, prefix, used)
    }
}

/// A matrix found in the checkpoint: rows of a tensor.
#[derive(Clone, Copy)]
struct Found {
    encoding: Encoding,
    file: u32,
    offset: u64,
    len: u64,
}

fn rows_of(info: &TensorInfo, encoding: Encoding, first: usize, rows: usize) -> Found {
    let row_bytes = encoding.row_bytes(info.d_in()) as u64;
    let offset = info.offset + first as u64 * row_bytes;
    Found { encoding, file: info.file, offset, len: rows as u64 * row_bytes }
}

/// Gate, up and down in record order.
fn layout(shape: &ExpertShape, encodings: [Encoding; 3]) -> ExpertLayout {
    let (d, f) = (shape.d_model, shape.d_expert);
    let dims = [(f, d), (f, d), (d, f)];
    let mut next = 0;
    let mut place = |i: usize| {
        let (d_out, d_in) = dims[i];
        let matrix = MatrixLayout { encoding: encodings[i], d_out, d_in, offset: next };
        next = (next + matrix.bytes()).next_multiple_of(PIECE_ALIGN);
        matrix
    };
    ExpertLayout { glu: shape.glu, gate: place(0), up: place(1), down: place(2) }
}

fn table(shape: &ExpertShape, found: &[[Found; 3]]) -> ExpertTable {
    let layout = layout(shape, found[0].map(|matrix| matrix.encoding));
    let spans = |expert: &[Found; 3]| {
        let mut spans: Vec<Span> = Vec::with_capacity(3);
        for (matrix, piece) in expert.iter().zip(layout.pieces()) {
            let &Found { file, offset, len, .. } = matrix;
            let record_offset = piece.offset as u64;
            // Neighbours in both file and record are one read.
            match spans.last_mut() {
                Some(last)
                    if last.file == file
                        && last.offset + last.len == offset
                        && last.record_offset + last.len == record_offset =>
                {
                    last.len += len;
                }
                _ => spans.push(Span { file, offset, len, record_offset }),
            }
        }
        spans
    };
    ExpertTable {
        layer: shape.layer,
        layout,
        record_bytes: layout.record_bytes(),
        spans: found.iter().map(spans).collect(),
    }
}

fn from_separate(
    checkpoint: &Checkpoint,
    shape: &ExpertShape,
    prefix: &str,
    used: &mut dyn FnMut(&str),
) -> Result<ExpertTable> {
    let (d, f) = (shape.d_model, shape.d_expert);
    let pieces = [("gate_proj", f, d), ("up_proj", f, d), ("down_proj", d, f)];
    let mut found: Vec<[Found; 3]> = Vec::with_capacity(shape.n_experts);
    for expert in 0..shape.n_experts {
        let mut one = Vec::with_capacity(3);
        for (i, (role, d_out, d_in)) in pieces.into_iter().enumerate() {
            let name = format!("{prefix}.{expert}.{role}.weight");
            let (info, encoding) = require(checkpoint, &name, &[d_out, d_in])?;
            used(&name);
            if let Some(first) = found.first()
                && first[i].encoding != encoding
            {
                return Err(ModelError::MixedExperts {
                    tensor: name,
                    found: encoding.to_string(),
                    expected: first[i].encoding.to_string(),
                });
            }
            one.push(rows_of(info, encoding, 0, d_out));
        }
        found.push([one[0], one[1], one[2]]);
    }
    Ok(table(shape, &found))
}

fn from_fused(
    checkpoint: &Checkpoint,
    shape: &ExpertShape,
    prefix: &str,
    used: &mut dyn FnMut(&str),
) -> Result<ExpertTable> {
    let (e, d, f) = (shape.n_experts, shape.d_model, shape.d_expert);
    let [gate_up_name, down_name] = ["gate_up_proj", "down_proj"].map(|n| format!("{prefix}.{n}"));
    let (gate_up, gate_up_encoding) = require(checkpoint, &gate_up_name, &[e, 2 * f, d])?;
    let (down, down_encoding) = require(checkpoint, &down_name, &[e, d, f])?;
    used(&gate_up_name);
    used(&down_name);
    let one = |i: usize| {
        [
            rows_of(gate_up, gate_up_encoding, i * 2 * f, f),
            rows_of(gate_up, gate_up_encoding, i * 2 * f + f, f),
            rows_of(down, down_encoding, i * d, d),
        ]
    };
    Ok(table(shape, &(0..e).map(one).collect::<Vec<_>>()))
}

fn from_packed(layer: &ExpertLayer, shape: &ExpertShape, file: u32) -> Result<ExpertTable> {
    let wrong = |found: String, expected: String| {
        Err(ModelError::PackedExperts { layer: layer.layer, found, expected })
    };
    if layer.n_experts as usize != shape.n_experts {
        return wrong(
            format!("{} experts", layer.n_experts),
            format!("{} experts", shape.n_experts),
        );
    }
    let (d, f) = (shape.d_model, shape.d_expert);
    let mut matrices = Vec::with_capacity(3);
    for (role, d_out, d_in) in [("gate", f, d), ("up", f, d), ("down", d, f)] {
        let piece = layer.pieces.iter().find(|piece| piece.role == role);
        let Some(piece) = piece.filter(|piece| (piece.d_out, piece.d_in) == (d_out, d_in)) else {
            let found = match piece {
                Some(piece) => format!("piece `{role}` [{}, {}]", piece.d_out, piece.d_in),
                None => format!("no piece `{role}`"),
            };
            return wrong(found, format!("piece `{role}` [{d_out}, {d_in}]"));
        };
        let offset = piece.offset as usize;
        matrices.push(MatrixLayout { encoding: piece.encoding, d_out, d_in, offset });
    }
    let [gate, up, down] = [matrices[0], matrices[1], matrices[2]];
    let layout = ExpertLayout { glu: shape.glu, gate, up, down };
    // Whole blocks, so that a direct read lands in the slot without a copy.
    let span = |expert: u64| {
        let offset = layer.offset + expert * layer.stride;
        vec![Span { file, offset, len: layer.stride, record_offset: 0 }]
    };
    Ok(ExpertTable {
        layer: layer.layer,
        layout,
        record_bytes: layer.stride as usize,
        spans: (0..u64::from(layer.n_experts)).map(span).collect(),
    })
}

/// The layout of a record of this shape in other encodings, for packing.
pub(crate) fn packed_layout(shape: &ExpertShape, encodings: [Encoding; 3]) -> ExpertLayout {
    layout(shape, encodings)
}
