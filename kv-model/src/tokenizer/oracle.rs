//! A vocabulary for the hash oracle: any text goes in, readable words come out.

use kv_scheduler::TokenId;

use super::table::TokenTable;
use super::{EncodeError, SpecialTokens, Tokenizer};
use crate::oracle::OracleConfig;

const CONSONANTS: [u8; 16] = *b"bdfghjklmnprstvz";
const VOWELS: [u8; 5] = *b"aeiou";
const SYLLABLES: usize = CONSONANTS.len() * VOWELS.len();

/// Every byte is a token, so any text can be encoded: one token a byte. From id
/// [`BYTES`](Self::BYTES) on come words or given tokens, at the end one that ends a text.
#[derive(Debug)]
pub struct OracleTokenizer {
    table: TokenTable,
    stop_tokens: [TokenId; 1],
}

impl OracleTokenizer {
    /// Number of the tokens that are single bytes; the id of the first one that isn't.
    pub const BYTES: u32 = 256;

    /// A vocabulary with that many words, each a space and some syllables, all different.
    #[must_use]
    pub fn new(words: u16) -> Self {
        Self::from_tokens((0..words.into()).map(word))
    }

    /// A vocabulary with the given tokens, the first at [`BYTES`](Self::BYTES).
    pub fn from_tokens<T: AsRef<[u8]>>(tokens: impl IntoIterator<Item = T>) -> Self {
        let mut table = TokenTable::default();
        for byte in 0..=u8::MAX {
            table.push([byte], false);
        }
        for token in tokens {
            table.push(token.as_ref().iter().copied(), false);
        }
        let eos = TokenId(table.len());
        table.push(*b"<end>", true);
        Self {
            table,
            stop_tokens: [eos],
        }
    }

    /// An oracle that emits this vocabulary's words, and never the end.
    #[must_use]
    pub fn oracle_config(&self) -> OracleConfig {
        OracleConfig {
            vocab: self.vocab_size(),
            lowest: TokenId(Self::BYTES),
            eos: self.eos(),
            ..OracleConfig::default()
        }
    }
}

impl Tokenizer for OracleTokenizer {
    fn encode(&self, text: &str, _: SpecialTokens) -> Result<Vec<TokenId>, EncodeError> {
        Ok(text.bytes().map(|byte| TokenId(byte.into())).collect())
    }

    fn token_bytes(&self, token: TokenId) -> Option<&[u8]> {
        self.table.bytes(token)
    }

    fn is_special(&self, token: TokenId) -> bool {
        self.table.is_special(token)
    }

    fn vocab_size(&self) -> u32 {
        self.table.len()
    }

    fn bos(&self) -> Option<TokenId> {
        None
    }

    fn adds_bos(&self) -> bool {
        false
    }

    fn eos(&self) -> Option<TokenId> {
        Some(self.stop_tokens[0])
    }

    fn stop_tokens(&self) -> &[TokenId] {
        &self.stop_tokens
    }
}

/// The number in syllables, after a space: the first 80 words have one, the next 6,400 two.
fn word(number: usize) -> Vec<u8> {
    let mut letters = Vec::new();
    let mut left = number + 1;
    while left > 0 {
        left -= 1;
        let syllable = left % SYLLABLES;
        letters.push(VOWELS[syllable % VOWELS.len()]);
        letters.push(CONSONANTS[syllable / VOWELS.len()]);
        left /= SYLLABLES;
    }
    letters.push(b' ');
    letters.reverse();
    letters
}
