//! Files with known bytes, memory to read them into, and every source there is.

use snowmelt_expert_store::{
    BlockSource, Extent, Fetched, FileSpec, HostMemory, Key, MemorySource, MmapSource, PreadSource,
    ReadMode, RecordMap, RecordTable, SlotMemory, SourceOptions, StoreError,
};
use std::io::Write;
use std::sync::{Arc, Mutex};

pub(crate) type Source = Box<dyn BlockSource + Send>;

/// splitmix64, as everywhere in the tests.
#[derive(Debug)]
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.roll() % n.max(1)
    }
}

/// Files and the records in them.
pub(crate) struct World {
    pub(crate) files: Vec<Vec<u8>>,
    pub(crate) specs: Vec<FileSpec>,
    pub(crate) map: Arc<RecordTable>,
    pub(crate) slot_bytes: usize,
    _dir: tempfile::TempDir,
}

pub(crate) const LAYERS: u32 = 2;
pub(crate) const EXPERTS: u32 = 6;

impl World {
    fn new(lens: &[usize], slot_bytes: usize, map: RecordTable) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut dice = Dice(7);
        let (mut files, mut specs) = (Vec::new(), Vec::new());
        for (i, &len) in lens.iter().enumerate() {
            // No 0xFF: that is the poison.
            let bytes: Vec<u8> = (0..len).map(|_| dice.below(255) as u8).collect();
            let path = dir.path().join(format!("file-{i}"));
            std::fs::write(&path, &bytes).unwrap();
            specs.push(FileSpec { path, len: len as u64 });
            files.push(bytes);
        }
        Self { files, specs, map: Arc::new(map), slot_bytes, _dir: dir }
    }

    /// One aligned extent a record; the last one ends with the file, inside a block.
    pub(crate) fn packed() -> Self {
        let (stride, len) = (73_728, 70_001);
        let map = RecordTable::from_fn(LAYERS, EXPERTS, |key| {
            let offset = stride * u64::from(key.layer * EXPERTS + key.expert);
            vec![Extent { file: 0, offset, len, slot_offset: 0 }]
        });
        let records = u64::from(LAYERS * EXPERTS);
        Self::new(&[((records - 1) * stride + len) as usize], 73_728, map)
    }

    /// Three extents a record in two files, at odd offsets of odd lengths, some packed tight in
    /// the slot and one at an aligned place of it.
    pub(crate) fn folder() -> Self {
        let lens = [30_011_u64, 517, 4_099];
        let (a, b) = (u64::from(LAYERS * EXPERTS) * (lens[0] + lens[1]) + 13, 40_000 * 12);
        let map = RecordTable::from_fn(LAYERS, EXPERTS, |key| {
            let i = u64::from(key.layer * EXPERTS + key.expert);
            let first = 13 + i * (lens[0] + lens[1]);
            vec![
                Extent { file: 0, offset: first, len: lens[0], slot_offset: 0 },
                Extent { file: 0, offset: first + lens[0], len: lens[1], slot_offset: lens[0] },
                // Aligned in the slot and, for every other record, in the file too.
                Extent { file: 1, offset: i * 6_144, len: lens[2], slot_offset: 32_768 },
            ]
        });
        Self::new(&[a as usize, b as usize], 40_960, map)
    }

    pub(crate) fn expected(&self, key: Key) -> Vec<(usize, &[u8])> {
        let piece = |extent: &Extent| {
            let from = &self.files[extent.file as usize][extent.offset as usize..];
            (extent.slot_offset as usize, &from[..extent.len as usize])
        };
        self.map.extents(key).iter().map(piece).collect()
    }

    pub(crate) fn check(&self, memory: &dyn Peek, fetched: &Fetched) {
        assert_eq!(fetched.slot, fetched.pin.slot());
        for (offset, bytes) in self.expected(fetched.key) {
            let mut got = vec![0; bytes.len()];
            memory.peek(fetched.slot, offset, &mut got);
            // Compared as a whole: the tests do it often.
            if got != bytes {
                let at = got.iter().zip(bytes).position(|(got, wanted)| got != wanted);
                panic!("{} in slot `{}`, piece at `{offset}`: {at:?}", fetched.key, fetched.slot);
            }
        }
    }

    pub(crate) fn memory_source(&self) -> MemorySource {
        MemorySource::new(self.files.iter().map(|file| Arc::<[u8]>::from(&file[..])))
    }

    /// Every source that this machine has; `options` decides how reads are cut.
    pub(crate) fn sources(&self, options: &SourceOptions) -> Vec<Source> {
        let mut sources: Vec<Source> = vec![Box::new(self.memory_source())];
        sources.extend(self.file_sources(options));
        sources
    }

    pub(crate) fn file_sources(&self, options: &SourceOptions) -> Vec<Source> {
        let mut sources: Vec<Source> = vec![Box::new(MmapSource::open(&self.specs).unwrap())];
        for mode in [ReadMode::Buffered, ReadMode::Direct] {
            let options = SourceOptions { mode, ..options.clone() };
            push(&mut sources, PreadSource::open(&self.specs, &options));
            #[cfg(target_os = "linux")]
            push(&mut sources, snowmelt_expert_store::UringSource::open(&self.specs, &options));
        }
        sources
    }
}

fn push<S: BlockSource + Send + 'static>(sources: &mut Vec<Source>, source: Result<S, StoreError>) {
    match source {
        Ok(source) => sources.push(Box::new(source)),
        Err(
            error @ (StoreError::DirectRefused { .. }
            | StoreError::UringRefused { .. }
            | StoreError::UringLacks { .. }),
        ) => skip(&error.to_string()),
        Err(error) => panic!("{error}"),
    }
}

/// Past the capture of test output (which holds `eprintln` back): nobody should believe that it
/// was tested.
pub(crate) fn skip(why: &str) {
    let line = format!("SKIPPED part of a test: {why}\n");
    std::io::stderr().write_all(line.as_bytes()).unwrap();
}

/// Small pieces, so that small files are cut as large ones are.
pub(crate) fn small_pieces() -> SourceOptions {
    SourceOptions {
        threads: 3,
        depth: 4,
        split_bytes: 16_384,
        bounce_bytes: 8_192,
        bounces: 2,
        ..SourceOptions::default()
    }
}

/// Memory that a test can look into.
pub(crate) trait Peek: SlotMemory {
    fn peek(&self, slot: u32, offset: usize, into: &mut [u8]);
}

impl Peek for HostMemory {
    fn peek(&self, slot: u32, offset: usize, into: &mut [u8]) {
        self.copy_out(slot, offset, into);
    }
}

/// Memory that the host cannot address.
pub(crate) struct DeviceMemory {
    slots: Vec<Mutex<Vec<u8>>>,
    slot_bytes: usize,
}

impl DeviceMemory {
    pub(crate) fn new(slot_bytes: usize, slots: u32) -> Self {
        Self { slots: (0..slots).map(|_| Mutex::new(vec![0; slot_bytes])).collect(), slot_bytes }
    }
}

impl SlotMemory for DeviceMemory {
    fn slots(&self) -> u32 {
        self.slots.len() as u32
    }
    fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }
    fn host(&self, _: u32) -> Option<*mut u8> {
        None
    }
    fn upload(&self, slot: u32, offset: usize, bytes: &[u8]) {
        self.slots[slot as usize].lock().unwrap()[offset..offset + bytes.len()]
            .copy_from_slice(bytes);
    }
}

impl Peek for DeviceMemory {
    fn peek(&self, slot: u32, offset: usize, into: &mut [u8]) {
        let slot = self.slots[slot as usize].lock().unwrap();
        into.copy_from_slice(&slot[offset..offset + into.len()]);
    }
}

pub(crate) fn keys(layer: u32, experts: impl IntoIterator<Item = u32>) -> Vec<Key> {
    experts.into_iter().map(|expert| Key { layer, expert }).collect()
}
