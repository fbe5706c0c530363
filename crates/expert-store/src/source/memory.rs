//! Records that are in memory already, for libraries and devices without files.

use super::{BlockSource, Completion, Read, ReadFailure};
use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Bytes that stand for a file.
#[derive(Clone, Debug)]
pub enum Blob {
    /// Shared.
    Shared(Arc<[u8]>),
    /// Linked into the program, or leaked.
    Static(&'static [u8]),
}

impl Blob {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Shared(bytes) => bytes,
            Self::Static(bytes) => bytes,
        }
    }
}

impl From<Arc<[u8]>> for Blob {
    fn from(bytes: Arc<[u8]>) -> Self {
        Self::Shared(bytes)
    }
}

impl From<&'static [u8]> for Blob {
    fn from(bytes: &'static [u8]) -> Self {
        Self::Static(bytes)
    }
}

/// Copies out of blobs, one read a poll, in the caller's thread.
#[derive(Debug)]
pub struct MemorySource {
    blobs: Vec<(Blob, Arc<Path>)>,
    waiting: Waiting,
}

impl MemorySource {
    /// Files are the blobs in this order, called `memory:0`, `memory:1`, ...
    pub fn new<B: Into<Blob>>(blobs: impl IntoIterator<Item = B>) -> Self {
        let named = |(i, blob): (usize, B)| (blob.into(), Path::new(&format!("memory:{i}")).into());
        Self {
            blobs: blobs.into_iter().enumerate().map(named).collect(),
            waiting: Waiting::default(),
        }
    }
}

/// Reads in order for the sources that read when they are polled.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    demand: VecDeque<Read>,
    idle: VecDeque<Read>,
}

impl Waiting {
    pub(super) fn reserve(&mut self, reads: usize) {
        self.demand.reserve(reads.saturating_sub(self.demand.len()));
        self.idle.reserve(reads.saturating_sub(self.idle.len()));
    }
    pub(super) fn push(&mut self, read: Read) {
        match read.priority {
            super::Priority::Demand => self.demand.push_back(read),
            super::Priority::Idle => self.idle.push_back(read),
        }
    }
    pub(super) fn pop(&mut self) -> Option<Read> {
        self.demand.pop_front().or_else(|| self.idle.pop_front())
    }
    fn take(queue: &mut VecDeque<Read>, id: u64) -> Option<Read> {
        let at = queue.iter().position(|read| read.id == id)?;
        queue.remove(at)
    }
    pub(super) fn cancel(&mut self, id: u64) -> bool {
        Self::take(&mut self.idle, id).or_else(|| Self::take(&mut self.demand, id)).is_some()
    }
    pub(super) fn promote(&mut self, id: u64) {
        if let Some(mut read) = Self::take(&mut self.idle, id) {
            read.priority = super::Priority::Demand;
            self.demand.push_back(read);
        }
    }
}

impl BlockSource for MemorySource {
    fn name(&self) -> &'static str {
        "memory"
    }
    fn files(&self) -> u32 {
        self.blobs.len() as u32
    }
    fn file_len(&self, file: u32) -> u64 {
        self.blobs[file as usize].0.bytes().len() as u64
    }
    fn path(&self, file: u32) -> &Arc<Path> {
        &self.blobs[file as usize].1
    }
    fn buffer_bytes(&self) -> usize {
        0
    }
    fn reserve(&mut self, reads: usize) {
        self.waiting.reserve(reads);
    }
    fn submit(&mut self, read: Read) {
        self.waiting.push(read);
    }
    fn cancel(&mut self, id: u64) -> bool {
        self.waiting.cancel(id)
    }
    fn promote(&mut self, id: u64) {
        self.waiting.promote(id);
    }
    fn poll(&mut self, _: Option<Duration>) -> Option<Completion> {
        let Read { id, file, offset, len, target, .. } = self.waiting.pop()?;
        let bytes = self.blobs[file as usize].0.bytes();
        let from = bytes.get(offset as usize..).unwrap_or_default();
        let got = from.len().min(len as usize);
        if (got as u64) < len {
            let got = got as u64;
            let failure = ReadFailure { file, offset, wanted: len, got, errno: None };
            return Some(Completion { id, result: Err(failure) });
        }
        target.write(0, &from[..got]);
        Some(Completion { id, result: Ok(len) })
    }
}
