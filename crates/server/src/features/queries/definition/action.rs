//! Actions on the changes of a query's result. Each kind of action has its own table.

use std::fmt;

use fathom_control::Nanoseconds;
use fathom_options::{Check, Key, Problems, Section, Title, Written};
use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::configuration::{LogLevel, checked};

/// The permitted time limits of an attempt of a webhook, in nanoseconds.
const TIMEOUT_RANGE_NS: std::ops::RangeInclusive<u64> = 1_000_000..=60_000_000_000;
/// The most series of a metric.
const SERIES_MAX: usize = 10_000;

/// The default limits of actions. A guest must not be able to fill the log, or to occupy the daemon
/// with commands.
const LOG_LIMIT: RateLimit = RateLimit { count: 10, period: Period::Second };
const COMMAND_LIMIT: RateLimit = RateLimit { count: 10, period: Period::Minute };

/// An action on the changes of a query's result.
#[derive(Clone, Debug, PartialEq)]
pub enum ActionDefinition {
    /// A line in the daemon's log.
    Log(LogDefinition),
    /// Series of a metric.
    Metric(MetricDefinition),
    /// Sends rows to an HTTP server.
    Webhook(WebhookDefinition),
    /// A request to the control interface.
    Command(CommandDefinition),
}

impl Default for ActionDefinition {
    fn default() -> Self {
        Self::Log(LogDefinition::default())
    }
}

impl ActionDefinition {
    /// The keys that determine the kind of an action.
    pub(super) const KINDS: [&'static str; 4] = ["log", "metric", "webhook", "command"];

    /// Reads an action of the kind `kind`; `None` if it cannot be read.
    pub(super) fn read(kind: &str, written: &Written<'_>, problems: &mut Problems) -> Option<Self> {
        match kind {
            "log" => checked(written, problems).map(Self::Log),
            "metric" => checked(written, problems).map(Self::Metric),
            "webhook" => checked(written, problems).map(Self::Webhook),
            _ => checked(written, problems).map(Self::Command),
        }
    }

    /// The title of an action in messages.
    pub(super) const TITLE: Title<'static> = Title::Words("`action`");

    /// The changes to which the action applies.
    pub fn on(&self) -> On {
        match self {
            Self::Log(log) => log.on,
            // A gauge follows inserted and deleted rows.
            Self::Metric(metric) if metric.kind == MetricKind::Gauge => On::Both,
            Self::Metric(metric) => metric.on,
            Self::Webhook(webhook) => webhook.on,
            Self::Command(command) => command.on,
        }
    }

    /// The rate limit of the action.
    pub fn limit(&self) -> Option<RateLimit> {
        match self {
            Self::Log(log) => Some(log.limit),
            Self::Metric(_) => None,
            Self::Webhook(webhook) => webhook.limit,
            Self::Command(command) => Some(command.limit),
        }
    }
}

const ON: &str = "the changes that cause the action: inserted rows, deleted rows (`\"delete\"`), \
                   or `\"both\"`. Rows of a stream are never deleted";
const LIMIT: &str = "the most actions in a `second`, `minute` or `hour`; changes that exceed it \
                      are counted";

/// A line in the daemon's log.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogDefinition {
    /// The level.
    #[serde(rename = "log")]
    pub level: LogLevel,
    /// The changes to which the action applies.
    pub on: On,
    /// The rate limit.
    pub limit: RateLimit,
}

impl Default for LogDefinition {
    fn default() -> Self {
        Self { level: LogLevel::default(), on: On::default(), limit: LOG_LIMIT }
    }
}

impl Section for LogDefinition {
    const KEYS: &'static [Key] = &[
        Key::new(
            "log",
            "",
            "a line in the daemon's log, at this level: `\"error\"`, `\"warning\"`, `\"info\"` or \
             `\"debug\"`",
        ),
        Key::new("on", "\"insert\"", ON),
        Key::new("limit", "\"10/second\"", LIMIT),
    ];
}

/// A metric of a query's result.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MetricDefinition {
    /// The metric's name.
    #[serde(rename = "metric")]
    pub name: String,
    /// The type.
    #[serde(rename = "type")]
    pub kind: MetricKind,
    /// The column of the value; by default the number of rows is the value.
    pub value: Option<String>,
    /// The columns that become labels; by default all except that of the value.
    #[serde(deserialize_with = "names")]
    pub labels: Option<Vec<String>>,
    /// The help text of the metric.
    pub help: String,
    /// The most series.
    pub series_max: usize,
    /// The changes that a counter counts.
    pub on: On,
}

impl Default for MetricDefinition {
    fn default() -> Self {
        Self {
            name: String::new(),
            kind: MetricKind::default(),
            value: None,
            labels: None,
            help: String::new(),
            series_max: 100,
            on: On::default(),
        }
    }
}

impl Section for MetricDefinition {
    const KEYS: &'static [Key] = &[
        Key::new(
            "metric",
            "",
            "the name of a metric at `/metrics`, which may not begin with `fathom_` or `process_`",
        ),
        Key::new(
            "type",
            "\"gauge\"",
            "`\"gauge\"` (the current rows of the relation) or `\"counter\"` (the sum of all \
             inserted rows)",
        ),
        Key::new("value", "", "the column with the value; by default the number of rows"),
        Key::new("labels", "", "the columns that become labels; by default all but `value`"),
        Key::new("help", "\"\"", "the help text of the metric at `/metrics`"),
        Key::new(
            "series_max",
            "100",
            "the most series, up to 10,000; rows of further series are counted",
        ),
        Key::new("on", "\"insert\"", "likewise, for a counter"),
    ];

    fn check(&self, check: &mut Check<'_>) {
        if self.series_max == 0 || self.series_max > SERIES_MAX {
            check.problem(
                "series_max",
                "`series_max` of `action` is out of range",
                format!("choose a number from 1 to {SERIES_MAX}"),
            );
        }
        if self.kind == MetricKind::Gauge && check.has("on") {
            check.problem(
                "on",
                "a gauge has no `on`: it follows inserted and deleted rows",
                "leave it out, or add `type = \"counter\"`",
            );
        }
    }
}

/// The types of a metric.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MetricKind {
    /// The current rows of the relation.
    #[default]
    Gauge,
    /// The sum of all rows so far.
    Counter,
}

/// An HTTP server to which changes are sent.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WebhookDefinition {
    /// The server's address.
    #[serde(rename = "webhook")]
    pub url: String,
    /// The time limit of one attempt.
    pub timeout: Nanoseconds,
    /// The changes to which the action applies.
    pub on: On,
    /// The rate limit.
    pub limit: Option<RateLimit>,
}

impl Default for WebhookDefinition {
    fn default() -> Self {
        let timeout = Nanoseconds(5_000_000_000);
        Self { url: String::new(), timeout, on: On::default(), limit: None }
    }
}

impl Section for WebhookDefinition {
    const KEYS: &'static [Key] = &[
        Key::new(
            "webhook",
            "",
            "an address, `\"http://…\"` or `\"https://…\"`, to which rows are sent as JSON",
        ),
        Key::new("timeout", "\"5s\"", "the longest time of an attempt, up to `\"60s\"`"),
        Key::new("on", "\"insert\"", "likewise"),
        Key::new("limit", "", "likewise; no limit by default"),
    ];

    fn check(&self, check: &mut Check<'_>) {
        if !TIMEOUT_RANGE_NS.contains(&self.timeout.0) {
            check.problem(
                "timeout",
                "the time limit of an attempt is out of range",
                "choose a time from 1ms to 60s",
            );
        }
    }
}

/// A request to the control interface that contains values of a row.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CommandDefinition {
    /// The method and the path: `PATCH /v1/disks/{VDisk}`.
    #[serde(rename = "command")]
    pub request: String,
    /// The body.
    pub body: Option<Value>,
    /// The changes to which the action applies.
    pub on: On,
    /// The rate limit.
    pub limit: RateLimit,
}

impl Default for CommandDefinition {
    fn default() -> Self {
        Self { request: String::new(), body: None, on: On::default(), limit: COMMAND_LIMIT }
    }
}

impl Section for CommandDefinition {
    const KEYS: &'static [Key] = &[
        Key::new(
            "command",
            "",
            "a request to the control interface: `\"PATCH /v1/disks/{VDisk}\"`",
        ),
        Key::new("body", "", "the request's body; `POST /v1/disks` and `PATCH` need one"),
        Key::new("on", "\"insert\"", "likewise"),
        Key::new("limit", "\"10/minute\"", "likewise"),
    ];
}

/// The changes to which an action applies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum On {
    /// Inserted rows.
    #[default]
    Insert,
    /// Deleted rows.
    Delete,
    /// Both.
    Both,
}

impl On {
    /// The name of the choice.
    pub fn name(self) -> &'static str {
        match self {
            Self::Insert => "insert",
            Self::Delete => "delete",
            Self::Both => "both",
        }
    }
}

/// A rate limit, such as `10/minute`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateLimit {
    /// The number of times.
    pub count: u32,
    /// The period in which they are counted.
    pub period: Period,
}

/// The period of a rate limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Period {
    /// A second.
    Second,
    /// A minute.
    Minute,
    /// An hour.
    Hour,
}

impl Period {
    const ALL: [(&'static str, Self); 3] =
        [("second", Self::Second), ("minute", Self::Minute), ("hour", Self::Hour)];

    /// The length of the period, in nanoseconds.
    pub fn nanoseconds(self) -> u64 {
        match self {
            Self::Second => 1_000_000_000,
            Self::Minute => 60_000_000_000,
            Self::Hour => 3_600_000_000_000,
        }
    }
}

impl RateLimit {
    /// Reads `10/minute`.
    pub fn parse(text: &str) -> Option<Self> {
        let (count, period) = text.split_once('/')?;
        let count = count.trim().parse().ok().filter(|count| (1..=1_000_000).contains(count))?;
        let (_, period) = Period::ALL.into_iter().find(|(word, _)| *word == period.trim())?;
        Some(Self { count, period })
    }
}

impl fmt::Display for RateLimit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = Period::ALL.into_iter().find(|(_, period)| *period == self.period);
        write!(formatter, "{}/{}", self.count, word.map_or("", |(word, _)| word))
    }
}

impl<'de> Deserialize<'de> for RateLimit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).ok_or_else(|| {
            let shown: String = text.chars().take(60).collect();
            D::Error::custom(format!(
                "{shown:?} is not a limit: write it like `limit = \"10/minute\"`: a number each second, \
                 minute or hour"
            ))
        })
    }
}

/// A list of names; a single name counts as a list of one.
fn names<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Vec<String>>, D::Error> {
    struct Names;

    impl<'de> Visitor<'de> for Names {
        type Value = Vec<String>;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str("a list of texts")
        }

        fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<Vec<String>, E> {
            Ok(vec![name.to_owned()])
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Vec<String>, A::Error> {
            let mut names = Vec::new();
            while let Some(name) = items.next_element()? {
                names.push(name);
            }
            Ok(names)
        }
    }

    from.deserialize_any(Names).map(Some)
}
