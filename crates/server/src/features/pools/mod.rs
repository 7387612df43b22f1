//! The pools of the block store that disks use: what they have, and the changes of their volumes
//! and snapshots.

pub(crate) mod bitmaps;
pub(crate) mod feature;
mod reclaims;
mod sending;
pub(crate) mod snapshot;
mod written;

use std::path::Path;
use std::sync::Arc;

use fathom_control::{
    DifferencePart, DifferenceQuery, ErrorBody, ErrorCode, PoolChange, PoolEntry, PoolsReport,
    RULE_PREFIX,
};
use fathom_failure::Failure;
use fathom_store::{Pool, PoolError, PoolRefusal};

use crate::daemon::stack::refusal;
use crate::daemon::status::unix_time_s;
use crate::daemon::{Daemon, Served};
use crate::stores::pools::{Pools, pool_path};
use reclaims::Reclaims;
use snapshot::SnapshotRequest;

impl Daemon {
    /// The pools that disks use.
    fn pools(&self) -> PoolsReport {
        let pools = self.part::<Pools>().open_pools();
        PoolsReport { pools: pools.iter().map(|(path, pool)| self.pool(path, pool)).collect() }
    }

    fn pool(&self, path: &Path, pool: &Pool) -> PoolEntry {
        let disk_of = |volume: &str| {
            self.disk_of_volume(path, volume).map(|served| served.disk.name().to_owned())
        };
        let scrub = self.scrub_of(path, pool);
        let reclaim = self.part::<Reclaims>().entry(path);
        PoolEntry { scrub, reclaim, ..PoolEntry::of(path, pool, disk_of) }
    }

    /// The disk that has a volume of the pool at `path`.
    pub(crate) fn disk_of_volume(&self, path: &Path, volume: &str) -> Option<Arc<Served>> {
        let has_it = |served: &Arc<Served>| {
            let live = served.live();
            let definition = &live.definition;
            let is_pool = definition.store.as_deref().is_some_and(|own| pool_path(own) == path);
            is_pool && definition.volume.as_deref() == Some(volume)
        };
        self.served().into_iter().find(has_it)
    }

    /// Changes the volumes or snapshots of a pool.
    ///
    /// # Errors
    /// If no disk uses the pool, or the change is refused.
    fn change_pool(
        self: &Arc<Self>,
        path: &Path,
        change: &PoolChange,
    ) -> Result<PoolEntry, ErrorBody> {
        let pool = self.open_pool(path)?;
        let path = &pool_path(path);
        let time_s = unix_time_s();
        let mut warning = None;
        match change {
            PoolChange::Snapshot { volumes, name, freeze } if !name.starts_with(RULE_PREFIX) => {
                let (pool, freeze) = (&pool, *freeze);
                warning = self.take_snapshot(&SnapshotRequest {
                    path,
                    pool,
                    volumes,
                    name,
                    time_s,
                    freeze,
                })?;
            }
            PoolChange::FindReclaimable { together } => {
                self.part::<Reclaims>().begin(path, &pool, together)?;
            }
            PoolChange::EndReclaimable => self.part::<Reclaims>().end(path),
            PoolChange::Check { maps_only } => self.check_pool(path, &pool, *maps_only),
            other => other.carry_out(&pool, time_s).map_err(refused)?,
        }
        Ok(PoolEntry { warning, ..self.pool(path, &pool) })
    }

    /// A part of what differs between two snapshots.
    ///
    /// # Errors
    /// If no disk uses the pool, or there is no such snapshot.
    fn difference(&self, query: &DifferenceQuery) -> Result<DifferencePart, ErrorBody> {
        DifferencePart::of(&self.open_pool(&query.path)?, query).map_err(refused)
    }

    /// The pool at `path`.
    ///
    /// # Errors
    /// If no disk uses it.
    pub(crate) fn open_pool(&self, path: &Path) -> Result<Pool, ErrorBody> {
        self.part::<Pools>().find(path).ok_or_else(|| {
            refusal(
                ErrorCode::NotFound,
                format!("no disk of the daemon uses the pool {}", path.display()),
                "use `fathom store` without the daemon",
            )
        })
    }
}

/// The error of a change that a pool has refused, or at which it has failed.
pub(crate) fn refused(error: PoolError) -> ErrorBody {
    let code = match &error {
        PoolError::Refused(PoolRefusal::NoVolume | PoolRefusal::NoSnapshot) => ErrorCode::NotFound,
        PoolError::Refused(
            PoolRefusal::NameTaken | PoolRefusal::InUse | PoolRefusal::Held | PoolRefusal::NotHeld,
        ) => ErrorCode::Conflict,
        PoolError::Refused(
            PoolRefusal::BadName
            | PoolRefusal::BadSize
            | PoolRefusal::TooMany
            | PoolRefusal::Reserved
            | PoolRefusal::BadReason,
        ) => ErrorCode::Invalid,
        _ => ErrorCode::Failed,
    };
    ErrorBody::new(code, Failure::from(error))
}
