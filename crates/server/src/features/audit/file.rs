//! The file of the audit log, and the one before it.

use std::collections::VecDeque;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use fathom_control::AuditEntry;

/// The length at which the file is replaced, in bytes.
pub(super) const FILE_LENGTH_MAX: u64 = 8 << 20;
/// The most bytes of a line that is read. A line that is written has fewer.
const LINE_LENGTH_MAX: u64 = 256 << 10;

/// The file that is written.
pub(super) struct AuditFile {
    path: PathBuf,
    open: Option<(File, u64)>,
}

/// What was read.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) entries: Vec<AuditEntry>,
    pub(super) unreadable: u64,
}

fn older(path: &Path) -> PathBuf {
    path.with_extension("jsonl.old")
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    // A link would let whoever can make files in the folder choose what is written or read.
    options.mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    options
}

impl AuditFile {
    pub(super) fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), open: None }
    }

    /// Adds entries, and makes them durable.
    ///
    /// # Errors
    /// If some of them may be missing. The file is opened again next time.
    pub(super) fn append(&mut self, entries: &[AuditEntry]) -> io::Result<()> {
        let mut text = Vec::new();
        for entry in entries {
            serde_json::to_writer(&mut text, entry)?;
            text.push(b'\n');
        }
        if text.is_empty() {
            return Ok(());
        }
        self.write(&text)
    }

    fn write(&mut self, text: &[u8]) -> io::Result<()> {
        let (mut file, mut length) = match self.open.take() {
            Some(open) => open,
            None => open(&self.path)?,
        };
        if length >= FILE_LENGTH_MAX {
            std::fs::rename(&self.path, older(&self.path))?;
            (file, length) = open(&self.path)?;
        }
        file.write_all(text)?;
        file.sync_data()?;
        self.open = Some((file, length + text.len() as u64));
        Ok(())
    }
}

/// Opens the file, and ends a line that was cut off.
fn open(path: &Path) -> io::Result<(File, u64)> {
    let opened = options().read(true).append(true).create(true).open(path);
    let mut file = match (opened, path.parent()) {
        (Err(error), Some(folder)) if error.kind() == io::ErrorKind::NotFound => {
            DirBuilder::new().mode(0o700).create(folder)?;
            options().read(true).append(true).create(true).open(path)?
        }
        (opened, _) => opened?,
    };
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is no file"));
    }
    let mut length = file.seek(SeekFrom::End(0))?;
    let mut last = [b'\n'];
    if length > 0 {
        file.seek(SeekFrom::Start(length - 1))?;
        file.read_exact(&mut last)?;
    }
    if last != *b"\n" {
        file.write_all(b"\n")?;
        length += 1;
    }
    Ok((file, length))
}

/// The last `count` entries that ended after the time `after`, in nanoseconds since 1970.
pub(super) fn read(path: &Path, count: usize, after: u64) -> io::Result<Found> {
    let mut kept = VecDeque::new();
    let mut unreadable = 0;
    for path in [older(path), path.to_owned()] {
        let file = match options().read(true).open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        if !file.metadata()?.is_file() {
            return Err(io::Error::other("it is no file"));
        }
        // A file that somebody made longer is read up to twice the length.
        let mut reader = BufReader::new(file.take(2 * FILE_LENGTH_MAX));
        let mut line = Vec::new();
        loop {
            line.clear();
            let length = (&mut reader).take(LINE_LENGTH_MAX).read_until(b'\n', &mut line)?;
            if length == 0 {
                break;
            }
            match serde_json::from_slice::<AuditEntry>(&line) {
                Ok(entry) if entry.unix_time_ns > after => {
                    kept.push_back(entry);
                    if kept.len() > count {
                        kept.pop_front();
                    }
                }
                Ok(_) => {}
                Err(_) => unreadable += u64::from(line != b"\n"),
            }
        }
    }
    Ok(Found { entries: kept.into(), unreadable })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(number: u64) -> AuditEntry {
        let request = format!("POST /v1/disks {}", "x".repeat(1000));
        AuditEntry { unix_time_ns: number, request, ..AuditEntry::default() }
    }

    fn numbers(path: &Path, count: usize, after: u64) -> Vec<u64> {
        read(path, count, after).unwrap().entries.iter().map(|it| it.unix_time_ns).collect()
    }

    #[test]
    fn the_last_entries_are_kept_over_restarts_and_are_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit-a.jsonl");
        assert_eq!(numbers(&path, 10, 0), [0; 0]);
        let count = 3 * FILE_LENGTH_MAX / 1000;
        for first in (1..=count).step_by(100) {
            // A daemon each: what it finds is continued.
            let entries: Vec<_> = (first..first + 100).map(entry).collect();
            AuditFile::new(&path).append(&entries).unwrap();
        }
        let mut file = AuditFile::new(&path);
        file.append(&[entry(1 << 40)]).unwrap();
        let found = numbers(&path, 100_000, 0);
        assert_eq!(found.last(), Some(&(1 << 40)));
        assert!(found.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(found.len() as u64 > FILE_LENGTH_MAX / 1100, "{}", found.len());
        assert_eq!(numbers(&path, 2, 0).len(), 2);
        assert_eq!(numbers(&path, 10, (1 << 40) - 1), [1 << 40]);
        let lengths = [&path, &older(&path)].map(|path| path.metadata().unwrap().len());
        assert!(lengths.iter().all(|length| *length < FILE_LENGTH_MAX + (1 << 20)), "{lengths:?}");
    }

    #[test]
    fn a_line_that_was_cut_off_or_is_rubbish_costs_itself_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit-a.jsonl");
        AuditFile::new(&path).append(&[entry(1)]).unwrap();
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(b"{\"unix_time_ns\": 2, \"req").unwrap();
        AuditFile::new(&path).append(&[entry(3)]).unwrap();
        file.write_all(&b"[".repeat(600 << 10)).unwrap();
        AuditFile::new(&path).append(&[entry(4)]).unwrap();
        let found = read(&path, 10, 0).unwrap();
        let numbers: Vec<_> = found.entries.iter().map(|it| it.unix_time_ns).collect();
        assert_eq!(numbers, [1, 3, 4]);
        assert!(found.unreadable >= 2, "{}", found.unreadable);
    }

    #[test]
    fn a_link_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit-a.jsonl");
        let other = folder.path().join("other");
        std::fs::write(&other, "").unwrap();
        std::os::unix::fs::symlink(&other, &path).unwrap();
        assert!(AuditFile::new(&path).append(&[entry(1)]).is_err());
        assert!(read(&path, 1, 0).is_err());
        assert_eq!(std::fs::read(&other).unwrap(), b"");
    }
}
