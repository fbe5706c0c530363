//! Python methods that templates call on strings, lists and dicts.

use minijinja::value::{Kwargs, Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;

/// Calls a method that the value itself does not have.
pub(super) fn call(
    state: &mut State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let own = match (value.kind(), value.as_str()) {
        (ValueKind::String, Some(text)) => string_method(text, method, args)?,
        (ValueKind::Seq, _) => sequence_method(value, method, args)?,
        _ => None,
    };
    match own {
        Some(result) => Ok(result),
        None => pycompat::unknown_method_callback(state, value, method, args),
    }
}

fn string_method(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let (head, tail) = ((text, "", ""), ("", "", text));
    Ok(Some(match method {
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "partition" => {
            let (separator,): (&str,) = from_args(args)?;
            let parts = text.split_once(separator);
            triple(parts.map_or(head, |(before, after)| (before, separator, after)))
        }
        "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            let parts = text.rsplit_once(separator);
            triple(parts.map_or(tail, |(before, after)| (before, separator, after)))
        }
        "split" | "rsplit" => {
            let (separator, limit, kwargs): (Option<&str>, Option<i64>, Kwargs) = from_args(args)?;
            let named: Option<&str> = kwargs.get("sep")?;
            let limit = limit.or(kwargs.get("maxsplit")?);
            kwargs.assert_all_used()?;
            split(text, separator.or(named), limit, method == "rsplit")
        }
        // Padding is written before it is paid for.
        "format" if has_long_number(text) => {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                "format width or precision has more than 5 digits",
            ));
        }
        "index" => {
            let (part,): (&str,) = from_args(args)?;
            match text.find(part) {
                Some(at) => Value::from(text[..at].chars().count()),
                None => return Err(not_found("substring")),
            }
        }
        _ => return Ok(None),
    }))
}

fn has_long_number(format: &str) -> bool {
    (format.as_bytes()).split(|byte| !byte.is_ascii_digit()).any(|digits| digits.len() > 5)
}

fn sequence_method(value: &Value, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    if method != "index" {
        return Ok(None);
    }
    let (wanted,): (&Value,) = from_args(args)?;
    match value.try_iter()?.position(|item| item == *wanted) {
        Some(at) => Ok(Some(Value::from(at))),
        None => Err(not_found("value")),
    }
}

fn not_found(what: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("{what} not found"))
}

fn triple((before, separator, after): (&str, &str, &str)) -> Value {
    Value::from(Tuple::from([Value::from(before), Value::from(separator), Value::from(after)]))
}

fn split(text: &str, separator: Option<&str>, limit: Option<i64>, from_right: bool) -> Value {
    let count = match limit {
        Some(limit) if limit >= 0 => usize::try_from(limit).unwrap_or(usize::MAX),
        _ => usize::MAX,
    }
    .saturating_add(1);
    let mut parts: Vec<&str> = match (separator, from_right) {
        (Some(separator), false) => text.splitn(count, separator).collect(),
        (Some(separator), true) => text.rsplitn(count, separator).collect(),
        (None, _) => split_space(text, count, from_right),
    };
    if from_right {
        parts.reverse();
    }
    parts.into_iter().map(Value::from).collect()
}

/// Splits at runs of white space, from either side, the last piece being the rest.
fn split_space(text: &str, count: usize, from_right: bool) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = trim_side(text, from_right);
    while !rest.is_empty() {
        let at = (parts.len() + 1 < count)
            .then(|| {
                if from_right {
                    rest.rfind(char::is_whitespace)
                } else {
                    rest.find(char::is_whitespace)
                }
            })
            .flatten();
        let Some(at) = at else {
            parts.push(rest);
            break;
        };
        let after = at + rest[at..].chars().next().map_or(1, char::len_utf8);
        let (word, more) =
            if from_right { (&rest[after..], &rest[..at]) } else { (&rest[..at], &rest[after..]) };
        parts.push(word);
        rest = trim_side(more, from_right);
    }
    parts
}

fn trim_side(text: &str, end: bool) -> &str {
    if end { text.trim_end() } else { text.trim_start() }
}
