//! File systems on recorded block devices, and the same file systems after a power loss.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::recorder::Recorder;

/// The file systems: of the image, of logs, of caches, and of the daemon's state.
pub const NAMES: [&str; 4] = ["home", "log", "cache", "state"];
/// The index of the device of logs.
pub const LOG: usize = 1;
/// The index of the device of caches.
pub const CACHE: usize = 2;
/// The size of each device, in bytes.
pub const SIZES: [usize; 4] = [32 << 20, 24 << 20, 40 << 20, 16 << 20];
const MOUNT_TIME_MAX: Duration = Duration::from_secs(20);

/// A folder in which the file systems are mounted by their names. Dropping it unmounts them.
pub struct Volumes {
    folder: PathBuf,
    /// In memory: the devices after a power loss.
    store: PathBuf,
    devices: Vec<String>,
    servers: Vec<Child>,
}

impl Volumes {
    /// New file systems on devices that `recorder` serves. Returns `None`, and prints the reason, if this machine or
    /// user cannot have them.
    pub fn new(recorder: &Recorder, seed: u64) -> Option<Self> {
        let name = format!("fathom-power-{}-{seed}", std::process::id());
        let mut volumes = Self {
            folder: std::env::temp_dir().join(&name),
            store: Path::new("/dev/shm").join(&name),
            devices: Vec::new(),
            servers: Vec::new(),
        };
        match volumes.make(recorder) {
            Ok(()) => Some(volumes),
            Err(error) => {
                eprintln!("skipped: no recorded device is available here: {error}");
                None
            }
        }
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    fn make(&mut self, recorder: &Recorder) -> io::Result<()> {
        fs::create_dir_all(&self.store)?;
        for (name, size) in NAMES.into_iter().zip(SIZES) {
            fs::create_dir_all(self.folder.join(name))?;
            let (socket, file) = (self.store.join(format!("{name}.sock")), self.store.join(name));
            recorder.serve(&socket, size);
            File::create(&file)?;
            let server = Command::new("setpriv")
                .args(["--pdeathsig", "KILL", "--", "nbdfuse"])
                .arg(&file)
                .arg(format!("nbd+unix:///?socket={}", socket.display()))
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .spawn()?;
            self.servers.push(server);
            let begun = Instant::now();
            while fs::metadata(&file)?.len() != size as u64 {
                if begun.elapsed() > MOUNT_TIME_MAX {
                    return Err(io::Error::other("nbdfuse cannot mount"));
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            let device = self.attach(&file)?;
            let options = ["-q", "-F", "-b", "4096", "-J", "size=4", "-E", EXTENDED, &device];
            run(Command::new("mkfs.ext4").args(options))?;
            self.mount(name, &device)?;
        }
        Ok(())
    }

    fn attach(&mut self, file: &Path) -> io::Result<String> {
        let found = run(Command::new("losetup").args(["--find", "--show"]).arg(file))?;
        let device = found.trim().to_owned();
        self.devices.push(device.clone());
        Ok(device)
    }

    fn mount(&self, name: &str, device: &str) -> io::Result<()> {
        let options = ["-t", "ext4", "-o", "noatime,nodiscard", device];
        run(Command::new("mount").args(options).arg(self.folder.join(name))).map(drop)
    }

    /// Makes everything durable that the file systems have.
    pub fn sync(&self) {
        for name in NAMES {
            let folder = self.folder.join(name);
            run(Command::new("sync").arg("--file-system").arg(folder)).unwrap();
        }
    }

    /// Mounts `contents` instead of what is mounted. No file on them is open.
    pub fn replace(&mut self, contents: &[Vec<u8>]) {
        self.unmount();
        for (name, content) in NAMES.into_iter().zip(contents) {
            let file = self.store.join(format!("{name}.after"));
            fs::write(&file, content).unwrap();
            let device = self.attach(&file).unwrap();
            self.mount(name, &device).unwrap();
        }
    }

    fn unmount(&mut self) {
        for name in NAMES {
            let _ = run(Command::new("umount").arg("--lazy").arg(self.folder.join(name)));
        }
        for device in self.devices.drain(..) {
            let _ = run(Command::new("losetup").args(["--detach", &device]));
        }
        for (mut server, name) in self.servers.drain(..).zip(NAMES) {
            let _ = run(Command::new("fusermount3").arg("-uz").arg(self.store.join(name)));
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}

/// Discards are off: a device keeps what it has.
const EXTENDED: &str = "nodiscard,lazy_itable_init=0,lazy_journal_init=0";

impl Drop for Volumes {
    fn drop(&mut self) {
        self.unmount();
        let _ = fs::remove_dir_all(&self.folder);
        let _ = fs::remove_dir_all(&self.store);
    }
}

/// Runs a command and returns its standard output.
fn run(command: &mut Command) -> io::Result<String> {
    // The system administrator's programs are not on every user's path.
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/sbin:/sbin"));
    let output = command.output()?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!("{:?}: {}", command.get_program(), stderr.trim())))
}
