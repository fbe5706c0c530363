//! Zeroed anonymous memory: mapped lazily where it is large, so that untouched bytes cost nothing.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

/// Alignment of small memory: one cache line.
const LINE: usize = 64;
/// Alignment of mapped memory, as direct reads want it.
pub(crate) const PAGE: usize = 4096;
/// From this size on memory is mapped.
const MAPPED_FROM: usize = 64 << 10;

/// One run of bytes, aligned to a cache line at least, to a page where [`Memory::paged`] made it.
pub(crate) struct Memory {
    ptr: NonNull<u8>,
    bytes: usize,
    /// How it is given back; `None`: a mapping.
    layout: Option<Layout>,
}

// SAFETY: memory belongs to no thread; what orders accesses is the business of its users.
unsafe impl Send for Memory {}
// SAFETY: as above; only raw pointers are given out.
unsafe impl Sync for Memory {}

impl Memory {
    /// Zeroed bytes.
    pub(crate) fn zeroed(bytes: usize, huge_pages: bool) -> Self {
        if bytes < MAPPED_FROM {
            Self::allocated(bytes, LINE)
        } else {
            Self::paged(bytes, huge_pages)
        }
    }

    /// Zeroed bytes that begin on a page.
    pub(crate) fn paged(bytes: usize, huge_pages: bool) -> Self {
        #[cfg(unix)]
        if bytes > 0 {
            return Self::mapped(bytes, huge_pages);
        }
        let _ = huge_pages;
        Self::allocated(bytes, PAGE)
    }

    fn allocated(bytes: usize, align: usize) -> Self {
        let layout =
            Layout::from_size_align(bytes.max(1), align).expect("sizes fit the address space");
        // SAFETY: the layout is not empty.
        let ptr = unsafe { alloc_zeroed(layout) };
        let Some(ptr) = NonNull::new(ptr) else { handle_alloc_error(layout) };
        Self { ptr, bytes, layout: Some(layout) }
    }

    #[cfg(unix)]
    fn mapped(bytes: usize, huge_pages: bool) -> Self {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANON;
        // SAFETY: a fresh anonymous mapping touches nothing that exists.
        let ptr = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
        assert!(ptr != libc::MAP_FAILED, "cannot map {bytes} bytes");
        #[cfg(target_os = "linux")]
        if huge_pages {
            // SAFETY: advice on our own mapping; a refusal changes nothing.
            unsafe { libc::madvise(ptr, bytes, libc::MADV_HUGEPAGE) };
        }
        let _ = huge_pages;
        let ptr = NonNull::new(ptr.cast()).expect("a mapping is never at zero");
        Self { ptr, bytes, layout: None }
    }

    /// First byte.
    pub(crate) fn ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// Length.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Writes 0xFF everywhere, NaN in every float type. It touches every page.
    pub(crate) fn poison(&mut self) {
        // SAFETY: the whole of our own memory, borrowed mutably.
        unsafe { self.ptr.as_ptr().write_bytes(0xFF, self.bytes) };
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        match self.layout {
            // SAFETY: allocated with this layout.
            Some(layout) => unsafe { dealloc(self.ptr.as_ptr(), layout) },
            #[cfg(unix)]
            // SAFETY: mapped with this length.
            None => unsafe {
                libc::munmap(self.ptr.as_ptr().cast(), self.bytes);
            },
            #[cfg(not(unix))]
            None => unreachable!("nothing is mapped here"),
        }
    }
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Memory({} bytes)", self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_and_zero() {
        for bytes in [0, 1, 100, MAPPED_FROM, MAPPED_FROM + 1] {
            for (memory, align) in
                [(Memory::zeroed(bytes, false), LINE), (Memory::paged(bytes, true), PAGE)]
            {
                assert_eq!(memory.ptr().addr() % align, 0, "{bytes}");
                // SAFETY: inside the memory.
                let all = unsafe { std::slice::from_raw_parts(memory.ptr(), bytes) };
                assert!(all.iter().all(|b| *b == 0));
            }
        }
    }
}
