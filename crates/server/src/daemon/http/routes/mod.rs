//! The control interface over HTTP: which handler answers which endpoint.
//!
//! The runtime has one thread, which also receives signals. So a handler of an endpoint that is
//! answered [at once](fathom_control::AtOnce) gets a [`View`](view::View), which offers nothing
//! that waits; all others run on threads of the [`pool`]. A handler that does not fit its
//! endpoint's cost does not compile.

#![deny(clippy::disallowed_methods)]

mod pool;
mod register;
mod view;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use fathom_control::{DirtyQuery, DirtyReport, ErrorBody, ErrorCode, ErrorReply, endpoints};
use tokio::sync::Notify;

use crate::daemon::Daemon;
use crate::daemon::metrics;
use crate::daemon::stack::refusal;
use register::{Refused, Routes};
use view::Waiter;

pub(crate) use pool::{Share, threads_max};

/// The state that the handlers share.
#[derive(Clone)]
pub(crate) struct App {
    pub(crate) daemon: Arc<Daemon>,
    /// Notified when a client requests the shutdown.
    pub(crate) end: Arc<Notify>,
}

/// All paths of the control interface.
pub(crate) fn router(app: App) -> Router {
    let mut router = Router::new();
    for (row, handler) in routes().into_list() {
        router = router.route(row.path, handler);
    }
    router.fallback(no_such_path).method_not_allowed_fallback(no_such_method).with_state(app)
}

/// The handlers of all endpoints.
fn routes() -> Routes {
    let mut routes = Routes::default();
    add_readers(&mut routes);
    add_workers(&mut routes);
    add_changes(&mut routes);
    routes.waiting(&endpoints::DIRTY, |waiter, (), query, ()| dirty(waiter, query));
    routes.waiting(&endpoints::EVENTS, |waiter, (), query, ()| async move {
        Ok(waiter.events(query).await)
    });
    routes
}

/// What is answered at once.
fn add_readers(routes: &mut Routes) {
    routes.checked(&endpoints::DAEMON, |view, (), (), ()| Ok(view.info()));
    routes.checked(&endpoints::DISK_LIST, |view, (), (), ()| Ok(view.disk_list()));
    routes.checked(&endpoints::DISK_STATUS, |view, name, (), ()| view.disk_status(&name));
    routes.checked(&endpoints::STATISTICS, |view, (), (), ()| Ok(view.statistics()));
    routes.at_once(&endpoints::BACKGROUND, |view, (), (), ()| Ok(view.background()));
    routes.at_once(&endpoints::OFFLOAD, |view, (), query, ()| view.offload(query.disk.as_deref()));
    routes.at_once(&endpoints::OFFLOAD_HISTORY, |view, name, (), ()| view.offload_history(&name));
    routes.at_once(&endpoints::QUERIES, |view, (), (), ()| Ok(view.queries()));
    routes.at_once(&endpoints::MONITOR, |view, (), (), ()| view.monitor());
    routes.at_once(&endpoints::SHUTDOWN, |view, (), (), ()| Ok(view.shutdown()));
}

/// What takes work.
fn add_workers(routes: &mut Routes) {
    routes.blocking(&endpoints::DEVICES, |daemon, (), (), ()| Ok(daemon.devices()));
    routes.blocking(&endpoints::CACHES, |daemon, (), query, ()| {
        daemon.caches(query.disk.as_deref(), query.points, query.files)
    });
    routes.blocking(&endpoints::USAGE, |daemon, (), query, ()| {
        daemon.usage(query.disk.as_deref(), query.vm.as_deref())
    });
    routes.blocking(&endpoints::SLOW, |daemon, (), query, ()| {
        daemon.slow(query.disk.as_deref(), query.count.unwrap_or(usize::MAX))
    });
    routes.blocking(&endpoints::GUESTS, |daemon, (), (), ()| Ok(daemon.guests()));
    routes.blocking(&endpoints::CONFIGURATION, |daemon, (), (), ()| {
        Ok(daemon.configuration_report())
    });
    let recording = "application/vnd.fathom.recording";
    routes.bytes(&endpoints::RECORDING, recording, |daemon, (), query, ()| {
        daemon.record(query).map(Body::new)
    });
    routes.page(&endpoints::METRICS, metrics::CONTENT_TYPE, |daemon, (), (), ()| {
        Ok(metrics::text(daemon))
    });
}

/// What changes something.
fn add_changes(routes: &mut Routes) {
    let (changes, flushes) = (&Share::of_changes(), &Share::of_flushes());
    routes.change(changes, &endpoints::ADD_DISK, |daemon, (), query, definition| {
        daemon.add_disk(definition, query.temporary)
    });
    routes.change(changes, &endpoints::CHANGE_DISK, |daemon, name, (), wanted| {
        daemon.change_disk(&name, &wanted)
    });
    routes.change(changes, &endpoints::RECOVER_DISK, |daemon, name, (), ()| {
        daemon.recover_disk(&name)
    });
    routes.change(changes, &endpoints::RETRY_DISK, |daemon, name, (), ()| daemon.retry_disk(&name));
    routes.change(changes, &endpoints::REMOVE_DISK, |daemon, name, query, ()| {
        daemon.remove_disk(&name, query.force, query.temporary)
    });
    routes.change(changes, &endpoints::DECIDE_LOG, |daemon, name, (), request| {
        daemon.decide_log(&name, request.decision)
    });
    // A start waits until the log has been tried out.
    routes.change(changes, &endpoints::CHANGE_OFFLOAD, |daemon, name, (), request| {
        daemon.change_offload(&name, request)
    });
    routes.change(changes, &endpoints::FORGET_VOLUME, |daemon, (cluster, volume), (), ()| {
        daemon.forget_volume(cluster, volume)
    });
    routes.change(changes, &endpoints::RELOAD, |daemon, (), query, ()| daemon.reload(query.force));
    routes.change(changes, &endpoints::REVERT, |daemon, (), (), request| {
        daemon.revert(request.disk.as_deref(), request.force)
    });
    routes.change(flushes, &endpoints::FLUSH_GUEST, |daemon, vm, (), request| {
        daemon.flush_guest(&vm, request.by)
    });
}

/// Counts dirty pages. A count of what is written in an interval begins and ends on a thread, and
/// uses none in between.
async fn dirty(waiter: Waiter, query: DirtyQuery) -> Result<DirtyReport, ErrorBody> {
    let Some(time) = query.written_ms.map(Duration::from_millis) else {
        return waiter.work(move |daemon| daemon.dirty(&query, None)).await;
    };
    let _permit = waiter.admit()?;
    let guest = query.guest.clone();
    let begun = waiter.work(move |daemon| daemon.begin_written(guest.as_deref(), time)).await?;
    tokio::time::sleep(time).await;
    waiter.work(move |daemon| daemon.dirty(&query, Some(begun))).await
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

#[cfg(test)]
mod tests {
    use fathom_control::{ENDPOINTS, EndpointRow};

    use super::*;

    #[test]
    fn each_endpoint_has_a_handler() {
        let key = |row: &EndpointRow| (row.path, row.method.name());
        let mut handled: Vec<_> = routes().into_list().iter().map(|(row, _)| key(row)).collect();
        let known = ENDPOINTS.iter().flat_map(|list| list.iter());
        let mut known: Vec<_> = known.map(|endpoint| key(&endpoint.row())).collect();
        handled.sort_unstable();
        known.sort_unstable();
        assert_eq!(handled, known);
    }
}
