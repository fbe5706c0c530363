//! `snowmelt logits`: the logits of every position, for tests and studies.

use crate::interrupt::{self, Stoppable, Unfinished};
use crate::model::{self, ModelArg};
use crate::options::{EngineArgs, ensure_fits};
use crate::output::{Ui, Unit};
use crate::size::counted;
use crate::{input, run};
use anyhow::{Context, Result, ensure};
use clap::Args;
use serde_json::json;
use snowmelt_engine::Outputs;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Write the logits of every position of a sequence
///
/// FILE becomes a safetensors file with one f32 tensor `logits` of shape [tokens,
/// vocabulary]; row t holds the logits after tokens 0 to t. It is written row by
/// row under another name and renamed when complete.
#[derive(Debug, Args)]
#[command(override_usage = "snowmelt logits [OPTIONS] --ids FILE --out FILE MODEL")]
pub(crate) struct LogitsArgs {
    #[command(flatten)]
    model: ModelArg,
    /// Token ids as a JSON array; `-` is stdin
    #[arg(long, value_name = "FILE")]
    ids: PathBuf,
    /// Where to write
    #[arg(short, long, value_name = "FILE")]
    out: PathBuf,
    #[command(flatten)]
    engine: EngineArgs,
}

pub(crate) fn run(args: &LogitsArgs, ui: Ui) -> Result<ExitCode> {
    let checkpoint = model::open(args.model.get()?, ui)?;
    let ids = input::ids(&args.ids, ui)?;
    ensure!(!ids.is_empty(), "`{}` holds no token ids", args.ids.display());
    let mut engine = run::open_engine(&args.engine, &checkpoint, Some(ids.len()), ui)?;
    ensure_fits(&engine, ids.len(), "fewer ids fit")?;
    let (n_vocab, rows) = (engine.census().n_vocab, engine.plan().rows);
    let session = engine.session()?;
    let target = target(&args.out)?;
    let (unfinished, mut out) = create(&target, ids.len(), n_vocab)?;
    let stoppable = Stoppable::begin();
    let bar = ui.bar(ids.len() as u64, "computing", Unit::Things("tokens"));
    let mut row = Vec::with_capacity(n_vocab * 4);
    for chunk in ids.chunks(rows) {
        let mut written = Ok(());
        engine.step_one(session, chunk, Outputs::All, &mut |_, logits| {
            row.clear();
            row.extend(logits.iter().flat_map(|logit| logit.to_le_bytes()));
            if written.is_ok() {
                written = out.write_all(&row);
            }
        })?;
        written.with_context(|| could_not_write(unfinished.path()))?;
        bar.inc(chunk.len() as u64);
        if stoppable.is_asked() {
            bar.finish_and_clear();
            let out = args.out.display();
            ui.note(format_args!("interrupted; `{out}` is as it was, nothing is left behind"));
            return Ok(ExitCode::from(interrupt::EXIT));
        }
    }
    bar.finish_and_clear();
    let file = out.into_inner().map_err(std::io::IntoInnerError::into_error);
    file.and_then(|file| file.sync_all()).with_context(|| could_not_write(unfinished.path()))?;
    unfinished.keep_as(&target).with_context(|| could_not_write(&target))?;
    ui.note(format_args!(
        "wrote {} of {n_vocab} to {}",
        counted(ids.len(), "row"),
        args.out.display()
    ));
    Ok(ExitCode::SUCCESS)
}

fn could_not_write(path: &Path) -> String {
    format!("could not write `{}`", path.display())
}

/// The file that `path` means, behind links. What is no regular file must not be replaced by one.
fn target(path: &Path) -> Result<PathBuf> {
    let Ok(found) = std::fs::metadata(path) else { return Ok(path.to_owned()) };
    ensure!(!found.is_dir(), "`{}` is a folder, expected the name of a file", path.display());
    ensure!(
        found.is_file(),
        "`{}` is a device or a pipe, expected a regular file or a new name\n\
         hint: the file is written under another name and renamed when complete",
        path.display()
    );
    std::fs::canonicalize(path).with_context(|| could_not_write(path))
}

const PARTIAL: &str = ".partial";

/// Removes what processes that were killed left of this name: those that live hold a lock. A
/// failure does not matter.
fn remove_abandoned(path: &Path, name: &OsStr) {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let entries = std::fs::read_dir(folder.unwrap_or(Path::new(".")));
    let beginning = format!("{}.", name.to_string_lossy());
    for entry in entries.into_iter().flatten().filter_map(Result::ok) {
        let name = entry.file_name();
        let id =
            name.to_str().and_then(|name| name.strip_prefix(&beginning)?.strip_suffix(PARTIAL));
        let is_ours = id.is_some_and(|id| id.parse::<u32>().is_ok());
        let is_abandoned = || File::open(entry.path()).is_ok_and(|file| file.try_lock().is_ok());
        if is_ours && entry.file_type().is_ok_and(|kind| kind.is_file()) && is_abandoned() {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Begins the file beside its final place: the header is known before the first row.
fn create(path: &Path, rows: usize, n_vocab: usize) -> Result<(Unfinished, BufWriter<File>)> {
    let name = path.file_name().with_context(|| format!("`{}` names no file", path.display()))?;
    remove_abandoned(path, name);
    let mut temporary = name.to_owned();
    temporary.push(format!(".{}{PARTIAL}", std::process::id()));
    let temporary = path.with_file_name(temporary);
    let file = File::create(&temporary).with_context(|| could_not_write(&temporary))?;
    // Where there are no locks nothing abandoned is ever removed, and that is all.
    let _ = file.try_lock();
    let unfinished = Unfinished::new(temporary);
    let bytes = rows * n_vocab * 4;
    let tensor = json!({ "dtype": "F32", "shape": [rows, n_vocab], "data_offsets": [0, bytes] });
    let mut header = json!({ "logits": tensor }).to_string().into_bytes();
    // Readers map the data: it begins at a multiple of eight.
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut out = BufWriter::new(file);
    let length = (header.len() as u64).to_le_bytes();
    out.write_all(&length)
        .and_then(|()| out.write_all(&header))
        .with_context(|| could_not_write(unfinished.path()))?;
    Ok((unfinished, out))
}
