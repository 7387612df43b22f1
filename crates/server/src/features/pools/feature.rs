//! The volumes and snapshots of pools, as a feature of the daemon.

use std::sync::Arc;

use axum::body::Body;
use fathom_control::endpoints;

use super::sending::Sending;
use crate::configuration::Configuration;
use crate::daemon::Daemon;
use crate::daemon::feature::{Ending, Feature};
use crate::daemon::http::routes::{Routes, Share};
use crate::daemon::parts::Parts;
use crate::daemon::stop::Task;

/// See the module.
pub(crate) struct VolumesOfPools;

impl Feature for VolumesOfPools {
    fn keep(&self, _configuration: Option<&Configuration>, parts: &mut Parts) {
        parts.add(Sending::default());
    }

    fn end(&self, daemon: &Arc<Daemon>, stage: Ending) -> Vec<Task> {
        if stage == Ending::Observers {
            daemon.part::<Sending>().stop();
        }
        Vec::new()
    }

    fn routes(&self, routes: &mut Routes) {
        routes.blocking(&endpoints::POOLS, |daemon, (), (), ()| Ok(daemon.pools()));
        routes.blocking(&endpoints::DIFFERENCE, |daemon, (), query, ()| daemon.difference(&query));
        let kind = "application/vnd.fathom.snapshot";
        routes.bytes(&endpoints::SNAPSHOT_STREAM, kind, |daemon, (), query, ()| {
            daemon.send_snapshot(query).map(Body::new)
        });
        routes.change_within(
            Share::of_pools(),
            &endpoints::CHANGE_POOL,
            |daemon, (), (), request| daemon.change_pool(&request.path, &request.change),
        );
    }
}
