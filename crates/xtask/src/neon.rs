//! The CPU backend's tests on an emulated aarch64: a platform that nothing runs is a comment.

use crate::project;
use anyhow::{Result, bail};
use clap::Args;

/// The target and what it is linked and run with.
pub(crate) const TARGET: &str = "aarch64-unknown-linux-gnu";
/// C compiler and linker of the target.
pub(crate) const COMPILER: &str = "aarch64-linux-gnu-gcc";
const EMULATOR: &str = "qemu-aarch64";
/// Where Debian puts the target's C library.
const SYSROOT: &str = "/usr/aarch64-linux-gnu";

#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Fail where the target, linker or emulator is missing
    #[arg(long)]
    require: bool,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    match missing() {
        Some(reason) if options.require => bail!("{reason}"),
        Some(reason) => {
            println!("skipped: {reason}");
            Ok(())
        }
        None => test(),
    }
}

/// What keeps the tests from running here.
pub(crate) fn missing() -> Option<String> {
    if !project::has_target(TARGET) {
        return Some(format!("target {TARGET} is missing: `rustup target add {TARGET}`"));
    }
    if !project::works(COMPILER, "--version") {
        let packages = "gcc-aarch64-linux-gnu libc6-dev-arm64-cross";
        return Some(format!("{COMPILER} is missing: `apt-get install {packages}`"));
    }
    if !project::works(EMULATOR, "--version") {
        return Some(format!("{EMULATOR} is missing: `apt-get install qemu-user`"));
    }
    None
}

/// Runs the tests.
pub(crate) fn test() -> Result<()> {
    let mut cargo = project::cargo();
    cargo
        .args(["test", "--release", "--target", TARGET, "-p", "snowmelt-backend-cpu"])
        .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", COMPILER)
        .env("CC_aarch64_unknown_linux_gnu", COMPILER)
        .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", format!("{EMULATOR} -L {SYSROOT}"));
    project::check(&mut cargo)
}
