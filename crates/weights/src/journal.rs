//! The journal of an unfinished pack: which parts are complete, and their digests.
//!
//! ```text
//! header   8 bytes magic, 32 bytes digest of the plan, 8 bytes check
//! entry    8 bytes kind and index, 32 bytes digest of the part, 8 bytes check
//! ```
//!
//! A check covers the plan and the entry's place, so a torn tail, bytes of another journal or a
//! file of zeros never look like an entry. Entries count only up to the first that does not fit.

use std::fs::{File, TryLockError};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use crate::digest::Digest;
use crate::error::WeightsError;
use crate::outfile::OutFile;

const MAGIC: [u8; 8] = *b"SNOWJRN1";
const ENTRY: usize = 48;
const RECORD_BIT: u64 = 1 << 63;

/// Parts that a journal says are complete: the first tensors and the first records.
#[derive(Debug, Default)]
pub(crate) struct Completed {
    pub(crate) tensors: Vec<Digest>,
    pub(crate) records: Vec<Digest>,
}

/// A locked journal, open for appending.
#[derive(Debug)]
pub(crate) struct Journal {
    file: OutFile,
    plan: Digest,
    entries: u64,
}

impl Journal {
    /// Opens or starts the journal of a partial folder and locks it.
    ///
    /// The lock lives as long as the journal.
    pub(crate) fn lock(partial: &Path, name: &str, plan: Digest) -> Result<Self, WeightsError> {
        let path = partial.join(name);
        let file = OutFile::open(path)?;
        match file.file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(WeightsError::Locked { path: partial.to_owned() });
            }
            // Some network file systems have no locks; the caller is told nothing then.
            Err(TryLockError::Error(e)) if e.kind() == ErrorKind::Unsupported => {}
            Err(TryLockError::Error(e)) => return Err(WeightsError::io(&file.path, "lock")(e)),
        }
        if !same_file(&file.file, &file.path) {
            // Whoever had the lock has finished and moved the folder away.
            return Err(WeightsError::Locked { path: partial.to_owned() });
        }
        Ok(Self { file, plan, entries: 0 })
    }

    /// Reads what is complete; nothing when there is no valid header.
    pub(crate) fn load(&mut self, most: u64) -> Result<Option<Completed>, WeightsError> {
        let bytes = self.file.read_up_to((most + 1).saturating_mul(ENTRY as u64))?;
        let Some(got) = bytes.first_chunk().and_then(plan_of) else { return Ok(None) };
        if got != self.plan {
            let partial = self.file.path.parent().unwrap_or(&self.file.path);
            return Err(WeightsError::OtherPlan {
                path: partial.to_owned(),
                wanted: self.plan.short(),
                got: got.short(),
            });
        }
        let mut completed = Completed::default();
        for entry in bytes[ENTRY..].as_chunks::<ENTRY>().0 {
            if !self.accept(entry, &mut completed) {
                break;
            }
            self.entries += 1;
        }
        Ok(Some(completed))
    }

    /// Cuts off what is behind the entries that were accepted.
    pub(crate) fn trim(&self) -> Result<(), WeightsError> {
        self.file.set_len((self.entries + 1) * ENTRY as u64)
    }

    fn accept(&self, entry: &[u8; ENTRY], completed: &mut Completed) -> bool {
        let key = u64::from_le_bytes(entry[..8].try_into().expect("8 bytes"));
        let digest = Digest(entry[8..40].try_into().expect("32 bytes"));
        let list =
            if key & RECORD_BIT == 0 { &mut completed.tensors } else { &mut completed.records };
        let fits = *entry == self.entry(self.entries, key, digest)
            && key & !RECORD_BIT == list.len() as u64;
        if fits {
            list.push(digest);
        }
        fits
    }

    /// Writes a journal with these parts only. Torn, it has fewer.
    pub(crate) fn restart(&mut self, completed: &Completed) -> Result<(), WeightsError> {
        self.file.set_len(0)?;
        self.entries = 0;
        self.file.write(0, &header(self.plan))?;
        for (index, digest) in completed.tensors.iter().enumerate() {
            self.append_tensor(index, *digest)?;
        }
        for (index, digest) in completed.records.iter().enumerate() {
            self.append_record(index, *digest)?;
        }
        self.file.sync()
    }

    /// Notes that a tensor of the trunk is complete.
    pub(crate) fn append_tensor(&mut self, at: usize, digest: Digest) -> Result<(), WeightsError> {
        self.append(at as u64, digest)
    }

    /// Notes that a record is complete.
    pub(crate) fn append_record(&mut self, at: usize, digest: Digest) -> Result<(), WeightsError> {
        self.append(at as u64 | RECORD_BIT, digest)
    }

    fn append(&mut self, key: u64, digest: Digest) -> Result<(), WeightsError> {
        let entry = self.entry(self.entries, key, digest);
        self.file.write((self.entries + 1) * ENTRY as u64, &entry)?;
        self.entries += 1;
        Ok(())
    }

    pub(crate) fn sync(&self) -> Result<(), WeightsError> {
        self.file.sync()
    }

    pub(crate) fn path(&self) -> &PathBuf {
        &self.file.path
    }

    #[cfg(test)]
    pub(crate) fn swap_file(&mut self, file: File) -> File {
        std::mem::replace(&mut self.file.file, file)
    }

    fn entry(&self, place: u64, key: u64, digest: Digest) -> [u8; ENTRY] {
        let mut entry = [0; ENTRY];
        entry[..8].copy_from_slice(&key.to_le_bytes());
        entry[8..40].copy_from_slice(&digest.0);
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.plan.0).update(&place.to_le_bytes()).update(&entry[..40]);
        entry[40..].copy_from_slice(&Digest::finished(&hasher).0[..8]);
        entry
    }
}

fn header(plan: Digest) -> [u8; ENTRY] {
    let mut header = [0; ENTRY];
    header[..8].copy_from_slice(&MAGIC);
    header[8..40].copy_from_slice(&plan.0);
    let check = Digest::of(&header[..40]);
    header[40..].copy_from_slice(&check.0[..8]);
    header
}

/// The plan that a header names, if it is one.
fn plan_of(bytes: &[u8; ENTRY]) -> Option<Digest> {
    let plan = Digest(bytes[8..40].try_into().expect("32 bytes"));
    (*bytes == header(plan)).then_some(plan)
}

/// Whether a file is the journal of a plan.
pub(crate) fn is_of_plan(path: &Path, plan: Digest) -> bool {
    let mut start = [0; ENTRY];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut start));
    read.is_ok() && plan_of(&start) == Some(plan)
}

/// Whether a path still leads to an open file.
#[cfg(unix)]
fn same_file(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (file.metadata(), std::fs::metadata(path)) {
        (Ok(a), Ok(b)) => a.dev() == b.dev() && a.ino() == b.ino(),
        _ => false,
    }
}

#[cfg(not(unix))]
fn same_file(_file: &File, path: &Path) -> bool {
    path.exists()
}
