//! A backend that behaves as a device does: verbs are recorded and run later, in submission order,
//! by another thread; slots are written past the queue, so that only pins keep them apart.

use snowmelt_backend::reference::{Eager, HostSlab, Reference};
use snowmelt_backend::{
    Attention, Backend, BufType, DeltaStep, Experts, Glu, HeadRows, HostRecords, IndexSelect,
    Limits, MoeFfn, Norm, Pairing, Pass, Pool, Ready, Routed, Router, Routes, Rows, Selection,
    Shared, Slab, StepError, Unary, View,
};
use snowmelt_weights::Encoding;
use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

type Buf = <Reference as Backend>::Buf;
type Weight = Arc<<Reference as Backend>::Weight>;
type Op = Box<dyn FnOnce(&mut Eager) + Send>;

#[derive(Default)]
struct Submission {
    ops: Vec<Op>,
    pins: Vec<Ready>,
}

#[derive(Debug, Default)]
struct Progress {
    submitted: usize,
    done: usize,
    lost: bool,
    held: bool,
}

#[derive(Debug, Default)]
struct Fence(Mutex<Progress>, Condvar);

impl Fence {
    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.0.lock().expect("nothing panics under this lock")
    }

    fn update(&self, change: impl FnOnce(&mut Progress)) {
        change(&mut self.lock());
        self.1.notify_all();
    }

    fn wait_while(&self, blocked: impl Fn(&Progress) -> bool) {
        drop(self.1.wait_while(self.lock(), |progress| blocked(progress)).expect("as above"));
    }
}

#[derive(Debug)]
pub(crate) struct Deferred {
    queue: Sender<Submission>,
    fence: Arc<Fence>,
    in_flight: usize,
    drop_pins_early: bool,
}

impl Deferred {
    pub(crate) fn new(in_flight: usize) -> Self {
        let (queue, work) = channel();
        let fence = Arc::new(Fence::default());
        let device = Arc::clone(&fence);
        std::thread::spawn(move || run(&work, &device));
        Self { queue, fence, in_flight, drop_pins_early: false }
    }

    /// A deliberate bug, so that a test can show that it is seen.
    pub(crate) fn dropping_pins_early(in_flight: usize) -> Self {
        Self { drop_pins_early: true, ..Self::new(in_flight) }
    }

    /// While held, the device starts no submission.
    pub(crate) fn hold(&self, held: bool) {
        self.fence.update(|progress| progress.held = held);
    }
}

fn run(work: &Receiver<Submission>, fence: &Fence) {
    struct LostOnPanic<'a>(&'a Fence);
    impl Drop for LostOnPanic<'_> {
        fn drop(&mut self) {
            self.0.update(|progress| progress.lost = true);
        }
    }
    let _lost = LostOnPanic(fence);
    let mut eager = Reference.begin();
    for submission in work {
        fence.wait_while(|progress| progress.held);
        // Lets the host run ahead.
        std::thread::sleep(std::time::Duration::from_micros(20));
        submission.ops.into_iter().for_each(|op| op(&mut eager));
        // Before the fence: who waited for it may count on the slots.
        drop(submission.pins);
        fence.update(|progress| progress.done += 1);
    }
}

/// Verbs and pins since the last submission.
pub(crate) struct Recorder {
    queue: Sender<Submission>,
    fence: Arc<Fence>,
    in_flight: usize,
    next: Submission,
}

impl Recorder {
    fn op(&mut self, op: impl FnOnce(&mut Eager) + Send + 'static) {
        self.next.ops.push(Box::new(op));
    }

    /// Waits for all earlier work.
    fn finish(&mut self) -> Result<(), StepError> {
        self.submit();
        self.fence.wait_while(|p| !p.lost && p.done < p.submitted);
        if self.fence.lock().lost { Err(StepError::DeviceLost) } else { Ok(()) }
    }
}

impl Pass for Recorder {
    type Buf = Buf;

    fn submit(&mut self) {
        self.fence.update(|progress| progress.submitted += 1);
        // A lost device is reported by the next read.
        let _ = self.queue.send(std::mem::take(&mut self.next));
        let in_flight = self.in_flight;
        self.fence.wait_while(|p| !p.lost && p.submitted - p.done > in_flight);
    }

    fn read(&mut self, buf: &Buf, range: Range<usize>, into: &mut [f32]) -> Result<(), StepError> {
        self.finish()?;
        Reference.begin().read(buf, range, into)
    }

    fn read_routes(&mut self, routed: &Routed<Buf>, into: &mut Routes) -> Result<(), StepError> {
        self.finish()?;
        Reference.begin().read_routes(routed, into)
    }
}

/// Device slots without a host pointer.
#[derive(Clone, Debug)]
pub(crate) struct DeviceSlab(HostSlab);

impl Slab for DeviceSlab {
    fn slots(&self) -> u32 {
        self.0.slots()
    }

    fn slot_bytes(&self) -> usize {
        self.0.slot_bytes()
    }

    fn host(&self, _: u32) -> Option<*mut u8> {
        None
    }

    fn upload(&self, slot: u32, offset: usize, bytes: &[u8]) {
        self.0.upload(slot, offset, bytes);
    }
}

/// A view that owns its handle.
struct Held(Buf, usize, usize);

impl Held {
    fn of(view: View<'_, Buf>) -> Self {
        Self(view.buf.clone(), view.offset, view.stride)
    }

    fn view(&self) -> View<'_, Buf> {
        View { buf: &self.0, offset: self.1, stride: self.2 }
    }
}

impl Backend for Deferred {
    type Buf = Buf;
    type Weight = Weight;
    type Pass = Recorder;
    type Slab = DeviceSlab;

    fn submissions_in_flight(&self) -> usize {
        self.in_flight
    }

    fn scratch_bytes(&self, _: &Limits) -> usize {
        0
    }

    fn prepare(&self, _: &Limits) {}

    fn alloc(&self, len: usize, ty: BufType) -> Buf {
        Reference.alloc(len, ty)
    }

    fn alloc_weight(&self, encoding: Encoding, d_out: usize, d_in: usize) -> Weight {
        Arc::new(Reference.alloc_weight(encoding, d_out, d_in))
    }

    fn fill_weight(&self, weight: &mut Weight, first_row: usize, rows: &[u8]) {
        let weight = Arc::get_mut(weight).expect("not yet in use");
        Reference.fill_weight(weight, first_row, rows);
    }

    fn alloc_slab(&self, slot_bytes: usize, slots: u32) -> DeviceSlab {
        DeviceSlab(Reference.alloc_slab(slot_bytes, slots))
    }

    fn adopt_slab(&self, _: Arc<dyn HostRecords>) -> Option<DeviceSlab> {
        None
    }

    fn begin(&self) -> Recorder {
        let (queue, fence) = (self.queue.clone(), Arc::clone(&self.fence));
        Recorder { queue, fence, in_flight: self.in_flight, next: Submission::default() }
    }

    fn clear(&self, p: &mut Recorder, buf: &Buf, range: Range<usize>) {
        let buf = buf.clone();
        p.op(move |e| Reference.clear(e, &buf, range));
    }

    fn write(&self, p: &mut Recorder, buf: &Buf, offset: usize, data: &[f32]) {
        let (buf, data) = (buf.clone(), data.to_vec());
        p.op(move |e| Reference.write(e, &buf, offset, &data));
    }

    fn copy(&self, p: &mut Recorder, buf: &Buf, from: usize, to: usize, len: usize) {
        let buf = buf.clone();
        p.op(move |e| Reference.copy(e, &buf, from, to, len));
    }

    fn embed(&self, p: &mut Recorder, table: &Weight, rows: &Rows, out: View<'_, Buf>) {
        let (table, rows, out) = (Arc::clone(table), rows.clone(), Held::of(out));
        p.op(move |e| Reference.embed(e, &table, &rows, out.view()));
    }

    fn norm(
        &self,
        p: &mut Recorder,
        x: View<'_, Buf>,
        norm: &Norm<'_, Weight, Buf>,
        n: usize,
        out: View<'_, Buf>,
    ) {
        let &Norm { spread, heads, d, eps, factor, .. } = norm;
        let [w, bias] = [norm.w, norm.bias].map(Option::<&Weight>::cloned);
        let gate = norm.gate.map(|(z, f)| (Held::of(z), f));
        let (x, out) = (Held::of(x), Held::of(out));
        p.op(move |e| {
            let (w, bias) = (w.as_deref(), bias.as_deref());
            let gate = gate.as_ref().map(|(z, f)| (z.view(), *f));
            let norm = Norm { spread, w, bias, gate, heads, d, eps, factor };
            Reference.norm(e, x.view(), &norm, n, out.view());
        });
    }

    fn linear(&self, p: &mut Recorder, x: View<'_, Buf>, w: &Weight, n: usize, out: View<'_, Buf>) {
        let (x, w, out) = (Held::of(x), Arc::clone(w), Held::of(out));
        p.op(move |e| Reference.linear(e, x.view(), &w, n, out.view()));
    }

    fn add(&self, p: &mut Recorder, x: View<'_, Buf>, y: View<'_, Buf>, width: usize, n: usize) {
        let (x, y) = (Held::of(x), Held::of(y));
        p.op(move |e| Reference.add(e, x.view(), y.view(), width, n));
    }

    fn linear_heads(
        &self,
        p: &mut Recorder,
        x: View<'_, Buf>,
        w: &Weight,
        heads: &HeadRows,
        n: usize,
        out: View<'_, Buf>,
    ) {
        let (x, w, heads, out) = (Held::of(x), Arc::clone(w), *heads, Held::of(out));
        p.op(move |e| Reference.linear_heads(e, x.view(), &w, &heads, n, out.view()));
    }

    fn copy_heads(
        &self,
        p: &mut Recorder,
        x: View<'_, Buf>,
        shape: [usize; 4],
        n: usize,
        out: View<'_, Buf>,
    ) {
        let (x, out) = (Held::of(x), Held::of(out));
        p.op(move |e| Reference.copy_heads(e, x.view(), shape, n, out.view()));
    }

    fn glu(
        &self,
        p: &mut Recorder,
        f: Glu,
        gate: View<'_, Buf>,
        up: View<'_, Buf>,
        width: usize,
        n: usize,
        out: View<'_, Buf>,
    ) {
        let (gate, up, out) = (Held::of(gate), Held::of(up), Held::of(out));
        p.op(move |e| Reference.glu(e, f, gate.view(), up.view(), width, n, out.view()));
    }

    fn activate(&self, p: &mut Recorder, f: Unary, x: View<'_, Buf>, width: usize, n: usize) {
        let x = Held::of(x);
        p.op(move |e| Reference.activate(e, f, x.view(), width, n));
    }

    fn stream_mix(
        &self,
        p: &mut Recorder,
        x: View<'_, Buf>,
        gate: View<'_, Buf>,
        shape: [usize; 2],
        n: usize,
        out: View<'_, Buf>,
    ) {
        let [x, gate, out] = [x, gate, out].map(Held::of);
        p.op(move |e| Reference.stream_mix(e, x.view(), gate.view(), shape, n, out.view()));
    }

    fn stream_join(
        &self,
        p: &mut Recorder,
        x: View<'_, Buf>,
        y: View<'_, Buf>,
        inject: Option<View<'_, Buf>>,
        shape: [usize; 2],
        n: usize,
    ) {
        let (x, y, inject) = (Held::of(x), Held::of(y), inject.map(Held::of));
        p.op(move |e| {
            let inject = inject.as_ref().map(Held::view);
            Reference.stream_join(e, x.view(), y.view(), inject, shape, n);
        });
    }

    fn row_gate(
        &self,
        p: &mut Recorder,
        key: View<'_, Buf>,
        query: View<'_, Buf>,
        value: View<'_, Buf>,
        shape: [usize; 2],
        n: usize,
        out: View<'_, Buf>,
    ) {
        let [key, query, value, out] = [key, query, value, out].map(Held::of);
        p.op(move |e| {
            let (key, query, value) = (key.view(), query.view(), value.view());
            Reference.row_gate(e, key, query, value, shape, n, out.view());
        });
    }

    fn rotary_table(
        &self,
        p: &mut Recorder,
        inv_freq: &Weight,
        scale: f32,
        rows: &Rows,
        out: View<'_, Buf>,
    ) {
        let (inv_freq, rows, out) = (Arc::clone(inv_freq), rows.clone(), Held::of(out));
        p.op(move |e| Reference.rotary_table(e, &inv_freq, scale, &rows, out.view()));
    }

    fn rope(
        &self,
        p: &mut Recorder,
        x: View<'_, Buf>,
        shape: [usize; 3],
        table: View<'_, Buf>,
        pairing: Pairing,
        n: usize,
    ) {
        let (x, table) = (Held::of(x), Held::of(table));
        p.op(move |e| Reference.rope(e, x.view(), shape, table.view(), pairing, n));
    }

    fn attention(
        &self,
        p: &mut Recorder,
        args: &Attention<'_, Weight, Buf>,
        rows: &Rows,
        out: View<'_, Buf>,
    ) {
        let &Attention { n_heads, n_kv_heads, d_key, d_value, scale, window, .. } = args;
        let [q, out] = [args.q, out].map(Held::of);
        let [k, v] = [args.k, args.v].map(|view| view.map(Held::of));
        let (rows, k_cache, v_cache) = (rows.clone(), args.k_cache.clone(), args.v_cache.cloned());
        let (sinks, selection) = (args.sinks.cloned(), args.selection.cloned());
        p.op(move |e| {
            let args = Attention {
                q: q.view(),
                k: k.as_ref().map(Held::view),
                v: v.as_ref().map(Held::view),
                k_cache: &k_cache,
                v_cache: v_cache.as_ref(),
                n_heads,
                n_kv_heads,
                d_key,
                d_value,
                scale,
                window,
                sinks: sinks.as_deref(),
                selection: selection.as_ref(),
            };
            Reference.attention(e, &args, &rows, out.view());
        });
    }

    fn index_select(
        &self,
        p: &mut Recorder,
        args: &IndexSelect<'_, Weight, Buf>,
        rows: &Rows,
    ) -> Selection<Buf> {
        let &IndexSelect { n_heads, d, scale, sum_scale, top, .. } = args;
        let [q, k] = [args.q, args.k].map(Held::of);
        let (weights, rows) = (args.weights.map(Held::of), rows.clone());
        let (k_cache, ids) = (args.k_cache.clone(), args.ids.clone());
        let pool = args.pool.as_ref().map(|pool| {
            let weights = [pool.norm, pool.inv_freq].map(Arc::clone);
            (pool.ratio, pool.eps, pool.rotary_scale, weights)
        });
        let ratio = args.pool.as_ref().map_or(1, |pool| pool.ratio);
        let selection = Selection { ids: args.ids.clone(), top, ratio };
        p.op(move |e| {
            let pool = pool.as_ref().map(|(ratio, eps, rotary_scale, [norm, inv_freq])| {
                let (ratio, eps, rotary_scale) = (*ratio, *eps, *rotary_scale);
                Pool { ratio, norm: &**norm, eps, inv_freq: &**inv_freq, rotary_scale }
            });
            let args = IndexSelect {
                q: q.view(),
                k: k.view(),
                k_cache: &k_cache,
                weights: weights.as_ref().map(Held::view),
                n_heads,
                d,
                scale,
                sum_scale,
                pool,
                top,
                ids: &ids,
            };
            Reference.index_select(e, &args, &rows);
        });
        selection
    }

    fn causal_conv(
        &self,
        p: &mut Recorder,
        x: View<'_, Buf>,
        w: &Weight,
        dilation: usize,
        state: &Buf,
        rows: &Rows,
        out: View<'_, Buf>,
    ) {
        let (x, w, out) = (Held::of(x), Arc::clone(w), Held::of(out));
        let (state, rows) = (state.clone(), rows.clone());
        p.op(move |e| {
            Reference.causal_conv(e, x.view(), &w, dilation, &state, &rows, out.view());
        });
    }

    fn delta_gate(
        &self,
        p: &mut Recorder,
        a: View<'_, Buf>,
        b: View<'_, Buf>,
        w: [&Weight; 2],
        n: usize,
    ) {
        let (a, b, w) = (Held::of(a), Held::of(b), w.map(Arc::clone));
        p.op(move |e| Reference.delta_gate(e, a.view(), b.view(), [&w[0], &w[1]], n));
    }

    fn delta_step(
        &self,
        p: &mut Recorder,
        args: &DeltaStep<'_, Buf>,
        rows: &Rows,
        out: View<'_, Buf>,
    ) {
        let &DeltaStep { q, k, v, decay, beta, .. } = args;
        let &DeltaStep { n_key_heads, n_value_heads, d_key, d_value, .. } = args;
        let [q, k, v, decay, beta, out] = [q, k, v, decay, beta, out].map(Held::of);
        let (rows, state) = (rows.clone(), args.state.clone());
        p.op(move |e| {
            let args = DeltaStep {
                q: q.view(),
                k: k.view(),
                v: v.view(),
                decay: decay.view(),
                beta: beta.view(),
                state: &state,
                n_key_heads,
                n_value_heads,
                d_key,
                d_value,
            };
            Reference.delta_step(e, &args, &rows, out.view());
        });
    }

    fn route(
        &self,
        p: &mut Recorder,
        logits: View<'_, Buf>,
        router: &Router<'_, Weight>,
        n: usize,
        scratch: [&Buf; 2],
    ) -> Routed<Buf> {
        let (logits, [ids, weights]) = (Held::of(logits), scratch.map(Buf::clone));
        let &Router { n_experts, top_k, scores, groups, renormalise, factor, .. } = router;
        let [bias, own] = [router.choice_bias, router.expert_factor].map(Option::<&Weight>::cloned);
        let routed = Routed { ids, weights, n, top_k };
        let Routed { ids, weights, .. } = routed.clone();
        p.op(move |e| {
            let (choice_bias, expert_factor) = (bias.as_deref(), own.as_deref());
            let router = Router {
                n_experts,
                top_k,
                scores,
                choice_bias,
                groups,
                renormalise,
                factor,
                expert_factor,
            };
            Reference.route(e, logits.view(), &router, n, [&ids, &weights]);
        });
        routed
    }

    fn moe_ffn(&self, p: &mut Recorder, args: &MoeFfn<'_, Self>, experts: Experts<'_>, out: &Buf) {
        let (x, routed, layout) = (Held::of(args.x), args.routed.clone(), *args.layout);
        let (DeviceSlab(slab), out) = (args.slab.clone(), out.clone());
        let (places, first_slot): (Vec<(u32, u32)>, _) = match experts {
            Experts::Ready(ready) => {
                let places = ready.iter().map(|ready| (ready.expert(), ready.slot())).collect();
                let pins = ready.drain(..);
                if !self.drop_pins_early {
                    p.next.pins.extend(pins);
                }
                (places, None)
            }
            Experts::Resident { first_slot } => (Vec::new(), Some(first_slot)),
        };
        p.op(move |e| {
            // The pins proper stay with the submission.
            let ready = |(expert, slot)| Ready::new(expert, slot, Arc::new(()));
            let mut ready: Vec<Ready> = places.into_iter().map(ready).collect();
            let experts = match first_slot {
                Some(first_slot) => Experts::Resident { first_slot },
                None => Experts::Ready(&mut ready),
            };
            let args = MoeFfn { x: x.view(), routed: &routed, layout: &layout, slab: &slab };
            Reference.moe_ffn(e, &args, experts, &out);
            e.submit();
        });
    }

    fn moe_join(
        &self,
        p: &mut Recorder,
        routed: &Routed<Buf>,
        parts: &Buf,
        shared: Option<Shared<'_, Buf>>,
        d: usize,
        x: View<'_, Buf>,
    ) {
        let (routed, parts, x) = (routed.clone(), parts.clone(), Held::of(x));
        let shared = shared.map(|shared| (Held::of(shared.x), shared.gate.map(Held::of)));
        p.op(move |e| {
            let shared = shared
                .as_ref()
                .map(|(x, gate)| Shared { x: x.view(), gate: gate.as_ref().map(Held::view) });
            Reference.moe_join(e, &routed, &parts, shared, d, x.view());
        });
    }

    fn select_outputs(
        &self,
        p: &mut Recorder,
        x: View<'_, Buf>,
        width: usize,
        rows: &Rows,
        first: usize,
        n: usize,
        out: View<'_, Buf>,
    ) {
        let (x, rows, out) = (Held::of(x), rows.clone(), Held::of(out));
        p.op(move |e| Reference.select_outputs(e, x.view(), width, &rows, first, n, out.view()));
    }
}
