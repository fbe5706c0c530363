//! Rules that a tool can hold, so that no one has to remember them.
//!
//! A rule is a function from a [`Tree`] to findings; each has a test beside it that shows it fire
//! on a tree of a few lines. All findings are listed at once.

mod allow;
mod comments;
mod crates;
mod docs;
mod manifest;
mod names;
mod sizes;
mod source;
mod tree;
mod weight;

use crate::project;
use allow::AllowList;
use anyhow::{Result, bail};
use manifest::Manifest;
use source::Source;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use tree::Files;

/// The one command that runs all tests: in `README.md` and in `.ci/run`, letter for letter.
pub(crate) const TEST_COMMAND: &str = "cargo test --release --workspace";

pub(crate) fn run() -> Result<()> {
    let findings = findings(&project::root())?;
    for finding in &findings {
        println!("{finding}");
    }
    match findings.len() {
        0 => Ok(()),
        n => bail!("the tree breaks its rules in {n} places"),
    }
}

/// Something to mend.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Finding {
    path: String,
    /// From 1; 0 for the file as a whole.
    line: usize,
    message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.path, self.message),
            line => write!(f, "{}:{line}: {}", self.path, self.message),
        }
    }
}

/// Where rules put what they find.
#[derive(Debug, Default)]
struct Findings(Vec<Finding>);

impl Findings {
    fn add(&mut self, path: &str, line: usize, message: impl Into<String>) {
        self.0.push(Finding { path: path.to_owned(), line, message: message.into() });
    }
}

/// What the rules look at.
#[derive(Debug)]
struct Tree {
    files: Files,
    /// Every Rust file.
    sources: BTreeMap<String, Source>,
    /// Every `Cargo.toml`.
    manifests: Vec<Manifest>,
}

impl Tree {
    fn new(files: Files) -> Result<Self> {
        let is_rust = |path: &str| has_extension(path, "rs");
        let rust = || files.iter().filter(|(path, _)| is_rust(path));
        let parse = |path: &String, is_test: bool| {
            (path.clone(), Source::parse(&files[path].text, is_test))
        };
        let mut sources: BTreeMap<String, Source> =
            rust().map(|(path, _)| parse(path, is_test_path(path))).collect();
        let modules: BTreeSet<String> = sources.iter().flat_map(test_modules).collect();
        for path in sources.keys().cloned().collect::<Vec<_>>() {
            let stem = path.strip_suffix(".rs").unwrap_or(&path);
            let is_inside = |module: &String| {
                stem.strip_prefix(module.as_str())
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            };
            if modules.iter().any(is_inside) {
                sources.extend([parse(&path, true)]);
            }
        }
        let manifests = files.iter().filter(|(path, _)| {
            *path == "Cargo.toml" || (path.ends_with("/Cargo.toml") && crate_of(path).is_some())
        });
        let manifests = manifests.map(|(path, file)| Manifest::parse(path, &file.text));
        let manifests = manifests.collect::<Result<_>>()?;
        Ok(Self { files, sources, manifests })
    }

    fn text(&self, path: &str) -> Option<&str> {
        self.files.get(path).map(|file| file.text.as_str())
    }

    /// Names of the folders of `crates/`.
    fn crates(&self) -> BTreeSet<&str> {
        self.files.keys().filter_map(|path| crate_of(path)).collect()
    }
}

/// The crate that a file belongs to: the folder name.
fn crate_of(path: &str) -> Option<&str> {
    let (name, _) = path.strip_prefix("crates/")?.split_once('/')?;
    Some(name)
}

fn has_extension(path: &str, extension: &str) -> bool {
    Path::new(path).extension().is_some_and(|found| found == extension)
}

/// Integration tests, benches, examples, and `tests.rs` beside the code.
fn is_test_path(path: &str) -> bool {
    let folders = ["/tests/", "/benches/", "/examples/"];
    folders.iter().any(|folder| path.contains(folder)) || path.ends_with("/tests.rs")
}

/// Paths, without extension, of the modules that `source` declares for tests alone.
fn test_modules((path, source): (&String, &Source)) -> Vec<String> {
    let stem = path.strip_suffix(".rs").unwrap_or(path);
    let (folder, file) = stem.rsplit_once('/').unwrap_or(("", stem));
    let folder = if ["lib", "main", "mod"].contains(&file) { folder } else { stem };
    source.test_modules.iter().map(|name| format!("{folder}/{name}")).collect()
}

/// Everything that is wrong with a tree, in the order of its files.
fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Findings::default();
    let mut allowed = AllowList::parse(tree, &mut findings);
    crates::check(tree, &mut findings);
    names::check(tree, &mut findings);
    sizes::check(tree, &mut allowed, &mut findings);
    comments::check(tree, &mut findings);
    docs::check(tree, &mut findings);
    weight::check(tree, &mut findings);
    allowed.check_unused(&mut findings);
    findings.0.sort();
    findings.0
}

fn findings(root: &Path) -> Result<Vec<Finding>> {
    let mut findings = check(&Tree::new(tree::files(root)?)?);
    findings.extend(weight::check_default_tree());
    Ok(findings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_is_tidy() {
        let findings = findings(&project::root()).expect("readable");
        let lines: Vec<String> = findings.iter().map(ToString::to_string).collect();
        assert!(lines.is_empty(), "{} findings:\n{}", lines.len(), lines.join("\n"));
    }

    /// A tree of these texts.
    pub(super) fn tree(files: &[(&str, &str)]) -> Tree {
        let file = |text: &str| tree::File { bytes: text.len() as u64, text: text.to_owned() };
        let files = files.iter().map(|(path, text)| ((*path).to_owned(), file(text))).collect();
        Tree::new(files).expect("valid manifests")
    }

    /// Findings of one rule, as lines.
    pub(super) fn found(rule: fn(&Tree, &mut Findings), files: &[(&str, &str)]) -> Vec<String> {
        let mut findings = Findings::default();
        rule(&tree(files), &mut findings);
        findings.0.sort();
        findings.0.iter().map(ToString::to_string).collect()
    }

    /// The rule finds `expected` (beginnings of lines), no more and no less.
    #[track_caller]
    pub(super) fn expect(
        rule: fn(&Tree, &mut Findings),
        files: &[(&str, &str)],
        expected: &[&str],
    ) {
        let lines = found(rule, files);
        let fits = lines.len() == expected.len()
            && lines.iter().zip(expected).all(|(line, start)| line.starts_with(start));
        assert!(fits, "found {lines:#?}, expected {expected:#?}");
    }

    #[test]
    fn modules_for_tests_are_tests_whole() {
        let tree = tree(&[
            ("crates/a/src/lib.rs", "#[cfg(test)]\nmod fuzz;\n"),
            ("crates/a/src/fuzz.rs", "fn f() {}\n"),
            ("crates/a/src/fuzz/deep.rs", "fn f() {}\n"),
            ("crates/a/src/fuzzy.rs", "#[cfg(test)]\nmod own;\n"),
            ("crates/a/src/fuzzy/own.rs", "fn f() {}\n"),
        ]);
        let tests = tree.sources.iter().filter(|(_, source)| source.product_lines() == 0);
        let tests: Vec<&str> = tests.map(|(path, _)| path.as_str()).collect();
        let expected = ["fuzz.rs", "fuzz/deep.rs", "fuzzy.rs", "fuzzy/own.rs", "lib.rs"];
        assert_eq!(tests, expected.map(|name| format!("crates/a/src/{name}")));
    }
}
