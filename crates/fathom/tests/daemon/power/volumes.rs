//! Recorded block devices, file systems on them, and the same devices and file systems after a
//! power loss.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fathom_sim::run_command;

use super::recorder::Recorder;
use super::setup::Setup;

/// The file systems: of the image, of logs, of caches, and of the daemon's state.
pub const NAMES: [&str; 4] = ["home", "log", "cache", "state"];
/// The index of the device of the image.
pub const HOME: usize = 0;
/// The index of the device of logs.
pub const LOG: usize = 1;
/// The index of the device of caches.
pub const CACHE: usize = 2;
/// The index of the device of the daemon's state.
pub const STATE: usize = 3;
/// The size of a block of the file systems, in bytes. The first has the superblock.
const FILE_SYSTEM_BLOCK: usize = 4096;
/// The size of each device, in bytes.
pub const SIZES: [usize; 4] = [20 << 20, 16 << 20, 24 << 20, 12 << 20];
const UNMOUNT_TIME_MAX: Duration = Duration::from_secs(2);
const MOUNT_TIME_MAX: Duration = Duration::from_secs(20);

/// A folder in which the file systems are mounted by their names. Devices without a file system
/// have a link there. Dropping it unmounts them.
pub struct Volumes {
    folder: PathBuf,
    /// In memory: the devices after a power loss.
    store: PathBuf,
    devices: Vec<String>,
    servers: Vec<Option<Child>>,
    setup: Setup,
}

impl Volumes {
    /// New file systems on devices that `recorder` serves. Returns `None`, and prints the reason,
    /// if this machine or user cannot have them.
    pub fn new(recorder: &Recorder, setup: &Setup, seed: u64) -> Option<Self> {
        let name = format!("fathom-power-{}-{seed}", std::process::id());
        let mut volumes = Self {
            folder: std::env::temp_dir().join(&name),
            store: Path::new("/dev/shm").join(&name),
            devices: Vec::new(),
            servers: Vec::new(),
            setup: *setup,
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
        for (volume, name) in NAMES.into_iter().enumerate() {
            let size = SIZES[volume];
            fs::create_dir_all(self.folder.join(name))?;
            let (socket, file) = (self.store.join(format!("{name}.sock")), self.store.join(name));
            let number = recorder.serve(&socket, size);
            if self.setup.link(volume).is_none() {
                recorder.keep_whole(number, FILE_SYSTEM_BLOCK);
            }
            File::create(&file)?;
            let server = Command::new("setpriv")
                .args(["--pdeathsig", "KILL", "--", "nbdfuse"])
                .arg(&file)
                .arg(format!("nbd+unix:///?socket={}", socket.display()))
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .spawn()?;
            self.servers.push(Some(server));
            let begun = Instant::now();
            while fs::metadata(&file)?.len() != size as u64 {
                if begun.elapsed() > MOUNT_TIME_MAX {
                    return Err(io::Error::other("nbdfuse cannot mount"));
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            let device = self.attach(&file)?;
            if self.setup.link(volume).is_none() {
                self.format(volume, &device)?;
            }
            self.show(volume, &device)?;
        }
        Ok(())
    }

    fn is_xfs(&self, volume: usize) -> bool {
        self.setup.is_xfs && volume != STATE
    }

    fn format(&self, volume: usize, device: &str) -> io::Result<()> {
        if !self.is_xfs(volume) {
            let options = ["-q", "-F", "-b", "4096", "-J", "size=4", "-E", EXTENDED, device];
            return run_command(Command::new("mkfs.ext4").args(options)).map(drop);
        }
        let mut command = Command::new("mkfs.xfs");
        command.args(["-q", "-f", device]);
        // The variables of the tests of XFS, for which it makes file systems of less than 300 MB.
        command.envs(["TEST_DIR", "TEST_DEV", "QA_CHECK_FS"].map(|name| (name, "1")));
        run_command(&mut command).map(drop)
    }

    fn attach(&mut self, file: &Path) -> io::Result<String> {
        let found = run_command(
            Command::new("losetup").args(["--find", "--show", "--direct-io=on"]).arg(file),
        )?;
        let device = found.trim().to_owned();
        self.devices.push(device.clone());
        Ok(device)
    }

    /// Mounts the file system of a device, or makes the link to the device.
    fn show(&self, volume: usize, device: &str) -> io::Result<()> {
        if let Some(link) = self.setup.link(volume) {
            let link = self.folder.join(link);
            let _ = fs::remove_file(&link);
            return std::os::unix::fs::symlink(device, link);
        }
        let options = if self.is_xfs(volume) {
            ["-t", "xfs", "-o", "noatime,nodiscard,nouuid", device]
        } else {
            ["-t", "ext4", "-o", "noatime,nodiscard", device]
        };
        run_command(Command::new("mount").args(options).arg(self.folder.join(NAMES[volume])))
            .map(drop)
    }

    /// Makes everything durable that the devices have.
    pub fn sync(&self) {
        for (volume, name) in NAMES.into_iter().enumerate() {
            let link = self.setup.link(volume);
            let option = if link.is_some() { "--data" } else { "--file-system" };
            let path = self.folder.join(link.unwrap_or(name));
            run_command(Command::new("sync").arg(option).arg(path)).unwrap();
        }
    }

    /// Shows `contents` instead of what is there, on devices with other numbers. No file on them is
    /// open.
    pub fn replace(
        &mut self,
        mut contents: Vec<Vec<u8>>,
        recorder: &Recorder,
        random: &mut fastrand::Rng,
    ) {
        self.unmount();
        let mut order: Vec<usize> = (0..contents.len()).collect();
        random.shuffle(&mut order);
        for volume in order {
            let content = std::mem::take(&mut contents[volume]);
            let file = if self.is_kept(volume) {
                recorder.restore(volume, content);
                self.store.join(NAMES[volume])
            } else {
                let file = self.store.join(format!("{}.after", NAMES[volume]));
                fs::write(&file, content).unwrap();
                file
            };
            let device = self.attach(&file).unwrap();
            self.show(volume, &device).unwrap();
        }
    }

    /// Whether the device has to be on the same file later: it is the image, and known by that.
    fn is_kept(&self, volume: usize) -> bool {
        volume == HOME && self.setup.is_device[HOME]
    }

    /// Ends what uses the devices, and waits for that: a process that has ended may have files open
    /// for a moment longer, and what it left unwritten would be written over what comes next.
    fn unmount(&mut self) {
        for volume in (0..NAMES.len()).filter(|volume| self.setup.link(*volume).is_none()) {
            let path = self.folder.join(NAMES[volume]);
            let begun = Instant::now();
            while run_command(Command::new("umount").arg(&path)).is_err() {
                if begun.elapsed() > UNMOUNT_TIME_MAX {
                    let _ = run_command(Command::new("umount").arg("--lazy").arg(&path));
                    break;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        for device in self.devices.drain(..) {
            let _ = run_command(Command::new("losetup").args(["--detach", &device]));
            let attached = Path::new("/sys/block").join(device.trim_start_matches("/dev/"));
            // Another host may use the number next.
            let is_attached = || {
                let file = fs::read_to_string(attached.join("loop/backing_file"));
                file.is_ok_and(|file| self.store.to_str().is_some_and(|own| file.starts_with(own)))
            };
            let begun = Instant::now();
            while is_attached() && begun.elapsed() < UNMOUNT_TIME_MAX {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        for volume in 0..NAMES.len() {
            if !self.is_kept(volume) {
                self.end_server(volume);
            }
        }
    }

    fn end_server(&mut self, volume: usize) {
        if let Some(mut server) = self.servers.get_mut(volume).and_then(Option::take) {
            let file = self.store.join(NAMES[volume]);
            let _ = run_command(Command::new("fusermount3").arg("-uz").arg(file));
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
        (0..NAMES.len()).for_each(|volume| self.end_server(volume));
        let _ = fs::remove_dir_all(&self.folder);
        let _ = fs::remove_dir_all(&self.store);
    }
}
