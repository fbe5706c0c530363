//! The command line.

use crate::{bench, capture, compare, eval, inspect, logits, pack, plan, run, verify};
use clap::builder::Styles;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use std::ffi::OsStr;

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

#[derive(Clone, Copy, Debug, Default, Args)]
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

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum ColorWhen {
    #[default]
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
#[derive(Debug)]
pub(crate) struct Usage(String);

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// See [`Usage`].
pub(crate) fn usage(message: impl std::fmt::Display) -> anyhow::Error {
    Usage(message.to_string()).into()
}

/// The subcommand that was named.
pub(crate) struct Named {
    command: clap::Command,
    /// Flags whose values come from variables, with these.
    pub(crate) variables: Vec<(String, String)>,
}

impl Named {
    /// The error with the command's usage.
    pub(crate) fn usage_error(&mut self, Usage(message): &Usage) -> clap::Error {
        self.command.error(ErrorKind::ArgumentConflict, message)
    }
}

/// Parses the arguments and variables of this process.
pub(crate) fn parse() -> Result<(Cli, Named), clap::Error> {
    let mut root = without_empty_variables(Cli::command());
    root.build();
    let parsed = root.clone().try_get_matches_from(std::env::args_os());
    let matches = parsed.map_err(|error| name_variable(error, &root))?;
    let cli = Cli::from_arg_matches(&matches)?;
    let (mut command, mut matches) = (&root, &matches);
    while let Some((name, inner)) = matches.subcommand() {
        command = command.find_subcommand(name).unwrap_or(command);
        matches = inner;
    }
    let variables = variables(command)
        .filter(|(arg, _)| {
            matches.value_source(arg.get_id().as_str()) == Some(ValueSource::EnvVariable)
        })
        .map(|(arg, variable)| (flag(arg), variable))
        .collect();
    Ok((cli, Named { command: command.clone(), variables }))
}

/// An empty variable counts as none.
fn without_empty_variables(command: clap::Command) -> clap::Command {
    let is_empty = |name: &OsStr| std::env::var_os(name).is_some_and(|value| value.is_empty());
    command
        .mut_args(|arg| match arg.get_env() {
            Some(name) if is_empty(name) => arg.env(None::<&str>),
            _ => arg,
        })
        .mut_subcommands(without_empty_variables)
}

/// Arguments of a command that variables can set, with their names.
fn variables(command: &clap::Command) -> impl Iterator<Item = (&clap::Arg, String)> {
    let name = |arg: &clap::Arg| arg.get_env().map(|name| name.to_string_lossy().into_owned());
    command.get_arguments().filter_map(move |arg| Some((arg, name(arg)?)))
}

fn flag(arg: &clap::Arg) -> String {
    format!("--{}", arg.get_long().unwrap_or_default())
}

/// Names the variable instead of the flag where the bad value came from it: what no argument ends
/// with was not typed.
fn name_variable(mut error: clap::Error, root: &clap::Command) -> clap::Error {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        _ => None,
    };
    let (Some(arg), Some(value)) = (text(ContextKind::InvalidArg), text(ContextKind::InvalidValue))
    else {
        return error;
    };
    let is_typed = std::env::args_os().any(|arg| arg.to_string_lossy().ends_with(&value));
    let found = root
        .get_subcommands()
        .flat_map(|command| std::iter::once(command).chain(command.get_subcommands()))
        .flat_map(variables)
        .find(|(candidate, variable)| {
            candidate.to_string() == arg
                && std::env::var_os(variable).is_some_and(|found| found == OsStr::new(&value))
        });
    if let (false, Some((_, variable))) = (is_typed, found) {
        error.insert(ContextKind::InvalidArg, ContextValue::String(variable));
    }
    error
}
