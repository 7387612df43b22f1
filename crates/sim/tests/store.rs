//! Tests of the faulty store: it loses only data that it may lose, and behaves the same for the
//! same seed.

use std::sync::Arc;

use fathom_block::{Backend, Disk, DiskOptions, Flags, Operation};
use fathom_sim::{
    Action, Harness, HarnessOptions, JournalEntry, SimBackend, SimOptions, Workload,
    WorkloadOptions, pattern,
};

const CAPACITY: u64 = 64 << 10;

fn options() -> SimOptions {
    SimOptions { journal: true, ..SimOptions::new(CAPACITY) }
}

fn open(store: &Arc<SimBackend>, seed: u64) -> Harness {
    let backend = Arc::clone(store) as Arc<dyn Backend>;
    let disk = Disk::new(DiskOptions::default(), Vec::new(), backend).unwrap();
    Harness::new(&disk, &HarnessOptions::default(), seed)
}

fn write(offset: u64, content: u64, force_unit_access: bool) -> Action {
    let flags = Flags { force_unit_access, ..Flags::default() };
    Action { operation: Operation::Write, offset, length: 4096, flags, content }
}

const FLUSH: Action = Action {
    operation: Operation::Flush,
    offset: 0,
    length: 0,
    flags: Flags {
        force_unit_access: false,
        keep_allocated: false,
        only_if_fast: false,
        background: false,
        write_back: false,
    },
    content: 0,
};

fn content(number: u64) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    pattern(&mut bytes, number);
    bytes
}

#[test]
fn a_flush_covers_exactly_the_completed_writes() {
    let store = Arc::new(SimBackend::new(options(), 1));
    let mut harness = open(&store, 1);
    harness.submit(0, &write(0, 1, false));
    harness.drain(|_| {});
    assert_eq!(store.durable(), vec![0; CAPACITY as usize], "the write is in the cache");
    harness.submit(0, &FLUSH);
    harness.submit(1, &write(4096, 2, false));
    harness.drain(|_| {});
    assert_eq!(store.durable()[..4096], content(1));
    assert_eq!(
        store.durable()[4096..8192],
        [0; 4096],
        "the write was in flight when the flush was submitted"
    );
    assert_eq!(store.image()[4096..8192], content(2));
    harness.submit(0, &write(8192, 3, true));
    harness.drain(|_| {});
    assert_eq!(store.durable()[8192..12288], content(3), "force unit access needs no flush");
}

#[test]
fn a_crash_loses_any_sectors_that_are_not_durable() {
    let store = Arc::new(SimBackend::new(options(), 1));
    let mut harness = open(&store, 1);
    harness.submit(0, &write(0, 1, true));
    harness.drain(|_| {});
    harness.submit(0, &write(0, 2, false));
    harness.drain(|_| {});
    let (old, new) = (content(1), content(2));
    let (mut lost, mut kept) = (0, 0);
    for seed in 0..20 {
        let image = store.crash(seed);
        assert_eq!(image, store.crash(seed), "the same seed loses the same sectors");
        for sector in (0..4096).step_by(512).map(|start| start..start + 512) {
            lost += u32::from(image[sector.clone()] == old[sector.clone()]);
            kept += u32::from(image[sector.clone()] == new[sector]);
        }
    }
    assert_eq!(lost + kept, 160);
    assert!(lost > 40 && kept > 40, "{lost} lost, {kept} kept");
}

#[test]
fn the_journal_rebuilds_every_prefix() {
    let store = Arc::new(SimBackend::new(options(), 5));
    let mut harness = open(&store, 5);
    harness.run(&mut Workload::new(WorkloadOptions::new(CAPACITY), 5), 200, |_| {});
    harness.drain(|_| {});
    let journal = store.journal();
    assert_eq!(journal.len(), store.journal_length());
    assert!(journal.contains(&JournalEntry::Flush));
    assert_eq!(store.image_after(0), vec![0; CAPACITY as usize]);
    assert_eq!(store.image_after(journal.len()), store.image());
}

#[test]
fn the_same_seed_has_the_same_effects() {
    let run = |seed| {
        let options = SimOptions { write_error_rate: 0.1, ..options() };
        let store = Arc::new(SimBackend::new(options, seed));
        let mut harness = open(&store, 9);
        harness.allow_errors();
        harness.run(&mut Workload::new(WorkloadOptions::new(CAPACITY), 9), 200, |_| {});
        harness.drain(|_| {});
        store.journal()
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
}

#[test]
fn a_full_store_accepts_overwrites() {
    let store = Arc::new(SimBackend::new(SimOptions { room: 8192, ..options() }, 1));
    let mut harness = open(&store, 1);
    harness.allow_errors();
    let mut submit = |action: Action| {
        let failed = harness.statistics().failed;
        harness.submit(0, &action);
        harness.drain(|_| {});
        harness.statistics().failed == failed
    };
    assert!(submit(write(0, 1, false)));
    assert!(submit(write(4096, 2, false)));
    assert!(!submit(write(8192, 3, false)), "no space");
    assert!(submit(write(4096, 4, false)), "an overwrite");
    let flags = Flags::default();
    let discard =
        Action { operation: Operation::Discard, offset: 0, length: 4096, flags, content: 0 };
    assert!(submit(discard));
    assert!(submit(write(8192, 5, false)), "the discard has freed space");
    assert_eq!(store.image()[8192..12288], content(5));
}
