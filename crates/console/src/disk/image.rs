//! Properties of an image that are known without reading all of its data.
use std::{
    fs::{self, File},
    io::{self, Seek},
    os::unix::fs::{FileExt, FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{SeekFrom, seek},
    io::Errno,
};

use crate::failure::{CommandResult, Failure};

/// Reads up to `length` bytes; fewer at the end of the file.
pub fn read_up_to(file: &File, offset: u64, length: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    let mut filled = 0;
    while filled < length {
        match file.read_at(&mut bytes[filled..], offset.saturating_add(filled as u64))? {
            0 => break,
            count => filled += count,
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

/// An open image.
pub struct Image {
    pub path: PathBuf,
    pub file: File,
    pub size: u64,
    pub is_device: bool,
    /// Space allocated on the file system, in bytes; the size for a device.
    pub allocated: u64,
}

impl Image {
    /// Opens an image or block device for reading.
    pub fn open(path: &Path) -> CommandResult<Self> {
        let failed = |error: io::Error| {
            let failure = Failure::io("open", path, &error);
            match error.kind() {
                io::ErrorKind::NotFound => failure.advise(format!(
                    "create an image with `fathom disk create {} 10G`; `fathom disk list` shows the \
                     daemon's disks",
                    path.display()
                )),
                _ => failure,
            }
        };
        let metadata = fs::metadata(path).map_err(failed)?;
        let is_device = metadata.file_type().is_block_device();
        if !is_device && !metadata.is_file() {
            return Err(Failure::new(format!(
                "{} is neither a regular file nor a block device",
                path.display()
            )));
        }
        let mut file = File::open(path).map_err(failed)?;
        let (size, allocated) = if is_device {
            let size = file.seek(io::SeekFrom::End(0)).map_err(failed)?;
            (size, size)
        } else {
            (metadata.len(), metadata.blocks() * 512)
        };
        Ok(Self { path: path.to_owned(), file, size, is_device, allocated })
    }

    /// Calls `visit` with each extent of data: its first byte, and the byte after its last.
    pub fn for_each_extent(&self, mut visit: impl FnMut(u64, u64)) {
        let mut position = 0;
        while position < self.size {
            // A device without holes is one extent.
            let start = match seek(&self.file, SeekFrom::Data(position)) {
                Err(Errno::NXIO) => break,
                found => found.unwrap_or(position),
            };
            let end = seek(&self.file, SeekFrom::Hole(start)).unwrap_or(self.size);
            visit(start, end.min(self.size));
            position = end.max(start + 1);
        }
    }

    /// The number of holes and their total length in bytes.
    pub fn holes(&self) -> (u64, u64) {
        let (mut count, mut data, mut position) = (0, 0, 0);
        self.for_each_extent(|start, end| {
            count += u64::from(start > position);
            data += end - start;
            position = end;
        });
        count += u64::from(self.size > position);
        (count, self.size - data)
    }
}

/// The file system beneath a path.
pub struct FileSystem {
    pub kind: String,
    pub free: u64,
    pub mount_point: Option<PathBuf>,
}

/// The file system that holds a path; `None` if its status cannot be read.
pub fn file_system(path: &Path) -> Option<FileSystem> {
    let status = rustix::fs::statfs(path).ok()?;
    let mount = mount_of(path);
    let kind = mount.as_ref().map_or_else(|| "unknown".to_owned(), |(_, kind)| kind.clone());
    let block = u64::try_from(status.f_frsize).unwrap_or(0);
    Some(FileSystem { kind, free: status.f_bavail * block, mount_point: mount.map(|m| m.0) })
}

/// The mount point and type of the longest mount point that contains the path.
fn mount_of(path: &Path) -> Option<(PathBuf, String)> {
    let path = fs::canonicalize(path).ok()?;
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    longest_mount(&mounts, &path)
}

fn longest_mount(mounts: &str, path: &Path) -> Option<(PathBuf, String)> {
    let entries = mounts.lines().filter_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let point = before.split(' ').nth(4)?.replace("\\040", " ");
        Some((PathBuf::from(point), after.split(' ').next()?.to_owned()))
    });
    // Of mounts on the same mount point, the last hides the others.
    entries
        .filter(|(point, _)| path.starts_with(point))
        .max_by_key(|(point, _)| point.as_os_str().len())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn holes_are_counted() {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        file.as_file().set_len(4 << 20).expect("a larger file");
        file.as_file().write_at(&[1; 4096], 1 << 20).expect("some data");
        let image = Image::open(file.path()).expect("the image opens");
        let (count, bytes) = image.holes();
        // A file system without holes reports none.
        assert!((count, bytes) == (2, (4 << 20) - 4096) || (count, bytes) == (0, 0));
        assert_eq!(image.size, 4 << 20);
    }

    #[test]
    fn the_innermost_mount_counts() {
        let mounts = "22 1 254:0 / / rw - ext4 /dev/vda rw\n\
                      30 22 0:30 / /mnt/a\\040b rw,nosuid shared:1 - xfs /dev/vdb rw\n\
                      31 22 0:31 / /mnt rw - tmpfs none rw\n";
        let find = |path: &str| longest_mount(mounts, Path::new(path)).expect("a mount").1;
        assert_eq!(find("/home/x"), "ext4");
        assert_eq!(find("/mnt/x"), "tmpfs");
        assert_eq!(find("/mnt/a b/x.img"), "xfs");
    }
}
