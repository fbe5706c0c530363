//! Reading what users give: token ids, texts, prompts.

use anyhow::{Context, Result, anyhow, bail};
use serde_json::Value;
use std::io::Read;
use std::path::Path;

/// Token ids from a JSON array of integers; `-` is stdin.
pub(crate) fn ids(path: &Path) -> Result<Vec<u32>> {
    let name = path.display();
    let bytes = bytes(path)?;
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
pub(crate) fn text(path: &Path) -> Result<String> {
    into_text(bytes(path)?, &format!("`{}`", path.display()))
}

/// All of stdin as a prompt, without the newline that ends its last line.
pub(crate) fn prompt() -> Result<String> {
    let mut text = into_text(stdin()?, "stdin")?;
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

fn bytes(path: &Path) -> Result<Vec<u8>> {
    if path == Path::new("-") {
        return stdin();
    }
    let name = format!("`{}`", path.display());
    let file = std::fs::File::open(path).with_context(|| format!("could not read {name}"))?;
    limited(file, &name)
}

fn stdin() -> Result<Vec<u8>> {
    limited(std::io::stdin().lock(), "stdin")
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
