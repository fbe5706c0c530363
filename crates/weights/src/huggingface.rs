//! Folders as Hugging Face publishes them: one safetensors file, or shards with an index.

use std::collections::HashMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, Visitor};

use crate::bytes::{Buffers, DataFile, Folder, is_plain_name};
use crate::error::WeightsError;
use crate::safetensors::read_header;
use crate::tensor::TensorInfo;

pub(crate) const SINGLE: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// Files in JSON are never longer than this.
pub(crate) const JSON_LIMIT: u64 = 100_000_000;

/// Files and tensors of a folder; the tensors are in no particular order.
pub(crate) fn open(
    folder: &Folder,
    buffers: &Buffers,
) -> Result<(Vec<DataFile>, Vec<TensorInfo>), WeightsError> {
    // In this order, as transformers looks for them.
    if let Some(file) = folder.open(SINGLE)? {
        let tensors = read_header(&file, 0, buffers)?;
        return Ok((vec![file], tensors));
    }
    let index_file = folder.require(INDEX)?;
    let text = index_file.read_all(JSON_LIMIT, buffers)?;
    let path = &index_file.path;
    let index: Index = serde_json::from_slice(&text).map_err(|e| WeightsError::json(path, &e))?;
    let names = shard_names(&index, &index_file)?;

    let mut files = Vec::with_capacity(names.len());
    let mut tensors = Vec::new();
    for (number, (shard, tensor)) in names.iter().enumerate() {
        let Some(file) = folder.open(shard)? else {
            return Err(WeightsError::ShardMissing {
                index: path.clone(),
                tensor: (*tensor).to_owned(),
                shard: (*shard).to_owned(),
            });
        };
        tensors.extend(read_header(&file, number as u32, buffers)?);
        files.push(file);
    }
    check_index(&index, &index_file, &files, &tensors)?;
    Ok((files, tensors))
}

/// The shards in the order of their names, each with one of its tensors.
fn shard_names<'a>(
    index: &'a Index,
    file: &DataFile,
) -> Result<Vec<(&'a str, &'a str)>, WeightsError> {
    let mut names = Vec::with_capacity(index.weight_map.0.len());
    for (tensor, shard) in &index.weight_map.0 {
        if !is_plain_name(shard) {
            return Err(WeightsError::ShardName {
                index: file.path.clone(),
                tensor: tensor.clone(),
                shard: shard.clone(),
            });
        }
        names.push((shard.as_str(), tensor.as_str()));
    }
    names.sort_unstable();
    names.dedup_by_key(|(shard, _)| *shard);
    Ok(names)
}

/// Every tensor of the index is in its shard, and no name is in two shards. Tensors that the
/// index does not list are kept: transformers loads them too.
fn check_index(
    index: &Index,
    file: &DataFile,
    files: &[DataFile],
    tensors: &[TensorInfo],
) -> Result<(), WeightsError> {
    let mut places = HashMap::with_capacity(tensors.len());
    for tensor in tensors {
        if let Some(first) = places.insert(tensor.name.as_str(), tensor.file) {
            return Err(WeightsError::DuplicateTensor {
                tensor: tensor.name.clone(),
                first: files[first as usize].path.clone(),
                second: files[tensor.file as usize].path.clone(),
            });
        }
    }
    for (tensor, shard) in &index.weight_map.0 {
        let place = places.get(tensor.as_str()).map(|file| &files[*file as usize].path);
        let found = place.and_then(|path| path.file_name()).map(|name| name.to_string_lossy());
        if found.as_deref() != Some(shard.as_str()) {
            return Err(WeightsError::ShardContent {
                index: file.path.clone(),
                tensor: tensor.clone(),
                expected: shard.clone(),
                found: found.map(std::borrow::Cow::into_owned),
            });
        }
    }
    Ok(())
}

#[derive(Deserialize)]
struct Index {
    weight_map: WeightMap,
}

/// Tensor → shard, each tensor once.
struct WeightMap(Vec<(String, String)>);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = WeightMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of file names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                pairs.sort_unstable();
                if let Some(twice) = pairs.windows(2).find(|p| p[0].0 == p[1].0) {
                    let name = &twice[0].0;
                    return Err(A::Error::custom(format!("tensor `{name}` occurs twice")));
                }
                Ok(WeightMap(pairs))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}
