//! Fixtures and small readers.

use serde_json::Value;
use snowmelt_backend_cpu::{Activations, CpuBackend, CpuOptions};
use snowmelt_engine::pack::{PackOptions, pack};
use snowmelt_weights::{Bytes, Checkpoint, Encoding};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Fixtures in the repository: at least one for each family that is built in.
pub(crate) fn families() -> Vec<String> {
    let entries = fs::read_dir(root().join("fixtures/oracle")).unwrap().map(Result::unwrap);
    let folders = entries.filter(|entry| entry.file_type().unwrap().is_dir());
    let mut names: Vec<String> =
        folders.map(|entry| entry.file_name().into_string().unwrap()).collect();
    names.sort_unstable();
    for family in snowmelt_model::FAMILIES {
        assert!(names.iter().any(|name| name == family), "`{family}` has no fixture");
    }
    names
}

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// `fixtures/oracle/FAMILY`.
pub(crate) fn fixture(family: &str) -> PathBuf {
    root().join("fixtures/oracle").join(family)
}

/// A model folder with the config under one of its two spellings.
pub(crate) fn with_spelling(family: &str, config: &str) -> tempfile::TempDir {
    let (from, to) = (fixture(family), tempfile::tempdir().unwrap());
    fs::copy(from.join("model.safetensors"), to.path().join("model.safetensors")).unwrap();
    fs::copy(from.join(config), to.path().join("config.json")).unwrap();
    to
}

pub(crate) fn open(family: &str) -> Checkpoint {
    Checkpoint::open(&fixture(family)).unwrap()
}

pub(crate) fn cpu(threads: usize, activations: Activations) -> CpuBackend {
    CpuBackend::new(CpuOptions { threads, activations, ..CpuOptions::default() }).unwrap()
}

/// A reference case: prompt, greedy continuation, and the logits rows that are kept.
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) prompt: Vec<u32>,
    pub(crate) greedy: Vec<u32>,
    pub(crate) robust: bool,
    pub(crate) tolerance: f32,
    /// Row index, logits.
    pub(crate) rows: Vec<(usize, Vec<f32>)>,
}

fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().unwrap().iter();
    ids.map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
}

pub(crate) fn cases(folder: &Path) -> Vec<Case> {
    let json: Value =
        serde_json::from_slice(&fs::read(folder.join("cases.json")).unwrap()).unwrap();
    let tensors = tensors(&folder.join("logits.safetensors"));
    let tolerance = json["tolerance"]["f32_max_abs"].as_f64().unwrap() as f32;
    let case = |case: &Value| {
        let name = case["name"].as_str().unwrap().to_owned();
        let (_, logits) = &tensors[&name];
        let (_, rows) = &tensors[&format!("{name}.rows")];
        let n_vocab = logits.len() / 4 / (rows.len() / 4);
        let values: Vec<f32> =
            logits.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        let index = |b: &[u8]| u32::from_le_bytes(b.try_into().unwrap()) as usize;
        let rows = rows.chunks_exact(4).map(index);
        let rows = rows.zip(values.chunks_exact(n_vocab)).map(|(i, row)| (i, row.to_vec()));
        Case {
            prompt: ids(&case["prompt"]),
            greedy: ids(&case["greedy"]),
            robust: case["robust"].as_bool().unwrap(),
            tolerance,
            rows: rows.collect(),
            name,
        }
    };
    json["cases"].as_array().unwrap().iter().map(case).collect()
}

/// Shape and bytes of each tensor of a safetensors file.
pub(crate) fn tensors(path: &Path) -> BTreeMap<String, (Vec<usize>, Vec<u8>)> {
    let bytes = fs::read(path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let json: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let number = |value: &Value| usize::try_from(value.as_u64().unwrap()).unwrap();
    let entries = json.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__");
    let tensor = |(name, info): (&String, &Value)| {
        let shape = info["shape"].as_array().unwrap().iter().map(number).collect();
        let [from, to] = [0, 1].map(|i| 8 + header + number(&info["data_offsets"][i]));
        (name.clone(), (shape, bytes[from..to].to_vec()))
    };
    entries.map(tensor).collect()
}

/// `checkpoint` packed into a temporary folder, and opened.
pub(crate) fn packed_from(
    checkpoint: &Checkpoint,
    experts: Option<Encoding>,
    trunk: Option<Encoding>,
) -> (tempfile::TempDir, Checkpoint) {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("packed");
    let options = PackOptions { experts, trunk };
    pack(checkpoint, &to, options, &mut |_, _| true).unwrap().unwrap();
    let packed = Checkpoint::open(&to).unwrap();
    (folder, packed)
}

/// The packed container `folder/packed`, held in memory.
pub(crate) fn in_memory(folder: &Path) -> Checkpoint {
    let files: Vec<(String, Bytes)> = fs::read_dir(folder.join("packed"))
        .unwrap()
        .map(|entry| {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            (name, Bytes::Shared(fs::read(path).unwrap().into()))
        })
        .collect();
    let files: Vec<(&str, Bytes)> =
        files.iter().map(|(name, bytes)| (name.as_str(), bytes.clone())).collect();
    Checkpoint::from_memory("in memory", &files).unwrap()
}

/// The fixture with biases of q, k, v and o in every layer (`widths`: of q, of k and v, of o):
/// zeros, but in one layer `(layer, v, o)`.
pub(crate) fn with_biases(
    family: &str,
    layers: usize,
    widths: [usize; 3],
    (at, v, o): (usize, &[f32], &[f32]),
) -> tempfile::TempDir {
    let folder = with_spelling(family, "config.json");
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["attention_bias"] = true.into();
    fs::write(path, config.to_string()).unwrap();
    let path = folder.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
    let mut data = bytes[8 + len..].to_vec();
    for layer in 0..layers {
        for (part, width) in ["q", "k", "v", "o"].into_iter().zip([0, 1, 1, 2].map(|i| widths[i])) {
            let zeros = vec![0.0; width];
            let values = match part {
                "v" if layer == at => v,
                "o" if layer == at => o,
                _ => &zeros,
            };
            let from = data.len();
            data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            header[format!("model.layers.{layer}.self_attn.{part}_proj.bias")] = serde_json::json!({
                "dtype": "F32", "shape": [width], "data_offsets": [from, data.len()],
            });
        }
    }
    let mut text = header.to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let file = [&(text.len() as u64).to_le_bytes()[..], &text, &data].concat();
    fs::write(&path, file).unwrap();
    folder
}

/// A `qwen4_exp` with the fixture's config but for `changes`, and random weights.
pub(crate) fn synth(changes: &Value) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let config = fs::read(fixture("qwen4_exp").join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    for (field, value) in changes.as_object().unwrap() {
        config["text_config"][field] = value.clone();
    }
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let mut header = serde_json::Map::new();
    let mut at = 0;
    for (name, shape) in synth_tensors(&config["text_config"]) {
        let end = at + 2 * shape.iter().product::<usize>();
        let info = serde_json::json!({"dtype": "BF16", "shape": shape, "data_offsets": [at, end]});
        header.insert(name, info);
        at = end;
    }
    let mut text = Value::Object(header).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut state = 1_u64;
    let mut value = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // Of either sign, from 1/16 to below 1/4.
        0x3D80 | (state >> 40) as u16 & 0x80FF
    };
    let data: Vec<u8> = (0..at / 2).flat_map(|_| value().to_le_bytes()).collect();
    let file = [&(text.len() as u64).to_le_bytes()[..], &text, &data].concat();
    fs::write(folder.path().join("model.safetensors"), file).unwrap();
    folder
}

/// Names and shapes of a `qwen4_exp` with this config.
fn synth_tensors(config: &Value) -> Vec<(String, Vec<usize>)> {
    let number = |field: &str| usize::try_from(config[field].as_u64().unwrap()).unwrap();
    let (d, streams, rank) = (number("hidden_size"), number("hc_count"), number("hc_lowrank"));
    let (wide, n_vocab) = (streams * d, number("vocab_size"));
    let mut all = vec![
        ("lm_head.weight".to_owned(), vec![n_vocab, d]),
        ("model.language_model.embed_tokens.weight".to_owned(), vec![n_vocab, d]),
    ];
    let mut add = |name: String, shape: &[usize]| {
        all.push((format!("model.language_model.{name}"), shape.to_vec()));
    };
    let connection = |add: &mut dyn FnMut(String, &[usize]), name: &str, injects: bool| {
        add(format!("{name}.hc_norm.weight"), &[wide]);
        add(format!("{name}.input_mix_weight_down.weight"), &[rank, wide]);
        add(format!("{name}.input_mix_weight_up.weight"), &[wide, rank]);
        if injects {
            add(format!("{name}.block_inject_weight.weight"), &[streams, wide]);
        }
    };
    connection(&mut add, "hyper_connection_mixer", false);
    let types = config["layer_types"].as_array().unwrap();
    let ids: Vec<u64> =
        config["ple_layer_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
    for (layer, kind) in types.iter().enumerate() {
        let name = format!("layers.{layer}");
        connection(&mut add, &format!("{name}.attn_hyper_connection"), true);
        connection(&mut add, &format!("{name}.mlp_hyper_connection"), true);
        let mut part = |part: &str, shape: &[usize]| add(format!("{name}.{part}"), shape);
        match kind.as_str().unwrap() {
            "linear_attention" => synth_delta(&mut part, &number),
            _ => synth_attention(&mut part, &number),
        }
        let (e, f) = (number("num_experts"), number("moe_intermediate_size"));
        part("mlp.gate.weight", &[e, d]);
        part("mlp.experts.gate_up_proj", &[e, 2 * f, d]);
        part("mlp.experts.down_proj", &[e, d, f]);
        let shared = number("shared_expert_intermediate_size");
        part("mlp.shared_expert.gate_proj.weight", &[shared, d]);
        part("mlp.shared_expert.up_proj.weight", &[shared, d]);
        part("mlp.shared_expert.down_proj.weight", &[d, shared]);
        part("mlp.shared_expert_gate.weight", &[1, d]);
        if let Some(rank) = ids.iter().position(|&id| id == layer as u64 + 1) {
            synth_ple(&mut part, &number, rank);
        }
    }
    all
}

fn synth_delta(part: &mut dyn FnMut(&str, &[usize]), number: &dyn Fn(&str) -> usize) {
    let (d, heads) = (number("hidden_size"), number("linear_num_value_heads"));
    let values = heads * number("linear_value_head_dim");
    let channels = values + 2 * number("linear_num_key_heads") * number("linear_key_head_dim");
    part("linear_attn.A_log", &[heads]);
    part("linear_attn.dt_bias", &[heads]);
    part("linear_attn.conv1d.weight", &[channels, 1, number("linear_conv_kernel_dim")]);
    part("linear_attn.in_proj_qkv.weight", &[channels, d]);
    part("linear_attn.in_proj_z.weight", &[values, d]);
    part("linear_attn.in_proj_a.weight", &[heads, d]);
    part("linear_attn.in_proj_b.weight", &[heads, d]);
    part("linear_attn.norm.weight", &[number("linear_value_head_dim")]);
    part("linear_attn.out_proj.weight", &[d, values]);
}

fn synth_attention(part: &mut dyn FnMut(&str, &[usize]), number: &dyn Fn(&str) -> usize) {
    let (d, head) = (number("hidden_size"), number("head_dim"));
    let (q, kv) = (number("num_attention_heads") * head, number("num_key_value_heads") * head);
    let index = number("indexer_head_dim");
    part("self_attn.q_proj.weight", &[2 * q, d]);
    part("self_attn.k_proj.weight", &[kv, d]);
    part("self_attn.v_proj.weight", &[kv, d]);
    part("self_attn.o_proj.weight", &[d, q]);
    part("self_attn.q_norm.weight", &[head]);
    part("self_attn.k_norm.weight", &[head]);
    let rows = (number("indexer_n_heads") + 1) * index;
    part("self_attn.indexer.index_qk_proj.weight", &[rows, d]);
    part("self_attn.indexer.q_layernorm.weight", &[index]);
    part("self_attn.indexer.k_layernorm.weight", &[index]);
}

fn synth_ple(part: &mut dyn FnMut(&str, &[usize]), number: &dyn Fn(&str) -> usize, rank: usize) {
    let (d, wide) = (number("hidden_size"), number("hc_count") * number("hidden_size"));
    let (embed, heads) =
        (number("ple_embed_dim"), (number("ngram_size") - 1) * number("heads_per_ngram"));
    for norm in ["norm_key", "norm_query", "norm_conv"] {
        part(&format!("ple.{norm}.weight"), &[wide]);
    }
    part("ple.key_proj.weight", &[wide, embed]);
    part("ple.value_proj.weight", &[d, embed]);
    part("ple.conv1d.weight", &[wide, 1, number("ple_conv_kernel_size")]);
    let is_prime = |n: &usize| (2..=n.isqrt()).all(|d| !n.is_multiple_of(d));
    let primes = (number("ngram_vocab_size_base")..).filter(is_prime).skip(rank * heads);
    let rows: usize = primes.take(heads).sum();
    let rows = rows.next_multiple_of(number("make_ngram_vocab_size_divisible_by"));
    let parts = number("split_ngram_parts");
    for shard in 0..parts {
        let name = format!("ple.ple_embedding.ngram_embedding.shard_{shard}.weight");
        part(&name, &[rows / parts, embed / heads]);
    }
}
