//! Nothing allocates in the decode loop, whatever thread.

#![expect(unsafe_code, reason = "a global allocator is unsafe to write")]
#![expect(clippy::unwrap_used, reason = "tests")]

use snowmelt_backend_cpu::{Activations, CpuBackend, CpuOptions};
use snowmelt_engine::{
    Engine, EngineOptions, GenerateOptions, Io, Residency, Sampler, SamplerOptions,
};
use snowmelt_weights::Checkpoint;
use std::alloc::{GlobalAlloc, Layout, System};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

static COUNTING: AtomicBool = AtomicBool::new(false);
static COUNT: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: forwards to the system's allocator and keeps its contract.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if COUNTING.load(Ordering::Relaxed) {
            COUNT.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: `ptr` came from `System` with this layout.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations of `steps` decode steps after as many to warm up.
fn allocations(
    family: &str,
    options: &EngineOptions,
    activations: Activations,
    steps: usize,
) -> usize {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/oracle").join(family);
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let cpu = CpuOptions { threads: 2, activations, ..CpuOptions::default() };
    let backend = CpuBackend::new(cpu).unwrap();
    let mut engine = Engine::open(&checkpoint, backend, options).unwrap();
    let session = engine.session().unwrap();
    let sampling = SamplerOptions { seed: Some(1), ..SamplerOptions::default() };
    let mut sampler = Sampler::new(sampling, engine.census().n_vocab).unwrap();
    engine.prefill(session, &[3, 1, 4, 1, 5, 9, 2, 6], &mut |_| true).unwrap();
    let generate = GenerateOptions { tokens_max: Some(2 * steps), ..GenerateOptions::default() };
    let mut generated = 0;
    let mut emit = |_: u32| {
        generated += 1;
        if generated == steps {
            COUNT.store(0, Ordering::SeqCst);
            COUNTING.store(true, Ordering::SeqCst);
        }
        ControlFlow::Continue(())
    };
    engine.generate(session, &mut sampler, &generate, &mut emit).unwrap();
    COUNTING.store(false, Ordering::SeqCst);
    assert_eq!(generated, 2 * steps);
    COUNT.load(Ordering::SeqCst)
}

/// One test, so that no other thread of the harness allocates meanwhile.
#[test]
fn decode_does_not_allocate() {
    let base = EngineOptions {
        memory_bytes: Some(1 << 30),
        context_tokens: Some(256),
        row_cache_bytes: Some(30_000),
        ..EngineOptions::default()
    };
    for activations in [Activations::F32, Activations::I16] {
        for (residency, io) in [
            (Residency::Resident, Io::Auto),
            (Residency::Mapped, Io::Auto),
            (Residency::Streamed, Io::Auto),
            (Residency::Streamed, Io::Pread),
            (Residency::Streamed, Io::Mmap),
        ] {
            let slots = (residency == Residency::Streamed).then_some(6);
            let options = EngineOptions { residency, io, slots, ..base.clone() };
            for family in ["qwen3_5_moe", "qwen4_exp"] {
                let count = allocations(family, &options, activations, 60);
                let what = format!("{family} {residency:?} {io:?} {activations:?}");
                assert_eq!(count, 0, "{what}: allocations in 60 steps");
            }
        }
    }
}
