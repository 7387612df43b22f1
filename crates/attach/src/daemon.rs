//! Which process counts as a daemon: one that may share a guest's memory with a pager, and use its
//! tables of leases.
//!
//! It is a `fathom` of the pager's own user, or of root. For a pager of root, it is one of any
//! other user too, if root owns the program and nobody else may write it, as a package installs it.
//! That excludes mistakes, not malice: whoever runs a program can make it do anything
//! (`LD_PRELOAD`, `ptrace`). Such a process has the guest's memory already; what it writes to the
//! tables can harm that guest, and the pager takes it for that of an enemy.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};

/// The program's name.
const NAME: &str = "fathom";
/// What the kernel adds to the path of a program whose file was removed or replaced.
const REPLACED: &str = " (deleted)";
/// The most bytes of a process's status. Its line of users is near the beginning.
const STATUS_BYTES_MAX: usize = 16 << 10;
/// The rights of others than the owner to write.
const WRITABLE: u32 = 0o022;

/// A process of the daemon that maps the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DaemonProcess {
    /// Its number.
    pub process: i32,
    /// Its user.
    pub user: u32,
}

/// What a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Examined {
    /// A daemon.
    Daemon(DaemonProcess),
    /// A `fathom` of this user whose program is not to be trusted.
    Untrusted(u32),
    /// Something else.
    Other,
}

/// Examines a process.
pub(crate) fn examine(process: i32) -> Examined {
    // All of it by one descriptor: another process with the same number later is not meant.
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(folder) = rustix::fs::open(format!("/proc/{process}"), flags, Mode::empty()) else {
        return Examined::Other;
    };
    if !is_fathom(folder.as_fd()) {
        return Examined::Other;
    }
    // Not the owner of the folder: a process that cannot be dumped is root's there.
    let Some(user) = user(&folder) else { return Examined::Other };
    let own = rustix::process::geteuid().as_raw();
    let is_near = user == own || user == 0;
    if is_near || own == 0 && is_of_root(folder.as_fd()) {
        Examined::Daemon(DaemonProcess { process, user })
    } else {
        Examined::Untrusted(user)
    }
}

fn is_fathom(folder: BorrowedFd<'_>) -> bool {
    let Ok(program) = rustix::fs::readlinkat(folder, "exe", Vec::new()) else { return false };
    let program = program.to_string_lossy().into_owned();
    let program = program.strip_suffix(REPLACED).unwrap_or(&program);
    Path::new(program).file_name().is_some_and(|name| name == NAME)
}

/// The user of a process. `None` if it has several, as one that changes them.
fn user(folder: &OwnedFd) -> Option<u32> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file = rustix::fs::openat(folder, "status", flags, Mode::empty()).ok()?;
    let mut bytes = vec![0; STATUS_BYTES_MAX];
    let length = rustix::io::read(&file, &mut bytes).ok()?;
    user_of(&String::from_utf8_lossy(&bytes[..length]))
}

fn user_of(status: &str) -> Option<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    let users = line.split_whitespace().map(|word| word.parse().ok());
    let users = users.collect::<Option<Vec<u32>>>()?;
    let first = *users.first()?;
    (users.len() == 4 && users.iter().all(|user| *user == first)).then_some(first)
}

/// Whether root owns the program of a process, also one that was replaced since, and nobody else
/// may write it.
fn is_of_root(folder: BorrowedFd<'_>) -> bool {
    // As the kernel knows it: a file system's own process must not be waited for.
    let flags = AtFlags::STATX_DONT_SYNC;
    let wanted = StatxFlags::TYPE | StatxFlags::MODE | StatxFlags::UID;
    rustix::fs::statx(folder, "exe", flags, wanted).is_ok_and(|found| {
        let has_all = StatxFlags::from_bits_retain(found.stx_mask).contains(wanted);
        has_all && found.stx_uid == 0 && u32::from(found.stx_mode) & WRITABLE == 0
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_one_user_or_is_no_daemon() {
        let status = |users: &str| format!("Name:\tfathom\nUmask:\t0022\nUid:\t{users}\nGid:\t0\n");
        assert_eq!(user_of(&status("977\t977\t977\t977")), Some(977));
        // One that has root's rights for a moment, or keeps them for later.
        for users in ["977\t0\t0\t0", "0\t977\t0\t977", "977\t977\t977", "977\tx\t977\t977", ""] {
            assert_eq!(user_of(&status(users)), None, "{users:?}");
        }
        assert_eq!(user_of("Name:\tfathom\n"), None);
    }

    #[test]
    fn this_process_is_none() {
        assert_eq!(examine(std::process::id() as i32), Examined::Other);
        assert_eq!(examine(-1), Examined::Other);
    }
}
