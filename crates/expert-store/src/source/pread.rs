//! Reads by a pool of threads, each in a plain positioned read.

use super::file::Files;
use super::queue::{Cut, Piece, ReadQueue};
use super::{BLOCK, BlockSource, Completion, Read, ReadFailure, SourceOptions};
use crate::error::StoreError;
use crate::key::FileSpec;
use crate::memory::anonymous;
use crate::raw;
use memmap2::MmapMut;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long the drop waits for reads under way before it leaves them to their threads.
const DROP_WAIT: Duration = Duration::from_secs(10);

/// A pool of reading threads. Works everywhere; one or two threads keep most disks busy.
#[derive(Debug)]
pub struct PreadSource {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    buffer_bytes: usize,
}

#[derive(Debug)]
struct Shared {
    files: Files,
    state: Mutex<State>,
    /// There is something to read, or nothing ever again.
    work: Condvar,
    /// A read is over, or a thread has ended.
    done: Condvar,
}

#[derive(Debug)]
struct State {
    queue: ReadQueue,
    alive: u32,
    stop: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No code that can panic runs under the lock but our own assertions; what they say is
        // worth more than the poison they leave.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PreadSource {
    /// Opens the files and starts the threads.
    ///
    /// # Errors
    /// A file that cannot be opened or has another length; direct reads that were insisted on and
    /// are refused; threads or buffers that cannot be had.
    pub fn open(files: &[FileSpec], options: &SourceOptions) -> Result<Self, StoreError> {
        options.check()?;
        let files = Files::open(files, options.mode)?;
        let cut = Cut {
            direct: files.direct,
            split_bytes: u64::from(options.split_bytes),
            bounce_bytes: options.bounce_len() as u64,
        };
        let queue = ReadQueue::new(cut, options.threads);
        let state = Mutex::new(State { queue, alive: 0, stop: false });
        let shared = Shared { files, state, work: Condvar::new(), done: Condvar::new() };
        let mut source = Self {
            shared: Arc::new(shared),
            threads: Vec::new(),
            buffer_bytes: options.pread_buffer_bytes(),
        };
        for index in 0..options.threads {
            let bounce = anonymous("bounce buffer", options.bounce_len())?;
            let shared = Arc::clone(&source.shared);
            let name = format!("read-{index}");
            source.shared.lock().alive += 1;
            let spawned =
                std::thread::Builder::new().name(name).spawn(move || work(&shared, bounce));
            let thread = spawned.map_err(|error| {
                source.shared.lock().alive -= 1;
                StoreError::Setup { what: "thread", bytes: 0, errno: error.raw_os_error() }
            })?;
            source.threads.push(thread);
        }
        Ok(source)
    }
}

/// Says that its thread has ended, however it ended.
struct Alive<'a>(&'a Shared);

impl Drop for Alive<'_> {
    fn drop(&mut self) {
        self.0.lock().alive -= 1;
        self.0.done.notify_all();
    }
}

fn work(shared: &Shared, mut bounce: MmapMut) {
    let _alive = Alive(shared);
    let mut state = shared.lock();
    loop {
        if state.stop {
            return;
        }
        let Some(piece) = state.queue.next(true) else {
            state = shared.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        drop(state);
        let result = run(&shared.files, &piece, &mut bounce);
        let job = piece.job;
        // Before the read is called over: no share of the memory is held beyond that.
        drop(piece);
        state = shared.lock();
        state.queue.finish(job, result);
        shared.done.notify_all();
    }
}

/// Reads one piece.
fn run(files: &Files, piece: &Piece, bounce: &mut [u8]) -> Result<(), ReadFailure> {
    let file = &files.list[piece.file as usize];
    let span = piece.span;
    let (got, result) = if span.bounce {
        let window = &mut bounce[..span.len as usize];
        let read = file.read_full(window, span.offset);
        if read.0 as u64 >= span.lead + span.useful {
            piece.target.write(0, &window[span.lead as usize..][..span.useful as usize]);
        }
        read
    } else {
        let read = |bytes: &mut [u8]| file.read_full(bytes, span.offset);
        piece.target.with_host(0, span.len as usize, read).expect("no bounce: host memory")
    };
    if !files.direct {
        // Whole pages only are dropped.
        let start = span.offset / BLOCK * BLOCK;
        raw::advise_done(
            &file.file,
            start,
            (span.offset + span.len).next_multiple_of(BLOCK) - start,
        );
    }
    if got as u64 >= span.lead + span.useful {
        return Ok(());
    }
    Err(piece.failure(got as u64, result.err().and_then(|error| error.raw_os_error())))
}

impl BlockSource for PreadSource {
    fn name(&self) -> &'static str {
        if self.shared.files.direct { "pread direct" } else { "pread buffered" }
    }
    fn files(&self) -> u32 {
        self.shared.files.list.len() as u32
    }
    fn file_len(&self, file: u32) -> u64 {
        self.shared.files.list[file as usize].len
    }
    fn path(&self, file: u32) -> &Arc<Path> {
        &self.shared.files.list[file as usize].path
    }
    fn buffer_bytes(&self) -> usize {
        self.buffer_bytes
    }
    fn reserve(&mut self, reads: usize) {
        self.shared.lock().queue.reserve(reads);
    }
    fn submit(&mut self, read: Read) {
        self.shared.lock().queue.push(read);
        self.shared.work.notify_all();
    }
    fn cancel(&mut self, id: u64) -> bool {
        self.shared.lock().queue.cancel(id)
    }
    fn promote(&mut self, id: u64) {
        self.shared.lock().queue.promote(id);
        self.shared.work.notify_all();
    }
    fn poll(&mut self, wait: Option<Duration>) -> Option<Completion> {
        let mut state = self.shared.lock();
        let done = state.queue.take_done();
        let (None, Some(wait)) = (&done, wait) else { return done };
        let waited = self.shared.done.wait_timeout(state, wait);
        state = waited.unwrap_or_else(PoisonError::into_inner).0;
        state.queue.take_done()
    }
}

impl Drop for PreadSource {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.stop = true;
        state.queue.clear();
        self.shared.work.notify_all();
        let start = Instant::now();
        while state.alive > 0 {
            let Some(left) = DROP_WAIT.checked_sub(start.elapsed()) else {
                // A thread is stuck in the kernel. It owns its buffer and a share of the memory
                // that it writes to, so leaving it alone is safe; joining it would hang.
                return;
            };
            let waited = self.shared.done.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(state);
        for thread in self.threads.drain(..) {
            // A panic of a thread has been reported by its own message.
            let _ = thread.join();
        }
    }
}
