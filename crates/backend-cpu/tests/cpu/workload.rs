//! Every verb once, on odd shapes and seeded numbers, large enough to be split over threads.

use snowmelt_backend::{
    Attention, Backend, BufType, DeltaStep, ExpertLayout, Experts, Glu, Groups, HeadRows,
    IndexSelect, MatrixLayout, MoeFfn, Norm, PAGE_TOKENS, Pairing, Pass, Pool, Ready, Routed,
    Router, Rows, Scores, Shared, Slab, Unary, View,
};
use snowmelt_backend_cpu::{CpuBackend, CpuBuf, CpuPass, CpuWeight};
use snowmelt_weights::Encoding;
use std::sync::Arc;

/// Results by name.
pub(crate) type Results = Vec<(String, Vec<f32>)>;

/// Rows of a step.
const N: usize = 41;

pub(crate) struct Workload<'a> {
    b: &'a CpuBackend,
    p: CpuPass,
    seed: u64,
    results: Results,
}

impl<'a> Workload<'a> {
    pub(crate) fn run(b: &'a CpuBackend) -> Results {
        let mut all = Self { b, p: b.begin(), seed: 1, results: Vec::new() };
        all.elementwise();
        all.norms();
        all.products();
        all.attention(BufType::F32);
        all.attention(BufType::F16);
        all.attention(BufType::Bf16);
        all.recurrent();
        for [gate, up, down] in [
            [Encoding::Q4G64, Encoding::Q4G64, Encoding::Q4G32],
            [Encoding::Q8, Encoding::Q4G32, Encoding::Q8],
            [Encoding::Bf16, Encoding::Q8, Encoding::F16],
        ] {
            all.experts(gate, up, down);
        }
        all.functions();
        all.streams();
        all.heads();
        all.selections();
        all.routers();
        all.results
    }

    fn random(&mut self, len: usize) -> Vec<f32> {
        let mut next = || {
            self.seed =
                self.seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.seed >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..len).map(|_| next() + next() * next()).collect()
    }

    fn buf(&mut self, len: usize) -> CpuBuf {
        let buf = self.b.alloc(len, BufType::F32);
        let values = self.random(len);
        self.b.write(&mut self.p, &buf, 0, &values);
        buf
    }

    fn empty(&mut self, len: usize, ty: BufType) -> CpuBuf {
        let buf = self.b.alloc(len, ty);
        self.b.clear(&mut self.p, &buf, 0..len);
        buf
    }

    fn encoded(&mut self, encoding: Encoding, d_out: usize, d_in: usize) -> Vec<u8> {
        let mut rows = vec![0; d_out * encoding.row_bytes(d_in)];
        for row in rows.chunks_mut(encoding.row_bytes(d_in)) {
            let values: Vec<f32> = self.random(d_in).iter().map(|x| x * 0.1).collect();
            encoding.encode_row(&values, row);
        }
        rows
    }

    fn weight(&mut self, encoding: Encoding, d_out: usize, d_in: usize) -> CpuWeight {
        let mut weight = self.b.alloc_weight(encoding, d_out, d_in);
        let rows = self.encoded(encoding, d_out, d_in);
        self.b.fill_weight(&mut weight, 0, &rows);
        weight
    }

    fn keep(&mut self, name: impl Into<String>, buf: &CpuBuf) {
        let mut values = vec![0.0; buf.len()];
        self.p.read(buf, 0..buf.len(), &mut values).expect("the processor is not lost");
        self.results.push((name.into(), values));
    }

    fn elementwise(&mut self) {
        for (width, n) in [(70, N), (20_011, 1)] {
            let (x, y) = (self.buf(n * width), self.buf(n * width));
            let out = self.empty(n * width, BufType::F32);
            let (vx, vy) = (View::of(&x, width), View::of(&y, width));
            self.b.add(&mut self.p, vx, vy, width, n);
            self.b.glu(&mut self.p, Glu::Sigmoid, vy, vx, width, n, vx);
            self.b.glu(&mut self.p, Glu::Silu, vx, vy, width, n, View::of(&out, width));
            self.keep("add, sigmoid_gate", &x);
            self.keep("swiglu", &out);
        }
    }

    fn norms(&mut self) {
        let (heads, d) = (5, 52);
        let width = heads * d;
        let (x, z) = (self.buf(N * width), self.buf(N * width));
        let w = self.weight(Encoding::Bf16, 1, d);
        let (vx, vz) = (View::of(&x, width), View::of(&z, width));
        let rms = |eps| Norm::rms(Some(&w), [heads, d], eps);
        self.b.norm(&mut self.p, vx, &rms(1e-6), N, vx);
        self.b.norm(&mut self.p, vz, &Norm::l2([heads, d], 1e-6, 0.3), N, vz);
        self.keep("rms_norm", &x);
        self.keep("l2_norm", &z);
        self.b.norm(&mut self.p, vx, &rms(1e-5).gated(vz, Glu::Silu), N, vx);
        self.b.norm(&mut self.p, vx, &rms(1e-5).gated(vz, Glu::Sigmoid), N, vx);
        self.keep("gated_norm", &x);
    }

    fn products(&mut self) {
        let rows = rows();
        for encoding in Encoding::ALL {
            for groups in [1, 2, 5, 17] {
                let d_in = groups * encoding.group().max(19);
                for (d_out, n) in [(131, N), (301, 1), (7, 3), (64, 2)] {
                    let w = self.weight(encoding, d_out, d_in);
                    let (x, out) = (self.buf(n * d_in), self.empty(n * d_out, BufType::F32));
                    let (vx, vout) = (View::of(&x, d_in), View::of(&out, d_out));
                    self.b.linear(&mut self.p, vx, &w, n, vout);
                    self.keep(format!("linear {encoding} [{n}, {d_in}] -> {d_out}"), &out);
                }
            }
            let d = 128;
            let table = self.weight(encoding, 100, d);
            let out = self.empty(N * d, BufType::F32);
            self.b.embed(&mut self.p, &table, &rows, View::of(&out, d));
            self.keep(format!("embed {encoding}"), &out);
            let chosen = self.empty(2 * d, BufType::F32);
            let (x, out) = (View::of(&out, d), View::of(&chosen, d));
            self.b.select_outputs(&mut self.p, x, d, &rows, 0, 2, out);
            self.keep("select_outputs", &chosen);
        }
    }

    fn attention(&mut self, ty: BufType) {
        let rows = rows();
        for (n_heads, n_kv_heads, d_head) in [(6, 2, 40), (20, 2, 16), (3, 3, 132)] {
            let [wide, width] = [n_heads * d_head, n_kv_heads * d_head];
            let q = self.buf(N * wide);
            let (k, v) = (self.buf(N * width), self.buf(N * width));
            let half = 8;
            let frequencies = self.weight(Encoding::F32, 1, half);
            let table = self.empty(N * 2 * half, BufType::F32);
            let table_view = View::of(&table, 2 * half);
            self.b.rotary_table(&mut self.p, &frequencies, 1.1, &rows, table_view);
            for pairing in [Pairing::Half, Pairing::Adjacent] {
                let shape = [n_heads, d_head, 2 * half];
                self.b.rope(&mut self.p, View::of(&q, wide), shape, table_view, pairing, N);
            }
            self.keep("rope", &q);
            let elements = 6 * PAGE_TOKENS * width;
            let (k_cache, v_cache) = (self.empty(elements, ty), self.empty(elements, ty));
            for (cache, buf) in [(&k_cache, elements), (&v_cache, elements)] {
                let values = self.random(buf);
                self.b.write(&mut self.p, cache, 0, &values);
            }
            let args = Attention {
                q: View::of(&q, wide),
                k: Some(View::of(&k, width)),
                v: Some(View::of(&v, width)),
                k_cache: &k_cache,
                v_cache: Some(&v_cache),
                n_heads,
                n_kv_heads,
                d_key: d_head,
                d_value: d_head,
                scale: 0.3,
                window: None,
                sinks: None,
                selection: None,
            };
            let out = self.empty(N * wide, BufType::F32);
            self.b.attention(&mut self.p, &args, &rows, View::of(&out, wide));
            self.keep(format!("attention {ty:?} {n_heads} {n_kv_heads} {d_head}"), &out);
        }
    }

    fn recurrent(&mut self) {
        let rows = rows();
        let (channels, taps) = (1003, 4);
        let (x, out) = (self.buf(N * channels), self.empty(N * channels, BufType::F32));
        let w = self.weight(Encoding::F32, channels, taps);
        let state = self.buf(3 * (taps - 1) * channels);
        let (vx, vout) = (View::of(&x, channels), View::of(&out, channels));
        self.b.causal_conv(&mut self.p, vx, &w, 1, &state, &rows, vout);
        self.keep("causal_conv", &out);
        self.keep("causal_conv state", &state);

        for (n_key_heads, n_value_heads, d_key, d_value) in [(2, 6, 24, 84), (1, 2, 32, 128)] {
            let (q, k) = (self.buf(N * n_key_heads * d_key), self.buf(N * n_key_heads * d_key));
            let v = self.buf(N * n_value_heads * d_value);
            let (a, b) = (self.buf(N * n_value_heads), self.buf(N * n_value_heads));
            let w = [0, 1].map(|_| self.weight(Encoding::F32, 1, n_value_heads));
            let views = [&a, &b].map(|buf| View::of(buf, n_value_heads));
            for view in [&q, &k].map(|buf| View::of(buf, n_key_heads * d_key)) {
                let l2 = Norm::l2([n_key_heads, d_key], 1e-6, 1.0);
                self.b.norm(&mut self.p, view, &l2, N, view);
            }
            self.b.delta_gate(&mut self.p, views[0], views[1], [&w[0], &w[1]], N);
            self.keep("delta_gate decay", &a);
            self.keep("delta_gate beta", &b);
            let state = self.buf(3 * n_value_heads * d_key * d_value);
            let args = DeltaStep {
                q: View::of(&q, n_key_heads * d_key),
                k: View::of(&k, n_key_heads * d_key),
                v: View::of(&v, n_value_heads * d_value),
                decay: views[0],
                beta: views[1],
                state: &state,
                n_key_heads,
                n_value_heads,
                d_key,
                d_value,
            };
            let out = self.empty(N * n_value_heads * d_value, BufType::F32);
            let view = View::of(&out, n_value_heads * d_value);
            self.b.delta_step(&mut self.p, &args, &rows, view);
            self.keep("delta_step", &out);
            self.keep("delta_step state", &state);
        }
    }

    fn experts(&mut self, gate: Encoding, up: Encoding, down: Encoding) {
        let (d, d_expert, experts, top_k) = (192, 128, 11, 3);
        let logits = self.buf(N * experts);
        let scratch = [0, 1].map(|_| self.empty(N * top_k, BufType::F32));
        let router = Router::softmax([experts, top_k], true);
        let view = View::of(&logits, experts);
        let routed = self.b.route(&mut self.p, view, &router, N, [&scratch[0], &scratch[1]]);
        self.keep("route ids", &scratch[0]);
        self.keep("route weights", &scratch[1]);

        let mut offset = 3;
        let mut piece = |encoding: Encoding, d_out, d_in| {
            let layout = MatrixLayout { encoding, d_out, d_in, offset };
            offset += layout.bytes() + 5;
            layout
        };
        let gate = piece(gate, d_expert, d);
        let layout = ExpertLayout {
            glu: Glu::Silu,
            gate,
            up: piece(up, d_expert, d),
            down: piece(down, d, d_expert),
        };
        let slot_bytes = layout.record_bytes().next_multiple_of(4096);
        let slab = self.b.alloc_slab(slot_bytes, experts as u32);
        for slot in 0..experts as u32 {
            for piece in layout.pieces() {
                let bytes = self.encoded(piece.encoding, piece.d_out, piece.d_in);
                slab.upload(slot, piece.offset, &bytes);
            }
        }
        let x = self.buf(N * d);
        let parts = self.empty(N * top_k * d, BufType::F32);
        let args = MoeFfn { x: View::of(&x, d), routed: &routed, layout: &layout, slab: &slab };
        let pin: Arc<()> = Arc::new(());
        // Two goes, in no order.
        for which in [&[7u32, 0, 3, 9][..], &[10, 1, 2, 4, 5, 6, 8]] {
            let mut ready =
                which.iter().map(|e| Ready::new(*e, *e, pin.clone())).collect::<Vec<_>>();
            self.b.moe_ffn(&mut self.p, &args, Experts::Ready(&mut ready), &parts);
        }
        self.keep(format!("moe_ffn {gate:?}"), &parts);
        let resident = self.empty(N * top_k * d, BufType::F32);
        let all = Experts::Resident { first_slot: 0 };
        self.b.moe_ffn(&mut self.p, &args, all, &resident);
        self.keep("moe_ffn resident", &resident);
        self.join(&routed, &parts, &x, d);
    }

    fn join(&mut self, routed: &Routed<CpuBuf>, parts: &CpuBuf, x: &CpuBuf, d: usize) {
        let (shared, gate) = (self.buf(N * d), self.buf(N));
        let shared = Shared { x: View::of(&shared, d), gate: Some(View::of(&gate, 1)) };
        self.b.moe_join(&mut self.p, routed, parts, Some(shared), d, View::of(x, d));
        self.keep("moe_join", x);
    }
}

impl Workload<'_> {
    /// What other families take of verbs above.
    fn functions(&mut self) {
        let clamped = Glu::Clamped { alpha: 1.7, limit: 0.9 };
        for (width, n) in [(70, N), (20_011, 1)] {
            let (x, y) = (self.buf(n * width), self.buf(n * width));
            let (vx, vy) = (View::of(&x, width), View::of(&y, width));
            for f in [Glu::GeluTanh, clamped] {
                self.b.glu(&mut self.p, f, vx, vy, width, n, vy);
                self.keep(format!("glu {f:?}"), &y);
            }
            for f in [Unary::Scale(1.3), Unary::Silu(0.7), Unary::Softcap(0.4)] {
                self.b.activate(&mut self.p, f, vx, width, n);
                self.keep(format!("activate {f:?}"), &x);
            }
        }
        let (heads, d) = (5, 52);
        let x = self.buf(N * heads * d);
        let [w, bias] = [0, 1].map(|_| self.weight(Encoding::Bf16, 1, heads * d));
        let view = View::of(&x, heads * d);
        let layer = Norm { heads, ..Norm::layer(&w, &bias, d, 1e-5) };
        self.b.norm(&mut self.p, view, &layer, N, view);
        self.b.norm(&mut self.p, view, &Norm::rms(None, [heads, d], 1e-5), N, view);
        self.keep("layer norm", &x);
        let (channels, taps) = (1003, 3);
        let (x, out) = (self.buf(N * channels), self.empty(N * channels, BufType::F32));
        let w = self.weight(Encoding::F32, channels, taps);
        let state = self.buf(3 * 3 * (taps - 1) * channels);
        let (vx, vout) = (View::of(&x, channels), View::of(&out, channels));
        self.b.causal_conv(&mut self.p, vx, &w, 3, &state, &rows(), vout);
        self.keep("causal_conv dilated", &out);
        self.keep("causal_conv dilated state", &state);
    }

    fn streams(&mut self) {
        for (n, streams, d) in [(N, 4, 131), (1, 4, 5003)] {
            let (x, y) = (self.buf(n * streams * d), self.buf(n * streams * d));
            let (one, inject) = (self.buf(n * d), self.buf(n * streams));
            let (vx, vy) = (View::of(&x, streams * d), View::of(&y, streams * d));
            let (v1, shape) = (View::of(&one, d), [streams, d]);
            let inject = Some(View::of(&inject, streams));
            self.b.stream_join(&mut self.p, vx, v1, inject, shape, n);
            self.keep("stream_join", &x);
            self.b.stream_mix(&mut self.p, vx, vy, shape, n, v1);
            self.keep("stream_mix", &one);
            let out = self.empty(n * streams * d, BufType::F32);
            self.b.row_gate(&mut self.p, vx, vy, v1, shape, n, View::of(&out, streams * d));
            self.keep("row_gate", &out);
        }
    }

    fn heads(&mut self) {
        for encoding in Encoding::ALL {
            for (heads, rows, d_in, n) in [(3, 40, 128, N), (2, 77, 192, 1), (17, 24, 64, 3)] {
                let w = self.weight(encoding, heads * (rows + 9), d_in);
                for transposed in [false, true] {
                    let (x_head, out_head) =
                        if transposed { (rows, d_in) } else { (d_in, rows + 1) };
                    let (stride, first) = (rows + 9, 4);
                    let of = HeadRows { heads, stride, first, rows, x_head, out_head, transposed };
                    let x = self.buf(n * heads * x_head);
                    let out = self.empty(n * heads * out_head, BufType::F32);
                    let (vx, vout) =
                        (View::of(&x, heads * x_head), View::of(&out, heads * out_head));
                    self.b.linear_heads(&mut self.p, vx, &w, &of, n, vout);
                    self.keep(format!("linear_heads {encoding} {of:?} n {n}"), &out);
                }
            }
        }
    }

    /// Attention over what an indexer chose, with window, sinks, and values within keys.
    fn selections(&mut self) {
        let rows = rows();
        let (heads, d, d_value) = (19, 48, 36);
        for (ty, ratio) in [(BufType::F32, 1), (BufType::F16, 3), (BufType::Bf16, 4)] {
            let (q, k) = (self.buf(N * heads * d), self.buf(N * d));
            let weights = self.buf(N * heads);
            let top = 5;
            let ids = self.empty(N * (1 + top), BufType::F32);
            let cache = self.empty(6 * PAGE_TOKENS * d, ty);
            let values = self.random(6 * PAGE_TOKENS * d);
            self.b.write(&mut self.p, &cache, 0, &values);
            let (norm, inv_freq) =
                (self.weight(Encoding::F32, 1, d), self.weight(Encoding::F32, 1, 11));
            let pool =
                Pool { ratio, norm: &norm, eps: 1e-6, inv_freq: &inv_freq, rotary_scale: 1.1 };
            let args = IndexSelect {
                q: View::of(&q, heads * d),
                k: View::of(&k, d),
                k_cache: &cache,
                weights: Some(View::of(&weights, heads)),
                n_heads: heads,
                d,
                scale: 0.3,
                sum_scale: 0.7,
                pool: (ratio > 1).then_some(pool),
                top,
                ids: &ids,
            };
            let selection = self.b.index_select(&mut self.p, &args, &rows);
            self.keep("index_select ids", &ids);
            let sinks = self.weight(Encoding::F32, 1, heads);
            let out = self.empty(N * heads * d_value, BufType::F32);
            let args = Attention {
                q: View::of(&q, heads * d),
                k: None,
                v: None,
                k_cache: &cache,
                v_cache: None,
                n_heads: heads,
                n_kv_heads: 1,
                d_key: d,
                d_value,
                scale: 0.2,
                window: Some(37),
                sinks: Some(&sinks),
                selection: Some(&selection),
            };
            self.b.attention(&mut self.p, &args, &rows, View::of(&out, heads * d_value));
            self.keep(format!("attention {ty:?} selected"), &out);
        }
    }

    fn routers(&mut self) {
        let (n_experts, top_k) = (120, 6);
        let logits = self.buf(N * n_experts);
        let [bias, own] = [0, 1].map(|_| self.weight(Encoding::F32, 1, n_experts));
        for scores in [Scores::Softmax, Scores::Sigmoid, Scores::SoftmaxOfChosen] {
            let router = Router {
                scores,
                choice_bias: Some(&bias),
                groups: Some(Groups { count: 8, kept: 3 }),
                renormalise: Some(1e-6),
                factor: 2.5,
                expert_factor: Some(&own),
                ..Router::softmax([n_experts, top_k], false)
            };
            let scratch = [0, 1].map(|_| self.empty(N * top_k, BufType::F32));
            let view = View::of(&logits, n_experts);
            self.b.route(&mut self.p, view, &router, N, [&scratch[0], &scratch[1]]);
            self.keep("route ids", &scratch[0]);
            self.keep(format!("route {scores:?} weights"), &scratch[1]);
        }
    }
}

/// Three sequences with 1, 33 and 7 rows.
fn rows() -> Rows {
    let mut rows = Rows::default();
    rows.rewrite(|draft| {
        draft.sequence(2, [5, 0]);
        draft.row(40, 3, true);
        draft.sequence(0, [3, 1]);
        for position in 0..33 {
            draft.row(position, 7 + position, position == 32);
        }
        draft.sequence(1, [4, 2]);
        for position in 28..35 {
            draft.row(position, position, false);
        }
    });
    assert_eq!(rows.len(), N);
    rows
}
