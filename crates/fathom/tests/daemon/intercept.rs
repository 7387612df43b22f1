//! Interceptors of any kind at the daemon's socket.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use fathom_intercept::{Hello, MemoryFile, PLACES_LENGTH, send};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::process::Daemon;

const CONFIGURATION: &str =
    "[intercept]\nsocket = \"intercept.sock\"\n[[disk]]\nname = \"a\"\nmemory = \"1M\"\n";

/// A connection to the daemon.
fn connected(path: &Path) -> std::io::Result<OwnedFd> {
    let socket =
        socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Whether the daemon closes a connection within `seconds`.
fn is_closed(socket: &OwnedFd, seconds: i64) -> bool {
    let limit = Timespec { tv_sec: seconds, tv_nsec: 0 };
    let mut waited = [PollFd::new(socket, PollFlags::IN)];
    poll(&mut waited, Some(&limit)).unwrap() == 1
}

#[test]
fn strangers_are_disconnected_and_others_stay() {
    let daemon = Daemon::start(CONFIGURATION);
    let path = daemon.path("intercept.sock");
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let files = vec![MemoryFile { device: 1, inode: 2 }];
    let known = connected(&path).unwrap();
    send(known.as_fd(), &Hello { files }.to_bytes(), &[]).unwrap();
    let silent = connected(&path).unwrap();
    let begun = Instant::now();
    for bytes in [&b"x"[..], &[0; 280], &[255; PLACES_LENGTH], &[0; 4096]] {
        let stranger = connected(&path).unwrap();
        send(stranger.as_fd(), bytes, &[]).unwrap();
        assert!(is_closed(&stranger, 5), "{} bytes", bytes.len());
    }
    // A flood of connections is bounded, and ends.
    let flood: Vec<_> = (0..1100).map_while(|_| connected(&path).ok()).collect();
    assert!(daemon.client().disks().is_ok());
    drop(flood);
    assert!(is_closed(&silent, 20));
    assert!(begun.elapsed() >= Duration::from_secs(4), "it had some time");
    assert!(!is_closed(&known, 0));
    // What says more than it should has to go.
    send(known.as_fd(), &Hello::default().to_bytes(), &[]).unwrap();
    assert!(is_closed(&known, 5));
    assert!(daemon.client().guests().unwrap().guests.is_empty());
    let folder = daemon.end();
    assert!(!path.exists());
    drop(folder);
}
