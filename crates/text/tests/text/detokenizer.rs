//! Text token by token against the library's decoding of the whole.

use proptest::prelude::*;
use serde_json::{Value, json};
use snowmelt_text::{Detokenizer, Specials};

use crate::support::{byte_level_json, load, pieces_json, reference};

/// Decoders as files have them, and orders that none has.
fn decoders() -> Vec<Value> {
    let replace = |from: &str, to: &str| {
        let pattern = json!({"String": from});
        json!({"type": "Replace", "pattern": pattern, "content": to})
    };
    let sequence = |steps: Vec<Value>| json!({"type": "Sequence", "decoders": steps});
    let fallback = json!({"type": "ByteFallback"});
    let fuse = json!({"type": "Fuse"});
    let strip = json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
    let metaspace = |scheme: &str| {
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme,
            "split": true})
    };
    vec![
        Value::Null,
        pieces_json()["decoder"].clone(),
        sequence(vec![replace("▁", " "), fallback.clone(), fuse.clone()]),
        sequence(vec![fallback.clone(), metaspace("always")]),
        sequence(vec![fallback.clone(), fuse.clone(), metaspace("always")]),
        sequence(vec![fallback.clone(), fuse.clone(), metaspace("never"), strip.clone()]),
        sequence(vec![fuse.clone(), replace("▁ab", "[]"), fuse.clone()]),
        sequence(vec![strip, sequence(vec![fallback.clone()])]),
        sequence(vec![
            json!({"type": "Replace", "pattern": {"Regex": "[ab]+"}, "content": "x"}),
            fallback.clone(),
        ]),
        sequence(vec![
            fuse,
            json!({"type": "Replace", "pattern": {"Regex": "[ab]+"}, "content": "x"}),
        ]),
        metaspace("first"),
        json!({"type": "WordPiece", "prefix": "▁", "cleanup": false}),
        json!({"type": "WordPiece", "prefix": "▁", "cleanup": true}),
        json!({"type": "BPEDecoder", "suffix": "b"}),
        json!({"type": "CTC", "pad_token": "a", "word_delimiter_token": "▁", "cleanup": true}),
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true,
            "use_regex": true}),
        sequence(vec![replace("▁", "Ġ"), byte_level_json()["decoder"].clone()]),
    ]
}

fn piecewise(detokenizer: &mut Detokenizer, ids: &[u32]) -> String {
    let mut text: String = ids.iter().map(|&id| detokenizer.push(id)).collect();
    text += &detokenizer.finish();
    text
}

proptest! {
    #[test]
    fn byte_level_pieces_make_the_whole(ids in prop::collection::vec(0_u32..280, 0..40)) {
        let json = byte_level_json();
        let (tokenizer, library) = (load(&json), reference(&json));
        for skip in [false, true] {
            let whole = library.decode(&ids, skip).unwrap();
            prop_assert_eq!(tokenizer.decode(&ids, skip), whole.as_str());
            let mut detokenizer = Detokenizer::new(&tokenizer, skip);
            prop_assert_eq!(piecewise(&mut detokenizer, &ids), whole.as_str());
            // A finished detokeniser is as good as new.
            prop_assert_eq!(piecewise(&mut detokenizer, &ids), whole);
        }
    }

    #[test]
    fn pieces_make_the_whole_with_every_decoder(
        ids in prop::collection::vec(
            prop_oneof![0_u32..310, 0_u32..3, 259_u32..264, Just(3 + 0xe4), Just(3 + 0xbd)],
            1..30,
        ),
    ) {
        for decoder in decoders() {
            let mut json = pieces_json();
            json["decoder"] = decoder;
            let (tokenizer, library) = (load(&json), reference(&json));
            for skip in [false, true] {
                let whole = library.decode(&ids, skip).unwrap();
                let mut detokenizer = Detokenizer::new(&tokenizer, skip);
                prop_assert_eq!(piecewise(&mut detokenizer, &ids), whole, "{}", json["decoder"]);
            }
        }
    }

    #[test]
    fn text_through_tokens_comes_back(text in "[a-z 😀你é ]*") {
        let tokenizer = load(&pieces_json());
        let ids = tokenizer.encode(&text, Specials::Parse).unwrap();
        let mut detokenizer = Detokenizer::new(&tokenizer, false);
        prop_assert_eq!(piecewise(&mut detokenizer, &ids), text);
    }
}

#[test]
fn characters_wait_for_their_last_byte() {
    let tokenizer = load(&byte_level_json());
    let ids = tokenizer.encode("a😀é", Specials::Parse).unwrap();
    let mut detokenizer = Detokenizer::new(&tokenizer, false);
    let pieces: Vec<String> = ids.iter().map(|&id| detokenizer.push(id)).collect();
    // The smile is half a token and two bytes.
    assert_eq!(pieces, ["a", "", "", "😀", "é"]);
    assert_eq!(detokenizer.finish(), "");
    let _ = detokenizer.push(ids[1]);
    assert_eq!(detokenizer.finish(), "\u{fffd}");
    assert_eq!(detokenizer.push(1_000_000), "");
}

#[test]
fn text_comes_as_soon_as_it_is_certain() {
    let tokenizer = load(&pieces_json());
    let ids = tokenizer.encode("ab é b", Specials::Parse).unwrap();
    let mut detokenizer = Detokenizer::new(&tokenizer, false);
    let pieces: Vec<String> = ids.iter().map(|&id| detokenizer.push(id)).collect();
    // The first space is dropped; the two bytes of the letter wait for the end of their run.
    assert_eq!(pieces, ["ab", " ", "", "", "é b"]);
}

/// The library panics when it strips more from the end than there is.
#[test]
fn stripping_at_the_end_is_held_back() {
    let mut json = pieces_json();
    json["decoder"]["decoders"][3] =
        json!({"type": "Strip", "content": " ", "start": 1, "stop": 2});
    let tokenizer = load(&json);
    let space = tokenizer.token_to_id("▁").unwrap();
    let a = tokenizer.token_to_id("a").unwrap();
    for (ids, expected) in [
        (vec![], ""),
        (vec![space], ""),
        (vec![space, space, a, space, space, space], " a "),
        (vec![a, space, a], "a a"),
    ] {
        assert_eq!(tokenizer.decode(&ids, false), expected, "{ids:?}");
    }
}
