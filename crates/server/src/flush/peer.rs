//! A peer with prepared answers on a Unix socket, for tests of clients.

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

/// See the module.
pub(super) struct Peer {
    path: PathBuf,
    thread: Option<JoinHandle<Vec<u8>>>,
    _folder: tempfile::TempDir,
}

impl Peer {
    /// Accepts one client, and sends each of `answers` after a message of the client; the first one at
    /// once if `greets`. Then it disconnects.
    pub(super) fn start(greets: bool, answers: &'static [&'static [u8]]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("peer");
        let listener = UnixListener::bind(&path).unwrap();
        let thread = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut received = Vec::new();
            let mut piece = [0; 4096];
            let mut waits = !greets;
            for answer in answers {
                if waits {
                    match stream.read(&mut piece) {
                        Ok(count) if count > 0 => received.extend_from_slice(&piece[..count]),
                        _ => break,
                    }
                }
                waits = true;
                if stream.write_all(answer).is_err() {
                    break;
                }
            }
            received
        });
        Self { path, thread: Some(thread), _folder: folder }
    }

    /// The socket.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// What the client has sent, once it has disconnected.
    pub(super) fn received(mut self) -> String {
        let received = self.thread.take().unwrap().join().unwrap();
        String::from_utf8_lossy(&received).into_owned()
    }
}
