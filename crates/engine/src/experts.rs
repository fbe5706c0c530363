//! The expert seam: [`ExpertFetch`] over the store, slot memory over the backend's slab.

use crate::error::{EngineError, Result};
use crate::plan::{EngineOptions, Plan, Residency, source_options};
use snowmelt_backend::{
    Backend, ExpertFetch, ExpertSet, HostRecords, PinOwner, Ready, Slab, StepError,
};
use snowmelt_expert_store::{
    Blob, BlockSource, Extent, FetchResult, FetchSet, FileSpec, Key, MappedFiles, MemorySource,
    MmapSource, Pins, PreadSource, ReadMode, RecordTable, SlotMemory, SourceOptions, Stats, Store,
    StoreError, StoreOptions, Verify,
};
use snowmelt_model::{Census, Span};
use snowmelt_weights::{Bytes, Checkpoint, DataFile};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How experts are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Io {
    /// `io_uring` where it is allowed, else threads; memory where the model lies there.
    #[default]
    Auto,
    /// `io_uring`, past the page cache.
    Uring,
    /// Threads, past the page cache where the file system allows it.
    Pread,
    /// Threads, through the page cache.
    PreadBuffered,
    /// Copies out of a mapping.
    Mmap,
}

/// The backend's slab as the store sees it. Neither crate may know the other.
struct SlabMemory<S>(S);

impl<S: Slab> SlotMemory for SlabMemory<S> {
    fn slots(&self) -> u32 {
        self.0.slots()
    }
    fn slot_bytes(&self) -> usize {
        self.0.slot_bytes()
    }
    fn host(&self, slot: u32) -> Option<*mut u8> {
        self.0.host(slot)
    }
    fn upload(&self, slot: u32, offset: usize, bytes: &[u8]) {
        self.0.upload(slot, offset, bytes);
    }
}

/// The store's pins as the backend drops them.
struct StorePins(Pins);

impl PinOwner for StorePins {
    fn unpin(&self, slot: u32) {
        self.0.unpin(slot);
    }
}

/// Where the records of all layers lie.
pub(crate) fn record_table(census: &Census) -> RecordTable {
    let of_layer = |layer: u32| census.experts.iter().find(|table| table.layer == layer);
    let n_layers = census.experts.last().map_or(0, |table| table.layer + 1);
    let counts: Vec<u32> =
        (0..n_layers).map(|l| of_layer(l).map_or(0, |table| table.spans.len() as u32)).collect();
    RecordTable::from_layers(&counts, |key| {
        let table = of_layer(key.layer).expect("a key names a layer with experts");
        let extent = |span: &Span| Extent {
            file: span.file,
            offset: span.offset,
            len: span.len,
            slot_offset: span.record_offset,
        };
        table.spans[key.expert as usize].iter().map(extent).collect()
    })
}

/// Whether every record is read without a bounce buffer.
pub(crate) fn is_aligned(census: &Census) -> bool {
    let aligned = |n: u64| n.is_multiple_of(4096);
    census
        .experts
        .iter()
        .flat_map(|table| table.spans.iter().flatten())
        .all(|span| aligned(span.offset) && aligned(span.len) && aligned(span.record_offset))
}

pub(crate) fn is_in_memory(checkpoint: &Checkpoint) -> bool {
    checkpoint.files().iter().any(|file| file.memory.is_some())
}

fn files(checkpoint: &Checkpoint) -> Vec<FileSpec> {
    let spec = |file: &DataFile| FileSpec { path: file.path.clone(), len: file.len };
    checkpoint.files().iter().map(spec).collect()
}

fn blobs(checkpoint: &Checkpoint) -> Vec<Blob> {
    let blob = |file: &DataFile| match &file.memory {
        Some(Bytes::Static(bytes)) => Blob::from(*bytes),
        Some(Bytes::Shared(bytes)) => Blob::from(Arc::clone(bytes)),
        None => Blob::from(&[][..]),
    };
    checkpoint.files().iter().map(blob).collect()
}

/// The reader that `io` names.
pub(crate) fn open_source(
    checkpoint: &Checkpoint,
    io: Io,
    options: &SourceOptions,
) -> Result<Box<dyn BlockSource + Send>> {
    if is_in_memory(checkpoint) {
        return Ok(Box::new(MemorySource::new(blobs(checkpoint))));
    }
    let files = files(checkpoint);
    let pread = |mode| -> Result<Box<dyn BlockSource + Send>> {
        let options = SourceOptions { mode, ..options.clone() };
        Ok(Box::new(PreadSource::open(&files, &options)?))
    };
    match io {
        Io::Auto => uring(&files, options).or_else(|_| pread(ReadMode::Auto)),
        Io::Uring => uring(&files, options),
        Io::Pread => pread(ReadMode::Auto),
        Io::PreadBuffered => pread(ReadMode::Buffered),
        Io::Mmap => Ok(Box::new(MmapSource::open(&files)?)),
    }
}

#[cfg(target_os = "linux")]
fn uring(files: &[FileSpec], options: &SourceOptions) -> Result<Box<dyn BlockSource + Send>> {
    Ok(Box::new(snowmelt_expert_store::UringSource::open(files, options)?))
}

#[cfg(not(target_os = "linux"))]
fn uring(files: &[FileSpec], options: &SourceOptions) -> Result<Box<dyn BlockSource + Send>> {
    // The nearest that other systems have.
    Ok(Box::new(PreadSource::open(files, options)?))
}

/// Records used where the file is mapped, or where memory holds it.
#[derive(Debug)]
struct MappedRecords {
    files: Vec<MappedFile>,
    /// Of each slot.
    spans: Vec<Vec<Span>>,
}

#[derive(Debug)]
enum MappedFile {
    Map(MappedFiles, u32),
    Memory(Bytes),
}

impl HostRecords for MappedRecords {
    fn records(&self) -> u32 {
        self.spans.len() as u32
    }
    fn bytes(&self, slot: u32, range: Range<usize>) -> &[u8] {
        let at = range.start as u64;
        let holds =
            |span: &&Span| (span.record_offset..span.record_offset + span.len).contains(&at);
        let span = self.spans[slot as usize].iter().find(holds).expect("spans cover the record");
        let whole = match &self.files[span.file as usize] {
            MappedFile::Map(maps, index) => maps.bytes(*index),
            MappedFile::Memory(bytes) => bytes.as_ref(),
        };
        // A region is part of one tensor, and so of one span.
        &whole[(span.offset + at - span.record_offset) as usize..][..range.len()]
    }
}

fn mapped_records(checkpoint: &Checkpoint, census: &Census) -> Result<MappedRecords> {
    let files = match is_in_memory(checkpoint) {
        true => {
            let memory = |file: &DataFile| {
                MappedFile::Memory(file.memory.clone().unwrap_or(Bytes::Static(&[])))
            };
            checkpoint.files().iter().map(memory).collect()
        }
        false => {
            let maps = MappedFiles::open(&files(checkpoint))?;
            let count = checkpoint.files().len() as u32;
            (0..count).map(|index| MappedFile::Map(maps.clone(), index)).collect()
        }
    };
    let spans = census.experts.iter().flat_map(|table| table.spans.iter().cloned()).collect();
    Ok(MappedRecords { files, spans })
}

/// Sets that may be open at once: one being computed, one read ahead, one to spare.
const POOLED_SETS: usize = 3;

struct Shared {
    store: Store,
    /// Sets kept for their memory.
    pool: Vec<FetchSet>,
    arrived: Vec<FetchResult>,
}

/// [`ExpertFetch`] over a [`Store`].
pub struct StoreFetch<B: Backend> {
    slab: B::Slab,
    /// `None`: all experts are resident or mapped, or there are none.
    shared: Option<Arc<Mutex<Shared>>>,
    /// Drops the store's pins.
    pins: Arc<dyn PinOwner>,
    /// Slot of expert 0, by layer.
    resident: Vec<Option<u32>>,
    wave_experts: usize,
    waves_ahead: usize,
    keys: Vec<Key>,
}

impl<B: Backend> std::fmt::Debug for StoreFetch<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoreFetch")
            .field("slots", &self.slab.slots())
            .field("wave_experts", &self.wave_experts)
            .field("waves_ahead", &self.waves_ahead)
            .finish_non_exhaustive()
    }
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    // A panic under the lock leaves a store that latches or serves; it is never half-written.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<B: Backend> StoreFetch<B> {
    /// Allocates the slab; loads all experts where they are to be resident.
    pub(crate) fn open(
        b: &B,
        checkpoint: &Checkpoint,
        census: &Census,
        plan: &Plan,
        options: &EngineOptions,
        source: Option<Box<dyn BlockSource + Send>>,
    ) -> Result<Self> {
        let mut fetch = Self {
            slab: b.alloc_slab(plan.slot_bytes.max(4096) as usize, plan.slots.max(1)),
            shared: None,
            pins: Arc::new(()),
            resident: Vec::new(),
            wave_experts: plan.n_experts.max(1),
            waves_ahead: 1,
            keys: Vec::new(),
        };
        if census.experts.is_empty() {
            // Nothing to check reads of, but a promise to check.
            options.check_reads.then(|| verifier(checkpoint)).transpose()?;
            return Ok(fetch);
        }
        if plan.residency == Residency::Mapped {
            if options.check_reads {
                return Err(EngineError::Residency {
                    wanted: "mapped",
                    reason: "`--check-reads` compares what is read, and nothing is read here",
                });
            }
            let records = mapped_records(checkpoint, census)?;
            fetch.slab = b.adopt_slab(Arc::new(records)).ok_or(EngineError::Residency {
                wanted: "mapped",
                reason: "this backend cannot compute on memory that it does not own",
            })?;
            fetch.resident = first_slots(census);
            return Ok(fetch);
        }
        fetch.plan_waves(b, census, plan);
        let verify = options.check_reads.then(|| verifier(checkpoint)).transpose()?;
        let store_options = StoreOptions {
            policy: options.policy,
            read_timeout: options.read_timeout,
            poison: options.poison,
            verify,
            ..StoreOptions::default()
        };
        let source = match source {
            Some(source) => source,
            None => open_source(checkpoint, options.io, &source_options(is_aligned(census)))?,
        };
        let memory = Arc::new(SlabMemory(fetch.slab.clone()));
        let table = record_table(census);
        let store = Store::open(memory, Arc::new(table), source, store_options)?;
        fetch.pins = Arc::new(StorePins(store.pins()));
        let pool = (0..POOLED_SETS).map(|_| FetchSet::default()).collect();
        let arrived = Vec::with_capacity(plan.n_experts);
        fetch.keys.reserve(plan.n_experts);
        let shared = Shared { store, pool, arrived };
        if plan.residency == Residency::Resident {
            load_all(shared.store, census)?;
            fetch.resident = first_slots(census);
        } else {
            fetch.shared = Some(Arc::new(Mutex::new(shared)));
        }
        Ok(fetch)
    }

    /// One wave being fetched and one for each unfinished submission; one more, to be read ahead,
    /// where there are slots for it.
    fn plan_waves(&mut self, b: &B, census: &Census, plan: &Plan) {
        let shares = b.submissions_in_flight() + 1;
        let (slots, top_k) = (plan.slots as usize, census.limits.top_k);
        let two = slots / (shares + 1);
        (self.wave_experts, self.waves_ahead) =
            if two >= top_k { (two, 2) } else { (slots / shares, 1) };
    }

    /// Counters of the store; zero where nothing streams.
    pub(crate) fn stats(&self) -> Stats {
        self.shared.as_ref().map_or_else(Stats::default, |shared| lock(shared).store.stats())
    }

    /// What the store reads with.
    pub(crate) fn source_name(&self) -> Option<&'static str> {
        self.shared.as_ref().map(|shared| lock(shared).store.source_name())
    }

    /// The first failure, after which nothing more is read.
    pub(crate) fn failed(&self) -> Option<StoreError> {
        self.shared.as_ref().and_then(|shared| lock(shared).store.failed().cloned())
    }
}

fn first_slots(census: &Census) -> Vec<Option<u32>> {
    let mut slots = vec![None; census.experts.last().map_or(0, |table| table.layer as usize + 1)];
    let mut next = 0;
    for table in &census.experts {
        slots[table.layer as usize] = Some(next);
        next += table.spans.len() as u32;
    }
    slots
}

/// Reads every expert into the slot of its number.
fn load_all(mut store: Store, census: &Census) -> Result<()> {
    let (mut set, mut out, mut next) = (FetchSet::default(), Vec::new(), 0);
    for table in &census.experts {
        let layer = table.layer;
        let keys: Vec<Key> =
            (0..table.spans.len() as u32).map(|expert| Key { layer, expert }).collect();
        store.request(&keys, &mut set)?;
        let mut more = true;
        while more {
            more = store.take_ready(&mut set, true, &mut out)?;
            for fetched in out.drain(..) {
                let fetched = fetched.map_err(|failed| failed.error)?;
                let wanted = next + fetched.key.expert;
                assert_eq!(fetched.slot, wanted, "empty slots are filled in ascending order");
            }
        }
        next += table.spans.len() as u32;
    }
    Ok(())
}

/// Compares records with the digests of the container.
fn verifier(checkpoint: &Checkpoint) -> Result<Verify> {
    let Some(packed) = checkpoint.packed() else {
        let origin = checkpoint.origin().to_owned();
        return Err(EngineError::NoDigests { origin });
    };
    let layers: Vec<_> = packed
        .expert_layers()
        .iter()
        .map(|layer| {
            let digests: Vec<[u8; 32]> =
                (0..layer.n_experts).map(|e| packed.record_digest(layer.layer, e)).collect();
            (layer.layer, layer.record_bytes as usize, digests)
        })
        .collect();
    Ok(Arc::new(move |key: Key, bytes: &[u8]| {
        let layer = layers.iter().find(|(layer, ..)| *layer == key.layer);
        layer.is_some_and(|(_, len, digests)| {
            let record = bytes.get(..*len);
            let digest = record.map(|record| *blake3::hash(record).as_bytes());
            digest == Some(digests[key.expert as usize])
        })
    }))
}

impl<B: Backend> ExpertFetch<B> for StoreFetch<B> {
    type Set = StoreSet;

    fn slab(&self) -> &B::Slab {
        &self.slab
    }

    fn wave_experts(&self) -> usize {
        self.wave_experts
    }

    fn waves_ahead(&self) -> usize {
        self.waves_ahead
    }

    fn resident(&self, layer: u32) -> Option<u32> {
        self.resident.get(layer as usize).copied().flatten()
    }

    fn fetch(&mut self, layer: u32, experts: &[u32]) -> Result<StoreSet, StepError> {
        let (got, most) = (experts.len(), self.wave_experts);
        assert!(got <= most, "{got} experts in a wave of {most}");
        let shared = self.shared.as_ref().expect("a layer that is not resident is streamed");
        self.keys.clear();
        self.keys.extend(experts.iter().map(|&expert| Key { layer, expert }));
        let mut guard = lock(shared);
        let mut set = guard.pool.pop().unwrap_or_default();
        guard.store.request(&self.keys, &mut set).map_err(store_failed)?;
        drop(guard);
        Ok(StoreSet { shared: Arc::clone(shared), pins: Arc::clone(&self.pins), set })
    }
}

fn store_failed(error: StoreError) -> StepError {
    StepError::Store { source: Arc::new(error) }
}

/// Experts under way; a read that is abandoned still lands in its slot.
pub struct StoreSet {
    shared: Arc<Mutex<Shared>>,
    pins: Arc<dyn PinOwner>,
    set: FetchSet,
}

impl std::fmt::Debug for StoreSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoreSet").field("set", &self.set).finish_non_exhaustive()
    }
}

impl Drop for StoreSet {
    fn drop(&mut self) {
        let mut set = std::mem::take(&mut self.set);
        set.clear();
        lock(&self.shared).pool.push(set);
    }
}

impl ExpertSet for StoreSet {
    fn next_ready(
        &mut self,
        ready: &mut Vec<Ready>,
        failed: &mut Vec<(u32, StepError)>,
    ) -> Result<bool, StepError> {
        if self.set.is_empty() {
            return Ok(false);
        }
        let mut guard = lock(&self.shared);
        let Shared { store, arrived, .. } = &mut *guard;
        store.take_ready(&mut self.set, true, arrived).map_err(store_failed)?;
        for result in arrived.drain(..) {
            match result {
                Ok(fetched) => {
                    let owner = Arc::clone(&self.pins);
                    ready.push(Ready::new(fetched.key.expert, fetched.pin.leak(), owner));
                }
                Err(error) => {
                    let Key { layer, expert } = error.key;
                    let source = Arc::new(error.error);
                    failed.push((expert, StepError::Expert { layer, expert, source }));
                }
            }
        }
        Ok(true)
    }
}
