//! Asynchronous reads of byte ranges into slots.

mod fault;
mod file;
mod memory;
mod mmap;
mod pread;
mod queue;
#[cfg(target_os = "linux")]
mod uring;

pub use fault::{Fault, FaultCounts, FaultKind, FaultRates, FaultSource, FaultWhen};
pub use memory::{Blob, MemorySource};
pub use mmap::MmapSource;
pub use pread::PreadSource;
#[cfg(target_os = "linux")]
pub use uring::UringSource;

use crate::error::StoreError;
pub use crate::memory::Target;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// What file offsets, lengths and addresses of direct reads are rounded to. Every file system
/// and device that Linux reads directly is content with a page.
pub(crate) const BLOCK: u64 = 4096;

/// Who waits for a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// Somebody does: before all idle reads, first come first served.
    Demand,
    /// Nobody yet: only when no demand is queued.
    Idle,
}

/// One read of one contiguous range.
#[derive(Clone, Debug)]
pub struct Read {
    /// The caller's number for it, unique among the reads under way.
    pub id: u64,
    /// Index of the file.
    pub file: u32,
    /// Where to begin.
    pub offset: u64,
    /// Bytes wanted, at least 1.
    pub len: u64,
    /// Where they go; `room` at least `len`.
    pub target: Target,
    /// Urgency.
    pub priority: Priority,
}

/// A read that is over: the source touches its target no more.
#[derive(Clone, Debug)]
pub struct Completion {
    /// [`Read::id`].
    pub id: u64,
    /// Bytes that are in the target, from its start. Fewer than were asked for means that the rest
    /// has to be asked for again; none, that the file ends there.
    pub result: Result<u64, ReadFailure>,
}

/// Why a read failed, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadFailure {
    /// Index of the file.
    pub file: u32,
    /// Where the failing piece begins.
    pub offset: u64,
    /// Bytes wanted there.
    pub wanted: u64,
    /// Bytes that came.
    pub got: u64,
    /// The system's error number; `None` with `got < wanted` is a file that ended.
    pub errno: Option<i32>,
}

/// Reads byte ranges of a list of files into slots, asynchronously.
///
/// 1. Every submitted read comes back from [`poll`](Self::poll) exactly once, unless
///    [`cancel`](Self::cancel) returned true for it.
/// 2. Until then its target belongs to the source, afterwards not: a source never writes late.
///    That holds across its drop too, which waits for what is under way, and if that does not
///    come back, leaves the memory (of which each target owns a share) allocated for ever.
/// 3. Demand reads start in the order of submission, before any idle one.
/// 4. Nothing allocates once queues have reached their greatest length.
pub trait BlockSource: std::fmt::Debug {
    /// Its kind in a word, for people: `uring`, `pread direct`, ...
    fn name(&self) -> &'static str;
    /// File count.
    fn files(&self) -> u32;
    /// Length of a file when it was opened, in bytes.
    fn file_len(&self, file: u32) -> u64;
    /// What to call a file in messages.
    fn path(&self, file: u32) -> &Arc<Path>;
    /// Bytes of memory that it holds besides the slots (bounce buffers), all told, for the memory
    /// plan; fixed since it was opened.
    fn buffer_bytes(&self) -> usize;
    /// Makes room for so many reads under way, so that none of them allocates.
    fn reserve(&mut self, reads: usize) {
        let _ = reads;
    }
    /// Begins a read; returns at once.
    fn submit(&mut self, read: Read);
    /// Takes back a read that has not started. False if it has, or is not known: it will come back
    /// from `poll` as if nothing had been said.
    fn cancel(&mut self, id: u64) -> bool;
    /// Makes an idle read a demand: behind those that wait, before all idle ones.
    fn promote(&mut self, id: u64);
    /// A read that is over, in the order in which they ended. With `wait`, waits for one about so
    /// long (or less: `None` does not mean that the time is up).
    fn poll(&mut self, wait: Option<Duration>) -> Option<Completion>;
}

/// How files are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReadMode {
    /// Direct where the file system permits it for all files, else buffered.
    #[default]
    Auto,
    /// Past the page cache, or an error.
    Direct,
    /// Through the page cache, which is told to forget each range once it is read.
    Buffered,
}

/// Options of the sources that read files.
#[derive(Clone, Debug)]
pub struct SourceOptions {
    /// Past the page cache or not.
    pub mode: ReadMode,
    /// Threads of [`PreadSource`]: the reads that run at once.
    pub threads: u32,
    /// Reads that run at once in the kernel for `UringSource`.
    pub depth: u32,
    /// Longest single read of the system; longer ones are split, and their parts run at once.
    pub split_bytes: u32,
    /// Length of a bounce buffer, rounded up to 4096. What is not aligned is read in windows of
    /// this length and copied.
    pub bounce_bytes: u32,
    /// Bounce buffers of `UringSource` ([`PreadSource`] has one a thread).
    pub bounces: u32,
}

impl Default for SourceOptions {
    fn default() -> Self {
        Self {
            mode: ReadMode::Auto,
            threads: 2,
            depth: 16,
            split_bytes: 1 << 20,
            bounce_bytes: 1 << 20,
            bounces: 4,
        }
    }
}

impl SourceOptions {
    /// Bounce memory that a [`PreadSource`] with these options will hold.
    pub fn pread_buffer_bytes(&self) -> usize {
        self.threads as usize * self.bounce_len()
    }
    /// Bounce memory that a `UringSource` with these options will hold.
    pub fn uring_buffer_bytes(&self) -> usize {
        self.bounces as usize * self.bounce_len()
    }
    pub(crate) fn bounce_len(&self) -> usize {
        (self.bounce_bytes as usize).next_multiple_of(BLOCK as usize)
    }
    pub(crate) fn check(&self) -> Result<(), StoreError> {
        let least = |option, got: u32, least: u64| {
            let got = u64::from(got);
            if got < least {
                return Err(StoreError::OptionTooSmall { option, got, least });
            }
            Ok(())
        };
        least("threads", self.threads, 1)?;
        least("depth", self.depth, 1)?;
        least("bounces", self.bounces, 1)?;
        // Two blocks: the narrowest window that holds an unaligned piece and moves on.
        least("bounce_bytes", self.bounce_bytes, 2 * BLOCK)?;
        least("split_bytes", self.split_bytes, 2 * BLOCK)
    }
}
