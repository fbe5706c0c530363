//! The loop over experts: no deadlock, no pin dropped early, failures where they belong.

use crate::deferred::Deferred;
use crate::experts::{Scripted, Sizes};
use snowmelt_backend::reference::Reference;
use snowmelt_backend::{
    Backend, BufType, ExpertLayout, Experts, Glu, MatrixLayout, MoeBlock, MoeFfn, MoeWork, Pass,
    Ready, RouteObserver, Routed, Router, Routes, Shared, Slab, StepError, View, moe_block,
};
use snowmelt_weights::Encoding;
use std::cell::Cell;
use std::sync::{Arc, Mutex};

const LAYERS: u32 = 3;
const N_EXPERTS: usize = 12;
const TOP_K: usize = 3;
const D: usize = 8;
const D_EXPERT: usize = 4;
const ROWS: usize = 7;

/// Values in about -1..1.
fn values(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn layout() -> ExpertLayout {
    let matrix =
        |d_out, d_in, offset| MatrixLayout { encoding: Encoding::F32, d_out, d_in, offset };
    let piece = D * D_EXPERT * 4;
    ExpertLayout {
        glu: Glu::Silu,
        gate: matrix(D_EXPERT, D, 0),
        up: matrix(D_EXPERT, D, piece),
        down: matrix(D, D_EXPERT, 2 * piece),
    }
}

/// `[layer][expert]`
fn records() -> Vec<Vec<Vec<u8>>> {
    let record = |layer: u32, e: usize| {
        bytes(&values(u64::from(layer) * 100 + e as u64 + 7, 3 * D * D_EXPERT))
    };
    (0..LAYERS).map(|layer| (0..N_EXPERTS).map(|e| record(layer, e)).collect()).collect()
}

/// A stack of layers with nothing but experts in them.
struct Stack<'a, B: Backend> {
    b: &'a B,
    routers: Vec<B::Weight>,
    x: B::Buf,
    logits: B::Buf,
    scratch: [B::Buf; 2],
    parts: B::Buf,
    shared: B::Buf,
    layout: ExpertLayout,
    meanwhile: Cell<usize>,
}

impl<'a, B: Backend> Stack<'a, B> {
    fn new(b: &'a B) -> Self {
        let router = |layer: u32| {
            let mut weight = b.alloc_weight(Encoding::F32, N_EXPERTS, D);
            b.fill_weight(&mut weight, 0, &bytes(&values(u64::from(layer) + 1, N_EXPERTS * D)));
            weight
        };
        let alloc = |len| b.alloc(len, BufType::F32);
        Self {
            b,
            routers: (0..LAYERS).map(router).collect(),
            x: alloc(ROWS * D),
            logits: alloc(ROWS * N_EXPERTS),
            scratch: [alloc(ROWS * TOP_K), alloc(ROWS * TOP_K)],
            parts: alloc(ROWS * TOP_K * D),
            shared: alloc(ROWS * D),
            layout: layout(),
            meanwhile: Cell::new(0),
        }
    }

    fn layer(
        &self,
        p: &mut B::Pass,
        fetch: &mut Scripted<B>,
        work: &mut MoeWork,
        layer: u32,
    ) -> Result<(), StepError> {
        let (b, x) = (self.b, View::of(&self.x, D));
        let logits = View::of(&self.logits, N_EXPERTS);
        b.linear(p, x, &self.routers[layer as usize], ROWS, logits);
        let [ids, weights] = &self.scratch;
        let router = Router::softmax([N_EXPERTS, TOP_K], true);
        let routed = b.route(p, logits, &router, ROWS, [ids, weights]);
        let block =
            MoeBlock { layer, x, routed: &routed, layout: &self.layout, parts: &self.parts };
        let shared = View::of(&self.shared, D);
        moe_block(b, p, fetch, work, &block, |p| {
            self.meanwhile.set(self.meanwhile.get() + 1);
            b.clear(p, &self.shared, 0..ROWS * D);
            b.add(p, shared, x, D, ROWS);
        })?;
        let shared = Some(Shared { x: shared, gate: None });
        b.moe_join(p, &routed, &self.parts, shared, D, x);
        Ok(())
    }

    /// One step through all layers.
    fn step(&self, fetch: &mut Scripted<B>, work: &mut MoeWork) -> Result<Vec<f32>, StepError> {
        let mut p = self.b.begin();
        self.b.write(&mut p, &self.x, 0, &values(42, ROWS * D));
        self.b.write(&mut p, &self.parts, 0, &[f32::NAN; ROWS * TOP_K * D]);
        work.failures.reset(ROWS);
        for layer in 0..LAYERS {
            self.layer(&mut p, fetch, work, layer)?;
        }
        let mut out = vec![0.0; ROWS * D];
        p.read(&self.x, 0..ROWS * D, &mut out)?;
        Ok(out)
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// What a wholly resident model computes.
fn expected() -> Vec<f32> {
    let mut fetch = Scripted::resident(&Reference, &records());
    let out = Stack::new(&Reference).step(&mut fetch, &mut MoeWork::default()).expect("no failure");
    assert!(out.iter().all(|value| value.is_finite()));
    assert_eq!(fetch.script(|script| script.waves.len()), 0, "a resident layer is not fetched");
    out
}

/// Sizes from the least that works to all experts at once.
fn all_sizes(in_flight: usize) -> Vec<Sizes> {
    let mut all = Vec::new();
    for ahead in [1, 2] {
        for wave in [1, 2, 3, 5, N_EXPERTS] {
            for slots in [wave * ahead, wave * (in_flight + ahead), LAYERS as usize * N_EXPERTS] {
                all.push(Sizes { slots, wave, ahead });
            }
        }
    }
    all
}

fn check_streamed<B: Backend>(b: &B) {
    let (expected, records) = (expected(), records());
    for (seed, sizes) in (1..).zip(all_sizes(b.submissions_in_flight())) {
        let stack = Stack::new(b);
        let mut fetch = Scripted::new(b, &records, sizes, seed);
        let mut work = MoeWork::default();
        work.reserve(ROWS, TOP_K, N_EXPERTS);
        for _ in 0..3 {
            let out = stack.step(&mut fetch, &mut work).expect("no failure");
            assert_eq!(bits(&out), bits(&expected), "{sizes:?}");
            assert_eq!(fetch.pinned(), 0, "{sizes:?}");
        }
        assert_eq!(stack.meanwhile.get(), 9, "once a layer and step");
        let (sets, waves) = fetch.script(|script| (script.sets, script.waves.clone()));
        assert_eq!(sets.0, 0, "sets outlive their layer");
        let several = waves.len() > 9;
        assert_eq!(sets.1, if several { sizes.ahead } else { 1 }, "{sizes:?}");
        assert!(waves.iter().all(|wave| wave.len() <= sizes.wave && wave.is_sorted()));
    }
}

#[test]
fn streamed_is_resident_on_an_eager_backend() {
    check_streamed(&Reference);
}

#[test]
fn streamed_is_resident_with_submissions_in_flight() {
    for in_flight in [0, 1, 2] {
        check_streamed(&Deferred::new(in_flight));
    }
}

#[test]
fn a_pin_dropped_early_spoils_the_result() {
    let b = Deferred::dropping_pins_early(2);
    let mut fetch = Scripted::new(&b, &records(), Sizes { slots: 4, wave: 2, ahead: 2 }, 1);
    let stack = Stack::new(&b);
    let spoilt = (0..20).any(|_| {
        let out = stack.step(&mut fetch, &mut MoeWork::default()).expect("no failure");
        bits(&out) != bits(&expected())
    });
    assert!(spoilt);
}

#[test]
fn pins_live_until_the_device_has_finished() {
    let (b, records) = (Deferred::new(1), records());
    let slab = b.alloc_slab(4096, 1);
    slab.upload(0, 0, &records[0][5]);
    let mut p = b.begin();
    let (x, out) = (b.alloc(D, BufType::F32), b.alloc(D, BufType::F32));
    b.write(&mut p, &x, 0, &values(3, D));
    let [ids, weights] = [0; 2].map(|_| b.alloc(1, BufType::F32));
    b.write(&mut p, &ids, 0, &[f32::from_bits(5)]);
    let routed = Routed { ids, weights, n: 1, top_k: 1 };
    let pin = Arc::new(());
    let mut ready = vec![Ready::new(5, 0, Arc::clone(&pin) as _)];
    let layout = layout();
    let args = MoeFfn { x: View::of(&x, D), routed: &routed, layout: &layout, slab: &slab };
    b.moe_ffn(&mut p, &args, Experts::Ready(&mut ready), &out);
    b.hold(true);
    p.submit();
    assert_eq!(Arc::strong_count(&pin), 2, "submitted, not finished");
    b.hold(false);
    p.read(&out, 0..D, &mut [0.0; D]).expect("the device works");
    assert_eq!(Arc::strong_count(&pin), 1);
}

fn observed(observe: impl FnMut(u32, &Routes) + Send + 'static) -> MoeWork {
    let mut work = MoeWork::default();
    work.observer = Some(RouteObserver(Box::new(observe)));
    work
}

/// Which rows choose which experts in layer 0.
fn routes_of_first_layer() -> Vec<u32> {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&seen);
    let observe = move |layer: u32, routes: &Routes| {
        sink.lock().expect("no panic").push((layer, routes.ids.clone()));
    };
    let mut work = observed(observe);
    let mut fetch = Scripted::resident(&Reference, &records());
    Stack::new(&Reference).step(&mut fetch, &mut work).expect("no failure");
    let resident = std::mem::take(&mut *seen.lock().expect("no panic"));
    let mut fetch = Scripted::new(&Reference, &records(), Sizes { slots: 4, wave: 4, ahead: 1 }, 3);
    Stack::new(&Reference).step(&mut fetch, &mut work).expect("no failure");
    assert_eq!(resident, *seen.lock().expect("no panic"), "the observer sees the same routes");
    assert_eq!(resident.iter().map(|(layer, _)| *layer).collect::<Vec<_>>(), [0, 1, 2]);
    resident.into_iter().next().expect("three layers").1
}

#[test]
fn observed_layers_give_the_same_bits() {
    let mut work = observed(|_, _| {});
    let b = Deferred::new(1);
    let mut fetch = Scripted::new(&b, &records(), Sizes { slots: 4, wave: 4, ahead: 1 }, 3);
    let out = Stack::new(&b).step(&mut fetch, &mut work).expect("no failure");
    assert_eq!(bits(&out), bits(&expected()));
}

#[test]
fn a_failed_expert_fails_the_rows_that_chose_it() {
    let ids = routes_of_first_layer();
    let chosen_by = |e: u32| ids.chunks_exact(TOP_K).filter(|row| row.contains(&e)).count();
    let lost = *ids.iter().find(|&&e| (1..ROWS).contains(&chosen_by(e))).expect("a rare expert");
    let stack = Stack::new(&Reference);
    for ahead in [1, 2] {
        let sizes = Sizes { slots: 4, wave: 2, ahead };
        let mut fetch = Scripted::new(&Reference, &records(), sizes, 9);
        fetch.script(|script| script.unreadable = vec![lost]);
        let mut work = MoeWork::default();
        work.failures.reset(ROWS);
        let mut p = Reference.begin();
        Reference.write(&mut p, &stack.x, 0, &values(42, ROWS * D));
        stack.layer(&mut p, &mut fetch, &mut work, 0).expect("other rows go on");
        let mut out = [0.0; ROWS * D];
        p.read(&stack.x, 0..ROWS * D, &mut out).expect("the device works");
        for (row, out) in out.chunks_exact(D).enumerate() {
            let failed = ids[row * TOP_K..][..TOP_K].contains(&lost);
            assert_eq!(work.failures.is_failed(row), failed, "row {row}");
            assert_eq!(out.iter().all(|value| value.is_finite()), !failed, "row {row}");
        }
        let first = work.failures.first().expect("a failure").to_string();
        assert_eq!(first, format!("expert {lost} of layer 0 could not be read"));
        assert_eq!(fetch.pinned(), 0);
    }
}

/// After whatever went wrong, the next step on the same memory is right.
fn assert_recovers(fetch: &mut Scripted<Reference>, work: &mut MoeWork) {
    assert_eq!((fetch.pinned(), fetch.script(|script| script.sets.0)), (0, 0));
    fetch.script(|script| {
        script.unreadable.clear();
        (script.breaks_after, script.refuses) = (None, false);
    });
    let out = Stack::new(&Reference).step(fetch, work).expect("no failure");
    assert_eq!(bits(&out), bits(&expected()));
}

#[test]
fn when_every_row_has_failed_the_step_ends() {
    let mut fetch = Scripted::new(&Reference, &records(), Sizes { slots: 8, wave: 4, ahead: 2 }, 5);
    fetch.script(|script| script.unreadable = (0..N_EXPERTS as u32).collect());
    let mut work = MoeWork::default();
    let error = Stack::new(&Reference).step(&mut fetch, &mut work).expect_err("nothing to read");
    assert!(matches!(error, StepError::Expert { layer: 0, .. }), "{error}");
    assert!(work.failures.all());
    assert!(fetch.script(|script| script.waves.len()) <= 3, "goes on though all is lost");
    assert_recovers(&mut fetch, &mut work);
}

#[test]
fn a_store_that_refuses_ends_the_step() {
    let mut fetch = Scripted::new(&Reference, &records(), Sizes { slots: 4, wave: 4, ahead: 1 }, 5);
    fetch.script(|script| script.refuses = true);
    let mut work = MoeWork::default();
    let error = Stack::new(&Reference).step(&mut fetch, &mut work).expect_err("refused");
    assert!(matches!(error, StepError::Store { .. }), "{error}");
    assert_recovers(&mut fetch, &mut work);
}

#[test]
fn experts_that_arrived_before_the_store_broke_are_forgotten() {
    for seed in 0..20 {
        let sizes = Sizes { slots: 6, wave: 3, ahead: 2 };
        let mut fetch = Scripted::new(&Reference, &records(), sizes, seed);
        let some = routes_of_first_layer()[seed as usize % 6];
        fetch.script(|script| script.breaks_after = Some(some));
        let mut work = MoeWork::default();
        let error = Stack::new(&Reference).step(&mut fetch, &mut work).expect_err("broken");
        assert!(matches!(error, StepError::Store { .. }), "{error}");
        // Else they would be taken for experts of the next layer.
        assert_recovers(&mut fetch, &mut work);
    }
}

#[test]
fn the_shared_expert_is_recorded_before_anyone_waits() {
    let stack = Stack::new(&Reference);
    let mut fetch = Scripted::new(&Reference, &records(), Sizes { slots: 4, wave: 4, ahead: 1 }, 5);
    let logits = values(1, N_EXPERTS);
    let mut p = Reference.begin();
    Reference.write(&mut p, &stack.x, 0, &values(42, ROWS * D));
    Reference.write(&mut p, &stack.logits, 0, &logits);
    let [ids, weights] = &stack.scratch;
    let router = Router::softmax([N_EXPERTS, TOP_K], true);
    let logits = View::of(&stack.logits, N_EXPERTS);
    let routed = Reference.route(&mut p, logits, &router, 1, [ids, weights]);
    let block = MoeBlock {
        layer: 0,
        x: View::of(&stack.x, D),
        routed: &routed,
        layout: &stack.layout,
        parts: &stack.parts,
    };
    let probe = fetch.probe();
    let mut seen = None;
    moe_block(&Reference, &mut p, &mut fetch, &mut MoeWork::default(), &block, |_| {
        seen = Some(probe());
    })
    .expect("no failure");
    assert_eq!(seen, Some((1, 0)), "one wave under way, nobody waited");
}
