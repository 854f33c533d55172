//! Tokenizers: a small byte-level vocabulary in a GGUF file, and the oracle's.

use std::collections::BTreeSet;

use kv_model::oracle::Oracle;
use kv_model::tokenizer::{
    EncodeError, GgufTokenizer, OracleTokenizer, SpecialTokens, Tokenizer, TokenizerError,
};
use kv_scheduler::TokenId;
use proptest::prelude::*;

use crate::fixture::{Value, fresh_path, gguf};

/// The byte-level alphabet in byte order.
fn alphabet() -> Vec<String> {
    let mut next = 0x100;
    (0..=u8::MAX)
        .map(|byte| match byte {
            b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
            _ => {
                next += 1;
                char::from_u32(next - 1).unwrap()
            }
        })
        .map(String::from)
        .collect()
}

/// Ids 0..=255 are bytes; then five merged tokens, then marks for the model and a user's token.
fn metadata() -> Vec<(&'static str, Value)> {
    let merged = ["he", "ll", "hell", "hello", "Ġhello"];
    let added = ["<|start|>", "<|im_end|>", "<user>"];
    let tokens: Vec<_> = alphabet()
        .into_iter()
        .chain(merged.map(String::from))
        .chain(added.map(String::from))
        .collect();
    let mut types = vec![1; tokens.len()];
    types[261..].copy_from_slice(&[3, 3, 4]);
    vec![
        ("tokenizer.ggml.model", Value::text("gpt2")),
        ("tokenizer.ggml.pre", Value::text("smollm")),
        ("tokenizer.ggml.tokens", Value::Texts(tokens)),
        ("tokenizer.ggml.token_type", Value::Ints(types)),
        (
            "tokenizer.ggml.merges",
            Value::texts(["h e", "l l", "he ll", "hell o", "Ġ hello"]),
        ),
        ("tokenizer.ggml.bos_token_id", Value::Uint(261)),
        ("tokenizer.ggml.eos_token_id", Value::Uint(0)),
        ("tokenizer.ggml.add_bos_token", Value::Bool(true)),
    ]
}

fn changed(key: &str, value: Option<Value>) -> Result<GgufTokenizer, TokenizerError> {
    let mut metadata = metadata();
    metadata.retain(|entry| entry.0 != key);
    metadata.extend(value.map(|value| (Box::leak(key.to_owned().into_boxed_str()) as &str, value)));
    GgufTokenizer::new(&gguf(&metadata))
}

fn small() -> GgufTokenizer {
    GgufTokenizer::new(&gguf(&metadata())).unwrap()
}

fn ids(tokenizer: &dyn Tokenizer, text: &str, special: SpecialTokens) -> Vec<u32> {
    tokenizer
        .encode(text, special)
        .unwrap()
        .into_iter()
        .map(|token| token.0)
        .collect()
}

fn bytes(tokenizer: &dyn Tokenizer, tokens: &[TokenId]) -> Vec<u8> {
    tokens
        .iter()
        .flat_map(|&token| tokenizer.token_bytes(token).unwrap().to_vec())
        .collect()
}

#[test]
fn merges_digits_and_spaces_are_as_the_model_wants_them() {
    let tokenizer = small();
    let parse = |text| ids(&tokenizer, text, SpecialTokens::Parse);
    assert_eq!(
        parse("hello"),
        [259],
        "no space is put before the first word"
    );
    assert_eq!(parse(" hello"), [260]);
    assert_eq!(parse("hello hello"), [259, 260]);
    assert_eq!(parse("hel"), [256, u32::from(b'l')]);
    assert_eq!(parse("12"), [u32::from(b'1'), u32::from(b'2')]);
    assert_eq!(parse(""), [0; 0]);
    assert_eq!(parse("é"), [0xc3, 0xa9]);
}

#[test]
fn special_tokens_are_parsed_or_literal() {
    let tokenizer = small();
    let text = "<|start|>hello<|im_end|>";
    assert_eq!(ids(&tokenizer, text, SpecialTokens::Parse), [261, 259, 262]);
    let literal = ids(&tokenizer, text, SpecialTokens::Literal);
    assert!(literal.iter().all(|&id| id < 261), "{literal:?}");
    assert!(literal.contains(&259));
    // A user's token is text in both.
    for special in [SpecialTokens::Literal, SpecialTokens::Parse] {
        assert_eq!(ids(&tokenizer, "hello<user>", special), [259, 263]);
    }
}

#[test]
fn marks_ends_and_sizes_come_from_the_file() {
    let tokenizer = small();
    assert_eq!(tokenizer.vocab_size(), 264);
    assert_eq!(tokenizer.bos(), Some(TokenId(261)));
    assert!(tokenizer.adds_bos());
    assert_eq!(tokenizer.eos(), Some(TokenId(0)));
    assert_eq!(
        tokenizer.stop_tokens(),
        [0, 262].map(TokenId),
        "<|im_end|> ends a turn too"
    );
    let special: Vec<_> = (0..270)
        .filter(|&id| tokenizer.is_special(TokenId(id)))
        .collect();
    assert_eq!(special, [261, 262]);
    assert_eq!(
        tokenizer.token_bytes(TokenId(260)),
        Some(b" hello".as_slice())
    );
    assert_eq!(
        tokenizer.token_bytes(TokenId(263)),
        Some(b"<user>".as_slice())
    );
    assert_eq!(tokenizer.token_bytes(TokenId(264)), None);
    let text = tokenizer.token_text(TokenId(0xc3));
    assert_eq!(
        (text.text.as_str(), text.bytes.as_slice()),
        ("\u{FFFD}", &[0xc3][..])
    );
    assert!(tokenizer.token_text(TokenId(999)).bytes.is_empty());
}

proptest! {
    #[test]
    fn tokens_say_the_text(text in any::<String>(), literal in any::<bool>()) {
        let tokenizer = small();
        let text = format!("{text} hello<|start|>{text}<user>");
        let special = if literal { SpecialTokens::Literal } else { SpecialTokens::Parse };
        let tokens = tokenizer.encode(&text, special).unwrap();
        prop_assert_eq!(bytes(&tokenizer, &tokens), text.as_bytes());
    }

    #[test]
    fn oracle_tokens_say_the_text(text in any::<String>()) {
        let tokenizer = OracleTokenizer::new(10);
        let tokens = tokenizer.encode(&text, SpecialTokens::Parse).unwrap();
        prop_assert_eq!(bytes(&tokenizer, &tokens), text.as_bytes());
    }
}

#[test]
fn a_byte_without_a_token_is_an_error() {
    let mut tokens = alphabet();
    tokens[usize::from(b'q')] = "unused".to_owned();
    tokens.extend(["he", "ll", "hell", "hello", "Ġhello", "x1", "x2", "x3"].map(String::from));
    let tokenizer = changed("tokenizer.ggml.tokens", Some(Value::Texts(tokens))).unwrap();
    let error = tokenizer.encode("a q", SpecialTokens::Parse).unwrap_err();
    assert!(
        matches!(
            error,
            EncodeError::NoToken {
                byte: b'q',
                offset: 2
            }
        ),
        "{error}"
    );
}

#[test]
fn a_megabyte_is_encoded() {
    let tokenizer = small();
    for unit in ["hello ", "a", " ", "<"] {
        let text = unit.repeat((1 << 20) / unit.len());
        let tokens = tokenizer.encode(&text, SpecialTokens::Parse).unwrap();
        assert!(bytes(&tokenizer, &tokens) == text.as_bytes(), "{unit:?}");
    }
}

#[test]
fn unusable_tokenizers_are_named() {
    let message = |key: &str, value| {
        let error = changed(key, value).unwrap_err();
        // The file's path comes first and is of no interest here.
        let text = error.to_string();
        text.split_once(": ")
            .map_or_else(|| text.clone(), |(_, what)| what.to_owned())
    };
    let text = |text| Some(Value::text(text));
    assert_eq!(
        message("tokenizer.ggml.model", text("bert")),
        "tokenizer.ggml.model is \"bert\", must be one of gpt2, llama",
    );
    let pre = message("tokenizer.ggml.pre", text("tekken"));
    assert!(
        pre.starts_with("tokenizer.ggml.pre is \"tekken\", must be one of"),
        "{pre}"
    );
    let types = Some(Value::Ints(vec![1; 3]));
    assert_eq!(
        message("tokenizer.ggml.token_type", types),
        "tokenizer.ggml.token_type has 3 entries, the vocabulary has 264",
    );
    assert_eq!(
        message("tokenizer.ggml.eos_token_id", Some(Value::Uint(264))),
        "tokenizer.ggml.eos_token_id is 264, the vocabulary has 264 tokens",
    );
    for merge in ["he", "h  e", "h e l", " he", "he "] {
        assert_eq!(
            message("tokenizer.ggml.merges", Some(Value::texts(["h e", merge]))),
            "tokenizer.ggml.merges[1] is not two tokens",
        );
    }
    let unknown = message("tokenizer.ggml.merges", Some(Value::texts(["h zz"])));
    assert_eq!(unknown, "the tokenizer can't be built from the vocabulary");
    for key in ["model", "pre", "tokens", "merges"].map(|key| format!("tokenizer.ggml.{key}")) {
        let missing = message(&key, None);
        assert!(missing.contains(&key), "{missing}");
    }
}

#[test]
fn every_known_way_of_cutting_builds_and_says_the_text() {
    let text = "It's 12345 o'clock,\n\n  hello\tworld — naïve 東京!! 😀  ";
    for pre in ["gpt-2", "llama-bpe", "qwen2", "smollm"] {
        let tokenizer = changed("tokenizer.ggml.pre", Some(Value::text(pre))).unwrap();
        let tokens = tokenizer.encode(text, SpecialTokens::Parse).unwrap();
        assert_eq!(bytes(&tokenizer, &tokens), text.as_bytes(), "{pre}");
    }
}

#[test]
fn a_saved_tokenizer_says_the_same_elsewhere() {
    let tokenizer = small();
    let path = fresh_path("json");
    tokenizer.save(&path).unwrap();
    let elsewhere = tokenizers::Tokenizer::from_file(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let text = "<|start|>hello 12 é hello<user>";
    let saved = elsewhere.encode(text, false).unwrap();
    assert_eq!(saved.get_ids(), ids(&tokenizer, text, SpecialTokens::Parse));
    assert_eq!(elsewhere.decode(saved.get_ids(), false).unwrap(), text);
    let error = tokenizer.save("/nowhere/at/all.json").unwrap_err();
    assert_eq!(
        error.to_string(),
        "/nowhere/at/all.json: the tokenizer can't be saved"
    );
}

#[test]
fn oracle_words_are_readable_and_distinct() {
    let tokenizer = OracleTokenizer::new(u16::MAX);
    let words: BTreeSet<_> = (OracleTokenizer::BYTES..tokenizer.vocab_size() - 1)
        .map(|id| tokenizer.token_text(TokenId(id)).text)
        .collect();
    assert_eq!(words.len(), usize::from(u16::MAX));
    for word in &words {
        let syllables = word.strip_prefix(' ').unwrap();
        assert!(
            syllables.bytes().all(|byte| byte.is_ascii_lowercase()),
            "{word:?}"
        );
        assert!((2..=6).contains(&syllables.len()), "{word:?}");
    }
    let eos = tokenizer.eos().unwrap();
    assert_eq!(eos.0, tokenizer.vocab_size() - 1);
    assert!(tokenizer.is_special(eos));
    assert_eq!(tokenizer.stop_tokens(), [eos]);
}

#[test]
fn an_oracle_takes_the_vocabularys_description() {
    let tokenizer = OracleTokenizer::new(2);
    let layout = kv_core::Layout::latent(1, 4, 4, 2, 1).unwrap();
    let memory = std::sync::Arc::new(kv_core::host::PlainMemory::new(layout));
    let config = tokenizer.oracle_config();
    assert_eq!(
        (config.vocab, config.lowest, config.eos),
        (259, TokenId(256), tokenizer.eos())
    );
    assert!(Oracle::new(memory, config).is_ok());
}
