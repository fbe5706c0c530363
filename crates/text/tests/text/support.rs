//! Small tokenizers made up for the tests, and the trained one where it is present.

use std::path::PathBuf;

use serde_json::{Map, Value, json};
use snowmelt_text::Tokenizer;

/// The byte-level alphabet: printable Latin-1 characters stand for themselves.
fn byte_chars() -> Vec<char> {
    let mut next = 0x100;
    (0..=255_u8)
        .map(|byte| match byte {
            0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
            _ => {
                next += 1;
                char::from_u32(next - 1).unwrap()
            }
        })
        .collect()
}

fn added(id: usize, content: &str, special: bool) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": special})
}

/// Assembles a BPE `tokenizer.json`; added tokens get the ids after the vocabulary.
fn bpe(tokens: &[String], merges: &[[&str; 2]], special: &[&str], other: &[&str]) -> Value {
    let mut vocab = Map::new();
    for (id, token) in tokens.iter().enumerate() {
        vocab.insert(token.clone(), id.into());
    }
    let names = special.iter().map(|name| (name, true));
    let names = names.chain(other.iter().map(|name| (name, false)));
    let added: Vec<Value> = names
        .enumerate()
        .map(|(index, (name, special))| added(tokens.len() + index, name, special))
        .collect();
    json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null,
        "model": {"type": "BPE", "dropout": null, "unk_token": null,
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
            "byte_fallback": false, "vocab": vocab, "merges": merges}})
}

/// A byte-level vocabulary in which `é`, `你` and half of `😀` are single tokens, and `<|end|>`
/// can also be reached letter by letter only.
pub(crate) fn byte_level_json() -> Value {
    let chars = byte_chars();
    let text =
        |bytes: &[u8]| bytes.iter().map(|&byte| chars[usize::from(byte)]).collect::<String>();
    let mut tokens: Vec<String> = chars.iter().map(char::to_string).collect();
    let (e, ni, smile) = ("é".as_bytes(), "你".as_bytes(), "😀".as_bytes());
    let parts = [
        (text(&e[..1]), text(&e[1..])),
        (text(&ni[..1]), text(&ni[1..2])),
        (text(&ni[..2]), text(&ni[2..])),
        (text(&smile[..1]), text(&smile[1..2])),
        (text(b" "), text(b"t")),
        (text(b" t"), text(b"h")),
        (text(b"<"), text(b"|")),
        (text(b"\n"), text(b"\n")),
    ];
    tokens.extend(parts.iter().map(|(left, right)| format!("{left}{right}")));
    let merges: Vec<[&str; 2]> = parts.iter().map(|(l, r)| [l.as_str(), r.as_str()]).collect();
    let mut json = bpe(
        &tokens,
        &merges,
        &["<|start|>", "<|end|>", "<|bos|>"],
        &["<think>", "</think>", "<reply>", "    "],
    );
    json["pre_tokenizer"] = json!({"type": "ByteLevel", "add_prefix_space": false,
        "trim_offsets": true, "use_regex": true});
    json["decoder"] = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true,
        "use_regex": true});
    let bos = tokens.len() + 2;
    json["post_processor"] = json!({"type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|bos|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [bos], "tokens": ["<|bos|>"]}}});
    json
}

/// A vocabulary in the manner of `SentencePiece`: `▁` for spaces, bytes for what is unknown.
pub(crate) fn pieces_json() -> Value {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).to_vec();
    tokens.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    tokens.extend("▁abcdefghijklmnopqrstuvwxyz<>/|.,你".chars().map(String::from));
    tokens.extend(["▁a", "▁b", "ab", "▁ab", "▁▁"].map(str::to_owned));
    let merges = [["▁", "a"], ["▁", "b"], ["a", "b"], ["▁a", "b"], ["▁", "▁"]];
    let mut json = bpe(&tokens, &merges, &[], &["<think>", "<reply>"]);
    let specials = [(0, "<unk>"), (1, "<s>"), (2, "</s>")];
    let list = json["added_tokens"].as_array_mut().unwrap();
    list.splice(0..0, specials.map(|(id, text)| added(id, text, true)));
    json["model"]["byte_fallback"] = true.into();
    json["model"]["unk_token"] = "<unk>".into();
    json["model"]["fuse_unk"] = true.into();
    json["normalizer"] = json!({"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]});
    json["decoder"] = json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]});
    json
}

pub(crate) fn load(json: &Value) -> Tokenizer {
    Tokenizer::from_bytes(json.to_string().as_bytes(), "tokenizer.json").unwrap()
}

/// The library itself, to compare with.
pub(crate) fn reference(json: &Value) -> tokenizers::Tokenizer {
    tokenizers::Tokenizer::from_bytes(json.to_string()).unwrap()
}

/// A file of the trained tiny model; prints why when it is absent.
pub(crate) fn tiny_moe(file: &str) -> Option<Vec<u8>> {
    let shared = std::env::var_os("SNOWMELT_SHARED").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared"),
        PathBuf::from,
    );
    let path = shared.join("models/tiny-moe").join(file);
    match std::fs::read(&path) {
        Ok(bytes) => Some(bytes),
        Err(error) => {
            println!("skipped: {}: {error}", path.display());
            None
        }
    }
}
