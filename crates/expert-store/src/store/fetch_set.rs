//! What a caller asked for and has not been handed yet.

use super::{FetchResult, Fetched, Store};
use crate::error::{FetchFailed, StoreError};
use crate::key::Key;
use crate::policy::{Pin, Planned, SlotState};
use std::sync::Arc;
use std::time::Duration;

/// Keys under way. Owns the pins of those not handed out: dropping or clearing it lets them go,
/// and what is being read for it still lands in its slot. Reuse it, so that nothing allocates.
#[derive(Debug, Default)]
pub struct FetchSet {
    /// Have a slot, whose bytes are there or coming.
    pub(super) coming: Vec<(Key, Pin)>,
    /// Have none yet.
    pub(super) waiting: Vec<Key>,
    /// Will not come.
    pub(super) failed: Vec<FetchFailed>,
    /// When it was first seen that nothing moves.
    pub(super) stuck_since: Option<Duration>,
}

impl FetchSet {
    /// Room for `keys` keys, so that not even the first request allocates.
    pub fn with_capacity(keys: usize) -> Self {
        Self {
            coming: Vec::with_capacity(keys),
            waiting: Vec::with_capacity(keys),
            failed: Vec::new(),
            stuck_since: None,
        }
    }
    /// Keys not handed out yet.
    pub fn len(&self) -> usize {
        self.coming.len() + self.waiting.len() + self.failed.len()
    }
    /// Whether all keys were handed out.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Forgets what was not handed out.
    pub fn clear(&mut self) {
        self.coming.clear();
        self.waiting.clear();
        self.failed.clear();
        self.stuck_since = None;
    }

    pub(super) fn fail_waiting(&mut self, first: &Arc<StoreError>) {
        let failed = |key| {
            let error = StoreError::Latched { first: Arc::clone(first) };
            FetchFailed { key, error }
        };
        self.failed.extend(self.waiting.drain(..).map(failed));
    }
}

impl Store {
    /// Room for so many more keys, here and in the set, so that later calls need none.
    pub(super) fn make_room(&mut self, keys: usize, set: &mut FetchSet) {
        let all = set.len() + keys;
        set.coming.reserve(all.saturating_sub(set.coming.len()));
        set.waiting.reserve(all.saturating_sub(set.waiting.len()));
        self.planned.reserve(all);
        self.waiting.reserve(all);
        self.arrived.reserve(all);
    }

    /// Sorts what the policy decided into the set, and begins the reads.
    pub(super) fn accept(&mut self, set: &mut FetchSet) {
        let mut planned = std::mem::take(&mut self.planned);
        for planned in planned.drain(..) {
            match planned {
                Planned::Hit(key, pin) => set.coming.push((key, pin)),
                Planned::Join(key, pin, was_idle) => {
                    if was_idle {
                        self.adopt(pin.slot());
                    }
                    set.coming.push((key, pin));
                }
                Planned::Read(key, pin) => {
                    self.begin(key, pin.slot(), crate::source::Priority::Demand);
                    set.coming.push((key, pin));
                }
                Planned::Wait(key) => set.waiting.push(key),
            }
        }
        self.planned = planned;
    }

    /// Plans once more for the keys that found no slot.
    pub(super) fn plan_waiting(&mut self, set: &mut FetchSet) {
        if set.waiting.is_empty() {
            return;
        }
        let latched = self.latched.clone();
        self.waiting.append(&mut set.waiting);
        self.policy.decide(&self.waiting, false, latched.is_none(), &mut self.planned);
        self.waiting.clear();
        self.accept(set);
        if let Some(first) = latched {
            set.fail_waiting(&first);
        }
    }

    /// Moves to `out` what has arrived, in the order of arrival, and what has failed.
    pub(super) fn hand_out(&mut self, set: &mut FetchSet, out: &mut Vec<FetchResult>) {
        out.extend(set.failed.drain(..).map(Err));
        let mut at = 0;
        self.arrived.clear();
        while at < set.coming.len() {
            let (key, slot) = (set.coming[at].0, set.coming[at].1.slot());
            if let Some(error) = &self.fills[slot as usize].error {
                let error = StoreError::clone(error);
                out.push(Err(FetchFailed { key, error }));
                set.coming.swap_remove(at);
                continue;
            }
            match self.policy.state(slot) {
                SlotState::Filling(holds) if holds == key => at += 1,
                SlotState::Resident(holds) if holds == key => {
                    let (key, pin) = set.coming.swap_remove(at);
                    let when = self.policy.arrived(slot).expect("it is resident");
                    self.arrived.push((when, Fetched { key, slot, pin }));
                }
                other => panic!("{key} was pinned in slot `{slot}`, which is {other:?}"),
            }
        }
        self.arrived.sort_unstable_by_key(|arrived| arrived.0);
        out.extend(self.arrived.drain(..).map(|arrived| Ok(arrived.1)));
    }
}
