use fathom_cache::{Policy, ReplacementOptions};

use super::list::NONE;
use super::*;

const SLOTS: u32 = 8;

impl Shard {
    fn slots_of(&self, list: List) -> Vec<u32> {
        let (mut slots, mut slot) = (Vec::new(), list.first);
        for _ in 0..list.length {
            slots.push(slot);
            slot = self.blocks.entry(slot) as u32;
        }
        assert_eq!(slot, NONE);
        slots
    }

    fn free_slots(&self) -> Vec<u32> {
        let mut slots = self.slots_of(self.free);
        slots.extend(self.unused..self.slots());
        slots
    }

    pub(in crate::cache) fn check(&self) {
        let mut seen = vec![0; self.slots() as usize];
        for slot in self.free_slots() {
            assert!(self.flags[slot as usize] & !(FRESH | CAPTURED) == 0);
            assert_eq!(self.blocks.pins.count(slot), 0);
            seen[slot as usize] += 1;
        }
        for leaving in &self.leaving {
            for slot in self.slots_of(leaving.slots) {
                assert!(self.flags[slot as usize] & (MAPPED | IMAGED) == IMAGED);
                assert!(!self.blocks.pins.is_loose(slot));
                seen[slot as usize] += 1;
            }
        }
        assert_eq!(self.blocks.index.slots().count(), self.mapped as usize);
        for slot in self.blocks.index.slots() {
            assert!(self.is_mapped(slot) && self.valid(slot) != 0);
            assert_eq!(self.find(self.key(slot)), Some(slot));
            seen[slot as usize] += 1;
        }
        for (slot, seen) in (0..).zip(seen) {
            let is_taken = self.blocks.pins.count(slot) > 0
                && self.flags[slot as usize] & (MAPPED | IMAGED) == 0;
            assert_eq!(seen, u32::from(!is_taken), "slot {slot} has one place");
        }
        assert_eq!(self.held.iter().sum::<u32>(), self.mapped());
        assert_eq!(self.of_disks.iter().sum::<u32>(), self.mapped());
        for (key, busy) in &self.busy {
            assert!(busy.changes > 0 || busy.insertion != 0, "block {key} is busy with nothing");
        }
    }
}

fn shard(is_kept: bool) -> Shard {
    let replacement = Replacement::new(&ReplacementOptions::default(), SLOTS);
    Shard::new(SLOTS, 4, 4, is_kept, replacement)
}

fn access() -> BlockAccess {
    BlockAccess::default()
}

/// The number of the insertion that a read of a block begins.
fn miss(shard: &mut Shard, key: u64) -> u64 {
    match shard.read(key, 0b1111, &access(), true) {
        Lookup::Miss(number) => number,
        Lookup::Hit(slot) => panic!("block {key} is in slot {slot}"),
    }
}

/// Inserts a block, and returns its slot.
fn insert(shard: &mut Shard, key: u64) -> Option<u32> {
    let number = miss(shard, key);
    let room = shard.begin_insertion(key, number, 0b1111, || true)?;
    shard.end_insertion(key, number, room, Some(&[1, 2, 3, 4]), &access());
    shard.check();
    Some(room.slot)
}

fn is_hit(shard: &mut Shard, key: u64, wanted: u16) -> bool {
    match shard.read(key, wanted, &access(), false) {
        Lookup::Hit(slot) => {
            shard.unpin(slot);
            true
        }
        Lookup::Miss(_) => false,
    }
}

#[test]
fn a_change_ends_an_insertion_of_old_content() {
    let mut shard = shard(false);
    // Before the content is there.
    let number = miss(&mut shard, 1);
    assert_eq!(miss(&mut shard, 1), 0, "one insertion at a time");
    shard.begin_change(1, 0b0001, Reason::Write);
    assert_eq!(miss(&mut shard, 1), 0, "the content is uncertain");
    assert_eq!(shard.begin_insertion(1, number, 0b1111, || true), None);
    assert_ne!(shard.end_change(1, Some(&access())), 0);
    shard.check();
    // While it is written to its slot.
    let number = miss(&mut shard, 2);
    let room = shard.begin_insertion(2, number, 0b1111, || true).unwrap();
    shard.begin_change(2, 0b0001, Reason::Write);
    shard.end_change(2, None);
    shard.end_insertion(2, number, room, Some(&[0; 4]), &access());
    assert!(!is_hit(&mut shard, 2, 0b0010));
    shard.check();
    assert_eq!(shard.mapped(), 0);
}

#[test]
fn the_last_of_several_changes_is_unknown() {
    let mut shard = shard(false);
    shard.begin_change(1, 0b1111, Reason::Write);
    shard.begin_change(1, 0b1111, Reason::Write);
    assert_eq!(shard.end_change(1, Some(&access())), 0);
    assert_eq!(shard.end_change(1, Some(&access())), 0);
    shard.begin_change(1, 0b1111, Reason::Write);
    assert_ne!(shard.end_change(1, Some(&access())), 0);
    // A long change and a short one at the same time.
    for is_long_first in [true, false] {
        let mut long = 0;
        if is_long_first {
            long = shard.begin_range(5..50);
        }
        shard.begin_change(7, 0b1111, Reason::Write);
        if !is_long_first {
            long = shard.begin_range(5..50);
        }
        shard.end_range(long);
        assert_eq!(shard.end_change(7, Some(&access())), 0, "{is_long_first}");
    }
    let number = miss(&mut shard, 7);
    let long = shard.begin_range(5..50);
    assert_eq!(miss(&mut shard, 8), 0);
    assert_eq!(shard.begin_insertion(7, number, 1, || true), None);
    shard.end_range(long);
    shard.check();
}

#[test]
fn a_change_takes_its_granules_out() {
    let mut shard = shard(true);
    let slot = insert(&mut shard, 1).unwrap();
    assert_eq!(shard.sum(slot, 2), 3);
    shard.begin_change(1, 0b0100, Reason::Write);
    assert!(is_hit(&mut shard, 1, 0b1011) && !is_hit(&mut shard, 1, 0b0110));
    let number = shard.end_change(1, Some(&access()));
    // A read of the old content may still be in flight.
    assert_eq!(shard.read(1, 0b0001, &access(), false), Lookup::Hit(slot));
    assert_eq!(shard.begin_insertion(1, number, 0b0100, || true), None);
    shard.unpin(slot);
    let number = miss(&mut shard, 1);
    let room = shard.begin_insertion(1, number, 0b1111, || true).unwrap();
    assert_eq!(room, Room { slot, mask: 0b0100 });
    shard.end_insertion(1, number, room, Some(&[9; 4]), &access());
    assert!(is_hit(&mut shard, 1, 0b1111));
    assert_eq!((shard.sum(slot, 1), shard.sum(slot, 2)), (2, 9));
    shard.sweep(&(0..5), 0, SLOTS, Reason::Discard);
    assert_eq!(shard.mapped(), 0);
    shard.check();
}

/// Reads `key`, and inserts it if it is missing. Returns whether it was there.
fn request(shard: &mut Shard, key: u64) -> bool {
    let is_there = is_hit(shard, key, 0b1111);
    let number = if is_there { 0 } else { miss(shard, key) };
    if number > 0 {
        put(shard, key, number);
    }
    is_there
}

/// Ends an insertion of all granules.
fn put(shard: &mut Shard, key: u64, number: u64) {
    if let Some(room) = shard.begin_insertion(key, number, 0b1111, || true) {
        shard.end_insertion(key, number, room, Some(&[1, 2, 3, 4]), &access());
    }
}

#[test]
fn a_block_that_is_written_keeps_its_place() {
    let slots = 1000;
    for policy in [Policy::None, Policy::Sky, Policy::Auto] {
        let replacement = Replacement::new(&ReplacementOptions { policy }, slots);
        let mut shard = Shard::new(slots, 4, 4, true, replacement);
        let rewrite = BlockAccess { is_write: true, ..access() };
        for key in (0..800).chain(0..800).chain(0..800) {
            request(&mut shard, key);
        }
        let mut random = fastrand::Rng::with_seed(1);
        let mut hits = 0;
        for round in 0..9_000 {
            request(&mut shard, 1_000_000 + round);
            if round % 4 == 0 {
                // What is written then gets another slot.
                write(&mut shard, round + 1);
            }
            let key = random.u64(0..800);
            if round % 3 == 0 {
                hits += u32::from(request(&mut shard, key));
                continue;
            }
            // All of it, or one granule.
            let mask = if round % 3 == 1 { 0b1111 } else { 0b0100 };
            shard.begin_change(key, mask, Reason::Write);
            let number = shard.end_change(key, Some(&rewrite));
            put(&mut shard, key, number);
        }
        shard.check();
        assert!(hits > 2_950, "{policy:?}: {hits} of 3000");
    }
}

#[test]
fn a_pinned_slot_is_not_used_again() {
    let mut shard = shard(false);
    let slot = insert(&mut shard, 1).unwrap();
    assert_eq!(shard.read(1, 1, &access(), true), Lookup::Hit(slot));
    shard.forget(1);
    for key in 10..40 {
        assert_ne!(insert(&mut shard, key), Some(slot));
    }
    assert!(shard.counts().evictions > 20);
    shard.unpin(slot);
    shard.check();
    assert!((40..80).any(|key| insert(&mut shard, key) == Some(slot)));
}

/// Writes all tables, and a flush completes.
fn write(shard: &mut Shard, tables: u64) -> Vec<(u32, u64)> {
    shard.begin_tables(tables);
    let mut found = Vec::new();
    while let Some(page) = shard.take_dirty(0) {
        let entries = shard.entries(page);
        let first = page * 4;
        found.extend((first..).zip(entries).filter_map(|(slot, entry)| Some((slot, entry?.key))));
    }
    shard.capture();
    shard.flushed(Some(tables));
    shard.check();
    found
}

#[test]
fn a_table_has_only_content_that_a_flush_has_covered() {
    let mut shard = shard(true);
    let slot = insert(&mut shard, 1).unwrap();
    assert_eq!(write(&mut shard, 1), []);
    assert_eq!(write(&mut shard, 2), [(slot, 1)]);
    assert!(!shard.has_changes());
    // New content during a flush needs another flush.
    shard.begin_change(1, 0b0001, Reason::Write);
    let number = shard.end_change(1, Some(&access()));
    let room = shard.begin_insertion(1, number, 0b0001, || true).unwrap();
    shard.end_insertion(1, number, room, Some(&[0; 4]), &access());
    shard.begin_tables(3);
    assert_eq!(shard.take_dirty(0), Some(slot / 4));
    assert_eq!(shard.entries(slot / 4).flatten().count(), 0);
    shard.capture();
    shard.abandon_capture();
    shard.flushed(Some(3));
    assert_eq!(write(&mut shard, 4), []);
    assert_eq!(write(&mut shard, 5), [(slot, 1)]);
}

#[test]
fn a_slot_is_used_again_only_without_its_mapping_on_the_volume() {
    let mut shard = shard(true);
    let slot = insert(&mut shard, 1).unwrap();
    write(&mut shard, 1);
    write(&mut shard, 2);
    shard.forget(1);
    for key in 10..40 {
        assert_ne!(insert(&mut shard, key), Some(slot), "the table has block 1 there");
    }
    // Tables are being built, and the page is taken before the block leaves.
    shard.begin_tables(3);
    while shard.take_dirty(0).is_some() {}
    shard.flushed(Some(2));
    assert!((100..140).all(|key| insert(&mut shard, key) != Some(slot)));
    shard.flushed(Some(3));
    shard.check();
    assert!(shard.free_slots().contains(&slot));
}

#[test]
fn a_block_that_leaves_while_tables_are_written_waits_for_the_next_ones() {
    let mut shard = shard(true);
    let slot = insert(&mut shard, 1).unwrap();
    write(&mut shard, 1);
    shard.begin_tables(2);
    assert_eq!(shard.take_dirty(0), Some(slot / 4));
    assert_eq!(shard.entries(slot / 4).flatten().count(), 1);
    shard.forget(1);
    shard.capture();
    shard.flushed(Some(2));
    assert!((10..40).all(|key| insert(&mut shard, key) != Some(slot)));
    assert!(!shard.free_slots().contains(&slot));
    write(&mut shard, 3);
    assert!(shard.free_slots().contains(&slot));
}

#[test]
fn loaded_mappings_that_are_not_current_leave_with_the_next_tables() {
    let mut shard = shard(true);
    shard.begin_load();
    let entry = |key| SlotEntry { key, valid: 0b1111, class: 0, sums: &[1, 2, 3, 4] };
    shard.load(2, &entry(7), true, &access());
    shard.load(3, &entry(8), false, &access());
    shard.load(4, &entry(7), true, &access());
    shard.end_load(0, SLOTS);
    shard.check();
    assert!(is_hit(&mut shard, 7, 0b1111) && !is_hit(&mut shard, 8, 1));
    assert_eq!(write(&mut shard, 1), [(2, 7)]);
    assert!((10..80).any(|key| insert(&mut shard, key) == Some(3)));
}

/// The read for which a block was read ahead is its first request: only the next one is a hit for
/// the replacement. A block that leaves unread is counted.
#[test]
fn a_block_that_was_read_ahead_is_used_once() {
    let access = BlockAccess { class: 1, ..BlockAccess::default() };
    let (slots, granules) = (64, 4);
    let options = ReplacementOptions { policy: Policy::None };
    let mut shard = Shard::new(slots, granules, 64, false, Replacement::new(&options, slots));
    let read_ahead = |shard: &mut Shard, key: u64| {
        let number = shard.read_ahead(key, 0b1111, &access);
        assert!(number != 0);
        let room = shard.begin_insertion(key, number, 0b1111, || true).unwrap();
        assert!(shard.end_insertion(key, number, room, Some(&[0; 4]), &access));
        shard.mark_ahead(room.slot);
        room.slot
    };
    for key in 0..40 {
        let slot = read_ahead(&mut shard, key);
        if key % 2 == 0 {
            assert_eq!(shard.read(key, 1, &access, true), Lookup::Hit(slot));
            shard.unpin(slot);
        }
    }
    assert_eq!(shard.read_ahead(0, 0b1111, &access), 0, "it is there");
    let counts = shard.counts();
    assert_eq!((counts.ahead, counts.ahead_used, counts.ahead_unused), (40, 20, 0));
    // A scan pushes all of them out, as it does with blocks that were read once.
    for key in 1000..1200 {
        let Lookup::Miss(number) = shard.read(key, 0b1111, &access, true) else { panic!() };
        let room = shard.begin_insertion(key, number, 0b1111, || true).unwrap();
        shard.end_insertion(key, number, room, Some(&[0; 4]), &access);
        shard.check();
    }
    let left = (0..40).filter(|key| shard.find(*key).is_some()).count();
    assert_eq!(left, 0);
    assert_eq!((shard.counts().ahead_unused, shard.ahead), (20, 0));
    // A change makes an insertion invalid that has begun before it.
    let number = shard.read_ahead(5, 0b1111, &access);
    assert_eq!(shard.read_ahead(5, 0b1111, &access), 0, "it is on its way");
    shard.begin_change(5, 1, Reason::Write);
    assert!(shard.begin_insertion(5, number, 0b1111, || true).is_none());
    assert_eq!(shard.read_ahead(5, 0b1111, &access), 0, "it is being changed");
    shard.end_change(5, None);
    shard.check();
}

/// A disk below its share gets the slots of another one within seconds, although that goes on.
#[test]
fn a_share_is_reached_soon_after_a_scan_of_another_disk() {
    const SLOTS: u32 = 1024;
    let replacement = Replacement::new(&ReplacementOptions::default(), SLOTS);
    let mut shard = Shard::new(SLOTS, 4, 4, true, replacement);
    let mut tables = 0;
    let mut write_all = |shard: &mut Shard| {
        tables += 1;
        write(shard, tables);
    };
    let (scan, hot) = (1 << BLOCK_BITS, 2 << BLOCK_BITS);
    let mut next = scan..;
    let put = |shard: &mut Shard, key: u64| {
        let Lookup::Miss(number) = shard.read(key, 0b1111, &access(), true) else { return };
        let Some(room) = shard.begin_insertion(key, number, 0b1111, || true) else { return };
        shard.end_insertion(key, number, room, Some(&[1, 2, 3, 4]), &access());
    };
    for _ in 0..4 {
        next.by_ref().take(SLOTS as usize).for_each(|key| put(&mut shard, key));
        write_all(&mut shard);
    }
    assert!(shard.set_share(2, SLOTS / 2));
    let mut seconds = 0;
    while shard.blocks_of(2).unwrap() < SLOTS * 15 / 32 {
        for key in 0..u64::from(SLOTS / 2) {
            for _ in 0..4 {
                put(&mut shard, next.next().unwrap());
            }
            put(&mut shard, hot | key);
        }
        write_all(&mut shard);
        seconds += 1;
        assert!(seconds < 30, "{:?} blocks", shard.blocks_of(2));
    }
    // What it does not use of the room that it has made, the other one gets.
    shard.set_share(2, 0);
    for _ in 0..8 {
        next.by_ref().take(SLOTS as usize).for_each(|key| put(&mut shard, key));
        write_all(&mut shard);
    }
    assert_eq!(shard.owed, 0);
    shard.check();
}
