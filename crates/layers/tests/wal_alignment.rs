//! Logs on stores that have got a greater alignment.

use std::sync::Arc;

use fathom_block::{Backend, Disk, DiskOptions, Flags, Operation};
use fathom_layers::Wal;
use fathom_layers::wal::{Completion, LogVolume, WalOptions};
use fathom_persistence::Identity;
use fathom_sim::{Action, Harness, HarnessOptions, SimBackend, SimOptions};
use fathom_wal::RING_OFFSET;

const CAPACITY: u64 = 64 << 10;
const LOG_CAPACITY: u64 = RING_OFFSET + (256 << 10);

/// A log is not served if the stores cannot have requests for its changes any more.
#[test]
fn changes_finer_than_a_greater_alignment_are_refused() {
    let store = |alignment: u32, capacity: u64| SimOptions {
        rounds_max: 0,
        alignment,
        ..SimOptions::new(capacity)
    };
    // Two changes each, and whether the disk's store and the log's may have a greater alignment.
    for (changes, home_may, log_may) in [
        ([(4096, 4096), (12288, 4096)], true, true),
        ([(4096, 4096), (0, 512)], false, false),
        // What is left of the first one is aligned, but not its place in the log.
        ([(3584, 4608), (0, 4096)], true, false),
    ] {
        let log = Arc::new(SimBackend::new(store(512, LOG_CAPACITY), 1));
        let volume = Arc::new(LogVolume::new(Arc::clone(&log) as Arc<dyn Backend>));
        let options = WalOptions {
            name: "disk".into(),
            home: "image".into(),
            home_capacity: CAPACITY,
            home_alignment: 512,
            offset: 0,
            size: 0,
            block_size: 4096,
            identity: Identity(*b"identity of test"),
            age_ns: u64::MAX,
            completion: Completion::Durable,
            expected: None,
            mark: None,
            times: None,
            home_store: fathom_layers::wal::HomeStore::default(),
            clock_start_ns: 0,
        };
        let wal = Wal::open(&volume, &options).unwrap();
        let home = Arc::new(SimBackend::new(store(512, CAPACITY), 2));
        let disk = Disk::new(DiskOptions::default(), vec![Arc::new(wal)], home).unwrap();
        let mut harness = Harness::new(&disk, &HarnessOptions::default(), 1);
        for (offset, length) in changes {
            let (operation, flags) = (Operation::Write, Flags::default());
            harness.submit(0, &Action { operation, offset, length, flags, content: offset + 1 });
            harness.drain(|_| {});
        }
        drop((harness, disk, volume));
        let refusal = |log_alignment: u32, home_alignment: u32| {
            let store = SimBackend::with_image(store(log_alignment, LOG_CAPACITY), 1, log.image());
            let volume = Arc::new(LogVolume::new(Arc::new(store)));
            let opened = Wal::open(&volume, &WalOptions { home_alignment, ..options.clone() });
            opened.err().map(|error| format!("{:#}", error.failure("disk")))
        };
        assert_eq!(refusal(512, 512), None);
        for (log_alignment, home_alignment, may) in
            [(512, 4096, home_may), (4096, 512, log_may), (4096, 4096, home_may && log_may)]
        {
            let refused = refusal(log_alignment, home_alignment);
            assert_eq!(refused.is_none(), may, "{changes:?}: {refused:?}");
            if let Some(text) = refused {
                assert!(text.contains("4096 bytes") && text.contains("without `direct`"), "{text}");
            }
        }
    }
}
