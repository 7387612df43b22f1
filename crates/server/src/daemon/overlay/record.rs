//! The records of the folder.
//!
//! A record is a line `fathom 1 CHECKSUM`, where 1 is the version of the format and CHECKSUM the
//! CRC-32C of all bytes behind the line, in eight hexadecimal digits; then one JSON object.

use std::fmt::Write as _;

use fathom_control::DiskDefinition;
use serde::{Deserialize, Serialize};

use crate::configuration::{Origins, Problems, layers};

/// The version of the format.
const VERSION: u32 = 1;
/// The first word of a record.
const MAGIC: &str = "fathom";
/// The longest record, in bytes.
pub(super) const LENGTH_MAX: usize = 1 << 20;
/// The longest name of a record's file without its suffix, in bytes. Longer names of disks are cut,
/// and have a checksum at the end.
const STEM_LENGTH_MAX: usize = 200;

/// What a record is about. Each disk has at most one record of each kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum RecordKind {
    /// How the disk differs from the file.
    Change,
    /// A change that was set aside because the file was edited, or because the file should apply.
    Aside,
    /// The definition with which the log of the disk was opened last.
    Log,
    /// A move of the disk that has begun and not ended.
    Move,
}

impl RecordKind {
    pub(super) const ALL: [Self; 4] = [Self::Change, Self::Aside, Self::Log, Self::Move];

    /// The suffix of the file's name.
    pub(super) fn suffix(self) -> &'static str {
        match self {
            Self::Change => ".change",
            Self::Aside => ".aside",
            Self::Log => ".log",
            Self::Move => ".move",
        }
    }
}

/// How far a change has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum RecordProgress {
    /// It has begun.
    Pending,
    /// It has taken effect.
    Done,
}

/// A record.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ChangeRecord {
    /// The disk's name.
    pub name: String,
    /// Counts the records of the folder.
    pub number: u64,
    pub state: RecordProgress,
    /// The identity of the image in its file system when the record was written, for people: the
    /// number of the file system and of the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<(u64, u64)>,
    /// The entry of the configuration file for the disk at that time; `None` if it had none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entry: Option<DiskDefinition>,
    /// What was served before a pending change; `None` if the disk was not served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<DiskDefinition>,
    /// What is served from now on; `None` if the disk is removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<DiskDefinition>,
}

/// Why a record cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Damage {
    /// A later version of Fathom wrote it.
    Newer(u32),
    /// Its content is not what was written.
    Damaged,
    /// It cannot be read.
    Unreadable(String),
}

impl std::fmt::Display for Damage {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Newer(version) => {
                write!(formatter, "it has version {version} of the format, which is newer")
            }
            Self::Damaged => formatter.write_str("it is damaged"),
            Self::Unreadable(error) => formatter.write_str(error),
        }
    }
}

impl ChangeRecord {
    /// The bytes of the record. `None` if it cannot be written: it is too long, or has a path that
    /// is not a text.
    pub(super) fn encode(&self) -> Option<Vec<u8>> {
        let body = serde_json::to_string_pretty(self).ok()? + "\n";
        let checksum = crc32c::crc32c(body.as_bytes());
        let text = format!("{MAGIC} {VERSION} {checksum:08x}\n{body}");
        (text.len() <= LENGTH_MAX).then(|| text.into_bytes())
    }

    /// Reads a record.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, Damage> {
        let text = std::str::from_utf8(bytes).map_err(|_| Damage::Damaged)?;
        let (head, body) = text.split_once('\n').ok_or(Damage::Damaged)?;
        let mut words = head.split(' ');
        let (magic, version, checksum) = (words.next(), words.next(), words.next());
        if magic != Some(MAGIC) || words.next().is_some() {
            return Err(Damage::Damaged);
        }
        let version: u32 = version.and_then(|it| it.parse().ok()).ok_or(Damage::Damaged)?;
        if version > VERSION {
            return Err(Damage::Newer(version));
        }
        let expected = format!("{:08x}", crc32c::crc32c(body.as_bytes()));
        if version != VERSION || checksum != Some(expected.as_str()) {
            return Err(Damage::Damaged);
        }
        let mut change: Self = serde_json::from_str(body).map_err(|_| Damage::Damaged)?;
        for disk in [&mut change.entry, &mut change.before, &mut change.after].into_iter().flatten()
        {
            complete(disk);
        }
        Ok(change)
    }
}

/// Adds the defaults of options that an earlier version of Fathom did not have. What is invalid
/// stays as it is; opening the disk reports it.
fn complete(disk: &mut DiskDefinition) {
    let mut problems = Problems::default();
    layers::complete(&mut disk.layers, &Origins::default(), None, &mut problems);
}

/// A definition as it is after it has been written into a record and read again, to compare it with
/// others: numbers may have lost their last digit.
pub(crate) fn as_recorded(disk: &DiskDefinition) -> DiskDefinition {
    let read = serde_json::to_string(disk).ok().and_then(|text| serde_json::from_str(&text).ok());
    let mut disk: DiskDefinition = read.unwrap_or_else(|| disk.clone());
    complete(&mut disk);
    disk
}

/// The name of the file for a disk, without its suffix.
pub(crate) fn stem(name: &str) -> String {
    let mut stem = String::new();
    for byte in name.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' => stem.push(char::from(byte)),
            b'.' if !stem.is_empty() => stem.push('.'),
            _ => {
                let _ = write!(stem, "%{byte:02x}");
            }
        }
    }
    if stem.len() > STEM_LENGTH_MAX {
        stem.truncate(STEM_LENGTH_MAX);
        let _ = write!(stem, "~{:08x}", crc32c::crc32c(name.as_bytes()));
    }
    stem
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_control::LayerDefinition;
    use serde_json::json;

    fn change() -> ChangeRecord {
        let layer = LayerDefinition::new("fault", json!({ "rate": 0.1 }));
        let mut disk =
            DiskDefinition { name: "a".into(), layers: vec![layer], ..Default::default() };
        disk.image = Some("/images/a.img".into());
        complete(&mut disk);
        ChangeRecord {
            name: "a".into(),
            number: 7,
            state: RecordProgress::Pending,
            image: Some((3, 4)),
            entry: None,
            before: None,
            after: Some(disk),
        }
    }

    #[test]
    fn a_record_is_read_as_it_was_written_or_not_at_all() {
        let change = change();
        let bytes = change.encode().unwrap();
        assert_eq!(ChangeRecord::decode(&bytes).unwrap(), change);
        for length in 0..bytes.len() {
            assert_eq!(ChangeRecord::decode(&bytes[..length]), Err(Damage::Damaged), "{length}");
        }
        for at in 0..bytes.len() {
            let mut wrong = bytes.clone();
            wrong[at] ^= 1;
            assert!(ChangeRecord::decode(&wrong).is_err(), "{at}");
        }
        let newer = [&b"fathom 2 "[..], &bytes[9..]].concat();
        assert_eq!(ChangeRecord::decode(&newer), Err(Damage::Newer(2)));
        assert!(ChangeRecord::decode(&[0xff; 100]).is_err());
    }

    #[test]
    fn options_of_later_versions_get_their_defaults() {
        let mut older = change();
        let disk = older.after.as_mut().unwrap();
        let all = disk.clone();
        disk.layers[0].options.remove("seed");
        assert_eq!(ChangeRecord::decode(&older.encode().unwrap()).unwrap().after.unwrap(), all);
        assert_eq!(as_recorded(&all), all);
    }

    #[test]
    fn disks_have_files_of_their_own() {
        assert_eq!(stem("web-root_1.img"), "web-root_1.img");
        assert_eq!(stem("../a b"), "%2e.%2fa%20b");
        assert_ne!(stem("a/b"), stem("a%2fb"));
        let (one, other) = (stem(&"ä".repeat(64)), stem(&format!("{}a", "ä".repeat(63))));
        assert!(one != other && one.len() < 240, "{one}");
    }
}
