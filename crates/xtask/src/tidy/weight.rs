//! What a clone and a build have to carry.

use super::{Finding, Findings, Tree};
use crate::project;
use std::collections::BTreeSet;

const TREE_BYTES_MAX: u64 = 40 << 20;
const FILE_BYTES_MAX: u64 = 22 << 20;
/// Packages in the default build of the binary, ours included.
const PACKAGES_MAX: usize = 260;

const MIB: u64 = 1 << 20;

pub(super) fn check(tree: &Tree, findings: &mut Findings) {
    let total: u64 = tree.files.values().map(|file| file.bytes).sum();
    if total > TREE_BYTES_MAX {
        let (total, max) = (total.div_ceil(MIB), TREE_BYTES_MAX / MIB);
        let mut largest: Vec<_> =
            tree.files.iter().map(|(path, file)| (file.bytes, path)).collect();
        largest.sort_unstable_by(|a, b| b.cmp(a));
        let largest: Vec<&str> = largest.iter().take(3).map(|(_, path)| path.as_str()).collect();
        let largest = largest.join(", ");
        findings.add(".", 0, format!("{total} MiB in all, at most {max}; largest: {largest}"));
    }
    for (path, file) in &tree.files {
        if file.bytes > FILE_BYTES_MAX {
            let (bytes, max) = (file.bytes.div_ceil(MIB), FILE_BYTES_MAX / MIB);
            findings.add(path, 0, format!("{bytes} MiB, at most {max}: make it when it is needed"));
        }
    }
}

/// Asks cargo for the default tree of the binary; what it needs was fetched to build us.
pub(super) fn check_default_tree() -> Vec<Finding> {
    let ask = |offline: &[&str]| {
        let mut cargo = project::cargo();
        cargo.args(["tree", "-p", "snowmelt-cli", "-e", "normal", "--prefix", "none"]);
        project::capture(cargo.args(["--color", "never"]).args(offline))
    };
    let mut findings = Findings::default();
    match ask(&["--offline"]).or_else(|_| ask(&[])) {
        Ok(output) => packages(&String::from_utf8_lossy(&output), &mut findings),
        Err(error) => findings.add("Cargo.lock", 0, format!("{error:#}")),
    }
    findings.0
}

/// Counts the packages of `cargo tree --prefix none`.
fn packages(output: &str, findings: &mut Findings) {
    let lines = output.lines().filter(|line| !line.is_empty());
    // A package stands there again, with a star, wherever it is needed.
    let names: BTreeSet<&str> = lines.map(|line| line.trim_end_matches(" (*)")).collect();
    if names.len() > PACKAGES_MAX {
        let message = format!(
            "{} packages in the default tree of the binary, at most {PACKAGES_MAX}: take one out, \
             or put it behind a feature",
            names.len()
        );
        findings.add("Cargo.lock", 0, message);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::tree;
    use super::*;

    fn with_bytes(sizes: &[u64]) -> Vec<Finding> {
        let mut tree = tree(&[("a", ""), ("b", ""), ("c", "")]);
        for (file, &bytes) in tree.files.values_mut().zip(sizes) {
            file.bytes = bytes;
        }
        let mut findings = Findings::default();
        check(&tree, &mut findings);
        findings.0
    }

    #[test]
    fn heavy_trees_and_files_are_found() {
        assert_eq!(with_bytes(&[22 * MIB, 18 * MIB, 0]), []);
        let found = with_bytes(&[22 * MIB + 1, 0, 0]);
        assert!(found.len() == 1 && found[0].path == "a", "{found:?}");
        let found = with_bytes(&[16 * MIB, 16 * MIB, 8 * MIB + 1]);
        assert!(found.len() == 1 && found[0].path == ".", "{found:?}");
        assert!(found[0].message.starts_with("41 MiB"), "{found:?}");
    }

    #[test]
    fn packages_are_counted_once() {
        let lines = |n: usize| -> String {
            let both = |i| [format!("p{i} v1.0.0\n"), format!("p{i} v1.0.0 (*)\n")];
            (0..n).flat_map(both).collect()
        };
        let count = |n: usize| {
            let mut findings = Findings::default();
            packages(&lines(n), &mut findings);
            findings.0.len()
        };
        assert_eq!((count(260), count(261)), (0, 1));
    }
}
