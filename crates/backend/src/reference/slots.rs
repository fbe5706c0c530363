//! Slot memory of the reference: the only place where it needs `unsafe`, because a store writes
//! through [`Slab::host`] while other slots are read.
#![allow(unsafe_code)]

use crate::verbs::{HostRecords, Slab};
use std::cell::UnsafeCell;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Alignment of slots, for direct reads.
const ALIGNMENT: usize = 4096;

/// Slots in host memory, or records that lie elsewhere.
#[derive(Clone, Debug)]
pub struct HostSlab(Memory);

#[derive(Clone, Debug)]
enum Memory {
    Own(Arc<Slots>),
    Adopted(Arc<dyn HostRecords>),
}

/// Invariants: 1. `memory` holds `count * slot_bytes` bytes from `first` on; 2. whoever reads or
/// writes a slot holds its pin, or is the only one who knows it.
struct Slots {
    memory: Box<[UnsafeCell<u8>]>,
    first: usize,
    slot_bytes: usize,
    count: u32,
}

// SAFETY: bytes are reached through `at` alone, and invariant 2 keeps accesses of one slot apart,
// as the contract of `Slab::host` and `Slab::upload` demands of every caller.
unsafe impl Sync for Slots {}

impl fmt::Debug for Slots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slots({} of {} bytes)", self.count, self.slot_bytes)
    }
}

impl Slots {
    fn at(&self, slot: u32, offset: usize, len: usize) -> *mut u8 {
        assert!(slot < self.count, "slot {slot} of {}", self.count);
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.slot_bytes);
        assert!(fits, "{len} bytes at {offset} of a slot of {} bytes", self.slot_bytes);
        let at = self.first + slot as usize * self.slot_bytes + offset;
        // From the whole slice, so that the pointer may reach all of it.
        UnsafeCell::raw_get(self.memory.as_ptr()).wrapping_add(at)
    }
}

impl HostSlab {
    /// Own slots, filled with 0xFF.
    ///
    /// # Panics
    /// If `slot_bytes` is not a multiple of 4096.
    pub(super) fn new(slot_bytes: usize, slots: u32) -> Self {
        assert!(
            slot_bytes.is_multiple_of(ALIGNMENT),
            "slots of {slot_bytes} bytes are not a multiple of {ALIGNMENT}"
        );
        let bytes = slot_bytes * slots as usize + ALIGNMENT;
        let memory: Box<[_]> = (0..bytes).map(|_| UnsafeCell::new(0xFF)).collect();
        let first = memory.as_ptr().addr().wrapping_neg() % ALIGNMENT;
        Self(Memory::Own(Arc::new(Slots { memory, first, slot_bytes, count: slots })))
    }

    /// Records used where they lie.
    pub(super) fn adopt(records: Arc<dyn HostRecords>) -> Self {
        Self(Memory::Adopted(records))
    }

    /// Some bytes of a record.
    pub(super) fn bytes(&self, slot: u32, range: Range<usize>) -> Vec<u8> {
        match &self.0 {
            Memory::Own(slots) => {
                let from = slots.at(slot, range.start, range.len());
                let mut copy = vec![0; range.len()];
                // SAFETY: `at` checked that the source lies in the slot; the destination is new.
                // The caller's pin keeps writers off (invariant 2).
                unsafe { from.copy_to_nonoverlapping(copy.as_mut_ptr(), range.len()) };
                copy
            }
            Memory::Adopted(_) if range.is_empty() => Vec::new(),
            Memory::Adopted(records) => records.bytes(slot, range).to_vec(),
        }
    }
}

impl Slab for HostSlab {
    fn slots(&self) -> u32 {
        match &self.0 {
            Memory::Own(slots) => slots.count,
            Memory::Adopted(records) => records.records(),
        }
    }

    /// 0 where the records were adopted: nobody may write to them.
    fn slot_bytes(&self) -> usize {
        match &self.0 {
            Memory::Own(slots) => slots.slot_bytes,
            Memory::Adopted(_) => 0,
        }
    }

    fn host(&self, slot: u32) -> Option<*mut u8> {
        match &self.0 {
            Memory::Own(slots) => Some(slots.at(slot, 0, slots.slot_bytes)),
            Memory::Adopted(_) => None,
        }
    }

    /// # Panics
    /// Outside the slot, or where the records were adopted.
    fn upload(&self, slot: u32, offset: usize, bytes: &[u8]) {
        let Memory::Own(slots) = &self.0 else { panic!("upload into adopted records") };
        let to = slots.at(slot, offset, bytes.len());
        // SAFETY: `at` checked that the destination lies in the slot; `bytes` cannot, because a
        // slice of slot memory is never made. Invariant 2 keeps readers off.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_aligned_apart_and_poisoned() {
        let slab = HostSlab::new(8192, 3);
        let at: Vec<usize> = (0..3).map(|s| slab.host(s).expect("host memory").addr()).collect();
        assert!(at.iter().all(|at| at.is_multiple_of(ALIGNMENT)), "{at:?}");
        assert_eq!((at[1] - at[0], at[2] - at[1]), (8192, 8192));
        assert_eq!(slab.bytes(2, 0..8192), [0xFF; 8192]);
        assert_eq!((slab.slots(), slab.slot_bytes()), (3, 8192));
    }

    #[test]
    fn the_pointer_and_upload_reach_the_same_bytes() {
        let slab = HostSlab::new(4096, 2);
        slab.upload(1, 10, &[1, 2, 3, 4]);
        let host = slab.host(1).expect("host memory");
        // SAFETY: the slot has 4096 bytes and nobody else knows it.
        unsafe { host.add(11).write(7) };
        assert_eq!(slab.bytes(1, 8..14), [0xFF, 0xFF, 1, 7, 3, 4]);
        assert_eq!(slab.bytes(0, 0..4096), [0xFF; 4096]);
    }

    #[test]
    #[should_panic(expected = "4 bytes at 4094 of a slot of 4096 bytes")]
    fn writes_stay_in_their_slot() {
        HostSlab::new(4096, 2).upload(0, 4094, &[0; 4]);
    }
}
