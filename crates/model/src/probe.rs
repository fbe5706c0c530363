//! A look at values inside a step: captures, and the search for what is not finite.

use snowmelt_backend::{Backend, Rows, View};

/// Where a value was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stage {
    /// Layer index.
    pub layer: usize,
    /// `layer.*`, `attention.*`, `hc.*`, `gdn.*` or `router.*`, see [`STAGES`].
    pub name: &'static str,
}

impl Stage {
    /// Whether its values are bits of integers.
    pub fn is_ids(&self) -> bool {
        self.name == "router.ids"
    }
}

/// What families show, in the order in which a layer computes it. Widths are those of the family;
/// not every layer has every stage.
pub const STAGES: &[(&str, &str)] = &[
    ("layer.input", "residual stream before the layer"),
    ("attention.q", "queries after norm and rotation"),
    ("attention.k", "keys after norm and rotation"),
    ("attention.v", "values"),
    ("attention.out", "result of attention, before the output projection"),
    ("hc.normed", "streams after the norm of the mixing half's connection"),
    ("hc.gate", "its gate, before the sigmoid"),
    ("hc.mixed", "input of the mixing half"),
    ("hc.branch", "result of the mixing half"),
    ("hc.inject", "weights of the way back, before 2 sigmoid(x / streams)"),
    ("hc.joined", "streams after the way back"),
    ("gdn.before", "q, k, v after convolution and SiLU"),
    ("gdn.after", "q and k L2-normalised, q scaled; v"),
    ("gdn.decay", "factor of the state"),
    ("gdn.beta", "strength of the write"),
    ("gdn.out", "result of the delta rule, before norm and gate"),
    ("layer.mixed", "residual stream after the mixing half"),
    ("router.logits", "logits of all experts"),
    ("router.ids", "chosen experts, u32"),
    ("router.weights", "their weights"),
    ("layer.output", "residual stream after the layer"),
];

/// Looks at values as they are recorded.
pub trait Probe<B: Backend> {
    /// `view: [n, width]` holds what `stage` names, for the rows of the step.
    fn look(
        &mut self,
        p: &mut B::Pass,
        rows: &Rows,
        stage: Stage,
        view: View<'_, B::Buf>,
        width: usize,
    );
}

/// Shows a value where someone looks.
pub(crate) fn show<B: Backend>(
    probe: &mut Option<&mut dyn Probe<B>>,
    p: &mut B::Pass,
    rows: &Rows,
    (layer, name): (usize, &'static str),
    (view, width): (View<'_, B::Buf>, usize),
) {
    if let Some(probe) = probe {
        probe.look(p, rows, Stage { layer, name }, view, width);
    }
}
