//! What identifies an image among those that have been at the same path.
//!
//! A mark in a file outlives the image for which it was written: another image may get its name, or
//! another device its path. So such a mark has a line with facts about the image, of
//! which those that both an earlier and a later look have found are compared. A file has the time
//! of its creation or, if its file system keeps none, its number. A block device has what `/sys`
//! reports of it: the identifiers of a disk, of a partition, of device-mapper or of an array, the
//! file behind a loop device; its size only if nothing else is known, because a device may grow.
//!
//! The marks of devices have the device's [key](Facts::key) as their name: one of these facts
//! that stays when the host starts again or the device is connected elsewhere. Its path and number
//! do not.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::UNIX_EPOCH;

use crate::device::{folder, loop_name};

/// The longest text of a fact, in bytes.
const VALUE_LENGTH_MAX: usize = 128;
/// The beginning of the line in a mark.
const PREFIX: &str = "image:";

/// The files of a device's folder in `/sys`, and the names of these facts.
const FILES: [(&str, &str); 6] = [
    ("wwid", "wwid"),
    ("device/wwid", "wwid"),
    ("serial", "serial"),
    ("dm/uuid", "dm"),
    ("md/uuid", "md"),
    ("loop/backing_file", "backing"),
];

/// The facts that name one device among all, the best first.
const NAMES: [&str; 5] = ["dm", "md", "wwid", "serial", "loop"];
/// The fact with the name that the operator has given to a device.
const GIVEN: &str = "key";

/// The facts about an image, each with its name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Facts(Vec<(String, String)>);

impl Facts {
    /// The facts about an open image.
    ///
    /// # Errors
    /// When the image's metadata cannot be read.
    pub(crate) fn of(image: &File) -> io::Result<Self> {
        let metadata = image.metadata()?;
        if metadata.file_type().is_block_device() {
            return Ok(Self::of_device(&folder(metadata.rdev()), Some(image)));
        }
        let mut facts = Self::default();
        let created = metadata.created().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        match created {
            Some(time) => facts.add("born", &time.as_nanos().to_string()),
            None => facts.add("number", &metadata.ino().to_string()),
        }
        Ok(facts)
    }

    /// The facts about the block device with this folder in `/sys`; `device` is the device if it is
    /// open.
    pub(crate) fn of_device(folder: &Path, device: Option<&File>) -> Self {
        let mut facts = Self::default();
        // A partition, with its disk above it.
        let partition = ["partition", "start"].map(|name| (name, read(&folder.join(name))));
        let whole = if partition[0].1.is_some() { folder.join("..") } else { folder.to_owned() };
        for (file, name) in FILES {
            if let Some(value) = read(&whole.join(file)) {
                if facts.get(name).is_none() {
                    facts.add(name, &value);
                }
            }
        }
        if let Some(name) = loop_name(&whole, device) {
            facts.add("loop", &name);
        }
        if let (true, Some(size)) = (facts.0.is_empty(), read(&folder.join("size"))) {
            facts.add("size", &size);
        }
        for (name, value) in partition {
            if let Some(value) = value {
                facts.add(name, &value);
            }
        }
        facts
    }

    /// Adds a fact, if it has a text.
    fn add(&mut self, name: &str, value: &str) {
        let clean = |c: char| if c.is_ascii_graphic() { c } else { '_' };
        let value: String = value.chars().map(clean).collect();
        let value = &value[value.len().saturating_sub(VALUE_LENGTH_MAX)..];
        if !value.is_empty() {
            self.0.push((name.to_owned(), value.to_owned()));
        }
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(other, _)| other == name).map(|(_, value)| value.as_str())
    }

    /// Whether a fact shows that `other` is another image.
    pub(crate) fn contradicts(&self, other: &Self) -> bool {
        let have_loop = self.get("loop").is_some() && other.get("loop").is_some();
        self.0.iter().any(|(name, value)| {
            // The file behind a loop device may be renamed.
            let counts = name != "backing" || !have_loop;
            counts && other.get(name).is_some_and(|found| found != value)
        })
    }

    /// Whether a fact that only one device has shows that `other` is the same device.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        let mut names = NAMES.iter().chain(&["backing"]);
        names.any(|name| self.get(name).is_some_and(|value| other.get(name) == Some(value)))
            && self.get("start") == other.get("start")
            && !self.contradicts(other)
    }

    /// The key of a device: the best of its names, and for a partition its place. `None` if the
    /// kernel knows no name of it.
    pub(crate) fn key(&self) -> Option<String> {
        let named = |name: &&str| Some(format!("{name}-{}", self.get(name)?));
        let key = NAMES.iter().find_map(named)?;
        Some(match self.get("start") {
            Some(start) => format!("{key}-part-{start}"),
            None => key,
        })
    }

    /// The same device with the name that the operator has given to it. It may grow.
    pub(crate) fn with_given(mut self, name: &str) -> Self {
        self.0.retain(|(fact, _)| fact != "size");
        self.add(GIVEN, name);
        self
    }

    /// Divides a mark into its text and the facts in its last line. A mark of an earlier version
    /// has none.
    pub(crate) fn split(mark: &[u8]) -> (&[u8], Self) {
        let Some(end) = mark.iter().rposition(|byte| *byte == b'\n') else {
            return (mark, Self::default());
        };
        match std::str::from_utf8(&mark[end + 1..]).ok().and_then(Self::parse) {
            Some(facts) => (&mark[..end], facts),
            // The line is the end of a path.
            None => (mark, Self::default()),
        }
    }

    fn parse(line: &str) -> Option<Self> {
        let facts = line.strip_prefix(PREFIX)?.split_ascii_whitespace();
        let facts = facts.map(|fact| {
            let (name, value) = fact.split_once('=')?;
            Some((name.to_owned(), value.to_owned()))
        });
        facts.collect::<Option<_>>().map(Self)
    }

    /// `text` with the facts in a line behind it.
    pub(crate) fn append_to(&self, text: &[u8]) -> Vec<u8> {
        let mut mark = text.to_vec();
        mark.extend_from_slice(format!("\n{self}").as_bytes());
        mark
    }
}

impl fmt::Display for Facts {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(PREFIX)?;
        self.0.iter().try_for_each(|(name, value)| write!(formatter, " {name}={value}"))
    }
}

/// The text of a file in `/sys`; `None` if there is none.
fn read(path: &Path) -> Option<String> {
    let mut text = Vec::new();
    File::open(path).ok()?.take(4096).read_to_end(&mut text).ok()?;
    let text = String::from_utf8_lossy(&text).trim().to_owned();
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn parsed(line: &str) -> Facts {
        Facts::parse(line).unwrap()
    }

    #[test]
    fn facts_that_both_have_are_compared() {
        let disk = parsed("image: wwid=naa.5000 serial=A1");
        assert!(!disk.contradicts(&disk) && !disk.contradicts(&parsed("image: wwid=naa.5000")));
        assert!(disk.contradicts(&parsed("image: wwid=naa.5000 serial=A2")));
        for unknown in ["image:", "image: size=8", "image: born=5"] {
            assert!(!disk.contradicts(&parsed(unknown)), "{unknown}");
        }
        assert_eq!(Facts::parse("image: wwid"), None);
        assert_eq!(Facts::parse("wwid=5"), None);
    }

    #[test]
    fn a_mark_has_facts_in_its_last_line_or_none() {
        let facts = parsed("image: born=5 x=y");
        let mark = facts.append_to(b"0123 /a\n/b");
        assert_eq!(Facts::split(&mark), (&b"0123 /a\n/b"[..], facts));
        for early in [&b"0123 /a"[..], b"0123 /a\nb", b"\n", b""] {
            assert_eq!(Facts::split(early), (early, Facts::default()));
        }
    }

    #[test]
    fn a_device_is_the_same_by_a_name_that_only_it_has() {
        let disk = parsed("image: wwid=naa.5000 serial=A1");
        assert_eq!(disk.key().as_deref(), Some("wwid-naa.5000"));
        assert!(disk.is_same(&parsed("image: serial=A1")));
        for other in ["image: serial=A2 wwid=naa.5000", "image:", "image: size=8"] {
            assert!(!disk.is_same(&parsed(other)), "{other}");
        }
        let partition = parsed("image: wwid=naa.5000 partition=2 start=2048");
        assert_eq!(partition.key().as_deref(), Some("wwid-naa.5000-part-2048"));
        assert!(!partition.is_same(&disk) && !disk.is_same(&partition));
        let nameless = parsed("image: size=8");
        assert_eq!(nameless.key(), None);
        assert!(!nameless.is_same(&nameless));
        // The operator's names tell apart what the kernel does not.
        let [one, other] = ["one", "other"].map(|name| disk.clone().with_given(name));
        assert!(one.is_same(&disk) && !one.is_same(&other));
        // The file behind a loop device may be renamed, or be another one of the same path.
        let before = parsed("image: backing=/a loop=5-7-0");
        assert!(before.is_same(&parsed("image: backing=/b loop=5-7-0")));
        assert!(!before.is_same(&parsed("image: backing=/a loop=6-8-0")));
        assert!(before.is_same(&parsed("image: backing=/a")));
    }

    #[test]
    fn a_device_has_the_facts_that_the_kernel_knows() {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join("sda");
        let partition = disk.join("sda2");
        let write = |path: &Path, text: &str| {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write(&partition.join("partition"), "2\n");
        write(&partition.join("start"), "2048\n");
        write(&partition.join("size"), "100\n");
        write(&disk.join("size"), "4096\n");
        let of = |folder: &Path| Facts::of_device(folder, None).to_string();
        assert_eq!(of(&disk), "image: size=4096");
        assert_eq!(of(&partition), "image: size=100 partition=2 start=2048");
        write(&disk.join("device/wwid"), "t10.ATA  DISK 7\n");
        assert_eq!(of(&disk), "image: wwid=t10.ATA__DISK_7");
        write(&disk.join("wwid"), "naa.5000");
        write(&disk.join("serial"), &"\u{e4}b".repeat(1000));
        assert_eq!(of(&disk), format!("image: wwid=naa.5000 serial={}", "_b".repeat(64)));
        assert!(of(&partition).ends_with(" partition=2 start=2048"));
        assert_eq!(of(&folder.path().join("none")), "image:");
        // A device that grows stays the same.
        write(&disk.join("size"), "8192\n");
        let before = Facts::of_device(&disk, None);
        write(&disk.join("size"), "9000\n");
        assert!(!Facts::of_device(&disk, None).contradicts(&before));
    }
}
