//! What a `Cargo.toml` says of dependencies.

use anyhow::{Context, Result};
use toml::{Table, Value};

/// One `Cargo.toml`.
#[derive(Debug)]
pub(crate) struct Manifest {
    pub(crate) path: String,
    /// Of the package; empty at the root of the workspace.
    pub(crate) name: String,
    pub(crate) dependencies: Vec<Dependency>,
}

/// One line of it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Dependency {
    /// Of the package, whatever it is called here.
    pub(crate) name: String,
    pub(crate) line: usize,
    pub(crate) kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Normal,
    Dev,
    Build,
    /// `[workspace.dependencies]`
    Workspace,
}

const SECTIONS: [(&str, Kind); 3] = [
    ("dependencies", Kind::Normal),
    ("dev-dependencies", Kind::Dev),
    ("build-dependencies", Kind::Build),
];

impl Manifest {
    pub(crate) fn parse(path: &str, text: &str) -> Result<Self> {
        let file: Table = text.parse().with_context(|| format!("cannot parse {path}"))?;
        let package = file.get("package").and_then(|package| package.get("name"));
        let name = package.and_then(Value::as_str).unwrap_or("").to_owned();
        let mut dependencies = Vec::new();
        let mut add = |table: &Table, section: &str, kind: Kind| {
            for (key, value) in table.get(section).and_then(Value::as_table).into_iter().flatten() {
                let renamed = value.get("package").and_then(Value::as_str);
                let name = renamed.unwrap_or(key).to_owned();
                dependencies.push(Dependency { name, line: line_of(text, key), kind });
            }
        };
        for (section, kind) in SECTIONS {
            add(&file, section, kind);
        }
        if let Some(workspace) = file.get("workspace").and_then(Value::as_table) {
            add(workspace, "dependencies", Kind::Workspace);
        }
        let targets = file.get("target").and_then(Value::as_table).into_iter().flatten();
        for table in targets.filter_map(|(_, target)| target.as_table()) {
            for (section, kind) in SECTIONS {
                add(table, section, kind);
            }
        }
        Ok(Self { path: path.to_owned(), name, dependencies })
    }
}

/// The first line that begins with the key, or that is the header of its table.
fn line_of(text: &str, key: &str) -> usize {
    let names_it = |line: &str| {
        let line = line.trim_start();
        let behind = line.strip_prefix(key).and_then(|rest| rest.chars().next());
        let is_key = behind.is_some_and(|c| matches!(c, ' ' | '=' | '.'));
        is_key || line.trim_end().ends_with(&format!("dependencies.{key}]"))
    };
    text.lines().position(names_it).map_or(1, |index| index + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_are_found_wherever_they_stand() {
        let text = "[package]\nname = \"x\"\n[dependencies]\na.workspace = true\n\
            b = { package = \"real\", version = \"1\" }\n[dev-dependencies.c]\nversion = \"1\"\n\
            [target.'cfg(unix)'.dependencies]\nd = \"1\"\n[workspace.dependencies]\ne = \"1\"\n";
        let manifest = Manifest::parse("Cargo.toml", text).expect("valid");
        let brief = |d: &Dependency| (d.name.clone(), d.line, d.kind);
        let found: Vec<_> = manifest.dependencies.iter().map(brief).collect();
        let expected = [
            ("a", 4, Kind::Normal),
            ("real", 5, Kind::Normal),
            ("c", 6, Kind::Dev),
            ("e", 11, Kind::Workspace),
            ("d", 9, Kind::Normal),
        ];
        assert_eq!(found, expected.map(|(name, line, kind)| (name.to_owned(), line, kind)));
        assert_eq!(manifest.name, "x");
    }
}
