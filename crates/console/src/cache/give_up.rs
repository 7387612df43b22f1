//! `fathom cache clear --log`: gives up a log, so that another disk can have its place.
use std::{
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use fathom_cache::format::Superblock;
use fathom_control::{Bytes, count};
use fathom_image::LogMark;
use fathom_persistence::{Identity, SUPERBLOCK_LENGTH, erasure};
use serde::Serialize;

use super::{
    ClearOptions,
    logs::{self, Log},
    volume::Volume,
};
use crate::{
    disk::folders_of_daemons,
    failure::{CommandResult, Failure},
    output::{self, text::clean},
};

/// What has become of the mark of the image that names the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Mark {
    /// The image has none that names the log, or there is no image any more.
    Absent,
    /// The image has all changes, and does not need the log any more.
    Removed,
    /// The image may lack changes, and is not served before this command has removed its mark.
    Kept(String),
}

#[derive(Serialize)]
struct GivenUp<'a> {
    path: &'a Path,
    log: &'a Log,
    mark: Mark,
}

/// Gives up the log that the options name. The volume is open for writing.
pub(super) fn run(options: &ClearOptions, volume: &Volume, format: &Superblock) -> CommandResult {
    let path = &options.path;
    let logs = logs::logs(volume, format, options.format.json)
        .map_err(|error| Failure::io("read the logs of", path, &error))?;
    let log = choose(options, &logs)?;
    if log.is_needed() && !options.force {
        return Err(refusal(path, log));
    }
    let folders = folders_of_daemons(&options.control.socket());
    // An image that has all changes is served without the log from now on. Before that, a crash
    // leaves both.
    let mark = end_mark(log, &folders).map_err(|error| {
        Failure::new(format!(
            "the mark of {} that names the log cannot be removed: {error}",
            clean(&log.image)
        ))
        .advise("make the image's folder writable, or try again as root")
    })?;
    erase(volume, log.offset).map_err(|error| Failure::io("write", path, &error))?;
    let given_up = GivenUp { path, log, mark };
    if options.format.json {
        return output::json(&given_up);
    }
    output::text_line(&given_up.text())
}

fn choose<'l>(options: &ClearOptions, logs: &'l [Log]) -> CommandResult<&'l Log> {
    let is_meant = |log: &&Log| match (&options.log, options.log_at) {
        (Some(disk), _) => log.disk == *disk && log.identity != Identity::NONE,
        (None, offset) => Some(log.offset) == offset,
    };
    let mut meant = logs.iter().filter(is_meant);
    let (first, second) = (meant.next(), meant.next());
    let shown = options.path.display();
    if second.is_some() {
        return Err(Failure::new(format!("{shown} has several logs of this disk"))
            .advise("choose one with `--log-at`; `fathom cache check` shows where each begins"));
    }
    first.ok_or_else(|| {
        let which = match (&options.log, options.log_at) {
            (Some(disk), _) => format!("of the disk {}", clean(disk)),
            (None, offset) => format!("at byte {}", offset.unwrap_or_default()),
        };
        Failure::new(format!("{shown} has no log {which}"))
            .advise(format!("`fathom cache check {shown}` shows its logs"))
    })
}

fn refusal(path: &Path, log: &Log) -> Failure {
    let shown = path.display();
    let again = "run the command again with `--force`";
    if !log.problem.is_empty() {
        let message =
            format!("the log at byte {} of {shown} cannot be read: {}", log.offset, log.problem);
        return Failure::new(message).advise(format!(
            "it may have changes that are nowhere else: restore {shown}. If these may be lost, {again}"
        ));
    }
    let (disk, image) = (clean(&log.disk), clean(&log.image));
    Failure::new(format!(
        "the log of the disk {disk} has {} of changes that may not be in its image {image}",
        Bytes(log.bytes)
    ))
    .advise(format!(
        "serve the disk with this cache, then run `fathom cache detach` or shut down the daemon: both write \
         the changes back. If they may be lost, {again}"
    ))
}

/// Removes the mark of the log's image if the image has all changes.
fn end_mark(log: &Log, folders: &[PathBuf]) -> io::Result<Mark> {
    let image = Path::new(&log.image);
    for folder in folders {
        // The image may be gone for long.
        let Ok(mark) = LogMark::open(image, folder) else { continue };
        let names_log = match mark.read() {
            Ok(found) => found.is_some_and(|found| found.identity == log.identity),
            // A damaged mark is left to its owner.
            Err(_) => false,
        };
        if !names_log {
            continue;
        }
        if log.is_needed() {
            return Ok(Mark::Kept(format!("fathom log discard --image {}", clean(&log.image))));
        }
        mark.clear()?;
        return Ok(Mark::Removed);
    }
    // A block device is not found by the name that the log has of it.
    for folder in folders.iter().filter(|_| !log.is_needed()) {
        if LogMark::clear_of_devices(log.identity, folder)? {
            return Ok(Mark::Removed);
        }
    }
    Ok(Mark::Absent)
}

/// Makes the place at `place` free.
fn erase(volume: &Volume, place: u64) -> io::Result<()> {
    let mut superblocks = [0; 2 * SUPERBLOCK_LENGTH];
    volume.file.read_exact_at(&mut superblocks, place)?;
    for (offset, bytes) in erasure(&superblocks) {
        volume.file.write_all_at(&bytes, place + offset)?;
        volume.file.sync_all()?;
    }
    Ok(())
}

impl GivenUp<'_> {
    fn text(&self) -> String {
        let Self { path, log, mark } = self;
        let whose = if log.disk.is_empty() {
            format!("at byte {}", log.offset)
        } else {
            format!("of the disk {}", clean(&log.disk))
        };
        let mut text = format!("{}: the place of the log {whose} is free", path.display());
        if log.records > 0 {
            let records = count(log.records, "record");
            text += &format!("; {} of changes in {records} are lost", Bytes(log.bytes));
        }
        let image = clean(&log.image);
        match mark {
            Mark::Absent => {}
            Mark::Removed => text += &format!(". {image} does not need it any more"),
            Mark::Kept(removal) => {
                text += &format!(
                    ". {image} is not served before its mark is removed, because it may be an old or torn \
                     state of the disk: restore a backup, or run `{removal}` and check its file system"
                );
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_and_what_follows_is_said() {
        let log = Log {
            disk: "db\u{1b}[2J".into(),
            image: "/images/db.raw".into(),
            records: 2,
            bytes: 3 << 20,
            ..Log::default()
        };
        let path = Path::new("/nvme/cache");
        let text = |log: &Log, mark| GivenUp { path, log, mark }.text();
        let lost = text(&log, Mark::Kept("remove the attribute".into()));
        for part in [
            "log of the disk db",
            "3 MiB of changes in 2 records are lost",
            "not served",
            "remove the",
        ] {
            assert!(lost.contains(part), "{part} is missing: {lost}");
        }
        assert!(!lost.contains('\u{1b}'), "{lost}");
        let empty = Log { records: 0, bytes: 0, ..log };
        let text = text(&empty, Mark::Removed);
        assert!(!text.contains("lost") && text.contains("does not need it any more"), "{text}");
        let damaged = Log { problem: "it is damaged".into(), offset: 8192, ..Log::default() };
        let text = GivenUp { path, log: &damaged, mark: Mark::Absent }.text();
        assert!(text.contains("the log at byte 8192 is free"), "{text}");
    }
}
