//! The target of a recording: standard output, or a file that may have to be complete.
use std::{
    fs::{self, File, Permissions},
    io::{self, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use tempfile::NamedTempFile;

use crate::{
    disk::sync_directory,
    failure::{CommandResult, Failure},
    output::screen::DataOutput,
};

/// An open target.
pub enum Output {
    /// A target that can be read while it is written.
    Stream(Box<dyn Write + Send>),
    /// A file that gets its name when it is complete.
    Whole {
        /// The file being written.
        part: NamedTempFile,
        /// Its final name.
        target: PathBuf,
        /// Whether to replace an existing file of that name.
        force: bool,
    },
}

impl Output {
    /// Creates a file, or uses standard output for `-`. An existing regular file is replaced only
    /// with `force`. With `whole`, the file is renamed to `path` by [`keep`](Self::keep), and
    /// replaces an existing file only then.
    pub fn create(path: &Path, whole: bool, force: bool) -> CommandResult<Self> {
        if path.as_os_str() == "-" {
            return Ok(Self::Stream(Box::new(DataOutput::stdout())));
        }
        Self::refuse_existing(path, force)?;
        let made = if whole { part(path, force) } else { open(path, force) };
        made.map_err(|error| failed(path, &error))
    }

    /// Returns an error if `path` is an existing regular file, unless `force` is set.
    pub fn refuse_existing(path: &Path, force: bool) -> CommandResult {
        match fs::metadata(path) {
            Ok(there) if there.is_file() && !force && path.as_os_str() != "-" => Err(exists(path)),
            _ => Ok(()),
        }
    }

    /// The writer of the target.
    pub fn writer(&mut self) -> &mut (dyn Write + Send) {
        match self {
            Self::Stream(out) => out,
            Self::Whole { part, .. } => part.as_file_mut(),
        }
    }

    /// Completes the target: makes a file's bytes durable, then renames it. A `whole` file that is
    /// not kept is removed.
    pub fn keep(self) -> CommandResult {
        let Self::Whole { part, target, force } = self else { return Ok(()) };
        let kept = part.as_file().sync_all().and_then(|()| {
            if force {
                part.persist(&target)?;
            } else {
                part.persist_noclobber(&target)?;
            }
            sync_directory(&target)
        });
        kept.map_err(|error| failed(&target, &error))
    }
}

fn failed(path: &Path, error: &io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::AlreadyExists => exists(path),
        _ => Failure::io("write", path, error),
    }
}

fn exists(path: &Path) -> Failure {
    Failure::new(format!("{} exists", path.display()))
        .advise("choose another name, or replace it with --force")
}

/// Opens a target that can be read while it is written. A device or a pipe is not replaced.
fn open(path: &Path, force: bool) -> io::Result<Output> {
    let mut options = File::options();
    options.write(true);
    match options.clone().create_new(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        made => return made.map(stream),
    }
    // Truncates only a file that `refuse_existing` allows to be replaced.
    let replaced = force && fs::metadata(path).is_ok_and(|there| there.is_file());
    let file = options.truncate(replaced).open(path)?;
    if !replaced && file.metadata()?.is_file() {
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    Ok(stream(file))
}

fn stream(file: File) -> Output {
    Output::Stream(Box::new(file))
}

fn part(path: &Path, force: bool) -> io::Result<Output> {
    // The target of a symbolic link is replaced, not the link.
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let mut mode = 0o666;
    match File::options().write(true).open(&target) {
        Ok(there) => {
            let metadata = there.metadata()?;
            if !metadata.is_file() {
                return Ok(stream(there));
            }
            mode = metadata.permissions().mode();
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let folder = match target.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let mut name = target.file_name().unwrap_or_default().to_owned();
    name.push(".");
    let part = tempfile::Builder::new()
        .prefix(&name)
        .suffix(".part")
        .permissions(Permissions::from_mode(mode))
        .tempfile_in(folder)?;
    Ok(Output::Whole { part, target, force })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let all = fs::read_dir(folder).unwrap();
        let mut all: Vec<String> =
            all.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        all.sort();
        all
    }

    #[test]
    fn a_file_gets_its_name_when_it_is_complete() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let mut output = Output::create(&path, true, false).unwrap();
        output.writer().write_all(b"new").unwrap();
        let there = names(folder.path());
        assert!(there.len() == 1 && there[0].starts_with("x."), "{there:?}");
        assert_eq!(Path::new(&there[0]).extension(), Some("part".as_ref()));
        drop(output);
        assert!(names(folder.path()).is_empty());
        // The existing file stays until then, and its permissions are kept.
        fs::write(&path, b"old").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        std::os::unix::fs::symlink("x", folder.path().join("link")).unwrap();
        assert!(Output::create(&folder.path().join("link"), true, false).is_err());
        let mut output = Output::create(&folder.path().join("link"), true, true).unwrap();
        output.writer().write_all(b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"old");
        output.keep().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(names(folder.path()), ["link", "x"]);
    }

    #[test]
    fn a_file_that_exists_is_replaced_by_force_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let mut output = Output::create(&path, false, false).unwrap();
        output.writer().write_all(b"first").unwrap();
        output.keep().unwrap();
        assert!(Output::create(&path, false, false).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"first");
        Output::create(&path, false, true).unwrap().writer().write_all(b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        // Another process creates the file while a whole file is written.
        let other = folder.path().join("y");
        let output = Output::create(&other, true, false).unwrap();
        fs::write(&other, b"other").unwrap();
        assert!(output.keep().is_err());
        assert_eq!(fs::read(&other).unwrap(), b"other");
    }

    #[test]
    fn a_device_is_written_to_and_not_replaced() {
        for whole in [true, false] {
            let output = Output::create(Path::new("/dev/null"), whole, false).unwrap();
            assert!(matches!(output, Output::Stream(_)));
            assert!(Output::create(Path::new("/nowhere/x"), whole, false).is_err());
            assert!(Output::create(Path::new("/"), whole, true).is_err());
        }
    }
}
