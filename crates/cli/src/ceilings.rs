//! What the machine could do at best: reads from memory and from the disk.

use crate::interrupt::Unfinished;
use crate::output::{Ui, Unit};
use anyhow::{Context, Result, anyhow};
use snowmelt_expert_store::{
    BlockSource, FileSpec, HostMemory, PreadSource, Priority, Read, ReadMode, SlotMemory,
    SourceOptions, StoreError, Target,
};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of the file that is written where no model's own can be read.
const FILE_BYTES: u64 = 1 << 30;
/// Sizes of a read, about those of expert records.
const BLOCKS: [u64; 2] = [1 << 20, 2 << 20];
/// Reads under way at once.
const DEPTH: u32 = 16;
/// How long each size is measured.
const DISK_TIME: Duration = Duration::from_secs(4);
/// A read that takes longer has failed.
const PATIENCE: Duration = Duration::from_secs(30);

/// What a disk gave.
pub(crate) struct Disk {
    pub(crate) path: PathBuf,
    /// Whether the file is one that was written for the purpose.
    pub(crate) is_temporary: bool,
    pub(crate) source: &'static str,
    pub(crate) is_direct: bool,
    /// (bytes of a read, bytes a second)
    pub(crate) speeds: Vec<(u64, f64)>,
}

/// Random reads in `path`, a file or a folder in which one is written and removed.
pub(crate) fn disk(path: &Path, ui: Ui) -> Result<Disk> {
    let meta = std::fs::metadata(path)
        .with_context(|| format!("could not look at `{}`", path.display()))?;
    let written = if meta.is_dir() { Some(write_file(path, ui)?) } else { None };
    let file = written.as_ref().map_or(path, Unfinished::path);
    let len = std::fs::metadata(file)?.len();
    let blocks: Vec<u64> = BLOCKS.into_iter().filter(|block| *block <= len).collect();
    if blocks.is_empty() {
        return Err(anyhow!("`{}` is too small to measure reads of 1 MiB", file.display()));
    }
    let specs = [FileSpec { path: file.to_owned(), len }];
    let (mut source, is_direct) = open(&specs)?;
    let bar = ui.bar(blocks.len() as u64, "measuring the disk", Unit::Things("sizes"));
    let mut speeds = Vec::new();
    for block in blocks {
        speeds.push((block, measure(&mut *source, block)?));
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(Disk {
        path: path.to_owned(),
        is_temporary: written.is_some(),
        source: source.name(),
        is_direct,
        speeds,
    })
}

/// The fastest reader that skips the page cache, or one that does not where none does.
fn open(files: &[FileSpec]) -> Result<(Box<dyn BlockSource>, bool), StoreError> {
    let options = |mode| SourceOptions { mode, depth: DEPTH, threads: 8, ..Default::default() };
    #[cfg(target_os = "linux")]
    if let Ok(source) = snowmelt_expert_store::UringSource::open(files, &options(ReadMode::Direct))
    {
        return Ok((Box::new(source), true));
    }
    if let Ok(source) = PreadSource::open(files, &options(ReadMode::Direct)) {
        return Ok((Box::new(source), true));
    }
    Ok((Box::new(PreadSource::open(files, &options(ReadMode::Buffered))?), false))
}

/// Small, fast and good enough to scatter reads and to fill files that do not compress.
struct Scatter(u64);

impl Scatter {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Bytes a second of random reads of `block` bytes.
fn measure(source: &mut dyn BlockSource, block: u64) -> Result<f64> {
    let memory: Arc<dyn SlotMemory> = Arc::new(HostMemory::new(block as usize, DEPTH)?);
    let mut scatter = Scatter(0x9E37_79B9_7F4A_7C15);
    let places = (source.file_len(0) - block) / 4096 + 1;
    let mut read = |slot: u64| Read {
        id: slot,
        file: 0,
        offset: scatter.next() % places * 4096,
        len: block,
        target: Target::new(Arc::clone(&memory), slot as u32, 0, block as usize),
        priority: Priority::Demand,
    };
    for slot in 0..u64::from(DEPTH) {
        source.submit(read(slot));
    }
    let start = Instant::now();
    let (mut bytes, mut under_way) = (0, DEPTH);
    let mut elapsed = Duration::ZERO;
    let mut last = Instant::now();
    while under_way > 0 {
        let Some(done) = source.poll(Some(PATIENCE)) else {
            if last.elapsed() > PATIENCE {
                return Err(anyhow!("a read of `{}` does not come back", source.path(0).display()));
            }
            continue;
        };
        last = Instant::now();
        under_way -= 1;
        let got = done.result.map_err(|failure| {
            let reason = failure.errno.map(std::io::Error::from_raw_os_error);
            let reason = reason.map_or_else(|| "it ended".to_owned(), |error| error.to_string());
            anyhow!("could not read `{}`: {reason}", source.path(0).display())
        })?;
        if start.elapsed() < DISK_TIME {
            (bytes, elapsed) = (bytes + got, start.elapsed());
            source.submit(read(done.id));
            under_way += 1;
        }
    }
    Ok(bytes as f64 / elapsed.as_secs_f64())
}

fn write_file(folder: &Path, ui: Ui) -> Result<Unfinished> {
    let path = folder.join(format!(".snowmelt-disk-{}", std::process::id()));
    let could_not = || format!("could not write the {FILE_BYTES} bytes of `{}`", path.display());
    let mut file = File::create_new(&path).with_context(could_not)?;
    let unfinished = Unfinished::new(path.clone());
    let bar = ui.bar(FILE_BYTES, "writing a file to read", Unit::Bytes);
    let mut scatter = Scatter(0x2545_F491_4F6C_DD1D);
    let mut block = vec![0; 4 << 20];
    for _ in 0..FILE_BYTES / block.len() as u64 {
        let (words, _) = block.as_chunks_mut::<8>();
        for word in words {
            *word = scatter.next().to_le_bytes();
        }
        file.write_all(&block).with_context(could_not)?;
        bar.inc(block.len() as u64);
    }
    file.sync_all().with_context(could_not)?;
    bar.finish_and_clear();
    Ok(unfinished)
}
