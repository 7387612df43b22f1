//! The store of a cache hangs and comes back, at random instants. The disk is served all the time,
//! no read gets other data than the disk beneath has, and no start after a crash at any instant
//! either.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use fathom_block::{Backend, Disk, DiskOptions, Flags, Layer, Operation};
use fathom_cache::Policy;
use fathom_layers::Cache;
use fathom_layers::cache::{
    CacheDisk, CacheMark, CacheMode, CacheTimes, CacheVolume, Dropped, VolumeOptions,
};
use fathom_persistence::{Identity, Stamp};
use fathom_sim::{
    Action, Harness, HarnessOptions, Images, SimBackend, SimOptions, SimRecord, Workload,
    WorkloadOptions, each_seed,
};
use parking_lot::Mutex;

#[path = "support/images.rs"]
mod images;
#[path = "support/kept.rs"]
mod kept;

use images::check_mappings;
use kept::{IDENTITY, harness};

const CAPACITY: u64 = 256 << 10;
const GENERATION: u64 = 7;
const LIMIT: Duration = Duration::from_secs(20);
/// How long a store may take, in nanoseconds.
const STORE_NS: u64 = 1_000_000_000;

/// The mark of the disk's store, which has `generation`, or 0 for none. Crashes before each change
/// of the mark are checked with the mark of before.
struct Mark {
    generation: AtomicU64,
    record: SimRecord,
    /// The number of effects at the last check.
    checked: AtomicUsize,
    crashes: AtomicUsize,
    blocks: AtomicUsize,
    removals: AtomicUsize,
    /// What the last crash has left, with the mark at that instant.
    last: Mutex<Option<(Images, u64)>>,
}

impl Mark {
    /// Checks what each crash since the last call has left, with the mark as it is.
    fn check(&self) {
        let length = self.record.length();
        if self.checked.swap(length, Ordering::Relaxed) == length {
            return;
        }
        let mut crashes = self.record.crashes();
        crashes.push(self.record.crash());
        self.crashes.fetch_add(crashes.len(), Ordering::Relaxed);
        let generation = self.generation.load(Ordering::Relaxed);
        if generation == GENERATION {
            let blocks = crashes.iter().map(|images| check_mappings(&images[0], &images[1])).sum();
            self.blocks.fetch_add(blocks, Ordering::Relaxed);
        }
        *self.last.lock() = crashes.pop().map(|images| (images, generation));
    }

    fn is_there(&self) -> bool {
        self.generation.load(Ordering::Relaxed) == GENERATION
    }
}

impl CacheMark for Mark {
    fn read(&self) -> io::Result<Option<Stamp>> {
        let generation = self.generation.load(Ordering::Relaxed);
        Ok((generation != 0).then_some(Stamp { identity: IDENTITY, age: generation }))
    }

    fn write(&self, state: &Stamp) -> io::Result<()> {
        self.check();
        self.generation.store(state.age, Ordering::Relaxed);
        Ok(())
    }

    fn reject(&self) -> io::Result<()> {
        self.check();
        self.generation.store(0, Ordering::Relaxed);
        self.removals.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn modified_ns(&self) -> io::Result<u64> {
        Ok(0)
    }
}

struct Rig {
    store: Arc<SimBackend>,
    home: Arc<SimBackend>,
    volume: Arc<CacheVolume>,
    cache: Cache,
    mark: Arc<Mark>,
    disk: Arc<Disk>,
}

impl Rig {
    fn new(seed: u64) -> Self {
        Self::with(seed, STORE_NS, blank(seed), GENERATION)
    }

    /// `store_ns` is how long the store may take, and `generation` what the mark has.
    fn with(seed: u64, store_ns: u64, images: Images, generation: u64) -> Self {
        let record = SimRecord::new(seed, 0.1);
        let mut images = images.into_iter();
        let mut store = |number: u64| {
            let image = images.next().unwrap();
            let options = SimOptions::new(image.len() as u64);
            record.store(options, seed + number * 1_000_000, image)
        };
        let (store, home) = (store(0), store(1));
        let options = VolumeOptions {
            identity: Some(IDENTITY),
            block_size: 4096 << (seed % 3),
            disks: 2,
            bitmap_pages: 1,
            is_kept: true,
            policy: [Policy::None, Policy::Sky, Policy::Auto][seed as usize / 2 % 3],
            times: CacheTimes { write_ns: 20_000, quiet_ns: 50_000, store_ns },
        };
        let backend = Arc::clone(&store) as Arc<dyn Backend>;
        let volume = Arc::new(CacheVolume::open(backend, &options).unwrap());
        let mark = Arc::new(Mark {
            generation: AtomicU64::new(generation),
            record: record.clone(),
            checked: AtomicUsize::new(0),
            crashes: AtomicUsize::new(0),
            blocks: AtomicUsize::new(0),
            removals: AtomicUsize::new(0),
            last: Mutex::default(),
        });
        let expected = (generation != 0).then_some(generation);
        let found = CacheDisk { expected, ..kept::disk(CAPACITY, Identity::NONE) };
        let mode = CacheMode::ALL[(seed / 4 % 2) as usize];
        let cache = Cache::new(&volume, &found, mode, Arc::<Mark>::clone(&mark)).unwrap();
        mark.generation.store(GENERATION, Ordering::Relaxed);
        let layers = vec![Arc::new(cache.clone()) as Arc<dyn Layer>];
        let disk = Disk::new(DiskOptions::default(), layers, Arc::clone(&home) as _).unwrap();
        record.crashes();
        mark.checked.store(record.length(), Ordering::Relaxed);
        Self { store, home, volume, cache, mark, disk }
    }

    fn problems(&self) -> String {
        let problems = Layer::status(&self.cache).problems.into_iter();
        problems.map(|problem| problem.message).collect()
    }

    /// Lets time pass until the store has nothing to do.
    fn wait(&self, harness: &mut Harness) {
        harness.drain(|_| self.mark.check());
        let mut idle = 0;
        while idle < 100 {
            let before = self.mark.record.length();
            harness.step();
            self.mark.check();
            idle = if self.mark.record.length() == before { idle + 1 } else { 0 };
        }
    }

    /// A disk whose cache has blocks, and no region with recent changes.
    fn filled(&self, seed: u64) -> Harness {
        let mut harness = harness(&self.disk, seed);
        self.wait(&mut harness);
        let mut requests = workload(seed);
        for _ in 0..20 {
            harness.run(&mut requests, 40, |_| self.mark.check());
            self.wait(&mut harness);
            harness.verify(CAPACITY);
            self.wait(&mut harness);
            if self.cache.status().mapped > 0 {
                return harness;
            }
        }
        panic!("the cache stays empty");
    }
}

fn blank(seed: u64) -> Images {
    vec![vec![0; (128 << 10) + (32 << 10) * (seed as usize % 5)], vec![0; CAPACITY as usize]]
}

fn workload(seed: u64) -> Workload {
    let mut options = WorkloadOptions::new(CAPACITY);
    options.alignment = if seed % 2 == 0 { 4096 } else { 512 };
    options.weights = [60, 20, 8, 3, 3, 1, 3];
    options.hot_rate = 0.8;
    Workload::new(options, seed)
}

fn read(harness: &mut Harness, offset: u64) {
    let (operation, flags) = (Operation::Read, Flags::default());
    harness.submit(0, &Action { operation, offset, length: 4096, flags, content: 0 });
}

fn write(harness: &mut Harness, offset: u64, content: u64) {
    let (operation, flags) = (Operation::Write, Flags::default());
    harness.submit(0, &Action { operation, offset, length: 4096, flags, content });
}

/// The store hangs and continues at random instants, for lives that each end with a crash.
#[test]
fn a_store_that_hangs_and_comes_back_leaves_nothing_old() {
    let (mut crashes, mut blocks, mut removals, mut returns, mut hits) = (0, 0, 0, 0, 0);
    each_seed(24, |seed| {
        let mut random = fastrand::Rng::with_seed(seed);
        // With so little time, requests are late that do not hang.
        let store_ns = [STORE_NS, 30_000][seed as usize % 2];
        let (mut images, mut generation) = (blank(seed), GENERATION);
        for life in 0..4 {
            let rig = Rig::with(seed, store_ns, images.clone(), generation);
            let mut harness = harness(&rig.disk, seed * 100 + life);
            harness.model_mut().restart(&images[1]);
            let mut requests = workload(seed * 100 + life);
            rig.store.hang(random.u8(..) < 50);
            for _ in 0..8 {
                harness.run(&mut requests, random.usize(1..60), |_| rig.mark.check());
                match random.u8(0..4) {
                    0 => rig.wait(&mut harness),
                    1 => harness.drain(|_| rig.mark.check()),
                    _ => {}
                }
                rig.store.hang(random.bool());
            }
            if life < 2 {
                harness.drain(|_| rig.mark.check());
                rig.store.hang(false);
                rig.wait(&mut harness);
                harness.verify(CAPACITY);
                rig.wait(&mut harness);
                assert_eq!((rig.problems(), rig.cache.status().failed), (String::new(), None));
                assert!(rig.mark.is_there(), "the mark is written when the store answers");
            }
            crashes += rig.mark.crashes.load(Ordering::Relaxed);
            blocks += rig.mark.blocks.load(Ordering::Relaxed);
            removals += rig.mark.removals.load(Ordering::Relaxed);
            returns += usize::from(rig.mark.removals.load(Ordering::Relaxed) > 0 && life < 2);
            hits += rig.cache.status().reads.hits;
            images = rig.mark.record.crash();
            generation = rig.mark.generation.load(Ordering::Relaxed);
            assert_eq!(harness.model().check_crash(&images[1]), Ok(()));
        }
    });
    let counts = [crashes, blocks, removals, returns, hits as usize];
    assert!(counts.into_iter().all(|count| count > 10), "{counts:?}");
}

/// A read of what the store has is answered by home after the store's time. Later reads, also of
/// other disks, do not wait. When the store answers, it is read again.
#[test]
fn reads_are_answered_by_home() {
    each_seed(12, |seed| {
        let rig = Rig::new(seed);
        let mut harness = rig.filled(seed);
        let other = CacheDisk { name: "other".into(), ..kept::disk(CAPACITY, Identity::NONE) };
        let mark = Arc::new(kept::Mark(AtomicU64::new(GENERATION)));
        let other = Cache::new(&rig.volume, &other, CacheMode::WriteThrough, mark).unwrap();
        let home = Arc::new(SimBackend::new(SimOptions::new(CAPACITY), seed));
        let layers = vec![Arc::new(other.clone()) as Arc<dyn Layer>];
        let other_disk = Disk::new(DiskOptions::default(), layers, home).unwrap();
        let mut others = Harness::new(&other_disk, &HarnessOptions::default(), seed);

        rig.store.hang(true);
        let begun_ns = harness.now_ns();
        for offset in (0..CAPACITY).step_by(4096) {
            read(&mut harness, offset);
        }
        harness.drain(|_| rig.mark.check());
        let waited_ns = harness.now_ns() - begun_ns;
        assert!((STORE_NS..2 * STORE_NS).contains(&waited_ns), "{waited_ns} ns");
        assert!(rig.problems().contains("does not answer"), "{}", rig.problems());
        let before = rig.cache.status();
        for harness in [&mut harness, &mut others] {
            for offset in (0..CAPACITY).step_by(4096) {
                let begun_ns = harness.now_ns();
                read(harness, offset);
                harness.drain(|_| {});
                // Time passes in steps, up to when the cache looks at its store again.
                assert!(harness.now_ns() - begun_ns < STORE_NS, "a later read waits");
            }
        }
        let now = rig.cache.status();
        assert_eq!(
            (now.reads.hits, now.blocks.insertions),
            (before.reads.hits, before.blocks.insertions)
        );
        assert!(rig.mark.is_there(), "reads change nothing");

        rig.store.hang(false);
        rig.wait(&mut harness);
        assert_eq!((rig.problems(), rig.cache.status().failed), (String::new(), None));
        harness.verify(CAPACITY);
        assert!(rig.cache.status().reads.hit_bytes > now.reads.hit_bytes);
        others.verify(CAPACITY);
    });
}

/// A change waits for the store as long as a read does. Then no start uses the disk's blocks, until
/// the store has noted what it has missed.
#[test]
fn changes_do_not_wait_for_the_store_for_long() {
    each_seed(12, |seed| {
        let rig = Rig::new(seed);
        let mut harness = rig.filled(seed);
        rig.store.hang(true);
        let begun_ns = harness.now_ns();
        for place in 0..CAPACITY / 16384 {
            write(&mut harness, place * 16384, 1_000 + place);
        }
        harness.drain(|_| rig.mark.check());
        let waited_ns = harness.now_ns() - begun_ns;
        assert!((STORE_NS..2 * STORE_NS).contains(&waited_ns), "{waited_ns} ns");
        assert!(!rig.mark.is_there());
        assert!(rig.problems().contains("find the cache of this disk empty"), "{}", rig.problems());
        for place in 0..8 {
            let begun_ns = harness.now_ns();
            write(&mut harness, place * 32768, 2_000 + place);
            harness.drain(|_| rig.mark.check());
            assert!(harness.now_ns() - begun_ns < STORE_NS, "a later change waits");
        }
        harness.verify(CAPACITY);
        rig.store.hang(false);
        rig.wait(&mut harness);
        assert!(rig.mark.is_there());
        assert_eq!((rig.problems(), rig.cache.status().failed), (String::new(), None));
        harness.verify(CAPACITY);
    });
}

/// Takes the cache away from the disk, on a separate thread, while the queues work.
fn take_away(rig: &Rig, harness: &mut Harness) {
    let disk = Arc::clone(&rig.disk);
    let change = thread::spawn(move || disk.restack(Vec::new(), LIMIT));
    while !change.is_finished() {
        harness.step_beside(|_| rig.mark.check());
    }
    change.join().unwrap().unwrap();
}

/// A cache whose store hangs is taken away from its disk, with requests of all kinds in flight.
/// When the store comes back, the cache begins empty.
#[test]
fn a_cache_is_taken_away_while_its_store_hangs() {
    each_seed(12, |seed| {
        let rig = Rig::new(seed);
        let mut harness = rig.filled(seed);
        let mut requests = workload(seed + 1);
        let is_known = seed % 3 != 0;
        // Reads, insertions and tables are in flight.
        harness.run(&mut requests, 20, |_| rig.mark.check());
        rig.store.hang(true);
        if is_known {
            for offset in (0..CAPACITY).step_by(8192) {
                read(&mut harness, offset);
            }
            harness.run(&mut requests, 20, |_| rig.mark.check());
            harness.drain(|_| rig.mark.check());
        }
        take_away(&rig, &mut harness);
        assert!(!rig.mark.is_there() && rig.disk.layers().is_empty());
        let reads = rig.home.counts().reads;
        harness.run(&mut requests, 60, |_| {});
        harness.verify(CAPACITY);
        assert!(rig.home.counts().reads > reads);

        rig.store.hang(false);
        for _ in 0..300 {
            harness.step();
        }
        harness.run(&mut requests, 20, |_| {});
        harness.drain(|_| {});
        let Rig { cache, volume, mark, disk, home, .. } = rig;
        drop(cache);
        let found =
            CacheDisk { expected: None, generation: 8, ..kept::disk(CAPACITY, Identity::NONE) };
        let mode = CacheMode::WriteThrough;
        let again = Cache::new(&volume, &found, mode, Arc::<Mark>::clone(&mark)).unwrap();
        assert_eq!((again.dropped(), again.status().mapped), (Some(Dropped::Mark), 0));
        let layers = vec![Arc::new(again.clone()) as Arc<dyn Layer>];
        let content = home.image();
        drop((harness, disk));
        let disk = Disk::new(DiskOptions::default(), layers, home).unwrap();
        let mut harness = Harness::new(&disk, &HarnessOptions::default(), seed);
        harness.model_mut().restart(&content);
        harness.run(&mut requests, 60, |_| {});
        harness.verify(CAPACITY);
        assert_eq!(again.status().failed, None);
    });
}

/// The end of a daemon does not wait for a store that does not answer.
#[test]
fn an_orderly_end_does_not_wait_for_the_store() {
    let rig = Rig::new(1);
    let mut harness = rig.filled(1);
    rig.store.hang(true);
    for offset in (0..CAPACITY).step_by(4096) {
        read(&mut harness, offset);
    }
    harness.drain(|_| rig.mark.check());
    let begun = std::time::Instant::now();
    let ended = rig.cache.save_state(&rig.disk, LIMIT).unwrap_err();
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
    assert!(ended.to_string().contains("does not answer"), "{ended}");
}

/// Disks of one cache ask its store at the same time, as at a reload: each of them gets its answer.
#[test]
fn a_store_answers_several_disks_at_once() {
    let rig = Rig::new(1);
    let ask = |limit: Duration| {
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let cache = rig.cache.clone();
                thread::spawn(move || cache.answers(limit))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(ask(LIMIT), [true; 8]);
    rig.store.hang(true);
    assert_eq!(ask(Duration::from_millis(50)), [false; 8]);
    rig.store.hang(false);
    assert_eq!(ask(LIMIT), [true; 8]);
}
