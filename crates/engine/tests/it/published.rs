//! Encodings as they are published: fp8 and mxfp4 folders against twins that hold the same values
//! in f32. Logits are the same bytes, resident, streamed, mapped and packed.

use crate::support::{cpu, fixture, packed_from, root, tensors};
use serde_json::{Value, json};
use snowmelt_backend::MatrixLayout;
use snowmelt_backend_cpu::Activations;
use snowmelt_engine::{Engine, EngineOptions, ModelOptions, Outputs, Residency};
use snowmelt_weights::{Checkpoint, Encoding};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// A tensor to be written: dtype, shape, bytes.
type Tensor = (&'static str, Vec<usize>, Vec<u8>);
type Tensors = BTreeMap<String, Tensor>;

fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Values of a tensor in bf16 or f32.
fn values(dtype: &str, bytes: &[u8]) -> Vec<f32> {
    let encoding = if dtype == "BF16" { Encoding::Bf16 } else { Encoding::F32 };
    let mut values = vec![0.0; bytes.len() / encoding.row_bytes(1)];
    encoding.decode_row(bytes, &mut values);
    values
}

fn dtypes(path: &Path) -> BTreeMap<String, String> {
    let bytes = fs::read(path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let json: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let entries = json.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__");
    entries.map(|(name, info)| (name.clone(), info["dtype"].as_str().unwrap().to_owned())).collect()
}

/// A model folder with these tensors.
fn write(from: &Path, tensors: &Tensors, quantised: Option<Value>) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let text = fs::read(from.join("config.published.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&text).unwrap();
    if let Some(quantised) = quantised {
        config["quantization_config"] = quantised;
    }
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, (dtype, shape, bytes)) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        data.extend(bytes);
        let info = json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets });
        header.insert(name.clone(), info);
    }
    let mut text = Value::Object(header).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let file = [&(text.len() as u64).to_le_bytes()[..], &text, &data].concat();
    fs::write(folder.path().join("model.safetensors"), file).unwrap();
    folder
}

/// All values of an encoding's codes, scale 1.
fn code_values(encoding: Encoding) -> Vec<f32> {
    let codes: Vec<u8> = match encoding {
        Encoding::F8E4M3 => (0..=255).collect(),
        // The low nibble counts; the high one is code 0.
        _ => (0..16).collect(),
    };
    let mut values = vec![0.0; if encoding == Encoding::F8E4M3 { 256 } else { 32 }];
    if encoding == Encoding::F8E4M3 {
        encoding.decode_codes(&codes, |_| 1.0, &mut values);
        return values;
    }
    encoding.decode_codes(&codes, |_| 1.0, &mut values);
    values.into_iter().step_by(2).collect()
}

fn nearest(values: &[f32], wanted: f32) -> u8 {
    let error = |code: &usize| (values[*code] - wanted).abs();
    let finite = (0..values.len()).filter(|&code| !values[code].is_nan());
    finite.min_by(|a, b| error(a).total_cmp(&error(b))).unwrap() as u8
}

/// `[rows, d_in]` as fp8: codes, scales of blocks of 128 x 128, and what they decode to.
fn to_fp8(values: &[f32], d_in: usize) -> (Vec<u8>, Vec<f32>, Vec<f32>) {
    let all = code_values(Encoding::F8E4M3);
    let (rows, blocks) = (values.len() / d_in, d_in.div_ceil(128));
    let mut scales = vec![0.0f32; rows.div_ceil(128) * blocks];
    for (i, value) in values.iter().enumerate() {
        let scale = &mut scales[i / d_in / 128 * blocks + i % d_in / 128];
        *scale = scale.max(value.abs() / 448.0);
    }
    // Those of bf16 tensors are exact in bf16 too.
    for scale in &mut scales {
        *scale = f32::from_bits((scale.to_bits() + 0x1_0000) & !0xffff);
    }
    let scale = |i: usize| scales[i / d_in / 128 * blocks + i % d_in / 128];
    let codes: Vec<u8> =
        values.iter().enumerate().map(|(i, value)| nearest(&all, value / scale(i))).collect();
    let decoded = codes.iter().enumerate().map(|(i, c)| all[usize::from(*c)] * scale(i)).collect();
    (codes, scales, decoded)
}

/// `[rows, d_in]` as mxfp4: codes, exponents, and what they decode to.
fn to_mxfp4(values: &[f32]) -> (Vec<u8>, Vec<u8>, Vec<f32>) {
    let all = code_values(Encoding::Mxfp4);
    let (mut codes, mut exponents, mut decoded) = (Vec::new(), Vec::new(), Vec::new());
    for group in values.chunks_exact(32) {
        let greatest = group.iter().fold(1e-9f32, |m, v| m.max(v.abs()));
        let exponent = (greatest.to_bits() >> 23) as u8 - 2;
        let scale = f32::from_bits(u32::from(exponent) << 23);
        exponents.push(exponent);
        for pair in group.chunks_exact(2) {
            let [low, high] = [pair[0], pair[1]].map(|value| nearest(&all, value / scale));
            codes.push(low | high << 4);
            decoded.extend([low, high].map(|code| all[usize::from(code)] * scale));
        }
    }
    (codes, exponents, decoded)
}

/// Bits of the logits of a text.
fn logits(checkpoint: &Checkpoint, residency: Residency, activations: Activations) -> Vec<u32> {
    let census = snowmelt_model::census(checkpoint, ModelOptions::default()).unwrap();
    let fewest = (residency == Residency::Streamed).then_some(census.limits.top_k as u32);
    let options = EngineOptions {
        memory_bytes: Some(1 << 30),
        slots: fewest,
        context_tokens: Some(128),
        prefill_chunk: Some(32),
        residency,
        poison: true,
        ..EngineOptions::default()
    };
    let mut engine = Engine::open(checkpoint, cpu(2, activations), &options).unwrap();
    let session = engine.session().unwrap();
    let tokens: Vec<u32> = (0..70).map(|i| (i * 97 + 13) % census.n_vocab as u32).collect();
    let mut bits = Vec::new();
    let mut sink = |_: usize, logits: &[f32]| bits.extend(logits.iter().map(|l| l.to_bits()));
    // Many rows at a time, and one by one.
    for chunk in [&tokens[..32], &tokens[32..64]].into_iter().chain(tokens[64..].chunks(1)) {
        engine.step_one(session, chunk, Outputs::All, &mut sink).unwrap();
    }
    bits
}

/// The published folder gives the logits of its twin in every way of holding experts, packed too.
fn check(name: &str, published: &Path, twin: &Path) {
    let (published, twin) = (Checkpoint::open(published).unwrap(), Checkpoint::open(twin).unwrap());
    let expected = logits(&twin, Residency::Resident, Activations::F32);
    assert!(expected.iter().all(|bits| f32::from_bits(*bits).is_finite()), "{name}");
    let (_folder, packed) = packed_from(&published, None, None);
    for (kind, checkpoint) in [("published", &published), ("packed", &packed)] {
        for residency in [Residency::Resident, Residency::Streamed, Residency::Mapped] {
            let got = logits(checkpoint, residency, Activations::F32);
            assert!(got == expected, "{name} {kind} {residency:?}: logits differ from the twin's");
            // No integer products beside these weights.
            let auto = logits(checkpoint, residency, Activations::Auto);
            assert!(auto == expected, "{name} {kind} {residency:?} with auto activations");
        }
    }
    // Converted to q8 the same from both.
    let q8 = |checkpoint| {
        let (_folder, packed) = packed_from(checkpoint, Some(Encoding::Q8), None);
        logits(&packed, Residency::Streamed, Activations::F32)
    };
    if published.tensors().any(|info| info.name.ends_with("_blocks")) {
        assert!(q8(&published) == q8(&twin), "{name}: q8 of the two differ");
    }
}

fn oracle(family: &str) -> Option<PathBuf> {
    let shared = root().join("../shared/oracle").join(family);
    let found = [fixture(family), shared].into_iter().find(|path| path.is_dir());
    if found.is_none() {
        println!("skipped: neither a fixture nor ../shared/oracle has `{family}`");
    }
    found
}

/// Matrices that published FP8 checkpoints hold as codes: projections, not embeddings, routers,
/// norms.
fn is_fp8(name: &str) -> bool {
    let kept = ["norm", "embed_tokens", "lm_head", "mlp.gate.", "bias"];
    name.ends_with(".weight") && !kept.iter().any(|part| name.contains(part))
}

/// Every matrix gets a block that is cut at 128 in one of its dimensions, or is smaller than one.
#[test]
fn fp8_deepseek_is_its_twin() {
    let Some(from) = oracle("deepseek_v3") else { return };
    let path = from.join("model.safetensors");
    let (stored, dtypes) = (tensors(&path), dtypes(&path));
    let (mut published, mut twin) = (Tensors::new(), Tensors::new());
    for (i, (name, (shape, bytes))) in stored.into_iter().enumerate() {
        let values = values(&dtypes[&name], &bytes);
        if !is_fp8(&name) {
            twin.insert(name.clone(), ("F32", shape.clone(), f32_bytes(&values)));
            published.insert(name, ("F32", shape, f32_bytes(&values)));
            continue;
        }
        let (codes, scales, decoded) = to_fp8(&values, shape[1]);
        twin.insert(name.clone(), ("F32", shape.clone(), f32_bytes(&decoded)));
        let blocks = shape.iter().map(|dim| dim.div_ceil(128)).collect();
        // Both types occur; within the experts of a layer they must be one.
        let bf16 = !name.contains("experts.") && i % 2 == 0;
        let scales: Tensor = match bf16 {
            true => {
                let upper = |s: &f32| ((s.to_bits() >> 16) as u16).to_le_bytes();
                ("BF16", blocks, scales.iter().flat_map(upper).collect())
            }
            false => ("F32", blocks, f32_bytes(&scales)),
        };
        published.insert(format!("{name}_scale_inv"), scales);
        published.insert(name, ("F8_E4M3", shape, codes));
    }
    let ragged = |(dtype, shape, _): &Tensor| *dtype == "F8_E4M3" && shape.iter().any(|d| *d > 128);
    assert!(published.values().any(ragged), "a matrix has more than one block");
    let quantised = json!({
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    });
    let folder = write(&from, &published, Some(quantised.clone()));
    let twin = write(&from, &twin, None);
    check("deepseek_v3 fp8", folder.path(), twin.path());
    refuses(&from, &published, &quantised);
}

/// What cannot be run is refused by name.
fn refuses(from: &Path, published: &Tensors, quantised: &Value) {
    let message = |tensors: &Tensors, quantised: Value| {
        let folder = write(from, tensors, Some(quantised));
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        snowmelt_model::census(&checkpoint, ModelOptions::default()).unwrap_err().to_string()
    };
    let mut other = quantised.clone();
    other["weight_block_size"] = json!([64, 64]);
    assert!(message(published, other).contains("weight_block_size` in"));
    let mut without = published.clone();
    let name = "model.layers.1.self_attn.o_proj.weight_scale_inv";
    without.remove(name).unwrap();
    assert!(message(&without, quantised.clone()).contains(name));
    let mut mixed = published.clone();
    let name = "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv";
    let (_, shape, bytes) = mixed.remove(name).unwrap();
    let bytes = bytes.chunks_exact(4).flat_map(|b| [b[2], b[3]]).collect();
    mixed.insert(name.to_owned(), ("BF16", shape, bytes));
    let found = message(&mixed, quantised.clone());
    assert!(found.contains("fp8 with bf16 scales"), "{found}");
}

/// `[E, d_in, d_out]` to `[E, d_out, d_in]`.
fn transposed(values: &[f32], [d_in, d_out]: [usize; 2]) -> Vec<f32> {
    let one = |expert: &[f32]| -> Vec<f32> {
        (0..d_in * d_out).map(|i| expert[i % d_in * d_out + i / d_in]).collect()
    };
    values.chunks_exact(d_in * d_out).flat_map(one).collect()
}

#[test]
fn mxfp4_gpt_oss_is_its_twin() {
    let from = fixture("gpt_oss");
    let path = from.join("model.safetensors");
    let dtypes = dtypes(&path);
    let (mut published, mut twin) = (Tensors::new(), Tensors::new());
    for (name, (shape, bytes)) in tensors(&path) {
        if !(name.ends_with(".gate_up_proj") || name.ends_with(".down_proj")) {
            let dtype = if dtypes[&name] == "BF16" { "BF16" } else { "F32" };
            twin.insert(name.clone(), (dtype, shape.clone(), bytes.clone()));
            published.insert(name, (dtype, shape, bytes));
            continue;
        }
        let [experts, d_in, d_out] = shape[..] else { panic!("{name} {shape:?}") };
        let rows = transposed(&values(&dtypes[&name], &bytes), [d_in, d_out]);
        let (codes, exponents, decoded) = to_mxfp4(&rows);
        let decoded = f32_bytes(&transposed(&decoded, [d_out, d_in]));
        twin.insert(name.clone(), ("F32", shape, decoded));
        let blocks = vec![experts, d_out, d_in / 32, 16];
        published.insert(format!("{name}_blocks"), ("U8", blocks, codes));
        let blocks = vec![experts, d_out, d_in / 32];
        published.insert(format!("{name}_scales"), ("U8", blocks, exponents));
    }
    let quantised = json!({ "quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"] });
    let (folder, twin) = (write(&from, &published, Some(quantised)), write(&from, &twin, None));
    check("gpt_oss mxfp4", folder.path(), twin.path());
}

/// Biases stay exact, transposed floats become plain rows.
#[test]
fn packed_records_are_plain() {
    let (folder, packed) = packed_from(&crate::support::open("gpt_oss"), None, None);
    let census = snowmelt_model::census(&packed, ModelOptions::default()).unwrap();
    for table in &census.experts {
        assert!(table.layout.all_pieces().all(MatrixLayout::is_plain));
        assert_eq!(table.layout.all_pieces().count(), 6);
    }
    drop(folder);
}

#[test]
fn nothing_is_converted_to_published_encodings() {
    let source = crate::support::open("qwen3_moe");
    let folder = tempfile::tempdir().unwrap();
    let options =
        snowmelt_engine::pack::PackOptions { experts: Some(Encoding::Mxfp4), trunk: None };
    let to = folder.path().join("packed");
    let error = snowmelt_engine::pack::pack(&source, &to, options, &mut |_, _| true).unwrap_err();
    assert!(error.to_string().contains("`mxfp4`") && !to.exists(), "{error}");
}
