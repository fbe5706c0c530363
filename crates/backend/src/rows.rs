//! The rows of one step.

use std::ops::Range;
use std::sync::Arc;

/// Tokens in one page of per-token state; pages lie on absolute positions.
pub const PAGE_TOKENS: usize = 32;

/// One token of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Index into [`Rows::sequences`].
    pub sequence: u32,
    /// Absolute position in its sequence.
    pub position: u32,
    /// Token id.
    pub token: u32,
}

/// Where one sequence of a step lives in *every* named state buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// Its rows in the step: adjacent, in position order.
    pub rows: Range<usize>,
    /// Row of per-sequence buffers `[n_fixed, len]`.
    pub fixed: u32,
    pages: Range<usize>,
    history: Range<usize>,
}

/// What a [`Rows`] holds while it is being written.
#[derive(Debug, Default)]
pub struct RowsDraft {
    rows: Vec<Row>,
    sequences: Vec<Sequence>,
    pages: Vec<u32>,
    history: Vec<u32>,
    outputs: Vec<u32>,
}

impl RowsDraft {
    /// Begins a sequence; its rows follow. `pages` are page numbers of per-token buffers
    /// `[n_pages, PAGE_TOKENS, width]`, by position; `fixed` is its row of per-sequence buffers.
    pub fn sequence(&mut self, fixed: u32, pages: impl IntoIterator<Item = u32>) {
        let (rows, first) = (self.rows.len(), self.pages.len());
        self.pages.extend(pages);
        let pages = first..self.pages.len();
        let history = self.history.len()..self.history.len();
        self.sequences.push(Sequence { rows: rows..rows, fixed, pages, history });
    }

    /// The last tokens of the sequence begun last that come before its first row, oldest first:
    /// as many as the family looks back at, fewer where the sequence is younger.
    ///
    /// # Panics
    /// Without a sequence.
    pub fn history(&mut self, tokens: &[u32]) {
        let sequence = self.sequences.last_mut().expect("a sequence was begun");
        let first = self.history.len();
        self.history.extend_from_slice(tokens);
        sequence.history = first..self.history.len();
    }

    /// Adds the next row of the sequence begun last; `output`: logits of this row are wanted.
    ///
    /// # Panics
    /// Without a sequence, out of position order, or on a position that has no page.
    pub fn row(&mut self, position: u32, token: u32, output: bool) {
        let index = self.sequences.len() - 1;
        let sequence = &mut self.sequences[index];
        if let Some(last) = self.rows[sequence.rows.clone()].last() {
            assert_eq!(position, last.position + 1, "rows of sequence {index} out of order");
        }
        let pages = sequence.pages.len();
        assert!(
            position as usize / PAGE_TOKENS < pages,
            "position {position} of sequence {index} lies past its {pages} pages"
        );
        if output {
            self.outputs.push(self.rows.len() as u32);
        }
        self.rows.push(Row { sequence: index as u32, position, token });
        sequence.rows.end = self.rows.len();
    }
}

/// The rows of one step. Immutable and cheap to clone: a deferred pass keeps a clone, and a device
/// backend uploads it once a step rather than once a verb.
///
/// Invariants: 1. rows of one sequence are adjacent and in position order without gaps (recurrences
/// run in row order); 2. every position has its page; 3. outputs ascend.
#[derive(Clone, Debug, Default)]
pub struct Rows(Arc<RowsDraft>);

impl Rows {
    /// Writes new rows, reusing the memory of the old ones where no pass still holds them.
    pub fn rewrite(&mut self, write: impl FnOnce(&mut RowsDraft)) {
        if Arc::get_mut(&mut self.0).is_none() {
            self.0 = Arc::default();
        }
        let draft = Arc::get_mut(&mut self.0).expect("unique by the line above");
        draft.rows.clear();
        draft.sequences.clear();
        draft.pages.clear();
        draft.history.clear();
        draft.outputs.clear();
        write(draft);
    }

    /// Reserves memory, so that a later [`Self::rewrite`] within these sizes does not allocate;
    /// `history`: tokens of all sequences together.
    pub fn reserve(&mut self, rows: usize, sequences: usize, pages: usize, history: usize) {
        self.rewrite(|draft| {
            draft.rows.reserve(rows);
            draft.outputs.reserve(rows);
            draft.sequences.reserve(sequences);
            draft.pages.reserve(pages);
            draft.history.reserve(history);
        });
    }

    /// Number of rows, `n`.
    pub fn len(&self) -> usize {
        self.0.rows.len()
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.0.rows.is_empty()
    }

    /// All rows.
    pub fn rows(&self) -> &[Row] {
        &self.0.rows
    }

    /// The sequences, each with the range of its rows.
    pub fn sequences(&self) -> &[Sequence] {
        &self.0.sequences
    }

    /// Row numbers whose logits are wanted, ascending.
    pub fn outputs(&self) -> &[u32] {
        &self.0.outputs
    }

    /// Page numbers of a sequence, by position.
    pub fn pages(&self, sequence: &Sequence) -> &[u32] {
        &self.0.pages[sequence.pages.clone()]
    }

    /// The last tokens of a sequence before its first row, oldest first.
    pub fn history(&self, sequence: &Sequence) -> &[u32] {
        &self.0.history[sequence.history.clone()]
    }

    /// Row of a per-token buffer `[n_pages * PAGE_TOKENS, width]` that holds `position`.
    pub fn token_row(&self, sequence: &Sequence, position: u32) -> usize {
        let position = position as usize;
        let page = self.pages(sequence)[position / PAGE_TOKENS] as usize;
        page * PAGE_TOKENS + position % PAGE_TOKENS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_find_their_pages() {
        let mut rows = Rows::default();
        rows.rewrite(|draft| {
            draft.sequence(3, [7, 2]);
            draft.row(31, 5, false);
            draft.row(32, 6, true);
            draft.sequence(0, [1]);
            draft.row(0, 9, true);
        });
        let [a, b] = rows.sequences() else { panic!("{rows:?}") };
        assert_eq!((a.rows.clone(), a.fixed, b.rows.clone()), (0..2, 3, 2..3));
        assert_eq!(rows.token_row(a, 31), 7 * PAGE_TOKENS + 31);
        assert_eq!(rows.token_row(a, 32), 2 * PAGE_TOKENS);
        assert_eq!(rows.outputs(), [1, 2]);
    }

    #[test]
    fn sequences_have_their_own_history() {
        let mut rows = Rows::default();
        for _ in 0..2 {
            rows.rewrite(|draft| {
                draft.sequence(0, [0]);
                draft.history(&[4, 5]);
                draft.row(2, 6, true);
                draft.sequence(1, [1]);
                draft.row(0, 9, true);
            });
        }
        let [a, b] = rows.sequences() else { panic!("{rows:?}") };
        assert_eq!((rows.history(a), rows.history(b)), (&[4, 5][..], &[][..]));
    }

    #[test]
    fn a_held_clone_is_left_alone() {
        let mut rows = Rows::default();
        rows.rewrite(|draft| {
            draft.sequence(0, [0]);
            draft.row(0, 1, true);
        });
        let held = rows.clone();
        rows.rewrite(|draft| draft.sequence(0, [0]));
        assert_eq!((held.len(), rows.len()), (1, 0));
    }

    #[test]
    #[should_panic(expected = "out of order")]
    fn gaps_are_refused() {
        Rows::default().rewrite(|draft| {
            draft.sequence(0, [0]);
            draft.row(0, 1, false);
            draft.row(2, 1, false);
        });
    }
}
