//! From a MODEL argument to an opened checkpoint with its tokenizer.

use crate::args::usage;
use crate::output::Ui;
use crate::tiny;
use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use etcetera::{BaseStrategy, base_strategy::choose_base_strategy};
use serde_json::Value;
use snowmelt_text::{ChatTemplate, TextError, Tokenizer};
use snowmelt_weights::{Checkpoint, WeightsError};
use std::path::{Path, PathBuf};

/// Which model.
#[derive(Clone, Debug, Args)]
pub(crate) struct ModelArg {
    /// Folder of the model, or `tiny` for the one inside this program
    #[arg(value_name = "MODEL")]
    positional: Option<String>,
    /// The same as MODEL
    #[arg(short = 'm', long = "model", value_name = "MODEL", id = "model_flag")]
    flag: Option<String>,
}

impl ModelArg {
    /// The model, for commands whose only positional argument it is.
    pub(crate) fn get(&self) -> Result<&str> {
        match (&self.positional, &self.flag) {
            (Some(_), Some(_)) => Err(usage("MODEL and --model both name a model")),
            (Some(name), None) | (None, Some(name)) => Ok(name),
            (None, None) => Err(usage("which MODEL?")),
        }
    }

    /// The model, and what stood in its place if `--model` names it.
    pub(crate) fn split(&self) -> Result<(&str, Option<&str>)> {
        match &self.flag {
            Some(model) if self.positional.as_ref() == Some(model) => Err(usage(format_args!(
                "`{model}` is named twice: with --model no MODEL comes first"
            ))),
            Some(model) => Ok((model, self.positional.as_deref())),
            None => Ok((self.get()?, None)),
        }
    }
}

/// Where models are unpacked: `$SNOWMELT_HOME`, else `snowmelt` in the user's data folder.
pub(crate) fn data_folder() -> Result<PathBuf> {
    home().map_or_else(|| Ok(user_folders()?.data_dir().join("snowmelt")), Ok)
}

/// Where histories lie: `$SNOWMELT_HOME`, else `snowmelt` in the user's state folder.
pub(crate) fn state_folder() -> Result<PathBuf> {
    let of_user = || {
        let folders = user_folders()?;
        Ok(folders.state_dir().unwrap_or_else(|| folders.data_dir()).join("snowmelt"))
    };
    home().map_or_else(of_user, Ok)
}

fn home() -> Option<PathBuf> {
    std::env::var_os("SNOWMELT_HOME").filter(|home| !home.is_empty()).map(PathBuf::from)
}

fn user_folders() -> Result<impl BaseStrategy> {
    let folders = choose_base_strategy().context("there is no home folder")?;
    let home = folders.home_dir();
    ensure!(home.is_absolute(), "`HOME` is `{}`, expected an absolute path", home.display());
    Ok(folders)
}

/// Opens a folder, or the built-in model.
pub(crate) fn open(name: &str, ui: Ui) -> Result<Checkpoint> {
    if name == tiny::NAME && tiny::is_built_in() {
        return tiny::open(ui);
    }
    match Checkpoint::open(Path::new(name)) {
        Err(WeightsError::NotFound { .. }) => Err(unknown(name)),
        result => Ok(result?),
    }
}

fn unknown(name: &str) -> anyhow::Error {
    let near = near_names(Path::new(name));
    let hint = match near.as_slice() {
        [] => String::new(),
        names => format!("\nhint: did you mean {}?", names.join(" or ")),
    };
    let built_in = if tiny::is_built_in() {
        "or `tiny`, the one inside this program"
    } else {
        "this program was built without one inside"
    };
    anyhow!(
        "there is no model `{name}`{hint}\nhint: MODEL is the folder of a model on this machine, \
         {built_in}; nothing is downloaded"
    )
}

/// Names beside the path, and of the built-in model, that look like it.
fn near_names(path: &Path) -> Vec<String> {
    let Some(wanted) = path.file_name().map(|name| name.to_string_lossy().to_lowercase()) else {
        return Vec::new();
    };
    let parent = path.parent().unwrap_or(Path::new(""));
    let here = if parent == Path::new("") { Path::new(".") } else { parent };
    let entries = std::fs::read_dir(here).into_iter().flatten().filter_map(Result::ok);
    let folders = entries.filter(|entry| entry.path().is_dir());
    let names = folders.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut near: Vec<(usize, String)> = names
        .filter(|name| !name.starts_with('.'))
        .map(|name| (distance(&wanted, &name.to_lowercase()), parent.join(name)))
        .map(|(far, path)| (far, format!("`{}`", path.display())))
        .collect();
    if tiny::is_built_in() {
        near.push((distance(&wanted, tiny::NAME), format!("`{}`", tiny::NAME)));
    }
    near.retain(|(far, _)| *far <= (wanted.chars().count() / 3).clamp(1, 4));
    near.sort();
    near.dedup();
    near.into_iter().take(3).map(|(_, name)| name).collect()
}

/// Letters to insert, remove or replace (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, letter) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, other) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(letter != *other);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(row[j + 1] + 1);
        }
    }
    row[b.len()]
}

/// The tokenizer, where the model has one.
pub(crate) fn tokenizer(checkpoint: &Checkpoint) -> Result<Option<Tokenizer>> {
    let Some(bytes) = checkpoint.sidecar("tokenizer.json")? else { return Ok(None) };
    let origin = format!("{}/tokenizer.json", checkpoint.origin());
    Ok(Some(Tokenizer::from_bytes(&bytes, &origin)?))
}

/// The tokenizer, for commands that cannot do without.
pub(crate) fn need_tokenizer(checkpoint: &Checkpoint) -> Result<Tokenizer> {
    tokenizer(checkpoint)?.ok_or_else(|| {
        anyhow!(
            "`{}` has no `tokenizer.json`, so it cannot read text\n\
             hint: give token ids with `--ids FILE`, or copy the file there from where the model \
             was published",
            checkpoint.origin()
        )
    })
}

/// The chat template, where the model has one.
pub(crate) fn template(checkpoint: &Checkpoint) -> Result<Option<ChatTemplate>> {
    let config = checkpoint.sidecar("tokenizer_config.json")?;
    let jinja = checkpoint.sidecar("chat_template.jinja")?;
    match ChatTemplate::discover(config.as_deref(), jinja.as_deref()) {
        Err(TextError::TemplateMissing) => Ok(None),
        result => Ok(Some(result?)),
    }
}

/// `generation_config.json`, where the model has one.
pub(crate) fn generation_config(checkpoint: &Checkpoint) -> Result<Option<Value>> {
    let Some(bytes) = checkpoint.sidecar("generation_config.json")? else { return Ok(None) };
    let value = serde_json::from_slice(&bytes)
        .with_context(|| format!("`{}/generation_config.json` is not JSON", checkpoint.origin()))?;
    Ok(Some(value))
}

#[cfg(test)]
mod tests {
    use super::distance;

    #[test]
    fn distances_are_of_levenshtein() {
        let cases =
            [("", "", 0), ("tiny", "tiny", 0), ("tinny", "tiny", 1), ("kitten", "sitting", 3)];
        for (a, b, wanted) in cases {
            assert_eq!(distance(a, b), wanted, "{a} {b}");
            assert_eq!(distance(b, a), wanted, "{b} {a}");
        }
    }
}
