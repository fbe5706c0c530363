//! `snowmelt plan --config`: what a model weighs, from its config alone.

use crate::output;
use crate::size::Bytes as Size;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use snowmelt_model::Outline;
use snowmelt_weights::{Bytes, Checkpoint};
use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;

/// Bytes of one value of the KV cache: bf16.
const KV_BYTES: u64 = 2;

/// Prints the outline of a `config.json` at so many bits a weight.
pub(crate) fn run(config: &Path, bits: f64, is_json: bool) -> Result<ExitCode> {
    ensure!(
        bits.is_finite() && bits > 0.0 && bits <= 64.0,
        "`--bits {bits}` is out of range: expected a number above 0 and at most 64"
    );
    let name = config.display().to_string();
    let bytes = std::fs::read(config).with_context(|| format!("could not read `{name}`"))?;
    // No weights: a header without tensors.
    let header = b"{}      ";
    let weights = [&(header.len() as u64).to_le_bytes()[..], header].concat();
    let files = [
        ("config.json", Bytes::Shared(bytes.into())),
        ("model.safetensors", Bytes::Shared(weights.into())),
    ];
    let checkpoint = Checkpoint::from_memory(&name, &files)?;
    let outline = snowmelt_model::outline(&checkpoint)?;
    if is_json {
        output::json(&report(&outline, bits))?;
    } else {
        output::data(&describe(&outline, bits))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn bytes(values: u64, bits: f64) -> u64 {
    (values as f64 * bits / 8.0).round() as u64
}

/// Bytes of a token in window layers, and of their whole windows.
fn windows(outline: &Outline) -> [u64; 2] {
    let a_token = outline.windows.iter().map(|(width, _)| KV_BYTES * width).sum();
    let fixed = outline.windows.iter().map(|(width, tokens)| KV_BYTES * width * tokens).sum();
    [a_token, fixed]
}

fn report(outline: &Outline, bits: f64) -> Value {
    let [window, fixed] = windows(outline);
    let experts = outline.n_experts();
    json!({
        "family": outline.family,
        "bits": bits,
        "params": outline.total(),
        "active_params": outline.touched(),
        "total_bytes": bytes(outline.total(), bits),
        "trunk_bytes": bytes(outline.trunk, bits),
        "table_bytes": bytes(outline.table, bits),
        "experts": experts,
        "expert_bytes": outline.experts.first().map_or(0, |layer| bytes(layer.values, bits)),
        "experts_bytes": bytes(outline.expert_values(), bits),
        "touched_bytes": bytes(outline.touched(), bits),
        "touched_expert_bytes": bytes(outline.chosen_values(), bits),
        "kv_bytes_per_token": KV_BYTES * outline.per_token,
        "kv_window_bytes_per_token": window,
        "kv_window_fixed_bytes": fixed,
        "state_bytes": 4 * outline.per_sequence,
        "context_max": outline.context_max,
    })
}

fn describe(outline: &Outline, bits: f64) -> String {
    let size = |values| Size(bytes(values, bits)).to_string();
    let [_, fixed] = windows(outline);
    let billions = |values: u64| format!("{:.2} B", values as f64 / 1e9);
    let experts = match outline.experts.first() {
        Some(layer) => format!(
            "{} ({} of {})",
            size(outline.expert_values()),
            outline.n_experts(),
            size(layer.values)
        ),
        None => "none".to_owned(),
    };
    let mut rows = vec![
        ("family", outline.family.to_owned()),
        (
            "parameters",
            format!("{}, {} a token", billions(outline.total()), billions(outline.touched())),
        ),
        ("at bits a weight", bits.to_string()),
        ("total", size(outline.total())),
        ("trunk", size(outline.trunk)),
    ];
    if outline.table > 0 {
        rows.push(("lookup table", size(outline.table)));
    }
    rows.push(("experts", experts));
    rows.push(("read a token", size(outline.touched())));
    rows.push(("of it experts", size(outline.chosen_values())));
    rows.push(("KV a token (bf16)", Size(KV_BYTES * outline.per_token).to_string()));
    if fixed > 0 {
        rows.push(("KV of windows", format!("{}, fixed", Size(fixed))));
    }
    if outline.per_sequence > 0 {
        rows.push(("recurrent state", Size(4 * outline.per_sequence).to_string()));
    }
    rows.push(("longest context", format!("{} tokens", outline.context_max)));
    let mut text = String::new();
    for (name, value) in rows {
        let _ = writeln!(text, "{name:18}{value}");
    }
    text
}
