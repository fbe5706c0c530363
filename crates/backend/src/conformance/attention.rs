//! `attention`, and the state verbs on its caches.

use super::case::{Bench, Case, Suite, Way};
use super::data::Rng;
use super::report::Part;
use super::timeline::{Step, Timeline};
use crate::rows::PAGE_TOKENS;
use crate::verbs::{Attention, Backend, BufType, View};

const TYPES: [BufType; 3] = [BufType::F32, BufType::F16, BufType::Bf16];

pub(super) fn cases<B: Backend>(suite: &mut Suite<'_, B>) {
    let shapes = [(1, 1, 1), (1, 1, 8), (4, 2, 5), (6, 1, 16), (8, 2, 33), (2, 2, 64), (4, 1, 128)];
    for ty in TYPES {
        for shape in shapes {
            suite.check(&Attend::new(ty, shape, &[7, 75, 1, 33, 2], 1.0));
        }
        suite.check(&Attend::new(ty, (3, 3, 12), &[200], 1.0));
        // Scores far beyond the range of `exp`.
        suite.check(&Attend::new(ty, (2, 1, 16), &[40, 3], 60.0));
        suite.check(&Moved(Attend::new(ty, (4, 2, 20), &[70], 1.0)));
    }
}

struct Attend {
    timeline: Timeline,
    ty: BufType,
    /// Query heads, KV heads, width of a head.
    shape: (usize, usize, usize),
    scale: f32,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    name: String,
}

impl Attend {
    fn new(ty: BufType, shape: (usize, usize, usize), lengths: &[usize], sharpness: f32) -> Self {
        let name = format!("attention {ty:?} {shape:?} over {lengths:?} sharpness {sharpness}");
        let mut rng = Rng::named(&name);
        let (n_heads, n_kv_heads, d_head) = shape;
        let timeline = Timeline::new(lengths);
        let n = timeline.tokens();
        let q = rng.normals(n * n_heads * d_head, 1.0);
        let k = rng.normals(n * n_kv_heads * d_head, 1.0);
        let v = rng.normals(n * n_kv_heads * d_head, 1.0);
        let scale = sharpness / (d_head as f32).sqrt();
        Self { timeline, ty, shape, scale, q, k, v, name }
    }

    fn kv_width(&self) -> usize {
        self.shape.1 * self.shape.2
    }

    /// K and V caches full of NaN.
    fn caches<B: Backend>(&self, bench: &mut Bench<'_, B>) -> [B::Buf; 2] {
        let len = self.timeline.n_pages() * PAGE_TOKENS * self.kv_width();
        [0; 2].map(|_| bench.buffer(&vec![f32::NAN; len], self.ty))
    }

    /// One step. In strided views Q, K and V are columns of one buffer, as a fused projection
    /// leaves them.
    fn step<B: Backend>(
        &self,
        bench: &mut Bench<'_, B>,
        caches: &[B::Buf; 2],
        (timeline, step): (&Timeline, &Step),
        way: Way,
        all: &mut [f32],
    ) {
        let (n_heads, n_kv_heads, d_head) = self.shape;
        let (q_width, kv_width) = (n_heads * d_head, self.kv_width());
        let rows = timeline.rows(step);
        let q = timeline.gather(step, &self.q, q_width);
        let k = timeline.gather(step, &self.k, kv_width);
        let v = timeline.gather(step, &self.v, kv_width);
        let mut fused = Vec::new();
        for t in 0..rows.len() {
            fused.extend(&q[t * q_width..][..q_width]);
            fused.extend(&k[t * kv_width..][..kv_width]);
            fused.extend(&v[t * kv_width..][..kv_width]);
        }
        let fused = bench.input(&fused, q_width + 2 * kv_width, way);
        let apart =
            [(q, q_width), (k, kv_width), (v, kv_width)].map(|(x, w)| bench.input(&x, w, way));
        let views: [View<'_, B::Buf>; 3] = if way.padded {
            [0, q_width, q_width + kv_width].map(|column| fused.view().column(column))
        } else {
            [apart[0].view(), apart[1].view(), apart[2].view()]
        };
        let [q, k, v] = views;
        let [k_cache, v_cache] = caches;
        let scale = self.scale;
        let args = Attention {
            q,
            k: Some(k),
            v: Some(v),
            k_cache,
            v_cache: Some(v_cache),
            n_heads,
            n_kv_heads,
            d_key: d_head,
            d_value: d_head,
            scale,
            window: None,
            sinks: None,
            selection: None,
        };
        let out = bench.output(rows.len(), q_width, way);
        bench.b.attention(&mut bench.pass, &args, &rows, out.view());
        timeline.scatter(step, &bench.finish(&out), q_width, all);
    }

    /// What an f32 cache holds, or nothing where the host cannot read it.
    fn cached<B: Backend>(&self, bench: &mut Bench<'_, B>, caches: &[B::Buf; 2]) -> Vec<Part> {
        let len = self.timeline.n_pages() * PAGE_TOKENS * self.kv_width();
        let names = ["k_cache", "v_cache"].into_iter().zip(caches);
        let readable = names.filter(|_| self.ty == BufType::F32);
        readable
            .map(|(name, buf)| Part::exact(name, self.kv_width(), bench.read(buf, len)))
            .collect()
    }
}

impl Case for Attend {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn ways(&self) -> Vec<Way> {
        Way::CHUNKS.to_vec()
    }

    fn run<B: Backend>(&self, bench: &mut Bench<'_, B>, way: Way) -> Vec<Part> {
        let caches = self.caches(bench);
        let mut all = vec![f32::NAN; self.q.len()];
        for step in self.timeline.steps(way) {
            self.step(bench, &caches, (&self.timeline, &step), way, &mut all);
        }
        let mut parts = self.cached(bench, &caches);
        parts.push(Part::new("out", self.shape.0 * self.shape.2, all));
        parts
    }
}

/// One sequence whose cache is copied to other pages, or written by the host, before the second
/// half of its tokens: forks and restored snapshots.
struct Moved(Attend);

impl Moved {
    /// Writes K or V of the first `tokens` from the host, page by page.
    fn import<B: Backend>(
        &self,
        bench: &mut Bench<'_, B>,
        cache: &B::Buf,
        values: &[f32],
        tokens: usize,
    ) {
        let width = self.0.kv_width();
        let pages = self.0.timeline.pages(0);
        let values = values[..tokens * width].chunks(PAGE_TOKENS * width);
        for (page, values) in pages.zip(values) {
            let at = page as usize * PAGE_TOKENS * width;
            bench.b.write(&mut bench.pass, cache, at, values);
        }
    }
}

impl Case for Moved {
    fn name(&self) -> String {
        format!("{}, moved", self.0.name)
    }

    fn ways(&self) -> Vec<Way> {
        vec![Way::variant(1, "pages copied"), Way::variant(2, "written by the host")]
    }

    fn run<B: Backend>(&self, bench: &mut Bench<'_, B>, way: Way) -> Vec<Part> {
        let Self(case) = self;
        let timeline = &case.timeline;
        let (tokens, half) = (timeline.tokens(), timeline.tokens() / 2);
        let caches = case.caches(bench);
        let mut all = vec![f32::NAN; case.q.len()];
        if way.variant == 2 {
            self.import(bench, &caches[0], &case.k, half);
            self.import(bench, &caches[1], &case.v, half);
        } else {
            case.step(bench, &caches, (timeline, &vec![(0, 0..half)]), way, &mut all);
        }
        if way.variant == 1 {
            // Through a page that nobody uses and back, with NaN left behind on the way.
            let page_len = PAGE_TOKENS * case.kv_width();
            let poison = vec![f32::NAN; page_len];
            for cache in &caches {
                for page in timeline.pages(0) {
                    let (b, p, at) = (bench.b, &mut bench.pass, page as usize * page_len);
                    b.copy(p, cache, at, 0, page_len);
                    b.write(p, cache, at, &poison);
                    b.copy(p, cache, 0, at, page_len);
                }
            }
        }
        case.step(bench, &caches, (timeline, &vec![(0, half..tokens)]), way, &mut all);
        let width = case.shape.0 * case.shape.2;
        vec![Part::new("out", width, all.split_off(half * width))]
    }
}
