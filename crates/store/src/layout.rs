//! Where the parts of a pool lie on its device.
//!
//! ```text
//!  0           8 KiB                                                            first segment
//!  ┌───────────┬───────────────┬───────────────┬──────────────┬──────────────┬──────────┬───
//!  │superblocks│ checkpoint 0  │ checkpoint 1  │ space map ×2 │ page table ×2│ segment 0│ …
//!  └───────────┴───────────────┴───────────────┴──────────────┴──────────────┴──────────┴───
//! ```
//! All numbers of places count blocks from the start of the device.

/// The unit of volumes and of places, in bytes.
pub const BLOCK: u64 = 4096;
/// [`BLOCK`] as a length in memory.
pub const BLOCK_BYTES: usize = BLOCK as usize;
/// The blocks of a segment of a new pool: 4 MiB.
pub const SEGMENT_BLOCKS: u32 = 1024;
/// The fewest blocks of a segment.
pub const SEGMENT_BLOCKS_MIN: u32 = 16;
/// The fewest segments of a pool.
pub const SEGMENTS_MIN: u64 = 12;
/// The most blocks of a pool: a place has 36 bits.
pub const POOL_BLOCKS_MAX: u64 = 1 << 36;
/// The bytes of a [two-copy page](crate::paged) that are its own.
pub(crate) const PAYLOAD: usize = BLOCK_BYTES - 16;
/// The bytes of an entry of the page table.
pub(crate) const TABLE_ENTRY: usize = 16;
/// The entries in a page of the page table.
pub(crate) const TABLE_ENTRIES: u64 = (PAYLOAD / TABLE_ENTRY) as u64;
/// The places that a page of the fingerprint table describes.
pub(crate) const FINGERPRINTS: usize = 512;
/// The bytes of a page of the space map that have one bit for each of its places.
pub(crate) const SPACE_BITS: usize = PAYLOAD / 2;

/// The sizes of a pool, which are fixed when it is made but for the number of its segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The blocks of a segment: a power of two.
    pub segment_blocks: u32,
    /// The segments in use.
    pub segments: u32,
    /// The blocks of each of the two places of a checkpoint's record.
    pub record_blocks: u32,
    /// The pages of the space map, each of which has two copies.
    pub space_pages: u32,
    /// The pages of the page table, each of which has two copies.
    pub table_pages: u32,
    /// The pages of the fingerprint table.
    pub fingerprint_pages: u32,
}

impl Layout {
    /// The layout of a new pool on a device of `capacity` bytes, which may later grow to
    /// `capacity_max` bytes. `None` if the device is too small or too large.
    pub fn new(capacity: u64, capacity_max: u64, segment_blocks: u32) -> Option<Self> {
        let is_valid = segment_blocks.is_power_of_two()
            && (SEGMENT_BLOCKS_MIN..=SEGMENT_BLOCKS).contains(&segment_blocks);
        let blocks_max = capacity_max.max(capacity) / BLOCK;
        if !is_valid || blocks_max > POOL_BLOCKS_MAX {
            return None;
        }
        // A page of a volume's map describes 512 blocks. Twice as many pages as all volumes can
        // have without snapshots, and some for small pools.
        let map_pages = blocks_max / 256 + 1024;
        let mut layout = Self {
            segment_blocks,
            segments: 0,
            record_blocks: u32::try_from((blocks_max / 64).clamp(32, 4096)).ok()?,
            space_pages: 0,
            table_pages: u32::try_from(map_pages.div_ceil(TABLE_ENTRIES)).ok()?,
            fingerprint_pages: u32::try_from(blocks_max.div_ceil(FINGERPRINTS as u64)).ok()?,
        };
        let pages = blocks_max.div_ceil(layout.places_in_page());
        layout.space_pages = u32::try_from(pages).ok()?;
        layout.segments = layout.segments_on(capacity)?;
        Some(layout)
    }

    /// The segments that fit on a device of `capacity` bytes; `None` if they are too few.
    pub fn segments_on(&self, capacity: u64) -> Option<u32> {
        let blocks = (capacity / BLOCK).checked_sub(self.first_segment())?;
        let segments = blocks / u64::from(self.segment_blocks);
        let mapped = u64::from(self.space_pages) * self.places_in_page();
        let mapped = mapped.min(u64::from(self.fingerprint_pages) * FINGERPRINTS as u64);
        let segments = segments.min(mapped / u64::from(self.segment_blocks));
        u32::try_from(segments).ok().filter(|_| segments >= SEGMENTS_MIN)
    }

    /// Whether a superblock can have this layout.
    pub(crate) fn is_sane(&self) -> bool {
        let places = u64::from(self.segments) * u64::from(self.segment_blocks);
        self.segment_blocks.is_power_of_two()
            && (SEGMENT_BLOCKS_MIN..=SEGMENT_BLOCKS).contains(&self.segment_blocks)
            && u64::from(self.segments) >= SEGMENTS_MIN
            && (1..=1 << 20).contains(&self.record_blocks)
            && (1..=1 << 28).contains(&self.table_pages)
            && self.space_pages > 0
            && places <= u64::from(self.space_pages) * self.places_in_page()
            && places <= u64::from(self.fingerprint_pages) * FINGERPRINTS as u64
            && self.first_segment() + places <= POOL_BLOCKS_MAX
    }

    /// The places that a page of the space map describes: whole segments.
    pub(crate) fn places_in_page(&self) -> u64 {
        let blocks = u64::from(self.segment_blocks);
        (SPACE_BITS as u64 * 8) / blocks * blocks
    }

    /// The first block of the record of checkpoints with an even or odd `number`.
    pub(crate) fn record(&self, number: u64) -> u64 {
        2 + (number & 1) * u64::from(self.record_blocks)
    }

    /// The first block of the pages of the space map.
    pub(crate) fn space_map(&self) -> u64 {
        2 + 2 * u64::from(self.record_blocks)
    }

    /// The first block of the pages of the page table.
    pub(crate) fn page_table(&self) -> u64 {
        self.space_map() + 2 * u64::from(self.space_pages)
    }

    /// The first block of the pages of the fingerprint table.
    pub(crate) fn fingerprint_table(&self) -> u64 {
        self.page_table() + 2 * u64::from(self.table_pages)
    }

    /// The first block of segment 0.
    pub(crate) fn first_segment(&self) -> u64 {
        let end = self.fingerprint_table() + u64::from(self.fingerprint_pages);
        end.next_multiple_of(u64::from(self.segment_blocks))
    }

    /// The number of places in all segments.
    pub(crate) fn places(&self) -> u64 {
        u64::from(self.segments) * u64::from(self.segment_blocks)
    }

    /// The block on the device of a place, which counts from the first segment on.
    pub(crate) fn block(&self, place: u64) -> u64 {
        self.first_segment() + place
    }

    /// The place of a block on the device; `None` if it lies in no segment.
    pub(crate) fn place(&self, block: u64) -> Option<u64> {
        block.checked_sub(self.first_segment()).filter(|place| *place < self.places())
    }

    /// The segment of a place.
    pub(crate) fn segment(&self, place: u64) -> u32 {
        (place / u64::from(self.segment_blocks)) as u32
    }

    /// The bytes that data can have.
    pub fn data_bytes(&self) -> u64 {
        self.places() * BLOCK
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_pool_do_not_overlap_and_lie_on_the_device() {
        for (capacity, segment_blocks) in [(4 << 20, 16), (64 << 20, 64), (1 << 40, 1024)] {
            let layout = Layout::new(capacity, 4 * capacity, segment_blocks).unwrap();
            assert!(layout.is_sane());
            assert_eq!(layout.record(0), 2);
            assert_eq!(layout.record(1), 2 + u64::from(layout.record_blocks));
            let end = layout.page_table() + 2 * u64::from(layout.table_pages);
            assert_eq!(layout.fingerprint_table(), end);
            assert!(layout.first_segment() >= end + u64::from(layout.fingerprint_pages));
            assert!(layout.block(layout.places()) * BLOCK <= capacity);
            assert!(layout.segments_on(4 * capacity).unwrap() > 3 * layout.segments);
            assert_eq!(layout.place(layout.block(7)), Some(7));
            assert_eq!(layout.place(layout.first_segment() - 1), None);
            assert_eq!(layout.place(layout.block(layout.places())), None);
        }
        // The parts besides segments take little of a large pool.
        let layout = Layout::new(1 << 40, 4 << 40, 1024).unwrap();
        assert!(layout.first_segment() * BLOCK < 10 << 30, "{layout:?}");
        assert_eq!(Layout::new(1 << 20, 1 << 20, 16), None);
        assert_eq!(Layout::new(1 << 40, 1 << 40, 24), None);
        assert_eq!(Layout::new(1 << 50, 1 << 50, 1024), None);
    }
}
