//! Which crates there are, and what they may depend on.

use super::manifest::{Dependency, Kind};
use super::{Findings, Tree, crate_of};
use std::collections::{BTreeMap, BTreeSet};

/// Our crates that a crate may depend on. A new edge is its own commit, with a reason.
const EDGES: [(&str, &[&str]); 11] = [
    ("weights", &[]),
    ("expert-store", &[]),
    ("text", &[]),
    ("backend", &["weights"]),
    ("backend-cpu", &["backend", "weights"]),
    ("backend-wgpu", &["backend", "weights"]),
    ("backend-cuda", &["backend", "weights"]),
    ("model", &["backend", "weights"]),
    ("engine", &["model", "backend", "expert-store", "weights"]),
    ("server", &["engine", "text"]),
    ("xtask", &[]),
];

/// What tests may use besides.
const DEV_EDGES: [(&str, &[&str]); 1] = [("engine", &["backend-cpu", "text"])];

/// May depend on every crate.
const TOP: &str = "cli";

const PREFIX: &str = "snowmelt-";
const REASONS: &str = "docs/dependencies.md";
const MAP: &str = "ARCHITECTURE.md";

pub(super) fn check(tree: &Tree, findings: &mut Findings) {
    edges(tree, findings);
    reasons(tree, findings);
    unused(tree, findings);
    map(tree, findings);
}

fn row<'a>(table: &[(&str, &'a [&'a str])], name: &str) -> Option<&'a [&'a str]> {
    table.iter().find(|(from, _)| *from == name).map(|(_, to)| *to)
}

fn edges(tree: &Tree, findings: &mut Findings) {
    for manifest in &tree.manifests {
        let Some(from) = crate_of(&manifest.path) else { continue };
        let expected = if from == "xtask" { from.to_owned() } else { format!("{PREFIX}{from}") };
        if manifest.name != expected {
            let message = format!("package `{}`, its folder says `{expected}`", manifest.name);
            findings.add(&manifest.path, 0, message);
        }
        let known = row(&EDGES, from);
        if known.is_none() && from != TOP {
            let message =
                "a new crate: give it a row in `EDGES` of crates/xtask/src/tidy/crates.rs";
            findings.add(&manifest.path, 0, message);
            continue;
        }
        for Dependency { name, line, kind } in &manifest.dependencies {
            if name == "anyhow" && ![TOP, "xtask"].contains(&from) {
                let message = "`anyhow` is for cli and xtask: give the crate an error of its own";
                findings.add(&manifest.path, *line, message);
            }
            let Some(to) = name.strip_prefix(PREFIX) else { continue };
            let dev = row(&DEV_EDGES, from).unwrap_or(&[]);
            let allowed = known.is_none_or(|known| known.contains(&to))
                || (*kind == Kind::Dev && dev.contains(&to));
            if !allowed {
                let message = format!("`{from}` must not depend on `{to}` (docs: {MAP})");
                findings.add(&manifest.path, *line, message);
            }
        }
    }
}

/// Dependencies on crates of others, with where they stand first.
fn foreign(tree: &Tree, kinds: &[Kind]) -> BTreeMap<String, (String, usize)> {
    let mut names = BTreeMap::new();
    for manifest in &tree.manifests {
        for Dependency { name, line, kind } in &manifest.dependencies {
            if !name.starts_with(PREFIX) && kinds.contains(kind) {
                names.entry(name.clone()).or_insert((manifest.path.clone(), *line));
            }
        }
    }
    names
}

/// Every direct dependency has a row `| name | reason |`, and every row a dependency.
fn reasons(tree: &Tree, findings: &mut Findings) {
    let mut rows = BTreeMap::new();
    for (index, line) in tree.text(REASONS).unwrap_or("").lines().enumerate() {
        let mut cells = line.split('|').map(str::trim).skip(1);
        let name = cells.next().and_then(|cell| cell.strip_prefix('`')?.strip_suffix('`'));
        let (Some(name), Some(reason)) = (name, cells.next()) else { continue };
        if reason.split_whitespace().count() < 3 {
            findings.add(REASONS, index + 1, format!("`{name}` needs a reason of some words"));
        }
        rows.insert(name, index + 1);
    }
    let used = foreign(tree, &[Kind::Normal, Kind::Dev, Kind::Build]);
    for (name, (path, line)) in &used {
        if !rows.contains_key(name.as_str()) {
            let message = format!("`{name}` has no row with a reason in {REASONS}");
            findings.add(path, *line, message);
        }
    }
    for (name, line) in rows {
        if !used.contains_key(name) {
            findings.add(REASONS, line, format!("no crate depends on `{name}`: remove the row"));
        }
    }
}

fn unused(tree: &Tree, findings: &mut Findings) {
    let used = foreign(tree, &[Kind::Normal, Kind::Dev, Kind::Build]);
    for (name, (path, line)) in foreign(tree, &[Kind::Workspace]) {
        if !used.contains_key(&name) {
            findings.add(&path, line, format!("no crate depends on `{name}`: remove the line"));
        }
    }
}

/// The map's table has a row for every crate, with the edges of [`EDGES`]; no line of the map names
/// a crate that is not there.
fn map(tree: &Tree, findings: &mut Findings) {
    let crates = tree.crates();
    let Some(text) = tree.text(MAP) else {
        findings.add(MAP, 0, "missing: the map, with a table of the crates under `## Code map`");
        return;
    };
    let mut in_table = false;
    let mut rows = BTreeSet::new();
    for (index, line) in text.lines().enumerate() {
        if line.starts_with('#') {
            in_table = line.to_lowercase().contains("code map");
        }
        let mut named = paths(line);
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        if let (true, [_, first, _, edges, _]) = (in_table, cells.as_slice())
            && let [name] = quoted(first).as_slice()
        {
            let name = name.strip_prefix("crates/").unwrap_or(name);
            rows.insert(name);
            named.push(name);
            let told: BTreeSet<&str> = quoted(edges).into_iter().collect();
            let known: Option<BTreeSet<&str>> =
                row(&EDGES, name).map(|edges| edges.iter().copied().collect());
            if known.as_ref().is_some_and(|known| *known != told) {
                let known: Vec<&str> = known.into_iter().flatten().collect();
                let message = format!("`{name}` may depend on {known:?}, the row says {told:?}");
                findings.add(MAP, index + 1, message);
            }
        }
        for name in named.into_iter().filter(|name| !crates.contains(name)) {
            findings.add(MAP, index + 1, format!("there is no `crates/{name}`"));
        }
    }
    for name in crates.difference(&rows) {
        let message = format!("`{name}` has no row in the table under `## Code map`");
        findings.add(MAP, 0, message);
    }
}

/// Names behind `crates/`.
fn paths(line: &str) -> Vec<&str> {
    let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let name = |rest: &'_ str| rest.find(|c| !is_name(c)).unwrap_or(rest.len());
    let names = line.split("crates/").skip(1).map(|rest| &rest[..name(rest)]);
    names.filter(|name| !name.is_empty()).collect()
}

/// What stands between backticks.
fn quoted(cell: &str) -> Vec<&str> {
    cell.split('`').skip(1).step_by(2).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::expect;
    use super::*;

    fn manifest(name: &str, rest: &str) -> String {
        format!("[package]\nname = \"{name}\"\n{rest}\n")
    }

    #[test]
    fn edges_are_those_of_the_table() {
        let at = "crates/model/Cargo.toml";
        let one = |rest: &str, expected: &[&str]| {
            expect(edges, &[(at, &manifest("snowmelt-model", rest))], expected);
        };
        one("[dependencies]\nsnowmelt-backend.workspace = true", &[]);
        let message = "crates/model/Cargo.toml:4: `model` must not depend on `expert-store`";
        one("[dependencies]\nsnowmelt-expert-store.workspace = true", &[message]);
        one("[dev-dependencies]\nsnowmelt-expert-store.workspace = true", &[message]);
        one("[target.\"cfg(unix)\".dependencies]\nsnowmelt-expert-store = \"1\"", &[message]);
        let renamed = "[dependencies]\nstore = { package = \"snowmelt-expert-store\" }";
        one(renamed, &[message]);
        one("[dependencies]\nanyhow = \"1\"", &["crates/model/Cargo.toml:4: `anyhow`"]);
    }

    #[test]
    fn tests_may_use_more() {
        let at = "crates/engine/Cargo.toml";
        let dev = manifest("snowmelt-engine", "[dev-dependencies]\nsnowmelt-text = \"1\"");
        expect(edges, &[(at, &dev)], &[]);
        let normal = manifest("snowmelt-engine", "[dependencies]\nsnowmelt-text = \"1\"");
        expect(edges, &[(at, &normal)], &["crates/engine/Cargo.toml:4: `engine` must not"]);
    }

    #[test]
    fn cli_may_use_all_and_new_crates_need_a_row() {
        let all =
            "[dependencies]\nsnowmelt-engine = \"1\"\nsnowmelt-server = \"1\"\nanyhow = \"1\"";
        expect(edges, &[("crates/cli/Cargo.toml", &manifest("snowmelt-cli", all))], &[]);
        let files = [("crates/new/Cargo.toml", &*manifest("snowmelt-new", ""))];
        expect(edges, &files, &["crates/new/Cargo.toml: a new crate"]);
        let files = [("crates/text/Cargo.toml", &*manifest("snowmelt-words", ""))];
        expect(edges, &files, &["crates/text/Cargo.toml: package `snowmelt-words`"]);
    }

    #[test]
    fn dependencies_need_reasons() {
        let at = "crates/text/Cargo.toml";
        let text = manifest("snowmelt-text", "[dependencies]\na = \"1\"\nb = \"1\"");
        let page = "# Dependencies\n| `a` | why it is here |\n| `c` | it was useful once |\n";
        let expected = [
            "crates/text/Cargo.toml:5: `b` has no row",
            "docs/dependencies.md:3: no crate depends on `c`",
        ];
        expect(reasons, &[(at, &text), (REASONS, page)], &expected);
        let page = "| `a` | because |\n| `b` | why it is here |\n";
        expect(reasons, &[(at, &text), (REASONS, page)], &["docs/dependencies.md:1: `a` needs"]);
    }

    #[test]
    fn workspace_dependencies_are_used() {
        let root = "[workspace.dependencies]\na = \"1\"\nb = \"1\"\n";
        let text = manifest("snowmelt-text", "[dev-dependencies]\na.workspace = true");
        let files = [("Cargo.toml", root), ("crates/text/Cargo.toml", &text)];
        expect(unused, &files, &["Cargo.toml:3: no crate depends on `b`"]);
    }

    #[test]
    fn the_map_has_every_crate() {
        let crates = [("crates/text/src/lib.rs", ""), ("crates/backend/src/lib.rs", "")];
        let with = |text: &'static str| [crates[0], crates[1], (MAP, text)];
        let good = "## Code map\n| `text` | x | - |\n| `backend` | x | `weights` |\n\
            ## Other\n| `x` | y | z |\nsee `crates/text/src/lib.rs`, crates/*\n";
        expect(map, &with(good), &[]);
        let bad = "## Code map\n| `text` | x | `weights` |\n| `words` | x | - |\n\
            ## Other\n| `backend` | x | `weights` |\ncrates/word\n";
        let expected = [
            "ARCHITECTURE.md: `backend` has no row",
            "ARCHITECTURE.md:2: `text` may depend on []",
            "ARCHITECTURE.md:3: there is no `crates/words`",
            "ARCHITECTURE.md:6: there is no `crates/word`",
        ];
        expect(map, &with(bad), &expected);
        expect(map, &crates, &["ARCHITECTURE.md: missing"]);
    }
}
