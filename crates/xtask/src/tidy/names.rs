//! Names that only some crates may know, and words that no code may hold.

use super::manifest::Kind;
use super::source::words;
use super::{Findings, Tree, crate_of};
use std::path::Path;

/// Names that are kept out of some files.
struct Ban {
    names: &'static [&'static str],
    /// Whether this file (crate, path) may use them all the same.
    allowed: fn(&str, &str) -> bool,
    /// Whether tests may.
    tests: bool,
    advice: &'static str,
}

const BANS: [Ban; 7] = [
    Ban {
        names: &["expert_store", "snowmelt_expert_store"],
        allowed: |name, _| name != "model",
        tests: false,
        advice: "`model` asks for experts through `ExpertFetch` of `backend`",
    },
    Ban {
        names: &["std::fs", "std::thread", "std::env"],
        allowed: |name, _| name != "model",
        tests: true,
        advice: "`model` knows no files, threads or environment: take it as an argument",
    },
    Ban {
        names: &["env::var", "env::var_os", "env::vars", "env::vars_os", "env::set_var"],
        allowed: |name, _| ["cli", "xtask"].contains(&name),
        tests: true,
        advice: "only `cli` reads the environment: take it as an argument",
    },
    Ban {
        names: &["std::fs"],
        allowed: may_use_files,
        tests: true,
        advice: "files are for weights, expert-store, engine's `files` and `pack`, cli",
    },
    Ban {
        names: &["Instant::now", "SystemTime::now"],
        allowed: may_look_at_the_time,
        tests: true,
        advice: "take the time from a clock that a test can own, or as an argument",
    },
    Ban {
        names: &["std::net"],
        allowed: |name, _| name == "server",
        tests: false,
        advice: "the network is for `server`",
    },
    Ban {
        names: &["unsafe"],
        allowed: |name, path| may_be_unsafe(name) || counts_allocations(path),
        tests: false,
        advice: "`unsafe` is for expert-store and backends: build on what they offer",
    },
];

/// Crates of others that belong to one kind of ours.
struct Fence {
    packages: &'static [&'static str],
    allowed: fn(&str) -> bool,
    advice: &'static str,
}

const FENCES: [Fence; 2] = [
    Fence {
        packages: &["wgpu", "naga", "cudarc", "ash", "vulkano", "metal", "objc2-metal", "opencl3"],
        allowed: |name| name.starts_with("backend-"),
        advice: "GPU interfaces are for `backend-*`: go through the verbs",
    },
    Fence {
        packages: &[
            "axum",
            "hyper",
            "hyper-util",
            "reqwest",
            "ureq",
            "tiny_http",
            "tower-http",
            "actix-web",
            "warp",
        ],
        allowed: |name| name == "server",
        advice: "HTTP is for `server`",
    },
];

fn may_use_files(name: &str, path: &str) -> bool {
    let inside = path.strip_prefix("crates/engine/src/").unwrap_or("");
    let part = inside.split(['/', '.']).next().unwrap_or("");
    ["weights", "expert-store", "cli", "xtask"].contains(&name) || ["files", "pack"].contains(&part)
}

/// What measures speed, and the clock of templates, which their caller may stop.
fn measures(path: &str) -> bool {
    path.contains("/examples/")
        || path.ends_with("backend-cpu/src/ceiling.rs")
        || path.ends_with("text/src/template/mod.rs")
}

/// How long to wait for the kernel is no test's business.
fn may_look_at_the_time(name: &str, path: &str) -> bool {
    let waits = path.starts_with("crates/expert-store/src/source/");
    ["cli", "xtask"].contains(&name) || path.ends_with("/clock.rs") || waits || measures(path)
}

fn may_be_unsafe(name: &str) -> bool {
    ["expert-store", "backend"].contains(&name) || name.starts_with("backend-")
}

/// `tests/*alloc*.rs`: an allocator that counts cannot be written without `unsafe`.
fn counts_allocations(path: &str) -> bool {
    let file =
        Path::new(path).file_stem().is_some_and(|stem| stem.to_string_lossy().contains("alloc"));
    file && Path::new(path).parent().is_some_and(|folder| folder.ends_with("tests"))
}

pub(super) fn check(tree: &Tree, findings: &mut Findings) {
    bans(tree, findings);
    fences(tree, findings);
    features(tree, findings);
    forbid(tree, findings);
    stubs(tree, findings);
}

fn bans(tree: &Tree, findings: &mut Findings) {
    for (path, source) in &tree.sources {
        let Some(name) = crate_of(path) else { continue };
        for ban in BANS.iter().filter(|ban| !(ban.allowed)(name, path)) {
            for word in ban.names {
                for line in source.lines_naming(word) {
                    if !(ban.tests && source.is_test_line(line)) {
                        findings.add(path, line, format!("`{word}`: {}", ban.advice));
                    }
                }
            }
        }
    }
}

fn fences(tree: &Tree, findings: &mut Findings) {
    for Fence { packages, allowed, advice } in &FENCES {
        for manifest in &tree.manifests {
            let Some(name) = crate_of(&manifest.path) else { continue };
            for dependency in &manifest.dependencies {
                let inside = packages.contains(&dependency.name.as_str());
                if inside && !allowed(name) && dependency.kind != Kind::Dev {
                    let message = format!("`{}`: {advice}", dependency.name);
                    findings.add(&manifest.path, dependency.line, message);
                }
            }
        }
        for (path, source) in &tree.sources {
            if crate_of(path).is_none_or(allowed) {
                continue;
            }
            for package in *packages {
                let word = package.replace('-', "_");
                for at in words(&source.code, &word) {
                    if source.code[at + word.len()..].starts_with("::") {
                        findings.add(path, source.line(at), format!("`{word}::`: {advice}"));
                    }
                }
            }
        }
    }
}

/// Cargo features never choose what a model does.
fn features(tree: &Tree, findings: &mut Findings) {
    for (path, source) in &tree.sources {
        if crate_of(path) != Some("model") {
            continue;
        }
        for at in words(&source.code, "feature") {
            // What a string holds is blank.
            if source.code[at + "feature".len()..].trim_start().starts_with("= \"") {
                let message = "`model` has no Cargo features: decide from the config at run time";
                findings.add(path, source.line(at), message);
            }
        }
    }
}

/// A crate that needs no `unsafe` says so at its root.
fn forbid(tree: &Tree, findings: &mut Findings) {
    for name in tree.crates() {
        let prefix = format!("crates/{name}/src/");
        let sources = || tree.sources.iter().filter(|(path, _)| path.starts_with(&prefix));
        let is_unsafe = sources().any(|(_, source)| !words(&source.code, "unsafe").is_empty());
        if is_unsafe {
            continue;
        }
        for (path, source) in sources() {
            let is_root = ["lib.rs", "main.rs"].contains(&&path[prefix.len()..]);
            if is_root && !source.code.contains("#![forbid(unsafe_code)]") {
                let message = format!("`{name}` has no unsafe code: `#![forbid(unsafe_code)]`");
                findings.add(path, 1, message);
            }
        }
    }
}

/// No test that does not run, no code that is not there.
fn stubs(tree: &Tree, findings: &mut Findings) {
    for (path, source) in &tree.sources {
        for word in ["todo!", "unimplemented!"] {
            for at in words(&source.code, word) {
                let message = format!("`{word}`: write it, or leave it out");
                findings.add(path, source.line(at), message);
            }
        }
        for (at, _) in source.code.match_indices("#[ignore") {
            let message =
                "a test that does not run: make it an xtask command, or print why it skips";
            findings.add(path, source.line(at), message);
        }
        for (at, _) in source.code.match_indices("#[cfg_attr(") {
            let attribute = &source.code[at..source.closing(at + 1)];
            if !words(attribute, "ignore").is_empty() {
                findings.add(path, source.line(at), "`ignore`: print why the test skips");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::expect;
    use super::*;

    /// One file of a crate, and whether the rule fires on its first line.
    fn one(rule: fn(&Tree, &mut Findings), path: &str, text: &str, fires: bool) {
        let start = format!("{path}:1: ");
        let expected: &[&str] = if fires { &[&start] } else { &[] };
        expect(rule, &[(path, text)], expected);
    }

    #[test]
    fn models_know_no_store_file_thread_or_environment() {
        let path = "crates/model/src/lib.rs";
        one(bans, path, "use snowmelt_expert_store::Store;", true);
        one(bans, path, "mod expert_store;", true);
        one(bans, path, "use std::thread;", true);
        one(bans, path, "use std::{collections::BTreeMap, env};", true);
        one(bans, path, "// std::thread and \"std::env\"", false);
        one(bans, "crates/model/tests/golden.rs", "use std::thread;", false);
        one(bans, "crates/model/tests/golden.rs", "use snowmelt_expert_store::Store;", true);
        one(bans, "crates/engine/src/lib.rs", "use std::thread;", false);
    }

    #[test]
    fn only_the_binary_reads_the_environment() {
        one(bans, "crates/engine/src/lib.rs", "let x = std::env::var(\"X\");", true);
        one(bans, "crates/engine/src/lib.rs", "use std::env::{temp_dir, var_os};", true);
        one(bans, "crates/engine/src/lib.rs", "let x = std::env::temp_dir();", false);
        one(bans, "crates/engine/tests/all.rs", "let x = std::env::var(\"X\");", false);
        one(bans, "crates/cli/src/main.rs", "let x = std::env::var(\"X\");", false);
    }

    #[test]
    fn files_are_opened_in_few_places() {
        for path in ["engine/src/plan.rs", "text/src/lib.rs", "engine/src/files_of.rs"] {
            one(bans, &format!("crates/{path}"), "use std::fs::File;", true);
        }
        for path in ["engine/src/files.rs", "engine/src/pack/mod.rs", "weights/src/lib.rs"] {
            one(bans, &format!("crates/{path}"), "use std::fs::File;", false);
        }
    }

    #[test]
    fn time_comes_from_a_clock() {
        one(bans, "crates/engine/src/lib.rs", "let x = Instant::now();", true);
        one(bans, "crates/engine/src/clock.rs", "let x = Instant::now();", false);
        one(bans, "crates/expert-store/src/store.rs", "let x = Instant::now();", true);
        one(bans, "crates/expert-store/src/source/a.rs", "let x = Instant::now();", false);
    }

    #[test]
    fn unsafe_code_is_fenced_in() {
        one(bans, "crates/engine/src/lib.rs", "unsafe { x() }", true);
        one(bans, "crates/engine/src/lib.rs", "#![deny(unsafe_code)] // unsafe", false);
        one(bans, "crates/engine/tests/all.rs", "unsafe { x() }", true);
        one(bans, "crates/engine/tests/no_alloc.rs", "unsafe { x() }", false);
        one(bans, "crates/engine/src/alloc.rs", "unsafe { x() }", true);
        one(bans, "crates/backend-cpu/src/lib.rs", "unsafe { x() }", false);
    }

    #[test]
    fn crates_without_unsafe_forbid_it() {
        one(forbid, "crates/text/src/lib.rs", "fn x() {}", true);
        one(forbid, "crates/text/src/lib.rs", "//! Text.\n#![forbid(unsafe_code)]", false);
        one(forbid, "crates/text/src/lib.rs", "// #![forbid(unsafe_code)]", true);
        one(forbid, "crates/text/src/other.rs", "fn x() {}", false);
        one(forbid, "crates/backend/src/lib.rs", "unsafe fn x() {}", false);
        one(forbid, "crates/backend/src/lib.rs", "fn x() {}", true);
    }

    #[test]
    fn gpu_and_http_names_stay_where_they_belong() {
        let manifest = "[package]\nname = \"x\"\n[dependencies]\nwgpu = \"1\"\n";
        let message = "crates/engine/Cargo.toml:4: `wgpu`";
        expect(fences, &[("crates/engine/Cargo.toml", manifest)], &[message]);
        expect(fences, &[("crates/backend-wgpu/Cargo.toml", manifest)], &[]);
        one(fences, "crates/cli/src/main.rs", "use wgpu::Device;", true);
        one(fences, "crates/cli/src/main.rs", "use snowmelt_backend_wgpu::Wgpu;", false);
        one(fences, "crates/cli/src/main.rs", "let wgpu = 1; // wgpu::", false);
        one(fences, "crates/cli/src/main.rs", "axum::serve();", true);
        one(fences, "crates/server/src/lib.rs", "axum::serve();", false);
        one(bans, "crates/cli/src/main.rs", "use std::net::TcpStream;", true);
    }

    #[test]
    fn models_have_no_features() {
        let text = "#[cfg(feature = \"x\")]";
        one(features, "crates/model/src/lib.rs", text, true);
        one(features, "crates/model/src/lib.rs", "#[cfg(not(feature = \"x\"))]", true);
        one(features, "crates/model/src/lib.rs", "if feature == 1 {} // feature", false);
        one(features, "crates/cli/src/main.rs", text, false);
    }

    #[test]
    fn nothing_is_left_for_later() {
        let path = "crates/text/src/lib.rs";
        one(stubs, path, "fn f() { todo!() }", true);
        one(stubs, path, "fn f() { unimplemented!(\"x\") }", true);
        one(stubs, path, "#[test] #[ignore = \"slow\"] fn f() {}", true);
        one(stubs, path, "#[cfg_attr(miri, ignore)] fn f() {}", true);
        one(stubs, path, "// todo!() \n let ignore = \"#[ignore]\";", false);
    }
}
