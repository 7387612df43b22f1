//! Keepsakes: open file descriptions that are never asked while the daemon lives, and that outlive
//! it.
//!
//! The kernel reports a failed write-back once to each description. If the daemon is killed while a
//! sync fails, the report goes to a process that cannot record it any more. If it is killed while
//! it is idle, the write-back may fail before the next daemon opens the file, and with the last
//! description the kernel may forget the inode together with its error. A description that was
//! opened before the first write still has the report, and pins the inode. So each file that is
//! opened for writing has one, in the hands of a [`Keeper`] that survives the daemon.
//!
//! The next daemon takes the lock of the file first: so the sync of a killed one has ended. It
//! opens a new keepsake, asks the old one, records a loss, hands the new one over, and releases the
//! old one.

use std::fs::File;
use std::io;
use std::sync::{Arc, OnceLock};

use super::durability::{open_again, report_of};

/// A keepsake that an earlier daemon has left.
pub struct Left {
    /// Its name, with which it is released.
    pub name: String,
    /// The description.
    pub file: File,
}

/// Who holds the keepsakes of this process, and outlives it.
pub trait Keeper: Send + Sync {
    /// Takes the keepsakes of the file of `file` that earlier daemons have left. They are still
    /// held, until each is [released](Self::release).
    fn left(&self, file: &File) -> Vec<Left>;

    /// Hands a keepsake over. Returns its name. Waits for a moment at most.
    ///
    /// # Errors
    /// When it could not be handed over.
    fn keep(&self, keepsake: File) -> io::Result<String>;

    /// What the keepsake with this name reports is recorded: it need not outlive an end of the
    /// process, even if that is not orderly. Never blocks.
    fn note_recorded(&self, name: &str);

    /// The keepsake with this name is not needed any more.
    fn release(&self, name: &str);
}

static KEEPER: OnceLock<Arc<dyn Keeper>> = OnceLock::new();

/// Gives the files that are opened from now on a keeper. It belongs to the process, as its
/// descriptors do. Only the first call has an effect.
pub fn set_keeper(keeper: Arc<dyn Keeper>) {
    let _ = KEEPER.set(keeper);
}

/// The report of a keepsake that has not been asked before: the `errno` of a write-back that has
/// failed since it was opened. Does not wait.
pub fn report_of_keepsake(keepsake: &File) -> Option<i32> {
    // A report is made once. A repeated error means that the call is not supported.
    report_of(keepsake).filter(|_| report_of(keepsake).is_none())
}

/// A keepsake of a file, and those of earlier daemons, until it is handed over.
pub(super) struct Fresh {
    file: Option<File>,
    left: Vec<Left>,
}

impl Fresh {
    /// Opens a keepsake of `file`. Those of earlier daemons are looked up afterwards. `disk` is for
    /// the log.
    pub(super) fn open(file: &File, disk: &str) -> Self {
        let Some(keeper) = KEEPER.get() else { return Self { file: None, left: Vec::new() } };
        let opened = open_again(file).inspect_err(|error| warn(disk, error)).ok();
        Self { file: opened, left: keeper.left(file) }
    }

    /// Asks the keepsakes of earlier daemons.
    pub(super) fn ask(&self) -> Option<i32> {
        let reports = self.left.iter().map(|left| report_of_keepsake(&left.file));
        reports.fold(None, Option::or)
    }

    /// Hands the keepsake over, then releases those of earlier daemons.
    pub(super) fn hand_over(self, disk: &str) -> Kept {
        let Some(keeper) = KEEPER.get() else { return Kept::default() };
        let kept = self.file.map(|file| keeper.keep(file));
        let name = kept.and_then(|kept| kept.inspect_err(|error| warn(disk, error)).ok());
        for left in self.left {
            keeper.release(&left.name);
        }
        Kept { name }
    }
}

fn warn(disk: &str, error: &io::Error) {
    tracing::warn!(
        disk,
        %error,
        "no keepsake: if the daemon is killed, the next one may not see that writes were lost"
    );
}

/// The keepsake of a file that somebody else holds. It is released explicitly, because some outlive
/// the daemon.
#[derive(Default)]
pub(super) struct Kept {
    name: Option<String>,
}

impl Kept {
    /// What it reports is recorded. Never blocks.
    pub(super) fn note_recorded(&self) {
        if let (Some(keeper), Some(name)) = (KEEPER.get(), &self.name) {
            keeper.note_recorded(name);
        }
    }

    /// The keepsake is not needed any more.
    pub(super) fn release(self) {
        if let (Some(keeper), Some(name)) = (KEEPER.get(), self.name) {
            keeper.release(&name);
        }
    }
}
