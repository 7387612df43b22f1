//! The snapshots of a pool as dirty bitmaps of NBD exports: what has changed since each.

use std::path::Path;
use std::sync::{Arc, Weak};

use fathom_block::{Disk, DiskOptions, Layer};
use fathom_control::DiskDefinition;
use fathom_frontend::nbd::{BitmapRefusal, Bitmaps};
use fathom_store::{Pool, PoolError, Snapshot, WeakPool};

use crate::stores::pools::Pools;

/// The layers that pass on each change before it completes. Others may hold changes back, so that
/// the map of the volume does not have them.
const PASSING: [&str; 13] = [
    "cache",
    "classify",
    "delay",
    "lifetimes",
    "limit",
    "log",
    "model",
    "passthrough",
    "patterns",
    "schedule",
    "swap-watch",
    "tap",
    "wait-for-room",
];

/// See the module.
pub(crate) struct SnapshotBitmaps {
    pool: WeakPool,
    /// The number of the volume or snapshot that is served, that of its volume, and whether it is
    /// a snapshot.
    target: u32,
    volume: u32,
    is_snapshot: bool,
    disk: Weak<Disk>,
}

impl SnapshotBitmaps {
    /// The bitmaps of a disk; `None` if it has no volume of a pool.
    pub(crate) fn of(
        definition: &DiskDefinition,
        disk: &Arc<Disk>,
        pools: &Pools,
    ) -> Option<Arc<dyn Bitmaps>> {
        let path: &Path = definition.store.as_deref()?;
        let name = definition.volume.as_deref()?;
        let pool = pools.find(path)?;
        let (volume_name, snapshot) = match name.split_once('@') {
            Some((volume, snapshot)) => (volume, Some(snapshot)),
            None => (name, None),
        };
        let target = pool.number_of(volume_name, snapshot).ok()?;
        let volume = pool.number_of(volume_name, None).ok()?;
        Some(Arc::new(Self {
            pool: pool.downgrade(),
            target,
            volume,
            is_snapshot: snapshot.is_some(),
            disk: Arc::downgrade(disk),
        }))
    }

    /// The layer that may hold changes back. A snapshot has no changes.
    fn holding(&self) -> Option<Arc<dyn Layer>> {
        let layers = self.disk.upgrade().map(|disk| disk.layers()).unwrap_or_default();
        let holds = |layer: &Arc<dyn Layer>| !self.is_snapshot && !PASSING.contains(&layer.name());
        layers.into_iter().find(holds)
    }

    /// Whether a snapshot of the volume, by its number, is an earlier state of what is served.
    fn precedes(&self, number: u32) -> bool {
        !self.is_snapshot || number < self.target
    }

    /// The number of the snapshot of a name: one of the same volume, or `VOLUME@SNAPSHOT`.
    fn number_of(&self, pool: &Pool, name: &str) -> Option<u32> {
        if let Some((volume, snapshot)) = name.split_once('@') {
            return pool.number_of(volume, Some(snapshot)).ok();
        }
        pool.snapshot_of(self.volume, name).filter(|number| self.precedes(*number))
    }

    fn base(&self, name: &str) -> Result<(Pool, u32), BitmapRefusal> {
        let pool = self.pool.upgrade().ok_or(BitmapRefusal::Unknown)?;
        let base = self.number_of(&pool, name).ok_or(BitmapRefusal::Unknown)?;
        if let Some(layer) = self.holding() {
            let name = layer.name();
            let why = format!("the layer {name} of the disk may hold changes back");
            return Err(BitmapRefusal::Unavailable(why));
        }
        Ok((pool, base))
    }
}

impl Bitmaps for SnapshotBitmaps {
    fn names(&self, count: usize) -> Vec<String> {
        let Some(pool) = self.pool.upgrade().filter(|_| self.holding().is_none()) else {
            return Vec::new();
        };
        let snapshots = pool.snapshots();
        let is_earlier = |found: &Snapshot| found.volume == self.volume && self.precedes(found.id);
        let earlier = snapshots.into_iter().rev().filter(is_earlier);
        earlier.take(count).map(|found| found.name).collect()
    }

    fn find(&self, name: &str) -> Result<(), BitmapRefusal> {
        self.base(name).map(drop)
    }

    fn open(&self, name: &str) -> Result<Arc<Disk>, BitmapRefusal> {
        let (pool, base) = self.base(name)?;
        let unavailable = |error: PoolError| BitmapRefusal::Unavailable(error.to_string());
        let difference = pool.changes(base, self.target).map_err(unavailable)?;
        Disk::new(DiskOptions::default(), Vec::new(), difference)
            .map_err(|kind| BitmapRefusal::Unavailable(kind.name().to_owned()))
    }

    fn is_complete(&self) -> bool {
        self.holding().is_none()
    }
}
