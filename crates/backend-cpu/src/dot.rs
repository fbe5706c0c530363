//! Products of rows in f32: the register tiles under `linear` and the scores of attention.
//!
//! Every output is the chain of `canonical::dot`, whichever tile computes it.
#![allow(unsafe_code)]

use crate::simd::{Kernel, LANES, Registers, Simd};
use std::marker::PhantomData;

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

/// `R` weight rows times `N` rows of x.
#[inline(always)]
unsafe fn tile<S: Simd, E: Element, const R: usize, const N: usize>(
    s: S,
    w: WeightRows,
    x: [*const f32; N],
) -> [[f32; R]; N] {
    let mut acc = [[s.zero(); R]; N];
    let whole = w.d_in / LANES;
    let tail = w.d_in % LANES;
    let (mut last_w, mut last_x) = ([[0u8; LANES * 4]; R], [[0.0f32; LANES]; N]);
    let (mut at, mut stride, mut xs, mut steps) = (w.ptr, w.stride, x, whole);
    // First what is whole; then the tail, from copies that zeros complete.
    loop {
        for i in 0..steps {
            // SAFETY: the caller's rows have `d_in` elements, copies have 16.
            unsafe {
                let v: [S::V; N] = load_all(s, xs, i);
                for r in 0..R {
                    let w = E::load(s, at.add(r * stride + i * LANES * E::BYTES));
                    for j in 0..N {
                        acc[j][r] = s.fma(w, v[j], acc[j][r]);
                    }
                }
            }
        }
        if tail == 0 || stride == LANES * 4 && at == last_w.as_ptr().cast() {
            break;
        }
        // SAFETY: `tail` elements of every row are left.
        unsafe {
            for (r, last) in last_w.iter_mut().enumerate() {
                let from = w.ptr.add(r * w.stride + whole * LANES * E::BYTES);
                std::ptr::copy_nonoverlapping(from, last.as_mut_ptr(), tail * E::BYTES);
            }
            for (x, last) in x.iter().zip(&mut last_x) {
                let from = x.add(whole * LANES).cast::<u8>();
                std::ptr::copy_nonoverlapping(from, last.as_mut_ptr().cast(), tail * 4);
            }
        }
        (at, stride, steps) = (last_w.as_ptr().cast(), LANES * 4, 1);
        xs = std::array::from_fn(|j| last_x[j].as_ptr());
    }
    let mut out = [[0.0; R]; N];
    for j in 0..N {
        for r in 0..R {
            out[j][r] = s.fold_add(acc[j][r]);
        }
    }
    out
}

/// The `i`-th sixteen of each row.
#[inline(always)]
unsafe fn load_all<S: Simd, const N: usize>(s: S, x: [*const f32; N], i: usize) -> [S::V; N] {
    let mut all = [s.zero(); N];
    for j in 0..N {
        // SAFETY: as the caller promises.
        all[j] = unsafe { s.load(x[j].add(i * LANES)) };
    }
    all
}

/// All of `w` times `N` rows of x, `R` rows of weights at a time.
#[inline(always)]
unsafe fn strip<S: Simd, E: Element, const R: usize, const N: usize>(
    s: S,
    w: WeightRows,
    x: &[*const f32],
    out: &[*mut f32],
) {
    let xs: [*const f32; N] = std::array::from_fn(|j| x[j]);
    let mut r = 0;
    // SAFETY: rows from `r` on exist, `R` of them in the first loop.
    unsafe {
        while r + R <= w.count {
            let rest = WeightRows { ptr: w.ptr.add(r * w.stride), ..w };
            let sums = tile::<S, E, R, N>(s, rest, xs);
            for j in 0..N {
                out[j].add(r).cast::<[f32; R]>().write_unaligned(sums[j]);
            }
            r += R;
        }
        while r < w.count {
            let rest = WeightRows { ptr: w.ptr.add(r * w.stride), ..w };
            for j in 0..N {
                out[j].add(r).write(tile::<S, E, 1, 1>(s, rest, [xs[j]])[0][0]);
            }
            r += 1;
        }
    }
}

/// `out[j][r] = w[r] . x[j]` for all rows of both; `x` and `out` are equally long.
#[derive(Debug)]
pub(crate) struct Products<'a, E> {
    pub(crate) w: WeightRows,
    /// Rows of `d_in`.
    pub(crate) x: &'a [*const f32],
    /// Rows with room for one element of each row of `w`.
    pub(crate) out: &'a [*mut f32],
    pub(crate) element: PhantomData<E>,
}

impl<E: Element> Kernel for Products<'_, E> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { w, mut x, mut out, .. } = self;
        assert!(x.len() == out.len(), "{} rows of x, {} of out", x.len(), out.len());
        // SAFETY: whoever made it has checked rows and bounds.
        unsafe {
            if S::REGISTERS == Registers::Many {
                while x.len() >= 4 {
                    strip::<S, E, 4, 4>(s, w, x, out);
                    (x, out) = (&x[4..], &out[4..]);
                }
            }
            if S::REGISTERS == Registers::Some {
                while x.len() >= 2 {
                    strip::<S, E, 3, 2>(s, w, x, out);
                    (x, out) = (&x[2..], &out[2..]);
                }
            }
            while !x.is_empty() {
                if S::REGISTERS == Registers::None {
                    strip::<S, E, 1, 1>(s, w, x, out);
                } else {
                    strip::<S, E, 4, 1>(s, w, x, out);
                }
                (x, out) = (&x[1..], &out[1..]);
            }
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
