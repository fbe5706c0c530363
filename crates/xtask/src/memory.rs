//! The memory promise, measured: runs the binary in a memory cgroup and compares the group's peak,
//! page cache included, with the budget.

use crate::synth;
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// `cargo xtask memory`
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Folder for the generated model, which is removed afterwards.
    #[arg(long)]
    scratch: Option<PathBuf>,
}

/// What a run may take beyond its budget: 5 %, or this, whichever is more.
const SLACK_BYTES: u64 = 24 << 20;

pub(crate) fn run(options: &Options) -> Result<()> {
    let Some(parent) = writable_group() else {
        println!("skipped: no writable memory cgroup (v1) here, so there is no peak to read");
        return Ok(());
    };
    let binary = build()?;
    let scratch = options.scratch.clone().unwrap_or_else(std::env::temp_dir);
    let folder = scratch.join(format!("snowmelt-memory-{}", std::process::id()));
    fs::create_dir_all(&folder)?;
    let result = measure(&binary, &parent, &folder);
    fs::remove_dir_all(&folder).ok();
    result
}

fn measure(binary: &Path, parent: &Path, folder: &Path) -> Result<()> {
    let ids = folder.join("ids.json");
    let prompt: Vec<u32> = (0..48_u32).map(|i| (i * 2_654_435_761) % 4093).collect();
    fs::write(&ids, serde_json::to_vec(&prompt)?)?;
    let synth = folder.join("synth");
    synth::run(&synth::Options::promise(synth.clone()))?;
    check(binary, parent, &synth, 300 << 20, &ids)?;
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/models/tiny-moe");
    if !tiny.exists() {
        println!("skipped: the bf16 original of `tiny`, as ../shared is missing");
        return Ok(());
    }
    let tiny = tiny.canonicalize()?;
    let plan = Command::new(binary).args(["plan", "--json"]).arg(&tiny).output()?;
    ensure!(plan.status.success(), "plan: {}", String::from_utf8_lossy(&plan.stderr));
    let plan: Value = serde_json::from_slice(&plan.stdout)?;
    let smallest =
        plan["smallest_bytes"].as_u64().context("`plan --json` has no smallest_bytes")?;
    check(binary, parent, &tiny, smallest, &ids)
}

/// Once in a group of four times the budget, whose peak must keep to the budget; then in a group
/// whose limit is that bound.
fn check(binary: &Path, parent: &Path, model: &Path, budget: u64, ids: &Path) -> Result<()> {
    let bound = budget + (budget / 20).max(SLACK_BYTES);
    let mut outputs = Vec::new();
    for limit in [4 * budget, bound] {
        drop_cache(model)?;
        let group = Group::new(parent, limit)?;
        let mut command = Command::new("sh");
        let procs = group.0.join("cgroup.procs");
        // The shell moves itself into the group, then becomes the program.
        command
            .args(["-c", "echo $$ > \"$0\" && exec \"$@\""])
            .arg(&procs)
            .arg(binary)
            .args(["run", "--json", "--ignore-eos", "--temp", "0", "-n", "24"])
            .args(["--memory", &budget.to_string(), "--ids"])
            .arg(ids)
            .arg(model)
            .stdin(Stdio::null());
        let Output { status, stdout, stderr } = command.output()?;
        let stderr = String::from_utf8_lossy(&stderr);
        ensure!(status.success(), "{} at {budget}: {status}\n{stderr}", model.display());
        let output: Value = serde_json::from_slice(&stdout)?;
        outputs.push(output["output_ids"].clone());
        let peak = group.read("memory.max_usage_in_bytes")?;
        let failed = group.read("memory.failcnt")?;
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        println!(
            "{}: budget {:.1} MiB, group limit {:.1}, peak {:.1}, bound {:.1}, failcnt {failed}",
            model.file_name().unwrap_or_default().to_string_lossy(),
            mib(budget),
            mib(limit),
            mib(peak),
            mib(bound)
        );
        ensure!(peak <= bound, "the peak is above the bound");
    }
    ensure!(outputs[0] == outputs[1], "the output depends on the limit");
    Ok(())
}

/// This process's own memory cgroup (v1), if children can be made in it.
fn writable_group() -> Option<PathBuf> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let line = groups.lines().find(|line| {
        line.split(':').nth(1).is_some_and(|list| list.split(',').any(|name| name == "memory"))
    })?;
    let path = line.splitn(3, ':').nth(2)?;
    let folder = Path::new("/sys/fs/cgroup/memory").join(path.trim_start_matches('/'));
    let probe = folder.join(format!("snowmelt-probe-{}", std::process::id()));
    fs::create_dir(&probe).ok()?;
    fs::remove_dir(&probe).ok()?;
    Some(folder)
}

/// A child group, removed when dropped.
struct Group(PathBuf);

impl Group {
    fn new(parent: &Path, limit: u64) -> Result<Self> {
        let folder = parent.join(format!("snowmelt-{}", std::process::id()));
        fs::create_dir(&folder)?;
        let group = Self(folder);
        fs::write(group.0.join("memory.limit_in_bytes"), limit.to_string())?;
        Ok(group)
    }

    fn read(&self, name: &str) -> Result<u64> {
        let text = fs::read_to_string(self.0.join(name))?;
        text.trim().parse().with_context(|| format!("`{name}` of the group is `{text}`"))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        fs::write(self.0.join("memory.force_empty"), "0").ok();
        for _ in 0..20 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        eprintln!("could not remove the group `{}`", self.0.display());
    }
}

/// Takes the model's files out of the page cache, whose pages another group may hold: a hit there
/// would not be charged to the group that is measured.
fn drop_cache(model: &Path) -> Result<()> {
    Command::new("sync").status()?;
    if fs::write("/proc/sys/vm/drop_caches", "3").is_err() {
        println!("note: page cache of {} could not be dropped", model.display());
    }
    Ok(())
}

/// The release binary.
fn build() -> Result<PathBuf> {
    let args = ["build", "--release", "--package", "snowmelt-cli"];
    let status = Command::new(env!("CARGO")).args(args).status()?;
    if !status.success() {
        bail!("the binary does not build");
    }
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target"), PathBuf::from);
    Ok(target.join("release/snowmelt"))
}
