//! How byte-level vocabularies cut text into words before merging, by the names of GGUF files.

use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{Error, SplitDelimiterBehavior};

/// Llama 3: up to three digits together, contractions in any case.
const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Qwen 2: the same with single digits.
const QWEN_2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A way of cutting text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cut {
    Gpt2,
    Llama3,
    Qwen2,
    /// Single digits, then as GPT-2.
    SmolLm,
}

impl Cut {
    /// What [`by_name`](Self::by_name) knows.
    pub(super) const NAMES: &'static str =
        "command-r, gpt-2, llama-bpe, llama-v3, llama3, qwen2, refact, smollm, starcoder";

    pub(super) fn by_name(name: &str) -> Option<Self> {
        Some(match name {
            "gpt-2" => Self::Gpt2,
            "llama-bpe" | "llama-v3" | "llama3" => Self::Llama3,
            "qwen2" => Self::Qwen2,
            "command-r" | "refact" | "smollm" | "starcoder" => Self::SmolLm,
            _ => return None,
        })
    }

    /// Whether a word that is a token is taken as it is, whatever merging would make of it.
    pub(super) const fn takes_whole_words(self) -> bool {
        matches!(self, Self::Llama3)
    }

    /// Whether texts start with the start token if the file says nothing about it.
    pub(super) const fn adds_bos(self) -> bool {
        matches!(self, Self::Llama3)
    }

    pub(super) fn steps(self) -> Result<PreTokenizerWrapper, Error> {
        let first: PreTokenizerWrapper = match self {
            Self::Gpt2 => return Ok(byte_level(true)),
            Self::Llama3 => split(LLAMA_3)?,
            Self::Qwen2 => split(QWEN_2)?,
            Self::SmolLm => Digits::new(true).into(),
        };
        let words_are_cut = matches!(self, Self::Llama3 | Self::Qwen2);
        Ok(Sequence::new(vec![first, byte_level(!words_are_cut)]).into())
    }
}

/// Bytes as characters, without a space before the first word.
fn byte_level(cuts_words: bool) -> PreTokenizerWrapper {
    ByteLevel::new(false, true, cuts_words).into()
}

fn split(pattern: &str) -> Result<PreTokenizerWrapper, Error> {
    let pattern = SplitPattern::Regex(pattern.to_owned());
    Ok(Split::new(pattern, SplitDelimiterBehavior::Isolated, false)?.into())
}
