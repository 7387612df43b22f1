//! What may be read on the thread of the runtime, which also receives signals.

use std::any::Any;
use std::sync::Arc;

use fathom_control::{DaemonInfo, DiskList, DiskStatus, Done, ErrorBody, Statistics};

use super::{Daemon, Served};

/// The daemon, for handlers of the cost [`AtOnce`](fathom_control::AtOnce). It offers only what is
/// known: nothing here waits for a disk, a file, a guest or a change. The tables behind it are
/// locked for short times. Features add methods of their own for what they know.
#[derive(Clone, Copy)]
pub(crate) struct View<'a>(&'a Daemon);

impl Daemon {
    /// What can be read without waiting.
    pub(crate) fn view(&self) -> View<'_> {
        View(self)
    }
}

impl<'a> View<'a> {
    /// What a feature keeps, by its type.
    pub(crate) fn part<T: Any>(self) -> &'a T {
        self.0.part()
    }

    /// The served disk `name`.
    pub(crate) fn find(self, name: &str) -> Result<Arc<Served>, ErrorBody> {
        self.0.find(name)
    }

    /// The served disks.
    pub(crate) fn served(self) -> Vec<Arc<Served>> {
        self.0.served()
    }

    pub(crate) fn info(self) -> DaemonInfo {
        self.0.info()
    }

    pub(crate) fn disk_list(self) -> DiskList {
        self.0.disk_list()
    }

    pub(crate) fn disk_status(self, name: &str) -> Result<DiskStatus, ErrorBody> {
        self.0.disk_status(name)
    }

    pub(crate) fn statistics(self) -> Statistics {
        self.0.statistics()
    }

    /// Asks for the end of the daemon.
    pub(crate) fn shutdown(self) -> Done {
        self.0.end_wanted.notify_one();
        Done { message: "the daemon completes requests in flight and ends".into() }
    }
}
