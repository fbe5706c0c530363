//! Bounds, comparisons and what they found.

use std::fmt;

/// How far results may lie from the expected ones. Operands make results of magnitude about 1;
/// where they come out smaller, differences are measured against [`Bound::FLOOR`] instead, because
/// cancellation is no fault.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound {
    /// Largest mean squared difference, as a share of the mean squared expected value.
    pub nmse: f64,
    /// Largest single difference, as a share of the largest expected magnitude.
    pub max_abs: f64,
}

impl Bound {
    /// Least root mean square that differences are measured against.
    pub const FLOOR: f64 = 0.1;
}

/// What is demanded of a backend.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    /// Against the reference, every verb but those below.
    pub verbs: Bound,
    /// Against the reference, `linear` and `moe_ffn` on quantised weights, where activations may be
    /// rounded.
    pub products: Bound,
    /// Whether `products` holds beside every weight, not only beside quantised ones.
    pub everywhere: bool,
    /// Whether rows, chunks, company and strides must leave the bits alone; if not, each of these
    /// ways is held to the bounds above.
    pub exact: bool,
}

impl Tolerance {
    /// f32 arithmetic throughout. The bound lies below what a missing rounding of K or V to f16
    /// would change.
    pub const fn f32() -> Self {
        let verbs = Bound { nmse: 1e-9, max_abs: 2e-4 };
        Self { verbs, products: verbs, everywhere: false, exact: true }
    }

    /// Activations rounded to 15 bits in blocks of 32.
    pub const fn i16() -> Self {
        Self { products: Bound { nmse: 1e-8, max_abs: 1e-3 }, ..Self::f32() }
    }

    /// Activations rounded to 8 bits in blocks of 32.
    pub const fn i8() -> Self {
        Self { products: Bound { nmse: 4e-4, max_abs: 8e-2 }, ..Self::f32() }
    }

    /// The same, for a backend that rounds activations beside plain weights too.
    #[must_use]
    pub const fn everywhere(self) -> Self {
        Self { everywhere: true, ..self }
    }

    /// The bound of a product with weights that are quantised or not.
    pub(super) fn product(&self, quantised: bool) -> &Bound {
        if quantised || self.everywhere { &self.products } else { &self.verbs }
    }

    /// The same without exact bits, for a backend whose kernels depend on the number of rows.
    #[must_use]
    pub const fn approximate(self) -> Self {
        Self { exact: false, ..self }
    }
}

/// One case that failed in one way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Verb, shape, encoding.
    pub case: String,
    /// How it was run.
    pub way: &'static str,
    /// Element and both values, or what else is wrong.
    pub what: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}): {}", self.case, self.way, self.what)
    }
}

/// What the suite found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Cases run.
    pub cases: usize,
    /// Runs of cases in their ways.
    pub runs: usize,
    /// What failed.
    pub failures: Vec<Failure>,
}

impl Report {
    /// # Panics
    /// With the first failures, when there are any, or when nothing was run.
    pub fn assert_ok(&self) {
        let shown: Vec<String> = self.failures.iter().take(20).map(Failure::to_string).collect();
        let (failed, runs) = (self.failures.len(), self.runs);
        assert!(shown.is_empty(), "{failed} failures in {runs} runs\n{}", shown.join("\n"));
        assert!(self.cases > 0, "no case was run");
    }

    /// Adds what another group found.
    pub fn append(&mut self, other: Self) {
        self.cases += other.cases;
        self.runs += other.runs;
        self.failures.extend(other.failures);
    }
}

/// One named result of a case, `[_, width]`.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) name: &'static str,
    pub(super) width: usize,
    pub(super) values: Vec<f32>,
    /// Whether even the reference must be met bit for bit.
    pub(super) exact: bool,
}

impl Part {
    pub(super) fn new(name: &'static str, width: usize, values: Vec<f32>) -> Self {
        Self { name, width, values, exact: false }
    }

    pub(super) fn exact(name: &'static str, width: usize, values: Vec<f32>) -> Self {
        Self { exact: true, ..Self::new(name, width, values) }
    }

    fn at(&self, index: usize, expected: f32, got: f32) -> String {
        let (row, column) = (index / self.width, index % self.width);
        format!("{}[{row}, {column}]: expected {expected:e}, got {got:e}", self.name)
    }

    /// What differs in bits, if anything. Any NaN equals any other.
    pub(super) fn differs_in_bits(&self, got: &Self) -> Option<String> {
        let different = |&(_, (a, b)): &(usize, (&f32, &f32))| !same(*a, *b);
        let mut pairs = self.pairs(got).filter(different);
        let (index, (expected, got)) = pairs.next()?;
        let others = pairs.count();
        Some(format!("{} and {others} more differ in bits", self.at(index, *expected, *got)))
    }

    /// What lies outside of the bound, if anything. NaN must meet NaN.
    pub(super) fn exceeds(&self, got: &Self, bound: &Bound) -> Option<String> {
        if self.exact {
            return self.differs_in_bits(got);
        }
        let (mut error, mut signal, mut largest, mut count) = (0.0, 0.0, 0.0f64, 0);
        let mut worst = (0.0, 0, 0.0, 0.0);
        for (index, (&expected, &got)) in self.pairs(got) {
            if same(expected, got) && !expected.is_finite() {
                continue;
            }
            let difference = (expected as f64 - got as f64).abs();
            if !difference.is_finite() {
                return Some(self.at(index, expected, got));
            }
            error += difference * difference;
            signal += expected as f64 * expected as f64;
            largest = largest.max((expected as f64).abs());
            count += 1;
            if difference > worst.0 {
                worst = (difference, index, expected, got);
            }
        }
        let nmse = error / signal.max(Bound::FLOOR * Bound::FLOOR * count as f64);
        let share = worst.0 / largest.max(Bound::FLOOR);
        if count == 0 || (nmse <= bound.nmse && share <= bound.max_abs) {
            return None;
        }
        let Bound { nmse: most, max_abs } = bound;
        Some(format!(
            "{} (nmse {nmse:.1e}, at most {most:.0e}; share {share:.1e}, at most {max_abs:.0e})",
            self.at(worst.1, worst.2, worst.3),
        ))
    }

    fn pairs<'a>(&'a self, got: &'a Self) -> impl Iterator<Item = (usize, (&'a f32, &'a f32))> {
        assert_eq!((self.name, self.values.len()), (got.name, got.values.len()), "parts of a case");
        self.values.iter().zip(&got.values).enumerate()
    }
}

/// Equal bits, or both NaN.
pub(super) fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(values: &[f32]) -> Part {
        Part::new("out", 2, values.to_vec())
    }

    #[test]
    fn bounds_see_noise_outliers_and_nan() {
        let bound = Bound { nmse: 1e-4, max_abs: 0.1 };
        let expected = part(&[1.0, -2.0, 3.0, f32::NAN]);
        let exceeds = |values: &[f32]| expected.exceeds(&part(values), &bound);
        assert_eq!(exceeds(&[1.001, -2.001, 3.0, f32::NAN]), None);
        let noise = exceeds(&[1.1, -2.1, 3.0, f32::NAN]).expect("too much noise");
        assert!(noise.starts_with("out[0, 0]: expected 1e0, got 1.1e0 (nmse 1.4e-3"), "{noise}");
        let nan = exceeds(&[1.0, f32::NAN, 3.0, f32::NAN]).expect("a NaN");
        assert_eq!(nan, "out[0, 1]: expected -2e0, got NaN");
        assert!(exceeds(&[1.0, -2.0, 3.0, 0.0]).is_some(), "NaN was expected");
    }

    #[test]
    fn bits_see_the_last_one() {
        let expected = part(&[1.0, 0.0, f32::NAN]);
        let next = f32::from_bits(1.0f32.to_bits() + 1);
        assert_eq!(expected.differs_in_bits(&part(&[1.0, 0.0, -f32::NAN])), None);
        let what = expected.differs_in_bits(&part(&[next, -0.0, f32::NAN])).expect("different");
        assert!(what.contains("out[0, 0]") && what.contains("1 more"), "{what}");
    }

    #[test]
    #[should_panic(expected = "1 failures in 2 runs\nlinear (alone): wrong")]
    fn a_report_shows_its_failures() {
        let failure = Failure { case: "linear".into(), way: "alone", what: "wrong".into() };
        Report { cases: 1, runs: 2, failures: vec![failure] }.assert_ok();
    }
}
