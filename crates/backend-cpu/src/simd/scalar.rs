//! Arrays in place of vectors: the definition that the others are tested against.
#![allow(unsafe_code)]

use super::{LANES, Registers, Simd};
use half::{bf16, f16};

/// No vector instructions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scalar;

type V = [f32; LANES];

#[inline(always)]
fn map(a: V, f: impl Fn(f32) -> f32) -> V {
    a.map(f)
}

#[inline(always)]
fn zip<const N: usize>(a: [f32; N], b: [f32; N], f: impl Fn(f32, f32) -> f32) -> [f32; N] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

#[inline(always)]
fn fold(mut a: V, f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            a[i] = f(a[i], a[i + width]);
        }
        width /= 2;
    }
    a[0]
}

#[inline(always)]
fn greater(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits(((n + 127) as u32) << 23)
}

/// Elements of `N` bytes from `p`.
#[inline(always)]
unsafe fn read<T: Copy, const N: usize>(p: *const T) -> [T; N] {
    // SAFETY: the caller has `N` elements there.
    unsafe { p.cast::<[T; N]>().read_unaligned() }
}

impl Simd for Scalar {
    type V = V;
    type H = [f32; 8];
    type Q4 = [i8; 64];
    type Q8Wide = [i8; 64];
    type Q8Narrow = [i8; 64];
    type Sums = [i32; 2];
    const REGISTERS: Registers = Registers::None;

    #[inline(always)]
    fn splat(self, a: f32) -> V {
        [a; LANES]
    }
    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        zip(a, b, greater)
    }
    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn abs(self, a: V) -> V {
        map(a, f32::abs)
    }
    #[inline(always)]
    fn round(self, a: V) -> V {
        map(a, f32::round_ties_even)
    }
    #[inline(always)]
    fn ldexp(self, p: V, n: V) -> V {
        zip(p, n, |p, n| {
            // Where `p` is NaN, `n` is too, and any power will do.
            let n = (n as i32).clamp(-252, 254);
            p * power_of_two(n >> 1) * power_of_two(n - (n >> 1))
        })
    }
    #[inline(always)]
    fn fold_add(self, a: V) -> f32 {
        fold(a, |a, b| a + b)
    }
    #[inline(always)]
    fn fold_max(self, a: V) -> f32 {
        fold(a, greater)
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> V {
        // SAFETY: as the caller promises.
        unsafe { read(p) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, a: V) {
        // SAFETY: as the caller promises.
        unsafe { p.cast::<V>().write_unaligned(a) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u8) -> V {
        // SAFETY: as the caller promises.
        let bytes: [[u8; 2]; LANES] = unsafe { read(p.cast()) };
        bytes.map(|b| f16::from_le_bytes(b).to_f32())
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8) -> V {
        // SAFETY: as the caller promises.
        let bytes: [[u8; 2]; LANES] = unsafe { read(p.cast()) };
        bytes.map(|b| bf16::from_le_bytes(b).to_f32())
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u8, a: V) {
        let bytes = a.map(|a| f16::from_f32(a).to_le_bytes());
        // SAFETY: as the caller promises.
        unsafe { p.cast::<[[u8; 2]; LANES]>().write_unaligned(bytes) }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u8, a: V) {
        let bytes = a.map(|a| bf16::from_f32(a).to_le_bytes());
        // SAFETY: as the caller promises.
        unsafe { p.cast::<[[u8; 2]; LANES]>().write_unaligned(bytes) }
    }
    #[inline(always)]
    unsafe fn load_u4(self, p: *const u8) -> V {
        // SAFETY: as the caller promises.
        let bytes: [u8; 8] = unsafe { read(p) };
        std::array::from_fn(|i| f32::from(bytes[i / 2] >> (4 * (i % 2)) & 15))
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const u8) -> V {
        // SAFETY: as the caller promises.
        let bytes: [i8; LANES] = unsafe { read(p.cast()) };
        bytes.map(f32::from)
    }
    #[inline(always)]
    unsafe fn store_i32(self, p: *mut i32, a: V) {
        let integers = a.map(|a| a.round_ties_even() as i32);
        // SAFETY: as the caller promises.
        unsafe { p.cast::<[i32; LANES]>().write_unaligned(integers) }
    }

    #[inline(always)]
    fn h_splat(self, a: f32) -> [f32; 8] {
        [a; 8]
    }
    #[inline(always)]
    fn h_add(self, a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn h_mul(self, a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn h_fma(self, a: [f32; 8], b: [f32; 8], c: [f32; 8]) -> [f32; 8] {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    unsafe fn h_load(self, p: *const f32) -> [f32; 8] {
        // SAFETY: as the caller promises.
        unsafe { read(p) }
    }
    #[inline(always)]
    unsafe fn h_store(self, p: *mut f32, a: [f32; 8]) {
        // SAFETY: as the caller promises.
        unsafe { p.cast::<[f32; 8]>().write_unaligned(a) }
    }

    #[inline(always)]
    fn sums_zero(self) -> [i32; 2] {
        [0; 2]
    }
    #[inline(always)]
    fn reduce(self, rows: &[[i32; 2]; 8]) -> [[f32; 8]; 2] {
        [rows.map(|sums| sums[0] as f32), rows.map(|sums| sums[1] as f32)]
    }
    #[inline(always)]
    unsafe fn q4(self, p: *const u8) -> [i8; 64] {
        // SAFETY: as the caller promises.
        let bytes: [u8; 32] = unsafe { read(p) };
        std::array::from_fn(|i| (bytes[i % 32] >> (4 * (i / 32)) & 15).cast_signed())
    }
    #[inline(always)]
    unsafe fn q8_wide(self, p: *const u8) -> [i8; 64] {
        // SAFETY: as the caller promises.
        unsafe { read(p.cast()) }
    }
    #[inline(always)]
    unsafe fn q8_narrow(self, p: *const u8) -> [i8; 64] {
        // SAFETY: as the caller promises.
        unsafe { read(p.cast()) }
    }
    #[inline(always)]
    unsafe fn q4_wide_dot(self, codes: [i8; 64], x: *const u8) -> [i32; 2] {
        // SAFETY: as the caller promises.
        let [high, low]: [[i8; 64]; 2] = unsafe { read(x.cast()) };
        halves(codes, |i| 256 * i32::from(high[i]) + i32::from(low[i]))
    }
    #[inline(always)]
    unsafe fn q4_narrow_dot(self, codes: [i8; 64], x: *const u8) -> [i32; 2] {
        // SAFETY: as the caller promises.
        let x: [i8; 64] = unsafe { read(x.cast()) };
        halves(codes, |i| i32::from(x[i]))
    }
    #[inline(always)]
    unsafe fn q8_wide_dot(self, codes: [i8; 64], x: *const u8) -> [i32; 2] {
        // SAFETY: as the caller promises.
        let x: [[[u8; 2]; 32]; 2] = unsafe { read(x.cast()) };
        let mut sums = [0; 2];
        for (i, code) in codes.iter().enumerate() {
            let block = &x[i / 32];
            let x = i16::from_ne_bytes(block[i % 32 / 2 + 16 * (i % 2)]);
            sums[i / 32] += i32::from(*code) * i32::from(x);
        }
        sums
    }
    #[inline(always)]
    unsafe fn q8_narrow_dot(self, codes: [i8; 64], x: *const u8) -> [i32; 2] {
        // SAFETY: as the caller promises.
        let x: [i8; 64] = unsafe { read(x.cast()) };
        let mut sums = [0; 2];
        for (i, (code, x)) in codes.iter().zip(x).enumerate() {
            sums[i / 32] += i32::from(*code) * i32::from(x);
        }
        sums
    }
    #[inline(always)]
    fn prefetch(self, _: *const u8) {}
}

/// Sums of two blocks whose even elements come before the odd ones of both.
#[inline(always)]
fn halves(codes: [i8; 64], x: impl Fn(usize) -> i32) -> [i32; 2] {
    let mut sums = [0; 2];
    for (i, code) in codes.iter().enumerate() {
        sums[i % 32 / 16] += i32::from(*code) * x(i);
    }
    sums
}
