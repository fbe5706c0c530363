//! Makes `fixtures/oracle/` from the reference models beside the project: weights and configs as
//! they are, cases without what no test reads, logits of a choice of rows.

use crate::project;
use crate::safetensors::{self, Tensor, Tensors};
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

/// Families that have fixtures.
const FAMILIES: [&str; 5] = ["qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5", "gpt_oss"];
/// Files copied as they are.
const COPIED: [&str; 3] = ["model.safetensors", "config.json", "config.published.json"];
/// Most rows of logits a family.
const ROWS_MAX: usize = 120;
/// Rows from the start of a case that are always kept: the first tokens of a recurrence.
const FIRST_ROWS: usize = 8;
/// Every so many rows one is kept.
const STRIDE: usize = 8;

/// Fields of `cases.json` that tests read, or that say where the numbers come from.
const FIELDS: [&str; 9] = [
    "arch",
    "seed",
    "transformers",
    "torch",
    "vocab_size",
    "eos_token_id",
    "weights",
    "logits_row",
    "tolerance",
];
/// Fields of a case that tests read.
const CASE_FIELDS: [&str; 9] = [
    "name",
    "purpose",
    "prompt",
    "greedy",
    "greedy_rows",
    "n_tokens",
    "min_greedy_margin",
    "min_topk_gap",
    "robust",
];

#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Folder of the reference models [default: ../shared/oracle]
    #[arg(long)]
    oracle: Option<PathBuf>,
    /// Change nothing; fail where a fixture differs from what would be made
    #[arg(long)]
    check: bool,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let root = project::root();
    let oracle = options.oracle.clone().unwrap_or_else(|| root.join("../shared/oracle"));
    let made = make(&oracle)?;
    let folder = root.join("fixtures/oracle");
    let mut different = Vec::new();
    let mut bytes = 0;
    for (name, file) in &made {
        let path = folder.join(name);
        bytes += file.len();
        if fs::read(&path).ok().as_ref() == Some(file) {
            continue;
        }
        different.push(name.as_str());
        if !options.check {
            let parent = path.parent().context("a fixture lies in a folder")?;
            fs::create_dir_all(parent)?;
            fs::write(&path, file).with_context(|| format!("cannot write {}", path.display()))?;
        }
    }
    if options.check && !different.is_empty() {
        bail!("`cargo xtask fixtures` would change {}", different.join(", "));
    }
    println!("{} files, {bytes} bytes, {} changed", made.len(), different.len());
    Ok(())
}

/// The files of `fixtures/oracle/`, by name.
fn make(oracle: &Path) -> Result<BTreeMap<String, Vec<u8>>> {
    let mut files = BTreeMap::from([("README.md".to_owned(), README.as_bytes().to_owned())]);
    for family in FAMILIES {
        let folder = oracle.join(family);
        let read = |name: &str| {
            let path = folder.join(name);
            fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
        };
        for name in COPIED {
            files.insert(format!("{family}/{name}"), read(name)?);
        }
        let cases: Map<String, Value> = serde_json::from_slice(&read("cases.json")?)?;
        let text = cases_text(&cases).with_context(|| format!("cases.json of `{family}`"))?;
        files.insert(format!("{family}/cases.json"), text.into_bytes());
        let logits = safetensors::parse(&read("logits.safetensors")?)?;
        let (logits, stride) = choose(&logits, ROWS_MAX)
            .with_context(|| format!("logits.safetensors of `{family}`"))?;
        if stride != STRIDE {
            println!("{family}: every {stride}th row instead of every {STRIDE}th, to stay small");
        }
        let file = safetensors::to_bytes(&logits);
        files.insert(format!("{family}/logits.safetensors"), file);
    }
    Ok(files)
}

/// `cases.json` with one field or case a line.
fn cases_text(all: &Map<String, Value>) -> Result<String> {
    let mut text = "{\n".to_owned();
    for field in FIELDS {
        let value = all.get(field).with_context(|| format!("`{field}` is missing"))?;
        writeln!(text, "{}: {value},", Value::from(field))?;
    }
    let cases = all.get("cases").and_then(Value::as_array).context("`cases` is missing")?;
    let mut lines = Vec::new();
    for case in cases {
        let mut kept = Map::new();
        for field in CASE_FIELDS {
            let value = case.get(field).with_context(|| format!("`{field}` of a case"))?;
            kept.insert(field.to_owned(), value.clone());
        }
        lines.push(Value::Object(kept).to_string());
    }
    writeln!(text, "\"cases\": [\n{}\n]\n}}", lines.join(",\n"))?;
    Ok(text)
}

/// Rows kept of a case of `n`: the first few, every `stride`-th and the last.
fn rows_kept(n: usize, stride: usize) -> Vec<usize> {
    let kept = |row: &usize| *row < FIRST_ROWS || row.is_multiple_of(stride) || row + 1 == n;
    (0..n).filter(kept).collect()
}

/// For each case `[n, vocab]` the rows kept, and their numbers as `<case>.rows`; the stride is
/// doubled until at most `rows_max` rows are left over all cases.
fn choose(logits: &Tensors, rows_max: usize) -> Result<(Tensors, usize)> {
    let mut stride = STRIDE;
    let rows_at = |stride: usize| -> usize {
        logits.values().map(|case| rows_kept(case.shape[0], stride).len()).sum()
    };
    let longest = logits.values().map(|case| case.shape[0]).max().unwrap_or(0);
    while rows_at(stride) > rows_max {
        ensure!(stride < longest, "{} rows are left, wanted {rows_max}", rows_at(stride));
        stride *= 2;
    }
    let mut chosen = Tensors::new();
    for (name, case) in logits {
        ensure!(case.dtype == "F32" && case.shape.len() == 2, "`{name}` is no f32 matrix");
        let (n, width) = (case.shape[0], case.shape[1]);
        let rows = rows_kept(n, stride);
        let of = |row: &usize| case.bytes[row * width * 4..][..width * 4].to_owned();
        let bytes = rows.iter().flat_map(of).collect();
        let kept = Tensor { dtype: "F32".into(), shape: vec![rows.len(), width], bytes };
        chosen.insert(name.clone(), kept);
        let bytes = rows.iter().flat_map(|&row| (row as u32).to_le_bytes()).collect();
        let numbers = Tensor { dtype: "U32".into(), shape: vec![rows.len()], bytes };
        chosen.insert(format!("{name}.rows"), numbers);
    }
    Ok((chosen, stride))
}

/// The page that goes with the files.
const README: &str = include_str!("fixtures.md");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_the_first_every_eighth_and_the_last() {
        assert_eq!(rows_kept(5, 8), [0, 1, 2, 3, 4]);
        assert_eq!(rows_kept(20, 8), [0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 19]);
        assert_eq!(rows_kept(0, 8), [0; 0]);
    }

    fn matrix(n: usize) -> Tensor {
        let bytes = (0..2 * n).flat_map(|i| (i as f32).to_le_bytes()).collect();
        Tensor { dtype: "F32".into(), shape: vec![n, 2], bytes }
    }

    #[test]
    fn logits_keep_their_rows() {
        let logits = Tensors::from([("a".to_owned(), matrix(20))]);
        let (chosen, stride) = choose(&logits, ROWS_MAX).expect("few rows");
        assert_eq!((stride, chosen["a"].shape.as_slice()), (8, [11, 2].as_slice()));
        assert_eq!(chosen["a"].bytes[9 * 8..][..4], 32.0f32.to_le_bytes(), "row 16");
        assert_eq!(chosen["a.rows"].bytes[9 * 4..][..4], 16u32.to_le_bytes());
    }

    #[test]
    fn many_rows_are_thinned_out() {
        let logits = Tensors::from([("a".to_owned(), matrix(200))]);
        let (chosen, stride) = choose(&logits, 20).expect("fits when thinned out");
        assert_eq!((stride, chosen["a.rows"].shape[0]), (32, 15));
        assert!(choose(&logits, 8).is_err(), "the first 8 and the last always stay");
    }

    #[test]
    fn fixtures_are_what_would_be_made() {
        let oracle = project::root().join("../shared/oracle");
        if !oracle.is_dir() {
            println!("skipped: {} is missing", oracle.display());
            return;
        }
        let options = Options { oracle: None, check: true };
        run(&options).expect("run `cargo xtask fixtures`");
    }
}
