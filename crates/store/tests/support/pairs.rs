//! The two copies of pages of maps, in an image of a device.

use std::collections::BTreeSet;

const BLOCK: usize = 4096;
/// The entries of a page of the page table.
const ENTRIES: usize = 255;

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

/// The blocks of both copies of each page of which both have the content that an entry of the page
/// table says.
pub fn pairs(image: &[u8]) -> BTreeSet<(u64, u64)> {
    let size = |index: usize| u64::from(u32_at(image, 80 + 4 * index));
    let first = 2 + 2 * size(2) + 2 * size(3);
    let mut pairs = BTreeSet::new();
    for number in first..first + 2 * size(4) {
        let Some(page) = image.get(number as usize * BLOCK..(number as usize + 1) * BLOCK) else {
            break;
        };
        for entry in page[16..].chunks_exact(16).take(ENTRIES) {
            let (word, checksum) = (u64_at(entry, 0), u32_at(entry, 12));
            let (block, distance) = (word & ((1 << 36) - 1), word as i64 >> 36);
            let copy = block.wrapping_add_signed(distance);
            let is_right = |block: u64| {
                let bytes = image.get(block as usize * BLOCK..(block as usize + 1) * BLOCK);
                bytes.is_some_and(|bytes| crc32c::crc32c(bytes) == checksum)
            };
            if distance != 0 && is_right(block) && is_right(copy) {
                pairs.insert((block, copy));
            }
        }
    }
    pairs
}

/// Damages a block.
pub fn damage(image: &mut [u8], block: u64) {
    image[block as usize * BLOCK + 777] ^= 0x10;
}
