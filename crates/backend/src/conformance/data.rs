//! Seeded operands. No function of the machine's mathematics library takes part, so that every
//! machine sees the same ones.

use snowmelt_weights::Encoding;

/// `SplitMix64`.
pub(super) struct Rng(u64);

impl Rng {
    /// Seeded by what the case is called, so that a case keeps its operands when others come.
    pub(super) fn named(name: &str) -> Self {
        let fnv = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
        Self(name.bytes().fold(0xCBF2_9CE4_8422_2325, fnv))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// In `0..limit`.
    pub(super) fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    /// In `[from, to)`.
    pub(super) fn between(&mut self, from: f32, to: f32) -> f32 {
        from + (to - from) * ((self.next() >> 40) as f32 / (1 << 24) as f32)
    }

    /// About normal, variance 1: a sum of twelve.
    pub(super) fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.between(-0.5, 0.5)).sum()
    }

    /// Normal values times `scale`.
    pub(super) fn normals(&mut self, len: usize, scale: f32) -> Vec<f32> {
        (0..len).map(|_| self.normal() * scale).collect()
    }

    /// Values between bounds.
    pub(super) fn uniforms(&mut self, len: usize, from: f32, to: f32) -> Vec<f32> {
        (0..len).map(|_| self.between(from, to)).collect()
    }

    /// `0..len` in some order.
    pub(super) fn permutation(&mut self, len: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..len).collect();
        for i in (1..len).rev() {
            order.swap(i, self.below(i + 1));
        }
        order
    }
}

/// An encoded matrix.
pub(super) struct Weights {
    pub(super) encoding: Encoding,
    pub(super) d_out: usize,
    pub(super) d_in: usize,
    pub(super) bytes: Vec<u8>,
}

impl Weights {
    /// `values: [_, d_in]`
    pub(super) fn encode(encoding: Encoding, values: &[f32], d_in: usize) -> Self {
        let mut bytes = vec![0; values.len() / d_in * encoding.row_bytes(d_in)];
        let rows = bytes.chunks_exact_mut(encoding.row_bytes(d_in));
        for (row, bytes) in values.chunks_exact(d_in).zip(rows) {
            if encoding.can_encode() {
                encoding.encode_row(row, bytes);
            } else {
                fit(encoding, row, bytes);
            }
        }
        Self { encoding, d_out: values.len() / d_in, d_in, bytes }
    }

    /// Random, of a scale that makes products of normal rows about normal.
    pub(super) fn random(rng: &mut Rng, encoding: Encoding, d_out: usize, d_in: usize) -> Self {
        let scale = if d_in > 1 { 1.0 / (d_in as f32).sqrt() } else { 1.0 };
        Self::encode(encoding, &rng.normals(d_out * d_in, scale), d_in)
    }

    pub(super) fn row_bytes(&self) -> usize {
        self.encoding.row_bytes(self.d_in)
    }
}

/// Nearest codes of an encoding that is never made otherwise; scales come from the greatest
/// magnitude of each block.
fn fit(encoding: Encoding, row: &[f32], bytes: &mut [u8]) {
    let is_fp8 = encoding == Encoding::F8E4M3;
    let codes: Vec<u8> = (0..=255).collect();
    let mut values = vec![0.0; if is_fp8 { 256 } else { 512 }];
    if is_fp8 {
        encoding.decode_codes(&codes, |_| 1.0, &mut values);
    } else {
        // One value a code: the low nibble of each byte.
        encoding.decode_codes(&codes, |_| 1.0, &mut values);
        values = (0..16).map(|code| values[2 * code]).collect();
    }
    let (to_codes, to_scales) = bytes.split_at_mut(encoding.code_bytes(row.len()));
    to_codes.fill(0);
    for (block, chunk) in row.chunks(encoding.group()).enumerate() {
        let greatest = chunk.iter().fold(1e-9f32, |m, v| m.max(v.abs()));
        let exponent = 125 + (greatest.to_bits() >> 23) as u8 - 127;
        let scale = if is_fp8 { greatest / 448.0 } else { Encoding::exponent(exponent) };
        match is_fp8 {
            true => to_scales[4 * block..][..4].copy_from_slice(&scale.to_le_bytes()),
            false => to_scales[block] = exponent,
        }
        for (i, v) in chunk.iter().enumerate() {
            let error = |code: &usize| (values[*code] * scale - v).abs();
            let finite = (0..values.len()).filter(|code| !values[*code].is_nan());
            let code = finite.min_by(|a, b| error(a).total_cmp(&error(b))).unwrap_or(0) as u8;
            let at = block * encoding.group() + i;
            match is_fp8 {
                true => to_codes[at] = code,
                false => to_codes[at / 2] |= code << (4 * (at % 2)),
            }
        }
    }
}
