//! `norm`.

use super::case::{Bench, Case, Suite, Way};
use super::data::{Rng, Weights};
use super::dense::ROWS;
use super::report::Part;
use super::timeline::Timeline;
use crate::verbs::{self, Backend, Glu};
use snowmelt_weights::Encoding;

pub(super) fn cases<B: Backend>(suite: &mut Suite<'_, B>) {
    let kinds = [
        Kind::Rms,
        Kind::L2,
        Kind::Gated(Glu::Silu),
        Kind::Gated(Glu::Sigmoid),
        Kind::Each,
        Kind::Plain,
        Kind::GatedEach,
        Kind::Layer,
        Kind::LayerEach,
    ];
    let shapes = [(1, 1), (1, 37), (3, 5), (2, 64), (5, 100), (1, 512)];
    let encodings = [Encoding::F32, Encoding::Bf16, Encoding::F16];
    for kind in kinds {
        for (i, (heads, d)) in shapes.into_iter().enumerate() {
            let n = ROWS[i % ROWS.len()];
            suite.check(&Norm::new(kind, [n, heads, d], encodings[i % 3]));
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Rms,
    L2,
    Gated(Glu),
    /// With a weight for each head.
    Each,
    /// Without a weight.
    Plain,
    /// With a weight for each head, and gated.
    GatedEach,
    /// Less the mean, with a bias.
    Layer,
    /// The same with weight and bias of each head.
    LayerEach,
}

impl Kind {
    /// Whether each head has weights of its own.
    fn each(self) -> bool {
        matches!(self, Self::Each | Self::GatedEach | Self::LayerEach)
    }
}

struct Norm {
    kind: Kind,
    shape: [usize; 3],
    x: Vec<f32>,
    z: Vec<f32>,
    w: Weights,
    bias: Weights,
    name: String,
}

const EPS: f32 = 1e-5;
const FACTOR: f32 = 0.75;

impl Norm {
    fn new(kind: Kind, shape: [usize; 3], encoding: Encoding) -> Self {
        let name = format!("norm {kind:?} {shape:?} w {encoding}");
        let mut rng = Rng::named(&name);
        let [n, heads, d] = shape;
        let len = n * heads * d;
        let mut x = rng.normals(len, 3.0);
        if n > 1 {
            // A head of zeros, and one so small that eps decides.
            x[..d].fill(0.0);
            x[len - d..].iter_mut().for_each(|x| *x *= 1e-3);
        }
        let z = rng.normals(len, 2.0);
        let width = if kind.each() { heads * d } else { d };
        let w = Weights::encode(encoding, &rng.uniforms(width, 0.5, 1.5), width);
        let bias = Weights::encode(encoding, &rng.normals(width, 0.5), width);
        Self { kind, shape, x, z, w, bias, name }
    }
}

impl Case for Norm {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn ways(&self) -> Vec<Way> {
        let mut ways = Way::ROWS.to_vec();
        if self.kind == Kind::Rms {
            ways.push(Way::variant(1, "in place"));
        }
        ways
    }

    fn run<B: Backend>(&self, bench: &mut Bench<'_, B>, way: Way) -> Vec<Part> {
        let [n, heads, d] = self.shape;
        let (timeline, width) = (Timeline::new(&[n]), heads * d);
        let (w, bias) = (bench.weight(&self.w), bench.weight(&self.bias));
        let mut all = vec![f32::NAN; n * width];
        for step in timeline.steps(way) {
            let x = bench.input(&timeline.gather(&step, &self.x, width), width, way);
            let z = bench.input(&timeline.gather(&step, &self.z, width), width, way);
            let n = timeline.numbers(&step).len();
            let fresh = bench.output(n, width, way);
            let (b, p) = (bench.b, &mut bench.pass);
            let out = if self.kind == Kind::Rms && way.variant == 0 { &fresh } else { &x };
            let norm = match self.kind {
                Kind::Rms | Kind::Each => verbs::Norm::rms(Some(&w), [heads, d], EPS),
                Kind::L2 => verbs::Norm::l2([heads, d], EPS, FACTOR),
                Kind::Plain => verbs::Norm::rms(None, [heads, d], EPS),
                Kind::GatedEach => {
                    verbs::Norm::rms(Some(&w), [heads, d], EPS).gated(z.view(), Glu::Silu)
                }
                Kind::Layer | Kind::LayerEach => {
                    verbs::Norm { heads, ..verbs::Norm::layer(&w, &bias, d, EPS) }
                }
                Kind::Gated(f) => verbs::Norm::rms(Some(&w), [heads, d], EPS).gated(z.view(), f),
            };
            b.norm(p, x.view(), &norm, n, out.view());
            timeline.scatter(&step, &bench.finish(out), width, &mut all);
        }
        vec![Part::new("out", width, all)]
    }
}
