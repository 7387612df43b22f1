//! Pages that programs have written, from page tables alone: for guests that are not understood.
//!
//! No address of a page table is known, so each page of the guest's memory is examined for the form
//! of one. The processor marks an entry when a program writes to its page, and the mark stays until
//! the system removes it. So the marks include private memory of programs, and pages that have been
//! written to a disk since: they show how much programs have written to, not how much has to be
//! written to disks. Data that a program passes to the kernel (`write`) is not included, because
//! the kernel's own mappings are marked from the beginning.
//!
//! With a stride, only one page of so many is examined, from a given one on, and the sum is
//! multiplied.
//!
//! The paper: *Design Choices for Utilizing Disk Idleness in a Virtual Machine Environment*
//! (Elango, Krishnakumaran, Arpaci-Dusseau), section 4.2.

use fathom_guest_memory::GuestMemory;

use crate::vmcoreinfo::PAGE;

/// The greatest stride.
const STRIDE_MAX: u64 = 1 << 20;
/// The entries of a table.
const ENTRIES: u64 = 512;
/// The bits of an entry.
const PRESENT: u64 = 1;
const USER: u64 = 1 << 2;
const WRITTEN: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// The bits of the address of a large page that are 0. The lowest bit has another meaning.
const LARGE_REST: u64 = 0x1f_e000;
/// The number of entries of a table that are followed to see whether they lead to tables. A table
/// below may have been emptied meanwhile.
const NEXT: usize = 4;
/// From this stride on, it is asked of each page of the sample whether the guest has touched it.
const SPARSE: u64 = 8;
/// After so many pages and parts of the memory, the caller is asked whether to go on.
const STEPS: u64 = 64;

/// The entries of a page table.
#[derive(Default)]
struct Table {
    /// The number of marked entries for pages of programs that are not large.
    marked: u64,
    /// The number of marked entries for large pages of programs; `None` if no entry is for a large
    /// page.
    large: Option<u64>,
    /// The first entries for programs that are not for large pages; 0 if there are fewer.
    next: [u64; NEXT],
}

/// Pages that programs have written, by the marks in page tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WrittenPages {
    /// The marked entries for programs, in bytes of their pages, multiplied by the stride. A page
    /// in several tables counts for each of them.
    pub marked: u64,
    /// The standard error of `marked`, in bytes, estimated from the sample: it assumes that the
    /// tables lie at random. `None` if the sample has no table, which says nothing about the rest.
    pub error: Option<u64>,
    /// The number of page tables that were found.
    pub tables: u64,
    /// The number of pages of memory that were examined.
    pub examined: u64,
    /// Whether all pages of the sample were examined. Otherwise the time was over, and the numbers
    /// are those of a part of the memory.
    pub is_whole: bool,
}

impl WrittenPages {
    /// Counts the pages that programs have written, by the marks in page tables. Examines every
    /// `stride`th page of the memory that the guest has touched, from the page number `first` on. A
    /// stride is from 1 to 1,048,576. Ends early once `go_on`, which is called again and again, is
    /// false.
    /// Takes some 10 to 300 ns for each of them.
    pub fn count(
        memory: &GuestMemory,
        stride: u64,
        first: u64,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Self {
        let stride = stride.clamp(1, STRIDE_MAX);
        let mut found = Self::default();
        // The sum of the squares of the tables' marked entries.
        let mut squares = 0.0;
        found.is_whole = sample(memory, stride, first, go_on, |page| {
            found.examined += 1;
            if let Some(marked) = marked_entries(memory, page) {
                found.tables += 1;
                found.marked += marked * PAGE;
                squares += (marked * PAGE) as f64 * (marked * PAGE) as f64;
            }
        });
        found.error = match (stride, found.tables) {
            (1, _) => Some(0),
            (_, 0) => None,
            _ => {
                let (count, sum) = (found.examined as f64, found.marked as f64);
                let variance =
                    (squares - sum * sum / count).max(0.0) * (stride * (stride - 1)) as f64;
                Some(variance.sqrt() as u64)
            }
        };
        found.marked = found.marked.saturating_mul(stride);
        found
    }
}

/// Calls `visit` with the addresses of every `stride`th page, of those that the guest has touched.
/// Returns false if it ended early.
pub(super) fn sample(
    memory: &GuestMemory,
    stride: u64,
    first: u64,
    go_on: &mut dyn FnMut() -> bool,
    mut visit: impl FnMut(u64),
) -> bool {
    let next = |number: u64| number + (first % stride + stride - number % stride) % stride;
    let mut steps = 0_u64;
    let mut is_over = move || {
        steps += 1;
        steps % STEPS == 1 && !go_on()
    };
    for region in memory.regions() {
        let end = region.start + region.length;
        if stride >= SPARSE {
            // Finding the end of a touched part takes time for each of its pages, so it is only
            // asked whether a page was touched.
            let mut number = next(region.start.div_ceil(PAGE));
            while (number + 1).saturating_mul(PAGE) <= end {
                if is_over() {
                    return false;
                }
                let Some(touched) = region.touched_from(number * PAGE) else { break };
                if touched / PAGE > number {
                    number = next(touched / PAGE);
                    continue;
                }
                visit(number * PAGE);
                number += stride;
            }
            continue;
        }
        for (start, end) in region.touched(region.start) {
            let mut number = next(start.div_ceil(PAGE));
            if is_over() {
                return false;
            }
            while (number + 1).saturating_mul(PAGE) <= end {
                if is_over() {
                    return false;
                }
                visit(number * PAGE);
                number += stride;
            }
        }
    }
    true
}

/// The number of marked pages for programs in the page at an address; `None` if the page does not
/// have the form of a table with entries for pages of programs. An entry of a table above may be
/// for a large page, which counts as 512.
fn marked_entries(memory: &GuestMemory, page: u64) -> Option<u64> {
    let table = table_in(memory, page)?;
    // The tables above have the same form. Their other entries lead to tables.
    let mut next = table.next.iter().filter(|next| **next != 0);
    let is_above = next.any(|next| table_in(memory, next & ADDRESS).is_some());
    match table.large {
        Some(marked) if is_above || table.next[0] == 0 => Some(marked * ENTRIES),
        None if !is_above => Some(table.marked),
        // A table above without large pages, or a page of other data: a table does not have
        // entries for both sizes of pages.
        _ => None,
    }
}

/// The entries of the page at an address, if it has the form of a page table with entries for
/// programs.
fn table_in(memory: &GuestMemory, page: u64) -> Option<Table> {
    let mut table = Table::default();
    let (mut is_for_programs, mut present, mut absent, mut followed) = (false, 0, 0, 0);
    for index in 0..ENTRIES {
        let entry = memory.u64(page + index * 8)?;
        if entry & PRESENT == 0 {
            absent += u32::from(entry != 0);
            continue;
        }
        let address = entry & ADDRESS;
        if address == 0 || !memory.contains(address) {
            return None;
        }
        let is_marked = entry & (USER | WRITTEN) == USER | WRITTEN;
        if entry & LARGE != 0 {
            if address & LARGE_REST != 0 {
                return None;
            }
            *table.large.get_or_insert(0) += u64::from(is_marked);
        } else {
            table.marked += u64::from(is_marked);
            if entry & USER != 0 && followed < NEXT {
                table.next[followed] = entry;
                followed += 1;
            }
        }
        is_for_programs |= entry & USER != 0;
        present += 1;
    }
    // Other entries than 0 are pages that were swapped out. A page with many of them is one of
    // other data.
    (is_for_programs && absent <= present).then_some(table)
}
