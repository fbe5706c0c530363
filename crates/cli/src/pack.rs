//! `snowmelt pack`: makes the container that streams best.

use crate::interrupt::{self, Stoppable};
use crate::model;
use crate::output::{self, Ui, Unit};
use crate::size::Bytes;
use anyhow::Result;
use clap::Args;
use clap::builder::PossibleValuesParser;
use clap::builder::TypedValueParser;
use snowmelt_engine::pack::{PackOptions, pack};
use snowmelt_weights::Encoding;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

/// Write a model as a packed container, quantised or as it is
///
/// One record for each expert, aligned for direct reads, and a digest for every
/// piece. Interrupted, it leaves DST.partial; the same command continues there.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  snowmelt pack Qwen3-30B-A3B qwen3-q4 --experts q4g64 --trunk q8"
)]
pub(crate) struct PackArgs {
    /// Folder of the model, or `tiny`
    #[arg(value_name = "SRC")]
    source: String,
    /// Folder to make
    #[arg(value_name = "DST")]
    destination: PathBuf,
    /// Encoding of routed experts [default: as stored]
    #[arg(long, value_name = "ENC", value_parser = encoding())]
    experts: Option<Encoding>,
    /// Encoding of the other large matrices [default: as stored]
    #[arg(long, value_name = "ENC", value_parser = encoding())]
    trunk: Option<Encoding>,
}

const TARGETS: [Encoding; 4] = [Encoding::Bf16, Encoding::Q8, Encoding::Q4G32, Encoding::Q4G64];

fn encoding() -> impl TypedValueParser<Value = Encoding> {
    PossibleValuesParser::new(TARGETS.map(Encoding::name)).try_map(|name| name.parse::<Encoding>())
}

/// Names shown of a long list without `-v`.
const SHOWN: usize = 5;

pub(crate) fn run(args: &PackArgs, ui: Ui) -> Result<ExitCode> {
    let source = model::open(&args.source, ui)?;
    let options = PackOptions { experts: args.experts, trunk: args.trunk };
    let stoppable = Stoppable::begin();
    let bar = ui.bar(0, "packing", Unit::Bytes);
    let packed = pack(&source, &args.destination, options, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
        !stoppable.is_asked()
    });
    bar.finish_and_clear();
    let Some(packed) = packed? else {
        ui.note(format_args!(
            "interrupted; `{}.partial` is kept, the same command continues there:\n  {}",
            args.destination.display(),
            args.command()
        ));
        return Ok(ExitCode::from(interrupt::EXIT));
    };
    let mut text =
        format!("packed {} of weights into {}\n", Bytes(packed.bytes), args.destination.display());
    if let Some(first) = packed.requantised.first() {
        ui.warn(format_args!(
            "{} tensors were quantised already and are rounded a second time, first `{first}`: \
             packing the original loses less",
            packed.requantised.len()
        ));
    }
    list(&mut text, "kept as stored, rows are no multiple of the group", &packed.kept, ui);
    list(&mut text, "left behind, not part of the text model", &packed.skipped, ui);
    output::data(&text)?;
    Ok(ExitCode::SUCCESS)
}

impl PackArgs {
    /// The command that was typed, to be typed again.
    fn command(&self) -> String {
        let mut line = format!("snowmelt pack {} {}", self.source, self.destination.display());
        for (flag, encoding) in [("experts", self.experts), ("trunk", self.trunk)] {
            if let Some(encoding) = encoding {
                let _ = write!(line, " --{flag} {}", encoding.name());
            }
        }
        line
    }
}

fn list(text: &mut String, what: &str, names: &[String], ui: Ui) {
    if names.is_empty() {
        return;
    }
    let shown = if ui.is_verbose() { names.len() } else { SHOWN };
    let _ = writeln!(text, "{} {what}:", names.len());
    for name in names.iter().take(shown) {
        let _ = writeln!(text, "  {name}");
    }
    if names.len() > shown {
        let _ = writeln!(text, "  and {} more (-v lists all)", names.len() - shown);
    }
}
