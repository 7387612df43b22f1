//! The age of the pair of a log and an image; see [`fathom_persistence::Ages`]. The mark of the
//! image is elsewhere: its keeper says what has become of it. These functions block.

use std::io;
use std::sync::atomic::Ordering;

use fathom_block::{LayerCause, LayerProblem, StoreAccess};
use fathom_persistence::{SUPERBLOCK_LENGTH, Stamp, Superblock as _};
use fathom_wal::{Checkpoint, Held, Log, Superblock};

use super::Wal;
use super::open::write_checkpoint;

/// Whether an image has all changes, although its mark names this log. `superblocks` is the start
/// of the log.
pub fn is_void(superblocks: &[u8; 2 * SUPERBLOCK_LENGTH], mark: Stamp) -> bool {
    let found = Superblock::select(superblocks);
    found.is_ok_and(|found| found.log == mark.identity && found.ages.is_void(mark.age))
}

impl Wal {
    /// The age that the image's mark has to get before the log takes changes.
    pub fn age(&self) -> u64 {
        self.inner.shared.access(|state| state.log.superblock().ages.age)
    }

    /// Where the log begins in its volume, in bytes.
    pub fn offset(&self) -> u64 {
        self.inner.base
    }

    /// The records that the opening has found.
    pub fn held(&self) -> Held {
        self.inner.opened.held
    }

    /// The image's mark durably has the age `mark`, which is an earlier one if it could not be
    /// written anew. No queue is open yet.
    ///
    /// # Errors
    /// If the volume fails. The log must not be used then.
    pub fn pair(&self, mark: u64) -> io::Result<()> {
        self.inner.has_old_mark.store(mark != self.age(), Ordering::Relaxed);
        self.write_superblock(|log| log.pair(mark))
    }

    /// The image has all changes, and the log gets no more. If it `has_mark`, the mark could not be
    /// removed.
    ///
    /// # Errors
    /// If the log has changes, or its volume fails.
    pub fn part(&self, has_mark: bool) -> io::Result<()> {
        if !self.inner.shared.access(|state| state.log.is_empty()) {
            return Err(io::Error::other("the log has changes"));
        }
        self.write_superblock(|log| log.part(has_mark))
    }

    /// Writes a superblock while no queue does.
    fn write_superblock(&self, change: impl FnOnce(&mut Log) -> Checkpoint) -> io::Result<()> {
        let inner = &self.inner;
        let checkpoint = inner.shared.access(|state| {
            let is_free = state.failed.is_none() && !state.log.is_checkpointing();
            is_free.then(|| change(&mut state.log))
        });
        let checkpoint =
            checkpoint.ok_or_else(|| io::Error::other("the log has failed, or is in use"))?;
        let mut access = StoreAccess::open(inner.volume.backend())?;
        write_checkpoint(&mut access, inner.base, &checkpoint)?;
        inner.shared.access(|state| state.log.checkpointed());
        Ok(())
    }

    /// The problem of a log whose image has an old mark.
    pub(crate) fn old_mark(&self) -> Option<LayerProblem> {
        self.inner.has_old_mark.load(Ordering::Relaxed).then(|| LayerProblem {
 cause: LayerCause::MarkOld,
            message: "the mark of its image could not be written anew: an older copy of the log or of the \
                      image would not be noticed"
                .into(),
            remedy: "make space on the image's file system, and let the daemon write there; then serve the \
                     disk again"
                .into(),
        })
    }
}
