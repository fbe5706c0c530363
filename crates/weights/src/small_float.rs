//! Floats of 8 and 4 bits that share scales.
//!
//! **Source.** OCP 8-bit Floating Point Specification 1.0 (E4M3: no infinities, NaN where all bits
//! but the sign are set), OCP Microscaling Formats 1.0 (E2M1, E8M0).

/// Values that share a scale in `fp8`; the last block of a row may be shorter.
pub(crate) const FP8_BLOCK: usize = 128;
/// Values that share a scale in `mxfp4`.
pub(crate) const MXFP4_BLOCK: usize = 32;

/// The value of an E4M3 code: sign, 4 bits of exponent (bias 7), 3 bits of significand.
#[inline]
pub(crate) fn e4m3(code: u8) -> f32 {
    let magnitude = u32::from(code & 0x7f);
    // The code's fields where f32 has them, the exponent moved from bias 7 to bias 127.
    let normal = f32::from_bits((magnitude << 20) + (120 << 23));
    // Steps of 2^-9: one binade up these are the low bits of a number from 2^-6 on.
    let small = f32::from_bits((magnitude << 20) + (121 << 23)) - 0.015_625;
    let value = if magnitude < 8 { small } else { normal };
    let value = if magnitude == 0x7f { f32::NAN } else { value };
    f32::from_bits(value.to_bits() | (u32::from(code & 0x80) << 24))
}

/// The values of E2M1 codes: sign, 2 bits of exponent (bias 1), 1 bit of significand.
const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// The value of an E8M0 code: `2^(code - 127)`, NaN for 255.
#[inline]
pub(crate) fn e8m0(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        _ => f32::from_bits(u32::from(code) << 23),
    }
}

/// `value * scale(block)` of each E4M3 code, rounded once.
pub(crate) fn decode_fp8(codes: &[u8], scale: impl Fn(usize) -> f32, out: &mut [f32]) {
    let blocks = out.chunks_mut(FP8_BLOCK).zip(codes.chunks(FP8_BLOCK));
    for (block, (out, codes)) in blocks.enumerate() {
        let scale = scale(block);
        for (o, code) in out.iter_mut().zip(codes) {
            *o = e4m3(*code) * scale;
        }
    }
}

/// `value * scale(block)` of each nibble, low ones first.
pub(crate) fn decode_mxfp4(codes: &[u8], scale: impl Fn(usize) -> f32, out: &mut [f32]) {
    let blocks = out.as_chunks_mut::<MXFP4_BLOCK>().0.iter_mut();
    let codes = codes.as_chunks::<{ MXFP4_BLOCK / 2 }>().0;
    for (block, (out, codes)) in blocks.zip(codes).enumerate() {
        let scale = scale(block);
        for (o, code) in out.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
            o[0] = E2M1[usize::from(code & 15)] * scale;
            o[1] = E2M1[usize::from(code >> 4)] * scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From the definition, in f64.
    fn e4m3_by_definition(code: u8) -> Option<f64> {
        let (exponent, fraction) = (i32::from(code >> 3 & 15), f64::from(code & 7) / 8.0);
        let magnitude = match (exponent, code & 7) {
            (15, 7) => return None,
            (0, _) => fraction * 2f64.powi(-6),
            _ => (1.0 + fraction) * 2f64.powi(exponent - 7),
        };
        Some(if code & 0x80 == 0 { magnitude } else { -magnitude })
    }

    #[test]
    fn all_codes_of_e4m3() {
        for code in 0..=255 {
            match e4m3_by_definition(code) {
                None => assert!(e4m3(code).is_nan(), "{code:#x}"),
                Some(value) => assert_eq!(f64::from(e4m3(code)).to_bits(), value.to_bits()),
            }
        }
        // By hand: the smallest, the largest subnormal, the smallest normal, one, the largest.
        let known = [(1, 0.001_953_125), (7, 0.013_671_875), (8, 0.015_625), (0x38, 1.0)];
        for (code, value) in known.into_iter().chain([(0x7e, 448.0), (0xfe, -448.0)]) {
            assert_eq!(e4m3(code), value, "{code:#x}");
        }
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
        assert!(e4m3(0x80) == 0.0 && e4m3(0x80).is_sign_negative());
    }

    #[test]
    fn all_pairs_of_e8m0_and_e2m1() {
        for scale in 0..=255u8 {
            let codes: [u8; 16] = std::array::from_fn(|i| (i as u8) | (15 - i as u8) << 4);
            let mut out = [0.0; 32];
            decode_mxfp4(&codes, |_| e8m0(scale), &mut out);
            for (i, got) in out.into_iter().enumerate() {
                let code = if i % 2 == 0 { i / 2 } else { 15 - i / 2 };
                let (exponent, odd) = ((code >> 1 & 3) as i32, (code & 1) as f64);
                let magnitude = match exponent {
                    0 => odd / 2.0,
                    _ => (1.0 + odd / 2.0) * 2f64.powi(exponent - 1),
                };
                let sign = if code & 8 == 0 { 1.0 } else { -1.0 };
                let exact = sign * magnitude * 2f64.powi(i32::from(scale) - 127);
                if scale == 255 {
                    assert!(got.is_nan(), "{code} {scale}");
                } else {
                    // Exact, or beyond what f32 holds.
                    assert_eq!(got.to_bits(), (exact as f32).to_bits(), "{code} {scale}");
                    assert!(got.is_infinite() || f64::from(got) == exact, "{code} {scale}");
                }
            }
        }
    }
}
