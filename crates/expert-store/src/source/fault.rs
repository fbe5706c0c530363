//! A source that goes wrong on purpose.

use super::{BlockSource, Completion, Priority, Read, ReadFailure, Target};
use crate::rng::Rng;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// What goes wrong with a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FaultKind {
    /// Only so many bytes come, at least one; the rest has to be asked for again.
    ShortRead {
        /// How many.
        got: u64,
    },
    /// It fails with this number (5 is EIO).
    Errno(i32),
    /// The file ends before it.
    Truncated,
    /// It starts only after so many polls, and then writes late. `u64::MAX` for never.
    Stall {
        /// How many.
        polls: u64,
    },
    /// It is reported only after so many polls.
    Late {
        /// How many.
        polls: u64,
    },
    /// One bit of what came is wrong, counted from its start, modulo its length. In memory that the
    /// host can address only.
    BitFlip {
        /// Which.
        bit: u64,
    },
}

/// Which reads go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FaultWhen {
    /// The one of this number, counted from 0 in the order of submission.
    Nth(u64),
    /// Those that cover this byte.
    Covers {
        /// Of this file.
        file: u32,
        /// At this offset.
        offset: u64,
    },
    /// Speculative ones.
    Idle,
    /// All.
    Always,
}

/// One line of a script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Which reads.
    pub when: FaultWhen,
    /// What.
    pub kind: FaultKind,
    /// How many of them, the first ones.
    pub times: u64,
}

/// How often reads go wrong by chance. **Units**: of 1,000 reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultRates {
    /// Short reads.
    pub short: u32,
    /// EIO.
    pub errno: u32,
    /// Ends of file.
    pub truncated: u32,
    /// Stalls of `polls_max` polls.
    pub stall: u32,
    /// Late reports, up to `polls_max` polls late.
    pub late: u32,
    /// Bit flips.
    pub bit_flip: u32,
    /// See `stall` and `late`.
    pub polls_max: u64,
    /// Reads that are over are reported in any order.
    pub reorder: bool,
}

/// What a [`FaultSource`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultCounts {
    /// Reads submitted.
    pub reads: u64,
    /// Reads that went wrong.
    pub faults: u64,
    /// Reads taken back.
    pub cancelled: u64,
}

/// Wraps a source and injects faults, by script, by chance from a seed, or both (the script comes
/// first). Rule 3 of [`BlockSource`] does not hold where reads stall.
#[derive(Debug)]
pub struct FaultSource<S> {
    inner: S,
    script: Vec<Fault>,
    rates: FaultRates,
    rng: Rng,
    /// Polls so far.
    tick: u64,
    counts: FaultCounts,
    /// Reads that the inner source has not got yet.
    stalled: Vec<(u64, Read)>,
    /// Of reads that it has.
    plans: Vec<(u64, Plan)>,
    inner_has: usize,
    /// Reads that are over, and from when on that may be told.
    over: Vec<(u64, Completion)>,
}

#[derive(Debug)]
enum Plan {
    Late(u64),
    Flip(Target, u64),
}

impl<S: BlockSource> FaultSource<S> {
    /// Without faults.
    pub fn new(inner: S) -> Self {
        Self {
            inner,
            script: Vec::new(),
            rates: FaultRates::default(),
            rng: Rng::new(0),
            tick: 0,
            counts: FaultCounts::default(),
            stalled: Vec::new(),
            plans: Vec::new(),
            inner_has: 0,
            over: Vec::new(),
        }
    }
    /// With a script; of several lines that match a read, the first.
    #[must_use]
    pub fn with_script(mut self, script: impl IntoIterator<Item = Fault>) -> Self {
        self.script = script.into_iter().collect();
        self
    }
    /// With faults by chance, the same for the same seed and the same reads.
    #[must_use]
    pub fn with_rates(mut self, seed: u64, rates: FaultRates) -> Self {
        (self.rng, self.rates) = (Rng::new(seed), rates);
        self
    }
    /// What it did.
    pub fn counts(&self) -> FaultCounts {
        self.counts
    }

    fn choose(&mut self, read: &Read) -> Option<FaultKind> {
        let number = self.counts.reads;
        let covered = read.offset..read.offset + read.len;
        let matches = |fault: &&mut Fault| {
            fault.times > 0
                && match fault.when {
                    FaultWhen::Nth(n) => n == number,
                    FaultWhen::Covers { file, offset } => {
                        file == read.file && covered.contains(&offset)
                    }
                    FaultWhen::Idle => read.priority == Priority::Idle,
                    FaultWhen::Always => true,
                }
        };
        if let Some(fault) = self.script.iter_mut().find(matches) {
            fault.times -= 1;
            return Some(fault.kind);
        }
        let rates = self.rates;
        let (mut dice, within) = (self.rng.below(1000) as u32, self.rng.next_u64());
        let polls = 1 + within % rates.polls_max.max(1);
        let kinds = [
            (rates.short, FaultKind::ShortRead { got: within % read.len }),
            (rates.errno, FaultKind::Errno(5)),
            (rates.truncated, FaultKind::Truncated),
            (rates.stall, FaultKind::Stall { polls: rates.polls_max }),
            (rates.late, FaultKind::Late { polls }),
            (rates.bit_flip, FaultKind::BitFlip { bit: within }),
        ];
        for (rate, kind) in kinds {
            if dice < rate {
                return Some(kind);
            }
            dice -= rate;
        }
        None
    }

    fn fail(&mut self, read: &Read, errno: Option<i32>) {
        let &Read { id, file, offset, len: wanted, .. } = read;
        let failure = ReadFailure { file, offset, wanted, got: 0, errno };
        self.over.push((self.tick, Completion { id, result: Err(failure) }));
    }

    fn pass_on(&mut self, read: Read) {
        self.inner_has += 1;
        self.inner.submit(read);
    }

    /// A read came back from the inner source.
    fn receive(&mut self, completion: Completion) {
        self.inner_has -= 1;
        let mut due = self.tick;
        while let Some(at) = self.plans.iter().position(|(id, _)| *id == completion.id) {
            match self.plans.swap_remove(at).1 {
                Plan::Late(polls) => due = self.tick + polls,
                Plan::Flip(target, bit) => {
                    let got = completion.result.as_ref().copied().unwrap_or(0);
                    if got > 0 {
                        let bit = bit % (8 * got);
                        target.with_host((bit / 8) as usize, 1, |byte| byte[0] ^= 1 << (bit % 8));
                    }
                }
            }
        }
        self.over.push((due, completion));
    }

    /// One of the reads that are over and may be told.
    fn tell(&mut self) -> Option<Completion> {
        let due = |(at, _): &(u64, Completion)| *at <= self.tick;
        let n = self.over.iter().filter(|over| due(over)).count() as u64;
        if n == 0 {
            return None;
        }
        let chosen = if self.rates.reorder { self.rng.below(n) } else { 0 } as usize;
        let tick = self.tick;
        let mut told = (0..self.over.len()).filter(|&i| self.over[i].0 <= tick);
        let at = told.nth(chosen).expect("counted above");
        Some(self.over.remove(at).1)
    }
}

impl<S: BlockSource> BlockSource for FaultSource<S> {
    fn name(&self) -> &'static str {
        self.inner.name()
    }
    fn files(&self) -> u32 {
        self.inner.files()
    }
    fn file_len(&self, file: u32) -> u64 {
        self.inner.file_len(file)
    }
    fn path(&self, file: u32) -> &Arc<Path> {
        self.inner.path(file)
    }
    fn buffer_bytes(&self) -> usize {
        self.inner.buffer_bytes()
    }
    fn reserve(&mut self, reads: usize) {
        self.inner.reserve(reads);
    }
    fn submit(&mut self, mut read: Read) {
        let fault = self.choose(&read);
        self.counts.reads += 1;
        self.counts.faults += u64::from(fault.is_some());
        match fault {
            None => {}
            Some(FaultKind::ShortRead { got }) => read.len = got.clamp(1, read.len),
            Some(FaultKind::Errno(errno)) => return self.fail(&read, Some(errno)),
            Some(FaultKind::Truncated) => return self.fail(&read, None),
            Some(FaultKind::Stall { polls }) => {
                self.stalled.push((self.tick.saturating_add(polls), read));
                return;
            }
            Some(FaultKind::Late { polls }) => self.plans.push((read.id, Plan::Late(polls))),
            Some(FaultKind::BitFlip { bit }) => {
                self.plans.push((read.id, Plan::Flip(read.target.clone(), bit)));
            }
        }
        self.pass_on(read);
    }
    fn cancel(&mut self, id: u64) -> bool {
        // A stalled read counts as started.
        let cancelled = self.inner.cancel(id);
        if cancelled {
            self.plans.retain(|(planned, _)| *planned != id);
            self.inner_has -= 1;
            self.counts.cancelled += 1;
        }
        cancelled
    }
    fn promote(&mut self, id: u64) {
        self.inner.promote(id);
        for (_, read) in &mut self.stalled {
            if read.id == id {
                read.priority = Priority::Demand;
            }
        }
    }
    fn poll(&mut self, wait: Option<Duration>) -> Option<Completion> {
        self.tick += 1;
        while let Some(at) = self.stalled.iter().position(|(due, _)| *due <= self.tick) {
            let (_, read) = self.stalled.remove(at);
            self.pass_on(read);
        }
        while let Some(completion) = self.inner.poll(None) {
            self.receive(completion);
        }
        let told = self.tell();
        let (None, Some(wait)) = (&told, wait) else { return told };
        // What is held back comes by polls, not by time.
        let wait = wait.min(Duration::from_micros(100));
        if self.inner_has == 0 {
            std::thread::sleep(wait);
        } else if let Some(completion) = self.inner.poll(Some(wait)) {
            self.receive(completion);
        }
        self.tell()
    }
}
