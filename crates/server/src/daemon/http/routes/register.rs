//! The table of handlers. The type of an endpoint decides what its handler gets and returns, and
//! its cost where the handler runs: see the methods of [`Routes`].

use std::future::Future;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, FromRequestParts, RawPathParams, Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodFilter, MethodRouter, on};
use fathom_control::{
    AnyEndpoint, AtOnce, Blocking, Change, Cost, Endpoint, EndpointRow, ErrorBody, ErrorCode,
    ErrorReply, Method, PathParameters, Query, Waiting, has_body, read_query,
};
use fathom_options::{Origins, Problems, Title, Written};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::pool::Share;
use super::waiter::Waiter;
use crate::daemon::Daemon;
use crate::daemon::stack::{invalid, refusal};
use crate::daemon::view::View;

/// An error as a response.
pub(crate) struct Refused(pub(crate) ErrorBody);

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

/// A handler of the cost [`AtOnce`]: it sees only what can be read without waiting.
pub(crate) type Reader<P, Q, B, A> = fn(View<'_>, P, Q, B) -> Result<A, ErrorBody>;
/// A handler that runs on a thread of the pool.
pub(crate) type Worker<P, Q, B, A> = fn(&Arc<Daemon>, P, Q, B) -> Result<A, ErrorBody>;

/// The handlers that have been added.
pub(crate) struct Routes {
    list: Vec<(EndpointRow, MethodRouter<Arc<Daemon>>)>,
    /// The share of all changes.
    changes: Share,
}

impl Routes {
    pub(super) fn new() -> Self {
        Self { list: Vec::new(), changes: Share::of_changes() }
    }

    /// The endpoints, each with its handler.
    pub(super) fn into_list(self) -> Vec<(EndpointRow, MethodRouter<Arc<Daemon>>)> {
        self.list
    }

    /// Adds an answer that is known.
    pub(crate) fn at_once<P, Q, B, A>(
        &mut self,
        endpoint: &Endpoint<AtOnce, P, Q, B, A>,
        handler: Reader<P, Q, B, A>,
    ) where
        P: PathParameters,
        Q: Query,
        B: DeserializeOwned + Send + 'static,
        A: Serialize + 'static,
    {
        self.read(endpoint, false, handler);
    }

    /// The same, after a check for problems, which waits for a short time at most.
    pub(crate) fn checked<P, Q, B, A>(
        &mut self,
        endpoint: &Endpoint<AtOnce, P, Q, B, A>,
        handler: Reader<P, Q, B, A>,
    ) where
        P: PathParameters,
        Q: Query,
        B: DeserializeOwned + Send + 'static,
        A: Serialize + 'static,
    {
        self.read(endpoint, true, handler);
    }

    fn read<P, Q, B, A>(
        &mut self,
        endpoint: &Endpoint<AtOnce, P, Q, B, A>,
        is_checked: bool,
        handler: Reader<P, Q, B, A>,
    ) where
        P: PathParameters,
        Q: Query,
        B: DeserializeOwned + Send + 'static,
        A: Serialize + 'static,
    {
        let status = endpoint.status();
        self.add(endpoint, move |daemon: Arc<Daemon>, parameters, query, body| async move {
            if is_checked {
                daemon.check_problems().await;
            }
            Ok(json(status, handler(daemon.view(), parameters, query, body)?))
        });
    }

    /// Adds an answer that comes after a wait.
    pub(crate) fn waiting<P, Q, B, A, F>(
        &mut self,
        endpoint: &Endpoint<Waiting, P, Q, B, A>,
        handler: fn(Waiter, P, Q, B) -> F,
    ) where
        P: PathParameters,
        Q: Query,
        B: DeserializeOwned + Send + 'static,
        A: Serialize + 'static,
        F: Future<Output = Result<A, ErrorBody>> + Send + 'static,
    {
        let status = endpoint.status();
        let workers = Share::of_workers(endpoint.path());
        let waiters = Share::of_waiters(endpoint.path());
        self.add(endpoint, move |daemon, parameters, query, body| {
            let waiter = Waiter::new(daemon, workers.clone(), waiters.clone());
            let answer = handler(waiter, parameters, query, body);
            async move { Ok(json(status, answer.await?)) }
        });
    }

    /// Adds an answer that takes work.
    pub(crate) fn blocking<P, Q, B, A>(
        &mut self,
        endpoint: &Endpoint<Blocking, P, Q, B, A>,
        handler: Worker<P, Q, B, A>,
    ) where
        P: PathParameters,
        Q: Query,
        B: DeserializeOwned + Send + 'static,
        A: Serialize + Send + 'static,
    {
        let status = endpoint.status();
        self.work(endpoint, false, handler, move |answer| json(status, answer));
    }

    /// Adds an answer that takes work, and is bytes of a kind instead of JSON.
    pub(crate) fn bytes<P, Q, B, A>(
        &mut self,
        endpoint: &Endpoint<Blocking, P, Q, B, A>,
        kind: &'static str,
        handler: Worker<P, Q, B, Body>,
    ) where
        P: PathParameters,
        Q: Query,
        B: DeserializeOwned + Send + 'static,
        A: 'static,
    {
        self.work(endpoint, false, handler, move |body| {
            ([(header::CONTENT_TYPE, kind)], body).into_response()
        });
    }

    /// Adds a text that takes work, after a check for problems.
    pub(crate) fn page<P, Q, B, A>(
        &mut self,
        endpoint: &Endpoint<Blocking, P, Q, B, A>,
        kind: &'static str,
        handler: Worker<P, Q, B, String>,
    ) where
        P: PathParameters,
        Q: Query,
        B: DeserializeOwned + Send + 'static,
        A: 'static,
    {
        self.work(endpoint, true, handler, move |text| {
            ([(header::CONTENT_TYPE, kind)], text).into_response()
        });
    }

    fn work<P, Q, B, A, T>(
        &mut self,
        endpoint: &Endpoint<Blocking, P, Q, B, A>,
        is_checked: bool,
        handler: Worker<P, Q, B, T>,
        respond: impl Fn(T) -> Response + Clone + Send + Sync + 'static,
    ) where
        P: PathParameters,
        Q: Query,
        B: DeserializeOwned + Send + 'static,
        A: 'static,
        T: Send + 'static,
    {
        let workers = Share::of_workers(endpoint.path());
        self.add(endpoint, move |daemon: Arc<Daemon>, parameters, query, body| {
            let (workers, respond) = (workers.clone(), respond.clone());
            async move {
                if is_checked {
                    daemon.check_problems().await;
                }
                let work = move || handler(&daemon, parameters, query, body);
                Ok(respond(workers.work(work).await?))
            }
        });
    }

    /// Adds a change.
    pub(crate) fn change<P, Q, B, A>(
        &mut self,
        endpoint: &Endpoint<Change, P, Q, B, A>,
        handler: Worker<P, Q, B, A>,
    ) where
        P: PathParameters,
        Q: Query,
        B: DeserializeOwned + Send + 'static,
        A: Serialize + Send + 'static,
    {
        let share = self.changes.clone();
        self.change_within(share, endpoint, handler);
    }

    /// Adds a change that is none of disks. `share` limits the number of those in progress.
    pub(crate) fn change_within<P, Q, B, A>(
        &mut self,
        share: Share,
        endpoint: &Endpoint<Change, P, Q, B, A>,
        handler: Worker<P, Q, B, A>,
    ) where
        P: PathParameters,
        Q: Query,
        B: DeserializeOwned + Send + 'static,
        A: Serialize + Send + 'static,
    {
        let status = endpoint.status();
        self.add(endpoint, move |daemon: Arc<Daemon>, parameters, query, body| {
            let share = share.clone();
            async move {
                let change = move || handler(&daemon, parameters, query, body);
                Ok(json(status, share.change(change).await?))
            }
        });
    }

    fn add<C, P, Q, B, A, H, F>(&mut self, endpoint: &Endpoint<C, P, Q, B, A>, handler: H)
    where
        C: Cost,
        P: PathParameters,
        Q: Query,
        B: DeserializeOwned + Send + 'static,
        A: 'static,
        H: Fn(Arc<Daemon>, P, Q, B) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Result<Response, Refused>> + Send,
    {
        let row = endpoint.row();
        let answer = move |State(daemon): State<Arc<Daemon>>, request: Request| async move {
            let (parameters, query, body) = read(row, request).await?;
            handler(daemon, parameters, query, body).await
        };
        self.list.push((row, on(filter(row.method), answer)));
    }
}

/// The requests of a method.
pub(super) fn filter(method: Method) -> MethodFilter {
    match method {
        Method::Get => MethodFilter::GET,
        Method::Post => MethodFilter::POST,
        Method::Patch => MethodFilter::PATCH,
        Method::Delete => MethodFilter::DELETE,
    }
}

/// The response with an answer and the status of an endpoint's success.
fn json<A: Serialize>(status: u16, answer: A) -> Response {
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::OK);
    (status, axum::Json(answer)).into_response()
}

/// Reads the parameters and the body of a request.
async fn read<P: PathParameters, Q: Query, B: DeserializeOwned + 'static>(
    row: EndpointRow,
    request: Request,
) -> Result<(P, Q, B), Refused> {
    let wrong = |message: String| {
        let remedy = format!("use a path like {}", row.shown());
        Refused(refusal(ErrorCode::Invalid, message, remedy))
    };
    let (mut parts, body) = request.into_parts();
    let found = RawPathParams::from_request_parts(&mut parts, &()).await;
    let found = found.map_err(|error| wrong(error.body_text()))?;
    let values = found.iter().map(|(_, value)| value.to_owned()).collect();
    let parameters = P::from_values(values).ok_or_else(|| wrong("the path is not whole".into()))?;
    let query = read_query(parts.uri.query().unwrap_or_default());
    let query = query.map_err(|error| wrong(error.to_string()))?;
    if !has_body::<B>() {
        let none = serde_json::from_value(serde_json::Value::Null);
        return Ok((parameters, query, none.map_err(|error| wrong(error.to_string()))?));
    }
    let bytes = Bytes::from_request(Request::from_parts(parts, body), &()).await;
    let bytes =
        bytes.map_err(|error| refusal(ErrorCode::Invalid, error.body_text(), BODY_REMEDY))?;
    Ok((parameters, query, read_body(&bytes)?))
}

/// The remedy for a body that is too long or does not arrive.
pub(crate) const BODY_REMEDY: &str = "send a JSON body of at most 2 MB";

/// The remedy for a body that is not the expected JSON.
const EXPECTED: &str = "docs/control.md shows what is expected";

fn read_body<B: DeserializeOwned>(bytes: &[u8]) -> Result<B, Refused> {
    let value: serde_json::Value = serde_json::from_slice(bytes).map_err(|error| {
        let message = format!("the request's body is not JSON: {error}");
        Refused(refusal(ErrorCode::Invalid, message, EXPECTED))
    })?;
    let (origins, mut problems) = (Origins::default(), Problems::default());
    let title = Title::Words("the request");
    let written = Written { value: &value, title, path: "", origins: &origins, folder: None };
    let body = fathom_options::read(&written, &mut problems);
    problems.none_or().map_err(|problems| Refused(invalid(&problems)))?;
    body.ok_or_else(|| {
        Refused(refusal(ErrorCode::Invalid, "the request's body is empty", EXPECTED))
    })
}
