//! The files that rules look at.

use crate::project;
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

/// Files by path from the root, with `/` between folders.
pub(crate) type Files = BTreeMap<String, File>;

/// One file.
#[derive(Clone, Debug)]
pub(crate) struct File {
    pub(crate) bytes: u64,
    /// Empty where it is no UTF-8, or too large to be a text.
    pub(crate) text: String,
}

/// Larger files are data.
const TEXT_BYTES_MAX: u64 = 1 << 20;
/// Folders that hold nothing of ours where there is no git to say so.
const NOT_OURS: [&str; 3] = [".git", "target", "node_modules"];

/// What git tracks or would track; without git every file that is no build output.
pub(crate) fn files(root: &Path) -> Result<Files> {
    let mut names = git_names(root).unwrap_or_default();
    // An unpacked archive may lie inside a foreign repository that ignores it.
    if !names.iter().any(|name| name == "Cargo.toml") {
        names.clear();
        walk(root, "", &mut names)?;
    }
    let mut files = Files::new();
    for name in names {
        let path = root.join(&name);
        // A file that was deleted is still in the index.
        let Ok(about) = fs::metadata(&path) else { continue };
        let text = if about.len() <= TEXT_BYTES_MAX {
            fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?
        } else {
            Vec::new()
        };
        let text = String::from_utf8(text).unwrap_or_default();
        files.insert(name, File { bytes: about.len(), text });
    }
    Ok(files)
}

fn git_names(root: &Path) -> Result<Vec<String>> {
    let mut git = Command::new("git");
    git.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
    // A checkout of another owner is refused otherwise, as in a container.
    git.env("GIT_CONFIG_COUNT", "1");
    git.env("GIT_CONFIG_KEY_0", "safe.directory").env("GIT_CONFIG_VALUE_0", "*");
    let output = project::capture(git.current_dir(root).stdin(Stdio::null()))?;
    let text = String::from_utf8(output)?;
    Ok(text.split('\0').filter(|name| !name.is_empty()).map(str::to_owned).collect())
}

fn walk(root: &Path, folder: &str, names: &mut Vec<String>) -> Result<()> {
    for entry in fs::read_dir(root.join(folder))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = if folder.is_empty() { name.clone() } else { format!("{folder}/{name}") };
        match entry.file_type()? {
            kind if kind.is_dir() && !NOT_OURS.contains(&name.as_str()) => {
                walk(root, &path, names)?;
            }
            kind if kind.is_file() => names.push(path),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_found_without_git() {
        let root = tempfile::tempdir().expect("a folder");
        for name in ["Cargo.toml", "target/x.rs", "src/lib.rs"] {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().expect("in a folder")).expect("writable");
            fs::write(path, name).expect("writable");
        }
        let files = files(root.path()).expect("readable");
        assert_eq!(files.keys().collect::<Vec<_>>(), ["Cargo.toml", "src/lib.rs"]);
        assert_eq!(
            (files["Cargo.toml"].bytes, files["Cargo.toml"].text.as_str()),
            (10, "Cargo.toml")
        );
    }
}
