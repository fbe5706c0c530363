//! The verb `moe_ffn`: the experts that have arrived, for the rows that chose them.

use crate::backend::{Run, Tools};
use crate::buf::CpuBuf;
use crate::elementwise::Zip;
use crate::linear::{Input, Laid, Linear, Matrix, unit};
use crate::matmul::{Places, round};
use crate::quantise::Which;
use crate::scratch::{Lists, PAIRS, Sizes, ThreadAreas, thread_floats};
use crate::simd::dispatch;
use crate::slab::CpuSlab;
use crate::view::Mat;
use snowmelt_backend::{ExpertLayout, Experts, MatrixLayout, Ready, Routed, View};
use std::ops::Range;

/// Who is there: expert index and slot by position.
enum Present<'a> {
    Ready(&'a [Ready]),
    Resident { first_slot: u32, experts: usize },
}

impl Present<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Ready(ready) => ready.len(),
            Self::Resident { experts, .. } => *experts,
        }
    }

    fn expert(&self, index: usize) -> u32 {
        match self {
            Self::Ready(ready) => ready[index].expert(),
            Self::Resident { .. } => index as u32,
        }
    }

    fn slot(&self, index: usize) -> u32 {
        match self {
            Self::Ready(ready) => ready[index].slot(),
            Self::Resident { first_slot, .. } => first_slot + index as u32,
        }
    }

    /// One more than the greatest expert index.
    fn end(&self) -> usize {
        (0..self.len()).map(|i| self.expert(i) as usize + 1).max().unwrap_or(0)
    }
}

/// What `moe_ffn` works on.
pub(crate) struct Ffn<'a> {
    pub(crate) x: View<'a, CpuBuf>,
    pub(crate) routed: &'a Routed<CpuBuf>,
    pub(crate) layout: &'a ExpertLayout,
    pub(crate) slab: &'a CpuSlab,
    pub(crate) out: &'a CpuBuf,
}

/// Computes the experts that are there, for the rows that chose them.
pub(crate) fn moe_ffn(run: &mut Run<'_>, ffn: &Ffn<'_>, experts: &Experts<'_>) {
    let (n, top_k) = (ffn.routed.n, ffn.routed.top_k);
    let [d_model, d_expert] = shape(ffn.layout);
    let choices = n * top_k;
    let x = run.mat(ffn.x, n, d_model);
    let out = run.dense(ffn.out, choices, d_model);
    let ids = run.floats(&ffn.routed.ids, &(0..choices)).cast::<u32>();
    // SAFETY: u32 bits, as `route` wrote them; nothing writes them during this verb.
    #[expect(unsafe_code, reason = "ids lie in an f32 buffer")]
    let ids = unsafe { std::slice::from_raw_parts(ids, choices) };
    let present = match experts {
        Experts::Ready(ready) => Present::Ready(ready),
        Experts::Resident { first_slot } => {
            let experts = ids.iter().max().map_or(0, |id| *id as usize + 1);
            Present::Resident { first_slot: *first_slot, experts }
        }
    };
    let d_in = d_model.max(d_expert);
    let thread = thread_floats(d_in, 0, 0, 0);
    let experts = present.end();
    let pooled = 0;
    run.reserve(Sizes { rows: n, d_in, choices, d_expert, experts, pooled, thread });
    let [pairs, rows] = list(&mut run.scratch.lists(), &present, ids, top_k);
    if pairs == 0 {
        return;
    }
    let tools = run.tools;
    let x_places = Places { codes: run.scratch.x(d_model), floats: run.scratch.x_floats(d_model) };
    let inner = run.scratch.gate_up(d_expert);
    let places = Places { codes: run.scratch.inner(d_expert), floats: inner[0] };
    let areas = run.scratch.thread_areas();
    let lists = run.scratch.lists();
    let [gate, up, down] = ffn.layout.pieces();
    // Each row that is wanted is rounded once for all its experts.
    let rows = Which::These(&lists.rows[..rows]);
    let rounded = |piece: &MatrixLayout| round(tools, x, rows, d_model, piece.encoding, x_places);
    let mut input = rounded(gate);
    for first in (0..pairs).step_by(PAIRS) {
        let window = first..(first + PAIRS).min(pairs);
        let all = Which::All(window.len());
        let wave = Wave { tools, ffn, present: &present, lists: &lists, window, areas };
        if gate.encoding == up.encoding {
            wave.inner(input, inner, &[0, 1]);
        } else {
            // What suits one need not suit the other.
            input = rounded(gate);
            wave.inner(input, inner, &[0]);
            wave.inner(rounded(up), inner, &[1]);
        }
        let input = round(tools, inner[0], all, d_expert, down.encoding, places);
        wave.down(input, out);
    }
}

/// Checks that the pieces fit together; `[d_model, d_expert]`.
fn shape(layout: &ExpertLayout) -> [usize; 2] {
    let [gate, up, down] = layout.pieces().map(|piece| [piece.d_out, piece.d_in]);
    let [d_expert, d_model] = gate;
    assert!(up == gate && down == [d_model, d_expert], "an expert of {gate:?} {up:?} {down:?}");
    [d_model, d_expert]
}

/// Lists the pairs of each expert that is there, and the rows that are in any; returns how many
/// there are of both.
fn list(lists: &mut Lists<'_>, present: &Present<'_>, ids: &[u32], top_k: usize) -> [usize; 2] {
    let Lists { expert_index, starts, rows, pair_rows, pair_outs } = lists;
    expert_index.fill(0);
    let count = present.len();
    for index in 0..count {
        expert_index[present.expert(index) as usize] = index as u32 + 1;
    }
    let index_of = |id: u32| match expert_index.get(id as usize) {
        None | Some(0) => None,
        Some(index) => Some(*index as usize - 1),
    };
    starts[..=count].fill(0);
    let mut wanted = 0;
    for (row, ids) in ids.chunks_exact(top_k).enumerate() {
        let before = wanted;
        for index in ids.iter().filter_map(|id| index_of(*id)) {
            starts[index + 1] += 1;
            wanted = before + 1;
        }
        if wanted > before {
            rows[before] = row as u32;
        }
    }
    for index in 0..count {
        starts[index + 1] += starts[index];
    }
    let pairs = starts[count];
    // Each start is moved to its end while its pairs are written, then all are moved back.
    for (choice, id) in ids.iter().enumerate() {
        if let Some(index) = index_of(*id) {
            let at = starts[index] as usize;
            pair_rows[at] = (choice / top_k) as u32;
            pair_outs[at] = choice as u32;
            starts[index] += 1;
        }
    }
    starts.copy_within(0..count, 1);
    starts[0] = 0;
    [pairs as usize, wanted]
}

/// Pairs of a window of the lists, on their way from x to out. Inner rows are numbered from the
/// beginning of the window.
struct Wave<'a> {
    tools: Tools<'a>,
    ffn: &'a Ffn<'a>,
    present: &'a Present<'a>,
    lists: &'a Lists<'a>,
    window: Range<usize>,
    areas: ThreadAreas,
}

/// Outputs that both matrices compute together.
fn common_unit([a, b]: [&MatrixLayout; 2]) -> usize {
    let (a, b) = (unit(a.encoding), unit(b.encoding));
    if a == b { a } else { a * b }
}

/// What one thread does of one expert.
struct Piece {
    matrices: [Matrix; 3],
    biases: Option<[Laid; 3]>,
    pairs: Range<usize>,
    outputs: Range<usize>,
}

impl Wave<'_> {
    /// The pieces `which` of gate (0) and up (1), into the rows of `out`; after up, their product
    /// into the rows of the first.
    fn inner(&self, x: Input, out: [Mat; 2], which: &[usize]) {
        let layout = self.ffn.layout;
        let unit = common_unit([&layout.gate, &layout.up]);
        self.tools.all(|thread| {
            self.share(thread, layout.gate.d_out, unit, |piece| {
                let from = piece.pairs.start - self.window.start;
                let out = out.map(|out| Mat { ptr: out.row(from), ..out });
                let x_rows = Some(&self.lists.pair_rows[piece.pairs.clone()]);
                for &i in which {
                    let linear = Linear::new(piece.matrices[i], x, out[i]);
                    self.linear(thread, &piece, &Linear { x_rows, ..linear });
                    if let Some(biases) = &piece.biases {
                        let (outputs, n) = (piece.outputs.clone(), piece.pairs.len());
                        biases[i].add(outputs, n, |t| out[i].row(t));
                    }
                }
                if which.contains(&1) {
                    let (rows, columns) = (0..piece.pairs.len(), piece.outputs);
                    let [a, b] = out;
                    let op = layout.glu;
                    dispatch(self.tools.isa, Zip { a, b, out: a, rows, columns, op });
                }
            });
        });
    }

    /// Down, from inner rows to the rows of `out` that the pairs name.
    fn down(&self, inner: Input, out: Mat) {
        let layout = &self.ffn.layout.down;
        self.tools.all(|thread| {
            self.share(thread, layout.d_out, unit(layout.encoding), |piece| {
                let from = piece.pairs.start - self.window.start;
                let out_rows = Some(&self.lists.pair_outs[piece.pairs.clone()]);
                let linear = Linear::new(piece.matrices[2], inner.skip(from), out);
                self.linear(thread, &piece, &Linear { out_rows, ..linear });
                if let Some(biases) = &piece.biases {
                    let rows = &self.lists.pair_outs[piece.pairs.clone()];
                    biases[2].add(piece.outputs.clone(), rows.len(), |t| out.row(rows[t] as usize));
                }
            });
        });
    }

    fn linear(&self, thread: usize, piece: &Piece, linear: &Linear<'_>) {
        let (n, outputs) = (piece.pairs.len(), piece.outputs.clone());
        let scratch = self.areas.of(thread);
        Linear { n, outputs, scratch, ..linear.clone() }.compute(self.tools.isa);
    }

    /// Calls `job` for what falls to a thread: outputs of experts in units of `unit`, so divided
    /// that all threads have about as much to do.
    fn share(&self, thread: usize, d_out: usize, unit: usize, job: impl Fn(Piece)) {
        let units = d_out.div_ceil(unit);
        let threads = self.tools.threads();
        // Reading weights costs as much as a few rows.
        let cost = |pairs: &Range<usize>| if pairs.is_empty() { 0 } else { pairs.len() + 4 };
        let pairs = |index| self.lists.pairs(index, &self.window);
        let total: usize = (0..self.present.len()).map(|i| units * cost(&pairs(i))).sum();
        let (low, high) = (total * thread / threads, total * (thread + 1) / threads);
        let mut base = 0;
        for index in 0..self.present.len() {
            let pairs = pairs(index);
            let cost = cost(&pairs);
            if cost == 0 {
                continue;
            }
            let unit_at = |at: usize| (at.saturating_sub(base) / cost).min(units);
            let mine = unit_at(low)..unit_at(high);
            base += units * cost;
            if !mine.is_empty() {
                let Ffn { slab, layout, .. } = self.ffn;
                let slot = self.present.slot(index);
                let (matrices, biases) = (slab.pieces(slot, layout), slab.biases(slot, layout));
                let outputs = mine.start * unit..(mine.end * unit).min(d_out);
                job(Piece { matrices, biases, pairs, outputs });
            }
        }
    }
}
