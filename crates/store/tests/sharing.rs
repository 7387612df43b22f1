//! Equal blocks are kept once: found when they are written, by their fingerprints, and later by
//! merges.

use std::sync::Arc;

use fathom_block::{Backend, Clock, IoClass, Operation};
use fathom_reactor::Reactor;
use fathom_sim::{OneRequest, SimBackend};
use fathom_store::{Pool, PoolOptions, PoolStatus, check};

mod support;

use support::{blank_of, content, disk, fast};

/// The size of the device, and of the volumes, in bytes.
const DEVICE: u64 = 16 << 20;
const VOLUME: u64 = 4 << 20;
const BLOCK: u64 = 4096;

fn pool(image: Vec<u8>) -> (Arc<SimBackend>, Pool) {
    let device = Arc::new(SimBackend::with_image(fast(DEVICE), 0, image));
    let options = PoolOptions {
        checkpoint_ns: u64::MAX,
        walk_pause_ns: 0,
        merge_pause_ns: u64::MAX,
        index_pages: 2,
        ..support::options()
    };
    let pool = Pool::open(Arc::clone(&device) as Arc<dyn Backend>, options).unwrap();
    (device, pool)
}

fn open(pool: &Pool, volume: &str) -> OneRequest {
    OneRequest::open(&disk(pool.volume(volume).unwrap()))
}

/// A block whose content is that number.
fn block(number: u64) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK as usize];
    fathom_sim::pattern(&mut bytes, number + 1);
    bytes
}

/// Blocks with the numbers in a range.
fn blocks(range: std::ops::Range<u64>) -> Vec<u8> {
    range.flat_map(block).collect()
}

fn problems(image: Vec<u8>) -> Vec<String> {
    let device = SimBackend::with_image(fast(DEVICE), 0, image);
    check(&(Arc::new(device) as Arc<dyn Backend>), true, |_| {}).unwrap().problems
}

fn counts(pool: &Pool) -> (u64, u64) {
    let counts = pool.status().counts;
    (counts.written_blocks, counts.shared_blocks)
}

#[test]
fn equal_blocks_of_a_domain_are_written_once() {
    let (device, pool) = pool(blank_of(DEVICE));
    for (name, domain) in [("a", "x"), ("b", "x"), ("c", "y"), ("d", ""), ("e", "")] {
        pool.create_volume_in(name, VOLUME, domain).unwrap();
    }
    assert!(pool.create_volume_in("f", VOLUME, "not a name").is_err());
    let write = |name: &str, offset: u64| {
        let before = counts(&pool);
        let mut queue = open(&pool, name);
        queue.write(offset, &blocks(0..40)).unwrap();
        queue.flush().unwrap();
        let after = counts(&pool);
        (after.0 - before.0, after.1 - before.1)
    };
    assert_eq!(write("a", 0), (40, 0));
    assert_eq!(write("b", 1 << 20), (0, 40));
    assert_eq!(write("a", 2 << 20), (0, 40));
    assert_eq!(write("c", 0), (40, 0), "another domain");
    assert_eq!((write("d", 0), write("e", 0)), ((40, 0), (40, 0)), "no domain");
    // What is there already needs no change.
    assert_eq!(write("b", 1 << 20), (0, 0));
    assert_eq!(pool.status().counts.unchanged_blocks, 40);
    assert_eq!(pool.status().shared_bytes, 40 * BLOCK);
    pool.set_domain("e", "x").unwrap();
    assert_eq!(write("e", 2 << 20), (0, 40));
    // The block for which it was written changes, and the others keep it.
    open(&pool, "a").write(0, &blocks(100..140)).unwrap();
    for _ in 0..2 {
        let pool = support::reopen(&device.crash(1));
        for (name, offset) in [("b", 1 << 20), ("a", 2 << 20), ("c", 0), ("d", 0), ("e", 0)] {
            let found = content(pool.volume(name).unwrap());
            assert!(found[offset..][..40 * BLOCK as usize] == blocks(0..40), "{name}");
        }
    }
    assert_eq!(problems(device.crash(1)), Vec::<String>::new());
}

#[test]
fn what_was_written_before_an_opening_is_found() {
    let (device, pool) = pool(blank_of(DEVICE));
    pool.create_volume("a", VOLUME).unwrap();
    let mut queue = open(&pool, "a");
    for start in (0..900).step_by(60) {
        queue.write(start * BLOCK, &blocks(start..start + 60)).unwrap();
    }
    queue.flush().unwrap();
    // A half is after the last checkpoint.
    for start in [0, 480, 840] {
        let (_, pool) = self::pool(device.crash(start));
        pool.create_volume("b", VOLUME).unwrap();
        let mut queue = open(&pool, "b");
        // The table is scanned meanwhile.
        for _ in 0..20 {
            queue.read(0, 512).unwrap();
        }
        queue.write(0, &blocks(start..start + 60)).unwrap();
        let (written, shared) = counts(&pool);
        assert!(shared > 50, "{shared} of 60 from {start} on, {written} written");
    }
}

#[test]
fn what_is_known_to_be_unique_is_not_looked_for() {
    let (_device, pool) = pool(blank_of(DEVICE));
    pool.create_volume("a", VOLUME).unwrap();
    let disk = disk(pool.volume("a").unwrap());
    let mut reactor = Reactor::new(64).unwrap();
    let mut stack = disk.open_queue(&mut reactor, Clock::System).unwrap();
    let mut write = |offset: u64, class: Option<IoClass>| {
        let mut request = stack.request();
        (request.operation, request.offset, request.length) = (Operation::Write, offset, BLOCK);
        request.buffers.allocate(BLOCK as usize);
        request.buffers.copy_from(0, &block(7));
        request.insight.class = class;
        stack.submit(request, &mut reactor);
        while stack.completed().is_none() {
            stack.advance(&mut reactor);
        }
        let counts = pool.status().counts;
        (counts.written_blocks, counts.shared_blocks, counts.unique_blocks)
    };
    assert_eq!(write(0, None), (1, 0, 0));
    assert_eq!(write(BLOCK, Some(IoClass::UNIQUE)), (2, 0, 1));
    assert_eq!(write(2 * BLOCK, Some(IoClass(4))), (2, 1, 1));
}

/// Looks for equal blocks until they have been found and freed.
fn merge(pool: &Pool, queue: &mut OneRequest) -> PoolStatus {
    let before = pool.status().counts;
    pool.request_merge();
    for _ in 0..20_000 {
        queue.read(0, 512).unwrap();
        let status = pool.status();
        if status.counts.merges > before.merges && !status.has_garbage {
            return status;
        }
    }
    panic!("the merge does not end: {:?}", pool.status());
}

#[test]
fn what_was_written_twice_is_merged() {
    let (device, pool) = pool(blank_of(DEVICE));
    for name in ["a", "b"] {
        pool.create_volume(name, VOLUME).unwrap();
    }
    // Blocks of one batch are not compared with each other.
    let mut queue = open(&pool, "a");
    for start in (0..480).step_by(60) {
        queue.write(start * BLOCK, &blocks(0..1).repeat(60)).unwrap();
    }
    let mut other = open(&pool, "b");
    for start in (0..120).step_by(30) {
        let twice = [blocks(start..start + 30), blocks(start..start + 30)].concat();
        other.write(2 * start * BLOCK, &twice).unwrap();
    }
    pool.take_snapshot(&["a", "b"], "s", 1).unwrap();
    pool.clone_snapshot("b", "s", "c").unwrap();
    queue.write(0, &blocks(500..510)).unwrap();
    let before = pool.status();
    drop(other);
    let after = merge(&pool, &mut queue);
    let freed = before.used_bytes - after.used_bytes;
    // Those of a batch that lie in another segment are a batch of their own.
    assert!(freed >= 150 * BLOCK, "{freed} bytes: {:?}", after.counts);
    queue.flush().unwrap();
    drop(queue);
    let expected = |start: u64| [blocks(start..start + 30), blocks(start..start + 30)].concat();
    for pool in [pool.clone(), support::reopen(&device.crash(1))] {
        let snapshot = content(pool.snapshot("b", "s").unwrap());
        let clone = content(pool.volume("c").unwrap());
        let whole = content(pool.volume("b").unwrap());
        let first = content(pool.volume("a").unwrap());
        for start in (0..120).step_by(30) {
            let at = 2 * start as usize * BLOCK as usize;
            for found in [&snapshot, &clone, &whole] {
                assert!(found[at..][..60 * BLOCK as usize] == expected(start), "from {start} on");
            }
        }
        assert!(first[..10 * BLOCK as usize] == blocks(500..510));
        assert!(first[10 * BLOCK as usize..][..470 * BLOCK as usize] == block(0).repeat(470));
    }
    assert_eq!(problems(device.crash(1)), Vec::<String>::new());
}
