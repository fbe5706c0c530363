//! The safetensors header: eight bytes of length, JSON, data.
//!
//! **Source.** huggingface/safetensors `README.md`, section "Format": names are unique, offsets
//! count from the end of the header, and the data section is covered without holes or overlaps.

use std::fmt;
use std::path::Path;

use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, Visitor};

use crate::bytes::{Buffers, DataFile};
use crate::encoding::Encoding;
use crate::error::WeightsError;
use crate::tensor::TensorInfo;

/// The reference implementation's limit.
pub(crate) const HEADER_LIMIT: u64 = 100_000_000;

/// One tensor as the header has it.
#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// A header, names checked for being unique.
struct Header(Vec<(String, Entry)>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Names;
        impl<'de> Visitor<'de> for Names {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut entries = Vec::new();
                let mut metadata = false;
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        if std::mem::replace(&mut metadata, true) {
                            return Err(A::Error::custom("`__metadata__` occurs twice"));
                        }
                        map.next_value::<StringMap>()
                            .map_err(|e| A::Error::custom(format!("`__metadata__`: {e}")))?;
                        continue;
                    }
                    let entry = map
                        .next_value()
                        .map_err(|e| A::Error::custom(format!("tensor `{name}`: {e}")))?;
                    entries.push((name, entry));
                }
                Ok(Header(entries))
            }
        }
        deserializer.deserialize_map(Names)
    }
}

/// `__metadata__`: strings only, of which nothing is kept.
struct StringMap;

impl<'de> Deserialize<'de> for StringMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Strings;
        impl<'de> Visitor<'de> for Strings {
            type Value = StringMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of strings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<StringMap, A::Error> {
                while map.next_entry::<String, String>()?.is_some() {}
                Ok(StringMap)
            }
        }
        deserializer.deserialize_map(Strings)
    }
}

/// Bits of one value of a type, for all types of the format.
fn bits(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "F64" | "I64" | "U64" | "C64" => 64,
        "F32" | "I32" | "U32" => 32,
        "F16" | "BF16" | "I16" | "U16" => 16,
        "F8_E4M3" | "F8_E5M2" | "F8_E8M0" | "F8_E4M3FNUZ" | "F8_E5M2FNUZ" | "I8" | "U8"
        | "BOOL" => 8,
        "F6_E2M3" | "F6_E3M2" => 6,
        "F4" => 4,
        _ => return None,
    })
}

/// The types that we compute with.
fn encoding(dtype: &str) -> Option<Encoding> {
    match dtype {
        "F32" => Some(Encoding::F32),
        "F16" => Some(Encoding::F16),
        "BF16" => Some(Encoding::Bf16),
        _ => None,
    }
}

/// Reads and checks the header of a shard; the tensors come sorted by offset.
pub(crate) fn read_header(
    file: &DataFile,
    index: u32,
    buffers: &Buffers,
) -> Result<Vec<TensorInfo>, WeightsError> {
    let path = &file.path;
    if file.len < 8 {
        return Err(WeightsError::NoHeader { path: path.clone(), got: file.len });
    }
    let mut length = [0; 8];
    file.read(0, &mut length, buffers)?;
    let header_bytes = u64::from_le_bytes(length);
    let limit = (file.len - 8).min(HEADER_LIMIT);
    if header_bytes > limit {
        let hint = if length.starts_with(b"version ") {
            "\nhint: this is a Git LFS pointer, fetch the file itself with `git lfs pull`"
        } else {
            "\nhint: the file is truncated or not in the safetensors format"
        };
        return Err(WeightsError::HeaderLength {
            path: path.clone(),
            limit,
            got: header_bytes,
            hint,
        });
    }
    let mut text = vec![0; header_bytes as usize];
    file.read(8, &mut text, buffers)?;
    parse_header(&text, path, index, file.len)
}

/// Checks a header against the length of its file.
fn parse_header(
    text: &[u8],
    path: &Path,
    index: u32,
    file_bytes: u64,
) -> Result<Vec<TensorInfo>, WeightsError> {
    let Header(entries) =
        serde_json::from_slice(text).map_err(|e| WeightsError::header(path, &e))?;
    let start = 8 + text.len() as u64;
    let limit = file_bytes - start;
    let mut tensors = Vec::with_capacity(entries.len());
    for (name, entry) in entries {
        tensors.push(checked_tensor(name, entry, path, index, limit)?);
    }
    check_coverage(&mut tensors, path, limit)?;
    check_names(&tensors, path)?;
    for tensor in &mut tensors {
        tensor.offset += start;
    }
    Ok(tensors)
}

fn checked_tensor(
    name: String,
    entry: Entry,
    path: &Path,
    index: u32,
    limit: u64,
) -> Result<TensorInfo, WeightsError> {
    let (start, end) = entry.data_offsets;
    if start > end || end > limit {
        let hint = if start <= end { "\nhint: the file is truncated" } else { "" };
        let path = path.to_owned();
        return Err(WeightsError::Extent { path, tensor: name, start, end, limit, hint });
    }
    let encoding = encoding(&entry.dtype);
    let Some(shape) = checked_shape(&entry.shape, encoding.is_some()) else {
        let path = path.to_owned();
        return Err(WeightsError::Shape { path, tensor: name, shape: entry.shape });
    };
    if let Some(bits) = bits(&entry.dtype) {
        let values = shape.iter().map(|d| *d as u64).product::<u64>();
        let wanted = u128::from(values) * u128::from(bits);
        if wanted != u128::from(end - start) * 8 {
            return Err(WeightsError::TensorBytes {
                path: path.to_owned(),
                tensor: name,
                dtype: entry.dtype,
                shape,
                wanted: u64::try_from(wanted.div_ceil(8)).unwrap_or(u64::MAX),
                got: end - start,
            });
        }
    }
    Ok(TensorInfo {
        name,
        dtype: entry.dtype,
        encoding,
        shape,
        file: index,
        offset: start,
        len: end - start,
    })
}

/// The shape as addresses, if every product of dimensions fits and, for types that we use, no
/// dimension is zero.
fn checked_shape(shape: &[u64], used: bool) -> Option<Vec<usize>> {
    let mut product = 1usize;
    let mut checked = Vec::with_capacity(shape.len());
    for dim in shape {
        let dim = usize::try_from(*dim).ok()?;
        if dim == 0 && used {
            return None;
        }
        // Zeros must not hide a product that wraps when only some dimensions are multiplied.
        product = product.checked_mul(dim.max(1))?;
        checked.push(dim);
    }
    Some(checked)
}

/// Sorts by offset and makes sure that the data section belongs to exactly one tensor each byte.
fn check_coverage(tensors: &mut [TensorInfo], path: &Path, limit: u64) -> Result<(), WeightsError> {
    tensors.sort_by(|a, b| (a.offset, a.len, &a.name).cmp(&(b.offset, b.len, &b.name)));
    let mut covered = 0;
    let mut previous: Option<&TensorInfo> = None;
    for tensor in tensors.iter() {
        if tensor.offset > covered {
            return Err(WeightsError::Unclaimed {
                path: path.to_owned(),
                start: covered,
                end: tensor.offset,
            });
        }
        if tensor.offset < covered {
            let other = previous.expect("only a tensor can have covered bytes");
            return Err(WeightsError::Overlap {
                path: path.to_owned(),
                tensor: tensor.name.clone(),
                start: tensor.offset,
                other: other.name.clone(),
                other_end: covered,
            });
        }
        covered = tensor.end();
        previous = Some(tensor);
    }
    if covered < limit {
        return Err(WeightsError::Unclaimed { path: path.to_owned(), start: covered, end: limit });
    }
    Ok(())
}

fn check_names(tensors: &[TensorInfo], path: &Path) -> Result<(), WeightsError> {
    let mut names: Vec<&str> = tensors.iter().map(|t| t.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(WeightsError::DuplicateTensor {
            tensor: pair[0].to_owned(),
            first: path.to_owned(),
            second: path.to_owned(),
        }),
        None => Ok(()),
    }
}
