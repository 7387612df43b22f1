//! The parameters behind the question mark of a path, read and written with serde.

use std::fmt::{self, Write as _};

use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{Deserializer, IntoDeserializer, Visitor};
use serde::forward_to_deserialize_any;

use super::Query;
use crate::http::escape;

/// The most parameters of a request.
const PARAMETERS_MAX: usize = 1024;

/// Why the parameters of a path cannot be read: one sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueryError(String);

impl fmt::Display for QueryError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for QueryError {}

impl serde::de::Error for QueryError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self(message.to_string())
    }

    fn unknown_field(field: &str, _: &'static [&'static str]) -> Self {
        Self(format!("there is no parameter {field:?}"))
    }
}

/// The text of `query` behind a path, with the question mark; empty without parameters. What is
/// null or false is left out.
pub fn write_query<Q: Query>(query: &Q) -> String {
    let mut text = String::new();
    let Ok(serde_json::Value::Object(fields)) = serde_json::to_value(query) else { return text };
    // In the order in which they are documented.
    for (name, _) in Q::PARAMETERS {
        let values = match fields.get(*name) {
            Some(serde_json::Value::Array(values)) => values.as_slice(),
            Some(value) => std::slice::from_ref(value),
            None => &[],
        };
        for value in values {
            let value = match value {
                serde_json::Value::Null | serde_json::Value::Bool(false) => continue,
                serde_json::Value::String(value) => escape(value),
                value => escape(&value.to_string()),
            };
            let mark = if text.is_empty() { '?' } else { '&' };
            let _ = write!(text, "{mark}{name}={value}");
        }
    }
    text
}

/// Reads the parameters `text`, without the question mark.
///
/// # Errors
/// When a parameter has no readable value, or is not known to a type that refuses unknown ones.
pub fn read_query<Q: Query>(text: &str) -> Result<Q, QueryError> {
    if Q::PARAMETERS.is_empty() {
        return Ok(Q::default());
    }
    let mut parameters: Vec<(String, Parameter)> = Vec::new();
    let parts = text.split('&').filter(|part| !part.is_empty());
    for (number, part) in parts.enumerate() {
        if number >= PARAMETERS_MAX {
            return Err(QueryError(format!("there are more than {PARAMETERS_MAX} parameters")));
        }
        let (name, value) = part.split_once('=').unwrap_or((part, ""));
        let (name, value) = (decode(name)?, decode(value)?);
        match parameters.iter_mut().find(|(known, _)| *known == name) {
            Some((_, parameter)) => parameter.values.push(value),
            None => {
                parameters.push((name.clone(), Parameter { name, values: vec![value] }));
            }
        }
    }
    Q::deserialize(MapDeserializer::new(parameters.into_iter()))
}

/// Decodes a name or a value.
fn decode(text: &str) -> Result<String, QueryError> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        let digit = |byte: Option<u8>| byte.and_then(|byte| char::from(byte).to_digit(16));
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => match (digit(rest.next()), digit(rest.next())) {
                (Some(high), Some(low)) => (high * 16 + low) as u8,
                _ => return Err(QueryError(format!("{text:?} is not percent-encoded"))),
            },
            byte => byte,
        });
    }
    String::from_utf8(bytes).map_err(|_| QueryError(format!("{text:?} is not UTF-8")))
}

/// A parameter with all of its values.
#[derive(Clone, Debug)]
struct Parameter {
    name: String,
    values: Vec<String>,
}

impl Parameter {
    /// The value of a parameter that is not a list.
    fn only(&mut self) -> Result<String, QueryError> {
        match self.values.len() {
            1 => Ok(self.values.remove(0)),
            _ => Err(QueryError(format!("{} is given more than once", self.name))),
        }
    }

    fn parsed<T: std::str::FromStr>(mut self, what: &str) -> Result<T, QueryError> {
        let value = self.only()?;
        let wrong = |_| QueryError(format!("{} is {value:?}, which is not {what}", self.name));
        value.parse().map_err(wrong)
    }
}

impl IntoDeserializer<'_, QueryError> for Parameter {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for Parameter {
    type Error = QueryError;

    fn deserialize_any<V: Visitor<'de>>(mut self, visitor: V) -> Result<V::Value, QueryError> {
        visitor.visit_string(self.only()?)
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, QueryError> {
        visitor.visit_bool(self.parsed("true or false")?)
    }

    fn deserialize_u64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, QueryError> {
        visitor.visit_u64(self.parsed("a whole number")?)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, QueryError> {
        visitor.visit_some(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, QueryError> {
        visitor.visit_seq(SeqDeserializer::new(self.values.into_iter()))
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, QueryError> {
        visitor.visit_unit()
    }

    forward_to_deserialize_any! {
        i8 i16 i32 i64 i128 u8 u16 u32 u128 f32 f64 char str string bytes byte_buf unit unit_struct
        newtype_struct tuple tuple_struct map struct enum identifier
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CacheQuery, DirtyQuery, RecordingQuery, RemoveQuery};

    #[test]
    fn what_is_written_is_read() {
        let caches = CacheQuery { disk: Some("a b&c=ä+".into()), points: 64, files: 0 };
        let text = write_query(&caches);
        assert_eq!(text, "?disk=a%20b%26c%3D%C3%A4%2B&points=64&files=0");
        assert_eq!(read_query::<CacheQuery>(&text[1..]).unwrap(), caches);
        let disk = vec!["a".into(), "b".into()];
        let recording = RecordingQuery { disk, pulse_ms: Some(20), ..RecordingQuery::default() };
        let text = write_query(&recording);
        assert_eq!(text, "?disk=a&disk=b&pulse_ms=20");
        assert_eq!(read_query::<RecordingQuery>(&text[1..]).unwrap(), recording);
        assert_eq!(write_query(&DirtyQuery::default()), "");
        assert_eq!(write_query(&()), "");
        read_query::<()>("anything=1").unwrap();
    }

    #[test]
    fn what_cannot_be_read_is_explained() {
        let wrong = |text: &str| read_query::<CacheQuery>(text).unwrap_err().to_string();
        assert_eq!(wrong("points=x"), "points is \"x\", which is not a whole number");
        assert_eq!(wrong("points=-1"), "points is \"-1\", which is not a whole number");
        assert_eq!(wrong("disk=a&disk=b"), "disk is given more than once");
        assert_eq!(wrong("disk=%f"), "\"%f\" is not percent-encoded");
        assert_eq!(wrong("disk=%ff"), "\"%ff\" is not UTF-8");
        assert!(wrong(&"a&".repeat(1025)).contains("more than 1024"));
        let wrong = |text: &str| read_query::<RemoveQuery>(text).unwrap_err().to_string();
        assert_eq!(wrong("force=yes"), "force is \"yes\", which is not true or false");
        assert_eq!(wrong("farce=true"), "there is no parameter \"farce\"");
        assert!(read_query::<RemoveQuery>("&force=true&").unwrap().force);
        // Later versions may have more parameters.
        assert_eq!(read_query::<CacheQuery>("depth=1&points=2").unwrap().points, 2);
    }
}
