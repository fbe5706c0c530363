//! Traces of routes: which experts each layer used, token by token.

use crate::error::StoreError;
use std::io::{self, Write};

/// Begins a binary trace.
const MAGIC: &[u8; 8] = b"SMROUTE1";

/// A trace of routes.
///
/// Text form: a line for each visit of a layer, `layer: expert expert ...`; a step (a token)
/// begins where the layer is not above the one before. Empty lines and what follows a `#` do not
/// count. Binary form: `SMROUTE1`, then numbers of four bytes, little endian: for each visit the
/// layer, the count of experts, and the experts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    n_layers: u32,
    n_experts: u32,
    visits: Vec<Visit>,
    experts: Vec<u32>,
    n_steps: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Visit {
    step: u64,
    layer: u32,
    /// End of its experts.
    end: usize,
}

impl Trace {
    /// An empty trace; layers and experts beyond these numbers extend it.
    pub fn new(n_layers: u32, n_experts: u32) -> Self {
        Self { n_layers, n_experts, ..Self::default() }
    }

    /// Adds a visit. Experts that stand twice count once.
    pub fn push(&mut self, layer: u32, experts: &[u32]) {
        let begins = self.visits.last().is_none_or(|last| layer <= last.layer);
        self.n_steps += u64::from(begins);
        let start = self.experts.len();
        for &expert in experts {
            if !self.experts[start..].contains(&expert) {
                self.experts.push(expert);
            }
            self.n_experts = self.n_experts.max(expert + 1);
        }
        self.n_layers = self.n_layers.max(layer + 1);
        self.visits.push(Visit { step: self.n_steps - 1, layer, end: self.experts.len() });
    }

    /// Layer count.
    pub fn n_layers(&self) -> u32 {
        self.n_layers
    }
    /// Experts of each layer.
    pub fn n_experts(&self) -> u32 {
        self.n_experts
    }
    /// Step count.
    pub fn n_steps(&self) -> u64 {
        self.n_steps
    }
    /// Experts used, all told.
    pub fn accesses(&self) -> usize {
        self.experts.len()
    }

    /// Step, layer and experts of each visit.
    pub fn visits(&self) -> impl Iterator<Item = (u64, u32, &[u32])> {
        let starts = std::iter::once(0).chain(self.visits.iter().map(|visit| visit.end));
        starts
            .zip(&self.visits)
            .map(|(start, visit)| (visit.step, visit.layer, &self.experts[start..visit.end]))
    }

    /// Reads either form.
    ///
    /// # Errors
    /// [`StoreError::Trace`] where it is neither.
    pub fn parse(bytes: &[u8]) -> Result<Self, StoreError> {
        match bytes.strip_prefix(MAGIC) {
            Some(rest) => Self::parse_binary(rest),
            None => Self::parse_text(&String::from_utf8_lossy(bytes)),
        }
    }

    fn parse_text(text: &str) -> Result<Self, StoreError> {
        let (mut trace, mut experts) = (Self::default(), Vec::new());
        for (line, text) in (1..).zip(text.lines()) {
            let text = text.split('#').next().unwrap_or_default().trim();
            if text.is_empty() {
                continue;
            }
            let error = || StoreError::Trace { line, text: text.into() };
            let number = |text: &str| text.parse().ok().filter(|&n: &u32| n < LIMIT);
            let (layer, rest) = text.split_once(':').ok_or_else(error)?;
            let layer = number(layer.trim()).ok_or_else(error)?;
            experts.clear();
            for expert in rest.split_whitespace() {
                experts.push(number(expert).ok_or_else(error)?);
            }
            trace.push(layer, &experts);
        }
        Ok(trace)
    }

    fn parse_binary(bytes: &[u8]) -> Result<Self, StoreError> {
        let (words, rest) = bytes.as_chunks::<4>();
        let mut words = words.iter().map(|&word| u32::from_le_bytes(word));
        let (mut trace, mut experts, mut record) = (Self::default(), Vec::new(), 1);
        let error = |line, text: &str| StoreError::Trace { line, text: text.into() };
        while let Some(layer) = words.next() {
            let count = words.next().ok_or_else(|| error(record, "no count"))?;
            experts.clear();
            experts.extend(words.by_ref().take(count as usize));
            if experts.len() != count as usize {
                return Err(error(record, "fewer experts than its count"));
            }
            if layer >= LIMIT || experts.iter().any(|&expert| expert >= LIMIT) {
                return Err(error(record, "a number beyond all models"));
            }
            trace.push(layer, &experts);
            record += 1;
        }
        if rest.is_empty() { Ok(trace) } else { Err(error(record, "part of a number")) }
    }

    /// Writes the text form.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn write_text(&self, to: &mut dyn Write) -> io::Result<()> {
        for (_, layer, experts) in self.visits() {
            write!(to, "{layer}:")?;
            experts.iter().try_for_each(|expert| write!(to, " {expert}"))?;
            writeln!(to)?;
        }
        Ok(())
    }

    /// Writes the binary form.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn write_binary(&self, to: &mut dyn Write) -> io::Result<()> {
        to.write_all(MAGIC)?;
        for (_, layer, experts) in self.visits() {
            for number in [layer, experts.len() as u32].iter().chain(experts) {
                to.write_all(&number.to_le_bytes())?;
            }
        }
        Ok(())
    }
}

/// No model has as many layers, or experts in a layer; a greater number is a broken file, and
/// tables of its size would not fit in memory.
const LIMIT: u32 = 1 << 16;
