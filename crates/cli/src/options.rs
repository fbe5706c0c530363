//! Flags that all commands share, and the engine that they describe.

use crate::output::Ui;
use crate::size::{Bytes, CacheSize, Memory, counted};
use anyhow::{Result, bail, ensure};
use clap::builder::BoolishValueParser;
use clap::{Args, ValueEnum};
use snowmelt_backend::BufType;
use snowmelt_backend_cpu::{Activations, CpuBackend, CpuOptions};
use snowmelt_engine::{
    Engine, EngineError, EngineOptions, Io, ModelOptions, Qsa, Residency, available_memory,
};
use snowmelt_weights::{Checkpoint, Encoding, Packed};

/// The backend that this binary runs on.
pub(crate) type Cpu = CpuBackend;

/// How the model is held and computed.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Memory")]
pub(crate) struct EngineArgs {
    /// Bound on the memory of the whole process: `64GiB`, `8GB`, `80%` of what is
    /// available, or `auto`
    #[arg(long, value_name = "SIZE", default_value = "auto", env = "SNOWMELT_MEMORY")]
    #[arg(hide_env_values = true)]
    pub(crate) memory: Memory,
    /// Expert slots in all, instead of as many as the budget allows
    #[arg(long, value_name = "N", env = "SNOWMELT_SLOTS", hide_env_values = true)]
    pub(crate) slots: Option<u32>,
    /// Longest context in tokens [default: what the budget allows, up to 8192]
    #[arg(short, long, visible_alias = "ctx-size", value_name = "N")]
    #[arg(env = "SNOWMELT_CONTEXT", hide_env_values = true)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) context: Option<u32>,
    /// Where experts are kept: all in memory, used in a mapped file, or read into
    /// slots; `auto` is `resident` where all fit, else `streamed`
    #[arg(long, value_name = "HOW", default_value = "auto")]
    #[arg(env = "SNOWMELT_RESIDENCY", hide_env_values = true, hide_possible_values = false)]
    pub(crate) residency: ResidencyArg,
    /// How experts are read; `auto` is `uring` where the system allows it
    #[arg(long, value_name = "HOW", default_value = "auto")]
    #[arg(env = "SNOWMELT_IO", hide_env_values = true)]
    pub(crate) io: IoArg,
    /// Most tokens of a prompt computed at once [default: what the budget allows]
    #[arg(long, value_name = "N", env = "SNOWMELT_PREFILL_CHUNK", hide_env_values = true)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(crate) prefill_chunk: Option<u32>,
    /// Type of the KV cache; `auto` is `f32` on unquantised weights, else `bf16`
    #[arg(long, value_name = "TYPE", default_value = "auto")]
    #[arg(env = "SNOWMELT_KV", hide_env_values = true)]
    pub(crate) kv: KvArg,
    /// Compare every expert read with its digest (packed models only)
    #[arg(long, env = "SNOWMELT_CHECK_READS", hide_env_values = true)]
    #[arg(value_parser = BoolishValueParser::new())]
    pub(crate) check_reads: bool,
    /// Cache of rows of tables that stay on disk, such as embeddings of n-grams
    /// [default: a sixteenth of what the budget spares, up to 64 MiB]
    #[arg(long, value_name = "SIZE", env = "SNOWMELT_ROW_CACHE", hide_env_values = true)]
    pub(crate) row_cache: Option<CacheSize>,
    /// What layers attend to whose indexer chooses blocks of tokens: `sparse`, the
    /// chosen ones, or `dense`, all of them, for comparison
    #[arg(long, value_name = "HOW", default_value = "sparse")]
    #[arg(env = "SNOWMELT_QSA", hide_env_values = true)]
    pub(crate) qsa: QsaArg,
    #[command(flatten)]
    pub(crate) cpu: CpuArgs,
}

/// How it is computed.
#[derive(Clone, Copy, Debug, Args)]
#[command(next_help_heading = "Processor")]
pub(crate) struct CpuArgs {
    /// Threads that compute [default: one for each core]
    #[arg(short, long, value_name = "N", env = "SNOWMELT_THREADS", hide_env_values = true)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) threads: Option<u32>,
    /// Rounding of activations; `auto` is `i16` beside quantised weights, else `f32`
    #[arg(long, value_name = "MODE", default_value = "auto")]
    #[arg(env = "SNOWMELT_ACTIVATIONS", hide_env_values = true)]
    pub(crate) activations: ActivationsArg,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum ResidencyArg {
    Auto,
    Resident,
    Mapped,
    Streamed,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum IoArg {
    Auto,
    Uring,
    Pread,
    Mmap,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum ActivationsArg {
    Auto,
    F32,
    I16,
    I8,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum KvArg {
    Auto,
    F32,
    F16,
    Bf16,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum QsaArg {
    Sparse,
    Dense,
}

impl CpuArgs {
    /// Starts the backend.
    pub(crate) fn backend(self) -> Result<Cpu> {
        let activations = match self.activations {
            ActivationsArg::Auto => Activations::Auto,
            ActivationsArg::F32 => Activations::F32,
            ActivationsArg::I16 => Activations::I16,
            ActivationsArg::I8 => Activations::I8,
        };
        let threads = self.threads.map_or(0, |threads| threads as usize);
        Ok(Cpu::new(CpuOptions { threads, activations, ..CpuOptions::default() })?)
    }
}

impl EngineArgs {
    /// What the engine is asked for.
    pub(crate) fn options(&self, checkpoint: &Checkpoint) -> EngineOptions {
        let memory_bytes = match self.memory {
            Memory::Auto => None,
            Memory::Bytes(bytes) => Some(bytes),
            Memory::Percent(percent) => {
                available_memory().map(|available| (available as f64 * percent / 100.0) as u64)
            }
        };
        EngineOptions {
            memory_bytes,
            slots: self.slots,
            context_tokens: self.context.map(|context| context as usize),
            residency: match self.residency {
                ResidencyArg::Auto => Residency::Auto,
                ResidencyArg::Resident => Residency::Resident,
                ResidencyArg::Mapped => Residency::Mapped,
                ResidencyArg::Streamed => Residency::Streamed,
            },
            io: match self.io {
                IoArg::Auto => Io::Auto,
                IoArg::Uring => Io::Uring,
                IoArg::Pread => Io::Pread,
                IoArg::Mmap => Io::Mmap,
            },
            prefill_chunk: self.prefill_chunk.map(|rows| rows as usize),
            kv: self.kv_type(checkpoint),
            row_cache_bytes: self.row_cache.map(|CacheSize(bytes)| bytes),
            model: self.model_options(),
            check_reads: self.check_reads,
            ..EngineOptions::default()
        }
    }

    /// What is asked of the family.
    pub(crate) fn model_options(&self) -> ModelOptions {
        let qsa = match self.qsa {
            QsaArg::Sparse => Qsa::Sparse,
            QsaArg::Dense => Qsa::Dense,
        };
        ModelOptions { qsa }
    }

    /// f32 where activations are f32, so that what the oracle computes stays exact.
    pub(crate) fn kv_type(&self, checkpoint: &Checkpoint) -> BufType {
        match (self.kv, self.cpu.activations) {
            (KvArg::F32, _) | (KvArg::Auto, ActivationsArg::F32) => BufType::F32,
            (KvArg::F16, _) => BufType::F16,
            (KvArg::Auto, ActivationsArg::Auto) if !is_quantised(checkpoint) => BufType::F32,
            (KvArg::Bf16 | KvArg::Auto, _) => BufType::Bf16,
        }
    }

    /// Opens the engine; `context` is used where no flag asks for another.
    pub(crate) fn open(
        &self,
        checkpoint: &Checkpoint,
        context: Option<usize>,
        ui: Ui,
    ) -> Result<Engine<Cpu>> {
        let backend = self.cpu.backend()?;
        let mut options = self.options(checkpoint);
        options.context_tokens = options.context_tokens.or(context);
        let engine = Engine::open(checkpoint, backend, &options)?;
        let plan = engine.plan();
        let all = plan.fixed_bytes() + plan.n_experts as u64 * plan.slot_bytes;
        if plan.residency == Residency::Mapped && all > plan.budget_bytes {
            ui.warn(format_args!(
                "the mapped model needs {}, more than the budget of {}: the system decides what \
                 stays in memory\nhint: `--residency streamed` keeps the budget",
                Bytes(all),
                Bytes(plan.budget_bytes)
            ));
        }
        ui.detail(format_args!("{:?}", engine.backend()));
        ui.detail(plan.subtraction().trim_end());
        ui.detail(residency_line(plan));
        ensure!(plan.context_tokens > 0, "the plan left no context");
        Ok(engine)
    }
}

/// Refuses tokens that do not fit into the context, and says what helps: `shorter`, and a longer
/// context where the model has one.
pub(crate) fn ensure_fits(engine: &Engine<Cpu>, tokens: usize, shorter: &str) -> Result<()> {
    let (limit, model) = (engine.plan().context_tokens, engine.census().context_max);
    if tokens <= limit {
        return Ok(());
    }
    let error = EngineError::Context { got: tokens, limit, model };
    match limit < model {
        true => bail!("{error}\nhint: {shorter}, or `--context` can be raised to {model}"),
        false => bail!("{error}, the longest of this model\nhint: {shorter}"),
    }
}

/// A line about slots and residency.
pub(crate) fn residency_line(plan: &snowmelt_engine::Plan) -> String {
    let (n, slots, each) = (plan.n_experts, plan.slots, Bytes(plan.slot_bytes));
    match plan.residency {
        _ if n == 0 => "no routed experts: the whole model is resident".to_owned(),
        Residency::Mapped => format!("mapped: {n} experts of {each} in the page cache"),
        Residency::Resident => format!("resident: all {n} experts of {each} in memory"),
        Residency::Auto | Residency::Streamed => format!(
            "streamed: {} of {each} for {n} experts ({:.0} %)",
            counted(slots as usize, "slot"),
            f64::from(slots) * 100.0 / n as f64
        ),
    }
}

/// Whether any weight is stored in blocks of integers.
pub(crate) fn is_quantised(checkpoint: &Checkpoint) -> bool {
    let trunk = checkpoint.tensors().filter_map(|tensor| tensor.encoding);
    let layers = checkpoint.packed().map(Packed::expert_layers).unwrap_or_default();
    let experts = layers.iter().flat_map(|layer| layer.pieces.iter().map(|piece| piece.encoding));
    trunk.chain(experts).any(Encoding::is_quantised)
}
