//! Why a model is refused at open.

use snowmelt_weights::WeightsError;

/// Why a model is refused. Every variant names the field or tensor, what was found and what was
/// expected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A file, header, tensor or config field is wrong.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// `model_type` names no family that is built in.
    #[error(
        "`model_type` in `{origin}` is `{found}`, which is no family that this version runs\n\
         known families: {known}"
    )]
    UnknownFamily {
        /// Model folder.
        origin: String,
        /// Value found.
        found: String,
        /// Families of the registry.
        known: String,
    },
    /// A container whose manifest names another family than its config.
    #[error(
        "`family` in the manifest of `{origin}` is `{found}`, but its config is of `{expected}`\n\
         hint: the manifest was edited, pack the model again"
    )]
    PackedFamily {
        /// Model folder.
        origin: String,
        /// What the manifest says.
        found: String,
        /// The family of the config.
        expected: &'static str,
    },
    /// Tensors are quantised in a way that cannot be decoded.
    #[error(
        "`quantization_config.quant_method` in `config.json` is `{method}`, which this version \
         cannot decode: {source}\nhint: use the checkpoint that is not quantised, `snowmelt pack` \
         quantises it"
    )]
    Quantised {
        /// The method.
        method: String,
        /// What is not as it would be without.
        source: Box<ModelError>,
    },
    /// A config field has a value that the family cannot run with.
    #[error("`{field}` in `config.json` is `{found}`, expected {expected}")]
    Config {
        /// Field name.
        field: &'static str,
        /// Value found.
        found: String,
        /// What would be right.
        expected: String,
    },
    /// Tensors inside the trunk that the family does not know.
    #[error(
        "{count} tensors in the trunk of `{origin}` are not part of `{family}`: {names}\n\
         the file belongs to another family, or has more layers than `config.json` says"
    )]
    Surplus {
        /// Model folder.
        origin: String,
        /// Family name.
        family: &'static str,
        /// How many.
        count: usize,
        /// The first few.
        names: String,
    },
    /// The experts of one layer are stored in different encodings.
    #[error("`{tensor}` is stored as {found}, the same piece of expert 0 as {expected}")]
    MixedExperts {
        /// Tensor that differs.
        tensor: String,
        /// Its encoding.
        found: String,
        /// Encoding of expert 0.
        expected: String,
    },
    /// The shards of one table are stored in different encodings.
    #[error("`{tensor}` is stored as {found}, the first shard of its table as {expected}")]
    MixedTable {
        /// Tensor that differs.
        tensor: String,
        /// Its encoding.
        found: String,
        /// Encoding of the first shard.
        expected: String,
    },
    /// A buffer of the checkpoint contradicts what the config says.
    #[error("`{tensor}` is {found}, expected {expected}")]
    Buffer {
        /// Tensor name.
        tensor: String,
        /// Value found, and where in it.
        found: String,
        /// What would be right.
        expected: String,
    },
    /// The container's expert table does not match what the config says.
    #[error("layer {layer} of the packed experts has {found}, expected {expected}")]
    PackedExperts {
        /// Layer index.
        layer: u32,
        /// What the manifest says.
        found: String,
        /// What the config says.
        expected: String,
    },
}
