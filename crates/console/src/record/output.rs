//! What is written to: standard output, or a file that may have to be whole.
use std::{
    fs::{self, File, Permissions},
    io::{self, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use tempfile::NamedTempFile;

use crate::{
    disk::sync_directory,
    failure::{Failure, Outcome},
};

/// Something that can be written to.
pub enum Output {
    /// What is read while it is written.
    Stream(Box<dyn Write + Send>),
    /// A file that has its name only when it is whole.
    Whole(NamedTempFile, PathBuf),
}

impl Output {
    /// Makes a file, or takes standard output for `-`. One that is of use only as a `whole` replaces
    /// what has its name now when it is kept.
    pub fn create(path: &Path, whole: bool) -> Outcome<Self> {
        let failed = |error: io::Error| Failure::io("write", path, &error);
        if path.as_os_str() == "-" {
            return Ok(Self::Stream(Box::new(io::stdout())));
        }
        if whole { part(path) } else { File::create(path).map(stream) }.map_err(failed)
    }

    /// Where bytes go.
    pub fn writer(&mut self) -> &mut (dyn Write + Send) {
        match self {
            Self::Stream(out) => out,
            Self::Whole(part, _) => part.as_file_mut(),
        }
    }

    /// All is written: gives a file its name, once its bytes are durable. Without this there is no
    /// file.
    pub fn keep(self) -> Outcome {
        let Self::Whole(part, target) = self else { return Ok(()) };
        let kept = part.as_file().sync_all().and_then(|()| {
            part.persist(&target)?;
            sync_directory(&target)
        });
        kept.map_err(|error| Failure::io("write", &target, &error))
    }
}

fn stream(file: File) -> Output {
    Output::Stream(Box::new(file))
}

fn part(path: &Path) -> io::Result<Output> {
    // Of a link, what it leads to is replaced.
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
    Ok(Output::Whole(part, target))
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
    fn a_file_has_its_name_when_it_is_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let mut output = Output::create(&path, true).unwrap();
        output.writer().write_all(b"new").unwrap();
        let there = names(folder.path());
        assert!(there.len() == 1 && there[0].starts_with("x."), "{there:?}");
        assert_eq!(Path::new(&there[0]).extension(), Some("part".as_ref()));
        drop(output);
        assert!(names(folder.path()).is_empty());
        // What was there stays until then, and says who may read it.
        fs::write(&path, b"old").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        std::os::unix::fs::symlink("x", folder.path().join("link")).unwrap();
        let mut output = Output::create(&folder.path().join("link"), true).unwrap();
        output.writer().write_all(b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"old");
        output.keep().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(names(folder.path()), ["link", "x"]);
    }

    #[test]
    fn a_device_is_written_to_and_not_replaced() {
        let output = Output::create(Path::new("/dev/null"), true).unwrap();
        assert!(matches!(output, Output::Stream(_)));
        assert!(Output::create(Path::new("/nowhere/x"), true).is_err());
        assert!(Output::create(Path::new("/"), true).is_err());
    }
}
