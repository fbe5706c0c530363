//! The command line.

use crate::{bench, capture, compare, eval, inspect, logits, pack, plan, run, verify};
use clap::builder::Styles;
use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};

/// Runs Mixture-of-Experts language models that are larger than memory
///
/// The dense part of a model stays in memory; its experts are read from the disk when a token
/// needs them, into as many slots as a memory budget allows. The budget changes the speed, never
/// the text.
#[derive(Debug, Parser)]
#[command(
    name = "snowmelt",
    version,
    max_term_width = 80,
    styles = Styles::plain(),
    subcommand_required = true,
    arg_required_else_help = true,
    after_help = "MODEL is a folder (a model as Hugging Face publishes it, or a container made by \
                  `snowmelt pack`), or `tiny`, a small model inside this program.\n\nTry: \
                  snowmelt run tiny \"Tell me a story about a brave duck.\""
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) globals: Globals,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Clone, Copy, Debug, Args)]
#[command(next_help_heading = "Output")]
pub(crate) struct Globals {
    /// Say nothing but results, warnings and errors
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
    /// Say more
    #[arg(short, long, global = true)]
    pub(crate) verbose: bool,
    /// When to use colours; `NO_COLOR` turns them off too
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto")]
    pub(crate) color: ColorWhen,
    /// Show no progress bars
    #[arg(long, global = true)]
    pub(crate) no_progress: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ColorWhen {
    Auto,
    Always,
    Never,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(run::RunArgs),
    Plan(plan::PlanArgs),
    Inspect(inspect::InspectArgs),
    Pack(pack::PackArgs),
    Verify(verify::VerifyArgs),
    Bench(bench::BenchArgs),
    /// Measure how well a model predicts a text
    Eval {
        #[command(subcommand)]
        what: eval::Eval,
    },
    Logits(logits::LogitsArgs),
    Capture(capture::CaptureArgs),
    Compare(compare::CompareArgs),
    /// Unpack the built-in model
    #[command(name = crate::tiny::COMMAND, hide = true)]
    UnpackTiny,
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

/// A usage error found after parsing; it ends the program as clap's own do.
pub(crate) fn usage(message: impl std::fmt::Display) -> anyhow::Error {
    Cli::command().error(ErrorKind::ArgumentConflict, message).into()
}
