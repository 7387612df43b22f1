//! What a disk may legally hold.
//!
//! The model knows each sector's contents by fingerprint and keeps two sets for it:
//!
//! - **now**: what a read that begins now may find, apart from writes under way. One content,
//!   except where writes were under way at the same time (either may be the last) or one failed
//!   (it may have happened or not, sector by sector);
//! - **kept**: what may be found after a crash. All that was written since the last flush, and
//!   what the flush made durable. A flush covers the writes that had completed when it was
//!   submitted; a write with force unit access covers itself.
//!
//! Both sets may be too large, never too small: a violation is a fault of the disk.
//!
//! Sectors are read and written whole, but for one case: where requests of different queues run at
//! the same moment, a read of a sector that is being written may find [part of it](ModelDisk::racing)
//! written, as it may in any file. Whoever reads what he is writing cannot know what he gets.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::hash::{DefaultHasher, Hasher};

use fathom_block::{Operation, Outcome};

use crate::workload::Action;
use crate::{SECTOR, SECTOR_BYTES};

/// What is copied in one go, in bytes: a word of memory.
const WORD: usize = 8;

/// A sector's content, by hash.
type Fingerprint = u64;
type Contents = BTreeSet<Fingerprint>;

fn fingerprint(sector: &[u8]) -> Fingerprint {
    let mut hasher = DefaultHasher::new();
    hasher.write(sector);
    hasher.finish()
}

/// A sector that holds what it must not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The sector's number.
    pub sector: u64,
    /// What was looked at: a read, or an image after a crash.
    pub what: &'static str,
    /// How many contents would have been right.
    pub allowed: usize,
    /// Whether it holds zeroes.
    pub is_zero: bool,
}

impl fmt::Display for Violation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "{}: sector {} holds {}, none of the {} contents that it may hold",
            self.what,
            self.sector,
            if self.is_zero { "zeroes" } else { "something" },
            self.allowed
        )
    }
}

/// A request that modifies and is under way.
struct Change {
    first: u64,
    contents: Vec<Fingerprint>,
    force_unit_access: bool,
    /// What writes that were under way at the same time put into the same sectors.
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

/// A read that is under way.
struct Look {
    first: u64,
    allowed: Vec<Contents>,
    /// Whether a sector was being written meanwhile.
    is_raced: Vec<bool>,
}

/// A flush that is under way: what the sectors that were not durable may hold after it.
struct Barrier {
    kept: BTreeMap<u64, Contents>,
}

/// The model of a disk that is empty at first.
pub struct ModelDisk {
    now: Vec<Contents>,
    kept: Vec<Contents>,
    zero: Fingerprint,
    changes: BTreeMap<u64, Change>,
    looks: BTreeMap<u64, Look>,
    barriers: BTreeMap<u64, Barrier>,
    /// Sectors whose content may be lost.
    unsure: BTreeSet<u64>,
    /// What sectors have held, where reads may find parts of it.
    known: Option<HashMap<Fingerprint, Box<[u8]>>>,
}

impl ModelDisk {
    /// A disk of `capacity` bytes, whole sectors, of zeroes.
    pub fn new(capacity: u64) -> Self {
        let zero = fingerprint(&[0; SECTOR_BYTES]);
        let sectors = (capacity / SECTOR) as usize;
        Self {
            now: vec![Contents::from([zero]); sectors],
            kept: vec![Contents::from([zero]); sectors],
            zero,
            changes: BTreeMap::new(),
            looks: BTreeMap::new(),
            barriers: BTreeMap::new(),
            unsure: BTreeSet::new(),
            known: None,
        }
    }

    /// The same for a disk whose requests run at the same moment: reads may find a sector partly
    /// written that is being written.
    pub fn racing(capacity: u64) -> Self {
        let mut model = Self::new(capacity);
        model.known = Some(HashMap::from([(model.zero, Box::from([0; SECTOR_BYTES]))]));
        model
    }

    /// Request `id` is about to be submitted; `data` is what it writes.
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
                self.looks.insert(id, Look { first, allowed, is_raced });
            }
            Operation::Flush => {
                let kept =
                    self.unsure.iter().map(|&sector| (sector, self.possible(sector))).collect();
                self.barriers.insert(id, Barrier { kept });
            }
            Operation::GetId | Operation::Extents => {}
        }
    }

    /// Request `id` has come back with `outcome`; `data` is what it read.
    ///
    /// # Errors
    /// When a read brought what it must not.
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
                let Some(look) = self.looks.remove(&id) else { return Ok(()) };
                if outcome.is_ok() {
                    let is_part = |index: usize, bytes: &[u8]| {
                        look.is_raced[index] && self.is_partly(bytes, &look.allowed[index])
                    };
                    return compare("read", look.first, data, &look.allowed, &is_part);
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

    /// Compares `image` with what may be found after a crash at this moment.
    ///
    /// # Errors
    /// The first sector that holds what it must not.
    pub fn check_crash(&self, image: &[u8]) -> Result<(), Violation> {
        compare("image after a crash", 0, image, &self.kept, &|_, _| false)
    }

    /// Compares `image` with what may be read at this moment.
    ///
    /// # Errors
    /// The first sector that holds what it must not.
    pub fn check_now(&self, image: &[u8]) -> Result<(), Violation> {
        let allowed: Vec<Contents> =
            (0..self.now.len() as u64).map(|sector| self.possible(sector)).collect();
        compare("image", 0, image, &allowed, &|_, _| false)
    }

    /// Whether each word of a sector is of one of some contents, where reads race with writes.
    fn is_partly(&self, sector: &[u8], contents: &Contents) -> bool {
        let Some(known) = &self.known else { return false };
        let contents: Vec<&[u8]> =
            contents.iter().filter_map(|content| known.get(content)).map(|of| &**of).collect();
        sector.chunks(WORD).enumerate().all(|(index, word)| {
            let place = index * WORD..index * WORD + word.len();
            contents.iter().any(|content| content.get(place.clone()) == Some(word))
        })
    }

    /// Begins anew with `image`, which is what a crash left behind.
    pub fn restart(&mut self, image: &[u8]) {
        let contents: Vec<Contents> = image
            .chunks(SECTOR_BYTES)
            .map(|sector| Contents::from([fingerprint(sector)]))
            .collect();
        self.now.clone_from(&contents);
        self.kept = contents;
        self.changes.clear();
        self.looks.clear();
        self.barriers.clear();
        self.unsure.clear();
    }

    /// How many sectors may hold more than one content after a crash.
    pub fn unsure(&self) -> usize {
        self.unsure.len()
    }

    /// What the sector may hold at this moment, writes under way included.
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
            for look in self.looks.values_mut() {
                let index = sector.checked_sub(look.first).map(|index| index as usize);
                let Some(index) = index.filter(|index| *index < look.allowed.len()) else {
                    continue;
                };
                look.allowed[index].insert(content);
                look.is_raced[index] = true;
            }
            for barrier in self.barriers.values_mut() {
                // A sector that was durable when the flush began is not its business.
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
                // It may have happened before or after whatever is known, or not at all.
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

    /// The sector is durable, with one of `contents`.
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

    /// Half of one content and half of another.
    fn half(one: u8, other: u8) -> Vec<u8> {
        [[one; SECTOR_BYTES / 2], [other; SECTOR_BYTES / 2]].concat()
    }

    #[test]
    fn parts_are_for_reads_beside_writes() {
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
        assert!(!read(racing(), true, &half(7, 0)), "the write was over");
        assert!(!read(racing(), false, &half(7, 1)), "nobody has written this");
        assert!(!read(ModelDisk::new(SECTOR), false, &half(7, 0)), "sectors are whole");
        // A write that begins while the read is under way.
        let mut model = racing();
        model.begin(1, &action(Operation::Read), &[]);
        model.begin(2, &action(Operation::Write), &new);
        assert!(model.finish(1, Operation::Read, Ok(()), &half(0, 7)).is_ok());
    }
}
