//! Opening the files that are read, and reading a range of one.

use super::{BLOCK, ReadMode};
use crate::error::StoreError;
use crate::key::FileSpec;
use crate::memory::anonymous;
use crate::raw;
use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;
use std::sync::Arc;

/// A file that is read.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub(crate) path: Arc<Path>,
    pub(crate) len: u64,
    pub(crate) file: File,
}

/// Files, all opened one way.
#[derive(Debug)]
pub(crate) struct Files {
    pub(crate) list: Vec<OpenFile>,
    pub(crate) direct: bool,
}

impl Files {
    /// Opens all of them, and compares their lengths with the specification.
    pub(crate) fn open(specs: &[FileSpec], mode: ReadMode) -> Result<Self, StoreError> {
        if mode != ReadMode::Buffered {
            match Self::open_as(specs, true) {
                Err(StoreError::DirectRefused { .. }) if mode == ReadMode::Auto => {}
                result => return result,
            }
        }
        Self::open_as(specs, false)
    }

    fn open_as(specs: &[FileSpec], direct: bool) -> Result<Self, StoreError> {
        let list = specs.iter().map(|spec| OpenFile::open(spec, direct)).collect::<Result<_, _>>();
        Ok(Self { list: list?, direct })
    }
}

impl OpenFile {
    fn open(spec: &FileSpec, direct: bool) -> Result<Self, StoreError> {
        let path: Arc<Path> = spec.path.as_path().into();
        let open_error = |error: io::Error| StoreError::Open {
            path: Arc::clone(&path),
            errno: error.raw_os_error(),
        };
        // Plainly first, so that "no such file" is not taken for a refusal of direct reads.
        let plain = File::open(&path).map_err(open_error)?;
        let got = plain.metadata().map_err(open_error)?.len();
        if got != spec.len {
            return Err(StoreError::FileLength { path, wanted: spec.len, got });
        }
        let file = if direct {
            let refused = |error: io::Error| StoreError::DirectRefused {
                path: Arc::clone(&path),
                errno: error.raw_os_error(),
            };
            let file = open_direct(&path).map_err(refused)?;
            // Some file systems permit the flag and refuse the read.
            let mut block = anonymous("probe", BLOCK as usize)?;
            read_at(&file, &mut block, 0).map_err(refused)?;
            file
        } else {
            raw::advise_random(&plain);
            plain
        };
        Ok(Self { path, len: got, file })
    }

    /// Reads until `buffer` is full or the file ends; returns the bytes read.
    pub(crate) fn read_full(&self, buffer: &mut [u8], offset: u64) -> (usize, io::Result<()>) {
        let mut got = 0;
        while got < buffer.len() {
            match read_at(&self.file, &mut buffer[got..], offset + got as u64) {
                Ok(0) => break,
                Ok(n) => got += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // A direct read that stops inside a block has reached the end of the file; asking
                // on from there is refused as unaligned.
                Err(_) if offset + got as u64 >= self.current_len() => break,
                Err(error) => return (got, Err(error)),
            }
        }
        (got, Ok(()))
    }

    /// Its length now; the greatest number if that cannot be told.
    pub(crate) fn current_len(&self) -> u64 {
        self.file.metadata().map_or(u64::MAX, |metadata| metadata.len())
    }
}

#[cfg(target_os = "linux")]
fn open_direct(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)
}

#[cfg(target_os = "macos")]
fn open_direct(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).open(path)?;
    raw::no_cache(&file)?;
    Ok(file)
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
fn open_direct(_: &Path) -> io::Result<File> {
    let _ = OpenOptions::new();
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(unix)]
fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, buffer, offset)
}

#[cfg(windows)]
fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    std::os::windows::fs::FileExt::seek_read(file, buffer, offset)
}
