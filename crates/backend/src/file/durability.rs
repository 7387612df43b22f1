//! Decides whether a success that the kernel reports for a durable operation is reliable.
//!
//! Linux keeps the error of a failed write-back with the file, and reports it **once** to each open
//! file description: to the first `fsync`, durable write or `sync_file_range` through it. Two
//! requests on one description share one report. So the success of one proves nothing while another
//! may have taken the report, whichever completes first.
//!
//! Therefore no success counts without confirmation. Each queue has a separate description, its
//! **witness**, which is used for nothing else. After a durable operation has succeeded, and before
//! it completes, the witness is asked whether any write-back has failed ([`report_of`], a system
//! call that does not wait). The witness sees every error that was recorded before the operation
//! itself asked for a report, even if another request has taken that report meanwhile.
//!
//! The first failure poisons the file: the whole image accepts no writes or flushes any more, on
//! any queue, until the operator recovers it. The kernel has forgotten the lost writes, so a later
//! flush cannot make up for them. `generation` counts poisonings and recoveries. A durable
//! operation succeeds only if the generation in which it began is still current, so an operation
//! that was in flight during both fails.
//!
//! A description sees the errors since its opening, and earlier ones that have not been reported.
//! So a witness that is opened late may miss an error whose report has just been taken but has not
//! yet poisoned the file. The **sentinel**, opened with the image, closes the gap. It is asked
//! after each opening of a witness, under a lock, and its report poisons the file under the same
//! lock. An error that it has not reported by then has not happened.
//!
//! All of these end with the daemon. `keepsake` has what outlives it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};

use super::in_flight;
use super::keepsake::{Fresh, Kept};
use fathom_block::BackendProblem;
use fathom_image::LossRecord;
use parking_lot::{Mutex, MutexGuard};
use rustix::fs::{Advice, fadvise};

/// An offset past every file's end, where the kernel has no page to wait for.
const PAST_END: libc::off64_t = 1 << 62;

/// The state of the durability of a file's writes, shared by its queues.
pub(super) struct Durability {
    /// Even while the file is sound, odd while it is poisoned.
    generation: AtomicU64,
    /// A description that is only asked for reports. `None` for a file that is not written, or
    /// never written back.
    sentinel: Mutex<Option<File>>,
    /// What tells the next daemon of a report that this one does not get.
    keepsake: Mutex<Kept>,
    record: LossRecord,
    /// The name of the disk, for the log.
    disk: String,
    errno: AtomicI32,
    earlier: AtomicBool,
    unrecorded: AtomicBool,
}

impl Durability {
    /// Creates the state of `file`, whose lost writes are recorded in `record`. `watched` is
    /// whether the file is written and has a store that could lose writes.
    ///
    /// # Errors
    /// When the file cannot be opened again.
    pub(super) fn open(
        file: &File,
        record: LossRecord,
        disk: &str,
        watched: bool,
    ) -> io::Result<Self> {
        let durability = Self {
            generation: AtomicU64::new(0),
            sentinel: Mutex::new(if watched { Some(open_again(file)?) } else { None }),
            keepsake: Mutex::default(),
            record,
            disk: disk.to_owned(),
            errno: AtomicI32::new(0),
            earlier: AtomicBool::new(false),
            unrecorded: AtomicBool::new(false),
        };
        if watched {
            let keepsake = Fresh::open(file, disk);
            let suspected = in_flight::ask(file, disk);
            let recorded = durability.record.read(file).map(|loss| loss.errno);
            let mut sentinel = durability.sentinel();
            // A report that no daemon has taken, because the last one was killed before it asked.
            let unseen = sentinel.as_ref().and_then(report_of);
            // A report is made once. A repeated error means that the call is not supported.
            let refusal = sentinel.as_ref().and_then(report_of).filter(|_| unseen.is_some());
            if let Some(errno) = refusal {
                let error = io::Error::from_raw_os_error(errno);
                tracing::warn!(disk, %error, "failures of other requests' write-backs go unseen");
                *sentinel = None;
            }
            let unseen = unseen.filter(|_| refusal.is_none());
            // Each is asked, because a report that is left would poison the file again after its
            // recovery.
            let left = keepsake.ask();
            if let Some(errno) = recorded.or(unseen).or(left).or(suspected) {
                durability.earlier.store(true, Ordering::Relaxed);
                durability.set(&sentinel, file, errno);
            }
            drop(sentinel);
            let keepsake = keepsake.hand_over(disk);
            if durability.is_poisoned() && !durability.unrecorded.load(Ordering::Relaxed) {
                keepsake.note_recorded();
            }
            *durability.keepsake() = keepsake;
        }
        Ok(durability)
    }

    fn keepsake(&self) -> MutexGuard<'_, Kept> {
        self.keepsake.lock()
    }

    fn sentinel(&self) -> MutexGuard<'_, Option<File>> {
        self.sentinel.lock()
    }

    /// The number of poisonings and recoveries so far.
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Whether writes may be lost, so that none is accepted.
    pub(super) fn is_poisoned(&self) -> bool {
        self.generation() % 2 == 1
    }

    /// Records that writes of `file` may be lost, with `errno`. The caller must complete the failed
    /// request only afterwards.
    pub(super) fn poison(&self, file: &File, errno: i32) {
        let sentinel = self.sentinel();
        self.set(&sentinel, file, errno);
    }

    /// Poisons under the lock on the sentinel, so that two concurrent failures count once.
    fn set(&self, _held: &MutexGuard<'_, Option<File>>, file: &File, errno: i32) {
        if self.is_poisoned() {
            return;
        }
        self.errno.store(errno, Ordering::Relaxed);
        // First, so that from here on no other queue confirms a success.
        self.generation.fetch_add(1, Ordering::AcqRel);
        let recorded = self.record.write(file, errno);
        self.unrecorded.store(recorded.is_err(), Ordering::Relaxed);
        if recorded.is_ok() {
            self.keepsake().note_recorded();
        }
        let disk = self.disk.as_str();
        for problem in self.problems() {
            tracing::error!(disk, "{problem}");
        }
        if let Err(error) = recorded {
            tracing::error!(disk, %error, "the record of the lost writes cannot be stored");
        }
    }

    /// Asks the sentinel, and poisons under the lock: a later call sees either the report or the
    /// poisoning.
    fn check_sentinel(&self, file: &File) {
        let sentinel = self.sentinel();
        if let Some(errno) = sentinel.as_ref().and_then(report_of) {
            self.set(&sentinel, file, errno);
        }
    }

    /// The current problems of the file's durability.
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

    /// Accepts writes of `file` again if a sync succeeds. May block as long as the sync takes.
    ///
    /// # Errors
    /// When the store still fails, or the record of the loss cannot be removed. Then the state is
    /// unchanged.
    pub(super) fn recover(&self, file: &File) -> io::Result<()> {
        if !self.is_poisoned() {
            return Ok(());
        }
        // This description may still hold the report that poisoned the file.
        let _ = file.sync_data();
        let fresh = open_again(file)?;
        let keepsake = Fresh::open(file, &self.disk);
        file.sync_data()?;
        let mut sentinel = self.sentinel();
        if let Some(errno) = report_of(&fresh) {
            return Err(io::Error::from_raw_os_error(errno));
        }
        // The kernel may still have what it could not write: reads get what the store has from now
        // on.
        let _ = fadvise(file, 0, None, Advice::DontNeed);
        // The old one may still have the report. It must not be the only one without the record.
        let keepsake = keepsake.hand_over(&self.disk);
        std::mem::replace(&mut *self.keepsake(), keepsake).release();
        self.record.clear(file)?;
        *sentinel = Some(fresh);
        self.earlier.store(false, Ordering::Relaxed);
        self.unrecorded.store(false, Ordering::Relaxed);
        self.generation.fetch_add(1, Ordering::AcqRel);
        tracing::warn!(disk = self.disk.as_str(), "takes writes again; lost writes stay lost");
        Ok(())
    }
}

impl Drop for Durability {
    /// The last flush has succeeded, or the loss is recorded.
    fn drop(&mut self) {
        let keepsake = std::mem::take(&mut *self.keepsake());
        if !self.unrecorded.load(Ordering::Relaxed) {
            keepsake.release();
        }
    }
}

/// One queue's view of the durability of a file.
pub(super) struct Witness {
    /// The queue's own description; `None` if it could not be opened, or none is needed. Then the
    /// sentinel is asked.
    file: Option<File>,
    /// The generation in which it was opened.
    generation: u64,
}

impl Witness {
    /// A witness of `file`, opened in the current generation.
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
            durability.check_sentinel(file);
        }
        witness
    }

    /// Begins a durable operation. Returns the generation for [`confirm`](Self::confirm), or `None`
    /// if the file is poisoned.
    pub(super) fn begin(&mut self, durability: &Durability, file: &File) -> Option<u64> {
        let generation = durability.generation();
        if generation % 2 == 1 {
            return None;
        }
        if generation != self.generation {
            // The report that the old description may hold led to the recovery.
            *self = Self::new(durability, file);
            return Some(self.generation).filter(|generation| generation % 2 == 0);
        }
        Some(generation)
    }

    /// Whether a durable operation that began in `generation` and succeeded may complete as a
    /// success. Poisons the file if not.
    pub(super) fn confirm(&self, durability: &Durability, file: &File, generation: u64) -> bool {
        if durability.generation() != generation {
            return false;
        }
        if let Some(errno) = self.report(durability, file) {
            durability.poison(file, errno);
        }
        durability.generation() == generation
    }

    /// Handles a durable operation that failed with `errno`. `was_sync` is whether it was the sync
    /// itself.
    pub(super) fn failed(&self, durability: &Durability, file: &File, errno: i32, was_sync: bool) {
        let reported = self.report(durability, file);
        // A request refused before any write loses nothing, unless the witness reports an error.
        let refused = !was_sync
            && matches!(
                errno,
                libc::ENOSPC | libc::EDQUOT | libc::EFBIG | libc::EINVAL | libc::EFAULT
            );
        if reported.is_some() || !refused {
            durability.poison(file, reported.unwrap_or(errno));
        }
    }

    /// The report of this queue's description. A report of the sentinel poisons the file directly.
    fn report(&self, durability: &Durability, file: &File) -> Option<i32> {
        if let Some(own) = &self.file {
            return report_of(own);
        }
        durability.check_sentinel(file);
        None
    }
}

/// The `errno` of a write-back of this file that has failed since this description was last asked.
/// Does not wait.
pub(super) fn report_of(file: &File) -> Option<i32> {
    let descriptor = file.as_raw_fd();
    // SAFETY: a system call on our own descriptor, about a range without pages.
    let result = unsafe {
        libc::sync_file_range(descriptor, PAST_END, 1, libc::SYNC_FILE_RANGE_WAIT_BEFORE)
    };
    if result == 0 {
        return None;
    }
    Some(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}

/// Opens another description of the same file, even if its name has changed. Closing it does not
/// release the lock of the first one.
pub(super) fn open_again(file: &File) -> io::Result<File> {
    OpenOptions::new().read(true).open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}
