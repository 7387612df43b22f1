//! The place of a mark of an image: a text that has to survive a crash of the host. It is an
//! extended attribute of the image if its file system supports them, else a file beside the image.
//! The mark of a block device is a file in a folder of the host ([`DeviceMarks`]). A file names the
//! image that it belongs to ([`Facts`]), because it stays when another image or device gets the
//! path.

use std::ffi::CStr;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use fathom_failure::Failure;
use rustix::fs::{XattrFlags, fgetxattr, fremovexattr, fsetxattr};

use crate::facts::Facts;
use crate::marks::{DeviceMarks, give_to_owner, marks_folder};

/// The longest mark, in bytes.
pub(crate) const LENGTH_MAX: usize = 1024;
/// The longest line in a file that names its image, in bytes.
const LINE_LENGTH_MAX: usize = 1024;
/// The longest time of a step of the clock with which file systems note changes. Two changes within
/// a step have the same modification time.
const CLOCK_STEP: Duration = Duration::from_millis(20);

/// The place of one kind of mark of one image or device.
pub(crate) struct MarkLocation {
    path: PathBuf,
    image: File,
    /// The extended attribute; `None` if the image cannot have any.
    attribute: Option<&'static CStr>,
    files: Files,
    facts: Facts,
}

/// The files that can have a mark.
enum Files {
    /// One beside the image.
    Beside(PathBuf),
    /// Those of a block device.
    OfDevice(DeviceMarks),
}

/// A mark as it was found.
pub(crate) struct FoundMark {
    /// Its text.
    pub(crate) text: Vec<u8>,
    /// Whether it was written for another image.
    pub(crate) is_foreign: bool,
}

impl MarkLocation {
    /// The place of the mark of the image at `path`: the extended attribute `attribute`, or a file
    /// whose name ends with `suffix`. `folder` is the daemon's folder, which had the marks of block
    /// devices in earlier versions. `given` is the operator's name of a block device.
    ///
    /// # Errors
    /// When the image cannot be opened.
    pub(crate) fn open(
        path: &Path,
        folder: &Path,
        given: Option<&str>,
        attribute: &'static CStr,
        suffix: &'static str,
    ) -> io::Result<Self> {
        let path = path.canonicalize()?;
        let image = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path)?;
        let mut facts = Facts::of(&image)?;
        if !image.metadata()?.file_type().is_block_device() {
            let mut beside = path.clone().into_os_string();
            beside.push(suffix);
            let files = Files::Beside(beside.into());
            return Ok(Self { path, image, attribute: Some(attribute), files, facts });
        }
        if let Some(name) = given {
            facts = facts.with_given(name);
        }
        let folders = (marks_folder(), folder);
        let files = DeviceMarks::new((&path, &image), &facts, folders, suffix, given)?;
        Ok(Self { path, image, attribute: None, files: Files::OfDevice(files), facts })
    }

    /// Why the image can have no mark: it is a block device without a name of its own.
    pub(crate) fn lacks_key(&self) -> Option<&str> {
        match &self.files {
            Files::Beside(_) => None,
            Files::OfDevice(marks) => marks.key().err(),
        }
    }

    /// The name of the image for those that belong to it: its path, or the key of a block device.
    pub(crate) fn home(&self) -> String {
        match &self.files {
            Files::OfDevice(marks) if marks.key().is_ok() => {
                format!("device {}", marks.key().unwrap_or_default())
            }
            _ => self.path.display().to_string(),
        }
    }

    /// The mark; `None` if there is none. A mark that is too long is empty.
    ///
    /// # Errors
    /// When the mark cannot be read.
    pub(crate) fn read(&self) -> io::Result<Option<FoundMark>> {
        if let Some(text) = self.read_attribute()? {
            // It is a part of the image.
            return Ok(Some(FoundMark { text, is_foreign: false }));
        }
        let Some((_, mark)) = self.find()? else { return Ok(None) };
        let (text, facts) = Facts::split(&mark);
        let is_foreign = facts.contradicts(&self.facts);
        Ok(Some(FoundMark { text: text.to_vec(), is_foreign }))
    }

    /// Writes the mark. On return, it is durable.
    ///
    /// # Errors
    /// When the mark cannot be written.
    pub(crate) fn write(&self, text: &[u8]) -> io::Result<()> {
        if let Some(attribute) = self.attribute {
            if fsetxattr(&self.image, attribute, text, XattrFlags::empty()).is_ok() {
                return self.sync_image();
            }
        }
        let file = self.file()?;
        if let Files::OfDevice(marks) = &self.files {
            marks.prepare()?;
        }
        let mut draft = file.clone().into_os_string();
        draft.push(".new");
        let for_owner = matches!(self.files, Files::OfDevice(_));
        replace_file(&file, Path::new(&draft), &self.facts.append_to(text), for_owner)?;
        // An older mark would hide this one.
        self.clear_attribute()?;
        self.clear_earlier(Some(&file))
    }

    /// Moves the mark of a device to where it is written now, if it is elsewhere.
    ///
    /// # Errors
    /// When the mark cannot be moved. It stays then.
    pub(crate) fn migrate(&self) -> io::Result<()> {
        let (Files::OfDevice(marks), Some((file, mark))) = (&self.files, self.find()?) else {
            return Ok(());
        };
        if marks.file().is_some_and(|own| own != file) {
            self.write(Facts::split(&mark).0)?;
        }
        Ok(())
    }

    /// Removes the mark.
    ///
    /// # Errors
    /// When the mark cannot be removed.
    pub(crate) fn clear(&self) -> io::Result<()> {
        self.clear_attribute()?;
        match &self.files {
            Files::Beside(file) => remove(file),
            Files::OfDevice(_) => self.clear_earlier(None),
        }
    }

    /// Removes the marks of a device in files other than `kept`, but not those of other devices.
    fn clear_earlier(&self, kept: Option<&Path>) -> io::Result<()> {
        let Files::OfDevice(marks) = &self.files else { return Ok(()) };
        if let (None, Some(file)) = (kept, marks.file()) {
            remove(&file)?;
        }
        while let Some(file) = marks.find_earlier(&self.facts, kept)? {
            remove(&file)?;
        }
        Ok(())
    }

    /// The file for the mark.
    fn file(&self) -> io::Result<PathBuf> {
        match &self.files {
            Files::Beside(file) => Ok(file.clone()),
            Files::OfDevice(marks) => marks.file().ok_or_else(|| {
                let reason = marks.key().err().unwrap_or_default();
                Failure::new(reason).advise("give it one with `key`").into()
            }),
        }
    }

    /// The file that has the mark, and its content.
    fn find(&self) -> io::Result<Option<(PathBuf, Vec<u8>)>> {
        match &self.files {
            Files::Beside(file) => Ok(read_mark(file)?.map(|mark| (file.clone(), mark))),
            Files::OfDevice(marks) => marks.find(&self.facts),
        }
    }

    /// The modification time of the image, in nanoseconds since 1970, if any later change gets
    /// another one. 0 if that is not certain: the image is a block device, or it was changed just
    /// now.
    ///
    /// # Errors
    /// When the image's metadata cannot be read.
    pub(crate) fn modified_ns(&self) -> io::Result<u64> {
        let metadata = self.image.metadata()?;
        if !metadata.file_type().is_file() {
            return Ok(0);
        }
        let modified = metadata.modified()?;
        if SystemTime::now().duration_since(modified).is_ok_and(|age| age < CLOCK_STEP) {
            return Ok(0);
        }
        let seconds = metadata.mtime().wrapping_mul(1_000_000_000);
        Ok(seconds.wrapping_add(metadata.mtime_nsec()) as u64)
    }

    /// Makes the attributes durable. The first sync may report that writes of others to the image
    /// were lost earlier. If the second one succeeds, the attributes are durable.
    fn sync_image(&self) -> io::Result<()> {
        self.image.sync_all().or_else(|_| self.image.sync_all())
    }

    fn clear_attribute(&self) -> io::Result<()> {
        if let (Some(attribute), Some(_)) = (self.attribute, self.read_attribute()?) {
            fremovexattr(&self.image, attribute)?;
            self.sync_image()?;
        }
        Ok(())
    }

    fn read_attribute(&self) -> io::Result<Option<Vec<u8>>> {
        use rustix::io::Errno;
        let Some(attribute) = self.attribute else { return Ok(None) };
        let mut text = vec![0; LENGTH_MAX];
        match fgetxattr(&self.image, attribute, &mut text) {
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

    /// Keeps the mark in a file, as for an image that can have no attributes.
    #[cfg(test)]
    pub(crate) fn without_attributes(self) -> Self {
        Self { attribute: None, ..self }
    }

    /// The file that has the mark if the image has no attributes.
    #[cfg(test)]
    pub(crate) fn test_file(&self) -> PathBuf {
        self.file().unwrap()
    }
}

/// The content of a file with a mark; `None` if there is none.
pub(crate) fn read_mark(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let opened =
        OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path);
    let file = match opened {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    let mut text = Vec::new();
    file.take((LENGTH_MAX + LINE_LENGTH_MAX) as u64).read_to_end(&mut text)?;
    Ok(Some(text))
}

/// Removes a file with a mark, if it exists. On return, that is durable.
pub(crate) fn remove(file: &Path) -> io::Result<()> {
    match std::fs::remove_file(file) {
        Ok(()) => sync_folder(file),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// Replaces the content of `file`, by way of `draft` in the same folder. On return, that is
/// durable; after a crash, the file has the old content or the new. `for_owner` gives the file to
/// the owner of its folder.
///
/// # Errors
/// When it cannot be written. Then it has the old content.
pub fn replace_file(file: &Path, draft: &Path, bytes: &[u8], for_owner: bool) -> io::Result<()> {
    match std::fs::remove_file(draft) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // `create_new` does not follow a link that another user may have put there.
    let mut new = OpenOptions::new().write(true).create_new(true).mode(0o600).open(draft)?;
    if for_owner {
        give_to_owner(draft);
    }
    let written = new.write_all(bytes).and_then(|()| new.sync_all());
    if let Err(error) = written.and_then(|()| std::fs::rename(draft, file)) {
        let _ = std::fs::remove_file(draft);
        return Err(error);
    }
    sync_folder(file)
}

/// Makes the names in the folder of `file` durable.
fn sync_folder(file: &Path) -> io::Result<()> {
    File::open(file.parent().unwrap_or(Path::new("/")))?.sync_all()
}

/// The end of a long path that fits into a mark behind `length` other bytes.
pub(crate) fn end_of(path: &str, length: usize) -> &str {
    fathom_persistence::end_of(path, LENGTH_MAX - length)
}
