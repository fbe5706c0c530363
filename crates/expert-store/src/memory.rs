//! Where records go.

use crate::error::StoreError;
use crate::raw;
use memmap2::{MmapMut, MmapRaw};
use std::sync::Arc;

/// What a slot's address and length must be a multiple of, so that direct reads can land there.
pub const SLOT_ALIGN: usize = 4096;

/// Memory in equal slots, owned by whoever computes on it.
///
/// The store writes to a slot only while no pin of it lives, and through one of the two ways
/// below; a slot's bytes are whatever was written last.
///
/// The store's own memory safety rests on `host`: a pointer that it returns must stay valid for
/// reads and writes of [`slot_bytes`](Self::slot_bytes) bytes as long as `self` lives, must be the
/// same at each call, point at initialised memory that overlaps no other slot, and be a multiple
/// of [`SLOT_ALIGN`]. Nobody else may touch the bytes of a slot without holding a pin of it.
pub trait SlotMemory: Send + Sync {
    /// Slot count.
    fn slots(&self) -> u32;
    /// Bytes a slot, a multiple of [`SLOT_ALIGN`].
    fn slot_bytes(&self) -> usize;
    /// The slot's bytes, where the host can address them.
    fn host(&self, slot: u32) -> Option<*mut u8>;
    /// Copies into the slot at `offset`. It is not ordered with work that a device has been given:
    /// only pins keep it off bytes in use. May be called from any thread.
    fn upload(&self, slot: u32, offset: usize, bytes: &[u8]);
}

/// Plain host memory, zeroed, aligned to pages.
#[derive(Debug)]
pub struct HostMemory {
    map: MmapRaw,
    slot_bytes: usize,
    slots: u32,
}

impl HostMemory {
    /// `slots` slots of `slot_bytes` rounded up to [`SLOT_ALIGN`].
    ///
    /// # Errors
    /// [`StoreError::Setup`] if the memory cannot be had.
    pub fn new(slot_bytes: usize, slots: u32) -> Result<Self, StoreError> {
        let slot_bytes = slot_bytes.next_multiple_of(SLOT_ALIGN);
        let bytes = slot_bytes * slots as usize;
        let map = anonymous("slots", bytes)?;
        Ok(Self { map: map.into(), slot_bytes, slots })
    }

    /// Copies out of a slot. Hold a pin of it, or the bytes may be anything.
    pub fn copy_out(&self, slot: u32, offset: usize, into: &mut [u8]) {
        assert!(
            offset + into.len() <= self.slot_bytes,
            "`{}` bytes at `{offset}` of a slot of `{}`",
            into.len(),
            self.slot_bytes
        );
        raw::copy_from_slot(self, slot, offset, into);
    }
}

impl SlotMemory for HostMemory {
    fn slots(&self) -> u32 {
        self.slots
    }
    fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }
    fn host(&self, slot: u32) -> Option<*mut u8> {
        assert!(slot < self.slots, "slot `{slot}` of `{}`", self.slots);
        Some(self.map.as_mut_ptr().wrapping_add(slot as usize * self.slot_bytes))
    }
    fn upload(&self, slot: u32, offset: usize, bytes: &[u8]) {
        raw::copy_to_slot(self, slot, offset, bytes);
    }
}

/// Zeroed pages.
pub(crate) fn anonymous(what: &'static str, bytes: usize) -> Result<MmapMut, StoreError> {
    MmapMut::map_anon(bytes.max(1)).map_err(|error| StoreError::Setup {
        what,
        bytes: bytes as u64,
        errno: error.raw_os_error(),
    })
}

/// A place in a slot that a read writes to. Owns a share of the memory, so that a read that comes
/// back late never writes to memory that was freed.
#[derive(Clone)]
pub struct Target {
    memory: Arc<dyn SlotMemory>,
    slot: u32,
    offset: usize,
    room: usize,
}

impl std::fmt::Debug for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Target")
            .field("slot", &self.slot)
            .field("offset", &self.offset)
            .field("room", &self.room)
            .finish_non_exhaustive()
    }
}

impl Target {
    /// `room` bytes at `offset` of `slot`. A reader may write to all of them, also past what it was
    /// asked to read.
    ///
    /// # Panics
    /// If the range is not inside the slot.
    pub fn new(memory: Arc<dyn SlotMemory>, slot: u32, offset: usize, room: usize) -> Self {
        let slot_bytes = memory.slot_bytes();
        assert!(
            slot < memory.slots() && offset + room <= slot_bytes,
            "`{room}` bytes at `{offset}` of slot `{slot}`; `{}` slots of `{slot_bytes}`",
            memory.slots()
        );
        Self { memory, slot, offset, room }
    }
    /// Bytes that may be written.
    pub fn room(&self) -> usize {
        self.room
    }
    /// The slot.
    pub fn slot(&self) -> u32 {
        self.slot
    }
    /// The same, less its first `bytes`.
    #[must_use]
    pub fn skip(&self, bytes: usize) -> Self {
        assert!(bytes <= self.room, "`{bytes}` past a room of `{}`", self.room);
        let mut rest = self.clone();
        rest.offset += bytes;
        rest.room -= bytes;
        rest
    }
    /// Address of the first byte, where the host has one.
    pub fn host(&self) -> Option<*mut u8> {
        self.memory.host(self.slot).map(|start| start.wrapping_add(self.offset))
    }
    /// Copies or uploads `bytes` at `offset` of the target.
    ///
    /// # Panics
    /// If they do not fit.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(
            offset + bytes.len() <= self.room,
            "`{}` bytes at `{offset}` of `{}`",
            bytes.len(),
            self.room
        );
        match self.memory.host(self.slot) {
            Some(_) => raw::copy_to_slot(&*self.memory, self.slot, self.offset + offset, bytes),
            None => self.memory.upload(self.slot, self.offset + offset, bytes),
        }
    }
    /// Runs `f` on `len` bytes at `offset`, where the host can address them.
    pub(crate) fn with_host<R>(
        &self,
        offset: usize,
        len: usize,
        f: impl FnOnce(&mut [u8]) -> R,
    ) -> Option<R> {
        assert!(offset + len <= self.room, "`{len}` bytes at `{offset}` of `{}`", self.room);
        raw::with_slot(&*self.memory, self.slot, self.offset + offset, len, f)
    }
}
