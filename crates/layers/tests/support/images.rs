//! What an opening would find in images of stores after a crash.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::ops::Range;

use fathom_layers::cache::format::{BLOCK_BITS, GRANULE, PAGE_LENGTH, Superblock, checksum};
use fathom_persistence::{Identity, SUPERBLOCK_LENGTH, Superblock as _, Verdict};
use fathom_wal::{EntryKind, FoundRecord, Scanner};

/// The superblock of the log in `log`; `None` if there is none.
fn superblock(log: &[u8]) -> Option<fathom_wal::Superblock> {
    match fathom_wal::Superblock::select(&log[..2 * SUPERBLOCK_LENGTH]) {
        Err(Verdict::Blank) => None,
        found => Some(found.unwrap()),
    }
}

/// Calls `visit` with each record of a log.
fn each_record(
    log: &[u8],
    superblock: &fathom_wal::Superblock,
    mut visit: impl FnMut(&FoundRecord<'_>),
) {
    let mut scanner = Scanner::new(superblock);
    while let Some((offset, length)) = scanner.next_read() {
        if let Some(found) = scanner.feed(&log[offset as usize..][..length]) {
            visit(&found);
        }
    }
}

/// The content of a disk with the store `home` and the log in `log`, if there is one: the log's,
/// then home's.
pub fn with_log(log: &[u8], home: &[u8]) -> Vec<u8> {
    let mut disk = home.to_vec();
    let Some(superblock) = superblock(log) else { return disk };
    each_record(log, &superblock, |found| {
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
    });
    disk
}

/// The ranges of the disk that a log has changes of, in bytes.
fn changes(log: &[u8], superblock: &fathom_wal::Superblock) -> Vec<Range<u64>> {
    let mut ranges = Vec::new();
    each_record(log, superblock, |found| {
        let entries = found.record.entries.iter();
        ranges.extend(entries.map(|entry| entry.offset..entry.offset + entry.length));
    });
    ranges
}

/// Checks that the content of each mapping of the first disk that an opening of the cache in
/// `volume` would use is that of `disk`. Returns their number.
pub fn check_mappings(volume: &[u8], disk: &[u8]) -> usize {
    mappings(volume, None, disk).unwrap()
}

/// As [`check_mappings`], with the place for the disk's log in `log`. Returns what is wrong, if
/// something is.
pub fn mappings(volume: &[u8], log: Option<&[u8]>, disk: &[u8]) -> Result<usize, String> {
    let found = log.and_then(|log| Some((log, superblock(log)?)));
    let changes = found.as_ref().map_or(Vec::new(), |(log, superblock)| changes(log, superblock));
    let identity = found.map_or(Identity::NONE, |(_, superblock)| superblock.log);
    let format = Superblock::select(&volume[..2 * PAGE_LENGTH]).expect("a superblock");
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
        return Ok(0);
    };
    // A disk without a state does not use the cache any more.
    if record.generation == 0 || record.log != Identity::NONE && record.log != identity {
        return Ok(0);
    }
    let bitmap = format.bitmap_first(1);
    let bits = match valid(bitmap) {
        Some(bytes) if is_certain(bitmap) => format.read_bitmap(bytes),
        None if is_certain(bitmap) => Vec::new(),
        _ => return Ok(0),
    };
    let is_active = |offset: u64| {
        let region = (offset >> record.region_shift) as usize;
        let is_in = |range: &Range<u64>| {
            let (first, last) = (range.start, range.end - 1);
            (first >> record.region_shift..=last >> record.region_shift).contains(&(region as u64))
        };
        changes.iter().any(is_in)
            || bits.get(region / 64).is_some_and(|word| word >> (region % 64) & 1 == 1)
    };
    let mut found = 0;
    let mut sums = vec![0; format.granules() as usize];
    for page in format.table_first()..format.pages() {
        let Some(bytes) = valid(page).filter(|_| is_certain(page)) else { continue };
        for index in 0..format.entries_per_page() {
            let slot = (page - format.table_first()) * format.entries_per_page() + index;
            let Some(entry) = format.read_entry(bytes, index, &mut sums) else { continue };
            if entry.key >> BLOCK_BITS != 1 {
                continue;
            }
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
                if cached != &disk[at..at + length] {
                    return Err(format!("byte {at} of the disk, in slot {slot}"));
                }
                if checksum(cached) != entry.sums[granule as usize] {
                    return Err(format!("the checksum of byte {at} of the disk, in slot {slot}"));
                }
            }
        }
    }
    Ok(found)
}
