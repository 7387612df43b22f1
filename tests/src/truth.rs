//! The positions on a disk of all parts of a guest's file system, found without Fathom.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use crate::ranges::Ranges;
use crate::{Error, Guest, Result};

/// The owner of a byte of the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Owner {
    /// The files that share it, or a directory: indices in [`Truth::objects`].
    Objects(Vec<usize>),
    /// Files to which it is allocated, but which have not written it.
    Reserved(Vec<usize>),
    /// The file system's journal.
    Journal,
    /// Another part of the file system.
    Metadata,
    /// A swap partition.
    Swap,
    /// Outside the file system: a partition table, the headers of device mapper and md.
    Around,
    /// None at present.
    Free,
}

/// A file or directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    /// Its inode.
    pub inode: u64,
    /// Its size, in bytes.
    pub size: u64,
    /// Its type.
    pub kind: ObjectKind,
    /// Its path from the root of its file system; one of them, if it has several.
    pub path: String,
    /// The ranges of its contents on the disk, in order, except inline contents.
    pub extents: Vec<Range<u64>>,
}

/// The type of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ObjectKind {
    /// A file.
    File,
    /// A directory.
    Directory,
    /// A swap file.
    Swap,
    /// A symbolic link, a device or the like.
    Other,
}

/// The bytes that a control group has read and written on the disk since the guest booted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Moved {
    /// Bytes read.
    pub read: u64,
    /// Bytes written.
    pub written: u64,
}

/// A snapshot.
#[derive(Debug, Clone, Default)]
pub struct Truth {
    /// The type of the file system, or `swap`.
    pub filesystem: String,
    /// All objects with an inode.
    pub objects: Vec<Object>,
    /// The traffic of each control group, by its path.
    pub groups: BTreeMap<String, Moved>,
    owners: Ranges<Owner>,
    by_path: HashMap<String, usize>,
    by_inode: HashMap<u64, usize>,
}

impl Truth {
    /// Reads the truth about the file system mounted at `mount` from the guest. The file system
    /// must be idle and synced. The format is described in `scripts/guest-files/truth`.
    ///
    /// # Errors
    /// When the guest's script fails, or its output cannot be parsed.
    pub fn of(guest: &Guest, mount: &str) -> Result<Self> {
        Self::parse(&guest.check(&format!(
            "/usr/lib/fathom/truth {mount} 2>/run/truth.log || {{ cat /run/truth.log; exit 1; }}"
        ))?)
    }

    /// Parses the output of the guest's script.
    ///
    /// # Errors
    /// With the line that cannot be parsed.
    pub fn parse(text: &str) -> Result<Self> {
        let mut reader = Reader::default();
        for line in text.lines() {
            reader
                .line(line)
                .ok_or_else(|| Error::new(format!("the truth cannot be parsed: {line}")))?;
        }
        Ok(reader.truth)
    }

    /// The owners of a range of the disk, in order.
    pub fn over(&self, range: Range<u64>) -> Vec<(Range<u64>, &Owner)> {
        let parts = self.owners.over(range).into_iter();
        parts.map(|(part, owner)| (part, owner.unwrap_or(&Owner::Around))).collect()
    }

    /// The object with this path.
    pub fn at_path(&self, path: &str) -> Option<&Object> {
        self.by_path.get(path).map(|place| &self.objects[*place])
    }

    /// An object with this inode.
    pub fn with_inode(&self, inode: u64) -> Option<&Object> {
        self.by_inode.get(&inode).map(|place| &self.objects[*place])
    }

    /// The number of bytes of each kind on the disk, for printing.
    pub fn summary(&self) -> BTreeMap<&'static str, u64> {
        let mut summary = BTreeMap::new();
        for (range, owner) in self.owners.iter() {
            let name = match owner {
                Owner::Objects(places) => match self.objects[places[0]].kind {
                    ObjectKind::Directory => "directory",
                    ObjectKind::Swap => "swap",
                    ObjectKind::File | ObjectKind::Other => "data",
                },
                Owner::Reserved(_) => "reserved",
                Owner::Journal => "journal",
                Owner::Metadata => "metadata",
                Owner::Swap => "swap",
                Owner::Around => "around",
                Owner::Free => "free",
            };
            *summary.entry(name).or_default() += range.end - range.start;
        }
        summary
    }
}

#[derive(Default)]
struct Reader {
    truth: Truth,
    /// The offset of the file system on the disk, in bytes.
    shift: u64,
    size: u64,
    /// The chunks of btrfs: ranges of addresses and their positions on the disk.
    chunks: Vec<(Range<u64>, u64)>,
    /// The object to which the next extents belong.
    current: Option<usize>,
}

impl Reader {
    fn line(&mut self, line: &str) -> Option<()> {
        if let Some(extent) = line.strip_prefix(' ') {
            return self.extent(extent);
        }
        let (word, rest) = line.split_once(' ')?;
        match word {
            "fs" => rest.clone_into(&mut self.truth.filesystem),
            "shift" => self.shift = rest.parse().ok()?,
            "size" => self.size = rest.parse().ok()?,
            "rest" => {
                let owner = area(rest)?;
                self.truth.owners.insert(self.shift..self.shift + self.size, owner);
            }
            "area" => {
                let (kind, range) = rest.split_once(' ')?;
                let (start, length) = range.split_once(' ')?;
                let (start, length): (u64, u64) = (start.parse().ok()?, length.parse().ok()?);
                let start = start + self.shift;
                self.truth.owners.insert(start..start + length, area(kind)?);
            }
            "chunk" => {
                let mut numbers = rest.split(' ').map(|number| number.parse::<u64>().ok());
                let (start, length) = (numbers.next()??, numbers.next()??);
                self.chunks.push((start..start + length, numbers.next()??));
            }
            "object" => self.object(rest)?,
            "extents" => self.current = Some(*self.truth.by_path.get(rest)?),
            "group" => {
                // The path may contain spaces.
                let (rest, written) = rest.rsplit_once(' ')?;
                let (path, read) = rest.rsplit_once(' ')?;
                let moved = Moved { read: read.parse().ok()?, written: written.parse().ok()? };
                self.truth.groups.insert(path.to_owned(), moved);
            }
            _ => return None,
        }
        Some(())
    }

    fn object(&mut self, text: &str) -> Option<()> {
        let mut words = text.splitn(4, ' ');
        let object = Object {
            inode: words.next()?.parse().ok()?,
            size: words.next()?.parse().ok()?,
            kind: match words.next()? {
                "f" => ObjectKind::File,
                "d" => ObjectKind::Directory,
                "s" => ObjectKind::Swap,
                _ => ObjectKind::Other,
            },
            path: words.next()?.to_owned(),
            extents: Vec::new(),
        };
        let place = self.truth.objects.len();
        self.truth.by_path.insert(object.path.clone(), place);
        self.truth.by_inode.insert(object.inode, place);
        self.truth.objects.push(object);
        Some(())
    }

    fn extent(&mut self, text: &str) -> Option<()> {
        let current = self.current?;
        let mut words = text.split(' ');
        let (start, length): (u64, u64) =
            (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        let flags: Vec<&str> = words.next()?.split(',').collect();
        // Inline data lies within an inode. Data without a position yet, or with another length on
        // the disk, is unknown.
        if ["inline", "delalloc", "unknown_loc", "encoded"].iter().any(|flag| flags.contains(flag))
        {
            return Some(());
        }
        for (start, end) in self.places(start, start + length)? {
            let range = start + self.shift..end + self.shift;
            self.truth.objects[current].extents.push(range.clone());
            let pieces: Vec<(Range<u64>, Owner)> = self
                .truth
                .owners
                .over(range)
                .into_iter()
                .map(|(piece, owner)| {
                    let objects = match owner {
                        Some(Owner::Objects(others)) if !others.contains(&current) => {
                            [&others[..], &[current]].concat()
                        }
                        _ => vec![current],
                    };
                    let unwritten = flags.contains(&"unwritten");
                    let owner = if unwritten { Owner::Reserved } else { Owner::Objects };
                    (piece, owner(objects))
                })
                .collect();
            for (piece, owner) in pieces {
                self.truth.owners.insert(piece, owner);
            }
        }
        Some(())
    }

    /// The positions of a range of addresses: the same range, or as the chunks map it.
    fn places(&self, mut start: u64, end: u64) -> Option<Vec<(u64, u64)>> {
        if self.chunks.is_empty() {
            return Some(vec![(start, end)]);
        }
        let mut places = Vec::new();
        while start < end {
            let (chunk, place) = self.chunks.iter().find(|(chunk, _)| chunk.contains(&start))?;
            let stop = end.min(chunk.end);
            places.push((start - chunk.start + place, stop - chunk.start + place));
            start = stop;
        }
        Some(places)
    }
}

fn area(kind: &str) -> Option<Owner> {
    Some(match kind {
        "journal" => Owner::Journal,
        "metadata" => Owner::Metadata,
        "swap" => Owner::Swap,
        "static" => Owner::Around,
        "free" => Owner::Free,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
fs btrfs
shift 1000
size 10000
rest metadata
chunk 50000 400 100
chunk 50400 400 900
area free 100 400
area free 900 400
object 256 0 d /
object 257 200 f /a b
object 258 100 f /c
object 259 2 f /tiny
object 260 50 f /reserved
extents /a b
 50300 200 shared
extents /c
 50400 50 last,shared,eof
extents /tiny
 0 4096 last,not_aligned,inline,eof
extents /reserved
 50500 50 last,unwritten,eof
group / 7 8
group /web server 5 6
";

    #[test]
    fn extents_by_chunks_with_a_shift() {
        let truth = Truth::parse(TEXT).unwrap();
        let all = truth.over(0..12000);
        let expected = [
            (0..1000, Owner::Around),
            (1000..1100, Owner::Metadata),
            (1100..1400, Owner::Free),
            (1400..1500, Owner::Objects(vec![1])),
            (1500..1900, Owner::Metadata),
            (1900..1950, Owner::Objects(vec![1, 2])),
            (1950..2000, Owner::Objects(vec![1])),
            (2000..2050, Owner::Reserved(vec![4])),
            (2050..2300, Owner::Free),
            (2300..11000, Owner::Metadata),
            (11000..12000, Owner::Around),
        ];
        let all: Vec<_> = all.into_iter().map(|(range, owner)| (range, owner.clone())).collect();
        assert_eq!(all, expected);
        assert_eq!(truth.at_path("/a b").unwrap().inode, 257);
        assert_eq!(truth.with_inode(259).unwrap().path, "/tiny");
        assert_eq!(truth.groups["/web server"], Moved { read: 5, written: 6 });
        assert_eq!(truth.at_path("/a b").unwrap().extents, [1400..1500, 1900..2000]);
        assert_eq!(truth.summary()["data"], 200);
        assert!(Truth::parse("area lava 1 2").is_err());
        assert!(Truth::parse("extents /unheard of").is_err());
    }
}
