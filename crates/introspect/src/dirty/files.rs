//! The files that dirty pages belong to.

use std::time::Duration;

use fathom_insight::{Facts, Kind, Names};

use super::budget::Budget;
use super::devices::WRITERS_MAX;
use crate::files::{FileCache, Nature};
use crate::kernel::Kernel;
use crate::pages::PageCache;
use crate::vmcoreinfo::PAGE;

/// The most inodes that are examined.
const INODES_MAX: usize = 1 << 18;
/// The most steps of one search, each of which is a device, a writer, an inode, or a node of a page
/// tree, which covers up to 64 pages; and its longest time.
const STEPS_MAX: u64 = 1 << 21;
const TIME_MAX: Duration = Duration::from_secs(5);
/// The entries of a node, and the bits of an index that it covers.
const SLOTS: u64 = 64;
const SLOT_BITS: u8 = 6;
/// The greatest shift of a node: an index has 64 bits.
const SHIFT_MAX: u8 = 60;
/// The low bits of an entry that mark one of the tree's own, and of those the ones that refer to a
/// node rather than to the beginning of a large page.
const INTERNAL: u64 = 2;
const NODE_MIN: u64 = 4096;

/// A file with dirty pages.
#[derive(Clone, Debug)]
pub struct DirtyFile {
    /// The facts about the file.
    pub facts: Facts,
    /// The kernel's name of the device that will get the pages.
    pub device: String,
    /// Its dirty pages, in bytes.
    pub dirty: u64,
}

/// The files with dirty pages.
#[derive(Clone, Debug, Default)]
pub struct DirtyFiles {
    /// The files with the most dirty pages first.
    pub files: Vec<DirtyFile>,
    /// The dirty pages of all files that were found, including those that are not listed, in bytes.
    pub dirty: u64,
    /// Whether all lists were read to their ends. Otherwise the guest changed them meanwhile, or
    /// there are too many files.
    pub is_whole: bool,
}

/// A walk through all files.
struct Walk<'k> {
    kernel: &'k Kernel,
    names: &'k Names,
    cache: FileCache,
    pages: PageCache,
    inodes_left: usize,
    budget: Budget,
    found: DirtyFiles,
}

impl Kernel {
    /// The files with dirty pages: those with the most pages, at most `max`. Takes about 10 ns for
    /// each dirty page and 1 µs for each file. `None` if the kernel's structures are not known.
    pub fn dirty_files(&self, names: &Names, max: usize) -> Option<DirtyFiles> {
        let mut walk = Walk {
            kernel: self,
            names,
            cache: FileCache::default(),
            pages: PageCache::default(),
            inodes_left: INODES_MAX,
            budget: Budget::new(STEPS_MAX, TIME_MAX),
            found: DirtyFiles { is_whole: true, ..DirtyFiles::default() },
        };
        let layout = &self.layout;
        let lists = [
            layout.writer_dirty?,
            layout.writer_queued?,
            layout.writer_postponed?,
            layout.writer_times?,
        ];
        for bdi in self.bdis()? {
            let Some(bdi) = bdi.filter(|_| walk.budget.take(1).is_some()) else {
                walk.found.is_whole = false;
                break;
            };
            let device = self.device_name(bdi).unwrap_or_default();
            for writer in self.writers(bdi, WRITERS_MAX)? {
                let Some(writer) = writer.filter(|_| walk.budget.take(1).is_some()) else {
                    walk.found.is_whole = false;
                    break;
                };
                for list in lists {
                    let whole = walk.list(writer.wrapping_add(list), &device);
                    walk.found.is_whole &= whole.is_some();
                }
            }
        }
        let mut found = walk.found;
        found.files.sort_by_key(|file| (std::cmp::Reverse(file.dirty), file.facts.inode));
        found.files.truncate(max);
        Some(found)
    }
}

impl Walk<'_> {
    /// Counts the files of a list; `None` if it is torn.
    fn list(&mut self, head: u64, device: &str) -> Option<()> {
        let kernel = self.kernel;
        let place = kernel.layout.inode_writers?;
        for link in kernel.links(head, self.inodes_left) {
            let inode = link?.wrapping_sub(place);
            self.budget.take(1)?;
            self.inodes_left -= 1;
            self.file(inode, device)?;
        }
        Some(())
    }

    /// Counts the dirty pages of an inode; `None` if it is not one.
    fn file(&mut self, inode: u64, device: &str) -> Option<()> {
        let layout = &self.kernel.layout;
        let mapping = inode.wrapping_add(layout.inode_data);
        if self.kernel.u64(mapping.wrapping_add(layout.mapping_host))? != inode {
            return None;
        }
        let pages = self.marked_pages(mapping)?;
        if pages == 0 {
            // Only the inode itself is dirty.
            return Some(());
        }
        let dirty =
            pages.checked_mul(PAGE).filter(|dirty| *dirty <= self.kernel.memory.length())?;
        self.cache.begin();
        let found = self.cache.inode(self.kernel, self.names, inode, 0)?;
        let mut facts = found.facts;
        facts.kind = match found.nature {
            Nature::File | Nature::Mover => Kind::Data,
            Nature::Directory => Kind::Directory,
            Nature::Internal | Nature::Mounted(_) => Kind::Metadata,
            Nature::Device => Kind::Device,
        };
        self.found.dirty = self.found.dirty.checked_add(dirty)?;
        self.found.files.push(DirtyFile { facts, device: device.to_owned(), dirty });
        Some(())
    }

    /// The number of pages of a mapping that its tree marks as dirty.
    fn marked_pages(&mut self, mapping: u64) -> Option<u64> {
        let layout = &self.kernel.layout;
        let tree = mapping.wrapping_add(layout.mapping_pages?);
        let root = self.kernel.u64(tree.wrapping_add(layout.pages_root?))?;
        match root {
            0 => Some(0),
            // The only page is at index 0. Its mark is in the tree's flags, whose position depends
            // on the kernel's configuration; the page has the same mark.
            root if root.trailing_zeros() >= 2 => self.is_dirty(root).map(u64::from),
            root => self.marked_in_node(root, 0, tree, None),
        }
    }

    /// Whether the page whose structure is at an address is dirty.
    fn is_dirty(&mut self, page: u64) -> Option<bool> {
        let flags = self.pages.flags(self.kernel, page)?;
        Some(flags >> self.kernel.dirty.dirty_bit? & 1 != 0)
    }

    /// The number of marked pages below an entry that refers to a node.
    fn marked_in_node(
        &mut self,
        entry: u64,
        parent: u64,
        tree: u64,
        above: Option<u8>,
    ) -> Option<u64> {
        if entry & 3 != INTERNAL || entry <= NODE_MIN {
            return None;
        }
        self.budget.take(1)?;
        let layout = &self.kernel.layout;
        let node = entry & !3;
        let object = self.kernel.object(node);
        let shift = self.kernel.u8(node.wrapping_add(layout.tree_shift?))?;
        // A node names its parent and its tree. Each level divides an index of the one above.
        if shift > SHIFT_MAX
            || shift % SLOT_BITS != 0
            || above.is_some_and(|above| shift.checked_add(SLOT_BITS) != Some(above))
            || object.u64(layout.tree_parent?)? != parent
            || object.u64(layout.tree_array?)? != tree
        {
            return None;
        }
        let slots = layout.tree_slots?;
        let mut marks = object.u64(layout.tree_marks?)?;
        let mut sum = 0_u64;
        while marks != 0 {
            let slot = u64::from(marks.trailing_zeros());
            marks &= marks - 1;
            let child = object.u64(slots.wrapping_add(slot * 8))?;
            let pages = if child & 3 == INTERNAL && child > NODE_MIN {
                self.marked_in_node(child, node, tree, Some(shift))?
            } else if child == 0 || child & 3 != 0 {
                // Only pages are marked.
                return None;
            } else {
                // A page. If it is larger than an entry, references to this one follow.
                let sibling = slot << 2 | INTERNAL;
                let mut count = 1;
                while slot + count < SLOTS
                    && object.u64(slots.wrapping_add((slot + count) * 8))? == sibling
                {
                    count += 1;
                }
                // A page that Btrfs has truncated in part keeps its mark in the tree until it is
                // written next, and is no longer dirty.
                match count << shift {
                    1 => 1,
                    _ if !self.is_dirty(child)? => 0,
                    pages => pages,
                }
            };
            sum = sum.checked_add(pages)?;
        }
        Some(sum)
    }
}
