//! The write-ahead logs in a cache: whose they are, and what they have.
use std::{io, os::unix::fs::FileExt, path::Path};

use fathom_cache::format::Superblock;
use fathom_control::Bytes;
use fathom_persistence::{Identity, SUPERBLOCK_LENGTH, Superblock as _, Verdict};
use fathom_wal::{Scanner, find_damage};
use serde::Serialize;

use super::volume::Volume;
use crate::{
    failure::{CommandResult, Failure},
    output::{progress::Progress, text::clean},
};

/// A place for a log that is not free.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Log {
    /// Where it begins, in bytes.
    pub offset: u64,
    /// The identity of the log; zeroes if it cannot be read.
    #[serde(skip)]
    pub identity: Identity,
    /// The disk's name.
    pub disk: String,
    /// The disk's image.
    pub image: String,
    /// The number of records with changes that may not be on the disk.
    pub records: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Why the log cannot be read; empty if it can.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub problem: String,
}

impl Log {
    /// Whether the log may have changes that are nowhere else.
    pub(super) fn is_needed(&self) -> bool {
        self.records > 0 || !self.problem.is_empty()
    }
}

/// The logs of a cache.
pub(super) fn logs(volume: &Volume, format: &Superblock, silent: bool) -> io::Result<Vec<Log>> {
    let total = u64::from(format.logs) * format.log_length;
    let mut progress = Progress::new("Reading logs", total).silent(silent);
    let mut logs = Vec::new();
    for number in 0..format.logs {
        let offset = format.log_offset(number);
        let begun = u64::from(number) * format.log_length;
        logs.extend(log(volume, format, offset, |at| progress.update(begun + at))?);
        progress.update(begun + format.log_length);
    }
    Ok(logs)
}

/// The log in the place at `offset`; `None` if the place is free.
fn log(
    volume: &Volume,
    format: &Superblock,
    offset: u64,
    mut report: impl FnMut(u64),
) -> io::Result<Option<Log>> {
    let mut copies = [0; 2 * SUPERBLOCK_LENGTH];
    volume.file.read_exact_at(&mut copies, offset)?;
    let found = Log { offset, ..Log::default() };
    let superblock = match fathom_wal::Superblock::select(&copies) {
        Ok(superblock) => superblock,
        Err(Verdict::Blank) => return Ok(None),
        Err(verdict) => {
            let problem = verdict.describe::<fathom_wal::Superblock>();
            return Ok(Some(Log { problem, ..found }));
        }
    };
    let (disk, image) = (superblock.owner.name.clone(), superblock.owner.home.clone());
    let mut found = Log { identity: superblock.log, disk, image, ..found };
    if fathom_wal::RING_OFFSET + superblock.ring_length > format.log_length {
        let problem = "it is longer than its place".to_owned();
        return Ok(Some(Log { problem, ..found }));
    }
    let mut scanner = Scanner::new(&superblock);
    let (mut bytes, mut read) = (Vec::new(), 0);
    while let Some((at, length)) = scanner.next_read() {
        bytes.resize(length, 0);
        volume.file.read_exact_at(&mut bytes, offset + at)?;
        read += length as u64;
        report(read.min(format.log_length));
        if let Some(record) = scanner.feed(&bytes).filter(|found| !found.record.entries.is_empty())
        {
            found.records += 1;
            found.bytes += record.record.length;
        }
    }
    if let Some(end) = scanner.end() {
        let damage = find_damage(&superblock, end, |at, length| {
            let mut bytes = vec![0; length as usize];
            volume.file.read_exact_at(&mut bytes, offset + at).map(|()| bytes)
        })?;
        found.problem = damage.map(|damage| damage.to_string()).unwrap_or_default();
    }
    Ok(Some(found))
}

/// Refuses to replace a cache whose logs may have changes that are nowhere else.
pub(super) fn refuse_if_needed(volume: &Volume, path: &Path, silent: bool) -> CommandResult {
    let Ok(format) = volume.superblock(path) else { return Ok(()) };
    let found = logs(volume, &format, silent).map_err(|error| Failure::io("read", path, &error))?;
    let Some(log) = found.iter().find(|log| log.is_needed()) else { return Ok(()) };
    let shown = path.display();
    let (message, remedy) = if log.problem.is_empty() {
        (
            format!(
                "{shown} has {} of changes of the disk {} that may not be in its image {}",
                Bytes(log.bytes),
                clean(&log.disk),
                clean(&log.image)
            ),
            "serve that disk with this cache, then run `fathom cache detach` or shut down the daemon: both \
             write the changes back",
        )
    } else {
        (
            format!(
                "{shown} has a log at byte {} that cannot be read: {}",
                log.offset, log.problem
            ),
            "restore it",
        )
    };
    let offset = log.offset;
    Err(Failure::new(message).advise(format!(
        "{remedy}. If its changes may be lost: `fathom cache clear {shown} --log-at {offset} --force`"
    )))
}
