//! The one error type of this crate.

/// Why text could not be turned into tokens, or messages into a prompt.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// A file that should be JSON is not.
    #[error(
        "`{origin}` is not valid JSON at line {line}, column {column}: {reason}, expected \
         {expected}\nhint: the file may be cut short; fetch it again"
    )]
    Json {
        /// Path or name of the file.
        origin: String,
        /// Line of the first fault, from 1.
        line: usize,
        /// Column of the first fault, from 1.
        column: usize,
        /// What the JSON parser met.
        reason: String,
        /// What the file should hold.
        expected: &'static str,
    },
    /// A field has another type or value than this crate can use.
    #[error("`{origin}`: field `{field}` is {found}, expected {expected}\nhint: {hint}")]
    Field {
        /// Path or name of the file.
        origin: String,
        /// The field, in dotted form.
        field: String,
        /// What is there.
        found: String,
        /// What should be there.
        expected: &'static str,
        /// What to do about it.
        hint: &'static str,
    },
    /// The file is JSON but the tokenizer library refuses it.
    #[error(
        "`{origin}` is not a usable tokenizer: {reason}\nhint: expected the `tokenizer.json` of \
         the `tokenizers` library, version `1.0`"
    )]
    Tokenizer {
        /// Path or name of the file.
        origin: String,
        /// The library's own words.
        reason: String,
    },
    /// An added token would get another id than its file says.
    #[error(
        "`{origin}`: added token `{token}` has id {file_id}, but its place in the vocabulary gives \
         {assigned_id}\nhint: the ids of `added_tokens` must follow `model.vocab` without gaps; \
         the file does not belong to this model or was edited"
    )]
    AddedTokenId {
        /// Path or name of the file.
        origin: String,
        /// The token's text.
        token: String,
        /// The id in the file.
        file_id: u64,
        /// The id the tokenizer library assigns.
        assigned_id: u32,
    },
    /// The tokenizer failed on a text.
    #[error("`{origin}` cannot encode a text of {text_bytes} bytes: {reason}")]
    Encode {
        /// Path or name of the tokenizer file.
        origin: String,
        /// Length of the text.
        text_bytes: usize,
        /// The library's own words.
        reason: String,
    },
    /// Neither template file holds a chat template.
    #[error(
        "no chat template: `chat_template.jinja` is absent and `tokenizer_config.json` has no \
         `chat_template`\nhint: a base model has none; send plain text, or supply a template file"
    )]
    TemplateMissing,
    /// The named list of templates holds none that fits.
    #[error("`{origin}`: field `chat_template` names {found:?}, expected one called `{expected}`")]
    TemplateName {
        /// Path or name of the file.
        origin: String,
        /// The names present.
        found: Vec<String>,
        /// The name looked for.
        expected: &'static str,
    },
    /// The template does not parse.
    #[error("chat template `{origin}`, line {line}: {reason}")]
    TemplateSyntax {
        /// Path or name of the template.
        origin: String,
        /// Line of the fault, from 1.
        line: usize,
        /// What the parser met and expected.
        reason: String,
    },
    /// The template itself refused the messages by `raise_exception`.
    #[error("chat template `{origin}` refused the messages: {message}")]
    TemplateRaised {
        /// Path or name of the template.
        origin: String,
        /// The text given to `raise_exception`.
        message: String,
    },
    /// The template failed while rendering.
    #[error("chat template `{origin}`, line {line}: {reason}")]
    TemplateRender {
        /// Path or name of the template.
        origin: String,
        /// Line of the fault, from 1; 0 when unknown.
        line: usize,
        /// What failed.
        reason: String,
    },
    /// The template did more work than any honest one needs.
    #[error(
        "chat template `{origin}` was stopped after {limit} steps\nhint: the conversation is too \
         long for it, or the template loops"
    )]
    TemplateFuel {
        /// Path or name of the template.
        origin: String,
        /// The limit that was reached.
        limit: u64,
    },
    /// A stop string that would match everywhere.
    #[error("stop string {index} of {count} is empty\nhint: leave it out")]
    StopEmpty {
        /// Its place in the list, from 0.
        index: usize,
        /// Length of the list.
        count: usize,
    },
}

/// Names the type of a JSON value for messages.
pub(crate) fn json_kind(value: &serde_json::Value) -> String {
    use serde_json::Value;
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(b) => format!("the boolean `{b}`"),
        Value::Number(n) => format!("the number `{n}`"),
        Value::String(_) => "a string".to_owned(),
        Value::Array(items) => format!("a list of {}", items.len()),
        Value::Object(map) => format!("an object of {} fields", map.len()),
    }
}

/// Parses JSON, naming the file and the place when it is broken.
pub(crate) fn parse_json(
    bytes: &[u8],
    origin: &str,
    expected: &'static str,
) -> Result<serde_json::Value, TextError> {
    serde_json::from_slice(bytes).map_err(|error| TextError::Json {
        origin: origin.to_owned(),
        line: error.line(),
        column: error.column(),
        reason: error.to_string(),
        expected,
    })
}
