//! Heads that predict further tokens, in made-up checkpoints.

#![expect(clippy::unwrap_used, reason = "tests")]

use serde_json::{Value, json};
use snowmelt_model::{ModelOptions, MtpHead, census};
use snowmelt_weights::{Bytes, Checkpoint};

const D: usize = 8;

/// A dense Qwen3.5 or a DeepSeek of one layer, with these names beside it.
fn checkpoint(config: &Value, trunk: &[(String, Vec<usize>)], beside: &[String]) -> Checkpoint {
    let beside = beside.iter().map(|name| (name.clone(), vec![D]));
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, shape) in trunk.iter().cloned().chain(beside) {
        let bytes = 4 * shape.iter().product::<usize>();
        let entry = json!({"dtype": "F32", "shape": shape, "data_offsets": [end, end + bytes]});
        header.insert(name, entry);
        end += bytes;
    }
    let header = Value::Object(header).to_string().into_bytes();
    let file = [&(header.len() as u64).to_le_bytes()[..], &header, &vec![0; end]].concat();
    let files = [
        ("config.json", Bytes::Shared(config.to_string().into_bytes().into())),
        ("model.safetensors", Bytes::Shared(file.into())),
    ];
    Checkpoint::from_memory("made up", &files).unwrap()
}

fn names(prefix: &str, parts: &[&str]) -> Vec<String> {
    parts.iter().map(|part| format!("{prefix}{part}.weight")).collect()
}

/// A layer of plain attention and a dense MLP.
const LAYER: [&str; 9] = [
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
];

/// Llama, since its trunk is the shortest; which names are heads depends on no family.
fn heads(extra: &Value, beside: &[String]) -> Vec<MtpHead> {
    let mut config = json!({
        "model_type": "llama", "hidden_size": D, "num_hidden_layers": 1, "vocab_size": 4,
        "num_attention_heads": 1, "intermediate_size": D, "tie_word_embeddings": true,
    });
    for (key, value) in extra.as_object().unwrap() {
        config[key] = value.clone();
    }
    let norms = LAYER[..2].iter().map(|part| (format!("model.layers.0.{part}.weight"), vec![D]));
    let matrices =
        LAYER[2..].iter().map(|part| (format!("model.layers.0.{part}.weight"), vec![D, D]));
    let mut trunk: Vec<(String, Vec<usize>)> = norms.chain(matrices).collect();
    trunk.push(("model.embed_tokens.weight".into(), vec![4, D]));
    trunk.push(("model.norm.weight".into(), vec![D]));
    let checkpoint = checkpoint(&config, &trunk, beside);
    let census = census(&checkpoint, ModelOptions::default()).unwrap();
    assert_eq!(census.trunk.len(), trunk.len(), "heads are not counted as trunk");
    assert_eq!(census.skipped.len(), beside.len());
    census.mtp
}

const QWEN: [&str; 4] = ["fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"];

#[test]
fn a_complete_head_of_qwen() {
    let beside = [names("mtp.", &QWEN), names("mtp.layers.0.", &LAYER)].concat();
    let [head] = &heads(&json!({}), &beside)[..] else { panic!("one head") };
    assert_eq!((head.name.as_str(), head.tensors.len()), ("mtp.layers.0", 13));
    assert_eq!(head.missing, Vec::<String>::new());
    assert_eq!(head.bytes, 13 * 4 * D as u64);
}

#[test]
fn a_partial_head_of_qwen_says_what_it_lacks() {
    let beside = [names("mtp.", &QWEN[..3]), names("mtp.layers.0.", &LAYER[1..])].concat();
    let [head] = &heads(&json!({}), &beside)[..] else { panic!("one head") };
    assert_eq!(head.missing, ["mtp.norm.weight", "mtp.layers.0.input_layernorm.weight"]);
}

#[test]
fn a_head_of_qwen4_has_two_projections_and_no_layer_norms() {
    let own = ["fc_embedding", "fc_hidden", "pre_fc_norm_embedding", "pre_fc_norm_hidden"];
    let mixer = ["hyper_connection_mixer.hc_norm"];
    let layer = names("mtp.layers.0.", &LAYER[2..]);
    let beside = [names("mtp.", &own), names("mtp.", &mixer), layer].concat();
    let [head] = &heads(&json!({}), &beside)[..] else { panic!("one head") };
    assert_eq!(head.missing, Vec::<String>::new());
}

#[test]
fn heads_of_deepseek_lie_past_the_last_layer() {
    let own = ["enorm", "hnorm", "eh_proj", "shared_head.norm"];
    let head = |layer: usize| {
        let prefix = format!("model.layers.{layer}.");
        [names(&prefix, &own), names(&prefix, &LAYER)].concat()
    };
    let found = heads(&json!({}), &[head(1), head(2)].concat());
    let [one, two] = &found[..] else { panic!("{found:?}") };
    assert_eq!((one.name.as_str(), two.name.as_str()), ("model.layers.1", "model.layers.2"));
    assert!(one.missing.is_empty() && two.missing.is_empty());
}

#[test]
fn a_promised_head_may_be_partial() {
    let beside = names("model.layers.1.", &LAYER[2..]);
    let found = heads(&json!({"num_nextn_predict_layers": 1}), &beside);
    let [head] = &found[..] else { panic!("{found:?}") };
    assert_eq!(head.missing.len(), 6, "{:?}", head.missing);
    assert!(head.missing.contains(&"model.layers.1.enorm.weight".to_owned()));
}
