//! Slots of expert records.
#![allow(unsafe_code)]

use crate::linear::Matrix;
use crate::memory::{Memory, PAGE};
use snowmelt_backend::{ExpertLayout, HostRecords, MatrixLayout, Slab};
use std::fmt;
use std::sync::Arc;

/// Slot memory of [`CpuBackend`](crate::CpuBackend). Cloning clones the handle.
///
/// Its own memory is one lazily touched mapping: a slot costs nothing until it is written.
#[derive(Clone)]
pub struct CpuSlab(Arc<Slots>);

enum Slots {
    Own { memory: Memory, slot_bytes: usize, slots: u32 },
    Adopted(Arc<dyn HostRecords>),
}

impl CpuSlab {
    pub(crate) fn own(slot_bytes: usize, slots: u32, huge_pages: bool, poison: bool) -> Self {
        assert!(slot_bytes.is_multiple_of(PAGE), "slots of {slot_bytes} bytes, not whole pages");
        let mut memory = Memory::paged(slot_bytes * slots as usize, huge_pages);
        if poison {
            memory.poison();
        }
        Self(Arc::new(Slots::Own { memory, slot_bytes, slots }))
    }

    pub(crate) fn adopted(records: Arc<dyn HostRecords>) -> Self {
        Self(Arc::new(Slots::Adopted(records)))
    }

    /// The matrices of the record in a slot.
    pub(crate) fn pieces(&self, slot: u32, layout: &ExpertLayout) -> [Matrix; 3] {
        let pieces = layout.pieces();
        std::array::from_fn(|i| self.piece(slot, i, pieces[i]))
    }

    fn piece(&self, slot: u32, index: usize, layout: &MatrixLayout) -> Matrix {
        let ptr = match &*self.0 {
            Slots::Own { slot_bytes, .. } => {
                let end = layout.offset + layout.bytes();
                assert!(end <= *slot_bytes, "a piece ends at {end} in slots of {slot_bytes} bytes");
                self.at(slot, layout.offset).cast_const()
            }
            Slots::Adopted(records) => {
                let bytes = records.piece(slot, index);
                let (found, wanted) = (bytes.len(), layout.bytes());
                assert!(found >= wanted, "piece {index} has {found} bytes, wanted {wanted}");
                bytes.as_ptr()
            }
        };
        let MatrixLayout { encoding, d_out, d_in, .. } = *layout;
        Matrix { ptr, encoding, d_out, d_in }
    }

    /// A byte of an own slot.
    fn at(&self, slot: u32, offset: usize) -> *mut u8 {
        let Slots::Own { memory, slot_bytes, slots } = &*self.0 else {
            panic!("adopted records cannot be written")
        };
        assert!(slot < *slots, "slot {slot} of {slots}");
        memory.ptr().wrapping_add(slot as usize * slot_bytes + offset)
    }
}

impl Slab for CpuSlab {
    fn slots(&self) -> u32 {
        match &*self.0 {
            Slots::Own { slots, .. } => *slots,
            Slots::Adopted(records) => records.records(),
        }
    }

    /// 0 for adopted records, which have no slots of their own.
    fn slot_bytes(&self) -> usize {
        match &*self.0 {
            Slots::Own { slot_bytes, .. } => *slot_bytes,
            Slots::Adopted(_) => 0,
        }
    }

    fn host(&self, slot: u32) -> Option<*mut u8> {
        match &*self.0 {
            Slots::Own { .. } => Some(self.at(slot, 0)),
            Slots::Adopted(_) => None,
        }
    }

    fn upload(&self, slot: u32, offset: usize, bytes: &[u8]) {
        let (end, slot_bytes) = (offset + bytes.len(), self.slot_bytes());
        assert!(end <= slot_bytes, "{end} bytes into slots of {slot_bytes}");
        let to = self.at(slot, offset);
        // SAFETY: inside the slot; its pin keeps verbs and other writers off, as the seam says.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }
}

impl fmt::Debug for CpuSlab {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.0 {
            Slots::Own { slot_bytes, slots, .. } => {
                write!(f, "CpuSlab({slots} slots of {slot_bytes} bytes)")
            }
            Slots::Adopted(records) => write!(f, "CpuSlab(adopted {records:?})"),
        }
    }
}
