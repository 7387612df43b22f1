//! The stream of I/O events.

use fathom_cql::Type::{self, Integer, Text};
use fathom_cql::catalog::StreamSchema;

/// The columns, in order: first those of the monitoring paper's Table 3.1 with its names, in 64
/// bits where the paper had 32, then what is known of a request's meaning (`docs/events.md`).
const COLUMNS: [(&str, Type); 31] = [
    ("BlktapTS", Integer),
    ("Type", Text),
    ("IOOp", Text),
    ("ReqId", Integer),
    ("Sector", Integer),
    ("Size", Integer),
    ("VMName", Text),
    ("VDisk", Text),
    ("PDisk", Text),
    ("FtrTS", Integer),
    ("MtrTS", Integer),
    ("IP", Integer),
    ("Kind", Text),
    ("Class", Integer),
    ("Inode", Integer),
    ("Path", Text),
    ("FileSize", Integer),
    ("FileSystem", Text),
    ("Cgroup", Text),
    ("Process", Text),
    ("ProcessId", Integer),
    ("Device", Text),
    ("Error", Text),
    ("Flags", Integer),
    ("IoPriority", Integer),
    ("CacheHit", Text),
    ("Layer", Integer),
    ("Source", Text),
    ("Confidence", Text),
    ("Queue", Integer),
    ("WriteHint", Integer),
];

/// The paper's listings and tables are not of one mind about the name of `IOOp`; `I00p` is how
/// its Table 3.1 reads.
const ALIASES: [(&str, &str); 3] = [("IOP", "IOOp"), ("IOPp", "IOOp"), ("I00p", "IOOp")];

/// The values that some columns have: a query that asks for others finds nothing.
const VALUES: [(&str, &[&str]); 5] = [
    ("Type", &["Q", "R", "E", "N"]),
    ("IOOp", &["r", "w", "f", "d", "z", "i", "x"]),
    ("Kind", &["data", "metadata", "journal", "swap", "direct", "directory", "device", "unknown"]),
    ("CacheHit", &["miss", "hit", "part"]),
    ("Confidence", &["none", "likely", "sure"]),
];

/// The stream `IOstream`: an event for each request and each response.
///
/// `Type` is `Q`, `R`, `E` or `N`, `IOOp` a letter, as `docs/events.md` lists them. `Kind`,
/// `Source`, `Error` and `Confidence` are the names of the numbers there, `CacheHit` is `miss`,
/// `hit` or `part`. What is not known is null.
pub fn io_stream() -> StreamSchema {
    let mut schema = StreamSchema::new("IOstream", &COLUMNS);
    let own = |&(alias, of): &(&str, &str)| (alias.to_owned(), of.to_owned());
    let known = |&(column, values): &(&str, &[&str])| {
        (column.to_owned(), values.iter().map(ToString::to_string).collect())
    };
    schema.values = VALUES.iter().map(known).collect();
    schema.aliases = ALIASES.iter().map(own).collect();
    schema
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_in_any_case_and_by_alias() {
        let schema = io_stream();
        for name in ["IOOp", "ioop", "IOp", "IOPp", "IOP", "I00p"] {
            assert_eq!(schema.find(name), Some(2), "{name}");
        }
        assert_eq!(schema.find("BlkTapTS"), Some(0));
        assert_eq!(schema.find("IP"), Some(11));
        assert_eq!(schema.find("processid"), Some(20));
        assert_eq!(schema.find("nothing"), None);
    }

    #[test]
    fn every_name_is_there_once() {
        let schema = io_stream();
        for (position, column) in schema.columns.iter().enumerate() {
            assert_eq!(schema.find(&column.name), Some(position));
        }
    }
}
