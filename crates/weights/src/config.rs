//! Typed access to `config.json`, with errors that name the field, the file and the value.

use serde_json::{Map, Value};

use crate::error::WeightsError;

/// Largest count that a configuration may give: above it something is wrong with the file.
const COUNT_MAX: u64 = 1 << 31;
/// Characters of a value that a message shows.
const SHOWN: usize = 60;

const COUNT: &str = "an unsigned integer up to `2147483648`";
const NUMBER: &str = "a number";
const FLAG: &str = "`true` or `false`";
const TEXT: &str = "a string";
const OBJECT: &str = "an object";
const COUNTS: &str = "an array of unsigned integers up to `2147483648`";
const TEXTS: &str = "an array of strings";

/// An object of a configuration file. `null` counts as absent everywhere.
///
/// Each type has three getters: `x(key)` needs the field, `x_or(key, default)` takes a default
/// when it is absent, `opt_x(key)` says whether it is there. A present field of the wrong type or
/// out of range is an error in all three.
#[derive(Clone, Debug)]
pub struct ConfigView<'a> {
    fields: &'a Map<String, Value>,
    file: &'a str,
    /// Keys of the parents with a dot behind each.
    parents: String,
}

impl<'a> ConfigView<'a> {
    /// Looks at the outermost object of `file`.
    ///
    /// # Errors
    ///
    /// [`WeightsError::NotAnObject`].
    pub fn new(value: &'a Value, file: &'a str) -> Result<Self, WeightsError> {
        let Value::Object(fields) = value else {
            return Err(WeightsError::NotAnObject { path: file.into(), found: type_name(value) });
        };
        Ok(Self { fields, file, parents: String::new() })
    }

    /// The file that messages name.
    pub fn file(&self) -> &'a str {
        self.file
    }

    /// The value of a field, `null` counting as absent.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.fields.get(key).filter(|value| !value.is_null())
    }

    /// Whether a field is there and not `null`.
    pub fn has(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    /// Names of all fields, in the order of the file.
    pub fn keys(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        self.fields.keys().map(String::as_str)
    }

    /// The key as messages show it: with its parents.
    pub fn full_key(&self, key: &str) -> String {
        format!("{}{key}", self.parents)
    }

    /// An error for a field whose value has the right type and makes no sense.
    pub fn invalid(&self, key: &str, expected: &'static str) -> WeightsError {
        match self.get(key) {
            Some(value) => self.wrong(key, value, expected),
            None => self.missing(key, expected),
        }
    }

    fn wrong(&self, key: &str, value: &Value, expected: &'static str) -> WeightsError {
        WeightsError::ConfigValue {
            file: self.file.to_owned(),
            key: self.full_key(key),
            found: shown(value),
            expected,
        }
    }

    fn missing(&self, key: &str, expected: &'static str) -> WeightsError {
        let (file, key) = (self.file.to_owned(), self.full_key(key));
        WeightsError::ConfigMissing { file, key, expected }
    }

    fn optional<T>(
        &self,
        key: &str,
        expected: &'static str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, WeightsError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match read(value) {
                Some(typed) => Ok(Some(typed)),
                None => Err(self.wrong(key, value, expected)),
            },
        }
    }

    fn required<T>(
        &self,
        key: &str,
        expected: &'static str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<T, WeightsError> {
        self.optional(key, expected, read)?.ok_or_else(|| self.missing(key, expected))
    }

    /// The one value under several spellings; two that disagree are an error.
    fn any<T: PartialEq>(
        &self,
        keys: &[&str],
        expected: &'static str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, WeightsError> {
        let mut first: Option<(&str, T)> = None;
        for key in keys {
            let Some(value) = self.optional(key, expected, &read)? else { continue };
            match &first {
                Some((other, known)) if *known != value => {
                    let text = |key| self.get(key).map(shown).unwrap_or_default();
                    return Err(WeightsError::ConfigContradiction {
                        file: self.file.to_owned(),
                        first: self.full_key(other),
                        first_value: text(other),
                        second: self.full_key(key),
                        second_value: text(key),
                    });
                }
                Some(_) => {}
                None => first = Some((key, value)),
            }
        }
        Ok(first.map(|(_, value)| value))
    }

    /// An object inside this one.
    ///
    /// # Errors
    ///
    /// [`WeightsError::ConfigMissing`], [`WeightsError::ConfigValue`].
    pub fn object(&self, key: &str) -> Result<ConfigView<'a>, WeightsError> {
        self.opt_object(key)?.ok_or_else(|| self.missing(key, OBJECT))
    }

    /// An object inside this one, if it is there.
    ///
    /// # Errors
    ///
    /// [`WeightsError::ConfigValue`].
    pub fn opt_object(&self, key: &str) -> Result<Option<ConfigView<'a>>, WeightsError> {
        let fields = self.optional(key, OBJECT, Value::as_object)?;
        let parents = format!("{}{key}.", self.parents);
        Ok(fields.map(|fields| ConfigView { fields, file: self.file, parents }))
    }
}

/// The getters of one type.
macro_rules! getters {
    ($what:literal, $type:ty, $read:expr, $expected:expr,
     $required:ident, $or:ident, $optional:ident, $any:ident, $opt_any:ident) => {
        impl<'a> ConfigView<'a> {
            #[doc = concat!("The ", $what, " under `key`.")]
            ///
            /// # Errors
            ///
            /// [`WeightsError::ConfigMissing`], [`WeightsError::ConfigValue`].
            pub fn $required(&self, key: &str) -> Result<$type, WeightsError> {
                self.required(key, $expected, $read)
            }

            #[doc = concat!("The ", $what, " under `key`, or `default`.")]
            ///
            /// # Errors
            ///
            /// [`WeightsError::ConfigValue`].
            pub fn $or(&self, key: &str, default: $type) -> Result<$type, WeightsError> {
                Ok(self.optional(key, $expected, $read)?.unwrap_or(default))
            }

            #[doc = concat!("The ", $what, " under `key`, if it is there.")]
            ///
            /// # Errors
            ///
            /// [`WeightsError::ConfigValue`].
            pub fn $optional(&self, key: &str) -> Result<Option<$type>, WeightsError> {
                self.optional(key, $expected, $read)
            }

            #[doc = concat!("The ", $what, " under any of several spellings.")]
            ///
            /// # Errors
            ///
            /// [`WeightsError::ConfigMissing`] under the first spelling,
            /// [`WeightsError::ConfigValue`], and [`WeightsError::ConfigContradiction`] when two
            /// spellings are present with different values.
            pub fn $any(&self, keys: &[&str]) -> Result<$type, WeightsError> {
                self.any(keys, $expected, $read)?
                    .ok_or_else(|| self.missing(keys.first().unwrap_or(&""), $expected))
            }

            #[doc = concat!("The ", $what, " under any of several spellings, if one is there.")]
            ///
            /// # Errors
            ///
            /// [`WeightsError::ConfigValue`], [`WeightsError::ConfigContradiction`].
            pub fn $opt_any(&self, keys: &[&str]) -> Result<Option<$type>, WeightsError> {
                self.any(keys, $expected, $read)
            }
        }
    };
}

getters!("count", usize, as_count, COUNT, usize, usize_or, opt_usize, usize_any, opt_usize_any);
getters!("number", f64, Value::as_f64, NUMBER, f64, f64_or, opt_f64, f64_any, opt_f64_any);
getters!("flag", bool, Value::as_bool, FLAG, bool, bool_or, opt_bool, bool_any, opt_bool_any);
getters!("string", &'a str, Value::as_str, TEXT, str, str_or, opt_str, str_any, opt_str_any);
getters!(
    "array of counts",
    Vec<usize>,
    |value| as_array(value, as_count),
    COUNTS,
    usizes,
    usizes_or,
    opt_usizes,
    usizes_any,
    opt_usizes_any
);
getters!(
    "array of strings",
    Vec<&'a str>,
    |value| as_array(value, Value::as_str),
    TEXTS,
    strs,
    strs_or,
    opt_strs,
    strs_any,
    opt_strs_any
);

fn as_count(value: &Value) -> Option<usize> {
    value.as_u64().filter(|n| *n <= COUNT_MAX).and_then(|n| usize::try_from(n).ok())
}

fn as_array<'a, T>(value: &'a Value, read: impl Fn(&'a Value) -> Option<T>) -> Option<Vec<T>> {
    value.as_array()?.iter().map(read).collect()
}

/// The type of a value, with its article.
pub(crate) fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "`null`",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// A value as JSON, cut when long.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(SHOWN) {
        Some((cut, _)) => format!("{}…", &text[..cut]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn expect<T: std::fmt::Debug>(result: Result<T, WeightsError>, message: &str) {
        assert_eq!(result.unwrap_err().to_string(), message);
    }

    #[test]
    fn typed_fields_and_defaults() {
        let value = json!({
            "n": 3, "x": 1e-6, "whole": 10000, "flag": true, "name": "silu", "nothing": null,
            "sizes": [1, 2], "names": ["a", "b"], "inner": {"deep": {"n": 4}}, "top": 2147483648u64
        });
        let view = ConfigView::new(&value, "config.json").unwrap();
        assert_eq!(view.usize("n").unwrap(), 3);
        assert_eq!(view.usize("top").unwrap(), 1 << 31);
        assert_eq!(view.usize_or("m", 7).unwrap(), 7);
        assert_eq!(view.usize_or("nothing", 7).unwrap(), 7);
        assert_eq!(view.opt_usize("nothing").unwrap(), None);
        assert_eq!(view.f64("x").unwrap(), 1e-6);
        assert_eq!(view.f64("whole").unwrap(), 10000.0);
        assert!(view.bool("flag").unwrap() && !view.bool_or("other", false).unwrap());
        assert_eq!(view.str("name").unwrap(), "silu");
        assert_eq!(view.usizes("sizes").unwrap(), [1, 2]);
        assert_eq!(view.strs("names").unwrap(), ["a", "b"]);
        assert_eq!(view.object("inner").unwrap().object("deep").unwrap().usize("n").unwrap(), 4);
        assert!(view.opt_object("nothing").unwrap().is_none());
        assert!(view.has("n") && !view.has("nothing"));
        assert_eq!(view.keys().next(), Some("n"));
    }

    #[test]
    fn errors_name_field_file_and_value() {
        let value = json!({
            "num_experts": "x", "minus": -1, "half": 0.5, "large": 2147483649u64, "eps": "1e-6",
            "flag": 1, "act": 3, "sizes": [1, -2], "inner": {"n": []}, "nothing": null,
            "long": "y".repeat(100)
        });
        let view = ConfigView::new(&value, "config.json").unwrap();
        let count = "expected an unsigned integer up to `2147483648`";
        expect(
            view.usize("num_experts"),
            &format!("`num_experts` in `config.json` is `\"x\"`, {count}"),
        );
        expect(view.usize_or("minus", 1), &format!("`minus` in `config.json` is `-1`, {count}"));
        expect(view.opt_usize("half"), &format!("`half` in `config.json` is `0.5`, {count}"));
        let message = format!("`large` in `config.json` is `2147483649`, {count}");
        expect(view.usize_any(&["missing", "large"]), &message);
        expect(view.f64("eps"), "`eps` in `config.json` is `\"1e-6\"`, expected a number");
        expect(view.bool("flag"), "`flag` in `config.json` is `1`, expected `true` or `false`");
        expect(view.str("act"), "`act` in `config.json` is `3`, expected a string");
        expect(view.object("act"), "`act` in `config.json` is `3`, expected an object");
        let inner = view.object("inner").unwrap();
        expect(inner.usize("n"), &format!("`inner.n` in `config.json` is `[]`, {count}"));
        expect(inner.usize("m"), &format!("`inner.m` is missing from `config.json`, {count}"));
        expect(view.str("nothing"), "`nothing` is missing from `config.json`, expected a string");
        assert!(view.usizes("sizes").unwrap_err().to_string().contains("`[1,-2]`"));
        let long = view.usize("long").unwrap_err().to_string();
        assert!(long.contains("yyy…`"), "{long}");
        expect(
            Err::<(), _>(view.invalid("act", "`silu`")),
            "`act` in `config.json` is `3`, expected `silu`",
        );
        expect(
            ConfigView::new(&json!([]), "config.json"),
            "`config.json` is an array, expected an object",
        );
    }

    #[test]
    fn aliases_may_repeat_but_not_contradict() {
        let value = json!({"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 16});
        let view = ConfigView::new(&value, "config.json").unwrap();
        assert_eq!(view.usize_any(&["num_experts", "num_local_experts"]).unwrap(), 8);
        assert_eq!(view.usize_any(&["none", "n_routed_experts"]).unwrap(), 16);
        assert_eq!(view.opt_usize_any(&["none"]).unwrap(), None);
        expect(
            view.usize_any(&["num_local_experts", "n_routed_experts"]),
            "`num_local_experts` is `8` but `n_routed_experts` is `16` in `config.json`",
        );
        assert!(view.usize_any(&["none", "never"]).unwrap_err().to_string().contains("`none`"));
    }
}
