//! Memory that verbs work in, reserved at open.
#![allow(unsafe_code)]

use crate::attention::HEADS;
use crate::canonical::BLOCK;
use crate::linear::FLOAT_ROWS;
use crate::memory::Memory;
use crate::quantise::{Quantised, Rounding};
use crate::route::scratch_floats;
use crate::view::Mat;
use snowmelt_backend::{Limits, PAGE_TOKENS};
use std::ops::Range;

/// Most (row, choice) pairs that pass through an expert's inner width at a time. More are done in
/// several goes: by then weights are read seldom enough.
pub(crate) const PAIRS: usize = 2048;

/// What scratch must hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) rows: usize,
    pub(crate) d_in: usize,
    pub(crate) choices: usize,
    pub(crate) d_expert: usize,
    pub(crate) experts: usize,
    /// f32 of block keys.
    pub(crate) pooled: usize,
    /// f32 of each thread.
    pub(crate) thread: usize,
}

impl Sizes {
    pub(crate) fn of(limits: &Limits) -> Self {
        let d_in = limits.d_in.max(limits.d_expert).max(limits.d_model);
        let blocks = limits.context_tokens.checked_div(limits.index_ratio).unwrap_or(0);
        let thread = thread_floats(d_in, limits.d_head, limits.n_experts, limits.top_k);
        Self {
            rows: limits.rows,
            d_in,
            choices: limits.rows * limits.top_k,
            d_expert: limits.d_expert,
            experts: limits.n_experts,
            pooled: blocks * limits.d_index,
            thread: thread.max(index_floats(blocks, limits.d_index)),
        }
    }

    fn max(self, other: Self) -> Self {
        Self {
            rows: self.rows.max(other.rows),
            d_in: self.d_in.max(other.d_in),
            choices: self.choices.max(other.choices),
            d_expert: self.d_expert.max(other.d_expert),
            experts: self.experts.max(other.experts),
            pooled: self.pooled.max(other.pooled),
            thread: self.thread.max(other.thread),
        }
    }
}

/// f32 that one thread needs: rows of decoded weights, or sums of heads, or what a router works
/// in, or an order of choices.
pub(crate) fn thread_floats(d_in: usize, d_head: usize, experts: usize, top_k: usize) -> usize {
    (FLOAT_ROWS * d_in).max(HEADS * d_head).max(scratch_floats(experts)).max(top_k)
}

/// f32 that one thread needs of `index_select`: scores of blocks, then their order; or the angles
/// of a block key of `d_index`.
pub(crate) fn index_floats(blocks: usize, d_index: usize) -> usize {
    (2 * blocks.next_multiple_of(PAGE_TOKENS)).max(d_index)
}

/// Where each region begins, in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Plan {
    x: [usize; 4],
    x_floats: usize,
    inner: [usize; 4],
    gate: usize,
    up: usize,
    expert_index: usize,
    starts: usize,
    rows: usize,
    pair_rows: usize,
    pair_outs: usize,
    pooled: usize,
    threads: usize,
    thread_bytes: usize,
    total: usize,
}

impl Plan {
    fn of(sizes: &Sizes, threads: usize) -> Self {
        let mut plan = Self::default();
        let mut take = |bytes: usize| {
            let at = plan.total;
            plan.total += bytes.next_multiple_of(64);
            at
        };
        let pairs = sizes.choices.min(PAIRS);
        let mut rounded = |rows: usize, width: usize| {
            let pairs = rows * width.div_ceil(2 * BLOCK);
            [pairs * Rounding::Wide.pair_bytes(), pairs * 8, pairs * 8, pairs * 4].map(&mut take)
        };
        let x = rounded(sizes.rows, sizes.d_in);
        let inner = rounded(pairs, sizes.d_expert);
        let x_floats = take(4 * sizes.rows * sizes.d_in);
        let gate = take(4 * pairs * sizes.d_expert);
        let up = take(4 * pairs * sizes.d_expert);
        let expert_index = take(4 * sizes.experts);
        let starts = take(4 * (sizes.experts + 1));
        let rows = take(4 * sizes.rows);
        let pair_rows = take(4 * sizes.choices);
        let pair_outs = take(4 * sizes.choices);
        let pooled = take(4 * sizes.pooled);
        let thread_bytes = (4 * sizes.thread).next_multiple_of(64);
        let threads = take(threads * thread_bytes);
        Self {
            x,
            x_floats,
            inner,
            gate,
            up,
            expert_index,
            starts,
            rows,
            pair_rows,
            pair_outs,
            pooled,
            threads,
            thread_bytes,
            total: plan.total,
        }
    }
}

/// One run of memory, cut up by what was asked for. Untouched parts cost nothing.
#[derive(Debug)]
pub(crate) struct Scratch {
    threads: usize,
    sizes: Sizes,
    plan: Plan,
    memory: Memory,
}

impl Scratch {
    pub(crate) fn new(threads: usize) -> Self {
        let plan = Plan::of(&Sizes::default(), threads);
        Self { threads, sizes: Sizes::default(), plan, memory: Memory::zeroed(plan.total, false) }
    }

    /// Bytes for these sizes.
    pub(crate) fn bytes(sizes: &Sizes, threads: usize) -> usize {
        Plan::of(sizes, threads).total
    }

    /// Makes room; allocates only beyond what was reserved before.
    pub(crate) fn reserve(&mut self, sizes: Sizes) {
        let wanted = self.sizes.max(sizes);
        if wanted != self.sizes {
            self.sizes = wanted;
            self.plan = Plan::of(&wanted, self.threads);
            self.memory = Memory::zeroed(self.plan.total, false);
        }
    }

    /// Bytes taken.
    pub(crate) fn taken(&self) -> usize {
        self.memory.bytes()
    }

    fn at<T>(&self, offset: usize) -> *mut T {
        self.memory.ptr().wrapping_add(offset).cast()
    }

    fn rounded(&self, regions: [usize; 4], width: usize) -> Quantised {
        Quantised {
            codes: self.at(regions[0]),
            scales: self.at(regions[1]),
            sums: self.at(regions[2]),
            pair_sums: self.at(regions[3]),
            blocks: width / BLOCK,
        }
    }

    /// Rounded rows of x.
    pub(crate) fn x(&self, width: usize) -> Quantised {
        self.rounded(self.plan.x, width)
    }

    /// Rows of x rounded and returned to f32.
    pub(crate) fn x_floats(&self, width: usize) -> Mat {
        Mat { ptr: self.at(self.plan.x_floats), stride: width }
    }

    /// Rounded inner rows of experts, by pair.
    pub(crate) fn inner(&self, width: usize) -> Quantised {
        self.rounded(self.plan.inner, width)
    }

    /// Inner rows of experts: those of `gate`, then of `up`.
    pub(crate) fn gate_up(&self, width: usize) -> [Mat; 2] {
        [self.plan.gate, self.plan.up].map(|at| Mat { ptr: self.at(at), stride: width })
    }

    /// The lists of `moe_ffn`.
    pub(crate) fn lists(&mut self) -> Lists<'_> {
        let (experts, choices) = (self.sizes.experts, self.sizes.choices);
        let (plan, p) = (self.plan, &*self);
        // SAFETY: disjoint regions of that many u32, borrowed mutably through `self`.
        unsafe {
            let list = |at, n| std::slice::from_raw_parts_mut(p.at::<u32>(at), n);
            Lists {
                expert_index: list(plan.expert_index, experts),
                starts: list(plan.starts, experts + 1),
                rows: list(plan.rows, self.sizes.rows),
                pair_rows: list(plan.pair_rows, choices),
                pair_outs: list(plan.pair_outs, choices),
            }
        }
    }

    /// Keys of blocks.
    pub(crate) fn pooled(&self) -> *mut f32 {
        self.at(self.plan.pooled)
    }

    /// Memory of every thread.
    pub(crate) fn thread_areas(&self) -> ThreadAreas {
        ThreadAreas { first: self.at(self.plan.threads), bytes: self.plan.thread_bytes }
    }
}

/// Who wants what, in one `moe_ffn`.
#[derive(Debug)]
pub(crate) struct Lists<'a> {
    /// Position among the ready experts of each expert, plus one; 0: absent.
    pub(crate) expert_index: &'a mut [u32],
    /// Where the pairs of each ready expert begin.
    pub(crate) starts: &'a mut [u32],
    /// Rows that are in any pair, ascending.
    pub(crate) rows: &'a mut [u32],
    /// Row of x of each pair.
    pub(crate) pair_rows: &'a mut [u32],
    /// Row of out of each pair.
    pub(crate) pair_outs: &'a mut [u32],
}

impl Lists<'_> {
    /// Pairs of ready expert `index` that lie in `window`.
    pub(crate) fn pairs(&self, index: usize, window: &Range<usize>) -> Range<usize> {
        let [from, to] = [self.starts[index] as usize, self.starts[index + 1] as usize];
        from.max(window.start)..to.min(window.end).max(from.max(window.start))
    }
}

/// Each thread's own memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ThreadAreas {
    first: *mut u8,
    bytes: usize,
}

// SAFETY: a pointer; each thread uses its own area.
unsafe impl Send for ThreadAreas {}
// SAFETY: as above.
unsafe impl Sync for ThreadAreas {}

impl ThreadAreas {
    /// The area of one thread.
    pub(crate) fn of(&self, thread: usize) -> *mut f32 {
        self.first.wrapping_add(thread * self.bytes).cast()
    }
}
