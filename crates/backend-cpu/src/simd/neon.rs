//! NEON, which every aarch64 has: four registers for sixteen lanes.
#![allow(unsafe_code)]
#![allow(clippy::wildcard_imports, reason = "a prefix names the intrinsics")]

use super::{Kernel, LANES, Registers, Simd};
use half::f16;
use std::arch::aarch64::*;
use std::arch::asm;

/// Token of NEON.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Neon(());

/// Runs a kernel.
///
/// # Safety
/// The machine has NEON.
#[target_feature(enable = "neon")]
pub(super) unsafe fn enter<K: Kernel>(kernel: K) {
    kernel.run(Neon(()));
}

macro_rules! simd {
    ($($body:tt)*) => {{
        // SAFETY: the target promises NEON; pointers are as the caller promises.
        #[allow(unused_unsafe, reason = "some intrinsics are safe where NEON is the baseline")]
        unsafe { $($body)* }
    }};
}

/// The same operation on each register.
macro_rules! each {
    ($op:ident, $($a:expr),+) => { simd!(std::array::from_fn(|i| $op($($a[i]),+))) };
}

type V = [float32x4_t; 4];
type H = [float32x4_t; 2];

#[inline(always)]
unsafe fn greater(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    simd!(vbslq_f32(vcgtq_f32(a, b), a, b))
}

#[inline(always)]
unsafe fn less(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    simd!(vbslq_f32(vcltq_f32(a, b), a, b))
}

#[inline(always)]
unsafe fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
    simd!(vfmaq_f32(c, a, b))
}

#[inline(always)]
unsafe fn power_of_two(n: int32x4_t) -> float32x4_t {
    simd!(vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(n, vdupq_n_s32(127)))))
}

#[inline(always)]
unsafe fn ldexp(p: float32x4_t, n: float32x4_t) -> float32x4_t {
    simd! {
        let n = vcvtnq_s32_f32(n);
        let half = vshrq_n_s32::<1>(n);
        let p = vmulq_f32(p, power_of_two(half));
        vmulq_f32(p, power_of_two(vsubq_s32(n, half)))
    }
}

/// Exact: exponents are moved by a multiplication, which also makes subnormals normal.
#[inline(always)]
unsafe fn from_f16(bits: uint16x4_t) -> float32x4_t {
    simd! {
        let bits = vmovl_u16(bits);
        let magnitude = vandq_u32(bits, vdupq_n_u32(0x7fff));
        let sign = vshlq_n_u32::<16>(vandq_u32(bits, vdupq_n_u32(0x8000)));
        let moved = vreinterpretq_f32_u32(vshlq_n_u32::<13>(magnitude));
        let scaled = vmulq_f32(moved, vreinterpretq_f32_u32(vdupq_n_u32((127 + 112) << 23)));
        let special = vcgeq_u32(magnitude, vdupq_n_u32(0x7c00));
        let exponent = vandq_u32(special, vdupq_n_u32(0x7f80_0000));
        let magnitude = vorrq_u32(vreinterpretq_u32_f32(scaled), exponent);
        vreinterpretq_f32_u32(vorrq_u32(magnitude, sign))
    }
}

/// The upper halves of four f32, rounded to nearest even.
#[inline(always)]
unsafe fn to_bf16(a: float32x4_t) -> uint16x4_t {
    simd! {
        let bits = vreinterpretq_u32_f32(a);
        let upper = vshrq_n_u32::<16>(bits);
        let up = vaddq_u32(vandq_u32(upper, vdupq_n_u32(1)), vdupq_n_u32(0x7fff));
        let rounded = vshrq_n_u32::<16>(vaddq_u32(bits, up));
        let quiet = vorrq_u32(upper, vdupq_n_u32(0x40));
        vmovn_u32(vbslq_u32(vceqq_f32(a, a), rounded, quiet))
    }
}

/// Sixteen signed bytes to f32.
#[inline(always)]
unsafe fn from_i8(bytes: int8x16_t) -> V {
    simd! {
        let (a, b) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
        [
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(a))),
            vcvtq_f32_s32(vmovl_high_s16(a)),
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(b))),
            vcvtq_f32_s32(vmovl_high_s16(b)),
        ]
    }
}

/// Products of two runs of sixteen bytes, added in pairs of i16: small enough for nibbles.
#[inline(always)]
unsafe fn nibbles(even: int8x16_t, odd: int8x16_t, x: *const i8) -> int32x4_t {
    simd! {
        // 4 * 15 * 128 fits in 16 bits.
        let (x_even, x_odd) = (vld1q_s8(x), vld1q_s8(x.add(32)));
        let sums = vmull_s8(vget_low_s8(even), vget_low_s8(x_even));
        let sums = vmlal_high_s8(sums, even, x_even);
        let sums = vmlal_s8(sums, vget_low_s8(odd), vget_low_s8(x_odd));
        vpaddlq_s16(vmlal_high_s8(sums, odd, x_odd))
    }
}

impl Simd for Neon {
    type V = V;
    type H = H;
    /// Even elements of either block, then odd ones.
    type Q4 = [int8x16_t; 4];
    /// For each block, even elements, then odd ones.
    type Q8Wide = [[int16x8_t; 4]; 2];
    type Q8Narrow = [int8x16_t; 4];
    type Sums = [int32x4_t; 2];
    const REGISTERS: Registers = Registers::Some;

    #[inline(always)]
    fn splat(self, a: f32) -> V {
        simd!([vdupq_n_f32(a); 4])
    }
    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        each!(vaddq_f32, a, b)
    }
    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        each!(vsubq_f32, a, b)
    }
    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        each!(vmulq_f32, a, b)
    }
    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        each!(vdivq_f32, a, b)
    }
    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        each!(fma, a, b, c)
    }
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        each!(greater, a, b)
    }
    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        each!(less, a, b)
    }
    #[inline(always)]
    fn abs(self, a: V) -> V {
        each!(vabsq_f32, a)
    }
    #[inline(always)]
    fn round(self, a: V) -> V {
        each!(vrndnq_f32, a)
    }
    #[inline(always)]
    fn ldexp(self, p: V, n: V) -> V {
        each!(ldexp, p, n)
    }
    #[inline(always)]
    fn fold_add(self, a: V) -> f32 {
        simd! {
            let a = vaddq_f32(vaddq_f32(a[0], a[2]), vaddq_f32(a[1], a[3]));
            let a = vadd_f32(vget_low_f32(a), vget_high_f32(a));
            vget_lane_f32::<0>(a) + vget_lane_f32::<1>(a)
        }
    }
    #[inline(always)]
    fn fold_max(self, a: V) -> f32 {
        simd! {
            let a = greater(greater(a[0], a[2]), greater(a[1], a[3]));
            let (low, high) = (vget_low_f32(a), vget_high_f32(a));
            let a = vbsl_f32(vcgt_f32(low, high), low, high);
            let (a, b) = (vget_lane_f32::<0>(a), vget_lane_f32::<1>(a));
            if a > b { a } else { b }
        }
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> V {
        simd!(std::array::from_fn(|i| vld1q_f32(p.add(4 * i))))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, a: V) {
        for (i, a) in a.into_iter().enumerate() {
            simd!(vst1q_f32(p.add(4 * i), a));
        }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u8) -> V {
        simd!(std::array::from_fn(|i| from_f16(vld1_u16(p.add(8 * i).cast()))))
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8) -> V {
        simd!(std::array::from_fn(|i| {
            let bits = vshll_n_u16::<16>(vld1_u16(p.add(8 * i).cast()));
            vreinterpretq_f32_u32(bits)
        }))
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u8, a: V) {
        let mut lanes = [0.0; LANES];
        simd! {
            self.store(lanes.as_mut_ptr(), a);
            p.cast::<[[u8; 2]; LANES]>().write(lanes.map(|a| f16::from_f32(a).to_le_bytes()));
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u8, a: V) {
        for (i, a) in a.into_iter().enumerate() {
            simd!(vst1_u16(p.add(8 * i).cast(), to_bf16(a)));
        }
    }
    #[inline(always)]
    unsafe fn load_u4(self, p: *const u8) -> V {
        simd! {
            let bytes = vld1_u8(p);
            let (low, high) = (vand_u8(bytes, vdup_n_u8(15)), vshr_n_u8::<4>(bytes));
            let codes = vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high));
            from_i8(vreinterpretq_s8_u8(codes))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const u8) -> V {
        simd!(from_i8(vld1q_s8(p.cast())))
    }
    #[inline(always)]
    unsafe fn store_i32(self, p: *mut i32, a: V) {
        for (i, a) in a.into_iter().enumerate() {
            simd!(vst1q_s32(p.add(4 * i), vcvtnq_s32_f32(a)));
        }
    }

    #[inline(always)]
    fn h_splat(self, a: f32) -> H {
        simd!([vdupq_n_f32(a); 2])
    }
    #[inline(always)]
    fn h_add(self, a: H, b: H) -> H {
        each!(vaddq_f32, a, b)
    }
    #[inline(always)]
    fn h_mul(self, a: H, b: H) -> H {
        each!(vmulq_f32, a, b)
    }
    #[inline(always)]
    fn h_fma(self, a: H, b: H, c: H) -> H {
        each!(fma, a, b, c)
    }
    #[inline(always)]
    unsafe fn h_load(self, p: *const f32) -> H {
        simd!([vld1q_f32(p), vld1q_f32(p.add(4))])
    }
    #[inline(always)]
    unsafe fn h_store(self, p: *mut f32, a: H) {
        simd! {
            vst1q_f32(p, a[0]);
            vst1q_f32(p.add(4), a[1]);
        }
    }

    #[inline(always)]
    fn sums_zero(self) -> [int32x4_t; 2] {
        simd!([vdupq_n_s32(0); 2])
    }
    #[inline(always)]
    fn reduce(self, rows: &[[int32x4_t; 2]; 8]) -> [H; 2] {
        simd!(std::array::from_fn(|b| {
            std::array::from_fn(|i| {
                let r = 4 * i;
                let low = vpaddq_s32(rows[r][b], rows[r + 1][b]);
                let high = vpaddq_s32(rows[r + 2][b], rows[r + 3][b]);
                vcvtq_f32_s32(vpaddq_s32(low, high))
            })
        }))
    }
    #[inline(always)]
    unsafe fn q4(self, p: *const u8) -> [int8x16_t; 4] {
        simd! {
            let (a, b, mask) = (vld1q_u8(p), vld1q_u8(p.add(16)), vdupq_n_u8(15));
            [vandq_u8(a, mask), vandq_u8(b, mask), vshrq_n_u8::<4>(a), vshrq_n_u8::<4>(b)]
                .map(|codes| vreinterpretq_s8_u8(codes))
        }
    }
    #[inline(always)]
    unsafe fn q8_wide(self, p: *const u8) -> [[int16x8_t; 4]; 2] {
        simd!(std::array::from_fn(|b| {
            let int8x16x2_t(even, odd) = vld2q_s8(p.add(32 * b).cast());
            [
                vmovl_s8(vget_low_s8(even)),
                vmovl_high_s8(even),
                vmovl_s8(vget_low_s8(odd)),
                vmovl_high_s8(odd),
            ]
        }))
    }
    #[inline(always)]
    unsafe fn q8_narrow(self, p: *const u8) -> [int8x16_t; 4] {
        simd!(std::array::from_fn(|i| vld1q_s8(p.add(16 * i).cast())))
    }
    #[inline(always)]
    unsafe fn q4_wide_dot(self, codes: [int8x16_t; 4], x: *const u8) -> [int32x4_t; 2] {
        simd!(std::array::from_fn(|b| {
            let x = x.cast::<i8>().add(16 * b);
            let high = nibbles(codes[b], codes[2 + b], x);
            let low = nibbles(codes[b], codes[2 + b], x.add(64));
            vaddq_s32(vshlq_n_s32::<8>(high), low)
        }))
    }
    #[inline(always)]
    unsafe fn q4_narrow_dot(self, codes: [int8x16_t; 4], x: *const u8) -> [int32x4_t; 2] {
        simd!(std::array::from_fn(|b| nibbles(codes[b], codes[2 + b], x.cast::<i8>().add(16 * b))))
    }
    #[inline(always)]
    unsafe fn q8_wide_dot(self, codes: [[int16x8_t; 4]; 2], x: *const u8) -> [int32x4_t; 2] {
        simd!(std::array::from_fn(|b| {
            let mut sums = vdupq_n_s32(0);
            for (i, codes) in codes[b].into_iter().enumerate() {
                let x = vld1q_s16(x.cast::<i16>().add(32 * b + 8 * i));
                sums = vmlal_s16(sums, vget_low_s16(codes), vget_low_s16(x));
                sums = vmlal_high_s16(sums, codes, x);
            }
            sums
        }))
    }
    #[inline(always)]
    unsafe fn q8_narrow_dot(self, codes: [int8x16_t; 4], x: *const u8) -> [int32x4_t; 2] {
        simd!(std::array::from_fn(|b| {
            let mut sums = vdupq_n_s32(0);
            for i in 2 * b..2 * b + 2 {
                let (codes, x) = (codes[i], vld1q_s8(x.cast::<i8>().add(16 * i)));
                sums = vpadalq_s16(sums, vmull_s8(vget_low_s8(codes), vget_low_s8(x)));
                sums = vpadalq_s16(sums, vmull_high_s8(codes, x));
            }
            sums
        }))
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        // SAFETY: a hint, which touches nothing.
        unsafe { asm!("prfm pldl1keep, [{}]", in(reg) p, options(nostack, preserves_flags)) };
    }
}
