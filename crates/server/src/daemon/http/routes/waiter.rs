//! The daemon for requests that wait without a thread.

use std::sync::Arc;
use std::time::Duration;

use fathom_control::{ErrorBody, EventList, EventQuery};

use super::pool::{Permit, Share};
use crate::daemon::Daemon;

/// The longest time that a client may wait for an event.
const WAIT_MAX: Duration = Duration::from_secs(600);

/// The daemon, for handlers of the cost [`Waiting`](fathom_control::Waiting): they wait without a
/// thread, and have threads for what they do before and after.
pub(crate) struct Waiter {
    daemon: Arc<Daemon>,
    workers: Share,
    waiters: Share,
}

impl Waiter {
    pub(crate) fn new(daemon: Arc<Daemon>, workers: Share, waiters: Share) -> Self {
        Self { daemon, workers, waiters }
    }

    /// The permit to wait with something that takes memory meanwhile.
    ///
    /// # Errors
    /// [`ErrorCode::Busy`] when as many requests wait as may.
    pub(crate) fn admit(&self) -> Result<Permit, ErrorBody> {
        self.waiters.permit()
    }

    /// Carries out `work` on a thread.
    ///
    /// # Errors
    /// Those of `work`, and [`ErrorCode::Busy`].
    pub(crate) async fn work<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Daemon) -> Result<T, ErrorBody> + Send + 'static,
    ) -> Result<T, ErrorBody> {
        let daemon = Arc::clone(&self.daemon);
        self.workers.work(move || work(&daemon)).await
    }

    /// The lines of the log after a number. Waits for one for the time of the query.
    pub(crate) async fn events(&self, query: EventQuery) -> EventList {
        let wait = Duration::from_millis(query.wait_ms).min(WAIT_MAX);
        self.daemon.journal.events_within(query.after, wait).await
    }
}
