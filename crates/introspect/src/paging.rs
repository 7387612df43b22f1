//! The guest kernel's page tables: x86-64 with 4 or 5 levels and large pages.
//!
//! Intel SDM volume 3, chapter "Paging".

use fathom_guest_memory::GuestMemory;

use crate::vmcoreinfo::{PAGE, VmcoreInfo};

/// The end of physical addresses, which have at most 52 bits.
const ADDRESS_END: u64 = 1 << 52;
/// The virtual address of the kernel's image (`__START_KERNEL_map`).
const KERNEL_MAP: u64 = 0xffff_ffff_8000_0000;
/// The length of the range of the image, from [`KERNEL_MAP`] on, in bytes (`KERNEL_IMAGE_SIZE`).
const KERNEL_MAP_LENGTH: u64 = 1 << 30;
const PRESENT: u64 = 1;
const LARGE: u64 = 1 << 7;
/// The address bits of an entry.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// The part of a memory at physical addresses that a processor has.
pub(crate) fn addressable(memory: &GuestMemory) -> GuestMemory {
    memory.part(|region| region.end() <= ADDRESS_END)
}

/// The kernel's address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AddressSpace {
    root: u64,
    levels: u32,
    /// The number that is added to an offset in the image to get its physical address
    /// (`phys_base`).
    physical_base: u64,
    /// The start and the length of the direct map of physical memory. The length is 0 until it is
    /// known.
    direct: u64,
    direct_length: u64,
}

impl AddressSpace {
    /// The address space of a note's kernel.
    pub fn new(note: &VmcoreInfo) -> Option<Self> {
        let table = note.symbol("init_top_pgt").or_else(|| note.symbol("swapper_pg_dir"))?;
        let physical_base = note.number("phys_base")? as u64;
        let five = note.number("pgtable_l5_enabled").is_some_and(|enabled| enabled != 0);
        let offset = table.checked_sub(KERNEL_MAP)?;
        (offset < KERNEL_MAP_LENGTH).then(|| Self {
            root: offset.wrapping_add(physical_base) & ADDRESS,
            levels: if five { 5 } else { 4 },
            physical_base,
            direct: 0,
            direct_length: 0,
        })
    }

    /// Assumes that physical memory up to `length` is mapped linearly from `start` on, if some
    /// samples confirm it. Returns whether they do.
    pub fn set_direct(&mut self, memory: &GuestMemory, start: u64, length: u64) -> bool {
        // The direct map lies below the kernel's image, so the sum of an address in it and a
        // member's offset never wraps around.
        if start.checked_add(length).is_none_or(|end| end > KERNEL_MAP) {
            return false;
        }
        let mut samples = memory.regions().iter().flat_map(|region| {
            let last = region.length.saturating_sub(PAGE);
            [region.start, region.start + region.length / 2, region.start + last]
        });
        // Low memory and memory that was plugged in later may be missing. So at least one sample
        // must be mapped, and none may be mapped to another address.
        let mut seen = 0;
        let fits = samples.all(|physical| {
            match self.walk(memory, start.wrapping_add(physical & !(PAGE - 1))) {
                Some(found) => {
                    seen += 1;
                    found == physical & !(PAGE - 1)
                }
                None => true,
            }
        });
        if fits && seen > 0 {
            (self.direct, self.direct_length) = (start, length);
        }
        fits && seen > 0
    }

    /// The levels of the page tables.
    pub fn levels(&self) -> u32 {
        self.levels
    }

    /// The start of the direct map of physical memory.
    pub fn direct_start(&self) -> u64 {
        self.direct
    }

    /// The physical address of a virtual address in the direct map, without a walk of the page
    /// tables.
    #[inline]
    pub fn direct(&self, address: u64) -> Option<u64> {
        let offset = address.wrapping_sub(self.direct);
        (offset < self.direct_length).then_some(offset)
    }

    /// The physical address of a virtual address.
    pub fn translate(&self, memory: &GuestMemory, address: u64) -> Option<u64> {
        if let Some(physical) = self.direct(address) {
            return Some(physical);
        }
        self.walk(memory, address)
    }

    /// Adds the physical addresses that a read of a virtual address reads, entries of page tables
    /// included.
    pub fn lines(&self, memory: &GuestMemory, address: u64, lines: &mut Vec<u64>) {
        let physical = match self.direct(address) {
            Some(physical) => Some(physical),
            None => self.walk_through(memory, address, |entry| lines.push(entry)),
        };
        lines.extend(physical);
    }

    /// Walks the page tables.
    pub fn walk(&self, memory: &GuestMemory, address: u64) -> Option<u64> {
        self.walk_through(memory, address, |_| {})
    }

    /// Walks the page tables. Calls `visit` with the physical address of each entry.
    #[inline]
    fn walk_through(
        &self,
        memory: &GuestMemory,
        address: u64,
        mut visit: impl FnMut(u64),
    ) -> Option<u64> {
        // Addresses have 48 or 57 bits; the bits above repeat the highest of them.
        let bits = 12 + 9 * self.levels;
        let high = (address as i64) >> (bits - 1);
        if high != 0 && high != -1 {
            return None;
        }
        let mut table = self.root;
        let mut shift = bits - 9;
        loop {
            let index = (address >> shift) & 511;
            visit(table + index * 8);
            let entry = memory.u64(table + index * 8)?;
            if entry & PRESENT == 0 {
                return None;
            }
            if shift == 12 || (entry & LARGE != 0 && shift <= 30) {
                let mask = (1_u64 << shift) - 1;
                return Some((entry & ADDRESS & !mask) | (address & mask));
            }
            table = entry & ADDRESS;
            shift -= 9;
        }
    }

    /// The number at a virtual address.
    pub fn u64(&self, memory: &GuestMemory, address: u64) -> Option<u64> {
        if address % PAGE > PAGE - 8 {
            let mut bytes = [0; 8];
            self.read(memory, address, &mut bytes)?;
            return Some(u64::from_le_bytes(bytes));
        }
        memory.u64(self.translate(memory, address)?)
    }

    /// The number at a virtual address.
    pub fn u32(&self, memory: &GuestMemory, address: u64) -> Option<u32> {
        let mut bytes = [0; 4];
        self.read(memory, address, &mut bytes)?;
        Some(u32::from_le_bytes(bytes))
    }

    /// Copies the bytes at a virtual address, page by page; `None` if any of them is missing.
    pub fn read(&self, memory: &GuestMemory, mut address: u64, mut bytes: &mut [u8]) -> Option<()> {
        while !bytes.is_empty() {
            let physical = self.translate(memory, address)?;
            let count = ((PAGE - address % PAGE) as usize).min(bytes.len());
            let (head, rest) = bytes.split_at_mut(count);
            memory.read(physical, head)?;
            address = address.wrapping_add(count as u64);
            bytes = rest;
        }
        Some(())
    }

    /// The text at a virtual address, up to a zero byte or `length_max` bytes.
    pub fn text(&self, memory: &GuestMemory, address: u64, length_max: usize) -> Option<String> {
        let mut bytes = [0; 256];
        let length = length_max.min(bytes.len());
        let mut done = 0;
        while done < length {
            // This reads to the end of the page only: the next page may be missing.
            let at = address.wrapping_add(done as u64);
            let count = ((PAGE - at % PAGE) as usize).min(length - done);
            self.read(memory, at, &mut bytes[done..done + count])?;
            if let Some(end) = bytes[done..done + count].iter().position(|byte| *byte == 0) {
                done += end;
                break;
            }
            done += count;
        }
        Some(printable(&bytes[..done]))
    }
}

/// A guest's text in a form that is safe to display: invalid UTF-8, control characters and marks
/// that change the direction of writing are replaced.
pub(crate) fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let is_bad = |c: char| {
        c.is_control()
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    if text.contains(is_bad) { text.replace(is_bad, "\u{fffd}") } else { text.into_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guests_text_does_not_control_the_terminal() {
        assert_eq!(printable("päge 1".as_bytes()), "päge 1");
        assert_eq!(printable(b"a\x1b[2Jb\nc"), "a\u{fffd}[2Jb\u{fffd}c");
        assert_eq!(printable("x\u{202e}gnp.exe".as_bytes()), "x\u{fffd}gnp.exe");
        assert_eq!(printable(b"\xff"), "\u{fffd}");
    }
}
