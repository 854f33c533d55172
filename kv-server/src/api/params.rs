//! The parameters that both endpoints share.

use kv_scheduler::{SamplingParams, TokenId};
use serde_json::Value;

use super::json::{Fields, show};
use crate::error::ApiError;

/// Most stop strings of one request.
const STOPS_MAX: usize = 16;

/// Longest stop string, bytes. It bounds the text that is held back.
const STOP_BYTES_MAX: usize = 1024;

/// What the server allows; part of its configuration.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    /// Name of the served model.
    pub(crate) model: String,
    /// Most choices of one prompt.
    pub(crate) max_n: u32,
    /// Tokens of the vocabulary.
    pub(crate) vocabulary: u32,
}

/// How usage is reported in a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct UsageReports {
    /// One chunk with empty choices at the end.
    pub(crate) at_the_end: bool,
    /// In every chunk, so far.
    pub(crate) in_every_chunk: bool,
}

/// Whether the answer is sent as it comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// All at once.
    Whole,
    /// As server-sent events.
    Stream(UsageReports),
}

/// Whether tokens that end a text by themselves do so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EndTokens {
    /// They end a choice.
    Heeded,
    /// They are tokens like others.
    Ignored,
}

/// What both endpoints understand.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Params {
    pub(crate) n: u32,
    /// `None` leaves it to the endpoint.
    pub(crate) max_tokens: Option<u32>,
    pub(crate) stops: Vec<String>,
    pub(crate) stop_tokens: Vec<TokenId>,
    pub(crate) end_tokens: EndTokens,
    pub(crate) delivery: Delivery,
    /// Lower is more urgent.
    pub(crate) priority: i32,
    /// Without a seed, one is drawn by the caller.
    pub(crate) seed: Option<u64>,
    /// Everything but `seed` and `logprobs`.
    pub(crate) sampling: SamplingParams,
}

impl Params {
    /// Reads and checks them.
    ///
    /// # Errors
    ///
    /// The first parameter that is wrong, with its value and what is allowed.
    pub(crate) fn read(
        fields: &Fields,
        limits: &Limits,
        temperature: f32,
    ) -> Result<Self, ApiError> {
        if let Some(model) = fields
            .string("model")?
            .filter(|model| *model != limits.model)
        {
            return Err(ApiError::no_such_model(model, &limits.model));
        }
        refuse_unsupported(fields)?;
        let n = fields.whole("n", 1, limits.max_n)?.unwrap_or(1);
        if let Some(best_of) = fields
            .whole("best_of", 1, u32::MAX)?
            .filter(|&best| best != n)
        {
            let allowed = format!("equal to n, which is {n}");
            return Err(ApiError::value("best_of", &best_of.to_string(), &allowed));
        }
        let end_tokens = match fields.boolean("ignore_eos")? {
            Some(true) => EndTokens::Ignored,
            Some(false) | None => EndTokens::Heeded,
        };
        Ok(Self {
            n,
            max_tokens: max_tokens(fields)?,
            stops: stops(fields)?,
            stop_tokens: stop_tokens(fields, limits)?,
            end_tokens,
            delivery: delivery(fields)?,
            priority: priority(fields)?,
            seed: seed(fields)?,
            sampling: sampling(fields, limits, temperature)?,
        })
    }
}

/// Refuses what would change the meaning of the answer if it were ignored.
fn refuse_unsupported(fields: &Fields) -> Result<(), ApiError> {
    if let Some(format) = fields.object("response_format")? {
        let kind = format.get("type").unwrap_or(&Value::Null);
        if kind != "text" {
            let allowed = "\"text\"; constrained output is not supported";
            return Err(ApiError::value(
                "response_format.type",
                &show(kind),
                allowed,
            ));
        }
    }
    let no_tools = fields
        .get("tool_choice")
        .is_some_and(|choice| choice == "none");
    for name in ["tools", "functions"] {
        let given = fields
            .get(name)
            .is_some_and(|value| value.as_array() != Some(&Vec::new()));
        if given && !no_tools {
            return Err(ApiError::param(name, format!("{name} are not supported")));
        }
    }
    for name in [
        "suffix",
        "audio",
        "guided_json",
        "guided_regex",
        "guided_choice",
    ] {
        if fields.get(name).is_some_and(|value| value != "") {
            return Err(ApiError::param(name, format!("{name} is not supported")));
        }
    }
    Ok(())
}

fn max_tokens(fields: &Fields) -> Result<Option<u32>, ApiError> {
    let newer = fields.whole("max_completion_tokens", 1, u32::MAX)?;
    let older = fields.whole("max_tokens", 1, u32::MAX)?;
    match (newer, older) {
        (Some(newer), Some(older)) if newer != older => Err(ApiError::param(
            "max_tokens",
            format!("max_tokens is {older} and max_completion_tokens is {newer}, give one"),
        )),
        (newer, older) => Ok(newer.or(older)),
    }
}

fn stops(fields: &Fields) -> Result<Vec<String>, ApiError> {
    let allowed = format!(
        "a string or a list of at most {STOPS_MAX} strings, each of 1 to {STOP_BYTES_MAX} bytes"
    );
    let one = |value: &Value| {
        let text = value.as_str()?;
        (1..=STOP_BYTES_MAX)
            .contains(&text.len())
            .then(|| text.to_owned())
    };
    let read = fields.read("stop", &allowed, |value| match value {
        Value::Array(list) if list.len() <= STOPS_MAX => list.iter().map(one).collect(),
        value => one(value).map(|text| vec![text]),
    })?;
    Ok(read.unwrap_or_default())
}

fn stop_tokens(fields: &Fields, limits: &Limits) -> Result<Vec<TokenId>, ApiError> {
    let allowed = format!(
        "a list of at most 64 tokens, each below {}",
        limits.vocabulary
    );
    let read = fields.read("stop_token_ids", &allowed, |value| {
        let list = value.as_array().filter(|list| list.len() <= 64)?;
        list.iter().map(|token| token_id(token, limits)).collect()
    })?;
    Ok(read.unwrap_or_default())
}

/// A token of the vocabulary.
pub(crate) fn token_id(value: &Value, limits: &Limits) -> Option<TokenId> {
    let id = u32::try_from(value.as_u64()?).ok()?;
    (id < limits.vocabulary).then_some(TokenId(id))
}

fn delivery(fields: &Fields) -> Result<Delivery, ApiError> {
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let Some(options) = fields.object("stream_options")? else {
        let reports = UsageReports::default();
        return Ok(if stream {
            Delivery::Stream(reports)
        } else {
            Delivery::Whole
        });
    };
    if !stream {
        let message = "stream_options is only allowed when stream is true";
        return Err(ApiError::param("stream_options", message));
    }
    let option = |name: &str| match options.get(name) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(value)) => Ok(*value),
        Some(other) => Err(ApiError::value(
            &format!("stream_options.{name}"),
            &show(other),
            "true or false",
        )),
    };
    Ok(Delivery::Stream(UsageReports {
        at_the_end: option("include_usage")?,
        in_every_chunk: option("continuous_usage_stats")?,
    }))
}

/// Not of OpenAI: the name and the direction that other servers use.
fn priority(fields: &Fields) -> Result<i32, ApiError> {
    let allowed = "a whole number from -1000 to 1000";
    let read = |value: &Value| {
        let number = value
            .as_i64()
            .filter(|number| (-1000..=1000).contains(number))?;
        i32::try_from(number).ok()
    };
    Ok(fields.read("priority", allowed, read)?.unwrap_or(0))
}

/// Any whole number of 64 bits; a negative one is as good as a positive one.
fn seed(fields: &Fields) -> Result<Option<u64>, ApiError> {
    fields.read("seed", "a whole number of at most 64 bits", |value| {
        value
            .as_u64()
            .or_else(|| value.as_i64().map(i64::cast_unsigned))
    })
}

fn sampling(
    fields: &Fields,
    limits: &Limits,
    temperature: f32,
) -> Result<SamplingParams, ApiError> {
    let number =
        |name: &str, default: f32| Ok::<_, ApiError>(fields.number(name)?.map_or(default, narrow));
    // Some clients say -1 for "no limit".
    let top_k = match fields.get("top_k").and_then(Value::as_i64) {
        Some(-1) => 0,
        _ => fields.whole("top_k", 0, u32::MAX)?.unwrap_or(0),
    };
    let sampling = SamplingParams {
        temperature: number("temperature", temperature)?,
        top_k,
        top_p: number("top_p", 1.0)?,
        min_p: number("min_p", 0.0)?,
        repetition_penalty: number("repetition_penalty", 1.0)?,
        presence_penalty: number("presence_penalty", 0.0)?,
        frequency_penalty: number("frequency_penalty", 0.0)?,
        logit_bias: logit_bias(fields, limits)?,
        seed: 0,
        logprobs: None,
    };
    sampling.validate()?;
    Ok(sampling)
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "rounding is meant; what is out of range becomes infinite and is refused"
)]
fn narrow(value: f64) -> f32 {
    value as f32
}

fn logit_bias(fields: &Fields, limits: &Limits) -> Result<Vec<(TokenId, f32)>, ApiError> {
    let Some(map) = fields.object("logit_bias")? else {
        return Ok(Vec::new());
    };
    if map.len() > 1024 {
        let count = format!("of {} entries", map.len());
        return Err(ApiError::value(
            "logit_bias",
            &count,
            "of at most 1024 entries",
        ));
    }
    map.iter()
        .map(|(key, value)| {
            let token = key.parse().ok().filter(|&id: &u32| id < limits.vocabulary);
            let (Some(id), Some(bias)) = (token, value.as_f64()) else {
                let entry = format!("{{{key:?}: {}}}", show(value));
                let allowed = format!(
                    "a map from tokens below {} to numbers between -100 and 100",
                    limits.vocabulary
                );
                return Err(ApiError::value("logit_bias", &entry, &allowed));
            };
            Ok((TokenId(id), narrow(bias)))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::api::json;

    fn limits() -> Limits {
        Limits {
            model: "oracle".to_owned(),
            max_n: 16,
            vocabulary: 1000,
        }
    }

    fn read(body: &str) -> Result<Params, ApiError> {
        Params::read(&json::parse(body.as_bytes()).unwrap(), &limits(), 1.0)
    }

    #[test]
    fn an_empty_request_has_the_documented_defaults() {
        let params = read("{}").unwrap();
        assert_eq!((params.n, params.max_tokens, params.seed), (1, None, None));
        assert_eq!(params.delivery, Delivery::Whole);
        assert_eq!(params.end_tokens, EndTokens::Heeded);
        assert_eq!(
            params.sampling,
            SamplingParams {
                temperature: 1.0,
                ..Default::default()
            }
        );
    }

    #[test]
    fn all_parameters_are_read() {
        let params = read(
            r#"{"model": "oracle", "n": 2, "best_of": 2, "max_completion_tokens": 7,
                "stop": ["a", "b", "c", "d", "e"], "stop_token_ids": [5], "ignore_eos": true,
                "stream": true, "stream_options": {"include_usage": true}, "seed": -1,
                "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1,
                "repetition_penalty": 1.5, "presence_penalty": -2, "frequency_penalty": 2,
                "logit_bias": {"7": -100}, "user": "me", "metadata": {}, "tools": [],
                "response_format": {"type": "text"}, "surprise": 1}"#,
        )
        .unwrap();
        assert_eq!(
            (params.n, params.max_tokens, params.seed),
            (2, Some(7), Some(u64::MAX))
        );
        assert_eq!(params.stops, ["a", "b", "c", "d", "e"]);
        assert_eq!(params.stop_tokens, [TokenId(5)]);
        assert_eq!(params.end_tokens, EndTokens::Ignored);
        let reports = UsageReports {
            at_the_end: true,
            in_every_chunk: false,
        };
        assert_eq!(params.delivery, Delivery::Stream(reports));
        let expected = SamplingParams {
            temperature: 0.5,
            top_k: 40,
            top_p: 0.9,
            min_p: 0.1,
            repetition_penalty: 1.5,
            presence_penalty: -2.0,
            frequency_penalty: 2.0,
            logit_bias: vec![(TokenId(7), -100.0)],
            ..Default::default()
        };
        assert_eq!(params.sampling, expected);
        assert_eq!(read(r#"{"stop": "x"}"#).unwrap().stops, ["x"]);
        assert_eq!(read(r#"{"top_k": -1}"#).unwrap().sampling.top_k, 0);
    }

    #[test]
    fn each_wrong_parameter_is_named() {
        let bodies = [
            r#"{"model": "gpt-4"}"#,
            r#"{"model": 4}"#,
            r#"{"n": 0}"#,
            r#"{"n": 17}"#,
            r#"{"n": 2, "best_of": 3}"#,
            r#"{"max_tokens": 0}"#,
            r#"{"max_tokens": -5}"#,
            r#"{"max_tokens": 1, "max_completion_tokens": 2}"#,
            r#"{"stop": ""}"#,
            r#"{"stop": [1]}"#,
            r#"{"stop_token_ids": [1000]}"#,
            r#"{"stream": "yes"}"#,
            r#"{"stream_options": {"include_usage": true}}"#,
            r#"{"stream": true, "stream_options": {"include_usage": 1}}"#,
            r#"{"seed": 1.5}"#,
            r#"{"priority": 1001}"#,
            r#"{"temperature": -0.1}"#,
            r#"{"temperature": 1e300}"#,
            r#"{"temperature": "hot"}"#,
            r#"{"top_p": 0}"#,
            r#"{"top_k": -2}"#,
            r#"{"min_p": 2}"#,
            r#"{"repetition_penalty": 0}"#,
            r#"{"presence_penalty": 3}"#,
            r#"{"frequency_penalty": -3}"#,
            r#"{"logit_bias": {"x": 1}}"#,
            r#"{"logit_bias": {"1": 101}}"#,
            r#"{"response_format": {"type": "json_object"}}"#,
            r#"{"tools": [{"type": "function"}]}"#,
            r#"{"suffix": "x"}"#,
        ];
        let said: Vec<_> = bodies
            .iter()
            .map(|body| read(body).expect_err(body).to_string())
            .collect();
        expect![[r#"
            the model "gpt-4" is not served here, only "oracle"
            model is 4, must be a string
            n is 0, must be a whole number from 1 to 16
            n is 17, must be a whole number from 1 to 16
            best_of is 3, must be equal to n, which is 2
            max_tokens is 0, must be a whole number from 1 to 4294967295
            max_tokens is -5, must be a whole number from 1 to 4294967295
            max_tokens is 1 and max_completion_tokens is 2, give one
            stop is "", must be a string or a list of at most 16 strings, each of 1 to 1024 bytes
            stop is [1], must be a string or a list of at most 16 strings, each of 1 to 1024 bytes
            stop_token_ids is [1000], must be a list of at most 64 tokens, each below 1000
            stream is "yes", must be true or false
            stream_options is only allowed when stream is true
            stream_options.include_usage is 1, must be true or false
            seed is 1.5, must be a whole number of at most 64 bits
            priority is 1001, must be a whole number from -1000 to 1000
            temperature is -0.1, must be between 0 and 2
            temperature is inf, must be between 0 and 2
            temperature is "hot", must be a number
            top_p is 0, must be above 0 and at most 1
            top_k is -2, must be a whole number from 0 to 4294967295
            min_p is 2, must be between 0 and 1
            repetition_penalty is 0, must be between 0.01 and 100
            presence_penalty is 3, must be between -2 and 2
            frequency_penalty is -3, must be between -2 and 2
            logit_bias is {"x": 1}, must be a map from tokens below 1000 to numbers between -100 and 100
            logit_bias is 101, must be between -100 and 100
            response_format.type is "json_object", must be "text"; constrained output is not supported
            tools are not supported
            suffix is not supported"#]].assert_eq(&said.join("\n"));
    }
}
