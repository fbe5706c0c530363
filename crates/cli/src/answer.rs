//! One answer: prompt in, tokens and text out, with the numbers that go with it.

use crate::interrupt::Stoppable;
use crate::options::{Cpu, ensure_fits};
use crate::output::{Ui, Unit};
use crate::size::{Bytes, counted};
use anyhow::Result;
use serde_json::{Value, json};
use snowmelt_engine::{Engine, Finish, GenerateOptions, RowStats, Sampler, SessionId, Stats};
use snowmelt_text::{Detokenizer, StopStrings, Tokenizer};
use std::fmt::Write as _;
use std::ops::ControlFlow;
use std::time::Instant;

/// What to generate from and until when.
pub(crate) struct Ask<'a> {
    /// The whole conversation. What the session already has of it is not computed again.
    pub(crate) ids: &'a [u32],
    pub(crate) generate: &'a GenerateOptions,
    pub(crate) stop: &'a [String],
    pub(crate) tokenizer: Option<&'a Tokenizer>,
    /// What helps where it does not fit into the context.
    pub(crate) shorter: &'a str,
}

/// What came.
pub(crate) struct Answer {
    pub(crate) ids: Vec<u32>,
    pub(crate) text: String,
    /// Why it ended: `stop`, `length`, `context`, `interrupted`.
    pub(crate) finish: &'static str,
    pub(crate) seed: u64,
    pub(crate) numbers: Numbers,
}

/// Counts and seconds.
#[derive(Clone, Copy, Default)]
pub(crate) struct Numbers {
    /// Tokens of the conversation before the answer.
    pub(crate) prompt_tokens: usize,
    /// Those of them that were computed.
    pub(crate) fed_tokens: usize,
    pub(crate) prompt_s: f64,
    pub(crate) generated_tokens: usize,
    /// Steps after the prompt: one less than tokens where the last was not fed.
    pub(crate) steps: usize,
    pub(crate) generation_s: f64,
    /// What the expert store did meanwhile.
    pub(crate) store: Stats,
    /// What the cache of rows of tables did.
    pub(crate) rows: RowStats,
}

/// A piece of an answer, as soon as it is certain.
pub(crate) enum Piece<'a> {
    Text(&'a str),
    /// Where there is no tokenizer.
    Id(u32),
}

fn per_second(count: usize, seconds: f64) -> f64 {
    if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
}

impl Numbers {
    pub(crate) fn prompt_rate(&self) -> f64 {
        per_second(self.fed_tokens, self.prompt_s)
    }

    pub(crate) fn generation_rate(&self) -> f64 {
        per_second(self.steps, self.generation_s)
    }

    /// One line for people.
    pub(crate) fn line(&self, streams: bool) -> String {
        let mut line = format!(
            "prompt {}, {:.1} tokens/s; answer {}, {:.1} tokens/s",
            counted(self.fed_tokens, "token"),
            self.prompt_rate(),
            counted(self.generated_tokens, "token"),
            self.generation_rate()
        );
        if streams {
            let (hits, bytes) = (self.store.hit_rate() * 100.0, read_bytes(&self.store));
            let _ = write!(line, "; {hits:.1} % expert hits, {} read", Bytes(bytes));
        }
        if self.rows.asked > 0 {
            let (rows, each) = (self.rows.reads, Bytes(self.row_bytes_per_token()));
            let _ = write!(line, "; {rows} table rows read, {each} a token");
        }
        line
    }

    /// Bytes that rows of tables took from disk, for each token computed.
    fn row_bytes_per_token(&self) -> u64 {
        self.rows.bytes / (self.fed_tokens + self.steps).max(1) as u64
    }

    /// Counters of the cache of rows, for scripts.
    pub(crate) fn rows_json(&self) -> Value {
        json!({
            "asked": self.rows.asked,
            "hits": self.rows.hits,
            "reads": self.rows.reads,
            "bytes_read": self.rows.bytes,
            "bytes_per_token": self.row_bytes_per_token(),
            "wait_s": self.rows.wait_ns as f64 / 1e9,
        })
    }

    pub(crate) fn json(&self) -> Value {
        json!({
            "prompt_s": self.prompt_s,
            "prompt_tokens_per_s": self.prompt_rate(),
            "generation_s": self.generation_s,
            "generation_tokens_per_s": self.generation_rate(),
        })
    }
}

/// All bytes that the store read.
pub(crate) fn read_bytes(stats: &Stats) -> u64 {
    stats.demand_bytes + stats.idle_bytes
}

/// What happened between two looks at the counters.
pub(crate) fn since(before: &Stats, after: &Stats) -> Stats {
    Stats {
        hits: after.hits - before.hits,
        misses: after.misses - before.misses,
        joins: after.joins - before.joins,
        adopted: after.adopted - before.adopted,
        idle_hits: after.idle_hits - before.idle_hits,
        wasted: after.wasted - before.wasted,
        idle_records: after.idle_records - before.idle_records,
        evictions: after.evictions - before.evictions,
        waits: after.waits - before.waits,
        demand_bytes: after.demand_bytes - before.demand_bytes,
        idle_bytes: after.idle_bytes - before.idle_bytes,
        reads: after.reads - before.reads,
        read_ns: after.read_ns - before.read_ns,
        wait_ns: after.wait_ns - before.wait_ns,
        failures: after.failures - before.failures,
    }
}

/// The same of the cache of rows.
fn rows_since(before: &RowStats, after: &RowStats) -> RowStats {
    RowStats {
        asked: after.asked - before.asked,
        hits: after.hits - before.hits,
        reads: after.reads - before.reads,
        bytes: after.bytes - before.bytes,
        wait_ns: after.wait_ns - before.wait_ns,
        failures: after.failures - before.failures,
    }
}

/// Counters of the store, for scripts.
pub(crate) fn stats_json(stats: &Stats) -> Value {
    json!({
        "hit_rate": stats.hit_rate(),
        "hits": stats.hits,
        "misses": stats.misses,
        "reads": stats.reads,
        "bytes_read": read_bytes(stats),
        "evictions": stats.evictions,
        "wait_s": stats.wait_ns as f64 / 1e9,
    })
}

/// Text of the tokens so far, cut at stop strings.
struct Streamed<'a> {
    detokenizer: Option<Detokenizer>,
    stop: StopStrings,
    stopped: bool,
    text: String,
    show: &'a mut dyn FnMut(Piece<'_>) -> Result<()>,
}

impl Streamed<'_> {
    /// Takes a token; whether to go on.
    fn push(&mut self, id: u32) -> Result<bool> {
        let Some(detokenizer) = &mut self.detokenizer else {
            (self.show)(Piece::Id(id))?;
            return Ok(true);
        };
        let text = detokenizer.push(id);
        let outcome = self.stop.push(&text);
        self.stopped |= outcome.stopped.is_some();
        self.emit(&outcome.emit)?;
        Ok(!self.stopped)
    }

    fn emit(&mut self, text: &str) -> Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        self.text.push_str(text);
        (self.show)(Piece::Text(text))
    }

    /// What was held back.
    fn finish(&mut self) -> Result<()> {
        if let Some(detokenizer) = &mut self.detokenizer {
            let rest = detokenizer.finish();
            let outcome = self.stop.push(&rest);
            self.emit(&outcome.emit)?;
            self.stopped |= outcome.stopped.is_some();
        }
        if !self.stopped {
            let outcome = self.stop.finish();
            self.stopped |= outcome.stopped.is_some();
            self.emit(&outcome.emit)?;
        }
        Ok(())
    }
}

/// Brings the session to `ask.ids` and generates. Ctrl-C ends it early.
pub(crate) fn answer(
    engine: &mut Engine<Cpu>,
    session: SessionId,
    sampler: &mut Sampler,
    ask: &Ask<'_>,
    ui: Ui,
    show: &mut dyn FnMut(Piece<'_>) -> Result<()>,
) -> Result<Answer> {
    let stoppable = Stoppable::begin();
    let stop = StopStrings::new(ask.stop.to_vec())?;
    let (before, rows_before) = (engine.stats(), engine.row_stats());
    let mut numbers = Numbers { prompt_tokens: ask.ids.len(), ..Numbers::default() };
    ensure_fits(engine, ask.ids.len(), ask.shorter)?;
    let is_whole = prefill(engine, session, ask.ids, (&stoppable, ui), &mut numbers)?;
    let mut ids = Vec::new();
    let detokenizer = ask.tokenizer.map(|tokenizer| Detokenizer::new(tokenizer, true));
    let mut streamed = Streamed { detokenizer, stop, stopped: false, text: String::new(), show };
    let mut finish = Finish::Broken;
    if is_whole {
        sampler.accept_prompt(ask.ids);
        let fed = engine.tokens(session).len();
        let start = Instant::now();
        let mut shown = Ok(());
        finish = engine.generate(session, sampler, ask.generate, &mut |id| {
            ids.push(id);
            match streamed.push(id) {
                Ok(true) if !stoppable.is_asked() => ControlFlow::Continue(()),
                Ok(_) => ControlFlow::Break(()),
                Err(error) => {
                    shown = Err(error);
                    ControlFlow::Break(())
                }
            }
        })?;
        numbers.generation_s = start.elapsed().as_secs_f64();
        numbers.steps = engine.tokens(session).len().saturating_sub(fed);
        shown?;
        streamed.finish()?;
    }
    numbers.generated_tokens = ids.len();
    numbers.store = since(&before, &engine.stats());
    numbers.rows = rows_since(&rows_before, &engine.row_stats());
    let finish = match finish {
        Finish::Broken if streamed.stopped => "stop",
        finish => finish.name(),
    };
    Ok(Answer { ids, text: streamed.text, finish, seed: sampler.seed(), numbers })
}

/// Feeds what the session lacks. False where Ctrl-C came between.
fn prefill(
    engine: &mut Engine<Cpu>,
    session: SessionId,
    ids: &[u32],
    (stoppable, ui): (&Stoppable, Ui),
    numbers: &mut Numbers,
) -> Result<bool> {
    let start = Instant::now();
    let known = engine.tokens(session);
    let known = match ids.strip_prefix(known) {
        // The logits of the last token are needed, and only a step gives them.
        Some(rest) if !rest.is_empty() => known.len(),
        _ => 0,
    };
    if known == 0 {
        engine.reset(session);
    }
    let rest = &ids[known..];
    numbers.fed_tokens = rest.len();
    let is_long = rest.len() > engine.plan().rows;
    let hidden = indicatif::ProgressBar::hidden();
    let bar = if is_long {
        ui.bar(rest.len() as u64, "reading the prompt", Unit::Things("tokens"))
    } else {
        hidden
    };
    let mut is_asked = false;
    let done = engine.prefill(session, rest, &mut |done| {
        bar.set_position(done as u64);
        is_asked = stoppable.is_asked();
        !is_asked
    });
    bar.finish_and_clear();
    done?;
    numbers.prompt_s = start.elapsed().as_secs_f64();
    Ok(!is_asked)
}
