//! Reads under way, and the slots that they fill.

use super::Store;
use crate::error::StoreError;
use crate::key::{Extent, Key};
use crate::memory::Target;
use crate::policy::SlotState;
use crate::source::{Completion, Priority, Read, ReadFailure};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// What poison is made of.
static POISON: [u8; 1 << 16] = [0xFF; 1 << 16];

/// A slot being filled.
#[derive(Debug, Default)]
pub(super) struct Fill {
    /// Reads that the source has not given back.
    running: u32,
    /// When it was asked for.
    since: Duration,
    /// Why it failed; stays until the slot is filled anew, for sets that still wait for it.
    pub(super) error: Option<Arc<StoreError>>,
    idle: bool,
    /// Given up after a time-out while reads are still out.
    abandoned: bool,
}

/// One read that the source has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flight {
    slot: u32,
    extent: Extent,
    /// Bytes of the extent that were there before this read.
    done: u64,
    abandoned: bool,
}

/// The reads that the source has.
#[derive(Debug, Default)]
pub(super) struct Flights {
    list: Vec<(u32, Option<Flight>)>,
    free: Vec<u32>,
    len: usize,
    abandoned: usize,
    /// Demand reads in the order of submission; some may be over.
    line: VecDeque<u64>,
    /// When the first in line became it.
    first_since: Duration,
    /// When a read last came back, or the first one went out.
    moved: Duration,
}

impl Flights {
    pub(super) fn len(&self) -> usize {
        self.len
    }
    /// Those of them that nobody waits for any more.
    pub(super) fn abandoned(&self) -> usize {
        self.abandoned
    }

    pub(super) fn reserve(&mut self, reads: usize) {
        self.list.reserve(reads);
        self.free.reserve(reads);
        self.line.reserve(reads);
    }

    fn add(&mut self, flight: Flight, demand: bool, now: Duration) -> u64 {
        if self.len == self.abandoned {
            self.moved = now;
        }
        let index = self.free.pop().unwrap_or_else(|| {
            self.list.push((0, None));
            self.list.len() as u32 - 1
        });
        let entry = &mut self.list[index as usize];
        entry.0 = entry.0.wrapping_add(1);
        entry.1 = Some(flight);
        self.len += 1;
        self.abandoned += usize::from(flight.abandoned);
        let id = u64::from(entry.0) << 32 | u64::from(index);
        if demand {
            self.stand_in_line(id, now);
        }
        id
    }

    fn stand_in_line(&mut self, id: u64, now: Duration) {
        if self.line.is_empty() {
            self.first_since = now;
        }
        self.line.push_back(id);
    }

    fn get(&self, id: u64) -> Option<&Flight> {
        let (generation, flight) = self.list.get(id as u32 as usize)?;
        flight.as_ref().filter(|_| *generation == (id >> 32) as u32)
    }

    fn take(&mut self, id: u64, now: Duration) -> Flight {
        assert!(self.get(id).is_some(), "the source gave back read `{id:#x}`, which it has not");
        let flight = self.list[id as u32 as usize].1.take().expect("it is there");
        self.free.push(id as u32);
        self.len -= 1;
        self.abandoned -= usize::from(flight.abandoned);
        self.moved = now;
        self.advance_line(now);
        flight
    }

    /// Those at the head that are over, or given up, leave the line.
    fn advance_line(&mut self, now: Duration) {
        while let Some(&id) = self.line.front() {
            if self.get(id).is_some_and(|flight| !flight.abandoned) {
                break;
            }
            self.line.pop_front();
            self.first_since = now;
        }
    }

    /// The read at a place of the list, if there is one.
    fn at(&self, index: usize) -> Option<(u64, Flight)> {
        let (generation, flight) = self.list[index];
        Some((u64::from(generation) << 32 | index as u64, flight?))
    }

    fn abandon(&mut self, slot: u32) {
        for (_, flight) in &mut self.list {
            if let Some(flight) = flight.as_mut().filter(|flight| flight.slot == slot) {
                self.abandoned += usize::from(!flight.abandoned);
                flight.abandoned = true;
            }
        }
    }
}

impl Store {
    /// Submits the reads of a record.
    pub(super) fn begin(&mut self, key: Key, slot: u32, priority: Priority) {
        let now = self.options.clock.now();
        let map = Arc::clone(&self.map);
        let extents = map.extents(key);
        if self.options.poison {
            self.fill_with_poison(slot);
        }
        let idle = priority == Priority::Idle;
        let running = extents.len() as u32;
        self.fills[slot as usize] =
            Fill { running, since: now, error: None, idle, abandoned: false };
        for &extent in extents {
            self.submit(Flight { slot, extent, done: 0, abandoned: false }, extents, priority);
        }
    }

    fn submit(&mut self, flight: Flight, extents: &[Extent], priority: Priority) {
        let now = self.options.clock.now();
        let Flight { slot, extent, done, .. } = flight;
        let id = self.flights.add(flight, priority == Priority::Demand, now);
        // A reader may write past what is wanted, up to the next piece of the record.
        let start = extent.slot_offset + done;
        let later = extents.iter().map(|other| other.slot_offset).filter(|&other| other > start);
        let end = later.min().unwrap_or(self.memory.slot_bytes() as u64);
        let (start, room) = (start as usize, (end - start) as usize);
        let target = Target::new(Arc::clone(&self.memory), slot, start, room);
        self.stats.reads += 1;
        self.source.submit(Read {
            id,
            file: extent.file,
            offset: extent.offset + done,
            len: extent.len - done,
            target,
            priority,
        });
    }

    fn fill_with_poison(&mut self, slot: u32) {
        let slot_bytes = self.memory.slot_bytes();
        let target = Target::new(Arc::clone(&self.memory), slot, 0, slot_bytes);
        let filled = target.with_host(0, slot_bytes, |bytes| bytes.fill(0xFF));
        if filled.is_none() {
            for offset in (0..slot_bytes).step_by(POISON.len()) {
                target.write(offset, &POISON[..POISON.len().min(slot_bytes - offset)]);
            }
        }
    }

    /// A speculative read is asked for now.
    pub(super) fn adopt(&mut self, slot: u32) {
        let now = self.options.clock.now();
        self.fills[slot as usize].idle = false;
        let (source, flights) = (&mut self.source, &mut self.flights);
        for index in 0..flights.list.len() {
            let Some((id, flight)) = flights.at(index) else { continue };
            if flight.slot == slot && !flight.abandoned {
                source.promote(id);
                flights.stand_in_line(id, now);
            }
        }
    }

    /// Takes back the reads of the slots in `idle_expired`, where none of a slot has started.
    pub(super) fn cancel_listed(&mut self) {
        while let Some(slot) = self.idle_expired.pop() {
            let fill = &self.fills[slot as usize];
            let SlotState::Filling(key) = self.policy.state(slot) else { continue };
            if fill.error.is_some() || !fill.idle {
                continue;
            }
            let (now, before) = (self.options.clock.now(), fill.running);
            let mut cancelled = std::mem::take(&mut self.cancelled);
            for index in 0..self.flights.list.len() {
                let Some((id, flight)) = self.flights.at(index) else { continue };
                if flight.slot == slot && self.source.cancel(id) {
                    cancelled.push(self.flights.take(id, now));
                }
            }
            if cancelled.len() as u32 == before {
                self.fills[slot as usize].running = 0;
                self.policy.commit(slot, false);
            } else {
                // Part of it is being read or came already: half a record helps nobody.
                let map = Arc::clone(&self.map);
                for &flight in &cancelled {
                    self.submit(flight, map.extents(key), Priority::Idle);
                }
            }
            cancelled.clear();
            self.cancelled = cancelled;
        }
    }

    /// The source gave a read back.
    pub(super) fn complete(&mut self, completion: Completion) {
        let now = self.options.clock.now();
        let flight = self.flights.take(completion.id, now);
        let Flight { slot, extent, done, .. } = flight;
        let SlotState::Filling(key) = self.policy.state(slot) else {
            panic!("invariant 2: a read ended in slot `{slot}`, which is not being filled")
        };
        let fill = &mut self.fills[slot as usize];
        let wanted = extent.len - done;
        let over = fill.error.is_some() || fill.abandoned;
        match completion.result {
            Ok(got) if got > 0 && got < wanted && !over => {
                let priority = if fill.idle { Priority::Idle } else { Priority::Demand };
                let map = Arc::clone(&self.map);
                let rest = Flight { done: done + got, ..flight };
                self.submit(rest, map.extents(key), priority);
                return;
            }
            Ok(got) => {
                let bytes = if fill.idle {
                    &mut self.stats.idle_bytes
                } else {
                    &mut self.stats.demand_bytes
                };
                *bytes += if got < wanted { 0 } else { extent.len };
                fill.running -= 1;
                if got < wanted && !over {
                    let offset = extent.offset + done;
                    let failure =
                        ReadFailure { file: extent.file, offset, wanted, got, errno: None };
                    self.fail(key, slot, &failure);
                }
            }
            Err(failure) => {
                fill.running -= 1;
                if !over {
                    self.fail(key, slot, &failure);
                }
            }
        }
        if self.fills[slot as usize].running == 0 {
            self.finish(key, slot, now);
        }
    }

    /// All reads into the slot are back.
    fn finish(&mut self, key: Key, slot: u32, now: Duration) {
        let fill = &self.fills[slot as usize];
        let mut complete = fill.error.is_none() && !fill.abandoned;
        if complete && !self.verified(key, slot) {
            let first = self.map.extents(key)[0];
            let path = Arc::clone(self.source.path(first.file));
            self.latch(slot, StoreError::Corrupt { key, path, offset: first.offset });
            complete = false;
        }
        if complete {
            let took = now.saturating_sub(self.fills[slot as usize].since);
            self.stats.read_ns += took.as_nanos() as u64;
        }
        self.policy.commit(slot, complete);
    }

    fn verified(&self, key: Key, slot: u32) -> bool {
        let Some(verify) = &self.options.verify else { return true };
        let ends = self.map.extents(key).iter().map(|extent| extent.slot_offset + extent.len);
        let len = ends.max().unwrap_or(0) as usize;
        let target = Target::new(Arc::clone(&self.memory), slot, 0, len);
        target.with_host(0, len, |bytes| verify(key, bytes)).expect("checked at open")
    }

    fn fail(&mut self, key: Key, slot: u32, failure: &ReadFailure) {
        let &ReadFailure { file, offset, wanted, got, errno } = failure;
        let path = Arc::clone(self.source.path(file));
        let error = match errno {
            None if got < wanted => StoreError::Truncated { key, path, offset, wanted, got },
            errno => StoreError::Read { key, path, offset, wanted, got, errno },
        };
        self.latch(slot, error);
    }

    /// The record in the slot has failed, and with the first such one the store.
    fn latch(&mut self, slot: u32, error: StoreError) {
        let error = Arc::new(error);
        self.stats.failures += 1;
        self.fills[slot as usize].error = Some(Arc::clone(&error));
        self.latched.get_or_insert(error);
    }

    /// Gives up reads that do not come back.
    ///
    /// Demands are served in order, so the first in line is being read, and its time runs from
    /// when it became first. When nothing at all has come back for as long, all are given up.
    pub(super) fn check_timeouts(&mut self) {
        if self.flights.len() == self.flights.abandoned() {
            return;
        }
        let now = self.options.clock.now();
        let timeout = self.options.read_timeout;
        let late = |since: Duration| now.saturating_sub(since) >= timeout;
        if late(self.flights.moved) {
            for index in 0..self.flights.list.len() {
                if let Some((_, flight)) = self.flights.at(index) {
                    self.give_up(flight);
                }
            }
        } else if late(self.flights.first_since)
            && let Some(&id) = self.flights.line.front()
        {
            let flight = *self.flights.get(id).expect("the head of the line is under way");
            self.give_up(flight);
        }
        self.flights.advance_line(now);
    }

    fn give_up(&mut self, flight: Flight) {
        let Flight { slot, extent, done, abandoned } = flight;
        if abandoned {
            return;
        }
        let SlotState::Filling(key) = self.policy.state(slot) else {
            panic!("invariant 2: a read into slot `{slot}`, which is not being filled")
        };
        self.flights.abandon(slot);
        self.fills[slot as usize].abandoned = true;
        if self.fills[slot as usize].error.is_none() {
            let path = Arc::clone(self.source.path(extent.file));
            let (offset, wanted) = (extent.offset + done, extent.len - done);
            let waited_ms = self.options.read_timeout.as_millis() as u64;
            self.latch(slot, StoreError::TimedOut { key, path, offset, wanted, waited_ms });
        }
    }
}
