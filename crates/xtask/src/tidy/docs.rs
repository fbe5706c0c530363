//! Pages stay short, decisions are numbered, and the commands in them are the real ones.

use super::{Findings, TEST_COMMAND, Tree, has_extension};

const PAGE_LINES_MAX: usize = 500;
const DECISION_LINES_MAX: usize = 60;
const DECISIONS: &str = "docs/decisions/";

pub(super) fn check(tree: &Tree, findings: &mut Findings) {
    pages(tree, findings);
    decisions(tree, findings);
    commands(tree, findings);
}

fn pages(tree: &Tree, findings: &mut Findings) {
    for (path, file) in &tree.files {
        // The change log only ever grows.
        if !has_extension(path, "md") || path == "CHANGELOG.md" {
            continue;
        }
        let max = if path.starts_with(DECISIONS) { DECISION_LINES_MAX } else { PAGE_LINES_MAX };
        let lines = file.text.lines().count();
        if lines > max {
            findings.add(path, 0, format!("{lines} lines, at most {max}: shorten or split it"));
        }
    }
}

/// `docs/decisions/NNNN-title.md`, from 0001 on.
fn decisions(tree: &Tree, findings: &mut Findings) {
    let mut next = 1;
    for path in tree.files.keys().filter(|path| path.starts_with(DECISIONS)) {
        let name = &path[DECISIONS.len()..];
        if name == "README.md" {
            continue;
        }
        let parts = name.strip_suffix(".md").and_then(|stem| stem.split_once('-'));
        let number = parts.filter(|(number, title)| number.len() == 4 && !title.is_empty());
        let Some(number) = number.and_then(|(number, _)| number.parse::<u32>().ok()) else {
            findings.add(path, 0, "a decision is called `NNNN-title.md`");
            continue;
        };
        if number != next {
            let message = format!("number {number:04}, but {next:04} is next: no gaps, no twins");
            findings.add(path, 0, message);
        }
        next = number + 1;
    }
}

/// The test command of the README is the one that CI runs.
fn commands(tree: &Tree, findings: &mut Findings) {
    for path in ["README.md", ".ci/run"] {
        let Some(text) = tree.text(path) else {
            findings.add(path, 0, format!("missing: it holds a line `{TEST_COMMAND}`"));
            continue;
        };
        if !text.lines().any(|line| line.trim() == TEST_COMMAND) {
            findings.add(path, 0, format!("no line `{TEST_COMMAND}`: README and CI run the same"));
        }
        // Any other way to run all tests would be a second truth.
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.starts_with("cargo test") && line != TEST_COMMAND && path == ".ci/run" {
                findings.add(path, index + 1, format!("`{line}` is not `{TEST_COMMAND}`"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::expect;
    use super::*;

    #[test]
    fn long_pages_are_found() {
        let (page, decision) = ("docs/glossary.md", "docs/decisions/0001-x.md");
        expect(pages, &[(page, &"x\n".repeat(500)), (decision, &"x\n".repeat(60))], &[]);
        let files = [(page, &*"x\n".repeat(501)), (decision, &*"x\n".repeat(61))];
        let expected = ["docs/decisions/0001-x.md: 61 lines", "docs/glossary.md: 501 lines"];
        expect(pages, &files, &expected);
        expect(pages, &[("CHANGELOG.md", &"x\n".repeat(501))], &[]);
    }

    #[test]
    fn decisions_are_numbered_without_gaps() {
        let of = |names: &[&str]| names.iter().map(|name| format!("{DECISIONS}{name}")).collect();
        let check = |names: &[&str], expected: &[&str]| {
            let paths: Vec<String> = of(names);
            let files: Vec<(&str, &str)> = paths.iter().map(|path| (path.as_str(), "")).collect();
            let expected: Vec<String> = of(expected);
            let expected: Vec<&str> = expected.iter().map(String::as_str).collect();
            expect(decisions, &files, &expected);
        };
        check(&["0001-a.md", "0002-b.md", "README.md"], &[]);
        check(&["0001-a.md", "0003-b.md", "0004-c.md"], &["0003-b.md: number 0003"]);
        check(&["0001-a.md", "0001-b.md"], &["0001-b.md: number 0001"]);
        check(&["0002-a.md"], &["0002-a.md: number"]);
        check(&["1-a.md", "0001.md"], &["0001.md: a decision", "1-a.md: a decision"]);
    }

    #[test]
    fn readme_and_ci_run_the_same_tests() {
        let good = "```\ncargo test --release --workspace\n```\n";
        expect(commands, &[("README.md", good), (".ci/run", good)], &[]);
        let other = "cargo test --workspace\n";
        let expected = [".ci/run: no line", ".ci/run:1: `cargo test --workspace` is not"];
        expect(commands, &[("README.md", good), (".ci/run", other)], &expected);
        expect(commands, &[("README.md", other), (".ci/run", good)], &["README.md: no line"]);
        expect(commands, &[(".ci/run", good)], &["README.md: missing"]);
    }
}
