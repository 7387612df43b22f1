//! An action that sends rows as requests to the daemon's own control interface.

use std::sync::Arc;
use std::time::Duration;

use fathom_control::Client;

use super::outbox::{Outbox, Waiting};
use crate::features::queries::definition::{Command, CommandDefinition, PreparedQuery};
use crate::features::queries::kept::{QueryCounts, add};
use crate::process::journal::QUERIES;

/// The time limit of a response. The removal of a disk waits for its last flush.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(60);

/// Starts the thread that sends the commands of a query, one after the other.
pub(super) fn start(
    query: &str,
    definition: &CommandDefinition,
    prepared: &PreparedQuery,
    counts: &Arc<QueryCounts>,
    client: &Client,
) -> Result<Arc<Outbox>, String> {
    let command = Command::new(definition, &prepared.columns).map_err(|wrong| wrong.to_string())?;
    let sender = Sender {
        query: query.to_owned(),
        command,
        counts: Arc::clone(counts),
        client: client.clone().with_limit(ANSWER_TIME_MAX),
    };
    Outbox::start("command", move |outbox| sender.work(outbox))
}

struct Sender {
    query: String,
    command: Command,
    counts: Arc<QueryCounts>,
    client: Client,
}

impl Sender {
    /// Sends the next command. Returns false if there are no more.
    fn work(&self, outbox: &Outbox) -> bool {
        let taken = outbox.take(1);
        if outbox.is_closing() {
            // Commands are not sent after the query was removed.
            add(&self.counts.lost, taken.len() as u64);
            return !taken.is_empty();
        }
        for waiting in &taken {
            self.send(waiting);
        }
        true
    }

    fn send(&self, waiting: &Waiting) {
        let query = &self.query;
        let done = self.command.fill(&waiting.row).and_then(|request| {
            let shown = format!("{} {}", request.method, request.path);
            let answer = self.client.request(request.method, &request.path, request.body.as_ref());
            answer.map(|_| shown.clone()).map_err(|error| format!("{shown}: {error}"))
        });
        match done {
            Ok(shown) => {
                add(&self.counts.acted, 1);
                // The rate of these lines is the rate of commands, which has a limit of its own.
                tracing::info!(target: QUERIES, "query {query}: executed {shown}");
            }
            Err(error) => {
                add(&self.counts.lost, 1);
                self.counts.fail(&error);
                tracing::warn!("query {query}: {error}");
            }
        }
    }
}
