//! `snowmelt run`: answers one prompt, or chats.

use crate::answer::{Answer, Ask, Piece, answer, stats_json};
use crate::args::usage;
use crate::model::{self, ModelArg};
use crate::options::{Cpu, EngineArgs};
use crate::output::{self, Ui};
use crate::sampling::SamplingArgs;
use crate::size::Bytes;
use crate::{chat, input, interrupt};
use anyhow::{Result, bail, ensure};
use clap::Args;
use serde_json::{Value, json};
use snowmelt_engine::{Engine, GenerateOptions, ModelOptions, Sampler, end_of_text};
use snowmelt_text::{ChatTemplate, Message, RenderOptions, Specials, Tokenizer};
use snowmelt_weights::Checkpoint;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

/// Answer a prompt, or chat when there is none
///
/// Without a PROMPT it is read from stdin; where that is a terminal, a chat begins.
/// The answer goes to stdout, everything else to stderr.
#[derive(Debug, Args)]
#[command(
    override_usage = "snowmelt run [OPTIONS] MODEL [PROMPT]...",
    after_help = "Examples:\n  snowmelt run tiny \"Tell me a story about a brave duck.\"\n  \
                  snowmelt run tiny --memory 40MiB --seed 7 < question.txt\n  \
                  snowmelt run MODEL --ids ids.json -n 64 --temp 0 --ignore-eos --json"
)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// What to answer; several words are joined by spaces
    #[arg(value_name = "PROMPT")]
    pub(crate) prompt: Vec<String>,
    /// Text that tells the model how to behave
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["raw", "ids"])]
    pub(crate) system: Option<String>,
    /// Continue the prompt as it is, without the chat template
    #[arg(long)]
    pub(crate) raw: bool,
    /// Take the prompt as token ids from a JSON array; `-` is stdin
    #[arg(long, value_name = "FILE", conflicts_with = "raw")]
    pub(crate) ids: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    /// Print one JSON object with text, token ids and numbers
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

/// An opened model that can answer.
pub(crate) struct Ready {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) tokenizer: Option<Tokenizer>,
    pub(crate) template: Option<ChatTemplate>,
    pub(crate) generation_config: Option<Value>,
    pub(crate) generate: GenerateOptions,
}

/// Where the prompt comes from.
enum Prompt {
    Text(String),
    Ids(Vec<u32>),
    Chat,
}

pub(crate) fn run(args: RunArgs, ui: Ui) -> Result<ExitCode> {
    let (name, first) = args.model.split()?;
    let words: Vec<&str> =
        first.into_iter().chain(args.prompt.iter().map(String::as_str)).collect();
    if args.ids.is_some() && !words.is_empty() {
        return Err(usage("a PROMPT and --ids cannot be used together"));
    }
    let checkpoint = model::open(name, ui)?;
    let prompt = prompt(&args, &words, ui)?;
    let ready = Ready::new(checkpoint, &args, matches!(prompt, Prompt::Ids(_)), ui)?;
    match prompt {
        Prompt::Chat => chat::chat(ready, args, ui),
        Prompt::Text(text) => {
            let ids = ready.encode_prompt(&text, &args, ui)?;
            once(&ready, &args, &ids, ui)
        }
        Prompt::Ids(ids) => once(&ready, &args, &ids, ui),
    }
}

fn prompt(args: &RunArgs, words: &[&str], ui: Ui) -> Result<Prompt> {
    if let Some(path) = &args.ids {
        return Ok(Prompt::Ids(input::ids(path, ui)?));
    }
    let text = match words {
        [] => {
            let is_chat = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
            if is_chat && !args.json && !args.raw {
                return Ok(Prompt::Chat);
            }
            input::prompt(ui)?
        }
        words => words.join(" "),
    };
    ensure!(!text.trim().is_empty(), "the prompt is empty");
    Ok(Prompt::Text(text))
}

impl Ready {
    fn new(checkpoint: Checkpoint, args: &RunArgs, by_ids: bool, ui: Ui) -> Result<Self> {
        let tokenizer = match model::tokenizer(&checkpoint) {
            Err(error) if by_ids => {
                ui.warn(format_args!("no text will be shown: {error:#}"));
                None
            }
            result => result?,
        };
        if tokenizer.is_none() && !args.sampling.stop.is_empty() {
            bail!("`--stop` needs the model's `tokenizer.json`, which cannot be read here");
        }
        let template = if by_ids || args.raw { None } else { model::template(&checkpoint)? };
        let generation_config = model::generation_config(&checkpoint)?;
        let stop_ids = if args.sampling.ignore_eos {
            Vec::new()
        } else {
            end_of_text(generation_config.as_ref(), checkpoint.config())
        };
        let generate = GenerateOptions { tokens_max: args.sampling.max_tokens, stop_ids };
        Ok(Self { checkpoint, tokenizer, template, generation_config, generate })
    }

    fn encode_prompt(&self, text: &str, args: &RunArgs, ui: Ui) -> Result<Vec<u32>> {
        let Some(tokenizer) = &self.tokenizer else {
            // The message of a missing one.
            model::need_tokenizer(&self.checkpoint)?;
            unreachable!("it is missing");
        };
        check_length(text, &self.checkpoint)?;
        let mut messages = Vec::new();
        messages.extend(args.system.as_deref().map(|text| Message::new("system", text)));
        messages.push(Message::new("user", text));
        if let Some(template) = &self.template {
            return encode_chat(tokenizer, template, &messages);
        }
        if !args.raw {
            ui.note("this model has no chat template: it continues the prompt as it is");
        }
        if args.system.is_some() {
            ui.warn("without a chat template `--system` has no effect");
        }
        Ok(tokenizer.encode_with(text, Specials::Parse, true)?)
    }
}

/// No vocabulary has a longer token; published ones end at 128 spaces.
const TOKEN_BYTES_MAX: usize = 256;

/// Refuses a text that no context holds before a template and a tokenizer work on it for minutes.
fn check_length(text: &str, checkpoint: &Checkpoint) -> Result<()> {
    let context = snowmelt_model::census(checkpoint, ModelOptions::default())?.context_max;
    let most = context.saturating_mul(TOKEN_BYTES_MAX);
    ensure!(
        text.len() <= most,
        "the prompt is too long: {}, where the {context} tokens of this model's context are at \
         most {}",
        Bytes(text.len() as u64),
        Bytes(most as u64)
    );
    Ok(())
}

/// A conversation as token ids, with the beginning of the next answer.
pub(crate) fn encode_chat(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    messages: &[Message],
) -> Result<Vec<u32>> {
    let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
    Ok(tokenizer.encode_chat(template, messages, &options)?.ids)
}

/// The context that a prompt and its answer need, where that is known.
fn needed_context(args: &RunArgs, prompt_tokens: usize) -> Option<usize> {
    args.sampling.max_tokens.map(|answer| prompt_tokens.saturating_add(answer).max(1))
}

fn once(ready: &Ready, args: &RunArgs, ids: &[u32], ui: Ui) -> Result<ExitCode> {
    let start = Instant::now();
    let context = needed_context(args, ids.len());
    let mut engine = open_engine(&args.engine, &ready.checkpoint, context, ui)?;
    let load_s = start.elapsed().as_secs_f64();
    let n_vocab = engine.census().n_vocab;
    let options = args.sampling.options(ready.generation_config.as_ref(), n_vocab)?;
    let mut sampler = Sampler::new(options, n_vocab)?;
    let session = engine.session()?;
    let ask = Ask {
        ids,
        generate: &ready.generate,
        stop: &args.sampling.stop,
        tokenizer: ready.tokenizer.as_ref(),
        shorter: "a shorter prompt fits",
    };
    let mut shown = Shown { json: args.json, ids: 0, is_line_open: false };
    let done =
        answer(&mut engine, session, &mut sampler, &ask, ui, &mut |piece| shown.show(&piece));
    if done.is_ok() || shown.is_line_open {
        shown.end(ready.tokenizer.is_some())?;
    }
    let done = done?;
    if args.json {
        output::json(&report(&done, &engine, load_s, ready.tokenizer.is_some()))?;
    } else {
        ui.note(done.numbers.line(engine.source_name().is_some()));
    }
    let interrupted = done.finish == "interrupted";
    Ok(if interrupted { ExitCode::from(interrupt::EXIT) } else { ExitCode::SUCCESS })
}

/// Opens the engine; the wish for a context is cut to what the model can.
pub(crate) fn open_engine(
    args: &EngineArgs,
    checkpoint: &Checkpoint,
    context: Option<usize>,
    ui: Ui,
) -> Result<Engine<Cpu>> {
    let context_max = || -> Result<usize> {
        Ok(snowmelt_model::census(checkpoint, args.model_options())?.context_max)
    };
    let context = match context {
        Some(context) => Some(context.min(context_max()?)),
        None => None,
    };
    args.open(checkpoint, context, ui)
}

/// The answer on stdout as it comes.
struct Shown {
    json: bool,
    ids: usize,
    is_line_open: bool,
}

impl Shown {
    fn show(&mut self, piece: &Piece<'_>) -> Result<()> {
        if self.json {
            return Ok(());
        }
        match piece {
            Piece::Text(text) => {
                self.is_line_open = !text.ends_with('\n');
                output::data(text)
            }
            Piece::Id(id) => {
                let before = if self.ids == 0 { "[" } else { ", " };
                self.ids += 1;
                self.is_line_open = true;
                output::data(&format!("{before}{id}"))
            }
        }
    }

    fn end(&mut self, is_text: bool) -> Result<()> {
        let end = match (is_text, self.ids) {
            _ if self.json => "",
            (true, _) if self.is_line_open => "\n",
            (true, _) => "",
            (false, 0) => "[]\n",
            (false, _) => "]\n",
        };
        output::data(end)
    }
}

fn report(answer: &Answer, engine: &Engine<Cpu>, load_s: f64, is_text: bool) -> Value {
    let plan = engine.plan();
    let mut timings = answer.numbers.json();
    timings["load_s"] = load_s.into();
    let mut report = json!({
        "output_ids": answer.ids,
        "prompt_tokens": answer.numbers.prompt_tokens,
        "finish": answer.finish,
    });
    if is_text {
        report["text"] = answer.text.as_str().into();
    }
    report["seed"] = answer.seed.into();
    report["timings"] = timings;
    report["stats"] = stats_json(&answer.numbers.store);
    if plan.row_cache_bytes > 0 {
        report["stats"]["table_rows"] = answer.numbers.rows_json();
    }
    report["plan"] = json!({
        "residency": plan.residency.name(),
        "slots": plan.slots,
        "context_tokens": plan.context_tokens,
        "prefill_chunk": plan.rows,
        "budget_bytes": plan.budget_bytes,
        "source": engine.source_name(),
    });
    report
}
