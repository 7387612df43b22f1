//! The lock of an image, and the detection of other writers.
//!
//! The lock belongs to the open file description (`F_OFD_SETLK`) and covers the whole file:
//! exclusive for writers, shared for readers. It ends with the last descriptor, so a killed process
//! leaves no lock behind. QEMU's image locks are of the same kind: QEMU takes shared locks on
//! single bytes from offsets 100 and 200 on, and tests for locks of other processes there. An
//! exclusive lock on the whole file conflicts with both, in either order; a shared lock prevents
//! QEMU from writing. Such locks are visible across users and containers, and on NFS across hosts.

#![expect(unsafe_code, reason = "locks of open file descriptions and leases")]

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// How long to wait while another process holds the lock. After a daemon has been killed, the
/// kernel takes some time to free its `io_uring`, which has descriptors of its own.
const PATIENCE: Duration = Duration::from_secs(3);
/// The interval between attempts to lock a held image.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// The purpose of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reading: other readers may hold a lock too.
    Shared,
    /// Writing: excludes every other lock. The file has to be open for writing.
    Exclusive,
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

fn whole_file(access: Access) -> libc::flock {
    let kind = match access {
        Access::Shared => libc::F_RDLCK,
        Access::Exclusive => libc::F_WRLCK,
    };
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}

/// Takes the lock, unless there is a conflicting one. The lock lasts as long as the file is open.
///
/// # Errors
/// See [`LockError`].
pub fn try_lock(file: &File, access: Access) -> Result<(), LockError> {
    let lock = whole_file(access);
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

/// Takes the lock, and waits for up to three seconds while another process holds it: that process
/// may be about to end.
///
/// # Errors
/// See [`LockError`].
pub fn lock(file: &File, access: Access) -> Result<(), LockError> {
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
    let mut lock = whole_file(Access::Exclusive);
    // SAFETY: the structure lives through the call, which writes to it.
    let known = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) } == 0;
    known.then_some(lock.l_type != libc::F_UNLCK as libc::c_short)
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
    use super::*;

    #[test]
    fn a_lock_excludes_other_locks_of_any_part() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (ours, theirs) = (file.reopen().unwrap(), file.reopen().unwrap());
        try_lock(&ours, Access::Exclusive).unwrap();
        assert!(matches!(try_lock(&theirs, Access::Shared), Err(LockError::Held)));
        assert_eq!(is_locked(&theirs), Some(true));
        assert_eq!(is_locked(&ours), Some(false));
        drop(ours);
        assert_eq!(is_locked(&theirs), Some(false));
        // QEMU's lock: a shared lock of one byte.
        let mut byte = whole_file(Access::Shared);
        (byte.l_start, byte.l_len) = (100, 1);
        let descriptor = theirs.as_raw_fd();
        // SAFETY: the structure lives through the call.
        let taken = unsafe { libc::fcntl(descriptor, libc::F_OFD_SETLK, &raw const byte) };
        assert_eq!(taken, 0);
        let ours = file.reopen().unwrap();
        assert!(matches!(try_lock(&ours, Access::Exclusive), Err(LockError::Held)));
        try_lock(&ours, Access::Shared).unwrap();
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
