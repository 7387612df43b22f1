//! What is known of the scrubs of a pool: a file of JSON in the folder for records,
//! `scrub-IDENTITY.json`, so that a later daemon goes on with one, and knows what is damaged.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use fathom_control::{ScrubEntry, ScrubPhase};
use fathom_image::replace_file;
use serde::{Deserialize, Serialize};

/// The version of the format.
const VERSION: u32 = 1;
/// The longest record that is read, in bytes.
const LENGTH_MAX: u64 = 1 << 20;

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ScrubRecord {
    version: u32,
    /// The last one that was complete.
    pub(super) complete: Option<ScrubEntry>,
    /// The last one, unless it was complete.
    pub(super) latest: Option<ScrubEntry>,
}

fn path(folder: &Path, identity: &str) -> PathBuf {
    folder.join(format!("scrub-{identity}.json"))
}

impl ScrubRecord {
    /// The record of a pool; an empty one if there is none, or it is damaged.
    pub(super) fn read(folder: &Path, identity: &str) -> Self {
        let read = || -> Option<Self> {
            let mut text = String::new();
            let file = File::open(path(folder, identity)).ok()?;
            file.take(LENGTH_MAX).read_to_string(&mut text).ok()?;
            let record: Self = serde_json::from_str(&text).ok()?;
            (record.version == VERSION).then_some(record)
        };
        let mut record = read().unwrap_or_default();
        if let Some(latest) = &mut record.latest {
            if latest.phase == ScrubPhase::Running {
                latest.phase = ScrubPhase::Interrupted;
            }
            latest.number = 0;
        }
        record
    }

    pub(super) fn write(&self, folder: &Path, identity: &str) -> io::Result<()> {
        let path = path(folder, identity);
        let text = serde_json::to_string(&Self { version: VERSION, ..self.clone() })?;
        replace_file(&path, &path.with_extension("new"), text.as_bytes(), false)
    }

    /// Takes what is known of a scrub now. One of the maps alone does not say that blocks are
    /// sound.
    pub(super) fn take(&mut self, entry: ScrubEntry) {
        if entry.phase == ScrubPhase::Complete && !entry.maps_only {
            (self.complete, self.latest) = (Some(entry), None);
        } else {
            self.latest = Some(entry);
        }
    }

    /// The scrub in progress, or the last one.
    pub(super) fn last(&self) -> Option<&ScrubEntry> {
        self.latest.as_ref().or(self.complete.as_ref())
    }

    /// The one that has found more damage: while a scrub is in progress, what the last one has
    /// found counts.
    pub(super) fn worst(&self) -> Option<&ScrubEntry> {
        let both = self.complete.iter().chain(&self.latest);
        both.filter(|entry| entry.damage_count() > 0).max_by_key(|entry| entry.damage_count())
    }

    /// When the next one begins, in seconds since 1970, and the one with which it goes on.
    pub(super) fn next(&self, every_s: u64, now_s: u64) -> (u64, Option<&ScrubEntry>) {
        let latest = self.latest.as_ref().filter(|latest| !latest.maps_only);
        match latest.or(self.complete.as_ref()) {
            Some(last) if last.phase == ScrubPhase::Interrupted => (now_s, Some(last)),
            // A clock that was set back does not hold it up for more than an interval.
            Some(last) => (last.begun_s.min(now_s).saturating_add(every_s), None),
            None => (now_s, None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(phase: ScrubPhase, begun_s: u64, damaged_blocks: u64) -> ScrubEntry {
        ScrubEntry { phase, begun_s, damaged_blocks, ..ScrubEntry::default() }
    }

    #[test]
    fn a_record_survives_and_says_when_the_next_scrub_begins() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let mut record = ScrubRecord::read(folder, "x");
        assert_eq!(record.next(100, 1000), (1000, None));
        record.take(entry(ScrubPhase::Complete, 950, 3));
        assert_eq!(record.next(100, 1000), (1050, None));
        assert_eq!(record.next(100, 900).0, 1000, "the clock was set back");
        record.take(entry(ScrubPhase::Running, 1050, 1));
        assert_eq!(record.worst().map(|it| it.damaged_blocks), Some(3));
        record.write(folder, "x").unwrap();
        let mut record = ScrubRecord::read(folder, "x");
        assert_eq!(record.last().map(|it| it.phase), Some(ScrubPhase::Interrupted));
        assert!(matches!(record.next(100, 1060), (1060, Some(_))), "it goes on");
        record.take(entry(ScrubPhase::Ended, 1050, 1));
        assert_eq!(record.next(100, 1060), (1150, None));
        record.take(entry(ScrubPhase::Complete, 1150, 2));
        let maps = ScrubEntry { maps_only: true, ..entry(ScrubPhase::Complete, 1190, 0) };
        record.take(maps);
        assert_eq!(record.worst().map(|it| it.damaged_blocks), Some(2));
        assert_eq!(record.next(100, 1200), (1250, None));
        record.take(entry(ScrubPhase::Complete, 1250, 0));
        assert_eq!(record.worst(), None, "nothing is damaged any more");
        std::fs::write(path(folder, "x"), "{").unwrap();
        assert_eq!(ScrubRecord::read(folder, "x"), ScrubRecord::default());
    }
}
