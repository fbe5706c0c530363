//! Slabs, pins and `moe_ffn`.

use super::case::{Bench, Case, Suite, Way, logits_for};
use super::data::{Rng, Weights};
use super::dense::{SPOILT, forget_spoilt};
use super::report::{Bound, Part, Tolerance, same};
use super::timeline::Timeline;
use crate::fetch::{PinOwner, Ready};
use crate::verbs::{
    Backend, BufType, ExpertLayout, Experts, Glu, HostRecords, MatrixLayout, MoeFfn, Pass, Routed,
    Slab, View,
};
use snowmelt_weights::Encoding::{self, Bf16, F16, F32, Q4G32, Q4G64, Q8};
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
    ];
    for (encodings, d_model, d_expert) in small.into_iter().chain(quantised) {
        for (n, top_k) in [(1, 3), (2, 1), (7, 4), (33, 3)] {
            suite.check(&Ffn::new(encodings, [d_model, d_expert], n, top_k));
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

    fn piece(&self, slot: u32, piece: usize) -> &[u8] {
        let layout = self.layout.pieces()[piece];
        &self.record(slot)[layout.offset..][..layout.bytes()]
    }
}

/// Pieces in the order down, gate, up, with bytes of nobody's between them.
fn layout(encodings: [Encoding; 3], [d_model, d_expert]: [usize; 2]) -> ExpertLayout {
    let matrix = |piece: usize, d_out, d_in, offset| MatrixLayout {
        encoding: encodings[piece],
        d_out,
        d_in,
        offset,
    };
    let after = |m: &MatrixLayout| (m.offset + m.bytes()).next_multiple_of(64) + 64;
    let down = matrix(2, d_model, d_expert, 64);
    let gate = matrix(0, d_expert, d_model, after(&down));
    let up = matrix(1, d_expert, d_model, after(&gate));
    ExpertLayout { glu: Glu::Silu, gate, up, down }
}

fn record(rng: &mut Rng, layout: &ExpertLayout) -> Vec<u8> {
    let mut bytes = vec![0xFF; 1 + layout.record_bytes()];
    for piece in layout.pieces() {
        let weights = Weights::random(rng, piece.encoding, piece.d_out, piece.d_in);
        bytes[1 + piece.offset..][..piece.bytes()].copy_from_slice(&weights.bytes);
    }
    bytes
}

impl Ffn {
    fn new(encodings: [Encoding; 3], widths: [usize; 2], n: usize, top_k: usize) -> Self {
        let name = format!("moe_ffn {encodings:?} {widths:?} n {n} top_k {top_k}");
        let mut rng = Rng::named(&name);
        let layout = layout(encodings, widths);
        let shifted = (0..N_EXPERTS).map(|_| record(&mut rng, &layout)).collect();
        let wanted = |e: &u32| e % 4 != 2;
        let mut row = || rng.permutation(N_EXPERTS).into_iter().map(|e| e as u32).filter(wanted);
        let choices: Vec<u32> =
            (0..n).flat_map(|_| row().take(top_k).collect::<Vec<_>>()).collect();
        let mut x = rng.normals(n * widths[0], 1.0);
        if n > 1 {
            x[..widths[0]].fill(0.0);
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
