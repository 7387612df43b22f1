use std::time::Instant;

use fathom_cache::{BlockAccess, ReplacementOptions};

use super::super::shard::{Lookup, Reason};
use super::*;

/// The most bytes of an index for each slot, with blocks of 16 KiB.
const SLOT_BYTES_MAX: f64 = 31.0;

/// Shards of `slots` slots in all, as a volume with blocks of 16 KiB has them.
fn shards(slots: u64, is_kept: bool) -> Vec<Shard> {
    let full = u64::from(SHARD_SLOTS_MAX);
    let sizes: Vec<u32> =
        (0..slots.div_ceil(full)).map(|number| full.min(slots - number * full) as u32).collect();
    let options = ReplacementOptions { policy: Policy::Auto };
    let replacements = Replacement::shards(&options, &sizes);
    let shards = sizes.iter().zip(replacements);
    shards.map(|(slots, part)| Shard::new(*slots, 4, 200, is_kept, part)).collect()
}

/// Puts a block into each slot of a shard, and as many more that need the slots of others.
fn fill(shard: &mut Shard, disk: u64) {
    let access = BlockAccess { miss_ns: 1_000_000, ..BlockAccess::default() };
    for block in 0..u64::from(shard.slots()) * 9 / 8 {
        let key = disk << BLOCK_BITS | block.wrapping_mul(0x9e37_79b9) & 0xffff_ffff;
        let Lookup::Miss(number) = shard.read(key, 1, &access, true) else { continue };
        let Some(room) = shard.begin_insertion(key, number, 0b1111, || true) else { continue };
        shard.end_insertion(key, number, room, Some(&[1, 2, 3, 4]), &access);
    }
}

fn bytes(shards: &[Shard]) -> usize {
    let learned = shards.first().map_or(0, Shard::learned_bytes);
    learned + shards.iter().map(Shard::memory_bytes).sum::<usize>()
}

#[test]
fn a_slot_takes_little_memory() {
    for (is_kept, max) in [(true, SLOT_BYTES_MAX), (false, SLOT_BYTES_MAX - 8.0)] {
        let slots = 10 * u64::from(SHARD_SLOTS_MAX);
        let per_slot = bytes(&shards(slots, is_kept)) as f64 / slots as f64;
        assert!(per_slot < max, "{per_slot:.2} bytes");
    }
}

/// A list of slots is in the entries of the slots, so that it takes no memory.
#[test]
fn a_full_shard_is_emptied_and_filled_again() {
    let mut shards = shards(3000, false);
    fill(&mut shards[0], 1);
    assert_eq!(shards[0].mapped(), 3000);
    shards[0].sweep(&(0..u64::MAX), 0, 3000, Reason::Discard);
    assert_eq!(shards[0].mapped(), 0);
    fill(&mut shards[0], 4096);
    assert_eq!(shards[0].mapped(), 3000);
}

/// The memory that the process has now, in bytes.
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").expect("a process");
    let pages = text.split_whitespace().nth(1).and_then(|pages| pages.parse::<usize>().ok());
    pages.expect("a number of pages") * 4096
}

/// Run by `bench/cache memory`.
#[test]
#[ignore = "needs 2 GB of memory; a benchmark runs it"]
fn the_index_of_a_terabyte_fits_into_two_gigabytes() {
    let slots = std::env::var("FATHOM_SLOTS").ok().and_then(|slots| slots.parse().ok());
    let slots: u64 = slots.unwrap_or((1 << 40) / (16 << 10));
    let (before, begun) = (resident(), Instant::now());
    let mut shards = shards(slots, true);
    for (number, shard) in shards.iter_mut().enumerate() {
        fill(shard, 1 + number as u64);
        // A volume would have written its tables meanwhile.
        shard.capture();
        shard.flushed(None);
        while shard.take_dirty(0).is_some() {}
    }
    let mapped: u64 = shards.iter().map(|shard| u64::from(shard.mapped())).sum();
    assert!(mapped * 100 > slots * 98, "{mapped} of {slots} slots have a block");
    let (counted, resident) = (bytes(&shards), resident() - before);
    println!(
        "{slots} slots: {counted} bytes counted, {resident} bytes resident, {} ms",
        begun.elapsed().as_millis()
    );
    let per_slot = resident as f64 / slots as f64;
    assert!(per_slot < 32.0, "{per_slot} bytes");
}
