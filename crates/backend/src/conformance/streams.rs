//! `activate`, `stream_mix`, `stream_join`, `row_gate`.

use super::case::{Bench, Case, Suite, Way};
use super::data::Rng;
use super::report::Part;
use super::timeline::Timeline;
use crate::verbs::{Backend, Unary};

pub(super) fn cases<B: Backend>(suite: &mut Suite<'_, B>) {
    for f in [Unary::Scale(-0.3), Unary::Silu(1.7), Unary::Softcap(3.0)] {
        for (n, width) in [(1, 1), (2, 7), (7, 16), (33, 37), (1, 300)] {
            suite.check(&Activate::new(f, n, width));
        }
    }
    for kind in [Kind::Mix, Kind::Join, Kind::JoinPlainly, Kind::RowGate] {
        for shape in [[1, 1, 1], [2, 4, 5], [7, 4, 16], [33, 2, 37], [1, 4, 300], [3, 3, 512]] {
            suite.check(&Streams::new(kind, shape));
        }
    }
}

struct Activate {
    f: Unary,
    x: Vec<f32>,
    n: usize,
    width: usize,
    name: String,
}

impl Activate {
    fn new(f: Unary, n: usize, width: usize) -> Self {
        let name = format!("activate {f:?} [{n}, {width}]");
        let mut rng = Rng::named(&name);
        let mut x = rng.normals(n * width, 2.0);
        for extreme in [-200.0, 200.0, 0.0, 1e-4] {
            let at = rng.below(n * width);
            x[at] = extreme;
        }
        Self { f, x, n, width, name }
    }
}

impl Case for Activate {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn ways(&self) -> Vec<Way> {
        Way::ROWS.to_vec()
    }

    fn run<B: Backend>(&self, bench: &mut Bench<'_, B>, way: Way) -> Vec<Part> {
        let (timeline, width) = (Timeline::new(&[self.n]), self.width);
        let mut all = vec![f32::NAN; self.n * width];
        for step in timeline.steps(way) {
            let x = bench.input(&timeline.gather(&step, &self.x, width), width, way);
            let n = timeline.numbers(&step).len();
            bench.b.activate(&mut bench.pass, self.f, x.view(), width, n);
            timeline.scatter(&step, &bench.finish(&x), width, &mut all);
        }
        vec![Part::new("out", width, all)]
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Mix,
    Join,
    /// Without factors.
    JoinPlainly,
    RowGate,
}

struct Streams {
    kind: Kind,
    shape: [usize; 3],
    /// Two operands `[n, streams, d]`.
    wide: [Vec<f32>; 2],
    /// `[n, d]`
    one: Vec<f32>,
    /// `[n, streams]`
    inject: Vec<f32>,
    name: String,
}

impl Streams {
    fn new(kind: Kind, shape: [usize; 3]) -> Self {
        let name = format!("streams {kind:?} {shape:?}");
        let mut rng = Rng::named(&name);
        let [n, streams, d] = shape;
        let mut wide = [0; 2].map(|_| rng.normals(n * streams * d, 2.0));
        if n > 1 {
            // A score of zero has no sign, and a gate of zero halves.
            wide[0][..d].fill(0.0);
            wide[1][d..2 * d].fill(0.0);
        }
        let (one, inject) = (rng.normals(n * d, 1.0), rng.normals(n * streams, 4.0));
        Self { kind, shape, wide, one, inject, name }
    }
}

impl Case for Streams {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn ways(&self) -> Vec<Way> {
        Way::ROWS.to_vec()
    }

    fn run<B: Backend>(&self, bench: &mut Bench<'_, B>, way: Way) -> Vec<Part> {
        let [n, streams, d] = self.shape;
        let (timeline, width, shape) = (Timeline::new(&[n]), streams * d, [streams, d]);
        let out_width = if self.kind == Kind::Mix { d } else { width };
        let mut all = vec![f32::NAN; n * out_width];
        for step in timeline.steps(way) {
            let wide = self.wide.each_ref().map(|all| timeline.gather(&step, all, width));
            let [a, b] = wide.map(|rows| bench.input(&rows, width, way));
            let one = bench.input(&timeline.gather(&step, &self.one, d), d, way);
            let inject = bench.input(&timeline.gather(&step, &self.inject, streams), streams, way);
            let n = timeline.numbers(&step).len();
            let fresh = bench.output(n, out_width, way);
            let (verbs, p) = (bench.b, &mut bench.pass);
            let (va, vb, one, to) = (a.view(), b.view(), one.view(), fresh.view());
            let out = match self.kind {
                Kind::Mix => {
                    verbs.stream_mix(p, va, vb, shape, n, to);
                    &fresh
                }
                Kind::Join | Kind::JoinPlainly => {
                    let inject = (self.kind == Kind::Join).then(|| inject.view());
                    verbs.stream_join(p, va, one, inject, shape, n);
                    &a
                }
                Kind::RowGate => {
                    verbs.row_gate(p, va, vb, one, shape, n, to);
                    &fresh
                }
            };
            timeline.scatter(&step, &bench.finish(out), out_width, &mut all);
        }
        vec![Part::new("out", out_width, all)]
    }
}
