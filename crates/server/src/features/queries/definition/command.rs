//! Requests to the control interface that contain values of a row.
//!
//! `{column}` replaces a whole part of the path or a whole value of the body. So a value that a
//! guest has chosen cannot add parts to the path or keys to the body.

use fathom_control::{
    AnyEndpoint, DiskChange, DiskDefinition, LayerDefinition, Method, OffloadRequest, endpoints,
    escape,
};
use fathom_cql::Value;
use fathom_cql::catalog::Column;
use fathom_options::{Origins, Problem, Problems, Title, Written, suggestion};
use serde::de::DeserializeOwned;
use serde_json::Value as Json;

use super::CommandDefinition;
use crate::configuration::layers;

/// The most nested lists and tables of a body.
const DEPTH_MAX: usize = 16;
/// Floats represent all integers up to this one exactly.
const WHOLE_MAX: f64 = 9_007_199_254_740_992.0;

/// A prepared command, which is filled with the values of rows.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Command {
    method: Method,
    path: Vec<Part>,
    /// Whether a disk is removed even if it is in use.
    force: bool,
    body: Option<Shape>,
}

/// A command filled with a row's values.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CommandRequest {
    /// The method.
    pub method: Method,
    /// The path, percent-encoded.
    pub path: String,
    /// The body.
    pub body: Option<Json>,
}

/// A problem of a command: the key, the message, and the remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CommandProblem(pub &'static str, pub String, pub String);

impl std::fmt::Display for CommandProblem {
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

/// Finds the problems of a body.
type CheckBody = fn(&Json) -> Problems;

/// A permitted command: its endpoint, and the check of its body if it has one.
type Known = (&'static (dyn AnyEndpoint + Sync), Option<CheckBody>);

/// The permitted commands. The shutdown of the daemon is not one of them.
static KNOWN: [Known; 5] = [
    (
        &endpoints::ADD_DISK,
        Some(|body| reads_as(body, |disk: &mut DiskDefinition| &mut disk.layers)),
    ),
    (
        &endpoints::CHANGE_DISK,
        Some(|body| {
            reads_as(body, |change: &mut DiskChange| change.layers.get_or_insert_default())
        }),
    ),
    (&endpoints::REMOVE_DISK, None),
    (
        &endpoints::CHANGE_OFFLOAD,
        Some(|body| {
            let mut problems = Problems::default();
            let _: Option<OffloadRequest> = read(body, &Origins::default(), &mut problems);
            problems
        }),
    ),
    (&endpoints::RELOAD, None),
];
/// The parameter that removes a disk even if it is in use.
const FORCE: &str = "?force=true";

/// The permitted commands, for people.
fn known_shown() -> String {
    let shown = KNOWN.iter().map(|(endpoint, _)| {
        let row = endpoint.row();
        format!("`{} {}`", row.method, row.path)
    });
    let mut shown: Vec<String> = shown.collect();
    let last = shown.pop().unwrap_or_default();
    format!("commands are {} and {last}", shown.join(", "))
}

fn read<T: DeserializeOwned>(
    value: &Json,
    origins: &Origins,
    problems: &mut Problems,
) -> Option<T> {
    let title = Title::Words("the command's body");
    fathom_options::read(&Written { value, title, path: "", origins, folder: None }, problems)
}

fn reads_as<T: DeserializeOwned>(
    value: &Json,
    layers_of: fn(&mut T) -> &mut Vec<LayerDefinition>,
) -> Problems {
    let (origins, mut problems) = (Origins::default(), Problems::default());
    if let Some(mut read) = read(value, &origins, &mut problems) {
        layers::complete(layers_of(&mut read), &origins, None, &mut problems);
    }
    problems
}

/// The column that a text in braces stands for; `None` for other texts.
fn find(
    key: &'static str,
    text: &str,
    columns: &[Column],
) -> Result<Option<usize>, CommandProblem> {
    let braces = ['{', '}'];
    if !text.contains(braces) {
        return Ok(None);
    }
    let name = text.strip_prefix('{').and_then(|rest| rest.strip_suffix('}'));
    let name = name.filter(|name| !name.is_empty() && !name.contains(braces)).ok_or_else(|| {
        let message = format!("{text:?} is more than one column");
        CommandProblem(
            key,
            message,
            "use `{column}` alone, and concatenate texts in the query".into(),
        )
    })?;
    let found = columns.iter().position(|column| column.name.eq_ignore_ascii_case(name));
    found.map(Some).ok_or_else(|| {
        let names: Vec<&str> = columns.iter().map(|column| column.name.as_str()).collect();
        let message = format!("the query has no column `{name}`");
        CommandProblem(key, message, suggestion(name, &names))
    })
}

impl Command {
    /// Prepares a command for rows with these columns.
    pub fn new(definition: &CommandDefinition, columns: &[Column]) -> Result<Self, CommandProblem> {
        let wrong = |message: String| CommandProblem("command", message, known_shown());
        let request = definition.request.trim();
        let Some((method, path)) = request.split_once(' ') else {
            return Err(wrong(format!("{request:?} is not a method and a path")));
        };
        let (path, force) = match path.trim().strip_suffix(FORCE) {
            Some(path) if method == "DELETE" => (path, true),
            _ => (path.trim(), false),
        };
        let parts: Vec<&str> = path.strip_prefix('/').unwrap_or("").split('/').collect();
        let fits = |known: &str| {
            let mut known = known.split('/').skip(1);
            let is_same = |part: &&str| {
                known.next().is_some_and(|known| known.starts_with('{') || known == *part)
            };
            parts.iter().all(is_same) && known.next().is_none()
        };
        let known = KNOWN.iter().find_map(|(endpoint, check)| {
            let row = endpoint.row();
            (row.method.name() == method && fits(row.path)).then_some((row.method, *check))
        });
        let Some((method, check)) = known else {
            return Err(wrong(format!("{request:?} is not a permitted command")));
        };
        let mut path = Vec::new();
        for part in parts {
            path.push(match find("command", part, columns)? {
                Some(column) => Part::Column(column, columns[column].name.clone()),
                None if !is_name(part) => {
                    return Err(wrong(format!("{part:?} is not the name of a disk")));
                }
                None => Part::Fixed(escape(part)),
            });
        }
        let body = match (&definition.body, check) {
            (None, None) => None,
            (Some(body), Some(_)) if !body.is_object() => {
                let message = "the command's body is not a table".into();
                return Err(CommandProblem(
                    "body",
                    message,
                    "write it like `body = { tap = true }`".into(),
                ));
            }
            (Some(body), Some(check)) => {
                let shape = Shape::new(body, columns, DEPTH_MAX)?;
                check_body(&shape, columns, check)?;
                Some(shape)
            }
            (None, Some(_)) => {
                let remedy = "add one like `body = { tap = true }`; docs/control.md shows more";
                return Err(CommandProblem(
                    "command",
                    "the command has no body".into(),
                    remedy.into(),
                ));
            }
            (Some(_), None) => {
                let message = "this command takes no body".into();
                return Err(CommandProblem("body", message, "leave it out".into()));
            }
        };
        Ok(Self { method, path, force, body })
    }

    /// The request with the values of a row, or an error if they do not fit.
    pub fn fill(&self, row: &[Value]) -> Result<CommandRequest, String> {
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
                        return Err(format!(
                            "{name} is {text:?}, which cannot be a part of a path"
                        ));
                    }
                    path.push_str(&escape(&text));
                }
            }
        }
        if self.force {
            path.push_str(FORCE);
        }
        let body = self.body.as_ref().map(|shape| shape.fill(row));
        Ok(CommandRequest { method: self.method, path, body })
    }
}

/// Whether this is one part of a path, even after the path is normalised.
fn is_name(text: &str) -> bool {
    !matches!(text, "" | "." | "..") && text.len() <= 1024
}

impl Shape {
    fn new(body: &Json, columns: &[Column], depth: usize) -> Result<Self, CommandProblem> {
        let deeper = |value: &Json| {
            let too_deep = || {
                CommandProblem(
                    "body",
                    "the body is nested too deeply".into(),
                    "use fewer levels".into(),
                )
            };
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
                Self::Object(entries.iter().map(entry).collect::<Result<_, CommandProblem>>()?)
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

/// A value as JSON. Floats without a fraction become integers, because sizes are integers.
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

/// Checks the body against the command, as far as that is possible before there is a row.
fn check_body(shape: &Shape, columns: &[Column], check: CheckBody) -> Result<(), CommandProblem> {
    let nothing = vec![Value::Null; columns.len()];
    // The values of columns are not known yet, but the keys are.
    let is_known =
        |problem: &Problem| !shape.has_columns() || problem.message.starts_with("there is no ");
    let found = check(&shape.fill(&nothing)).0.into_iter().find(is_known);
    found.map_or(Ok(()), |problem| Err(CommandProblem("body", problem.message, problem.remedy)))
}
