//! The conversation of `snowmelt run MODEL` on a terminal.

use crate::answer::{Ask, Numbers, Piece, answer, read_bytes};
use crate::interrupt;
use crate::model;
use crate::options::{Cpu, residency_line};
use crate::output::{self, Ui, say, say_field};
use crate::run::{Ready, RunArgs, encode_chat, open_engine};
use crate::sampling::SamplingArgs;
use crate::size::Bytes;
use crate::terminal::Silent;
use anyhow::Result;
use clap::Parser;
use clap::error::ErrorKind;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use snowmelt_engine::{Engine, Sampler, SamplerOptions, SessionId};
use snowmelt_text::{Message, Specials, Tokenizer};
use std::path::PathBuf;
use std::process::ExitCode;

const HELP: &str = "\
/help              this text
/clear             forget the conversation
/set NAME VALUE    change a setting: system, temp, top-k, top-p, min-p,
                   repeat-penalty, presence-penalty, frequency-penalty, seed,
                   stop, max-tokens
/unset NAME        leave a setting to the model again
/show              the model, its memory and the settings
/stats             numbers of the last answer and since the start
/bye               leave (or Ctrl-D)
\"\"\"                begins and ends a message of several lines
Ctrl-C stops an answer; pressed again it leaves.";

/// What a line asks for.
enum Next {
    Say(String),
    Command(String),
    Leave(u8),
}

/// Settings that `/set` changes, parsed as flags are.
#[derive(Clone, Debug, Parser)]
#[command(no_binary_name = true, disable_help_flag = true)]
struct Settings {
    #[command(flatten)]
    sampling: SamplingArgs,
}

struct Chat {
    ready: Ready,
    tokenizer: Tokenizer,
    engine: Engine<Cpu>,
    session: SessionId,
    system: Option<String>,
    settings: Settings,
    /// Turns so far, without the system message.
    messages: Vec<Message>,
    last: Option<Numbers>,
    ui: Ui,
}

pub(crate) fn chat(ready: Ready, args: RunArgs, ui: Ui) -> Result<ExitCode> {
    let tokenizer = match &ready.tokenizer {
        Some(tokenizer) => tokenizer.clone(),
        None => model::need_tokenizer(&ready.checkpoint)?,
    };
    let mut engine = open_engine(&args.engine, &ready.checkpoint, None, ui)?;
    let n_vocab = engine.census().n_vocab;
    args.sampling.options(ready.generation_config.as_ref(), n_vocab)?;
    let session = engine.session()?;
    if ready.template.is_none() {
        ui.note("this model has no chat template: it continues what you write");
    }
    ui.note("/help lists commands, Ctrl-D leaves");
    let mut chat = Chat {
        ready,
        tokenizer,
        engine,
        session,
        system: args.system,
        settings: Settings { sampling: args.sampling },
        messages: Vec::new(),
        last: None,
        ui,
    };
    let mut lines = Lines::new(ui)?;
    loop {
        match lines.next()? {
            Next::Leave(code) => return Ok(ExitCode::from(code)),
            Next::Command(line) => {
                if chat.command(&line).is_break() {
                    return Ok(ExitCode::SUCCESS);
                }
            }
            Next::Say(text) => match chat.turn(text) {
                Err(error) if error.downcast_ref::<output::StdoutClosed>().is_some() => {
                    return Err(error);
                }
                Err(error) => ui.error(&error),
                Ok(()) => {}
            },
        }
    }
}

impl Chat {
    /// One message and its answer.
    fn turn(&mut self, text: String) -> Result<()> {
        self.messages.push(Message::new("user", text));
        let answered = self.answer();
        if answered.is_err() {
            // The message was not answered; it can be sent again.
            self.messages.pop();
        }
        answered
    }

    fn answer(&mut self) -> Result<()> {
        let ids = self.prompt_ids()?;
        let n_vocab = self.engine.census().n_vocab;
        let sampling = &self.settings.sampling;
        let options = sampling.options(self.ready.generation_config.as_ref(), n_vocab)?;
        let mut sampler = Sampler::new(options, n_vocab)?;
        let mut generate = self.ready.generate.clone();
        generate.tokens_max = sampling.max_tokens;
        let ask = Ask {
            ids: &ids,
            generate: &generate,
            stop: &sampling.stop,
            tokenizer: Some(&self.tokenizer),
            shorter: "`/clear` begins anew",
        };
        let mut show = |piece: Piece<'_>| match piece {
            Piece::Text(text) => output::data(text),
            Piece::Id(_) => Ok(()),
        };
        let (engine, session) = (&mut self.engine, self.session);
        let silent = Silent::begin();
        let done = answer(engine, session, &mut sampler, &ask, self.ui, &mut show);
        drop(silent);
        output::data("\n")?;
        let done = done?;
        match done.finish {
            "context" => self.ui.note("the context is full; /clear begins anew"),
            "interrupted" => self.ui.note("(stopped)"),
            _ => {}
        }
        self.ui.note(done.numbers.line(self.engine.source_name().is_some()));
        self.messages.push(Message::new("assistant", done.text));
        self.last = Some(done.numbers);
        Ok(())
    }

    /// The whole conversation; the engine computes what it does not have yet.
    fn prompt_ids(&self) -> Result<Vec<u32>> {
        let Some(template) = &self.ready.template else {
            let texts = self.messages.iter().filter_map(|message| message.content.as_ref());
            let text: String = texts.filter_map(|content| content.as_str()).collect();
            return Ok(self.tokenizer.encode_with(&text, Specials::Parse, true)?);
        };
        let system = self.system.as_deref().map(|text| Message::new("system", text));
        let messages: Vec<Message> = system.into_iter().chain(self.messages.clone()).collect();
        encode_chat(&self.tokenizer, template, &messages)
    }

    fn command(&mut self, line: &str) -> std::ops::ControlFlow<()> {
        let line = line.trim();
        let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        match (name, rest.trim()) {
            ("/set", rest) => self.set(rest),
            ("/unset", name) => self.unset(name),
            ("/bye" | "/exit" | "/quit", "") => return std::ops::ControlFlow::Break(()),
            ("/help" | "/?", "") => say(HELP),
            ("/clear", "") => {
                self.messages.clear();
                self.engine.reset(self.session);
                say("the conversation is forgotten");
            }
            ("/show", "") => self.show(),
            ("/stats", "") => self.stats(),
            ("/bye" | "/exit" | "/quit" | "/help" | "/?" | "/clear" | "/show" | "/stats", more) => {
                say(format_args!("`{name}` takes no `{more}`; nothing was done"));
            }
            _ => say(format_args!("there is no command `{name}`; /help lists them")),
        }
        std::ops::ControlFlow::Continue(())
    }

    fn set(&mut self, rest: &str) {
        let Some((name, value)) = rest.split_once(char::is_whitespace) else {
            say("/set NAME VALUE; /help lists the names");
            return;
        };
        let (name, value) = (name.trim_start_matches('-'), value.trim());
        if name == "system" {
            self.system = Some(value.to_owned());
            say(format_args!("system = {value}"));
            return;
        }
        let mut settings = self.settings.clone();
        if let Err(error) = settings.try_update_from([format!("--{name}={value}")]) {
            let text = error.to_string();
            match error.kind() {
                ErrorKind::UnknownArgument => {
                    say(format_args!("there is no setting `{name}`; /help lists them"));
                }
                _ => say(text.lines().next().unwrap_or_default().trim_start_matches("error: ")),
            }
            return;
        }
        let n_vocab = self.engine.census().n_vocab;
        match settings.sampling.options(self.ready.generation_config.as_ref(), n_vocab) {
            Ok(_) => {
                self.settings = settings;
                say(format_args!("{name} = {value}"));
            }
            Err(error) => say(error),
        }
    }

    fn unset(&mut self, name: &str) {
        let name = name.trim_start_matches('-');
        match name {
            "" => say("/unset NAME; /help lists the names"),
            "system" => {
                self.system = None;
                say("there is no system message");
            }
            name if self.settings.sampling.unset(name) => {
                say(format_args!("{name} is left to the model"));
            }
            name => say(format_args!("there is no setting `{name}`; /help lists them")),
        }
    }

    fn show(&self) {
        let (census, plan) = (self.engine.census(), self.engine.plan());
        let origin = self.ready.checkpoint.origin();
        say_field("model", format_args!("{origin} ({})", census.family));
        say_field("memory", residency_line(plan));
        let used = self.engine.tokens(self.session).len();
        say_field("context", format_args!("{used} of {} tokens", plan.context_tokens));
        let sampling = &self.settings.sampling;
        let config = self.ready.generation_config.as_ref();
        if let Ok(options) = sampling.options(config, census.n_vocab) {
            say_field("sampling", describe(&options));
            let seed = options.seed.map_or_else(|| "new for each answer".into(), |n| n.to_string());
            say_field("seed", seed);
        }
        let most = sampling.max_tokens;
        let most = most.map_or_else(|| "until the model ends".into(), |most| most.to_string());
        say_field("max-tokens", most);
        let stops: Vec<String> = sampling.stop.iter().map(|stop| format!("{stop:?}")).collect();
        say_field("stop", if stops.is_empty() { "none".into() } else { stops.join(", ") });
        say_field("system", self.system.as_deref().unwrap_or("none"));
    }

    fn stats(&self) {
        let streams = self.engine.source_name();
        match &self.last {
            Some(last) => say(format_args!("last answer: {}", last.line(streams.is_some()))),
            None => say("no answer yet"),
        }
        if let Some(source) = streams {
            let stats = self.engine.stats();
            say(format_args!(
                "since the start: {:.1} % expert hits, {} read by {source}, {:.1} s waited",
                stats.hit_rate() * 100.0,
                Bytes(read_bytes(&stats)),
                stats.wait_ns as f64 / 1e9
            ));
        }
    }
}

fn describe(options: &SamplerOptions) -> String {
    format!(
        "temp {}, top-k {}, top-p {}, min-p {}, repeat-penalty {}, presence-penalty {}, \
         frequency-penalty {}",
        options.temperature,
        options.top_k,
        options.top_p,
        options.min_p,
        options.repetition_penalty,
        options.presence_penalty,
        options.frequency_penalty
    )
}

/// Lines of the terminal, with history.
struct Lines {
    editor: DefaultEditor,
    history: Option<PathBuf>,
    /// Whether the last line was given up with Ctrl-C.
    given_up: bool,
    ui: Ui,
}

impl Lines {
    fn new(ui: Ui) -> Result<Self> {
        let mut editor = DefaultEditor::new()?;
        let history = model::state_folder().ok().and_then(|folder| {
            std::fs::create_dir_all(&folder).ok()?;
            Some(folder.join("history"))
        });
        if let Some(path) = &history {
            // The first time there is none.
            let _ = editor.load_history(path);
        }
        Ok(Self { editor, history, given_up: false, ui })
    }

    fn next(&mut self) -> Result<Next> {
        loop {
            let line = match self.editor.readline(">>> ") {
                Ok(line) => line,
                Err(ReadlineError::Eof) => return Ok(Next::Leave(0)),
                Err(ReadlineError::Interrupted) if self.given_up => {
                    return Ok(Next::Leave(interrupt::EXIT));
                }
                Err(ReadlineError::Interrupted) => {
                    self.given_up = true;
                    self.ui.note("Ctrl-C again, Ctrl-D or /bye leaves");
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            self.given_up = false;
            let text = match line.trim().strip_prefix("\"\"\"") {
                Some(first) => match self.several(first) {
                    Ok(text) => text,
                    Err(ReadlineError::Interrupted) => continue,
                    Err(ReadlineError::Eof) => return Ok(Next::Leave(0)),
                    Err(error) => return Err(error.into()),
                },
                None => line,
            };
            if text.trim().is_empty() {
                continue;
            }
            self.remember(&text);
            let is_command = text.starts_with('/');
            return Ok(if is_command { Next::Command(text) } else { Next::Say(text) });
        }
    }

    /// A message up to the closing quotes.
    fn several(&mut self, first: &str) -> Result<String, ReadlineError> {
        let mut text = String::new();
        let mut line = first.to_owned();
        loop {
            if let Some(last) = line.trim_end().strip_suffix("\"\"\"") {
                text.push_str(last);
                return Ok(text.trim_matches('\n').to_owned());
            }
            text.push_str(&line);
            text.push('\n');
            line = self.editor.readline("... ")?;
        }
    }

    fn remember(&mut self, text: &str) {
        // A history that cannot be kept is no reason to stop talking.
        let _ = self.editor.add_history_entry(text);
        if let Some(path) = &self.history {
            let _ = self.editor.save_history(path);
        }
    }
}
