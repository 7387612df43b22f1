//! TOML tables. serde reads each table as a whole, and problems have their lines.

use std::cell::RefCell;
use std::path::Path;

use fathom_options::{
    Check, Origin, Origins, Problem, Problems, Section, Title, Written, suggestion,
};
use serde_json::{Map, Value};
use toml::de::{DeTable, DeValue};

use super::Placed;
use super::source::ConfigurationText;

/// The state that the tables of one file share.
pub(crate) struct Reading<'a> {
    pub(super) source: ConfigurationText<'a>,
    pub(super) problems: RefCell<Problems>,
}

impl Reading<'_> {
    fn problem(&self, origin: Origin, message: impl Into<String>, remedy: impl Into<String>) {
        self.problems.borrow_mut().0.push(Problem::new(origin, message, remedy));
    }

    /// Adds the problems of a table.
    pub(crate) fn extend(&self, problems: Problems) {
        self.problems.borrow_mut().0.extend(problems.0);
    }

    /// The folder to which relative paths refer.
    pub(crate) fn folder(&self) -> &Path {
        self.source.folder()
    }
}

/// A whole file. Its tables are taken by name; keys that were not taken are unknown.
pub(super) struct Document<'a> {
    reading: &'a Reading<'a>,
    entries: &'a DeTable<'a>,
    known: Vec<&'static str>,
}

impl<'a> Document<'a> {
    pub(super) fn new(reading: &'a Reading<'a>, entries: &'a DeTable<'a>) -> Self {
        Self { reading, entries, known: Vec::new() }
    }

    fn value(&mut self, name: &'static str) -> Option<(&'a DeValue<'a>, Origin)> {
        self.known.push(name);
        let (_, value) = self.entries.iter().find(|(key, _)| key.get_ref() == name)?;
        Some((value.get_ref(), self.reading.source.origin(value.span().start)))
    }

    /// The table `[name]`.
    pub(super) fn table(&mut self, name: &'static str) -> Option<Table<'a>> {
        let (value, origin) = self.value(name)?;
        let title = Title::Table { name, is_list: false };
        let Some(entries) = value.as_table() else {
            let message =
                format!("`{name}` of the configuration has to be a table, and is {}", kind(value));
            self.reading.problem(origin, message, format!("write it like `{name} = {{ … }}`"));
            return None;
        };
        Some(Table { reading: self.reading, title, entries, origins: Origins::new(origin) })
    }

    /// The tables `[[name]]`.
    pub(super) fn tables(&mut self, name: &'static str) -> Vec<Table<'a>> {
        let Some((value, origin)) = self.value(name) else { return Vec::new() };
        let title = Title::Table { name, is_list: true };
        let wrong = |origin| {
            let message = format!("`{name}` has to be a list of tables");
            self.reading.problem(origin, message, format!("begin each one with [[{name}]]"));
        };
        let Some(items) = value.as_array() else {
            wrong(origin);
            return Vec::new();
        };
        let mut tables = Vec::new();
        for item in items {
            let origin = self.reading.source.origin(item.span().start);
            match item.get_ref().as_table() {
                Some(entries) => {
                    let origins = Origins::new(origin);
                    tables.push(Table { reading: self.reading, title, entries, origins });
                }
                None => wrong(origin),
            }
        }
        tables
    }

    /// Adds a problem for each key that was not taken.
    pub(super) fn finish(self) {
        for (name, _) in self.entries {
            let key = name.get_ref().as_ref();
            if !self.known.contains(&key) {
                let origin = self.reading.source.origin(name.span().start);
                let shown: String = key.chars().take(60).collect();
                let message = format!("there is no key `{shown}` in the configuration");
                self.reading.problem(origin, message, suggestion(key, &self.known));
            }
        }
    }
}

/// A table that is read as a whole.
pub(crate) struct Table<'a> {
    reading: &'a Reading<'a>,
    title: Title<'static>,
    entries: &'a DeTable<'a>,
    origins: Origins,
}

impl Table<'_> {
    /// Notes the place where the text of `key` begins, as `key:text`, so that problems in the text
    /// have their places. A text with escapes has no such place.
    pub(crate) fn note_text(&mut self, key: &str) {
        let entry = self.entries.iter().find(|(name, _)| name.get_ref() == key);
        let Some((_, value)) = entry else { return };
        let (span, source) = (value.span(), &self.reading.source);
        let raw = source.text.get(span.clone()).unwrap_or_default();
        let text = value.get_ref().as_str().filter(|text| !text.is_empty());
        if let Some(at) = text.and_then(|text| raw.find(text)) {
            self.origins.note(&format!("{key}:text"), source.origin(span.start + at));
        }
    }

    /// Reads the table as a `T`, with defaults for invalid values, and the places of its keys.
    pub(crate) fn read<T: Section>(mut self) -> Placed<T> {
        let value = Value::Object(self.object(self.entries, ""));
        let mut problems = Problems::default();
        let folder = Some(self.reading.folder());
        let written =
            Written { value: &value, title: self.title, path: "", origins: &self.origins, folder };
        let definition = checked(&written, &mut problems).unwrap_or_default();
        self.reading.extend(problems);
        Placed { definition, origins: self.origins }
    }

    /// Converts a table to JSON, and notes the places of its keys and values.
    fn object(&mut self, table: &DeTable<'_>, table_path: &str) -> Map<String, Value> {
        let mut object = Map::new();
        for (name, value) in table {
            let key = name.get_ref().as_ref();
            let path =
                if table_path.is_empty() { key.to_owned() } else { format!("{table_path}.{key}") };
            let source = &self.reading.source;
            self.origins.note_key(&path, source.origin(name.span().start));
            self.origins.note(&path, source.origin(value.span().start));
            if let Some(value) = self.written(value.get_ref(), (table_path, key), &path) {
                object.insert(key.to_owned(), value);
            }
        }
        object
    }

    /// Converts a value to JSON; `None` for a value without a JSON form. `entry` is the innermost
    /// entry of a table that contains the value: the table's path and the key.
    fn written(&mut self, value: &DeValue<'_>, entry: (&str, &str), path: &str) -> Option<Value> {
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
                    None => "has to be a finite number",
                }
            }
            DeValue::Datetime(_) => "cannot be a date",
            DeValue::Array(items) => {
                let mut array = Vec::new();
                for (index, item) in items.iter().enumerate() {
                    let path = format!("{path}.{index}");
                    if item.get_ref().is_table() {
                        let origin = self.reading.source.origin(item.span().start);
                        self.origins.note(&path, origin);
                    }
                    array.extend(self.written(item.get_ref(), entry, &path));
                }
                return Some(Value::Array(array));
            }
            DeValue::Table(table) => return Some(Value::Object(self.object(table, path))),
        };
        let (table_path, key) = entry;
        let message = format!("`{key}` of {} {wrong}", self.title.of(table_path));
        self.reading.problem(self.origins.of(path), message, "correct it, or leave the line out");
        None
    }
}

/// Reads and checks a table. Adds its problems to `problems`, at most one for each value that
/// cannot be read. `None` if the rest cannot be read either.
pub(crate) fn checked<T: Section>(written: &Written<'_>, problems: &mut Problems) -> Option<T> {
    let mut found = Problems::default();
    let section: Option<T> = fathom_options::read(written, &mut found);
    if let Some(section) = &section {
        let mut wrong = Problems::default();
        section.check(&mut Check::new(written.origins, written.path, &mut wrong));
        found.extend_with(wrong, &[]);
    }
    problems.0.extend(found.0);
    section
}

/// The name of a value's type.
fn kind(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a text",
        DeValue::Integer(_) => "a whole number",
        DeValue::Float(_) => "a number",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}
