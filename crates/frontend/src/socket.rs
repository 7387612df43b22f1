//! Unix sockets that only their owner can reach.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

/// The mode of every socket.
const MODE: libc::mode_t = 0o600;
/// Clients that may wait to be accepted.
const BACKLOG: libc::c_int = 16;

/// Listens on a Unix socket at `path`, mode 0600 from its first moment. A socket that nobody
/// listens on any more is replaced.
///
/// # Errors
/// [`io::ErrorKind::AddrInUse`] where somebody listens there, or where something else than a
/// socket is in the way; else what the operating system says.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    use std::os::unix::fs::FileTypeExt;
    if let Ok(metadata) = std::fs::symlink_metadata(path) {
        let in_use = !metadata.file_type().is_socket()
            || !matches!(
                UnixStream::connect(path),
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused
            );
        if in_use {
            return Err(io::Error::from(io::ErrorKind::AddrInUse));
        }
        std::fs::remove_file(path)?;
    }
    // SAFETY: a system call without memory; the result is checked below.
    let descriptor =
        unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and ours alone.
    let socket = unsafe { OwnedFd::from_raw_fd(descriptor) };
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
}
