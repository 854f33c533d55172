//! What a client is told when something is refused or fails: one type, one JSON shape.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use kv_scheduler::{InvalidParam, Rejection};
use serde::Serialize;

/// The `type` of an error body, as clients of the OpenAI API know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    /// The request can't be served as it is.
    InvalidRequestError,
    /// The same request may succeed later or elsewhere.
    ServerError,
}

/// A refusal or a failure, ready to be sent.
///
/// The message is for the client: it may name what the client sent, and says nothing about the
/// inside of the server.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{message}")]
pub(crate) struct ApiError {
    status: StatusCode,
    kind: Kind,
    code: &'static str,
    param: Option<String>,
    message: String,
    retry_after_s: Option<u32>,
}

#[derive(Serialize)]
struct Body<'a> {
    error: Inner<'a>,
}

#[derive(Serialize)]
struct Inner<'a> {
    message: &'a str,
    r#type: Kind,
    param: Option<&'a str>,
    code: &'static str,
}

/// Code of a refusal that has no better one.
const INVALID: &str = "invalid_request_error";

impl ApiError {
    fn new(status: StatusCode, kind: Kind, code: &'static str, message: String) -> Self {
        Self {
            status,
            kind,
            code,
            param: None,
            message,
            retry_after_s: None,
        }
    }

    /// 400: the request is wrong as a whole.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(
            StatusCode::BAD_REQUEST,
            Kind::InvalidRequestError,
            INVALID,
            message.into(),
        )
    }

    /// 400: one parameter is wrong.
    pub(crate) fn param(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            param: Some(param.into()),
            ..Self::invalid(message)
        }
    }

    /// 400: a parameter has a value that is not allowed.
    pub(crate) fn value(param: &str, value: &str, allowed: &str) -> Self {
        Self::param(param, format!("{param} is {value}, must be {allowed}"))
    }

    /// 400: the prompt and the answer don't fit into a sequence.
    pub(crate) fn context_length(param: &str, message: String) -> Self {
        Self {
            code: "context_length_exceeded",
            ..Self::param(param, message)
        }
    }

    /// 404: no such path.
    pub(crate) fn no_such_path(path: &str) -> Self {
        let message = format!("there is no {}", shorten(path));
        Self::new(
            StatusCode::NOT_FOUND,
            Kind::InvalidRequestError,
            "not_found",
            message,
        )
    }

    /// 404: another model is served here.
    pub(crate) fn no_such_model(asked: &str, served: &str) -> Self {
        let message = format!(
            "the model {:?} is not served here, only {served:?}",
            shorten(asked)
        );
        let error = Self::new(
            StatusCode::NOT_FOUND,
            Kind::InvalidRequestError,
            "model_not_found",
            message,
        );
        Self {
            param: Some("model".to_owned()),
            ..error
        }
    }

    /// 405: the path is there, but not for this method.
    pub(crate) fn method_not_allowed(method: &str, path: &str) -> Self {
        Self::new(
            StatusCode::METHOD_NOT_ALLOWED,
            Kind::InvalidRequestError,
            "method_not_allowed",
            format!("{} is not allowed for {}", shorten(method), shorten(path)),
        )
    }

    /// 408: the body took too long.
    pub(crate) fn body_timeout(limit_s: u64) -> Self {
        Self::new(
            StatusCode::REQUEST_TIMEOUT,
            Kind::InvalidRequestError,
            "request_timeout",
            format!("the request body was not complete after {limit_s} s"),
        )
    }

    /// 413: the body is longer than this server takes.
    pub(crate) fn body_too_large(limit: usize) -> Self {
        Self::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            Kind::InvalidRequestError,
            "request_too_large",
            format!("the request body is longer than {limit} bytes"),
        )
    }

    /// 415: the body is not declared as JSON.
    pub(crate) fn content_type(given: &str) -> Self {
        Self::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Kind::InvalidRequestError,
            "unsupported_media_type",
            format!(
                "the content type is {:?}, must be application/json",
                shorten(given)
            ),
        )
    }

    /// 500: this request failed inside the server.
    pub(crate) fn failed() -> Self {
        Self::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            Kind::ServerError,
            "internal_error",
            "the request failed inside the server; the other requests go on".to_owned(),
        )
    }

    /// 500: the engine is gone, for good.
    pub(crate) fn engine_dead() -> Self {
        Self::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            Kind::ServerError,
            "engine_dead",
            "the engine has stopped; the server must be started again".to_owned(),
        )
    }

    /// 503: too many requests are waiting.
    pub(crate) fn queue_full(waiting: u32, max: u32) -> Self {
        Self::unavailable(
            "queue_full",
            format!("{waiting} requests are waiting, at most {max} may"),
            1,
        )
    }

    /// 503: too many bytes of request bodies are being received.
    pub(crate) fn too_many_bodies() -> Self {
        let message = "too many bytes of request bodies are being received".to_owned();
        Self::unavailable("queue_full", message, 1)
    }

    /// 503: the server finishes what it has.
    pub(crate) fn shutting_down() -> Self {
        Self::unavailable("shutting_down", "the server is shutting down".to_owned(), 5)
    }

    fn unavailable(code: &'static str, message: String, retry_after_s: u32) -> Self {
        let error = Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            Kind::ServerError,
            code,
            message,
        );
        Self {
            retry_after_s: Some(retry_after_s),
            ..error
        }
    }

    /// The JSON body; also the payload of an error frame inside a stream.
    pub(crate) fn body(&self) -> String {
        let inner = Inner {
            message: &self.message,
            r#type: self.kind,
            param: self.param.as_deref(),
            code: self.code,
        };
        serde_json::to_string(&Body { error: inner }).expect("plain strings can be written as JSON")
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let json = HeaderValue::from_static("application/json");
        let mut response = (self.status, self.body()).into_response();
        response.headers_mut().insert(header::CONTENT_TYPE, json);
        if let Some(seconds) = self.retry_after_s {
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, seconds.into());
        }
        response
    }
}

impl From<InvalidParam> for ApiError {
    fn from(invalid: InvalidParam) -> Self {
        Self::value(invalid.name, &invalid.value, invalid.allowed)
    }
}

impl From<Rejection> for ApiError {
    fn from(rejection: Rejection) -> Self {
        match rejection {
            Rejection::Draining => Self::shutting_down(),
            Rejection::EmptyPrompt => Self::param("prompt", rejection.to_string()),
            Rejection::NoTokens => Self::param("max_tokens", rejection.to_string()),
            Rejection::Choices { .. } => Self::param("n", rejection.to_string()),
            Rejection::TooLong { .. } => Self::context_length("max_tokens", rejection.to_string()),
            Rejection::NeverFits { .. } => Self {
                code: "kv_capacity_exceeded",
                ..Self::param("max_tokens", rejection.to_string())
            },
            Rejection::QueueFull { waiting, max } => Self::queue_full(waiting, max),
            // A repeated id would be our own mistake, and what a newer engine may add is not
            // known to be the client's.
            _ => Self::failed(),
        }
    }
}

/// At most the first 80 characters of what a client sent.
pub(crate) fn shorten(text: &str) -> String {
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;

    #[test]
    fn bodies_are_openai_error_bodies() {
        let errors = [
            ApiError::invalid("no"),
            ApiError::value("temperature", "3", "between 0 and 2"),
            ApiError::no_such_path("/v2"),
            ApiError::no_such_model("gpt", "oracle"),
            ApiError::method_not_allowed("GET", "/v1/completions"),
            ApiError::body_timeout(30),
            ApiError::body_too_large(4096),
            ApiError::content_type("text/plain"),
            ApiError::failed(),
            ApiError::engine_dead(),
            ApiError::too_many_bodies(),
            Rejection::Draining.into(),
            Rejection::DuplicateId.into(),
            Rejection::EmptyPrompt.into(),
            Rejection::NoTokens.into(),
            Rejection::Choices { n: 17, max: 16 }.into(),
            Rejection::TooLong {
                prompt: 4000,
                max_tokens: 100,
                max: 4096,
            }
            .into(),
            Rejection::NeverFits {
                needed: 63,
                blocks: 49,
            }
            .into(),
            Rejection::QueueFull { waiting: 8, max: 8 }.into(),
        ];
        let lines: Vec<_> = errors
            .iter()
            .map(|error| {
                let retry = error.retry_after_s.map(|s| format!(" retry-after {s}"));
                let status = error.status.as_u16();
                format!("{status}{} {}", retry.unwrap_or_default(), error.body())
            })
            .collect();
        expect![[r#"
            400 {"error":{"message":"no","type":"invalid_request_error","param":null,"code":"invalid_request_error"}}
            400 {"error":{"message":"temperature is 3, must be between 0 and 2","type":"invalid_request_error","param":"temperature","code":"invalid_request_error"}}
            404 {"error":{"message":"there is no /v2","type":"invalid_request_error","param":null,"code":"not_found"}}
            404 {"error":{"message":"the model \"gpt\" is not served here, only \"oracle\"","type":"invalid_request_error","param":"model","code":"model_not_found"}}
            405 {"error":{"message":"GET is not allowed for /v1/completions","type":"invalid_request_error","param":null,"code":"method_not_allowed"}}
            408 {"error":{"message":"the request body was not complete after 30 s","type":"invalid_request_error","param":null,"code":"request_timeout"}}
            413 {"error":{"message":"the request body is longer than 4096 bytes","type":"invalid_request_error","param":null,"code":"request_too_large"}}
            415 {"error":{"message":"the content type is \"text/plain\", must be application/json","type":"invalid_request_error","param":null,"code":"unsupported_media_type"}}
            500 {"error":{"message":"the request failed inside the server; the other requests go on","type":"server_error","param":null,"code":"internal_error"}}
            500 {"error":{"message":"the engine has stopped; the server must be started again","type":"server_error","param":null,"code":"engine_dead"}}
            503 retry-after 1 {"error":{"message":"too many bytes of request bodies are being received","type":"server_error","param":null,"code":"queue_full"}}
            503 retry-after 5 {"error":{"message":"the server is shutting down","type":"server_error","param":null,"code":"shutting_down"}}
            500 {"error":{"message":"the request failed inside the server; the other requests go on","type":"server_error","param":null,"code":"internal_error"}}
            400 {"error":{"message":"the prompt is empty","type":"invalid_request_error","param":"prompt","code":"invalid_request_error"}}
            400 {"error":{"message":"max_tokens is 0, must be at least 1","type":"invalid_request_error","param":"max_tokens","code":"invalid_request_error"}}
            400 {"error":{"message":"n is 17, must be between 1 and 16","type":"invalid_request_error","param":"n","code":"invalid_request_error"}}
            400 {"error":{"message":"4000 prompt tokens and 100 new ones are more than 4096 per sequence","type":"invalid_request_error","param":"max_tokens","code":"context_length_exceeded"}}
            400 {"error":{"message":"the request needs 63 KV blocks, the pool has 49","type":"invalid_request_error","param":"max_tokens","code":"kv_capacity_exceeded"}}
            503 retry-after 1 {"error":{"message":"8 requests are waiting, at most 8 may","type":"server_error","param":null,"code":"queue_full"}}"#]].assert_eq(&lines.join("\n"));
    }

    #[test]
    fn what_a_client_sent_is_shortened() {
        assert_eq!(shorten(&"é".repeat(80)), "é".repeat(80));
        assert_eq!(shorten(&"é".repeat(81)), format!("{}…", "é".repeat(80)));
    }
}
