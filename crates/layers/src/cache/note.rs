//! Notes the modification time of a disk's store, so that the next start finds out whether another
//! program has changed it.
//!
//! The time is read when the disk has had no change for a moment, and again at growing intervals,
//! because layers beneath may change the store later. A disk that is changed all the time has no
//! valid note, and so after a crash no blocks: it cannot be found out then whether the last change
//! was its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fathom_block::Crossing;

use super::queue::CacheQueue;

/// How long a disk must have had no change, in nanoseconds.
const QUIET_NS: u64 = 500_000_000;
/// How much longer each further interval is.
const GROWTH: u32 = 4;
/// The number of notes after a change.
const NOTES: u32 = 5;

/// The notes of a disk, without I/O.
#[derive(Debug, Default)]
pub(super) struct Notes {
    /// When the time is read next, in nanoseconds; 0 is never.
    due_ns: u64,
    /// The number of notes since the last change.
    count: u32,
    is_reading: bool,
}

impl Notes {
    /// The store has changed.
    pub(super) fn changed(&mut self, now_ns: u64) {
        (self.due_ns, self.count) = (now_ns + QUIET_NS, 0);
    }

    /// When the time is read next, in nanoseconds.
    pub(super) fn next_ns(&self) -> Option<u64> {
        (self.due_ns != 0 && !self.is_reading).then_some(self.due_ns)
    }

    /// Begins to read the time if it is due.
    pub(super) fn begin(&mut self, now_ns: u64) -> bool {
        let begins = self.next_ns().is_some_and(|due_ns| due_ns <= now_ns);
        self.is_reading |= begins;
        begins
    }

    /// The time is not being read any more.
    fn abandon(&mut self, now_ns: u64) {
        self.is_reading = false;
        self.due_ns = now_ns + QUIET_NS;
    }

    /// The time has been read, or could not be.
    pub(super) fn end(&mut self, now_ns: u64) {
        if !std::mem::take(&mut self.is_reading) || self.due_ns > now_ns {
            // The store has changed meanwhile.
            return;
        }
        self.count += 1;
        let interval_ns = QUIET_NS * u64::from(GROWTH.pow(self.count));
        self.due_ns = if self.count < NOTES { now_ns + interval_ns } else { 0 };
    }
}

/// The only reading of a modification time of a volume's disks, until it is dropped.
struct Reading(Arc<AtomicBool>);

impl Drop for Reading {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl CacheQueue {
    /// Takes over a modification time that has been read, and begins to read the next one.
    pub(super) fn tend_notes(&mut self, next: &mut Crossing<'_>) {
        if !self.inner.is_noted {
            return;
        }
        let inner = Arc::clone(&self.inner);
        while let Some((_, modified_ns)) = self.noting.answer() {
            let now_ns = next.round_ns();
            inner.disk.regions.access(|regions| regions.notes.end(now_ns));
            let mut record = inner.disk.record.lock();
            let modified_ns = modified_ns.unwrap_or_default();
            if modified_ns != 0 && record.modified_ns != modified_ns {
                record.modified_ns = modified_ns;
                drop(record);
                inner.disk.is_record_dirty.store(true, Ordering::Release);
                self.note_change(next);
            }
        }
        if self.is_closed || inner.volume.has_failed() {
            return;
        }
        let now_ns = next.round_ns();
        let (begins, next_ns) = inner.disk.regions.access(|regions| {
            let is_due = regions.notes.next_ns().is_some_and(|due_ns| due_ns <= now_ns);
            let is_free = is_due && !inner.volume.is_noting.swap(true, Ordering::AcqRel);
            (is_free && regions.notes.begin(now_ns), regions.notes.next_ns())
        });
        if let Some(next_ns) = next_ns {
            // One of another disk may be in progress.
            next.wake_at(next_ns.max(now_ns + QUIET_NS / 10));
        }
        if !begins {
            return;
        }
        let (reading, mark) =
            (Reading(Arc::clone(&inner.volume.is_noting)), Arc::clone(&inner.mark));
        let begun = self.noting.begin(0, move || {
            let _reading = reading;
            mark.modified_ns().unwrap_or_default()
        });
        if !begun {
            inner.disk.regions.access(|regions| regions.notes.abandon(now_ns));
        }
    }

    /// The queue is closed: another one reads the time.
    pub(super) fn abandon_note(&mut self) {
        if self.noting.in_flight() > 0 {
            self.inner.disk.regions.access(|regions| regions.notes.abandon(1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_is_read_when_the_disk_is_quiet_and_a_few_times_more() {
        let mut notes = Notes::default();
        assert!(!notes.begin(u64::MAX) && notes.next_ns().is_none());
        notes.changed(100);
        notes.changed(200);
        assert!(!notes.begin(100 + QUIET_NS) && notes.begin(200 + QUIET_NS));
        assert!(!notes.begin(200 + QUIET_NS), "it is being read");
        notes.changed(300 + QUIET_NS);
        notes.end(400 + QUIET_NS);
        assert_eq!(notes.next_ns(), Some(300 + 2 * QUIET_NS), "it has changed meanwhile");
        let (mut now_ns, mut count) = (0, 0);
        while let Some(next_ns) = notes.next_ns() {
            assert!(next_ns > now_ns);
            now_ns = next_ns;
            assert!(notes.begin(now_ns));
            notes.end(now_ns);
            count += 1;
        }
        assert_eq!(count, NOTES);
    }
}
