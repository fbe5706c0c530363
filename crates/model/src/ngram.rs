//! Row numbers of n-gram embeddings: hashes of the last tokens, which follow from ids alone.
//!
//! ```text
//! hash_m(t) = XOR over i < m of token[t - i] * multiplier[i], for m = 2..=size
//! row(t, j) = hash_m(t) mod vocabulary[j] + offset[j], for each head j of each m
//! ```
//! Nothing is seen past the last end-of-text token before `t`, nor before the start: both read as
//! end of text. Source: transformers `models/qwen4_exp/modeling_qwen4_exp.py`.

use crate::config::{Result, multiple, positive, refuse};
use crate::error::ModelError;
use crate::loader::Loader;
use snowmelt_backend::Rows;
use snowmelt_weights::ConfigView;

/// Indices of the layers that `ple_layer_ids` names, which counts from one.
pub(crate) fn layers(text: &ConfigView<'_>, n_layers: usize) -> Result<Vec<usize>> {
    let field = "ple_layer_ids";
    let mut layers = Vec::new();
    for id in text.opt_usizes(field)?.unwrap_or_default() {
        let layer = id.checked_sub(1).filter(|&layer| layer < n_layers);
        let Some(layer) = layer else {
            return refuse(field, id, format!("1 to `num_hidden_layers` = {n_layers}"));
        };
        if layers.contains(&layer) {
            return refuse(field, id, "each layer once");
        }
        layers.push(layer);
    }
    Ok(layers)
}

/// Fields that all n-gram tables of a model share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NgramShape {
    /// Longest n-gram.
    pub(crate) size: usize,
    /// Heads of each length from 2 on.
    heads: usize,
    base: usize,
    divisor: usize,
    pub(crate) parts: usize,
    seed: u64,
    n_vocab: usize,
    eos: u32,
    /// Width of the rows of all heads together.
    pub(crate) d_embed: usize,
}

impl NgramShape {
    /// `outer` is the wrapper, which may hold `eos_token_id`.
    pub(crate) fn read(
        outer: &ConfigView<'_>,
        text: &ConfigView<'_>,
        n_vocab: usize,
    ) -> Result<Self> {
        let field = |name: &'static str| positive(name, text.usize(name)?);
        let (size, heads) = (field("ngram_size")?, field("heads_per_ngram")?);
        if size < 2 {
            return refuse("ngram_size", size, "at least 2: an n-gram has two tokens");
        }
        let Some(all) = (size - 1).checked_mul(heads) else {
            return refuse("heads_per_ngram", heads, format!("fewer with `ngram_size` = {size}"));
        };
        let of = "(ngram_size - 1) * heads_per_ngram";
        let d_embed = multiple("ple_embed_dim", field("ple_embed_dim")?, of, all)?;
        Ok(Self {
            size,
            heads,
            base: field("ngram_vocab_size_base")?,
            divisor: field("make_ngram_vocab_size_divisible_by")?,
            parts: field("split_ngram_parts")?,
            seed: text.usize_or("seed", 1234)? as u64,
            n_vocab,
            eos: end_of_text(outer, text, n_vocab)?,
            d_embed,
        })
    }

    /// Rows that a token reads.
    pub(crate) fn all_heads(&self) -> usize {
        (self.size - 1) * self.heads
    }
}

/// `eos_token_id`, the first where it is a list.
fn end_of_text(outer: &ConfigView<'_>, text: &ConfigView<'_>, n_vocab: usize) -> Result<u32> {
    let field = "eos_token_id";
    let first = |view: &ConfigView<'_>| match view.get(field) {
        Some(value) if value.is_array() => Ok(view.usizes(field)?.first().copied()),
        Some(_) => Ok(Some(view.usize(field)?)),
        None => Ok::<_, ModelError>(None),
    };
    let found = match first(text)? {
        Some(id) => Some(id),
        None => first(outer)?,
    };
    match found {
        Some(id) if id < n_vocab => Ok(id as u32),
        Some(id) => refuse(field, id, format!("below `vocab_size` = {n_vocab}")),
        None => refuse(field, "missing", "an id: n-grams do not reach past the end of a text"),
    }
}

/// The hash of one table.
#[derive(Clone, Debug)]
pub(crate) struct Ngrams {
    eos: u32,
    heads: usize,
    multipliers: Vec<u64>,
    /// Rows of each head: primes.
    vocabularies: Vec<u64>,
    /// First row of each head.
    offsets: Vec<u64>,
    /// Rows of the table, padding included.
    pub(crate) rows: usize,
}

fn splitmix64(x: u64) -> u64 {
    let x = x.wrapping_add(GOLDEN);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

fn is_prime(n: u64) -> bool {
    n >= 2 && (2..=n.isqrt()).all(|d| !n.is_multiple_of(d))
}

impl Ngrams {
    /// The table of the `rank`-th layer that has one.
    pub(crate) fn new(shape: &NgramShape, rank: usize) -> Result<Self> {
        let half = (i64::MAX as u64 / shape.n_vocab as u64 / 2).max(1);
        let multiplier = |i: usize| {
            let salt = (rank as u64).wrapping_mul(10_007);
            let step = GOLDEN.wrapping_mul(i as u64 + 1);
            let drawn = splitmix64(shape.seed.wrapping_add(salt).wrapping_add(step));
            2 * (drawn % half) + 1
        };
        let all = shape.all_heads();
        let primes = (shape.base as u64..).filter(|&n| is_prime(n));
        let vocabularies: Vec<u64> = primes.skip(rank * all).take(all).collect();
        let mut end = 0;
        let mut place = |vocabulary: &u64| {
            end += vocabulary;
            end - vocabulary
        };
        let offsets = vocabularies.iter().map(&mut place).collect();
        let Some(rows) = (end as usize).checked_next_multiple_of(shape.divisor) else {
            let expected = format!("less with tables of {end} rows");
            return refuse("make_ngram_vocab_size_divisible_by", shape.divisor, expected);
        };
        if !rows.is_multiple_of(shape.parts) {
            let expected = format!("a divisor of the {rows} rows of the n-gram table");
            return refuse("split_ngram_parts", shape.parts, expected);
        }
        Ok(Self {
            eos: shape.eos,
            heads: shape.heads,
            multipliers: (0..shape.size).map(multiplier).collect(),
            vocabularies,
            offsets,
            rows,
        })
    }

    /// Compares with what the checkpoint holds of it, if anything; `name`: where buffers lie.
    pub(crate) fn check<L: Loader>(&self, l: &mut L, name: &str) -> Result<()> {
        let buffers = [
            ("layer_multipliers", &self.multipliers),
            ("ngram_heads_vocab_sizes", &self.vocabularies),
            ("ngram_heads_offsets", &self.offsets),
        ];
        for (part, computed) in buffers {
            let tensor = format!("{name}.{part}");
            let Some(stored) = l.integers(&tensor, computed.len())? else { continue };
            let mut pairs = stored.iter().zip(computed);
            let differs = |(stored, computed): (&i64, &u64)| *stored as u64 != *computed;
            if let Some(at) = pairs.position(differs) {
                return Err(ModelError::Buffer {
                    tensor,
                    found: format!("{} at index {at}", stored[at]),
                    expected: format!("{} by the config", computed[at]),
                });
            }
        }
        Ok(())
    }

    /// Row numbers of all rows of a step, `[n, heads]`.
    pub(crate) fn numbers<'a>(&'a self, rows: &'a Rows) -> impl Iterator<Item = u64> + 'a {
        rows.sequences().iter().flat_map(move |sequence| {
            let (first, history) = (sequence.rows.start, rows.history(sequence));
            sequence.rows.clone().flat_map(move |row| {
                let back = move |i: usize| match (row - first).checked_sub(i) {
                    Some(at) => rows.rows()[first + at].token,
                    None => {
                        let before = i - (row - first);
                        let at = history.len().checked_sub(before);
                        at.map_or(self.eos, |at| history[at])
                    }
                };
                self.of_token(back)
            })
        })
    }

    /// Row numbers of one token; `back(i)` is the token `i` before it.
    fn of_token<'a>(&'a self, back: impl Fn(usize) -> u32 + 'a) -> impl Iterator<Item = u64> + 'a {
        let orders = 2..=self.multipliers.len();
        let hashes = orders.map(move |m| {
            let (mut hash, mut is_over) = (0, false);
            for (i, multiplier) in self.multipliers[..m].iter().enumerate() {
                let token = if is_over { self.eos } else { back(i) };
                hash ^= u64::from(token) * multiplier;
                is_over |= i > 0 && token == self.eos;
            }
            hash
        });
        hashes.enumerate().flat_map(move |(order, hash)| {
            let heads = order * self.heads..(order + 1) * self.heads;
            heads.map(move |j| hash % self.vocabularies[j] + self.offsets[j])
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// As the reference model: vocabulary 320, trigrams, 4 heads, end of text 7.
    fn shape() -> NgramShape {
        let config = json!({
            "ngram_size": 3, "heads_per_ngram": 4, "ple_embed_dim": 64,
            "ngram_vocab_size_base": 300, "make_ngram_vocab_size_divisible_by": 16,
            "split_ngram_parts": 4, "eos_token_id": [7, 9],
        });
        let view = ConfigView::new(&config, "config.json").expect("an object");
        NgramShape::read(&view, &view, 320).expect("a good config")
    }

    #[test]
    fn hashes_have_their_constants() {
        let first = Ngrams::new(&shape(), 0).expect("fits");
        let expected = [25_912_437_101_140_037, 21_043_097_849_633_001, 26_491_075_874_708_125];
        assert_eq!(first.multipliers, expected);
        assert_eq!(first.vocabularies, [307, 311, 313, 317, 331, 337, 347, 349]);
        assert_eq!(first.offsets, [0, 307, 618, 931, 1248, 1579, 1916, 2263]);
        assert_eq!(first.rows, 2624);
        let second = Ngrams::new(&shape(), 1).expect("fits");
        let expected = [10_031_986_262_627_403, 17_031_287_529_366_677, 4_282_197_419_670_581];
        assert_eq!(second.multipliers, expected);
        assert_eq!(second.vocabularies, [353, 359, 367, 373, 379, 383, 389, 397]);
        let published = NgramShape { base: 20_000_000, n_vocab: 248_320, heads: 8, ..shape() };
        let published = Ngrams::new(&published, 0).expect("fits");
        let expected = [23_703_573_157_769, 20_109_073_645_365, 8_052_911_324_071];
        assert_eq!(published.multipliers, expected);
        assert_eq!(published.vocabularies[15], 20_000_171);
        assert_eq!(published.rows, 320_001_446_usize.next_multiple_of(16));
    }

    /// Computed apart from this code, for the tokens 5 9 7 11 12.
    const ROWS: [[u64; 8]; 5] = [
        [148, 496, 857, 1154, 1457, 1662, 2247, 2349],
        [297, 413, 751, 1195, 1478, 1714, 2083, 2264],
        [200, 377, 849, 991, 1425, 1819, 2059, 2362],
        [295, 356, 759, 1161, 1526, 1761, 2127, 2291],
        [136, 578, 707, 1045, 1339, 1713, 2169, 2590],
    ];

    #[test]
    fn rows_follow_from_tokens_however_they_come() {
        let ngrams = Ngrams::new(&shape(), 0).expect("fits");
        let tokens = [5, 9, 7, 11, 12];
        for split in 0..tokens.len() {
            let (before, now) = tokens.split_at(split);
            let mut rows = Rows::default();
            rows.rewrite(|draft| {
                draft.sequence(0, [0]);
                draft.history(&before[before.len().saturating_sub(2)..]);
                for (i, &token) in now.iter().enumerate() {
                    draft.row((split + i) as u32, token, false);
                }
                // Another sequence, whose start has no history.
                draft.sequence(1, [1]);
                draft.row(0, 5, false);
            });
            let got: Vec<u64> = ngrams.numbers(&rows).collect();
            let expected = ROWS[split..].concat();
            assert_eq!(got[..expected.len()], expected, "{split}");
            assert_eq!(got[expected.len()..], ROWS[0], "{split}");
        }
    }
}
