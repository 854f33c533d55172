//! Between text and tokens: the tokenizer, the chat template, and tokens that become text.

use std::sync::Arc;

use kv_model::chat::{ChatError, ChatMessage, ChatTemplate, GenerationPrompt};
use kv_model::detokenize::{Detokenizer, Piece};
use kv_model::tokenizer::{SpecialTokens, Tokenizer};
use kv_scheduler::TokenId;

use crate::error::ApiError;

/// What the server knows about a model's text.
#[derive(Debug)]
pub struct Text {
    tokenizer: Arc<dyn Tokenizer>,
    template: ChatTemplate,
}

impl Text {
    /// Text of a model.
    #[must_use]
    pub fn new(tokenizer: Arc<dyn Tokenizer>, template: ChatTemplate) -> Self {
        Self {
            tokenizer,
            template,
        }
    }

    /// Tokens of the vocabulary.
    pub(crate) fn vocabulary(&self) -> u32 {
        self.tokenizer.vocab_size()
    }

    /// The tokens that end a text or a turn.
    pub(crate) fn end_tokens(&self) -> &[TokenId] {
        self.tokenizer.stop_tokens()
    }

    /// Tokens of a plain prompt.
    ///
    /// # Errors
    ///
    /// 400 if the vocabulary can't say the text.
    pub(crate) fn encode(&self, text: &str) -> Result<Vec<TokenId>, ApiError> {
        let bos = self.tokenizer.bos().filter(|_| self.tokenizer.adds_bos());
        let tokens = self.cut("prompt", text)?;
        Ok(bos.into_iter().chain(tokens).collect())
    }

    /// Tokens of a conversation, up to where the assistant speaks next.
    ///
    /// # Errors
    ///
    /// 400 if the model's template refuses the conversation, or the vocabulary can't say it.
    pub(crate) fn encode_chat(&self, messages: &[ChatMessage]) -> Result<Vec<TokenId>, ApiError> {
        match self.template.render(messages, GenerationPrompt::Add) {
            Ok(text) => self.cut("messages", &text),
            Err(ChatError::Failed { what }) => {
                tracing::error!(%what, "the chat template failed");
                Err(ApiError::failed())
            }
            Err(refused) => Err(ApiError::param("messages", refused.to_string())),
        }
    }

    fn cut(&self, param: &str, text: &str) -> Result<Vec<TokenId>, ApiError> {
        self.tokenizer
            .encode(text, SpecialTokens::Parse)
            .map_err(|error| ApiError::param(param, error.to_string()))
    }

    /// The bytes of a token.
    pub(crate) fn token_bytes(&self, token: TokenId) -> Vec<u8> {
        self.tokenizer
            .token_bytes(token)
            .unwrap_or_default()
            .to_vec()
    }

    /// Takes a token of a choice.
    pub(crate) fn push(&self, text: &mut Detokenizer, token: TokenId) -> Piece {
        text.push_token(&*self.tokenizer, token)
    }

    /// How many bytes of text a token stands for; marks for the model have none.
    pub(crate) fn shown_bytes(&self, token: TokenId) -> usize {
        match self.tokenizer.token_bytes(token) {
            Some(bytes) if !self.tokenizer.is_special(token) => bytes.len(),
            _ => 0,
        }
    }

    /// The text of a prompt that was given as tokens.
    pub(crate) fn decode(&self, tokens: &[TokenId]) -> String {
        let bytes: Vec<_> = tokens
            .iter()
            .flat_map(|&token| self.token_bytes(token))
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}
