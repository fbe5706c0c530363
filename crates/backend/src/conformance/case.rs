//! Cases, the ways they run, and the bench they run on.

use super::LIMITS;
use super::data::Weights;
use super::report::{Bound, Failure, Part, Report, Tolerance, same};
use crate::reference::Reference;
use crate::verbs::{Backend, BufType, Pass, Routed, Router, View};

/// One way of running a case; results must not depend on it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Way {
    pub(super) name: &'static str,
    /// Most rows of one sequence in one step.
    pub(super) chunk: usize,
    /// Whether each sequence has its steps for itself.
    pub(super) alone: bool,
    /// Whether rows lie apart, with NaN between them.
    pub(super) padded: bool,
    /// What the case makes of it: in place, the order of experts.
    pub(super) variant: usize,
    /// Whether the bits must be equal even on a backend that is not held to rows and chunks.
    pub(super) exact: bool,
}

impl Way {
    /// All rows at once, dense.
    pub(super) const WHOLE: Self = Self {
        name: "whole",
        chunk: usize::MAX,
        alone: false,
        padded: false,
        variant: 0,
        exact: false,
    };
    const AGAIN: Self = Self { name: "again", exact: true, ..Self::WHOLE };
    const PADDED: Self = Self { name: "strided views", padded: true, ..Self::WHOLE };
    const TOKENS: Self = Self { name: "row by row", chunk: 1, ..Self::WHOLE };

    /// For verbs without state.
    pub(super) const ROWS: [Self; 3] =
        [Self::TOKENS, Self::PADDED, Self { name: "three rows", chunk: 3, ..Self::PADDED }];

    /// For verbs with state.
    pub(super) const CHUNKS: [Self; 6] = [
        Self::TOKENS,
        Self::PADDED,
        Self { name: "chunks of 7", chunk: 7, ..Self::WHOLE },
        Self { name: "chunks of 33", chunk: 33, ..Self::PADDED },
        Self { name: "alone", alone: true, ..Self::WHOLE },
        Self { name: "alone, chunks of 2", alone: true, chunk: 2, ..Self::WHOLE },
    ];

    /// A way of the case's own.
    pub(super) const fn variant(variant: usize, name: &'static str) -> Self {
        Self { name, variant, ..Self::WHOLE }
    }
}

/// One verb, one shape, one set of operands.
pub(super) trait Case {
    /// Verb, shape, encoding.
    fn name(&self) -> String;

    /// The bound that applies.
    fn bound<'a>(&self, tolerance: &'a Tolerance) -> &'a Bound {
        &tolerance.verbs
    }

    /// Ways besides [`Way::WHOLE`] and its repetition.
    fn ways(&self) -> Vec<Way>;

    /// Runs it; the same parts whatever the way.
    fn run<B: Backend>(&self, bench: &mut Bench<'_, B>, way: Way) -> Vec<Part>;
}

/// What a group of cases runs under.
pub(super) struct Suite<'a, B: Backend> {
    pub(super) b: &'a B,
    tolerance: &'a Tolerance,
    pub(super) report: Report,
}

/// Runs the cases of a group.
pub(super) fn group<B: Backend>(
    b: &B,
    tolerance: &Tolerance,
    cases: impl FnOnce(&mut Suite<'_, B>),
) -> Report {
    b.prepare(&LIMITS);
    let mut suite = Suite { b, tolerance, report: Report::default() };
    cases(&mut suite);
    suite.report
}

impl<B: Backend> Suite<'_, B> {
    /// Runs one case in all its ways.
    pub(super) fn check(&mut self, case: &impl Case) {
        self.report.cases += 1;
        let bound = case.bound(self.tolerance);
        let expected = case.run(&mut Bench::new(&Reference), Way::WHOLE);
        let first = self.run(case, Way::WHOLE);
        self.compare(case, Way::WHOLE, (&expected, &first), Some(bound));
        for way in [vec![Way::AGAIN], case.ways()].concat() {
            let got = self.run(case, way);
            if way.exact || self.tolerance.exact {
                self.compare(case, way, (&first, &got), None);
            } else {
                self.compare(case, way, (&expected, &got), Some(bound));
            }
        }
    }

    /// Notes what is wrong outside of any case.
    pub(super) fn demand(&mut self, holds: bool, case: &str, what: impl Into<String>) {
        if !holds {
            self.fail(case.to_owned(), "structure", what.into());
        }
    }

    fn run(&mut self, case: &impl Case, way: Way) -> Vec<Part> {
        self.report.runs += 1;
        let mut bench = Bench::new(self.b);
        let parts = case.run(&mut bench, way);
        for complaint in bench.complaints {
            self.fail(case.name(), way.name, complaint);
        }
        parts
    }

    fn compare(
        &mut self,
        case: &impl Case,
        way: Way,
        (expected, got): (&[Part], &[Part]),
        bound: Option<&Bound>,
    ) {
        assert_eq!(expected.len(), got.len(), "parts of {}", case.name());
        for (expected, got) in expected.iter().zip(got) {
            let wrong = match bound {
                Some(bound) => expected.exceeds(got, bound),
                None => expected.differs_in_bits(got),
            };
            if let Some(what) = wrong {
                self.fail(case.name(), way.name, what);
            }
        }
    }

    fn fail(&mut self, case: String, way: &'static str, what: String) {
        self.report.failures.push(Failure { case, way, what });
    }
}

/// One backend, one pass, and what was seen beside the results.
pub(super) struct Bench<'a, B: Backend> {
    pub(super) b: &'a B,
    pub(super) pass: B::Pass,
    pub(super) complaints: Vec<String>,
}

/// Rows in a buffer of their own, with a guard value before, between and after them.
pub(super) struct Lane<B: Backend> {
    buf: B::Buf,
    offset: usize,
    stride: usize,
    width: usize,
    n: usize,
    guard: f32,
}

/// Guards an output: no verb makes it by chance.
const UNTOUCHED: f32 = -12345.678;

impl<B: Backend> Lane<B> {
    pub(super) fn view(&self) -> View<'_, B::Buf> {
        View { buf: &self.buf, offset: self.offset, stride: self.stride }
    }

    fn len(&self) -> usize {
        self.offset + self.n * self.stride + 3
    }

    /// The guards, with `rows` between them.
    fn image(&self, rows: &[f32]) -> Vec<f32> {
        let mut image = vec![self.guard; self.len()];
        for (t, row) in rows.chunks_exact(self.width).enumerate() {
            image[self.offset + t * self.stride..][..self.width].copy_from_slice(row);
        }
        image
    }
}

impl<'a, B: Backend> Bench<'a, B> {
    pub(super) fn new(b: &'a B) -> Self {
        Self { b, pass: b.begin(), complaints: Vec::new() }
    }

    fn lane(&mut self, rows: &[f32], width: usize, guard: f32, padded: bool) -> Lane<B> {
        let n = rows.len() / width;
        let (offset, stride) = if padded { (3, width + 5) } else { (0, width) };
        let buf = self.b.alloc(offset + n * stride + 3, BufType::F32);
        let lane = Lane { buf, offset, stride, width, n, guard };
        self.b.write(&mut self.pass, &lane.buf, 0, &lane.image(rows));
        lane
    }

    /// `rows: [_, width]` with NaN around them.
    pub(super) fn input(&mut self, rows: &[f32], width: usize, way: Way) -> Lane<B> {
        self.lane(rows, width, f32::NAN, way.padded)
    }

    /// Room for `[n, width]`.
    pub(super) fn output(&mut self, n: usize, width: usize, way: Way) -> Lane<B> {
        self.lane(&vec![UNTOUCHED; n * width], width, UNTOUCHED, way.padded)
    }

    /// Reads the rows, `[n, width]`, and complains of changes around them.
    pub(super) fn finish(&mut self, lane: &Lane<B>) -> Vec<f32> {
        let got = self.read(&lane.buf, lane.len());
        let row = |t: usize| got[lane.offset + t * lane.stride..][..lane.width].to_vec();
        let rows: Vec<f32> = (0..lane.n).flat_map(row).collect();
        let image = lane.image(&rows);
        if let Some(at) = (0..got.len()).find(|&i| !same(got[i], image[i])) {
            let View { offset, stride, .. } = lane.view();
            self.complaints.push(format!(
                "element {at} lies outside of the rows (offset {offset}, stride {stride}), \
                 yet became {:e}",
                got[at]
            ));
        }
        rows
    }

    /// A buffer filled with `values`.
    pub(super) fn buffer(&mut self, values: &[f32], ty: BufType) -> B::Buf {
        let buf = self.b.alloc(values.len(), ty);
        self.b.write(&mut self.pass, &buf, 0, values);
        buf
    }

    /// Reads the first `len` elements.
    pub(super) fn read(&mut self, buf: &B::Buf, len: usize) -> Vec<f32> {
        let mut into = vec![0.0; len];
        self.pass.read(buf, 0..len, &mut into).expect("the device works");
        into
    }

    /// Loads a weight, in two pieces where it has rows enough.
    pub(super) fn weight(&self, weights: &Weights) -> B::Weight {
        let mut weight = self.b.alloc_weight(weights.encoding, weights.d_out, weights.d_in);
        let (top, bottom) = weights.bytes.split_at(weights.d_out / 2 * weights.row_bytes());
        for (first_row, rows) in [(weights.d_out / 2, bottom), (0, top)] {
            if !rows.is_empty() {
                self.b.fill_weight(&mut weight, first_row, rows);
            }
        }
        weight
    }

    /// `logits: [n, n_experts]`, without renormalisation.
    pub(super) fn route(&mut self, logits: &[f32], shape: [usize; 2]) -> Routed<B::Buf> {
        let [n_experts, top_k] = shape;
        let n = logits.len() / n_experts;
        let router = Router::softmax(shape, false);
        let logits = self.input(logits, n_experts, Way::WHOLE);
        let scratch = [0; 2].map(|_| self.b.alloc(n * top_k, BufType::F32));
        let scratch = [&scratch[0], &scratch[1]];
        self.b.route(&mut self.pass, logits.view(), &router, n, scratch)
    }
}

/// Logits that make a router choose these experts in this order: `choices: [n, top_k]`.
pub(super) fn logits_for(choices: &[u32], top_k: usize, n_experts: usize) -> Vec<f32> {
    let mut logits = Vec::new();
    for row in choices.chunks_exact(top_k) {
        let rank = |e: usize| row.iter().position(|&chosen| chosen as usize == e);
        let logit = |e| rank(e).map_or(-6.0, |rank| 1.0 - rank as f32 * 0.25);
        logits.extend((0..n_experts).map(logit));
    }
    logits
}
