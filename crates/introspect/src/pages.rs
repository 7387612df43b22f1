//! Pages: from an address of guest memory to the inode whose content it caches.

use crate::kernel::Kernel;
use crate::vmcoreinfo::PAGE;

/// The pages of page structures that a queue remembers the places of; a power of two. One covers
/// 256 KiB of the guest's memory.
const PLACES: usize = 4096;
/// The low bits of `page.mapping` that say it is no file's: anonymous or movable memory.
const MAPPING_FLAGS: u64 = 3;
/// The low bits of `page.memcg_data` that are flags, and those of them that say it is no group's.
const GROUP_FLAGS: u64 = 7;
const GROUP_OTHERS: u64 = 3;

/// The bits that can be clear in a word that masks the address of a part to that of its head: the
/// largest page has 1 GiB, and its structures 16 MiB. No page structure is above such a word.
const MASK_LOW: u64 = (1 << 30) - 1;

/// What a page holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Page {
    /// Content of a file or a block device.
    Cached {
        /// The address of the inode.
        inode: u64,
        /// The address of the `mem_cgroup` that it is charged to, or 0.
        memory_group: u64,
        /// Whether the page cache has it read now, or written now.
        transfer: Transfer,
    },
    /// A process's own memory.
    Anonymous,
    /// The kernel's.
    Other,
}

/// What the page cache itself does with a page, by the page's flags. A page of the page cache that
/// a program reads or writes a device with has none of these set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Transfer {
    /// It is locked and has no content yet.
    pub is_read: bool,
    /// It is being written back.
    pub is_written: bool,
}

/// Where the structures of pages are in physical memory: their part of the page tables does not
/// change, so a walk is done once.
pub(crate) struct PageCache {
    /// Virtual and physical page of each; the virtual one is never 0.
    places: Box<[(u64, u64)]>,
}

impl Default for PageCache {
    fn default() -> Self {
        Self { places: vec![(0, 0); PLACES].into() }
    }
}

impl PageCache {
    fn physical(&mut self, kernel: &Kernel, address: u64) -> Option<u64> {
        let page = address & !(PAGE - 1);
        let place = &mut self.places[(address / PAGE) as usize & (PLACES - 1)];
        if place.0 != page {
            *place = (page, kernel.space.walk(&kernel.memory, page)?);
        }
        Some(place.1 + address % PAGE)
    }

    /// What the page with its structure at `address` holds; `None` where that is torn or none.
    pub fn page(&mut self, kernel: &Kernel, mut address: u64) -> Option<Page> {
        let layout = &kernel.layout;
        if !kernel.is_page(address) {
            return None;
        }
        let mut page = kernel.memory.window(self.physical(kernel, address)?);
        let head = page.u64(layout.page_compound_head)?;
        if head & 1 != 0 {
            // A part of a larger page: its head tells. The word is the head's address, or, where
            // all bits above those of the largest page are set, what masks this one's to it.
            address = if head | MASK_LOW == u64::MAX { address & head } else { head & !1 };
            if !kernel.is_page(address) {
                return None;
            }
            page = kernel.memory.window(self.physical(kernel, address)?);
        }
        let flags = page.u64(layout.page_flags)?;
        // A head knows that it is one.
        if head & 1 != 0 && kernel.places.head_bit.is_some_and(|bit| flags >> bit & 1 == 0) {
            return None;
        }
        if kernel.places.slab_type.is_none() {
            if kernel.places.slab_bit.is_some_and(|bit| flags >> bit & 1 != 0) {
                return Some(Page::Other);
            }
        } else if let Some((place, slab)) = layout.page_type.zip(kernel.places.slab_type) {
            if page.u32(place)? >> 24 == slab {
                return Some(Page::Other);
            }
        }
        let mapping = page.u64(layout.page_mapping)?;
        if mapping & MAPPING_FLAGS != 0 {
            return Some(if mapping & 1 != 0 { Page::Anonymous } else { Page::Other });
        }
        // A mapping is embedded in its own inode, which it names: two structures that check each
        // other, so what is not one is found out.
        let place = kernel.space.direct(mapping)?;
        let inode = kernel.memory.window(place).u64(layout.mapping_host)?;
        if inode == 0 || mapping.wrapping_sub(layout.inode_data) != inode {
            return Some(Page::Other);
        }
        let charged = layout.page_memcg.and_then(|place| page.u64(place));
        let memory_group = match charged {
            Some(charged) if charged & GROUP_OTHERS == 0 => charged & !GROUP_FLAGS,
            _ => 0,
        };
        let has = |bit: Option<u64>| bit.is_some_and(|bit| flags >> bit & 1 != 0);
        let places = &kernel.places;
        let is_read = has(places.locked_bit) && !has(places.uptodate_bit);
        let transfer = Transfer { is_read, is_written: has(places.writeback_bit) };
        Some(Page::Cached { inode, memory_group, transfer })
    }
}

impl Kernel {
    /// The address of the `struct page` of a guest-physical address.
    pub(crate) fn page_of(&self, physical: u64) -> u64 {
        self.places.pages.wrapping_add((physical / PAGE).wrapping_mul(self.layout.page_size))
    }

    /// Whether an address can be a `struct page`'s.
    fn is_page(&self, address: u64) -> bool {
        let offset = address.wrapping_sub(self.places.pages);
        // Nearly all kernels have 64 bytes: no division then.
        let (number, rest) = match self.layout.page_size {
            64 => (offset / 64, offset % 64),
            size => (offset / size, offset % size),
        };
        let address = number.checked_mul(PAGE);
        rest == 0 && address.is_some_and(|address| self.memory.contains(address))
    }
}
