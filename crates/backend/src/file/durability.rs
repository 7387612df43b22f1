//! Whether what the kernel reports as durable may be believed.
//!
//! Linux keeps the error of a failed write-back with the file, and reports it **once** to each
//! open file description: to the first `fsync`, durable write or `sync_file_range` that asks
//! through it. Two requests on one description share one report. So the success of one says
//! nothing while another may have taken the report, whichever of them comes back first.
//!
//! Therefore no success is believed by itself. Each queue has a description of its own, its
//! **witness**, through which nothing else is done. After a durable operation has come back in
//! success, and before it is given out, the witness is asked whether any write-back has failed
//! ([`report_of`]: a system call that waits for nothing). An error that was recorded before the
//! operation asked is seen by the witness, whoever took the report meanwhile.
//!
//! The first failure poisons: the whole image takes no write and no flush any more, on any queue,
//! until the operator recovers it. The kernel has forgotten what was lost, so no later flush can
//! make up for it. `generation` counts poisonings and recoveries; a durable operation succeeds
//! only if the generation in which it began still holds, so that one that was under way during
//! both does not count.
//!
//! A description sees the errors since its opening, and those before that nobody has seen yet. A
//! witness that is opened late may therefore miss one whose report was taken a moment ago and has
//! not poisoned yet. The **sentinel**, opened with the image, closes the gap: it is asked after
//! each opening of a witness, under a lock and poisoning under it. What it has not seen by then
//! has not happened.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use fathom_block::BackendProblem;
use fathom_image::LossRecord;

/// A place behind every file's end: asked about it, the kernel has no page to wait for.
const BEHIND_ALL: libc::off64_t = 1 << 62;

/// What all queues of a file know of the durability of its writes.
pub(super) struct Durability {
    /// Even while the file is sound, odd while it is poisoned.
    generation: AtomicU64,
    /// Nothing is done through it but asking. `None` where nothing is written, or nothing is ever
    /// written back.
    sentinel: Mutex<Option<File>>,
    record: LossRecord,
    /// The name of the disk, for the log.
    disk: String,
    errno: AtomicI32,
    earlier: AtomicBool,
    unrecorded: AtomicBool,
}

impl Durability {
    /// The state of `file`, whose lost writes are noted in `record`. `watched` says whether
    /// anything is written that a store beneath could lose.
    ///
    /// # Errors
    /// When no second description of the file can be had.
    pub(super) fn open(
        file: &File,
        record: LossRecord,
        disk: &str,
        watched: bool,
    ) -> io::Result<Self> {
        let durability = Self {
            generation: AtomicU64::new(0),
            sentinel: Mutex::new(if watched { Some(open_again(file)?) } else { None }),
            record,
            disk: disk.to_owned(),
            errno: AtomicI32::new(0),
            earlier: AtomicBool::new(false),
            unrecorded: AtomicBool::new(false),
        };
        if watched {
            let recorded = durability.record.read(file).map(|loss| loss.errno);
            let mut sentinel = durability.sentinel();
            // A report that no daemon has taken: the last one was killed before it asked.
            let unseen = sentinel.as_ref().and_then(report_of);
            // A report is made once. What is said again and again is a refusal to answer.
            let refusal = sentinel.as_ref().and_then(report_of).filter(|_| unseen.is_some());
            if let Some(errno) = refusal {
                let error = io::Error::from_raw_os_error(errno);
                tracing::warn!(disk, %error, "failures of other requests' write-backs go unseen");
                *sentinel = None;
            }
            let unseen = unseen.filter(|_| refusal.is_none());
            if let Some(errno) = recorded.or(unseen) {
                durability.earlier.store(true, Ordering::Relaxed);
                durability.set(&sentinel, file, errno);
            }
        }
        Ok(durability)
    }

    fn sentinel(&self) -> MutexGuard<'_, Option<File>> {
        self.sentinel.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts up with each poisoning and each recovery.
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Whether writes may be lost, so that none is taken.
    pub(super) fn is_poisoned(&self) -> bool {
        self.generation() % 2 == 1
    }

    /// Writes of `file` may be lost, as `errno` says. Whoever calls gives out the outcome that
    /// says so afterwards.
    pub(super) fn poison(&self, file: &File, errno: i32) {
        let sentinel = self.sentinel();
        self.set(&sentinel, file, errno);
    }

    /// The lock on the sentinel is held: two failures at once are one.
    fn set(&self, _held: &MutexGuard<'_, Option<File>>, file: &File, errno: i32) {
        if self.is_poisoned() {
            return;
        }
        self.errno.store(errno, Ordering::Relaxed);
        // First, so that no other queue believes a success from here on.
        self.generation.fetch_add(1, Ordering::AcqRel);
        let recorded = self.record.write(file, errno);
        self.unrecorded.store(recorded.is_err(), Ordering::Relaxed);
        let disk = self.disk.as_str();
        for problem in self.problems() {
            tracing::error!(disk, "{problem}");
        }
        if let Err(error) = recorded {
            tracing::error!(disk, %error, "no place takes the record of the lost writes");
        }
    }

    /// Poisons under the lock, so that who asks next sees either the report or the poison.
    fn ask_sentinel(&self, file: &File) {
        let sentinel = self.sentinel();
        if let Some(errno) = sentinel.as_ref().and_then(report_of) {
            self.set(&sentinel, file, errno);
        }
    }

    /// What is wrong.
    pub(super) fn problems(&self) -> Vec<BackendProblem> {
        let mut problems = Vec::new();
        if self.is_poisoned() {
            problems.push(BackendProblem::WritesLost {
                errno: self.errno.load(Ordering::Relaxed),
                earlier: self.earlier.load(Ordering::Relaxed),
            });
            if self.unrecorded.load(Ordering::Relaxed) {
                problems.push(BackendProblem::LossNotRecorded);
            }
        }
        problems
    }

    /// Takes writes of `file` again, if a sync says that the store does. May block as long as
    /// that takes.
    ///
    /// # Errors
    /// When the store still fails, or the record of the loss cannot be removed. Nothing has
    /// changed then.
    pub(super) fn recover(&self, file: &File) -> io::Result<()> {
        if !self.is_poisoned() {
            return Ok(());
        }
        // The report that this description may still hold is the one that poisoned.
        let _ = file.sync_data();
        let fresh = open_again(file)?;
        file.sync_data()?;
        let mut sentinel = self.sentinel();
        if let Some(errno) = report_of(&fresh) {
            return Err(io::Error::from_raw_os_error(errno));
        }
        self.record.clear(file)?;
        *sentinel = Some(fresh);
        self.earlier.store(false, Ordering::Relaxed);
        self.unrecorded.store(false, Ordering::Relaxed);
        self.generation.fetch_add(1, Ordering::AcqRel);
        tracing::warn!(disk = self.disk.as_str(), "takes writes again; what was lost stays lost");
        Ok(())
    }
}

/// One queue's view of the durability of a file.
pub(super) struct Witness {
    /// The queue's own description; `None` where it could not be had, or none is needed. The
    /// sentinel is asked then.
    file: Option<File>,
    /// The generation in which it was opened.
    generation: u64,
}

impl Witness {
    /// A witness of `file`, as things are now.
    pub(super) fn new(durability: &Durability, file: &File) -> Self {
        let generation = durability.generation();
        let mut witness = Self { file: None, generation };
        let watched = durability.sentinel().is_some();
        if watched {
            witness.file = open_again(file)
                .inspect_err(|error| {
                    let disk = durability.disk.as_str();
                    tracing::warn!(disk, %error, "a queue shares its witness with others");
                })
                .ok();
            durability.ask_sentinel(file);
        }
        witness
    }

    /// Begins a durable operation. Gives the generation to [`confirm`](Self::confirm) it in, or
    /// `None` where the file is poisoned.
    pub(super) fn begin(&mut self, durability: &Durability, file: &File) -> Option<u64> {
        let generation = durability.generation();
        if generation % 2 == 1 {
            return None;
        }
        if generation != self.generation {
            // What the old one would report led to the recovery.
            *self = Self::new(durability, file);
            return Some(self.generation).filter(|generation| generation % 2 == 0);
        }
        Some(generation)
    }

    /// Whether a durable operation that began in `generation`, and that the kernel calls done, may
    /// be given out as done. Poisons where it may not.
    pub(super) fn confirm(&self, durability: &Durability, file: &File, generation: u64) -> bool {
        if durability.generation() != generation {
            return false;
        }
        if let Some(errno) = self.report(durability, file) {
            durability.poison(file, errno);
        }
        durability.generation() == generation
    }

    /// A durable operation failed with `errno`. `was_sync` says that it was the sync itself.
    pub(super) fn failed(&self, durability: &Durability, file: &File, errno: i32, was_sync: bool) {
        let reported = self.report(durability, file);
        // Refused before anything was written: nothing is lost unless the witness says so.
        let refused = !was_sync
            && matches!(
                errno,
                libc::ENOSPC | libc::EDQUOT | libc::EFBIG | libc::EINVAL | libc::EFAULT
            );
        if reported.is_some() || !refused {
            durability.poison(file, reported.unwrap_or(errno));
        }
    }

    /// What this queue's description has to report; the sentinel's report poisons by itself.
    fn report(&self, durability: &Durability, file: &File) -> Option<i32> {
        if let Some(own) = &self.file {
            return report_of(own);
        }
        durability.ask_sentinel(file);
        None
    }
}

/// The `errno` of a write-back of this file that failed since this description was last asked.
/// Waits for nothing.
fn report_of(file: &File) -> Option<i32> {
    let descriptor = file.as_raw_fd();
    // SAFETY: a system call on our own descriptor, about a range without pages.
    let result = unsafe {
        libc::sync_file_range(descriptor, BEHIND_ALL, 1, libc::SYNC_FILE_RANGE_WAIT_BEFORE)
    };
    if result == 0 {
        return None;
    }
    Some(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}

/// Another description of the same file, whatever its name leads to by now. The lock of the first
/// one is not touched by its closing.
fn open_again(file: &File) -> io::Result<File> {
    OpenOptions::new().read(true).open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}
