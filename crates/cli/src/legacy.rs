//! Capture files as turbospark 0.3.0 writes them: a JSON header and f16 values beside it.

use crate::capture::What;
use crate::output::Ui;
use anyhow::{Context, Result, bail};
use half::f16;
use serde_json::Value;
use snowmelt_engine::{Capture, Captured};
use snowmelt_weights::Checkpoint;
use std::fmt::Write as _;
use std::path::Path;

/// The only family that has this format.
pub(crate) const FAMILY: &str = "qwen4_exp";

/// What is written into the header of a kind, and the values.
struct File {
    header: String,
    values: Vec<f32>,
}

/// Sizes from the config.
struct Sizes {
    d_model: usize,
    streams: usize,
    key_heads: usize,
    key_dim: usize,
    value_heads: usize,
    value_dim: usize,
}

impl Sizes {
    fn read(config: &Value) -> Result<Self> {
        let text = config.get("text_config").unwrap_or(config);
        let field = |name: &str| {
            let value = text.get(name).and_then(Value::as_u64);
            value.map(|value| value as usize).with_context(|| format!("`{name}` is missing"))
        };
        Ok(Self {
            d_model: field("hidden_size")?,
            streams: field("hc_count")?,
            key_heads: field("linear_num_key_heads")?,
            key_dim: field("linear_key_head_dim")?,
            value_heads: field("linear_num_value_heads")?,
            value_dim: field("linear_value_head_dim")?,
        })
    }

    fn wide(&self) -> usize {
        self.d_model * self.streams
    }
}

/// Layers where none were given.
const LAYERS: usize = 2;

/// Writes one kind into `folder`; `given`: whether the layers were asked for.
pub(crate) fn write(
    folder: &Path,
    what: What,
    checkpoint: &Checkpoint,
    (capture, given): (&Capture, bool),
    ui: Ui,
) -> Result<()> {
    let sizes = Sizes::read(checkpoint.config())?;
    let position = capture.options().position.unwrap_or(0);
    let data = format!("{}.f16", what.name());
    let file = match what {
        What::Layers => layers(&sizes, (capture, given), position, &data),
        What::Attention => attention(&sizes, capture, position, &data),
        What::Gdn => gdn(&sizes, capture, position, &data),
        What::Router => {
            ui.warn("no capture of router: `--format legacy` has none");
            return Ok(());
        }
    }?;
    let mut beyond = 0_usize;
    let mut bytes = Vec::with_capacity(2 * file.values.len());
    for value in &file.values {
        let half = f16::from_f32(*value);
        beyond += usize::from(half.is_infinite() && value.is_finite());
        bytes.extend(half.to_le_bytes());
    }
    if beyond > 0 {
        ui.warn(format_args!("{data}: {beyond} values lie beyond the range of f16"));
    }
    for (name, bytes) in [(data, bytes), (format!("{}.json", what.name()), file.header.into())] {
        let path = folder.join(name);
        std::fs::write(&path, bytes)
            .with_context(|| format!("could not write `{}`", path.display()))?;
        ui.note(format_args!("wrote {}", path.display()));
    }
    Ok(())
}

fn stage<'a>(capture: &'a Capture, layer: usize, name: &'static str) -> Result<&'a Captured> {
    match capture.taken().get(&(layer, name)) {
        Some(captured) => Ok(captured),
        None => bail!("layer {layer} has no `{name}`"),
    }
}

fn layers(
    sizes: &Sizes,
    (capture, given): (&Capture, bool),
    position: usize,
    data: &str,
) -> Result<File> {
    let mut range = capture.options().layers.clone();
    if !given {
        range.end = range.end.min(range.start + LAYERS);
    }
    let mut values = Vec::new();
    for name in ["layer.input", "layer.mixed", "layer.output"] {
        for layer in range.clone() {
            values.extend_from_slice(&stage(capture, layer, name)?.values);
        }
    }
    let header = format!(
        r#"{{
  "format": "qwen4_layer_boundary_capture_v1",
  "position": {position},
  "layers": {},
  "wide_dim": {},
  "dtype": "float16",
  "layout": "[stage][layer][wide_dim]",
  "stages": ["layer_input_after_ple", "after_attention_join", "after_moe_join"],
  "reference": "SlotStream current_backend_reference.py --kind layers",
  "data": "{data}"
}}
"#,
        range.len(),
        sizes.wide()
    );
    Ok(File { header, values })
}

fn sigmoid(x: f32) -> f32 {
    (1.0 / (1.0 + f64::from(-x).exp())) as f32
}

fn attention(sizes: &Sizes, capture: &Capture, position: usize, data: &str) -> Result<File> {
    let (layer, wide) = (capture.options().layers.start, sizes.wide());
    let inject = |x: &f32| 2.0 * sigmoid(x / sizes.streams as f32);
    let of = |name| stage(capture, layer, name).map(|captured| captured.values.clone());
    let stages = [
        ("hc_normed", of("hc.normed")?),
        ("hc_gate", of("hc.gate")?.iter().map(|x| sigmoid(*x)).collect()),
        ("hc_mixed", of("hc.mixed")?),
        ("branch_output", of("hc.branch")?),
        ("inject_gate", of("hc.inject")?.iter().map(inject).collect()),
        ("wide_after_join", of("hc.joined")?),
    ];
    let (mut values, mut listed) = (Vec::new(), String::new());
    for (index, (name, stage)) in stages.iter().enumerate() {
        let end = if index + 1 == stages.len() { "" } else { "," };
        let width = stage.len();
        let _ = writeln!(listed, r#"    {{"name": "{name}", "width": {width}}}{end}"#);
        values.extend_from_slice(stage);
        values.resize((index + 1) * wide, 0.0);
    }
    let header = format!(
        r#"{{
  "format": "qwen4_attention_intermediate_capture_v1",
  "layer": {layer},
  "position": {position},
  "wide_dim": {wide},
  "hidden_dim": {},
  "hc_count": {},
  "dtype": "float16",
  "layout": "[stage][wide_slot]",
  "stages": [
{listed}  ],
  "reference": "llama.cpp eval callback and SlotStream layer harness",
  "data": "{data}"
}}
"#,
        sizes.d_model, sizes.streams
    );
    Ok(File { header, values })
}

fn gdn(sizes: &Sizes, capture: &Capture, position: usize, data: &str) -> Result<File> {
    let taken = capture.taken().keys().find(|(_, name)| *name == "gdn.before");
    let (layer, _) = *taken.context("none of these layers is a linear one")?;
    let mut values = stage(capture, layer, "gdn.before")?.values.clone();
    values.extend_from_slice(&stage(capture, layer, "gdn.after")?.values);
    let Sizes { key_heads, key_dim, value_heads, value_dim, .. } = sizes;
    let header = format!(
        r#"{{
  "format": "qwen4_gdn_norm_capture_v1",
  "layer": {layer},
  "position": {position},
  "key_heads": {key_heads},
  "key_dim": {key_dim},
  "value_heads": {value_heads},
  "value_dim": {value_dim},
  "qkv_width": {},
  "dtype": "float16",
  "layout": "[before:q,k,v][after:q,k,v]",
  "reference_epsilon": 1e-6,
  "mean_space_epsilon": {:.9e},
  "data": "{data}"
}}
"#,
        2 * key_heads * key_dim + value_heads * value_dim,
        1e-6_f32 / *key_dim as f32
    );
    Ok(File { header, values })
}
