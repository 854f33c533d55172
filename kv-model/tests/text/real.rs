//! The default model's own tokenizer and template.
//!
//! `cargo xtask model` brings the file. Without it these tests say that they were left out; with
//! `KV_REQUIRE_MODEL=1`, as in CI, they fail.

use std::path::Path;

use kv_model::chat::{ChatMessage, ChatTemplate, GenerationPrompt};
use kv_model::gguf::GgufFile;
use kv_model::tokenizer::{EncodeError, GgufTokenizer, SpecialTokens, Tokenizer};
use kv_scheduler::TokenId;

#[expect(clippy::print_stderr, reason = "a test that is left out says so")]
fn model() -> Option<GgufFile> {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/SmolLM2-135M-Instruct.Q4_1.gguf");
    if path.exists() {
        return Some(GgufFile::open(path).unwrap());
    }
    let is_required = std::env::var("KV_REQUIRE_MODEL").is_ok_and(|value| value == "1");
    assert!(
        !is_required,
        "there is no {}: run `cargo xtask model`",
        path.display()
    );
    eprintln!("left out: there is no {}", path.display());
    None
}

/// Made by a plain implementation of byte-level BPE over the file's vocabulary and merges.
const REFERENCE: &[(&str, &[u32])] = &[
    ("Hello, world!", &[19556, 28, 905, 17]),
    (
        " leading and  double   spaces \n\n\tand tabs ",
        &[2899, 284, 216, 5561, 256, 5600, 38028, 197, 397, 29416, 216],
    ),
    (
        "It's 12345.678e-9 o'clock, they'll've gone",
        &[
            1589, 506, 216, 33, 34, 35, 36, 37, 30, 38, 39, 40, 85, 29, 41, 263, 23, 17466, 28,
            502, 3060, 3543, 7270,
        ],
    ),
    (
        "naïve café — “quotes” … 東京タワー 한국어 العربية",
        &[
            3546, 46494, 37366, 1841, 619, 385, 2346, 573, 5548, 17097, 247, 126, 16736, 122,
            10391, 140, 11100, 124, 35130, 216, 33085, 246, 181, 130, 251, 183, 240, 129, 27819,
            34966, 20602, 31462, 23339, 43463,
        ],
    ),
    (
        "😀👩\u{200d}👩\u{200d}👧\u{200d}👦🇫🇷 e\u{301}",
        &[
            10813, 242, 218, 10813, 235, 119, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117,
            321, 231, 10813, 235, 116, 10813, 225, 121, 10813, 225, 132, 297, 151, 219,
        ],
    ),
    (
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
        &[
            1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198,
        ],
    ),
    (
        "fn main() { println!(\"{}\", 0xFFu8 << 3); } // <repo_name>x",
        &[
            7853, 1085, 1000, 1662, 1628, 34115, 17, 43331, 1002, 216, 32, 104, 10209, 101, 40,
            22646, 216, 35, 4258, 4029, 13241, 216, 3, 104,
        ],
    ),
    (
        "\u{a0}\u{200b}\u{3000} \r\n²³½Ⅷ٣",
        &[
            15442, 321, 229, 12109, 218, 216, 2738, 19133, 39050, 16738, 173, 223, 117, 164, 113,
        ],
    ),
];

#[test]
fn smollm2_speaks_as_its_reference_does() {
    let Some(file) = model() else { return };
    let tokenizer = GgufTokenizer::new(&file).unwrap();
    assert_eq!(tokenizer.vocab_size(), 49_152);
    assert_eq!(tokenizer.eos(), Some(TokenId(2)));
    assert_eq!(tokenizer.stop_tokens(), [0, 2].map(TokenId));
    assert!(!tokenizer.adds_bos());
    for (text, expected) in REFERENCE {
        let tokens = tokenizer.encode(text, SpecialTokens::Parse).unwrap();
        let ids: Vec<_> = tokens.iter().map(|token| token.0).collect();
        assert_eq!(ids, *expected, "{text:?}");
        let bytes: Vec<_> = tokens
            .iter()
            .flat_map(|&token| tokenizer.token_bytes(token).unwrap())
            .collect();
        assert!(bytes.into_iter().eq(text.as_bytes()), "{text:?}");
    }
    // This vocabulary has no token for some control characters.
    let error = tokenizer
        .encode("a\u{4}", SpecialTokens::Parse)
        .unwrap_err();
    assert!(
        matches!(error, EncodeError::NoToken { byte: 4, offset: 1 }),
        "{error}"
    );
}

#[test]
fn smollm2_chats_with_its_own_template() {
    let Some(file) = model() else { return };
    let tokenizer = GgufTokenizer::new(&file).unwrap();
    let template = ChatTemplate::from_gguf(&file, &tokenizer).unwrap();
    let question = [ChatMessage::new("user", "What is the capital of France?")];
    let text = template.render(&question, GenerationPrompt::Add).unwrap();
    assert_eq!(
        text,
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\
         <|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n\
         <|im_start|>assistant\n",
    );
    let tokens = tokenizer.encode(&text, SpecialTokens::Parse).unwrap();
    assert_eq!(tokens[0], TokenId(1));
    assert_eq!(
        tokens
            .iter()
            .filter(|token| tokenizer.is_special(**token))
            .count(),
        5
    );
}
