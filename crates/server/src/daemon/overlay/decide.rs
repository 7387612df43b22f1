//! Which definition of a disk applies at a start.
//!
//! | the file's entry | the record | the image's mark names | applies |
//! |---|---|---|---|
//! | other than in the record | any | any | the file; the record is set aside |
//! | as in the record | done | any | after |
//! | as in the record | pending, with another log than before | the log after | after |
//! | as in the record | pending, with another log than before | the log before | before |
//! | as in the record | pending, with another log than before | neither | the one whose log has changes of the disk |
//! | as in the record | pending, with another log than before | no log, and neither has changes | before; after, if the disk has no log after |
//! | as in the record | pending, with the same log or none | any | before; after, if the disk is removed |
//!
//! A pending change was not acknowledged, so both directions are allowed. The mark decides only
//! where the other direction would leave changes in a log that the definition does not have. An
//! image may have lost its mark, for example because it is a copy. Then the disk gets the log that
//! has its changes, and is refused with it, so that the operator decides about them.

use fathom_control::DiskDefinition;
use fathom_image::MarkedLog;

use super::record::{ChangeRecord, RecordProgress, as_recorded};
use crate::configuration::layers;
use crate::features::log::{WalDefinition, is_named, is_same_log};

/// The definition that applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DefinitionChoice {
    /// The entry of the file, if there is one: it was edited after the change.
    File,
    /// The one before a pending change.
    Before,
    /// The one after the change.
    After,
}

/// Whether the file's entry for a disk is the one of the record.
pub(crate) fn is_unchanged(entry: Option<&DiskDefinition>, change: &ChangeRecord) -> bool {
    entry.map(as_recorded) == change.entry
}

/// Whether a definition says what the file's entry says.
pub(crate) fn is_as_in_file(
    entry: Option<&DiskDefinition>,
    after: Option<&DiskDefinition>,
) -> bool {
    entry.map(as_recorded) == after.map(as_recorded)
}

/// Decides which definition of a disk applies. `entry` is the file's entry, `marked` finds the mark
/// of the image, and `has_changes` asks a log whether it has changes of the disk.
///
/// # Errors
/// Those of `marked`.
pub(crate) fn choose<E>(
    entry: Option<&DiskDefinition>,
    change: &ChangeRecord,
    marked: impl FnOnce() -> Result<Option<MarkedLog>, E>,
    has_changes: impl Fn(&WalDefinition) -> bool,
) -> Result<DefinitionChoice, E> {
    if !is_unchanged(entry, change) {
        return Ok(DefinitionChoice::File);
    }
    if change.state == RecordProgress::Done {
        return Ok(DefinitionChoice::After);
    }
    let log = |disk: &Option<DiskDefinition>| disk.as_ref().and_then(layers::wal);
    let (before, after) = (log(&change.before), log(&change.after));
    let is_same = match (&before, &after) {
        (None, None) => true,
        (Some(before), Some(after)) => is_same_log(before, after),
        _ => false,
    };
    let of_unmarked = if change.after.is_none() || after.is_none() && before.is_some() {
        DefinitionChoice::After
    } else {
        DefinitionChoice::Before
    };
    if is_same {
        return Ok(if change.after.is_none() {
            DefinitionChoice::After
        } else {
            DefinitionChoice::Before
        });
    }
    let marked = marked()?;
    let is_marked = |log: &Option<WalDefinition>| {
        log.as_ref().zip(marked.as_ref()).is_some_and(|(log, marked)| is_named(log, marked))
    };
    let has_changes = |log: &Option<WalDefinition>| log.as_ref().is_some_and(&has_changes);
    Ok(if is_marked(&before) {
        DefinitionChoice::Before
    } else if is_marked(&after) || has_changes(&after) {
        // The log before was empty before the one after got changes.
        DefinitionChoice::After
    } else if has_changes(&before) {
        DefinitionChoice::Before
    } else if marked.is_none() {
        of_unmarked
    } else {
        // The mark names another log: the disk is refused, with the way out.
        DefinitionChoice::Before
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use fathom_control::LayerDefinition;
    use serde_json::json;

    use fathom_persistence::Identity;

    use super::*;

    fn disk(log: Option<&str>, delay_ns: u64) -> DiskDefinition {
        let mut disk = DiskDefinition {
            name: "a".into(),
            image: Some("/images/a".into()),
            ..DiskDefinition::default()
        };
        disk.layers.push(LayerDefinition::new("delay", json!({ "time": format!("{delay_ns}ns") })));
        let wal =
            log.map(|log| LayerDefinition::new("wal", json!({ "log": log, "size": 1 << 20 })));
        disk.layers.extend(wal);
        as_recorded(&disk)
    }

    fn change(
        state: RecordProgress,
        before: Option<DiskDefinition>,
        after: Option<DiskDefinition>,
    ) -> ChangeRecord {
        let entry = Some(disk(None, 0));
        ChangeRecord { name: "a".into(), number: 1, state, image: None, entry, before, after }
    }

    fn chosen(change: &ChangeRecord, marked: Option<&str>) -> DefinitionChoice {
        let mark = |path: &str| MarkedLog {
            identity: Identity([7; 16]),
            age: None,
            offset: 0,
            path: path.to_owned(),
        };
        choose::<()>(Some(&disk(None, 0)), change, || Ok(marked.map(mark)), |_| false).unwrap()
    }

    /// What is chosen for an image without a mark if the log at `changed` has changes of it.
    fn chosen_unmarked(change: &ChangeRecord, changed: &str) -> DefinitionChoice {
        let has_changes = |log: &WalDefinition| log.log == Path::new(changed);
        choose::<()>(Some(&disk(None, 0)), change, || Ok(None), has_changes).unwrap()
    }

    #[test]
    fn an_edited_file_applies() {
        let done = change(RecordProgress::Done, None, Some(disk(None, 1)));
        assert_eq!(chosen(&done, None), DefinitionChoice::After);
        let unmarked = || Ok::<_, ()>(None);
        let of = |entry: Option<DiskDefinition>, change: &ChangeRecord| {
            choose(entry.as_ref(), change, unmarked, |_| true)
        };
        assert_eq!(of(Some(disk(None, 2)), &done), Ok(DefinitionChoice::File));
        assert_eq!(of(None, &done), Ok(DefinitionChoice::File));
        let added = ChangeRecord { entry: None, ..done };
        assert_eq!(of(None, &added), Ok(DefinitionChoice::After));
        assert_eq!(chosen(&added, None), DefinitionChoice::File);
    }

    #[test]
    fn the_mark_decides_a_pending_change() {
        let (none, one, other) = (disk(None, 0), disk(Some("/l/1"), 0), disk(Some("/l/2"), 0));
        let pending = |before: Option<&DiskDefinition>, after: Option<&DiskDefinition>| {
            change(RecordProgress::Pending, before.cloned(), after.cloned())
        };
        // A log is added.
        let adds = pending(Some(&none), Some(&one));
        assert_eq!(chosen(&adds, None), DefinitionChoice::Before);
        assert_eq!(chosen(&adds, Some("/l/1")), DefinitionChoice::After);
        assert_eq!(chosen(&adds, Some("/l/3")), DefinitionChoice::Before);
        // An image that cannot be examined decides nothing.
        assert_eq!(choose(Some(&disk(None, 0)), &adds, || Err(7), |_| true), Err(7));
        // A log is removed.
        let removes = pending(Some(&one), Some(&none));
        assert_eq!(chosen(&removes, None), DefinitionChoice::After);
        assert_eq!(chosen(&removes, Some("/l/1")), DefinitionChoice::Before);
        // A log replaces another.
        let replaces = pending(Some(&one), Some(&other));
        assert_eq!(chosen(&replaces, None), DefinitionChoice::Before);
        assert_eq!(chosen(&replaces, Some("/l/1")), DefinitionChoice::Before);
        assert_eq!(chosen(&replaces, Some("/l/2")), DefinitionChoice::After);
        // A disk is removed: with an unfinished log, it is served once more.
        assert_eq!(chosen(&pending(Some(&one), None), None), DefinitionChoice::After);
        assert_eq!(chosen(&pending(Some(&one), None), Some("/l/1")), DefinitionChoice::Before);
        assert_eq!(chosen(&pending(Some(&none), None), None), DefinitionChoice::After);
        // A disk is added.
        assert_eq!(chosen(&pending(None, Some(&none)), None), DefinitionChoice::Before);
        assert_eq!(chosen(&pending(None, Some(&one)), Some("/l/1")), DefinitionChoice::After);
        // The log stays.
        let stays = pending(Some(&one), Some(&disk(Some("/l/1"), 5)));
        assert_eq!(chosen(&stays, Some("/l/1")), DefinitionChoice::Before);
    }

    /// An image without its mark gets the log that has its changes.
    #[test]
    fn changes_decide_about_an_image_without_its_mark() {
        let (none, one, other) = (disk(None, 0), disk(Some("/l/1"), 0), disk(Some("/l/2"), 0));
        let pending = |before: &DiskDefinition, after: Option<&DiskDefinition>| {
            change(RecordProgress::Pending, Some(before.clone()), after.cloned())
        };
        let adds = pending(&none, Some(&one));
        assert_eq!(chosen_unmarked(&adds, "/l/1"), DefinitionChoice::After);
        assert_eq!(chosen_unmarked(&adds, "/l/2"), DefinitionChoice::Before);
        let removes = pending(&one, Some(&none));
        assert_eq!(chosen_unmarked(&removes, "/l/1"), DefinitionChoice::Before);
        assert_eq!(chosen_unmarked(&removes, "/l/2"), DefinitionChoice::After);
        let replaces = pending(&one, Some(&other));
        assert_eq!(chosen_unmarked(&replaces, "/l/1"), DefinitionChoice::Before);
        assert_eq!(chosen_unmarked(&replaces, "/l/2"), DefinitionChoice::After);
        assert_eq!(chosen_unmarked(&pending(&one, None), "/l/1"), DefinitionChoice::Before);
        let added = change(RecordProgress::Pending, None, Some(one.clone()));
        assert_eq!(chosen_unmarked(&added, "/l/1"), DefinitionChoice::After);
        // A mark that names neither of both logs, such as that of another image.
        let foreign =
            MarkedLog { identity: Identity::NONE, age: None, offset: 0, path: String::new() };
        let entry = disk(None, 0);
        let of_foreign =
            |has| choose::<()>(Some(&entry), &adds, || Ok(Some(foreign.clone())), |_| has);
        assert_eq!(of_foreign(true), Ok(DefinitionChoice::After));
        assert_eq!(of_foreign(false), Ok(DefinitionChoice::Before));
    }
}
