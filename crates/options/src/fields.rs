//! The names of the fields that serde reads a structure from.

use std::fmt;

use serde::de::{Deserializer, Error as _, Visitor};
use serde::{Deserialize, forward_to_deserialize_any};

/// The names of the fields of `T` as they are written, in order; none where it is no structure.
pub fn fields<'de, T: Deserialize<'de>>() -> &'static [&'static str] {
    match T::deserialize(Asked) {
        Err(Answer(fields)) => fields,
        Ok(_) => &[],
    }
}

/// Asks a type which fields it has, by failing with them.
struct Asked;

#[derive(Debug)]
struct Answer(&'static [&'static str]);

impl fmt::Display for Answer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0.join(", "))
    }
}

impl std::error::Error for Answer {}

impl serde::de::Error for Answer {
    fn custom<T: fmt::Display>(_: T) -> Self {
        Self(&[])
    }
}

impl<'de> Deserializer<'de> for Asked {
    type Error = Answer;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Answer> {
        Err(Answer::custom("no structure"))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Answer> {
        Err(Answer(fields))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
        unit unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}
