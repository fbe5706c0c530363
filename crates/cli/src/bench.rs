//! `snowmelt bench`: how fast the model runs here, and how fast it could.

use crate::answer::{read_bytes, since, stats_json};
use crate::args::usage;
use crate::ceilings::{self, Disk};
use crate::options::{Cpu, EngineArgs, ensure_fits, residency_line};
use crate::output::{self, Ui, Unit};
use crate::size::{Bytes, counted};
use crate::{input, model, run};
use anyhow::{Context, Result, ensure};
use clap::Args;
use serde_json::{Value, json};
use snowmelt_backend::{RouteObserver, Routes};
use snowmelt_backend_cpu::memory_read_ceiling;
use snowmelt_engine::{Engine, Outputs, SessionId, Stats};
use snowmelt_expert_store::sim::Trace;
use snowmelt_text::Specials;
use snowmelt_weights::Checkpoint;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// Measure how fast a model runs on this machine
///
/// Reads a prompt and generates greedily after it, several times, and prints medians.
/// With --ceilings it also measures what memory and disk could give at best.
#[derive(Debug, Args)]
#[command(
    override_usage = "snowmelt bench [OPTIONS] MODEL\n       snowmelt bench --ceilings [PATH]",
    after_help = "Examples:\n  snowmelt bench tiny --memory 40MiB\n  \
                  snowmelt bench --ceilings /mnt/ssd\n  \
                  snowmelt bench MODEL --text book.txt --record-routes routes.txt"
)]
pub(crate) struct BenchArgs {
    /// Folder of the model, or `tiny` for the one inside this program
    #[arg(value_name = "MODEL")]
    positional: Option<String>,
    /// The same as MODEL
    #[arg(short = 'm', long = "model", value_name = "MODEL", conflicts_with = "positional")]
    flag: Option<String>,
    /// Tokens of the prompt [default: 512, or less where the context is short]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    prompt: Option<u32>,
    /// Tokens to generate
    #[arg(long = "gen", value_name = "N", default_value_t = 64)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    generate: u32,
    /// How often to repeat
    #[arg(long, value_name = "N", default_value_t = 3)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: u32,
    /// Take the prompt from this text
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Take the prompt from token ids in a JSON array
    #[arg(long, value_name = "FILE", conflicts_with = "text")]
    ids: Option<PathBuf>,
    /// Measure reads from memory and disk: of the file PATH, or of one that is
    /// written in the folder PATH; default the model's own file, or the folder for
    /// temporary files
    #[arg(long, value_name = "PATH", num_args = 0..=1)]
    #[expect(clippy::option_option, reason = "clap's form of a flag with an optional value")]
    ceilings: Option<Option<PathBuf>>,
    /// Write which experts each token of --text or --ids used, and measure nothing
    #[arg(long, value_name = "FILE")]
    record_routes: Option<PathBuf>,
    #[command(flatten)]
    engine: EngineArgs,
    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    json: bool,
}

/// Read where the model has a tokenizer and no text is given.
const TEXT: &str = "\
The river began as a thread of water under the ice. In the first warm week of spring the snow on \
the high slopes turned grey, then heavy, and at noon one could hear it settle. A boy who kept \
goats on the lower pasture went up every morning to look at the place where the stream came out. \
\"It is wider,\" he told his grandmother when he came home. She nodded and went on mending the \
net. \"It always is,\" she said. \"What the mountain keeps all winter it gives back in a month, \
and it never asks which of us was thirsty.\" By the end of April the stones of the ford were \
under water, and carts had to go round by the bridge. Merchants complained; millers did not. At \
night the whole valley sounded like a crowd in a distant square. Later, when the fields had been \
sown and the goats had gone up to the summer grass, the stream grew thin again, and the boy could \
cross it in three steps. He kept a count of the days in chalk on the door. There were fifty-one \
of them that year, four more than the year before, and he wondered how a mountain decides.\n\n";

/// Seconds for each ceiling of memory.
const CEILING_S: f64 = 2.0;
/// Seconds for the one measured beside each repetition.
const BESIDE_S: f64 = 0.5;
/// Tokens read from an empty state when routes are recorded.
const WINDOW: usize = 512;

pub(crate) fn run(args: &BenchArgs, ui: Ui) -> Result<ExitCode> {
    let name = args.positional.as_deref().or(args.flag.as_deref());
    let Some(name) = name else {
        let Some(path) = &args.ceilings else {
            return Err(usage("a MODEL or --ceilings is needed"));
        };
        let path = path.clone().unwrap_or_else(std::env::temp_dir);
        let found = Ceilings::measure(args.engine.cpu.threads, Some(&path), ui)?;
        if args.json {
            output::json(&found.json())?;
        } else {
            output::data(&found.text())?;
        }
        return Ok(ExitCode::SUCCESS);
    };
    let checkpoint = model::open(name, ui)?;
    if let Some(path) = &args.record_routes {
        return record(args, &checkpoint, path, ui);
    }
    measure(args, name, &checkpoint, ui)
}

/// Ids of what the user gave.
fn given_ids(args: &BenchArgs, checkpoint: &Checkpoint, ui: Ui) -> Result<Option<Vec<u32>>> {
    if let Some(path) = &args.ids {
        return input::ids(path, ui).map(Some);
    }
    let Some(path) = &args.text else { return Ok(None) };
    let tokenizer = model::need_tokenizer(checkpoint)?;
    Ok(Some(tokenizer.encode_with(&input::text(path, ui)?, Specials::Parse, true)?))
}

/// `wanted` ids of the given or the built-in text, again and again where it is short.
fn prompt_ids(
    args: &BenchArgs,
    checkpoint: &Checkpoint,
    wanted: usize,
    ui: Ui,
) -> Result<Vec<u32>> {
    let tokenizer = model::tokenizer(checkpoint)?;
    let n_vocab = snowmelt_model::census(checkpoint, args.engine.model_options())?.n_vocab as u32;
    let text = match (given_ids(args, checkpoint, ui)?, tokenizer) {
        (Some(ids), _) => ids,
        (None, Some(tokenizer)) => tokenizer.encode_with(TEXT, Specials::Parse, true)?,
        // Scattered over the vocabulary.
        (None, None) => (1..=1024_u32).map(|i| i.wrapping_mul(2_654_435_761) % n_vocab).collect(),
    };
    ensure!(!text.is_empty(), "the text holds no tokens");
    Ok(text.iter().copied().cycle().take(wanted).collect())
}

/// What one repetition took.
struct Round {
    prompt_s: f64,
    /// Seconds of each token.
    token_s: Vec<f64>,
    prompt: Stats,
    decode: Stats,
    /// Bytes a second that memory gave just before.
    memory: Option<f64>,
}

impl Round {
    fn decode_s(&self) -> f64 {
        self.token_s.iter().sum()
    }
}

fn measure(args: &BenchArgs, name: &str, checkpoint: &Checkpoint, ui: Ui) -> Result<ExitCode> {
    let context_max = snowmelt_model::census(checkpoint, args.engine.model_options())?.context_max;
    let generate = args.generate as usize;
    let room = context_max.saturating_sub(generate).max(1);
    let prompt = args.prompt.map_or(room.min(512), |tokens| tokens as usize);
    let ids = prompt_ids(args, checkpoint, prompt, ui)?;
    let context = Some(prompt.saturating_add(generate));
    let mut engine = run::open_engine(&args.engine, checkpoint, context, ui)?;
    let tokens = prompt.saturating_add(generate);
    ensure_fits(&engine, tokens, "smaller `--prompt` and `--gen` fit")?;
    let session = engine.session()?;
    let bar = ui.bar(u64::from(args.repeat), "measuring", Unit::Things("repetitions"));
    let mut rounds = Vec::new();
    for _ in 0..args.repeat {
        let threads = engine.backend().threads();
        let memory = args.ceilings.is_some().then(|| memory_read_ceiling(threads, BESIDE_S));
        rounds.push(round(&mut engine, session, &ids, generate, memory)?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    let ceilings = match &args.ceilings {
        Some(path) => {
            let largest = checkpoint.files().iter().max_by_key(|file| file.len);
            let own = largest.filter(|file| file.memory.is_none()).map(|file| file.path.clone());
            Some(Ceilings::measure(args.engine.cpu.threads, path.clone().or(own).as_deref(), ui)?)
        }
        None => None,
    };
    let report = Report { name, engine: &engine, prompt, generate, rounds, ceilings };
    if args.json {
        output::json(&report.json())?;
    } else {
        output::data(&report.text())?;
    }
    Ok(ExitCode::SUCCESS)
}

fn round(
    engine: &mut Engine<Cpu>,
    session: SessionId,
    ids: &[u32],
    generate: usize,
    memory: Option<f64>,
) -> Result<Round> {
    engine.reset(session);
    let before = engine.stats();
    let start = Instant::now();
    engine.prefill(session, ids, &mut |_| true)?;
    let prompt_s = start.elapsed().as_secs_f64();
    let between = engine.stats();
    let mut token_s = Vec::with_capacity(generate);
    for _ in 0..generate {
        let start = Instant::now();
        let token = likeliest(engine.logits(session));
        engine.step_one(session, &[token], Outputs::Last, &mut |_, _| {})?;
        token_s.push(start.elapsed().as_secs_f64());
    }
    let (prompt, decode) = (since(&before, &between), since(&between, &engine.stats()));
    Ok(Round { prompt_s, token_s, prompt, decode, memory })
}

fn likeliest(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().max_by(|(_, a), (_, b)| a.total_cmp(b));
    best.map_or(0, |(id, _)| id as u32)
}

/// The value in the middle, or at another place of the order.
fn quantile(mut values: Vec<f64>, share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let at = (values.len().saturating_sub(1) as f64 * share).round() as usize;
    values.get(at).copied().unwrap_or(0.0)
}

/// Everything measured.
struct Report<'a> {
    name: &'a str,
    engine: &'a Engine<Cpu>,
    prompt: usize,
    generate: usize,
    rounds: Vec<Round>,
    ceilings: Option<Ceilings>,
}

impl Report<'_> {
    fn median(&self, of: impl Fn(&Round) -> f64) -> f64 {
        quantile(self.rounds.iter().map(of).collect(), 0.5)
    }

    fn prompt_rate(&self) -> f64 {
        self.median(|round| self.prompt as f64 / round.prompt_s)
    }

    fn decode_rate(&self) -> f64 {
        self.median(|round| self.generate as f64 / round.decode_s())
    }

    /// Milliseconds of a token.
    fn latency_ms(&self, share: f64) -> f64 {
        let all = self.rounds.iter().flat_map(|round| round.token_s.iter().copied());
        quantile(all.collect(), share) * 1e3
    }

    /// Bytes a second of weights that decoding touched, as a share of what memory gave.
    fn memory_share(&self) -> Option<f64> {
        let bytes = self.engine.census().bytes_per_token() as f64;
        let share = |round: &Round| {
            let rate = self.generate as f64 / round.decode_s();
            round.memory.map_or(0.0, |memory| rate * bytes / memory)
        };
        self.ceilings.as_ref().map(|_| self.median(share))
    }

    fn text(&self) -> String {
        let (engine, mut text) = (self.engine, String::new());
        let mut line = |what: &str, value: String| {
            let _ = writeln!(text, "{what:<16} {value}");
        };
        let rate = |rate: f64, n: usize| format!("{rate:.1} tokens/s ({})", counted(n, "token"));
        let backend = engine.backend();
        line("model", format!("{} ({})", self.name, engine.census().family));
        line("memory", residency_line(engine.plan()));
        let threads = counted(backend.threads(), "thread");
        let activations = backend.activations();
        let isa = backend.isa();
        line("processor", format!("{isa}, {threads}, activations {activations}"));
        line("prompt", rate(self.prompt_rate(), self.prompt));
        line("decode", rate(self.decode_rate(), self.generate));
        let (half, most, nearly) =
            (self.latency_ms(0.5), self.latency_ms(0.9), self.latency_ms(0.99));
        line("a token takes", format!("{half:.2} ms, 90 % {most:.2} ms, 99 % {nearly:.2} ms"));
        let weights = Bytes(engine.census().bytes_per_token() as u64);
        line("a token reads", format!("{weights} of weights from memory"));
        if let Some(source) = engine.source_name() {
            let each = self.median(|round| read_bytes(&round.decode) as f64) / self.generate as f64;
            let hits = self.median(|round| round.decode.hit_rate()) * 100.0;
            let speed = self.median(|round| read_bytes(&round.decode) as f64 / round.decode_s());
            let (each, speed) = (Bytes(each as u64), speed / 1e9);
            line("", format!("{each} from disk by {source}, {speed:.2} GB/s"));
            line("expert hits", format!("{hits:.1} % in decode"));
            let bytes = self.median(|round| read_bytes(&round.prompt) as f64);
            let speed = self.median(|round| read_bytes(&round.prompt) as f64 / round.prompt_s);
            let (bytes, speed) = (Bytes(bytes as u64), speed / 1e9);
            line("prompt reads", format!("{bytes} from disk, {speed:.2} GB/s"));
        }
        if let (Some(share), Some(ceilings)) = (self.memory_share(), &self.ceilings) {
            let share = share * 100.0;
            line("of the ceiling", format!("decode reads at {share:.0} % of what memory gives"));
            text.push_str(&ceilings.text());
        }
        text
    }

    fn json(&self) -> Value {
        let (engine, backend) = (self.engine, self.engine.backend());
        let rounds = self.rounds.iter().map(|round| {
            json!({
                "prompt_tokens_per_s": self.prompt as f64 / round.prompt_s,
                "decode_tokens_per_s": self.generate as f64 / round.decode_s(),
                "prompt_stats": stats_json(&round.prompt),
                "decode_stats": stats_json(&round.decode),
                "memory_bytes_per_s": round.memory,
            })
        });
        json!({
            "model": self.name,
            "family": engine.census().family,
            "residency": engine.plan().residency.name(),
            "slots": engine.plan().slots,
            "n_experts": engine.plan().n_experts,
            "source": engine.source_name(),
            "isa": backend.isa().name(),
            "threads": backend.threads(),
            "activations": backend.activations().name(),
            "prompt_tokens": self.prompt,
            "generated_tokens": self.generate,
            "prompt_tokens_per_s": self.prompt_rate(),
            "decode_tokens_per_s": self.decode_rate(),
            "token_ms_p50": self.latency_ms(0.5),
            "token_ms_p90": self.latency_ms(0.9),
            "token_ms_p99": self.latency_ms(0.99),
            "weight_bytes_per_token": engine.census().bytes_per_token(),
            "disk_bytes_per_token":
                self.median(|round| read_bytes(&round.decode) as f64) / self.generate as f64,
            "hit_rate": self.median(|round| round.decode.hit_rate()),
            "share_of_memory_ceiling": self.memory_share(),
            "ceilings": self.ceilings.as_ref().map(Ceilings::json),
            "rounds": rounds.collect::<Vec<_>>(),
        })
    }
}

/// What the machine gives at best, in bytes a second.
struct Ceilings {
    threads: usize,
    memory_one: f64,
    memory_all: f64,
    disk: Option<Disk>,
}

impl Ceilings {
    fn measure(threads: Option<u32>, path: Option<&Path>, ui: Ui) -> Result<Self> {
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        let threads = threads.map_or_else(cores, |threads| threads as usize);
        let memory_one = memory_read_ceiling(1, CEILING_S);
        let memory_all = memory_read_ceiling(threads, CEILING_S);
        let disk = path.map(|path| ceilings::disk(path, ui)).transpose()?;
        Ok(Self { threads, memory_one, memory_all, disk })
    }

    fn text(&self) -> String {
        let mut text = String::new();
        let mut line = |what: &str, bytes: f64, how: &str| {
            let _ = writeln!(text, "{what:<16} {:.2} GB/s {how}", bytes / 1e9);
        };
        line("memory", self.memory_one, "with one thread");
        line("", self.memory_all, &format!("with {}", counted(self.threads, "thread")));
        let Some(disk) = &self.disk else { return text };
        for (index, (block, speed)) in disk.speeds.iter().enumerate() {
            let what = if index == 0 { "disk" } else { "" };
            let how = format!("in random reads of {} by {}", Bytes(*block), disk.source);
            line(what, *speed, &how);
        }
        let path = disk.path.display();
        let from = if disk.is_temporary { "from a new file in" } else { "from" };
        let _ = writeln!(text, "{:<16} {from} {path}", "");
        if !disk.is_direct {
            let _ = writeln!(text, "{:<16} through the page cache: not the speed of a disk", "");
        }
        text
    }

    fn json(&self) -> Value {
        let disk = self.disk.as_ref().map(|disk| {
            let speed =
                |(block, speed): &(u64, f64)| json!({ "read_bytes": block, "bytes_per_s": speed });
            json!({
                "path": disk.path.display().to_string(),
                "source": disk.source,
                "direct": disk.is_direct,
                "reads": disk.speeds.iter().map(speed).collect::<Vec<_>>(),
            })
        });
        json!({
            "threads": self.threads,
            "memory_bytes_per_s_one_thread": self.memory_one,
            "memory_bytes_per_s": self.memory_all,
            "disk": disk,
        })
    }
}

/// Routes of one layer of a step.
type Seen = Arc<Mutex<Vec<(u32, Routes)>>>;

/// Reads a text in windows and writes which experts each token used.
fn record(args: &BenchArgs, checkpoint: &Checkpoint, path: &Path, ui: Ui) -> Result<ExitCode> {
    let Some(ids) = given_ids(args, checkpoint, ui)? else {
        return Err(usage("--record-routes needs --text or --ids"));
    };
    let mut engine = run::open_engine(&args.engine, checkpoint, Some(WINDOW), ui)?;
    ensure!(engine.plan().n_experts > 0, "this model has no routed experts");
    let could_not = || format!("could not write `{}`", path.display());
    let mut out = BufWriter::new(File::create(path).with_context(could_not)?);
    let seen = Seen::default();
    let sink = Arc::clone(&seen);
    engine.observe_routes(Some(RouteObserver(Box::new(move |layer, routes| {
        sink.lock().unwrap_or_else(PoisonError::into_inner).push((layer, routes.clone()));
    }))));
    let session = engine.session()?;
    let window = WINDOW.min(engine.plan().context_tokens);
    let bar = ui.bar(ids.len() as u64, "recording", Unit::Things("tokens"));
    for text in ids.chunks(window) {
        engine.reset(session);
        for chunk in text.chunks(engine.plan().rows) {
            engine.step_one(session, chunk, Outputs::None, &mut |_, _| {})?;
            let layers = std::mem::take(&mut *seen.lock().unwrap_or_else(PoisonError::into_inner));
            by_token(&layers, chunk.len()).write_text(&mut out).with_context(could_not)?;
            bar.inc(chunk.len() as u64);
        }
    }
    bar.finish_and_clear();
    out.flush().with_context(could_not)?;
    let tokens = counted(ids.len(), "token");
    ui.note(format_args!("wrote the routes of {tokens} to {}", path.display()));
    Ok(ExitCode::SUCCESS)
}

/// A step goes layer by layer, a trace token by token.
fn by_token(layers: &[(u32, Routes)], rows: usize) -> Trace {
    let mut trace = Trace::default();
    for row in 0..rows {
        for (layer, routes) in layers {
            trace.push(*layer, &routes.ids[row * routes.top_k..][..routes.top_k]);
        }
    }
    trace
}

#[cfg(test)]
mod tests {
    use super::{likeliest, quantile};

    #[test]
    fn quantiles_are_of_the_order() {
        assert_eq!(quantile(vec![3.0, 1.0, 2.0], 0.5), 2.0);
        assert_eq!(quantile(vec![3.0, 1.0, 2.0], 1.0), 3.0);
        assert_eq!(quantile(Vec::new(), 0.5), 0.0);
    }

    #[test]
    fn the_likeliest_token_is_found() {
        assert_eq!(likeliest(&[0.5, 2.0, -1.0]), 1);
    }
}
