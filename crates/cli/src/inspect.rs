//! `snowmelt inspect`: what a model is, from its headers.

use crate::model::{self, ModelArg};
use crate::output::{self, Ui};
use crate::size::{Bytes, count};
use anyhow::Result;
use clap::Args;
use serde_json::{Value, json};
use snowmelt_model::{Census, ExpertTable, ModelOptions, MtpHead, RowTable, TrunkTensor};
use snowmelt_weights::{Checkpoint, CheckpointKind};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::ExitCode;

/// Show what a model is and needs, from its headers alone
#[derive(Debug, Args)]
#[command(override_usage = "snowmelt inspect [OPTIONS] MODEL")]
pub(crate) struct InspectArgs {
    #[command(flatten)]
    model: ModelArg,
    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    json: bool,
}

/// Names of skipped tensors shown without `-v`.
const SHOWN: usize = 5;

pub(crate) fn run(args: &InspectArgs, ui: Ui) -> Result<ExitCode> {
    let name = args.model.get()?;
    let checkpoint = model::open(name, ui)?;
    let facts = Facts::new(name, &checkpoint)?;
    if args.json {
        output::json(&facts.json())?;
    } else {
        output::data(&facts.text(ui.is_verbose()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// What there is to say.
struct Facts<'a> {
    name: &'a str,
    format: &'static str,
    census: Census,
    trunk_parameters: u64,
    expert_parameters: u64,
    active_parameters: u64,
    files_bytes: u64,
}

/// Values of one expert.
fn expert_values(table: &ExpertTable) -> u64 {
    table.layout.pieces().iter().map(|piece| (piece.d_out * piece.d_in) as u64).sum()
}

/// Parameters of a model, all and those that a token uses (of the embedding, one row).
pub(crate) fn parameters(census: &Census) -> (u64, u64, u64) {
    let values = |tensor: &TrunkTensor| tensor.shape.iter().product::<usize>() as u64;
    let trunk: u64 = census.trunk.iter().map(values).sum();
    let all = census.experts.iter().map(|t| expert_values(t) * t.spans.len() as u64).sum();
    let top_k = census.limits.top_k as u64;
    let used: u64 = census.experts.iter().map(|table| expert_values(table) * top_k).sum();
    let embedding = census.trunk.iter().find(|tensor| tensor.name.ends_with("embed_tokens.weight"));
    let idle = match (embedding, census.embedding_bytes) {
        (Some(tensor), 1..) => {
            values(tensor) / (census.n_vocab.max(1) as u64) * (census.n_vocab as u64 - 1)
        }
        _ => 0,
    };
    let of_tables = |table: &RowTable| (table.rows_a_token * table.width) as u64;
    let rows: u64 = census.tables.iter().map(of_tables).sum();
    (trunk, all, trunk - idle + used + rows)
}

/// Values of the tables that stay on disk.
fn table_values(census: &Census) -> u64 {
    census.tables.iter().map(|table| table.rows() * table.width as u64).sum()
}

fn mtp_json(head: &MtpHead) -> Value {
    json!({
        "name": head.name,
        "tensors": head.tensors,
        "bytes": head.bytes,
        "missing": head.missing,
    })
}

impl<'a> Facts<'a> {
    fn new(name: &'a str, checkpoint: &Checkpoint) -> Result<Self> {
        let census = snowmelt_model::census(checkpoint, ModelOptions::default())?;
        let (trunk_parameters, expert_parameters, active_parameters) = parameters(&census);
        Ok(Self {
            name,
            format: match checkpoint.kind() {
                CheckpointKind::HuggingFace => "safetensors",
                CheckpointKind::Packed => "packed container",
            },
            trunk_parameters,
            expert_parameters,
            active_parameters,
            files_bytes: checkpoint.files().iter().map(|file| file.len).sum(),
            census,
        })
    }

    /// Bytes of the trunk by encoding.
    fn trunk_encodings(&self) -> BTreeMap<&'static str, u64> {
        let mut bytes = BTreeMap::new();
        for tensor in &self.census.trunk {
            let values: usize = tensor.shape.iter().product();
            let rows = values / tensor.shape.last().copied().unwrap_or(1).max(1);
            let row = tensor.encoding.row_bytes(tensor.shape.last().copied().unwrap_or(1));
            *bytes.entry(tensor.encoding.name()).or_default() += (rows * row) as u64;
        }
        bytes
    }

    fn expert_bytes(&self) -> u64 {
        let bytes = |table: &ExpertTable| (table.record_bytes * table.spans.len()) as u64;
        self.census.experts.iter().map(bytes).sum()
    }

    /// Names of the encodings in records, most layers have one.
    fn expert_encodings(&self) -> Vec<&'static str> {
        let tables = self.census.experts.iter();
        let pieces =
            tables.flat_map(|table| table.layout.pieces().map(|piece| piece.encoding.name()));
        let mut names: Vec<_> = pieces.collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    fn text(&self, all: bool) -> String {
        let census = &self.census;
        let mut text = String::new();
        let mut line = |what: &str, value: String| {
            let _ = writeln!(text, "{what:<16} {value}");
        };
        line("model", format!("{} ({})", self.name, self.format));
        line("family", census.family.to_owned());
        let total = self.trunk_parameters + self.expert_parameters + table_values(census);
        let active = self.active_parameters;
        line("parameters", format!("{}, {} used a token", count(total), count(active)));
        line("layers", census.n_layers.to_string());
        line("vocabulary", census.n_vocab.to_string());
        line("longest context", format!("{} tokens", census.context_max));
        line("weight files", Bytes(self.files_bytes).to_string());
        let encodings = self.trunk_encodings();
        let list: Vec<String> =
            encodings.iter().map(|(name, bytes)| format!("{} {name}", Bytes(*bytes))).collect();
        let trunk = Bytes(census.trunk_bytes() as u64);
        line("trunk", format!("{trunk} in memory ({})", list.join(", ")));
        if let Some(table) = census.experts.first() {
            let encodings = self.expert_encodings().join(", ");
            line("experts", format!("{} ({encodings})", Bytes(self.expert_bytes())));
            let (n, layers) = (census.n_experts_total(), census.experts.len());
            let top_k = census.limits.top_k;
            line("", format!("{n} in {layers} layers, {top_k} of {} a token", table.spans.len()));
            line("expert record", Bytes(table.record_bytes as u64).to_string());
            for (role, piece) in ["gate", "up", "down"].iter().zip(table.layout.pieces()) {
                let (rows, columns, encoding) = (piece.d_out, piece.d_in, piece.encoding);
                line("", format!("{role} {rows} x {columns} {encoding}"));
            }
        }
        for table in &census.tables {
            let (bytes, encoding) = (Bytes(table.bytes()), table.encoding);
            line("table on disk", format!("{bytes} ({encoding}), {}", table.name));
            let (rows, each, row) = (table.rows(), table.rows_a_token, table.row_bytes());
            line("", format!("{rows} rows of {row} bytes, {each} a token"));
        }
        line("read a token", Bytes(census.bytes_per_token() as u64).to_string());
        let elements = census.per_token_elements() as u64;
        let (single, half) = (Bytes(elements * 4), Bytes(elements * 2));
        line("context state", format!("{single} a token in f32, {half} in bf16"));
        let fixed = Bytes(census.per_sequence_elements() as u64 * 4);
        line("", format!("{fixed} a sequence"));
        for head in &census.mtp {
            let state = match head.missing.len() {
                0 => "complete".to_owned(),
                n => format!("{n} tensors missing, first `{}`", head.missing[0]),
            };
            let (tensors, bytes) = (head.tensors.len(), Bytes(head.bytes));
            line("MTP head", format!("{}: {tensors} tensors, {bytes}", head.name));
            line("", state);
        }
        let skipped = &census.skipped;
        line("skipped tensors", skipped.len().to_string());
        let shown = if all { skipped.len() } else { SHOWN };
        skipped.iter().take(shown).for_each(|name| line("", name.clone()));
        if skipped.len() > shown {
            line("", format!("and {} more (-v lists all)", skipped.len() - shown));
        }
        text
    }

    fn json(&self) -> Value {
        let census = &self.census;
        let record = census.experts.first().map(|table| {
            let pieces = ["gate", "up", "down"].iter().zip(table.layout.pieces());
            let pieces = pieces.map(|(role, piece)| {
                json!({
                    "role": role,
                    "rows": piece.d_out,
                    "columns": piece.d_in,
                    "encoding": piece.encoding.name(),
                    "offset": piece.offset,
                })
            });
            json!({ "bytes": table.record_bytes, "pieces": pieces.collect::<Vec<_>>() })
        });
        json!({
            "name": self.name,
            "format": self.format,
            "family": census.family,
            "parameters":
                self.trunk_parameters + self.expert_parameters + table_values(census),
            "active_parameters": self.active_parameters,
            "n_layers": census.n_layers,
            "n_vocab": census.n_vocab,
            "context_max": census.context_max,
            "files_bytes": self.files_bytes,
            "trunk": {
                "parameters": self.trunk_parameters,
                "memory_bytes": census.trunk_bytes(),
                "stored_bytes": self.trunk_encodings(),
            },
            "experts": {
                "parameters": self.expert_parameters,
                "bytes": self.expert_bytes(),
                "count": census.n_experts_total(),
                "layers": census.experts.len(),
                "top_k": census.limits.top_k,
                "encodings": self.expert_encodings(),
                "record": record,
            },
            "tables": census.tables.iter().map(table_json).collect::<Vec<_>>(),
            "bytes_per_token": census.bytes_per_token(),
            "state": {
                "per_token_bytes_f32": census.per_token_elements() * 4,
                "per_token_bytes_bf16": census.per_token_elements() * 2,
                "per_sequence_bytes": census.per_sequence_elements() * 4,
            },
            "mtp": census.mtp.iter().map(mtp_json).collect::<Vec<_>>(),
            "skipped": census.skipped,
        })
    }
}

fn table_json(table: &RowTable) -> Value {
    json!({
        "name": &*table.name,
        "bytes": table.bytes(),
        "encoding": table.encoding.name(),
        "rows": table.rows(),
        "row_bytes": table.row_bytes(),
        "rows_per_token": table.rows_a_token,
    })
}
