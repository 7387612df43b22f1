//! A daemon for a test.

use std::fs::File;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use fathom_control::Client;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// The time limit of each step of a test.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A running `fathom serve` with its own folder.
pub struct Daemon {
    child: Child,
    folder: TempDir,
    /// The time from the start of the process to its message that it is ready.
    pub ready: Duration,
}

impl Daemon {
    /// Serves `configuration`, which needs no control socket in `[daemon]`.
    pub fn start(configuration: &str) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), configuration)
    }

    /// The same, in a prepared folder.
    pub fn start_in(folder: TempDir, configuration: &str) -> Self {
        let (mut daemon, notified) = Self::begin_in(folder, configuration);
        let begun = Instant::now();
        notified.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut message = [0; 64];
        let length = loop {
            match notified.recv(&mut message) {
                Ok(length) => break length,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    daemon.child.kill().unwrap();
                    panic!("not ready: {error}\n{}", daemon.log());
                }
            }
        };
        daemon.ready = begun.elapsed();
        assert_eq!(&message[..length], b"READY=1\n");
        daemon
    }

    /// The same, without waiting until it is ready. The socket gets its notifications.
    pub fn begin_in(folder: TempDir, configuration: &str) -> (Self, UnixDatagram) {
        std::fs::write(folder.path().join("f.toml"), configuration).unwrap();
        // An earlier daemon of the same folder may have left its socket.
        let _ = std::fs::remove_file(folder.path().join("notify"));
        let notified = UnixDatagram::bind(folder.path().join("notify")).unwrap();
        let child = command(folder.path())
            .args(["serve", "--config", "f.toml"])
            .args(["--control", "control.sock"])
            .env("NOTIFY_SOCKET", folder.path().join("notify"))
            .stderr(File::create(folder.path().join("log")).unwrap())
            .spawn()
            .unwrap();
        (Self { child, folder, ready: Duration::ZERO }, notified)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn client(&self) -> Client {
        Client::new(self.path("control.sock"))
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap()
    }

    /// The process ID.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// A file below `/proc/PID`.
    pub fn proc(&self, name: &str) -> String {
        std::fs::read_to_string(format!("/proc/{}/{name}", self.child.id())).unwrap()
    }

    pub fn signal(&self, signal: i32) {
        kill(&self.child, signal);
    }

    /// Waits for the end. Returns the exit status and the folder.
    pub fn wait(mut self) -> (ExitStatus, TempDir) {
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            if let Some(status) = self.child.try_wait().unwrap() {
                let folder = std::mem::replace(&mut self.folder, tempfile::tempdir().unwrap());
                return (status, folder);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("the daemon does not end:\n{}", self.log());
    }

    /// Ends the daemon with SIGTERM, and checks that it ended cleanly.
    pub fn end(self) -> TempDir {
        self.signal(libc::SIGTERM);
        let log = self.path("log");
        let (status, folder) = self.wait();
        assert_eq!(status.code(), Some(0), "{:?}", std::fs::read_to_string(log));
        folder
    }

    /// Waits until `found` returns true; fails with `what` after the time limit.
    pub fn until(&self, what: &str, mut found: impl FnMut() -> bool) {
        let begun = Instant::now();
        while !found() {
            assert!(begun.elapsed() < PATIENCE, "never: {what}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The command `fathom`, run in `folder`.
pub fn command(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fathom"));
    command.current_dir(folder).stdin(Stdio::null());
    // Those of block devices, which all daemons of a host share.
    command.env("FATHOM_MARKS", folder.join("marks"));
    command
}

/// The configuration of a disk called "a" on `image`, with further lines `more`, which is served
/// over NBD at `nbd.sock`.
pub fn disk_over_nbd(image: &Path, more: &str) -> String {
    format!(
        "[[disk]]\nname = \"a\"\nimage = \"{}\"\n{more}[[nbd]]\naddress = \"unix:nbd.sock\"\n",
        image.display()
    )
}

/// Creates an image of zeroes.
pub fn image(folder: &Path, name: &str, size: u64) {
    File::create(folder.join(name)).unwrap().set_len(size).unwrap();
}

/// Sends a signal to a child that has not been waited for.
pub fn kill(child: &Child, signal: i32) {
    let signal = Signal::from_named_raw(signal).expect("a signal with a name");
    kill_process(Pid::from_child(child), signal).expect("the child is there");
}
