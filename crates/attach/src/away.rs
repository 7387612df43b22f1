//! Pages that are away from the guest's memory: how they leave, and how they come back.
//!
//! A pager and its guard both know how to bring pages in; only a pager takes them away. The order
//! of the steps is that of the model (`guest-memory/src/lease/eviction_model.rs`):
//!
//! ```text
//! leave, protect, read, entry, evict, punch │ come, copy (protected), no entry, arrive, unprotect
//! ```
//! Whoever of the two serves may die after each step. The other, or the next pager, goes on from
//! the words and the entries ([`recover`](AwayPages::recover)).

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fathom_failure::Failure;
use fathom_guest_memory::{
    MemoryFile, PageState, PageWord, PagerFigures, PagerLeases, TableOwner, WantedPages,
};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;

use crate::memory::MappedMemory;
use crate::record;
use crate::store::{
    self, Found, PAGE, Page, PageStore, ReadContent, ReadFor, ReadPage, Stored, SwapOptions,
};
use crate::userfault::UserFault;
use crate::vmm::{self, Vmm};

/// How often a page is put back while the VMM changes its mappings.
const ATTEMPTS_MAX: u32 = 16;
/// The most pages that leave at once. Faults wait meanwhile.
pub(crate) const EVICTED_AT_ONCE: usize = 8;
/// The most pages that exist when they are to come back without another process's doing: those that
/// leave at once, for some deaths of pagers. It is that of `fathom_control::EXISTING_PAGES_MAX`.
const EXISTING_MAX: u64 = 8 * EVICTED_AT_ONCE as u64;
/// The most pages that one message of a holder brings in.
const WANTED_MAX: u64 = 4096;
/// The most pages that are read from the swap file at a time for daemons, and for nobody. Those of
/// faults are as many as threads wait.
const READS_MAX: usize = 256;
const READS_FOR_NOBODY_MAX: usize = 16;
/// For how long pages come in that holders want, before faults are looked for again.
const WANTED_TIME_MAX: Duration = Duration::from_millis(2);
/// The pause when a page cannot come for lack of memory. The guest's thread then tries again.
const SHORT_PAUSE: Duration = Duration::from_millis(1);

/// A mapping of the VMM whose pages can leave.
#[derive(Debug)]
struct Part {
    memory: MappedMemory,
    /// The table of its file.
    table: usize,
    /// The number of its first page in the store.
    first: u64,
    /// How many pages it has in the store, also when it is not mapped any more.
    pages: u64,
}

impl Part {
    fn page_in_file(&self, address: u64) -> u64 {
        (address - self.memory.start + self.memory.offset) / PAGE
    }

    fn page_in_store(&self, address: u64) -> u64 {
        self.first + (address - self.memory.start) / PAGE
    }

    fn addresses(&self) -> impl Iterator<Item = u64> + use<> {
        self.memory.range().step_by(PAGE as usize)
    }
}

/// What became of a page that was to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Brought {
    /// It is there.
    Here,
    /// It was not away.
    NotAway,
    /// It is being read from the swap file: [`AwayPages::progress`] puts it back.
    Reading,
    /// There is no memory for it now. Who waits for it tries again.
    Later,
    /// The VMM does not have this memory any more.
    Unmapped,
    /// Its content is damaged: the guest's thread gets a `SIGBUS`.
    Damaged,
}

/// What became of a page that was to leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Evicted {
    /// It has left.
    Gone,
    /// Somebody has a lease.
    Leased,
    /// Somebody took a lease meanwhile, or the page went.
    Disturbed,
    /// It does not become smaller.
    Incompressible,
    /// The store has no memory for it.
    Full,
}

/// What came and what went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct AwayCounts {
    /// Pages that have left.
    pub evicted: u64,
    /// Pages that have come back.
    pub brought: u64,
    /// Of these, pages that the daemon wanted.
    pub wanted: u64,
    /// Pages that came back as zeroes, because a device was going to overwrite them.
    pub overwritten: u64,
    /// Pages that existed when they were to come back.
    pub existing: u64,
}

/// The steps after which a test may end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Left,
    Protected,
    Entered,
    Evicted,
    Coming,
    Copied,
    Unentered,
    Arrived,
}

/// The pages of a guest that are away.
#[derive(Debug)]
pub(crate) struct AwayPages {
    parts: Vec<Part>,
    tables: Vec<PagerLeases>,
    /// Their files, and the folder of the tables.
    files: Vec<MemoryFile>,
    leases: PathBuf,
    /// What holders ask for, while this process serves.
    wanted: Vec<WantedPages>,
    store: PageStore,
    away: u64,
    /// Of these, the pages of the store whose content is damaged.
    damaged: BTreeSet<u64>,
    /// How many an earlier pager had found. Nobody is told of such a page again until all pages
    /// have to come in.
    damaged_before: u64,
    /// Where bringing in all pages is: a part and an address in it.
    hand: (usize, u64),
    /// The pages that the hand has left away since it was at the beginning; none if it was not, or
    /// a page has left since.
    left: Option<u64>,
    counts: AwayCounts,
    /// Who waits for a page that has to be read.
    reader: ReadFor,
    /// Space for the pages that leave at once.
    content: Vec<u8>,
    #[cfg(test)]
    dies_after: Option<Step>,
}

fn cannot(what: &str, error: &io::Error) -> Failure {
    Failure::new(format!("cannot {what}: {error}"))
}

impl AwayPages {
    /// Makes the tables of leases in `leases`, and a store in `folder`, for a guest from which
    /// nothing is away.
    ///
    /// # Errors
    /// When they cannot be made.
    pub fn create(
        vmm: &Vmm,
        memory: &[MappedMemory],
        leases: &Path,
        folder: &Path,
        swap: Option<&SwapOptions>,
    ) -> Result<Self, Failure> {
        store::remove_stale(folder);
        let store = PageStore::create(folder, vmm, memory, swap).map_err(|error| {
            cannot(&format!("make a store in {}", folder.display()), &error).advise(
                "give a folder in memory, for this user alone, that has room (--pages), and for a \
                 swap file one on a disk (--swap)",
            )
        })?;
        let files = (store.path().to_owned(), store.swap_path().map(Path::to_owned));
        let made = Self::with_store(store, vmm, memory, leases, true);
        made.and_then(Self::begin)
            .inspect_err(|_| store::remove_files(&files.0, files.1.as_deref()))
    }

    /// Begins with a new store.
    fn begin(mut made: Self) -> Result<Self, Failure> {
        // An earlier pager may have left its table.
        made.recover();
        made.listen().map_err(|error| cannot("listen to daemons", &error))?;
        if made.count() > 0 {
            return Err(Failure::new("pages of the machine are away, and no record says where"));
        }
        Ok(made)
    }

    /// Opens the store and the tables of an earlier pager, which may live. Before anything else,
    /// [`recover`](Self::recover) has to be called, when no other process serves.
    ///
    /// # Errors
    /// When they cannot be opened.
    pub fn open(
        vmm: &Vmm,
        memory: &[MappedMemory],
        leases: &Path,
        path: &Path,
        swap: Option<&Path>,
    ) -> Result<Self, Failure> {
        let store = PageStore::open(path, vmm, swap).map_err(|error| {
            cannot(&format!("open the store {}", path.display()), &error).advise(
                "pages of the machine are in it: attach with the version of fathom that made it",
            )
        })?;
        Self::with_store(store, vmm, memory, leases, false)
    }

    fn with_store(
        store: PageStore,
        vmm: &Vmm,
        memory: &[MappedMemory],
        leases: &Path,
        is_new: bool,
    ) -> Result<Self, Failure> {
        let failed = |error: io::Error| cannot("use the table of leases", &error);
        let (mut files, mut parts) = (Vec::new(), Vec::new());
        let mut ends: Vec<u64> = Vec::new();
        for stored in store.parts() {
            let file = stored.file;
            let table = files.iter().position(|other| *other == file).unwrap_or(files.len());
            if table == files.len() {
                files.push(file);
                ends.push(0);
            }
            ends[table] = ends[table].max(stored.offset.saturating_add(stored.length));
            let is_of_file = |part: &&MappedMemory| part.file() == file;
            let is_it = |part: &&MappedMemory| {
                (part.offset, part.length()) == (stored.offset, stored.length)
            };
            let mapped = memory.iter().filter(is_of_file).find(is_it).cloned();
            // Memory that was unplugged has no mapping, and nobody wants its pages.
            let unplugged = MappedMemory {
                start: 0,
                end: 0,
                offset: stored.offset,
                inode: file.inode,
                device: file.device,
            };
            let overlaps = |part: &MappedMemory| {
                let end = stored.offset.saturating_add(stored.length);
                part.offset < end && stored.offset < part.offset + part.length()
            };
            if mapped.is_none() && memory.iter().filter(is_of_file).any(overlaps) {
                return Err(Failure::new("the VMM maps its guest's memory otherwise than before")
                    .advise("restart the machine: pages of it are away"));
            }
            let memory = mapped.unwrap_or(unplugged);
            parts.push(Part { memory, table, first: stored.first, pages: stored.length / PAGE });
        }
        record::make_folder(leases, 0o711).map_err(failed)?;
        let open = |(file, end): (&MemoryFile, &u64)| {
            // The words of an existing store say which pages are away.
            if is_new {
                PagerLeases::start(leases, *file, end.div_ceil(PAGE), owner(vmm))
            } else {
                PagerLeases::join(leases, *file, end.div_ceil(PAGE))
            }
        };
        let tables = files.iter().zip(&ends).map(open).collect::<io::Result<Vec<_>>>();
        let tables = tables.map_err(failed)?;
        Ok(Self {
            parts,
            tables,
            files,
            leases: leases.to_owned(),
            wanted: Vec::new(),
            store,
            away: 0,
            damaged: BTreeSet::new(),
            damaged_before: 0,
            hand: (0, 0),
            left: None,
            counts: AwayCounts::default(),
            reader: ReadFor::Fault,
            content: vec![0; EVICTED_AT_ONCE * PAGE as usize],
            #[cfg(test)]
            dies_after: None,
        })
    }

    /// After a step: a test may end here, as a process does that is killed.
    #[cfg(test)]
    fn pass(&self, step: Step) {
        if self.dies_after == Some(step) {
            std::panic::resume_unwind(Box::new(step));
        }
    }

    #[cfg(not(test))]
    #[expect(clippy::unused_self, reason = "only a test ends here")]
    fn pass(&self, _: Step) {}

    /// Finds out which pages are away. The entries of others are removed: their pages never left,
    /// or have come back. Pages that were leaving stay.
    pub fn recover(&mut self) {
        for table in &self.tables {
            table.forget();
        }
        let Self { parts, tables, store, .. } = self;
        // Of all parts, also of those that are not mapped: only a word says that a page is not
        // away.
        let pages: u64 = parts.iter().map(|part| part.pages).sum();
        let mut away = vec![false; pages as usize];
        for part in parts.iter() {
            let table = tables[part.table].table();
            let words = (part.memory.offset / PAGE..).map(|page| table.word(page).state());
            let places = &mut away[part.first as usize..(part.first + part.pages) as usize];
            for ((at, place), state) in (part.first..).zip(places).zip(words) {
                *place = if table.is_lost() { store.has(at) } else { state.is_away() };
            }
        }
        store.recover(|page| away[page as usize]);
        let mapped = parts.iter().filter(|part| part.memory.length() > 0);
        let of_part = |part: &Part| &away[part.first as usize..(part.first + part.pages) as usize];
        self.away = mapped.flat_map(of_part).filter(|is_away| **is_away).count() as u64;
        self.damaged.clear();
        self.left = None;
    }

    /// Begins to listen to holders. Without it, [`serve_wanted`](Self::serve_wanted) has to be
    /// called now and then.
    ///
    /// # Errors
    /// Those of [`WantedPages::listen`].
    pub fn listen(&mut self) -> io::Result<()> {
        self.wanted = self.tables.iter().map(WantedPages::listen).collect::<io::Result<_>>()?;
        Ok(())
    }

    /// Listens no more: another process is about to serve.
    pub fn stop_listening(&mut self) {
        self.wanted.clear();
    }

    /// How many pages are away.
    pub fn count(&self) -> u64 {
        self.away
    }

    /// Takes the counts over that an earlier pager has published and that concern the guest for as
    /// long as it runs. They are for people.
    pub fn take_over_counts(&mut self) {
        let Some((_, figures)) = PagerFigures::read(&self.leases, &self.files) else { return };
        let pages = self.parts.iter().map(|part| part.pages).sum::<u64>();
        // Not what deaths of pagers explain: there may be any number of those.
        if figures.existing > EXISTING_MAX {
            self.counts.existing = figures.existing.min(pages);
        }
        self.damaged_before = figures.damaged;
    }

    /// Of these, the pages that cannot come, because their content is damaged.
    fn damaged(&self) -> u64 {
        self.damaged.len() as u64
    }

    /// Of these, the pages of which anybody has found that their content is damaged.
    pub fn known_damaged(&self) -> u64 {
        self.damaged().max(self.damaged_before.min(self.away))
    }

    /// Whether all pages have come that can.
    pub fn is_complete(&self) -> bool {
        self.away <= self.damaged()
    }

    /// Forgets the pages of mappings that the VMM does not have any more: memory was unplugged.
    pub fn retain(&mut self, is_mapped: impl Fn(&MappedMemory) -> bool) {
        for index in 0..self.parts.len() {
            let part = &self.parts[index];
            if part.memory.length() == 0 || is_mapped(&part.memory) {
                continue;
            }
            for address in part.addresses().collect::<Vec<_>>() {
                if self.is_away(address) {
                    let number = self.parts[index].page_in_store(address);
                    self.damaged.remove(&number);
                    self.store.remove(number);
                    self.away = self.away.saturating_sub(1);
                }
            }
            let memory = &mut self.parts[index].memory;
            memory.end = memory.start;
        }
    }

    /// What came and what went.
    pub fn counts(&self) -> AwayCounts {
        self.counts
    }

    /// Has contents go to the swap file from now on, if there is one, or not.
    pub fn set_spilling(&mut self, is_spilling: bool) {
        self.store.set_spilling(is_spilling);
    }

    /// Sets how much memory contents may take before they go to the swap file, in bytes.
    pub fn set_memory_max(&mut self, bytes: u64) {
        self.store.set_memory_max(bytes);
    }

    /// The store.
    pub fn store(&self) -> &PageStore {
        &self.store
    }

    /// The folder of the tables of leases.
    pub fn leases(&self) -> &Path {
        &self.leases
    }

    /// The tables of leases.
    pub fn tables(&self) -> &[PagerLeases] {
        &self.tables
    }

    /// Readable when a holder wants pages; none if this process does not listen.
    pub fn wanted(&self) -> &[WantedPages] {
        &self.wanted
    }

    /// The mappings whose pages can leave, by number.
    pub fn mapping(&self, part: usize) -> Option<&MappedMemory> {
        self.parts.get(part).map(|part| &part.memory)
    }

    /// The number of the part of an address.
    fn part_at(&self, address: u64) -> Option<usize> {
        self.parts.iter().position(|part| part.memory.range().contains(&address))
    }

    fn part_of(&self, address: u64) -> Option<&Part> {
        self.part_at(address).map(|part| &self.parts[part])
    }

    /// Where a page is, by its word. The words of a table that is lost say nothing: an entry does.
    fn state_of(&self, part: &Part, address: u64) -> PageState {
        let table = self.tables[part.table].table();
        let word = table.word(part.page_in_file(address));
        match table.is_lost() {
            false => word.state(),
            true if self.store.has(part.page_in_store(address)) => PageState::Evicted,
            true => PageState::Resident,
        }
    }

    fn is_away_in(&self, part: &Part, address: u64) -> bool {
        self.state_of(part, address).is_away()
    }

    /// Whether the page of an address is away.
    pub fn is_away(&self, address: u64) -> bool {
        self.part_of(address).is_some_and(|part| self.is_away_in(part, address))
    }

    /// The part of `run`, around the page `own`, in which no page is away.
    pub fn without_away(&self, run: Range<u64>, own: u64) -> Range<u64> {
        let Range { mut start, mut end } = own..own + PAGE;
        while start > run.start && !self.is_away(start - PAGE) {
            start -= PAGE;
        }
        while end < run.end && !self.is_away(end) {
            end += PAGE;
        }
        start..end
    }

    /// Puts the page of an address back, if it is away.
    pub fn bring(&mut self, address: u64, faults: &UserFault) -> Brought {
        let address = address & !(PAGE - 1);
        let Some(index) = self.part_at(address) else { return Brought::NotAway };
        let part = &self.parts[index];
        let (file_page, number) = (part.page_in_file(address), part.page_in_store(address));
        let table = self.tables[part.table].table();
        let state = self.state_of(part, address);
        match state {
            PageState::Resident | PageState::Leaving => return Brought::NotAway,
            PageState::Evicted => drop(table.change(file_page, PageWord::come)),
            // Whoever served before has begun it.
            PageState::Coming => {}
        }
        self.pass(Step::Coming);
        let mut content: Page = [0; PAGE as usize];
        // A device is going to write all of it: it comes as zeroes.
        let is_overwritten = !table.is_lost() && table.word(file_page).is_overwritten();
        let found =
            if is_overwritten { Found::Content } else { self.store.get(number, &mut content) };
        let is_content = match found {
            Found::Content => true,
            // Not once more what is known to be damaged: the next pager tries it again.
            Found::InFile
                if !self.damaged.contains(&number) && self.store.read(number, self.reader) =>
            {
                return Brought::Reading;
            }
            // Its entry had ended already: it had come, and was given back since.
            Found::Nothing => state == PageState::Coming,
            Found::InFile | Found::Damaged => false,
        };
        self.finish(index, address, is_content.then_some(&content), faults)
    }

    /// Puts the page of an address back that is coming, of a part. Without a content it is damaged.
    fn finish(
        &mut self,
        part: usize,
        address: u64,
        content: Option<&Page>,
        faults: &UserFault,
    ) -> Brought {
        let own = address..address + PAGE;
        let part = &self.parts[part];
        let (file_page, number) = (part.page_in_file(address), part.page_in_store(address));
        let index = part.table;
        let table = self.tables[index].table();
        let word = table.word(file_page);
        // Also if that was said since, and if what it had is damaged.
        let is_overwritten = !table.is_lost() && word.is_overwritten();
        let zeroes: Page = [0; PAGE as usize];
        let content = if is_overwritten { Some(&zeroes) } else { content };
        let Some(content) = content else {
            self.damaged.insert(number);
            // A later call must not take it for one that has lost its entry by right.
            let back = |word: PageWord| word.arrive()?.leave()?.evict();
            let _ = self.tables[index].table().change(file_page, back);
            // Before Linux 6.6 the thread waits. If the page exists, it can be used. Whether it
            // does is not known: the kernel takes a page that is protected or poisoned for one.
            let _ = faults.poison(&own);
            let _ = faults.protect(&own, false);
            return Brought::Damaged;
        };
        match put_back(faults, address, content) {
            Ok(was_there) => self.counts.existing += u64::from(was_there),
            Err(outcome) => {
                let _ = faults.wake(&own);
                return outcome;
            }
        }
        self.pass(Step::Copied);
        self.store.remove(number);
        self.pass(Step::Unentered);
        let table = self.tables[index].table();
        if table.change(file_page, PageWord::arrive).is_ok() || table.is_lost() {
            self.away = self.away.saturating_sub(1);
            self.counts.brought += 1;
            self.counts.wanted += u64::from(!table.is_lost() && word.is_wanted());
            self.counts.overwritten += u64::from(is_overwritten);
            self.damaged.remove(&number);
        }
        self.pass(Step::Arrived);
        let _ = faults.protect(&own, false);
        Brought::Here
    }

    /// Takes pages away that follow each other, each of which is a folio of its own: at most
    /// [`EVICTED_AT_ONCE`]. `part` is the number of their mapping, and `file` the memory's file.
    /// Calls `each` with the number of a page, from 0 on, and what became of it.
    pub fn evict(
        &mut self,
        part: usize,
        addresses: Range<u64>,
        faults: &UserFault,
        file: &File,
        each: &mut dyn FnMut(u64, Evicted),
    ) {
        let Some(found) = self.parts.get(part) else { return };
        self.left = None;
        let (first, number) =
            (found.page_in_file(addresses.start), found.page_in_store(addresses.start));
        let index = found.table;
        let count = ((addresses.end - addresses.start) / PAGE).min(EVICTED_AT_ONCE as u64);
        let leaves = |page: u64| {
            let table = self.tables[index].table();
            // The words of a table that is lost say nothing about leases.
            table.change(first + page, PageWord::leave).is_ok() && !table.is_lost()
        };
        let leaving: Vec<bool> = (0..count).map(leaves).collect();
        self.pass(Step::Left);
        let all = addresses.start..addresses.start + count * PAGE;
        let is_protected = faults.protect(&all, true).is_ok();
        self.pass(Step::Protected);
        // A page that QEMU gives back at this moment is read as zeroes, which it then may be.
        let mut content = std::mem::take(&mut self.content);
        let bytes = &mut content[..(count * PAGE) as usize];
        let is_read = is_protected && file.read_exact_at(bytes, first * PAGE).is_ok();
        let mut outcomes = Vec::with_capacity(count as usize);
        for page in 0..count {
            let at = (page * PAGE) as usize;
            let content = bytes[at..at + PAGE as usize].try_into().expect("a page");
            let outcome = match leaving[page as usize] {
                false => Evicted::Leased,
                true if !is_read => {
                    self.stay(index, first + page);
                    Evicted::Disturbed
                }
                true => self.store_leaving(index, first + page, number + page, content),
            };
            if outcome != Evicted::Gone {
                let address = addresses.start + page * PAGE;
                let _ = faults.protect(&(address..address + PAGE), false);
            }
            outcomes.push(outcome);
        }
        self.content = content;
        let runs = outcomes.chunk_by(|one, other| one == other).map(|run| (run[0], run.len()));
        let runs: Vec<(Evicted, usize)> = runs.collect();
        let mut page = 0;
        for (outcome, length) in runs {
            let length = length as u64;
            if outcome == Evicted::Gone && !punch(file, first + page, length) {
                // They are still there, and their entries go.
                for page in page..page + length {
                    self.bring(addresses.start + page * PAGE, faults);
                    outcomes[page as usize] = Evicted::Disturbed;
                }
            }
            page += length;
        }
        (0..).zip(outcomes).for_each(|(page, outcome)| each(page, outcome));
    }

    /// Stores the content of a page that is leaving. If it is gone then, its word says so, and it
    /// has to be punched.
    fn store_leaving(&mut self, table: usize, page: u64, number: u64, content: &Page) -> Evicted {
        let outcome = match self.store.put(number, content) {
            Stored::Incompressible => Evicted::Incompressible,
            Stored::Full => Evicted::Full,
            Stored::Yes => Evicted::Gone,
        };
        self.pass(Step::Entered);
        let words = self.tables[table].table();
        let is_gone = outcome == Evicted::Gone && words.change(page, PageWord::evict).is_ok();
        if is_gone && !words.is_lost() {
            self.away += 1;
            self.counts.evicted += 1;
            self.pass(Step::Evicted);
            return outcome;
        }
        self.store.remove(number);
        self.stay(table, page);
        if outcome == Evicted::Gone { Evicted::Disturbed } else { outcome }
    }

    /// The page of a table stays after all.
    fn stay(&self, table: usize, page: u64) {
        let stay = |word: PageWord| Some(word.stay()).filter(|next| *next != word);
        let _ = self.tables[table].table().change(page, stay);
    }

    /// Brings the pages in that holders want. Returns their addresses.
    pub fn serve_wanted(&mut self, faults: &UserFault) -> Vec<u64> {
        let mut brought = Vec::new();
        let begun = Instant::now();
        let mut wanted = Vec::new();
        // First: what is asked for later wakes again.
        self.wanted.iter().for_each(WantedPages::hear);
        for (number, table) in self.tables.iter().enumerate() {
            table.table().take_asked(|pages| wanted.push((number, pages)));
        }
        self.reader = ReadFor::Daemon;
        'all: for (table, pages) in wanted {
            for page in pages.take(WANTED_MAX as usize) {
                // What is left is asked for again.
                if begun.elapsed() > WANTED_TIME_MAX || self.store.reads() >= READS_MAX {
                    break 'all;
                }
                let is_in = |part: &&Part| {
                    let first = part.memory.offset / PAGE;
                    part.table == table
                        && (first..first + part.memory.length() / PAGE).contains(&page)
                };
                let Some(part) = self.parts.iter().find(is_in) else { break };
                let address = part.memory.start + page * PAGE - part.memory.offset;
                match self.bring(address, faults) {
                    Brought::Here => brought.push(address),
                    Brought::Later => break 'all,
                    _ => {}
                }
            }
        }
        self.reader = ReadFor::Fault;
        brought
    }

    /// Brings in what is away, for as long as `time`. Returns whether it can go on at once: not if
    /// a page could not come.
    pub fn bring_some(&mut self, faults: &UserFault, time: Duration) -> bool {
        let begun = Instant::now();
        // All that is left is being read.
        if !self.is_complete() && self.away <= self.damaged() + self.store.reads() as u64 {
            return false;
        }
        let mut can_go_on = true;
        self.reader = ReadFor::All;
        // Once around is enough: what could not come is tried again by the next call.
        let pages: u64 = self.parts.iter().map(|part| part.memory.length() / PAGE).sum();
        for step in 0..pages + self.parts.len() as u64 {
            if self.away == 0 || step % 16 == 0 && begun.elapsed() >= time {
                break;
            }
            let (index, at) = self.hand;
            let Some(part) = self.parts.get(index) else {
                // Whoever may write to the tables can have made a word say that its page is not
                // away. Such a page never comes, and must not be waited for.
                self.away = self.left.map_or(self.away, |left| left.min(self.away));
                (self.hand, self.left) = ((0, 0), Some(0));
                continue;
            };
            if at >= part.memory.length() {
                self.hand = (index + 1, 0);
                continue;
            }
            self.hand.1 += PAGE;
            let address = part.memory.start + at;
            let reads = self.store.reads();
            let was_reading = reads > 0 && self.is_reading(index, address);
            if reads >= READS_FOR_NOBODY_MAX && !was_reading && self.is_away(address) {
                self.hand.1 = at;
                can_go_on = false;
                break;
            }
            match self.bring(address, faults) {
                Brought::Here | Brought::NotAway => {}
                // It is away until it has been read.
                Brought::Reading => {
                    self.left = self.left.map(|left| left + 1);
                    can_go_on &= !was_reading;
                }
                Brought::Damaged => self.left = self.left.map(|left| left + 1),
                Brought::Unmapped => {
                    self.left = self.left.map(|left| left + 1);
                    can_go_on = false;
                }
                // Not at once again.
                Brought::Later => {
                    self.hand.1 = at;
                    can_go_on = false;
                    break;
                }
            }
        }
        self.reader = ReadFor::Fault;
        can_go_on
    }

    fn is_reading(&self, part: usize, address: u64) -> bool {
        self.parts.get(part).is_some_and(|part| self.store.is_reading(part.page_in_store(address)))
    }

    /// Goes on with the swap file, if there is one: puts pages back that have been read, and has
    /// contents written. Returns the addresses that have come back, and for how long a thread of
    /// the VMM has waited for them, if one has.
    pub fn progress(&mut self, faults: &UserFault) -> Vec<(u64, Option<Duration>)> {
        let mut brought = Vec::new();
        for ReadPage { page, content, reader, since } in self.store.progress() {
            let is_in = |part: &Part| {
                let pages = part.memory.length() / PAGE;
                (part.first..part.first + pages).contains(&page)
            };
            let Some(index) = self.parts.iter().position(is_in) else { continue };
            let part = &self.parts[index];
            let address = part.memory.start + (page - part.first) * PAGE;
            let content = match &content {
                ReadContent::Content(block) => Some(&block.0),
                ReadContent::Damaged => None,
                ReadContent::Gone => {
                    let _ = faults.wake(&(address..address + PAGE));
                    continue;
                }
            };
            // Who may write to the tables may have said something else meanwhile.
            if !self.is_away_in(part, address) {
                let _ = faults.wake(&(address..address + PAGE));
                continue;
            }
            let come = |word: PageWord| word.come();
            let _ = self.tables[part.table].table().change(part.page_in_file(address), come);
            if self.finish(index, address, content, faults) == Brought::Here {
                let time = (reader == ReadFor::Fault).then(|| since.elapsed());
                brought.push((address, time));
            }
        }
        brought
    }

    /// Removes the store. No page may be away, but of a VMM that has ended: its tables of leases
    /// are put aside, for [`clean`]. Otherwise they stay, because who has a lease
    /// keeps it.
    pub fn end(self, has_ended: bool) {
        self.store.end();
        self.tables.into_iter().filter(|_| has_ended).for_each(PagerLeases::put_aside);
    }
}

/// Removes what is left of VMMs that have ended: swap files in a folder, and tables of leases. A
/// disk may be slow, and whoever may write to a table can keep the process from returning and from
/// ending: it has to be one that nobody waits for, with nothing that anybody else needs.
pub fn clean(leases: &Path, swap: Option<&Path>) {
    if let Some(folder) = swap {
        store::remove_stale(folder);
    }
    PagerLeases::remove_ended(leases, |owner| {
        let is_here = owner.namespace == vmm::namespace();
        is_here && vmm::is_gone(owner.process as i32, owner.start_ticks)
    });
}

/// The owner of a VMM's tables.
pub(crate) fn owner(vmm: &Vmm) -> TableOwner {
    let namespace = vmm::namespace();
    TableOwner { process: vmm.process() as u32, start_ticks: vmm.start_ticks(), namespace }
}

/// Takes pages out of the memory's file. Returns false if they are still there.
fn punch(file: &File, page: u64, count: u64) -> bool {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(file, flags, page * PAGE, count * PAGE).is_ok()
}

/// Puts a page into the VMM. Returns whether it was there, or else why it is not.
fn put_back(faults: &UserFault, address: u64, content: &Page) -> Result<bool, Brought> {
    for _ in 0..ATTEMPTS_MAX {
        let Err(error) = faults.copy_protected(address, content) else { return Ok(false) };
        match Errno::from_io_error(&error) {
            Some(Errno::EXIST) => return Ok(true),
            Some(Errno::AGAIN) => std::thread::yield_now(),
            Some(Errno::NOMEM) => {
                std::thread::sleep(SHORT_PAUSE);
                return Err(Brought::Later);
            }
            _ => return Err(Brought::Unmapped),
        }
    }
    Err(Brought::Later)
}

#[cfg(test)]
mod tests;
