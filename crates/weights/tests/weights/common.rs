//! A small safetensors writer, and helpers.

use std::path::Path;

use serde_json::{Map, Value, json};
use snowmelt_weights::{Bytes, Checkpoint, WeightsError};

pub(crate) const CONFIG: &str = r#"{"model_type": "tiny", "hidden_size": 32}"#;

/// Deterministic bytes.
pub(crate) fn noise(n: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..n).map(|_| next()).collect()
}

pub(crate) struct Tensor {
    pub(crate) name: &'static str,
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

pub(crate) fn tensor(name: &'static str, dtype: &'static str, shape: &[usize]) -> Tensor {
    let size = match dtype {
        "F32" | "I32" => 4,
        "BF16" | "F16" => 2,
        "I64" => 8,
        _ => 1,
    };
    let bytes = noise(shape.iter().product::<usize>() * size, name.len() as u64 + 7);
    Tensor { name, dtype, shape: shape.to_vec(), bytes }
}

/// A file from a header as text and data.
pub(crate) fn raw(header: &str, data: &[u8]) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    file
}

pub(crate) fn safetensors(tensors: &[Tensor]) -> Vec<u8> {
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut data = Vec::new();
    for t in tensors {
        let start = data.len();
        data.extend(&t.bytes);
        let entry =
            json!({"dtype": t.dtype, "shape": t.shape, "data_offsets": [start, data.len()]});
        header.insert(t.name.into(), entry);
    }
    // An odd length of the header makes all offsets unaligned.
    let mut text = Value::Object(header).to_string();
    while text.len() % 8 != 1 {
        text.push(' ');
    }
    raw(&text, &data)
}

pub(crate) fn open_memory(files: &[(&str, Vec<u8>)]) -> Result<Checkpoint, WeightsError> {
    let files: Vec<(&str, Bytes)> =
        files.iter().map(|(name, bytes)| (*name, Bytes::from(bytes.clone()))).collect();
    Checkpoint::from_memory("memory", &files)
}

/// Opens a model of one file, in memory.
pub(crate) fn open_single(file: Vec<u8>) -> Result<Checkpoint, WeightsError> {
    open_memory(&[("config.json", CONFIG.into()), ("model.safetensors", file)])
}

/// A folder where waiting for the disk costs nothing, if the machine has one.
pub(crate) fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

pub(crate) fn write(folder: &Path, name: &str, bytes: impl AsRef<[u8]>) {
    std::fs::write(folder.join(name), bytes).unwrap();
}

/// The message of an error, all of whose given parts must be in it.
#[track_caller]
pub(crate) fn expect_error<T: std::fmt::Debug>(result: Result<T, WeightsError>, parts: &[&str]) {
    let message = result.unwrap_err().to_string();
    for part in parts {
        assert!(message.contains(part), "no {part:?} in: {message}");
    }
    let first = message.chars().next().unwrap();
    assert!(!first.is_uppercase(), "{message}");
    assert!(!message.ends_with('.'), "{message}");
}
