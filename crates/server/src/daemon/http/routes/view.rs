//! What requests may read on the thread of the runtime, which also receives signals: nothing here
//! waits for a disk, a file, a guest or a change.

use std::sync::Arc;
use std::time::Duration;

use fathom_control::{
    BackgroundList, DaemonInfo, DiskList, DiskStatus, Done, ErrorBody, ErrorCode, EventList,
    EventQuery, MonitorStatus, OffloadHistory, OffloadReport, QueryList, Statistics,
};

use super::App;
use super::pool::{Permit, Share};
use crate::daemon::Daemon;
use crate::daemon::stack::refusal;

/// The longest time that a client may wait for an event.
const WAIT_MAX: Duration = Duration::from_secs(600);

/// The daemon, for handlers of the cost [`AtOnce`](fathom_control::AtOnce). It offers only what is
/// known. The tables behind it are locked for short times, so that no change delays a reader.
pub(super) struct View<'a>(&'a App);

impl<'a> View<'a> {
    pub(super) fn new(app: &'a App) -> Self {
        Self(app)
    }

    pub(super) fn info(&self) -> DaemonInfo {
        self.0.daemon.info()
    }

    pub(super) fn disk_list(&self) -> DiskList {
        self.0.daemon.disk_list()
    }

    pub(super) fn disk_status(&self, name: &str) -> Result<DiskStatus, ErrorBody> {
        self.0.daemon.disk_status(name)
    }

    pub(super) fn statistics(&self) -> Statistics {
        self.0.daemon.statistics()
    }

    pub(super) fn background(&self) -> BackgroundList {
        self.0.daemon.background_list()
    }

    pub(super) fn offload(&self, disk: Option<&str>) -> Result<OffloadReport, ErrorBody> {
        self.0.daemon.offload_report(disk)
    }

    pub(super) fn offload_history(&self, disk: &str) -> Result<OffloadHistory, ErrorBody> {
        self.0.daemon.offload_history(disk)
    }

    pub(super) fn queries(&self) -> QueryList {
        self.0.daemon.query_list()
    }

    pub(super) fn monitor(&self) -> Result<MonitorStatus, ErrorBody> {
        self.0.daemon.monitor_status().ok_or_else(|| {
            refusal(
                ErrorCode::NotFound,
                "this daemon has no link to a centre",
                "add [monitor] to its configuration",
            )
        })
    }

    /// Asks for the end of the daemon.
    pub(super) fn shutdown(&self) -> Done {
        self.0.end.notify_one();
        Done { message: "the daemon completes requests in flight and ends".into() }
    }
}

/// The daemon, for handlers of the cost [`Waiting`](fathom_control::Waiting): they wait without a
/// thread, and have threads for what they do before and after.
pub(super) struct Waiter {
    app: App,
    workers: Share,
    waiters: Share,
}

impl Waiter {
    pub(super) fn new(app: App, workers: Share, waiters: Share) -> Self {
        Self { app, workers, waiters }
    }

    /// The permit to wait with something that takes memory meanwhile.
    ///
    /// # Errors
    /// [`ErrorCode::Busy`] when as many requests wait as may.
    pub(super) fn admit(&self) -> Result<Permit, ErrorBody> {
        self.waiters.permit()
    }

    /// Carries out `work` on a thread.
    ///
    /// # Errors
    /// Those of `work`, and [`ErrorCode::Busy`].
    pub(super) async fn work<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Daemon) -> Result<T, ErrorBody> + Send + 'static,
    ) -> Result<T, ErrorBody> {
        let daemon = Arc::clone(&self.app.daemon);
        self.workers.work(move || work(&daemon)).await
    }

    /// The lines of the log after a number. Waits for one for the time of the query.
    pub(super) async fn events(&self, query: EventQuery) -> EventList {
        let wait = Duration::from_millis(query.wait_ms).min(WAIT_MAX);
        self.app.daemon.journal.events_within(query.after, wait).await
    }
}
