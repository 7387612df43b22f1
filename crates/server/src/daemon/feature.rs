//! What a feature of the daemon is: its part in the life of the daemon and of a disk.

use std::any::Any;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use fathom_block::Disk;
use fathom_control::{AuditEntry, DiskDefinition, DiskStatus, ErrorBody, ReloadReport};
use fathom_layers::LayerKind;

use super::http::routes::Routes;
use super::metrics::{MetricsText, Scrape};
use super::parts::Parts;
use super::problems::FoundProblem;
use super::stack::Equipment;
use super::stop::Task;
use super::{Daemon, Served};
use crate::configuration::{Configuration, SectionKind};

/// What the daemon does beyond serving disks. A feature is a folder in `features`, and a line in
/// [`FEATURES`]. A method does nothing unless the feature defines it. The features
/// are called in the order of the table.
pub(crate) trait Feature: Sync {
    /// The tables of the configuration that it reads.
    fn sections(&self) -> Vec<SectionKind> {
        Vec::new()
    }

    /// Adds what the feature keeps for all disks while the daemon runs. A command that opens a
    /// disk without a daemon has no configuration: then it adds what the opening needs.
    fn keep(&self, _configuration: Option<&Configuration>, _parts: &mut Parts) {}

    /// The daemon has been made, and no disk has been opened.
    fn prepare(&self, _daemon: &Arc<Daemon>, _configuration: &Configuration) {}

    /// Begins the feature's work at a stage of the start. Returns why it cannot do a part of that
    /// yet. With `is_strict` any such reason ends the start.
    ///
    /// # Errors
    /// Why the daemon cannot start.
    fn begin(
        &self,
        _daemon: &Arc<Daemon>,
        _start: &Start<'_>,
        _stage: Beginning,
    ) -> Result<Vec<ErrorBody>, ErrorBody> {
        Ok(Vec::new())
    }

    /// Adds what the feature gives a disk that is opened or gets other layers. What is not added
    /// again is gone with the former layers.
    ///
    /// # Errors
    /// Why the disk cannot be opened or changed so. [`abandon`](Self::abandon) is called then.
    fn equip(&self, _disk: &mut Equipment<'_>) -> Result<(), ErrorBody> {
        Ok(())
    }

    /// The layers of a disk in use are about to be exchanged.
    fn exchanging(&self, _disk: &Equipment<'_>) {}

    /// The disk was not opened, or keeps its former layers: what [`equip`](Self::equip) has begun
    /// is undone. The last feature is called first.
    fn abandon(&self, _disk: &Equipment<'_>) {}

    /// The kinds of layers that need resources of the daemon.
    fn layers(&self) -> Vec<LayerKind> {
        Vec::new()
    }

    /// A disk that was made is not served after all.
    fn unopened(&self, _parts: &Parts) {}

    /// The disk has been made with its layers, or has its new ones.
    fn equipped(&self, _equipment: &Equipment<'_>, _disk: &Arc<Disk>) {}

    /// A disk has been opened and can be found by its name.
    fn opened(&self, _daemon: &Daemon, _served: &Served) {}

    /// A disk has its first layers, after [`opened`](Self::opened), or others.
    fn stacked(&self, _daemon: &Daemon, _served: &Served) {}

    /// A layer has refused that a disk in use becomes smaller or larger: why, if it was one of the
    /// feature, and what to do.
    fn objection_to_size(&self, _served: &Served, _is_smaller: bool) -> Option<ErrorBody> {
        None
    }

    /// A disk is withdrawn. A failure ends its stage: the later features of the table are not
    /// called.
    ///
    /// # Errors
    /// Why changes remain that are not in the image.
    fn leaving(&self, _served: &Served, _stage: Leaving) -> io::Result<()> {
        Ok(())
    }

    /// Completes the status of a disk. Waits for nothing.
    fn status(&self, _served: &Served, _status: &mut DiskStatus) {}

    /// The configuration has been read again, and the disks have not been changed yet.
    fn reread(&self, _daemon: &Arc<Daemon>, _new: &Configuration, _report: &mut ReloadReport) {}

    /// The configuration has been read again. Called after the disks have been changed.
    fn reload(&self, _daemon: &Arc<Daemon>, _new: &Configuration, _report: &mut ReloadReport) {}

    /// Whether what it does may fail without a request that fails, so that checks for problems are
    /// frequent.
    fn is_watched(&self, _daemon: &Daemon) -> bool {
        false
    }

    /// The image of a disk that nobody serves is about to get other content: what the feature keeps
    /// of the old one becomes invalid.
    ///
    /// # Errors
    /// Why that cannot be done. The image stays as it is.
    fn forget_home(
        &self,
        _definition: &DiskDefinition,
        _records: &Path,
        _parts: &Parts,
    ) -> Result<(), ErrorBody> {
        Ok(())
    }

    /// Ends the feature's work at a stage of the shutdown. Returns work that may run beside the
    /// other features' work of that stage.
    fn end(&self, _daemon: &Arc<Daemon>, _stage: Ending) -> Vec<Task> {
        Vec::new()
    }

    /// A request that changes something has ended, or was refused.
    fn requested(&self, _daemon: &Daemon, _entry: &AuditEntry) {}

    /// Adds the handlers of its endpoints.
    fn routes(&self, _routes: &mut Routes) {}

    /// Adds the current problems of the daemon. Waits for nothing.
    fn problems(&self, _daemon: &Daemon, _found: &mut Vec<FoundProblem>) {}

    /// Adds the current problems of a disk. Waits for nothing.
    fn disk_problems(&self, _daemon: &Daemon, _served: &Served, _found: &mut Vec<FoundProblem>) {}

    /// Writes its metrics. It runs on a thread of its own and may wait for a limited time.
    fn metrics(&self, _scrape: &Scrape<'_>, _page: &mut MetricsText) {}
}

/// The start of the daemon.
pub(crate) struct Start<'a> {
    pub configuration: &'a Configuration,
    /// Whether a disk or listener that cannot be served ends the start.
    pub is_strict: bool,
}

/// A stage of the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Beginning {
    /// The disks are open and no client can reach them: who observes them misses nothing.
    Observers,
    /// Clients may come.
    Clients,
    /// Work of the daemon's own accord begins.
    Work,
}

/// A stage of the withdrawal of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leaving {
    /// Its clients are about to be disconnected.
    Begun,
    /// No client has a queue, and no request is in flight.
    Drained,
    /// What is only in other stores is brought home.
    Home {
        /// How long that may take.
        time_max: Duration,
    },
}

/// A stage of the shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// No new work begins, and clients leave. The disks end beside it.
    Work,
    /// All disks have ended: what observed them gets its last events.
    Observers,
    /// The last results are delivered.
    Results,
}

impl Daemon {
    /// What a feature keeps, by its type.
    pub(crate) fn part<T: Any>(&self) -> &T {
        self.parts.of()
    }
}
