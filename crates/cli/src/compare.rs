//! `snowmelt compare`: how far two captures or logits files lie apart.

use crate::output::{self, Ui};
use crate::tensors::{self, In};
use anyhow::Result;
use clap::Args;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

/// Compare two captures or logits files
///
/// For each tensor: the greatest and the mean difference, the Kullback-Leibler
/// divergence of its rows where they are logits, and the first place that differs.
/// Exit code 3: values that are not finite, other names or shapes, or a difference
/// above `--tolerance`.
#[derive(Debug, Args)]
#[command(override_usage = "snowmelt compare [OPTIONS] A B")]
pub(crate) struct CompareArgs {
    /// A safetensors file, a `.f16` capture, or a folder of them
    a: PathBuf,
    /// What to compare it with
    b: PathBuf,
    /// Greatest difference that is no difference
    #[arg(long, value_name = "X", default_value = "0")]
    tolerance: f32,
    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    json: bool,
}

/// Exit code where the two are not the same.
const DIFFERENT: u8 = 3;
/// Most rows by which a shift is looked for.
const SHIFT_MAX: usize = 16;

/// What became of one tensor.
#[derive(Debug, PartialEq)]
enum Outcome {
    /// Only in A or in B.
    Missing { only_in: &'static str },
    /// Rows and columns of both.
    Shapes { a: [usize; 2], b: [usize; 2] },
    /// A value that is NaN or infinite.
    NotFinite { of: &'static str, row: usize, column: usize, value: f32 },
    /// Numbers.
    Compared(Difference),
}

#[derive(Debug, Default, PartialEq)]
struct Difference {
    max: f32,
    mean: f64,
    /// Mean over rows of KL(softmax A, softmax B), in nats.
    kl: Option<f64>,
    /// Row and column of the first difference above the tolerance.
    first: Option<[usize; 2]>,
    /// First row whose greatest value is another.
    first_choice: Option<usize>,
    /// What the difference looks like.
    pattern: Option<String>,
}

pub(crate) fn run(args: &CompareArgs, _: Ui) -> Result<ExitCode> {
    let (a, b) = (tensors::read(&args.a)?, tensors::read(&args.b)?);
    let mut outcomes = compare_all(&a, &b, args.tolerance);
    name_exchanged(&a, &b, &mut outcomes);
    let is_same = outcomes.values().all(|outcome| match outcome {
        Outcome::Compared(difference) => difference.max <= args.tolerance,
        _ => false,
    });
    if args.json {
        let tensors: serde_json::Map<String, Value> =
            outcomes.iter().map(|(name, outcome)| (name.clone(), report(outcome))).collect();
        output::json(&json!({ "same": is_same, "tensors": tensors }))?;
    } else {
        output::data(&describe(&outcomes, is_same))?;
    }
    Ok(if is_same { ExitCode::SUCCESS } else { ExitCode::from(DIFFERENT) })
}

fn compare_all(
    a: &BTreeMap<String, In>,
    b: &BTreeMap<String, In>,
    tolerance: f32,
) -> BTreeMap<String, Outcome> {
    let mut outcomes = BTreeMap::new();
    for name in a.keys().chain(b.keys()) {
        let outcome = match (a.get(name), b.get(name)) {
            (Some(a), Some(b)) => compare(name, a, b, tolerance),
            (Some(_), None) => Outcome::Missing { only_in: "A" },
            _ => Outcome::Missing { only_in: "B" },
        };
        outcomes.insert(name.clone(), outcome);
    }
    outcomes
}

fn compare(name: &str, a: &In, b: &In, tolerance: f32) -> Outcome {
    for (of, tensor) in [("A", a), ("B", b)] {
        if let Some(at) = tensor.values.iter().position(|value| !value.is_finite()) {
            let (row, column) = (at / tensor.width, at % tensor.width);
            return Outcome::NotFinite { of, row, column, value: tensor.values[at] };
        }
    }
    if [a.rows, a.width] != [b.rows, b.width] {
        return Outcome::Shapes { a: [a.rows, a.width], b: [b.rows, b.width] };
    }
    let apart = |(a, b): (&f32, &f32)| (a - b).abs();
    let pairs = || a.values.iter().zip(&b.values);
    let max = pairs().map(apart).fold(0.0, f32::max);
    let mean = pairs().map(|pair| f64::from(apart(pair))).sum::<f64>() / a.values.len() as f64;
    let first = pairs().position(|pair| apart(pair) > tolerance);
    let is_logits = name == "logits" || name.ends_with(".logits");
    let rows = || a.values.chunks_exact(a.width).zip(b.values.chunks_exact(b.width));
    Outcome::Compared(Difference {
        max,
        mean: if a.values.is_empty() { 0.0 } else { mean },
        kl: is_logits.then(|| rows().map(|(a, b)| kl(a, b)).sum::<f64>() / a.rows.max(1) as f64),
        first: first.map(|at| [at / a.width, at % a.width]),
        first_choice: if is_logits {
            rows().position(|(a, b)| greatest(a) != greatest(b))
        } else {
            None
        },
        pattern: first.and_then(|_| pattern(a, b, tolerance)),
    })
}

/// `sum p_a ln(p_a / p_b)` of two rows of logits, in nats.
fn kl(a: &[f32], b: &[f32]) -> f64 {
    let (log_a, log_b) = (log_sum(a), log_sum(b));
    let term = |(a, b): (&f32, &f32)| {
        let (a, b) = (f64::from(*a) - log_a, f64::from(*b) - log_b);
        a.exp() * (a - b)
    };
    a.iter().zip(b).map(term).sum::<f64>().max(0.0)
}

fn log_sum(x: &[f32]) -> f64 {
    let max = f64::from(x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    max + x.iter().map(|x| (f64::from(*x) - max).exp()).sum::<f64>().ln()
}

fn greatest(x: &[f32]) -> Option<usize> {
    (0..x.len()).reduce(|a, b| if x[b] > x[a] { b } else { a })
}

/// Whether rows were shifted, or two exchanged.
fn pattern(a: &In, b: &In, tolerance: f32) -> Option<String> {
    let row = |tensor: &In, i: usize| tensor.values[i * tensor.width..][..tensor.width].to_vec();
    let alike = |x: &[f32], y: &[f32]| x.iter().zip(y).all(|(x, y)| (x - y).abs() <= tolerance);
    let same = |i: usize, j: usize| alike(&row(a, i), &row(b, j));
    for by in 1..=SHIFT_MAX.min(a.rows.saturating_sub(2)) {
        if (by..a.rows).all(|i| same(i - by, i)) {
            return Some(format!("rows of B are those of A, {by} later"));
        }
        if (by..a.rows).all(|i| same(i, i - by)) {
            return Some(format!("rows of B are those of A, {by} earlier"));
        }
    }
    let different: Vec<usize> = (0..a.rows).filter(|i| !same(*i, *i)).take(3).collect();
    match different[..] {
        [i, j] if same(i, j) && same(j, i) => Some(format!("rows {i} and {j} are exchanged")),
        [i] => columns(&row(a, i), &row(b, i), tolerance)
            .map(|pattern| format!("in row {i}, {pattern}")),
        _ => None,
    }
}

/// The same within a row.
fn columns(a: &[f32], b: &[f32], tolerance: f32) -> Option<String> {
    let same = |i: usize, j: usize| (a[i] - b[j]).abs() <= tolerance;
    let n = a.len();
    for by in 1..=SHIFT_MAX.min(n.saturating_sub(2)) {
        if (by..n).all(|i| same(i - by, i)) {
            return Some(format!("columns of B are those of A, {by} later"));
        }
        if (by..n).all(|i| same(i, i - by)) {
            return Some(format!("columns of B are those of A, {by} earlier"));
        }
    }
    let different: Vec<usize> = (0..n).filter(|i| !same(*i, *i)).take(3).collect();
    match different[..] {
        [i, j] if same(i, j) && same(j, i) => Some(format!("columns {i} and {j} are exchanged")),
        _ => None,
    }
}

/// Tensors that hold each other's values.
fn name_exchanged(
    a: &BTreeMap<String, In>,
    b: &BTreeMap<String, In>,
    outcomes: &mut BTreeMap<String, Outcome>,
) {
    let names: Vec<String> = outcomes
        .iter()
        .filter(|(_, outcome)| matches!(outcome, Outcome::Compared(d) if d.first.is_some()))
        .map(|(name, _)| name.clone())
        .collect();
    for name in &names {
        let other = names.iter().find(|other| *other != name && a[name] == b[*other]);
        if let (Some(other), Some(Outcome::Compared(difference))) =
            (other.filter(|other| a[*other] == b[name]), outcomes.get_mut(name))
        {
            difference.pattern = Some(format!("exchanged with `{other}`"));
        }
    }
}

fn report(outcome: &Outcome) -> Value {
    match outcome {
        Outcome::Missing { only_in } => json!({ "only_in": only_in }),
        Outcome::Shapes { a, b } => json!({ "shape_a": a, "shape_b": b }),
        Outcome::NotFinite { of, row, column, value } => json!({
            "not_finite": { "file": of, "row": row, "column": column, "value": value.to_string() },
        }),
        Outcome::Compared(d) => json!({
            "max": d.max,
            "mean": d.mean,
            "kl": d.kl,
            "first": d.first,
            "first_choice": d.first_choice,
            "pattern": d.pattern,
        }),
    }
}

fn describe(outcomes: &BTreeMap<String, Outcome>, is_same: bool) -> String {
    let mut text = String::new();
    for (name, outcome) in outcomes {
        let _ = writeln!(text, "{name}");
        let line = match outcome {
            Outcome::Missing { only_in } => format!("only in {only_in}"),
            Outcome::Shapes { a, b } => format!("A is {a:?}, B is {b:?}"),
            Outcome::NotFinite { of, row, column, value } => {
                format!("{of} holds {value} at row {row}, column {column}")
            }
            Outcome::Compared(d) => {
                let mut line = format!("max {:.3e}, mean {:.3e}", d.max, d.mean);
                if let Some(kl) = d.kl {
                    let _ = write!(line, ", KL {kl:.3e}");
                }
                if let Some([row, column]) = d.first {
                    let _ = write!(line, "\n  first at row {row}, column {column}");
                }
                if let Some(row) = d.first_choice {
                    let _ = write!(line, "\n  another greatest value from row {row} on");
                }
                if let Some(pattern) = &d.pattern {
                    let _ = write!(line, "\n  {pattern}");
                }
                line
            }
        };
        let _ = writeln!(text, "  {line}");
    }
    text.push_str(if is_same { "same\n" } else { "different\n" });
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(rows: usize, width: usize) -> In {
        let values = (0..rows * width).map(|i| ((i * 37 + 11) % 101) as f32 / 7.0).collect();
        In { rows, width, values }
    }

    fn outcome(b: &In) -> Outcome {
        compare("logits", &tensor(5, 4), b, 0.0)
    }

    #[test]
    fn equal_ones_do_not_differ() {
        let Outcome::Compared(d) = outcome(&tensor(5, 4)) else { panic!("comparable") };
        assert_eq!((d.max, d.mean, d.kl, d.first), (0.0, 0.0, Some(0.0), None));
    }

    #[test]
    fn a_planted_nan_is_found_first() {
        let mut b = tensor(5, 4);
        b.values[9] = f32::NAN;
        let Outcome::NotFinite { of, row, column, .. } = outcome(&b) else { panic!("a NaN") };
        assert_eq!((of, row, column), ("B", 2, 1));
    }

    #[test]
    fn shifts_and_exchanges_are_named() {
        let pattern = |b: &In| match outcome(b) {
            Outcome::Compared(difference) => difference.pattern,
            other => panic!("{other:?}"),
        };
        let mut later = tensor(5, 4);
        later.values.rotate_right(4);
        assert_eq!(pattern(&later).as_deref(), Some("rows of B are those of A, 1 later"));
        let mut exchanged = tensor(5, 4);
        let (first, second) = exchanged.values.split_at_mut(12);
        first[4..8].swap_with_slice(&mut second[..4]);
        assert_eq!(pattern(&exchanged).as_deref(), Some("rows 1 and 3 are exchanged"));
        let mut columns = tensor(5, 4);
        columns.values.swap(8, 10);
        let expected = "in row 2, columns 0 and 2 are exchanged";
        assert_eq!(pattern(&columns).as_deref(), Some(expected));
    }

    #[test]
    fn kl_of_two_coins() {
        // 0.5 ln(0.5 / 0.8) + 0.5 ln(0.5 / 0.2)
        let (a, b) = ([0.0, 0.0], [0.8_f32.ln(), 0.2_f32.ln()]);
        assert!((kl(&a, &b) - 0.223_143_55).abs() < 1e-6, "{}", kl(&a, &b));
    }
}
