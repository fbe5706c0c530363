//! The shipped model, and the original it was packed from, against what transformers computes.

use crate::support::{cpu, root};
use serde_json::Value;
use snowmelt_backend::BufType;
use snowmelt_backend_cpu::{Activations, CpuBackend};
use snowmelt_engine::pack::{PackOptions, pack};
use snowmelt_engine::perplexity::perplexity;
use snowmelt_engine::{Engine, EngineOptions, GenerateOptions, Residency, Sampler, SamplerOptions};
use snowmelt_weights::{Checkpoint, Encoding};
use std::fs;
use std::ops::ControlFlow;
use std::path::PathBuf;

fn fixture(name: &str) -> Value {
    let path = root().join("fixtures/tiny").join(name);
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().unwrap().iter();
    ids.map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
}

fn shipped() -> Checkpoint {
    Checkpoint::open(&root().join("models/tiny/container")).unwrap()
}

fn original() -> Option<Checkpoint> {
    let folder: PathBuf = root().join("../shared/models/tiny-moe");
    if folder.exists() {
        return Some(Checkpoint::open(&folder).unwrap());
    }
    println!("skipped: {} is missing", folder.display());
    None
}

fn engine(checkpoint: &Checkpoint, activations: Activations, kv: BufType) -> Engine<CpuBackend> {
    let options = EngineOptions {
        memory_bytes: Some(1 << 30),
        context_tokens: Some(1024),
        residency: Residency::Resident,
        kv,
        ..EngineOptions::default()
    };
    Engine::open(checkpoint, cpu(2, activations), &options).unwrap()
}

fn mean_nll(engine: &mut Engine<CpuBackend>, name: &str) -> f64 {
    let ids = ids(&fixture(name));
    perplexity(engine, &ids, 512, &mut |_, _| true).unwrap().mean_nll
}

/// `got` lies within `share` of `expected`.
fn assert_close(what: &str, got: f64, expected: f64, share: f64) {
    let off = got / expected - 1.0;
    println!("{what}: {got:.6}, reference {expected:.6}, off by {:+.4} %", off * 100.0);
    assert!(off.abs() <= share, "{what}: {got} is not within {share} of {expected}");
}

fn assert_same_texts(engine: &mut Engine<CpuBackend>) {
    for case in fixture("reference.json")["greedy"].as_array().unwrap() {
        let expected = ids(&case["output_ids"]);
        let session = engine.session().unwrap();
        engine.prefill(session, &ids(&case["prompt_ids"]), &mut |_| true).unwrap();
        let mut sampler = Sampler::new(SamplerOptions::greedy(), engine.census().n_vocab).unwrap();
        let tokens_max = Some(expected.len());
        let generate = GenerateOptions { tokens_max, ..GenerateOptions::default() };
        let mut got = Vec::new();
        let mut emit = |id| {
            got.push(id);
            ControlFlow::Continue(())
        };
        engine.generate(session, &mut sampler, &generate, &mut emit).unwrap();
        engine.close(session);
        assert_eq!(got, expected, "{}", case["prompt"]);
    }
}

#[test]
fn original_is_exact() {
    let Some(checkpoint) = original() else { return };
    let reference = fixture("reference.json");
    let expected = reference["heldout"]["perplexity"].as_f64().unwrap();
    for activations in [Activations::F32, Activations::I16] {
        let mut engine = engine(&checkpoint, activations, BufType::F32);
        let what = format!("original, {activations:?}, perplexity");
        assert_close(&what, mean_nll(&mut engine, "heldout.json").exp(), expected, 0.001);
        assert_same_texts(&mut engine);
    }
}

#[test]
fn shipped_keeps_the_quality() {
    let reference = fixture("reference.json");
    let mut engine = engine(&shipped(), Activations::Auto, BufType::Bf16);
    let expected = reference["heldout"]["perplexity"].as_f64().unwrap();
    let got = mean_nll(&mut engine, "heldout.json").exp();
    assert_close("shipped, perplexity", got, expected, 0.02);
    let expected = reference["stories"]["mean_nll"].as_f64().unwrap();
    let got = mean_nll(&mut engine, "stories.json");
    assert_close("shipped, stories, mean loss", got, expected, 0.03);
}

#[test]
fn shipped_is_what_packing_the_original_gives() {
    let Some(checkpoint) = original() else { return };
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("tiny");
    let options = PackOptions { experts: Some(Encoding::Q4G64), trunk: Some(Encoding::Q8) };
    pack(&checkpoint, &to, options, &mut |_, _| true).unwrap().unwrap();
    for entry in fs::read_dir(&to).unwrap() {
        let path = entry.unwrap().path();
        let shipped = root().join("models/tiny/container").join(path.file_name().unwrap());
        let same = fs::read(&path).unwrap() == fs::read(&shipped).unwrap();
        assert!(same, "{} differs from a new pack; pack it again", shipped.display());
    }
}
