//! The lock of an image, and the detection of other writers.
//!
//! The lock belongs to the open file description (`F_OFD_SETLK`): it ends with the last descriptor,
//! so a killed process leaves no lock behind. It is visible across users and containers, and on NFS
//! across hosts. QEMU's locks of images are of the same kind, and both understand each other.
//!
//! QEMU (`raw_apply_lock_bytes`) has five permissions: to read consistently (0), to write (1), to
//! write what is there already (2), to resize (3) and, once, to change the graph (4). A process
//! takes a shared lock on the byte 100 + n for each permission that it uses, and one on the byte
//! 200 + n for each that it does not leave to others. Then it tests the opposite bytes for locks of
//! others.
//!
//! | lock | 0 to 99 | 100 | 101 to 199 | 200 | from 201 on |
//! |---|---|---|---|---|---|
//! | exclusive | write | read | write | tested | write |
//! | alone | write | write | write | write | write |
//! | shared | read | read | tested: 101, 103 | tested | read: 201, 203 |
//!
//! So a writer has no company but readers that share everything (`qemu-img convert -U`, `qemu-io
//! -U -r`): these lock the byte 100 and test the byte 200. A reader excludes writers and those that
//! resize, and shares the image with other readers, QEMU's too. Earlier versions locked the whole
//! file, which conflicts with each other lock but a shared one, as before.

#![expect(unsafe_code, reason = "locks of open file descriptions and leases")]

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// How long to wait while another process holds the lock. After a daemon has been killed, the
/// kernel takes some time to free its `io_uring`, which has descriptors of its own.
pub(crate) const PATIENCE: Duration = Duration::from_secs(3);
/// The interval between attempts to lock a held image.
pub(crate) const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// The purpose of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockPurpose {
    /// Reading: other readers may hold a lock too.
    Shared,
    /// Writing: excludes every other lock but those of QEMU's readers that share everything. The
    /// file has to be open for writing.
    Exclusive,
    /// Replacing, emptying or resizing by a command: excludes every other lock. The file has to be
    /// open for writing.
    Alone,
}

/// Why an image could not be locked.
#[derive(Debug)]
pub enum LockError {
    /// Another open file description holds a conflicting lock.
    Held,
    /// The file system has no locks.
    Unsupported(io::Error),
    /// Any other error of the operating system.
    Io(io::Error),
}

impl fmt::Display for LockError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Held => formatter.write_str("another process holds the lock"),
            Self::Unsupported(error) => write!(formatter, "the file system has no locks: {error}"),
            Self::Io(error) => error.fmt(formatter),
        }
    }
}

impl std::error::Error for LockError {}

/// The byte of QEMU's permission to read consistently.
const CONSISTENT_READ_AT: libc::off_t = 100;
/// The byte of QEMU's permission to write.
const WRITE_AT: libc::off_t = 101;
/// The byte of QEMU's permission to resize.
const RESIZE_AT: libc::off_t = 103;
/// The byte of those who do not leave the permission to read consistently to others.
const CONSISTENT_READ_DENIED_AT: libc::off_t = 200;
/// The byte of those who do not leave the permission to write to others.
const WRITE_DENIED_AT: libc::off_t = 201;
/// The byte of those who do not leave the permission to resize to others.
const RESIZE_DENIED_AT: libc::off_t = 203;
/// The length of a range up to the end of any file.
const REST: libc::off_t = 0;

/// A range of bytes, and the kind of lock on it.
type Part = (libc::off_t, libc::off_t, libc::c_int);

/// The parts of an exclusive lock. Another lock of Fathom's conflicts with the first part already.
const EXCLUSIVE: [Part; 4] = [
    (0, CONSISTENT_READ_AT, libc::F_WRLCK),
    (CONSISTENT_READ_AT, 1, libc::F_RDLCK),
    (CONSISTENT_READ_AT + 1, CONSISTENT_READ_DENIED_AT - CONSISTENT_READ_AT - 1, libc::F_WRLCK),
    (CONSISTENT_READ_DENIED_AT + 1, REST, libc::F_WRLCK),
];
/// The parts of a shared lock.
const SHARED: [Part; 3] = [
    (0, CONSISTENT_READ_AT + 1, libc::F_RDLCK),
    (WRITE_DENIED_AT, 1, libc::F_RDLCK),
    (RESIZE_DENIED_AT, 1, libc::F_RDLCK),
];

/// The parts of a lock that excludes every other one.
const ALONE: [Part; 1] = [(0, REST, libc::F_WRLCK)];
/// The bytes that are tested: nobody else may have a lock there.
const EXCLUSIVE_TESTED: [libc::off_t; 1] = [CONSISTENT_READ_DENIED_AT];
const SHARED_TESTED: [libc::off_t; 3] = [CONSISTENT_READ_DENIED_AT, WRITE_AT, RESIZE_AT];

/// The parts that are locked for an access, and the bytes that are tested.
fn parts(access: LockPurpose) -> (&'static [Part], &'static [libc::off_t]) {
    match access {
        LockPurpose::Exclusive => (&EXCLUSIVE, &EXCLUSIVE_TESTED),
        LockPurpose::Shared => (&SHARED, &SHARED_TESTED),
        LockPurpose::Alone => (&ALONE, &[]),
    }
}

fn range((start, length, kind): Part) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start,
        l_len: length,
        l_pid: 0,
    }
}

/// Locks or releases a part of a file.
fn set(file: &File, part: Part) -> Result<(), LockError> {
    let lock = range(part);
    // SAFETY: the structure lives through the call.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    Err(match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => LockError::Held,
        Some(libc::ENOLCK | libc::EOPNOTSUPP | libc::EINVAL | libc::ENOSYS) => {
            LockError::Unsupported(error)
        }
        _ => LockError::Io(error),
    })
}

/// Whether another description has a lock that conflicts with one on this part; `None` if the file
/// system does not report locks.
fn conflicts(file: &File, part: Part) -> Option<bool> {
    Some(conflict(file, part)?.l_type != libc::F_UNLCK as libc::c_short)
}

/// Whether another process has a lock on this byte alone, as QEMU's. A lock from the first byte on
/// is that of another reader, of an earlier version.
fn is_denied(file: &File, at: libc::off_t) -> bool {
    let unlocked = libc::F_UNLCK as libc::c_short;
    conflict(file, (at, 1, libc::F_WRLCK))
        .is_some_and(|lock| lock.l_type != unlocked && lock.l_start > 0)
}

/// The lock of another description that conflicts with one on this part; its type is `F_UNLCK` if
/// there is none. `None` if the file system does not report locks.
fn conflict(file: &File, part: Part) -> Option<libc::flock> {
    let mut lock = range(part);
    // SAFETY: the structure lives through the call, which writes to it.
    let known = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) } == 0;
    known.then_some(lock)
}

/// Takes the lock, unless there is a conflicting one. The lock lasts as long as the file is open.
/// After an error, the description has no lock.
///
/// # Errors
/// See [`LockError`].
pub fn try_lock(file: &File, access: LockPurpose) -> Result<(), LockError> {
    let (locked, tested) = parts(access);
    let taken = locked.iter().try_for_each(|part| set(file, *part)).and_then(|()| {
        let is_held = tested.iter().any(|at| is_denied(file, *at));
        if is_held { Err(LockError::Held) } else { Ok(()) }
    });
    if taken.is_err() {
        let _ = set(file, (0, REST, libc::F_UNLCK));
    }
    taken
}

/// Takes the lock, and waits for up to three seconds while another process holds it: that process
/// may be about to end.
///
/// # Errors
/// See [`LockError`].
pub fn lock(file: &File, access: LockPurpose) -> Result<(), LockError> {
    let start = Instant::now();
    loop {
        match try_lock(file, access) {
            Err(LockError::Held) if start.elapsed() < PATIENCE => {
                std::thread::sleep(RETRY_INTERVAL);
            }
            result => return result,
        }
    }
}

/// Whether another open file description has a lock on any part of the file; `None` if the file
/// system does not report locks. Takes no lock.
pub fn is_locked(file: &File) -> Option<bool> {
    conflicts(file, ALONE[0])
}

/// Whether a file is open for writing anywhere on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writers {
    /// The file is not open for writing.
    None,
    /// A process of any user in any container, or the kernel (a loop device), has it open for
    /// writing.
    Some,
    /// The kernel does not know: a file of another user, or a file system without leases.
    Unknown,
}

/// Asks the kernel whether a file is open for writing anywhere on this host, with a lease that is
/// released immediately. `file` must be open for reading only. Waits for up to three seconds while
/// there is a writer, which may be about to end.
pub fn writers(file: &File) -> Writers {
    let start = Instant::now();
    // If a process opens the file for writing while the lease exists, its `open` waits for the end
    // of the lease, and the kernel sends this signal to the lease's holder. By default the signal
    // would end the process.
    // SAFETY: to ignore a signal is a plain system call.
    unsafe { libc::signal(libc::SIGIO, libc::SIG_IGN) };
    loop {
        // SAFETY: a system call on our own descriptor.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK) } == 0 {
            // SAFETY: the same.
            unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK) };
            return Writers::None;
        }
        match io::Error::last_os_error().raw_os_error() {
            Some(libc::EAGAIN) if start.elapsed() < PATIENCE => std::thread::sleep(RETRY_INTERVAL),
            Some(libc::EAGAIN) => return Writers::Some,
            _ => return Writers::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn a_lock_excludes_other_locks_of_any_part() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (ours, theirs) = (file.reopen().unwrap(), file.reopen().unwrap());
        try_lock(&ours, LockPurpose::Exclusive).unwrap();
        assert!(matches!(try_lock(&theirs, LockPurpose::Shared), Err(LockError::Held)));
        assert_eq!(is_locked(&theirs), Some(true));
        assert_eq!(is_locked(&ours), Some(false));
        drop(ours);
        assert_eq!(is_locked(&theirs), Some(false));
    }

    /// Another user of a file, with a shared lock on each of these bytes as QEMU has them.
    fn qemu(path: &Path, bytes: &[libc::off_t]) -> Result<File, LockError> {
        let file = File::open(path).unwrap();
        bytes.iter().try_for_each(|byte| set(&file, (*byte, 1, libc::F_RDLCK)))?;
        Ok(file)
    }

    #[test]
    fn the_lock_is_shared_with_qemu_as_its_permissions_say() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path();
        let try_lock = |access| {
            let file = file.reopen().unwrap();
            try_lock(&file, access).map(|()| file)
        };
        let is_free = |file: &File, bytes: &[libc::off_t]| {
            bytes.iter().all(|byte| conflicts(file, (*byte, 1, libc::F_WRLCK)) == Some(false))
        };
        for access in [LockPurpose::Exclusive, LockPurpose::Shared] {
            let ours = try_lock(access).unwrap();
            // A reader that leaves all to others: -U.
            let reader = qemu(path, &[100]).unwrap();
            assert!(is_free(&reader, &[200]), "{access:?}");
            // A reader that excludes writers.
            let strict = qemu(path, &[100, 201, 203]);
            let strict = strict.is_ok_and(|reader| is_free(&reader, &[200, 101, 103]));
            assert_eq!(strict, access == LockPurpose::Shared);
            // A writer.
            let writer = qemu(path, &[100, 101, 103, 201, 203]);
            let writer = writer.is_ok_and(|writer| is_free(&writer, &[200, 201, 203, 101, 103]));
            assert!(!writer, "{access:?}");
            drop((ours, reader));
        }
        // The other order.
        for (bytes, shared, exclusive) in [
            (&[100][..], true, true),
            (&[100, 201, 203], true, false),
            (&[100, 101, 201, 203], false, false),
            (&[100, 200], false, false),
        ] {
            let theirs = qemu(path, bytes).unwrap();
            assert_eq!(try_lock(LockPurpose::Shared).is_ok(), shared, "{bytes:?}");
            assert_eq!(try_lock(LockPurpose::Exclusive).is_ok(), exclusive, "{bytes:?}");
            assert!(try_lock(LockPurpose::Alone).is_err(), "{bytes:?}");
            assert_eq!(is_locked(&file.reopen().unwrap()), Some(true), "{bytes:?}");
            drop(theirs);
        }
        // The lock of an earlier version.
        let earlier = file.reopen().unwrap();
        set(&earlier, (0, REST, libc::F_RDLCK)).unwrap();
        assert!(matches!(try_lock(LockPurpose::Exclusive), Err(LockError::Held)));
        try_lock(LockPurpose::Shared).unwrap();
        set(&earlier, (0, REST, libc::F_WRLCK)).unwrap();
        assert!(matches!(try_lock(LockPurpose::Shared), Err(LockError::Held)));
        set(&earlier, (0, REST, libc::F_UNLCK)).unwrap();
        let ours = try_lock(LockPurpose::Exclusive).unwrap();
        assert!(matches!(set(&earlier, (0, REST, libc::F_RDLCK)), Err(LockError::Held)));
        drop(ours);
    }

    #[test]
    fn writers_are_seen_without_a_lock() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let reader = File::open(file.path()).unwrap();
        // The kernel or the file system may have no leases here.
        match writers(&reader) {
            Writers::Unknown => return,
            found => assert_eq!(found, Writers::Some),
        }
        let path = file.into_temp_path();
        assert_eq!(writers(&reader), Writers::None);
        drop(path);
    }
}
