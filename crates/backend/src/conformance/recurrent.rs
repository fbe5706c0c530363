//! `causal_conv`, `delta_gate`, `delta_step`.

use super::case::{Bench, Case, Suite, Way};
use super::data::{Rng, Weights};
use super::report::Part;
use super::timeline::{N_FIXED, Timeline, fixed};
use crate::verbs::{Backend, BufType, DeltaStep};
use snowmelt_weights::Encoding;

const LENGTHS: [usize; 5] = [7, 33, 1, 2, 12];

pub(super) fn cases<B: Backend>(suite: &mut Suite<'_, B>) {
    for (taps, channels) in [(2, 1), (3, 5), (4, 16), (4, 37), (2, 64), (4, 130)] {
        for encoding in [Encoding::F32, Encoding::Bf16] {
            suite.check(&Conv::new(encoding, taps, channels, 1));
        }
    }
    for (taps, channels, dilation) in [(2, 16, 2), (3, 37, 3), (4, 5, 3)] {
        suite.check(&Conv::new(Encoding::F32, taps, channels, dilation));
    }
    for (n, heads) in [(1, 1), (2, 7), (7, 16), (33, 37)] {
        suite.check(&DeltaGate::new(n, heads));
    }
    for shape in [[1, 1, 1, 1], [1, 3, 4, 3], [2, 4, 8, 16], [2, 2, 5, 37], [1, 2, 64, 64]] {
        suite.check(&Delta::new(shape));
    }
}

/// State of every sequence, `[N_FIXED, len]`: random, or zeroed by `clear`, for those in use;
/// NaN for the rest.
struct States {
    start: Vec<f32>,
    len: usize,
}

impl States {
    fn random(rng: &mut Rng, sequences: usize, len: usize, scale: f32) -> Self {
        let start = rng.normals(sequences * len, scale);
        Self { start, len }
    }

    /// Every other sequence starts from zero, after something else lay there.
    fn open<B: Backend>(&self, bench: &mut Bench<'_, B>) -> B::Buf {
        let buf = bench.b.alloc(N_FIXED * self.len, BufType::F32);
        let (b, p) = (bench.b, &mut bench.pass);
        b.write(p, &buf, 0, &vec![f32::NAN; N_FIXED * self.len]);
        for (s, start) in self.start.chunks_exact(self.len).enumerate() {
            let at = fixed(s) * self.len;
            b.write(p, &buf, at, start);
            if s % 2 == 1 {
                b.clear(p, &buf, at..at + self.len);
            }
        }
        buf
    }

    fn close<B: Backend>(&self, bench: &mut Bench<'_, B>, buf: &B::Buf) -> Part {
        Part::new("state", self.len, bench.read(buf, N_FIXED * self.len))
    }
}

struct Conv {
    timeline: Timeline,
    w: Weights,
    dilation: usize,
    x: Vec<f32>,
    states: States,
    name: String,
}

impl Conv {
    fn new(encoding: Encoding, taps: usize, channels: usize, dilation: usize) -> Self {
        let mut name = format!("causal_conv {encoding} [{channels}, {taps}]");
        if dilation > 1 {
            name += &format!(" dilation {dilation}");
        }
        let mut rng = Rng::named(&name);
        let timeline = Timeline::new(&LENGTHS);
        let w = Weights::random(&mut rng, encoding, channels, taps);
        let x = rng.normals(timeline.tokens() * channels, 1.5);
        let kept = dilation * (taps - 1);
        let states = States::random(&mut rng, LENGTHS.len(), kept * channels, 1.5);
        Self { timeline, w, dilation, x, states, name }
    }
}

impl Case for Conv {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn ways(&self) -> Vec<Way> {
        Way::CHUNKS.to_vec()
    }

    fn run<B: Backend>(&self, bench: &mut Bench<'_, B>, way: Way) -> Vec<Part> {
        let (w, channels) = (bench.weight(&self.w), self.w.d_out);
        let state = self.states.open(bench);
        let mut all = vec![f32::NAN; self.x.len()];
        for step in self.timeline.steps(way) {
            let rows = self.timeline.rows(&step);
            let x = bench.input(&self.timeline.gather(&step, &self.x, channels), channels, way);
            let out = bench.output(rows.len(), channels, way);
            let (b, p, dilation) = (bench.b, &mut bench.pass, self.dilation);
            b.causal_conv(p, x.view(), &w, dilation, &state, &rows, out.view());
            self.timeline.scatter(&step, &bench.finish(&out), channels, &mut all);
        }
        // The state is a copy of inputs: nothing may round it.
        let state = Part { exact: true, ..self.states.close(bench, &state) };
        vec![Part::new("out", channels, all), state]
    }
}

struct DeltaGate {
    n: usize,
    heads: usize,
    a: Vec<f32>,
    b: Vec<f32>,
    w: [Weights; 2],
    name: String,
}

impl DeltaGate {
    fn new(n: usize, heads: usize) -> Self {
        let name = format!("delta_gate [{n}, {heads}]");
        let mut rng = Rng::named(&name);
        let (mut a, b) = (rng.normals(n * heads, 3.0), rng.normals(n * heads, 3.0));
        if n > 1 {
            // Where `exp` overflows within softplus, and where `1 + exp` is 1.
            (a[0], a[heads]) = (100.0, -100.0);
        }
        let a_log = Weights::encode(Encoding::F32, &rng.uniforms(heads, -4.0, 1.5), heads);
        let dt_bias = Weights::encode(Encoding::Bf16, &rng.normals(heads, 1.0), heads);
        Self { n, heads, a, b, w: [a_log, dt_bias], name }
    }
}

impl Case for DeltaGate {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn ways(&self) -> Vec<Way> {
        Way::ROWS.to_vec()
    }

    fn run<B: Backend>(&self, bench: &mut Bench<'_, B>, way: Way) -> Vec<Part> {
        let (timeline, heads) = (Timeline::new(&[self.n]), self.heads);
        let w = [bench.weight(&self.w[0]), bench.weight(&self.w[1])];
        let (mut decay, mut beta) = (vec![f32::NAN; self.a.len()], vec![f32::NAN; self.b.len()]);
        for step in timeline.steps(way) {
            let a = bench.input(&timeline.gather(&step, &self.a, heads), heads, way);
            let b = bench.input(&timeline.gather(&step, &self.b, heads), heads, way);
            let n = timeline.numbers(&step).len();
            bench.b.delta_gate(&mut bench.pass, a.view(), b.view(), [&w[0], &w[1]], n);
            timeline.scatter(&step, &bench.finish(&a), heads, &mut decay);
            timeline.scatter(&step, &bench.finish(&b), heads, &mut beta);
        }
        vec![Part::new("decay", heads, decay), Part::new("beta", heads, beta)]
    }
}

struct Delta {
    timeline: Timeline,
    /// Key heads, value heads, width of a key, width of a value.
    shape: [usize; 4],
    /// q, k, v, decay, beta with the widths of their rows.
    operands: [(Vec<f32>, usize); 5],
    states: States,
    name: String,
}

impl Delta {
    fn new(shape: [usize; 4]) -> Self {
        let name = format!("delta_step {shape:?}");
        let mut rng = Rng::named(&name);
        let [n_key_heads, n_value_heads, d_key, d_value] = shape;
        let timeline = Timeline::new(&LENGTHS);
        let n = timeline.tokens();
        let (key, value) = (n_key_heads * d_key, n_value_heads * d_value);
        // Keys of length about 1, or the recurrence runs away.
        let unit = 1.0 / (d_key as f32).sqrt();
        let operands = [
            (rng.normals(n * key, 1.0), key),
            (rng.normals(n * key, unit), key),
            (rng.normals(n * value, 1.0), value),
            (rng.uniforms(n * n_value_heads, 0.3, 1.0), n_value_heads),
            (rng.uniforms(n * n_value_heads, 0.0, 1.0), n_value_heads),
        ];
        let len = n_value_heads * d_key * d_value;
        let states = States::random(&mut rng, LENGTHS.len(), len, 0.5);
        Self { timeline, shape, operands, states, name }
    }
}

impl Case for Delta {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn ways(&self) -> Vec<Way> {
        Way::CHUNKS.to_vec()
    }

    fn run<B: Backend>(&self, bench: &mut Bench<'_, B>, way: Way) -> Vec<Part> {
        let [n_key_heads, n_value_heads, d_key, d_value] = self.shape;
        let width = n_value_heads * d_value;
        let state = self.states.open(bench);
        let mut all = vec![f32::NAN; self.timeline.tokens() * width];
        for step in self.timeline.steps(way) {
            let rows = self.timeline.rows(&step);
            let lanes = self.operands.each_ref().map(|(values, width)| {
                bench.input(&self.timeline.gather(&step, values, *width), *width, way)
            });
            let [q, k, v, decay, beta] = lanes.each_ref().map(|lane| lane.view());
            let heads = DeltaStep {
                q,
                k,
                v,
                decay,
                beta,
                state: &state,
                n_key_heads,
                n_value_heads,
                d_key,
                d_value,
            };
            let out = bench.output(rows.len(), width, way);
            bench.b.delta_step(&mut bench.pass, &heads, &rows, out.view());
            self.timeline.scatter(&step, &bench.finish(&out), width, &mut all);
        }
        vec![Part::new("out", width, all), self.states.close(bench, &state)]
    }
}
