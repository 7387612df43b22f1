//! Records of what is changed in a guest during a flush. They outlive the daemon: a daemon that was
//! killed in between leaves the record to the next one, which puts the guest's own value back.
//!
//! A record is a file of JSON in the folder for records: `tunables-`, `balloon-` or `frozen-`, the
//! name of the virtual machine in hexadecimal digits, and eight digits for the daemon, which follow
//! from the path of its control socket. So daemons that share a folder do not touch each other's
//! records. Files of earlier versions, without these digits, are read too.

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
    /// Whether the file systems are frozen.
    Frozen,
}

impl Kind {
    const ALL: [Self; 3] = [Self::Tunables, Self::Balloon, Self::Frozen];

    /// The beginning of a record's name.
    fn prefix(self) -> &'static str {
        match self {
            Self::Tunables => "tunables-",
            Self::Balloon => "balloon-",
            Self::Frozen => "frozen-",
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
    /// When its file systems, which were not frozen, were frozen: in seconds since 1970.
    FrozenAt(u64),
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
            Own::FrozenAt(_) => Kind::Frozen,
        }
    }

    /// The key among all records.
    pub(super) fn key(&self) -> (Kind, String) {
        (self.kind(), self.vm.clone())
    }
}

/// The records of one daemon.
#[derive(Clone, Debug)]
pub(super) struct Records {
    folder: PathBuf,
    /// The end of their names: the digits of the daemon, and the suffix.
    end: String,
}

impl Records {
    /// The records in `folder` of the daemon with this control socket.
    pub(super) fn new(folder: PathBuf, control: &Path) -> Self {
        let control = std::path::absolute(control).unwrap_or_else(|_| control.to_owned());
        // FNV-1a, and not the checksum of other formats: records of daemons in use have these
        // names, and another sum would need both of them.
        let digits =
            control.as_os_str().as_encoded_bytes().iter().fold(0x811c_9dc5_u32, |sum, byte| {
                (sum ^ u32::from(*byte)).wrapping_mul(0x0100_0193)
            });
        Self { folder, end: format!("-{digits:08x}{SUFFIX}") }
    }

    /// The folder.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Writes a record durably.
    pub(super) fn write(&self, record: &Record) -> io::Result<()> {
        let path = self.path(record, &self.end);
        let new = path.with_extension("new");
        let mut file = File::create(&new)?;
        file.write_all(&serde_json::to_vec(record)?)?;
        file.sync_all()?;
        fs::rename(&new, &path)?;
        File::open(&self.folder)?.sync_all()
    }

    /// Removes a record, also one of an earlier version.
    pub(super) fn remove(&self, record: &Record) -> io::Result<()> {
        [&self.end, SUFFIX].iter().try_for_each(|end| {
            match fs::remove_file(self.path(record, end)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                _ => Ok(()),
            }
        })
    }

    /// All records, those of earlier versions first; unreadable ones are logged.
    pub(super) fn read_all(&self) -> Vec<Record> {
        let Ok(entries) = fs::read_dir(&self.folder) else { return Vec::new() };
        let is_own = |path: &Path| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let rest = Kind::ALL.iter().find_map(|kind| name.strip_prefix(kind.prefix()))?;
            let is_early = rest.ends_with(SUFFIX) && !rest.contains('-');
            (is_early || rest.ends_with(&self.end)).then_some(is_early)
        };
        let mut own: Vec<(bool, PathBuf)> = entries
            .flatten()
            .map(|entry| entry.path())
            .filter_map(|path| Some((!is_own(&path)?, path)))
            .take(RECORDS_MAX)
            .collect();
        own.sort();
        readable(own.into_iter().map(|(_, path)| path))
    }

    /// The file of a record.
    pub(super) fn path_of(&self, record: &Record) -> PathBuf {
        self.path(record, &self.end)
    }

    fn path(&self, record: &Record, end: &str) -> PathBuf {
        let vm = record.vm.bytes().flat_map(|byte| [byte >> 4, byte & 15]);
        let name: String = vm.map(digit).collect();
        self.folder.join(format!("{}{name}{end}", record.kind().prefix()))
    }
}

fn readable(paths: impl Iterator<Item = PathBuf>) -> Vec<Record> {
    let mut records = Vec::new();
    for path in paths {
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
        let of = |folder: &Path| Records::new(folder.to_owned(), Path::new("/run/a.sock"));
        assert_eq!(of(&folder.join("missing")).read_all(), []);
        let store = of(folder);
        let records = [
            Record::new("../web", Own::DirtyExpire(3000)),
            Record::new("../web2", Own::MemoryBytes(u64::MAX)),
            Record::new(&"v".repeat(100), Own::DirtyExpire(0)),
        ];
        for record in &records {
            store.write(record).unwrap();
            store.write(record).unwrap();
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
        let mut found = store.read_all();
        found.sort_by_key(|record| record.vm.len());
        assert_eq!(found, records);
        store.remove(&records[0]).unwrap();
        let mut rest = store.read_all();
        rest.sort_by_key(|record| record.vm.len());
        assert_eq!(rest, records[1..]);
        // The text of the first version.
        let text = br#"{"version":1,"vm":"web","dirty_expire":3000}"#;
        let record = Record::new("web", Own::DirtyExpire(3000));
        assert_eq!(parse(text).unwrap(), record);
        assert_eq!(serde_json::to_vec(&record).unwrap(), text);
    }

    #[test]
    fn daemons_with_one_folder_have_their_own_records() {
        let folder = tempfile::tempdir().unwrap();
        let [a, b] = ["/run/a.sock", "/run/b.sock"]
            .map(|control| Records::new(folder.path().to_owned(), Path::new(control)));
        let [of_a, of_b] = [3000, 500].map(|own| Record::new("web", Own::DirtyExpire(own)));
        a.write(&of_a).unwrap();
        b.write(&of_b).unwrap();
        assert_eq!(a.read_all(), std::slice::from_ref(&of_a));
        assert_eq!(b.read_all(), std::slice::from_ref(&of_b));
        b.remove(&of_b).unwrap();
        assert_eq!((a.read_all(), b.read_all()), (vec![of_a.clone()], vec![]));
        // The name of the first version. The current one takes precedence.
        let early = folder.path().join("tunables-776562.json");
        fs::write(&early, serde_json::to_vec(&of_b).unwrap()).unwrap();
        assert_eq!(a.read_all(), [of_b.clone(), of_a.clone()]);
        a.remove(&of_a).unwrap();
        assert_eq!(a.read_all(), []);
        assert!(!early.exists());
    }
}
