//! `manifest.json` of the packed container, and everything that must agree with it.
//!
//! ```text
//! manifest.json     what is where; written last
//! manifest.blake3   digest of manifest.json, 64 hex digits and a newline
//! trunk.bin         tensors that stay resident, each at a multiple of 64, zeros between
//! experts.bin       one record per expert, each at a multiple of 4096, zeros between
//! digests.bin       32 bytes of BLAKE3 per record, in the order of the records
//! tokenizer.json …  sidecars
//! ```

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bytes::{Buffers, DataFile, Folder, is_plain_name};
use crate::config::type_name;
use crate::digest::Digest;
use crate::encoding::Encoding;
use crate::error::WeightsError;
use crate::huggingface::JSON_LIMIT;
use crate::packed::{ExpertLayer, PIECE_ALIGN, Packed, RECORD_ALIGN};
use crate::scan::Scanner;
use crate::tensor::{TensorInfo, matrix};

pub(crate) const MANIFEST: &str = "manifest.json";
pub(crate) const MANIFEST_DIGEST: &str = "manifest.blake3";
pub(crate) const TRUNK: &str = "trunk.bin";
pub(crate) const EXPERTS: &str = "experts.bin";
pub(crate) const DIGESTS: &str = "digests.bin";
pub(crate) const JOURNAL: &str = "journal";
/// Names that no sidecar may have.
pub(crate) const RESERVED: [&str; 6] =
    [MANIFEST, MANIFEST_DIGEST, TRUNK, EXPERTS, DIGESTS, JOURNAL];

const FORMAT: &str = "snowmelt-packed";
const VERSION: u32 = 1;

/// Indices of the files in [`crate::Checkpoint::files`].
pub(crate) const TRUNK_FILE: u32 = 0;
pub(crate) const EXPERTS_FILE: u32 = 1;

/// The two fields that every version has.
#[derive(Deserialize)]
struct Format {
    format: String,
    version: u32,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    format: String,
    version: u32,
    pub(crate) family: String,
    pub(crate) config: Value,
    pub(crate) tensors: Vec<TrunkTensor>,
    pub(crate) layers: Vec<ExpertLayer>,
    pub(crate) sidecars: Vec<Section>,
    pub(crate) provenance: Value,
    /// Tensors that keep the encoding of the source because the group does not divide a row.
    pub(crate) kept: Vec<String>,
    /// Digest of this manifest before any weight was written; see [`Manifest::plan_digest`].
    pub(crate) plan: Digest,
    pub(crate) trunk: Section,
    pub(crate) experts: ExpertsSection,
    pub(crate) digests: Section,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TrunkTensor {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) encoding: Encoding,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) blake3: Digest,
}

/// A file that has one digest.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Section {
    pub(crate) name: String,
    pub(crate) len: u64,
    pub(crate) blake3: Digest,
}

/// The records, whose digests are the file `digests.bin`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ExpertsSection {
    pub(crate) name: String,
    pub(crate) len: u64,
    pub(crate) records: u64,
}

/// What a container consists of, checked.
pub(crate) struct Opened {
    pub(crate) config: Value,
    pub(crate) files: Vec<DataFile>,
    pub(crate) tensors: Vec<TensorInfo>,
    pub(crate) packed: Packed,
}

/// Opens a container and checks the manifest against itself and against the lengths of all files.
pub(crate) fn open(folder: &Folder, buffers: &Buffers) -> Result<Opened, WeightsError> {
    let (mut manifest, path) = read(folder, buffers)?;
    manifest.check(&path)?;
    let trunk = section_file(folder, TRUNK, manifest.trunk.len)?;
    let experts = section_file(folder, EXPERTS, manifest.experts.len)?;
    for sidecar in &manifest.sidecars {
        section_file(folder, &sidecar.name, sidecar.len)?;
    }
    let digests_file = section_file(folder, DIGESTS, manifest.digests.len)?;
    let bytes = digests_file.read_all(manifest.digests.len, buffers)?;
    let whole = (digests_file.path.as_path(), 0..digests_file.len);
    expect_digest(whole, || "the list of digests".into(), manifest.digests.blake3, &bytes)?;
    Ok(Opened {
        config: std::mem::take(&mut manifest.config),
        files: vec![trunk, experts],
        tensors: manifest.tensors.iter().map(TrunkTensor::info).collect(),
        packed: Packed {
            experts_file: EXPERTS_FILE,
            digests: bytes.as_chunks::<32>().0.to_vec(),
            manifest: Box::new(manifest),
        },
    })
}

/// Reads the manifest and compares it with its digest.
fn read(folder: &Folder, buffers: &Buffers) -> Result<(Manifest, PathBuf), WeightsError> {
    let file = folder.require(MANIFEST)?;
    let text = file.read_all(JSON_LIMIT, buffers)?;
    let digest_file = section_file(folder, MANIFEST_DIGEST, 65)?;
    let line = digest_file.read_all(65, buffers)?;
    let line = String::from_utf8_lossy(&line);
    let Some(digest) = line.strip_suffix('\n').and_then(Digest::parse) else {
        return Err(WeightsError::Manifest {
            path: digest_file.path,
            subject: MANIFEST_DIGEST.into(),
            field: "the content",
            wanted: "64 lower-case hex digits and a newline".into(),
            got: line.escape_debug().to_string(),
        });
    };
    expect_digest((&file.path, 0..file.len), || "the manifest".into(), digest, &text)?;
    let json = |e| WeightsError::json(&file.path, &e);
    let Format { format, version } = serde_json::from_slice(&text).map_err(json)?;
    if format != FORMAT || version != VERSION {
        return Err(WeightsError::ManifestFormat {
            path: file.path,
            wanted: format!("{FORMAT} version {VERSION}"),
            got: format!("{format} version {version}"),
        });
    }
    let manifest = serde_json::from_slice(&text).map_err(json)?;
    Ok((manifest, file.path))
}

/// Opens a file that must have a certain length.
fn section_file(folder: &Folder, name: &str, wanted: u64) -> Result<DataFile, WeightsError> {
    let file = folder.require(name)?;
    if file.len == wanted {
        return Ok(file);
    }
    Err(WeightsError::FileLength { path: file.path, wanted, got: file.len })
}

/// Compares a digest; the subject names what is damaged.
pub(crate) fn expect_digest(
    (path, range): (&Path, std::ops::Range<u64>),
    subject: impl FnOnce() -> String,
    wanted: Digest,
    bytes: &[u8],
) -> Result<(), WeightsError> {
    let got = Digest::of(bytes);
    if got == wanted { Ok(()) } else { Err(damaged((path, range), subject(), wanted, got)) }
}

pub(crate) fn damaged(
    (path, range): (&Path, std::ops::Range<u64>),
    subject: String,
    wanted: Digest,
    got: Digest,
) -> WeightsError {
    WeightsError::Digest {
        path: path.to_owned(),
        subject,
        start: range.start,
        end: range.end,
        wanted: wanted.short(),
        got: got.short(),
    }
}

impl TrunkTensor {
    /// The tensor as readers see it.
    pub(crate) fn info(&self) -> TensorInfo {
        TensorInfo {
            name: self.name.clone(),
            dtype: self.encoding.name().to_owned(),
            encoding: Some(self.encoding),
            shape: self.shape.clone(),
            file: TRUNK_FILE,
            offset: self.offset,
            len: self.len,
        }
    }

    /// Reads the tensor from the trunk and compares it with its digest; `also` sees the bytes.
    pub(crate) fn check(
        &self,
        trunk: &mut Scanner<'_>,
        also: impl FnMut(&[u8]),
    ) -> Result<(), WeightsError> {
        let range = self.offset..self.offset + self.len;
        let got = trunk.digest(range.clone(), also)?;
        if got == self.blake3 {
            return Ok(());
        }
        let subject = format!("tensor `{}`", self.name);
        Err(damaged((&trunk.file.path, range), subject, self.blake3, got))
    }
}

/// A property of the manifest that is not as it must be.
pub(crate) struct Fault {
    pub(crate) subject: String,
    pub(crate) field: &'static str,
    pub(crate) wanted: String,
    pub(crate) got: String,
}

/// Compares a property.
fn same<T: PartialEq + std::fmt::Display>(
    subject: &str,
    field: &'static str,
    wanted: &T,
    got: &T,
) -> Result<(), Fault> {
    if wanted == got {
        return Ok(());
    }
    fault(subject, field, format!("`{wanted}`"), got)
}

fn fault<T>(
    subject: &str,
    field: &'static str,
    wanted: impl Into<String>,
    got: impl std::fmt::Display,
) -> Result<T, Fault> {
    Err(Fault { subject: subject.to_owned(), field, wanted: wanted.into(), got: got.to_string() })
}

impl Manifest {
    /// A manifest without weights: all digests of weights zero.
    pub(crate) fn planned(family: String, config: Value, provenance: Value) -> Self {
        let section = |name: &str| Section { name: name.into(), len: 0, blake3: Digest::default() };
        Self {
            format: FORMAT.into(),
            version: VERSION,
            family,
            config,
            tensors: Vec::new(),
            layers: Vec::new(),
            sidecars: Vec::new(),
            provenance,
            kept: Vec::new(),
            plan: Digest::default(),
            trunk: section(TRUNK),
            experts: ExpertsSection { name: EXPERTS.into(), len: 0, records: 0 },
            digests: section(DIGESTS),
        }
    }

    /// The text of `manifest.json`.
    pub(crate) fn text(&self) -> Vec<u8> {
        let mut text = serde_json::to_vec_pretty(self).expect("a manifest has string keys only");
        text.push(b'\n');
        text
    }

    /// What identifies a pack before its weights are known: layout, configuration, sidecars and
    /// the identity of the source in the provenance.
    pub(crate) fn plan_digest(&self) -> Digest {
        Digest::of(&self.text())
    }

    fn check(&self, path: &Path) -> Result<(), WeightsError> {
        self.faults().map_err(|Fault { subject, field, wanted, got }| WeightsError::Manifest {
            path: path.to_owned(),
            subject,
            field,
            wanted,
            got,
        })
    }

    /// Checks everything that needs no file.
    pub(crate) fn faults(&self) -> Result<(), Fault> {
        if !self.config.is_object() {
            return fault("config", "its type", "an object", type_name(&self.config));
        }
        let trunk_end = self.check_tensors()?;
        same(TRUNK, "the name", &TRUNK, &self.trunk.name.as_str())?;
        same(TRUNK, "the length", &trunk_end, &self.trunk.len)?;
        let (records, experts_end) = check_layers(&self.layers)?;
        same(EXPERTS, "the name", &EXPERTS, &self.experts.name.as_str())?;
        same(EXPERTS, "the length", &experts_end, &self.experts.len)?;
        same(EXPERTS, "the number of records", &records, &self.experts.records)?;
        same(DIGESTS, "the name", &DIGESTS, &self.digests.name.as_str())?;
        match records.checked_mul(32) {
            Some(bytes) => same(DIGESTS, "the length", &bytes, &self.digests.len)?,
            None => return fault(EXPERTS, "the number of records", "fewer", records),
        }
        self.check_sidecars()
    }

    /// Returns the end of the last tensor.
    fn check_tensors(&self) -> Result<u64, Fault> {
        let mut end = 0u64;
        for tensor in &self.tensors {
            let name = &tensor.name;
            if name.is_empty() {
                return fault(name, "the name", "a name", "");
            }
            let Some(len) = tensor_bytes(&tensor.shape, tensor.encoding) else {
                let wanted = format!("dimensions that `{}` can store", tensor.encoding);
                return fault(name, "the shape", wanted, format!("{:?}", tensor.shape));
            };
            let Some(offset) = end.checked_next_multiple_of(PIECE_ALIGN) else {
                return fault(name, "the offset", "a smaller one", tensor.offset);
            };
            same(name, "the offset", &offset, &tensor.offset)?;
            same(name, "the length", &len, &tensor.len)?;
            end = match offset.checked_add(len) {
                Some(end) => end,
                None => return fault(name, "the length", "a smaller one", len),
            };
        }
        unique("the name", self.tensors.iter().map(|t| t.name.as_str()))?;
        Ok(end)
    }

    fn check_sidecars(&self) -> Result<(), Fault> {
        for Section { name, .. } in &self.sidecars {
            if !is_plain_name(name) || RESERVED.contains(&name.as_str()) {
                return fault("sidecars", "a name", "a plain file name that is free", name);
            }
        }
        unique("the name", self.sidecars.iter().map(|s| s.name.as_str()))
    }
}

/// Bytes of a tensor; nothing when a dimension is zero, the group does not divide a row, or the
/// product does not fit.
pub(crate) fn tensor_bytes(shape: &[usize], encoding: Encoding) -> Option<u64> {
    let (rows, d_in) = matrix(shape)?;
    if rows == 0 || d_in == 0 {
        return None;
    }
    rows.checked_mul(d_in)?;
    encoding.checked_bytes(rows, d_in)
}

fn unique<'a>(field: &'static str, names: impl Iterator<Item = &'a str>) -> Result<(), Fault> {
    let mut names: Vec<&str> = names.collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => fault(pair[0], field, "only once", pair[0]),
        None => Ok(()),
    }
}

/// Returns the number of records and the length of the experts file.
fn check_layers(layers: &[ExpertLayer]) -> Result<(u64, u64), Fault> {
    let mut records = 0u64;
    let mut end = 0u64;
    let mut previous = None;
    for layer in layers {
        let subject = format!("layer {}", layer.layer);
        if previous.is_some_and(|p| p >= layer.layer) {
            return fault(&subject, "the order", "ascending layers", layer.layer);
        }
        previous = Some(layer.layer);
        if layer.n_experts == 0 {
            return fault(&subject, "the number of experts", "at least `1`", 0);
        }
        let record_bytes = check_pieces(layer, &subject)?;
        same(&subject, "the record length", &record_bytes, &layer.record_bytes)?;
        let Some(stride) = record_bytes.checked_next_multiple_of(RECORD_ALIGN) else {
            return fault(&subject, "the record length", "a smaller one", record_bytes);
        };
        same(&subject, "the stride", &stride, &layer.stride)?;
        same(&subject, "the offset", &end, &layer.offset)?;
        records += u64::from(layer.n_experts);
        let bytes = stride.checked_mul(u64::from(layer.n_experts));
        end = match bytes.and_then(|bytes| end.checked_add(bytes)) {
            Some(end) => end,
            None => return fault(&subject, "the length", "a smaller one", layer.n_experts),
        };
    }
    Ok((records, end))
}

/// Returns the end of the last piece.
fn check_pieces(layer: &ExpertLayer, subject: &str) -> Result<u64, Fault> {
    if layer.pieces.is_empty() {
        return fault(subject, "the number of pieces", "at least `1`", 0);
    }
    let mut end = 0u64;
    for piece in &layer.pieces {
        let subject = format!("{subject} {}", piece.role);
        let shape = [piece.d_out, piece.d_in];
        let Some(len) = tensor_bytes(&shape, piece.encoding) else {
            let wanted = format!("dimensions that `{}` can store", piece.encoding);
            return fault(&subject, "the shape", wanted, format!("{shape:?}"));
        };
        let Some(offset) = end.checked_next_multiple_of(PIECE_ALIGN) else {
            return fault(&subject, "the offset", "a smaller one", piece.offset);
        };
        same(&subject, "the offset", &offset, &piece.offset)?;
        end = match offset.checked_add(len) {
            Some(end) => end,
            None => return fault(&subject, "the length", "a smaller one", len),
        };
    }
    unique("the role", layer.pieces.iter().map(|p| p.role.as_str()))?;
    Ok(end)
}
