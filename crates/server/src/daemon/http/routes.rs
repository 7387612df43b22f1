//! The control interface over HTTP.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::rejection::{BytesRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use fathom_control::{
    DiskChange, DiskDefinition, Done, ErrorBody, ErrorCode, ErrorReply, FlushRequest, LogRequest,
    RevertRequest,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use crate::daemon::Daemon;
use crate::daemon::metrics;
use crate::daemon::stack::{invalid, refusal};
use crate::features::background::BackgroundWork;
use crate::features::events::{self, ListenRequest, StreamSet};
use fathom_options::{Places, Problems, Title, Written};

/// The longest time that a client may wait for an event.
const WAIT_MAX: Duration = Duration::from_secs(600);
/// The most changes in progress; further ones are rejected. A change may hang as long as its
/// storage does.
pub(crate) const CHANGES_MAX: usize = 32;
/// The most flushes of guests in progress; further ones are rejected. A flush lasts up to half a minute, and
/// must not keep an operator from changing disks.
pub(crate) const FLUSHES_MAX: usize = 16;
/// The most counts of what guests write in progress; further ones are rejected. A count lasts up to a minute.
pub(crate) const COUNTS_MAX: usize = 8;
/// How long a request waits for its change, which continues beyond that.
const CHANGE_TIME_MAX: Duration = Duration::from_secs(45);

/// The state that the routes share.
#[derive(Clone)]
pub(crate) struct App {
    pub(crate) daemon: Arc<Daemon>,
    /// Notified when a client requests the shutdown.
    pub(crate) end: Arc<Notify>,
    /// Permits for further changes.
    pub(crate) changes: Arc<Semaphore>,
    /// Permits for further flushes of guests.
    pub(crate) flushes: Arc<Semaphore>,
    /// Permits for further counts of what guests write.
    pub(crate) counts: Arc<Semaphore>,
}

/// An error as a response.
struct Refused(ErrorBody);

impl From<ErrorBody> for Refused {
    fn from(body: ErrorBody) -> Self {
        Self(body)
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let status =
            StatusCode::from_u16(self.0.code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (status, axum::Json(ErrorReply { error: self.0 })).into_response()
    }
}

type Answer<T> = Result<axum::Json<T>, Refused>;

/// All paths of the control interface.
pub(crate) fn router(app: App) -> Router {
    Router::new()
        .route("/v1/daemon", get(info))
        .route("/v1/disks", get(disk_list).post(add_disk))
        .route("/v1/disks/{name}", get(disk_status).patch(change_disk).delete(remove_disk))
        .route("/v1/disks/{name}/recover", post(recover_disk))
        .route("/v1/disks/{name}/retry", post(retry_disk))
        .route("/v1/disks/{name}/log", post(decide_log))
        .route("/v1/disks/{name}/offload", get(offload_history).post(change_offload))
        .route("/v1/offload", get(offload))
        .route("/v1/clusters/{cluster}/volumes/{volume}", axum::routing::delete(forget_volume))
        .route("/v1/statistics", get(statistics))
        .route("/v1/devices", get(devices))
        .route("/v1/background", get(background))
        .route("/v1/caches", get(caches))
        .route("/v1/usage", get(usage))
        .route("/v1/slow", get(slow))
        .route("/v1/guests", get(guests))
        .route("/v1/dirty", get(dirty))
        .route("/v1/guests/{vm}/flush", post(flush_guest))
        .route("/v1/queries", get(queries))
        .route("/v1/events", get(daemon_events))
        .route("/v1/recording", get(recording))
        .route("/v1/monitor", get(monitor))
        .route("/v1/reload", post(reload))
        .route("/v1/configuration", get(configuration))
        .route("/v1/configuration/revert", post(revert))
        .route("/v1/shutdown", post(shutdown))
        .route("/metrics", get(metrics_page))
        .fallback(no_such_path)
        .method_not_allowed_fallback(no_such_method)
        .with_state(app)
}

async fn info(State(app): State<App>) -> Answer<fathom_control::DaemonInfo> {
    app.daemon.check_problems().await;
    Ok(axum::Json(app.daemon.info()))
}

async fn disk_list(State(app): State<App>) -> Answer<fathom_control::DiskList> {
    app.daemon.check_problems().await;
    Ok(axum::Json(app.daemon.disk_list()))
}

async fn disk_status(
    State(app): State<App>,
    Path(name): Path<String>,
) -> Answer<fathom_control::DiskStatus> {
    app.daemon.check_problems().await;
    Ok(axum::Json(app.daemon.disk_status(&name)?))
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct AddQuery {
    temporary: bool,
}

async fn add_disk(
    State(app): State<App>,
    query: Result<Query<AddQuery>, QueryRejection>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, Refused> {
    let Query(query) = query.map_err(|error| {
        refusal(ErrorCode::Invalid, error.body_text(), "use a path like /v1/disks?temporary=true")
    })?;
    let definition: DiskDefinition = read(body)?;
    let changes = Arc::clone(&app.changes);
    let add = move || app.daemon.add_disk(definition, query.temporary);
    let status = change(&changes, add).await?;
    Ok((StatusCode::CREATED, status).into_response())
}

async fn change_disk(
    State(app): State<App>,
    Path(name): Path<String>,
    body: Result<Bytes, BytesRejection>,
) -> Answer<fathom_control::DiskStatus> {
    let wanted: DiskChange = read(body)?;
    let changes = Arc::clone(&app.changes);
    change(&changes, move || app.daemon.change_disk(&name, &wanted)).await
}

async fn recover_disk(
    State(app): State<App>,
    Path(name): Path<String>,
) -> Answer<fathom_control::DiskStatus> {
    let changes = Arc::clone(&app.changes);
    change(&changes, move || app.daemon.recover_disk(&name)).await
}

async fn retry_disk(
    State(app): State<App>,
    Path(name): Path<String>,
) -> Answer<fathom_control::DiskStatus> {
    let changes = Arc::clone(&app.changes);
    change(&changes, move || app.daemon.retry_disk(&name)).await
}

async fn decide_log(
    State(app): State<App>,
    Path(name): Path<String>,
    body: Result<Bytes, BytesRejection>,
) -> Answer<fathom_control::LogAnswer> {
    let LogRequest { decision } = read(body)?;
    let changes = Arc::clone(&app.changes);
    change(&changes, move || app.daemon.decide_log(&name, decision)).await
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct RemoveQuery {
    force: bool,
    temporary: bool,
}

async fn remove_disk(
    State(app): State<App>,
    Path(name): Path<String>,
    query: Result<Query<RemoveQuery>, QueryRejection>,
) -> Answer<Done> {
    let Query(query) = query.map_err(|error| {
        refusal(ErrorCode::Invalid, error.body_text(), "use a path like /v1/disks/NAME?force=true")
    })?;
    let changes = Arc::clone(&app.changes);
    change(&changes, move || app.daemon.remove_disk(&name, query.force, query.temporary)).await
}

async fn statistics(State(app): State<App>) -> Answer<fathom_control::Statistics> {
    app.daemon.check_problems().await;
    Ok(axum::Json(app.daemon.statistics()))
}

async fn devices(State(app): State<App>) -> Answer<fathom_control::DeviceList> {
    // The search waits for file systems, for a limited time.
    blocking(move || Ok(app.daemon.devices())).await
}

async fn background(State(app): State<App>) -> Answer<fathom_control::BackgroundList> {
    Ok(axum::Json(app.daemon.part::<BackgroundWork>().list()))
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct CacheQuery {
    disk: Option<String>,
    points: usize,
    files: usize,
}

async fn caches(
    State(app): State<App>,
    query: Result<Query<CacheQuery>, QueryRejection>,
) -> Answer<fathom_control::CacheReport> {
    let Query(query) = query.map_err(|error| {
        refusal(
            ErrorCode::Invalid,
            error.body_text(),
            "use a path like /v1/caches?disk=NAME&points=64&files=10",
        )
    })?;
    blocking(move || app.daemon.caches(query.disk.as_deref(), query.points, query.files)).await
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct OffloadQuery {
    disk: Option<String>,
}

async fn offload(
    State(app): State<App>,
    query: Result<Query<OffloadQuery>, QueryRejection>,
) -> Answer<fathom_control::OffloadReport> {
    let Query(query) = query.map_err(|error| {
        refusal(ErrorCode::Invalid, error.body_text(), "use a path like /v1/offload?disk=NAME")
    })?;
    Ok(axum::Json(app.daemon.offload_report(query.disk.as_deref())?))
}

async fn offload_history(
    State(app): State<App>,
    Path(name): Path<String>,
) -> Answer<fathom_control::OffloadHistory> {
    Ok(axum::Json(app.daemon.offload_history(&name)?))
}

async fn change_offload(
    State(app): State<App>,
    Path(name): Path<String>,
    body: Result<Bytes, BytesRejection>,
) -> Answer<fathom_control::OffloadAnswer> {
    let request = read(body)?;
    let changes = Arc::clone(&app.changes);
    // It waits until the log has been tried out.
    change(&changes, move || app.daemon.change_offload(&name, request)).await
}

async fn forget_volume(
    State(app): State<App>,
    Path((cluster, volume)): Path<(String, String)>,
) -> Answer<Done> {
    let changes = Arc::clone(&app.changes);
    change(&changes, move || app.daemon.forget_volume(cluster, volume)).await
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct UsageQuery {
    disk: Option<String>,
    vm: Option<String>,
}

async fn usage(
    State(app): State<App>,
    query: Result<Query<UsageQuery>, QueryRejection>,
) -> Answer<fathom_control::UsageReport> {
    let Query(query) = query.map_err(|error| {
        refusal(
            ErrorCode::Invalid,
            error.body_text(),
            "use a path like /v1/usage?disk=NAME&vm=NAME",
        )
    })?;
    // Thousands of rows take some milliseconds.
    blocking(move || app.daemon.usage(query.disk.as_deref(), query.vm.as_deref())).await
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct SlowQuery {
    disk: Option<String>,
    count: Option<usize>,
}

async fn slow(
    State(app): State<App>,
    query: Result<Query<SlowQuery>, QueryRejection>,
) -> Answer<fathom_control::SlowReport> {
    let Query(query) = query.map_err(|error| {
        refusal(
            ErrorCode::Invalid,
            error.body_text(),
            "use a path like /v1/slow?disk=NAME&count=10",
        )
    })?;
    let count = query.count.unwrap_or(usize::MAX);
    blocking(move || app.daemon.slow(query.disk.as_deref(), count)).await
}

async fn guests(State(app): State<App>) -> Answer<fathom_control::GuestList> {
    blocking(move || Ok(app.daemon.guests())).await
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct DirtyQuery {
    guest: Option<String>,
    files: Option<usize>,
    mapped: bool,
    tables: Option<u64>,
    written_ms: Option<u64>,
}

async fn dirty(
    State(app): State<App>,
    query: Result<Query<DirtyQuery>, QueryRejection>,
) -> Answer<fathom_control::DirtyReport> {
    let Query(query) = query.map_err(|error| {
        refusal(
            ErrorCode::Invalid,
            error.body_text(),
            "use a path like /v1/dirty?guest=NAME&files=20&mapped=true&tables=20&written_ms=1000",
        )
    })?;
    let DirtyQuery { guest, files, mapped, tables, written_ms } = query;
    let request = fathom_control::DirtyRequest { files, mapped, tables, written_ms };
    if written_ms.is_some() {
        let permit = Arc::clone(&app.counts).try_acquire_owned().map_err(|_| {
            refusal(
                ErrorCode::Conflict,
                format!("what guests write is being counted {COUNTS_MAX} times already"),
                "try again when one of the counts has ended",
            )
        })?;
        return blocking(move || {
            let _permit = permit;
            app.daemon.dirty(guest.as_deref(), request)
        })
        .await;
    }
    blocking(move || app.daemon.dirty(guest.as_deref(), request)).await
}

async fn flush_guest(
    State(app): State<App>,
    Path(vm): Path<String>,
    body: Result<Bytes, BytesRejection>,
) -> Answer<fathom_control::FlushReport> {
    let FlushRequest { by } = read(body)?;
    let permit = Arc::clone(&app.flushes).try_acquire_owned().map_err(|_| {
        refusal(
            ErrorCode::Conflict,
            format!("{FLUSHES_MAX} guests are being flushed already"),
            "try again when one of the flushes has ended",
        )
    })?;
    carry_out(permit, move || app.daemon.flush_guest(&vm, by)).await
}

async fn queries(State(app): State<App>) -> Answer<fathom_control::QueryList> {
    Ok(axum::Json(app.daemon.query_list()))
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct EventQuery {
    after: u64,
    wait_ms: u64,
}

async fn daemon_events(
    State(app): State<App>,
    query: Result<Query<EventQuery>, QueryRejection>,
) -> Answer<fathom_control::EventList> {
    let Query(query) = query.map_err(|error| {
        refusal(
            ErrorCode::Invalid,
            error.body_text(),
            "use a path like /v1/events?after=0&wait_ms=1000",
        )
    })?;
    let wait = Duration::from_millis(query.wait_ms).min(WAIT_MAX);
    Ok(axum::Json(app.daemon.journal.events_within(query.after, wait).await))
}

async fn recording(
    State(app): State<App>,
    query: Result<Query<Vec<(String, String)>>, QueryRejection>,
) -> Result<Response, Refused> {
    let remedy = "use a path like /v1/recording?disk=NAME&disk=NAME&stream=NAME&pulse_ms=20";
    let invalid = |message: String| Refused(refusal(ErrorCode::Invalid, message, remedy));
    let Query(query) = query.map_err(|error| invalid(error.body_text()))?;
    let mut request = ListenRequest::default();
    let mut names = Vec::new();
    for (key, value) in query {
        match key.as_str() {
            "disk" => drop(request.disks.insert(value)),
            "stream" => names.push(value),
            "pulse_ms" => {
                let time = value.parse().ok().filter(|time| (1..=60_000).contains(time));
                let time = time.ok_or_else(|| {
                    invalid(format!("pulse_ms is {value:?}, but must be from 1 to 60000"))
                })?;
                request.pulse = Some(Duration::from_millis(time));
            }
            _ => return Err(invalid(format!("there is no parameter {key:?}"))),
        }
    }
    if !names.is_empty() {
        let names = names.iter().map(String::as_str);
        request.streams = StreamSet::of(names).map_err(invalid)?;
    }
    // Waits until the collection has begun.
    let listen = move || events::listen(&app.daemon, request);
    let failed = "the daemon failed to carry out the request";
    let body = match tokio::task::spawn_blocking(listen).await {
        Ok(body) => body?,
        Err(_) => return Err(Refused(refusal(ErrorCode::Failed, failed, ""))),
    };
    let kind = "application/vnd.fathom.recording";
    Ok(([(header::CONTENT_TYPE, kind)], Body::new(body)).into_response())
}

async fn monitor(State(app): State<App>) -> Answer<fathom_control::MonitorStatus> {
    let status = app.daemon.monitor_status().ok_or_else(|| {
        refusal(
            ErrorCode::NotFound,
            "this daemon has no link to a centre",
            "add [monitor] to its configuration",
        )
    })?;
    Ok(axum::Json(status))
}

async fn reload(
    State(app): State<App>,
    query: Result<Query<RemoveQuery>, QueryRejection>,
) -> Answer<fathom_control::ReloadReport> {
    let Query(query) = query.map_err(|error| {
        refusal(ErrorCode::Invalid, error.body_text(), "use a path like /v1/reload?force=true")
    })?;
    let changes = Arc::clone(&app.changes);
    change(&changes, move || app.daemon.reload(query.force)).await
}

async fn configuration(State(app): State<App>) -> Answer<fathom_control::ConfigurationReport> {
    // It reads the file and the records.
    blocking(move || Ok(app.daemon.configuration_report())).await
}

async fn revert(
    State(app): State<App>,
    body: Result<Bytes, BytesRejection>,
) -> Answer<fathom_control::ReloadReport> {
    let request: RevertRequest = read(body)?;
    let changes = Arc::clone(&app.changes);
    change(&changes, move || app.daemon.revert(request.disk.as_deref(), request.force)).await
}

async fn shutdown(State(app): State<App>) -> Answer<Done> {
    app.end.notify_one();
    Ok(axum::Json(Done { message: "the daemon completes requests in flight and ends".into() }))
}

async fn metrics_page(State(app): State<App>) -> Response {
    ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], metrics_text(&app.daemon).await)
        .into_response()
}

/// The page of metrics.
pub(crate) async fn metrics_text(daemon: &Arc<Daemon>) -> String {
    daemon.check_problems().await;
    let page = Arc::clone(daemon);
    tokio::task::spawn_blocking(move || metrics::text(&page)).await.unwrap_or_default()
}

async fn no_such_path() -> Refused {
    Refused(refusal(
        ErrorCode::NotFound,
        "there is no such path",
        "docs/control.md lists the paths; all begin with /v1",
    ))
}

async fn no_such_method() -> Response {
    let body = refusal(
        ErrorCode::Invalid,
        "this path does not support this method",
        "docs/control.md lists methods and paths",
    );
    (StatusCode::METHOD_NOT_ALLOWED, axum::Json(ErrorReply { error: body })).into_response()
}

/// The remedy for a body that is not the expected JSON.
const EXPECTED: &str = "docs/control.md shows what is expected";

fn read<T: DeserializeOwned>(body: Result<Bytes, BytesRejection>) -> Result<T, Refused> {
    let bytes = body.map_err(|error| {
        refusal(ErrorCode::Invalid, error.body_text(), "send a JSON body of at most 2 MB")
    })?;
    let value: serde_json::Value = serde_json::from_slice(&bytes).map_err(|error| {
        let message = format!("the request's body is not JSON: {error}");
        Refused(refusal(ErrorCode::Invalid, message, EXPECTED))
    })?;
    let (places, mut problems) = (Places::default(), Problems::default());
    let title = Title::Words("the request");
    let written = Written { value: &value, title, path: "", places: &places, folder: None };
    let body = fathom_options::read(&written, &mut problems);
    problems.none_or().map_err(|problems| Refused(invalid(&problems)))?;
    body.ok_or_else(|| {
        Refused(refusal(ErrorCode::Invalid, "the request's body is empty", EXPECTED))
    })
}

/// Carries out a change on a separate thread, and waits up to a limit: storage that hangs must
/// not block the caller.
async fn change<T: Serialize + Send + 'static>(
    changes: &Arc<Semaphore>,
    work: impl FnOnce() -> Result<T, ErrorBody> + Send + 'static,
) -> Answer<T> {
    let Ok(permit) = Arc::clone(changes).try_acquire_owned() else {
        return Err(Refused(refusal(
            ErrorCode::Conflict,
            format!("{CHANGES_MAX} changes are in progress already"),
            "try again when one has ended; `fathom disk list` shows disks whose storage hangs",
        )));
    };
    carry_out(permit, work).await
}

/// Carries out a change that has a permit.
async fn carry_out<T: Serialize + Send + 'static>(
    permit: OwnedSemaphorePermit,
    work: impl FnOnce() -> Result<T, ErrorBody> + Send + 'static,
) -> Answer<T> {
    let work = blocking(move || {
        let _permit = permit;
        work()
    });
    match tokio::time::timeout(CHANGE_TIME_MAX, work).await {
        Ok(answer) => answer,
        Err(_) => Err(Refused(refusal(
            ErrorCode::Failed,
            format!("the change has not ended within {} s", CHANGE_TIME_MAX.as_secs()),
            "the storage probably hangs; the change continues, and `fathom disk list` shows it \
             when it has been made",
        ))),
    }
}

/// Carries out `work`, which may take long, on a separate thread.
async fn blocking<T: Serialize + Send + 'static>(
    work: impl FnOnce() -> Result<T, ErrorBody> + Send + 'static,
) -> Answer<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => Ok(axum::Json(result?)),
        Err(_) => Err(Refused(refusal(
            ErrorCode::Failed,
            "the daemon failed to carry out the request",
            "see its log, and report it as a bug",
        ))),
    }
}
