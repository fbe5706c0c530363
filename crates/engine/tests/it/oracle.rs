//! Every family against logits of Hugging Face transformers.

use crate::support::{FAMILIES, cases, cpu, fixture, with_spelling};
use snowmelt_backend::Backend;
use snowmelt_backend::reference::Reference;
use snowmelt_backend_cpu::Activations;
use snowmelt_engine::{
    Engine, EngineOptions, GenerateOptions, Outputs, Residency, Sampler, SamplerOptions,
};
use snowmelt_weights::Checkpoint;
use std::ops::ControlFlow;

fn options() -> EngineOptions {
    EngineOptions { memory_bytes: Some(1 << 30), prefill_chunk: Some(64), ..EngineOptions::default() }
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
    for family in FAMILIES {
        check(family, Reference::default(), "config.json", Residency::Streamed);
    }
}

#[test]
fn cpu_backend_agrees_from_both_spellings() {
    for family in FAMILIES {
        for config in ["config.json", "config.published.json"] {
            check(family, cpu(2, Activations::F32), config, Residency::Streamed);
        }
    }
}
