//! Reads that wait and reads under way, cut into pieces that the system takes at once.
//!
//! Shared by the sources that run several pieces at a time; no I/O here.

use super::{BLOCK, Completion, Priority, Read, ReadFailure};
use crate::memory::Target;
use std::collections::VecDeque;

/// How reads are cut.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    /// Direct reads: everything in whole blocks.
    pub(crate) direct: bool,
    /// Longest piece that goes straight to its target.
    pub(crate) split_bytes: u64,
    /// Length of a bounce buffer.
    pub(crate) bounce_bytes: u64,
}

/// What one call of the system reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// Where the call begins; a whole block for direct reads.
    pub(crate) offset: u64,
    /// Bytes the call asks for; whole blocks for direct reads.
    pub(crate) len: u64,
    /// Bytes before the first wanted one.
    pub(crate) lead: u64,
    /// Wanted bytes.
    pub(crate) useful: u64,
    /// Whether it goes through a bounce buffer.
    pub(crate) bounce: bool,
}

impl Cut {
    /// The first piece of `len` bytes at `offset` for `target`.
    pub(crate) fn span(&self, offset: u64, len: u64, target: &Target) -> Span {
        let address = target.host().map(|start| start as u64);
        if !self.direct {
            let bounce = address.is_none();
            let most = if bounce { self.bounce_bytes } else { self.split_bytes };
            let len = len.min(most);
            return Span { offset, len, lead: 0, useful: len, bounce };
        }
        let aligned = |x: u64| x.is_multiple_of(BLOCK);
        if aligned(offset) && address.is_some_and(aligned) {
            let most = self.split_bytes / BLOCK * BLOCK;
            let whole = len.next_multiple_of(BLOCK);
            // The last block may bring bytes past the wanted ones, where the target has room.
            if whole <= most && whole <= target.room() as u64 {
                return Span { offset, len: whole, lead: 0, useful: len, bounce: false };
            }
            let part = len.min(most) / BLOCK * BLOCK;
            if part > 0 {
                return Span { offset, len: part, lead: 0, useful: part, bounce: false };
            }
        }
        let start = offset / BLOCK * BLOCK;
        let end = (offset + len).next_multiple_of(BLOCK).min(start + self.bounce_bytes);
        let useful = end.min(offset + len) - offset;
        Span { offset: start, len: end - start, lead: offset - start, useful, bounce: true }
    }
}

/// A piece to run: `span` of `file`, to `at` in `target`.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) job: u32,
    pub(crate) file: u32,
    pub(crate) span: Span,
    /// Starts where the piece's first wanted byte goes.
    pub(crate) target: Target,
}

impl Piece {
    pub(crate) fn failure(&self, got: u64, errno: Option<i32>) -> ReadFailure {
        let Span { offset, lead, useful, .. } = self.span;
        let got = got.saturating_sub(lead).min(useful);
        ReadFailure { file: self.file, offset: offset + lead, wanted: useful, got, errno }
    }
}

#[derive(Debug)]
struct Job {
    read: Read,
    /// Bytes cut off so far.
    cut: u64,
    /// Pieces under way.
    running: u32,
    failed: Option<ReadFailure>,
}

/// The queue. Pieces of a read may run at once; it completes with its last one.
#[derive(Debug)]
pub(crate) struct ReadQueue {
    cut: Cut,
    jobs: Vec<Option<Job>>,
    free: Vec<u32>,
    /// Reads with something left to cut, in order.
    demand: VecDeque<u32>,
    idle: VecDeque<u32>,
    /// Idle pieces under way, and their bound: the rest of the depth stays free for a demand.
    idle_running: u32,
    idle_most: u32,
    done: VecDeque<Completion>,
}

impl ReadQueue {
    pub(crate) fn new(cut: Cut, depth: u32) -> Self {
        Self {
            cut,
            jobs: Vec::new(),
            free: Vec::new(),
            demand: VecDeque::new(),
            idle: VecDeque::new(),
            idle_running: 0,
            idle_most: (depth / 2).max(1),
            done: VecDeque::new(),
        }
    }

    pub(crate) fn reserve(&mut self, reads: usize) {
        self.jobs.reserve(reads.saturating_sub(self.jobs.len()));
        self.free.reserve(reads.saturating_sub(self.free.len()));
        self.demand.reserve(reads.saturating_sub(self.demand.len()));
        self.idle.reserve(reads.saturating_sub(self.idle.len()));
        self.done.reserve(reads.saturating_sub(self.done.len()));
    }

    pub(crate) fn push(&mut self, read: Read) {
        assert!(
            read.len > 0 && read.len <= read.target.room() as u64,
            "`{}` bytes into a target of `{}`",
            read.len,
            read.target.room()
        );
        let priority = read.priority;
        let job = Some(Job { read, cut: 0, running: 0, failed: None });
        let index = self.free.pop().unwrap_or_else(|| {
            self.jobs.push(None);
            self.jobs.len() as u32 - 1
        });
        self.jobs[index as usize] = job;
        match priority {
            Priority::Demand => self.demand.push_back(index),
            Priority::Idle => self.idle.push_back(index),
        }
    }

    fn job(&mut self, index: u32) -> &mut Job {
        self.jobs[index as usize].as_mut().expect("queued and running reads have a job")
    }

    /// The next piece to run. `bounce` says whether a bounce buffer is free; when the next one
    /// needs it and none is, nothing runs (later reads do not overtake).
    pub(crate) fn next(&mut self, bounce: bool) -> Option<Piece> {
        let idle = self.demand.is_empty();
        if idle && self.idle_running >= self.idle_most {
            return None;
        }
        let index = *if idle { self.idle.front()? } else { self.demand.front()? };
        let cut = self.cut;
        let job = self.job(index);
        let target = job.read.target.skip(job.cut as usize);
        let span = cut.span(job.read.offset + job.cut, job.read.len - job.cut, &target);
        if span.bounce && !bounce {
            return None;
        }
        job.cut += span.useful;
        job.running += 1;
        let (file, whole) = (job.read.file, job.cut == job.read.len);
        if whole {
            let queue = if idle { &mut self.idle } else { &mut self.demand };
            queue.pop_front();
        }
        self.idle_running += u32::from(idle);
        // Idle pieces are recognised at their end by the read's priority; a promotion in between
        // moves the count there.
        Some(Piece { job: index, file, span, target })
    }

    /// A piece is over.
    pub(crate) fn finish(&mut self, job: u32, result: Result<(), ReadFailure>) {
        let entry = self.job(job);
        entry.running -= 1;
        let idle = entry.read.priority == Priority::Idle;
        if let Err(failure) = result {
            entry.failed.get_or_insert(failure);
        }
        let failed = entry.failed.is_some();
        let over = entry.running == 0 && (failed || entry.cut == entry.read.len);
        self.idle_running -= u32::from(idle);
        if failed {
            // The rest of it is not worth reading.
            self.demand.retain(|&queued| queued != job);
            self.idle.retain(|&queued| queued != job);
        }
        if over {
            let Job { read, failed, .. } =
                self.jobs[job as usize].take().expect("a finished piece has a job");
            self.free.push(job);
            let result = failed.map_or(Ok(read.len), Err);
            self.done.push_back(Completion { id: read.id, result });
        }
    }

    pub(crate) fn cancel(&mut self, id: u64) -> bool {
        let jobs = &self.jobs;
        let is = |&index: &u32| {
            let job = jobs[index as usize].as_ref();
            job.is_some_and(|job| job.read.id == id && job.cut == 0)
        };
        for queue in [&mut self.idle, &mut self.demand] {
            if let Some(at) = queue.iter().position(is) {
                let index = queue.remove(at).expect("found above");
                self.jobs[index as usize] = None;
                self.free.push(index);
                return true;
            }
        }
        false
    }

    pub(crate) fn promote(&mut self, id: u64) {
        let is = |job: &Job| job.read.id == id && job.read.priority == Priority::Idle;
        let found = self.jobs.iter().position(|job| job.as_ref().is_some_and(is));
        let Some(index) = found.map(|index| index as u32) else { return };
        let job = self.job(index);
        job.read.priority = Priority::Demand;
        let running = job.running;
        self.idle_running -= running;
        if let Some(at) = self.idle.iter().position(|&queued| queued == index) {
            self.idle.remove(at);
            self.demand.push_back(index);
        }
    }

    pub(crate) fn take_done(&mut self) -> Option<Completion> {
        self.done.pop_front()
    }

    /// Forgets what has not started. For drop.
    pub(crate) fn clear(&mut self) {
        self.demand.clear();
        self.idle.clear();
    }
}
