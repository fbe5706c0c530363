//! Rows of f32 by pointer: what kernels get after a verb has checked the bounds.
#![allow(unsafe_code)]

/// Row `t` begins at `ptr + t * stride`. Two of them may overlap where a verb works in place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mat {
    pub(crate) ptr: *mut f32,
    pub(crate) stride: usize,
}

// SAFETY: a pointer; the verb that made it splits rows over threads without overlap.
unsafe impl Send for Mat {}
// SAFETY: as above.
unsafe impl Sync for Mat {}

impl Mat {
    /// First element of a row.
    #[inline(always)]
    pub(crate) fn row(self, t: usize) -> *mut f32 {
        self.ptr.wrapping_add(t * self.stride)
    }

    /// First element of a column of a row.
    #[inline(always)]
    pub(crate) fn at(self, t: usize, column: usize) -> *mut f32 {
        self.row(t).wrapping_add(column)
    }
}
