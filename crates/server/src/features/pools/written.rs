//! Which files of guests were written between two snapshots: the accounts of the layer `classify`,
//! closed with each snapshot.
//!
//! What was written until a snapshot since the one before it is a record: a file of JSON in the
//! folder for records, `written-POOL-SNAPSHOT-SINCE.json`, with the identity of the pool and the
//! numbers of both snapshots. When a snapshot is deleted, its record is added to the one that
//! follows. Records are for people: one that is lost or damaged makes an answer incomplete.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use fathom_control::{
    DiskUsage, ErrorBody, UsageRow, WrittenFile, WrittenFiles, WrittenFilesQuery,
};
use fathom_image::replace_file;
use fathom_store::Pool;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::refused;
use super::snapshot::SnapshotRequest;
use crate::daemon::Daemon;

/// The version of the format.
const VERSION: u32 = 1;
/// The most files of a record and of an answer.
const FILES_MAX: usize = 1000;
/// The longest record that is read, in bytes.
const LENGTH_MAX: u64 = 8 << 20;
/// The most records that are found.
const RECORDS_MAX: usize = 100_000;

/// A record.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    version: u32,
    #[serde(flatten)]
    written: WrittenFiles,
}

/// What the guest had written to a volume at some time.
#[derive(Debug, Default)]
struct Counts {
    /// The instance of the accounts, and the snapshot at which they were taken.
    instance: u64,
    snapshot: u32,
    /// By file, whose own count is 0.
    files: HashMap<WrittenFile, u64>,
    total: u64,
    unknown: u64,
    /// Of rows that were removed to make room.
    folded: u64,
}

/// See the module.
#[derive(Default)]
pub(crate) struct WrittenRecords {
    /// By the identity of the pool and the number of the volume. Held while records are changed.
    last: Mutex<HashMap<(String, u32), Counts>>,
}

fn file_of(row: &UsageRow) -> WrittenFile {
    WrittenFile {
        path: row.path.clone(),
        kind: row.kind.clone(),
        cgroup: row.cgroup.clone(),
        device: row.device.clone(),
        bytes: 0,
    }
}

impl Counts {
    /// What a disk's accounts say now.
    fn of(usage: &DiskUsage, snapshot: u32) -> Self {
        let mut files = HashMap::new();
        for row in usage.rows.iter().filter(|row| row.counts.write.bytes > 0) {
            *files.entry(file_of(row)).or_default() += row.counts.write.bytes;
        }
        Self {
            instance: usage.instance,
            snapshot,
            files,
            total: usage.total.write.bytes,
            unknown: usage.unknown.write.bytes,
            folded: usage.folded.write.bytes,
        }
    }

    /// Whether `before` is of the same accounts, and was taken at the snapshot `since`.
    fn goes_on_from(&self, before: Option<&Self>, since: u32) -> bool {
        before.is_some_and(|before| before.instance == self.instance && before.snapshot == since)
    }

    /// What was written since `before`; all, if that is of other accounts.
    fn since(&self, before: Option<&Self>) -> WrittenFiles {
        let none = Self::default();
        let before = before.filter(|before| before.instance == self.instance).unwrap_or(&none);
        let written = |(file, bytes): (&WrittenFile, &u64)| {
            let earlier = before.files.get(file).copied().unwrap_or(0);
            // Its row was removed and made again.
            let bytes = bytes.checked_sub(earlier).unwrap_or(*bytes);
            WrittenFile { bytes, ..file.clone() }
        };
        let files = self.files.iter().map(written).filter(|file| file.bytes > 0).collect();
        let mut written = WrittenFiles {
            complete: true,
            written_bytes: self.total.saturating_sub(before.total),
            unknown_bytes: self.unknown.saturating_sub(before.unknown),
            other_bytes: self.folded.saturating_sub(before.folded),
            files,
        };
        limit(&mut written);
        written
    }
}

/// Leaves the files that were written most.
fn limit(written: &mut WrittenFiles) {
    written.files.sort_by(|one, other| other.bytes.cmp(&one.bytes).then_with(|| one.cmp(other)));
    let rest = written.files.split_off(written.files.len().min(FILES_MAX));
    written.other_bytes += rest.iter().map(|file| file.bytes).sum::<u64>();
}

/// Adds what was written at another time.
fn add(written: &mut WrittenFiles, more: &WrittenFiles) {
    written.complete &= more.complete;
    written.written_bytes += more.written_bytes;
    written.unknown_bytes += more.unknown_bytes;
    written.other_bytes += more.other_bytes;
    let mut files: HashMap<WrittenFile, u64> = HashMap::new();
    for file in written.files.iter().chain(&more.files) {
        *files.entry(WrittenFile { bytes: 0, ..file.clone() }).or_default() += file.bytes;
    }
    written.files = files.into_iter().map(|(file, bytes)| WrittenFile { bytes, ..file }).collect();
    limit(written);
}

/// The records of a pool: by the number of the snapshot, that of the one before, and the file.
struct PoolRecords {
    folder: PathBuf,
    pool: String,
    found: BTreeMap<u32, (u32, PathBuf)>,
}

impl PoolRecords {
    fn find(folder: &Path, pool: &str) -> Self {
        let prefix = format!("written-{pool}-");
        let mut records =
            Self { folder: folder.to_owned(), pool: pool.to_owned(), found: BTreeMap::new() };
        let Ok(entries) = fs::read_dir(folder) else { return records };
        for path in entries.flatten().map(|entry| entry.path()).take(RECORDS_MAX) {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let numbers = name.strip_prefix(&prefix).and_then(|rest| rest.strip_suffix(".json"));
            let Some((snapshot, since)) = numbers.and_then(|it| it.split_once('-')) else {
                continue;
            };
            let (Ok(snapshot), Ok(since)) = (snapshot.parse(), since.parse::<u32>()) else {
                continue;
            };
            // After a kill there may be two: the one that goes further back has the other one.
            match records.found.get(&snapshot) {
                Some((other, _)) if *other <= since => drop(fs::remove_file(&path)),
                _ => {
                    if let Some((_, old)) = records.found.insert(snapshot, (since, path)) {
                        let _ = fs::remove_file(old);
                    }
                }
            }
        }
        records
    }

    fn read(&self, snapshot: u32) -> Option<WrittenFiles> {
        let (_, path) = self.found.get(&snapshot)?;
        let mut text = String::new();
        File::open(path).ok()?.take(LENGTH_MAX).read_to_string(&mut text).ok()?;
        let record: Record = serde_json::from_str(&text).ok()?;
        (record.version == VERSION).then_some(record.written)
    }

    fn write(&mut self, snapshot: u32, since: u32, written: WrittenFiles) -> io::Result<()> {
        let name = format!("written-{}-{snapshot}-{since}.json", self.pool);
        let path = self.folder.join(name);
        let text = serde_json::to_string(&Record { version: VERSION, written })?;
        let draft = path.with_extension("new");
        replace_file(&path, &draft, text.as_bytes(), false)?;
        if let Some((_, old)) = self.found.insert(snapshot, (since, path.clone())) {
            if old != path {
                fs::remove_file(old)?;
            }
        }
        Ok(())
    }

    /// Adds the records of deleted snapshots to those that follow.
    fn unite(&mut self, exists: impl Fn(u32) -> bool) -> io::Result<()> {
        let gone: Vec<u32> = self.found.keys().copied().filter(|number| !exists(*number)).collect();
        for number in gone {
            let Some((before, path)) = self.found.get(&number).cloned() else { continue };
            let is_next = |(_, (since, _)): &(&u32, &(u32, PathBuf))| *since == number;
            let next: Vec<u32> = self.found.iter().filter(is_next).map(|(next, _)| *next).collect();
            for next in next {
                let mut written = self.read(next).unwrap_or_default();
                add(&mut written, &self.read(number).unwrap_or_default());
                self.write(next, before, written)?;
            }
            self.found.remove(&number);
            fs::remove_file(path)?;
        }
        Ok(())
    }
}

impl Daemon {
    /// Closes the accounts of the disks of which snapshots have been taken.
    pub(super) fn close_accounts(&self, request: &SnapshotRequest<'_>) {
        for volume in request.volumes {
            if let Err(error) = self.close_account(request.path, request.pool, volume, request.name)
            {
                tracing::debug!(volume, %error, "which files were written is not recorded");
            }
        }
    }

    fn close_account(
        &self,
        path: &Path,
        pool: &Pool,
        volume: &str,
        name: &str,
    ) -> Result<(), ErrorBody> {
        let Some(served) = self.disk_of_volume(path, volume) else { return Ok(()) };
        let number = pool.number_of(volume, None).map_err(refused)?;
        let snapshot = pool.number_of(volume, Some(name)).map_err(refused)?;
        let mut usage = self.usage(Some(served.disk.name()), None)?;
        let Some(usage) = usage.disks.pop().filter(|usage| usage.counted) else { return Ok(()) };
        let counts = Counts::of(&usage, snapshot);
        let since = pool.since(snapshot).unwrap_or(0);
        let identity = pool.identity().to_string();
        let written = self.part::<WrittenRecords>();
        let mut last = written.last.lock();
        let before = last.get(&(identity.clone(), number));
        let complete = counts.goes_on_from(before, since);
        let record = WrittenFiles { complete, ..counts.since(before) };
        last.insert((identity.clone(), number), counts);
        let mut records = PoolRecords::find(&self.records_folder(), &identity);
        let snapshots = pool.snapshots();
        let exists = |number: u32| snapshots.iter().any(|found| found.id == number);
        let done = records.write(snapshot, since, record).and_then(|()| records.unite(exists));
        done.map_err(|error| refused(error.into()))
    }

    /// The files that were written between two snapshots.
    ///
    /// # Errors
    /// If no disk uses the pool, or it has no such snapshot.
    pub(super) fn written_files(
        &self,
        query: &WrittenFilesQuery,
    ) -> Result<WrittenFiles, ErrorBody> {
        let pool = self.open_pool(&query.path)?;
        let number = |name: Option<&str>| pool.number_of(&query.volume, name).map_err(refused);
        let (from, to) = (number(Some(&query.from))?, number(query.to.as_deref())?);
        let identity = pool.identity().to_string();
        let written = self.part::<WrittenRecords>();
        let last = written.last.lock();
        let mut sum = WrittenFiles { complete: true, ..WrittenFiles::default() };
        let mut at = to;
        if query.to.is_none() {
            let disk = self.disk_of_volume(&query.path, &query.volume);
            let usage =
                disk.map(|served| self.usage(Some(served.disk.name()), None)).transpose()?;
            let usage = usage.and_then(|mut usage| usage.disks.pop()).unwrap_or_default();
            let counts = Counts::of(&usage, 0);
            let before = last.get(&(identity.clone(), to));
            let since = pool.since(to).unwrap_or(0);
            sum = counts.since(before);
            sum.complete = usage.counted && counts.goes_on_from(before, since);
            at = since;
        }
        let records = PoolRecords::find(&self.records_folder(), &identity);
        while at != from {
            let record = records.found.get(&at).filter(|_| at > from);
            let Some((since, more)) =
                record.and_then(|(since, _)| Some((*since, records.read(at)?)))
            else {
                sum.complete = false;
                break;
            };
            add(&mut sum, &more);
            at = since;
        }
        Ok(sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(files: &[(&str, u64)]) -> WrittenFiles {
        let file = |(path, bytes): &(&str, u64)| WrittenFile {
            path: (*path).to_owned(),
            bytes: *bytes,
            ..WrittenFile::default()
        };
        let written_bytes = files.iter().map(|(_, bytes)| bytes).sum();
        let files = files.iter().map(file).collect();
        WrittenFiles { complete: true, written_bytes, files, ..WrittenFiles::default() }
    }

    #[test]
    fn the_record_of_a_deleted_snapshot_is_part_of_the_next_one() {
        let folder = tempfile::tempdir().unwrap();
        let mut records = PoolRecords::find(folder.path(), "pool");
        for (snapshot, since) in [(2, 0), (3, 2), (4, 3), (6, 3)] {
            records
                .write(snapshot, since, written(&[("/a", 10), ("/b", snapshot.into())]))
                .unwrap();
        }
        // Another pool's, and what is none.
        fs::write(folder.path().join("written-other-9-8.json"), "{}").unwrap();
        fs::write(folder.path().join("written-pool-9.json"), "{}").unwrap();
        records.unite(|number| number != 3).unwrap();
        let found = PoolRecords::find(folder.path(), "pool");
        let numbers: Vec<_> =
            found.found.iter().map(|(number, (since, _))| (*number, *since)).collect();
        assert_eq!(numbers, [(2, 0), (4, 2), (6, 2)]);
        assert_eq!(found.read(4).unwrap(), written(&[("/a", 20), ("/b", 7)]));
        assert_eq!(found.read(6).unwrap(), written(&[("/a", 20), ("/b", 9)]));
        // A kill in between has left the older one of the same snapshot.
        records.write(6, 3, written(&[])).unwrap();
        records.write(6, 2, written(&[("/a", 1)])).unwrap();
        fs::write(folder.path().join("written-pool-6-3.json"), "{}").unwrap();
        let found = PoolRecords::find(folder.path(), "pool");
        assert_eq!(found.found[&6].0, 2);
        assert!(!folder.path().join("written-pool-6-3.json").exists());
        fs::write(folder.path().join("written-pool-6-2.json"), "{").unwrap();
        assert_eq!(found.read(6), None);
    }

    #[test]
    fn what_was_written_is_the_difference_of_accounts() {
        let usage = |instance: u64, bytes: &[(&str, u64)]| {
            let mut usage = DiskUsage { instance, counted: true, ..DiskUsage::default() };
            for (path, bytes) in bytes {
                let mut row = UsageRow { path: (*path).to_owned(), ..UsageRow::default() };
                row.counts.write.bytes = *bytes;
                usage.total.write.bytes += bytes;
                usage.rows.push(row);
            }
            usage
        };
        let before = Counts::of(&usage(1, &[("/a", 5), ("/b", 5), ("/b", 1)]), 7);
        let now = Counts::of(&usage(1, &[("/a", 5), ("/b", 9), ("/b", 4), ("/c", 1)]), 8);
        assert_eq!(now.since(Some(&before)), written(&[("/b", 7), ("/c", 1)]));
        let restarted = Counts::of(&usage(2, &[("/a", 3)]), 8);
        assert_eq!(restarted.since(Some(&before)), written(&[("/a", 3)]));
        let many: Vec<(String, u64)> = (0..2000).map(|it| (format!("/{it}"), 1 + it)).collect();
        let many: Vec<(&str, u64)> = many.iter().map(|(path, bytes)| (&**path, *bytes)).collect();
        let found = Counts::of(&usage(1, &many), 0).since(None);
        assert_eq!((found.files.len(), found.files[0].bytes), (FILES_MAX, 2000));
        assert_eq!(found.other_bytes, (1..=1000).sum::<u64>());
    }
}
