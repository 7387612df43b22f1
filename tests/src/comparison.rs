//! Compares the daemon's reports about requests with the truth.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use crate::classified::{Classified, Kind, Part};
use crate::ranges::Ranges;
use crate::truth::{Moved, Object, ObjectKind, Owner, Truth};

/// The most examples of wrong answers, and of unknown ones, that are kept for printing.
const EXAMPLES_MAX: usize = 12;

/// The requests of one phase of a guest, between two snapshots of the truth.
///
/// Only the last write to each byte can be judged, by the snapshot after it. Reads are judged by
/// the snapshot before, or by the snapshot after if they read the last written content. Bytes of an
/// object that does not exist in that snapshot are "unjudged": an answer about them is neither
/// right nor wrong.
#[derive(Debug, Default)]
pub struct Comparison {
    /// The reads, by the true kind of the bytes.
    pub reads: BTreeMap<&'static str, Row>,
    /// The writes, by the true kind of the bytes.
    pub writes: BTreeMap<&'static str, Row>,
    /// The bytes reported for each control group, over all requests. Requests without a group count
    /// for "".
    pub groups: BTreeMap<String, Moved>,
    wrong: Vec<String>,
    unknown: Vec<String>,
}

/// Numbers of bytes by verdict.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Row {
    /// The kind is right, and also the file or directory, if the bytes belong to one.
    pub right: u64,
    /// The inode is right, but the path is not that of the snapshot.
    pub renamed: u64,
    /// Any other answer.
    pub wrong: u64,
    /// There was no answer, or an answer without the file.
    pub unknown: u64,
    /// The answer cannot be judged.
    pub unjudged: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verdict {
    Right,
    Renamed,
    Wrong,
    Unknown,
    Unjudged,
}

impl Comparison {
    /// Compares `requests` with two snapshots. Files whose paths begin with one of `direct` are
    /// read and written only by direct I/O, and no other files are.
    pub fn of(requests: &[Classified], before: &Truth, after: &Truth, direct: &[&str]) -> Self {
        let mut comparison = Self::default();
        // The last writes: the index of the request in the list, and its part.
        let mut written: Ranges<(usize, Option<Part>)> = Ranges::default();
        let mut again = Vec::new();
        // FAT assigns a new inode number to a file each time that it reads it from the disk.
        let has_inodes = !["exfat", "vfat"].contains(&after.filesystem.as_str());
        for (place, request) in requests.iter().enumerate() {
            let mut parts = parts(request);
            if !has_inodes && request.operation == "read" {
                for part in &mut parts {
                    part.inode = None;
                }
            }
            match request.operation.as_str() {
                "read" => {
                    for part in parts {
                        comparison.group(&part).read += part.length;
                        for (range, last) in written.over(part.offset..part.offset + part.length) {
                            if let Some((writer, _)) = last {
                                again.push((range, *writer, part.clone()));
                            } else {
                                comparison.judge(true, range, &part, before, direct, false);
                            }
                        }
                    }
                }
                "write" => {
                    for part in parts {
                        comparison.group(&part).written += part.length;
                        let range = part.offset..part.offset + part.length;
                        written.insert(range, (place, Some(part)));
                    }
                }
                "write-zeroes" | "discard" => {
                    let range = request.offset..request.offset + request.length;
                    written.insert(range, (place, None));
                }
                _ => {}
            }
        }
        for (range, (_, part)) in written.iter() {
            if let Some(part) = part {
                comparison.judge(false, range, part, after, direct, true);
            }
        }
        for (range, writer, part) in again {
            for (piece, last) in written.over(range) {
                if last.is_some_and(|(last, _)| *last == writer) {
                    comparison.judge(true, piece, &part, after, direct, true);
                } else {
                    comparison.judge_overwritten(piece, &part, after, direct);
                }
            }
        }
        comparison
    }

    /// Judges and counts the answer about a range.
    fn judge(
        &mut self,
        read: bool,
        range: Range<u64>,
        part: &Part,
        truth: &Truth,
        direct: &[&str],
        written: bool,
    ) {
        for (piece, owner) in truth.over(range) {
            let verdict = judge(part, owner, truth, direct, written);
            self.count(read, &piece, owner, part, truth, verdict);
        }
    }

    /// Judges a read of a range that was written both before and after it. Its owner at that time
    /// is known only if both snapshots have the same owner.
    fn judge_overwritten(
        &mut self,
        range: Range<u64>,
        part: &Part,
        truth: &Truth,
        direct: &[&str],
    ) {
        for (piece, owner) in truth.over(range) {
            let lasting = match owner {
                Owner::Objects(places) => truth.objects[places[0]].kind == ObjectKind::Swap,
                Owner::Journal | Owner::Swap | Owner::Around => true,
                Owner::Reserved(_) | Owner::Metadata | Owner::Free => false,
            };
            let verdict =
                if lasting { judge(part, owner, truth, direct, true) } else { Verdict::Unjudged };
            self.count(true, &piece, owner, part, truth, verdict);
        }
    }

    fn group(&mut self, part: &Part) -> &mut Moved {
        self.groups.entry(part.cgroup.clone().unwrap_or_default()).or_default()
    }

    fn count(
        &mut self,
        read: bool,
        piece: &Range<u64>,
        owner: &Owner,
        part: &Part,
        truth: &Truth,
        verdict: Verdict,
    ) {
        let rows = if read { &mut self.reads } else { &mut self.writes };
        let row = rows.entry(name(owner, truth)).or_default();
        let count = match verdict {
            Verdict::Right => &mut row.right,
            Verdict::Renamed => &mut row.renamed,
            Verdict::Wrong => &mut row.wrong,
            Verdict::Unknown => &mut row.unknown,
            Verdict::Unjudged => &mut row.unjudged,
        };
        *count += piece.end - piece.start;
        let examples = match verdict {
            Verdict::Wrong => &mut self.wrong,
            Verdict::Unknown => &mut self.unknown,
            Verdict::Right | Verdict::Renamed | Verdict::Unjudged => return,
        };
        if examples.len() < EXAMPLES_MAX {
            examples.push(format!(
                "{} of {}+{} is {}, and was reported as {:?} inode={:?} path={:?} source={:?} by {:?}",
                if read { "read" } else { "write" },
                piece.start,
                piece.end - piece.start,
                describe(owner, truth),
                part.kind,
                part.inode,
                part.path,
                part.source,
                part.process,
            ));
        }
    }

    /// The sum over reads and writes of every kind.
    pub fn total(&self) -> Row {
        let rows = self.reads.values().chain(self.writes.values());
        rows.fold(Row::default(), |sum, row| Row {
            right: sum.right + row.right,
            renamed: sum.renamed + row.renamed,
            wrong: sum.wrong + row.wrong,
            unknown: sum.unknown + row.unknown,
            unjudged: sum.unjudged + row.unjudged,
        })
    }

    /// As [`check`](Self::check), but with no limit on bytes that could not be judged, and with
    /// another limit on unknown bytes, in thousandths of all.
    ///
    /// # Errors
    /// With the table and examples.
    pub fn check_answers(&self, unknown_per_thousand: u64) -> crate::Result<()> {
        let total = self.total();
        let is_known = total.unknown * 1000 <= total.all() * unknown_per_thousand;
        if total.wrong == 0 && is_known && total.right > 0 {
            return Ok(());
        }
        Err(crate::Error::new(format!("the reports differ from the truth:\n{self}")))
    }

    /// Fails if any answer was wrong, if more than one byte in a thousand was unknown, or if more
    /// than a tenth could not be judged.
    ///
    /// # Errors
    /// With the table and examples.
    pub fn check(&self) -> crate::Result<()> {
        let total = self.total();
        let all = total.all();
        if total.wrong == 0
            && total.unknown * 1000 <= all
            && total.unjudged * 10 <= all
            && total.right > 0
        {
            return Ok(());
        }
        Err(crate::Error::new(format!("the reports differ from the truth:\n{self}")))
    }

    /// Fails unless the bytes reported for every control group except the root's equal the kernel's
    /// counts (`io.stat`), up to `tolerance` bytes plus one per cent.
    ///
    /// # Errors
    /// With the reported and the counted bytes.
    pub fn check_groups(&self, before: &Truth, after: &Truth, tolerance: u64) -> crate::Result<()> {
        for (path, end) in after.groups.iter().filter(|(path, _)| *path != "/") {
            let start = before.groups.get(path).copied().unwrap_or_default();
            let reported = self.groups.get(path).copied().unwrap_or_default();
            for (what, reported, counted) in [
                ("read", reported.read, end.read - start.read),
                ("written", reported.written, end.written - start.written),
            ] {
                if reported.abs_diff(counted) > tolerance + counted / 100 {
                    return Err(crate::Error::new(format!(
                        "{path} is reported to have {what} {reported} bytes, and has {counted}\n{self}"
                    )));
                }
            }
        }
        Ok(())
    }
}

impl Row {
    /// All bytes.
    pub fn all(&self) -> u64 {
        self.right + self.renamed + self.wrong + self.unknown + self.unjudged
    }
}

/// The parts of a request. A request without parts has one unknown part with all its bytes.
fn parts(request: &Classified) -> Vec<Part> {
    if request.parts.is_empty() {
        return vec![Part { offset: request.offset, length: request.length, ..Part::default() }];
    }
    request.parts.clone()
}

/// Judges one answer about bytes with one owner. `written` is true if the bytes were written before
/// the snapshot `truth`.
fn judge(part: &Part, owner: &Owner, truth: &Truth, direct: &[&str], written: bool) -> Verdict {
    use Kind::{Data, Device, Direct, Directory, Journal, Metadata, Swap, Unknown};
    let right_if = |right| if right { Verdict::Right } else { Verdict::Wrong };
    // The bytes belonged to an object that no longer exists, even if another object has its inode
    // now: the journal may have the new content of the position, while the position itself still
    // has the old one.
    let same = |object: &Object| part.path.as_ref().is_none_or(|path| object.path == *path);
    let left =
        written && part.inode.is_some_and(|inode| !truth.with_inode(inode).is_some_and(same));
    if part.kind == Unknown {
        return Verdict::Unknown;
    }
    if part.kind != Device && part.fs.as_ref().is_some_and(|fs| *fs != truth.filesystem) {
        return Verdict::Wrong;
    }
    match owner {
        Owner::Free => {
            // In these file systems, free space lies only among the blocks of files.
            let areas = ["btrfs", "f2fs"].contains(&truth.filesystem.as_str());
            let possible = match part.kind {
                Data | Direct | Directory => true,
                Metadata => !areas,
                _ => false,
            };
            if possible { Verdict::Unjudged } else { Verdict::Wrong }
        }
        Owner::Reserved(_) | Owner::Metadata if left => Verdict::Unjudged,
        Owner::Objects(places) | Owner::Reserved(places) => {
            let objects: Vec<&Object> = places.iter().map(|place| &truth.objects[*place]).collect();
            let past =
                |object: &&Object| direct.iter().any(|folder| object.path.starts_with(folder));
            match (objects[0].kind, part.kind) {
                // File systems that manage metadata by blocks treat a directory's blocks as
                // metadata.
                (ObjectKind::Directory, Metadata) => right_if(truth.filesystem != "f2fs"),
                (ObjectKind::Directory, Data | Direct) if left => Verdict::Unjudged,
                (ObjectKind::File, Data) if part.inode.is_none() && part.path.is_none() => {
                    Verdict::Unknown
                }
                (ObjectKind::File, Direct) if !objects.iter().any(past) => Verdict::Wrong,
                (ObjectKind::Directory, Directory)
                | (ObjectKind::File, Data | Direct)
                | (ObjectKind::Swap, Swap) => identity(part, &objects, truth, written),
                _ => Verdict::Wrong,
            }
        }
        Owner::Journal => right_if(part.kind == Journal),
        Owner::Metadata => {
            // No tool reports the positions of these file systems' directories, which are kept as
            // files.
            let tree = part.kind == Directory
                && ["btrfs", "minix", "udf", "erofs", "ntfs3"].contains(&truth.filesystem.as_str());
            right_if(part.kind == Metadata || tree)
        }
        Owner::Swap => right_if(part.kind == Swap),
        Owner::Around => right_if(matches!(part.kind, Device | Metadata)),
    }
}

/// Judges the reported owner, if there is one.
fn identity(part: &Part, objects: &[&Object], truth: &Truth, written: bool) -> Verdict {
    let same_path = |path: &String| objects.iter().any(|object| object.path == *path);
    match (part.inode, &part.path) {
        (None, None) => Verdict::Right,
        (None, Some(path)) => {
            if same_path(path) {
                Verdict::Right
            } else {
                Verdict::Wrong
            }
        }
        (Some(inode), path) => {
            let same = objects.iter().any(|object| object.inode == inode);
            match path {
                _ if !same => Verdict::Wrong,
                Some(path) if !same_path(path) => {
                    // The path is another name of the same inode, or its former name.
                    let another = truth.at_path(path).is_some_and(|object| object.inode == inode);
                    if another {
                        Verdict::Right
                    } else if written {
                        Verdict::Renamed
                    } else {
                        Verdict::Wrong
                    }
                }
                _ => Verdict::Right,
            }
        }
    }
}

fn name(owner: &Owner, truth: &Truth) -> &'static str {
    match owner {
        Owner::Objects(places) => match truth.objects[places[0]].kind {
            ObjectKind::Directory => "directory",
            ObjectKind::Swap => "swap",
            ObjectKind::File | ObjectKind::Other => "data",
        },
        Owner::Reserved(_) => "data",
        Owner::Journal => "journal",
        Owner::Metadata => "metadata",
        Owner::Swap => "swap",
        Owner::Around => "around",
        Owner::Free => "free",
    }
}

fn describe(owner: &Owner, truth: &Truth) -> String {
    match owner {
        Owner::Objects(places) | Owner::Reserved(places) => {
            let object = &truth.objects[places[0]];
            format!("{} of inode {} {:?}", name(owner, truth), object.inode, object.path)
        }
        _ => name(owner, truth).to_owned(),
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = ["right", "renamed", "wrong", "unknown", "unjudged"];
        write!(formatter, "{:16}", "KiB")?;
        for column in columns {
            write!(formatter, "{column:>10}")?;
        }
        writeln!(formatter)?;
        for (title, rows) in [("read", &self.reads), ("write", &self.writes)] {
            for (kind, row) in rows {
                write!(formatter, "{title:6}{kind:10}")?;
                for bytes in [row.right, row.renamed, row.wrong, row.unknown, row.unjudged] {
                    write!(formatter, "{:10.1}", bytes as f64 / 1024.0)?;
                }
                writeln!(formatter)?;
            }
        }
        for (path, moved) in &self.groups {
            let path = if path.is_empty() { "no group" } else { path };
            writeln!(formatter, "{path}: read {}, written {}", moved.read, moved.written)?;
        }
        for example in self.wrong.iter().chain(&self.unknown) {
            writeln!(formatter, "{example}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = "\
fs ext4
shift 0
size 1000000
rest metadata
area journal 500000 100000
area free 600000 400000
object 2 0 d /
object 12 0 f /kept
object 13 0 f /direct/a
object 14 0 f /old
extents /
 4096 4096 last,eof
extents /kept
 8192 4096 last,eof
extents /direct/a
 12288 4096 last,eof
extents /old
 16384 4096 last,eof
";

    fn compare(log: &str) -> Comparison {
        let before = Truth::parse(BEFORE).unwrap();
        let after = Truth::parse(&BEFORE.replace("/old", "/new")).unwrap();
        Comparison::of(&Classified::parse_log(log).unwrap(), &before, &after, &["/direct/"])
    }

    /// The verdict on a log of one request.
    fn verdict(log: &str) -> Row {
        let total = compare(log).total();
        assert_eq!(total.all(), 4096, "{log}");
        total
    }

    #[test]
    fn verdicts() {
        let right = |log| assert_eq!(verdict(log).right, 4096, "{log}");
        let wrong = |log| assert_eq!(verdict(log).wrong, 4096, "{log}");
        let unjudged = |log| assert_eq!(verdict(log).unjudged, 4096, "{log}");
        let unknown = |log| assert_eq!(verdict(log).unknown, 4096, "{log}");
        right("#1 read 8192+4096 | 4096 data inode=12 path=\"/kept\"");
        right("#1 write 8192+4096 | 4096 data inode=12");
        wrong("#1 write 8192+4096 | 4096 data inode=13 path=\"/kept\"");
        wrong("#1 read 8192+4096 | 4096 data inode=12 path=\"/other\"");
        wrong("#1 write 8192+4096 | 4096 data inode=99");
        unknown("#1 write 8192+4096 | 4096 data");
        unknown("#1 write 8192+4096");
        wrong("#1 write 8192+4096 | 4096 direct");
        right("#1 write 12288+4096 | 4096 direct");
        right("#1 write 12288+4096 | 4096 data inode=13");
        wrong("#1 write 12288+4096 | 4096 direct path=\"/kept\"");
        right("#1 write 4096+4096 | 4096 directory inode=2");
        wrong("#1 write 4096+4096 | 4096 directory inode=3");
        right("#1 write 4096+4096 | 4096 metadata");
        right("#1 write 500000+4096 | 4096 journal");
        wrong("#1 write 500000+4096 | 4096 metadata");
        wrong("#1 write 400000+4096 | 4096 journal");
        unjudged("#1 write 600000+4096 | 4096 data inode=99 path=\"/deleted\"");
        wrong("#1 write 600000+4096 | 4096 swap");
        unjudged("#1 write 400000+4096 | 4096 data inode=99");
        wrong("#1 read 400000+4096 | 4096 data inode=99");
        wrong("#1 read 8192+4096 | 4096 data inode=12 fs=\"xfs\"");
        assert_eq!(verdict("#1 write 16384+4096 | 4096 data inode=14 path=\"/old\"").renamed, 4096);
        right("#1 read 16384+4096 | 4096 data inode=14 path=\"/old\"");
    }

    #[test]
    fn only_the_last_write_counts_and_reads_after_it_are_judged_with_it() {
        let comparison = compare(
            "#1 write 8192+8192 | 8192 swap
            #2 read 8192+4096 | 4096 swap
            #3 write 8192+4096 | 4096 data inode=12 cgroup=\"/web\"
            #4 write 12288+4096 | 2048 direct | 2048 data inode=13
            #5 read 8192+12288 | 4096 data inode=12 | 4096 data inode=13 | 4096 data inode=14",
        );
        assert_eq!(comparison.writes["data"], Row { right: 8192, ..Row::default() });
        assert_eq!(
            comparison.reads["data"],
            Row { unjudged: 4096, right: 12288, ..Row::default() }
        );
        assert_eq!(comparison.groups["/web"], Moved { read: 0, written: 4096 });
        assert_eq!(comparison.total(), Row { unjudged: 4096, right: 20480, ..Row::default() });
        let overwritten = "#1 write 8192+4096 | 4096 data
            #2 read 8192+4096 | 4096 data
            #3 write 8192+4096 | 4096 data inode=12";
        assert!(compare(overwritten).check().is_err(), "a half could not be judged");
        assert!(compare("").check().is_err(), "nothing was judged");
    }
}
