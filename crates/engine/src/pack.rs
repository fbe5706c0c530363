//! Re-laying a checkpoint into a packed container, with or without quantising it.

use crate::error::{EngineError, Result};
use serde_json::json;
use snowmelt_backend::{MatrixBytes, MatrixLayout};
use snowmelt_model::{BIAS_ROLES, Census, ExpertTable, ModelOptions, RowTable, TrunkTensor, Use};
use snowmelt_weights::{
    Checkpoint, Encoding, PackPlan, Packer, PlannedLayer, PlannedPiece, PlannedTensor,
};
use std::path::Path;

/// Files that travel with a model.
const SIDECARS: [&str; 4] =
    ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"];

/// Encodings asked for; `None` keeps what is stored.
#[derive(Clone, Copy, Debug, Default)]
pub struct PackOptions {
    /// For routed experts.
    pub experts: Option<Encoding>,
    /// For the large matrices of the trunk; norms, routers, gates and convolutions stay as stored.
    pub trunk: Option<Encoding>,
}

/// What [`pack`] did.
#[derive(Clone, Debug)]
pub struct Packed {
    /// Tensors kept as stored because the group does not divide their rows.
    pub kept: Vec<String>,
    /// Tensors that were quantised already and are rounded a second time.
    pub requantised: Vec<String>,
    /// Tensors outside the trunk, which were left behind.
    pub skipped: Vec<String>,
    /// Bytes of weights written.
    pub bytes: u64,
}

/// Writes `source` to the new folder `destination`. `progress(done, total)` counts bytes and may
/// end the work by returning false; what is there then is continued by the next call.
///
/// Memory: one expert record as stored, one as packed, and one chunk of rows, whatever the size of
/// the source.
///
/// # Errors
/// When the source is refused or cannot be read, a weight is not finite, the destination exists,
/// or the disk is full. The work can be continued after each.
pub fn pack(
    source: &Checkpoint,
    destination: &Path,
    options: PackOptions,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<Option<Packed>> {
    let asked = [options.experts, options.trunk].into_iter().flatten();
    if let Some(encoding) = asked.into_iter().find(|encoding| !encoding.can_encode()) {
        return Err(EngineError::NotMade { encoding });
    }
    let census = snowmelt_model::census(source, ModelOptions::default())?;
    let mut notes = Notes::default();
    let plan = plan(source, &census, options, &mut notes)?;
    let mut checked = |done, total| {
        progress(done, total);
    };
    let mut packer = Packer::create_or_resume_with(destination, plan, &mut checked)?;
    while let Some(next) = packer.next_tensor() {
        match census.trunk.iter().find(|tensor| tensor.name == next.name) {
            Some(tensor) => write_tensor(source, &mut packer, tensor, &next)?,
            None => write_shard(source, &mut packer, &next)?,
        }
        if !progress(packer.bytes_done(), packer.bytes_total()) {
            return Ok(None);
        }
    }
    let mut record = Record::default();
    while let Some((layer, expert)) = packer.next_record() {
        let table = census.experts.iter().find(|table| table.layer == layer);
        let table = table.expect("planned from the census");
        record.read(source, table, expert)?;
        record.convert(&packer, table, expert)?;
        packer.write_record(layer, expert, &record.packed)?;
        if !progress(packer.bytes_done(), packer.bytes_total()) {
            return Ok(None);
        }
    }
    let bytes = packer.bytes_total();
    packer.finish()?;
    let Notes { kept, requantised } = notes;
    Ok(Some(Packed { kept, requantised, skipped: census.skipped, bytes }))
}

/// Names that [`Packed`] lists.
#[derive(Default)]
struct Notes {
    kept: Vec<String>,
    requantised: Vec<String>,
}

/// What a tensor is stored as: `wanted`, unless that loses what the file has or does not divide.
fn target(
    name: &str,
    stored: Encoding,
    d_in: usize,
    wanted: Option<Encoding>,
    notes: &mut Notes,
) -> Encoding {
    match wanted {
        None => stored,
        Some(Encoding::Bf16) if stored == Encoding::F32 => stored,
        Some(wanted) if wanted.divides(d_in) => {
            let is_lossy = stored.is_quantised() || !stored.can_encode();
            if is_lossy && wanted != stored {
                notes.requantised.push(name.to_owned());
            }
            wanted
        }
        Some(_) => {
            notes.kept.push(name.to_owned());
            stored
        }
    }
}

/// The pieces of a packed record, in order.
fn roles(table: &ExpertTable) -> impl Iterator<Item = (&'static str, &MatrixLayout)> {
    let roles = ["gate", "up", "down"].into_iter().chain(BIAS_ROLES);
    roles.zip(table.layout.all_pieces())
}

fn plan(
    source: &Checkpoint,
    census: &Census,
    options: PackOptions,
    notes: &mut Notes,
) -> Result<PackPlan> {
    let trunk = |tensor: &TrunkTensor| {
        let d_in = tensor.shape.last().copied().unwrap_or(1);
        let wanted = options.trunk.filter(|_| tensor.usage == Use::Projection);
        PlannedTensor {
            name: tensor.name.clone(),
            shape: tensor.shape.clone(),
            encoding: target(&tensor.name, tensor.encoding, d_in, wanted, notes),
        }
    };
    let mut trunk: Vec<PlannedTensor> = census.trunk.iter().map(trunk).collect();
    trunk.extend(census.tables.iter().flat_map(table_shards));
    let layer = |table: &ExpertTable| {
        let piece = |(role, matrix): (&'static str, &MatrixLayout)| {
            let name = format!("layer {} experts, {role}", table.layer);
            let (d_out, d_in) = (matrix.d_out, matrix.d_in);
            // Biases are small, and stay exact.
            let wanted = options.experts.filter(|_| !BIAS_ROLES.contains(&role));
            let encoding = target(&name, matrix.encoding, d_in, wanted, notes);
            PlannedPiece { role: role.to_owned(), encoding, d_out, d_in }
        };
        PlannedLayer {
            layer: table.layer,
            n_experts: table.spans.len() as u32,
            pieces: roles(table).map(piece).collect(),
        }
    };
    let layers = census.experts.iter().map(layer).collect();
    let mut sidecars = Vec::new();
    for name in SIDECARS {
        if let Some(bytes) = source.sidecar(name)? {
            sidecars.push((name.to_owned(), bytes));
        }
    }
    Ok(PackPlan {
        family: census.family.to_owned(),
        config: source.config().clone(),
        trunk,
        layers,
        sidecars,
        provenance: provenance(source, options)?,
        kept: notes.kept.clone(),
    })
}

/// Tables that stay on disk are stored as they are, each shard with its digest.
fn table_shards(table: &RowTable) -> impl Iterator<Item = PlannedTensor> + '_ {
    table.shards.iter().map(|shard| PlannedTensor {
        name: shard.name.clone(),
        shape: vec![shard.rows as usize, table.width],
        encoding: table.encoding,
    })
}

/// Names, sizes and digests of what the weights come from; no path, no time, so that equal sources
/// give equal containers.
fn provenance(source: &Checkpoint, options: PackOptions) -> Result<serde_json::Value> {
    let mut files = Vec::new();
    for (index, file) in source.files().iter().enumerate() {
        // The header of a safetensors file, or the beginning of a section.
        let mut head = vec![0; file.len.min(8) as usize];
        source.read(index as u32, 0, &mut head)?;
        let header = head.as_slice().try_into().map_or(0, u64::from_le_bytes);
        let mut head = vec![0; header.saturating_add(8).min(file.len).min(1 << 20) as usize];
        source.read(index as u32, 0, &mut head)?;
        files.push(json!({
            "name": file.path.file_name().map(|name| name.to_string_lossy().into_owned()),
            "bytes": file.len,
            "head_blake3": blake3::hash(&head).to_hex().as_str(),
        }));
    }
    let name = |encoding: Option<Encoding>| encoding.map_or("as stored", Encoding::name);
    Ok(json!({
        "packed_by": concat!("snowmelt ", env!("CARGO_PKG_VERSION")),
        "experts": name(options.experts),
        "trunk": name(options.trunk),
        "files": files,
    }))
}

fn write_tensor(
    source: &Checkpoint,
    packer: &mut Packer,
    tensor: &TrunkTensor,
    next: &PlannedTensor,
) -> Result<()> {
    let d_in = tensor.shape.last().copied().unwrap_or(1);
    let (mut stored, mut values) = (Vec::new(), vec![0.0; d_in]);
    packer.write_tensor::<EngineError, _>(&next.name, |range, out| {
        if next.encoding == tensor.encoding {
            return Ok(tensor.read_rows(source, range, out)?);
        }
        let stored_bytes = tensor.encoding.row_bytes(d_in);
        stored.resize(range.len() * stored_bytes, 0);
        tensor.read_rows(source, range.clone(), &mut stored)?;
        let rows = out.chunks_exact_mut(next.encoding.row_bytes(d_in));
        for ((row, stored), out) in range.zip(stored.chunks_exact(stored_bytes)).zip(rows) {
            tensor.encoding.decode_row(stored, &mut values);
            next.encoding.try_encode_row(&next.name, row, &values, out)?;
        }
        Ok(())
    })
}

/// A shard of a table that stays on disk, as it is.
fn write_shard(source: &Checkpoint, packer: &mut Packer, next: &PlannedTensor) -> Result<()> {
    let info = source.tensor(&next.name).expect("planned from the census");
    let row_bytes = next.encoding.row_bytes(info.d_in());
    packer.write_tensor::<EngineError, _>(&next.name, |range, out| {
        let offset = info.offset + (range.start * row_bytes) as u64;
        Ok(source.read(info.file, offset, out)?)
    })
}

/// Rows converted at a time.
const ROWS_AT_ONCE: usize = 64;

/// An expert's record, before and after; kept for its memory.
#[derive(Default)]
struct Record {
    stored: Vec<u8>,
    values: Vec<f32>,
    packed: Vec<u8>,
}

impl Record {
    /// Reads the record as stored.
    fn read(&mut self, source: &Checkpoint, table: &ExpertTable, expert: u32) -> Result<()> {
        self.stored.clear();
        self.stored.resize(table.record_bytes, 0);
        for span in &table.spans[expert as usize] {
            let to = &mut self.stored[span.record_offset as usize..][..span.len as usize];
            source.read(span.file, span.offset, to)?;
        }
        Ok(())
    }

    /// Makes the packed record from the stored one.
    fn convert(&mut self, packer: &Packer, table: &ExpertTable, expert: u32) -> Result<()> {
        let layer = packer.expert_layers().iter().find(|layer| layer.layer == table.layer);
        let layer = layer.expect("planned from the census");
        let Self { stored, values, packed } = self;
        packed.clear();
        packed.resize(layer.record_bytes as usize, 0);
        for (piece, matrix) in layer.pieces.iter().zip(table.layout.all_pieces()) {
            let [rows, scales] = matrix.regions().map(|region| &stored[region]);
            let bytes = MatrixBytes { rows, scales };
            let row_bytes = piece.encoding.row_bytes(piece.d_in);
            let out = &mut packed[piece.offset as usize..][..piece.d_out * row_bytes];
            if piece.encoding == matrix.encoding {
                matrix.copy_rows(bytes, 0..piece.d_out, out);
                continue;
            }
            let name = format!("layer {} expert {expert} {}", table.layer, piece.role);
            for (i, out) in out.chunks_mut(ROWS_AT_ONCE * row_bytes).enumerate() {
                let first = i * ROWS_AT_ONCE;
                let range = first..first + out.len() / row_bytes;
                values.resize(range.len() * piece.d_in, 0.0);
                matrix.decode_rows(bytes, range.clone(), values);
                let values = values.chunks_exact(piece.d_in);
                for ((row, values), out) in range.zip(values).zip(out.chunks_exact_mut(row_bytes)) {
                    piece.encoding.try_encode_row(&name, row, values, out)?;
                }
            }
        }
        Ok(())
    }
}
