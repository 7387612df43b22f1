//! Equal blocks are kept once: found when they are written, by their fingerprints, and later by
//! merges.

use std::sync::Arc;

use fathom_block::{Backend, Clock, Facts, Insight, IoClass, Kind, Operation, Stack};
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
        index_pages: 3,
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

/// A queue of a volume, whose requests have insights.
struct Hinted {
    reactor: Reactor,
    stack: Stack,
}

impl Hinted {
    fn open(pool: &Pool, volume: &str) -> Self {
        let disk = disk(pool.volume(volume).unwrap());
        let mut reactor = Reactor::new(64).unwrap();
        let stack = disk.open_queue(&mut reactor, Clock::System).unwrap();
        Self { reactor, stack }
    }

    fn write(&mut self, offset: u64, bytes: &[u8], hint: impl FnOnce(&mut Insight)) {
        let mut request = self.stack.request();
        (request.operation, request.offset) = (Operation::Write, offset);
        request.length = bytes.len() as u64;
        request.buffers.allocate(bytes.len());
        request.buffers.copy_from(0, bytes);
        hint(&mut request.insight);
        self.stack.submit(request, &mut self.reactor);
        while self.stack.completed().is_none() {
            self.stack.advance(&mut self.reactor);
        }
    }
}

#[test]
fn what_is_known_to_be_unique_is_not_looked_for() {
    let (_device, pool) = pool(blank_of(DEVICE));
    pool.create_volume("a", VOLUME).unwrap();
    let mut queue = Hinted::open(&pool, "a");
    let mut write = |offset: u64, hint: &dyn Fn(&mut Insight)| {
        let before = pool.status().counts;
        queue.write(offset * BLOCK, &blocks(7..9), hint);
        let after = pool.status().counts;
        let looked_up = after.looked_up_blocks > before.looked_up_blocks;
        let unique = after.unique_blocks - before.unique_blocks;
        (after.shared_blocks - before.shared_blocks, looked_up, unique)
    };
    assert_eq!(write(0, &|_| {}), (0, true, 0));
    assert_eq!(write(2, &|insight| insight.class = Some(IoClass::UNIQUE)), (0, false, 2));
    assert_eq!(write(4, &|insight| insight.class = Some(IoClass(4))), (2, true, 0));
    assert_eq!(write(6, &|insight| insight.is_unique = true), (0, false, 2));
    for (kind, unique) in [
        (Kind::Metadata, 2),
        (Kind::Journal, 2),
        (Kind::Directory, 2),
        (Kind::Swap, 2),
        (Kind::Data, 0),
        (Kind::Direct, 0),
        (Kind::Device, 0),
    ] {
        let found = write(8 + 2 * kind as u64, &|insight| insight.facts.kind = kind);
        assert_eq!(found, (2 - unique, unique == 0, unique), "{kind:?}");
    }
    // A part of a request.
    let found = write(40, &|insight| {
        for kind in [Kind::Data, Kind::Journal] {
            insight.push(BLOCK, Facts { kind, ..Facts::default() });
        }
    });
    assert_eq!(found, (1, true, 1));
}

#[test]
fn what_is_unique_costs_no_page_of_the_fingerprint_table() {
    let reads = |is_unique: bool| {
        let (_device, pool) = pool(blank_of(DEVICE));
        pool.create_volume("a", VOLUME).unwrap();
        let mut queue = Hinted::open(&pool, "a");
        for round in 0..40_u64 {
            for start in (0..960).step_by(60) {
                let content = blocks(1000 * round + start..1000 * round + start + 60);
                queue.write(start * BLOCK, &content, |insight| insight.is_unique = is_unique);
            }
        }
        pool.status().counts.fingerprint_reads
    };
    let (with, without) = (reads(false), reads(true));
    assert!(with > 20 && without == 0, "{with} and {without}");
}

#[test]
fn a_copy_is_found_though_its_source_has_no_fingerprints() {
    let (device, pool) = pool(blank_of(DEVICE));
    for (name, domain) in [("a", "x"), ("b", "x"), ("c", "")] {
        pool.create_volume_in(name, VOLUME, domain).unwrap();
        let mut queue = Hinted::open(&pool, name);
        for start in (0..120).step_by(60) {
            let content = blocks(start..start + 60);
            queue.write(start * BLOCK, &content, |insight| insight.is_unique = true);
        }
    }
    let copy = |name: &str, from: u64, target: u64| {
        let volume = disk(pool.volume(name).unwrap());
        // What one queue has read is known to the others.
        let (mut reader, mut writer) = (OneRequest::open(&volume), OneRequest::open(&volume));
        let before = pool.status().counts;
        let content = reader.read(from * BLOCK, 60 * BLOCK).unwrap();
        writer.write(target * BLOCK, &content).unwrap();
        let after = pool.status().counts;
        let copied = after.copied_blocks - before.copied_blocks;
        assert_eq!(after.shared_blocks - before.shared_blocks, copied);
        copied
    };
    assert_eq!(copy("a", 0, 300), 60);
    assert_eq!(copy("a", 30, 400), 60);
    assert_eq!(copy("c", 0, 300), 0, "it does not share its blocks");
    // What another volume has read is not known.
    let before = counts(&pool);
    open(&pool, "b").write(500 * BLOCK, &blocks(60..120)).unwrap();
    assert_eq!(counts(&pool).0 - before.0, 60);
    // What was read, and is overwritten before it is written elsewhere.
    let mut queue = open(&pool, "a");
    let content = queue.read(60 * BLOCK, 60 * BLOCK).unwrap();
    for start in [0, 60, 300, 400] {
        queue.write(start * BLOCK, &blocks(800 + start..860 + start)).unwrap();
    }
    queue.write(700 * BLOCK, &content).unwrap();
    queue.flush().unwrap();
    drop(queue);
    for pool in [pool.clone(), support::reopen(&device.crash(1))] {
        let found = self::content(pool.volume("a").unwrap());
        assert!(found[700 * BLOCK as usize..][..content.len()] == content);
        for start in [0, 60, 300, 400] {
            let found = &found[(start * BLOCK) as usize..][..60 * BLOCK as usize];
            assert!(found == blocks(800 + start..860 + start), "from {start} on");
        }
    }
    assert_eq!(problems(device.crash(1)), Vec::<String>::new());
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
