//! Every family against logits of Hugging Face transformers.

use crate::support::{cases, cpu, families, fixture, tensors, with_biases, with_spelling};
use snowmelt_backend::Backend;
use snowmelt_backend::reference::Reference;
use snowmelt_backend_cpu::Activations;
use snowmelt_engine::{
    Engine, EngineOptions, GenerateOptions, Outputs, Residency, Sampler, SamplerOptions,
};
use snowmelt_weights::Checkpoint;
use std::ops::ControlFlow;

fn options() -> EngineOptions {
    EngineOptions {
        memory_bytes: Some(1 << 30),
        prefill_chunk: Some(64),
        ..EngineOptions::default()
    }
}

/// All cases within the tolerance, and their greedy tokens.
fn check<B: Backend>(family: &str, backend: B, config: &str, residency: Residency) {
    let folder = with_spelling(family, config);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let options = EngineOptions { residency, ..options() };
    let mut engine = Engine::open(&checkpoint, backend, &options).unwrap();
    let session = engine.session().unwrap();
    for case in cases(&fixture(family)) {
        let tokens: Vec<u32> = [&case.prompt[..], &case.greedy[..]].concat();
        let mut worst = 0.0_f32;
        let mut seen = 0;
        engine.reset(session);
        for (chunk, first) in tokens.chunks(64).zip((0..).step_by(64)) {
            let sink = &mut |token: usize, logits: &[f32]| {
                let row = case.rows.iter().find(|(row, _)| *row == first + token);
                if let Some((_, expected)) = row {
                    seen += 1;
                    for (got, expected) in logits.iter().zip(expected) {
                        assert!(got.is_finite(), "{family} {} row {}", case.name, first + token);
                        worst = worst.max((got - expected).abs());
                    }
                }
            };
            engine.step_one(session, chunk, Outputs::All, sink).unwrap();
        }
        assert_eq!(seen, case.rows.len(), "{family} {}", case.name);
        assert!(
            worst <= case.tolerance,
            "{family} {} ({config}): logits differ by {worst}, tolerance {}",
            case.name,
            case.tolerance
        );
        if case.robust {
            assert_eq!(greedy(&mut engine, session, &case.prompt), case.greedy, "{}", case.name);
        }
    }
}

fn greedy<B: Backend>(
    engine: &mut Engine<B>,
    session: snowmelt_engine::SessionId,
    prompt: &[u32],
) -> Vec<u32> {
    engine.reset(session);
    engine.prefill(session, prompt, &mut |_| true).unwrap();
    let n_vocab = engine.census().n_vocab;
    let mut sampler = Sampler::new(SamplerOptions::greedy(), n_vocab).unwrap();
    let generate = GenerateOptions { tokens_max: Some(32), ..GenerateOptions::default() };
    let mut ids = Vec::new();
    let mut emit = |id| {
        ids.push(id);
        ControlFlow::Continue(())
    };
    engine.generate(session, &mut sampler, &generate, &mut emit).unwrap();
    ids
}

#[test]
fn reference_backend_agrees() {
    for family in &families() {
        check(family, Reference, "config.json", Residency::Streamed);
    }
}

#[test]
fn cpu_backend_agrees_from_both_spellings() {
    for family in &families() {
        for config in ["config.json", "config.published.json"] {
            check(family, cpu(2, Activations::F32), config, Residency::Streamed);
        }
    }
}

/// Biases of attention: one added to the values is the same as `o_proj` of it added to the output,
/// since the weights of a softmax sum to 1. Zeros change nothing.
#[test]
fn attention_biases_act_where_they_should() {
    let (family, d_head, kv_heads, heads, d) = ("qwen3_moe", 24, 2, 4, 64);
    let plain = with_spelling(family, "config.json");
    let weights = tensors(&plain.path().join("model.safetensors"));
    let value = |i: usize| ((i * 37 % 19) as f32 - 9.0) / 64.0;
    let v_bias: Vec<f32> = (0..kv_heads * d_head).map(value).collect();
    let (_, o_proj) = &weights["model.layers.1.self_attn.o_proj.weight"];
    let o: Vec<f32> = o_proj
        .chunks_exact(2)
        .map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16))
        .collect();
    let spread = |h: usize| h / (heads / kv_heads) * d_head;
    let each_head: Vec<f32> =
        (0..heads * d_head).map(|i| v_bias[spread(i / d_head) + i % d_head]).collect();
    let o_bias: Vec<f32> = o
        .chunks_exact(heads * d_head)
        .map(|row| row.iter().zip(&each_head).map(|(w, b)| w * b).sum())
        .collect();
    let logits = |v: &[f32], o: &[f32]| {
        let folder = with_biases(family, 4, [heads * d_head, kv_heads * d_head, d], (1, v, o));
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let mut engine = Engine::open(&checkpoint, cpu(1, Activations::F32), &options()).unwrap();
        let session = engine.session().unwrap();
        let mut all = Vec::new();
        let sink = &mut |_: usize, logits: &[f32]| all.extend_from_slice(logits);
        engine.step_one(session, &[3, 141, 59, 26, 5], Outputs::All, sink).unwrap();
        all
    };
    let none = logits(&vec![0.0; v_bias.len()], &vec![0.0; d]);
    let (by_v, by_o) = (logits(&v_bias, &vec![0.0; d]), logits(&vec![0.0; v_bias.len()], &o_bias));
    let apart =
        |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0_f32, f32::max);
    assert!(apart(&none, &by_v) > 0.05, "the bias is felt: {}", apart(&none, &by_v));
    assert!(apart(&by_v, &by_o) < 1e-4, "{}", apart(&by_v, &by_o));
}
