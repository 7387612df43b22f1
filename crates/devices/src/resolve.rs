//! Which devices an image lies on.
//!
//! An image is a block device, or a file in a file system on block devices. The devices beneath a
//! block device are found in `/sys`: the whole disk of a partition, the `slaves` of device-mapper
//! and md, the file behind a loop device. File systems without a device number of their own are
//! found in the list of mounts: the devices of btrfs, the layers of an overlay, the source of
//! others. The walk visits each device once and ends after a limited number of steps, whatever
//! `/sys` holds.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use rustix::fs::{FileType, Mode, OFlags, fstat, major, minor, open};

use crate::mounts::{self, Mount};
use crate::text::{is_device_name, read, read_to};

/// The most devices and files that are visited for one image.
pub(crate) const STEPS_MAX: usize = 1024;
/// The deepest nesting: a loop device on a file system on device-mapper and so on.
const DEPTH_MAX: usize = 32;

/// The kind of storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MediumKind {
    /// A device of the host, in `/sys/block`.
    Device,
    /// A modelled device of the daemon.
    Model,
    /// The host's memory.
    Memory,
    /// A file system that another computer or another program serves.
    Network,
    /// It could not be found out.
    Unknown,
}

impl MediumKind {
    /// The name in JSON and in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Model => "model",
            Self::Memory => "memory",
            Self::Network => "network",
            Self::Unknown => "unknown",
        }
    }
}

/// A part of the storage beneath images.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Medium {
    /// Its kind.
    pub kind: MediumKind,
    /// The device's name in `/sys/block`; the type of a network file system; otherwise the kind or,
    /// for a model, its name.
    pub name: String,
}

impl Medium {
    /// The medium of a kind with a name.
    pub fn new(kind: MediumKind, name: impl Into<String>) -> Self {
        Self { kind, name: name.into() }
    }

    /// The host's memory.
    pub fn memory() -> Self {
        Self::new(MediumKind::Memory, MediumKind::Memory.name())
    }

    fn unknown() -> Self {
        Self::new(MediumKind::Unknown, MediumKind::Unknown.name())
    }
}

/// What an image lies on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// The devices and other media, in order.
    pub media: BTreeSet<Medium>,
    /// The devices in between, the uppermost first: partitions, logical volumes, loop devices.
    pub through: Vec<String>,
    /// Why a part could not be found out.
    pub problem: Option<String>,
}

impl Placement {
    /// The placement on one medium.
    pub fn on(medium: Medium) -> Self {
        Self { media: BTreeSet::from([medium]), ..Self::default() }
    }

    /// A placement that could not be found out.
    pub fn unknown(problem: impl Into<String>) -> Self {
        Self { problem: Some(problem.into()), ..Self::on(Medium::unknown()) }
    }

    /// The names of the host's devices.
    pub fn devices(&self) -> impl Iterator<Item = &str> {
        let devices = self.media.iter().filter(|medium| medium.kind == MediumKind::Device);
        devices.map(|medium| medium.name.as_str())
    }
}

/// What `stat` reports of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    /// The major and minor number of the block device itself, or of the file's file system.
    pub number: (u32, u32),
    /// Whether the image is a block device.
    pub is_device: bool,
    /// The number of its mount.
    pub mount: Option<u64>,
}

impl Identity {
    /// Asks the kernel.
    fn of(path: &Path) -> io::Result<Self> {
        // The image itself is not opened: that could have effects on a device.
        let file = open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let stat = fstat(&file)?;
        let is_device = FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice;
        let device = if is_device { stat.st_rdev } else { stat.st_dev };
        let facts = format!("/proc/self/fdinfo/{}", file.as_raw_fd());
        let mount = read(Path::new(&facts)).ok().and_then(|text| {
            let line = text.lines().find_map(|line| line.strip_prefix("mnt_id:"))?;
            line.trim().parse().ok()
        });
        Ok(Self { number: (major(device), minor(device)), is_device, mount })
    }
}

/// Asks for the identity of an image.
type Identify = dyn Fn(&Path) -> io::Result<Identity>;

/// The trees in which devices are looked up, usually the host's `/sys` and `/proc`.
pub(crate) struct Tree {
    pub sys: PathBuf,
    pub mounts: PathBuf,
    pub identify: Box<Identify>,
}

impl Default for Tree {
    fn default() -> Self {
        Self {
            sys: "/sys".into(),
            mounts: "/proc/self/mountinfo".into(),
            identify: Box::new(Identity::of),
        }
    }
}

/// What the image `path` lies on. May hang as long as the image's file system does.
pub fn resolve(path: &Path) -> Placement {
    Tree::default().resolve(path)
}

/// What the image `path` lies on, found out by another thread, which may take at most `limit`. If
/// the image's file system hangs, that thread hangs until the file system answers: the caller must
/// not repeat the call without a limit.
pub fn resolve_within(path: &Path, limit: Duration) -> Placement {
    let (sender, found) = sync_channel(1);
    let image = path.to_owned();
    let resolve = move || drop(sender.send(resolve(&image)));
    if let Err(error) = std::thread::Builder::new().name("resolve".into()).spawn(resolve) {
        return Placement::unknown(format!("a thread cannot be started: {error}"));
    }
    found.recv_timeout(limit).unwrap_or_else(|error| {
        Placement::unknown(match error {
            RecvTimeoutError::Timeout => "its file system does not answer",
            RecvTimeoutError::Disconnected => "its search failed because of a bug",
        })
    })
}

impl Tree {
    /// What the image `path` lies on.
    pub(crate) fn resolve(&self, path: &Path) -> Placement {
        let mut walk = Walk {
            tree: self,
            mounts: None,
            visited: BTreeSet::new(),
            steps: 0,
            placement: Placement::default(),
        };
        walk.image(path, 0);
        if walk.placement.media.is_empty() {
            let problem = walk.placement.problem.take();
            let problem = problem.unwrap_or_else(|| "no device is found beneath it".to_owned());
            return Placement { through: walk.placement.through, ..Placement::unknown(problem) };
        }
        walk.placement
    }
}

/// A search for the devices beneath one image.
struct Walk<'t> {
    tree: &'t Tree,
    /// The text of the list of mounts, once it is needed.
    mounts: Option<String>,
    /// The folders of the visited devices.
    visited: BTreeSet<PathBuf>,
    steps: usize,
    placement: Placement,
}

impl Walk<'_> {
    /// Counts a step. Returns false beyond the limits.
    fn step(&mut self, depth: usize) -> bool {
        self.steps += 1;
        let is_allowed = self.steps <= STEPS_MAX && depth <= DEPTH_MAX;
        if !is_allowed {
            self.fail("its devices are nested too deeply");
        }
        is_allowed
    }

    fn fail(&mut self, problem: impl Into<String>) {
        self.placement.problem.get_or_insert(problem.into());
        self.placement.media.insert(Medium::unknown());
    }

    fn add(&mut self, medium: Medium) {
        self.placement.media.insert(medium);
    }

    /// A file or a block device.
    fn image(&mut self, path: &Path, depth: usize) {
        if !self.step(depth) {
            return;
        }
        match (self.tree.identify)(path) {
            Ok(identity) if identity.is_device => self.numbered(identity.number, depth + 1),
            Ok(identity) => self.file_system(&identity, depth + 1),
            Err(error) => self.fail(format!("{}: {error}", path.display())),
        }
    }

    fn mount(&mut self, id: u64) -> Option<Mount> {
        let path = &self.tree.mounts;
        let read = || read_to(path, mounts::LENGTH_MAX).unwrap_or_default();
        mounts::find(self.mounts.get_or_insert_with(read), id)
    }

    fn file_system(&mut self, identity: &Identity, depth: usize) {
        let mount = identity.mount.and_then(|id| self.mount(id));
        // File systems on a device have its number; others have a number with the major number 0.
        if identity.number.0 != 0 {
            self.numbered(identity.number, depth);
            // The further devices of XFS.
            let options = ["rtdev", "logdev"];
            let further = mount.iter().flat_map(|mount| options.map(|name| mount.option(name)));
            for source in further.flatten().collect::<Vec<_>>() {
                self.source(&source, depth);
            }
            return;
        }
        let Some(mount) = mount else { return self.fail("its mount is not found") };
        match mount.file_system.as_str() {
            "tmpfs" | "ramfs" | "hugetlbfs" | "devtmpfs" | "rootfs" => self.add(Medium::memory()),
            "btrfs" => self.btrfs(&mount.source, depth),
            // A device each, separated by colons.
            "bcachefs" => {
                for source in mount.source.split(':').take(STEPS_MAX) {
                    self.source(source, depth);
                }
            }
            "overlay" => {
                let folders = mounts::overlay_folders(&mount);
                if folders.is_empty() {
                    self.fail("the layers of its overlay are not known");
                }
                for folder in &folders {
                    self.image(folder, depth);
                }
            }
            name if is_network(name) => {
                let name = if is_device_name(name) { name } else { "network" };
                self.add(Medium::new(MediumKind::Network, name));
            }
            _ if mount.source.starts_with('/') => self.source(&mount.source, depth),
            name => {
                let name: String = name.chars().take(60).collect();
                self.fail(format!("the devices of a file system of type {name:?} are not known"));
            }
        }
    }

    /// All devices of a btrfs, one of which is `source`.
    fn btrfs(&mut self, source: &str, depth: usize) {
        let Some(name) = self.name_of(source) else { return self.source(source, depth) };
        let folders = entries(&self.tree.sys.join("fs/btrfs"));
        let mut devices = folders.iter().map(|folder| entries(&folder.join("devices")));
        let is_it = |path: &PathBuf| path.file_name().is_some_and(|other| other == name.as_str());
        match devices.find(|devices| devices.iter().any(is_it)) {
            Some(devices) => self.devices(&devices, depth),
            None => self.named(&name, depth),
        }
    }

    /// A mounted device by its path.
    fn source(&mut self, source: &str, depth: usize) {
        if !self.step(depth) {
            return;
        }
        match self.name_of(source) {
            Some(name) => self.named(&name, depth),
            None => self.fail(format!("there is no device for {source:?}")),
        }
    }

    /// The name in `/sys` of the device with a path like `/dev/mapper/data`.
    fn name_of(&self, source: &str) -> Option<String> {
        let is_present = |name: &String| {
            is_device_name(name) && self.tree.sys.join("class/block").join(name).exists()
        };
        let name = |path: &Path| Some(path.file_name()?.to_str()?.replace('/', "!"));
        let direct = name(Path::new(source)).filter(is_present);
        if let Some(mapped) = source.strip_prefix("/dev/mapper/") {
            let devices = entries(&self.tree.sys.join("class/block"));
            let is_mapped =
                |folder: &&PathBuf| read(&folder.join("dm/name")).is_ok_and(|n| n == mapped);
            return devices.iter().find(is_mapped).and_then(|folder| name(folder)).or(direct);
        }
        let linked = || std::fs::canonicalize(source).ok().and_then(|path| name(&path));
        direct.or_else(|| linked().filter(is_present))
    }

    fn named(&mut self, name: &str, depth: usize) {
        self.device(&self.tree.sys.join("class/block").join(name), depth);
    }

    fn numbered(&mut self, (major, minor): (u32, u32), depth: usize) {
        self.device(&self.tree.sys.join(format!("dev/block/{major}:{minor}")), depth);
    }

    fn devices(&mut self, paths: &[PathBuf], depth: usize) {
        for path in paths {
            self.device(path, depth);
        }
    }

    /// The device with the folder or link `path` in `/sys`.
    fn device(&mut self, path: &Path, depth: usize) {
        if !self.step(depth) {
            return;
        }
        let Ok(folder) = path.canonicalize() else {
            let name = path.file_name().unwrap_or_default();
            return self.fail(format!("there is no device {}", name.to_string_lossy()));
        };
        let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        if !is_device_name(&name) {
            return self.fail("a device has no valid name");
        }
        if !self.visited.insert(folder.clone()) {
            return;
        }
        if folder.join("partition").exists() {
            self.placement.through.push(name);
            return match folder.parent() {
                Some(whole) => self.device(whole, depth + 1),
                None => self.fail("a partition has no disk"),
            };
        }
        let beneath = entries(&folder.join("slaves"));
        if !beneath.is_empty() {
            self.placement.through.push(name);
            return self.devices(&beneath, depth + 1);
        }
        if let Ok(file) = read(&folder.join("loop/backing_file")) {
            self.placement.through.push(name);
            return match file.strip_suffix(" (deleted)") {
                Some(_) => self.fail("the file of a loop device is deleted"),
                None => self.image(Path::new(&file), depth + 1),
            };
        }
        if is_memory(&name) {
            self.placement.through.push(name);
            return self.add(Medium::memory());
        }
        self.add(Medium::new(MediumKind::Device, name));
    }
}

/// The entries of a folder, in order of name, up to a limit.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut paths: Vec<PathBuf> =
        entries.take(STEPS_MAX).filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    paths
}

/// Whether a file system of this type is served over a network, or by another program.
fn is_network(name: &str) -> bool {
    const NAMES: [&str; 18] = [
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "ceph",
        "9p",
        "virtiofs",
        "afs",
        "coda",
        "ncpfs",
        "lustre",
        "gpfs",
        "ocfs2_dlmfs",
        "beegfs",
        "orangefs",
        "pvfs2",
        "fuse",
    ];
    NAMES.contains(&name) || name.starts_with("fuse.")
}

/// Whether a device keeps its data in the host's memory.
fn is_memory(name: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    ["zram", "ram"].iter().any(|prefix| name.strip_prefix(prefix).is_some_and(is_number))
}

#[cfg(test)]
mod tests;
