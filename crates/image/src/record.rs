//! The record of lost writes, kept for the next daemon.
//!
//! The kernel reports a failed write-back once, to the first caller that asks. If a daemon received
//! the report and ended, the next daemon would serve a file that looks sound to a guest that
//! repeats its flush. So the report is recorded before any request is completed. The record is an
//! extended attribute of the image if its file system supports them, else a file beside the image,
//! else a file in a folder of the daemon. The record of a block device is in that folder. The
//! record is not synchronised: it has to outlive this process, but not the host, because the guest
//! does not outlive the host either.

#![expect(unsafe_code, reason = "an ioctl")]

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use fathom_persistence::Identity;
use rustix::fs::{XattrFlags, fsetxattr};

/// The extended attribute.
const ATTRIBUTE: &str = "user.fathom.writes-lost";
/// The suffix of the file beside an image.
const SUFFIX: &str = ".fathom-writes-lost";
/// The longest record that is read, in bytes.
const LENGTH_MAX: usize = 256;

/// A record of lost writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// The error with which the kernel reported the loss.
    pub errno: i32,
    /// The file that holds the record; `None` for the image's own extended attribute.
    pub file: Option<PathBuf>,
}

/// The places for the record of one image or device.
pub struct LossRecord {
    /// The extended attribute; `None` for a file that can have none.
    attribute: Option<CString>,
    /// The files that can hold the record, the preferred one first.
    files: Vec<PathBuf>,
    /// Distinguishes this file from others of the same name or number.
    identity: String,
}

impl LossRecord {
    /// The places for the record of `file`, which was opened at `path`. `folders` are daemons'
    /// folders.
    ///
    /// # Errors
    /// When the file's metadata cannot be read.
    pub fn new(file: &File, path: &Path, folders: &[PathBuf]) -> io::Result<Self> {
        Self::with_suffix("", file, path, folders)
    }

    /// The places for the record of one part of `file`, for example of a log in the store of a
    /// cache. The record of the whole file and those of other parts are independent of it. `part`
    /// is the part's identity.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn of_part(
        part: Identity,
        file: &File,
        path: &Path,
        folders: &[PathBuf],
    ) -> io::Result<Self> {
        Self::with_suffix(&format!(".{part}"), file, path, folders)
    }

    fn with_suffix(
        suffix: &str,
        file: &File,
        path: &Path,
        folders: &[PathBuf],
    ) -> io::Result<Self> {
        let metadata = file.metadata()?;
        let device = metadata.file_type().is_block_device();
        let (identity, name) = if device {
            let (number, boot) = (metadata.rdev(), std::fs::read_to_string(BOOT_ID));
            let sequence = device_sequence(file).unwrap_or(0);
            let boot = boot.unwrap_or_default();
            (format!("{number:x}-{sequence}-{}", boot.trim()), format!("device-{number:x}"))
        } else {
            let identity = format!("{:x}-{}", metadata.dev(), metadata.ino());
            (identity.clone(), identity)
        };
        let mut files = Vec::new();
        if !device {
            // A record belongs to the target of a link, not to the link.
            let real = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
            let mut beside = real.into_os_string();
            beside.push(SUFFIX);
            beside.push(suffix);
            files.push(beside.into());
        }
        files.extend(folders.iter().map(|folder| folder.join(format!("{name}{SUFFIX}{suffix}"))));
        let attribute = CString::new(format!("{ATTRIBUTE}{suffix}"))?;
        Ok(Self { attribute: (!device).then_some(attribute), files, identity })
    }

    /// The record; `None` if no loss has been recorded.
    pub fn read(&self, file: &File) -> Option<Loss> {
        if let Some(errno) = self.read_attribute(file) {
            return Some(Loss { errno, file: None });
        }
        let of =
            |path: &PathBuf| Some(Loss { errno: self.read_file(path)?, file: Some(path.clone()) });
        self.files.iter().find_map(of)
    }

    /// Records `errno` in the first place that accepts it.
    ///
    /// # Errors
    /// The error of the last place, when all places fail.
    pub fn write(&self, file: &File, errno: i32) -> io::Result<()> {
        let text = format!("{errno} {}", self.identity);
        let mut last = io::Error::from(io::ErrorKind::Unsupported);
        if let Some(attribute) = &self.attribute {
            match fsetxattr(file, attribute, text.as_bytes(), XattrFlags::empty()) {
                Ok(()) => return Ok(()),
                Err(error) => last = error.into(),
            }
        }
        for path in &self.files {
            match replace(path, text.as_bytes()) {
                Ok(()) => return Ok(()),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Removes the record from every place.
    ///
    /// # Errors
    /// When a record cannot be removed: the next daemon would find it.
    pub fn clear(&self, file: &File) -> io::Result<()> {
        if let (Some(attribute), Some(_)) = (&self.attribute, self.read_attribute(file)) {
            rustix::fs::fremovexattr(file, attribute)?;
        }
        for path in &self.files {
            if self.read_file(path).is_some() {
                std::fs::remove_file(path)?;
            }
        }
        Ok(())
    }

    fn read_attribute(&self, file: &File) -> Option<i32> {
        let attribute = self.attribute.as_ref()?;
        let mut text = [0_u8; LENGTH_MAX];
        let length = rustix::fs::fgetxattr(file, attribute, &mut text).ok()?;
        let text = text.get(..length)?;
        // An attribute is copied with its file, and the copy lacks the same writes. So the identity
        // in an attribute does not matter.
        Some(parse(text).map_or(libc::EIO, |(errno, _)| errno))
    }

    fn read_file(&self, path: &Path) -> Option<i32> {
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(path)
            .ok()?;
        let mut text = Vec::new();
        file.take(LENGTH_MAX as u64).read_to_end(&mut text).ok()?;
        let (errno, identity) = parse(&text)?;
        (identity == self.identity).then_some(errno)
    }
}

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The `errno` and the identity of a record.
fn parse(text: &[u8]) -> Option<(i32, &str)> {
    let (errno, identity) = std::str::from_utf8(text).ok()?.split_once(' ')?;
    Some((errno.parse().ok()?, identity))
}

/// Writes `text` into a new file at `path`, in place of an existing file.
fn replace(path: &Path, text: &[u8]) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // `create_new` does not follow a link that another user may have put there.
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(text).inspect_err(|_| drop(std::fs::remove_file(path)))
}

/// Whether two descriptions are of the same file or device.
///
/// # Errors
/// When the metadata of one cannot be read.
pub fn is_same_file(one: &File, other: &File) -> io::Result<bool> {
    let (first, second) = (one.metadata()?, other.metadata()?);
    if !first.file_type().is_block_device() {
        return Ok((first.dev(), first.ino()) == (second.dev(), second.ino()));
    }
    let is_device = second.file_type().is_block_device();
    let is_same = is_device && first.rdev() == second.rdev();
    Ok(is_same && device_sequence(one) == device_sequence(other))
}

/// The sequence number that the kernel (from 5.15 on) gives each disk within a boot; `None` on
/// older kernels. A device number may be reused for another disk.
fn device_sequence(file: &File) -> Option<u64> {
    const BLKGETDISKSEQ: libc::c_ulong = 0x8008_1280;
    let mut sequence = 0_u64;
    // SAFETY: the call writes one u64 to the given place.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), BLKGETDISKSEQ, &raw mut sequence) };
    (result == 0).then_some(sequence)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_records_of_a_file_and_of_its_parts_are_independent() {
        let folder = tempfile::tempdir_in("/var/tmp").unwrap();
        let (path, other) = (folder.path().join("store"), folder.path().join("other"));
        let (file, second) = (File::create(&path).unwrap(), File::create(other).unwrap());
        let folders = [folder.path().to_owned()];
        let whole = LossRecord::new(&file, &path, &folders).unwrap();
        let parts = [Identity([1; 16]), Identity([2; 16])].map(|part| {
            let record = LossRecord::of_part(part, &file, &path, &folders).unwrap();
            // As on a file system without attributes.
            LossRecord { attribute: None, ..record }
        });
        let errno = |record: &LossRecord| record.read(&file).map(|loss| loss.errno);
        parts[0].write(&file, 5).unwrap();
        assert_eq!((errno(&whole), errno(&parts[0]), errno(&parts[1])), (None, Some(5), None));
        whole.write(&file, 28).unwrap();
        parts[1].write(&file, 6).unwrap();
        whole.clear(&file).unwrap();
        parts[0].clear(&file).unwrap();
        assert_eq!((errno(&whole), errno(&parts[0]), errno(&parts[1])), (None, None, Some(6)));
        assert!(is_same_file(&file, &File::open(&path).unwrap()).unwrap());
        assert!(!is_same_file(&file, &second).unwrap());
    }
}
