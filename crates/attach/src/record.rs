//! What a pager leaves for the next one, and the lock that only one holds.
//!
//! `PID.lock` is locked by the pager and its guard together, and free when both have ended.
//! `PID.json` says which descriptor of the VMM is the userfaultfd. It is written before the
//! injection too: a pager that died in between has left a descriptor that was not there before.

use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fathom_failure::Failure;
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::vmm::Vmm;

/// Where records are by default.
pub const FOLDER: &str = "/run/fathom/pager";
/// For how long a lock is waited for: a guard that has lost its pager needs a moment.
const LOCK_TIME_MAX: Duration = Duration::from_secs(2);
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// What is known of a VMM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PagerRecord {
    /// The VMM's process.
    pub process: i32,
    /// When it started: another process with the same number has another.
    pub start_ticks: u64,
    /// The userfaultfds that it had before ours was made.
    pub earlier: Vec<i32>,
    /// Ours, once it is known.
    pub descriptor: Option<i32>,
    /// Whether a pager was attached: it has not detached since.
    pub is_attached: bool,
}

/// The place of a VMM's record, locked.
#[derive(Debug)]
pub(crate) struct RecordPlace {
    path: PathBuf,
    /// The lock, which lives as long as one of its descriptors.
    pub lock: File,
}

impl RecordPlace {
    /// Locks the record of a VMM.
    ///
    /// # Errors
    /// When another pager has it, or the folder cannot be written.
    pub fn lock(folder: &Path, vmm: &Vmm) -> Result<Self, Failure> {
        let advice = "give a folder that this user can write (--folder)";
        let failed = |error: io::Error| {
            Failure::new(format!("cannot use {}: {error}", folder.display())).advise(advice)
        };
        fs::create_dir_all(folder).map_err(failed)?;
        fs::set_permissions(folder, Permissions::from_mode(0o700)).map_err(failed)?;
        let path = folder.join(format!("{}.json", vmm.process()));
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(path.with_extension("lock"))
            .map_err(failed)?;
        let begun = Instant::now();
        while let Err(error) = rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            if begun.elapsed() > LOCK_TIME_MAX {
                let process = vmm.process();
                return Err(Failure::new(format!("process {process} has a pager already"))
                    .advise(format!("detach it first: fathom pager detach {process}"))
                    .because(io::Error::from(error)));
            }
            std::thread::sleep(LOCK_PAUSE);
        }
        Ok(Self { path, lock })
    }

    /// The record, if it is of this VMM.
    pub fn read(&self, vmm: &Vmm) -> Option<PagerRecord> {
        let record: PagerRecord = serde_json::from_slice(&fs::read(&self.path).ok()?).ok()?;
        let is_of_it = record.start_ticks == vmm.start_ticks() && record.process == vmm.process();
        is_of_it.then_some(record)
    }

    /// Replaces the record.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, record: &PagerRecord) -> io::Result<()> {
        let beside = self.path.with_extension("new");
        let mut file = File::create(&beside)?;
        file.write_all(&serde_json::to_vec(record)?)?;
        fs::rename(beside, &self.path)
    }

    /// Removes what is left of a VMM that has ended.
    pub fn remove(&self) {
        for extension in ["json", "new", "sock", "lock"] {
            let _ = fs::remove_file(self.path.with_extension(extension));
        }
    }
}

/// Which of the userfaultfds that the VMM has now is ours. `None` if it was not made, or more than
/// one could be it.
pub(crate) fn ours(record: &PagerRecord, now: &[i32]) -> Option<i32> {
    if let Some(known) = record.descriptor {
        return now.contains(&known).then_some(known);
    }
    let mut new = now.iter().filter(|number| !record.earlier.contains(number));
    let first = new.next().copied();
    if new.next().is_some() { None } else { first }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ours_is_the_known_one_or_the_only_new_one() {
        let record = |earlier: &[i32], descriptor| PagerRecord {
            earlier: earlier.to_vec(),
            descriptor,
            ..PagerRecord::default()
        };
        assert_eq!(ours(&record(&[4], Some(9)), &[4, 9]), Some(9));
        assert_eq!(ours(&record(&[4], Some(9)), &[4]), None);
        assert_eq!(ours(&record(&[4], None), &[4, 7]), Some(7));
        assert_eq!(ours(&record(&[4], None), &[4]), None);
        assert_eq!(ours(&record(&[], None), &[4, 7]), None);
    }

    #[test]
    fn a_record_is_of_one_process_and_locked_once() {
        let folder = tempfile::tempdir().unwrap();
        let vmm = Vmm::open(std::process::id() as i32).unwrap();
        let place = RecordPlace::lock(folder.path(), &vmm).unwrap();
        assert_eq!(place.read(&vmm), None);
        let record = PagerRecord {
            process: vmm.process(),
            start_ticks: vmm.start_ticks(),
            descriptor: Some(7),
            ..PagerRecord::default()
        };
        place.write(&record).unwrap();
        assert_eq!(place.read(&vmm), Some(record.clone()));
        place.write(&PagerRecord { start_ticks: 1, ..record }).unwrap();
        assert_eq!(place.read(&vmm), None, "an earlier process had the same number");
        let refused = RecordPlace::lock(folder.path(), &vmm).unwrap_err();
        assert!(refused.message.contains("has a pager already"), "{refused}");
        drop(place);
        RecordPlace::lock(folder.path(), &vmm).unwrap().remove();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
