//! Copies out of mapped files.

use super::file::Files;
use super::memory::Waiting;
use super::{BLOCK, BlockSource, Completion, Read, ReadFailure, ReadMode};
use crate::error::StoreError;
use crate::key::FileSpec;
use crate::raw;
use memmap2::Mmap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Bytes copied between two looks at the file's length.
const CHUNK: u64 = 1 << 20;

/// Reads through mappings, in the caller's thread, one read a poll. Four to ten times slower than
/// reading on a machine that cannot hold the files; for systems where nothing else works.
#[derive(Debug)]
pub struct MmapSource {
    files: Files,
    maps: Vec<Option<Mmap>>,
    waiting: Waiting,
}

impl MmapSource {
    /// Opens and maps the files.
    ///
    /// # Errors
    /// A file that cannot be opened or mapped, or has another length.
    pub fn open(files: &[FileSpec]) -> Result<Self, StoreError> {
        let files = Files::open(files, ReadMode::Buffered)?;
        let mut maps = Vec::new();
        for file in &files.list {
            let open_error = |error: std::io::Error| StoreError::Open {
                path: Arc::clone(&file.path),
                errno: error.raw_os_error(),
            };
            // An empty file cannot be mapped, and nothing can be read of it.
            let map = (file.len > 0).then(|| raw::map_file(&file.file)).transpose();
            maps.push(map.map_err(open_error)?);
        }
        Ok(Self { files, maps, waiting: Waiting::default() })
    }

    /// Copies chunk by chunk; returns the bytes copied. The length is looked at before each chunk,
    /// since a page past the end of a file that was cut cannot be read but by a signal. A cut
    /// between the look and the copy still raises it.
    fn copy(&self, read: &Read) -> u64 {
        let file = &self.files.list[read.file as usize];
        let Some(map) = &self.maps[read.file as usize] else { return 0 };
        let mut done = 0;
        while done < read.len {
            let from = read.offset + done;
            let end = file.current_len().min(map.len() as u64).min(read.offset + read.len);
            let n = end.saturating_sub(from).min(CHUNK);
            if n == 0 {
                break;
            }
            read.target.write(done as usize, &map[from as usize..(from + n) as usize]);
            done += n;
        }
        done
    }

    /// Leaves no page cache behind that nobody counts.
    fn forget(&self, read: &Read) {
        let Some(map) = &self.maps[read.file as usize] else { return };
        let start = read.offset / BLOCK * BLOCK;
        let end = (read.offset + read.len).min(map.len() as u64).next_multiple_of(BLOCK);
        let len = end.saturating_sub(start);
        raw::unmap_pages(map, start as usize, len as usize);
        raw::advise_done(&self.files.list[read.file as usize].file, start, len);
    }
}

impl BlockSource for MmapSource {
    fn name(&self) -> &'static str {
        "mmap"
    }
    fn files(&self) -> u32 {
        self.files.list.len() as u32
    }
    fn file_len(&self, file: u32) -> u64 {
        self.files.list[file as usize].len
    }
    fn path(&self, file: u32) -> &Arc<Path> {
        &self.files.list[file as usize].path
    }
    fn buffer_bytes(&self) -> usize {
        0
    }
    fn reserve(&mut self, reads: usize) {
        self.waiting.reserve(reads);
    }
    fn submit(&mut self, read: Read) {
        #[cfg(unix)]
        if let Some(map) = &self.maps[read.file as usize] {
            let start = (read.offset / BLOCK * BLOCK) as usize;
            let len = (read.offset + read.len).min(map.len() as u64) as usize;
            // Brings the pages in together instead of fault by fault; refused advice costs time.
            let _ = map.advise_range(memmap2::Advice::WillNeed, start, len.saturating_sub(start));
        }
        self.waiting.push(read);
    }
    fn cancel(&mut self, id: u64) -> bool {
        self.waiting.cancel(id)
    }
    fn promote(&mut self, id: u64) {
        self.waiting.promote(id);
    }
    fn poll(&mut self, _: Option<Duration>) -> Option<Completion> {
        let read = self.waiting.pop()?;
        let got = self.copy(&read);
        self.forget(&read);
        let Read { id, file, offset, len: wanted, .. } = read;
        let whole = got == wanted;
        let failure = ReadFailure { file, offset, wanted, got, errno: None };
        Some(Completion { id, result: if whole { Ok(got) } else { Err(failure) } })
    }
}
