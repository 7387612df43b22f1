//! The blocks that a disk's guest has written, and when each of them died.
//!
//! A block is 4 KiB of the disk. Of a disk with more blocks than there is memory for, a sample is
//! followed: blocks whose hash is below a threshold, which falls when there are too many of them
//! (SHARDS with a fixed number of samples, Waldspurger and others, FAST 2015). A block of a file is
//! sampled by its place in the file, since a file system that never overwrites in place puts the
//! successor elsewhere.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

use fathom_insight::{Facts, Kind, Name, Names};
use fathom_introspect::{FileState, PresentFile};

use super::groups::{Cause, Groups, Membership, NO_ENDING};

/// The unit in which content lives and dies, in bytes.
pub(super) const BLOCK: u64 = 4096;
/// The memory for a block that is followed, in bytes: its entries in three trees.
pub(super) const BLOCK_MEMORY: u64 = 160;
/// The bit of an identity in its file that marks a block whose place in the file is unknown. The
/// other bits are the number of the block on the disk.
const LOOSE: u64 = 1 << 63;
/// No file.
const NONE: u32 = u32::MAX;

/// What identifies a file on a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct FileKey {
    pub device: Name,
    pub tree: u64,
    pub number: u64,
}

/// Blocks of one file, or of none, that are written together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Write<'a> {
    /// The first byte on the disk, and the number of bytes.
    pub offset: u64,
    pub length: u64,
    pub facts: &'a Facts,
    /// The first byte in the file.
    pub file_offset: Option<u64>,
    /// The file as it is in the guest's memory.
    pub file: Option<PresentFile>,
    /// When the content was made, at the earliest.
    pub born_ns: u64,
    pub now_ns: u64,
}

/// A block that is followed.
#[derive(Clone, Copy, Debug)]
struct Block {
    hash: u64,
    /// The place among the files, or [`NONE`].
    file: u32,
    /// Whether the content is dead, and only the naive view believes otherwise.
    is_dead: bool,
    groups: Membership,
    /// The block's place in its file, in blocks, or [`LOOSE`].
    page: u64,
    /// When the content was made, and when the disk got it.
    born_ns: u64,
    written_ns: u64,
}

/// A file with blocks that are followed and live.
#[derive(Debug)]
struct File {
    key: FileKey,
    generation: u32,
    /// Its inode in the guest's memory; 0 if it is not there.
    address: u64,
    path: Name,
    ending: u16,
    /// Each block by its place in the file.
    blocks: BTreeMap<u64, u64>,
    /// When it was last seen, by a write or a check.
    seen_ns: u64,
    /// When it has become empty, if a check has found it so: while direct I/O makes a file longer,
    /// the file seems to be empty too.
    emptied_ns: Option<u64>,
}

/// The table.
#[derive(Debug)]
pub(super) struct Table {
    blocks_max: usize,
    seed: u64,
    blocks: BTreeMap<u64, Block>,
    /// The hash and the place of each block: the one with the greatest hash is given up first.
    order: BTreeSet<(u64, u64)>,
    /// Blocks with a hash below this one are followed.
    threshold: u64,
    files: Vec<Option<File>>,
    free: Vec<u32>,
    keys: HashMap<FileKey, u32, hashbrown::DefaultHashBuilder>,
    /// The file that is written, which stays although it has no blocks yet.
    written: u32,
    pub groups: Groups,
    /// When the disk was first written, and last.
    pub begun_ns: Option<u64>,
    pub written_ns: u64,
}

impl Table {
    pub fn new(blocks_max: usize, seed: u64) -> Self {
        Self {
            blocks_max,
            seed,
            blocks: BTreeMap::new(),
            order: BTreeSet::new(),
            threshold: u64::MAX,
            files: Vec::new(),
            free: Vec::new(),
            keys: HashMap::default(),
            written: NONE,
            groups: Groups::default(),
            begun_ns: None,
            written_ns: 0,
        }
    }

    /// The share of all blocks that are followed.
    pub fn share(&self) -> f64 {
        if self.threshold == u64::MAX { 1.0 } else { self.threshold as f64 / u64::MAX as f64 }
    }

    /// The bytes that a followed block stands for.
    fn weight(&self) -> u64 {
        (BLOCK as f64 / self.share()).round() as u64
    }

    /// The blocks that are followed, dead ones included, and the files.
    pub fn counts(&self) -> (usize, usize) {
        (self.blocks.len(), self.keys.len())
    }

    /// The bytes that live, as far as that is known.
    pub fn living(&self) -> u64 {
        let living = self.blocks.values().filter(|block| !block.is_dead).count();
        (living as u64).saturating_mul(self.weight())
    }

    /// The content of blocks is replaced.
    pub fn write(&mut self, write: &Write<'_>, names: &Names) {
        self.written_ns = write.now_ns;
        self.begun_ns.get_or_insert(write.now_ns);
        let Some(end) = write.offset.checked_add(write.length) else { return };
        let blocks = write.offset / BLOCK..end.div_ceil(BLOCK);
        // Without a common alignment, the place in the file is not that of one block.
        let page = write.file_offset.filter(|start| start % BLOCK == write.offset % BLOCK);
        let page = page.map(|start| start / BLOCK);
        let file = self.file(write, names);
        self.written = file;
        let ending = self.of(file).map_or(NO_ENDING, |file| file.ending);
        let groups = self.groups.membership(write.facts, ending);
        for (place, number) in blocks.enumerate() {
            let page = match page {
                Some(page) if file != NONE => page.wrapping_add(place as u64) & !LOOSE,
                _ => LOOSE | number,
            };
            self.replace(number, page, write);
            // What the block was in its file before lies elsewhere, or there.
            let before = self.of(file).and_then(|file| file.blocks.get(&page)).copied();
            if let Some(before) = before {
                self.die(before, Cause::Overwritten, write.born_ns);
            }
            let hash = self.hash(file, page, number);
            if hash >= self.threshold {
                continue;
            }
            self.groups.born(groups, self.weight());
            let (born_ns, written_ns) = (write.born_ns, write.now_ns);
            let block = Block { hash, file, is_dead: false, groups, page, born_ns, written_ns };
            self.blocks.insert(number, block);
            self.order.insert((hash, number));
            if let Some(file) = self.of_mut(file) {
                file.blocks.insert(page, number);
            }
            if self.blocks.len() > self.blocks_max {
                self.give_up();
            }
        }
        self.written = NONE;
        self.remove_if_empty(file);
    }

    /// A block on the disk gets other content.
    fn replace(&mut self, number: u64, page: u64, write: &Write<'_>) {
        let Some(block) = self.blocks.get(&number).copied() else { return };
        let weight = self.weight();
        let naive_ns = write.now_ns.saturating_sub(block.written_ns);
        self.groups.died_naively(block.groups, naive_ns, weight);
        if !block.is_dead {
            let key = self.of(block.file).map(|file| file.key);
            let is_same = match key {
                // Without a file, nothing says that it is not the same content.
                None => true,
                Some(key) => {
                    block.page == page
                        && key.number == write.facts.inode
                        && key.device == write.facts.device
                }
            };
            // Its file has let the block go before, and nobody noticed when.
            let cause = if is_same { Cause::Overwritten } else { Cause::Reused };
            let now_ns = if is_same { write.born_ns } else { write.now_ns };
            self.die(number, cause, now_ns);
        }
        self.order.remove(&(block.hash, number));
        self.blocks.remove(&number);
    }

    /// The content of blocks is not needed any more.
    pub fn discard(&mut self, offset: u64, length: u64, now_ns: u64) {
        let Some(end) = offset.checked_add(length) else { return };
        let (first, end) = (offset.div_ceil(BLOCK), end / BLOCK);
        if first >= end {
            return;
        }
        let numbers: Vec<u64> = self.blocks.range(first..end).map(|(number, _)| *number).collect();
        for number in numbers {
            self.die(number, Cause::Discarded, now_ns);
            if let Some(block) = self.blocks.remove(&number) {
                self.order.remove(&(block.hash, number));
            }
        }
    }

    /// The content of a block dies. The naive view does not notice.
    fn die(&mut self, number: u64, cause: Cause, now_ns: u64) {
        let weight = self.weight();
        let Some(block) = self.blocks.get_mut(&number).filter(|block| !block.is_dead) else {
            return;
        };
        block.is_dead = true;
        let block = *block;
        self.groups.died(block.groups, cause, now_ns.saturating_sub(block.born_ns), weight);
        self.leave(&block);
    }

    /// A block leaves its file.
    fn leave(&mut self, block: &Block) {
        if let Some(file) = self.of_mut(block.file) {
            file.blocks.remove(&block.page);
            self.remove_if_empty(block.file);
        }
    }

    /// The block with the greatest hash is followed no more, nor is any other with such a hash.
    fn give_up(&mut self) {
        let Some((hash, number)) = self.order.pop_last() else { return };
        self.threshold = hash;
        if let Some(block) = self.blocks.remove(&number).filter(|block| !block.is_dead) {
            self.leave(&block);
        }
    }

    /// The place of the file that is written.
    fn file(&mut self, write: &Write<'_>, names: &Names) -> u32 {
        let Some(present) = write.file.filter(|_| write.facts.inode != 0) else { return NONE };
        let Facts { device, inode, inode_address, path, .. } = *write.facts;
        let key = FileKey { device, tree: present.tree, number: inode };
        let known = self.keys.get(&key).copied();
        if let Some(known) = known {
            let is_other = self.of(known).is_some_and(|file| file.generation != present.generation);
            if is_other {
                self.end_file(known, 0..u64::MAX, Cause::Deleted, write.now_ns);
            }
        }
        let known = self.keys.get(&key).copied();
        let place = known.unwrap_or_else(|| self.add_file(key, present.generation));
        let is_renamed = self.of(place).is_some_and(|file| file.path != path);
        let is_new = is_renamed || known.is_none();
        let ending = is_new.then(|| self.groups.ending(path, names));
        if let Some(file) = self.of_mut(place) {
            (file.address, file.path, file.seen_ns) = (inode_address, path, write.now_ns);
            file.emptied_ns = None;
            file.ending = ending.unwrap_or(file.ending);
        }
        place
    }

    fn add_file(&mut self, key: FileKey, generation: u32) -> u32 {
        let (address, path, ending, seen_ns, emptied_ns) = (0, Name::NONE, NO_ENDING, 0, None);
        let blocks = BTreeMap::new();
        let file = File { key, generation, address, path, ending, blocks, seen_ns, emptied_ns };
        let place = self.free.pop().unwrap_or(self.files.len() as u32);
        match self.files.get_mut(place as usize) {
            Some(free) => *free = Some(file),
            None => self.files.push(Some(file)),
        }
        self.keys.insert(key, place);
        place
    }

    fn of(&self, file: u32) -> Option<&File> {
        self.files.get(file as usize)?.as_ref()
    }

    fn of_mut(&mut self, file: u32) -> Option<&mut File> {
        self.files.get_mut(file as usize)?.as_mut()
    }

    fn remove_if_empty(&mut self, file: u32) {
        let is_empty = self.of(file).is_some_and(|file| file.blocks.is_empty());
        if is_empty && file != self.written {
            if let Some(empty) = self.files[file as usize].take() {
                self.keys.remove(&empty.key);
                self.free.push(file);
            }
        }
    }

    /// The blocks of a file in a range of places die.
    fn end_file(&mut self, file: u32, range: Range<u64>, cause: Cause, now_ns: u64) {
        let Some(found) = self.of(file) else { return };
        let numbers: Vec<u64> = found.blocks.range(range).map(|(_, number)| *number).collect();
        for number in numbers {
            self.die(number, cause, now_ns);
        }
    }

    /// Checks the files at the places from `from` on, at most `count` of them: `look` reports what
    /// has become of an inode by its address and number. Returns the place at which to go on;
    /// `None` after the last one.
    pub fn check(
        &mut self,
        look: impl Fn(u64, u64) -> Option<FileState>,
        from: usize,
        count: usize,
        now_ns: u64,
    ) -> Option<usize> {
        let end = from.saturating_add(count).min(self.files.len());
        for place in from..end {
            let file = place as u32;
            let Some(found) = self.of_mut(file).filter(|file| file.address != 0) else { continue };
            let state = look(found.address, found.key.number);
            let is_same = |present: &PresentFile| {
                (present.generation, present.tree) == (found.generation, found.key.tree)
            };
            // It happened between the two times at which the file was looked at.
            let between_ns = u64::midpoint(found.seen_ns.min(now_ns), now_ns);
            match state {
                Some(FileState::Present(present)) if is_same(&present) => {
                    let from = present.size.div_ceil(BLOCK).min(LOOSE);
                    found.seen_ns = now_ns;
                    let emptied_ns = found.emptied_ns;
                    found.emptied_ns =
                        (present.size == 0).then(|| emptied_ns.unwrap_or(between_ns));
                    self.end_file(file, from..LOOSE, Cause::Truncated, between_ns);
                    if let (Some(emptied_ns), true) = (emptied_ns, present.size == 0) {
                        self.end_file(file, LOOSE..u64::MAX, Cause::Truncated, emptied_ns);
                    }
                }
                // Its number may have another file by now.
                Some(FileState::Deleted | FileState::Present(_)) => {
                    self.end_file(file, 0..u64::MAX, Cause::Deleted, between_ns);
                }
                Some(FileState::Gone) | None => found.address = 0,
            }
        }
        (end < self.files.len()).then_some(end)
    }

    /// The hash by which a block is sampled.
    fn hash(&self, file: u32, page: u64, number: u64) -> u64 {
        let key = match self.of(file) {
            Some(file) if page & LOOSE == 0 => {
                let FileKey { device, tree, number } = file.key;
                mix(mix(number ^ mix(tree)) ^ u64::from(device.0)) ^ page
            }
            _ => number,
        };
        mix(key ^ self.seed)
    }

    /// Checks that the parts fit together.
    #[cfg(test)]
    pub fn validate(&self) {
        assert_eq!(self.order.len(), self.blocks.len());
        for (number, block) in &self.blocks {
            assert!(self.order.contains(&(block.hash, *number)) && block.hash < self.threshold);
            if let (Some(file), false) = (self.of(block.file), block.is_dead) {
                assert_eq!(file.blocks.get(&block.page), Some(number));
            }
        }
        for (place, file) in self.files.iter().enumerate() {
            let Some(file) = file else { continue };
            assert_eq!(self.keys.get(&file.key), Some(&(place as u32)));
            assert!(!file.blocks.is_empty());
            for (page, number) in &file.blocks {
                let block = self.blocks[number];
                assert!(!block.is_dead && block.page == *page && block.file == place as u32);
            }
        }
        assert_eq!(self.keys.len() + self.free.len(), self.files.len());
    }
}

/// Mixes the bits of a number (the finisher of `SplitMix64`).
fn mix(number: u64) -> u64 {
    let number = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ number >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ number >> 31
}

/// Whether a kind of data can belong to a file that is deleted.
pub(super) fn is_of_file(facts: &Facts) -> bool {
    matches!(facts.kind, Kind::Data | Kind::Direct | Kind::Directory) && facts.inode != 0
}
