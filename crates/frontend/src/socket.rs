//! Unix sockets that only their owner can reach.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Duration;

/// The mode of every socket.
const MODE: libc::mode_t = 0o600;
/// Clients that may wait to be accepted: bursts of all guests of a host at once. The host may
/// allow fewer (`net.core.somaxconn`).
const BACKLOG: libc::c_int = 4096;

/// Listens on a Unix socket at `path`, mode 0600 from its first moment. A socket that nobody
/// listens on any more is replaced.
///
/// # Errors
/// [`io::ErrorKind::AddrInUse`] where somebody listens there, or where something else than a
/// socket is in the way; else what the operating system says.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    use std::os::unix::fs::FileTypeExt;
    if let Ok(metadata) = std::fs::symlink_metadata(path) {
        let dead = metadata.file_type().is_socket()
            && matches!(
                connect(path),
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused
            );
        if !dead {
            return Err(io::Error::from(io::ErrorKind::AddrInUse));
        }
        std::fs::remove_file(path)?;
    }
    let socket = new_socket(0)?;
    // On Linux a socket that is bound to a path takes over the mode that it had before, less the
    // umask: so there is no moment at which the path is open to others.
    // SAFETY: a system call on our own descriptor.
    if unsafe { libc::fchmod(socket.as_raw_fd(), MODE) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let address = address(path)?;
    let length = size_of::<libc::sockaddr_un>() as libc::socklen_t;
    // SAFETY: the address lives through the call and has the length given.
    let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) };
    // SAFETY: a system call on our own descriptor.
    if bound != 0 || unsafe { libc::listen(socket.as_raw_fd(), BACKLOG) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(UnixListener::from(socket))
}

/// Whether somebody listens at `path`. Does not block: a process that is stopped while the queue of
/// its socket is full listens too.
pub fn is_served(path: &Path) -> bool {
    match connect(path) {
        Ok(()) => true,
        Err(error) => error.kind() == io::ErrorKind::WouldBlock,
    }
}

/// Connects without blocking, and leaves at once. [`io::ErrorKind::WouldBlock`] where the queue of
/// the socket is full.
fn connect(path: &Path) -> io::Result<()> {
    let socket = new_socket(libc::SOCK_NONBLOCK)?;
    let address = address(path)?;
    let length = size_of::<libc::sockaddr_un>() as libc::socklen_t;
    // SAFETY: the address lives through the call and has the length given.
    let connected =
        unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), length) };
    if connected == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn new_socket(flags: libc::c_int) -> io::Result<OwnedFd> {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | flags;
    // SAFETY: a system call without memory; the result is checked below.
    let descriptor = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and ours alone.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Sleeps until `listener` has a client or `wake` is signalled, for `limit` at most. False once
/// `wake` has been signalled.
pub(crate) fn wait(listener: Option<RawFd>, wake: RawFd, limit: Option<Duration>) -> bool {
    let entry = |fd: RawFd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // A negative descriptor is passed over.
    let mut polls = [entry(wake), entry(listener.unwrap_or(-1))];
    let limit_ms = limit.map_or(-1, |limit| i32::try_from(limit.as_millis()).unwrap_or(i32::MAX));
    // SAFETY: two entries, as said.
    unsafe { libc::poll(polls.as_mut_ptr(), 2, limit_ms) };
    polls[0].revents == 0
}

fn address(path: &Path) -> io::Result<libc::sockaddr_un> {
    use std::os::unix::ffi::OsStrExt;
    // SAFETY: an all-zero sockaddr_un is a valid value of that plain structure.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let bytes = path.as_os_str().as_bytes();
    // One byte is left for the terminating zero.
    if bytes.is_empty() || bytes.len() >= address.sun_path.len() || bytes.contains(&0) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{}: a socket's path has 1 to 107 bytes", path.display()),
        ));
    }
    for (target, source) in address.sun_path.iter_mut().zip(bytes) {
        *target = *source as libc::c_char;
    }
    Ok(address)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn only_the_owner_gets_in_and_only_dead_sockets_are_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = listen(&path).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(listen(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(listener);
        listen(&path).unwrap();
        let file = directory.path().join("file");
        std::fs::write(&file, "precious").unwrap();
        assert_eq!(listen(&file).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        assert_eq!(std::fs::read(&file).unwrap(), b"precious");
        let long = directory.path().join("x".repeat(200));
        assert_eq!(listen(&long).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_full_queue_blocks_nobody_who_asks_whether_a_socket_is_served() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        assert!(!is_served(&path));
        let listener = listen(&path).unwrap();
        assert!(is_served(&path));
        // A process that is stopped: it accepts nobody, and its queue is full.
        // SAFETY: a system call on our own descriptor.
        assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 0) }, 0);
        let mut waiting = Vec::new();
        loop {
            let socket = new_socket(libc::SOCK_NONBLOCK).unwrap();
            let address = address(&path).unwrap();
            let length = size_of::<libc::sockaddr_un>() as libc::socklen_t;
            // SAFETY: the address lives through the call and has the length given.
            let result =
                unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), length) };
            if result != 0 {
                break;
            }
            waiting.push(socket);
        }
        assert!(is_served(&path), "it listens, though its queue is full");
        assert_eq!(listen(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop((waiting, listener));
        assert!(!is_served(&path));
    }

    #[test]
    fn a_burst_of_clients_is_not_turned_away() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let _listener = listen(&path).unwrap();
        // As many as the host allows by default, before anybody is accepted.
        for number in 0..128 {
            connect(&path).unwrap_or_else(|error| panic!("client {number}: {error}"));
        }
    }
}
