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
use crate::rows::{Rows, Sequence};
use crate::verbs::{
    Attention, Backend, BufType, DeltaStep, ExpertLayout, Experts, Gate, HostRecords, Limits,
    MatrixLayout, MoeFfn, Pairing, Pass, Routed, Router, Shared, Slab, View,
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

/// Scale of a norm: `rsqrt(mean + eps)`.
fn rsqrt(x: f64, eps: f32) -> f64 {
    1.0 / (x + eps as f64).sqrt()
}

/// Elements of one sequence in a per-sequence buffer `[n_fixed, len]`.
fn fixed(sequence: &Sequence, len: usize) -> Range<usize> {
    let from = sequence.fixed as usize * len;
    from..from + len
}

/// One matrix of an expert record, decoded.
fn piece(slab: &HostSlab, slot: u32, index: usize, layout: &MatrixLayout) -> Vec<f32> {
    let mut matrix = Matrix::new(layout.encoding, layout.d_out, layout.d_in);
    matrix.fill(0, &slab.piece(slot, index, layout));
    matrix.values
}

/// `down(silu(gate x) * up x)` for each (row, choice) that chose `expert`, whose record lies in
/// `slot`. An expert that nobody chose is not even decoded.
fn expert_ffn(args: &MoeFfn<'_, Reference>, ids: &[u32], expert: u32, slot: u32, out: &Buffer) {
    if !ids.contains(&expert) {
        return;
    }
    let ExpertLayout { gate, up, down } = args.layout;
    let x = load(args.x, args.routed.n, gate.d_in);
    let matrix = |index, layout| piece(args.slab, slot, index, layout);
    let (w_gate, w_up, w_down) = (matrix(0, gate), matrix(1, up), matrix(2, down));
    for (at, _) in ids.iter().enumerate().filter(|&(_, &id)| id == expert) {
        let x = &x[at / args.routed.top_k * gate.d_in..][..gate.d_in];
        let inner = maths::swiglu(&maths::linear(x, &w_gate), &maths::linear(x, &w_up));
        out.store(at * down.d_out, &maths::linear(&inner, &w_down));
    }
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

    fn rms_norm(
        &self,
        _: &mut Eager,
        x: View<'_, Buffer>,
        w: &Matrix,
        heads: usize,
        eps: f32,
        n: usize,
        out: View<'_, Buffer>,
    ) {
        let d = w.d_in;
        let mut x = load(x, n, heads * d);
        for x in x.chunks_exact_mut(d) {
            let scale = rsqrt(maths::dot(x, x) / d as f64, eps);
            for (x, &w) in x.iter_mut().zip(&w.values) {
                *x = (*x as f64 * scale * w as f64) as f32;
            }
        }
        store(out, heads * d, &x);
    }

    fn l2_norm(
        &self,
        _: &mut Eager,
        view: View<'_, Buffer>,
        [heads, d]: [usize; 2],
        eps: f32,
        factor: f32,
        n: usize,
    ) {
        let mut x = load(view, n, heads * d);
        for x in x.chunks_exact_mut(d) {
            let scale = factor as f64 * rsqrt(maths::dot(x, x), eps);
            for x in x.iter_mut() {
                *x = (*x as f64 * scale) as f32;
            }
        }
        store(view, heads * d, &x);
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

    fn swiglu(
        &self,
        _: &mut Eager,
        gate: View<'_, Buffer>,
        up: View<'_, Buffer>,
        width: usize,
        n: usize,
        out: View<'_, Buffer>,
    ) {
        store(out, width, &maths::swiglu(&load(gate, n, width), &load(up, n, width)));
    }

    fn sigmoid_gate(
        &self,
        _: &mut Eager,
        x: View<'_, Buffer>,
        z: View<'_, Buffer>,
        width: usize,
        n: usize,
    ) {
        let gated = |(&x, &z): (&f32, &f32)| (x as f64 * maths::sigmoid(z as f64)) as f32;
        let gated: Vec<f32> = load(x, n, width).iter().zip(&load(z, n, width)).map(gated).collect();
        store(x, width, &gated);
    }

    fn rotary_table(
        &self,
        _: &mut Eager,
        inv_freq: &Matrix,
        scale: f32,
        rows: &Rows,
        out: View<'_, Buffer>,
    ) {
        let mut table = Vec::new();
        for row in rows.rows() {
            let angles = inv_freq.values.iter().map(|f| (row.position as f32 * f) as f64);
            table.extend(angles.clone().map(|angle| (scale as f64 * angle.cos()) as f32));
            table.extend(angles.map(|angle| (scale as f64 * angle.sin()) as f32));
        }
        store(out, 2 * inv_freq.d_in, &table);
    }

    fn rope(
        &self,
        _: &mut Eager,
        view: View<'_, Buffer>,
        [heads, d_head, d]: [usize; 3],
        table: View<'_, Buffer>,
        pairing: Pairing,
        n: usize,
    ) {
        let (mut x, table) = (load(view, n, heads * d_head), load(table, n, d));
        for (x, table) in x.chunks_exact_mut(heads * d_head).zip(table.chunks_exact(d)) {
            let (cos, sin) = table.split_at(d / 2);
            for head in x.chunks_exact_mut(d_head) {
                maths::rotate(&mut head[..d], cos, sin, pairing);
            }
        }
        store(view, heads * d_head, &x);
    }

    fn attention(
        &self,
        _: &mut Eager,
        args: &Attention<'_, Buffer>,
        rows: &Rows,
        out: View<'_, Buffer>,
    ) {
        let &Attention { n_heads, n_kv_heads, d_head, scale, .. } = args;
        let (n, width) = (rows.len(), n_kv_heads * d_head);
        let (k, v) = (load(args.k, n, width), load(args.v, n, width));
        let sequence_of = |t: usize| &rows.sequences()[rows.rows()[t].sequence as usize];
        // All rows before any query, so that a chunk reads what later chunks will read.
        for (t, row) in rows.rows().iter().enumerate() {
            let at = rows.token_row(sequence_of(t), row.position) * width;
            args.k_cache.store(at, &k[t * width..][..width]);
            args.v_cache.store(at, &v[t * width..][..width]);
        }
        let q = load(args.q, n, n_heads * d_head);
        let mut result = Vec::with_capacity(q.len());
        for (t, row) in rows.rows().iter().enumerate() {
            let cached = |cache: &Buffer| -> Vec<Vec<f32>> {
                let at = |position| rows.token_row(sequence_of(t), position) * width;
                (0..=row.position).map(|p| cache.load(at(p)..at(p) + width)).collect()
            };
            let (keys, values) = (cached(args.k_cache), cached(args.v_cache));
            for h in 0..n_heads {
                let from = h / (n_heads / n_kv_heads) * d_head;
                let keys: Vec<&[f32]> = keys.iter().map(|k| &k[from..][..d_head]).collect();
                let values: Vec<&[f32]> = values.iter().map(|v| &v[from..][..d_head]).collect();
                let q = &q[(t * n_heads + h) * d_head..][..d_head];
                result.extend(maths::attend(q, &keys, &values, scale));
            }
        }
        store(out, n_heads * d_head, &result);
    }

    fn causal_conv(
        &self,
        _: &mut Eager,
        x: View<'_, Buffer>,
        w: &Matrix,
        state: &Buffer,
        rows: &Rows,
        out: View<'_, Buffer>,
    ) {
        let (taps, channels) = (w.d_in, w.values.len() / w.d_in);
        let x = load(x, rows.len(), channels);
        let mut result = Vec::with_capacity(x.len());
        for sequence in rows.sequences() {
            let held = fixed(sequence, (taps - 1) * channels);
            // The inputs of all tokens from K-1 before the first row on.
            let mut inputs = state.load(held.clone());
            inputs.extend(&x[sequence.rows.start * channels..sequence.rows.end * channels]);
            for t in 0..sequence.rows.len() {
                result.extend((0..channels).map(|c| {
                    let tap = |k: usize| w.values[c * taps + k] as f64;
                    let input = |k: usize| inputs[(t + k) * channels + c] as f64;
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

    fn gated_norm(
        &self,
        _: &mut Eager,
        view: View<'_, Buffer>,
        z: View<'_, Buffer>,
        w: &Matrix,
        heads: usize,
        eps: f32,
        gate: Gate,
        n: usize,
    ) {
        let d = w.d_in;
        let (mut x, z) = (load(view, n, heads * d), load(z, n, heads * d));
        for (x, z) in x.chunks_exact_mut(d).zip(z.chunks_exact(d)) {
            let scale = rsqrt(maths::dot(x, x) / d as f64, eps);
            for i in 0..d {
                let normed = x[i] as f64 * scale * w.values[i] as f64;
                x[i] = (normed * maths::gate(gate, z[i] as f64)) as f32;
            }
        }
        store(view, heads * d, &x);
    }

    fn route(
        &self,
        _: &mut Eager,
        logits: View<'_, Buffer>,
        [n_experts, top_k]: [usize; 2],
        router: Router,
        n: usize,
        [ids, weights]: [&Buffer; 2],
    ) -> Routed<Buffer> {
        let Router::Softmax { renormalise } = router;
        assert!(top_k <= n_experts, "{top_k} choices among {n_experts} experts");
        let logits = load(logits, n, n_experts);
        for (t, logits) in logits.chunks_exact(n_experts).enumerate() {
            let (chosen, weight): (Vec<f32>, Vec<f32>) = maths::choose(logits, top_k, renormalise)
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
