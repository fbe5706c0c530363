//! Captures: values inside a run, kept for comparison with another engine.

use snowmelt_backend::{Backend, Pass, Rows, View};
use snowmelt_model::{Probe, Stage};
use std::collections::BTreeMap;
use std::ops::Range;

/// Which stages of which layers are kept, at which positions.
#[derive(Clone, Debug)]
pub struct CaptureOptions {
    /// Beginnings of stage names: `layer.`, `attention.`, `gdn.`, `router.`.
    pub stages: Vec<String>,
    /// Layers.
    pub layers: Range<usize>,
    /// One position; none: all.
    pub position: Option<usize>,
}

/// What was kept of one stage of one layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Captured {
    /// Elements of a row.
    pub width: usize,
    /// `[rows, width]`, positions ascending; bits of u32 where the stage holds ids.
    pub values: Vec<f32>,
}

/// Keeps values of one session's run, from its first token on.
#[derive(Debug)]
pub struct Capture {
    options: CaptureOptions,
    taken: BTreeMap<(usize, &'static str), Captured>,
    failed: bool,
}

impl Capture {
    /// Nothing kept yet.
    pub fn new(options: CaptureOptions) -> Self {
        Self { options, taken: BTreeMap::new(), failed: false }
    }

    /// What was asked for.
    pub fn options(&self) -> &CaptureOptions {
        &self.options
    }

    /// What was kept, by layer and stage.
    pub fn taken(&self) -> &BTreeMap<(usize, &'static str), Captured> {
        &self.taken
    }

    /// Whether a value could not be read from the device.
    pub fn is_failed(&self) -> bool {
        self.failed
    }

    fn wants(&self, stage: Stage) -> bool {
        self.options.layers.contains(&stage.layer)
            && self.options.stages.iter().any(|start| stage.name.starts_with(start.as_str()))
    }
}

impl<B: Backend> Probe<B> for Capture {
    fn look(
        &mut self,
        p: &mut B::Pass,
        rows: &Rows,
        stage: Stage,
        view: View<'_, B::Buf>,
        width: usize,
    ) {
        if !self.wants(stage) {
            return;
        }
        for (index, row) in rows.rows().iter().enumerate() {
            if self.options.position.is_some_and(|wanted| wanted != row.position as usize) {
                continue;
            }
            let kept = self.taken.entry((stage.layer, stage.name)).or_default();
            kept.width = width;
            let at = kept.values.len();
            kept.values.resize(at + width, 0.0);
            let into = &mut kept.values[at..];
            if p.read(view.buf, view.elements(index, width), into).is_err() {
                self.failed = true;
            }
        }
    }
}
