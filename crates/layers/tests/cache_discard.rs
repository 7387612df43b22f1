//! Discards of a whole disk, above a large cache.

use std::sync::Arc;
use std::time::Duration;

use fathom_backend::Null;
use fathom_block::{Clock, Disk, DiskOptions, Operation, Stack};
use fathom_cache::Policy;
use fathom_layers::Cache;
use fathom_layers::cache::{CacheDisk, CacheMode, CacheTimes, CacheVolume, NoMark, VolumeOptions};
use fathom_persistence::Identity;
use fathom_reactor::Reactor;

const BLOCK_SIZE: u64 = 4096;
/// The cache has about so many slots.
const SLOTS: u64 = 200_000;
const CAPACITY: u64 = 1 << 40;
/// The blocks that get into the cache, and those of a read.
const FILLED: u64 = 150_000;
const READ: u64 = 256;

fn submit(
    stack: &mut Stack,
    reactor: &mut Reactor,
    operation: Operation,
    offset: u64,
    length: u64,
) {
    let mut request = stack.request();
    (request.operation, request.offset, request.length) = (operation, offset, length);
    if operation == Operation::Read {
        request.buffers.allocate(length as usize);
    }
    stack.submit(request, reactor);
}

/// The operations that complete before the queue has made `rounds` rounds.
fn completed(stack: &mut Stack, reactor: &mut Reactor, rounds: usize) -> Vec<Operation> {
    let mut operations = Vec::new();
    for _ in 0..=rounds {
        while let Some((request, outcome)) = stack.completed() {
            outcome.unwrap();
            operations.push(request.operation);
            stack.recycle(request);
        }
        stack.wait(reactor, Some(Duration::ZERO)).unwrap();
    }
    operations
}

/// A discard of all blocks looks at many slots: requests that come later need not wait for it.
#[test]
fn other_requests_are_served_while_blocks_are_taken_out() {
    let options = VolumeOptions {
        identity: Some(Identity([1; 16])),
        block_size: BLOCK_SIZE as u32,
        disks: 1,
        bitmap_pages: 1,
        is_kept: false,
        policy: Policy::None,
        times: CacheTimes::default(),
    };
    let store = Arc::new(Null::new(SLOTS * BLOCK_SIZE));
    let volume = Arc::new(CacheVolume::open(store, &options).unwrap());
    let mode = CacheMode::WriteThrough;
    let found = CacheDisk::in_memory("disk", CAPACITY);
    let cache = Cache::new(&volume, &found, mode, Arc::new(NoMark)).unwrap();
    let layers = vec![Arc::new(cache.clone()) as _];
    let home = Arc::new(Null::new(CAPACITY));
    let disk = Disk::new(DiskOptions::default(), layers, home).unwrap();
    let mut reactor = Reactor::new(64).unwrap();
    let mut stack = disk.open_queue(&mut reactor, Clock::System).unwrap();
    for number in 0..FILLED / READ {
        submit(
            &mut stack,
            &mut reactor,
            Operation::Read,
            number * READ * BLOCK_SIZE,
            READ * BLOCK_SIZE,
        );
        assert_eq!(completed(&mut stack, &mut reactor, 2), [Operation::Read]);
    }
    assert!(cache.status().mapped > FILLED * 9 / 10);

    // Also several, of which the later ones find the cache empty.
    for _ in 0..3 {
        submit(&mut stack, &mut reactor, Operation::Discard, 0, CAPACITY);
    }
    submit(&mut stack, &mut reactor, Operation::Read, 0, BLOCK_SIZE);
    assert_eq!(completed(&mut stack, &mut reactor, 1), [Operation::Read]);
    let discards = completed(&mut stack, &mut reactor, 1000);
    assert_eq!(discards, [Operation::Discard; 3]);
    assert_eq!(cache.status().mapped, 0, "nothing comes into the cache during a discard");
    // Afterwards, blocks come into the cache again.
    submit(&mut stack, &mut reactor, Operation::Read, 0, BLOCK_SIZE);
    assert_eq!(completed(&mut stack, &mut reactor, 10), [Operation::Read]);
    assert_eq!(cache.status().mapped, 1);
    // A queue that ends in the middle leaves no range behind.
    submit(&mut stack, &mut reactor, Operation::Discard, 0, CAPACITY);
    assert_eq!(stack.in_flight(), 1);
    stack.end(&mut reactor);
    drop(stack);
    let mut stack = disk.open_queue(&mut reactor, Clock::System).unwrap();
    submit(&mut stack, &mut reactor, Operation::Read, 1 << 21, BLOCK_SIZE);
    assert_eq!(completed(&mut stack, &mut reactor, 10), [Operation::Read]);
    assert!(cache.status().mapped > 0);
}
