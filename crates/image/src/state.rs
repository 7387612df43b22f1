//! What the folder of the marks knows of a daemon's folder of records: which one it was, and how
//! old. So a start notices that it has another folder, or an older copy.

use std::io;
use std::path::PathBuf;

use fathom_persistence::{Identity, Stamp};

use crate::marks::{file_name, marks_folder, prepare};
use crate::place::{end_of, read_mark, remove, replace_file};

/// The suffix of the files.
const SUFFIX: &str = ".fathom-state";

/// A state of a daemon's folder of records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotedState {
    /// The identity of the folder, drawn at random when it was made, and its age, which counts its
    /// changes.
    pub stamp: Stamp,
    /// The path of the folder, for messages. Of a long path, the end is kept.
    pub path: String,
}

/// The place of the note about the folder of records of one configuration.
#[derive(Clone, Debug)]
pub struct StateNote {
    file: PathBuf,
}

impl StateNote {
    /// The note about folders of this name.
    pub fn new(name: &str) -> Self {
        Self { file: marks_folder().join(file_name(name) + SUFFIX) }
    }

    /// The noted state; `None` if there is none, or if the note is damaged.
    ///
    /// # Errors
    /// When the note cannot be read.
    pub fn read(&self) -> io::Result<Option<NotedState>> {
        Ok(read_mark(&self.file)?
            .and_then(|text| NotedState::parse(std::str::from_utf8(&text).ok()?)))
    }

    /// Notes a state. On return, that is durable.
    ///
    /// # Errors
    /// When the note cannot be written.
    pub fn write(&self, state: &NotedState) -> io::Result<()> {
        prepare(&marks_folder())?;
        let draft = self.file.with_extension("new");
        replace_file(&self.file, &draft, state.text().as_bytes(), true)
    }

    /// Removes the note. On return, that is durable.
    ///
    /// # Errors
    /// When the note cannot be removed.
    pub fn clear(&self) -> io::Result<()> {
        remove(&self.file)
    }
}

impl NotedState {
    /// The state as one line.
    pub fn text(&self) -> String {
        let mut text = format!("{} {} ", self.stamp.identity, self.stamp.age);
        text.push_str(end_of(&self.path, text.len()));
        text.push('\n');
        text
    }

    /// Reads a state.
    pub fn parse(text: &str) -> Option<Self> {
        let (hex, rest) = text.strip_suffix('\n')?.split_once(' ')?;
        let (age, path) = rest.split_once(' ')?;
        let stamp = Stamp { identity: Identity::parse(hex)?, age: age.parse().ok()? };
        Some(Self { stamp, path: path.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_read_as_it_was_written() {
        let stamp = Stamp { identity: Identity([7; 16]), age: u64::MAX };
        let state = NotedState { stamp, path: "/a b/live".into() };
        assert_eq!(NotedState::parse(&state.text()), Some(state.clone()));
        let text = state.text();
        // That which earlier builds have written.
        assert_eq!(text, format!("{} 18446744073709551615 /a b/live\n", "07".repeat(16)));
        for damaged in [&text[1..], &text[..40], "", " \n", "0 0 0\n"] {
            assert_eq!(NotedState::parse(damaged), None, "{damaged:?}");
        }
        let long = NotedState { path: "/x".repeat(2000), ..state };
        assert!(NotedState::parse(&long.text()).is_some_and(|it| it.path.len() < 1024));
    }
}
