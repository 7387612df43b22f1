//! Reads arbitrary bytes as a cache volume: for the fuzzer, and for tests with seeded inputs.

use fathom_persistence::Superblock as _;

use crate::format::{PAGE_LENGTH, Superblock, checksum, correct_page, correct_superblock};
use crate::inspect::Inspection;

/// The most pages that are examined: the length of a volume is the reader's to check.
const PAGES_MAX: u32 = 64;

/// Reads `data` as a cache volume, and panics if the reader breaks a promise. If the first byte is
/// odd, the magic numbers and checksums are corrected first, so that the input reaches the checks
/// behind them.
pub fn fuzz_volume(data: &[u8]) {
    let Some((how, data)) = data.split_first() else { return };
    let mut volume = data.to_vec();
    volume.resize(volume.len().max(2 * PAGE_LENGTH), 0);
    let is_corrected = how & 1 == 1;
    if is_corrected {
        correct_superblock(&mut volume[..PAGE_LENGTH]);
    }
    let Ok(format) = Superblock::select(&volume[..2 * PAGE_LENGTH]) else { return };
    let copies = [format.encode(), format.encode()].concat();
    assert_eq!(Superblock::select(&copies), Ok(format));
    // Numbers of a valid superblock never overflow, however large they are.
    let (end, length) = (format.slot_offset(0), format.length());
    assert!(format.page_offset(format.pages(), 0) <= end && end < length);
    let logs = format.log_offset(0);
    assert!(end < logs && logs <= length && (logs < length) == (format.logs > 0));
    assert!(end % u64::from(format.block_size) == 0);
    let mut inspection = Inspection::new(format);
    // Some of each kind.
    let starts = [0, format.disks, format.table_first(), format.pages().saturating_sub(1)];
    let mut blocks = 0;
    for page in starts.into_iter().flat_map(|start| start..start.saturating_add(PAGES_MAX / 4)) {
        if page >= format.pages() {
            break;
        }
        let at = 2 * PAGE_LENGTH * (1 + page as usize % (volume.len() / (2 * PAGE_LENGTH)));
        let mut copies = volume.get(at..).unwrap_or_default().to_vec();
        copies.resize(2 * PAGE_LENGTH, 0);
        if is_corrected {
            for copy in 0..2 {
                let bytes = &mut copies[copy * PAGE_LENGTH..(copy + 1) * PAGE_LENGTH];
                if bytes.iter().any(|byte| *byte != 0) {
                    correct_page(&format, page, copy as u64, bytes);
                }
            }
        }
        inspection.page(page, &copies, |block| {
            blocks += 1;
            assert!(block.place >= end && block.place < length);
            assert!(block.valid != 0 && block.sums.len() == format.granules() as usize);
            assert!(block.offset % u64::from(format.block_size) == 0);
        });
        for copy in copies.chunks(PAGE_LENGTH) {
            // Any bytes have a checksum, and names that are no text are none.
            checksum(copy);
            if let Some(disk) = format.read_disk(copy) {
                assert!(disk.owner.name.len() <= fathom_persistence::NAME_LENGTH_MAX);
            }
        }
    }
    let found: u64 = inspection.disks.values().map(|disk| disk.blocks).sum();
    assert_eq!(found, blocks);
}
