//! Added tokens: finding them in text, and encoding text in which some of them must stay text.
//!
//! The library can ignore *all* special tokens or none. A chat prompt needs a choice per
//! occurrence: the template's `<|im_end|>` is a token, the one a user typed is text. So a second
//! engine over the same vocabulary knows no control token at all, only a private-use *stand-in*
//! for each; occurrences to be read as tokens are replaced by their stand-in, and the whole text
//! is encoded at once, which keeps every other rule (prefix space, stripping) as it is.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use tokenizers::{AddedToken, AddedVocabulary};

use crate::model::{Engine, guarded};

/// First id of the literal engine's own added tokens; no vocabulary reaches it.
const STAND_IN_BASE: u32 = 1 << 30;
/// Stand-ins are a lead character and two digits of this base from plane 16.
const STAND_IN_DIGITS: u32 = 4096;
const PLANE_15: Range<u32> = 0xF_0000..0xF_FFFE;
const PLANE_16: u32 = 0x10_0000;

/// One added token of the file.
#[derive(Debug, Clone)]
pub(crate) struct Added {
    pub(crate) id: u32,
    pub(crate) token: AddedToken,
}

/// An occurrence of an added token in a text.
#[derive(Debug, Clone)]
pub(crate) struct Found {
    pub(crate) range: Range<usize>,
    pub(crate) index: usize,
}

/// The added tokens that carry a meaning beyond their text, searchable.
///
/// Runs of white space are left out: some vocabularies list them as added tokens, and they are
/// ordinary text.
#[derive(Debug)]
pub(crate) struct AddedTokens {
    tokens: Vec<Added>,
    plain: Vec<Added>,
    by_text: HashMap<String, usize>,
    special_ids: HashSet<u32>,
    /// The token that the model puts where it has none.
    unknown: Option<u32>,
    /// For each byte the lengths of the tokens that begin with it, longest first.
    lengths: Vec<Vec<usize>>,
    length_max: usize,
    prefixes: Parts,
    suffixes: Parts,
}

/// Proper parts of tokens, and whether one of these is special.
type Parts = HashMap<String, bool>;

impl AddedTokens {
    pub(crate) fn new(vocabulary: &AddedVocabulary, unknown: Option<u32>) -> Self {
        let mut all: Vec<Added> = vocabulary
            .get_added_tokens_decoder()
            .iter()
            .map(|(&id, token)| Added { id, token: token.clone() })
            .collect();
        all.sort_by_key(|added| added.id);
        let (tokens, plain): (Vec<_>, Vec<_>) = all
            .into_iter()
            .filter(|added| !added.token.content.is_empty())
            .partition(|added| added.token.special || !added.token.content.trim().is_empty());
        let mut lengths = vec![Vec::new(); 256];
        let (mut prefixes, mut suffixes) = (Parts::new(), Parts::new());
        for Added { token, .. } in &tokens {
            let content = &token.content;
            lengths[usize::from(content.as_bytes()[0])].push(content.len());
            for (at, _) in content.char_indices().skip(1) {
                *prefixes.entry(content[..at].to_owned()).or_default() |= token.special;
                *suffixes.entry(content[at..].to_owned()).or_default() |= token.special;
            }
        }
        for list in &mut lengths {
            list.sort_unstable_by(|a, b| b.cmp(a));
            list.dedup();
        }
        Self {
            by_text: (tokens.iter().enumerate())
                .map(|(index, added)| (added.token.content.clone(), index))
                .collect(),
            special_ids: (tokens.iter())
                .filter(|added| added.token.special)
                .map(|added| added.id)
                .collect(),
            unknown,
            length_max: (tokens.iter()).map(|added| added.token.content.len()).max().unwrap_or(0),
            tokens,
            plain,
            lengths,
            prefixes,
            suffixes,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.tokens.len()
    }

    pub(crate) fn is_special(&self, index: usize) -> bool {
        self.tokens[index].token.special
    }

    pub(crate) fn is_special_id(&self, id: u32) -> bool {
        self.special_ids.contains(&id)
    }

    /// Whether the id is special and no mere stand-in for text the vocabulary lacks.
    pub(crate) fn is_control(&self, id: u32) -> bool {
        self.is_special_id(id) && self.unknown != Some(id)
    }

    /// The leftmost, then longest, occurrence from `from` on that `accept` takes.
    pub(crate) fn find(
        &self,
        text: &str,
        from: usize,
        mut accept: impl FnMut(&Found) -> bool,
    ) -> Option<Found> {
        for (start, &byte) in text.as_bytes().iter().enumerate().skip(from) {
            for &length in &self.lengths[usize::from(byte)] {
                let Some(&index) =
                    text.get(start..start + length).and_then(|part| self.by_text.get(part))
                else {
                    continue;
                };
                let found = Found { range: start..start + length, index };
                if self.is_matched(text, &found) && accept(&found) {
                    return Some(found);
                }
            }
        }
        None
    }

    /// How many special tokens the text spells.
    pub(crate) fn count_special(&self, text: &str) -> usize {
        let mut count = 0;
        let mut from = 0;
        while let Some(found) = self.find(text, from, |_| true) {
            count += usize::from(self.is_special(found.index));
            from = found.range.end;
        }
        count
    }

    /// Whether the library would match here: single-word tokens need a boundary on both sides.
    fn is_matched(&self, text: &str, found: &Found) -> bool {
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        !self.tokens[found.index].token.single_word
            || !(text[..found.range.start].chars().next_back()).is_some_and(is_word)
                && !(text[found.range.end..].chars().next()).is_some_and(is_word)
    }

    /// Whether `text` ends within a token: a special one, or with `any` another.
    pub(crate) fn ends_inside(&self, text: &str, any: bool) -> bool {
        let starts = text.char_indices().rev().map(|(at, _)| at);
        self.holds_part(&self.prefixes, starts.map(|at| &text[at..]), any)
    }

    /// Whether `text` begins within a token: a special one, or with `any` another.
    pub(crate) fn begins_inside(&self, text: &str, any: bool) -> bool {
        let ends = text.char_indices().map(|(at, c)| at + c.len_utf8());
        self.holds_part(&self.suffixes, ends.map(|at| &text[..at]), any)
    }

    /// Looks up parts of rising length.
    fn holds_part<'t>(
        &self,
        parts: &Parts,
        candidates: impl Iterator<Item = &'t str>,
        any: bool,
    ) -> bool {
        candidates
            .take_while(|part| part.len() < self.length_max)
            .any(|part| parts.get(part).is_some_and(|&special| any || special))
    }
}

/// An engine that reads no control token from text, only stand-ins.
#[derive(Debug)]
pub(crate) struct LiteralEngine {
    engine: Engine,
    lead: char,
    /// What each id from [`STAND_IN_BASE`] on means; `None` is the separator, which vanishes.
    meaning: Vec<Option<u32>>,
}

impl LiteralEngine {
    /// Builds one whose stand-ins begin with a character that `text` does not contain, so that no
    /// text can spell a stand-in.
    pub(crate) fn new(base: &Engine, added: &AddedTokens, text: &str) -> Result<Self, String> {
        let lead = unused_chars(&[text])
            .next()
            .ok_or("every private-use character of plane 15 is taken")?;
        guarded(|| Self::build(base, added, lead))
    }

    fn build(base: &Engine, added: &AddedTokens, lead: char) -> tokenizers::Result<Self> {
        let mut engine = Engine::new(base.get_model().with_added_base(STAND_IN_BASE));
        engine.with_normalizer(base.get_normalizer().cloned())?;
        engine.with_pre_tokenizer(base.get_pre_tokenizer().cloned());
        engine.with_post_processor(base.get_post_processor().cloned());
        let mut real: Vec<(AddedToken, Option<u32>)> =
            (added.plain.iter()).map(|plain| (plain.token.clone(), Some(plain.id))).collect();
        for (index, control) in added.tokens.iter().enumerate() {
            let mut token = control.token.clone();
            token.content = stand_in(lead, index);
            // Matched before normalisation and anywhere: where it stands was decided already.
            token.normalized = false;
            token.single_word = false;
            token.special = false;
            real.push((token, Some(control.id)));
        }
        let separator = AddedToken::from(stand_in(lead, added.len()), false).normalized(false);
        real.push((separator, None));
        engine.add_tokens(real.iter().map(|(token, _)| token.clone()))?;
        let mut meaning = vec![None; real.len()];
        for (token, id) in real {
            let given = engine.token_to_id(&token.content);
            let place = given.and_then(|given| given.checked_sub(STAND_IN_BASE));
            if let Some(slot) = place.and_then(|place| meaning.get_mut(place as usize)) {
                *slot = id;
            }
        }
        Ok(Self { engine, lead, meaning })
    }

    pub(crate) fn suits(&self, text: &str) -> bool {
        !text.contains(self.lead)
    }

    /// Encodes `text`; occurrences that `trusted` takes become their ids, all others stay text.
    pub(crate) fn encode(
        &self,
        added: &AddedTokens,
        text: &str,
        trusted: &dyn Fn(&Found) -> bool,
        add_special_tokens: bool,
    ) -> Result<Vec<u32>, String> {
        // Some vocabularies hold the control tokens' own text, and then plain tokenisation can
        // arrive at one; only then is the text cut inside the token.
        for cut in [false, true] {
            let prepared = self.prepare(added, text, trusted, cut);
            let ids = self.encode_prepared(&prepared, false)?;
            if ids.iter().any(|&id| added.is_control(id)) {
                continue;
            }
            let ids = if add_special_tokens { self.encode_prepared(&prepared, true)? } else { ids };
            return Ok(ids.into_iter().filter_map(|id| self.resolve(id)).collect());
        }
        Err("plain text turns into a special token whatever is done".to_owned())
    }

    fn encode_prepared(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, String> {
        guarded(|| self.engine.encode_fast(text, add_special_tokens))
            .map(|encoding| encoding.get_ids().to_vec())
    }

    fn resolve(&self, id: u32) -> Option<u32> {
        match id.checked_sub(STAND_IN_BASE) {
            Some(place) => self.meaning.get(place as usize).copied().flatten(),
            None => Some(id),
        }
    }

    fn prepare(
        &self,
        added: &AddedTokens,
        text: &str,
        trusted: &dyn Fn(&Found) -> bool,
        cut: bool,
    ) -> String {
        let mut out = String::with_capacity(text.len());
        let mut done = 0;
        while let Some(found) = added.find(text, done, |_| true) {
            let start = found.range.start;
            out.push_str(&text[done..start]);
            let here = added.find(&text[..found.range.end], start, trusted);
            if let Some(found) = here.filter(|here| here.range.start == start) {
                out.push_str(&stand_in(self.lead, found.index));
                done = found.range.end;
                continue;
            }
            let first = text[start..].chars().next().map_or(1, char::len_utf8);
            done = start + first;
            out.push_str(&text[start..done]);
            if cut {
                out.push_str(&stand_in(self.lead, added.len()));
            }
        }
        out.push_str(&text[done..]);
        out
    }
}

/// Spells the stand-in of a token.
fn stand_in(lead: char, index: usize) -> String {
    let digit = |value: u32| char::from_u32(PLANE_16 + value % STAND_IN_DIGITS);
    let index = index as u32;
    [Some(lead), digit(index / STAND_IN_DIGITS), digit(index)].into_iter().flatten().collect()
}

/// Private-use characters that occur in none of `texts`, neither as such nor escaped.
pub(crate) fn unused_chars(texts: &[&str]) -> impl Iterator<Item = char> {
    PLANE_15.filter_map(char::from_u32).filter(move |&c| {
        let escapes = escapes(c);
        !texts
            .iter()
            .any(|text| text.contains(c) || escapes.iter().any(|escape| text.contains(escape)))
    })
}

/// How template filters may spell a private-use character instead of passing it on.
pub(crate) fn escapes(c: char) -> [String; 2] {
    let mut json = String::new();
    push_json_escape(&mut json, c);
    [json, c.escape_unicode().to_string()]
}

/// Writes a character as JSON escapes it in ASCII.
pub(crate) fn push_json_escape(out: &mut String, c: char) {
    for unit in c.encode_utf16(&mut [0; 2]) {
        out.push_str("\\u");
        for shift in [12, 8, 4, 0] {
            out.extend(char::from_digit(u32::from(*unit >> shift & 0xf), 16));
        }
    }
}
