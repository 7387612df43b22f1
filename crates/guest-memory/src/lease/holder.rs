//! The side of a process that maps the guest's memory.

use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::mapping::{FilePages, Mapping};
use crate::memory::GuestMemory;
use crate::pager::{Pager, Purpose, note_absence};
use crate::region::Region;

use super::table::{LeaseTable, MemoryFile};
use super::wanted::PagerBell;
use super::word::{PageState, PageWord};

/// A page, in bytes.
const PAGE: u64 = 4096;
/// The most pages for which one call asks, or at which it looks.
const WANTED_MAX: u64 = 4096;
/// A pager has the place of a dead holder for a moment.
const PLACE_TIME_MAX: Duration = Duration::from_secs(1);
const PLACE_PAUSE: Duration = Duration::from_millis(5);

/// The tables that this process has open: one place for all disks of a guest.
static PLACES: Mutex<Vec<Weak<Place>>> = Mutex::new(Vec::new());

/// The place of this process in a table.
#[derive(Debug)]
struct Place {
    table: LeaseTable,
    identity: MemoryFile,
    holder: usize,
    /// The number of leases in this place whose mappings are not registered.
    unregistered: AtomicUsize,
    /// Wakes the pager when a page is wanted.
    bell: Mutex<PagerBell>,
}

impl Place {
    /// The place in the table of a memory file, if there is one.
    ///
    /// `pages` are those of the file: whoever may write to the table may have made it larger.
    fn of(folder: &Path, memory: MemoryFile, pages: u64) -> io::Result<Option<Arc<Self>>> {
        // The whole function: two threads that take places would take two.
        let mut places = PLACES.lock();
        let Some(table) = LeaseTable::open(folder, memory, pages)? else { return Ok(None) };
        let Some(identity) = table.identity() else { return Ok(None) };
        places.retain(|place| place.strong_count() > 0);
        let open = places.iter().filter_map(Weak::upgrade);
        if let Some(place) = open.into_iter().find(|place| place.identity == identity) {
            return Ok(Some(place));
        }
        let begun = Instant::now();
        let holder = loop {
            match table.take_place()? {
                Some(holder) => break holder,
                None if begun.elapsed() < PLACE_TIME_MAX => std::thread::sleep(PLACE_PAUSE),
                None => {
                    let text = "the table of leases has no place for another process";
                    return Err(io::Error::other(text));
                }
            }
        };
        let bell = Mutex::default();
        let unregistered = AtomicUsize::new(0);
        let place = Arc::new(Self { table, identity, holder, unregistered, bell });
        places.push(Arc::downgrade(&place));
        Ok(Some(place))
    }

    fn lease(&self, page: u64, purpose: Purpose) -> bool {
        if self.table.is_lost() {
            // A lease that the pager does not see is none.
            return false;
        }
        self.table.change(page, |word| word.lease(self.holder, purpose)).is_ok()
    }

    /// Asks for the pages of a range that are away, of which those of `overwritten` are going to be
    /// overwritten. Returns false if its first page, of which a lease was refused, cannot come:
    /// what was away then may have arrived meanwhile. Of a long range it asks for the beginning:
    /// who waits asks again.
    fn want(&self, pages: Range<u64>, overwritten: &Range<u64>) -> bool {
        let pages = pages.start..pages.end.min(pages.start.saturating_add(WANTED_MAX));
        let can_come = pages.start < self.table.pages() && !self.table.is_lost();
        for page in pages.clone() {
            let is_overwritten = overwritten.contains(&page);
            let want = |word: PageWord| {
                if is_overwritten { word.want_overwritten() } else { word.want() }
            };
            let _ = self.table.change(page, |word| Some(want(word)).filter(|next| *next != word));
        }
        if can_come {
            self.bell.lock().ring(&self.table, self.holder, &pages);
        }
        can_come
    }

    /// Whether the pager is bringing in a page of the beginning of a range.
    fn is_arriving(&self, pages: Range<u64>) -> bool {
        let is_coming = |page| self.table.word(page).state() == PageState::Coming;
        pages.take(WANTED_MAX as usize).any(is_coming)
    }

    fn release(&self, page: u64, purpose: Purpose) {
        let _ = self.table.change(page, |word| Some(word.release(self.holder, purpose)));
    }
}

impl FilePages for Place {
    fn lease_page(&self, page: u64) -> bool {
        // In the handler of a signal, a second one would end the process.
        self.table.is_reachable(page) && self.lease(page, Purpose::Write)
    }

    fn release_page(&self, page: u64) {
        self.release(page, Purpose::Write);
    }
}

/// A region of guest-physical addresses whose pages have words.
#[derive(Debug)]
struct LeasedRegion {
    file: MemoryFile,
    start: u64,
    end: u64,
    /// The offset of its beginning in its file, in bytes.
    offset: u64,
    place: Arc<Place>,
}

/// The leases of this process on a guest's memory.
#[derive(Debug)]
pub struct GuestLeases {
    regions: Vec<LeasedRegion>,
    /// Why its mappings are not registered; empty if they are.
    unregistered: String,
    /// The mappings without leases that were there before. Who has one may still access it.
    earlier: Mutex<Vec<Weak<Mapping>>>,
}

impl GuestLeases {
    /// Those on the pages of `memory`, in the tables of `folder`. `None` if there are no tables:
    /// the guest has no pager. The mappings of `memory` stay as they are, so no page may leave.
    ///
    /// # Errors
    /// When a table cannot be used.
    pub fn find(folder: &Path, memory: &GuestMemory) -> io::Result<Option<Arc<Self>>> {
        let regions = find(folder, memory)?;
        let unregistered = "its mappings are not registered".to_owned();
        let leases = Self::new(regions, unregistered, Vec::new());
        Ok((!leases.regions.is_empty()).then(|| Arc::new(leases)))
    }

    fn new(regions: Vec<LeasedRegion>, unregistered: String, earlier: Vec<Weak<Mapping>>) -> Self {
        if !unregistered.is_empty() {
            for region in &regions {
                region.place.unregistered.fetch_add(1, Ordering::SeqCst);
            }
        }
        Self { regions, unregistered, earlier: Mutex::new(earlier) }
    }

    /// The same memory with leases, in mappings of its own, in which a touch of a page that is away
    /// is an error; and the leases. Those that it has already, `current`, are kept if there is
    /// nothing new. `None` if there are no tables.
    ///
    /// If the kernel does not register the mappings, the memory has leases all the same, and no
    /// page may leave.
    ///
    /// # Errors
    /// When a table cannot be used.
    pub fn renew(
        folder: &Path,
        memory: &GuestMemory,
        current: Option<&Arc<Self>>,
    ) -> io::Result<Option<(GuestMemory, Arc<Self>)>> {
        let regions = find(folder, memory)?;
        if regions.is_empty() {
            return Ok(None);
        }
        if let Some(current) = current.filter(|current| current.has_regions(&regions)) {
            return Ok(Some((memory.clone(), Arc::clone(current))));
        }
        let anew = |region: &Region| {
            let leased = regions.iter().find(|leased| leased.start == region.start);
            let Some(leased) = leased else { return Ok(region.clone()) };
            let pages: Arc<dyn FilePages> = Arc::<Place>::clone(&leased.place);
            region.anew(Some(&pages))
        };
        let mapped = memory.regions().iter().map(anew).collect::<io::Result<Vec<Region>>>();
        let (mapped, unregistered) = match mapped {
            Ok(mapped) => (mapped, String::new()),
            Err(error) => (memory.regions().to_vec(), error.to_string()),
        };
        let mut earlier = current.map(|current| current.earlier.lock().clone()).unwrap_or_default();
        earlier.retain(|mapping| mapping.strong_count() > 0);
        let is_leased = |region: &&Region| regions.iter().any(|one| one.start == region.start);
        let plain = memory.regions().iter().filter(is_leased).map(|region| &region.map);
        earlier.extend(plain.filter(|map| !map.is_registered()).map(Arc::downgrade));
        let leases = Arc::new(Self::new(regions, unregistered, earlier));
        if !leases.unregistered.is_empty() {
            // Another connection may have said it for this process.
            leases.set_ready_to(false, LeaseTable::is_ready_for_eviction);
        }
        let memory = memory.with_leases(mapped, Arc::<Self>::clone(&leases));
        Ok(Some((memory, leases)))
    }

    fn has_regions(&self, regions: &[LeasedRegion]) -> bool {
        let is_same = |(one, other): (&LeasedRegion, &LeasedRegion)| {
            let of = |region: &LeasedRegion| (region.start, region.end, region.offset);
            of(one) == of(other) && Arc::ptr_eq(&one.place, &other.place)
        };
        self.regions.len() == regions.len() && self.regions.iter().zip(regions).all(is_same)
    }

    fn set_ready_to(&self, for_eviction: bool, which: impl Fn(&LeaseTable, usize) -> bool) {
        for LeasedRegion { place, .. } in &self.regions {
            if which(&place.table, place.holder) {
                place.table.set_ready(place.holder, for_eviction);
            }
        }
    }

    /// Says to the pager that all accesses of this process to the guest's memory take leases, and
    /// no request from before is in flight.
    pub fn set_ready(&self) {
        self.set_ready_to(false, |table, holder| !table.is_ready_for_eviction(holder));
    }

    /// Why no page may leave; `None` if pages may, as far as these leases are concerned.
    pub fn obstacle(&self) -> Option<String> {
        if !self.unregistered.is_empty() {
            let reason = &self.unregistered;
            return Some(format!("a touch of a page that is away is no error: {reason}"));
        }
        let is_used = self.earlier.lock().iter().any(|mapping| mapping.strong_count() > 0);
        is_used.then(|| "accesses from before the leases are not over".to_owned())
    }

    /// Says to the pager of each table for which `all` leases of this process have no
    /// [obstacle](Self::obstacle) that pages may leave. Returns the first obstacle.
    pub fn set_ready_for_eviction(all: &[Arc<Self>]) -> Option<String> {
        let mut first = None;
        for leases in all {
            let shares = |other: &&Arc<Self>| {
                let mut regions = other.regions.iter();
                regions
                    .any(|one| leases.regions.iter().any(|own| Arc::ptr_eq(&own.place, &one.place)))
            };
            match all.iter().filter(shares).find_map(|other| other.obstacle()) {
                None => {
                    leases.set_ready_to(true, |_, _| true);
                    // Others may have come since `all` were found.
                    let is_unregistered = |region: &LeasedRegion| {
                        region.place.unregistered.load(Ordering::SeqCst) > 0
                    };
                    if leases.regions.iter().any(is_unregistered) {
                        leases.set_ready_to(false, LeaseTable::is_ready_for_eviction);
                        first.get_or_insert_with(|| "another connection is not ready".to_owned());
                    }
                }
                obstacle => first = first.or(obstacle),
            }
        }
        first
    }

    /// Whether they are on pages of one of these files.
    pub fn is_on(&self, files: &[MemoryFile]) -> bool {
        self.regions.iter().any(|region| files.contains(&region.file))
    }

    /// The bytes of a range, in their file.
    fn bytes(&self, range: &Range<u64>) -> Option<(&Place, Range<u64>)> {
        let is_in = |region: &&LeasedRegion| (region.start..region.end).contains(&range.start);
        let region = self.regions.iter().find(is_in)?;
        let at = |address: u64| address - region.start + region.offset;
        Some((&region.place, at(range.start)..at(range.end.min(region.end))))
    }

    /// The pages of a range, in their table.
    fn pages(&self, range: &Range<u64>) -> Option<(&Place, Range<u64>)> {
        let (place, bytes) = self.bytes(range)?;
        Some((place, bytes.start / PAGE..bytes.end.div_ceil(PAGE)))
    }

    /// The pages of a range that are overwritten as a whole.
    fn overwritten(&self, range: &Range<u64>, purpose: Purpose) -> Range<u64> {
        match self.bytes(range) {
            Some((_, bytes)) if purpose == Purpose::Overwrite => {
                bytes.start.div_ceil(PAGE)..bytes.end / PAGE
            }
            _ => 0..0,
        }
    }
}

impl Drop for GuestLeases {
    fn drop(&mut self) {
        if !self.unregistered.is_empty() {
            for region in &self.regions {
                region.place.unregistered.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }
}

/// The regions of `memory` that have a table.
fn find(folder: &Path, memory: &GuestMemory) -> io::Result<Vec<LeasedRegion>> {
    let mut regions = Vec::new();
    for region in memory.regions() {
        let (device, inode) = region.file_identity();
        let file = MemoryFile { device, inode };
        let pages = region.file_bytes()?.div_ceil(PAGE);
        let Some(place) = Place::of(folder, file, pages)? else { continue };
        let &Region { start, file_offset: offset, .. } = region;
        regions.push(LeasedRegion { file, start, end: region.end(), offset, place });
    }
    Ok(regions)
}

impl Pager for GuestLeases {
    fn lease(&self, range: &Range<u64>, purpose: Purpose) -> bool {
        // A region without a table has no pager.
        let Some((place, pages)) = self.pages(range) else { return true };
        for page in pages.clone() {
            if !place.lease(page, purpose) {
                for leased in pages.start..page {
                    place.release(leased, purpose);
                }
                // A look brings nothing in.
                let overwritten = self.overwritten(range, purpose);
                if purpose != Purpose::Look && place.want(page..pages.end, &overwritten) {
                    note_absence(place.is_arriving(page..pages.end));
                }
                return false;
            }
        }
        true
    }

    fn want(&self, range: &Range<u64>, purpose: Purpose) {
        let Some((place, pages)) = self.pages(range) else { return };
        let is_away = |page: &u64| place.table.word(*page).state().is_away();
        if let Some(first) = pages.clone().take(WANTED_MAX as usize).find(is_away) {
            place.want(first..pages.end, &self.overwritten(range, purpose));
        }
    }

    fn release(&self, range: &Range<u64>, purpose: Purpose) {
        let Some((place, pages)) = self.pages(range) else { return };
        for page in pages {
            place.release(page, purpose);
        }
    }

    fn identity(&self) -> u64 {
        let inodes = self.regions.iter().map(|region| region.place.identity.inode);
        inodes.fold(1_u64, |sum, inode| sum.rotate_left(7) ^ inode).max(1)
    }
}
