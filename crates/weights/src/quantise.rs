//! Fitting of quantised groups: deterministic on every machine, never worse than min/max.

use half::bf16;

/// Largest magnitude of a `q8` source: `scale * 127` stays finite after the scale is rounded up.
pub(crate) const Q8_LARGEST: f32 = 3.0e38;
/// Largest magnitude of a `q4` source: `scale * 15` of a group that spans both signs stays finite.
pub(crate) const Q4_LARGEST: f32 = 1.6e38;

/// Adding and subtracting this rounds a small f32 to the nearest integer (ties to even), the same
/// on every machine and in vector registers.
const ROUNDER: f32 = 8_388_608.0;

/// The same for both signs: the low byte is the integer in two's complement.
const SIGNED_ROUNDER: f32 = 12_582_912.0;

/// Codes, scale and bias of one group; a value is `scale * code + bias`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Q4Fit<const G: usize> {
    /// Whole numbers from 0 to 15.
    pub(crate) codes: [f32; G],
    pub(crate) scale: bf16,
    pub(crate) bias: bf16,
    /// Sum of squared differences to what decoding returns.
    pub(crate) error: f64,
}

/// Brings what cannot be quantised into range, so that no arithmetic below makes a NaN.
fn tamed<const G: usize>(values: &[f32; G], limit: f32) -> [f32; G] {
    let mut tame = *values;
    for v in &mut tame {
        *v = if v.is_nan() { 0.0 } else { v.clamp(-limit, limit) };
    }
    tame
}

/// The range of values that are not NaN, in eight lanes: no order changes a minimum.
fn range<const G: usize>(values: &[f32; G]) -> (f32, f32) {
    let (mut low, mut high) = ([f32::INFINITY; 8], [f32::NEG_INFINITY; 8]);
    for values in values.as_chunks::<8>().0 {
        for lane in 0..8 {
            low[lane] = if values[lane] < low[lane] { values[lane] } else { low[lane] };
            high[lane] = if values[lane] > high[lane] { values[lane] } else { high[lane] };
        }
    }
    (low.into_iter().fold(low[0], f32::min), high.into_iter().fold(high[0], f32::max))
}

/// The smallest bf16 that is not below `value`, which is finite and not negative.
fn bf16_up(value: f32) -> bf16 {
    let bits = value.to_bits();
    bf16::from_bits(((bits >> 16) + u32::from(bits & 0xffff != 0)) as u16)
}

/// Quantises 32 values to bytes against the rounded scale, which it returns.
pub(crate) fn q8_group(values: &[f32; 32], codes: &mut [u8; 32]) -> bf16 {
    let values = tamed(values, Q8_LARGEST);
    let largest = values.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    let scale = bf16_up(largest / 127.0);
    let step = scale.to_f32();
    let divisor = if step == 0.0 { 1.0 } else { step };
    for (q, v) in codes.iter_mut().zip(values) {
        // Division, not a reciprocal: the nearest code, also for the largest value. At most 127 in
        // magnitude, since the scale was rounded up.
        let shifted = v / divisor + SIGNED_ROUNDER;
        *q = (shifted.to_bits() & 0xff) as u8;
    }
    scale
}

/// Assigns every value its nearest code for a scale and bias, and measures the error.
#[inline]
fn assign<const G: usize>(values: &[f32; G], scale: bf16, bias: bf16) -> Q4Fit<G> {
    let (step, base) = (scale.to_f32(), bias.to_f32());
    // With no step every code decodes to the bias; dividing by one keeps NaN out.
    let divisor = if step == 0.0 { 1.0 } else { step };
    // Separate passes over arrays: each becomes a few vector instructions.
    let mut codes = [0.0f32; G];
    for (code, v) in codes.iter_mut().zip(values) {
        *code = nearest_code((v - base) / divisor);
    }
    let mut missed = [0.0f32; G];
    for ((missed, code), v) in missed.iter_mut().zip(&codes).zip(values) {
        *missed = v - (step * code + base);
    }
    Q4Fit { codes, scale, bias, error: lane_sum(&missed, &missed) }
}

/// What differences are multiplied with to become codes: the last bit may part from a division,
/// which only matters between two codes that are equally near. Zero when there is no step.
fn inverse(step: f32) -> f32 {
    let inverse = 1.0 / step;
    if inverse.is_finite() { inverse } else { 0.0 }
}

/// Rounds and clamps to a code with operations that stay in vector registers.
#[inline(always)]
fn nearest_code(x: f32) -> f32 {
    let x = if x > 0.0 { x } else { 0.0 };
    let x = if x < 15.0 { x } else { 15.0 };
    (x + ROUNDER) - ROUNDER
}

/// The sum of products, in eight lanes that are added in order.
#[inline(always)]
fn lane_sum<const G: usize>(a: &[f32; G], b: &[f32; G]) -> f64 {
    let mut lanes = [0.0f64; 8];
    for (a, b) in a.as_chunks::<8>().0.iter().zip(b.as_chunks::<8>().0) {
        for lane in 0..8 {
            lanes[lane] += f64::from(a[lane]) * f64::from(b[lane]);
        }
    }
    lanes.iter().sum()
}

/// Sums that the least-squares line through (code, value) needs.
struct Sums {
    n: f64,
    codes: f64,
    squares: f64,
    values: f64,
    products: f64,
}

impl Sums {
    fn of<const G: usize>(codes: &[f32; G], values: &[f32; G], total: f64) -> Self {
        let (mut sum, mut squares) = ([0.0f32; 8], [0.0f32; 8]);
        for codes in codes.as_chunks::<8>().0 {
            for lane in 0..8 {
                // Whole numbers far below 2^24: exact in any order.
                sum[lane] += codes[lane];
                squares[lane] += codes[lane] * codes[lane];
            }
        }
        Self {
            n: G as f64,
            codes: f64::from(sum.iter().sum::<f32>()),
            squares: f64::from(squares.iter().sum::<f32>()),
            values: total,
            products: lane_sum(codes, values),
        }
    }

    /// The best line, its scale rounded before the bias is fitted to it; nothing when all codes
    /// are equal.
    fn scale_first(&self) -> Option<(bf16, bf16)> {
        let scale = bf16::from_f64(self.slope()?);
        Some((scale, bf16::from_f64((self.values - scale.to_f64() * self.codes) / self.n)))
    }

    /// The best line, its bias rounded before the scale is fitted to it.
    fn bias_first(&self) -> Option<(bf16, bf16)> {
        let bias = bf16::from_f64((self.values - self.slope()? * self.codes) / self.n);
        let scale = (self.products - bias.to_f64() * self.codes) / self.squares;
        Some((bf16::from_f64(scale), bias))
    }

    fn slope(&self) -> Option<f64> {
        let spread = self.n * self.squares - self.codes * self.codes;
        (spread > 0.0).then(|| (self.n * self.products - self.codes * self.values) / spread)
    }
}

/// The best fit so far.
struct Search<'a, const G: usize> {
    values: &'a [f32; G],
    best: Q4Fit<G>,
}

impl<const G: usize> Search<'_, G> {
    /// Keeps a scale and bias if they are strictly better. What overflows never is.
    fn offer(&mut self, scale: bf16, bias: bf16) -> bool {
        let fit = assign(self.values, scale, bias);
        let better = fit.error < self.best.error;
        if better {
            self.best = fit;
        }
        better
    }

    fn offer_line(&mut self, line: Option<(bf16, bf16)>) -> bool {
        line.is_some_and(|(scale, bias)| self.offer(scale, bias))
    }
}

/// How far the stretched ranges of the search go from the plain one, in codes.
const STRETCHES: [f32; 5] = [-0.8, -0.4, 0.0, 0.4, 0.8];
/// Most rounds of fitting a line to the codes and the codes to the line.
const ROUNDS: usize = 3;

/// Quantises a group: of the min/max fits, the fits of MLX and least-squares lines through
/// several ranges the one with the smallest squared error, all with scale and bias as stored.
///
/// **Numerics.** Single steps are IEEE 754 operations in a fixed order, so every machine finds the
/// same fit. The error is never above that of any min/max fit.
pub(crate) fn q4_group<const G: usize>(values: &[f32; G]) -> Q4Fit<G> {
    let values = &tamed(values, Q4_LARGEST);
    let (low, high) = range(values);
    let bias = bf16::from_f32(low);
    let mut search = Search { values, best: assign(values, bf16::ZERO, bias) };
    if low == high {
        // One more code for what the bias loses, so that also a constant f32 group is close.
        search.offer(bf16::from_f32(low - bias.to_f32()), bias);
        return search.best;
    }
    let step_to = |far: f32, base: bf16| bf16::from_f32((far - base.to_f32()) / 15.0);
    let plain = bf16::from_f32((high - low) / 15.0);
    search.offer(plain, bias);
    if step_to(high, bias) != plain {
        search.offer(step_to(high, bias), bias);
    }
    let (scale, edge) = mlx_fit(low, high);
    search.offer(scale, edge);
    if high - low < (low.abs().max(high.abs())) * 0.25 {
        // Rounding the bias moves it by a good part of such a range: start outside of it.
        let (below, above) = (bf16_down(low), bf16_up_signed(high));
        search.offer(step_to(high, below), below);
        search.offer(step_to(low, above), above);
    }
    let middle = low + (high - low) / 2.0;
    let lattice = |v: f32| u32::from(v == low || v == high || v == middle);
    if values.iter().map(|v| lattice(*v)).sum::<u32>() > G as u32 / 2 {
        // Two or three equidistant values, as pruned and ternary models have.
        search.offer(bf16::from_f32(high - low), bias);
        search.offer(bf16::from_f32((high - low) / 2.0), bias);
    }
    if search.best.error == 0.0 {
        return search.best;
    }
    let total = lane_sum(values, &[1.0; G]);
    for stretch in STRETCHES {
        let step = (high - low) / (15.0 + stretch);
        let inverse = inverse(step);
        let mut codes = [0.0f32; G];
        for (code, v) in codes.iter_mut().zip(values) {
            *code = nearest_code((v - low) * inverse);
        }
        search.offer_line(Sums::of(&codes, values, total).scale_first());
    }
    for _ in 0..ROUNDS {
        let sums = Sums::of(&search.best.codes, values, total);
        let improved = search.offer_line(sums.scale_first());
        if !search.offer_line(sums.bias_first()) && !improved {
            break;
        }
    }
    search.best
}

/// The largest bf16 that is not above a finite value.
fn bf16_down(value: f32) -> bf16 {
    -bf16_up_signed(-value)
}

/// The smallest bf16 that is not below a finite value of any sign.
fn bf16_up_signed(value: f32) -> bf16 {
    if value < 0.0 {
        // Cutting the low bits of a negative value raises it.
        bf16::from_bits((value.to_bits() >> 16) as u16)
    } else {
        bf16_up(value)
    }
}

/// Scale and bias as MLX's affine mode chooses them: the edge of larger magnitude is exact and
/// zero is a code.
///
/// **Source.** ml-explore/mlx `mlx/backend/cpu/quantized.cpp`, `quantize`.
fn mlx_fit(low: f32, high: f32) -> (bf16, bf16) {
    let side = low.abs() > high.abs();
    let (edge, step) =
        if side { (low, (high - low) / 15.0) } else { (high, -((high - low) / 15.0)) };
    let zero = (edge / step).round();
    // A range of a few subnormals has no step.
    if zero == 0.0 || !zero.is_finite() {
        return (bf16::from_f32(step), bf16::ZERO);
    }
    (bf16::from_f32(edge / zero), bf16::from_f32(edge))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of a few shapes that weights have, by a small generator.
    pub(crate) fn samples<const G: usize>(seed: u32) -> [f32; G] {
        let mut state = seed.wrapping_mul(2_654_435_761) | 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state as f32 / u32::MAX as f32
        };
        let scale = [1.0f32, 1e-3, 30.0, 1e-30][seed as usize % 4];
        let shift = [0.0f32, 0.0, 5.0, -100.0][(seed / 4) as usize % 4];
        std::array::from_fn(|_| {
            let bell = next() + next() + next() + next() - 2.0;
            (bell + shift) * scale
        })
    }

    /// The error of a scale and bias, by the definition of the format.
    fn naive_error<const G: usize>(values: &[f32; G], scale: bf16, bias: bf16) -> f64 {
        let decode = |code: u8| scale.to_f32() * f32::from(code) + bias.to_f32();
        let errors = values.iter().map(|v| {
            (0..16)
                .map(|code| (f64::from(*v) - f64::from(decode(code))).powi(2))
                .fold(f64::INFINITY, f64::min)
        });
        errors.sum()
    }

    fn check_q4<const G: usize>(seed: u32, gain: &mut (f64, f64)) {
        let values = samples::<G>(seed);
        let fit = q4_group(&values);
        let low = values.iter().copied().fold(f32::INFINITY, f32::min);
        let high = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let bias = bf16::from_f32(low);
        let spread = |from: f32| bf16::from_f32((high - from) / 15.0);
        let plain = naive_error(&values, spread(low), bias);
        let covered = naive_error(&values, spread(bias.to_f32()), bias);
        let (scale, edge) = mlx_fit(low, high);
        let mlx = naive_error(&values, scale, edge);
        let real = naive_error(&values, fit.scale, fit.bias);
        // Measured in f32 differences: equal but for their rounding.
        assert!((fit.error - real).abs() <= real * 1e-3, "{seed}: {} {real}", fit.error);
        for other in [plain, covered, mlx] {
            assert!(real <= other * 1.001, "seed {seed}: {real} above {other}");
        }
        gain.0 += real / plain.min(mlx).max(f64::MIN_POSITIVE);
        gain.1 += 1.0;
    }

    #[test]
    fn q4_is_never_worse_than_min_max_or_mlx_and_usually_better() {
        let mut gain = (0.0, 0.0);
        for seed in 0..4000 {
            check_q4::<32>(seed, &mut gain);
            check_q4::<64>(seed, &mut gain);
        }
        let mean = gain.0 / gain.1;
        assert!(mean < 0.85, "mean error {mean} of the better simple fit");
    }

    #[test]
    fn q4_codes_are_the_nearest_ones() {
        for seed in 0..500 {
            let values = samples::<32>(seed);
            let fit = q4_group(&values);
            for (code, v) in fit.codes.iter().zip(&values) {
                let missed = |c: f32| (v - (fit.scale.to_f32() * c + fit.bias.to_f32())).abs();
                let best = (0..16u8).map(|c| missed(f32::from(c))).fold(f32::INFINITY, f32::min);
                assert!(missed(*code) <= best * 1.000_1, "seed {seed}, code {code}");
            }
        }
    }

    #[test]
    fn q4_stores_constant_and_two_valued_groups_exactly() {
        for value in [0.0f32, -0.0, 1.0, -0.375, 1e-38, -1.5e38, 3.0e-39] {
            let value = bf16::from_f32(value).to_f32();
            let fit = q4_group(&[value; 64]);
            assert_eq!(fit.error, 0.0, "{value}");
            assert_eq!(fit.scale.to_f32(), 0.0, "{value}");
            assert_eq!(fit.bias.to_f32(), value, "{value}");
        }
        let f32_only = 0.123_456_79_f32;
        let fit = q4_group(&[f32_only; 32]);
        assert!(fit.error.sqrt() < f64::from(f32_only) * 32.0 * 1e-4, "{}", fit.error);
        let two: [f32; 32] = std::array::from_fn(|i| if i % 3 == 0 { 0.5 } else { -0.25 });
        assert_eq!(q4_group(&two).error, 0.0);
        let one: [f32; 32] = std::array::from_fn(|i| if i == 7 { -0.013_671_875 } else { 0.0 });
        assert_eq!(q4_group(&one).error, 0.0);
        let three: [f32; 64] = std::array::from_fn(|i| [0.0, 0.0, 0.25, 0.0, -0.25][i * i % 5]);
        assert_eq!(q4_group(&three).error, 0.0);
    }

    #[test]
    fn q4_handles_a_narrow_range_far_from_zero() {
        let values: [f32; 32] = std::array::from_fn(|i| 1.003 + i as f32 * 1e-5);
        let fit = q4_group(&values);
        // The bias alone is off by up to 0.4 %.
        assert!((fit.error / 32.0).sqrt() < 3e-4, "{}", fit.error);
    }

    #[test]
    fn huge_and_broken_values_make_no_nan() {
        let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, 1.0];
        for shift in 0..odd.len() {
            let values: [f32; 32] = std::array::from_fn(|i| odd[(i / 3 + shift) % odd.len()]);
            let fit = q4_group(&values);
            for code in fit.codes {
                let v = fit.scale.to_f32() * code + fit.bias.to_f32();
                assert!(v.is_finite(), "q4 {v}");
            }
            let mut codes = [0; 32];
            let scale = q8_group(&values, &mut codes).to_f32();
            for code in codes {
                assert!((scale * f32::from(code.cast_signed())).is_finite(), "q8 {scale} {code}");
            }
        }
    }

    #[test]
    fn q8_never_clips_and_stays_within_half_a_step() {
        for seed in 0..4000 {
            let values = samples::<32>(seed);
            let mut codes = [0; 32];
            let scale = q8_group(&values, &mut codes).to_f32();
            let largest = values.iter().fold(0.0f32, |m, v| m.max(v.abs()));
            assert!(scale * 127.0 >= largest, "seed {seed}: {scale} clips {largest}");
            assert!(scale <= largest / 127.0 * (1.0 + 1.0 / 128.0), "seed {seed}: {scale}");
            for (code, v) in codes.iter().zip(&values) {
                let code = code.cast_signed();
                assert!(code != -128);
                let missed = (v - scale * f32::from(code)).abs();
                assert!(missed <= scale * 0.500_01, "seed {seed}: {v} as {code} of {scale}");
            }
        }
        let mut codes = [1; 32];
        assert_eq!(q8_group(&[0.0; 32], &mut codes).to_bits(), 0);
        assert_eq!(codes, [0; 32]);
    }

    #[test]
    fn rounding_up_and_down_brackets() {
        for value in [0.0f32, 1.0, 1.001, -1.001, 3.1e-40, -3.1e-40, 1.2e38, -1.2e38] {
            let (down, up) = (bf16_down(value).to_f32(), bf16_up_signed(value).to_f32());
            assert!(down <= value && value <= up, "{down} {value} {up}");
            assert!(up - down <= (value.abs() / 128.0).max(1e-40), "{down} {value} {up}");
        }
    }
}
