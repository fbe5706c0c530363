//! A range of the outputs of a matrix product, for one thread: `linear`, and each piece of an
//! expert.
#![allow(unsafe_code)]

use crate::dot::{Brain, Element, Half, Products, Single, WeightRows};
use crate::gemm::{Activation, Format, Narrow, Q4, Q8, Rows8, TILE, Wide, XRow, tile};
use crate::isa::Isa;
use crate::quantise::{Quantised, Rounding};
use crate::simd::{Kernel, LANES, Registers, Simd, dispatch};
use crate::view::Mat;
use snowmelt_backend::{MatrixBytes, MatrixLayout};
use snowmelt_weights::Encoding;
use std::marker::PhantomData;
use std::ops::Range;

/// Encoded rows by pointer; no alignment is assumed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    pub(crate) ptr: *const u8,
    pub(crate) encoding: Encoding,
    pub(crate) d_out: usize,
    pub(crate) d_in: usize,
    /// How they lie, where not in plain rows.
    pub(crate) laid: Option<Laid>,
}

// SAFETY: a pointer to bytes that nothing writes while a verb runs.
unsafe impl Send for Matrix {}
// SAFETY: as above.
unsafe impl Sync for Matrix {}

/// A matrix of a record in any layout, by pointer to its regions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Laid {
    pub(crate) layout: MatrixLayout,
    pub(crate) rows: *const [u8],
    pub(crate) scales: *const [u8],
}

// SAFETY: as of `Matrix`.
unsafe impl Send for Laid {}
// SAFETY: as above.
unsafe impl Sync for Laid {}

impl Laid {
    /// Decodes rows `range` into `out`.
    fn decode(&self, range: Range<usize>, out: &mut [f32]) {
        // SAFETY: regions of the record, checked by the slab; its pin keeps writers off.
        let (rows, scales) = unsafe { (&*self.rows, &*self.scales) };
        self.layout.decode_rows(MatrixBytes { rows, scales }, range, out);
    }

    /// Adds outputs of a bias `[d_out, 1]` to rows that `row(t)` points to, for `t < n`; row `t` is
    /// that thread's own in these columns.
    pub(crate) fn add(&self, outputs: Range<usize>, n: usize, row: impl Fn(usize) -> *mut f32) {
        const COLUMNS: usize = 64;
        let mut values = [0.0f32; COLUMNS];
        for first in outputs.clone().step_by(COLUMNS) {
            let columns = first..(first + COLUMNS).min(outputs.end);
            let values = &mut values[..columns.len()];
            self.decode(columns.clone(), values);
            for t in 0..n {
                for (column, value) in columns.clone().zip(&*values) {
                    // SAFETY: outputs of a row of out, which the verb has checked.
                    unsafe { *row(t).add(column) += value };
                }
            }
        }
    }
}

impl Matrix {
    fn row_bytes(&self) -> usize {
        self.encoding.row_bytes(self.d_in)
    }

    /// First byte of a row.
    pub(crate) fn row(&self, r: usize) -> *const u8 {
        self.ptr.wrapping_add(r * self.row_bytes())
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

impl Linear<'_> {
    /// No rows and no outputs yet.
    pub(crate) fn new(w: Matrix, x: Input, out: Mat) -> Self {
        let (x_rows, out_rows, scratch) = (None, None, std::ptr::null_mut());
        Self { w, x, out, n: 0, x_rows, out_rows, outputs: 0..0, scratch }
    }

    /// Computes them. The verb has checked shapes and bounds, and gives each thread outputs and
    /// scratch of its own.
    pub(crate) fn compute(&self, isa: Isa) {
        if let Some(laid) = &self.w.laid {
            let Input::Float(x) = self.x else { unreachable!("codes lie in plain rows") };
            return self.laid(isa, x, laid);
        }
        match (self.x, self.w.encoding) {
            (Input::Float(x), Encoding::F32) => self.plain::<Single>(isa, x),
            (Input::Float(x), Encoding::F16) if self.n <= 2 => self.plain::<Half>(isa, x),
            (Input::Float(x), Encoding::Bf16) if self.n <= 2 => self.plain::<Brain>(isa, x),
            (Input::Float(x), _) => self.decoded(isa, x),
            (Input::Wide(x), encoding) => self.integers::<Wide>(isa, x, encoding),
            (Input::Narrow(x), encoding) => self.integers::<Narrow>(isa, x, encoding),
        }
    }

    fn x_row(&self, t: usize) -> usize {
        self.x_rows.map_or(t, |rows| rows[t] as usize)
    }

    fn out_row(&self, t: usize) -> usize {
        self.out_rows.map_or(t, |rows| rows[t] as usize)
    }

    /// Calls `job(outputs, x, out)` for tiles of `strip` outputs and at most [`X_ROWS`] rows.
    fn strips(&self, x: Mat, strip: usize, job: impl Fn(Range<usize>, &[*const f32], &[*mut f32])) {
        let mut from = [std::ptr::null(); X_ROWS];
        let mut to = [std::ptr::null_mut(); X_ROWS];
        for first_row in (0..self.n).step_by(X_ROWS) {
            let n = (self.n - first_row).min(X_ROWS);
            for first in self.outputs.clone().step_by(strip) {
                for i in 0..n {
                    from[i] = x.row(self.x_row(first_row + i)).cast_const();
                    to[i] = self.out.at(self.out_row(first_row + i), first);
                }
                job(first..(first + strip).min(self.outputs.end), &from[..n], &to[..n]);
            }
        }
    }

    fn row(&self, r: usize) -> *const u8 {
        self.w.row(r)
    }

    /// Weights that are multiplied as they lie.
    fn plain<E: Element>(&self, isa: Isa, x: Mat) {
        let strip = if self.n == 1 { self.outputs.len().max(1) } else { FLOAT_ROWS };
        let (stride, d_in) = (self.w.row_bytes(), self.w.d_in);
        self.strips(x, strip, |outputs, x, out| {
            let w = WeightRows { ptr: self.row(outputs.start), stride, count: outputs.len(), d_in };
            dispatch(isa, Products::<E> { w, x, out, element: PhantomData });
        });
    }

    /// Weights that are first decoded to f32: quantised ones, and floats that serve many rows.
    fn decoded(&self, isa: Isa, x: Mat) {
        let (d_in, encoding) = (self.w.d_in, self.w.encoding);
        self.strips(x, FLOAT_ROWS, |outputs, x, out| {
            let count = outputs.len();
            for (r, output) in outputs.enumerate() {
                let to = self.scratch.wrapping_add(r * d_in);
                dispatch(isa, Decode { encoding, row: self.row(output), d_in, out: to });
            }
            let w = WeightRows { ptr: self.scratch.cast(), stride: 4 * d_in, count, d_in };
            dispatch(isa, Products::<Single> { w, x, out, element: PhantomData });
        });
    }

    /// Weights in another layout than plain rows, decoded as well.
    fn laid(&self, isa: Isa, x: Mat, laid: &Laid) {
        let d_in = self.w.d_in;
        self.strips(x, FLOAT_ROWS, |outputs, x, out| {
            let count = outputs.len();
            // SAFETY: this thread's own room for so many rows.
            let rows = unsafe { std::slice::from_raw_parts_mut(self.scratch, count * d_in) };
            laid.decode(outputs, rows);
            let w = WeightRows { ptr: self.scratch.cast(), stride: 4 * d_in, count, d_in };
            dispatch(isa, Products::<Single> { w, x, out, element: PhantomData });
        });
    }

    fn integers<A: Activation>(&self, isa: Isa, x: Quantised, encoding: Encoding) {
        match encoding {
            Encoding::Q8 => dispatch(isa, Tiles::<Q8, A>::of(self, x)),
            Encoding::Q4G32 => dispatch(isa, Tiles::<Q4<1>, A>::of(self, x)),
            Encoding::Q4G64 => dispatch(isa, Tiles::<Q4<2>, A>::of(self, x)),
            other => unreachable!("{other} has no codes"),
        }
    }
}

/// Integer products of a [`Linear`].
struct Tiles<'a, F, A> {
    linear: &'a Linear<'a>,
    x: Quantised,
    kinds: PhantomData<(F, A)>,
}

impl<'a, F, A> Tiles<'a, F, A> {
    fn of(linear: &'a Linear<'a>, x: Quantised) -> Self {
        Self { linear, x, kinds: PhantomData }
    }
}

impl<F: Format, A: Activation> Kernel for Tiles<'_, F, A> {
    const INTEGERS: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let linear = self.linear;
        let stride = linear.w.row_bytes();
        let last = linear.outputs.end.saturating_sub(1);
        for first_row in (0..linear.n).step_by(2 * X_ROWS) {
            let end = (first_row + 2 * X_ROWS).min(linear.n);
            for first in linear.outputs.clone().step_by(TILE) {
                // The rows of a short tile repeat the last one; their results are dropped.
                let row = |r: usize| linear.w.ptr.wrapping_add(r * stride);
                let rows = std::array::from_fn(|r| row((first + r).min(last)));
                let w = Rows8 { rows, next: row(first + TILE), blocks: self.x.blocks };
                let mut t = first_row;
                // SAFETY: rows of `w` and of x, checked by the verb.
                unsafe {
                    if S::REGISTERS == Registers::Many {
                        while t + 4 <= end {
                            self.one::<S, 4>(s, &w, t, first);
                            t += 4;
                        }
                    }
                    if S::REGISTERS == Registers::Some {
                        while t + 2 <= end {
                            self.one::<S, 2>(s, &w, t, first);
                            t += 2;
                        }
                    }
                    while t < end {
                        self.one::<S, 1>(s, &w, t, first);
                        t += 1;
                    }
                }
            }
        }
    }
}

impl<F: Format, A: Activation> Tiles<'_, F, A> {
    /// Eight outputs from `first` of `N` rows from `t`.
    #[inline(always)]
    unsafe fn one<S: Simd, const N: usize>(&self, s: S, w: &Rows8, t: usize, first: usize) {
        let linear = self.linear;
        let rows: [XRow; N] =
            std::array::from_fn(|j| XRow::of::<F, A>(&self.x, linear.x_row(t + j)));
        let count = TILE.min(linear.outputs.end - first);
        let mut lanes = [0.0f32; TILE];
        // SAFETY: `count` outputs of each row of out.
        unsafe {
            let sums = tile::<S, F, A, N>(s, w, &rows);
            for j in 0..N {
                s.h_store(lanes.as_mut_ptr(), sums[j]);
                let out = linear.out.at(linear.out_row(t + j), first);
                std::ptr::copy_nonoverlapping(lanes.as_ptr(), out, count);
            }
        }
    }
}

/// Decodes a row, the same bits as [`Encoding::decode_row`].
pub(crate) struct Decode {
    pub(crate) encoding: Encoding,
    pub(crate) row: *const u8,
    pub(crate) d_in: usize,
    pub(crate) out: *mut f32,
}

impl Kernel for Decode {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: whoever made it has a row of `d_in` and room for it.
        unsafe {
            match self.encoding {
                Encoding::F16 => self.floats::<S, Half>(s),
                Encoding::Bf16 => self.floats::<S, Brain>(s),
                Encoding::F32 => self.floats::<S, Single>(s),
                Encoding::F8E4M3 | Encoding::Mxfp4 => {
                    let bytes = self.encoding.row_bytes(self.d_in);
                    let row = std::slice::from_raw_parts(self.row, bytes);
                    let out = std::slice::from_raw_parts_mut(self.out, self.d_in);
                    self.encoding.decode_row(row, out);
                }
                _ => self.codes(s),
            }
        }
    }
}

impl Decode {
    #[inline(always)]
    unsafe fn floats<S: Simd, E: Element>(&self, s: S) {
        for i in (0..self.d_in).step_by(LANES) {
            let n = LANES.min(self.d_in - i);
            // SAFETY: as the caller promises.
            unsafe {
                let v = E::load_part(s, self.row.add(i * E::BYTES), n);
                s.store_part(self.out.add(i), n, v);
            }
        }
    }

    #[inline(always)]
    unsafe fn codes<S: Simd>(&self, s: S) {
        let Self { encoding, row, d_in, out } = *self;
        let group = encoding.group();
        let groups = d_in / group;
        let q8 = encoding == Encoding::Q8;
        let params = if q8 { d_in } else { d_in / 2 };
        for g in 0..groups {
            // SAFETY: the row holds codes, then a scale and, in q4, a bias for each group.
            unsafe {
                let scale = s.splat(bf16(row.add(params + 2 * g)));
                let bias = if q8 { 0.0 } else { bf16(row.add(params + 2 * (groups + g))) };
                let bias = s.splat(bias);
                for i in (g * group..(g + 1) * group).step_by(LANES) {
                    let v = if q8 {
                        s.mul(scale, s.load_i8(row.add(i)))
                    } else {
                        s.add(s.mul(scale, s.load_u4(row.add(i / 2))), bias)
                    };
                    s.store(out.add(i), v);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::canonical::{self, NARROW_MAX, WIDE_MAX};
    use crate::quantise::{CodeLayout, RoundRows, Which};
    use crate::scratch::{Scratch, Sizes, thread_floats};

    struct Case {
        encoding: Encoding,
        d_out: usize,
        d_in: usize,
        n: usize,
        rows: Vec<u8>,
        x: Vec<f32>,
    }

    impl Case {
        /// Random codes, the extreme ones included.
        fn new(encoding: Encoding, [d_out, d_in, n]: [usize; 3]) -> Self {
            let mut seed = (d_in * 31 + d_out) as u32;
            let mut next = || {
                seed = seed.wrapping_mul(1664525).wrapping_add(1013904223);
                seed >> 16
            };
            let mut float = move || next() as f32 / 65536.0 - 0.5;
            let x = (0..n * d_in).map(|i| float() * if i % 37 == 0 { 9.0 } else { 1.0 }).collect();
            let mut rows = vec![0; d_out * encoding.row_bytes(d_in)];
            for row in rows.chunks_mut(encoding.row_bytes(d_in)) {
                let values: Vec<f32> = (0..d_in).map(|_| float()).collect();
                encoding.encode_row(&values, row);
                let codes = match encoding {
                    Encoding::Q8 => d_in,
                    _ if encoding.is_quantised() => d_in / 2,
                    _ => 0,
                };
                row[..codes]
                    .iter_mut()
                    .step_by(3)
                    .for_each(|byte| *byte = (float() * 256.0) as i8 as u8);
                row[..codes].iter_mut().take(2).for_each(|byte| *byte = 0x80);
            }
            Self { encoding, d_out, d_in, n, rows, x }
        }

        fn run(&self, isa: Isa, rounding: Option<Rounding>) -> Vec<f32> {
            let Self { encoding, d_out, d_in, n, .. } = *self;
            let mut scratch = Scratch::new(1);
            let thread = thread_floats(d_in, 0, 0, 0);
            scratch.reserve(Sizes { rows: n, d_in, thread, ..Sizes::default() });
            let mut out = vec![f32::NAN; n * d_out];
            let x = Mat { ptr: self.x.as_ptr().cast_mut(), stride: d_in };
            let input = match rounding {
                None => Input::Float(x),
                Some(rounding) => {
                    let (out, layout) = (scratch.x(d_in), CodeLayout::of(rounding, encoding));
                    let (rows, range) = (Which::All(n), 0..n);
                    dispatch(isa, RoundRows { x, layout, out, rows, range });
                    match rounding {
                        Rounding::Wide => Input::Wide(out),
                        Rounding::Narrow => Input::Narrow(out),
                    }
                }
            };
            let w = Matrix { ptr: self.rows.as_ptr(), encoding, d_out, d_in, laid: None };
            let to = Mat { ptr: out.as_mut_ptr(), stride: d_out };
            // In two uneven parts, as two threads would.
            let scratch = scratch.thread_areas().of(0);
            for units in [0..w.units() / 3, w.units() / 3..w.units()] {
                let outputs = w.outputs(units);
                Linear { n, outputs, scratch, ..Linear::new(w, input, to) }.compute(isa);
            }
            out
        }

        fn wanted(&self, rounding: Option<Rounding>) -> Vec<f32> {
            let mut out = Vec::new();
            let mut decoded = vec![0.0; self.d_in];
            for x in self.x.chunks(self.d_in) {
                for row in self.rows.chunks(self.encoding.row_bytes(self.d_in)) {
                    out.push(match rounding {
                        None => {
                            self.encoding.decode_row(row, &mut decoded);
                            canonical::dot(&decoded, x)
                        }
                        Some(Rounding::Wide) => {
                            canonical::dot_quantised(self.encoding, row, x, WIDE_MAX)
                        }
                        Some(Rounding::Narrow) => {
                            canonical::dot_quantised(self.encoding, row, x, NARROW_MAX)
                        }
                    });
                }
            }
            out
        }
    }

    #[test]
    fn kernels_compute_the_definition_bit_for_bit() {
        for encoding in Encoding::ALL.into_iter().filter(|encoding| encoding.can_encode()) {
            let widths = if encoding.is_quantised() {
                [1, 2, 3, 9, 17, 20].map(|groups| groups * encoding.group())
            } else {
                [1, 16, 31, 33, 64, 147]
            };
            for d_in in widths {
                for (d_out, n) in [(1, 1), (23, 1), (24, 2), (17, 3), (9, 7), (13, 70)] {
                    let case = Case::new(encoding, [d_out, d_in, n]);
                    let roundings: &[Option<Rounding>] = if encoding.is_quantised() {
                        &[None, Some(Rounding::Wide), Some(Rounding::Narrow)]
                    } else {
                        &[None]
                    };
                    for &rounding in roundings {
                        let wanted = case.wanted(rounding);
                        for isa in Isa::available() {
                            let found = case.run(isa, rounding);
                            let bits =
                                |all: &[f32]| all.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                            assert_eq!(
                                bits(&found),
                                bits(&wanted),
                                "{isa} {encoding} [{n}, {d_in}] -> {d_out}, {rounding:?}"
                            );
                        }
                    }
                }
            }
        }
    }
}
