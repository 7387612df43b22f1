//! Actions on the changes of a query's result.

mod command;
mod limiter;
mod lines;
mod metric;
mod outbox;
mod webhook;

use std::sync::Arc;
use std::time::Instant;

use fathom_control::Client;
use parking_lot::Mutex;

pub(crate) use metric::MetricSeries;

use super::kept::{QueryCounts, ResultChange, add};
use crate::features::queries::definition::{ActionDefinition, On, PreparedQuery, QueryDefinition};
use limiter::Limiter;
use lines::LogLines;
use metric::Metric;
use outbox::Outbox;

/// A running action.
pub(super) struct Action {
    on: On,
    /// The rate limit, and the number of changes suppressed since the last action.
    limited: Mutex<(Limiter, u64)>,
    counts: Arc<QueryCounts>,
    target: Target,
}

enum Target {
    Log(LogLines),
    Metric(Mutex<Metric>),
    /// A thread that processes rows.
    Thread(Arc<Outbox>),
}

impl Action {
    /// Starts the action of a query.
    ///
    /// # Errors
    /// If its thread cannot be started, or if the action does not fit the query.
    pub fn start(
        definition: &QueryDefinition,
        prepared: &PreparedQuery,
        counts: &Arc<QueryCounts>,
        client: &Client,
    ) -> Result<Self, String> {
        let target = match &definition.action {
            ActionDefinition::Log(log) => {
                Target::Log(LogLines::new(definition, log.level, prepared))
            }
            ActionDefinition::Metric(metric) => {
                Target::Metric(Mutex::new(Metric::new(metric, prepared)))
            }
            ActionDefinition::Webhook(webhook) => {
                Target::Thread(webhook::start(&definition.name, webhook, prepared, counts)?)
            }
            ActionDefinition::Command(command) => {
                Target::Thread(command::start(&definition.name, command, prepared, counts, client)?)
            }
        };
        let limited = Mutex::new((Limiter::new(definition.action.limit()), 0));
        Ok(Self { on: definition.action.on(), limited, counts: Arc::clone(counts), target })
    }

    /// Applies the action to those changes for which it is configured, up to its limit.
    pub fn take(&self, changes: &[ResultChange]) {
        if let Target::Metric(metric) = &self.target {
            let mut metric = metric.lock();
            let mut acted = 0;
            for change in changes.iter().filter(|change| applies(self.on, change)) {
                match metric.take(change) {
                    Ok(()) => acted += 1,
                    Err(error) => self.counts.fail(&error),
                }
            }
            add(&self.counts.acted, acted);
            return;
        }
        let mut limited = self.limited.lock();
        let (limiter, suppressed) = &mut *limited;
        for change in changes.iter().filter(|change| applies(self.on, change)) {
            if limiter.allows(change.time_ns) {
                self.act(change, std::mem::take(suppressed));
            } else {
                *suppressed += 1;
                add(&self.counts.suppressed, 1);
            }
        }
    }

    /// Applies the action to one change. `suppressed` changes before it exceeded the limit.
    fn act(&self, change: &ResultChange, suppressed: u64) {
        match &self.target {
            Target::Log(lines) => {
                lines.write(change, suppressed);
                add(&self.counts.acted, 1);
            }
            Target::Metric(_) => {}
            Target::Thread(outbox) => add(&self.counts.lost, outbox.put(change, suppressed)),
        }
    }

    /// Forgets the current rows of the result, when they are no longer known: a gauge has no series
    /// then.
    pub fn forget_rows(&self) {
        if let Target::Metric(metric) = &self.target {
            metric.lock().forget_rows();
        }
    }

    /// The series of a metric; `None` for other actions.
    pub fn series(&self) -> Option<MetricSeries> {
        let Target::Metric(metric) = &self.target else { return None };
        Some(metric.lock().series())
    }

    /// The number of series, and the number of rows without a series.
    pub fn series_counts(&self) -> (u64, u64) {
        match &self.target {
            Target::Metric(metric) => metric.lock().counts(),
            Target::Log(_) | Target::Thread(_) => (0, 0),
        }
    }

    /// Accepts no more rows. Waiting rows are tried once.
    pub fn close(&self) {
        if let Target::Thread(outbox) = &self.target {
            outbox.close();
        }
    }

    /// Waits until the action's thread has ended, at most until `end`.
    pub fn wait_closed(&self, end: Instant) {
        if let Target::Thread(outbox) = &self.target {
            outbox.wait_closed(end);
        }
    }
}

fn applies(on: On, change: &ResultChange) -> bool {
    match on {
        On::Insert => change.count > 0,
        On::Delete => change.count < 0,
        On::Both => true,
    }
}
