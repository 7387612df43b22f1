//! Checks of values that could be read.

use std::path::Path;

use crate::problem::{Place, Places, Problems};

/// Where the options that are checked were written, and what is wrong with them.
pub struct Check<'a> {
    places: &'a Places,
    /// The path of the options within `places`; empty for the whole.
    path: &'a str,
    problems: &'a mut Problems,
}

impl<'a> Check<'a> {
    /// A check of the options at `path` within `places`.
    pub fn new(places: &'a Places, path: &'a str, problems: &'a mut Problems) -> Self {
        Self { places, path, problems }
    }

    /// Where the value of `key` was written, or else the options.
    pub fn place(&self, key: &str) -> Place {
        if self.path.is_empty() {
            self.places.of(key)
        } else {
            self.places.of(&format!("{}.{key}", self.path))
        }
    }

    /// Something is wrong with the value of `key`.
    pub fn problem(&mut self, key: &str, message: impl Into<String>, remedy: impl Into<String>) {
        let place = self.place(key);
        self.problems.add(place, message, remedy);
    }

    /// The value of `key` names a file that may be made: in a folder that exists, and not relative
    /// in a request, because the daemon has a folder of its own. `cannot` says what cannot be done
    /// otherwise.
    pub fn new_file(&mut self, key: &str, path: &Path, cannot: &str) {
        let shown = path.display();
        if !path.is_absolute() && self.place(key) == Place::Request {
            let message = format!("the file {shown} is no absolute path");
            self.problem(key, message, "begin it with a slash: the daemon has a folder of its own");
        } else if path.is_dir() || !path.parent().is_some_and(Path::is_dir) {
            let message = format!("{cannot} {shown}");
            self.problem(key, message, "name a file in a folder that exists");
        }
    }
}
