//! Buffers and weights in host memory.
#![allow(unsafe_code)]
#![allow(clippy::cast_ptr_alignment, reason = "memory is aligned to cache lines")]

use crate::linear::Matrix;
use crate::memory::Memory;
use snowmelt_backend::BufType;
use snowmelt_weights::Encoding;
use std::fmt;
use std::sync::Arc;

/// A buffer of [`CpuBackend`](crate::CpuBackend). Cloning clones the handle.
///
/// Its elements are reachable only through verbs and passes of the backend that made it, which
/// admits one thread at a time.
#[derive(Clone)]
pub struct CpuBuf(Arc<Inner>);

struct Inner {
    memory: Memory,
    len: usize,
    ty: BufType,
    owner: u64,
}

impl CpuBuf {
    pub(crate) fn new(memory: Memory, len: usize, ty: BufType, owner: u64) -> Self {
        assert!(memory.bytes() >= len * ty.bytes(), "{len} elements in {memory:?}");
        Self(Arc::new(Inner { memory, len, ty, owner }))
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Type of the elements.
    pub fn ty(&self) -> BufType {
        self.0.ty
    }

    /// First byte. Whoever calls holds the lock of the backend.
    pub(crate) fn ptr(&self) -> *mut u8 {
        self.0.memory.ptr()
    }

    /// The backend that made it.
    pub(crate) fn owner(&self) -> u64 {
        self.0.owner
    }
}

impl fmt::Debug for CpuBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuBuf({} {:?})", self.0.len, self.0.ty)
    }
}

/// Widest input for which a transposed f32 copy is kept beside the encoded rows.
const NARROW: usize = 64;

/// Encoded rows of a matrix, as in the file.
///
/// A vector, and a matrix of very short rows (a convolution), is also kept decoded: the verbs that
/// take them work on f32.
pub struct CpuWeight {
    encoding: Encoding,
    d_out: usize,
    d_in: usize,
    rows: Memory,
    /// f32, `[d_in, d_out]`.
    decoded: Option<Memory>,
}

impl CpuWeight {
    pub(crate) fn new(encoding: Encoding, d_out: usize, d_in: usize, huge_pages: bool) -> Self {
        let rows = Memory::zeroed(d_out * encoding.row_bytes(d_in), huge_pages);
        let small = d_out == 1 || d_in <= NARROW;
        let decoded = small.then(|| Memory::zeroed(4 * d_out * d_in, false));
        Self { encoding, d_out, d_in, rows, decoded }
    }

    /// Stores whole encoded rows.
    pub(crate) fn fill(&mut self, first_row: usize, bytes: &[u8]) {
        let row_bytes = self.encoding.row_bytes(self.d_in);
        let count = bytes.len() / row_bytes.max(1);
        assert!(
            count * row_bytes == bytes.len() && first_row + count <= self.d_out,
            "{} bytes from row {first_row} on are not rows of {row_bytes} bytes in {self:?}",
            bytes.len()
        );
        // SAFETY: `count` rows lie inside, and the matrix is borrowed mutably.
        unsafe {
            let to = self.rows.ptr().add(first_row * row_bytes);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
        let Some(decoded) = &self.decoded else { return };
        let mut row = vec![0.0; self.d_in];
        for (r, bytes) in bytes.chunks_exact(row_bytes.max(1)).enumerate() {
            self.encoding.decode_row(bytes, &mut row);
            for (i, value) in row.iter().enumerate() {
                // SAFETY: `[d_in, d_out]` f32, and both indices are below.
                unsafe {
                    decoded.ptr().cast::<f32>().add(i * self.d_out + first_row + r).write(*value);
                }
            }
        }
    }

    /// The encoded rows.
    pub(crate) fn matrix(&self) -> Matrix {
        let (encoding, d_out, d_in) = (self.encoding, self.d_out, self.d_in);
        Matrix { ptr: self.rows.ptr(), encoding, d_out, d_in, laid: None }
    }

    /// One encoded row.
    pub(crate) fn row(&self, r: usize) -> &[u8] {
        let row_bytes = self.encoding.row_bytes(self.d_in);
        assert!(r < self.d_out, "row {r} of {self:?}");
        // SAFETY: the row lies inside; only `fill` writes, through a mutable borrow.
        unsafe { std::slice::from_raw_parts(self.rows.ptr().add(r * row_bytes), row_bytes) }
    }

    /// A vector of `d` values.
    pub(crate) fn vector(&self, d: usize) -> &[f32] {
        assert!((self.d_out, self.d_in) == (1, d), "wanted a vector of {d}, got {self:?}");
        self.transposed()
    }

    /// f32, `[d_in, d_out]`.
    pub(crate) fn transposed(&self) -> &[f32] {
        let Some(decoded) = &self.decoded else {
            panic!("rows wider than {NARROW} are not kept decoded: {self:?}")
        };
        // SAFETY: as in `row`; memory is aligned and begins as zeros.
        unsafe { std::slice::from_raw_parts(decoded.ptr().cast(), self.d_out * self.d_in) }
    }

    /// `[d_out, d_in]`
    pub(crate) fn shape(&self) -> [usize; 2] {
        [self.d_out, self.d_in]
    }
}

impl fmt::Debug for CpuWeight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuWeight([{}, {}] {})", self.d_out, self.d_in, self.encoding)
    }
}
