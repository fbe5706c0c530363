//! What comments may not hold: history, and work left for later without a reason.

use super::source::words;
use super::{Findings, Tree, has_extension};

/// Words that belong in a commit message.
const HISTORY: [&str; 2] = ["issue #", "session log"];
/// Words that promise work.
const PROMISES: [&str; 3] = ["TODO", "FIXME", "XXX"];

pub(super) fn check(tree: &Tree, findings: &mut Findings) {
    for (path, source) in &tree.sources {
        for (index, line) in source.comments.lines().enumerate() {
            comment(path, index + 1, line, findings);
        }
    }
    for (path, file) in &tree.files {
        if has_extension(path, "toml") || path == ".ci/run" {
            for (index, line) in file.text.lines().enumerate() {
                if let Some(text) = line.trim_start().strip_prefix('#') {
                    comment(path, index + 1, text, findings);
                }
            }
        }
    }
}

fn comment(path: &str, line: usize, text: &str, findings: &mut Findings) {
    let lower = text.to_lowercase();
    for word in HISTORY.iter().filter(|word| lower.contains(*word)) {
        findings.add(path, line, format!("`{word}` in a comment: say it in the commit"));
    }
    if has_date(text) {
        findings.add(path, line, "a date in a comment: history belongs in the commit");
    }
    for promise in PROMISES {
        for at in words(text, promise) {
            let reason = text[at + promise.len()..].strip_prefix(": ").unwrap_or("");
            if reason.split_whitespace().count() < 3 {
                let message =
                    format!("`{promise}` without a reason: `{promise}: what, and why not now`");
                findings.add(path, line, message);
            }
        }
    }
}

/// A date of this century.
fn has_date(text: &str) -> bool {
    let is_date = |window: &[u8]| {
        let fits = |(byte, pattern): (&u8, &u8)| match pattern {
            b'0' => byte.is_ascii_digit(),
            exact => byte == exact,
        };
        window.starts_with(b"20") && window.iter().zip(b"0000-00-00").all(fits)
    };
    text.as_bytes().windows(10).any(is_date)
}

#[cfg(test)]
mod tests {
    use super::super::tests::expect;
    use super::*;

    fn one(path: &str, text: &str, fires: bool) {
        let start = format!("{path}:1: ");
        let expected: &[&str] = if fires { &[&start] } else { &[] };
        expect(check, &[(path, text)], expected);
    }

    #[test]
    fn history_is_found_in_comments_alone() {
        let path = "crates/a/src/lib.rs";
        one(path, "/// As of 2031-07-09.", true);
        one(path, "// See Issue #12.", true);
        one(path, "/* the session log */", true);
        one(path, "let x = \"2031-07-09, issue #12\";", false);
        one(path, "// 2031-7-9, 1931-07-09, issues", false);
        one("deny.toml", "# since 2031-07-09", true);
        one("deny.toml", "x = \"2031-07-09\"", false);
        one(".ci/run", "# issue #3", true);
    }

    #[test]
    fn promises_need_a_reason() {
        let path = "crates/a/src/lib.rs";
        one(path, "// TODO", true);
        one(path, "// FIXME: later", true);
        one(path, "// TODO: waits for stable intrinsics", false);
        one(path, "let x = \"TODO\"; // TODOS", false);
    }
}
