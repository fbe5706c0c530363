//! Policy + memory + source.

mod fetch_set;
mod fill;
mod validate;

pub use fetch_set::FetchSet;

use crate::clock::{Clock, SystemClock};
use crate::error::{FetchFailed, StoreError};
use crate::key::{Key, RecordMap};
use crate::memory::SlotMemory;
use crate::policy::{Pin, Pins, Planned, Policy, PolicyOptions};
use crate::source::{BlockSource, Priority};
use crate::stats::{LayerStats, Stats};
use fill::{Fill, Flight, Flights};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Longest that a wait in the source lasts before time-outs are looked at.
const SLICE: Duration = Duration::from_millis(20);
/// Room for so many reads under way is made at open; more make room once.
const RESERVED_READS: usize = 1024;
/// How long to sleep when only a pin can help: nobody tells when one is dropped.
const PIN_SLEEP: Duration = Duration::from_micros(50);

/// Says whether the bytes of a record are what was written.
pub type Verify = Arc<dyn Fn(Key, &[u8]) -> bool + Send + Sync>;

/// Options of a [`Store`].
#[derive(Clone)]
pub struct StoreOptions {
    /// Eviction.
    pub policy: PolicyOptions,
    /// How long a read may take once it is first in line. Then it fails and the store latches.
    pub read_timeout: Duration,
    /// How long nothing may move before `take_ready` says so.
    pub stuck_timeout: Duration,
    /// Fills slots with 0xFF (NaN in f32, bf16 and f16) before they are read into, so that stale
    /// bytes can never pass for new ones. Costs a memory write for each read.
    pub poison: bool,
    /// Called on each complete record, from the start of its slot to the end of its last piece.
    pub verify: Option<Verify>,
    /// Time for all of the above and for statistics.
    pub clock: Arc<dyn Clock>,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            policy: PolicyOptions::default(),
            read_timeout: Duration::from_secs(30),
            stuck_timeout: Duration::from_secs(5),
            poison: false,
            verify: None,
            clock: Arc::new(SystemClock::default()),
        }
    }
}

impl fmt::Debug for StoreOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreOptions")
            .field("policy", &self.policy)
            .field("read_timeout", &self.read_timeout)
            .field("stuck_timeout", &self.stuck_timeout)
            .field("poison", &self.poison)
            .field("verify", &self.verify.is_some())
            .finish_non_exhaustive()
    }
}

/// A record in its slot, and the pin that keeps it there.
#[derive(Clone, Debug)]
pub struct Fetched {
    /// The record.
    pub key: Key,
    /// Where it is.
    pub slot: u32,
    /// Drop it when the bytes are not needed any more, on any thread.
    pub pin: Pin,
}

/// What became of one key of a request.
pub type FetchResult = Result<Fetched, FetchFailed>;

/// Brings records into slots.
///
/// Invariants:
/// 1. A slot is written to by at most one fill at a time, and by nobody while it is resident.
/// 2. A slot being filled stays so until the source has given back all reads into it, also after
///    a time-out: a read that comes late lands in memory that nobody uses.
/// 3. After the first failure of a read nothing more is read; hits are still served.
pub struct Store {
    // Before `memory`: its drop waits for reads into it.
    source: Box<dyn BlockSource + Send>,
    policy: Policy,
    memory: Arc<dyn SlotMemory>,
    map: Arc<dyn RecordMap>,
    options: StoreOptions,
    /// By slot.
    fills: Vec<Fill>,
    flights: Flights,
    latched: Option<Arc<StoreError>>,
    stats: Stats,
    // Kept for their memory.
    planned: Vec<Planned>,
    waiting: Vec<Key>,
    arrived: Vec<(u64, Fetched)>,
    idle_planned: Vec<(Key, u32)>,
    idle_expired: Vec<u32>,
    cancelled: Vec<Flight>,
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store")
            .field("source", &self.source)
            .field("slots", &self.memory.slots())
            .field("in_flight", &self.flights.len())
            .field("latched", &self.latched)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

impl Store {
    /// A store with all slots empty. Checks every record against the files and the slots.
    ///
    /// # Errors
    /// A record that lies outside its file or does not fit its slot; slots that are not aligned;
    /// a verifier for memory that the host cannot see.
    pub fn open(
        memory: Arc<dyn SlotMemory>,
        map: Arc<dyn RecordMap>,
        mut source: Box<dyn BlockSource + Send>,
        options: StoreOptions,
    ) -> Result<Self, StoreError> {
        validate::memory(&*memory, options.verify.is_some())?;
        let pieces = validate::records(&*memory, &*map, &*source)?;
        let n_experts: Vec<u32> = (0..map.n_layers()).map(|layer| map.n_experts(layer)).collect();
        let policy = Policy::new(memory.slots(), &n_experts, options.policy);
        let reads = (memory.slots() as usize * pieces).min(RESERVED_READS);
        source.reserve(reads);
        let mut flights = Flights::default();
        flights.reserve(reads);
        let idle = options.policy.idle_slots_max as usize;
        let fills = (0..memory.slots()).map(|_| Fill::default()).collect();
        Ok(Self {
            source,
            policy,
            memory,
            map,
            options,
            fills,
            flights,
            latched: None,
            stats: Stats::default(),
            planned: Vec::new(),
            waiting: Vec::new(),
            arrived: Vec::new(),
            idle_planned: Vec::with_capacity(idle),
            idle_expired: Vec::with_capacity(idle),
            cancelled: Vec::with_capacity(pieces),
        })
    }

    /// Asks for records and returns at once: those that are resident are pinned, those that are
    /// not are all submitted, those for which there is no slot wait in the set. Adds to what the
    /// set holds already.
    ///
    /// # Errors
    /// [`StoreError::UnknownKey`]; then nothing of the request was done. A read that fails is
    /// reported by [`take_ready`](Self::take_ready), for its own key.
    pub fn request(&mut self, keys: &[Key], set: &mut FetchSet) -> Result<(), StoreError> {
        self.known(keys)?;
        if let Some((_, pin)) = set.coming.first() {
            assert!(self.policy.owns(pin), "the set holds pins of another store");
        }
        self.poll();
        self.make_room(keys.len(), set);
        self.policy.decide(keys, true, self.latched.is_none(), &mut self.planned);
        self.accept(set);
        self.expire_idle();
        if let Some(first) = self.latched.clone() {
            set.fail_waiting(&first);
        }
        Ok(())
    }

    /// Appends to `out` what has arrived since, in the order of arrival; a key that failed comes
    /// as its own error. Returns whether more is to come. With `wait`, waits until something has
    /// arrived or nothing is to come.
    ///
    /// # Errors
    /// [`StoreError::NoSlot`] if keys wait for slots and nothing has moved for `stuck_timeout`:
    /// no read under way, no pin dropped. The set keeps the keys.
    pub fn take_ready(
        &mut self,
        set: &mut FetchSet,
        wait: bool,
        out: &mut Vec<FetchResult>,
    ) -> Result<bool, StoreError> {
        let (before, mut start) = (out.len(), None);
        loop {
            self.poll();
            self.plan_waiting(set);
            self.hand_out(set, out);
            if out.len() > before || set.is_empty() {
                set.stuck_since = None;
                break;
            }
            if let Err(error) = self.check_stuck(set) {
                self.count_wait(start);
                return Err(error);
            }
            if !wait {
                break;
            }
            if start.is_none() {
                start = Some(self.options.clock.now());
            }
            self.wait_a_little(!set.waiting.is_empty());
        }
        self.count_wait(start);
        Ok(!set.is_empty())
    }

    /// What drops pins that were leaked.
    pub fn pins(&self) -> Pins {
        self.policy.pins()
    }

    /// Asks for records that may be needed soon. They are read when nothing else is, into slots
    /// that nobody holds and that were not demanded in this step; as many as there is room for.
    /// Does nothing once the store has latched.
    ///
    /// # Errors
    /// [`StoreError::UnknownKey`]; then nothing was done.
    pub fn prefetch(&mut self, keys: &[Key]) -> Result<(), StoreError> {
        self.known(keys)?;
        self.poll();
        if self.latched.is_some() {
            return Ok(());
        }
        let mut granted = std::mem::take(&mut self.idle_planned);
        self.policy.plan_idle(keys, &mut granted);
        for (key, slot) in granted.drain(..) {
            self.begin(key, slot, Priority::Idle);
        }
        self.idle_planned = granted;
        Ok(())
    }

    /// Takes back speculative reads that have not started.
    pub fn cancel_prefetch(&mut self) {
        self.idle_expired.extend(self.policy.idle_filling());
        self.cancel_listed();
    }

    /// Takes note of reads that are over, without waiting, and keeps the source busy. Every other
    /// call does so too; this one is for a caller that computes for long.
    pub fn poll(&mut self) {
        while let Some(completion) = self.source.poll(None) {
            self.complete(completion);
        }
        self.check_timeouts();
    }

    /// Waits until nothing is under way. Ends at the latest when all reads have timed out.
    pub fn drain(&mut self) {
        while self.flights.len() > self.flights.abandoned() {
            self.wait_a_little(false);
            self.poll();
        }
    }

    /// Counts `uses` more demands of a key than its request did, for a request that spoke for many
    /// rows: what many rows of a prompt used is worth keeping for what follows.
    pub fn credit(&mut self, key: Key, uses: u32) {
        self.policy.credit(key, uses);
    }

    /// Counts since it was opened.
    pub fn stats(&self) -> Stats {
        let policy = self.policy.stats();
        let Stats { demand_bytes, idle_bytes, reads, read_ns, wait_ns, failures, .. } = self.stats;
        Stats { demand_bytes, idle_bytes, reads, read_ns, wait_ns, failures, ..policy }
    }

    /// Counts of one layer.
    pub fn layer_stats(&self, layer: u32) -> LayerStats {
        self.policy.layer_stats(layer)
    }

    /// The first failure of a read, after which nothing more is read.
    pub fn failed(&self) -> Option<&StoreError> {
        self.latched.as_deref()
    }

    /// Whether the record is resident.
    pub fn is_resident(&self, key: Key) -> bool {
        self.policy.find(key).is_some_and(|slot| self.policy.arrived(slot).is_some())
    }

    /// Reads under way.
    pub fn in_flight(&self) -> usize {
        self.flights.len()
    }

    /// Slot count.
    pub fn slots(&self) -> u32 {
        self.memory.slots()
    }

    /// The source's kind, for people.
    pub fn source_name(&self) -> &'static str {
        self.source.name()
    }

    /// Bytes that the source holds besides the slots.
    pub fn source_buffer_bytes(&self) -> usize {
        self.source.buffer_bytes()
    }

    /// Panics if an invariant of the policy does not hold. O(n), for tests.
    pub fn check(&mut self) {
        self.policy.check();
    }

    fn known(&self, keys: &[Key]) -> Result<(), StoreError> {
        let n_layers = self.map.n_layers();
        for &key in keys {
            let n_experts = if key.layer < n_layers { self.map.n_experts(key.layer) } else { 0 };
            if key.expert >= n_experts {
                return Err(StoreError::UnknownKey { key, n_layers, n_experts });
            }
        }
        Ok(())
    }

    /// Speculative reads whose moment has passed make room.
    fn expire_idle(&mut self) {
        self.idle_expired.extend(self.policy.expired_filling());
        self.cancel_listed();
    }

    fn check_stuck(&mut self, set: &mut FetchSet) -> Result<(), StoreError> {
        let under_way = self.flights.len() > self.flights.abandoned();
        let Some(&key) = set.waiting.first() else {
            set.stuck_since = None;
            return Ok(());
        };
        if under_way {
            set.stuck_since = None;
            return Ok(());
        }
        let now = self.options.clock.now();
        let waited = now.saturating_sub(*set.stuck_since.get_or_insert(now));
        if waited < self.options.stuck_timeout {
            return Ok(());
        }
        set.stuck_since = None;
        let waited_ms = waited.as_millis() as u64;
        let (pinned, slots) = (self.policy.pinned(), self.policy.n_slots());
        Err(StoreError::NoSlot { key, pinned, slots, waited_ms })
    }

    /// Until a read is over, or a moment has passed.
    fn wait_a_little(&mut self, for_pins: bool) {
        if self.flights.len() == self.flights.abandoned() {
            std::thread::sleep(PIN_SLEEP);
            return;
        }
        let slice = if for_pins { PIN_SLEEP } else { SLICE.min(self.options.read_timeout) };
        if let Some(completion) = self.source.poll(Some(slice)) {
            self.complete(completion);
        }
    }

    fn count_wait(&mut self, start: Option<Duration>) {
        if let Some(start) = start {
            let waited = self.options.clock.now().saturating_sub(start);
            self.stats.wait_ns += waited.as_nanos() as u64;
        }
    }
}
