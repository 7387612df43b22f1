//! A full pool, long discards, a device that hangs, and one that grows.

use std::sync::Arc;

use fathom_block::{Backend, Clock, ErrorKind, Operation, Outcome};
use fathom_persistence::Identity;
use fathom_reactor::Reactor;
use fathom_sim::{
    Harness, HarnessOptions, OneRequest, SimBackend, SimOptions, Workload, WorkloadOptions,
    each_seed,
};
use fathom_store::{MakeOptions, Pool, PoolOptions, check, make};

mod support;

use support::{DEVICE, VOLUME, blank, content, disk, fast, options};

const CHUNK: usize = 32 << 10;

fn pool(sim: SimOptions, image: Vec<u8>) -> (Arc<SimBackend>, Pool) {
    let device = Arc::new(SimBackend::with_image(sim, 1, image));
    let options = PoolOptions { walk_pause_ns: 0, ..options() };
    let pool = Pool::open(Arc::clone(&device) as Arc<dyn Backend>, options).unwrap();
    (device, pool)
}

fn problems(image: Vec<u8>) -> Vec<String> {
    let device = SimBackend::with_image(fast(image.len() as u64), 0, image);
    check(&(Arc::new(device) as Arc<dyn Backend>), true, |_| {}).unwrap().problems
}

/// Writes chunks, each with its number, until there is no space. Returns how many fit.
fn fill(queue: &mut OneRequest, first: u64) -> u64 {
    for number in first.. {
        match queue.write(number * CHUNK as u64, &vec![number as u8 + 1; CHUNK]) {
            Ok(()) => {}
            Err(ErrorKind::NoSpace) => return number - first,
            Err(kind) => panic!("a write failed: {kind}"),
        }
    }
    unreachable!("a volume that is larger than its pool")
}

#[test]
fn a_full_pool_takes_discards_and_deletions_and_has_space_again() {
    let (device, pool) = pool(fast(DEVICE), blank());
    pool.create_volume("a", 2 * DEVICE).unwrap();
    let mut queue = OneRequest::open(&disk(pool.volume("a").unwrap()));
    let count = fill(&mut queue, 0);
    assert!(count * CHUNK as u64 > DEVICE / 2, "{count} chunks");
    let is_right = |queue: &mut OneRequest, number: u64| {
        queue.read(number * CHUNK as u64, CHUNK as u64).unwrap() == vec![number as u8 + 1; CHUNK]
    };
    assert!((0..count).all(|number| is_right(&mut queue, number)));
    // What is discarded can be written again, but for what the pool keeps for its maps.
    let rounds = count / 2;
    for number in 0..rounds {
        queue.write_zeroes(number * CHUNK as u64, CHUNK as u64).unwrap();
    }
    for number in 0..rounds / 2 {
        queue.write(number * CHUNK as u64, &vec![number as u8 + 1; CHUNK]).unwrap();
    }
    queue.flush().unwrap();
    pool.take_snapshot(&["a"], "s", 1).unwrap();
    for number in rounds..count {
        let zeroed = queue.write_zeroes(number * CHUNK as u64, CHUNK as u64);
        assert!(matches!(zeroed, Ok(()) | Err(ErrorKind::NoSpace)), "{zeroed:?}");
    }
    pool.delete_snapshot("a", "s").unwrap();
    while pool.status().has_garbage {
        queue.read(0, 512).unwrap();
    }
    for number in rounds..count {
        queue.write_zeroes(number * CHUNK as u64, CHUNK as u64).unwrap();
    }
    let again = fill(&mut queue, rounds / 2) + rounds / 2;
    assert!(again + 4 >= count, "the space comes back: {again} of {count}");
    queue.flush().unwrap();
    drop(queue);
    let image = device.crash(1);
    assert_eq!(problems(image.clone()), Vec::<String>::new());
    let pool = support::reopen(&image);
    let mut queue = OneRequest::open(&disk(pool.volume("a").unwrap()));
    assert!((0..again).all(|number| is_right(&mut queue, number)));
}

/// Carries out a request without data.
fn carry_out(backend: &Arc<dyn Backend>, operation: Operation, length: u64) -> Outcome {
    let disk = disk(Arc::clone(backend));
    let mut reactor = Reactor::new(64).unwrap();
    let mut stack = disk.open_queue(&mut reactor, Clock::System).unwrap();
    let mut request = stack.request();
    (request.operation, request.length) = (operation, length);
    stack.submit(request, &mut reactor);
    let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
    loop {
        stack.advance(&mut reactor);
        if let Some((_, outcome)) = stack.completed() {
            return outcome;
        }
        assert!(std::time::Instant::now() < end, "the request does not end");
    }
}

#[test]
fn a_large_volume_on_a_small_pool_is_discarded_at_once() {
    let (_device, pool) = pool(fast(DEVICE), blank());
    let size = 3 << 40;
    pool.create_volume("a", size).unwrap();
    let volume = pool.volume("a").unwrap();
    let mut queue = OneRequest::open(&disk(Arc::clone(&volume)));
    for at in [0, 5 << 20, 700 << 30, size - 4096] {
        queue.write(at, &[7; 4096]).unwrap();
    }
    assert_eq!(carry_out(&volume, Operation::Discard, size), Ok(()));
    for at in [0, 5 << 20, 700 << 30, size - 4096] {
        assert_eq!(queue.read(at, 4096).unwrap(), [0; 4096]);
    }
}

#[test]
fn requests_go_on_when_a_device_hangs_for_a_while() {
    each_seed(8, |seed| {
        let (device, pool) = pool(SimOptions::new(DEVICE), blank());
        pool.create_volume("a", VOLUME).unwrap();
        let disk = disk(pool.volume("a").unwrap());
        let options = HarnessOptions { queues: 2, depth: 8, simulated: true };
        let mut harness = Harness::new(&disk, &options, seed);
        let mut workload = Workload::new(WorkloadOptions::new(VOLUME), seed);
        for _ in 0..4 {
            harness.run(&mut workload, 20, |_| {});
            device.hang(true);
            for _ in 0..50 {
                harness.step();
            }
            device.hang(false);
        }
        harness.drain(|_| {});
        harness.verify(VOLUME);
    });
}

#[test]
fn a_pool_grows_with_its_device() {
    let device = Arc::new(SimBackend::new(fast(DEVICE), 0));
    let identity = Identity(*b"identity of test");
    let options =
        MakeOptions { capacity_max: 4 * DEVICE, segment_blocks: 16, identity, key: [7; 32] };
    make(&(Arc::clone(&device) as Arc<dyn Backend>), &options, |_| {}).unwrap();
    let (device, pool) = self::pool(fast(DEVICE), device.image());
    pool.create_volume("a", 4 * DEVICE).unwrap();
    let mut queue = OneRequest::open(&disk(pool.volume("a").unwrap()));
    let count = fill(&mut queue, 0);
    queue.flush().unwrap();
    drop(queue);
    let mut image = device.crash(1);
    image.resize(2 * DEVICE as usize, 0);
    let (device, pool) = self::pool(fast(2 * DEVICE), image);
    let mut queue = OneRequest::open(&disk(pool.volume("a").unwrap()));
    let more = fill(&mut queue, count);
    assert!(more * CHUNK as u64 > DEVICE * 3 / 4, "{more} chunks");
    queue.flush().unwrap();
    drop(queue);
    let image = device.crash(1);
    assert_eq!(problems(image.clone()), Vec::<String>::new());
    let found = content(support::reopen(&image).volume("a").unwrap());
    let chunks = found.chunks(CHUNK).take((count + more) as usize);
    for (number, chunk) in chunks.enumerate() {
        assert!(chunk.iter().all(|byte| *byte == number as u8 + 1), "chunk {number}");
    }
}

#[test]
fn a_device_without_space_fails_writes_and_harms_nothing() {
    for extra in [100 << 10, 400 << 10, 900 << 10] {
        let image = blank();
        let used = image.chunks(512).filter(|sector| sector.iter().any(|byte| *byte != 0)).count();
        let room = used as u64 * 512 + extra;
        let (device, pool) = pool(SimOptions { room, ..fast(DEVICE) }, image);
        pool.create_volume("a", 2 * DEVICE).unwrap();
        let mut queue = OneRequest::open(&disk(pool.volume("a").unwrap()));
        let count = fill(&mut queue, 0);
        assert!(count > 0 && count * CHUNK as u64 <= extra, "{count} chunks");
        queue.flush().unwrap();
        // Each further attempt ends soon, also while a checkpoint has no space.
        for number in 0..60 {
            let mut bytes = vec![0; CHUNK];
            fastrand::Rng::with_seed(number).fill(&mut bytes);
            let again = queue.write((count + number) * CHUNK as u64, &bytes);
            assert_eq!(again, Err(ErrorKind::NoSpace));
        }
        assert_eq!(pool.damage(), None);
        let is_right = |queue: &mut OneRequest, number: u64| {
            let found = queue.read(number * CHUNK as u64, CHUNK as u64).unwrap();
            found == vec![number as u8 + 1; CHUNK]
        };
        assert!((0..count).all(|number| is_right(&mut queue, number)));
        drop(queue);
        // There is space again.
        let image = device.crash(1);
        assert_eq!(problems(image.clone()), Vec::<String>::new());
        let pool = support::reopen(&image);
        let mut queue = OneRequest::open(&disk(pool.volume("a").unwrap()));
        assert!((0..count).all(|number| is_right(&mut queue, number)));
        assert!(fill(&mut queue, count) > 5);
    }
}
