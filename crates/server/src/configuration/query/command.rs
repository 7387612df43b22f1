//! Requests to the control interface in which values of a row stand.
//!
//! `{column}` may stand for a whole part of the path or a whole value of the body, so that no value
//! can become more than that: what a guest has chosen cannot add parts to a path or keys to a body.

use fathom_control::{DiskChange, DiskDefinition, LayerDefinition, escape};
use fathom_cql::Value;
use fathom_cql::catalog::Column;
use fathom_options::{Places, Problem, Problems, Title, Written, suggestion};
use serde::de::DeserializeOwned;
use serde_json::Value as Json;

use super::CommandDefinition;
use crate::configuration::layers;

/// How deep lists and tables of a body may be in each other.
const DEPTH_MAX: usize = 16;
/// Floats up to here have all whole numbers.
const WHOLE_MAX: f64 = 9_007_199_254_740_992.0;

/// A command that is ready to be filled with the values of rows.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Command {
    method: &'static str,
    path: Vec<Part>,
    /// Whether a disk is removed that is in use.
    force: bool,
    body: Option<Shape>,
}

/// A command with a row's values.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Request {
    /// The method.
    pub method: &'static str,
    /// The path, encoded.
    pub path: String,
    /// The body.
    pub body: Option<Json>,
}

/// What is wrong with a command: the key, the message, the remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wrong(pub &'static str, pub String, pub String);

impl std::fmt::Display for Wrong {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.1)
    }
}

/// A part of the path.
#[derive(Clone, Debug, PartialEq)]
enum Part {
    Fixed(String),
    Column(usize, String),
}

/// A value of the body.
#[derive(Clone, Debug, PartialEq)]
enum Shape {
    Fixed(Json),
    Column(usize),
    List(Vec<Shape>),
    Object(Vec<(String, Shape)>),
}

/// What is wrong with a body.
type CheckBody = fn(&Json) -> Problems;

/// What commands may do. The end of the daemon is not among it.
const KNOWN: [(&str, &[&str], Option<CheckBody>); 4] = [
    (
        "POST",
        &["v1", "disks"],
        Some(|body| reads_as(body, |disk: &mut DiskDefinition| &mut disk.layers)),
    ),
    (
        "PATCH",
        &["v1", "disks", "{}"],
        Some(|body| {
            reads_as(body, |change: &mut DiskChange| change.layers.get_or_insert_default())
        }),
    ),
    ("DELETE", &["v1", "disks", "{}"], None),
    ("POST", &["v1", "reload"], None),
];
/// Has a disk removed that is in use.
const FORCE: &str = "?force=true";
const KNOWN_SHOWN: &str = "commands are `POST /v1/disks`, `PATCH /v1/disks/{name}`, \
                           `DELETE /v1/disks/{name}` and `POST /v1/reload`";

fn reads_as<T: DeserializeOwned>(
    value: &Json,
    layers_of: fn(&mut T) -> &mut Vec<LayerDefinition>,
) -> Problems {
    let (places, mut problems) = (Places::default(), Problems::default());
    let title = Title::Words("the command's body");
    let written = Written { value, title, path: "", places: &places, folder: None };
    if let Some(mut read) = fathom_options::read(&written, &mut problems) {
        layers::complete(layers_of(&mut read), &places, None, &mut problems);
    }
    problems
}

/// The column that a text stands for, if it has braces.
fn find(key: &'static str, text: &str, columns: &[Column]) -> Result<Option<usize>, Wrong> {
    let braces = ['{', '}'];
    if !text.contains(braces) {
        return Ok(None);
    }
    let name = text.strip_prefix('{').and_then(|rest| rest.strip_suffix('}'));
    let name = name.filter(|name| !name.is_empty() && !name.contains(braces)).ok_or_else(|| {
        let message = format!("{text:?} is more than one column");
        Wrong(
            key,
            message,
            "let `{column}` stand alone, and put texts together in the query".into(),
        )
    })?;
    let found = columns.iter().position(|column| column.name.eq_ignore_ascii_case(name));
    found.map(Some).ok_or_else(|| {
        let names: Vec<&str> = columns.iter().map(|column| column.name.as_str()).collect();
        let message = format!("the query gives no column `{name}`");
        Wrong(key, message, suggestion(name, &names))
    })
}

impl Command {
    /// Prepares a command for rows of these columns.
    pub fn new(definition: &CommandDefinition, columns: &[Column]) -> Result<Self, Wrong> {
        let wrong = |message: String| Wrong("command", message, KNOWN_SHOWN.into());
        let request = definition.request.trim();
        let Some((method, path)) = request.split_once(' ') else {
            return Err(wrong(format!("{request:?} is no method and path")));
        };
        let (path, force) = match path.trim().strip_suffix(FORCE) {
            Some(path) if method == "DELETE" => (path, true),
            _ => (path.trim(), false),
        };
        let parts: Vec<&str> = path.strip_prefix('/').unwrap_or("").split('/').collect();
        let fits = |known: &[&str]| {
            known.len() == parts.len()
                && known.iter().zip(&parts).all(|(known, part)| *known == "{}" || known == part)
        };
        let known = KNOWN.iter().find(|(known, path, _)| *known == method && fits(path));
        let Some((method, _, check)) = known else {
            return Err(wrong(format!("{request:?} is no command")));
        };
        let mut path = Vec::new();
        for part in parts {
            path.push(match find("command", part, columns)? {
                Some(column) => Part::Column(column, columns[column].name.clone()),
                None if !is_name(part) => return Err(wrong(format!("{part:?} is no disk"))),
                None => Part::Fixed(escape(part)),
            });
        }
        let body = match (&definition.body, check) {
            (None, None) => None,
            (Some(body), Some(_)) if !body.is_object() => {
                let message = "the command's body is no table".into();
                return Err(Wrong("body", message, "write it like `body = { tap = true }`".into()));
            }
            (Some(body), Some(check)) => {
                let shape = Shape::new(body, columns, DEPTH_MAX)?;
                check_body(&shape, columns, *check)?;
                Some(shape)
            }
            (None, Some(_)) => {
                let remedy = "add one like `body = { tap = true }`; docs/control.md shows more";
                return Err(Wrong("command", "the command has no body".into(), remedy.into()));
            }
            (Some(_), None) => {
                let message = "this command has no use for a body".into();
                return Err(Wrong("body", message, "leave it out".into()));
            }
        };
        Ok(Self { method, path, force, body })
    }

    /// The request with the values of a row, or what is wrong with them.
    pub fn fill(&self, row: &[Value]) -> Result<Request, String> {
        let mut path = String::new();
        for part in &self.path {
            path.push('/');
            match part {
                Part::Fixed(text) => path.push_str(text),
                Part::Column(column, name) => {
                    let text = match row.get(*column) {
                        None | Some(Value::Null) => return Err(format!("{name} is null")),
                        Some(value) => value.to_string(),
                    };
                    if !is_name(&text) {
                        return Err(format!("{name} is {text:?}, which is no part of a path"));
                    }
                    path.push_str(&escape(&text));
                }
            }
        }
        if self.force {
            path.push_str(FORCE);
        }
        let body = self.body.as_ref().map(|shape| shape.fill(row));
        Ok(Request { method: self.method, path, body })
    }
}

/// Whether this is one part of a path, wherever paths are made normal.
fn is_name(text: &str) -> bool {
    !matches!(text, "" | "." | "..") && text.len() <= 1024
}

impl Shape {
    fn new(body: &Json, columns: &[Column], depth: usize) -> Result<Self, Wrong> {
        let deeper = |value: &Json| {
            let too_deep =
                || Wrong("body", "the body is too deep".into(), "make it flatter".into());
            Self::new(value, columns, depth.checked_sub(1).ok_or_else(too_deep)?)
        };
        Ok(match body {
            Json::String(text) => match find("body", text, columns)? {
                Some(column) => Self::Column(column),
                None => Self::Fixed(body.clone()),
            },
            Json::Array(items) => Self::List(items.iter().map(deeper).collect::<Result<_, _>>()?),
            Json::Object(entries) => {
                let entry = |(key, value): (&String, &Json)| Ok((key.clone(), deeper(value)?));
                Self::Object(entries.iter().map(entry).collect::<Result<_, Wrong>>()?)
            }
            other => Self::Fixed(other.clone()),
        })
    }

    fn fill(&self, row: &[Value]) -> Json {
        match self {
            Self::Fixed(value) => value.clone(),
            Self::Column(column) => row.get(*column).map_or(Json::Null, json),
            Self::List(items) => items.iter().map(|item| item.fill(row)).collect(),
            Self::Object(entries) => {
                entries.iter().map(|(key, value)| (key.clone(), value.fill(row))).collect()
            }
        }
    }

    fn has_columns(&self) -> bool {
        match self {
            Self::Fixed(_) => false,
            Self::Column(_) => true,
            Self::List(items) => items.iter().any(Self::has_columns),
            Self::Object(entries) => entries.iter().any(|(_, value)| value.has_columns()),
        }
    }
}

/// A value as JSON. Whole numbers are written as such: sizes are whole.
pub(crate) fn json(value: &Value) -> Json {
    match value {
        Value::Null => Json::Null,
        Value::Boolean(is) => Json::Bool(*is),
        Value::Integer(number) => Json::from(*number),
        Value::Float(number) if number.fract() == 0.0 && number.abs() <= WHOLE_MAX => {
            Json::from(*number as i64)
        }
        Value::Float(number) => Json::from(*number),
        Value::Text(text) => Json::from(&**text),
    }
}

/// Holds the body against what the command takes, as far as that is known before there is a row.
fn check_body(shape: &Shape, columns: &[Column], check: CheckBody) -> Result<(), Wrong> {
    let nothing = vec![Value::Null; columns.len()];
    // What a column will hold is not known; keys are.
    let is_known =
        |problem: &Problem| !shape.has_columns() || problem.message.starts_with("there is no ");
    let found = check(&shape.fill(&nothing)).0.into_iter().find(is_known);
    found.map_or(Ok(()), |problem| Err(Wrong("body", problem.message, problem.remedy)))
}
