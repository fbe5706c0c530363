//! `attention`, and the state verbs on its caches.

use super::case::{Bench, Case, Suite, Way};
use super::data::{Rng, Weights};
use super::report::Part;
use super::timeline::{Step, Timeline};
use crate::rows::{PAGE_TOKENS, Rows};
use crate::verbs::{Attention, Backend, BufType, Selection, View};
use snowmelt_weights::Encoding;

const TYPES: [BufType; 3] = [BufType::F32, BufType::F16, BufType::Bf16];

pub(super) fn cases<B: Backend>(suite: &mut Suite<'_, B>) {
    let shapes = [(1, 1, 1), (1, 1, 8), (4, 2, 5), (6, 1, 16), (8, 2, 33), (2, 2, 64), (4, 1, 128)];
    for ty in TYPES {
        for shape in shapes {
            suite.check(&Attend::new(ty, shape, &[7, 75, 1, 33, 2], 1.0));
        }
        suite.check(&Attend::new(ty, (3, 3, 12), &[200], 1.0));
        for window in [1, 5, 32, 33, 70, 1000] {
            let sight = Sight { window: Some(window), ..Sight::default() };
            suite.check(&Attend::new(ty, (4, 2, 20), &[7, 75, 1, 120], 1.0).seeing(sight));
        }
        for (ratio, top) in [(1, 6), (1, 40), (3, 7), (4, 1), (4, 9), (32, 2), (70, 1)] {
            let sight = Sight { selection: Some((ratio, top)), ..Sight::default() };
            suite.check(&Attend::new(ty, (20, 2, 16), &[7, 150, 1, 40], 1.0).seeing(sight));
        }
        let all = Sight { window: Some(60), selection: Some((4, 20)), sinks: true };
        suite.check(&Attend::new(ty, (4, 2, 20), &[100, 3], 1.0).seeing(all));
        let sinks = Sight { sinks: true, ..Sight::default() };
        suite.check(&Attend::new(ty, (6, 2, 33), &[75, 3], 1.0).seeing(sinks));
        for sight in [Sight::default(), sinks, all] {
            let case = Attend::wide(ty, (9, 1), [24, 40], &[75, 3, 40]).seeing(sight);
            suite.check(&Attend { shared: true, ..case });
            let case = Attend::wide(ty, (17, 1), [48, 32], &[75, 3, 40]).seeing(sight);
            suite.check(&Attend { latent: true, ..case });
            suite.check(&Attend::wide(ty, (4, 2), [5, 17], &[70, 2]).seeing(sight));
        }
        // Scores far beyond the range of `exp`.
        suite.check(&Attend::new(ty, (2, 1, 16), &[40, 3], 60.0));
        suite.check(&Moved(Attend::new(ty, (4, 2, 20), &[70], 1.0)));
    }
}

/// What queries see beside the past.
#[derive(Clone, Copy, Debug, Default)]
struct Sight {
    window: Option<usize>,
    /// Tokens of a block, most blocks.
    selection: Option<(usize, usize)>,
    sinks: bool,
}

#[derive(Clone)]
struct Attend {
    timeline: Timeline,
    ty: BufType,
    /// Query heads, KV heads, width of a key, width of a value.
    shape: [usize; 4],
    scale: f32,
    sight: Sight,
    /// Whether values lie within keys.
    latent: bool,
    /// Whether another layer's call has written keys and values.
    shared: bool,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    sinks: Vec<f32>,
    /// Blocks that each token chooses.
    chosen: Vec<Vec<u32>>,
    name: String,
}

/// A way of its own: what sees everything is said in other words.
const EVERYTHING: usize = 1;

impl Attend {
    fn new(
        ty: BufType,
        (n_heads, n_kv_heads, d_head): (usize, usize, usize),
        lengths: &[usize],
        sharpness: f32,
    ) -> Self {
        let shape = (n_heads, n_kv_heads, d_head);
        let name = format!("attention {ty:?} {shape:?} over {lengths:?} sharpness {sharpness}");
        Self::named(name, ty, [n_heads, n_kv_heads, d_head, d_head], lengths, sharpness)
    }

    fn wide(
        ty: BufType,
        (n_heads, n_kv_heads): (usize, usize),
        [d_key, d_value]: [usize; 2],
        lengths: &[usize],
    ) -> Self {
        let shape = [n_heads, n_kv_heads, d_key, d_value];
        Self::named(format!("attention {ty:?} {shape:?} over {lengths:?}"), ty, shape, lengths, 1.0)
    }

    fn named(
        name: String,
        ty: BufType,
        shape: [usize; 4],
        lengths: &[usize],
        sharpness: f32,
    ) -> Self {
        let mut rng = Rng::named(&name);
        let [n_heads, n_kv_heads, d_key, d_value] = shape;
        let timeline = Timeline::new(lengths);
        let n = timeline.tokens();
        let q = rng.normals(n * n_heads * d_key, 1.0);
        let k = rng.normals(n * n_kv_heads * d_key, 1.0);
        let v = rng.normals(n * n_kv_heads * d_value, 1.0);
        let sinks = rng.normals(n_heads, 2.0);
        let scale = sharpness / (d_key as f32).sqrt();
        let (sight, chosen) = (Sight::default(), Vec::new());
        let (latent, shared) = (false, false);
        Self { timeline, ty, shape, scale, sight, latent, shared, q, k, v, sinks, chosen, name }
    }

    /// The same with other eyes.
    fn seeing(mut self, sight: Sight) -> Self {
        let mut rng = Rng::named(&self.name);
        self.name += &format!(" {sight:?}");
        self.sight = sight;
        let Some((ratio, top)) = sight.selection else { return self };
        let step = self.timeline.whole();
        self.chosen = self
            .timeline
            .rows(&step)
            .rows()
            .iter()
            .map(|row| {
                let mut blocks = rng.permutation((row.position as usize + 1) / ratio);
                // Something within the window stays in sight.
                if let Some(last) = blocks.len().checked_sub(1) {
                    let at = blocks.iter().position(|&block| block == last).unwrap_or(0);
                    blocks.swap(0, at);
                }
                blocks.truncate(top);
                blocks.sort_unstable();
                blocks.into_iter().map(|block| block as u32).collect()
            })
            .collect();
        self
    }

    fn k_width(&self) -> usize {
        self.shape[1] * self.shape[2]
    }

    fn v_width(&self) -> usize {
        self.shape[1] * self.shape[3]
    }

    fn out_width(&self) -> usize {
        self.shape[0] * self.shape[3]
    }

    /// K and V caches full of NaN.
    fn caches<B: Backend>(&self, bench: &mut Bench<'_, B>) -> [B::Buf; 2] {
        let tokens = self.timeline.n_pages() * PAGE_TOKENS;
        [self.k_width(), self.v_width()]
            .map(|width| bench.buffer(&vec![f32::NAN; tokens * width], self.ty))
    }

    /// What the rows of a step chose, `[n, 1 + top]`, with any ids after the last.
    fn selection<B: Backend>(
        &self,
        bench: &mut Bench<'_, B>,
        numbers: &[usize],
        rows: &Rows,
        way: Way,
    ) -> Option<Selection<B::Buf>> {
        let everything = way.variant == EVERYTHING;
        let (ratio, top) = match self.sight.selection {
            None if everything => (3, 1000),
            selection => selection?,
        };
        let mut ids = Vec::new();
        for (&number, row) in numbers.iter().zip(rows.rows()) {
            let blocks = (row.position + 1) / ratio as u32;
            let chosen =
                if everything { (0..blocks).collect() } else { self.chosen[number].clone() };
            ids.push(f32::from_bits(chosen.len() as u32));
            ids.extend(chosen.iter().map(|&id| f32::from_bits(id)));
            ids.resize(ids.len() + top - chosen.len(), f32::NAN);
        }
        Some(Selection { ids: bench.buffer(&ids, BufType::F32), top, ratio })
    }

    /// Writes what another layer's call would have written.
    fn write_shared<B: Backend>(
        &self,
        bench: &mut Bench<'_, B>,
        caches: &[B::Buf; 2],
        (timeline, step): (&Timeline, &Step),
    ) {
        let rows = timeline.rows(step);
        let each = [(&self.k, self.k_width()), (&self.v, self.v_width())];
        for ((values, width), cache) in each.into_iter().zip(caches) {
            let values = timeline.gather(step, values, width);
            for (row, values) in rows.rows().iter().zip(values.chunks_exact(width)) {
                let sequence = &rows.sequences()[row.sequence as usize];
                let at = rows.token_row(sequence, row.position) * width;
                bench.b.write(&mut bench.pass, cache, at, values);
            }
        }
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
        let [n_heads, n_kv_heads, d_key, d_value] = self.shape;
        let widths = [n_heads * d_key, self.k_width(), self.v_width()];
        let rows = timeline.rows(step);
        let each = [(&self.q, widths[0]), (&self.k, widths[1]), (&self.v, widths[2])]
            .map(|(all, width)| timeline.gather(step, all, width));
        let mut fused = Vec::new();
        for t in 0..rows.len() {
            for (values, width) in each.iter().zip(widths) {
                fused.extend(&values[t * width..][..width]);
            }
        }
        let fused = bench.input(&fused, widths.iter().sum(), way);
        let apart = [0, 1, 2].map(|i| bench.input(&each[i], widths[i], way));
        let [q, k, v]: [View<'_, B::Buf>; 3] = if way.padded {
            [0, widths[0], widths[0] + widths[1]].map(|column| fused.view().column(column))
        } else {
            [apart[0].view(), apart[1].view(), apart[2].view()]
        };
        let numbers = timeline.numbers(step);
        let selection = self.selection(bench, &numbers, &rows, way);
        let sinks = bench.weight(&Weights::encode(Encoding::F32, &self.sinks, self.sinks.len()));
        let [k_cache, v_cache] = caches;
        if self.shared {
            self.write_shared(bench, caches, (timeline, step));
        }
        let args = Attention {
            q,
            k: (!self.shared).then_some(k),
            v: (!self.shared && !self.latent).then_some(v),
            k_cache,
            v_cache: (!self.latent).then_some(v_cache),
            n_heads,
            n_kv_heads,
            d_key,
            d_value,
            scale: self.scale,
            window: match way.variant {
                EVERYTHING => self.sight.window.or(Some(1000)),
                _ => self.sight.window,
            },
            sinks: self.sight.sinks.then_some(&sinks),
            selection: selection.as_ref(),
        };
        let out = bench.output(rows.len(), self.out_width(), way);
        bench.b.attention(&mut bench.pass, &args, &rows, out.view());
        timeline.scatter(step, &bench.finish(&out), self.out_width(), all);
    }

    /// What an f32 cache holds, or nothing where the host cannot read it.
    fn cached<B: Backend>(&self, bench: &mut Bench<'_, B>, caches: &[B::Buf; 2]) -> Vec<Part> {
        let tokens = self.timeline.n_pages() * PAGE_TOKENS;
        let names = [("k_cache", self.k_width()), ("v_cache", self.v_width())];
        let readable = names.into_iter().zip(caches).filter(|_| self.ty == BufType::F32);
        readable
            .map(|((name, width), buf)| Part::exact(name, width, bench.read(buf, tokens * width)))
            .collect()
    }
}

impl Case for Attend {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn ways(&self) -> Vec<Way> {
        let mut ways = Way::CHUNKS.to_vec();
        if self.sight.selection.is_none() {
            // A selection of all blocks and, where there is none, a window beyond the context.
            ways.push(Way { exact: true, ..Way::variant(EVERYTHING, "everything selected") });
        }
        ways
    }

    fn run<B: Backend>(&self, bench: &mut Bench<'_, B>, way: Way) -> Vec<Part> {
        let caches = self.caches(bench);
        let mut all = vec![f32::NAN; self.timeline.tokens() * self.out_width()];
        for step in self.timeline.steps(way) {
            self.step(bench, &caches, (&self.timeline, &step), way, &mut all);
        }
        let mut parts = self.cached(bench, &caches);
        parts.push(Part::new("out", self.out_width(), all));
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
        (values, width): (&[f32], usize),
        tokens: usize,
    ) {
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
        let mut all = vec![f32::NAN; tokens * case.out_width()];
        if way.variant == 2 {
            self.import(bench, &caches[0], (&case.k, case.k_width()), half);
            self.import(bench, &caches[1], (&case.v, case.v_width()), half);
        } else {
            case.step(bench, &caches, (timeline, &vec![(0, 0..half)]), Way::WHOLE, &mut all);
        }
        if way.variant == 1 {
            // Through a page that nobody uses and back, with NaN left behind on the way.
            let page_len = PAGE_TOKENS * case.k_width();
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
        case.step(bench, &caches, (timeline, &vec![(0, half..tokens)]), Way::WHOLE, &mut all);
        let width = case.out_width();
        vec![Part::new("out", width, all.split_off(half * width))]
    }
}
