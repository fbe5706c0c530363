//! A backend that behaves as a device does: verbs are recorded and run later, in submission order,
//! by another thread; slots are written past the queue, so that only pins keep them apart.

use snowmelt_backend::reference::{Eager, HostSlab, Reference};
use snowmelt_backend::{
    Attention, Backend, BufType, DeltaStep, Experts, Gate, HostRecords, Limits, MoeFfn, Pairing,
    Pass, Ready, Routed, Router, Routes, Rows, Shared, Slab, StepError, View,
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

    fn rms_norm(
        &self,
        p: &mut Recorder,
        x: View<'_, Buf>,
        w: &Weight,
        heads: usize,
        eps: f32,
        n: usize,
        out: View<'_, Buf>,
    ) {
        let (x, w, out) = (Held::of(x), Arc::clone(w), Held::of(out));
        p.op(move |e| Reference.rms_norm(e, x.view(), &w, heads, eps, n, out.view()));
    }

    fn l2_norm(
        &self,
        p: &mut Recorder,
        x: View<'_, Buf>,
        shape: [usize; 2],
        eps: f32,
        factor: f32,
        n: usize,
    ) {
        let x = Held::of(x);
        p.op(move |e| Reference.l2_norm(e, x.view(), shape, eps, factor, n));
    }

    fn linear(&self, p: &mut Recorder, x: View<'_, Buf>, w: &Weight, n: usize, out: View<'_, Buf>) {
        let (x, w, out) = (Held::of(x), Arc::clone(w), Held::of(out));
        p.op(move |e| Reference.linear(e, x.view(), &w, n, out.view()));
    }

    fn add(&self, p: &mut Recorder, x: View<'_, Buf>, y: View<'_, Buf>, width: usize, n: usize) {
        let (x, y) = (Held::of(x), Held::of(y));
        p.op(move |e| Reference.add(e, x.view(), y.view(), width, n));
    }

    fn swiglu(
        &self,
        p: &mut Recorder,
        gate: View<'_, Buf>,
        up: View<'_, Buf>,
        width: usize,
        n: usize,
        out: View<'_, Buf>,
    ) {
        let (gate, up, out) = (Held::of(gate), Held::of(up), Held::of(out));
        p.op(move |e| Reference.swiglu(e, gate.view(), up.view(), width, n, out.view()));
    }

    fn sigmoid_gate(
        &self,
        p: &mut Recorder,
        x: View<'_, Buf>,
        z: View<'_, Buf>,
        width: usize,
        n: usize,
    ) {
        let (x, z) = (Held::of(x), Held::of(z));
        p.op(move |e| Reference.sigmoid_gate(e, x.view(), z.view(), width, n));
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
        args: &Attention<'_, Buf>,
        rows: &Rows,
        out: View<'_, Buf>,
    ) {
        let &Attention { q, k, v, n_heads, n_kv_heads, d_head, scale, .. } = args;
        let [q, k, v, out] = [q, k, v, out].map(Held::of);
        let (rows, k_cache, v_cache) = (rows.clone(), args.k_cache.clone(), args.v_cache.clone());
        p.op(move |e| {
            let (q, k, v, k_cache, v_cache) = (q.view(), k.view(), v.view(), &k_cache, &v_cache);
            let args = Attention { q, k, v, k_cache, v_cache, n_heads, n_kv_heads, d_head, scale };
            Reference.attention(e, &args, &rows, out.view());
        });
    }

    fn causal_conv(
        &self,
        p: &mut Recorder,
        x: View<'_, Buf>,
        w: &Weight,
        state: &Buf,
        rows: &Rows,
        out: View<'_, Buf>,
    ) {
        let (x, w, out) = (Held::of(x), Arc::clone(w), Held::of(out));
        let (state, rows) = (state.clone(), rows.clone());
        p.op(move |e| Reference.causal_conv(e, x.view(), &w, &state, &rows, out.view()));
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

    fn gated_norm(
        &self,
        p: &mut Recorder,
        x: View<'_, Buf>,
        z: View<'_, Buf>,
        w: &Weight,
        heads: usize,
        eps: f32,
        gate: Gate,
        n: usize,
    ) {
        let (x, z, w) = (Held::of(x), Held::of(z), Arc::clone(w));
        p.op(move |e| Reference.gated_norm(e, x.view(), z.view(), &w, heads, eps, gate, n));
    }

    fn route(
        &self,
        p: &mut Recorder,
        logits: View<'_, Buf>,
        shape: [usize; 2],
        router: Router,
        n: usize,
        scratch: [&Buf; 2],
    ) -> Routed<Buf> {
        let (logits, [ids, weights]) = (Held::of(logits), scratch.map(Buf::clone));
        let routed = Routed { ids, weights, n, top_k: shape[1] };
        let Routed { ids, weights, .. } = routed.clone();
        p.op(move |e| {
            Reference.route(e, logits.view(), shape, router, n, [&ids, &weights]);
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
