//! The verbs: each checks its operands and splits its work over threads.
#![allow(unsafe_code)]

use crate::attention::{Attend, Cache, HEADS, Sight, Store};
use crate::backend::{CpuBackend, CpuPass, Run};
use crate::buf::{CpuBuf, CpuWeight};
use crate::elementwise::{Add, Map, Op, Zip};
use crate::heads::linear_heads;
use crate::index::index_select;
use crate::math::{exp_one, sigmoid_one, softplus};
use crate::matmul::linear;
use crate::memory::Memory;
use crate::moe::{Ffn, moe_ffn};
use crate::norm::{self, Rope};
use crate::recurrent::{Conv, Delta, column_pieces};
use crate::route::{Join, Route};
use crate::scratch::{Scratch, Sizes, thread_floats};
use crate::simd::LANES;
use crate::slab::CpuSlab;
use crate::streams::{AddStreams, Mix, RowGate};
use half::{bf16, f16};
use snowmelt_backend::{
    Attention, Backend, BufType, DeltaStep, Experts, Glu, Groups, HeadRows, HostRecords,
    IndexSelect, Limits, MoeFfn, Norm, PAGE_TOKENS, Pairing, Routed, Router, Rows, Selection,
    Shared, Unary, View,
};
use snowmelt_weights::Encoding;
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

    fn norm(
        &self,
        _: &mut CpuPass,
        x: Operand<'_>,
        args: &Norm<'_, CpuWeight, CpuBuf>,
        n: usize,
        out: Operand<'_>,
    ) {
        norm(&self.core.enter(), x, args, n, out);
    }

    fn linear(&self, _: &mut CpuPass, x: Operand<'_>, w: &CpuWeight, n: usize, out: Operand<'_>) {
        linear(&mut self.core.enter(), x, w, n, out);
    }

    fn add(&self, _: &mut CpuPass, x: Operand<'_>, y: Operand<'_>, width: usize, n: usize) {
        zip(&self.core.enter(), Add, [x, y, x], width, n);
    }

    fn linear_heads(
        &self,
        _: &mut CpuPass,
        x: Operand<'_>,
        w: &CpuWeight,
        heads: &HeadRows,
        n: usize,
        out: Operand<'_>,
    ) {
        linear_heads(&mut self.core.enter(), x, w, heads, n, out);
    }

    fn copy_heads(
        &self,
        _: &mut CpuPass,
        x: Operand<'_>,
        [heads, x_head, out_head, width]: [usize; 4],
        n: usize,
        out: Operand<'_>,
    ) {
        let run = self.core.enter();
        let Some(last) = heads.checked_sub(1) else { return };
        let (x, out) =
            (run.mat(x, n, last * x_head + width), run.mat(out, n, last * out_head + width));
        run.tools.split(n, n * heads * width, |_, share| {
            for t in share {
                for h in 0..heads {
                    // SAFETY: both lie inside; the views may share a buffer.
                    unsafe { std::ptr::copy(x.at(t, h * x_head), out.at(t, h * out_head), width) };
                }
            }
        });
    }

    fn glu(
        &self,
        _: &mut CpuPass,
        f: Glu,
        gate: Operand<'_>,
        up: Operand<'_>,
        width: usize,
        n: usize,
        out: Operand<'_>,
    ) {
        zip(&self.core.enter(), f, [gate, up, out], width, n);
    }

    fn activate(&self, _: &mut CpuPass, f: Unary, x: Operand<'_>, width: usize, n: usize) {
        let run = self.core.enter();
        let x = run.mat(x, n, width);
        // The functions take as long as some additions.
        blocks(&run, n, width, 8, |rows, columns| Map { f, x, rows, columns });
    }

    fn stream_mix(
        &self,
        _: &mut CpuPass,
        x: Operand<'_>,
        gate: Operand<'_>,
        [streams, d]: [usize; 2],
        n: usize,
        out: Operand<'_>,
    ) {
        let run = self.core.enter();
        let [x, gate] = [x, gate].map(|view| run.mat(view, n, streams * d));
        let out = run.mat(out, n, d);
        blocks(&run, n, d, 8 * streams, |rows, columns| Mix {
            x,
            gate,
            out,
            streams,
            d,
            rows,
            columns,
        });
    }

    fn stream_join(
        &self,
        _: &mut CpuPass,
        x: Operand<'_>,
        y: Operand<'_>,
        inject: Option<Operand<'_>>,
        [streams, d]: [usize; 2],
        n: usize,
    ) {
        let run = self.core.enter();
        let (x, y) = (run.mat(x, n, streams * d), run.mat(y, n, d));
        let inject = inject.map(|inject| run.mat(inject, n, streams));
        let items = n * streams;
        run.tools.kernels(items, 2 * items * d, |_, items| AddStreams {
            x,
            y,
            inject,
            streams,
            d,
            items,
        });
    }

    fn row_gate(
        &self,
        _: &mut CpuPass,
        key: Operand<'_>,
        query: Operand<'_>,
        value: Operand<'_>,
        [streams, d]: [usize; 2],
        n: usize,
        out: Operand<'_>,
    ) {
        let run = self.core.enter();
        let [key, query, out] = [key, query, out].map(|view| run.mat(view, n, streams * d));
        let value = run.mat(value, n, d);
        let items = n * streams;
        run.tools.kernels(items, 4 * items * d, |_, items| RowGate {
            key,
            query,
            value,
            out,
            streams,
            d,
            items,
        });
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
        // The rest of the last head need not be there: the rotated part may be the tail of a row.
        let width = heads.saturating_sub(1) * d_head + d;
        let (x, table) = (run.mat(x, n, width), run.mat(table, n, d));
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
        args: &Attention<'_, CpuWeight, CpuBuf>,
        rows: &Rows,
        out: Operand<'_>,
    ) {
        attention(&mut self.core.enter(), args, rows, out);
    }

    fn index_select(
        &self,
        _: &mut CpuPass,
        args: &IndexSelect<'_, CpuWeight, CpuBuf>,
        rows: &Rows,
    ) -> Selection<CpuBuf> {
        index_select(&mut self.core.enter(), args, rows)
    }

    fn causal_conv(
        &self,
        _: &mut CpuPass,
        x: Operand<'_>,
        w: &CpuWeight,
        dilation: usize,
        state: &CpuBuf,
        rows: &Rows,
        out: Operand<'_>,
    ) {
        let run = self.core.enter();
        let [channels, taps] = w.shape();
        let n = rows.len();
        let (x, out) = (run.mat(x, n, channels), run.mat(out, n, channels));
        let state = run.dense(state, fixed_rows(rows) * dilation * (taps - 1), channels);
        let w = w.transposed();
        // The nonlinearity takes as long as some additions.
        run.tools.kernels(channels.div_ceil(LANES), n * channels * (taps + 8), |_, chunks| Conv {
            x,
            out,
            w,
            state,
            channels,
            taps,
            dilation,
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

    fn route(
        &self,
        _: &mut CpuPass,
        logits: Operand<'_>,
        router: &Router<'_, CpuWeight>,
        n: usize,
        scratch: [&CpuBuf; 2],
    ) -> Routed<CpuBuf> {
        route(&mut self.core.enter(), logits, router, n, scratch)
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

/// One more than the greatest page of a step.
pub(crate) fn page_end(rows: &Rows) -> usize {
    let sequences = rows.sequences().iter();
    sequences.flat_map(|sequence| rows.pages(sequence)).max().map_or(0, |page| *page as usize + 1)
}

/// Splits `[n, width]` over threads: by rows, or by columns where there is one row.
fn blocks<K: crate::simd::Kernel>(
    run: &Run<'_>,
    n: usize,
    width: usize,
    work: usize,
    kernel: impl Fn(Range<usize>, Range<usize>) -> K + Sync,
) {
    if n == 1 {
        return run.tools.kernels(width.div_ceil(LANES), work * width, |_, share| {
            kernel(0..1, share.start * LANES..(share.end * LANES).min(width))
        });
    }
    run.tools.kernels(n, work * n * width, |_, rows| kernel(rows, 0..width));
}

fn zip<O: Op>(run: &Run<'_>, op: O, operands: [Operand<'_>; 3], width: usize, n: usize) {
    let [a, b, out] = operands.map(|view| run.mat(view, n, width));
    blocks(run, n, width, 2, |rows, columns| Zip { a, b, out, rows, columns, op });
}

fn norm(
    run: &Run<'_>,
    x: Operand<'_>,
    args: &Norm<'_, CpuWeight, CpuBuf>,
    n: usize,
    out: Operand<'_>,
) {
    let &Norm { spread, heads, d, eps, factor, .. } = args;
    let width = heads * d;
    let (x, out) = (run.mat(x, n, width), run.mat(out, n, width));
    let gate = args.gate.map(|(z, f)| (run.mat(z, n, width), f));
    // A vector for all heads, or one for each.
    let vector = |w: &'_ CpuWeight| if w.shape()[1] == d { d } else { width };
    let [w, bias] = [args.w, args.bias].map(|w| w.map(|w| w.vector(vector(w))));
    let items = n * heads;
    run.tools.kernels(items, 4 * items * d, |_, items| norm::Norm {
        x,
        out,
        spread,
        w,
        bias,
        gate,
        heads,
        d,
        eps,
        factor,
        items,
    });
}

/// Writes keys and values; `[keys, values]`.
fn store(run: &Run<'_>, args: &Attention<'_, CpuWeight, CpuBuf>, rows: &Rows) -> [Cache; 2] {
    let &Attention { n_kv_heads, d_key, d_value, .. } = args;
    let (n, tokens) = (rows.len(), page_end(rows) * PAGE_TOKENS);
    let one = |x: Option<Operand<'_>>, cache: &CpuBuf, width: usize| {
        let ptr = run.bytes(cache, &(0..tokens * width));
        let cache = Cache { ptr, ty: cache.ty() };
        if let Some(x) = x {
            let x = run.mat(x, n, width);
            run.tools.kernels(n, n * width, |_, range| Store { x, cache, width, rows, range });
        }
        cache
    };
    let k = one(args.k, args.k_cache, n_kv_heads * d_key);
    assert!(args.v_cache.is_some() || d_value <= d_key, "values of {d_value} in keys of {d_key}");
    assert!(args.v_cache.is_some() || args.v.is_none(), "values without a cache");
    [k, args.v_cache.map_or(k, |cache| one(args.v, cache, n_kv_heads * d_value))]
}

fn attention(
    run: &mut Run<'_>,
    args: &Attention<'_, CpuWeight, CpuBuf>,
    rows: &Rows,
    out: Operand<'_>,
) {
    let &Attention { n_heads, n_kv_heads, d_key, d_value, scale, window, .. } = args;
    assert!(n_heads.is_multiple_of(n_kv_heads), "{n_heads} heads over {n_kv_heads}");
    let n = rows.len();
    let (q, out) = (run.mat(args.q, n, n_heads * d_key), run.mat(out, n, n_heads * d_value));
    let [k, v] = store(run, args, rows);
    let v_head = if args.v_cache.is_some() { d_value } else { d_key };
    let sinks = args.sinks.map(|sinks| sinks.vector(n_heads));
    let selection = args.selection.map(|Selection { ids, top, ratio }| {
        assert!(*ratio > 0, "blocks of no tokens");
        (run.dense(ids, n, 1 + top), *ratio)
    });
    let sight = Sight { window, selection };
    run.reserve(Sizes { thread: thread_floats(0, d_key.max(d_value), 0, 0), ..Sizes::default() });
    let areas = run.scratch.thread_areas();
    let most = window.unwrap_or(usize::MAX).min(match args.selection {
        Some(Selection { top, ratio, .. }) => (top + 1) * ratio,
        None => usize::MAX,
    });
    let keys: usize = rows.rows().iter().map(|row| most.min(row.position as usize + 1)).sum();
    let make = |thread, items| Attend {
        isa: run.tools.isa,
        q,
        out,
        k,
        v,
        n_heads,
        n_kv_heads,
        d_key,
        d_value,
        v_head,
        scale,
        sinks,
        sight,
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
    if threads == 1 || keys * n_heads * (d_key + d_value) < crate::backend::FORK {
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
    router: &Router<'_, CpuWeight>,
    n: usize,
    [ids, weights]: [&CpuBuf; 2],
) -> Routed<CpuBuf> {
    let &Router { n_experts, top_k, scores, groups, renormalise, factor, .. } = router;
    assert!(top_k <= n_experts, "{top_k} of {n_experts} experts");
    if let Some(Groups { count, kept }) = groups {
        let fits = count > 0 && n_experts.is_multiple_of(count) && kept <= count;
        assert!(fits, "{kept} of {count} groups of {n_experts} experts");
    }
    let [bias, expert_factor] =
        [router.choice_bias, router.expert_factor].map(|w| w.map(|w| w.vector(n_experts)));
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
        scores,
        bias,
        groups,
        renormalise,
        factor,
        expert_factor,
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
            d_index: 48,
            index_ratio: 3,
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
