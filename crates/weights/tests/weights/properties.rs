//! Whatever the bytes: an error or a checkpoint whose tensors lie in its files, never a panic, and
//! never an allocation that a length in the file decides alone (the test would be killed).

use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::Value;
use snowmelt_weights::{Checkpoint, WeightsError};

use crate::common::*;
use crate::container;

/// What must hold for everything that opens.
fn check(result: Result<Checkpoint, WeightsError>) {
    let checkpoint = match result {
        Ok(checkpoint) => checkpoint,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    for t in checkpoint.tensors() {
        assert!(t.end() <= checkpoint.files()[t.file as usize].len, "{t:?}");
        if let Some(row_bytes) = t.row_bytes() {
            assert_eq!((t.rows() * row_bytes) as u64, t.len, "{t:?}");
        }
    }
    if let Some(packed) = checkpoint.packed() {
        let len = checkpoint.files()[packed.experts_file() as usize].len;
        for layer in packed.expert_layers() {
            assert!(layer.record_offset(layer.n_experts) <= len);
            for piece in &layer.pieces {
                assert!(piece.offset + layer.piece_bytes(piece) <= layer.record_bytes);
            }
            let _ = packed.record_digest(layer.layer, layer.n_experts - 1);
        }
    }
}

fn good_file() -> Vec<u8> {
    safetensors(&[
        tensor("a", "BF16", &[3, 8]),
        tensor("b", "F32", &[4]),
        tensor("c", "I64", &[1, 2]),
    ])
}

/// Numbers that break careless arithmetic.
fn hostile() -> impl Strategy<Value = Value> {
    prop_oneof![
        prop_oneof![Just(0u64), Just(1), Just(63), Just(64), Just(4096), Just(u64::MAX)]
            .prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (0u64..100_000).prop_map(Value::from),
        (0u32..64).prop_map(|bits| Value::from(1u64 << bits)),
        Just(Value::from(-1)),
        Just(Value::Null),
        Just(Value::from("f32")),
        Just(Value::from("q4g64")),
        Just(Value::Array(vec![Value::from(u64::MAX), Value::from(2)])),
    ]
}

/// Replaces the leaf with the given number, counting leaves in order.
fn replace_leaf(value: &mut Value, number: &mut usize, with: &Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(|v| replace_leaf(v, number, with)),
        Value::Object(fields) => {
            fields.values_mut().for_each(|v| replace_leaf(v, number, with));
        }
        leaf => {
            if *number == 0 {
                *leaf = with.clone();
            }
            *number = number.wrapping_sub(1);
        }
    }
}

fn config() -> ProptestConfig {
    ProptestConfig { cases: 400, failure_persistence: None, ..Default::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn random_bytes_are_no_shard(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        check(open_single(bytes));
    }

    #[test]
    fn random_json_is_no_shard(text in r#"[\{\}\[\]:,"a-c0-9 \-\.]{0,80}"#, data in 0usize..40) {
        check(open_single(raw(&text, &vec![0; data])));
    }

    #[test]
    fn mutated_shards(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut file = good_file();
        let at = at.index(file.len());
        file[at] = byte;
        check(open_single(file));
    }

    #[test]
    fn cut_and_grown_shards_are_refused(cut in any::<prop::sample::Index>(), grow in 1usize..50) {
        let file = good_file();
        prop_assert!(open_single(file[..cut.index(file.len())].to_vec()).is_err());
        prop_assert!(open_single([&file[..], &vec![0; grow]].concat()).is_err());
    }

    #[test]
    fn mutated_shard_numbers(leaf in 0usize..16, with in hostile()) {
        let file = good_file();
        let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        let mut header: Value = serde_json::from_slice(&file[8..8 + length]).unwrap();
        replace_leaf(&mut header, &mut { leaf }, &with);
        check(open_single(raw(&header.to_string(), &file[8 + length..])));
    }

    #[test]
    fn mutated_indices(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut index = br#"{"metadata": {}, "weight_map": {"a": "1.st", "b": "1.st"}}"#.to_vec();
        let at = at.index(index.len());
        index[at] = byte;
        let files = [
            ("config.json", CONFIG.into()),
            ("model.safetensors.index.json", index),
            ("1.st", good_file()),
        ];
        check(open_memory(&files));
    }

    #[test]
    fn mutated_manifest_values(leaf in 0usize..130, with in hostile()) {
        static GOOD: LazyLock<std::collections::BTreeMap<String, Vec<u8>>> =
            LazyLock::new(container::reference);
        let mut files = GOOD.clone();
        let mut manifest: Value = serde_json::from_slice(&files["manifest.json"]).unwrap();
        replace_leaf(&mut manifest, &mut { leaf }, &with);
        container::set_manifest(&mut files, &manifest);
        check(container::open(&files));
    }

    #[test]
    fn mutated_manifest_text(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        static GOOD: LazyLock<std::collections::BTreeMap<String, Vec<u8>>> =
            LazyLock::new(container::reference);
        let mut files = GOOD.clone();
        let text = files.get_mut("manifest.json").unwrap();
        let at = at.index(text.len());
        text[at] = byte;
        let digest = format!("{}\n", blake3::hash(text));
        files.insert("manifest.blake3".into(), digest.into_bytes());
        check(container::open(&files));
    }
}
