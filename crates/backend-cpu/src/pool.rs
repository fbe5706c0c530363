//! The thread pool: fork, join, nothing else.
//!
//! A step is hundreds of short jobs, so workers spin for a moment before they sleep, a job is one
//! borrowed closure, and nothing allocates. The caller is thread 0 and does its share.
#![allow(unsafe_code)]

use std::any::Any;
use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Looks at the epoch before a worker sleeps; some tens of microseconds.
const SPINS: u32 = 4000;

type Job = *const (dyn Fn(usize) + Sync);

/// Invariants: 1. `job` is written only while `pending` is 0; 2. workers read it only between an
/// advance of `epoch` and their own decrement of `pending`; 3. whoever sleeps has announced it
/// (`sleepers`, `caller_sleeps`) before the last look at what it waits for, both in one total
/// order, so that no wake-up is lost.
struct Shared {
    epoch: AtomicU32,
    job: UnsafeCell<Option<Job>>,
    pending: AtomicUsize,
    running: AtomicBool,
    stop: AtomicBool,
    sleepers: AtomicUsize,
    caller_sleeps: AtomicBool,
    lock: Mutex<()>,
    wake: Condvar,
    done: Condvar,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    spins: u32,
}

// SAFETY: the only field that is not is `job`, whose accesses invariants 1 and 2 order.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// Persistent workers.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// `threads` counts the caller.
    pub(crate) fn new(threads: usize) -> std::io::Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let shared = Arc::new(Shared {
            epoch: AtomicU32::new(0),
            job: UnsafeCell::new(None),
            pending: AtomicUsize::new(0),
            running: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            caller_sleeps: AtomicBool::new(false),
            lock: Mutex::new(()),
            wake: Condvar::new(),
            done: Condvar::new(),
            panic: Mutex::new(None),
            // With more threads than cores, spinning takes the core from the one waited for.
            spins: if threads <= cores { SPINS } else { 0 },
        });
        let mut pool = Self { shared, workers: Vec::new() };
        for index in 1..threads {
            let shared = pool.shared.clone();
            let builder = std::thread::Builder::new().name(format!("snowmelt-cpu-{index}"));
            pool.workers.push(builder.spawn(move || shared.work(index))?);
        }
        Ok(pool)
    }

    /// Threads, the caller included.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `job` once on every thread with its index, and returns when all have returned.
    ///
    /// # Panics
    /// With the panic of a thread, after all have ended; when a job runs another.
    pub(crate) fn run(&self, job: &(dyn Fn(usize) + Sync)) {
        if self.workers.is_empty() {
            return job(0);
        }
        let shared = &*self.shared;
        assert!(!shared.running.swap(true, SeqCst), "a job of the pool cannot run another");
        let lasting: *const (dyn Fn(usize) + Sync + '_) = job;
        // SAFETY: erases the lifetime only; no worker touches it after `join`, below.
        #[expect(clippy::transmute_ptr_to_ptr, reason = "a cast cannot extend the lifetime")]
        let lasting: Job = unsafe { std::mem::transmute(lasting) };
        // SAFETY: invariant 1; the last job was joined and `running` keeps others out.
        unsafe { *shared.job.get() = Some(lasting) };
        shared.pending.store(self.workers.len(), SeqCst);
        shared.epoch.fetch_add(1, SeqCst);
        if shared.sleepers.load(SeqCst) > 0 {
            let _lock = shared.lock();
            shared.wake.notify_all();
        }
        let own = catch_unwind(AssertUnwindSafe(|| job(0)));
        shared.join();
        let theirs = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        shared.running.store(false, SeqCst);
        if let Err(panic) = own {
            resume_unwind(panic);
        }
        if let Some(panic) = theirs {
            resume_unwind(panic);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, ()> {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self, index: usize) {
        let mut seen = 0;
        loop {
            seen = self.next_epoch(seen);
            if self.stop.load(SeqCst) {
                return;
            }
            // SAFETY: invariant 2; the caller keeps the closure alive until `pending` is 0.
            let job = unsafe { &*(*self.job.get()).expect("an epoch begins with a job") };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(index))) {
                *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
            }
            if self.pending.fetch_sub(1, SeqCst) == 1 && self.caller_sleeps.load(SeqCst) {
                let _lock = self.lock();
                self.done.notify_one();
            }
        }
    }

    fn next_epoch(&self, seen: u32) -> u32 {
        for _ in 0..self.spins {
            let epoch = self.epoch.load(SeqCst);
            if epoch != seen {
                return epoch;
            }
            spin_loop();
        }
        let mut lock = self.lock();
        self.sleepers.fetch_add(1, SeqCst);
        let epoch = loop {
            let epoch = self.epoch.load(SeqCst);
            if epoch != seen {
                break epoch;
            }
            lock = self.wake.wait(lock).unwrap_or_else(PoisonError::into_inner);
        };
        self.sleepers.fetch_sub(1, SeqCst);
        epoch
    }

    fn join(&self) {
        for _ in 0..self.spins {
            if self.pending.load(SeqCst) == 0 {
                return;
            }
            spin_loop();
        }
        self.caller_sleeps.store(true, SeqCst);
        let mut lock = self.lock();
        while self.pending.load(SeqCst) != 0 {
            lock = self.done.wait(lock).unwrap_or_else(PoisonError::into_inner);
        }
        self.caller_sleeps.store(false, SeqCst);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        self.shared.epoch.fetch_add(1, SeqCst);
        {
            let _lock = self.shared.lock();
            self.shared.wake.notify_all();
        }
        for worker in self.workers.drain(..) {
            // A worker catches its panics; nothing is left to report.
            let _ = worker.join();
        }
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pool({} threads)", self.threads())
    }
}

/// Share of thread `index` of `threads` in `units` units of work: contiguous, in order.
pub(crate) fn share(units: usize, index: usize, threads: usize) -> std::ops::Range<usize> {
    units * index / threads..units * (index + 1) / threads
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn every_thread_runs_every_job_once() {
        for threads in [1, 2, 3, 7] {
            let pool = Pool::new(threads).expect("threads start");
            let counts: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
            for round in 0..3000 {
                pool.run(&|index| {
                    counts[index].fetch_add(1, SeqCst);
                });
                assert!(counts.iter().all(|count| count.load(SeqCst) == round + 1));
                if round % 500 == 0 {
                    // Long enough for the workers to fall asleep.
                    std::thread::sleep(Duration::from_millis(3));
                }
            }
        }
    }

    #[test]
    fn a_slow_worker_is_waited_for_asleep() {
        let pool = Pool::new(2).expect("threads start");
        let done = AtomicBool::new(false);
        for _ in 0..3 {
            done.store(false, SeqCst);
            pool.run(&|index| {
                if index == 1 {
                    std::thread::sleep(Duration::from_millis(20));
                    done.store(true, SeqCst);
                }
            });
            assert!(done.load(SeqCst));
        }
    }

    #[test]
    fn panics_propagate_and_the_pool_goes_on() {
        for (threads, culprit) in [(3, 0), (3, 2), (1, 0)] {
            let pool = Pool::new(threads).expect("threads start");
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                pool.run(&|index| assert!(index != culprit, "thread {index} fails"));
            }));
            assert!(outcome.is_err(), "{threads} threads, culprit {culprit}");
            let count = AtomicUsize::new(0);
            pool.run(&|_| {
                count.fetch_add(1, SeqCst);
            });
            assert_eq!(count.load(SeqCst), threads);
        }
    }

    #[test]
    fn shares_cover_all_units_once() {
        for units in 0..20 {
            for threads in 1..6 {
                let all: Vec<usize> = (0..threads).flat_map(|t| share(units, t, threads)).collect();
                assert_eq!(all, (0..units).collect::<Vec<_>>());
            }
        }
    }
}
