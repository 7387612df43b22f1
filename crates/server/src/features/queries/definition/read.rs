//! The table of a kept query.

use fathom_options::{Check, Key, Problems, Section, Written, suggestion};
use serde_json::Value;

use super::check::{check_queries, load_files};
use super::{ActionDefinition, QueryDefinition};
#[cfg(test)]
use super::{CommandDefinition, LogDefinition, MetricDefinition, WebhookDefinition};
#[cfg(test)]
use crate::configuration::page::{lines, part};
use crate::configuration::{Extent, FeatureSection, Placed, Reading, Table};

impl Section for QueryDefinition {
    const KEYS: &'static [Key] = &[
        Key::new("name", "", "required: unique among the queries"),
        Key::new(
            "cql",
            "",
            "required: one `select` or set operation, with the views that it needs, 64 \
             KiB at most. A mistake is reported with its place in the text and in the file",
        ),
        Key::new("file", "", "instead of `cql`: a file with the query"),
        Key::new(
            "unbounded_allowed",
            "false",
            "accept a query whose state grows without limit. Otherwise such a query is refused, \
             with the place of the operator that grows",
        ),
        Key::new(
            "held_max",
            "10000000",
            "the most rows, groups and values that the query may hold. A query that exceeds this \
             limit fails, frees its state, and reports the error",
        ),
        Key::new("action", "", "required: the action for the results"),
    ];

    fn check(&self, check: &mut Check<'_>) {
        match (check.has("cql"), check.has("file")) {
            (true, true) => {
                check.problem("file", "a query has `cql` and `file`", "keep one of them");
            }
            (false, false) => {
                let remedy = "add a line like `cql = \"select …\"` or `file = \"a.cql\"`";
                check.problem("cql", "a query has no text", remedy);
            }
            _ => {}
        }
        if self.written.is_none() {
            let message = format!("the query {:?} has no action", self.name);
            let remedy = "add a line like `action = { log = \"warning\" }`";
            check.problem("action", message, remedy);
        }
    }
}

impl FeatureSection for QueryDefinition {
    const NAME: &'static str = "query";
    const IS_LIST: bool = true;

    fn read(mut table: Table<'_>, reading: &Reading<'_>) -> Placed<Self> {
        table.note_text("cql");
        let mut query: Placed<Self> = table.read();
        let mut problems = Problems::default();
        if let Some(written) = query.definition.written.take() {
            query.definition.action = action(&query, written, reading, &mut problems);
        }
        reading.extend(problems);
        query
    }

    fn load(queries: &mut [Placed<Self>]) -> Result<(), Problems> {
        load_files(queries)
    }

    #[cfg(test)]
    fn parts() -> Vec<(String, String)> {
        vec![part::<Self>(), ("the actions".into(), actions())]
    }

    fn check_all(queries: &[Placed<Self>], _extent: Extent, problems: &mut Problems) {
        check_queries(queries, problems);
    }
}

/// Reads the action. One of its keys determines its kind.
fn action(
    query: &Placed<QueryDefinition>,
    written: serde_json::Map<String, Value>,
    reading: &Reading<'_>,
    problems: &mut Problems,
) -> ActionDefinition {
    let origins = &query.origins;
    let kinds = ActionDefinition::KINDS;
    let mut chosen =
        kinds.into_iter().filter(|kind| origins.get(&format!("action.{kind}")).is_some());
    let Some(kind) = chosen.next() else {
        let message = "the action has no kind";
        problems.add(origins.of("action"), message, suggestion("", &kinds));
        return ActionDefinition::default();
    };
    if let Some(second) = chosen.next() {
        let remedy = "keep one, and put the other in a separate [[query]]";
        let message = format!("the action has `{kind}` and `{second}`");
        problems.add(origins.of("action"), message, remedy);
        return ActionDefinition::default();
    }
    let (value, title) = (Value::Object(written), ActionDefinition::TITLE);
    let folder = Some(reading.folder());
    let written = Written { value: &value, title, path: "action", origins, folder };
    ActionDefinition::read(kind, &written, problems).unwrap_or_default()
}

#[cfg(test)]
fn actions() -> String {
    let mut made = "| kind | key | default | meaning |\n|---|---|---|---|\n".to_owned();
    made.push_str(&lines::<LogDefinition>("", "`log` | "));
    made.push_str(&lines::<MetricDefinition>("", "`metric` | "));
    made.push_str(&lines::<WebhookDefinition>("", "`webhook` | "));
    made.push_str(&lines::<CommandDefinition>("", "`command` | "));
    made
}
