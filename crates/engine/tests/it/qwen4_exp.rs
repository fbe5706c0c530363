//! What only `qwen4_exp` has: blocks that an indexer chooses, and rows of a table on disk.

use crate::support::{cpu, fixture, in_memory, open, packed_from, synth};
use serde_json::json;
use snowmelt_backend_cpu::{Activations, CpuBackend};
use snowmelt_engine::{
    Engine, EngineError, EngineOptions, Feed, Io, ModelOptions, Outputs, Qsa, Residency, RowStats,
    Sources,
};
use snowmelt_expert_store::{
    Fault, FaultKind, FaultSource, FaultWhen, FileSpec, PreadSource, SourceOptions,
};
use snowmelt_model::StateKind;
use snowmelt_weights::{Checkpoint, verify};
use std::time::Duration;

/// End of text of the fixture.
const EOS: u32 = 7;
/// Most tokens that a query of the fixture attends to: a budget of 32 and an incomplete block of 4.
const DENSE_TOKENS: usize = 32 + 4 - 1;

fn options() -> EngineOptions {
    EngineOptions {
        memory_bytes: Some(1 << 30),
        context_tokens: Some(256),
        residency: Residency::Resident,
        ..EngineOptions::default()
    }
}

fn engine(checkpoint: &Checkpoint, options: &EngineOptions) -> Engine<CpuBackend> {
    Engine::open(checkpoint, cpu(2, Activations::F32), options).unwrap()
}

/// Bits of the logits of every token, fed in chunks to an empty session.
fn bits(engine: &mut Engine<CpuBackend>, tokens: &[u32], chunk: usize) -> Vec<u32> {
    let session = engine.session().unwrap();
    let mut bits = Vec::new();
    for chunk in tokens.chunks(chunk) {
        let sink = &mut |_: usize, logits: &[f32]| bits.extend(logits.iter().map(|l| l.to_bits()));
        engine.step_one(session, chunk, Outputs::All, sink).unwrap();
    }
    engine.close(session);
    assert!(bits.iter().all(|bits| f32::from_bits(*bits).is_finite()));
    bits
}

/// Tokens without an end of text.
fn text(len: usize) -> Vec<u32> {
    let token = |i: u32| 8 + i.wrapping_mul(2_654_435_761) % 311;
    (0..len as u32).map(token).collect()
}

#[test]
fn sparse_is_dense_up_to_the_budget_and_not_beyond() {
    let checkpoint = open("qwen4_exp");
    let dense = EngineOptions { model: ModelOptions { qsa: Qsa::Dense }, ..options() };
    let mut dense = engine(&checkpoint, &dense);
    let mut sparse = engine(&checkpoint, &options());
    let n_vocab = sparse.census().n_vocab;
    for len in [20, DENSE_TOKENS, DENSE_TOKENS + 1, 200] {
        let tokens = text(len);
        let (all, chosen) = (bits(&mut dense, &tokens, len), bits(&mut sparse, &tokens, len));
        let differs = all.iter().zip(&chosen).position(|(all, chosen)| all != chosen);
        let expected = (len > DENSE_TOKENS).then_some(DENSE_TOKENS);
        assert_eq!(differs.map(|at| at / n_vocab), expected, "first differing row of {len}");
        for chunk in [1, 5] {
            assert_eq!(bits(&mut sparse, &tokens, chunk), chosen, "{len} in chunks of {chunk}");
        }
    }
}

/// The end of a text hides what lies before it from n-grams alone; wherever chunks are cut.
#[test]
fn ends_of_text_and_chunks_do_not_change_rows() {
    let checkpoint = open("qwen4_exp");
    let mut engine = engine(&checkpoint, &options());
    let mut texts = [text(40), text(40), text(40), text(40)];
    texts[0][0] = EOS;
    texts[1][17] = EOS;
    (texts[2][17], texts[2][18]) = (EOS, EOS);
    (texts[3][17], texts[3][19]) = (EOS, EOS);
    let whole: Vec<_> = texts.iter().map(|text| bits(&mut engine, text, 40)).collect();
    for (text, whole) in texts.iter().zip(&whole) {
        for chunk in [1, 2, 3, 19] {
            assert_eq!(&bits(&mut engine, text, chunk), whole, "{text:?} by {chunk}");
        }
    }
    // In one step with others, each with its own tokens before it.
    let options = EngineOptions { sessions: 4, ..options() };
    let mut together = self::engine(&checkpoint, &options);
    let sessions: Vec<_> = texts.iter().map(|_| together.session().unwrap()).collect();
    let mut got = vec![Vec::new(); texts.len()];
    for at in (0..40).step_by(4) {
        let feed: Vec<_> = sessions
            .iter()
            .zip(&texts)
            .map(|(&session, text)| Feed {
                session,
                tokens: &text[at..at + 4],
                outputs: Outputs::All,
            })
            .collect();
        let sink = &mut |feed: usize, _: usize, logits: &[f32]| {
            got[feed].extend(logits.iter().map(|logit| logit.to_bits()));
        };
        together.step(&feed, sink).unwrap();
    }
    assert_eq!(got, whole);
}

#[test]
fn a_second_text_is_as_the_first() {
    let checkpoint = open("qwen4_exp");
    let mut engine = engine(&checkpoint, &options());
    let (first, other) = (bits(&mut engine, &text(60), 7), bits(&mut engine, &[EOS, 3, 9], 2));
    assert_eq!(bits(&mut engine, &text(60), 7), first);
    assert_eq!(bits(&mut engine, &[EOS, 3, 9], 3), other);
    let session = engine.session().unwrap();
    let again = |engine: &mut Engine<CpuBackend>| {
        engine.reset(session);
        engine.prefill(session, &text(60), &mut |_| true).unwrap();
        engine.logits(session).to_vec()
    };
    let last: Vec<u32> = again(&mut engine).iter().map(|logit| logit.to_bits()).collect();
    assert_eq!(last[..], first[first.len() - last.len()..]);
    let same: Vec<u32> = again(&mut engine).iter().map(|logit| logit.to_bits()).collect();
    assert_eq!(same, last);
}

#[test]
fn the_state_is_what_the_layers_keep() {
    let census = snowmelt_model::census(&open("qwen4_exp"), ModelOptions::default()).unwrap();
    let state: Vec<(&str, StateKind)> =
        census.state.iter().map(|decl| (decl.name.as_str(), decl.kind)).collect();
    let (fixed, token) =
        (|len| StateKind::PerSequence { len }, |width| StateKind::PerToken { width });
    // Two key heads and four value heads of 16: 128 channels, 3 columns; n-grams of 3, 4 taps over
    // 4 streams of 64; 2 heads of 32; index keys of 16.
    let (conv, delta) = (fixed(3 * 128), fixed(4 * 16 * 16));
    let expected = [
        ("layers.0.conv", conv),
        ("layers.0.delta", delta),
        ("layers.1.ple", fixed(3 * 3 * 4 * 64)),
        ("layers.1.conv", conv),
        ("layers.1.delta", delta),
        ("layers.2.conv", conv),
        ("layers.2.delta", delta),
        ("layers.3.k", token(64)),
        ("layers.3.v", token(64)),
        ("layers.3.index", token(16)),
    ];
    assert_eq!(state, expected);
    assert_eq!((census.history_tokens, census.tables.len()), (2, 1));
    let table = &census.tables[0];
    assert_eq!((table.rows(), table.row_bytes(), table.rows_a_token), (2624, 16, 8));
}

#[test]
fn a_container_carries_the_table() {
    let checkpoint = open("qwen4_exp");
    let (folder, packed) = packed_from(&checkpoint, None, None);
    verify(&packed, &mut |_, _| {}).unwrap();
    let expected = bits(&mut engine(&checkpoint, &options()), &text(60), 60);
    let memory = in_memory(folder.path());
    for (what, checkpoint) in [("packed", &packed), ("in memory", &memory)] {
        assert_eq!(bits(&mut engine(checkpoint, &options()), &text(60), 60), expected, "{what}");
    }
    let census = snowmelt_model::census(&packed, ModelOptions::default()).unwrap();
    let shard = &census.tables[0].shards[3];
    let path = packed.files()[shard.file as usize].path.clone();
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[shard.offset as usize + 1000] ^= 4;
    std::fs::write(&path, bytes).unwrap();
    let damage = verify(&packed, &mut |_, _| {}).unwrap().damage;
    assert!(damage.first[0].to_string().contains("shard_3"), "{damage:?}");
}

#[test]
fn however_rows_are_read_they_are_the_same() {
    let checkpoint = open("qwen4_exp");
    let expected = bits(&mut engine(&checkpoint, &options()), &text(90), 90);
    for io in [Io::Auto, Io::Uring, Io::Pread, Io::PreadBuffered, Io::Mmap] {
        for row_cache_bytes in [Some(0), Some(20_000), None] {
            let prefill_chunk = Some(8);
            let options = EngineOptions { io, row_cache_bytes, prefill_chunk, ..options() };
            let mut engine = engine(&checkpoint, &options);
            assert_eq!(bits(&mut engine, &text(90), 8), expected, "{io:?} {row_cache_bytes:?}");
            let RowStats { asked, hits, reads, bytes, .. } = engine.row_stats();
            assert_eq!((asked, hits + reads), (90 * 8, asked));
            assert!(bytes >= 4096 * reads && reads > 0);
        }
    }
}

/// Reads of rows that go wrong end the rows that need them, and say which.
#[test]
fn a_row_that_cannot_be_read_ends_its_session() {
    let checkpoint = open("qwen4_exp");
    let faulty = |kind, nth| {
        let file =
            |file: &snowmelt_weights::DataFile| FileSpec { path: file.path.clone(), len: file.len };
        let files: Vec<FileSpec> = checkpoint.files().iter().map(file).collect();
        let inner = PreadSource::open(&files, &SourceOptions::default()).unwrap();
        let script = [Fault { when: FaultWhen::Nth(nth), kind, times: 1 }];
        let rows = Some(Box::new(FaultSource::new(inner).with_script(script)) as _);
        let options =
            EngineOptions { sessions: 2, read_timeout: Duration::from_millis(200), ..options() };
        let sources = Sources { experts: None, rows };
        Engine::open_with(&checkpoint, cpu(2, Activations::F32), &options, sources).unwrap()
    };
    for kind in [FaultKind::Errno(5), FaultKind::Truncated, FaultKind::Stall { polls: u64::MAX }] {
        // Of the second session: the first asks for 8 rows of each of its 3 tokens.
        let mut engine = faulty(kind, 30);
        let (a, b) = (engine.session().unwrap(), engine.session().unwrap());
        let (mine, theirs) = (text(3), text(60)[50..].to_vec());
        let feed = [
            Feed { session: a, tokens: &mine, outputs: Outputs::Last },
            Feed { session: b, tokens: &theirs, outputs: Outputs::Last },
        ];
        let done = engine.step(&feed, &mut |_, _, _| {});
        // A read that never ends holds up those behind it: then both sessions may be late.
        let may_take_all = matches!(kind, FaultKind::Stall { .. });
        assert!(done.is_ok() || may_take_all, "{kind:?}: {done:?}");
        let error: EngineError = match done {
            Ok(()) => {
                assert!(engine.take_failure(a).is_none() || may_take_all, "{kind:?}");
                engine.take_failure(b).expect("a row is missing")
            }
            Err(error) => error,
        };
        let message = error.to_string();
        for word in ["row ", "ngram_embedding", "model.safetensors"] {
            assert!(message.contains(word), "{kind:?}: `{message}` does not say `{word}`");
        }
        assert!(engine.tokens(b).is_empty() && engine.store_failed().is_some());
        let again = engine.step_one(b, &text(200)[150..], Outputs::Last, &mut |_, _| {});
        assert!(again.is_err(), "nothing more is read");
    }
}

/// Several tables, an unset output gate, other numbers of streams; all are read and used.
#[test]
fn other_shapes_run() {
    let cases = [
        json!({}),
        json!({"ple_layer_ids": [1, 4], "split_ngram_parts": 1}),
        json!({"ple_layer_ids": []}),
        json!({"output_gate_type": null}),
        json!({"hc_count": 1}),
        json!({"hc_count": 2, "hc_lowrank": 1}),
        json!({"hc_count": 5, "ngram_size": 2, "heads_per_ngram": 2}),
        json!({"ngram_size": 4, "heads_per_ngram": 1, "ple_embed_dim": 24}),
        json!({"layer_types": ["indexed_attention", "full_attention"], "num_hidden_layers": 2,
               "ple_layer_ids": [2, 1], "indexer_budget": 8}),
        json!({"layer_types": ["linear_attention"], "num_hidden_layers": 1, "ple_layer_ids": [1]}),
        json!({"eos_token_id": [3, 5], "ple_conv_kernel_size": 1}),
    ];
    let mut seen = Vec::new();
    for case in &cases {
        let folder = synth(case);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let mut engine = engine(&checkpoint, &options());
        let whole = bits(&mut engine, &text(50), 50);
        assert_eq!(bits(&mut engine, &text(50), 3), whole, "{case}");
        let tables = engine.census().tables.len();
        assert_eq!(engine.row_stats().asked > 0, tables > 0, "{case}");
        assert!(!seen.contains(&whole), "{case} changes nothing");
        seen.push(whole);
    }
}

/// Bytes that this process holds in memory.
fn process_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split_whitespace().nth(1).and_then(|pages| pages.parse().ok());
    pages.map_or(0, |pages: u64| pages * 4096)
}

/// A table far larger than the cache is never held: neither in the plan nor in the process.
#[test]
fn a_large_table_stays_on_disk() {
    // 8 tables of 1.5 million rows of 16 bytes: 192 MB.
    let folder = synth(&json!({"ngram_vocab_size_base": 1_500_000, "split_ngram_parts": 16}));
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let options = EngineOptions {
        memory_bytes: None,
        row_cache_bytes: Some(1 << 20),
        context_tokens: Some(512),
        ..options()
    };
    let before = process_bytes();
    let mut engine = engine(&checkpoint, &options);
    let (census, plan) = (engine.census(), engine.plan());
    assert!(census.table_bytes() > 190_000_000, "{}", census.table_bytes());
    assert!(plan.row_cache_bytes <= 2 << 20, "{}", plan.row_cache_bytes);
    let process = plan.items.iter().find(|item| item.name == "process").unwrap().bytes;
    let own = plan.total_bytes() - process;
    assert!(own < 64 << 20, "{own} bytes beside the process itself");
    let tokens = text(400);
    let whole = bits(&mut engine, &tokens, 100);
    assert!(engine.row_stats().reads > 1000, "{:?}", engine.row_stats());
    // Other tests of this process take some, too.
    let grown = process_bytes().saturating_sub(before);
    assert!(grown < 128 << 20, "{grown} bytes more than before");
    drop(engine);
    let mut all = self::engine(&checkpoint, &EngineOptions { memory_bytes: None, ..options });
    assert_eq!(bits(&mut all, &tokens, 7), whole);
}

/// The fixture says so itself: its buffers are those of the hash.
#[test]
fn the_fixture_holds_its_buffers() {
    let tensors = crate::support::tensors(&fixture("qwen4_exp").join("model.safetensors"));
    let buffers =
        tensors.keys().filter(|name| name.contains("ple_embedding.") && !name.contains("shard"));
    assert_eq!(buffers.count(), 3);
}
