//! The end of a disk's use of a cache that has failed, is silent or leaves: its mark is removed, so
//! that no later start uses what the cache has of the disk.

use std::io;
use std::sync::atomic::Ordering;

use fathom_persistence::{Phase, Stamp};

use super::Inner;

/// The time between two attempts to end the use of a cache, in nanoseconds.
pub(super) const RETRY_NS: u64 = 1_000_000_000;

/// Whether later starts may use what a volume has of a disk, if the volume has been silent;
/// `queue::silent` describes the transitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Use {
    /// They may if the mark of the disk's store names the volume.
    Marked = 0,
    /// They may not, because a change has waited for the volume for too long.
    Left = 1,
    /// They may not, but the mark will be written.
    Returning = 2,
}

impl Use {
    const ALL: [Self; 3] = [Self::Marked, Self::Left, Self::Returning];
}

impl Phase for Use {
    /// No mark is written again unless the bits of what was changed without it are awaited.
    fn leads_to(self, next: Self) -> bool {
        (self, next) != (Self::Marked, Self::Returning)
    }
}

/// Whether a disk still uses a cache that has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// Its mark has not been changed yet.
    InUse,
    /// The cache is not used any more.
    Ended,
    /// The mark could not be changed: changes of the disk must fail.
    Failed,
}

impl Inner {
    /// The state of the ending. A failed attempt is repeated after a second.
    pub(super) fn ending(&self, now_ns: u64) -> Ending {
        let mut ending = self.ending.lock();
        if ending.0 == Ending::Failed {
            if ending.1 == 0 {
                ending.1 = now_ns + RETRY_NS;
            } else if now_ns >= ending.1 {
                *ending = (Ending::InUse, 0);
            }
        }
        ending.0
    }

    /// The mark of the disk's store has the new generation: the earlier one does not fit any more.
    pub(super) fn confirm(&self) {
        self.disk.record.lock().earlier = 0;
        self.disk.is_record_dirty.store(true, Ordering::Release);
        self.volume.keeper.access(|keeper| {
            keeper.due_ns = keeper.due_ns.max(1);
            keeper.wake_queues();
        });
    }

    /// Removes the mark of the disk's store, if it names this cache. If that is impossible, the
    /// cache itself forgets the state that the mark names, so that no later start uses its blocks.
    /// The blocks are gone then.
    pub(super) fn give_up(&self) -> io::Result<()> {
        let rejected = self.reject();
        rejected.or_else(|error| self.volume.detach(&self.disk).map_err(|_| error))
    }

    pub(super) fn of_disk(&self) -> Use {
        Use::ALL[usize::from(self.used.load(Ordering::Acquire)) % Use::ALL.len()]
    }

    /// The caller has the lock of the marking.
    pub(super) fn set_use(&self, used: Use) {
        self.of_disk().step(used);
        self.used.store(used as u8, Ordering::Release);
    }

    /// Removes the mark of the disk's store, if it names this cache. It is not written again.
    pub(super) fn reject(&self) -> io::Result<()> {
        let mut marking = self.marking.state.lock();
        *marking = None;
        self.marking.end();
        self.set_use(Use::Marked);
        self.reject_mark()
    }

    /// Removes the mark of the disk's store, if it names this cache. The caller has the lock of the
    /// marking.
    pub(super) fn reject_mark(&self) -> io::Result<()> {
        let marked = self.mark.read();
        let is_other = |state: &Stamp| state.identity != self.volume.identity();
        match marked {
            // No cache fits, or only another one, which knows of all changes.
            Ok(None) => Ok(()),
            Ok(Some(state)) if is_other(&state) => Ok(()),
            _ => self.mark.reject(),
        }
    }

    /// An attempt to change the mark has ended.
    pub(super) fn end(&self, has_succeeded: bool) {
        if has_succeeded {
            self.disk.regions.access(|regions| regions.is_unmarked = true);
        }
        {
            let mut ending = self.ending.lock();
            if ending.0 != Ending::Ended {
                *ending = (if has_succeeded { Ending::Ended } else { Ending::Failed }, 0);
            }
        }
        // A log that waits for bits need not wait any more.
        self.disk.regions.wake();
    }
}
