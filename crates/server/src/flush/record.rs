//! Records of what is changed in a guest during a flush. They outlive the daemon: a daemon that was
//! killed in between leaves the record to the next one, which puts the guest's own value back.
//!
//! A record is a file of JSON in the folder for records: `tunables-` or `balloon-`, and the name of the
//! virtual machine in hexadecimal digits.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The version of the format.
const VERSION: u32 = 1;
/// The end of a record's name.
const SUFFIX: &str = ".json";
/// The longest record that is read, in bytes.
const LENGTH_MAX: u64 = 4096;
/// The most records that are read.
const RECORDS_MAX: usize = 10_000;

/// What is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// `vm.dirty_expire_centisecs`.
    Tunables,
    /// The size of the memory balloon.
    Balloon,
}

impl Kind {
    const ALL: [Self; 2] = [Self::Tunables, Self::Balloon];

    /// The beginning of a record's name.
    fn prefix(self) -> &'static str {
        match self {
            Self::Tunables => "tunables-",
            Self::Balloon => "balloon-",
        }
    }
}

/// The guest's own value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Own {
    /// `vm.dirty_expire_centisecs`.
    DirtyExpire(u32),
    /// The guest's memory, in bytes.
    MemoryBytes(u64),
}

/// A changed value of a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    version: u32,
    /// The virtual machine.
    pub(super) vm: String,
    /// The guest's own value.
    #[serde(flatten)]
    pub(super) own: Own,
}

impl Record {
    pub(super) fn new(vm: &str, own: Own) -> Self {
        Self { version: VERSION, vm: vm.to_owned(), own }
    }

    /// What is changed.
    pub(super) fn kind(&self) -> Kind {
        match self.own {
            Own::DirtyExpire(_) => Kind::Tunables,
            Own::MemoryBytes(_) => Kind::Balloon,
        }
    }

    /// The key among all records.
    pub(super) fn key(&self) -> (Kind, String) {
        (self.kind(), self.vm.clone())
    }

    /// Writes the record durably.
    pub(super) fn write(&self, folder: &Path) -> io::Result<()> {
        let path = path(folder, self.kind(), &self.vm);
        let new = path.with_extension("new");
        let mut file = File::create(&new)?;
        file.write_all(&serde_json::to_vec(self)?)?;
        file.sync_all()?;
        fs::rename(&new, &path)?;
        File::open(folder)?.sync_all()
    }

    /// Removes the record.
    pub(super) fn remove(&self, folder: &Path) -> io::Result<()> {
        fs::remove_file(path(folder, self.kind(), &self.vm))
    }
}

/// All records in `folder`; unreadable ones are logged.
pub(super) fn read_all(folder: &Path) -> Vec<Record> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let paths = entries.flatten().map(|entry| entry.path()).filter(|path| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let is_known = Kind::ALL.iter().any(|kind| name.starts_with(kind.prefix()));
        is_known && name.ends_with(SUFFIX)
    });
    let mut records = Vec::new();
    for path in paths.take(RECORDS_MAX) {
        match read(&path) {
            Ok(record) => records.push(record),
            Err(error) => tracing::warn!(
                "the record {} of a guest's own value cannot be read: {error}",
                path.display()
            ),
        }
    }
    records
}

fn read(path: &Path) -> io::Result<Record> {
    let mut text = Vec::new();
    File::open(path)?.take(LENGTH_MAX).read_to_end(&mut text)?;
    parse(&text)
}

/// Reads the text of a record.
pub(super) fn parse(text: &[u8]) -> io::Result<Record> {
    let record: Record = serde_json::from_slice(text)?;
    let other = || io::Error::new(io::ErrorKind::InvalidData, "it has another version");
    (record.version == VERSION).then_some(record).ok_or_else(other)
}

fn path(folder: &Path, kind: Kind, vm: &str) -> PathBuf {
    let name: String = vm.bytes().flat_map(|byte| [byte >> 4, byte & 15]).map(digit).collect();
    folder.join(format!("{}{name}{SUFFIX}", kind.prefix()))
}

fn digit(value: u8) -> char {
    char::from_digit(u32::from(value), 16).unwrap_or('0')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_again_and_malformed_files_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        assert_eq!(read_all(&folder.join("missing")), []);
        let records = [
            Record::new("../web", Own::DirtyExpire(3000)),
            Record::new("../web2", Own::MemoryBytes(u64::MAX)),
            Record::new(&"v".repeat(100), Own::DirtyExpire(0)),
        ];
        for record in &records {
            record.write(folder).unwrap();
            record.write(folder).unwrap();
        }
        fs::write(folder.join("tunables-00.json"), "{").unwrap();
        fs::write(folder.join("tunables-01.json"), "[".repeat(100_000)).unwrap();
        fs::write(
            folder.join("tunables-02.json"),
            r#"{"version": 2, "vm": "x", "dirty_expire": 1}"#,
        )
        .unwrap();
        fs::create_dir(folder.join("tunables-03.json")).unwrap();
        for (number, text) in [
            r#"{"version": 1, "vm": "x"}"#,
            r#"{"version": 1, "vm": "x", "memory_bytes": -1}"#,
            r#"{"version": 1, "vm": "x", "memory_bytes": 1e99}"#,
            r#"{"version": 1, "memory_bytes": 1}"#,
        ]
        .iter()
        .enumerate()
        {
            fs::write(folder.join(format!("balloon-{number}.json")), text).unwrap();
        }
        let mut found = read_all(folder);
        found.sort_by_key(|record| record.vm.len());
        assert_eq!(found, records);
        records[0].remove(folder).unwrap();
        let mut rest = read_all(folder);
        rest.sort_by_key(|record| record.vm.len());
        assert_eq!(rest, records[1..]);
        // The text of the first version.
        let text = br#"{"version":1,"vm":"web","dirty_expire":3000}"#;
        let record = Record::new("web", Own::DirtyExpire(3000));
        assert_eq!(parse(text).unwrap(), record);
        assert_eq!(serde_json::to_vec(&record).unwrap(), text);
    }
}
