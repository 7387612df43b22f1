//! Storage that hangs: an image on a FUSE file system whose server is stopped.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::process::kill;

/// A file system with one file, `nbd`, of this size in bytes.
const SIZE: u64 = 16 << 20;
/// How long the file system may take to appear.
const MOUNT_TIME_MAX: Duration = Duration::from_secs(20);

/// A mounted file system that can be made to hang.
pub struct Stuck {
    server: Child,
    point: PathBuf,
    _folder: tempfile::TempDir,
}

impl Stuck {
    /// Mounts it; `None`, with a word about it, where this host cannot.
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

    /// The file.
    pub fn image(&self) -> PathBuf {
        self.point.join("nbd")
    }

    /// From here on, nothing that is asked of the file system is answered.
    pub fn hang(&self) {
        self.signal(libc::SIGSTOP);
    }

    /// From here on, everything is answered.
    pub fn go_on(&self) {
        self.signal(libc::SIGCONT);
    }

    fn signal(&self, signal: i32) {
        kill(&self.server, signal);
    }
}

impl Drop for Stuck {
    fn drop(&mut self) {
        // Without its server, the file system fails whatever waits for it.
        let _ = self.server.kill();
        let _ = self.server.wait();
        let _ = Command::new("fusermount3").arg("-uz").arg(&self.point).status();
    }
}
