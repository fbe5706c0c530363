//! No verb allocates after `prepare`, on any thread.
#![allow(unsafe_code)]

use snowmelt_backend::{
    Attention, Backend, BufType, DeltaStep, ExpertLayout, Experts, Glu, Groups, HeadRows,
    IndexSelect, Limits, MatrixLayout, MoeFfn, Norm, PAGE_TOKENS, Pairing, Pass, Pool, Ready,
    Router, Routes, Rows, Scores, Shared, Unary, View,
};
use snowmelt_backend_cpu::{Activations, CpuBackend, CpuBuf, CpuOptions, CpuWeight};
use snowmelt_weights::Encoding;
use std::alloc::{GlobalAlloc, Layout, System};
use std::mem::take;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: hands every call on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, SeqCst);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const N: usize = 33;
const D: usize = 256;
const HEADS: usize = 4;
const D_EXPERT: usize = 128;
const EXPERTS: usize = 8;
const TOP_K: usize = 2;
/// Tokens of an indexer's block, and most blocks of a row.
const RATIO: usize = 3;
const TOP: usize = 5;

/// All that a step needs, from before `prepare`.
struct Step {
    b: CpuBackend,
    rows: Rows,
    x: CpuBuf,
    y: CpuBuf,
    caches: [CpuBuf; 2],
    state: CpuBuf,
    parts: CpuBuf,
    choices: [CpuBuf; 2],
    square: CpuWeight,
    vector: CpuWeight,
    heads: [CpuWeight; 2],
    taps: CpuWeight,
    slab: <CpuBackend as Backend>::Slab,
    layout: ExpertLayout,
    ready: Vec<Ready>,
    routes: Routes,
}

impl Step {
    fn new(activations: Activations, encoding: Encoding, threads: usize) -> Self {
        let options = CpuOptions { threads, activations, ..CpuOptions::default() };
        let b = CpuBackend::new(options).expect("the best there is");
        let weight = |encoding: Encoding, d_out, d_in| {
            let mut weight = b.alloc_weight(encoding, d_out, d_in);
            b.fill_weight(&mut weight, 0, &vec![0; d_out * encoding.row_bytes(d_in)]);
            weight
        };
        let mut rows = Rows::default();
        rows.rewrite(|draft| {
            draft.sequence(0, [0, 1]);
            (0..N as u32).for_each(|position| draft.row(position, position, position == 3));
        });
        let piece = |d_out, d_in, offset| MatrixLayout { encoding, d_out, d_in, offset };
        let bytes = piece(D_EXPERT, D, 0).bytes();
        let layout = ExpertLayout {
            glu: Glu::GeluTanh,
            gate: piece(D_EXPERT, D, 0),
            up: piece(D_EXPERT, D, bytes),
            down: piece(D, D_EXPERT, 2 * bytes),
        };
        let slot_bytes = layout.record_bytes().next_multiple_of(4096);
        let floats = |len| b.alloc(len, BufType::F32);
        Self {
            rows,
            x: floats(N * D),
            y: floats(N * D),
            caches: [0, 1].map(|_| b.alloc(2 * PAGE_TOKENS * D, BufType::F16)),
            state: floats(D * D),
            parts: floats(N * TOP_K * D),
            choices: [floats(N * TOP_K), floats(N * TOP_K)],
            square: weight(encoding, D, D),
            vector: weight(Encoding::F32, 1, D / HEADS),
            heads: [0, 1].map(|_| weight(Encoding::F32, 1, HEADS)),
            taps: weight(Encoding::F32, D, 4),
            slab: b.alloc_slab(slot_bytes, EXPERTS as u32),
            layout,
            ready: Vec::with_capacity(EXPERTS),
            routes: Routes::default(),
            b,
        }
    }

    fn run(&mut self) {
        let (mut ready, mut routes) = (take(&mut self.ready), take(&mut self.routes));
        self.verbs(&mut ready, &mut routes);
        (self.ready, self.routes) = (ready, routes);
    }

    fn verbs(&self, ready: &mut Vec<Ready>, routes: &mut Routes) {
        let Self { b, rows, x, y, .. } = self;
        let mut p = b.begin();
        let [vx, vy] = [x, y].map(|buf| View::of(buf, D));
        let d_head = D / HEADS;
        b.clear(&mut p, x, 0..N * D);
        b.write(&mut p, x, 5, &[1.0, 2.0, 3.0]);
        b.copy(&mut p, x, 0, D, D);
        b.embed(&mut p, &self.square, rows, vx);
        let rms = Norm::rms(Some(&self.vector), [HEADS, d_head], 1e-6);
        b.norm(&mut p, vx, &rms, N, vy);
        b.norm(&mut p, vy, &Norm::l2([HEADS, d_head], 1e-6, 1.0), N, vy);
        b.linear(&mut p, vx, &self.square, N, vy);
        b.linear(&mut p, vx, &self.square, 1, vy);
        b.add(&mut p, vx, vy, D, N);
        b.glu(&mut p, Glu::Silu, vx, vy, D, N, vx);
        b.activate(&mut p, Unary::Softcap(30.0), vx, D, N);
        b.rotary_table(&mut p, &self.heads[0], 1.0, rows, View::of(&self.parts, 2 * HEADS));
        let table = View::of(&self.parts, 2 * HEADS);
        let shape = [HEADS, d_head, 2 * HEADS];
        b.rope(&mut p, vx, shape, table, Pairing::Adjacent, N);
        self.attend(&mut p);
        b.causal_conv(&mut p, vx, &self.taps, 2, &self.state, rows, vy);
        let gates = self.choices.each_ref().map(|buf| View { buf, offset: 0, stride: 1 });
        b.delta_gate(&mut p, gates[0], gates[1], [&self.heads[0], &self.heads[1]], 1);
        let args = DeltaStep {
            q: vx,
            k: vx,
            v: vy,
            decay: View::of(&self.parts, HEADS),
            beta: View::of(&self.parts, HEADS),
            state: &self.state,
            n_key_heads: HEADS,
            n_value_heads: HEADS,
            d_key: d_head,
            d_value: d_head,
        };
        b.delta_step(&mut p, &args, rows, vy);
        b.norm(&mut p, vx, &rms.gated(vy, Glu::Silu), N, vx);
        self.heads_and_streams(&mut p);
        let [ids, weights] = &self.choices;
        let router = Router {
            scores: Scores::Sigmoid,
            groups: Some(Groups { count: 4, kept: 2 }),
            ..Router::softmax([EXPERTS, TOP_K], true)
        };
        let routed = b.route(&mut p, vx, &router, N, [ids, weights]);
        p.read_routes(&routed, routes).expect("the processor is not lost");
        let args = MoeFfn { x: vx, routed: &routed, layout: &self.layout, slab: &self.slab };
        b.moe_ffn(&mut p, &args, Experts::Ready(ready), &self.parts);
        p.submit();
        b.moe_ffn(&mut p, &args, Experts::Resident { first_slot: 0 }, &self.parts);
        let shared = Shared { x: vy, gate: Some(View::of(weights, 1)) };
        b.moe_join(&mut p, &routed, &self.parts, Some(shared), D, vx);
        b.select_outputs(&mut p, vx, D, rows, 0, 1, vy);
        let mut some = [0.0; 7];
        p.read(x, 3..10, &mut some).expect("the processor is not lost");
    }

    fn attend(&self, p: &mut <CpuBackend as Backend>::Pass) {
        let Self { b, rows, x, y, .. } = self;
        let [vx, vy] = [x, y].map(|buf| View::of(buf, D));
        let d_head = D / HEADS;
        let index = IndexSelect {
            q: vx,
            k: View::of(y, d_head),
            k_cache: &self.caches[0],
            weights: None,
            n_heads: HEADS,
            d: d_head,
            scale: 1.0,
            sum_scale: 1.0,
            pool: Some(Pool {
                ratio: RATIO,
                norm: &self.vector,
                eps: 1e-6,
                inv_freq: &self.heads[0],
                rotary_scale: 1.0,
            }),
            top: TOP,
            ids: &self.parts,
        };
        let selection = b.index_select(p, &index, rows);
        let args = Attention {
            q: vx,
            k: Some(vy),
            v: Some(vy),
            k_cache: &self.caches[0],
            v_cache: Some(&self.caches[1]),
            n_heads: HEADS,
            n_kv_heads: HEADS,
            d_key: d_head,
            d_value: d_head,
            scale: 1.0,
            window: Some(20),
            sinks: Some(&self.heads[0]),
            selection: Some(&selection),
        };
        b.attention(p, &args, rows, vx);
    }

    fn heads_and_streams(&self, p: &mut <CpuBackend as Backend>::Pass) {
        let (b, d_head, shape) = (&self.b, D / HEADS, [HEADS, D / HEADS]);
        let [vx, vy] = [&self.x, &self.y].map(|buf| View::of(buf, D));
        let one = View::of(&self.parts, d_head);
        let (stride, first, rows) = (d_head, 0, 7);
        let heads =
            HeadRows { heads: 1, stride, first, rows, x_head: 0, out_head: 0, transposed: false };
        b.linear_heads(p, vx, &self.square, &heads, N, vy);
        b.linear_heads(p, vx, &self.square, &HeadRows { transposed: true, ..heads }, N, vy);
        b.copy_heads(p, vx, [HEADS, d_head, d_head, 3], N, vy);
        b.stream_mix(p, vx, vy, shape, N, one);
        b.stream_join(p, vx, one, Some(View::of(&self.choices[0], 0)), shape, N);
        b.row_gate(p, vx, vy, one, shape, N, vy);
    }

    /// Experts that arrive.
    fn arrive(&mut self) {
        let pin: Arc<()> = Arc::new(());
        let experts = 0..EXPERTS as u32;
        self.ready.extend(experts.map(|e| Ready::new(e, e, pin.clone())));
    }
}

/// The only test of this binary: others would allocate beside it.
#[test]
fn no_verb_allocates_after_prepare() {
    for (activations, encoding) in [
        (Activations::Auto, Encoding::Q4G64),
        (Activations::F32, Encoding::Q8),
        (Activations::I8, Encoding::Bf16),
    ] {
        let mut step = Step::new(activations, encoding, 3);
        let limits = Limits {
            rows: N,
            d_in: D,
            top_k: TOP_K,
            d_expert: D_EXPERT,
            d_model: D,
            n_experts: EXPERTS,
            context_tokens: 2 * PAGE_TOKENS,
            n_heads: HEADS,
            d_head: D / HEADS,
            d_index: D / HEADS,
            index_ratio: RATIO,
        };
        step.b.prepare(&limits);
        step.routes.set(TOP_K, |ids| ids.resize(N * TOP_K, 0));
        for round in 0..3 {
            step.arrive();
            let before = ALLOCATIONS.load(SeqCst);
            step.run();
            let count = ALLOCATIONS.load(SeqCst) - before;
            let taken = step.b.scratch_taken();
            assert_eq!(taken, step.b.scratch_bytes(&limits), "{activations}, {encoding}");
            assert_eq!(count, 0, "round {round}, {activations}, {encoding}");
        }
    }
    let before = ALLOCATIONS.load(SeqCst);
    drop(vec![0u8; 100]);
    assert!(ALLOCATIONS.load(SeqCst) > before, "the counter counts");
}
