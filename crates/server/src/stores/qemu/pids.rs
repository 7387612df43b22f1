//! The files with which a later daemon knows whether a storage daemon has ended in good order: it
//! removes its own when it has closed its image.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::process::{Pid, test_kill_process};

/// How long a storage daemon that has closed its image may take to end.
const END_TIME_MAX: Duration = Duration::from_secs(3);
/// The pause between two looks at it.
const PAUSE: Duration = Duration::from_millis(5);
/// The most files that are looked at.
const FILES_MAX: usize = 1024;

/// The files of one image.
pub(crate) struct PidFiles {
    folder: PathBuf,
    /// The beginning of the names of those that this process has started for this disk.
    own: String,
    started: AtomicU64,
}

impl PidFiles {
    /// Those of the image whose storage daemon listens at `socket`.
    pub(super) fn new(socket: &Path) -> Self {
        let folder = socket.with_extension("running");
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let own = format!("{}-{:x}-", std::process::id(), now.as_nanos());
        Self { folder, own, started: AtomicU64::new(0) }
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The file of the next storage daemon, whose folder exists then.
    ///
    /// # Errors
    /// If the folder cannot be made.
    pub(super) fn next(&self) -> io::Result<PathBuf> {
        match DirBuilder::new().mode(0o700).create(&self.folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let number = self.started.fetch_add(1, Ordering::Relaxed) + 1;
        Ok(self.folder.join(format!("{}{number}", self.own)))
    }

    /// The files, and whether this process has started their storage daemons for this disk.
    fn all(&self) -> impl Iterator<Item = (PathBuf, bool)> {
        let entries = std::fs::read_dir(&self.folder).into_iter().flatten().flatten();
        entries.take(FILES_MAX).map(|entry| {
            let name = entry.file_name();
            (entry.path(), name.to_str().is_some_and(|name| name.starts_with(&*self.own)))
        })
    }

    /// Whether all storage daemons of earlier daemons have ended in good order. They have given up
    /// the image. Waits for some seconds at most.
    pub(crate) fn have_others_ended_well(&self) -> bool {
        let end = Instant::now() + END_TIME_MAX;
        self.all().filter(|(_, is_own)| !is_own).all(|(path, _)| {
            let id = process_of(&path);
            while id.is_some_and(|id| test_kill_process(id).is_ok()) && Instant::now() < end {
                if !path.exists() {
                    break;
                }
                std::thread::sleep(PAUSE);
            }
            !path.exists()
        })
    }

    /// Removes the files of earlier daemons' storage daemons.
    pub(crate) fn remove_others(&self) {
        for (path, _) in self.all().filter(|(_, is_own)| !is_own) {
            let _ = std::fs::remove_file(path);
        }
    }

    /// The files of those that have ended, in whatever way.
    pub(crate) fn ended(&self) -> Vec<PathBuf> {
        let has_ended =
            |path: &Path| process_of(path).is_some_and(|id| test_kill_process(id).is_err());
        let ended = self.all().filter(|(path, is_own)| !is_own || has_ended(path));
        ended.map(|(path, _)| path).collect()
    }

    /// What these storage daemons had is sent again, or durable.
    pub(crate) fn remove(files: &[PathBuf]) {
        for path in files {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// The process that a file names; `None` if it has not written its number yet.
fn process_of(path: &Path) -> Option<Pid> {
    Pid::from_raw(std::fs::read_to_string(path).ok()?.trim().parse().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_have_not_ended_well_leave_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let files = PidFiles::new(&folder.path().join("image"));
        let (one, two) = (files.next().unwrap(), files.next().unwrap());
        // No process has the greatest number.
        std::fs::write(&one, "2147483647\n").unwrap();
        std::fs::write(&two, std::process::id().to_string()).unwrap();
        assert!(files.have_others_ended_well());
        assert_eq!(files.ended(), std::slice::from_ref(&one));
        PidFiles::remove(&files.ended());
        assert!(!one.exists() && two.exists());
        std::fs::write(&two, "2147483647\n").unwrap();
        let later = PidFiles::new(&folder.path().join("image"));
        assert!(!later.have_others_ended_well());
        later.remove_others();
        assert!(later.have_others_ended_well() && !two.exists());
    }
}
