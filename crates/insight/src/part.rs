//! The insight into a request and its parts.

use std::fmt;

use crate::class::{ClassTable, IoClass};
use crate::database::{Database, DatabaseSystem};
use crate::kind::{Confidence, InsightSource, Kind, ProcessRole};
use crate::names::{Name, Names};

/// The flags of the guest kernel's request (`REQ_…` of Linux).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RequestFlags(pub u8);

impl RequestFlags {
    /// `REQ_META`: a file system's structures.
    pub const METADATA: Self = Self(1);
    /// `REQ_PRIO`: the request has priority.
    pub const PRIORITY: Self = Self(2);
    /// `REQ_SYNC`: a process waits for the request.
    pub const SYNCHRONOUS: Self = Self(4);
    /// `REQ_RAHEAD`: no process waits for the request yet.
    pub const READ_AHEAD: Self = Self(8);
    /// `REQ_SWAP`: the request swaps memory.
    pub const SWAP: Self = Self(16);
    /// `REQ_FUA`: the data is durable at the request's completion.
    pub const FORCE_UNIT_ACCESS: Self = Self(32);
    /// `REQ_PREFLUSH`: a flush precedes the request.
    pub const FLUSH: Self = Self(64);
    /// `REQ_BACKGROUND`: no process waits for the request.
    pub const BACKGROUND: Self = Self(128);

    const NAMES: [(Self, &'static str); 8] = [
        (Self::METADATA, "meta"),
        (Self::PRIORITY, "prio"),
        (Self::SYNCHRONOUS, "sync"),
        (Self::READ_AHEAD, "read-ahead"),
        (Self::SWAP, "swap"),
        (Self::FORCE_UNIT_ACCESS, "fua"),
        (Self::FLUSH, "flush"),
        (Self::BACKGROUND, "background"),
    ];

    /// Whether all of `flags` are set.
    pub fn contains(self, flags: Self) -> bool {
        self.0 & flags.0 == flags.0
    }

    /// Sets `flags`.
    pub fn insert(&mut self, flags: Self) {
        self.0 |= flags.0;
    }

    /// The names of the set flags.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        Self::NAMES.iter().filter(move |(flag, _)| self.contains(*flag)).map(|(_, name)| *name)
    }
}

/// The known facts about some bytes of a request. The texts are in a [`Names`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Facts {
    // First, because it tells most parts of a request apart.
    /// The file's number in its file system; 0 if there is no file or it is unknown.
    pub inode: u64,
    /// The kind of data.
    pub kind: Kind,
    /// The source of the kind and of the file.
    pub source: InsightSource,
    /// The confidence in them.
    pub confidence: Confidence,
    /// The lifetime that the application expects: `RWH_WRITE_LIFE_…` of `fcntl`, 0 is not set.
    pub write_hint: u8,
    /// The address of the file's inode in the guest's memory, by which it is found again; 0 if
    /// unknown.
    pub inode_address: u64,
    /// The file's size in bytes at the time of the request; 0 if unknown.
    pub file_size: u64,
    /// The file's owner, a user number of the guest; 0 for root and if unknown.
    pub owner: u32,
    /// The file's path from the root of its file system.
    pub path: Name,
    /// The type of the file system, such as `ext4`.
    pub file_system: Name,
    /// The name of the file system's block device, such as `vda1`.
    pub device: Name,
    /// The path of the control group (container or service) to which the request is charged; `/` is
    /// the root group.
    pub cgroup: Name,
    /// The command of the process that submitted the request, waits for it or wrote its data, if it
    /// is known.
    pub process: Name,
    /// The number of this process; 0 if unknown.
    pub process_id: u32,
    /// The start of this process, in hundredths of a second since the guest's boot, modulo 2³²; 0
    /// if unknown. The number and the start identify a process: numbers are used again.
    pub process_start: u32,
    /// What this process has to do with the request.
    pub process_role: ProcessRole,
    /// The part of a database that the bytes belong to.
    pub database: Database,
    /// Whether the bytes on the disk are not those of the file: the guest encrypts or compresses
    /// them on their way.
    pub is_transformed: bool,
}

impl Facts {
    /// Whether any fact is known.
    pub fn is_known(&self) -> bool {
        *self != Self::default()
    }

    /// Writes the facts as text, as the log layer shows them: `data source=bio inode=12 …`.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn describe(&self, out: &mut dyn fmt::Write, names: &Names) -> fmt::Result {
        out.write_str(self.kind.name())?;
        if self.source != InsightSource::None {
            write!(out, " source={}", self.source.name())?;
        }
        if self.inode != 0 {
            write!(out, " inode={} size={}", self.inode, self.file_size)?;
        }
        for (key, name) in [
            ("fs", self.file_system),
            ("device", self.device),
            ("path", self.path),
            ("cgroup", self.cgroup),
            ("process", self.process),
        ] {
            if let Some(text) = names.text(name) {
                write!(out, " {key}={text:?}")?;
            }
        }
        if self.process_id != 0 {
            write!(out, " pid={}", self.process_id)?;
            if self.process_start != 0 {
                write!(out, " started={}", self.process_start)?;
            }
            if self.process_role != ProcessRole::None {
                write!(out, " role={}", self.process_role.name())?;
            }
        }
        let Database { system, part, index } = self.database;
        if system != DatabaseSystem::None {
            write!(out, " db={} part={} index={index}", system.name(), part.name())?;
        }
        Ok(())
    }
}

/// A part of a request, and the facts about it. Places are in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// The offset of the part from the start of the request.
    pub offset: u64,
    /// The length; never 0.
    pub length: u64,
    /// The facts about these bytes.
    pub facts: Facts,
    /// The offset of the part in its file, if it is known.
    pub file_offset: Option<u64>,
}

impl Part {
    /// The offset in its file of the byte after the part, if it is known.
    fn file_end(&self) -> Option<u64> {
        self.file_offset.and_then(|offset| offset.checked_add(self.length))
    }
}

/// The insight into one request.
///
/// A guest's kernel merges neighbours on the disk into one request even if they belong to different
/// files. `facts` are those of the most bytes; `parts` has the facts of each part.
#[derive(Clone, Debug, Default)]
pub struct Insight {
    /// The facts about most of the bytes.
    pub facts: Facts,
    /// The caching priority, if the class table defines one.
    pub class: Option<IoClass>,
    /// The I/O priority that the guest set (`ioprio` of the virtio header); 0 is none.
    pub io_priority: u16,
    /// The flags of the guest kernel's request.
    pub flags: RequestFlags,
    /// The offset of the request's first byte in its file, if that is known and the request has one
    /// part.
    pub file_offset: Option<u64>,
    /// Whether what is written is known to be new content, such as that of a file that is being
    /// encrypted: equal content is nowhere else.
    pub is_unique: bool,
    /// All parts in order if there are at least two; empty otherwise.
    pub parts: Vec<Part>,
}

impl Insight {
    /// Resets all fields and keeps the allocated memory.
    pub fn clear(&mut self) {
        self.facts = Facts::default();
        self.class = None;
        self.io_priority = 0;
        self.flags = RequestFlags::default();
        self.file_offset = None;
        self.is_unique = false;
        self.parts.clear();
    }

    /// Adds the facts about the next `length` bytes. Equal neighbours become one part. The caller
    /// calls [`finish`](Self::finish) after the last part.
    pub fn push(&mut self, length: u64, facts: Facts) {
        self.push_at(length, facts, None);
    }

    /// The same for bytes that are at `file_offset` of their file, if that is known. Equal
    /// neighbours become one part if they are neighbours in their file too.
    pub fn push_at(&mut self, length: u64, facts: Facts, file_offset: Option<u64>) {
        if length == 0 {
            return;
        }
        let offset = match self.parts.last_mut() {
            Some(last) if last.facts == facts && last.file_end() == file_offset => {
                last.length += length;
                return;
            }
            Some(last) => last.offset + last.length,
            None => 0,
        };
        self.parts.push(Part { offset, length, facts, file_offset });
    }

    /// Sets the request's facts and class from its parts. The facts are those of the most bytes, or
    /// of the first part in a tie. The class is the one that the application requested, or else the
    /// one that the table gives for the facts.
    pub fn finish(&mut self, table: &ClassTable) {
        // Parts with the same facts can be anywhere in the list. Most lists are short; of a long
        // one only the longest part counts.
        let most = match self.parts.len() {
            0 => return,
            1 => 0,
            count if count <= 16 => {
                // The sum of a later part lacks its earlier equals, and is not greater than theirs.
                let total = |place: usize| -> u64 {
                    let Part { length, facts, .. } = &self.parts[place];
                    let later = self.parts[place + 1..].iter();
                    let same = later.filter(|part| part.facts == *facts).map(|part| part.length);
                    length + same.sum::<u64>()
                };
                first_greatest((0..count).map(total))
            }
            _ => first_greatest(self.parts.iter().map(|part| part.length)),
        };
        self.facts = self.parts[most].facts;
        self.file_offset = if self.parts.len() == 1 { self.parts[0].file_offset } else { None };
        self.class = table
            .class_of_priority(self.io_priority)
            .or_else(|| table.class(self.facts.kind, self.facts.file_size));
        if self.parts.len() == 1 {
            self.parts.clear();
        }
    }

    /// The parts of a request of `length` bytes. If there is only one, it is the whole request.
    pub fn parts(&self, length: u64) -> impl Iterator<Item = Part> + '_ {
        let (facts, file_offset) = (self.facts, self.file_offset);
        let whole = Part { offset: 0, length, facts, file_offset };
        let whole = self.parts.is_empty().then_some(whole);
        whole.into_iter().chain(self.parts.iter().copied())
    }
}

fn first_greatest(values: impl Iterator<Item = u64>) -> usize {
    let mut best = (0, 0);
    for (place, value) in values.enumerate() {
        if value > best.1 {
            best = (place, value);
        }
    }
    best.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(kind: Kind, inode: u64) -> Facts {
        Facts { inode, kind, ..Facts::default() }
    }

    #[test]
    fn the_facts_of_most_bytes_are_those_of_the_request() {
        let mut insight = Insight::default();
        insight.push(4096, of(Kind::Data, 1));
        insight.push(4096, of(Kind::Metadata, 0));
        insight.push(4096, of(Kind::Metadata, 0));
        insight.push(6000, of(Kind::Data, 1));
        insight.push(0, of(Kind::Swap, 9));
        insight.finish(&ClassTable::default());
        assert_eq!(insight.facts, of(Kind::Data, 1));
        assert_eq!(insight.class, Some(IoClass(4)));
        insight.io_priority = 3 << 13;
        insight.finish(&ClassTable::default());
        assert_eq!(insight.class, Some(IoClass(0)));
        let parts: Vec<_> = insight.parts(18_288).map(|part| (part.offset, part.length)).collect();
        assert_eq!(parts, [(0, 4096), (4096, 8192), (12_288, 6000)]);
    }

    #[test]
    fn one_part_is_the_whole() {
        let mut insight = Insight::default();
        assert_eq!(insight.parts(512).count(), 1);
        insight.push(512, of(Kind::Data, 1));
        insight.push(512, of(Kind::Data, 1));
        insight.finish(&ClassTable::default());
        assert!(insight.parts.is_empty());
        assert_eq!(insight.parts(1024).next().unwrap().length, 1024);
        insight.clear();
        assert_eq!(insight.facts, Facts::default());
    }

    #[test]
    fn parts_are_contiguous_in_their_files() {
        let mut insight = Insight::default();
        let facts = of(Kind::Data, 1);
        for place in [Some(0), Some(4096), Some(65536), None, None] {
            insight.push_at(4096, facts, place);
        }
        insight.finish(&ClassTable::default());
        let parts: Vec<_> =
            insight.parts(20_480).map(|part| (part.length, part.file_offset)).collect();
        assert_eq!(parts, [(8192, Some(0)), (4096, Some(65536)), (8192, None)]);
        insight.clear();
        insight.push_at(512, facts, Some(512));
        insight.finish(&ClassTable::default());
        assert_eq!(insight.parts(512).next().unwrap().file_offset, Some(512));
    }

    #[test]
    fn facts_as_text() {
        let names = Names::default();
        let facts = Facts {
            kind: Kind::Data,
            source: InsightSource::Bio,
            inode: 12,
            file_size: 30,
            path: names.number("/a \"b\""),
            file_system: names.number("ext4"),
            ..Facts::default()
        };
        let mut text = String::new();
        facts.describe(&mut text, &names).unwrap();
        assert_eq!(text, r#"data source=bio inode=12 size=30 fs="ext4" path="/a \"b\"""#);
    }
}
