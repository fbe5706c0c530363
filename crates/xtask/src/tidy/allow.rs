//! Exceptions from the rules about size, each with its reason.

use super::{Findings, Tree};

pub(super) const PATH: &str = "crates/xtask/tidy-allow.txt";

/// Rules that know exceptions.
const RULES: [&str; 3] = ["function-lines", "parameters", "file-lines"];

/// The lines of the file: `rule where reason`.
#[derive(Debug, Default)]
pub(super) struct AllowList {
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    line: usize,
    rule: String,
    place: String,
    used: bool,
}

impl AllowList {
    pub(super) fn parse(tree: &Tree, findings: &mut Findings) -> Self {
        let mut entries = Vec::new();
        for (index, text) in tree.text(PATH).unwrap_or("").lines().enumerate() {
            let (line, text) = (index + 1, text.trim());
            if text.is_empty() || text.starts_with('#') {
                continue;
            }
            let mut words = text.splitn(3, ' ');
            let mut next = || words.next().unwrap_or("").trim().to_owned();
            let (rule, place, reason) = (next(), next(), next());
            if !RULES.contains(&rule.as_str()) {
                let known = RULES.join(", ");
                findings.add(PATH, line, format!("`{rule}` has no exceptions, only {known}"));
            } else if reason.split_whitespace().count() < 3 {
                findings.add(PATH, line, "an exception needs a reason behind its place");
            } else {
                entries.push(Entry { line, rule, place, used: false });
            }
        }
        Self { entries }
    }

    /// Whether `place` (a path, or `path::function`) may break the rule.
    pub(super) fn allows(&mut self, rule: &str, place: &str) -> bool {
        let fits = |entry: &&mut Entry| entry.rule == rule && entry.place == place;
        let found = self.entries.iter_mut().find(fits);
        found.map(|entry| entry.used = true).is_some()
    }

    /// An exception that nothing needs is to go.
    pub(super) fn check_unused(&self, findings: &mut Findings) {
        for entry in self.entries.iter().filter(|entry| !entry.used) {
            let Entry { rule, place, .. } = entry;
            findings.add(PATH, entry.line, format!("`{place}` keeps to `{rule}`: remove the line"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::expect;
    use super::*;

    fn rule(tree: &Tree, findings: &mut Findings) {
        let mut list = AllowList::parse(tree, findings);
        assert!(list.allows("parameters", "a.rs::f"));
        assert!(!list.allows("file-lines", "a.rs::f"));
        list.check_unused(findings);
    }

    #[test]
    fn exceptions_need_a_rule_a_reason_and_a_use() {
        let text = "# about\n\nparameters a.rs::f it names its operands\n\
            unsafe a.rs because we can\nfile-lines a.rs why\nfile-lines b.rs it is a table\n";
        let expected = [
            "crates/xtask/tidy-allow.txt:4: `unsafe` has no exceptions",
            "crates/xtask/tidy-allow.txt:5: an exception needs a reason",
            "crates/xtask/tidy-allow.txt:6: `b.rs` keeps to `file-lines`",
        ];
        expect(rule, &[(PATH, text)], &expected);
    }
}
