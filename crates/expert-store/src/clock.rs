//! Time, so that tests can own it.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A clock that never goes back.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Time since some fixed moment.
    fn now(&self) -> Duration;
}

/// The machine's clock.
#[derive(Clone, Copy, Debug)]
pub struct SystemClock {
    start: Instant,
}

impl Default for SystemClock {
    fn default() -> Self {
        Self { start: Instant::now() }
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.start.elapsed()
    }
}

/// A clock that moves only when told, or by a fixed step each time it is looked at.
#[derive(Debug, Default)]
pub struct ManualClock {
    now_ns: AtomicU64,
    step_ns: u64,
}

impl ManualClock {
    /// Moves by `step` with each look; zero to move it by [`Self::advance`] only.
    pub fn new(step: Duration) -> Self {
        Self { now_ns: AtomicU64::new(0), step_ns: step.as_nanos() as u64 }
    }
    /// Moves it.
    pub fn advance(&self, by: Duration) {
        self.now_ns.fetch_add(by.as_nanos() as u64, Ordering::Relaxed);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Duration {
        Duration::from_nanos(self.now_ns.fetch_add(self.step_ns, Ordering::Relaxed))
    }
}
