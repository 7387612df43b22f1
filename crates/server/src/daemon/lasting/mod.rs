//! What is served after a start: the disks of the file, with the changes that requests have made to
//! them.
//!
//! `overlay` has the records of these changes, and decides between them and the file.
//!
//! - `start`: the disks of a start, and logs that their definitions do not have.
//! - `moves`: moves of disks that have begun, and disks that have moved.
//! - `requests`: the differences from the file, and the way back to it.

mod moves;
mod requests;
mod start;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{OnceLock, Weak};

use fathom_control::{DiskDefinition, ErrorBody, ErrorCode, SOCKET_DEFAULT};
use fathom_image::StateNote;
use parking_lot::Mutex;

pub(crate) use moves::{NotedMove, has_moved};
pub(crate) use requests::differing_keys;

use super::Daemon;
use crate::configuration::{Configuration, ConfigurationFile, image_identity, layers};
use crate::daemon::overlay::{
    ChangeRecord, Damage, Folder, FoundRecords, RecordKind, RecordProgress, is_as_in_file, stem,
};
use crate::daemon::stack::refusal;
use crate::features::log::is_same_log;

/// The folder of a daemon with the default control socket that systemd did not start.
const FOLDER_DEFAULT: &str = "/var/lib/fathom";

/// The records of changes, and the entries of the file.
pub(crate) struct Lasting {
    folder: Folder,
    records: Mutex<Records>,
    daemon: OnceLock<Weak<Daemon>>,
}

#[derive(Default)]
pub(crate) struct Records {
    /// The entries of the file, by the names of the disks.
    pub entries: BTreeMap<String, DiskDefinition>,
    /// The changes that apply, by the names of the disks.
    pub changes: BTreeMap<String, ChangeRecord>,
    /// The changes that were set aside.
    pub aside: BTreeMap<String, ChangeRecord>,
    /// The definitions with which the logs of disks were opened last.
    logs: BTreeMap<String, ChangeRecord>,
    /// The moves of disks that have begun.
    moves: BTreeMap<String, ChangeRecord>,
    /// The records that cannot be used, by the stems of their files.
    pub damaged: BTreeMap<String, Damage>,
    /// The disks with changes that end with the daemon.
    pub temporary: BTreeSet<String>,
}

impl Records {
    /// What the next start serves under a name.
    fn of(&self, name: &str) -> Option<&DiskDefinition> {
        match self.changes.get(name) {
            Some(change) => change.after.as_ref(),
            None => self.entries.get(name),
        }
    }
}

/// The folder of the records of the daemon with this configuration.
fn folder_of(control: &Path, file: Option<&ConfigurationFile>) -> PathBuf {
    let state = std::env::var_os("STATE_DIRECTORY").filter(|state| !state.is_empty());
    // systemd lists several folders with colons.
    let first = state.as_ref().and_then(|state| state.to_str()?.split(':').next());
    let folder = match (first, control.parent()) {
        (Some(state), _) => PathBuf::from(state),
        (None, _) if control == Path::new(SOCKET_DEFAULT) => PathBuf::from(FOLDER_DEFAULT),
        (None, folder) => folder.unwrap_or(Path::new("/")).to_owned(),
    };
    // Another configuration of the same host has records of its own.
    let of = file.map_or(control, |file| &file.path);
    let of = std::path::absolute(of).unwrap_or_else(|_| of.to_owned());
    let name = of.file_name().and_then(|name| name.to_str()).unwrap_or("fathom");
    let checksum = crc32c::crc32c(of.as_os_str().as_encoded_bytes());
    folder.join(format!("live-{name}-{checksum:08x}"))
}

impl Lasting {
    /// Reads the records of the daemon with this configuration.
    pub(crate) fn open(configuration: &Configuration, file: Option<&ConfigurationFile>) -> Self {
        let folder = folder_of(&configuration.daemon.definition.control, file);
        let note = folder.file_name().map(|name| StateNote::new(&name.to_string_lossy()));
        let (folder, found) = Folder::open(folder, note);
        let by_name = |found: &FoundRecords, kind| -> BTreeMap<String, ChangeRecord> {
            found.sound(kind).map(|change| (change.name.clone(), change.clone())).collect()
        };
        let damaged = found.damaged().map(|(stem, damage)| (stem.to_owned(), damage.clone()));
        let records = Records {
            entries: entries_of(configuration),
            changes: by_name(&found, RecordKind::Change),
            aside: by_name(&found, RecordKind::Aside),
            logs: by_name(&found, RecordKind::Log),
            moves: by_name(&found, RecordKind::Move),
            damaged: damaged.collect(),
            temporary: BTreeSet::new(),
        };
        if let Some(problem) = folder.problem() {
            let folder = folder.path().display();
            tracing::warn!(
                "changes in use end with the daemon: {folder} cannot be used: {problem}"
            );
        }
        Self { folder, records: Mutex::new(records), daemon: OnceLock::new() }
    }

    /// The folder of the records.
    pub(crate) fn folder(&self) -> &Folder {
        &self.folder
    }

    /// Looks at the records.
    pub(crate) fn with<T>(&self, look: impl FnOnce(&Records) -> T) -> T {
        look(&self.records.lock())
    }

    fn change<T>(&self, change: impl FnOnce(&mut Records) -> T) -> T {
        change(&mut self.records.lock())
    }

    /// Replaces the entries of the file.
    pub(crate) fn set_entries(&self, configuration: &Configuration) {
        self.change(|records| records.entries = entries_of(configuration));
    }

    /// What the next start serves under a name.
    pub(crate) fn of(&self, name: &str) -> Option<DiskDefinition> {
        self.with(|records| records.of(name).cloned())
    }

    /// The entry of the file for a disk.
    pub(crate) fn entry(&self, name: &str) -> Option<DiskDefinition> {
        self.with(|records| records.entries.get(name).cloned())
    }

    /// Sets the change of a disk aside, so that the file applies. Returns whether there was one.
    pub(crate) fn set_aside(&self, name: &str) -> Result<bool, ErrorBody> {
        self.set_aside_file(name)?;
        Ok(self.change(|records| {
            let was_temporary = records.temporary.remove(name);
            let was_damaged = records.damaged.remove(&stem(name)).is_some();
            let Some(change) = records.changes.remove(name) else {
                return was_temporary || was_damaged;
            };
            records.aside.insert(name.to_owned(), change);
            true
        }))
    }

    fn set_aside_file(&self, name: &str) -> Result<(), ErrorBody> {
        let has_one = self.with(|records| {
            records.changes.contains_key(name) || records.damaged.contains_key(&stem(name))
        });
        if !has_one {
            return Ok(());
        }
        self.folder.set_aside(name).map_err(|error| {
            let file = self.folder.file(RecordKind::Change, name);
            refusal(
                ErrorCode::Failed,
                format!(
                    "the change of {name:?} in {} cannot be set aside: {error}",
                    file.display()
                ),
                "make its folder writable and try again",
            )
        })
    }

    /// Records that a disk becomes `after`, or is removed, before it does. `image` is the identity
    /// of its image. A temporary change is not recorded.
    pub(crate) fn begin(
        &self,
        name: &str,
        image: Option<(u64, u64)>,
        after: Option<&DiskDefinition>,
        is_temporary: bool,
    ) -> Result<RecordedChange<'_>, ErrorBody> {
        if is_temporary {
            let nothing = RecordedChange::new(self, name, None, None);
            return Ok(nothing);
        }
        let (earlier, entry, before) = self.with(|records| {
            let entry = records.entries.get(name).cloned();
            (records.changes.get(name).cloned(), entry, records.of(name).cloned())
        });
        if self.with(|records| records.damaged.contains_key(&stem(name))) {
            self.set_aside(name)?;
        }
        let pending = ChangeRecord {
            name: name.to_owned(),
            number: 0,
            state: RecordProgress::Pending,
            image,
            entry,
            before,
            after: after.cloned(),
        };
        let pending = self.folder.write(RecordKind::Change, &pending).map_err(|error| {
            refusal(
                ErrorCode::Failed,
                format!(
                    "the change of {name:?} would not outlive the daemon: no record can be written into {}: {error}",
                    self.folder.path().display()
                ),
                "make the folder writable, or let the change end with the daemon with --temporary \
                 (`temporary`)",
            )
        })?;
        self.change(|records| records.changes.insert(name.to_owned(), pending.clone()));
        Ok(RecordedChange::new(self, name, Some(pending), earlier))
    }

    /// Notes the definition with which the log of a disk is opened, so that a later start finds the
    /// log although the file does not have it.
    fn note_log(&self, definition: &DiskDefinition) {
        let Some(log) = layers::wal(definition) else { return };
        let known = self.with(|records| records.logs.get(&definition.name)?.after.clone());
        let known = known.filter(|known| known.image == definition.image);
        if known.and_then(|it| layers::wal(&it)).is_some_and(|known| is_same_log(&known, &log)) {
            return;
        }
        let record = ChangeRecord {
            name: definition.name.clone(),
            number: 0,
            state: RecordProgress::Done,
            image: definition.image.as_deref().and_then(image_identity),
            entry: None,
            before: None,
            after: Some(definition.clone()),
        };
        match self.folder.write(RecordKind::Log, &record) {
            Ok(record) => {
                self.change(|records| records.logs.insert(definition.name.clone(), record));
            }
            Err(error) => {
                let disk = definition.name.as_str();
                tracing::debug!(disk, %error, "the place of its log is not recorded");
            }
        }
    }
}

impl Lasting {
    /// Removes the note of the log of a disk that has no changes in it.
    fn forget_log(&self, name: &str) {
        if self.with(|records| !records.logs.contains_key(name)) {
            return;
        }
        match self.folder.remove(RecordKind::Log, name) {
            Ok(()) => drop(self.change(|records| records.logs.remove(name))),
            Err(error) => {
                tracing::debug!(disk = name, %error, "the place of its earlier log stays recorded");
            }
        }
    }
}

fn entries_of(configuration: &Configuration) -> BTreeMap<String, DiskDefinition> {
    let disks = configuration.disks.iter().map(|disk| &disk.definition);
    disks.map(|disk| (disk.name.clone(), disk.clone())).collect()
}

/// A change in progress. Dropped before it is done, it puts the earlier record back. It does
/// nothing any more once another change of the disk has been recorded.
pub(crate) struct RecordedChange<'l> {
    lasting: &'l Lasting,
    name: String,
    /// The record, unless the change is temporary.
    pending: Option<ChangeRecord>,
    earlier: Option<ChangeRecord>,
    /// Whether there is no record, because the disk is as in the file again.
    is_removed: bool,
}

impl<'l> RecordedChange<'l> {
    fn new(
        lasting: &'l Lasting,
        name: &str,
        pending: Option<ChangeRecord>,
        earlier: Option<ChangeRecord>,
    ) -> Self {
        Self { lasting, name: name.to_owned(), pending, earlier, is_removed: false }
    }

    /// Takes the record, if it is still the one of the disk.
    fn take(&mut self) -> Option<ChangeRecord> {
        let pending = self.pending.take()?;
        let current = self.lasting.with(|records| Some(records.changes.get(&self.name)?.number));
        let expected = (!self.is_removed).then_some(pending.number);
        (current == expected).then_some(pending)
    }

    /// Writes that the change has taken effect. On success, that outlives the daemon, unless the
    /// change is temporary. [`Self::settle`] ends the change; dropped before that, it still puts
    /// the earlier record back.
    pub(crate) fn complete(&mut self) -> Result<(), ErrorBody> {
        let Some(pending) = self.take() else { return Ok(()) };
        let written = self.write_done(&pending);
        let done = written.inspect_err(|_| self.pending = Some(pending.clone()))?;
        self.is_removed = done.is_none();
        self.pending = Some(done.unwrap_or(pending));
        Ok(())
    }

    /// The change has been completed.
    pub(crate) fn settle(mut self) {
        if self.pending.take().is_none() {
            self.lasting.change(|records| records.temporary.insert(self.name.clone()));
        }
    }

    /// The change has taken effect. On return, it outlives the daemon, unless it is temporary.
    pub(crate) fn done(mut self) -> Result<(), ErrorBody> {
        if self.pending.is_none() {
            self.settle();
            return Ok(());
        }
        let Some(pending) = self.take() else { return Ok(()) };
        self.write_done(&pending).map(drop)
    }

    /// Replaces the pending record, or removes it if the disk is as in the file. Returns what there
    /// is now.
    fn write_done(&self, pending: &ChangeRecord) -> Result<Option<ChangeRecord>, ErrorBody> {
        let (name, folder) = (&self.name, &self.lasting.folder);
        let done = if is_as_in_file(pending.entry.as_ref(), pending.after.as_ref()) {
            folder.remove(RecordKind::Change, name).map(|()| None)
        } else {
            let done =
                ChangeRecord { state: RecordProgress::Done, before: None, ..pending.clone() };
            folder.write(RecordKind::Change, &done).map(Some)
        };
        let done = done.map_err(|error| {
            let file = folder.file(RecordKind::Change, name);
            refusal(
                ErrorCode::Failed,
                format!(
                    "{name:?} is changed, but a restart may undo it: the record {} cannot be completed: {error}",
                    file.display()
                ),
                "make its folder writable, then make the change again",
            )
        })?;
        self.lasting.change(|records| match &done {
            Some(done) => drop(records.changes.insert(name.clone(), done.clone())),
            None => drop(records.changes.remove(name)),
        });
        Ok(done)
    }

    /// Leaves the record pending: it is not known yet how the change ends, and the next start
    /// decides.
    pub(crate) fn leave_pending(mut self) {
        self.pending = None;
    }
}

impl Drop for RecordedChange<'_> {
    fn drop(&mut self) {
        if self.take().is_none() {
            return;
        }
        let (name, folder) = (&self.name, &self.lasting.folder);
        let restored = match &self.earlier {
            Some(earlier) => folder.write(RecordKind::Change, earlier).map(Some),
            None => folder.remove(RecordKind::Change, name).map(|()| None),
        };
        let restored = restored.unwrap_or_else(|error| {
            tracing::error!(
                disk = name.as_str(),
                %error,
                "the record of a change that failed stays pending"
            );
            self.earlier.clone()
        });
        self.lasting.change(|records| match restored {
            Some(earlier) => drop(records.changes.insert(name.clone(), earlier)),
            None => drop(records.changes.remove(name)),
        });
    }
}
