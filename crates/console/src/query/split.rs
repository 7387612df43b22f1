//! The split of queries between many hosts and a centre, with the bytes that are sent.

use std::fmt::Write as _;

use fathom_cql::{
    Hosts,
    plan::{Output, Plan},
    split,
};
use fathom_monitor::{
    measure::{Sent, Traffic, assumed_bytes, frame_bytes},
    replay::Script,
};
use serde::Serialize;

use super::explain::ResultColumn;

/// The split of all queries of a script.
#[derive(Serialize)]
pub struct SplitExplanation {
    /// The bytes of an event with all columns: the mean of the events read, or an estimate by the
    /// types.
    event_bytes: f64,
    /// The number of events read.
    #[serde(skip_serializing_if = "Option::is_none")]
    events: Option<u64>,
    /// The queries that each host runs.
    fragments: Vec<Fragment>,
    /// The part of each query that the centre runs.
    centre: Vec<String>,
}

#[derive(Serialize)]
struct Fragment {
    /// `stream` or `relation`.
    result: &'static str,
    columns: Vec<ResultColumn>,
    /// The tree of operators.
    plan: String,
    /// The bytes of a row that is sent: the mean of the rows sent, or an estimate by the types.
    row_bytes: f64,
    /// The number of rows sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    rows: Option<u64>,
    /// The bytes of the rows sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
}

/// Splits a script's queries into the parts of the hosts and those of the centre.
pub fn parts(script: &Script) -> fathom_cql::Split {
    let plans: Vec<Plan> = script.queries().iter().map(|query| query.plan.clone()).collect();
    split(&plans, script.catalog(), Hosts::Many)
}

impl SplitExplanation {
    /// Describes a split; `traffic` is the measured traffic, if any.
    pub fn new(script: &Script, parts: &fathom_cql::Split, traffic: Option<&Traffic>) -> Self {
        let inputs = parts.catalog();
        let events = traffic.map(|traffic| traffic.read.events - traffic.late);
        let event_bytes = match traffic {
            Some(traffic) => mean(traffic.event_bytes, traffic.read.events),
            None => assumed_bytes(&script.schema().columns) as f64,
        };
        let fragment = |(at, plan): (usize, &Plan)| {
            let sent = traffic.map(|traffic| traffic.fragments[at]);
            Fragment::new(script, plan, sent)
        };
        Self {
            event_bytes,
            events,
            fragments: parts.fragments.iter().enumerate().map(fragment).collect(),
            centre: parts.centre.iter().map(|plan| fathom_cql::explain(plan, &inputs)).collect(),
        }
    }

    /// The split as text.
    pub fn print(&self) -> String {
        let mut text = String::new();
        for (at, fragment) in self.fragments.iter().enumerate() {
            let _ = write!(text, "each host, fragment {}: {}", at + 1, fragment.plan);
        }
        for (at, plan) in self.centre.iter().enumerate() {
            let number =
                if self.centre.len() > 1 { format!(", query {}", at + 1) } else { String::new() };
            let _ = write!(text, "centre{number}: {plan}");
        }
        text + "\n" + &self.traffic()
    }

    fn traffic(&self) -> String {
        let Some(events) = self.events else {
            let mut text = format!("an event has about {:.0} bytes\n", self.event_bytes);
            for (at, fragment) in self.fragments.iter().enumerate() {
                let each = fragment.each();
                let _ = writeln!(
                    text,
                    "fragment {} sends about {:.0} bytes for {each}",
                    at + 1,
                    fragment.row_bytes
                );
            }
            return text;
        };
        let mut text = format!("{events} events have {:.1} bytes each\n", self.event_bytes);
        let mut all = 0;
        for (at, fragment) in self.fragments.iter().enumerate() {
            let (rows, bytes) = (fragment.rows.unwrap_or(0), fragment.bytes.unwrap_or(0));
            all += bytes;
            let what = if fragment.result == "stream" { "rows" } else { "changes" };
            let share = 100.0 * mean(rows, events);
            let each = mean(bytes, events);
            let _ = writeln!(
                text,
                "fragment {} sends {rows} {what} ({share:.1} % of the events), {each:.1} bytes per \
                 event",
                at + 1
            );
        }
        let (each, share) =
            (mean(all, events), 100.0 * mean(all, events) / self.event_bytes.max(1.0));
        let _ =
            writeln!(text, "{each:.1} bytes per event are sent, {share:.1} % of the events' bytes");
        text
    }
}

impl Fragment {
    fn new(script: &Script, plan: &Plan, sent: Option<Sent>) -> Self {
        let assumed = (frame_bytes(plan) + assumed_bytes(&plan.columns)) as f64;
        Self {
            result: match plan.output {
                Output::Stream(_) => "stream",
                Output::Relation(_) => "relation",
            },
            columns: plan.columns.iter().map(ResultColumn::new).collect(),
            plan: fathom_cql::explain(plan, script.catalog()),
            row_bytes: sent
                .filter(|sent| sent.rows > 0)
                .map_or(assumed, |sent| mean(sent.bytes, sent.rows)),
            rows: sent.map(|sent| sent.rows),
            bytes: sent.map(|sent| sent.bytes),
        }
    }

    /// The occasion on which a row is sent.
    fn each(&self) -> &'static str {
        match self.result {
            "stream" => "each event that passes",
            _ => "each row added or removed",
        }
    }
}

fn mean(of: u64, count: u64) -> f64 {
    of as f64 / count.max(1) as f64
}
