//! Reading a TOML table key by key, with everything that is wrong noted by line.

use std::cell::RefCell;
use std::ops::Range;
use std::path::PathBuf;

use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue};

use fathom_options::{
    Place, Places, Problem, Problems, Title, Written, parse_bytes, parse_nanoseconds, suggestion,
};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::source::Source;

/// The numbers that TOML may hold: more would be lost on the way.
const INTEGER_MAX: u64 = i64::MAX as u64;
/// How many rows, groups and values queries may be allowed to hold.
pub(super) const HELD_RANGE: Range<u64> = 1..u64::MAX;

/// What the tables of one file share.
pub(super) struct Reading<'a> {
    pub(super) source: Source<'a>,
    pub(super) problems: RefCell<Vec<Problem>>,
}

impl Reading<'_> {
    pub(super) fn problem(&self, place: Place, message: impl Into<String>, remedy: &str) {
        self.problems.borrow_mut().push(Problem::new(place, message, remedy));
    }
}

/// A table whose keys are asked for one by one; what was never asked for is unknown.
pub(super) struct Table<'a> {
    reading: &'a Reading<'a>,
    /// How messages call it, for example `[daemon]`.
    title: String,
    /// What goes before a key's name in [`Places`].
    prefix: String,
    entries: &'a DeTable<'a>,
    known: Vec<&'static str>,
    places: Places,
}

impl<'a> Table<'a> {
    pub(super) fn new(
        reading: &'a Reading<'a>,
        title: &str,
        prefix: &str,
        table: &'a DeTable<'a>,
        span: &Range<usize>,
    ) -> Self {
        let places = Places::new(reading.source.place(span.start));
        let (title, prefix) = (title.to_owned(), prefix.to_owned());
        Self { reading, title, prefix, entries: table, known: Vec::new(), places }
    }

    /// The same table, whose keys are noted under their own names.
    pub(super) fn without_prefix(mut self) -> Self {
        self.prefix.clear();
        self
    }

    /// Where the table begins.
    pub(super) fn place(&self) -> Place {
        self.places.whole()
    }

    /// Where the value of `key` is, or else the table.
    pub(super) fn place_of(&self, key: &str) -> Place {
        self.places.of(&format!("{}{key}", self.prefix))
    }

    pub(super) fn problem(&self, place: Place, message: impl Into<String>, remedy: &str) {
        self.reading.problem(place, message, remedy);
    }

    fn value(&mut self, key: &'static str) -> Option<&'a Spanned<DeValue<'a>>> {
        self.known.push(key);
        let (_, value) = self.entries.iter().find(|(name, _)| name.get_ref() == key)?;
        let place = self.reading.source.place(value.span().start);
        self.places.note(&format!("{}{key}", self.prefix), place);
        Some(value)
    }

    fn wrong_type(&self, key: &str, value: &DeValue<'_>, wanted: &str, example: &str) {
        let found = match value {
            DeValue::String(_) => "a text",
            DeValue::Integer(_) => "a whole number",
            DeValue::Float(_) => "a number",
            DeValue::Boolean(_) => "true or false",
            DeValue::Datetime(_) => "a date",
            DeValue::Array(_) => "a list",
            DeValue::Table(_) => "a table",
        };
        let message = format!("`{key}` of {} has to be {wanted}, and is {found}", self.title);
        self.problem(self.place_of(key), message, &format!("write it like `{key} = {example}`"));
    }

    pub(super) fn string(&mut self, key: &'static str) -> Option<String> {
        let value = self.value(key)?.get_ref();
        let text = value.as_str().map(str::to_owned);
        if text.is_none() {
            self.wrong_type(key, value, "a text", "\"…\"");
        }
        text
    }

    /// A text of several lines. Where it stands in the file as it is, its first character is noted
    /// as `key:text`, so that places within it can be told.
    pub(super) fn text(&mut self, key: &'static str) -> Option<String> {
        let text = self.string(key)?;
        let (_, value) = self.entries.iter().find(|(name, _)| name.get_ref() == key)?;
        let (span, source) = (value.span(), &self.reading.source);
        let raw = source.text.get(span.clone()).unwrap_or_default();
        if let Some(at) = raw.find(text.as_str()) {
            let place = source.place(span.start + at);
            self.places.note(&format!("{}{key}:text", self.prefix), place);
        }
        Some(text)
    }

    /// Whether the key is there, be its value right or wrong. It has been asked for before.
    pub(super) fn has(&self, key: &str) -> bool {
        self.places.get(&format!("{}{key}", self.prefix)).is_some()
    }

    /// Whether the key is there. It need not have been asked for.
    pub(super) fn offers(&self, key: &str) -> bool {
        self.entries.iter().any(|(name, _)| name.get_ref() == key)
    }

    /// Any value, as JSON has it.
    pub(super) fn json(&mut self, key: &'static str) -> Option<serde_json::Value> {
        let value = self.value(key)?.get_ref();
        let json = json(value);
        if json.is_none() {
            let message = format!("`{key}` of {} holds what JSON does not have", self.title);
            let remedy = "keep to texts, finite numbers, true, false, lists and tables";
            self.problem(self.place_of(key), message, remedy);
        }
        json
    }

    pub(super) fn path(&mut self, key: &'static str) -> Option<PathBuf> {
        let text = self.string(key)?;
        if text.is_empty() || text.contains('\0') {
            let message = format!("`{key}` of {} is no path", self.title);
            self.problem(self.place_of(key), message, "name a file, or leave the line out");
            return None;
        }
        Some(self.reading.source.resolve(&text))
    }

    /// What the tables of the file share.
    pub(super) fn reading(&self) -> &'a Reading<'a> {
        self.reading
    }

    /// `path`, taken from the folder that the configuration is in.
    pub(super) fn resolve(&self, path: &str) -> PathBuf {
        self.reading.source.resolve(path)
    }

    pub(super) fn boolean(&mut self, key: &'static str) -> Option<bool> {
        let value = self.value(key)?.get_ref();
        let found = value.as_bool();
        if found.is_none() {
            self.wrong_type(key, value, "true or false", "true");
        }
        found
    }

    pub(super) fn integer(&mut self, key: &'static str, range: Range<u64>) -> Option<u64> {
        let value = self.value(key)?.get_ref();
        let DeValue::Integer(integer) = value else {
            self.wrong_type(key, value, "a whole number", &range.start.max(1).to_string());
            return None;
        };
        let found = u64::from_str_radix(integer.as_str(), integer.radix())
            .ok()
            .filter(|found| *found <= INTEGER_MAX && range.contains(found));
        if found.is_none() {
            let message = format!("`{key}` of {} is out of range", self.title);
            let remedy = if range.end > INTEGER_MAX {
                format!("choose a number from {} up", range.start)
            } else {
                format!("choose a number from {} to {}", range.start, range.end - 1)
            };
            self.problem(self.place_of(key), message, &remedy);
        }
        found
    }

    /// A whole number, or a text that `parse` understands.
    fn measure(
        &mut self,
        key: &'static str,
        wanted: &str,
        example: &str,
        parse: impl Fn(&str) -> Result<u64, fathom_options::UnitError>,
    ) -> Option<u64> {
        let value = self.value(key)?.get_ref();
        match value {
            DeValue::Integer(integer) => {
                let found = u64::from_str_radix(integer.as_str(), integer.radix()).ok();
                let found = found.filter(|found| *found <= INTEGER_MAX);
                if found.is_none() {
                    let message = format!("`{key}` of {} is out of range", self.title);
                    let remedy = format!("write it like `{key} = {example}`");
                    self.problem(self.place_of(key), message, &remedy);
                }
                found
            }
            DeValue::String(text) => match parse(text) {
                Ok(found) => Some(found),
                Err(error) => {
                    let message = format!("`{key}` of {}: {error}", self.title);
                    let remedy = format!("write it like `{key} = {example}`");
                    self.problem(self.place_of(key), message, &remedy);
                    None
                }
            },
            _ => {
                self.wrong_type(key, value, wanted, example);
                None
            }
        }
    }

    pub(super) fn bytes(&mut self, key: &'static str) -> Option<u64> {
        self.measure(key, "a size", "\"10G\"", parse_bytes)
    }

    pub(super) fn nanoseconds(&mut self, key: &'static str) -> Option<u64> {
        self.measure(key, "a time", "\"5ms\"", parse_nanoseconds)
    }

    /// One of a few words.
    pub(super) fn word<T: Copy>(
        &mut self,
        key: &'static str,
        words: &[(&'static str, T)],
    ) -> Option<T> {
        let text = self.string(key)?;
        if let Some((_, meaning)) = words.iter().find(|(word, _)| *word == text) {
            return Some(*meaning);
        }
        let names: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
        let message = format!("{text:?} is no `{key}` of {}", self.title);
        self.problem(self.place_of(key), message, &suggestion(&text, &names));
        None
    }

    /// A list of texts; a single text counts as a list of one.
    pub(super) fn strings(&mut self, key: &'static str) -> Option<Vec<String>> {
        let value = self.value(key)?.get_ref();
        let found = match value {
            DeValue::String(text) => Some(vec![text.to_string()]),
            DeValue::Array(array) => {
                array.iter().map(|item| item.get_ref().as_str().map(str::to_owned)).collect()
            }
            _ => None,
        };
        if found.is_none() {
            self.wrong_type(key, value, "a list of texts", "[\"…\"]");
        }
        found
    }

    /// A table within.
    pub(super) fn table(&mut self, key: &'static str, title: &str) -> Option<Self> {
        let spanned = self.value(key)?;
        let Some(table) = spanned.get_ref().as_table() else {
            self.wrong_type(key, spanned.get_ref(), "a table", "{ … }");
            return None;
        };
        let prefix = format!("{}{key}.", self.prefix);
        Some(Self::new(self.reading, title, &prefix, table, &spanned.span()))
    }

    /// A list of tables within.
    pub(super) fn tables(&mut self, key: &'static str, title: &str) -> Vec<Self> {
        let Some(spanned) = self.value(key) else { return Vec::new() };
        let Some(array) = spanned.get_ref().as_array() else {
            let message = format!("`{key}` has to be a list of tables");
            self.problem(self.place_of(key), message, &format!("begin each one with {title}"));
            return Vec::new();
        };
        self.tables_of(array, key, title)
    }

    fn tables_of(&self, array: &'a DeArray<'a>, key: &str, title: &str) -> Vec<Self> {
        let mut tables = Vec::new();
        for (index, item) in array.iter().enumerate() {
            if let Some(table) = item.get_ref().as_table() {
                let prefix = format!("{}{key}.{index}.", self.prefix);
                tables.push(Self::new(self.reading, title, &prefix, table, &item.span()));
            } else {
                let place = self.reading.source.place(item.span().start);
                let message = format!("`{key}` has to be a list of tables");
                self.problem(place, message, &format!("begin each one with {title}"));
            }
        }
        tables
    }

    /// The whole as a `T` of serde's, with its defaults where something is wrong, and where its keys
    /// are. `name` is the table's, in a list of such.
    pub(super) fn read<T: Default + DeserializeOwned>(mut self, name: &str) -> (T, Places) {
        let value = Value::Object(self.object(self.entries, &self.prefix.clone()));
        let mut problems = Problems::default();
        let written = Written {
            value: &value,
            title: Title::Table { name, is_list: true },
            path: "",
            places: &self.places,
            folder: Some(self.reading.source.folder()),
        };
        let read = fathom_options::read(&written, &mut problems).unwrap_or_default();
        self.reading.problems.borrow_mut().extend(problems.0);
        (read, self.places)
    }

    /// A table as JSON. The places of its keys and values are noted.
    fn object(&mut self, table: &DeTable<'_>, prefix: &str) -> Map<String, Value> {
        let mut object = Map::new();
        for (name, value) in table {
            let key = name.get_ref().as_ref();
            let path = format!("{prefix}{key}");
            let source = &self.reading.source;
            self.places.note_key(&path, source.place(name.span().start));
            self.places.note(&path, source.place(value.span().start));
            if let Some(value) = self.written(value.get_ref(), key, &path) {
                object.insert(key.to_owned(), value);
            }
        }
        object
    }

    /// A value as JSON; `None` for one that JSON does not have.
    fn written(&mut self, value: &DeValue<'_>, key: &str, path: &str) -> Option<Value> {
        let wrong = match value {
            DeValue::String(text) => return Some(Value::String(text.to_string())),
            DeValue::Boolean(is) => return Some(Value::Bool(*is)),
            DeValue::Integer(integer) => {
                match i64::from_str_radix(integer.as_str(), integer.radix()) {
                    Ok(integer) => return Some(Value::from(integer)),
                    Err(_) => "is out of range",
                }
            }
            DeValue::Float(float) => {
                let float = float.as_str().parse().ok().and_then(serde_json::Number::from_f64);
                match float {
                    Some(number) => return Some(Value::Number(number)),
                    None => "has to be a number with an end",
                }
            }
            DeValue::Datetime(_) => "cannot be a date",
            DeValue::Array(items) => {
                let mut array = Vec::new();
                for (index, item) in items.iter().enumerate() {
                    let path = format!("{path}.{index}");
                    if item.get_ref().is_table() {
                        let place = self.reading.source.place(item.span().start);
                        self.places.note(&path, place);
                    }
                    array.extend(self.written(item.get_ref(), key, &path));
                }
                return Some(Value::Array(array));
            }
            DeValue::Table(table) => {
                return Some(Value::Object(self.object(table, &format!("{path}."))));
            }
        };
        let message = format!("`{key}` of {} {wrong}", self.title);
        self.problem(self.places.of(path), message, "correct it, or leave the line out");
        None
    }

    /// Notes the keys that nobody asked for, and gives where the others are.
    pub(super) fn finish(self) -> Places {
        for (name, _) in self.entries {
            let key = name.get_ref().as_ref();
            if !self.known.contains(&key) {
                let place = self.reading.source.place(name.span().start);
                let shown: String = key.chars().take(60).collect();
                let message = format!("there is no key `{shown}` in {}", self.title);
                self.problem(place, message, &suggestion(key, &self.known));
            }
        }
        self.places
    }

    /// Where the keys are, when nothing can be said about those that nobody asked for.
    pub(super) fn places(self) -> Places {
        self.places
    }

    /// Takes over where the keys of a table within are.
    pub(super) fn adopt(&mut self, places: Places) {
        self.places.merge(places);
    }
}

/// A value as JSON; dates and numbers without an end have no such form.
fn json(value: &DeValue<'_>) -> Option<serde_json::Value> {
    use serde_json::Value;
    Some(match value {
        DeValue::String(text) => Value::String(text.to_string()),
        DeValue::Integer(integer) => {
            Value::from(i64::from_str_radix(integer.as_str(), integer.radix()).ok()?)
        }
        DeValue::Float(float) => {
            Value::Number(serde_json::Number::from_f64(float.as_str().parse().ok()?)?)
        }
        DeValue::Boolean(is) => Value::Bool(*is),
        DeValue::Datetime(_) => return None,
        DeValue::Array(items) => {
            Value::Array(items.iter().map(|item| json(item.get_ref())).collect::<Option<_>>()?)
        }
        DeValue::Table(table) => {
            let entry = |(name, value): (&Spanned<_>, &Spanned<DeValue<'_>>)| {
                let name: &std::borrow::Cow<'_, str> = name.get_ref();
                Some((name.to_string(), json(value.get_ref())?))
            };
            Value::Object(table.iter().map(entry).collect::<Option<_>>()?)
        }
    })
}
