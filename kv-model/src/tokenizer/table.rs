//! The bytes of all tokens.

use kv_scheduler::TokenId;

/// Bytes and kind of each token, in two allocations.
#[derive(Debug, Default)]
pub(super) struct TokenTable {
    bytes: Vec<u8>,
    tokens: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    end: usize,
    is_special: bool,
}

impl TokenTable {
    /// Adds the next token.
    pub(super) fn push(&mut self, bytes: impl IntoIterator<Item = u8>, is_special: bool) {
        self.bytes.extend(bytes);
        self.tokens.push(Entry {
            end: self.bytes.len(),
            is_special,
        });
    }

    pub(super) fn bytes(&self, token: TokenId) -> Option<&[u8]> {
        let index = token.0 as usize;
        let end = self.tokens.get(index)?.end;
        let start = index
            .checked_sub(1)
            .map_or(0, |before| self.tokens[before].end);
        Some(&self.bytes[start..end])
    }

    pub(super) fn is_special(&self, token: TokenId) -> bool {
        self.tokens
            .get(token.0 as usize)
            .is_some_and(|entry| entry.is_special)
    }

    /// Number of tokens.
    pub(super) fn len(&self) -> u32 {
        u32::try_from(self.tokens.len()).expect("ids have 32 bits, so there are no more tokens")
    }
}
