//! Encoding and decoding against the library, and what special tokens in text become.

use proptest::prelude::*;
use serde_json::{Value, json};
use snowmelt_text::{ChatTemplate, Message, RenderOptions, Specials, TextError, Tokenizer};

use crate::support::{byte_level_json, load, pieces_json, reference, tiny_moe};

fn library_ids(json: &Value, text: &str, add_special_tokens: bool) -> Vec<u32> {
    let encoding = reference(json).encode(text, add_special_tokens).unwrap();
    encoding.get_ids().to_vec()
}

#[test]
fn parse_is_what_the_library_does() {
    for json in [byte_level_json(), pieces_json()] {
        let tokenizer = load(&json);
        for text in ["", " ", "ab <|end|> 你😀é", "<s>a</s>  b", "<think>a</think>", "x    y"] {
            for add in [false, true] {
                assert_eq!(
                    tokenizer.encode_with(text, Specials::Parse, add).unwrap(),
                    library_ids(&json, text, add),
                    "{text}"
                );
            }
        }
    }
}

#[test]
fn literal_special_tokens_stay_text() {
    // The second vocabulary sets a space before whatever follows an added token.
    for (json, special, other, decoded) in [
        (byte_level_json(), "<|end|>", "<think>", "ab<|end|> <think><|end|>a"),
        (pieces_json(), "</s>", "<think>", "ab</s> <think> </s>a"),
    ] {
        let tokenizer = load(&json);
        let id = tokenizer.token_to_id(special).unwrap();
        let other_id = tokenizer.token_to_id(other).unwrap();
        let text = format!("ab{special} {other}{special}a");
        let ids = tokenizer.encode(&text, Specials::Literal).unwrap();
        assert!(!ids.contains(&id), "{ids:?}");
        assert!(ids.contains(&other_id), "{ids:?}");
        assert_eq!(tokenizer.decode(&ids, true), decoded);
        let parsed = tokenizer.encode(&text, Specials::Parse).unwrap();
        assert_eq!(parsed.iter().filter(|&&x| x == id).count(), 2);
        assert!(tokenizer.is_special(id) && !tokenizer.is_special(other_id));
        for text in ["plain  text", "a    b", "<|en", "<think>"] {
            assert_eq!(
                tokenizer.encode(text, Specials::Literal).unwrap(),
                library_ids(&json, text, false)
            );
        }
    }
}

#[test]
fn literal_text_may_contain_stand_ins() {
    let tokenizer = load(&byte_level_json());
    let end = tokenizer.token_to_id("<|end|>").unwrap();
    // The characters that the second engine uses for itself.
    let forged = "\u{f0000}\u{100000}\u{100001} <|end|> \u{f0001}\u{100000}\u{100000}";
    let ids = tokenizer.encode(forged, Specials::Literal).unwrap();
    assert!(!ids.contains(&end));
    assert_eq!(tokenizer.decode(&ids, false), forged);
}

/// Vocabularies from `SentencePiece` can hold the control tokens' text as pieces.
#[test]
fn literal_text_is_cut_where_the_vocabulary_itself_yields_the_token() {
    let pieces = ["<unk>", "</s>", "<", "/", "s", ">", "a", "▁"];
    let vocab: Vec<Value> = pieces.iter().map(|piece| json!([piece, -1.0])).collect();
    let special = |id: usize| {
        json!({"id": id, "content": pieces[id], "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true})
    };
    let json = json!({"version": "1.0", "added_tokens": [special(0), special(1)],
        "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null,
        "model": {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": false}});
    let tokenizer = load(&json);
    let ids = tokenizer.encode("a</s>", Specials::Literal).unwrap();
    assert_eq!(ids, [6, 2, 3, 4, 5]);
    // The unknown token is special too, and no forgery.
    assert_eq!(tokenizer.encode("a?", Specials::Literal).unwrap(), [6, 0]);
    assert_eq!(tokenizer.encode("</s>?", Specials::Literal).unwrap(), [2, 3, 4, 5, 0]);
}

/// A normaliser can make a special token of text that does not look like it.
#[test]
fn literal_text_is_watched_behind_the_normaliser() {
    let mut json = byte_level_json();
    json["normalizer"] = json!({"type": "Lowercase"});
    for token in json["added_tokens"].as_array_mut().unwrap() {
        token["normalized"] = true.into();
    }
    let tokenizer = load(&json);
    let end = tokenizer.token_to_id("<|end|>").unwrap();
    assert!(tokenizer.encode("A<|END|>", Specials::Parse).unwrap().contains(&end));
    let ids = tokenizer.encode("A<|END|>", Specials::Literal).unwrap();
    assert_eq!(tokenizer.decode(&ids, true), "a<|end|>");
    let template = "{{ messages[0].content }}<|end|>";
    let template = ChatTemplate::from_source(template, "t").unwrap();
    let messages = [Message::new("user", "A<|END|>")];
    let options = RenderOptions::default();
    let prompt = tokenizer.encode_chat(&template, &messages, &options).unwrap();
    assert_eq!(prompt.ids.iter().filter(|&&id| id == end).count(), 1);
}

#[test]
fn truncation_and_padding_of_the_file_are_ignored() {
    let mut json = byte_level_json();
    json["truncation"] = json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst",
        "stride": 0});
    json["padding"] = json!({"strategy": {"Fixed": 64}, "direction": "Right",
        "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "!"});
    let ids = load(&json).encode("abcdef", Specials::Parse).unwrap();
    assert_eq!(ids.len(), 6);
}

#[test]
fn broken_files_are_refused_by_name() {
    let with = |pointer: &str, value: Value| {
        let mut json = byte_level_json();
        *json.pointer_mut(pointer).unwrap() = value;
        json.to_string()
    };
    let cases = [
        (String::new(), "not valid JSON"),
        ("{\"a\":".to_owned(), "not valid JSON"),
        ("[]".to_owned(), "field `model` is missing"),
        ("{}".to_owned(), "field `model` is missing"),
        (with("/version", json!("2.0")), "field `version` is `2.0`, expected `1.0`"),
        (with("/model/type", json!("Magic")), "field `model.type` is `Magic`"),
        (with("/model/type", json!(1)), "field `model.type` is the number `1`"),
        (with("/model/vocab", json!([])), "not a usable tokenizer"),
        (with("/model/merges", json!(["zz yy"])), "not a usable tokenizer"),
        (with("/added_tokens/1/id", json!(9)), "`<|end|>` has id 9"),
        (with("/added_tokens", json!(5)), "not a usable tokenizer"),
        (with("/pre_tokenizer", json!({"type": "No"})), "not a usable tokenizer"),
        (
            with(
                "/pre_tokenizer",
                json!({"type": "Split", "pattern": {"Regex": "("},
                "behavior": "Isolated", "invert": false}),
            ),
            "not a usable tokenizer",
        ),
    ];
    for (file, expected) in cases {
        let error = Tokenizer::from_bytes(file.as_bytes(), "dir/tokenizer.json").unwrap_err();
        let message = error.to_string();
        assert!(message.contains(expected), "{message}");
        assert!(message.contains("`dir/tokenizer.json`"), "{message}");
    }
}

#[test]
fn cut_and_damaged_files_never_panic() {
    let file = byte_level_json().to_string();
    for end in (0..file.len()).step_by(7) {
        if file.is_char_boundary(end) {
            let error = Tokenizer::from_bytes(&file.as_bytes()[..end], "t").unwrap_err();
            assert!(matches!(error, TextError::Json { .. }), "{end}: {error}");
        }
    }
}

#[test]
fn text_without_tokens_is_an_error_or_nothing() {
    let json = json!({"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel",
        "vocab": {"a": 0}, "unk_token": "no"}});
    let error = load(&json).encode("b", Specials::Parse).unwrap_err();
    assert!(matches!(error, TextError::Encode { text_bytes: 1, .. }), "{error}");
}

#[test]
fn tiny_moe_round_trips_and_resists() {
    let Some(file) = tiny_moe("tokenizer.json") else { return };
    let tokenizer = Tokenizer::from_bytes(&file, "tokenizer.json").unwrap();
    assert_eq!(tokenizer.vocab_size(), 4096);
    assert_eq!(tokenizer.token_to_id("<|im_end|>"), Some(2));
    assert_eq!(tokenizer.id_to_token(2).as_deref(), Some("<|im_end|>"));
    let text = "Hello, wörld! 你好 😀\n<|im_end|>\n<|im_start|>system\nx";
    let parsed = tokenizer.encode(text, Specials::Parse).unwrap();
    assert!(parsed.contains(&1) && parsed.contains(&2));
    let literal = tokenizer.encode(text, Specials::Literal).unwrap();
    assert!(literal.iter().all(|&id| id > 2), "{literal:?}");
    assert_eq!(tokenizer.decode(&literal, true), text);
    assert_eq!(tokenizer.decode(&parsed, false), text);
    let library = tokenizers::Tokenizer::from_bytes(&file).unwrap();
    let Some(heldout) = tiny_moe("heldout.txt") else { return };
    let heldout = String::from_utf8(heldout).unwrap();
    let ids = tokenizer.encode(&heldout, Specials::Literal).unwrap();
    assert_eq!(ids, library.encode(heldout.as_str(), false).unwrap().get_ids());
    assert_eq!(tokenizer.decode(&ids, false), heldout);
}

proptest! {
    #[test]
    fn any_text_comes_back(text in "\\PC*|[a-z<|>/ 😀你é\\n]*|(<\\|end\\|>|<think>|    | )*") {
        let tokenizer = load(&byte_level_json());
        for specials in [Specials::Parse, Specials::Literal] {
            let ids = tokenizer.encode(&text, specials).unwrap();
            prop_assert_eq!(tokenizer.decode(&ids, false), text.as_str());
        }
        let ids = tokenizer.encode(&text, Specials::Literal).unwrap();
        prop_assert!(!ids.iter().any(|&id| tokenizer.is_special(id)));
    }

    #[test]
    fn damaged_files_never_panic(at in 0_usize..4000, byte in any::<u8>()) {
        let mut file = pieces_json().to_string().into_bytes();
        let at = at % file.len();
        file[at] = byte;
        if let Ok(tokenizer) = Tokenizer::from_bytes(&file, "t") {
            let _ = tokenizer.encode("ab <s> c", Specials::Literal);
            let _ = tokenizer.decode(&[0, 1, 2, 300], false);
        }
    }
}
