//! Scripted traces, and random sequences against a naive map.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

const ALL: [StrategyKind; 4] = [
    StrategyKind::Lru,
    StrategyKind::Mru,
    StrategyKind::Lfu { half_life: 4 },
    StrategyKind::LayerCycle { half_life: 4 },
];

fn key(layer: u32, expert: u32) -> Key {
    Key { layer, expert }
}

fn policy(slots: u32, n_experts: &[u32], strategy: StrategyKind, scope: Scope) -> Policy {
    Policy::new(slots, n_experts, PolicyOptions { strategy, scope, idle_slots_max: 2 })
}

/// Plans, commits all reads, lets all go; returns how many were hits.
fn visit(policy: &mut Policy, keys: &[Key]) -> usize {
    let mut planned = Vec::new();
    policy.plan(keys, &mut planned);
    let mut hits = 0;
    for planned in &planned {
        match planned {
            Planned::Hit(..) => hits += 1,
            Planned::Read(key, pin) => assert_eq!(policy.commit(pin.slot(), true), *key),
            other => panic!("{other:?} in a trace without company"),
        }
    }
    drop(planned);
    policy.check();
    hits
}

fn experts(layer: u32, experts: &[u32]) -> Vec<Key> {
    experts.iter().map(|&expert| key(layer, expert)).collect()
}

fn resident(policy: &Policy, layer: u32, n_experts: u32) -> Vec<u32> {
    (0..n_experts).filter(|&expert| policy.find(key(layer, expert)).is_some()).collect()
}

fn read(planned: &Planned) -> &Pin {
    let Planned::Read(_, pin) = planned else { panic!("{planned:?} is no read") };
    pin
}

#[test]
fn lru_gives_up_the_oldest_and_mru_the_newest() {
    for (strategy, left) in [(StrategyKind::Lru, [0, 2, 3]), (StrategyKind::Mru, [1, 2, 3])] {
        let mut policy = policy(3, &[8], strategy, Scope::Global);
        for expert in [0, 1, 2, 0, 3] {
            visit(&mut policy, &[key(0, expert)]);
        }
        assert_eq!(resident(&policy, 0, 8), left, "{strategy:?}");
    }
}

#[test]
fn hits_of_a_plan_are_no_victims_of_it() {
    for strategy in ALL {
        let mut policy = policy(3, &[8], strategy, Scope::Global);
        visit(&mut policy, &experts(0, &[0, 1, 2]));
        // Misses come first in the list, and each hit would be somebody's favourite victim.
        assert_eq!(visit(&mut policy, &experts(0, &[5, 0, 2])), 2, "{strategy:?}");
        assert_eq!(resident(&policy, 0, 8), [0, 2, 5]);
    }
}

#[test]
fn a_plan_beyond_the_slots_waits() {
    let mut policy = policy(2, &[8], StrategyKind::Mru, Scope::Global);
    let mut planned = Vec::new();
    policy.plan(&experts(0, &[0, 1, 2]), &mut planned);
    assert!(matches!(planned[2], Planned::Wait(k) if k == key(0, 2)), "{planned:?}");
    assert!(!policy.can_take());
    for planned in &planned[..2] {
        policy.commit(read(planned).slot(), true);
    }
    assert!(!policy.can_take(), "pinned");
    let kept = planned.swap_remove(1);
    drop(planned);
    let mut planned = Vec::new();
    policy.plan_again(&[key(0, 2)], &mut planned);
    assert_ne!(read(&planned[0]).slot(), read(&kept).slot(), "invariant 3");
    assert_eq!(policy.stats().misses, 3, "a wait is counted once");
    policy.check();
}

#[test]
fn a_filling_slot_is_no_victim_and_is_joined() {
    let mut policy = policy(1, &[4], StrategyKind::Mru, Scope::Global);
    let mut planned = Vec::new();
    policy.plan(&[key(0, 0)], &mut planned);
    let slot = read(&planned[0]).slot();
    planned.clear();
    policy.check();
    policy.plan(&[key(0, 1), key(0, 0)], &mut planned);
    assert!(matches!(planned[0], Planned::Wait(_)), "unpinned, but filling: {planned:?}");
    assert!(matches!(planned[1], Planned::Join(_, _, false)), "{planned:?}");
    assert_eq!(policy.arrived(slot), None);
    policy.commit(slot, true);
    assert_eq!(policy.arrived(slot), Some(1));
}

#[test]
fn a_failed_slot_is_free_when_nobody_holds_it() {
    let mut policy = policy(1, &[4], StrategyKind::Lru, Scope::Global);
    let (mut planned, mut other) = (Vec::new(), Vec::new());
    policy.plan(&[key(0, 0)], &mut planned);
    policy.plan(&[key(0, 0)], &mut other);
    policy.commit(0, false);
    planned.clear();
    policy.check();
    policy.plan(&[key(0, 1)], &mut planned);
    assert!(matches!(planned[0], Planned::Wait(_)), "invariant 7: {planned:?}");
    other.clear();
    planned.clear();
    policy.plan_again(&[key(0, 1)], &mut planned);
    assert_eq!(read(&planned[0]).slot(), 0);
}

#[test]
fn a_slot_let_go_and_taken_again_is_no_victim() {
    let mut policy = policy(1, &[4], StrategyKind::Lru, Scope::Global);
    visit(&mut policy, &[key(0, 0)]);
    // As when another thread drops a pin between the start of a plan and its hit.
    drop(policy.pins.pin(0));
    policy.order.remove(0, 0);
    policy.rank(0);
    let pin = policy.pins.pin(0);
    policy.check();
    assert!(!policy.can_take());
    drop(pin);
    assert!(policy.can_take());
}

#[test]
fn a_key_twice_in_a_plan_has_one_slot() {
    let mut policy = policy(4, &[4], StrategyKind::Lru, Scope::Global);
    let mut planned = Vec::new();
    policy.plan(&experts(0, &[1, 1]), &mut planned);
    assert!(matches!(planned[1], Planned::Join(..)), "{planned:?}");
    policy.commit(read(&planned[0]).slot(), true);
    planned.clear();
    policy.check();
}

#[test]
fn counts_age() {
    let lfu = StrategyKind::Lfu { half_life: 2 };
    let mut policy = policy(2, &[8], lfu, Scope::Global);
    for _ in 0..6 {
        visit(&mut policy, &[key(0, 0)]);
    }
    for expert in [1, 2, 3] {
        visit(&mut policy, &[key(0, expert)]);
    }
    assert!(policy.find(key(0, 0)).is_some(), "often used");
    for expert in [4, 5, 4, 5, 4, 5, 4, 5, 4, 5] {
        visit(&mut policy, &[key(0, expert)]);
    }
    assert!(policy.find(key(0, 0)).is_none(), "long ago");
}

#[test]
fn counts_outlive_the_slot() {
    let mut policy = policy(2, &[8], StrategyKind::Lfu { half_life: 1000 }, Scope::Global);
    for expert in [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 0] {
        visit(&mut policy, &[key(0, expert)]);
    }
    visit(&mut policy, &[key(0, 3)]);
    // 0 came back with its old count: 4 uses, as many as 1 and 2, and the latest.
    visit(&mut policy, &[key(0, 0)]);
    assert!(policy.find(key(0, 0)).is_some() && policy.find(key(0, 3)).is_none());
}

#[test]
fn the_cycle_gives_up_what_just_went_by() {
    let mut policy = policy(4, &[1; 5], StrategyKind::LayerCycle { half_life: 8 }, Scope::Global);
    // A loop one longer than the cache: recency keeps nothing, the cycle all but one.
    let mut hits = 0;
    for _ in 0..20 {
        for layer in 0..5 {
            hits += visit(&mut policy, &[key(layer, 0)]);
        }
    }
    assert!(hits >= 70, "`{hits}` of 100");
    let mut policy = self::policy(4, &[1; 5], StrategyKind::Lru, Scope::Global);
    let turns = (0..100).map(|i| visit(&mut policy, &[key(i % 5, 0)])).sum::<usize>();
    assert_eq!(turns, 0);
}

#[test]
fn shares_protect_a_layer() {
    let loud = |policy: &mut Policy| {
        visit(policy, &experts(0, &[0, 1]));
        for expert in 0..8 {
            visit(policy, &[key(1, expert)]);
        }
    };
    let mut global = policy(4, &[8, 8], StrategyKind::Lru, Scope::Global);
    loud(&mut global);
    assert_eq!(resident(&global, 0, 8), []);
    let mut shared = policy(4, &[8, 8], StrategyKind::Lru, Scope::PerLayer);
    loud(&mut shared);
    assert_eq!(resident(&shared, 0, 8), [0, 1]);
    assert_eq!(shared.layer_stats(1).slots, 2);
}

#[test]
fn a_share_can_be_exceeded_when_pins_leave_no_choice() {
    let mut policy = policy(4, &[8, 8], StrategyKind::Lru, Scope::PerLayer);
    visit(&mut policy, &experts(0, &[0, 1]));
    let mut planned = Vec::new();
    policy.plan(&experts(1, &[0, 1, 2, 3]), &mut planned);
    assert!(planned.iter().all(|planned| matches!(planned, Planned::Read(..))), "{planned:?}");
    for planned in planned.drain(..) {
        policy.commit(read(&planned).slot(), true);
    }
    // And the layer that lost gets its share back from the one that has too much.
    visit(&mut policy, &experts(0, &[0, 1]));
    assert_eq!((policy.layer_stats(0).slots, policy.layer_stats(1).slots), (2, 2));
}

fn prefetch(policy: &mut Policy, keys: &[Key]) -> Vec<(Key, u32)> {
    let mut granted = Vec::new();
    policy.plan_idle(keys, &mut granted);
    policy.check();
    granted
}

#[test]
fn speculation_takes_nothing_that_is_wanted() {
    for strategy in ALL {
        let mut policy = policy(4, &[8, 8], strategy, Scope::Global);
        let mut planned = Vec::new();
        visit(&mut policy, &experts(0, &[0, 1]));
        policy.plan(&experts(0, &[2]), &mut planned);
        visit(&mut policy, &experts(0, &[3]));
        assert_eq!(prefetch(&mut policy, &experts(1, &[0])), [], "{strategy:?}: this step's");
        // The next step (as if layer 1 had gone by) wants 0 only; 1 and 3 may go, 2 is filling.
        policy.current = 1;
        visit(&mut policy, &experts(0, &[0]));
        let granted = prefetch(&mut policy, &experts(1, &[0, 1, 2, 3]));
        assert_eq!(granted.len(), 2, "{strategy:?}: bounded by idle_slots_max and by what may go");
        assert_eq!(resident(&policy, 0, 8), [0, 2]);
    }
}

#[test]
fn speculation_is_bounded_adopted_and_expires() {
    let mut policy = policy(8, &[8, 8, 8], StrategyKind::Lru, Scope::Global);
    visit(&mut policy, &experts(0, &[0]));
    let granted = prefetch(&mut policy, &experts(1, &[0, 1, 2]));
    assert_eq!(granted.len(), 2, "idle_slots_max");
    assert_eq!(prefetch(&mut policy, &experts(1, &[0])), [], "on its way already");
    policy.commit(granted[1].1, true);
    let mut planned = Vec::new();
    policy.plan(&experts(1, &[0]), &mut planned);
    assert!(matches!(planned[0], Planned::Join(_, _, true)), "{planned:?}");
    policy.commit(granted[0].1, true);
    // Layer 1 goes by without asking for its expert 1: it makes room for the next guess.
    visit(&mut policy, &experts(2, &[0]));
    let next = prefetch(&mut policy, &experts(0, &[1, 2]));
    assert_eq!(next.len(), 2);
    assert_eq!(next[0].1, granted[1].1, "in its place");
    let stats = policy.stats();
    assert_eq!((stats.adopted, stats.wasted, stats.idle_records), (1, 1, 4));
    policy.commit(next[0].1, true);
    visit(&mut policy, &experts(0, &[1]));
    assert_eq!(policy.stats().idle_hits, 1);
    assert_eq!(policy.expired_filling().count(), 0, "layer 0 is not over");
    visit(&mut policy, &experts(1, &[0]));
    assert_eq!(policy.expired_filling().collect::<Vec<_>>(), [next[1].1]);
}

#[test]
fn credit_is_worth_as_much_as_demands() {
    let mut policy = policy(2, &[8], StrategyKind::LayerCycle { half_life: 100 }, Scope::Global);
    visit(&mut policy, &experts(0, &[0, 1]));
    policy.credit(key(0, 0), 50);
    for expert in 2..8 {
        visit(&mut policy, &[key(0, expert)]);
        assert!(policy.find(key(0, 0)).is_some(), "after expert `{expert}`");
    }
}

#[test]
fn a_device_thread_lets_go() {
    let mut policy = policy(4, &[64], StrategyKind::Mru, Scope::Global);
    let (send, receive) = std::sync::mpsc::channel::<Vec<Planned>>();
    let device = std::thread::spawn(move || receive.iter().for_each(drop));
    for turn in 0..2000 {
        let keys = experts(0, &[turn % 64, (turn * 7 + 1) % 64]);
        let mut planned = Vec::new();
        policy.plan(&keys, &mut planned);
        for planned in &planned {
            if let Planned::Read(_, pin) = planned {
                policy.commit(pin.slot(), true);
            }
        }
        send.send(planned).expect("the device lives");
    }
    drop(send);
    device.join().expect("the device does not panic");
    policy.check();
    assert_eq!(policy.pinned(), 0);
}

/// One operation of a random sequence; numbers are taken modulo what there is.
#[derive(Clone, Debug)]
enum Op {
    Plan(u32, Vec<u32>),
    Prefetch(u32, Vec<u32>),
    Commit(usize, bool),
    Unpin(usize),
    Clone(usize),
    Credit(u32, u32),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let keys = || (0..3_u32, prop::collection::vec(0..6_u32, 1..5));
    let op = prop_oneof![
        4 => keys().prop_map(|(layer, experts)| Op::Plan(layer, experts)),
        1 => keys().prop_map(|(layer, experts)| Op::Prefetch(layer, experts)),
        4 => (any::<usize>(), prop::bool::weighted(0.8)).prop_map(|(at, ok)| Op::Commit(at, ok)),
        5 => any::<usize>().prop_map(Op::Unpin),
        1 => any::<usize>().prop_map(Op::Clone),
        1 => (0..3_u32, 0..6_u32).prop_map(|(layer, expert)| Op::Credit(layer, expert)),
    ];
    prop::collection::vec(op, 1..200)
}

/// The naive map: what is where, and who holds it.
#[derive(Debug, Default)]
struct Model {
    /// By slot: the key, and whether its bytes are there.
    slots: BTreeMap<u32, (Key, bool)>,
    pins: Vec<Pin>,
    used: BTreeMap<u32, u64>,
    clock: u64,
}

impl Model {
    fn find(&self, key: Key) -> Option<(u32, bool)> {
        self.slots.iter().find(|(_, held)| held.0 == key).map(|(&slot, held)| (slot, held.1))
    }
    fn is_pinned(&self, slot: u32) -> bool {
        self.pins.iter().any(|pin| pin.slot() == slot)
    }
    fn may_take(&self, slot: u32) -> bool {
        !self.is_pinned(slot) && self.slots.get(&slot).is_none_or(|held| held.1)
    }
    fn touch(&mut self, slot: u32) {
        self.clock += 1;
        self.used.insert(slot, self.clock);
    }

    /// Every decision is the only legal one, but for the choice of the victim.
    fn plan(&mut self, keys: &[Key], planned: Vec<Planned>, n_slots: u32, lru: bool) {
        // Hits first (invariant 4).
        let mut misses = Vec::new();
        for (&key, planned) in keys.iter().zip(planned) {
            match (self.find(key), planned) {
                (Some((slot, true)), Planned::Hit(k, pin))
                | (Some((slot, false)), Planned::Join(k, pin, _)) => {
                    assert_eq!((k, pin.slot()), (key, slot));
                    self.touch(slot);
                    self.pins.push(pin);
                }
                (None, planned) => misses.push((key, planned)),
                (held, planned) => panic!("{planned:?} for {key}, held: {held:?}"),
            }
        }
        for (key, planned) in misses {
            match planned {
                Planned::Join(k, pin, _) => {
                    assert_eq!(self.find(key), Some((pin.slot(), false)), "{k} twice in a plan");
                    self.touch(pin.slot());
                    self.pins.push(pin);
                }
                Planned::Read(k, pin) => {
                    assert_eq!((k, self.find(key)), (key, None), "invariant 1");
                    assert!(self.may_take(pin.slot()), "invariants 2, 3, 7: `{}`", pin.slot());
                    if lru {
                        self.is_oldest(pin.slot(), n_slots);
                    }
                    self.slots.insert(pin.slot(), (key, false));
                    self.touch(pin.slot());
                    self.pins.push(pin);
                }
                Planned::Wait(_) => {
                    let taken = (0..n_slots).find(|&slot| self.may_take(slot));
                    assert_eq!(taken, None, "{key} waits while a slot can be taken");
                }
                Planned::Hit(..) => panic!("{planned:?} of a miss"),
            }
        }
    }

    fn is_oldest(&self, slot: u32, n_slots: u32) {
        let candidates = || (0..n_slots).filter(|&slot| self.may_take(slot));
        let is_empty = |slot: u32| !self.slots.contains_key(&slot);
        if candidates().any(is_empty) {
            assert!(is_empty(slot), "`{slot}` was taken while another is empty");
        } else {
            assert_eq!(candidates().min_by_key(|slot| self.used[slot]), Some(slot));
        }
    }
}

fn run(ops: Vec<Op>, slots: u32, strategy: StrategyKind, scope: Scope, idle: u32) {
    let options = PolicyOptions { strategy, scope, idle_slots_max: idle };
    let mut policy = Policy::new(slots, &[6, 6, 6], options);
    let mut model = Model::default();
    let lru = strategy == StrategyKind::Lru && scope == Scope::Global && idle == 0;
    for op in ops {
        match op {
            Op::Plan(layer, list) => {
                let keys = experts(layer, &list);
                let mut planned = Vec::new();
                policy.plan(&keys, &mut planned);
                model.plan(&keys, planned, slots, lru);
            }
            Op::Prefetch(layer, list) => {
                let mut granted = Vec::new();
                policy.plan_idle(&experts(layer, &list), &mut granted);
                for (key, slot) in granted {
                    assert!(model.may_take(slot) && model.find(key).is_none(), "invariant 5");
                    model.slots.insert(slot, (key, false));
                    model.touch(slot);
                }
            }
            Op::Commit(at, ok) => {
                let filling: Vec<u32> =
                    model.slots.iter().filter(|(_, held)| !held.1).map(|(&slot, _)| slot).collect();
                let Some(&slot) = filling.get(at % filling.len().max(1)) else { continue };
                let key = policy.commit(slot, ok);
                assert_eq!(model.slots[&slot].0, key);
                if ok {
                    model.slots.insert(slot, (key, true));
                } else {
                    model.slots.remove(&slot);
                }
            }
            Op::Unpin(at) => {
                if !model.pins.is_empty() {
                    let at = at % model.pins.len();
                    model.pins.swap_remove(at);
                }
            }
            Op::Clone(at) => {
                if !model.pins.is_empty() {
                    let pin = model.pins[at % model.pins.len()].clone();
                    model.pins.push(pin);
                }
            }
            Op::Credit(layer, expert) => policy.credit(key(layer, expert), 3),
        }
        policy.check();
        for slot in 0..slots {
            let state = match model.slots.get(&slot) {
                None => SlotState::Empty,
                Some(&(key, false)) => SlotState::Filling(key),
                Some(&(key, true)) => SlotState::Resident(key),
            };
            assert_eq!(policy.state(slot), state, "slot `{slot}`");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 400,
        failure_persistence: None,
        ..Default::default()
    })]
    #[test]
    fn random_sequences_keep_the_invariants(
        ops in ops(),
        slots in 1..9_u32,
        strategy in prop::sample::select(ALL.to_vec()),
        scope in prop::sample::select(vec![Scope::Global, Scope::PerLayer]),
        idle in 0..3_u32,
    ) {
        run(ops, slots, strategy, scope, idle);
    }

    #[test]
    fn lru_is_lru(ops in ops(), slots in 1..9_u32) {
        run(ops, slots, StrategyKind::Lru, Scope::Global, 0);
    }
}
