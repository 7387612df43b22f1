//! The format of a cache volume. This file does no I/O. `docs/cache.md` describes the format byte
//! by byte.
//!
//! Behind a superblock come pages of 4 KiB, each in two copies that are written alternately, and
//! then the slots with the cached blocks. A page has a sequence: of its two copies, the sound one
//! with the higher sequence is valid. There are three kinds of pages, in this order: one for each
//! disk, the bitmaps of regions with recent writes of each disk, and the tables of the slots.
//! Behind the slots there may be an area for write-ahead logs, in parts of equal length; their
//! format is that of another crate.

use fathom_persistence::bytes::{array, put, u16_at, u32_at, u64_at};
use fathom_persistence::{CopyOrder, Identity, SUPERBLOCK_LENGTH, SuperblockBytes};

/// The length of a page and of a copy of the superblock, in bytes.
pub const PAGE_LENGTH: usize = SUPERBLOCK_LENGTH;
/// The unit in which a block's content is valid and has a checksum, in bytes.
pub const GRANULE: u32 = 4096;
/// The smallest and the largest block, in bytes.
pub const BLOCK_SIZES: std::ops::RangeInclusive<u32> = 4096..=65536;
/// The most disks of a volume. A disk's number has 16 bits, and 0 is none.
pub const DISKS_MAX: u32 = 4096;
/// The number of bits of a key that are the block's number; the others are the disk's number.
pub const BLOCK_BITS: u32 = 48;

/// The version of volumes without an area for logs.
const VERSION_WITHOUT_LOGS: u32 = 1;
/// The highest sequence of a page: no volume gets there, and the next one has a number.
const SEQUENCE_MAX: u64 = u64::MAX >> 1;
const PAGE_MAGIC: [u8; 4] = *b"CPAG";
const HEADER_LENGTH: usize = 64;
const PAYLOAD_LENGTH: usize = PAGE_LENGTH - HEADER_LENGTH;
/// The number of regions whose bits are in one page.
pub const REGIONS_PER_PAGE: u64 = PAYLOAD_LENGTH as u64 * 8;
const LENGTHS_AT: usize = HEADER_LENGTH + 18;
const NAMES_AT: usize = HEADER_LENGTH + 64;
/// The most slots of a volume.
const SLOTS_MAX: u64 = 1 << 30;
/// The most logs of a volume: no more disks can use it.
pub const LOGS_MAX: u32 = DISKS_MAX;
/// The least and the greatest length of a log's place, in bytes. It is a multiple of [`LOG_UNIT`].
pub const LOG_LENGTHS: std::ops::RangeInclusive<u64> = 1 << 17..=1 << 40;
/// The unit of the length of a log's place, in bytes.
pub const LOG_UNIT: u64 = 4096;

/// A superblock. It is written when a cache is made, in two equal copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// The identity of the cache, drawn at random when it was made.
    pub cache: Identity,
    /// The size of a block, in bytes: a power of two in [`BLOCK_SIZES`].
    pub block_size: u32,
    /// The number of disks that the volume can have.
    pub disks: u32,
    /// The number of pages with bits of regions that each disk has.
    pub bitmap_pages: u32,
    /// The number of slots.
    pub slots: u32,
    /// The number of places for logs; 0 for none.
    pub logs: u32,
    /// The length of each of these places, in bytes; 0 if there are none.
    pub log_length: u64,
}

impl Superblock {
    /// The superblock of a new cache in a volume of `length` bytes; `None` if that is too short for
    /// a single slot.
    pub fn new(
        cache: Identity,
        length: u64,
        block_size: u32,
        disks: u32,
        bitmap_pages: u32,
    ) -> Option<Self> {
        let mut superblock =
            Self { cache, block_size, disks, bitmap_pages, slots: 0, logs: 0, log_length: 0 };
        // One page of a table has `entries` slots.
        let entries = u64::from(superblock.entries_per_page());
        let fixed = superblock.page_offset(superblock.table_first(), 0) + u64::from(block_size);
        let unit = 2 * PAGE_LENGTH as u64 + entries * u64::from(block_size);
        let rest = length.checked_sub(fixed)?;
        let whole = rest / unit * entries;
        let part = (rest % unit).saturating_sub(2 * PAGE_LENGTH as u64) / u64::from(block_size);
        superblock.slots = u32::try_from((whole + part).min(SLOTS_MAX)).ok()?;
        (superblock.slots > 0).then_some(superblock)
    }

    /// The number of granules of a block.
    pub fn granules(&self) -> u32 {
        self.block_size / GRANULE
    }

    fn entry_length(&self) -> usize {
        12 + 2 * self.granules() as usize
    }

    /// The number of slots whose entries are in one page.
    pub fn entries_per_page(&self) -> u32 {
        (PAYLOAD_LENGTH / self.entry_length()) as u32
    }

    /// The page of the disk with this number, which counts from 1.
    pub fn disk_page(&self, disk: u16) -> u32 {
        u32::from(disk) - 1
    }

    /// The first page with the bits of a disk's regions.
    pub fn bitmap_first(&self, disk: u16) -> u32 {
        self.disks + (u32::from(disk) - 1) * self.bitmap_pages
    }

    /// The first page of the tables of slots.
    pub fn table_first(&self) -> u32 {
        self.disks * (1 + self.bitmap_pages)
    }

    /// The number of pages.
    pub fn pages(&self) -> u32 {
        self.table_first() + self.slots.div_ceil(self.entries_per_page())
    }

    /// The place of the copy of a page that has `sequence`, in bytes from the start of the volume.
    pub fn page_offset(&self, page: u32, sequence: u64) -> u64 {
        let copy = 2 + 2 * u64::from(page) + sequence % 2;
        copy * PAGE_LENGTH as u64
    }

    /// The place of a slot, in bytes from the start of the volume.
    pub fn slot_offset(&self, slot: u32) -> u64 {
        let first = self.page_offset(self.pages(), 0).next_multiple_of(u64::from(self.block_size));
        first + u64::from(slot) * u64::from(self.block_size)
    }

    /// The same volume with places for `logs` logs of `log_length` bytes each behind the slots.
    /// `None` if their number or length is not valid.
    pub fn with_logs(self, logs: u32, log_length: u64) -> Option<Self> {
        let superblock = Self { logs, log_length, ..self };
        (logs > 0 && superblock.has_sound_logs()).then_some(superblock)
    }

    fn has_sound_logs(&self) -> bool {
        if self.logs == 0 {
            return self.log_length == 0;
        }
        self.logs <= LOGS_MAX
            && LOG_LENGTHS.contains(&self.log_length)
            && self.log_length % LOG_UNIT == 0
    }

    /// The place of log number `log`, which counts from 0, in bytes from the start of the volume.
    pub fn log_offset(&self, log: u32) -> u64 {
        self.slot_offset(self.slots) + u64::from(log) * self.log_length
    }

    /// The length of the volume, in bytes.
    pub fn length(&self) -> u64 {
        self.log_offset(self.logs)
    }

    /// A page's bytes without a payload.
    fn blank(&self, page: u32, sequence: u64) -> Box<[u8]> {
        let mut bytes = vec![0; PAGE_LENGTH];
        put(&mut bytes, 0, &PAGE_MAGIC);
        put(&mut bytes, 8, &self.cache.0[..8]);
        put(&mut bytes, 16, &page.to_le_bytes());
        put(&mut bytes, 24, &sequence.to_le_bytes());
        bytes.into()
    }

    /// Whether a copy of page `page` is sound, or was never written.
    pub fn is_sound_or_blank(&self, page: u32, index: usize, copy: &[u8]) -> bool {
        self.is_sound(page, index, copy) || copy.iter().all(|byte| *byte == 0)
    }

    fn is_sound(&self, page: u32, index: usize, copy: &[u8]) -> bool {
        copy.len() == PAGE_LENGTH
            && copy[..4] == PAGE_MAGIC
            && crc32c::crc32c(&copy[8..]) == u32_at(copy, 4)
            && copy[8..16] == self.cache.0[..8]
            && u32_at(copy, 16) == page
            && u64_at(copy, 24) <= SEQUENCE_MAX
            && u64_at(copy, 24) % 2 == index as u64
    }

    /// The valid copy of page `page` among the bytes of both copies, and its sequence.
    pub fn valid<'a>(&self, page: u32, copies: &'a [u8]) -> Option<(u64, &'a [u8])> {
        let copies = copies.chunks(PAGE_LENGTH).enumerate().take(2);
        let sound = copies.filter(|(index, copy)| self.is_sound(page, *index, copy));
        let sound = sound.map(|(_, copy)| (u64_at(copy, 24), copy));
        sound.max_by_key(|(sequence, _)| *sequence)
    }

    /// A page of a disk.
    pub fn disk_bytes(&self, page: u32, sequence: u64, disk: &DiskRecord) -> Box<[u8]> {
        let mut bytes = self.blank(page, sequence);
        let at = HEADER_LENGTH;
        put(&mut bytes, at, &disk.generation.to_le_bytes());
        put(&mut bytes, at + 8, &disk.modified_ns.to_le_bytes());
        bytes[at + 16] = disk.region_shift;
        bytes[at + 17] = 1;
        put(&mut bytes, at + 24, &disk.earlier.to_le_bytes());
        put(&mut bytes, at + 32, &disk.log.0);
        disk.owner.put(&mut bytes, LENGTHS_AT, NAMES_AT);
        finish(bytes)
    }

    /// Reads a page of a disk. `None` if the page has no disk.
    pub fn read_disk(&self, bytes: &[u8]) -> Option<DiskRecord> {
        let at = HEADER_LENGTH;
        let region_shift = bytes[at + 16];
        if bytes[at + 17] != 1 || !(9..64).contains(&region_shift) {
            return None;
        }
        Some(DiskRecord {
            generation: u64_at(bytes, at),
            modified_ns: u64_at(bytes, at + 8),
            earlier: u64_at(bytes, at + 24),
            log: Identity(array(bytes, at + 32)),
            region_shift,
            owner: Owner::get(bytes, LENGTHS_AT, NAMES_AT)?,
        })
    }

    /// A page without a disk.
    pub fn no_disk_bytes(&self, page: u32, sequence: u64) -> Box<[u8]> {
        finish(self.blank(page, sequence))
    }

    /// A page with the bits of regions.
    pub fn bitmap_bytes(&self, page: u32, sequence: u64, bits: &[u64]) -> Box<[u8]> {
        let mut bytes = self.blank(page, sequence);
        for (index, word) in bits.iter().take(PAYLOAD_LENGTH / 8).enumerate() {
            put(&mut bytes, HEADER_LENGTH + 8 * index, &word.to_le_bytes());
        }
        finish(bytes)
    }

    /// The bits of the regions in a page.
    pub fn read_bitmap(&self, bytes: &[u8]) -> Vec<u64> {
        (0..PAYLOAD_LENGTH / 8).map(|index| u64_at(bytes, HEADER_LENGTH + 8 * index)).collect()
    }

    /// A page of a table with the entries of its slots, `None` for free slots.
    pub fn table_bytes<'a>(
        &self,
        page: u32,
        sequence: u64,
        entries: impl Iterator<Item = Option<SlotEntry<'a>>>,
    ) -> Box<[u8]> {
        let mut bytes = self.blank(page, sequence);
        let mut at = HEADER_LENGTH;
        for entry in entries.take(self.entries_per_page() as usize) {
            if let Some(entry) = entry {
                put(&mut bytes, at, &entry.key.to_le_bytes());
                put(&mut bytes, at + 8, &entry.valid.to_le_bytes());
                bytes[at + 10] = entry.class;
                for (index, sum) in entry.sums.iter().enumerate() {
                    put(&mut bytes, at + 12 + 2 * index, &sum.to_le_bytes());
                }
            }
            at += self.entry_length();
        }
        finish(bytes)
    }

    /// Reads the entry of the slot at `index` in a page of a table. `sums` gets the checksums.
    pub fn read_entry<'a>(
        &self,
        bytes: &[u8],
        index: u32,
        sums: &'a mut [u16],
    ) -> Option<SlotEntry<'a>> {
        let at = HEADER_LENGTH + index as usize * self.entry_length();
        let (key, valid) = (u64_at(bytes, at), u16_at(bytes, at + 8));
        let whole = u16::MAX >> (16 - self.granules());
        let disk = key >> BLOCK_BITS;
        if disk == 0 || disk > u64::from(self.disks) || valid == 0 || valid & !whole != 0 {
            return None;
        }
        for (index, sum) in sums.iter_mut().enumerate() {
            *sum = u16_at(bytes, at + 12 + 2 * index);
        }
        Some(SlotEntry { key, valid, class: bytes[at + 10], sums })
    }
}

impl fathom_persistence::Superblock for Superblock {
    const NOUN: &'static str = "cache";
    const MAGIC: [u8; 8] = *b"\x8eFATHCAC";
    /// With an area for logs. A program that does not know the area must not make such a volume
    /// again: the logs have changes that are nowhere else.
    const NEWEST: u32 = 2;
    const ORDER: CopyOrder = CopyOrder::Equal;

    fn version(&self) -> u32 {
        if self.logs == 0 { VERSION_WITHOUT_LOGS } else { Self::NEWEST }
    }

    fn identity(&self) -> Identity {
        self.cache
    }

    fn put(&self, copy: &mut SuperblockBytes) {
        put(copy, 12, &self.block_size.to_le_bytes());
        put(copy, 16, &self.cache.0);
        put(copy, 32, &self.disks.to_le_bytes());
        put(copy, 36, &self.bitmap_pages.to_le_bytes());
        put(copy, 40, &self.slots.to_le_bytes());
        put(copy, 44, &self.logs.to_le_bytes());
        put(copy, 48, &self.log_length.to_le_bytes());
    }

    fn get(version: u32, copy: &SuperblockBytes) -> Option<Self> {
        let has_logs = version != VERSION_WITHOUT_LOGS;
        let superblock = Self {
            cache: Identity(array(copy, 16)),
            block_size: u32_at(copy, 12),
            disks: u32_at(copy, 32),
            bitmap_pages: u32_at(copy, 36),
            slots: u32_at(copy, 40),
            logs: if has_logs { u32_at(copy, 44) } else { 0 },
            log_length: if has_logs { u64_at(copy, 48) } else { 0 },
        };
        let is_sound = superblock.block_size.is_power_of_two()
            && BLOCK_SIZES.contains(&superblock.block_size)
            && (1..=DISKS_MAX).contains(&superblock.disks)
            && (1..=64).contains(&superblock.bitmap_pages)
            && (1..=SLOTS_MAX).contains(&u64::from(superblock.slots))
            && superblock.has_sound_logs()
            && has_logs == (superblock.logs > 0);
        is_sound.then_some(superblock)
    }
}

fn finish(mut bytes: Box<[u8]>) -> Box<[u8]> {
    let checksum = crc32c::crc32c(&bytes[8..]);
    put(&mut bytes, 4, &checksum.to_le_bytes());
    bytes
}

/// Makes `bytes` a superblock with a valid magic number and checksum, for the fuzzer.
pub(crate) fn correct_superblock(bytes: &mut [u8]) {
    put(bytes, 0, &<Superblock as fathom_persistence::Superblock>::MAGIC);
    fathom_persistence::seal(bytes);
}

/// Makes `bytes` a sound copy of a page, for the fuzzer.
pub(crate) fn correct_page(format: &Superblock, page: u32, copy: u64, bytes: &mut [u8]) {
    put(bytes, 0, &PAGE_MAGIC);
    put(bytes, 8, &format.cache.0[..8]);
    put(bytes, 16, &page.to_le_bytes());
    let sequence = u64_at(bytes, 24) & SEQUENCE_MAX & !1 | copy;
    put(bytes, 24, &sequence.to_le_bytes());
    let checksum = crc32c::crc32c(&bytes[8..]);
    put(bytes, 4, &checksum.to_le_bytes());
}

/// The disk that a page belongs to.
pub type Owner = fathom_persistence::Owner<256>;

/// A disk of a cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskRecord {
    /// The disk.
    pub owner: Owner,
    /// The state of the disk's store that the cached blocks belong to: the number that is also in
    /// the mark of the store.
    pub generation: u64,
    /// The generation before, which the mark of the store has after a crash at an opening; 0 if the
    /// blocks of that state are not in the cache.
    pub earlier: u64,
    /// The modification time of the disk's store that the blocks belong to, in nanoseconds since
    /// 1970; 0 if it is not known.
    pub modified_ns: u64,
    /// The identity of the write-ahead log without which the disk's store is older than the blocks,
    /// or [`Identity::NONE`].
    pub log: Identity,
    /// The binary logarithm of the size of a region, in bytes.
    pub region_shift: u8,
}

/// The entry of a slot in a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotEntry<'a> {
    /// The disk's number and the block's.
    pub key: u64,
    /// The granules whose content is valid, as bits.
    pub valid: u16,
    /// The class of the block.
    pub class: u8,
    /// The checksums of the granules.
    pub sums: &'a [u16],
}

/// The checksum of a granule's content: both halves of its CRC-32C, combined.
pub fn checksum(granule: &[u8]) -> u16 {
    let sum = crc32c::crc32c(granule);
    (sum >> 16) as u16 ^ sum as u16
}

#[cfg(test)]
mod tests {
    use fathom_persistence::{Superblock as _, Verdict, seal};

    use super::*;

    fn superblock() -> Superblock {
        Superblock::new(Identity([7; 16]), 8 << 20, 16384, 3, 2).unwrap()
    }

    #[test]
    fn a_superblock_fills_its_volume_and_is_read_back() {
        for (length, block_size) in [(1 << 20, 4096), (8 << 20, 16384), (1 << 40, 65536)] {
            let found = Superblock::new(Identity([1; 16]), length, block_size, 4, 1).unwrap();
            assert!(found.length() <= length, "{found:?}");
            let more = Superblock { slots: found.slots + 2, ..found };
            assert!(more.length() > length, "{found:?}");
            let copies = [found.encode(), found.encode()].concat();
            assert_eq!(Superblock::select(&copies), Ok(found));
            // One copy is enough.
            let torn = [[0; PAGE_LENGTH], found.encode()].concat();
            assert_eq!(Superblock::select(&torn), Ok(found));
        }
        assert_eq!(Superblock::new(Identity([1; 16]), 20 << 10, 4096, 1, 1), None);
    }

    #[test]
    fn other_superblocks_are_rejected() {
        let sound = superblock().encode();
        let changed = |at: usize, value: u32, is_summed: bool| {
            let mut bytes = sound.to_vec();
            put(&mut bytes, at, &value.to_le_bytes());
            if is_summed {
                seal(&mut bytes);
            }
            Superblock::select(&bytes)
        };
        assert_eq!(changed(12, 4096, false), Err(Verdict::Damaged));
        assert_eq!(changed(8, 3, true), Err(Verdict::Newer(3)));
        assert_eq!(changed(8, 2, true), Err(Verdict::Damaged), "version 2 has logs");
        assert_eq!(changed(8, 0, true), Err(Verdict::Damaged));
        assert_eq!(changed(0, 0, true), Err(Verdict::Foreign));
        for (at, value) in [(12, 0), (12, 5000), (12, 1 << 17), (32, 0), (36, 0), (40, 0)] {
            assert_eq!(changed(at, value, true), Err(Verdict::Damaged), "{at} {value}");
        }
        assert_eq!(Superblock::select(&[0; 2 * PAGE_LENGTH]), Err(Verdict::Blank));
    }

    #[test]
    fn an_area_for_logs_is_behind_the_slots() {
        let without = superblock();
        assert_eq!(without.encode()[8], 1, "programs without logs read such volumes");
        let format = without.with_logs(3, 1 << 20).unwrap();
        assert_eq!(Superblock::select(&format.encode()), Ok(format));
        assert_eq!((format.log_offset(0), format.slots), (without.length(), without.slots));
        assert_eq!(format.length(), without.length() + (3 << 20));
        assert_eq!(format.log_offset(2) % LOG_UNIT, 0);
        for (logs, length) in
            [(0, 1 << 20), (1, 0), (1, 4096), (1, (1 << 20) + 512), (1, 1 << 41), (4097, 1 << 20)]
        {
            assert_eq!(without.with_logs(logs, length), None, "{logs} {length}");
            let wrong = Superblock { logs, log_length: length, ..without };
            if logs == 0 {
                continue;
            }
            assert_eq!(Superblock::select(&wrong.encode()), Err(Verdict::Damaged));
        }
        // Version 1 has no such area, whatever there is.
        let mut old = without.encode();
        put(&mut old, 44, &7_u32.to_le_bytes());
        seal(&mut old);
        assert_eq!(Superblock::select(&old), Ok(without));
    }

    #[test]
    fn the_sound_copy_with_the_higher_sequence_is_valid() {
        let format = superblock();
        let record = |generation| DiskRecord {
            owner: Owner::new("disk", "/image").unwrap(),
            generation,
            earlier: 8,
            modified_ns: 9,
            log: Identity(*b"identity of log "),
            region_shift: 20,
        };
        let even = format.disk_bytes(1, 4, &record(1));
        let odd = format.disk_bytes(1, 5, &record(2));
        let mut copies = [even, odd].concat();
        let found = |copies: &[u8]| {
            let (_, bytes) = format.valid(1, copies)?;
            format.read_disk(bytes)
        };
        assert_eq!(found(&copies), Some(record(2)));
        assert_eq!(format.valid(2, &copies), None, "it is another page's");
        let other = Superblock { cache: Identity([8; 16]), ..format };
        assert_eq!(other.valid(1, &copies), None, "it is another cache's");
        for (sequence, generation) in [(SEQUENCE_MAX, 3), (u64::MAX, 1)] {
            let odd = format.disk_bytes(1, sequence, &record(3));
            let copies = [&copies[..PAGE_LENGTH], &odd].concat();
            assert_eq!(found(&copies), Some(record(generation)), "the next one has a number");
        }
        copies[PAGE_LENGTH + 100] ^= 1;
        assert_eq!(found(&copies), Some(record(1)), "the newer copy is torn");
        copies[100] ^= 1;
        assert_eq!(found(&copies), None);
    }

    #[test]
    fn entries_and_bits_are_read_back() {
        let format = superblock();
        let sums = [1, 2, 3, 4];
        let entry = SlotEntry { key: 3 << BLOCK_BITS | 0x77, valid: 0b1010, class: 5, sums: &sums };
        let wrong = SlotEntry { key: 4 << BLOCK_BITS, ..entry };
        let page = format.table_first();
        let entries = [None, Some(entry), Some(wrong)];
        let bytes = format.table_bytes(page, 0, entries.into_iter());
        let mut read = [0; 4];
        assert_eq!(format.read_entry(&bytes, 1, &mut read), Some(entry));
        for index in [0, 2, format.entries_per_page() - 1] {
            assert_eq!(format.read_entry(&bytes, index, &mut read), None);
        }
        let bits: Vec<u64> = (0..PAYLOAD_LENGTH as u64 / 8).collect();
        assert_eq!(format.read_bitmap(&format.bitmap_bytes(3, 0, &bits)), bits);
    }
}
