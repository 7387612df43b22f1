//! The input streams of queries.

use serde::{Deserialize, Serialize};

use crate::value::Type;

/// A column of a stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Column {
    /// The name; names do not depend on case.
    pub name: String,
    /// The type.
    pub kind: Type,
}

/// An input stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamSchema {
    /// The name; names do not depend on case.
    pub name: String,
    /// The columns, in order.
    pub columns: Vec<Column>,
    /// Other names of columns, each with the column's name: `IOp` for `IOOp`, as in the monitoring
    /// paper's listings.
    pub aliases: Vec<(String, String)>,
    /// The columns of texts whose possible values are all known: the column's name and the values.
    pub values: Vec<(String, Vec<String>)>,
}

/// The streams that queries may use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Catalog {
    /// The streams. A script may declare more.
    pub streams: Vec<StreamSchema>,
}

impl Catalog {
    /// The position of a stream.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.streams.iter().position(|stream| stream.name.eq_ignore_ascii_case(name))
    }
}

impl StreamSchema {
    /// A stream with columns.
    pub fn new(name: &str, columns: &[(&str, Type)]) -> Self {
        let column = |&(name, kind): &(&str, Type)| Column { name: name.to_owned(), kind };
        Self {
            name: name.to_owned(),
            columns: columns.iter().map(column).collect(),
            aliases: Vec::new(),
            values: Vec::new(),
        }
    }

    /// The position of a column, by its name or an alias.
    pub fn find(&self, name: &str) -> Option<usize> {
        let by = |name: &str| self.columns.iter().position(|c| c.name.eq_ignore_ascii_case(name));
        by(name).or_else(|| {
            let (_, of) =
                self.aliases.iter().find(|(alias, _)| alias.eq_ignore_ascii_case(name))?;
            by(of)
        })
    }
}
