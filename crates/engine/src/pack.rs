//! Re-laying a checkpoint into a packed container, with or without quantising it.

use crate::error::{EngineError, Result};
use crate::experts::piece_places;
use serde_json::json;
use snowmelt_model::{Census, ExpertTable, ModelOptions, RowTable, TrunkTensor, Use};
use snowmelt_weights::{
    Checkpoint, Encoding, PackPlan, Packer, PlannedLayer, PlannedPiece, PlannedTensor,
};
use std::ops::Range;
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
    /// Tensors outside the trunk, which were left behind.
    pub skipped: Vec<String>,
    /// Bytes of weights written.
    pub bytes: u64,
}

/// Writes `source` to the new folder `destination`. `progress(done, total)` counts bytes and may
/// end the work by returning false; what is there then is continued by the next call.
///
/// Memory: one expert record and one chunk of rows, whatever the size of the source.
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
    let census = snowmelt_model::census(source, ModelOptions::default())?;
    let mut kept = Vec::new();
    let plan = plan(source, &census, options, &mut kept)?;
    let mut checked = |done, total| {
        progress(done, total);
    };
    let mut packer = Packer::create_or_resume_with(destination, plan, &mut checked)?;
    while let Some(next) = packer.next_tensor() {
        write_tensor(source, &mut packer, &next)?;
        if !progress(packer.bytes_done(), packer.bytes_total()) {
            return Ok(None);
        }
    }
    let mut rows = Rows::default();
    let mut record = Vec::new();
    while let Some((layer, expert)) = packer.next_record() {
        let table = census.experts.iter().find(|table| table.layer == layer);
        let table = table.expect("planned from the census");
        read_record(source, &packer, table, expert, &mut rows, &mut record)?;
        packer.write_record(layer, expert, &record)?;
        if !progress(packer.bytes_done(), packer.bytes_total()) {
            return Ok(None);
        }
    }
    let bytes = packer.bytes_total();
    packer.finish()?;
    Ok(Some(Packed { kept, skipped: census.skipped, bytes }))
}

/// What a tensor is stored as: `wanted`, unless that loses what the file has or does not divide.
fn target(
    name: &str,
    stored: Encoding,
    d_in: usize,
    wanted: Option<Encoding>,
    kept: &mut Vec<String>,
) -> Encoding {
    match wanted {
        None => stored,
        Some(Encoding::Bf16) if stored == Encoding::F32 => stored,
        Some(wanted) if wanted.divides(d_in) => wanted,
        Some(_) => {
            kept.push(name.to_owned());
            stored
        }
    }
}

fn plan(
    source: &Checkpoint,
    census: &Census,
    options: PackOptions,
    kept: &mut Vec<String>,
) -> Result<PackPlan> {
    let trunk = |tensor: &TrunkTensor| {
        let d_in = tensor.shape.last().copied().unwrap_or(1);
        let wanted = options.trunk.filter(|_| tensor.usage == Use::Projection);
        PlannedTensor {
            name: tensor.name.clone(),
            shape: tensor.shape.clone(),
            encoding: target(&tensor.name, tensor.encoding, d_in, wanted, kept),
        }
    };
    let mut trunk: Vec<PlannedTensor> = census.trunk.iter().map(trunk).collect();
    trunk.extend(census.tables.iter().flat_map(table_shards));
    let layer = |table: &ExpertTable| {
        let pieces = ["gate", "up", "down"].into_iter().zip(table.layout.pieces());
        let piece = |(role, matrix): (&str, &snowmelt_backend::MatrixLayout)| {
            let name = format!("layer {} experts, {role}", table.layer);
            let (d_out, d_in) = (matrix.d_out, matrix.d_in);
            let encoding = target(&name, matrix.encoding, d_in, options.experts, kept);
            PlannedPiece { role: role.to_owned(), encoding, d_out, d_in }
        };
        PlannedLayer {
            layer: table.layer,
            n_experts: table.spans.len() as u32,
            pieces: pieces.map(piece).collect(),
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
        kept: kept.clone(),
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

/// Buffers of a row conversion, kept for their memory.
#[derive(Default)]
struct Rows {
    stored: Vec<u8>,
    values: Vec<f32>,
}

/// Where encoded rows lie.
struct Source<'a> {
    checkpoint: &'a Checkpoint,
    name: &'a str,
    file: u32,
    offset: u64,
    encoding: Encoding,
    d_in: usize,
}

impl Rows {
    /// Fills `out` with rows `range` of `source`, in `encoding`.
    fn convert(
        &mut self,
        source: &Source<'_>,
        range: Range<usize>,
        encoding: Encoding,
        out: &mut [u8],
    ) -> Result<()> {
        let &Source { checkpoint, file, offset, d_in, .. } = source;
        let stored_bytes = source.encoding.row_bytes(d_in);
        let offset = offset + (range.start * stored_bytes) as u64;
        if encoding == source.encoding {
            return Ok(checkpoint.read(file, offset, out)?);
        }
        self.stored.resize(range.len() * stored_bytes, 0);
        self.values.resize(d_in, 0.0);
        checkpoint.read(file, offset, &mut self.stored)?;
        let rows = out.chunks_exact_mut(encoding.row_bytes(d_in));
        for (i, (stored, out)) in self.stored.chunks_exact(stored_bytes).zip(rows).enumerate() {
            source.encoding.decode_row(stored, &mut self.values);
            encoding.try_encode_row(source.name, range.start + i, &self.values, out)?;
        }
        Ok(())
    }
}

fn write_tensor(source: &Checkpoint, packer: &mut Packer, next: &PlannedTensor) -> Result<()> {
    let info = source.tensor(&next.name).expect("planned from the census");
    let from = Source {
        checkpoint: source,
        name: &next.name,
        file: info.file,
        offset: info.offset,
        encoding: info.encoding.expect("the census refuses unknown types"),
        d_in: info.d_in(),
    };
    let mut rows = Rows::default();
    packer.write_tensor::<EngineError, _>(&next.name, |range, out| {
        rows.convert(&from, range, next.encoding, out)
    })
}

/// Rows converted at a time.
const ROWS_AT_ONCE: usize = 64;

fn read_record(
    source: &Checkpoint,
    packer: &Packer,
    table: &ExpertTable,
    expert: u32,
    rows: &mut Rows,
    record: &mut Vec<u8>,
) -> Result<()> {
    let layer = packer.expert_layers().iter().find(|layer| layer.layer == table.layer);
    let layer = layer.expect("planned from the census");
    record.clear();
    record.resize(layer.record_bytes as usize, 0);
    let places = piece_places(table).nth(expert as usize).expect("the packer counts experts");
    for ((piece, matrix), place) in layer.pieces.iter().zip(table.layout.pieces()).zip(places) {
        let (file, offset, _) = place;
        let name = format!("layer {} expert {expert} {}", table.layer, piece.role);
        let from = Source {
            checkpoint: source,
            name: &name,
            file,
            offset,
            encoding: matrix.encoding,
            d_in: matrix.d_in,
        };
        let row_bytes = piece.encoding.row_bytes(piece.d_in);
        let out = &mut record[piece.offset as usize..][..piece.d_out * row_bytes];
        for (i, out) in out.chunks_mut(ROWS_AT_ONCE * row_bytes).enumerate() {
            let first = i * ROWS_AT_ONCE;
            let range = first..first + out.len() / row_bytes;
            rows.convert(&from, range, piece.encoding, out)?;
        }
    }
    Ok(())
}
