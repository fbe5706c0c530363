//! Verbs that carry a state from token to token: convolution and the gated delta rule.
#![allow(unsafe_code)]

use crate::math::silu;
use crate::simd::{Kernel, LANES, Simd};
use crate::view::Mat;
use snowmelt_backend::Rows;
use std::ops::Range;

/// Depthwise causal convolution for some channels of all rows.
///
/// **Numerics.** One chain of fused multiply-adds over the kernel, oldest input first.
#[derive(Clone, Debug)]
pub(crate) struct Conv<'a> {
    pub(crate) x: Mat,
    pub(crate) out: Mat,
    /// `[K, C]`
    pub(crate) w: &'a [f32],
    /// `[n_fixed, D * (K - 1), C]`, dense.
    pub(crate) state: Mat,
    pub(crate) channels: usize,
    /// K.
    pub(crate) taps: usize,
    /// D.
    pub(crate) dilation: usize,
    pub(crate) rows: &'a Rows,
    /// Sixteens of channels.
    pub(crate) chunks: Range<usize>,
}

impl Kernel for Conv<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for chunk in self.chunks.clone() {
            let c = chunk * LANES;
            let n = LANES.min(self.channels - c);
            for sequence in self.rows.sequences() {
                let fixed = sequence.fixed as usize;
                // SAFETY: the verb has checked rows, state and kernel.
                unsafe { self.sequence(s, c, n, fixed, sequence.rows.clone()) };
            }
        }
    }
}

impl Conv<'_> {
    /// Tokens that the state holds.
    #[inline(always)]
    fn kept(&self) -> usize {
        self.dilation * (self.taps - 1)
    }

    /// Input `age` tokens after the oldest one that the state holds.
    #[inline(always)]
    fn input(&self, c: usize, fixed: usize, first: usize, age: usize) -> *mut f32 {
        let kept = self.kept();
        if age < kept {
            self.state.at(fixed * kept + age, c)
        } else {
            self.x.at(first + age - kept, c)
        }
    }

    #[inline(always)]
    unsafe fn sequence<S: Simd>(&self, s: S, c: usize, n: usize, fixed: usize, rows: Range<usize>) {
        let w = self.w.as_ptr();
        for (i, t) in rows.clone().enumerate() {
            let mut acc = s.zero();
            // SAFETY: `n` channels from `c` on in every operand.
            unsafe {
                for k in 0..self.taps {
                    let input = self.input(c, fixed, rows.start, i + self.dilation * k);
                    let x = s.load_part(input, n);
                    acc = s.fma(s.load_part(w.add(k * self.channels + c), n), x, acc);
                }
                s.store_part(self.out.at(t, c), n, silu(s, acc));
            }
        }
        // What moves down comes from a later place: ascending order overwrites nothing needed.
        for kept in 0..self.kept() {
            // SAFETY: as above.
            unsafe {
                let x = s.load_part(self.input(c, fixed, rows.start, rows.len() + kept), n);
                s.store_part(self.state.at(fixed * self.kept() + kept, c), n, x);
            }
        }
    }
}

/// Columns of a state that pass through all tokens together: they stay in the first-level cache.
const COLUMNS: usize = 4 * LANES;

/// Gated delta rule for some columns of some heads.
///
/// **Numerics.** Columns of a state never meet: each is a chain of its own. For a token, rows `i`
/// of the key ascending: `d = S * decay` is rounded, `m = fma(k, d, m)`; then `u = beta * (v - m)`;
/// then `S = fma(k, u, d)` and `out = fma(q, S, out)`.
#[derive(Clone, Debug)]
pub(crate) struct Delta<'a> {
    pub(crate) q: Mat,
    pub(crate) k: Mat,
    pub(crate) v: Mat,
    pub(crate) decay: Mat,
    pub(crate) beta: Mat,
    pub(crate) out: Mat,
    /// `[n_fixed * n_value_heads * d_key, d_value]`, dense.
    pub(crate) state: Mat,
    pub(crate) n_key_heads: usize,
    pub(crate) n_value_heads: usize,
    pub(crate) d_key: usize,
    pub(crate) d_value: usize,
    pub(crate) rows: &'a Rows,
    /// (head, columns, sequence), head first.
    pub(crate) items: Range<usize>,
}

/// Pieces of a state's columns: whole ones of [`COLUMNS`], then sixteens.
pub(crate) fn column_pieces(d_value: usize) -> usize {
    d_value / COLUMNS + (d_value % COLUMNS).div_ceil(LANES)
}

/// First column of a piece and how many there are.
fn column_piece(d_value: usize, piece: usize) -> (usize, usize) {
    let whole = d_value / COLUMNS;
    if piece < whole {
        return (piece * COLUMNS, COLUMNS);
    }
    let first = whole * COLUMNS + (piece - whole) * LANES;
    (first, LANES.min(d_value - first))
}

impl Kernel for Delta<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let sequences = self.rows.sequences().len();
        let pieces = column_pieces(self.d_value);
        for item in self.items.clone() {
            let (head, rest) = (item / (pieces * sequences), item % (pieces * sequences));
            let (piece, sequence) = (rest / sequences, rest % sequences);
            let (first, count) = column_piece(self.d_value, piece);
            // SAFETY: the verb has checked all operands for these rows, heads and columns.
            unsafe {
                if count == COLUMNS {
                    self.columns::<S, 4>(s, head, sequence, [first, LANES]);
                } else {
                    self.columns::<S, 1>(s, head, sequence, [first, count]);
                }
            }
        }
    }
}

impl Delta<'_> {
    /// `C` vectors of columns, the only one being `n` wide where `C` is 1.
    #[inline(always)]
    unsafe fn columns<S: Simd, const C: usize>(
        &self,
        s: S,
        head: usize,
        sequence: usize,
        [first, n]: [usize; 2],
    ) {
        let sequence = &self.rows.sequences()[sequence];
        let d = self.d_key;
        let key = head / (self.n_value_heads / self.n_key_heads) * d;
        let column = head * self.d_value + first;
        let state_row = (sequence.fixed as usize * self.n_value_heads + head) * d;
        for t in sequence.rows.clone() {
            let (mut m, mut out) = ([s.zero(); C], [s.zero(); C]);
            // SAFETY: as the caller promises.
            unsafe {
                let (q, k) = (self.q.at(t, key), self.k.at(t, key));
                let decay = s.splat(*self.decay.at(t, head));
                for i in 0..d {
                    let k = s.splat(*k.add(i));
                    let row = self.state.at(state_row + i, first);
                    for c in 0..C {
                        let d = s.mul(s.load_part(row.add(c * LANES), n), decay);
                        m[c] = s.fma(k, d, m[c]);
                    }
                }
                let beta = s.splat(*self.beta.at(t, head));
                let mut u = m;
                for c in 0..C {
                    let v = s.load_part(self.v.at(t, column + c * LANES), n);
                    u[c] = s.mul(beta, s.sub(v, m[c]));
                }
                for i in 0..d {
                    let (k, q) = (s.splat(*k.add(i)), s.splat(*q.add(i)));
                    let row = self.state.at(state_row + i, first);
                    for c in 0..C {
                        let d = s.mul(s.load_part(row.add(c * LANES), n), decay);
                        let new = s.fma(k, u[c], d);
                        s.store_part(row.add(c * LANES), n, new);
                        out[c] = s.fma(q, new, out[c]);
                    }
                }
                for c in 0..C {
                    s.store_part(self.out.at(t, column + c * LANES), n, out[c]);
                }
            }
        }
    }
}
