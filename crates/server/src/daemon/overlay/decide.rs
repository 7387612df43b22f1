//! Which definition of a disk applies at a start.
//!
//! | the file's entry | the record | the image's mark names | applies |
//! |---|---|---|---|
//! | other than in the record | any | any | the file; the record is set aside |
//! | as in the record | done | any | after |
//! | as in the record | pending, with another log than before | the log after | after |
//! | as in the record | pending, with another log than before | the log before | before |
//! | as in the record | pending, with another log than before | no log | before; after, if the disk has no log after |
//! | as in the record | pending, with the same log or none | any | before; after, if the disk is removed |
//!
//! A pending change was not acknowledged, so both directions are allowed. The mark decides only where the other
//! direction would leave changes in a log that the definition does not have.

use fathom_control::DiskDefinition;
use fathom_image::MarkedLog;

use super::record::{Change, State, as_recorded};
use crate::configuration::layers;
use crate::features::log::{is_named, is_same_log};

/// The definition that applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// The entry of the file, if there is one: it was edited after the change.
    File,
    /// The one before a pending change.
    Before,
    /// The one after the change.
    After,
}

/// Whether the file's entry for a disk is the one of the record.
pub(crate) fn is_unchanged(entry: Option<&DiskDefinition>, change: &Change) -> bool {
    entry.map(as_recorded) == change.entry
}

/// Whether a definition says what the file's entry says.
pub(crate) fn is_as_in_file(
    entry: Option<&DiskDefinition>,
    after: Option<&DiskDefinition>,
) -> bool {
    entry.map(as_recorded) == after.map(as_recorded)
}

/// Decides which definition of a disk applies. `entry` is the file's entry, and `marked` finds the mark of the
/// image.
///
/// # Errors
/// Those of `marked`.
pub(crate) fn choose<E>(
    entry: Option<&DiskDefinition>,
    change: &Change,
    marked: impl FnOnce() -> Result<Option<MarkedLog>, E>,
) -> Result<Choice, E> {
    if !is_unchanged(entry, change) {
        return Ok(Choice::File);
    }
    if change.state == State::Done {
        return Ok(Choice::After);
    }
    let log = |disk: &Option<DiskDefinition>| disk.as_ref().and_then(layers::wal);
    let (before, after) = (log(&change.before), log(&change.after));
    let is_same = match (&before, &after) {
        (None, None) => true,
        (Some(before), Some(after)) => is_same_log(before, after),
        _ => false,
    };
    let of_unmarked = if change.after.is_none() || after.is_none() && before.is_some() {
        Choice::After
    } else {
        Choice::Before
    };
    if is_same {
        return Ok(if change.after.is_none() { Choice::After } else { Choice::Before });
    }
    Ok(match marked()? {
        None => of_unmarked,
        Some(marked) if before.as_ref().is_some_and(|log| is_named(log, &marked)) => Choice::Before,
        Some(marked) if after.as_ref().is_some_and(|log| is_named(log, &marked)) => Choice::After,
        // The log of neither: the disk is refused, with the way out.
        Some(_) => Choice::Before,
    })
}

#[cfg(test)]
mod tests {
    use fathom_control::LayerDefinition;
    use serde_json::json;

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
        state: State,
        before: Option<DiskDefinition>,
        after: Option<DiskDefinition>,
    ) -> Change {
        let entry = Some(disk(None, 0));
        Change { name: "a".into(), number: 1, state, image: None, entry, before, after }
    }

    fn chosen(change: &Change, marked: Option<&str>) -> Choice {
        let mark = |path: &str| MarkedLog {
            identity: [7; 16],
            age: None,
            offset: 0,
            path: path.to_owned(),
        };
        choose::<()>(Some(&disk(None, 0)), change, || Ok(marked.map(mark))).unwrap()
    }

    #[test]
    fn an_edited_file_applies() {
        let done = change(State::Done, None, Some(disk(None, 1)));
        assert_eq!(chosen(&done, None), Choice::After);
        let unmarked = || Ok::<_, ()>(None);
        assert_eq!(choose(Some(&disk(None, 2)), &done, unmarked), Ok(Choice::File));
        assert_eq!(choose(None, &done, unmarked), Ok(Choice::File));
        let added = Change { entry: None, ..done };
        assert_eq!(choose(None, &added, unmarked), Ok(Choice::After));
        assert_eq!(chosen(&added, None), Choice::File);
    }

    #[test]
    fn the_mark_decides_a_pending_change() {
        let (none, one, other) = (disk(None, 0), disk(Some("/l/1"), 0), disk(Some("/l/2"), 0));
        let pending = |before: Option<&DiskDefinition>, after: Option<&DiskDefinition>| {
            change(State::Pending, before.cloned(), after.cloned())
        };
        // A log is added.
        let adds = pending(Some(&none), Some(&one));
        assert_eq!(chosen(&adds, None), Choice::Before);
        assert_eq!(chosen(&adds, Some("/l/1")), Choice::After);
        assert_eq!(chosen(&adds, Some("/l/3")), Choice::Before);
        // An image that cannot be examined decides nothing.
        assert_eq!(choose(Some(&disk(None, 0)), &adds, || Err(7)), Err(7));
        // A log is removed.
        let removes = pending(Some(&one), Some(&none));
        assert_eq!(chosen(&removes, None), Choice::After);
        assert_eq!(chosen(&removes, Some("/l/1")), Choice::Before);
        // A log replaces another.
        let replaces = pending(Some(&one), Some(&other));
        assert_eq!(chosen(&replaces, None), Choice::Before);
        assert_eq!(chosen(&replaces, Some("/l/1")), Choice::Before);
        assert_eq!(chosen(&replaces, Some("/l/2")), Choice::After);
        // A disk is removed: with an unfinished log, it is served once more.
        assert_eq!(chosen(&pending(Some(&one), None), None), Choice::After);
        assert_eq!(chosen(&pending(Some(&one), None), Some("/l/1")), Choice::Before);
        assert_eq!(chosen(&pending(Some(&none), None), None), Choice::After);
        // A disk is added.
        assert_eq!(chosen(&pending(None, Some(&none)), None), Choice::Before);
        assert_eq!(chosen(&pending(None, Some(&one)), Some("/l/1")), Choice::After);
        // The log stays.
        let stays = pending(Some(&one), Some(&disk(Some("/l/1"), 5)));
        assert_eq!(chosen(&stays, Some("/l/1")), Choice::Before);
    }
}
