//! Moves of disks that have begun, and disks that have moved.
//!
//! A move that has begun has a record of its own until it has ended, with the definitions before
//! and after. The move of a disk changes the record of the disk like any other change; but neither
//! a reload nor an edited entry of the file brings the content back. So a moved disk keeps its
//! store as long as the file names the one that it has left.

use fathom_control::{DiskDefinition, ErrorBody, ErrorCode};

use super::{Lasting, RecordedChange};
use crate::daemon::overlay::{ChangeRecord, RecordKind, RecordProgress};
use crate::daemon::stack::refusal;

/// A move that has begun.
#[derive(Clone, Debug)]
pub(crate) struct NotedMove {
    /// The definition of the disk with the store that it has.
    pub before: DiskDefinition,
    /// The same with the store that it is to have.
    pub after: DiskDefinition,
    /// Whether the target has got its own name once, in an attempt to change over.
    pub is_named: bool,
}

/// What a file's entry means for a disk that has moved: the entry with the store that the disk has
/// now. `None` if it has not moved, or if the entry names another store than before.
fn moved(entry: &DiskDefinition, change: Option<&ChangeRecord>) -> Option<DiskDefinition> {
    let change = change.filter(|it| it.state == RecordProgress::Done)?;
    let (known, after) = (change.entry.as_ref()?, change.after.as_ref()?);
    let has_moved = !known.has_store_of(after) && entry.has_store_of(known);
    has_moved.then(|| entry.clone().with_store_of(after))
}

impl Lasting {
    /// Records a move before anything is made for it.
    ///
    /// # Errors
    /// If no record can be written.
    pub(crate) fn note_move(&self, noted: &NotedMove) -> Result<(), ErrorBody> {
        let name = &noted.before.name;
        let state = if noted.is_named { RecordProgress::Done } else { RecordProgress::Pending };
        let record = ChangeRecord {
            name: name.clone(),
            number: 0,
            state,
            image: None,
            entry: None,
            before: Some(noted.before.clone()),
            after: Some(noted.after.clone()),
        };
        let written = self.folder.write(RecordKind::Move, &record).map_err(|error| {
            let folder = self.folder.path().display();
            refusal(
                ErrorCode::Failed,
                format!("the move of {name:?} cannot be recorded in {folder}: {error}"),
                "make the folder writable",
            )
        })?;
        self.change(|records| records.moves.insert(name.clone(), written));
        Ok(())
    }

    /// The move of a disk that has begun and not ended.
    pub(crate) fn noted_move(&self, name: &str) -> Option<NotedMove> {
        let record = self.with(|records| records.moves.get(name).cloned())?;
        let is_named = record.state == RecordProgress::Done;
        Some(NotedMove { before: record.before?, after: record.after?, is_named })
    }

    /// The move of a disk has ended.
    pub(crate) fn forget_move(&self, name: &str) {
        match self.folder.remove(RecordKind::Move, name) {
            Ok(()) => drop(self.change(|records| records.moves.remove(name))),
            Err(error) => {
                tracing::warn!(disk = name, %error, "the record of its move stays");
            }
        }
    }

    /// What an entry of the file means for a disk that has moved.
    pub(crate) fn moved_entry(&self, entry: &DiskDefinition) -> Option<DiskDefinition> {
        self.with(|records| moved(entry, records.changes.get(&entry.name)))
    }

    /// Whether a disk has another store than its entry in the file, because it has moved.
    pub(crate) fn has_moved(&self, name: &str) -> bool {
        self.with(|records| {
            let entry = records.entries.get(name);
            entry.is_some_and(|entry| moved(entry, records.changes.get(name)).is_some())
        })
    }

    /// The entry of a disk that has moved was edited: the record follows.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(crate) fn follow_entry(
        &self,
        entry: &DiskDefinition,
        after: &DiskDefinition,
    ) -> Result<(), ErrorBody> {
        let name = &entry.name;
        let Some(change) = self.with(|records| records.changes.get(name).cloned()) else {
            return Ok(());
        };
        let (entry, after) = (Some(entry.clone()), Some(after.clone()));
        if change.entry == entry && change.after == after {
            return Ok(());
        }
        RecordedChange::new(self, name, Some(ChangeRecord { entry, after, ..change }), None).done()
    }
}

/// The refusal to bring a disk back that has moved.
pub(crate) fn has_moved(name: &str) -> ErrorBody {
    refusal(
        ErrorCode::Conflict,
        format!("the disk {name:?} has moved, and what the file names has only its former content"),
        format!(
            "move it back with `fathom disk move {name}`, or write its new place into the file"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moved_disk_keeps_its_store_while_the_file_names_the_former_one() {
        let disk = |image: &str| DiskDefinition {
            name: "a".into(),
            image: Some(image.into()),
            ..DiskDefinition::default()
        };
        let pool = DiskDefinition {
            name: "a".into(),
            store: Some("/pool".into()),
            volume: Some("v".into()),
            ..DiskDefinition::default()
        };
        let record = |state, entry: &DiskDefinition, after: &DiskDefinition| ChangeRecord {
            name: "a".into(),
            number: 1,
            state,
            image: None,
            entry: Some(entry.clone()),
            before: None,
            after: Some(after.clone()),
        };
        let change = record(RecordProgress::Done, &disk("/a"), &pool);
        assert_eq!(moved(&disk("/a"), Some(&change)), Some(pool.clone()));
        let edited = DiskDefinition { tap: false, ..disk("/a") };
        let expected = DiskDefinition { tap: false, ..pool.clone() };
        assert_eq!(moved(&edited, Some(&change)), Some(expected));
        assert_eq!(moved(&disk("/b"), Some(&change)), None, "the file names another image");
        assert_eq!(moved(&pool, Some(&change)), None, "the file says what is so");
        let pending = record(RecordProgress::Pending, &disk("/a"), &pool);
        assert_eq!(moved(&disk("/a"), Some(&pending)), None);
        let layers = record(RecordProgress::Done, &disk("/a"), &edited);
        assert_eq!(moved(&disk("/a"), Some(&layers)), None);
        assert_eq!(moved(&disk("/a"), None), None);
    }
}
