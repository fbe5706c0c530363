//! Where the routed experts of a layer lie, whatever the layout of the checkpoint.

use crate::config::{Result, refuse};
use crate::error::ModelError;
use crate::loader::require;
use crate::stored::Stored;
use snowmelt_backend::{ExpertLayout, Glu, MatrixLayout, Order, Scales};
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

/// How tensors that hold all experts of a layer hold gate and up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fused {
    /// `gate_up_proj [E, 2I, H]`, all gate rows first, and `down_proj [E, H, I]`.
    #[default]
    Halves,
    /// In turns, with biases `gate_up_proj_bias [E, 2I]` and `down_proj_bias [E, H]`. Floats are
    /// transposed, `gate_up_proj [E, H, 2I]` and `down_proj [E, I, H]`; `mxfp4` is not:
    /// `gate_up_proj_blocks [E, 2I, H/32, 16]`, `gate_up_proj_scales [E, 2I, H/32]`, so too down.
    Turns,
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
    /// The form of fused tensors.
    pub fused: Fused,
}

impl ExpertShape {
    /// Role, rows and columns of the matrices.
    fn matrices(&self) -> [(&'static str, usize, usize); 3] {
        let (d, f) = (self.d_model, self.d_expert);
        [("gate", f, d), ("up", f, d), ("down", d, f)]
    }
}

/// Takes note of tensors that were asked for.
type Used<'a> = &'a mut dyn FnMut(&str);

/// Finds the experts under `prefix` (`…layers.3.mlp.experts`): one tensor a projection of each
/// expert, or fused ones.
pub(crate) fn locate(
    checkpoint: &Checkpoint,
    shape: &ExpertShape,
    prefix: &str,
    used: Used<'_>,
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
    if shape.fused == Fused::Turns {
        return from_turns(checkpoint, shape, prefix, used);
    }
    let fused = format!("{prefix}.gate_up_proj");
    if checkpoint.tensor(&fused).is_some() {
        from_halves(checkpoint, shape, prefix, used)
    } else {
        from_separate(checkpoint, shape, prefix, used)
    }
}

/// Records being put together from byte ranges of tensors.
struct Draft {
    shape: ExpertShape,
    /// Of each expert.
    spans: Vec<Vec<Span>>,
    end: usize,
}

impl Draft {
    fn new(shape: &ExpertShape) -> Self {
        Self { shape: *shape, spans: vec![Vec::new(); shape.n_experts], end: 0 }
    }

    /// Adds a tensor's range `(tensor, offset in it, bytes)` of each expert, all of equal length;
    /// returns where it lies in the record.
    fn add<'a>(&mut self, of: impl Fn(usize) -> (&'a TensorInfo, u64, u64)) -> usize {
        let start = self.end.next_multiple_of(PIECE_ALIGN);
        for (expert, spans) in self.spans.iter_mut().enumerate() {
            let (info, offset, len) = of(expert);
            let (file, offset, record_offset) = (info.file, info.offset + offset, start as u64);
            self.end = start + len as usize;
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
        start
    }

    /// Adds each expert's equal share of a tensor that holds all of them.
    fn add_share(&mut self, info: &TensorInfo) -> usize {
        let len = info.len / self.shape.n_experts as u64;
        self.add(|expert| (info, expert as u64 * len, len))
    }

    /// Scales that lie apart, if any.
    fn add_scales(&mut self, stored: &Stored<'_>) -> Scales {
        match stored.scales {
            Some((info, encoding)) => Scales::Blocks { offset: self.add_share(info), encoding },
            None => Scales::Inline,
        }
    }

    fn finish(
        self,
        [gate, up, down]: [MatrixLayout; 3],
        biases: Option<[MatrixLayout; 3]>,
    ) -> ExpertTable {
        let layout = ExpertLayout { glu: self.shape.glu, gate, up, down, biases };
        let record_bytes = layout.record_bytes();
        assert_eq!(record_bytes, self.end, "a layout reaches to the end of its record");
        ExpertTable { layer: self.shape.layer, layout, record_bytes, spans: self.spans }
    }
}

fn from_separate(
    checkpoint: &Checkpoint,
    shape: &ExpertShape,
    prefix: &str,
    used: Used<'_>,
) -> Result<ExpertTable> {
    let mut found: Vec<[Stored<'_>; 3]> = Vec::with_capacity(shape.n_experts);
    for expert in 0..shape.n_experts {
        let mut one = Vec::with_capacity(3);
        for (i, (role, d_out, d_in)) in shape.matrices().into_iter().enumerate() {
            let name = format!("{prefix}.{expert}.{role}_proj.weight");
            let stored = Stored::find(checkpoint, &name, &[d_out, d_in])?;
            stored.names().for_each(&mut *used);
            if let Some(first) = found.first() {
                same_encoding(&name, &stored, &first[i])?;
            }
            one.push(stored);
        }
        found.push([one[0], one[1], one[2]]);
    }
    let mut draft = Draft::new(shape);
    let mut matrices: Vec<MatrixLayout> = Vec::with_capacity(3);
    for (i, (_, d_out, d_in)) in shape.matrices().into_iter().enumerate() {
        let offset = draft.add(|expert| (found[expert][i].info, 0, found[expert][i].info.len));
        matrices.push(MatrixLayout::plain(found[0][i].encoding, d_out, d_in, offset));
    }
    for (i, matrix) in matrices.iter_mut().enumerate() {
        if let Some((_, encoding)) = found[0][i].scales {
            let of = |expert: usize| found[expert][i].scales.expect("as expert 0").0;
            let offset = draft.add(|expert| (of(expert), 0, of(expert).len));
            matrix.scales = Scales::Blocks { offset, encoding };
        }
    }
    Ok(draft.finish([matrices[0], matrices[1], matrices[2]], None))
}

/// The same piece of every expert is stored alike.
fn same_encoding(name: &str, found: &Stored<'_>, first: &Stored<'_>) -> Result<()> {
    let scales = |stored: &Stored<'_>| stored.scales.map(|(_, encoding)| encoding);
    let text = |stored: &Stored<'_>| match scales(stored) {
        Some(scales) => format!("{} with {scales} scales", stored.encoding),
        None => stored.encoding.to_string(),
    };
    if (found.encoding, scales(found)) == (first.encoding, scales(first)) {
        return Ok(());
    }
    let (found, expected) = (text(found), text(first));
    Err(ModelError::MixedExperts { tensor: name.to_owned(), found, expected })
}

fn from_halves(
    checkpoint: &Checkpoint,
    shape: &ExpertShape,
    prefix: &str,
    used: Used<'_>,
) -> Result<ExpertTable> {
    let (e, d, f) = (shape.n_experts, shape.d_model, shape.d_expert);
    let [gate_up_name, down_name] = ["gate_up_proj", "down_proj"].map(|n| format!("{prefix}.{n}"));
    let gate_up = Stored::find(checkpoint, &gate_up_name, &[e, 2 * f, d])?;
    let down = Stored::find(checkpoint, &down_name, &[e, d, f])?;
    gate_up.names().chain(down.names()).for_each(used);
    let mut draft = Draft::new(shape);
    let plain = MatrixLayout::plain;
    let [gate, up] = if gate_up.scales.is_some() {
        // The halves share blocks, and so they share a region.
        let gate = plain(gate_up.encoding, f, d, draft.add_share(gate_up.info));
        [gate, MatrixLayout { order: Order::Strided { first: f, step: 1 }, ..gate }]
    } else {
        let half = gate_up.info.len / (2 * e as u64);
        [0, 1].map(|i| {
            let offset = draft.add(|expert| (gate_up.info, (2 * expert as u64 + i) * half, half));
            plain(gate_up.encoding, f, d, offset)
        })
    };
    let matrix = plain(down.encoding, d, f, draft.add_share(down.info));
    let scales = draft.add_scales(&gate_up);
    let [gate, up] = [gate, up].map(|half| MatrixLayout { scales, ..half });
    let down = MatrixLayout { scales: draft.add_scales(&down), ..matrix };
    Ok(draft.finish([gate, up, down], None))
}

/// The first and the second of two matrices whose rows lie in turns.
fn in_turns(first: MatrixLayout) -> [MatrixLayout; 2] {
    [0, 1].map(|at| {
        let order = match first.order {
            Order::Transposed { step, width, .. } => Order::Transposed { first: at, step, width },
            _ => Order::Strided { first: at, step: 2 },
        };
        MatrixLayout { order, ..first }
    })
}

fn from_turns(
    checkpoint: &Checkpoint,
    shape: &ExpertShape,
    prefix: &str,
    used: Used<'_>,
) -> Result<ExpertTable> {
    let (e, d, f) = (shape.n_experts, shape.d_model, shape.d_expert);
    let name = |part: &str| format!("{prefix}.{part}");
    let mut draft = Draft::new(shape);
    let is_mxfp4 = checkpoint.tensor(&name("gate_up_proj_blocks")).is_some();
    let mut matrix = |part: &str, step: usize, d_out: usize, d_in: usize| {
        if is_mxfp4 {
            return exponents_apart(checkpoint, &mut draft, &name(part), [d_out, d_in], used);
        }
        let name = name(part);
        let (info, encoding) = require(checkpoint, &name, &[e, d_in, d_out])?;
        used(&name);
        let order = Order::Transposed { first: 0, step, width: d_out };
        let plain = MatrixLayout::plain(encoding, d_out, d_in, draft.add_share(info));
        Ok(MatrixLayout { order, ..plain })
    };
    let gate_up = MatrixLayout { d_out: f, ..matrix("gate_up_proj", 2, 2 * f, d)? };
    let down = matrix("down_proj", 1, d, f)?;
    let mut bias = |part: &str, len: usize| -> Result<MatrixLayout> {
        let name = name(part);
        let (info, encoding) = require(checkpoint, &name, &[e, len])?;
        used(&name);
        Ok(MatrixLayout::plain(encoding, len, 1, draft.add_share(info)))
    };
    let gate_up_bias = MatrixLayout { d_out: f, ..bias("gate_up_proj_bias", 2 * f)? };
    let down_bias = bias("down_proj_bias", d)?;
    let [gate, up] = in_turns(gate_up);
    let [gate_bias, up_bias] = in_turns(gate_up_bias);
    Ok(draft.finish([gate, up, down], Some([gate_bias, up_bias, down_bias])))
}

/// `mxfp4` as it is published: codes in one tensor of bytes, exponents in another.
fn exponents_apart(
    checkpoint: &Checkpoint,
    draft: &mut Draft,
    name: &str,
    [d_out, d_in]: [usize; 2],
    used: Used<'_>,
) -> Result<MatrixLayout> {
    let encoding = Encoding::Mxfp4;
    let group = encoding.group();
    if !encoding.divides(d_in) {
        let field = if name.ends_with("down_proj") { "intermediate_size" } else { "hidden_size" };
        return refuse(field, d_in, format!("a multiple of {group} for {encoding} experts"));
    }
    let (e, blocks) = (draft.shape.n_experts, d_in / group);
    let [codes, exponents] = ["blocks", "scales"].map(|part| format!("{name}_{part}"));
    let info = checkpoint.require_dtype(&codes, &[e, d_out, blocks, group / 2], "U8")?;
    let offset = draft.add_share(info);
    let info = checkpoint.require_dtype(&exponents, &[e, d_out, blocks], "U8")?;
    let scales = Scales::Exponents { offset: draft.add_share(info) };
    used(&codes);
    used(&exponents);
    Ok(MatrixLayout { scales, ..MatrixLayout::plain(encoding, d_out, d_in, offset) })
}

/// Names of the pieces with biases in a packed container, in the order of the matrices.
pub const BIAS_ROLES: [&str; 3] = ["gate_bias", "up_bias", "down_bias"];

fn from_packed(layer: &ExpertLayer, shape: &ExpertShape, file: u32) -> Result<ExpertTable> {
    let wrong = |found: String, expected: String| ModelError::PackedExperts {
        layer: layer.layer,
        found,
        expected,
    };
    if layer.n_experts as usize != shape.n_experts {
        return Err(wrong(
            format!("{} experts", layer.n_experts),
            format!("{} experts", shape.n_experts),
        ));
    }
    let find = |role: &str, d_out: usize, d_in: usize| {
        let piece = layer.pieces.iter().find(|piece| piece.role == role);
        let Some(piece) = piece.filter(|piece| (piece.d_out, piece.d_in) == (d_out, d_in)) else {
            let found = match piece {
                Some(piece) => format!("piece `{role}` [{}, {}]", piece.d_out, piece.d_in),
                None => format!("no piece `{role}`"),
            };
            return Err(wrong(found, format!("piece `{role}` [{d_out}, {d_in}]")));
        };
        Ok(MatrixLayout::plain(piece.encoding, d_out, d_in, piece.offset as usize))
    };
    let [gate, up, down] = shape.matrices().map(|(role, d_out, d_in)| find(role, d_out, d_in));
    let (gate, up, down) = (gate?, up?, down?);
    let biases = match shape.fused {
        Fused::Halves => None,
        Fused::Turns => {
            let rows = shape.matrices().map(|(_, d_out, _)| d_out);
            let [a, b, c] = [0, 1, 2].map(|i| find(BIAS_ROLES[i], rows[i], 1));
            Some([a?, b?, c?])
        }
    };
    let layout = ExpertLayout { glu: shape.glu, gate, up, down, biases };
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
