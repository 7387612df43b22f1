//! The pools of the block store that disks use: what they have, and the changes of their volumes
//! and snapshots.

pub(crate) mod bitmaps;
pub(crate) mod feature;
mod sending;

use std::path::Path;

use fathom_control::{
    DifferencePart, DifferenceQuery, ErrorBody, ErrorCode, PoolChange, PoolEntry, PoolsReport,
};
use fathom_failure::Failure;
use fathom_store::{Pool, PoolError, PoolRefusal};

use crate::daemon::Daemon;
use crate::daemon::stack::refusal;
use crate::daemon::status::unix_time_ns;
use crate::stores::pools::{Pools, pool_path};

impl Daemon {
    /// The pools that disks use.
    fn pools(&self) -> PoolsReport {
        let pools = self.part::<Pools>().open_pools();
        PoolsReport { pools: pools.iter().map(|(path, pool)| self.pool(path, pool)).collect() }
    }

    fn pool(&self, path: &Path, pool: &Pool) -> PoolEntry {
        let served = self.served();
        let disk_of = |volume: &str| {
            let has_it = |definition: &fathom_control::DiskDefinition| {
                let is_pool = definition.store.as_deref().is_some_and(|own| pool_path(own) == path);
                is_pool && definition.volume.as_deref() == Some(volume)
            };
            let disk = served.iter().find(|served| has_it(&served.live().definition));
            disk.map(|served| served.disk.name().to_owned())
        };
        PoolEntry::of(path, pool, disk_of)
    }

    /// Changes the volumes or snapshots of a pool.
    ///
    /// # Errors
    /// If no disk uses the pool, or the change is refused.
    fn change_pool(&self, path: &Path, change: &PoolChange) -> Result<PoolEntry, ErrorBody> {
        let pool = self.used_pool(path)?;
        let time_s = unix_time_ns() / 1_000_000_000;
        change.carry_out(&pool, time_s).map_err(refused)?;
        Ok(self.pool(&pool_path(path), &pool))
    }

    /// A part of what differs between two snapshots.
    ///
    /// # Errors
    /// If no disk uses the pool, or there is no such snapshot.
    fn difference(&self, query: &DifferenceQuery) -> Result<DifferencePart, ErrorBody> {
        DifferencePart::of(&self.used_pool(&query.path)?, query).map_err(refused)
    }

    fn used_pool(&self, path: &Path) -> Result<Pool, ErrorBody> {
        self.part::<Pools>().find(path).ok_or_else(|| {
            refusal(
                ErrorCode::NotFound,
                format!("no disk of the daemon uses the pool {}", path.display()),
                "use `fathom store` without the daemon",
            )
        })
    }
}

fn refused(error: PoolError) -> ErrorBody {
    let code = match &error {
        PoolError::Refused(PoolRefusal::NoVolume | PoolRefusal::NoSnapshot) => ErrorCode::NotFound,
        PoolError::Refused(PoolRefusal::NameTaken | PoolRefusal::InUse) => ErrorCode::Conflict,
        PoolError::Refused(PoolRefusal::BadName | PoolRefusal::BadSize | PoolRefusal::TooMany) => {
            ErrorCode::Invalid
        }
        _ => ErrorCode::Failed,
    };
    ErrorBody::new(code, Failure::from(error))
}
