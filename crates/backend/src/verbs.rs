//! The verbs and the types in their signatures.

use crate::fetch::{Ready, Routes, StepError};
use crate::rows::Rows;
use snowmelt_weights::Encoding;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Type of the elements of a buffer. Activations are f32; per-token state may be narrower.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BufType {
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// The upper half of f32, rounded to nearest even.
    Bf16,
}

impl BufType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// Rows within a buffer: row `t` begins at element `offset + t * stride`. How wide a row is, the
/// verb says.
pub struct View<'a, Buf> {
    /// The buffer, f32.
    pub buf: &'a Buf,
    /// Element at which row 0 begins.
    pub offset: usize,
    /// Elements from one row to the next.
    pub stride: usize,
}

impl<'a, Buf> View<'a, Buf> {
    /// Dense rows of `width`.
    pub fn of(buf: &'a Buf, width: usize) -> Self {
        Self { buf, offset: 0, stride: width }
    }

    /// One row for every `t`: an input that all rows share.
    pub fn row(buf: &'a Buf) -> Self {
        Self { buf, offset: 0, stride: 0 }
    }

    /// The same rows, beginning `columns` further to the right.
    #[must_use]
    pub fn column(self, columns: usize) -> Self {
        Self { offset: self.offset + columns, ..self }
    }
}

impl<Buf> Clone for View<'_, Buf> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<Buf> Copy for View<'_, Buf> {}

impl<Buf> fmt::Debug for View<'_, Buf> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "View(offset {}, stride {})", self.offset, self.stride)
    }
}

/// Sizes that bound every later call, so that scratch can be reserved at open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Most rows of a step.
    pub rows: usize,
    /// Widest input of a `linear` or of an expert.
    pub d_in: usize,
    /// Most choices a row.
    pub top_k: usize,
    /// Widest inner width of an expert.
    pub d_expert: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Most experts a layer.
    pub n_experts: usize,
    /// Longest context of a sequence, in tokens.
    pub context_tokens: usize,
    /// Most attention heads of a layer.
    pub n_heads: usize,
    /// Widest attention head, or value of a recurrent head.
    pub d_head: usize,
}

/// How pairs of a rotary embedding lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// `(i, i + d/2)`, as GPT-NeoX.
    Half,
    /// `(2i, 2i + 1)`, as GPT-J.
    Adjacent,
}

/// Nonlinearity of a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// `z * sigmoid(z)`
    Silu,
    /// `sigmoid(z)`
    Sigmoid,
}

/// How a router turns logits into weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Router {
    /// Softmax over all experts in f32, then the `top_k` greatest.
    Softmax {
        /// Divide the chosen weights by their sum.
        renormalise: bool,
    },
}

/// Arguments of [`Backend::attention`].
#[derive(Debug)]
pub struct Attention<'a, Buf> {
    /// `[n, n_heads, d_head]`
    pub q: View<'a, Buf>,
    /// `[n, n_kv_heads, d_head]`
    pub k: View<'a, Buf>,
    /// `[n, n_kv_heads, d_head]`
    pub v: View<'a, Buf>,
    /// `[n_pages, PAGE_TOKENS, n_kv_heads * d_head]`
    pub k_cache: &'a Buf,
    /// As `k_cache`.
    pub v_cache: &'a Buf,
    /// Query heads; a multiple of `n_kv_heads`. Head `h` reads KV head
    /// `h / (n_heads / n_kv_heads)`.
    pub n_heads: usize,
    /// Key and value heads.
    pub n_kv_heads: usize,
    /// Width of a head.
    pub d_head: usize,
    /// Factor of the scores.
    pub scale: f32,
}

/// Arguments of [`Backend::delta_step`].
#[derive(Debug)]
pub struct DeltaStep<'a, Buf> {
    /// `[n, n_key_heads, d_key]`
    pub q: View<'a, Buf>,
    /// `[n, n_key_heads, d_key]`
    pub k: View<'a, Buf>,
    /// `[n, n_value_heads, d_value]`
    pub v: View<'a, Buf>,
    /// `[n, n_value_heads]`, the factor of the state itself (not its logarithm).
    pub decay: View<'a, Buf>,
    /// `[n, n_value_heads]`
    pub beta: View<'a, Buf>,
    /// `[n_fixed, n_value_heads, d_key, d_value]` f32
    pub state: &'a Buf,
    /// Heads of q and k; value head `h` uses key head `h / (n_value_heads / n_key_heads)`.
    pub n_key_heads: usize,
    /// Heads of v.
    pub n_value_heads: usize,
    /// Width of a key head.
    pub d_key: usize,
    /// Width of a value head.
    pub d_value: usize,
}

/// What [`Backend::route`] chose; ids and weights stay on the device.
#[derive(Clone, Debug)]
pub struct Routed<Buf> {
    /// `[n, top_k]` expert indices, u32 bits in f32 elements.
    pub ids: Buf,
    /// `[n, top_k]` f32.
    pub weights: Buf,
    /// Rows.
    pub n: usize,
    /// Choices a row.
    pub top_k: usize,
}

/// One matrix of an expert record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixLayout {
    /// Encoding of its rows.
    pub encoding: Encoding,
    /// Rows.
    pub d_out: usize,
    /// Columns.
    pub d_in: usize,
    /// Byte offset in the record.
    pub offset: usize,
}

impl MatrixLayout {
    /// Bytes of the matrix.
    pub fn bytes(&self) -> usize {
        self.d_out * self.encoding.row_bytes(self.d_in)
    }
}

/// What the bytes of a record mean: `down(silu(gate x) * up x)`. Piece 0 is `gate`, 1 is `up`,
/// 2 is `down`. It may differ from layer to layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertLayout {
    /// `[d_expert, d_model]`
    pub gate: MatrixLayout,
    /// `[d_expert, d_model]`
    pub up: MatrixLayout,
    /// `[d_model, d_expert]`
    pub down: MatrixLayout,
}

impl ExpertLayout {
    /// The pieces in order.
    pub fn pieces(&self) -> [&MatrixLayout; 3] {
        [&self.gate, &self.up, &self.down]
    }

    /// Bytes of one record.
    pub fn record_bytes(&self) -> usize {
        self.pieces().iter().map(|piece| piece.offset + piece.bytes()).max().unwrap_or(0)
    }
}

/// Arguments of [`Backend::moe_ffn`].
#[derive(Debug)]
pub struct MoeFfn<'a, B: Backend> {
    /// `[n, d_model]`
    pub x: View<'a, B::Buf>,
    /// Which row wants which expert.
    pub routed: &'a Routed<B::Buf>,
    /// What the bytes of a slot mean.
    pub layout: &'a ExpertLayout,
    /// The memory that slots index.
    pub slab: &'a B::Slab,
}

/// The experts of one [`Backend::moe_ffn`].
#[derive(Debug)]
pub enum Experts<'a> {
    /// These arrived. The backend drains the list: each pin moves into the pass and is dropped
    /// after the fence of its submission. Experts that no row chose cost nothing.
    Ready(&'a mut Vec<Ready>),
    /// All experts of the layer, expert `e` in slot `first_slot + e`, for as long as the engine
    /// lives.
    Resident {
        /// Slot of expert 0.
        first_slot: u32,
    },
}

/// A shared expert's result, for [`Backend::moe_join`].
#[derive(Debug)]
pub struct Shared<'a, Buf> {
    /// `[n, d_model]`
    pub x: View<'a, Buf>,
    /// `[n, 1]`: `x` is multiplied by its sigmoid.
    pub gate: Option<View<'a, Buf>>,
}

/// Records in memory that the host maps or holds, for [`Backend::adopt_slab`].
pub trait HostRecords: Send + Sync + fmt::Debug {
    /// Number of records.
    fn records(&self) -> u32;
    /// Bytes of one piece of a record (0 gate, 1 up, 2 down). No alignment is promised.
    fn piece(&self, slot: u32, piece: usize) -> &[u8];
}

/// Slot memory, the backend's half of the seam. `expert-store` sees it through an adaptor.
/// Cloning clones the handle.
pub trait Slab: Clone + Send + Sync + 'static {
    /// Number of slots.
    fn slots(&self) -> u32;
    /// Bytes of a slot, a multiple of 4096.
    fn slot_bytes(&self) -> usize;
    /// The slot's own bytes, 4096-aligned; `None` where the host cannot address them. Only pins
    /// keep writers off bytes in use.
    fn host(&self, slot: u32) -> Option<*mut u8>;
    /// Copies into the slot at `offset`. *Not* ordered with submitted work: only pins keep it off
    /// bytes in use.
    fn upload(&self, slot: u32, offset: usize, bytes: &[u8]);
}

/// A recording. Dropping it discards what was not submitted, and those pins.
pub trait Pass {
    /// The backend's buffer.
    type Buf;

    /// Hands over what was recorded with its pins, which are dropped when the device has finished
    /// it. Then waits while more than [`Backend::submissions_in_flight`] are unfinished: the only
    /// waiting besides reads.
    fn submit(&mut self);

    /// Host read (logits, captures, snapshots): submits, waits, copies `range` of an f32 buffer.
    ///
    /// # Errors
    /// When the device was lost.
    fn read(
        &mut self,
        buf: &Self::Buf,
        range: Range<usize>,
        into: &mut [f32],
    ) -> Result<(), StepError>;

    /// Host read of the routes: the one synchronisation of a layer of experts.
    ///
    /// # Errors
    /// When the device was lost.
    fn read_routes(
        &mut self,
        routed: &Routed<Self::Buf>,
        into: &mut Routes,
    ) -> Result<(), StepError>;
}

/// The verbs. Each records into the pass; none allocates, waits or reports a device error.
///
/// Shapes: slowest dimension first; `n` is the number of rows of the step. An output may be the
/// same view as an input where a verb says "in place".
pub trait Backend: Sized + 'static {
    /// Opaque buffer handle; cloning clones the handle.
    type Buf: Clone + fmt::Debug;
    /// Weight matrix `[d_out, d_in]`, typed at load; a vector is one row.
    type Weight: fmt::Debug;
    /// Recording.
    type Pass: Pass<Buf = Self::Buf>;
    /// Slot memory.
    type Slab: Slab;

    // At open only.

    /// Submissions that may be unfinished while the host goes on; 0 if verbs are eager.
    fn submissions_in_flight(&self) -> usize;

    /// Bytes of scratch that [`Self::prepare`] takes for these limits.
    fn scratch_bytes(&self, limits: &Limits) -> usize;

    /// Reserves scratch for every later call within `limits`.
    fn prepare(&self, limits: &Limits);

    /// `len` elements. Contents are unspecified (NaN where that is free).
    fn alloc(&self, len: usize, ty: BufType) -> Self::Buf;

    /// Memory for a matrix `[d_out, d_in]`, to be filled by [`Self::fill_weight`].
    fn alloc_weight(&self, encoding: Encoding, d_out: usize, d_in: usize) -> Self::Weight;

    /// Whole encoded rows from `first_row` on.
    fn fill_weight(&self, weight: &mut Self::Weight, first_row: usize, rows: &[u8]);

    /// Slots, filled with 0xFF bytes (NaN) where that is free.
    fn alloc_slab(&self, slot_bytes: usize, slots: u32) -> Self::Slab;

    /// Records used where they lie; `None` where this machine cannot.
    fn adopt_slab(&self, records: Arc<dyn HostRecords>) -> Option<Self::Slab>;

    /// An empty recording.
    fn begin(&self) -> Self::Pass;

    // State.

    /// Fills elements with zero, for reset.
    fn clear(&self, p: &mut Self::Pass, buf: &Self::Buf, range: Range<usize>);

    /// Host to device: `buf[offset..] = data`, rounded to the buffer's type.
    fn write(&self, p: &mut Self::Pass, buf: &Self::Buf, offset: usize, data: &[f32]);

    /// Within one buffer, for copy on write: `buf[to..][..len] = buf[from..][..len]`, disjoint.
    fn copy(&self, p: &mut Self::Pass, buf: &Self::Buf, from: usize, to: usize, len: usize);

    // Verbs.

    /// `out: [n, d] = table[token]`, `table: [n_vocab, d]`
    fn embed(
        &self,
        p: &mut Self::Pass,
        table: &Self::Weight,
        rows: &Rows,
        out: View<'_, Self::Buf>,
    );

    /// `out[t, h] = x[t, h] * rsqrt(mean(x[t, h]^2) + eps) * w`; `x, out: [n, heads, d]`;
    /// `w: [1, d]`. In place.
    #[expect(clippy::too_many_arguments, reason = "a verb names its operands")]
    fn rms_norm(
        &self,
        p: &mut Self::Pass,
        x: View<'_, Self::Buf>,
        w: &Self::Weight,
        heads: usize,
        eps: f32,
        n: usize,
        out: View<'_, Self::Buf>,
    );

    /// `x[t, h] *= factor * rsqrt(sum(x[t, h]^2) + eps)`; `x: [n, heads, d]`, with
    /// `shape = [heads, d]`.
    fn l2_norm(
        &self,
        p: &mut Self::Pass,
        x: View<'_, Self::Buf>,
        shape: [usize; 2],
        eps: f32,
        factor: f32,
        n: usize,
    );

    /// `out = x w^T`; `x: [n, d_in]; w: [d_out, d_in]; out: [n, d_out]`.
    ///
    /// Numerics: one chain over `d_in` for each output. Activations are rounded in blocks of 32
    /// first where the backend was opened so.
    fn linear(
        &self,
        p: &mut Self::Pass,
        x: View<'_, Self::Buf>,
        w: &Self::Weight,
        n: usize,
        out: View<'_, Self::Buf>,
    );

    /// `x += y`; `x, y: [n, width]`. `y` may be one row for all ([`View::row`]), a bias.
    fn add(
        &self,
        p: &mut Self::Pass,
        x: View<'_, Self::Buf>,
        y: View<'_, Self::Buf>,
        width: usize,
        n: usize,
    );

    /// `out = silu(gate) * up`, all `[n, width]`. `out` may be `gate` or `up`.
    fn swiglu(
        &self,
        p: &mut Self::Pass,
        gate: View<'_, Self::Buf>,
        up: View<'_, Self::Buf>,
        width: usize,
        n: usize,
        out: View<'_, Self::Buf>,
    );

    /// `x *= sigmoid(z)`; `x, z: [n, width]`
    fn sigmoid_gate(
        &self,
        p: &mut Self::Pass,
        x: View<'_, Self::Buf>,
        z: View<'_, Self::Buf>,
        width: usize,
        n: usize,
    );

    /// Angles of a step: `out: [n, 2, d/2]` = `scale * cos(position * f)`, then sines;
    /// `inv_freq: [1, d/2]` f32. The product is rounded to f32, as the published models do.
    fn rotary_table(
        &self,
        p: &mut Self::Pass,
        inv_freq: &Self::Weight,
        scale: f32,
        rows: &Rows,
        out: View<'_, Self::Buf>,
    );

    /// Rotates the first `d` of each head in place: `x: [n, heads, d_head]`, with
    /// `shape = [heads, d_head, d]`; `table: [n, 2, d/2]` from [`Self::rotary_table`].
    fn rope(
        &self,
        p: &mut Self::Pass,
        x: View<'_, Self::Buf>,
        shape: [usize; 3],
        table: View<'_, Self::Buf>,
        pairing: Pairing,
        n: usize,
    );

    /// Writes K and V of all rows into the caches, rounded to their type, then attends causally
    /// over the whole sequence. `out: [n, n_heads, d_head]`.
    ///
    /// Numerics: blocks of keys on absolute positions, ascending.
    fn attention(
        &self,
        p: &mut Self::Pass,
        args: &Attention<'_, Self::Buf>,
        rows: &Rows,
        out: View<'_, Self::Buf>,
    );

    /// Depthwise causal convolution, then `silu`:
    /// `out[t, c] = silu(sum_k w[c, k] * x[t-K+1+k, c])`;
    /// `x, out: [n, C]; w: [C, K]`; `state: [n_fixed, K-1, C]` f32 holds the inputs of the last
    /// K-1 tokens, oldest first, and is moved on. Not in place.
    fn causal_conv(
        &self,
        p: &mut Self::Pass,
        x: View<'_, Self::Buf>,
        w: &Self::Weight,
        state: &Self::Buf,
        rows: &Rows,
        out: View<'_, Self::Buf>,
    );

    /// `decay = exp(-exp(a_log) * softplus(a + dt_bias))`, `beta = sigmoid(b)`, in place:
    /// `a: [n, heads]` becomes the decay, `b: [n, heads]` becomes beta; `w = [a_log, dt_bias]`,
    /// each `[1, heads]`.
    fn delta_gate(
        &self,
        p: &mut Self::Pass,
        a: View<'_, Self::Buf>,
        b: View<'_, Self::Buf>,
        w: [&Self::Weight; 2],
        n: usize,
    );

    /// Gated delta rule, in token order, for each value head with state `S: [d_key, d_value]`:
    /// `S *= decay; m = S^T k; S += k (x) (beta * (v - m)); out = S^T q`.
    /// `out: [n, n_value_heads, d_value]`.
    fn delta_step(
        &self,
        p: &mut Self::Pass,
        args: &DeltaStep<'_, Self::Buf>,
        rows: &Rows,
        out: View<'_, Self::Buf>,
    );

    /// `x[t, h] = x[t, h] * rsqrt(mean(x[t, h]^2) + eps) * w * gate(z[t, h])`, in place;
    /// `x, z: [n, heads, d]; w: [1, d]`.
    #[expect(clippy::too_many_arguments, reason = "a verb names its operands")]
    fn gated_norm(
        &self,
        p: &mut Self::Pass,
        x: View<'_, Self::Buf>,
        z: View<'_, Self::Buf>,
        w: &Self::Weight,
        heads: usize,
        eps: f32,
        gate: Gate,
        n: usize,
    );

    /// Chooses experts: `logits: [n, n_experts]`, with `shape = [n_experts, top_k]`. The choices of
    /// a row are in descending weight; equal weights: the lower index first. `scratch`: ids and
    /// weights, `[n, top_k]` each, from open.
    fn route(
        &self,
        p: &mut Self::Pass,
        logits: View<'_, Self::Buf>,
        shape: [usize; 2],
        router: Router,
        n: usize,
        scratch: [&Self::Buf; 2],
    ) -> Routed<Self::Buf>;

    /// For each (row, choice) whose expert is among `experts`:
    /// `out[row, choice] = down(silu(gate x[row]) * up x[row])`; `out: [n, top_k, d_model]`.
    fn moe_ffn(
        &self,
        p: &mut Self::Pass,
        args: &MoeFfn<'_, Self>,
        experts: Experts<'_>,
        out: &Self::Buf,
    );

    /// `x += (sum over choices in ascending expert index of weight * parts) + shared`, then fills
    /// `parts` with NaN, so that a missing expert can never be a stale number.
    /// `x: [n, d]; parts: [n, top_k, d]`.
    fn moe_join(
        &self,
        p: &mut Self::Pass,
        routed: &Routed<Self::Buf>,
        parts: &Self::Buf,
        shared: Option<Shared<'_, Self::Buf>>,
        d: usize,
        x: View<'_, Self::Buf>,
    );

    /// `out[i] = x[rows.outputs()[first + i]]` for `i < n`; `x: [_, width]; out: [n, width]`.
    #[expect(clippy::too_many_arguments, reason = "a verb names its operands")]
    fn select_outputs(
        &self,
        p: &mut Self::Pass,
        x: View<'_, Self::Buf>,
        width: usize,
        rows: &Rows,
        first: usize,
        n: usize,
        out: View<'_, Self::Buf>,
    );
}
