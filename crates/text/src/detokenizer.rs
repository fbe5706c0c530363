//! Token ids to text, one at a time.

use crate::decoder::ChainState;
use crate::tokenizer::Tokenizer;

/// Turns a stream of token ids into text as it becomes certain.
///
/// 1. All text pushed out, plus [`finish`](Self::finish), equals [`Tokenizer::decode`] of all ids.
/// 2. Every piece is whole UTF-8; bytes of a character cut by a token boundary wait.
/// 3. A token costs its own length, however long the text before it.
///
/// With byte fallback (`<0xE4>` tokens) a run of such tokens waits for its end: one bad byte in it
/// changes how the whole run decodes.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    state: ChainState,
    skip_special: bool,
}

impl Detokenizer {
    /// Begins a text; `skip_special` leaves out special tokens.
    pub fn new(tokenizer: &Tokenizer, skip_special: bool) -> Self {
        Self { state: tokenizer.chain().start(), tokenizer: tokenizer.clone(), skip_special }
    }

    /// Takes the next id and returns the text that is now certain, often all of the token.
    #[must_use = "the returned text is not repeated"]
    pub fn push(&mut self, id: u32) -> String {
        let mut out = String::new();
        self.push_into(id, &mut out);
        out
    }

    pub(crate) fn push_into(&mut self, id: u32, out: &mut String) {
        if self.skip_special && self.tokenizer.is_special(id) {
            return;
        }
        if let Some(token) = self.tokenizer.id_to_token(id) {
            self.tokenizer.chain().push(&mut self.state, token, out);
        }
    }

    /// Ends the text: returns what was held back, incomplete characters as U+FFFD, and begins
    /// anew.
    #[must_use = "the returned text is not repeated"]
    pub fn finish(&mut self) -> String {
        let mut out = String::new();
        self.tokenizer.chain().finish(&mut self.state, &mut out);
        self.state = self.tokenizer.chain().start();
        out
    }
}
