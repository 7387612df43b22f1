//! A model of the contents that a disk may have.
//!
//! The model identifies contents by fingerprint and keeps two sets for each sector:
//!
//! - **now**: the contents that a read that begins now may find, apart from writes in flight. It is
//!   one content, unless several writes were in flight at the same time (each may be the last) or a
//!   write failed (each of its sectors may have changed or not);
//! - **kept**: the contents that may be found after a crash: those written since the last flush,
//!   and the one that the flush made durable. A flush covers the writes that had completed when it
//!   was submitted; a write with force unit access covers itself.
//!
//! Both sets may be too large but never too small, so a violation is always a fault of the disk.
//!
//! Sectors are read and written as a whole, with one exception: if requests of different queues run
//! at the same time, a read of a sector during a write may find [a part of it](ModelDisk::racing)
//! written, as in any file. Not even the eight bytes of a word of memory are read together:
//! `rep movsb` copies single bytes if the two places are aligned differently.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::hash::{DefaultHasher, Hasher};

use fathom_block::{Operation, Outcome};

use crate::workload::Action;
use crate::{SECTOR, SECTOR_BYTES};

/// A sector's content, by hash.
type Fingerprint = u64;
type Contents = BTreeSet<Fingerprint>;

fn fingerprint(sector: &[u8]) -> Fingerprint {
    let mut hasher = DefaultHasher::new();
    hasher.write(sector);
    hasher.finish()
}

/// A sector with a content that it must not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The sector's number.
    pub sector: u64,
    /// The source of the content: a read, or an image after a crash.
    pub what: &'static str,
    /// The number of allowed contents.
    pub allowed: usize,
    /// Whether the content is zeroes.
    pub is_zero: bool,
}

impl fmt::Display for Violation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "{}: sector {} has {}, which is none of its {} allowed contents",
            self.what,
            self.sector,
            if self.is_zero { "zeroes" } else { "data" },
            self.allowed
        )
    }
}

/// A modifying request in flight.
struct Change {
    first: u64,
    contents: Vec<Fingerprint>,
    force_unit_access: bool,
    /// The contents of other writes to the same sectors that were in flight at the same time.
    rivals: HashMap<u64, Contents>,
}

impl Change {
    fn content(&self, sector: u64) -> Option<Fingerprint> {
        let index = sector.checked_sub(self.first)?;
        self.contents.get(index as usize).copied()
    }

    fn sectors(&self) -> std::ops::Range<u64> {
        self.first..self.first + self.contents.len() as u64
    }
}

/// A read in flight.
struct Read {
    first: u64,
    allowed: Vec<Contents>,
    /// For each sector, whether a write was in flight meanwhile.
    is_raced: Vec<bool>,
}

/// A flush in flight, with the contents that sectors that were not durable may have after it.
struct Barrier {
    kept: BTreeMap<u64, Contents>,
}

/// The model of a disk.
pub struct ModelDisk {
    now: Vec<Contents>,
    kept: Vec<Contents>,
    zero: Fingerprint,
    changes: BTreeMap<u64, Change>,
    reads: BTreeMap<u64, Read>,
    barriers: BTreeMap<u64, Barrier>,
    /// Sectors whose content may be lost in a crash.
    unsure: BTreeSet<u64>,
    /// All contents written so far, by fingerprint, if reads may find parts of them.
    known: Option<HashMap<Fingerprint, Box<[u8]>>>,
}

impl ModelDisk {
    /// A disk of zeroes with a capacity of `capacity` bytes, which must be whole sectors.
    pub fn new(capacity: u64) -> Self {
        let zero = fingerprint(&[0; SECTOR_BYTES]);
        let sectors = (capacity / SECTOR) as usize;
        Self {
            now: vec![Contents::from([zero]); sectors],
            kept: vec![Contents::from([zero]); sectors],
            zero,
            changes: BTreeMap::new(),
            reads: BTreeMap::new(),
            barriers: BTreeMap::new(),
            unsure: BTreeSet::new(),
            known: None,
        }
    }

    /// As [`new`](Self::new), for a disk whose requests run at the same time: a read may find a
    /// partly written sector during a write.
    pub fn racing(capacity: u64) -> Self {
        let mut model = Self::new(capacity);
        model.known = Some(HashMap::from([(model.zero, Box::from([0; SECTOR_BYTES]))]));
        model
    }

    /// Records that request `id` is about to be submitted; `data` is the data of a write.
    pub fn begin(&mut self, id: u64, action: &Action, data: &[u8]) {
        let first = action.offset / SECTOR;
        let count = (action.length / SECTOR) as usize;
        match action.operation {
            Operation::Write => {
                let contents: Vec<_> = data.chunks(SECTOR_BYTES).map(fingerprint).collect();
                if let Some(known) = &mut self.known {
                    let sectors = data.chunks(SECTOR_BYTES).map(Box::from);
                    known.extend(contents.iter().copied().zip(sectors));
                }
                self.begin_change(id, first, contents, action.flags.force_unit_access);
            }
            Operation::Discard | Operation::WriteZeroes => {
                let contents = vec![self.zero; count];
                self.begin_change(id, first, contents, action.flags.force_unit_access);
            }
            Operation::Read => {
                let sectors = first..first + count as u64;
                let allowed = sectors.clone().map(|sector| self.possible(sector)).collect();
                let is_written =
                    |sector| self.changes.values().any(|change| change.content(sector).is_some());
                let is_raced = sectors.map(is_written).collect();
                self.reads.insert(id, Read { first, allowed, is_raced });
            }
            Operation::Flush => {
                let kept =
                    self.unsure.iter().map(|&sector| (sector, self.possible(sector))).collect();
                self.barriers.insert(id, Barrier { kept });
            }
            Operation::GetId | Operation::Extents => {}
        }
    }

    /// Records that request `id` has completed with `outcome`; `data` is the data of a read.
    ///
    /// # Errors
    /// When a read returned a content that it must not return.
    pub fn finish(
        &mut self,
        id: u64,
        operation: Operation,
        outcome: Outcome,
        data: &[u8],
    ) -> Result<(), Violation> {
        match operation {
            Operation::Write | Operation::Discard | Operation::WriteZeroes => {
                self.finish_change(id, outcome);
            }
            Operation::Read => {
                let Some(read) = self.reads.remove(&id) else { return Ok(()) };
                if outcome.is_ok() {
                    let is_part = |index: usize, bytes: &[u8]| {
                        read.is_raced[index] && self.is_partly(bytes, &read.allowed[index])
                    };
                    return compare("read", read.first, data, &read.allowed, &is_part);
                }
            }
            Operation::Flush => {
                let Some(barrier) = self.barriers.remove(&id) else { return Ok(()) };
                if outcome.is_ok() {
                    for (sector, contents) in barrier.kept {
                        self.narrow(sector, &contents);
                    }
                }
            }
            Operation::GetId | Operation::Extents => {}
        }
        Ok(())
    }

    /// Compares `image` with the contents allowed after a crash at this moment.
    ///
    /// # Errors
    /// The first sector with a content that is not allowed.
    pub fn check_crash(&self, image: &[u8]) -> Result<(), Violation> {
        compare("image after a crash", 0, image, &self.kept, &|_, _| false)
    }

    /// Compares `image` with the contents that a read may find at this moment.
    ///
    /// # Errors
    /// The first sector with a content that is not allowed.
    pub fn check_now(&self, image: &[u8]) -> Result<(), Violation> {
        let allowed: Vec<Contents> =
            (0..self.now.len() as u64).map(|sector| self.possible(sector)).collect();
        compare("image", 0, image, &allowed, &|_, _| false)
    }

    /// Whether each byte of a sector is from one of `contents`. Always false in a model without
    /// races.
    fn is_partly(&self, sector: &[u8], contents: &Contents) -> bool {
        let Some(known) = &self.known else { return false };
        let contents: Vec<&[u8]> =
            contents.iter().filter_map(|content| known.get(content)).map(|of| &**of).collect();
        sector
            .iter()
            .enumerate()
            .all(|(index, byte)| contents.iter().any(|content| content.get(index) == Some(byte)))
    }

    /// Restarts the model with `image`, which a crash has left.
    pub fn restart(&mut self, image: &[u8]) {
        let contents: Vec<Contents> = image
            .chunks(SECTOR_BYTES)
            .map(|sector| Contents::from([fingerprint(sector)]))
            .collect();
        self.now.clone_from(&contents);
        self.kept = contents;
        self.changes.clear();
        self.reads.clear();
        self.barriers.clear();
        self.unsure.clear();
    }

    /// The disk has grown to `capacity` bytes: zeroes follow its end.
    pub fn grow(&mut self, capacity: u64) {
        let sectors = (capacity / SECTOR) as usize;
        for contents in [&mut self.now, &mut self.kept] {
            contents.resize(sectors.max(contents.len()), Contents::from([self.zero]));
        }
    }

    /// The number of sectors that may have more than one content after a crash.
    pub fn unsure(&self) -> usize {
        self.unsure.len()
    }

    /// The contents that the sector may have at this moment, including those of writes in flight.
    fn possible(&self, sector: u64) -> Contents {
        let mut contents = self.now[sector as usize].clone();
        contents.extend(self.changes.values().filter_map(|change| change.content(sector)));
        contents
    }

    fn begin_change(
        &mut self,
        id: u64,
        first: u64,
        contents: Vec<Fingerprint>,
        force_unit_access: bool,
    ) {
        let mut change = Change { first, contents, force_unit_access, rivals: HashMap::new() };
        for sector in change.sectors() {
            let Some(content) = change.content(sector) else { continue };
            self.kept[sector as usize].insert(content);
            if self.kept[sector as usize].len() > 1 {
                self.unsure.insert(sector);
            }
            for read in self.reads.values_mut() {
                let index = sector.checked_sub(read.first).map(|index| index as usize);
                let Some(index) = index.filter(|index| *index < read.allowed.len()) else {
                    continue;
                };
                read.allowed[index].insert(content);
                read.is_raced[index] = true;
            }
            for barrier in self.barriers.values_mut() {
                // A sector that was durable when the flush began is not in the barrier.
                if let Some(kept) = barrier.kept.get_mut(&sector) {
                    kept.insert(content);
                }
            }
            for other in self.changes.values_mut() {
                if let Some(rival) = other.content(sector) {
                    other.rivals.entry(sector).or_default().insert(content);
                    change.rivals.entry(sector).or_default().insert(rival);
                }
            }
        }
        self.changes.insert(id, change);
    }

    fn finish_change(&mut self, id: u64, outcome: Outcome) {
        let Some(change) = self.changes.remove(&id) else { return };
        for sector in change.sectors() {
            let Some(content) = change.content(sector) else { continue };
            let now = &mut self.now[sector as usize];
            if outcome.is_err() {
                // The failed change may have taken effect before or after the others, or not at
                // all.
                now.insert(content);
                continue;
            }
            now.clear();
            now.insert(content);
            now.extend(change.rivals.get(&sector).into_iter().flatten());
            if change.force_unit_access {
                let contents = now.clone();
                self.narrow(sector, &contents);
            }
        }
    }

    /// Records that the sector is durable, with one of `contents`.
    fn narrow(&mut self, sector: u64, contents: &Contents) {
        let kept = &mut self.kept[sector as usize];
        kept.retain(|content| contents.contains(content));
        if kept.len() <= 1 {
            self.unsure.remove(&sector);
        }
    }
}

fn compare(
    what: &'static str,
    first: u64,
    data: &[u8],
    allowed: &[Contents],
    is_part: &dyn Fn(usize, &[u8]) -> bool,
) -> Result<(), Violation> {
    for (index, (bytes, allowed)) in data.chunks(SECTOR_BYTES).zip(allowed).enumerate() {
        if !allowed.contains(&fingerprint(bytes)) && !is_part(index, bytes) {
            return Err(Violation {
                sector: first + index as u64,
                what,
                allowed: allowed.len(),
                is_zero: bytes.iter().all(|byte| *byte == 0),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use fathom_block::Flags;

    use super::*;

    fn action(operation: Operation) -> Action {
        let length = SECTOR;
        Action { operation, offset: 0, length, flags: Flags::default(), content: 0 }
    }

    /// A sector of two halves.
    fn half(one: u8, other: u8) -> Vec<u8> {
        [[one; SECTOR_BYTES / 2], [other; SECTOR_BYTES / 2]].concat()
    }

    #[test]
    fn only_reads_during_writes_may_find_parts() {
        let new = [7; SECTOR_BYTES];
        let read = |mut model: ModelDisk, ends_before: bool, bytes: &[u8]| {
            model.begin(1, &action(Operation::Write), &new);
            if ends_before {
                model.finish(1, Operation::Write, Ok(()), &[]).unwrap();
            }
            model.begin(2, &action(Operation::Read), &[]);
            model.finish(2, Operation::Read, Ok(()), bytes).is_ok()
        };
        let racing = || ModelDisk::racing(SECTOR);
        assert!(read(racing(), false, &half(7, 0)) && read(racing(), false, &half(0, 7)));
        assert!(read(racing(), false, &new) && read(racing(), true, &new));
        assert!(!read(racing(), true, &half(7, 0)), "the write had completed");
        assert!(!read(racing(), false, &half(7, 1)), "this content was never written");
        assert!(!read(ModelDisk::new(SECTOR), false, &half(7, 0)), "this model has no races");
        // A write that begins while the read is in flight.
        let mut model = racing();
        model.begin(1, &action(Operation::Read), &[]);
        model.begin(2, &action(Operation::Write), &new);
        assert!(model.finish(1, Operation::Read, Ok(()), &half(0, 7)).is_ok());
    }
}
