//! The full product of settings that must not change a logit; CI runs all pairs of them.

use anyhow::{Result, ensure};
use std::process::Command;

pub(crate) fn run() -> Result<()> {
    let args = ["test", "--release", "-p", "snowmelt-engine", "--test", "it", "equality::"];
    let status = Command::new(env!("CARGO"))
        .args(args)
        .args(["--", "--nocapture"])
        .env("SNOWMELT_EQUALITY", "full")
        .status()?;
    ensure!(status.success(), "a setting changed the logits");
    Ok(())
}
