//! Several sequences and the steps they are cut into.

use super::case::Way;
use crate::rows::{PAGE_TOKENS, Rows};
use std::ops::Range;

/// Sequences of tokens. Data of a case lies by sequence, then by position: `[tokens, width]`.
#[derive(Clone)]
pub(super) struct Timeline {
    lengths: Vec<usize>,
    /// Position of every sequence's first token.
    first: usize,
}

/// What one step computes: of each sequence, which of its tokens.
pub(super) type Step = Vec<(usize, Range<usize>)>;

/// Rows of per-sequence buffers: more than sequences, so that some stay unused.
pub(super) const N_FIXED: usize = 7;

/// Row of per-sequence buffers that a sequence uses; never in order.
pub(super) fn fixed(sequence: usize) -> usize {
    (3 * sequence + 2) % N_FIXED
}

impl Timeline {
    pub(super) fn new(lengths: &[usize]) -> Self {
        assert!(lengths.len() < N_FIXED, "unused rows of state are wanted");
        Self { lengths: lengths.to_vec(), first: 0 }
    }

    /// The same tokens at later positions.
    pub(super) fn starting_at(self, first: usize) -> Self {
        Self { first, ..self }
    }

    pub(super) fn tokens(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// All tokens in one step, by their numbers.
    pub(super) fn whole(&self) -> Step {
        self.lengths.iter().enumerate().map(|(s, length)| (s, 0..*length)).collect()
    }

    /// Pages of all sequences, with some to spare.
    pub(super) fn n_pages(&self) -> usize {
        self.lengths.len() * (self.pages_each() + 1)
    }

    fn pages_each(&self) -> usize {
        let longest = self.lengths.iter().max().copied().unwrap_or(0);
        (self.first + longest).div_ceil(PAGE_TOKENS)
    }

    /// Pages of a sequence, by position: descending, and between those of the others.
    pub(super) fn pages(&self, sequence: usize) -> impl Iterator<Item = u32> {
        let (each, sequences) = (self.pages_each(), self.lengths.len());
        (0..each).map(move |page| ((each - page) * sequences + sequence) as u32)
    }

    /// Cuts the sequences into steps.
    pub(super) fn steps(&self, way: Way) -> Vec<Step> {
        let cut = |s: usize, index: usize| {
            let from = index.saturating_mul(way.chunk).min(self.lengths[s]);
            (s, from..from.saturating_add(way.chunk).min(self.lengths[s]))
        };
        let count = |s: usize| self.lengths[s].div_ceil(way.chunk);
        let all = 0..self.lengths.len();
        if way.alone {
            // The last sequence first, so that "alone" is another order too.
            let alone = |s| (0..count(s)).map(move |index| vec![cut(s, index)]);
            return all.rev().flat_map(alone).collect();
        }
        let together = |index| {
            let step = all.clone().map(|s| cut(s, index));
            step.filter(|(_, tokens)| !tokens.is_empty()).collect()
        };
        (0..all.clone().map(count).max().unwrap_or(0)).map(together).collect()
    }

    /// The rows of a step. `token` and `output` are asked with the number of the token.
    pub(super) fn rows_with(
        &self,
        step: &Step,
        token: impl Fn(usize) -> u32,
        output: impl Fn(usize) -> bool,
    ) -> Rows {
        let mut rows = Rows::default();
        rows.rewrite(|draft| {
            for (s, tokens) in step {
                draft.sequence(fixed(*s) as u32, self.pages(*s));
                for at in tokens.clone() {
                    let index = self.start(*s) + at;
                    draft.row((self.first + at) as u32, token(index), output(index));
                }
            }
        });
        rows
    }

    /// The rows of a step, where tokens do not matter.
    pub(super) fn rows(&self, step: &Step) -> Rows {
        self.rows_with(step, |_| 0, |_| true)
    }

    fn start(&self, sequence: usize) -> usize {
        self.lengths[..sequence].iter().sum()
    }

    /// Numbers of the tokens of a step, in row order.
    pub(super) fn numbers(&self, step: &Step) -> Vec<usize> {
        let of = |(s, tokens): &(usize, Range<usize>)| {
            let start = self.start(*s);
            tokens.clone().map(move |at| start + at)
        };
        step.iter().flat_map(of).collect()
    }

    /// Rows of `all: [tokens, width]` that belong to a step.
    pub(super) fn gather(&self, step: &Step, all: &[f32], width: usize) -> Vec<f32> {
        let row = |at: usize| all[at * width..][..width].to_vec();
        self.numbers(step).into_iter().flat_map(row).collect()
    }

    /// The way back.
    pub(super) fn scatter(&self, step: &Step, rows: &[f32], width: usize, all: &mut [f32]) {
        for (at, row) in self.numbers(step).into_iter().zip(rows.chunks_exact(width)) {
            all[at * width..][..width].copy_from_slice(row);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_is_in_one_step() {
        let timeline = Timeline::new(&[5, 1, 40]);
        for way in Way::CHUNKS {
            let steps = timeline.steps(way);
            let mut numbers: Vec<usize> =
                steps.iter().flat_map(|step| timeline.numbers(step)).collect();
            numbers.sort_unstable();
            assert_eq!(numbers, (0..46).collect::<Vec<_>>(), "{}", way.name);
            let longest = steps.iter().flatten().map(|(_, tokens)| tokens.len()).max();
            assert!(longest <= Some(way.chunk), "{}", way.name);
        }
    }

    #[test]
    fn pages_and_state_are_nobody_elses() {
        let timeline = Timeline::new(&[5, 1, 40, 2]).starting_at(30);
        let mut pages: Vec<u32> = (0..4).flat_map(|s| timeline.pages(s)).collect();
        let count = pages.len();
        pages.sort_unstable();
        pages.dedup();
        assert_eq!(pages.len(), count);
        assert!((pages[count - 1] as usize) < timeline.n_pages());
        let mut fixed: Vec<usize> = (0..6).map(fixed).collect();
        fixed.sort_unstable();
        fixed.dedup();
        assert_eq!(fixed.len(), 6);
    }
}
