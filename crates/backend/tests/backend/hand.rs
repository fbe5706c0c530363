//! The reference against numbers worked out by hand, or by another formula.

use snowmelt_backend::reference::{Eager, Reference};
use snowmelt_backend::{
    Attention, Backend, BufType, DeltaStep, ExpertLayout, Experts, Gate, MatrixLayout, MoeFfn,
    Pairing, Pass, Ready, Routed, Router, Routes, Rows, Shared, Slab, View,
};
use snowmelt_weights::Encoding;
use std::sync::Arc;

type Buf = <Reference as Backend>::Buf;
type Weight = <Reference as Backend>::Weight;

fn typed(values: &[f32], ty: BufType) -> Buf {
    let buf = Reference.alloc(values.len(), ty);
    Reference.write(&mut Reference.begin(), &buf, 0, values);
    buf
}

fn buf(values: &[f32]) -> Buf {
    typed(values, BufType::F32)
}

fn empty(len: usize) -> Buf {
    Reference.alloc(len, BufType::F32)
}

fn get(buf: &Buf, len: usize) -> Vec<f32> {
    let mut into = vec![0.0; len];
    Reference.begin().read(buf, 0..len, &mut into).expect("eager");
    into
}

fn weight(values: &[f32], d_in: usize) -> Weight {
    let mut weight = Reference.alloc_weight(Encoding::F32, values.len() / d_in, d_in);
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    Reference.fill_weight(&mut weight, 0, &bytes);
    weight
}

/// One sequence from `first` on, in pages 1, 0, 2, with row `fixed` of state.
fn rows(fixed: u32, first: u32, tokens: &[u32]) -> Rows {
    let mut rows = Rows::default();
    rows.rewrite(|draft| {
        draft.sequence(fixed, [1, 0, 2]);
        for (position, token) in (first..).zip(tokens) {
            draft.row(position, *token, position % 2 == 1);
        }
    });
    rows
}

fn pass() -> Eager {
    Reference.begin()
}

#[track_caller]
fn assert_near(got: &[f32], expected: &[f32]) {
    let near = |(got, expected): (&f32, &f32)| (got - expected).abs() <= 2e-6 * expected.abs();
    let all = got.len() == expected.len() && got.iter().zip(expected).all(near);
    assert!(all, "got {got:?}, expected {expected:?}");
}

#[test]
fn buffers_round_to_their_type() {
    // One bf16 step above 1 is 2^-7, one f16 step 2^-10; ties go to even.
    let values = [1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, 1.0 + 1.0 / 2048.0, 1.0 + 3.0 / 2048.0];
    assert_eq!(get(&typed(&values, BufType::F32), 4), values);
    assert_eq!(get(&typed(&values[..2], BufType::Bf16), 2), [1.0, 1.0 + 4.0 / 256.0]);
    assert_eq!(get(&typed(&values[2..], BufType::F16), 2), [1.0, 1.0 + 4.0 / 2048.0]);
    assert!(get(&empty(2), 2).iter().all(|value| value.is_nan()));
}

#[test]
fn clear_and_copy_reach_their_range() {
    let buf = buf(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    Reference.clear(&mut pass(), &buf, 1..2);
    Reference.copy(&mut pass(), &buf, 0, 3, 2);
    assert_eq!(get(&buf, 6), [1.0, 0.0, 3.0, 1.0, 0.0, 6.0]);
}

#[test]
fn embed_takes_rows_of_the_table() {
    let out = empty(7);
    let view = View { buf: &out, offset: 1, stride: 3 };
    let table = weight(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2);
    Reference.embed(&mut pass(), &table, &rows(0, 0, &[2, 0]), view);
    let got = get(&out, 7);
    assert_eq!((&got[1..3], &got[4..6]), (&[5.0, 6.0][..], &[1.0, 2.0][..]));
    assert!(got[0].is_nan() && got[3].is_nan() && got[6].is_nan());
}

#[test]
fn norms() {
    // The mean of the squares is 25 / 2, then 4 / 2; their sum 25, then 4.
    let x = [3.0, 4.0, 2.0, 0.0];
    let out = empty(4);
    let w = weight(&[1.0, 2.0], 2);
    let view = View::of(&out, 4);
    Reference.rms_norm(&mut pass(), View::of(&buf(&x), 4), &w, 2, 0.0, 1, view);
    assert_near(&get(&out, 4), &[0.848_528_1, 2.262_741_7, std::f32::consts::SQRT_2, 0.0]);
    // 25 / 2 + 23.5 = 36
    Reference.rms_norm(&mut pass(), View::of(&buf(&x), 4), &w, 2, 23.5, 1, view);
    assert_near(&get(&out, 4)[..2], &[0.5, 4.0 / 3.0]);

    let x = buf(&[3.0, 4.0, 2.0, 0.0]);
    Reference.l2_norm(&mut pass(), View::of(&x, 4), [2, 2], 0.0, 0.5, 1);
    assert_near(&get(&x, 4), &[0.3, 0.4, 0.5, 0.0]);
    let x = buf(&[3.0, 4.0]);
    Reference.l2_norm(&mut pass(), View::of(&x, 2), [1, 2], 11.0, 1.0, 1);
    assert_near(&get(&x, 2), &[0.5, 2.0 / 3.0]);
}

#[test]
fn gated_norm_norms_first_and_gates_after() {
    let z = buf(&[0.0, 2.0]);
    let w = weight(&[1.0, 2.0], 2);
    let gated = |gate| {
        let x = buf(&[3.0, 4.0]);
        let (view, z) = (View::of(&x, 2), View::of(&z, 2));
        Reference.gated_norm(&mut pass(), view, z, &w, 1, 0.0, gate, 1);
        get(&x, 2)
    };
    // sigmoid(0) = 1/2, sigmoid(2) = 0.880797
    assert_near(&gated(Gate::Sigmoid), &[0.424_264_07, 2.262_741_7 * 0.880_797_1]);
    assert_near(&gated(Gate::Silu), &[0.0, 2.262_741_7 * 1.761_594_2]);
}

#[test]
fn rows_of_numbers() {
    let out = empty(2);
    let w = weight(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 3);
    let x = buf(&[1.0, 0.0, -1.0]);
    Reference.linear(&mut pass(), View::of(&x, 3), &w, 1, View::of(&out, 2));
    assert_eq!(get(&out, 2), [-2.0, -2.0]);

    let (x, y) = (buf(&[1.0, 2.0, 3.0]), buf(&[10.0, 20.0, 30.0]));
    Reference.add(&mut pass(), View::of(&x, 1), View::of(&y, 1).column(1), 1, 2);
    assert_eq!(get(&x, 3), [21.0, 32.0, 3.0]);

    let (gate, up) = (buf(&[1.0, -1000.0]), buf(&[2.0, 1.0]));
    let view = View::of(&up, 2);
    Reference.swiglu(&mut pass(), View::of(&gate, 2), view, 2, 1, view);
    assert_near(&get(&up, 2), &[1.462_117_2, 0.0]);

    let (x, z) = (buf(&[4.0, 4.0, 4.0]), buf(&[0.0, 1000.0, -1000.0]));
    Reference.sigmoid_gate(&mut pass(), View::of(&x, 3), View::of(&z, 3), 3, 1);
    assert_eq!(get(&x, 3), [2.0, 4.0, 0.0]);

    let (x, out) = (buf(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]), empty(2));
    let rows = rows(0, 0, &[0; 6]);
    Reference.select_outputs(&mut pass(), View::of(&x, 1), 1, &rows, 1, 2, View::of(&out, 1));
    assert_eq!(get(&out, 2), [3.0, 5.0]);
}

#[test]
fn rotary_table_has_cosines_then_sines() {
    let out = empty(4);
    let inv_freq = weight(&[1.0, 0.5], 2);
    Reference.rotary_table(&mut pass(), &inv_freq, 2.0, &rows(0, 3, &[0]), View::of(&out, 4));
    let expected = [-0.989_992_5, 0.070_737_2, 0.141_120_01, 0.997_495].map(|x: f32| 2.0 * x);
    assert_near(&get(&out, 4), &expected);
}

#[test]
fn angles_are_rounded_to_f32() {
    let out = empty(2);
    let rows = rows(0, 77, &[0]);
    let (position, frequency) = (77.0f32, 0.723_517_6_f32);
    let inv_freq = weight(&[frequency], 1);
    Reference.rotary_table(&mut pass(), &inv_freq, 1.0, &rows, View::of(&out, 2));
    let rounded = ((position * frequency) as f64).cos() as f32;
    assert_ne!(rounded, (position as f64 * frequency as f64).cos() as f32, "shows nothing");
    assert_eq!(get(&out, 2)[0], rounded);
}

#[test]
fn rope_turns_pairs_and_leaves_the_rest() {
    // A quarter turn for pair 0, nothing for pair 1.
    let table = buf(&[0.0, 1.0, 1.0, 0.0]);
    let turned = |pairing| {
        let x = buf(&[1.0, 2.0, 3.0, 4.0, 9.0]);
        let (view, table) = (View::of(&x, 5), View::of(&table, 4));
        Reference.rope(&mut pass(), view, [1, 5, 4], table, pairing, 1);
        get(&x, 5)
    };
    assert_eq!(turned(Pairing::Half), [-3.0, 2.0, 1.0, 4.0, 9.0]);
    assert_eq!(turned(Pairing::Adjacent), [-2.0, 1.0, 3.0, 4.0, 9.0]);
}

/// Attention of one sequence from position 0; caches of three pages.
fn attend(qkv: [&[f32]; 3], heads: [usize; 3], scale: f32, ty: BufType) -> Vec<f32> {
    let [n_heads, n_kv_heads, d_head] = heads;
    let n = qkv[0].len() / (n_heads * d_head);
    let caches = [0; 2].map(|_| Reference.alloc(96 * n_kv_heads * d_head, ty));
    let bufs = qkv.map(buf);
    let args = Attention {
        q: View::of(&bufs[0], n_heads * d_head),
        k: View::of(&bufs[1], n_kv_heads * d_head),
        v: View::of(&bufs[2], n_kv_heads * d_head),
        k_cache: &caches[0],
        v_cache: &caches[1],
        n_heads,
        n_kv_heads,
        d_head,
        scale,
    };
    let out = empty(qkv[0].len());
    let rows = rows(0, 0, &vec![0; n]);
    Reference.attention(&mut pass(), &args, &rows, View::of(&out, n_heads * d_head));
    get(&out, qkv[0].len())
}

#[test]
fn attention_is_a_softmax_over_the_past() {
    let (n, n_heads, n_kv_heads, d) = (40, 6, 2, 3);
    let wave = |len: usize, step: f32| -> Vec<f32> {
        (0..len).map(|i| (i as f32 * step).sin() * 2.0).collect()
    };
    let q = wave(n * n_heads * d, 0.37);
    let (k, v) = (wave(n * n_kv_heads * d, 0.71), wave(n * n_kv_heads * d, 1.13));
    let mut expected = Vec::new();
    for t in 0..n {
        for h in 0..n_heads {
            // Query heads 0..3 read KV head 0, 3..6 read KV head 1.
            let kv_head = [0, 0, 0, 1, 1, 1][h];
            let kv = |s: usize, i: usize| (s * n_kv_heads + kv_head) * d + i;
            let score = |s: usize| -> f64 {
                (0..d).map(|i| q[(t * n_heads + h) * d + i] as f64 * k[kv(s, i)] as f64).sum()
            };
            let weights: Vec<f64> = (0..=t).map(|s| (0.5 * score(s)).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for i in 0..d {
                let value = |s: usize| weights[s] * v[kv(s, i)] as f64;
                expected.push(((0..=t).map(value).sum::<f64>() / sum) as f32);
            }
        }
    }
    let got = attend([&q, &k, &v], [n_heads, n_kv_heads, d], 0.5, BufType::F32);
    let worst = got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst < 1e-6, "{worst}");
}

#[test]
fn keys_and_values_are_rounded_before_they_are_read() {
    // As in `buffers_round_to_their_type`: a lone token sees its own value rounded.
    let value = 1.0 + 1.0 / 256.0;
    assert_eq!(attend([&[1.0], &[1.0], &[value]], [1; 3], 1.0, BufType::F32), [value]);
    assert_eq!(attend([&[1.0], &[1.0], &[value]], [1; 3], 1.0, BufType::Bf16), [1.0]);
    // Two keys that the cache cannot tell apart share the weight.
    let (q, k, v) = ([0.0, 1000.0], [1.0, 1.0 + 1.0 / 2048.0], [0.0, 1.0]);
    let second = |ty| attend([&q, &k, &v], [1; 3], 1.0, ty)[1];
    assert_eq!(second(BufType::F16), 0.5);
    assert!((second(BufType::F32) - 0.6197).abs() < 1e-4);
}

#[test]
fn the_last_tap_falls_on_the_current_token() {
    // silu(y) is y for y this large.
    let w = weight(&[1000.0, 100.0, 10_000.0], 3);
    let state = buf(&[f32::NAN, f32::NAN, 0.0, 0.0]);
    let (x, out) = (buf(&[1.0, 2.0, 3.0, 4.0]), empty(4));
    let conv = |n: usize, at: usize| {
        let view = |buf| View::of(buf, 1).column(at);
        let rows = rows(1, at as u32, &vec![0; n]);
        Reference.causal_conv(&mut pass(), view(&x), &w, &state, &rows, view(&out));
    };
    conv(3, 0);
    assert_eq!(get(&out, 3), [10_000.0, 20_100.0, 31_200.0]);
    assert_eq!(get(&state, 4)[2..], [2.0, 3.0]);
    conv(1, 3);
    assert_eq!(get(&out, 4)[3], 42_300.0);
    assert_eq!(get(&state, 4)[2..], [3.0, 4.0]);
    assert!(get(&state, 2).iter().all(|value| value.is_nan()), "the state of others");
}

#[test]
fn convolution_ends_in_silu() {
    let (x, out, state) = (buf(&[1.0]), empty(1), buf(&[0.5]));
    let (w, rows) = (weight(&[2.0, 1.0], 2), rows(0, 0, &[0]));
    let (x, view) = (View::of(&x, 1), View::of(&out, 1));
    Reference.causal_conv(&mut pass(), x, &w, &state, &rows, view);
    assert_near(&get(&out, 1), &[1.761_594_2]);
}

#[test]
fn delta_gate_is_a_power_of_sigmoid() {
    // softplus(0) = ln 2, so decay = 2^-exp(a_log); with a_log = ln 2 the square of that.
    let ln_2 = std::f32::consts::LN_2;
    let (a, b) = (buf(&[0.0, -1.0, 100.0, -1000.0]), buf(&[0.0, 1000.0, -1000.0, 1.0]));
    let w = [weight(&[0.0, ln_2, 0.0, 0.0], 4), weight(&[0.0, 1.0, 0.0, 0.0], 4)];
    let (a_view, b_view) = (View::of(&a, 4), View::of(&b, 4));
    Reference.delta_gate(&mut pass(), a_view, b_view, [&w[0], &w[1]], 1);
    assert_near(&get(&a, 4), &[0.5, 0.25, (-100.0f32).exp(), 1.0]);
    assert_near(&get(&b, 4), &[0.5, 1.0, 0.0, 0.731_058_6]);
}

/// One token through one head whose state lies in row 1 of 2.
fn delta(args: [&[f32]; 5], state: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let [q, k, v, decay, beta] = args.map(buf);
    let (d_key, d_value) = (args[0].len(), args[2].len());
    let held = buf(&[&vec![f32::NAN; state.len()], state].concat());
    let out = empty(d_value);
    let args = DeltaStep {
        q: View::of(&q, d_key),
        k: View::of(&k, d_key),
        v: View::of(&v, d_value),
        decay: View::of(&decay, 1),
        beta: View::of(&beta, 1),
        state: &held,
        n_key_heads: 1,
        n_value_heads: 1,
        d_key,
        d_value,
    };
    Reference.delta_step(&mut pass(), &args, &rows(1, 0, &[0]), View::of(&out, d_value));
    (get(&out, d_value), get(&held, 2 * state.len()).split_off(state.len()))
}

#[test]
fn delta_decays_reads_writes_then_queries() {
    // S = (1, 2), halved: (0.5, 1). m = 0.5; half of 3 - 0.5 is written: (1.75, 1). q sums it.
    let (out, state) = delta([&[1.0, 1.0], &[1.0, 0.0], &[3.0], &[0.5], &[0.5]], &[1.0, 2.0]);
    assert_eq!((out, state), (vec![2.75], vec![1.75, 1.0]));
}

#[test]
fn delta_is_the_matrix_of_the_paper() {
    // S' = decay (I - beta k k^T) S + beta k v^T; out = S'^T q
    let (q, k, v) = ([0.3, -1.2, 0.7], [0.5, 0.25, -0.8], [2.0, -0.5]);
    let (decay, beta) = (0.9f32, 0.6f32);
    let old = [0.1, -0.4, 1.5, 0.2, -0.7, 0.9];
    let mut state = [0.0f32; 6];
    for (i, j) in (0..3).flat_map(|i| (0..2).map(move |j| (i, j))) {
        let unit = |l: usize| if i == l { 1.0 } else { 0.0 };
        let kept = |l: usize| (unit(l) - beta * k[i] * k[l]) * old[l * 2 + j];
        state[i * 2 + j] = decay * (0..3).map(kept).sum::<f32>() + beta * k[i] * v[j];
    }
    let out = [0, 1].map(|j| (0..3).map(|i| state[i * 2 + j] * q[i]).sum::<f32>());
    let got = delta([&q, &k, &v, &[decay], &[beta]], &old);
    let near = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-6);
    assert!(near(&got.0, &out) && near(&got.1, &state), "{got:?} {out:?} {state:?}");
}

#[test]
fn value_heads_share_key_heads_in_blocks() {
    // With an empty state, decay and beta of 1, out = (q . k) v.
    let (q, k) = (buf(&[1.0, 10.0]), buf(&[1.0, 1.0]));
    let (v, ones) = (buf(&[1.0, 2.0, 3.0, 4.0]), buf(&[1.0; 4]));
    let (state, out) = (buf(&[0.0; 4]), empty(4));
    let args = DeltaStep {
        q: View::of(&q, 2),
        k: View::of(&k, 2),
        v: View::of(&v, 4),
        decay: View::of(&ones, 4),
        beta: View::of(&ones, 4),
        state: &state,
        n_key_heads: 2,
        n_value_heads: 4,
        d_key: 1,
        d_value: 1,
    };
    Reference.delta_step(&mut pass(), &args, &rows(0, 0, &[0]), View::of(&out, 4));
    assert_eq!(get(&out, 4), [1.0, 2.0, 30.0, 40.0]);
}

/// Ids and weights of one row.
fn route(logits: &[f32], top_k: usize, renormalise: bool) -> (Vec<u32>, Vec<f32>) {
    let (x, ids, weights) = (buf(logits), empty(top_k), empty(top_k));
    let (shape, router) = ([logits.len(), top_k], Router::Softmax { renormalise });
    let view = View::of(&x, logits.len());
    let routed = Reference.route(&mut pass(), view, shape, router, 1, [&ids, &weights]);
    let mut routes = Routes::default();
    pass().read_routes(&routed, &mut routes).expect("eager");
    (routes.ids, get(&routed.weights, top_k))
}

#[test]
fn routers_prefer_weight_then_index() {
    let ln = |x: f32| x.ln();
    // Softmax of these is 1/10, 4/10, 4/10, 1/10.
    let logits = [ln(1.0), ln(4.0), ln(4.0), ln(1.0)];
    let (ids, weights) = route(&logits, 3, false);
    assert_eq!(ids, [1, 2, 0]);
    assert_near(&weights, &[0.4, 0.4, 0.1]);
    let (ids, weights) = route(&logits, 3, true);
    assert_eq!(ids, [1, 2, 0]);
    assert_near(&weights, &[4.0 / 9.0, 4.0 / 9.0, 1.0 / 9.0]);
    assert_near(&route(&[ln(1.0), ln(3.0)], 1, false).1, &[0.75]);
    // Weights that are both 0 in f32 are equal.
    assert_eq!(route(&[-200.0, -150.0, 0.0], 2, false).0, [2, 0]);
}

#[test]
fn a_row_of_nan_is_routed_somewhere() {
    let (ids, weights) = route(&[f32::NAN; 5], 3, true);
    assert_eq!(ids, [0, 1, 2]);
    assert!(weights.iter().all(|weight| weight.is_nan()));
    assert_eq!(route(&[1.0, -f32::NAN, 2.0], 2, false).0, [0, 1]);
}

fn routed(ids: &[u32], weights: &[f32], top_k: usize) -> Routed<Buf> {
    let ids: Vec<f32> = ids.iter().map(|&id| f32::from_bits(id)).collect();
    Routed { n: ids.len() / top_k, ids: buf(&ids), weights: buf(weights), top_k }
}

#[test]
fn an_expert_is_a_swiglu() {
    // gate 1, up 2, down 3, each 1 x 1: 3 * silu(x) * 2x.
    let matrix = |offset| MatrixLayout { encoding: Encoding::F32, d_out: 1, d_in: 1, offset };
    let layout = ExpertLayout { gate: matrix(4), up: matrix(0), down: matrix(8) };
    assert_eq!(layout.record_bytes(), 12);
    let slab = Reference.alloc_slab(4096, 2);
    for (i, value) in [2.0f32, 1.0, 3.0].into_iter().enumerate() {
        slab.upload(1, 4 * i, &value.to_le_bytes());
    }
    let (x, out) = (buf(&[1.0, 2.0]), empty(4));
    let routed = routed(&[3, 7, 7, 0], &[1.0; 4], 2);
    let args = MoeFfn { x: View::of(&x, 1), routed: &routed, layout: &layout, slab: &slab };
    let mut ready = vec![Ready::new(7, 1, Arc::new(()))];
    Reference.moe_ffn(&mut pass(), &args, Experts::Ready(&mut ready), &out);
    let got = get(&out, 4);
    assert_near(&got[1..3], &[6.0 * 0.731_058_6, 12.0 * 1.761_594_2]);
    assert!(ready.is_empty() && got[0].is_nan() && got[3].is_nan());
}

#[test]
fn results_are_joined_and_spent() {
    let join = |gate: Option<&[f32]>| {
        let parts = buf(&[1.0, 2.0, 10.0, 20.0]);
        let (x, shared) = (buf(&[100.0, 200.0]), buf(&[1000.0, 2000.0]));
        let gate = gate.map(buf);
        let gate = gate.as_ref().map(|gate| View::of(gate, 1));
        let shared = Shared { x: View::of(&shared, 2), gate };
        let routed = routed(&[5, 2], &[0.5, 0.25], 2);
        Reference.moe_join(&mut pass(), &routed, &parts, Some(shared), 2, View::of(&x, 2));
        assert!(get(&parts, 4).iter().all(|part| part.is_nan()));
        get(&x, 2)
    };
    assert_eq!(join(None), [1103.0, 2206.0]);
    assert_eq!(join(Some(&[0.0])), [603.0, 1206.0]);
}

#[test]
fn experts_are_added_in_ascending_index() {
    // 1 is lost in 2^30, unless the two huge ones have cancelled before.
    let huge = (1u32 << 30) as f32;
    let join = |ids: &[u32]| {
        let (x, parts) = (buf(&[0.0]), buf(&[huge, 1.0, -huge]));
        let routed = routed(ids, &[1.0; 3], 3);
        Reference.moe_join(&mut pass(), &routed, &parts, None, 1, View::of(&x, 1));
        get(&x, 1)[0]
    };
    assert_eq!(join(&[2, 1, 3]), 0.0);
    assert_eq!(join(&[2, 9, 3]), 1.0);
}
