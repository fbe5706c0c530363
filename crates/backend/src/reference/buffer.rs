//! Buffers and weights of the reference.

use crate::verbs::{BufType, View};
use snowmelt_weights::Encoding;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

/// A buffer: f32 in memory, each value already rounded to the buffer's type.
///
/// Verbs copy rows out, compute, and copy rows back, so that an output may be an input.
#[derive(Clone)]
pub struct Buffer {
    values: Arc<Mutex<Vec<f32>>>,
    ty: BufType,
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({:?} x {})", self.ty, self.lock().len())
    }
}

impl Buffer {
    /// Filled with NaN.
    pub(super) fn new(len: usize, ty: BufType) -> Self {
        Self { values: Arc::new(Mutex::new(vec![f32::NAN; len])), ty }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<f32>> {
        self.values.lock().expect("an earlier verb panicked")
    }

    /// Copies a range out.
    pub(super) fn load(&self, range: Range<usize>) -> Vec<f32> {
        self.lock()[range].to_vec()
    }

    /// Copies values in, rounded to the type.
    pub(super) fn store(&self, offset: usize, values: &[f32]) {
        self.lock()[offset..][..values.len()].copy_from_slice(&rounded(self.ty, values));
    }

    /// Copies within; nothing is rounded.
    pub(super) fn copy(&self, from: usize, to: usize, len: usize) {
        assert!(from.abs_diff(to) >= len, "copy of {len} from {from} to {to} overlaps");
        self.lock().copy_within(from..from + len, to);
    }
}

/// Values as a buffer of this type holds them: rounded to nearest even.
fn rounded(ty: BufType, values: &[f32]) -> Vec<f32> {
    let encoding = match ty {
        BufType::F32 => Encoding::F32,
        BufType::F16 => Encoding::F16,
        BufType::Bf16 => Encoding::Bf16,
    };
    let mut bytes = vec![0; encoding.row_bytes(values.len())];
    encoding.encode_row(values, &mut bytes);
    let mut rounded = vec![0.0; values.len()];
    encoding.decode_row(&bytes, &mut rounded);
    rounded
}

/// The first `n` rows of a view, `[n, width]`.
pub(super) fn load(view: View<'_, Buffer>, n: usize, width: usize) -> Vec<f32> {
    let row = |t| view.offset + t * view.stride;
    (0..n).flat_map(|t| view.buf.load(row(t)..row(t) + width)).collect()
}

/// Writes `values: [n, width]` to the first rows of a view.
pub(super) fn store(view: View<'_, Buffer>, width: usize, values: &[f32]) {
    for (t, row) in values.chunks_exact(width).enumerate() {
        view.buf.store(view.offset + t * view.stride, row);
    }
}

/// A weight, `[d_out, d_in]`, decoded to f32.
pub struct Matrix {
    pub(super) values: Vec<f32>,
    pub(super) d_in: usize,
    pub(super) encoding: Encoding,
}

impl fmt::Debug for Matrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let d_out = self.values.len() / self.d_in;
        write!(f, "Matrix({d_out} x {} {})", self.d_in, self.encoding)
    }
}

impl Matrix {
    /// Filled with NaN.
    pub(super) fn new(encoding: Encoding, d_out: usize, d_in: usize) -> Self {
        Self { values: vec![f32::NAN; d_out * d_in], d_in, encoding }
    }

    /// Decodes whole rows from `first_row` on.
    pub(super) fn fill(&mut self, first_row: usize, rows: &[u8]) {
        let row_bytes = self.encoding.row_bytes(self.d_in);
        assert!(
            rows.len().is_multiple_of(row_bytes),
            "{} bytes are not whole rows of {row_bytes} bytes",
            rows.len()
        );
        let values = &mut self.values[first_row * self.d_in..];
        assert!(
            values.len() / self.d_in >= rows.len() / row_bytes,
            "{} rows from row {first_row} on do not fit",
            rows.len() / row_bytes
        );
        for (bytes, row) in rows.chunks_exact(row_bytes).zip(values.chunks_exact_mut(self.d_in)) {
            self.encoding.decode_row(bytes, row);
        }
    }
}
