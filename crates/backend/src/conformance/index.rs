//! `index_select`.

use super::case::{Bench, Case, Suite, Way};
use super::data::{Rng, Weights};
use super::report::{Part, same};
use super::timeline::{Step, Timeline};
use crate::rows::PAGE_TOKENS;
use crate::verbs::{Backend, BufType, IndexSelect, Pool};
use snowmelt_weights::Encoding;

pub(super) fn cases<B: Backend>(suite: &mut Suite<'_, B>) {
    for ty in [BufType::F32, BufType::F16, BufType::Bf16] {
        for numbers in [Numbers::Small, Numbers::Infinite] {
            // More heads than are held at a time, and more blocks than are chosen.
            for ([n_heads, d], top) in [([1, 1], 1), ([3, 20], 5), ([40, 16], 33), ([4, 64], 500)] {
                suite.check(&Index::new(ty, [n_heads, d], top, None, numbers));
            }
        }
        for (ratio, [n_heads, d], top) in
            [(1, [2, 16], 9), (3, [3, 20], 4), (4, [33, 64], 7), (32, [2, 34], 1), (4, [1, 8], 100)]
        {
            suite.check(&Index::new(ty, [n_heads, d], top, Some(ratio), Numbers::Normal));
        }
    }
}

/// What operands are made of.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Numbers {
    /// Halves whose sums are exact, so that many scores are equal and none is rounded.
    Small,
    /// As small ones, but some factors of heads are infinite, so that scores are too or NaN.
    Infinite,
    /// Scores that lie apart.
    Normal,
}

struct Index {
    timeline: Timeline,
    ty: BufType,
    shape: [usize; 2],
    top: usize,
    ratio: Option<usize>,
    q: Vec<f32>,
    k: Vec<f32>,
    /// Factors of heads, where there are any.
    weights: Option<Vec<f32>>,
    norm: Weights,
    inv_freq: Weights,
    name: String,
}

impl Index {
    fn new(
        ty: BufType,
        shape: [usize; 2],
        top: usize,
        ratio: Option<usize>,
        numbers: Numbers,
    ) -> Self {
        let name = format!("index_select {ty:?} {shape:?} top {top} ratio {ratio:?} {numbers:?}");
        let mut rng = Rng::named(&name);
        let [n_heads, d] = shape;
        let timeline = Timeline::new(&[7, 120, 1, 35]);
        let n = timeline.tokens();
        let mut operand = |len: usize| match numbers {
            Numbers::Normal => rng.normals(len, 1.0),
            _ => (0..len).map(|_| rng.below(5) as f32 * 0.5 - 1.0).collect(),
        };
        let (q, k) = (operand(n * n_heads * d), operand(n * d));
        let mut weights = operand(n * n_heads);
        if numbers == Numbers::Infinite {
            for (t, weights) in weights.chunks_exact_mut(n_heads).enumerate() {
                match t % 5 {
                    0 => weights[0] = f32::INFINITY,
                    1 => weights[0] = f32::NAN,
                    _ => {}
                }
            }
        }
        let weights = (n_heads != 3).then_some(weights);
        let norm = Weights::encode(Encoding::F32, &rng.uniforms(d, 0.5, 1.5), d);
        // Of an odd number of pairs where there are some; the rest stays.
        let pairs = (d / 2).saturating_sub(1).max(1);
        let mut next = 1.0;
        let mut frequency = || {
            next *= rng.between(0.6, 0.9);
            next
        };
        let inv_freq: Vec<f32> = (0..pairs).map(|_| frequency()).collect();
        let inv_freq = Weights::encode(Encoding::F32, &inv_freq, pairs);
        Self { timeline, ty, shape, top, ratio, q, k, weights, norm, inv_freq, name }
    }

    /// Counts and blocks of the rows of a step as numbers, zeros after the last.
    fn step<B: Backend>(
        &self,
        bench: &mut Bench<'_, B>,
        k_cache: &B::Buf,
        step: &Step,
        way: Way,
    ) -> Vec<f32> {
        let [n_heads, d] = self.shape;
        let rows = self.timeline.rows(step);
        let q = bench.input(&self.timeline.gather(step, &self.q, n_heads * d), n_heads * d, way);
        let k = bench.input(&self.timeline.gather(step, &self.k, d), d, way);
        let weights = self.weights.as_ref().map(|weights| {
            bench.input(&self.timeline.gather(step, weights, n_heads), n_heads, way)
        });
        let (norm, inv_freq) = (bench.weight(&self.norm), bench.weight(&self.inv_freq));
        let width = 1 + self.top;
        let ids = bench.buffer(&vec![f32::NAN; (rows.len() + 1) * width], BufType::F32);
        let args = IndexSelect {
            q: q.view(),
            k: k.view(),
            k_cache,
            weights: weights.as_ref().map(|weights| weights.view()),
            n_heads,
            d,
            scale: 0.5,
            sum_scale: 0.25,
            pool: self.ratio.map(|ratio| Pool {
                ratio,
                norm: &norm,
                eps: 1e-6,
                inv_freq: &inv_freq,
                rotary_scale: 1.25,
            }),
            top: self.top,
            ids: &ids,
        };
        let selection = bench.b.index_select(&mut bench.pass, &args, &rows);
        let told = (selection.top, selection.ratio);
        if told != (self.top, self.ratio.unwrap_or(1)) {
            bench.complaints.push(format!("the selection says top and ratio {told:?}"));
        }
        let mut got = bench.read(&selection.ids, (rows.len() + 1) * width);
        if !got.split_off(rows.len() * width).into_iter().all(|guard| same(guard, f32::NAN)) {
            bench.complaints.push("ids reach beyond the last row".into());
        }
        let number = |row: &[f32]| {
            let count = row[0].to_bits() as usize;
            let used = |i: usize| if i <= count { row[i].to_bits() as f32 } else { 0.0 };
            (0..width).map(used).collect::<Vec<_>>()
        };
        got.chunks_exact(width).flat_map(number).collect()
    }
}

impl Case for Index {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn ways(&self) -> Vec<Way> {
        Way::CHUNKS.to_vec()
    }

    fn run<B: Backend>(&self, bench: &mut Bench<'_, B>, way: Way) -> Vec<Part> {
        let d = self.shape[1];
        let len = self.timeline.n_pages() * PAGE_TOKENS * d;
        let k_cache = bench.buffer(&vec![f32::NAN; len], self.ty);
        let width = 1 + self.top;
        let mut all = vec![f32::NAN; self.timeline.tokens() * width];
        for step in self.timeline.steps(way) {
            let ids = self.step(bench, &k_cache, &step, way);
            self.timeline.scatter(&step, &ids, width, &mut all);
        }
        vec![Part::exact("ids", width, all)]
    }
}
