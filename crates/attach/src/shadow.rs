//! Shadow eviction: everything that takes a page away, but for taking it away.
//!
//! A page that nobody leases, and that is a folio of its own, is protected against writes in the
//! VMM and copied. At the guest's next write to it, or when its copy is dropped, the page must be
//! equal to the copy, unless somebody has had a lease for writing, which has made the copy invalid.
//! A page that is not equal is a *mismatch*: had it been evicted, a write would have been lost.
//!
//! ```text
//!           leave, protect, copy             write fault: compare, unprotect
//!  present ──────────────────────▶ copied ──────────────────────────────────▶ present
//!     ▲        │ a lease                │ a lease for writing                     ▲
//!     └────────┘ disturbed              └──▶ invalid ── write fault: unprotect ───┘
//! ```
//! The page stays where it is the whole time, so nothing here can harm the guest.

use std::collections::{HashMap, VecDeque};
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use fathom_failure::Failure;
use fathom_guest_memory::{LeaseTable, MemoryFile, PageWord, PagerLeases};

use crate::away;
use crate::counts::ShadowCounts;
use crate::daemon::DaemonProcess;
use crate::folios::{Folio, Folios};
use crate::look;
use crate::memory::{self, MappedMemory};
use crate::record;
use crate::store::{PAGE, Page};
use crate::tripwire::Tripwire;
use crate::userfault::UserFault;
use crate::vmm::Vmm;

/// The pages at which a sweep looks. Faults wait meanwhile, about ten microseconds for each.
const BATCH: usize = 32;
/// A page at which the guest has written counts as hot for so many sweeps of the memory.
const HOT_SWEEPS: u8 = 4;

/// The longest time of the comparisons at the end.
const FINISH_TIME_MAX: Duration = Duration::from_millis(100);

/// A copy of a page.
#[derive(Debug)]
struct PageCopy {
    bytes: Box<Page>,
    /// Distinguishes it from later copies of the page.
    number: u64,
}

/// A mapping of the VMM, with what belongs to it.
#[derive(Debug)]
struct Part {
    memory: MappedMemory,
    /// The table of its file.
    table: usize,
    /// For how many sweeps each page is hot.
    heat: Vec<u8>,
}

/// The shadow eviction of a guest.
#[derive(Debug)]
pub(crate) struct Shadow {
    parts: Vec<Part>,
    tables: Vec<PagerLeases>,
    folios: Folios,
    /// By their address in the VMM.
    copies: HashMap<u64, PageCopy>,
    /// The copies, the oldest first. Some have been dropped since.
    order: VecDeque<(u64, u64)>,
    next_number: u64,
    pages_max: usize,
    /// Where the sweep is: a part and a page.
    hand: (usize, u64),
    /// The pages at which the sweep has looked since it last found one.
    fruitless: u64,
    /// The faults since the oldest copy was last dropped for another.
    faults: u64,
    /// Whether the guest has done anything since the last interval.
    is_active: bool,
    pipe: (UnixStream, UnixStream),
    counts: ShadowCounts,
}

impl Shadow {
    /// A shadow of `memory` that copies at most `bytes`. Its tables of leases are in `folder`.
    ///
    /// # Errors
    /// When pages cannot be protected, or their folios and leases not be known.
    pub fn start(
        vmm: &Vmm,
        faults: &UserFault,
        memory: &[MappedMemory],
        folder: &Path,
        bytes: u64,
    ) -> Result<Self, Failure> {
        let cannot = |what: &str, error: &io::Error| {
            Failure::new(format!("cannot {what}: {error}"))
                .advise("run the pager as root, or without --shadow")
        };
        if !faults.can_protect() {
            return Err(Failure::new("the VMM's userfaultfd cannot protect pages").advise(
                "an earlier version has made it, or this kernel is too old: restart the machine, \
                 or leave out --shadow",
            ));
        }
        let folios = Folios::open(vmm).map_err(|error| cannot("see the kernel's pages", &error))?;
        folios
            .at(memory.first().map_or(0, |part| part.start), 1)
            .map_err(|error| cannot("see where pages are", &error))?;
        if memory::is_mapped_twice(memory) {
            return Err(Failure::new("the VMM maps a part of its guest's memory twice")
                .advise("leave out --shadow"));
        }
        let mut files: Vec<(MemoryFile, u64)> = Vec::new();
        let mut parts: Vec<Part> = Vec::new();
        for part in memory {
            let file = part.file();
            let end = part.offset + part.length();
            let table = files.iter().position(|(other, _)| *other == file).unwrap_or(files.len());
            match files.get_mut(table) {
                Some((_, most)) => *most = end.max(*most),
                None => files.push((file, end)),
            }
            let heat = vec![0; (part.length() / PAGE) as usize];
            parts.push(Part { memory: part.clone(), table, heat });
        }
        record::make_folder(folder, 0o711)
            .map_err(|error| cannot("make the folder of leases", &error))?;
        let owner = away::owner(vmm);
        let start = |(file, end): &(MemoryFile, u64)| {
            PagerLeases::start(folder, *file, end.div_ceil(PAGE), owner)
        };
        let tables = files.iter().map(start).collect::<io::Result<Vec<_>>>();
        let tables = tables.map_err(|error| cannot("make the table of leases", &error))?;
        let pipe = UnixStream::pair().map_err(|error| cannot("make a socket", &error))?;
        Ok(Self {
            parts,
            tables,
            folios,
            copies: HashMap::new(),
            order: VecDeque::new(),
            next_number: 0,
            pages_max: (bytes / PAGE) as usize,
            hand: (0, 0),
            fruitless: 0,
            faults: 0,
            is_active: false,
            pipe,
            counts: ShadowCounts { budget_bytes: bytes, ..ShadowCounts::default() },
        })
    }

    /// What it has done, and has now.
    pub fn counts(&self) -> ShadowCounts {
        ShadowCounts { copied_bytes: self.copies.len() as u64 * PAGE, ..self.counts.clone() }
    }

    /// Whether the processes `daemons`, which map the guest's memory, all take leases. Notes
    /// whether all of them let pages leave.
    ///
    /// # Errors
    /// The first that takes none.
    pub fn check_holders(&mut self, daemons: &[DaemonProcess]) -> Result<(), String> {
        self.counts.obstacle.clear();
        let admitted = look::admit(&self.tables, daemons);
        self.counts.obstacle = look::check_holders(&self.tables, daemons)
            .map_err(|reason| admitted.err().unwrap_or(reason))?;
        Ok(())
    }

    /// Whether a process does not let pages leave yet.
    pub fn has_obstacle(&self) -> bool {
        !self.counts.obstacle.is_empty()
    }

    /// Stops for a reason, or goes on if it is empty. A shadow that stops drops its copies.
    pub fn suspend(&mut self, faults: &UserFault, reason: &str) {
        if self.counts.suspended != reason {
            reason.clone_into(&mut self.counts.suspended);
        }
        if !reason.is_empty() {
            self.forget(faults);
        }
    }

    /// Whether there is something to do now, without a fault.
    pub fn is_busy(&self) -> bool {
        let pages: u64 = self.parts.iter().map(|part| part.heat.len() as u64).sum();
        let has_room = self.copies.len() < self.pages_max || self.faults > 0;
        self.counts.suspended.is_empty() && has_room && self.fruitless < pages * 2
    }

    /// Whether nothing has happened since the last interval, and it has nothing to do.
    pub fn is_quiet(&self) -> bool {
        self.counts.suspended.is_empty() && !self.is_active && !self.is_busy()
    }

    /// An interval has passed: a sweep that has found nothing may begin again, if the guest has
    /// done anything.
    pub fn rest(&mut self) {
        if std::mem::take(&mut self.is_active) {
            self.fruitless = 0;
        }
    }

    fn part_of(&self, address: u64) -> Option<usize> {
        self.parts.iter().position(|part| part.memory.range().contains(&address))
    }

    /// The table of a part's page, and the page in it.
    fn word(&self, part: usize, address: u64) -> (&LeaseTable, u64) {
        let part = &self.parts[part];
        let offset = address - part.memory.start + part.memory.offset;
        (self.tables[part.table].table(), offset / PAGE)
    }

    /// Whether nobody has had a lease for writing since the page was copied.
    fn is_valid(&self, part: usize, address: u64) -> bool {
        let (table, page) = self.word(part, address);
        table.word(page).is_copied()
    }

    /// Looks at the next pages, and copies those that could leave.
    pub fn sweep(&mut self, faults: &UserFault, tripwires: &[Tripwire]) {
        let (index, page) = self.hand;
        let Some(part) = self.parts.get_mut(index) else { return };
        let left = part.heat.len() as u64 - page;
        let count = left.min(BATCH as u64);
        let start = part.memory.start + page * PAGE;
        let end = page + count;
        self.hand = if end < part.heat.len() as u64 { (index, end) } else { (index + 1, 0) };
        if self.hand.0 == self.parts.len() {
            self.hand = (0, 0);
        }
        self.fruitless += count;
        // A VMM that has unmapped it has none.
        let Ok(found) = self.folios.at(start, count as usize) else { return };
        for (folio, at) in found.into_iter().zip(page..) {
            let address = start + (at - page) * PAGE;
            let heat = &mut self.parts[index].heat[at as usize];
            if *heat > 0 {
                *heat -= 1;
                continue;
            }
            match folio {
                Folio::Single if !self.copies.contains_key(&address) => {
                    if !self.make_room(faults, tripwires) {
                        return;
                    }
                    if self.copy(index, address, faults, tripwires) {
                        self.fruitless = 0;
                    }
                }
                Folio::Large => self.counts.large += 1,
                // An invalid copy is of no use.
                Folio::Single if !self.is_valid(index, address) => {
                    self.end(address, faults, tripwires);
                }
                Folio::Single | Folio::Absent => {}
            }
        }
    }

    /// Drops the oldest copy if there is no room. Not while the guest writes to none of them, so
    /// that an idle guest costs nothing.
    fn make_room(&mut self, faults: &UserFault, tripwires: &[Tripwire]) -> bool {
        while self.copies.len() >= self.pages_max {
            if self.faults == 0 {
                return false;
            }
            let Some((address, number)) = self.order.pop_front() else { return false };
            let is_it = self.copies.get(&address).is_some_and(|copy| copy.number == number);
            if is_it {
                self.faults -= 1;
                self.end(address, faults, tripwires);
            }
        }
        true
    }

    /// Copies a page. Returns whether it has one.
    fn copy(
        &mut self,
        part: usize,
        address: u64,
        faults: &UserFault,
        tripwires: &[Tripwire],
    ) -> bool {
        let (table, page) = self.word(part, address);
        if table.change(page, PageWord::leave).is_err() {
            self.counts.leased += 1;
            return false;
        }
        let own = address..address + PAGE;
        let bytes = match faults.protect(&own, true) {
            Ok(()) => self.read(part, address, tripwires),
            Err(_) => None,
        };
        let (table, page) = self.word(part, address);
        let copied = bytes.filter(|_| table.change(page, PageWord::copied).is_ok());
        let Some(bytes) = copied else {
            self.counts.disturbed += 1;
            self.release(part, address, faults);
            return false;
        };
        self.next_number += 1;
        let copy = PageCopy { bytes, number: self.next_number };
        self.order.push_back((address, copy.number));
        self.copies.insert(address, copy);
        self.counts.copies += 1;
        // Copies that were dropped leave entries behind.
        if self.order.len() > 2 * self.pages_max + 64 {
            let copies = &self.copies;
            self.order.retain(|(address, number)| {
                copies.get(address).is_some_and(|copy| copy.number == *number)
            });
        }
        true
    }

    /// The content of a page; `None` if it is missing.
    fn read(&self, part: usize, address: u64, tripwires: &[Tripwire]) -> Option<Box<Page>> {
        let at = address - self.parts[part].memory.start;
        let (write, mut read) = (&self.pipe.0, &self.pipe.1);
        tripwires.get(part)?.copy_page(at, write).ok()?;
        let mut bytes = Box::new([0; PAGE as usize]);
        read.read_exact(&mut bytes[..]).ok()?;
        Some(bytes)
    }

    /// The page is the guest's alone again.
    fn release(&self, part: usize, address: u64, faults: &UserFault) {
        let (table, page) = self.word(part, address);
        let _ = table.change(page, |word| Some(word.stay()).filter(|next| *next != word));
        let _ = faults.protect(&(address..address + PAGE), false);
    }

    /// Compares the copy of a page with it, and drops it. The page is protected.
    fn end(&mut self, address: u64, faults: &UserFault, tripwires: &[Tripwire]) {
        let (Some(copy), Some(part)) = (self.copies.remove(&address), self.part_of(address)) else {
            return;
        };
        let now = self.read(part, address, tripwires);
        let (table, page) = self.word(part, address);
        // After the page: whoever has a lease for writing since has cleared it.
        match now {
            _ if !table.word(page).is_copied() => self.counts.overwritten += 1,
            // QEMU has punched it.
            None => self.counts.vanished += 1,
            Some(now) if now == copy.bytes => self.counts.equal += 1,
            Some(_) => self.counts.mismatches += 1,
        }
        self.release(part, address, faults);
    }

    /// A thread has written to a protected page and waits.
    pub fn write_fault(&mut self, address: u64, faults: &UserFault, tripwires: &[Tripwire]) {
        let page = address & !(PAGE - 1);
        self.counts.write_faults += 1;
        self.faults += 1;
        self.is_active = true;
        if let Some(part) = self.part_of(page) {
            let at = (page - self.parts[part].memory.start) / PAGE;
            self.parts[part].heat[at as usize] = HOT_SWEEPS;
        }
        if self.copies.contains_key(&page) {
            self.end(page, faults, tripwires);
        } else {
            // Another thread's fault was served, or it was protected before a pager's death.
            let _ = faults.protect(&(page..page + PAGE), false);
        }
    }

    /// Missing pages of a range are about to come: QEMU has punched them. They will be other pages,
    /// and not protected, so the copies of the whole range are dropped.
    pub fn missing(&mut self, range: Range<u64>, faults: &UserFault, tripwires: &[Tripwire]) {
        self.is_active = true;
        for address in range.step_by(PAGE as usize) {
            self.end(address, faults, tripwires);
        }
    }

    /// Drops all copies without a comparison.
    fn forget(&mut self, faults: &UserFault) {
        for (address, _) in std::mem::take(&mut self.copies) {
            if let Some(part) = self.part_of(address) {
                self.release(part, address, faults);
            }
        }
        self.order.clear();
    }

    /// Drops all copies, and removes the tables of a VMM that has ended. Compares those for which
    /// there is time: the guest's faults wait.
    pub fn finish(
        mut self,
        faults: &UserFault,
        tripwires: &[Tripwire],
        has_ended: bool,
    ) -> ShadowCounts {
        let begun = Instant::now();
        for address in self.copies.keys().copied().collect::<Vec<_>>() {
            if begun.elapsed() > FINISH_TIME_MAX {
                break;
            }
            self.end(address, faults, tripwires);
        }
        self.forget(faults);
        let counts = self.counts();
        let tables = self.tables;
        // Who has a lease keeps it as long as the VMM runs.
        tables.into_iter().filter(|_| has_ended).for_each(PagerLeases::put_aside);
        counts
    }
}

#[cfg(test)]
mod tests;
