//! `fathom disk create --from`: an image that begins with the content of another one, its template,
//! and is ready at once. A raw image shares the template's blocks where the file system can. A
//! qcow2 image refers to the template, and has what differs.
use std::{
    fs::{self, File},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use fathom_control::ImageFormat;
use fathom_image::{
    ChainFormat, ForeignFormat, ImageChange, LockError, LockPurpose, Mark, MarkKind, MarkedImage,
    Writers, read_chain,
};
use rustix::{fs::ioctl_ficlone, io::Errno};
use serde::Serialize;
use tempfile::NamedTempFile;

use super::{
    TemplateOptions,
    claim::{Claim, in_use, own_folders},
    create::check_size,
    exact, holders,
    import::{absent, claim_existing, finish, part, qemu_image_info, reason},
};
use crate::{
    failure::{CommandResult, Failure},
    output,
};

#[derive(Serialize)]
struct Created<'a> {
    path: &'a Path,
    size_bytes: u64,
    format: &'static str,
    template: &'a Path,
    template_format: &'static str,
}

/// What a command line asks for.
pub(super) struct Wanted<'a> {
    /// The new image.
    pub path: &'a Path,
    /// Its size in bytes; that of the template by default.
    pub size: Option<u64>,
    /// Whether it may replace an image.
    pub force: bool,
    pub json: bool,
    pub options: &'a TemplateOptions,
}

pub(super) fn run(wanted: &Wanted<'_>, template: &Path) -> CommandResult {
    let template = Template::open(template, wanted.options)?;
    let format = wanted.options.format.unwrap_or(ImageFormat::Raw);
    if format == ImageFormat::Raw && template.format != ImageFormat::Raw {
        let (path, from) = (wanted.path.display(), template.path.display());
        return Err(Failure::new(format!("{from} is a {} image", template.format)).advise(format!(
            "make an overlay with --format=qcow2, or convert it: fathom disk import {from} {path}"
        )));
    }
    let size = wanted.size.unwrap_or(template.size);
    check_size(size)?;
    if size < template.size {
        let least = exact(template.size);
        return Err(Failure::usage(format!("{} has {least}", template.path.display()))
            .advise("an image is at least as large as its template"));
    }
    // Held until the new image has been renamed to the target.
    let _replaced = claim_existing(wanted.path, wanted.force)?;
    let failed = |error: &std::io::Error| Failure::io("create", wanted.path, error);
    let (part, interrupted) = part(wanted.path, 0).map_err(|error| failed(&error))?;
    match format {
        ImageFormat::Raw => template.share_blocks(&part, wanted.path, size)?,
        _ => template.overlay(&part, wanted.path, size)?,
    }
    let file = part.as_file().try_clone().map_err(|error| failed(&error))?;
    finish(part, wanted.path, wanted.force, &interrupted).map_err(|error| failed(&error))?;
    Claim::made(file, wanted.path)?.finish(wanted.path, ImageChange::Empty)?;
    if wanted.json {
        return output::json(&Created {
            path: wanted.path,
            size_bytes: size,
            format: format.name(),
            template: &template.path,
            template_format: template.format.name(),
        });
    }
    let (path, from) = (wanted.path.display(), template.path.display());
    match format {
        ImageFormat::Raw => output::text_line(&format!("{path}: {} from {from}", exact(size))),
        _ => output::text_line(&format!(
            "{path}: {} over {from}, which has to stay as it is",
            exact(size)
        )),
    }
}

/// A template: an image that nobody changes while it is open.
struct Template {
    /// Without links.
    path: PathBuf,
    file: File,
    format: ImageFormat,
    /// The size that guests see, in bytes.
    size: u64,
}

impl Template {
    fn open(path: &Path, options: &TemplateOptions) -> CommandResult<Self> {
        let failed = |error: std::io::Error| Failure::io("read", path, &error);
        let real = path.canonicalize().map_err(failed)?;
        if !real.is_file() {
            return Err(Failure::new(format!("{} is no regular file", path.display())).advise(
                "volumes of pools are cloned from snapshots: fathom snapshot clone --help",
            ));
        }
        let file = File::open(&real).map_err(failed)?;
        // Before the lock, which another process may ask for.
        let writers = fathom_image::writers(&file);
        match fathom_image::lock(&file, LockPurpose::Shared) {
            Err(LockError::Held) => return Err(used(&real)),
            Err(LockError::Io(error)) => return Err(failed(error)),
            Ok(()) | Err(LockError::Unsupported(_)) if writers == Writers::Some => {
                return Err(used(&real));
            }
            Ok(()) | Err(LockError::Unsupported(_)) => {}
        }
        let length = file.metadata().map_err(failed)?.len();
        let format = match options.from_format {
            Some(format) => format,
            None => seen(&file, &real, length)?,
        };
        check_marks(&real, &file)?;
        let size = match format {
            ImageFormat::Raw => length,
            _ => size_of(&real, format, &options.backing_folder)?,
        };
        Ok(Self { path: real, file, format, size })
    }

    /// Gives a new file the template's blocks, and a longer end.
    fn share_blocks(&self, part: &NamedTempFile, path: &Path, size: u64) -> CommandResult {
        match ioctl_ficlone(part.as_file(), &self.file) {
            Ok(()) => {}
            Err(Errno::OPNOTSUPP | Errno::XDEV | Errno::INVAL | Errno::NOTTY | Errno::NOSYS) => {
                let (path, from) = (path.display(), self.path.display());
                return Err(Failure::new(format!("{path} cannot share blocks with {from}"))
                    .advise(format!(
                        "that needs one file system, of a kind that shares blocks (Btrfs, XFS, bcachefs); make an \
                         overlay with --format=qcow2, which is ready at once too, or copy: fathom disk import {from} \
                         {path}"
                    )));
            }
            Err(error) => return Err(Failure::io("create", path, &error.into())),
        }
        part.as_file().set_len(size).map_err(|error| Failure::io("create", path, &error))
    }

    /// Makes a new file an image that refers to the template.
    fn overlay(&self, part: &NamedTempFile, path: &Path, size: u64) -> CommandResult {
        let output = Command::new("qemu-img")
            .args(["create", "-q", "-f", "qcow2", "-F", self.format.name(), "-b"])
            .arg(&self.path)
            .arg("--")
            .arg(part.path())
            .arg(size.to_string())
            .output()
            .map_err(|error| absent(&error))?;
        if !output.status.success() {
            let (path, why) = (path.display(), reason(&output));
            return Err(Failure::new(format!("qemu-img cannot create {path}: {why}")));
        }
        // QEMU opens the file by its name, and leaves its mode alone.
        let private = fs::Permissions::from_mode(0o600);
        part.as_file().set_permissions(private).map_err(|error| Failure::io("create", path, &error))
    }
}

/// The format that the bytes of a template have. Bytes of a guest can look like any format, so only
/// raw ones need no word of the user.
fn seen(file: &File, path: &Path, length: u64) -> CommandResult<ImageFormat> {
    let found = ForeignFormat::of(file, length);
    match found.map_err(|error| Failure::io("read", path, &error))? {
        None => Ok(ImageFormat::Raw),
        Some(found) => {
            Err(Failure::new(format!("{} looks like a {} image", path.display(), found.name()))
                .advise(format!(
                    "say what it is with --from-format: {}, or raw if these are a guest's bytes",
                    found.qemu_name()
                )))
        }
    }
}

/// The size of a template that is not raw, which guests see. The files beneath it are bounded
/// before QEMU opens them.
fn size_of(path: &Path, format: ImageFormat, folders: &[PathBuf]) -> CommandResult<u64> {
    let chain_format = ChainFormat::of_name(format.name()).unwrap_or(ChainFormat::Qcow2);
    read_chain(path, chain_format, folders)?;
    let info = qemu_image_info(&path.to_string_lossy(), Some(format.name()))?;
    Ok(info.virtual_size)
}

/// Refuses an image whose file does not have all of its content.
pub(super) fn check_marks(path: &Path, file: &File) -> CommandResult {
    let folders = own_folders();
    let image = MarkedImage { path, file, folders: &folders };
    for kind in MarkKind::ALL {
        let found = kind.read(&image);
        match found.map_err(|error| Failure::io("read a mark of", path, &error))? {
            None | Some(Mark::Cache(_)) => {}
            Some(Mark::Log(_) | Mark::Loss(_) | Mark::Move(_)) => {
                return Err(Failure::new(format!("{} has {kind}", path.display()))
                    .advise("it is not whole by itself; `fathom disk info` says more about it"));
            }
        }
    }
    Ok(())
}

fn used(path: &Path) -> Failure {
    let holder = holders::of(path).into_iter().find(|holder| holder.writes || holder.locks);
    let holder = holder.map(|holder| holder.to_string());
    in_use(path, holder.as_deref().unwrap_or("a process that is not visible to this user"))
}
