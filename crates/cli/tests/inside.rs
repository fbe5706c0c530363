//! Captures, comparisons, and what a config alone says.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

use half::f16;
use safetensors::SafeTensors;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Exit code, stdout, stderr.
fn run(args: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_snowmelt"));
    command.args(args).stdin(Stdio::null()).env("NO_COLOR", "1");
    let output = command.output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(!stderr.contains("panicked"), "{stderr}");
    (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap(), stderr)
}

/// A folder with ids, and the fixture of `qwen4_exp`.
fn case() -> (TempDir, String, String) {
    let folder = TempDir::new().unwrap();
    let ids = folder.path().join("ids.json");
    fs::write(&ids, "[3, 141, 59, 26, 5, 35, 8, 97, 93, 238]").unwrap();
    let model = root().join("fixtures/oracle/qwen4_exp").display().to_string();
    (folder, ids.display().to_string(), model)
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// Row 5 of a tensor, as f16 bytes of `f` of each value.
fn halves(file: &[u8], name: &str, f: impl Fn(f32) -> f32) -> Vec<u8> {
    let tensors = SafeTensors::deserialize(file).unwrap();
    let tensor = tensors.tensor(name).unwrap();
    let width = tensor.shape()[1];
    let row = floats(tensor.data())[5 * width..6 * width].to_vec();
    row.into_iter().flat_map(|x| f16::from_f32(f(x)).to_le_bytes()).collect()
}

#[test]
fn legacy_captures_hold_what_the_others_hold() {
    let (folder, ids, model) = case();
    let (new, old) = (folder.path().join("new"), folder.path().join("old"));
    let what = "layers,attention,gdn";
    let common = ["capture", &model, "--ids", &ids, "--what", what, "--activations", "f32"];
    let to = |out: &Path, more: &[&str]| {
        let out = out.display().to_string();
        let (code, _, stderr) = run(&[&common[..], &["--out", &out], more].concat());
        assert_eq!(code, 0, "{stderr}");
    };
    to(&new, &[]);
    to(&old, &["--format", "legacy", "--position", "5"]);
    let read = |name: &str| fs::read(new.join(name)).unwrap();
    let (layers, attention, gdn) =
        (read("layers.safetensors"), read("attention.safetensors"), read("gdn.safetensors"));
    let same = |x: f32| x;
    let mut expected = Vec::new();
    for stage in ["input", "mixed", "output"] {
        for layer in 0..2 {
            expected.extend(halves(&layers, &format!("layers.{layer}.layer.{stage}"), same));
        }
    }
    assert!(fs::read(old.join("layers.f16")).unwrap() == expected, "layers");
    let expected = ["before", "after"].map(|s| halves(&gdn, &format!("layers.0.gdn.{s}"), same));
    assert!(fs::read(old.join("gdn.f16")).unwrap() == expected.concat(), "gdn");
    let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
    let mut expected = Vec::new();
    let f: [(&str, &dyn Fn(f32) -> f32); 6] = [
        ("normed", &same),
        ("gate", &sigmoid),
        ("mixed", &same),
        ("branch", &same),
        ("inject", &|x| 2.0 * sigmoid(x / 4.0)),
        ("joined", &same),
    ];
    for (index, (stage, f)) in f.into_iter().enumerate() {
        expected.extend(halves(&attention, &format!("layers.0.hc.{stage}"), f));
        expected.resize((index + 1) * 512, 0);
    }
    assert!(fs::read(old.join("attention.f16")).unwrap() == expected, "attention");
    let header = "{\n  \"format\": \"qwen4_layer_boundary_capture_v1\",\n  \"position\": 5,\n  \
                  \"layers\": 2,\n  \"wide_dim\": 256,\n  \"dtype\": \"float16\",\n  \"layout\": \
                  \"[stage][layer][wide_dim]\",\n  \"stages\": [\"layer_input_after_ple\", \
                  \"after_attention_join\", \"after_moe_join\"],\n  \"reference\": \"SlotStream \
                  current_backend_reference.py --kind layers\",\n  \"data\": \"layers.f16\"\n}\n";
    assert_eq!(fs::read_to_string(old.join("layers.json")).unwrap(), header);
}

#[test]
fn bad_settings_turn_a_capture_off_and_nothing_else() {
    let (folder, ids, model) = case();
    let out = folder.path().join("out").display().to_string();
    let base = ["capture", &model, "--ids", &ids, "--out", &out];
    let (_, expected, _) = run(&base);
    let bad: [(&[&str], &str); 6] = [
        (&["--layers", "3..9"], "--layers 3..9"),
        (&["--layers", "2..2"], "--layers 2..2"),
        (&["--layers", "x"], "--layers x"),
        (&["--position", "10"], "expected 0 to 9"),
        (&["--position", "-1"], "--position -1"),
        (&["--what", "gdn", "--layers", "3..4"], "no capture of gdn"),
    ];
    for (args, message) in bad {
        let (code, stdout, stderr) = run(&[&base[..], args].concat());
        assert_eq!(code, 0, "{args:?}: {stderr}");
        assert_eq!(stdout, expected, "{args:?}");
        assert!(stderr.contains(message), "{args:?}: {stderr}");
    }
}

#[test]
fn compare_finds_what_was_planted() {
    let (folder, ids, model) = case();
    let a = folder.path().join("a.safetensors").display().to_string();
    let (code, _, stderr) = run(&["logits", &model, "--ids", &ids, "--out", &a]);
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(run(&["compare", &a, &a]).0, 0);
    let bytes = fs::read(&a).unwrap();
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let row = 4 * 320;
    let planted = |name: &str, change: &dyn Fn(&mut [u8])| {
        let mut bytes = bytes.clone();
        change(&mut bytes[data..]);
        let path = folder.path().join(name).display().to_string();
        fs::write(&path, bytes).unwrap();
        run(&["compare", &a, &path])
    };
    let nan = |data: &mut [u8]| data[3 * row + 8..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    let shift = |data: &mut [u8]| data.rotate_right(row);
    let swap = |data: &mut [u8]| {
        let (first, second) = data.split_at_mut(4 * row);
        first[row..2 * row].swap_with_slice(&mut second[..row]);
    };
    type Planted<'a> = (&'a str, &'a dyn Fn(&mut [u8]), &'a str);
    let cases: [Planted<'_>; 3] = [
        ("nan.safetensors", &nan, "B holds NaN at row 3, column 2"),
        ("shift.safetensors", &shift, "rows of B are those of A, 1 later"),
        ("swap.safetensors", &swap, "rows 1 and 4 are exchanged"),
    ];
    for (name, change, message) in cases {
        let (code, stdout, _) = planted(name, change);
        assert_eq!(code, 3, "{name}");
        assert!(stdout.contains(message), "{name}: {stdout}");
    }
}

/// Every config of a known family, against the sums that a script makes of the shapes.
#[test]
fn a_config_alone_says_what_a_model_weighs() {
    let folder = root().join("../shared/configs");
    let script = folder.join("sizes.py");
    let sums = Command::new("python3").arg(&script).arg("--json").output();
    let Some(sums) = sums.ok().filter(|sums| sums.status.success()) else {
        println!("skipped: `{}` or python3 is missing", script.display());
        return;
    };
    let sums: Value = serde_json::from_slice(&sums.stdout).unwrap();
    let mut known = 0;
    for (name, expected) in sums.as_object().unwrap() {
        let config = folder.join(format!("{name}.json")).display().to_string();
        let (code, stdout, stderr) = run(&["plan", "--config", &config, "--bits", "4.5", "--json"]);
        if code != 0 {
            assert!(stderr.contains("no family that this version runs"), "{name}: {stderr}");
            continue;
        }
        known += 1;
        let found: Value = serde_json::from_str(&stdout).unwrap();
        for (field, value) in expected.as_object().unwrap() {
            let Some(found) = found[field].as_f64() else { continue };
            let expected = value.as_f64().unwrap();
            let apart = (found - expected).abs();
            assert!(apart <= 0.01 * expected.abs(), "{name} {field}: {found}, {expected}");
        }
    }
    assert!(known >= 12, "{known} configs of known families");
}

#[test]
fn a_second_rounding_is_warned_of() {
    let folder = TempDir::new().unwrap();
    let source = root().join("fixtures/oracle/qwen3_moe").display().to_string();
    let [once, twice] = ["once", "twice"].map(|n| folder.path().join(n).display().to_string());
    let (code, _, stderr) = run(&["pack", &source, &once, "--trunk", "q8"]);
    assert!(code == 0 && !stderr.contains("second time"), "{stderr}");
    let (code, _, stderr) = run(&["pack", &once, &twice, "--trunk", "q4g32"]);
    assert!(code == 0 && stderr.contains("second time"), "{stderr}");
}
