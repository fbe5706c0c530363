//! Where a model keeps its chat template and special tokens.

use serde_json::{Map, Value as Json};

use crate::error::{TextError, json_kind, parse_json};

const CONFIG: &str = "tokenizer_config.json";
const JINJA: &str = "chat_template.jinja";
/// The attributes that `transformers` hands to templates.
const SPECIAL_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Sources with the name to call each in messages.
#[derive(Debug)]
pub(super) struct Discovered {
    pub(super) main: (String, String),
    pub(super) tool_use: Option<(String, String)>,
    pub(super) special_tokens: Map<String, Json>,
}

pub(super) fn discover(
    config: Option<&[u8]>,
    jinja: Option<&[u8]>,
) -> Result<Discovered, TextError> {
    let config = match config {
        Some(bytes) => match parse_json(bytes, CONFIG, "an object")? {
            Json::Object(map) => map,
            other => return Err(field("(the whole file)", &other, "an object")),
        },
        None => Map::new(),
    };
    let special_tokens = special_tokens(&config)?;
    let (main, tool_use) = match jinja {
        Some(bytes) => (jinja_source(bytes)?, None),
        None => from_config(config.get("chat_template"))?,
    };
    Ok(Discovered { main, tool_use, special_tokens })
}

fn field(field: &str, found: &Json, expected: &'static str) -> TextError {
    TextError::Field {
        origin: CONFIG.to_owned(),
        field: field.to_owned(),
        found: json_kind(found),
        expected,
        hint: "compare with the file of the model's publisher",
    }
}

fn jinja_source(bytes: &[u8]) -> Result<(String, String), TextError> {
    match std::str::from_utf8(bytes) {
        Ok(source) => Ok((source.to_owned(), JINJA.to_owned())),
        Err(error) => {
            let before = &bytes[..error.valid_up_to()];
            Err(TextError::TemplateSyntax {
                origin: JINJA.to_owned(),
                line: before.split(|&byte| byte == b'\n').count(),
                reason: "expected UTF-8 text, found other bytes".to_owned(),
            })
        }
    }
}

type Named = (String, String);

fn from_config(template: Option<&Json>) -> Result<(Named, Option<Named>), TextError> {
    match template {
        None | Some(Json::Null) => Err(TextError::TemplateMissing),
        Some(Json::String(source)) => {
            let origin = format!("{CONFIG}: chat_template");
            Ok(((source.clone(), origin), None))
        }
        Some(Json::Array(items)) => from_list(items),
        Some(other) => Err(field("chat_template", other, "a string or a list")),
    }
}

fn from_list(items: &[Json]) -> Result<(Named, Option<Named>), TextError> {
    let mut names = Vec::new();
    let (mut main, mut tool_use) = (None, None);
    for (index, item) in items.iter().enumerate() {
        let text = |key: &str| match item.get(key) {
            Some(Json::String(text)) => Ok(text.clone()),
            other => Err(field(
                &format!("chat_template[{index}].{key}"),
                other.unwrap_or(&Json::Null),
                "a string",
            )),
        };
        let (name, source) = (text("name")?, text("template")?);
        let origin = format!("{CONFIG}: chat_template `{name}`");
        match name.as_str() {
            "default" => main = Some((source, origin)),
            "tool_use" => tool_use = Some((source, origin)),
            _ => {}
        }
        names.push(name);
    }
    match main {
        Some(main) => Ok((main, tool_use)),
        None if names.is_empty() => Err(TextError::TemplateMissing),
        None => Err(TextError::TemplateName {
            origin: CONFIG.to_owned(),
            found: names,
            expected: "default",
        }),
    }
}

/// Reads tokens given as a string, as an object with `content`, or as null, which is no token.
fn special_tokens(config: &Map<String, Json>) -> Result<Map<String, Json>, TextError> {
    let mut tokens = Map::new();
    for name in SPECIAL_TOKENS {
        match config.get(name) {
            None | Some(Json::Null) => {}
            Some(text @ Json::String(_)) => {
                tokens.insert(name.to_owned(), text.clone());
            }
            Some(Json::Object(map)) => match map.get("content") {
                Some(text @ Json::String(_)) => {
                    tokens.insert(name.to_owned(), text.clone());
                }
                other => {
                    let other = other.unwrap_or(&Json::Null);
                    return Err(field(&format!("{name}.content"), other, "a string"));
                }
            },
            Some(other) => {
                return Err(field(name, other, "a string, an object with `content`, or null"));
            }
        }
    }
    Ok(tokens)
}
