//! What a new family needs, and a file to begin with.

use crate::project;
use anyhow::{Context, Result, ensure};
use clap::Args;
use std::fs;

/// Where the file of a family lies.
const FOLDER: &str = "crates/model/src";

#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Name of the family: its `model_type`
    name: String,
    /// Only print the list
    #[arg(long)]
    list: bool,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let name = &options.name;
    let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    ensure!(
        name.starts_with(|c: char| c.is_ascii_lowercase()) && name.chars().all(is_name),
        "`{name}` is no name of a module: expected small letters, digits and `_`"
    );
    let file = format!("{FOLDER}/{name}.rs");
    if !options.list {
        let path = project::root().join(&file);
        ensure!(!path.exists(), "`{file}` exists already");
        fs::write(&path, draft(name)).with_context(|| format!("could not write `{file}`"))?;
        println!("wrote {file}, a copy of the plainest family\n");
    }
    println!(
        "1. {file}: the layer as pseudo-code, the source, the checkpoints; config, names,\n   \
         state, forward pass\n\
         2. {FOLDER}/lib.rs: `mod {name};`\n\
         3. {FOLDER}/registry.rs: `\"{name}\" [\"{name}\"] => {name}::load;`\n\
         4. crates/xtask/src/fixtures.rs: `{name}` among the families; then\n   \
         `cargo xtask fixtures`\n\
         5. cargo test --release -p snowmelt-engine --test it\n\
         6. README.md and CHANGELOG.md: a line each\n\
         More in docs/adding-a-model.md"
    );
    Ok(())
}

fn draft(name: &str) -> String {
    format!(
        r#"//! {name}: what is new in one sentence.
//!
//! ```text
//! x += o_proj(attention(rope q, rope k, v))
//! x += down_proj(silu(gate_proj x) * up_proj x)
//! ```
//! Source: transformers `models/{name}/modeling_{name}.py`.
//! Checkpoints: which published ones.

use crate::blocks::{{
    Attention, AttentionShape, AttentionWork, Ffn, LayerParts, LoadedAs, Mixer, Mlp, PreNorm,
    PreNormParts, Works,
}};
use crate::config::{{Heads, Trunk, positive, require_silu, text_config}};
use crate::loader::Loader;
use crate::rotary::Rotary;
use snowmelt_backend::Glu;
use snowmelt_weights::ConfigView;

pub(crate) fn load<L: Loader>(config: &ConfigView<'_>, l: &mut L) -> LoadedAs<L> {{
    let text = text_config(config)?;
    require_silu(&text)?;
    let trunk = Trunk::read(config, &text)?;
    let (d_model, eps) = (trunk.d_model, trunk.eps);
    let heads = Heads::read(&text, d_model)?;
    let rotary = Rotary::read(&text, heads.d_head, trunk.context_max)?;
    let attention = AttentionShape::plain(heads, d_model, eps);
    let d_mlp = positive("intermediate_size", text.usize("intermediate_size")?)?;
    let parts = PreNormParts {{ trunk, norm_plus: 0.0, moe: None, d_mlp }};
    let works = |l: &mut L| Works {{
        attention: Some(AttentionWork::load(l, attention, &rotary)),
        ..Works::default()
    }};
    let model = PreNorm::load(l, &parts, works, |l, index| {{
        let mixer = Attention::load(l, attention, index, &format!("layers.{{index}}.self_attn"))?;
        let mlp = Mlp::load(l, Glu::Silu, [d_model, d_mlp], &format!("layers.{{index}}.mlp"))?;
        Ok(LayerParts {{ mixer: Mixer::Attention(mixer), ffn: Ffn::Mlp(mlp) }})
    }})?;
    Ok((model, trunk))
}}
"#
    )
}
