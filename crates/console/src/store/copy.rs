//! `fathom store import` and `export`: a pool that no daemon uses.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use fathom_control::Bytes;
use fathom_image::ForeignFormat;
use fathom_store::Backend;
use serde::Serialize;

use super::{PoolArguments, about, open_device, open_pool, refuse_served, save};
use crate::failure::{CommandResult, Failure};
use crate::output;
use crate::output::progress::Progress;

/// Options of `fathom store import`.
#[derive(Debug, Args)]
pub struct ImportOptions {
    #[command(flatten)]
    at: PoolArguments,
    /// The name of the new volume
    volume: String,
    /// A raw image or block device that is not in use. `fathom disk import` makes raw images
    image: PathBuf,
}

/// Options of `fathom store export`.
#[derive(Debug, Args)]
pub struct ExportOptions {
    #[command(flatten)]
    at: PoolArguments,
    /// The volume, or VOLUME@SNAPSHOT
    volume: String,
    /// The new raw image
    image: PathBuf,
}

#[derive(Serialize)]
struct CopyReport<'a> {
    pool: &'a Path,
    volume: &'a str,
    image: &'a Path,
    size_bytes: u64,
    copied_bytes: u64,
}

pub(super) fn import(options: &ImportOptions) -> CommandResult {
    let at = &options.at;
    refuse_served(
        &at.pool,
        &at.control,
        "make a volume with `fathom store new`, serve it over NBD, and copy with `nbdcopy` or \
         `qemu-img convert -n`",
    )?;
    let (path, volume) = (&options.image, &options.volume);
    let source = open_device(path, true)?;
    let foreign = File::open(path).and_then(|file| ForeignFormat::of(&file, source.capacity()));
    if let Ok(Some(format)) = foreign {
        return Err(Failure::new(format!("{} is a {} image", path.display(), format.name()))
            .advise("convert it with `fathom disk import` first"));
    }
    let pool = open_pool(&at.pool)?;
    let size = source.capacity().next_multiple_of(512);
    pool.create_volume(volume, size).map_err(|error| about(&at.pool, error))?;
    let target = pool.volume(volume).map_err(|error| about(&at.pool, error))?;
    let copied = copy(&source, &target, path, at.format.json);
    drop(target);
    if copied.is_err() {
        // It is incomplete.
        let _ = pool.delete_volume(volume);
    }
    let copied_bytes = copied?;
    save(&at.pool, &pool)?;
    done(at, volume, path, size, copied_bytes)
}

pub(super) fn export(options: &ExportOptions) -> CommandResult {
    let at = &options.at;
    refuse_served(
        &at.pool,
        &at.control,
        "serve the volume or snapshot read-only over NBD, and copy with `nbdcopy` or `qemu-img \
         convert`",
    )?;
    let (path, name) = (&options.image, &options.volume);
    let pool = open_pool(&at.pool)?;
    let source = match name.split_once('@') {
        Some((volume, snapshot)) => pool.snapshot(volume, snapshot),
        None => pool.volume(name),
    };
    let source = source.map_err(|error| about(&at.pool, error))?;
    let size = source.capacity();
    let mut open = OpenOptions::new();
    open.read(true).write(true).create_new(true).mode(0o600);
    let file = open.open(path).map_err(|error| Failure::io("create", path, &error))?;
    let copied = file
        .set_len(size)
        .map_err(|error| Failure::io("create", path, &error))
        .and_then(|()| copy(&source, &open_device(path, false)?, path, at.format.json));
    if copied.is_err() {
        let _ = fs::remove_file(path);
    }
    done(at, name, path, size, copied?)
}

fn done(at: &PoolArguments, volume: &str, image: &Path, size: u64, copied: u64) -> CommandResult {
    if at.format.json {
        let (size_bytes, copied_bytes) = (size, copied);
        return output::json(&CopyReport {
            pool: &at.pool,
            volume,
            image,
            size_bytes,
            copied_bytes,
        });
    }
    let (size, copied) = (Bytes(size), Bytes(copied));
    output::text_line(&format!("{volume}: {size}, of which {copied} were copied"))
}

/// Copies the data of one back end to another.
fn copy(
    source: &Arc<dyn Backend>,
    target: &Arc<dyn Backend>,
    path: &Path,
    is_silent: bool,
) -> CommandResult<u64> {
    let mut progress =
        Progress::new(path.display().to_string(), source.capacity()).silent(is_silent);
    let copied = fathom_store::copy(source, target, |done| progress.update(done));
    copied.map_err(|error| Failure::io("copy", path, &error))
}
