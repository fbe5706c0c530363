//! What can go wrong, with what a person needs to act.

use crate::key::Key;
use std::path::Path;
use std::sync::Arc;
use thiserror::Error;

/// Any failure of a store or of opening one.
///
/// Values that were wanted come beside those that were found. `errno` is the operating system's
/// number, where it gave one.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreError {
    /// The file cannot be opened.
    #[error("cannot open `{}`: {}", path.display(), os(*errno))]
    Open {
        /// The file.
        path: Arc<Path>,
        /// Why.
        errno: Option<i32>,
    },
    /// The file has another length than its byte ranges were made for.
    #[error("`{}` has `{got}` bytes, wanted `{wanted}`", path.display())]
    FileLength {
        /// The file.
        path: Arc<Path>,
        /// Bytes expected.
        wanted: u64,
        /// Bytes found.
        got: u64,
    },
    /// Direct reads were asked for and the file system refuses them.
    #[error("`{}` cannot be read past the page cache: {}", path.display(), os(*errno))]
    DirectRefused {
        /// The file.
        path: Arc<Path>,
        /// Why.
        errno: Option<i32>,
    },
    /// The kernel, or the container around it, does not permit `io_uring`.
    #[error("io_uring is not permitted here: {}\nuse the `pread` source instead", os(*errno))]
    UringRefused {
        /// Why.
        errno: Option<i32>,
    },
    /// The kernel's `io_uring` lacks something the source needs (Linux 5.11 has it).
    #[error("io_uring lacks `{feature}` here\nuse the `pread` source instead")]
    UringLacks {
        /// What is missing.
        feature: &'static str,
    },
    /// A thread or a buffer of the source, or memory for slots, cannot be had.
    #[error("cannot set up `{what}` of `{bytes}` bytes: {}", os(*errno))]
    Setup {
        /// What it was for.
        what: &'static str,
        /// How much was asked for.
        bytes: u64,
        /// Why.
        errno: Option<i32>,
    },
    /// An option has a value it cannot have.
    #[error("option `{option}` is `{got}`, wanted at least `{least}`")]
    OptionTooSmall {
        /// Its name.
        option: &'static str,
        /// Its value.
        got: u64,
        /// The least value.
        least: u64,
    },
    /// Slot memory does not keep its promise of alignment.
    #[error("slot `{slot}` of `{slot_bytes}` bytes at `{address:#x}` is not aligned to `{align}`")]
    SlotAlign {
        /// The slot.
        slot: u32,
        /// Bytes a slot.
        slot_bytes: u64,
        /// Where it is.
        address: u64,
        /// What both must be a multiple of.
        align: u64,
    },
    /// A record names a file that the source does not have.
    #[error("{key} lies in file `{file}` of `{files}`")]
    ExtentFile {
        /// The record.
        key: Key,
        /// The index it names.
        file: u32,
        /// Files there are.
        files: u32,
    },
    /// A record reaches past the end of its file.
    #[error(
        "{key} wants `{len}` bytes at `{offset}` of `{}`, which has `{file_len}`", path.display()
    )]
    ExtentRange {
        /// The record.
        key: Key,
        /// The file.
        path: Arc<Path>,
        /// Where the piece begins.
        offset: u64,
        /// Its length.
        len: u64,
        /// The file's length.
        file_len: u64,
    },
    /// A record does not fit in a slot, or two of its pieces overlap there.
    #[error(
        "{key} puts `{len}` bytes at `{slot_offset}` of a slot that is free from `{free_from}` to \
         `{slot_bytes}`"
    )]
    ExtentSlot {
        /// The record.
        key: Key,
        /// Where the piece would go in the slot.
        slot_offset: u64,
        /// Its length.
        len: u64,
        /// End of the piece before it.
        free_from: u64,
        /// Bytes a slot.
        slot_bytes: u64,
    },
    /// A verifier was given, but the host cannot see the slots.
    #[error("records cannot be checked in memory that the host cannot address (slot `{slot}`)")]
    VerifyNeedsHost {
        /// The first such slot.
        slot: u32,
    },
    /// Nobody has such a key.
    #[error("{key} does not exist: `{n_layers}` layers, `{n_experts}` experts in that layer")]
    UnknownKey {
        /// The key.
        key: Key,
        /// Layers there are.
        n_layers: u32,
        /// Experts of that layer (0 if there is no such layer).
        n_experts: u32,
    },
    /// The operating system could not read.
    #[error(
        "read of {key} failed in `{}` at `{offset}`: wanted `{wanted}` bytes, got `{got}`: {}",
        path.display(), os(*errno)
    )]
    Read {
        /// The record.
        key: Key,
        /// The file.
        path: Arc<Path>,
        /// Where the read began.
        offset: u64,
        /// Bytes asked for.
        wanted: u64,
        /// Bytes that came before the failure.
        got: u64,
        /// Why.
        errno: Option<i32>,
    },
    /// The file ended early: it was cut after it was opened.
    #[error(
        "`{}` ended while {key} was read at `{offset}`: wanted `{wanted}` bytes, got `{got}`",
        path.display()
    )]
    Truncated {
        /// The record.
        key: Key,
        /// The file.
        path: Arc<Path>,
        /// Where the read began.
        offset: u64,
        /// Bytes asked for.
        wanted: u64,
        /// Bytes that were there.
        got: u64,
    },
    /// The read did not come back in time.
    #[error(
        "read of {key} from `{}` at `{offset}` (`{wanted}` bytes) not back after `{waited_ms}` ms",
        path.display()
    )]
    TimedOut {
        /// The record.
        key: Key,
        /// The file.
        path: Arc<Path>,
        /// Where the read began.
        offset: u64,
        /// Bytes asked for.
        wanted: u64,
        /// How long it was given.
        waited_ms: u64,
    },
    /// The operating system could not read a row of a table.
    #[error(
        "read failed in `{}` at `{offset}`: wanted `{wanted}` bytes, got `{got}`: {}",
        path.display(), os(*errno)
    )]
    RowRead {
        /// The file.
        path: Arc<Path>,
        /// Where the read began.
        offset: u64,
        /// Bytes asked for.
        wanted: u64,
        /// Bytes that came before the failure.
        got: u64,
        /// Why.
        errno: Option<i32>,
    },
    /// The file ended inside a row of a table: it was cut after it was opened.
    #[error("`{}` ended at `{offset}`: wanted `{wanted}` bytes, got `{got}`", path.display())]
    RowTruncated {
        /// The file.
        path: Arc<Path>,
        /// Where the read began.
        offset: u64,
        /// Bytes asked for.
        wanted: u64,
        /// Bytes that were there.
        got: u64,
    },
    /// The read of a row of a table did not come back in time.
    #[error(
        "read from `{}` at `{offset}` (`{wanted}` bytes) not back after `{waited_ms}` ms",
        path.display()
    )]
    RowTimedOut {
        /// The file.
        path: Arc<Path>,
        /// Where the read began.
        offset: u64,
        /// Bytes asked for.
        wanted: u64,
        /// How long nothing came back.
        waited_ms: u64,
    },
    /// The verifier says that the record is not what it should be.
    #[error("{key} read from `{}` at `{offset}` is not what was written", path.display())]
    Corrupt {
        /// The record.
        key: Key,
        /// The file of its first piece.
        path: Arc<Path>,
        /// Where that begins.
        offset: u64,
    },
    /// An earlier read failed; what is resident is still served, nothing more is read.
    #[error("the store reads no more since an earlier failure: {first}")]
    Latched {
        /// That failure.
        first: Arc<StoreError>,
    },
    /// Nothing is being read and no slot can be taken: all are pinned.
    #[error(
        "no slot for {key} after `{waited_ms}` ms: `{pinned}` of `{slots}` pinned, nothing under \
         way\nwas the last wave submitted, and are its pins dropped?"
    )]
    NoSlot {
        /// The first key that waits.
        key: Key,
        /// Slots that someone holds.
        pinned: u32,
        /// Slots there are.
        slots: u32,
        /// How long nothing moved.
        waited_ms: u64,
    },
    /// A trace of routes cannot be read.
    #[error("trace line `{line}` is not `layer: expert expert ...` of known size: `{text}`")]
    Trace {
        /// 1-based line, or record of a binary trace.
        line: u64,
        /// What is there.
        text: Arc<str>,
    },
}

impl StoreError {
    /// The record that it is about, if it is about one.
    pub fn key(&self) -> Option<Key> {
        match self {
            Self::ExtentFile { key, .. }
            | Self::ExtentRange { key, .. }
            | Self::ExtentSlot { key, .. }
            | Self::UnknownKey { key, .. }
            | Self::Read { key, .. }
            | Self::Truncated { key, .. }
            | Self::TimedOut { key, .. }
            | Self::Corrupt { key, .. }
            | Self::NoSlot { key, .. } => Some(*key),
            Self::Latched { first } => first.key(),
            _ => None,
        }
    }
}

/// One key of a request that cannot be had; the others of the request are not touched by it.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{error}")]
pub struct FetchFailed {
    /// The key that was asked for.
    pub key: Key,
    /// Why it did not come.
    pub error: StoreError,
}

fn os(errno: Option<i32>) -> String {
    match errno {
        Some(errno) => format!("errno `{errno}`, {}", describe(errno)),
        None => "no errno".to_owned(),
    }
}

fn describe(errno: i32) -> String {
    let text = std::io::Error::from_raw_os_error(errno).to_string();
    text.split(" (os error").next().unwrap_or_default().to_lowercase()
}
