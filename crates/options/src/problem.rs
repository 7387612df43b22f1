//! Problems of a configuration, with their origins and remedies.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// Where something was written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Origin {
    /// In a file. Lines and columns count from 1.
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
    /// In a request to the control interface, or at no known place.
    #[default]
    Request,
}

impl fmt::Display for Origin {
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

impl Origin {
    /// The line and the column, to sort the origins in one file; (0, 0) for others.
    pub fn position(&self) -> (usize, usize) {
        match self {
            Self::File { line, column, .. } => (*line, *column),
            Self::Flag(_) | Self::Request => (0, 0),
        }
    }

    /// An origin within a text that begins at `self`: `lines` lines further, at column `columns` of
    /// that line. Both count from 0.
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
pub struct Origins {
    whole: Origin,
    /// The origins of the values, by their paths.
    keys: BTreeMap<String, Origin>,
    /// The origins of the keys themselves.
    names: BTreeMap<String, Origin>,
}

impl Origins {
    /// A table that begins at `whole`.
    pub fn new(whole: Origin) -> Self {
        Self { whole, ..Self::default() }
    }

    /// Records the origin of the value of `key` (`vhost_user.socket` for a key of a nested table).
    pub fn note(&mut self, key: &str, origin: Origin) {
        self.keys.insert(key.to_owned(), origin);
    }

    /// Adds the origins of the keys of a nested table.
    pub fn merge(&mut self, within: Self) {
        self.keys.extend(within.keys);
        self.names.extend(within.names);
    }

    /// Records the origin of `key` itself.
    pub fn note_key(&mut self, key: &str, origin: Origin) {
        self.names.insert(key.to_owned(), origin);
    }

    /// The origin of the value of `key`, or of the innermost enclosing table with a known origin.
    pub fn of(&self, key: &str) -> Origin {
        let mut path = key;
        loop {
            match (self.keys.get(path), path.rsplit_once('.')) {
                (Some(origin), _) => return origin.clone(),
                (None, Some((around, _))) => path = around,
                (None, None) => return self.whole.clone(),
            }
        }
    }

    /// The origin of `key` itself, or else of its value.
    pub fn of_key(&self, key: &str) -> Origin {
        self.names.get(key).map_or_else(|| self.of(key), Origin::clone)
    }

    /// The origin of the value of `key`, if it is known.
    pub fn get(&self, key: &str) -> Option<&Origin> {
        self.keys.get(key)
    }

    /// The origin of the table.
    pub fn whole(&self) -> Origin {
        self.whole.clone()
    }
}

/// One problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The origin of the problem.
    pub origin: Origin,
    /// A description of the problem.
    pub message: String,
    /// What the user can do about the problem; may be empty.
    pub remedy: String,
}

impl Problem {
    /// A problem at `origin`.
    pub fn new(origin: Origin, message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { origin, message: message.into(), remedy: remedy.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}{}", self.origin, self.message)?;
        if !self.remedy.is_empty() {
            write!(formatter, "\n  → {}", self.remedy)?;
        }
        Ok(())
    }
}

/// All problems of a configuration. As an error, it is never empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Problems(pub Vec<Problem>);

impl Problems {
    /// Returns `self` as an error, unless it is empty.
    ///
    /// # Errors
    /// When there is a problem.
    pub fn none_or(self) -> Result<(), Self> {
        if self.0.is_empty() { Ok(()) } else { Err(self) }
    }

    /// Adds the problems that a check of the whole configuration has found, and sorts all by their
    /// lines. Omits a problem that only follows from a present one: a value that could not be read
    /// is missing, at its own origin or at the head of its table. `tables` are the origins at which
    /// tables begin.
    pub fn extend_with(&mut self, later: Self, tables: &[Origin]) {
        let line = |origin: &Origin| match origin {
            Origin::File { line, .. } => Some(*line),
            _ => None,
        };
        let mut heads: Vec<usize> = tables.iter().filter_map(line).collect();
        heads.sort_unstable();
        let unread: Vec<Origin> = self.0.iter().map(|problem| problem.origin.clone()).collect();
        let follows = |problem: &Problem| {
            let Some(head) = line(&problem.origin) else { return false };
            let is_reported = self.0.iter().any(|reported| reported.message == problem.message);
            if is_reported || unread.contains(&problem.origin) {
                return true;
            }
            if !tables.contains(&problem.origin) {
                return false;
            }
            let next = heads.iter().find(|next| **next > head).copied().unwrap_or(usize::MAX);
            unread.iter().filter_map(line).any(|line| (head..next).contains(&line))
        };
        let own: Vec<Problem> = later.0.into_iter().filter(|problem| !follows(problem)).collect();
        self.0.extend(own);
        self.0.sort_by_key(|problem| problem.origin.position());
    }

    /// Adds a problem.
    pub fn add(&mut self, origin: Origin, message: impl Into<String>, remedy: impl Into<String>) {
        self.0.push(Problem::new(origin, message, remedy));
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
