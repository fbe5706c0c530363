//! One tensor of a checkpoint.

use crate::encoding::Encoding;

/// Where a tensor lies and how its rows are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Full name, as in the file.
    pub name: String,
    /// Type as the file spells it.
    pub dtype: String,
    /// The same as an encoding; nothing when we cannot compute with it.
    pub encoding: Option<Encoding>,
    /// Dimensions, slowest first; empty for a scalar.
    pub shape: Vec<usize>,
    /// Index into [`crate::Checkpoint::files`].
    pub file: u32,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

impl TensorInfo {
    /// Product of all dimensions but the last; 1 for a vector or a scalar.
    pub fn rows(&self) -> usize {
        match self.shape.split_last() {
            Some((_, leading)) => leading.iter().product(),
            None => 1,
        }
    }

    /// The last dimension: values in a row; 1 for a scalar.
    pub fn d_in(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Number of values.
    pub fn values(&self) -> usize {
        self.rows() * self.d_in()
    }

    /// Bytes of one row, or nothing for a type we do not know.
    pub fn row_bytes(&self) -> Option<usize> {
        self.encoding.map(|e| e.row_bytes(self.d_in()))
    }

    /// One past the last byte, from the start of the file.
    pub fn end(&self) -> u64 {
        self.offset + self.len
    }
}

/// Splits a checked shape into rows and row length.
pub(crate) fn matrix(shape: &[usize]) -> Option<(usize, usize)> {
    match shape.split_last() {
        Some((last, leading)) => {
            let rows = leading.iter().try_fold(1usize, |n, d| n.checked_mul(*d))?;
            Some((rows, *last))
        }
        None => Some((1, 1)),
    }
}
