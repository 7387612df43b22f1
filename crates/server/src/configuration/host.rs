//! Checks of what a configuration names on its host: images, folders of sockets, groups, and other
//! files.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use fathom_control::DiskDefinition;
use fathom_image::ForeignFormat;
use fathom_options::{Origin, Origins, Problems};
use rustix::fs::{Access, AtFlags, CWD, accessat};

use super::check::Extent;

/// The longest path of a Unix socket, in bytes: `sun_path` without its terminator.
const SOCKET_PATH_MAX: usize = 107;

pub(super) fn check_image(
    image: &Path,
    disk: &DiskDefinition,
    origins: &Origins,
    extent: Extent,
    problems: &mut Problems,
) {
    let origin = origins.of("image");
    if !image.is_absolute() && origin == Origin::Request {
        let message = format!("the image {} is not an absolute path", image.display());
        problems.add(origin, message, "begin it with a slash: the daemon runs in another folder");
        return;
    }
    if extent == Extent::Text {
        return;
    }
    let shown = image.display();
    match std::fs::metadata(image) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => problems.add(
            origin,
            format!("there is no image {shown}"),
            format!("make one with `fathom disk create {shown} 10G`, or correct the path"),
        ),
        Err(error) => problems.add(
            origin,
            format!("the image {shown} cannot be examined: {}", plain(&error)),
            "give the daemon's user access to it and to the folders above",
        ),
        Ok(metadata) => check_image_file(image, &metadata, disk, origin, problems),
    }
}

fn check_image_file(
    image: &Path,
    metadata: &Metadata,
    disk: &DiskDefinition,
    origin: Origin,
    problems: &mut Problems,
) {
    let shown = image.display();
    let kind = metadata.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        problems.add(
            origin,
            format!("{shown} is neither a file nor a block device"),
            "name a raw image",
        );
    } else if kind.is_file() && metadata.len() == 0 {
        problems.add(
            origin,
            format!("the image {shown} is empty"),
            format!("give it a size with `fathom disk resize {shown} 10G`"),
        );
    } else if !accessible(image, !disk.read_only) {
        problems.add(
            origin,
            format!(
                "the daemon may not {} the image {shown}",
                if disk.read_only { "read" } else { "write" }
            ),
            if disk.read_only {
                "give the daemon's user access to it"
            } else {
                "give the daemon's user access to it, or add `read_only = true`"
            },
        );
    }
}

/// The format that a regular file's content looks like. Devices are examined only when they are
/// opened.
pub(super) fn foreign_format(image: &Path) -> Option<ForeignFormat> {
    let metadata = std::fs::metadata(image).ok().filter(Metadata::is_file)?;
    let file = std::fs::File::open(image).ok()?;
    ForeignFormat::of(&file, metadata.len()).ok()?
}

/// Whether the file may be opened for reading, or for writing too. Does not open it, because some
/// devices act on an open.
fn accessible(path: &Path, write: bool) -> bool {
    let mode = if write { Access::READ_OK | Access::WRITE_OK } else { Access::READ_OK };
    accessat(CWD, path, mode, AtFlags::EACCESS).is_ok()
}

pub(super) fn check_socket(path: &Path, origin: &Origin, extent: Extent, problems: &mut Problems) {
    let shown = path.display();
    if !path.is_absolute() && *origin == Origin::Request {
        problems.add(
            origin.clone(),
            format!("the socket {shown} is not an absolute path"),
            "begin it with a slash: the daemon runs in another folder",
        );
        return;
    }
    if path.as_os_str().len() > SOCKET_PATH_MAX {
        problems.add(
            origin.clone(),
            format!("the socket's path is longer than {SOCKET_PATH_MAX} bytes: {shown}"),
            "choose a shorter one, for example in /run/fathom",
        );
    }
    if extent == Extent::Text {
        return;
    }
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    match std::fs::metadata(folder) {
        Ok(metadata) if metadata.is_dir() => {}
        // The daemon makes this folder itself.
        Err(_) if path == Path::new(fathom_control::SOCKET_DEFAULT) => {}
        Ok(_) => problems.add(
            origin.clone(),
            format!("{} is not a folder, so a socket cannot be in it", folder.display()),
            "choose another path",
        ),
        Err(error) => problems.add(
            origin.clone(),
            format!("the socket {shown} cannot be made: {}: {}", folder.display(), plain(&error)),
            format!("make the folder with `mkdir -p {}`, or choose another", folder.display()),
        ),
    }
    if let Ok(metadata) = std::fs::symlink_metadata(path) {
        if !metadata.file_type().is_socket() {
            problems.add(
                origin.clone(),
                format!("{shown} exists and is not a socket"),
                "choose another path, or remove it if it is not needed",
            );
        }
    }
}

pub(super) fn check_group(
    name: Option<&str>,
    origin: impl Fn() -> Origin,
    problems: &mut Problems,
) {
    let Some(name) = name else { return };
    if crate::process::group::id(name).is_none() {
        problems.add(
            origin(),
            format!("there is no group {name:?}"),
            format!("make it with `groupadd --system {name}`, or leave `group` out"),
        );
    }
}

/// What tells images apart.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ImageKey {
    /// The identity in the file system.
    Identity(u64, u64),
    /// The path, without `.` and double slashes.
    Path(PathBuf),
    /// The server and the name of an export.
    Export(String),
}

impl ImageKey {
    pub(super) fn of(image: &Path, extent: Extent) -> Option<Self> {
        match extent {
            Extent::Text => Some(Self::Path(image.components().collect())),
            Extent::Host => {
                image_identity(image).map(|(device, number)| Self::Identity(device, number))
            }
        }
    }
}

/// The identity of an image: that of the file, or of the device.
pub(crate) fn image_identity(path: &Path) -> Option<(u64, u64)> {
    let metadata = std::fs::metadata(path).ok()?;
    if metadata.file_type().is_block_device() {
        return Some((u64::MAX, metadata.rdev()));
    }
    Some((metadata.dev(), metadata.ino()))
}

/// Normalises a path as far as its folders exist, so that two spellings of it are equal.
pub(crate) fn normal(path: &Path) -> PathBuf {
    match (path.parent(), path.file_name()) {
        (Some(folder), Some(name)) => {
            let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
            folder.canonicalize().unwrap_or_else(|_| folder.to_owned()).join(name)
        }
        _ => path.to_owned(),
    }
}

/// Finds files of the host that do not exist, or are in folders that may not be searched. Each has
/// the name of its key.
pub(crate) fn check_files(
    files: &[(&str, &Option<PathBuf>)],
    origins: &Origins,
    extent: Extent,
    problems: &mut Problems,
) {
    if extent == Extent::Text {
        return;
    }
    for (key, path) in files {
        let Some(path) = path else { continue };
        if let Err(error) = std::fs::metadata(path) {
            problems.add(
                origins.of(key),
                format!("{}: {}", path.display(), plain(&error)),
                "name a file that the daemon may read",
            );
        }
    }
}

/// The text of an error of the operating system, without its number.
pub(crate) fn plain(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such file or folder".into(),
        io::ErrorKind::PermissionDenied => "permission denied".into(),
        _ => error.to_string(),
    }
}
