//! What a pager leaves for the next one, and the locks.
//!
//! | file | locked by |
//! |---|---|
//! | `PID.lock` | the pager: there is one at a time |
//! | `PID.guard` | who serves the faults: the pager together with its guard, which alone keeps it when the pager has died |
//! | `PID.wish` | a pager that waits for `PID.guard`: a guard that serves gives it away then |
//! | `PID.spare0` to `7` | a guard whose pager has died: there are at most so many |
//!
//! A pager starts its own guard before it waits, so that somebody serves whenever it dies. A guard
//! whose pager has died waits for `PID.guard`, however many do, and gives it away once for each
//! wish: a pager that dies while it waits leaves at least two. The files stay as long as the VMM
//! runs. `PID.json` says which descriptor of the VMM is the userfaultfd. It is written before the
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
/// Not in the folder of the daemon's unit, which goes when that stops.
pub const FOLDER: &str = "/run/fathom-pager/records";
/// For how long the lock is waited for: a pager that was asked to detach needs a moment.
const LOCK_TIME_MAX: Duration = Duration::from_secs(2);
const LOCK_PAUSE: Duration = Duration::from_millis(10);
/// The most guards without a pager that serve or wait for their turn.
const SPARES_MAX: u32 = 8;
/// For how long a guard that serves is waited for.
const GUARD_TIME_MAX: Duration = Duration::from_secs(10);
const GUARD_PAUSE: Duration = Duration::from_millis(1);

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
    /// The store of the pages that are away; none before a page may leave.
    #[serde(default)]
    pub store: Option<PathBuf>,
    /// Its swap file, if it has one.
    #[serde(default)]
    pub swap: Option<PathBuf>,
    /// The folder of the tables of leases that belong to it.
    #[serde(default)]
    pub leases: PathBuf,
    /// The limit in bytes; none without one.
    #[serde(default)]
    pub limit: Option<u64>,
    /// The last guard's process.
    #[serde(default)]
    pub guard: u32,
}

/// The place of a VMM's record, locked.
#[derive(Debug)]
pub(crate) struct RecordPlace {
    path: PathBuf,
    /// The lock of pagers.
    _lock: File,
    /// The lock of who serves, which lives as long as one of its descriptors.
    pub guard: File,
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
        make_folder(folder, 0o700).map_err(failed)?;
        fs::set_permissions(folder, Permissions::from_mode(0o700)).map_err(failed)?;
        let path = folder.join(format!("{}.json", vmm.process()));
        let lock = open_lock(&path.with_extension("lock")).map_err(failed)?;
        let guard = open_lock(&path.with_extension("guard")).map_err(failed)?;
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
        Ok(Self { path, _lock: lock, guard })
    }

    /// Where the record is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file that a pager locks while it waits to serve.
    pub fn wish(&self) -> PathBuf {
        self.path.with_extension("wish")
    }

    /// Becomes the one that serves, together with the guard that has [`guard`](Self::guard).
    ///
    /// # Errors
    /// When the guard of an earlier pager does not end.
    pub fn take_over(&self, earlier: u32) -> Result<(), Failure> {
        let failed = |error: io::Error| {
            Failure::new(format!("the guard of an earlier pager (process {earlier}) does not end"))
                .advise("let it go on if it is stopped; it serves the guest's faults meanwhile")
                .because(error)
        };
        let wish = open_lock(&self.wish()).map_err(failed)?;
        let begun = Instant::now();
        for lock in [&wish, &self.guard] {
            while let Err(error) = rustix::fs::flock(lock, FlockOperation::NonBlockingLockExclusive)
            {
                if begun.elapsed() > GUARD_TIME_MAX {
                    return Err(failed(error.into()));
                }
                std::thread::sleep(GUARD_PAUSE);
            }
        }
        Ok(())
    }

    /// The record, if it is of this VMM.
    ///
    /// # Errors
    /// When there is one that cannot be read: pages may be away.
    pub fn read(&self, vmm: &Vmm) -> Result<Option<PagerRecord>, Failure> {
        let found = match fs::read(&self.path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(io::Error::from),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => Err(error),
        };
        let record: PagerRecord = found.map_err(|error| {
            Failure::new(format!("{} cannot be read: {error}", self.path.display()))
                .advise("restore it; without it, nothing says where the pages are that are away")
        })?;
        let is_of_it = record.start_ticks == vmm.start_ticks() && record.process == vmm.process();
        Ok(is_of_it.then_some(record))
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
        for extension in ["json", "new", "sock", "wish", "guard", "lock"] {
            let _ = fs::remove_file(self.path.with_extension(extension));
        }
        for number in 0..SPARES_MAX {
            let _ = fs::remove_file(spare(&self.path, number));
        }
    }
}

/// Makes a folder with these rights, and the folders above it that are missing, in which others may
/// find what they know: whether there is a table of leases must not depend on this user's mask.
///
/// # Errors
/// Those of the folders.
pub(crate) fn make_folder(folder: &Path, mode: u32) -> io::Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    if let Some(above) = folder.parent().filter(|above| !above.as_os_str().is_empty()) {
        make_folder(above, 0o711)?;
    }
    match fs::create_dir(folder) {
        Ok(()) => fs::set_permissions(folder, Permissions::from_mode(mode)),
        // Another process has made it.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

fn open_lock(path: &Path) -> io::Result<File> {
    File::options().create(true).truncate(false).write(true).open(path)
}

/// Whether a pager waits to serve.
pub(crate) fn is_wished(wish: &Path) -> bool {
    // Not created: without the file nobody waits.
    let Ok(file) = File::options().read(true).open(wish) else { return false };
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared).is_err()
}

/// The place of a guard whose pager has died among those that serve or wait for their turn. `None`
/// if as many are there already, which live: a pager that dies again and again must not leave more.
///
/// # Errors
/// Those of the files. It is not known how many there are then.
pub(crate) fn take_spare_place(record: &Path) -> io::Result<Option<File>> {
    for number in 0..SPARES_MAX {
        let file = open_lock(&spare(record, number))?;
        if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            return Ok(Some(file));
        }
    }
    Ok(None)
}

fn spare(record: &Path, number: u32) -> PathBuf {
    record.with_extension(format!("spare{number}"))
}

/// Waits until no pager waits to serve.
///
/// # Errors
/// Those of the file.
pub(crate) fn await_wish(wish: &Path) -> io::Result<()> {
    let file = File::options().read(true).open(wish)?;
    Ok(rustix::fs::flock(&file, FlockOperation::LockShared)?)
}

/// The record at a path; `None` if it cannot be read.
pub(crate) fn read(path: &Path) -> Option<PagerRecord> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
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
    fn folders_have_their_rights_whatever_the_mask() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("a/b");
        make_folder(&inner, 0o700).unwrap();
        make_folder(&inner, 0o711).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&folder.path().join("a")), mode(&inner)), (0o711, 0o700));
    }

    #[test]
    fn there_are_so_many_guards_and_no_more() {
        let folder = tempfile::tempdir().unwrap();
        let record = folder.path().join("7.json");
        let mut places: Vec<_> =
            (0..SPARES_MAX).map(|_| take_spare_place(&record).unwrap()).collect();
        assert!(places.iter().all(Option::is_some));
        assert!(take_spare_place(&record).unwrap().is_none());
        places.pop();
        assert!(take_spare_place(&record).unwrap().is_some(), "one has ended");
    }

    #[test]
    fn a_record_is_of_one_process_and_locked_once() {
        let folder = tempfile::tempdir().unwrap();
        let vmm = Vmm::open(std::process::id() as i32).unwrap();
        let place = RecordPlace::lock(folder.path(), &vmm).unwrap();
        assert_eq!(place.read(&vmm).unwrap(), None);
        let record = PagerRecord {
            process: vmm.process(),
            start_ticks: vmm.start_ticks(),
            descriptor: Some(7),
            ..PagerRecord::default()
        };
        place.write(&record).unwrap();
        assert_eq!(place.read(&vmm).unwrap(), Some(record.clone()));
        place.write(&PagerRecord { start_ticks: 1, ..record }).unwrap();
        assert_eq!(place.read(&vmm).unwrap(), None, "an earlier process had the same number");
        fs::write(place.path(), "{").unwrap();
        place.read(&vmm).unwrap_err();
        let refused = RecordPlace::lock(folder.path(), &vmm).unwrap_err();
        assert!(refused.message.contains("has a pager already"), "{refused}");
        drop(place);
        RecordPlace::lock(folder.path(), &vmm).unwrap().remove();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
