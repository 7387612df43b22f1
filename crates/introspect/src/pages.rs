//! Pages: the inode whose content a page of guest memory caches.

use fathom_guest_memory::MemoryWindow;

use crate::completion::Meaning;
use crate::kernel::Kernel;
use crate::vmcoreinfo::PAGE;

/// The number of pages of page structures in a queue's cache of addresses; a power of two. One
/// covers 256 KiB of the guest's memory.
const PLACES: usize = 4096;
/// The low bits of `page.mapping` of a page that is not a file's: anonymous or movable memory.
const MAPPING_FLAGS: u64 = 3;
/// The low bits of `page.memcg_data` that are flags, and those of them that mark a page without a
/// group.
const GROUP_FLAGS: u64 = 7;
const GROUP_OTHERS: u64 = 3;

/// The bits that can be clear in a word that masks the address of a part to that of its head. The
/// largest page has 1 GiB, and its structures 16 MiB. No page structure has an address above such a
/// word.
const MASK_LOW: u64 = (1 << 30) - 1;

/// The hash of a page in the table of those that wait (`hash_ptr`), the bits that it has there
/// (`PAGE_WAIT_TABLE_BITS`), and the entries of a list that are examined.
const WAIT_FACTOR: u64 = 0x61c8_8646_80b5_83eb;
const WAIT_BITS: u32 = 8;
const WAITERS_MAX: u32 = 64;

/// The use of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageUse {
    /// Content of a file or a block device.
    Cached {
        /// The address of the inode.
        inode: u64,
        /// The address of the `mem_cgroup` to which the page is charged, or 0.
        memory_group: u64,
        /// The place of the page in the content, in pages, if the kernel has it.
        index: Option<u64>,
        /// The number of the page, or of the first one of the larger page that it is part of.
        frame: u64,
        /// Whether the page cache itself reads or writes the page now.
        transfer: Transfer,
    },
    /// Private memory of a process.
    Anonymous,
    /// Memory of the kernel.
    Other,
}

/// The transfer of a page by the page cache itself, from the page's flags. If a program uses a page
/// of the page cache as the memory of its own I/O to a device, none of these flags is set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Transfer {
    /// The page is locked and has no content yet.
    pub is_read: bool,
    /// The page is being written back.
    pub is_written: bool,
}

/// A cache of the physical addresses of page structures. Their part of the page tables does not
/// change, so each walk is done once.
pub(crate) struct PageCache {
    /// The virtual and the physical page of each entry. The virtual one is never 0.
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

    /// The mapping and the flags of the page at a guest-physical address, from its head if it is
    /// part of a larger page.
    pub fn mapping_and_flags(&mut self, kernel: &Kernel, physical: u64) -> Option<(u64, u64)> {
        let layout = &kernel.layout;
        let address = kernel.page_of(physical);
        if !kernel.is_page(address) {
            return None;
        }
        let mut page = kernel.memory.window(self.physical(kernel, address)?);
        let head = page.u64(layout.page_compound_head)?;
        if let Some(head) = head_of(address, head) {
            if !kernel.is_page(head) {
                return None;
            }
            page = kernel.memory.window(self.physical(kernel, head)?);
        }
        Some((page.u64(layout.page_mapping)?, page.u64(layout.page_flags)?))
    }

    /// The first task that waits until the content of the page whose structure is at `address` is
    /// there, or, of a write, until the page has been written back.
    pub fn waiter(&mut self, kernel: &Kernel, address: u64, is_write: bool) -> Option<u64> {
        let (_, flags, head) = kernel.head(address, |address| self.physical(kernel, address))?;
        // The bit may be set although no task waits any more.
        let waiters = kernel.places.waiters_bit?;
        let places = &kernel.places;
        let awaited = if is_write { places.writeback_bit } else { places.locked_bit };
        if flags >> waiters & 1 == 0 { None } else { kernel.page_waiter(head, awaited?) }
    }

    /// The number of the page at a guest-physical address, or of the first one of the larger page
    /// that it is part of, and whether it has to be written.
    pub fn dirty_frame(&mut self, kernel: &Kernel, physical: u64) -> Option<(u64, bool)> {
        let address = kernel.page_of(physical);
        let (_, flags, head) = kernel.head(address, |address| self.physical(kernel, address))?;
        Some((kernel.frame_of(head), flags >> kernel.places.dirty_bit? & 1 != 0))
    }

    /// The flags of the page whose structure is at `address`.
    pub fn flags(&mut self, kernel: &Kernel, address: u64) -> Option<u64> {
        if !kernel.is_page(address) {
            return None;
        }
        let physical = self.physical(kernel, address)?;
        kernel.memory.window(physical).u64(kernel.layout.page_flags)
    }

    /// The use of the page whose structure is at `address`; `None` if the structure is torn or
    /// invalid.
    pub fn page(&mut self, kernel: &Kernel, address: u64) -> Option<PageUse> {
        let layout = &kernel.layout;
        let (page, flags, head) = kernel.head(address, |address| self.physical(kernel, address))?;
        if kernel.places.slab_type.is_none() {
            if kernel.places.slab_bit.is_some_and(|bit| flags >> bit & 1 != 0) {
                return Some(PageUse::Other);
            }
        } else if let Some((place, slab)) = layout.page_type.zip(kernel.places.slab_type) {
            if page.u32(place)? >> 24 == slab {
                return Some(PageUse::Other);
            }
        }
        let mapping = page.u64(layout.page_mapping)?;
        if mapping & MAPPING_FLAGS != 0 {
            return Some(if mapping & 1 != 0 { PageUse::Anonymous } else { PageUse::Other });
        }
        // A mapping is embedded in its own inode, and points to it. The two structures check each
        // other, so an invalid pointer is detected.
        let place = kernel.space.direct(mapping)?;
        let inode = kernel.memory.window(place).u64(layout.mapping_host)?;
        if inode == 0 || mapping.wrapping_sub(layout.inode_data) != inode {
            return Some(PageUse::Other);
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
        // A part of a larger page has its own place after that of the first.
        let part = address.wrapping_sub(head) / layout.page_size;
        let index = layout.page_index.and_then(|place| page.u64(place)?.checked_add(part));
        let frame = kernel.frame_of(head);
        Some(PageUse::Cached { inode, memory_group, index, frame, transfer })
    }
}

/// The address of the head of the larger page that the page at `address` is part of, from the word
/// that refers to it; `None` if it is not part of one.
fn head_of(address: u64, word: u64) -> Option<u64> {
    // The head has the facts. The word is the head's address, or, if all bits above those of the
    // largest page are set, the mask that gives it from this address.
    let head = if word | MASK_LOW == u64::MAX { address & word } else { word & !1 };
    (word & 1 != 0).then_some(head)
}

impl Kernel {
    /// The address of the `struct page` of a guest-physical address.
    pub(crate) fn page_of(&self, physical: u64) -> u64 {
        self.places.pages.wrapping_add((physical / PAGE).wrapping_mul(self.layout.page_size))
    }

    /// The number of the page whose structure is at `address`, which is one.
    fn frame_of(&self, address: u64) -> u64 {
        let offset = address.wrapping_sub(self.places.pages);
        if self.layout.page_size == 64 { offset / 64 } else { offset / self.layout.page_size }
    }

    /// The structure of the page at `address`, or of the first page if that is a part of a larger
    /// page, its flags and its address; `None` if the structure is torn or invalid. `place` returns
    /// the physical address of a structure.
    #[inline]
    fn head(
        &self,
        mut address: u64,
        mut place: impl FnMut(u64) -> Option<u64>,
    ) -> Option<(MemoryWindow<'_>, u64, u64)> {
        if !self.is_page(address) {
            return None;
        }
        let mut page = self.memory.window(place(address)?);
        let head = page.u64(self.layout.page_compound_head)?;
        if let Some(head) = head_of(address, head) {
            address = head;
            if !self.is_page(address) {
                return None;
            }
            page = self.memory.window(place(address)?);
        }
        let flags = page.u64(self.layout.page_flags)?;
        // The flags of a head mark it as one.
        if head & 1 != 0 && self.places.head_bit.is_some_and(|bit| flags >> bit & 1 == 0) {
            return None;
        }
        Some((page, flags, address))
    }

    /// Whether a task waits until the page with this guest-physical address has been written back.
    pub(crate) fn is_awaited(&self, physical: u64) -> bool {
        let place = |address| self.space.walk(&self.memory, address);
        let has = |flags: u64, bit: Option<u64>| bit.is_some_and(|bit| flags >> bit & 1 != 0);
        self.head(self.page_of(physical), place).is_some_and(|(_, flags, _)| {
            has(flags, self.places.waiters_bit) && has(flags, self.places.writeback_bit)
        })
    }

    /// The first task that waits for a bit of the flags of the page whose structure is at `page`,
    /// from the list of those that wait for pages with the same hash.
    #[cold]
    fn page_waiter(&self, page: u64, bit: u64) -> Option<u64> {
        let layout = &self.layout;
        let number = page.wrapping_mul(WAIT_FACTOR) >> (64 - WAIT_BITS);
        let list = self
            .places
            .page_waits?
            .wrapping_add(number.wrapping_mul(layout.wait_list_size?))
            .wrapping_add(layout.wait_list?);
        let (mut before, mut link) = (list, self.pointer(list)?);
        for _ in 0..WAITERS_MAX {
            // Each link points back.
            if link == list || self.u64(link.wrapping_add(8))? != before {
                return None;
            }
            let entry = link.wrapping_sub(layout.wait_link?);
            let wait = entry.wrapping_sub(layout.page_wait_entry?);
            if self.u64(wait.wrapping_add(layout.page_wait_page?))? == page
                && u64::from(self.u32(wait.wrapping_add(layout.page_wait_bit?))?) == bit
            {
                let private = self.pointer(entry.wrapping_add(layout.wait_private?))?;
                let function = self.u64(entry.wrapping_add(layout.wait_function?))?;
                return match self.meanings.get(function)? {
                    Meaning::PageWait => Some(private),
                    Meaning::RingPageWait => self.ring_task(private),
                    _ => None,
                };
            }
            (before, link) = (link, self.pointer(link)?);
        }
        None
    }

    /// Whether an address is a possible address of a `struct page`.
    fn is_page(&self, address: u64) -> bool {
        let offset = address.wrapping_sub(self.places.pages);
        // In nearly all kernels the structure has 64 bytes, so no division is necessary.
        let (number, rest) = match self.layout.page_size {
            64 => (offset / 64, offset % 64),
            size => (offset / size, offset % size),
        };
        let address = number.checked_mul(PAGE);
        rest == 0 && address.is_some_and(|address| self.memory.contains(address))
    }
}
