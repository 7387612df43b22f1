//! Hung storage: an image on a FUSE file system whose server is stopped.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::process::kill;

/// The size of the file system's only file, `nbd`, in bytes.
const SIZE: u64 = 16 << 20;
/// The time limit for the mount.
const MOUNT_TIME_MAX: Duration = Duration::from_secs(20);
/// The time limit for the server's stop.
const STOP_TIME_MAX: Duration = Duration::from_secs(20);

/// A mounted file system that can be made to hang.
pub struct Stuck {
    server: Child,
    point: PathBuf,
    _folder: tempfile::TempDir,
}

impl Stuck {
    /// Mounts it; `None`, with a message, if this host cannot.
    pub fn mount() -> Option<Self> {
        let found = |name: &str| {
            Command::new("which")
                .arg(name)
                .stdout(Stdio::null())
                .status()
                .is_ok_and(|s| s.success())
        };
        if !["nbdfuse", "nbdkit", "fusermount3", "setpriv"].into_iter().all(found)
            || !Path::new("/dev/fuse").exists()
        {
            eprintln!("SKIPPED: this needs nbdfuse, nbdkit and FUSE");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let point = folder.path().join("point");
        fs::create_dir(&point).unwrap();
        let server = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--", "nbdfuse"])
            .arg(&point)
            .args(["[", "nbdkit", "--exit-with-parent", "memory", &SIZE.to_string(), "]"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let mut stuck = Self { server, point, _folder: folder };
        let begun = Instant::now();
        while !stuck.image().exists() {
            if begun.elapsed() > MOUNT_TIME_MAX || stuck.server.try_wait().unwrap().is_some() {
                eprintln!("SKIPPED: nbdfuse cannot mount here");
                return None;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Some(stuck)
    }

    /// The path of the file.
    pub fn image(&self) -> PathBuf {
        self.point.join("nbd")
    }

    /// Makes the file system hang: it answers no request from here on.
    pub fn hang(&self) {
        self.signal(libc::SIGSTOP);
        // A thread of the server that is running answers one more request.
        let begun = Instant::now();
        while !self.has_stopped() {
            assert!(begun.elapsed() < STOP_TIME_MAX, "the server of the file system does not stop");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Whether all threads of the server have stopped.
    fn has_stopped(&self) -> bool {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.server.id())).unwrap();
        tasks.flatten().all(|task| {
            let stat = fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T'))
        })
    }

    /// Ends the hang: the file system answers all requests.
    pub fn resume(&self) {
        self.signal(libc::SIGCONT);
    }

    fn signal(&self, signal: i32) {
        kill(&self.server, signal);
    }
}

impl Drop for Stuck {
    fn drop(&mut self) {
        // Without its server, the file system fails all waiting requests.
        let _ = self.server.kill();
        let _ = self.server.wait();
        let _ = Command::new("fusermount3").arg("-uz").arg(&self.point).status();
    }
}
