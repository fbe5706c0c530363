//! Reads that go wrong: the message, what goes on, and what works afterwards.

use crate::support::{cpu, fixture, open, packed_from};
use snowmelt_backend::RouteObserver;
use snowmelt_backend_cpu::{Activations, CpuBackend};
use snowmelt_engine::{
    Engine, EngineError, EngineOptions, Feed, ModelOptions, Outputs, Residency, Sources,
};
use snowmelt_expert_store::{
    Fault, FaultKind, FaultSource, FaultWhen, FileSpec, PreadSource, SourceOptions,
};
use snowmelt_weights::Checkpoint;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const TOKENS: [u32; 12] = [186, 280, 85, 57, 142, 139, 261, 11, 281, 280, 318, 185];
const OTHERS: [u32; 9] = [3, 270, 139, 236, 120, 282, 211, 116, 62];

fn options() -> EngineOptions {
    EngineOptions {
        memory_bytes: Some(1 << 30),
        slots: Some(32),
        sessions: 2,
        context_tokens: Some(64),
        residency: Residency::Streamed,
        poison: true,
        read_timeout: Duration::from_millis(300),
        ..EngineOptions::default()
    }
}

/// An engine whose reads go wrong as the script says.
fn faulty(
    checkpoint: &Checkpoint,
    options: &EngineOptions,
    script: &[Fault],
) -> Engine<CpuBackend> {
    let file =
        |file: &snowmelt_weights::DataFile| FileSpec { path: file.path.clone(), len: file.len };
    let files: Vec<FileSpec> = checkpoint.files().iter().map(file).collect();
    let inner = PreadSource::open(&files, &SourceOptions::default()).unwrap();
    let source = FaultSource::new(inner).with_script(script.iter().copied());
    let backend = cpu(2, Activations::F32);
    let sources = Sources { experts: Some(Box::new(source)), rows: None };
    Engine::open_with(checkpoint, backend, options, sources).unwrap()
}

#[expect(clippy::result_large_err, reason = "a test looks at it once")]
fn all_logits(engine: &mut Engine<CpuBackend>, tokens: &[u32]) -> Result<Vec<u32>, EngineError> {
    let session = engine.session().unwrap();
    let mut bits = Vec::new();
    let mut sink = |_: usize, logits: &[f32]| bits.extend(logits.iter().map(|l| l.to_bits()));
    let done = engine.step_one(session, tokens, Outputs::All, &mut sink);
    assert!(done.is_ok() || engine.tokens(session).is_empty(), "a failed step leaves its tokens");
    engine.close(session);
    done.map(|()| bits)
}

fn text(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(error) = next {
        text = format!("{text}: {error}");
        next = error.source();
    }
    text
}

#[test]
fn every_failure_ends_the_run_with_its_message_and_a_new_engine_works() {
    let (_folder, checkpoint) = packed_from(&open("qwen3_5_moe"), None, None);
    let checked = EngineOptions { check_reads: true, ..options() };
    let expected = all_logits(&mut faulty(&checkpoint, &checked, &[]), &TOKENS).unwrap();
    let stall = FaultKind::Stall { polls: u64::MAX };
    let failures: [(FaultKind, &[&str]); 4] = [
        (FaultKind::Errno(5), &["expert", "layer", "experts.bin", "nput/output error"]),
        (FaultKind::Truncated, &["expert", "layer", "experts.bin", "ended"]),
        (stall, &["expert", "layer", "experts.bin"]),
        (
            FaultKind::BitFlip { bit: 77 },
            &["expert", "layer", "experts.bin", "not what was written"],
        ),
    ];
    for (kind, words) in failures {
        for nth in [0, 3, 11] {
            let script = [Fault { when: FaultWhen::Nth(nth), kind, times: 1 }];
            let mut engine = faulty(&checkpoint, &checked, &script);
            let error = all_logits(&mut engine, &TOKENS).expect_err("the fault is noticed");
            let message = text(&error);
            for word in words {
                assert!(message.contains(word), "{kind:?}: `{message}` does not say `{word}`");
            }
            assert!(engine.store_failed().is_some(), "{kind:?}: the store latches");
            let again = all_logits(&mut engine, &OTHERS).expect_err("nothing more is read");
            assert!(text(&again).contains("expert"), "{again}");
            drop(engine);
            let mut fresh = faulty(&checkpoint, &checked, &[]);
            assert_eq!(all_logits(&mut fresh, &TOKENS).unwrap(), expected, "{kind:?}");
        }
    }
}

#[test]
fn short_and_late_reads_change_nothing() {
    let (_folder, checkpoint) = packed_from(&open("qwen3_next"), None, None);
    let expected = all_logits(&mut faulty(&checkpoint, &options(), &[]), &TOKENS).unwrap();
    for kind in [FaultKind::ShortRead { got: 100 }, FaultKind::Late { polls: 40 }] {
        let script = [Fault { when: FaultWhen::Always, kind, times: 20 }];
        let mut engine = faulty(&checkpoint, &options(), &script);
        assert_eq!(all_logits(&mut engine, &TOKENS).unwrap(), expected, "{kind:?}");
    }
}

/// A bit that flips unnoticed is what `check_reads` is for: without it the run goes on.
#[test]
fn without_check_reads_a_flipped_bit_passes() {
    let (_folder, checkpoint) = packed_from(&open("qwen3_5_moe"), None, None);
    let kind = FaultKind::BitFlip { bit: 14 };
    let script = [Fault { when: FaultWhen::Always, kind, times: u64::MAX }];
    let expected = all_logits(&mut faulty(&checkpoint, &options(), &[]), &TOKENS).unwrap();
    let blind = EngineOptions { check_finite: false, ..options() };
    let got = all_logits(&mut faulty(&checkpoint, &blind, &script), &TOKENS).unwrap();
    assert_ne!(got, expected, "the flips reach the logits");
    // This bit makes weights so great that what they give is not finite.
    let error = all_logits(&mut faulty(&checkpoint, &options(), &script), &TOKENS).unwrap_err();
    let message = text(&error);
    assert!(message.contains("layer.output` of layer 0 holds"), "{message}");
    let checked = EngineOptions { check_reads: true, ..options() };
    let error = all_logits(&mut faulty(&checkpoint, &checked, &script), &TOKENS).unwrap_err();
    assert!(text(&error).contains("not what was written"), "{}", text(&error));
}

/// The trunk is read once, at open, and checked there.
#[test]
fn check_reads_covers_the_trunk() {
    let (_folder, checkpoint) = packed_from(&open("qwen3_5_moe"), None, None);
    let file = checkpoint.files()[0].path.clone();
    let mut bytes = std::fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let open = |check_reads| {
        let options = EngineOptions { check_reads, ..options() };
        let opened = Engine::open(&checkpoint, cpu(1, Activations::F32), &options);
        opened.map(|_| ()).map_err(|error| error.to_string())
    };
    open(false).unwrap();
    let error = open(true).unwrap_err();
    assert!(error.contains("tensor `") && error.contains("trunk.bin"), "{error}");
}

/// The routes of one step: (layer, experts).
fn routes(checkpoint: &Checkpoint, tokens: &[u32]) -> Vec<(u32, Vec<u32>)> {
    let mut engine = faulty(checkpoint, &options(), &[]);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let to = Arc::clone(&seen);
    engine.observe_routes(Some(RouteObserver(Box::new(move |layer, routes| {
        to.lock().unwrap().push((layer, routes.experts().to_vec()));
    }))));
    all_logits(&mut engine, tokens).unwrap();
    let seen = seen.lock().unwrap();
    seen.clone()
}

#[test]
fn sessions_that_did_not_need_the_bytes_go_on() {
    let (_folder, checkpoint) = packed_from(&open("qwen3_5_moe"), None, None);
    let (mine, theirs) = (&TOKENS[..2], &OTHERS[..4]);
    let (a, b) = (routes(&checkpoint, mine), routes(&checkpoint, theirs));
    let (layer, experts) = b.last().unwrap();
    let expert = *experts.iter().find(|expert| !a.last().unwrap().1.contains(expert)).unwrap();
    let packed = checkpoint.packed().unwrap();
    let records = packed.expert_layer(*layer).unwrap();
    let offset = records.offset + u64::from(expert) * records.stride;
    let when = FaultWhen::Covers { file: packed.experts_file(), offset };
    let script = [Fault { when, kind: FaultKind::Errno(5), times: 1 }];
    let expected = all_logits(&mut faulty(&checkpoint, &options(), &[]), mine).unwrap();
    let mut engine = faulty(&checkpoint, &options(), &script);
    let [first, second] = [engine.session().unwrap(), engine.session().unwrap()];
    let feed = [
        Feed { session: second, tokens: theirs, outputs: Outputs::All },
        Feed { session: first, tokens: mine, outputs: Outputs::All },
    ];
    let mut bits = Vec::new();
    let mut others = 0;
    let mut sink = |feed: usize, _: usize, logits: &[f32]| match feed {
        0 => others += 1,
        _ => bits.extend(logits.iter().map(|logit| logit.to_bits())),
    };
    engine.step(&feed, &mut sink).expect("the step goes on for the other session");
    assert_eq!(bits, expected, "the other session's logits are those of a run alone");
    assert!(others < theirs.len(), "rows that needed the expert have no logits");
    let failure = engine.take_failure(second).expect("the session that needed it says why");
    assert!(text(&failure).contains(&format!("expert {expert} of layer {layer}")), "{failure}");
    assert!(engine.take_failure(first).is_none());
    assert_eq!((engine.tokens(first), engine.tokens(second)), (mine, &[][..]));
}

#[test]
fn a_file_that_is_cut_while_it_is_used() {
    let (folder, checkpoint) = packed_from(&open("qwen3_5_moe"), None, None);
    let small = EngineOptions { slots: Some(2), ..options() };
    let mut engine = Engine::open(&checkpoint, cpu(1, Activations::F32), &small).unwrap();
    all_logits(&mut engine, &TOKENS).unwrap();
    let file = folder.path().join("packed/experts.bin");
    std::fs::File::options().write(true).open(&file).unwrap().set_len(4096).unwrap();
    let error = all_logits(&mut engine, &OTHERS).expect_err("the file has no bytes left");
    assert!(text(&error).contains("experts.bin"), "{}", text(&error));
}

#[test]
fn bad_input_leaves_sessions_as_they_were() {
    let checkpoint = Checkpoint::open(&fixture("qwen3_moe")).unwrap();
    let mut engine = Engine::open(&checkpoint, cpu(1, Activations::F32), &options()).unwrap();
    let session = engine.session().unwrap();
    engine.prefill(session, &TOKENS, &mut |_| true).unwrap();
    let before = engine.logits(session).to_vec();
    let empty = engine.prefill(session, &[], &mut |_| true).unwrap_err();
    assert!(matches!(empty, EngineError::EmptyPrompt), "{empty}");
    let token = engine.step_one(session, &[5, 320], Outputs::Last, &mut |_, _| {}).unwrap_err();
    assert!(token.to_string().contains("token id 320 at index 1"), "{token}");
    let long = engine.prefill(session, &[1; 60], &mut |_| true).unwrap_err();
    assert!(long.to_string().contains("72 tokens do not fit into a context of 64"), "{long}");
    assert_eq!((engine.tokens(session), engine.logits(session)), (&TOKENS[..], &before[..]));
    engine.session().unwrap();
    let third = engine.session().unwrap_err();
    assert!(matches!(third, EngineError::Sessions { sessions: 2 }), "{third}");
}

#[test]
fn budgets_and_slots_that_are_too_small_show_the_subtraction() {
    let checkpoint = Checkpoint::open(&fixture("qwen3_5_moe")).unwrap();
    let open = |options: EngineOptions| {
        Engine::open(&checkpoint, cpu(1, Activations::F32), &options).unwrap_err().to_string()
    };
    let little = open(EngineOptions { memory_bytes: Some(1 << 20), ..options() });
    for word in ["budget", "trunk", "kv cache", "smallest budget is `--memory"] {
        assert!(little.contains(word), "`{little}` does not say `{word}`");
    }
    let slots = open(EngineOptions { slots: Some(1), ..options() });
    assert!(slots.contains("`--slots 1` is too few"), "{slots}");
    let context = open(EngineOptions { context_tokens: Some(1 << 20), ..options() });
    assert!(context.contains("`--context 1048576` is out of range"), "{context}");
    let digests = open(EngineOptions { check_reads: true, ..options() });
    assert!(digests.contains("snowmelt pack"), "{digests}");
    let dense = Checkpoint::open(&fixture("qwen3_5")).unwrap();
    let checked = EngineOptions { check_reads: true, ..EngineOptions::default() };
    let dense = Engine::open(&dense, cpu(1, Activations::F32), &checked).unwrap_err();
    assert!(dense.to_string().contains("snowmelt pack"), "{dense}");
    let mapped = EngineOptions { slots: None, residency: Residency::Mapped, ..options() };
    let mapped = open(EngineOptions { check_reads: true, ..mapped });
    assert!(mapped.contains("nothing is read here"), "{mapped}");
}

/// The smallest budget that a refusal names is one that works.
#[test]
fn the_smallest_budget_works() {
    let checkpoint = Checkpoint::open(&fixture("qwen3_next")).unwrap();
    let backend = || cpu(1, Activations::F32);
    let census = snowmelt_model::census(&checkpoint, ModelOptions::default()).unwrap();
    let generous = EngineOptions { memory_bytes: Some(1 << 30), ..EngineOptions::default() };
    let plan = Engine::plan_for(&checkpoint, &backend(), &census, &generous).unwrap();
    // The process grows a little between the two plans, as other tests run in it.
    let memory_bytes = Some(plan.smallest_bytes + (64 << 20));
    let options = EngineOptions { memory_bytes, ..EngineOptions::default() };
    let mut engine = Engine::open(&checkpoint, backend(), &options).unwrap();
    all_logits(&mut engine, &TOKENS).unwrap();
}
