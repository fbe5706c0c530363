//! Files of named f32 tensors: captures and logits.

use anyhow::{Context, Result, anyhow, bail, ensure};
use half::f16;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// A tensor to be written.
pub(crate) struct Out<'a> {
    pub(crate) name: String,
    /// `F32`, or `U32` where the values are its bits.
    pub(crate) dtype: &'static str,
    /// Rows and columns.
    pub(crate) shape: [usize; 2],
    pub(crate) values: &'a [f32],
}

/// Writes a safetensors file under another name and renames it when it is complete.
pub(crate) fn write(path: &Path, tensors: &[Out<'_>]) -> Result<()> {
    let mut header = Map::new();
    let mut end = 0;
    for Out { name, dtype, shape, values } in tensors {
        let range = [end, end + 4 * values.len()];
        end = range[1];
        let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": range });
        header.insert(name.clone(), entry);
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let partial = path.with_extension(format!("{}.partial", std::process::id()));
    let written = File::create(&partial).and_then(|file| {
        let mut out = BufWriter::new(file);
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        for tensor in tensors {
            for value in tensor.values {
                out.write_all(&value.to_le_bytes())?;
            }
        }
        out.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all()?;
        std::fs::rename(&partial, path)
    });
    if written.is_err() {
        let _ = std::fs::remove_file(&partial);
    }
    written.with_context(|| format!("could not write `{}`", path.display()))
}

/// A tensor read back, as rows.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct In {
    pub(crate) rows: usize,
    pub(crate) width: usize,
    pub(crate) values: Vec<f32>,
}

/// Tensors of a safetensors file, of a `.f16` capture, or of all such files in a folder.
pub(crate) fn read(path: &Path) -> Result<BTreeMap<String, In>> {
    if !path.is_dir() {
        return read_file(path);
    }
    let folder = || format!("could not read the folder `{}`", path.display());
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir(path).with_context(folder)? {
        let file = entry.with_context(folder)?.path();
        let kind = file.extension().and_then(|kind| kind.to_str());
        if matches!(kind, Some("safetensors" | "f16")) {
            all.extend(read_file(&file)?);
        }
    }
    ensure!(!all.is_empty(), "`{}` holds no captures or logits", path.display());
    Ok(all)
}

fn read_file(path: &Path) -> Result<BTreeMap<String, In>> {
    let name = path.display();
    let bytes = std::fs::read(path).with_context(|| format!("could not read `{name}`"))?;
    if path.extension().is_some_and(|kind| kind == "f16") {
        let (halves, rest) = bytes.as_chunks::<2>();
        ensure!(rest.is_empty(), "`{name}` has an odd number of bytes, expected f16 values");
        let values: Vec<f32> = halves.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect();
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        return Ok(BTreeMap::from([(stem, In { rows: 1, width: values.len(), values })]));
    }
    let file = SafeTensors::deserialize(&bytes)
        .map_err(|error| anyhow!("`{name}` is no safetensors file: {error}"))?;
    let mut all = BTreeMap::new();
    for (tensor, view) in file.tensors() {
        let values = decode(view.dtype(), view.data())
            .with_context(|| format!("`{tensor}` of `{name}` cannot be compared"))?;
        let width = view.shape().last().copied().unwrap_or(1);
        let rows = values.len().checked_div(width).unwrap_or(0);
        all.insert(tensor, In { rows, width, values });
    }
    Ok(all)
}

fn decode(dtype: Dtype, bytes: &[u8]) -> Result<Vec<f32>> {
    let fours = || bytes.as_chunks::<4>().0.iter();
    let twos = || bytes.as_chunks::<2>().0.iter();
    Ok(match dtype {
        Dtype::F32 => fours().map(|b| f32::from_le_bytes(*b)).collect(),
        Dtype::U32 => fours().map(|b| u32::from_le_bytes(*b) as f32).collect(),
        Dtype::I32 => fours().map(|b| i32::from_le_bytes(*b) as f32).collect(),
        Dtype::F16 => twos().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
        Dtype::BF16 => {
            twos().map(|b| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16)).collect()
        }
        other => bail!("it is {other:?}, expected F32, F16, BF16, I32 or U32"),
    })
}
