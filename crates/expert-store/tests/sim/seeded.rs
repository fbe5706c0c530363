//! Random callers over a disk that is late, short, out of order and sometimes broken.

use crate::world::*;
use snowmelt_expert_store::{
    FaultRates, FaultSource, FetchSet, Fetched, HostMemory, Key, ManualClock, PolicyOptions, Scope,
    Store, StoreError, StoreOptions, StrategyKind,
};
use std::sync::Arc;
use std::time::Duration;

/// Says which seed it was, if the test does not get to its end.
struct Seed(u64, &'static str);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            skip(&format!("seed `{}` of `{}` failed", self.0, self.1));
        }
    }
}

const STRATEGIES: [StrategyKind; 4] = [
    StrategyKind::Mru,
    StrategyKind::Lru,
    StrategyKind::Lfu { half_life: 3 },
    StrategyKind::LayerCycle { half_life: 3 },
];

struct Run<'a> {
    world: &'a World,
    memory: Arc<HostMemory>,
    store: Store,
    dice: Dice,
    sets: Vec<FetchSet>,
    held: Vec<Fetched>,
    /// Whether reads may fail.
    faulty: bool,
    delivered: u64,
    failed: u64,
}

impl Run<'_> {
    fn some_keys(&mut self) -> Vec<Key> {
        let (layer, n) = (self.dice.below(LAYERS.into()) as u32, 1 + self.dice.below(4));
        keys(layer, (0..n).map(|_| self.dice.below(EXPERTS.into()) as u32))
    }

    /// Whoever lets go looks at the bytes first: they must not have changed under its pin.
    fn let_go(&mut self, at: usize) {
        let fetched = self.held.swap_remove(at);
        self.world.check(&*self.memory, &fetched);
    }

    fn take(&mut self, set: usize, wait: bool) {
        let mut out = Vec::new();
        let result = self.store.take_ready(&mut self.sets[set], wait, &mut out);
        if let Err(error) = result {
            assert!(matches!(error, StoreError::NoSlot { .. }), "{error}");
            assert!(!self.held.is_empty() || self.sets.len() > 1, "{error}");
            self.sets[set].clear();
            while !self.held.is_empty() {
                self.let_go(0);
            }
        }
        for result in out {
            match result {
                Ok(fetched) => {
                    self.world.check(&*self.memory, &fetched);
                    self.delivered += 1;
                    self.held.push(fetched);
                }
                Err(failed) => {
                    assert!(self.faulty, "{failed}");
                    assert!(self.store.failed().is_some(), "{failed}");
                    self.failed += 1;
                }
            }
        }
    }

    fn step(&mut self) {
        let set = self.dice.below(self.sets.len() as u64) as usize;
        match self.dice.below(10) {
            0..=2 => {
                let keys = self.some_keys();
                self.store.request(&keys, &mut self.sets[set]).unwrap();
            }
            3 => {
                let keys = self.some_keys();
                self.store.prefetch(&keys).unwrap();
            }
            4 | 5 => self.take(set, false),
            6 => self.take(set, true),
            7 | 8 => {
                if !self.held.is_empty() {
                    let at = self.dice.below(self.held.len() as u64) as usize;
                    self.let_go(at);
                }
            }
            _ => match self.dice.below(4) {
                0 => self.sets[set].clear(),
                1 => self.store.cancel_prefetch(),
                _ => self.store.poll(),
            },
        }
        self.store.check();
    }

    /// All ends well: nothing under way, no slot lost, and if nothing failed, every record can be
    /// had through the slots there are.
    fn end(&mut self) {
        self.sets.iter_mut().for_each(FetchSet::clear);
        while !self.held.is_empty() {
            self.let_go(0);
        }
        self.store.drain();
        self.store.check();
        assert_eq!(self.store.in_flight(), 0);
        for layer in 0..LAYERS {
            let mut set = FetchSet::default();
            let slots = self.store.slots().min(EXPERTS);
            self.store.request(&keys(layer, 0..slots), &mut set).unwrap();
            let mut out = Vec::new();
            while self.store.take_ready(&mut set, true, &mut out).unwrap() {}
            if self.store.failed().is_some() {
                return;
            }
            assert_eq!(out.iter().filter(|result| result.is_ok()).count() as u32, slots);
        }
    }
}

fn run(world: &World, seed: u64, rates: FaultRates, name: &'static str) -> (u64, u64) {
    let _seed = Seed(seed, name);
    let mut dice = Dice(seed);
    let policy = PolicyOptions {
        strategy: STRATEGIES[dice.below(4) as usize],
        scope: if dice.below(2) == 0 { Scope::Global } else { Scope::PerLayer },
        idle_slots_max: dice.below(4) as u32,
    };
    let clock = Arc::new(ManualClock::new(Duration::from_millis(10)));
    let stuck_timeout = Duration::from_millis(200);
    let options = StoreOptions { policy, poison: true, clock, stuck_timeout, ..Default::default() };
    let memory = Arc::new(HostMemory::new(world.slot_bytes, 1 + dice.below(8) as u32).unwrap());
    let source = Box::new(FaultSource::new(world.memory_source()).with_rates(seed, rates));
    let store = Store::open(memory.clone(), world.map.clone(), source, options).unwrap();
    let sets = (0..=dice.below(3)).map(|_| FetchSet::default()).collect();
    let faulty = rates.errno + rates.truncated > 0;
    let held = Vec::new();
    let mut run = Run { world, memory, store, dice, sets, held, faulty, delivered: 0, failed: 0 };
    for _ in 0..120 {
        run.step();
    }
    run.end();
    (run.delivered, run.failed)
}

#[test]
fn a_slow_and_disorderly_disk_gives_the_same_bytes() {
    let world = World::folder();
    let rates = FaultRates {
        short: 200,
        stall: 50,
        late: 400,
        polls_max: 12,
        reorder: true,
        ..Default::default()
    };
    let results: Vec<_> = (0..150).map(|seed| run(&world, seed, rates, "slow")).collect();
    assert!(results.iter().map(|result| result.0).sum::<u64>() > 3_000);
}

#[test]
fn a_broken_disk_gives_the_same_bytes_or_an_error() {
    let world = World::folder();
    let rates = FaultRates {
        short: 100,
        errno: 6,
        truncated: 6,
        stall: 30,
        late: 300,
        polls_max: 12,
        reorder: true,
        ..Default::default()
    };
    let results: Vec<_> = (0..150).map(|seed| run(&world, 1000 + seed, rates, "broken")).collect();
    assert!(results.iter().map(|result| result.0).sum::<u64>() > 500);
    assert!(results.iter().any(|result| result.1 > 0), "something was meant to break");
}

/// The same callers over real reads of every kind.
#[test]
fn real_disks_give_the_same_bytes() {
    let world = World::packed();
    for (kind, source) in world.file_sources(&small_pieces()).into_iter().enumerate() {
        let seed = 2000 + kind as u64;
        let _seed = Seed(seed, source.name());
        let mut dice = Dice(seed);
        let memory = Arc::new(HostMemory::new(world.slot_bytes, 5).unwrap());
        let policy = PolicyOptions { strategy: StrategyKind::Mru, ..Default::default() };
        let stuck_timeout = Duration::from_millis(20);
        let options = StoreOptions { policy, poison: true, stuck_timeout, ..Default::default() };
        let store = Store::open(memory.clone(), world.map.clone(), source, options).unwrap();
        let sets = (0..=dice.below(3)).map(|_| FetchSet::default()).collect();
        let held = Vec::new();
        let mut run = Run {
            world: &world,
            memory,
            store,
            dice,
            sets,
            held,
            faulty: false,
            delivered: 0,
            failed: 0,
        };
        for _ in 0..400 {
            run.step();
        }
        run.end();
        assert!(run.delivered > 100);
    }
}
