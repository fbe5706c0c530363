//! Which record is in which slot: a pure state machine without I/O.

mod idle;
mod order;
mod pins;
mod strategy;

pub use pins::{Pin, Pins};
pub use strategy::{Scope, StrategyKind};

use crate::key::Key;
use crate::stats::{LayerStats, Stats};
use order::{Order, Rank};
use pins::PinTable;
use std::sync::Arc;
use strategy::log_add;

/// No slot.
const NONE: u32 = u32::MAX;

/// What a slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotState {
    /// Nothing.
    Empty,
    /// A record whose bytes are coming.
    Filling(Key),
    /// A record.
    Resident(Key),
}

/// What [`Policy::plan`] decided for one key. All but `Wait` are pinned.
#[derive(Debug)]
pub enum Planned {
    /// Resident.
    Hit(Key, Pin),
    /// Its read is under way. The flag says that it was a speculative one until now.
    Join(Key, Pin, bool),
    /// To be read into this slot; whoever was there is gone.
    Read(Key, Pin),
    /// No slot can be taken now; plan again later.
    Wait(Key),
}

/// Options of a [`Policy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PolicyOptions {
    /// Which slot is given up first.
    pub strategy: StrategyKind,
    /// Whom a layer may take from.
    pub scope: Scope,
    /// Most slots that speculative records hold before anyone has asked for them. Small: some
    /// operations walk them.
    pub idle_slots_max: u32,
}

impl Default for PolicyOptions {
    fn default() -> Self {
        Self { strategy: StrategyKind::default(), scope: Scope::default(), idle_slots_max: 16 }
    }
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    state: SlotState,
    /// Worth among the slots of its layer, when it was used last.
    worth: f64,
    /// Step in which it was last demanded; 0 for never.
    used_step: u64,
    /// Visit of its layer in which it was last demanded, or granted to a speculative read.
    used_visit: u64,
    /// Order of arrival.
    arrived: u64,
    /// Visit of its layer at which a speculative read was granted, until somebody asks for it.
    idle_since: Option<u64>,
    /// On the list of empty slots.
    listed: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Layer {
    /// Its first record in the flat tables.
    base: u32,
    n_experts: u32,
    /// Slots that are its share, under [`Scope::PerLayer`].
    share: u32,
    /// Slots that hold or will hold its records.
    slots: u32,
    /// Times that the cycle came by.
    visits: u64,
    /// Step of the last time.
    visit_step: u64,
    hits: u64,
    misses: u64,
}

/// No visit of a layer.
const NO_VISIT: u64 = u64::MAX;

/// Added to the worth of what the layer's last visit used, under [`StrategyKind::LayerCycle`]: it
/// is given up after all others. Beyond all logarithms of counts.
const FRESH: f64 = 1e18;

/// The state machine: plan → reads → commit.
///
/// Layers are visited in a cycle; a *visit* of a layer is one or more plans for it in a row, a
/// *step* is one turn of the cycle and begins when a plan names no later layer than the one before.
///
/// Each operation is O(log n) in the slots for each key, amortised over the plans (a slot whose
/// pins were dropped is put back in order by the next plan), and allocates nothing.
///
/// Invariants:
/// 1. A key has at most one slot, and the tables from key to slot and from slot to key agree.
/// 2. A filling slot is never a victim, pinned or not.
/// 3. A pinned slot is never a victim.
/// 4. Hits of a plan are pinned before its victims are chosen.
/// 5. A speculative read never takes a slot that is pinned, filling, or was demanded in this step;
///    at most `idle_slots_max` slots hold records that nobody has asked for yet.
/// 6. A slot is exactly one of: filling; in the order of eviction; on the list of empty slots; held
///    by a pin, or let go since the last plan.
/// 7. A slot whose read failed is not reused while somebody holds a pin of it.
#[derive(Debug)]
pub struct Policy {
    slots: Vec<Slot>,
    layers: Vec<Layer>,
    /// Slot of each key, or [`NONE`].
    table: Vec<u32>,
    /// Logarithm of each key's decayed count of demands; kept for keys without a slot too.
    heat: Vec<f64>,
    order: Order,
    /// By layer, the slots that its last visit used, under [`StrategyKind::LayerCycle`].
    fresh: Vec<Vec<u32>>,
    pins: Arc<PinTable>,
    empty: Vec<u32>,
    /// Slots with `idle_since`, oldest first.
    idle: Vec<u32>,
    options: PolicyOptions,
    /// Whether only one layer has experts, so that each plan is a visit.
    one_layer: bool,
    /// The layer visited last.
    current: u32,
    step: u64,
    clock: u64,
    arrivals: u64,
    pub(crate) stats: Stats,
}

impl Policy {
    /// All slots empty. `n_experts[layer]` may be 0.
    pub fn new(slots: u32, n_experts: &[u32], options: PolicyOptions) -> Self {
        assert!(slots < NONE, "`{slots}` slots");
        let total: u32 = n_experts.iter().sum();
        let share = |records: u32| u64::from(slots) * u64::from(records) / u64::from(total.max(1));
        let (mut layers, mut base) = (Vec::with_capacity(n_experts.len()), 0);
        for &n in n_experts {
            let share = (share(base + n) - share(base)) as u32;
            layers.push(Layer { base, n_experts: n, share, ..Layer::default() });
            base += n;
        }
        let slot = Slot {
            state: SlotState::Empty,
            worth: 0.0,
            used_step: 0,
            used_visit: NO_VISIT,
            arrived: 0,
            idle_since: None,
            listed: true,
        };
        Self {
            slots: vec![slot; slots as usize],
            layers,
            table: vec![NONE; total as usize],
            heat: vec![f64::NEG_INFINITY; total as usize],
            order: Order::new(slots, n_experts.iter().map(|&n| n.min(slots))),
            fresh: n_experts.iter().map(|&n| Vec::with_capacity(n.div_ceil(4) as usize)).collect(),
            pins: PinTable::new(slots),
            empty: (0..slots).rev().collect(),
            idle: Vec::with_capacity(options.idle_slots_max as usize),
            options,
            one_layer: n_experts.iter().filter(|&&n| n > 0).count() == 1,
            current: NONE,
            step: 0,
            clock: 0,
            arrivals: 0,
            stats: Stats::default(),
        }
    }

    /// Decides for every key and pins what it grants; appends one decision for each key, in order.
    ///
    /// # Panics
    /// If a key does not exist.
    pub fn plan(&mut self, keys: &[Key], out: &mut Vec<Planned>) {
        self.decide(keys, true, true, out);
    }

    /// As [`plan`](Self::plan) for keys that had to wait: they are not counted again.
    pub fn plan_again(&mut self, keys: &[Key], out: &mut Vec<Planned>) {
        self.decide(keys, false, true, out);
    }

    /// `first`: counts as a demand. `grant`: slots may be taken; otherwise misses wait.
    pub(crate) fn decide(
        &mut self,
        keys: &[Key],
        first: bool,
        grant: bool,
        out: &mut Vec<Planned>,
    ) {
        self.notice_released();
        let start = out.len();
        for (at, &key) in keys.iter().enumerate() {
            if first {
                self.demand(key, at == 0);
            }
            let planned =
                self.find(key).map_or(Planned::Wait(key), |slot| self.hold(key, slot, first));
            out.push(planned);
        }
        // Invariant 4: all hits are pinned by now.
        for (planned, &key) in out[start..].iter_mut().zip(keys) {
            if !matches!(planned, Planned::Wait(_)) {
                continue;
            }
            // Once more, as the key may stand in the plan twice.
            if let Some(slot) = self.find(key) {
                *planned = self.hold(key, slot, first);
                continue;
            }
            if first {
                self.stats.misses += 1;
                self.layers[key.layer as usize].misses += 1;
            }
            let slot = if grant { self.take_slot(key.layer) } else { None };
            match slot {
                Some(slot) => {
                    let pin = self.pins.pin(slot);
                    self.begin(slot, key);
                    self.use_now(slot, key);
                    *planned = Planned::Read(key, pin);
                }
                None => self.stats.waits += u64::from(first),
            }
        }
    }

    /// What drops pins that were leaked.
    pub fn pins(&self) -> Pins {
        Pins::new(&self.pins)
    }

    /// The slot's bytes are complete, or will never be. Returns whose they are.
    ///
    /// # Panics
    /// If the slot is not being filled.
    pub fn commit(&mut self, slot: u32, complete: bool) -> Key {
        let entry = &mut self.slots[slot as usize];
        let SlotState::Filling(key) = entry.state else {
            panic!("commit of slot `{slot}`, which is {:?}", entry.state)
        };
        if complete {
            self.arrivals += 1;
            entry.state = SlotState::Resident(key);
            entry.arrived = self.arrivals;
        } else {
            self.vacate(slot, key);
        }
        if self.pins.is_free(slot) {
            self.let_go(slot);
        }
        key
    }

    /// Counts `uses` more demands of a key than its plan did, for a plan that spoke for many rows.
    pub fn credit(&mut self, key: Key, uses: u32) {
        let record = self.record(key);
        if uses == 0 || self.options.strategy.decay() == 0.0 {
            return;
        }
        let now = self.now(key.layer);
        self.heat[record] = log_add(self.heat[record], now + f64::from(uses).log2());
        if let Some(slot) = self.find(key) {
            self.slots[slot as usize].worth = self.heat[record];
            self.reorder(slot, key);
        }
    }

    /// What a slot holds.
    pub fn state(&self, slot: u32) -> SlotState {
        self.slots[slot as usize].state
    }

    /// The slot of a key, resident or filling.
    pub fn find(&self, key: Key) -> Option<u32> {
        let slot = self.table[self.record(key)];
        (slot != NONE).then_some(slot)
    }

    /// When the slot's present bytes arrived, as a rising number; `None` while they have not.
    pub fn arrived(&self, slot: u32) -> Option<u64> {
        let slot = &self.slots[slot as usize];
        matches!(slot.state, SlotState::Resident(_)).then_some(slot.arrived)
    }

    /// Slot count.
    pub fn n_slots(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Slots that somebody holds. O(n).
    pub fn pinned(&self) -> u32 {
        (0..self.n_slots()).filter(|&slot| !self.pins.is_free(slot)).count() as u32
    }

    /// Counts since it was made.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Counts of one layer.
    pub fn layer_stats(&self, layer: u32) -> LayerStats {
        let Layer { hits, misses, slots, .. } = self.layers[layer as usize];
        LayerStats { hits, misses, slots }
    }

    pub(crate) fn owns(&self, pin: &Pin) -> bool {
        pin.is_of(&self.pins)
    }

    fn record(&self, key: Key) -> usize {
        let layer = self.layers[key.layer as usize];
        assert!(key.expert < layer.n_experts, "{key}: `{}` experts", layer.n_experts);
        (layer.base + key.expert) as usize
    }

    /// Pins the slot of a key that is resident or coming.
    fn hold(&mut self, key: Key, slot: u32, first: bool) -> Planned {
        let pin = self.pins.pin(slot);
        if self.order.contains(slot) {
            self.order.remove(key.layer, slot);
            self.rank(key.layer);
        }
        let was_idle = self.claim(slot);
        self.use_now(slot, key);
        let resident = matches!(self.state(slot), SlotState::Resident(_));
        if first {
            let layer = &mut self.layers[key.layer as usize];
            layer.hits += u64::from(resident);
            layer.misses += u64::from(!resident);
            let count = match (resident, was_idle) {
                (true, true) => {
                    self.stats.idle_hits += 1;
                    &mut self.stats.hits
                }
                (true, false) => &mut self.stats.hits,
                (false, true) => &mut self.stats.adopted,
                (false, false) => &mut self.stats.joins,
            };
            *count += 1;
        }
        if resident { Planned::Hit(key, pin) } else { Planned::Join(key, pin, was_idle) }
    }

    /// Counts a demand. `begins`: it is the first of its plan.
    fn demand(&mut self, key: Key, begins: bool) {
        if key.layer != self.current || (begins && self.one_layer) {
            self.visit(key.layer);
        }
        let (record, now) = (self.record(key), self.now(key.layer));
        self.heat[record] = log_add(self.heat[record], now);
    }

    fn visit(&mut self, layer: u32) {
        self.step += u64::from(self.current == NONE || layer <= self.current);
        self.current = layer;
        let entry = &mut self.layers[layer as usize];
        entry.visits += 1;
        entry.visit_step = self.step;
        // What the visit before used is like all others now, unless this one uses it again.
        let mut fresh = std::mem::take(&mut self.fresh[layer as usize]);
        for slot in fresh.drain(..) {
            if let SlotState::Resident(key) = self.state(slot)
                && key.layer == layer
            {
                self.reorder(slot, key);
            }
        }
        self.fresh[layer as usize] = fresh;
        self.rank(layer);
    }

    /// Brings a slot to the place that its worth has now, if it is in the order.
    fn reorder(&mut self, slot: u32, key: Key) {
        if self.order.contains(slot) {
            self.order.remove(key.layer, slot);
            self.order.insert(key.layer, slot, self.worth(slot, key));
            self.rank(key.layer);
        }
    }

    fn worth(&self, slot: u32, key: Key) -> f64 {
        let entry = &self.slots[slot as usize];
        let keeps = matches!(self.options.strategy, StrategyKind::LayerCycle { .. });
        let fresh = keeps && entry.used_visit == self.layers[key.layer as usize].visits;
        entry.worth + if fresh { FRESH } else { 0.0 }
    }

    /// Notes that the layer's present visit uses the slot.
    fn freshen(&mut self, slot: u32, key: Key) {
        let visits = self.layers[key.layer as usize].visits;
        let entry = &mut self.slots[slot as usize];
        let fresh = &mut self.fresh[key.layer as usize];
        if entry.used_visit == visits {
            return;
        }
        // A sweep over most of a layer is no sign that all of it is needed soon again: its rest is
        // not kept.
        let room = fresh.len() < self.layers[key.layer as usize].n_experts.div_ceil(4) as usize;
        entry.used_visit = if room { visits } else { NO_VISIT };
        if room {
            fresh.push(slot);
        }
    }

    /// Time in which counts decay, times the decay.
    fn now(&self, layer: u32) -> f64 {
        let strategy = self.options.strategy;
        let time = match strategy {
            StrategyKind::LayerCycle { .. } => self.layers[layer as usize].visits,
            _ => self.step,
        };
        time as f64 * strategy.decay()
    }

    fn use_now(&mut self, slot: u32, key: Key) {
        self.clock += 1;
        let record = self.record(key);
        self.freshen(slot, key);
        let entry = &mut self.slots[slot as usize];
        entry.used_step = self.step;
        entry.worth = match self.options.strategy {
            StrategyKind::Lru => self.clock as f64,
            StrategyKind::Mru => -(self.clock as f64),
            StrategyKind::Lfu { .. } | StrategyKind::LayerCycle { .. } => self.heat[record],
        };
    }

    /// Refreshes the layer's place in the tournament.
    fn rank(&mut self, layer: u32) {
        let Some(top) = self.order.top(layer) else {
            self.order.rank(layer, None);
            return;
        };
        let entry = self.layers[layer as usize];
        let over = self.options.scope == Scope::PerLayer && entry.slots > entry.share;
        let (mut class, mut worth) = (u8::from(!over), self.order.worth(top));
        if let StrategyKind::LayerCycle { half_life } = self.options.strategy {
            if worth >= FRESH / 2.0 {
                class += 2;
            }
            let heat = self.slots[top as usize].worth;
            worth = -self.next_use(layer, heat, half_life);
        }
        self.order.rank(layer, Some(Rank { class, worth }));
    }

    /// When a key of such heat is expected to be used next, in turns of the cycle.
    ///
    /// The layer comes by once a turn, and each time the key is used with a probability that its
    /// decayed count estimates. All of it changes only with the layer's own visits, so ranks stay
    /// true between them.
    fn next_use(&self, layer: u32, heat: f64, half_life: u32) -> f64 {
        let entry = self.layers[layer as usize];
        let next_visit = entry.visit_step as f64 + f64::from(layer) / self.layers.len() as f64;
        let keep = (-1.0 / f64::from(half_life.max(1))).exp2();
        let visits = entry.visits.max(1) as f64;
        let window = (1.0 - keep.powf(visits)) / (1.0 - keep);
        let count = (heat - self.now(layer)).exp2();
        next_visit + (window / count).max(1.0)
    }

    /// A slot for a demanded key of the layer, emptied.
    fn take_slot(&mut self, layer: u32) -> Option<u32> {
        let entry = self.layers[layer as usize];
        let full = self.options.scope == Scope::PerLayer && entry.slots >= entry.share;
        if full && let Some(own) = self.order.top(layer) {
            return Some(self.evict(own));
        }
        if let Some(slot) = self.take_empty() {
            return Some(slot);
        }
        let victim = self.expired_resident().or_else(|| self.order.top(self.order.winner()?))?;
        Some(self.evict(victim))
    }

    fn take_empty(&mut self) -> Option<u32> {
        let slot = self.empty.pop()?;
        self.slots[slot as usize].listed = false;
        Some(slot)
    }

    fn evict(&mut self, slot: u32) -> u32 {
        let SlotState::Resident(key) = self.state(slot) else {
            panic!("invariant 2: victim `{slot}` is {:?}", self.state(slot))
        };
        assert!(self.pins.is_free(slot), "invariant 3: victim `{slot}` is pinned");
        self.order.remove(key.layer, slot);
        self.vacate(slot, key);
        self.stats.evictions += 1;
        slot
    }

    fn begin(&mut self, slot: u32, key: Key) {
        let record = self.record(key);
        assert!(self.table[record] == NONE, "invariant 1: {key} has a slot already");
        self.table[record] = slot;
        let entry = &mut self.slots[slot as usize];
        (entry.state, entry.used_visit) = (SlotState::Filling(key), NO_VISIT);
        self.layers[key.layer as usize].slots += 1;
        self.rank(key.layer);
    }

    fn vacate(&mut self, slot: u32, key: Key) {
        let record = self.record(key);
        assert!(self.table[record] == slot, "invariant 1: {key} is not in slot `{slot}`");
        self.table[record] = NONE;
        self.slots[slot as usize].state = SlotState::Empty;
        self.layers[key.layer as usize].slots -= 1;
        if self.claim(slot) {
            self.stats.wasted += 1;
        }
        self.rank(key.layer);
    }

    /// Puts a slot that nobody holds where it can be taken.
    fn let_go(&mut self, slot: u32) {
        let entry = &mut self.slots[slot as usize];
        match entry.state {
            SlotState::Filling(_) => {}
            SlotState::Resident(key) => {
                if !self.order.contains(slot) {
                    let worth = self.worth(slot, key);
                    self.order.insert(key.layer, slot, worth);
                    self.rank(key.layer);
                }
            }
            SlotState::Empty => {
                if !entry.listed {
                    entry.listed = true;
                    self.empty.push(slot);
                }
            }
        }
    }

    /// Puts back in order what was let go since the last plan.
    fn notice_released(&mut self) {
        let mut at = self.pins.take_released();
        while let Some((slot, next)) = self.pins.release(at) {
            if self.pins.is_free(slot) {
                self.let_go(slot);
            }
            at = next;
        }
    }

    /// Whether a demand could take a slot now.
    pub fn can_take(&mut self) -> bool {
        self.notice_released();
        !self.empty.is_empty() || self.order.winner().is_some()
    }

    /// Panics if an invariant does not hold. O(n), for tests.
    pub fn check(&mut self) {
        self.notice_released();
        let mut by_layer = vec![0; self.layers.len()];
        for (slot, entry) in (0..).zip(&self.slots) {
            let (ordered, free) = (self.order.contains(slot), self.pins.is_free(slot));
            match entry.state {
                SlotState::Empty => {
                    assert!(!ordered, "invariant 6: empty slot `{slot}` is in the order");
                    assert_eq!(entry.listed, free, "invariants 6 and 7: slot `{slot}`");
                    assert_eq!(entry.idle_since, None, "invariant 5: slot `{slot}` is empty");
                }
                SlotState::Filling(key) | SlotState::Resident(key) => {
                    assert_eq!(self.table[self.record(key)], slot, "invariant 1: {key}");
                    let resident = matches!(entry.state, SlotState::Resident(_));
                    assert_eq!(ordered, resident && free, "invariants 2, 3, 6: slot `{slot}`");
                    assert!(!entry.listed, "invariant 6: slot `{slot}` is not empty");
                    if ordered {
                        assert_eq!(self.order.worth(slot), self.worth(slot, key), "`{slot}`");
                    }
                    by_layer[key.layer as usize] += 1;
                }
            }
            assert_eq!(self.idle.contains(&slot), entry.idle_since.is_some(), "invariant 5");
        }
        let held = self.table.iter().filter(|&&slot| slot != NONE).count();
        assert_eq!(held, by_layer.iter().map(|&n| n as usize).sum::<usize>(), "invariant 1");
        for (layer, held) in self.layers.iter().zip(by_layer) {
            assert_eq!(layer.slots, held, "invariant 1");
        }
        assert!(self.idle.len() <= self.options.idle_slots_max as usize, "invariant 5");
        let listed = self.slots.iter().filter(|slot| slot.listed).count();
        assert_eq!(listed, self.empty.len(), "invariant 6");
        self.order.check();
    }
}

#[cfg(test)]
mod tests;
