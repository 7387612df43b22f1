//! The paths of the page.
//!
//! | path | answer |
//! |---|---|
//! | `/`, `/assets/NAME`, `/login` | the page |
//! | `/api/hosts` | the names of the hosts |
//! | `/api/HOST/live` | the disks of a host, each second |
//! | `/api/HOST/disk?name=` | a disk, each second |
//! | `/api/HOST/usage?by=` | who causes the I/O, every two seconds |
//! | `/api/HOST/query?text=` | the rows of a query |
//! | `/api/HOST/v1/…` | what the control interface has, as far as it may be read |

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, Uri, header};
use axum::middleware::from_fn_with_state;
use axum::response::{Html, IntoResponse, Json, Response};
use axum::routing::get;
use clap::ValueEnum;
use fathom_control::{Client, ClientError, Method, UsageReport};
use serde::{Deserialize, Serialize};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::spawn_blocking;

use super::access::{self, Access};
use super::feed::Feed;
use super::stream::{self, Outlet};
use super::{assets, query};
use crate::top::usage_json;
use crate::usage::{Accounts, Grouping, UsageOrder};

/// The most queries, the most answers with usage, and the most other requests at a time.
const QUERIES_MAX: usize = 8;
const USAGES_MAX: usize = 32;
const READS_MAX: usize = 16;
/// How long the daemon may take for an answer.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(10);
/// The time between two messages with usage.
const USAGE_PAUSE: Duration = Duration::from_secs(2);
/// The most lines of usage.
const LINES_MAX: usize = 200;
/// What may be read of the control interface: the first parts of the paths.
const READABLE: [&str; 19] = [
    "audit",
    "background",
    "caches",
    "configuration",
    "daemon",
    "devices",
    "dirty",
    "disks",
    "events",
    "guests",
    "lifetimes",
    "offload",
    "pager",
    "patterns",
    "processes",
    "queries",
    "slow",
    "stores",
    "usage",
];
/// Paths below them that do not answer with a bounded document.
const UNREADABLE: &str = "stores/stream";

/// A daemon.
pub(super) struct Host {
    pub(super) name: String,
    pub(super) client: Client,
    pub(super) feed: Arc<Feed>,
}

/// Everything that the page shows.
pub(super) struct Site {
    hosts: Vec<Host>,
    pub(super) access: Access,
    queries: Arc<Semaphore>,
    usages: Arc<Semaphore>,
    reads: Arc<Semaphore>,
}

impl Site {
    pub(super) fn new(hosts: Vec<Host>, access: Access) -> Self {
        let [queries, usages, reads] =
            [QUERIES_MAX, USAGES_MAX, READS_MAX].map(|count| Arc::new(Semaphore::new(count)));
        Self { hosts, access, queries, usages, reads }
    }

    fn host(&self, name: &str) -> Result<&Host, Refused> {
        let found = self.hosts.iter().find(|host| host.name == name);
        found.ok_or_else(|| Refused::new(StatusCode::NOT_FOUND, "there is no such host"))
    }
}

/// Why a request is refused, as the control interface says it.
struct Refused(StatusCode, serde_json::Value);

impl Refused {
    fn new(status: StatusCode, message: &str) -> Self {
        Self(status, serde_json::json!({ "error": { "message": message, "remedy": "" } }))
    }

    fn busy() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "too many of these requests are in progress")
    }
}

impl From<ClientError> for Refused {
    fn from(error: ClientError) -> Self {
        use fathom_failure::Failing as _;
        let (message, remedy) = (error.to_string(), error.remedy());
        let body = serde_json::json!({ "error": { "message": message, "remedy": remedy } });
        Self(StatusCode::BAD_GATEWAY, body)
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        (self.0, Json(self.1)).into_response()
    }
}

type Answer = Result<Response, Refused>;

/// All paths.
pub(super) fn router(site: Arc<Site>) -> Router {
    Router::new()
        .route("/", get(|| async { Html(assets::PAGE) }))
        .route("/login", get(access::ask).post(access::log_in))
        .route("/assets/{name}", get(|Path(name): Path<String>| async move { assets::file(&name) }))
        .route("/api/hosts", get(hosts))
        .route("/api/{host}/live", get(live))
        .route("/api/{host}/disk", get(disk))
        .route("/api/{host}/usage", get(usage))
        .route("/api/{host}/query", get(run_query))
        .route("/api/{host}/v1/{*path}", get(read))
        .layer(axum::extract::DefaultBodyLimit::max(4096))
        .layer(from_fn_with_state(Arc::clone(&site), access::check))
        .with_state(site)
}

/// What the page knows first.
#[derive(Serialize)]
struct HostList<'s> {
    version: &'static str,
    hosts: Vec<&'s str>,
}

async fn hosts(State(site): State<Arc<Site>>) -> Response {
    let hosts = site.hosts.iter().map(|host| host.name.as_str()).collect();
    Json(HostList { version: env!("CARGO_PKG_VERSION"), hosts }).into_response()
}

/// Sends a message for each sample as long as somebody reads; the first one is marked.
fn follow<T: AsRef<str> + Send>(
    feed: Arc<Feed>,
    message: impl Fn(&Feed, bool) -> T + Send + 'static,
) -> Response {
    let (outlet, answer) = stream::answer();
    tokio::spawn(async move {
        let mut samples = feed.watch();
        let mut is_first = true;
        loop {
            let message = message(&feed, is_first);
            if !outlet.send(message.as_ref()).await || samples.changed().await.is_err() {
                return;
            }
            is_first = false;
        }
    });
    answer
}

async fn live(State(site): State<Arc<Site>>, Path(host): Path<String>) -> Answer {
    Ok(follow(Arc::clone(&site.host(&host)?.feed), Feed::list))
}

#[derive(Deserialize)]
struct OfDisk {
    name: String,
}

async fn disk(
    State(site): State<Arc<Site>>,
    Path(host): Path<String>,
    Query(of): Query<OfDisk>,
) -> Answer {
    let feed = Arc::clone(&site.host(&host)?.feed);
    Ok(follow(feed, move |feed, is_first| feed.disk(&of.name, is_first)))
}

#[derive(Deserialize)]
struct OfUsage {
    by: String,
    disk: Option<String>,
    vm: Option<String>,
    container: Option<String>,
    #[serde(default)]
    filter: String,
}

async fn usage(
    State(site): State<Arc<Site>>,
    Path(host): Path<String>,
    Query(of): Query<OfUsage>,
) -> Answer {
    let by = Grouping::from_str(&of.by, true);
    let by = by.map_err(|_| Refused::new(StatusCode::BAD_REQUEST, "there is no such grouping"))?;
    let client = site.host(&host)?.client.clone().with_limit(ANSWER_TIME_MAX);
    let place = Arc::clone(&site.usages).try_acquire_owned().map_err(|_| Refused::busy())?;
    let (outlet, answer) = stream::answer();
    tokio::spawn(send_usage(client, of, by, outlet, place));
    Ok(answer)
}

/// Takes samples as long as somebody reads.
async fn send_usage(
    client: Client,
    of: OfUsage,
    by: Grouping,
    outlet: Outlet,
    _place: OwnedSemaphorePermit,
) {
    let of = Arc::new(of);
    let mut before: Option<UsageReport> = None;
    loop {
        let (client, wanted) = (client.clone(), Arc::clone(&of));
        let sample = spawn_blocking(move || {
            let report = client.usage(wanted.disk.as_deref(), wanted.vm.as_deref())?;
            Ok::<_, ClientError>((report, client.guests()?.guests))
        });
        let Ok(sample) = sample.await else { return };
        let is_read = match sample {
            Ok((report, guests)) => {
                let accounts = match &before {
                    Some(before) => Accounts::between(before, &report),
                    None => Accounts::all(&report),
                };
                let lines = usage_json::Wanted {
                    by,
                    container: of.container.as_deref(),
                    order: UsageOrder::Throughput,
                    filter: &of.filter,
                    limit: LINES_MAX,
                };
                let text = usage_json::text(&accounts, &lines, &guests);
                before = Some(report);
                outlet.send(&text).await
            }
            Err(error) => {
                before = None;
                outlet.send_json(&Refused::from(error).1).await
            }
        };
        if !is_read {
            return;
        }
        tokio::select! {
            () = outlet.closed() => return,
            () = tokio::time::sleep(USAGE_PAUSE) => {}
        }
    }
}

#[derive(Deserialize)]
struct OfQuery {
    text: String,
    disk: Option<String>,
}

async fn run_query(
    State(site): State<Arc<Site>>,
    Path(host): Path<String>,
    Query(of): Query<OfQuery>,
) -> Answer {
    if of.text.len() > query::TEXT_MAX || of.text.contains('\0') {
        return Err(Refused::new(StatusCode::BAD_REQUEST, "the text is too long"));
    }
    let socket: PathBuf = site.host(&host)?.client.socket().to_owned();
    let place = Arc::clone(&site.queries).try_acquire_owned().map_err(|_| Refused::busy())?;
    let (outlet, answer) = stream::answer();
    spawn_blocking(move || {
        query::run(&socket, &of.text, of.disk.as_deref(), &outlet);
        drop(place);
    });
    Ok(answer)
}

/// Whether a path of the control interface, without its version, may be read.
fn is_readable(path: &str) -> bool {
    let first = path.split('/').next().unwrap_or_default();
    let is_plain = path.split('/').all(|part| !part.is_empty() && part != "." && part != "..");
    is_plain && READABLE.contains(&first) && path != UNREADABLE
}

async fn read(
    State(site): State<Arc<Site>>,
    Path((host, path)): Path<(String, String)>,
    uri: Uri,
) -> Answer {
    if !is_readable(&path) {
        return Err(Refused::new(StatusCode::FORBIDDEN, "this is not shown on the page"));
    }
    let client = site.host(&host)?.client.clone().with_limit(ANSWER_TIME_MAX);
    let place = Arc::clone(&site.reads).try_acquire_owned().map_err(|_| Refused::busy())?;
    // As it was written: names in it are encoded.
    let whole = uri.path_and_query().map_or("", |found| found.as_str());
    let wanted = whole.split_once("/v1/").map(|(_, rest)| format!("/v1/{rest}"));
    let wanted = wanted.unwrap_or_default();
    let answer = spawn_blocking(move || {
        let answer = client.request(Method::Get, &wanted, None);
        drop(place);
        answer
    });
    let failed = |_| Refused::new(StatusCode::INTERNAL_SERVER_ERROR, "the request has failed");
    let answer = answer.await.map_err(failed)??;
    Ok(([(header::CONTENT_TYPE, "application/json")], answer.to_string()).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_may_be_read_is_read() {
        for path in ["disks", "disks/a", "stores/difference", "events", "disks/%2e%2e"] {
            assert!(is_readable(path), "{path}");
        }
        for path in ["", "shutdown", "recording", "stores/stream", "disks/../shutdown", "disks//x"]
        {
            assert!(!is_readable(path), "{path}");
        }
    }
}
