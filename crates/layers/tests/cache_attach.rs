//! A cache that outlives its daemon is attached to a disk in the middle of its work, and detached,
//! by seed; logs are added and removed beneath it. All stores may crash at any instant: no opening
//! finds content in the cache that its disk has lost.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use fathom_block::{
    Backend, BackendContext, BackendQueue, Disk, DiskOptions, Layer, Operation, Request,
};
use fathom_cache::Policy;
use fathom_layers::cache::{CacheDisk, CacheMode, CacheTimes, CacheVolume, VolumeOptions};
use fathom_layers::wal::{Completion, LogVolume, WalOptions};
use fathom_layers::{Cache, Wal};
use fathom_persistence::Identity;
use fathom_reactor::Event;
use fathom_sim::{
    Harness, Images, ModelDisk, SimBackend, SimOptions, SimRecord, Workload, WorkloadOptions,
    each_seed,
};

#[path = "support/around.rs"]
mod around;
#[path = "support/images.rs"]
mod images;
#[path = "support/kept.rs"]
mod kept;
#[path = "support/write_back.rs"]
mod write_back;

use around::Around;
use images::{mappings, with_log};
use kept::{Mark, harness};
use write_back::{CAPACITY, blank, log_of, log_options};

/// The time limit of each phase of a change of layers.
const LIMIT: Duration = Duration::from_secs(20);
/// The generation of the mark of an image that has the cache.
const MARKED: u64 = 7;

/// The rounds after which a flush of a home whose flushes are slow begins.
const SLOW_ROUNDS: u32 = 200;

/// A queue of a store whose flushes are slow.
struct SlowFlushes {
    inner: Box<dyn BackendQueue>,
    slow: Vec<(u32, Box<Request>)>,
}

impl BackendQueue for SlowFlushes {
    fn submit(&mut self, request: Box<Request>, context: &mut BackendContext<'_>) {
        if request.operation == Operation::Flush {
            return self.slow.push((SLOW_ROUNDS, request));
        }
        self.inner.submit(request, context);
    }

    fn event(&mut self, event: &Event, context: &mut BackendContext<'_>) {
        self.inner.event(event, context);
    }

    fn advance(&mut self, context: &mut BackendContext<'_>) {
        self.slow.iter_mut().for_each(|(rounds, _)| *rounds -= 1);
        while let Some(at) = self.slow.iter().position(|(rounds, _)| *rounds == 0) {
            self.inner.submit(self.slow.swap_remove(at).1, context);
        }
        self.inner.advance(context);
    }
}

/// A disk, a volume for its cache with a place for a log, and another store with a log.
struct Rig {
    seed: u64,
    record: SimRecord,
    home: Arc<SimBackend>,
    volume: Arc<CacheVolume>,
    disk: Arc<Disk>,
    in_cache: Arc<LogVolume>,
    beside: Arc<LogVolume>,
    cache: Option<(Cache, Arc<Mark>)>,
    /// The log, and whether it is in the cache's store.
    log: Option<(Wal, bool)>,
    /// The number of logs made so far.
    opened: u8,
    /// The number of effects at the last check, and what the checks have found.
    checked: Cell<usize>,
    crashes: Cell<usize>,
    blocks: Cell<usize>,
}

impl Rig {
    fn new(seed: u64, flushes_slowly: bool) -> Self {
        let record = SimRecord::new(seed, 0.1);
        let mut images = blank(seed).into_iter();
        let store = |number: u64, image: Vec<u8>| {
            let options = SimOptions::new(image.len() as u64);
            record.store(options, seed + number * 1_000_000, image)
        };
        let (store, home, log) = (
            store(0, images.next().unwrap()),
            store(1, images.next().unwrap()),
            store(2, vec![0; 128 << 10]),
        );
        let options = VolumeOptions {
            identity: None,
            block_size: 0,
            disks: 0,
            bitmap_pages: 0,
            is_kept: true,
            policy: Policy::None,
            times: CacheTimes { write_ns: 20_000, quiet_ns: 50_000, store_ns: u64::MAX },
        };
        let store = store as Arc<dyn Backend>;
        let volume = Arc::new(CacheVolume::open(Arc::clone(&store), &options).unwrap());
        let backend: Arc<dyn Backend> = if flushes_slowly {
            Arc::new(Around::new(&home, home.capabilities(), |_, inner| {
                Box::new(SlowFlushes { inner, slow: Vec::new() })
            }))
        } else {
            Arc::clone(&home) as _
        };
        let disk = Disk::new(DiskOptions::default(), Vec::new(), backend).unwrap();
        record.crashes();
        Self {
            seed,
            record,
            home,
            volume,
            disk,
            in_cache: Arc::new(LogVolume::new(store)),
            beside: Arc::new(LogVolume::new(log)),
            cache: None,
            log: None,
            opened: 0,
            checked: Cell::new(0),
            crashes: Cell::new(0),
            blocks: Cell::new(0),
        }
    }

    /// Checks what each crash since the last call has left.
    fn check(&self, model: &ModelDisk) {
        if self.checked.replace(self.record.length()) == self.record.length() {
            return;
        }
        let mut crashes = self.record.crashes();
        crashes.push(self.record.crash());
        self.crashes.set(self.crashes.get() + crashes.len());
        for images in &crashes {
            self.check_crash(model, images);
        }
    }

    fn check_crash(&self, model: &ModelDisk, images: &Images) {
        let log = log_of(self.seed, images);
        let content = with_log(&images[2], &with_log(log, &images[1]));
        if let Err(violation) = model.check_crash(&content) {
            panic!("a crash after {} effects: {violation}", self.record.length());
        }
        let is_marked = |mark: &Arc<Mark>| mark.0.load(Ordering::Relaxed) == MARKED;
        if !self.cache.as_ref().is_some_and(|(_, mark)| is_marked(mark)) {
            return;
        }
        // An opening marks the regions that a log in the cache's store has changes of.
        let log = match &self.log {
            Some((_, true)) => Some(log),
            Some((_, false)) => Some(&images[2][..]),
            None => None,
        };
        match mappings(&images[0], log, &content) {
            Ok(blocks) => self.blocks.set(self.blocks.get() + blocks),
            Err(wrong) => panic!("a crash after {} effects: {wrong}", self.record.length()),
        }
    }

    /// Gives the disk its cache and its log as layers, on a separate thread, while the queues work.
    fn restack(&self, harness: &mut Harness) {
        let cache = self.cache.as_ref().map(|(cache, _)| cache);
        let known: Vec<_> = self.disk.layers();
        let same = |layer: Arc<dyn Layer>| {
            let is_same = |old: &&Arc<dyn Layer>| old.name() == layer.name();
            known.iter().find(is_same).map_or(layer, Arc::clone)
        };
        let cache = cache.map(|cache| same(Arc::new(cache.clone())));
        let log = self.log.as_ref().map(|(log, _)| same(Arc::new(log.clone())));
        let layers: Vec<_> = cache.into_iter().chain(log).collect();
        let disk = Arc::clone(&self.disk);
        let change = thread::spawn(move || disk.restack(layers, LIMIT));
        while !change.is_finished() {
            harness.step_beside(|model| self.check(model));
        }
        change.join().unwrap().unwrap();
        if let Some((cache, _)) = &self.cache {
            let log = self.log.as_ref();
            cache.set_log(log.map_or(Identity::NONE, |(log, _)| log.identity()));
            let beneath = log.filter(|(_, is_in_cache)| *is_in_cache);
            if let Some((log, _)) = beneath {
                log.set_notes(cache.notes());
            }
            cache.rely_on_log(beneath.is_some());
        }
    }

    /// Attaches the cache, as the daemon does it: its blocks fit no mark.
    fn attach(&mut self, mode: CacheMode, harness: &mut Harness) {
        let found = CacheDisk { expected: None, ..kept::disk(CAPACITY, self.identity()) };
        let mark = Arc::new(Mark(AtomicU64::new(MARKED)));
        if mode == CacheMode::WriteBack && self.log.is_none() {
            self.open_log(true);
        }
        let made = Cache::new(&self.volume, &found, mode, Arc::<Mark>::clone(&mark)).unwrap();
        self.cache = Some((made, mark));
        self.restack(harness);
    }

    fn identity(&self) -> Identity {
        self.log.as_ref().map_or(Identity::NONE, |(log, _)| log.identity())
    }

    fn open_log(&mut self, is_in_cache: bool) {
        self.opened += 1;
        let in_cache =
            WalOptions { identity: Identity([self.opened; 16]), ..log_options(self.seed) };
        let log = if is_in_cache {
            Wal::open(&self.in_cache, &in_cache)
        } else {
            let completion = [Completion::Written, Completion::Durable][self.seed as usize / 2 % 2];
            Wal::open(&self.beside, &WalOptions { offset: 0, completion, ..in_cache })
        };
        self.log = Some((log.unwrap(), is_in_cache));
    }

    /// Changes the layers. Requests are in flight meanwhile.
    fn change(&mut self, random: &mut fastrand::Rng, harness: &mut Harness) {
        let modes = CacheMode::ALL;
        let is_in_cache = self.log.as_ref().is_some_and(|(_, is_in_cache)| *is_in_cache);
        match (&self.cache, random.u8(0..4)) {
            (None, 0..=2) => self.attach(modes[random.usize(0..4)], harness),
            (Some(_), 0) => {
                let (cache, _) = self.cache.take().unwrap();
                cache.rely_on_log(false);
                let log = if is_in_cache { self.log.take() } else { None };
                self.restack(harness);
                if let Some((log, _)) = log {
                    log.erase().unwrap();
                }
            }
            (Some((cache, _)), 1) if !is_in_cache => cache.set_mode(modes[random.usize(0..3)]),
            _ if is_in_cache => {
                let (log, _) = self.log.take().unwrap();
                let cache = self.cache.as_ref().unwrap().0.clone();
                cache.rely_on_log(false);
                self.restack(harness);
                log.erase().unwrap();
                cache.set_mode(CacheMode::WriteThrough);
            }
            _ => {
                if let Some((log, _)) = self.log.take() {
                    self.restack(harness);
                    log.erase().unwrap();
                } else {
                    self.open_log(false);
                    self.restack(harness);
                }
            }
        }
    }
}

/// With a flush among so many requests: much of what is read is not durable at home.
fn workload(seed: u64, weights: [u32; Operation::ALL.len()]) -> Workload {
    let mut options = WorkloadOptions::new(CAPACITY);
    options.alignment = if seed % 2 == 0 { 4096 } else { 512 };
    options.length_max = 8 << 10;
    options.weights = weights;
    options.force_unit_access_rate = 0.02;
    Workload::new(options, seed)
}

/// Lets time pass, so that tables are written and bits of regions are cleared.
fn wait(rig: &Rig, harness: &mut Harness) {
    harness.drain(|model| rig.check(model));
    let mut idle = 0;
    while idle < 60 {
        let before = rig.record.length();
        harness.step();
        rig.check(harness.model());
        idle = if rig.record.length() == before { idle + 1 } else { 0 };
    }
}

/// What is written before the cache is attached may still be only in home's volatile cache when it
/// is read.
#[test]
fn a_cache_attached_live_keeps_nothing_that_home_may_lose() {
    let (mut cases, mut crashes, mut blocks) = (0, 0, 0);
    each_seed(12, |seed| {
        cases += 1;
        let mut rig = Rig::new(seed, seed % 3 > 0);
        let mut harness = harness(&rig.disk, seed);
        harness.run(&mut workload(seed, [1, 60, 0, 2, 2, 0, 0]), 60, |model| rig.check(model));
        rig.attach(CacheMode::ALL[seed as usize % 4], &mut harness);
        let mut reads = workload(seed + 1, [60, 0, 0, 0, 0, 0, 0]);
        for _ in 0..4 {
            harness.run(&mut reads, 30, |model| rig.check(model));
            wait(&rig, &mut harness);
        }
        // Until the flush of home has completed, nothing is in the cache. Then it is filled.
        for _ in 0..SLOW_ROUNDS {
            harness.step();
        }
        harness.run(&mut reads, 30, |model| rig.check(model));
        wait(&rig, &mut harness);
        harness.verify(CAPACITY);
        (crashes, blocks) = (crashes + rig.crashes.get(), blocks + rig.blocks.get());
    });
    assert!(crashes > 20 * cases && blocks > crashes, "{crashes} crashes, {blocks} blocks");
}

#[test]
fn caches_and_logs_come_and_go_in_the_middle_of_the_work() {
    let (mut cases, mut crashes, mut blocks) = (0, 0, 0);
    each_seed(10, |seed| {
        cases += 1;
        let mut rig = Rig::new(seed, false);
        let mut harness = harness(&rig.disk, seed);
        let mut workload = workload(seed, [60, 40, 2, 2, 2, 1, 1]);
        let mut random = fastrand::Rng::with_seed(seed);
        for _ in 0..10 {
            harness.run(&mut workload, 25, |model| rig.check(model));
            if random.u8(0..2) == 0 {
                harness.drain(|model| rig.check(model));
                for _ in 0..random.usize(0..200) {
                    harness.step();
                    rig.check(harness.model());
                }
            }
            rig.change(&mut random, &mut harness);
        }
        harness.verify(CAPACITY);
        harness.rest(|_| {});
        if rig.log.is_none() {
            assert_eq!(harness.model().check_now(&rig.home.image()), Ok(()));
        }
        (crashes, blocks) = (crashes + rig.crashes.get(), blocks + rig.blocks.get());
    });
    assert!(crashes > 20 * cases && blocks > 0, "{crashes} crashes, {blocks} blocks");
}
