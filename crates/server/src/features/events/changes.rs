//! The producer of `Changes`: what operators, the configuration and the daemon changed.

use std::sync::Arc;

use fathom_insight::Name;
use fathom_insight::change::{Change, HostLabels};
use fathom_insight::stream::Changes;

use super::producer::{Attached, Producer, Reading, RecordReader, Source};
use crate::daemon::Daemon;

/// The daemon's changes.
pub(super) struct ChangesOfDaemon;

impl Producer for ChangesOfDaemon {
    fn stream(&self) -> usize {
        super::CHANGES
    }

    fn sources(&self, daemon: &Arc<Daemon>) -> Vec<Box<dyn Source>> {
        vec![Box::new(ChangeSource(Arc::clone(daemon)))]
    }
}

/// The only source of changes.
struct ChangeSource(Arc<Daemon>);

impl Source for ChangeSource {
    fn key(&self) -> u64 {
        0
    }

    fn disk(&self) -> &'static str {
        ""
    }

    fn attach(&self) -> Option<Box<dyn Attached>> {
        let dropped_before = self.0.change_log.attach()?;
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let reader = ChangeReader { daemon: Arc::clone(&self.0), dropped_before };
        Some(Box::new(Reading::<Changes, _>::new(reader, &HostLabels { host })))
    }
}

/// The only reader of the daemon's changes. Dropping it ends the collection.
struct ChangeReader {
    daemon: Arc<Daemon>,
    /// Changes dropped before it was attached.
    dropped_before: u64,
}

impl RecordReader<Change> for ChangeReader {
    const WAKES: bool = true;

    fn drain(&mut self, records: &mut Vec<Change>) {
        self.daemon.change_log.drain(records);
    }

    fn dropped(&self) -> u64 {
        self.daemon.change_log.dropped() - self.dropped_before
    }

    fn disk(change: &Change) -> Option<Name> {
        Some(Name(change.virtual_disk))
    }
}

impl Drop for ChangeReader {
    fn drop(&mut self) {
        self.daemon.change_log.detach();
    }
}
