//! Examines the pages of a cache volume, as they are read, without I/O. It finds what an opening
//! would use, and what it would drop.

use std::collections::BTreeMap;

use crate::format::{BLOCK_BITS, DiskRecord, GRANULE, PAGE_LENGTH, Superblock};

/// What a volume has of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskSummary {
    /// The disk's page.
    pub record: DiskRecord,
    /// The regions with recent changes, as bits.
    regions: Vec<u64>,
    /// The number of regions with recent changes.
    pub active: u64,
    /// Blocks that an opening would use if the state of the disk fits.
    pub blocks: u64,
    /// Bytes of these blocks that are valid.
    pub bytes: u64,
    /// Blocks in regions with recent changes, which an opening drops.
    pub dropped: u64,
}

/// A block that an opening would use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedBlock {
    /// The place of the slot, in bytes from the start of the volume.
    pub place: u64,
    /// The valid granules, as bits.
    pub valid: u16,
    /// The checksums of the granules.
    pub sums: Vec<u16>,
    /// The number of the disk.
    pub disk: u16,
    /// The offset of the block in the disk, in bytes.
    pub offset: u64,
}

/// An examination. The pages are given in the order of their numbers.
pub struct Inspection {
    format: Superblock,
    /// The disks, by their numbers.
    pub disks: BTreeMap<u16, DiskSummary>,
    /// The pages of which one copy is neither sound nor blank, as after a crash during its writing.
    /// Their blocks are dropped; all regions of such a page count as changed.
    pub torn: u64,
    /// The pages without a sound copy that are not blank.
    pub damaged: u64,
    /// Entries of the tables that belong to no disk.
    pub orphans: u64,
    /// Blocks that are in the tables twice.
    pub duplicates: u64,
    /// The keys of the blocks so far, to find those that occur twice.
    seen: std::collections::HashSet<u64>,
}

impl Inspection {
    /// Begins the examination of a volume with this superblock.
    pub fn new(format: Superblock) -> Self {
        Self {
            format,
            disks: BTreeMap::new(),
            torn: 0,
            damaged: 0,
            orphans: 0,
            duplicates: 0,
            seen: std::collections::HashSet::new(),
        }
    }

    /// Examines page `page`, of which `copies` has both copies. Calls `visit` with each block in it
    /// that an opening would use.
    pub fn page(&mut self, page: u32, copies: &[u8], mut visit: impl FnMut(CachedBlock)) {
        let format = self.format;
        let mut each = copies.chunks(PAGE_LENGTH).enumerate();
        let is_certain = each.all(|(index, copy)| format.is_sound_or_blank(page, index, copy));
        let valid = format.valid(page, copies).map(|(_, bytes)| bytes);
        if !is_certain {
            *(if valid.is_some() { &mut self.torn } else { &mut self.damaged }) += 1;
        }
        let bitmaps = format.disks..format.table_first();
        if page < format.disks {
            let Some(record) = valid.and_then(|bytes| format.read_disk(bytes)) else { return };
            let regions = Vec::new();
            let (active, blocks, bytes, dropped) = (0, 0, 0, 0);
            let summary = DiskSummary { record, regions, active, blocks, bytes, dropped };
            self.disks.insert(page as u16 + 1, summary);
        } else if bitmaps.contains(&page) {
            let disk = (page - format.disks) / format.bitmap_pages + 1;
            let Some(disk) = self.disks.get_mut(&(disk as u16)) else { return };
            let bits = match valid {
                Some(bytes) if is_certain => format.read_bitmap(bytes),
                None if is_certain => vec![0; crate::format::REGIONS_PER_PAGE as usize / 64],
                _ => vec![u64::MAX; crate::format::REGIONS_PER_PAGE as usize / 64],
            };
            disk.active += bits.iter().map(|word| u64::from(word.count_ones())).sum::<u64>();
            disk.regions.extend(bits);
        } else if let Some(bytes) = valid.filter(|_| is_certain) {
            self.table(page, bytes, &mut visit);
        }
    }

    fn table(&mut self, page: u32, bytes: &[u8], visit: &mut impl FnMut(CachedBlock)) {
        let format = self.format;
        let first = (page - format.table_first()) * format.entries_per_page();
        let mut sums = vec![0; format.granules() as usize];
        for slot in first..(first + format.entries_per_page()).min(format.slots) {
            let Some(entry) = format.read_entry(bytes, slot - first, &mut sums) else { continue };
            let number = (entry.key >> BLOCK_BITS) as u16;
            let block = entry.key & ((1 << BLOCK_BITS) - 1);
            let offset = block.checked_mul(u64::from(format.block_size));
            let (Some(disk), Some(offset)) = (self.disks.get_mut(&number), offset) else {
                self.orphans += 1;
                continue;
            };
            if disk.is_active(offset) {
                disk.dropped += 1;
                continue;
            }
            if !self.seen.insert(entry.key) {
                self.duplicates += 1;
                continue;
            }
            disk.blocks += 1;
            disk.bytes += u64::from(entry.valid.count_ones() * GRANULE);
            visit(CachedBlock {
                place: format.slot_offset(slot),
                valid: entry.valid,
                sums: entry.sums.to_vec(),
                disk: number,
                offset,
            });
        }
    }
}

impl DiskSummary {
    /// Whether the region of a byte of the disk has recent changes.
    fn is_active(&self, offset: u64) -> bool {
        let last = (self.regions.len() as u64 * 64).saturating_sub(1);
        let region = (offset >> self.record.region_shift).min(last) as usize;
        self.regions.get(region / 64).is_some_and(|word| word >> (region % 64) & 1 == 1)
    }
}

#[cfg(test)]
mod tests {
    use fathom_persistence::Identity;

    use super::*;
    use crate::format::{Owner, SlotEntry};

    fn format() -> Superblock {
        Superblock::new(Identity([7; 16]), 8 << 20, 8192, 2, 1).unwrap()
    }

    fn record() -> DiskRecord {
        let owner = Owner::new("disk", "").unwrap();
        DiskRecord { owner, region_shift: 20, ..DiskRecord::default() }
    }

    /// Examines a volume of these pages; the others are blank.
    fn inspect(pages: &BTreeMap<u32, Box<[u8]>>) -> (Inspection, Vec<CachedBlock>) {
        let format = format();
        let (mut inspection, mut blocks) = (Inspection::new(format), Vec::new());
        for page in 0..format.pages() {
            let mut copies = vec![0; 2 * PAGE_LENGTH];
            if let Some(bytes) = pages.get(&page) {
                copies[..PAGE_LENGTH].copy_from_slice(bytes);
            }
            inspection.page(page, &copies, |block| blocks.push(block));
        }
        (inspection, blocks)
    }

    fn pages(bits: &[u64]) -> BTreeMap<u32, Box<[u8]>> {
        let format = format();
        let key = |disk: u64, block: u64| disk << BLOCK_BITS | block;
        let entry = |key| Some(SlotEntry { key, valid: 0b10, class: 0, sums: &[3, 4] });
        let entries =
            [entry(key(1, 5)), None, entry(key(1, 200)), entry(key(2, 0)), entry(key(1, 5))];
        let table = format.table_first();
        BTreeMap::from([
            (0, format.disk_bytes(0, 4, &record())),
            (format.bitmap_first(1), format.bitmap_bytes(format.bitmap_first(1), 2, bits)),
            (table, format.table_bytes(table, 8, entries.into_iter())),
        ])
    }

    #[test]
    fn blocks_outside_of_changed_regions_are_found() {
        // Block 200 is in the second MiB of the disk.
        let (inspection, blocks) = inspect(&pages(&[0b10]));
        let disk = &inspection.disks[&1];
        assert_eq!((disk.blocks, disk.bytes, disk.dropped, disk.active), (1, 4096, 1, 1));
        assert_eq!((inspection.orphans, inspection.duplicates), (1, 1));
        assert_eq!((inspection.torn, inspection.damaged), (0, 0));
        let place = format().slot_offset(0);
        let expected =
            CachedBlock { place, valid: 0b10, sums: vec![3, 4], disk: 1, offset: 5 * 8192 };
        assert_eq!(blocks, [expected]);
    }

    #[test]
    fn a_damaged_page_loses_its_content() {
        for page in pages(&[]).into_keys() {
            let mut damaged = pages(&[]);
            damaged.get_mut(&page).unwrap()[100] ^= 1;
            let (inspection, blocks) = inspect(&damaged);
            assert_eq!((inspection.damaged, blocks.len()), (1, 0), "page {page}");
        }
        assert_eq!(inspect(&pages(&[])).1.len(), 2);
    }
}
