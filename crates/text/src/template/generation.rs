//! The `{% generation %}` tag of `transformers`, which marks what the assistant wrote.
//!
//! Only training needs the mark. The tag is replaced by `{% with %}`, which, like the original,
//! opens a scope and prints its body; white-space control and line numbers stay as they are.

use std::borrow::Cow;

/// Replaces the tags; everything else, strings and comments included, is untouched.
pub(super) fn strip(template: &str) -> String {
    let mut out = String::with_capacity(template.len());
    let mut rest = template;
    while let Some(at) = rest.find('{') {
        let (text, from) = rest.split_at(at);
        out.push_str(text);
        let (piece, after) = construct(from);
        out.push_str(&piece);
        rest = after;
    }
    out.push_str(rest);
    out
}

/// Splits off what begins at an opening brace.
fn construct(from: &str) -> (Cow<'_, str>, &str) {
    let length = match from.get(1..2) {
        Some("#") => from.find("#}").map(|end| end + 2),
        Some("{") => end_of(from, "}}"),
        Some("%") => {
            let end = end_of(from, "%}");
            match tag_name(from) {
                "raw" => end_of_raw(from).or(end),
                name @ ("generation" | "endgeneration") => {
                    let with = name.replace("generation", "with");
                    let end = end.unwrap_or(from.len());
                    let tag = from[..end].replacen(name, &with, 1);
                    return (Cow::Owned(tag), &from[end..]);
                }
                _ => end,
            }
        }
        _ => Some(1),
    };
    // Without an end the parser will complain; it gets the text as it is.
    let (piece, after) = from.split_at(length.unwrap_or(from.len()));
    (Cow::Borrowed(piece), after)
}

/// The word after `{%`.
fn tag_name(tag: &str) -> &str {
    let inside = tag[2..].trim_start_matches(['-', '+']).trim_start();
    let end = inside.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(inside.len());
    &inside[..end]
}

/// Where the construct ends, quotes and braces inside it respected.
fn end_of(from: &str, end: &str) -> Option<usize> {
    let mut quote = None;
    let mut escaped = false;
    let mut braces = 0_usize;
    for (at, c) in from.char_indices().skip(2) {
        match quote {
            Some(_) if escaped => escaped = false,
            Some(_) if c == '\\' => escaped = true,
            Some(open) if c == open => quote = None,
            Some(_) => {}
            None if braces == 0 && from[at..].starts_with(end) => return Some(at + end.len()),
            None => match c {
                '"' | '\'' => quote = Some(c),
                '{' => braces += 1,
                '}' => braces = braces.saturating_sub(1),
                _ => {}
            },
        }
    }
    None
}

/// Where the `endraw` tag of a raw block ends.
fn end_of_raw(from: &str) -> Option<usize> {
    let mut at = end_of(from, "%}")?;
    loop {
        at += from[at..].find("{%")?;
        if tag_name(&from[at..]) == "endraw" {
            return from[at..].find("%}").map(|end| at + end + 2);
        }
        at += 2;
    }
}

#[cfg(test)]
mod tests {
    use super::strip;

    #[test]
    fn replaces_tags_and_nothing_else() {
        let cases = [
            ("{% generation %}a{% endgeneration %}", "{% with %}a{% endwith %}"),
            ("{%- generation -%}a{%+ endgeneration+%}", "{%- with -%}a{%+ endwith+%}"),
            ("{# {% generation %} #}", "{# {% generation %} #}"),
            ("{{ '{% generation %}' }}", "{{ '{% generation %}' }}"),
            ("{% set generation = 1 %}", "{% set generation = 1 %}"),
            (
                "{% raw %}{% generation %}{% endraw %}{% generation %}",
                "{% raw %}{% generation %}{% endraw %}{% with %}",
            ),
            ("{{ {'a': {}} }}{%generation%}", "{{ {'a': {}} }}{%with%}"),
            ("{ {% generation", "{ {% with"),
            ("{% 'ä", "{% 'ä"),
        ];
        for (template, expected) in cases {
            assert_eq!(strip(template), expected, "{template}");
        }
    }
}
