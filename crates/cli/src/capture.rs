//! `snowmelt capture`: values inside a run, for comparison with another engine.

use crate::interrupt::{self, Stoppable};
use crate::legacy;
use crate::model::{self, ModelArg};
use crate::options::{Cpu, EngineArgs};
use crate::output::{self, Ui};
use crate::{input, run, tensors};
use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use serde_json::json;
use snowmelt_engine::{Capture, CaptureOptions, Engine, Feed, Outputs, SessionId};
use snowmelt_weights::Checkpoint;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Write values from inside the model as it computes a sequence
///
/// DIR gets one safetensors file for each kind of values; a tensor `layers.3.attention.q`
/// has a row for each position. A setting that the model or the sequence does not have
/// turns that capture off with a message; the run itself goes on and prints the most
/// likely next token.
#[derive(Debug, Args)]
#[command(override_usage = "snowmelt capture [OPTIONS] --ids FILE --out DIR MODEL")]
pub(crate) struct CaptureArgs {
    #[command(flatten)]
    model: ModelArg,
    /// Token ids as a JSON array; `-` is stdin
    #[arg(long, value_name = "FILE")]
    ids: PathBuf,
    /// What to write; may be given several times or separated by commas
    #[arg(long, value_enum, value_delimiter = ',', default_value = "layers")]
    what: Vec<What>,
    /// Layers A to B, without B, counted from 0 [default: all]
    #[arg(long, value_name = "A..B", allow_hyphen_values = true)]
    layers: Option<String>,
    /// One position, counted from 0 [default: all, `legacy`: the first]
    #[arg(long, value_name = "P", allow_hyphen_values = true)]
    position: Option<String>,
    /// How to write it; `legacy` is that of turbospark (`qwen4_exp` only)
    #[arg(long, value_enum, default_value = "safetensors")]
    format: Format,
    /// Folder to write into
    #[arg(short, long, value_name = "DIR")]
    out: PathBuf,
    #[command(flatten)]
    engine: EngineArgs,
}

/// A kind of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum What {
    /// The residual stream before, within and after each layer
    Layers,
    /// Queries, keys, values and results of attention; hyper-connections around it
    Attention,
    /// Gated DeltaNet: q, k, v before and after their norm, gates, results
    Gdn,
    /// Router logits, chosen experts, weights
    Router,
}

impl What {
    /// Name of the file.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Layers => "layers",
            Self::Attention => "attention",
            Self::Gdn => "gdn",
            Self::Router => "router",
        }
    }

    /// Beginnings of the stages that belong to it.
    fn stages(self) -> &'static [&'static str] {
        match self {
            Self::Layers => &["layer."],
            Self::Attention => &["attention.", "hc."],
            Self::Gdn => &["gdn."],
            Self::Router => &["router."],
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    Safetensors,
    Legacy,
}

pub(crate) fn run(args: &CaptureArgs, ui: Ui) -> Result<ExitCode> {
    let checkpoint = model::open(args.model.get()?, ui)?;
    let ids = input::ids(&args.ids, ui)?;
    ensure!(!ids.is_empty(), "`{}` holds no token ids", args.ids.display());
    let mut engine = run::open_engine(&args.engine, &checkpoint, Some(ids.len()), ui)?;
    let mut what = args.what.clone();
    what.sort_unstable();
    what.dedup();
    let options = match options(args, &what, engine.census().n_layers, ids.len()) {
        Ok(options) => Some(options),
        Err(reason) => {
            disable(&what, &reason, ui);
            None
        }
    };
    if args.format == Format::Legacy && engine.census().family != legacy::FAMILY {
        let family = engine.census().family;
        let reason = format!("`--format legacy` is `{family}` here, expected `{}`", legacy::FAMILY);
        disable(&what, &reason, ui);
        return finish(&mut engine, &ids, None).map(|(code, _)| code);
    }
    let (code, capture) = finish(&mut engine, &ids, options.map(Capture::new))?;
    if let Some(capture) = capture {
        let write = Write { args, checkpoint: &checkpoint, capture: &capture, ui };
        for what in what {
            write.one(what)?;
        }
    }
    Ok(code)
}

/// Says that nothing is captured, and why.
fn disable(what: &[What], reason: &str, ui: Ui) {
    let names: Vec<&str> = what.iter().map(|what| what.name()).collect();
    ui.warn(format_args!("no capture of {}: {reason}", names.join(", ")));
}

/// What is to be captured, or why nothing can be.
fn options(
    args: &CaptureArgs,
    what: &[What],
    n_layers: usize,
    n_tokens: usize,
) -> Result<CaptureOptions, String> {
    let layers = match &args.layers {
        Some(text) => layers(text, n_layers)?,
        None => 0..n_layers,
    };
    let position = match &args.position {
        Some(text) => {
            let position = text.parse().ok().filter(|position| *position < n_tokens);
            let last = n_tokens - 1;
            let wanted = format!("`--position {text}` is out of range: expected 0 to {last}");
            Some(position.ok_or(wanted)?)
        }
        None => (args.format == Format::Legacy).then_some(0),
    };
    let stages = what.iter().flat_map(|what| what.stages());
    Ok(CaptureOptions { stages: stages.map(|s| (*s).to_owned()).collect(), layers, position })
}

/// `A..B`, within the model.
fn layers(text: &str, n_layers: usize) -> Result<Range<usize>, String> {
    let wrong = || {
        format!(
            "`--layers {text}` is no range of layers: expected `A..B` with A below B and B at \
             most {n_layers}"
        )
    };
    let (first, end) = text.split_once("..").ok_or_else(wrong)?;
    let first: usize = if first.is_empty() { 0 } else { first.parse().map_err(|_| wrong())? };
    let end: usize = if end.is_empty() { n_layers } else { end.parse().map_err(|_| wrong())? };
    if first < end && end <= n_layers { Ok(first..end) } else { Err(wrong()) }
}

/// Runs the tokens and prints the most likely next one.
fn finish(
    engine: &mut Engine<Cpu>,
    ids: &[u32],
    mut capture: Option<Capture>,
) -> Result<(ExitCode, Option<Capture>)> {
    let session = engine.session()?;
    let stoppable = Stoppable::begin();
    let rows = engine.plan().rows;
    let mut done = 0;
    for chunk in ids.chunks(rows) {
        done += chunk.len();
        let outputs = if done == ids.len() { Outputs::Last } else { Outputs::None };
        step(engine, session, chunk, outputs, capture.as_mut())?;
        if stoppable.is_asked() {
            return Ok((ExitCode::from(interrupt::EXIT), None));
        }
    }
    let logits = engine.logits(session);
    let greatest = (0..logits.len()).reduce(|a, b| if logits[b] > logits[a] { b } else { a });
    let next = greatest.context("the model gave no logits")?;
    output::json(&json!({ "tokens": ids.len(), "next_id": next, "logit": logits[next] }))?;
    let capture = capture.filter(|capture| !capture.is_failed());
    Ok((ExitCode::SUCCESS, capture))
}

fn step(
    engine: &mut Engine<Cpu>,
    session: SessionId,
    tokens: &[u32],
    outputs: Outputs,
    capture: Option<&mut Capture>,
) -> Result<()> {
    let feed = [Feed { session, tokens, outputs }];
    match capture {
        Some(capture) => engine.step_probed(&feed, &mut |_, _, _| {}, Some(capture))?,
        None => engine.step(&feed, &mut |_, _, _| {})?,
    }
    engine.take_failure(session).map_or(Ok(()), |error| Err(error.into()))
}

/// Writes what was captured.
struct Write<'a> {
    args: &'a CaptureArgs,
    checkpoint: &'a Checkpoint,
    capture: &'a Capture,
    ui: Ui,
}

impl Write<'_> {
    fn one(&self, what: What) -> Result<()> {
        let is_of = |stage: &str| what.stages().iter().any(|start| stage.starts_with(start));
        let taken = self.capture.taken().iter().filter(|((_, stage), _)| is_of(stage));
        let taken: Vec<_> = taken.map(|(key, captured)| (*key, captured)).collect();
        if taken.is_empty() {
            disable(&[what], "none of these layers has such values", self.ui);
            return Ok(());
        }
        let out = &self.args.out;
        std::fs::create_dir_all(out)
            .with_context(|| format!("could not create `{}`", out.display()))?;
        if self.args.format == Format::Legacy {
            let capture = (self.capture, self.args.layers.is_some());
            return legacy::write(out, what, self.checkpoint, capture, self.ui);
        }
        let tensors = taken.into_iter().map(|((layer, stage), captured)| {
            let name = format!("layers.{layer}.{stage}");
            let rows = captured.values.len() / captured.width.max(1);
            let dtype = if stage == "router.ids" { "U32" } else { "F32" };
            tensors::Out { name, dtype, shape: [rows, captured.width], values: &captured.values }
        });
        let path = out.join(format!("{}.safetensors", what.name()));
        tensors::write(&path, &tensors.collect::<Vec<_>>())?;
        self.wrote(&path);
        Ok(())
    }

    fn wrote(&self, path: &Path) {
        self.ui.note(format_args!("wrote {}", path.display()));
    }
}
