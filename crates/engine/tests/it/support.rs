//! Fixtures and small readers.

use serde_json::Value;
use snowmelt_backend_cpu::{Activations, CpuBackend, CpuOptions};
use snowmelt_engine::pack::{PackOptions, pack};
use snowmelt_weights::{Bytes, Checkpoint, Encoding};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Families with fixtures in the repository.
pub(crate) const FAMILIES: [&str; 5] =
    ["qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5", "gpt_oss"];

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// `fixtures/oracle/FAMILY`.
pub(crate) fn fixture(family: &str) -> PathBuf {
    root().join("fixtures/oracle").join(family)
}

/// A model folder with the config under one of its two spellings.
pub(crate) fn with_spelling(family: &str, config: &str) -> tempfile::TempDir {
    let (from, to) = (fixture(family), tempfile::tempdir().unwrap());
    fs::copy(from.join("model.safetensors"), to.path().join("model.safetensors")).unwrap();
    fs::copy(from.join(config), to.path().join("config.json")).unwrap();
    to
}

pub(crate) fn open(family: &str) -> Checkpoint {
    Checkpoint::open(&fixture(family)).unwrap()
}

pub(crate) fn cpu(threads: usize, activations: Activations) -> CpuBackend {
    CpuBackend::new(CpuOptions { threads, activations, ..CpuOptions::default() }).unwrap()
}

/// A reference case: prompt, greedy continuation, and the logits rows that are kept.
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) prompt: Vec<u32>,
    pub(crate) greedy: Vec<u32>,
    pub(crate) robust: bool,
    pub(crate) tolerance: f32,
    /// Row index, logits.
    pub(crate) rows: Vec<(usize, Vec<f32>)>,
}

fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().unwrap().iter();
    ids.map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
}

pub(crate) fn cases(folder: &Path) -> Vec<Case> {
    let json: Value =
        serde_json::from_slice(&fs::read(folder.join("cases.json")).unwrap()).unwrap();
    let tensors = tensors(&folder.join("logits.safetensors"));
    let tolerance = json["tolerance"]["f32_max_abs"].as_f64().unwrap() as f32;
    let case = |case: &Value| {
        let name = case["name"].as_str().unwrap().to_owned();
        let (_, logits) = &tensors[&name];
        let (_, rows) = &tensors[&format!("{name}.rows")];
        let n_vocab = logits.len() / 4 / (rows.len() / 4);
        let values: Vec<f32> =
            logits.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        let index = |b: &[u8]| u32::from_le_bytes(b.try_into().unwrap()) as usize;
        let rows = rows.chunks_exact(4).map(index);
        let rows = rows.zip(values.chunks_exact(n_vocab)).map(|(i, row)| (i, row.to_vec()));
        Case {
            prompt: ids(&case["prompt"]),
            greedy: ids(&case["greedy"]),
            robust: case["robust"].as_bool().unwrap(),
            tolerance,
            rows: rows.collect(),
            name,
        }
    };
    json["cases"].as_array().unwrap().iter().map(case).collect()
}

/// Shape and bytes of each tensor of a safetensors file.
pub(crate) fn tensors(path: &Path) -> BTreeMap<String, (Vec<usize>, Vec<u8>)> {
    let bytes = fs::read(path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let json: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let number = |value: &Value| usize::try_from(value.as_u64().unwrap()).unwrap();
    let entries = json.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__");
    let tensor = |(name, info): (&String, &Value)| {
        let shape = info["shape"].as_array().unwrap().iter().map(number).collect();
        let [from, to] = [0, 1].map(|i| 8 + header + number(&info["data_offsets"][i]));
        (name.clone(), (shape, bytes[from..to].to_vec()))
    };
    entries.map(tensor).collect()
}

/// `checkpoint` packed into a temporary folder, and opened.
pub(crate) fn packed_from(
    checkpoint: &Checkpoint,
    experts: Option<Encoding>,
    trunk: Option<Encoding>,
) -> (tempfile::TempDir, Checkpoint) {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("packed");
    let options = PackOptions { experts, trunk };
    pack(checkpoint, &to, options, &mut |_, _| true).unwrap().unwrap();
    let packed = Checkpoint::open(&to).unwrap();
    (folder, packed)
}

/// The packed container `folder/packed`, held in memory.
pub(crate) fn in_memory(folder: &Path) -> Checkpoint {
    let files: Vec<(String, Bytes)> = fs::read_dir(folder.join("packed"))
        .unwrap()
        .map(|entry| {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            (name, Bytes::Shared(fs::read(path).unwrap().into()))
        })
        .collect();
    let files: Vec<(&str, Bytes)> =
        files.iter().map(|(name, bytes)| (name.as_str(), bytes.clone())).collect();
    Checkpoint::from_memory("in memory", &files).unwrap()
}

/// The fixture with biases of q, k, v and o in every layer (`widths`: of q, of k and v, of o):
/// zeros, but in one layer `(layer, v, o)`.
pub(crate) fn with_biases(
    family: &str,
    layers: usize,
    widths: [usize; 3],
    (at, v, o): (usize, &[f32], &[f32]),
) -> tempfile::TempDir {
    let folder = with_spelling(family, "config.json");
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["attention_bias"] = true.into();
    fs::write(path, config.to_string()).unwrap();
    let path = folder.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
    let mut data = bytes[8 + len..].to_vec();
    for layer in 0..layers {
        for (part, width) in ["q", "k", "v", "o"].into_iter().zip([0, 1, 1, 2].map(|i| widths[i])) {
            let zeros = vec![0.0; width];
            let values = match part {
                "v" if layer == at => v,
                "o" if layer == at => o,
                _ => &zeros,
            };
            let from = data.len();
            data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            header[format!("model.layers.{layer}.self_attn.{part}_proj.bias")] = serde_json::json!({
                "dtype": "F32", "shape": [width], "data_offsets": [from, data.len()],
            });
        }
    }
    let mut text = header.to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let file = [&(text.len() as u64).to_le_bytes()[..], &text, &data].concat();
    fs::write(&path, file).unwrap();
    folder
}
