//! The reference against numbers worked out by hand, or by another formula.

use snowmelt_backend::reference::{Eager, Reference};
use snowmelt_backend::{
    Attention, Backend, BufType, DeltaStep, ExpertLayout, Experts, Glu, Groups, HeadRows,
    IndexSelect, MatrixLayout, MoeFfn, Norm, Pairing, Pass, Pool, Ready, Routed, Router, Routes,
    Rows, Scores, Selection, Shared, Slab, Unary, View,
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

/// One row of `x`.
fn norm(x: &[f32], norm: &Norm<'_, Weight, Buf>) -> Vec<f32> {
    let (x, view) = (buf(x), x.len());
    Reference.norm(&mut pass(), View::of(&x, view), norm, 1, View::of(&x, view));
    get(&x, view)
}

#[test]
fn norms() {
    // The mean of the squares is 25 / 2, then 4 / 2; their sum 25, then 4.
    let x = [3.0, 4.0, 2.0, 0.0];
    let w = weight(&[1.0, 2.0], 2);
    let of = |eps| norm(&x, &Norm::rms(Some(&w), [2, 2], eps));
    assert_near(&of(0.0), &[0.848_528_1, 2.262_741_7, std::f32::consts::SQRT_2, 0.0]);
    // 25 / 2 + 23.5 = 36
    assert_near(&of(23.5)[..2], &[0.5, 4.0 / 3.0]);
    // Without a weight, and with one for each head.
    assert_near(&norm(&x, &Norm::rms(None, [2, 2], 23.5))[..2], &[0.5, 2.0 / 3.0]);
    let each = weight(&[1.0, 2.0, 3.0, 4.0], 4);
    let each = norm(&[3.0, 4.0, 5.0, 0.0], &Norm::rms(Some(&each), [2, 2], 23.5));
    assert_near(&each, &[0.5, 4.0 / 3.0, 2.5, 0.0]);

    assert_near(&norm(&x, &Norm::l2([2, 2], 0.0, 0.5)), &[0.3, 0.4, 0.5, 0.0]);
    assert_near(&norm(&x[..2], &Norm::l2([1, 2], 11.0, 1.0)), &[0.5, 2.0 / 3.0]);
}

#[test]
fn layer_norm_takes_the_mean_away() {
    // Mean 4; the variance is (9 + 1 + 1 + 9) / 4 = 5, and 5 + 4 is the square of 3.
    let (w, bias) = (weight(&[3.0, 3.0, 6.0, 1.0], 4), weight(&[0.0, 1.0, 0.0, -1.0], 4));
    let got = norm(&[1.0, 3.0, 5.0, 7.0], &Norm::layer(&w, &bias, 4, 4.0));
    assert_near(&got, &[-3.0, 0.0, 2.0, 0.0]);
}

#[test]
fn gated_norm_norms_first_and_gates_after() {
    let z = buf(&[0.0, 2.0]);
    let w = weight(&[1.0, 2.0], 2);
    let gated = |f| {
        let rms = Norm::rms(Some(&w), [1, 2], 0.0);
        norm(&[3.0, 4.0], &rms.gated(View::of(&z, 2), f))
    };
    // sigmoid(0) = 1/2, sigmoid(2) = 0.880797
    assert_near(&gated(Glu::Sigmoid), &[0.424_264_07, 2.262_741_7 * 0.880_797_1]);
    assert_near(&gated(Glu::Silu), &[0.0, 2.262_741_7 * 1.761_594_2]);
}

/// `f(gate) * up` of one row.
fn glu(f: Glu, gate: &[f32], up: &[f32]) -> Vec<f32> {
    let (gate, up, width) = (buf(gate), buf(up), gate.len());
    let view = View::of(&up, width);
    Reference.glu(&mut pass(), f, View::of(&gate, width), view, width, 1, view);
    get(&up, width)
}

#[test]
fn gates() {
    assert_near(&glu(Glu::Silu, &[1.0, -1000.0], &[2.0, 1.0]), &[1.462_117_2, 0.0]);
    assert_eq!(glu(Glu::Sigmoid, &[0.0, 1000.0, -1000.0], &[4.0; 3]), [2.0, 4.0, 0.0]);
    // Published values of this form of gelu.
    let gelu = glu(Glu::GeluTanh, &[1.0, -1.0, 0.0, 100.0, -100.0], &[1.0, 2.0, 3.0, 1.0, 1.0]);
    assert_near(&gelu, &[0.841_192, -0.317_616, 0.0, 100.0, 0.0]);
    // Gate 9 counts as 2, up as at most 2 to either side; sigmoid(0.5 * 2) = 0.7310586.
    let clamped = Glu::Clamped { alpha: 0.5, limit: 2.0 };
    let got = glu(clamped, &[9.0, 2.0, 2.0, -1000.0], &[5.0, -5.0, 0.5, 1.0]);
    assert_near(&got, &[6.0 * 0.731_058_6, -2.0 * 0.731_058_6, 3.0 * 0.731_058_6, 0.0]);
}

#[test]
fn functions_of_one_value() {
    let of = |f, x: &[f32]| {
        let (x, width) = (buf(x), x.len());
        Reference.activate(&mut pass(), f, View::of(&x, width), width, 1);
        get(&x, width)
    };
    assert_eq!(of(Unary::Scale(-0.5), &[3.0, -4.0]), [-1.5, 2.0]);
    assert_near(&of(Unary::Silu(2.0), &[1.0, 0.0]), &[1.761_594_2, 0.0]);
    assert_near(&of(Unary::Softcap(30.0), &[30.0, -1e9, 0.0]), &[30.0 * 0.761_594_2, -30.0, 0.0]);
}

#[test]
fn heads_have_rows_of_their_own() {
    // Two heads of three rows each, of which the last two are theirs.
    let w = weight(&[9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 9.0, 9.0, 5.0, 6.0, 7.0, 8.0], 2);
    let heads = HeadRows {
        heads: 2,
        stride: 3,
        first: 1,
        rows: 2,
        x_head: 2,
        out_head: 3,
        transposed: false,
    };
    let product = |heads: &HeadRows| {
        let (x, out) = (buf(&[1.0, 10.0, 1.0, -1.0]), buf(&[0.5; 5]));
        Reference.linear_heads(&mut pass(), View::of(&x, 4), &w, heads, 1, View::of(&out, 5));
        get(&out, 5)
    };
    assert_eq!(product(&heads), [21.0, 43.0, 0.5, -1.0, -1.0]);
    // (1, 3) + 10 (2, 4) by columns: 1 * 1 + 10 * 3, 1 * 2 + 10 * 4.
    let transposed = HeadRows { transposed: true, ..heads };
    assert_eq!(product(&transposed), [31.0, 42.0, 0.5, -2.0, -2.0]);

    let (x, out) = (buf(&[1.0, 2.0, 3.0, 4.0]), buf(&[0.0; 6]));
    let (view, to) = (View::of(&x, 2), View::of(&out, 3));
    Reference.copy_heads(&mut pass(), view, [2, 1, 2, 1], 2, to);
    assert_eq!(get(&out, 6), [1.0, 0.0, 2.0, 3.0, 0.0, 4.0]);
}

#[test]
fn streams_are_mixed_and_joined() {
    // Gates of 0 halve, gates far from it pass or stop.
    let (x, gate) = (buf(&[2.0, 4.0, 6.0, 8.0]), buf(&[0.0, 1000.0, 0.0, -1000.0]));
    let (out, y) = (empty(2), buf(&[10.0, 20.0]));
    let (vx, vy) = (View::of(&x, 4), View::of(&y, 2));
    let to = View::of(&out, 2);
    Reference.stream_mix(&mut pass(), vx, View::of(&gate, 4), [2, 2], 1, to);
    assert_eq!(get(&out, 2), [2.0, 2.0]);

    Reference.stream_join(&mut pass(), vx, vy, None, [2, 2], 1);
    assert_eq!(get(&x, 4), [12.0, 24.0, 16.0, 28.0]);
    // 2 sigmoid(0) = 1; 2 sigmoid(4 / 2) = 1.7615942.
    let inject = buf(&[0.0, 4.0]);
    Reference.stream_join(&mut pass(), vx, vy, Some(View::of(&inject, 2)), [2, 2], 1);
    assert_near(&get(&x, 4), &[22.0, 44.0, 33.615_94, 63.231_884]);
}

#[test]
fn looked_up_rows_are_gated_by_a_signed_root() {
    // Scores 8 / 2 = 4, -4, 0 and 1e-8: sigmoid(2), sigmoid(-2), sigmoid(0), sigmoid(0.001).
    let key = [[2.0; 4], [-2.0; 4], [0.0; 4], [1e-8, 0.0, 0.0, 0.0]].concat();
    let query = [[1.0; 4], [1.0; 4], [1.0; 4], [2.0; 4]].concat();
    let (key, query, value, out) = (buf(&key), buf(&query), buf(&[1.0, 2.0, 3.0, 4.0]), empty(16));
    let (vk, vq, vv) = (View::of(&key, 16), View::of(&query, 16), View::of(&value, 4));
    Reference.row_gate(&mut pass(), vk, vq, vv, [4, 4], 1, View::of(&out, 16));
    let expected: Vec<f32> = [0.880_797_1, 0.119_202_92, 0.5, 0.500_25]
        .into_iter()
        .flat_map(|factor: f32| [1.0, 2.0, 3.0, 4.0].map(|value| factor * value))
        .collect();
    assert_near(&get(&out, 16), &expected);
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
        k: Some(View::of(&bufs[1], n_kv_heads * d_head)),
        v: Some(View::of(&bufs[2], n_kv_heads * d_head)),
        k_cache: &caches[0],
        v_cache: Some(&caches[1]),
        n_heads,
        n_kv_heads,
        d_key: d_head,
        d_value: d_head,
        scale,
        window: None,
        sinks: None,
        selection: None,
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

/// What [`average`] sees.
#[derive(Default)]
struct Sight {
    window: Option<usize>,
    sink: Option<f32>,
    selection: Option<Selection<Buf>>,
    latent: bool,
}

/// Attention of five tokens whose scores are all 0, over values 1, 2, 4, 8, 16.
fn average(sight: &Sight) -> Vec<f32> {
    let (q, v) = (buf(&[0.0; 5]), buf(&[1.0, 2.0, 4.0, 8.0, 16.0]));
    let caches = [empty(96), empty(96)];
    let sinks = sight.sink.map(|sink| weight(&[sink], 1));
    let args = Attention {
        q: View::of(&q, 1),
        k: Some(View::of(&v, 1)),
        v: (!sight.latent).then_some(View::of(&v, 1)),
        k_cache: &caches[0],
        v_cache: (!sight.latent).then_some(&caches[1]),
        n_heads: 1,
        n_kv_heads: 1,
        d_key: 1,
        d_value: 1,
        scale: 1.0,
        window: sight.window,
        sinks: sinks.as_ref(),
        selection: sight.selection.as_ref(),
    };
    let (out, rows) = (empty(5), rows(0, 0, &[0; 5]));
    Reference.attention(&mut pass(), &args, &rows, View::of(&out, 1));
    // Once more over what the caches hold now.
    let again = empty(5);
    let args = Attention { k: None, v: None, ..args };
    Reference.attention(&mut pass(), &args, &rows, View::of(&again, 1));
    assert_eq!(get(&again, 5), get(&out, 5));
    get(&out, 5)
}

#[test]
fn windows_and_sinks() {
    let window = |window| average(&Sight { window: Some(window), ..Sight::default() });
    assert_near(&average(&Sight::default()), &[1.0, 1.5, 7.0 / 3.0, 3.75, 6.2]);
    assert_near(&window(1), &[1.0, 2.0, 4.0, 8.0, 16.0]);
    assert_near(&window(2), &[1.0, 1.5, 3.0, 6.0, 12.0]);
    // A sink takes its share of the weight, here as much as a token, then three times that.
    let sink = Sight { sink: Some(0.0), ..Sight::default() };
    assert_near(&average(&sink), &[0.5, 1.0, 1.75, 3.0, 31.0 / 6.0]);
    let both = Sight { window: Some(2), sink: Some(3f32.ln()), ..Sight::default() };
    assert_near(&average(&both), &[0.25, 0.6, 1.2, 2.4, 4.8]);
}

#[test]
fn values_may_lie_within_keys() {
    let latent = Sight { latent: true, ..Sight::default() };
    assert_near(&average(&latent), &[1.0, 1.5, 7.0 / 3.0, 3.75, 6.2]);
    // Keys of two elements, values of one: the first of the key.
    let (q, k) = (buf(&[0.0; 4]), buf(&[3.0, 100.0, 5.0, 200.0]));
    let (k_cache, out) = (empty(96 * 2), empty(2));
    let args = Attention {
        q: View::of(&q, 2),
        k: Some(View::of(&k, 2)),
        v: None,
        k_cache: &k_cache,
        v_cache: None,
        n_heads: 1,
        n_kv_heads: 1,
        d_key: 2,
        d_value: 1,
        scale: 1.0,
        window: None,
        sinks: None,
        selection: None,
    };
    Reference.attention(&mut pass(), &args, &rows(0, 0, &[0; 2]), View::of(&out, 1));
    assert_eq!(get(&out, 2), [3.0, 4.0]);
}

/// Counts and block ids of rows, `[n, 1 + top]`.
fn selection(rows: &[&[u32]], top: usize, ratio: usize) -> Selection<Buf> {
    let mut all = Vec::new();
    for row in rows {
        let mut ids = vec![row.len() as u32];
        ids.extend(*row);
        ids.resize(1 + top, u32::MAX);
        all.extend(ids.into_iter().map(f32::from_bits));
    }
    Selection { ids: buf(&all), top, ratio }
}

#[test]
fn a_selection_and_what_lies_past_its_blocks_is_seen() {
    let seen = |selection: Selection<Buf>, window| {
        average(&Sight { selection: Some(selection), window, ..Sight::default() })
    };
    let none: &[u32] = &[];
    // Blocks of two tokens: an unfinished one is seen unasked.
    let blocks = || selection(&[none, &[0], none, &[1], &[0]], 1, 2);
    assert_near(&seen(blocks(), None), &[1.0, 1.5, 4.0, 6.0, 19.0 / 3.0]);
    assert_near(&seen(blocks(), Some(4)), &[1.0, 1.5, 4.0, 6.0, 9.0]);
    let tokens = selection(&[&[0], &[0], &[0, 2], &[1, 2], &[0, 4]], 2, 1);
    assert_near(&seen(tokens, None), &[1.0, 1.0, 2.5, 3.0, 8.5]);
}

/// Blocks that each row chose.
fn chosen(args: &IndexSelect<'_, Weight, Buf>, n: usize) -> Vec<Vec<u32>> {
    let rows = rows(0, 0, &vec![0; n]);
    let selection = Reference.index_select(&mut pass(), args, &rows);
    let all = get(&selection.ids, n * (1 + args.top));
    let row = |row: &[f32]| {
        row[1..=row[0].to_bits() as usize].iter().map(|id| id.to_bits()).collect::<Vec<_>>()
    };
    all.chunks_exact(1 + args.top).map(row).collect()
}

#[test]
fn the_indexer_adds_what_is_positive() {
    // 0.5 (1 max(0, k) + 2 max(0, -k)) of 1, -1, 3, 2 is 0.5, 1, 1.5, 1: of equals the first.
    let (q, k) = (buf(&[1.0, -1.0].repeat(4)), buf(&[1.0, -1.0, 3.0, 2.0]));
    let (weights, k_cache, ids) = (buf(&[1.0, 2.0].repeat(4)), empty(96), empty(4 * 3));
    let args = IndexSelect {
        q: View::of(&q, 2),
        k: View::of(&k, 1),
        k_cache: &k_cache,
        weights: Some(View::of(&weights, 2)),
        n_heads: 2,
        d: 1,
        scale: 1.0,
        sum_scale: 0.5,
        pool: None,
        top: 2,
        ids: &ids,
    };
    assert_eq!(chosen(&args, 4), [vec![0], vec![0, 1], vec![1, 2], vec![1, 2]]);
    // With factors of one: 0.5, 0.5, 1.5, 1.
    let plain = IndexSelect { weights: None, ..args };
    assert_eq!(chosen(&plain, 4), [vec![0], vec![0, 1], vec![0, 2], vec![2, 3]]);
}

#[test]
fn block_keys_are_means_normed_and_turned() {
    // Both blocks have mean (3, 4), of which the second is turned by a quarter: (-4, 3).
    let k = buf(&[3.0, 0.0, 3.0, 8.0].repeat(2));
    let (norm, inv_freq) = (weight(&[1.0, 1.0], 2), weight(&[std::f32::consts::FRAC_PI_4], 1));
    let (k_cache, ids) = (empty(96 * 2), empty(4 * 2));
    let of = |direction: [f32; 2]| {
        let q = buf(&direction.repeat(4));
        let (norm, inv_freq) = (&norm, &inv_freq);
        let args = IndexSelect {
            q: View::of(&q, 2),
            k: View::of(&k, 2),
            k_cache: &k_cache,
            weights: None,
            n_heads: 1,
            d: 2,
            scale: 1.0,
            sum_scale: 1.0,
            pool: Some(Pool { ratio: 2, norm, eps: 0.0, inv_freq, rotary_scale: 1.0 }),
            top: 1,
            ids: &ids,
        };
        chosen(&args, 4)
    };
    assert_eq!(of([1.0, 0.0]), [vec![], vec![0], vec![0], vec![0]]);
    assert_eq!(of([-1.0, 0.0]), [vec![], vec![0], vec![0], vec![1]]);
    // 3 + 4 against 3 - 4, and 3 against 4 of either.
    assert_eq!(of([1.0, 1.0])[3], [0]);
    assert_eq!(of([-1.0, 1.0])[3], [1]);
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
        Reference.causal_conv(&mut pass(), view(&x), &w, 1, &state, &rows, view(&out));
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
fn a_dilated_convolution_skips_tokens() {
    // The state holds x of positions -4..0: taps fall on t - 4, t - 2 and t.
    let w = weight(&[100.0, 10_000.0, 1_000_000.0], 3);
    let state = buf(&[1.0, 2.0, 3.0, 4.0]);
    let (x, out) = (buf(&[5.0, 6.0, 7.0]), empty(3));
    let rows = rows(0, 0, &[0; 3]);
    Reference.causal_conv(&mut pass(), View::of(&x, 1), &w, 2, &state, &rows, View::of(&out, 1));
    assert_eq!(get(&out, 3), [5_030_100.0, 6_040_200.0, 7_050_300.0]);
    assert_eq!(get(&state, 4), [4.0, 5.0, 6.0, 7.0]);
}

#[test]
fn convolution_ends_in_silu() {
    let (x, out, state) = (buf(&[1.0]), empty(1), buf(&[0.5]));
    let (w, rows) = (weight(&[2.0, 1.0], 2), rows(0, 0, &[0]));
    let (x, view) = (View::of(&x, 1), View::of(&out, 1));
    Reference.causal_conv(&mut pass(), x, &w, 1, &state, &rows, view);
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
    route_by(&Router::softmax([logits.len(), top_k], renormalise), logits)
}

fn route_by(router: &Router<'_, Weight>, logits: &[f32]) -> (Vec<u32>, Vec<f32>) {
    let top_k = router.top_k;
    let (x, ids, weights) = (buf(logits), empty(top_k), empty(top_k));
    let view = View::of(&x, logits.len());
    let routed = Reference.route(&mut pass(), view, router, 1, [&ids, &weights]);
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

#[test]
fn routers_of_other_families() {
    let ln = |x: f32| x.ln();
    // sigmoid(ln(x)) = x / (1 + x): 1/2, 3/4, 4/5, 1/4.
    let logits = [ln(1.0), ln(3.0), ln(4.0), ln(1.0 / 3.0)];
    let softmax = Router::softmax([4, 2], false);
    let sigmoid = Router { scores: Scores::Sigmoid, ..softmax };
    let (ids, weights) = route_by(&sigmoid, &logits);
    assert_eq!(ids, [2, 1]);
    assert_near(&weights, &[0.8, 0.75]);
    // A bias chooses, and does not weigh.
    let bias = weight(&[0.0, 0.0, -1.0, 1.0], 4);
    let biased = Router { choice_bias: Some(&bias), ..sigmoid };
    let (ids, weights) = route_by(&biased, &logits);
    assert_eq!(ids, [3, 1]);
    assert_near(&weights, &[0.25, 0.75]);
    let own = weight(&[1.0, 10.0, 1.0, 2.0], 4);
    let all = Router { renormalise: Some(1.0), factor: 3.0, expert_factor: Some(&own), ..biased };
    assert_near(&route_by(&all, &logits).1, &[0.25 / 2.0 * 6.0, 0.75 / 2.0 * 30.0]);
    // Of the chosen alone: 4 / (4 + 3).
    let chosen = Router { scores: Scores::SoftmaxOfChosen, ..softmax };
    assert_near(&route_by(&chosen, &logits).1, &[4.0 / 7.0, 3.0 / 7.0]);
}

#[test]
fn groups_are_chosen_by_their_two_best() {
    // 6 experts in 3 groups: 1 + 1, 4 - 9, 3 + 3; the single greatest is in the second.
    let logits = [1.0, 1.0, 4.0, -9.0, 3.0, 3.0];
    let router = Router {
        scores: Scores::SoftmaxOfChosen,
        groups: Some(Groups { count: 3, kept: 1 }),
        ..Router::softmax([6, 2], false)
    };
    let (ids, weights) = route_by(&router, &logits);
    assert_eq!((ids, weights), (vec![4, 5], vec![0.5, 0.5]));
    // Among equals the lower one.
    let equal = [1.0, 2.0, 2.0, 1.0, 1.5, 1.5];
    assert_eq!(route_by(&router, &equal).0, [1, 0]);
    let two = Router { groups: Some(Groups { count: 3, kept: 2 }), ..router };
    assert_eq!(route_by(&two, &equal).0, [1, 2]);
}

fn routed(ids: &[u32], weights: &[f32], top_k: usize) -> Routed<Buf> {
    let ids: Vec<f32> = ids.iter().map(|&id| f32::from_bits(id)).collect();
    Routed { n: ids.len() / top_k, ids: buf(&ids), weights: buf(weights), top_k }
}

#[test]
fn an_expert_is_a_swiglu() {
    // gate 1, up 2, down 3, each 1 x 1: 3 * silu(x) * 2x.
    let matrix = |offset| MatrixLayout { encoding: Encoding::F32, d_out: 1, d_in: 1, offset };
    let layout = ExpertLayout { glu: Glu::Silu, gate: matrix(4), up: matrix(0), down: matrix(8) };
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
