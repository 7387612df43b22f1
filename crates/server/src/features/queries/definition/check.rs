//! Checks that kept queries can be run, and that their actions fit their results.

use std::collections::BTreeMap;
use std::io::Read;

use axum::http::Uri;
use fathom_cql::{Diagnostic, Type};
use fathom_options::{Origin, Origins, Problems, suggestion};

use super::command::{Command, CommandProblem};
use super::{
    ActionDefinition, MetricDefinition, MetricKind, On, PreparedQuery, QUERIES_MAX,
    QUERY_LENGTH_MAX, QueryDefinition, Unfit,
};
use crate::configuration::{NAME_MAX, Placed, plain, the_other};

/// The prefixes of the names of Fathom's own metrics.
const RESERVED: [&str; 2] = ["fathom_", "process_"];

/// Reads the texts of queries from their files.
pub(super) fn load_files(queries: &mut [Placed<QueryDefinition>]) -> Result<(), Problems> {
    let mut problems = Problems::default();
    for Placed { definition, origins } in queries {
        let Some(path) = &definition.file else { continue };
        let mut text = String::new();
        let read = std::fs::File::open(path)
            .and_then(|file| file.take(QUERY_LENGTH_MAX as u64 + 1).read_to_string(&mut text));
        match read {
            Ok(0) => problems.add(
                origins.of("file"),
                format!("the query's file {} is empty", path.display()),
                "write the query into it",
            ),
            Ok(_) => definition.text = text,
            Err(error) => problems.add(
                origins.of("file"),
                format!("the query's file {} cannot be read: {}", path.display(), plain(&error)),
                "name a file with UTF-8 text that the daemon may read",
            ),
        }
    }
    problems.none_or()
}

/// Adds the problems of kept queries.
pub(super) fn check_queries(queries: &[Placed<QueryDefinition>], problems: &mut Problems) {
    let mut found = Problems::default();
    check_all(queries, &mut found);
    for mut problem in found.0 {
        // Names may contain any characters, but a message has to be one line.
        for text in [&mut problem.message, &mut problem.remedy] {
            *text = text.replace(char::is_control, " ");
        }
        problems.0.push(problem);
    }
}

fn check_all(queries: &[Placed<QueryDefinition>], problems: &mut Problems) {
    if let Some(first_too_many) = queries.get(QUERIES_MAX) {
        let message = format!("there are {} queries", queries.len());
        problems.add(
            first_too_many.origins.whole(),
            message,
            format!("keep at most {QUERIES_MAX}"),
        );
        return;
    }
    let (mut names, mut metrics) = (BTreeMap::new(), BTreeMap::new());
    for Placed { definition, origins } in queries {
        check_name(definition, origins, problems);
        if let Some(first) = names.insert(definition.name.as_str(), origins) {
            problems.add(
                origins.of("name"),
                format!("there are two queries called {:?}", definition.name),
                format!("give each a different name{}", the_other(&first.of("name"))),
            );
        }
        if let ActionDefinition::Metric(metric) = &definition.action {
            let name = metric.name.as_str();
            if let Some(first) = metrics.insert(name, origins) {
                problems.add(
                    origins.of("action.metric"),
                    format!("there are two metrics called {name:?}"),
                    format!("give each a different name{}", the_other(&first.of("action.metric"))),
                );
            }
        }
        check_query(definition, origins, problems);
    }
}

fn check_name(definition: &QueryDefinition, origins: &Origins, problems: &mut Problems) {
    let name = &definition.name;
    if name.is_empty() {
        problems.add(origins.of("name"), "a query has no name", "add `name = \"…\"`");
    } else if name.len() > NAME_MAX || name.contains(char::is_control) {
        let shown: String = name.chars().take(40).collect();
        problems.add(
            origins.of("name"),
            format!("a query cannot be called {shown:?}"),
            format!("choose a name of at most {NAME_MAX} bytes"),
        );
    }
}

fn check_query(definition: &QueryDefinition, origins: &Origins, problems: &mut Problems) {
    let key = if definition.file.is_some() { "file" } else { "cql" };
    if definition.text.is_empty() && definition.file.is_some() {
        // The file has not been read: only the daemon reads files.
        return;
    }
    if definition.text.len() > QUERY_LENGTH_MAX {
        let message = format!("the query is longer than {QUERY_LENGTH_MAX} bytes");
        problems.add(origins.of(key), message, "shorten it");
        return;
    }
    match PreparedQuery::new(definition) {
        Ok(prepared) => check_action(definition, &prepared, origins, problems),
        Err(Unfit::At(diagnostic)) => at_place(definition, &diagnostic, origins, problems),
        Err(Unfit::Whole(message, remedy)) => {
            let message = format!("the query {:?} cannot be kept: {message}", definition.name);
            problems.add(origins.of(key), message, remedy);
        }
    }
}

/// Adds a problem at a place in the query's text: the message has the place in the text, and the
/// problem the place in the configuration.
fn at_place(
    definition: &QueryDefinition,
    diagnostic: &Diagnostic,
    origins: &Origins,
    problems: &mut Problems,
) {
    let text = &definition.text;
    let mut offset = diagnostic.span.range().start.min(text.len());
    while !text.is_char_boundary(offset) {
        offset -= 1;
    }
    let before = &text[..offset];
    let line_start = before.rfind('\n').map_or(0, |at| at + 1);
    let (line, column) = (before.matches('\n').count(), before[line_start..].chars().count());
    let (origin, whose) = match (&definition.file, origins.get("cql:text")) {
        (Some(path), _) => (origins.of("file"), path.display().to_string()),
        (None, Some(start)) => (start.clone().within(line, column), "the query".into()),
        (None, None) => (origins.of("cql"), "the query".into()),
    };
    let message =
        format!("line {}, column {} of {whose}: {}", line + 1, column + 1, diagnostic.message);
    let remedy = diagnostic.help.as_deref().unwrap_or("see docs/queries.md for the language");
    problems.add(origin, message, remedy);
}

fn check_action(
    definition: &QueryDefinition,
    prepared: &PreparedQuery,
    origins: &Origins,
    problems: &mut Problems,
) {
    let action = &definition.action;
    let is_gauge =
        matches!(action, ActionDefinition::Metric(metric) if metric.kind == MetricKind::Gauge);
    if prepared.is_stream && action.on() != On::Insert && !is_gauge {
        problems.add(
            origins.of("action.on"),
            format!("the query {:?} never deletes rows: it is a stream", definition.name),
            "leave `on` out, or make the query a relation",
        );
    }
    match action {
        ActionDefinition::Log(_) => {}
        ActionDefinition::Metric(metric) => check_metric(metric, prepared, origins, problems),
        ActionDefinition::Webhook(webhook) => {
            check_url(&webhook.url, &origins.of("action.webhook"), problems);
        }
        ActionDefinition::Command(command) => {
            if let Err(CommandProblem(key, message, remedy)) =
                Command::new(command, &prepared.columns)
            {
                problems.add(origins.of(&format!("action.{key}")), message, remedy);
            }
        }
    }
}

fn check_url(url: &str, origin: &Origin, problems: &mut Problems) {
    let uri = url.parse::<Uri>().ok();
    let sound = uri.as_ref().is_some_and(|uri| {
        matches!(uri.scheme_str(), Some("http" | "https"))
            && uri.host().is_some_and(|host| !host.is_empty())
    });
    if !sound {
        problems.add(
            origin.clone(),
            format!("{url:?} is not an address of an HTTP server"),
            "write it like `webhook = \"http://127.0.0.1:8080/path\"`",
        );
    }
}

fn check_metric(
    metric: &MetricDefinition,
    prepared: &PreparedQuery,
    origins: &Origins,
    problems: &mut Problems,
) {
    let origin = |key: &str| origins.of(&format!("action.{key}"));
    check_metric_name(&metric.name, &origin("metric"), problems);
    if prepared.is_stream && metric.kind == MetricKind::Gauge {
        let key = if origins.get("action.type").is_some() { "type" } else { "metric" };
        problems.add(
            origin(key),
            "a gauge shows the rows of a relation, but this query is a stream",
            "add `type = \"counter\"`, or use a window",
        );
    }
    let names: Vec<&str> = prepared.columns.iter().map(|column| column.name.as_str()).collect();
    let missing =
        |name: &str| (format!("the query has no column `{name}`"), suggestion(name, &names));
    let value = metric.value.as_deref().map(|name| (name, prepared.column(name)));
    match value {
        Some((name, None)) => {
            let (message, remedy) = missing(name);
            problems.add(origin("value"), message, remedy);
        }
        Some((name, Some(at)))
            if !matches!(prepared.columns[at].kind, Type::Integer | Type::Float) =>
        {
            let message = format!("the column `{name}` has no numbers");
            problems.add(
                origin("value"),
                message,
                "choose a column with numbers, or leave `value` out",
            );
        }
        _ => {}
    }
    for name in metric.labels.iter().flatten() {
        if prepared.column(name).is_none() {
            let (message, remedy) = missing(name);
            problems.add(origin("labels"), message, remedy);
        }
    }
    let mut seen: Vec<usize> = Vec::new();
    for at in metric.label_columns(prepared) {
        let name = &prepared.columns[at].name;
        let twice = seen.iter().any(|other| prepared.columns[*other].name == *name);
        if twice || !is_label(name) {
            let message = format!(
                "the column `{name}` {}",
                if twice { "occurs twice" } else { "cannot be the name of a label" }
            );
            let remedy = "give it another name with `as`: letters, digits and underscores";
            problems.add(origin("metric"), message, remedy);
        }
        seen.push(at);
    }
}

fn check_metric_name(name: &str, origin: &Origin, problems: &mut Problems) {
    let begins = |c: char| c.is_ascii_alphabetic() || "_:".contains(c);
    let sound = name.starts_with(begins)
        && name.len() <= NAME_MAX
        && name.chars().all(|c| begins(c) || c.is_ascii_digit());
    if !sound {
        let shown: String = name.chars().take(40).collect();
        problems.add(
            origin.clone(),
            format!("{shown:?} is not a valid name of a metric"),
            "choose letters, digits and underscores, as in `disk_slow_requests`",
        );
    } else if RESERVED.iter().any(|reserved| name.starts_with(reserved)) {
        problems.add(
            origin.clone(),
            format!("the name {name} is reserved for metrics of the daemon"),
            "choose a name with another prefix",
        );
    }
}

/// Whether Prometheus accepts this as the name of a label.
fn is_label(name: &str) -> bool {
    let begins = |c: char| c.is_ascii_alphabetic() || c == '_';
    name.starts_with(begins)
        && !name.starts_with("__")
        && name.chars().all(|c| begins(c) || c.is_ascii_digit())
}

impl MetricDefinition {
    /// The columns that become labels, in order.
    pub(crate) fn label_columns(&self, prepared: &PreparedQuery) -> Vec<usize> {
        let value = self.value.as_deref().and_then(|name| prepared.column(name));
        match &self.labels {
            Some(names) => names.iter().filter_map(|name| prepared.column(name)).collect(),
            None => (0..prepared.columns.len()).filter(|at| Some(*at) != value).collect(),
        }
    }
}
