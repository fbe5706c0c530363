//! Each thing that can go wrong, alone.

use crate::world::*;
use snowmelt_expert_store::{
    Fault, FaultKind, FaultSource, FaultWhen, FetchResult, FetchSet, Fetched, HostMemory, Key,
    ManualClock, MemorySource, PolicyOptions, Store, StoreError, StoreOptions, StrategyKind,
};
use std::sync::Arc;
use std::time::Duration;

struct Rig {
    world: World,
    memory: Arc<HostMemory>,
    store: Store,
    set: FetchSet,
}

fn always(kind: FaultKind) -> Fault {
    Fault { when: FaultWhen::Always, kind, times: u64::MAX }
}

fn nth(n: u64, kind: FaultKind) -> Fault {
    Fault { when: FaultWhen::Nth(n), kind, times: 1 }
}

/// Time runs by itself, a second for each look at the clock.
fn options() -> StoreOptions {
    let clock = Arc::new(ManualClock::new(Duration::from_secs(1)));
    let policy = PolicyOptions { strategy: StrategyKind::Mru, ..Default::default() };
    StoreOptions { policy, poison: true, clock, ..Default::default() }
}

impl Rig {
    fn new(slots: u32, script: impl IntoIterator<Item = Fault>, options: StoreOptions) -> Self {
        let world = World::folder();
        let source = FaultSource::new(world.memory_source()).with_script(script);
        Self::over(world, source, slots, options)
    }
    fn over(
        world: World,
        source: FaultSource<MemorySource>,
        slots: u32,
        options: StoreOptions,
    ) -> Self {
        let memory = Arc::new(HostMemory::new(world.slot_bytes, slots).unwrap());
        let (map, source) = (world.map.clone(), Box::new(source));
        let store = Store::open(memory.clone(), map, source, options).unwrap();
        Self { world, memory, store, set: FetchSet::default() }
    }
    fn fetch(&mut self, keys: &[Key]) -> Vec<FetchResult> {
        let mut out = Vec::new();
        self.store.request(keys, &mut self.set).unwrap();
        while self.store.take_ready(&mut self.set, true, &mut out).unwrap() {}
        assert_eq!(out.len(), keys.len());
        out
    }
    fn good(&self, result: FetchResult) -> Fetched {
        let fetched = result.unwrap_or_else(|failed| panic!("{failed}"));
        self.world.check(&*self.memory, &fetched);
        fetched
    }
}

fn errors(results: &[FetchResult]) -> Vec<&StoreError> {
    results.iter().filter_map(|result| result.as_ref().err()).map(|failed| &failed.error).collect()
}

#[test]
fn short_reads_are_asked_again() {
    let mut rig = Rig::new(6, [always(FaultKind::ShortRead { got: 1000 })], options());
    for result in rig.fetch(&keys(0, 0..EXPERTS)) {
        rig.good(result);
    }
    assert!(rig.store.stats().reads > 6 * 30);
    assert_eq!(rig.store.stats().demand_bytes, 6 * (30_011 + 517 + 4_099));
    assert_eq!(rig.store.failed(), None);
}

#[test]
fn an_error_fails_its_key_alone_and_latches() {
    // The second piece of the third record.
    let mut rig = Rig::new(6, [nth(7, FaultKind::Errno(5))], options());
    let results = rig.fetch(&keys(0, 0..4));
    let failed: Vec<_> = results.iter().filter_map(|result| result.as_ref().err()).collect();
    let [failed] = &failed[..] else { panic!("{failed:?}") };
    let bad = Key { layer: 0, expert: 2 };
    assert_eq!(failed.key, bad);
    let StoreError::Read { key, ref path, offset, wanted, got: 0, errno: Some(5) } = failed.error
    else {
        panic!("{failed:?}")
    };
    assert_eq!((key, offset, wanted), (bad, 13 + 2 * 30_528 + 30_011, 517));
    let text = failed.to_string();
    for part in [&*path.to_string_lossy(), "layer `0` expert `2`", "`517`", "errno `5`"] {
        assert!(text.contains(part), "`{part}` in: {text}");
    }
    let first = rig.store.failed().unwrap().clone();
    assert_eq!(first, failed.error);
    for fetched in results.into_iter().flatten() {
        rig.good(Ok(fetched));
    }
    // Hits are served, what would have to be read is not, the failed one included.
    let results = rig.fetch(&keys(0, [0, 2, 3, 5]));
    let latched = StoreError::Latched { first: Arc::new(first) };
    assert_eq!(errors(&results), [&latched, &latched]);
    for fetched in results.into_iter().flatten() {
        rig.good(Ok(fetched));
    }
    let reads = rig.store.stats().reads;
    rig.store.prefetch(&keys(1, 0..2)).unwrap();
    assert_eq!(rig.store.stats().reads, reads);
    rig.store.check();
}

#[test]
fn keys_that_wait_for_a_slot_when_it_latches_fail_too() {
    let mut rig = Rig::new(2, [nth(0, FaultKind::Errno(5))], options());
    let results = rig.fetch(&keys(0, 0..4));
    let latched = |error: &&&StoreError| matches!(error, StoreError::Latched { .. });
    assert_eq!(errors(&results).iter().filter(latched).count(), 2, "{results:?}");
    rig.store.check();
}

#[test]
fn a_file_that_ends_is_an_error() {
    let covers = FaultWhen::Covers { file: 1, offset: 6_144 };
    let fault = Fault { when: covers, kind: FaultKind::Truncated, times: 1 };
    let mut rig = Rig::new(6, [fault], options());
    let results = rig.fetch(&keys(0, 0..3));
    let [StoreError::Truncated { key, offset: 6_144, wanted: 4_099, got: 0, .. }] =
        errors(&results)[..]
    else {
        panic!("{results:?}")
    };
    assert_eq!(*key, Key { layer: 0, expert: 1 });
}

#[test]
fn a_read_that_stalls_times_out_and_comes_late_into_nobodys_slot() {
    let mut rig = Rig::new(3, [nth(1, FaultKind::Stall { polls: 500 })], options());
    let results = rig.fetch(&keys(0, 0..3));
    let [StoreError::TimedOut { key, offset, wanted: 517, waited_ms: 30_000, .. }] =
        errors(&results)[..]
    else {
        panic!("{results:?}")
    };
    assert_eq!((*key, *offset), (Key { layer: 0, expert: 0 }, 13 + 30_011));
    assert_eq!(rig.store.in_flight(), 1, "its slot is still the source's");
    let kept: Vec<Fetched> = results.into_iter().filter_map(Result::ok).collect();
    assert_eq!(kept.len(), 2);
    // It joins the dead read and is told so at once.
    assert!(matches!(errors(&rig.fetch(&keys(0, [0])))[..], [StoreError::TimedOut { .. }]));
    for _ in 0..600 {
        rig.store.poll();
    }
    assert_eq!(rig.store.in_flight(), 0, "it came back");
    for fetched in &kept {
        rig.world.check(&*rig.memory, fetched);
    }
    assert!(matches!(errors(&rig.fetch(&keys(0, [0])))[..], [StoreError::Latched { .. }]));
    rig.store.check();
}

#[test]
fn reads_that_never_come_back_do_not_hang_the_store_or_its_drop() {
    let clock = Arc::new(ManualClock::new(Duration::from_secs(1)));
    let options = StoreOptions { clock: clock.clone(), ..options() };
    let mut rig = Rig::new(6, [always(FaultKind::Stall { polls: u64::MAX })], options);
    let results = rig.fetch(&keys(0, 0..3));
    // All at once, not one time-out after the other.
    assert!(snowmelt_expert_store::Clock::now(&*clock) < Duration::from_secs(60));
    assert_eq!(errors(&results).len(), 3, "{results:?}");
    assert!(
        results
            .iter()
            .all(|r| matches!(&r.as_ref().unwrap_err().error, StoreError::TimedOut { .. }))
    );
    rig.store.drain();
    rig.store.check();
    assert_eq!(rig.store.in_flight(), 9);
}

#[test]
fn late_and_reordered_reports_change_nothing() {
    let world = World::folder();
    let source = FaultSource::new(world.memory_source())
        .with_script([always(FaultKind::Late { polls: 5 })])
        .with_rates(3, snowmelt_expert_store::FaultRates { reorder: true, ..Default::default() });
    let mut rig = Rig::over(world, source, 4, options());
    for turn in 0..5 {
        for result in rig.fetch(&keys(turn % 2, 0..4)) {
            rig.good(result);
        }
    }
}

#[test]
fn a_flipped_bit_is_found_by_the_verifier_and_only_by_it() {
    let flip = || nth(0, FaultKind::BitFlip { bit: 12_345 });
    let mut rig = Rig::new(4, [flip()], options());
    let result = rig.fetch(&keys(0, [0])).pop().unwrap().unwrap();
    let mut byte = [0];
    rig.memory.copy_out(result.slot, 12_345 / 8, &mut byte);
    assert_eq!(byte[0] ^ rig.world.expected(result.key)[0].1[12_345 / 8], 1 << (12_345 % 8));

    let good = rig.world.expected(Key { layer: 0, expert: 0 })[0].1.to_vec();
    let verify = move |key: Key, bytes: &[u8]| key.expert != 0 || bytes.starts_with(&good);
    let options = StoreOptions { verify: Some(Arc::new(verify)), ..options() };
    let mut rig = Rig::new(4, [flip()], options);
    let results = rig.fetch(&keys(0, [0, 1]));
    let [StoreError::Corrupt { key: Key { layer: 0, expert: 0 }, offset: 13, .. }] =
        errors(&results)[..]
    else {
        panic!("{results:?}")
    };
    assert!(matches!(rig.store.failed(), Some(StoreError::Corrupt { .. })));
}

#[test]
fn poison_covers_what_was_there() {
    let mut rig = Rig::new(1, [], options());
    for expert in 0..3 {
        let fetched = rig.fetch(&keys(0, [expert])).pop().unwrap();
        let fetched = rig.good(fetched);
        // Between the second piece and the third, nothing is read.
        let mut gap = [0; 100];
        rig.memory.copy_out(fetched.slot, 30_600, &mut gap);
        assert_eq!(gap, [0xFF; 100]);
    }
}

#[test]
fn when_all_slots_are_pinned_the_store_says_so() {
    let mut rig = Rig::new(2, [], options());
    let held = rig.fetch(&keys(0, [0, 1]));
    let mut out = Vec::new();
    rig.store.request(&keys(0, [2]), &mut rig.set).unwrap();
    assert_eq!(rig.store.take_ready(&mut rig.set, false, &mut out), Ok(true));
    let error = rig.store.take_ready(&mut rig.set, true, &mut out).unwrap_err();
    let StoreError::NoSlot { key, pinned: 2, slots: 2, waited_ms } = error else {
        panic!("{error:?}")
    };
    assert!(key == Key { layer: 0, expert: 2 } && waited_ms >= 5_000);
    // Nothing is lost: once a pin is dropped, it comes.
    drop(held);
    assert_eq!(rig.store.take_ready(&mut rig.set, true, &mut out), Ok(false));
    rig.good(out.pop().unwrap());
}

#[test]
fn a_pin_dropped_on_another_thread_ends_the_wait() {
    let mut rig = Rig::new(2, [], StoreOptions::default());
    let held = rig.fetch(&keys(0, [0, 1]));
    let device = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(20));
        drop(held);
    });
    let result = rig.fetch(&keys(0, [2])).pop().unwrap();
    rig.good(result);
    device.join().unwrap();
    assert!(rig.store.stats().wait_ns > 0);
}

#[test]
fn hits_are_there_at_once_and_the_set_holds_their_pins() {
    let mut rig = Rig::new(3, [], options());
    rig.fetch(&keys(0, [0, 1]));
    let mut other = FetchSet::default();
    rig.store.request(&keys(0, [1, 0]), &mut other).unwrap();
    // Three misses, one free slot: the pins of the other set keep its two.
    rig.store.request(&keys(1, [0, 1, 2]), &mut rig.set).unwrap();
    let mut out = Vec::new();
    assert_eq!(rig.store.take_ready(&mut rig.set, true, &mut out), Ok(true));
    assert_eq!(out.len(), 1);
    assert_eq!(rig.store.take_ready(&mut other, false, &mut out), Ok(false));
    let order: Vec<u32> =
        out[1..].iter().map(|result| result.as_ref().unwrap().key.expert).collect();
    assert_eq!(order, [0, 1], "in order of arrival, not of the request");
    for result in out.drain(..) {
        rig.good(result);
    }
    assert_eq!(rig.store.take_ready(&mut rig.set, true, &mut out), Ok(false));
    assert_eq!(out.len(), 2, "their pins were dropped");
    out.clear();
    // Clearing a set lets go, and what is under way lands all the same.
    rig.store.request(&keys(1, [3]), &mut rig.set).unwrap();
    rig.set.clear();
    rig.store.drain();
    rig.store.check();
    assert!(rig.store.is_resident(Key { layer: 1, expert: 3 }));
    let stats = rig.store.stats();
    assert_eq!((stats.hits, stats.misses), (2, 6));
}

#[test]
fn two_sets_share_one_read() {
    let mut rig = Rig::new(3, [always(FaultKind::Late { polls: 3 })], options());
    let mut other = FetchSet::default();
    rig.store.request(&keys(0, [0]), &mut rig.set).unwrap();
    rig.store.request(&keys(0, [0]), &mut other).unwrap();
    let mut out = Vec::new();
    for set in [&mut rig.set, &mut other] {
        while rig.store.take_ready(set, true, &mut out).unwrap() {}
    }
    let (a, b) = (out[0].clone().unwrap(), out[1].clone().unwrap());
    assert_eq!(a.slot, b.slot);
    assert_eq!((rig.store.stats().joins, rig.store.stats().reads), (1, 3));
}

#[test]
fn a_speculative_read_is_adopted() {
    let late = FaultKind::Late { polls: 20 };
    let late = Fault { when: FaultWhen::Idle, kind: late, times: u64::MAX };
    let mut rig = Rig::new(4, [late], options());
    rig.fetch(&keys(0, [0]));
    rig.store.prefetch(&keys(1, [0, 1])).unwrap();
    let result = rig.fetch(&keys(1, [1])).pop().unwrap();
    rig.good(result);
    rig.store.drain();
    let stats = rig.store.stats();
    assert_eq!((stats.adopted, stats.idle_records, stats.misses), (1, 2, 1));
    let record = 30_011 + 517 + 4_099;
    assert_eq!((stats.demand_bytes, stats.idle_bytes), (2 * record, record));
    let result = rig.fetch(&keys(1, [0])).pop().unwrap();
    rig.good(result);
    assert_eq!(rig.store.stats().idle_hits, 1);
}

#[test]
fn speculative_reads_that_have_not_started_are_taken_back() {
    // The memory source reads when it is polled, so nothing has started yet.
    let mut rig = Rig::new(6, [], options());
    rig.store.prefetch(&keys(1, [0, 1])).unwrap();
    assert_eq!(rig.store.in_flight(), 6);
    rig.store.cancel_prefetch();
    assert_eq!((rig.store.in_flight(), rig.store.stats().wasted), (0, 2));
    rig.store.check();
    // One that has started stays whole.
    let stall = Fault { when: FaultWhen::Idle, kind: FaultKind::Stall { polls: 9 }, times: 1 };
    let mut rig = Rig::new(6, [stall], options());
    rig.store.prefetch(&keys(1, [0])).unwrap();
    rig.store.cancel_prefetch();
    assert_eq!(rig.store.in_flight(), 3);
    rig.store.drain();
    assert!(rig.store.is_resident(Key { layer: 1, expert: 0 }));
    let result = rig.fetch(&keys(1, [0])).pop().unwrap();
    rig.good(result);
}

#[test]
fn a_failed_speculative_read_latches_but_fails_nobody() {
    let errno = Fault { when: FaultWhen::Idle, kind: FaultKind::Errno(5), times: 1 };
    let mut rig = Rig::new(6, [errno], options());
    rig.fetch(&keys(0, [0]));
    rig.store.prefetch(&keys(1, [0])).unwrap();
    rig.store.drain();
    assert!(matches!(rig.store.failed(), Some(StoreError::Read { .. })));
    let result = rig.fetch(&keys(0, [0])).pop().unwrap();
    rig.good(result);
    rig.store.check();
}

#[test]
fn a_speculative_read_that_never_comes_back_is_given_up() {
    let stall = FaultKind::Stall { polls: u64::MAX };
    let stall = Fault { when: FaultWhen::Idle, kind: stall, times: u64::MAX };
    let mut rig = Rig::new(6, [stall], options());
    rig.store.prefetch(&keys(1, [0])).unwrap();
    rig.store.drain();
    assert!(matches!(rig.store.failed(), Some(StoreError::TimedOut { .. })));
    rig.store.check();
}

#[test]
fn a_sweep_larger_than_the_slots_ends() {
    for strategy in [StrategyKind::Mru, StrategyKind::default()] {
        let policy = PolicyOptions { strategy, ..Default::default() };
        let mut rig = Rig::new(1, [], StoreOptions { policy, ..options() });
        let (mut out, mut seen) = (Vec::new(), 0);
        rig.store.request(&keys(0, 0..EXPERTS), &mut rig.set).unwrap();
        loop {
            let more = rig.store.take_ready(&mut rig.set, true, &mut out).unwrap();
            for result in std::mem::take(&mut out) {
                rig.good(result);
                seen += 1;
            }
            if !more {
                break;
            }
        }
        assert_eq!(seen, EXPERTS);
    }
}
