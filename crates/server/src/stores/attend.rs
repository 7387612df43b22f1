//! The background work of a pool while nobody uses its disks: the queues of volumes carry it out
//! otherwise.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use fathom_block::{Attendance, Attended, Disk, DiskOptions};
use fathom_store::{Pool, WeakPool};
use parking_lot::Mutex;

/// The interval between attempts while the thread of an earlier queue ends.
const RETRY: Duration = Duration::from_millis(50);

/// The queue of a pool that no disk has.
#[derive(Clone, Default)]
pub(super) struct PoolAttendance(Arc<Mutex<Arc<Attendance>>>);

impl PoolAttendance {
    /// Opens a queue of `pool` whenever it has work and no other queue.
    pub(super) fn attend(&self, pool: &Pool) {
        let (attendance, weak) = (self.clone(), pool.downgrade());
        pool.on_unattended(move || attendance.begin(&weak));
    }

    /// Opens a queue on another thread, until the pool has no more work. Does not block.
    fn begin(&self, pool: &WeakPool) {
        let (attendance, pool) = (Arc::clone(&self.0.lock()), pool.clone());
        let attempt = move || open(&attendance, &pool).unwrap_or_else(|error| warn(&error));
        if let Err(error) = std::thread::Builder::new().name("attend".into()).spawn(attempt) {
            warn(&error);
        }
    }

    /// Ends the queue, and waits for its end: a disk of the pool leaves, perhaps the last one. If
    /// others have work for it, another one is opened.
    pub(super) fn end(&self, pool: Option<&WeakPool>) {
        let former = std::mem::take(&mut *self.0.lock());
        former.end();
        if let Some(pool) = pool {
            let is_needed = pool.upgrade().is_some_and(|pool| pool.is_unattended());
            if is_needed {
                self.begin(pool);
            }
        }
    }
}

/// Opens the queue. An earlier one may be about to end.
fn open(attendance: &Arc<Attendance>, pool: &WeakPool) -> io::Result<()> {
    loop {
        // While it waits, it does not keep the pool open.
        let Some(pool) = pool.upgrade().filter(Pool::is_unattended) else { return Ok(()) };
        let options = DiskOptions { name: "pool".into(), ..DiskOptions::default() };
        let disk = Disk::new(options, Vec::new(), pool.attendant()).map_err(io::Error::other)?;
        let is_done = move || !pool.has_work();
        let failed = || {
            tracing::error!(
                "a thread of a pool failed because of a bug; its space is freed when its disks are used"
            );
        };
        if attendance.begin(&disk, is_done, failed)? != Attended::Already {
            return Ok(());
        }
        drop(disk);
        std::thread::sleep(RETRY);
    }
}

fn warn(error: &io::Error) {
    tracing::warn!(%error, "the space of a pool is freed only when its disks are used");
}
