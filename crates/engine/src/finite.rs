//! The search for the first value that is not finite.

use snowmelt_backend::{Backend, Pass, Rows, View};
use snowmelt_model::{Probe, Stage};

/// Looks for the first value that is not finite.
#[derive(Debug, Default)]
pub(crate) struct FiniteProbe {
    found: Option<(Stage, usize, f32)>,
    row: Vec<f32>,
}

impl FiniteProbe {
    /// Stage, row of its step, value.
    pub(crate) fn found(&self) -> Option<(Stage, usize, f32)> {
        self.found
    }
}

impl<B: Backend> Probe<B> for FiniteProbe {
    fn look(
        &mut self,
        p: &mut B::Pass,
        rows: &Rows,
        stage: Stage,
        view: View<'_, B::Buf>,
        width: usize,
    ) {
        // Ids are bits of integers.
        if self.found.is_some() || stage.is_ids() {
            return;
        }
        self.row.resize(width, 0.0);
        for row in 0..rows.len() {
            if p.read(view.buf, view.elements(row, width), &mut self.row).is_err() {
                return;
            }
            if let Some(&value) = self.row.iter().find(|value| !value.is_finite()) {
                self.found = Some((stage, row, value));
                return;
            }
        }
    }
}
