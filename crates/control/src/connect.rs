//! Connecting to a Unix socket within a time limit.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use socket2::{Domain, SockAddr, Socket, Type};

/// The socket for those who may look and change nothing, beside the control socket `control`:
/// `/run/fathom/control.view.sock`. There is one if the configuration has `view_group`.
pub fn view_socket(control: &Path) -> PathBuf {
    control.with_extension("view.sock")
}

/// The interval between attempts to connect while the queue of the listener is full.
const INTERVAL: Duration = Duration::from_millis(20);

/// Connects to the Unix socket at `path`. If its listener accepts no clients and its queue is full,
/// a blocking `connect` waits for ever. This one fails immediately, and is repeated until `end`.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`] if the queue is full until `end`; or the error of the operating
/// system.
pub fn connect(path: &Path, end: Instant) -> io::Result<UnixStream> {
    let address = SockAddr::unix(path)?;
    loop {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        match socket.connect(&address) {
            Ok(()) => {
                socket.set_nonblocking(false)?;
                return Ok(UnixStream::from(std::os::fd::OwnedFd::from(socket)));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < end => {
                std::thread::sleep(INTERVAL);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
