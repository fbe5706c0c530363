//! All that the compiler cannot check: bytes of slots, mapped files, and two calls of the system.
#![allow(unsafe_code)]

use crate::memory::SlotMemory;
use std::fs::File;
use std::io;

/// Runs `f` on `len` bytes at `offset` of a slot; `None` where the host cannot address them.
///
/// The caller is the one filler of the slot (invariant 2 of `Policy`: a filling slot is nobody's
/// victim, and its pins are not handed out before it is resident), or holds it still otherwise;
/// two callers at once must name ranges that do not overlap.
pub(crate) fn with_slot<R>(
    memory: &dyn SlotMemory,
    slot: u32,
    offset: usize,
    len: usize,
    f: impl FnOnce(&mut [u8]) -> R,
) -> Option<R> {
    assert!(
        offset + len <= memory.slot_bytes(),
        "`{len}` bytes at `{offset}` of a slot of `{}`",
        memory.slot_bytes()
    );
    let start = memory.host(slot)?;
    // SAFETY: the contract of `SlotMemory::host` (valid for `slot_bytes`, initialised, no overlap
    // with another slot) and the assertion above keep the range inside the slot; exclusive by the
    // rule in the doc comment.
    let bytes = unsafe { std::slice::from_raw_parts_mut(start.add(offset), len) };
    Some(f(bytes))
}

/// Copies into a slot that the host can address.
pub(crate) fn copy_to_slot(memory: &dyn SlotMemory, slot: u32, offset: usize, bytes: &[u8]) {
    let copied = with_slot(memory, slot, offset, bytes.len(), |to| to.copy_from_slice(bytes));
    assert!(copied.is_some(), "slot `{slot}` has no host address");
}

/// Copies out of a slot that the host can address.
pub(crate) fn copy_from_slot(memory: &dyn SlotMemory, slot: u32, offset: usize, into: &mut [u8]) {
    assert!(
        offset + into.len() <= memory.slot_bytes(),
        "`{}` bytes at `{offset}` of a slot of `{}`",
        into.len(),
        memory.slot_bytes()
    );
    let start = memory.host(slot).expect("checked by the caller");
    // SAFETY: the contract of `SlotMemory::host` and the assertion above; only shared access is
    // made, so that several holders of pins may read at once.
    let bytes = unsafe { std::slice::from_raw_parts(start.add(offset), into.len()) };
    into.copy_from_slice(bytes);
}

/// Maps a whole file.
pub(crate) fn map_file(file: &File) -> io::Result<memmap2::Mmap> {
    // SAFETY: the mapping is read only; another process may change the bytes, which are plain
    // numbers to us. `MmapSource` checks the file's length before it touches a range, since a
    // page past the end would raise SIGBUS.
    unsafe { memmap2::Mmap::map(file) }
}

/// Lets go of the pages of a mapped range, which would keep them in the page cache.
pub(crate) fn unmap_pages(map: &memmap2::Mmap, start: usize, len: usize) {
    #[cfg(unix)]
    // SAFETY: the mapping is of a file and read only, so that its pages come back from the file
    // with the same bytes when they are looked at again.
    let refused = unsafe {
        map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, len).is_err()
    };
    #[cfg(not(unix))]
    let refused = (map, start, len);
    // It is advice: refused, it changes nothing but the memory that the system counts.
    let _ = refused;
}

/// Tells the kernel that reads of this file are not sequential, so that it does not read ahead
/// into page cache that nobody counts.
pub(crate) fn advise_random(file: &File) {
    #[cfg(target_os = "linux")]
    advise(file, 0, 0, libc::POSIX_FADV_RANDOM);
    #[cfg(not(target_os = "linux"))]
    let _ = file;
}

/// Drops a range of the file from the page cache.
pub(crate) fn advise_done(file: &File, offset: u64, len: u64) {
    #[cfg(target_os = "linux")]
    advise(file, offset, len, libc::POSIX_FADV_DONTNEED);
    #[cfg(not(target_os = "linux"))]
    let _ = (file, offset, len);
}

#[cfg(target_os = "linux")]
fn advise(file: &File, offset: u64, len: u64, advice: libc::c_int) {
    use std::os::fd::AsRawFd;
    // SAFETY: takes no pointer; the descriptor is open as long as `file` lives. It is advice: a
    // file system that refuses it (as pipes and some network ones do) changes nothing for us.
    let _ = unsafe {
        libc::posix_fadvise(file.as_raw_fd(), offset as libc::off_t, len as libc::off_t, advice)
    };
}

/// Asks for reads past the page cache, where that is a flag of the open file.
#[cfg(target_os = "macos")]
pub(crate) fn no_cache(file: &File) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    // SAFETY: F_NOCACHE takes an int; the descriptor is open as long as `file` lives.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_NOCACHE, 1) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}
