//! Licences, sources and duplicates of dependencies, held to `deny.toml`: by cargo-deny where it is
//! installed, else by a check of our own of the same file.

use crate::{project, spdx};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;

/// Which check ran.
pub(crate) fn run() -> Result<String> {
    if project::works("cargo-deny", "--version") {
        let mut cargo = project::cargo();
        project::check(cargo.args(["deny", "check", "licenses", "bans", "sources"]))?;
        return Ok("by cargo-deny".to_owned());
    }
    let text = fs::read_to_string(project::root().join("deny.toml")).context("deny.toml")?;
    let policy = Policy::parse(&text)?;
    let (metadata, how) = metadata(&policy.targets)?;
    let findings = policy.check(&metadata)?;
    ensure!(findings.is_empty(), "{}", findings.join("\n"));
    Ok(format!("by our own check, cargo-deny is not installed{how}"))
}

/// The packages of all targets of the policy; of this machine alone where no others are at hand.
fn metadata(targets: &[String]) -> Result<(Value, &'static str)> {
    let ask = |arguments: &[&str]| -> Result<Value> {
        let mut cargo = project::cargo();
        cargo.args(["metadata", "--format-version", "1", "--locked"]).args(arguments);
        Ok(serde_json::from_slice(&project::capture(&mut cargo)?)?)
    };
    let all: Vec<&str> =
        targets.iter().flat_map(|target| ["--filter-platform", target.as_str()]).collect();
    if let Ok(found) = ask(&all) {
        return Ok((found, ""));
    }
    let host = env_target();
    let found = ask(&["--offline", "--filter-platform", host.as_str()])?;
    Ok((found, "; packages of other targets could not be fetched and were left out"))
}

/// The target of this machine.
fn env_target() -> String {
    let mut rustc = std::process::Command::new("rustc");
    let version = project::capture(rustc.arg("-vV")).unwrap_or_default();
    let version = String::from_utf8_lossy(&version);
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    host.unwrap_or("x86_64-unknown-linux-gnu").to_owned()
}

/// What `deny.toml` says.
#[derive(Debug)]
struct Policy {
    licences: Vec<String>,
    registries: Vec<String>,
    targets: Vec<String>,
    /// Names that may be there in more than one version.
    duplicates: BTreeSet<String>,
}

impl Policy {
    fn parse(text: &str) -> Result<Self> {
        let file: toml::Table = text.parse()?;
        let list = |section: &str, key: &str| -> Result<Vec<&toml::Value>> {
            let found = file.get(section).and_then(|section| section.get(key));
            let list = found.and_then(toml::Value::as_array);
            let list = list.with_context(|| format!("deny.toml has no list `{section}.{key}`"))?;
            Ok(list.iter().collect())
        };
        let strings = |section: &str, key: &str| -> Result<Vec<String>> {
            let word = |value: &toml::Value| Some(value.as_str()?.to_owned());
            let words = list(section, key)?.into_iter().map(word).collect::<Option<_>>();
            words.with_context(|| format!("`{section}.{key}` of deny.toml is no list of strings"))
        };
        let mut duplicates = BTreeSet::new();
        for entry in list("bans", "skip")? {
            let name = entry.get("crate").and_then(toml::Value::as_str);
            let name = name.context("an entry of `bans.skip` has no `crate`")?;
            let reason = entry.get("reason").and_then(toml::Value::as_str).unwrap_or("");
            ensure!(!reason.is_empty(), "`{name}` of `bans.skip` has no `reason`");
            duplicates.insert(name.split(['@', ':']).next().unwrap_or(name).to_owned());
        }
        Ok(Self {
            licences: strings("licenses", "allow")?,
            registries: strings("sources", "allow-registry")?,
            targets: strings("graph", "targets")?,
            duplicates,
        })
    }

    /// Everything in `cargo metadata` that the policy does not allow.
    fn check(&self, metadata: &Value) -> Result<Vec<String>> {
        let text = |value: &Value, key: &str| value[key].as_str().map(str::to_owned);
        let nodes = metadata["resolve"]["nodes"].as_array().context("no resolved packages")?;
        let used: BTreeSet<&str> = nodes.iter().filter_map(|node| node["id"].as_str()).collect();
        let packages = metadata["packages"].as_array().context("no packages")?;
        let mut findings = Vec::new();
        let mut versions: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for package in packages {
            if !package["id"].as_str().is_some_and(|id| used.contains(id)) {
                continue;
            }
            let name = text(package, "name").context("a package has no name")?;
            let version = text(package, "version").context("a package has no version")?;
            if let Some(source) = text(package, "source") {
                let registry = source.strip_prefix("registry+").unwrap_or(&source);
                if !self.registries.iter().any(|allowed| allowed == registry) {
                    findings.push(format!("{name} {version}: source `{source}` is not allowed"));
                }
            }
            let licence = text(package, "license").unwrap_or_default();
            match spdx::satisfied(&licence, &self.licences) {
                Ok(true) => {}
                Ok(false) => findings.push(format!(
                    "{name} {version}: licence `{licence}` is not in `licenses.allow`"
                )),
                Err(error) => findings.push(format!("{name} {version}: {error}")),
            }
            versions.entry(name).or_default().insert(version);
        }
        let twice = |name: &str| versions.get(name).is_some_and(|versions| versions.len() > 1);
        for (name, versions) in versions.iter().filter(|(name, _)| twice(name)) {
            if !self.duplicates.contains(name) {
                let versions: Vec<&str> = versions.iter().map(String::as_str).collect();
                let versions = versions.join(" and ");
                findings.push(format!(
                    "{name} is there as {versions}: agree on one, or say in `bans.skip` why not"
                ));
            }
        }
        for name in self.duplicates.iter().filter(|name| !twice(name)) {
            findings.push(format!("{name} is there once: take it out of `bans.skip`"));
        }
        Ok(findings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const POLICY: &str = r#"
        [graph]
        targets = ["x86_64-unknown-linux-gnu"]
        [licenses]
        allow = ["MIT"]
        [bans]
        skip = [{ crate = "twice@1", reason = "two users" }]
        [sources]
        allow-registry = ["https://good"]
    "#;

    fn findings(packages: &[[&str; 4]]) -> Vec<String> {
        let id = |[name, version, ..]: &[&str; 4]| format!("{name}@{version}");
        let package = |fields: &[&str; 4]| {
            let [name, version, license, source] = fields;
            let (id, source) = (id(fields), (!source.is_empty()).then_some(source));
            json!({ "id": id, "name": name, "version": version, "license": license,
                "source": source })
        };
        let nodes: Vec<Value> =
            packages.iter().map(|package| json!({ "id": id(package) })).collect();
        let packages: Vec<Value> = packages.iter().map(package).collect();
        let metadata = json!({ "packages": packages, "resolve": { "nodes": nodes } });
        Policy::parse(POLICY).expect("valid").check(&metadata).expect("complete")
    }

    const GOOD: &str = "registry+https://good";
    const TWICE: [[&str; 4]; 2] =
        [["twice", "1.0.0", "MIT", GOOD], ["twice", "2.0.0", "MIT", GOOD]];

    fn finding(package: [&str; 4]) -> Vec<String> {
        findings(&[TWICE[0], TWICE[1], package])
    }

    #[test]
    fn what_the_policy_allows_passes() {
        assert_eq!(finding(["ours", "0.1.0", "MIT OR GPL-3.0", ""]), [""; 0]);
    }

    #[test]
    fn licences_sources_and_duplicates_are_found() {
        let found = finding(["a", "1.0.0", "GPL-3.0", GOOD]);
        assert!(found.len() == 1 && found[0].contains("GPL-3.0"), "{found:?}");
        let found = finding(["a", "1.0.0", "", GOOD]);
        assert!(found.len() == 1 && found[0].contains("licence"), "{found:?}");
        let found = finding(["a", "1.0.0", "MIT", "git+https://good"]);
        assert!(found.len() == 1 && found[0].contains("source"), "{found:?}");
        let found = findings(&[["a", "1.0.0", "MIT", GOOD], ["a", "1.1.0", "MIT", GOOD]]);
        assert!(found.len() == 2 && found[0].contains("1.0.0 and 1.1.0"), "{found:?}");
        assert!(found[1].contains("twice is there once"), "{found:?}");
    }

    #[test]
    fn a_duplicate_needs_a_reason() {
        let error = Policy::parse(&POLICY.replace("two users", "")).expect_err("no reason");
        assert!(error.to_string().contains("reason"), "{error}");
    }

    #[test]
    fn our_own_policy_can_be_read() {
        let path = project::root().join("deny.toml");
        let text = fs::read_to_string(path).expect("deny.toml is there");
        assert!(Policy::parse(&text).expect("valid").licences.contains(&"MIT".to_owned()));
    }
}
