//! Where files go on that are not in one piece on the disk, without I/O.
//!
//! A *joint* is an offset of a file and the place of that byte on the disk, which does not follow
//! the byte before it. Joints are learned from requests that follow each other in a file but not on
//! the disk. They are hints: a wrong one makes a read-ahead useless, nothing else.

use std::collections::BTreeMap;

use fathom_insight::{Facts, Kind, Name};

/// The most joints of a generation.
const GENERATION: usize = 8192;

/// A file of the guest: the device of its file system, and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct File {
    device: Name,
    inode: u64,
}

impl File {
    /// The file whose data a request has. Journals and swapped memory are not read in the order of
    /// a file.
    #[inline]
    pub(crate) fn of(facts: &Facts) -> Option<Self> {
        let is_file = facts.inode != 0 && !matches!(facts.kind, Kind::Journal | Kind::Swap);
        is_file.then_some(Self { device: facts.device, inode: facts.inode })
    }

    /// A number by which files are told apart roughly.
    #[inline]
    pub(super) fn hash(self) -> u64 {
        (self.inode ^ u64::from(self.device.0) << 48).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32
    }
}

/// A part of a file that is in one piece on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// The offset in the file, in bytes.
    pub(crate) file_offset: u64,
    /// The offset on the disk, in bytes.
    pub(crate) place: u64,
    /// The length, in bytes.
    pub(crate) length: u64,
}

impl Piece {
    /// The offset in the file after the piece.
    pub(super) fn file_end(&self) -> u64 {
        self.file_offset.saturating_add(self.length)
    }
}

type Places = BTreeMap<(File, u64), u64>;

/// The known joints of a disk's files. What was not used for a whole generation is forgotten.
#[derive(Debug, Default)]
pub(crate) struct Joints {
    young: Places,
    old: Places,
}

impl Joints {
    /// Notes that the byte at `offset` of a file is at `place`.
    pub(super) fn note(&mut self, file: File, offset: u64, place: u64) {
        self.old.remove(&(file, offset));
        self.young.insert((file, offset), place);
        if self.young.len() >= GENERATION {
            self.old = std::mem::take(&mut self.young);
        }
    }

    /// The first joint of a file from `from` to before `end`: its offset and its place.
    fn next(&mut self, file: File, from: u64, end: u64) -> Option<(u64, u64)> {
        if from >= end {
            return None;
        }
        let first = |places: &Places| {
            let found = places.range((file, from)..(file, end)).next();
            found.map(|((_, offset), place)| (*offset, *place))
        };
        let (young, old) = (first(&self.young), first(&self.old));
        let is_young = match (young, old) {
            (Some(young), Some(old)) => young.0 <= old.0,
            (_, None) => true,
            (None, _) => false,
        };
        if is_young {
            return young;
        }
        let (offset, place) = old?;
        self.note(file, offset, place);
        old
    }

    /// The part of a file that begins at `from` and is in one piece, up to `end` and of at most
    /// `length_max` bytes. `place` is the place of `from` if there is no joint.
    pub(super) fn piece(
        &mut self,
        file: File,
        (from, place): (u64, u64),
        end: u64,
        length_max: u64,
    ) -> Piece {
        let end = end.min(from.saturating_add(length_max));
        let (place, next) = match self.next(file, from, end) {
            Some((offset, place)) if offset == from => (place, self.next(file, from + 1, end)),
            next => (place, next),
        };
        let length = next.map_or(end, |(offset, _)| offset).saturating_sub(from);
        Piece { file_offset: from, place, length }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(inode: u64) -> File {
        File { device: Name(1), inode }
    }

    /// The pieces of a file are those of a plain list, by seed.
    #[test]
    fn a_file_goes_on_where_it_was_seen() {
        let mut random = fastrand::Rng::with_seed(1);
        for round in 0..200 {
            let mut joints = Joints::default();
            let other = file(round + 1000);
            let mut pieces = Vec::new();
            let (mut offset, count) = (0, random.u64(1..20));
            for _ in 0..count {
                let piece = Piece {
                    file_offset: offset,
                    place: random.u64(0..1 << 30) << 12,
                    length: random.u64(1..40) << 12,
                };
                joints.note(file(round), piece.file_offset, piece.place);
                joints.note(other, piece.file_offset + 4096, 0);
                offset = piece.file_end();
                pieces.push(piece);
            }
            let end = offset;
            let mut at = (0, 77);
            let mut found: Vec<Piece> = Vec::new();
            while at.0 < end {
                let piece = joints.piece(file(round), at, end, 16 << 12);
                assert!(piece.length > 0 && piece.length <= 16 << 12);
                at = (piece.file_end(), piece.place + piece.length);
                match found.last_mut() {
                    Some(last) if last.place + last.length == piece.place => {
                        last.length += piece.length;
                    }
                    _ => found.push(piece),
                }
            }
            assert_eq!(found, pieces, "round {round}");
        }
    }

    #[test]
    fn joints_are_bounded_and_the_used_ones_stay() {
        let mut joints = Joints::default();
        joints.note(file(1), 4096, 1 << 20);
        for number in 0..10 * GENERATION as u64 {
            joints.note(file(2), number << 12, 5);
            let piece = joints.piece(file(1), (0, 0), 1 << 16, 1 << 16);
            assert_eq!(piece, Piece { file_offset: 0, place: 0, length: 4096 });
            assert!(joints.young.len() + joints.old.len() <= 2 * GENERATION);
        }
        assert!(joints.next(file(2), 0, 4096).is_none(), "it was not used");
        joints.note(file(1), 4096, 2 << 20);
        let piece = joints.piece(file(1), (4096, 4096), 1 << 16, 8192);
        assert_eq!(piece, Piece { file_offset: 4096, place: 2 << 20, length: 8192 });
    }

    #[test]
    fn journals_and_swapped_memory_are_no_files() {
        let of = |kind, inode| File::of(&Facts { kind, inode, ..Facts::default() });
        assert!(of(Kind::Data, 5).is_some() && of(Kind::Data, 0).is_none());
        assert!(of(Kind::Journal, 8).is_none() && of(Kind::Swap, 9).is_none());
    }
}
