//! Files of named f32 tensors: captures and logits.

use crate::interrupt::Unfinished;
use anyhow::{Context, Result, anyhow, bail, ensure};
use half::f16;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::ffi::OsStr;
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

/// The beginning of a safetensors file of these tensors `(name, dtype, shape)`, four bytes an
/// element, in this order.
pub(crate) fn header<'a>(
    tensors: impl IntoIterator<Item = (&'a str, &'a str, [usize; 2])>,
) -> Vec<u8> {
    let mut entries = Map::new();
    let mut end = 0;
    for (name, dtype, shape) in tensors {
        let range = [end, end + 4 * shape[0] * shape[1]];
        end = range[1];
        let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": range });
        entries.insert(name.to_owned(), entry);
    }
    let mut text = Value::Object(entries).to_string().into_bytes();
    // Readers map the data: it begins at a multiple of eight.
    text.resize(text.len().next_multiple_of(8), b' ');
    [&(text.len() as u64).to_le_bytes()[..], &text].concat()
}

/// Begins a file beside its final place.
pub(crate) fn begin(path: &Path, header: &[u8]) -> Result<(Unfinished, BufWriter<File>)> {
    let name = path.file_name().with_context(|| format!("`{}` names no file", path.display()))?;
    remove_abandoned(path, name);
    let mut temporary = name.to_owned();
    temporary.push(format!(".{}{PARTIAL}", std::process::id()));
    let temporary = path.with_file_name(temporary);
    let file = File::create(&temporary).with_context(|| could_not_write(&temporary))?;
    // Where there are no locks nothing abandoned is ever removed, and that is all.
    let _ = file.try_lock();
    let unfinished = Unfinished::new(temporary);
    let mut out = BufWriter::new(file);
    out.write_all(header).with_context(|| could_not_write(unfinished.path()))?;
    Ok((unfinished, out))
}

/// Gives a complete file its name.
pub(crate) fn finish(unfinished: Unfinished, out: BufWriter<File>, path: &Path) -> Result<()> {
    let file = out.into_inner().map_err(std::io::IntoInnerError::into_error);
    file.and_then(|file| file.sync_all()).with_context(|| could_not_write(unfinished.path()))?;
    unfinished.keep_as(path).with_context(|| could_not_write(path))
}

pub(crate) fn could_not_write(path: &Path) -> String {
    format!("could not write `{}`", path.display())
}

const PARTIAL: &str = ".partial";

/// Removes what processes that were killed left of this name: those that live hold a lock. A
/// failure does not matter.
fn remove_abandoned(path: &Path, name: &OsStr) {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let entries = std::fs::read_dir(folder.unwrap_or(Path::new(".")));
    let beginning = format!("{}.", name.to_string_lossy());
    for entry in entries.into_iter().flatten().filter_map(Result::ok) {
        let name = entry.file_name();
        let id =
            name.to_str().and_then(|name| name.strip_prefix(&beginning)?.strip_suffix(PARTIAL));
        let is_ours = id.is_some_and(|id| id.parse::<u32>().is_ok());
        let is_abandoned = || File::open(entry.path()).is_ok_and(|file| file.try_lock().is_ok());
        if is_ours && entry.file_type().is_ok_and(|kind| kind.is_file()) && is_abandoned() {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Writes a whole file.
pub(crate) fn write(path: &Path, tensors: &[Out<'_>]) -> Result<()> {
    let header = header(tensors.iter().map(|t| (t.name.as_str(), t.dtype, t.shape)));
    let (unfinished, mut out) = begin(path, &header)?;
    for value in tensors.iter().flat_map(|tensor| tensor.values) {
        out.write_all(&value.to_le_bytes()).with_context(|| could_not_write(unfinished.path()))?;
    }
    finish(unfinished, out, path)
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
