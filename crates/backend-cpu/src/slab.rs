//! Slots of expert records.
#![allow(unsafe_code)]

use crate::linear::{Laid, Matrix};
use crate::memory::{Memory, PAGE};
use snowmelt_backend::{ExpertLayout, HostRecords, MatrixLayout, Slab};
use std::fmt;
use std::ops::Range;
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
        layout.pieces().map(|piece| {
            let laid = self.laid(slot, piece);
            let (ptr, encoding) = (laid.rows.cast(), piece.encoding);
            let laid = (!piece.is_plain()).then_some(laid);
            assert!(laid.is_none() || !encoding.is_quantised(), "{encoding} in {piece:?}");
            Matrix { ptr, encoding, d_out: piece.d_out, d_in: piece.d_in, laid }
        })
    }

    /// The biases of the record in a slot.
    pub(crate) fn biases(&self, slot: u32, layout: &ExpertLayout) -> Option<[Laid; 3]> {
        layout.biases.map(|biases| biases.map(|bias| self.laid(slot, &bias)))
    }

    fn laid(&self, slot: u32, layout: &MatrixLayout) -> Laid {
        let [rows, scales] = layout.regions().map(|range| self.bytes(slot, range));
        Laid { layout: *layout, rows, scales }
    }

    fn bytes(&self, slot: u32, range: Range<usize>) -> *const [u8] {
        if range.is_empty() {
            return &[];
        }
        match &*self.0 {
            Slots::Own { slot_bytes, .. } => {
                let end = range.end;
                assert!(end <= *slot_bytes, "a piece ends at {end} in slots of {slot_bytes} bytes");
                let first = self.at(slot, range.start).cast_const();
                std::ptr::slice_from_raw_parts(first, range.len())
            }
            Slots::Adopted(records) => {
                let bytes = records.bytes(slot, range.clone());
                assert_eq!(bytes.len(), range.len(), "bytes of {range:?} of record {slot}");
                bytes
            }
        }
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
