//! Heads that predict further tokens, beside the trunk: found and listed, for a speculative
//! decoder. They are never part of the trunk, and never a reason to refuse a model.
//!
//! ```text
//! qwen3_next, qwen3_5   mtp.fc, mtp.pre_fc_norm_*, mtp.norm, mtp.layers.I.*
//! qwen4_exp             mtp.fc_embedding, mtp.fc_hidden, mtp.pre_fc_norm_*, mtp.layers.I.*,
//!                       mtp.hyper_connection_mixer.*
//! deepseek              model.layers.L.*, L from the number of layers on: enorm, hnorm, eh_proj,
//!                       shared_head.norm, and a layer as the trunk's
//! ```

use snowmelt_weights::{Checkpoint, TensorInfo};
use std::collections::{BTreeMap, BTreeSet};

/// One head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MtpHead {
    /// `mtp.layers.0`, or `model.layers.61`.
    pub name: String,
    /// Its tensors, with what all heads of the model share.
    pub tensors: Vec<String>,
    /// Bytes of them in the files.
    pub bytes: u64,
    /// Names that such a head has and this one lacks; empty: it is complete.
    pub missing: Vec<String>,
}

/// Which names belong to heads.
#[derive(Debug)]
pub(crate) struct MtpNames {
    /// Prefix of trunk layers.
    layers: String,
    /// Layers past the trunk that are heads.
    past: BTreeSet<usize>,
}

/// What only a head has, of a layer past the trunk.
const MARKS: [&str; 4] = ["enorm.", "hnorm.", "eh_proj.", "shared_head."];

impl MtpNames {
    /// `prefix`: of the trunk; `announced`: heads that the config promises.
    pub(crate) fn new(
        checkpoint: &Checkpoint,
        prefix: &str,
        n_layers: usize,
        announced: usize,
    ) -> Self {
        let layers = format!("{prefix}layers.");
        let mut past: BTreeSet<usize> = (n_layers..n_layers + announced).collect();
        for info in checkpoint.tensors() {
            if let Some((index, rest)) = layer_of(&layers, &info.name)
                && index >= n_layers
                && MARKS.iter().any(|mark| rest.starts_with(mark))
            {
                past.insert(index);
            }
        }
        Self { layers, past }
    }

    /// The head that a tensor belongs to; `mtp` where all share it.
    pub(crate) fn head_of(&self, name: &str) -> Option<String> {
        if let Some(rest) = name.strip_prefix("mtp.") {
            let layer = layer_of("layers.", rest);
            return Some(layer.map_or("mtp".into(), |(index, _)| format!("mtp.layers.{index}")));
        }
        let (index, _) = layer_of(&self.layers, name)?;
        self.past.contains(&index).then(|| format!("{}{index}", self.layers))
    }

    /// All heads of a checkpoint.
    pub(crate) fn heads(&self, checkpoint: &Checkpoint) -> Vec<MtpHead> {
        let mut found: BTreeMap<String, Vec<&TensorInfo>> = BTreeMap::new();
        for info in checkpoint.tensors() {
            if let Some(head) = self.head_of(&info.name) {
                found.entry(head).or_default().push(info);
            }
        }
        let shared = found.remove("mtp").unwrap_or_default();
        if found.is_empty() && !shared.is_empty() {
            found.insert("mtp.layers.0".into(), Vec::new());
        }
        let head = |(name, own): (String, Vec<&TensorInfo>)| {
            let with = if name.starts_with("mtp.") { &shared[..] } else { &[] };
            let all: Vec<&TensorInfo> = with.iter().copied().chain(own).collect();
            let names: BTreeSet<&str> = all.iter().map(|info| info.name.as_str()).collect();
            MtpHead {
                missing: missing(&name, &names),
                tensors: names.iter().map(|name| (*name).to_owned()).collect(),
                bytes: all.iter().map(|info| info.len).sum(),
                name,
            }
        };
        found.into_iter().map(head).collect()
    }
}

/// Layer index and the rest of a name under `prefix`.
fn layer_of<'a>(prefix: &str, name: &'a str) -> Option<(usize, &'a str)> {
    let (index, rest) = name.strip_prefix(prefix)?.split_once('.')?;
    Some((index.parse().ok()?, rest))
}

/// Names that a head lacks. Where one of several will do, the first is named.
fn missing(head: &str, names: &BTreeSet<&str>) -> Vec<String> {
    let has = |start: &str| names.iter().any(|name| name.starts_with(start));
    let mut wanted: Vec<String> = Vec::new();
    let mut want = |name: String| wanted.push(name);
    for part in ["q", "k", "v", "o"] {
        // Latent attention has other names for the first three.
        let latent = has(&format!("{head}.self_attn.kv_a_proj_with_mqa."));
        if !latent || part == "o" {
            want(format!("{head}.self_attn.{part}_proj.weight"));
        }
    }
    if head.starts_with("mtp.") {
        want("mtp.pre_fc_norm_embedding.weight".into());
        want("mtp.pre_fc_norm_hidden.weight".into());
        if has("mtp.fc_embedding.") || has("mtp.fc_hidden.") {
            want("mtp.fc_embedding.weight".into());
            want("mtp.fc_hidden.weight".into());
            want("mtp.hyper_connection_mixer.hc_norm.weight".into());
        } else {
            want("mtp.fc.weight".into());
            want("mtp.norm.weight".into());
            want(format!("{head}.input_layernorm.weight"));
            want(format!("{head}.post_attention_layernorm.weight"));
        }
    } else {
        for part in ["enorm", "hnorm", "eh_proj", "shared_head.norm"] {
            want(format!("{head}.{part}.weight"));
        }
        want(format!("{head}.input_layernorm.weight"));
        want(format!("{head}.post_attention_layernorm.weight"));
    }
    let lacks = |name: &String| !names.contains(name.as_str());
    let mut missing: Vec<String> = wanted.into_iter().filter(lacks).collect();
    for mlp in ["gate", "up", "down"] {
        let dense = names.contains(format!("{head}.mlp.{mlp}_proj.weight").as_str());
        let fused = if mlp == "down" { "down_proj" } else { "gate_up_proj" };
        let is_fused = names.contains(format!("{head}.mlp.experts.{fused}").as_str());
        let each = names.iter().any(|name| {
            name.starts_with(&format!("{head}.mlp.experts."))
                && name.ends_with(&format!(".{mlp}_proj.weight"))
        });
        if !(dense || is_fused || each) {
            missing.push(format!("{head}.mlp.{mlp}_proj.weight"));
        }
    }
    missing
}
