//! The volumes and snapshots of pools, as a feature of the daemon.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use axum::body::Body;
use fathom_control::{ErrorBody, endpoints};

use super::reclaims::Reclaims;
use super::sending::Sending;
use super::written::WrittenRecords;
use crate::configuration::Configuration;
use crate::daemon::feature::{Ending, Feature, Leaving};
use crate::daemon::http::routes::{Routes, Share};
use crate::daemon::parts::Parts;
use crate::daemon::stack::Equipment;
use crate::daemon::stop::Task;
use crate::daemon::{Daemon, Served};
use crate::stores::pools::{Pools, pool_path};

/// See the module.
pub(crate) struct VolumesOfPools;

/// The pool of a disk.
#[derive(Clone)]
struct DiskPool {
    pools: Pools,
    reclaims: Reclaims,
    path: PathBuf,
}

impl Feature for VolumesOfPools {
    fn keep(&self, _configuration: Option<&Configuration>, parts: &mut Parts) {
        parts.add(Sending::default());
        parts.add(Reclaims::default());
        parts.add(WrittenRecords::default());
    }

    fn end(&self, daemon: &Arc<Daemon>, stage: Ending) -> Vec<Task> {
        if stage == Ending::Observers {
            daemon.part::<Sending>().stop();
            daemon.part::<Reclaims>().stop();
        }
        Vec::new()
    }

    fn equip(&self, disk: &mut Equipment<'_>) -> Result<(), ErrorBody> {
        if let Some(path) = &disk.definition.store {
            let pools = disk.shared.of::<Pools>().clone();
            let reclaims = disk.shared.of::<Reclaims>().clone();
            disk.parts.add(DiskPool { pools, reclaims, path: path.clone() });
        }
        Ok(())
    }

    fn leaving(&self, served: &Served, stage: Leaving) -> io::Result<()> {
        if let (Leaving::Drained, Some(pool)) = (stage, served.part::<DiskPool>()) {
            // Without another disk, a search would be all that keeps the pool open.
            if pool.pools.find(&pool.path).is_none_or(|pool| pool.open_count() <= 1) {
                pool.reclaims.end(&pool_path(&pool.path));
            }
            pool.pools.leave(&pool.path);
        }
        Ok(())
    }

    fn routes(&self, routes: &mut Routes) {
        routes.blocking(&endpoints::POOLS, |daemon, (), (), ()| Ok(daemon.pools()));
        routes.blocking(&endpoints::DIFFERENCE, |daemon, (), query, ()| daemon.difference(&query));
        routes.blocking(&endpoints::WRITTEN_FILES, |daemon, (), query, ()| {
            daemon.written_files(&query)
        });
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
