//! From text to tokens, and from tokens to bytes.

use std::fmt;
use std::path::PathBuf;

use kv_scheduler::TokenId;

use crate::gguf::GgufError;

pub use self::gguf::GgufTokenizer;
pub use self::oracle::OracleTokenizer;

mod byte_level;
mod cut;
mod gguf;
mod oracle;
mod sentence_piece;
mod table;

/// What to do with text that looks like a special token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialTokens {
    /// It is text like any other: for text from a stranger that must not end a turn.
    Literal,
    /// It is that token: for what a chat template has written.
    Parse,
}

/// A token as log-probabilities show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenText {
    /// Its text; bytes that aren't UTF-8 by themselves are U+FFFD.
    pub text: String,
    /// Its bytes, exactly. Empty for an id that isn't in the vocabulary.
    pub bytes: Vec<u8>,
}

/// A vocabulary, and how text is cut into its tokens.
pub trait Tokenizer: fmt::Debug + Send + Sync {
    /// Cuts text into tokens; no token is added at either end.
    ///
    /// # Errors
    ///
    /// [`EncodeError`] if the vocabulary can't say the text.
    fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<TokenId>, EncodeError>;

    /// The bytes that a token stands for; `None` if there is no such token. They need not be
    /// UTF-8 by themselves. A special token's bytes are its name.
    fn token_bytes(&self, token: TokenId) -> Option<&[u8]>;

    /// Whether the token is a mark for the model rather than text; clients don't see these.
    fn is_special(&self, token: TokenId) -> bool;

    /// Number of tokens; ids are below it.
    fn vocab_size(&self) -> u32;

    /// The token that starts a text, if there is one.
    fn bos(&self) -> Option<TokenId>;

    /// Whether a text that no template has made wants [`bos`](Self::bos) at its start.
    fn adds_bos(&self) -> bool;

    /// The token that ends a text, if there is one.
    fn eos(&self) -> Option<TokenId>;

    /// All tokens that end a text or a turn, in ascending order.
    fn stop_tokens(&self) -> &[TokenId];

    /// A token as log-probabilities show it.
    fn token_text(&self, token: TokenId) -> TokenText {
        let bytes = self.token_bytes(token).unwrap_or_default();
        TokenText {
            text: String::from_utf8_lossy(bytes).into_owned(),
            bytes: bytes.to_vec(),
        }
    }
}

/// Why text can't be cut into tokens.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EncodeError {
    /// The tokens don't say the text, though every byte of it has one.
    #[error("the vocabulary can't say the text of {text_bytes} bytes")]
    Incomplete {
        /// Length of the text.
        text_bytes: usize,
    },
    /// The vocabulary has no token for a byte of the text. Some vocabularies lack rare control
    /// characters.
    #[error("the vocabulary has no token for byte {byte:#04x} at offset {offset} of the text")]
    NoToken {
        /// The first such byte.
        byte: u8,
        /// Where it is, in bytes.
        offset: usize,
    },
    /// The library that cuts the text failed.
    #[error("the text can't be cut into tokens")]
    Library(#[source] tokenizers::Error),
}

/// Why a file's tokenizer can't be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// The file itself is unusable, or lacks a key.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The tokenizer is of a kind that isn't implemented.
    #[error("{file}: {key} is {found:?}, must be one of {supported}", file = file.display())]
    Unsupported {
        /// Which file.
        file: PathBuf,
        /// Which metadata key.
        key: &'static str,
        /// Its value.
        found: String,
        /// What is implemented.
        supported: &'static str,
    },
    /// A list has another length than the vocabulary.
    #[error(
        "{file}: {key} has {found} entries, the vocabulary has {tokens}",
        file = file.display()
    )]
    Length {
        /// Which file.
        file: PathBuf,
        /// Which metadata key.
        key: &'static str,
        /// Its length.
        found: usize,
        /// Number of tokens.
        tokens: usize,
    },
    /// A special token's id isn't in the vocabulary.
    #[error("{file}: {key} is {id}, the vocabulary has {tokens} tokens", file = file.display())]
    Id {
        /// Which file.
        file: PathBuf,
        /// Which metadata key.
        key: &'static str,
        /// Its value.
        id: u32,
        /// Number of tokens.
        tokens: usize,
    },
    /// A merge isn't two tokens with a space between them.
    #[error("{file}: tokenizer.ggml.merges[{index}] is not two tokens", file = file.display())]
    Merge {
        /// Which file.
        file: PathBuf,
        /// Which merge, counted from 0.
        index: usize,
    },
    /// A vocabulary with byte fallback lacks one of the bytes.
    #[error("{file}: there is no token for byte {byte:#04x}", file = file.display())]
    MissingByte {
        /// Which file.
        file: PathBuf,
        /// The first one that is missing.
        byte: u8,
    },
    /// The vocabulary makes no sense to the library, or a file can't be written.
    #[error("{file}: the tokenizer can't be {action}", file = file.display())]
    Library {
        /// Which file.
        file: PathBuf,
        /// What was tried.
        action: &'static str,
        /// What the library said.
        #[source]
        source: tokenizers::Error,
    },
}
