//! The memory plan: a budget becomes context, chunk and slots before anything is allocated.

use crate::error::{EngineError, Result};
use crate::experts::Io;
use crate::files;
use crate::tables;
use snowmelt_backend::{BufType, Limits, PAGE_TOKENS};
use snowmelt_expert_store::{PolicyOptions, SourceOptions};
use snowmelt_model::{Census, ModelOptions};
use std::fmt;

/// Where routed experts are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Residency {
    /// Resident if all fit into the budget, else streamed.
    #[default]
    Auto,
    /// All in memory, read at open.
    Resident,
    /// Used where the file is mapped; the operating system decides what stays in memory.
    Mapped,
    /// Read into slots when a token needs them.
    Streamed,
}

impl Residency {
    /// As on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Resident => "resident",
            Self::Mapped => "mapped",
            Self::Streamed => "streamed",
        }
    }
}

/// What the user asks for; `None` leaves the choice to the plan.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Bound on the memory of the whole process, in bytes.
    pub memory_bytes: Option<u64>,
    /// Expert slots, over all layers.
    pub slots: Option<u32>,
    /// Longest context of a session, in tokens.
    pub context_tokens: Option<usize>,
    /// Sessions that can be open at once.
    pub sessions: usize,
    /// Where experts are kept.
    pub residency: Residency,
    /// How they are read.
    pub io: Io,
    /// Most rows of a step.
    pub prefill_chunk: Option<usize>,
    /// Type of the KV cache.
    pub kv: BufType,
    /// Bytes of the cache of rows of tables that stay on disk.
    pub row_cache_bytes: Option<u64>,
    /// What is asked of the family.
    pub model: ModelOptions,
    /// Whether the trunk, and every record read, is checked against its digests.
    pub check_reads: bool,
    /// Whether slots are filled with NaN before they are read into.
    pub poison: bool,
    /// Whether logits are checked for NaN and infinity.
    pub check_finite: bool,
    /// Eviction.
    pub policy: PolicyOptions,
    /// Time after which a read has failed.
    pub read_timeout: std::time::Duration,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            memory_bytes: None,
            slots: None,
            context_tokens: None,
            sessions: 1,
            residency: Residency::Auto,
            io: Io::Auto,
            prefill_chunk: None,
            kv: BufType::F32,
            row_cache_bytes: None,
            model: ModelOptions::default(),
            check_reads: false,
            poison: false,
            check_finite: true,
            policy: PolicyOptions::default(),
            read_timeout: std::time::Duration::from_secs(30),
        }
    }
}

/// Bytes, printed in the unit that reads best.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
        if self.0 < 1024 {
            return f.pad(&format!("{} B", self.0));
        }
        let mut value = self.0 as f64 / 1024.0;
        let mut at = 0;
        while value >= 1023.95 && at + 1 < UNITS.len() {
            value /= 1024.0;
            at += 1;
        }
        f.pad(&format!("{value:.1} {}", UNITS[at]))
    }
}

/// The one unit of a table whose lines have to add up.
#[derive(Clone, Copy)]
struct Unit {
    bytes: u64,
    name: &'static str,
}

impl Unit {
    /// Finer where a few slots decide.
    fn of(budget_bytes: u64) -> Self {
        match budget_bytes {
            0..1024 => Self { bytes: 1, name: "B" },
            1024..0x4000_0000 => Self { bytes: 1 << 10, name: "KiB" },
            _ => Self { bytes: 1 << 20, name: "MiB" },
        }
    }

    fn line(self, sign: &str, what: &str, count: u64) -> String {
        let number = format!("{count} {}", self.name);
        format!("{sign} {what:<16} {number:>14}\n")
    }
}

/// One subtrahend of the plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// What the bytes are for.
    pub name: &'static str,
    /// How many.
    pub bytes: u64,
}

/// What fits into a budget.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Bound on the whole process, in bytes.
    pub budget_bytes: u64,
    /// Everything but slots.
    pub items: Vec<Item>,
    /// Bytes of one slot; 0 for a dense model.
    pub slot_bytes: u64,
    /// Slots.
    pub slots: u32,
    /// Fewest slots with which a token can be computed.
    pub fewest_slots: u32,
    /// Slots without which the plan is refused: the fewest, those asked for, or all.
    pub needed_slots: u32,
    /// Routed experts, over all layers.
    pub n_experts: usize,
    /// Chosen residency, never [`Residency::Auto`].
    pub residency: Residency,
    /// Context of each session, in tokens.
    pub context_tokens: usize,
    /// Sessions.
    pub sessions: usize,
    /// Most rows of a step.
    pub rows: usize,
    /// Rows of logits computed at once.
    pub outputs: usize,
    /// Bytes of the cache of rows of tables; 0 where there are none.
    pub row_cache_bytes: u64,
    /// The smallest budget in which the model runs, with the context asked for.
    pub smallest_bytes: u64,
}

/// What a plan needs to know of the backend and the process.
#[derive(Clone, Copy)]
pub(crate) struct Costs<'a> {
    /// Scratch of the backend for given limits.
    pub(crate) scratch_bytes: &'a dyn Fn(&Limits) -> usize,
    /// Submissions that may be unfinished.
    pub(crate) in_flight: usize,
    /// Bytes that the process holds before the model is loaded.
    pub(crate) base_bytes: u64,
    /// Whether every record can be read without a bounce buffer.
    pub(crate) is_aligned: bool,
    /// Whether the checkpoint lies in memory already.
    pub(crate) in_memory: bool,
}

impl<'a> Costs<'a> {
    /// For this process as it is now.
    pub(crate) fn now(scratch_bytes: &'a dyn Fn(&Limits) -> usize, in_flight: usize) -> Self {
        let base_bytes = files::process_bytes().unwrap_or(32 << 20);
        Self { scratch_bytes, in_flight, base_bytes, is_aligned: false, in_memory: false }
    }
}

/// Chunks that the plan tries, largest first.
const CHUNKS: [usize; 7] = [512, 256, 128, 64, 32, 16, 8];
/// Context where none is asked for and the budget allows it.
const CONTEXT_DEFAULT: usize = 8192;
/// The least context that the plan chooses by itself.
const CONTEXT_LEAST: usize = 512;
/// Bytes that logits of one group of output rows may take.
const LOGITS_BYTES: usize = 4 << 20;
/// Allocator, stacks, page tables and what else has no item of its own.
const OVERHEAD_BYTES: u64 = 4 << 20;

/// Bytes of the cache of rows of tables, where none is asked for: so many at most, and so small a
/// share of what the smallest plan leaves of the budget.
const ROW_CACHE_BYTES: u64 = 64 << 20;
const ROW_CACHE_SHARE: u64 = 16;

/// Sizes that a plan chooses.
#[derive(Clone, Copy)]
struct Choice {
    rows: usize,
    context_tokens: usize,
}

/// What one plan is made from.
struct Planner<'a> {
    census: &'a Census,
    options: &'a EngineOptions,
    costs: Costs<'a>,
    outputs: usize,
    fewest_slots: u32,
}

impl Plan {
    /// Chooses context, chunk, residency and slots.
    ///
    /// # Errors
    /// [`EngineError::Budget`] with the subtraction that failed, [`EngineError::Slots`],
    /// [`EngineError::ContextRange`], [`EngineError::Residency`].
    pub(crate) fn new(census: &Census, options: &EngineOptions, costs: Costs<'_>) -> Result<Self> {
        let vocab_bytes = census.n_vocab.max(1) * 4;
        let outputs = (LOGITS_BYTES / vocab_bytes).clamp(1, 64).max(options.sessions.min(8));
        let fewest_slots = match census.n_experts_total() {
            0 => 0,
            _ => (census.limits.top_k * (costs.in_flight + 1)) as u32,
        };
        let planner = Planner { census, options, costs, outputs, fewest_slots };
        planner.check_requests()?;
        let budget = options.memory_bytes.unwrap_or_else(|| planner.auto_budget());
        let mut plan = planner.choose(budget);
        // Slots that were asked for may exceed a budget that was not.
        let needed = match (options.memory_bytes, options.slots) {
            (None, Some(_)) if options.residency != Residency::Resident => plan.fixed_bytes(),
            _ => plan.needed_bytes(),
        };
        if needed > budget {
            return Err(EngineError::Budget {
                plan: Box::new(plan),
                options: Box::new(options.clone()),
            });
        }
        planner.set_slots(&mut plan);
        Ok(plan)
    }

    /// Bytes of everything but slots.
    pub fn fixed_bytes(&self) -> u64 {
        self.items.iter().map(|item| item.bytes).sum()
    }

    /// Bytes of everything.
    pub fn total_bytes(&self) -> u64 {
        self.fixed_bytes() + self.slot_bytes * u64::from(self.slots)
    }

    /// Bytes of everything without which the plan is refused.
    fn needed_bytes(&self) -> u64 {
        self.fixed_bytes() + self.slot_bytes * u64::from(self.needed_slots)
    }

    fn item_bytes(&self, name: &str) -> u64 {
        self.items.iter().filter(|item| item.name == name).map(|item| item.bytes).sum()
    }

    /// The message of a budget that is too small, with the subtraction and what would help.
    pub(crate) fn refusal(&self, options: &EngineOptions) -> String {
        let unit = Unit::of(self.budget_bytes);
        let budget = Size(self.budget_bytes);
        let mut text = format!("a memory budget of {budget} is too small for this model\n");
        text.push_str(&self.subtraction());
        if self.needed_slots > 0 {
            let (slots, each) = (self.needed_slots, Size(self.slot_bytes));
            let needed = (u64::from(slots) * self.slot_bytes).div_ceil(unit.bytes);
            text.push_str(&unit.line(" ", "needed for slots", needed));
            text.truncate(text.trim_end().len());
            text.push_str(&format!("  {slots} of {each}\n"));
        }
        text.push_str(&format!("the smallest budget is `--memory {}`", self.smallest_flag()));
        for remedy in self.remedies(options) {
            text.push_str(&format!("\nhint: {remedy}"));
        }
        text
    }

    /// What besides a larger budget would help.
    fn remedies(&self, options: &EngineOptions) -> Vec<String> {
        let mut remedies = Vec::new();
        if options.slots.is_some() && self.needed_slots > self.fewest_slots {
            remedies.push(format!("fewer `--slots` need less, at least {}", self.fewest_slots));
        }
        if options.residency == Residency::Resident {
            remedies.push("`--residency streamed` needs less".to_owned());
        }
        let scratch = self.item_bytes("scratch");
        if scratch > self.fixed_bytes() / 2 {
            remedies.push("fewer `--threads` need less scratch".to_owned());
        }
        if self.item_bytes("kv cache") > 0 {
            remedies.push("a shorter `--context` needs less".to_owned());
        }
        remedies
    }

    /// The smallest budget as a flag's value, rounded up.
    pub fn smallest_flag(&self) -> String {
        format!("{}MiB", self.smallest_bytes.div_ceil(1 << 20))
    }

    /// Budget minus items, a line each, in whole units that add up: what is spent is rounded up.
    pub fn subtraction(&self) -> String {
        let unit = Unit::of(self.budget_bytes);
        let budget = self.budget_bytes / unit.bytes;
        let mut text = unit.line(" ", "budget", budget);
        let mut spent = 0;
        for item in &self.items {
            let bytes = item.bytes.div_ceil(unit.bytes);
            text.push_str(&unit.line("-", item.name, bytes));
            spent += bytes;
        }
        text.push_str(&match budget.checked_sub(spent) {
            Some(left) => unit.line("=", "left for slots", left),
            None => unit.line("=", "short by", spent - budget),
        });
        text
    }
}

impl Planner<'_> {
    fn check_requests(&self) -> Result<()> {
        let (census, options) = (self.census, self.options);
        if let Some(context) = options.context_tokens
            && (context > census.context_max || context == 0)
        {
            let model = census.context_max;
            return Err(EngineError::ContextRange { asked: context, model });
        }
        if let Some(slots) = options.slots
            && slots < self.fewest_slots
        {
            let (top_k, fewest) = (census.limits.top_k, self.fewest_slots);
            return Err(EngineError::Slots { slots, top_k, fewest });
        }
        Ok(())
    }

    /// Nine tenths of what is available, and never more than everything needs.
    fn auto_budget(&self) -> u64 {
        let base = self.costs.base_bytes;
        let available = files::available_memory().unwrap_or(8 << 30) + base;
        let all = self.plan_for(u64::MAX, self.largest()).fixed_bytes()
            + self.census.n_experts_total() as u64 * self.census.slot_bytes() as u64;
        (available / 10 * 9).min(all)
    }

    fn largest(&self) -> Choice {
        let context_max = self.census.context_max;
        Choice {
            rows: self.rows(CHUNKS[0]),
            context_tokens: self.options.context_tokens.unwrap_or(context_max.min(CONTEXT_DEFAULT)),
        }
    }

    fn smallest(&self) -> Choice {
        let context_max = self.census.context_max;
        Choice {
            rows: self.rows(CHUNKS[CHUNKS.len() - 1]),
            context_tokens: self.options.context_tokens.unwrap_or(context_max.min(CONTEXT_LEAST)),
        }
    }

    fn rows(&self, chunk: usize) -> usize {
        self.options.prefill_chunk.unwrap_or(chunk).max(self.options.sessions)
    }

    /// The largest context and chunk that leave most of the memory to slots.
    fn choose(&self, budget: u64) -> Plan {
        let mut choice = self.largest();
        let floor = self.smallest();
        let least_slots = self.census.slot_bytes() as u64 * u64::from(self.needed_slots());
        let smallest = self.plan_for(budget, floor);
        // What a larger context and chunk may take beyond the smallest ones.
        let spare = budget.saturating_sub(smallest.fixed_bytes() + least_slots);
        let experts = self.census.n_experts_total() as u64 * self.census.slot_bytes() as u64;
        let may_take = (spare / 4).max(spare.saturating_sub(experts));
        let extra = |choice: Choice| {
            self.plan_for(budget, choice).fixed_bytes().saturating_sub(smallest.fixed_bytes())
        };
        let context_only = |context_tokens| Choice { rows: floor.rows, context_tokens };
        while choice.context_tokens > floor.context_tokens
            && extra(context_only(choice.context_tokens)) > may_take / 2
        {
            choice.context_tokens = (choice.context_tokens / 2).max(floor.context_tokens);
        }
        for chunk in CHUNKS {
            choice.rows = self.rows(chunk);
            if extra(choice) <= may_take {
                break;
            }
        }
        self.plan_for(budget, choice)
    }

    fn plan_for(&self, budget_bytes: u64, choice: Choice) -> Plan {
        let items = self.items(choice, budget_bytes);
        let census = self.census;
        let mut plan = Plan {
            budget_bytes,
            items,
            slot_bytes: census.slot_bytes() as u64,
            slots: 0,
            fewest_slots: self.fewest_slots,
            needed_slots: self.needed_slots(),
            n_experts: census.n_experts_total(),
            residency: self.options.residency,
            context_tokens: choice.context_tokens,
            sessions: self.options.sessions,
            rows: choice.rows,
            outputs: self.outputs,
            row_cache_bytes: self.row_cache(choice, budget_bytes),
            smallest_bytes: 0,
        };
        let smallest: u64 = self.items(self.smallest(), 0).iter().map(|item| item.bytes).sum();
        plan.smallest_bytes = smallest + plan.slot_bytes * u64::from(plan.needed_slots);
        plan
    }

    fn needed_slots(&self) -> u32 {
        let all = self.census.n_experts_total() as u32;
        match (self.options.residency, self.options.slots) {
            (Residency::Mapped, _) => 0,
            (Residency::Resident, _) => all,
            (Residency::Auto | Residency::Streamed, Some(slots)) => slots.min(all),
            (Residency::Auto | Residency::Streamed, None) => self.fewest_slots,
        }
    }

    /// Where no size is asked for, a share of what the smallest plan leaves: that one has no more
    /// than a step needs.
    fn row_cache(&self, choice: Choice, budget_bytes: u64) -> u64 {
        if self.census.tables.is_empty() {
            return 0;
        }
        let wanted = self.options.row_cache_bytes.unwrap_or_else(|| match budget_bytes {
            0 => 0,
            _ => {
                let items = self.items(self.smallest(), 0);
                let least: u64 = items.iter().map(|item| item.bytes).sum();
                let spare = budget_bytes.saturating_sub(least);
                ROW_CACHE_BYTES.min(spare / ROW_CACHE_SHARE)
            }
        });
        tables::cache_bytes(self.census, choice.rows, wanted)
    }

    fn items(&self, choice: Choice, budget_bytes: u64) -> Vec<Item> {
        let (census, options) = (self.census, self.options);
        let pages = choice.context_tokens.div_ceil(PAGE_TOKENS) * options.sessions;
        let kv = census.per_token_elements() * options.kv.bytes() * pages * PAGE_TOKENS;
        // One more row of recurrent state than sessions, to copy on write.
        let recurrent = census.per_sequence_elements() * 4 * options.sessions;
        let limits =
            Limits { rows: choice.rows, context_tokens: choice.context_tokens, ..census.limits };
        let scratch = choice.rows * census.scratch_width * 4
            + self.outputs * census.outputs_width * 4
            + (self.costs.scratch_bytes)(&limits);
        let logits = census.n_vocab * (4 * options.sessions + 16);
        let source = source_options(self.costs.is_aligned);
        let io = match self.costs.in_memory || census.n_experts_total() == 0 {
            true => 0,
            false => source.pread_buffer_bytes().max(source.uring_buffer_bytes()),
        };
        let item = |name, bytes: usize| Item { name, bytes: bytes as u64 };
        let mut items = vec![
            Item { name: "process", bytes: self.costs.base_bytes + OVERHEAD_BYTES },
            item("trunk", census.trunk_bytes()),
            item("kv cache", kv),
            item("recurrent state", recurrent),
            item("scratch", scratch),
            item("logits", logits),
            item("io buffers", io + (2 << 20)),
        ];
        if !census.tables.is_empty() {
            let work = tables::work_bytes(census, choice.rows, self.costs.in_memory);
            let bytes = self.row_cache(choice, budget_bytes) + work;
            items.push(Item { name: "row cache", bytes });
        }
        items
    }

    fn set_slots(&self, plan: &mut Plan) {
        let all = plan.n_experts as u64;
        let fit = match plan.slot_bytes {
            0 => 0,
            bytes => (plan.budget_bytes.saturating_sub(plan.fixed_bytes()) / bytes).min(all),
        };
        let wanted = self.options.slots.map(u64::from);
        plan.residency = match self.options.residency {
            Residency::Auto if wanted.is_some_and(|slots| slots < all) => Residency::Streamed,
            Residency::Auto if fit >= all => Residency::Resident,
            Residency::Auto => Residency::Streamed,
            asked => asked,
        };
        plan.slots = match plan.residency {
            Residency::Mapped => 0,
            Residency::Resident => all as u32,
            _ => wanted.unwrap_or(fit).min(all) as u32,
        };
    }
}

/// Read options: small bounce buffers where every record is aligned and none is needed.
pub(crate) fn source_options(is_aligned: bool) -> SourceOptions {
    let options = SourceOptions::default();
    match is_aligned {
        true => SourceOptions { bounce_bytes: 8192, bounces: 1, ..options },
        false => options,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(budget_bytes: u64) -> Plan {
        let item = |name, bytes| Item { name, bytes };
        Plan {
            budget_bytes,
            items: vec![item("process", 17_000_001), item("kv cache", 1), item("logits", 81_920)],
            slot_bytes: 56 << 10,
            slots: 0,
            fewest_slots: 4,
            needed_slots: 9,
            n_experts: 256,
            residency: Residency::Streamed,
            context_tokens: 512,
            sessions: 1,
            rows: 8,
            outputs: 1,
            row_cache_bytes: 0,
            smallest_bytes: 18 << 20,
        }
    }

    #[test]
    fn sizes_are_printed_in_the_unit_that_reads_best() {
        let cases = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            ((1 << 20) - 1, "1.0 MiB"),
            (3 << 29, "1.5 GiB"),
            (u64::MAX, "16384.0 PiB"),
        ];
        for (bytes, text) in cases {
            assert_eq!(Size(bytes).to_string(), text);
        }
    }

    #[test]
    fn subtractions_add_up_as_printed() {
        for budget in [1, 1000, 5000, 17 << 20, (17 << 20) + 77, 40 << 20, 3 << 30] {
            let mut sum = 0_i64;
            let text = plan(budget).subtraction();
            for line in text.lines() {
                let words: Vec<&str> = line.split_whitespace().collect();
                let number: i64 = words[words.len() - 2].parse().expect("a whole number");
                let is_left = line.starts_with("= left");
                sum += if line.starts_with('-') || is_left { -number } else { number };
            }
            assert_eq!(sum, 0, "{text}");
        }
    }

    #[test]
    fn a_refusal_names_what_helps() {
        let auto = EngineOptions::default();
        let text = plan(1).refusal(&auto);
        assert!(text.contains("memory budget of 1 B") && text.contains("short by"), "{text}");
        assert!(text.contains("9 of 56.0 KiB") && !text.contains("--slots"), "{text}");
        assert!(text.contains("a shorter `--context`") && !text.contains("--threads"), "{text}");
        let text = plan(1).refusal(&EngineOptions { slots: Some(9), ..auto.clone() });
        assert!(text.contains("fewer `--slots` need less, at least 4"), "{text}");
        let mut without = plan(1);
        without.items[1].bytes = 0;
        without.items.push(Item { name: "scratch", bytes: 100 << 20 });
        let text = without.refusal(&auto);
        assert!(text.contains("`--threads`") && !text.contains("--context"), "{text}");
    }
}
