//! The files that a database names by rules.

use crate::{Database, DatabasePart, DatabaseSystem};

/// What the name of a file says about its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Named {
    /// All bytes belong to one part.
    Whole(Database),
    /// A tablespace of InnoDB; its pages tell their parts.
    Tablespace {
        /// Whether it is the system's own.
        is_system: bool,
    },
    /// The first fork of a relation of PostgreSQL with this file node; its pages tell their part.
    Relation(u32),
    /// The write-ahead log or the journal of a database of SQLite, if it begins like one
    /// ([`sqlite::is_log`](crate::sqlite::is_log)): names that end like these are common.
    SqliteLog,
}

/// The log of a system.
const fn log(system: DatabaseSystem) -> Named {
    Named::Whole(Database { system, part: DatabasePart::Log, index: 0 })
}

/// Whether all of a text that is not empty are digits.
fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Whether `name` is `prefix` followed by digits.
fn is_numbered(name: &str, prefix: &str) -> bool {
    name.strip_prefix(prefix).is_some_and(is_number)
}

/// What the path of a file says about its content; `None` for any file that no database has named.
/// The path need not be complete.
pub fn of_path(path: &str) -> Option<Named> {
    let (folders, name) = path.rsplit_once('/').unwrap_or(("", path));
    innodb(name).or_else(|| sqlite(name)).or_else(|| postgresql(folders, name))
}

fn sqlite(name: &str) -> Option<Named> {
    let is_log = name.ends_with("-wal") || name.ends_with("-journal");
    is_log.then_some(Named::SqliteLog)
}

fn innodb(name: &str) -> Option<Named> {
    let (stem, ending) = name.rsplit_once('.').unwrap_or((name, ""));
    let is_log = is_numbered(name, "ib_logfile")
        || name.strip_prefix("#ib_redo").is_some_and(|rest| is_number(rest.trim_end_matches("_tmp")))
        || is_numbered(name, "undo")
        || is_numbered(name, "undo_")
        || ending == "dblwr" && stem.starts_with("#ib_")
        // The log of replication.
        || ending.len() == 6 && is_number(ending) && (stem == "binlog" || stem.ends_with("-bin"));
    if is_log {
        return Some(log(DatabaseSystem::InnoDb));
    }
    let is_system = is_numbered(name, "ibdata");
    let is_tablespace = is_system || ending == "ibd" || is_numbered(name, "ibtmp");
    is_tablespace.then_some(Named::Tablespace { is_system })
}

/// Whether a folder of a tablespace has the name of a version, such as `PG_15_202209061`.
fn is_version(name: &str) -> bool {
    let mut words = name.split('_');
    words.next() == Some("PG")
        && words.next().is_some_and(|word| is_number(&word.replace('.', "")))
        && words.next().is_some_and(is_number)
        && words.next().is_none()
}

fn postgresql(folders: &str, name: &str) -> Option<Named> {
    let mut above = folders.rsplit('/');
    let (folder, second) = (above.next()?, above.next().unwrap_or_default());
    if folder == "pg_wal" || folder == "pg_xlog" {
        let is_segment = name.len() == 24 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
        return is_segment.then_some(log(DatabaseSystem::PostgreSql));
    }
    let is_database =
        folder == "global" || is_number(folder) && (second == "base" || is_version(second));
    if !is_database {
        return None;
    }
    // A relation of more than a gigabyte has further files `NODE.1`, `NODE.2`; its other forks are
    // `NODE_fsm`, `NODE_vm` and `NODE_init`.
    let (stem, segment) = name.split_once('.').unwrap_or((name, "0"));
    let (node, fork) = stem.split_once('_').unwrap_or((stem, ""));
    if !is_number(segment) || !is_number(node) {
        return None;
    }
    let index = node.parse().ok().filter(|node| *node != 0)?;
    match fork {
        "" => Some(Named::Relation(index)),
        "fsm" | "vm" | "init" => Some(Named::Whole(Database {
            system: DatabaseSystem::PostgreSql,
            part: DatabasePart::Other,
            index,
        })),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_systems() {
        let log_of = |system| Some(log(system));
        let (innodb, postgresql) = (DatabaseSystem::InnoDb, DatabaseSystem::PostgreSql);
        for path in [
            "/var/lib/mysql/ib_logfile0",
            "/lib/mysql/#innodb_redo/#ib_redo17",
            "/lib/mysql/#innodb_redo/#ib_redo18_tmp",
            "undo001",
            "/undo_002",
            "/mysql/#ib_16384_0.dblwr",
            "/mysql/binlog.000012",
            "/mysql/host-bin.000001",
        ] {
            assert_eq!(of_path(path), log_of(innodb), "{path}");
        }
        for path in ["/mysql/shop/part.ibd", "/mysql/mysql.ibd", "/x/t#p#p0.ibd", "ibtmp1"] {
            assert_eq!(of_path(path), Some(Named::Tablespace { is_system: false }), "{path}");
        }
        assert_eq!(of_path("/mysql/ibdata1"), Some(Named::Tablespace { is_system: true }));
        assert_eq!(of_path("/15/main/pg_wal/0000000100000000000000A1"), log_of(postgresql));
        for (path, node) in [
            ("/lib/postgresql/15/main/base/5/16384", 16384),
            ("/main/base/5/16384.3", 16384),
            ("main/global/1262", 1262),
            ("/space/PG_15_202209061/5/16999", 16999),
        ] {
            assert_eq!(of_path(path), Some(Named::Relation(node)), "{path}");
        }
        let fork = Database { system: postgresql, part: DatabasePart::Other, index: 16384 };
        assert_eq!(of_path("/main/base/5/16384_fsm"), Some(Named::Whole(fork)));
        assert_eq!(of_path("/srv/shop.db-wal"), Some(Named::SqliteLog));
        for path in [
            "",
            "/",
            "/a",
            "/base/5",
            "/base/5/",
            "/base/x/7",
            "/base/5/0",
            "/base/5/7_abc",
            "/pg_wal/archive_status",
            "/base/5/99999999999",
            "/base/5/7.x",
            "/x/5/16384",
            "/PG_15/5/7",
            "ib_logfile",
            "a.000001",
            "undo",
            "/base/5/pg_filenode.map",
        ] {
            assert_eq!(of_path(path), None, "{path}");
        }
    }
}
