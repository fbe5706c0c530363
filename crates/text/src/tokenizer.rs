//! Text to token ids and back, as the model's `tokenizer.json` says.

use std::sync::{Arc, OnceLock};

use serde::Deserialize;
use serde_json::Value;
use tokenizers::Model as _;

use crate::added::{AddedTokens, Found, LiteralEngine};
use crate::decoder::Chain;
use crate::detokenizer::Detokenizer;
use crate::error::{TextError, json_kind, parse_json};
use crate::model::{Engine, guarded};

/// What the text of an added token (`<|im_end|>`) in the input means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Specials {
    /// It is that token. For text this program or its user's operator wrote.
    Parse,
    /// Special tokens are ordinary text. For text from outside, which must not forge control
    /// tokens. Added tokens that are not special (`<think>`, runs of spaces) are still read: they
    /// are vocabulary, and no sampler or template takes them for an end.
    Literal,
}

/// A model's tokenizer. Clones share everything.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    origin: String,
    engine: Engine,
    added: AddedTokens,
    chain: Chain,
    literal: OnceLock<LiteralEngine>,
    vocab_size: usize,
}

/// The parts of `tokenizer.json` checked before the library sees it, for better messages.
#[derive(Deserialize)]
struct Head {
    #[serde(default)]
    version: Value,
    #[serde(default)]
    model: Option<ModelHead>,
    #[serde(default)]
    added_tokens: Vec<AddedHead>,
}

#[derive(Deserialize)]
struct ModelHead {
    #[serde(default, rename = "type")]
    kind: Value,
    #[serde(default)]
    unk_id: Value,
    #[serde(default)]
    unk_token: Value,
}

#[derive(Deserialize)]
struct AddedHead {
    id: u64,
    content: String,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`; `origin` names it in messages.
    ///
    /// Truncation and padding settings of the file are ignored, as every use of a language model
    /// ignores them.
    ///
    /// # Errors
    ///
    /// The bytes are not JSON, the library refuses them, or an added token has another id than
    /// the library would give it.
    pub fn from_bytes(tokenizer_json: &[u8], origin: &str) -> Result<Self, TextError> {
        let head = read_head(tokenizer_json, origin)?;
        let refuse = |reason| TextError::Tokenizer { origin: origin.to_owned(), reason };
        let engine = guarded(|| {
            let mut engine: Engine = serde_json::from_slice(tokenizer_json)?;
            engine.with_truncation(None)?;
            engine.with_padding(None);
            Ok(engine)
        })
        .map_err(refuse)?;
        check_added_ids(&head.added_tokens, &engine, origin)?;
        let chain = Chain::new(engine.get_decoder()).map_err(refuse)?;
        let model = head.model.as_ref();
        let unknown = model.and_then(|model| match (&model.unk_id, &model.unk_token) {
            (Value::Number(id), _) => id.as_u64().and_then(|id| u32::try_from(id).ok()),
            (_, Value::String(token)) => engine.token_to_id(token),
            _ => None,
        });
        let added = AddedTokens::new(engine.get_added_vocabulary(), unknown);
        Ok(Self {
            inner: Arc::new(Inner {
                origin: origin.to_owned(),
                vocab_size: engine.get_vocab_size(true),
                engine,
                added,
                chain,
                literal: OnceLock::new(),
            }),
        })
    }

    /// Encodes a text without what the post-processor would add (BOS and the like).
    ///
    /// # Errors
    ///
    /// The tokenizer cannot represent the text and has no unknown token.
    pub fn encode(&self, text: &str, specials: Specials) -> Result<Vec<u32>, TextError> {
        self.encode_with(text, specials, false)
    }

    /// Encodes a text; `add_special_tokens` adds what the file's post-processor adds, usually the
    /// BOS. Chat templates write their own BOS, so rendered prompts are encoded without.
    ///
    /// # Errors
    ///
    /// The tokenizer cannot represent the text and has no unknown token.
    pub fn encode_with(
        &self,
        text: &str,
        specials: Specials,
        add_special_tokens: bool,
    ) -> Result<Vec<u32>, TextError> {
        match specials {
            Specials::Parse => self.encode_whole(text, add_special_tokens),
            Specials::Literal => {
                let trusted = |found: &Found| !self.inner.added.is_special(found.index);
                self.encode_trusting(text, &trusted, add_special_tokens)
            }
        }
    }

    /// Encodes `text` with only the `trusted` occurrences of added tokens read as tokens; as a
    /// whole when there are no others.
    pub(crate) fn encode_trusting(
        &self,
        text: &str,
        trusted: &dyn Fn(&Found) -> bool,
        add_special_tokens: bool,
    ) -> Result<Vec<u32>, TextError> {
        let Inner { added, engine, .. } = &*self.inner;
        if added.find(text, 0, |found| !trusted(found)).is_some() {
            return self.encode_guarded(text, trusted, add_special_tokens);
        }
        // A normaliser can turn other text into a special token's (case, width); the ids tell.
        if engine.get_normalizer().is_some() {
            let ids = self.encode_whole(text, false)?;
            let read = ids.iter().filter(|&&id| added.is_control(id)).count();
            if read > added.count_special(text) {
                return self.encode_guarded(text, trusted, add_special_tokens);
            }
        }
        self.encode_whole(text, add_special_tokens)
    }

    fn encode_whole(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TextError> {
        let engine = &self.inner.engine;
        guarded(|| engine.encode_fast(text, add_special_tokens))
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(|reason| self.refuse(text, reason))
    }

    fn encode_guarded(
        &self,
        text: &str,
        trusted: &dyn Fn(&Found) -> bool,
        add_special_tokens: bool,
    ) -> Result<Vec<u32>, TextError> {
        let inner = &self.inner;
        let build = |text| LiteralEngine::new(&inner.engine, &inner.added, text);
        if inner.literal.get().is_none() {
            let engine = build("").map_err(|reason| self.refuse(text, reason))?;
            // Another thread may have been first; both are the same.
            let _ = inner.literal.set(engine);
        }
        let own;
        let literal = match inner.literal.get() {
            Some(shared) if shared.suits(text) => shared,
            _ => {
                own = build(text).map_err(|reason| self.refuse(text, reason))?;
                &own
            }
        };
        literal
            .encode(&inner.added, text, trusted, add_special_tokens)
            .map_err(|reason| self.refuse(text, reason))
    }

    fn refuse(&self, text: &str, reason: String) -> TextError {
        TextError::Encode { origin: self.inner.origin.clone(), text_bytes: text.len(), reason }
    }

    /// Number of tokens, added ones included. Ids may have gaps above it.
    pub fn vocab_size(&self) -> usize {
        self.inner.vocab_size
    }

    /// The id of a token by its exact vocabulary text.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.engine.token_to_id(token)
    }

    /// The vocabulary text of an id: for byte-level vocabularies in their own alphabet (`Ġthe`),
    /// not the text it decodes to.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        let engine = &self.inner.engine;
        (engine.get_added_vocabulary().simple_id_to_token(id))
            .or_else(|| engine.get_model().id_to_token(id))
    }

    /// Whether the id is a special token, which decoding may skip.
    pub fn is_special(&self, id: u32) -> bool {
        self.inner.added.is_special_id(id)
    }

    /// Decodes ids to text. Unknown ids vanish, as in the library; bytes that are no UTF-8 become
    /// U+FFFD.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut detokenizer = Detokenizer::new(self, skip_special);
        let mut text = String::new();
        for &id in ids {
            detokenizer.push_into(id, &mut text);
        }
        text.push_str(&detokenizer.finish());
        text
    }

    pub(crate) fn chain(&self) -> &Chain {
        &self.inner.chain
    }

    pub(crate) fn added(&self) -> &AddedTokens {
        &self.inner.added
    }
}

fn read_head(bytes: &[u8], origin: &str) -> Result<Head, TextError> {
    let field = |field: &str, found: String, expected| TextError::Field {
        origin: origin.to_owned(),
        field: field.to_owned(),
        found,
        expected,
        hint: "this is not a `tokenizer.json` of the `tokenizers` library, or a newer one",
    };
    let head: Head = match serde_json::from_slice(bytes) {
        Ok(head) => head,
        Err(error) => {
            // Tell broken JSON from JSON of another shape.
            parse_json(bytes, origin, "a tokenizer")?;
            return Err(TextError::Tokenizer {
                origin: origin.to_owned(),
                reason: error.to_string(),
            });
        }
    };
    if !(head.version.is_null() || head.version == "1.0") {
        let found = match &head.version {
            Value::String(text) => format!("`{text}`"),
            other => json_kind(other),
        };
        return Err(field("version", found, "`1.0`"));
    }
    let Some(model) = &head.model else {
        return Err(field("model", "missing".to_owned(), "an object"));
    };
    const KINDS: [&str; 4] = ["BPE", "Unigram", "WordPiece", "WordLevel"];
    let known = |kind: &str| KINDS.contains(&kind);
    match &model.kind {
        Value::Null => Ok(head),
        Value::String(kind) if known(kind) => Ok(head),
        Value::String(kind) => Err(field(
            "model.type",
            format!("`{kind}`"),
            "`BPE`, `Unigram`, `WordPiece` or `WordLevel`",
        )),
        other => Err(field("model.type", json_kind(other), "a string")),
    }
}

fn check_added_ids(tokens: &[AddedHead], engine: &Engine, origin: &str) -> Result<(), TextError> {
    for token in tokens.iter().filter(|token| !token.content.is_empty()) {
        let assigned = engine.token_to_id(&token.content);
        if let Some(assigned_id) = assigned.filter(|&id| u64::from(id) != token.id) {
            return Err(TextError::AddedTokenId {
                origin: origin.to_owned(),
                token: token.content.clone(),
                file_id: token.id,
                assigned_id,
            });
        }
    }
    Ok(())
}
