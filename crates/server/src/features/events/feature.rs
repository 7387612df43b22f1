//! The events of disks for listeners, as a feature of the daemon.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use fathom_control::{ErrorBody, endpoints};

use super::Events;
use crate::configuration::Configuration;
use crate::daemon::Daemon;
use crate::daemon::feature::{Ending, Feature};
use crate::daemon::http::routes::Routes;
use crate::daemon::parts::Parts;
use crate::daemon::stack::Equipment;
use crate::daemon::stop::Task;

/// How long the listeners' event streams may take to end.
const END_TIME_MAX: Duration = Duration::from_secs(1);

/// The events of disks.
pub(crate) struct EventStreams;

impl Feature for EventStreams {
    fn keep(&self, _configuration: Option<&Configuration>, parts: &mut Parts) {
        parts.add(Events::default());
    }

    fn prepare(&self, daemon: &Arc<Daemon>, _configuration: &Configuration) {
        let collecting = Arc::downgrade(daemon);
        daemon.change_log.on_change(move || {
            if let Some(daemon) = collecting.upgrade() {
                daemon.part::<Events>().wake();
            }
        });
    }

    fn equip(&self, disk: &mut Equipment<'_>) -> Result<(), ErrorBody> {
        super::tap::equip(disk);
        Ok(())
    }

    fn end(&self, daemon: &Arc<Daemon>, stage: Ending) -> Vec<Task> {
        if stage == Ending::Observers {
            daemon.part::<Events>().end(END_TIME_MAX);
        }
        Vec::new()
    }

    fn routes(&self, routes: &mut Routes) {
        let kind = "application/vnd.fathom.recording";
        routes.bytes(&endpoints::RECORDING, kind, |daemon, (), query, ()| {
            daemon.record(query).map(Body::new)
        });
    }
}
