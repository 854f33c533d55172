//! Tokens that a test wants to see.

use std::collections::BTreeMap;

use kv_core::Choice;
use kv_scheduler::TokenId;

use super::OracleError;

/// What comes after the last token of a choice's script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScriptEnd {
    /// Hashed tokens, as without a script.
    Hashed,
    /// The script from its start.
    Repeat,
    /// This token, for ever.
    Token(TokenId),
}

/// Tokens to emit, per choice, instead of hashed ones.
///
/// A scripted token is emitted only if the hash over the choice's KV bytes is the one that its
/// history must have; else another token comes, so that damage changes the text as it does without
/// a script. Choices without a script, or with an empty one, emit hashed tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OracleScript {
    choices: BTreeMap<Choice, Vec<TokenId>>,
    end: ScriptEnd,
}

impl OracleScript {
    /// A script without tokens.
    #[must_use]
    pub const fn new(end: ScriptEnd) -> Self {
        Self {
            choices: BTreeMap::new(),
            end,
        }
    }

    /// Sets the tokens of one choice.
    #[must_use]
    pub fn choice(mut self, choice: Choice, tokens: impl IntoIterator<Item = TokenId>) -> Self {
        self.choices.insert(choice, tokens.into_iter().collect());
        self
    }

    /// The choice's token after `emitted` ones; `None` is a hashed one.
    pub(super) fn token(&self, choice: Choice, emitted: usize) -> Option<TokenId> {
        let tokens = self
            .choices
            .get(&choice)
            .filter(|tokens| !tokens.is_empty())?;
        match (tokens.get(emitted), self.end) {
            (Some(&token), _) | (None, ScriptEnd::Token(token)) => Some(token),
            (None, ScriptEnd::Repeat) => Some(tokens[emitted % tokens.len()]),
            (None, ScriptEnd::Hashed) => None,
        }
    }

    pub(super) fn check(&self, vocab: u32) -> Result<(), OracleError> {
        let end = match self.end {
            ScriptEnd::Token(token) => Some(token),
            ScriptEnd::Hashed | ScriptEnd::Repeat => None,
        };
        let outside = self
            .choices
            .values()
            .flatten()
            .copied()
            .chain(end)
            .find(|t| t.0 >= vocab);
        outside.map_or(Ok(()), |token| {
            Err(OracleError::Script {
                token: token.0,
                vocab,
            })
        })
    }
}
