//! What must be true before the first read.

use crate::error::StoreError;
use crate::key::{Key, RecordMap};
use crate::memory::{SLOT_ALIGN, SlotMemory};
use crate::source::BlockSource;
use std::sync::Arc;

pub(super) fn memory(memory: &dyn SlotMemory, verify: bool) -> Result<(), StoreError> {
    let (slots, slot_bytes) = (memory.slots(), memory.slot_bytes());
    if slots == 0 {
        return Err(StoreError::OptionTooSmall { option: "slots", got: 0, least: 1 });
    }
    for slot in 0..slots {
        let address = memory.host(slot).map(|start| start as usize);
        if verify && address.is_none() {
            return Err(StoreError::VerifyNeedsHost { slot });
        }
        let address = address.unwrap_or(0);
        if !address.is_multiple_of(SLOT_ALIGN) || !slot_bytes.is_multiple_of(SLOT_ALIGN) {
            let (slot_bytes, align) = (slot_bytes as u64, SLOT_ALIGN as u64);
            return Err(StoreError::SlotAlign { slot, slot_bytes, address: address as u64, align });
        }
    }
    Ok(())
}

/// Returns the greatest number of pieces of a record.
pub(super) fn records(
    memory: &dyn SlotMemory,
    map: &dyn RecordMap,
    source: &dyn BlockSource,
) -> Result<usize, StoreError> {
    let slot_bytes = memory.slot_bytes() as u64;
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    let mut pieces = 0;
    for layer in 0..map.n_layers() {
        for expert in 0..map.n_experts(layer) {
            let key = Key { layer, expert };
            ranges.clear();
            for extent in map.extents(key) {
                if extent.file >= source.files() {
                    let (file, files) = (extent.file, source.files());
                    return Err(StoreError::ExtentFile { key, file, files });
                }
                let (offset, len) = (extent.offset, extent.len);
                let file_len = source.file_len(extent.file);
                if offset.checked_add(len).is_none_or(|end| end > file_len) || len == 0 {
                    let path = Arc::clone(source.path(extent.file));
                    return Err(StoreError::ExtentRange { key, path, offset, len, file_len });
                }
                ranges.push((extent.slot_offset, len));
            }
            slot_ranges(key, &mut ranges, slot_bytes)?;
            pieces = pieces.max(ranges.len());
        }
    }
    Ok(pieces)
}

/// Pieces fit in the slot and do not overlap.
fn slot_ranges(key: Key, ranges: &mut [(u64, u64)], slot_bytes: u64) -> Result<(), StoreError> {
    if ranges.is_empty() {
        return Err(StoreError::ExtentSlot {
            key,
            slot_offset: 0,
            len: 0,
            free_from: 0,
            slot_bytes,
        });
    }
    ranges.sort_unstable();
    let mut free_from = 0;
    for &(slot_offset, len) in &*ranges {
        let end = slot_offset.checked_add(len);
        if slot_offset < free_from || end.is_none_or(|end| end > slot_bytes) {
            return Err(StoreError::ExtentSlot { key, slot_offset, len, free_from, slot_bytes });
        }
        free_from = slot_offset + len;
    }
    Ok(())
}
