//! What people and scripts see: data on stdout, everything else on stderr.

use crate::args::{ColorWhen, Globals};
use crate::terminal;
use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};
use std::fmt::{self, Display};
use std::io::{self, IsTerminal, Write};

/// Whoever read our stdout has gone; that is no failure worth a message.
#[derive(Debug)]
pub(crate) struct StdoutClosed;

impl Display for StdoutClosed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("nobody reads the output any more")
    }
}

impl std::error::Error for StdoutClosed {}

/// Writes to stdout, at once.
pub(crate) fn data(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => StdoutClosed.into(),
        _ => anyhow::Error::new(error).context("could not write to stdout"),
    })
}

/// Writes JSON to stdout, on lines of its own.
pub(crate) fn json(value: &serde_json::Value) -> Result<()> {
    data(&format!("{value:#}\n"))
}

/// A line on stderr, broken between words on a terminal. Unlike `eprintln`, it survives a stderr
/// that is gone.
pub(crate) fn say(text: impl Display) {
    let _ = writeln!(io::stderr(), "{}", wrapped(text, 2));
}

/// A name with its value in a column of its own.
pub(crate) fn say_field(name: &str, value: impl Display) {
    let _ = writeln!(io::stderr(), "{}", wrapped(format_args!("{name:<10} {value}"), 11));
}

fn wrapped(text: impl Display, indent: usize) -> String {
    let text = text.to_string();
    match terminal::width() {
        Some(width) => terminal::wrap(&text, width, indent),
        None => text,
    }
}

/// What progress counts.
#[derive(Clone, Copy)]
pub(crate) enum Unit {
    Bytes,
    Things(&'static str),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Loudness {
    Quiet,
    Normal,
    Verbose,
}

/// How the user wants to be talked to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ui {
    loudness: Loudness,
    color: bool,
    bars: bool,
}

const RED: &str = "\x1b[1;31m";
const YELLOW: &str = "\x1b[1;33m";
const DIM: &str = "\x1b[2m";
const RESET: &str = "\x1b[0m";

impl Ui {
    pub(crate) fn new(globals: Globals) -> Self {
        let is_terminal = io::stderr().is_terminal();
        let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let color = match globals.color {
            ColorWhen::Always => true,
            ColorWhen::Never => false,
            ColorWhen::Auto => {
                let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
                is_terminal && !is_set("NO_COLOR") && !dumb
            }
        };
        let bars = is_terminal && !globals.no_progress && !globals.quiet;
        let loudness = match (globals.quiet, globals.verbose) {
            (true, _) => Loudness::Quiet,
            (false, false) => Loudness::Normal,
            (false, true) => Loudness::Verbose,
        };
        Self { loudness, color, bars }
    }

    /// Whether more is to be said.
    pub(crate) fn is_verbose(self) -> bool {
        self.loudness == Loudness::Verbose
    }

    fn painted(self, color: &'static str) -> (&'static str, &'static str) {
        if self.color { (color, RESET) } else { ("", "") }
    }

    /// Something worth knowing.
    pub(crate) fn note(self, text: impl Display) {
        if self.loudness != Loudness::Quiet {
            let (on, off) = self.painted(DIM);
            let text = wrapped(text, 2);
            let _ = writeln!(io::stderr(), "{on}{text}{off}");
        }
    }

    /// Something that only `-v` shows.
    pub(crate) fn detail(self, text: impl Display) {
        if self.is_verbose() {
            self.note(text);
        }
    }

    /// Something that is probably not meant.
    pub(crate) fn warn(self, text: impl Display) {
        self.say_titled(YELLOW, "warning:", text);
    }

    /// Why the program ends, with causes, and what to do about it.
    pub(crate) fn error(self, error: &anyhow::Error) {
        self.say_titled(RED, "error:", chain(error));
    }

    /// Wrapped before it is painted: colours take no columns.
    fn say_titled(self, color: &'static str, title: &str, text: impl Display) {
        let (on, off) = self.painted(color);
        let text = wrapped(format_args!("{title} {text}"), 2);
        let text = text.strip_prefix(title).unwrap_or(&text);
        let _ = writeln!(io::stderr(), "{on}{title}{off}{text}");
    }

    /// A bar on stderr, hidden where it is not wanted.
    pub(crate) fn bar(self, total: u64, what: &'static str, unit: Unit) -> ProgressBar {
        if !self.bars {
            return ProgressBar::hidden();
        }
        let counts = match unit {
            Unit::Bytes => "{binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}".into(),
            Unit::Things(name) => format!("{{pos}} of {{len}} {name}"),
        };
        let template = format!("{{prefix}} [{{bar:30}}] {counts}, {{eta}} left");
        let style =
            ProgressStyle::with_template(&template).map(|style| style.progress_chars("=> "));
        let bar = ProgressBar::new(total).with_prefix(what);
        match style {
            Ok(style) => bar.with_style(style),
            Err(_) => bar,
        }
    }
}

/// Messages of an error and its causes, a line each; hints go to the end.
fn chain(error: &anyhow::Error) -> String {
    let (mut text, mut hints) = (String::new(), String::new());
    for cause in error.chain() {
        let message = cause.to_string();
        // Many messages name their cause themselves.
        if text.contains(message.as_str()) {
            continue;
        }
        if !text.is_empty() {
            text.push_str("\n  because ");
        }
        for (index, line) in message.lines().enumerate() {
            if line.starts_with("hint:") {
                hints.push('\n');
                hints.push_str(line);
                continue;
            }
            if index > 0 {
                text.push('\n');
            }
            text.push_str(line);
        }
    }
    text + &hints
}

#[cfg(test)]
mod tests {
    use super::chain;
    use anyhow::anyhow;

    #[test]
    fn causes_come_once_and_hints_last() {
        let error = anyhow!("no room").context("could not write\nhint: free some space");
        assert_eq!(chain(&error), "could not write\n  because no room\nhint: free some space");
        let error = anyhow!("no room").context("could not write: no room");
        assert_eq!(chain(&error), "could not write: no room");
    }
}
