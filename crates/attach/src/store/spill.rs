//! How contents go from the store's memory to the swap file, and come from there.
//!
//! A page always leaves to memory first, and its content is moved later, oldest first, while the
//! contents in memory take more than they may. While it is being written, its entry is still that
//! in memory: the page can come back meanwhile, and leave again. So an entry changes only if the
//! write is the page's own, which it is as long as [`remove`](PageStore::remove) was not called.
//!
//! A write that fails changes nothing. A read that fails is tried again, for as long as a disk may
//! take to come back.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::map::SlotMap;
use super::queue::PageQueue;
use super::swap::{Completed, DirectPage, SwapFile, Write};
use super::{AT_MEMORY_MAX, CHUNK, Entry, PAGE, PLAIN_BYTES, Page, PageStore};

/// The most pages that are written at once.
const WRITE_PAGES: usize = 64;
/// How much more than they may contents take in memory before pages wait for the file.
const SLACK: u64 = 4 << 20;
/// For how long pages wait for one write. When it takes longer, they stay in memory.
const WRITE_TIME_MAX: Duration = Duration::from_secs(1);
/// A file that has not answered for longer is said not to.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);
/// The pause before a read that has failed is tried again.
const READ_PAUSE: Duration = Duration::from_millis(500);
/// When all reads have failed for so long, their pages are damaged: a path to a disk may take a
/// while to come back.
const FAILING_TIME_MAX: Duration = Duration::from_secs(60);
/// The same for a page that cannot be read while others can: about as long.
const FAILED_READS_MAX: u32 = 120;
/// How often content that is not what was written is read.
const DAMAGED_READS_MAX: u32 = 2;
/// The pause after a write that has failed; it becomes twice as long each time, up to the second.
const REST: Duration = Duration::from_secs(1);
const REST_MAX: Duration = Duration::from_secs(32);

/// What the swap file has done in a pager's life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SwapCounts {
    /// Pages written.
    pub written: u64,
    /// Pages read.
    pub read: u64,
    /// Writes and reads that have failed.
    pub failed: u64,
}

/// Who waits for a page that is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadFor {
    /// A thread of the VMM.
    Fault,
    /// A daemon.
    Daemon,
    /// Nobody: all pages come in.
    All,
}

/// What a read has come to.
#[derive(Debug)]
pub(crate) enum ReadContent {
    /// The page's content.
    Content(Box<DirectPage>),
    /// Something else, or nothing for too long.
    Damaged,
    /// The page is not in the file any more. Who waits for it tries again.
    Gone,
}

/// A page that has been read. Its entry is still there.
#[derive(Debug)]
pub(crate) struct ReadPage {
    /// Its number in the store.
    pub page: u64,
    pub content: ReadContent,
    pub reader: ReadFor,
    /// When it was first asked for.
    pub since: Instant,
}

/// A read that is under way, or that waits to be tried again.
#[derive(Debug)]
struct Reading {
    ticket: u64,
    attempts: u32,
    retry_at: Option<Instant>,
    reader: ReadFor,
    since: Instant,
}

/// A write that is under way: for each of its slots the page; none if it came back meanwhile.
#[derive(Debug)]
struct Writing {
    number: u64,
    pages: Vec<Option<u64>>,
    since: Instant,
}

/// The swap file of a store.
#[derive(Debug)]
pub(super) struct Swap {
    file: SwapFile,
    slots: SlotMap,
    pages: u64,
    /// The most bytes that contents may take in memory.
    memory_max: u64,
    /// Whether contents are moved to the file. Those who only bring pages in do not: they would
    /// keep the lock of the file.
    is_spilling: bool,
    /// Whether memory had no room for a content.
    is_pressed: bool,
    /// The pages with a content in memory, oldest first; with pages that have come back since.
    order: PageQueue,
    /// Those that do not become smaller. They go first, because memory gains nothing by them.
    plain: PageQueue,
    writing: Option<Writing>,
    reading: HashMap<u64, Reading>,
    /// The page of each read. Tickets are never used again: a read whose page came meanwhile is of
    /// no use.
    tickets: HashMap<u64, u64>,
    next_number: u64,
    /// Since when all reads have failed.
    failing_since: Option<Instant>,
    obstacle: String,
    rests_until: Option<Instant>,
    next_rest: Duration,
    counts: SwapCounts,
}

impl Swap {
    /// The swap file of so many slots of a guest with so many pages. Which slots are taken is not
    /// known yet.
    pub fn new(file: SwapFile, slots: u64, pages: u64, memory_max: u64) -> Self {
        Self {
            file,
            slots: SlotMap::new(slots),
            pages,
            memory_max,
            is_spilling: false,
            is_pressed: false,
            order: PageQueue::new(pages),
            plain: PageQueue::new(pages),
            writing: None,
            reading: HashMap::new(),
            tickets: HashMap::new(),
            next_number: 0,
            failing_since: None,
            obstacle: String::new(),
            rests_until: None,
            next_rest: REST,
            counts: SwapCounts::default(),
        }
    }

    /// Nothing is known of what is taken.
    pub fn forget(&mut self, slots: u64) {
        self.slots = SlotMap::new(slots);
        (self.order, self.plain) = (PageQueue::new(self.pages), PageQueue::new(self.pages));
        self.writing = None;
        self.reading.clear();
        self.tickets.clear();
    }

    /// An entry says that a slot is taken.
    pub fn occupy(&mut self, slot: u64) {
        // One that is taken twice is found by its checksum.
        let _ = self.slots.occupy(slot);
    }

    /// A page has a content of so many bytes in memory.
    pub fn push(&mut self, page: u64, length: usize) {
        if length == PLAIN_BYTES { self.plain.push(page) } else { self.order.push(page) }
    }

    /// A page that was taken from its queue is the next one again.
    fn put_back(&mut self, page: u64, length: usize) {
        if length == PLAIN_BYTES { self.plain.put_back(page) } else { self.order.put_back(page) }
    }

    /// Memory had no room for a content.
    pub fn press(&mut self) {
        self.is_pressed = true;
    }

    /// A page is not away any more, or has another content.
    pub fn cancel(&mut self, page: u64) {
        if let Some(reading) = self.reading.remove(&page) {
            self.tickets.remove(&reading.ticket);
        }
        let pages = self.writing.iter_mut().flat_map(|writing| &mut writing.pages);
        pages.filter(|written| **written == Some(page)).for_each(|written| *written = None);
    }

    /// The slot of a page that is not in the file any more is free.
    pub fn give(&mut self, slot: u64) {
        self.slots.give(slot);
    }

    fn is_resting(&self) -> bool {
        self.rests_until.is_some_and(|until| until > Instant::now())
    }

    /// Whether a page that does not become smaller can be taken. After a rest, one is tried.
    pub fn takes_plain(&self) -> bool {
        self.is_spilling && !self.is_resting() && !self.slots.is_full() && self.is_answering()
    }

    /// Whether no write takes very long.
    fn is_answering(&self) -> bool {
        let is_late = |writing: &Writing| writing.since.elapsed() > WRITE_TIME_MAX;
        !self.writing.as_ref().is_some_and(is_late)
    }

    /// Whether contents, which take so many bytes in memory, are to go to the file.
    fn has_work(&self, bytes: u64) -> bool {
        let is_over = bytes > self.memory_max || self.is_pressed;
        self.is_spilling && (is_over && !self.order.is_empty() || !self.plain.is_empty())
    }

    fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    fn read(&mut self, page: u64, slot: u64, reader: ReadFor) {
        let ticket = self.number();
        self.file.read(ticket, slot, reader == ReadFor::All);
        self.tickets.insert(ticket, page);
        let since = Instant::now();
        let new = || Reading { ticket, attempts: 0, retry_at: None, reader, since };
        let reading = self.reading.entry(page).or_insert_with(new);
        (reading.ticket, reading.retry_at) = (ticket, None);
        reading.attempts += 1;
    }

    /// Ends the read of a page.
    fn end(&mut self, page: u64, content: ReadContent) -> Option<ReadPage> {
        let Reading { reader, since, .. } = self.reading.remove(&page)?;
        Some(ReadPage { page, content, reader, since })
    }

    fn fail(&mut self, reason: String) {
        self.obstacle = reason;
        self.rests_until = Some(Instant::now() + self.next_rest);
        self.next_rest = (self.next_rest * 2).min(REST_MAX);
    }
}

impl PageStore {
    /// Has contents moved to the swap file from now on, or not.
    pub fn set_spilling(&mut self, is_spilling: bool) {
        self.swap.iter_mut().for_each(|swap| swap.is_spilling = is_spilling);
    }

    /// Sets how much memory contents may take before they go to the swap file, in bytes.
    pub fn set_memory_max(&mut self, bytes: u64) {
        if let Some(swap) = &mut self.swap {
            swap.memory_max = bytes;
            self.set_number(AT_MEMORY_MAX, bytes);
        }
    }

    /// Readable when the swap file has done something; `None` without one.
    pub fn swap_bell(&self) -> Option<BorrowedFd<'_>> {
        self.swap.as_ref().map(|swap| swap.file.as_fd())
    }

    /// Where the swap file is; `None` without one.
    pub fn swap_path(&self) -> Option<&Path> {
        self.swap.as_ref().map(|swap| swap.file.path())
    }

    /// What the swap file has done.
    pub fn swap_counts(&self) -> SwapCounts {
        self.swap.as_ref().map(|swap| swap.counts).unwrap_or_default()
    }

    /// The bytes of the swap file that contents take.
    pub fn swap_bytes(&self) -> u64 {
        self.swap.as_ref().map_or(0, |swap| swap.slots.used() * PAGE)
    }

    /// What is wrong with the swap file; empty if nothing is.
    pub fn swap_obstacle(&self) -> &str {
        let Some(swap) = &self.swap else { return "" };
        let reads = swap.reading.values().map(|reading| reading.since);
        let oldest = reads.chain(swap.writing.iter().map(|writing| writing.since)).min();
        match &*swap.obstacle {
            _ if swap.failing_since.is_some() => "the swap file cannot be read",
            "" if oldest.is_some_and(|since| since.elapsed() > ANSWER_TIME_MAX) => {
                "the disk of the swap file does not answer"
            }
            obstacle => obstacle,
        }
    }

    /// Whether a page may leave: not while contents wait to be moved to the swap file, unless that
    /// takes too long. If it cannot be written, they stay in memory, as without one.
    pub fn has_room(&self) -> bool {
        self.swap.as_ref().is_none_or(|swap| {
            let is_below = swap.memory_max.saturating_add(SLACK) > self.bytes();
            is_below || swap.is_resting() || !swap.is_answering()
        })
    }

    /// The pages that are being read.
    pub fn reads(&self) -> usize {
        self.swap.as_ref().map_or(0, |swap| swap.reading.len())
    }

    /// Whether a page is being read.
    pub fn is_reading(&self, page: u64) -> bool {
        self.swap.as_ref().is_some_and(|swap| swap.reading.contains_key(&page))
    }

    /// Has a page read that is in the swap file, unless it is being read. Returns false if it is
    /// not in the file.
    pub fn read(&mut self, page: u64, reader: ReadFor) -> bool {
        let Entry::Swapped { slot, .. } = self.entry(page) else { return false };
        let Some(swap) = &mut self.swap else { return false };
        if !swap.reading.contains_key(&page) {
            swap.read(page, slot, reader);
        }
        true
    }

    /// After how long [`progress`](Self::progress) has to be called, also if nothing is done.
    pub fn next_swap_work(&self) -> Option<Duration> {
        let swap = self.swap.as_ref()?;
        let retries = swap.reading.values().filter_map(|reading| reading.retry_at);
        let rest = swap.rests_until.filter(|_| swap.has_work(self.bytes()));
        let next = retries.chain(rest).min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }

    /// Goes on: takes what the swap file has done, tries again what has failed, and has contents
    /// moved to it if they take too much memory. Returns the pages that have been read.
    pub fn progress(&mut self) -> Vec<ReadPage> {
        let Some(swap) = &mut self.swap else { return Vec::new() };
        let mut pages = Vec::new();
        for completed in swap.file.completed() {
            match completed {
                Completed::Read { ticket, content } => pages.extend(self.end_read(ticket, content)),
                Completed::Written { write, result } => self.end_write(&write, result),
            }
        }
        self.retry(&mut pages);
        self.spill();
        pages
    }

    fn end_read(&mut self, ticket: u64, content: io::Result<Box<DirectPage>>) -> Option<ReadPage> {
        let swap = self.swap.as_mut()?;
        let page = swap.tickets.remove(&ticket)?;
        let entry = self.entry(page);
        let swap = self.swap.as_mut()?;
        let reading = swap.reading.get_mut(&page).filter(|reading| reading.ticket == ticket)?;
        let Entry::Swapped { checksum, .. } = entry else {
            return swap.end(page, ReadContent::Gone);
        };
        let is_lost = match content {
            Ok(content) if checksum_of(page, &content.0) == checksum => {
                swap.counts.read += 1;
                swap.failing_since = None;
                return swap.end(page, ReadContent::Content(content));
            }
            Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => {
                let since = *swap.failing_since.get_or_insert_with(Instant::now);
                since.elapsed() >= FAILING_TIME_MAX || reading.attempts >= FAILED_READS_MAX
            }
            // It has other content, or was cut off.
            _ => reading.attempts >= DAMAGED_READS_MAX,
        };
        swap.counts.failed += 1;
        if is_lost {
            return swap.end(page, ReadContent::Damaged);
        }
        reading.retry_at = Some(Instant::now() + READ_PAUSE);
        None
    }

    fn retry(&mut self, pages: &mut Vec<ReadPage>) {
        let Some(swap) = &mut self.swap else { return };
        let now = Instant::now();
        let is_due = |reading: &Reading| reading.retry_at.is_some_and(|at| at <= now);
        let due = swap.reading.iter().filter(|(_, reading)| is_due(reading));
        let due: Vec<(u64, ReadFor)> = due.map(|(page, reading)| (*page, reading.reader)).collect();
        for (page, reader) in due {
            let entry = self.entry(page);
            let Some(swap) = &mut self.swap else { return };
            match entry {
                Entry::Swapped { slot, .. } => swap.read(page, slot, reader),
                _ => pages.extend(swap.end(page, ReadContent::Gone)),
            }
        }
    }

    fn end_write(&mut self, write: &Write, result: io::Result<()>) {
        let Some(swap) = &mut self.swap else { return };
        // One of before the store was taken up anew has no slots.
        let Some(writing) = swap.writing.take_if(|writing| writing.number == write.number) else {
            return;
        };
        if let Err(error) = result {
            swap.counts.failed += 1;
            swap.fail(format!("the swap file cannot be written: {error}"));
            self.give_up(write, &writing.pages);
            return;
        }
        swap.obstacle.clear();
        (swap.next_rest, swap.rests_until, swap.is_pressed) = (REST, None, false);
        for (page, &(slot, ref block)) in writing.pages.into_iter().zip(&write.blocks) {
            match (page, page.map(|page| self.entry(page))) {
                (Some(page), Some(Entry::Packed { place, length })) => {
                    let checksum = checksum_of(page, &block.0);
                    self.publish(page, Entry::Swapped { slot, checksum });
                    self.free_packed(place, length);
                    if let Some(swap) = &mut self.swap {
                        swap.counts.written += 1;
                    }
                }
                // It came back while it was written.
                _ => self.swap.iter_mut().for_each(|swap| swap.slots.give(slot)),
            }
        }
    }

    /// Gives back what a write has taken that has failed.
    fn give_up(&mut self, write: &Write, pages: &[Option<u64>]) {
        for ((slot, _), page) in write.blocks.iter().zip(pages).rev() {
            let length = match page.map(|page| self.entry(page)) {
                Some(Entry::Packed { length, .. }) => Some(length),
                _ => None,
            };
            let Some(swap) = &mut self.swap else { return };
            swap.slots.give(*slot);
            if let (Some(page), Some(length)) = (page, length) {
                swap.put_back(*page, length);
            }
        }
    }

    /// Has the oldest contents written, if they take more memory than they may.
    fn spill(&mut self) {
        let bytes = self.bytes();
        let Some(swap) = &mut self.swap else { return };
        if !swap.has_work(bytes) || swap.is_resting() || swap.writing.is_some() {
            return;
        }
        if self.owner.is_lost() {
            swap.is_spilling = false;
            return;
        }
        swap.rests_until = None;
        // How much has to go, by the bytes that a page takes on average.
        let excess = (bytes.saturating_sub(swap.memory_max) / (CHUNK / 32)) as usize + 1;
        let packed = match bytes > swap.memory_max {
            _ if swap.is_pressed => WRITE_PAGES,
            true => excess.min(WRITE_PAGES),
            false => 0,
        };
        let mut pages: Vec<(u64, u64, usize)> = Vec::new();
        while pages.len() < WRITE_PAGES {
            let Some(swap) = &mut self.swap else { return };
            let is_wanted = pages.len() < packed;
            let next = swap.plain.pop().or_else(|| if is_wanted { swap.order.pop() } else { None });
            let Some(page) = next else { break };
            if let Entry::Packed { place, length } = self.entry(page) {
                // It may be in both queues: it was plain once.
                if !pages.iter().any(|(other, ..)| *other == page) {
                    pages.push((page, place, length));
                }
            }
        }
        self.write(&pages);
    }

    /// Has contents written, each with its page, place and length in memory.
    fn write(&mut self, pages: &[(u64, u64, usize)]) {
        let Some(swap) = &mut self.swap else { return };
        if pages.is_empty() {
            return;
        }
        let slots = swap.slots.take(pages.len());
        if slots.is_empty() {
            swap.fail("the swap file is full".into());
        }
        let (now, later) = pages.split_at(slots.len());
        for (page, _, length) in later.iter().rev() {
            swap.put_back(*page, *length);
        }
        let (mut blocks, mut written, mut free) = (Vec::new(), Vec::new(), Vec::new());
        for ((page, place, length), slot) in now.iter().zip(slots) {
            let mut content: Page = [0; PAGE as usize];
            // One that is damaged stays where it is.
            if self.unpack(*page, *place, *length, &mut content) == super::Found::Content {
                blocks.push((slot, DirectPage(content)));
                written.push(Some(*page));
            } else {
                free.push(slot);
            }
        }
        let Some(swap) = &mut self.swap else { return };
        for slot in free {
            swap.slots.give(slot);
        }
        if written.is_empty() {
            return;
        }
        let number = swap.number();
        swap.writing = Some(Writing { number, pages: written, since: Instant::now() });
        swap.file.write(Write { number, blocks });
    }
}

/// What an entry says of a content in the file.
fn checksum_of(page: u64, content: &Page) -> u32 {
    xxh3_64_with_seed(content, page) as u32
}
