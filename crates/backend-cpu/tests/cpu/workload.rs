//! Every verb once, on odd shapes and seeded numbers, large enough to be split over threads.

use snowmelt_backend::{
    Attention, Backend, BufType, DeltaStep, ExpertLayout, Experts, Gate, MatrixLayout, MoeFfn,
    PAGE_TOKENS, Pairing, Pass, Ready, Routed, Router, Rows, Shared, Slab, View,
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
            self.b.sigmoid_gate(&mut self.p, vx, vy, width, n);
            self.b.swiglu(&mut self.p, vx, vy, width, n, View::of(&out, width));
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
        self.b.rms_norm(&mut self.p, vx, &w, heads, 1e-6, N, vx);
        self.b.l2_norm(&mut self.p, vz, [heads, d], 1e-6, 0.3, N);
        self.keep("rms_norm", &x);
        self.keep("l2_norm", &z);
        self.b.gated_norm(&mut self.p, vx, vz, &w, heads, 1e-5, Gate::Silu, N);
        self.b.gated_norm(&mut self.p, vx, vz, &w, heads, 1e-5, Gate::Sigmoid, N);
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
                k: View::of(&k, width),
                v: View::of(&v, width),
                k_cache: &k_cache,
                v_cache: &v_cache,
                n_heads,
                n_kv_heads,
                d_head,
                scale: 0.3,
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
        self.b.causal_conv(&mut self.p, vx, &w, &state, &rows, vout);
        self.keep("causal_conv", &out);
        self.keep("causal_conv state", &state);

        for (n_key_heads, n_value_heads, d_key, d_value) in [(2, 6, 24, 84), (1, 2, 32, 128)] {
            let (q, k) = (self.buf(N * n_key_heads * d_key), self.buf(N * n_key_heads * d_key));
            let v = self.buf(N * n_value_heads * d_value);
            let (a, b) = (self.buf(N * n_value_heads), self.buf(N * n_value_heads));
            let w = [0, 1].map(|_| self.weight(Encoding::F32, 1, n_value_heads));
            let views = [&a, &b].map(|buf| View::of(buf, n_value_heads));
            for view in [&q, &k].map(|buf| View::of(buf, n_key_heads * d_key)) {
                self.b.l2_norm(&mut self.p, view, [n_key_heads, d_key], 1e-6, 1.0, N);
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
        let router = Router::Softmax { renormalise: true };
        let shape = [experts, top_k];
        let view = View::of(&logits, experts);
        let routed = self.b.route(&mut self.p, view, shape, router, N, [&scratch[0], &scratch[1]]);
        self.keep("route ids", &scratch[0]);
        self.keep("route weights", &scratch[1]);

        let mut offset = 3;
        let mut piece = |encoding: Encoding, d_out, d_in| {
            let layout = MatrixLayout { encoding, d_out, d_in, offset };
            offset += layout.bytes() + 5;
            layout
        };
        let gate = piece(gate, d_expert, d);
        let layout =
            ExpertLayout { gate, up: piece(up, d_expert, d), down: piece(down, d, d_expert) };
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
