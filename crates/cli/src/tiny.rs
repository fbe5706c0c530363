//! The model inside the binary: unpacked once, or used where it is.

use crate::output::Ui;
use anyhow::{Context, Result, ensure};
use snowmelt_weights::{Bytes, Checkpoint};
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

include!(concat!(env!("OUT_DIR"), "/tiny.rs"));

/// What users call it.
pub(crate) const NAME: &str = "tiny";

/// The hidden command that unpacks it.
pub(crate) const COMMAND: &str = "unpack-tiny";
/// Characters of the digest in the folder's name.
const DIGEST_CHARS: usize = 12;
/// After this time a folder that was never finished belongs to nobody.
const ABANDONED: Duration = Duration::from_secs(3600);

/// Whether this binary was built with it.
pub(crate) fn is_built_in() -> bool {
    !FILES.is_empty()
}

fn file(name: &str) -> Option<&'static [u8]> {
    FILES.iter().find(|(n, ..)| *n == name).map(|(_, bytes, _)| *bytes)
}

/// Opens it from the data folder, where its experts can stream; from memory where nothing can be
/// written.
pub(crate) fn open(ui: Ui) -> Result<Checkpoint> {
    ensure!(is_built_in(), "this program was built without the model `{NAME}`");
    let unpacked = crate::model::data_folder()
        .context("there is no folder for models")
        .and_then(|folder| unpacked(&folder.join("models"), Some(ui)));
    match unpacked {
        Ok(folder) => {
            ui.detail(format_args!("`{NAME}` is in {}", folder.display()));
            match Checkpoint::open(&folder) {
                Ok(checkpoint) => return Ok(checkpoint),
                Err(error) => ui.warn(format_args!("{error}\nusing `{NAME}` from memory")),
            }
        }
        Err(error) => ui.note(format_args!(
            "warning: using `{NAME}` from memory, which the budget pays for: {error:#}\n\
             hint: set SNOWMELT_HOME to a folder that can be written"
        )),
    }
    touch();
    let files: Vec<(&str, Bytes)> =
        FILES.iter().map(|(name, bytes, _)| (*name, Bytes::Static(bytes))).collect();
    Ok(Checkpoint::from_memory(NAME, &files)?)
}

/// Reads a byte of every page. Once used they stay in memory, so the plan has to see them now.
fn touch() {
    let bytes = FILES.iter().flat_map(|(_, bytes, _)| bytes.iter().step_by(4096));
    std::hint::black_box(bytes.fold(0_u8, |sum, byte| sum ^ byte));
}

/// Unpacks and ends: what the hidden command does.
pub(crate) fn unpack() -> Result<()> {
    unpacked(&crate::model::data_folder()?.join("models"), None).map(|_| ())
}

/// Lets another process of this program unpack: the pages of the embedded files that it reads
/// would stay in this one's memory, and leave less of the first run's budget to the model.
fn unpack_elsewhere() -> Result<()> {
    let program = std::env::current_exe()?;
    let mut command = Command::new(program);
    command.arg(COMMAND).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    ensure!(command.status()?.success(), "`{COMMAND}` failed");
    Ok(())
}

/// The folder with the files of exactly this binary's model, written first where it is not there
/// or damaged. Any number of processes may do this at once. Without a terminal to talk to, this is
/// the process that was started to write them.
fn unpacked(models: &Path, ui: Option<Ui>) -> Result<PathBuf> {
    let digest = file("manifest.blake3").unwrap_or_default();
    let digest = String::from_utf8_lossy(&digest[..digest.len().min(DIGEST_CHARS)]).into_owned();
    let folder = models.join(format!("{NAME}-{digest}"));
    if is_whole(&folder) {
        return Ok(folder);
    }
    if let Some(ui) = ui.filter(|_| folder.exists()) {
        ui.warn(format_args!("{} is damaged, unpacking `{NAME}` again", folder.display()));
    }
    fs::create_dir_all(models).with_context(|| format!("could not create {}", models.display()))?;
    if ui.is_some() && unpack_elsewhere().is_ok() && is_whole(&folder) {
        return Ok(folder);
    }
    remove_abandoned(models);
    let nanos = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.subsec_nanos());
    let own = models.join(format!(".{NAME}-{digest}-{}-{nanos}", std::process::id()));
    let published = write_all(&own).and_then(|()| publish(&own, &folder));
    if published.is_err() {
        let _ = fs::remove_dir_all(&own);
    }
    published.with_context(|| format!("could not unpack into {}", models.display()))?;
    Ok(folder)
}

/// Whether every file is byte for byte ours. Of ours only the digests are looked at, since pages of
/// the files themselves would stay in memory.
fn is_whole(folder: &Path) -> bool {
    let is_ours = |(name, bytes, digest): &(&str, &[u8], [u8; 32])| -> std::io::Result<bool> {
        let path = folder.join(name);
        let meta = fs::metadata(&path)?;
        if !meta.is_file() || meta.len() != bytes.len() as u64 {
            return Ok(false);
        }
        let mut hasher = blake3::Hasher::new();
        hasher.update_reader(File::open(path)?)?;
        Ok(hasher.finalize() == *digest)
    };
    FILES.iter().all(|file| is_ours(file).unwrap_or(false))
}

fn write_all(own: &Path) -> std::io::Result<()> {
    fs::create_dir(own)?;
    for (name, bytes, _) in FILES {
        let mut file = File::create_new(own.join(name))?;
        file.write_all(bytes)?;
        file.sync_all()?;
    }
    sync_folder(own)
}

/// Renames our folder, unless another process was first; what is there and damaged makes way.
fn publish(own: &Path, folder: &Path) -> std::io::Result<()> {
    for attempt in 0..4 {
        match fs::rename(own, folder) {
            Ok(()) => {
                return folder.parent().map_or(Ok(()), sync_folder);
            }
            Err(error) if !folder.exists() => return Err(error),
            Err(_) if is_whole(folder) => return fs::remove_dir_all(own),
            Err(_) => {}
        }
        let aside = own.with_extension(format!("old{attempt}"));
        match fs::rename(folder, &aside) {
            // It may be in use: whoever has it open keeps it until it closes it.
            Ok(()) => fs::remove_dir_all(&aside)?,
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Err(ErrorKind::AlreadyExists.into())
}

#[cfg(unix)]
fn sync_folder(folder: &Path) -> std::io::Result<()> {
    File::open(folder)?.sync_all()
}

#[cfg(not(unix))]
fn sync_folder(_: &Path) -> std::io::Result<()> {
    Ok(())
}

/// Removes what processes that were killed left behind; a failure does not matter.
fn remove_abandoned(models: &Path) {
    let Ok(entries) = fs::read_dir(models) else { return };
    let beginning = format!(".{NAME}-");
    for entry in entries.filter_map(Result::ok) {
        let is_ours = entry.file_name().to_string_lossy().starts_with(&beginning);
        let age = entry.metadata().and_then(|meta| meta.modified()).ok();
        let age = age.and_then(|modified| modified.elapsed().ok());
        if is_ours && age.is_some_and(|age| age > ABANDONED) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}
