//! A small SentencePiece vocabulary in a GGUF file.

use kv_model::tokenizer::{GgufTokenizer, SpecialTokens, Tokenizer};
use kv_scheduler::TokenId;

use crate::fixture::{Value, fresh_path, gguf};

/// Marks at 0..3, bytes at 3..259, then pieces of falling scores.
const PIECES: [&str; 11] = [
    "he", "ll", "hell", "hello", "▁hello", "▁", "h", "e", "l", "o", "1",
];

fn metadata(bytes: impl IntoIterator<Item = u8>) -> Vec<(&'static str, Value)> {
    let mut tokens = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
    tokens.extend(bytes.into_iter().map(|byte| format!("<0x{byte:02X}>")));
    let mut types = vec![2, 3, 3];
    types.resize(tokens.len(), 6);
    let mut scores = vec![0.0; tokens.len()];
    tokens.extend(PIECES.map(String::from));
    types.resize(tokens.len(), 1);
    scores.extend((0u8..).zip(PIECES).map(|(rank, _)| -f32::from(rank)));
    vec![
        ("tokenizer.ggml.model", Value::text("llama")),
        ("tokenizer.ggml.tokens", Value::Texts(tokens)),
        ("tokenizer.ggml.token_type", Value::Ints(types)),
        ("tokenizer.ggml.scores", Value::Floats(scores)),
        ("tokenizer.ggml.bos_token_id", Value::Uint(1)),
        ("tokenizer.ggml.eos_token_id", Value::Uint(2)),
    ]
}

fn tokenizer() -> GgufTokenizer {
    GgufTokenizer::new(&gguf(&metadata(0..=u8::MAX))).unwrap()
}

/// Encodes, and names the tokens.
fn pieces(tokenizer: &GgufTokenizer, text: &str) -> Vec<String> {
    let tokens = tokenizer.encode(text, SpecialTokens::Parse).unwrap();
    tokens
        .iter()
        .map(|&token| tokenizer.token_text(token).text)
        .collect()
}

#[test]
fn pieces_are_merged_by_score_and_other_text_is_bytes() {
    let tokenizer = tokenizer();
    assert_eq!(pieces(&tokenizer, "hello"), [" hello"]);
    assert_eq!(pieces(&tokenizer, "hello hello"), [" hello", " hello"]);
    assert_eq!(pieces(&tokenizer, "  hel"), [" ", " ", " ", "he", "l"]);
    assert_eq!(pieces(&tokenizer, "11"), [" ", "1", "1"]);
    let bytes = tokenizer.encode("é", SpecialTokens::Parse).unwrap();
    assert_eq!(bytes[1..], [0xc3, 0xa9].map(|byte| TokenId(3 + byte)));
    assert_eq!(tokenizer.token_bytes(bytes[1]), Some(&[0xc3][..]));
    assert_eq!(pieces(&tokenizer, ""), [""; 0]);
}

#[test]
fn the_space_before_a_text_is_the_files_to_decide() {
    let mut without = metadata(0..=u8::MAX);
    without.push(("tokenizer.ggml.add_space_prefix", Value::Bool(false)));
    let without = GgufTokenizer::new(&gguf(&without)).unwrap();
    assert_eq!(pieces(&without, "hello hello"), ["hello", " hello"]);
}

#[test]
fn marks_are_parsed_or_literal_and_texts_start_with_one() {
    let tokenizer = tokenizer();
    assert_eq!(
        pieces(&tokenizer, "<s>hello</s>"),
        ["<s>", " hello", "</s>"]
    );
    let literal = tokenizer.encode("<s>", SpecialTokens::Literal).unwrap();
    assert!(
        literal.iter().all(|&token| !tokenizer.is_special(token)),
        "{literal:?}"
    );
    assert!(tokenizer.adds_bos());
    assert_eq!(tokenizer.stop_tokens(), [TokenId(2)]);
    let special: Vec<_> = (0..9)
        .filter(|&id| tokenizer.is_special(TokenId(id)))
        .collect();
    assert_eq!(special, [0, 1, 2]);
}

#[test]
fn a_saved_vocabulary_of_pieces_says_the_same_elsewhere() {
    let tokenizer = tokenizer();
    let path = fresh_path("json");
    tokenizer.save(&path).unwrap();
    let elsewhere = tokenizers::Tokenizer::from_file(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let text = "hello 1 é hello";
    let saved = elsewhere.encode(text, false).unwrap();
    let ours = tokenizer.encode(text, SpecialTokens::Parse).unwrap();
    assert!(saved.get_ids().iter().copied().map(TokenId).eq(ours));
    assert_eq!(elsewhere.decode(saved.get_ids(), false).unwrap(), text);
}

#[test]
fn missing_bytes_and_scores_are_named() {
    let error = GgufTokenizer::new(&gguf(&metadata(0..=0xfe)))
        .unwrap_err()
        .to_string();
    assert!(
        error.ends_with("there is no token for byte 0xff"),
        "{error}"
    );
    let mut few = metadata(0..=u8::MAX);
    few.retain(|entry| entry.0 != "tokenizer.ggml.scores");
    let error = GgufTokenizer::new(&gguf(&few)).unwrap_err().to_string();
    assert!(error.contains("tokenizer.ggml.scores"), "{error}");
    few.push(("tokenizer.ggml.scores", Value::Floats(vec![0.0; 4])));
    let error = GgufTokenizer::new(&gguf(&few)).unwrap_err().to_string();
    assert!(
        error.ends_with("tokenizer.ggml.scores has 4 entries, the vocabulary has 270"),
        "{error}"
    );
}
