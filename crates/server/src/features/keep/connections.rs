//! Keepsakes that are connections: the kernel closes a connection when the server at its other end
//! ends, however that happens. One that is still open when a later daemon asks has a server that
//! has lost nothing since it was made.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use fathom_backend::{Keeper, Left};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{set_tcp_keepidle, set_tcp_keepintvl};
use rustix::net::{Shutdown, shutdown};

use super::KEEPSAKES;

/// After which time without bytes a host is probed that is asked whether it still has a connection.
const PROBE_TIME: Duration = Duration::from_secs(1);
/// How long a server may take to carry out what an earlier daemon has asked.
const END_TIME_MAX: Duration = Duration::from_secs(2);
/// How long its answer may take from then on.
const ANSWER_TIME: Duration = Duration::from_secs(1);

/// Which connection it is: the device and the number of its socket, unique while somebody has it.
pub(crate) type SocketNumber = (u64, u64);

/// The number of a socket.
pub(crate) fn number(socket: &File) -> io::Result<SocketNumber> {
    socket.metadata().map(|metadata| (metadata.dev(), metadata.ino()))
}

/// Hands a connection over. Returns its name; `None` if nobody keeps it.
pub(crate) fn keep(connection: File, disk: &str) -> Option<String> {
    let kept = KEEPSAKES.get()?.keep(connection);
    let warn = |error: &io::Error| {
        tracing::warn!(
            disk,
            %error,
            "no keepsake of the connection to a server: if the daemon is killed, the next one takes \
             what was not flushed for lost"
        );
    };
    kept.inspect_err(warn).ok()
}

/// Takes the connection with this number that an earlier daemon has left.
pub(crate) fn left(wanted: SocketNumber) -> Option<Left> {
    let mut left = KEEPSAKES.get()?.left.lock();
    let index = left.iter().position(|it| number(&it.file).is_ok_and(|it| it == wanted))?;
    Some(left.swap_remove(index))
}

/// Gives a connection back: it is for whoever asks next.
pub(crate) fn leave(left: Left) {
    if let Some(keepsakes) = KEEPSAKES.get() {
        keepsakes.left.lock().push(left);
    }
}

/// Ends the connection of an earlier daemon. The server carries out what it has got, so that no
/// request of it takes effect after newer ones; that is awaited for two seconds at most.
pub(crate) fn end(left: Option<Left>) {
    let Some(left) = left else { return };
    let _ = shutdown(&left.file, Shutdown::Write);
    let (end, mut bytes) = (Instant::now() + END_TIME_MAX, vec![0; 64 << 10]);
    while !end.saturating_duration_since(Instant::now()).is_zero() {
        let rest = end.saturating_duration_since(Instant::now());
        let mut polls = [PollFd::new(&left.file, PollFlags::IN)];
        let ready = poll(&mut polls, Timespec::try_from(rest).ok().as_ref());
        if matches!(ready, Ok(0)) {
            break;
        }
        match rustix::io::read(&left.file, &mut bytes) {
            Ok(0) => break,
            Ok(_) | Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            Err(_) => break,
        }
    }
    close(Some(left));
}

/// Closes a connection, whoever else has it.
pub(crate) fn close(connection: Option<Left>) {
    let Some(Left { name, file }) = connection else { return };
    let _ = shutdown(&file, Shutdown::Both);
    if let Some(keepsakes) = KEEPSAKES.get() {
        keepsakes.release(&name);
    }
}

/// Whether the server still has the connection. The host of a server that answers to another
/// connection is asked by a probe, because one that has lost power has closed nothing. Waits for
/// two seconds at most.
pub(crate) fn is_alive(connection: &File) -> bool {
    // Only TCP has probes, and only TCP needs them.
    let is_tcp = set_tcp_keepidle(connection, PROBE_TIME).is_ok()
        && set_tcp_keepintvl(connection, PROBE_TIME).is_ok();
    let limit = if is_tcp { PROBE_TIME + ANSWER_TIME } else { Duration::ZERO };
    !has_ended(connection.as_fd(), limit)
}

/// Whether the other side has closed a connection, or does so within `limit`.
pub(super) fn has_ended(connection: BorrowedFd<'_>, limit: Duration) -> bool {
    let end = Instant::now() + limit;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        // Answers that nobody reads do not matter.
        let mut polls = [PollFd::from_borrowed_fd(connection, PollFlags::RDHUP)];
        let limit = Timespec::try_from(left).unwrap_or_default();
        match poll(&mut polls, Some(&limit)) {
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return true,
            Ok(_) => return !polls[0].revents().is_empty(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_connection_ends_with_its_server_and_not_before() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let ours = File::from(OwnedFd::from(ours));
        // What nobody reads is no end.
        theirs.write_all(&[1; 100]).unwrap();
        assert!(is_alive(&ours));
        drop(theirs);
        assert!(!is_alive(&ours));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        let client = File::from(OwnedFd::from(client));
        server.write_all(&[1; 100]).unwrap();
        assert!(is_alive(&client));
        drop(server);
        assert!(!is_alive(&client));
    }
}
