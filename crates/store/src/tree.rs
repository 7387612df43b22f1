//! A volume's map: a tree of four levels with 512 words in each page.

use std::ops::Range;

use crate::catalogue::{Epoch, PageId};
use crate::entry::MapEntry;
use crate::pages::{Fault, Pages, WORDS};

/// The level of a root; leaves have level 0.
pub(crate) const ROOT_LEVEL: u32 = 3;
/// The bits of an index in a page.
const INDEX_BITS: u32 = 9;
/// The blocks below a page of level 1: changes of ranges are divided there.
pub(crate) const RANGE_MAX: u64 = 1 << (2 * INDEX_BITS);

/// The blocks of the largest map.
pub(crate) const BLOCKS_MAX: u64 = 1 << ((ROOT_LEVEL + 1) * INDEX_BITS);

/// A branch of which the map is changed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Branch {
    /// The root; 0 if the map is empty.
    pub(crate) root: PageId,
    /// Pages are the branch's own if their birth is later.
    pub(crate) floor: Epoch,
    /// The birth of new pages.
    pub(crate) epoch: Epoch,
}

/// What a change of a range leaves behind.
#[derive(Debug, Default)]
pub(crate) struct Cleared {
    /// Blocks that nothing refers to any more.
    pub(crate) blocks: Vec<u64>,
    /// Whether there may be further such blocks, which only a walk finds.
    pub(crate) has_garbage: bool,
}

/// The number of blocks below a word of a page at `level`.
pub(crate) fn span(level: u32) -> u64 {
    1 << (level * INDEX_BITS)
}

/// The index of a block in the page of `level` on the way to it.
pub(crate) fn index(block: u64, level: u32) -> usize {
    (block >> (level * INDEX_BITS)) as usize % WORDS
}

impl Pages {
    /// Appends the entries of a range of blocks to `entries`.
    ///
    /// # Errors
    /// The first fault. Pages that are missing besides are in `missing`.
    pub(crate) fn look_up(
        &self,
        root: PageId,
        range: Range<u64>,
        entries: &mut Vec<MapEntry>,
        missing: &mut Vec<PageId>,
    ) -> Result<(), Fault> {
        let mut at = range.start;
        if range.end > BLOCKS_MAX {
            return Err(Fault::Damaged);
        }
        while at < range.end {
            let end = (at / WORDS as u64 + 1) * WORDS as u64;
            let end = end.min(range.end);
            let count = (end - at) as usize;
            match self.leaf(root, at) {
                Ok(Some(leaf)) => {
                    let first = index(at, 0);
                    let page = self.get(leaf);
                    match page {
                        Ok(page) => {
                            for index in first..first + count {
                                entries.push(Self::leaf_entry(page, index)?);
                            }
                        }
                        Err(Fault::Missing(id)) => missing.push(id),
                        Err(fault) => return Err(fault),
                    }
                }
                Ok(None) => entries.resize(entries.len() + count, MapEntry::HOLE),
                Err(Fault::Missing(id)) => missing.push(id),
                Err(fault) => return Err(fault),
            }
            at = end;
        }
        missing.dedup();
        missing.first().map_or(Ok(()), |id| Err(Fault::Missing(*id)))
    }

    /// The leaf for a block; `None` if it is a hole.
    fn leaf(&self, root: PageId, block: u64) -> Result<Option<PageId>, Fault> {
        let mut id = root;
        for level in (1..=ROOT_LEVEL).rev() {
            if id == 0 {
                return Ok(None);
            }
            id = Self::child(self.get(id)?, index(block, level))?;
        }
        Ok(Some(id).filter(|id| *id != 0))
    }

    /// A page that the branch may change in place of `id`: the same, a copy, or a new one.
    fn own(&mut self, id: PageId, level: u32, branch: &Branch) -> Result<PageId, Fault> {
        match id {
            0 => self.add_empty(branch.epoch),
            _ if self.is_own(id, branch.floor) => self.get(id).map(|_| id),
            _ => self.copy(id, level, branch.epoch),
        }
    }

    /// Makes the root the branch's own.
    fn own_root(&mut self, branch: &mut Branch) -> Result<PageId, Fault> {
        branch.root = self.own(branch.root, ROOT_LEVEL, branch)?;
        Ok(branch.root)
    }

    /// Makes the page below `id`, which is the branch's own, its own too.
    fn own_child(
        &mut self,
        id: PageId,
        level: u32,
        index: usize,
        branch: &Branch,
    ) -> Result<PageId, Fault> {
        let child = Self::child(self.get(id)?, index)?;
        let own = self.own(child, level - 1, branch)?;
        if own != child {
            self.change(id)?[index] = u64::from(own);
        }
        Ok(own)
    }

    /// Makes the leaf of a block the branch's own, and keeps it in memory until the next
    /// checkpoint.
    ///
    /// # Errors
    /// If a page is missing. The call may then be repeated.
    pub(crate) fn touch(&mut self, branch: &mut Branch, block: u64) -> Result<PageId, Fault> {
        if block >= BLOCKS_MAX {
            return Err(Fault::Damaged);
        }
        let mut id = self.own_root(branch)?;
        for level in (1..=ROOT_LEVEL).rev() {
            id = self.own_child(id, level, index(block, level), branch)?;
        }
        self.change(id)?;
        Ok(id)
    }

    /// Whether the pages are in memory that [`clear`](Self::clear) changes for a range, on the way
    /// to one of its ends.
    ///
    /// # Errors
    /// If a page is missing.
    pub(crate) fn probe(&self, root: PageId, range: &Range<u64>, end: u64) -> Result<(), Fault> {
        let mut id = root;
        for level in (1..=ROOT_LEVEL).rev() {
            if id == 0 {
                return Ok(());
            }
            let child = Self::child(self.get(id)?, index(end, level))?;
            let first = end / span(level) * span(level);
            if range.start <= first && first + span(level) <= range.end {
                return Ok(());
            }
            id = child;
        }
        if id == 0 { Ok(()) } else { self.get(id).map(drop) }
    }

    /// Sets the entry of a block. Returns the old one, which is fresh if no other page has it.
    ///
    /// # Errors
    /// If a page is missing. The change may then be made again.
    pub(crate) fn set(
        &mut self,
        branch: &mut Branch,
        block: u64,
        entry: MapEntry,
    ) -> Result<MapEntry, Fault> {
        let id = self.touch(branch, block)?;
        let at = index(block, 0);
        let old = Self::leaf_entry(self.get(id)?, at)?;
        self.change(id)?[at] = entry.bits();
        Ok(old)
    }

    /// Makes a range of blocks holes.
    ///
    /// # Errors
    /// If a page is missing. The change may then be made again; `cleared` has what it has left
    /// behind so far.
    pub(crate) fn clear(
        &mut self,
        branch: &mut Branch,
        range: Range<u64>,
        cleared: &mut Cleared,
    ) -> Result<(), Fault> {
        let range = range.start..range.end.min(BLOCKS_MAX);
        if branch.root == 0 || range.is_empty() {
            return Ok(());
        }
        let root = self.own_root(branch)?;
        self.clear_below(root, ROOT_LEVEL, &range, branch, cleared)
    }

    /// Makes the blocks of a range below page `id` holes. Numbers of blocks count from the
    /// beginning of the map.
    fn clear_below(
        &mut self,
        id: PageId,
        level: u32,
        range: &Range<u64>,
        branch: &Branch,
        cleared: &mut Cleared,
    ) -> Result<(), Fault> {
        let width = span(level);
        let mut at = range.start;
        while at < range.end {
            let start = at / width * width;
            let end = (start + width).min(range.end);
            let index = index(at, level);
            if level == 0 {
                let old = Self::leaf_entry(self.get(id)?, index)?;
                if !old.is_hole() {
                    self.change(id)?[index] = 0;
                    cleared.blocks.extend(Some(old.block()).filter(|_| old.is_fresh()));
                }
            } else {
                let child = Self::child(self.get(id)?, index)?;
                if child != 0 && at == start && end == start + width {
                    self.drop_below(child, level - 1, branch, cleared)?;
                    self.change(id)?[index] = 0;
                } else if child != 0 {
                    let own = self.own_child(id, level, index, branch)?;
                    self.clear_below(own, level - 1, &(at..end), branch, cleared)?;
                }
            }
            at = end;
        }
        Ok(())
    }

    /// Drops page `id` and those below it, as far as they are the branch's own.
    fn drop_below(
        &mut self,
        id: PageId,
        level: u32,
        branch: &Branch,
        cleared: &mut Cleared,
    ) -> Result<(), Fault> {
        if !self.is_own(id, branch.floor) || self.is_dead(id) {
            return Ok(());
        }
        match self.get(id).cloned() {
            Ok(page) => {
                for index in 0..WORDS {
                    if level == 0 {
                        let old = Self::leaf_entry(&page, index)?;
                        cleared.blocks.extend(Some(old.block()).filter(|_| old.is_fresh()));
                    } else {
                        let child = Self::child(&page, index)?;
                        if child != 0 {
                            self.drop_below(child, level - 1, branch, cleared)?;
                        }
                    }
                }
            }
            Err(Fault::Missing(_)) => cleared.has_garbage = true,
            Err(fault) => return Err(fault),
        }
        self.remove(id);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use crate::paged::Paged;
    use crate::rules::Rules;

    fn entry(number: u64) -> MapEntry {
        MapEntry::new(number, number as u32)
    }

    /// Writes all changed pages and drops them from memory; loads what a look-up misses.
    struct Device {
        pages: Pages,
        content: BTreeMap<PageId, Box<crate::pages::Page>>,
    }

    impl Device {
        fn new() -> Self {
            let pages = Pages::new(Paged::new(0, 40), 1, 4, Rules::default());
            Self { pages, content: BTreeMap::new() }
        }

        fn checkpoint(&mut self) {
            self.pages.bury();
            for (id, page) in self.pages.freeze() {
                self.content.insert(id, Box::new(*page));
                self.pages.written(id, (1 << 20 | u64::from(id), 0), 1);
            }
        }

        /// Repeats `attempt` until no page is missing.
        fn complete<T>(&mut self, mut attempt: impl FnMut(&mut Pages) -> Result<T, Fault>) -> T {
            for _ in 0..1000 {
                match attempt(&mut self.pages) {
                    Ok(done) => return done,
                    Err(Fault::Missing(id)) => {
                        let entry = self.pages.entry(id);
                        self.pages.insert(id, entry, self.content[&id].clone());
                    }
                    Err(Fault::Damaged) => panic!("the map is damaged"),
                }
            }
            panic!("pages are missing for ever");
        }

        fn read(&mut self, root: PageId, range: Range<u64>) -> Vec<u64> {
            self.complete(|pages| {
                let mut entries = Vec::new();
                pages.look_up(root, range.clone(), &mut entries, &mut Vec::new())?;
                Ok(entries.into_iter().map(MapEntry::block).collect())
            })
        }
    }

    /// Branches of one map, with snapshots, against plain tables. What is freed at once is in no
    /// table, and what no table has was freed at once, or a walk was announced.
    #[test]
    fn maps_agree_with_tables_and_nothing_is_freed_that_one_of_them_has() {
        const BLOCKS: u64 = 3 << 18;
        for seed in 0..60 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut device = Device::new();
            let mut heads = vec![(Branch { root: 0, floor: 0, epoch: 1 }, BTreeMap::new())];
            let mut snapshots: Vec<(PageId, BTreeMap<u64, u64>)> = Vec::new();
            let (mut epoch, mut next, mut freed) = (1, 1, BTreeSet::new());
            for _ in 0..300 {
                let which = random.usize(..heads.len());
                let (branch, table) = &mut heads[which];
                branch.epoch = epoch;
                match random.u8(..20) {
                    0..=11 => {
                        let block = random.u64(..4) * (1 << 18) % BLOCKS + random.u64(..600);
                        let old =
                            device.complete(|pages| pages.set(branch, block, entry(next).fresh()));
                        assert_eq!(old.block(), table.insert(block, next).unwrap_or(0));
                        if old.is_fresh() {
                            assert!(freed.insert(old.block()));
                        }
                        next += 1;
                    }
                    12..=15 => {
                        let start = random.u64(..BLOCKS);
                        let length = 1 << random.u32(1..20);
                        let end = (start + 1 + random.u64(..length)).min(BLOCKS);
                        let start = if random.bool() { start / 512 * 512 } else { start };
                        let mut cleared = Cleared::default();
                        device.complete(|pages| pages.clear(branch, start..end, &mut cleared));
                        table.retain(|block, _| !(start..end).contains(block));
                        for block in cleared.blocks {
                            assert!(freed.insert(block), "freed twice");
                        }
                    }
                    16 => {
                        snapshots.push((branch.root, table.clone()));
                        branch.floor = epoch;
                        epoch += 1;
                    }
                    17 if !snapshots.is_empty() && heads.len() < 4 => {
                        let (root, table) = random.choice(&snapshots).unwrap().clone();
                        heads.push((Branch { root, floor: epoch, epoch: epoch + 1 }, table));
                        epoch += 1;
                    }
                    _ => device.checkpoint(),
                }
            }
            let roots = heads.iter().map(|(branch, table)| (branch.root, table.clone()));
            for (root, table) in roots.chain(snapshots).collect::<Vec<_>>() {
                let starts = table.keys().map(|block| block / 64 * 64);
                for start in starts.collect::<BTreeSet<_>>() {
                    let found = device.read(root, start..start + 64);
                    let expected =
                        (start..start + 64).map(|at| table.get(&at).copied().unwrap_or(0));
                    assert_eq!(found, expected.collect::<Vec<_>>(), "seed {seed}");
                }
                assert!(table.values().all(|block| !freed.contains(block)), "seed {seed}");
            }
        }
    }

    #[test]
    fn without_snapshots_everything_is_freed_at_once() {
        let mut device = Device::new();
        let mut branch = Branch { root: 0, floor: 0, epoch: 1 };
        for block in 0..2000 {
            device.pages.set(&mut branch, block, entry(block + 1).fresh()).unwrap();
        }
        let mut cleared = Cleared::default();
        device.pages.clear(&mut branch, 100..1900, &mut cleared).unwrap();
        assert_eq!(cleared.blocks.len(), 1800);
        assert!(!cleared.has_garbage);
        device.pages.clear(&mut branch, 0..RANGE_MAX, &mut cleared).unwrap();
        assert_eq!(cleared.blocks.len(), 2000);
        assert_eq!(device.pages.clear(&mut branch, 5..5, &mut cleared), Ok(()));
    }
}
