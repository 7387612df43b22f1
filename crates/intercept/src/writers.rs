//! The table of the processes that wrote a guest's pages, in memory that the daemon and an
//! interceptor share.
//!
//! ```text
//!      0  magic, version, number of slots, number of pages, number of stops of each hook
//!    128  the state of each hook, and when it is put back
//!   4096  slots of 64 bytes, each with a process
//!      …  a word of 32 bits for each page of the guest's memory:
//!         counter:4  generation:12  slot:16; 0 is none
//! ```
//!
//! A slot is used again for another process, with another generation, when all have been used. A
//! page with an earlier generation then has no known writer. The counter changes each time that a
//! page becomes dirty, so that the daemon forgets a writer only if nothing has happened since it
//! looked.
//!
//! Either side may write anything: what is read is checked, and a wrong entry costs an insight.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fstat, ftruncate,
    memfd_create,
};

use crate::hook::Hook;
use crate::mapping::Mapping;
use crate::message::VERSION;

/// The first word of the table: `FATHOMWR`.
const MAGIC: u64 = u64::from_le_bytes(*b"FATHOMWR");
/// The number of slots for processes.
const SLOTS: usize = 1 << 16;
const SLOTS_START: usize = 4096;
const SLOT_LENGTH: usize = 64;
const PAGES_START: usize = SLOTS_START + SLOTS * SLOT_LENGTH;
/// The most pages of a guest: 16 TiB.
const PAGES_MAX: u64 = 1 << 32;
/// The place of the number of pages.
const PAGE_COUNT: usize = 16;
/// The generations of a slot, without 0. They are also all the bits of a generation.
const GENERATIONS: u32 = (1 << 12) - 1;
/// The place in a slot of the instant before which calls of its process are not to be noted; its
/// lowest bits are the slot's generation.
const DECLINED: usize = 40;
/// The bits of an entry with its slot and the generation of that.
const SLOT_BITS: u32 = 0x0fff_ffff;
/// The length of a command (`TASK_COMM_LEN`).
const COMMAND: usize = 16;
/// The highest number of a process (`PID_MAX_LIMIT`).
const PROCESS_MAX: u32 = 4 << 20;

/// A process that wrote a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Writer {
    /// The process number.
    pub process_id: u32,
    /// The start of the process, in nanoseconds since the guest's boot.
    pub start_ns: u64,
    /// The command, ended by a zero byte if it is shorter.
    pub command: [u8; COMMAND],
}

impl Writer {
    /// The bytes of the command.
    pub fn command(&self) -> &[u8] {
        self.command.split(|byte| *byte == 0).next().unwrap_or_default()
    }
}

/// The table of the writers of pages.
pub struct Writers {
    mapping: Mapping,
    pages: u64,
    /// The file, on the side of the interceptor.
    file: Option<OwnedFd>,
}

impl Writers {
    /// An empty table for the pages of a guest's memory up to the guest-physical address
    /// `memory_end`, and its file.
    ///
    /// # Errors
    /// When there is too little memory, or the guest has too much.
    pub fn create(memory_end: u64) -> io::Result<(Self, OwnedFd)> {
        let pages = memory_end.div_ceil(4096);
        if pages > PAGES_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let length = PAGES_START as u64 + 4 * pages;
        let file =
            memfd_create(c"fathom-writers", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, length)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let table = Self::map(&file, length, pages)?;
        table.wide(0).store(MAGIC, Ordering::Relaxed);
        table.word(8).store(VERSION as u32, Ordering::Relaxed);
        table.word(12).store(SLOTS as u32, Ordering::Relaxed);
        table.wide(PAGE_COUNT).store(pages, Ordering::Release);
        Ok((table, file))
    }

    /// The table in a file that another process has made.
    ///
    /// # Errors
    /// When it is no table of this version.
    pub fn open(file: &OwnedFd) -> io::Result<Self> {
        let length = u64::try_from(fstat(file)?.st_size).unwrap_or(0);
        let pages = length.checked_sub(PAGES_START as u64).map(|bytes| bytes / 4);
        let pages = pages.filter(|pages| *pages <= PAGES_MAX).ok_or(io::ErrorKind::InvalidData)?;
        let mut table = Self::map(file, length, pages)?;
        table.file = Some(file.try_clone()?);
        let is_ours = table.wide(0).load(Ordering::Acquire) == MAGIC
            && u64::from(table.word(8).load(Ordering::Relaxed)) == VERSION
            && table.word(12).load(Ordering::Relaxed) == SLOTS as u32
            && table.wide(PAGE_COUNT).load(Ordering::Relaxed) == pages;
        if is_ours { Ok(table) } else { Err(io::ErrorKind::InvalidData.into()) }
    }

    fn map(file: &OwnedFd, length: u64, pages: u64) -> io::Result<Self> {
        let length = usize::try_from(length).map_err(|_| io::ErrorKind::InvalidData)?;
        Ok(Self { mapping: Mapping::of(file, length)?, pages, file: None })
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        self.mapping.word(offset)
    }

    pub(crate) fn wide(&self, offset: usize) -> &AtomicU64 {
        self.mapping.wide(offset)
    }

    /// The word of a page of the guest's memory, by its number.
    fn page(&self, number: u64) -> Option<&AtomicU32> {
        (number < self.pages).then(|| self.word(PAGES_START + 4 * number as usize))
    }

    /// The entry of a page; 0 if it has none.
    pub fn entry(&self, number: u64) -> u32 {
        self.page(number).map_or(0, |page| page.load(Ordering::Acquire))
    }

    /// Removes the entry of a page, if it is still this one.
    pub fn forget(&self, number: u64, entry: u32) {
        if let Some(page) = self.page(number).filter(|_| entry != 0) {
            let _ = page.compare_exchange(entry, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// The process that wrote a page last before it became dirty, if it is known.
    pub fn writer(&self, number: u64) -> Option<Writer> {
        // First: an entry that is read later is right for every page that was dirty by now.
        if self.is_away(Hook::Pages) {
            return None;
        }
        let entry = self.entry(number);
        self.process(entry & SLOT_BITS).filter(|_| entry != 0)
    }

    /// The process of a slot, which is a result of [`Slots::slot`]; `None` if another process has
    /// got the slot since.
    pub fn process(&self, entry: u32) -> Option<Writer> {
        let slot = SLOTS_START + SLOT_LENGTH * (entry & 0xffff) as usize;
        let generation = entry >> 16 & GENERATIONS;
        let sequence = self.word(slot).load(Ordering::Acquire);
        if sequence % 2 != 0 || self.word(slot + 4).load(Ordering::Relaxed) != generation {
            return None;
        }
        let mut writer = Writer {
            process_id: self.word(slot + 8).load(Ordering::Relaxed),
            start_ns: self.wide(slot + 16).load(Ordering::Relaxed),
            ..Writer::default()
        };
        for (place, half) in writer.command.chunks_exact_mut(8).enumerate() {
            let word = self.wide(slot + 24 + 8 * place).load(Ordering::Relaxed);
            half.copy_from_slice(&word.to_le_bytes());
        }
        fence(Ordering::Acquire);
        let is_whole = self.word(slot).load(Ordering::Relaxed) == sequence
            && (1..=PROCESS_MAX).contains(&writer.process_id)
            && !writer.command().is_empty();
        is_whole.then_some(writer)
    }

    /// Says that calls of the process of a slot are not to be noted before an instant of the host's
    /// monotonic clock. `entry` is as for [`process`](Self::process).
    pub fn decline(&self, entry: u32, until_ns: u64) {
        let generation = u64::from(entry >> 16 & GENERATIONS);
        let word = until_ns & !u64::from(GENERATIONS) | generation;
        self.declined(entry).store(word, Ordering::Relaxed);
    }

    /// Whether calls of the process of a slot are not to be noted.
    pub fn is_declined(&self, entry: u32, now_ns: u64) -> bool {
        let word = self.declined(entry).load(Ordering::Relaxed);
        // What was said of an earlier process of the slot has another generation.
        word & u64::from(GENERATIONS) == u64::from(entry >> 16 & GENERATIONS) && now_ns < word
    }

    fn declined(&self, entry: u32) -> &AtomicU64 {
        self.wide(SLOTS_START + SLOT_LENGTH * (entry & 0xffff) as usize + DECLINED)
    }

    /// Notes that the process of a slot wrote a page. `slot` is the result of [`Slots::slot`]. If
    /// `keeps` is set, a page that has an entry keeps it.
    pub fn note(&self, number: u64, slot: u32, keeps: bool) {
        let Some(page) = self.page(number) else { return };
        let before = page.load(Ordering::Relaxed);
        if before == 0 || !keeps {
            let counter = (before >> 28).wrapping_add(1) << 28;
            page.store(counter | slot & SLOT_BITS, Ordering::Release);
        }
    }

    /// Removes the entries of all pages, on the side of the interceptor.
    ///
    /// # Errors
    /// Those of the system. Some entries may be left.
    pub fn clear(&self) -> io::Result<()> {
        let file = self.file.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if self.pages > 0 {
            fallocate(file, flags, PAGES_START as u64, 4 * self.pages)?;
        }
        Ok(())
    }

    fn fill(&self, slot: u16, generation: u32, writer: &Writer) {
        let place = SLOTS_START + SLOT_LENGTH * usize::from(slot);
        let sequence = self.word(place);
        let next = (sequence.load(Ordering::Relaxed) | 1).wrapping_add(2);
        sequence.store(next, Ordering::Relaxed);
        fence(Ordering::Release);
        self.word(place + 4).store(generation, Ordering::Relaxed);
        self.word(place + 8).store(writer.process_id, Ordering::Relaxed);
        self.wide(place + 16).store(writer.start_ns, Ordering::Relaxed);
        for (number, half) in writer.command.chunks_exact(8).enumerate() {
            let mut eight = [0; 8];
            eight.copy_from_slice(half);
            let word = u64::from_le_bytes(eight);
            self.wide(place + 24 + 8 * number).store(word, Ordering::Relaxed);
        }
        sequence.store(next.wrapping_add(1), Ordering::Release);
    }
}

/// The slots of processes, on the side that notes them.
#[derive(Debug, Default)]
pub struct Slots {
    by_process: HashMap<Writer, u32>,
    /// The processes of the slots, in the order of the slots.
    used: Vec<Writer>,
    next: usize,
    generation: u32,
}

impl Slots {
    /// The slot of a process, with its generation. A new process gets the slot that was given away
    /// first, if all are used. A process whose command has changed since (`execve`) gets a new one.
    pub fn slot(&mut self, table: &Writers, writer: &Writer) -> u32 {
        let place = match self.by_process.entry(*writer) {
            Entry::Occupied(known) => return *known.get(),
            Entry::Vacant(place) => place,
        };
        if self.next % SLOTS == 0 {
            self.generation = self.generation % GENERATIONS + 1;
        }
        let number = self.next % SLOTS;
        let slot = self.generation << 16 | number as u32;
        place.insert(slot);
        self.next += 1;
        if let Some(before) = self.used.get_mut(number) {
            let before = std::mem::replace(before, *writer);
            self.by_process.remove(&before);
        } else {
            self.used.push(*writer);
        }
        table.fill(number as u16, self.generation, writer);
        slot
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writer(process_id: u32, command: &str) -> Writer {
        let mut bytes = [0; COMMAND];
        bytes[..command.len()].copy_from_slice(command.as_bytes());
        Writer { process_id, start_ns: u64::from(process_id) * 1000, command: bytes }
    }

    #[test]
    fn both_sides_see_the_writers() {
        let (daemon, file) = Writers::create(1 << 20).unwrap();
        let other = Writers::open(&file).unwrap();
        let mut slots = Slots::default();
        let (one, two) = (writer(1, "one"), writer(2, "0123456789012345"));
        let (first, second) = (slots.slot(&other, &one), slots.slot(&other, &two));
        assert_eq!(slots.slot(&other, &one), first);
        other.note(7, first, false);
        other.note(8, second, false);
        other.note(1 << 40, second, false);
        assert_eq!(daemon.writer(7), Some(one));
        assert_eq!(daemon.writer(8), Some(two));
        assert_eq!(two.command().len(), 16);
        assert_eq!((daemon.writer(9), daemon.writer(u64::MAX)), (None, None));
        // A thread of the kernel writes a page again.
        other.note(7, second, true);
        assert_eq!(daemon.writer(7), Some(one));
        // A page that became dirty again keeps its writer.
        let entry = daemon.entry(7);
        other.note(7, first, false);
        daemon.forget(7, entry);
        assert_eq!(daemon.writer(7), Some(one));
        daemon.forget(7, daemon.entry(7));
        assert_eq!(daemon.writer(7), None);
    }

    #[test]
    fn a_slot_that_is_used_again_is_another_writer() {
        let (table, _file) = Writers::create(8 << 12).unwrap();
        let mut slots = Slots::default();
        let first = slots.slot(&table, &writer(1, "first"));
        table.note(0, first, false);
        for process in 2..=SLOTS as u32 {
            slots.slot(&table, &writer(process, "many"));
        }
        assert_eq!(table.writer(0), Some(writer(1, "first")));
        let again = slots.slot(&table, &writer(SLOTS as u32 + 1, "next"));
        assert_eq!((again & 0xffff, again >> 16), (0, 2));
        assert_eq!(table.writer(0), None);
        // The first process has no slot any more.
        let back = slots.slot(&table, &writer(1, "first"));
        assert_eq!(back & 0xffff, 1);
        assert_eq!(slots.by_process.len(), SLOTS);
    }

    #[test]
    fn a_process_is_declined_for_a_while() {
        let (table, _file) = Writers::create(8 << 12).unwrap();
        let mut slots = Slots::default();
        let (one, two) = (slots.slot(&table, &writer(1, "a")), slots.slot(&table, &writer(2, "b")));
        assert!(!table.is_declined(one, 1) && !table.is_declined(one, u64::MAX));
        table.decline(one, 5_000_000);
        assert!(table.is_declined(one, 4_900_000) && !table.is_declined(two, 1));
        assert!(!table.is_declined(one, 5_000_000));
        assert_eq!(table.process(one), Some(writer(1, "a")));
        // Another process of the slot is not.
        for process in 3..=SLOTS as u32 + 1 {
            slots.slot(&table, &writer(process, "many"));
        }
        let next = slots.slot(&table, &writer(SLOTS as u32 + 2, "next"));
        table.decline(two, u64::MAX);
        assert!(next & 0xffff == 1 && !table.is_declined(next, 1));
    }

    #[test]
    fn a_file_of_another_kind_is_refused() {
        let file = memfd_create(c"other", MemfdFlags::CLOEXEC).unwrap();
        assert!(Writers::open(&file).is_err());
        ftruncate(&file, PAGES_START as u64 + 400).unwrap();
        assert!(Writers::open(&file).is_err());
        assert!(Writers::create(u64::MAX).is_err());
    }

    #[test]
    fn a_torn_slot_is_no_writer() {
        let (table, _file) = Writers::create(1 << 20).unwrap();
        let slot = Slots::default().slot(&table, &writer(5, "five"));
        table.note(3, slot, false);
        assert!(table.writer(3).is_some());
        for (place, value) in [(0, 1), (4, 77), (8, 0), (8, PROCESS_MAX + 1)] {
            let word = table.word(SLOTS_START + place);
            let before = word.swap(value, Ordering::Relaxed);
            assert_eq!(table.writer(3), None);
            word.store(before, Ordering::Relaxed);
        }
        table.wide(SLOTS_START + 24).store(0, Ordering::Relaxed);
        assert_eq!(table.writer(3), None);
    }
}
