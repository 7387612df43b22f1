//! Pages of files that processes have changed through mappings.
//!
//! A processor marks the entry of a page table when it writes to the page. Since 2.6.19, Linux
//! write-protects the pages of shared mappings of files that it writes back: the first write to a
//! page causes a fault, in which the kernel counts the page as dirty. So a page that is marked in
//! an entry and that the kernel does not count is an exception, which is reported separately.

use std::collections::HashSet;

use fathom_guest_memory::GuestMemory;

use crate::kernel::Kernel;
use crate::pages::PageCache;
use crate::vmcoreinfo::PAGE;

/// The most processes that are examined.
const PROCESSES_MAX: usize = 1 << 16;
/// The most nodes of trees of mappings, and the most levels of one tree.
const NODES_MAX: u32 = 1 << 20;
const LEVELS_MAX: u32 = 12;
/// The most entries of page tables that are read.
const ENTRIES_MAX: u64 = 1 << 25;
/// The types of nodes of maple trees (`enum maple_type`), and the bits of a pointer to a node that
/// have the type.
const LEAF: u64 = 1;
const RANGE: u64 = 2;
const RANGE_WITH_GAPS: u64 = 3;
const TYPE_SHIFT: u64 = 3;
const TYPE_MASK: u64 = 15;
const NODE_MASK: u64 = 0xff;
/// A tree's pointer to its first node has these low bits. Pointers to nodes are above the minimum.
const INTERNAL: u64 = 2;
const INTERNAL_MIN: u64 = 4096;
/// `VM_SHARED` of `vm_flags`.
const SHARED: u64 = 8;
/// The bits of an entry of a page table. The second mark of a written page is the kernel's own, for
/// pages that are write-protected again (`_PAGE_SAVED_DIRTY`).
const PRESENT: u64 = 1;
const LARGE: u64 = 1 << 7;
const WRITTEN: u64 = 1 << 6 | 1 << 58;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// The end of the addresses of processes, with five levels of page tables.
const USER_END: u64 = 1 << 56;

/// Pages of files that processes have changed through mappings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MappedDirty {
    /// The pages that entries of page tables mark as written, in bytes.
    pub marked: u64,
    /// Those of them that the kernel does not count as dirty, in bytes.
    pub unknown: u64,
    /// The number of processes that were examined.
    pub processes: u64,
    /// Whether all mappings were examined. Otherwise the guest changed them meanwhile, or there are
    /// too many.
    pub is_whole: bool,
}

struct Walk<'k> {
    kernel: &'k Kernel,
    pages: PageCache,
    /// The devices whose pages are written back.
    bdis: HashSet<u64>,
    /// A bit for each page of the guest's memory that was counted.
    seen: Vec<u64>,
    nodes_left: u32,
    entries_left: u64,
    found: MappedDirty,
}

impl Kernel {
    /// Counts the pages of files that processes have changed through mappings. Takes about 5 ns for
    /// each page of a shared mapping of a file. `None` if the kernel's structures are not known.
    pub fn mapped_dirty(&self) -> Option<MappedDirty> {
        let layout = &self.layout;
        let place = layout.task_memory?;
        let first = self.places.first_task?;
        let bdis = self.bdis()?.flatten().collect();
        let mut walk = Walk {
            kernel: self,
            pages: PageCache::default(),
            bdis,
            seen: vec![0; (self.memory.length() / PAGE / 64 + 1) as usize],
            nodes_left: NODES_MAX,
            entries_left: ENTRIES_MAX,
            found: MappedDirty { is_whole: true, ..MappedDirty::default() },
        };
        let mut spaces = HashSet::new();
        for link in self.links(first.wrapping_add(layout.task_list), PROCESSES_MAX) {
            let Some(link) = link else {
                walk.found.is_whole = false;
                break;
            };
            let task = link.wrapping_sub(layout.task_list);
            // A thread of the kernel has no memory of its own.
            let memory = self.u64(task.wrapping_add(place));
            walk.found.is_whole &= memory.is_some();
            let Some(memory) = memory.filter(|memory| *memory != 0 && spaces.insert(*memory))
            else {
                continue;
            };
            walk.found.processes += 1;
            let whole = walk.process(memory);
            walk.found.is_whole &= whole.is_some();
        }
        Some(walk.found)
    }
}

impl Walk<'_> {
    /// Examines the mappings of a process; `None` if they are torn.
    fn process(&mut self, memory: u64) -> Option<()> {
        let layout = &self.kernel.layout;
        let tables = self.kernel.pointer(memory.wrapping_add(layout.memory_tables?))?;
        let tables = self.kernel.space.direct(tables)?;
        match self.kernel.u64(memory.wrapping_add(layout.memory_areas?))? {
            0 => Some(()),
            root if root & 3 == INTERNAL && root > INTERNAL_MIN => {
                self.node(root, memory, tables, 0)
            }
            // The only mapping.
            root => self.area(root, memory, tables),
        }
    }

    /// Examines the mappings below a node of a maple tree.
    fn node(&mut self, entry: u64, memory: u64, tables: u64, level: u32) -> Option<()> {
        self.nodes_left = self.nodes_left.checked_sub(1)?;
        let layout = &self.kernel.layout;
        let kind = entry >> TYPE_SHIFT & TYPE_MASK;
        let (pivots, slots) = match kind {
            LEAF | RANGE => (layout.range_pivots?, layout.range_slots?),
            RANGE_WITH_GAPS => (layout.gaps_pivots?, layout.gaps_slots?),
            _ => return None,
        };
        let node = entry & !NODE_MASK;
        let object = self.kernel.object(node);
        // A node that was removed is its own parent.
        if level == LEVELS_MAX || object.u64(layout.node_parent_of?)? & !NODE_MASK == node {
            return None;
        }
        let count = slots.checked_sub(pivots)? / 8;
        for index in 0..=count.min(64) {
            // The last entry in use has no pivot, or the greatest one. What follows is left over.
            let pivot = if index < count { object.u64(pivots + index * 8)? } else { 0 };
            let child = object.u64(slots + index * 8)?;
            let is_last = pivot == 0 && index > 0 || index == count;
            if kind == LEAF {
                // Numbers mark addresses that are reserved.
                if child != 0 && child.trailing_zeros() >= 2 {
                    self.area(child, memory, tables)?;
                }
            } else if child > INTERNAL_MIN {
                self.node(child, memory, tables, level + 1)?;
            } else if child != 0 || !is_last {
                return None;
            }
            if is_last || pivot == u64::MAX {
                break;
            }
        }
        Some(())
    }

    /// Examines a mapping.
    fn area(&mut self, area: u64, memory: u64, tables: u64) -> Option<()> {
        let layout = &self.kernel.layout;
        let object = self.kernel.object(area);
        let (start, end) = (object.u64(layout.area_start?)?, object.u64(layout.area_end?)?);
        if object.u64(layout.area_memory?)? != memory || start >= end || end > USER_END {
            return None;
        }
        let file = object.u64(layout.area_file?)?;
        if object.u64(layout.area_flags?)? & SHARED == 0 || file == 0 {
            return Some(());
        }
        let mapping = self.kernel.pointer(file.wrapping_add(layout.file_mapping?))?;
        let inode = self.kernel.pointer(mapping.wrapping_add(layout.mapping_host))?;
        if mapping.wrapping_sub(layout.inode_data) != inode || !self.is_written_back(inode)? {
            return Some(());
        }
        let levels = self.kernel.space.levels();
        self.table(tables, 12 + 9 * (levels - 1), 0, start..end, mapping)
    }

    /// Whether the pages of an inode are written to a device, in contrast to those of tmpfs.
    fn is_written_back(&self, inode: u64) -> Option<bool> {
        let layout = &self.kernel.layout;
        let super_block = self.kernel.pointer(inode.wrapping_add(layout.inode_sb))?;
        let devices = self.kernel.places.device_super.and_then(|place| self.kernel.u64(place));
        if devices == Some(super_block) {
            return Some(true);
        }
        let bdi = self.kernel.u64(super_block.wrapping_add(layout.sb_bdi?))?;
        Some(self.bdis.contains(&bdi))
    }

    /// Examines the entries of a page table for a range of addresses. The table is at a
    /// guest-physical address, its first entry is for the address `base`, and each entry for
    /// `1 << shift` bytes.
    fn table(
        &mut self,
        table: u64,
        shift: u32,
        base: u64,
        range: std::ops::Range<u64>,
        mapping: u64,
    ) -> Option<()> {
        let first = (range.start.max(base) - base) >> shift;
        let last = (range.end - 1 - base) >> shift;
        for index in first..=last.min(511) {
            self.entries_left = self.entries_left.checked_sub(1)?;
            let entry = self.kernel.memory.u64(table + index * 8)?;
            if entry & PRESENT == 0 {
                continue;
            }
            let own = base + (index << shift);
            if shift > 12 && (entry & LARGE == 0 || shift > 30) {
                let part = range.start.max(own)..range.end.min(own + (1 << shift));
                self.table(entry & ADDRESS, shift - 9, own, part, mapping)?;
            } else if entry & WRITTEN != 0 {
                let size = 1_u64 << shift;
                let start = entry & ADDRESS & !(size - 1);
                let first = range.start.max(own) - own;
                let last = (range.end - own).min(size);
                let mut offset = first & !(PAGE - 1);
                while offset < last {
                    self.entries_left = self.entries_left.checked_sub(1)?;
                    self.page(start + offset, mapping);
                    offset += PAGE;
                }
            }
        }
        Some(())
    }

    /// Counts a page that an entry marks as written, once.
    fn page(&mut self, physical: u64, mapping: u64) {
        // An entry of a device's memory has no page, and one that has just been changed another.
        let Some((own, flags)) = self.pages.mapping_and_flags(self.kernel, physical) else {
            return;
        };
        let Some(place) = page_number(&self.kernel.memory, physical) else { return };
        let Some(word) = self.seen.get_mut((place / 64) as usize) else { return };
        let bit = 1 << (place % 64);
        if own != mapping || *word & bit != 0 {
            return;
        }
        *word |= bit;
        self.found.marked += PAGE;
        let is_known = self.kernel.dirty.dirty_bit.is_some_and(|bit| flags >> bit & 1 != 0);
        if !is_known {
            self.found.unknown += PAGE;
        }
    }
}

/// The number of the page at `address`, counted over all regions.
fn page_number(memory: &GuestMemory, address: u64) -> Option<u64> {
    let mut before = 0;
    for region in memory.regions() {
        let offset = address.wrapping_sub(region.start);
        if offset < region.length {
            return Some((before + offset) / PAGE);
        }
        before += region.length;
    }
    None
}
