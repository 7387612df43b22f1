//! Unix sockets that only their owner can connect to.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::hash::Hash;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::Mode;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// The mode of every socket.
const MODE: Mode = Mode::from_raw_mode(0o600);
/// The most clients that may wait to be accepted: enough for a burst of all guests of a host. The
/// host may allow fewer (`net.core.somaxconn`).
const BACKLOG: i32 = 4096;

/// Listens on a Unix socket at `path`, whose mode is 0600 from its creation. Replaces a socket
/// without a listener.
///
/// # Errors
/// [`io::ErrorKind::AddrInUse`] if the socket has a listener, or if another kind of file is at the
/// path; else the operating system's error.
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
    let socket = new_socket(SocketFlags::empty())?;
    // On Linux a socket that is bound to a path keeps its mode from before, less the umask. So the
    // path is never open to others.
    rustix::fs::fchmod(&socket, MODE)?;
    rustix::net::bind(&socket, &address(path)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(UnixListener::from(socket))
}

/// Which of some clients gives its place to a new one, if they are listed with the oldest first:
/// the oldest one of the peer with the most clients. So a peer that takes all places takes them
/// from itself first.
pub fn yielding<P: Eq + Hash>(peers: impl Iterator<Item = P>) -> Option<usize> {
    let mut found: HashMap<P, (usize, usize)> = HashMap::new();
    for (position, peer) in peers.enumerate() {
        found.entry(peer).or_insert((0, position)).0 += 1;
    }
    let most = found.into_values().max_by_key(|(count, oldest)| (*count, Reverse(*oldest)));
    most.map(|(_, oldest)| oldest)
}

/// Listens at `path` again if nothing is there any more; `None` if something is.
///
/// # Errors
/// As for [`listen`].
pub fn listen_again(path: &Path) -> io::Result<Option<UnixListener>> {
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => listen(path).map(Some),
        Err(error) => Err(error),
        Ok(_) => Ok(None),
    }
}

/// Whether a process listens at `path`. Does not block, and returns true also for a process that is
/// stopped while the queue of its socket is full.
pub fn is_served(path: &Path) -> bool {
    match connect(path) {
        Ok(()) => true,
        Err(error) => error.kind() == io::ErrorKind::WouldBlock,
    }
}

/// Connects without blocking, and disconnects immediately. Returns [`io::ErrorKind::WouldBlock`] if
/// the queue of the socket is full.
fn connect(path: &Path) -> io::Result<()> {
    let socket = new_socket(SocketFlags::NONBLOCK)?;
    Ok(rustix::net::connect(&socket, &address(path)?)?)
}

fn new_socket(flags: SocketFlags) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | flags;
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

/// Sleeps until `listener` has a client or `wake` is signalled, for at most `limit`. Returns false
/// once `wake` has been signalled.
pub(crate) fn wait(
    listener: Option<BorrowedFd<'_>>,
    wake: BorrowedFd<'_>,
    limit: Option<Duration>,
) -> bool {
    let entry = |descriptor| PollFd::from_borrowed_fd(descriptor, PollFlags::IN);
    // Without a listener, `wake` fills both places.
    let mut polls = [entry(wake), entry(listener.unwrap_or(wake))];
    wait_for(&mut polls, limit);
    polls[0].revents().is_empty()
}

/// Sleeps until one of `polls` is ready, for at most `limit`, and returns the number of ready ones.
/// A signal ends the sleep.
pub(crate) fn wait_for(polls: &mut [PollFd<'_>], limit: Option<Duration>) -> usize {
    // A limit that does not fit into a `Timespec` counts as none.
    let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
    poll(polls, limit.as_ref()).unwrap_or(0)
}

fn address(path: &Path) -> io::Result<SocketAddrUnix> {
    // One byte is left for the terminating zero. An empty path would be an abstract name.
    let fits = (1..=107).contains(&path.as_os_str().len());
    fits.then(|| SocketAddrUnix::new(path).ok()).flatten().ok_or_else(|| {
        let text = format!("{}: a socket's path has 1 to 107 bytes", path.display());
        io::Error::new(io::ErrorKind::InvalidInput, text)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn only_the_owner_can_connect_and_only_dead_sockets_are_replaced() {
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
    fn who_takes_most_places_yields_first() {
        assert_eq!(yielding([0; 0].into_iter()), None);
        assert_eq!(yielding([1, 2, 2, 3, 2, 3].into_iter()), Some(1));
        assert_eq!(yielding([1, 2, 2, 1].into_iter()), Some(0));
        assert_eq!(yielding([3].into_iter()), Some(0));
    }

    #[test]
    fn a_full_queue_does_not_block_the_check_for_a_listener() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        assert!(!is_served(&path));
        let listener = listen(&path).unwrap();
        assert!(is_served(&path));
        // A stopped process: it accepts no clients, and its queue is full.
        rustix::net::listen(&listener, 0).unwrap();
        let mut waiting = Vec::new();
        loop {
            let socket = new_socket(SocketFlags::NONBLOCK).unwrap();
            if rustix::net::connect(&socket, &address(&path).unwrap()).is_err() {
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
    fn a_burst_of_clients_is_accepted() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let _listener = listen(&path).unwrap();
        // The number that a host allows by default, before the first is accepted.
        for number in 0..128 {
            connect(&path).unwrap_or_else(|error| panic!("client {number}: {error}"));
        }
    }
}
