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
        }
    }

    /// Request `id` is about to be submitted; `data` is what it writes.
    pub fn begin(&mut self, id: u64, action: &Action, data: &[u8]) {
        let first = action.offset / SECTOR;
        let count = (action.length / SECTOR) as usize;
        match action.operation {
            Operation::Write => {
                let contents = data.chunks(SECTOR_BYTES).map(fingerprint).collect();
                self.begin_change(id, first, contents, action.flags.force_unit_access);
            }
            Operation::Discard | Operation::WriteZeroes => {
                let contents = vec![self.zero; count];
                self.begin_change(id, first, contents, action.flags.force_unit_access);
            }
            Operation::Read => {
                let allowed =
                    (first..first + count as u64).map(|sector| self.possible(sector)).collect();
                self.looks.insert(id, Look { first, allowed });
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
                    return compare("read", look.first, data, &look.allowed);
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
        compare("image after a crash", 0, image, &self.kept)
    }

    /// Compares `image` with what may be read at this moment.
    ///
    /// # Errors
    /// The first sector that holds what it must not.
    pub fn check_now(&self, image: &[u8]) -> Result<(), Violation> {
        let allowed: Vec<Contents> =
            (0..self.now.len() as u64).map(|sector| self.possible(sector)).collect();
        compare("image", 0, image, &allowed)
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
                let index = sector.checked_sub(look.first);
                if let Some(allowed) = index.and_then(|index| look.allowed.get_mut(index as usize))
                {
                    allowed.insert(content);
                }
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
) -> Result<(), Violation> {
    for (index, (bytes, allowed)) in data.chunks(SECTOR_BYTES).zip(allowed).enumerate() {
        if !allowed.contains(&fingerprint(bytes)) {
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
