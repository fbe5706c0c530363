//! The arithmetic of a matrix product, written once in plain scalar code. Nothing runs it but the
//! tests, which hold every kernel to it bit for bit.

#[cfg(test)]
use snowmelt_weights::Encoding;

/// Elements of a block of rounded activations.
pub(crate) const BLOCK: usize = 32;
/// Blocks whose greatest magnitude lies below this count as zero: 2^-110.
pub(crate) const TINY: f32 = f32::from_bits((127 - 110) << 23);

/// Greatest code of a 16-bit activation: 127 * 256, so that it splits into two bytes.
pub(crate) const WIDE_MAX: f32 = 32512.0;
/// Greatest code of an 8-bit activation.
pub(crate) const NARROW_MAX: f32 = 127.0;

/// Sixteen chains: lane `i` takes elements `i`, `i + 16`, ... in ascending order, each by a fused
/// multiply-add; what is missing in the last sixteen counts as zero. Then lanes are added 16 to 8
/// (`i` and `i + 8`), 8 to 4, 4 to 2, 2 to 1.
#[cfg(test)]
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 16];
    let end = a.len().next_multiple_of(16);
    for i in 0..end {
        let (a, b) = (a.get(i).copied().unwrap_or(0.0), b.get(i).copied().unwrap_or(0.0));
        lanes[i % 16] = a.mul_add(b, lanes[i % 16]);
    }
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
    }
    lanes[0]
}

/// Codes and scale of one block of at most 32 activations.
///
/// `scale = greatest magnitude / max`; `code = x * (max / greatest magnitude)`, rounded to nearest
/// even. Blocks below [`TINY`] are zero; a block with anything not finite has scale NaN, so that
/// it reaches every output.
#[cfg(test)]
pub(crate) fn round_block(x: &[f32], max: f32) -> (f32, Vec<i32>) {
    if x.iter().any(|x| !x.is_finite()) {
        return (f32::NAN, vec![0; x.len()]);
    }
    let greatest = x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    if greatest < TINY {
        return (0.0, vec![0; x.len()]);
    }
    let factor = max / greatest;
    (greatest / max, x.iter().map(|x| (x * factor).round_ties_even() as i32).collect())
}

/// One output of quantised weights and rounded activations.
///
/// For each block of 32, ascending, `acc = fma(d, s_w * s_x, acc)`, where `d` is the integer dot
/// product (exact in 32 bits) converted to f32, `s_w` the scale of the weights' group and `s_x`
/// that of the block. `q4` has a second chain, `bias = fma(b_g, t_g, bias)` for each group,
/// ascending, where `t` of a block is `s_x * (sum of its codes)` and `t_g` that of the group's
/// block, or of its two blocks added. The result is `acc + bias`, and `acc` alone for `q8`.
#[cfg(test)]
pub(crate) fn dot_quantised(encoding: Encoding, row: &[u8], x: &[f32], max: f32) -> f32 {
    let (d_in, group) = (x.len(), encoding.group());
    let bf16 =
        |at: usize| f32::from_bits(u32::from(u16::from_le_bytes([row[at], row[at + 1]])) << 16);
    let (mut acc, mut bias) = (0.0f32, 0.0f32);
    let code_bytes = if encoding == Encoding::Q8 { d_in } else { d_in / 2 };
    let mut group_sum = 0.0f32;
    for (b, x) in x.chunks(BLOCK).enumerate() {
        let (s_x, codes) = round_block(x, max);
        let first = b * BLOCK;
        let code = |i: usize| match encoding {
            Encoding::Q8 => i32::from(row[i].cast_signed()),
            _ => i32::from(row[i / 2] >> (4 * (i % 2)) & 15),
        };
        let d: i32 = codes.iter().enumerate().map(|(i, q)| code(first + i) * q).sum();
        let g = first / group;
        acc = (d as f32).mul_add(bf16(code_bytes + 2 * g) * s_x, acc);
        let sum = s_x * codes.iter().sum::<i32>() as f32;
        group_sum = if first.is_multiple_of(group) { sum } else { group_sum + sum };
        if encoding != Encoding::Q8 && (first + BLOCK).is_multiple_of(group) {
            bias = bf16(code_bytes + d_in / group * 2 + 2 * g).mul_add(group_sum, bias);
        }
    }
    if encoding == Encoding::Q8 { acc } else { acc + bias }
}
