//! Who causes how much: accounts of a daemon's disks, put together by machine, container, process,
//! file or kind.

mod describe;
mod explain;
mod files;
mod group;
mod plain;

pub use explain::{ExplainOptions, run as explain};
pub use files::{FilesOptions, run as files};
pub use group::{Entry, Grouping, Groups, Scope};
pub use plain::{insight_line, table};

#[cfg(test)]
pub use group::tests;
