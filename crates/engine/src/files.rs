//! What the operating system says about memory. The only place of this crate that reads `/proc` and
//! `/sys`.

use std::fs;
use std::path::{Path, PathBuf};

fn number(path: impl AsRef<Path>) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Bytes that this process holds in memory now.
pub(crate) fn process_bytes() -> Option<u64> {
    let statm = fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * 4096)
}

/// `key` of a file of `key value [kB]` lines, in bytes.
fn field(path: impl AsRef<Path>, key: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    let line = text
        .lines()
        .find(|line| line.strip_prefix(key).is_some_and(|rest| rest.starts_with([':', ' '])))?;
    let mut words = line[key.len()..].trim_start_matches(':').split_whitespace();
    let value: u64 = words.next()?.parse().ok()?;
    Some(if words.next() == Some("kB") { value * 1024 } else { value })
}

/// Bytes left in the tightest memory cgroup above this process; page cache counts as free, since it
/// can be reclaimed. Reads cgroup v1 and v2.
fn cgroup_left() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let mut least = None;
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (root, limit, usage) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max", "memory.current"),
            c if c.split(',').any(|c| c == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
            }
            _ => continue,
        };
        let root = PathBuf::from(root);
        let mut group = Some(Path::new(path.trim_start_matches('/')));
        while let Some(relative) = group {
            let folder = root.join(relative);
            if let (Some(limit), Some(used)) =
                (number(folder.join(limit)), number(folder.join(usage)))
            {
                let stat = folder.join("memory.stat");
                let cache = ["total_inactive_file", "total_active_file"]
                    .iter()
                    .filter_map(|key| field(&stat, key))
                    .sum::<u64>();
                let cache = match cache {
                    0 => field(&stat, "file").unwrap_or(0),
                    cache => cache,
                };
                let left = limit.saturating_sub(used.saturating_sub(cache));
                least = Some(least.map_or(left, |least: u64| least.min(left)));
            }
            group = relative.parent();
        }
    }
    least
}

/// Bytes that this process may still take: what the machine has available, page cache included, or
/// what its cgroup allows, whichever is less.
pub fn available_memory() -> Option<u64> {
    let machine = field("/proc/meminfo", "MemAvailable");
    match (machine, cgroup_left()) {
        (Some(machine), Some(group)) => Some(machine.min(group)),
        (machine, group) => machine.or(group),
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn linux_says_something() {
        let available = available_memory().expect("/proc/meminfo is there");
        assert!(available > 1 << 20, "{available}");
        assert!(process_bytes().expect("/proc/self/statm is there") > 100_000);
    }
}
