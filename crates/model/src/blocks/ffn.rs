//! Feed-forward halves: a dense gated unit, or routed experts with an optional shared one.

use crate::config::{ExpertSizes, Result};
use crate::experts::{ExpertShape, Fused};
use crate::loader::{Loader, Use};
use crate::registry::Step;
use snowmelt_backend::{
    Backend, ExpertFetch, ExpertLayout, Glu, Groups, MoeBlock, Routed, Router, Scores, Shared,
    StepError, View, moe_block,
};

/// `down(f(gate x) * up x)`
#[derive(Debug)]
pub(crate) struct Mlp<W> {
    glu: Glu,
    width: usize,
    gate: W,
    up: W,
    down: W,
}

impl<W> Mlp<W> {
    /// `name`: `layers.0.mlp`; `sizes = [d_model, width]`.
    pub(crate) fn load<L: Loader<Weight = W>>(
        l: &mut L,
        glu: Glu,
        [d, width]: [usize; 2],
        name: &str,
    ) -> Result<Self> {
        let mut part = |part: &str, shape| {
            let name = l.tensors().trunk(&format!("{name}.{part}.weight"));
            l.matrix(&name, shape, Use::Projection, &[])
        };
        Ok(Self {
            glu,
            width,
            gate: part("gate_proj", [width, d])?,
            up: part("up_proj", [width, d])?,
            down: part("down_proj", [d, width])?,
        })
    }

    /// `[x, gate, up, out]`: input, two inner rows for scratch, result.
    pub(crate) fn forward<B: Backend<Weight = W>>(
        &self,
        b: &B,
        p: &mut B::Pass,
        n: usize,
        [x, gate, up, out]: [View<'_, B::Buf>; 4],
    ) {
        b.linear(p, x, &self.gate, n, gate);
        b.linear(p, x, &self.up, n, up);
        b.glu(p, self.glu, gate, up, self.width, n, gate);
        b.linear(p, gate, &self.down, n, out);
    }
}

/// A shared expert.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedShape {
    /// `shared_expert`
    pub(crate) name: &'static str,
    /// Inner width.
    pub(crate) width: usize,
    /// Whether `{name}_gate` decides how much of it is added.
    pub(crate) gated: bool,
}

/// How a family routes; its tensors lie under that name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RouterShape {
    pub(crate) scores: Scores,
    /// Tensor added to the scores for the choice.
    pub(crate) choice_bias: Option<&'static str>,
    /// Tensor added to the logits.
    pub(crate) bias: Option<&'static str>,
    pub(crate) groups: Option<Groups>,
    /// The chosen weights are divided by their sum plus this.
    pub(crate) renormalise: Option<f32>,
    pub(crate) factor: f32,
}

impl RouterShape {
    /// Softmax over all experts.
    pub(crate) fn softmax(renormalise: bool) -> Self {
        Self {
            scores: Scores::Softmax,
            choice_bias: None,
            bias: None,
            groups: None,
            renormalise: renormalise.then_some(0.0),
            factor: 1.0,
        }
    }
}

/// Sizes of a mixture of experts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MoeShape {
    pub(crate) d_model: usize,
    pub(crate) sizes: ExpertSizes,
    pub(crate) glu: Glu,
    pub(crate) router: RouterShape,
    /// `gate`: the matrix of the router, without `.weight`.
    pub(crate) router_name: &'static str,
    /// The form of fused tensors of experts.
    pub(crate) fused: Fused,
    pub(crate) shared: Option<SharedShape>,
}

impl MoeShape {
    /// As most families name and compute it.
    pub(crate) fn silu(d_model: usize, sizes: ExpertSizes, router: RouterShape) -> Self {
        let (glu, fused) = (Glu::Silu, Fused::Halves);
        Self { d_model, sizes, glu, router, router_name: "gate", fused, shared: None }
    }

    /// Inner width of the shared expert, 0 for none.
    pub(crate) fn shared_width(&self) -> usize {
        self.shared.map_or(0, |shared| shared.width)
    }
}

/// ```text
/// w = router(gate x), the top_k greatest
/// out = sum w_e expert_e(x) + shared_expert(x), times sigmoid(shared_expert_gate x) if gated
/// ```
#[derive(Debug)]
pub(crate) struct Moe<W, Buf> {
    layer: u32,
    shape: MoeShape,
    router: W,
    router_bias: Option<Buf>,
    choice_bias: Option<W>,
    layout: Box<ExpertLayout>,
    shared: Option<(Mlp<W>, Option<W>)>,
}

impl<W, Buf> Moe<W, Buf> {
    /// `name`: `layers.0.mlp`.
    pub(crate) fn load<L>(l: &mut L, shape: MoeShape, layer: usize, name: &str) -> Result<Self>
    where
        L: Loader<Weight = W, Buf = Buf>,
    {
        let (d, sizes) = (shape.d_model, shape.sizes);
        let limits = l.limits();
        limits.top_k = limits.top_k.max(sizes.top_k);
        let of = |l: &L, part: &str| l.tensors().trunk(&format!("{name}.{part}"));
        let layer = layer as u32;
        let (n_experts, d_expert) = (sizes.n_experts, sizes.d_expert);
        let (glu, fused) = (shape.glu, shape.fused);
        let experts = ExpertShape { layer, n_experts, d_model: d, d_expert, glu, fused };
        let router_name = of(l, &format!("{}.weight", shape.router_name));
        let router = l.matrix(&router_name, [n_experts, d], Use::Exact, &[])?;
        let router_bias = match shape.router.bias {
            Some(part) => Some(l.bias(&of(l, part), n_experts, &[])?),
            None => None,
        };
        let choice_bias = match shape.router.choice_bias {
            Some(part) => Some(l.vector(&of(l, part), n_experts, 0.0)?),
            None => None,
        };
        let layout = Box::new(l.experts(&experts, &of(l, "experts"))?);
        let shared = match shape.shared {
            Some(SharedShape { name: part, width, gated }) => {
                let mlp = Mlp::load(l, shape.glu, [d, width], &format!("{name}.{part}"))?;
                let gate_name = of(l, &format!("{part}_gate.weight"));
                let gate = match gated {
                    true => Some(l.matrix(&gate_name, [1, d], Use::Exact, &[])?),
                    false => None,
                };
                Some((mlp, gate))
            }
            None => None,
        };
        Ok(Self { layer, shape, router, router_bias, choice_bias, layout, shared })
    }

    /// Routes `x` and fetches, computes and joins the experts: `to += moe(x)`;
    /// `x, delta, to: [n, d_model]`, `delta` is scratch.
    pub(crate) fn forward<B, F>(
        &self,
        step: &mut Step<'_, B, F>,
        work: &FfnWork<B::Buf>,
        x: View<'_, B::Buf>,
        delta: View<'_, B::Buf>,
        to: View<'_, B::Buf>,
    ) -> Result<(), StepError>
    where
        B: Backend<Weight = W, Buf = Buf>,
        F: ExpertFetch<B>,
    {
        let (b, n, d) = (step.b, step.rows.len(), to.stride);
        let inner = work.inner();
        let scratch = work.moe.as_ref().expect("loaded with the experts");
        let routed = self.route(step, scratch, x);
        let block = MoeBlock {
            layer: self.layer,
            x,
            routed: &routed,
            layout: &self.layout,
            parts: &scratch.parts,
        };
        let gate = View::of(&scratch.shared_gate, 1);
        moe_block(b, step.p, step.fetch, step.work, &block, |p| {
            if let Some((mlp, gate_weight)) = &self.shared {
                mlp.forward(b, p, n, [x, inner[0], inner[1], delta]);
                if let Some(gate_weight) = gate_weight {
                    b.linear(p, x, gate_weight, n, gate);
                }
            }
        })?;
        let shared = |(_, weight): &(Mlp<W>, Option<W>)| Shared {
            x: delta,
            gate: weight.as_ref().map(|_| gate),
        };
        let shared = self.shared.as_ref().map(shared);
        b.moe_join(step.p, &routed, &scratch.parts, shared, d, to);
        Ok(())
    }

    fn route<B, F>(
        &self,
        step: &mut Step<'_, B, F>,
        scratch: &MoeScratch<B::Buf>,
        x: View<'_, B::Buf>,
    ) -> Routed<B::Buf>
    where
        B: Backend<Weight = W, Buf = Buf>,
    {
        let (b, n, shape) = (step.b, step.rows.len(), &self.shape.router);
        let ExpertSizes { n_experts, top_k, .. } = self.shape.sizes;
        let logits = View::of(&scratch.logits, scratch.n_experts);
        b.linear(step.p, x, &self.router, n, logits);
        if let Some(bias) = &self.router_bias {
            b.add(step.p, logits, View::row(bias), n_experts, n);
        }
        let router = Router {
            n_experts,
            top_k,
            scores: shape.scores,
            choice_bias: self.choice_bias.as_ref(),
            groups: shape.groups,
            renormalise: shape.renormalise,
            factor: shape.factor,
            expert_factor: None,
        };
        let routed = b.route(step.p, logits, &router, n, [&scratch.ids, &scratch.weights]);
        let layer = self.layer as usize;
        step.show(layer, "router.logits", logits, n_experts);
        step.show(layer, "router.ids", View::of(&routed.ids, top_k), top_k);
        step.show(layer, "router.weights", View::of(&routed.weights, top_k), top_k);
        routed
    }
}

/// Either kind.
#[derive(Debug)]
pub(crate) enum Ffn<W, Buf> {
    /// Dense.
    Mlp(Mlp<W>),
    /// Routed.
    Moe(Moe<W, Buf>),
}

/// Scratch, shared by the layers of a model.
#[derive(Debug)]
pub(crate) struct FfnWork<Buf> {
    /// Widest dense inner width.
    width: usize,
    gate: Buf,
    up: Buf,
    moe: Option<MoeScratch<Buf>>,
}

#[derive(Debug)]
struct MoeScratch<Buf> {
    n_experts: usize,
    logits: Buf,
    ids: Buf,
    weights: Buf,
    /// `[n, top_k, d_model]`
    parts: Buf,
    /// `[n, 1]`
    shared_gate: Buf,
}

impl<Buf> FfnWork<Buf> {
    /// `width`: the widest dense MLP or shared expert, 0 for none.
    pub(crate) fn load<L: Loader<Buf = Buf>>(
        l: &mut L,
        width: usize,
        moe: Option<MoeShape>,
    ) -> Self {
        let moe = moe.map(|shape| MoeScratch {
            n_experts: shape.sizes.n_experts,
            logits: l.scratch(shape.sizes.n_experts),
            ids: l.scratch(shape.sizes.top_k),
            weights: l.scratch(shape.sizes.top_k),
            parts: l.scratch(shape.sizes.top_k * shape.d_model),
            shared_gate: l.scratch(1),
        });
        Self { width, gate: l.scratch(width), up: l.scratch(width), moe }
    }
}

impl<Buf> FfnWork<Buf> {
    /// Two inner rows of the widest dense part.
    pub(crate) fn inner(&self) -> [View<'_, Buf>; 2] {
        [View::of(&self.gate, self.width), View::of(&self.up, self.width)]
    }
}

impl<W, Buf> Ffn<W, Buf> {
    /// `x += ffn(normed)`; `x, normed, delta: [n, d_model]`, `delta` is scratch.
    pub(crate) fn forward<B, F>(
        &self,
        step: &mut Step<'_, B, F>,
        work: &FfnWork<B::Buf>,
        normed: View<'_, B::Buf>,
        delta: View<'_, B::Buf>,
        x: View<'_, B::Buf>,
    ) -> Result<(), StepError>
    where
        B: Backend<Weight = W, Buf = Buf>,
        F: ExpertFetch<B>,
    {
        match self {
            Self::Mlp(mlp) => {
                let (b, n, [gate, up]) = (step.b, step.rows.len(), work.inner());
                mlp.forward(b, step.p, n, [normed, gate, up, delta]);
                b.add(step.p, x, delta, x.stride, n);
                Ok(())
            }
            Self::Moe(moe) => moe.forward(step, work, normed, delta, x),
        }
    }
}
