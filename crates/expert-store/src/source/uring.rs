//! Reads by the kernel's ring: no threads, several at once.
#![allow(unsafe_code)]

use super::file::Files;
use super::queue::{Cut, Piece, ReadQueue};
use super::{BLOCK, BlockSource, Completion, Read, SourceOptions};
use crate::error::StoreError;
use crate::key::FileSpec;
use crate::memory::anonymous;
use crate::raw;
use io_uring::{IoUring, Probe, opcode, types};
use memmap2::MmapMut;
use std::fmt;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the drop waits for reads in the kernel before it leaks what they write to.
const DROP_WAIT: Duration = Duration::from_secs(10);

/// Reads through `io_uring`. Linux 5.11 or newer, and often forbidden in containers, which
/// [`open`](Self::open) finds out.
pub struct UringSource {
    files: Files,
    queue: ReadQueue,
    /// Always there but in the drop.
    kernel: Option<Kernel>,
    /// Reads that the kernel has.
    in_kernel: u32,
    buffer_bytes: usize,
}

/// What the kernel may write to, and the ring that tells when it does not any more.
struct Kernel {
    ring: IoUring,
    bounces: Vec<MmapMut>,
    free_bounces: Vec<u32>,
    running: Vec<Option<Running>>,
    free: Vec<u32>,
}

struct Running {
    piece: Piece,
    bounce: Option<u32>,
    /// Bytes of the span that came so far.
    got: u64,
}

impl fmt::Debug for UringSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UringSource")
            .field("files", &self.files)
            .field("queue", &self.queue)
            .field("in_kernel", &self.in_kernel)
            .finish_non_exhaustive()
    }
}

impl UringSource {
    /// Opens the files and the ring.
    ///
    /// # Errors
    /// [`StoreError::UringRefused`] or [`StoreError::UringLacks`] where the kernel or the container
    /// does not permit it; a file that cannot be opened or has another length; direct reads that
    /// were insisted on and are refused.
    pub fn open(files: &[FileSpec], options: &SourceOptions) -> Result<Self, StoreError> {
        options.check()?;
        let ring = open_ring(options.depth)?;
        let files = Files::open(files, options.mode)?;
        let cut = Cut {
            direct: files.direct,
            split_bytes: u64::from(options.split_bytes),
            bounce_bytes: options.bounce_len() as u64,
        };
        let bounce = |_| anonymous("bounce buffer", options.bounce_len());
        let kernel = Kernel {
            ring,
            bounces: (0..options.bounces).map(bounce).collect::<Result<_, _>>()?,
            free_bounces: (0..options.bounces).collect(),
            running: (0..options.depth).map(|_| None).collect(),
            free: (0..options.depth).collect(),
        };
        Ok(Self {
            files,
            queue: ReadQueue::new(cut, options.depth),
            kernel: Some(kernel),
            in_kernel: 0,
            buffer_bytes: options.uring_buffer_bytes(),
        })
    }

    fn kernel(&mut self) -> &mut Kernel {
        self.kernel.as_mut().expect("only the drop takes it")
    }

    /// Gives the kernel as many reads as it may have.
    fn fill(&mut self) {
        let mut pushed = false;
        loop {
            let kernel = self.kernel.as_mut().expect("only the drop takes it");
            if kernel.free.is_empty() {
                break;
            }
            let Some(piece) = self.queue.next(!kernel.free_bounces.is_empty()) else { break };
            let bounce = piece.span.bounce.then(|| kernel.free_bounces.pop().expect("looked at"));
            let index = kernel.free.pop().expect("looked at");
            kernel.running[index as usize] = Some(Running { piece, bounce, got: 0 });
            self.push(index);
            pushed = true;
        }
        if pushed {
            self.enter();
        }
    }

    /// Queues the rest of a running read.
    fn push(&mut self, index: u32) {
        let kernel = self.kernel.as_mut().expect("only the drop takes it");
        let running = kernel.running[index as usize].as_ref().expect("it is running");
        let (span, got) = (running.piece.span, running.got);
        let start = match running.bounce {
            Some(bounce) => kernel.bounces[bounce as usize].as_mut_ptr(),
            None => running.piece.target.host().expect("no bounce: host memory"),
        };
        let fd = types::Fd(self.files.list[running.piece.file as usize].file.as_raw_fd());
        let (at, len) = (start.wrapping_add(got as usize), (span.len - got) as u32);
        let entry = opcode::Read::new(fd, at, len)
            .offset(span.offset + got)
            .build()
            .user_data(index.into());
        // SAFETY: the range lies in a bounce buffer of at least `span.len` bytes or in the target's
        // room (`Cut::span` keeps to both), nobody else touches either before the completion, and
        // both live until then: `Kernel` owns the buffers and, in `running`, a share of the slots'
        // memory, and the drop leaks it as a whole while the kernel still has reads.
        let pushed = unsafe { kernel.ring.submission().push(&entry) };
        pushed.expect("as many entries in the ring as reads at once");
        self.in_kernel += 1;
    }

    /// Hands the queued entries to the kernel.
    fn enter(&mut self) {
        // A full kernel (EAGAIN, EBUSY) or a signal leaves them queued for the next call; any other
        // refusal shows as a read that does not come back.
        let _ = self.kernel().ring.submit();
    }

    fn wait(&mut self, wait: Duration) {
        let time = types::Timespec::from(wait);
        let args = types::SubmitArgs::new().timespec(&time);
        // Time is up (ETIME), or as above.
        let _ = self.kernel().ring.submitter().submit_with_args(1, &args);
    }

    /// Takes all completions of the kernel.
    fn reap(&mut self) {
        let mut again = false;
        loop {
            let next = self.kernel().ring.completion().next();
            let Some(entry) = next else { break };
            self.in_kernel -= 1;
            again |= self.over(entry.user_data() as u32, entry.result());
        }
        if again {
            self.enter();
        }
    }

    /// One read of the kernel is over. Returns whether the rest of it was queued.
    fn over(&mut self, index: u32, result: i32) -> bool {
        let direct = self.files.direct;
        let kernel = self.kernel.as_mut().expect("only the drop takes it");
        let running = kernel.running[index as usize].as_mut().expect("it was running");
        let (span, file) = (running.piece.span, &self.files.list[running.piece.file as usize]);
        running.got += u64::try_from(result).unwrap_or(0);
        let got = running.got;
        let enough = got >= span.lead + span.useful;
        let retry = matches!(-result, libc::EINTR | libc::EAGAIN);
        let ended = result == 0 || (direct && !got.is_multiple_of(BLOCK));
        if retry || (result > 0 && !enough && !ended) {
            self.push(index);
            return true;
        }
        let Running { piece, bounce, .. } =
            kernel.running[index as usize].take().expect("it was running");
        if !direct {
            let start = span.offset / BLOCK * BLOCK;
            let end = (span.offset + span.len).next_multiple_of(BLOCK);
            raw::advise_done(&file.file, start, end - start);
        }
        if let Some(bounce) = bounce {
            if enough {
                let bytes = &kernel.bounces[bounce as usize][span.lead as usize..];
                piece.target.write(0, &bytes[..span.useful as usize]);
            }
            kernel.free_bounces.push(bounce);
        }
        kernel.free.push(index);
        let result = if enough {
            Ok(())
        } else {
            // A refusal past the end of a file that was cut is the cut, not the refusal.
            let cut = span.offset + got >= file.current_len();
            Err(piece.failure(got, (result < 0 && !cut).then_some(-result)))
        };
        let job = piece.job;
        drop(piece);
        self.queue.finish(job, result);
        false
    }
}

fn open_ring(depth: u32) -> Result<IoUring, StoreError> {
    let refused = |error: io::Error| StoreError::UringRefused { errno: error.raw_os_error() };
    let ring = IoUring::builder().build(depth.next_power_of_two()).map_err(refused)?;
    if !ring.params().is_feature_ext_arg() {
        return Err(StoreError::UringLacks { feature: "waiting with a time-out" });
    }
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe).map_err(refused)?;
    if !probe.is_supported(opcode::Read::CODE) {
        return Err(StoreError::UringLacks { feature: "read" });
    }
    Ok(ring)
}

impl BlockSource for UringSource {
    fn name(&self) -> &'static str {
        if self.files.direct { "uring direct" } else { "uring buffered" }
    }
    fn files(&self) -> u32 {
        self.files.list.len() as u32
    }
    fn file_len(&self, file: u32) -> u64 {
        self.files.list[file as usize].len
    }
    fn path(&self, file: u32) -> &Arc<Path> {
        &self.files.list[file as usize].path
    }
    fn buffer_bytes(&self) -> usize {
        self.buffer_bytes
    }
    fn reserve(&mut self, reads: usize) {
        self.queue.reserve(reads);
    }
    fn submit(&mut self, read: Read) {
        self.queue.push(read);
        self.fill();
    }
    fn cancel(&mut self, id: u64) -> bool {
        self.queue.cancel(id)
    }
    fn promote(&mut self, id: u64) {
        self.queue.promote(id);
        self.fill();
    }
    fn poll(&mut self, wait: Option<Duration>) -> Option<Completion> {
        if let Some(done) = self.queue.take_done() {
            return Some(done);
        }
        self.reap();
        self.fill();
        let done = self.queue.take_done();
        let (None, Some(wait)) = (&done, wait) else { return done };
        if self.in_kernel == 0 {
            return None;
        }
        self.wait(wait);
        self.reap();
        self.fill();
        self.queue.take_done()
    }
}

impl Drop for UringSource {
    fn drop(&mut self) {
        self.queue.clear();
        let start = Instant::now();
        while self.in_kernel > 0 && start.elapsed() < DROP_WAIT {
            self.wait(Duration::from_millis(100));
            self.reap();
        }
        if self.in_kernel > 0 {
            // The kernel may still write to the buffers and the slots: they stay for ever.
            std::mem::forget(self.kernel.take());
        }
    }
}
