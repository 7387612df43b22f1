//! Images of other formats than raw, and the chain of files beneath them.
//!
//! QEMU serves them. It opens whatever a header names: files that the daemon's user may read but a
//! guest may not, servers, files under `json:`. So this module opens the chain first and says which
//! files there are and which format each has; QEMU gets exactly these, and looks for none itself. A
//! format is never guessed where a guest may have written the bytes: that of the image is what the
//! operator says, and that of a backing file what the image above it says.

mod header;

use std::fmt;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use fathom_failure::Failure;
use fathom_failure::text::foreign;

use crate::format::ForeignFormat;
pub use header::{BackingName, HeaderError};
use header::{Source, read_header};

/// The most files of a chain.
pub const CHAIN_LENGTH_MAX: usize = 32;

/// The format of a file of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainFormat {
    /// The bytes of the disk without any structure.
    Raw,
    /// QEMU's format, versions 2 and 3.
    Qcow2,
    /// `VMware`'s format, with all data in one file.
    Vmdk,
    /// Hyper-V's format.
    Vhdx,
    /// `VirtualBox`'s format.
    Vdi,
}

impl ChainFormat {
    /// The format with one of QEMU's names.
    pub fn of_name(name: &str) -> Option<Self> {
        let all = [Self::Raw, Self::Qcow2, Self::Vmdk, Self::Vhdx, Self::Vdi];
        all.into_iter().find(|format| format.name() == name)
    }

    /// QEMU's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
            Self::Vmdk => "vmdk",
            Self::Vhdx => "vhdx",
            Self::Vdi => "vdi",
        }
    }
}

impl fmt::Display for ChainFormat {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// A file of a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainLink {
    /// The absolute path, without links.
    pub path: PathBuf,
    /// The format of its content.
    pub format: ChainFormat,
}

/// Reads the chain of an image, the image first. Backing files have to be in the image's folder or
/// in one of `folders`, or beneath. Blocks as long as the file systems do.
///
/// # Errors
/// If a file cannot be read, is of another format or has something that is not served; if the chain
/// is too long, leads to itself or out of the folders.
pub fn read_chain(
    image: &Path,
    format: ChainFormat,
    folders: &[PathBuf],
) -> Result<Vec<ChainLink>, Failure> {
    let mut allowed = Vec::new();
    let mut shown = std::path::absolute(image)?;
    let (mut format, mut chain, mut seen) = (format, Vec::new(), Vec::new());
    loop {
        let about = |failure: Failure| failure.about(foreign(&shown.display().to_string()));
        let path = shown.canonicalize().map_err(|error| about(error.into()))?;
        if chain.is_empty() {
            allowed.extend(path.parent().map(Path::to_owned));
            allowed.extend(folders.iter().filter_map(|folder| folder.canonicalize().ok()));
        } else if !allowed.iter().any(|folder| path.starts_with(folder)) {
            let failure = Failure::new("this backing file is outside the folders for such files");
            let remedy = "name its folder in `backing_folders` if the image may read it";
            return Err(about(failure.advise(remedy)));
        }
        let (file, identity) = open(&path).map_err(about)?;
        if seen.contains(&identity) {
            let failure = Failure::new("the chain of backing files leads back to it");
            return Err(about(failure.advise("correct it with `qemu-img rebase -u`")));
        }
        if chain.len() >= CHAIN_LENGTH_MAX {
            let text = format!("the chain has more than {CHAIN_LENGTH_MAX} files");
            let remedy = "shorten it with `qemu-img rebase` or `qemu-img commit`";
            return Err(about(Failure::new(text).advise(remedy)));
        }
        let quoted = foreign(&path.display().to_string());
        let backing = read_header(format, &file)
            .map_err(|error| Failure::new(error.to_string()).advise(error.remedy(&quoted)))
            .map_err(about)?;
        chain.push(ChainLink { path, format });
        seen.push(identity);
        let Some(backing) = backing else { return Ok(chain) };
        let next = backing_path(&shown, &backing.name).map_err(about)?;
        format = backing_format(&next, backing.format.as_deref()).map_err(about)?;
        shown = next;
    }
}

/// Opens a file or block device. Returns what tells it from others, too.
fn open(path: &Path) -> Result<(File, (u64, u64)), Failure> {
    let metadata = std::fs::metadata(path)?;
    let kind = metadata.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        let failure = Failure::new("it is neither a file nor a block device");
        return Err(failure.advise("name an image"));
    }
    let identity = |it: &Metadata| {
        if kind.is_block_device() { (u64::MAX, it.rdev()) } else { (it.dev(), it.ino()) }
    };
    Ok((File::open(path)?, identity(&metadata)))
}

/// The path of a backing file. A relative one begins at the folder of the image above it.
fn backing_path(above: &Path, name: &str) -> Result<PathBuf, Failure> {
    let before = name.split('/').next().unwrap_or_default();
    // By QEMU's rule, this is the address of something else.
    if before.contains(':') {
        let failure = Failure::new(format!("its backing file `{}` is no path", foreign(name)));
        return Err(failure.advise("give it a path with `qemu-img rebase -u -b PATH -F FORMAT`"));
    }
    Ok(above.parent().unwrap_or(Path::new("/")).join(name))
}

/// The format of a backing file: that of the header above it. Without one, a file that looks like
/// no format is raw.
fn backing_format(path: &Path, named: Option<&str>) -> Result<ChainFormat, Failure> {
    let Some(named) = named else {
        let (file, _) = open(path).map_err(|it| it.about(foreign(&path.display().to_string())))?;
        let length = file.metadata()?.len();
        let Some(looks) = ForeignFormat::of(&file, length)? else { return Ok(ChainFormat::Raw) };
        let text = format!(
            "it does not name the format of its backing file, which looks like {looks} and may be raw"
        );
        let remedy = "name it: `qemu-img rebase -u -b PATH -F FORMAT IMAGE`";
        return Err(Failure::new(text).advise(remedy));
    };
    ChainFormat::of_name(named).ok_or_else(|| {
        let text = format!("the format `{}` of its backing file is not served", foreign(named));
        Failure::new(text).advise("convert that file with `qemu-img convert -O qcow2`")
    })
}

impl Source for File {
    fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        while filled < bytes.len() {
            match self.read_at(&mut bytes[filled..], offset.saturating_add(filled as u64)) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Offsets beyond what files can have.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => break,
                Err(error) => return Err(error),
            }
        }
        Ok(filled)
    }
}

/// The bytes of an image in memory.
struct Bytes<'d>(&'d [u8]);

impl Source for Bytes<'_> {
    fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<usize> {
        let rest = usize::try_from(offset).ok().and_then(|at| self.0.get(at..)).unwrap_or_default();
        let count = rest.len().min(bytes.len());
        bytes[..count].copy_from_slice(&rest[..count]);
        Ok(count)
    }
}

/// Reads any bytes as the header of an image of each format: for the fuzzer, and for tests with
/// seeded inputs. Panics if a promise is broken. Returns whether a header was accepted.
#[doc(hidden)]
pub fn fuzz_image_header(data: &[u8]) -> bool {
    let mut is_accepted = false;
    for name in ["qcow2", "vmdk", "vhdx", "vdi"] {
        let format = ChainFormat::of_name(name).unwrap_or(ChainFormat::Raw);
        let Ok(backing) = read_header(format, &Bytes(data)) else { continue };
        is_accepted = true;
        let Some(BackingName { name, .. }) = backing else { continue };
        assert!(name.len() <= 1023 && !name.is_empty() && !name.contains('\0'));
        if let Ok(path) = backing_path(Path::new("/images/top.qcow2"), &name) {
            assert!(path.is_absolute());
        }
    }
    is_accepted
}

#[cfg(test)]
mod tests;
