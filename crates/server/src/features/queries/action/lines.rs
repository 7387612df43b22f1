//! An action that writes rows as lines of the daemon's log.

use std::fmt::Write as _;

use fathom_cql::Value;
use fathom_monitor::write::distinct;

use crate::configuration::LogLevel;
use crate::features::queries::definition::{PreparedQuery, QueryDefinition};
use crate::features::queries::kept::ResultChange;
use crate::process::journal::QUERIES;

/// The longest text of a value, in characters. Only the beginning of a longer text is shown.
const VALUE_LENGTH_MAX: usize = 256;

/// Writes the lines of a query.
pub(super) struct LogLines {
    query: String,
    level: LogLevel,
    columns: Vec<String>,
    is_stream: bool,
}

impl LogLines {
    pub fn new(definition: &QueryDefinition, level: LogLevel, prepared: &PreparedQuery) -> Self {
        Self {
            query: definition.name.clone(),
            level,
            columns: distinct(&prepared.columns),
            is_stream: prepared.is_stream,
        }
    }

    /// Writes the line of a change, with the number of changes suppressed before it.
    pub fn write(&self, change: &ResultChange, suppressed: u64) {
        let line = self.line(change, suppressed);
        match self.level {
            LogLevel::Error => tracing::error!(target: QUERIES, "{line}"),
            LogLevel::Warning => tracing::warn!(target: QUERIES, "{line}"),
            LogLevel::Info => tracing::info!(target: QUERIES, "{line}"),
            LogLevel::Debug => tracing::debug!(target: QUERIES, "{line}"),
        }
    }

    /// A line such as `slow: VDisk="web" Size=8`; rows of a relation have a sign.
    fn line(&self, change: &ResultChange, suppressed: u64) -> String {
        let mut line = format!("query {}:", self.query);
        if !self.is_stream {
            line.push_str(if change.count > 0 { " +" } else { " -" });
        }
        for (name, value) in self.columns.iter().zip(change.row.iter()) {
            let _ = write!(line, " {name}=");
            match value {
                Value::Null => line.push_str("null"),
                Value::Float(number) => {
                    let _ = write!(line, "{number:?}");
                }
                Value::Text(text) if text.chars().nth(VALUE_LENGTH_MAX).is_some() => {
                    let shown: String = text.chars().take(VALUE_LENGTH_MAX).collect();
                    let _ = write!(line, "{shown:?}…");
                }
                Value::Text(text) => {
                    let _ = write!(line, "{text:?}");
                }
                other => {
                    let _ = write!(line, "{other}");
                }
            }
        }
        if change.count.unsigned_abs() > 1 {
            let _ = write!(line, " ({} times)", change.count.unsigned_abs());
        }
        if suppressed > 0 {
            let _ = write!(line, " ({suppressed} suppressed before)");
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(cql: &str) -> LogLines {
        let definition =
            QueryDefinition { name: "q".into(), text: cql.into(), ..QueryDefinition::default() };
        let prepared = PreparedQuery::new(&definition).unwrap();
        LogLines::new(&definition, LogLevel::Info, &prepared)
    }

    fn change(count: i64, row: &[Value]) -> ResultChange {
        ResultChange { time_ns: 1, count, row: row.into() }
    }

    #[test]
    fn a_line_has_the_row_and_cannot_be_forged() {
        let stream = lines("select Path, Size, Path, Inode from IOstream");
        let forged = Value::text("/a\" Size=9\n\u{202e}x");
        let row = [forged, Value::Integer(8), Value::Null, Value::Float(0.5)];
        assert_eq!(
            stream.line(&change(1, &row), 0),
            "query q: Path=\"/a\\\" Size=9\\n\\u{202e}x\" Size=8 Path_2=null Inode=0.5"
        );
        let relation = lines("select VDisk from IOstream [range 1 second]");
        assert_eq!(
            relation.line(&change(-3, &[Value::text("a")]), 7),
            "query q: - VDisk=\"a\" (3 times) (7 suppressed before)"
        );
        let long = Value::Text("ä".repeat(10_000).into());
        assert!(relation.line(&change(1, &[long]), 0).len() < 1024);
    }
}
