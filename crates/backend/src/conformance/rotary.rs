//! `rotary_table`, `rope`.

use super::case::{Bench, Case, Suite, Way};
use super::data::{Rng, Weights};
use super::report::Part;
use super::timeline::Timeline;
use crate::verbs::{Backend, Pairing};
use snowmelt_weights::Encoding;

pub(super) fn cases<B: Backend>(suite: &mut Suite<'_, B>) {
    for (d, first, scale) in [(2, 0, 1.0), (10, 29, 1.25), (64, 5_000, 1.0), (128, 32_700, 1.3)] {
        suite.check(&Table::new(d, first, scale));
    }
    for pairing in [Pairing::Half, Pairing::Adjacent] {
        let shapes = [
            [1, 2, 0, 2],
            [3, 6, 0, 6],
            [2, 16, 0, 4],
            [1, 37, 13, 10],
            [4, 64, 0, 64],
            [2, 128, 94, 34],
        ];
        for (i, shape) in shapes.into_iter().enumerate() {
            suite.check(&Rope::new(pairing, shape, [1, 2, 7, 33][i % 4]));
        }
    }
}

struct Table {
    timeline: Timeline,
    inv_freq: Weights,
    scale: f32,
    name: String,
}

impl Table {
    fn new(d: usize, first: usize, scale: f32) -> Self {
        let name = format!("rotary_table d {d} from position {first}");
        // About geometric from 1 down, as theta^(-2i/d) is.
        let mut rng = Rng::named(&name);
        let mut next = 1.0;
        let inv_freq: Vec<f32> = (0..d / 2)
            .map(|_| {
                let frequency = next;
                next *= rng.between(0.6, 0.9);
                frequency
            })
            .collect();
        let inv_freq = Weights::encode(Encoding::F32, &inv_freq, d / 2);
        Self { timeline: Timeline::new(&[3, 40, 1]).starting_at(first), inv_freq, scale, name }
    }
}

impl Case for Table {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn ways(&self) -> Vec<Way> {
        Way::CHUNKS.to_vec()
    }

    fn run<B: Backend>(&self, bench: &mut Bench<'_, B>, way: Way) -> Vec<Part> {
        let (inv_freq, width) = (bench.weight(&self.inv_freq), 2 * self.inv_freq.d_in);
        let mut all = vec![f32::NAN; self.timeline.tokens() * width];
        for step in self.timeline.steps(way) {
            let rows = self.timeline.rows(&step);
            let out = bench.output(rows.len(), width, way);
            let (b, p) = (bench.b, &mut bench.pass);
            b.rotary_table(p, &inv_freq, self.scale, &rows, out.view());
            self.timeline.scatter(&step, &bench.finish(&out), width, &mut all);
        }
        vec![Part::new("out", width, all)]
    }
}

struct Rope {
    pairing: Pairing,
    shape: [usize; 4],
    n: usize,
    x: Vec<f32>,
    table: Vec<f32>,
    name: String,
}

impl Rope {
    fn new(pairing: Pairing, shape: [usize; 4], n: usize) -> Self {
        let name = format!("rope {pairing:?} {shape:?} n {n}");
        let mut rng = Rng::named(&name);
        let [heads, d_head, _, d] = shape;
        // Any numbers will do for the table.
        let (x, table) = (rng.normals(n * heads * d_head, 1.0), rng.normals(n * d, 1.0));
        Self { pairing, shape, n, x, table, name }
    }
}

impl Case for Rope {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn ways(&self) -> Vec<Way> {
        Way::ROWS.to_vec()
    }

    fn run<B: Backend>(&self, bench: &mut Bench<'_, B>, way: Way) -> Vec<Part> {
        let [heads, d_head, _, d] = self.shape;
        let (timeline, width) = (Timeline::new(&[self.n]), heads * d_head);
        let mut all = vec![f32::NAN; self.n * width];
        for step in timeline.steps(way) {
            let x = bench.input(&timeline.gather(&step, &self.x, width), width, way);
            let table = bench.input(&timeline.gather(&step, &self.table, d), d, way);
            let n = timeline.numbers(&step).len();
            let (b, p) = (bench.b, &mut bench.pass);
            b.rope(p, x.view(), self.shape, table.view(), self.pairing, n);
            timeline.scatter(&step, &bench.finish(&x), width, &mut all);
        }
        vec![Part::new("out", width, all)]
    }
}
