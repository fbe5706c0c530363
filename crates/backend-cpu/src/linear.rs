//! A range of the outputs of a matrix product, for one thread: `linear`, and each piece of an
//! expert.
#![allow(unsafe_code)]

use crate::dot::{Brain, Element, Half, Single, WeightRows, products};
use crate::gemm::{Activation, Format, Narrow, Q4, Q8, TILE, Wide, XRow, tile};
use crate::quantise::{Quantised, Rounding};
use crate::simd::{Kernel, LANES, Simd};
use crate::view::Mat;
use snowmelt_weights::Encoding;
use std::ops::Range;

/// Encoded rows by pointer; no alignment is assumed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    pub(crate) ptr: *const u8,
    pub(crate) encoding: Encoding,
    pub(crate) d_out: usize,
    pub(crate) d_in: usize,
}

// SAFETY: a pointer to bytes that nothing writes while a verb runs.
unsafe impl Send for Matrix {}
// SAFETY: as above.
unsafe impl Sync for Matrix {}

impl Matrix {
    fn row_bytes(&self) -> usize {
        self.encoding.row_bytes(self.d_in)
    }

    /// Bytes of all rows.
    pub(crate) fn bytes(&self) -> usize {
        self.d_out * self.row_bytes()
    }

    /// How many units of outputs there are.
    pub(crate) fn units(&self) -> usize {
        self.d_out.div_ceil(unit(self.encoding))
    }

    /// Outputs of these units.
    pub(crate) fn outputs(&self, units: Range<usize>) -> Range<usize> {
        let unit = unit(self.encoding);
        units.start * unit..(units.end * unit).min(self.d_out)
    }
}

/// Outputs that are computed together: what threads divide between them.
pub(crate) fn unit(encoding: Encoding) -> usize {
    if encoding.is_quantised() { TILE } else { FLOAT_ROWS }
}

/// The rows that weights are multiplied with.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Input {
    /// f32.
    Float(Mat),
    /// Rounded to i16.
    Wide(Quantised),
    /// Rounded to i8.
    Narrow(Quantised),
}

impl Input {
    /// The rows from `first` on.
    pub(crate) fn skip(self, first: usize) -> Self {
        match self {
            Self::Float(x) => Self::Float(Mat { ptr: x.row(first), ..x }),
            Self::Wide(x) => Self::Wide(x.skip(first, Rounding::Wide)),
            Self::Narrow(x) => Self::Narrow(x.skip(first, Rounding::Narrow)),
        }
    }
}

/// Rows of weights that are decoded together: a multiple of every register tile's.
pub(crate) const FLOAT_ROWS: usize = 12;
/// Rows of x that pass over one tile of weights before the next tile: they stay in the L2 cache.
const X_ROWS: usize = 32;

/// The product of some outputs with `n` rows.
#[derive(Clone, Debug)]
pub(crate) struct Linear<'a> {
    pub(crate) w: Matrix,
    pub(crate) x: Input,
    pub(crate) out: Mat,
    pub(crate) n: usize,
    /// Row of x of each row; without it they are the same.
    pub(crate) x_rows: Option<&'a [u32]>,
    /// Row of out of each row; without it they are the same.
    pub(crate) out_rows: Option<&'a [u32]>,
    /// Outputs to compute.
    pub(crate) outputs: Range<usize>,
    /// Room for `FLOAT_ROWS * d_in` f32, this thread's own.
    pub(crate) scratch: *mut f32,
}

impl Kernel for Linear<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: the verb has checked shapes and bounds, and gives each thread outputs and
        // scratch of its own.
        unsafe {
            match (self.x, self.w.encoding) {
                (Input::Float(x), Encoding::F32) => self.floats::<S, Single>(s, x),
                (Input::Float(x), Encoding::F16) => self.floats::<S, Half>(s, x),
                (Input::Float(x), Encoding::Bf16) => self.floats::<S, Brain>(s, x),
                (Input::Float(x), _) => self.decoded(s, x),
                (Input::Wide(x), encoding) => self.integers::<S, Wide>(s, &x, encoding),
                (Input::Narrow(x), encoding) => self.integers::<S, Narrow>(s, &x, encoding),
            }
        }
    }
}

impl Linear<'_> {
    /// No rows and no outputs yet.
    pub(crate) fn new(w: Matrix, x: Input, out: Mat) -> Self {
        let (x_rows, out_rows, scratch) = (None, None, std::ptr::null_mut());
        Self { w, x, out, n: 0, x_rows, out_rows, outputs: 0..0, scratch }
    }

    #[inline(always)]
    fn x_row(&self, t: usize) -> usize {
        self.x_rows.map_or(t, |rows| rows[t] as usize)
    }

    #[inline(always)]
    fn out_row(&self, t: usize) -> usize {
        self.out_rows.map_or(t, |rows| rows[t] as usize)
    }

    /// Rows `from..to` as pointers, at output `column`.
    #[inline(always)]
    fn pointers(&self, x: Mat, rows: Range<usize>, column: usize) -> Pointers {
        let mut all = Pointers { x: [std::ptr::null(); X_ROWS], out: [std::ptr::null_mut(); X_ROWS] };
        for (i, t) in rows.enumerate() {
            all.x[i] = x.row(self.x_row(t));
            all.out[i] = self.out.at(self.out_row(t), column);
        }
        all
    }

    /// Weights that are floats. Where they serve many rows they are first widened to f32.
    #[inline(always)]
    unsafe fn floats<S: Simd, E: Element>(&self, s: S, x: Mat) {
        let widen = E::BYTES < 4 && self.n > 2;
        let stride = self.w.row_bytes();
        let strip = if self.n == 1 { self.outputs.len().max(1) } else { FLOAT_ROWS };
        for first_row in (0..self.n).step_by(X_ROWS) {
            let rows = first_row..(first_row + X_ROWS).min(self.n);
            let n = rows.len();
            for first in self.outputs.clone().step_by(strip) {
                let count = strip.min(self.outputs.end - first);
                let to = self.pointers(x, rows.clone(), first);
                // SAFETY: the outputs are rows of `w`, checked by the verb.
                unsafe {
                    let ptr = self.w.ptr.add(first * stride);
                    let w = WeightRows { ptr, stride, count, d_in: self.w.d_in };
                    if widen {
                        let w = self.widened::<S, E>(s, w);
                        products::<S, Single>(s, w, &to.x[..n], &to.out[..n]);
                    } else {
                        products::<S, E>(s, w, &to.x[..n], &to.out[..n]);
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn widened<S: Simd, E: Element>(&self, s: S, w: WeightRows) -> WeightRows {
        let d_in = w.d_in;
        for r in 0..w.count {
            // SAFETY: `count` rows of `d_in`, in `w` as in scratch.
            unsafe {
                let (from, to) = (w.ptr.add(r * w.stride), self.scratch.add(r * d_in));
                let mut i = 0;
                while i + LANES <= d_in {
                    s.store(to.add(i), E::load(s, from.add(i * E::BYTES)));
                    i += LANES;
                }
                let v = E::load_part(s, from.add(i * E::BYTES), d_in - i);
                s.store_part(to.add(i), d_in - i, v);
            }
        }
        WeightRows { ptr: self.scratch.cast(), stride: 4 * d_in, ..w }
    }

    /// Quantised weights beside f32: rows are decoded first.
    #[inline(always)]
    unsafe fn decoded<S: Simd>(&self, s: S, x: Mat) {
        let (d_in, stride) = (self.w.d_in, self.w.row_bytes());
        for first_row in (0..self.n).step_by(X_ROWS) {
            let rows = first_row..(first_row + X_ROWS).min(self.n);
            let n = rows.len();
            for first in self.outputs.clone().step_by(FLOAT_ROWS) {
                let count = FLOAT_ROWS.min(self.outputs.end - first);
                let to = self.pointers(x, rows.clone(), first);
                // SAFETY: the outputs are rows of `w`, checked by the verb.
                unsafe {
                    for r in 0..count {
                        let row = self.w.ptr.add((first + r) * stride);
                        decode(s, self.w.encoding, row, d_in, self.scratch.add(r * d_in));
                    }
                    let ptr = self.scratch.cast();
                    let w = WeightRows { ptr, stride: 4 * d_in, count, d_in };
                    products::<S, Single>(s, w, &to.x[..n], &to.out[..n]);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn integers<S: Simd, A: Activation>(&self, s: S, x: &Quantised, encoding: Encoding) {
        // SAFETY: as the caller promises.
        unsafe {
            match encoding {
                Encoding::Q8 => self.tiles::<S, Q8, A>(s, x),
                Encoding::Q4G32 => self.tiles::<S, Q4<1>, A>(s, x),
                Encoding::Q4G64 => self.tiles::<S, Q4<2>, A>(s, x),
                other => unreachable!("{other} has no codes"),
            }
        }
    }

    #[inline(always)]
    unsafe fn tiles<S: Simd, F: Format, A: Activation>(&self, s: S, x: &Quantised) {
        let stride = self.w.row_bytes();
        let last = self.outputs.end.saturating_sub(1);
        for first_row in (0..self.n).step_by(2 * X_ROWS) {
            let end = (first_row + 2 * X_ROWS).min(self.n);
            for first in self.outputs.clone().step_by(TILE) {
                // The rows of a short tile repeat the last one; their results are dropped.
                let mut w = [self.w.ptr; TILE];
                for (r, w) in w.iter_mut().enumerate() {
                    *w = self.w.ptr.wrapping_add((first + r).min(last) * stride);
                }
                let mut t = first_row;
                // SAFETY: rows of `w` and of x, checked by the verb.
                unsafe {
                    while t + 4 <= end {
                        self.one::<S, F, A, 4>(s, &w, x, t, first);
                        t += 4;
                    }
                    while t < end {
                        self.one::<S, F, A, 1>(s, &w, x, t, first);
                        t += 1;
                    }
                }
            }
        }
    }

    /// Eight outputs from `first` of `N` rows from `t`.
    #[inline(always)]
    unsafe fn one<S: Simd, F: Format, A: Activation, const N: usize>(
        &self,
        s: S,
        w: &[*const u8; TILE],
        x: &Quantised,
        t: usize,
        first: usize,
    ) {
        let rows: [XRow; N] = std::array::from_fn(|j| XRow::of::<F, A>(x, self.x_row(t + j)));
        let count = TILE.min(self.outputs.end - first);
        let mut lanes = [0.0f32; TILE];
        // SAFETY: `count` outputs of each row of out.
        unsafe {
            let sums = tile::<S, F, A, N>(s, w, &rows, x.blocks);
            for j in 0..N {
                let out = self.out.at(self.out_row(t + j), first);
                if count == TILE {
                    s.h_store(out, sums[j]);
                } else {
                    s.h_store(lanes.as_mut_ptr(), sums[j]);
                    std::ptr::copy_nonoverlapping(lanes.as_ptr(), out, count);
                }
            }
        }
    }
}

struct Pointers {
    x: [*const f32; X_ROWS],
    out: [*mut f32; X_ROWS],
}

/// Decodes a quantised row, the same bits as [`Encoding::decode_row`].
#[inline(always)]
unsafe fn decode<S: Simd>(s: S, encoding: Encoding, row: *const u8, d_in: usize, out: *mut f32) {
    let group = encoding.group();
    let groups = d_in / group;
    let q8 = encoding == Encoding::Q8;
    let params = if q8 { d_in } else { d_in / 2 };
    for g in 0..groups {
        // SAFETY: the row holds codes, then a scale and, in q4, a bias for each group.
        unsafe {
            let scale = s.splat(bf16(row.add(params + 2 * g)));
            if q8 {
                for i in (g * group..(g + 1) * group).step_by(LANES) {
                    s.store(out.add(i), s.mul(scale, s.load_i8(row.add(i))));
                }
            } else {
                let bias = s.splat(bf16(row.add(params + 2 * (groups + g))));
                for i in (g * group..(g + 1) * group).step_by(LANES) {
                    let product = s.mul(scale, s.load_u4(row.add(i / 2)));
                    s.store(out.add(i), s.add(product, bias));
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn bf16(p: *const u8) -> f32 {
    // SAFETY: as the caller promises.
    f32::from_bits(u32::from(unsafe { p.cast::<u16>().read_unaligned() }) << 16)
}
