//! What a model weighs, from its config alone.

use crate::config::{Result, Trunk};
use crate::experts::{ExpertShape, Fused};
use crate::loader::{Loader, StateKind, Tensors, Use};
use crate::registry::ModelOptions;
use crate::tables::TableShape;
use snowmelt_backend::{ExpertLayout, Limits, MatrixLayout};
use snowmelt_weights::{Checkpoint, Encoding};
use std::ops::Range;

/// Numbers of values, without any file of weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outline {
    /// Family name.
    pub family: &'static str,
    /// Layers.
    pub n_layers: usize,
    /// Vocabulary size.
    pub n_vocab: usize,
    /// Longest context of the config, in tokens.
    pub context_max: usize,
    /// Values of the trunk: everything but routed experts and lookup tables.
    pub trunk: u64,
    /// Values of lookup tables, of which a token reads a few rows.
    pub table: u64,
    /// Values of those rows.
    pub table_row: u64,
    /// Values of the embedding where only one row of it is read.
    pub embedding: u64,
    /// Values of one row of the embedding.
    pub embedding_row: u64,
    /// Layers of experts: how many, values of one, and how many a token chooses.
    pub experts: Vec<ExpertOutline>,
    /// Values of per-token state that grow for ever.
    pub per_token: u64,
    /// Values a token of state that is read within a window only, with that window.
    pub windows: Vec<(u64, u64)>,
    /// f32 values of per-sequence state.
    pub per_sequence: u64,
}

/// The experts of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertOutline {
    /// Experts.
    pub count: u64,
    /// Values of one.
    pub values: u64,
    /// Choices of a token.
    pub top_k: u64,
}

impl Outline {
    /// All values.
    pub fn total(&self) -> u64 {
        self.trunk + self.table + self.expert_values()
    }

    /// Values of all routed experts.
    pub fn expert_values(&self) -> u64 {
        self.experts.iter().map(|layer| layer.count * layer.values).sum()
    }

    /// Number of routed experts.
    pub fn n_experts(&self) -> u64 {
        self.experts.iter().map(|layer| layer.count).sum()
    }

    /// Values of the experts that one token chooses.
    pub fn chosen_values(&self) -> u64 {
        self.experts.iter().map(|layer| layer.top_k * layer.values).sum()
    }

    /// Values that one token reads.
    pub fn touched(&self) -> u64 {
        let rows = self.embedding_row + self.table_row;
        self.trunk - self.embedding + rows + self.chosen_values()
    }
}

/// The loader that counts what a family asks for.
#[derive(Debug)]
pub(crate) struct OutlineLoader<'a> {
    tensors: Tensors<'a>,
    limits: Limits,
    outline: Outline,
    embedding: u64,
    tables: usize,
    /// Width of each state that grows by the token, with its window.
    per_token: Vec<(usize, Option<usize>)>,
}

impl<'a> OutlineLoader<'a> {
    /// `checkpoint` holds a config and nothing else.
    pub(crate) fn new(checkpoint: &'a Checkpoint, family: &'static str) -> Self {
        let outline = Outline {
            family,
            n_layers: 0,
            n_vocab: 0,
            context_max: 0,
            trunk: 0,
            table: 0,
            table_row: 0,
            embedding: 0,
            embedding_row: 0,
            experts: Vec::new(),
            per_token: 0,
            windows: Vec::new(),
            per_sequence: 0,
        };
        let tensors = Tensors::new(checkpoint);
        Self {
            tensors,
            limits: Limits::default(),
            outline,
            embedding: 0,
            tables: 0,
            per_token: Vec::new(),
        }
    }

    /// The sums.
    pub(crate) fn finish(mut self, trunk: Trunk) -> Outline {
        let outline = &mut self.outline;
        outline.n_layers = trunk.n_layers;
        outline.n_vocab = trunk.n_vocab;
        outline.context_max = trunk.context_max;
        outline.embedding_row = trunk.d_model as u64;
        // A head tied to the embedding is read whole.
        outline.embedding = if trunk.tied { 0 } else { self.embedding };
        for (width, window) in self.per_token {
            match window {
                None => outline.per_token += width as u64,
                Some(window) => outline.windows.push((width as u64, window as u64)),
            }
        }
        self.outline
    }
}

impl Loader for OutlineLoader<'_> {
    type Weight = ();
    type Buf = ();

    fn tensors(&self) -> &Tensors<'_> {
        &self.tensors
    }

    fn matrix(&mut self, name: &str, shape: [usize; 2], _: Use, _: &[Range<usize>]) -> Result<()> {
        let values = shape[0] as u64 * shape[1] as u64;
        self.outline.trunk += values;
        if name == self.tensors.trunk("embed_tokens.weight") {
            self.embedding = values;
        }
        Ok(())
    }

    fn vector(&mut self, _: &str, len: usize, _: f32) -> Result<()> {
        self.outline.trunk += len as u64;
        Ok(())
    }

    fn bias(&mut self, name: &str, len: usize, _: &[Range<usize>]) -> Result<()> {
        self.vector(name, len, 0.0)
    }

    fn scalar(&mut self, name: &str) -> Result<f32> {
        self.vector(name, 1, 0.0)?;
        Ok(0.0)
    }

    fn constants(&mut self, _: &[f32]) {}

    fn scratch(&mut self, _: usize) {}

    fn outputs(&mut self, _: usize) {}

    fn state(&mut self, _: String, kind: StateKind) -> usize {
        let width = match kind {
            StateKind::PerToken { width } => width,
            StateKind::PerSequence { len } => {
                self.outline.per_sequence += len as u64;
                0
            }
        };
        self.per_token.push((width, None));
        self.per_token.len() - 1
    }

    fn window(&mut self, state: usize, tokens: usize) {
        self.per_token[state].1 = Some(tokens);
    }

    fn experts(&mut self, shape: &ExpertShape, _: &str) -> Result<ExpertLayout> {
        let (d, f) = (shape.d_model, shape.d_expert);
        let plain = |d_out, d_in| MatrixLayout::plain(Encoding::F32, d_out, d_in, 0);
        let biases = (shape.fused == Fused::Turns).then(|| [plain(f, 1), plain(f, 1), plain(d, 1)]);
        let (gate, up, down) = (plain(f, d), plain(f, d), plain(d, f));
        let layout = ExpertLayout { glu: shape.glu, gate, up, down, biases };
        let values = layout.all_pieces().map(|piece| piece.d_out as u64 * piece.d_in as u64);
        let values = values.sum::<u64>();
        let (count, top_k) = (shape.n_experts as u64, self.limits.top_k as u64);
        self.outline.experts.push(ExpertOutline { count, values, top_k });
        Ok(layout)
    }

    fn table(&mut self, shape: &TableShape) -> Result<usize> {
        self.outline.table += shape.rows as u64 * shape.width as u64;
        self.outline.table_row += shape.rows_a_token as u64 * shape.width as u64;
        self.tables += 1;
        Ok(self.tables - 1)
    }

    fn integers(&mut self, _: &str, _: usize) -> Result<Option<Vec<i64>>> {
        Ok(None)
    }

    fn history(&mut self, _: usize) {}

    fn options(&self) -> ModelOptions {
        ModelOptions::default()
    }

    fn limits(&mut self) -> &mut Limits {
        &mut self.limits
    }
}
