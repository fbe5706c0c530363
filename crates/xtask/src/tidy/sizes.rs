//! How large things may grow before they must be taken apart.

use super::allow::AllowList;
use super::source::{Function, Source, words};
use super::{Findings, Tree};

const FUNCTION_LINES_MAX: usize = 100;
const PARAMETERS_MAX: usize = 8;
const FILE_LINES_MAX: usize = 1200;
const LINE_COLUMNS_MAX: usize = 100;
const REQUIRED_METHODS_MAX: usize = 35;

/// Where `trait Backend` is looked for.
const BACKEND: &str = "crates/backend/src/";

pub(super) fn check(tree: &Tree, allowed: &mut AllowList, findings: &mut Findings) {
    for (path, source) in &tree.sources {
        functions(path, source, allowed, findings);
        let lines = source.product_lines();
        if lines > FILE_LINES_MAX && !allowed.allows("file-lines", path) {
            let message = format!(
                "{lines} lines without tests, at most {FILE_LINES_MAX}: move one idea to a file \
                 of its own"
            );
            findings.add(path, 0, message);
        }
        let lines = tree.files[path].text.lines().zip(source.code.lines());
        for (index, (line, code)) in lines.enumerate() {
            let columns = line.chars().count();
            // An address cannot be broken, and a row of test data should not be.
            let is_data = source.is_test_line(index + 1) && is_string(code);
            if columns > LINE_COLUMNS_MAX && !line.contains("://") && !is_data {
                let message = format!("{columns} columns, at most {LINE_COLUMNS_MAX}: break it");
                findings.add(path, index + 1, message);
            }
        }
    }
    backend(tree, findings);
}

/// Whether a line is a string and nothing else.
fn is_string(code: &str) -> bool {
    let inside = code.trim().trim_end_matches(',').strip_prefix('"');
    inside.and_then(|rest| rest.strip_suffix('"')).is_some_and(|rest| rest.trim().is_empty())
}

fn functions(path: &str, source: &Source, allowed: &mut AllowList, findings: &mut Findings) {
    for Function { name, line, lines, params, .. } in source.functions() {
        let place = format!("{path}::{name}");
        if lines > FUNCTION_LINES_MAX && !allowed.allows("function-lines", &place) {
            let message =
                format!("`{name}` has {lines} lines, at most {FUNCTION_LINES_MAX}: split it");
            findings.add(path, line, message);
        }
        if params > PARAMETERS_MAX && !allowed.allows("parameters", &place) {
            let message = format!(
                "`{name}` has {params} parameters besides its receiver, at most {PARAMETERS_MAX}: \
                 give them a struct with a name"
            );
            findings.add(path, line, message);
        }
    }
}

/// A new backend starts small: a fused verb is a provided method.
fn backend(tree: &Tree, findings: &mut Findings) {
    let files = || tree.sources.iter().filter(|(path, _)| path.starts_with(BACKEND));
    if files().next().is_none() {
        return;
    }
    for (path, source) in files() {
        let Some(&at) = words(&source.code, "trait Backend").first() else { continue };
        let Some(open) = source.code[at..].find('{').map(|found| at + found) else { continue };
        let body = open..source.closing(open);
        let required = |function: &Function| !function.has_body && body.contains(&function.offset);
        let count = source.functions().into_iter().filter(required).count();
        if count > REQUIRED_METHODS_MAX {
            let message = format!(
                "`Backend` requires {count} methods, at most {REQUIRED_METHODS_MAX}: provide a \
                 default made of other verbs"
            );
            findings.add(path, source.line(at), message);
        }
        return;
    }
    findings.add("crates/backend/src/lib.rs", 0, "no `trait Backend` found: mend this rule");
}

#[cfg(test)]
mod tests {
    use super::super::tests::expect;
    use super::*;

    fn rule(tree: &Tree, findings: &mut Findings) {
        let mut allowed = AllowList::parse(tree, findings);
        check(tree, &mut allowed, findings);
        allowed.check_unused(findings);
    }

    const PATH: &str = "crates/a/src/lib.rs";

    #[test]
    fn long_functions_are_found_and_can_be_allowed() {
        let of = |lines: usize| format!("\nfn f() {{\n{}}}\n", "x;\n".repeat(lines - 2));
        expect(rule, &[(PATH, &of(100))], &[]);
        expect(rule, &[(PATH, &of(101))], &["crates/a/src/lib.rs:2: `f` has 101 lines"]);
        let allowed = "function-lines crates/a/src/lib.rs::f it is a table\n";
        let files = [(PATH, &*of(101)), ("crates/xtask/tidy-allow.txt", allowed)];
        expect(rule, &files, &[]);
        let files = [(PATH, &*of(100)), ("crates/xtask/tidy-allow.txt", allowed)];
        expect(rule, &files, &["crates/xtask/tidy-allow.txt:1: "]);
    }

    #[test]
    fn many_parameters_are_found() {
        let of = |n: usize| format!("fn f(&self, {}) {{}}\n", "x: u8, ".repeat(n));
        expect(rule, &[(PATH, &of(8))], &[]);
        expect(rule, &[(PATH, &of(9))], &["crates/a/src/lib.rs:1: `f` has 9 parameters"]);
    }

    #[test]
    fn long_files_are_found_without_their_tests() {
        let tests = format!("#[cfg(test)]\nmod tests {{\n{}}}\n", "x;\n".repeat(50));
        let of = |n: usize| format!("{}{tests}", "x;\n".repeat(n));
        expect(rule, &[(PATH, &of(1200))], &[]);
        expect(rule, &[(PATH, &of(1201))], &["crates/a/src/lib.rs: 1201 lines"]);
    }

    #[test]
    fn long_lines_are_found() {
        let of = |n: usize| format!("\n// {}\n", "ü".repeat(n - 3));
        expect(rule, &[(PATH, &of(100))], &[]);
        expect(rule, &[(PATH, &of(101))], &["crates/a/src/lib.rs:2: 101 columns"]);
        let data = format!("    \"{}\",\n", "x".repeat(100));
        expect(rule, &[(PATH, &data)], &["crates/a/src/lib.rs:1: 107 columns"]);
        expect(rule, &[("crates/a/tests/all.rs", &data)], &[]);
        let call = format!("    f(\"{}\");\n", "x".repeat(100));
        let finding = "crates/a/tests/all.rs:1: 110 columns";
        expect(rule, &[("crates/a/tests/all.rs", &call)], &[finding]);
    }

    #[test]
    fn the_backend_stays_small() {
        let path = "crates/backend/src/verbs.rs";
        let of = |n: usize| {
            let provided = "fn p(&self) -> u8 {\n0\n}\n".repeat(9);
            format!("pub trait Backend: Sized {{\n{}{provided}}}\nfn q();\n", "fn f();\n".repeat(n))
        };
        expect(rule, &[(path, &of(35))], &[]);
        expect(rule, &[(path, &of(36))], &["crates/backend/src/verbs.rs:1: `Backend` requires 36"]);
        expect(rule, &[(path, "trait Other {}")], &["crates/backend/src/lib.rs: no `trait"]);
    }
}
