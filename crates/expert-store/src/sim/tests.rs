use super::*;
use crate::error::StoreError;

fn small(skew: f64, repeat: f64) -> Trace {
    let spec = TraceSpec { n_layers: 12, n_experts: 64, top_k: 4, n_steps: 300, ..spec(1) };
    TraceSpec { skew, repeat, ..spec }.generate()
}

fn spec(seed: u64) -> TraceSpec {
    TraceSpec { seed, ..TraceSpec::default() }
}

#[test]
fn nothing_beats_the_optimum() {
    for trace in [small(0.0, 0.0), small(1.5, 0.0), small(0.5, 0.5)] {
        for slots in [48, 76, 192, 384, 700] {
            let best = optimum(&trace, slots, 0);
            for options in candidates() {
                let got = simulate(&trace, slots, options, 0);
                assert_eq!(got.asked, best.asked);
                assert!(got.hits <= best.hits, "{options:?}, `{slots}` slots: {got:?} {best:?}");
            }
        }
    }
}

#[test]
fn uniform_routes_hit_as_often_as_the_share_held() {
    let trace = small(0.0, 0.0);
    for options in candidates() {
        for share in [0.1, 0.25, 0.5] {
            let slots = (768.0 * share) as u32;
            let rate = simulate(&trace, slots, options, 75).rate();
            assert!((rate - share).abs() < 0.04, "{options:?}: `{rate}` at `{share}`");
        }
    }
}

#[test]
fn all_hit_when_all_fits() {
    let trace = small(0.0, 0.0);
    let cold = (0..12 * 64).filter(|&record| {
        let mut visits = trace.visits();
        visits.any(|(_, layer, experts)| layer == record / 64 && experts.contains(&(record % 64)))
    });
    let cold = cold.count() as u64;
    let best = optimum(&trace, 768, 0);
    assert_eq!(best.asked - best.hits, cold);
    for options in candidates() {
        assert_eq!(simulate(&trace, 768, options, 0), best, "{options:?}");
    }
}

#[test]
fn the_default_is_at_least_as_good_as_recency() {
    for (skew, repeat) in [(1.0, 0.0), (1.5, 0.2), (0.5, 0.5)] {
        let trace = small(skew, repeat);
        for slots in [76, 192, 384] {
            let with = |strategy| {
                let options = PolicyOptions { strategy, ..Default::default() };
                simulate(&trace, slots, options, 75).rate()
            };
            let (ours, lru) = (with(StrategyKind::default()), with(StrategyKind::Lru));
            assert!(ours > lru - 0.01, "`{ours}` `{lru}`, skew `{skew}`, repeat `{repeat}`");
        }
    }
}

#[test]
fn optimum_of_a_known_trace() {
    // The textbook's: 1 2 3 4 1 2 5 1 2 3 4 5 in three slots has seven faults.
    let mut trace = Trace::new(1, 6);
    for expert in [1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5] {
        trace.push(0, &[expert]);
    }
    assert_eq!(optimum(&trace, 3, 0), Hits { hits: 5, asked: 12 });
    let lru = PolicyOptions { strategy: StrategyKind::Lru, ..Default::default() };
    assert_eq!(simulate(&trace, 3, lru, 0), Hits { hits: 2, asked: 12 });
}

#[test]
fn traces_are_written_and_read() {
    let trace = small(1.0, 0.3);
    let (mut text, mut binary) = (Vec::new(), Vec::new());
    trace.write_text(&mut text).unwrap();
    trace.write_binary(&mut binary).unwrap();
    let visits =
        |trace: &Trace| trace.visits().map(|(s, l, e)| (s, l, e.to_vec())).collect::<Vec<_>>();
    assert_eq!(visits(&Trace::parse(&text).unwrap()), visits(&trace));
    assert_eq!(visits(&Trace::parse(&binary).unwrap()), visits(&trace));
    let trace = Trace::parse(b"# two steps\n0: 1 2 2\n\n3: 0\n0: 5 # again\n").unwrap();
    assert_eq!((trace.n_steps(), trace.n_layers(), trace.n_experts()), (2, 4, 6));
    assert_eq!(visits(&trace)[0], (0, 0, vec![1, 2]));
}

#[test]
fn broken_traces_say_where() {
    for text in ["0: 1\nnonsense\n", "0: 1\n1 2\n", "0: 1\n0: x\n", "0: 1\n0: 4000000000\n"] {
        let Err(StoreError::Trace { line, .. }) = Trace::parse(text.as_bytes()) else {
            panic!("`{text}` was read")
        };
        assert_eq!(line, 2, "{text}");
    }
    let mut binary = b"SMROUTE1".to_vec();
    for number in [0, 2, 7, 8, 1, 2, 3_u32] {
        binary.extend(number.to_le_bytes());
    }
    assert!(matches!(Trace::parse(&binary), Err(StoreError::Trace { line: 2, .. })));
    binary.truncate(26);
    assert!(matches!(Trace::parse(&binary), Err(StoreError::Trace { line: 2, .. })));
}
