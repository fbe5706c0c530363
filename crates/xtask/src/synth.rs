//! Models of any size with random weights: a Hugging Face folder of the family `qwen3_moe`.
//!
//! Speeds and memory at a shape are real, texts are not. Routing is close to uniform, the worst
//! case for a cache of experts.

use anyhow::{Context, Result};
use serde_json::{Map, Value, json};
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// `cargo xtask synth`
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Folder to make.
    out: PathBuf,
    /// Width of the residual stream.
    #[arg(long, default_value_t = 512)]
    hidden: usize,
    /// Layers.
    #[arg(long, default_value_t = 14)]
    layers: usize,
    /// Experts a layer.
    #[arg(long, default_value_t = 128)]
    experts: usize,
    /// Experts a token.
    #[arg(long, default_value_t = 8)]
    top_k: usize,
    /// Inner width of an expert.
    #[arg(long, default_value_t = 512)]
    inner: usize,
    /// Vocabulary.
    #[arg(long, default_value_t = 4096)]
    vocab: usize,
    /// Seed of the weights.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl Options {
    /// The model of the memory promise: 2.8 GB, of which 67 MB are not experts.
    pub(crate) fn promise(out: PathBuf) -> Self {
        Self {
            out,
            hidden: 512,
            layers: 14,
            experts: 128,
            top_k: 8,
            inner: 512,
            vocab: 4096,
            seed: 1,
        }
    }
}

const HEAD: usize = 64;

/// One shard a layer, and one for the rest.
pub(crate) fn run(options: &Options) -> Result<()> {
    let out = &options.out;
    fs::create_dir_all(out).with_context(|| format!("cannot create `{}`", out.display()))?;
    let (h, f, v) = (options.hidden, options.inner, options.vocab);
    let heads = (h / HEAD).max(1);
    let config = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu",
        "hidden_size": h, "num_hidden_layers": options.layers, "vocab_size": v,
        "num_attention_heads": heads, "num_key_value_heads": heads.div_ceil(4), "head_dim": HEAD,
        "intermediate_size": f, "moe_intermediate_size": f, "num_experts": options.experts,
        "num_experts_per_tok": options.top_k, "norm_topk_prob": true, "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0, "max_position_embeddings": 32768, "tie_word_embeddings": false,
    });
    fs::write(out.join("config.json"), serde_json::to_vec_pretty(&config)?)?;
    let shards = options.layers + 1;
    let mut index = Map::new();
    let mut total = 0;
    for shard in 0..shards {
        let name = format!("model-{:05}-of-{shards:05}.safetensors", shard + 1);
        let tensors = match shard.checked_sub(1) {
            None => outer(h, v),
            Some(layer) => inner(options, layer, heads),
        };
        for (tensor, shape) in &tensors {
            index.insert(tensor.clone(), Value::String(name.clone()));
            total += 2 * shape.iter().product::<usize>();
        }
        let seed = options.seed.wrapping_add(shard as u64 * 0x9E37_79B9_7F4A_7C15);
        write_shard(&out.join(&name), &tensors, seed)?;
    }
    let index = json!({ "metadata": { "total_size": total }, "weight_map": index });
    fs::write(out.join("model.safetensors.index.json"), serde_json::to_vec_pretty(&index)?)?;
    eprintln!("{}: {:.2} GB", out.display(), total as f64 / 1e9);
    Ok(())
}

type Tensors = Vec<(String, Vec<usize>)>;

fn outer(h: usize, v: usize) -> Tensors {
    vec![
        ("model.embed_tokens.weight".into(), vec![v, h]),
        ("model.norm.weight".into(), vec![h]),
        ("lm_head.weight".into(), vec![v, h]),
    ]
}

fn inner(options: &Options, layer: usize, heads: usize) -> Tensors {
    let (h, f, e) = (options.hidden, options.inner, options.experts);
    let (q, kv) = (heads * HEAD, heads.div_ceil(4) * HEAD);
    let mut tensors = Tensors::new();
    let mut add = |name: &str, shape: &[usize]| {
        tensors.push((format!("model.layers.{layer}.{name}.weight"), shape.to_vec()));
    };
    add("input_layernorm", &[h]);
    add("post_attention_layernorm", &[h]);
    add("self_attn.q_norm", &[HEAD]);
    add("self_attn.k_norm", &[HEAD]);
    add("self_attn.q_proj", &[q, h]);
    add("self_attn.k_proj", &[kv, h]);
    add("self_attn.v_proj", &[kv, h]);
    add("self_attn.o_proj", &[h, q]);
    add("mlp.gate", &[e, h]);
    for expert in 0..e {
        add(&format!("mlp.experts.{expert}.gate_proj"), &[f, h]);
        add(&format!("mlp.experts.{expert}.up_proj"), &[f, h]);
        add(&format!("mlp.experts.{expert}.down_proj"), &[h, f]);
    }
    tensors
}

fn write_shard(path: &Path, tensors: &Tensors, seed: u64) -> Result<()> {
    let mut header = Map::new();
    let mut at = 0;
    for (name, shape) in tensors {
        let bytes = 2 * shape.iter().product::<usize>();
        let info = json!({ "dtype": "BF16", "shape": shape, "data_offsets": [at, at + bytes] });
        header.insert(name.clone(), info);
        at += bytes;
    }
    let mut header = serde_json::to_vec(&header)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let file = File::create(path).with_context(|| format!("cannot create `{}`", path.display()))?;
    let mut file = BufWriter::with_capacity(1 << 20, file);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    let mut random = seed | 1;
    let mut row = Vec::new();
    for (_, shape) in tensors {
        let d_in = *shape.last().unwrap_or(&1);
        for _ in 0..shape[..shape.len() - 1].iter().product::<usize>() {
            row.clear();
            fill(&mut row, d_in, shape.len() == 1, &mut random);
            file.write_all(&row)?;
        }
    }
    file.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all()?;
    Ok(())
}

/// Norms are near 1; matrices near `1 / sqrt(d_in)`, with random signs and mantissas.
fn fill(row: &mut Vec<u8>, d_in: usize, is_norm: bool, random: &mut u64) {
    let exponent = match is_norm {
        true => 127,
        false => 127 - (d_in as f64).log2().div_euclid(2.0) as u16,
    };
    while row.len() < 2 * d_in {
        // xorshift64*: four values a step.
        *random ^= *random >> 12;
        *random ^= *random << 25;
        *random ^= *random >> 27;
        let bits = random.wrapping_mul(0x2545_F491_4F6C_DD1D);
        for part in 0..4 {
            let bits = (bits >> (16 * part)) as u16;
            let sign = if is_norm { 0 } else { bits & 0x8000 };
            let mantissa = bits & 0x7F;
            row.extend_from_slice(&(sign | exponent << 7 | mantissa).to_le_bytes());
        }
    }
    row.truncate(2 * d_in);
}
