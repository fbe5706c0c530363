//! A conversation straight to token ids, with no way for its texts to forge control tokens.
//!
//! Before rendering, every control token in a caller's string is wrapped in two private-use
//! characters that occur nowhere in the input. After rendering they tell what came from the caller;
//! they are removed, and what they wrapped stays text. A lone mark (a template that splits strings
//! can separate them) still means that no control token reaches across it.

use std::collections::HashSet;
use std::ops::Range;

use serde_json::{Map, Value as Json};

use crate::added::{AddedTokens, escapes, unused_chars};
use crate::error::TextError;
use crate::template::{ChatTemplate, Message, RenderOptions, message_json};
use crate::tokenizer::Tokenizer;

/// A rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatPrompt {
    /// The prompt as text.
    pub text: String,
    /// The prompt as token ids. Encoding `text` again gives the same ids only when no message
    /// contains a control token's text.
    pub ids: Vec<u32>,
}

/// The two marks around a control token in a caller's string.
#[derive(Debug, Clone, Copy)]
struct Marks {
    open: char,
    close: char,
}

/// How far a caller's string is trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trust {
    /// The operator's or the model's own words: only special tokens stay text. A model's earlier
    /// `<think>` or `<tool_call>` must come back as the token it was.
    Model,
    /// Words from outside: also the tokens that the template writes itself stay text.
    None,
}

struct Marker<'a> {
    added: &'a AddedTokens,
    /// Tokens that the template writes itself, special or not.
    of_template: HashSet<usize>,
    marks: Marks,
}

impl Tokenizer {
    /// Renders a conversation and encodes it.
    ///
    /// Control tokens of the template become their ids; the same text inside messages, tools,
    /// documents or other arguments stays ordinary text. Control tokens are all special tokens,
    /// and, for roles other than `system`, `developer` and `assistant`, also the added tokens
    /// that the template writes itself (`<tool_response>`). When no argument contains such text,
    /// the ids are those of the whole prompt encoded at once.
    ///
    /// Role names count as arguments too, but a template that builds a token around one
    /// (`'<|' + role + '|>'`) builds it around any: check roles before.
    ///
    /// # Errors
    ///
    /// Rendering fails (see [`ChatTemplate::render`]) or the prompt cannot be encoded.
    pub fn encode_chat(
        &self,
        template: &ChatTemplate,
        messages: &[Message],
        options: &RenderOptions,
    ) -> Result<ChatPrompt, TextError> {
        let messages: Vec<Json> = messages.iter().map(message_json).collect();
        let marker = Marker::new(self.added(), template.source_for(options), &messages, options);
        let (messages, options) = marker.mark_all(messages, options);
        let marked = template.render_json(Json::Array(messages), &options)?;
        let (text, guard) = marker.unmark(&marked);
        let ids = self.encode_trusting(&text, &|found| guard.trusts(&found.range), false)?;
        Ok(ChatPrompt { text, ids })
    }
}

impl<'a> Marker<'a> {
    fn new(
        added: &'a AddedTokens,
        source: &str,
        messages: &[Json],
        options: &RenderOptions,
    ) -> Self {
        let mut of_template = HashSet::new();
        let mut from = 0;
        while let Some(found) = added.find(source, from, |_| true) {
            of_template.insert(found.index);
            from = found.range.end;
        }
        let mut texts = vec![source];
        for json in messages {
            collect_texts(json, &mut texts);
        }
        for json in options.tools.iter().chain(&options.documents).flatten() {
            collect_texts(json, &mut texts);
        }
        for (key, value) in &options.kwargs {
            texts.push(key);
            collect_texts(value, &mut texts);
        }
        let mut unused = unused_chars(&texts);
        // Sixty-five thousand candidates; a text that uses them all gets marks that do nothing.
        let marks = Marks {
            open: unused.next().unwrap_or('\u{f0000}'),
            close: unused.next().unwrap_or('\u{f0001}'),
        };
        drop(unused);
        Self { added, of_template, marks }
    }

    fn is_control(&self, index: usize, trust: Trust) -> bool {
        self.added.is_special(index) || trust == Trust::None && self.of_template.contains(&index)
    }

    fn mark_all(&self, messages: Vec<Json>, options: &RenderOptions) -> (Vec<Json>, RenderOptions) {
        let messages = (messages.into_iter())
            .map(|message| {
                let trust = match message["role"].as_str() {
                    Some("system" | "developer" | "assistant") => Trust::Model,
                    _ => Trust::None,
                };
                self.mark(message, trust)
            })
            .collect();
        let list = |items: &Option<Vec<Json>>, trust| {
            items.as_ref().map(|items| {
                let items = items.iter().cloned();
                items.map(|item| self.mark(item, trust)).collect()
            })
        };
        let options = RenderOptions {
            tools: list(&options.tools, Trust::Model),
            documents: list(&options.documents, Trust::None),
            kwargs: self.mark_map(options.kwargs.clone(), Trust::Model),
            ..options.clone()
        };
        (messages, options)
    }

    fn mark(&self, json: Json, trust: Trust) -> Json {
        match json {
            Json::String(text) => Json::String(self.mark_text(text, trust)),
            Json::Array(items) => items.into_iter().map(|item| self.mark(item, trust)).collect(),
            Json::Object(map) => Json::Object(self.mark_map(map, trust)),
            other => other,
        }
    }

    fn mark_map(&self, map: Map<String, Json>, trust: Trust) -> Map<String, Json> {
        map.into_iter()
            .map(|(key, value)| (self.mark_text(key, trust), self.mark(value, trust)))
            .collect()
    }

    fn mark_text(&self, text: String, trust: Trust) -> String {
        let is_control = |index| self.is_control(index, trust);
        let Marks { open, close } = self.marks;
        let mut out = String::new();
        let mut done = 0;
        // Two strings side by side could make up a token: a lone mark keeps them apart.
        if self.added.begins_inside(&text, trust == Trust::None) {
            out.push(open);
        }
        while let Some(found) = self.added.find(&text, done, |found| is_control(found.index)) {
            out.push_str(&text[done..found.range.start]);
            out.push(open);
            out.push_str(&text[found.range.clone()]);
            out.push(close);
            done = found.range.end;
        }
        if self.added.ends_inside(&text[done..], trust == Trust::None) {
            out.push_str(&text[done..]);
            out.push(open);
            return out;
        }
        if out.is_empty() {
            return text;
        }
        out.push_str(&text[done..]);
        out
    }

    /// Removes the marks and tells where they were.
    fn unmark(&self, marked: &str) -> (String, Guard) {
        let Marks { open, close } = self.marks;
        // `tojson` and `repr` may have spelled a mark out.
        let mut marked = marked.to_owned();
        for mark in [open, close] {
            for escape in escapes(mark) {
                marked = marked.replace(&escape, mark.encode_utf8(&mut [0; 4]));
            }
        }
        let mut text = String::with_capacity(marked.len());
        let mut guard = Guard::default();
        let mut opened = None;
        for piece in marked.split_inclusive([open, close]) {
            let plain = piece.trim_end_matches([open, close]);
            text.push_str(plain);
            if plain.len() == piece.len() {
                break;
            }
            if let (Some(start), true) = (opened, piece.ends_with(close)) {
                let token = &text[start..];
                let is_whole = (self.added)
                    .find(token, 0, |_| true)
                    .is_some_and(|found| found.range == (0..token.len()));
                if is_whole {
                    guard.wrapped.push(start..text.len());
                }
            }
            opened = piece.ends_with(open).then_some(text.len());
            guard.cuts.push(text.len());
        }
        (text, guard)
    }
}

/// Where the caller's own control tokens are, as byte offsets in rising order.
#[derive(Debug, Default)]
struct Guard {
    wrapped: Vec<Range<usize>>,
    cuts: Vec<usize>,
}

impl Guard {
    fn trusts(&self, range: &Range<usize>) -> bool {
        let next = self.wrapped.partition_point(|own| own.end <= range.start);
        let overlaps = (self.wrapped.get(next)).is_some_and(|own| own.start < range.end);
        let cut = self.cuts.partition_point(|&cut| cut <= range.start);
        let is_cut = self.cuts.get(cut).is_some_and(|&cut| cut < range.end);
        !overlaps && !is_cut
    }
}

fn collect_texts<'a>(json: &'a Json, texts: &mut Vec<&'a str>) {
    match json {
        Json::String(text) => texts.push(text),
        Json::Array(items) => items.iter().for_each(|item| collect_texts(item, texts)),
        Json::Object(map) => map.iter().for_each(|(key, value)| {
            texts.push(key);
            collect_texts(value, texts);
        }),
        _ => {}
    }
}
