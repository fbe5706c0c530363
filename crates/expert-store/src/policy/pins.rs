//! Pins: counted tokens that any thread can drop without a lock.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

const NONE: u32 = u32::MAX;

/// Counts by slot, and a stack of the slots whose count fell to zero.
///
/// The stack is what spares the policy a scan: it learns which slots were let go from those slots
/// alone. Invariants: 1. only the policy takes a count from 0 to 1; 2. a slot is on the stack at
/// most once (`queued`); 3. the stack is emptied as a whole, so its links never change under a
/// reader; 4. a count that falls to zero after its slot was taken off the stack puts it back.
#[derive(Debug)]
pub(crate) struct PinTable {
    counts: Box<[AtomicU32]>,
    queued: Box<[AtomicBool]>,
    next: Box<[AtomicU32]>,
    head: AtomicU32,
}

impl PinTable {
    pub(crate) fn new(slots: u32) -> Arc<Self> {
        let each = || 0..slots;
        Arc::new(Self {
            counts: each().map(|_| AtomicU32::new(0)).collect(),
            queued: each().map(|_| AtomicBool::new(false)).collect(),
            next: each().map(|_| AtomicU32::new(NONE)).collect(),
            head: AtomicU32::new(NONE),
        })
    }

    /// A pin of the slot; for the policy only.
    pub(crate) fn pin(self: &Arc<Self>, slot: u32) -> Pin {
        self.add(slot);
        Pin { table: Arc::clone(self), slot }
    }

    fn add(&self, slot: u32) {
        // Whoever adds either holds a pin or is the policy; nothing is published by it.
        let before = self.counts[slot as usize].fetch_add(1, Ordering::Relaxed);
        assert!(before < NONE / 2, "slot `{slot}` pinned `{before}` times");
    }

    fn drop_one(&self, slot: u32) {
        let index = slot as usize;
        // Release: what the holder read from the slot is read before anyone overwrites it.
        if self.counts[index].fetch_sub(1, Ordering::AcqRel) != 1 {
            return;
        }
        if self.queued[index].swap(true, Ordering::AcqRel) {
            // Still on the stack (invariant 2): whoever takes it off looks at the count after
            // clearing `queued`, and so sees this zero.
            return;
        }
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            self.next[index].store(head, Ordering::Relaxed);
            let swap =
                self.head.compare_exchange_weak(head, slot, Ordering::Release, Ordering::Relaxed);
            match swap {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Whether nobody holds the slot. True stays true until the policy pins it.
    pub(crate) fn is_free(&self, slot: u32) -> bool {
        self.count(slot) == 0
    }

    pub(crate) fn count(&self, slot: u32) -> u32 {
        self.counts[slot as usize].load(Ordering::Acquire)
    }

    /// Takes the whole stack; walk it with [`Self::release`].
    pub(crate) fn take_released(&self) -> u32 {
        if self.head.load(Ordering::Relaxed) == NONE {
            return NONE;
        }
        self.head.swap(NONE, Ordering::Acquire)
    }

    /// One step of the walk: the slot at `at` and where to go on. The slot may be pinned again.
    pub(crate) fn release(&self, at: u32) -> Option<(u32, u32)> {
        if at == NONE {
            return None;
        }
        let next = self.next[at as usize].load(Ordering::Relaxed);
        // After `next` was read: from here on the slot may be pushed again.
        self.queued[at as usize].swap(false, Ordering::AcqRel);
        Some((at, next))
    }
}

/// Keeps a slot's bytes where they are while any clone lives.
///
/// Cloning and dropping are a few atomic operations, without lock or allocation, on any thread.
pub struct Pin {
    table: Arc<PinTable>,
    slot: u32,
}

impl Pin {
    /// The slot it holds.
    pub fn slot(&self) -> u32 {
        self.slot
    }
    pub(crate) fn is_of(&self, table: &Arc<PinTable>) -> bool {
        Arc::ptr_eq(&self.table, table)
    }
}

impl Pin {
    /// Gives up the token but not the pin, which [`Pins::unpin`] drops: for a holder that can keep
    /// a slot number but not this type.
    pub fn leak(self) -> u32 {
        self.table.add(self.slot);
        self.slot
    }
}

/// Drops pins that were leaked, on any thread.
#[derive(Clone, Debug)]
pub struct Pins(Arc<PinTable>);

impl Pins {
    pub(crate) fn new(table: &Arc<PinTable>) -> Self {
        Self(Arc::clone(table))
    }

    /// Drops one pin of `slot` that [`Pin::leak`] left.
    ///
    /// # Panics
    /// If no pin of the slot is held.
    pub fn unpin(&self, slot: u32) {
        assert!(self.0.count(slot) > 0, "slot `{slot}` is not pinned");
        self.0.drop_one(slot);
    }
}

impl Clone for Pin {
    fn clone(&self) -> Self {
        self.table.add(self.slot);
        Self { table: Arc::clone(&self.table), slot: self.slot }
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.table.drop_one(self.slot);
    }
}

impl fmt::Debug for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pin").field(&self.slot).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn released(table: &PinTable) -> Vec<u32> {
        let (mut at, mut slots) = (table.take_released(), Vec::new());
        while let Some((slot, next)) = table.release(at) {
            slots.push(slot);
            at = next;
        }
        slots.sort_unstable();
        slots
    }

    #[test]
    fn last_clone_releases() {
        let table = PinTable::new(3);
        let (a, b) = (table.pin(1), table.pin(2));
        let c = a.clone();
        drop(a);
        assert_eq!(released(&table), []);
        drop((b, c));
        assert_eq!(released(&table), [1, 2]);
        assert_eq!(released(&table), []);
        drop(table.pin(1));
        drop(table.pin(1));
        assert_eq!(released(&table), [1], "once on the stack");
    }

    #[test]
    fn leaked_pins_hold_until_they_are_dropped() {
        let table = PinTable::new(2);
        let pins = Pins::new(&table);
        assert_eq!(table.pin(1).leak(), 1);
        assert_eq!((table.count(1), released(&table)), (1, vec![]));
        pins.unpin(1);
        assert_eq!((table.count(1), released(&table)), (0, vec![1]));
    }

    #[test]
    fn no_release_is_lost_between_threads() {
        let table = PinTable::new(8);
        let mut seen = [0_u32; 8];
        let (send, receive) = std::sync::mpsc::channel::<Pin>();
        let dropper = std::thread::spawn(move || receive.iter().for_each(drop));
        for round in 0..20_000_u32 {
            let slot = round % 8;
            while !table.is_free(slot) {
                std::thread::yield_now();
            }
            send.send(table.pin(slot)).expect("the dropper lives");
            let mut at = table.take_released();
            while let Some((slot, next)) = table.release(at) {
                seen[slot as usize] += u32::from(table.is_free(slot));
                at = next;
            }
        }
        drop(send);
        dropper.join().expect("the dropper does not panic");
        for slot in released(&table) {
            seen[slot as usize] += 1;
        }
        assert!(seen.iter().all(|&n| n > 0), "{seen:?}");
        assert!((0..8).all(|slot| table.is_free(slot)));
    }
}
