//! An action that sends rows to an HTTP server.

use std::sync::Arc;
use std::time::Duration;

use fathom_monitor::write::distinct;
use serde_json::{Map, Value as Json};
use ureq::tls::{RootCerts, TlsConfig, TlsProvider};

use super::outbox::{Outbox, Waiting};
use crate::daemon::unix_time_ns;
use crate::features::queries::definition::{PreparedQuery, WebhookDefinition, json};
use crate::features::queries::kept::{QueryCounts, add};

/// The most rows in one request.
const BATCH_MAX: usize = 100;
/// The most attempts for the same rows, and the pause after the first; each pause is twice as long
/// as the one before.
const ATTEMPTS_MAX: u32 = 5;
const PAUSE_MIN: Duration = Duration::from_millis(250);
/// The longest head of a response, in bytes. The body is not read.
const HEAD_MAX: usize = 16 << 10;

/// Starts the thread that sends the rows of a query.
pub(super) fn start(
    query: &str,
    definition: &WebhookDefinition,
    prepared: &PreparedQuery,
    counts: &Arc<QueryCounts>,
) -> Result<Arc<Outbox>, String> {
    let tls = TlsConfig::builder()
        .provider(TlsProvider::NativeTls)
        .root_certs(RootCerts::PlatformVerifier)
        .build();
    let agent = ureq::Agent::config_builder()
        .tls_config(tls)
        .timeout_global(Some(Duration::from_nanos(definition.timeout.0)))
        .http_status_as_error(false)
        .max_redirects(0)
        .max_response_header_size(HEAD_MAX)
        // Settings of the environment are not used.
        .proxy(None)
        .user_agent(concat!("fathom/", env!("CARGO_PKG_VERSION")))
        .build()
        .new_agent();
    let sender = Sender {
        query: query.to_owned(),
        url: definition.url.clone(),
        columns: distinct(&prepared.columns),
        counts: Arc::clone(counts),
        agent,
    };
    Outbox::start("webhook", move |outbox| sender.work(outbox))
}

struct Sender {
    query: String,
    url: String,
    columns: Vec<String>,
    counts: Arc<QueryCounts>,
    agent: ureq::Agent,
}

/// Why rows were not accepted.
enum Refusal {
    /// Another attempt may succeed.
    Temporary(String),
    /// No attempt will succeed.
    Permanent(String),
}

impl Sender {
    /// Sends the next rows. Returns false if there are no more.
    fn work(&self, outbox: &Outbox) -> bool {
        let rows = outbox.take(BATCH_MAX);
        if rows.is_empty() {
            return false;
        }
        let body = self.body(&rows);
        let (query, mut attempt) = (&self.query, 1);
        loop {
            let refusal = match self.post(&body) {
                Ok(()) => {
                    add(&self.counts.acted, rows.len() as u64);
                    return true;
                }
                Err(refusal) => refusal,
            };
            let (error, again) = match refusal {
                Refusal::Temporary(error) => (error, attempt < ATTEMPTS_MAX),
                Refusal::Permanent(error) => (error, false),
            };
            self.counts.fail(&error);
            tracing::warn!("query {query}: the webhook failed: {error}");
            let pause = PAUSE_MIN * 2_u32.pow(attempt - 1);
            if !again || !outbox.pause(pause) {
                add(&self.counts.lost, rows.len() as u64);
                // After a failure at the shutdown, the remaining rows are not tried.
                return !outbox.is_closing() || self.abandon_rest(outbox);
            }
            attempt += 1;
        }
    }

    /// Counts the waiting rows as lost.
    fn abandon_rest(&self, outbox: &Outbox) -> bool {
        add(&self.counts.lost, outbox.take(usize::MAX).len() as u64);
        false
    }

    fn body(&self, rows: &[Waiting]) -> String {
        let sum = |of: fn(&Waiting) -> u64| rows.iter().map(of).sum::<u64>();
        let body = serde_json::json!({
            "query": self.query,
            "time": unix_time_ns(),
            "rows": rows.iter().map(|waiting| self.row(waiting)).collect::<Vec<_>>(),
            "suppressed": sum(|waiting| waiting.suppressed),
            "lost": sum(|waiting| waiting.lost),
        });
        body.to_string()
    }

    /// A row with its time and sign, in the format of `fathom query --deltas --json`.
    fn row(&self, waiting: &Waiting) -> Json {
        let mut object = Map::new();
        object.insert("@ts".into(), waiting.time_ns.into());
        object.insert("@sign".into(), if waiting.count > 0 { "+" } else { "-" }.into());
        if waiting.count.unsigned_abs() > 1 {
            object.insert("@count".into(), waiting.count.unsigned_abs().into());
        }
        let values = self.columns.iter().cloned().zip(waiting.row.iter().map(json));
        object.extend(values);
        object.into()
    }

    fn post(&self, body: &str) -> Result<(), Refusal> {
        let request = self.agent.post(&self.url).header("content-type", "application/json");
        let answer = request.send(body).map_err(|error| Refusal::Temporary(error.to_string()))?;
        let status = answer.status();
        let message = || format!("the server answers {status}");
        match status.as_u16() {
            200..=299 => Ok(()),
            // Timeouts, rate limits, and errors of the server.
            408 | 425 | 429 | 500..=599 => Err(Refusal::Temporary(message())),
            _ => Err(Refusal::Permanent(message())),
        }
    }
}
