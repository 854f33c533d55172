//! Request bodies: strict JSON, read field by field with errors that name the field.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::error::{ApiError, shorten};

/// A JSON value in which no object names a key twice.
struct Unique(Value);

/// Starts the message of the error about a key that is there twice. Then comes the key as JSON.
const TWICE: &str = "duplicate key ";

struct UniqueVisitor;

impl<'de> Visitor<'de> for UniqueVisitor {
    type Value = Unique;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Unique, E> {
        Ok(Unique(Value::Bool(value)))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Unique, E> {
        Ok(Unique(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Unique, E> {
        Ok(Unique(value.into()))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Unique, E> {
        let number = Number::from_f64(value).ok_or_else(|| E::custom("number out of range"))?;
        Ok(Unique(Value::Number(number)))
    }

    fn visit_str<E>(self, value: &str) -> Result<Unique, E> {
        Ok(Unique(value.into()))
    }

    fn visit_string<E>(self, value: String) -> Result<Unique, E> {
        Ok(Unique(Value::String(value)))
    }

    fn visit_unit<E>(self) -> Result<Unique, E> {
        Ok(Unique(Value::Null))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Unique, A::Error> {
        let mut list = Vec::new();
        while let Some(Unique(item)) = items.next_element()? {
            list.push(item);
        }
        Ok(Unique(Value::Array(list)))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Unique, A::Error> {
        let mut map = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if map.contains_key(&key) {
                let key = Value::from(shorten(&key));
                return Err(A::Error::custom(format_args!("{TWICE}{key}")));
            }
            let Unique(value) = entries.next_value()?;
            map.insert(key, value);
        }
        Ok(Unique(Value::Object(map)))
    }
}

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(UniqueVisitor)
    }
}

/// Reads a body that must be one JSON object without repeated keys.
///
/// # Errors
///
/// 400: not UTF-8, not JSON, a repeated key, or not an object.
pub(crate) fn parse(body: &[u8]) -> Result<Fields, ApiError> {
    let text = std::str::from_utf8(body).map_err(|error| {
        let at = error.valid_up_to();
        ApiError::invalid(format!("the request body is not UTF-8 from byte {at} on"))
    })?;
    if text.trim().is_empty() {
        return Err(ApiError::invalid(
            "the request body is empty, must be a JSON object",
        ));
    }
    let value = match serde_json::from_str(text) {
        Ok(Unique(value)) => value,
        Err(error) => {
            let what = error.to_string();
            let twice = what
                .strip_prefix(TWICE)
                .and_then(|rest| rest.rsplit_once(" at line "));
            return Err(match twice {
                Some((key, line)) => {
                    let key: String = serde_json::from_str(key).unwrap_or_default();
                    let message =
                        format!("the JSON body has the key {key:?} twice, at line {line}");
                    ApiError::param(key, message)
                }
                None => ApiError::invalid(format!("the request body is not valid JSON: {what}")),
            });
        }
    };
    match value {
        Value::Object(map) => Ok(Fields(map)),
        other => {
            let kind = kind(&other);
            Err(ApiError::invalid(format!(
                "the request body is {kind}, must be a JSON object"
            )))
        }
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Array(_) => "an array",
        Value::Bool(_) => "a boolean",
        Value::Null => "null",
        Value::Number(_) => "a number",
        Value::Object(_) => "an object",
        Value::String(_) => "a string",
    }
}

/// A value as the client wrote it, cut to a readable length.
pub(crate) fn show(value: &Value) -> String {
    shorten(&value.to_string())
}

/// The fields of a request. `null` is the same as not there.
#[derive(Debug)]
pub(crate) struct Fields(Map<String, Value>);

impl Fields {
    /// A field, unless it is absent or null.
    pub(crate) fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    /// Reads a field; `read` says `None` to what is not allowed.
    pub(crate) fn read<'a, T>(
        &'a self,
        name: &str,
        allowed: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        read(value)
            .map(Some)
            .ok_or_else(|| ApiError::value(name, &show(value), allowed))
    }

    pub(crate) fn string(&self, name: &str) -> Result<Option<&str>, ApiError> {
        self.read(name, "a string", Value::as_str)
    }

    pub(crate) fn boolean(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.read(name, "true or false", Value::as_bool)
    }

    /// A whole number from `min` to `max`.
    pub(crate) fn whole(&self, name: &str, min: u32, max: u32) -> Result<Option<u32>, ApiError> {
        let allowed = format!("a whole number from {min} to {max}");
        self.read(name, &allowed, |value| {
            let number = u32::try_from(value.as_u64()?).ok()?;
            (min..=max).contains(&number).then_some(number)
        })
    }

    /// Any number; its range is somebody else's business.
    pub(crate) fn number(&self, name: &str) -> Result<Option<f64>, ApiError> {
        self.read(name, "a number", Value::as_f64)
    }

    /// An object inside this one.
    pub(crate) fn object(&self, name: &str) -> Result<Option<&Map<String, Value>>, ApiError> {
        self.read(name, "an object", Value::as_object)
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;

    #[test]
    fn what_is_not_one_clean_object_is_refused() {
        let deep = "[".repeat(5000);
        let bodies: [&[u8]; 10] = [
            b"",
            b"\xff\xfe",
            b"{\"a\": \"\xc3\x28\"}",
            b"{\"a\": 1, \"a\": 2}",
            b"{\"messages\": [{\"role\": \"user\", \"role\": \"user\"}]}",
            b"{\"a\": 1",
            b"{\"temperature\": NaN}",
            b"{\"temperature\": 1e999}",
            b"[1]",
            deep.as_bytes(),
        ];
        let said: Vec<_> = bodies
            .iter()
            .map(|body| parse(body).expect_err("must be refused").to_string())
            .collect();
        expect![[r#"
            the request body is empty, must be a JSON object
            the request body is not UTF-8 from byte 0 on
            the request body is not UTF-8 from byte 7 on
            the JSON body has the key "a" twice, at line 1 column 12
            the JSON body has the key "role" twice, at line 1 column 37
            the request body is not valid JSON: EOF while parsing an object at line 1 column 7
            the request body is not valid JSON: expected value at line 1 column 17
            the request body is not valid JSON: number out of range at line 1 column 21
            the request body is an array, must be a JSON object
            the request body is not valid JSON: recursion limit exceeded at line 1 column 128"#]]
        .assert_eq(&said.join("\n"));
    }

    #[test]
    fn null_is_absent_and_types_are_checked() {
        let fields = parse(br#"{"a": null, "b": 3, "c": "x", "d": 1.5, "e": -1}"#).unwrap();
        assert_eq!(fields.whole("a", 1, 5), Ok(None));
        assert_eq!(fields.whole("b", 1, 5), Ok(Some(3)));
        assert_eq!(fields.number("d"), Ok(Some(1.5)));
        for name in ["c", "d", "e"] {
            let error = fields.whole(name, 1, 5).unwrap_err();
            assert!(
                error
                    .to_string()
                    .contains("must be a whole number from 1 to 5"),
                "{error}"
            );
        }
        assert!(fields.boolean("b").is_err());
        assert!(fields.string("b").is_err());
        assert!(fields.object("c").is_err());
    }
}
