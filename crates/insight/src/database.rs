//! The part of a database that bytes belong to.

/// A database system whose pages are recognised.
///
/// The numbers are those of the event's column `DbSystem`; they never change their meaning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum DatabaseSystem {
    /// The bytes are not known to belong to a database.
    #[default]
    None = 0,
    /// SQLite.
    Sqlite = 1,
    /// InnoDB, the storage of MySQL and MariaDB.
    InnoDb = 2,
    /// PostgreSQL.
    PostgreSql = 3,
}

impl DatabaseSystem {
    /// Every system, in the order of its number.
    pub const ALL: [Self; 4] = [Self::None, Self::Sqlite, Self::InnoDb, Self::PostgreSql];

    /// The name used in events and the control interface; empty for none.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "",
            Self::Sqlite => "sqlite",
            Self::InnoDb => "innodb",
            Self::PostgreSql => "postgresql",
        }
    }
}

/// A part of a database.
///
/// The numbers are those of the event's column `DbPart`; they never change their meaning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum DatabasePart {
    /// The bytes are not known to belong to a database, or the part is not known yet.
    #[default]
    None = 0,
    /// The rows of tables: also the clustered index of InnoDB, which holds them.
    Table = 1,
    /// Indexes beside the rows.
    Index = 2,
    /// Logs: of changes to come, of changes to undo, of replication, and the doublewrite buffer.
    Log = 3,
    /// Other pages: the database's own structures, free pages, compressed and encrypted ones, and
    /// those that fail a check.
    Other = 4,
}

impl DatabasePart {
    /// Every part, in the order of its number.
    pub const ALL: [Self; 5] = [Self::None, Self::Table, Self::Index, Self::Log, Self::Other];

    /// The name used in events and the control interface; empty for none.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "",
            Self::Table => "table",
            Self::Index => "index",
            Self::Log => "log",
            Self::Other => "other",
        }
    }

    /// The part with a number; [`DatabasePart::None`] if there is none.
    pub fn from_number(number: u8) -> Self {
        Self::ALL.get(usize::from(number)).copied().unwrap_or_default()
    }
}

/// What is known about some bytes of a database.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Database {
    /// The system; none if the bytes do not belong to a database.
    pub system: DatabaseSystem,
    /// The part.
    pub part: DatabasePart,
    /// The number of the table or index within the database: the root page of an SQLite tree, the
    /// index id of InnoDB, the file node of a PostgreSQL relation. 0 if unknown.
    pub index: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_places_in_the_lists() {
        for (number, part) in DatabasePart::ALL.into_iter().enumerate() {
            assert_eq!(part as usize, number);
            assert_eq!(DatabasePart::from_number(number as u8), part);
        }
        assert_eq!(DatabasePart::from_number(200), DatabasePart::None);
        for (number, system) in DatabaseSystem::ALL.into_iter().enumerate() {
            assert_eq!(system as usize, number);
        }
    }
}
