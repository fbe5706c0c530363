//! Chat templates: messages to prompt, as Jinja2 set up by `transformers` renders them.

mod discover;
mod generation;
mod methods;
mod python;
mod strftime;

use std::sync::Arc;
use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior, Value};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value as Json};

use crate::error::TextError;

/// Units of work a render may do: an instruction, or 64 bytes of text. It is half a second, or
/// 128 MB, where an honest template needs a tenth for a million tokens.
const FUEL: u64 = 2_000_000;
/// A template can build one value per few units of work, each inside the next, and the template
/// engine walks such a chain by recursion, at the latest to free it.
const STACK_BYTES: usize = 512 << 20;
const NAME: &str = "chat_template";

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant`, `tool`, …
    pub role: String,
    /// Text, a list of parts, or null. `None` leaves the key out, which templates can tell from
    /// null.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "keep_null")]
    pub content: Option<Json>,
    /// Everything else a template may read: `tool_calls`, `name`, `reasoning_content`, …
    #[serde(flatten)]
    pub extra: Map<String, Json>,
}

fn keep_null<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Json>, D::Error> {
    Json::deserialize(deserializer).map(Some)
}

impl Message {
    /// A message with text (or any other JSON) as its content.
    pub fn new(role: impl Into<String>, content: impl Into<Json>) -> Self {
        Self { role: role.into(), content: Some(content.into()), extra: Map::new() }
    }
}

/// What a template gets besides the messages.
#[derive(Debug, Clone, Default)]
pub struct RenderOptions {
    /// Ask for the beginning of the assistant's turn.
    pub add_generation_prompt: bool,
    /// Tool schemas; `None` is the template's `none`.
    pub tools: Option<Vec<Json>>,
    /// Documents for retrieval; `None` is the template's `none`.
    pub documents: Option<Vec<Json>>,
    /// Sets the variable `enable_thinking`; `None` leaves it undefined.
    pub enable_thinking: Option<bool>,
    /// Further variables (`chat_template_kwargs`); they win over all others.
    pub kwargs: Map<String, Json>,
    /// The time `strftime_now` tells, in UTC; `None` is the time of the call. Templates that name
    /// the day render another prompt tomorrow, so reproducible runs set it.
    pub now: Option<SystemTime>,
}

/// A compiled chat template with the special tokens it may name.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    inner: Arc<Inner>,
}

#[derive(Debug, Clone)]
struct Inner {
    main: Compiled,
    /// Used instead when tools are given.
    tool_use: Option<Compiled>,
    special_tokens: Map<String, Json>,
}

#[derive(Debug, Clone)]
struct Compiled {
    origin: String,
    source: String,
    environment: Environment<'static>,
}

impl ChatTemplate {
    /// Compiles a template; `origin` names it in messages.
    ///
    /// # Errors
    ///
    /// The template does not parse.
    pub fn from_source(template: &str, origin: &str) -> Result<Self, TextError> {
        let main = Compiled::new(template, origin)?;
        Ok(Self::assemble(main, None, Map::new()))
    }

    /// Finds the template in the two places a model can keep it.
    ///
    /// `chat_template.jinja` wins; else `chat_template` of `tokenizer_config.json`, a string or a
    /// named list, of which `default` is used and `tool_use` when tools are given. The special
    /// tokens (`bos_token`, …) come from `tokenizer_config.json` either way.
    ///
    /// # Errors
    ///
    /// There is no template, it does not parse, or the configuration has fields of wrong types.
    pub fn discover(
        tokenizer_config_json: Option<&[u8]>,
        chat_template_jinja: Option<&[u8]>,
    ) -> Result<Self, TextError> {
        let found = discover::discover(tokenizer_config_json, chat_template_jinja)?;
        let (source, origin) = &found.main;
        let main = Compiled::new(source, origin)?;
        let tool_use = (found.tool_use.as_ref())
            .map(|(source, origin)| Compiled::new(source, origin))
            .transpose()?;
        Ok(Self::assemble(main, tool_use, found.special_tokens))
    }

    fn assemble(
        main: Compiled,
        tool_use: Option<Compiled>,
        special_tokens: Map<String, Json>,
    ) -> Self {
        Self { inner: Arc::new(Inner { main, tool_use, special_tokens }) }
    }

    /// Gives the template a special token under a name such as `bos_token`.
    #[must_use]
    pub fn with_special_token(mut self, name: &str, token: &str) -> Self {
        let inner = Arc::make_mut(&mut self.inner);
        inner.special_tokens.insert(name.to_owned(), token.into());
        self
    }

    /// A special token of `tokenizer_config.json` by name, such as `eos_token`.
    pub fn special_token(&self, name: &str) -> Option<&str> {
        self.inner.special_tokens.get(name)?.as_str()
    }

    /// The source of the template that serves a request without tools.
    pub fn source(&self) -> &str {
        &self.inner.main.source
    }

    /// Renders a conversation to the model's prompt.
    ///
    /// The text does not tell the template's control tokens from those a user typed; to get token
    /// ids, use [`Tokenizer::encode_chat`](crate::Tokenizer::encode_chat).
    ///
    /// # Errors
    ///
    /// The template refuses the messages (`raise_exception`), fails on them, or does not end.
    pub fn render(
        &self,
        messages: &[Message],
        options: &RenderOptions,
    ) -> Result<String, TextError> {
        let messages = messages.iter().map(message_json).collect();
        self.render_json(Json::Array(messages), options)
    }

    pub(crate) fn render_json(
        &self,
        messages: Json,
        options: &RenderOptions,
    ) -> Result<String, TextError> {
        let list = |items: &Option<Vec<Json>>| {
            items.as_ref().map_or(Json::Null, |items| Json::Array(items.clone()))
        };
        let mut variables = self.inner.special_tokens.clone();
        variables.insert("messages".into(), messages);
        variables.insert("tools".into(), list(&options.tools));
        variables.insert("documents".into(), list(&options.documents));
        variables.insert("add_generation_prompt".into(), options.add_generation_prompt.into());
        if let Some(enable) = options.enable_thinking {
            variables.insert("enable_thinking".into(), enable.into());
        }
        for (name, value) in &options.kwargs {
            variables.insert(name.clone(), value.clone());
        }
        self.pick(options).render(&variables, options.now)
    }

    pub(crate) fn source_for(&self, options: &RenderOptions) -> &str {
        &self.pick(options).source
    }

    fn pick(&self, options: &RenderOptions) -> &Compiled {
        match &self.inner.tool_use {
            Some(tool_use) if options.tools.is_some() => tool_use,
            _ => &self.inner.main,
        }
    }
}

pub(crate) fn message_json(message: &Message) -> Json {
    let mut map = Map::new();
    map.insert("role".into(), message.role.clone().into());
    if let Some(content) = &message.content {
        map.insert("content".into(), content.clone());
    }
    for (key, value) in &message.extra {
        map.insert(key.clone(), value.clone());
    }
    Json::Object(map)
}

impl Compiled {
    fn new(template: &str, origin: &str) -> Result<Self, TextError> {
        on_large_stack(origin, || Self::compile(template, origin))
    }

    fn compile(template: &str, origin: &str) -> Result<Self, TextError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .map_err(|error| render_error(&error, origin))?;
        environment.set_syntax(syntax);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_unknown_method_callback(methods::call);
        environment.set_formatter(python::write);
        environment.set_fuel(Some(FUEL));
        environment.add_filter("tojson", python::tojson);
        environment.add_filter("string", python::string);
        environment.add_filter("int", python::int);
        environment.add_filter("float", python::to_float);
        environment.add_test("sequence", python::is_sequence);
        environment.add_test("iterable", python::is_iterable);
        environment.add_function("raise_exception", raise_exception);
        environment.add_template_owned(NAME, generation::strip(template)).map_err(|error| {
            TextError::TemplateSyntax {
                origin: origin.to_owned(),
                line: error.line().unwrap_or(0),
                reason: words(&error),
            }
        })?;
        Ok(Self { origin: origin.to_owned(), source: template.to_owned(), environment })
    }

    fn render(
        &self,
        variables: &Map<String, Json>,
        now: Option<SystemTime>,
    ) -> Result<String, TextError> {
        on_large_stack(&self.origin, || self.render_here(variables, now))
    }

    fn render_here(
        &self,
        variables: &Map<String, Json>,
        now: Option<SystemTime>,
    ) -> Result<String, TextError> {
        let now = now.unwrap_or_else(SystemTime::now);
        let clock = Value::from_function(move |format: &str| strftime::strftime(now, format));
        let pairs = variables
            .iter()
            .map(|(name, value)| (Value::from(name.as_str()), python::from_json(value)))
            // Like a global of the environment: a variable of that name wins.
            .rev()
            .chain([(Value::from("strftime_now"), clock)]);
        let mut seen = std::collections::HashSet::new();
        let context = Value::from_pairs(pairs.filter(|(name, _)| seen.insert(name.to_string())));
        (self.environment.get_template(NAME))
            .and_then(|template| template.render(context))
            .map_err(|error| render_error(&error, &self.origin))
    }
}

/// Runs work that may recurse deeply on a thread of its own; unused stack costs nothing.
fn on_large_stack<T: Send>(
    origin: &str,
    work: impl FnOnce() -> Result<T, TextError> + Send,
) -> Result<T, TextError> {
    let failed =
        |reason: String| TextError::TemplateRender { origin: origin.to_owned(), line: 0, reason };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .name("chat-template".to_owned())
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, work)
            .map_err(|error| failed(format!("cannot start a thread: {error}")))?;
        thread.join().unwrap_or_else(|_| Err(failed("the template engine panicked".to_owned())))
    })
}

/// Marks an error that the template itself raised.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

#[expect(clippy::needless_pass_by_value, reason = "a function of a template owns its arguments")]
fn raise_exception(message: Value) -> Result<Value, Error> {
    let message = message.to_string();
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

fn render_error(error: &Error, origin: &str) -> TextError {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(cause) = source {
        if let Some(Raised(message)) = cause.downcast_ref() {
            return TextError::TemplateRaised {
                origin: origin.to_owned(),
                message: message.clone(),
            };
        }
        if let Some(inner) = cause.downcast_ref::<Error>()
            && inner.kind() == ErrorKind::OutOfFuel
        {
            return TextError::TemplateFuel { origin: origin.to_owned(), limit: FUEL };
        }
        source = cause.source();
    }
    TextError::TemplateRender {
        origin: origin.to_owned(),
        line: error.line().unwrap_or(0),
        reason: words(error),
    }
}

/// The error without the place, which the caller names.
fn words(error: &Error) -> String {
    match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    }
}
