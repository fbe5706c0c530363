//! Where the project lies, and how its tools are started.

use anyhow::{Context, Result, bail};
use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The workspace root. The run-time variable comes first, since a build shared by two checkouts
/// has only one compile-time value.
pub(crate) fn root() -> PathBuf {
    let here = env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    let here = here.filter(|path| path.ends_with("crates/xtask"));
    let here = here.unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")));
    here.ancestors().nth(2).map_or_else(|| here.clone(), Path::to_path_buf)
}

/// The cargo that runs us.
pub(crate) fn cargo() -> Command {
    let program = env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
    let mut command = Command::new(program);
    command.current_dir(root()).stdin(Stdio::null());
    command
}

/// Runs a command with its output on ours.
///
/// # Errors
/// When it cannot be started or fails.
pub(crate) fn check(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start {}", shown(command)))?;
    if !status.success() {
        bail!("{} failed: {status}", shown(command));
    }
    Ok(())
}

/// Runs a command and returns what it wrote to stdout.
///
/// # Errors
/// When it cannot be started or fails; the message ends with what it wrote to stderr.
pub(crate) fn capture(command: &mut Command) -> Result<Vec<u8>> {
    let output = command.output().with_context(|| format!("cannot start {}", shown(command)))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let tail: Vec<&str> = stderr.lines().rev().take(6).collect();
        let tail: Vec<&str> = tail.into_iter().rev().collect();
        bail!("{} failed: {}\n{}", shown(command), output.status, tail.join("\n"));
    }
    Ok(output.stdout)
}

/// Whether `program argument` can be run.
pub(crate) fn works(program: &str, argument: &str) -> bool {
    let mut command = Command::new(program);
    command.arg(argument).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Whether the standard library of this target is installed.
pub(crate) fn has_target(target: &str) -> bool {
    let mut rustc = Command::new("rustc");
    rustc.args(["--print", "target-libdir", "--target", target]).current_dir(root());
    let Ok(output) = capture(&mut rustc) else { return false };
    let folder = PathBuf::from(String::from_utf8_lossy(&output).trim());
    let Ok(mut files) = folder.read_dir() else { return false };
    files.any(|file| file.is_ok_and(|file| file.file_name().to_string_lossy().contains("libstd")))
}

fn shown(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy().into_owned()];
    words.extend(command.get_args().map(|word| word.to_string_lossy().into_owned()));
    format!("`{}`", words.join(" "))
}
