//! Stop strings over a stream of text.

use crate::error::TextError;

/// Cuts a stream of text at the first stop string.
///
/// The earliest match wins; of several that begin there, the first in the list. Text that may be
/// the beginning of a stop string is held back until that is settled, so what was emitted never
/// has to be taken back, and how the stream was cut into pieces does not matter.
#[derive(Debug, Clone)]
pub struct StopStrings {
    stops: Vec<String>,
    held: String,
    stopped: Option<usize>,
}

/// What one piece of text brought.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StopOutcome {
    /// Text to pass on; never part of a stop string.
    pub emit: String,
    /// Index of the stop string that ended the stream.
    pub stopped: Option<usize>,
}

impl StopStrings {
    /// Watches for these strings; an empty list passes everything.
    ///
    /// # Errors
    ///
    /// One of them is empty.
    pub fn new(stops: Vec<String>) -> Result<Self, TextError> {
        if let Some(index) = stops.iter().position(String::is_empty) {
            return Err(TextError::StopEmpty { index, count: stops.len() });
        }
        Ok(Self { stops, held: String::new(), stopped: None })
    }

    /// Takes the next piece of text. After a stop nothing is emitted any more.
    #[must_use = "the emitted text is not repeated"]
    pub fn push(&mut self, text: &str) -> StopOutcome {
        if self.stopped.is_some() {
            return self.outcome(String::new());
        }
        self.held.push_str(text);
        self.settle(false)
    }

    /// Ends the stream: what was held back is no stop string and is emitted, unless a shorter stop
    /// string in it counts after all.
    #[must_use = "the emitted text is not repeated"]
    pub fn finish(&mut self) -> StopOutcome {
        self.settle(true)
    }

    fn outcome(&self, emit: String) -> StopOutcome {
        StopOutcome { emit, stopped: self.stopped }
    }

    /// Emits the held text up to the first place where a stop string is or may still come.
    fn settle(&mut self, at_end: bool) -> StopOutcome {
        for (at, _) in self.held.char_indices() {
            let rest = &self.held[at..];
            let found = (self.stops.iter()).position(|stop| {
                rest.starts_with(stop.as_str()) || !at_end && stop.starts_with(rest)
            });
            let Some(index) = found else { continue };
            let rest = self.held.split_off(at);
            let emit = std::mem::replace(&mut self.held, rest);
            if self.held.starts_with(&self.stops[index]) {
                self.stopped = Some(index);
                self.held.clear();
            }
            return self.outcome(emit);
        }
        let emit = std::mem::take(&mut self.held);
        self.outcome(emit)
    }
}
