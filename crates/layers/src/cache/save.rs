//! The orderly end of a disk's use of a cache: the next start finds all that is cached.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use fathom_block::{Clock, Disk, Stack};
use fathom_reactor::Reactor;

use super::{Cache, CacheMark};

/// How often the end of a cache checks its progress.
const INTERVAL: Duration = Duration::from_millis(1);
/// The least time that requests in flight get to complete.
const FINISH_TIME_MIN: Duration = Duration::from_secs(2);
/// How many complete writings of the tables show all blocks: one to flush the content, one to write
/// the entries, and one that may have begun before.
const WRITINGS: u64 = 3;
/// How long to wait until the modification time of a store is certain.
const MODIFIED_TIME_MAX: Duration = Duration::from_millis(50);

impl Cache {
    /// Makes the tables durable, so that the next start finds all that is cached now. Other disks
    /// of the volume may be in use. Blocks for about `limit` at most. `disk` has this layer, and
    /// must not take changes any more.
    ///
    /// # Errors
    /// If the volume or home fails, or `limit` has passed. The next start then finds less.
    pub fn save_state(&self, disk: &Arc<Disk>, limit: Duration) -> io::Result<()> {
        if !self.inner.volume.is_kept {
            return Ok(());
        }
        if self.inner.volume.is_silent() {
            return Err(silent());
        }
        let end = Instant::now() + limit;
        let mut reactor = Reactor::new(64)?;
        let mut stack = disk.open_aside(&mut reactor, Clock::System)?;
        let saved = self.save_state_with(&mut stack, &mut reactor, end);
        self.inner.volume.keeper.access(|keeper| keeper.is_saving = false);
        let left = end.saturating_duration_since(Instant::now()).max(FINISH_TIME_MIN);
        stack.finish(&mut reactor, left)?;
        saved
    }

    fn save_state_with(
        &self,
        stack: &mut Stack,
        reactor: &mut Reactor,
        end: Instant,
    ) -> io::Result<()> {
        let inner = &self.inner;
        // There may be space for it now.
        _ = inner.write_mark();
        let begun = inner.volume.keeper.access(|keeper| keeper.tables);
        self.until(stack, reactor, end, || self.is_written(begun))?;
        // Nothing changes the store from here on.
        let modified_ns = if inner.is_noted { certain_modified_ns(&*inner.mark)? } else { 0 };
        inner.disk.record.lock().modified_ns = modified_ns;
        inner.disk.is_record_dirty.store(true, Ordering::Release);
        let begun = inner.volume.keeper.access(|keeper| {
            // The next writing has the record, also if there is nothing else to write.
            keeper.due_ns = keeper.due_ns.max(1);
            keeper.tables
        });
        self.until(stack, reactor, end, || {
            inner.volume.keeper.access(|keeper| keeper.tables_durable > begun)
        })
    }

    /// Has the tables written until `is_done`.
    fn until(
        &self,
        stack: &mut Stack,
        reactor: &mut Reactor,
        end: Instant,
        is_done: impl Fn() -> bool,
    ) -> io::Result<()> {
        loop {
            if is_done() {
                return Ok(());
            }
            let failed = self.inner.volume.keeper.access(|keeper| {
                keeper.is_saving = true;
                if keeper.due_ns == 0 && keeper.writer.is_none() {
                    keeper.due_ns = 1;
                }
                keeper.wake_queues();
                keeper.failed
            });
            if let Some(kind) = failed {
                return Err(io::Error::other(kind));
            }
            if self.inner.volume.is_silent() {
                return Err(silent());
            }
            if Instant::now() >= end {
                return Err(io::ErrorKind::TimedOut.into());
            }
            stack.wait(reactor, Some(INTERVAL))?;
        }
    }

    /// Whether the tables have all blocks that the disk had when `begun` writings had begun.
    fn is_written(&self, begun: u64) -> bool {
        let (volume, disk) = (&self.inner.volume, &self.inner.disk);
        let is_changed =
            disk.regions.access(|regions| regions.has_clearable() || regions.is_dirty());
        if is_changed || !volume.is_loaded() {
            return false;
        }
        // Other disks may change the tables all the time.
        let (writings, is_idle) = volume.keeper.access(|keeper| {
            (keeper.tables_durable.saturating_sub(begun), keeper.writer.is_none())
        });
        let has_changes =
            || (0..volume.shards.len()).any(|shard| volume.shard(shard).has_changes());
        writings >= WRITINGS || is_idle && !has_changes()
    }
}

fn silent() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the store of the cache does not answer")
}

/// The modification time of a disk's store; 0 if it is not known. Waits a moment until it is
/// certain after a change.
pub(super) fn certain_modified_ns(mark: &dyn CacheMark) -> io::Result<u64> {
    let end = Instant::now() + MODIFIED_TIME_MAX;
    loop {
        let modified_ns = mark.modified_ns()?;
        if modified_ns != 0 || Instant::now() >= end {
            return Ok(modified_ns);
        }
        std::thread::sleep(INTERVAL);
    }
}
