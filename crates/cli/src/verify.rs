//! `snowmelt verify`: reads everything again and compares it with its digests.

use crate::model::{self, ModelArg};
use crate::output::{self, Ui, Unit};
use crate::size::Bytes;
use anyhow::Result;
use clap::Args;
use snowmelt_weights::{VerifyReport, WeightsError, verify};
use std::fmt::Write as _;
use std::process::ExitCode;

/// Check every byte of a packed model against its digests
///
/// A model as published has no digests; of that, headers and byte ranges are checked.
/// Exit code 3: damage was found.
#[derive(Debug, Args)]
#[command(override_usage = "snowmelt verify [OPTIONS] MODEL")]
pub(crate) struct VerifyArgs {
    #[command(flatten)]
    model: ModelArg,
}

/// Exit code where damage was found.
const DAMAGED: u8 = 3;

pub(crate) fn run(args: &VerifyArgs, ui: Ui) -> Result<ExitCode> {
    let name = args.model.get()?;
    match check(name, ui) {
        Ok(report) => {
            output::data(&describe(name, &report))?;
            Ok(ExitCode::SUCCESS)
        }
        Err(error) if is_damage(&error) => {
            ui.error(&error);
            output::data(&format!("{name} is damaged\n"))?;
            Ok(ExitCode::from(DAMAGED))
        }
        Err(error) => Err(error),
    }
}

fn check(name: &str, ui: Ui) -> Result<VerifyReport> {
    let checkpoint = model::open(name, ui)?;
    let bar = ui.bar(0, "verifying", Unit::Bytes);
    let report = verify(&checkpoint, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    Ok(report?)
}

/// Whether the model itself is at fault, rather than the path or the system.
fn is_damage(error: &anyhow::Error) -> bool {
    match error.downcast_ref::<WeightsError>() {
        Some(
            WeightsError::Io { .. }
            | WeightsError::NotFound { .. }
            | WeightsError::NotAFolder { .. }
            | WeightsError::NotACheckpoint { .. }
            | WeightsError::UnfinishedPack { .. },
        )
        | None => false,
        Some(_) => true,
    }
}

fn describe(name: &str, report: &VerifyReport) -> String {
    if report.headers_only {
        let tensors = report.tensors;
        return format!(
            "{name}: headers and byte ranges of {tensors} tensors are in order; this format has \
             no digests\n"
        );
    }
    let mut text = format!(
        "{name}: {} read, all digests match ({} tensors, {} expert records)\n",
        Bytes(report.bytes),
        report.tensors,
        report.records
    );
    if !report.unlisted.is_empty() {
        let names = report.unlisted.join(", ");
        let _ = writeln!(text, "not part of the model: {names}");
    }
    text
}
