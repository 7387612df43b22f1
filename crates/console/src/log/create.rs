//! `fathom log create`: prepares a place on a block device for a log.
use std::{
    fs::File,
    io,
    os::unix::fs::{FileExt, FileTypeExt},
    path::{Path, PathBuf},
};

use clap::Args;
use fathom_control::Bytes;
use fathom_failure::Failing as _;
use fathom_image::{Holder, LockError, LockPurpose, Signature};
use fathom_persistence::{SUPERBLOCK_LENGTH, Superblock as _, Verdict};
use fathom_wal::{RING_OFFSET, Superblock};
use rustix::fs::{OFlags, SeekFrom, seek};
use serde::Serialize;

use crate::{
    disk::read_up_to,
    failure::{CommandResult, Failure},
    output::{self, Format},
};

/// The bytes of a place that have to be empty.
const EXAMINED: u64 = 1 << 20;
/// A log begins at a multiple of this, in bytes.
const ALIGNMENT: u64 = 4096;
/// The shortest place that a log can have, in bytes.
const LENGTH_MIN: u64 = RING_OFFSET + 16 * ALIGNMENT;

/// Options of `fathom log create`.
#[derive(Debug, Args)]
pub struct CreateLogOptions {
    /// The block device
    path: PathBuf,
    /// Where the log begins: the `offset` of its layer
    #[arg(long, value_name = "SIZE", default_value = "0")]
    offset: Bytes,
    /// Prepare a place with other data, which is lost
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    format: Format,
}

#[derive(Serialize)]
struct Prepared<'a> {
    path: &'a Path,
    offset_bytes: u64,
}

pub(super) fn run(options: &CreateLogOptions) -> CommandResult {
    let (path, offset) = (options.path.as_path(), options.offset.0);
    let failed = |error: io::Error| Failure::io("write", path, &error);
    let (file, _node) = claim(path)?;
    let size = seek(&file, SeekFrom::End(0)).map_err(io::Error::from).map_err(failed)?;
    if offset % ALIGNMENT != 0 || size.saturating_sub(offset) < LENGTH_MIN {
        return Err(Failure::usage(format!("no log can begin at {}", options.offset)).advise(
            format!(
                "choose a multiple of 4 KiB before the end of the device, which has {}",
                Bytes(size)
            ),
        ));
    }
    refuse_log(&file, path, offset)?;
    let content = content(&file, size, offset).map_err(failed)?;
    if let (Some(content), false) = (content, options.force) {
        return Err(Failure::new(format!("{} holds {content}", path.display()))
            .advise("choose another device, or prepare it with --force: what it holds is lost"));
    }
    prepare(&file, size, offset).map_err(failed)?;
    if options.format.json {
        return output::json(&Prepared { path, offset_bytes: offset });
    }
    output::text_line(&format!("{}: a disk can have its log at byte {offset}", path.display()))
}

/// Opens a block device that nothing else uses, for as long as both files are open.
fn claim(path: &Path) -> CommandResult<(File, Option<File>)> {
    let shown = path.display();
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::ResourceBusy => {
            let holder = Holder::of(path);
            Failure::new(format!("{shown} is {holder}")).advise(holder.remedy())
        }
        _ => Failure::io("open", path, &error),
    };
    if !std::fs::metadata(path).map_err(failed)?.file_type().is_block_device() {
        return Err(Failure::new(format!("{shown} is no block device"))
            .advise("the daemon makes the file of a log itself, if its layer has a `size`"));
    }
    let flags = OFlags::NONBLOCK.bits() as i32;
    let file = fathom_image::open(path, LockPurpose::Exclusive, flags).map_err(failed)?;
    let locked = fathom_image::lock(&file, LockPurpose::Exclusive)
        .and_then(|()| fathom_image::lock_device(&file, LockPurpose::Exclusive));
    match locked {
        Ok(node) => Ok((file, node)),
        Err(LockError::Unsupported(_)) => Ok((file, None)),
        Err(LockError::Held) => Err(Failure::new(format!("{shown} is in use by another process"))
            .advise("stop serving the disks with a log on it first")),
        Err(error) => Err(Failure::new(format!("cannot lock {shown}: {error}"))),
    }
}

/// Refuses a place with a log: it may have changes that are nowhere else.
fn refuse_log(file: &File, path: &Path, offset: u64) -> CommandResult {
    let head = read_up_to(file, offset, 2 * SUPERBLOCK_LENGTH)
        .map_err(|error| Failure::io("read", path, &error))?;
    let what = match Superblock::select(&head) {
        Ok(superblock) => format!("the log of the disk {:?}", superblock.owner.name),
        Err(Verdict::Blank | Verdict::Foreign) => {
            return refuse_next(file, path, offset);
        }
        Err(verdict) => verdict.describe::<Superblock>(),
    };
    Err(refusal(path, offset, &what))
}

/// Refuses a place so close before that of another log that preparing it would empty that one.
fn refuse_next(file: &File, path: &Path, offset: u64) -> CommandResult {
    let place = read_up_to(file, offset, EXAMINED as usize)
        .map_err(|error| Failure::io("read", path, &error))?;
    let begins = |block: &usize| {
        Superblock::is_place(place.get(block * SUPERBLOCK_LENGTH..).unwrap_or_default())
    };
    match (2..place.len() / SUPERBLOCK_LENGTH).find(begins) {
        None => Ok(()),
        Some(block) => {
            let at = offset + (block * SUPERBLOCK_LENGTH) as u64;
            Err(refusal(path, at, "another log"))
        }
    }
}

fn refusal(path: &Path, offset: u64, what: &str) -> Failure {
    Failure::new(format!("{} at byte {offset}: {what}", path.display()))
        .advise("choose another place: that log may have changes that are nowhere else")
}

/// What the place has; `None` if it is empty. Places for logs begin at several offsets of one
/// device, so that its other content is of interest only if the device is not one with logs.
fn content(file: &File, size: u64, offset: u64) -> io::Result<Option<String>> {
    let start = read_up_to(file, 0, SUPERBLOCK_LENGTH)?;
    if !Superblock::is_place(&start) {
        if let Some(found) = Signature::of(file, size)? {
            return Ok(Some(format!("{} (a signature)", found.0)));
        }
    }
    let place = read_up_to(file, offset, EXAMINED.min(size - offset) as usize)?;
    let is_empty = place.iter().all(|byte| *byte == 0) || Superblock::is_place(&place);
    Ok((!is_empty).then(|| "other data".into()))
}

/// Empties the place, and notes that a log may be made there.
fn prepare(file: &File, size: u64, offset: u64) -> io::Result<()> {
    let zeroes = vec![0; EXAMINED as usize];
    let length = EXAMINED.min(size - offset);
    file.write_all_at(&zeroes[..length as usize], offset)?;
    file.sync_all()?;
    for copy in 0..2 {
        file.write_all_at(&Superblock::prepared(), offset + copy * SUPERBLOCK_LENGTH as u64)?;
    }
    file.sync_all()
}
