//! Verbs on rows alone: `embed`, `linear`, `add`, `glu`, `select_outputs`.

use super::case::{Bench, Case, Suite, Way};
use super::data::{Rng, Weights};
use super::report::{Bound, Part, Tolerance};
use super::timeline::Timeline;
use crate::verbs::{Backend, Glu};
use snowmelt_weights::Encoding;

/// Numbers of rows that every verb is tried with.
pub(super) const ROWS: [usize; 4] = [1, 2, 7, 33];

pub(super) fn cases<B: Backend>(suite: &mut Suite<'_, B>) {
    for encoding in Encoding::ALL {
        for d in widths(encoding) {
            suite.check(&Embed::new(encoding, 11, d));
        }
        for (d_in, d_out) in shapes(encoding) {
            for n in ROWS {
                suite.check(&Linear::new(encoding, d_in, d_out, n));
            }
        }
        // More rows and more outputs than any tile.
        suite.check(&Linear::new(encoding, 64, 5, 130));
        for n in [1, 9] {
            suite.check(&Linear::new(encoding, 64, 300, n));
        }
    }
    let clamped = Glu::Clamped { alpha: 1.702, limit: 2.0 };
    let glus = [Glu::Silu, Glu::Sigmoid, Glu::GeluTanh, clamped].map(Kind::Glu);
    for kind in [Kind::Add].into_iter().chain(glus) {
        for (n, width) in [(1, 1), (2, 7), (7, 16), (33, 37)] {
            suite.check(&Pointwise::new(kind, n, width));
        }
    }
    for (lengths, width) in [(vec![1], 1), (vec![4, 1, 9], 5), (vec![33, 2], 64)] {
        suite.check(&Select::new(&lengths, width));
    }
}

/// A row that is spoilt in one way; only what becomes of the others is compared.
pub(super) const SPOILT: usize = 2;
/// That way, for verbs that may round their rows before use.
pub(super) const SPOIL: Way = Way::variant(1, "another row is NaN");

/// Fills the row that is not compared.
pub(super) fn forget_spoilt(all: &mut [f32], width: usize) {
    if let Some(row) = all.chunks_exact_mut(width).nth(SPOILT) {
        row.fill(0.0);
    }
}

/// Widths that an encoding can hold, with tails of every SIMD width where it can.
pub(super) fn widths(encoding: Encoding) -> Vec<usize> {
    let all = [1, 5, 17, 32, 64, 96, 100, 192];
    all.into_iter().filter(|&d| encoding.divides(d)).collect()
}

fn shapes(encoding: Encoding) -> Vec<(usize, usize)> {
    let all = [(1, 1), (7, 3), (17, 5), (32, 1), (64, 9), (96, 33), (100, 4), (320, 6), (512, 17)];
    all.into_iter().filter(|&(d_in, _)| encoding.divides(d_in)).collect()
}

struct Embed {
    table: Weights,
    tokens: Vec<u32>,
    name: String,
}

impl Embed {
    fn new(encoding: Encoding, n_vocab: usize, d: usize) -> Self {
        let name = format!("embed {encoding} [{n_vocab}, {d}]");
        let mut rng = Rng::named(&name);
        let table = Weights::encode(encoding, &rng.normals(n_vocab * d, 1.0), d);
        let mut tokens: Vec<u32> = (0..6).map(|_| rng.below(n_vocab) as u32).collect();
        tokens.extend([0, n_vocab as u32 - 1]);
        Self { table, tokens, name }
    }
}

impl Case for Embed {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn ways(&self) -> Vec<Way> {
        Way::ROWS.to_vec()
    }

    fn run<B: Backend>(&self, bench: &mut Bench<'_, B>, way: Way) -> Vec<Part> {
        let (table, d) = (bench.weight(&self.table), self.table.d_in);
        let timeline = Timeline::new(&[self.tokens.len()]);
        let mut all = vec![f32::NAN; self.tokens.len() * d];
        for step in timeline.steps(way) {
            let rows = timeline.rows_with(&step, |at| self.tokens[at], |_| false);
            let out = bench.output(rows.len(), d, way);
            bench.b.embed(&mut bench.pass, &table, &rows, out.view());
            timeline.scatter(&step, &bench.finish(&out), d, &mut all);
        }
        vec![Part::exact("out", d, all)]
    }
}

struct Linear {
    w: Weights,
    x: Vec<f32>,
    n: usize,
    name: String,
}

impl Linear {
    fn new(encoding: Encoding, d_in: usize, d_out: usize, n: usize) -> Self {
        let name = format!("linear {encoding} [{n}, {d_in}] -> {d_out}");
        let mut rng = Rng::named(&name);
        let w = Weights::random(&mut rng, encoding, d_out, d_in);
        let mut x = rng.normals(n * d_in, 1.0);
        if n > 1 {
            // A row whose largest value is zero has no scale.
            x[d_in..2 * d_in].fill(0.0);
        }
        Self { w, x, n, name }
    }
}

impl Case for Linear {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn bound<'a>(&self, tolerance: &'a Tolerance) -> &'a Bound {
        tolerance.product(self.w.encoding.is_quantised())
    }

    fn ways(&self) -> Vec<Way> {
        [&Way::ROWS[..], &[SPOIL]].concat()
    }

    fn run<B: Backend>(&self, bench: &mut Bench<'_, B>, way: Way) -> Vec<Part> {
        let w = bench.weight(&self.w);
        let &Weights { d_in, d_out, .. } = &self.w;
        let timeline = Timeline::new(&[self.n]);
        let mut all = vec![f32::NAN; self.n * d_out];
        let mut x = self.x.clone();
        if way.variant == SPOIL.variant && self.n > SPOILT {
            x[SPOILT * d_in..][..d_in].fill(f32::NAN);
        }
        for step in timeline.steps(way) {
            let x = bench.input(&timeline.gather(&step, &x, d_in), d_in, way);
            let n = timeline.numbers(&step).len();
            let out = bench.output(n, d_out, way);
            bench.b.linear(&mut bench.pass, x.view(), &w, n, out.view());
            timeline.scatter(&step, &bench.finish(&out), d_out, &mut all);
        }
        forget_spoilt(&mut all, d_out);
        vec![Part::new("out", d_out, all)]
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Add,
    Glu(Glu),
}

struct Pointwise {
    kind: Kind,
    x: Vec<f32>,
    y: Vec<f32>,
    n: usize,
    width: usize,
    name: String,
}

impl Pointwise {
    fn new(kind: Kind, n: usize, width: usize) -> Self {
        let name = format!("{kind:?} [{n}, {width}]").to_lowercase();
        let mut rng = Rng::named(&name);
        let (mut x, mut y) = (rng.normals(n * width, 2.0), rng.normals(n * width, 2.0));
        // Where `exp` overflows, and where its argument is zero.
        for (i, extreme) in [-200.0, 200.0, -90.0, 0.0, 20.0, -20.0].into_iter().enumerate() {
            let at = rng.below(n * width);
            if let (true, Some(value)) = (n * width > i, [&mut x, &mut y][i % 2].get_mut(at)) {
                *value = extreme;
            }
        }
        Self { kind, x, y, n, width, name }
    }
}

impl Case for Pointwise {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn ways(&self) -> Vec<Way> {
        let mut ways = Way::ROWS.to_vec();
        if self.kind != Kind::Add {
            ways.extend([Way::variant(1, "out is gate"), Way::variant(2, "out is up")]);
        }
        ways
    }

    fn run<B: Backend>(&self, bench: &mut Bench<'_, B>, way: Way) -> Vec<Part> {
        let (timeline, width) = (Timeline::new(&[self.n]), self.width);
        let mut all = vec![f32::NAN; self.n * width];
        for step in timeline.steps(way) {
            let x = bench.input(&timeline.gather(&step, &self.x, width), width, way);
            let y = bench.input(&timeline.gather(&step, &self.y, width), width, way);
            let n = timeline.numbers(&step).len();
            let fresh = bench.output(n, width, way);
            let (b, p, x_view, y_view) = (bench.b, &mut bench.pass, x.view(), y.view());
            let out = match (self.kind, way.variant) {
                (Kind::Glu(_), 0) => &fresh,
                (Kind::Glu(_), 2) => &y,
                _ => &x,
            };
            match self.kind {
                Kind::Add => b.add(p, x_view, y_view, width, n),
                Kind::Glu(f) => b.glu(p, f, x_view, y_view, width, n, out.view()),
            }
            timeline.scatter(&step, &bench.finish(out), width, &mut all);
        }
        vec![Part::new("out", width, all)]
    }
}

struct Select {
    timeline: Timeline,
    x: Vec<f32>,
    width: usize,
    name: String,
}

impl Select {
    fn new(lengths: &[usize], width: usize) -> Self {
        let name = format!("select_outputs {lengths:?} x {width}");
        let timeline = Timeline::new(lengths);
        let x = Rng::named(&name).normals(timeline.tokens() * width, 1.0);
        Self { timeline, x, width, name }
    }
}

impl Case for Select {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn ways(&self) -> Vec<Way> {
        let windowed = Way::variant(2, "two at a time");
        vec![Way { padded: true, ..windowed }, Way { padded: true, ..Way::WHOLE }]
    }

    fn run<B: Backend>(&self, bench: &mut Bench<'_, B>, way: Way) -> Vec<Part> {
        let [step] = &self.timeline.steps(way)[..] else { panic!("one step") };
        let rows = self.timeline.rows_with(step, |_| 0, |at| at % 3 != 1);
        let count = rows.outputs().len();
        let x = bench.input(&self.x, self.width, way);
        let window = if way.variant == 0 { count } else { way.variant };
        let mut all = Vec::new();
        for first in (0..count).step_by(window) {
            let n = window.min(count - first);
            let out = bench.output(n, self.width, way);
            let (b, p, width) = (bench.b, &mut bench.pass, self.width);
            b.select_outputs(p, x.view(), width, &rows, first, n, out.view());
            all.extend(bench.finish(&out));
        }
        vec![Part::exact("out", self.width, all)]
    }
}
