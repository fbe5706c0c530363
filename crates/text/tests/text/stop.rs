//! Stop strings over any split of a stream.

use proptest::prelude::*;
use snowmelt_text::{StopOutcome, StopStrings, TextError};

/// What a whole text should give, by the definition.
fn whole(text: &str, stops: &[String]) -> (String, Option<usize>) {
    for (at, _) in text.char_indices() {
        if let Some(index) = stops.iter().position(|stop| text[at..].starts_with(stop.as_str())) {
            return (text[..at].to_owned(), Some(index));
        }
    }
    (text.to_owned(), None)
}

fn in_pieces<'a>(
    stops: &[String],
    pieces: impl IntoIterator<Item = &'a str>,
) -> (String, Option<usize>) {
    let mut filter = StopStrings::new(stops.to_vec()).unwrap();
    let mut text = String::new();
    for piece in pieces {
        let outcome = filter.push(piece);
        text += &outcome.emit;
        if outcome.stopped.is_some() {
            return (text, outcome.stopped);
        }
    }
    let outcome = filter.finish();
    (text + &outcome.emit, outcome.stopped)
}

proptest! {
    #[test]
    fn any_split_gives_the_same(
        pieces in prop::collection::vec("[ab😀é]{0,4}", 0..12),
        stops in prop::collection::vec("[ab😀é]{1,5}", 0..4),
    ) {
        let text = pieces.concat();
        let expected = whole(&text, &stops);
        prop_assert_eq!(&in_pieces(&stops, pieces.iter().map(String::as_str)), &expected);
        prop_assert_eq!(&in_pieces(&stops, [text.as_str()]), &expected);
        let letters: Vec<String> = text.chars().map(String::from).collect();
        prop_assert_eq!(&in_pieces(&stops, letters.iter().map(String::as_str)), &expected);
    }
}

#[test]
fn only_what_may_still_match_is_held_back() {
    let stops = ["</end>".to_owned(), "\n\n".to_owned()];
    let mut filter = StopStrings::new(stops.to_vec()).unwrap();
    let emitted = |outcome: StopOutcome| {
        assert_eq!(outcome.stopped, None);
        outcome.emit
    };
    assert_eq!(emitted(filter.push("a <")), "a ");
    assert_eq!(emitted(filter.push("/e")), "");
    assert_eq!(emitted(filter.push("x\n")), "</ex");
    assert_eq!(emitted(filter.push("b")), "\nb");
    let outcome = filter.push("c</end>d");
    assert_eq!((outcome.emit.as_str(), outcome.stopped), ("c", Some(0)));
    let after = filter.push("more");
    assert_eq!((after.emit.as_str(), after.stopped), ("", Some(0)));
    assert_eq!(filter.finish().emit, "");
}

#[test]
fn a_shorter_stop_waits_for_a_longer_one_listed_before() {
    let stops = ["abc".to_owned(), "ab".to_owned()];
    assert_eq!(in_pieces(&stops, ["xab", "c"]), ("x".to_owned(), Some(0)));
    assert_eq!(in_pieces(&stops, ["xab", "d"]), ("x".to_owned(), Some(1)));
    assert_eq!(in_pieces(&stops, ["xab"]), ("x".to_owned(), Some(1)));
}

#[test]
fn empty_stop_strings_are_refused() {
    let error = StopStrings::new(vec!["a".into(), String::new()]).unwrap_err();
    assert!(matches!(error, TextError::StopEmpty { index: 1, count: 2 }), "{error}");
}
