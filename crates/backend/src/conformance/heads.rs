//! `linear_heads`, `copy_heads`.

use super::case::{Bench, Case, Suite, Way};
use super::data::{Rng, Weights};
use super::dense::{SPOIL, SPOILT, forget_spoilt, widths};
use super::report::Part;
use super::timeline::Timeline;
use crate::verbs::{Backend, HeadRows};
use snowmelt_weights::Encoding;

pub(super) fn cases<B: Backend>(suite: &mut Suite<'_, B>) {
    for encoding in Encoding::ALL {
        for d_in in widths(encoding) {
            for transposed in [false, true] {
                for (heads, rows, n) in [(1, 1, 1), (3, 5, 2), (2, 30, 33), (9, 12, 3)] {
                    suite.check(&Product::new(encoding, d_in, [heads, rows, n], transposed));
                }
            }
        }
    }
    for shape in [[1, 1, 1, 1], [3, 7, 5, 4], [2, 16, 48, 16], [4, 40, 33, 33]] {
        suite.check(&Copied::new(shape, 7));
    }
}

/// Elements between the heads of a row, NaN in operands.
const GAP: usize = 2;

/// Spreads heads of `width` so that they begin `width + GAP` apart.
fn spread(rows: &[f32], heads: usize, width: usize) -> Vec<f32> {
    let mut all = Vec::new();
    for (i, head) in rows.chunks_exact(width).enumerate() {
        all.extend(head);
        if i % heads + 1 < heads {
            all.extend([f32::NAN; GAP]);
        }
    }
    all
}

/// The way back, complaining of what was written between.
fn gather(rows: &[f32], heads: usize, width: usize, complaints: &mut Vec<String>) -> Vec<f32> {
    let mut all = Vec::new();
    let row = heads * (width + GAP) - GAP;
    for row in rows.chunks_exact(row) {
        for head in row.chunks(width + GAP) {
            all.extend(&head[..width]);
            let between = &head[width..];
            if between.iter().any(|value| value.to_bits() != between[0].to_bits()) {
                complaints.push(format!("{between:?} lies between heads"));
            }
        }
    }
    all
}

struct Product {
    w: Weights,
    heads: HeadRows,
    n: usize,
    x: Vec<f32>,
    name: String,
}

impl Product {
    fn new(
        encoding: Encoding,
        d_in: usize,
        [heads, rows, n]: [usize; 3],
        transposed: bool,
    ) -> Self {
        let kind = if transposed { "transposed" } else { "plain" };
        let name = format!("linear_heads {encoding} [{heads}, {rows}, {d_in}] n {n} {kind}");
        let mut rng = Rng::named(&name);
        let (first, stride) = (2, rows + 3);
        let w = Weights::random(&mut rng, encoding, heads * stride, d_in);
        let (x_width, out_width) = if transposed { (rows, d_in) } else { (d_in, rows) };
        let (x_head, out_head) = (x_width + GAP, out_width + GAP);
        let heads = HeadRows { heads, stride, first, rows, x_head, out_head, transposed };
        let x = rng.normals(n * heads.heads * x_width, 1.0);
        Self { w, heads, n, x, name }
    }
}

impl Case for Product {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn ways(&self) -> Vec<Way> {
        [&Way::ROWS[..], &[SPOIL]].concat()
    }

    fn run<B: Backend>(&self, bench: &mut Bench<'_, B>, way: Way) -> Vec<Part> {
        let w = bench.weight(&self.w);
        let HeadRows { heads, x_head, out_head, .. } = self.heads;
        let (x_width, out_width) = (x_head - GAP, out_head - GAP);
        let timeline = Timeline::new(&[self.n]);
        let mut all = vec![f32::NAN; self.n * heads * out_width];
        let mut x = self.x.clone();
        if way.variant == SPOIL.variant && self.n > SPOILT {
            x[SPOILT * heads * x_width..][..heads * x_width].fill(f32::NAN);
        }
        for step in timeline.steps(way) {
            let x = spread(&timeline.gather(&step, &x, heads * x_width), heads, x_width);
            let x = bench.input(&x, heads * x_head - GAP, way);
            let n = timeline.numbers(&step).len();
            let out = bench.output(n, heads * out_head - GAP, way);
            bench.b.linear_heads(&mut bench.pass, x.view(), &w, &self.heads, n, out.view());
            let got = bench.finish(&out);
            let got = gather(&got, heads, out_width, &mut bench.complaints);
            timeline.scatter(&step, &got, heads * out_width, &mut all);
        }
        forget_spoilt(&mut all, heads * out_width);
        vec![Part::new("out", out_width, all)]
    }
}

struct Copied {
    /// Heads, elements from one to the next in both, and how many are copied.
    shape: [usize; 4],
    n: usize,
    x: Vec<f32>,
    out: Vec<f32>,
    name: String,
}

impl Copied {
    fn new(shape: [usize; 4], n: usize) -> Self {
        let name = format!("copy_heads {shape:?} n {n}");
        let mut rng = Rng::named(&name);
        let [heads, x_head, out_head, _] = shape;
        let (x, out) =
            (rng.normals(n * heads * x_head, 1.0), rng.normals(n * heads * out_head, 1.0));
        Self { shape, n, x, out, name }
    }
}

impl Case for Copied {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn ways(&self) -> Vec<Way> {
        Way::ROWS.to_vec()
    }

    fn run<B: Backend>(&self, bench: &mut Bench<'_, B>, way: Way) -> Vec<Part> {
        let [heads, x_head, out_head, _] = self.shape;
        let (x_width, width) = (heads * x_head, heads * out_head);
        let timeline = Timeline::new(&[self.n]);
        let mut all = vec![f32::NAN; self.n * width];
        for step in timeline.steps(way) {
            let x = bench.input(&timeline.gather(&step, &self.x, x_width), x_width, way);
            // What is not copied stays.
            let out = bench.input(&timeline.gather(&step, &self.out, width), width, way);
            let n = timeline.numbers(&step).len();
            bench.b.copy_heads(&mut bench.pass, x.view(), self.shape, n, out.view());
            timeline.scatter(&step, &bench.finish(&out), width, &mut all);
        }
        vec![Part::exact("out", width, all)]
    }
}
