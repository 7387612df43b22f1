//! What an opening would find in images of stores after a crash.

#![allow(dead_code, reason = "each test uses a part of it")]

use fathom_layers::cache::format::{BLOCK_BITS, GRANULE, PAGE_LENGTH, Superblock, checksum};
use fathom_wal::{EntryKind, SUPERBLOCK_LENGTH, Scanner, select};

/// The content of a disk with the store `home` and the log in `log`: the log's, then home's.
pub fn with_log(log: &[u8], home: &[u8]) -> Vec<u8> {
    let mut disk = home.to_vec();
    let (first, second) = log[..2 * SUPERBLOCK_LENGTH].split_at(SUPERBLOCK_LENGTH);
    let superblock = select(first, second).unwrap();
    let mut scanner = Scanner::new(&superblock);
    while let Some((offset, length)) = scanner.next_read() {
        let Some(found) = scanner.feed(&log[offset as usize..][..length]) else { continue };
        for (entry, position) in found.record.places(superblock.block_size) {
            let target = &mut disk[entry.offset as usize..][..entry.length as usize];
            let start = (position - found.record.position) as usize;
            match entry.kind {
                EntryKind::Data { .. } => {
                    target.copy_from_slice(&found.bytes[start..][..entry.length as usize]);
                }
                EntryKind::Zeroes { .. } | EntryKind::Discard => target.fill(0),
            }
        }
    }
    disk
}

/// Checks that the content of each mapping of the first disk that an opening of the cache in `volume` would
/// use is that of `disk`. Returns their number.
pub fn check_mappings(volume: &[u8], disk: &[u8]) -> usize {
    let format = Superblock::decode(&volume[..2 * PAGE_LENGTH]).expect("a superblock");
    let copies = |page: u32| {
        let at = format.page_offset(page, 0) as usize;
        &volume[at..at + 2 * PAGE_LENGTH]
    };
    let is_certain = |page: u32| {
        let mut copies = copies(page).chunks(PAGE_LENGTH).enumerate();
        copies.all(|(index, copy)| format.is_sound_or_blank(page, index, copy))
    };
    let valid = |page: u32| format.valid(page, copies(page)).map(|(_, bytes)| bytes);
    let Some(record) = valid(format.disk_page(1)).and_then(|bytes| format.read_disk(bytes)) else {
        return 0;
    };
    let bitmap = format.bitmap_first(1);
    let bits = match valid(bitmap) {
        Some(bytes) if is_certain(bitmap) => format.read_bitmap(bytes),
        None if is_certain(bitmap) => Vec::new(),
        _ => return 0,
    };
    let is_active = |offset: u64| {
        let region = (offset >> record.region_shift) as usize;
        bits.get(region / 64).is_some_and(|word| word >> (region % 64) & 1 == 1)
    };
    let mut found = 0;
    let mut sums = vec![0; format.granules() as usize];
    for page in format.table_first()..format.pages() {
        let Some(bytes) = valid(page).filter(|_| is_certain(page)) else { continue };
        for index in 0..format.entries_per_page() {
            let slot = (page - format.table_first()) * format.entries_per_page() + index;
            let Some(entry) = format.read_entry(bytes, index, &mut sums) else { continue };
            let offset = (entry.key & ((1 << BLOCK_BITS) - 1)) * u64::from(format.block_size);
            if is_active(offset) {
                continue;
            }
            for granule in (0..format.granules()).filter(|granule| entry.valid >> granule & 1 == 1)
            {
                found += 1;
                let length = GRANULE as usize;
                let within = (granule * GRANULE) as usize;
                let cached = &volume[format.slot_offset(slot) as usize + within..][..length];
                let at = offset as usize + within;
                assert!(cached == &disk[at..at + length], "byte {at} of the disk, in slot {slot}");
                assert_eq!(checksum(cached), entry.sums[granule as usize]);
            }
        }
    }
    found
}
