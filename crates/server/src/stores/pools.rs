//! The pools of the block store that disks share.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_backend::model::Modelled;
use fathom_backend::{FileBackend, FileOptions, OpenError};
use fathom_block::Backend;
use fathom_control::{DiskDefinition, ErrorBody, ErrorCode};
use fathom_failure::Failure;
use fathom_store::{INDEX_PAGE_MEMORY, Pool, PoolError, PoolOptions, PoolRefusal, WeakPool};
use parking_lot::Mutex;

use super::attend::PoolAttendance;
use super::models::ModelDevices;
use crate::daemon::parts::Parts;
use crate::daemon::stack::refusal;

/// How long a disk waits for a volume or a pool that a removed disk may still use for a moment.
const CLOSE_TIME_MAX: Duration = Duration::from_secs(3);
const CLOSE_INTERVAL: Duration = Duration::from_millis(10);

/// A pool, if a disk uses it.
#[derive(Clone, Default)]
struct Slot {
    /// Locked while it is opened, so that only disks of this pool wait.
    pool: Arc<Mutex<Option<WeakPool>>>,
    attendance: PoolAttendance,
}

/// The open pools, by their paths.
#[derive(Clone)]
pub(crate) struct Pools {
    slots: Arc<Mutex<BTreeMap<PathBuf, Slot>>>,
    options: PoolOptions,
}

/// The path by which a pool is known.
pub(crate) fn pool_path(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

impl Pools {
    /// No pools. Each one may have so many bytes of memory for fingerprints.
    pub(crate) fn new(index_memory: Option<u64>) -> Self {
        let mut options = PoolOptions::default();
        if let Some(memory) = index_memory {
            options.index_pages = usize::try_from(memory / INDEX_PAGE_MEMORY).unwrap_or(usize::MAX);
        }
        Self { slots: Arc::default(), options }
    }

    /// The open pools.
    pub(crate) fn open_pools(&self) -> Vec<(PathBuf, Pool)> {
        let slots = self.slots.lock().clone();
        let open = |(path, slot): (PathBuf, Slot)| {
            // One that is being opened has no disk yet.
            let pool = slot.pool.try_lock()?.as_ref()?.upgrade()?;
            Some((path, pool))
        };
        slots.into_iter().filter_map(open).collect()
    }

    /// The open pool at a path.
    pub(crate) fn find(&self, path: &Path) -> Option<Pool> {
        let slot = self.slots.lock().get(&pool_path(path)).cloned()?;
        slot.pool.lock().as_ref().and_then(WeakPool::upgrade)
    }

    /// A disk with a volume of the pool at `path` leaves: nothing else keeps the pool open.
    pub(crate) fn leave(&self, path: &Path) {
        let Some(slot) = self.slots.lock().get(&pool_path(path)).cloned() else { return };
        let pool = slot.pool.lock().clone();
        slot.attendance.end(pool.as_ref());
    }

    /// The pool at a path, which is opened for a disk if no other one uses it. Its device has the
    /// timing of that disk's model.
    pub(crate) fn open(
        &self,
        path: &Path,
        definition: &DiskDefinition,
        records: &Path,
        models: &ModelDevices,
    ) -> Result<Pool, Failure> {
        let path = pool_path(path);
        let slot = self.slots.lock().entry(path.clone()).or_default().clone();
        let attendance = slot.attendance;
        let mut slot = slot.pool.lock();
        if let Some(pool) = slot.as_ref().and_then(WeakPool::upgrade) {
            return Ok(pool);
        }
        let options = FileOptions {
            path,
            direct: definition.direct,
            read_only: false,
            block_size: None,
            disk: definition.name.clone(),
            records: Some(records.to_owned()),
            foreign_allowed: true,
        };
        let device = retry(
            || FileBackend::open(&options),
            |error| matches!(error, OpenError::Locked(_) | OpenError::Claimed(..)),
        )
        .map_err(Failure::from)?;
        let mut device: Arc<dyn Backend> = Arc::new(device);
        if let Some(model) = &definition.model {
            let model = models.make(model, device.capacity())?;
            device = Arc::new(Modelled::new(device, model));
        }
        // Relocations were tried on modelled devices only.
        let options = PoolOptions { relocates: Some(false), ..self.options };
        let pool = Pool::open(device, options)?;
        attendance.attend(&pool);
        *slot = Some(pool.downgrade());
        Ok(pool)
    }
}

/// Repeats `attempt` for some time while its error may pass.
fn retry<T, E>(
    mut attempt: impl FnMut() -> Result<T, E>,
    may_pass: impl Fn(&E) -> bool,
) -> Result<T, E> {
    let end = Instant::now() + CLOSE_TIME_MAX;
    loop {
        match attempt() {
            Err(error) if may_pass(&error) && Instant::now() < end => {
                std::thread::sleep(CLOSE_INTERVAL);
            }
            done => return done,
        }
    }
}

/// The volume or snapshot of a disk.
pub(crate) fn open_volume(
    definition: &DiskDefinition,
    records: &Path,
    shared: &Parts,
) -> Result<Arc<dyn Backend>, ErrorBody> {
    let name = &definition.name;
    let path = definition.store.as_deref().unwrap_or(Path::new(""));
    let Some(volume) = definition.volume.as_deref() else {
        return Err(refusal(
            ErrorCode::Invalid,
            format!("the disk {name:?} has a store and no volume"),
            "add `volume`; `fathom store list` shows the volumes of a pool",
        ));
    };
    let failed = |failure: Failure| {
        let what = format!("the volume {volume} of {} for the disk {name:?}", path.display());
        ErrorBody::new(ErrorCode::Failed, failure.about(what))
    };
    let models = shared.of::<ModelDevices>();
    let pool = shared.of::<Pools>().open(path, definition, records, models).map_err(failed)?;
    let is_used = |error: &PoolError| matches!(error, PoolError::Refused(PoolRefusal::InUse));
    let open = || match volume.split_once('@') {
        Some((volume, snapshot)) => pool.snapshot(volume, snapshot),
        None => pool.volume(volume),
    };
    retry(open, is_used).map_err(|error| failed(Failure::from(error)))
}
