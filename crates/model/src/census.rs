//! What a model needs, from its headers alone.

use crate::config::Result;
use crate::experts::{ExpertShape, ExpertTable};
use crate::loader::{Loader, StateDecl, StateKind, Tensors, Use};
use crate::mtp::MtpHead;
use crate::registry::ModelOptions;
use crate::stored::Stored;
use crate::tables::{self, RowTable, TableShape};
use snowmelt_backend::{ExpertLayout, Limits};
use snowmelt_weights::{Checkpoint, Encoding};
use std::ops::Range;

/// A trunk tensor that a family asked for.
#[derive(Clone, Debug)]
pub struct TrunkTensor {
    /// Name in the checkpoint.
    pub name: String,
    /// `[d_out, d_in]`, or `[len]`.
    pub shape: Vec<usize>,
    /// Encoding of its rows, with scales that lie in a tensor of their own.
    pub encoding: Encoding,
    /// Whether it may be quantised.
    pub usage: Use,
    /// Bytes it takes in memory once loaded.
    pub loaded_bytes: usize,
}

impl TrunkTensor {
    /// Fills `out` with encoded rows `range`.
    ///
    /// **Shapes.** `out: [range.len(), encoding.row_bytes(d_in)]`
    ///
    /// # Errors
    /// When the checkpoint is not that of the census, or cannot be read.
    pub fn read_rows(
        &self,
        checkpoint: &Checkpoint,
        range: Range<usize>,
        out: &mut [u8],
    ) -> Result<()> {
        Stored::find(checkpoint, &self.name, &self.shape)?.read_rows(checkpoint, range, out)
    }
}

/// Everything a model needs, known without reading a weight.
#[derive(Debug)]
pub struct Census {
    /// Family name.
    pub family: &'static str,
    /// Vocabulary size.
    pub n_vocab: usize,
    /// Layers.
    pub n_layers: usize,
    /// Longest context of the config, in tokens.
    pub context_max: usize,
    /// Sizes of the family; `rows` and `context_tokens` are the engine's to set.
    pub limits: Limits,
    /// Trunk tensors, in the order asked for; a tied head appears once.
    pub trunk: Vec<TrunkTensor>,
    /// Bytes of computed constants.
    pub constant_bytes: usize,
    /// Bytes of the embedding table, of which a token reads one row (0 where it is also the head).
    pub embedding_bytes: usize,
    /// Expert tables, ascending by layer; a dense model has none.
    pub experts: Vec<ExpertTable>,
    /// Tables that stay on disk, in the order of [`crate::Step::tables`].
    pub tables: Vec<RowTable>,
    /// Tokens before a step that it looks back at.
    pub history_tokens: usize,
    /// State buffers, in the order of [`crate::Step::state`].
    pub state: Vec<StateDecl>,
    /// f32 elements of scratch a row.
    pub scratch_width: usize,
    /// f32 elements of scratch an output row.
    pub outputs_width: usize,
    /// Heads that predict further tokens, which are not part of the trunk.
    pub mtp: Vec<MtpHead>,
    /// Tensors outside the trunk, which are not read.
    pub skipped: Vec<String>,
}

impl Census {
    /// Bytes of the trunk in memory.
    pub fn trunk_bytes(&self) -> usize {
        self.constant_bytes + self.trunk.iter().map(|t| t.loaded_bytes).sum::<usize>()
    }

    /// Bytes of the largest expert record in a slot, a multiple of 4096; 0 for a dense model.
    pub fn slot_bytes(&self) -> usize {
        let largest = self.experts.iter().map(|table| table.record_bytes).max().unwrap_or(0);
        largest.next_multiple_of(4096)
    }

    /// Number of routed experts, over all layers.
    pub fn n_experts_total(&self) -> usize {
        self.experts.iter().map(|table| table.spans.len()).sum()
    }

    /// Elements of per-token state a token, over all layers.
    pub fn per_token_elements(&self) -> usize {
        let width = |decl: &StateDecl| match decl.kind {
            StateKind::PerToken { width } => width,
            StateKind::PerSequence { .. } => 0,
        };
        self.state.iter().map(width).sum()
    }

    /// f32 elements of per-sequence state, over all layers.
    pub fn per_sequence_elements(&self) -> usize {
        let len = |decl: &StateDecl| match decl.kind {
            StateKind::PerToken { .. } => 0,
            StateKind::PerSequence { len } => len,
        };
        self.state.iter().map(len).sum()
    }

    /// Bytes of the tables that stay on disk, as stored.
    pub fn table_bytes(&self) -> u64 {
        self.tables.iter().map(RowTable::bytes).sum()
    }

    /// Bytes of the rows of those tables that a token reads.
    pub fn table_bytes_per_token(&self) -> usize {
        self.tables.iter().map(|table| table.rows_a_token * table.row_bytes()).sum()
    }

    /// Weight bytes that one token touches: the trunk, less the embedding table but for one row,
    /// `top_k` experts of each layer that has them, and rows of tables on disk.
    pub fn bytes_per_token(&self) -> usize {
        let experts = self.experts.iter().map(|table| self.limits.top_k * table.record_bytes);
        let row = self.embedding_bytes / self.n_vocab.max(1);
        let rows = row + self.table_bytes_per_token();
        self.trunk_bytes() - self.embedding_bytes + rows + experts.sum::<usize>()
    }
}

/// The loader that only looks at headers.
#[derive(Debug)]
pub(crate) struct CensusLoader<'a> {
    pub(crate) tensors: Tensors<'a>,
    pub(crate) limits: Limits,
    pub(crate) trunk: Vec<TrunkTensor>,
    pub(crate) constant_bytes: usize,
    pub(crate) experts: Vec<ExpertTable>,
    pub(crate) tables: Vec<RowTable>,
    pub(crate) history_tokens: usize,
    pub(crate) options: ModelOptions,
    pub(crate) state: Vec<StateDecl>,
    pub(crate) scratch_width: usize,
    pub(crate) outputs_width: usize,
}

impl<'a> CensusLoader<'a> {
    pub(crate) fn new(checkpoint: &'a Checkpoint, options: ModelOptions) -> Self {
        Self {
            tensors: Tensors::new(checkpoint),
            limits: Limits::default(),
            trunk: Vec::new(),
            constant_bytes: 0,
            experts: Vec::new(),
            tables: Vec::new(),
            history_tokens: 0,
            options,
            state: Vec::new(),
            scratch_width: 0,
            outputs_width: 0,
        }
    }
}

impl Loader for CensusLoader<'_> {
    type Weight = ();
    type Buf = ();

    fn tensors(&self) -> &Tensors<'_> {
        &self.tensors
    }

    fn matrix(
        &mut self,
        name: &str,
        shape: [usize; 2],
        usage: Use,
        _: &[Range<usize>],
    ) -> Result<()> {
        let Stored { info, encoding, .. } = self.tensors.matrix(name, &shape)?;
        let [d_out, d_in] = shape;
        self.limits.d_in = self.limits.d_in.max(d_in);
        let loaded_bytes = d_out * encoding.row_bytes(d_in);
        let shape = info.shape.clone();
        self.trunk.push(TrunkTensor {
            name: name.to_owned(),
            shape,
            encoding,
            usage,
            loaded_bytes,
        });
        Ok(())
    }

    fn vector(&mut self, name: &str, len: usize, _: f32) -> Result<()> {
        let (info, encoding) = self.tensors.require(name, &[len])?;
        self.trunk.push(TrunkTensor {
            name: name.to_owned(),
            shape: info.shape.clone(),
            encoding,
            usage: Use::Exact,
            loaded_bytes: len * 4,
        });
        Ok(())
    }

    fn bias(&mut self, name: &str, len: usize, _: &[Range<usize>]) -> Result<()> {
        self.vector(name, len, 0.0)
    }

    fn scalar(&mut self, name: &str) -> Result<f32> {
        self.vector(name, 1, 0.0)?;
        Ok(0.0)
    }

    fn constants(&mut self, values: &[f32]) {
        self.constant_bytes += values.len() * 4;
    }

    fn scratch(&mut self, width: usize) {
        self.scratch_width += width;
    }

    fn outputs(&mut self, width: usize) {
        self.outputs_width += width;
    }

    fn state(&mut self, name: String, kind: StateKind) -> usize {
        self.state.push(StateDecl { name, kind });
        self.state.len() - 1
    }

    fn experts(&mut self, shape: &ExpertShape, prefix: &str) -> Result<ExpertLayout> {
        let table = self.tensors.experts(shape, prefix)?;
        let layout = table.layout;
        self.experts.push(table);
        let limits = &mut self.limits;
        limits.n_experts = limits.n_experts.max(shape.n_experts);
        limits.d_expert = limits.d_expert.max(shape.d_expert);
        Ok(layout)
    }

    fn table(&mut self, shape: &TableShape) -> Result<usize> {
        let table = tables::locate(&mut self.tensors, shape)?;
        self.tables.push(table);
        Ok(self.tables.len() - 1)
    }

    fn integers(&mut self, name: &str, len: usize) -> Result<Option<Vec<i64>>> {
        self.tensors.integers(name, len)
    }

    fn history(&mut self, tokens: usize) {
        self.history_tokens = self.history_tokens.max(tokens);
    }

    fn options(&self) -> ModelOptions {
        self.options
    }

    fn limits(&mut self) -> &mut Limits {
        &mut self.limits
    }
}
