//! Slots, eviction policy, planned and speculative reads, and the sources they read from.
//!
//! A record (one routed expert of one layer) lies in one or more byte ranges of one or more
//! files. A [`Store`] brings records into the slots of a bounded memory, hands them out with
//! pins, and evicts what is not pinned. It knows keys and byte ranges, never a tensor, a model or
//! a GPU, so the same store serves host memory and device memory.
//!
//! - [`Policy`] decides: a pure state machine without I/O, driven by [`Store`] and, over recorded
//!   traces, by [`sim`].
//! - [`BlockSource`] reads: [`PreadSource`], `UringSource` (Linux), [`MmapSource`],
//!   [`MemorySource`], and [`FaultSource`] around any of them.
//! - [`RowStore`] brings single rows of tables into a cache of their own.
//! - [`SlotMemory`] holds: implemented by whoever owns the memory; [`HostMemory`] is a plain one.
//!
//! # Example
//!
//! ```
//! use snowmelt_expert_store::{
//!     Extent, FetchSet, HostMemory, Key, MemorySource, RecordTable, SlotMemory, Store,
//!     StoreOptions,
//! };
//! use std::sync::Arc;
//!
//! // Four records of 4096 bytes in one blob, two slots.
//! let blob: Arc<[u8]> = (0..4 * 4096).map(|i| (i / 4096) as u8).collect();
//! let map = RecordTable::from_fn(1, 4, |key| {
//!     let offset = u64::from(key.expert) * 4096;
//!     vec![Extent { file: 0, offset, len: 4096, slot_offset: 0 }]
//! });
//! let memory = Arc::new(HostMemory::new(4096, 2)?);
//! let source = Box::new(MemorySource::new([blob]));
//! let mut store = Store::open(memory.clone(), Arc::new(map), source, StoreOptions::default())?;
//!
//! let (mut set, mut out) = (FetchSet::default(), Vec::new());
//! store.request(&[Key { layer: 0, expert: 3 }], &mut set)?;
//! while store.take_ready(&mut set, true, &mut out)? {}
//! let fetched = out.pop().expect("one key was asked for")?;
//! let mut byte = [0];
//! memory.copy_out(fetched.slot, 100, &mut byte);
//! assert_eq!(byte, [3]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod clock;
mod error;
mod key;
mod mapped;
mod memory;
pub mod policy;
mod raw;
mod rng;
mod rows;
pub mod sim;
mod source;
mod stats;
mod store;

pub use clock::{Clock, ManualClock, SystemClock};
pub use error::{FetchFailed, StoreError};
pub use key::{Extent, FileSpec, Key, RecordMap, RecordTable};
pub use mapped::MappedFiles;
pub use memory::{HostMemory, SLOT_ALIGN, SlotMemory};
pub use policy::{Pin, Pins, Policy, PolicyOptions, Scope, StrategyKind};
pub use rows::{RowOptions, RowSpan, RowSpans, RowStats, RowStore};
#[cfg(target_os = "linux")]
pub use source::UringSource;
pub use source::{
    Blob, BlockSource, Completion, Fault, FaultCounts, FaultKind, FaultRates, FaultSource,
    FaultWhen, MemorySource, MmapSource, PreadSource, Priority, Read, ReadFailure, ReadMode,
    SourceOptions, Target,
};
pub use stats::{LayerStats, Stats};
pub use store::{FetchResult, FetchSet, Fetched, Store, StoreOptions, Verify};
