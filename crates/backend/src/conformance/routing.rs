//! `route`, `moe_join`.

use super::case::{Bench, Case, Suite, Way, logits_for};
use super::data::{Rng, Weights};
use super::report::{Part, same};
use super::timeline::Timeline;
use crate::fetch::Routes;
use crate::verbs::{Backend, BufType, Groups, Pass, Router, Scores, Shared};
use snowmelt_weights::Encoding;

pub(super) fn cases<B: Backend>(suite: &mut Suite<'_, B>) {
    let shapes = [(4, 1), (5, 5), (8, 3), (60, 4), (128, 8), (512, 10)];
    for renormalise in [false, true] {
        for (i, shape) in shapes.into_iter().enumerate() {
            let n = [2, 7, 33, 1, 7, 3][i];
            suite.check(&Route::new(shape, n, renormalise, Kind::Distinct));
        }
        suite.check(&Route::new((9, 4), 7, renormalise, Kind::Ties));
        suite.check(&Route::new((40, 5), 7, renormalise, Kind::NotANumber));
    }
    for (i, options) in Options::all().into_iter().enumerate() {
        for kind in [Kind::Distinct, Kind::Ties, Kind::NotANumber] {
            let shapes = [(8, 3), (60, 4), (120, 8), (512, 10)];
            suite.check(&Route::with(shapes[i % 4], [7, 33][i % 2], kind, options));
        }
    }
    for (n, top_k, d) in [(1, 1, 1), (2, 3, 5), (7, 4, 16), (33, 10, 37), (3, 8, 512)] {
        for shared in [Company::Nobody, Company::Plain, Company::Gated] {
            suite.check(&Join::new(n, top_k, d, shared));
        }
    }
    suite.check(&Join::cancelling());
    suite.check(&Join::missing());
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Weights so far apart that rounding cannot exchange them.
    Distinct,
    /// Equal logits: the lower index first.
    Ties,
    /// Rows 1 and 2 hold NaN: any experts, but no panic and no harm to others.
    NotANumber,
}

/// A router but for its shape.
#[derive(Clone, Copy, Debug)]
struct Options {
    scores: Scores,
    bias: bool,
    groups: Option<Groups>,
    renormalise: Option<f32>,
    factor: f32,
    own: bool,
}

impl Options {
    const SOFTMAX: Self = Self {
        scores: Scores::Softmax,
        bias: false,
        groups: None,
        renormalise: None,
        factor: 1.0,
        own: false,
    };

    /// Everything beside the plain softmax.
    fn all() -> Vec<Self> {
        let groups = |count, kept| Some(Groups { count, kept });
        let sigmoid = Self { scores: Scores::Sigmoid, ..Self::SOFTMAX };
        let chosen = Self { scores: Scores::SoftmaxOfChosen, ..Self::SOFTMAX };
        let renormalise = Some(1e-3);
        vec![
            sigmoid,
            Self { bias: true, renormalise, factor: 2.5, ..sigmoid },
            Self { bias: true, groups: groups(4, 2), renormalise, factor: 2.5, ..sigmoid },
            Self { groups: groups(8, 3), ..sigmoid },
            Self { groups: groups(2, 1), own: true, ..Self::SOFTMAX },
            Self { bias: true, factor: 16.0, ..Self::SOFTMAX },
            Self { groups: groups(4, 4), ..Self::SOFTMAX },
            // Groups of one expert, and one group of all.
            Self { groups: groups(512, 11), ..sigmoid },
            Self { groups: groups(1, 1), ..sigmoid },
            chosen,
            Self { groups: groups(4, 3), own: true, factor: 0.5, ..chosen },
            Self { bias: true, renormalise, ..chosen },
        ]
    }
}

struct Route {
    shape: [usize; 2],
    n: usize,
    options: Options,
    kind: Kind,
    logits: Vec<f32>,
    bias: Weights,
    own: Weights,
    name: String,
}

impl Route {
    fn new(shape: (usize, usize), n: usize, renormalise: bool, kind: Kind) -> Self {
        let (n_experts, top_k) = shape;
        let name = format!("route {top_k} of {n_experts} n {n} {kind:?} renormalise {renormalise}");
        let renormalise = renormalise.then_some(0.0);
        Self::named(name, shape, n, kind, Options { renormalise, ..Options::SOFTMAX })
    }

    fn with(shape: (usize, usize), n: usize, kind: Kind, options: Options) -> Self {
        let name = format!("route {} of {} n {n} {kind:?} {options:?}", shape.1, shape.0);
        Self::named(name, shape, n, kind, options)
    }

    fn named(
        name: String,
        (n_experts, top_k): (usize, usize),
        n: usize,
        kind: Kind,
        options: Options,
    ) -> Self {
        let mut rng = Rng::named(&name);
        let mut logits = Vec::new();
        for _ in 0..n {
            let order = rng.permutation(n_experts);
            // Not so far that the greatest sigmoids are all 1.
            let step = match kind {
                Kind::Ties => 24.0 / n_experts.max(24) as f32,
                _ => 8.0 / n_experts as f32,
            };
            let of = |rank: usize| if kind == Kind::Ties { rank / 3 } else { rank };
            logits.extend(order.into_iter().map(|rank| of(rank) as f32 * step - 3.0));
        }
        if kind == Kind::NotANumber {
            logits[n_experts..2 * n_experts].fill(f32::NAN);
            logits[2 * n_experts + 3] = f32::NAN;
        }
        // With ties, a bias that makes more of them.
        let bias: Vec<f32> = match kind {
            Kind::Ties => (0..n_experts).map(|e| (e % 2) as f32 * 8.0).collect(),
            _ => rng.uniforms(n_experts, -0.5, 0.5),
        };
        let own = rng.uniforms(n_experts, 0.5, 2.0);
        let vector = |values: &[f32]| Weights::encode(Encoding::F32, values, n_experts);
        let (bias, own) = (vector(&bias), vector(&own));
        Self { shape: [n_experts, top_k], n, options, kind, logits, bias, own, name }
    }

    /// Whether nothing is known of a row but that its experts exist and differ.
    fn is_free(&self, row: usize) -> bool {
        self.kind == Kind::NotANumber && (1..3).contains(&row)
    }

    /// What must hold of any row.
    fn inspect(&self, ids: &[u32]) -> Option<String> {
        let [n_experts, top_k] = self.shape;
        let mut distinct = ids.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        let valid = distinct.len() == top_k && ids.iter().all(|&id| (id as usize) < n_experts);
        (!valid).then(|| format!("{ids:?} are not {top_k} of {n_experts} experts"))
    }
}

impl Case for Route {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn ways(&self) -> Vec<Way> {
        Way::ROWS.to_vec()
    }

    fn run<B: Backend>(&self, bench: &mut Bench<'_, B>, way: Way) -> Vec<Part> {
        let [n_experts, top_k] = self.shape;
        let timeline = Timeline::new(&[self.n]);
        let (bias, own) = (bench.weight(&self.bias), bench.weight(&self.own));
        let Options { scores, groups, renormalise, factor, .. } = self.options;
        let router = Router {
            n_experts,
            top_k,
            scores,
            choice_bias: self.options.bias.then_some(&bias),
            groups,
            renormalise,
            factor,
            expert_factor: self.options.own.then_some(&own),
        };
        let mut ids = vec![f32::NAN; self.n * top_k];
        let mut weights = ids.clone();
        for step in timeline.steps(way) {
            let logits = timeline.gather(&step, &self.logits, n_experts);
            let logits = bench.input(&logits, n_experts, way);
            let numbers = timeline.numbers(&step);
            // Longer than needed, as scratch from open is.
            let scratch = [0; 2].map(|_| bench.b.alloc(300 * top_k, BufType::F32));
            let (b, p, scratch) = (bench.b, &mut bench.pass, [&scratch[0], &scratch[1]]);
            let routed = b.route(p, logits.view(), &router, numbers.len(), scratch);
            let mut routes = Routes::default();
            p.read_routes(&routed, &mut routes).expect("the device works");
            let chosen = routes.ids.chunks_exact(top_k);
            bench.complaints.extend(chosen.filter_map(|ids| self.inspect(ids)));
            let chosen: Vec<f32> = routes.ids.iter().map(|&id| id as f32).collect();
            timeline.scatter(&step, &chosen, top_k, &mut ids);
            let got = bench.read(&routed.weights, numbers.len() * top_k);
            timeline.scatter(&step, &got, top_k, &mut weights);
        }
        for row in (0..self.n).filter(|&row| self.is_free(row)) {
            ids[row * top_k..][..top_k].fill(0.0);
            weights[row * top_k..][..top_k].fill(0.0);
        }
        vec![Part::exact("ids", top_k, ids), Part::new("weights", top_k, weights)]
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Company {
    Nobody,
    Plain,
    Gated,
}

struct Join {
    n: usize,
    top_k: usize,
    n_experts: usize,
    d: usize,
    company: Company,
    logits: Vec<f32>,
    parts: Vec<f32>,
    x: Vec<f32>,
    shared: Vec<f32>,
    gate: Vec<f32>,
    name: String,
}

impl Join {
    fn new(n: usize, top_k: usize, d: usize, company: Company) -> Self {
        let name = format!("moe_join [{n}, {top_k}, {d}] shared {company:?}");
        let mut rng = Rng::named(&name);
        let n_experts = 2 * top_k + 1;
        let mut some = || rng.permutation(n_experts).into_iter().take(top_k).map(|e| e as u32);
        let choices: Vec<u32> = (0..n).flat_map(|_| some().collect::<Vec<_>>()).collect();
        let logits = logits_for(&choices, top_k, n_experts);
        let parts = rng.normals(n * top_k * d, 1.0);
        let (x, shared) = (rng.normals(n * d, 1.0), rng.normals(n * d, 1.0));
        let gate = rng.normals(n, 2.0);
        Self { n, top_k, n_experts, d, company, logits, parts, x, shared, gate, name }
    }

    /// A sum that shows its order: two huge results of equal weight cancel, and the small one is
    /// lost if it is added before both. Its expert has the lowest index and the last rank.
    fn cancelling() -> Self {
        let mut case = Self::new(1, 3, 4, Company::Nobody);
        case.name = "moe_join in ascending order of experts".into();
        case.logits = vec![-6.0, -6.0, 0.5, -6.0, -6.0, 1.0, 1.0];
        let huge = (1u32 << 30) as f32;
        case.parts = [[huge; 4], [-huge; 4], [1.0; 4]].concat();
        case.x = vec![0.0; 4];
        case
    }

    /// A result that never arrived spoils its own row alone.
    fn missing() -> Self {
        let mut case = Self::new(3, 4, 5, Company::Plain);
        case.name = "moe_join with a result missing".into();
        case.parts[5 * 5..][..5].fill(f32::NAN);
        case
    }

    fn step<B: Backend>(
        &self,
        bench: &mut Bench<'_, B>,
        numbers: &[usize],
        way: Way,
        parts: &B::Buf,
    ) -> Vec<f32> {
        let (d, first, n) = (self.d, numbers[0], numbers.len());
        let of = |all: &[f32], width: usize| all[first * width..][..n * width].to_vec();
        let shape = [self.n_experts, self.top_k];
        let routed = bench.route(&of(&self.logits, self.n_experts), shape);
        let x = bench.input(&of(&self.x, d), d, way);
        let shared_x = bench.input(&of(&self.shared, d), d, way);
        let gate = bench.input(&of(&self.gate, 1), 1, way);
        let shared = (self.company != Company::Nobody).then(|| Shared {
            x: shared_x.view(),
            gate: (self.company == Company::Gated).then(|| gate.view()),
        });
        bench.b.moe_join(&mut bench.pass, &routed, parts, shared, d, x.view());
        bench.finish(&x)
    }
}

impl Case for Join {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn ways(&self) -> Vec<Way> {
        Way::ROWS.to_vec()
    }

    fn run<B: Backend>(&self, bench: &mut Bench<'_, B>, way: Way) -> Vec<Part> {
        let (timeline, width) = (Timeline::new(&[self.n]), self.top_k * self.d);
        let mut all = vec![f32::NAN; self.n * self.d];
        for step in timeline.steps(way) {
            let parts = timeline.gather(&step, &self.parts, width);
            let buf = bench.buffer(&parts, BufType::F32);
            let numbers = timeline.numbers(&step);
            let joined = self.step(bench, &numbers, way, &buf);
            timeline.scatter(&step, &joined, self.d, &mut all);
            let left = bench.read(&buf, parts.len());
            if let Some(at) = left.iter().position(|&part| !same(part, f32::NAN)) {
                bench.complaints.push(format!("element {at} of parts was left as it was"));
            }
        }
        vec![Part::new("x", self.d, all)]
    }
}
