//! What a change must pass besides the tests; the same command at home and in CI.

use crate::{neon, policy, project, tidy};
use anyhow::{Result, bail};
use std::process::Command;
use std::time::{Duration, Instant};

/// How a step ended without failing.
enum Done {
    Passed,
    /// With how it was done.
    PassedBy(String),
    /// With the reason.
    Skipped(String),
}

struct Step {
    name: String,
    run: Box<dyn FnOnce() -> Result<Done>>,
}

fn step(name: impl Into<String>, run: impl FnOnce() -> Result<Done> + 'static) -> Step {
    Step { name: name.into(), run: Box::new(run) }
}

/// Platforms that the workspace must compile for, though nothing may run it here.
const TARGETS: [&str; 3] = [neon::TARGET, "aarch64-apple-darwin", "x86_64-pc-windows-gnu"];

fn steps() -> Vec<Step> {
    let mut steps = vec![
        step("fmt", || cargo(&["fmt", "--all", "--check"])),
        step("tidy", || tidy::run().map(|()| Done::Passed)),
        step("dependency policy", || policy::run().map(Done::PassedBy)),
        step("advisories", || {
            let reason =
                "the advisory database is fetched from the network; run `cargo deny check`";
            Ok(Done::Skipped(reason.to_owned()))
        }),
        step("clippy", || {
            let lint = ["clippy", "--workspace", "--all-targets", "--release", "--"];
            cargo(&[lint.as_slice(), &["-D", "warnings"]].concat())
        }),
        step("doc", || {
            let mut cargo = project::cargo();
            cargo.args(["doc", "--workspace", "--no-deps", "--release"]);
            project::check(cargo.env("RUSTDOCFLAGS", "-D warnings"))?;
            Ok(Done::Passed)
        }),
        step("typos", || {
            if !project::works("typos", "--version") {
                let reason = "typos is not installed: `cargo install typos-cli`";
                return Ok(Done::Skipped(reason.to_owned()));
            }
            project::check(Command::new("typos").current_dir(project::root()))?;
            Ok(Done::Passed)
        }),
    ];
    let cross = |target| step(format!("check for {target}"), move || check_for(target));
    steps.extend(TARGETS.map(cross));
    steps.push(step("tests on aarch64", || match neon::missing() {
        Some(reason) => Ok(Done::Skipped(reason)),
        None => neon::test().map(|()| Done::Passed),
    }));
    steps
}

pub(crate) fn run() -> Result<()> {
    let mut lines = Vec::new();
    let (mut skipped, mut failed) = (Vec::new(), Vec::new());
    for Step { name, run } in steps() {
        println!("=== {name}");
        let start = Instant::now();
        let outcome = run();
        let time = seconds(start.elapsed());
        let end = match outcome {
            Ok(Done::Passed) => "passed".to_owned(),
            Ok(Done::PassedBy(how)) => format!("passed, {how}"),
            Ok(Done::Skipped(reason)) => {
                skipped.push(format!("{name}: {reason}"));
                "skipped".to_owned()
            }
            Err(error) => {
                println!("{error:#}");
                failed.push(name.clone());
                "FAILED".to_owned()
            }
        };
        println!("=== {name}: {end} ({time})\n");
        lines.push(format!("{time:>8}  {name}: {end}"));
    }
    println!("{}", lines.join("\n"));
    println!("\n{} steps skipped", skipped.len());
    for reason in skipped {
        println!("  {reason}");
    }
    if !failed.is_empty() {
        bail!("{} failed", failed.join(", "));
    }
    Ok(())
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

fn cargo(arguments: &[&str]) -> Result<Done> {
    project::check(project::cargo().args(arguments))?;
    Ok(Done::Passed)
}

/// Compiles the workspace for another platform as far as that goes without its linker.
fn check_for(target: &str) -> Result<Done> {
    if !project::has_target(target) {
        let reason = format!("the target is not installed: `rustup target add {target}`");
        return Ok(Done::Skipped(reason));
    }
    let mut cargo = project::cargo();
    cargo.args(["check", "--workspace", "--release", "--target", target]);
    let of = |tool: &str| format!("{tool}_{}", target.replace('-', "_"));
    if target == neon::TARGET && project::works(neon::COMPILER, "--version") {
        // What is built here serves the tests too.
        cargo.env(of("CC"), neon::COMPILER);
    } else {
        // `check` links nothing, so the C parts of dependencies need not be compiled.
        cargo.env(of("CC"), "true").env(of("CXX"), "true").env(of("AR"), "true");
    }
    project::check(&mut cargo)?;
    Ok(Done::Passed)
}
