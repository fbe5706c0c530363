//! Files that the packer writes at given offsets.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use crate::error::WeightsError;

/// A file of the partial folder.
#[derive(Debug)]
pub(crate) struct OutFile {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
}

impl OutFile {
    /// Opens for reading and writing, creating it when absent and keeping its content.
    pub(crate) fn open(path: PathBuf) -> Result<Self, WeightsError> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.open(&path).map_err(|e| WeightsError::write(&path, 0, 0, e))?;
        Ok(Self { path, file })
    }

    /// Writes all bytes at `offset`.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), WeightsError> {
        write_all_at(&self.file, bytes, offset)
            .map_err(|e| WeightsError::write(&self.path, offset, bytes.len() as u64, e))
    }

    pub(crate) fn set_len(&self, len: u64) -> Result<(), WeightsError> {
        self.file.set_len(len).map_err(|e| WeightsError::write(&self.path, len, 0, e))
    }

    /// Waits until content and length are on the disk, where a delayed lack of space shows too.
    pub(crate) fn sync(&self) -> Result<(), WeightsError> {
        self.file.sync_all().map_err(|e| WeightsError::write(&self.path, 0, 0, e))
    }

    /// The first bytes, at most `limit`.
    pub(crate) fn read_up_to(&self, limit: u64) -> Result<Vec<u8>, WeightsError> {
        use std::io::{Read, Seek, SeekFrom};
        let mut bytes = Vec::new();
        let mut file = &self.file;
        file.seek(SeekFrom::Start(0))
            .and_then(|_| file.take(limit).read_to_end(&mut bytes))
            .map_err(WeightsError::io(&self.path, "read"))?;
        Ok(bytes)
    }
}

/// Writes a whole small file and waits until it is on the disk.
pub(crate) fn write_file(path: PathBuf, bytes: &[u8]) -> Result<(), WeightsError> {
    let file = OutFile::open(path)?;
    file.set_len(0)?;
    file.write(0, bytes)?;
    file.sync()
}

/// Waits until the names in a folder are on the disk.
#[cfg(unix)]
pub(crate) fn sync_folder(path: &Path) -> Result<(), WeightsError> {
    let result = File::open(path).and_then(|folder| folder.sync_all());
    match result {
        // Some file systems cannot do it and say so.
        Err(e) if e.kind() == io::ErrorKind::InvalidInput => Ok(()),
        result => result.map_err(WeightsError::io(path, "sync")),
    }
}

#[cfg(not(unix))]
pub(crate) fn sync_folder(_path: &Path) -> Result<(), WeightsError> {
    Ok(())
}

#[cfg(unix)]
fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
}

#[cfg(not(unix))]
fn write_all_at(mut file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    use std::io::{Seek, SeekFrom, Write};
    file.seek(SeekFrom::Start(offset))?;
    file.write_all(bytes)
}
