//! The vector types that every kernel is written over, once for each instruction set.
//!
//! A value of a [`Simd`] type is a token: it exists only where the instructions were found, so
//! arithmetic on it is safe; only loads and stores through pointers are not. Methods and kernels
//! are `inline(always)` and compiled inside the `target_feature` function of [`dispatch`].
#![allow(unsafe_code)]

mod scalar;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;

use crate::isa::Isa;
pub(crate) use scalar::Scalar;

/// Lanes of a vector, on every machine.
pub(crate) const LANES: usize = 16;

/// One scale (or bias) for each of 8 weight rows, for up to 8 groups of theirs.
pub(crate) type Params = [[f32; 8]; 8];

/// What the registers hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Registers {
    /// There are none: larger tiles only make more code.
    None,
    /// Six accumulators of sixteen lanes.
    Some,
    /// Sixteen accumulators of sixteen lanes.
    Many,
}

/// Sixteen lanes of f32, eight lanes for eight weight rows, and exact integer dot products.
///
/// Every method is one IEEE operation in each lane, or exact, so all implementations agree in
/// every bit (NaN payloads apart).
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// Sixteen f32.
    type V: Copy;
    /// Eight f32, one for each row of a tile of quantised weights.
    type H: Copy;
    /// 64 nibbles of a weight row: even elements, then odd ones.
    type Q4: Copy;
    /// 64 signed bytes of a weight row, as i16 activations want them.
    type Q8Wide: Copy;
    /// 64 signed bytes of a weight row, as i8 activations want them.
    type Q8Narrow: Copy;
    /// Partial sums of two blocks of 32; exact, so how they are split is free.
    type Sums: Copy;
    /// How many rows it pays to compute together.
    const REGISTERS: Registers;

    fn splat(self, a: f32) -> Self::V;
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a > b ? a : b`, so `b` where one is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a < b ? a : b`, so `b` where one is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    fn abs(self, a: Self::V) -> Self::V;
    /// To the nearest integer, halves to even.
    fn round(self, a: Self::V) -> Self::V;
    /// `p * 2^n` for integral `n` in -252..=254, in two multiplications by powers of two.
    fn ldexp(self, p: Self::V, n: Self::V) -> Self::V;
    /// Sum of lanes: 16 to 8 (lane i and i + 8), to 4, to 2, to 1.
    fn fold_add(self, a: Self::V) -> f32;
    /// Greatest lane, in the same tree.
    fn fold_max(self, a: Self::V) -> f32;

    unsafe fn load(self, p: *const f32) -> Self::V;
    unsafe fn store(self, p: *mut f32, a: Self::V);
    /// 16 f16, no alignment.
    unsafe fn load_f16(self, p: *const u8) -> Self::V;
    /// 16 bf16, no alignment.
    unsafe fn load_bf16(self, p: *const u8) -> Self::V;
    unsafe fn store_f16(self, p: *mut u8, a: Self::V);
    unsafe fn store_bf16(self, p: *mut u8, a: Self::V);
    /// 16 nibbles from 8 bytes, low ones first.
    unsafe fn load_u4(self, p: *const u8) -> Self::V;
    /// 16 signed bytes.
    unsafe fn load_i8(self, p: *const u8) -> Self::V;
    /// Rounds to nearest even; the values fit.
    unsafe fn store_i32(self, p: *mut i32, a: Self::V);

    fn h_splat(self, a: f32) -> Self::H;
    fn h_add(self, a: Self::H, b: Self::H) -> Self::H;
    fn h_mul(self, a: Self::H, b: Self::H) -> Self::H;
    fn h_fma(self, a: Self::H, b: Self::H, c: Self::H) -> Self::H;
    unsafe fn h_load(self, p: *const f32) -> Self::H;
    unsafe fn h_store(self, p: *mut f32, a: Self::H);

    fn sums_zero(self) -> Self::Sums;
    /// Eight rows' sums of either block, added up and converted to f32 (to nearest even).
    fn reduce(self, rows: &[Self::Sums; 8]) -> [Self::H; 2];
    /// From 32 bytes.
    unsafe fn q4(self, p: *const u8) -> Self::Q4;
    /// From 64 bytes.
    unsafe fn q8_wide(self, p: *const u8) -> Self::Q8Wide;
    /// From 64 bytes.
    unsafe fn q8_narrow(self, p: *const u8) -> Self::Q8Narrow;
    /// `x`: 128 bytes in [`CodeLayout::WideQ4`](crate::quantise::CodeLayout).
    unsafe fn q4_wide_dot(self, codes: Self::Q4, x: *const u8) -> Self::Sums;
    /// `x`: 64 bytes in [`CodeLayout::NarrowQ4`](crate::quantise::CodeLayout).
    unsafe fn q4_narrow_dot(self, codes: Self::Q4, x: *const u8) -> Self::Sums;
    /// `x`: 128 bytes in [`CodeLayout::WideQ8`](crate::quantise::CodeLayout).
    unsafe fn q8_wide_dot(self, codes: Self::Q8Wide, x: *const u8) -> Self::Sums;
    /// `x`: 64 bytes in [`CodeLayout::NarrowQ8`](crate::quantise::CodeLayout).
    unsafe fn q8_narrow_dot(self, codes: Self::Q8Narrow, x: *const u8) -> Self::Sums;
    /// Asks for the line at `p`, which need not exist.
    fn prefetch(self, p: *const u8);

    /// `count <= 8` adjacent bf16 of each row, transposed: `out[group][row]`.
    #[inline(always)]
    unsafe fn params(self, rows: &[*const u8; 8], count: usize, out: &mut Params) {
        // SAFETY: the caller has `count` bf16 in each row.
        unsafe { params(rows, count, out) }
    }

    #[inline(always)]
    fn zero(self) -> Self::V {
        self.splat(0.0)
    }

    /// The first `n <= 16` elements, zeros after them.
    #[inline(always)]
    unsafe fn load_part(self, p: *const f32, n: usize) -> Self::V {
        if n == LANES {
            // SAFETY: the caller has sixteen elements there.
            return unsafe { self.load(p) };
        }
        let mut lanes = [0.0f32; LANES];
        // SAFETY: the caller has `n` elements there.
        unsafe {
            std::ptr::copy_nonoverlapping(p.cast::<u8>(), lanes.as_mut_ptr().cast(), n * 4);
            self.load(lanes.as_ptr())
        }
    }

    /// Stores the first `n <= 16` lanes.
    #[inline(always)]
    unsafe fn store_part(self, p: *mut f32, n: usize, a: Self::V) {
        if n == LANES {
            // SAFETY: the caller has room for sixteen elements there.
            return unsafe { self.store(p, a) };
        }
        let mut lanes = [0.0f32; LANES];
        // SAFETY: the caller has `n` elements there.
        unsafe {
            self.store(lanes.as_mut_ptr(), a);
            std::ptr::copy_nonoverlapping(lanes.as_ptr().cast::<u8>(), p.cast(), n * 4);
        }
    }
}

/// The plain form of [`Simd::params`].
#[inline(always)]
unsafe fn params(rows: &[*const u8; 8], count: usize, out: &mut Params) {
    for (r, row) in rows.iter().enumerate() {
        for (g, group) in out.iter_mut().enumerate().take(count) {
            // SAFETY: the caller has `count` bf16 in each row.
            let bits = unsafe { row.add(2 * g).cast::<u16>().read_unaligned() };
            group[r] = f32::from_bits(u32::from(bits) << 16);
        }
    }
}

/// Work compiled once for each instruction set. `run` is `inline(always)`, as is all it calls.
pub(crate) trait Kernel {
    /// Whether it forms integer products, so that VNNI makes a difference.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "VNNI is of x86"))]
    const INTEGERS: bool = false;

    /// Does the work.
    fn run<S: Simd>(self, s: S);
}

/// Runs the kernel with the instructions of `isa`, which [`Isa::resolve`] has found present.
pub(crate) fn dispatch<K: Kernel>(isa: Isa, kernel: K) {
    match isa {
        Isa::Scalar => kernel.run(Scalar),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Isa` other than scalar comes from detection alone.
        Isa::Avx2 => unsafe { avx2::enter(kernel) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512 => unsafe { avx512::enter(kernel) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512Vnni => unsafe {
            if K::INTEGERS { avx512::enter_vnni(kernel) } else { avx512::enter(kernel) }
        },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: as above.
        Isa::Neon => unsafe { neon::enter(kernel) },
        #[allow(unreachable_patterns, reason = "depends on the architecture")]
        other => unreachable!("{other} is not of this architecture"),
    }
}
