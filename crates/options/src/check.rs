//! Checks of values that could be read.

use std::path::Path;

use crate::problem::{Place, Places, Problems};

/// A check of options: the places at which they were written, and the problems found in them.
pub struct Check<'a> {
    places: &'a Places,
    /// The path of the checked options within `places`; empty for the whole.
    path: &'a str,
    problems: &'a mut Problems,
}

impl<'a> Check<'a> {
    /// A check of the options at `path` within `places`.
    pub fn new(places: &'a Places, path: &'a str, problems: &'a mut Problems) -> Self {
        Self { places, path, problems }
    }

    /// The place of the value of `key`, or of the options if the key was not written.
    pub fn place(&self, key: &str) -> Place {
        if self.path.is_empty() {
            self.places.of(key)
        } else {
            self.places.of(&format!("{}.{key}", self.path))
        }
    }

    /// Whether `key` was written, even if its value is invalid.
    pub fn has(&self, key: &str) -> bool {
        if self.path.is_empty() {
            self.places.get(key).is_some()
        } else {
            self.places.get(&format!("{}.{key}", self.path)).is_some()
        }
    }

    /// Reports a problem with the value of `key`.
    pub fn problem(&mut self, key: &str, message: impl Into<String>, remedy: impl Into<String>) {
        let place = self.place(key);
        self.problems.add(place, message, remedy);
    }

    /// Checks that the value of `key` names a file that can be created: the file's folder exists,
    /// and a path from a request is absolute, because the daemon's working folder is not the
    /// client's. `cannot` begins the message about a file that cannot be created.
    pub fn new_file(&mut self, key: &str, path: &Path, cannot: &str) {
        let shown = path.display();
        if !path.is_absolute() && self.place(key) == Place::Request {
            let message = format!("the file {shown} is not an absolute path");
            self.problem(key, message, "begin it with a slash: the daemon has a folder of its own");
        } else if path.is_dir() || !path.parent().is_some_and(Path::is_dir) {
            let message = format!("{cannot} {shown}");
            self.problem(key, message, "name a file in a folder that exists");
        }
    }
}
