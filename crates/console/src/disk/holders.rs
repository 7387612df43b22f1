//! Which processes have an image open, and which of them have locked it.
use std::{fmt, fs, io, os::unix::fs::MetadataExt, path::Path};

use rustix::fs::{AtFlags, CWD, StatxFlags, makedev, statx};
use serde::Serialize;

use crate::process;

/// A process that has an image open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Holder {
    /// The process.
    pub process_id: i32,
    /// Its name.
    pub name: String,
    /// Whether it may write.
    pub writes: bool,
    /// Whether it holds a lock.
    pub locks: bool,
}

impl fmt::Display for Holder {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} (process {}, ", self.name, self.process_id)?;
        formatter.write_str(if self.writes { "for writing" } else { "for reading" })?;
        formatter.write_str(if self.locks { ", locked)" } else { ")" })
    }
}

/// The processes that have the file open, except this process. Only root sees those of other users.
pub fn of(path: &Path) -> Vec<Holder> {
    let Ok(image) = fs::metadata(path) else { return Vec::new() };
    let own = std::process::id() as i32;
    let mut holders: Vec<Holder> = numbers(Path::new("/proc"))
        .filter(|&process_id| process_id != own)
        .filter_map(|process_id| holder(process_id, image.dev(), image.ino()))
        .collect();
    holders.sort_by_key(|holder| holder.process_id);
    holders
}

/// The entries of a directory that are numbers.
fn numbers(directory: &Path) -> impl Iterator<Item = i32> + use<> {
    let entries = fs::read_dir(directory).into_iter().flatten();
    entries.filter_map(io::Result::ok).filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn holder(process_id: i32, device: u64, inode: u64) -> Option<Holder> {
    let root = format!("/proc/{process_id}");
    let mut found: Option<Holder> = None;
    for fd in numbers(Path::new(&format!("{root}/fd"))) {
        let info = fs::read_to_string(format!("{root}/fdinfo/{fd}")).unwrap_or_default();
        // Before anything is asked about the file: its server may hang. Kernels before 5.14 do not
        // say the number.
        if number(&info, "ino:").is_some_and(|number| number != inode) {
            continue;
        }
        if identity(&format!("{root}/fd/{fd}")) != Some((device, inode)) {
            continue;
        }
        let holder = found.get_or_insert_with(|| Holder {
            process_id,
            name: process::name(process_id).unwrap_or_else(|| "?".into()),
            writes: false,
            locks: false,
        });
        holder.writes |= access(&info).is_some_and(|access| access != libc::O_RDONLY);
        holder.locks |= info.lines().any(|line| line.starts_with("lock:"));
    }
    found
}

/// The device and the number of an open file, also of one that has been renamed or removed, as far
/// as the kernel knows them without asking the server of its file system.
fn identity(link: &str) -> Option<(u64, u64)> {
    let found = statx(CWD, link, AtFlags::STATX_DONT_SYNC, StatxFlags::INO).ok()?;
    Some((makedev(found.stx_dev_major, found.stx_dev_minor), found.stx_ino))
}

/// A number of a `fdinfo` file.
fn number(info: &str, name: &str) -> Option<u64> {
    info.lines().find_map(|line| line.strip_prefix(name))?.trim().parse().ok()
}

/// The access mode in a `fdinfo` file.
fn access(info: &str) -> Option<i32> {
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"))?;
    Some(i32::from_str_radix(flags.trim(), 8).ok()? & libc::O_ACCMODE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_modes_are_read_in_octal() {
        assert_eq!(access("pos:\t0\nflags:\t02100002\nmnt_id:\t30\n"), Some(libc::O_RDWR));
        assert_eq!(access("flags:\t0100000\n"), Some(libc::O_RDONLY));
        assert_eq!(access("pos: 0"), None);
        assert_eq!(number("pos:\t0\nino:\t1033\n", "ino:"), Some(1033));
    }

    #[test]
    fn a_child_that_holds_a_file_is_found() {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        let output = file.reopen().expect("the same file again");
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .stdout(output)
            .spawn()
            .expect("sleep is there");
        let holders = of(file.path());
        child.kill().expect("the child is killed");
        child.wait().expect("the child has ended");
        assert_eq!(holders.len(), 1);
        assert_eq!(holders[0].process_id, child.id() as i32);
        assert!(holders[0].writes && !holders[0].locks);
    }
}
