//! What differs between two volumes or snapshots of a pool.
//!
//! [Change sets](crate::change_set) say that, if the two have a snapshot in common. Otherwise their
//! maps are compared. A page that both maps share has the same number in both, and is skipped with
//! all below it. So the work depends on what has changed, and not on the size of the volumes. Words
//! are compared by place and checksum: equal content at two places counts as changed, a change
//! never as equal.
//!
//! Pages that are not in memory are read into memory of the queue, and not of the pool: a long
//! comparison does not take the pages away that other disks need.

use std::ops::Range;
use std::sync::Arc;

use fathom_block::{Allocation, Backend, Extent, StoreAccess};
use hashbrown::HashMap;

use crate::catalogue::PageId;
use crate::entry::MapEntry;
use crate::error::PoolError;
use crate::layout::BLOCK;
use crate::pages::{Fault, Page, Pages, TableEntry, WORDS};
use crate::pool::Pool;
use crate::refusal::PoolRefusal;
use crate::tree::{BLOCKS_MAX, ROOT_LEVEL, index, span};

/// The most pages that a call of [`Pages::compare`] visits at the lowest level.
const LEAVES_MAX: usize = 64;
/// The most pages that are missed before they are read.
const MISSING_MAX: usize = 128;
/// The most pages in memory of a queue.
const KEPT_MAX: usize = 1024;
/// The runs after which a call of [`Pages::compare`] ends.
const RUNS_MAX: usize = 1024;

/// Pages that were read, and what the page table had of them then.
#[derive(Default)]
pub(crate) struct ReadPages(HashMap<PageId, (TableEntry, Arc<Page>)>);

impl ReadPages {
    /// Keeps a page. All earlier ones are dropped when there are too many.
    pub(crate) fn insert(&mut self, id: PageId, entry: TableEntry, page: Box<Page>) {
        if self.0.len() >= KEPT_MAX {
            self.0.clear();
        }
        self.0.insert(id, (entry, Arc::from(page)));
    }
}

/// What is compared, by numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Comparison {
    /// `None` is nothing: all that is in `target` has changed.
    pub(crate) base: Option<u32>,
    pub(crate) target: u32,
    /// Whether changed parts that are holes in `target` are told from others. That takes a read of
    /// each leaf with changes.
    pub(crate) finds_holes: bool,
}

/// Two maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Compared {
    /// The root of the earlier map, and the blocks that it has: all behind them counts as changed.
    pub(crate) base: PageId,
    pub(crate) base_blocks: u64,
    /// The root of the later map.
    pub(crate) target: PageId,
}

/// Adjoining blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ComparedRun {
    pub(crate) count: u64,
    /// Holes are unchanged, zeroes are changed holes.
    pub(crate) state: Allocation,
}

pub(crate) fn push(runs: &mut Vec<ComparedRun>, count: u64, state: Allocation) {
    match runs.last_mut() {
        _ if count == 0 => {}
        Some(last) if last.state == state => last.count += count,
        _ => runs.push(ComparedRun { count, state }),
    }
}

/// How a block differs.
fn state_of(before: MapEntry, after: MapEntry, is_new: bool) -> Allocation {
    if before.stale() == after.stale() && !is_new {
        Allocation::Hole
    } else if after.is_hole() {
        Allocation::Zero
    } else {
        Allocation::Data
    }
}

impl Pages {
    /// A page that is in memory, or was read and has not changed since.
    pub(crate) fn find_page<'p>(
        &'p self,
        id: PageId,
        read: &'p ReadPages,
    ) -> Result<&'p Page, Fault> {
        match self.get(id) {
            Err(Fault::Missing(_)) => match read.0.get(&id) {
                Some((entry, page)) if *entry == self.entry(id) => Ok(page),
                _ => Err(Fault::Missing(id)),
            },
            other => other.map(|page| &**page),
        }
    }

    /// The leaf with a block, which exists.
    pub(crate) fn find_leaf<'p>(
        &'p self,
        root: PageId,
        block: u64,
        read: &'p ReadPages,
    ) -> Result<&'p Page, Fault> {
        self.leaf_at(root, block, read)?.0.ok_or(Fault::Damaged)
    }

    /// The pages below two pages; 0 if there is none.
    fn pair(
        &self,
        ids: [PageId; 2],
        index: usize,
        read: &ReadPages,
        missing: &mut Vec<PageId>,
    ) -> Result<Option<[PageId; 2]>, Fault> {
        let mut pair = [0; 2];
        let before = missing.len();
        for (below, id) in pair.iter_mut().zip(ids) {
            if id != 0 {
                match self.find_page(id, read) {
                    Ok(page) => *below = Self::child(page, index)?,
                    Err(Fault::Missing(id)) => missing.push(id),
                    Err(fault) => return Err(fault),
                }
            }
        }
        Ok((missing.len() == before).then_some(pair))
    }

    /// Compares two maps in a range of blocks. Appends what it finds from the beginning of the
    /// range on, until a page is missing or enough is done. Further pages that are missing behind
    /// the first one are in `missing`, too.
    ///
    /// # Errors
    /// If a map is damaged.
    pub(crate) fn compare(
        &self,
        maps: &Compared,
        range: Range<u64>,
        read: &ReadPages,
        runs: &mut Vec<ComparedRun>,
        missing: &mut Vec<PageId>,
    ) -> Result<(), Fault> {
        if range.end > BLOCKS_MAX {
            return Err(Fault::Damaged);
        }
        let (mut at, mut leaves) = (range.start, 0);
        while at < range.end
            && leaves < LEAVES_MAX
            && missing.len() < MISSING_MAX
            && runs.len() < RUNS_MAX
        {
            let is_new = at >= maps.base_blocks;
            let base = if is_new { 0 } else { maps.base };
            let (mut ids, mut level) = ([base, maps.target], ROOT_LEVEL);
            let mut is_missing = false;
            while ids[0] != ids[1] && level > 0 {
                let Some(below) = self.pair(ids, index(at, level), read, missing)? else {
                    is_missing = true;
                    break;
                };
                (ids, level) = (below, level - 1);
            }
            // What lies below the pages, or one of them, is the same or unknown.
            let below = span(level + 1);
            let limit = if is_new { u64::MAX } else { maps.base_blocks };
            let end = ((at / below + 1) * below).min(range.end).min(limit);
            if !is_missing && ids[0] == ids[1] && missing.is_empty() {
                push(runs, end - at, state_of(MapEntry::HOLE, MapEntry::HOLE, is_new));
            } else if !is_missing && ids[0] != ids[1] {
                leaves += 1;
                self.compare_leaves(ids, at..end, is_new, read, runs, missing)?;
            }
            at = end;
        }
        missing.sort_unstable();
        missing.dedup();
        Ok(())
    }

    fn compare_leaves(
        &self,
        ids: [PageId; 2],
        blocks: Range<u64>,
        is_new: bool,
        read: &ReadPages,
        runs: &mut Vec<ComparedRun>,
        missing: &mut Vec<PageId>,
    ) -> Result<(), Fault> {
        let mut leaves = [None; 2];
        let before = missing.len();
        for (leaf, id) in leaves.iter_mut().zip(ids).filter(|(_, id)| *id != 0) {
            match self.find_page(id, read) {
                Ok(page) => *leaf = Some(page),
                Err(Fault::Missing(id)) => missing.push(id),
                Err(fault) => return Err(fault),
            }
        }
        if before > 0 || missing.len() > before {
            return Ok(());
        }
        let first = index(blocks.start, 0);
        for index in first..first + (blocks.end - blocks.start) as usize {
            debug_assert!(index < WORDS, "a range within a leaf");
            let word = |leaf: Option<&Page>| {
                leaf.map_or(Ok(MapEntry::HOLE), |page| Self::leaf_entry(page, index))
            };
            push(runs, 1, state_of(word(leaves[0])?, word(leaves[1])?, is_new));
        }
        Ok(())
    }
}

impl Pool {
    /// The number of a volume, or of one of its snapshots. No other one ever has it.
    ///
    /// # Errors
    /// If there is none with these names.
    pub fn number_of(&self, volume: &str, snapshot: Option<&str>) -> Result<u32, PoolError> {
        self.inner.shared.access(|state| {
            let volume = state.catalogue.volume(volume)?.id;
            let Some(name) = snapshot else { return Ok(volume) };
            Ok(state.catalogue.snapshot(volume, name)?.id)
        })
    }

    /// The number of a snapshot of the volume with this number.
    pub fn snapshot_of(&self, volume: u32, name: &str) -> Option<u32> {
        self.inner
            .shared
            .access(|state| state.catalogue.snapshot(volume, name).ok().map(|snapshot| snapshot.id))
    }

    /// The snapshot from which the volume or snapshot with this number goes on, as far as it is
    /// known what has changed since.
    pub fn since(&self, number: u32) -> Option<u32> {
        self.inner.shared.access(|state| state.catalogue.since(number))
    }

    /// What differs between two volumes or snapshots, by their numbers, as a back end: it has the
    /// content of `target`, and its extents say what has changed since `base`. Unchanged parts are
    /// holes, changed ones are data, or zeroes if `target` has nothing there. Without a base, all
    /// that is in `target` has changed.
    ///
    /// A volume may be in use, and change meanwhile: each extent is true of some instant between
    /// its request and the answer. Until the back end is dropped, neither of the two is deleted or
    /// rolled back.
    ///
    /// # Errors
    /// If there is no volume or snapshot with these numbers.
    pub fn difference(
        &self,
        base: Option<u32>,
        target: u32,
    ) -> Result<Arc<dyn Backend>, PoolError> {
        self.compare(Comparison { base, target, finds_holes: true })
    }

    /// As [`difference`](Self::difference), but changed parts that are holes in `target` may be
    /// data in the extents. That is known without the maps, and takes less time.
    ///
    /// # Errors
    /// As for `difference`.
    pub fn changes(&self, base: u32, target: u32) -> Result<Arc<dyn Backend>, PoolError> {
        self.compare(Comparison { base: Some(base), target, finds_holes: false })
    }

    fn compare(&self, compared: Comparison) -> Result<Arc<dyn Backend>, PoolError> {
        let Comparison { base, target, .. } = compared;
        let size = self.inner.shared.access(|state| {
            if let Some(base) = base {
                state.catalogue.branch(base).ok_or(PoolRefusal::NoSnapshot)?;
            }
            let (_, size) = state.catalogue.branch(target).ok_or(PoolRefusal::NoVolume)?;
            for id in base.into_iter().chain([target]) {
                *state.readers.entry(id).or_default() += 1;
            }
            Ok::<_, PoolError>(size)
        })?;
        Ok(self.comparing(compared, size))
    }
}

/// A changed extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangedExtent {
    /// The first byte.
    pub offset: u64,
    /// The length, in bytes.
    pub length: u64,
    /// Whether it is a hole now, which reads as zeroes.
    pub is_hole: bool,
}

/// Walks over what differs, with requests of its own. It blocks.
pub struct ChangeCursor {
    access: StoreAccess,
    capacity: u64,
    at: u64,
}

impl ChangeCursor {
    /// Begins at byte `at` of a [difference](Pool::difference).
    ///
    /// # Errors
    /// If the device of the pool cannot be used.
    pub fn open(difference: &Arc<dyn Backend>, at: u64) -> Result<Self, PoolError> {
        let access = StoreAccess::open(difference)?;
        Ok(Self { access, capacity: difference.capacity(), at: at / BLOCK * BLOCK })
    }

    /// The byte up to which all is known.
    pub fn at(&self) -> u64 {
        self.at
    }

    /// Whether all is known.
    pub fn is_done(&self) -> bool {
        self.at >= self.capacity
    }

    /// Appends the next changes, in order; perhaps none. The work of a call is bounded, and so is
    /// the number of changes.
    ///
    /// # Errors
    /// If a map is damaged, or the device fails.
    pub fn step(&mut self, changes: &mut Vec<ChangedExtent>) -> Result<(), PoolError> {
        if self.is_done() {
            return Ok(());
        }
        for extent in self.access.extents(self.at, self.capacity - self.at)? {
            let Extent { offset, length, allocation } = extent;
            self.at = offset + length;
            let is_hole = allocation == Allocation::Zero;
            match changes.last_mut() {
                _ if allocation == Allocation::Hole => {}
                Some(last) if last.is_hole == is_hole && last.offset + last.length == offset => {
                    last.length += length;
                }
                _ => changes.push(ChangedExtent { offset, length, is_hole }),
            }
        }
        Ok(())
    }
}
