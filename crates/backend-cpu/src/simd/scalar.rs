//! Arrays in place of vectors: the definition that the others are tested against.
#![allow(unsafe_code)]

use super::{LANES, Simd};
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
    type Wide = [i16; 32];
    type Narrow = [i8; 32];
    type Sums = i32;
    const MANY_REGISTERS: bool = false;

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
    fn sums_zero(self) -> i32 {
        0
    }
    #[inline(always)]
    fn reduce(self, rows: &[i32; 8]) -> [f32; 8] {
        rows.map(|sum| sum as f32)
    }
    #[inline(always)]
    unsafe fn wide_q4(self, p: *const u8) -> [i16; 32] {
        // SAFETY: as the caller promises.
        let bytes: [u8; 16] = unsafe { read(p) };
        std::array::from_fn(|i| i16::from(bytes[i % 16] >> (4 * (i / 16)) & 15))
    }
    #[inline(always)]
    unsafe fn wide_q8(self, p: *const u8) -> [i16; 32] {
        // SAFETY: as the caller promises.
        let codes: [i8; 32] = unsafe { read(p.cast()) };
        std::array::from_fn(|i| i16::from(codes[i % 16 * 2 + i / 16]))
    }
    #[inline(always)]
    unsafe fn wide_dot(self, codes: [i16; 32], x: *const i16) -> i32 {
        // SAFETY: as the caller promises.
        let x: [i16; 32] = unsafe { read(x) };
        codes.iter().zip(x).map(|(c, x)| i32::from(*c) * i32::from(x)).sum()
    }
    #[inline(always)]
    unsafe fn narrow_q4(self, p: *const u8) -> [i8; 32] {
        // SAFETY: as the caller promises.
        let bytes: [u8; 16] = unsafe { read(p) };
        std::array::from_fn(|i| (bytes[i / 2] >> (4 * (i % 2)) & 15).cast_signed())
    }
    #[inline(always)]
    unsafe fn narrow_q8(self, p: *const u8) -> [i8; 32] {
        // SAFETY: as the caller promises.
        unsafe { read(p.cast()) }
    }
    #[inline(always)]
    unsafe fn narrow_dot_q4(self, codes: [i8; 32], x: *const i8) -> i32 {
        // SAFETY: as the caller promises.
        let x: [i8; 32] = unsafe { read(x) };
        codes.iter().zip(x).map(|(c, x)| i32::from(*c) * i32::from(x)).sum()
    }
    #[inline(always)]
    unsafe fn narrow_dot_q8(self, codes: [i8; 32], x: *const i8) -> i32 {
        // SAFETY: as the caller promises.
        unsafe { self.narrow_dot_q4(codes, x) }
    }
}
