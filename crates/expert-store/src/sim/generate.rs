//! Traces by chance, where no recorded one is at hand.

use super::Trace;
use crate::rng::Rng;

/// What a generated trace looks like.
#[derive(Clone, Copy, Debug)]
pub struct TraceSpec {
    /// Layer count.
    pub n_layers: u32,
    /// Experts of each layer.
    pub n_experts: u32,
    /// Experts a token uses of each layer.
    pub top_k: u32,
    /// Token count.
    pub n_steps: u32,
    /// `s` of the popularity `exp(s * normal)`, drawn for each expert; 0 is uniform.
    pub skew: f64,
    /// How far the skew of layers differs: from `skew * (1 - spread)` in the first layer to
    /// `skew * (1 + spread)` in the last.
    pub spread: f64,
    /// Chance that an expert of the token before is used again.
    pub repeat: f64,
    /// Tokens after which half of the popularity (in the variance of its logarithm) is drawn anew;
    /// 0 for never.
    pub topic_steps: u32,
    /// Everything above is equal for equal seeds.
    pub seed: u64,
}

impl Default for TraceSpec {
    /// 48 layers of 512 experts, 10 of them used, uniform.
    fn default() -> Self {
        Self {
            n_layers: 48,
            n_experts: 512,
            top_k: 10,
            n_steps: 600,
            skew: 0.0,
            spread: 0.0,
            repeat: 0.0,
            topic_steps: 0,
            seed: 1,
        }
    }
}

/// One layer's popularity.
struct Layer {
    skew: f64,
    /// Logarithms that stay.
    lasting: Vec<f64>,
    /// Sums of the present popularity up to each expert.
    sums: Vec<f64>,
    last: Vec<u32>,
}

impl TraceSpec {
    /// The trace.
    ///
    /// # Panics
    /// If a token uses more than half of the experts.
    pub fn generate(&self) -> Trace {
        assert!(2 * self.top_k <= self.n_experts, "`{}` of `{}`", self.top_k, self.n_experts);
        let mut rng = Rng::new(self.seed);
        let mut trace = Trace::new(self.n_layers, self.n_experts);
        let mut layers: Vec<Layer> =
            (0..self.n_layers).map(|index| self.layer(index, &mut rng)).collect();
        for step in 0..self.n_steps {
            let new_topic = self.topic_steps > 0 && step % self.topic_steps == 0;
            for (index, layer) in (0..).zip(&mut layers) {
                if new_topic {
                    let (half, skew) = (0.5_f64.sqrt(), layer.skew);
                    layer.sum(|lasting| half * (lasting + skew * rng.normal()));
                }
                self.token(layer, &mut rng);
                trace.push(index, &layer.last);
            }
        }
        trace
    }

    fn layer(&self, index: u32, rng: &mut Rng) -> Layer {
        let place = 2.0 * f64::from(index) / f64::from((self.n_layers - 1).max(1)) - 1.0;
        let skew = self.skew * (1.0 + self.spread * place);
        let lasting = (0..self.n_experts).map(|_| skew * rng.normal()).collect();
        let mut layer = Layer { skew, lasting, sums: Vec::new(), last: Vec::new() };
        layer.sum(|lasting| lasting);
        layer
    }

    fn token(&self, layer: &mut Layer, rng: &mut Rng) {
        layer.last.retain(|_| rng.unit() < self.repeat);
        while layer.last.len() < self.top_k as usize {
            let total = layer.sums.last().copied().unwrap_or_default();
            let at = rng.unit() * total;
            let expert = layer.sums.partition_point(|&sum| sum <= at) as u32;
            if expert < self.n_experts && !layer.last.contains(&expert) {
                layer.last.push(expert);
            }
        }
    }
}

impl Layer {
    /// Sums up the popularity whose logarithm `present` makes of the lasting one.
    fn sum(&mut self, mut present: impl FnMut(f64) -> f64) {
        let mut total = 0.0;
        self.sums.clear();
        self.sums.extend(self.lasting.iter().map(|&lasting| {
            total += present(lasting).exp();
            total
        }));
    }
}
