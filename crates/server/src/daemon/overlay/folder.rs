//! The folder of the records.
//!
//! A record is written into a draft, which is made durable and then renamed. So there is the old
//! record or the new one at any instant. Only the daemon's user can read the files. The daemon
//! follows no links, because the folder may be one in which other users can make files.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use fathom_image::{LockError, LockPurpose, StateNote, replace_file};
use parking_lot::Mutex;

use super::lineage::{Lineage, Strange};
use super::record::{ChangeRecord, Damage, LENGTH_MAX, RecordKind, RecordProgress, stem};

/// The most records that are read.
const RECORDS_MAX: usize = 100_000;
/// The suffix of drafts.
const DRAFT: &str = ".new";
/// The file that is locked while a daemon uses the folder.
const LOCK: &str = "lock";

/// The folder of the records of live changes. It is made when the first record is written.
pub(crate) struct Folder {
    path: PathBuf,
    /// Held during each write, so that two writers do not share a draft.
    inner: Mutex<Inner>,
    /// Why it is not the folder that the configuration had before.
    strange: Mutex<Option<Strange>>,
}

#[derive(Default)]
struct Inner {
    /// Holds the lock.
    lock: Option<File>,
    /// Whether another daemon uses the folder. Its records describe other disks.
    is_of_another: bool,
    /// Why the last attempt to use the folder failed.
    problem: Option<String>,
    /// The number of the newest record.
    number: u64,
    /// What the marks know of the folder.
    lineage: Option<Lineage>,
}

/// The records of a folder, by the kind and the stem of their files.
#[derive(Default)]
pub(crate) struct FoundRecords(BTreeMap<(RecordKind, String), Result<ChangeRecord, Damage>>);

impl FoundRecords {
    /// The record of a kind for a disk.
    #[cfg(test)]
    fn of(&self, kind: RecordKind, name: &str) -> Option<&Result<ChangeRecord, Damage>> {
        self.0.get(&(kind, stem(name)))
    }

    /// The sound records of a kind.
    pub(crate) fn sound(&self, kind: RecordKind) -> impl Iterator<Item = &ChangeRecord> {
        let all = self.0.iter().filter(move |((other, _), _)| *other == kind);
        all.filter_map(|(_, change)| change.as_ref().ok())
    }

    /// The damaged changes, by the stems of their files.
    pub(crate) fn damaged(&self) -> impl Iterator<Item = (&str, &Damage)> {
        let all = self.0.iter().filter(|((kind, _), _)| *kind == RecordKind::Change);
        all.filter_map(|((_, stem), change)| Some((stem.as_str(), change.as_ref().err()?)))
    }
}

impl Folder {
    /// Opens the folder and reads its records. A folder that cannot be used has a
    /// [problem](Self::problem). `note` is the note that the marks have of it.
    pub(crate) fn open(path: PathBuf, note: Option<StateNote>) -> (Self, FoundRecords) {
        let mut inner = Inner::default();
        let mut strange = None;
        let mut found = FoundRecords::default();
        if fs::symlink_metadata(&path).is_ok() {
            match check_owner(&path).and_then(|()| claim(&path)) {
                Ok(lock) => inner.lock = Some(lock),
                Err(error) => {
                    inner.problem = Some(error.to_string());
                    let reason = error.get_ref().and_then(|it| it.downcast_ref::<InUse>());
                    inner.is_of_another = reason.is_some();
                }
            }
            if !inner.is_of_another && check_owner(&path).is_ok() {
                found = read_all(&path).unwrap_or_else(|error| {
                    inner.problem.get_or_insert(error.to_string());
                    FoundRecords::default()
                });
            }
        }
        let newest = found.0.values().flatten().map(|change| change.number).max();
        inner.number = newest.unwrap_or(0);
        if let Some(note) = note.filter(|_| !inner.is_of_another) {
            let (lineage, found) = Lineage::compare(note, &path);
            (inner.lineage, strange) = (Some(lineage), found);
        }
        (Self { path, inner: Mutex::new(inner), strange: Mutex::new(strange) }, found)
    }

    /// Why it is not the folder that the configuration had before, until it is changed or accepted.
    pub(crate) fn strange(&self) -> Option<Strange> {
        self.strange.lock().clone()
    }

    /// The operator accepts the folder as it is, or that there is none.
    pub(crate) fn accept(&self) {
        if self.strange().is_none() {
            return;
        }
        let mut inner = self.inner.lock();
        if inner.lock.is_some() {
            self.advance(&mut inner);
        } else if inner.lineage.as_mut().is_some_and(|lineage| lineage.forget().is_ok()) {
            *self.strange.lock() = None;
        }
    }

    /// The folder has been changed: the marks get to know it. Without that, an older copy would not
    /// be noticed.
    fn advance(&self, inner: &mut Inner) {
        let Some(lineage) = &mut inner.lineage else { return };
        match lineage.advance(&self.path) {
            Ok(()) => *self.strange.lock() = None,
            Err(error) => {
                let path = self.path.display();
                tracing::warn!(%path, %error, "an older copy of the folder of changes in use would not be noticed");
                inner.lineage = None;
            }
        }
    }

    /// Its path.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Why no record could be written at the last attempt.
    pub(crate) fn problem(&self) -> Option<String> {
        self.inner.lock().problem.clone()
    }

    /// The file of a record.
    pub(crate) fn file(&self, kind: RecordKind, name: &str) -> PathBuf {
        self.path.join(stem(name) + kind.suffix())
    }

    /// Writes a record with the next number. On return, it is durable.
    ///
    /// # Errors
    /// If it cannot be written. The earlier record is unchanged, unless only its durability is in
    /// doubt.
    pub(crate) fn write(
        &self,
        kind: RecordKind,
        change: &ChangeRecord,
    ) -> io::Result<ChangeRecord> {
        let mut inner = self.inner.lock();
        let written = self.ready(&mut inner).and_then(|()| {
            let change = ChangeRecord { number: inner.number + 1, ..change.clone() };
            self.replace(kind, &change)?;
            inner.number += 1;
            // A change that is pending is not acknowledged.
            if change.state == RecordProgress::Done {
                self.advance(&mut inner);
            }
            Ok(change)
        });
        inner.problem = written.as_ref().err().map(ToString::to_string);
        written
    }

    fn replace(&self, kind: RecordKind, change: &ChangeRecord) -> io::Result<()> {
        let bytes = change.encode().ok_or_else(|| {
            io::Error::other("its definition is too long, or has a path that is not UTF-8")
        })?;
        let path = self.file(kind, &change.name);
        let draft = self.path.join(stem(&change.name) + DRAFT);
        replace_file(&path, &draft, &bytes, false)
    }

    /// Removes a record, if there is one. On return, that is durable.
    ///
    /// # Errors
    /// If it cannot be removed.
    pub(crate) fn remove(&self, kind: RecordKind, name: &str) -> io::Result<()> {
        let mut inner = self.inner.lock();
        let file = self.file(kind, name);
        if inner.lock.is_none()
            && fs::symlink_metadata(&file)
                .is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
        {
            return Ok(());
        }
        self.ready(&mut inner)?;
        if remove(&file)? {
            self.sync()?;
            self.advance(&mut inner);
        }
        Ok(())
    }

    /// Sets the record of a change aside, sound or not. An earlier one that was set aside is
    /// replaced.
    ///
    /// # Errors
    /// If it cannot be renamed.
    pub(crate) fn set_aside(&self, name: &str) -> io::Result<()> {
        let mut inner = self.inner.lock();
        self.ready(&mut inner)?;
        match fs::rename(self.file(RecordKind::Change, name), self.file(RecordKind::Aside, name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            renamed => renamed.and_then(|()| self.sync())?,
        }
        self.advance(&mut inner);
        Ok(())
    }

    /// Makes the folder and takes its lock, unless that was done before.
    fn ready(&self, inner: &mut Inner) -> io::Result<()> {
        if inner.is_of_another {
            return Err(io::Error::other(InUse));
        }
        if inner.lock.is_none() {
            make(&self.path)?;
            inner.lock = Some(claim(&self.path)?);
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()
    }
}

/// Another daemon uses the folder.
#[derive(Debug)]
struct InUse;

impl fmt::Display for InUse {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("another daemon uses it")
    }
}

impl Error for InUse {}

fn make(path: &Path) -> io::Result<()> {
    let parent = path.parent().unwrap_or(Path::new("/"));
    // The default folder is made by the package, or here.
    match DirBuilder::new().mode(0o750).create(parent) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => check_owner(path),
        Err(error) => Err(error),
        // The new folder itself must outlive the host.
        Ok(()) => File::open(parent)?.sync_all(),
    }
}

/// Refuses a folder in which another user can put records.
fn check_owner(path: &Path) -> io::Result<()> {
    let metadata = fs::symlink_metadata(path)?;
    if !metadata.is_dir() {
        return Err(io::Error::other("it is not a folder"));
    }
    if metadata.uid() != rustix::process::geteuid().as_raw() || metadata.mode() & 0o022 != 0 {
        return Err(io::Error::other("another user owns it or may write into it"));
    }
    Ok(())
}

/// Takes the lock of the folder. After a daemon has been killed, the kernel takes some time to free
/// it.
fn claim(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let file = options.custom_flags(libc::O_NOFOLLOW).open(path.join(LOCK))?;
    match fathom_image::lock(&file, LockPurpose::Exclusive) {
        // Without locks, the control socket alone shows a second daemon.
        Ok(()) | Err(LockError::Unsupported(_)) => Ok(file),
        Err(LockError::Held) => Err(io::Error::other(InUse)),
        Err(LockError::Io(error)) => Err(error),
    }
}

/// Removes a file. Returns whether there was one.
fn remove(path: &Path) -> io::Result<bool> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        removed => removed.map(|()| true),
    }
}

/// Reads all records. Drafts are ignored: what they announce was not acknowledged.
fn read_all(path: &Path) -> io::Result<FoundRecords> {
    let mut found = FoundRecords::default();
    let entries = match fs::read_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(found),
        entries => entries?,
    };
    for entry in entries.take(RECORDS_MAX) {
        let entry = entry?;
        let file = entry.file_name();
        let Some(name) = file.to_str() else { continue };
        for kind in RecordKind::ALL {
            let Some(stem) = name.strip_suffix(kind.suffix()) else { continue };
            let read = read(&entry.path()).and_then(|bytes| ChangeRecord::decode(&bytes));
            let is_of = |change: &ChangeRecord| super::record::stem(&change.name) == stem;
            let read = read.and_then(|it| if is_of(&it) { Ok(it) } else { Err(Damage::Damaged) });
            found.0.insert((kind, stem.to_owned()), read);
        }
    }
    Ok(found)
}

fn read(path: &Path) -> Result<Vec<u8>, Damage> {
    let unreadable = |error: io::Error| Damage::Unreadable(error.to_string());
    let mut options = OpenOptions::new();
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = options.read(true).custom_flags(flags).open(path).map_err(unreadable)?;
    if !file.metadata().map_err(unreadable)?.is_file() {
        return Err(Damage::Unreadable("it is not a file".into()));
    }
    let mut bytes = Vec::new();
    file.take(LENGTH_MAX as u64 + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() > LENGTH_MAX { Err(Damage::Damaged) } else { Ok(bytes) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_control::DiskDefinition;

    fn change(name: &str) -> ChangeRecord {
        ChangeRecord {
            name: name.into(),
            number: 0,
            state: RecordProgress::Done,
            image: None,
            entry: None,
            before: None,
            after: Some(DiskDefinition { name: name.into(), ..DiskDefinition::default() }),
        }
    }

    #[test]
    fn records_outlive_the_daemon_and_a_kill_leaves_the_old_or_the_new_one() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("live");
        let (folder, found) = Folder::open(path.clone(), None);
        assert!(folder.problem().is_none() && found.0.is_empty());
        let first = folder.write(RecordKind::Change, &change("a/b")).unwrap();
        let second =
            folder.write(RecordKind::Change, &ChangeRecord { after: None, ..change("c") }).unwrap();
        assert_eq!((first.number, second.number), (1, 2));
        let bytes = fs::read(folder.file(RecordKind::Change, "a/b")).unwrap();
        drop(folder);
        // Each length of a draft, as after a kill during the write.
        for length in [0, 1, bytes.len() / 2, bytes.len()] {
            fs::write(path.join(stem("a/b") + DRAFT), &bytes[..length]).unwrap();
            let (folder, found) = Folder::open(path.clone(), None);
            assert_eq!(found.of(RecordKind::Change, "a/b"), Some(&Ok(first.clone())));
            assert_eq!(found.of(RecordKind::Change, "c"), Some(&Ok(second.clone())));
            assert!(
                found.of(RecordKind::Aside, "a/b").is_none() && found.damaged().next().is_none()
            );
            let next = folder.write(RecordKind::Change, &change("a/b")).unwrap();
            assert_eq!(next.number, 3, "numbers continue");
            fs::write(folder.file(RecordKind::Change, "a/b"), &bytes).unwrap();
        }
        let (folder, _) = Folder::open(path.clone(), None);
        folder.set_aside("a/b").unwrap();
        folder.remove(RecordKind::Change, "c").unwrap();
        folder.remove(RecordKind::Change, "c").unwrap();
        drop(folder);
        let (_, found) = Folder::open(path, None);
        assert!(found.sound(RecordKind::Change).next().is_none());
        assert_eq!(found.of(RecordKind::Aside, "a/b"), Some(&Ok(first)));
    }

    #[test]
    fn a_damaged_record_is_that_of_one_disk() {
        let place = tempfile::tempdir().unwrap();
        let (folder, _) = Folder::open(place.path().join("live"), None);
        folder.write(RecordKind::Change, &change("a")).unwrap();
        folder.write(RecordKind::Change, &change("b")).unwrap();
        // A record under the name of another disk, and a link, are not followed.
        fs::copy(folder.file(RecordKind::Change, "a"), folder.file(RecordKind::Change, "d"))
            .unwrap();
        let link = folder.file(RecordKind::Change, "e");
        std::os::unix::fs::symlink(folder.file(RecordKind::Change, "a"), link).unwrap();
        fs::write(folder.file(RecordKind::Change, "a"), "fathom 9 00000000\n{}").unwrap();
        let path = folder.path().to_owned();
        drop(folder);
        let (_, found) = Folder::open(path, None);
        assert_eq!(found.of(RecordKind::Change, "a"), Some(&Err(Damage::Newer(9))));
        assert!(found.of(RecordKind::Change, "b").unwrap().is_ok());
        assert_eq!(found.damaged().map(|(stem, _)| stem).collect::<Vec<_>>(), ["a", "d", "e"]);
    }

    #[test]
    fn a_folder_of_another_daemon_is_not_used() {
        let place = tempfile::tempdir().unwrap();
        let (folder, _) = Folder::open(place.path().join("live"), None);
        folder.write(RecordKind::Change, &change("a")).unwrap();
        let (other, found) = Folder::open(folder.path().to_owned(), None);
        assert_eq!(other.problem(), Some(InUse.to_string()));
        assert!(found.0.is_empty() && other.write(RecordKind::Change, &change("b")).is_err());
        let missing = place.path().join("nowhere").join("further").join("live");
        let (folder, _) = Folder::open(missing, None);
        assert!(folder.problem().is_none() && folder.remove(RecordKind::Change, "a").is_ok());
        assert!(
            folder.write(RecordKind::Change, &change("a")).is_err() && folder.problem().is_some()
        );
        let open = place.path().join("open");
        fs::create_dir(&open).unwrap();
        fs::set_permissions(&open, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        assert!(Folder::open(open, None).0.problem().is_some());
    }
}
