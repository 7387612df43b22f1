//! Sockets at a path, only for this user.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::Mode;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Listens for connections of packets at `path`, only for this user, in place of a socket without a
/// listener.
///
/// # Errors
/// When something else is at the path, or the socket cannot be made.
pub(crate) fn listen(path: &Path) -> io::Result<OwnedFd> {
    listen_as(path, SocketType::SEQPACKET)
}

/// The same for streams.
pub(crate) fn listen_stream(path: &Path) -> io::Result<OwnedFd> {
    listen_as(path, SocketType::STREAM)
}

fn listen_as(path: &Path, kind: SocketType) -> io::Result<OwnedFd> {
    use std::os::unix::fs::FileTypeExt;
    if let Ok(metadata) = std::fs::symlink_metadata(path) {
        if !metadata.file_type().is_socket() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        std::fs::remove_file(path)?;
    }
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
    // A socket that is bound to a path keeps its mode from before: the path is never open to
    // others.
    rustix::fs::fchmod(&socket, Mode::from_raw_mode(0o600))?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, 8)?;
    Ok(socket)
}
