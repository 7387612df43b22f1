//! Block devices, which several nodes may name: the claim that excludes a second user.
//!
//! A lock belongs to a node (`/dev/sdb`), not to the device: another node of the same number has
//! other locks. So a writer opens the device with `O_EXCL`, the kernel's own claim, which also
//! excludes what is mounted, swap space, and what another device consists of, such as a physical
//! volume of LVM. The claim belongs to the description; others of the same process, such as those
//! that are only asked for reports, are opened without it. Readers do not claim. They and writers
//! lock the kernel's own node of the device ([`lock_device`]) besides the one by which they came.
//!
//! The number of a device is not its name either: after a restart of the host another device may
//! have it. [`loop_name`] names a loop device by the file behind it.

#![expect(unsafe_code, reason = "an ioctl of loop devices")]

use std::error::Error;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Instant, UNIX_EPOCH};

use fathom_failure::Failing;
use rustix::fs::{major, minor};

use crate::lock::{LockError, LockPurpose, PATIENCE, RETRY_INTERVAL, lock};

/// Opens an image or a block device for reading, and for writing if the access is exclusive.
/// `flags` are further flags of `open`. A block device is then claimed for as long as the file is
/// open. Waits for up to three seconds while another process has claimed it: that process may be
/// about to end.
///
/// # Errors
/// Those of `open`. [`io::ErrorKind::ResourceBusy`] if the device is claimed: see [`Holder`].
pub fn open(path: &Path, access: LockPurpose, flags: i32) -> io::Result<File> {
    let is_exclusive = access != LockPurpose::Shared;
    let start = Instant::now();
    loop {
        let claims = is_exclusive && std::fs::metadata(path)?.file_type().is_block_device();
        let claim = if claims { libc::O_EXCL } else { 0 };
        let mut options = OpenOptions::new();
        options.read(true).write(is_exclusive).custom_flags(flags | claim);
        match options.open(path) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                // What is mounted stays so.
                if start.elapsed() >= PATIENCE || use_of(path).is_some() {
                    return Err(error);
                }
                std::thread::sleep(RETRY_INTERVAL);
            }
            Ok(file) if is_exclusive && !claims => {
                // A device may have taken the place of a file meanwhile.
                if !file.metadata()?.file_type().is_block_device() {
                    return Ok(file);
                }
            }
            opened => return opened,
        }
    }
}

/// Takes the lock of a block device by its number: that of the node which the kernel has made for
/// it, unless `file` is that node. The lock lasts as long as the returned file is open. `None` for
/// an image, and if there is no such node or it may not be opened: then the claim of [`open`] still
/// excludes a second writer.
///
/// # Errors
/// See [`LockError`].
pub fn lock_device(file: &File, access: LockPurpose) -> Result<Option<File>, LockError> {
    let own = file.metadata().map_err(LockError::Io)?;
    if !own.file_type().is_block_device() {
        return Ok(None);
    }
    let Some(node) = node(own.rdev()) else { return Ok(None) };
    let mut options = OpenOptions::new();
    options.read(true).write(access != LockPurpose::Shared).custom_flags(libc::O_NONBLOCK);
    let Ok(node) = options.open(node) else { return Ok(None) };
    let found = node.metadata().map_err(LockError::Io)?;
    let is_same = (found.dev(), found.ino()) == (own.dev(), own.ino());
    if is_same || !found.file_type().is_block_device() || found.rdev() != own.rdev() {
        return Ok(None);
    }
    match lock(&node, access) {
        Ok(()) => Ok(Some(node)),
        Err(LockError::Unsupported(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// What uses a block device, so that it cannot be claimed. The text follows "is".
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holder {
    /// It is mounted at this path.
    Mount(String),
    /// It is swap space.
    Swap,
    /// Another device has it as a part. Contains the name of that device.
    Device(String),
    /// A process has it open.
    Process,
}

impl fmt::Display for Holder {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mount(point) => write!(formatter, "mounted at {point}"),
            Self::Swap => formatter.write_str("used as swap space"),
            Self::Device(above) => write!(formatter, "a part of the device {above}"),
            Self::Process => formatter.write_str("in use by another process"),
        }
    }
}

impl Error for Holder {}

impl Failing for Holder {
    fn remedy(&self) -> String {
        let remedy = match self {
            Self::Mount(_) => "unmount it first",
            Self::Swap => "run `swapoff` first",
            Self::Device(_) => "use that one, or take it apart first",
            Self::Process => "stop that process first (`lsof` names it)",
        };
        remedy.into()
    }
}

impl Holder {
    /// What uses the block device at `path`.
    pub fn of(path: &Path) -> Self {
        use_of(path).unwrap_or(Self::Process)
    }
}

/// The kernel's use of a device: a mount, swap space, or another device.
fn use_of(path: &Path) -> Option<Holder> {
    let number = std::fs::metadata(path).ok()?.rdev();
    let folder = folder(number);
    let partitions = std::fs::read_dir(&folder).into_iter().flatten().filter_map(Result::ok);
    let partitions = partitions.map(|entry| entry.path());
    let partitions = partitions.filter(|path| path.join("partition").exists());
    std::iter::once(folder.clone()).chain(partitions).find_map(|folder| {
        let number = std::fs::read_to_string(folder.join("dev")).ok()?;
        let name = device_name(&folder);
        if let Some(point) = mounted(number.trim(), name.as_deref()) {
            return Some(Holder::Mount(point));
        }
        if name.as_deref().is_some_and(is_swap) {
            return Some(Holder::Swap);
        }
        let mut above = std::fs::read_dir(folder.join("holders")).ok()?;
        let above = above.next()?.ok()?.file_name();
        Some(Holder::Device(above.to_string_lossy().into_owned()))
    })
}

/// Where a device is mounted, by its number `major:minor` and its node.
fn mounted(number: &str, node: Option<&Path>) -> Option<String> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    mounts.lines().find_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let mut fields = before.split(' ').skip(2);
        let (found, point) = (fields.next()?, fields.nth(1)?);
        // Some file systems have numbers of their own.
        let source = after.split(' ').nth(1)?;
        let is_same = found == number || node.is_some_and(|node| Path::new(source) == node);
        is_same.then(|| point.replace("\\040", " "))
    })
}

fn is_swap(node: &Path) -> bool {
    let areas = std::fs::read_to_string("/proc/swaps").unwrap_or_default();
    areas.lines().any(|line| line.split_ascii_whitespace().next().map(Path::new) == Some(node))
}

/// The folder in `/sys` of the device with this number.
pub(crate) fn folder(number: u64) -> PathBuf {
    Path::new("/sys/dev/block").join(format!("{}:{}", major(number), minor(number)))
}

/// The kernel's node of a device.
fn node(number: u64) -> Option<PathBuf> {
    device_name(&folder(number))
}

/// The kernel's node of the device with this folder in `/sys`.
fn device_name(folder: &Path) -> Option<PathBuf> {
    let event = std::fs::read_to_string(folder.join("uevent")).ok()?;
    let name = event.lines().find_map(|line| line.strip_prefix("DEVNAME="))?;
    Some(Path::new("/dev").join(name))
}

/// The name of the loop device with this folder in `/sys`: the number of the file behind it, the
/// time of the file's creation, and the offset of the device in the file. `None` if it is no loop
/// device, or if the file is not to be found by its path. With `device`, the kernel confirms that
/// the file is the one at the path.
pub(crate) fn loop_name(folder: &Path, device: Option<&File>) -> Option<String> {
    let path = std::fs::read_to_string(folder.join("loop/backing_file")).ok()?;
    let offset = std::fs::read_to_string(folder.join("loop/offset")).ok()?;
    let file = std::fs::metadata(path.strip_suffix('\n').unwrap_or(&path)).ok()?;
    let created = file.created().ok()?.duration_since(UNIX_EPOCH).ok()?.as_nanos();
    if let Some(device) = device {
        let (device, number) = loop_file(device)?;
        if (device, number) != (encoded(file.dev()), file.ino()) {
            return None;
        }
    }
    Some(format!("{}-{created}-{}", file.ino(), offset.trim()))
}

/// A device's number as the kernel reports it to `ioctl`s.
fn encoded(number: u64) -> u64 {
    let (major, minor) = (u64::from(major(number)), u64::from(minor(number)));
    minor & 0xff | major << 8 | (minor & !0xff) << 12
}

/// The number of the file system and of the file behind a loop device.
fn loop_file(device: &File) -> Option<(u64, u64)> {
    const LOOP_GET_STATUS64: libc::c_ulong = 0x4c05;
    // The size of `struct loop_info64`.
    let mut status = [0_u64; 29];
    let descriptor = device.as_raw_fd();
    // SAFETY: the call writes one structure of 232 bytes to the given place.
    let result = unsafe { libc::ioctl(descriptor, LOOP_GET_STATUS64, status.as_mut_ptr()) };
    (result == 0).then_some((status[0], status[1]))
}

/// Whether a device other than the one with this number has a name that `is_same` finds equal. It
/// is called with the folder in `/sys` of each of them.
pub(crate) fn has_twin(number: u64, is_same: impl Fn(&Path) -> bool) -> bool {
    let own = format!("{}:{}", major(number), minor(number));
    let devices = std::fs::read_dir("/sys/class/block").into_iter().flatten();
    devices.filter_map(Result::ok).map(|entry| entry.path()).any(|folder| {
        let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap_or_default();
        // The kernel hides the paths of a device for which it chooses one itself.
        read("dev").trim() != own && read("hidden").trim() != "1" && is_same(&folder)
    })
}
