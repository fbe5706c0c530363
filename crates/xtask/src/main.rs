//! The project's own commands: `cargo xtask help`. One module a subcommand.
#![forbid(unsafe_code)]

mod ci;
mod equality;
mod fixtures;
mod memory;
mod neon;
mod new_model;
mod policy;
mod project;
mod safetensors;
mod spdx;
mod synth;
mod tidy;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", about = "The project's own commands")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Holds the tree to its rules; also runs as a test
    Tidy,
    /// Everything that a change must pass besides the tests
    Ci,
    /// Runs the conformance tests of the CPU backend on an emulated aarch64
    Neon(neon::Options),
    /// Makes `fixtures/` from the reference models in `../shared/oracle`
    Fixtures(fixtures::Options),
    /// Begins a new family of models, and lists what it needs
    NewModel(new_model::Options),
    /// Runs the full product of settings that must not change a logit
    Equality,
    /// Measures the memory promise in a cgroup
    Memory(memory::Options),
    /// Makes a model of any size with random weights
    Synth(synth::Options),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Tidy => tidy::run(),
        Command::Ci => ci::run(),
        Command::Neon(options) => neon::run(&options),
        Command::Fixtures(options) => fixtures::run(&options),
        Command::NewModel(options) => new_model::run(&options),
        Command::Equality => equality::run(),
        Command::Memory(options) => memory::run(&options),
        Command::Synth(options) => synth::run(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
