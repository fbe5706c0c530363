//! `snowmelt logits`: the logits of every position, for tests and studies.

use crate::interrupt::{self, Stoppable};
use crate::model::{self, ModelArg};
use crate::options::{EngineArgs, ensure_fits};
use crate::output::{Ui, Unit};
use crate::size::counted;
use crate::{input, run, tensors};
use anyhow::{Context, Result, ensure};
use clap::Args;
use snowmelt_engine::Outputs;
use std::io::Write;
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
    let header = tensors::header([("logits", "F32", [ids.len(), n_vocab])]);
    let (unfinished, mut out) = tensors::begin(&target, &header)?;
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
        written.with_context(|| tensors::could_not_write(unfinished.path()))?;
        bar.inc(chunk.len() as u64);
        if stoppable.is_asked() {
            bar.finish_and_clear();
            let out = args.out.display();
            ui.note(format_args!("interrupted; `{out}` is as it was, nothing is left behind"));
            return Ok(ExitCode::from(interrupt::EXIT));
        }
    }
    bar.finish_and_clear();
    tensors::finish(unfinished, out, &target)?;
    ui.note(format_args!(
        "wrote {} of {n_vocab} to {}",
        counted(ids.len(), "row"),
        args.out.display()
    ));
    Ok(ExitCode::SUCCESS)
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
    std::fs::canonicalize(path).with_context(|| tensors::could_not_write(path))
}
