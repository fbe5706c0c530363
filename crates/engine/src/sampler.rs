//! From logits to a token: penalties, temperature, truncation, one seeded draw.
//!
//! ```text
//! logits ─ bias ─ repetition ─ frequency, presence ─ temperature ─ top-k ─ top-p ─ min-p ─ draw
//! ```
//!
//! This is the order of Hugging Face's `generate` (vLLM differs only in running min-p before
//! top-k; llama.cpp truncates first and applies the temperature last, so its numbers for the same
//! options mean something else).
//!
//! Every truncation keeps a prefix of one total order: higher logit first and, of equal logits,
//! the lower id first. Top-k keeps exactly `k` tokens even when the `k`-th logit is tied; top-p
//! keeps the shortest prefix whose share of the mass left by top-k reaches `top_p`, at least one
//! token; min-p keeps what is at least `min_p` times as likely as the most likely token.
//!
//! **Numerics**: logits are f32; weights `exp((logit - max) / temperature)` and their sums are f64,
//! added in the order of ids. The generator, `exp` and the search for the cut are written out here
//! from additions and multiplications alone, so a seed gives the same tokens for the same logits on
//! every machine and with every compiler. `golden_tokens` in the tests holds it.

use std::collections::VecDeque;
use std::hash::{BuildHasher, Hasher, RandomState};

pub use options::{SamplerError, SamplerOptions};

mod options;
#[cfg(test)]
mod tests;

/// Chooses tokens for one sequence.
///
/// `sample` does not count what it returns: hand the token to [`accept`](Self::accept) once it is
/// part of the text. Everything is allocated by [`new`](Self::new); `sample` and the `accept`s
/// allocate nothing and take time in the vocabulary and in the distinct tokens seen.
///
/// To restore one from a snapshot: `new` with the same options, accept the same tokens, then
/// [`set_rng_state`](Self::set_rng_state).
pub struct Sampler {
    options: SamplerOptions,
    n_vocab: usize,
    seed: u64,
    rng: Rng,
    history: Option<History>,
    /// `[n_vocab]`, after bias and penalties.
    logits: Vec<f32>,
    /// The largest of every [`BLOCK`] logits.
    maxima: Vec<f32>,
    /// In the order of ids.
    candidates: Vec<Candidate>,
    /// Scratch of [`cut`], `[2048]`.
    buckets: Vec<f64>,
}

impl std::fmt::Debug for Sampler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sampler")
            .field("options", &self.options)
            .field("n_vocab", &self.n_vocab)
            .field("seed", &self.seed)
            .finish_non_exhaustive()
    }
}

#[derive(Clone, Copy)]
struct Candidate {
    rank: u64,
    weight: f64,
}

impl Sampler {
    /// A sampler that has seen no token.
    ///
    /// # Errors
    /// When [`SamplerOptions::validate`] does.
    pub fn new(options: SamplerOptions, n_vocab: usize) -> Result<Self, SamplerError> {
        options.validate(n_vocab)?;
        let candidates = match options.top_k {
            _ if options.temperature == 0.0 => 0,
            0 => n_vocab,
            k => k.min(n_vocab),
        };
        // The standard library's hash keys are the one source of system randomness it offers.
        let seed = options.seed.unwrap_or_else(|| RandomState::new().build_hasher().finish());
        Ok(Self {
            n_vocab,
            seed,
            rng: Rng::new(seed),
            history: options.penalises().then(|| History::new(options.penalty_window, n_vocab)),
            logits: Vec::with_capacity(n_vocab),
            maxima: Vec::with_capacity(n_vocab.div_ceil(BLOCK)),
            candidates: Vec::with_capacity(candidates),
            buckets: vec![0.0; 1 << 11],
            options,
        })
    }

    /// The options it was made with.
    pub fn options(&self) -> &SamplerOptions {
        &self.options
    }

    /// The seed of the draws: the one asked for, or the one that was taken from the system.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Counts tokens that were not generated.
    ///
    /// # Panics
    /// When one is not in the vocabulary.
    pub fn accept_prompt(&mut self, tokens: &[u32]) {
        for &token in tokens {
            self.count(token, false);
        }
    }

    /// Counts a generated token.
    ///
    /// # Panics
    /// When it is not in the vocabulary.
    pub fn accept(&mut self, token: u32) {
        self.count(token, true);
    }

    fn count(&mut self, token: u32, generated: bool) {
        let n_vocab = self.n_vocab;
        assert!((token as usize) < n_vocab, "token {token} in a vocabulary of {n_vocab}");
        if let Some(history) = &mut self.history {
            history.push(token, generated);
        }
    }

    /// Forgets all tokens and begins the draws anew from [`seed`](Self::seed).
    pub fn reset(&mut self) {
        if let Some(history) = &mut self.history {
            history.clear();
        }
        self.rng = Rng::new(self.seed);
    }

    /// The generator's state: with it and the accepted tokens the sampler continues elsewhere.
    pub fn rng_state(&self) -> [u64; 4] {
        self.rng.0
    }

    /// Continues from a state that [`rng_state`](Self::rng_state) returned.
    ///
    /// # Errors
    /// When the state is all zeros.
    pub fn set_rng_state(&mut self, state: [u64; 4]) -> Result<(), SamplerError> {
        if state == [0; 4] {
            return Err(SamplerError::RngState);
        }
        self.rng = Rng(state);
        Ok(())
    }

    /// Chooses the next token. Draws once from the generator, or never at temperature 0.
    ///
    /// **Shapes**: `logits: [n_vocab] f32`; negative infinity masks a token.
    ///
    /// # Errors
    /// When a logit is no number or positive infinity, or all tokens are masked. The sampler stays
    /// as it was.
    ///
    /// # Panics
    /// When there are not `n_vocab` logits.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, SamplerError> {
        let best = self.adjust(logits)?;
        if self.options.temperature == 0.0 {
            return Ok(best);
        }
        self.narrow(self.logits[best as usize]);
        let total: f64 = self.candidates.iter().map(|c| c.weight).sum();
        let point = self.rng.unit() * total;
        let mut sum = 0.0;
        let chosen = self.candidates.iter().find(|c| {
            sum += c.weight;
            sum > point
        });
        Ok(chosen.map_or(best, |c| id(c.rank)))
    }

    /// Fills `self.logits`; the most likely token.
    fn adjust(&mut self, logits: &[f32]) -> Result<u32, SamplerError> {
        let n_vocab = self.n_vocab;
        assert_eq!(logits.len(), n_vocab, "logits for a vocabulary of {n_vocab}");
        let refused = |logit: f32| logit.is_nan() || logit == f32::INFINITY;
        if logits.iter().fold(false, |any, &logit| any | refused(logit)) {
            let bad = logits.iter().copied().enumerate().find(|&(_, logit)| refused(logit));
            let (index, value) = bad.unwrap_or_default();
            return Err(SamplerError::NotFinite { index, value });
        }
        self.logits.clear();
        self.logits.extend_from_slice(logits);
        for &(token, bias) in &self.options.logit_bias {
            let logit = &mut self.logits[token as usize];
            let masked = *logit == f32::NEG_INFINITY || bias == f32::NEG_INFINITY;
            *logit = if masked {
                f32::NEG_INFINITY
            } else {
                saturate(f64::from(*logit) + f64::from(bias))
            };
        }
        if let Some(history) = &mut self.history {
            history.penalise(&self.options, &mut self.logits);
        }
        self.maxima.clear();
        self.maxima.extend(self.logits.chunks(BLOCK).map(maximum));
        let max = maximum(&self.maxima);
        if max == f32::NEG_INFINITY {
            return Err(SamplerError::AllMasked { n_vocab });
        }
        let best = ranked(&self.logits, &self.maxima, max).next();
        Ok(best.map_or(0, |(rank, _)| id(rank)))
    }

    /// Fills `self.candidates` from `self.logits`, whose largest is `max`.
    fn narrow(&mut self, max: f32) {
        let SamplerOptions { temperature, top_k, top_p, min_p, .. } = self.options;
        let (mut floor, mut lowest) = (f32::NEG_INFINITY, 0);
        if top_k > 0 && top_k < self.n_vocab {
            let count = |(rank, _)| (rank, 1.0);
            // The k-th largest maximum has k tokens at or above it: no need to look below.
            if top_k <= self.maxima.len() {
                let maxima =
                    self.maxima.iter().zip(0..).map(|(&max, block)| (rank(max, block), 1.0));
                let last = id(cut(maxima, top_k as f64, &mut self.buckets));
                floor = self.maxima[last as usize];
            }
            let tokens = ranked(&self.logits, &self.maxima, floor).map(count);
            lowest = cut(tokens, top_k as f64, &mut self.buckets);
        }
        let (max, temperature) = (f64::from(max), f64::from(temperature));
        let kept = ranked(&self.logits, &self.maxima, floor).filter(|&(rank, _)| rank >= lowest);
        self.candidates.clear();
        self.candidates
            .extend(kept.map(|(rank, logit)| Candidate { rank, weight: f64::from(logit) - max }));
        for candidate in &mut self.candidates {
            candidate.weight = exp(candidate.weight / temperature);
        }
        if top_p < 1.0 {
            let total: f64 = self.candidates.iter().map(|c| c.weight).sum();
            let masses = self.candidates.iter().map(|c| (c.rank, c.weight));
            let lowest = cut(masses, f64::from(top_p) * total, &mut self.buckets);
            self.candidates.retain(|c| c.rank >= lowest);
        }
        if min_p > 0.0 {
            self.candidates.retain(|c| c.weight >= f64::from(min_p));
        }
    }
}

/// Negative log-likelihood of `token` in nats: minus its log-softmax, in f64 in the order of ids.
/// Not a number if a logit is, or is positive infinity, or all are negative infinity.
///
/// # Panics
/// When the token has no logit.
pub fn nll(logits: &[f32], token: u32) -> f64 {
    let n_vocab = logits.len();
    assert!((token as usize) < n_vocab, "token {token} in a vocabulary of {n_vocab}");
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&logit| exp(f64::from(logit) - max)).sum();
    libm::log(sum) + (max - f64::from(logits[token as usize]))
}

/// Tokens a block of [`Sampler::maxima`] stands for.
const BLOCK: usize = 64;

/// The largest; negative infinity of none.
fn maximum(logits: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 8];
    for chunk in logits.chunks(lanes.len()) {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            *lane = if logit > *lane { logit } else { *lane };
        }
    }
    lanes.into_iter().fold(f32::NEG_INFINITY, f32::max)
}

/// Unmasked tokens with a logit of at least `floor`, in the order of ids: (rank, logit). Looks only
/// into blocks whose maximum allows for one.
fn ranked(logits: &[f32], maxima: &[f32], floor: f32) -> impl Iterator<Item = (u64, f32)> + Clone {
    let within = move |logit: f32| logit >= floor && logit > f32::NEG_INFINITY;
    let blocks = logits.chunks(BLOCK).zip(maxima).enumerate();
    blocks.filter(move |(_, (_, max))| within(**max)).flat_map(move |(block, (logits, _))| {
        let tokens = logits.iter().zip((block * BLOCK) as u32..);
        tokens
            .filter(move |(logit, _)| within(**logit))
            .map(|(&logit, id)| (rank(logit, id), logit))
    })
}

/// A number that is larger for a larger logit and, of equal logits, for a lower id.
fn rank(logit: f32, id: u32) -> u64 {
    let bits = (logit + 0.0).to_bits(); // -0 + 0 = 0: the two zeros are equal logits.
    let ordered = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    u64::from(ordered) << 32 | u64::from(!id)
}

fn id(rank: u64) -> u32 {
    !(rank as u32)
}

/// The lowest rank of the shortest prefix, by falling rank, whose masses reach `target`; the lowest
/// with any mass if they do not. Top-k is the prefix of count k, top-p that of mass p.
///
/// A radix descent: each of three passes adds up the masses by some bits of the logit, from the
/// top, and goes into the bucket where the target is reached; a last one walks the ids that share
/// that logit. Four passes for any distribution, and sums in an order of their own, which a
/// selection from the standard library would not promise.
///
/// **Shapes**: `items`: (rank, mass) by rising id, one with mass at least; `buckets: [2048]`.
fn cut(items: impl Iterator<Item = (u64, f64)> + Clone, target: f64, buckets: &mut [f64]) -> u64 {
    // `above` is the mass of the ranks over those that agree with `prefix` in the bits of `known`.
    let (mut above, mut prefix, mut known) = (0.0, 0_u64, 0_u64);
    for (shift, digit) in [(53, 0x7ff), (42, 0x7ff), (32, 0x3ff_u64)] {
        buckets.fill(0.0);
        items.clone().filter(|(rank, _)| rank & known == prefix).for_each(|(rank, mass)| {
            buckets[(rank >> shift & digit) as usize] += mass;
        });
        let (mut chosen, mut reached) = (0, above);
        for (index, &mass) in buckets.iter().enumerate().rev().filter(|(_, mass)| **mass > 0.0) {
            (chosen, above) = (index as u64, reached);
            reached += mass;
            if reached >= target {
                break;
            }
        }
        prefix |= chosen << shift;
        known |= digit << shift;
    }
    let mut last = prefix;
    let mut tied = items.filter(|(rank, mass)| rank & known == prefix && *mass > 0.0);
    let reached = tied.find(|&(rank, mass)| {
        last = rank;
        above += mass;
        above >= target
    });
    reached.map_or(last, |(rank, _)| rank)
}

/// Rounds to a finite logit: what bias and penalties do never masks a token.
fn saturate(logit: f64) -> f32 {
    logit.clamp(f64::from(f32::MIN), f64::from(f32::MAX)) as f32
}

/// Tokens seen, within the window.
struct History {
    /// The window's tokens, oldest first, and whether they were generated. Unused without a window.
    recent: VecDeque<(u32, bool)>,
    window: Option<usize>,
    /// `[n_vocab]`.
    counts: Vec<Count>,
    /// Every token with a count, and some that have left the window since the last `penalise`.
    distinct: Vec<u32>,
}

#[derive(Clone, Copy, Default)]
struct Count {
    prompt: u32,
    generated: u32,
    /// In `distinct`.
    listed: bool,
}

impl Count {
    fn of(&mut self, generated: bool) -> &mut u32 {
        if generated { &mut self.generated } else { &mut self.prompt }
    }
}

impl History {
    fn new(window: Option<usize>, n_vocab: usize) -> Self {
        Self {
            recent: VecDeque::with_capacity(window.unwrap_or(0)),
            window,
            counts: vec![Count::default(); n_vocab],
            distinct: Vec::with_capacity(n_vocab),
        }
    }

    fn push(&mut self, token: u32, generated: bool) {
        if let Some(window) = self.window {
            let oldest = if self.recent.len() < window { None } else { self.recent.pop_front() };
            if let Some((left, generated)) = oldest {
                *self.counts[left as usize].of(generated) -= 1;
            }
            self.recent.push_back((token, generated));
        }
        let count = &mut self.counts[token as usize];
        *count.of(generated) += 1;
        if !count.listed {
            count.listed = true;
            self.distinct.push(token);
        }
    }

    fn clear(&mut self) {
        self.recent.clear();
        for token in self.distinct.drain(..) {
            self.counts[token as usize] = Count::default();
        }
    }

    fn penalise(&mut self, options: &SamplerOptions, logits: &mut [f32]) {
        let repetition = f64::from(options.repetition_penalty);
        let frequency = f64::from(options.frequency_penalty);
        let presence = f64::from(options.presence_penalty);
        let counts = &mut self.counts;
        self.distinct.retain(|&token| {
            let count = &mut counts[token as usize];
            count.listed = count.prompt + count.generated > 0;
            let logit = &mut logits[token as usize];
            if count.listed && *logit > f32::NEG_INFINITY {
                let x = f64::from(*logit);
                let repeated = if x > 0.0 { x / repetition } else { x * repetition };
                let times = f64::from(count.generated);
                let present = if count.generated > 0 { presence } else { 0.0 };
                *logit = saturate(repeated - frequency * times - present);
            }
            count.listed
        });
    }
}

/// xoshiro256++ 1.0 of Blackman and Vigna, seeded by four outputs of splitmix64.
///
/// **Source**: <https://prng.di.unimi.it/xoshiro256plusplus.c> and `splitmix64.c` there.
struct Rng([u64; 4]);

impl Rng {
    fn new(seed: u64) -> Self {
        let mut x = seed;
        Self(std::array::from_fn(|_| {
            x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        }))
    }

    fn next(&mut self) -> u64 {
        let s = &mut self.0;
        let result = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }

    /// In `[0, 1)`: the upper 53 bits.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// `e^x` for `x` of at most 0; 0 below -708, where results would be subnormal.
///
/// **Numerics**: `x = k ln 2 + r`, the Taylor polynomial of degree 13 in `r`, within 2 units in the
/// last place (`exp_is_accurate` in the tests).
fn exp(x: f64) -> f64 {
    /// `1 / n!`, falling.
    const TAYLOR: [f64; 14] = {
        let (mut terms, mut n, mut factorial) = ([1.0; 14], 1, 1.0);
        while n < 14 {
            factorial *= n as f64;
            terms[13 - n] = 1.0 / factorial;
            n += 1;
        }
        terms
    };
    // ln 2 in two parts; the upper has zeros at its end, so that its product with k is exact.
    const LN_2_UPPER: f64 = f64::from_bits(0x3fe6_2e42_fee0_0000);
    const LN_2_LOWER: f64 = f64::from_bits(0x3dea_39ef_3579_3c76);
    const SHIFT: f64 = 1.5 * (1_u64 << 52) as f64;
    // In the lowest bits of `shifted` is k, the nearest integer, as a number of two's complement.
    let shifted = x * std::f64::consts::LOG2_E + SHIFT;
    let k = shifted - SHIFT;
    let r = (x - k * LN_2_UPPER) - k * LN_2_LOWER;
    let sum = TAYLOR.iter().fold(0.0, |sum, term| sum * r + term);
    let scaled = sum * f64::from_bits((shifted.to_bits() << 52).wrapping_add(1.0_f64.to_bits()));
    if x < -708.0 { 0.0 } else { scaled }
}
