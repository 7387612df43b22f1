//! A cache in memory that answers hits at once, in the thread of their queue: by seed, with several
//! threads on the same blocks, and with the shares of several disks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use fathom_backend::Memory;
use fathom_block::{Backend, CacheHit, Clock, Disk, DiskOptions, Operation, Outcome, Stack};
use fathom_cache::Policy;
use fathom_layers::Cache;
use fathom_layers::cache::{CacheDisk, CacheMode, CacheTimes, CacheVolume, NoMark, VolumeOptions};
use fathom_persistence::Identity;
use fathom_reactor::Reactor;
use fathom_sim::{
    Harness, HarnessOptions, SimBackend, SimOptions, Workload, WorkloadOptions, each_seed,
};

fn volume(length: u64, block_size: u32, policy: Policy) -> Arc<CacheVolume> {
    let options = VolumeOptions {
        identity: Some(Identity([0; 16])),
        block_size,
        disks: 2,
        bitmap_pages: 1,
        is_kept: false,
        policy,
        times: CacheTimes::default(),
    };
    let store = Arc::new(Memory::open(length).unwrap());
    Arc::new(CacheVolume::open(store, &options).unwrap())
}

fn cache(volume: &Arc<CacheVolume>, name: &str, capacity: u64) -> Cache {
    let disk = CacheDisk::in_memory(name, capacity);
    Cache::new(volume, &disk, CacheMode::WriteThrough, Arc::new(NoMark)).unwrap()
}

fn disk(cache: &Cache, home: Arc<dyn Backend>) -> Arc<Disk> {
    let layers = vec![Arc::new(cache.clone()) as _];
    Disk::new(DiskOptions::default(), layers, home).unwrap()
}

/// One queue, and what its thread needs.
struct Queue {
    reactor: Reactor,
    stack: Stack,
}

impl Queue {
    fn new(disk: &Arc<Disk>) -> Self {
        let mut reactor = Reactor::new(64).unwrap();
        let stack = disk.open_queue(&mut reactor, Clock::System).unwrap();
        Self { reactor, stack }
    }

    /// Carries out a request. `data` is its data.
    fn carry_out(
        &mut self,
        operation: Operation,
        offset: u64,
        data: &mut [u8],
    ) -> (Outcome, CacheHit) {
        let mut request = self.stack.request();
        request.operation = operation;
        (request.offset, request.length) = (offset, data.len() as u64);
        if operation.carries_data() {
            request.buffers.allocate(data.len());
            request.buffers.copy_from(0, data);
        }
        self.stack.submit(request, &mut self.reactor);
        loop {
            if let Some((request, outcome)) = self.stack.completed() {
                if operation == Operation::Read {
                    request.buffers.copy_to(0, data);
                }
                let hit = request.course.cache_hit;
                self.stack.recycle(request);
                return (outcome, hit);
            }
            self.stack.wait(&mut self.reactor, None).unwrap();
        }
    }
}

/// Hits are copied out of memory, while home completes late and in any order.
#[test]
fn queues_get_what_the_disk_has() {
    const CAPACITY: u64 = 256 << 10;
    let (mut cases, mut hits, mut evictions) = (0, 0, 0);
    each_seed(60, |seed| {
        cases += 1;
        let policy = [Policy::None, Policy::Sky, Policy::Auto][seed as usize % 3];
        let block_size = 4096 << (seed % 5);
        let volume = volume((96 << 10) + (seed % 5) * (32 << 10) + (64 << 10), block_size, policy);
        let cache = cache(&volume, "disk", CAPACITY);
        let home = Arc::new(SimBackend::new(SimOptions::new(CAPACITY), seed));
        let disk = disk(&cache, Arc::clone(&home) as _);
        let (queues, depth) = (1 + seed as usize % 4, 1 + (seed as usize * 5) % 16);
        let options = HarnessOptions { queues, depth, simulated: true };
        let mut harness = Harness::new(&disk, &options, seed);
        let mut options = WorkloadOptions::new(CAPACITY);
        options.alignment = if seed % 2 == 0 { 4096 } else { 512 };
        options.weights = [60, 20, 8, 3, 3, 1, 3];
        options.hot_rate = 0.8;
        harness.run(&mut Workload::new(options, seed), 700, |_| {});
        harness.drain(|_| {});
        harness.verify(CAPACITY);
        harness.rest(|_| {});
        let status = cache.status();
        assert_eq!(status.failed, None);
        (hits, evictions) = (hits + status.reads.hits, evictions + status.blocks.evictions);
    });
    assert!(hits > 10 * cases && evictions > 10 * cases, "{hits} hits, {evictions} evictions");
}

/// A thread writes a block again and again, and others read it, also while its neighbours push it
/// out of the cache: no read is older than what was written before it began.
#[test]
fn a_read_is_never_older_than_the_last_write() {
    const CAPACITY: u64 = 4 << 20;
    const LENGTH: usize = 16 << 10;
    const ROUNDS: u64 = 4000;
    // A cache of 16 blocks, so that slots get other blocks all the time.
    let volume = volume((16 << 14) + (64 << 10), 16 << 10, Policy::None);
    let cache = cache(&volume, "disk", CAPACITY);
    let disk = disk(&cache, Arc::new(Memory::open(CAPACITY).unwrap()));
    let (begun, completed) = (AtomicU64::new(0), AtomicU64::new(0));
    let (is_over, reads) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let (mut queue, mut data) = (Queue::new(&disk), vec![0; LENGTH]);
                while !is_over.load(Ordering::SeqCst) {
                    let before = completed.load(Ordering::SeqCst);
                    let (outcome, _) = queue.carry_out(Operation::Read, 0, &mut data);
                    let after = begun.load(Ordering::SeqCst);
                    assert_eq!(outcome, Ok(()));
                    for word in data.chunks_exact(8) {
                        let found = u64::from_le_bytes(word.try_into().unwrap());
                        assert!(
                            (before..=after).contains(&found),
                            "write {found} while {before} had completed and {after} had begun"
                        );
                    }
                    reads.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        scope.spawn(|| {
            let (mut queue, mut random) = (Queue::new(&disk), fastrand::Rng::with_seed(1));
            let mut data = vec![0; LENGTH];
            while !is_over.load(Ordering::SeqCst) {
                let block = random.u64(1..40);
                let operation = if random.bool() { Operation::Write } else { Operation::Read };
                data.fill(0xee);
                assert_eq!(queue.carry_out(operation, block << 14, &mut data).0, Ok(()));
            }
        });
        let (mut queue, mut data) = (Queue::new(&disk), vec![0; LENGTH]);
        for number in 1..=ROUNDS {
            data.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&number.to_le_bytes()));
            begun.store(number, Ordering::SeqCst);
            assert_eq!(queue.carry_out(Operation::Write, 0, &mut data).0, Ok(()));
            completed.store(number, Ordering::SeqCst);
            if number % 8 == 0 {
                std::thread::yield_now();
            }
        }
        is_over.store(true, Ordering::SeqCst);
    });
    let status = cache.status();
    assert!(reads.into_inner() > 100 && status.reads.hits > 100, "{status:?}");
    assert!(status.blocks.evictions > 100 && status.failed.is_none(), "{status:?}");
}

/// A disk keeps its share while its neighbour reads far more than the cache has.
#[test]
fn a_neighbour_does_not_take_a_share() {
    const CAPACITY: u64 = 64 << 20;
    let volume = volume((4 << 20) + (64 << 10), 16 << 10, Policy::Auto);
    let slots = u64::from(volume.slots());
    let caches = ["kept", "busy"].map(|name| cache(&volume, name, CAPACITY));
    caches[0].set_share(slots / 2).unwrap();
    assert!(caches[1].set_share(slots).is_err(), "more than there is");
    let open = |cache: &Cache| {
        let disk = disk(cache, Arc::new(Memory::open(CAPACITY).unwrap()));
        Queue::new(&disk)
    };
    let (mut kept, mut busy) = (open(&caches[0]), open(&caches[1]));
    let mut data = vec![0; 16 << 10];
    let mut read = |queue: &mut Queue, block: u64| {
        let (outcome, hit) = queue.carry_out(Operation::Read, block << 14, &mut data);
        assert_eq!(outcome, Ok(()));
        hit == CacheHit::Hit
    };
    // What is not used is lent.
    for round in 0..20 * slots {
        read(&mut busy, round % slots);
    }
    assert_eq!((caches[0].status().blocks_of_disk, caches[0].status().mapped), (Some(0), slots));
    for block in 0..slots / 2 {
        read(&mut kept, block);
    }
    for round in 0..20 * slots {
        read(&mut busy, round % 4096);
    }
    assert!((0..slots / 2).all(|block| read(&mut kept, block)));
    let status = caches[0].status();
    assert_eq!((status.share, status.blocks_of_disk), (slots / 2, Some(slots / 2)));
    // The share ends with the disk's use of the cache.
    let [first, second] = caches;
    drop((kept, first));
    for round in 0..20 * slots {
        read(&mut busy, round % 4096);
    }
    let again = cache(&volume, "kept", CAPACITY);
    assert_eq!((again.status().share, again.status().blocks_of_disk), (0, Some(0)));
    assert!(second.set_share(slots).is_ok());
}
