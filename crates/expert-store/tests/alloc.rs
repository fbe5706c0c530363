//! Once its queues have reached their size, a store allocates nothing.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use snowmelt_expert_store::{
    BlockSource, Extent, FetchSet, FileSpec, HostMemory, Key, MemorySource, PolicyOptions,
    PreadSource, RecordTable, Scope, SourceOptions, Store, StoreOptions, StrategyKind,
};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts what every thread allocates.
struct Counting;

static COUNT: AtomicU64 = AtomicU64::new(0);

// SAFETY: hands everything to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const LAYERS: u32 = 4;
const EXPERTS: u32 = 32;
const LEN: u64 = 20_000;

/// Tokens through all layers, with guesses for the next one and with more keys than slots at times.
fn tokens(
    store: &mut Store,
    set: &mut FetchSet,
    out: &mut Vec<snowmelt_expert_store::FetchResult>,
) {
    let mut keys = [Key { layer: 0, expert: 0 }; 8];
    let mut number = 1_u64;
    for _ in 0..60 {
        for layer in 0..LAYERS {
            for key in &mut keys {
                number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                *key = Key { layer, expert: (number >> 40) as u32 % EXPERTS };
            }
            store.request(&keys, set).unwrap();
            let next = Key { layer: (layer + 1) % LAYERS, expert: keys[0].expert };
            store.prefetch(&[next]).unwrap();
            loop {
                let more = store.take_ready(set, true, out).unwrap();
                for fetched in out.drain(..) {
                    assert!(fetched.is_ok());
                }
                if !more {
                    break;
                }
            }
            store.poll();
        }
    }
}

#[test]
fn steady_state_allocates_nothing() {
    let records = u64::from(LAYERS * EXPERTS);
    // A piece that is aligned and one that is not.
    let map = Arc::new(RecordTable::from_fn(LAYERS, EXPERTS, |key| {
        let i = u64::from(key.layer * EXPERTS + key.expert);
        vec![
            Extent { file: 0, offset: i * 4096, len: 4096, slot_offset: 0 },
            Extent { file: 0, offset: records * 4096 + i * LEN, len: LEN, slot_offset: 5000 },
        ]
    }));
    let bytes: Vec<u8> = (0..records * (4096 + LEN)).map(|i| i as u8).collect();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), &bytes).unwrap();
    let specs = [FileSpec { path: file.path().to_owned(), len: bytes.len() as u64 }];
    let options = SourceOptions { bounce_bytes: 8192, split_bytes: 8192, ..Default::default() };
    for strategy in [StrategyKind::default(), StrategyKind::Lru, StrategyKind::Mru] {
        #[cfg_attr(not(target_os = "linux"), expect(unused_mut))]
        let mut sources: Vec<Box<dyn BlockSource + Send>> = vec![
            Box::new(MemorySource::new([Arc::<[u8]>::from(&bytes[..])])),
            Box::new(PreadSource::open(&specs, &options).unwrap()),
        ];
        #[cfg(target_os = "linux")]
        match snowmelt_expert_store::UringSource::open(&specs, &options) {
            Ok(source) => sources.push(Box::new(source)),
            Err(error) => {
                let line = format!("SKIPPED part of a test: {error}\n");
                std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes()).unwrap();
            }
        }
        for source in sources {
            let name = source.name();
            let policy = PolicyOptions { strategy, scope: Scope::Global, idle_slots_max: 4 };
            let options = StoreOptions { policy, poison: true, ..Default::default() };
            let memory = Arc::new(HostMemory::new(28_672, 24).unwrap());
            let mut store = Store::open(memory, map.clone(), source, options).unwrap();
            let (mut set, mut out) = (FetchSet::with_capacity(8), Vec::with_capacity(16));
            tokens(&mut store, &mut set, &mut out);
            let before = COUNT.load(Ordering::Relaxed);
            tokens(&mut store, &mut set, &mut out);
            let allocated = COUNT.load(Ordering::Relaxed) - before;
            assert_eq!(allocated, 0, "{name}, {strategy:?}");
            assert!(store.stats().misses > 500 && store.stats().idle_records > 20, "{name}");
        }
    }
}
