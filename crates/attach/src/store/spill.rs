//! How contents go from the store's memory to the swap file, and come from there.
//!
//! A page always leaves to memory first, and its content is moved later, oldest first, while the
//! contents in memory take more than they may. While it is being written, its entry is still that in
//! memory: the page can come back meanwhile, and leave again. So an entry changes only if the write is
//! the page's own, which it is as long as [`remove`](PageStore::remove) was not called.
//!
//! A write that fails changes nothing. A read that fails is tried again, for as long as a disk may
//! take to come back.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::map::SlotMap;
use super::swap::{Block, Completed, SwapFile, Write};
use super::{CHUNK, Entry, PAGE, Page, PageStore};

/// The most pages that are written at once.
const WRITE_PAGES: usize = 64;
/// How much more than they may contents take in memory until no page leaves.
const SLACK: u64 = 4 << 20;
/// How often a read is tried, and the pause in between: half a minute.
const READS_MAX: u32 = 60;
const READ_PAUSE: Duration = Duration::from_millis(500);
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

/// A page that has been read.
pub(crate) struct ReadPage {
    /// Its number in the store.
    pub page: u64,
    /// Its content; none if it is damaged.
    pub content: Option<Box<Block>>,
    /// When it was first asked for.
    pub since: Instant,
}

/// A read that is under way, or that waits to be tried again.
#[derive(Debug)]
struct Reading {
    ticket: u64,
    attempts: u32,
    retry_at: Option<Instant>,
    since: Instant,
}

/// A write that is under way: for each slot from the first one on, the page; none if it came back
/// meanwhile.
#[derive(Debug)]
struct Writing {
    number: u64,
    slot: u64,
    pages: Vec<Option<u64>>,
}

/// The swap file of a store.
#[derive(Debug)]
pub(super) struct Swap {
    pub file: SwapFile,
    pub slots: SlotMap,
    /// The most bytes that contents may take in memory.
    memory_max: u64,
    /// Whether contents are moved to the file. Those who only bring pages in do not: they would
    /// keep the lock of the file.
    is_spilling: bool,
    /// The pages with a content in memory, oldest first; with pages that have come back since.
    order: VecDeque<u64>,
    /// Those that do not become smaller. They go first, because memory gains nothing by them.
    plain: VecDeque<u64>,
    writing: Option<Writing>,
    reading: HashMap<u64, Reading>,
    /// The page of each read. Tickets are never used again: a read whose page came meanwhile is of
    /// no use.
    tickets: HashMap<u64, u64>,
    next_number: u64,
    obstacle: String,
    rests_until: Option<Instant>,
    next_rest: Duration,
    counts: SwapCounts,
}

impl Swap {
    /// The swap file `file` of so many slots. Which of them are taken is not known yet.
    pub fn new(file: SwapFile, slots: u64, memory_max: u64) -> Self {
        Self {
            file,
            slots: SlotMap::new(slots),
            memory_max,
            is_spilling: false,
            order: VecDeque::new(),
            plain: VecDeque::new(),
            writing: None,
            reading: HashMap::new(),
            tickets: HashMap::new(),
            next_number: 0,
            obstacle: String::new(),
            rests_until: None,
            next_rest: REST,
            counts: SwapCounts::default(),
        }
    }

    /// Nothing is known of what is taken.
    pub fn forget(&mut self, slots: u64) {
        self.slots = SlotMap::new(slots);
        self.order.clear();
        self.plain.clear();
        self.writing = None;
        self.reading.clear();
        self.tickets.clear();
    }

    /// A page has a content in memory.
    pub fn push(&mut self, page: u64, is_plain: bool) {
        let queue = if is_plain { &mut self.plain } else { &mut self.order };
        queue.push_back(page);
    }

    /// A page is not away any more, or has another content.
    pub fn cancel(&mut self, page: u64) {
        if let Some(reading) = self.reading.remove(&page) {
            self.tickets.remove(&reading.ticket);
        }
        let pages = self.writing.iter_mut().flat_map(|writing| &mut writing.pages);
        pages.filter(|written| **written == Some(page)).for_each(|written| *written = None);
    }

    /// Whether a page that does not become smaller can be taken.
    pub fn takes_plain(&self) -> bool {
        self.obstacle.is_empty() && !self.slots.is_full()
    }

    fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    fn read(&mut self, page: u64, slot: u64) {
        let ticket = self.number();
        self.file.read(ticket, slot);
        self.tickets.insert(ticket, page);
        let now = Instant::now();
        let reading = self.reading.entry(page).or_insert_with(|| Reading {
            ticket,
            attempts: 0,
            retry_at: None,
            since: now,
        });
        (reading.ticket, reading.retry_at) = (ticket, None);
        reading.attempts += 1;
    }

    fn fail(&mut self, reason: String) {
        self.obstacle = reason;
        self.rests_until = Some(Instant::now() + self.next_rest);
        self.next_rest = (self.next_rest * 2).min(REST_MAX);
    }
}

impl PageStore {
    /// Has contents moved to the swap file from now on.
    pub fn allow_spilling(&mut self) {
        self.swap.iter_mut().for_each(|swap| swap.is_spilling = true);
    }

    /// Readable when the swap file has done something; `None` without one.
    pub fn swap_bell(&self) -> Option<BorrowedFd<'_>> {
        self.swap.as_ref().map(|swap| swap.file.as_fd())
    }

    /// Whether it has a swap file.
    pub fn has_swap(&self) -> bool {
        self.swap.is_some()
    }

    /// What the swap file has done.
    pub fn swap_counts(&self) -> SwapCounts {
        self.swap.as_ref().map(|swap| swap.counts).unwrap_or_default()
    }

    /// The bytes of the swap file that contents take.
    pub fn swap_bytes(&self) -> u64 {
        self.swap.as_ref().map_or(0, |swap| swap.slots.used() * PAGE)
    }

    /// Why nothing is moved to the swap file; empty if it can be.
    pub fn swap_obstacle(&self) -> &str {
        self.swap.as_ref().map_or("", |swap| &swap.obstacle)
    }

    /// Whether a page may leave: not while contents wait to be moved to the swap file.
    pub fn has_room(&self) -> bool {
        self.swap.as_ref().is_none_or(|swap| {
            swap.memory_max.saturating_add(SLACK) > self.bytes() || !swap.obstacle.is_empty()
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
    pub fn read(&mut self, page: u64) -> bool {
        let Entry::Swapped { slot, .. } = self.entry(page) else { return false };
        let Some(swap) = &mut self.swap else { return false };
        if !swap.reading.contains_key(&page) {
            swap.read(page, slot);
        }
        true
    }

    /// After how long [`progress`](Self::progress) has to be called, also if nothing is done.
    pub fn next_swap_work(&self) -> Option<Duration> {
        let swap = self.swap.as_ref()?;
        let retries = swap.reading.values().filter_map(|reading| reading.retry_at);
        let next = retries.chain(swap.rests_until).min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }

    /// Goes on: takes what the swap file has done, tries again what has failed, and has contents
    /// moved to it if they take too much memory. Returns the pages that have been read, whose
    /// entries are still there.
    pub fn progress(&mut self) -> Vec<ReadPage> {
        let Some(swap) = &mut self.swap else { return Vec::new() };
        let mut pages = Vec::new();
        for completed in swap.file.completed() {
            match completed {
                Completed::Read { ticket, content } => pages.extend(self.end_read(ticket, content)),
                Completed::Written { write, result } => self.end_write(&write, result),
            }
        }
        self.retry();
        self.spill();
        pages
    }

    fn end_read(&mut self, ticket: u64, content: io::Result<Box<Block>>) -> Option<ReadPage> {
        let swap = self.swap.as_mut()?;
        let page = swap.tickets.remove(&ticket)?;
        let entry = self.entry(page);
        let swap = self.swap.as_mut()?;
        let reading = swap.reading.get_mut(&page).filter(|reading| reading.ticket == ticket)?;
        let Entry::Swapped { checksum, .. } = entry else {
            swap.reading.remove(&page);
            return None;
        };
        let (content, attempts_max) = match content {
            Ok(content) if checksum_of(page, &content.0) == checksum => (Some(content), 0),
            Ok(_) => (None, DAMAGED_READS_MAX),
            // It was cut off.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => (None, DAMAGED_READS_MAX),
            Err(_) => (None, READS_MAX),
        };
        swap.counts.read += u64::from(content.is_some());
        swap.counts.failed += u64::from(content.is_none());
        if content.is_none() && reading.attempts < attempts_max {
            reading.retry_at = Some(Instant::now() + READ_PAUSE);
            return None;
        }
        let since = reading.since;
        swap.reading.remove(&page);
        Some(ReadPage { page, content, since })
    }

    fn retry(&mut self) {
        let Some(swap) = &mut self.swap else { return };
        let now = Instant::now();
        let is_due = |reading: &Reading| reading.retry_at.is_some_and(|at| at <= now);
        let due = swap.reading.iter().filter(|(_, reading)| is_due(reading));
        let due: Vec<u64> = due.map(|(page, _)| *page).collect();
        for page in due {
            let entry = self.entry(page);
            let Some(swap) = &mut self.swap else { return };
            match entry {
                Entry::Swapped { slot, .. } => swap.read(page, slot),
                _ => swap.cancel(page),
            }
        }
    }

    fn end_write(&mut self, write: &Write, result: io::Result<()>) {
        let Some(swap) = &mut self.swap else { return };
        let is_it = |writing: &&mut Writing| writing.number == write.number;
        // One of before the store was taken up anew has no slots.
        let Some(writing) = swap.writing.as_mut().filter(is_it) else { return };
        let pages = std::mem::take(&mut writing.pages);
        let first = writing.slot;
        swap.writing = None;
        if let Err(error) = result {
            (first..).zip(&pages).for_each(|(slot, _)| swap.slots.give(slot));
            for page in pages.into_iter().rev().flatten() {
                swap.order.push_front(page);
            }
            swap.counts.failed += 1;
            swap.fail(format!("the swap file cannot be written: {error}"));
            return;
        }
        swap.obstacle.clear();
        (swap.next_rest, swap.rests_until) = (REST, None);
        for ((slot, page), block) in (first..).zip(pages).zip(&write.blocks) {
            match (page, page.map(|page| self.entry(page))) {
                (Some(page), Some(Entry::Packed { place, length })) => {
                    let checksum = checksum_of(page, &block.0);
                    self.publish(page, Entry::Swapped { slot, checksum });
                    self.free_packed(place, length);
                    self.swapped += 1;
                    if let Some(swap) = &mut self.swap {
                        swap.counts.written += 1;
                    }
                }
                // It came back while it was written.
                _ => self.swap.iter_mut().for_each(|swap| swap.slots.give(slot)),
            }
        }
    }

    /// Has the oldest contents written, if they take more memory than they may.
    fn spill(&mut self) {
        let bytes = self.bytes();
        let Some(swap) = &mut self.swap else { return };
        let is_over = bytes > swap.memory_max || !swap.plain.is_empty();
        let is_resting = swap.rests_until.is_some_and(|until| until > Instant::now());
        if !swap.is_spilling
            || !is_over
            || is_resting
            || swap.writing.is_some()
            || self.owner.is_lost()
        {
            return;
        }
        swap.rests_until = None;
        // How much has to go, by the pages that it is on average.
        let excess = bytes.saturating_sub(swap.memory_max) / (CHUNK / 32) + 1;
        let mut pages: Vec<u64> = Vec::new();
        while pages.len() < WRITE_PAGES {
            let Some(swap) = &mut self.swap else { return };
            let packed = (pages.len() as u64) < excess && bytes > swap.memory_max;
            let next = swap.plain.pop_front();
            let next = next.or_else(|| if packed { swap.order.pop_front() } else { None });
            let Some(page) = next else { break };
            if matches!(self.entry(page), Entry::Packed { .. }) && !pages.contains(&page) {
                pages.push(page);
            }
        }
        self.write(&pages);
    }

    fn write(&mut self, pages: &[u64]) {
        let Some(swap) = &mut self.swap else { return };
        let Some((first, count)) = swap.slots.take(pages.len() as u64) else {
            if !pages.is_empty() {
                pages.iter().rev().for_each(|page| swap.order.push_front(*page));
                swap.fail("the swap file is full".into());
            }
            return;
        };
        let (now, later) = pages.split_at(count as usize);
        later.iter().rev().for_each(|page| swap.order.push_front(*page));
        let (mut blocks, mut written) = (Vec::with_capacity(now.len()), Vec::new());
        for page in now {
            let Entry::Packed { place, length } = self.entry(*page) else { continue };
            let mut content: Page = [0; PAGE as usize];
            // One that is damaged stays where it is.
            if self.unpack(*page, place, length, &mut content) == super::Found::Content {
                blocks.push(Block(content));
                written.push(Some(*page));
            }
        }
        let Some(swap) = &mut self.swap else { return };
        (first + written.len() as u64..first + count).for_each(|slot| swap.slots.give(slot));
        if written.is_empty() {
            return;
        }
        let number = swap.number();
        swap.writing = Some(Writing { number, slot: first, pages: written });
        swap.file.write(Write { number, slot: first, blocks });
    }

    /// Forgets pages of the queues that have no content in memory any more, when there are many.
    pub(super) fn trim_queues(&mut self) {
        let most = 2 * self.packed as usize + 1024;
        let Some(swap) = self.swap.as_mut().filter(|swap| swap.order.len() > most) else { return };
        let order = std::mem::take(&mut swap.order);
        let mut seen = std::collections::HashSet::new();
        let is_kept =
            |page: &u64| matches!(self.entry(*page), Entry::Packed { .. }) && seen.insert(*page);
        let kept: VecDeque<u64> = order.into_iter().filter(is_kept).collect();
        if let Some(swap) = &mut self.swap {
            swap.order = kept;
        }
    }

    /// Where the swap file is.
    pub fn swap_path(&self) -> Option<&Path> {
        self.swap.as_ref().map(|swap| swap.file.path())
    }
}

/// What an entry says of a content in the file.
pub(super) fn checksum_of(page: u64, content: &Page) -> u32 {
    xxh3_64_with_seed(content, page) as u32
}
