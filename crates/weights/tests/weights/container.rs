//! The packed container: packing, every way to be interrupted, and finding damage.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};
use snowmelt_weights::{
    Bytes, Checkpoint, CheckpointKind, Encoding, PackPlan, Packer, PlannedLayer, PlannedPiece,
    PlannedTensor, WeightsError, verify,
};

use crate::common::*;

fn piece(role: &str, encoding: Encoding, d_out: usize, d_in: usize) -> PlannedPiece {
    PlannedPiece { role: role.into(), encoding, d_out, d_in }
}

pub(crate) fn plan() -> PackPlan {
    let tensor = |name: &str, encoding, shape: &[usize]| PlannedTensor {
        name: name.into(),
        shape: shape.into(),
        encoding,
    };
    let layer = |layer, n_experts, d| PlannedLayer {
        layer,
        n_experts,
        pieces: vec![
            piece("gate", Encoding::Q4G32, d, 64),
            piece("up", Encoding::Q8, d, 64),
            piece("down", Encoding::Q4G64, 64, 64),
            piece("bias", Encoding::F32, 1, 7),
        ],
    };
    PackPlan {
        family: "tiny".into(),
        config: json!({"hidden_size": 64, "rms_norm_eps": 1e-6, "odd": 0.100_000_000_000_000_02}),
        trunk: vec![
            tensor("embed", Encoding::Q8, &[11, 64]),
            tensor("norm", Encoding::Bf16, &[5]),
            tensor("conv", Encoding::F32, &[3, 1, 4]),
            tensor("big", Encoding::F32, &[700, 512]),
            tensor("scale", Encoding::F16, &[]),
        ],
        layers: vec![layer(1, 4, 24), layer(3, 3, 37)],
        sidecars: vec![
            ("tokenizer.json".into(), b"{\"a\": 1}".to_vec()),
            ("empty.txt".into(), Vec::new()),
        ],
        provenance: json!({"tool": "test", "files": [["model.safetensors", 1234]]}),
        kept: vec!["conv".into()],
    }
}

fn record(packer: &Packer, layer: u32, expert: u32) -> Vec<u8> {
    let bytes = packer.expert_layers().iter().find(|l| l.layer == layer).unwrap().record_bytes;
    noise(bytes as usize, u64::from(layer * 100 + expert))
}

fn write_next_tensor(packer: &mut Packer) -> bool {
    let Some(tensor) = packer.next_tensor() else { return false };
    let d_in = tensor.shape.last().copied().unwrap_or(1);
    let row_bytes = tensor.encoding.row_bytes(d_in);
    let rows = tensor.shape.iter().product::<usize>() / d_in;
    let all = noise(rows * row_bytes, tensor.name.len() as u64);
    packer
        .write_tensor(&tensor.name, |rows, out| {
            out.copy_from_slice(&all[rows.start * row_bytes..rows.end * row_bytes]);
            Ok::<(), WeightsError>(())
        })
        .unwrap();
    true
}

fn write_next_record(packer: &mut Packer) -> bool {
    let Some((layer, expert)) = packer.next_record() else { return false };
    let bytes = record(packer, layer, expert);
    packer.write_record(layer, expert, &bytes).unwrap();
    true
}

/// Writes up to `parts` parts, tensors and records mixed.
fn write_parts(packer: &mut Packer, parts: usize, seed: u64) {
    for choice in noise(parts, seed) {
        let steps: [fn(&mut Packer) -> bool; 2] = [write_next_tensor, write_next_record];
        let first = usize::from(choice % 2);
        let _ = steps[first](packer) || steps[1 - first](packer);
    }
}

fn pack(destination: &Path) {
    let mut packer = Packer::create_or_resume(destination, plan()).unwrap();
    write_parts(&mut packer, 100, 0);
    assert_eq!(packer.bytes_done(), packer.bytes_total());
    packer.finish().unwrap();
}

/// All files of a folder.
fn content(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap().map(Result::unwrap);
    entries
        .map(|e| (e.file_name().into_string().unwrap(), std::fs::read(e.path()).unwrap()))
        .collect()
}

/// A packed container in memory.
pub(crate) fn reference() -> BTreeMap<String, Vec<u8>> {
    let folder = scratch();
    pack(&folder.path().join("m"));
    content(&folder.path().join("m"))
}

pub(crate) fn open(files: &BTreeMap<String, Vec<u8>>) -> Result<Checkpoint, WeightsError> {
    let files: Vec<(&str, Bytes)> =
        files.iter().map(|(name, bytes)| (name.as_str(), bytes.clone().into())).collect();
    Checkpoint::from_memory("embedded", &files)
}

/// Puts a changed manifest and its digest into a container.
pub(crate) fn set_manifest(files: &mut BTreeMap<String, Vec<u8>>, manifest: &Value) {
    let text = serde_json::to_vec_pretty(manifest).unwrap();
    let digest = format!("{}\n", blake3::hash(&text));
    files.insert("manifest.json".into(), text);
    files.insert("manifest.blake3".into(), digest.into_bytes());
}

#[test]
fn a_pack_opens_and_holds_what_was_written() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("m");
    pack(&path);
    assert!(!folder.path().join("m.partial").exists());
    let names: Vec<String> = content(&path).into_keys().collect();
    let wanted = [
        "digests.bin",
        "empty.txt",
        "experts.bin",
        "manifest.blake3",
        "manifest.json",
        "tokenizer.json",
        "trunk.bin",
    ];
    assert_eq!(names, wanted);
    for checkpoint in [Checkpoint::open(&path).unwrap(), open(&content(&path)).unwrap()] {
        check_content(&checkpoint);
    }
}

fn check_content(checkpoint: &Checkpoint) {
    assert_eq!(checkpoint.kind(), CheckpointKind::Packed);
    assert_eq!(*checkpoint.config(), plan().config);
    assert_eq!(checkpoint.sidecar("tokenizer.json").unwrap().unwrap(), b"{\"a\": 1}");
    assert_eq!(checkpoint.sidecar("empty.txt").unwrap().unwrap(), b"");
    assert!(checkpoint.sidecar("manifest.json").unwrap().is_none());
    for planned in plan().trunk {
        let t = checkpoint.require(&planned.name, &planned.shape).unwrap();
        assert_eq!(t.encoding, Some(planned.encoding));
        assert_eq!(t.offset % 64, 0);
        let mut bytes = vec![0; t.len as usize];
        checkpoint.read(t.file, t.offset, &mut bytes).unwrap();
        assert_eq!(bytes, noise(bytes.len(), t.name.len() as u64), "{}", t.name);
    }
    let packed = checkpoint.packed().unwrap();
    assert_eq!(packed.family(), "tiny");
    assert_eq!(packed.kept(), ["conv"]);
    assert_eq!(packed.provenance()["tool"], "test");
    for layer in packed.expert_layers() {
        assert_eq!((layer.offset % 4096, layer.stride % 4096), (0, 0));
        assert!(layer.pieces.iter().all(|p| p.offset % 64 == 0));
        for expert in 0..layer.n_experts {
            let mut bytes = vec![0; layer.stride as usize];
            let at = layer.record_offset(expert);
            checkpoint.read(packed.experts_file(), at, &mut bytes).unwrap();
            let (record, padding) = bytes.split_at(layer.record_bytes as usize);
            let seed = u64::from(layer.layer * 100 + expert);
            assert!(record == noise(record.len(), seed), "{} {expert}", layer.layer);
            assert!(padding.iter().all(|b| *b == 0));
            let digest: [u8; 32] = blake3::hash(record).into();
            assert_eq!(packed.record_digest(layer.layer, expert), digest);
        }
    }
    let (mut last, mut all) = (0, 0);
    let report = verify(checkpoint, &mut |done, total| {
        assert!(done >= last && done <= total);
        (last, all) = (done, total);
    })
    .unwrap();
    assert_eq!(last, all);
    assert_eq!((report.tensors, report.records, report.headers_only), (5, 7, false));
    assert!(report.unlisted.is_empty() && report.damage.count == 0);
}

#[test]
fn an_interrupted_pack_resumes_to_the_same_bytes() {
    let wanted = reference();
    for seed in 0..60u64 {
        let folder = scratch();
        let path = folder.path().join("m");
        let partial = folder.path().join("m.partial");
        for round in 0..4u64 {
            let dice = noise(8, seed * 10 + round);
            let mut packer = Packer::create_or_resume(&path, plan()).unwrap();
            write_parts(&mut packer, dice[0] as usize % 5, seed + round);
            let done = packer.bytes_done();
            drop(packer);
            assert!(done < wanted.values().map(|b| b.len() as u64).sum());
            expect_error(Checkpoint::open(&path), &["unfinished"]);
            expect_error(Checkpoint::open(&partial), &["unfinished"]);
            // Also under another name.
            std::fs::rename(&partial, folder.path().join("x")).unwrap();
            expect_error(Checkpoint::open(&folder.path().join("x")), &["unfinished"]);
            std::fs::rename(folder.path().join("x"), &partial).unwrap();
            let names = ["journal", "trunk.bin", "experts.bin"];
            damage_tail(&partial.join(names[dice[1] as usize % 3]), &dice[2..]);
        }
        let mut packer = Packer::create_or_resume(&path, plan()).unwrap();
        write_parts(&mut packer, 100, seed);
        packer.finish().unwrap();
        assert!(content(&path) == wanted, "seed {seed}");
        assert!(!partial.exists());
    }
}

/// What a crash can do to the end of a file: cut it, garble it, or append to it.
fn damage_tail(path: &Path, dice: &[u8]) {
    let mut bytes = std::fs::read(path).unwrap();
    let tail = (usize::from(dice[1]) * 23).min(bytes.len());
    let at = bytes.len() - tail;
    match dice[0] % 4 {
        0 => bytes.truncate(at),
        1 => bytes[at..].iter_mut().for_each(|b| *b ^= dice[2] | 1),
        2 => bytes.extend(noise(tail, 3)),
        _ => {}
    }
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn complete_parts_are_kept_and_torn_ones_redone() {
    let folder = scratch();
    let path = folder.path().join("m");
    let mut packer = Packer::create_or_resume(&path, plan()).unwrap();
    for _ in 0..3 {
        write_next_tensor(&mut packer);
        write_next_record(&mut packer);
    }
    let done = packer.bytes_done();
    drop(packer);
    let mut seen = Vec::new();
    let packer =
        Packer::create_or_resume_with(&path, plan(), &mut |d, t| seen.push((d, t))).unwrap();
    assert_eq!((packer.bytes_done(), seen.last()), (done, Some(&(done, done))));
    assert_eq!(packer.next_tensor().unwrap().name, "big");
    assert_eq!(packer.next_record(), Some((1, 3)));
    drop(packer);
    let experts = folder.path().join("m.partial/experts.bin");
    let mut bytes = std::fs::read(&experts).unwrap();
    let stride = bytes.len() / 3;
    bytes[stride + 5] ^= 1;
    std::fs::write(&experts, &bytes).unwrap();
    let packer = Packer::create_or_resume(&path, plan()).unwrap();
    assert_eq!(packer.next_record(), Some((1, 1)));
    drop(packer);
    // Padding counts too.
    bytes[stride + 5] ^= 1;
    bytes[stride - 1] ^= 1;
    std::fs::write(&experts, &bytes).unwrap();
    let packer = Packer::create_or_resume(&path, plan()).unwrap();
    assert_eq!(packer.next_record(), Some((1, 0)));
}

#[test]
fn a_run_killed_around_the_rename_ends_well() {
    let wanted = reference();
    let folder = scratch();
    let path = folder.path().join("m");
    let partial = folder.path().join("m.partial");
    let mut packer = Packer::create_or_resume(&path, plan()).unwrap();
    write_parts(&mut packer, 100, 0);
    drop(packer);
    let journal = std::fs::read(partial.join("journal")).unwrap();
    // Before the rename: everything is written.
    for (name, bytes) in &wanted {
        write(&partial, name, bytes);
    }
    expect_error(Checkpoint::open(&partial), &["unfinished"]);
    Packer::create_or_resume(&path, plan()).unwrap().finish().unwrap();
    assert!(content(&path) == wanted);
    // After it: only the journal is too many.
    write(&path, "journal", &journal);
    let report = verify(&Checkpoint::open(&path).unwrap(), &mut |_, _| {}).unwrap();
    assert_eq!((report.unlisted, report.damage.count), (vec!["journal".to_owned()], 0));
    expect_error(Packer::create_or_resume(&path, plan()), &["exists"]);
    assert!(content(&path) == wanted);
    // A journal that is not ours stays.
    write(&path, "journal", "dear diary");
    expect_error(Packer::create_or_resume(&path, plan()), &["exists"]);
    assert!(path.join("journal").exists());
}

#[test]
fn what_is_in_the_way_is_named_and_left_alone() {
    let folder = scratch();
    let path = folder.path().join("m");
    let partial = folder.path().join("m.partial");
    let packer = Packer::create_or_resume(&path, plan()).unwrap();
    expect_error(Packer::create_or_resume(&path, plan()), &["another process", "m.partial"]);
    drop(packer);
    let other = PackPlan { provenance: json!({"tool": "other"}), ..plan() };
    let parts = ["m.partial", "other options", "remove the folder"];
    expect_error(Packer::create_or_resume(&path, other), &parts);
    write(&partial, "notes.txt", "mine");
    expect_error(Packer::create_or_resume(&path, plan()), &["m.partial", "`notes.txt`"]);
    std::fs::remove_dir_all(&partial).unwrap();
    std::fs::create_dir(&partial).unwrap();
    write(&partial, "trunk.bin", "mine");
    expect_error(Packer::create_or_resume(&path, plan()), &["m.partial", "`trunk.bin`"]);
    assert_eq!(content(&partial).len(), 1);
    std::fs::remove_dir_all(&partial).unwrap();

    std::fs::create_dir(&path).unwrap();
    write(&path, "x", "");
    expect_error(Packer::create_or_resume(&path, plan()), &["m` exists and is not empty"]);
    assert!(!partial.exists());
    std::fs::remove_file(path.join("x")).unwrap();
    pack(&path);
    expect_error(Packer::create_or_resume(&path, plan()), &["m` exists and is not empty"]);
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    expect_error(Packer::create_or_resume(&file, plan()), &["file` exists"]);
    expect_error(Packer::create_or_resume(&partial, plan()), &["`.partial`"]);
    let nowhere = folder.path().join("no/where");
    expect_error(Packer::create_or_resume(&nowhere, plan()), &["create", "where.partial"]);
}

#[test]
fn an_incomplete_pack_does_not_finish_and_a_failed_tensor_is_next_again() {
    let folder = scratch();
    let path = folder.path().join("m");
    let mut packer = Packer::create_or_resume(&path, plan()).unwrap();
    let result = packer.write_tensor("embed", |_, _| {
        Err(WeightsError::UnknownEncoding { name: "from the caller".into() })
    });
    expect_error(result, &["from the caller"]);
    write_parts(&mut packer, 11, 0);
    let next = format!("expert `{}`", packer.next_record().map_or(0, |(_, e)| e));
    expect_error(packer.finish(), &["not complete", &next]);
    let mut packer = Packer::create_or_resume(&path, plan()).unwrap();
    write_parts(&mut packer, 100, 0);
    packer.finish().unwrap();
    assert!(content(&path) == reference());
}

#[test]
fn plans_that_cannot_be_are_refused() {
    let folder = scratch();
    let mut count = 0;
    let mut refuse = |change: &dyn Fn(&mut PackPlan), parts: &[&str]| {
        let mut bad = plan();
        change(&mut bad);
        let path = folder.path().join("m");
        expect_error(Packer::create_or_resume(&path, bad.clone()), parts);
        assert!(bad.expert_layers().is_err() && bad.disk_bytes().is_err());
        assert!(!folder.path().join("m.partial").exists());
        count += 1;
    };
    refuse(&|p| p.trunk[1].encoding = Encoding::Q8, &["`norm`", "`[5]`", "`q8`"]);
    refuse(&|p| p.trunk[1].shape = vec![0, 3], &["`norm`", "`[0, 3]`"]);
    refuse(&|p| p.trunk[1].shape = vec![usize::MAX, 2], &["`norm`", "18446744073709551615"]);
    refuse(&|p| p.trunk[1].name = "embed".into(), &["`embed`", "only once"]);
    refuse(&|p| p.trunk[1].name = String::new(), &["a name"]);
    refuse(&|p| p.layers[1].layer = 1, &["`layer 1`", "ascending"]);
    refuse(&|p| p.layers[0].n_experts = 0, &["`layer 1`", "number of experts", "`0`"]);
    refuse(&|p| p.layers[0].pieces.clear(), &["`layer 1`", "pieces"]);
    refuse(&|p| p.layers[0].pieces[1].d_in = 48, &["`layer 1 up`", "`[24, 48]`", "`q8`"]);
    refuse(&|p| p.layers[0].pieces[1].role = "gate".into(), &["`gate`", "only once"]);
    refuse(&|p| p.layers[0].pieces[1].d_out = 1 << 62, &["`layer 1 up`"]);
    refuse(&|p| p.layers[0].pieces[1].d_out = 1 << 57, &["`layer 1`", "length"]);
    refuse(&|p| p.sidecars[0].0 = "../x".into(), &["sidecars", "`../x`"]);
    refuse(&|p| p.sidecars[0].0 = "trunk.bin".into(), &["sidecars", "`trunk.bin`"]);
    refuse(&|p| p.sidecars[0].0 = "empty.txt".into(), &["`empty.txt`", "only once"]);
    refuse(&|p| p.config = json!([1]), &["config", "an array"]);
    assert_eq!(count, 16);
    let size: usize = reference().values().map(Vec::len).sum();
    let manifest = reference()["manifest.json"].len() + 65;
    assert_eq!(plan().disk_bytes().unwrap(), (size - manifest) as u64);
}

#[test]
fn a_pack_without_experts_or_without_trunk_works() {
    for change in [|p: &mut PackPlan| p.layers.clear(), |p: &mut PackPlan| p.trunk.clear()] {
        let folder = scratch();
        let path = folder.path().join("m");
        let mut small = plan();
        change(&mut small);
        let mut packer = Packer::create_or_resume(&path, small).unwrap();
        while write_next_tensor(&mut packer) || write_next_record(&mut packer) {}
        packer.finish().unwrap();
        let report = verify(&Checkpoint::open(&path).unwrap(), &mut |_, _| {}).unwrap();
        assert_eq!(report.damage.count, 0);
    }
}

#[test]
fn one_flipped_bit_anywhere_is_found_and_named() {
    let good = reference();
    for (name, bytes) in &good {
        let positions: Vec<usize> = if bytes.len() < 600 {
            (0..bytes.len()).collect()
        } else {
            let random = noise(8 * 40, 9);
            let random = random.as_chunks::<8>().0.iter();
            let random = random.map(|b| u64::from_le_bytes(*b) as usize % bytes.len());
            random.chain([0, bytes.len() - 1]).collect()
        };
        for at in positions {
            let mut files = good.clone();
            files.get_mut(name).unwrap()[at] ^= 1 << (at % 8);
            let error = match open(&files) {
                Ok(checkpoint) => {
                    let found = verify(&checkpoint, &mut |_, _| {}).unwrap().damage;
                    assert_eq!((found.count, found.first.len()), (1, 1), "{name} byte {at}");
                    found.first.into_iter().next().unwrap()
                }
                Err(error) => error,
            };
            let message = error.to_string();
            let named = if name == "manifest.blake3" { "manifest." } else { name };
            assert!(message.contains(named), "{name} byte {at}: {message}");
            match &error {
                WeightsError::Digest { start, end, .. } => {
                    let inside = (*start..*end).contains(&(at as u64));
                    assert!(inside || name == "manifest.blake3", "{name} byte {at}: {message}");
                }
                WeightsError::Padding { offset, .. } => assert_eq!(*offset, at as u64),
                _ => assert_eq!(name, "manifest.blake3", "byte {at}: {message}"),
            }
            if name == "trunk.bin" {
                assert!(message.contains("tensor `"), "{message}");
            } else if name == "experts.bin" {
                assert!(message.contains("expert `") && message.contains("layer `"), "{message}");
            }
        }
    }
}

#[test]
fn all_damage_is_counted_and_the_first_described() {
    let mut files = reference();
    for (name, every) in [("trunk.bin", 16), ("experts.bin", 1024), ("tokenizer.json", 1)] {
        files.get_mut(name).unwrap().iter_mut().step_by(every).for_each(|byte| *byte ^= 1);
    }
    let checkpoint = open(&files).unwrap();
    expect_error(checkpoint.check_trunk(), &["tensor `embed`", "trunk.bin"]);
    let report = verify(&checkpoint, &mut |_, _| {}).unwrap();
    let damage = report.damage;
    let parts = 1 + report.tensors + report.records;
    assert!(damage.count >= parts, "{damage:?}");
    assert_eq!(damage.first.len() as u64, damage.count.min(20));
    let text: Vec<String> = damage.first.iter().map(ToString::to_string).collect();
    for part in ["tokenizer.json", "tensor `embed`", "tensor `norm`", "expert `0` of layer `1`"] {
        assert!(text.iter().any(|message| message.contains(part)), "{part}: {text:#?}");
    }
    open(&reference()).unwrap().check_trunk().unwrap();
}

#[test]
fn missing_cut_and_grown_files_are_refused_at_open() {
    let good = reference();
    for name in good.keys() {
        let mut files = good.clone();
        let bytes = files.remove(name).unwrap();
        if name != "manifest.json" {
            expect_error(open(&files), &[&format!("no `{name}`")]);
        }
        let (len, grown) = (bytes.len(), [&bytes[..], &[0]].concat());
        let mut longer = files.clone();
        longer.insert(name.clone(), grown);
        expect_error(open(&longer), &[&format!("`{name}`")]);
        if name != "manifest.json" {
            let parts = [format!("`{}`", len + 1), format!("expected `{len}`")];
            expect_error(open(&longer), &[&parts[0], &parts[1]]);
        }
        if len > 0 {
            files.insert(name.clone(), bytes[..len - 1].to_vec());
            expect_error(open(&files), &[&format!("`{name}`")]);
        }
    }
}

#[test]
fn a_damaged_sidecar_is_not_handed_out() {
    let mut files = reference();
    files.insert("tokenizer.json".into(), b"{\"a\": 2}".to_vec());
    expect_error(open(&files).unwrap().sidecar("tokenizer.json"), &["`tokenizer.json`", "digest"]);
}

#[test]
fn manifests_that_lie_are_refused() {
    let good = reference();
    let manifest: Value = serde_json::from_slice(&good["manifest.json"]).unwrap();
    let refuse = |pointer: &str, value: Value, parts: &[&str]| {
        let mut files = good.clone();
        let mut changed = manifest.clone();
        *changed.pointer_mut(pointer).unwrap() = value;
        set_manifest(&mut files, &changed);
        expect_error(open(&files), &[&["manifest.json"], parts].concat());
    };
    let mut same = good.clone();
    set_manifest(&mut same, &manifest);
    open(&same).unwrap();
    refuse("/format", json!("other"), &["`other version 1`", "`snowmelt-packed version 1`"]);
    refuse("/version", json!(2), &["`snowmelt-packed version 2`", "pack the model again"]);
    refuse("/config", json!(3), &["config", "a number"]);
    refuse("/tensors/1/offset", json!(65), &["`norm`", "`65`", "offset"]);
    refuse("/tensors/1/offset", json!(u64::MAX), &["`norm`", "18446744073709551615"]);
    refuse("/tensors/1/offset", json!(0), &["`norm`", "`0`"]);
    refuse("/tensors/1/len", json!(11), &["`norm`", "`11`", "`10`"]);
    refuse("/tensors/1/shape", json!([4]), &["`norm`", "`10`", "`8`"]);
    refuse("/tensors/1/shape", json!([0]), &["`norm`", "`[0]`"]);
    refuse("/tensors/1/shape", json!([u64::MAX, 9]), &["`norm`"]);
    refuse("/tensors/1/encoding", json!("q8"), &["`norm`", "`q8`"]);
    refuse("/tensors/1/encoding", json!("q9"), &["line", "`q9`"]);
    refuse("/tensors/1/name", json!("embed"), &["`embed`", "only once"]);
    refuse("/tensors/1/blake3", json!("00"), &["line", "hex"]);
    refuse("/layers/0/n_experts", json!(5), &["`layer 3`", "offset"]);
    refuse("/layers/1/n_experts", json!(u32::MAX), &["`experts.bin`", "length"]);
    refuse("/layers/1/n_experts", json!(0), &["`layer 3`", "`0`"]);
    refuse("/layers/1/layer", json!(0), &["`layer 0`", "ascending"]);
    refuse("/layers/1/offset", json!(4096), &["`layer 3`", "`4096`"]);
    refuse("/layers/0/stride", json!(4096), &["`layer 1`", "stride"]);
    refuse("/layers/0/stride", json!(100), &["`layer 1`", "stride", "`100`"]);
    refuse("/layers/0/record_bytes", json!(3), &["`layer 1`", "record length", "`3`"]);
    refuse("/layers/0/pieces", json!([]), &["`layer 1`", "pieces"]);
    refuse("/layers/0/pieces/1/offset", json!(1), &["`layer 1 up`", "`1`"]);
    refuse("/layers/0/pieces/1/d_in", json!(33), &["`layer 1 up`", "`[24, 33]`"]);
    refuse("/layers/0/pieces/1/d_out", json!(u64::MAX), &["`layer 1 up`"]);
    refuse("/layers/0/pieces/1/role", json!("gate"), &["`gate`", "only once"]);
    refuse("/sidecars/0/name", json!("../x"), &["`../x`"]);
    refuse("/sidecars/0/name", json!("manifest.json"), &["`manifest.json`"]);
    refuse("/trunk/len", json!(3), &["`trunk.bin`", "`3`"]);
    refuse("/trunk/name", json!("x"), &["`trunk.bin`", "`x`"]);
    refuse("/experts/records", json!(8), &["`experts.bin`", "`8`", "`7`"]);
    refuse("/digests/len", json!(0), &["`digests.bin`", "`224`"]);
    refuse("/tensors", json!([]), &["`trunk.bin`"]);
    refuse("/kept", json!(1), &["line"]);
    let mut files = good.clone();
    files.insert("digests.bin".into(), vec![0; 224]);
    expect_error(open(&files), &["digests.bin", "digest"]);
}
