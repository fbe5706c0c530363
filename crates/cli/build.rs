//! Lists the files of the embedded model, with their digests, for `src/tiny.rs`.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Relative to this crate.
const CONTAINER: &str = "../../models/tiny/container";

fn main() {
    let root = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let folder = root.join(CONTAINER);
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={}", folder.display());
    let mut code = String::from("const FILES: &[(&str, &[u8], [u8; 32])] = &[\n");
    for path in files(&folder) {
        println!("cargo::rerun-if-changed={}", path.display());
        let name = path.file_name().expect("a file has a name").to_string_lossy().into_owned();
        let path = path.canonicalize().expect("a listed file exists");
        let digest = *blake3::hash(&std::fs::read(&path).expect("it can be read")).as_bytes();
        let path = path.to_str().expect("Rust source is UTF-8, so the checkout's path must be");
        writeln!(code, "    ({name:?}, include_bytes!({path:?}), {digest:?}),")
            .expect("memory takes all");
    }
    code.push_str("];\n");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it"));
    std::fs::write(out.join("tiny.rs"), code).expect("cargo's own folder is writable");
}

/// Files of the container in the order of their names; none where it is not checked out, and the
/// binary then has no embedded model.
fn files(folder: &Path) -> Vec<PathBuf> {
    if !folder.join("manifest.json").is_file() {
        println!("cargo::warning={CONTAINER} has no model, the name `tiny` will be unknown");
        return Vec::new();
    }
    let entries = std::fs::read_dir(folder).expect("it holds a manifest");
    let mut files: Vec<PathBuf> = entries
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .filter(|path| path.is_file())
        .collect();
    files.sort();
    files
}
