//! The threads of requests that take work or may hang.
//!
//! Each use has threads of its own ([`Share`]), so that no number of requests of one kind keeps
//! another kind, `/metrics` or a reload waiting. The shares together are all threads that there
//! are ([`threads_max`]).

use std::sync::Arc;
use std::time::Duration;

use fathom_control::{CostKind, ENDPOINTS, ErrorBody, ErrorCode};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::daemon::stack::refusal;

/// The most changes in progress. A change may hang as long as its storage does.
pub(crate) const CHANGES_MAX: usize = 32;
/// The most flushes of guests in progress. A flush lasts up to half a minute, and must not keep an
/// operator from changing disks.
pub(crate) const FLUSHES_MAX: usize = 16;
/// The most changes of pools in progress. One may wait for guests to be frozen, and for places in a
/// pool.
pub(crate) const POOL_CHANGES_MAX: usize = 16;
/// The threads of each endpoint that takes work or waits.
pub(crate) const WORKERS_MAX: usize = 4;
/// The most requests of an endpoint that wait at a time for what they ask for.
pub(crate) const WAITERS_MAX: usize = 8;
/// How long a request waits for a thread of its endpoint.
const WORKER_TIME_MAX: Duration = Duration::from_secs(5);
/// How long a request waits for its change, which continues beyond that.
const CHANGE_TIME_MAX: Duration = Duration::from_secs(45);

/// The most threads of requests. They end when idle.
pub(crate) fn threads_max() -> usize {
    let endpoints = ENDPOINTS.iter().flat_map(|list| list.iter());
    let workers = endpoints
        .filter(|endpoint| matches!(endpoint.row().cost, CostKind::Blocking | CostKind::Waiting));
    // Twice, because those who only look have shares of their own. More for `/metrics` over TCP,
    // and one for a reload that a signal asks for.
    CHANGES_MAX + FLUSHES_MAX + POOL_CHANGES_MAX + WORKERS_MAX * (2 * workers.count() + 1) + 1
}

/// The right to use one thread of a share, or to wait.
pub(crate) type Permit = OwnedSemaphorePermit;

/// A limited number of requests of one kind.
#[derive(Clone)]
pub(crate) struct Share {
    permits: Arc<Semaphore>,
    busy: Arc<(String, &'static str)>,
}

impl Share {
    /// A share of `max` requests. `what` says what is in progress when there are as many, and
    /// `remedy` what to do then.
    fn new(max: usize, what: String, remedy: &'static str) -> Self {
        Self { permits: Arc::new(Semaphore::new(max)), busy: Arc::new((what, remedy)) }
    }

    /// That of changes.
    pub(crate) fn of_changes() -> Self {
        Self::new(
            CHANGES_MAX,
            format!("{CHANGES_MAX} changes are in progress already"),
            "try again when one has ended; `fathom disk list` shows disks whose storage hangs",
        )
    }

    /// That of flushes of guests.
    pub(crate) fn of_flushes() -> Self {
        Self::new(
            FLUSHES_MAX,
            format!("{FLUSHES_MAX} guests are being flushed already"),
            "try again when one of the flushes has ended",
        )
    }

    /// That of changes of pools.
    pub(crate) fn of_pools() -> Self {
        Self::new(
            POOL_CHANGES_MAX,
            format!("{POOL_CHANGES_MAX} changes of pools are in progress already"),
            "try again when one of them has ended",
        )
    }

    /// That of the threads of the endpoint at `path`.
    pub(crate) fn of_workers(path: &str) -> Self {
        Self::new(
            WORKERS_MAX,
            format!("{WORKERS_MAX} requests to {path} are in progress already"),
            "try again; if that goes on, what they read hangs: see `fathom disk list`",
        )
    }

    /// That of the requests to the endpoint at `path` that wait, without a thread.
    pub(crate) fn of_waiters(path: &str) -> Self {
        Self::new(
            WAITERS_MAX,
            format!("{WAITERS_MAX} requests to {path} are waiting already"),
            "try again when one of them has its answer",
        )
    }

    /// A permit, if there is one now.
    ///
    /// # Errors
    /// [`ErrorCode::Busy`] when there is none.
    pub(crate) fn permit(&self) -> Result<Permit, ErrorBody> {
        Arc::clone(&self.permits).try_acquire_owned().map_err(|_| self.is_busy())
    }

    /// A permit, as soon as there is one.
    ///
    /// # Errors
    /// [`ErrorCode::Busy`] when there is none in time.
    async fn next_permit(&self) -> Result<Permit, ErrorBody> {
        let permit = Arc::clone(&self.permits).acquire_owned();
        match tokio::time::timeout(WORKER_TIME_MAX, permit).await {
            Ok(Ok(permit)) => Ok(permit),
            Ok(Err(_)) | Err(_) => Err(self.is_busy()),
        }
    }

    fn is_busy(&self) -> ErrorBody {
        let (what, remedy) = &*self.busy;
        refusal(ErrorCode::Busy, what.clone(), *remedy)
    }

    /// Carries out `work` on a thread of this share, as soon as one is free.
    ///
    /// # Errors
    /// Those of `work`, and [`ErrorCode::Busy`].
    pub(crate) async fn work<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ErrorBody> + Send + 'static,
    ) -> Result<T, ErrorBody> {
        on_thread(self.next_permit().await?, work).await
    }

    /// Carries out a change on a thread of this share, and waits up to a limit: storage that hangs
    /// must not block the caller.
    ///
    /// # Errors
    /// Those of the change, and [`ErrorCode::Busy`].
    pub(crate) async fn change<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ErrorBody> + Send + 'static,
    ) -> Result<T, ErrorBody> {
        let work = on_thread(self.permit()?, work);
        tokio::time::timeout(CHANGE_TIME_MAX, work).await.unwrap_or_else(|_| {
            Err(refusal(
                ErrorCode::Failed,
                format!("the change has not ended within {} s", CHANGE_TIME_MAX.as_secs()),
                "the storage probably hangs; the change continues, and `fathom disk list` shows \
                 it when it has been made",
            ))
        })
    }
}

/// Carries out `work` on a thread, which holds the permit.
#[expect(clippy::disallowed_methods, reason = "the only place where requests get threads")]
async fn on_thread<T: Send + 'static>(
    permit: Permit,
    work: impl FnOnce() -> Result<T, ErrorBody> + Send + 'static,
) -> Result<T, ErrorBody> {
    let work = move || {
        let _permit = permit;
        work()
    };
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|_| {
        Err(refusal(
            ErrorCode::Failed,
            "the daemon failed to carry out the request",
            "see its log, and report it as a bug",
        ))
    })
}
