//! The backend: what is decided at open, and what every verb begins with.
#![allow(unsafe_code)]

use crate::buf::CpuBuf;
use crate::isa::{CpuError, Isa, IsaChoice};
use crate::pool::{Pool, share};
use crate::quantise::Rounding;
use crate::scratch::{Scratch, Sizes};
use crate::simd::{Kernel, dispatch};
use crate::view::Mat;
use snowmelt_backend::{BufType, Pass, Ready, Routed, Routes, StepError, View};
use snowmelt_weights::Encoding;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

/// How `linear` and experts see their activations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Activations {
    /// 16 bits beside quantised weights, f32 beside others.
    #[default]
    Auto,
    /// f32 everywhere, the oracle's arithmetic: quantised weights are decoded.
    F32,
    /// Rounded to 16 bits in blocks of 32, everywhere.
    I16,
    /// Rounded to 8 bits in blocks of 32, everywhere.
    I8,
}

impl Activations {
    /// All modes.
    pub const ALL: [Self; 4] = [Self::Auto, Self::F32, Self::I16, Self::I8];

    /// Name on the command line and in snapshots.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::F32 => "f32",
            Self::I16 => "i16",
            Self::I8 => "i8",
        }
    }

    /// How activations beside this encoding are rounded.
    pub(crate) fn rounding(self, encoding: Encoding) -> Option<Rounding> {
        match self {
            Self::Auto => encoding.is_quantised().then_some(Rounding::Wide),
            Self::F32 => None,
            Self::I16 => Some(Rounding::Wide),
            Self::I8 => Some(Rounding::Narrow),
        }
    }
}

impl fmt::Display for Activations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Activations {
    type Err = CpuError;

    /// # Errors
    /// [`CpuError::UnknownActivations`] with the name.
    fn from_str(name: &str) -> Result<Self, CpuError> {
        let found = Self::ALL.into_iter().find(|mode| mode.name() == name);
        found.ok_or_else(|| CpuError::UnknownActivations { name: name.to_owned() })
    }
}

/// What is decided at open.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuOptions {
    /// Threads, the caller included; 0: all that this process may use.
    pub threads: usize,
    /// Rounding of activations.
    pub activations: Activations,
    /// Instructions.
    pub isa: IsaChoice,
    /// Ask for huge pages where memory is large. Slots then take memory in steps of 2 MiB.
    pub huge_pages: bool,
    /// Fill buffers and slots with NaN at open. It touches all of their memory.
    pub poison: bool,
}

/// What backend, passes and buffers have in common.
pub(crate) struct Core {
    /// Tells the buffers of one backend from those of another.
    pub(crate) id: u64,
    pub(crate) options: CpuOptions,
    isa: Isa,
    pool: Pool,
    /// Its lock admits one thread at a time to buffers, scratch and pool.
    scratch: Mutex<Scratch>,
    /// Empty: memory for the pins of the next pass.
    spare_pins: Mutex<Vec<Ready>>,
}

/// The verbs on the CPU.
///
/// Verbs are eager: each has finished when it returns. One thread at a time may call them, which is
/// checked.
pub struct CpuBackend {
    pub(crate) core: Arc<Core>,
}

impl CpuBackend {
    /// Detects instructions and starts threads.
    ///
    /// # Errors
    /// When the machine lacks the instructions, or the system refuses a thread.
    pub fn new(options: CpuOptions) -> Result<Self, CpuError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let isa = Isa::resolve(options.isa)?;
        let threads = match options.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            threads => threads,
        };
        let pool = Pool::new(threads).map_err(|source| CpuError::Thread { threads, source })?;
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let scratch = Mutex::new(Scratch::new(threads));
        let spare_pins = Mutex::default();
        let core = Arc::new(Core { id, options, isa, pool, scratch, spare_pins });
        // Locks and threads allocate on first use on some systems; verbs must not.
        core.enter().tools.all(|_| ());
        Ok(Self { core })
    }

    /// The instructions in use.
    pub fn isa(&self) -> Isa {
        self.core.isa
    }

    /// The rounding of activations.
    pub fn activations(&self) -> Activations {
        self.core.options.activations
    }

    /// Threads, the caller included.
    pub fn threads(&self) -> usize {
        self.core.pool.threads()
    }

    /// Bytes of scratch reserved so far. Verbs within the prepared limits never add to it.
    pub fn scratch_taken(&self) -> usize {
        self.core.enter().scratch.taken()
    }
}

impl fmt::Debug for CpuBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (isa, threads) = (self.isa(), self.threads());
        write!(f, "CpuBackend({isa}, {threads} threads, activations {})", self.activations())
    }
}

impl Core {
    pub(crate) fn spare_pins(&self) -> MutexGuard<'_, Vec<Ready>> {
        self.spare_pins.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a verb.
    pub(crate) fn enter(&self) -> Run<'_> {
        let scratch = match self.scratch.try_lock() {
            Ok(scratch) => scratch,
            // A verb that panicked has left memory whose contents no verb relies on.
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                panic!("verbs and passes of a backend are for one thread at a time")
            }
        };
        let activations = self.options.activations;
        let tools = Tools { isa: self.isa, activations, pool: &self.pool };
        Run { owner: self.id, tools, scratch }
    }
}

/// A verb under way: the right to touch buffers, with what it takes to compute.
pub(crate) struct Run<'a> {
    owner: u64,
    pub(crate) tools: Tools<'a>,
    pub(crate) scratch: MutexGuard<'a, Scratch>,
}

/// What it takes to compute.
#[derive(Clone, Copy)]
pub(crate) struct Tools<'a> {
    pub(crate) isa: Isa,
    pub(crate) activations: Activations,
    pool: &'a Pool,
}

/// Element operations below which a fork costs more than it gains.
pub(crate) const FORK: usize = 16 << 10;

impl Run<'_> {
    /// First byte of a buffer, after checking whose it is and that `range` lies inside.
    pub(crate) fn bytes(&self, buf: &CpuBuf, range: &Range<usize>) -> *mut u8 {
        assert!(buf.owner() == self.owner, "{buf:?} belongs to another backend");
        assert!(range.start <= range.end && range.end <= buf.len(), "{range:?} of {buf:?}");
        buf.ptr()
    }

    /// First element of an f32 buffer, after the same checks.
    pub(crate) fn floats(&self, buf: &CpuBuf, range: &Range<usize>) -> *mut f32 {
        assert!(buf.ty() == BufType::F32, "{buf:?} where f32 is wanted");
        self.bytes(buf, range).cast()
    }

    /// `n` rows of `width` of a view.
    pub(crate) fn mat(&self, view: View<'_, CpuBuf>, n: usize, width: usize) -> Mat {
        let end = if n == 0 { view.offset } else { view.offset + (n - 1) * view.stride + width };
        let ptr = self.floats(view.buf, &(view.offset.min(end)..end));
        Mat { ptr: ptr.wrapping_add(view.offset), stride: view.stride }
    }

    /// `n` dense rows of `width` of a buffer.
    pub(crate) fn dense(&self, buf: &CpuBuf, n: usize, width: usize) -> Mat {
        Mat { ptr: self.floats(buf, &(0..n * width)), stride: width }
    }

    /// Makes room in scratch.
    pub(crate) fn reserve(&mut self, sizes: Sizes) {
        self.scratch.reserve(sizes);
    }
}

impl Tools<'_> {
    /// Threads, the caller included.
    pub(crate) fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Calls `job` on all threads.
    pub(crate) fn all(&self, job: impl Fn(usize) + Sync) {
        self.pool.run(&job);
    }

    /// Calls `job(thread, share)` on all threads, or on the caller alone where `work` (in element
    /// operations) is small.
    pub(crate) fn split(
        &self,
        units: usize,
        work: usize,
        job: impl Fn(usize, Range<usize>) + Sync,
    ) {
        let threads = self.pool.threads();
        if threads == 1 || units < 2 || work < FORK {
            return job(0, 0..units);
        }
        self.pool.run(&|thread| {
            let share = share(units, thread, threads);
            if !share.is_empty() {
                job(thread, share);
            }
        });
    }

    /// As [`Self::split`], with a kernel made for each share.
    pub(crate) fn kernels<K: Kernel>(
        &self,
        units: usize,
        work: usize,
        kernel: impl Fn(usize, Range<usize>) -> K + Sync,
    ) {
        let isa = self.isa;
        self.split(units, work, |thread, share| dispatch(isa, kernel(thread, share)));
    }
}

/// A recording of [`CpuBackend`], whose verbs are eager: it only keeps pins until their submission.
#[derive(Debug)]
pub struct CpuPass {
    core: Arc<Core>,
    pins: Vec<Ready>,
}

impl CpuPass {
    /// Takes over the memory for pins that an earlier pass has left.
    pub(crate) fn new(core: Arc<Core>) -> Self {
        let pins = std::mem::take(&mut *core.spare_pins());
        Self { core, pins }
    }

    /// Keeps pins until the submission.
    pub(crate) fn keep(&mut self, ready: &mut Vec<Ready>) {
        self.pins.append(ready);
    }
}

impl Drop for CpuPass {
    fn drop(&mut self) {
        self.pins.clear();
        let mut spare = self.core.spare_pins();
        if spare.capacity() < self.pins.capacity() {
            *spare = std::mem::take(&mut self.pins);
        }
    }
}

impl Pass for CpuPass {
    type Buf = CpuBuf;

    fn submit(&mut self) {
        self.pins.clear();
    }

    fn read(
        &mut self,
        buf: &CpuBuf,
        range: Range<usize>,
        into: &mut [f32],
    ) -> Result<(), StepError> {
        let run = self.core.enter();
        let from = run.floats(buf, &range);
        assert!(range.len() == into.len(), "{range:?} into {} elements", into.len());
        // SAFETY: the range lies inside, and the lock keeps writers out.
        let from = unsafe { std::slice::from_raw_parts(from.add(range.start), range.len()) };
        into.copy_from_slice(from);
        Ok(())
    }

    fn read_routes(&mut self, routed: &Routed<CpuBuf>, into: &mut Routes) -> Result<(), StepError> {
        let run = self.core.enter();
        let n = routed.n * routed.top_k;
        let ids = run.floats(&routed.ids, &(0..n));
        // SAFETY: as above; u32 bits, as `route` wrote them.
        let ids = unsafe { std::slice::from_raw_parts(ids.cast::<u32>(), n) };
        into.set(routed.top_k, |all| all.extend_from_slice(ids));
        Ok(())
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Core({})", self.id)
    }
}
