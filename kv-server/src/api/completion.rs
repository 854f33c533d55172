//! `POST /v1/completions`: what the request means.

use kv_scheduler::{SamplingParams, TokenId};
use serde_json::Value;

use super::json::{Fields, show};
use super::params::{Limits, Params, token_id};
use crate::error::ApiError;

/// Most prompts in one call.
const PROMPTS_MAX: usize = 2048;

/// One prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Prompt {
    /// To be tokenised.
    Text(String),
    /// Tokens as they are.
    Tokens(Vec<TokenId>),
}

/// Whether the answer starts with the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Echo {
    /// It does.
    Prompt,
    /// It doesn't.
    Nothing,
}

/// A request for completions.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Completion {
    pub(crate) params: Params,
    pub(crate) prompts: Vec<Prompt>,
    pub(crate) echo: Echo,
    /// How many alternatives to report with each token.
    pub(crate) logprobs: Option<u32>,
}

impl Completion {
    /// Reads and checks a request.
    ///
    /// # Errors
    ///
    /// The first parameter that is wrong.
    pub(crate) fn read(fields: &Fields, limits: &Limits) -> Result<Self, ApiError> {
        let params = Params::read(fields, limits, 1.0)?;
        let logprobs = fields.whole("logprobs", 0, SamplingParams::LOGPROBS_MAX)?;
        let echo = match fields.boolean("echo")? {
            Some(true) => Echo::Prompt,
            Some(false) | None => Echo::Nothing,
        };
        if echo == Echo::Prompt && logprobs.is_some() {
            let message = "logprobs of an echoed prompt are not supported";
            return Err(ApiError::param("logprobs", message));
        }
        Ok(Self {
            params,
            prompts: prompts(fields, limits)?,
            echo,
            logprobs,
        })
    }
}

fn prompts(fields: &Fields, limits: &Limits) -> Result<Vec<Prompt>, ApiError> {
    let allowed = format!(
        "a string, a list of tokens below {}, or a list of 1 to {PROMPTS_MAX} of these, none \
         of them empty",
        limits.vocabulary
    );
    let Some(value) = fields.get("prompt") else {
        return Err(ApiError::param(
            "prompt",
            format!("prompt is missing, must be {allowed}"),
        ));
    };
    let read = match value {
        Value::Array(list) if list.iter().all(|item| item.is_string() || item.is_array()) => {
            let fits = (1..=PROMPTS_MAX).contains(&list.len());
            fits.then(|| list.iter().map(|item| prompt(item, limits)).collect())
                .flatten()
        }
        value => prompt(value, limits).map(|prompt| vec![prompt]),
    };
    read.ok_or_else(|| ApiError::value("prompt", &show(value), &allowed))
}

fn prompt(value: &Value, limits: &Limits) -> Option<Prompt> {
    match value {
        Value::String(text) if !text.is_empty() => Some(Prompt::Text(text.clone())),
        Value::Array(tokens) if !tokens.is_empty() => {
            let tokens: Option<_> = tokens.iter().map(|token| token_id(token, limits)).collect();
            tokens.map(Prompt::Tokens)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::api::json;

    fn read(body: &str) -> Result<Completion, ApiError> {
        let limits = Limits {
            model: "oracle".to_owned(),
            max_n: 16,
            vocabulary: 1000,
        };
        Completion::read(&json::parse(body.as_bytes()).unwrap(), &limits)
    }

    #[test]
    fn all_four_forms_of_a_prompt_are_read() {
        let text = |text: &str| Prompt::Text(text.to_owned());
        let tokens = |ids: &[u32]| Prompt::Tokens(ids.iter().copied().map(TokenId).collect());
        let prompts = |body: &str| read(body).unwrap().prompts;
        assert_eq!(prompts(r#"{"prompt": "a"}"#), [text("a")]);
        assert_eq!(prompts(r#"{"prompt": ["a", "b"]}"#), [text("a"), text("b")]);
        assert_eq!(prompts(r#"{"prompt": [1, 2]}"#), [tokens(&[1, 2])]);
        assert_eq!(
            prompts(r#"{"prompt": [[1], [2, 3]]}"#),
            [tokens(&[1]), tokens(&[2, 3])]
        );
    }

    #[test]
    fn wrong_prompts_are_refused() {
        let bodies = [
            "{}",
            r#"{"prompt": ""}"#,
            r#"{"prompt": []}"#,
            r#"{"prompt": [[]]}"#,
            r#"{"prompt": ["a", 1]}"#,
            r#"{"prompt": [1000]}"#,
            r#"{"prompt": [-1]}"#,
            r#"{"prompt": {"text": "a"}}"#,
            r#"{"prompt": "a", "echo": true, "logprobs": 1}"#,
            r#"{"prompt": "a", "logprobs": 21}"#,
            r#"{"prompt": "a", "logprobs": true}"#,
        ];
        let said: Vec<_> = bodies
            .iter()
            .map(|body| read(body).expect_err(body).to_string())
            .collect();
        expect![[r#"
            prompt is missing, must be a string, a list of tokens below 1000, or a list of 1 to 2048 of these, none of them empty
            prompt is "", must be a string, a list of tokens below 1000, or a list of 1 to 2048 of these, none of them empty
            prompt is [], must be a string, a list of tokens below 1000, or a list of 1 to 2048 of these, none of them empty
            prompt is [[]], must be a string, a list of tokens below 1000, or a list of 1 to 2048 of these, none of them empty
            prompt is ["a",1], must be a string, a list of tokens below 1000, or a list of 1 to 2048 of these, none of them empty
            prompt is [1000], must be a string, a list of tokens below 1000, or a list of 1 to 2048 of these, none of them empty
            prompt is [-1], must be a string, a list of tokens below 1000, or a list of 1 to 2048 of these, none of them empty
            prompt is {"text":"a"}, must be a string, a list of tokens below 1000, or a list of 1 to 2048 of these, none of them empty
            logprobs of an echoed prompt are not supported
            logprobs is 21, must be a whole number from 0 to 20
            logprobs is true, must be a whole number from 0 to 20"#]].assert_eq(&said.join("\n"));
    }
}
