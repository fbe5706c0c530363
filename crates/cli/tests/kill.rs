//! `pack` killed at random points: nothing half-made opens, a restart finishes, and one flipped
//! byte anywhere is found.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const KILLS: usize = 50;
const FLIPS: usize = 24;

fn snowmelt(args: &[&Path]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_snowmelt"));
    command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.env("SNOWMELT_HOME", env!("CARGO_TARGET_TMPDIR"));
    command
}

fn code(mut command: Command) -> Option<i32> {
    command.status().unwrap().code()
}

fn pack(from: &Path, to: &Path) -> Command {
    let [command, experts, encoding] = ["pack", "--experts", "q8"].map(Path::new);
    snowmelt(&[command, from, to, experts, encoding])
}

/// xorshift64*: the seed makes the run repeatable but for the machine's speed.
fn random(state: &mut u64) -> u64 {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    state.wrapping_mul(0x2545_F491_4F6C_DD1D)
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn fifty_kills_and_flipped_bytes() {
    // Re-encoding 4 bits as 8 takes long enough to be hit at many places.
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny/container");
    let folder = tempfile::tempdir().unwrap();
    let [whole, to] = ["whole", "packed"].map(|name| folder.path().join(name));
    let start = Instant::now();
    assert_eq!(code(pack(&from, &whole)), Some(0));
    let full = start.elapsed();
    let partial = folder.path().join("packed.partial");
    let [inspect, verify] = ["inspect", "verify"].map(Path::new);
    let (mut state, mut killed) = (20_u64, 0);
    while killed < KILLS {
        let mut child = pack(&from, &to).spawn().unwrap();
        let delay = full.as_micros() as u64 * (random(&mut state) % 1000) / 4000;
        std::thread::sleep(Duration::from_micros(delay));
        child.kill().unwrap();
        if child.wait().unwrap().success() || to.exists() {
            // It was finished before the signal: once more from the start.
            assert_eq!(code(snowmelt(&[verify, &to])), Some(0));
            fs::remove_dir_all(&to).unwrap();
            continue;
        }
        killed += 1;
        for half_made in [&to, &partial] {
            assert_eq!(code(snowmelt(&[inspect, half_made])), Some(1), "after kill {killed}");
        }
    }
    assert_eq!(code(pack(&from, &to)), Some(0), "a restart finishes");
    assert_eq!(code(snowmelt(&[verify, &to])), Some(0));
    for (a, b) in files(&whole).iter().zip(files(&to)) {
        assert_eq!(a.file_name(), b.file_name());
        assert!(fs::read(a).unwrap() == fs::read(&b).unwrap(), "{} differs", b.display());
    }
    let files = files(&to);
    for flip in 0..FLIPS {
        let file = &files[flip % files.len()];
        let mut bytes = fs::read(file).unwrap();
        let at = (random(&mut state) % bytes.len() as u64) as usize;
        bytes[at] ^= 1 << (random(&mut state) % 8);
        fs::write(file, &bytes).unwrap();
        let found = code(snowmelt(&[verify, &to]));
        let name = file.display();
        assert!(matches!(found, Some(1 | 3)), "byte {at} of {name}: verify ended with {found:?}");
        bytes = fs::read(whole.join(file.file_name().unwrap())).unwrap();
        fs::write(file, &bytes).unwrap();
    }
    assert_eq!(code(snowmelt(&[verify, &to])), Some(0));
}
