//! The mark of an image whose last changes are in a log elsewhere.
//!
//! While a disk has the layer `wal`, its image alone may be out of date: without the log it is an
//! older state of the disk, or a torn one. So the image is marked before the first change is
//! acknowledged, and the mark is removed when the log has been emptied. The mark is an extended
//! attribute of the image if its file system supports them, else a file beside the image. The mark
//! of a block device is a file in the daemon's folder, named after the device's path. The mark has
//! to survive a crash of the host, so it is synchronised.

use std::ffi::CStr;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{XattrFlags, fgetxattr, fremovexattr, fsetxattr};

/// The extended attribute.
const ATTRIBUTE: &CStr = c"user.fathom.log";
/// The suffix of the file beside an image.
const SUFFIX: &str = ".fathom-log";
/// The longest mark, in bytes.
const LENGTH_MAX: usize = 1024;
const IDENTITY_LENGTH: usize = 16;

/// A log that holds changes of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MarkedLog {
    /// The identity of the log.
    pub identity: [u8; IDENTITY_LENGTH],
    /// The path of the log when the mark was written, for messages. Of a long path, the end is
    /// kept.
    pub path: String,
}

/// The place of the mark of one image or device.
pub struct LogMark {
    path: PathBuf,
    image: File,
    /// Whether the image can have extended attributes.
    has_attributes: bool,
    file: PathBuf,
}

impl LogMark {
    /// The mark of the image at `path`. `folder` is the daemon's folder, for marks of block
    /// devices.
    ///
    /// # Errors
    /// When the image cannot be opened.
    pub fn open(path: &Path, folder: &Path) -> io::Result<Self> {
        let path = path.canonicalize()?;
        let image = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path)?;
        let is_device = image.metadata()?.file_type().is_block_device();
        let file = if is_device {
            let name = path.to_string_lossy().replace('/', "-");
            folder.join(format!("device{name}{SUFFIX}"))
        } else {
            let mut beside = path.clone().into_os_string();
            beside.push(SUFFIX);
            beside.into()
        };
        Ok(Self { path, image, has_attributes: !is_device, file })
    }

    /// The log that holds changes of the image; `None` if the image is not marked.
    ///
    /// # Errors
    /// When the mark cannot be read or is damaged.
    pub fn read(&self) -> io::Result<Option<MarkedLog>> {
        let text = match self.read_attribute()? {
            None => self.read_file()?,
            found => found,
        };
        let Some(text) = text else { return Ok(None) };
        let damaged = || io::Error::new(io::ErrorKind::InvalidData, "the mark is damaged");
        parse(&text).map(Some).ok_or_else(damaged)
    }

    /// Marks the image: `log` holds changes of it. On return, the mark is durable.
    ///
    /// # Errors
    /// When the mark cannot be written.
    pub fn write(&self, log: &MarkedLog) -> io::Result<()> {
        let text = encode(log);
        if self.has_attributes
            && fsetxattr(&self.image, ATTRIBUTE, &text, XattrFlags::empty()).is_ok()
        {
            return self.image.sync_all();
        }
        let mut draft = self.file.clone().into_os_string();
        draft.push(".new");
        let draft = PathBuf::from(draft);
        match std::fs::remove_file(&draft) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // `create_new` does not follow a link that another user may have put there.
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&draft)?;
        file.write_all(&text)?;
        file.sync_all()?;
        std::fs::rename(&draft, &self.file)?;
        self.sync_folder()
    }

    /// Removes the mark: the image has all changes.
    ///
    /// # Errors
    /// When the mark cannot be removed. The image can then be served only with its log.
    pub fn clear(&self) -> io::Result<()> {
        if self.read_attribute()?.is_some() {
            fremovexattr(&self.image, ATTRIBUTE)?;
            self.image.sync_all()?;
        }
        match std::fs::remove_file(&self.file) {
            Ok(()) => self.sync_folder(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// The instruction that messages give for the removal of the mark by hand.
    pub fn removal(&self) -> String {
        match self.read_attribute() {
            Ok(None) => format!("remove the file {}", self.file.display()),
            _ => {
                format!("run `setfattr -x {} {}`", ATTRIBUTE.to_string_lossy(), self.path.display())
            }
        }
    }

    fn sync_folder(&self) -> io::Result<()> {
        File::open(self.file.parent().unwrap_or(Path::new("/")))?.sync_all()
    }

    fn read_attribute(&self) -> io::Result<Option<Vec<u8>>> {
        use rustix::io::Errno;
        if !self.has_attributes {
            return Ok(None);
        }
        let mut text = vec![0; LENGTH_MAX];
        match fgetxattr(&self.image, ATTRIBUTE, &mut text) {
            Ok(length) => {
                text.truncate(length);
                Ok(Some(text))
            }
            // The image has no mark, or its file system has no attributes.
            Err(Errno::NODATA | Errno::NOTSUP | Errno::PERM | Errno::NOSYS) => Ok(None),
            // The attribute is longer than any mark: an empty text is reported as damaged.
            Err(Errno::RANGE) => Ok(Some(Vec::new())),
            Err(error) => Err(error.into()),
        }
    }

    fn read_file(&self) -> io::Result<Option<Vec<u8>>> {
        let opened = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(&self.file);
        let file = match opened {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        let mut text = Vec::new();
        file.take(LENGTH_MAX as u64).read_to_end(&mut text)?;
        Ok(Some(text))
    }
}

fn encode(log: &MarkedLog) -> Vec<u8> {
    let mut text = String::new();
    for byte in log.identity {
        let _ = write!(text, "{byte:02x}");
    }
    text.push(' ');
    let mut start = log.path.len().saturating_sub(LENGTH_MAX - text.len());
    while !log.path.is_char_boundary(start) {
        start += 1;
    }
    text.push_str(&log.path[start..]);
    text.into_bytes()
}

fn parse(text: &[u8]) -> Option<MarkedLog> {
    let (hex, path) = std::str::from_utf8(text).ok()?.split_once(' ')?;
    let mut identity = [0; IDENTITY_LENGTH];
    if hex.len() != 2 * IDENTITY_LENGTH || !hex.is_ascii() {
        return None;
    }
    for (index, byte) in identity.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&hex[2 * index..2 * index + 2], 16).ok()?;
    }
    Some(MarkedLog { identity, path: path.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_found_at_every_open_until_it_is_removed() {
        // A file system with extended attributes, and the tests' own, which may have none.
        for folder in [tempfile::tempdir_in("/var/tmp").unwrap(), tempfile::tempdir().unwrap()] {
            let path = folder.path().join("a.img");
            File::create(&path).unwrap();
            let mark = LogMark::open(&path, folder.path()).unwrap();
            assert_eq!(mark.read().unwrap(), None);
            let log = MarkedLog { identity: *b"0123456789abcdef", path: "/fast/logs".into() };
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
            let beside = LogMark { has_attributes: false, ..other };
            beside.write(&log).unwrap();
            assert_eq!(mark.read().unwrap(), Some(log.clone()));
            assert!(mark.removal().contains("a.img.fathom-log"), "{}", mark.removal());
            std::fs::write(&beside.file, "0123 /fast/logs").unwrap();
            assert!(mark.read().is_err());
            mark.clear().unwrap();
            assert_eq!(mark.read().unwrap(), None);
        }
    }
}
