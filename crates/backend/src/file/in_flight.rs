//! Whether a killed daemon had a sync in flight, for daemons without keepsakes.
//!
//! A word in a mapped file counts the syncs in flight. The page cache keeps it when the daemon is
//! killed; a restart of the host forgets it with all reports. Such a sync may have taken a report
//! that nobody has recorded. ext4, XFS and btrfs keep an error for the whole file system, too,
//! which a new description still gets from `syncfs`, unless somebody else has asked for it
//! (`sync -f`). So the next daemon asks each file system once, before it serves a file on it. An
//! error may concern another file: it poisons all that are served from this file system. That a
//! sync was in flight is no evidence by itself, because one nearly always is.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use parking_lot::Mutex;

use super::durability::open_again;

/// The length of the file, in bytes: a page.
const LENGTH: usize = 4096;

/// The count of syncs in flight.
struct Count(NonNull<AtomicU32>);

// SAFETY: the mapping is never removed, and the word is atomic.
unsafe impl Send for Count {}
// SAFETY: the same.
unsafe impl Sync for Count {}

static COUNT: OnceLock<Count> = OnceLock::new();
/// Whether an earlier daemon was killed while a sync was in flight.
static IS_SUSPECT: AtomicBool = AtomicBool::new(false);
/// The reports of the file systems that have been asked, by device number.
static ASKED: Mutex<BTreeMap<u64, Option<i32>>> = Mutex::new(BTreeMap::new());

/// Looks whether an earlier daemon was killed while a sync was in flight: its count is in the file
/// at `path`, if there is one. Files that are opened from now on know that.
///
/// # Errors
/// When the file cannot be read.
pub fn read_syncs_in_flight(path: &Path) -> io::Result<()> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        file => file?,
    };
    let mut count = [0; 4];
    let length = file.read_at(&mut count, 0)?;
    if length == count.len() && u32::from_ne_bytes(count) > 0 {
        IS_SUSPECT.store(true, Ordering::Relaxed);
    }
    Ok(())
}

/// Counts syncs in flight from now on in a new file at `path`, which has to be in memory (`/run`).
///
/// # Errors
/// When the file cannot be made or mapped.
pub fn count_syncs_in_flight(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // `create_new` does not follow a link that another user may have put there.
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create_new(true).mode(0o600).open(path)?;
    // Written, not only extended: an access to the mapping then finds its page.
    file.write_all_at(&[0; LENGTH], 0)?;
    let descriptor = std::os::fd::AsRawFd::as_raw_fd(&file);
    // SAFETY: a new mapping of our own file, anywhere.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            LENGTH,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            descriptor,
            0,
        )
    };
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    if let Some(word) = NonNull::new(address.cast()) {
        let _ = COUNT.set(Count(word));
    }
    Ok(())
}

fn count() -> Option<&'static AtomicU32> {
    // SAFETY: the mapping is never removed, and begins at a page, so that the word is aligned. Only
    // this user can truncate the file.
    COUNT.get().map(|count| unsafe { count.0.as_ref() })
}

/// A sync goes to the kernel.
pub(super) fn begin() {
    if let Some(count) = count() {
        count.fetch_add(1, Ordering::Relaxed);
    }
}

/// A sync has completed, and a failure is recorded.
pub(super) fn end() {
    if let Some(count) = count() {
        count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The error of the file system of `file`, if an earlier daemon was killed while a sync was in
/// flight. May block as long as a sync of the file system does.
pub(super) fn ask(file: &File, disk: &str) -> Option<i32> {
    if !IS_SUSPECT.load(Ordering::Relaxed) {
        return None;
    }
    let metadata = file.metadata().ok().filter(std::fs::Metadata::is_file)?;
    let mut asked = ASKED.lock();
    *asked.entry(metadata.dev()).or_insert_with(|| {
        let report = open_again(file).and_then(|new| Ok(rustix::fs::syncfs(&new)?));
        let errno = report.err().map(|error| error.raw_os_error().unwrap_or(libc::EIO));
        if errno.is_none() {
            tracing::warn!(
                disk,
                "an earlier daemon was killed while a sync was in flight: its file system reports no loss of writes"
            );
        }
        errno
    })
}
