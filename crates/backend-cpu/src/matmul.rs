//! The verb `linear`, and the rounding of activations that precedes a matrix product.

use crate::backend::{Run, Tools};
use crate::buf::{CpuBuf, CpuWeight};
use crate::linear::{Input, Linear};
use crate::quantise::{CodeLayout, Quantised, RoundFloats, RoundRows, Rounding, Which};
use crate::scratch::{Sizes, thread_floats};
use crate::view::Mat;
use snowmelt_backend::View;
use snowmelt_weights::Encoding;

/// `out = x w^T`
pub(crate) fn linear(
    run: &mut Run<'_>,
    x: View<'_, CpuBuf>,
    w: &CpuWeight,
    n: usize,
    out: View<'_, CpuBuf>,
) {
    let w = w.matrix();
    let (d_out, d_in) = (w.d_out, w.d_in);
    let (x, out) = (run.mat(x, n, d_in), run.mat(out, n, d_out));
    let thread = thread_floats(d_in, 0, 0, 0);
    run.reserve(Sizes { rows: n, d_in, thread, ..Sizes::default() });
    let places = Places { codes: run.scratch.x(d_in), floats: run.scratch.x_floats(d_in) };
    let x = round(run.tools, x, Which::All(n), d_in, w.encoding, places);
    let areas = run.scratch.thread_areas();
    let isa = run.tools.isa;
    run.tools.split(w.units(), n * d_out * d_in, |thread, share| {
        let (outputs, scratch) = (w.outputs(share), areas.of(thread));
        Linear { n, outputs, scratch, ..Linear::new(w, x, out) }.compute(isa);
    });
}

/// Where rounded rows go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Places {
    pub(crate) codes: Quantised,
    pub(crate) floats: Mat,
}

/// Rounds rows of `width` as the backend's mode wants them beside weights of `encoding`.
pub(crate) fn round(
    tools: Tools<'_>,
    x: Mat,
    rows: Which<'_>,
    width: usize,
    encoding: Encoding,
    places: Places,
) -> Input {
    let Some(rounding) = tools.activations.rounding(encoding) else {
        return Input::Float(x);
    };
    let n = rows.len();
    if !encoding.is_quantised() {
        let out = places.floats;
        tools.kernels(n, n * width, |_, range| RoundFloats {
            x,
            out,
            width,
            rounding,
            rows,
            range,
        });
        return Input::Float(out);
    }
    let (out, layout) = (places.codes, CodeLayout::of(rounding, encoding));
    tools.kernels(n, n * width, |_, range| RoundRows { x, layout, out, rows, range });
    match rounding {
        Rounding::Wide => Input::Wide(out),
        Rounding::Narrow => Input::Narrow(out),
    }
}
