//! Values as Python shows them: `json.dumps`, `repr`, floats.

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, ErrorKind, Output, State, Value};
use serde_json::Value as Json;

use crate::added::push_json_escape;

/// Deepest nesting written out; JSON input is limited to 128 levels when parsed.
const DEPTH_MAX: usize = 256;

/// A JSON value for a template; null becomes `none`, key order stays.
pub(super) fn from_json(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(b) => Value::from(*b),
        Json::Number(n) => match (n.as_i64(), n.as_u64()) {
            (Some(int), _) => Value::from(int),
            (None, Some(int)) => Value::from(int),
            (None, None) => Value::from(n.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => items.iter().map(from_json).collect(),
        Json::Object(map) => Value::from_pairs(map.iter().map(|(k, v)| (k.as_str(), from_json(v)))),
    }
}

/// Writes the result of a `{{ … }}`, containers and floats as Python prints them.
pub(super) fn write(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    match string(state, value)?.as_str() {
        Some(text) => out.write_str(text),
        None => out.write_fmt(format_args!("{value}")),
    }
    .map_err(Error::from)
}

/// The `string` filter: `str` of a value.
pub(super) fn string(state: &State, value: &Value) -> Result<Value, Error> {
    Ok(match value.kind() {
        ValueKind::String => value.clone(),
        ValueKind::Seq | ValueKind::Map => {
            let mut repr = String::new();
            write_repr(&mut repr, state, value, 0)?;
            Value::from(repr)
        }
        ValueKind::Number if !value.is_integer() => Value::from(float(value)?),
        ValueKind::Invalid => {
            let reason = value.to_string();
            return Err(Error::new(ErrorKind::InvalidOperation, reason));
        }
        _ => Value::from(value.to_string()),
    })
}

/// `repr` of a value.
fn write_repr(out: &mut String, state: &State, value: &Value, depth: usize) -> Result<(), Error> {
    check_depth(state, depth)?;
    match value.kind() {
        ValueKind::String => quote(out, value.as_str().unwrap_or_default()),
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::Number if !value.is_integer() => out.push_str(&float(value)?),
        ValueKind::Seq => {
            let tuple = value.is_tuple();
            out.push(if tuple { '(' } else { '[' });
            let mut count = 0;
            for item in value.try_iter()? {
                if count > 0 {
                    out.push_str(", ");
                }
                write_repr(out, state, &item, depth + 1)?;
                count += 1;
            }
            if tuple && count == 1 {
                out.push(',');
            }
            out.push(if tuple { ')' } else { ']' });
        }
        ValueKind::Map => {
            out.push('{');
            for (index, key) in value.try_iter()?.enumerate() {
                if index > 0 {
                    out.push_str(", ");
                }
                write_repr(out, state, &key, depth + 1)?;
                out.push_str(": ");
                write_repr(out, state, &value.get_item(&key)?, depth + 1)?;
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

fn check_depth(state: &State, depth: usize) -> Result<(), Error> {
    // Paid per value: a value may hold another many times over.
    state.consume_fuel(1)?;
    if depth > DEPTH_MAX {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("value is nested deeper than {DEPTH_MAX} levels"),
        ));
    }
    Ok(())
}

fn quote(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == quote => out.extend(['\\', c]),
            c if c < ' ' || ('\u{7f}'..='\u{a0}').contains(&c) || c == '\u{ad}' => {
                out.push_str("\\x");
                let digit = |value| char::from_digit(value, 16);
                out.extend(digit(c as u32 >> 4).into_iter().chain(digit(c as u32 & 0xf)));
            }
            c => out.push(c),
        }
    }
    out.push(quote);
}

/// A float as `repr` gives it: shortest digits, exponent outside 1e-4..1e16.
fn float(value: &Value) -> Result<String, Error> {
    let value = f64::try_from(value.clone())?;
    if value.is_nan() {
        return Ok("nan".to_owned());
    }
    if value.is_infinite() {
        return Ok(if value > 0.0 { "inf" } else { "-inf" }.to_owned());
    }
    let short = format!("{value:e}");
    let (digits, exponent) = short.split_once('e').unwrap_or((short.as_str(), "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = value.to_string();
        return Ok(if plain.contains('.') { plain } else { plain + ".0" });
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    Ok(format!("{digits}e{sign}{:02}", exponent.abs()))
}

/// The `sequence` test: whatever has a length and items, strings and maps included.
pub(super) fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map)
}

/// The `iterable` test.
pub(super) fn is_iterable(value: &Value) -> bool {
    is_sequence(value) || matches!(value.kind(), ValueKind::Iterable | ValueKind::Undefined)
}

/// The `int` filter: what is no number becomes the default.
pub(super) fn int(value: &Value, default: Option<Value>) -> Value {
    let parsed = match value.as_str() {
        Some(text) => {
            let text = text.trim();
            let whole = text.parse::<i64>().ok();
            whole.or_else(|| text.parse::<f64>().ok().and_then(truncate))
        }
        None if value.is_integer() => return value.clone(),
        None => f64::try_from(value.clone()).ok().and_then(truncate),
    };
    let default = default.unwrap_or_else(|| Value::from(0));
    parsed.map_or(default, Value::from)
}

fn truncate(number: f64) -> Option<i64> {
    (number.abs() < i64::MAX as f64).then_some(number as i64)
}

/// The `float` filter: what is no number becomes the default.
pub(super) fn to_float(value: &Value, default: Option<Value>) -> Value {
    let parsed = match value.as_str() {
        Some(text) => text.trim().parse::<f64>().ok(),
        None => f64::try_from(value.clone()).ok(),
    };
    let default = default.unwrap_or_else(|| Value::from(0.0));
    parsed.map_or(default, Value::from)
}

/// How `json.dumps` was asked to write.
struct Style {
    ensure_ascii: bool,
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

/// The `tojson` filter of `transformers`: `json.dumps` with non-ASCII text as it is, and no HTML
/// escapes.
#[expect(clippy::needless_pass_by_value, reason = "a filter owns its arguments")]
pub(super) fn tojson(
    state: &State,
    value: &Value,
    positional: Rest<Value>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let mut positional = positional.0.into_iter();
    let mut argument = |name: &str| -> Result<Option<Value>, Error> {
        match positional.next() {
            Some(value) => Ok(Some(value)),
            None => kwargs.get(name),
        }
    };
    let given = |value: Option<Value>| value.filter(|v| !v.is_none() && !v.is_undefined());
    let ensure_ascii = argument("ensure_ascii")?.is_some_and(|v| v.is_true());
    let indent = match given(argument("indent")?) {
        None => None,
        Some(text) if text.as_str().is_some() => text.as_str().map(str::to_owned),
        Some(count) => Some(" ".repeat(usize::try_from(count)?.min(DEPTH_MAX))),
    };
    let separators = given(argument("separators")?);
    let sort_keys = argument("sort_keys")?.is_some_and(|v| v.is_true());
    kwargs.assert_all_used()?;
    let (item_separator, key_separator) = match separators {
        Some(pair) => {
            (pair.get_item_by_index(0)?.to_string(), pair.get_item_by_index(1)?.to_string())
        }
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    let style = Style { ensure_ascii, indent, item_separator, key_separator, sort_keys };
    let mut out = String::new();
    write_json(&mut out, state, value, &style, 0)?;
    Ok(out)
}

fn write_json(
    out: &mut String,
    state: &State,
    value: &Value,
    style: &Style,
    depth: usize,
) -> Result<(), Error> {
    check_depth(state, depth)?;
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number if value.is_integer() => out.push_str(&value.to_string()),
        ValueKind::Number => out.push_str(&json_float(value)?),
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            state.consume_fuel(text.len() as u64 / 64)?;
            write_json_string(out, text, style.ensure_ascii);
        }
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            let mut empty = true;
            for item in value.try_iter()? {
                separate(out, style, depth, !empty);
                empty = false;
                write_json(out, state, &item, style, depth + 1)?;
            }
            close(out, style, depth, !empty, ']');
        }
        ValueKind::Map => {
            out.push('{');
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            if style.sort_keys {
                keys.sort();
            }
            for (index, key) in keys.iter().enumerate() {
                separate(out, style, depth, index > 0);
                write_json_string(out, &json_key(key)?, style.ensure_ascii);
                out.push_str(&style.key_separator);
                write_json(out, state, &value.get_item(key)?, style, depth + 1)?;
            }
            close(out, style, depth, !keys.is_empty(), '}');
        }
        kind => {
            return Err(Error::new(
                ErrorKind::BadSerialization,
                format!("{kind} value is not JSON serializable"),
            ));
        }
    }
    Ok(())
}

fn json_float(value: &Value) -> Result<String, Error> {
    Ok(match float(value)?.as_str() {
        "nan" => "NaN".to_owned(),
        "inf" => "Infinity".to_owned(),
        "-inf" => "-Infinity".to_owned(),
        plain => plain.to_owned(),
    })
}

fn json_key(key: &Value) -> Result<String, Error> {
    Ok(match key.kind() {
        ValueKind::None => "null".to_owned(),
        ValueKind::Bool => key.to_string().to_lowercase(),
        ValueKind::Number if !key.is_integer() => json_float(key)?,
        ValueKind::Number | ValueKind::String => key.to_string(),
        kind => {
            return Err(Error::new(
                ErrorKind::BadSerialization,
                format!("expected a JSON key, found {kind}"),
            ));
        }
    })
}

/// Begins an item of a list or object.
fn separate(out: &mut String, style: &Style, depth: usize, after_another: bool) {
    if after_another {
        out.push_str(&style.item_separator);
    }
    new_line(out, style, depth + 1);
}

fn close(out: &mut String, style: &Style, depth: usize, has_items: bool, end: char) {
    if has_items {
        new_line(out, style, depth);
    }
    out.push(end);
}

fn new_line(out: &mut String, style: &Style, depth: usize) {
    if let Some(indent) = &style.indent {
        out.push('\n');
        out.push_str(&indent.repeat(depth));
    }
}

fn write_json_string(out: &mut String, text: &str, ensure_ascii: bool) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if c < ' ' || ensure_ascii && c > '~' => {
                push_json_escape(out, c);
            }
            c => out.push(c),
        }
    }
    out.push('"');
}
