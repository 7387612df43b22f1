//! The mark of an image whose last changes are in a log elsewhere.
//!
//! While a disk has the layer `wal`, its image alone may be out of date: without the log it is an
//! older state of the disk, or a torn one. So the image is marked before the first change is
//! acknowledged, and the mark is removed when the log has been emptied.

use std::ffi::CStr;
use std::fmt::Write as _;
use std::io;
use std::path::Path;

use fathom_persistence::Identity;

use crate::marks::remove_all;
use crate::place::{MarkLocation, end_of};

/// The extended attribute.
const ATTRIBUTE: &CStr = c"user.fathom.log";
/// The suffix of the file beside an image.
const SUFFIX: &str = ".fathom-log";

/// A log that holds changes of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MarkedLog {
    /// The identity of the log.
    pub identity: Identity,
    /// The age of the pair of log and image; `None` in a mark of an earlier version.
    pub age: Option<u64>,
    /// Where the log begins in its volume, in bytes; 0 in a mark of an earlier version.
    pub offset: u64,
    /// The path of the log when the mark was written, for messages. Of a long path, the end is
    /// kept.
    pub path: String,
}

/// The place of the mark of one image or device.
pub struct LogMark {
    place: MarkLocation,
}

impl LogMark {
    /// The mark of the image at `path`. `folder` is the daemon's folder, which had the marks of
    /// block devices in earlier versions.
    ///
    /// # Errors
    /// When the image cannot be opened.
    pub fn open(path: &Path, folder: &Path) -> io::Result<Self> {
        Self::open_named(path, folder, None)
    }

    /// The same for a block device to which the operator has given the name `key`, if any.
    ///
    /// # Errors
    /// When the image cannot be opened.
    pub fn open_named(path: &Path, folder: &Path, key: Option<&str>) -> io::Result<Self> {
        Ok(Self { place: MarkLocation::open(path, folder, key, ATTRIBUTE, SUFFIX)? })
    }

    /// Why the image can have no mark: it is a block device without a name that is lasting and its
    /// own, and the operator has given none. `None` for others.
    pub fn lacks_key(&self) -> Option<&str> {
        self.place.lacks_key()
    }

    /// The name of the image for those that belong to it: its path, or, of a block device, `device`
    /// and its key.
    pub fn home(&self) -> String {
        self.place.home()
    }

    /// The log that holds changes of the image; `None` if the image is not marked.
    ///
    /// # Errors
    /// When the mark cannot be read or is damaged, or [belongs to another image](Self::is_foreign).
    pub fn read(&self) -> io::Result<Option<MarkedLog>> {
        let Some(found) = self.place.read()? else { return Ok(None) };
        let invalid = |text| io::Error::new(io::ErrorKind::InvalidData, text);
        if found.is_foreign {
            return Err(invalid("its mark was written for another image or device"));
        }
        parse(&found.text).map(Some).ok_or_else(|| invalid("the mark is damaged"))
    }

    /// Whether the mark was written for another image or device, which this one may have replaced
    /// at its path. Its log must not be used for this one.
    ///
    /// # Errors
    /// When the mark cannot be read.
    pub fn is_foreign(&self) -> io::Result<bool> {
        Ok(self.place.read()?.is_some_and(|found| found.is_foreign))
    }

    /// Marks the image: `log` holds changes of it. On return, the mark is durable.
    ///
    /// # Errors
    /// When the mark cannot be written.
    pub fn write(&self, log: &MarkedLog) -> io::Result<()> {
        self.place.write(&encode(log))
    }

    /// Moves the mark of a device to where this version has it, from where an earlier version had
    /// it.
    ///
    /// # Errors
    /// When the mark cannot be moved. It stays then.
    pub fn migrate(&self) -> io::Result<()> {
        self.place.migrate()
    }

    /// Removes the marks of block devices that name the log, whichever devices they are. Returns
    /// whether there was one. `folder` is as for [`open`](Self::open).
    ///
    /// # Errors
    /// When a mark cannot be read or removed.
    pub fn clear_of_devices(log: Identity, folder: &Path) -> io::Result<bool> {
        let names = |text: &[u8]| parse(text).is_some_and(|found| found.identity == log);
        Ok(remove_all(folder, SUFFIX, names)? > 0)
    }

    /// Removes the mark: the image has all changes, or the operator has decided to do without those
    /// that it lacks.
    ///
    /// # Errors
    /// When the mark cannot be removed. The image can then be served only with its log.
    pub fn clear(&self) -> io::Result<()> {
        self.place.clear()
    }
}

fn encode(log: &MarkedLog) -> Vec<u8> {
    let mut text = format!("{} ", log.identity);
    if let Some(age) = log.age {
        let _ = write!(text, "{age} {} ", log.offset);
    }
    text.push_str(end_of(&log.path, text.len()));
    text.into_bytes()
}

fn parse(text: &[u8]) -> Option<MarkedLog> {
    let (hex, rest) = std::str::from_utf8(text).ok()?.split_once(' ')?;
    // A path is absolute, or a URI.
    let mut parts = rest.splitn(3, ' ');
    let mut number = || parts.next()?.parse().ok();
    let (age, offset) = (number(), number());
    let (age, offset, path) = match (age, offset, parts.next()) {
        (Some(age), Some(offset), Some(path)) => (Some(age), offset, path),
        _ => (None, 0, rest),
    };
    Some(MarkedLog { identity: Identity::parse(hex)?, age, offset, path: path.to_owned() })
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_mark_of_an_earlier_version_has_no_age() {
        let mark = |text: &str| parse(text.as_bytes()).map(|log| (log.age, log.path));
        let hex = "30".repeat(16);
        assert_eq!(mark(&format!("{hex} /fast/12 logs")), Some((None, "/fast/12 logs".into())));
        let (age, offset, path) = (Some(12), 4096, "/1 2".to_owned());
        let with_age = MarkedLog { identity: Identity([0x30; 16]), age, offset, path };
        assert_eq!(encode(&with_age), format!("{hex} 12 4096 /1 2").into_bytes());
        assert_eq!(parse(&encode(&with_age)), Some(with_age));
    }

    #[test]
    fn a_mark_in_a_file_replaces_an_attribute() {
        let folder = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = folder.path().join("a.img");
        File::create(&path).unwrap();
        let mark = LogMark::open(&path, folder.path()).unwrap();
        mark.place.write(b"the first").unwrap();
        // No attribute has so many bytes.
        mark.place.write(&vec![b'x'; 70_000]).unwrap();
        assert!(mark.place.test_file().exists());
        assert_eq!(mark.place.read().unwrap().unwrap().text.first(), Some(&b'x'));
    }

    #[test]
    fn a_mark_beside_an_image_does_not_belong_to_its_successor() {
        for folder in [tempfile::tempdir_in("/var/tmp").unwrap(), tempfile::tempdir().unwrap()] {
            let path = folder.path().join("a.img");
            let open = || {
                let mark = LogMark::open(&path, folder.path()).unwrap();
                LogMark { place: mark.place.without_attributes() }
            };
            File::create(&path).unwrap();
            let log = MarkedLog {
                identity: Identity(*b"0123456789abcdef"),
                age: Some(7),
                offset: 4096,
                path: "/fast/logs".into(),
            };
            open().write(&log).unwrap();
            assert_eq!(open().read().unwrap(), Some(log.clone()));
            // A file system notes times in steps, and may give the number of the old file to the
            // new one.
            std::thread::sleep(std::time::Duration::from_millis(30));
            std::fs::rename(&path, folder.path().join("old.img")).unwrap();
            File::create(&path).unwrap();
            let mark = open();
            assert!(mark.is_foreign().unwrap());
            let error = mark.read().unwrap_err().to_string();
            assert!(error.contains("another image"), "{error}");
            let text = std::fs::read_to_string(mark.place.test_file()).unwrap();
            let (text, _) = text.rsplit_once('\n').unwrap();
            std::fs::write(mark.place.test_file(), text).unwrap();
            assert!(!mark.is_foreign().unwrap());
            assert_eq!(mark.read().unwrap(), Some(log.clone()));
            mark.write(&log).unwrap();
            assert_eq!(open().read().unwrap(), Some(log));
        }
    }

    #[test]
    fn a_mark_is_found_at_every_open_until_it_is_removed() {
        // A file system with extended attributes, and the tests' own, which may have none.
        for folder in [tempfile::tempdir_in("/var/tmp").unwrap(), tempfile::tempdir().unwrap()] {
            let path = folder.path().join("a.img");
            File::create(&path).unwrap();
            let mark = LogMark::open(&path, folder.path()).unwrap();
            assert_eq!(mark.read().unwrap(), None);
            let log = MarkedLog {
                identity: Identity(*b"0123456789abcdef"),
                age: Some(7),
                offset: 4096,
                path: "/fast/logs".into(),
            };
            mark.write(&log).unwrap();
            let link = folder.path().join("link");
            std::os::unix::fs::symlink(&path, &link).unwrap();
            let other = LogMark::open(&link, folder.path()).unwrap();
            assert_eq!(other.read().unwrap(), Some(log.clone()));
            let long = MarkedLog { path: "\u{e4}".repeat(2000), ..log.clone() };
            mark.write(&long).unwrap();
            let found = other.read().unwrap().unwrap();
            assert!(found.identity == log.identity && long.path.ends_with(&found.path));
            other.clear().unwrap();
            assert_eq!(mark.read().unwrap(), None);
            other.clear().unwrap();
            // If the image has no attributes, a file beside it has the mark.
            let beside = LogMark { place: other.place.without_attributes() };
            beside.write(&log).unwrap();
            assert_eq!(mark.read().unwrap(), Some(log.clone()));
            std::fs::write(beside.place.test_file(), "0123 /fast/logs").unwrap();
            assert!(mark.read().is_err());
            mark.clear().unwrap();
            assert_eq!(mark.read().unwrap(), None);
        }
    }
}
