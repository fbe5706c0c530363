//! The binary `snowmelt`: flags, terminal and environment around the engine.
#![forbid(unsafe_code)]

mod answer;
mod args;
mod bench;
mod capture;
mod ceilings;
mod chat;
mod compare;
mod eval;
mod input;
mod inspect;
mod interrupt;
mod legacy;
mod logits;
mod model;
mod options;
mod outline;
mod output;
mod pack;
mod plan;
mod run;
mod sampling;
mod size;
mod tensors;
mod terminal;
mod tiny;
mod verify;

use args::{Cli, Command, Globals};
use clap::CommandFactory;
use output::{StdoutClosed, Ui};
use std::process::ExitCode;

/// A usage error that clap cannot see by itself.
const USAGE: u8 = 2;
/// What a shell reports for a program that a closed pipe ended.
const CLOSED_PIPE: u8 = 128 + 13;

fn main() -> ExitCode {
    let (cli, mut named) = match args::parse() {
        Ok(parsed) => parsed,
        Err(error) => return end(&error),
    };
    let ui = Ui::new(cli.globals);
    if let Err(error) = interrupt::install() {
        ui.warn(format_args!("Ctrl-C will not be handled: {error}"));
    }
    match dispatch(cli.command, ui) {
        Ok(code) => code,
        Err(error) => match error.downcast_ref() {
            Some(usage) => end(&named.usage_error(usage)),
            None => report(&error, &named.variables, ui),
        },
    }
}

/// Prints what clap has to say: a help text or a usage error.
fn end(error: &clap::Error) -> ExitCode {
    if error.use_stderr() {
        // Nobody is left to tell when this fails too.
        let _ = error.print();
        return ExitCode::from(USAGE);
    }
    match output::data(&error.render().to_string()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => report(&error, &[], Ui::new(Globals::default())),
    }
}

fn dispatch(command: Command, ui: Ui) -> anyhow::Result<ExitCode> {
    match command {
        Command::Run(args) => run::run(args, ui),
        Command::Logits(args) => logits::run(&args, ui),
        Command::Capture(args) => capture::run(&args, ui),
        Command::Compare(args) => compare::run(&args, ui),
        Command::Eval { what } => eval::run(&what, ui),
        Command::Pack(args) => pack::run(&args, ui),
        Command::Verify(args) => verify::run(&args, ui),
        Command::Inspect(args) => inspect::run(&args, ui),
        Command::Plan(args) => plan::run(&args, ui),
        Command::Bench(args) => bench::run(&args, ui),
        Command::UnpackTiny => tiny::unpack().map(|()| ExitCode::SUCCESS),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "snowmelt", &mut script);
            output::data(&String::from_utf8_lossy(&script))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn report(error: &anyhow::Error, variables: &[(String, String)], ui: Ui) -> ExitCode {
    if error.downcast_ref::<StdoutClosed>().is_some() {
        return ExitCode::from(CLOSED_PIPE);
    }
    ui.error(error);
    let text = format!("{error:#}");
    for (flag, variable) in variables.iter().filter(|(flag, _)| text.contains(flag.as_str())) {
        output::say(format_args!("hint: {variable} sets `{flag}` here"));
    }
    ExitCode::FAILURE
}
