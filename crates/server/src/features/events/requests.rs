//! The daemon's part in the collection of events.

use std::sync::Arc;

use fathom_control::ErrorBody;
use fathom_insight::Names;
use fathom_layers::Tap;

use crate::daemon::{Daemon, status};
use crate::features::events::Events;
use crate::features::guests::Introspection;

impl Daemon {
    /// The event listeners.
    pub(crate) fn events(&self) -> &Events {
        self.part::<Events>()
    }

    /// The texts of the numbers in events.
    pub(crate) fn names(&self) -> &Arc<Names> {
        self.part::<Arc<Introspection>>().names()
    }

    /// The tap of a disk, if it has one.
    pub(crate) fn tap_of(&self, name: &str) -> Result<Option<Tap>, ErrorBody> {
        Ok(self.find(name)?.part::<Tap>())
    }

    /// The taps of all disks that have one, with the disks' names.
    pub(crate) fn taps(&self) -> Vec<(String, Tap)> {
        let tap = |served: Arc<crate::daemon::Served>| {
            let tap = served.part::<Tap>()?;
            Some((served.disk.name().to_owned(), tap))
        };
        self.served().into_iter().filter_map(tap).collect()
    }

    /// Nanoseconds since 1970.
    #[allow(clippy::unused_self, reason = "it is the daemon's time")]
    pub(crate) fn unix_time_ns(&self) -> u64 {
        status::unix_time_ns()
    }
}
