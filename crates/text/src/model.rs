//! One vocabulary shared by several tokenizers.
//!
//! A tokenizer that reads control tokens and one that does not differ only in their added tokens;
//! the vocabulary and merges behind them are tens of megabytes and exist once.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Deserializer};
use tokenizers::models::{ModelWrapper, TrainerWrapper};
use tokenizers::{
    DecoderWrapper, Model, NormalizerWrapper, PostProcessorWrapper, PreTokenizedString,
    PreTokenizerWrapper, Token, TokenizerImpl, TruncationDirection,
};

/// The library's tokenizer over a shared vocabulary.
pub(crate) type Engine = TokenizerImpl<
    SharedModel,
    NormalizerWrapper,
    PreTokenizerWrapper,
    PostProcessorWrapper,
    DecoderWrapper,
>;

/// A vocabulary that clones by reference.
#[derive(Debug, Clone)]
pub(crate) struct SharedModel {
    inner: Arc<ModelWrapper>,
    /// Where the ids of added tokens that the vocabulary lacks begin; `None` is the library's
    /// rule, which is the size of the vocabulary.
    added_base: Option<u32>,
}

impl SharedModel {
    /// The same vocabulary, whose added tokens get ids from `base` on.
    pub(crate) fn with_added_base(&self, base: u32) -> Self {
        Self { inner: Arc::clone(&self.inner), added_base: Some(base) }
    }
}

impl<'de> Deserialize<'de> for SharedModel {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        ModelWrapper::deserialize(deserializer)
            .map(|model| Self { inner: Arc::new(model), added_base: None })
    }
}

impl Model for SharedModel {
    type Trainer = TrainerWrapper;

    fn tokenize(&self, sequence: &str) -> tokenizers::Result<Vec<Token>> {
        self.inner.tokenize(sequence)
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        self.inner.get_vocab()
    }

    fn get_vocab_size(&self) -> usize {
        self.added_base.map_or_else(|| self.inner.get_vocab_size(), |base| base as usize)
    }

    fn save(&self, folder: &Path, prefix: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        self.inner.save(folder, prefix)
    }

    fn get_trainer(&self) -> Self::Trainer {
        self.inner.get_trainer()
    }

    fn tokenize_in_pretokenized(
        &self,
        text: &mut PreTokenizedString,
        truncation: Option<(usize, TruncationDirection)>,
    ) -> tokenizers::Result<()> {
        self.inner.tokenize_in_pretokenized(text, truncation)
    }
}

/// Runs library code and turns both its errors and its panics into a reason.
///
/// The library indexes and unwraps on fields it took from the file, so a file can make it panic.
pub(crate) fn guarded<T>(
    work: impl FnOnce() -> Result<T, Box<dyn std::error::Error + Send + Sync>>,
) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(error.to_string()),
        Err(panic) => {
            let text = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied());
            Err(format!("the tokenizer library panicked: {}", text.unwrap_or("no message")))
        }
    }
}
