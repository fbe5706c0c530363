//! A checkpoint of either kind, opened and checked.

use std::path::Path;

use serde_json::Value;

use crate::bytes::{Buffers, Bytes, DataFile, Folder, is_plain_name};
use crate::config::type_name;
use crate::error::WeightsError;
use crate::huggingface::{self, INDEX, JSON_LIMIT, SINGLE};
use crate::manifest::{self, DIGESTS, EXPERTS, JOURNAL, MANIFEST, TRUNK, TRUNK_FILE};
use crate::packed::{PARTIAL, Packed, partial_path};
use crate::scan::Scanner;
use crate::tensor::TensorInfo;

pub(crate) const CONFIG: &str = "config.json";

/// Where a checkpoint's layout comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckpointKind {
    /// A folder with `config.json` and safetensors.
    HuggingFace,
    /// Our container with one record per expert.
    Packed,
}

/// An opened checkpoint.
///
/// 1. Every tensor lies wholly inside its file, and its length is what shape and type need.
/// 2. Names are unique, and [`Checkpoint::tensors`] is sorted by them.
/// 3. Reads either fill the whole buffer or fail.
#[derive(Debug)]
pub struct Checkpoint {
    origin: String,
    kind: CheckpointKind,
    config: Value,
    folder: Folder,
    files: Vec<DataFile>,
    tensors: Vec<TensorInfo>,
    packed: Option<Packed>,
    buffers: Buffers,
}

impl Checkpoint {
    /// Opens a folder: a packed model, or one as Hugging Face publishes them.
    ///
    /// # Errors
    ///
    /// Anything that makes the folder unusable, found before a weight is read; see
    /// [`WeightsError`].
    pub fn open(path: &Path) -> Result<Self, WeightsError> {
        let folder = Folder::Disk(path.to_owned());
        Self::open_folder(path.display().to_string(), folder)
    }

    fn open_folder(origin: String, folder: Folder) -> Result<Self, WeightsError> {
        let buffers = Buffers::default();
        let kind = detect(&folder)?;
        let (config, files, mut tensors, packed) = match kind {
            CheckpointKind::HuggingFace => {
                let config = read_config(&folder, &buffers)?;
                let (files, tensors) = huggingface::open(&folder, &buffers)?;
                (config, files, tensors, None)
            }
            CheckpointKind::Packed => {
                let opened = manifest::open(&folder, &buffers)?;
                (opened.config, opened.files, opened.tensors, Some(opened.packed))
            }
        };
        tensors.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Ok(Self { origin, kind, config, folder, files, tensors, packed, buffers })
    }

    /// Opens files that are in memory, such as a model embedded in the binary: no disk at all.
    ///
    /// # Errors
    ///
    /// As [`Checkpoint::open`].
    pub fn from_memory(origin: &str, files: &[(&str, Bytes)]) -> Result<Self, WeightsError> {
        let files = files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.clone()));
        Self::open_folder(origin.to_owned(), Folder::Memory(files.collect()))
    }

    /// What it was opened as.
    pub fn kind(&self) -> CheckpointKind {
        self.kind
    }

    /// Where it came from, for messages.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// The model's configuration, an object.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// A small file that belongs to the model, such as `tokenizer.json`; nothing when there is
    /// none.
    ///
    /// # Errors
    ///
    /// When it is there and cannot be read.
    pub fn sidecar(&self, name: &str) -> Result<Option<Vec<u8>>, WeightsError> {
        if !is_plain_name(name) {
            return Ok(None);
        }
        let listed = match &self.packed {
            Some(packed) => match packed.manifest.sidecars.iter().find(|s| s.name == name) {
                Some(section) => Some(section),
                None => return Ok(None),
            },
            None => None,
        };
        let Some(file) = self.folder.open(name)? else {
            return match listed {
                Some(_) => self.folder.require(name).map(|_| None),
                None => Ok(None),
            };
        };
        let bytes = file.read_all(JSON_LIMIT, &self.buffers)?;
        if let Some(section) = listed {
            let whole = (file.path.as_path(), 0..file.len);
            manifest::expect_digest(whole, || name.to_owned(), section.blake3, &bytes)?;
        }
        Ok(Some(bytes))
    }

    /// Files with weights.
    pub fn files(&self) -> &[DataFile] {
        &self.files
    }

    /// All tensors, sorted by name.
    pub fn tensors(&self) -> std::slice::Iter<'_, TensorInfo> {
        self.tensors.iter()
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        let at = self.tensors.binary_search_by(|t| t.name.as_str().cmp(name)).ok()?;
        Some(&self.tensors[at])
    }

    /// The tensor of that name, of exactly that shape and in a type that we compute with.
    ///
    /// # Errors
    ///
    /// [`WeightsError::MissingTensor`], [`WeightsError::WrongShape`],
    /// [`WeightsError::UnusableDtype`].
    pub fn require(&self, name: &str, shape: &[usize]) -> Result<&TensorInfo, WeightsError> {
        let tensor = self.require_shape(name, shape)?;
        if tensor.encoding.is_none() {
            return Err(WeightsError::UnusableDtype {
                path: self.files[tensor.file as usize].path.clone(),
                tensor: name.to_owned(),
                found: tensor.dtype.clone(),
            });
        }
        Ok(tensor)
    }

    /// The tensor of that name, of exactly that shape and type, be it one that we compute with or
    /// codes whose scales are in another tensor.
    ///
    /// # Errors
    ///
    /// [`WeightsError::MissingTensor`], [`WeightsError::WrongShape`],
    /// [`WeightsError::WrongDtype`].
    pub fn require_dtype(
        &self,
        name: &str,
        shape: &[usize],
        dtype: &str,
    ) -> Result<&TensorInfo, WeightsError> {
        let tensor = self.require_shape(name, shape)?;
        if tensor.dtype != dtype {
            return Err(WeightsError::WrongDtype {
                path: self.files[tensor.file as usize].path.clone(),
                tensor: name.to_owned(),
                found: tensor.dtype.clone(),
                expected: dtype.to_owned(),
            });
        }
        Ok(tensor)
    }

    fn require_shape(&self, name: &str, shape: &[usize]) -> Result<&TensorInfo, WeightsError> {
        let Some(tensor) = self.tensor(name) else {
            return Err(WeightsError::MissingTensor {
                origin: self.origin.clone(),
                tensor: name.to_owned(),
                expected: shape.to_owned(),
            });
        };
        if tensor.shape != shape {
            return Err(WeightsError::WrongShape {
                path: self.files[tensor.file as usize].path.clone(),
                tensor: name.to_owned(),
                expected: shape.to_owned(),
                found: tensor.shape.clone(),
            });
        }
        Ok(tensor)
    }

    /// Fills `out` with the bytes of a file from `offset`.
    ///
    /// # Errors
    ///
    /// [`WeightsError::ShortRead`] when the range ends outside the file or the file became
    /// shorter, [`WeightsError::Io`].
    ///
    /// # Panics
    ///
    /// If there is no such file.
    pub fn read(&self, file: u32, offset: u64, out: &mut [u8]) -> Result<(), WeightsError> {
        self.files[file as usize].read(offset, out, &self.buffers)
    }

    /// Fills `out` with bytes of a tensor, from its row `first_row`.
    ///
    /// # Errors
    ///
    /// As [`Checkpoint::read`], and [`WeightsError::UnusableDtype`].
    ///
    /// # Panics
    ///
    /// If the range leaves the tensor.
    pub fn read_rows(
        &self,
        tensor: &TensorInfo,
        first_row: usize,
        out: &mut [u8],
    ) -> Result<(), WeightsError> {
        let Some(row_bytes) = tensor.row_bytes() else {
            return Err(WeightsError::UnusableDtype {
                path: self.files[tensor.file as usize].path.clone(),
                tensor: tensor.name.clone(),
                found: tensor.dtype.clone(),
            });
        };
        let start = first_row as u64 * row_bytes as u64;
        let end = start + out.len() as u64;
        assert!(end <= tensor.len, "bytes {start}..{end} of `{}` ({})", tensor.name, tensor.len);
        self.read(tensor.file, tensor.offset + start, out)
    }

    /// Reads the trunk of a packed checkpoint and compares it with its digests; other checkpoints
    /// have none.
    ///
    /// # Errors
    ///
    /// [`WeightsError::Digest`] with the first damaged tensor, [`WeightsError::ShortRead`],
    /// [`WeightsError::Io`].
    pub fn check_trunk(&self) -> Result<(), WeightsError> {
        let Some(packed) = &self.packed else { return Ok(()) };
        let mut scanner = Scanner::new(&self.files[TRUNK_FILE as usize], &self.buffers);
        packed.manifest.tensors.iter().try_for_each(|tensor| tensor.check(&mut scanner, |_| {}))
    }

    pub(crate) fn folder(&self) -> &Folder {
        &self.folder
    }

    /// Checks headers and byte ranges again, against the files as they are now; returns the
    /// number of tensors.
    pub(crate) fn reread_headers(&self) -> Result<u64, WeightsError> {
        read_config(&self.folder, &self.buffers)?;
        let (_, tensors) = huggingface::open(&self.folder, &self.buffers)?;
        Ok(tensors.len() as u64)
    }

    /// What only a packed checkpoint has.
    pub fn packed(&self) -> Option<&Packed> {
        self.packed.as_ref()
    }
}

/// Names that a message about an unusable folder shows.
const SHOWN: usize = 8;

/// What a folder is, by the names in it; the errors say what could be done.
fn detect(folder: &Folder) -> Result<CheckpointKind, WeightsError> {
    if let Folder::Disk(path) = folder {
        check_path(path)?;
    }
    let names = folder.names()?;
    let has = |name: &str| names.iter().any(|n| n == name);
    if has(MANIFEST) {
        return Ok(CheckpointKind::Packed);
    }
    if has(JOURNAL) && (has(TRUNK) || has(EXPERTS)) {
        return Err(WeightsError::UnfinishedPack { path: folder.root() });
    }
    if has(SINGLE) || has(INDEX) {
        return Ok(CheckpointKind::HuggingFace);
    }
    let ends = |end: &str| names.iter().any(|n| n.ends_with(end));
    let hint = if [TRUNK, EXPERTS, DIGESTS].into_iter().any(has) {
        "\nhint: these are parts of a packed model without its `manifest.json`, copy it again"
    } else if ends(".safetensors") {
        "\nhint: shards need their `model.safetensors.index.json`"
    } else if ends(".gguf") {
        "\nhint: GGUF files are not supported, use the safetensors checkpoint"
    } else if ends(".bin") || ends(".pt") || ends(".pth") {
        "\nhint: PyTorch files are not supported, convert them to safetensors"
    } else {
        ""
    };
    let found = names.iter().take(SHOWN).cloned().collect();
    Err(WeightsError::NotACheckpoint { path: folder.root(), found, hint })
}

fn check_path(path: &Path) -> Result<(), WeightsError> {
    let partial = partial_path(path);
    let meta = match std::fs::metadata(path) {
        Ok(meta) => meta,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            return Err(match partial.filter(|p| p.exists()) {
                Some(path) => WeightsError::UnfinishedPack { path },
                None => WeightsError::NotFound { path: path.to_owned() },
            });
        }
        Err(e) => return Err(WeightsError::io(path, "open")(e)),
    };
    let ends = |end: &str| path.as_os_str().to_string_lossy().ends_with(end);
    if !meta.is_dir() {
        let hint = if ends(".safetensors") {
            "\nhint: give the folder that holds it and its `config.json`"
        } else if ends(".gguf") {
            "\nhint: GGUF files are not supported, use the folder of the safetensors checkpoint"
        } else {
            ""
        };
        return Err(WeightsError::NotAFolder { path: path.to_owned(), hint });
    }
    if path.file_name().is_some_and(|n| n.to_string_lossy().ends_with(PARTIAL)) {
        return Err(WeightsError::UnfinishedPack { path: path.to_owned() });
    }
    Ok(())
}

fn read_config(folder: &Folder, buffers: &Buffers) -> Result<Value, WeightsError> {
    let file = folder.require(CONFIG)?;
    let text = file.read_all(JSON_LIMIT, buffers)?;
    let path = &file.path;
    let value = serde_json::from_slice(&text).map_err(|e| WeightsError::json(path, &e))?;
    match value {
        Value::Object(_) => Ok(value),
        other => Err(WeightsError::NotAnObject { path: path.clone(), found: type_name(&other) }),
    }
}
