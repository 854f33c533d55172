//! The objects that are sent to clients.

use serde::Serialize;

use crate::engine_thread::{Finish, TokenReport};

/// Tokens counted for a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Tokens of all prompts, each counted once.
    pub(crate) prompt_tokens: u64,
    /// Tokens of all choices.
    pub(crate) completion_tokens: u64,
}

#[derive(Debug, Serialize)]
struct PromptTokensDetails {
    cached_tokens: u64,
}

#[derive(Debug, Serialize)]
pub(crate) struct UsageObject {
    prompt_tokens: u64,
    completion_tokens: u64,
    total_tokens: u64,
    prompt_tokens_details: PromptTokensDetails,
}

impl From<Usage> for UsageObject {
    fn from(usage: Usage) -> Self {
        Self {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            total_tokens: usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens_details: PromptTokensDetails { cached_tokens: 0 },
        }
    }
}

/// What is the same in every object of one call.
#[derive(Clone, Debug)]
pub(crate) struct Head {
    /// Name of the call.
    pub(crate) id: String,
    /// Seconds since 1970.
    pub(crate) created: u64,
    /// Name of the model.
    pub(crate) model: String,
}

/// An answer, or a chunk of one. `C` is a choice.
#[derive(Debug, Serialize)]
struct Object<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [C],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageObject>>,
}

impl Head {
    /// Writes an object. `usage`: not there, `null`, or the counts.
    fn write<C: Serialize>(
        &self,
        object: &'static str,
        choices: &[C],
        usage: Option<Option<Usage>>,
    ) -> String {
        let usage = usage.map(|usage| usage.map(UsageObject::from));
        let Self { id, created, model } = self;
        let object = Object {
            id,
            object,
            created: *created,
            model,
            choices,
            usage,
        };
        serde_json::to_string(&object).expect("strings and finite numbers can be written as JSON")
    }

    /// A whole answer of `/v1/completions`.
    pub(crate) fn completion(&self, choices: &[TextChoice], usage: Usage) -> String {
        self.write("text_completion", choices, Some(Some(usage)))
    }

    /// A chunk of such an answer; they have the same shape.
    pub(crate) fn completion_chunk(
        &self,
        choices: &[TextChoice],
        usage: Option<Option<Usage>>,
    ) -> String {
        self.write("text_completion", choices, usage)
    }

    /// A whole answer of `/v1/chat/completions`.
    pub(crate) fn chat(&self, choices: &[ChatChoice], usage: Usage) -> String {
        self.write("chat.completion", choices, Some(Some(usage)))
    }

    /// A chunk of such an answer.
    pub(crate) fn chat_chunk(&self, choices: &[ChatDelta], usage: Option<Option<Usage>>) -> String {
        self.write("chat.completion.chunk", choices, usage)
    }
}

/// One choice of a completion.
#[derive(Debug, Serialize)]
pub(crate) struct TextChoice {
    pub(crate) index: u32,
    pub(crate) text: String,
    pub(crate) logprobs: Option<TextLogprobs>,
    pub(crate) finish_reason: Option<Finish>,
}

/// Log probabilities in the style of completions: parallel lists.
#[derive(Debug, Default, Serialize)]
pub(crate) struct TextLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    top_logprobs: Vec<serde_json::Map<String, serde_json::Value>>,
    text_offset: Vec<usize>,
}

impl TextLogprobs {
    /// Adds tokens; `offset` is the length of the text before the first of them, in characters.
    pub(crate) fn extend(&mut self, reports: &[TokenReport], offset: usize) {
        let mut bytes_before = Vec::new();
        for report in reports {
            self.tokens.push(token_text(&report.bytes));
            self.token_logprobs.push(finite(report.logprob));
            let top = report.top.iter().map(|(bytes, logprob)| {
                (token_text(bytes), serde_json::Value::from(finite(*logprob)))
            });
            self.top_logprobs.push(top.collect());
            let before = String::from_utf8_lossy(&bytes_before).chars().count();
            self.text_offset.push(offset + before);
            bytes_before.extend_from_slice(&report.bytes);
        }
    }
}

/// One choice of a chat answer.
#[derive(Debug, Serialize)]
pub(crate) struct ChatChoice {
    pub(crate) index: u32,
    pub(crate) message: ChatAnswer,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: Option<Finish>,
}

/// What the assistant says.
#[derive(Debug, Serialize)]
pub(crate) struct ChatAnswer {
    pub(crate) role: &'static str,
    pub(crate) content: String,
}

/// One choice of a chunk of a chat answer.
#[derive(Debug, Serialize)]
pub(crate) struct ChatDelta {
    pub(crate) index: u32,
    pub(crate) delta: Delta,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: Option<Finish>,
}

/// What is new.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) content: Option<String>,
}

/// Log probabilities in the style of chats: a list of objects.
#[derive(Debug, Serialize)]
pub(crate) struct ChatLogprobs {
    content: Vec<TokenLogprob>,
}

#[derive(Debug, Serialize)]
struct TokenLogprob {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
    top_logprobs: Vec<TopLogprob>,
}

#[derive(Debug, Serialize)]
struct TopLogprob {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl ChatLogprobs {
    /// The reports in the shape of the API.
    pub(crate) fn of(reports: Vec<TokenReport>) -> Self {
        let content = reports.into_iter().map(|report| TokenLogprob {
            token: token_text(&report.bytes),
            logprob: finite(report.logprob),
            bytes: report.bytes,
            top_logprobs: report
                .top
                .into_iter()
                .map(|(bytes, logprob)| TopLogprob {
                    token: token_text(&bytes),
                    logprob: finite(logprob),
                    bytes,
                })
                .collect(),
        });
        Self {
            content: content.collect(),
        }
    }
}

/// A token as text; one that is only a part of a character as `bytes:\xf0\x9f`.
fn token_text(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |text, byte| {
            format!("{text}\\x{byte:02x}")
        }),
    }
}

/// JSON has no infinity: what can't happen at all gets a very small number, as clients expect.
fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() {
        logprob
    } else {
        -9999.0
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;

    fn head() -> Head {
        Head {
            id: "cmpl-1".to_owned(),
            created: 1_700_000_000,
            model: "oracle".to_owned(),
        }
    }

    fn reports() -> Vec<TokenReport> {
        vec![
            TokenReport {
                bytes: b"hi".to_vec(),
                logprob: -0.5,
                top: vec![(b"hi".to_vec(), -0.5)],
            },
            TokenReport {
                bytes: vec![0xf0, 0x9f],
                logprob: f32::NEG_INFINITY,
                top: vec![],
            },
        ]
    }

    const USAGE: Usage = Usage {
        prompt_tokens: 3,
        completion_tokens: 4,
    };

    #[test]
    fn completions_have_the_shape_that_clients_know() {
        let mut logprobs = TextLogprobs::default();
        logprobs.extend(&reports(), 7);
        let choice = TextChoice {
            index: 0,
            text: "hi".to_owned(),
            logprobs: Some(logprobs),
            finish_reason: Some(Finish::Length),
        };
        let chunk = |usage| head().completion_chunk(&[], usage);
        let lines = [
            head().completion(&[choice], USAGE),
            chunk(Some(Some(USAGE))),
            chunk(Some(None)),
            chunk(None),
        ];
        expect![[r#"
            {"id":"cmpl-1","object":"text_completion","created":1700000000,"model":"oracle","choices":[{"index":0,"text":"hi","logprobs":{"tokens":["hi","bytes:\\xf0\\x9f"],"token_logprobs":[-0.5,-9999.0],"top_logprobs":[{"hi":-0.5},{}],"text_offset":[7,9]},"finish_reason":"length"}],"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7,"prompt_tokens_details":{"cached_tokens":0}}}
            {"id":"cmpl-1","object":"text_completion","created":1700000000,"model":"oracle","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7,"prompt_tokens_details":{"cached_tokens":0}}}
            {"id":"cmpl-1","object":"text_completion","created":1700000000,"model":"oracle","choices":[],"usage":null}
            {"id":"cmpl-1","object":"text_completion","created":1700000000,"model":"oracle","choices":[]}"#]].assert_eq(&lines.join("\n"));
    }

    #[test]
    fn chats_have_the_shape_that_clients_know() {
        let choice = ChatChoice {
            index: 1,
            message: ChatAnswer {
                role: "assistant",
                content: "hi".to_owned(),
            },
            logprobs: Some(ChatLogprobs::of(reports())),
            finish_reason: Some(Finish::Stop),
        };
        let delta = |delta| ChatDelta {
            index: 0,
            delta,
            logprobs: None,
            finish_reason: None,
        };
        let role = Delta {
            role: Some("assistant"),
            content: Some(String::new()),
        };
        let content = Delta {
            role: None,
            content: Some("h".to_owned()),
        };
        let lines = [
            head().chat(&[choice], USAGE),
            head().chat_chunk(&[delta(role)], None),
            head().chat_chunk(&[delta(content)], Some(None)),
            head().chat_chunk(&[delta(Delta::default())], None),
            head().chat_chunk(&[], Some(Some(USAGE))),
        ];
        expect![[r#"
            {"id":"cmpl-1","object":"chat.completion","created":1700000000,"model":"oracle","choices":[{"index":1,"message":{"role":"assistant","content":"hi"},"logprobs":{"content":[{"token":"hi","logprob":-0.5,"bytes":[104,105],"top_logprobs":[{"token":"hi","logprob":-0.5,"bytes":[104,105]}]},{"token":"bytes:\\xf0\\x9f","logprob":-9999.0,"bytes":[240,159],"top_logprobs":[]}]},"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7,"prompt_tokens_details":{"cached_tokens":0}}}
            {"id":"cmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"oracle","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}
            {"id":"cmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"oracle","choices":[{"index":0,"delta":{"content":"h"},"logprobs":null,"finish_reason":null}],"usage":null}
            {"id":"cmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"oracle","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":null}]}
            {"id":"cmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"oracle","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7,"prompt_tokens_details":{"cached_tokens":0}}}"#]].assert_eq(&lines.join("\n"));
    }
}
