//! The `decoder` of a `tokenizer.json`, run token by token.
//!
//! The library decodes a whole list of tokens at once. Here every step of the chain keeps just
//! what later tokens can still change, so that each token costs only its own length:
//!
//! ```text
//! token ── token steps (Replace, ByteFallback, Metaspace, …) ── fuse ── stream steps ──► text
//! ```
//!
//! Up to the fuse (`Fuse`, `ByteLevel`) a step sees single tokens, after it one long text. Chains
//! that cannot be run this way (`CTC`, a regular expression over the fused text) are decoded whole
//! at the end: later than wished, never wrong.

use tokenizers::{Decoder as _, DecoderWrapper};

use crate::model::guarded;

/// The chain as the file describes it.
#[derive(Debug)]
pub(crate) struct Chain {
    token_steps: Vec<TokenStep>,
    bytes: bool,
    stream_steps: Vec<StreamStep>,
    whole: Option<DecoderWrapper>,
}

#[derive(Debug)]
enum TokenStep {
    Replace { from: String, to: String },
    Library(Box<DecoderWrapper>),
    Strip { c: char, start: usize, stop: usize },
    ByteFallback,
    Metaspace { c: char, drop_first: bool },
    WordPiece { prefix: String, cleanup: Option<Box<DecoderWrapper>> },
    WordEnd { suffix: String },
    Separator,
}

#[derive(Debug)]
enum StreamStep {
    Replace { from: String, to: String },
    StripStart { c: char, count: usize },
    StripEnd { c: char, count: usize },
}

/// What a running chain holds back.
#[derive(Debug, Clone)]
pub(crate) struct ChainState {
    tokens: Vec<TokenHold>,
    bytes: Vec<u8>,
    streams: Vec<StreamHold>,
    whole: Vec<String>,
}

#[derive(Debug, Clone, Default)]
struct TokenHold {
    /// Whether a token came by.
    started: bool,
    bytes: Vec<u8>,
    token: Option<String>,
}

#[derive(Debug, Clone, Default)]
struct StreamHold {
    text: String,
    /// Characters stripped so far; `None` once something else came.
    stripped: Option<usize>,
}

impl Chain {
    pub(crate) fn new(decoder: Option<&DecoderWrapper>) -> Result<Self, String> {
        let mut chain =
            Self { token_steps: Vec::new(), bytes: false, stream_steps: Vec::new(), whole: None };
        let Some(decoder) = decoder else {
            chain.token_steps.push(TokenStep::Separator);
            return Ok(chain);
        };
        let mut steps = Vec::new();
        flatten(decoder, &mut steps);
        let mut fused = false;
        for step in steps {
            let known = if fused {
                chain.add_stream_step(step)?
            } else {
                fused = matches!(step, DecoderWrapper::Fuse(_) | DecoderWrapper::ByteLevel(_));
                chain.bytes |= matches!(step, DecoderWrapper::ByteLevel(_));
                fused || chain.add_token_step(step)?
            };
            if !known {
                chain.whole = Some(decoder.clone());
                break;
            }
        }
        Ok(chain)
    }

    /// Appends a step before the fuse; false when it cannot run token by token.
    fn add_token_step(&mut self, step: &DecoderWrapper) -> Result<bool, String> {
        self.token_steps.push(match step {
            DecoderWrapper::Replace(_) => match replacement(step)? {
                Some((from, to)) => TokenStep::Replace { from, to },
                None => TokenStep::Library(Box::new(step.clone())),
            },
            DecoderWrapper::Strip(strip) => {
                TokenStep::Strip { c: strip.content, start: strip.start, stop: strip.stop }
            }
            DecoderWrapper::ByteFallback(_) => TokenStep::ByteFallback,
            DecoderWrapper::Metaspace(metaspace) => TokenStep::Metaspace {
                c: metaspace.get_replacement(),
                drop_first: drops_first(metaspace),
            },
            DecoderWrapper::WordPiece(piece) => TokenStep::WordPiece {
                prefix: piece.prefix.clone(),
                cleanup: piece.cleanup.then(|| Box::new(step.clone())),
            },
            DecoderWrapper::BPE(bpe) => TokenStep::WordEnd { suffix: bpe.suffix.clone() },
            _ => return Ok(false),
        });
        Ok(true)
    }

    /// Appends a step after the fuse; false when it cannot run on a stream.
    fn add_stream_step(&mut self, step: &DecoderWrapper) -> Result<bool, String> {
        match step {
            DecoderWrapper::Fuse(_) => {}
            DecoderWrapper::Replace(_) => match replacement(step)? {
                Some((from, to)) => self.stream_steps.push(StreamStep::Replace { from, to }),
                None => return Ok(false),
            },
            DecoderWrapper::Strip(strip) => {
                let c = strip.content;
                for (count, at_start) in [(strip.start, true), (strip.stop, false)] {
                    match (count, at_start) {
                        (0, _) => {}
                        (_, true) => self.stream_steps.push(StreamStep::StripStart { c, count }),
                        (_, false) => self.stream_steps.push(StreamStep::StripEnd { c, count }),
                    }
                }
            }
            DecoderWrapper::Metaspace(metaspace) => {
                let space = if drops_first(metaspace) { "" } else { " " };
                self.stream_steps.push(StreamStep::Replace {
                    from: metaspace.get_replacement().to_string(),
                    to: space.to_owned(),
                });
            }
            DecoderWrapper::BPE(bpe) if !bpe.suffix.is_empty() => {
                self.stream_steps
                    .push(StreamStep::Replace { from: bpe.suffix.clone(), to: String::new() });
            }
            DecoderWrapper::WordPiece(piece) if !piece.cleanup => {}
            _ => return Ok(false),
        }
        Ok(true)
    }

    pub(crate) fn start(&self) -> ChainState {
        ChainState {
            tokens: vec![TokenHold::default(); self.token_steps.len()],
            bytes: Vec::new(),
            streams: (self.stream_steps.iter())
                .map(|_| StreamHold { text: String::new(), stripped: Some(0) })
                .collect(),
            whole: Vec::new(),
        }
    }

    /// Takes the next token and appends the text that is now certain.
    pub(crate) fn push(&self, state: &mut ChainState, token: String, out: &mut String) {
        if self.whole.is_some() {
            state.whole.push(token);
        } else {
            self.feed(state, 0, token, out);
        }
    }

    /// Appends all that was held back.
    pub(crate) fn finish(&self, state: &mut ChainState, out: &mut String) {
        if let Some(decoder) = &self.whole {
            let tokens = std::mem::take(&mut state.whole);
            let joined = tokens.concat();
            out.push_str(&guarded(|| decoder.decode(tokens)).unwrap_or(joined));
            return;
        }
        for at in 0..self.token_steps.len() {
            let held = std::mem::take(&mut state.tokens[at]);
            for token in fallback_text(&held.bytes) {
                self.feed(state, at + 1, token, out);
            }
            if let (Some(token), TokenStep::WordEnd { suffix }) =
                (held.token, &self.token_steps[at])
            {
                self.feed(state, at + 1, token.replace(suffix, ""), out);
            }
        }
        if !state.bytes.is_empty() {
            state.bytes.clear();
            self.stream(state, 0, "\u{fffd}", out);
        }
        for at in 0..self.stream_steps.len() {
            let held = std::mem::take(&mut state.streams[at].text);
            // What a trailing strip still holds is what it strips.
            if !matches!(self.stream_steps[at], StreamStep::StripEnd { .. }) {
                self.stream(state, at + 1, &held, out);
            }
        }
    }

    /// Runs a token through the token steps from `at` on.
    fn feed(&self, state: &mut ChainState, at: usize, token: String, out: &mut String) {
        let Some(step) = self.token_steps.get(at) else {
            self.fuse(state, &token, out);
            return;
        };
        let hold = &mut state.tokens[at];
        let first = !std::mem::replace(&mut hold.started, true);
        let token = match step {
            TokenStep::Replace { from, to } => token.replace(from.as_str(), to),
            TokenStep::Library(decoder) => run_on_token(decoder, token),
            TokenStep::Strip { c, start, stop } => strip_token(&token, *c, *start, *stop),
            TokenStep::ByteFallback => {
                if let Some(byte) = fallback_byte(&token) {
                    hold.bytes.push(byte);
                    return;
                }
                let bytes = std::mem::take(&mut hold.bytes);
                for text in fallback_text(&bytes) {
                    self.feed(state, at + 1, text, out);
                }
                token
            }
            TokenStep::Metaspace { c, drop_first } => {
                token.replace(*c, if first && *drop_first { "" } else { " " })
            }
            TokenStep::WordPiece { prefix, cleanup } => {
                let token = match token.strip_prefix(prefix.as_str()) {
                    _ if first => token,
                    Some(rest) => rest.to_owned(),
                    None => format!(" {token}"),
                };
                // As the first of a list a token gets only the clean-up.
                cleanup
                    .as_ref()
                    .map_or_else(|| token.clone(), |clean| run_on_token(clean, token.clone()))
            }
            TokenStep::WordEnd { suffix } => match hold.token.replace(token) {
                Some(previous) => previous.replace(suffix, " "),
                None => return,
            },
            TokenStep::Separator if first => token,
            TokenStep::Separator => format!(" {token}"),
        };
        self.feed(state, at + 1, token, out);
    }

    fn fuse(&self, state: &mut ChainState, token: &str, out: &mut String) {
        if !self.bytes {
            self.stream(state, 0, token, out);
            return;
        }
        let held = state.bytes.len();
        state.bytes.extend(token.chars().map_while(byte_of_char));
        if state.bytes.len() - held != token.chars().count() {
            // A token outside the byte alphabet stands for its own text.
            state.bytes.truncate(held);
            state.bytes.extend_from_slice(token.as_bytes());
        }
        let bytes = std::mem::take(&mut state.bytes);
        let (text, rest) = certain_text(&bytes);
        state.bytes = rest.to_vec();
        self.stream(state, 0, &text, out);
    }

    /// Runs fused text through the stream steps from `at` on.
    fn stream(&self, state: &mut ChainState, at: usize, text: &str, out: &mut String) {
        if text.is_empty() {
            return;
        }
        let Some(step) = self.stream_steps.get(at) else {
            out.push_str(text);
            return;
        };
        let hold = &mut state.streams[at];
        let certain = match step {
            StreamStep::Replace { from, to } => {
                hold.text.push_str(text);
                let mut certain = String::new();
                while let Some(found) = hold.text.find(from.as_str()) {
                    certain.push_str(&hold.text[..found]);
                    certain.push_str(to);
                    hold.text.drain(..found + from.len());
                }
                let keep = held_suffix(&hold.text, from);
                let cut = hold.text.len() - keep;
                certain.extend(hold.text.drain(..cut));
                certain
            }
            StreamStep::StripStart { c, count } => {
                let mut rest = text;
                while let Some(stripped) = hold.stripped.as_mut() {
                    match rest.strip_prefix(*c) {
                        Some(after) if *stripped < *count => {
                            *stripped += 1;
                            rest = after;
                        }
                        None if rest.is_empty() => break,
                        _ => hold.stripped = None,
                    }
                }
                rest.to_owned()
            }
            StreamStep::StripEnd { c, count } => {
                hold.text.push_str(text);
                let tail = (hold.text.chars().rev()).take(*count).take_while(|x| x == c).count();
                let cut = hold.text.len() - tail * c.len_utf8();
                hold.text.drain(..cut).collect()
            }
        };
        self.stream(state, at + 1, &certain, out);
    }
}

fn flatten<'a>(decoder: &'a DecoderWrapper, steps: &mut Vec<&'a DecoderWrapper>) {
    match decoder {
        DecoderWrapper::Sequence(sequence) => {
            for step in sequence.get_decoders() {
                flatten(step, steps);
            }
        }
        step => steps.push(step),
    }
}

fn drops_first(metaspace: &tokenizers::decoders::metaspace::Metaspace) -> bool {
    use tokenizers::decoders::metaspace::PrependScheme;
    metaspace.get_prepend_scheme() != PrependScheme::Never
}

/// The pattern and content of a `Replace`; `None` for a regular expression.
fn replacement(step: &DecoderWrapper) -> Result<Option<(String, String)>, String> {
    // The library keeps the pattern private but writes it out.
    let json = serde_json::to_value(step).map_err(|error| error.to_string())?;
    let pattern = json["pattern"]["String"].as_str();
    let content = json["content"].as_str();
    Ok(match (pattern, content) {
        (Some(from), Some(to)) if !from.is_empty() => Some((from.to_owned(), to.to_owned())),
        _ => None,
    })
}

/// Runs a library step on a token alone.
fn run_on_token(step: &DecoderWrapper, token: String) -> String {
    let kept = token.clone();
    guarded(|| step.decode_chain(vec![token])).map_or(kept, |tokens| tokens.concat())
}

fn strip_token(token: &str, c: char, start: usize, stop: usize) -> String {
    let mut rest = token;
    for _ in 0..start {
        match rest.strip_prefix(c) {
            Some(after) => rest = after,
            None => break,
        }
    }
    for _ in 0..stop {
        match rest.strip_suffix(c) {
            Some(before) => rest = before,
            None => break,
        }
    }
    rest.to_owned()
}

/// The byte that a `<0xE4>` token stands for.
fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}

/// The text of a run of byte tokens: valid as a whole, or one replacement character a byte.
fn fallback_text(bytes: &[u8]) -> Vec<String> {
    match std::str::from_utf8(bytes) {
        Ok("") => Vec::new(),
        Ok(text) => vec![text.to_owned()],
        Err(_) => vec!["\u{fffd}".to_owned(); bytes.len()],
    }
}

/// Splits bytes into text no later byte can change, faults replaced, and the rest.
fn certain_text(bytes: &[u8]) -> (String, &[u8]) {
    let mut text = String::new();
    let mut rest = bytes;
    loop {
        match std::str::from_utf8(rest) {
            Ok(valid) => {
                text.push_str(valid);
                return (text, &[]);
            }
            Err(error) => {
                let (valid, after) = rest.split_at(error.valid_up_to());
                text.push_str(&String::from_utf8_lossy(valid));
                let Some(fault) = error.error_len() else {
                    return (text, after);
                };
                text.push('\u{fffd}');
                rest = &after[fault..];
            }
        }
    }
}

/// Length of the longest end of `text` that begins `pattern` without completing it.
fn held_suffix(text: &str, pattern: &str) -> usize {
    (pattern.char_indices().map(|(at, _)| at).rev())
        .find(|&at| text.ends_with(&pattern[..at]))
        .unwrap_or(0)
}

/// The byte behind a character of the byte-level alphabet, which maps the bytes that are no
/// printable Latin-1 character to the code points from 256 on.
fn byte_of_char(c: char) -> Option<u8> {
    let code = c as u32;
    match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => Some(code as u8),
        // 0x00..=0x20, 0x7f..=0xa0, 0xad in this order
        0x100..=0x120 => Some((code - 0x100) as u8),
        0x121..=0x142 => Some((code - 0x121 + 0x7f) as u8),
        0x143 => Some(0xad),
        _ => None,
    }
}
