//! `snowmelt eval`: how well a model predicts a text.

use crate::answer::{since, stats_json};
use crate::args::usage;
use crate::interrupt::{self, Stoppable};
use crate::model::{self, ModelArg};
use crate::options::{EngineArgs, ensure_fits};
use crate::output::{self, Ui, Unit};
use crate::size::counted;
use crate::{input, run};
use anyhow::Result;
use clap::{Args, Subcommand};
use serde_json::json;
use snowmelt_engine::perplexity::{Perplexity, perplexity};
use snowmelt_text::Specials;
use snowmelt_weights::Checkpoint;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

#[derive(Debug, Subcommand)]
pub(crate) enum Eval {
    Perplexity(PerplexityArgs),
}

/// Measure the perplexity of a text
///
/// The text is tokenized as one string: special tokens in it are read as such, and
/// a BOS comes first only where the tokenizer itself adds one. It is cut into
/// windows without overlap, each begins with an empty context, a shorter last one is
/// left out. The result is the mean over all tokens but the first of each window.
#[derive(Debug, Args)]
#[command(override_usage = "snowmelt eval perplexity [OPTIONS] MODEL TEXTFILE\n       \
                            snowmelt eval perplexity [OPTIONS] MODEL --ids FILE")]
pub(crate) struct PerplexityArgs {
    #[command(flatten)]
    model: ModelArg,
    /// The text; `-` is stdin
    #[arg(value_name = "TEXTFILE")]
    text: Option<PathBuf>,
    /// Token ids as a JSON array instead of a text
    #[arg(long, value_name = "FILE")]
    ids: Option<PathBuf>,
    /// Tokens of a window
    #[arg(long, value_name = "N", default_value_t = 512)]
    #[arg(value_parser = clap::value_parser!(u32).range(2..))]
    window: u32,
    #[command(flatten)]
    engine: EngineArgs,
    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    json: bool,
}

pub(crate) fn run(what: &Eval, ui: Ui) -> Result<ExitCode> {
    match what {
        Eval::Perplexity(args) => measure(args, ui),
    }
}

fn measure(args: &PerplexityArgs, ui: Ui) -> Result<ExitCode> {
    let (name, first) = args.model.split()?;
    let text = match (first, &args.text) {
        (Some(_), Some(_)) => return Err(usage("one TEXTFILE is measured at a time")),
        (Some(first), None) => Some(Path::new(first)),
        (None, text) => text.as_deref(),
    };
    let checkpoint = model::open(name, ui)?;
    let ids = ids(&checkpoint, text, args.ids.as_deref(), ui)?;
    let window = args.window as usize;
    let mut engine = run::open_engine(&args.engine, &checkpoint, Some(window), ui)?;
    ensure_fits(&engine, window, "a smaller `--window` fits")?;
    let stoppable = Stoppable::begin();
    let bar = ui.bar((ids.len() / window) as u64, "measuring", Unit::Things("windows"));
    let (before, start) = (engine.stats(), Instant::now());
    let measured = perplexity(&mut engine, &ids, window, &mut |done, _| {
        bar.set_position(done as u64);
        !stoppable.is_asked()
    });
    bar.finish_and_clear();
    let (measured, seconds) = (measured?, start.elapsed().as_secs_f64());
    let is_whole = measured.windows == ids.len() / window;
    if !is_whole {
        let windows = counted(measured.windows, "window");
        ui.warn(format_args!("interrupted: this is the result of the first {windows}"));
    }
    let per_second = (measured.windows * window) as f64 / seconds;
    if args.json {
        let stats = since(&before, &engine.stats());
        output::json(&json!({
            "perplexity": measured.perplexity,
            "mean_nll": measured.mean_nll,
            "windows": measured.windows,
            "window": window,
            "predictions": measured.predictions,
            "tokens": measured.tokens,
            "tokens_per_s": per_second,
            "stats": stats_json(&stats),
        }))?;
    } else {
        output::data(&describe(&measured, window))?;
        ui.note(format_args!("{per_second:.1} tokens/s"));
    }
    Ok(if is_whole { ExitCode::SUCCESS } else { ExitCode::from(interrupt::EXIT) })
}

fn describe(measured: &Perplexity, window: usize) -> String {
    format!(
        "perplexity {:.4}, mean loss {:.6} over {} ({} of {window} tokens, in a text of {})\n",
        measured.perplexity,
        measured.mean_nll,
        counted(measured.predictions, "prediction"),
        counted(measured.windows, "window"),
        measured.tokens,
    )
}

/// Ids of the one text that was given.
fn ids(
    checkpoint: &Checkpoint,
    text: Option<&Path>,
    ids: Option<&Path>,
    ui: Ui,
) -> Result<Vec<u32>> {
    match (text, ids) {
        (None, Some(path)) => input::ids(path, ui),
        (Some(path), None) => {
            let tokenizer = model::need_tokenizer(checkpoint)?;
            Ok(tokenizer.encode_with(&input::text(path, ui)?, Specials::Parse, true)?)
        }
        (None, None) => Err(usage("a TEXTFILE or --ids is needed")),
        (Some(_), Some(_)) => Err(usage("TEXTFILE and --ids cannot be used together")),
    }
}
