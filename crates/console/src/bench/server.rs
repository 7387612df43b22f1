//! The servers that the command starts for a measurement.
use std::{
    io,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

use super::BenchOptions;
use crate::{
    failure::{CommandResult, Failure, reason},
    process::spawn_bound,
    vm::{Daemon, Embedded, ServedImage},
};

/// The time limit for the peer to create its socket.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// The disk to measure.
pub struct BenchSubject {
    /// Its vhost-user socket.
    pub socket: PathBuf,
    daemon: Option<Daemon>,
}

impl BenchSubject {
    /// A disk that another process already serves.
    pub fn running(socket: PathBuf) -> Self {
        Self { socket, daemon: None }
    }

    /// Serves an image with a daemon started for the measurement.
    pub fn start(image: &Path, options: &BenchOptions) -> CommandResult<Self> {
        let mut embedded = Embedded::new("bench");
        let disk = embedded.add(ServedImage {
            format: options.image_format,
            image: image.to_owned(),
            queues: options.queues,
            read_only: !options.write,
            direct: options.direct,
            tap: !options.no_tap,
        })?;
        Ok(Self { socket: disk.socket, daemon: embedded.start()? })
    }

    /// Ends the daemon, if it was started for the measurement.
    pub fn end(self) {
        if let Some(daemon) = self.daemon {
            daemon.end();
        }
    }
}

/// `qemu-storage-daemon` on an image.
pub struct Peer {
    child: Child,
    socket: PathBuf,
    /// Deleted when the peer is dropped.
    _directory: tempfile::TempDir,
}

impl Peer {
    /// Starts the peer and waits for its socket.
    pub fn start(image: &Path, writable: bool, direct: bool, queues: u16) -> CommandResult<Self> {
        let directory = tempfile::tempdir()
            .map_err(|error| Failure::new(format!("no temporary directory: {error}")))?;
        let socket = directory.path().join("disk.sock");
        let (writable, direct) = (on(writable), on(direct));
        let read_only = if writable == "on" { "off" } else { "on" };
        let image = image.display().to_string().replace(',', ",,");
        let blockdev = format!(
            "driver=file,filename={image},node-name=disk,cache.direct={direct},read-only={read_only}"
        );
        let export = format!(
            "type=vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={},\
             writable={writable},num-queues={queues}",
            socket.display()
        );
        let mut command = Command::new("qemu-storage-daemon");
        command.args(["--blockdev", &blockdev, "--export", &export]).stdin(Stdio::null());
        let child = spawn_bound(&mut command).map_err(|error| {
            if error.kind() == io::ErrorKind::NotFound {
                Failure::new("qemu-storage-daemon, the peer, is not installed").advise(
                    "install it: apt install qemu-utils (Debian 12: from backports), dnf \
                     install qemu-img (Fedora); or omit --peer",
                )
            } else {
                Failure::new(format!("qemu-storage-daemon does not start: {}", reason(&error)))
            }
        })?;
        let mut peer = Self { child, socket, _directory: directory };
        let started = Instant::now();
        while !peer.socket.exists() {
            let ended = matches!(peer.child.try_wait(), Ok(Some(_)));
            if ended || started.elapsed() > START_TIMEOUT {
                peer.end();
                return Err(Failure::new("qemu-storage-daemon does not serve the image")
                    .advise("its messages are above"));
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(peer)
    }

    /// The peer's socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Ends the peer.
    pub fn end(mut self) {
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        // The exit status of a process that this process ends does not matter.
        let _ = self.child.wait();
    }
}

fn on(yes: bool) -> &'static str {
    if yes { "on" } else { "off" }
}
