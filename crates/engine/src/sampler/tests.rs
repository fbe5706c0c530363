use std::cell::Cell;

use serde_json::json;

use super::*;

/// Probability of every token: a full sort in f64 with the system's `exp`.
fn naive(options: &SamplerOptions, logits: &[f32], history: &[(u32, bool)]) -> Vec<f64> {
    let mut logits: Vec<f64> = logits.iter().map(|&l| f64::from(l)).collect();
    for &(token, bias) in &options.logit_bias {
        logits[token as usize] += f64::from(bias);
    }
    let window = options.penalty_window.unwrap_or(history.len()).min(history.len());
    let history = &history[history.len() - window..];
    for (id, logit) in logits.iter_mut().enumerate() {
        *logit = f64::from(*logit as f32);
        if history.iter().any(|&(token, _)| token as usize == id) {
            let penalty = f64::from(options.repetition_penalty);
            *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
        }
        let times = history.iter().filter(|&&seen| seen == (id as u32, true)).count();
        *logit -= f64::from(options.frequency_penalty) * times as f64;
        *logit -= if times > 0 { f64::from(options.presence_penalty) } else { 0.0 };
        *logit = f64::from(*logit as f32);
    }
    let mut ids: Vec<usize> = (0..logits.len()).filter(|&id| logits[id].is_finite()).collect();
    ids.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap().then(a.cmp(&b)));
    if options.top_k > 0 {
        ids.truncate(options.top_k);
    }
    let temperature = f64::from(options.temperature);
    let max = logits[ids[0]];
    let weight = |id: &usize| ((logits[*id] - max) / temperature).exp();
    let total: f64 = ids.iter().map(weight).sum();
    if options.top_p < 1.0 {
        let mut before = 0.0;
        ids.retain(|id| {
            let keep = before < f64::from(options.top_p) * total;
            before += weight(id);
            keep
        });
    }
    ids.retain(|id| weight(id) >= f64::from(options.min_p));
    let total: f64 = ids.iter().map(weight).sum();
    let mut probabilities = vec![0.0; logits.len()];
    for id in &ids {
        probabilities[*id] = weight(id) / total;
    }
    probabilities
}

fn sampler(options: SamplerOptions, n_vocab: usize) -> Sampler {
    Sampler::new(options, n_vocab).unwrap()
}

/// The tokens left by truncation, in the order of ids.
fn kept(options: &SamplerOptions, logits: &[f32]) -> Vec<u32> {
    let mut sampler = sampler(options.clone(), logits.len());
    let best = sampler.adjust(logits).unwrap();
    sampler.narrow(sampler.logits[best as usize]);
    sampler.candidates.iter().map(|c| id(c.rank)).collect()
}

/// Draws and compares the counts with the probabilities: chi-square, five standard deviations.
fn assert_draws(options: SamplerOptions, logits: &[f32], probabilities: &[f64]) {
    const DRAWS: u32 = 8_000;
    let what = format!("{options:?}");
    let mut sampler = sampler(options, logits.len());
    let mut counts = vec![0_u32; logits.len()];
    for _ in 0..DRAWS {
        counts[sampler.sample(logits).unwrap() as usize] += 1;
    }
    let (mut statistic, mut bins, mut rare) = (0.0, 0.0, (0.0, 0.0));
    let mut add = |found: f64, expected: f64| {
        statistic += (found - expected).powi(2) / expected;
        bins += 1.0;
    };
    for (&count, &p) in counts.iter().zip(probabilities) {
        let (found, expected) = (f64::from(count), p * f64::from(DRAWS));
        assert!(p > 0.0 || count == 0, "{count} draws of an impossible token: {what}");
        if expected < 10.0 {
            rare = (rare.0 + found, rare.1 + expected);
        } else {
            add(found, expected);
        }
    }
    if rare.1 > 1.0 {
        add(rare.0, rare.1);
    }
    let freedom = f64::max(bins - 1.0, 1.0);
    let limit = freedom + 5.0 * (2.0 * freedom).sqrt();
    assert!(statistic < limit, "chi-square {statistic}, limit {limit}: {what}");
}

/// Logits without a transcendental function: `steps` values over `[-spread, spread)`.
fn scattered(rng: &mut Rng, n: usize, steps: u64, spread: f32) -> Vec<f32> {
    let step = |rng: &mut Rng| (rng.next() >> 32) % steps;
    (0..n).map(|_| (step(rng) as f32 / steps as f32 * 2.0 - 1.0) * spread).collect()
}

#[test]
fn draws_follow_the_softmax_at_any_temperature() {
    let p: [f64; 6] = [0.4, 0.25, 0.2, 0.1, 0.04, 0.01];
    let logits = p.map(|p| p.ln() as f32);
    for (seed, temperature) in [(1, 1.0_f32), (2, 0.5), (3, 2.0), (4, 0.1), (5, 100.0)] {
        let options = SamplerOptions { temperature, seed: Some(seed), ..Default::default() };
        let powers = p.map(|p| p.powf(1.0 / f64::from(temperature)));
        let total: f64 = powers.iter().sum();
        assert_draws(options, &logits, &powers.map(|power| power / total));
    }
}

#[test]
fn draws_follow_the_reference_under_truncation() {
    let mut rng = Rng::new(11);
    for seed in 0..24 {
        let logits = scattered(&mut rng, 200, 1 << 20, 5.0);
        let options = SamplerOptions {
            temperature: [0.6, 1.0, 1.7][seed as usize % 3],
            top_k: [0, 20, 100][seed as usize / 3 % 3],
            top_p: [1.0, 0.9][seed as usize % 2],
            min_p: [0.0, 0.05][seed as usize / 2 % 2],
            seed: Some(seed),
            ..Default::default()
        };
        assert_draws(options.clone(), &logits, &naive(&options, &logits, &[]));
    }
}

#[test]
fn candidates_match_the_reference() {
    let mut rng = Rng::new(5);
    for case in 0..1500 {
        let n = 1 + (rng.next() >> 40) as usize % [5, 60, 1500][case % 3];
        let steps = [3, 40, 1 << 24][rng.next() as usize % 3];
        let mut logits = scattered(&mut rng, n, steps, 8.0);
        for logit in &mut logits {
            if rng.unit() < 0.1 {
                *logit = f32::NEG_INFINITY;
            }
        }
        logits[rng.next() as usize % n] = 0.25;
        let on = |rng: &mut Rng| rng.unit() < 0.5;
        let token = |rng: &mut Rng| (rng.next() as usize % n) as u32;
        let mut options =
            SamplerOptions { temperature: 0.1 + 2.0 * rng.unit() as f32, ..neutral() };
        options.top_k = if on(&mut rng) { rng.next() as usize % (n + 2) } else { 0 };
        options.top_p = if on(&mut rng) { 1.0 - rng.unit() as f32 } else { 1.0 };
        options.min_p = if on(&mut rng) { rng.unit() as f32 * 0.2 } else { 0.0 };
        options.repetition_penalty = if on(&mut rng) { 0.5 + rng.unit() as f32 } else { 1.0 };
        options.presence_penalty = if on(&mut rng) { rng.unit() as f32 } else { 0.0 };
        options.frequency_penalty = if on(&mut rng) { rng.unit() as f32 - 0.5 } else { 0.0 };
        options.penalty_window = on(&mut rng).then_some(rng.next() as usize % 12);
        if on(&mut rng) {
            options.logit_bias = vec![(token(&mut rng), 3.5), (token(&mut rng), -2.25)];
        }
        let mut sampler = sampler(options.clone(), n);
        let mut history = Vec::new();
        for step in 0..20 {
            let seen = (token(&mut rng), step > 7);
            history.push(seen);
            match seen {
                (token, true) => sampler.accept(token),
                (token, false) => sampler.accept_prompt(&[token]),
            }
            if step % 7 == 0 {
                let _ = sampler.sample(&logits).unwrap();
            }
        }
        let best = sampler.adjust(&logits).unwrap();
        sampler.narrow(sampler.logits[best as usize]);
        let total: f64 = sampler.candidates.iter().map(|c| c.weight).sum();
        let mut found = vec![0.0; n];
        for candidate in &sampler.candidates {
            found[id(candidate.rank) as usize] = candidate.weight / total;
        }
        let expected = naive(&options, &logits, &history);
        for (token, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let same = (found - expected).abs() <= 1e-12 * expected;
            assert!(same, "case {case}, token {token}: {found}, not {expected}: {options:?}");
        }
    }
}

fn neutral() -> SamplerOptions {
    SamplerOptions::default()
}

#[test]
fn ties_at_a_cut_keep_the_lower_ids() {
    let logits = [1.0, 2.0, 1.0, -0.0, 2.0, 1.0, 0.0];
    let top_k = |top_k| kept(&SamplerOptions { top_k, ..neutral() }, &logits);
    assert_eq!(top_k(1), [1]);
    assert_eq!(top_k(3), [0, 1, 4]);
    assert_eq!(top_k(4), [0, 1, 2, 4]);
    assert_eq!(top_k(6), [0, 1, 2, 3, 4, 5], "the two zeros are equal");
    assert_eq!(top_k(7).len(), 7);
    assert_eq!(top_k(usize::MAX).len(), 7);
    let top_p = |top_p| kept(&SamplerOptions { top_p, ..neutral() }, &[0.5; 8]);
    assert_eq!(top_p(0.5), [0, 1, 2, 3], "reached exactly");
    assert_eq!(top_p(0.51), [0, 1, 2, 3, 4], "the token that crosses is kept");
    assert_eq!(top_p(f32::from_bits(1)), [0], "never empty");
    assert_eq!(top_p(1.0).len(), 8);
}

#[test]
fn truncations_apply_in_order() {
    let p: [f32; 5] = [0.1, 0.4, 0.3, 0.15, 0.05];
    let logits = p.map(f32::ln);
    let kept = |options| kept(&options, &logits);
    assert_eq!(kept(SamplerOptions { top_p: 0.69, ..neutral() }), [1, 2]);
    assert_eq!(kept(SamplerOptions { top_p: 0.71, ..neutral() }), [1, 2, 3]);
    // Of 0.4, 0.3, 0.15 after top-k, 0.7 is a share of 0.82.
    assert_eq!(kept(SamplerOptions { top_k: 3, top_p: 0.81, ..neutral() }), [1, 2]);
    assert_eq!(kept(SamplerOptions { min_p: 0.74, ..neutral() }), [1, 2]);
    assert_eq!(kept(SamplerOptions { min_p: 0.76, ..neutral() }), [1]);
    assert_eq!(kept(SamplerOptions { min_p: 1.0, ..neutral() }), [1]);
    // Before top-p, min-p would leave 0.4 and 0.3, and top-p of those only the first.
    assert_eq!(kept(SamplerOptions { top_p: 0.56, min_p: 0.7, ..neutral() }), [1, 2]);
    // The temperature comes first: 0.75 becomes 0.75^2.
    assert_eq!(kept(SamplerOptions { min_p: 0.7, temperature: 0.5, ..neutral() }), [1]);
}

fn adjusted(sampler: &mut Sampler, logits: &[f32]) -> Vec<f32> {
    sampler.adjust(logits).unwrap();
    sampler.logits.clone()
}

#[test]
fn penalties_by_hand() {
    let logits = [4.0, -4.0, 4.0, -4.0, 4.0, f32::NEG_INFINITY];
    let see = |options| {
        let mut sampler = sampler(options, 6);
        sampler.accept_prompt(&[0, 0, 1, 5]);
        for token in [2, 2, 2, 3, 5] {
            sampler.accept(token);
        }
        sampler
    };
    let masked = f32::NEG_INFINITY;
    let mut repetition = see(SamplerOptions { repetition_penalty: 2.0, ..neutral() });
    assert_eq!(adjusted(&mut repetition, &logits), [2.0, -8.0, 2.0, -8.0, 4.0, masked]);
    let mut presence = see(SamplerOptions { presence_penalty: 0.5, ..neutral() });
    assert_eq!(adjusted(&mut presence, &logits), [4.0, -4.0, 3.5, -4.5, 4.0, masked]);
    let mut frequency = see(SamplerOptions { frequency_penalty: 0.5, ..neutral() });
    assert_eq!(adjusted(&mut frequency, &logits), [4.0, -4.0, 2.5, -4.5, 4.0, masked]);
    repetition.reset();
    assert_eq!(adjusted(&mut repetition, &logits), logits);
    frequency.reset();
    frequency.accept(2);
    assert_eq!(adjusted(&mut frequency, &logits), [4.0, -4.0, 3.5, -4.0, 4.0, masked]);
}

#[test]
fn the_window_forgets() {
    let options = SamplerOptions { frequency_penalty: 1.0, penalty_window: Some(3), ..neutral() };
    let mut sampler = sampler(options, 4);
    sampler.accept_prompt(&[0, 0, 0]);
    for (token, expected) in [
        (1, [0.0, -1.0, 0.0, 0.0]),
        (1, [0.0, -2.0, 0.0, 0.0]),
        (2, [0.0, -2.0, -1.0, 0.0]),
        (2, [0.0, -1.0, -2.0, 0.0]),
        (3, [0.0, 0.0, -2.0, -1.0]),
        (1, [0.0, -1.0, -1.0, -1.0]),
    ] {
        sampler.accept(token);
        assert_eq!(adjusted(&mut sampler, &[0.0; 4]), expected);
    }
}

#[test]
fn bias_bans_adds_up_and_saturates() {
    let bias = vec![(0, f32::NEG_INFINITY), (1, 1.5), (1, 1.5), (2, f32::MAX), (3, f32::MIN)];
    let mut sampler = sampler(SamplerOptions { logit_bias: bias, ..neutral() }, 5);
    let logits = [9.0, 1.0, f32::MAX, f32::MIN, 0.0];
    let expected = [f32::NEG_INFINITY, 4.0, f32::MAX, f32::MIN, 0.0];
    assert_eq!(adjusted(&mut sampler, &logits), expected);
    let masked = f32::NEG_INFINITY;
    assert_eq!(adjusted(&mut sampler, &[0.0, masked, masked, masked, 1.0])[1..4], [masked; 3]);
}

#[test]
fn greedy_takes_the_lowest_of_equals_and_draws_nothing() {
    let options =
        SamplerOptions { repetition_penalty: 2.0, seed: Some(3), ..SamplerOptions::greedy() };
    let mut sampler = sampler(options, 5);
    let state = sampler.rng_state();
    assert_eq!(sampler.sample(&[-0.0, 0.0, -1.0, 0.0, -3.0]).unwrap(), 0);
    assert_eq!(sampler.sample(&[1.0, 6.0, 3.0, 6.0, 3.0]).unwrap(), 1);
    sampler.accept(1);
    assert_eq!(sampler.sample(&[1.0, 6.0, 3.0, 6.0, 3.0]).unwrap(), 3);
    sampler.accept(3);
    assert_eq!(sampler.sample(&[1.0, 6.0, 3.0, 6.0, 3.0]).unwrap(), 1, "3, 3, 3, 3");
    assert_eq!(sampler.rng_state(), state);
}

#[test]
fn bad_logits_are_refused() {
    let masked = f32::NEG_INFINITY;
    for options in [neutral(), SamplerOptions::greedy()] {
        let mut sampler = sampler(options, 3);
        let state = sampler.rng_state();
        let error = sampler.sample(&[0.0, f32::INFINITY, 0.0]).unwrap_err();
        assert_eq!(error, SamplerError::NotFinite { index: 1, value: f32::INFINITY });
        let error = sampler.sample(&[0.0, masked, f32::NAN]).unwrap_err();
        assert!(error.to_string().contains("token `2` is `NaN`"), "{error}");
        let error = sampler.sample(&[masked; 3]).unwrap_err();
        assert_eq!(error, SamplerError::AllMasked { n_vocab: 3 });
        assert_eq!(sampler.rng_state(), state);
        assert_eq!(sampler.sample(&[masked, -9.0, masked]).unwrap(), 1);
    }
    let ban = SamplerOptions { logit_bias: vec![(0, masked)], ..neutral() };
    let error = sampler(ban, 2).sample(&[0.0, masked]).unwrap_err();
    assert_eq!(error, SamplerError::AllMasked { n_vocab: 2 });
}

#[test]
fn a_seed_reproduces_and_a_state_continues() {
    let logits = scattered(&mut Rng::new(1), 500, 1 << 20, 3.0);
    let draw = |sampler: &mut Sampler, n| -> Vec<u32> {
        (0..n).map(|_| sampler.sample(&logits).unwrap()).collect()
    };
    let seeded = |seed| sampler(SamplerOptions { seed, ..neutral() }, 500);
    let (mut a, mut b) = (seeded(Some(7)), seeded(Some(7)));
    let first = draw(&mut a, 50);
    assert_eq!(first, draw(&mut b, 50));
    assert_ne!(first, draw(&mut seeded(Some(8)), 50));
    let mut c = seeded(Some(99));
    c.set_rng_state(a.rng_state()).unwrap();
    let next = draw(&mut a, 50);
    assert_eq!(draw(&mut c, 50), next);
    assert_ne!(first, next);
    a.reset();
    assert_eq!(draw(&mut a, 50), first);
    assert_eq!(a.set_rng_state([0; 4]), Err(SamplerError::RngState));
    let mut system = seeded(None);
    assert_ne!(system.seed(), seeded(None).seed());
    let again = &mut seeded(Some(system.seed()));
    assert_eq!(draw(&mut system, 50), draw(again, 50));
}

#[test]
fn the_generator_is_the_published_one() {
    // From the tests of `rand_xoshiro`, which were generated with the authors' C.
    let mut rng = Rng([1, 2, 3, 4]);
    let expected = [
        41943041,
        58720359,
        3588806011781223,
        3591011842654386,
        9228616714210784205,
        9973669472204895162,
        14011001112246962877,
        12406186145184390807,
        15849039046786891736,
        10450023813501588000,
    ];
    assert_eq!(expected.map(|_| rng.next()), expected);
    let expected =
        [1985237415132408290, 2979275885539914483, 13511426838097143398, 8488337342461049707];
    assert_eq!(Rng::new(1477776061723855037).0, expected);
}

#[test]
fn golden_tokens() {
    let mut rng = Rng::new(2024);
    let options = SamplerOptions {
        temperature: 0.8,
        top_k: 400,
        top_p: 0.95,
        min_p: 0.01,
        repetition_penalty: 1.1,
        seed: Some(42),
        ..neutral()
    };
    let mut sampler = sampler(options, 1000);
    let tokens: [u32; 16] = std::array::from_fn(|_| {
        let token = sampler.sample(&scattered(&mut rng, 1000, 1 << 20, 6.0)).unwrap();
        sampler.accept(token);
        token
    });
    let expected = [819, 320, 987, 678, 769, 613, 107, 502, 205, 907, 524, 843, 694, 62, 346, 529];
    assert_eq!(tokens, expected);
}

#[test]
fn a_large_flat_vocabulary_is_cut_in_linear_time() {
    const N: usize = 1 << 18;
    let ramp: Vec<f32> = (0..N).map(|id| 1.0 - id as f32 * 1e-7).collect();
    for logits in [vec![0.5; N], ramp] {
        let half = kept(&SamplerOptions { top_p: 0.5, ..neutral() }, &logits);
        assert!(half.len().abs_diff(N / 2) < N / 50, "{}", half.len());
        assert!(half.iter().copied().eq(0..half.len() as u32));
        let most = kept(&SamplerOptions { top_k: N - 1, ..neutral() }, &logits);
        assert!(most.iter().copied().eq(0..N as u32 - 1));
        assert_eq!(kept(&SamplerOptions { min_p: 0.5, ..neutral() }, &logits).len(), N);
        let visits = Cell::new(0);
        let maxima: Vec<f32> = logits.chunks(BLOCK).map(maximum).collect();
        let items = ranked(&logits, &maxima, f32::NEG_INFINITY).map(|(rank, _)| {
            visits.set(visits.get() + 1);
            (rank, 1.0)
        });
        let lowest = cut(items, N as f64 / 2.0, &mut vec![0.0; 1 << 11]);
        assert_eq!(id(lowest), N as u32 / 2 - 1);
        assert!(visits.get() <= 4 * N, "{} visits", visits.get());
    }
}

#[test]
fn buffers_never_grow() {
    let mut rng = Rng::new(9);
    for (top_k, window) in [(0, None), (7, Some(5))] {
        let options = SamplerOptions {
            top_k,
            top_p: 0.9,
            presence_penalty: 0.1,
            penalty_window: window,
            ..neutral()
        };
        let mut sampler = sampler(options, 64);
        let capacities = |s: &Sampler| {
            let h = s.history.as_ref().unwrap();
            let lists = (h.recent.capacity(), h.distinct.capacity(), h.counts.capacity());
            (s.logits.capacity(), s.candidates.capacity(), s.buckets.capacity(), lists)
        };
        let before = capacities(&sampler);
        sampler.accept_prompt(&(0..64).collect::<Vec<u32>>());
        for _ in 0..300 {
            let token = sampler.sample(&scattered(&mut rng, 64, 4, 1.0)).unwrap();
            sampler.accept(token);
        }
        assert_eq!(capacities(&sampler), before);
    }
}

#[test]
fn exp_is_accurate() {
    assert_eq!(exp(0.0), 1.0);
    assert_eq!(exp(-0.0), 1.0);
    assert_eq!(exp(f64::NEG_INFINITY), 0.0);
    assert_eq!(exp(-708.5), 0.0);
    assert!(exp(f64::NAN).is_nan());
    let mut rng = Rng::new(6);
    for scale in [1e-9, 0.3466, 0.3467, 1.0, 50.0, 708.0] {
        for _ in 0..20_000 {
            let x = -scale * rng.unit();
            let (found, expected) = (exp(x), libm::exp(x));
            let steps = found.to_bits().abs_diff(expected.to_bits());
            assert!(steps <= 2, "exp({x}) is {found:e}, not {expected:e}");
        }
    }
}

#[test]
fn nll_is_minus_log_softmax() {
    let near = |found: f64, expected: f64| {
        assert!((found - expected).abs() <= 1e-12 * expected.abs().max(1.0), "{found}, {expected}");
    };
    near(nll(&[0.0; 4], 2), 4.0_f64.ln());
    near(nll(&[1000.0, 999.0], 1), 1.0 + (1.0 + (-1.0_f64).exp()).ln());
    near(nll(&[-1000.0, -1000.0, f32::NEG_INFINITY], 0), 2.0_f64.ln());
    near(nll(&[7.0], 0), 0.0);
    assert_eq!(nll(&[0.0, f32::NEG_INFINITY], 1), f64::INFINITY);
    for bad in [f32::NAN, f32::INFINITY] {
        assert!(nll(&[0.0, bad], 0).is_nan() && nll(&[0.0, bad], 1).is_nan());
    }
    assert!(nll(&[f32::NEG_INFINITY; 2], 0).is_nan());
}

#[test]
fn options_out_of_range_are_named() {
    let refused = |change: &dyn Fn(&mut SamplerOptions), expected: &str| {
        let mut options = neutral();
        change(&mut options);
        let error = Sampler::new(options, 10).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    };
    for bad in [-0.1, f32::NAN, f32::INFINITY] {
        refused(&|o| o.temperature = bad, &format!("`temperature` is `{bad}`, expected a finite"));
        refused(&|o| o.min_p = bad, &format!("`min_p` is `{bad}`, expected"));
        refused(&|o| o.repetition_penalty = bad, &format!("`repetition_penalty` is `{bad}`"));
    }
    for bad in [0.0, -0.5, 1.01, f32::NAN] {
        refused(&|o| o.top_p = bad, &format!("`top_p` is `{bad}`, expected a number above 0"));
    }
    refused(&|o| o.min_p = 1.01, "`min_p` is `1.01`");
    refused(&|o| o.repetition_penalty = 0.0, "`repetition_penalty` is `0`, expected");
    refused(&|o| o.presence_penalty = f32::NAN, "`presence_penalty` is `NaN`");
    refused(&|o| o.frequency_penalty = f32::INFINITY, "`frequency_penalty` is `inf`");
    refused(&|o| o.penalty_window = Some(1048577), "`penalty_window` is `1048577`, expected at");
    refused(&|o| o.logit_bias = vec![(10, 0.0)], "`logit_bias` names token `10`, expected a token");
    refused(&|o| o.logit_bias = vec![(9, f32::NAN)], "`logit_bias` of token `9` is `NaN`");
    refused(&|o| o.logit_bias = vec![(9, f32::INFINITY)], "`logit_bias` of token `9` is `inf`");
    assert_eq!(neutral().validate(0), Err(SamplerError::VocabSize { found: 0 }));
    assert_eq!(neutral().validate(1), Ok(()));
    let edge = SamplerOptions {
        top_p: f32::MIN_POSITIVE,
        min_p: 1.0,
        logit_bias: vec![(9, f32::NEG_INFINITY)],
        penalty_window: Some(0),
        ..SamplerOptions::greedy()
    };
    assert_eq!(edge.validate(10), Ok(()));
}

#[test]
fn generation_config_is_read() {
    let read = |config| SamplerOptions::from_generation_config(&config);
    assert_eq!(read(json!(null)), Ok(neutral()));
    assert_eq!(read(json!({"temperature": null, "top_k": null, "do_sample": null})), Ok(neutral()));
    let config = json!({
        "do_sample": true, "eos_token_id": [1, 2], "temperature": 0.6, "top_k": 20, "top_p": 0.95,
        "min_p": 0, "repetition_penalty": 1.05, "presence_penalty": 1.5, "frequency_penalty": -1,
    });
    let full = SamplerOptions {
        temperature: 0.6,
        top_k: 20,
        top_p: 0.95,
        repetition_penalty: 1.05,
        presence_penalty: 1.5,
        frequency_penalty: -1.0,
        ..neutral()
    };
    assert_eq!(read(config), Ok(full));
    assert_eq!(read(json!({"do_sample": false})), Ok(SamplerOptions::greedy()));
    assert_eq!(read(json!({"temperature": 0})), Ok(SamplerOptions::greedy()));
    let kept = SamplerOptions { top_k: 9, ..SamplerOptions::greedy() };
    assert_eq!(read(json!({"do_sample": false, "temperature": 0.7, "top_k": 9})), Ok(kept));
    assert_eq!(read(json!({"top_k": -1})), Ok(neutral()));
    for (config, message) in [
        (json!({"temperature": "1"}), "`temperature` is a string, expected a number"),
        (json!({"top_p": true}), "`top_p` is `true`, expected a number"),
        (json!({"top_p": 1.5}), "`top_p` is `1.5`, expected a number above 0 and at most 1"),
        (json!({"top_k": 2.5}), "`top_k` is `2.5`, expected an integer of at least 0, or -1"),
        (json!({"top_k": -2}), "`top_k` is `-2`, expected an integer of at least 0, or -1"),
        (json!({"min_p": []}), "`min_p` is an array, expected a number"),
        (json!({"do_sample": 0}), "`do_sample` is `0`, expected a bool"),
        (json!({"do_sample": false, "min_p": {}}), "`min_p` is an object, expected a number"),
        (json!([1]), "`generation config` is an array, expected an object"),
    ] {
        assert_eq!(read(config).unwrap_err().to_string(), message);
    }
}

#[test]
#[should_panic(expected = "token 3 in a vocabulary of 3")]
fn a_foreign_token_is_a_bug() {
    sampler(neutral(), 3).accept(3);
}

#[test]
#[should_panic(expected = "logits for a vocabulary of 3")]
fn a_short_row_is_a_bug() {
    let _ = sampler(neutral(), 3).sample(&[0.0; 2]);
}
