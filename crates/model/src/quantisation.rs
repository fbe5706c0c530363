//! `quantization_config`: which published encodings can be read.

use crate::config::{Result, refuse};
use snowmelt_weights::ConfigView;

const FP8: &str = "fp8";

/// Values of `quant_method` whose tensors are read as they are published.
pub(crate) const METHODS: [&str; 2] = [FP8, "mxfp4"];

/// Rows and columns of a block of `fp8` weights that share a scale.
pub(crate) const FP8_BLOCK: usize = 128;

/// Refuses variants that cannot be read. Other methods are found out from their tensors: a
/// checkpoint that was made plain again often keeps the field.
pub(crate) fn check(config: &ConfigView<'_>) -> Result<()> {
    let nested = config.opt_object("text_config")?;
    for config in [Some(config), nested.as_ref()].into_iter().flatten() {
        let Some(found) = config.opt_object("quantization_config")? else { continue };
        if found.opt_str("quant_method")? == Some(FP8) {
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
