//! The VMM, as `/proc` shows it.

use std::fs::{self, File};
use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use fathom_failure::Failure;
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags};

/// The most bytes that are read of a file of `/proc`.
const TEXT_BYTES_MAX: u64 = 64 << 20;
/// What the link of a userfaultfd says.
pub(crate) const USERFAULT_LINK: &str = "anon_inode:[userfaultfd]";

/// A mapping of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ProcessMap {
    /// Its addresses.
    pub range: Range<u64>,
    pub is_shared: bool,
    pub is_writable: bool,
    pub is_executable: bool,
    /// The offset of its beginning in its file, in bytes.
    pub offset: u64,
    /// The device of its file, as `major:minor` in hexadecimal digits.
    pub device: String,
    /// The file's number; 0 without a file.
    pub inode: u64,
    /// The path, as the kernel shows it.
    pub path: String,
    /// `VmFlags` of `smaps`; empty if they were not asked for.
    pub flags: Vec<String>,
    /// The bytes that are mapped as huge pages, of `smaps`.
    pub huge_bytes: u64,
}

impl ProcessMap {
    /// Whether both are of the same file.
    pub fn is_of_file(&self, other: &Self) -> bool {
        self.inode != 0 && self.inode == other.inode && self.device == other.device
    }

    /// Whether the kernel says that its missing pages are reported to a userfaultfd.
    pub fn is_registered(&self) -> bool {
        self.flags.iter().any(|flag| flag == "um")
    }
}

/// An open descriptor of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ProcessFile {
    pub number: i32,
    /// What it is, as the kernel shows it.
    pub link: String,
}

/// A process that runs, and that no other can be mistaken for.
#[derive(Debug)]
pub struct Vmm {
    process: i32,
    start_ticks: u64,
    handle: OwnedFd,
}

impl Vmm {
    /// The process with this number.
    ///
    /// # Errors
    /// When there is none.
    pub fn open(process: i32) -> Result<Self, Failure> {
        let missing = || Failure::new(format!("there is no process {process}"));
        // A debug build of `Pid` accepts no negative number.
        let number = Pid::from_raw(process.max(0)).ok_or_else(missing)?;
        let handle = rustix::process::pidfd_open(number, PidfdFlags::empty())
            .map_err(|error| missing().because(error))?;
        let start_ticks = start_ticks(process).map_err(|error| missing().because(error))?;
        Ok(Self { process, start_ticks, handle })
    }

    /// Whether it has ended, also if nobody has collected it yet.
    pub(crate) fn has_ended(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut polled = [PollFd::new(&self.handle, PollFlags::IN)];
        poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
    }

    /// The process's number.
    pub fn process(&self) -> i32 {
        self.process
    }

    /// When it started, in ticks of the kernel's clock since the boot.
    pub fn start_ticks(&self) -> u64 {
        self.start_ticks
    }

    /// A file of the process in `/proc`.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        format!("/proc/{}/{name}", self.process).into()
    }

    /// A file of the process in `/proc`, as text.
    pub(crate) fn text(&self, name: &str) -> io::Result<String> {
        text(&self.path(name))
    }

    /// A line of the process's status, without its name.
    pub(crate) fn status(&self, name: &str) -> io::Result<String> {
        let text = self.text("status")?;
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        Ok(line.unwrap_or_default().trim().to_owned())
    }

    /// The open descriptors.
    ///
    /// # Errors
    /// Without the right to trace the process.
    pub(crate) fn files(&self) -> io::Result<Vec<ProcessFile>> {
        let mut files = Vec::new();
        for entry in fs::read_dir(self.path("fd"))? {
            let entry = entry?;
            let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
            match (number, fs::read_link(entry.path())) {
                (Some(number), Ok(link)) => {
                    files.push(ProcessFile { number, link: link.to_string_lossy().into_owned() });
                }
                // It was closed meanwhile.
                (_, Err(error)) if error.kind() == io::ErrorKind::NotFound => {}
                (_, Err(error)) => return Err(error),
                (None, Ok(_)) => {}
            }
        }
        Ok(files)
    }

    /// The numbers of its descriptors that are userfaultfds.
    pub(crate) fn userfaults(&self) -> io::Result<Vec<i32>> {
        let is_one = |file: &ProcessFile| file.link == USERFAULT_LINK;
        Ok(self.files()?.into_iter().filter(is_one).map(|file| file.number).collect())
    }

    /// The numbers of its descriptors that have the device `device` open.
    pub(crate) fn devices(&self, device: BorrowedFd<'_>) -> io::Result<Vec<i32>> {
        let wanted = rustix::fs::fstat(device)?.st_rdev;
        let is_one = |file: &i32| {
            let found = fs::metadata(self.path(&format!("fd/{file}")));
            found.is_ok_and(|found| found.rdev() == wanted)
        };
        Ok(self.files()?.into_iter().map(|file| file.number).filter(is_one).collect())
    }

    /// A copy of one of its descriptors.
    pub(crate) fn fetch(&self, descriptor: i32) -> io::Result<OwnedFd> {
        Ok(rustix::process::pidfd_getfd(&self.handle, descriptor, PidfdGetfdFlags::empty())?)
    }

    /// The mappings of any process.
    pub(crate) fn mappings_of(process: i32) -> io::Result<Vec<ProcessMap>> {
        Ok(parse(&text(&format!("/proc/{process}/maps").into())?))
    }

    /// Its mappings with flags and huge pages. It takes a few milliseconds for each GiB that is
    /// mapped.
    pub(crate) fn detailed_mappings(&self) -> io::Result<Vec<ProcessMap>> {
        Ok(parse(&self.text("smaps")?))
    }

    /// The bytes of its memory whose missing pages are reported to a userfaultfd, by the kernel's
    /// own account.
    ///
    /// # Errors
    /// When it has ended, or without the right to trace it.
    pub fn registered_bytes(&self) -> io::Result<u64> {
        let maps = self.detailed_mappings()?;
        let registered = maps.iter().filter(|map| map.is_registered());
        Ok(registered.map(|map| map.range.end - map.range.start).sum())
    }

    /// Opens the file of a mapping with these flags: by a descriptor that the process still has, or
    /// by the mapping.
    pub(crate) fn open_file(&self, map: &ProcessMap, flags: OFlags) -> io::Result<File> {
        let Range { start, end } = map.range;
        let is_it = |found: fs::Metadata| {
            found.ino() == map.inode && device_text(found.dev()) == map.device
        };
        let files = self.files()?;
        let mut paths = files.iter().map(|file| self.path(&format!("fd/{}", file.number)));
        let path = paths.find(|path| fs::metadata(path).is_ok_and(is_it));
        let path = path.unwrap_or_else(|| self.path(&format!("map_files/{start:x}-{end:x}")));
        Ok(rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())?.into())
    }
}

/// Readable when the process has ended.
impl AsFd for Vmm {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.handle.as_fd()
    }
}

/// Whether a process of this namespace has ended for certain.
pub(crate) fn is_gone(process: i32, ticks: u64) -> bool {
    match start_ticks(process) {
        Ok(now) => now != ticks,
        // It may be hidden.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let number = Pid::from_raw(process.max(0));
            let found = number.map(rustix::process::test_kill_process);
            found.is_none_or(|found| found == Err(rustix::io::Errno::SRCH))
        }
        Err(_) => false,
    }
}

/// The namespace of this process's number; 0 if it is not known.
pub(crate) fn namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |found| found.ino())
}

/// When a process started.
fn start_ticks(process: i32) -> io::Result<u64> {
    let text = text(&format!("/proc/{process}/stat").into())?;
    // The name before it may contain anything.
    let rest = text.rsplit_once(')').map_or("", |(_, rest)| rest);
    let word = rest.split_whitespace().nth(19);
    word.and_then(|word| word.parse().ok()).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

pub(crate) fn text(path: &PathBuf) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(TEXT_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// A device as `maps` shows it.
fn device_text(device: u64) -> String {
    format!("{:02x}:{:02x}", rustix::fs::major(device), rustix::fs::minor(device))
}

/// The mappings of `maps` or `smaps`.
fn parse(text: &str) -> Vec<ProcessMap> {
    let mut found: Vec<ProcessMap> = Vec::new();
    for line in text.lines() {
        if let Some(map) = heading(line) {
            found.push(map);
        } else if let (Some(last), Some((name, value))) = (found.last_mut(), line.split_once(':')) {
            match name {
                "VmFlags" => last.flags = value.split_whitespace().map(str::to_owned).collect(),
                "ShmemPmdMapped" | "FilePmdMapped" | "Shared_Hugetlb" | "Private_Hugetlb" => {
                    let kib = value.split_whitespace().next().and_then(|word| word.parse().ok());
                    last.huge_bytes += kib.unwrap_or(0_u64).saturating_mul(1024);
                }
                _ => {}
            }
        }
    }
    found
}

/// `START-END rwxs OFFSET MAJOR:MINOR INODE PATH`
fn heading(line: &str) -> Option<ProcessMap> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let range = u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?;
    let rights = words.next()?;
    let offset = u64::from_str_radix(words.next()?, 16).ok()?;
    let device = words.next()?.to_owned();
    let inode = words.next()?.parse().ok()?;
    let path = words.collect::<Vec<_>>().join(" ");
    Some(ProcessMap {
        range,
        is_shared: rights.ends_with('s'),
        is_writable: rights.contains('w'),
        is_executable: rights.contains('x'),
        offset,
        device,
        inode,
        path,
        ..ProcessMap::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_are_read_with_their_flags() {
        let text = "\
7f00-7f80 rw-s 00001000 00:01 77   /memfd:a b (deleted)\nSize: 8 kB\nShmemPmdMapped:     2048 kB
VmFlags: rd wr sh um hg \n7f80-7f90 r-xp 00000000 08:02 5   /usr/lib/libc.so.6\n7f90-7fa0 rw-p 0 00:00 0 \n";
        let found = parse(text);
        assert_eq!(found.len(), 3);
        assert_eq!(
            (&found[0].range, found[0].offset, found[0].inode),
            (&(0x7f00..0x7f80), 4096, 77)
        );
        assert!(found[0].is_shared && found[0].is_writable && !found[0].is_executable);
        assert!(found[0].is_registered() && !found[1].is_registered());
        assert_eq!(
            (found[0].path.as_str(), found[0].huge_bytes),
            ("/memfd:a b (deleted)", 2 << 20)
        );
        assert!(found[1].is_executable && !found[1].is_shared);
        assert!(found[0].is_of_file(&found[0].clone()) && !found[0].is_of_file(&found[1]));
        assert!(!found[2].is_of_file(&found[2].clone()), "no file is nobody's");
    }

    #[test]
    fn this_process_is_found_and_no_other() {
        let own = Vmm::open(std::process::id() as i32).unwrap();
        assert!(own.start_ticks() > 0);
        assert_eq!(own.status("TracerPid").unwrap(), "0");
        assert!(own.files().unwrap().len() > 2);
        assert!(Vmm::open(1 << 23).is_err());
        assert!(Vmm::open(0).is_err() && Vmm::open(-5).is_err());
    }
}
