//! A scripted source of experts: few slots, the most recently used one evicted first and filled
//! with NaN at once, arrival in any order.
//!
//! Most recently used is the worst choice for pins on purpose: with the least recently used one, a
//! pin dropped early is never punished.

use snowmelt_backend::{Backend, ExpertFetch, ExpertSet, Ready, Slab, StepError};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

type Pin = Arc<()>;
/// Layer and expert.
type Key = (u32, u32);

struct Slot {
    holds: Option<Key>,
    pin: Pin,
    used: u64,
}

/// What the source was asked for, and what it is to do wrong.
#[derive(Default)]
pub(crate) struct Script {
    /// Experts whose bytes cannot be read, of any layer.
    pub(crate) unreadable: Vec<u32>,
    /// Experts after whose arrival the store fails.
    pub(crate) breaks_after: Option<u32>,
    /// Whether the next fetch fails as a whole.
    pub(crate) refuses: bool,
    /// Fetches so far.
    pub(crate) waves: Vec<Vec<u32>>,
    /// Sets that still have experts to hand out, and the most that ever did.
    pub(crate) sets: (usize, usize),
    /// How often somebody waited.
    pub(crate) waits: usize,
}

struct Store<B: Backend> {
    slab: B::Slab,
    slots: Vec<Slot>,
    records: Vec<Vec<Vec<u8>>>,
    clock: u64,
    seed: u64,
    script: Script,
}

impl<B: Backend> Store<B> {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Any number below `limit`.
    fn below(&mut self, limit: usize) -> usize {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.seed >> 33) as usize % limit
    }

    /// Pins the slot that holds a key.
    fn hit(&mut self, key: Key) -> Option<(u32, Pin)> {
        let now = self.tick();
        let at = self.slots.iter().position(|slot| slot.holds == Some(key))?;
        self.slots[at].used = now;
        Some((at as u32, Arc::clone(&self.slots[at].pin)))
    }

    /// Pins a slot for a read: empty ones first, then the most recently used.
    fn take(&mut self) -> Option<(u32, Pin)> {
        let now = self.tick();
        let unpinned = self.slots.iter_mut().enumerate().filter_map(|(at, slot)| {
            // `get_mut` rather than `strong_count`: it synchronises with the other thread's drop.
            Arc::get_mut(&mut slot.pin)?;
            Some((slot.holds.is_none(), slot.used, at))
        });
        let (.., at) = unpinned.max()?;
        let slot = &mut self.slots[at];
        (slot.holds, slot.used) = (None, now);
        self.slab.upload(at as u32, 0, &vec![0xFF; self.slab.slot_bytes()]);
        Some((at as u32, Arc::clone(&self.slots[at].pin)))
    }
}

/// The source; see the module.
pub(crate) struct Scripted<B: Backend> {
    store: Rc<RefCell<Store<B>>>,
    slab: B::Slab,
    wave: usize,
    ahead: usize,
    is_resident: bool,
}

/// How many slots, experts a wave, waves ahead.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) slots: usize,
    pub(crate) wave: usize,
    pub(crate) ahead: usize,
}

impl<B: Backend> Scripted<B> {
    /// `records[layer][expert]`
    pub(crate) fn new(b: &B, records: &[Vec<Vec<u8>>], sizes: Sizes, seed: u64) -> Self {
        let slab = b.alloc_slab(4096, sizes.slots as u32);
        let slot = |_| Slot { holds: None, pin: Pin::default(), used: 0 };
        let store = Store {
            slab: slab.clone(),
            slots: (0..sizes.slots).map(slot).collect(),
            records: records.to_vec(),
            clock: 0,
            seed,
            script: Script::default(),
        };
        let store = Rc::new(RefCell::new(store));
        Self { store, slab, wave: sizes.wave, ahead: sizes.ahead, is_resident: false }
    }

    /// All experts of all layers, where they stay.
    pub(crate) fn resident(b: &B, records: &[Vec<Vec<u8>>]) -> Self {
        let slots = records.iter().map(Vec::len).sum();
        let fetch = Self::new(b, records, Sizes { slots, wave: 1, ahead: 1 }, 0);
        for (slot, record) in records.iter().flatten().enumerate() {
            fetch.slab.upload(slot as u32, 0, record);
        }
        Self { is_resident: true, ..fetch }
    }

    pub(crate) fn script<T>(&self, f: impl FnOnce(&mut Script) -> T) -> T {
        f(&mut self.store.borrow_mut().script)
    }

    /// Waves fetched and waits so far, to be asked while the source is lent out.
    pub(crate) fn probe(&self) -> impl Fn() -> (usize, usize) + use<B> {
        let store = Rc::clone(&self.store);
        move || {
            let script = &store.borrow().script;
            (script.waves.len(), script.waits)
        }
    }

    /// Slots that are pinned now.
    pub(crate) fn pinned(&self) -> usize {
        let slots = &mut self.store.borrow_mut().slots;
        slots
            .iter_mut()
            .filter_map(|slot| Arc::get_mut(&mut slot.pin).is_none().then_some(()))
            .count()
    }
}

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Broken(&'static str);

fn store_error(why: &'static str) -> StepError {
    StepError::Store { source: Arc::new(Broken(why)) }
}

impl<B: Backend> ExpertFetch<B> for Scripted<B> {
    type Set = Set<B>;

    fn slab(&self) -> &B::Slab {
        &self.slab
    }

    fn wave_experts(&self) -> usize {
        self.wave
    }

    fn waves_ahead(&self) -> usize {
        self.ahead
    }

    fn resident(&self, layer: u32) -> Option<u32> {
        let experts = self.store.borrow().records[layer as usize].len() as u32;
        self.is_resident.then_some(layer * experts)
    }

    fn fetch(&mut self, layer: u32, experts: &[u32]) -> Result<Set<B>, StepError> {
        let mut store = self.store.borrow_mut();
        if store.script.refuses {
            return Err(store_error("refused"));
        }
        store.script.waves.push(experts.to_vec());
        store.script.sets.0 += 1;
        store.script.sets.1 = store.script.sets.1.max(store.script.sets.0);
        // Hits are pinned before any victim is chosen.
        let hits: Vec<_> = experts.iter().map(|&e| ((layer, e), store.hit((layer, e)))).collect();
        let place = |(key, hit): (Key, Option<(u32, Pin)>)| match hit {
            Some(place) => Pending { key, place: Some(place), is_hit: true },
            None => Pending { key, place: store.take(), is_hit: false },
        };
        let pending = hits.into_iter().map(place).collect();
        Ok(Set { store: Rc::clone(&self.store), pending })
    }
}

struct Pending {
    key: Key,
    place: Option<(u32, Pin)>,
    is_hit: bool,
}

/// Experts under way.
pub(crate) struct Set<B: Backend> {
    store: Rc<RefCell<Store<B>>>,
    pending: Vec<Pending>,
}

impl<B: Backend> Drop for Set<B> {
    fn drop(&mut self) {
        let unfinished = usize::from(!self.pending.is_empty());
        self.store.borrow_mut().script.sets.0 -= unfinished;
    }
}

/// How long a set waits for slots before it says that it is stuck.
const PATIENCE: Duration = Duration::from_secs(2);

impl<B: Backend> ExpertSet for Set<B> {
    fn next_ready(
        &mut self,
        ready: &mut Vec<Ready>,
        failed: &mut Vec<(u32, StepError)>,
    ) -> Result<bool, StepError> {
        if self.pending.is_empty() {
            return Ok(false);
        }
        let mut store = self.store.borrow_mut();
        store.script.waits += 1;
        let begun = Instant::now();
        loop {
            for pending in self.pending.iter_mut().filter(|pending| pending.place.is_none()) {
                pending.place = store.take();
            }
            if self.pending.iter().any(|pending| pending.place.is_some()) {
                break;
            }
            if begun.elapsed() > PATIENCE {
                return Err(store_error("stuck"));
            }
            std::thread::yield_now();
        }
        for _ in 0..=store.below(2) {
            let placed = (0..self.pending.len()).filter(|&i| self.pending[i].place.is_some());
            let placed: Vec<usize> = placed.collect();
            if placed.is_empty() {
                break;
            }
            let at = placed[store.below(placed.len())];
            let Pending { key, place, is_hit } = self.pending.swap_remove(at);
            store.script.sets.0 -= usize::from(self.pending.is_empty());
            let ((layer, expert), (slot, pin)) = (key, place.expect("chosen for it"));
            if store.script.unreadable.contains(&expert) {
                let source = Arc::new(Broken("unreadable"));
                failed.push((expert, StepError::Expert { layer, expert, source }));
                continue;
            }
            if !is_hit {
                store.slab.upload(slot, 0, &store.records[layer as usize][expert as usize]);
                store.slots[slot as usize].holds = Some(key);
            }
            ready.push(Ready::new(expert, slot, pin));
            if store.script.breaks_after == Some(expert) {
                return Err(store_error("broken"));
            }
        }
        Ok(true)
    }
}
