//! The verbs and the types in their signatures.

use crate::fetch::{Ready, Routes, StepError};
use crate::layout::ExpertLayout;
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

    /// Elements of row `t`, `width` wide, in the buffer.
    pub fn elements(&self, t: usize, width: usize) -> Range<usize> {
        let first = self.offset + t * self.stride;
        first..first + width
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
    /// Width of the keys of an indexer that pools them; 0 for none.
    pub d_index: usize,
    /// Tokens of an indexer's block; 0 where there is no indexer.
    pub index_ratio: usize,
}

/// How pairs of a rotary embedding lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// `(i, i + d/2)`, as GPT-NeoX.
    Half,
    /// `(2i, 2i + 1)`, as GPT-J.
    Adjacent,
}

/// The function of a gate, which multiplies another value: `f(gate) * up`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Glu {
    /// `z * sigmoid(z)`
    Silu,
    /// `sigmoid(z)`
    Sigmoid,
    /// `0.5 z (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3)))`
    GeluTanh,
    /// `g sigmoid(alpha g) * (u + 1)` with `g = min(gate, limit)`, `u = clamp(up, -limit, limit)`:
    /// the only one that also changes `up`.
    Clamped {
        /// Factor within the sigmoid.
        alpha: f32,
        /// Bound of gate and up.
        limit: f32,
    },
}

/// A function of one value, for [`Backend::activate`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Unary {
    /// `factor * x`
    Scale(f32),
    /// `silu(factor * x)`
    Silu(f32),
    /// `cap * tanh(x / cap)`
    Softcap(f32),
}

/// What a norm divides by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spread {
    /// `sqrt(mean(x^2) + eps)`
    MeanSquare,
    /// `sqrt(sum(x^2) + eps)`
    SumSquare,
    /// `sqrt(mean((x - mean(x))^2) + eps)`, after subtracting the mean.
    Variance,
}

/// Arguments of [`Backend::norm`]: `out[t, h] = factor * x[t, h] / spread * w + bias`, and then
/// times `f(gate[t, h])`.
#[derive(Debug)]
pub struct Norm<'a, W, Buf> {
    /// The divisor.
    pub spread: Spread,
    /// `[1, d]` for all heads, or `[1, heads * d]`; none: ones.
    pub w: Option<&'a W>,
    /// As `w`; none: zeros.
    pub bias: Option<&'a W>,
    /// `[n, heads, d]`; [`Glu::Silu`] or [`Glu::Sigmoid`].
    pub gate: Option<(View<'a, Buf>, Glu)>,
    /// Parts of a row that are normed on their own.
    pub heads: usize,
    /// Width of a part.
    pub d: usize,
    /// Added to the square.
    pub eps: f32,
    /// Factor of all.
    pub factor: f32,
}

impl<'a, W, Buf> Norm<'a, W, Buf> {
    /// Root mean square norm (arXiv 1910.07467) of `shape = [heads, d]`.
    pub fn rms(w: Option<&'a W>, [heads, d]: [usize; 2], eps: f32) -> Self {
        let spread = Spread::MeanSquare;
        Self { spread, w, bias: None, gate: None, heads, d, eps, factor: 1.0 }
    }

    /// Euclidean norm of `shape = [heads, d]`, then times `factor`.
    pub fn l2([heads, d]: [usize; 2], eps: f32, factor: f32) -> Self {
        let spread = Spread::SumSquare;
        Self { spread, w: None, bias: None, gate: None, heads, d, eps, factor }
    }

    /// Layer norm (arXiv 1607.06450) of whole rows of `d`.
    pub fn layer(w: &'a W, bias: &'a W, d: usize, eps: f32) -> Self {
        let (spread, w, bias) = (Spread::Variance, Some(w), Some(bias));
        Self { spread, w, bias, gate: None, heads: 1, d, eps, factor: 1.0 }
    }

    /// The same, gated afterwards.
    #[must_use]
    pub fn gated(self, z: View<'a, Buf>, f: Glu) -> Self {
        Self { gate: Some((z, f)), ..self }
    }
}

/// What a router makes of its logits before it chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scores {
    /// Softmax over all experts in f32.
    Softmax,
    /// Sigmoid of each.
    Sigmoid,
    /// The logits choose; weights are the softmax over the chosen ones alone.
    SoftmaxOfChosen,
}

/// Groups of experts, of which the best are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    /// Groups of equal size; the score of one is the sum of its two greatest choices.
    pub count: usize,
    /// Groups that are kept: lower index first among equals.
    pub kept: usize,
}

/// How a router turns logits into choices and weights.
#[derive(Debug)]
pub struct Router<'a, W> {
    /// Experts.
    pub n_experts: usize,
    /// Choices a row.
    pub top_k: usize,
    /// What logits become.
    pub scores: Scores,
    /// `[1, n_experts]`, added to the scores for the choice alone.
    pub choice_bias: Option<&'a W>,
    /// Limits the choice to the best groups.
    pub groups: Option<Groups>,
    /// Divide the chosen weights by their sum plus this.
    pub renormalise: Option<f32>,
    /// Factor of the weights at the end.
    pub factor: f32,
    /// `[1, n_experts]`: factor of each expert's weight at the end.
    pub expert_factor: Option<&'a W>,
}

impl<W> Router<'_, W> {
    /// Softmax over all, the greatest chosen; `renormalise`: divided by their sum.
    pub fn softmax([n_experts, top_k]: [usize; 2], renormalise: bool) -> Self {
        Self {
            n_experts,
            top_k,
            scores: Scores::Softmax,
            choice_bias: None,
            groups: None,
            renormalise: renormalise.then_some(0.0),
            factor: 1.0,
            expert_factor: None,
        }
    }
}

impl<W> Clone for Router<'_, W> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<W> Copy for Router<'_, W> {}

/// Arguments of [`Backend::attention`].
#[derive(Debug)]
pub struct Attention<'a, W, Buf> {
    /// `[n, n_heads, d_key]`
    pub q: View<'a, Buf>,
    /// `[n, n_kv_heads, d_key]`; none: the cache holds these rows already.
    pub k: Option<View<'a, Buf>>,
    /// `[n, n_kv_heads, d_value]`; none: as `k`, or values are part of the keys.
    pub v: Option<View<'a, Buf>>,
    /// `[n_pages, PAGE_TOKENS, n_kv_heads * d_key]`
    pub k_cache: &'a Buf,
    /// `[n_pages, PAGE_TOKENS, n_kv_heads * d_value]`; none: the values are the first `d_value`
    /// elements of each key.
    pub v_cache: Option<&'a Buf>,
    /// Query heads; a multiple of `n_kv_heads`. Head `h` reads KV head
    /// `h / (n_heads / n_kv_heads)`.
    pub n_heads: usize,
    /// Key and value heads.
    pub n_kv_heads: usize,
    /// Width of a query or key head.
    pub d_key: usize,
    /// Width of a value head.
    pub d_value: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// Tokens that a query sees, itself among them; none: all.
    pub window: Option<usize>,
    /// `[1, n_heads]`: a score of each head that takes part in the softmax and has no value.
    pub sinks: Option<&'a W>,
    /// Tokens that each query sees; none: all.
    pub selection: Option<&'a Selection<Buf>>,
}

/// How block keys are made from keys of tokens, for [`IndexSelect`].
#[derive(Debug)]
pub struct Pool<'a, W> {
    /// Tokens of a block; its key is their mean, in f32.
    pub ratio: usize,
    /// `[1, d]`: weight of the root mean square norm of block keys.
    pub norm: &'a W,
    /// Its epsilon.
    pub eps: f32,
    /// `[1, r/2]`: frequencies of the rotation at the position of the block's first token, of its
    /// first `r` elements, paired in halves.
    pub inv_freq: &'a W,
    /// Factor of cosines and sines.
    pub rotary_scale: f32,
}

/// Arguments of [`Backend::index_select`].
#[derive(Debug)]
pub struct IndexSelect<'a, W, Buf> {
    /// `[n, n_heads, d]`
    pub q: View<'a, Buf>,
    /// `[n, d]`
    pub k: View<'a, Buf>,
    /// `[n_pages, PAGE_TOKENS, d]`
    pub k_cache: &'a Buf,
    /// `[n, n_heads]`: factors of the heads; none: ones.
    pub weights: Option<View<'a, Buf>>,
    /// Heads of q.
    pub n_heads: usize,
    /// Width of a head.
    pub d: usize,
    /// Factor of the products, before the maximum with 0.
    pub scale: f32,
    /// Factor of the sum over heads.
    pub sum_scale: f32,
    /// Blocks of tokens; none: tokens are chosen one by one.
    pub pool: Option<Pool<'a, W>>,
    /// Most blocks that a row chooses.
    pub top: usize,
    /// `[n, 1 + top]`, from open.
    pub ids: &'a Buf,
}

/// Tokens that [`Backend::index_select`] chose; they stay on the device.
#[derive(Clone, Debug)]
pub struct Selection<Buf> {
    /// `[n, 1 + top]` u32 bits in f32 elements: a count, then block indices, ascending.
    pub ids: Buf,
    /// Most blocks of a row.
    pub top: usize,
    /// Tokens of a block. A row also sees what lies past its last complete block.
    pub ratio: usize,
}

/// Arguments of [`Backend::linear_heads`]: rows `h * stride + first..` of a matrix belong to head
/// `h`.
#[derive(Clone, Copy, Debug)]
pub struct HeadRows {
    /// Heads.
    pub heads: usize,
    /// Rows from one head to the next.
    pub stride: usize,
    /// First row within a head's.
    pub first: usize,
    /// Rows.
    pub rows: usize,
    /// Elements of x from one head to the next.
    pub x_head: usize,
    /// Elements of out from one head to the next.
    pub out_head: usize,
    /// Multiply with the transposed rows.
    pub transposed: bool,
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
    /// Bytes of a record, of one region that is not empty of one of its matrices
    /// ([`MatrixLayout::regions`](crate::MatrixLayout::regions)). No alignment is promised.
    fn bytes(&self, slot: u32, range: Range<usize>) -> &[u8];
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

    /// Norms parts of rows, see [`Norm`]; `x, out: [n, heads, d]`. In place.
    fn norm(
        &self,
        p: &mut Self::Pass,
        x: View<'_, Self::Buf>,
        norm: &Norm<'_, Self::Weight, Self::Buf>,
        n: usize,
        out: View<'_, Self::Buf>,
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

    /// A product for each head, see [`HeadRows`]; `w: [_, d_in]`. Plain:
    /// `out[t, h] = w_h x[t, h]`, `x: [n, heads, d_in]; out: [n, heads, rows]`. Transposed:
    /// `out[t, h] = w_h^T x[t, h]`, `x: [n, heads, rows]; out: [n, heads, d_in]`.
    ///
    /// Numerics: activations are never rounded. Plain: as [`Self::linear`]. Transposed: one chain
    /// over the rows.
    fn linear_heads(
        &self,
        p: &mut Self::Pass,
        x: View<'_, Self::Buf>,
        w: &Self::Weight,
        heads: &HeadRows,
        n: usize,
        out: View<'_, Self::Buf>,
    );

    /// `out[t, h] = x[t, h]`, with `shape = [heads, x_head, out_head, width]`: elements from one
    /// head to the next in both, and how many are copied.
    fn copy_heads(
        &self,
        p: &mut Self::Pass,
        x: View<'_, Self::Buf>,
        shape: [usize; 4],
        n: usize,
        out: View<'_, Self::Buf>,
    );

    /// `out = f(gate) * up`, all `[n, width]`. `out` may be `gate` or `up`.
    #[expect(clippy::too_many_arguments, reason = "a verb names its operands")]
    fn glu(
        &self,
        p: &mut Self::Pass,
        f: Glu,
        gate: View<'_, Self::Buf>,
        up: View<'_, Self::Buf>,
        width: usize,
        n: usize,
        out: View<'_, Self::Buf>,
    );

    /// `x = f(x)`; `x: [n, width]`
    fn activate(
        &self,
        p: &mut Self::Pass,
        f: Unary,
        x: View<'_, Self::Buf>,
        width: usize,
        n: usize,
    );

    /// `out = mean over streams of sigmoid(gate[c]) * x[c]`, with `shape = [streams, d]`;
    /// `x, gate: [n, streams, d]; out: [n, d]`.
    fn stream_mix(
        &self,
        p: &mut Self::Pass,
        x: View<'_, Self::Buf>,
        gate: View<'_, Self::Buf>,
        shape: [usize; 2],
        n: usize,
        out: View<'_, Self::Buf>,
    );

    /// `x[c] += 2 sigmoid(inject[c] / streams) * y`, with `shape = [streams, d]`;
    /// `x: [n, streams, d]; y: [n, d]; inject: [n, streams]`. Without `inject` the factor is 1.
    fn stream_join(
        &self,
        p: &mut Self::Pass,
        x: View<'_, Self::Buf>,
        y: View<'_, Self::Buf>,
        inject: Option<View<'_, Self::Buf>>,
        shape: [usize; 2],
        n: usize,
    );

    /// `out[c] = sigmoid(sign(s) sqrt(max(|s|, 1e-6))) * value` with
    /// `s = key[c] . query[c] / sqrt(d)`, and `shape = [streams, d]`;
    /// `key, query, out: [n, streams, d]; value: [n, d]`.
    #[expect(clippy::too_many_arguments, reason = "a verb names its operands")]
    fn row_gate(
        &self,
        p: &mut Self::Pass,
        key: View<'_, Self::Buf>,
        query: View<'_, Self::Buf>,
        value: View<'_, Self::Buf>,
        shape: [usize; 2],
        n: usize,
        out: View<'_, Self::Buf>,
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

    /// Rotates `d` elements of each head, from `first` on, in place: `x: [n, heads, d_head]`, with
    /// `shape = [heads, d_head, first, d]`; `table: [n, 2, d/2]` from [`Self::rotary_table`].
    fn rope(
        &self,
        p: &mut Self::Pass,
        x: View<'_, Self::Buf>,
        shape: [usize; 4],
        table: View<'_, Self::Buf>,
        pairing: Pairing,
        n: usize,
    );

    /// Writes K and V of all rows into the caches, rounded to their type, then attends causally
    /// over what each row sees of its sequence. `out: [n, n_heads, d_value]`.
    ///
    /// Numerics: blocks of keys on absolute positions, ascending; what a row does not see takes no
    /// part, so a selection of everything gives the same bits as none.
    fn attention(
        &self,
        p: &mut Self::Pass,
        args: &Attention<'_, Self::Weight, Self::Buf>,
        rows: &Rows,
        out: View<'_, Self::Buf>,
    );

    /// Writes keys of all rows into the cache, then chooses for each row, of the complete blocks
    /// among the tokens up to itself, the `top` with the greatest
    /// `sum_scale * sum over heads of weights[h] * max(0, scale * q[h] . key)`; equal ones: the
    /// lower index first. Fewer blocks: all of them.
    fn index_select(
        &self,
        p: &mut Self::Pass,
        args: &IndexSelect<'_, Self::Weight, Self::Buf>,
        rows: &Rows,
    ) -> Selection<Self::Buf>;

    /// Depthwise causal convolution, then `silu`, with dilation `D`:
    /// `out[t, c] = silu(sum_k w[c, k] * x[t-D*(K-1-k), c])`;
    /// `x, out: [n, C]; w: [C, K]`; `state: [n_fixed, D*(K-1), C]` f32 holds the inputs of the last
    /// tokens, oldest first, and is moved on. Not in place.
    #[expect(clippy::too_many_arguments, reason = "a verb names its operands")]
    fn causal_conv(
        &self,
        p: &mut Self::Pass,
        x: View<'_, Self::Buf>,
        w: &Self::Weight,
        dilation: usize,
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

    /// Chooses experts: `logits: [n, n_experts]`. The choices of a row are in descending order of
    /// what they were chosen by; equals: the lower index first. `scratch`: ids and weights,
    /// `[n, top_k]` each, from open.
    fn route(
        &self,
        p: &mut Self::Pass,
        logits: View<'_, Self::Buf>,
        router: &Router<'_, Self::Weight>,
        n: usize,
        scratch: [&Self::Buf; 2],
    ) -> Routed<Self::Buf>;

    /// For each (row, choice) whose expert is among `experts`:
    /// `out[row, choice] = down(f(gate x[row]) * up x[row])`, each product with its bias;
    /// `out: [n, top_k, d_model]`. How a matrix lies in its record changes no bit.
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
