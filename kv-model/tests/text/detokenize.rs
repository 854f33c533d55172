//! The detokeniser against a naive reference over the whole text, and scenario S13.

use std::sync::Arc;

use kv_model::detokenize::{Detokenizer, EmptyStop, Piece, StopStrings};
use kv_model::tokenizer::{OracleTokenizer, Tokenizer};
use kv_scheduler::TokenId;
use proptest::prelude::*;

fn detokenizer(stops: &[&str]) -> Detokenizer {
    Detokenizer::new(Arc::new(StopStrings::new(stops).unwrap()))
}

fn piece(text: &str) -> Piece {
    Piece {
        text: text.to_owned(),
        stop: None,
    }
}

/// The whole text up to the stop string that is complete first, the longest one if several are.
fn reference(bytes: &[u8], stops: &[String]) -> Piece {
    let text = String::from_utf8_lossy(bytes);
    for end in 1..=text.len() {
        let complete = stops
            .iter()
            .enumerate()
            .filter(|(_, stop)| text.as_bytes()[..end].ends_with(stop.as_bytes()));
        // The first of the longest ones.
        if let Some((index, stop)) = complete.rev().max_by_key(|(_, stop)| stop.len()) {
            let text = text[..end - stop.len()].to_owned();
            return Piece {
                text,
                stop: Some(index),
            };
        }
    }
    piece(&text)
}

/// Few letters, so that stop strings meet; some characters of several bytes, some broken ones.
fn bytes() -> impl Strategy<Value = Vec<u8>> {
    let part = prop_oneof![
        6 => prop::sample::select(vec!["a", "b", "ab", "é", "€", "😀", "\u{FFFD}"])
            .prop_map(|text| text.as_bytes().to_vec()),
        1 => prop::sample::select("😀€é".as_bytes().to_vec()).prop_map(|byte| vec![byte]),
        1 => any::<u8>().prop_map(|byte| vec![byte]),
    ];
    proptest::collection::vec(part, 0..40).prop_map(|parts| parts.concat())
}

fn stops() -> impl Strategy<Value = Vec<String>> {
    proptest::collection::vec("[abé€😀\u{FFFD}]{1,4}", 0..4)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn pieces_make_the_reference_however_bytes_are_cut(
        bytes in bytes(),
        stops in stops(),
        cuts in proptest::collection::vec(1usize..6, 1..200),
    ) {
        let mut detokenizer = Detokenizer::new(Arc::new(StopStrings::new(&stops).unwrap()));
        let mut whole = Piece::default();
        let mut rest = bytes.as_slice();
        for cut in cuts.into_iter().cycle() {
            let (now, later) = rest.split_at(rest.len().min(cut));
            let piece = detokenizer.push(now);
            whole.text.push_str(&piece.text);
            // Nothing that could still become part of a stop string has left.
            let sent = reference(&bytes, &stops).text;
            prop_assert!(sent.starts_with(&whole.text), "{:?} of {:?}", whole.text, sent);
            if piece.stop.is_some() {
                whole.stop = piece.stop;
                break;
            }
            rest = later;
            if rest.is_empty() {
                break;
            }
        }
        let last = detokenizer.finish();
        whole.text.push_str(&last.text);
        whole.stop = whole.stop.or(last.stop);
        prop_assert!(detokenizer.is_over());
        prop_assert_eq!(whole, reference(&bytes, &stops));
    }

    /// What is held back is never more than the beginning of a character and of a stop string.
    #[test]
    fn nothing_is_held_back_without_need(bytes in bytes(), stops in stops()) {
        let mut detokenizer = Detokenizer::new(Arc::new(StopStrings::new(&stops).unwrap()));
        let mut text = String::new();
        for (index, byte) in bytes.iter().enumerate() {
            let piece = detokenizer.push(&[*byte]);
            text.push_str(&piece.text);
            if piece.stop.is_some() {
                break;
            }
            let seen = &bytes[..=index];
            let whole = reference(seen, &[]).text;
            let sure = match str::from_utf8(&seen[seen.len().saturating_sub(3)..]) {
                Ok(_) => whole.as_str(),
                Err(_) => whole.strip_suffix('\u{FFFD}').unwrap_or(&whole),
            };
            let Some(held) = sure.strip_prefix(text.as_str()) else { continue };
            let is_needed = stops.iter().any(|stop| stop.starts_with(held));
            prop_assert!(held.is_empty() || is_needed, "{:?} is held back", held);
        }
    }
}

/// "hi" comes before the emoji is complete, the emoji in one piece, the stop string never.
#[test]
fn s13_a_stop_string_across_tokens_after_an_emoji_in_bytes() {
    let tokenizer = OracleTokenizer::from_tokens(["hi", "</", "en", "d", ">"]);
    let [hi, open, en, d, close] = [256, 257, 258, 259, 260].map(TokenId);
    let emoji = "😀".bytes().map(|byte| TokenId(byte.into()));
    let mut detokenizer = detokenizer(&["</end>"]);
    let mut push = |token| detokenizer.push_token(&tokenizer, token);
    assert_eq!(push(hi), piece("hi"));
    let pieces: Vec<_> = emoji.map(&mut push).collect();
    assert_eq!(pieces, ["", "", "", "😀"].map(piece));
    assert_eq!([open, en, d].map(&mut push), ["", "", ""].map(piece));
    assert_eq!(
        push(close),
        Piece {
            text: String::new(),
            stop: Some(0)
        }
    );
    assert_eq!(push(hi), piece(""), "nothing comes after a stop");
    assert_eq!(detokenizer.finish(), piece(""));
}

#[test]
fn a_false_start_of_a_stop_string_is_given_back() {
    let mut detokenizer = detokenizer(&["</end>"]);
    assert_eq!(detokenizer.push(b"a</e"), piece("a"));
    assert_eq!(detokenizer.push(b"</en"), piece("</e"));
    assert_eq!(detokenizer.push(b"x"), piece("</enx"));
    assert_eq!(detokenizer.push(b"</end"), piece(""));
    assert_eq!(
        detokenizer.finish(),
        piece("</end"),
        "the end gives what was held back"
    );
}

#[test]
fn the_first_complete_stop_string_wins_and_the_longest_of_several() {
    let mut early = detokenizer(&["abcd", "bc"]);
    assert_eq!(
        early.push(b"xabcd"),
        Piece {
            text: "xa".to_owned(),
            stop: Some(1)
        }
    );
    let mut long = detokenizer(&["c", "bc", "abc"]);
    assert_eq!(
        long.push(b"xabc"),
        Piece {
            text: "x".to_owned(),
            stop: Some(2)
        }
    );
    let mut with_rest = detokenizer(&["."]);
    assert_eq!(
        with_rest.push(b"a.b.c"),
        Piece {
            text: "a".to_owned(),
            stop: Some(0)
        }
    );
}

#[test]
fn invalid_bytes_become_replacements_only_when_that_is_sure() {
    let mut detokenizer = detokenizer(&[]);
    assert_eq!(detokenizer.push(&[0xf0, 0x9f]), piece(""));
    assert_eq!(detokenizer.push(b"a"), piece("\u{FFFD}a"));
    assert_eq!(
        detokenizer.push(&[0xff]),
        piece("\u{FFFD}"),
        "no character starts like this"
    );
    assert_eq!(detokenizer.push(&[0xe2, 0x82]), piece(""));
    assert_eq!(detokenizer.finish(), piece("\u{FFFD}"));
}

#[test]
fn special_and_unknown_tokens_have_no_text() {
    let tokenizer = OracleTokenizer::new(3);
    let mut detokenizer = detokenizer(&["end"]);
    let eos = tokenizer.eos().unwrap();
    assert_eq!(detokenizer.push_token(&tokenizer, eos), piece(""));
    assert_eq!(
        detokenizer.push_token(&tokenizer, TokenId(u32::MAX)),
        piece("")
    );
    assert_eq!(detokenizer.push(b""), piece(""));
    assert!(!detokenizer.is_over());
}

#[test]
fn empty_stop_strings_are_refused() {
    assert_eq!(
        StopStrings::new(["a", ""]).unwrap_err(),
        EmptyStop { index: 1 }
    );
    assert!(StopStrings::new::<&str>([]).unwrap().is_empty());
}

/// The automaton looks at each byte once or twice, however long and repetitive the stop strings.
#[test]
fn long_stop_strings_cost_no_more_than_their_length() {
    let stop = "a".repeat(500_000) + "b";
    let mut detokenizer = detokenizer(&[&stop]);
    let text = "a".repeat(1_000_000);
    let mut length = 0;
    for chunk in text.as_bytes().chunks(100_000) {
        length += detokenizer.push(chunk).text.len();
    }
    assert_eq!(length, 500_000);
    assert_eq!(
        detokenizer.push(b"b"),
        Piece {
            text: String::new(),
            stop: Some(0)
        }
    );
}
