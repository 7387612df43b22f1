//! Content that was read or written lately and is written again: copies of files.
//!
//! The table has a fingerprint of each 4 KiB of a file that were read or written lately: of their
//! first sector, which is what is looked for, and of all of them. Archives have files at any
//! multiple of 512 bytes, so each sector that is written is looked for; while a copy goes on, only
//! the sector where its next page begins. Pages that have one value only, such as zeroes, are not
//! in the table.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::content::PAGE;
use super::files::FileId;

/// A sector, in bytes.
pub(super) const SECTOR: usize = 512;
/// The entries that compete for a place.
const WAYS: usize = 4;
/// The least content that is a copy, unless it is all of a file: 64 KiB. Less may be equal by
/// chance, or because a database writes pages twice.
const RUN_MIN: u64 = 16 * PAGE as u64;

/// A page of a file that was read or written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Entry {
    /// Of the fingerprint of the first sector, what does not choose the place; 0 for none.
    tag: u32,
    /// Of the fingerprint of the page.
    check: u32,
    /// The file: [`FileId::to_bits`].
    file: u32,
    /// The number of the page in its file.
    page: u32,
}

/// Where content was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub file: FileId,
    /// The place in that file, in bytes.
    pub offset: u64,
}

/// The table.
pub(super) struct Fingerprints {
    entries: Box<[[Entry; WAYS]]>,
    next: u32,
    /// Makes fingerprints differ between daemons, so that a guest cannot choose content with equal
    /// ones.
    seed: u64,
}

/// The fingerprints of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fingerprint {
    sector: u64,
    page: u64,
}

impl Fingerprints {
    /// A table of at most `memory` bytes.
    pub fn new(memory: u64, seed: u64) -> Self {
        let sets = (memory / size_of::<[Entry; WAYS]>() as u64).max(1);
        let sets = 1_usize << sets.ilog2();
        Self { entries: vec![[Entry::default(); WAYS]; sets].into(), next: 0, seed }
    }

    /// The memory of the table, in bytes.
    pub fn memory(&self) -> u64 {
        size_of_val(&*self.entries) as u64
    }

    /// The fingerprint of a page; `None` if it is not looked for.
    pub fn of(&self, page: &[u8]) -> Option<Fingerprint> {
        let page: &[u8; PAGE] = page.first_chunk()?;
        let sector = &page[..SECTOR];
        if page[1..] == page[..PAGE - 1] {
            return None;
        }
        let of_page = self.hash(page);
        // Many pages begin with zeroes: they are found while a copy goes on, by all of their bytes.
        let is_common = sector[1..] == sector[..SECTOR - 1];
        let of_sector = if is_common { of_page } else { self.hash(sector) };
        Some(Fingerprint { sector: of_sector, page: of_page })
    }

    fn hash(&self, bytes: &[u8]) -> u64 {
        xxh3_64_with_seed(bytes, self.seed)
    }

    fn place(&self, sector: u64) -> (usize, u32) {
        let place = (sector >> 32) as usize & (self.entries.len() - 1);
        (place, (sector as u32).max(1))
    }

    /// Where this page was read or written last; the first place of content that several files
    /// have.
    pub fn find(&self, of: Fingerprint) -> Option<Found> {
        let (place, tag) = self.place(of.sector);
        let entry = self.entries[place]
            .iter()
            .find(|entry| entry.tag == tag && entry.check == of.page as u32);
        entry.map(Entry::found)
    }

    /// Whether the page of a file at `offset` begins with a sector.
    pub fn begins_with(&self, sector: &[u8], file: FileId, offset: u64) -> bool {
        let (place, tag) = self.place(self.hash(sector));
        let is_own = |entry: &Entry| entry.tag == tag && entry.found() == Found { file, offset };
        sector.len() == SECTOR && self.entries[place].iter().any(is_own)
    }

    /// Whether the content whose first sector is `sector` may be in the table.
    fn has_sector(&self, sector: &[u8]) -> bool {
        let (place, tag) = self.place(self.hash(sector));
        self.entries[place].iter().any(|entry| entry.tag == tag)
    }

    /// Notes a page of a file. The file that had the same content before stays the one with it,
    /// while `is_valid` says that it exists.
    pub fn add(
        &mut self,
        of: Fingerprint,
        file: FileId,
        page: u64,
        is_valid: impl FnOnce(FileId) -> bool,
    ) {
        let Ok(page) = u32::try_from(page) else { return };
        let (place, tag) = self.place(of.sector);
        let set = &mut self.entries[place];
        let entry = Entry { tag, check: of.page as u32, file: file.to_bits(), page };
        let same = set.iter_mut().find(|old| old.tag == tag && old.check == entry.check);
        match same {
            Some(old) if is_valid(FileId::from_bits(old.file)) => {}
            Some(old) => *old = entry,
            None => {
                self.next = self.next.wrapping_add(1);
                let free = set.iter().position(|old| old.tag == 0);
                set[free.unwrap_or(self.next as usize % WAYS)] = entry;
            }
        }
    }

    /// The places in `data` where pages begin that may be known: multiples of a sector.
    pub fn candidates<'d>(&'d self, data: &'d [u8]) -> impl Iterator<Item = usize> + 'd {
        let last = data.len().checked_sub(PAGE);
        let places = last.map_or(0..0, |last| 0..last / SECTOR + 1);
        places.map(|place| place * SECTOR).filter(|at| self.has_sector(&data[*at..][..SECTOR]))
    }
}

impl Entry {
    fn found(&self) -> Found {
        let offset = u64::from(self.page) * PAGE as u64;
        Found { file: FileId::from_bits(self.file), offset }
    }
}

/// The copy that goes on into a file.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Run {
    /// The source; only if `bytes` is not 0.
    pub source: FileId,
    /// The place in the source less the place in the target, in bytes.
    delta: i64,
    /// The bytes that were found in a row.
    bytes: u64,
    /// Whether it was recognised as a copy.
    pub is_known: bool,
    /// The bytes that have not been reported.
    pub unreported: u64,
}

impl Run {
    /// Adds a page that was found, or the `bytes` of it that exist.
    pub fn add(&mut self, found: Found, target_offset: u64, bytes: u64) {
        if self.continues(found, target_offset) {
            self.bytes += bytes;
            self.unreported += bytes;
        } else {
            let delta = found.offset.wrapping_sub(target_offset) as i64;
            let source = found.file;
            *self = Self { source, delta, bytes, unreported: bytes, is_known: false };
        }
    }

    /// The bytes that were found in a row.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The place in the source that belongs to a place in the target.
    pub fn source_of(&self, target_offset: u64) -> u64 {
        target_offset.wrapping_add_signed(self.delta)
    }

    /// Where in `data`, which is at `offset` of the target, the next page of the source would
    /// begin.
    pub fn next_in(&self, offset: u64) -> Option<usize> {
        if self.bytes == 0 {
            return None;
        }
        let source = (offset as i64).wrapping_add(self.delta);
        Some((PAGE as i64 - source.rem_euclid(PAGE as i64)).rem_euclid(PAGE as i64) as usize)
    }

    /// Whether the place in `data` continues the copy.
    pub fn continues(&self, found: Found, target_offset: u64) -> bool {
        let delta = found.offset.wrapping_sub(target_offset) as i64;
        self.bytes > 0 && self.source == found.file && self.delta == delta
    }

    /// Whether there is enough for a copy into a file of `size` bytes from one of `source` bytes.
    pub fn is_copy(&self, size: u64, source: u64) -> bool {
        let whole = size.div_ceil(PAGE as u64).saturating_mul(PAGE as u64);
        self.bytes >= RUN_MIN || self.bytes > 0 && size == source && self.bytes >= whole
    }
}

#[cfg(test)]
mod tests {
    use fathom_insight::Facts;

    use super::super::files::Files;
    use super::*;

    fn content(seed: u64, pages: usize) -> Vec<u8> {
        let mut random = fastrand::Rng::with_seed(seed);
        (0..pages * PAGE).map(|_| random.u8(..)).collect()
    }

    fn ids() -> (FileId, FileId) {
        let mut files = Files::new();
        let mut id = |inode| files.find(&Facts { inode, ..Facts::default() }).0;
        (id(1), id(2))
    }

    #[test]
    fn content_is_found_at_any_sector() {
        let ((first, second), mut table) = (ids(), Fingerprints::new(1 << 20, 7));
        let source = content(1, 32);
        for (number, page) in source.chunks(PAGE).enumerate() {
            table.add(table.of(page).unwrap(), first, number as u64, |_| true);
        }
        for shift in [0, 512, 3 * 512] {
            let mut archive = vec![b'h'; shift];
            archive.extend(&source);
            let mut run = Run::default();
            let places: Vec<usize> = table.candidates(&archive).collect();
            assert_eq!(places.len(), 32);
            for at in places {
                let found = table.find(table.of(&archive[at..]).unwrap()).unwrap();
                assert_eq!(found, Found { file: first, offset: (at - shift) as u64 });
                run.add(found, at as u64, 4096);
                let next = run.next_in(at as u64 + 1).unwrap();
                assert_eq!((at + 1 + next) % PAGE, shift % PAGE);
            }
            assert!(run.is_copy(1 << 30, 1 << 20) && run.source == first);
        }
        // The file that had the content first has it, until it is forgotten.
        let print = table.of(&source).unwrap();
        table.add(print, second, 9, |_| true);
        assert_eq!(table.find(print).unwrap().file, first);
        table.add(print, second, 9, |_| false);
        assert_eq!(table.find(print).unwrap(), Found { file: second, offset: 9 * 4096 });
    }

    #[test]
    fn other_content_is_not_found() {
        let ((first, _), mut table) = (ids(), Fingerprints::new(1 << 16, 7));
        assert!(table.of(&[0; PAGE]).is_none() && table.of(&[1; 100]).is_none());
        for (number, page) in content(2, 4096).chunks(PAGE).enumerate() {
            table.add(table.of(page).unwrap(), first, number as u64, |_| true);
        }
        let other = content(3, 1024);
        let found = other.chunks(PAGE).filter_map(|page| table.find(table.of(page).unwrap()));
        assert_eq!(found.count(), 0);
        // The same first sector, but another page.
        let mut page = content(2, 1);
        page[4000] ^= 1;
        assert!(table.find(table.of(&page).unwrap()).is_none());
        assert_eq!(table.memory(), 1 << 16);
    }

    #[test]
    fn short_runs_are_no_copies_unless_they_are_whole_files() {
        let (first, second) = ids();
        let mut run = Run::default();
        for page in 0..3_u64 {
            run.add(Found { file: first, offset: page * 4096 }, page * 4096, 4096);
        }
        assert!(run.is_copy(3 * 4096, 3 * 4096) && run.is_copy(9000, 9000));
        assert!(!run.is_copy(3 * 4096, 4 * 4096) && !run.is_copy(5 * 4096, 5 * 4096));
        // Another place of the same source, or another source, begins another run.
        run.add(Found { file: first, offset: 0 }, 4 * 4096, 4096);
        assert!(!run.is_copy(3 * 4096, 3 * 4096));
        run.add(Found { file: second, offset: 4096 }, 5 * 4096, 4096);
        assert_eq!(run.unreported, 4096);
    }
}
