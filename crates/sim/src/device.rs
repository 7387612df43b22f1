//! A real disk with blocks that cannot be written, so that the kernel's own error handling is
//! tested.
//!
//! A loop device lies on a file of a small tmpfs, and a file system on the loop device. To break a
//! block of an image there, its space in the tmpfs file is freed and the tmpfs is filled: the block
//! reads as zeroes, and the kernel's write-back of it fails with `ENOSPC`. It needs root and loop
//! devices; tests skip without them.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The size of a block, in bytes.
pub const DEVICE_BLOCK: u64 = 4096;
/// The size of the device, in bytes.
const DEVICE_SIZE: u64 = 24 << 20;
/// The size of the tmpfs, in bytes. The space that the device does not use is filled to break
/// blocks.
const STORE_SIZE: u64 = 25 << 20;
/// How long a file system may stay in use.
const UNMOUNT_TIME_MAX: Duration = Duration::from_secs(30);

/// A mounted file system whose blocks can be broken. Dropping this removes the file system and the
/// device.
pub struct FaultyDevice {
    folder: PathBuf,
    device: Option<String>,
    mounted: bool,
    store_mounted: bool,
}

impl FaultyDevice {
    /// A sound device with an empty ext4 on it. Returns `None`, and prints the reason to standard
    /// error, if this machine or user cannot have one.
    pub fn new() -> Option<Self> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("fathom-faulty-{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        let mut device = Self { folder, device: None, mounted: false, store_mounted: false };
        match device.make() {
            Ok(()) => Some(device),
            Err(error) => {
                eprintln!("skipped: no faulty device is available here: {error}");
                None
            }
        }
    }

    /// Unmounts the file system; the device stays. Waits for a process that has been killed: the
    /// kernel closes the files of its rings some time later.
    ///
    /// # Panics
    /// When a file on it stays open.
    pub fn unmount(&mut self) {
        let begun = Instant::now();
        while let Err(error) = run_command(Command::new("umount").arg(self.mount())) {
            assert!(begun.elapsed() < UNMOUNT_TIME_MAX, "the file system is in use: {error}");
            std::thread::sleep(Duration::from_millis(50));
        }
        self.mounted = false;
    }

    fn make(&mut self) -> io::Result<()> {
        if std::fs::metadata("/proc/self")?.uid() != 0 {
            return Err(io::Error::other("loop devices and mounts need root"));
        }
        for part in ["store", "mount"] {
            std::fs::create_dir_all(self.folder.join(part))?;
        }
        let store = self.folder.join("store");
        let size = format!("size={STORE_SIZE}");
        run_command(
            Command::new("mount").args(["-t", "tmpfs", "-o", &size, "fathom-faulty"]).arg(&store),
        )?;
        self.store_mounted = true;
        let length = DEVICE_SIZE.to_string();
        run_command(Command::new("fallocate").args(["--length", &length]).arg(self.device_file()))?;
        let found = run_command(
            Command::new("losetup").args(["--find", "--show"]).arg(self.device_file()),
        )?;
        let device = found.trim().to_owned();
        self.device = Some(device.clone());
        // Discards are off: each discarded block would later be a broken one.
        let extended = "nodiscard,lazy_itable_init=0,lazy_journal_init=0";
        run_command(
            Command::new("mkfs.ext4").args(["-q", "-F", "-b", "4096", "-E", extended, &device]),
        )?;
        let options = ["-t", "ext4", "-o", "nodiscard,noatime"];
        run_command(Command::new("mount").args(options).arg(&device).arg(self.mount()))?;
        self.mounted = true;
        Ok(())
    }

    /// The block device.
    pub fn path(&self) -> PathBuf {
        self.device.clone().unwrap_or_default().into()
    }

    /// The mount point of its file system.
    pub fn mount(&self) -> PathBuf {
        self.folder.join("mount")
    }

    fn device_file(&self) -> PathBuf {
        self.folder.join("store").join("device")
    }

    fn filler(&self) -> PathBuf {
        self.folder.join("store").join("filler")
    }

    /// An image of `blocks` blocks of zeroes, all of them allocated and durable.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn image(&self, name: &str, blocks: u64) -> PathBuf {
        let path = self.mount().join(name);
        let mut file = File::create(&path).expect("an image");
        file.write_all(&vec![0; (blocks * DEVICE_BLOCK) as usize]).expect("space for an image");
        file.sync_all().expect("a sound device");
        path
    }

    /// Breaks the block at `index` of `image`, and fills the store, so that it stays broken.
    ///
    /// # Panics
    /// When the block cannot be found.
    pub fn break_block(&self, image: &Path, index: u64) {
        let place = self.place_of(image, index) * DEVICE_BLOCK;
        self.break_at(place);
    }

    /// Breaks the block of the device at byte `place`.
    ///
    /// # Panics
    /// When the store cannot be changed.
    pub fn break_at(&self, place: u64) {
        let (offset, length) = (place.to_string(), DEVICE_BLOCK.to_string());
        run_command(
            Command::new("fallocate")
                .args(["--punch-hole", "--offset", &offset, "--length", &length])
                .arg(self.device_file()),
        )
        .expect("a hole in the store");
        let mut filler =
            OpenOptions::new().append(true).create(true).open(self.filler()).expect("a filler");
        let block = vec![0xff; DEVICE_BLOCK as usize];
        while filler.write_all(&block).is_ok() {}
    }

    /// Frees space, so that broken blocks can be written again.
    ///
    /// # Panics
    /// When the filler cannot be removed.
    pub fn mend(&self) {
        std::fs::remove_file(self.filler()).expect("a filler");
    }

    /// Makes reads of the second half of the device fail with `EIO`, by truncating the file below
    /// it.
    ///
    /// # Panics
    /// When the file cannot be truncated.
    pub fn cut(&self) {
        self.set_length(DEVICE_SIZE / 2);
    }

    /// Gives the device its second half back, as zeroes.
    ///
    /// # Panics
    /// When the file cannot be extended.
    pub fn restore(&self) {
        self.set_length(DEVICE_SIZE);
    }

    fn set_length(&self, length: u64) {
        let file = OpenOptions::new().write(true).open(self.device_file()).expect("a device");
        file.set_len(length).expect("another length");
    }

    /// Makes every write to the file system wait until [`thaw`](Self::thaw).
    ///
    /// # Panics
    /// When it cannot be frozen.
    pub fn freeze(&self) {
        run_command(Command::new("fsfreeze").arg("--freeze").arg(self.mount()))
            .expect("a frozen mount");
    }

    /// Lets the waiting writes continue.
    ///
    /// # Panics
    /// When it is not frozen.
    pub fn thaw(&self) {
        run_command(Command::new("fsfreeze").arg("--unfreeze").arg(self.mount()))
            .expect("a thawed mount");
    }

    /// Makes the kernel write back all dirty pages, without taking its reports of failures.
    pub fn write_back(&self) {
        // `syncfs` has an error report of its own, so it does not take the reports of files.
        let _ = Command::new("sync").arg("-f").arg(self.mount()).output();
    }

    /// The position on the device of the block at `index` of `image`, in blocks.
    ///
    /// # Panics
    /// When the block is not allocated.
    pub fn place_of(&self, image: &Path, index: u64) -> u64 {
        let text = run_command(Command::new("filefrag").args(["-v", "-b4096"]).arg(image))
            .expect("extents");
        for line in text.lines() {
            // `   0:        0..    1023:       1549..      2572:   1024: …`
            let fields: Vec<u64> = line
                .split(|letter: char| !letter.is_ascii_digit())
                .filter_map(|field| field.parse().ok())
                .collect();
            if let ([_, first, last, place, ..], true) = (&fields[..], line.contains("..")) {
                if (*first..=*last).contains(&index) {
                    return place + (index - first);
                }
            }
        }
        panic!("block {index} of {} is not allocated:\n{text}", image.display());
    }
}

impl Drop for FaultyDevice {
    fn drop(&mut self) {
        if self.mounted {
            // A test may have failed while the file system was frozen; its writers could not end
            // otherwise.
            let _ = run_command(Command::new("fsfreeze").arg("--unfreeze").arg(self.mount()));
            let _ = run_command(Command::new("umount").arg("--lazy").arg(self.mount()));
        }
        if let Some(device) = &self.device {
            // The kernel detaches a device in use after its last use.
            let _ = run_command(Command::new("losetup").args(["--detach", device]));
        }
        if self.store_mounted {
            let _ =
                run_command(Command::new("umount").arg("--lazy").arg(self.folder.join("store")));
        }
        let _ = std::fs::remove_dir(self.folder.join("store"));
        let _ = std::fs::remove_dir(self.folder.join("mount"));
        let _ = std::fs::remove_dir(&self.folder);
    }
}

/// A loop device on a file. Dropping this detaches it.
pub struct LoopDevice(pub PathBuf);

impl LoopDevice {
    /// Attaches the file. Returns `None`, and prints the reason to standard error, without the
    /// right to do so.
    pub fn attach(file: &Path) -> Option<Self> {
        match run_command(Command::new("losetup").args(["--find", "--show"]).arg(file)) {
            Ok(shown) => Some(Self(shown.trim().into())),
            Err(error) => {
                eprintln!("skipped: no loop device is available here: {error}");
                None
            }
        }
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        // The kernel detaches a device in use after its last use.
        let _ = run_command(Command::new("losetup").arg("--detach").arg(&self.0));
    }
}

/// Runs a command and returns its standard output.
///
/// # Errors
/// If it cannot be started, or fails: what it has written to standard error.
pub fn run_command(command: &mut Command) -> io::Result<String> {
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
