//! Files of a checkpoint and exact reads from them.
//!
//! Reads leave no page cache behind: the memory budget counts the cache that we cause. So files
//! are opened for direct reads where the system has them, and aligned windows go through a small
//! reusable buffer. File systems that refuse (tmpfs, some network ones) get ordinary reads.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::error::WeightsError;

/// What direct reads must be aligned to: address, offset and length.
const ALIGN: usize = 4096;
/// Largest window that one system call reads.
pub(crate) const WINDOW: usize = 1 << 20;
/// Buffers kept for the next reader; more threads than this allocate theirs anew.
const POOLED: usize = 4;

/// Bytes that live in memory: part of the binary, or shared.
#[derive(Clone)]
pub enum Bytes {
    /// Part of the binary.
    Static(&'static [u8]),
    /// Shared by reference count.
    Shared(Arc<[u8]>),
}

impl std::ops::Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Static(bytes) => bytes,
            Self::Shared(bytes) => bytes,
        }
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bytes({})", self.len())
    }
}

impl From<&'static [u8]> for Bytes {
    fn from(bytes: &'static [u8]) -> Self {
        Self::Static(bytes)
    }
}

impl<const N: usize> From<&'static [u8; N]> for Bytes {
    fn from(bytes: &'static [u8; N]) -> Self {
        Self::Static(bytes)
    }
}

impl From<Arc<[u8]>> for Bytes {
    fn from(bytes: Arc<[u8]>) -> Self {
        Self::Shared(bytes)
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Shared(bytes.into())
    }
}

/// One file with weights.
#[derive(Debug)]
pub struct DataFile {
    /// Where it is; for embedded checkpoints a name only.
    pub path: PathBuf,
    /// Bytes when it was opened.
    pub len: u64,
    /// The content, when it is in memory already and there is no file.
    pub memory: Option<Bytes>,
    handle: Option<Handle>,
}

#[derive(Debug)]
struct Handle {
    file: File,
    direct: AtomicBool,
    /// Opened when a file system accepts the flag and then refuses the reads.
    buffered: OnceLock<File>,
}

impl DataFile {
    pub(crate) fn in_memory(path: PathBuf, bytes: Bytes) -> Self {
        Self { path, len: bytes.len() as u64, memory: Some(bytes), handle: None }
    }

    /// Opens a regular file; nothing when it does not exist.
    pub(crate) fn open(path: PathBuf) -> Result<Option<Self>, WeightsError> {
        // Before opening: a pipe would wait for its writer for ever.
        match std::fs::metadata(&path) {
            Ok(meta) if !meta.is_file() => return Ok(None),
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(WeightsError::io(&path, "look at")(e)),
        }
        let (file, direct) = open_for_reads(&path).map_err(WeightsError::io(&path, "open"))?;
        let len = file.metadata().map_err(WeightsError::io(&path, "look at"))?.len();
        let handle = Handle { file, direct: AtomicBool::new(direct), buffered: OnceLock::new() };
        Ok(Some(Self { path, len, memory: None, handle: Some(handle) }))
    }

    /// Whether reads bypass the page cache.
    pub fn is_direct(&self) -> bool {
        self.handle.as_ref().is_some_and(|h| h.direct.load(Ordering::Relaxed))
    }

    /// Fills `out` from `offset`, or fails.
    pub(crate) fn read(
        &self,
        offset: u64,
        out: &mut [u8],
        buffers: &Buffers,
    ) -> Result<(), WeightsError> {
        let wanted = out.len() as u64;
        let inside = self.len.saturating_sub(offset).min(wanted);
        if inside < wanted {
            return Err(self.short(offset, wanted, inside));
        }
        if let Some(bytes) = &self.memory {
            // In range, so it fits an address.
            let start = offset as usize;
            out.copy_from_slice(&bytes[start..start + out.len()]);
            return Ok(());
        }
        let handle = self.handle.as_ref().expect("a file that is not in memory has a handle");
        let got = match handle.read(offset, out, buffers) {
            Err(e) if handle.refused(&e) => {
                handle.direct.store(false, Ordering::Relaxed);
                handle.read_buffered(&self.path, offset, out)
            }
            result => result,
        }
        .map_err(WeightsError::io(&self.path, "read"))?;
        if got < out.len() {
            return Err(self.short(offset, wanted, got as u64));
        }
        Ok(())
    }

    fn short(&self, offset: u64, wanted: u64, got: u64) -> WeightsError {
        WeightsError::ShortRead { path: self.path.clone(), offset, wanted, got }
    }

    /// The whole content, when it is not longer than `limit`.
    pub(crate) fn read_all(&self, limit: u64, buffers: &Buffers) -> Result<Vec<u8>, WeightsError> {
        if self.len > limit {
            return Err(WeightsError::TooLarge { path: self.path.clone(), limit, got: self.len });
        }
        let mut out = vec![0; self.len as usize];
        self.read(0, &mut out, buffers)?;
        Ok(out)
    }
}

impl Handle {
    fn read(&self, offset: u64, out: &mut [u8], buffers: &Buffers) -> io::Result<usize> {
        if let Some(file) = self.buffered.get() {
            return fill(file, offset, out);
        }
        if !self.direct.load(Ordering::Relaxed) {
            return fill(&self.file, offset, out);
        }
        let mut buffer = buffers.take();
        let window = buffer.window();
        let result = direct_windows(&self.file, offset, out, window);
        buffers.give(buffer);
        result
    }

    /// Whether an error means that direct reads do not work here after all.
    fn refused(&self, error: &io::Error) -> bool {
        let kinds = [io::ErrorKind::InvalidInput, io::ErrorKind::Unsupported];
        self.direct.load(Ordering::Relaxed) && kinds.contains(&error.kind())
    }

    fn read_buffered(&self, path: &Path, offset: u64, out: &mut [u8]) -> io::Result<usize> {
        if let Some(file) = self.buffered.get() {
            return fill(file, offset, out);
        }
        let file = File::open(path)?;
        fill(self.buffered.get_or_init(|| file), offset, out)
    }
}

/// Reads `out` through aligned windows; returns how many bytes there were.
fn direct_windows(
    file: &File,
    offset: u64,
    out: &mut [u8],
    window: &mut [u8],
) -> io::Result<usize> {
    let mut done = 0;
    while done < out.len() {
        let at = offset + done as u64;
        let skip = (at % ALIGN as u64) as usize;
        let wanted = out.len() - done;
        // A short read just wants less than asked, only the end of the file gives nothing new.
        let ask = (skip + wanted).next_multiple_of(ALIGN).min(window.len());
        let got = retry(|| read_at(file, &mut window[..ask], at - skip as u64))?;
        let fresh = got.saturating_sub(skip).min(wanted);
        if fresh == 0 {
            break;
        }
        out[done..done + fresh].copy_from_slice(&window[skip..skip + fresh]);
        done += fresh;
    }
    Ok(done)
}

/// Ordinary reads until `out` is full or the file ends.
fn fill(file: &File, offset: u64, out: &mut [u8]) -> io::Result<usize> {
    let mut done = 0;
    while done < out.len() {
        match retry(|| read_at(file, &mut out[done..], offset + done as u64))? {
            0 => break,
            got => done += got,
        }
    }
    Ok(done)
}

fn retry(mut read: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    loop {
        match read() {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// A heap buffer that contains an aligned window: over-allocated and sliced.
#[derive(Debug)]
pub(crate) struct Aligned(Vec<u8>);

impl Aligned {
    fn new() -> Self {
        Self(vec![0; WINDOW + ALIGN])
    }

    fn window(&mut self) -> &mut [u8] {
        let skip = self.0.as_ptr().align_offset(ALIGN);
        &mut self.0[skip..skip + WINDOW]
    }
}

/// Bounce buffers that concurrent readers share.
#[derive(Debug, Default)]
pub(crate) struct Buffers(Mutex<Vec<Aligned>>);

impl Buffers {
    fn take(&self) -> Aligned {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        kept.unwrap_or_else(Aligned::new)
    }

    fn give(&self, buffer: Aligned) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < POOLED {
            kept.push(buffer);
        }
    }
}

/// Opens for direct reads where that exists; says whether it worked.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn open_for_reads(path: &Path) -> io::Result<(File, bool)> {
    use std::os::unix::fs::OpenOptionsExt;
    let mut options = OpenOptions::new();
    match options.read(true).custom_flags(libc::O_DIRECT).open(path) {
        Ok(file) => Ok((file, true)),
        Err(e) if e.kind() == io::ErrorKind::InvalidInput => Ok((File::open(path)?, false)),
        Err(e) => Err(e),
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn open_for_reads(path: &Path) -> io::Result<(File, bool)> {
    Ok((OpenOptions::new().read(true).open(path)?, false))
}

#[cfg(unix)]
fn read_at(file: &File, out: &mut [u8], offset: u64) -> io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, out, offset)
}

#[cfg(windows)]
fn read_at(file: &File, out: &mut [u8], offset: u64) -> io::Result<usize> {
    std::os::windows::fs::FileExt::seek_read(file, out, offset)
}

#[cfg(not(any(unix, windows)))]
fn read_at(mut file: &File, out: &mut [u8], offset: u64) -> io::Result<usize> {
    use std::io::{Read, Seek, SeekFrom};
    // One cursor for all readers.
    static CURSOR: Mutex<()> = Mutex::new(());
    let _held = CURSOR.lock().unwrap_or_else(PoisonError::into_inner);
    file.seek(SeekFrom::Start(offset))?;
    file.read(out)
}

/// A folder on disk, or one that is embedded in the binary.
#[derive(Debug)]
pub(crate) enum Folder {
    Disk(PathBuf),
    Memory(Vec<(String, Bytes)>),
}

impl Folder {
    /// Opens a file by its plain name; nothing when there is none.
    pub(crate) fn open(&self, name: &str) -> Result<Option<DataFile>, WeightsError> {
        match self {
            Self::Disk(folder) => DataFile::open(folder.join(name)),
            Self::Memory(files) => Ok(files
                .iter()
                .find(|(n, _)| n == name)
                .map(|(n, bytes)| DataFile::in_memory(n.into(), bytes.clone()))),
        }
    }

    /// Path of the folder itself, for messages.
    pub(crate) fn root(&self) -> PathBuf {
        match self {
            Self::Disk(folder) => folder.clone(),
            Self::Memory(_) => PathBuf::from("embedded model"),
        }
    }

    /// Opens a file that must be there.
    pub(crate) fn require(&self, name: &str) -> Result<DataFile, WeightsError> {
        self.open(name)?
            .ok_or_else(|| WeightsError::MissingFile { folder: self.root(), name: name.to_owned() })
    }

    /// All names in the folder, sorted.
    pub(crate) fn names(&self) -> Result<Vec<String>, WeightsError> {
        let mut names = match self {
            Self::Disk(folder) => {
                let list = std::fs::read_dir(folder).map_err(WeightsError::io(folder, "list"))?;
                list.map(|entry| entry.map(|e| e.file_name().to_string_lossy().into_owned()))
                    .collect::<io::Result<Vec<_>>>()
                    .map_err(WeightsError::io(folder, "list"))?
            }
            Self::Memory(files) => files.iter().map(|(name, _)| name.clone()).collect(),
        };
        names.sort_unstable();
        Ok(names)
    }
}

/// Whether a name is one file in a folder and nothing else: no path, no drive, no control byte.
pub(crate) fn is_plain_name(name: &str) -> bool {
    let bad = |c: char| matches!(c, '/' | '\\' | ':') || c.is_control();
    !name.is_empty() && name != "." && name != ".." && !name.contains(bad)
}
