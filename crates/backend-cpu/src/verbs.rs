//! The verbs: each checks its operands and splits its work over threads.
#![allow(unsafe_code)]

use crate::attention::{Attend, Cache, HEADS, Store};
use crate::backend::{CpuBackend, CpuPass, Run};
use crate::buf::{CpuBuf, CpuWeight};
use crate::elementwise::{Add, Op, SigmoidGate, Swiglu, Zip};
use crate::math::{exp_one, sigmoid_one, softplus};
use crate::matmul::linear;
use crate::memory::Memory;
use crate::moe::{Ffn, moe_ffn};
use crate::norm::{Norm, Rope};
use crate::recurrent::{Conv, Delta, column_pieces};
use crate::route::{Join, Route};
use crate::scratch::{Scratch, Sizes, thread_floats};
use crate::simd::LANES;
use crate::slab::CpuSlab;
use half::{bf16, f16};
use snowmelt_backend::{
    Attention, Backend, BufType, DeltaStep, Experts, Gate, HostRecords, Limits, MoeFfn,
    PAGE_TOKENS, Pairing, Routed, Router, Rows, Shared, View,
};
use snowmelt_weights::Encoding;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

type Operand<'a> = View<'a, CpuBuf>;

impl Backend for CpuBackend {
    type Buf = CpuBuf;
    type Weight = CpuWeight;
    type Pass = CpuPass;
    type Slab = CpuSlab;

    fn submissions_in_flight(&self) -> usize {
        0
    }

    fn scratch_bytes(&self, limits: &Limits) -> usize {
        Scratch::bytes(&Sizes::of(limits), self.threads())
    }

    fn prepare(&self, limits: &Limits) {
        self.core.enter().reserve(Sizes::of(limits));
        self.core.spare_pins().reserve(limits.n_experts);
    }

    fn alloc(&self, len: usize, ty: BufType) -> CpuBuf {
        let options = &self.core.options;
        let mut memory = Memory::zeroed(len * ty.bytes(), options.huge_pages);
        if options.poison {
            memory.poison();
        }
        CpuBuf::new(memory, len, ty, self.core.id)
    }

    fn alloc_weight(&self, encoding: Encoding, d_out: usize, d_in: usize) -> CpuWeight {
        CpuWeight::new(encoding, d_out, d_in, self.core.options.huge_pages)
    }

    fn fill_weight(&self, weight: &mut CpuWeight, first_row: usize, rows: &[u8]) {
        weight.fill(first_row, rows);
    }

    fn alloc_slab(&self, slot_bytes: usize, slots: u32) -> CpuSlab {
        let options = &self.core.options;
        CpuSlab::own(slot_bytes, slots, options.huge_pages, options.poison)
    }

    fn adopt_slab(&self, records: Arc<dyn HostRecords>) -> Option<CpuSlab> {
        Some(CpuSlab::adopted(records))
    }

    fn begin(&self) -> CpuPass {
        CpuPass::new(self.core.clone())
    }

    fn clear(&self, _: &mut CpuPass, buf: &CpuBuf, range: Range<usize>) {
        let run = self.core.enter();
        let (p, size) = (run.bytes(buf, &range), buf.ty().bytes());
        // SAFETY: the range lies inside; zero is zero in every type.
        unsafe { p.add(range.start * size).write_bytes(0, range.len() * size) };
    }

    fn write(&self, _: &mut CpuPass, buf: &CpuBuf, offset: usize, data: &[f32]) {
        let run = self.core.enter();
        let p = run.bytes(buf, &(offset..offset + data.len()));
        // SAFETY: the range lies inside, and the lock keeps others out.
        unsafe {
            match buf.ty() {
                BufType::F32 => {
                    let to = p.add(4 * offset);
                    std::ptr::copy_nonoverlapping(data.as_ptr().cast(), to, 4 * data.len());
                }
                BufType::F16 => narrow(p, offset, data, |x| f16::from_f32(x).to_bits()),
                BufType::Bf16 => narrow(p, offset, data, |x| bf16::from_f32(x).to_bits()),
            }
        }
    }

    fn copy(&self, _: &mut CpuPass, buf: &CpuBuf, from: usize, to: usize, len: usize) {
        let run = self.core.enter();
        assert!(from.abs_diff(to) >= len, "{len} elements from {from} to {to} overlap");
        let (p, size) = (run.bytes(buf, &(from.max(to)..from.max(to) + len)), buf.ty().bytes());
        // SAFETY: the later range lies inside, so both do; they are disjoint.
        unsafe {
            std::ptr::copy_nonoverlapping(p.add(from * size), p.add(to * size), len * size);
        }
    }

    fn embed(&self, _: &mut CpuPass, table: &CpuWeight, rows: &Rows, out: Operand<'_>) {
        let run = self.core.enter();
        let d = table.shape()[1];
        let out = run.mat(out, rows.len(), d);
        run.tools.split(rows.len(), rows.len() * d, |_, share| {
            for t in share {
                let token = rows.rows()[t].token as usize;
                // SAFETY: row `t` of `d` elements lies inside; each is one thread's.
                let to = unsafe { std::slice::from_raw_parts_mut(out.row(t), d) };
                table.matrix().encoding.decode_row(table.row(token), to);
            }
        });
    }

    fn rms_norm(
        &self,
        _: &mut CpuPass,
        x: Operand<'_>,
        w: &CpuWeight,
        heads: usize,
        eps: f32,
        n: usize,
        out: Operand<'_>,
    ) {
        let run = self.core.enter();
        let d = w.shape()[1];
        let (x, out) = (run.mat(x, n, heads * d), run.mat(out, n, heads * d));
        let w = Some(w.vector(d));
        norm(&run, n, &Norm { w, d, eps, mean: true, ..Norm::of(x, out, heads) });
    }

    fn l2_norm(
        &self,
        _: &mut CpuPass,
        x: Operand<'_>,
        [heads, d]: [usize; 2],
        eps: f32,
        factor: f32,
        n: usize,
    ) {
        let run = self.core.enter();
        let x = run.mat(x, n, heads * d);
        norm(&run, n, &Norm { d, eps, factor, ..Norm::of(x, x, heads) });
    }

    fn linear(&self, _: &mut CpuPass, x: Operand<'_>, w: &CpuWeight, n: usize, out: Operand<'_>) {
        linear(&mut self.core.enter(), x, w, n, out);
    }

    fn add(&self, _: &mut CpuPass, x: Operand<'_>, y: Operand<'_>, width: usize, n: usize) {
        zip::<Add>(&self.core.enter(), [x, y, x], width, n);
    }

    fn swiglu(
        &self,
        _: &mut CpuPass,
        gate: Operand<'_>,
        up: Operand<'_>,
        width: usize,
        n: usize,
        out: Operand<'_>,
    ) {
        zip::<Swiglu>(&self.core.enter(), [gate, up, out], width, n);
    }

    fn sigmoid_gate(
        &self,
        _: &mut CpuPass,
        x: Operand<'_>,
        z: Operand<'_>,
        width: usize,
        n: usize,
    ) {
        zip::<SigmoidGate>(&self.core.enter(), [x, z, x], width, n);
    }

    fn rotary_table(
        &self,
        _: &mut CpuPass,
        inv_freq: &CpuWeight,
        scale: f32,
        rows: &Rows,
        out: Operand<'_>,
    ) {
        let run = self.core.enter();
        let half = inv_freq.shape()[1];
        let inv_freq = inv_freq.vector(half);
        let out = run.mat(out, rows.len(), 2 * half);
        // A sine takes as long as some tens of additions.
        run.tools.split(rows.len(), 64 * rows.len() * half, |_, share| {
            for t in share {
                let position = rows.rows()[t].position as f32;
                for (i, f) in inv_freq.iter().enumerate() {
                    let angle = position * f;
                    // SAFETY: row `t` has `2 * half` elements; each row is one thread's.
                    unsafe {
                        out.at(t, i).write(scale * libm::cosf(angle));
                        out.at(t, half + i).write(scale * libm::sinf(angle));
                    }
                }
            }
        });
    }

    fn rope(
        &self,
        _: &mut CpuPass,
        x: Operand<'_>,
        [heads, d_head, d]: [usize; 3],
        table: Operand<'_>,
        pairing: Pairing,
        n: usize,
    ) {
        let run = self.core.enter();
        assert!(d <= d_head && d.is_multiple_of(2), "rotation of {d} in heads of {d_head}");
        let (x, table) = (run.mat(x, n, heads * d_head), run.mat(table, n, d));
        let half = d / 2;
        run.tools.kernels(n, n * heads * d, |_, rows| Rope {
            x,
            table,
            heads,
            d_head,
            half,
            pairing,
            rows,
        });
    }

    fn attention(
        &self,
        _: &mut CpuPass,
        args: &Attention<'_, CpuBuf>,
        rows: &Rows,
        out: Operand<'_>,
    ) {
        attention(&mut self.core.enter(), args, rows, out);
    }

    fn causal_conv(
        &self,
        _: &mut CpuPass,
        x: Operand<'_>,
        w: &CpuWeight,
        state: &CpuBuf,
        rows: &Rows,
        out: Operand<'_>,
    ) {
        let run = self.core.enter();
        let [channels, taps] = w.shape();
        let n = rows.len();
        let (x, out) = (run.mat(x, n, channels), run.mat(out, n, channels));
        let state = run.dense(state, fixed_rows(rows) * (taps - 1), channels);
        let w = w.transposed();
        // The nonlinearity takes as long as some additions.
        run.tools.kernels(channels.div_ceil(LANES), n * channels * (taps + 8), |_, chunks| Conv {
            x,
            out,
            w,
            state,
            channels,
            taps,
            rows,
            chunks,
        });
    }

    fn delta_gate(
        &self,
        _: &mut CpuPass,
        a: Operand<'_>,
        b: Operand<'_>,
        [a_log, dt_bias]: [&CpuWeight; 2],
        n: usize,
    ) {
        let run = self.core.enter();
        let heads = a_log.shape()[1];
        let (a_log, dt_bias) = (a_log.vector(heads), dt_bias.vector(heads));
        let (a, b) = (run.mat(a, n, heads), run.mat(b, n, heads));
        run.tools.split(n, 64 * n * heads, |_, share| {
            for t in share {
                for h in 0..heads {
                    // SAFETY: row `t` has `heads` elements in both; each row is one thread's.
                    let (a, b) = unsafe { (&mut *a.at(t, h), &mut *b.at(t, h)) };
                    *a = exp_one(-exp_one(a_log[h]) * softplus(*a + dt_bias[h]));
                    *b = sigmoid_one(*b);
                }
            }
        });
    }

    fn delta_step(
        &self,
        _: &mut CpuPass,
        args: &DeltaStep<'_, CpuBuf>,
        rows: &Rows,
        out: Operand<'_>,
    ) {
        delta_step(&self.core.enter(), args, rows, out);
    }

    fn gated_norm(
        &self,
        _: &mut CpuPass,
        x: Operand<'_>,
        z: Operand<'_>,
        w: &CpuWeight,
        heads: usize,
        eps: f32,
        gate: Gate,
        n: usize,
    ) {
        let run = self.core.enter();
        let d = w.shape()[1];
        let (x, z) = (run.mat(x, n, heads * d), run.mat(z, n, heads * d));
        let (w, z) = (Some(w.vector(d)), Some((z, gate)));
        norm(&run, n, &Norm { w, z, d, eps, mean: true, ..Norm::of(x, x, heads) });
    }

    fn route(
        &self,
        _: &mut CpuPass,
        logits: Operand<'_>,
        shape: [usize; 2],
        router: Router,
        n: usize,
        scratch: [&CpuBuf; 2],
    ) -> Routed<CpuBuf> {
        route(&mut self.core.enter(), logits, shape, router, n, scratch)
    }

    fn moe_ffn(
        &self,
        p: &mut CpuPass,
        args: &MoeFfn<'_, Self>,
        mut experts: Experts<'_>,
        out: &CpuBuf,
    ) {
        let MoeFfn { x, routed, layout, slab } = *args;
        let ffn = Ffn { x, routed, layout, slab, out };
        moe_ffn(&mut self.core.enter(), &ffn, &experts);
        if let Experts::Ready(ready) = &mut experts {
            p.keep(ready);
        }
    }

    fn moe_join(
        &self,
        _: &mut CpuPass,
        routed: &Routed<CpuBuf>,
        parts: &CpuBuf,
        shared: Option<Shared<'_, CpuBuf>>,
        d: usize,
        x: Operand<'_>,
    ) {
        let mut run = self.core.enter();
        let Routed { n, top_k, .. } = *routed;
        let (ids, weights) =
            (run.dense(&routed.ids, n, top_k), run.dense(&routed.weights, n, top_k));
        let (parts, x) = (run.dense(parts, n * top_k, d), run.mat(x, n, d));
        let shared = shared
            .map(|shared| (run.mat(shared.x, n, d), shared.gate.map(|gate| run.mat(gate, n, 1))));
        run.reserve(Sizes { thread: thread_floats(0, 0, 0, top_k), ..Sizes::default() });
        let areas = run.scratch.thread_areas();
        run.tools.kernels(n, n * top_k * d, |thread, rows| Join {
            ids,
            weights,
            parts,
            shared,
            x,
            top_k,
            d,
            rows,
            scratch: areas.of(thread),
        });
    }

    fn select_outputs(
        &self,
        _: &mut CpuPass,
        x: Operand<'_>,
        width: usize,
        rows: &Rows,
        first: usize,
        n: usize,
        out: Operand<'_>,
    ) {
        let run = self.core.enter();
        let outputs = &rows.outputs()[first..first + n];
        let (x, out) = (run.mat(x, rows.len(), width), run.mat(out, n, width));
        for (i, row) in outputs.iter().enumerate() {
            // SAFETY: both rows lie inside; the views may share a buffer, rows may not overlap.
            unsafe { std::ptr::copy(x.row(*row as usize), out.row(i), width) };
        }
    }
}

/// Stores 16-bit elements from `offset` on.
unsafe fn narrow(p: *mut u8, offset: usize, data: &[f32], convert: impl Fn(f32) -> u16) {
    for (i, x) in data.iter().enumerate() {
        // SAFETY: as the caller promises.
        unsafe { p.add(2 * (offset + i)).cast::<[u8; 2]>().write(convert(*x).to_le_bytes()) };
    }
}

/// Rows that per-sequence buffers must have for these rows.
fn fixed_rows(rows: &Rows) -> usize {
    rows.sequences().iter().map(|sequence| sequence.fixed as usize + 1).max().unwrap_or(0)
}

fn zip<O: Op>(run: &Run<'_>, operands: [Operand<'_>; 3], width: usize, n: usize) {
    let [a, b, out] = operands.map(|view| run.mat(view, n, width));
    if n == 1 {
        // One row is divided by columns.
        return run.tools.kernels(width.div_ceil(LANES), 2 * width, |_, share| {
            let columns = share.start * LANES..(share.end * LANES).min(width);
            Zip::<O> { a, b, out, rows: 0..1, columns, op: PhantomData }
        });
    }
    run.tools.kernels(n, 2 * n * width, |_, rows| Zip::<O> {
        a,
        b,
        out,
        rows,
        columns: 0..width,
        op: PhantomData,
    });
}

fn norm(run: &Run<'_>, n: usize, norm: &Norm<'_>) {
    let items = n * norm.heads;
    let work = 4 * items * norm.d;
    run.tools.kernels(items, work, |_, items| Norm { items, ..norm.clone() });
}

fn attention(run: &mut Run<'_>, args: &Attention<'_, CpuBuf>, rows: &Rows, out: Operand<'_>) {
    let Attention { n_heads, n_kv_heads, d_head, scale, .. } = *args;
    assert!(n_heads.is_multiple_of(n_kv_heads), "{n_heads} heads over {n_kv_heads}");
    let n = rows.len();
    let width = n_kv_heads * d_head;
    let (q, out) = (run.mat(args.q, n, n_heads * d_head), run.mat(out, n, n_heads * d_head));
    let sequences = rows.sequences().iter();
    let pages = sequences.flat_map(|sequence| rows.pages(sequence)).max().map_or(0, |p| p + 1);
    let elements = pages as usize * PAGE_TOKENS * width;
    let caches = [(args.k, args.k_cache), (args.v, args.v_cache)].map(|(x, cache)| {
        let ptr = run.bytes(cache, &(0..elements));
        (run.mat(x, n, width), Cache { ptr, ty: cache.ty() })
    });
    for (x, cache) in caches {
        run.tools.kernels(n, n * width, |_, range| Store { x, cache, width, rows, range });
    }
    let [k, v] = caches.map(|(_, cache)| cache);
    run.reserve(Sizes { thread: thread_floats(0, d_head, 0, 0), ..Sizes::default() });
    let areas = run.scratch.thread_areas();
    let keys: usize = rows.rows().iter().map(|row| row.position as usize + 1).sum();
    let make = |thread, items| Attend {
        isa: run.tools.isa,
        q,
        out,
        k,
        v,
        n_heads,
        n_kv_heads,
        d_head,
        scale,
        rows,
        items,
        scratch: areas.of(thread),
    };
    // Small groups of (row, head) that share keys go round the threads, so that early and late
    // positions are spread evenly.
    let group = (n_heads / n_kv_heads).min(HEADS);
    let groups = (n * n_heads).div_ceil(group);
    let tools = run.tools;
    let threads = tools.threads();
    if threads == 1 || keys * n_heads * d_head * 2 < crate::backend::FORK {
        return crate::simd::dispatch(tools.isa, make(0, 0..n * n_heads));
    }
    tools.all(|thread| {
        for g in (thread..groups).step_by(threads) {
            let items = g * group..((g + 1) * group).min(n * n_heads);
            crate::simd::dispatch(tools.isa, make(thread, items));
        }
    });
}

fn delta_step(run: &Run<'_>, args: &DeltaStep<'_, CpuBuf>, rows: &Rows, out: Operand<'_>) {
    let DeltaStep { n_key_heads, n_value_heads, d_key, d_value, .. } = *args;
    assert!(n_value_heads.is_multiple_of(n_key_heads), "{n_value_heads} heads over {n_key_heads}");
    let n = rows.len();
    let [q, k] = [args.q, args.k].map(|view| run.mat(view, n, n_key_heads * d_key));
    let [v, out] = [args.v, out].map(|view| run.mat(view, n, n_value_heads * d_value));
    let [decay, beta] = [args.decay, args.beta].map(|view| run.mat(view, n, n_value_heads));
    let state = run.dense(args.state, fixed_rows(rows) * n_value_heads * d_key, d_value);
    let items = n_value_heads * column_pieces(d_value) * rows.sequences().len();
    run.tools.kernels(items, 4 * n * n_value_heads * d_key * d_value, |_, items| Delta {
        q,
        k,
        v,
        decay,
        beta,
        out,
        state,
        n_key_heads,
        n_value_heads,
        d_key,
        d_value,
        rows,
        items,
    });
}

fn route(
    run: &mut Run<'_>,
    logits: Operand<'_>,
    [n_experts, top_k]: [usize; 2],
    router: Router,
    n: usize,
    [ids, weights]: [&CpuBuf; 2],
) -> Routed<CpuBuf> {
    assert!(top_k <= n_experts, "{top_k} of {n_experts} experts");
    let Router::Softmax { renormalise } = router else { panic!("no router {router:?} here") };
    let logits = run.mat(logits, n, n_experts);
    let routed = Routed { ids: ids.clone(), weights: weights.clone(), n, top_k };
    let [ids, weights] = [ids, weights].map(|buf| run.dense(buf, n, top_k));
    run.reserve(Sizes { thread: thread_floats(0, 0, n_experts, 0), ..Sizes::default() });
    let areas = run.scratch.thread_areas();
    run.tools.kernels(n, 16 * n * n_experts, |thread, rows| Route {
        logits,
        ids,
        weights,
        n_experts,
        top_k,
        renormalise,
        rows,
        scratch: areas.of(thread),
    });
    routed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::CpuOptions;

    #[test]
    fn prepare_takes_what_it_says() {
        let options = CpuOptions { threads: 3, ..CpuOptions::default() };
        let b = CpuBackend::new(options).expect("the best there is");
        let limits = Limits {
            rows: 70,
            d_in: 1000,
            top_k: 4,
            d_expert: 96,
            d_model: 512,
            n_experts: 60,
            context_tokens: 4096,
            n_heads: 8,
            d_head: 64,
        };
        b.prepare(&limits);
        assert_eq!(b.scratch_taken(), b.scratch_bytes(&limits));
        b.prepare(&Limits { rows: 1, ..limits });
        assert_eq!(b.scratch_taken(), b.scratch_bytes(&limits));
    }

    #[test]
    #[should_panic(expected = "another backend")]
    fn buffers_of_another_backend_are_refused() {
        let open = || CpuBackend::new(CpuOptions::default()).expect("the best there is");
        let (a, b) = (open(), open());
        let buf = a.alloc(3, BufType::F32);
        b.clear(&mut b.begin(), &buf, 0..3);
    }
}
