//! How the numbers of a row are stored: plain floats and blocks of small integers with scales.
//!
//! Every encoding is row-contiguous: a row of `d_in` values is one run of bytes that decodes
//! without its neighbours, so rows can be sliced, permuted and fused whatever the encoding.
//!
//! ```text
//! f32, f16, bf16   [value; d_in]                                             little endian
//! q8               [i8; d_in] codes, [bf16; d_in/32] scales                  scale * code
//! q4g32, q4g64     [u8; d_in/2] codes, [bf16; d_in/G] scales, [bf16; d_in/G] biases
//!                  byte j: element 2j in the low nibble, 2j+1 in the high    scale * code + bias
//! fp8              [E4M3; d_in] codes, [f32; ceil(d_in/128)] scales          code * scale
//! mxfp4            [u8; d_in/2] E2M1 codes, nibbles as above, [E8M0; d_in/32] scales
//! ```
//!
//! The last two are kept as they are published and never made: nothing is encoded in them.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use crate::error::WeightsError;
use crate::quantise;
use crate::small_float;

/// Storage of the values of one row.
///
/// **Numerics.** Decoding is exact f32 arithmetic: `q8` is one multiplication that never rounds
/// (8-bit significand times 7-bit code); `q4` is a multiplication and then an addition, each
/// rounded to f32, never fused; `fp8` is one multiplication; `mxfp4` is one that never rounds,
/// beyond the range of f32 it is infinite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Encoding {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of an f32.
    Bf16,
    /// Signed bytes, one bf16 scale for 32 values.
    Q8,
    /// Nibbles, one bf16 scale and one bf16 bias for 32 values.
    Q4G32,
    /// Nibbles, one bf16 scale and one bf16 bias for 64 values.
    Q4G64,
    /// E4M3 floats, one f32 scale for 128 values; the last block may be shorter.
    #[serde(rename = "fp8")]
    F8E4M3,
    /// E2M1 floats, one power of two for 32 values.
    Mxfp4,
}

impl Encoding {
    /// All encodings, plain ones first.
    pub const ALL: [Self; 8] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q8,
        Self::Q4G32,
        Self::Q4G64,
        Self::F8E4M3,
        Self::Mxfp4,
    ];

    /// Values that share a scale; the length of a row must be a multiple, but in `fp8`.
    pub const fn group(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q8 | Self::Q4G32 => 32,
            Self::Q4G64 => 64,
            Self::F8E4M3 => small_float::FP8_BLOCK,
            Self::Mxfp4 => small_float::MXFP4_BLOCK,
        }
    }

    /// Whether values are stored as integer codes with scales: what integer kernels multiply.
    /// `fp8` and `mxfp4` hold floats, and are multiplied as floats.
    pub const fn is_quantised(self) -> bool {
        matches!(self, Self::Q8 | Self::Q4G32 | Self::Q4G64)
    }

    /// Whether rows can be encoded; the others can only be kept as they are stored.
    pub const fn can_encode(self) -> bool {
        !matches!(self, Self::F8E4M3 | Self::Mxfp4)
    }

    /// Name in manifests and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Q8 => "q8",
            Self::Q4G32 => "q4g32",
            Self::Q4G64 => "q4g64",
            Self::F8E4M3 => "fp8",
            Self::Mxfp4 => "mxfp4",
        }
    }

    /// Whether a row of `d_in` values can be stored.
    pub const fn divides(self, d_in: usize) -> bool {
        matches!(self, Self::F8E4M3) || d_in.is_multiple_of(self.group())
    }

    /// Bytes of one group, codes and scales together; of `fp8` the codes of one value.
    const fn group_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q8 => 32 + 2,
            Self::Q4G32 => 16 + 4,
            Self::Q4G64 => 32 + 4,
            Self::F8E4M3 => 1,
            Self::Mxfp4 => 16 + 1,
        }
    }

    /// Bytes of a row, where they fit.
    fn checked_row_bytes(self, d_in: usize) -> Option<u64> {
        if !self.divides(d_in) {
            return None;
        }
        match self {
            Self::F8E4M3 => (d_in as u64).checked_add(d_in.div_ceil(self.group()) as u64 * 4),
            _ => ((d_in / self.group()) as u64).checked_mul(self.group_bytes() as u64),
        }
    }

    /// Bytes of one row of `d_in` values.
    ///
    /// # Panics
    ///
    /// If the group does not divide `d_in`; ask [`Encoding::divides`] first.
    pub fn row_bytes(self, d_in: usize) -> usize {
        assert!(self.divides(d_in), "{self} needs a multiple of {}, got {d_in}", self.group());
        match self {
            Self::F8E4M3 => d_in + d_in.div_ceil(self.group()) * 4,
            _ => d_in / self.group() * self.group_bytes(),
        }
    }

    /// Bytes of the codes of one row, which come before its scales.
    ///
    /// # Panics
    ///
    /// As [`Encoding::row_bytes`].
    pub fn code_bytes(self, d_in: usize) -> usize {
        match self {
            Self::F8E4M3 | Self::Q8 => d_in,
            Self::Q4G32 | Self::Q4G64 | Self::Mxfp4 => d_in / 2,
            Self::F32 | Self::F16 | Self::Bf16 => self.row_bytes(d_in),
        }
    }

    /// Bytes of `rows` rows of `d_in` values, or nothing when the group does not divide `d_in` or
    /// the product does not fit: for sizes that a file decides.
    pub fn checked_bytes(self, rows: usize, d_in: usize) -> Option<u64> {
        self.checked_row_bytes(d_in)?.checked_mul(rows as u64)
    }

    /// Decodes one row.
    ///
    /// **Shapes.** `bytes: [row_bytes(d_in)]`, `out: [d_in] f32`.
    ///
    /// # Panics
    ///
    /// If the lengths do not belong together.
    pub fn decode_row(self, bytes: &[u8], out: &mut [f32]) {
        self.assert_lengths(out.len(), bytes.len());
        match self {
            Self::F32 => {
                for (o, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *o = f32::from_le_bytes(*b);
                }
            }
            Self::F16 => {
                for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *o = f16::from_le_bytes(*b).to_f32();
                }
            }
            Self::Bf16 => {
                for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *o = bf16_at(*b);
                }
            }
            Self::Q8 => {
                let (codes, scales) = bytes.split_at(out.len());
                let groups = out.as_chunks_mut::<32>().0.iter_mut();
                let codes = codes.as_chunks::<32>().0;
                for ((o, q), s) in groups.zip(codes).zip(scales.as_chunks::<2>().0) {
                    let scale = bf16_at(*s);
                    for (o, q) in o.iter_mut().zip(q) {
                        *o = scale * f32::from(q.cast_signed());
                    }
                }
            }
            Self::Q4G32 => decode_q4::<32, 16>(bytes, out),
            Self::Q4G64 => decode_q4::<64, 32>(bytes, out),
            Self::F8E4M3 => {
                let (codes, scales) = bytes.split_at(out.len());
                let scales = scales.as_chunks::<4>().0;
                small_float::decode_fp8(codes, |block| f32::from_le_bytes(scales[block]), out);
            }
            Self::Mxfp4 => {
                let (codes, scales) = bytes.split_at(out.len() / 2);
                self.decode_codes(codes, |block| Self::exponent(scales[block]), out);
            }
        }
    }

    /// Decodes a row of `fp8` or `mxfp4` whose scales lie elsewhere: `scale(block)` is that of a
    /// block of [`Encoding::group`] values. The same bits as [`Encoding::decode_row`].
    ///
    /// **Shapes.** `codes: [code_bytes(d_in)]`, `out: [d_in] f32`.
    ///
    /// # Panics
    ///
    /// For other encodings, or if the lengths do not belong together.
    pub fn decode_codes(self, codes: &[u8], scale: impl Fn(usize) -> f32, out: &mut [f32]) {
        let (wanted, got) = (self.code_bytes(out.len()), codes.len());
        assert!(wanted == got, "{} values of {self} have {wanted} bytes, got {got}", out.len());
        match self {
            Self::F8E4M3 => small_float::decode_fp8(codes, scale, out),
            Self::Mxfp4 => small_float::decode_mxfp4(codes, scale, out),
            other => panic!("the scales of {other} are part of its rows"),
        }
    }

    /// The scale that an exponent of `mxfp4` stands for: `2^(code - 127)`, NaN for 255.
    pub fn exponent(code: u8) -> f32 {
        small_float::e8m0(code)
    }

    /// Encodes one row: plain floats round to nearest even, quantised groups are fitted by a
    /// deterministic search that is never worse than min/max.
    ///
    /// Values that are not finite make no sense in a quantised group: NaN counts as zero and
    /// infinities as huge values there. [`Encoding::try_encode_row`] refuses them instead.
    ///
    /// **Shapes.** `values: [d_in] f32`, `out: [row_bytes(d_in)]`.
    ///
    /// # Panics
    ///
    /// If the lengths do not belong together, or the encoding is one that is never made
    /// ([`Encoding::can_encode`]).
    pub fn encode_row(self, values: &[f32], out: &mut [u8]) {
        self.assert_lengths(values.len(), out.len());
        match self {
            Self::F32 => {
                for (v, o) in values.iter().zip(out.as_chunks_mut::<4>().0) {
                    *o = v.to_le_bytes();
                }
            }
            Self::F16 => {
                for (v, o) in values.iter().zip(out.as_chunks_mut::<2>().0) {
                    *o = f16::from_f32(*v).to_le_bytes();
                }
            }
            Self::Bf16 => {
                for (v, o) in values.iter().zip(out.as_chunks_mut::<2>().0) {
                    *o = bf16::from_f32(*v).to_le_bytes();
                }
            }
            Self::Q8 => {
                let (codes, scales) = out.split_at_mut(values.len());
                let groups = values.as_chunks::<32>().0.iter();
                let codes = codes.as_chunks_mut::<32>().0;
                for ((v, q), s) in groups.zip(codes).zip(scales.as_chunks_mut::<2>().0) {
                    *s = quantise::q8_group(v, q).to_le_bytes();
                }
            }
            Self::Q4G32 => encode_q4::<32, 16>(values, out),
            Self::Q4G64 => encode_q4::<64, 32>(values, out),
            Self::F8E4M3 | Self::Mxfp4 => panic!("{self} is kept as stored, never made"),
        }
    }

    /// [`Encoding::encode_row`] for weights of a file: refuses what the encoding cannot hold.
    ///
    /// # Errors
    ///
    /// [`WeightsError::NotFinite`] with the name, the row, the column and the value, when the
    /// source is not finite or becomes infinite in this encoding.
    ///
    /// # Panics
    ///
    /// If the lengths do not belong together.
    pub fn try_encode_row(
        self,
        tensor: &str,
        row: usize,
        values: &[f32],
        out: &mut [u8],
    ) -> Result<(), WeightsError> {
        let limit = self.largest();
        if let Some(column) = values.iter().position(|v| v.is_nan() || v.abs() > limit) {
            let value = values[column];
            return Err(WeightsError::NotFinite {
                tensor: tensor.to_owned(),
                row,
                column,
                value,
                encoding: self,
            });
        }
        self.encode_row(values, out);
        Ok(())
    }

    /// Largest magnitude that survives encoding.
    const fn largest(self) -> f32 {
        match self {
            Self::F32 | Self::F8E4M3 | Self::Mxfp4 => f32::MAX,
            // Halfway to the next power rounds to infinity; one step below does not.
            Self::F16 => 65519.996,
            Self::Bf16 => f32::from_bits(0x7f7f_7fff),
            Self::Q8 => quantise::Q8_LARGEST,
            Self::Q4G32 | Self::Q4G64 => quantise::Q4_LARGEST,
        }
    }

    fn assert_lengths(self, d_in: usize, bytes: usize) {
        let wanted = self.row_bytes(d_in);
        assert!(bytes == wanted, "a {self} row of {d_in} values has {wanted} bytes, got {bytes}");
    }
}

#[inline]
fn bf16_at(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

fn decode_q4<const G: usize, const HALF: usize>(bytes: &[u8], out: &mut [f32]) {
    let n = out.len() / G;
    let (codes, rest) = bytes.split_at(n * HALF);
    let (scales, biases) = rest.split_at(n * 2);
    let params = scales.as_chunks::<2>().0.iter().zip(biases.as_chunks::<2>().0);
    let groups = out.as_chunks_mut::<G>().0.iter_mut().zip(codes.as_chunks::<HALF>().0);
    for ((o, q), (scale, bias)) in groups.zip(params) {
        let (scale, bias) = (bf16_at(*scale), bf16_at(*bias));
        for (o, q) in o.as_chunks_mut::<2>().0.iter_mut().zip(q) {
            o[0] = scale * f32::from(q & 15) + bias;
            o[1] = scale * f32::from(q >> 4) + bias;
        }
    }
}

fn encode_q4<const G: usize, const HALF: usize>(values: &[f32], out: &mut [u8]) {
    let n = values.len() / G;
    let (codes, rest) = out.split_at_mut(n * HALF);
    let (scales, biases) = rest.split_at_mut(n * 2);
    let params = scales.as_chunks_mut::<2>().0.iter_mut().zip(biases.as_chunks_mut::<2>().0);
    let groups = values.as_chunks::<G>().0.iter().zip(codes.as_chunks_mut::<HALF>().0);
    for ((v, q), (scale, bias)) in groups.zip(params) {
        let fit = quantise::q4_group(v);
        *scale = fit.scale.to_le_bytes();
        *bias = fit.bias.to_le_bytes();
        for (q, pair) in q.iter_mut().zip(fit.codes.as_chunks::<2>().0) {
            *q = pair[0] as u8 | ((pair[1] as u8) << 4);
        }
    }
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Encoding {
    type Err = WeightsError;

    /// # Errors
    ///
    /// [`WeightsError::UnknownEncoding`] with the names that exist.
    fn from_str(name: &str) -> Result<Self, WeightsError> {
        Self::ALL
            .into_iter()
            .find(|e| e.name() == name)
            .ok_or_else(|| WeightsError::UnknownEncoding { name: name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weights(n: usize, seed: u32) -> Vec<f32> {
        let mut state = seed | 1;
        (0..n)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / (1 << 23) as f32 - 1.0
            })
            .collect()
    }

    fn encoded(encoding: Encoding, values: &[f32]) -> Vec<u8> {
        let mut bytes = vec![0; encoding.row_bytes(values.len())];
        encoding.encode_row(values, &mut bytes);
        bytes
    }

    fn decoded(encoding: Encoding, bytes: &[u8], d_in: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; d_in];
        encoding.decode_row(bytes, &mut out);
        out
    }

    fn bf16_in(bytes: &[u8], index: usize) -> f32 {
        bf16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]]).to_f32()
    }

    #[test]
    fn names_round_trip_in_text_and_json() {
        for encoding in Encoding::ALL {
            assert_eq!(encoding.to_string().parse::<Encoding>().unwrap(), encoding);
            let json = serde_json::to_string(&encoding).unwrap();
            assert_eq!(json, format!("\"{encoding}\""));
            assert_eq!(serde_json::from_str::<Encoding>(&json).unwrap(), encoding);
        }
        let message = "q5".parse::<Encoding>().unwrap_err().to_string();
        assert!(message.contains("`q5`") && message.contains("`q4g64`"), "{message}");
    }

    #[test]
    fn sizes_of_rows() {
        let bytes: Vec<usize> = Encoding::ALL.iter().map(|e| e.row_bytes(128)).collect();
        assert_eq!(bytes, [512, 256, 256, 136, 80, 72, 132, 68]);
        // A short block has a scale of its own.
        let ragged: Vec<usize> = [1, 128, 129, 300].map(|n| Encoding::F8E4M3.row_bytes(n)).into();
        assert_eq!(ragged, [5, 132, 137, 312]);
        assert!(Encoding::F8E4M3.divides(7) && !Encoding::Mxfp4.divides(40));
        assert_eq!(Encoding::F8E4M3.checked_bytes(2, 129), Some(274));
        assert!(Encoding::Q4G32.divides(96) && !Encoding::Q4G64.divides(96));
        assert_eq!(Encoding::Q4G64.checked_bytes(1, 96), None);
        assert_eq!(Encoding::Q8.checked_bytes(3, 64), Some(204));
        assert_eq!(Encoding::F32.checked_bytes(usize::MAX, 1 << 40), None);
    }

    #[test]
    #[should_panic(expected = "q8 needs a multiple of 32, got 40")]
    fn a_row_that_the_group_does_not_divide_panics() {
        let _ = Encoding::Q8.row_bytes(40);
    }

    #[test]
    fn plain_floats_round_to_nearest_even() {
        let (down, up) = (1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0);
        let values = [1.0f32, -0.0, down, up, 65504.0, 1e-30, -3.5];
        assert_eq!(decoded(Encoding::F32, &encoded(Encoding::F32, &values), 7), values);
        let bf = decoded(Encoding::Bf16, &encoded(Encoding::Bf16, &values), 7);
        // Halfway cases: down to the even 1.0, up to the even 1.015625.
        assert_eq!(bf[..4], [1.0, -0.0, 1.0, 1.015_625]);
        assert!(bf[1].is_sign_negative());
        let half = decoded(Encoding::F16, &encoded(Encoding::F16, &values), 7);
        assert_eq!([half[0], half[4], half[5], half[6]], [1.0, 65504.0, 0.0, -3.5]);
        for bits in 0..=u16::MAX {
            let bytes = bits.to_le_bytes();
            let exact = bf16::from_bits(bits).to_f32();
            let ours = decoded(Encoding::Bf16, &bytes, 1)[0];
            assert!(ours.to_bits() == exact.to_bits() || exact.is_nan() && ours.is_nan());
            if !exact.is_nan() {
                assert_eq!(encoded(Encoding::Bf16, &[exact]), bytes);
            }
        }
    }

    #[test]
    fn q8_decodes_as_its_layout_says() {
        let values = weights(96, 1);
        let bytes = encoded(Encoding::Q8, &values);
        for (i, got) in decoded(Encoding::Q8, &bytes, 96).into_iter().enumerate() {
            let scale = bf16_in(&bytes[96..], i / 32);
            let exact = f64::from(scale) * f64::from(bytes[i].cast_signed());
            assert_eq!(f64::from(got), exact, "element {i}");
            assert!((got - values[i]).abs() <= scale * 0.500_01);
        }
    }

    #[test]
    fn q4_decodes_as_its_layout_says() {
        for (encoding, group) in [(Encoding::Q4G32, 32), (Encoding::Q4G64, 64)] {
            let values = weights(192, 2);
            let bytes = encoded(encoding, &values);
            let n = 192 / group;
            for (i, got) in decoded(encoding, &bytes, 192).into_iter().enumerate() {
                let byte = bytes[i / 2];
                let code = if i % 2 == 0 { byte & 15 } else { byte >> 4 };
                let scale = bf16_in(&bytes[96..], i / group);
                let bias = bf16_in(&bytes[96 + 2 * n..], i / group);
                let product = scale * f32::from(code);
                assert_eq!(got.to_bits(), (product + bias).to_bits(), "{encoding} element {i}");
                assert!((got - values[i]).abs() <= scale.abs(), "{encoding} element {i}");
            }
        }
    }

    #[test]
    fn fp8_decodes_as_its_layout_says_in_ragged_blocks() {
        for d_in in [1, 127, 128, 129, 300] {
            let code = |i: usize| (i * 37 % 0x7f) as u8 | (i as u8 & 1) << 7;
            let codes: Vec<u8> = (0..d_in).map(code).collect();
            let scales: Vec<f32> = weights(d_in.div_ceil(128), 9);
            let mut bytes = codes.clone();
            bytes.extend(scales.iter().flat_map(|s| s.to_le_bytes()));
            let mut apart = vec![0.0; d_in];
            Encoding::F8E4M3.decode_codes(&codes, |block| scales[block], &mut apart);
            for (i, got) in decoded(Encoding::F8E4M3, &bytes, d_in).into_iter().enumerate() {
                let exact = f64::from(small_float::e4m3(codes[i])) * f64::from(scales[i / 128]);
                assert_eq!(got.to_bits(), (exact as f32).to_bits(), "{d_in} {i}");
                assert_eq!(got.to_bits(), apart[i].to_bits(), "{d_in} {i}");
            }
        }
    }

    #[test]
    fn mxfp4_decodes_as_its_layout_says() {
        let codes: Vec<u8> = (0..48).map(|i| (i * 89 + 5) as u8).collect();
        let scales = [127, 120, 130];
        let bytes = [&codes[..], &scales].concat();
        let mut apart = vec![0.0; 96];
        Encoding::Mxfp4.decode_codes(&codes, |b| Encoding::exponent(scales[b]), &mut apart);
        let got = decoded(Encoding::Mxfp4, &bytes, 96);
        assert_eq!(got, apart);
        // 5 is 3, 0x5e is -4 and 3.
        assert_eq!((got[0], got[1]), (3.0, 0.0));
        assert_eq!((codes[1], got[2], got[3]), (0x5e, -4.0, 3.0));
        assert_eq!((codes[16], codes[16] & 15), (0x95, 5));
        assert_eq!(got[32], 3.0 / 128.0);
    }

    #[test]
    #[should_panic(expected = "mxfp4 is kept as stored, never made")]
    fn nothing_is_encoded_as_mxfp4() {
        assert!(!Encoding::Mxfp4.can_encode() && !Encoding::F8E4M3.can_encode());
        let _ = encoded(Encoding::Mxfp4, &weights(32, 1));
    }

    #[test]
    fn quantising_what_was_decoded_loses_nothing_in_q8() {
        let bytes = encoded(Encoding::Q8, &weights(64, 3));
        let once = decoded(Encoding::Q8, &bytes, 64);
        let mut error = 0.0f32;
        for (a, b) in once.iter().zip(decoded(Encoding::Q8, &encoded(Encoding::Q8, &once), 64)) {
            error = error.max((a - b).abs());
        }
        assert!(error < 1e-2, "{error}");
    }

    /// Bytes that every machine must make, whatever its vector units.
    #[test]
    fn quantisers_are_pinned() {
        let values: Vec<f32> = weights(4096, 4).iter().map(|v| v * v * v * 0.07).collect();
        let digest = |e| blake3::hash(&encoded(e, &values)).to_hex()[..16].to_string();
        let found = [Encoding::Q8, Encoding::Q4G32, Encoding::Q4G64].map(digest);
        assert_eq!(found, ["f1addddd69fb7898", "a248055981b9f22b", "42d66d4ff663f652"]);
    }

    #[test]
    fn what_an_encoding_cannot_hold_is_named() {
        for (encoding, bad) in [
            (Encoding::F32, f32::NAN),
            (Encoding::Bf16, f32::MAX),
            (Encoding::F16, 65520.0),
            (Encoding::Q8, f32::INFINITY),
            (Encoding::Q4G32, f32::NEG_INFINITY),
            (Encoding::Q4G64, 2e38),
        ] {
            let mut values = weights(64, 5);
            let mut out = vec![0; encoding.row_bytes(64)];
            encoding.try_encode_row("w", 3, &values, &mut out).unwrap();
            values[41] = bad;
            let error = encoding.try_encode_row("mlp.w", 3, &values, &mut out).unwrap_err();
            let message = error.to_string();
            for part in ["`mlp.w`", "row `3`", "column `41`", &format!("`{bad}`")] {
                assert!(message.contains(part), "{message}");
            }
        }
        let mut out = [0; 2];
        Encoding::F16.try_encode_row("w", 0, &[65519.0], &mut out).unwrap();
        assert_eq!(decoded(Encoding::F16, &out, 1), [65504.0]);
        Encoding::Bf16.try_encode_row("w", 0, &[3.389e38], &mut out).unwrap();
        assert!(decoded(Encoding::Bf16, &out, 1)[0].is_finite());
    }
}
