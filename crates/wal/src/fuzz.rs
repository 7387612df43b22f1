//! Reads arbitrary bytes as a log: for the fuzzer, and for tests with seeded inputs.

use fathom_persistence::bytes::put;
use fathom_persistence::{SUPERBLOCK_LENGTH, Superblock as _, seal};

use crate::record::header_checksum;
use crate::{Log, RING_OFFSET, Scanner, Superblock, find_damage};

/// Reads `data` as a log volume, and panics if the reader breaks a promise. If the first byte is
/// odd, the checksums of superblocks and headers are corrected first, so that the input reaches the
/// checks behind them.
pub fn fuzz_log(data: &[u8]) {
    let Some((how, data)) = data.split_first() else { return };
    let mut region = data.to_vec();
    let block = SUPERBLOCK_LENGTH;
    region.resize(region.len().max(RING_OFFSET as usize), 0);
    if how & 1 == 1 {
        for start in [0, block] {
            if region[start..start + 8].iter().any(|byte| *byte != 0) {
                seal(&mut region[start..]);
            }
        }
    }
    let Ok(superblock) = Superblock::select(&region[..2 * block]) else { return };
    // A user of the scanner compares this length with the volume's, too.
    if RING_OFFSET + superblock.ring_length > region.len() as u64 {
        return;
    }
    let mut scanner = Scanner::new(&superblock);
    let mut log = Log::new(superblock.clone());
    let mut steps = 0;
    let mut bytes = Vec::new();
    while let Some((offset, length)) = scanner.next_read() {
        steps += 1;
        let blocks = superblock.ring_length / u64::from(superblock.block_size);
        assert!(steps <= 2 * blocks + 4, "a scan reads each block twice at most");
        let end = offset + length as u64;
        assert!(offset >= RING_OFFSET && end <= RING_OFFSET + superblock.ring_length);
        bytes.clear();
        bytes.extend_from_slice(&region[offset as usize..end as usize]);
        if how & 1 == 1 && length == superblock.block_size as usize {
            let checksum = header_checksum(&bytes, &superblock);
            put(&mut bytes, 4, &checksum.to_le_bytes());
        }
        if let Some(found) = scanner.feed(&bytes) {
            assert_eq!(found.bytes.len() as u64, found.record.length);
            log.recover(&found);
        }
    }
    let end = scanner.end().expect("a scan without a next read has ended");
    assert!(log.used() <= superblock.ring_length && log.is_settled());
    assert_eq!(log.durable(), end.sequence);
    let damage = find_damage(&superblock, end, |offset, length| {
        let (start, end) = (offset as usize, (offset + length) as usize);
        assert!(offset >= RING_OFFSET && end as u64 <= RING_OFFSET + superblock.ring_length);
        Ok::<_, ()>(region[start..end].to_vec())
    });
    if let Some(damage) = damage.expect("the reads succeed") {
        assert!(damage.is_superblock_old || damage.durable > damage.sequence);
    }
    log.resume(&superblock.owner, superblock.ring_length);
    log.checkpointed();
    while let Some(round) = log.round(1 << 16) {
        for pair in round.segments.windows(2) {
            assert!(pair[0].offset + pair[0].length <= pair[1].offset);
        }
        log.checkpoint(round.last, crate::Sample::default());
        log.checkpointed();
    }
    assert!(log.is_empty() && log.map().is_empty());
}
