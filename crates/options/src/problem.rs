//! What is wrong with a configuration, where, and what to do about it.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// Where something was written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Place {
    /// In a file, lines and columns counted from 1.
    File {
        /// The file.
        path: Arc<Path>,
        /// The line.
        line: usize,
        /// The column, in characters.
        column: usize,
    },
    /// On the command line.
    Flag(&'static str),
    /// In a request to the control interface, or nowhere in particular.
    #[default]
    Request,
}

impl fmt::Display for Place {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { path, line, column } => {
                write!(formatter, "{}:{line}:{column}: ", path.display())
            }
            Self::Flag(name) => write!(formatter, "{name}: "),
            Self::Request => Ok(()),
        }
    }
}

impl Place {
    /// Line and column, for places in one file.
    pub fn position(&self) -> (usize, usize) {
        match self {
            Self::File { line, column, .. } => (*line, *column),
            Self::Flag(_) | Self::Request => (0, 0),
        }
    }

    /// The place in a text that begins here: so many lines on, and there the column, both counted
    /// from 0.
    #[must_use]
    pub fn within(self, lines: usize, columns: usize) -> Self {
        match self {
            Self::File { path, line, column } => {
                let column = if lines == 0 { column + columns } else { columns + 1 };
                Self::File { path, line: line + lines, column }
            }
            other => other,
        }
    }
}

/// Where a table and its keys were written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Places {
    whole: Place,
    /// Where the values are, by their paths.
    keys: BTreeMap<String, Place>,
    /// Where the keys themselves are.
    names: BTreeMap<String, Place>,
}

impl Places {
    /// A table that begins at `whole`.
    pub fn new(whole: Place) -> Self {
        Self { whole, ..Self::default() }
    }

    /// Notes where the value of `key` (`vhost_user.socket` for a key of a table within) is.
    pub fn note(&mut self, key: &str, place: Place) {
        self.keys.insert(key.to_owned(), place);
    }

    /// Takes over the keys of a table within.
    pub fn merge(&mut self, within: Self) {
        self.keys.extend(within.keys);
        self.names.extend(within.names);
    }

    /// Notes where `key` itself is.
    pub fn note_key(&mut self, key: &str, place: Place) {
        self.names.insert(key.to_owned(), place);
    }

    /// Where the value of `key` is, or else the innermost table around it whose place is known.
    pub fn of(&self, key: &str) -> Place {
        let mut path = key;
        loop {
            match (self.keys.get(path), path.rsplit_once('.')) {
                (Some(place), _) => return place.clone(),
                (None, Some((around, _))) => path = around,
                (None, None) => return self.whole.clone(),
            }
        }
    }

    /// Where `key` itself is, or else its value.
    pub fn of_key(&self, key: &str) -> Place {
        self.names.get(key).map_or_else(|| self.of(key), Place::clone)
    }

    /// Where the value of `key` is, if it is there.
    pub fn get(&self, key: &str) -> Option<&Place> {
        self.keys.get(key)
    }

    /// Where the table is.
    pub fn whole(&self) -> Place {
        self.whole.clone()
    }
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Where.
    pub place: Place,
    /// What.
    pub message: String,
    /// What to do about it.
    pub remedy: String,
}

impl Problem {
    /// A problem at `place`.
    pub fn new(place: Place, message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { place, message: message.into(), remedy: remedy.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}{}", self.place, self.message)?;
        if !self.remedy.is_empty() {
            write!(formatter, "\n  → {}", self.remedy)?;
        }
        Ok(())
    }
}

/// Everything that is wrong; never empty where it is an error.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Problems(pub Vec<Problem>);

impl Problems {
    /// Nothing, or these problems.
    ///
    /// # Errors
    /// When there is a problem.
    pub fn none_or(self) -> Result<(), Self> {
        if self.0.is_empty() { Ok(()) } else { Err(self) }
    }

    /// Adds what a check of the whole has found, in the order of the file. What only follows from a
    /// problem that is here already is left out: a value that could not be read is missing, at its
    /// own place or at the head of its table. `tables` are where tables begin.
    pub fn extend_with(&mut self, later: Self, tables: &[Place]) {
        let line = |place: &Place| match place {
            Place::File { line, .. } => Some(*line),
            _ => None,
        };
        let mut heads: Vec<usize> = tables.iter().filter_map(line).collect();
        heads.sort_unstable();
        let unread: Vec<Place> = self.0.iter().map(|problem| problem.place.clone()).collect();
        let follows = |problem: &Problem| {
            let Some(head) = line(&problem.place) else { return false };
            let is_said = self.0.iter().any(|said| said.message == problem.message);
            if is_said || unread.contains(&problem.place) {
                return true;
            }
            if !tables.contains(&problem.place) {
                return false;
            }
            let next = heads.iter().find(|next| **next > head).copied().unwrap_or(usize::MAX);
            unread.iter().filter_map(line).any(|line| (head..next).contains(&line))
        };
        let own: Vec<Problem> = later.0.into_iter().filter(|problem| !follows(problem)).collect();
        self.0.extend(own);
        self.0.sort_by_key(|problem| problem.place.position());
    }

    /// Adds one.
    pub fn add(&mut self, place: Place, message: impl Into<String>, remedy: impl Into<String>) {
        self.0.push(Problem::new(place, message, remedy));
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.0.iter().enumerate() {
            if index > 0 {
                writeln!(formatter)?;
            }
            write!(formatter, "{problem}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}
