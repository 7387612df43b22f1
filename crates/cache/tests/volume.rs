//! Arbitrary bytes as a cache volume.

use fathom_cache::format::{BLOCK_BITS, DiskRecord, Owner, PAGE_LENGTH, SlotEntry, Superblock};
use fathom_cache::fuzz_volume;
use fathom_persistence::{Identity, Superblock as _};

/// A small volume with two disks, as it is on its store.
fn volume() -> Vec<u8> {
    let format = Superblock::new(Identity(*b"identity of test"), 1 << 20, 16384, 2, 1).unwrap();
    let format = format.with_logs(2, 1 << 17).unwrap();
    let mut bytes = vec![0; format.slot_offset(0) as usize];
    let mut put = |at: u64, page: &[u8]| {
        bytes[at as usize..at as usize + page.len()].copy_from_slice(page);
    };
    put(0, &format.encode());
    put(PAGE_LENGTH as u64, &format.encode());
    for disk in 1..=2 {
        let record = DiskRecord {
            owner: Owner::new(&format!("disk {disk}"), "/images/a.img").unwrap(),
            region_shift: 20,
            ..DiskRecord::default()
        };
        let page = format.disk_page(disk);
        put(format.page_offset(page, 3), &format.disk_bytes(page, 3, &record));
        let page = format.bitmap_first(disk);
        put(format.page_offset(page, 2), &format.bitmap_bytes(page, 2, &[4, 1]));
    }
    let page = format.table_first();
    let key = |disk: u64, block: u64| disk << BLOCK_BITS | block;
    let entries = (0..40).map(|block| {
        Some(SlotEntry { key: key(1 + block % 2, block), valid: 5, class: 2, sums: &[1, 2, 3, 4] })
    });
    put(format.page_offset(page, 7), &format.table_bytes(page, 7, entries));
    bytes
}

#[test]
fn arbitrary_bytes_are_read_without_a_panic() {
    let whole: Vec<u8> = [&[1], &volume()[..]].concat();
    fuzz_volume(&whole);
    for seed in 0..5_000 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut bytes = whole.clone();
        bytes[0] = random.u8(..);
        for _ in 0..random.usize(1..8) {
            // Mostly places with content.
            let page = random.usize(0..bytes.len() / PAGE_LENGTH);
            let at = 1 + page * PAGE_LENGTH + [0, 12, 32, 64, 128][random.usize(0..5)];
            let at = (at + random.usize(0..64)).min(bytes.len() - 8);
            match random.u8(0..3) {
                0 => bytes[at] = random.u8(..),
                1 => bytes[at] ^= 1 << random.u8(0..8),
                _ => bytes[at..at + 8].copy_from_slice(&random.u64(..).to_le_bytes()),
            }
        }
        bytes.truncate(random.usize(bytes.len() / 2..=bytes.len()));
        let result = std::panic::catch_unwind(|| fuzz_volume(&bytes));
        assert!(result.is_ok(), "seed {seed}");
    }
}
