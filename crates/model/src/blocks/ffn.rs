//! Feed-forward halves: a dense SwiGLU, or routed experts with an optional shared one.

use crate::config::{ExpertSizes, Result};
use crate::experts::ExpertShape;
use crate::loader::{Loader, Use};
use crate::registry::Step;
use snowmelt_backend::{
    Backend, ExpertFetch, ExpertLayout, MoeBlock, Router, Shared, StepError, View, moe_block,
};

/// `down(silu(gate x) * up x)`
#[derive(Debug)]
pub(crate) struct Mlp<W> {
    width: usize,
    gate: W,
    up: W,
    down: W,
}

impl<W> Mlp<W> {
    /// `name`: `layers.0.mlp`; `sizes = [d_model, width]`.
    pub(crate) fn load<L: Loader<Weight = W>>(
        l: &mut L,
        [d, width]: [usize; 2],
        name: &str,
    ) -> Result<Self> {
        let mut part = |part: &str, shape| {
            let name = l.tensors().trunk(&format!("{name}.{part}.weight"));
            l.matrix(&name, shape, Use::Projection, &[])
        };
        Ok(Self {
            width,
            gate: part("gate_proj", [width, d])?,
            up: part("up_proj", [width, d])?,
            down: part("down_proj", [d, width])?,
        })
    }

    fn forward<B: Backend<Weight = W>>(
        &self,
        b: &B,
        p: &mut B::Pass,
        n: usize,
        [x, gate, up, out]: [View<'_, B::Buf>; 4],
    ) {
        b.linear(p, x, &self.gate, n, gate);
        b.linear(p, x, &self.up, n, up);
        b.swiglu(p, gate, up, self.width, n, gate);
        b.linear(p, gate, &self.down, n, out);
    }
}

/// Sizes of a mixture of experts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MoeShape {
    pub(crate) d_model: usize,
    pub(crate) sizes: ExpertSizes,
    /// Inner width of the shared expert, which is gated by a sigmoid.
    pub(crate) d_shared: Option<usize>,
}

/// ```text
/// w = softmax(gate x), the top_k greatest
/// out = sum w_e expert_e(x) + sigmoid(shared_expert_gate x) shared_expert(x)
/// ```
#[derive(Debug)]
pub(crate) struct Moe<W> {
    layer: u32,
    shape: MoeShape,
    router: W,
    layout: ExpertLayout,
    shared: Option<(Mlp<W>, W)>,
}

impl<W> Moe<W> {
    /// `name`: `layers.0.mlp`.
    pub(crate) fn load<L>(l: &mut L, shape: MoeShape, layer: usize, name: &str) -> Result<Self>
    where
        L: Loader<Weight = W>,
    {
        let (d, sizes) = (shape.d_model, shape.sizes);
        let limits = l.limits();
        limits.top_k = limits.top_k.max(sizes.top_k);
        let of = |l: &L, part: &str| l.tensors().trunk(&format!("{name}.{part}"));
        let layer = layer as u32;
        let (n_experts, d_expert) = (sizes.n_experts, sizes.d_expert);
        let experts = ExpertShape { layer, n_experts, d_model: d, d_expert };
        let router = l.matrix(&of(l, "gate.weight"), [n_experts, d], Use::Exact, &[])?;
        let layout = l.experts(&experts, &of(l, "experts"))?;
        let shared = match shape.d_shared {
            Some(width) => {
                let mlp = Mlp::load(l, [d, width], &format!("{name}.shared_expert"))?;
                let gate_name = of(l, "shared_expert_gate.weight");
                Some((mlp, l.matrix(&gate_name, [1, d], Use::Exact, &[])?))
            }
            None => None,
        };
        Ok(Self { layer, shape, router, layout, shared })
    }
}

/// Either kind.
#[derive(Debug)]
pub(crate) enum Ffn<W> {
    /// Dense.
    Mlp(Mlp<W>),
    /// Routed.
    Moe(Moe<W>),
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

impl<W> Ffn<W> {
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
        B: Backend<Weight = W>,
        F: ExpertFetch<B>,
    {
        let (b, n, d) = (step.b, step.rows.len(), x.stride);
        let inner = [View::of(&work.gate, work.width), View::of(&work.up, work.width)];
        let moe = match self {
            Self::Mlp(mlp) => {
                mlp.forward(b, step.p, n, [normed, inner[0], inner[1], delta]);
                b.add(step.p, x, delta, d, n);
                return Ok(());
            }
            Self::Moe(moe) => moe,
        };
        let scratch = work.moe.as_ref().expect("loaded with the experts");
        let MoeShape { sizes, .. } = moe.shape;
        let logits = View::of(&scratch.logits, scratch.n_experts);
        b.linear(step.p, normed, &moe.router, n, logits);
        let router = Router::Softmax { renormalise: sizes.renormalise };
        let shape = [sizes.n_experts, sizes.top_k];
        let to = [&scratch.ids, &scratch.weights];
        let routed = b.route(step.p, logits, shape, router, n, to);
        let block = MoeBlock {
            layer: moe.layer,
            x: normed,
            routed: &routed,
            layout: &moe.layout,
            parts: &scratch.parts,
        };
        let gate = View::of(&scratch.shared_gate, 1);
        moe_block(b, step.p, step.fetch, step.work, &block, |p| {
            if let Some((mlp, gate_weight)) = &moe.shared {
                mlp.forward(b, p, n, [normed, inner[0], inner[1], delta]);
                b.linear(p, normed, gate_weight, n, gate);
            }
        })?;
        let shared = moe.shared.as_ref().map(|_| Shared { x: delta, gate: Some(gate) });
        b.moe_join(step.p, &routed, &scratch.parts, shared, d, x);
        Ok(())
    }
}
