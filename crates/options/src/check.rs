//! Checks of values that could be read.

use std::path::Path;

use crate::problem::{Origin, Origins, Problems};

/// A check of options: where they were written, and the problems found in them.
pub struct Check<'a> {
    origins: &'a Origins,
    /// The path of the checked options within `origins`; empty for the whole.
    path: &'a str,
    problems: &'a mut Problems,
}

impl<'a> Check<'a> {
    /// A check of the options at `path` within `origins`.
    pub fn new(origins: &'a Origins, path: &'a str, problems: &'a mut Problems) -> Self {
        Self { origins, path, problems }
    }

    /// The origin of the value of `key`, or of the options if the key was not written.
    pub fn origin(&self, key: &str) -> Origin {
        if self.path.is_empty() {
            self.origins.of(key)
        } else {
            self.origins.of(&format!("{}.{key}", self.path))
        }
    }

    /// Whether `key` was written, even if its value is invalid.
    pub fn has(&self, key: &str) -> bool {
        if self.path.is_empty() {
            self.origins.get(key).is_some()
        } else {
            self.origins.get(&format!("{}.{key}", self.path)).is_some()
        }
    }

    /// Reports a problem with the value of `key`.
    pub fn problem(&mut self, key: &str, message: impl Into<String>, remedy: impl Into<String>) {
        let origin = self.origin(key);
        self.problems.add(origin, message, remedy);
    }

    /// Checks that the value of `key` names a file that can be created: the file's folder exists,
    /// and a path from a request is absolute, because the daemon's working folder is not the
    /// client's. `cannot` begins the message about a file that cannot be created.
    pub fn new_file(&mut self, key: &str, path: &Path, cannot: &str) {
        let shown = path.display();
        if !path.is_absolute() && self.origin(key) == Origin::Request {
            let message = format!("the file {shown} is not an absolute path");
            self.problem(key, message, "begin it with a slash: the daemon has a folder of its own");
        } else if path.is_dir() || !path.parent().is_some_and(Path::is_dir) {
            let message = format!("{cannot} {shown}");
            self.problem(key, message, "name a file in a folder that exists");
        }
    }
}
