//! `fathom disk create`: a new raw image.
use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use fathom_image::ImageChange;
use rustix::{
    fs::{FallocateFlags, fallocate},
    io::Errno,
};
use serde::Serialize;

use super::{
    CreateDiskOptions,
    claim::Claim,
    exact,
    template::{self, Wanted},
};
use crate::{
    failure::{CommandResult, Failure},
    output::{self, progress::Progress},
};

#[derive(Serialize)]
struct Created<'a> {
    path: &'a Path,
    size_bytes: u64,
    preallocated: bool,
}

pub(super) fn run(options: &CreateDiskOptions) -> CommandResult {
    let path = &options.path;
    let size = options.size.map(|size| size.0);
    if let Some(from) = &options.template.from {
        let (force, json) = (options.force, options.format.json);
        return template::run(
            &Wanted { path, size, force, json, options: &options.template },
            from,
        );
    }
    // The parser of arguments has ensured that there is one.
    let size = size.unwrap_or(0);
    check_size(size)?;
    let image = create(path, options.force)?;
    let file = image.file();
    let made = fill(file, size, options.preallocate, options.format.json)
        .and_then(|()| file.sync_all())
        .and_then(|()| sync_directory(path));
    if let Err(error) = made {
        // The image is incomplete. An existing image has already been truncated, so no data is lost
        // here.
        let _ = std::fs::remove_file(path);
        return Err(Failure::io("create", path, &error));
    }
    image.finish(path, ImageChange::Empty)?;
    if options.format.json {
        output::json(&Created { path, size_bytes: size, preallocated: options.preallocate })
    } else {
        output::text_line(&format!("{}: {}", path.display(), exact(size)))
    }
}

/// Checks that a size is a positive multiple of the sector size, 512 bytes.
pub(super) fn check_size(size: u64) -> CommandResult {
    if size == 0 || size % 512 != 0 || size > i64::MAX as u64 {
        let nearest = size.max(1).next_multiple_of(512).min(1 << 62);
        return Err(Failure::usage(format!("a disk cannot have {size} bytes"))
            .advise(format!("sizes are multiples of 512, for example {nearest}")));
    }
    Ok(())
}

/// Opens a new, empty image. Replaces an existing image only with `force`, and only if it is not in
/// use.
fn create(path: &Path, force: bool) -> CommandResult<Claim> {
    let mut options = OpenOptions::new();
    // A disk has the data of all users of its guest.
    options.read(true).write(true).create_new(true).mode(0o600);
    match options.open(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        result => {
            let file = result.map_err(|error| Failure::io("create", path, &error))?;
            return Claim::made(file, path);
        }
    }
    if !force {
        return Err(Failure::new(format!("{} exists", path.display()))
            .advise("choose another path, or replace it with --force: its data is lost"));
    }
    if !path.is_file() {
        return Err(Failure::new(format!("{} is not a regular file", path.display())));
    }
    let image = Claim::take(path)?;
    image.prepare(path, ImageChange::Empty)?;
    image.file().set_len(0).map_err(|error| Failure::io("replace", path, &error))?;
    Ok(image)
}

fn fill(file: &File, size: u64, preallocate: bool, silent: bool) -> io::Result<()> {
    file.set_len(size)?;
    if !preallocate {
        return Ok(());
    }
    match fallocate(file, FallocateFlags::empty(), 0, size) {
        Ok(()) => return Ok(()),
        Err(Errno::OPNOTSUPP) => {}
        Err(error) => return Err(error.into()),
    }
    // Some file systems can reserve space only by writing.
    let zeroes = vec![0; 1 << 20];
    let mut progress = Progress::new("Writing zeroes", size).silent(silent);
    let mut written = 0;
    let mut file = file;
    while written < size {
        let part = (size - written).min(zeroes.len() as u64) as usize;
        file.write_all(&zeroes[..part])?;
        written += part as u64;
        progress.update(written);
    }
    Ok(())
}

/// Makes a new name in the directory of `path` durable.
pub fn sync_directory(path: &Path) -> io::Result<()> {
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    };
    File::open(parent)?.sync_all()
}
