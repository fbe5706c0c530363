//! Safetensors folders: what opens, and every way in which one can be wrong.

use serde_json::{Value, json};
use snowmelt_weights::{Checkpoint, CheckpointKind, Encoding, WeightsError, verify};

use crate::common::*;

const INDEX: &str = "model.safetensors.index.json";

fn sharded(index: &Value, shards: &[(&str, Vec<u8>)]) -> Result<Checkpoint, WeightsError> {
    let mut files = vec![("config.json", CONFIG.into()), (INDEX, index.to_string().into_bytes())];
    files.extend(shards.iter().cloned());
    open_memory(&files)
}

#[test]
fn a_single_file_opens_and_reads() {
    let tensors = [
        tensor("b", "BF16", &[3, 32]),
        tensor("a", "F32", &[5]),
        tensor("scalar", "F16", &[]),
        tensor("ids", "I64", &[2, 2]),
        tensor("conv", "BF16", &[4, 1, 3]),
    ];
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "config.json", CONFIG);
    write(folder.path(), "model.safetensors", safetensors(&tensors));
    write(folder.path(), "tokenizer.json", "{}");
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(checkpoint.kind(), CheckpointKind::HuggingFace);
    assert_eq!(checkpoint.config()["hidden_size"], 32);
    assert_eq!(checkpoint.sidecar("tokenizer.json").unwrap().unwrap(), b"{}");
    assert!(checkpoint.sidecar("chat_template.jinja").unwrap().is_none());
    assert!(checkpoint.sidecar("../config.json").unwrap().is_none());
    let names: Vec<&str> = checkpoint.tensors().map(|t| t.name.as_str()).collect();
    assert_eq!(names, ["a", "b", "conv", "ids", "scalar"]);
    for t in &tensors {
        let info = checkpoint.tensor(t.name).unwrap();
        let mut bytes = vec![0; info.len as usize];
        checkpoint.read(info.file, info.offset, &mut bytes).unwrap();
        assert_eq!(bytes, t.bytes, "{}", t.name);
        assert_eq!(info.shape, t.shape);
    }
    let shape = |name: &str| {
        let t = checkpoint.tensor(name).unwrap();
        (t.rows(), t.d_in(), t.encoding)
    };
    assert_eq!(shape("a"), (1, 5, Some(Encoding::F32)));
    assert_eq!(shape("scalar"), (1, 1, Some(Encoding::F16)));
    assert_eq!(shape("conv"), (4, 3, Some(Encoding::Bf16)));
    assert_eq!(shape("ids"), (2, 2, None));
    let mut row = vec![0; 64];
    checkpoint.read_rows(checkpoint.tensor("b").unwrap(), 2, &mut row).unwrap();
    assert_eq!(row, tensors[0].bytes[128..]);
    let report = verify(&checkpoint, &mut |_, _| {}).unwrap();
    assert!(report.headers_only && report.tensors == 5, "{report:?}");
}

#[test]
fn what_a_model_requires_is_checked() {
    let file = safetensors(&[tensor("w", "BF16", &[3, 32]), tensor("ids", "I64", &[2])]);
    let checkpoint = open_single(file).unwrap();
    checkpoint.require("w", &[3, 32]).unwrap();
    expect_error(checkpoint.require("v", &[1]), &["`v`", "missing", "`memory`", "`[1]`"]);
    expect_error(checkpoint.require("w", &[32, 3]), &["`w`", "`[32, 3]`", "`[3, 32]`"]);
    expect_error(checkpoint.require("ids", &[2]), &["`ids`", "`I64`", "`BF16`"]);
}

#[test]
fn shards_open_and_surplus_tensors_are_listed() {
    let one = safetensors(&[tensor("a", "BF16", &[4]), tensor("extra", "F32", &[1])]);
    let two = safetensors(&[tensor("b", "BF16", &[2, 4])]);
    let index = json!({"metadata": {"total_size": 1}, "weight_map": {"b": "2.st", "a": "1.st"}});
    let shards = [("1.st", one), ("2.st", two)];
    let checkpoint = sharded(&index, &shards).unwrap();
    assert_eq!(checkpoint.files().len(), 2);
    assert_eq!(checkpoint.tensors().count(), 3);
    assert_eq!(checkpoint.tensor("b").unwrap().file, 1);
}

#[test]
fn indices_that_do_not_fit_are_refused() {
    let shard = |name| safetensors(&[tensor(name, "BF16", &[4])]);
    let map = |a: &str, b: &str| json!({"weight_map": {"a": a, "b": b}});
    let both = [("1.st", shard("a")), ("2.st", shard("b"))];
    sharded(&map("1.st", "2.st"), &both).unwrap();
    expect_error(sharded(&map("1.st", "3.st"), &both), &[INDEX, "`b`", "`3.st`", "incomplete"]);
    expect_error(sharded(&map("2.st", "1.st"), &both), &[INDEX, "`a`", "`2.st`", "`1.st`"]);
    let index = json!({"weight_map": {"a": "1.st", "b": "2.st", "c": "2.st"}});
    expect_error(sharded(&index, &both), &[INDEX, "`c`", "`2.st`", "no shard"]);
    let twice = [("1.st", shard("a")), ("2.st", shard("a"))];
    expect_error(sharded(&map("1.st", "2.st"), &twice), &["`a`", "`1.st`", "`2.st`", "again"]);
    for bad in ["../2.st", "/etc/passwd", "x/2.st", "..", "", "C:2.st", "a\\b"] {
        expect_error(sharded(&map("1.st", bad), &both), &[INDEX, "`b`", &format!("`{bad}`")]);
    }
    let text = br#"{"weight_map": {"a": "1.st", "a": "2.st"}}"#.to_vec();
    let files = [("config.json", CONFIG.into()), (INDEX, text)];
    expect_error(open_memory(&files), &[INDEX, "line `1`", "`a`", "twice"]);
    for (text, parts) in [
        ("[]", ["line `1`", "expected struct"]),
        ("{}", ["line `1`", "missing field `weight_map`"]),
        (r#"{"weight_map": {"a": 3}}"#, ["line `1`", "expected a string"]),
        ("{\n\"weight_map\": {\"a\": \"1.st\"", ["line `2`", "EOF"]),
    ] {
        let files = [("config.json", CONFIG.into()), (INDEX, text.into())];
        expect_error(open_memory(&files), &[&[INDEX], &parts[..]].concat());
    }
}

#[test]
fn damaged_headers_are_refused_by_name() {
    let entry = |dtype: &str, shape: &str, range: &str| {
        format!(r#"{{"w": {{"dtype": "{dtype}", "shape": {shape}, "data_offsets": {range}}}}}"#)
    };
    let cases: &[(String, usize, &[&str])] = &[
        (entry("F32", "[2]", "[8, 0]"), 8, &["`w`", "`8..0`", "`0..8`"]),
        (entry("F32", "[2]", "[0, 9]"), 8, &["`w`", "`0..9`", "`0..8`", "truncated"]),
        (entry("F32", "[2]", "[0, 18446744073709551615]"), 8, &["`w`", "18446744073709551615"]),
        (entry("F32", "[2]", "[18446744073709551608, 7]"), 8, &["`w`", "18446744073709551608"]),
        (entry("F32", "[3]", "[0, 8]"), 8, &["`w`", "`12`", "`8`", "`F32`", "`[3]`"]),
        (entry("I8", "[3]", "[0, 8]"), 8, &["`w`", "`3`", "`8`", "`I8`"]),
        (entry("F32", "[0]", "[0, 0]"), 0, &["`w`", "`[0]`", "impossible"]),
        (entry("F32", "[9223372036854775808, 2]", "[0, 0]"), 0, &["`w`", "9223372036854775808"]),
        (entry("F32", "[9223372036854775808]", "[0, 8]"), 8, &["`w`", "9223372036854775808"]),
        (entry("I64", "[0, 9223372036854775808, 2]", "[0, 0]"), 0, &["`w`", "[0, 92233"]),
        (entry("F32", "[2]", "[0, 8]"), 12, &["`8..12`", "no tensor", "`4` bytes"]),
        (entry("F32", "[1]", "[4, 8]"), 8, &["`0..4`", "no tensor"]),
        (entry("F32", "[-1]", "[0, 8]"), 8, &["`w`", "line `1`", "-1"]),
        (entry("F32", "[1.5]", "[0, 8]"), 8, &["`w`", "1.5"]),
        (entry("F32", "[2]", "[0, 4, 8]"), 8, &["line `1`"]),
        (entry("F32", "2", "[0, 8]"), 8, &["`w`", "expected a sequence"]),
        (r#"{"w": {"dtype": "F32", "shape": [1]}}"#.into(), 4, &["`w`", "data_offsets"]),
        (r#"{"__metadata__": {"a": 3}}"#.into(), 0, &["`__metadata__`", "expected a string"]),
        (r#"{"__metadata__": []}"#.into(), 0, &["`__metadata__`", "object of strings"]),
        ("[]".into(), 0, &["line `1`", "object of tensors"]),
        ("{\n \"w\": nonsense}".into(), 0, &["line `2`"]),
        (String::new(), 0, &["line `1`", "EOF"]),
    ];
    for (header, data, parts) in cases {
        let result = open_single(raw(header, &vec![0; *data]));
        expect_error(result, &[&["`model.safetensors`"], *parts].concat());
    }
    let torn = open_single(raw("{\"w\": {", &[]));
    expect_error(torn, &["the header of `model.safetensors`", "line `1` column `7`", "EOF"]);
}

#[test]
fn overlaps_and_duplicates_are_refused() {
    let two = |a: &str, b: &str, second: &str| {
        format!(
            r#"{{"a": {{"dtype": "I8", "shape": [4], "data_offsets": {a}}},
                "{second}": {{"dtype": "I8", "shape": [4], "data_offsets": {b}}}}}"#
        )
    };
    open_single(raw(&two("[4, 8]", "[0, 4]", "b"), &[0; 8])).unwrap();
    let result = open_single(raw(&two("[0, 4]", "[2, 6]", "b"), &[0; 6]));
    expect_error(result, &["`b`", "byte `2`", "`a`", "`4`"]);
    let result = open_single(raw(&two("[0, 4]", "[0, 4]", "b"), &[0; 4]));
    expect_error(result, &["`b`", "byte `0`", "`a`"]);
    let result = open_single(raw(&two("[0, 4]", "[4, 8]", "a"), &[0; 8]));
    expect_error(result, &["`a`", "again", "once"]);
}

#[test]
fn header_lengths_are_checked_before_anything_is_allocated() {
    let good = safetensors(&[tensor("w", "BF16", &[4])]);
    let mut claims = good.clone();
    claims[..8].copy_from_slice(&(1u64 << 60).to_le_bytes());
    expect_error(open_single(claims), &["`1152921504606846976`", "truncated or not"]);
    let mut claims = good.clone();
    claims[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    expect_error(open_single(claims), &["`18446744073709551615`"]);
    let interrupted = ["`model.safetensors`", "header", "download was interrupted"];
    expect_error(
        open_single(good[..7].to_vec()),
        &[&["only `7` bytes"], &interrupted[..]].concat(),
    );
    expect_error(open_single(Vec::new()), &[&["is empty"], &interrupted[..]].concat());
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n".to_vec();
    expect_error(open_single(pointer), &["git lfs pull"]);
    // A file with a hole may be long without having blocks; the cap is below its length.
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "config.json", CONFIG);
    write(folder.path(), "model.safetensors", 200_000_000u64.to_le_bytes());
    let file = std::fs::File::options().write(true).open(folder.path().join("model.safetensors"));
    file.unwrap().set_len(300_000_000).unwrap();
    expect_error(Checkpoint::open(folder.path()), &["`200000000`", "`100000000`"]);
}

#[test]
fn unknown_types_are_listed_and_fatal_only_when_needed() {
    let header = r#"{"w": {"dtype": "F3_NEW", "shape": [5], "data_offsets": [0, 2]},
        "f8": {"dtype": "F8_E4M3", "shape": [2, 2], "data_offsets": [2, 6]},
        "f4": {"dtype": "F4", "shape": [3, 2], "data_offsets": [6, 9]},
        "none": {"dtype": "I32", "shape": [0, 7], "data_offsets": [9, 9]}}"#;
    let checkpoint = open_single(raw(header, &[0; 9])).unwrap();
    assert_eq!(checkpoint.tensors().filter(|t| t.encoding.is_none()).count(), 4);
    expect_error(checkpoint.require("w", &[5]), &["`w`", "`F3_NEW`"]);
    let mut row = [0];
    expect_error(checkpoint.read_rows(checkpoint.tensor("w").unwrap(), 0, &mut row), &["`w`"]);
}

#[test]
fn configurations_that_are_none_are_refused() {
    let file = safetensors(&[tensor("w", "BF16", &[4])]);
    let open = |config: &str| {
        open_memory(&[("config.json", config.into()), ("model.safetensors", file.clone())])
    };
    expect_error(open("[1]"), &["`config.json`", "an array", "an object"]);
    expect_error(open("{\n  \"a\": 1,\n  b"), &["`config.json`", "line `3`", "column `3`"]);
    let text: &[u8] = b"\xff\xfe";
    let files = [("config.json", text.to_vec()), ("model.safetensors", file.clone())];
    expect_error(open_memory(&files), &["`config.json`", "line `1`"]);
    let files = [("model.safetensors", file)];
    expect_error(open_memory(&files), &["no `config.json`"]);
}

#[test]
fn folders_that_are_no_model_get_advice() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    expect_error(Checkpoint::open(&path.join("nothing")), &["nothing` does not exist"]);
    expect_error(Checkpoint::open(path), &["holds no model", "an empty folder"]);
    write(path, "model.gguf", "GGUF");
    expect_error(Checkpoint::open(path), &["`model.gguf`", "GGUF files are not supported"]);
    expect_error(Checkpoint::open(&path.join("model.gguf")), &["is a file", "GGUF"]);
    write(path, "x.safetensors", "");
    expect_error(Checkpoint::open(path), &["index"]);
    expect_error(Checkpoint::open(&path.join("x.safetensors")), &["give the folder"]);
    std::fs::create_dir(path.join("p")).unwrap();
    write(&path.join("p"), "pytorch_model.bin", "");
    expect_error(Checkpoint::open(&path.join("p")), &["convert them to safetensors"]);
    write(&path.join("p"), "trunk.bin", "");
    expect_error(Checkpoint::open(&path.join("p")), &["without its `manifest.json`"]);
    std::fs::create_dir(path.join("m.partial")).unwrap();
    expect_error(Checkpoint::open(&path.join("m")), &["m.partial` is an unfinished pack"]);
    expect_error(Checkpoint::open(&path.join("m.partial")), &["unfinished pack", "`pack`"]);
    // A folder in the place of the file.
    std::fs::create_dir_all(path.join("d/model.safetensors")).unwrap();
    write(&path.join("d"), "config.json", CONFIG);
    assert!(Checkpoint::open(&path.join("d")).is_err());
}

#[test]
fn reads_at_any_offset_equal_the_file() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = safetensors(&[tensor("w", "BF16", &[1234, 1001])]);
    write(folder.path(), "config.json", CONFIG);
    write(folder.path(), "model.safetensors", &file);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    if cfg!(target_os = "linux") && !checkpoint.files()[0].is_direct() {
        println!("skipped: direct reads, the file system refuses them");
    }
    let len = file.len();
    let mut ranges = vec![(0, len), (len, len), (len - 1, len), (4095, 4097), (4096, 8192)];
    for seed in 0..300u64 {
        let pick = noise(8, seed);
        let number = |at: usize| u32::from_le_bytes(pick[at..at + 4].try_into().unwrap()) as usize;
        let start = number(0) % len;
        let size = number(4) % [64, 5000, 70_000, 2_000_000][seed as usize % 4];
        ranges.push((start, (start + size).min(len)));
    }
    let (checkpoint, file) = (&checkpoint, &file);
    std::thread::scope(|scope| {
        for ranges in ranges.chunks(80) {
            scope.spawn(move || {
                for (start, end) in ranges {
                    let mut out = vec![0xaa; end - start];
                    checkpoint.read(0, *start as u64, &mut out).unwrap();
                    assert!(out == file[*start..*end], "{start}..{end}");
                }
            });
        }
    });
    let mut out = [0; 10];
    let result = checkpoint.read(0, len as u64 - 4, &mut out);
    expect_error(result, &["`4` of the `10`", &format!("offset `{}`", len - 4)]);
    expect_error(checkpoint.read(0, u64::MAX, &mut out), &["`0` of the `10`"]);
}

#[test]
fn a_file_cut_while_open_is_an_error() {
    for folder in [tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")), tempfile::tempdir()] {
        let folder = folder.unwrap();
        let file = safetensors(&[tensor("w", "BF16", &[100, 100])]);
        write(folder.path(), "config.json", CONFIG);
        write(folder.path(), "model.safetensors", &file);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let path = folder.path().join("model.safetensors");
        std::fs::File::options().write(true).open(path).unwrap().set_len(9000).unwrap();
        let mut out = vec![7; 2000];
        let result = checkpoint.read(0, 8000, &mut out);
        expect_error(result, &["model.safetensors", "`1000` of the `2000`", "offset `8000`"]);
        expect_error(checkpoint.read(0, 12000, &mut out), &["`0` of the `2000`"]);
        expect_error(verify(&checkpoint, &mut |_, _| {}), &["`w`", "truncated"]);
    }
}
