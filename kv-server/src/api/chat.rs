//! `POST /v1/chat/completions`: what the request means.

use kv_model::chat::ChatMessage;
use kv_scheduler::SamplingParams;
use serde_json::Value;

use super::json::{Fields, show};
use super::params::{Limits, Params};
use crate::error::{ApiError, shorten};

/// Roles that a message may have. `developer` is the newer name of `system`.
const ROLES: [&str; 5] = ["assistant", "developer", "system", "tool", "user"];

/// Default temperature of a chat.
const TEMPERATURE: f32 = 0.7;

/// A request for the next message of a conversation.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Chat {
    pub(crate) params: Params,
    pub(crate) messages: Vec<ChatMessage>,
    /// How many alternatives to report with each token.
    pub(crate) logprobs: Option<u32>,
}

impl Chat {
    /// Reads and checks a request.
    ///
    /// # Errors
    ///
    /// The first parameter that is wrong.
    pub(crate) fn read(fields: &Fields, limits: &Limits) -> Result<Self, ApiError> {
        let params = Params::read(fields, limits, TEMPERATURE)?;
        let wanted = fields.boolean("logprobs")?.unwrap_or(false);
        let top = fields.whole("top_logprobs", 0, SamplingParams::LOGPROBS_MAX)?;
        if top.is_some() && !wanted {
            let message = "top_logprobs is only allowed when logprobs is true";
            return Err(ApiError::param("top_logprobs", message));
        }
        let logprobs = wanted.then(|| top.unwrap_or(0));
        Ok(Self {
            params,
            messages: messages(fields)?,
            logprobs,
        })
    }
}

fn messages(fields: &Fields) -> Result<Vec<ChatMessage>, ApiError> {
    let allowed = "a list of at least one message with a role and a content";
    let list = fields
        .read("messages", allowed, |value| {
            value.as_array().filter(|list| !list.is_empty())
        })?
        .ok_or_else(|| {
            ApiError::param(
                "messages",
                format!("messages is missing, must be {allowed}"),
            )
        })?;
    list.iter()
        .enumerate()
        .map(|(index, value)| message(index, value))
        .collect()
}

fn message(index: usize, value: &Value) -> Result<ChatMessage, ApiError> {
    let name = |field: &str| format!("messages[{index}]{field}");
    let wrong = |field: &str, value: Option<&Value>, allowed: &str| {
        let shown = value.map_or_else(|| "missing".to_owned(), show);
        Err(ApiError::value(&name(field), &shown, allowed))
    };
    let Some(map) = value.as_object() else {
        return wrong("", Some(value), "an object with a role and a content");
    };
    let role = match map.get("role").and_then(Value::as_str) {
        Some("developer") => "system",
        Some(role) if ROLES.contains(&role) => role,
        _ => {
            let allowed = format!("one of {}", ROLES.join(", "));
            return wrong(".role", map.get("role"), &allowed);
        }
    };
    if map
        .get("tool_calls")
        .is_some_and(|calls| calls.as_array().is_some_and(|c| !c.is_empty()))
    {
        return Err(ApiError::param(
            name(".tool_calls"),
            "tool calls are not supported",
        ));
    }
    let content = match map.get("content") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => content(index, parts)?,
        None | Some(Value::Null) if role == "assistant" => String::new(),
        other => return wrong(".content", other, "a string or a list of text parts"),
    };
    Ok(ChatMessage::new(role, content))
}

/// Joins the text parts of a message, each on a line of its own.
fn content(index: usize, parts: &[Value]) -> Result<String, ApiError> {
    let mut content = Vec::new();
    for (at, part) in parts.iter().enumerate() {
        let name = format!("messages[{index}].content[{at}]");
        let kind = part
            .get("type")
            .and_then(Value::as_str)
            .unwrap_or("missing");
        if kind != "text" {
            let name = format!("{name}.type");
            return Err(ApiError::value(&name, &shorten(kind), "\"text\""));
        }
        match part.get("text").and_then(Value::as_str) {
            Some(text) => content.push(text),
            None => return Err(ApiError::value(&name, &show(part), "a part with a text")),
        }
    }
    Ok(content.join("\n"))
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::api::json;

    fn read(body: &str) -> Result<Chat, ApiError> {
        let limits = Limits {
            model: "oracle".to_owned(),
            max_n: 16,
            vocabulary: 1000,
        };
        Chat::read(&json::parse(body.as_bytes()).unwrap(), &limits)
    }

    #[test]
    fn messages_are_read() {
        let chat = read(
            r#"{"logprobs": true, "top_logprobs": 3, "messages": [
                {"role": "developer", "content": "be brief"},
                {"role": "user", "name": "me", "content": [
                    {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": null}]}"#,
        )
        .unwrap();
        let expected = [
            ChatMessage::new("system", "be brief"),
            ChatMessage::new("user", "a\nb"),
            ChatMessage::new("assistant", ""),
        ];
        assert_eq!(chat.messages, expected);
        assert_eq!(chat.logprobs, Some(3));
        assert!((chat.params.sampling.temperature - 0.7).abs() < 1e-6);
    }

    #[test]
    fn wrong_messages_are_refused() {
        let bodies = [
            "{}",
            r#"{"messages": []}"#,
            r#"{"messages": "hello"}"#,
            r#"{"messages": ["hello"]}"#,
            r#"{"messages": [{"content": "a"}]}"#,
            r#"{"messages": [{"role": "king", "content": "a"}]}"#,
            r#"{"messages": [{"role": "user"}]}"#,
            r#"{"messages": [{"role": "user", "content": 3}]}"#,
            r#"{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}"#,
            r#"{"messages": [{"role": "user", "content": [{"type": "text"}]}]}"#,
            r#"{"messages": [{"role": "assistant", "tool_calls": [{}]}]}"#,
            r#"{"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}"#,
            r#"{"messages": [{"role": "user", "content": "a"}], "logprobs": 2}"#,
        ];
        let said: Vec<_> = bodies
            .iter()
            .map(|body| read(body).expect_err(body).to_string())
            .collect();
        expect![[r#"
            messages is missing, must be a list of at least one message with a role and a content
            messages is [], must be a list of at least one message with a role and a content
            messages is "hello", must be a list of at least one message with a role and a content
            messages[0] is "hello", must be an object with a role and a content
            messages[0].role is missing, must be one of assistant, developer, system, tool, user
            messages[0].role is "king", must be one of assistant, developer, system, tool, user
            messages[0].content is missing, must be a string or a list of text parts
            messages[0].content is 3, must be a string or a list of text parts
            messages[0].content[0].type is image_url, must be "text"
            messages[0].content[0] is {"type":"text"}, must be a part with a text
            tool calls are not supported
            top_logprobs is only allowed when logprobs is true
            logprobs is 2, must be true or false"#]]
        .assert_eq(&said.join("\n"));
    }
}
