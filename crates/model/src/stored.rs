//! A matrix as a checkpoint has it: rows in one tensor, or codes in one and scales in another.

use crate::config::Result;
use crate::loader::require;
use crate::quantisation::FP8_BLOCK;
use snowmelt_weights::{Checkpoint, Encoding, TensorInfo};
use std::ops::Range;

/// What the name of a tensor ends in that holds the scales of another.
const SCALES: &str = "_scale_inv";
/// Codes whose scales are in another tensor, as safetensors spells them.
const FP8: &str = "F8_E4M3";

/// A matrix of the checkpoint.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stored<'a> {
    /// Its rows, or their codes.
    pub(crate) info: &'a TensorInfo,
    /// Encoding of a row with its scales.
    pub(crate) encoding: Encoding,
    /// `[.., ceil(rows / 128), ceil(d_in / 128)]` and its encoding, a plain one.
    pub(crate) scales: Option<(&'a TensorInfo, Encoding)>,
}

impl<'a> Stored<'a> {
    /// The matrix or stack of matrices `name` of this shape, but for dimensions of 1.
    pub(crate) fn find(
        checkpoint: &'a Checkpoint,
        name: &str,
        shape: &[usize],
    ) -> Result<Stored<'a>> {
        let is_fp8 = checkpoint.tensor(name).is_some_and(|info| info.dtype == FP8);
        if !is_fp8 {
            let (info, encoding) = require(checkpoint, name, shape)?;
            return Ok(Self { info, encoding, scales: None });
        }
        let info = checkpoint.require_dtype(name, shape, FP8)?;
        let mut blocks = shape.to_vec();
        for dim in blocks.iter_mut().rev().take(2) {
            *dim = dim.div_ceil(FP8_BLOCK);
        }
        let scales = checkpoint.require(&format!("{name}{SCALES}"), &blocks)?;
        let encoding = scales.encoding.expect("`require` refuses unknown dtypes");
        Ok(Self { info, encoding: Encoding::F8E4M3, scales: Some((scales, encoding)) })
    }

    /// Names of its tensors.
    pub(crate) fn names(&self) -> impl Iterator<Item = &'a str> {
        [Some(self.info), self.scales.map(|(info, _)| info)]
            .into_iter()
            .flatten()
            .map(|info| info.name.as_str())
    }

    /// Fills `out` with encoded rows `range` of a matrix; codes get their scales.
    ///
    /// **Shapes.** `out: [range.len(), encoding.row_bytes(d_in)]`
    pub(crate) fn read_rows(
        &self,
        checkpoint: &Checkpoint,
        range: Range<usize>,
        out: &mut [u8],
    ) -> Result<()> {
        let d_in = self.info.d_in();
        let Some((scales, encoding)) = self.scales else {
            let offset = self.info.offset + (range.start * self.encoding.row_bytes(d_in)) as u64;
            return Ok(checkpoint.read(self.info.file, offset, out)?);
        };
        let blocks = d_in.div_ceil(FP8_BLOCK);
        let mut stored = vec![0; encoding.row_bytes(blocks)];
        let mut values = vec![0.0; blocks];
        let mut encoded: Vec<u8> = Vec::with_capacity(4 * blocks);
        let mut block = usize::MAX;
        let mut codes = vec![0; range.len() * d_in];
        let offset = self.info.offset + (range.start * d_in) as u64;
        checkpoint.read(self.info.file, offset, &mut codes)?;
        let rows = out.chunks_exact_mut(self.encoding.row_bytes(d_in));
        for ((row, out), codes) in range.zip(rows).zip(codes.chunks_exact(d_in)) {
            if row / FP8_BLOCK != block {
                block = row / FP8_BLOCK;
                let offset = scales.offset + (block * stored.len()) as u64;
                checkpoint.read(scales.file, offset, &mut stored)?;
                encoding.decode_row(&stored, &mut values);
                encoded.clear();
                encoded.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            }
            out[..d_in].copy_from_slice(codes);
            out[d_in..].copy_from_slice(&encoded);
        }
        Ok(())
    }
}
