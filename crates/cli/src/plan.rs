//! `snowmelt plan`: what fits into a memory budget, from headers alone.

use crate::model::{self, ModelArg};
use crate::options::{Cpu, EngineArgs, residency_line};
use crate::outline;
use crate::output::{self, Ui};
use crate::size::{Bytes, counted};
use anyhow::Result;
use clap::Args;
use serde_json::{Value, json};
use snowmelt_engine::{Engine, EngineOptions, Plan, Residency};
use snowmelt_model::Census;
use snowmelt_weights::Checkpoint;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

/// Show what fits into a memory budget, without loading the model
///
/// Prints what the budget is spent on, how many experts stay in memory, the
/// smallest budget in which the model runs, and what larger ones would buy.
#[derive(Debug, Args)]
#[command(
    override_usage = "snowmelt plan [OPTIONS] MODEL\n       snowmelt plan [OPTIONS] --config FILE"
)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    model: ModelArg,
    #[command(flatten)]
    engine: EngineArgs,
    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    json: bool,
    /// Instead of a model: a `config.json`, of which it says what the model weighs
    #[arg(long, value_name = "FILE", conflicts_with_all = ["positional", "model_flag"])]
    config: Option<PathBuf>,
    /// Bits a weight, for `--config`
    #[arg(long, value_name = "N", default_value = "4.5", requires = "config")]
    bits: f64,
}

/// Processes differ by a little in what they hold before the model is loaded.
const SPARE_BYTES: u64 = 1 << 20;

pub(crate) fn run(args: &PlanArgs, ui: Ui) -> Result<ExitCode> {
    if let Some(config) = &args.config {
        return outline::run(config, args.bits, args.json);
    }
    let checkpoint = model::open(args.model.get()?, ui)?;
    // As `run` does it, so that the process is counted with what it will hold.
    let _tokenizer = model::tokenizer(&checkpoint)?;
    let backend = args.engine.cpu.backend()?;
    let census = snowmelt_model::census(&checkpoint, args.engine.model_options())?;
    let options = args.engine.options(&checkpoint);
    let planner = Planner { checkpoint: &checkpoint, backend: &backend, census: &census, options };
    let plan = planner.plan(planner.options.memory_bytes)?;
    let rows = planner.table(&plan);
    if args.json {
        output::json(&report(&plan, &rows))?;
    } else {
        output::data(&describe(&plan, &rows))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Everything but the budget.
struct Planner<'a> {
    checkpoint: &'a Checkpoint,
    backend: &'a Cpu,
    census: &'a Census,
    options: EngineOptions,
}

impl Planner<'_> {
    fn plan(&self, memory_bytes: Option<u64>) -> Result<Plan> {
        let options = EngineOptions { memory_bytes, ..self.options.clone() };
        Ok(Engine::plan_for(self.checkpoint, self.backend, self.census, &options)?)
    }

    /// What a few budgets would buy, if slots and residency were free to choose.
    fn table(&self, plan: &Plan) -> Vec<(String, Plan)> {
        let free = Planner {
            options: EngineOptions {
                slots: None,
                residency: Residency::Auto,
                ..self.options.clone()
            },
            ..*self
        };
        let smallest = smallest_bytes(free.plan(None).as_ref().unwrap_or(plan));
        let mut rows = Vec::new();
        if let Ok(plan) = free.plan(Some(smallest)) {
            rows.push(("smallest".to_owned(), plan));
        }
        for percent in [25, 50, 75, 100] {
            let slots = (plan.n_experts as u64 * percent / 100) as u32;
            let name = format!("{percent} % of experts");
            if slots > plan.fewest_slots
                && let Some(plan) = free.with_slots(slots, smallest)
            {
                rows.push((name, plan));
            }
        }
        rows
    }

    /// The smallest budget, to a MiB, with at least so many slots.
    fn with_slots(&self, slots: u32, smallest: u64) -> Option<Plan> {
        let has_enough =
            |mib: u64| self.plan(Some(mib << 20)).ok().filter(|plan| plan.slots >= slots);
        let (mut too_few, mut enough) = (smallest >> 20, (smallest >> 20).max(1));
        while has_enough(enough).is_none() {
            too_few = enough;
            enough = enough.checked_mul(2).filter(|mib| *mib < 1 << 40)?;
        }
        while enough - too_few > 1 {
            let middle = too_few + (enough - too_few) / 2;
            match has_enough(middle) {
                Some(_) => enough = middle,
                None => too_few = middle,
            }
        }
        has_enough(enough)
    }
}

/// The smallest budget with some room for differences between processes.
fn smallest_bytes(plan: &Plan) -> u64 {
    (plan.smallest_bytes + SPARE_BYTES).next_multiple_of(1 << 20)
}

/// A budget as a flag's value.
fn flag(bytes: u64) -> String {
    format!("{}MiB", bytes.div_ceil(1 << 20))
}

fn describe(plan: &Plan, rows: &[(String, Plan)]) -> String {
    let mut text = plan.subtraction();
    let _ = writeln!(text, "\n{}", residency_line(plan));
    let (context, chunk) = (plan.context_tokens, plan.rows);
    let _ = writeln!(text, "context {}, prompts in chunks of {chunk}", counted(context, "token"));
    if plan.row_cache_bytes > 0 {
        let cache = Bytes(plan.row_cache_bytes);
        let _ = writeln!(text, "tables on disk: single rows are read, {cache} of them cached");
    }
    if plan.n_experts > 0 {
        let _ = writeln!(text, "fewest slots {}", plan.fewest_slots);
    }
    let _ = writeln!(text, "smallest budget --memory {}", flag(smallest_bytes(plan)));
    let _ = writeln!(
        text,
        "\n{:<18} {:>10} {:>8} {:>8} {:>6}  residency",
        "budget", "--memory", "slots", "context", "chunk"
    );
    for (name, plan) in rows {
        let (memory, slots) = (flag(plan.budget_bytes), plan.slots);
        let (context, chunk, residency) = (plan.context_tokens, plan.rows, plan.residency.name());
        let _ = writeln!(
            text,
            "{name:<18} {memory:>10} {slots:>8} {context:>8} {chunk:>6}  {residency}"
        );
    }
    text
}

fn plan_json(plan: &Plan) -> Value {
    let items = plan.items.iter().map(|item| (item.name.to_owned(), item.bytes.into()));
    json!({
        "budget_bytes": plan.budget_bytes,
        "items": items.collect::<serde_json::Map<_, Value>>(),
        "slot_bytes": plan.slot_bytes,
        "slots": plan.slots,
        "n_experts": plan.n_experts,
        "residency": plan.residency.name(),
        "context_tokens": plan.context_tokens,
        "prefill_chunk": plan.rows,
        "row_cache_bytes": plan.row_cache_bytes,
        "total_bytes": plan.total_bytes(),
    })
}

fn report(plan: &Plan, rows: &[(String, Plan)]) -> Value {
    let mut report = plan_json(plan);
    report["fewest_slots"] = plan.fewest_slots.into();
    report["smallest_bytes"] = smallest_bytes(plan).into();
    report["smallest_flag"] = flag(smallest_bytes(plan)).into();
    let row = |(name, plan): &(String, Plan)| {
        let mut row = plan_json(plan);
        row["name"] = name.as_str().into();
        row
    };
    report["budgets"] = rows.iter().map(row).collect();
    report
}

#[cfg(test)]
mod tests {
    #[test]
    fn flags_round_up() {
        assert_eq!(super::flag(1), "1MiB");
        assert_eq!(super::flag(5 << 20), "5MiB");
        assert_eq!(super::flag((5 << 20) + 1), "6MiB");
    }
}
