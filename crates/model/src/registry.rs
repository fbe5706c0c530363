//! Which family a checkpoint belongs to, and the three ways of running its `load`.

use crate::census::{Census, CensusLoader};
use crate::config::{Result, text_config};
use crate::error::ModelError;
use crate::loader::WeightLoader;
use crate::outline::{Outline, OutlineLoader};
use crate::probe::{Probe, show};
use crate::quantisation;
use crate::{deepseek, gemma4, gpt_oss, llama, qwen3_5, qwen3_moe, qwen3_next, qwen4_exp};
use snowmelt_backend::{Backend, ExpertFetch, Limits, MoeWork, RowFetch, Rows, StepError, View};
use snowmelt_weights::{Checkpoint, ConfigView};
use std::ops::Range;

/// Which tokens layers with an indexer of blocks attend to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Qsa {
    /// Those that the indexer chooses, as the model was trained.
    #[default]
    Sparse,
    /// All, for comparison.
    Dense,
}

/// What the user asks of a family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelOptions {
    /// Of layers with an indexer of blocks.
    pub qsa: Qsa,
}

/// What one step works with.
pub struct Step<'a, B: Backend, F> {
    /// The backend.
    pub b: &'a B,
    /// The recording.
    pub p: &'a mut B::Pass,
    /// The rows.
    pub rows: &'a Rows,
    /// State buffers, in the order of [`Census::state`].
    pub state: &'a [B::Buf],
    /// The experts.
    pub fetch: &'a mut F,
    /// Tables that stay on disk, in the order of [`Census::tables`].
    pub tables: &'a mut dyn RowFetch,
    /// Host memory of the expert loop, and which rows failed.
    pub work: &'a mut MoeWork,
    /// Who looks at values inside.
    pub probe: Option<&'a mut dyn Probe<B>>,
}

impl<B: Backend, F> std::fmt::Debug for Step<'_, B, F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Step({} rows)", self.rows.len())
    }
}

impl<B: Backend, F> Step<'_, B, F> {
    /// Shows a value `[n, width]` where someone looks.
    pub(crate) fn show(
        &mut self,
        layer: usize,
        name: &'static str,
        view: View<'_, B::Buf>,
        width: usize,
    ) {
        show(&mut self.probe, self.p, self.rows, (layer, name), (view, width));
    }
}

/// A loaded model.
pub trait Decoder<B: Backend, F: ExpertFetch<B>> {
    /// Records one step of all rows; their hidden states stay in the model's scratch.
    ///
    /// # Errors
    /// When the step as a whole cannot go on; rows that alone failed are marked in
    /// [`Step::work`].
    fn forward(&self, step: &mut Step<'_, B, F>) -> Result<(), StepError>;

    /// Logits `[outputs.len(), n_vocab]` of these output rows ([`Rows::outputs`]) of the step
    /// recorded last; at most as many as the model was loaded for.
    fn head(&self, b: &B, p: &mut B::Pass, rows: &Rows, outputs: Range<usize>) -> &B::Buf;
}

/// A model loaded for a backend and an expert source.
pub type Loaded<B, F> = Box<dyn Decoder<B, F>>;

/// More heads than any model has.
const HEADS_MAX: usize = 64;

/// One line a family: name, `model_type` spellings, `load`.
macro_rules! families {
    ($($name:literal [$($model_type:literal),+] => $load:path;)+) => {
        /// Families that are built in, by name.
        pub const FAMILIES: &[&str] = &[$($name),+];

        fn family_of(model_type: &str) -> Option<&'static str> {
            match model_type {
                $($($model_type)|+ => Some($name),)+
                _ => None,
            }
        }

        /// What the checkpoint needs, from its headers alone.
        ///
        /// # Errors
        /// When the family is not known, or a tensor or config field is wrong.
        pub fn census(checkpoint: &Checkpoint, options: ModelOptions) -> Result<Census> {
            let (config, family) = identify(checkpoint)?;
            let mut l = CensusLoader::new(checkpoint, options);
            let trunk = match family {
                $($name => $load(&config, &mut l)?.1,)+
                _ => unreachable!("`identify` names a family of the table"),
            };
            let embedding = l.tensors.trunk("embed_tokens.weight");
            let table = l.trunk.iter().find(|tensor| tensor.name == embedding && !trunk.tied);
            let embedding_bytes = table.map_or(0, |tensor| tensor.loaded_bytes);
            let announced = text_config(&config)?.usize_or("num_nextn_predict_layers", 0)?;
            let heads = l.tensors.heads(trunk.n_layers, announced.min(HEADS_MAX));
            Ok(Census {
                family,
                n_vocab: trunk.n_vocab,
                n_layers: trunk.n_layers,
                context_max: trunk.context_max,
                limits: l.limits,
                trunk: l.trunk,
                constant_bytes: l.constant_bytes,
                embedding_bytes,
                experts: l.experts,
                tables: l.tables,
                history_tokens: l.history_tokens,
                state: l.state,
                scratch_width: l.scratch_width,
                outputs_width: l.outputs_width,
                mtp: heads.heads(checkpoint),
                skipped: l.tensors.finish(family, &heads)?,
            })
        }

        /// What a model of this config weighs, without its weights. `checkpoint` need hold nothing
        /// but the config.
        ///
        /// # Errors
        /// When the family is not known, or a config field is wrong.
        pub fn outline(checkpoint: &Checkpoint) -> Result<Outline> {
            let (config, family) = identify(checkpoint)?;
            let mut l = OutlineLoader::new(checkpoint, family);
            let trunk = match family {
                $($name => $load(&config, &mut l)?.1,)+
                _ => unreachable!("`identify` names a family of the table"),
            };
            Ok(l.finish(trunk))
        }

        /// Reads the weights into `backend` and reserves its scratch for `limits` (those of the
        /// census with the same options, with `rows` and `context_tokens` set) and `outputs` rows
        /// of logits at a time.
        ///
        /// # Errors
        /// As [`crate::census`], or when a file cannot be read.
        pub fn load<B: Backend, F: ExpertFetch<B>>(
            checkpoint: &Checkpoint,
            backend: &B,
            options: ModelOptions,
            limits: &Limits,
            outputs: usize,
        ) -> Result<Loaded<B, F>> {
            let (config, family) = identify(checkpoint)?;
            backend.prepare(limits);
            let mut l = WeightLoader::new(checkpoint, backend, options, limits.rows, outputs);
            match family {
                $($name => Ok(Box::new($load(&config, &mut l)?.0)),)+
                _ => unreachable!("`identify` names a family of the table"),
            }
        }
    };
}

families! {
    "qwen3_moe" ["qwen3_moe"] => qwen3_moe::load;
    "qwen3_next" ["qwen3_next"] => qwen3_next::load;
    "qwen3_5_moe" ["qwen3_5_moe", "qwen3_5_moe_text"] => qwen3_5::moe::load;
    "qwen3_5" ["qwen3_5", "qwen3_5_text"] => qwen3_5::load;
    "qwen4_exp" ["qwen4_exp", "qwen4_exp_text"] => qwen4_exp::load;
    "deepseek_v3" ["deepseek_v3", "kimi_k2"] => deepseek::load;
    "deepseek_v32" ["deepseek_v32"] => deepseek::v32::load;
    "gemma4" ["gemma4", "gemma4_text"] => gemma4::load;
    "gpt_oss" ["gpt_oss"] => gpt_oss::load;
    "llama" ["llama"] => llama::load;
    "qwen2" ["qwen2"] => llama::qwen2::load;
    "qwen3" ["qwen3"] => llama::qwen3::load;
}

/// The family: `model_type` of the config, else of its `text_config`.
fn identify(checkpoint: &Checkpoint) -> Result<(ConfigView<'_>, &'static str)> {
    let config = ConfigView::new(checkpoint.config(), "config.json")?;
    let outer = config.opt_str("model_type")?;
    let nested = match config.opt_object("text_config")? {
        Some(text) => text.opt_str("model_type")?,
        None => None,
    };
    let found = [outer, nested].into_iter().flatten().find_map(family_of);
    match found {
        Some(family) => match checkpoint.packed() {
            Some(packed) if packed.family() != family => Err(ModelError::PackedFamily {
                origin: checkpoint.origin().to_owned(),
                found: packed.family().to_owned(),
                expected: family,
            }),
            _ => {
                quantisation::check(&config)?;
                Ok((config, family))
            }
        },
        None => Err(ModelError::UnknownFamily {
            origin: checkpoint.origin().to_owned(),
            found: outer.or(nested).unwrap_or("missing").to_owned(),
            known: FAMILIES.join(", "),
        }),
    }
}
