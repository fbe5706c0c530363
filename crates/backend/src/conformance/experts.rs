//! Slabs, pins and `moe_ffn`.

use super::case::{Bench, Case, Suite, Way, logits_for};
use super::data::{Rng, Weights};
use super::dense::{SPOILT, forget_spoilt};
use super::report::{Bound, Part, Tolerance, same};
use super::timeline::Timeline;
use crate::fetch::{PinOwner, Ready};
use crate::layout::{ExpertLayout, MatrixLayout, Order, Scales};
use crate::verbs::{Backend, BufType, Experts, Glu, HostRecords, MoeFfn, Pass, Routed, Slab, View};
use snowmelt_weights::Encoding::{self, Bf16, F8E4M3, F16, F32, Mxfp4, Q4G32, Q4G64, Q8};
use std::ops::Range;
use std::sync::{Arc, Weak};

/// Slots are a multiple of this.
const SLOT_UNIT: usize = 4096;
/// Slots before the first expert of a resident layer.
const FIRST_SLOT: u32 = 2;

pub(super) fn cases<B: Backend>(suite: &mut Suite<'_, B>) {
    let small = [([F32, F32, F32], 5, 3), ([F16, Bf16, F32], 17, 20), ([Bf16, Bf16, Bf16], 64, 96)];
    let quantised = [
        ([Q8, Q8, Q8], 32, 96),
        ([Q4G32, Q4G32, Q4G32], 96, 32),
        ([Q4G64, Q4G64, Q4G64], 128, 192),
        ([Q4G64, Q4G32, Q8], 64, 64),
        ([Q8, Q4G64, F32], 320, 64),
        ([F8E4M3, F8E4M3, F8E4M3], 136, 33),
        ([Mxfp4, Mxfp4, F8E4M3], 64, 32),
    ];
    for (encodings, d_model, d_expert) in small.into_iter().chain(quantised) {
        for (n, top_k) in [(1, 3), (2, 1), (7, 4), (33, 3)] {
            suite.check(&Ffn::new(encodings, [d_model, d_expert], n, top_k));
        }
    }
    let published: [(&str, [usize; 2], Published); 4] = [
        ("transposed f32", [20, 17], |widths| in_turns(F32, widths)),
        ("transposed bf16", [64, 48], |widths| in_turns(Bf16, widths)),
        ("mxfp4 with exponents apart", [64, 96], exponents_apart),
        ("fp8 with blocks apart", [200, 150], blocks_apart),
    ];
    for (form, widths, layout) in published {
        for (n, top_k) in [(1, 3), (2, 1), (7, 4), (33, 3)] {
            let name = format!("moe_ffn {form} {widths:?} n {n} top_k {top_k}");
            suite.check(&Ffn::of(name, &layout(widths), n, top_k));
        }
    }
    suite.check(&Ffn::new([Q4G32, Q4G32, Q8], [64, 32], 100, 3));
    let clamped = Glu::Clamped { alpha: 1.702, limit: 0.7 };
    for glu in [Glu::Sigmoid, Glu::GeluTanh, clamped] {
        for encodings in [[F32, F32, F32], [Q8, Q4G32, Q8]] {
            suite.check(&Ffn::new(encodings, [64, 96], 7, 3).with(glu));
        }
    }
    slots_are_aligned(suite);
    pins_leave_with_their_submission(suite);
    pins_leave_with_a_dropped_pass(suite);
}

/// Experts of a layer and rows that choose among them; one in four is never chosen.
struct Ffn {
    layout: ExpertLayout,
    n: usize,
    top_k: usize,
    choices: Vec<u32>,
    x: Vec<f32>,
    records: Arc<Records>,
    name: String,
}

const N_EXPERTS: usize = 8;

/// Records one byte off any alignment.
#[derive(Debug)]
struct Records {
    layout: ExpertLayout,
    shifted: Vec<Vec<u8>>,
}

impl Records {
    fn record(&self, expert: u32) -> &[u8] {
        &self.shifted[expert as usize][1..]
    }
}

impl HostRecords for Records {
    fn records(&self) -> u32 {
        self.shifted.len() as u32
    }

    fn bytes(&self, slot: u32, range: Range<usize>) -> &[u8] {
        let of_one = |piece: &MatrixLayout| piece.regions().contains(&range);
        assert!(self.layout.all_pieces().any(of_one), "{range:?} is no region of one matrix");
        &self.record(slot)[range]
    }
}

/// Pieces in the order down, gate, up, with bytes of nobody's between them.
fn layout(encodings: [Encoding; 3], [d_model, d_expert]: [usize; 2]) -> ExpertLayout {
    let matrix = |piece: usize, d_out, d_in, offset| {
        MatrixLayout::plain(encodings[piece], d_out, d_in, offset)
    };
    let after = |m: &MatrixLayout| (m.offset + m.bytes()).next_multiple_of(64) + 64;
    let down = matrix(2, d_model, d_expert, 64);
    let gate = matrix(0, d_expert, d_model, after(&down));
    let up = matrix(1, d_expert, d_model, after(&gate));
    ExpertLayout { glu: Glu::Silu, gate, up, down, biases: None }
}

/// A layout as some models are published in, for `[d_model, d_expert]`.
type Published = fn([usize; 2]) -> ExpertLayout;

const CLAMPED: Glu = Glu::Clamped { alpha: 1.702, limit: 2.0 };

/// Biases of gate and up in turns, then those of down, from `offset` on.
fn biases([d_model, d_expert]: [usize; 2], offset: usize) -> [MatrixLayout; 3] {
    let half = |first| MatrixLayout {
        order: Order::Strided { first, step: 2 },
        ..MatrixLayout::plain(Bf16, d_expert, 1, offset)
    };
    [half(0), half(1), MatrixLayout::plain(F32, d_model, 1, offset + 4 * d_expert)]
}

/// Columns, gate and up in turns, with biases.
fn in_turns(encoding: Encoding, [d_model, d_expert]: [usize; 2]) -> ExpertLayout {
    let (each, width) = (encoding.row_bytes(1), 2 * d_expert);
    let half = |first| MatrixLayout {
        order: Order::Transposed { first, step: 2, width },
        ..MatrixLayout::plain(encoding, d_expert, d_model, 2)
    };
    let down = MatrixLayout {
        order: Order::Transposed { first: 0, step: 1, width: d_model },
        ..MatrixLayout::plain(encoding, d_model, d_expert, 2 + each * width * d_model)
    };
    let biases = Some(biases([d_model, d_expert], down.offset + down.bytes()));
    ExpertLayout { glu: CLAMPED, gate: half(0), up: half(1), down, biases }
}

/// Rows of gate and up in turns, exponents after the codes, with biases.
fn exponents_apart([d_model, d_expert]: [usize; 2]) -> ExpertLayout {
    let codes = [d_expert * d_model, d_model * d_expert / 2];
    let down_at = codes[0] + 2 * d_expert * d_model / 32 + 5;
    let half = |first| MatrixLayout {
        order: Order::Strided { first, step: 2 },
        scales: Scales::Exponents { offset: codes[0] },
        ..MatrixLayout::plain(Mxfp4, d_expert, d_model, 0)
    };
    let down = MatrixLayout {
        scales: Scales::Exponents { offset: down_at + codes[1] },
        ..MatrixLayout::plain(Mxfp4, d_model, d_expert, down_at)
    };
    let biases = Some(biases([d_model, d_expert], down.regions()[1].end));
    ExpertLayout { glu: CLAMPED, gate: half(0), up: half(1), down, biases }
}

/// Rows of gate, then of up, in one tensor whose blocks of 128 rows share scales.
fn blocks_apart([d_model, d_expert]: [usize; 2]) -> ExpertLayout {
    let gate_up = 2 * d_expert * d_model;
    let scales = Scales::Blocks { offset: gate_up, encoding: F32 };
    let plain = MatrixLayout::plain(F8E4M3, d_expert, d_model, 0);
    let order = Order::Strided { first: d_expert, step: 1 };
    let up = MatrixLayout { order, scales, ..plain };
    let down_at = up.regions()[1].end;
    let down = MatrixLayout {
        scales: Scales::Blocks { offset: down_at + d_model * d_expert, encoding: Bf16 },
        ..MatrixLayout::plain(F8E4M3, d_model, d_expert, down_at)
    };
    let gate = MatrixLayout { scales, ..plain };
    ExpertLayout { glu: Glu::Silu, gate, up, down, biases: None }
}

fn record(rng: &mut Rng, layout: &ExpertLayout) -> Vec<u8> {
    let mut bytes = vec![0xFF; 1 + layout.record_bytes()];
    for piece in layout.all_pieces() {
        let [rows, scales] = piece.regions().map(|r| 1 + r.start..1 + r.end);
        let (encoding, d_in) = (piece.encoding, piece.d_in);
        // Plain numbers of any shape, rows with their scales, or codes and then scales.
        let encoded = match (piece.order, piece.scales) {
            (Order::Plain, Scales::Inline) => {
                Weights::random(rng, encoding, piece.d_out, d_in).bytes
            }
            (_, Scales::Inline) => {
                let count = rows.len() / encoding.row_bytes(1);
                let scale = 1.0 / (d_in as f32).sqrt();
                Weights::encode(encoding, &rng.normals(count, scale), 1).bytes
            }
            // No code of a byte with its last bit clear is NaN.
            _ => (0..rows.len()).map(|_| rng.below(256) as u8 & 0xFE).collect(),
        };
        bytes[rows].copy_from_slice(&encoded);
        let encoded = match piece.scales {
            Scales::Inline => Vec::new(),
            Scales::Exponents { .. } => scales.clone().map(|_| 121 + rng.below(5) as u8).collect(),
            Scales::Blocks { encoding, .. } => {
                let count = scales.len() / encoding.row_bytes(1);
                Weights::encode(encoding, &rng.uniforms(count, 5e-4, 1e-3), 1).bytes
            }
        };
        bytes[scales].copy_from_slice(&encoded);
    }
    bytes
}

impl Ffn {
    fn new(encodings: [Encoding; 3], widths: [usize; 2], n: usize, top_k: usize) -> Self {
        let name = format!("moe_ffn {encodings:?} {widths:?} n {n} top_k {top_k}");
        Self::of(name, &layout(encodings, widths), n, top_k)
    }

    fn of(name: String, layout: &ExpertLayout, n: usize, top_k: usize) -> Self {
        let (mut rng, layout) = (Rng::named(&name), *layout);
        let shifted = (0..N_EXPERTS).map(|_| record(&mut rng, &layout)).collect();
        let wanted = |e: &u32| e % 4 != 2;
        let mut row = || rng.permutation(N_EXPERTS).into_iter().map(|e| e as u32).filter(wanted);
        let choices: Vec<u32> =
            (0..n).flat_map(|_| row().take(top_k).collect::<Vec<_>>()).collect();
        let mut x = rng.normals(n * layout.gate.d_in, 1.0);
        if n > 1 {
            x[..layout.gate.d_in].fill(0.0);
        }
        let records = Arc::new(Records { layout, shifted });
        Self { layout, n, top_k, choices, x, records, name }
    }

    /// The same with another nonlinearity.
    fn with(mut self, glu: Glu) -> Self {
        self.layout.glu = glu;
        self.name += &format!(" {glu:?}");
        self
    }

    fn d_model(&self) -> usize {
        self.layout.gate.d_in
    }

    /// A slab with every record in it; expert `e` in slot `slot(e)`, NaN elsewhere.
    fn slab<B: Backend>(&self, b: &B, slot: impl Fn(u32) -> u32) -> B::Slab {
        let slot_bytes = self.layout.record_bytes().next_multiple_of(SLOT_UNIT) + SLOT_UNIT;
        let slots = N_EXPERTS as u32 + 2 * FIRST_SLOT;
        let slab = b.alloc_slab(slot_bytes, slots);
        for unused in 0..slots {
            slab.upload(unused, 0, &vec![0xFF; slot_bytes]);
        }
        for expert in 0..N_EXPERTS as u32 {
            // In two pieces, as short reads make them.
            let (head, tail) = self.records.record(expert).split_at(33);
            slab.upload(slot(expert), 33, tail);
            slab.upload(slot(expert), 0, head);
        }
        slab
    }

    /// The slab, the slot of each expert in it, and the lists in which experts arrive; no lists
    /// where the layer is resident.
    fn arrivals<B: Backend>(&self, b: &B, way: Way) -> (B::Slab, [u32; N_EXPERTS], Vec<Vec<u32>>) {
        let all: Vec<u32> = (0..N_EXPERTS as u32).collect();
        let mut wanted = all.clone();
        wanted.retain(|e| self.choices.contains(e));
        let in_slots = |slot: fn(u32) -> u32| {
            let slots = std::array::from_fn(|e| slot(e as u32));
            (self.slab(b, slot), slots)
        };
        let scattered = |e: u32| (e * 5 + 3) % (N_EXPERTS as u32 + 2 * FIRST_SLOT);
        let lists = match way.variant {
            DESCENDING => vec![wanted.into_iter().rev().collect()],
            ONE_BY_ONE => wanted.into_iter().rev().map(|e| vec![e]).collect(),
            TWO_GROUPS => {
                let (odd, even) = wanted.into_iter().partition(|e| e % 2 == 1);
                vec![odd, even]
            }
            EVERY_EXPERT => vec![all],
            RESIDENT => Vec::new(),
            _ => vec![wanted],
        };
        if way.variant == ADOPTED
            && let Some(slab) = b.adopt_slab(Arc::clone(&self.records) as Arc<dyn HostRecords>)
        {
            return (slab, std::array::from_fn(|e| e as u32), lists);
        }
        let (slab, slots) = if way.variant == RESIDENT {
            in_slots(|e| FIRST_SLOT + e)
        } else {
            in_slots(scattered)
        };
        (slab, slots, lists)
    }

    /// All experts over some rows; `[n, top_k * d_model]`.
    fn step<B: Backend>(
        &self,
        bench: &mut Bench<'_, B>,
        x: View<'_, B::Buf>,
        routed: &Routed<B::Buf>,
        choices: &[u32],
        way: Way,
    ) -> Vec<f32> {
        let d = self.d_model();
        let len = choices.len() * d;
        let out = bench.buffer(&vec![f32::NAN; len + 7], BufType::F32);
        let (slab, slots, lists) = self.arrivals(bench.b, way);
        let args = MoeFfn { x, routed, layout: &self.layout, slab: &slab };
        let (b, mut arrived) = (bench.b, Vec::new());
        for list in &lists {
            let ready = |&e: &u32| Ready::new(e, slots[e as usize], Arc::new(()));
            let mut ready: Vec<Ready> = list.iter().map(ready).collect();
            b.moe_ffn(&mut bench.pass, &args, Experts::Ready(&mut ready), &out);
            if !ready.is_empty() {
                bench.complaints.push(format!("{} experts were left in the list", ready.len()));
            }
            arrived.extend(list);
            let got = bench.read(&out, len);
            let missing = |at: usize| got[at * d..][..d].iter().filter(|v| v.is_nan()).count();
            let wanted = |at: usize| if arrived.contains(&choices[at]) { 0 } else { d };
            let spoilt = |at: usize| way.variant == SPOIL && at / self.top_k == SPOILT;
            let wrong = (0..choices.len()).find(|&at| !spoilt(at) && missing(at) != wanted(at));
            if let Some(at) = wrong {
                let expert = choices[at];
                let missing = missing(at);
                let what = format!(
                    "result {at}, of expert {expert}: {missing} of {d} elements are NaN after \
                     {arrived:?} arrived"
                );
                bench.complaints.push(what);
            }
        }
        if lists.is_empty() {
            let experts = Experts::Resident { first_slot: FIRST_SLOT };
            b.moe_ffn(&mut bench.pass, &args, experts, &out);
        }
        let mut got = bench.read(&out, len + 7);
        if !got.drain(len..).all(|guard| same(guard, f32::NAN)) {
            bench.complaints.push("results reach beyond the last choice".into());
        }
        got
    }
}

const DESCENDING: usize = 1;
const ONE_BY_ONE: usize = 2;
const TWO_GROUPS: usize = 3;
const EVERY_EXPERT: usize = 4;
const RESIDENT: usize = 5;
const ADOPTED: usize = 6;
/// As [`super::dense::SPOIL`].
const SPOIL: usize = 7;

impl Case for Ffn {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn bound<'a>(&self, tolerance: &'a Tolerance) -> &'a Bound {
        let pieces = self.layout.pieces();
        tolerance.product(pieces.iter().any(|piece| piece.encoding.is_quantised()))
    }

    fn ways(&self) -> Vec<Way> {
        let orders = [
            (DESCENDING, "experts descending"),
            (ONE_BY_ONE, "experts one by one"),
            (TWO_GROUPS, "experts in two groups"),
            (EVERY_EXPERT, "experts that nobody chose"),
            (RESIDENT, "resident"),
            (ADOPTED, "adopted records"),
        ];
        let orders =
            orders.map(|(variant, name)| Way { exact: true, ..Way::variant(variant, name) });
        let spoil = Way::variant(SPOIL, "another row is NaN");
        [&Way::ROWS[..], &orders, &[spoil]].concat()
    }

    fn run<B: Backend>(&self, bench: &mut Bench<'_, B>, way: Way) -> Vec<Part> {
        let (timeline, d) = (Timeline::new(&[self.n]), self.d_model());
        let width = self.top_k * d;
        let mut all = vec![f32::NAN; self.n * width];
        let mut x = self.x.clone();
        if way.variant == SPOIL && self.n > SPOILT {
            x[SPOILT * d..][..d].fill(f32::NAN);
        }
        for step in timeline.steps(way) {
            let numbers = timeline.numbers(&step);
            let choices = &self.choices[numbers[0] * self.top_k..][..numbers.len() * self.top_k];
            let logits = logits_for(choices, self.top_k, N_EXPERTS);
            let routed = bench.route(&logits, [N_EXPERTS, self.top_k]);
            let x = bench.input(&timeline.gather(&step, &x, d), d, way);
            let got = self.step(bench, x.view(), &routed, choices, way);
            timeline.scatter(&step, &got, width, &mut all);
        }
        forget_spoilt(&mut all, width);
        vec![Part::new("out", d, all)]
    }
}

/// Host addresses are those of direct reads.
fn slots_are_aligned<B: Backend>(suite: &mut Suite<'_, B>) {
    let (case, slot_bytes) = ("slots of a slab", 3 * SLOT_UNIT);
    let slab = suite.b.alloc_slab(slot_bytes, 5);
    let (slots, bytes) = (slab.slots(), slab.slot_bytes());
    let what = format!("asked for 5 slots of {slot_bytes} bytes, got {slots} of {bytes}");
    suite.demand((slots, bytes) == (5, slot_bytes), case, what);
    let mut at: Vec<usize> = (0..5).filter_map(|s| slab.host(s)).map(<*mut u8>::addr).collect();
    suite.demand(at.is_empty() || at.len() == 5, case, "some slots have addresses, others none");
    let aligned = at.iter().all(|at| at.is_multiple_of(SLOT_UNIT));
    suite.demand(aligned, case, format!("addresses {at:x?} are not multiples of {SLOT_UNIT}"));
    at.sort_unstable();
    let apart = at.windows(2).all(|pair| pair[1] - pair[0] >= slot_bytes);
    suite.demand(apart, case, format!("slots at {at:x?} overlap"));
}

type Pin = Arc<dyn PinOwner>;

/// Runs `moe_ffn` over pinned experts and hands out a pass that was not submitted.
fn pinned<B: Backend>(b: &B) -> (Bench<'_, B>, B::Buf, Vec<Weak<dyn PinOwner>>) {
    let case = Ffn::new([F32; 3], [16, 8], 2, 3);
    let mut bench = Bench::new(b);
    let logits = logits_for(&case.choices, case.top_k, N_EXPERTS);
    let routed = bench.route(&logits, [N_EXPERTS, case.top_k]);
    let x = bench.input(&case.x, 16, Way::WHOLE);
    let out = bench.buffer(&vec![f32::NAN; case.choices.len() * 16], BufType::F32);
    let slab = case.slab(b, |e| e);
    let pins: Vec<Pin> = (0..N_EXPERTS).map(|_| Arc::new(()) as Pin).collect();
    let held = pins.iter().map(Arc::downgrade).collect();
    let ready = |(e, pin)| Ready::new(e, e, pin);
    let mut ready: Vec<Ready> = (0..).zip(pins).map(ready).collect();
    let args = MoeFfn { x: x.view(), routed: &routed, layout: &case.layout, slab: &slab };
    b.moe_ffn(&mut bench.pass, &args, Experts::Ready(&mut ready), &out);
    if !ready.is_empty() {
        bench.complaints.push(format!("{} experts were left in the list", ready.len()));
    }
    (bench, out, held)
}

fn count(held: &[Weak<dyn PinOwner>]) -> usize {
    held.iter().filter(|pin| pin.strong_count() > 0).count()
}

fn pins_leave_with_their_submission<B: Backend>(suite: &mut Suite<'_, B>) {
    let case = "pins of a submission";
    let (mut bench, out, held) = pinned(suite.b);
    let (before, all) = (count(&held), held.len());
    bench.pass.submit();
    bench.read(&out, 1);
    let after = count(&held);
    for complaint in std::mem::take(&mut bench.complaints) {
        suite.demand(false, case, complaint);
    }
    suite.demand(before == all, case, format!("{before} of {all} pins live before submit"));
    suite.demand(after == 0, case, format!("{after} of {all} pins live after the work is done"));
}

fn pins_leave_with_a_dropped_pass<B: Backend>(suite: &mut Suite<'_, B>) {
    let (bench, _, held) = pinned(suite.b);
    drop(bench);
    let after = count(&held);
    suite.demand(after == 0, "pins of a dropped pass", format!("{after} pins live on"));
}
