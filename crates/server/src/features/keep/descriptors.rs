//! Descriptors from the service manager, and the user at the other end of a socket.

#![expect(unsafe_code, reason = "inherited descriptors, and a socket's peer")]

use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd};
use std::time::{SystemTime, UNIX_EPOCH};

use fathom_backend::Left;
use rustix::fs::FileType;
use rustix::io::{FdFlags, fcntl_setfd};

use super::PREFIX;

/// The most descriptors that are taken from a service manager.
const INHERITED_MAX: usize = 65_536;

/// The keepsakes that the service manager has passed to this process. Other descriptors stay as
/// they are. Only the first call has a result.
pub(super) fn inherited() -> Vec<Left> {
    static TAKEN: std::sync::Once = std::sync::Once::new();
    let mut found = Vec::new();
    TAKEN.call_once(|| {
        let Ok(descriptors) = sd_notify::listen_fds_with_names() else { return };
        for (descriptor, name) in descriptors.take(INHERITED_MAX) {
            if !name.starts_with(PREFIX) {
                continue;
            }
            // SAFETY: by the protocol, it is open, and nothing else in this process uses a
            // descriptor with our name.
            let file = unsafe { File::from_raw_fd(descriptor) };
            // A program that a query starts must not have it.
            let _ = fcntl_setfd(&file, FdFlags::CLOEXEC);
            found.push(Left { name, file });
        }
    });
    found
}

/// The user of the process at the other end of a Unix socket.
pub(super) fn peer(socket: BorrowedFd<'_>) -> Option<u32> {
    // Not by `rustix`, whose process ids are never 0: the id of a client in another namespace is 0.
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = std::mem::size_of_val(&credentials) as libc::socklen_t;
    // SAFETY: the structure has the given length.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut length,
        )
    };
    (result == 0).then_some(credentials.uid)
}

/// Whether the process at the other end may have, or hold, the keepsakes of this one: it is of the
/// same user, or of root.
pub(super) fn is_trusted(socket: BorrowedFd<'_>) -> bool {
    let own = rustix::process::geteuid().as_raw();
    peer(socket).is_some_and(|user| user == own || user == 0)
}

/// Closes all descriptors but the three standard ones: a daemon may have some from its own parent,
/// who may wait for their end. Only a process that has opened none may call this.
pub(crate) fn close_others() {
    // SAFETY: nothing in this process uses these descriptors. On kernels before 5.9 the call fails,
    // and they stay.
    unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0) };
}

/// Whether a descriptor is a socket.
pub(super) fn is_socket(descriptor: BorrowedFd<'_>) -> bool {
    let kind = rustix::fs::fstat(descriptor).map(|status| FileType::from_raw_mode(status.st_mode));
    kind == Ok(FileType::Socket)
}

/// Distinguishes this process from others with the same process id.
pub(super) fn instance() -> String {
    let begun = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{}-{:x}", std::process::id(), begun.as_nanos())
}
