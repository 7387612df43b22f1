//! Reads values with serde, and reports all mistakes in one pass.
//!
//! A value is a JSON value: TOML and flags are converted into one first. [`Origins`] keep the
//! origin of each key and its value, by the path (`vhost_user.socket`, `layers.0.time`). serde
//! stops at the first mistake. So the mistake is recorded, the entry with the mistake is omitted,
//! and the value is read again, until there is no mistake. An omitted entry has its default.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt::{self, Display};
use std::path::Path;

use serde::de::value::StrDeserializer;
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, Expected, IntoDeserializer, MapAccess,
    SeqAccess, Unexpected, Visitor,
};
use serde::forward_to_deserialize_any;
use serde_json::{Map, Value};

use crate::problem::{Origins, Problem, Problems};
use crate::suggestion;

/// The most mistakes that are reported of one value.
const MISTAKES_MAX: usize = 64;
/// The name that serde gives the text of a path. Only this distinguishes a path from other texts.
const PATH: &str = "path string";
/// The name that serde gives a `NonZeroU64`.
const NONZERO: &str = "a nonzero u64";

/// The name of a value in messages.
#[derive(Clone, Copy, Debug)]
pub enum Title<'a> {
    /// A table of TOML with this name; an element of a list of tables if `is_list`.
    Table {
        /// The name.
        name: &'a str,
        /// Whether there may be several: `[[disk]]`.
        is_list: bool,
    },
    /// A phrase, for example `the layer delay`.
    Words(&'a str),
}

impl Title<'_> {
    /// The title of the value at a path within this one; an empty path is this one.
    pub fn of(&self, path: &str) -> String {
        let is_name = |part: &&str| part.parse::<usize>().is_err();
        let path: Vec<&str> = path.split('.').filter(|part| !part.is_empty()).collect();
        let path: Vec<&str> = path.into_iter().filter(is_name).collect();
        match (self, path.is_empty()) {
            (Self::Table { name, is_list: true }, true) => format!("[[{name}]]"),
            (Self::Table { name, is_list: false }, true) => format!("[{name}]"),
            (Self::Table { name, .. }, false) => format!("[{name}.{}]", path.join(".")),
            (Self::Words(words), true) => (*words).to_owned(),
            (Self::Words(_), false) => format!("`{}`", path.join(".")),
        }
    }
}

/// A value, and where it was written.
#[derive(Clone, Copy, Debug)]
pub struct Written<'a> {
    /// The value.
    pub value: &'a Value,
    /// The name of the value in messages.
    pub title: Title<'a>,
    /// The path of the value within `origins`; empty for the whole.
    pub path: &'a str,
    /// The origins of the value and of its parts.
    pub origins: &'a Origins,
    /// The folder of relative paths. If there is none, paths stay as they are.
    pub folder: Option<&'a Path>,
}

/// Reads a `T`, whose fields should have defaults. Adds mistakes to `problems` in the order of
/// their origins, and omits the entries with mistakes. Returns `None` if the other entries do not
/// make a `T`.
pub fn read<T: DeserializeOwned>(written: &Written<'_>, problems: &mut Problems) -> Option<T> {
    let shared = Shared { written, omitted: RefCell::default() };
    let mut found: Vec<Problem> = Vec::new();
    let mut result = None;
    while found.len() < MISTAKES_MAX {
        let node = Node { value: written.value, path: String::new(), key: "", shared: &shared };
        match T::deserialize(node) {
            Ok(read) => {
                result = Some(read);
                break;
            }
            Err(mistake) => {
                let origin = mistake.origin.unwrap_or_default();
                found.push(mistake.kind.problem(&origin, written));
                // If no entry can be omitted, the loop would not end.
                if origin.entry.is_empty() || !shared.omitted.borrow_mut().insert(origin.entry) {
                    break;
                }
            }
        }
    }
    // serde reports mistakes in the order in which it reads the fields.
    found.sort_by_key(|problem| problem.origin.position());
    problems.0.extend(found);
    result
}

struct Shared<'a> {
    written: &'a Written<'a>,
    /// The paths of the omitted entries.
    omitted: RefCell<BTreeSet<String>>,
}

/// The kinds of mistakes.
#[derive(Debug)]
enum MistakeKind {
    Custom(String),
    Type { found: &'static str, expected: String },
    Range { expected: String },
    Word { found: String, known: &'static [&'static str] },
    Field { name: String, known: &'static [&'static str] },
    Missing(&'static str),
    Path,
}

/// Where a mistake is.
#[derive(Debug, Default)]
struct MistakePlace {
    /// The path of the innermost entry of a table that contains the mistake.
    entry: String,
    key: String,
    /// The path of the table.
    table: String,
    is_key: bool,
}

#[derive(Debug)]
struct Mistake {
    kind: Box<MistakeKind>,
    origin: Option<MistakePlace>,
}

impl From<MistakeKind> for Mistake {
    fn from(kind: MistakeKind) -> Self {
        Self { kind: Box::new(kind), origin: None }
    }
}

impl Mistake {
    /// Places the mistake in an entry of a table, unless it is already placed in an inner entry.
    fn within(mut self, table: &str, key: &str, is_key: bool) -> Self {
        if self.origin.is_none() {
            let entry = join(table, key);
            self.origin =
                Some(MistakePlace { entry, key: key.into(), table: table.into(), is_key });
        }
        self
    }
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

impl Display for Mistake {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:?}", self.kind)
    }
}

impl std::error::Error for Mistake {}

impl serde::de::Error for Mistake {
    fn custom<T: Display>(text: T) -> Self {
        MistakeKind::Custom(text.to_string()).into()
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        let found = match found {
            Unexpected::Bool(_) => "true or false",
            Unexpected::Unsigned(_) | Unexpected::Signed(_) => "a whole number",
            Unexpected::Float(_) => "a number",
            Unexpected::Seq => "a list",
            Unexpected::Map => "a table",
            Unexpected::Unit | Unexpected::Option => "null",
            _ => "a text",
        };
        MistakeKind::Type { found, expected: expected.to_string() }.into()
    }

    fn invalid_value(_: Unexpected<'_>, expected: &dyn Expected) -> Self {
        MistakeKind::Range { expected: expected.to_string() }.into()
    }

    fn unknown_variant(found: &str, known: &'static [&'static str]) -> Self {
        MistakeKind::Word { found: found.to_owned(), known }.into()
    }

    fn unknown_field(name: &str, known: &'static [&'static str]) -> Self {
        MistakeKind::Field { name: name.to_owned(), known }.into()
    }

    fn missing_field(name: &'static str) -> Self {
        MistakeKind::Missing(name).into()
    }
}

/// The expected type in the words of messages, and an example of a value.
fn expected_in_words(expected: &str) -> (&str, &str) {
    match expected {
        "a boolean" => ("true or false", "true"),
        "a string" | PATH => ("a text", "\"…\""),
        "a size" => ("a size", "\"10G\""),
        "a time" => ("a time", "\"5ms\""),
        "f32" | "f64" => ("a number", "0.01"),
        "a sequence" => ("a list", "[…]"),
        "u8" | "u16" | "u32" | "u64" | "usize" | NONZERO => ("a whole number", "1"),
        _ if expected.starts_with("struct") || expected.ends_with("map") => ("a table", "{ … }"),
        other => (other, "…"),
    }
}

impl MistakeKind {
    fn problem(&self, location: &MistakePlace, written: &Written<'_>) -> Problem {
        let origins = written.origins;
        let path = match (written.path.is_empty(), location.entry.is_empty()) {
            (_, true) => written.path.to_owned(),
            (true, false) => location.entry.clone(),
            (false, false) => join(written.path, &location.entry),
        };
        let origin = if location.is_key { origins.of_key(&path) } else { origins.of(&path) };
        let (key, title) = (&location.key, written.title.of(&location.table));
        // A mistake in the whole value has no key.
        let subject = if key.is_empty() { title.clone() } else { format!("`{key}` of {title}") };
        let (message, remedy) = match self {
            Self::Custom(text) => {
                let (text, remedy) = match text.split_once(": write it like ") {
                    Some((text, example)) => (text, format!("write it like {example}")),
                    None => (text.as_str(), String::new()),
                };
                (format!("{subject}: {text}"), remedy)
            }
            Self::Type { found, expected } => {
                let (expected, example) = expected_in_words(expected);
                let message = format!("{subject} has to be {expected}, and is {found}");
                let key = if key.is_empty() { "" } else { &format!("{key} = ") };
                (message, format!("write it like `{key}{example}`"))
            }
            Self::Range { expected } => {
                let remedy = match expected.as_str() {
                    "u8" => format!("choose a number from 0 to {}", u8::MAX),
                    "u16" => format!("choose a number from 0 to {}", u16::MAX),
                    "u32" => format!("choose a number from 0 to {}", u32::MAX),
                    "u64" | "usize" => "choose a number from 0 up".to_owned(),
                    NONZERO => "choose a number from 1 up".to_owned(),
                    other => format!("write it like `{key} = {}`", expected_in_words(other).1),
                };
                (format!("{subject} is out of range"), remedy)
            }
            Self::Word { found, known } => {
                let found: String = found.chars().take(60).collect();
                (format!("{subject} cannot be {found:?}"), suggestion(&found, known))
            }
            Self::Field { name, known } => {
                let shown: String = name.chars().take(60).collect();
                (format!("there is no key `{shown}` in {title}"), suggestion(name, known))
            }
            Self::Missing(field) => {
                let title = written.title.of(&location.entry);
                (format!("{title} has no `{field}`"), format!("add `{field} = …`"))
            }
            Self::Path => (
                format!("{subject} is not a path"),
                "name a file, or leave the line out".to_owned(),
            ),
        };
        Problem::new(origin, message, remedy)
    }
}

/// A value at a path within the value that is read.
struct Node<'a, 'w> {
    value: &'a Value,
    path: String,
    key: &'a str,
    shared: &'a Shared<'w>,
}

impl Node<'_, '_> {
    /// The found value, for messages.
    fn unexpected(&self) -> Unexpected<'_> {
        match self.value {
            Value::Null => Unexpected::Unit,
            Value::Bool(is) => Unexpected::Bool(*is),
            Value::Number(number) => number.as_u64().map_or_else(
                || number.as_i64().map_or(Unexpected::Float(0.0), Unexpected::Signed),
                Unexpected::Unsigned,
            ),
            Value::String(text) => Unexpected::Str(text),
            Value::Array(_) => Unexpected::Seq,
            Value::Object(_) => Unexpected::Map,
        }
    }

    fn wrong_type(&self, expected: &dyn Expected) -> Mistake {
        serde::de::Error::invalid_type(self.unexpected(), expected)
    }
}

impl<'de> Deserializer<'de> for Node<'_, '_> {
    type Error = Mistake;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Mistake> {
        match self.value {
            Value::Null => visitor.visit_unit(),
            Value::Bool(is) => visitor.visit_bool(*is),
            Value::Number(number) => match (number.as_u64(), number.as_i64()) {
                (Some(number), _) => visitor.visit_u64(number),
                (None, Some(number)) => visitor.visit_i64(number),
                (None, None) => visitor.visit_f64(number.as_f64().unwrap_or(f64::NAN)),
            },
            Value::String(text) => visitor.visit_str(text),
            Value::Array(items) => {
                visitor.visit_seq(Items { items: items.iter().enumerate(), node: &self })
            }
            Value::Object(entries) => visitor.visit_map(Entries::new(entries, &self)),
        }
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Mistake> {
        let is_path = (&visitor as &dyn Expected).to_string() == PATH;
        let Value::String(text) = self.value else { return self.deserialize_any(visitor) };
        if !is_path {
            return visitor.visit_str(text);
        }
        if text.is_empty() || text.contains('\0') {
            return Err(MistakeKind::Path.into());
        }
        match self.shared.written.folder {
            _ if is_uri(text) => visitor.visit_str(text),
            Some(folder) => match folder.join(text).into_os_string().into_string() {
                Ok(path) => visitor.visit_string(path),
                Err(_) => Err(MistakeKind::Path.into()),
            },
            None => visitor.visit_str(text),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Mistake> {
        if self.value.is_null() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Mistake> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Mistake> {
        match self.value {
            Value::String(text) => {
                let text: StrDeserializer<'_, Mistake> = text.as_str().into_deserializer();
                visitor.visit_enum(text)
            }
            _ => Err(self.wrong_type(&"a string")),
        }
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Mistake> {
        match self.value {
            // From a list, serde would read the fields in their order.
            Value::Object(entries) => visitor.visit_map(Entries::new(entries, &self)),
            _ => Err(self.wrong_type(&visitor)),
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str bytes byte_buf unit
        unit_struct seq tuple tuple_struct map identifier ignored_any
    }
}

/// The items of a list.
struct Items<'a, 'w> {
    items: std::iter::Enumerate<std::slice::Iter<'a, Value>>,
    node: &'a Node<'a, 'w>,
}

impl<'de> SeqAccess<'de> for Items<'_, '_> {
    type Error = Mistake;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, Mistake> {
        let Some((index, value)) = self.items.next() else { return Ok(None) };
        let path = join(&self.node.path, &index.to_string());
        let node = Node { value, path, key: self.node.key, shared: self.node.shared };
        seed.deserialize(node).map(Some)
    }
}

/// The entries of a table.
struct Entries<'a, 'w> {
    iter: serde_json::map::Iter<'a>,
    current: Option<(&'a str, &'a Value)>,
    node: &'a Node<'a, 'w>,
}

impl<'a, 'w> Entries<'a, 'w> {
    fn new(entries: &'a Map<String, Value>, node: &'a Node<'a, 'w>) -> Self {
        Self { iter: entries.iter(), current: None, node }
    }
}

impl<'de> MapAccess<'de> for Entries<'_, '_> {
    type Error = Mistake;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Mistake> {
        let table = &self.node.path;
        let omitted = &self.node.shared.omitted;
        let is_kept = |(key, _): &(&String, _)| !omitted.borrow().contains(&join(table, key));
        let Some((key, value)) = self.iter.by_ref().find(is_kept) else { return Ok(None) };
        self.current = Some((key, value));
        let name: StrDeserializer<'_, Mistake> = key.as_str().into_deserializer();
        seed.deserialize(name).map(Some).map_err(|mistake| mistake.within(table, key, true))
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Mistake> {
        let (key, value) = self.current.take().unwrap_or(("", &Value::Null));
        let table = &self.node.path;
        let node = Node { value, path: join(table, key), key, shared: self.node.shared };
        seed.deserialize(node).map_err(|mistake| mistake.within(table, key, false))
    }
}

/// Whether a text is a URI, which does not depend on a folder as a path does.
fn is_uri(text: &str) -> bool {
    let is_scheme = |scheme: &str| {
        scheme.starts_with(|first: char| first.is_ascii_alphabetic())
            && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
    };
    text.split_once("://").is_some_and(|(scheme, _)| is_scheme(scheme))
}

#[cfg(test)]
mod tests;
