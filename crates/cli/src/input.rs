//! Reading what users give: token ids, texts, prompts.

use crate::output::Ui;
use anyhow::{Context, Result, anyhow, bail};
use serde_json::Value;
use std::io::{IsTerminal, Read};
use std::path::Path;

/// Token ids from a JSON array of integers; `-` is stdin.
pub(crate) fn ids(path: &Path, ui: Ui) -> Result<Vec<u32>> {
    let name = path.display();
    let bytes = bytes(path, "token ids", ui)?;
    let value: Value =
        serde_json::from_slice(&bytes).with_context(|| format!("`{name}` is not JSON\n{HINT}"))?;
    let Value::Array(list) = value else {
        bail!("`{name}` holds no array\n{HINT}");
    };
    let id = |(index, value): (usize, &Value)| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| anyhow!("`{name}`: entry {index} is `{value}`, no token id\n{HINT}"))
    };
    list.iter().enumerate().map(id).collect()
}

const HINT: &str = "hint: expected token ids as `[1, 2, 3]`";

/// A text file; `-` is stdin.
pub(crate) fn text(path: &Path, ui: Ui) -> Result<String> {
    into_text(bytes(path, "a text", ui)?, &format!("`{}`", path.display()))
}

/// All of stdin as a prompt, without the newline that ends its last line.
pub(crate) fn prompt(ui: Ui) -> Result<String> {
    let mut text = into_text(stdin("a prompt", ui)?, "stdin")?;
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    Ok(text)
}

/// More than any context holds; a source without an end is refused instead of read for ever.
const BYTES_MAX: u64 = 1 << 30;

fn bytes(path: &Path, what: &str, ui: Ui) -> Result<Vec<u8>> {
    if path == Path::new("-") {
        return stdin(what, ui);
    }
    let name = format!("`{}`", path.display());
    let file = std::fs::File::open(path).with_context(|| format!("could not read {name}"))?;
    limited(file, &name)
}

fn stdin(what: &str, ui: Ui) -> Result<Vec<u8>> {
    let stdin = std::io::stdin().lock();
    if stdin.is_terminal() {
        ui.note(format_args!("type {what}; Ctrl-D on a line of its own ends it"));
    }
    limited(stdin, "stdin")
}

fn limited(source: impl Read, name: &str) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    source
        .take(BYTES_MAX + 1)
        .read_to_end(&mut bytes)
        .with_context(|| format!("could not read {name}"))?;
    if bytes.len() as u64 > BYTES_MAX {
        bail!("{name} has more than {BYTES_MAX} bytes, expected a text or token ids");
    }
    Ok(bytes)
}

fn into_text(bytes: Vec<u8>, name: &str) -> Result<String> {
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        anyhow!("{name} is not UTF-8 text: byte {at} begins no character")
    })
}
