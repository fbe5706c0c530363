//! How a family asks for what it needs.

use crate::config::Result;
use crate::error::ModelError;
use crate::experts::{self, ExpertShape, ExpertTable};
use crate::mtp::MtpNames;
use crate::registry::ModelOptions;
use crate::stored::Stored;
use crate::tables::{self, TableShape};
use snowmelt_backend::{Backend, BufType, ExpertLayout, Limits, Pass};
use snowmelt_weights::{Checkpoint, Encoding, TensorInfo};
use std::collections::BTreeSet;
use std::ops::Range;

/// What a trunk matrix is for: whether `pack --trunk` may quantise it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// A large matrix of a projection.
    Projection,
    /// Routers, gates, convolutions: small, and sensitive to rounding.
    Exact,
}

/// A kind of named state buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateKind {
    /// `[n_pages, PAGE_TOKENS, width]` in the type of the KV cache: can be truncated anywhere.
    PerToken {
        /// Elements a token.
        width: usize,
    },
    /// `[n_fixed, len]` f32, one row a sequence, zero at its start: a recurrence.
    PerSequence {
        /// Elements a sequence.
        len: usize,
    },
}

/// A named state buffer that a family declares and the engine owns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateDecl {
    /// `layers.3.k`
    pub name: String,
    /// Its kind.
    pub kind: StateKind,
}

/// Names of a checkpoint, with a record of which were asked for.
#[derive(Debug)]
pub struct Tensors<'a> {
    checkpoint: &'a Checkpoint,
    prefix: &'static str,
    used: BTreeSet<String>,
}

/// Parts of a wrapper that lie beside the trunk under `model.`.
const BESIDE_TRUNK: [&str; 6] = [
    "model.visual.",
    "model.vision_tower.",
    "model.audio_tower.",
    "model.multi_modal_projector.",
    "model.embed_vision.",
    "model.embed_audio.",
];

impl<'a> Tensors<'a> {
    /// Finds out whether the trunk lies under `model.` or `model.language_model.`.
    pub(crate) fn new(checkpoint: &'a Checkpoint) -> Self {
        let wrapped = "model.language_model.";
        let is_wrapped = checkpoint.tensors().any(|info| info.name.starts_with(wrapped));
        let prefix = if is_wrapped { wrapped } else { "model." };
        Self { checkpoint, prefix, used: BTreeSet::new() }
    }

    /// A trunk name: `layers.0.mlp.gate.weight` with the prefix of this checkpoint.
    pub(crate) fn trunk(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    pub(crate) fn require(
        &mut self,
        name: &str,
        shape: &[usize],
    ) -> Result<(&'a TensorInfo, Encoding)> {
        let found = require(self.checkpoint, name, shape)?;
        self.used.insert(name.to_owned());
        Ok(found)
    }

    /// A matrix, whose scales may lie in a tensor of their own.
    pub(crate) fn matrix(&mut self, name: &str, shape: &[usize]) -> Result<Stored<'a>> {
        let found = Stored::find(self.checkpoint, name, shape)?;
        self.used.extend(found.names().map(str::to_owned));
        Ok(found)
    }

    pub(crate) fn experts(&mut self, shape: &ExpertShape, prefix: &str) -> Result<ExpertTable> {
        let used = &mut self.used;
        experts::locate(self.checkpoint, shape, prefix, &mut |name| {
            used.insert(name.to_owned());
        })
    }

    /// A buffer of integers, where the checkpoint has it.
    pub(crate) fn integers(&mut self, name: &str, len: usize) -> Result<Option<Vec<i64>>> {
        let Some(info) = self.checkpoint.tensor(name) else { return Ok(None) };
        self.used.insert(name.to_owned());
        if info.dtype != "I64" || info.values() != len {
            return Err(ModelError::Buffer {
                tensor: name.to_owned(),
                found: format!("{} {:?}", info.dtype, info.shape),
                expected: format!("I64 [{len}]"),
            });
        }
        let mut bytes = vec![0; len * 8];
        self.checkpoint.read(info.file, info.offset, &mut bytes)?;
        Ok(Some(bytes.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect()))
    }

    /// Names that lie outside the trunk. Names inside it that no one asked for are an error.
    pub(crate) fn finish(self, family: &'static str, heads: &MtpNames) -> Result<Vec<String>> {
        let unused = |info: &&TensorInfo| !self.used.contains(&info.name);
        let (surplus, skipped): (Vec<&str>, Vec<&str>) = self
            .checkpoint
            .tensors()
            .filter(unused)
            .map(|info| info.name.as_str())
            .partition(|name| self.is_in_trunk(name) && heads.head_of(name).is_none());
        if surplus.is_empty() {
            return Ok(skipped.into_iter().map(str::to_owned).collect());
        }
        let shown: Vec<String> = surplus.iter().take(4).map(|name| format!("`{name}`")).collect();
        Err(ModelError::Surplus {
            origin: self.checkpoint.origin().to_owned(),
            family,
            count: surplus.len(),
            names: shown.join(", "),
        })
    }

    /// Names of heads beside the trunk.
    pub(crate) fn heads(&self, n_layers: usize, announced: usize) -> MtpNames {
        MtpNames::new(self.checkpoint, self.prefix, n_layers, announced)
    }

    fn is_in_trunk(&self, name: &str) -> bool {
        name.starts_with(self.prefix)
            && !BESIDE_TRUNK.iter().any(|part| name.starts_with(part))
            // A buffer that old checkpoints carry; it follows from the config.
            && !name.ends_with(".rotary_emb.inv_freq")
    }
}

/// The tensor `name`, of this shape but for dimensions of 1, in an encoding that can be read.
pub(crate) fn require<'a>(
    checkpoint: &'a Checkpoint,
    name: &str,
    shape: &[usize],
) -> Result<(&'a TensorInfo, Encoding)> {
    let squeezed =
        |shape: &[usize]| -> Vec<usize> { shape.iter().copied().filter(|&dim| dim != 1).collect() };
    let as_stored = checkpoint
        .tensor(name)
        .map(|info| info.shape.as_slice())
        .filter(|stored| squeezed(stored) == squeezed(shape));
    let info = checkpoint.require(name, as_stored.unwrap_or(shape))?;
    let encoding = info.encoding.expect("`require` refuses unknown dtypes");
    Ok((info, encoding))
}

/// What a family's `load` is written over.
pub trait Loader {
    /// A weight, or nothing where only headers are read.
    type Weight;
    /// A buffer, or nothing.
    type Buf: Clone;

    /// The names.
    fn tensors(&self) -> &Tensors<'_>;

    /// A matrix `shape = [d_out, d_in]`; `rows`: the order in which its rows are wanted, as stored
    /// where empty. Dimensions of 1 in the file do not count.
    ///
    /// # Errors
    /// When the tensor is missing, has another shape, or cannot be read.
    fn matrix(
        &mut self,
        name: &str,
        shape: [usize; 2],
        usage: Use,
        rows: &[Range<usize>],
    ) -> Result<Self::Weight>;

    /// A vector of `len` as f32, `plus` added to each element in f32.
    ///
    /// # Errors
    /// When the tensor is missing, has another shape, or cannot be read.
    fn vector(&mut self, name: &str, len: usize, plus: f32) -> Result<Self::Weight>;

    /// A vector to be added to rows, as f32; `rows`: the order in which its elements are wanted, as
    /// stored where empty.
    ///
    /// # Errors
    /// When the tensor is missing, has another shape, or cannot be read.
    fn bias(&mut self, name: &str, len: usize, rows: &[Range<usize>]) -> Result<Self::Buf>;

    /// One number: 0 where only headers are read.
    ///
    /// # Errors
    /// When the tensor is missing, has another shape, or cannot be read.
    fn scalar(&mut self, name: &str) -> Result<f32>;

    /// A computed vector.
    fn constants(&mut self, values: &[f32]) -> Self::Weight;

    /// Scratch `[rows, width]` f32.
    fn scratch(&mut self, width: usize) -> Self::Buf;

    /// Scratch `[outputs, width]` f32.
    fn outputs(&mut self, width: usize) -> Self::Buf;

    /// Declares a state buffer; returns its index in [`crate::Step::state`].
    fn state(&mut self, name: String, kind: StateKind) -> usize;

    /// Says that no query reads further back than `tokens` in a per-token state.
    fn window(&mut self, _state: usize, _tokens: usize) {}

    /// The experts under `prefix`.
    ///
    /// # Errors
    /// When tensors are missing, have other shapes, or differ in encoding.
    fn experts(&mut self, shape: &ExpertShape, prefix: &str) -> Result<ExpertLayout>;

    /// A table that stays on disk; returns its index in [`crate::Step::tables`].
    ///
    /// # Errors
    /// When shards are missing, have other shapes, or differ in encoding.
    fn table(&mut self, shape: &TableShape) -> Result<usize>;

    /// A buffer of integers that follows from the config, where the checkpoint has it.
    ///
    /// # Errors
    /// When it is no such buffer, or cannot be read.
    fn integers(&mut self, name: &str, len: usize) -> Result<Option<Vec<i64>>>;

    /// Tokens that the family looks back at, see [`snowmelt_backend::Rows::history`].
    fn history(&mut self, tokens: usize);

    /// What the user asks of the family.
    fn options(&self) -> ModelOptions;

    /// Sizes of the family, to be raised.
    fn limits(&mut self) -> &mut Limits;
}

/// Reads weights into a backend.
#[derive(Debug)]
pub struct WeightLoader<'a, B: Backend> {
    backend: &'a B,
    tensors: Tensors<'a>,
    rows: usize,
    outputs: usize,
    states: usize,
    tables: usize,
    options: ModelOptions,
    limits: Limits,
    /// Read buffer, bounded whatever the tensor.
    chunk: Vec<u8>,
}

const CHUNK_BYTES: usize = 1 << 20;

impl<'a, B: Backend> WeightLoader<'a, B> {
    /// For steps of at most `rows` rows, logits of at most `outputs` rows at a time.
    pub(crate) fn new(
        checkpoint: &'a Checkpoint,
        backend: &'a B,
        options: ModelOptions,
        rows: usize,
        outputs: usize,
    ) -> Self {
        Self {
            backend,
            tensors: Tensors::new(checkpoint),
            rows,
            outputs,
            states: 0,
            tables: 0,
            options,
            limits: Limits::default(),
            chunk: Vec::new(),
        }
    }

    /// Reads rows `range` of `stored` into `weight` from row `at` on, a chunk at a time.
    fn fill(
        &mut self,
        weight: &mut B::Weight,
        stored: &Stored<'_>,
        range: Range<usize>,
        at: usize,
    ) -> Result<()> {
        let row_bytes = stored.encoding.row_bytes(stored.info.d_in());
        let rows_a_chunk = (CHUNK_BYTES / row_bytes).max(1);
        let mut done = 0;
        while done < range.len() {
            let rows = rows_a_chunk.min(range.len() - done);
            self.chunk.resize(rows * row_bytes, 0);
            let from = range.start + done;
            stored.read_rows(self.tensors.checkpoint, from..from + rows, &mut self.chunk)?;
            self.backend.fill_weight(weight, at + done, &self.chunk);
            done += rows;
        }
        Ok(())
    }

    fn values(&mut self, name: &str, len: usize) -> Result<Vec<f32>> {
        let (info, encoding) = self.tensors.require(name, &[len])?;
        let mut bytes = vec![0; encoding.row_bytes(len)];
        self.tensors.checkpoint.read(info.file, info.offset, &mut bytes)?;
        let mut values = vec![0.0; len];
        encoding.decode_row(&bytes, &mut values);
        Ok(values)
    }

    fn load_values(&self, values: &[f32]) -> B::Weight {
        let mut weight = self.backend.alloc_weight(Encoding::F32, 1, values.len());
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.backend.fill_weight(&mut weight, 0, &bytes);
        weight
    }
}

impl<B: Backend> Loader for WeightLoader<'_, B> {
    type Weight = B::Weight;
    type Buf = B::Buf;

    fn tensors(&self) -> &Tensors<'_> {
        &self.tensors
    }

    fn matrix(
        &mut self,
        name: &str,
        shape: [usize; 2],
        _: Use,
        rows: &[Range<usize>],
    ) -> Result<B::Weight> {
        let [d_out, d_in] = shape;
        let stored = self.tensors.matrix(name, &shape)?;
        let mut weight = self.backend.alloc_weight(stored.encoding, d_out, d_in);
        let mut at = 0;
        if rows.is_empty() {
            self.fill(&mut weight, &stored, 0..d_out, 0)?;
            return Ok(weight);
        }
        for range in rows {
            self.fill(&mut weight, &stored, range.clone(), at)?;
            at += range.len();
        }
        assert_eq!(at, d_out, "the row order of `{name}` is no permutation");
        Ok(weight)
    }

    fn vector(&mut self, name: &str, len: usize, plus: f32) -> Result<B::Weight> {
        let mut values = self.values(name, len)?;
        for value in &mut values {
            *value += plus;
        }
        Ok(self.load_values(&values))
    }

    fn bias(&mut self, name: &str, len: usize, rows: &[Range<usize>]) -> Result<B::Buf> {
        let stored = self.values(name, len)?;
        let values = match rows {
            [] => stored,
            rows => rows.iter().flat_map(|range| stored[range.clone()].to_vec()).collect(),
        };
        let buf = self.backend.alloc(len, BufType::F32);
        let mut pass = self.backend.begin();
        self.backend.write(&mut pass, &buf, 0, &values);
        pass.submit();
        Ok(buf)
    }

    fn scalar(&mut self, name: &str) -> Result<f32> {
        Ok(self.values(name, 1)?[0])
    }

    fn constants(&mut self, values: &[f32]) -> B::Weight {
        self.load_values(values)
    }

    fn scratch(&mut self, width: usize) -> B::Buf {
        self.backend.alloc(self.rows * width, BufType::F32)
    }

    fn outputs(&mut self, width: usize) -> B::Buf {
        self.backend.alloc(self.outputs * width, BufType::F32)
    }

    fn state(&mut self, _: String, _: StateKind) -> usize {
        self.states += 1;
        self.states - 1
    }

    fn experts(&mut self, shape: &ExpertShape, prefix: &str) -> Result<ExpertLayout> {
        Ok(self.tensors.experts(shape, prefix)?.layout)
    }

    fn table(&mut self, shape: &TableShape) -> Result<usize> {
        tables::locate(&mut self.tensors, shape)?;
        self.tables += 1;
        Ok(self.tables - 1)
    }

    fn integers(&mut self, name: &str, len: usize) -> Result<Option<Vec<i64>>> {
        self.tensors.integers(name, len)
    }

    fn history(&mut self, _: usize) {}

    fn options(&self) -> ModelOptions {
        self.options
    }

    fn limits(&mut self) -> &mut Limits {
        &mut self.limits
    }
}
