//! Reading long ranges once, in windows, to hash them.

use std::ops::Range;

use crate::bytes::{Buffers, DataFile, WINDOW};
use crate::digest::Digest;
use crate::error::WeightsError;

/// Reads ranges of one file through one buffer.
pub(crate) struct Scanner<'a> {
    pub(crate) file: &'a DataFile,
    pub(crate) buffers: &'a Buffers,
    window: Vec<u8>,
}

impl<'a> Scanner<'a> {
    pub(crate) fn new(file: &'a DataFile, buffers: &'a Buffers) -> Self {
        Self { file, buffers, window: vec![0; WINDOW] }
    }

    /// Shows a range to `look`, window by window.
    pub(crate) fn windows(
        &mut self,
        range: Range<u64>,
        mut look: impl FnMut(u64, &[u8]),
    ) -> Result<(), WeightsError> {
        let mut at = range.start;
        while at < range.end {
            let size = (range.end - at).min(WINDOW as u64) as usize;
            self.file.read(at, &mut self.window[..size], self.buffers)?;
            look(at, &self.window[..size]);
            at += size as u64;
        }
        Ok(())
    }

    /// The digest of a range; `also` sees the bytes too.
    pub(crate) fn digest(
        &mut self,
        range: Range<u64>,
        mut also: impl FnMut(&[u8]),
    ) -> Result<Digest, WeightsError> {
        let mut hasher = blake3::Hasher::new();
        self.windows(range, |_, bytes| {
            hasher.update(bytes);
            also(bytes);
        })?;
        Ok(Digest::finished(&hasher))
    }

    /// The first byte of a range that is not zero, and where it is.
    pub(crate) fn first_nonzero(
        &mut self,
        range: Range<u64>,
    ) -> Result<Option<(u64, u8)>, WeightsError> {
        let mut found = None;
        self.windows(range, |at, bytes| {
            let here = bytes.iter().position(|b| *b != 0);
            found = found.or(here.map(|i| (at + i as u64, bytes[i])));
        })?;
        Ok(found)
    }
}

/// The digest of a file that is written or read in order, with zeros where parts leave gaps.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stream {
    hasher: blake3::Hasher,
    at: u64,
}

impl Stream {
    /// Zeros up to `offset`, which lies less than an alignment ahead.
    pub(crate) fn pad_to(&mut self, offset: u64) {
        const ZEROS: [u8; 64] = [0; 64];
        while self.at < offset {
            let size = (offset - self.at).min(64);
            self.update(&ZEROS[..size as usize]);
        }
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.hasher.update(bytes);
        self.at += bytes.len() as u64;
    }

    pub(crate) fn digest(&self) -> Digest {
        Digest::finished(&self.hasher)
    }
}
