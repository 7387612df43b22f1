//! `fathom cache create`: a new cache on a file or a block device.
use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use fathom_cache::format::{BLOCK_SIZES, DISKS_MAX, LOG_LENGTHS, LOG_UNIT, Superblock};
use fathom_control::{Bytes, count};
use fathom_image::Signature;
use fathom_persistence::Identity;
use rustix::{
    fs::{FallocateFlags, fallocate},
    io::Errno,
};
use serde::Serialize;

use super::{CreateCacheOptions, logs, volume::Volume};
use crate::{
    disk::{read_up_to, sync_directory},
    failure::{CommandResult, Failure},
    output,
};

/// The smallest cache, in bytes.
const SIZE_MIN: u64 = 1 << 20;
/// The smallest log, in bytes.
const LOG_MIN: u64 = 1 << 20;
/// The bytes at the start of a device that are examined for other data.
const HEAD: usize = 1 << 20;
/// The least bytes of a cache for each of its disks: a smaller cache has fewer disks.
const BYTES_PER_DISK: u64 = 1 << 20;
/// The most pages for the regions of a disk: one page has the regions of 31 GiB.
const BITMAP_PAGES: u32 = 4;

#[derive(Serialize)]
struct Created<'a> {
    path: &'a Path,
    size_bytes: u64,
    block_size_bytes: u32,
    blocks: u32,
    disks: u32,
    logs: u32,
    log_size_bytes: u64,
}

pub(super) fn run(options: &CreateCacheOptions) -> CommandResult {
    let path = &options.path;
    let block_size = u32::try_from(options.block_size.0).unwrap_or(0);
    if !block_size.is_power_of_two() || !BLOCK_SIZES.contains(&block_size) {
        return Err(Failure::usage(format!(
            "a cache cannot have blocks of {}",
            options.block_size
        ))
        .advise("choose a power of two from 4K to 64K, for example --block-size 16K"));
    }
    if !(1..=DISKS_MAX).contains(&options.disks) {
        return Err(Failure::usage(format!("a cache cannot have {} disks", options.disks))
            .advise(format!("choose from 1 to {DISKS_MAX}")));
    }
    let is_device = std::fs::metadata(path).is_ok_and(|metadata| !metadata.is_file());
    let size = options.size.map(|size| size.0);
    check_size(size)?;
    let (volume, is_new) = if is_device {
        let volume = Volume::open(path, true)?;
        if size.is_some_and(|size| size > volume.size) {
            let text = format!("{} has only {}", path.display(), Bytes(volume.size));
            return Err(Failure::usage(text).advise("leave --size out, or choose a smaller one"));
        }
        check_unused(&volume, path, options.force)?;
        logs::refuse_if_needed(&volume, path, options.format.json)?;
        (volume, false)
    } else {
        let size = size.ok_or_else(|| {
            Failure::usage("a file needs a size").advise("add --size, for example --size 100G")
        })?;
        (new_file(path, size, options)?, true)
    };
    let made = format(options, size.unwrap_or(volume.size), block_size)
        .and_then(|format| finish(&volume, &format, path, is_new, options).map(|()| format));
    let format = made.inspect_err(|_| {
        if is_new {
            // It was truncated already, so no data is lost here.
            let _ = std::fs::remove_file(path);
        }
    })?;
    if options.format.json {
        return output::json(&Created {
            path,
            size_bytes: volume.size,
            block_size_bytes: format.block_size,
            blocks: format.slots,
            disks: format.disks,
            logs: format.logs,
            log_size_bytes: format.log_length,
        });
    }
    let logs = match format.logs {
        0 => String::new(),
        logs => format!(", and {} of {} each", count(logs, "log"), Bytes(format.log_length)),
    };
    output::text_line(&format!(
        "{}: a cache of {} in blocks of {}, for {} disks{logs}",
        path.display(),
        Bytes(u64::from(format.slots) * u64::from(format.block_size)),
        Bytes(u64::from(format.block_size)),
        format.disks
    ))
}

fn check_size(size: Option<u64>) -> CommandResult {
    if size.is_some_and(|size| size < SIZE_MIN || size % 4096 != 0 || size > 1 << 60) {
        return Err(Failure::usage("a cache has at least 1 MiB, and a multiple of 4 KiB")
            .advise("choose another --size, for example --size 100G"));
    }
    Ok(())
}

/// The format of a new cache of `size` bytes.
fn format(options: &CreateCacheOptions, size: u64, block_size: u32) -> CommandResult<Superblock> {
    let identity =
        Identity::draw().map_err(|error| Failure::new(format!("no random bytes: {error}")))?;
    let disks = u64::from(options.disks).min((size / BYTES_PER_DISK).max(1)) as u32;
    let pages = BITMAP_PAGES.min((size >> 28).max(1) as u32);
    let too_small = |advice: &str| {
        Failure::usage(format!("{} are too few for a cache", Bytes(size))).advise(advice)
    };
    let Some(log) = options.log else {
        return Superblock::new(identity, size, block_size, disks, pages)
            .ok_or_else(|| too_small("choose a larger --size, or fewer --disks"));
    };
    let length = log_length(log.0, options.logs)?;
    let rest = size.saturating_sub(length * u64::from(options.logs));
    let format = Superblock::new(identity, rest, block_size, disks, pages);
    let format = format.and_then(|format| format.with_logs(options.logs, length));
    format.ok_or_else(|| too_small("choose a larger --size, a smaller --log, or fewer --disks"))
}

/// The length of each of `logs` logs that together have `total` bytes.
fn log_length(total: u64, logs: u32) -> CommandResult<u64> {
    let each = total / u64::from(logs.max(1)) / LOG_UNIT * LOG_UNIT;
    let most = *LOG_LENGTHS.end();
    if (1..=DISKS_MAX).contains(&logs) && (LOG_MIN..=most).contains(&each) {
        return Ok(each);
    }
    let (least, most) = (Bytes(LOG_MIN), Bytes(most));
    let text = format!("{} cannot be divided into {logs} logs", Bytes(total));
    let advice = format!("choose --log and --logs so that each log has from {least} to {most}");
    Err(Failure::usage(text).advise(advice))
}

fn finish(
    volume: &Volume,
    format: &Superblock,
    path: &Path,
    is_new: bool,
    options: &CreateCacheOptions,
) -> CommandResult {
    volume
        .make(format, is_new, options.format.json)
        .and_then(|()| if is_new { sync_directory(path) } else { Ok(()) })
        .map_err(|error| Failure::io("write", path, &error))
}

/// A new file of zeroes. An existing one is replaced only with `--force`.
fn new_file(path: &Path, size: u64, options: &CreateCacheOptions) -> CommandResult<Volume> {
    let mut open = OpenOptions::new();
    open.read(true).write(true).create_new(true).mode(0o600);
    let mut volume = match open.open(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            if !options.force {
                return Err(Failure::new(format!("{} exists", path.display()))
                    .advise("choose another path, or replace it with --force: its data is lost"));
            }
            let volume = Volume::open(path, true)?;
            logs::refuse_if_needed(&volume, path, options.format.json)?;
            volume
        }
        opened => {
            let file = opened.map_err(|error| Failure::io("create", path, &error))?;
            Volume::locked(file, path, true)?
        }
    };
    let filled = volume
        .file
        .set_len(0)
        .and_then(|()| volume.file.set_len(size))
        .and_then(|()| if options.sparse { Ok(()) } else { allocate(&volume.file, size) });
    if let Err(error) = filled {
        let _ = std::fs::remove_file(path);
        return Err(Failure::io("allocate the space of", path, &error));
    }
    volume.size = size;
    Ok(volume)
}

/// Allocates the space of a file, if its file system can.
fn allocate(file: &File, size: u64) -> io::Result<()> {
    match fallocate(file, FallocateFlags::empty(), 0, size) {
        Ok(()) | Err(Errno::OPNOTSUPP) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Refuses a device with other data.
fn check_unused(volume: &Volume, path: &Path, force: bool) -> CommandResult {
    let failed = |error: io::Error| Failure::io("read", path, &error);
    let found = Signature::of(&volume.file, volume.size).map_err(failed)?;
    let head = read_up_to(&volume.file, 0, HEAD).map_err(failed)?;
    if force || found.is_none() && head.iter().all(|byte| *byte == 0) {
        return Ok(());
    }
    let what = match found {
        _ if volume.superblock(path).is_ok() => "a cache",
        Some(Signature(name)) => name,
        None => "other data",
    };
    Err(Failure::new(format!("{} holds {what}", path.display()))
        .advise("choose another device, or replace what it holds with --force: it is lost"))
}
