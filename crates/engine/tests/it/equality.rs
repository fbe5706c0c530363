//! Logits are the same bytes whatever the cache, the reader, the threads, the chunk, the company.
//!
//! CI runs all pairs of settings; `cargo xtask equality` sets `SNOWMELT_EQUALITY=full` for the full
//! product.

use crate::support::{cpu, families, open, packed_from, root};
use snowmelt_backend_cpu::Activations;
use snowmelt_engine::{Engine, EngineOptions, Feed, Io, ModelOptions, Outputs, Residency};
use snowmelt_weights::{Checkpoint, Encoding};

/// Where experts come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Experts {
    Streamed(Io),
    Mapped,
    Resident,
}

/// Slots, of all experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slots {
    Fewest,
    Quarter,
    Half,
    All,
}

#[derive(Clone, Copy, Debug)]
struct Setting {
    experts: Experts,
    slots: Slots,
    threads: usize,
    chunk: usize,
    company: bool,
}

const EXPERTS: [Experts; 7] = [
    Experts::Streamed(Io::Auto),
    Experts::Streamed(Io::Uring),
    Experts::Streamed(Io::Pread),
    Experts::Streamed(Io::PreadBuffered),
    Experts::Streamed(Io::Mmap),
    Experts::Mapped,
    Experts::Resident,
];
const SLOTS: [Slots; 4] = [Slots::Fewest, Slots::Quarter, Slots::Half, Slots::All];
const THREADS: [usize; 2] = [1, 2];
const CHUNKS: [usize; 4] = [1, 7, 64, usize::MAX];

/// Sizes of the axes, in the order of [`setting`].
const AXES: [usize; 5] = [EXPERTS.len(), SLOTS.len(), THREADS.len(), CHUNKS.len(), 2];

fn setting(index: [usize; 5]) -> Setting {
    Setting {
        experts: EXPERTS[index[0]],
        slots: SLOTS[index[1]],
        threads: THREADS[index[2]],
        chunk: CHUNKS[index[3]],
        company: index[4] == 1,
    }
}

/// Settings so that every pair of values of two axes occurs.
fn all_pairs() -> Vec<[usize; 5]> {
    let mut missing = std::collections::BTreeSet::new();
    for (a, &of_a) in AXES.iter().enumerate() {
        for (b, &of_b) in AXES.iter().enumerate().skip(a + 1) {
            missing.extend((0..of_a).flat_map(|x| (0..of_b).map(move |y| (a, x, b, y))));
        }
    }
    let pairs = |index: &[usize; 5]| {
        let index = *index;
        (0..5).flat_map(move |a| (a + 1..5).map(move |b| (a, index[a], b, index[b])))
    };
    let mut chosen = Vec::new();
    while !missing.is_empty() {
        let gain = |index: &[usize; 5]| pairs(index).filter(|p| missing.contains(p)).count();
        let best = product().into_iter().max_by_key(gain).unwrap();
        for pair in pairs(&best) {
            missing.remove(&pair);
        }
        chosen.push(best);
    }
    chosen
}

fn product() -> Vec<[usize; 5]> {
    let mut all = vec![[0; 5]];
    for (axis, &size) in AXES.iter().enumerate() {
        all = all
            .into_iter()
            .flat_map(|index| {
                (0..size).map(move |value| {
                    let mut index = index;
                    index[axis] = value;
                    index
                })
            })
            .collect();
    }
    all
}

fn is_full() -> bool {
    std::env::var("SNOWMELT_EQUALITY").is_ok_and(|value| value == "full")
}

/// Tokens that visit many experts.
fn text(seed: u32, len: usize, n_vocab: usize) -> Vec<u32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % n_vocab as u32
    };
    (0..len).map(|_| next()).collect()
}

/// Bits of the logits of every token of a text.
fn logits(checkpoint: &Checkpoint, activations: Activations, setting: Setting) -> Vec<u32> {
    let census = snowmelt_model::census(checkpoint, ModelOptions::default()).unwrap();
    let (experts, top_k) = (census.n_experts_total(), census.limits.top_k);
    let slots = match setting.slots {
        Slots::Fewest => top_k,
        Slots::Quarter => (experts / 4).max(top_k),
        Slots::Half => experts / 2,
        Slots::All => experts,
    };
    let (residency, io) = match setting.experts {
        Experts::Streamed(io) => (Residency::Streamed, io),
        Experts::Mapped => (Residency::Mapped, Io::Auto),
        Experts::Resident => (Residency::Resident, Io::Auto),
    };
    let tokens = text(1, 83, census.n_vocab);
    let others = [text(2, 200, census.n_vocab), text(3, 200, census.n_vocab)];
    let chunk = setting.chunk.min(tokens.len());
    let options = EngineOptions {
        memory_bytes: Some(2 << 30),
        slots: (residency == Residency::Streamed && experts > 0).then_some(slots as u32),
        context_tokens: Some(256),
        sessions: 3,
        prefill_chunk: Some(chunk + 4),
        residency,
        io,
        poison: true,
        ..EngineOptions::default()
    };
    let backend = cpu(setting.threads, activations);
    let mut engine = Engine::open(checkpoint, backend, &options).unwrap();
    // The company comes first, so that the session of interest is not in place 0.
    let company = [engine.session().unwrap(), engine.session().unwrap()];
    let session = engine.session().unwrap();
    let mut bits = Vec::new();
    for (step, chunk) in tokens.chunks(chunk).enumerate() {
        let mut feed = Vec::new();
        if setting.company {
            let (a, b) = (2 * step, 2 * step);
            let outputs = Outputs::Last;
            feed.push(Feed { session: company[0], tokens: &others[0][a..a + 2], outputs });
            feed.push(Feed { session, tokens: chunk, outputs: Outputs::All });
            feed.push(Feed { session: company[1], tokens: &others[1][b..b + 2], outputs });
        } else {
            feed.push(Feed { session, tokens: chunk, outputs: Outputs::All });
        }
        let mine = usize::from(setting.company);
        let mut sink = |feed: usize, _: usize, logits: &[f32]| {
            if feed == mine {
                bits.extend(logits.iter().map(|logit| logit.to_bits()));
            }
        };
        engine.step(&feed, &mut sink).unwrap();
    }
    assert_eq!(bits.len(), tokens.len() * census.n_vocab);
    bits
}

fn check(name: &str, checkpoint: &Checkpoint, modes: &[Activations]) {
    let settings = if is_full() { product() } else { all_pairs() };
    for &activations in modes {
        let base = Setting {
            experts: Experts::Resident,
            slots: Slots::All,
            threads: 1,
            chunk: usize::MAX,
            company: false,
        };
        let expected = logits(checkpoint, activations, base);
        assert!(expected.iter().all(|bits| f32::from_bits(*bits).is_finite()), "{name}");
        for &index in &settings {
            let setting = setting(index);
            let got = logits(checkpoint, activations, setting);
            let first = got.iter().zip(&expected).position(|(got, expected)| got != expected);
            assert_eq!(first, None, "{name} {activations:?} {setting:?}: first differing logit");
        }
    }
    println!("{name}: {} settings x {} modes, equal bytes", settings.len(), modes.len());
}

const MODES: [Activations; 3] = [Activations::F32, Activations::I16, Activations::I8];

#[test]
fn families_as_published() {
    for family in &families() {
        check(family, &open(family), &MODES);
    }
}

#[test]
fn families_packed_and_quantised() {
    for family in &families() {
        let encoding = Some(Encoding::Q4G32);
        let (_folder, checkpoint) = packed_from(&open(family), encoding, Some(Encoding::Q8));
        check(&format!("{family} packed q4g32, q8"), &checkpoint, &MODES);
    }
}

#[test]
fn tiny_as_shipped() {
    let folder = root().join("models/tiny/container");
    check("tiny", &Checkpoint::open(&folder).unwrap(), &MODES);
}

/// The bf16 original, where `../shared` is there.
#[test]
fn tiny_original() {
    let folder = root().join("../shared/models/tiny-moe");
    if !folder.exists() {
        println!("skipped: {} is missing", folder.display());
        return;
    }
    check("tiny bf16", &Checkpoint::open(&folder).unwrap(), &MODES);
}

/// The container in memory, as the binary embeds it: no file is read.
#[test]
fn from_memory() {
    let checkpoint = open("qwen3_5_moe");
    let (folder, packed) = packed_from(&checkpoint, None, None);
    let in_memory = crate::support::in_memory(folder.path());
    for activations in MODES {
        for index in all_pairs().into_iter().filter(|index| index[0] == 0 || index[0] >= 5) {
            let setting = setting(index);
            let expected = logits(&packed, activations, setting);
            assert!(logits(&in_memory, activations, setting) == expected, "{setting:?}");
        }
    }
}
