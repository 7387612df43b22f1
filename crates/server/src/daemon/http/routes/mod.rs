//! The control interface over HTTP: the handlers of the daemon's own endpoints, to which each
//! feature adds its own.
//!
//! The runtime has one thread, which also receives signals. So a handler of an endpoint that is
//! answered [at once](fathom_control::AtOnce) gets a [`View`](crate::daemon::view::View), which
//! offers nothing that waits; all others run on threads of the [`pool`]. A handler that does not
//! fit its endpoint's cost does not compile.

#![deny(clippy::disallowed_methods)]

mod pool;
mod register;
mod waiter;

use std::sync::Arc;

use axum::Router;
use axum::http::StatusCode;
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, on};
use fathom_control::{EndpointRow, ErrorCode, ErrorReply, endpoints};

use super::noted::note;
use crate::daemon::Daemon;
use crate::daemon::metrics;
use crate::daemon::stack::refusal;
use crate::features::FEATURES;
use register::filter;

pub(crate) use pool::{Share, threads_max};
pub(crate) use register::{BODY_REMEDY, Refused, Routes};
pub(crate) use waiter::Waiter;

/// All paths of the control interface, for those who may change everything.
pub(crate) fn router(daemon: Arc<Daemon>) -> Router {
    let audit = from_fn_with_state(Arc::clone(&daemon), note);
    of_handlers(routes().into_list()).layer(audit).with_state(daemon)
}

/// The same paths, for those who may only look. What would change something is refused. They have
/// permits of their own, so that they do not delay the others.
pub(crate) fn view_router(daemon: Arc<Daemon>) -> Router {
    let handlers = routes().into_list().into_iter();
    let refused = |(row, handler): (EndpointRow, _)| {
        let handler = if row.is_view() { handler } else { on(filter(row.method), refuse_change) };
        (row, handler)
    };
    of_handlers(handlers.map(refused).collect()).with_state(daemon)
}

fn of_handlers(handlers: Vec<(EndpointRow, MethodRouter<Arc<Daemon>>)>) -> Router<Arc<Daemon>> {
    let mut router = Router::new();
    for (row, handler) in handlers {
        router = router.route(row.path, handler);
    }
    router.fallback(no_such_path).method_not_allowed_fallback(no_such_method)
}

async fn refuse_change() -> Refused {
    Refused(refusal(
        ErrorCode::Forbidden,
        "you may look, and change nothing: this is the socket of `view_group` of [daemon]",
        "try again as root, as the daemon's user, or as a member of `control_group`",
    ))
}

/// The handlers of all endpoints.
fn routes() -> Routes {
    let mut routes = Routes::new();
    add_readers(&mut routes);
    add_changes(&mut routes);
    for feature in FEATURES {
        feature.routes(&mut routes);
    }
    routes
}

fn add_readers(routes: &mut Routes) {
    routes.checked(&endpoints::DAEMON, |view, (), (), ()| Ok(view.info()));
    routes.checked(&endpoints::DISK_LIST, |view, (), (), ()| Ok(view.disk_list()));
    routes.checked(&endpoints::DISK_STATUS, |view, name, (), ()| view.disk_status(&name));
    routes.checked(&endpoints::STATISTICS, |view, (), (), ()| Ok(view.statistics()));
    routes.at_once(&endpoints::SHUTDOWN, |view, (), (), ()| Ok(view.shutdown()));
    routes.waiting(&endpoints::EVENTS, |waiter, (), query, ()| async move {
        Ok(waiter.events(query).await)
    });
    routes.blocking(&endpoints::CONFIGURATION, |daemon, (), (), ()| {
        Ok(daemon.configuration_report())
    });
    routes.page(&endpoints::METRICS, metrics::CONTENT_TYPE, |daemon, (), (), ()| {
        Ok(metrics::text(daemon))
    });
}

fn add_changes(routes: &mut Routes) {
    routes.change(&endpoints::ADD_DISK, |daemon, (), query, definition| {
        daemon.add_disk(definition, query.temporary)
    });
    routes.change(&endpoints::CHANGE_DISK, |daemon, name, (), wanted| {
        daemon.change_disk(&name, &wanted)
    });
    routes.change(&endpoints::RECOVER_DISK, |daemon, name, (), ()| daemon.recover_disk(&name));
    routes.change(&endpoints::RETRY_DISK, |daemon, name, (), ()| daemon.retry_disk(&name));
    routes.change(&endpoints::REMOVE_DISK, |daemon, name, query, ()| {
        daemon.remove_disk(&name, query.force, query.temporary)
    });
    routes.change(&endpoints::RELOAD, |daemon, (), query, ()| daemon.reload(query.force));
    routes.change(&endpoints::REVERT, |daemon, (), (), request| {
        daemon.revert(request.disk.as_deref(), request.force)
    });
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
    use fathom_control::ENDPOINTS;

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
