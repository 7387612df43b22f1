//! The side of a process that maps the guest's memory.

use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::memory::GuestMemory;
use crate::pager::{Pager, Purpose};
use crate::region::Region;

use super::table::{LeaseTable, MemoryFile};

/// A page, in bytes.
const PAGE: u64 = 4096;
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
}

impl Place {
    /// The place in the table of a memory file, if there is one.
    fn of(folder: &Path, memory: MemoryFile) -> io::Result<Option<Arc<Self>>> {
        // The whole function: two threads that take places would take two.
        let mut places = PLACES.lock();
        let Some(table) = LeaseTable::open(folder, memory)? else { return Ok(None) };
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
        let place = Arc::new(Self { table, identity, holder });
        places.push(Arc::downgrade(&place));
        Ok(Some(place))
    }

    fn lease(&self, page: u64, purpose: Purpose) -> bool {
        if self.table.is_lost() {
            // A lease that the pager does not see is none.
            return false;
        }
        let leased = self.table.change(page, |word| word.lease(self.holder, purpose));
        // A look brings nothing in.
        if leased.is_err() && purpose != Purpose::Look {
            let wanted = |word: crate::PageWord| Some(word.want()).filter(|next| *next != word);
            let _ = self.table.change(page, wanted);
        }
        leased.is_ok()
    }

    fn release(&self, page: u64, purpose: Purpose) {
        let _ = self.table.change(page, |word| Some(word.release(self.holder, purpose)));
    }
}

/// A region of guest-physical addresses whose pages have words.
#[derive(Debug)]
struct LeasedRegion {
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
}

impl GuestLeases {
    /// Those on the pages of `memory`, in the tables of `folder`. `None` if there are no tables:
    /// the guest has no pager.
    ///
    /// # Errors
    /// When a table cannot be used.
    pub fn find(folder: &Path, memory: &GuestMemory) -> io::Result<Option<Arc<Self>>> {
        let mut regions = Vec::new();
        for region in memory.regions() {
            let (device, inode) = region.file_identity();
            let Some(place) = Place::of(folder, MemoryFile { device, inode })? else { continue };
            let &Region { start, file_offset: offset, .. } = region;
            regions.push(LeasedRegion { start, end: region.end(), offset, place });
        }
        Ok((!regions.is_empty()).then(|| Arc::new(Self { regions })))
    }

    /// Says to the pager that all accesses of this process to the guest's memory take leases, and
    /// none from before is in flight.
    pub fn set_ready(&self) {
        for region in &self.regions {
            region.place.table.set_ready(region.place.holder);
        }
    }

    /// The pages of a range, in their table.
    fn pages(&self, range: &Range<u64>) -> Option<(&Place, Range<u64>)> {
        let is_in = |region: &&LeasedRegion| (region.start..region.end).contains(&range.start);
        let region = self.regions.iter().find(is_in)?;
        let at = |address: u64| address - region.start + region.offset;
        let end = at(range.end.min(region.end));
        Some((&region.place, at(range.start) / PAGE..end.div_ceil(PAGE)))
    }
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
                return false;
            }
        }
        true
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
