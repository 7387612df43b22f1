//! The marks of block devices. They lie in one folder of the host, so that every daemon and every
//! command finds them, whichever folder of its own it has; no byte of a device is free for a mark.
//! Each is named after the [key](Facts::key) of its device, which stays when the device gets
//! another path or number, or after the name that the operator has given to the device. A device
//! without such a name, or with one that another device has too, can have no mark.
//!
//! Earlier versions named the marks after paths and kept them in the folder of each daemon. They
//! are found there, by the facts in the mark or by the path, and moved when the mark is written
//! again.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use fathom_failure::Failure;

use crate::device::has_twin;
use crate::facts::Facts;
use crate::place::read_mark;

/// The environment variable with the folder.
const FOLDER_VARIABLE: &str = "FATHOM_MARKS";
/// The folder if the variable is not set.
const FOLDER: &str = "/var/lib/fathom/marks";
/// The most files of a folder that are examined.
const FILES_MAX: usize = 10_000;
/// The longest part of a key that a file's name shows, in bytes.
const SHOWN_LENGTH_MAX: usize = 80;

/// The folder of the host for marks of block devices: `$FATHOM_MARKS`, or `/var/lib/fathom/marks`.
pub fn marks_folder() -> PathBuf {
    let set = std::env::var_os(FOLDER_VARIABLE).filter(|folder| !folder.is_empty());
    set.map_or_else(|| FOLDER.into(), PathBuf::from)
}

/// The places of one kind of mark of one device.
pub(crate) struct DeviceMarks {
    suffix: &'static str,
    folder: PathBuf,
    /// The folder in which an earlier version had the marks.
    earlier_folder: PathBuf,
    /// The file in which an earlier version had the mark.
    earlier: PathBuf,
    /// The name of the device, or why it has none.
    key: Result<String, String>,
}

impl DeviceMarks {
    /// The places of the marks with `suffix` of an open device at `path`. `given` is the operator's
    /// name of it.
    pub(crate) fn new(
        (path, device): (&Path, &File),
        facts: &Facts,
        (folder, earlier_folder): (PathBuf, &Path),
        suffix: &'static str,
        given: Option<&str>,
    ) -> io::Result<Self> {
        let number = device.metadata()?.rdev();
        let name = path.to_string_lossy().replace('/', "-");
        Ok(Self {
            suffix,
            folder,
            earlier_folder: earlier_folder.to_owned(),
            earlier: earlier_folder.join(format!("device{name}{suffix}")),
            key: match given {
                Some(given) => Ok(format!("key-{given}")),
                None => own_key(number, facts),
            },
        })
    }

    /// The name of the device, or why it has none.
    pub(crate) fn key(&self) -> Result<&str, &str> {
        self.key.as_deref().map_err(String::as_str)
    }

    /// The file for the mark; `None` if the device has no name.
    pub(crate) fn file(&self) -> Option<PathBuf> {
        let key = self.key.as_deref().ok()?;
        Some(self.folder.join(format!("{}{}", file_name(key), self.suffix)))
    }

    /// The mark of the device with these facts: the file, and its content.
    pub(crate) fn find(&self, facts: &Facts) -> io::Result<Option<(PathBuf, Vec<u8>)>> {
        if let Some(file) = self.file() {
            if let Some(mark) = read_mark(&file)? {
                return Ok(Some((file, mark)));
            }
        }
        if let Some(found) = self.find_same(facts, None)? {
            return Ok(Some(found));
        }
        Ok(read_mark(&self.earlier)?.map(|mark| (self.earlier.clone(), mark)))
    }

    /// A file other than `kept` with a mark of the device.
    pub(crate) fn find_earlier(
        &self,
        facts: &Facts,
        kept: Option<&Path>,
    ) -> io::Result<Option<PathBuf>> {
        if let Some((file, _)) = self.find_same(facts, kept)? {
            return Ok(Some(file));
        }
        let earlier = read_mark(&self.earlier)?;
        let is_own = earlier.is_some_and(|mark| !Facts::split(&mark).1.contradicts(facts));
        Ok(is_own.then(|| self.earlier.clone()))
    }

    /// A mark of the device by the facts in it, in a file other than `kept`.
    fn find_same(
        &self,
        facts: &Facts,
        kept: Option<&Path>,
    ) -> io::Result<Option<(PathBuf, Vec<u8>)>> {
        for folder in [&self.folder, &self.earlier_folder] {
            for file in self.files(folder)? {
                if kept == Some(&*file) {
                    continue;
                }
                // Another device's mark may be removed meanwhile.
                let Some(mark) = read_mark(&file)? else { continue };
                if Facts::split(&mark).1.is_same(facts) {
                    return Ok(Some((file, mark)));
                }
            }
        }
        Ok(None)
    }

    /// The files of this kind in a folder.
    fn files(&self, folder: &Path) -> io::Result<Vec<PathBuf>> {
        let entries = match std::fs::read_dir(folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            // Only the folder of all daemons has to be readable.
            Err(_) if folder != self.folder => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut files = Vec::new();
        for entry in entries.take(FILES_MAX) {
            let name = entry?.file_name();
            let name = name.to_string_lossy();
            // Beside images there are marks of files.
            let is_device = folder == self.folder || name.starts_with("device-");
            if is_device && name.ends_with(self.suffix) {
                files.push(folder.join(&*name));
            }
        }
        files.sort();
        Ok(files)
    }

    /// Makes the folder if it is missing, and refuses one that forgets its files.
    pub(crate) fn prepare(&self) -> io::Result<()> {
        prepare(&self.folder).map_err(|error| {
            let shown = self.folder.display();
            let failure = Failure::from(error);
            failure.about(format_args!("the folder of the marks of devices, {shown}")).into()
        })
    }
}

/// Makes the folder of the marks if it is missing, and refuses one that forgets its files. A folder
/// that root makes belongs to the owner of the folder above, as that of a service does.
pub(crate) fn prepare(folder: &Path) -> io::Result<()> {
    const TMPFS_MAGIC: i64 = 0x0102_1994;
    const RAMFS_MAGIC: i64 = 0x8584_58f6;
    if !folder.exists() {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        give_to_owner(folder);
        let parent = folder.parent().unwrap_or(Path::new("/"));
        File::open(parent)?.sync_all()?;
    }
    let kind = rustix::fs::statfs(folder)?.f_type;
    if matches!(kind, TMPFS_MAGIC | RAMFS_MAGIC) {
        let failure = Failure::new("it is in memory and is lost when the host starts again");
        let remedy = "to a folder on a disk, for all daemons and commands";
        return Err(failure.advise(format!("set {FOLDER_VARIABLE} {remedy}")).into());
    }
    Ok(())
}

/// Gives a file to the owner of its folder, if this process may: what root writes, a service has to
/// read later.
pub(crate) fn give_to_owner(path: &Path) {
    let Some(owner) = path.parent().and_then(|folder| folder.metadata().ok()) else { return };
    // Without the right, the file is that of a user who may read it.
    let _ = std::os::unix::fs::lchown(path, Some(owner.uid()), Some(owner.gid()));
}

/// The name of the device that the kernel knows, or why it has none that is its own.
fn own_key(number: u64, facts: &Facts) -> Result<String, String> {
    let Some(key) = facts.key() else {
        return Err(
            "the kernel knows no lasting name of the device, such as a WWID or a serial".into()
        );
    };
    let is_same = |folder: &Path| Facts::of_device(folder, None).key().as_ref() == Some(&key);
    if has_twin(number, is_same) {
        return Err(format!("another device has the same name, {key}"));
    }
    Ok(key)
}

/// The beginning of the name of a key's file. The number at its end tells keys apart that look
/// alike.
pub(crate) fn file_name(key: &str) -> String {
    let clean = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
    let shown: String = key.chars().map(clean).collect();
    let shown = &shown[..shown.len().min(SHOWN_LENGTH_MAX)];
    // FNV-1a.
    let hash = key.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{shown}-{hash:016x}")
}

/// Removes the marks of devices with this suffix whose text `names` accepts, in the folder of the
/// host and in `earlier`. Returns how many there were.
///
/// # Errors
/// When a folder or a mark cannot be read or removed.
pub(crate) fn remove_all(
    earlier: &Path,
    suffix: &'static str,
    names: impl Fn(&[u8]) -> bool,
) -> io::Result<usize> {
    let marks = DeviceMarks {
        suffix,
        folder: marks_folder(),
        earlier_folder: earlier.to_owned(),
        earlier: PathBuf::new(),
        key: Err(String::new()),
    };
    let mut count = 0;
    for folder in [&marks.folder, &marks.earlier_folder] {
        for file in marks.files(folder)? {
            if read_mark(&file)?.is_some_and(|mark| names(Facts::split(&mark).0)) {
                std::fs::remove_file(&file)?;
                File::open(folder)?.sync_all()?;
                count += 1;
            }
        }
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files_are_short_and_differ() {
        let names = ["wwid-a/b", "wwid-a_b", &"x".repeat(300), &"x".repeat(301)].map(file_name);
        assert!(names[0].starts_with("wwid-a_b-"), "{names:?}");
        for (index, name) in names.iter().enumerate() {
            assert!(name.len() <= SHOWN_LENGTH_MAX + 17 && !names[..index].contains(name));
        }
    }
}
