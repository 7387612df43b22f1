//! Checks the places of images: free space, and direct I/O.
use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
};

use fathom_control::Bytes;

use super::Finding;
use crate::{
    disk::{FileSystem, Image, file_system},
    failure::reason,
};

/// The least free space without a warning, in bytes.
const ROOM_MIN: u64 = 1 << 30;

/// Findings about an image or a directory for images.
pub fn findings(path: &Path) -> Vec<Finding> {
    let subject = path.display().to_string();
    let is_directory = match fs::metadata(path) {
        Ok(metadata) => metadata.is_dir(),
        Err(error) => {
            let remedy = "check the path and the permissions";
            return vec![Finding::fail(subject, reason(&error), remedy)];
        }
    };
    let mut findings = Vec::new();
    if let Some(below) = file_system(path) {
        findings.push(room(&subject, path, is_directory, &below));
    }
    findings.push(direct(&subject, path, is_directory));
    findings
}

fn room(subject: &str, path: &Path, is_directory: bool, below: &FileSystem) -> Finding {
    let free = Bytes(below.free);
    if !is_directory {
        if let Ok(image) = Image::open(path) {
            let growth = image.size.saturating_sub(image.allocated);
            if !image.is_device && growth > below.free {
                return Finding::warn(
                    subject,
                    format!("may grow by {}, but {free} are free", Bytes(growth)),
                    "watch the free space, or make room: a full file system gives guests I/O errors",
                );
            }
        }
    }
    if below.free < ROOM_MIN {
        return Finding::warn(subject, format!("only {free} free"), "make room");
    }
    Finding::ok(subject, format!("on {}, {free} free", below.kind))
}

/// Tries direct I/O on the image, or on a nameless file in the directory.
fn direct(subject: &str, path: &Path, is_directory: bool) -> Finding {
    let tried = if is_directory { direct_write(path) } else { direct_read(path) };
    match tried {
        Ok(()) => Finding::ok(subject, "direct I/O works"),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Finding::warn(
            subject,
            "its file system does not support direct I/O",
            "do not set `direct` for images here, or put them on ext4, XFS or Btrfs",
        ),
        Err(error) => Finding::warn(
            subject,
            format!("direct I/O could not be tested: {}", reason(&error)),
            "try again as the daemon's user",
        ),
    }
}

/// A block with the alignment that direct I/O needs.
#[repr(align(4096))]
struct Block([u8; 4096]);

fn direct_write(directory: &Path) -> io::Result<()> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_TMPFILE | libc::O_DIRECT)
        .open(directory)?;
    file.write_all_at(&Block([1; 4096]).0, 0)?;
    read_block(&file)
}

fn direct_read(path: &Path) -> io::Result<()> {
    read_block(&OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)?)
}

fn read_block(file: &File) -> io::Result<()> {
    file.read_at(&mut Block([0; 4096]).0, 0).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::super::CheckOutcome;
    use super::*;

    #[test]
    fn a_path_that_is_not_there_fails_and_a_directory_is_tried() {
        assert_eq!(findings(Path::new("/nowhere/at/all"))[0].state, CheckOutcome::Fail);
        let directory = tempfile::tempdir().expect("a directory");
        let findings = findings(directory.path());
        assert_eq!(findings.len(), 2);
        assert!(findings.iter().all(|finding| finding.state != CheckOutcome::Fail), "{findings:?}");
    }
}
