//! `fathom query --list`: shows the daemon's kept queries.
use fathom_control::{Client, QueryList, QueryState, QueryStatus};

use crate::{
    failure::CommandResult,
    output::{
        self, short_number,
        style::Style,
        table::{Table, TableColumn},
        text::clean,
    },
};

/// Prints the kept queries of the running daemon.
pub fn list(client: &Client, json: bool) -> CommandResult {
    let list = client.queries()?;
    if json {
        return output::json(&list);
    }
    output::text_line(&shown(&list, output::width(), Style::stdout()))
}

/// The queries as a table, followed by the last failure of each.
fn shown(list: &QueryList, width: Option<usize>, style: Style) -> String {
    if list.queries.is_empty() {
        return "the daemon has no kept queries; [[query]] in its configuration adds one".into();
    }
    let mut table = Table::new([
        TableColumn::text("NAME").flexible(),
        TableColumn::text("STATE"),
        TableColumn::text("ACTION").flexible(),
        TableColumn::number("EVENTS"),
        TableColumn::number("HELD").optional().importance(7),
        TableColumn::number("RESULTS"),
        TableColumn::number("ACTED"),
        TableColumn::number("SUPPRESSED").optional().importance(3),
        TableColumn::number("LOST").optional().importance(5),
        TableColumn::number("DROPPED").optional().importance(4),
        TableColumn::number("FAILURES").optional().importance(6),
    ]);
    for query in &list.queries {
        let count = |count: u64| short_number(count as f64);
        let any = |of: u64| if of == 0 { String::new() } else { count(of) };
        table.row([
            clean(&query.name),
            state(query).into(),
            clean(&format!("{} {}", query.action, query.target)),
            count(query.events),
            any(query.held),
            count(query.results),
            count(query.acted),
            any(query.suppressed),
            any(query.lost),
            any(query.events_dropped),
            any(query.failures),
        ]);
    }
    let mut text = table.render(width, style);
    for query in &list.queries {
        if let Some(error) = &query.last_error {
            text.extend(["\n", &clean(&query.name), ": ", &clean(error)]);
        }
    }
    text
}

fn state(query: &QueryStatus) -> &'static str {
    match query.state {
        QueryState::Waiting => "waiting",
        QueryState::Running => "running",
        QueryState::Failed => "failed",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_is_a_line_and_its_failure_another() {
        let query = QueryStatus {
            name: "slow\u{1b}[2J".into(),
            state: QueryState::Running,
            action: "webhook".into(),
            target: "http://127.0.0.1:1/".into(),
            events: 12_345,
            results: 7,
            acted: 5,
            lost: 2,
            failures: 9,
            last_error: Some("refused\nx".into()),
            ..QueryStatus::default()
        };
        let list = QueryList { queries: vec![query] };
        assert_eq!(
            shown(&list, None, Style::PLAIN),
            "NAME      STATE    ACTION                       EVENTS  RESULTS  ACTED  LOST  FAILURES\n\
             slow\u{fffd}[2J  running  webhook http://127.0.0.1:1/   12.3k        7      5     2         9\n\
             slow\u{fffd}[2J: refused\u{fffd}x"
        );
        assert!(shown(&QueryList::default(), None, Style::PLAIN).contains("[[query]]"));
    }
}
