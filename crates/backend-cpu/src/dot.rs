//! Products of rows in f32: the register tiles under `linear` and the scores of attention.
//!
//! Every output is the chain of `canonical::dot`, whichever tile computes it.
#![allow(unsafe_code)]

use crate::simd::{LANES, Simd};

/// How the elements of a row are stored; no alignment is assumed.
pub(crate) trait Element: 'static {
    /// Bytes of one.
    const BYTES: usize;
    /// Sixteen of them.
    unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::V;
    /// Sixteen of them, from f32, rounded to nearest even.
    unsafe fn store<S: Simd>(s: S, p: *mut u8, a: S::V);

    /// The first `n`, zeros after them.
    #[inline(always)]
    unsafe fn load_part<S: Simd>(s: S, p: *const u8, n: usize) -> S::V {
        if n == LANES {
            // SAFETY: the caller has sixteen elements there.
            return unsafe { Self::load(s, p) };
        }
        let mut bytes = [0u8; LANES * 4];
        // SAFETY: the caller has `n <= 16` elements there.
        unsafe {
            std::ptr::copy_nonoverlapping(p, bytes.as_mut_ptr(), n * Self::BYTES);
            Self::load(s, bytes.as_ptr())
        }
    }

    /// The first `n`.
    #[inline(always)]
    unsafe fn store_part<S: Simd>(s: S, p: *mut u8, n: usize, a: S::V) {
        if n == LANES {
            // SAFETY: the caller has room for sixteen elements there.
            return unsafe { Self::store(s, p, a) };
        }
        let mut bytes = [0u8; LANES * 4];
        // SAFETY: the caller has `n <= 16` elements there.
        unsafe {
            Self::store(s, bytes.as_mut_ptr(), a);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), p, n * Self::BYTES);
        }
    }
}

/// f32.
#[derive(Debug)]
pub(crate) struct Single;
/// f16.
#[derive(Debug)]
pub(crate) struct Half;
/// bf16.
#[derive(Debug)]
pub(crate) struct Brain;

impl Element for Single {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::V {
        // SAFETY: as the caller promises; loads need no alignment.
        unsafe { s.load(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, p: *mut u8, a: S::V) {
        // SAFETY: as the caller promises; stores need no alignment.
        unsafe { s.store(p.cast(), a) }
    }
}

impl Element for Half {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::V {
        // SAFETY: as the caller promises.
        unsafe { s.load_f16(p) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, p: *mut u8, a: S::V) {
        // SAFETY: as the caller promises.
        unsafe { s.store_f16(p, a) }
    }
}

impl Element for Brain {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::V {
        // SAFETY: as the caller promises.
        unsafe { s.load_bf16(p) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, p: *mut u8, a: S::V) {
        // SAFETY: as the caller promises.
        unsafe { s.store_bf16(p, a) }
    }
}

/// Rows of weights (or keys) by pointer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WeightRows {
    pub(crate) ptr: *const u8,
    /// Bytes from one row to the next.
    pub(crate) stride: usize,
    /// Rows.
    pub(crate) count: usize,
    /// Elements of a row.
    pub(crate) d_in: usize,
}

/// Adds the next sixteen elements, or the `n` that are left, to every chain of a tile.
#[inline(always)]
unsafe fn step<S: Simd, E: Element, const R: usize, const N: usize, const PART: bool>(
    s: S,
    w: WeightRows,
    x: [*const f32; N],
    at: [usize; 2],
    acc: &mut [[S::V; R]; N],
) {
    let [i, n] = at;
    let mut xs = [s.zero(); N];
    for j in 0..N {
        // SAFETY: the caller's rows have `i + n` elements, `n` being 16 unless `PART`.
        xs[j] = unsafe { if PART { s.load_part(x[j].add(i), n) } else { s.load(x[j].add(i)) } };
    }
    for r in 0..R {
        // SAFETY: as above, for `R` rows.
        let v = unsafe {
            let p = w.ptr.add(r * w.stride + i * E::BYTES);
            if PART { E::load_part(s, p, n) } else { E::load(s, p) }
        };
        for j in 0..N {
            acc[j][r] = s.fma(v, xs[j], acc[j][r]);
        }
    }
}

/// `R` weight rows times `N` rows of x.
#[inline(always)]
unsafe fn tile<S: Simd, E: Element, const R: usize, const N: usize>(
    s: S,
    w: WeightRows,
    x: [*const f32; N],
) -> [[f32; R]; N] {
    let mut acc = [[s.zero(); R]; N];
    let whole = w.d_in / LANES * LANES;
    let mut i = 0;
    while i < whole {
        // SAFETY: the caller's rows have `d_in` elements.
        unsafe { step::<S, E, R, N, false>(s, w, x, [i, LANES], &mut acc) };
        i += LANES;
    }
    if i < w.d_in {
        // SAFETY: as above.
        unsafe { step::<S, E, R, N, true>(s, w, x, [i, w.d_in - i], &mut acc) };
    }
    let mut out = [[0.0; R]; N];
    for j in 0..N {
        for r in 0..R {
            out[j][r] = s.fold_add(acc[j][r]);
        }
    }
    out
}

/// All of `w` times `N` rows of x, `R` rows of weights at a time.
#[inline(always)]
unsafe fn strip<S: Simd, E: Element, const R: usize, const N: usize>(
    s: S,
    w: WeightRows,
    x: [*const f32; N],
    out: [*mut f32; N],
) {
    let mut r = 0;
    while r < w.count {
        // SAFETY: row `r` exists, and `R` from there where they do.
        unsafe {
            let rest = WeightRows { ptr: w.ptr.add(r * w.stride), ..w };
            if r + R <= w.count {
                let sums = tile::<S, E, R, N>(s, rest, x);
                for j in 0..N {
                    out[j].add(r).cast::<[f32; R]>().write_unaligned(sums[j]);
                }
                r += R;
            } else {
                let sums = tile::<S, E, 1, N>(s, rest, x);
                for j in 0..N {
                    out[j].add(r).write(sums[j][0]);
                }
                r += 1;
            }
        }
    }
}

/// `out[j][r] = w[r] . x[j]` for all rows of both.
///
/// # Safety
/// `x` and `out` are equally long; each x has `d_in` elements, each out room for `count`.
#[inline(always)]
pub(crate) unsafe fn products<S: Simd, E: Element>(
    s: S,
    w: WeightRows,
    x: &[*const f32],
    out: &[*mut f32],
) {
    let mut j = 0;
    // SAFETY: as the caller promises; `j` stays inside both slices.
    unsafe {
        if S::MANY_REGISTERS {
            while j + 4 <= x.len() {
                let (xs, outs) = (std::array::from_fn(|i| x[j + i]), std::array::from_fn(|i| out[j + i]));
                strip::<S, E, 4, 4>(s, w, xs, outs);
                j += 4;
            }
        } else {
            while j + 2 <= x.len() {
                strip::<S, E, 3, 2>(s, w, [x[j], x[j + 1]], [out[j], out[j + 1]]);
                j += 2;
            }
        }
        while j < x.len() {
            strip::<S, E, 4, 1>(s, w, [x[j]], [out[j]]);
            j += 1;
        }
    }
}

/// One product of f32 rows.
///
/// # Safety
/// Both have `d` elements.
#[inline(always)]
pub(crate) unsafe fn product<S: Simd>(s: S, a: *const f32, b: *const f32, d: usize) -> f32 {
    let w = WeightRows { ptr: a.cast(), stride: 0, count: 1, d_in: d };
    // SAFETY: as the caller promises.
    unsafe { tile::<S, Single, 1, 1>(s, w, [b])[0][0] }
}
