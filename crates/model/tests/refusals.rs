//! What is refused at open, and what the message says. Each line of a table is a case.

#![expect(clippy::unwrap_used, reason = "tests")]

use serde_json::{Value, json};
use snowmelt_model::{ModelOptions, census};
use snowmelt_weights::Checkpoint;
use std::fs;
use std::path::{Path, PathBuf};

fn fixture(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/oracle").join(family)
}

/// The fixture of a family with its config and its tensor names changed.
fn changed(
    family: &str,
    config: impl FnOnce(&mut Value),
    header: impl FnOnce(&mut Value),
) -> Result<(), String> {
    let folder = tempfile::tempdir().unwrap();
    let from = fixture(family);
    let mut json: Value =
        serde_json::from_slice(&fs::read(from.join("config.json")).unwrap()).unwrap();
    config(&mut json);
    fs::write(folder.path().join("config.json"), json.to_string()).unwrap();
    let bytes = fs::read(from.join("model.safetensors")).unwrap();
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut json: Value = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
    header(&mut json);
    let mut text = json.to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let file = [&(text.len() as u64).to_le_bytes()[..], &text, &bytes[8 + len..]].concat();
    fs::write(folder.path().join("model.safetensors"), file).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).map_err(|error| error.to_string())?;
    census(&checkpoint, ModelOptions::default()).map(|_| ()).map_err(|error| error.to_string())
}

fn text(config: &mut Value) -> &mut Value {
    match config.get("text_config") {
        Some(_) => &mut config["text_config"],
        None => config,
    }
}

/// A config field, its bad value, and words of the message.
fn config_cases() -> Vec<(&'static str, Value, &'static [&'static str])> {
    vec![
        ("model_type", json!("gpt2"), &["model_type", "gpt2", "qwen3_next"]),
        ("hidden_size", json!(null), &["hidden_size", "config.json"]),
        ("hidden_size", json!("64"), &["hidden_size", "\"64\"", "unsigned"]),
        ("hidden_size", json!(0), &["hidden_size", "`0`", "at least 1"]),
        ("hidden_size", json!(-3), &["hidden_size", "-3"]),
        ("hidden_size", json!(4_294_967_296_u64), &["hidden_size", "4294967296"]),
        ("hidden_size", json!(65), &["embed_tokens", "64", "65"]),
        ("num_hidden_layers", json!(5), &["layer", "4"]),
        ("num_hidden_layers", json!(1_000_000_000), &["num_hidden_layers", "at most 10000"]),
        ("num_hidden_layers", json!(0), &["num_hidden_layers", "at least 1"]),
        ("num_attention_heads", json!(3), &["num_attention_heads", "`3`", "num_key_value_heads"]),
        ("num_key_value_heads", json!(3), &["num_attention_heads", "num_key_value_heads"]),
        ("head_dim", json!(0), &["head_dim", "at least 1"]),
        ("head_dim", json!(23), &["`head_dim`", "`23`", "even"]),
        ("eos_token_id", json!(320), &["eos_token_id", "`320`", "below `vocab_size` = 320"]),
        ("eos_token_id", json!([7, 999]), &["eos_token_id", "`999`", "320"]),
        ("eos_token_id", json!("</s>"), &["eos_token_id", "</s>"]),
        ("model_type", json!(null), &["`model_type` is missing from `config.json`"]),
        ("num_experts_per_tok", json!(9), &["num_experts_per_tok", "`9`", "8"]),
        ("num_experts_per_tok", json!(0), &["num_experts_per_tok", "at least 1"]),
        ("vocab_size", json!(321), &["embed_tokens", "321", "320"]),
        ("hidden_act", json!("gelu"), &["hidden_act", "gelu", "silu"]),
        ("rms_norm_eps", json!("small"), &["rms_norm_eps", "small"]),
        ("rms_norm_eps", json!(-1.0), &["rms_norm_eps", "-1"]),
        ("attention_bias", json!("yes"), &["attention_bias", "yes"]),
        ("max_position_embeddings", json!(0), &["max_position_embeddings", "at least 1"]),
        ("rope_parameters", json!(7), &["rope_parameters", "7"]),
        ("rope_parameters", json!({"rope_theta": 0.5}), &["rope_theta", "0.5"]),
        (
            "rope_parameters",
            json!({"rope_theta": 1e6, "partial_rotary_factor": 1.5}),
            &["partial_rotary_factor", "1.5"],
        ),
        (
            "rope_parameters",
            json!({"rope_theta": 1e6, "partial_rotary_factor": 0.04}),
            &["partial_rotary_factor", "even"],
        ),
        (
            "rope_parameters",
            json!({"rope_theta": 1e6, "rope_type": "dynamic"}),
            &["rope_type", "dynamic", "yarn"],
        ),
    ]
}

#[test]
fn bad_config_fields() {
    for family in ["qwen3_moe", "qwen3_next", "qwen3_5_moe"] {
        for (field, value, words) in config_cases() {
            let change = |config: &mut Value| {
                if field == "model_type" {
                    config["model_type"] = value.clone();
                }
                text(config)[field] = value.clone();
            };
            let message = changed(family, change, |_| {}).expect_err(field);
            for word in words {
                assert!(
                    message.contains(word),
                    "{family} {field}={value}: `{message}`, no `{word}`"
                );
            }
        }
    }
}

#[test]
fn bad_layer_patterns_and_sizes_of_hybrids() {
    let cases: [(&str, Value, &[&str]); 6] = [
        ("layer_types", json!(["full_attention"]), &["layer_types", "1 entries", "4 entries"]),
        ("layer_types", json!(["a", "b", "c", "d"]), &["layer_types", "`a`", "full_attention"]),
        ("layer_types", json!("full_attention"), &["layer_types", "array"]),
        ("linear_num_value_heads", json!(3), &["linear_num_value_heads", "linear_num_key_heads"]),
        ("linear_conv_kernel_dim", json!(0), &["linear_conv_kernel_dim", "at least 1"]),
        ("shared_expert_intermediate_size", json!(null), &["shared_expert_intermediate_size"]),
    ];
    for family in ["qwen3_next", "qwen3_5_moe"] {
        for (field, value, words) in &cases {
            let change = |config: &mut Value| text(config)[*field] = value.clone();
            let message = changed(family, change, |_| {}).expect_err(field);
            for word in *words {
                assert!(message.contains(word), "{family} {field}: `{message}`, no `{word}`");
            }
        }
    }
}

/// Renames a projection as quantised checkpoints do.
fn quantise(header: &mut Value) {
    let name = "model.layers.0.self_attn.q_proj.weight";
    let tensor = header.as_object_mut().unwrap().remove(name).unwrap();
    header["model.layers.0.self_attn.q_proj.qweight"] = tensor;
}

#[test]
fn quantised_checkpoints_are_named_where_they_cannot_be_decoded() {
    for method in ["gptq", "awq", "bitsandbytes"] {
        let change = |config: &mut Value| {
            config["quantization_config"] = json!({"quant_method": method, "bits": 4});
        };
        let message = changed("qwen3_moe", change, quantise).unwrap_err();
        let found = format!("`quantization_config.quant_method` in `config.json` is `{method}`");
        assert!(message.starts_with(&found), "{message}");
        assert!(message.contains("q_proj.weight` is missing") && message.contains("\nhint: "));
        // Made plain again, with the field left.
        changed("qwen3_moe", change, |_| {}).unwrap();
    }
    let message = changed("qwen3_moe", |_| {}, quantise).unwrap_err();
    assert!(!message.contains("quantization_config"), "{message}");
}

#[test]
fn a_tied_model_skips_a_head_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let from = fixture("qwen3_moe");
    let mut config: Value =
        serde_json::from_slice(&fs::read(from.join("config.json")).unwrap()).unwrap();
    config["tie_word_embeddings"] = json!(true);
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    fs::copy(from.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(census(&checkpoint, ModelOptions::default()).unwrap().skipped, ["lm_head.weight"]);
}

#[test]
fn contradicting_spellings() {
    let change = |config: &mut Value| {
        config["num_experts"] = json!(8);
        config["num_local_experts"] = json!(16);
    };
    let message = changed("qwen3_moe", change, |_| {}).unwrap_err();
    assert!(message.contains("num_experts") && message.contains("num_local_experts"), "{message}");
}

#[test]
fn missing_surplus_and_misshapen_tensors() {
    let norm = "model.layers.1.input_layernorm.weight";
    let message = changed(
        "qwen3_moe",
        |_| {},
        |header| {
            let tensor = header.as_object_mut().unwrap().remove(norm).unwrap();
            header["model.layers.1.other_norm.weight"] = tensor;
        },
    );
    assert!(message.unwrap_err().contains(norm));
    let surplus = changed("qwen3_moe", |config| config["num_hidden_layers"] = json!(3), |_| {});
    let surplus = surplus.unwrap_err();
    assert!(surplus.contains("model.layers.3.") && surplus.contains("trunk"), "{surplus}");
    let q = "model.layers.0.self_attn.q_proj.weight";
    let message = changed("qwen3_moe", |_| {}, |header| header[q]["shape"] = json!([64, 96]));
    let message = message.unwrap_err();
    assert!(message.contains(q) && message.contains("96"), "{message}");
    let dtype = changed("qwen3_moe", |_| {}, |header| header[q]["dtype"] = json!("I16"));
    let dtype = dtype.unwrap_err();
    assert!(dtype.contains(q) && dtype.contains("I16"), "{dtype}");
    let expert = "model.layers.2.mlp.experts.5.up_proj.weight";
    let missing = changed(
        "qwen3_moe",
        |_| {},
        |header| {
            let tensor = header.as_object_mut().unwrap().remove(expert).unwrap();
            header["mtp.decoy"] = tensor;
        },
    );
    assert!(missing.unwrap_err().contains(expert));
}

#[test]
fn names_outside_the_trunk_are_skipped_and_listed() {
    let checkpoint = Checkpoint::open(&fixture("qwen3_5_moe")).unwrap();
    let census = census(&checkpoint, ModelOptions::default()).unwrap();
    assert_eq!(census.skipped, ["model.visual.patch_embed.proj.weight", "mtp.fc.weight"]);
}

/// Names in the order of the trunk, sizes and state of a hybrid.
#[test]
fn the_census_counts() {
    let checkpoint = Checkpoint::open(&fixture("qwen3_next")).unwrap();
    let census = census(&checkpoint, ModelOptions::default()).unwrap();
    assert_eq!((census.family, census.n_vocab, census.n_layers), ("qwen3_next", 320, 4));
    assert_eq!(census.n_experts_total(), 32);
    // gate, up and down of 32 x 64 in bf16, rounded up to a page.
    assert_eq!(census.experts[0].record_bytes, 3 * 32 * 64 * 2);
    assert_eq!(census.slot_bytes(), 12_288);
    // One attention layer: k and v of 2 heads of 32.
    assert_eq!(census.per_token_elements(), 2 * 2 * 32);
    // Three DeltaNet layers: 3 columns of 128 channels, 4 heads of 16 x 16.
    assert_eq!(census.per_sequence_elements(), 3 * (3 * 128 + 4 * 16 * 16));
}

/// A field of `qwen4_exp`, its value, and words of the message; no words: it runs.
fn qwen4_cases() -> Vec<(&'static str, Value, &'static [&'static str])> {
    vec![
        // Residual streams.
        ("hc_count", json!(0), &["hc_count", "`0`", "at least 1"]),
        ("hc_count", json!(null), &["hc_count", "missing"]),
        ("hc_count", json!(3), &["hc_norm", "256", "192"]),
        ("hc_count", json!(1_000_000_000), &["hc_count", "`1000000000`", "2147483648"]),
        ("hc_lowrank", json!(0), &["hc_lowrank", "`0`", "at least 1"]),
        ("hc_lowrank", json!(17), &["input_mix_weight_down", "16", "17"]),
        // The indexer.
        ("indexer_kv_heads", json!(2), &["indexer_kv_heads", "`2`", "1"]),
        ("indexer_kv_heads", json!(null), &[]),
        ("indexer_n_heads", json!(0), &["indexer_n_heads", "`0`"]),
        ("indexer_n_heads", json!(1 << 30), &["indexer_n_heads", "2147483648"]),
        ("indexer_head_dim", json!(0), &["indexer_head_dim", "`0`"]),
        ("indexer_head_dim", json!(4), &["indexer_head_dim", "`4`", "8 dimensions"]),
        ("indexer_compress_ratio", json!(0), &["indexer_compress_ratio", "`0`"]),
        ("indexer_budget", json!(0), &["indexer_budget", "`0`"]),
        ("indexer_budget", json!(33), &["indexer_budget", "`33`", "indexer_compress_ratio", "= 4"]),
        ("indexer_budget", json!(4), &[]),
        (
            "rope_parameters",
            json!({"rope_theta": 1e7, "partial_rotary_factor": 0.1}),
            &["partial_rotary_factor", "0.1", "3 of 32", "even"],
        ),
        (
            "rope_parameters",
            json!({"rope_theta": 1e7, "partial_rotary_factor": 0.75}),
            &["indexer_head_dim", "`16`", "24 dimensions"],
        ),
        // Layers and gates.
        ("output_gate_type", json!("tanh"), &["output_gate_type", "`tanh`", "sigmoid"]),
        ("output_gate_type", json!(null), &[]),
        ("output_gate_type", json!("silu"), &[]),
        ("layer_types", json!(["full_attention"]), &["layer_types", "1 entries", "4 entries"]),
        (
            "layer_types",
            json!(["linear_attention", "linear_attention", "linear_attention", "sliding"]),
            &["layer_types", "`sliding`", "indexed_attention"],
        ),
        (
            "layer_types",
            json!([
                "linear_attention",
                "linear_attention",
                "linear_attention",
                "indexed_attention"
            ]),
            &[],
        ),
        ("num_experts_per_tok", json!(9), &["num_experts_per_tok", "`9`", "8"]),
        ("linear_num_value_heads", json!(3), &["linear_num_value_heads", "`3`", "= 2"]),
        // N-grams. Layers count from one.
        ("ple_layer_ids", json!([0]), &["ple_layer_ids", "`0`", "1 to", "= 4"]),
        ("ple_layer_ids", json!([2, 5]), &["ple_layer_ids", "`5`", "= 4"]),
        ("ple_layer_ids", json!([2, 2]), &["ple_layer_ids", "`2`", "once"]),
        ("ple_layer_ids", json!([1]), &["layers.0.ple.", "missing"]),
        ("ple_layer_ids", json!([2, 4]), &["layers.3.ple.", "missing"]),
        ("ple_layer_ids", json!([]), &["layers.1.ple.", "not part of"]),
        ("ngram_size", json!(1), &["ngram_size", "`1`", "at least 2"]),
        ("ngram_size", json!(2), &["layer_multipliers", "[3]", "[2]"]),
        ("heads_per_ngram", json!(0), &["heads_per_ngram", "`0`"]),
        ("heads_per_ngram", json!(2_147_483_648_u64), &["ple_embed_dim", "`64`", "4294967296"]),
        ("ple_embed_dim", json!(60), &["ple_embed_dim", "`60`", "= 8"]),
        ("ple_embed_dim", json!(72), &["key_proj", "64", "72"]),
        ("ple_conv_kernel_size", json!(0), &["ple_conv_kernel_size", "`0`"]),
        ("ple_conv_kernel_size", json!(1 << 30), &["ple_conv_kernel_size", "2147483648"]),
        (
            "ngram_vocab_size_base",
            json!(320),
            &["ngram_heads_vocab_sizes", "307 at index 0", "331 by the config"],
        ),
        ("seed", json!(1235), &["layer_multipliers", "25912437101140037", "by the config"]),
        ("seed", json!(null), &[]),
        ("split_ngram_parts", json!(3), &["split_ngram_parts", "`3`", "2624 rows"]),
        ("split_ngram_parts", json!(0), &["split_ngram_parts", "`0`"]),
        ("split_ngram_parts", json!(2), &["shard_0", "656", "1312"]),
        ("make_ngram_vocab_size_divisible_by", json!(2048), &["shard_0", "656", "1024"]),
        ("eos_token_id", json!(320), &["eos_token_id", "`320`", "vocab_size", "320"]),
        ("eos_token_id", json!(null), &["eos_token_id", "missing"]),
        ("eos_token_id", json!([]), &["eos_token_id", "missing"]),
        ("eos_token_id", json!("7"), &["eos_token_id", "\"7\""]),
        ("eos_token_id", json!([7, 9]), &[]),
        ("eos_token_id", json!(0), &[]),
    ]
}

#[test]
fn qwen4_exp_refuses_contradictions_and_runs_the_rest() {
    for (field, value, words) in qwen4_cases() {
        let change = |config: &mut Value| text(config)[field] = value.clone();
        match (changed("qwen4_exp", change, |_| {}), words) {
            (Ok(()), []) => {}
            (Err(message), [_, ..]) => {
                for word in words {
                    assert!(message.contains(word), "{field}={value}: `{message}`, no `{word}`");
                }
            }
            (result, _) => panic!("{field}={value}: {result:?}, expected {words:?}"),
        }
    }
}

#[test]
fn qwen4_exp_refuses_tensors_that_do_not_fit() {
    let ple = "model.language_model.layers.1.ple.ple_embedding";
    let remove = |name: String, other: &'static str| {
        changed(
            "qwen4_exp",
            |_| {},
            |header| {
                let tensor = header.as_object_mut().unwrap().remove(&name).unwrap();
                header[other] = tensor;
            },
        )
    };
    let table = remove(format!("{ple}.ngram_embedding.shard_2.weight"), "mtp.decoy").unwrap_err();
    assert!(table.contains("shard_2") && table.contains("missing"), "{table}");
    let indexer = "model.language_model.layers.3.self_attn.indexer.index_qk_proj.weight";
    let indexer = remove(indexer.to_owned(), "mtp.decoy").unwrap_err();
    assert!(indexer.contains("index_qk_proj"), "{indexer}");
    // Buffers that follow from the config may be missing.
    remove(format!("{ple}.layer_multipliers"), "mtp.decoy").unwrap();
    let dtype = changed(
        "qwen4_exp",
        |_| {},
        |header| {
            header[format!("{ple}.layer_multipliers")]["dtype"] = json!("F64");
        },
    );
    let dtype = dtype.unwrap_err();
    assert!(dtype.contains("F64") && dtype.contains("I64 [3]"), "{dtype}");
    let shard = format!("{ple}.ngram_embedding.shard_1.weight");
    let mixed = changed("qwen4_exp", |_| {}, |header| header[&shard]["dtype"] = json!("F16"));
    let mixed = mixed.unwrap_err();
    assert!(mixed.contains("shard_1") && mixed.contains("first shard"), "{mixed}");
}

#[test]
fn the_end_of_text_may_stand_beside_the_text_config() {
    let change = |config: &mut Value| {
        text(config).as_object_mut().unwrap().remove("eos_token_id");
        config["eos_token_id"] = json!([7]);
    };
    changed("qwen4_exp", change, |_| {}).unwrap();
}
