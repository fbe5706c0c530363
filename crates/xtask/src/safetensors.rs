//! Reading and writing small safetensors files, whole in memory.

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// One tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tensor {
    /// `F32`, `U32`, …
    pub(crate) dtype: String,
    /// Slowest dimension first.
    pub(crate) shape: Vec<usize>,
    /// Little-endian elements.
    pub(crate) bytes: Vec<u8>,
}

/// Tensors by name.
pub(crate) type Tensors = BTreeMap<String, Tensor>;

/// The header's length comes first, in this many bytes.
const LENGTH_BYTES: usize = 8;

pub(crate) fn parse(file: &[u8]) -> Result<Tensors> {
    let (length, rest) = file.split_first_chunk::<LENGTH_BYTES>().context("no header")?;
    let length = usize::try_from(u64::from_le_bytes(*length))?;
    let (header, data) = rest.split_at_checked(length).context("the header is cut off")?;
    let header: Map<String, Value> = serde_json::from_slice(header)?;
    let mut tensors = Tensors::new();
    for (name, entry) in header.iter().filter(|(name, _)| *name != "__metadata__") {
        let number = |value: &Value| value.as_u64().map(|value| value as usize);
        let numbers = |key: &str| -> Option<Vec<usize>> {
            entry[key].as_array()?.iter().map(number).collect()
        };
        let shape = numbers("shape").with_context(|| format!("`{name}` has no shape"))?;
        let range = numbers("data_offsets").with_context(|| format!("`{name}` has no offsets"))?;
        ensure!(range.len() == 2, "`{name}` has {} offsets", range.len());
        let bytes = data.get(range[0]..range[1]);
        let bytes = bytes.with_context(|| format!("`{name}` lies past the end of the file"))?;
        let dtype = entry["dtype"].as_str().with_context(|| format!("`{name}` has no dtype"))?;
        let tensor = Tensor { dtype: dtype.to_owned(), shape, bytes: bytes.to_owned() };
        tensors.insert(name.clone(), tensor);
    }
    Ok(tensors)
}

/// The file of these tensors, in the order of their names.
pub(crate) fn to_bytes(tensors: &Tensors) -> Vec<u8> {
    let mut header = Map::new();
    let mut end = 0;
    for (name, Tensor { dtype, shape, bytes }) in tensors {
        let range = [end, end + bytes.len()];
        end = range[1];
        let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": range });
        header.insert(name.clone(), entry);
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(LENGTH_BYTES), b' ');
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.append(&mut header);
    for tensor in tensors.values() {
        file.extend_from_slice(&tensor.bytes);
    }
    file
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Tensors {
        let tensor = |dtype: &str, shape: &[usize], bytes: &[u8]| Tensor {
            dtype: dtype.to_owned(),
            shape: shape.to_owned(),
            bytes: bytes.to_owned(),
        };
        let a = tensor("F32", &[1, 2], &[0, 1, 2, 3, 4, 5, 6, 7]);
        Tensors::from([("a".into(), a), ("b".into(), tensor("U32", &[1], &[9, 0, 0, 0]))])
    }

    #[test]
    fn what_is_written_is_read() {
        let file = to_bytes(&example());
        assert_eq!(parse(&file).expect("ours"), example());
        assert_eq!((file.len() - 12) % LENGTH_BYTES, 0, "data begins aligned");
    }

    #[test]
    fn a_file_cut_short_is_refused() {
        let file = to_bytes(&example());
        for len in [0, 7, 20, file.len() - 1] {
            assert!(parse(&file[..len]).is_err(), "{len} bytes");
        }
    }
}
