//! The tables of a kept query.

use std::time::Duration;

use fathom_monitor::HELD_MAX;

use super::{
    ActionDefinition, ActionKind, CommandDefinition, MetricDefinition, MetricKind, On,
    QueryDefinition, RateLimit, WebhookDefinition,
};
use crate::configuration::LogLevel;
use crate::configuration::table::{HELD_RANGE, Table};
use fathom_options::Places;
use fathom_options::suggestion;

/// The level's words.
const LEVELS: [(&str, LogLevel); 4] = [
    ("error", LogLevel::Error),
    ("warning", LogLevel::Warning),
    ("info", LogLevel::Info),
    ("debug", LogLevel::Debug),
];
/// The keys that say which kind of action it is.
const KINDS: [&str; 4] = ["log", "metric", "webhook", "command"];
const ACTION_EXAMPLE: &str = "add a line like `action = { log = \"warning\" }`";

/// How long an attempt of a webhook may take.
const TIMEOUT_DEFAULT_NS: u64 = 5_000_000_000;
const TIMEOUT_MAX_NS: u64 = 60_000_000_000;
/// The most series of a metric.
const SERIES_DEFAULT: u64 = 100;
const SERIES_MAX: u64 = 10_000;

/// `[[query]]`.
pub(in crate::configuration) fn query(mut table: Table<'_>) -> (QueryDefinition, Places) {
    let mut query = QueryDefinition {
        name: table.string("name").unwrap_or_default(),
        text: table.text("cql").unwrap_or_default(),
        file: table.path("file"),
        unbounded_allowed: table.boolean("unbounded_allowed").unwrap_or(false),
        held_max: table.integer("held_max", HELD_RANGE).unwrap_or(HELD_MAX),
        ..QueryDefinition::default()
    };
    let (has_text, has_file) = (table.has("cql"), table.has("file"));
    if has_text == has_file {
        let (message, remedy) = if has_text {
            ("a query has `cql` and `file`", "keep one of them")
        } else {
            ("a query has no text", "add a line like `cql = \"select …\"` or `file = \"a.cql\"`")
        };
        table.problem(table.place_of("file"), message, remedy);
    }
    if let Some(inner) = table.table("action", "`action`") {
        let (action, places) = action(inner);
        query.action = action;
        table.adopt(places);
    } else if !table.has("action") {
        let message = format!("the query {:?} has no action", query.name);
        table.problem(table.place(), message, ACTION_EXAMPLE);
    }
    (query, table.finish())
}

fn action(mut table: Table<'_>) -> (ActionDefinition, Places) {
    let chosen: Vec<&str> = KINDS.into_iter().filter(|key| table.offers(key)).collect();
    let (first, second) = (chosen.first().copied(), chosen.get(1));
    let kind = match (first, second) {
        (Some("log"), None) => ActionKind::Log(table.word("log", &LEVELS).unwrap_or_default()),
        (Some("metric"), None) => ActionKind::Metric(metric(&mut table)),
        (Some("webhook"), None) => ActionKind::Webhook(webhook(&mut table)),
        (Some(_), None) => ActionKind::Command(CommandDefinition {
            request: table.string("command").unwrap_or_default(),
            body: table.json("body"),
        }),
        (None, _) => {
            let remedy = suggestion("", &KINDS);
            table.problem(table.place(), "the action says nothing of what is to be done", &remedy);
            return (ActionDefinition::default(), table.places());
        }
        (Some(first), Some(second)) => {
            let message = format!("the action has `{first}` and `{second}`");
            let remedy = "keep one, and give the other a [[query]] of its own";
            table.problem(table.place(), message, remedy);
            return (ActionDefinition::default(), table.places());
        }
    };
    let on = match &kind {
        // It shows what comes and what goes.
        ActionKind::Metric(metric) if metric.kind == MetricKind::Gauge => On::Both,
        _ => {
            let words = [("insert", On::Insert), ("delete", On::Delete), ("both", On::Both)];
            table.word("on", &words).unwrap_or_default()
        }
    };
    let limit = match &kind {
        ActionKind::Metric(_) => None,
        _ => limit(&mut table),
    };
    let limit = limit.or_else(|| default_limit(&kind));
    (ActionDefinition { kind, on, limit }, table.finish())
}

/// The limit of an action whose table has none: a guest must not fill the log, or have the daemon
/// do nothing else.
fn default_limit(kind: &ActionKind) -> Option<RateLimit> {
    match kind {
        ActionKind::Log(_) => RateLimit::parse("10/second"),
        ActionKind::Command(_) => RateLimit::parse("10/minute"),
        ActionKind::Metric(_) | ActionKind::Webhook(_) => None,
    }
}

fn limit(table: &mut Table<'_>) -> Option<RateLimit> {
    let text = table.string("limit")?;
    let limit = RateLimit::parse(&text);
    if limit.is_none() {
        table.problem(
            table.place_of("limit"),
            format!("{text:?} is no limit"),
            "write it like `limit = \"10/minute\"`: so many a second, minute or hour",
        );
    }
    limit
}

fn metric(table: &mut Table<'_>) -> MetricDefinition {
    let kinds = [("gauge", MetricKind::Gauge), ("counter", MetricKind::Counter)];
    MetricDefinition {
        name: table.string("metric").unwrap_or_default(),
        kind: table.word("type", &kinds).unwrap_or_default(),
        value: table.string("value"),
        labels: table.strings("labels"),
        help: table.string("help").unwrap_or_default(),
        series_max: table.integer("series_max", 1..SERIES_MAX + 1).unwrap_or(SERIES_DEFAULT)
            as usize,
    }
}

fn webhook(table: &mut Table<'_>) -> WebhookDefinition {
    let url = table.string("webhook").unwrap_or_default();
    let time_ns = table.nanoseconds("timeout").unwrap_or(TIMEOUT_DEFAULT_NS);
    if !(1_000_000..=TIMEOUT_MAX_NS).contains(&time_ns) {
        table.problem(
            table.place_of("timeout"),
            "an attempt cannot have that time",
            "choose a time from 1ms to 60s",
        );
    }
    WebhookDefinition { url, timeout: Duration::from_nanos(time_ns) }
}
