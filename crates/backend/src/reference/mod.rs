//! The naive implementation: the oracle of every backend, written for reading.
//!
//! Eager: a verb is done when it returns. One thread, no SIMD, weights decoded to f32 at load and
//! experts decoded at every call. It allocates while it works; no other backend may.
//!
//! # Numerics
//! Values between verbs are f32. *Within* a verb sums and functions run in f64 and each result is
//! rounded to f32 once, so that a difference is the other backend's. Three roundings belong to the
//! contract and are kept: K and V to the type of their cache, the state of a recurrence after each
//! token, and the angle `position * f`. Sums whose order is part of the contract (`add`,
//! `moe_join`) are f32 throughout.

mod buffer;
mod maths;
mod slots;

pub use buffer::{Buffer, Matrix};
pub use slots::HostSlab;

use crate::fetch::{Ready, Routes, StepError};
use crate::layout::{ExpertLayout, MatrixBytes, MatrixLayout};
use crate::rows::{Rows, Sequence};
use crate::verbs::{
    Attention, Backend, BufType, DeltaStep, Experts, Glu, HeadRows, HostRecords, IndexSelect,
    Limits, MoeFfn, Norm, Pairing, Pass, Pool, Routed, Router, Selection, Shared, Slab, Unary,
    View,
};
use buffer::{load, store};
use snowmelt_weights::Encoding;
use std::ops::Range;
use std::sync::Arc;

/// The reference backend; see the module.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reference;

/// A recording of the reference: only the pins, as the work is done already.
#[derive(Debug, Default)]
pub struct Eager {
    pins: Vec<Ready>,
}

impl Pass for Eager {
    type Buf = Buffer;

    fn submit(&mut self) {
        self.pins.clear();
    }

    fn read(
        &mut self,
        buf: &Buffer,
        range: Range<usize>,
        into: &mut [f32],
    ) -> Result<(), StepError> {
        self.submit();
        into.copy_from_slice(&buf.load(range));
        Ok(())
    }

    fn read_routes(&mut self, routed: &Routed<Buffer>, into: &mut Routes) -> Result<(), StepError> {
        self.submit();
        into.set(routed.top_k, |ids| ids.extend(ids_of(routed)));
        Ok(())
    }
}

/// `[n, top_k]`
fn ids_of(routed: &Routed<Buffer>) -> Vec<u32> {
    routed.ids.load(0..routed.n * routed.top_k).into_iter().map(f32::to_bits).collect()
}

/// Elements of one sequence in a per-sequence buffer `[n_fixed, len]`.
fn fixed(sequence: &Sequence, len: usize) -> Range<usize> {
    let from = sequence.fixed as usize * len;
    from..from + len
}

/// One matrix of an expert record, decoded.
fn piece(slab: &HostSlab, slot: u32, layout: &MatrixLayout) -> Vec<f32> {
    let [rows, scales] = layout.regions().map(|region| slab.bytes(slot, region));
    let mut values = vec![f32::NAN; layout.d_out * layout.d_in];
    let bytes = MatrixBytes { rows: &rows, scales: &scales };
    layout.decode_rows(bytes, 0..layout.d_out, &mut values);
    values
}

/// `down(f(gate x) * up x)`, each product with its bias, for each (row, choice) that chose
/// `expert`, whose record lies in `slot`. An expert that nobody chose is not even decoded.
fn expert_ffn(args: &MoeFfn<'_, Reference>, ids: &[u32], expert: u32, slot: u32, out: &Buffer) {
    if !ids.contains(&expert) {
        return;
    }
    let ExpertLayout { glu, gate, down, .. } = args.layout;
    let x = load(args.x, args.routed.n, gate.d_in);
    let weights = args.layout.pieces().map(|layout| piece(args.slab, slot, layout));
    let biases = args.layout.biases.map(|b| b.map(|layout| piece(args.slab, slot, &layout)));
    let product = |which: usize, x: &[f32]| {
        let mut y = maths::linear(x, &weights[which]);
        if let Some(biases) = &biases {
            y.iter_mut().zip(&biases[which]).for_each(|(y, bias)| *y += bias);
        }
        y
    };
    for (at, _) in ids.iter().enumerate().filter(|&(_, &id)| id == expert) {
        let x = &x[at / args.routed.top_k * gate.d_in..][..gate.d_in];
        let inner = maths::glu_rows(*glu, &product(0, x), &product(1, x));
        out.store(at * down.d_out, &product(2, &inner));
    }
}

/// Writes a row for each token into a per-token buffer.
fn store_tokens(rows: &Rows, x: View<'_, Buffer>, cache: &Buffer, width: usize) {
    let x = load(x, rows.len(), width);
    for (row, x) in rows.rows().iter().zip(x.chunks_exact(width)) {
        let sequence = &rows.sequences()[row.sequence as usize];
        cache.store(rows.token_row(sequence, row.position) * width, x);
    }
}

/// Rows of a per-token buffer at some positions of the sequence of row `t`.
fn tokens(rows: &Rows, t: usize, cache: &Buffer, width: usize, positions: &[u32]) -> Vec<Vec<f32>> {
    let sequence = &rows.sequences()[rows.rows()[t].sequence as usize];
    let at = |&position: &u32| rows.token_row(sequence, position) * width;
    positions.iter().map(at).map(|at| cache.load(at..at + width)).collect()
}

/// Positions that row `t` sees.
fn seen(args: &Attention<'_, Matrix, Buffer>, rows: &Rows, t: usize) -> Vec<u32> {
    let position = rows.rows()[t].position;
    let first = args.window.map_or(0, |window| (position as usize + 1).saturating_sub(window));
    let mut seen: Vec<u32> = (first as u32..=position).collect();
    if let Some(Selection { ids, top, ratio }) = args.selection {
        let row = ids.load(t * (1 + top)..(t + 1) * (1 + top));
        let count = row[0].to_bits() as usize;
        let chosen: Vec<u32> = row[1..=count].iter().map(|id| id.to_bits()).collect();
        let complete = (position + 1) / *ratio as u32;
        seen.retain(|p| {
            let block = p / *ratio as u32;
            block >= complete || chosen.contains(&block)
        });
    }
    seen
}

/// The key of block `index`, from the keys of its tokens.
fn pooled(pool: &Pool<'_, Matrix>, index: usize, keys: &[Vec<f32>]) -> Vec<f32> {
    let d = keys[0].len();
    let mean =
        |i: usize| (keys.iter().map(|k| k[i] as f64).sum::<f64>() / keys.len() as f64) as f32;
    let mut key: Vec<f32> = (0..d).map(mean).collect();
    let (_, scale) = maths::spread(crate::verbs::Spread::MeanSquare, &key, pool.eps);
    for (x, &w) in key.iter_mut().zip(&pool.norm.values) {
        *x = (*x as f64 * scale * w as f64) as f32;
    }
    let angles = rotary_row((index * pool.ratio) as u32, &pool.inv_freq.values, pool.rotary_scale);
    let (cos, sin) = angles.split_at(angles.len() / 2);
    maths::rotate(&mut key[..angles.len()], cos, sin, Pairing::Half);
    key
}

/// Cosines, then sines, of one position.
fn rotary_row(position: u32, inv_freq: &[f32], scale: f32) -> Vec<f32> {
    let angles = inv_freq.iter().map(|f| (position as f32 * f) as f64);
    let cos = angles.clone().map(|angle| (scale as f64 * angle.cos()) as f32);
    cos.chain(angles.map(|angle| (scale as f64 * angle.sin()) as f32)).collect()
}

impl Backend for Reference {
    type Buf = Buffer;
    type Weight = Matrix;
    type Pass = Eager;
    type Slab = HostSlab;

    fn submissions_in_flight(&self) -> usize {
        0
    }

    fn scratch_bytes(&self, _: &Limits) -> usize {
        0
    }

    fn prepare(&self, _: &Limits) {}

    fn alloc(&self, len: usize, ty: BufType) -> Buffer {
        Buffer::new(len, ty)
    }

    fn alloc_weight(&self, encoding: Encoding, d_out: usize, d_in: usize) -> Matrix {
        Matrix::new(encoding, d_out, d_in)
    }

    fn fill_weight(&self, weight: &mut Matrix, first_row: usize, rows: &[u8]) {
        weight.fill(first_row, rows);
    }

    fn alloc_slab(&self, slot_bytes: usize, slots: u32) -> HostSlab {
        HostSlab::new(slot_bytes, slots)
    }

    fn adopt_slab(&self, records: Arc<dyn HostRecords>) -> Option<HostSlab> {
        Some(HostSlab::adopt(records))
    }

    fn begin(&self) -> Eager {
        Eager::default()
    }

    fn clear(&self, _: &mut Eager, buf: &Buffer, range: Range<usize>) {
        buf.store(range.start, &vec![0.0; range.len()]);
    }

    fn write(&self, _: &mut Eager, buf: &Buffer, offset: usize, data: &[f32]) {
        buf.store(offset, data);
    }

    fn copy(&self, _: &mut Eager, buf: &Buffer, from: usize, to: usize, len: usize) {
        buf.copy(from, to, len);
    }

    fn embed(&self, _: &mut Eager, table: &Matrix, rows: &Rows, out: View<'_, Buffer>) {
        let d = table.d_in;
        let tokens = rows.rows().iter().map(|row| row.token as usize);
        let values: Vec<f32> = tokens.flat_map(|t| table.values[t * d..][..d].to_vec()).collect();
        store(out, d, &values);
    }

    fn norm(
        &self,
        _: &mut Eager,
        x: View<'_, Buffer>,
        norm: &Norm<'_, Matrix, Buffer>,
        n: usize,
        out: View<'_, Buffer>,
    ) {
        let &Norm { heads, d, eps, factor, .. } = norm;
        let mut x = load(x, n, heads * d);
        let gate = norm.gate.map(|(z, f)| (load(z, n, heads * d), f));
        // A vector for all heads, or one for each.
        let of = |w: Option<&Matrix>, i: usize| w.map(|w| w.values[i % w.d_in] as f64);
        for (part, x) in x.chunks_exact_mut(d).enumerate() {
            let (shift, scale) = maths::spread(norm.spread, x, eps);
            for (i, x) in x.iter_mut().enumerate() {
                let (at, element) = (part * d + i, part % heads * d + i);
                let mut y = (*x as f64 - shift) * scale * factor as f64;
                y = y * of(norm.w, element).unwrap_or(1.0) + of(norm.bias, element).unwrap_or(0.0);
                if let Some((z, f)) = &gate {
                    y = maths::glu(*f, z[at] as f64, y);
                }
                *x = y as f32;
            }
        }
        store(out, heads * d, &x);
    }

    fn linear(
        &self,
        _: &mut Eager,
        x: View<'_, Buffer>,
        w: &Matrix,
        n: usize,
        out: View<'_, Buffer>,
    ) {
        let x = load(x, n, w.d_in);
        let y: Vec<f32> =
            x.chunks_exact(w.d_in).flat_map(|x| maths::linear(x, &w.values)).collect();
        store(out, w.values.len() / w.d_in, &y);
    }

    fn add(&self, _: &mut Eager, x: View<'_, Buffer>, y: View<'_, Buffer>, width: usize, n: usize) {
        let sum: Vec<f32> =
            load(x, n, width).iter().zip(load(y, n, width)).map(|(x, y)| x + y).collect();
        store(x, width, &sum);
    }

    fn linear_heads(
        &self,
        _: &mut Eager,
        x: View<'_, Buffer>,
        w: &Matrix,
        heads: &HeadRows,
        n: usize,
        out: View<'_, Buffer>,
    ) {
        let (d_x, d_out) = match heads.transposed {
            true => (heads.rows, w.d_in),
            false => (w.d_in, heads.rows),
        };
        for h in 0..heads.heads {
            let first = (h * heads.stride + heads.first) * w.d_in;
            let w = &w.values[first..first + heads.rows * w.d_in];
            let product = |x: &[f32]| match heads.transposed {
                true => maths::linear_transposed(x, w),
                false => maths::linear(x, w),
            };
            let x = load(x.column(h * heads.x_head), n, d_x);
            let y: Vec<f32> = x.chunks_exact(d_x).flat_map(product).collect();
            store(out.column(h * heads.out_head), d_out, &y);
        }
    }

    fn copy_heads(
        &self,
        _: &mut Eager,
        x: View<'_, Buffer>,
        [heads, x_head, out_head, width]: [usize; 4],
        n: usize,
        out: View<'_, Buffer>,
    ) {
        for h in 0..heads {
            store(out.column(h * out_head), width, &load(x.column(h * x_head), n, width));
        }
    }

    fn glu(
        &self,
        _: &mut Eager,
        f: Glu,
        gate: View<'_, Buffer>,
        up: View<'_, Buffer>,
        width: usize,
        n: usize,
        out: View<'_, Buffer>,
    ) {
        store(out, width, &maths::glu_rows(f, &load(gate, n, width), &load(up, n, width)));
    }

    fn activate(&self, _: &mut Eager, f: Unary, x: View<'_, Buffer>, width: usize, n: usize) {
        let y: Vec<f32> =
            load(x, n, width).iter().map(|&x| maths::unary(f, x as f64) as f32).collect();
        store(x, width, &y);
    }

    fn stream_mix(
        &self,
        _: &mut Eager,
        x: View<'_, Buffer>,
        gate: View<'_, Buffer>,
        [streams, d]: [usize; 2],
        n: usize,
        out: View<'_, Buffer>,
    ) {
        let width = streams * d;
        let (x, gate) = (load(x, n, width), load(gate, n, width));
        let mixed = |(t, i): (usize, usize)| {
            let at = |c: usize| t * width + c * d + i;
            let gated = |c: usize| maths::sigmoid(gate[at(c)] as f64) * x[at(c)] as f64;
            ((0..streams).map(gated).sum::<f64>() / streams as f64) as f32
        };
        let y: Vec<f32> = (0..n).flat_map(|t| (0..d).map(move |i| (t, i))).map(mixed).collect();
        store(out, d, &y);
    }

    fn stream_join(
        &self,
        _: &mut Eager,
        view: View<'_, Buffer>,
        y: View<'_, Buffer>,
        inject: Option<View<'_, Buffer>>,
        [streams, d]: [usize; 2],
        n: usize,
    ) {
        let (mut x, y) = (load(view, n, streams * d), load(y, n, d));
        let inject = inject.map(|inject| load(inject, n, streams));
        for (part, x) in x.chunks_exact_mut(d).enumerate() {
            let factor = inject
                .as_ref()
                .map_or(1.0, |inject| 2.0 * maths::sigmoid(inject[part] as f64 / streams as f64));
            for (x, &y) in x.iter_mut().zip(&y[part / streams * d..]) {
                *x = (*x as f64 + factor * y as f64) as f32;
            }
        }
        store(view, streams * d, &x);
    }

    fn row_gate(
        &self,
        _: &mut Eager,
        key: View<'_, Buffer>,
        query: View<'_, Buffer>,
        value: View<'_, Buffer>,
        [streams, d]: [usize; 2],
        n: usize,
        out: View<'_, Buffer>,
    ) {
        let (key, query) = (load(key, n, streams * d), load(query, n, streams * d));
        let value = load(value, n, d);
        let mut result = Vec::with_capacity(key.len());
        for (part, (key, query)) in key.chunks_exact(d).zip(query.chunks_exact(d)).enumerate() {
            let s = maths::dot(key, query) / (d as f64).sqrt();
            // The sign of zero is zero.
            let sign = if s == 0.0 { 0.0 } else { s.signum() };
            let factor = maths::sigmoid(sign * s.abs().max(1e-6).sqrt());
            let value = &value[part / streams * d..][..d];
            result.extend(value.iter().map(|&v| (factor * v as f64) as f32));
        }
        store(out, streams * d, &result);
    }

    fn rotary_table(
        &self,
        _: &mut Eager,
        inv_freq: &Matrix,
        scale: f32,
        rows: &Rows,
        out: View<'_, Buffer>,
    ) {
        let one = |row: &crate::rows::Row| rotary_row(row.position, &inv_freq.values, scale);
        let table: Vec<f32> = rows.rows().iter().flat_map(one).collect();
        store(out, 2 * inv_freq.d_in, &table);
    }

    fn rope(
        &self,
        _: &mut Eager,
        view: View<'_, Buffer>,
        [heads, d_head, first, d]: [usize; 4],
        table: View<'_, Buffer>,
        pairing: Pairing,
        n: usize,
    ) {
        let (mut x, table) = (load(view, n, heads * d_head), load(table, n, d));
        for (x, table) in x.chunks_exact_mut(heads * d_head).zip(table.chunks_exact(d)) {
            let (cos, sin) = table.split_at(d / 2);
            for head in x.chunks_exact_mut(d_head) {
                maths::rotate(&mut head[first..first + d], cos, sin, pairing);
            }
        }
        store(view, heads * d_head, &x);
    }

    fn attention(
        &self,
        _: &mut Eager,
        args: &Attention<'_, Matrix, Buffer>,
        rows: &Rows,
        out: View<'_, Buffer>,
    ) {
        let &Attention { n_heads, n_kv_heads, d_key, d_value, scale, .. } = args;
        let n = rows.len();
        let k_width = n_kv_heads * d_key;
        // All rows before any query, so that a chunk reads what later chunks will read.
        if let Some(k) = args.k {
            store_tokens(rows, k, args.k_cache, k_width);
        }
        if let (Some(v), Some(cache)) = (args.v, args.v_cache) {
            store_tokens(rows, v, cache, n_kv_heads * d_value);
        }
        let (v_cache, v_head) = match args.v_cache {
            Some(cache) => (cache, d_value),
            None => (args.k_cache, d_key),
        };
        let q = load(args.q, n, n_heads * d_key);
        let mut result = Vec::with_capacity(n * n_heads * d_value);
        for t in 0..n {
            let seen = seen(args, rows, t);
            let keys = tokens(rows, t, args.k_cache, k_width, &seen);
            let values = tokens(rows, t, v_cache, n_kv_heads * v_head, &seen);
            for h in 0..n_heads {
                let kv_head = h / (n_heads / n_kv_heads);
                let keys: Vec<&[f32]> =
                    keys.iter().map(|k| &k[kv_head * d_key..][..d_key]).collect();
                let values: Vec<&[f32]> =
                    values.iter().map(|v| &v[kv_head * v_head..][..d_value]).collect();
                let q = &q[(t * n_heads + h) * d_key..][..d_key];
                let sink = args.sinks.map(|sinks| sinks.values[h]);
                result.extend(maths::attend(q, &keys, &values, scale, sink));
            }
        }
        store(out, n_heads * d_value, &result);
    }

    fn index_select(
        &self,
        _: &mut Eager,
        args: &IndexSelect<'_, Matrix, Buffer>,
        rows: &Rows,
    ) -> Selection<Buffer> {
        let &IndexSelect { n_heads, d, top, .. } = args;
        let n = rows.len();
        store_tokens(rows, args.k, args.k_cache, d);
        let q = load(args.q, n, n_heads * d);
        let weights = args.weights.map(|weights| load(weights, n, n_heads));
        let ratio = args.pool.as_ref().map_or(1, |pool| pool.ratio);
        for t in 0..n {
            let blocks = (rows.rows()[t].position as usize + 1) / ratio;
            let positions: Vec<u32> = (0..(blocks * ratio) as u32).collect();
            let mut keys = tokens(rows, t, args.k_cache, d, &positions);
            if let Some(pool) = &args.pool {
                keys =
                    keys.chunks_exact(ratio).enumerate().map(|(b, k)| pooled(pool, b, k)).collect();
            }
            let score = |key: &Vec<f32>| {
                let of_head = |h: usize| {
                    let product = maths::dot(&q[(t * n_heads + h) * d..][..d], key);
                    let weight = weights.as_ref().map_or(1.0, |weights| weights[t * n_heads + h]);
                    weight as f64 * (args.scale as f64 * product).max(0.0)
                };
                (args.sum_scale as f64 * (0..n_heads).map(of_head).sum::<f64>()) as f32
            };
            let scores: Vec<f32> = keys.iter().map(score).collect();
            let mut chosen = maths::greatest(&scores, top);
            chosen.sort_unstable();
            let mut ids = vec![f32::from_bits(chosen.len() as u32)];
            ids.extend(chosen.into_iter().map(f32::from_bits));
            args.ids.store(t * (1 + top), &ids);
        }
        Selection { ids: args.ids.clone(), top, ratio }
    }

    fn causal_conv(
        &self,
        _: &mut Eager,
        x: View<'_, Buffer>,
        w: &Matrix,
        dilation: usize,
        state: &Buffer,
        rows: &Rows,
        out: View<'_, Buffer>,
    ) {
        let (taps, channels) = (w.d_in, w.values.len() / w.d_in);
        let x = load(x, rows.len(), channels);
        let mut result = Vec::with_capacity(x.len());
        for sequence in rows.sequences() {
            let held = fixed(sequence, dilation * (taps - 1) * channels);
            // The inputs of all tokens from D(K-1) before the first row on.
            let mut inputs = state.load(held.clone());
            inputs.extend(&x[sequence.rows.start * channels..sequence.rows.end * channels]);
            for t in 0..sequence.rows.len() {
                result.extend((0..channels).map(|c| {
                    let tap = |k: usize| w.values[c * taps + k] as f64;
                    let input = |k: usize| inputs[(t + dilation * k) * channels + c] as f64;
                    maths::silu((0..taps).map(|k| tap(k) * input(k)).sum()) as f32
                }));
            }
            state.store(held.start, &inputs[sequence.rows.len() * channels..]);
        }
        store(out, channels, &result);
    }

    fn delta_gate(
        &self,
        _: &mut Eager,
        a: View<'_, Buffer>,
        b: View<'_, Buffer>,
        [a_log, dt_bias]: [&Matrix; 2],
        n: usize,
    ) {
        let heads = a_log.d_in;
        let decay = |(i, &a)| maths::decay(a, a_log.values[i % heads], dt_bias.values[i % heads]);
        let decay: Vec<f32> = load(a, n, heads).iter().enumerate().map(decay).collect();
        let beta: Vec<f32> =
            load(b, n, heads).iter().map(|&b| maths::sigmoid(b as f64) as f32).collect();
        store(a, heads, &decay);
        store(b, heads, &beta);
    }

    fn delta_step(
        &self,
        _: &mut Eager,
        args: &DeltaStep<'_, Buffer>,
        rows: &Rows,
        out: View<'_, Buffer>,
    ) {
        let &DeltaStep { n_key_heads, n_value_heads, d_key, d_value, .. } = args;
        let n = rows.len();
        let (q, k) = (load(args.q, n, n_key_heads * d_key), load(args.k, n, n_key_heads * d_key));
        let v = load(args.v, n, n_value_heads * d_value);
        let (decay, beta) = (load(args.decay, n, n_value_heads), load(args.beta, n, n_value_heads));
        let mut result = Vec::with_capacity(v.len());
        for sequence in rows.sequences() {
            let held = fixed(sequence, n_value_heads * d_key * d_value);
            let mut states = args.state.load(held.clone());
            for t in sequence.rows.clone() {
                for (h, state) in states.chunks_exact_mut(d_key * d_value).enumerate() {
                    let key_head = h / (n_value_heads / n_key_heads);
                    let key = (t * n_key_heads + key_head) * d_key;
                    let value = t * n_value_heads + h;
                    result.extend(maths::delta(
                        state,
                        &q[key..][..d_key],
                        &k[key..][..d_key],
                        &v[value * d_value..][..d_value],
                        decay[value],
                        beta[value],
                    ));
                }
            }
            args.state.store(held.start, &states);
        }
        store(out, n_value_heads * d_value, &result);
    }

    fn route(
        &self,
        _: &mut Eager,
        logits: View<'_, Buffer>,
        router: &Router<'_, Matrix>,
        n: usize,
        [ids, weights]: [&Buffer; 2],
    ) -> Routed<Buffer> {
        let &Router { n_experts, top_k, scores, groups, renormalise, factor, .. } = router;
        assert!(top_k <= n_experts, "{top_k} choices among {n_experts} experts");
        let values = |w: &'_ Matrix| w.values.clone();
        let (bias, factors) = (router.choice_bias.map(values), router.expert_factor.map(values));
        let (bias, expert_factor) = (bias.as_deref(), factors.as_deref());
        let choice =
            maths::Choice { top_k, scores, bias, groups, renormalise, factor, expert_factor };
        let logits = load(logits, n, n_experts);
        for (t, logits) in logits.chunks_exact(n_experts).enumerate() {
            let (chosen, weight): (Vec<f32>, Vec<f32>) = choice
                .choose(logits)
                .into_iter()
                .map(|(id, weight)| (f32::from_bits(id), weight))
                .unzip();
            ids.store(t * top_k, &chosen);
            weights.store(t * top_k, &weight);
        }
        Routed { ids: ids.clone(), weights: weights.clone(), n, top_k }
    }

    fn moe_ffn(&self, p: &mut Eager, args: &MoeFfn<'_, Self>, experts: Experts<'_>, out: &Buffer) {
        let ids = ids_of(args.routed);
        match experts {
            Experts::Ready(ready) => {
                for ready in ready.iter() {
                    expert_ffn(args, &ids, ready.expert(), ready.slot(), out);
                }
                p.pins.append(ready);
            }
            Experts::Resident { first_slot } => {
                for expert in 0..args.slab.slots() - first_slot {
                    expert_ffn(args, &ids, expert, first_slot + expert, out);
                }
            }
        }
    }

    fn moe_join(
        &self,
        _: &mut Eager,
        routed: &Routed<Buffer>,
        parts: &Buffer,
        shared: Option<Shared<'_, Buffer>>,
        d: usize,
        x: View<'_, Buffer>,
    ) {
        let &Routed { n, top_k, .. } = routed;
        let (ids, weights) = (ids_of(routed), routed.weights.load(0..n * top_k));
        let results = parts.load(0..n * top_k * d);
        let mut sum = load(x, n, d);
        let shared = shared.map(|s| (load(s.x, n, d), s.gate.map(|gate| load(gate, n, 1))));
        for (t, sum) in sum.chunks_exact_mut(d).enumerate() {
            let mut choices: Vec<usize> = (t * top_k..(t + 1) * top_k).collect();
            choices.sort_by_key(|&choice| ids[choice]);
            for (i, sum) in sum.iter_mut().enumerate() {
                let part = |&choice: &usize| weights[choice] * results[choice * d + i];
                let mut joined: f32 = choices.iter().map(part).fold(0.0, |sum, part| sum + part);
                if let Some((shared, gate)) = &shared {
                    let gate = gate.as_ref().map_or(1.0, |gate| maths::sigmoid(gate[t] as f64));
                    joined += (shared[t * d + i] as f64 * gate) as f32;
                }
                *sum += joined;
            }
        }
        store(x, d, &sum);
        parts.store(0, &vec![f32::NAN; n * top_k * d]);
    }

    fn select_outputs(
        &self,
        _: &mut Eager,
        x: View<'_, Buffer>,
        width: usize,
        rows: &Rows,
        first: usize,
        n: usize,
        out: View<'_, Buffer>,
    ) {
        let selected = rows.outputs()[first..first + n].iter();
        let row = |&t: &u32| {
            let view = View { offset: x.offset + t as usize * x.stride, ..x };
            load(view, 1, width)
        };
        let selected: Vec<f32> = selected.flat_map(row).collect();
        store(out, width, &selected);
    }
}
