//! `snowmelt verify`: reads everything again and compares it with its digests.

use crate::model::{self, ModelArg};
use crate::output::{self, Ui, Unit};
use crate::size::Bytes;
use anyhow::{Result, anyhow};
use clap::Args;
use snowmelt_model::{ModelError, ModelOptions};
use snowmelt_weights::{CheckpointKind, Damage, VerifyReport, WeightsError, verify};
use std::fmt::Write as _;
use std::process::ExitCode;

/// Check every byte of a packed model against its digests
///
/// A model as published has no digests; of that, headers and byte ranges are checked.
/// Exit code 3: it is damaged, or no model.
#[derive(Debug, Args)]
#[command(override_usage = "snowmelt verify [OPTIONS] MODEL")]
pub(crate) struct VerifyArgs {
    #[command(flatten)]
    model: ModelArg,
}

/// Exit code where something is wrong with the model.
const DAMAGED: u8 = 3;

pub(crate) fn run(args: &VerifyArgs, ui: Ui) -> Result<ExitCode> {
    let name = args.model.get()?;
    let verdict = match check(name, ui) {
        Ok(report) if report.damage.count == 0 => {
            output::data(&describe(name, &report))?;
            return Ok(ExitCode::SUCCESS);
        }
        Ok(report) => {
            show(&report.damage, ui);
            "is damaged"
        }
        Err(error) => {
            let Some(verdict) = verdict(&error) else { return Err(error) };
            ui.error(&error);
            verdict
        }
    };
    output::data(&format!("{name} {verdict}\n"))?;
    Ok(ExitCode::from(DAMAGED))
}

/// Every damaged part, without the hint that all share.
fn show(damage: &Damage, ui: Ui) {
    for error in &damage.first {
        let text = error.to_string();
        ui.error(&anyhow!("{}", text.split("\nhint:").next().unwrap_or(&text)));
    }
    let more = match damage.count - damage.first.len() as u64 {
        0 => String::new(),
        more => format!(" ({more} more than listed)"),
    };
    let parts = if damage.count == 1 { "part is" } else { "parts are" };
    let hint = "hint: pack the model again, or copy it again from where it came";
    ui.error(&anyhow!("{} {parts} damaged{more}\n{hint}", damage.count));
}

fn check(name: &str, ui: Ui) -> Result<VerifyReport> {
    let checkpoint = model::open(name, ui)?;
    let bar = ui.bar(0, "verifying", Unit::Bytes);
    let report = verify(&checkpoint, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    let report = report?;
    if checkpoint.kind() == CheckpointKind::Packed && report.damage.count == 0 {
        // What no digest tells: whether family, config and tensors belong together.
        match snowmelt_model::census(&checkpoint, ModelOptions::default()) {
            Ok(_) | Err(ModelError::UnknownFamily { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(report)
}

/// What is wrong with the model itself; nothing when it is the path, the system or this program.
fn verdict(error: &anyhow::Error) -> Option<&'static str> {
    if error.is::<ModelError>() {
        return Some("contradicts itself");
    }
    match error.downcast_ref::<WeightsError>()? {
        WeightsError::Io { .. }
        | WeightsError::NotFound { .. }
        | WeightsError::NotAFolder { .. }
        | WeightsError::ManifestFormat { .. } => None,
        WeightsError::NotACheckpoint { .. } => Some("is no model"),
        WeightsError::UnfinishedPack { .. } => Some("is not complete"),
        _ => Some("is damaged"),
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
