//! Every source gives the same bytes, and refuses the same files.

use crate::world::*;
use snowmelt_expert_store::{
    Extent, FetchSet, FileSpec, HostMemory, Key, MmapSource, PolicyOptions, PreadSource, ReadMode,
    RecordTable, SlotMemory, SourceOptions, Store, StoreError, StoreOptions, StrategyKind,
};
use std::sync::Arc;

/// Asks for all records in several orders, through few slots, and compares every byte.
fn sweep(world: &World, memory: &Arc<impl Peek + 'static>, source: Source, verify: bool) {
    type Pieces = Vec<(usize, Vec<u8>)>;
    let expected: Vec<(Key, Pieces)> = keys(0, 0..EXPERTS)
        .into_iter()
        .chain(keys(1, 0..EXPERTS))
        .map(|key| {
            let owned = world.expected(key).into_iter().map(|(at, bytes)| (at, bytes.to_vec()));
            (key, owned.collect())
        })
        .collect();
    let check = move |key: Key, bytes: &[u8]| {
        let (_, pieces) = expected.iter().find(|entry| entry.0 == key).expect("a known key");
        pieces.iter().all(|(at, piece)| bytes[*at..].starts_with(piece))
    };
    let policy = PolicyOptions { strategy: StrategyKind::Mru, ..PolicyOptions::default() };
    let verify = verify.then(|| Arc::new(check) as snowmelt_expert_store::Verify);
    let options = StoreOptions { policy, poison: true, verify, ..StoreOptions::default() };
    let name = source.name();
    let mut store = Store::open(memory.clone(), world.map.clone(), source, options).unwrap();
    let (mut set, mut out) = (FetchSet::default(), Vec::new());
    for turn in 0..6 {
        for layer in 0..LAYERS {
            let wanted = keys(layer, (0..EXPERTS).map(|i| (i * 5 + turn) % EXPERTS));
            store.request(&wanted, &mut set).unwrap();
            let mut seen = Vec::new();
            loop {
                let more = store.take_ready(&mut set, true, &mut out).unwrap();
                for fetched in out.drain(..) {
                    let fetched = fetched.unwrap_or_else(|failed| panic!("{name}: {failed}"));
                    world.check(&**memory, &fetched);
                    seen.push(fetched.key);
                }
                if !more {
                    break;
                }
            }
            seen.sort_unstable();
            assert_eq!(seen, keys(layer, 0..EXPERTS), "{name}");
        }
        store.check();
    }
    let stats = store.stats();
    assert_eq!(stats.hits + stats.misses + stats.joins, 72, "{name}");
    assert!(stats.evictions > 0 && stats.waits > 0, "{name}: few slots were the point");
    assert_eq!(store.in_flight(), 0);
}

#[test]
fn all_sources_give_the_same_bytes() {
    for world in [World::packed(), World::folder()] {
        for options in [small_pieces(), SourceOptions::default()] {
            for source in world.sources(&options) {
                let memory = Arc::new(HostMemory::new(world.slot_bytes, 4).unwrap());
                sweep(&world, &memory, source, true);
            }
            for source in world.sources(&options) {
                sweep(&world, &Arc::new(DeviceMemory::new(world.slot_bytes, 4)), source, false);
            }
        }
    }
}

/// A direct read of the last, partial block of a piece would write past its end.
#[test]
fn a_partial_block_does_not_spill_into_the_next_piece() {
    let world = World::packed();
    // Read in this order by one thread: the piece that lies lower comes second.
    let extents = vec![
        Extent { file: 0, offset: 20_480, len: 3_000, slot_offset: 5_000 },
        Extent { file: 0, offset: 4_096, len: 5_000, slot_offset: 0 },
    ];
    for source in world.sources(&SourceOptions { threads: 1, ..small_pieces() }) {
        let map = Arc::new(RecordTable::from_fn(1, 1, |_| extents.clone()));
        let memory = Arc::new(HostMemory::new(12_288, 1).unwrap());
        let name = source.name();
        let mut store = Store::open(memory.clone(), map, source, StoreOptions::default()).unwrap();
        let (mut set, mut out) = (FetchSet::default(), Vec::new());
        store.request(&[Key { layer: 0, expert: 0 }], &mut set).unwrap();
        while store.take_ready(&mut set, true, &mut out).unwrap() {}
        let fetched = out.pop().unwrap().unwrap();
        for extent in &extents {
            let mut got = vec![0; extent.len as usize];
            memory.copy_out(fetched.slot, extent.slot_offset as usize, &mut got);
            let wanted = &world.files[0][extent.offset as usize..][..got.len()];
            assert!(got == wanted, "{name}: {extent:?}");
        }
    }
}

#[test]
fn direct_reads_are_what_this_machine_tests() {
    let world = World::packed();
    let options = SourceOptions { mode: ReadMode::Auto, ..small_pieces() };
    let source = PreadSource::open(&world.specs, &options).unwrap();
    use snowmelt_expert_store::BlockSource;
    if source.name() != "pread direct" {
        skip("direct reads are refused in the temporary folder");
    }
    assert_eq!(source.buffer_bytes(), options.pread_buffer_bytes());
    assert_eq!(source.buffer_bytes(), 3 * 8_192);
}

#[test]
fn another_length_is_refused_at_open() {
    let world = World::packed();
    let len = world.specs[0].len;
    let specs = [FileSpec { len: len + 1, ..world.specs[0].clone() }];
    let refusals = [
        MmapSource::open(&specs).err(),
        PreadSource::open(&specs, &SourceOptions::default()).err(),
    ];
    for error in refusals {
        let Some(StoreError::FileLength { path, wanted, got }) = error else { panic!("{error:?}") };
        assert_eq!((&*path, wanted, got), (&*specs[0].path, len + 1, len));
    }
}

#[test]
fn a_missing_file_is_named() {
    let specs = [FileSpec { path: "/nowhere/at/all".into(), len: 1 }];
    for mode in [ReadMode::Auto, ReadMode::Direct, ReadMode::Buffered] {
        let error = PreadSource::open(&specs, &SourceOptions { mode, ..Default::default() });
        let error = error.err().unwrap();
        assert!(matches!(error, StoreError::Open { errno: Some(2), .. }), "{error:?}");
        assert!(error.to_string().contains("`/nowhere/at/all`"), "{error}");
    }
}

#[test]
fn options_that_cannot_work_are_refused() {
    let options = SourceOptions { threads: 0, ..Default::default() };
    let error = PreadSource::open(&[], &options).err().unwrap();
    assert_eq!(error, StoreError::OptionTooSmall { option: "threads", got: 0, least: 1 });
}

fn open_error(map: RecordTable, memory: Arc<dyn SlotMemory>) -> StoreError {
    let source = Box::new(World::packed().memory_source());
    Store::open(memory, Arc::new(map), source, StoreOptions::default()).err().unwrap()
}

#[test]
fn records_that_lie_wrong_are_refused_at_open() {
    let memory = || Arc::new(HostMemory::new(8192, 2).unwrap());
    let one = |extents: &[Extent]| RecordTable::from_fn(1, 1, |_| extents.to_vec());
    let good = Extent { file: 0, offset: 0, len: 100, slot_offset: 0 };
    let key = Key { layer: 0, expert: 0 };
    let error = open_error(one(&[Extent { file: 1, ..good }]), memory());
    assert_eq!(error, StoreError::ExtentFile { key, file: 1, files: 1 });
    for offset in [10_000_000, u64::MAX - 10] {
        let error = open_error(one(&[Extent { offset, ..good }]), memory());
        assert!(matches!(error, StoreError::ExtentRange { offset: o, .. } if o == offset));
    }
    for bad in [
        vec![good, Extent { slot_offset: 99, ..good }],
        vec![Extent { slot_offset: 8100, ..good }],
        vec![Extent { slot_offset: u64::MAX, ..good }],
        vec![],
    ] {
        let error = open_error(one(&bad), memory());
        assert!(matches!(error, StoreError::ExtentSlot { .. }), "{error:?}");
    }
    let error = open_error(one(&[good]), Arc::new(DeviceMemory::new(4000, 1)));
    assert!(matches!(error, StoreError::SlotAlign { slot_bytes: 4000, .. }), "{error:?}");
    let error = open_error(one(&[good]), Arc::new(DeviceMemory::new(4096, 0)));
    assert!(matches!(error, StoreError::OptionTooSmall { option: "slots", .. }), "{error:?}");
}

#[test]
fn a_file_that_is_cut_while_it_is_read_is_an_error() {
    for cut in [0, 4096, 200_000, 200_001] {
        for index in 0.. {
            let world = World::packed();
            let Some(source) = world.file_sources(&small_pieces()).into_iter().nth(index) else {
                break;
            };
            let name = source.name();
            let memory = Arc::new(HostMemory::new(world.slot_bytes, 12).unwrap());
            let options = StoreOptions { poison: true, ..Default::default() };
            let mut store =
                Store::open(memory.clone(), world.map.clone(), source, options).unwrap();
            let file = std::fs::OpenOptions::new().write(true).open(&world.specs[0].path).unwrap();
            file.set_len(cut).unwrap();
            let (mut set, mut out) = (FetchSet::default(), Vec::new());
            store.request(&keys(0, 0..EXPERTS), &mut set).unwrap();
            while store.take_ready(&mut set, true, &mut out).unwrap() {}
            assert_eq!(out.len(), EXPERTS as usize);
            for result in out {
                match result {
                    Ok(fetched) => {
                        let end = u64::from(fetched.key.expert) * 73_728 + 70_001;
                        assert!(end <= cut, "{name}: {} past `{cut}`", fetched.key);
                        world.check(&*memory, &fetched);
                    }
                    Err(failed) => {
                        let StoreError::Truncated { key, path, offset, wanted, got } = failed.error
                        else {
                            panic!("{name}: {failed}")
                        };
                        assert_eq!((key, &*path), (failed.key, &*world.specs[0].path));
                        assert!(got < wanted && offset + wanted > cut, "{name}: {offset} {wanted}");
                    }
                }
            }
            assert!(matches!(store.failed(), Some(StoreError::Truncated { .. })));
        }
    }
}

#[test]
fn a_store_can_be_dropped_while_it_reads() {
    for world in [World::packed(), World::folder()] {
        for source in world.sources(&small_pieces()) {
            let memory = Arc::new(HostMemory::new(world.slot_bytes, 12).unwrap());
            let options = StoreOptions::default();
            let mut store =
                Store::open(memory.clone(), world.map.clone(), source, options).unwrap();
            let mut set = FetchSet::default();
            store.request(&keys(0, 0..EXPERTS), &mut set).unwrap();
            store.prefetch(&keys(1, 0..EXPERTS)).unwrap();
            drop(store);
            // No read keeps a share: the threads and the kernel are done with it.
            assert_eq!(Arc::strong_count(&memory), 1);
            drop(set);
        }
    }
}

#[test]
fn an_empty_set_and_an_unknown_key() {
    let world = World::packed();
    let memory = Arc::new(HostMemory::new(world.slot_bytes, 2).unwrap());
    let source = Box::new(world.memory_source());
    let mut store =
        Store::open(memory, world.map.clone(), source, StoreOptions::default()).unwrap();
    let (mut set, mut out) = (FetchSet::default(), Vec::new());
    assert_eq!(store.take_ready(&mut set, true, &mut out), Ok(false));
    for key in [Key { layer: 0, expert: EXPERTS }, Key { layer: LAYERS, expert: 0 }] {
        let error = store.request(&[Key { layer: 0, expert: 0 }, key], &mut set).unwrap_err();
        assert!(matches!(error, StoreError::UnknownKey { key: k, .. } if k == key), "{error}");
        assert!(store.prefetch(&[key]).is_err());
    }
    assert!(set.is_empty() && store.stats().misses == 0);
}

/// Pages of a file in the page cache, after those that nobody uses were dropped if `drop_first`.
#[cfg(target_os = "linux")]
#[expect(unsafe_code, reason = "no safe call tells")]
fn cached_pages(path: &std::path::Path, drop_first: bool) -> usize {
    use std::os::fd::AsRawFd;
    let file = std::fs::File::open(path).unwrap();
    let (fd, len) = (file.as_raw_fd(), file.metadata().unwrap().len() as usize);
    if drop_first {
        file.sync_all().unwrap();
        // SAFETY: takes no pointer.
        assert_eq!(unsafe { libc::posix_fadvise(fd, 0, 0, libc::POSIX_FADV_DONTNEED) }, 0);
    }
    // SAFETY: a mapping of its own, unmapped below, which nothing reads; `mincore` writes one byte
    // for each page of it.
    unsafe {
        let map = libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, fd, 0);
        assert_ne!(map, libc::MAP_FAILED);
        let mut pages = vec![0_u8; len.div_ceil(4096)];
        assert_eq!(libc::mincore(map, len, pages.as_mut_ptr()), 0);
        assert_eq!(libc::munmap(map, len), 0);
        pages.iter().filter(|&&page| page & 1 != 0).count()
    }
}

#[test]
#[cfg(target_os = "linux")]
fn no_source_leaves_page_cache_behind() {
    for index in 0.. {
        let world = World::packed();
        let path = &world.specs[0].path;
        let Some(source) = world.file_sources(&small_pieces()).into_iter().nth(index) else {
            break;
        };
        let written = cached_pages(path, false);
        if written == 0 {
            skip("the temporary folder has no page cache");
        }
        let before = cached_pages(path, true);
        let name = source.name();
        sweep(&world, &Arc::new(HostMemory::new(world.slot_bytes, 4).unwrap()), source, false);
        let after = cached_pages(path, false);
        assert!(after <= before + 12, "{name}: `{after}` pages, `{before}` before, of `{written}`");
    }
}
