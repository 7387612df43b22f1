//! Opening a file: its kind, its capabilities, and the lock.

use std::error::Error;
use std::fmt;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64};

use fathom_block::{Capabilities, Geometry};
use fathom_failure::Failing;
use fathom_image::{ForeignFormat, Holder, LockError, LockPurpose, LossRecord};
use parking_lot::Mutex;
use rustix::fs::{
    AtFlags, FallocateFlags, SeekFrom, StatxFlags, Timespec, Timestamps, UTIME_OMIT, fallocate,
    futimens, ioctl_blkpbszget, ioctl_blksszget, statx,
};

use super::drain::Drain;
use super::durability::Durability;
use super::{FileKind, NOT_TRUNCATED, Shared};

/// How often an image may be replaced while it is being opened.
const REPLACED_MAX: u32 = 10;
/// The logical block sizes that a disk can have, in bytes.
const BLOCK_SIZES: [u32; 2] = [512, 4096];

/// The file to open, and the options.
#[derive(Clone, Debug, Default)]
pub struct FileOptions {
    /// The image or device.
    pub path: PathBuf,
    /// Bypass the host's page cache (`O_DIRECT`).
    pub direct: bool,
    /// Open for reading only; other readers may do the same.
    pub read_only: bool,
    /// The logical block size that guests see, in bytes: 512 or 4096; `None` selects the smallest
    /// that the file allows.
    pub block_size: Option<u32>,
    /// The disk's name, for the log; may be empty.
    pub disk: String,
    /// A folder for the records of files that cannot carry them: block devices, and images in
    /// folders that are not writable.
    pub records: Option<PathBuf>,
    /// Serve the bytes unchanged, even if they look like another image format.
    pub foreign_allowed: bool,
}

/// Why a file could not be opened.
#[derive(Debug)]
pub enum OpenError {
    /// There is no such file.
    Missing(PathBuf),
    /// The permissions do not allow this access.
    Permission(PathBuf),
    /// Another process has the image open.
    Locked(PathBuf),
    /// The device is in use. Contains what uses it.
    Claimed(PathBuf, Holder),
    /// It is neither a regular file nor a block device.
    NotADisk(PathBuf),
    /// The size is not a multiple of the block size, both in bytes.
    Size(PathBuf, u64, u64),
    /// The file system does not support direct I/O.
    NoDirect(PathBuf),
    /// The requested block size is not supported, in bytes: the requested one, the smallest
    /// supported one.
    BlockSize(PathBuf, u32, u32),
    /// The file's alignment for direct I/O, in bytes, which no block size has.
    Alignment(PathBuf, u32),
    /// The image looks like one of another format, and the options do not declare it raw.
    Foreign(PathBuf, ForeignFormat),
    /// Any other error of the operating system.
    Io(PathBuf, io::Error),
}

impl fmt::Display for OpenError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: ", self.path().display())?;
        match self {
            Self::Missing(_) => formatter.write_str("no such image"),
            Self::Permission(_) => formatter.write_str("permission denied"),
            Self::Locked(_) => formatter.write_str("in use by another process"),
            Self::Claimed(_, holder) => holder.fmt(formatter),
            Self::NotADisk(_) => formatter.write_str("neither a regular file nor a block device"),
            Self::Size(_, size, block) => {
                write!(formatter, "its size of {size} bytes is not a multiple of {block}")
            }
            Self::NoDirect(_) => formatter.write_str("its file system does not support direct I/O"),
            Self::BlockSize(_, requested, _) => {
                write!(formatter, "a block size of {requested} is not supported here")
            }
            Self::Alignment(_, alignment) => write!(
                formatter,
                "direct I/O needs blocks of {alignment} bytes here, and a disk's blocks have 512 or \
                 4096"
            ),
            Self::Foreign(_, format) => {
                write!(formatter, "this looks like a {format} image, not a raw one")
            }
            Self::Io(_, error) => error.fmt(formatter),
        }
    }
}

impl OpenError {
    fn path(&self) -> &Path {
        match self {
            Self::Missing(path)
            | Self::Permission(path)
            | Self::Locked(path)
            | Self::Claimed(path, _)
            | Self::NotADisk(path)
            | Self::Size(path, ..)
            | Self::NoDirect(path)
            | Self::BlockSize(path, ..)
            | Self::Alignment(path, _)
            | Self::Foreign(path, _)
            | Self::Io(path, _) => path,
        }
    }
}

impl Error for OpenError {}

impl Failing for OpenError {
    fn remedy(&self) -> String {
        let path = self.path().display();
        match self {
            Self::Missing(_) => format!("create one with `fathom disk create {path} 10G`"),
            Self::Permission(_) => "give the daemon's user access, or serve it read-only".into(),
            Self::Locked(_) => {
                "stop it first (`lslocks` names it), or serve it read-only from both".into()
            }
            Self::Claimed(_, holder) => holder.remedy(),
            Self::NotADisk(_) | Self::Io(..) => String::new(),
            Self::Size(_, size, block) => {
                let rounded = size.next_multiple_of(*block);
                format!("round it up with `fathom disk resize {path} {rounded}`")
            }
            Self::NoDirect(_) | Self::Alignment(..) => "remove `direct`".into(),
            Self::BlockSize(_, _, least) => {
                format!("use {least}{}", if *least < 4096 { " or 4096" } else { "" })
            }
            Self::Foreign(..) => format!(
                "convert it with `fathom disk import {path} NEW.img`, or set `format = \"raw\"` (`--format \
                 raw`) if a guest is to see these bytes unchanged"
            ),
        }
    }
}

pub(super) fn open(options: &FileOptions) -> Result<Shared, OpenError> {
    let path = &options.path;
    let failed = |error: io::Error| match error.raw_os_error() {
        Some(libc::ENOENT) => OpenError::Missing(path.clone()),
        Some(libc::EACCES | libc::EPERM | libc::EROFS) => OpenError::Permission(path.clone()),
        Some(libc::EINVAL) if options.direct => OpenError::NoDirect(path.clone()),
        Some(libc::EBUSY) => OpenError::Claimed(path.clone(), Holder::of(path)),
        _ => OpenError::Io(path.clone(), error),
    };
    let flags = if options.direct { libc::O_DIRECT } else { 0 } | libc::O_CLOEXEC;
    // Opening a named pipe would block for ever, and a device other than a disk may act on an open.
    let kind = std::fs::metadata(path).map_err(failed)?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err(OpenError::NotADisk(path.clone()));
    }
    let purpose = if options.read_only { LockPurpose::Shared } else { LockPurpose::Exclusive };
    let Locked { file, node, metadata } = open_locked(path, purpose, flags, failed)?;
    let file_system = rustix::fs::fstatfs(&file).map_or(0, |status| status.f_type);
    let kind = if metadata.file_type().is_block_device() {
        FileKind::Device
    } else if !metadata.file_type().is_file() {
        return Err(OpenError::NotADisk(path.clone()));
    } else if lives_in_memory(file_system) {
        FileKind::InMemory
    } else {
        FileKind::Regular
    };
    let capacity = match kind {
        FileKind::Device => device_capacity(&file).map_err(failed)?,
        FileKind::Regular | FileKind::InMemory => metadata.len(),
    };
    if !options.foreign_allowed {
        // Bytes that cannot be read here cannot be read by the guest, whose requests then fail.
        if let Ok(Some(format)) = ForeignFormat::of(&file, capacity) {
            return Err(OpenError::Foreign(path.clone(), format));
        }
    }
    let (offset_alignment, memory_alignment) =
        if options.direct { direct_alignment(&file, kind) } else { (1, 1) };
    let block_size = choose_block_size(options.block_size, offset_alignment, path)?;
    if capacity % u64::from(block_size) != 0 {
        return Err(OpenError::Size(path.clone(), capacity, u64::from(block_size)));
    }
    let physical_block_size = match kind {
        FileKind::Device => self::block_size(ioctl_blkpbszget(&file)),
        FileKind::Regular | FileKind::InMemory => 4096,
    };
    let punch = kind == FileKind::Device || !options.read_only && can_punch(&file, capacity);
    let capabilities = Capabilities {
        write: !options.read_only,
        flush: true,
        force_unit_access: true,
        discard: !options.read_only && punch,
        write_zeroes: !options.read_only,
        extents: kind != FileKind::Device,
        rotational: false,
    };
    let record = LossRecord::new(&file, path, options.records.as_slice()).map_err(failed)?;
    let watched = capabilities.write && kind != FileKind::InMemory;
    let durability = Durability::open(&file, record, &options.disk, watched).map_err(failed)?;
    Ok(Shared {
        file,
        _node: node,
        capacity: AtomicU64::new(capacity),
        geometry: Geometry {
            block_size,
            physical_block_size: physical_block_size.max(block_size),
            optimal_size: 0,
            alignment: offset_alignment,
        },
        capabilities,
        kind,
        direct: options.direct,
        has_server: has_server(file_system),
        copies_writes: !options.direct && (kind == FileKind::Device || copies_writes(file_system)),
        memory_alignment,
        durability,
        drain: Drain::default(),
        length: Mutex::new(()),
        deleted: AtomicBool::new(false),
        truncated_length: AtomicU64::new(NOT_TRUNCATED),
    })
}

/// A file whose lock is held.
struct Locked {
    file: File,
    /// The node of a device by its number, which has a lock, too.
    node: Option<File>,
    metadata: Metadata,
}

/// Opens and locks the file that `path` names. The last holder of the lock may have replaced the
/// file (`disk import --force`).
fn open_locked(
    path: &Path,
    purpose: LockPurpose,
    flags: i32,
    failed: impl Fn(io::Error) -> OpenError,
) -> Result<Locked, OpenError> {
    for _ in 0..=REPLACED_MAX {
        let file = fathom_image::open(path, purpose, flags).map_err(&failed)?;
        let node = lock(&file, purpose, path)?;
        let metadata = file.metadata().map_err(&failed)?;
        if is_the_file_at(&metadata, path).map_err(&failed)? {
            return Ok(Locked { file, node, metadata });
        }
        // The claim of a device that has another node now ends before the next attempt.
    }
    Err(OpenError::Locked(path.to_owned()))
}

/// Whether `path` still names the file.
fn is_the_file_at(file: &Metadata, path: &Path) -> io::Result<bool> {
    let named = std::fs::metadata(path)?;
    Ok((file.dev(), file.ino()) == (named.dev(), named.ino()))
}

/// Takes the image's lock, and that of a device by its number, which lasts as long as the returned
/// file is open.
fn lock(file: &File, access: LockPurpose, path: &Path) -> Result<Option<File>, OpenError> {
    let locked =
        fathom_image::lock(file, access).and_then(|()| fathom_image::lock_device(file, access));
    match locked {
        Ok(node) => Ok(node),
        Err(LockError::Held) => Err(OpenError::Locked(path.to_owned())),
        // Some network file systems have no locks; a warning in the log is enough.
        Err(LockError::Unsupported(error)) => {
            tracing::warn!(path = %path.display(), %error, "the image cannot be locked here");
            Ok(None)
        }
        Err(LockError::Io(error)) => Err(OpenError::Io(path.to_owned(), error)),
    }
}

/// Whether the data of files of a file system of this type (`statfs.f_type`) is only in the page
/// cache.
fn lives_in_memory(file_system: i64) -> bool {
    const TMPFS_MAGIC: i64 = 0x0102_1994;
    const RAMFS_MAGIC: i64 = 0x8584_58f6;
    matches!(file_system, TMPFS_MAGIC | RAMFS_MAGIC)
}

/// Whether a buffered write to a file system of this type is a copy into the page cache. File
/// systems with a server (FUSE, NFS, SMB, 9P, Ceph) may wait for an answer in each write.
fn copies_writes(file_system: i64) -> bool {
    const EXT_MAGIC: i64 = 0xef53;
    const XFS_MAGIC: i64 = 0x5846_5342;
    const BTRFS_MAGIC: i64 = 0x9123_683e;
    const F2FS_MAGIC: i64 = 0xf2f5_2010;
    const BCACHEFS_MAGIC: i64 = 0xca45_1a4e;
    const ZFS_MAGIC: i64 = 0x2fc1_2fc1;
    matches!(
        file_system,
        EXT_MAGIC | XFS_MAGIC | BTRFS_MAGIC | F2FS_MAGIC | BCACHEFS_MAGIC | ZFS_MAGIC
    )
}

/// Whether a file system of this type asks a server. A request may then wait for it even where the
/// kernel should only begin it, as FUSE does for the attributes of a file that is read.
fn has_server(file_system: i64) -> bool {
    const FUSE_MAGIC: i64 = 0x6573_5546;
    const NFS_MAGIC: i64 = 0x6969;
    const SMB2_MAGIC: i64 = 0xfe53_4d42;
    const CIFS_MAGIC: i64 = 0xff53_4d42;
    const V9FS_MAGIC: i64 = 0x0102_1997;
    const CEPH_MAGIC: i64 = 0x00c3_6400;
    matches!(
        file_system,
        FUSE_MAGIC | NFS_MAGIC | SMB2_MAGIC | CIFS_MAGIC | V9FS_MAGIC | CEPH_MAGIC
    )
}

/// The size of a block device, in bytes.
pub(super) fn device_capacity(file: &File) -> io::Result<u64> {
    // No other code uses the position of the description.
    Ok(rustix::fs::seek(file, SeekFrom::End(0))?)
}

/// A block size that a device reports, in bytes; 4096 if the report is invalid.
fn block_size(reported: rustix::io::Result<u32>) -> u32 {
    let is_valid = |size: &u32| size.is_power_of_two() && (512..=1 << 20).contains(size);
    reported.ok().filter(is_valid).unwrap_or(4096)
}

/// The requested logical block size, or the smallest one that is a multiple of the alignment, in
/// bytes.
fn choose_block_size(
    requested: Option<u32>,
    alignment: u32,
    path: &Path,
) -> Result<u32, OpenError> {
    let supported = || BLOCK_SIZES.into_iter().filter(|size| size % alignment.max(1) == 0);
    let Some(least) = supported().next() else {
        return Err(OpenError::Alignment(path.to_owned(), alignment));
    };
    match requested {
        Some(size) if !supported().any(|supported| supported == size) => {
            Err(OpenError::BlockSize(path.to_owned(), size, least))
        }
        requested => Ok(requested.unwrap_or(least)),
    }
}

/// The alignment for direct I/O, in bytes: of offset and length, and of memory.
fn direct_alignment(file: &File, kind: FileKind) -> (u32, usize) {
    let known = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok();
    let is_reported = |mask: u32| mask & StatxFlags::DIOALIGN.bits() != 0;
    if let Some(status) = known.filter(|s| is_reported(s.stx_mask) && s.stx_dio_offset_align > 0) {
        let memory = status.stx_dio_mem_align.max(1) as usize;
        return (status.stx_dio_offset_align, memory);
    }
    // Kernels before 6.1 do not report it; devices report their logical block size.
    let least = match kind {
        FileKind::Device => block_size(ioctl_blksszget(file)),
        FileKind::Regular | FileKind::InMemory => 4096,
    };
    (least, least as usize)
}

/// Whether the file system can deallocate ranges: tested past the end, where there is no data.
fn can_punch(file: &File, capacity: u64) -> bool {
    let Some(offset) = capacity.checked_next_multiple_of(4096) else { return false };
    let before = file.metadata();
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let can_punch = fallocate(file, flags, offset, 4096).is_ok();
    if let (true, Ok(before)) = (can_punch, before) {
        keep_modification_time(file, &before);
    }
    can_punch
}

/// Puts the modification time back: the content has not changed. Caches recognise an image by it.
/// Only the owner of a file can do that.
fn keep_modification_time(file: &File, before: &Metadata) {
    let is_same = file
        .metadata()
        .is_ok_and(|now| (now.mtime(), now.mtime_nsec()) == (before.mtime(), before.mtime_nsec()));
    if !is_same {
        let last_access = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
        let last_modification = Timespec { tv_sec: before.mtime(), tv_nsec: before.mtime_nsec() };
        let _ = futimens(file, &Timestamps { last_access, last_modification });
    }
}

#[cfg(test)]
mod tests {
    use fathom_failure::Failure;

    use super::*;

    #[test]
    fn block_sizes_are_multiples_of_the_alignment() {
        let choose = |requested, alignment| {
            choose_block_size(requested, alignment, Path::new("disk.img"))
                .map_err(|error| format!("{:#}", Failure::from(error)))
        };
        for (alignment, least) in [(1, 512), (512, 512), (2048, 4096), (4096, 4096)] {
            assert_eq!(choose(None, alignment), Ok(least));
            assert_eq!(choose(Some(4096), alignment), Ok(4096));
        }
        let refused = |requested, alignment| choose(Some(requested), alignment).unwrap_err();
        assert!(refused(1024, 512).ends_with("1024 is not supported here; use 512 or 4096"));
        assert!(refused(512, 4096).ends_with("512 is not supported here; use 4096"));
        assert!(refused(4096, 16384).ends_with("remove `direct`"));
        assert!(choose(None, 16384).unwrap_err().contains("blocks of 16384 bytes"));
    }
}
