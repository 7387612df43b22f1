//! What is done with the changes of a query's result.

mod command;
mod limiter;
mod log;
mod metric;
mod outbox;
mod webhook;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use fathom_control::Client;

pub(crate) use metric::MetricSeries;

use super::kept::{Change, Counts, add};
use crate::configuration::{ActionKind, On, PreparedQuery, QueryDefinition};
use limiter::Limiter;
use log::LogLines;
use metric::Metric;
use outbox::Outbox;

/// An action that runs.
pub(super) struct Action {
    on: On,
    /// What goes on with limits, and how many changes were left out since one was let through.
    limited: Mutex<(Limiter, u64)>,
    counts: Arc<Counts>,
    target: Target,
}

enum Target {
    Log(LogLines),
    Metric(Mutex<Metric>),
    /// A thread that is given rows.
    Thread(Arc<Outbox>),
}

impl Action {
    /// Makes the action of a query.
    ///
    /// # Errors
    /// When it has no thread, or does not fit the query after all.
    pub fn start(
        definition: &QueryDefinition,
        prepared: &PreparedQuery,
        counts: &Arc<Counts>,
        client: &Client,
    ) -> Result<Self, String> {
        let target = match &definition.action.kind {
            ActionKind::Log(level) => Target::Log(LogLines::new(definition, *level, prepared)),
            ActionKind::Metric(metric) => Target::Metric(Mutex::new(Metric::new(metric, prepared))),
            ActionKind::Webhook(webhook) => {
                Target::Thread(webhook::start(&definition.name, webhook, prepared, counts)?)
            }
            ActionKind::Command(command) => {
                Target::Thread(command::start(&definition.name, command, prepared, counts, client)?)
            }
        };
        let limited = Mutex::new((Limiter::new(definition.action.limit), 0));
        Ok(Self { on: definition.action.on, limited, counts: Arc::clone(counts), target })
    }

    /// Does it for those changes that it is for, as far as the limit lets it.
    pub fn take(&self, changes: &[Change]) {
        if let Target::Metric(metric) = &self.target {
            let mut metric = metric.lock().unwrap_or_else(PoisonError::into_inner);
            let mut acted = 0;
            for change in changes.iter().filter(|change| wants(self.on, change)) {
                match metric.take(change) {
                    Ok(()) => acted += 1,
                    Err(error) => self.counts.fail(&error),
                }
            }
            add(&self.counts.acted, acted);
            return;
        }
        let mut limited = self.limited.lock().unwrap_or_else(PoisonError::into_inner);
        let (limiter, left_out) = &mut *limited;
        for change in changes.iter().filter(|change| wants(self.on, change)) {
            if limiter.allows(change.time_ns) {
                self.act(change, std::mem::take(left_out));
            } else {
                *left_out += 1;
                add(&self.counts.suppressed, 1);
            }
        }
    }

    /// Does it for one change, before which so many were left out.
    fn act(&self, change: &Change, left_out: u64) {
        match &self.target {
            Target::Log(lines) => {
                lines.write(change, left_out);
                add(&self.counts.acted, 1);
            }
            Target::Metric(_) => {}
            Target::Thread(outbox) => add(&self.counts.lost, outbox.put(change, left_out)),
        }
    }

    /// The series, if it is a metric.
    pub fn series(&self) -> Option<MetricSeries> {
        let Target::Metric(metric) = &self.target else { return None };
        Some(metric.lock().unwrap_or_else(PoisonError::into_inner).series())
    }

    /// How many series there are, and how many rows have none.
    pub fn series_counts(&self) -> (u64, u64) {
        match &self.target {
            Target::Metric(metric) => {
                metric.lock().unwrap_or_else(PoisonError::into_inner).counts()
            }
            Target::Log(_) | Target::Thread(_) => (0, 0),
        }
    }

    /// Takes no more rows. What waits is tried once more.
    pub fn close(&self) {
        if let Target::Thread(outbox) = &self.target {
            outbox.close();
        }
    }

    /// Waits until its thread has ended, but not beyond `end`.
    pub fn wait_closed(&self, end: Instant) {
        if let Target::Thread(outbox) = &self.target {
            outbox.wait_closed(end);
        }
    }
}

fn wants(on: On, change: &Change) -> bool {
    match on {
        On::Insert => change.count > 0,
        On::Delete => change.count < 0,
        On::Both => true,
    }
}
