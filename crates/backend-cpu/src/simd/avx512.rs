//! AVX-512: one register for sixteen lanes. Integer dots stay at 256 bits, since a block of 32
//! codes is no longer; VNNI adds them up where present.
#![allow(unsafe_code)]
#![allow(clippy::wildcard_imports, reason = "a prefix names the intrinsics")]

use super::{Kernel, Params, Registers, Simd, avx2};
use std::arch::x86_64::*;

/// Token of AVX-512 F, BW, VL and DQ, and of VNNI.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512<const VNNI: bool>(());

/// Runs a kernel.
///
/// # Safety
/// The machine has AVX-512 F, BW, VL and DQ, AVX2, FMA and F16C.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub(super) unsafe fn enter<K: Kernel>(kernel: K) {
    kernel.run(Avx512::<false>(()));
}

/// Runs a kernel.
///
/// # Safety
/// As [`enter`], and the machine has VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn enter_vnni<K: Kernel>(kernel: K) {
    kernel.run(Avx512::<true>(()));
}

macro_rules! simd {
    ($($body:tt)*) => {{
        // SAFETY: the token exists only inside its `enter`; pointers are as the caller promises.
        unsafe { $($body)* }
    }};
}

#[inline(always)]
unsafe fn power_of_two(n: __m512i) -> __m512 {
    simd!(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_add_epi32(n, _mm512_set1_epi32(127)))))
}

macro_rules! fold {
    ($a:expr, $wide:ident, $four:ident, $one:ident) => {
        simd! {
            let a = $a;
            let a = $wide(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
            let a = $four(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = $four(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32($one(a, _mm_shuffle_ps::<1>(a, a)))
        }
    };
}

/// Nibbles times 32 even bytes at `x` and 32 odd ones after them.
#[inline(always)]
unsafe fn pairs<const VNNI: bool>(codes: [__m256i; 2], x: *const u8) -> __m256i {
    simd! {
        let (even, odd) = (avx2::load(x, 0), avx2::load(x, 1));
        if VNNI {
            let sums = _mm256_dpbusd_epi32(_mm256_setzero_si256(), codes[0], even);
            _mm256_dpbusd_epi32(sums, codes[1], odd)
        } else {
            // 4 * 15 * 128 fits: nothing saturates or wraps.
            let even = _mm256_maddubs_epi16(codes[0], even);
            let sums = _mm256_add_epi16(even, _mm256_maddubs_epi16(codes[1], odd));
            _mm256_madd_epi16(sums, _mm256_set1_epi16(1))
        }
    }
}

impl<const VNNI: bool> Simd for Avx512<VNNI> {
    type V = __m512;
    type H = __m256;
    type Q4 = [__m256i; 2];
    type Q8Wide = [__m256i; 4];
    type Q8Narrow = [__m256i; 2];
    type Sums = __m256i;
    const REGISTERS: Registers = Registers::Many;

    #[inline(always)]
    fn splat(self, a: f32) -> __m512 {
        simd!(_mm512_set1_ps(a))
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        simd!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        simd!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        simd!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        simd!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        simd!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        simd!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        simd!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn abs(self, a: __m512) -> __m512 {
        simd!(_mm512_andnot_ps(_mm512_set1_ps(-0.0), a))
    }
    #[inline(always)]
    fn round(self, a: __m512) -> __m512 {
        const EVEN: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        simd!(_mm512_roundscale_ps::<EVEN>(a))
    }
    #[inline(always)]
    fn ldexp(self, p: __m512, n: __m512) -> __m512 {
        simd! {
            let n = _mm512_cvtps_epi32(n);
            let half = _mm512_srai_epi32::<1>(n);
            let p = _mm512_mul_ps(p, power_of_two(half));
            _mm512_mul_ps(p, power_of_two(_mm512_sub_epi32(n, half)))
        }
    }
    #[inline(always)]
    fn fold_add(self, a: __m512) -> f32 {
        fold!(a, _mm256_add_ps, _mm_add_ps, _mm_add_ss)
    }
    #[inline(always)]
    fn fold_max(self, a: __m512) -> f32 {
        fold!(a, _mm256_max_ps, _mm_max_ps, _mm_max_ss)
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m512 {
        simd!(_mm512_loadu_ps(p))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, a: __m512) {
        simd!(_mm512_storeu_ps(p, a));
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u8) -> __m512 {
        simd!(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast())))
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8) -> __m512 {
        simd! {
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u8, a: __m512) {
        const EVEN: i32 = _MM_FROUND_TO_NEAREST_INT;
        simd!(_mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<EVEN>(a)));
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u8, a: __m512) {
        simd! {
            let bits = _mm512_castps_si512(a);
            let upper = _mm512_srli_epi32::<16>(bits);
            let odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
            let up = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
            let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, up));
            let quiet = _mm512_or_si512(upper, _mm512_set1_epi32(0x40));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, a);
            let words = _mm512_mask_blend_epi32(nan, rounded, quiet);
            _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(words));
        }
    }
    #[inline(always)]
    unsafe fn load_u4(self, p: *const u8) -> __m512 {
        simd! {
            let words = _mm_cvtepu8_epi16(_mm_loadl_epi64(p.cast()));
            let spread = _mm_or_si128(words, _mm_slli_epi16::<4>(words));
            let codes = _mm_and_si128(spread, _mm_set1_epi8(15));
            _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(codes))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const u8) -> __m512 {
        simd!(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))))
    }
    #[inline(always)]
    unsafe fn store_i32(self, p: *mut i32, a: __m512) {
        simd!(_mm512_storeu_si512(p.cast(), _mm512_cvtps_epi32(a)));
    }

    #[inline(always)]
    fn h_splat(self, a: f32) -> __m256 {
        simd!(_mm256_set1_ps(a))
    }
    #[inline(always)]
    fn h_add(self, a: __m256, b: __m256) -> __m256 {
        simd!(_mm256_add_ps(a, b))
    }
    #[inline(always)]
    fn h_mul(self, a: __m256, b: __m256) -> __m256 {
        simd!(_mm256_mul_ps(a, b))
    }
    #[inline(always)]
    fn h_fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        simd!(_mm256_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    unsafe fn h_load(self, p: *const f32) -> __m256 {
        simd!(_mm256_loadu_ps(p))
    }
    #[inline(always)]
    unsafe fn h_store(self, p: *mut f32, a: __m256) {
        simd!(_mm256_storeu_ps(p, a));
    }

    #[inline(always)]
    fn sums_zero(self) -> __m256i {
        simd!(_mm256_setzero_si256())
    }
    #[inline(always)]
    fn reduce(self, rows: &[__m256i; 8]) -> [__m256; 2] {
        simd!(avx2::reduce(rows))
    }
    #[inline(always)]
    unsafe fn q4(self, p: *const u8) -> [__m256i; 2] {
        simd!(avx2::q4(p))
    }
    #[inline(always)]
    unsafe fn q8_wide(self, p: *const u8) -> [__m256i; 4] {
        simd!(avx2::q8_wide(p))
    }
    #[inline(always)]
    unsafe fn q8_narrow(self, p: *const u8) -> [__m256i; 2] {
        simd!([avx2::load(p, 0), avx2::load(p, 1)])
    }
    #[inline(always)]
    unsafe fn q4_wide_dot(self, codes: [__m256i; 2], x: *const u8) -> __m256i {
        simd! {
            let high = pairs::<VNNI>(codes, x);
            let low = pairs::<VNNI>(codes, x.add(64));
            _mm256_add_epi32(_mm256_slli_epi32::<8>(high), low)
        }
    }
    #[inline(always)]
    unsafe fn q4_narrow_dot(self, codes: [__m256i; 2], x: *const u8) -> __m256i {
        simd!(pairs::<VNNI>(codes, x))
    }
    #[inline(always)]
    unsafe fn q8_wide_dot(self, codes: [__m256i; 4], x: *const u8) -> __m256i {
        simd! {
            let a = _mm256_madd_epi16(codes[0], avx2::load(x, 0));
            let b = _mm256_madd_epi16(codes[2], avx2::load(x, 2));
            let (c, d) = (avx2::load(x, 1), avx2::load(x, 3));
            if VNNI {
                let a = _mm256_dpwssd_epi32(a, codes[1], c);
                avx2::join(a, _mm256_dpwssd_epi32(b, codes[3], d))
            } else {
                let a = _mm256_add_epi32(a, _mm256_madd_epi16(codes[1], c));
                avx2::join(a, _mm256_add_epi32(b, _mm256_madd_epi16(codes[3], d)))
            }
        }
    }
    #[inline(always)]
    unsafe fn q8_narrow_dot(self, codes: [__m256i; 2], x: *const u8) -> __m256i {
        simd! {
            let mut sums = codes;
            for i in 0..2 {
                // 2 * 128 * 127 fits: a code of -128 is 128 unsigned, an activation never is.
                let x = _mm256_sign_epi8(avx2::load(x, i), codes[i]);
                let codes = _mm256_abs_epi8(codes[i]);
                sums[i] = if VNNI {
                    _mm256_dpbusd_epi32(_mm256_setzero_si256(), codes, x)
                } else {
                    _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), _mm256_set1_epi16(1))
                };
            }
            avx2::join(sums[0], sums[1])
        }
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        simd!(_mm_prefetch::<_MM_HINT_T0>(p.cast()));
    }
    #[inline(always)]
    unsafe fn params(self, rows: &[*const u8; 8], count: usize, out: &mut Params) {
        simd! {
            if count == 8 { avx2::params(rows, out) } else { super::params(rows, count, out) }
        }
    }
}
