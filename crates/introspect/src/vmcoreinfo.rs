//! The kernel's own note for crash dumps: plain text with the addresses of the structures from
//! which all others are found. `Documentation/admin-guide/kdump/vmcoreinfo.rst` of Linux.

use fathom_guest_memory::GuestMemory;

use std::collections::HashMap;
use std::time::Instant;

/// The size of a page, in bytes, and the greatest length of a note.
pub(crate) const PAGE: u64 = 4096;
/// The length of the header and the name (`VMCOREINFO`, padded) of an ELF note, which precede the
/// text in one of its copies.
const NOTE_HEADER: u64 = 24;
/// The most notes that a search returns: a guest can write any number of them.
const NOTES_MAX: usize = 16;
/// The number of pages examined between two reads of the clock.
const PAGES_PER_CLOCK_READ: u32 = 4096;
/// The cost of finding the start and the end of a touched part, as a number of examined pages.
const PAGES_PER_PART: u32 = 64;
/// The most pages with the beginning of a note that are read.
const CANDIDATES_MAX: usize = 1024;

/// One note.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VmcoreInfo {
    /// The guest-physical address of the note's page.
    pub address: u64,
    text: Vec<u8>,
    values: HashMap<String, String>,
}

impl VmcoreInfo {
    /// Reads the note in the page at `address`.
    pub fn read(memory: &GuestMemory, address: u64) -> Option<Self> {
        let mut page = vec![0; PAGE as usize];
        memory.read(address, &mut page)?;
        let start = if page.starts_with(b"OSRELEASE=") {
            0
        } else if is_note(&page) {
            NOTE_HEADER as usize
        } else {
            return None;
        };
        let text = &page[start..];
        let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
        let text = text[..end].to_vec();
        let values: HashMap<_, _> = text
            .split(|byte| *byte == b'\n')
            .filter_map(|line| std::str::from_utf8(line).ok()?.split_once('='))
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect();
        let whole = values.contains_key("OSRELEASE") && values.contains_key("PAGESIZE");
        whole.then_some(Self { address, text, values })
    }

    /// Whether the same note is still at its address.
    pub fn is_there(&self, memory: &GuestMemory) -> bool {
        Self::read(memory, self.address).is_some_and(|now| now.text == self.text)
    }

    /// The kernel's release.
    pub fn release(&self) -> &str {
        self.values.get("OSRELEASE").map_or("", String::as_str)
    }

    /// The virtual address of a symbol.
    pub fn symbol(&self, name: &str) -> Option<u64> {
        u64::from_str_radix(self.values.get(&format!("SYMBOL({name})"))?, 16).ok()
    }

    /// The value of a number, by its name.
    pub fn number(&self, name: &str) -> Option<i64> {
        self.values.get(&format!("NUMBER({name})"))?.parse().ok()
    }

    /// Whether both notes have the same text: the kernel keeps two copies of its note.
    pub fn equals(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

fn is_note(head: &[u8]) -> bool {
    head.starts_with(&11_u32.to_le_bytes()) && head[12..].starts_with(b"VMCOREINFO\0")
}

/// The result of a search.
#[derive(Debug, Default)]
pub(crate) struct FoundNotes {
    /// The notes, each text once.
    pub notes: Vec<VmcoreInfo>,
    /// The guest-physical address at which to continue, if there was not enough time.
    pub rest: Option<u64>,
}

/// Examines the beginning of each page that the guest has touched, from the address `start` on,
/// until the time `end`.
pub(crate) fn find(memory: &GuestMemory, start: u64, end: Option<Instant>) -> FoundNotes {
    const RELEASE: u64 = u64::from_le_bytes(*b"OSRELEAS");
    const VMCORE: u64 = u64::from_le_bytes(*b"VMCOREIN");
    let mut found = FoundNotes::default();
    let mut candidates = 0;
    let mut work = 0;
    for region in memory.regions() {
        if region.start + region.length <= start {
            continue;
        }
        for (from, to) in region.touched(start) {
            let mut page = from.next_multiple_of(PAGE);
            work += PAGES_PER_PART;
            loop {
                if work >= PAGES_PER_CLOCK_READ {
                    work = 0;
                    // Each search makes progress, however little time it has.
                    if page > start && end.is_some_and(|end| Instant::now() >= end) {
                        found.rest = Some(page);
                        return found;
                    }
                }
                if page.checked_add(PAGE).is_none_or(|next| next > to) {
                    break;
                }
                work += 1;
                let hit = match memory.u64(page) {
                    Some(RELEASE) => true,
                    // The first word of a note: the length of its name, then that of its text.
                    Some(word) if word as u32 == 11 => {
                        let (low, high) = (memory.u32(page + 12), memory.u32(page + 16));
                        low.zip(high).is_some_and(|(low, high)| {
                            u64::from(low) | u64::from(high) << 32 == VMCORE
                        })
                    }
                    _ => false,
                };
                if hit {
                    candidates += 1;
                    if let Some(note) = VmcoreInfo::read(memory, page) {
                        if !found.notes.iter().any(|known| known.equals(&note)) {
                            found.notes.push(note);
                        }
                    }
                    if found.notes.len() == NOTES_MAX || candidates == CANDIDATES_MAX {
                        return found;
                    }
                }
                page += PAGE;
            }
        }
    }
    found
}
