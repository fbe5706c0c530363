//! `quantization_config`: which published encodings can be read.

use crate::config::{Result, refuse};
use snowmelt_weights::{ConfigView, Encoding};

/// Methods that are read as they are published: name, encoding.
const METHODS: [(&str, Encoding); 2] = [("fp8", Encoding::F8E4M3), ("mxfp4", Encoding::Mxfp4)];

/// Rows and columns of a block of `fp8` weights that share a scale.
pub(crate) const FP8_BLOCK: usize = 128;

/// Refuses methods that cannot be read, by name. What a config does not mention is found out from
/// the tensors.
pub(crate) fn check(config: &ConfigView<'_>) -> Result<()> {
    let nested = config.opt_object("text_config")?;
    for config in [Some(config), nested.as_ref()].into_iter().flatten() {
        let Some(found) = config.opt_object("quantization_config")? else { continue };
        let method = found.opt_str("quant_method")?.unwrap_or("missing");
        let Some((_, encoding)) = METHODS.iter().find(|(name, _)| *name == method) else {
            let known = METHODS.map(|(name, _)| format!("`{name}`")).join(" or ");
            return refuse("quantization_config.quant_method", method, known);
        };
        if *encoding == Encoding::F8E4M3 {
            check_fp8(&found)?;
        }
    }
    Ok(())
}

fn check_fp8(found: &ConfigView<'_>) -> Result<()> {
    match found.opt_str("fmt")? {
        None | Some("e4m3") => {}
        Some(other) => return refuse("quantization_config.fmt", other, "`e4m3`"),
    }
    match found.opt_usizes("weight_block_size")? {
        None => Ok(()),
        Some(block) if block == [FP8_BLOCK; 2] => Ok(()),
        Some(other) => {
            let expected = format!("`[{FP8_BLOCK}, {FP8_BLOCK}]`");
            refuse("quantization_config.weight_block_size", format!("{other:?}"), expected)
        }
    }
}
