//! AVX2 with FMA and F16C: two registers for sixteen lanes.
#![allow(unsafe_code)]
#![allow(clippy::wildcard_imports, reason = "a prefix names the intrinsics")]

use super::{Kernel, Params, Registers, Simd};
use std::arch::x86_64::*;

/// Token of AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2(());

/// Runs a kernel.
///
/// # Safety
/// The machine has AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn enter<K: Kernel>(kernel: K) {
    kernel.run(Avx2(()));
}

macro_rules! simd {
    ($($body:tt)*) => {{
        // SAFETY: the token exists only inside `enter`; pointers are as the caller promises.
        unsafe { $($body)* }
    }};
}

type V = [__m256; 2];

/// Four lanes of a sum or maximum to one.
macro_rules! fold_four {
    ($a:expr, $pair:ident, $last:ident) => {{
        let a = $a;
        let b = $pair(a, _mm_movehl_ps(a, a));
        _mm_cvtss_f32($last(b, _mm_shuffle_ps::<1>(b, b)))
    }};
}

#[inline(always)]
unsafe fn power_of_two(n: __m256i) -> __m256 {
    simd!(_mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n, _mm256_set1_epi32(127)))))
}

#[inline(always)]
unsafe fn ldexp(p: __m256, n: __m256) -> __m256 {
    simd! {
        let n = _mm256_cvtps_epi32(n);
        let half = _mm256_srai_epi32::<1>(n);
        let p = _mm256_mul_ps(p, power_of_two(half));
        _mm256_mul_ps(p, power_of_two(_mm256_sub_epi32(n, half)))
    }
}

/// The upper halves of eight f32, rounded to nearest even, in the low halves of the result.
#[inline(always)]
unsafe fn to_bf16(a: __m256) -> __m256i {
    simd! {
        let bits = _mm256_castps_si256(a);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let up = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
        let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, up));
        let quiet = _mm256_or_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(0x40));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(a, a));
        _mm256_blendv_epi8(rounded, quiet, nan)
    }
}

/// Eight bf16 of each of eight rows, transposed and widened.
#[inline(always)]
pub(super) unsafe fn params(rows: &[*const u8; 8], out: &mut Params) {
    simd! {
        let mut a = [_mm_setzero_si128(); 8];
        for (a, row) in a.iter_mut().zip(rows) {
            *a = _mm_loadu_si128(row.cast());
        }
        let mut b = a;
        for i in 0..4 {
            b[2 * i] = _mm_unpacklo_epi16(a[2 * i], a[2 * i + 1]);
            b[2 * i + 1] = _mm_unpackhi_epi16(a[2 * i], a[2 * i + 1]);
        }
        // Groups 0-1, 2-3, 4-5, 6-7 of rows 0-3, then of rows 4-7.
        let mut c = b;
        for i in 0..2 {
            c[4 * i] = _mm_unpacklo_epi32(b[4 * i], b[4 * i + 2]);
            c[4 * i + 1] = _mm_unpackhi_epi32(b[4 * i], b[4 * i + 2]);
            c[4 * i + 2] = _mm_unpacklo_epi32(b[4 * i + 1], b[4 * i + 3]);
            c[4 * i + 3] = _mm_unpackhi_epi32(b[4 * i + 1], b[4 * i + 3]);
        }
        for i in 0..4 {
            for (j, group) in
                [_mm_unpacklo_epi64(c[i], c[i + 4]), _mm_unpackhi_epi64(c[i], c[i + 4])]
                    .into_iter()
                    .enumerate()
            {
                let wide = _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(group));
                _mm256_storeu_si256(out[2 * i + j].as_mut_ptr().cast(), wide);
            }
        }
    }
}

/// Eight rows' sums, four lanes for each of two blocks, added up.
#[inline(always)]
pub(super) unsafe fn reduce(p: &[__m256i; 8]) -> [__m256; 2] {
    simd! {
        let a = _mm256_hadd_epi32(_mm256_hadd_epi32(p[0], p[1]), _mm256_hadd_epi32(p[2], p[3]));
        let b = _mm256_hadd_epi32(_mm256_hadd_epi32(p[4], p[5]), _mm256_hadd_epi32(p[6], p[7]));
        [
            _mm256_cvtepi32_ps(_mm256_permute2x128_si256::<0x20>(a, b)),
            _mm256_cvtepi32_ps(_mm256_permute2x128_si256::<0x31>(a, b)),
        ]
    }
}

/// Eight lanes for either block to four for both.
#[inline(always)]
pub(super) unsafe fn join(a: __m256i, b: __m256i) -> __m256i {
    simd! {
        let low = _mm256_permute2x128_si256::<0x20>(a, b);
        _mm256_add_epi32(low, _mm256_permute2x128_si256::<0x31>(a, b))
    }
}

#[inline(always)]
pub(super) unsafe fn load(p: *const u8, i: usize) -> __m256i {
    simd!(_mm256_loadu_si256(p.add(32 * i).cast()))
}

#[inline(always)]
pub(super) unsafe fn q4(p: *const u8) -> [__m256i; 2] {
    simd! {
        let (bytes, mask) = (load(p, 0), _mm256_set1_epi8(15));
        [_mm256_and_si256(bytes, mask), _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), mask)]
    }
}

#[inline(always)]
pub(super) unsafe fn q8_wide(p: *const u8) -> [__m256i; 4] {
    simd! {
        let (a, b) = (load(p, 0), load(p, 1));
        [
            _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(a)),
            _mm256_srai_epi16::<8>(a),
            _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(b)),
            _mm256_srai_epi16::<8>(b),
        ]
    }
}

impl Simd for Avx2 {
    type V = V;
    type H = __m256;
    type Q4 = [__m256i; 2];
    type Q8Wide = [__m256i; 4];
    type Q8Narrow = [__m256i; 2];
    type Sums = __m256i;
    const REGISTERS: Registers = Registers::Some;

    #[inline(always)]
    fn splat(self, a: f32) -> V {
        simd!([_mm256_set1_ps(a); 2])
    }
    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        simd!([_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        simd!([_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        simd!([_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        simd!([_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        simd!([_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])])
    }
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        simd!([_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        simd!([_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn abs(self, a: V) -> V {
        simd! {
            let sign = _mm256_set1_ps(-0.0);
            [_mm256_andnot_ps(sign, a[0]), _mm256_andnot_ps(sign, a[1])]
        }
    }
    #[inline(always)]
    fn round(self, a: V) -> V {
        const EVEN: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        simd!([_mm256_round_ps::<EVEN>(a[0]), _mm256_round_ps::<EVEN>(a[1])])
    }
    #[inline(always)]
    fn ldexp(self, p: V, n: V) -> V {
        simd!([ldexp(p[0], n[0]), ldexp(p[1], n[1])])
    }
    #[inline(always)]
    fn fold_add(self, a: V) -> f32 {
        simd! {
            let a = _mm256_add_ps(a[0], a[1]);
            let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            fold_four!(a, _mm_add_ps, _mm_add_ss)
        }
    }
    #[inline(always)]
    fn fold_max(self, a: V) -> f32 {
        simd! {
            let a = _mm256_max_ps(a[0], a[1]);
            let a = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            fold_four!(a, _mm_max_ps, _mm_max_ss)
        }
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> V {
        simd!([_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))])
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, a: V) {
        simd! {
            _mm256_storeu_ps(p, a[0]);
            _mm256_storeu_ps(p.add(8), a[1]);
        }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u8) -> V {
        simd! {
            let (low, high) = (_mm_loadu_si128(p.cast()), _mm_loadu_si128(p.add(16).cast()));
            [_mm256_cvtph_ps(low), _mm256_cvtph_ps(high)]
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8) -> V {
        simd! {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(16).cast()));
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u8, a: V) {
        simd! {
            const EVEN: i32 = _MM_FROUND_TO_NEAREST_INT;
            _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<EVEN>(a[0]));
            _mm_storeu_si128(p.add(16).cast(), _mm256_cvtps_ph::<EVEN>(a[1]));
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u8, a: V) {
        simd! {
            let packed = _mm256_packus_epi32(to_bf16(a[0]), to_bf16(a[1]));
            _mm256_storeu_si256(p.cast(), _mm256_permute4x64_epi64::<0xd8>(packed));
        }
    }
    #[inline(always)]
    unsafe fn load_u4(self, p: *const u8) -> V {
        simd! {
            let words = _mm_cvtepu8_epi16(_mm_loadl_epi64(p.cast()));
            let spread = _mm_or_si128(words, _mm_slli_epi16::<4>(words));
            let codes = _mm_and_si128(spread, _mm_set1_epi8(15));
            let high = _mm_unpackhi_epi64(codes, codes);
            [
                _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(codes)),
                _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(high)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const u8) -> V {
        simd! {
            let low = _mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()));
            let high = _mm256_cvtepi8_epi32(_mm_loadl_epi64(p.add(8).cast()));
            [_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)]
        }
    }
    #[inline(always)]
    unsafe fn store_i32(self, p: *mut i32, a: V) {
        simd! {
            _mm256_storeu_si256(p.cast(), _mm256_cvtps_epi32(a[0]));
            _mm256_storeu_si256(p.add(8).cast(), _mm256_cvtps_epi32(a[1]));
        }
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
        simd!(reduce(rows))
    }
    #[inline(always)]
    unsafe fn q4(self, p: *const u8) -> [__m256i; 2] {
        simd!(q4(p))
    }
    #[inline(always)]
    unsafe fn q8_wide(self, p: *const u8) -> [__m256i; 4] {
        simd!(q8_wide(p))
    }
    #[inline(always)]
    unsafe fn q8_narrow(self, p: *const u8) -> [__m256i; 2] {
        simd!([load(p, 0), load(p, 1)])
    }
    #[inline(always)]
    unsafe fn q4_wide_dot(self, codes: [__m256i; 2], x: *const u8) -> __m256i {
        simd! {
            // 4 * 15 * 128 fits: nothing saturates or wraps.
            let high = _mm256_add_epi16(
                _mm256_maddubs_epi16(codes[0], load(x, 0)),
                _mm256_maddubs_epi16(codes[1], load(x, 1)),
            );
            let low = _mm256_add_epi16(
                _mm256_maddubs_epi16(codes[0], load(x, 2)),
                _mm256_maddubs_epi16(codes[1], load(x, 3)),
            );
            let high = _mm256_madd_epi16(high, _mm256_set1_epi16(256));
            _mm256_add_epi32(high, _mm256_madd_epi16(low, _mm256_set1_epi16(1)))
        }
    }
    #[inline(always)]
    unsafe fn q4_narrow_dot(self, codes: [__m256i; 2], x: *const u8) -> __m256i {
        simd! {
            let sums = _mm256_add_epi16(
                _mm256_maddubs_epi16(codes[0], load(x, 0)),
                _mm256_maddubs_epi16(codes[1], load(x, 1)),
            );
            _mm256_madd_epi16(sums, _mm256_set1_epi16(1))
        }
    }
    #[inline(always)]
    unsafe fn q8_wide_dot(self, codes: [__m256i; 4], x: *const u8) -> __m256i {
        simd! {
            let a = _mm256_add_epi32(
                _mm256_madd_epi16(codes[0], load(x, 0)),
                _mm256_madd_epi16(codes[1], load(x, 1)),
            );
            let b = _mm256_add_epi32(
                _mm256_madd_epi16(codes[2], load(x, 2)),
                _mm256_madd_epi16(codes[3], load(x, 3)),
            );
            join(a, b)
        }
    }
    #[inline(always)]
    unsafe fn q8_narrow_dot(self, codes: [__m256i; 2], x: *const u8) -> __m256i {
        simd! {
            let mut sums = codes;
            for i in 0..2 {
                // 2 * 128 * 127 fits: a code of -128 is 128 unsigned, an activation never is.
                let x = _mm256_sign_epi8(load(x, i), codes[i]);
                let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes[i]), x);
                sums[i] = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
            }
            join(sums[0], sums[1])
        }
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        simd!(_mm_prefetch::<_MM_HINT_T0>(p.cast()));
    }
    #[inline(always)]
    unsafe fn params(self, rows: &[*const u8; 8], count: usize, out: &mut Params) {
        simd! {
            if count == 8 { params(rows, out) } else { super::params(rows, count, out) }
        }
    }
}
