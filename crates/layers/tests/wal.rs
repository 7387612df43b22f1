//! Runs the write-ahead log, by seed, over a faulty log volume and a faulty disk. Whenever both
//! crash, all acknowledged changes survive.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fathom_block::{
    Backend, BackendContext, BackendQueue, BackgroundScheduler, BackgroundStep, Disk, DiskOptions,
    ErrorKind, Flags, HeldBy, Layer, Operation, Permission, Request, Waker,
};
use fathom_layers::tap::{EventType, Labels};
use fathom_layers::wal::{Completion, LogPlaces, LogVolume, WalError, WalOptions};
use fathom_layers::{Tap, Wal};
use fathom_persistence::Identity;
use fathom_reactor::Event;
use fathom_sim::{
    Action, Harness, HarnessOptions, Images, ModelDisk, SimBackend, SimOptions, SimRecord,
    Workload, WorkloadOptions, each_seed,
};
use fathom_wal::RING_OFFSET;
use parking_lot::Mutex;

#[path = "support/around.rs"]
mod around;
#[path = "support/images.rs"]
mod images;

use around::Around;
use images::with_log;

const CAPACITY: u64 = 64 << 10;
const LOG_CAPACITY: u64 = RING_OFFSET + (40 << 10);

fn options() -> WalOptions {
    WalOptions {
        name: "disk".into(),
        home: "image".into(),
        home_capacity: CAPACITY,
        home_alignment: 1,
        offset: 0,
        size: 0,
        block_size: 512,
        identity: Identity(*b"identity of test"),
        age_ns: 20_000,
        completion: Completion::Durable,
        expected: None,
        mark: None,
        times: None,
        home_store: fathom_layers::wal::HomeStore::default(),
        clock_start_ns: 0,
    }
}

/// When changes complete: two of four seeds have each.
fn completion(seed: u64) -> Completion {
    if seed / 2 % 2 == 0 { Completion::Durable } else { Completion::Written }
}

fn workload(seed: u64) -> Workload {
    let mut options = WorkloadOptions::new(CAPACITY);
    options.length_max = 8 << 10;
    options.weights = [10, 50, 12, 5, 5, 1, 3];
    Workload::new(options, seed)
}

/// The content of the disk after a start with `images`.
fn recovered(images: &Images) -> Vec<u8> {
    with_log(&images[0], &images[1])
}

/// A scheduler of background work that allows steps by seed, and each step at its deadline.
struct RandomScheduler {
    random: Mutex<fastrand::Rng>,
    opened: AtomicU64,
    /// The parts that have a step in flight.
    running: Mutex<BTreeSet<u64>>,
    /// Offers that had to wait.
    waits: AtomicU64,
}

impl RandomScheduler {
    fn new(seed: u64) -> Self {
        Self {
            random: Mutex::new(fastrand::Rng::with_seed(seed)),
            opened: AtomicU64::new(0),
            running: Mutex::default(),
            waits: AtomicU64::new(0),
        }
    }
}

impl BackgroundScheduler for RandomScheduler {
    fn open(&self, _: &str, layer: &'static str, _: Waker) -> u64 {
        assert_eq!(layer, "wal");
        self.opened.fetch_add(1, Ordering::Relaxed)
    }

    fn ask(&self, part: u64, step: BackgroundStep, now_ns: u64) -> Permission {
        assert!(!self.running.lock().contains(&part), "a part has one step at a time");
        let mut random = self.random.lock();
        if now_ns < step.deadline_ns && random.u8(..4) > 0 {
            self.waits.fetch_add(1, Ordering::Relaxed);
            let until_ns = now_ns + random.u64(1..10_000);
            return Permission::Wait(until_ns.min(step.deadline_ns));
        }
        self.running.lock().insert(part);
        Permission::Begin
    }

    fn end(&self, part: u64, _: u64) {
        assert!(self.running.lock().remove(&part), "a step ends once");
    }

    fn rest(&self, part: u64) {
        assert!(!self.running.lock().contains(&part), "its step has not ended");
    }

    fn close(&self, part: u64) {
        self.running.lock().remove(&part);
    }
}

/// A disk with a log, over two stores that crash together. Every second seed has a scheduler of
/// background work.
struct Rig {
    record: SimRecord,
    _log: Arc<SimBackend>,
    home: Arc<SimBackend>,
    wal: Wal,
    disk: Arc<Disk>,
    scheduler: Option<Arc<RandomScheduler>>,
}

impl Rig {
    fn new(seed: u64, crash_rate: f64, images: Images) -> Self {
        let (log, home) = (SimOptions::new(LOG_CAPACITY), SimOptions::new(CAPACITY));
        Self::with(seed, crash_rate, images, log, home)
    }

    fn with(seed: u64, crash_rate: f64, images: Images, log: SimOptions, home: SimOptions) -> Self {
        let record = SimRecord::new(seed, crash_rate);
        let mut images = images.into_iter();
        let log = record.store(log, seed, images.next().unwrap());
        let home = record.store(home, seed + 1_000_000, images.next().unwrap());
        let volume = Arc::new(LogVolume::new(Arc::clone(&log) as Arc<dyn Backend>));
        let options = WalOptions { completion: completion(seed), ..options() };
        let wal = Wal::open(&volume, &options).unwrap();
        let layers = vec![Arc::new(wal.clone()) as _];
        let disk = Disk::new(DiskOptions::default(), layers, Arc::clone(&home) as _).unwrap();
        let scheduler = (seed % 2 == 1).then(|| Arc::new(RandomScheduler::new(seed)));
        if let Some(scheduler) = &scheduler {
            disk.schedule_background(Arc::<RandomScheduler>::clone(scheduler));
        }
        record.crashes();
        Self { record, _log: log, home, wal, disk, scheduler }
    }

    /// Checks the content after each crash since the last call.
    fn check_crashes(&self, model: &ModelDisk) -> usize {
        let mut crashes = self.record.crashes();
        crashes.push(self.record.crash());
        for (number, images) in crashes.iter().enumerate() {
            if let Err(violation) = model.check_crash(&recovered(images)) {
                panic!("crash {number} after {} effects: {violation}", self.record.length());
            }
        }
        crashes.len()
    }
}

fn blank() -> Images {
    vec![vec![0; LOG_CAPACITY as usize], vec![0; CAPACITY as usize]]
}

fn harness(rig: &Rig, seed: u64) -> Harness {
    let (queues, depth) = (1 + seed as usize % 4, 1 + (seed as usize * 5) % 16);
    Harness::new(&rig.disk, &HarnessOptions { queues, depth, simulated: true }, seed)
}

#[test]
fn acknowledged_changes_survive_a_crash_of_both_stores() {
    let (mut cases, mut crashes, mut rounds, mut waits) = (0, 0, 0, 0);
    each_seed(1000, |seed| {
        cases += 1;
        let rig = Rig::new(seed, 0.1, blank());
        let mut harness = harness(&rig, seed);
        let mut inspect = |model: &ModelDisk| crashes += rig.check_crashes(model);
        harness.run(&mut workload(seed), 100, &mut inspect);
        harness.drain(&mut inspect);
        harness.verify(CAPACITY);
        harness.rest(|_| {});
        rounds += rig.wal.status().rounds;
        waits += rig.scheduler.as_ref().map_or(0, |found| found.waits.load(Ordering::Relaxed));
        // Everything is written back before the layer leaves.
        rig.wal.drain(&rig.disk, Duration::from_secs(20)).unwrap();
        assert_eq!(harness.model().check_now(&rig.home.image()), Ok(()));
        assert_eq!(harness.model().check_crash(&rig.record.crash()[1]), Ok(()));
        assert_eq!(rig.wal.status().used, 0);
    });
    assert!(
        rounds > cases && crashes > 20 * cases as usize,
        "{rounds} rounds home, {crashes} crashes"
    );
    assert!(waits > cases / 2, "write-back waited {waits} times for an idle time");
}

/// With `Durable`, every change is durable when it completes, with or without a flush.
#[test]
fn a_change_is_durable_when_it_completes() {
    each_seed(200, |seed| {
        let seed = seed / 2 * 4 + seed % 2;
        assert_eq!(completion(seed), Completion::Durable);
        let rig = Rig::new(seed, 0.0, blank());
        let mut harness = harness(&rig, seed);
        let mut options = WorkloadOptions::new(CAPACITY);
        options.length_max = 8 << 10;
        options.weights = [0, 50, 0, 5, 5, 0, 0];
        let mut workload = Workload::new(options, seed);
        for _ in 0..10 {
            harness.run(&mut workload, 10, |_| {});
            harness.drain(|_| {});
            let image = recovered(&rig.record.crash());
            assert_eq!(harness.model().check_now(&image), Ok(()));
        }
    });
}

/// Several lives: each begins with the data that the crash before it left in both stores.
#[test]
fn a_disk_is_usable_after_each_crash() {
    each_seed(150, |seed| {
        let mut images = blank();
        let mut workload = workload(seed);
        for life in 0..6 {
            let life_seed = seed * 100 + life;
            let rig = Rig::new(life_seed, 0.05, images.clone());
            let mut harness = harness(&rig, life_seed);
            harness.model_mut().restart(&if life == 0 {
                vec![0; CAPACITY as usize]
            } else {
                recovered(&images)
            });
            let mut inspect = |model: &ModelDisk| {
                rig.check_crashes(model);
            };
            harness.run(&mut workload, 60, &mut inspect);
            if life == 3 {
                harness.verify(CAPACITY);
            }
            // The crash occurs with requests in flight.
            images = rig.record.crash();
            assert_eq!(harness.model().check_crash(&recovered(&images)), Ok(()));
        }
    });
}

/// Errors of either store are reported, and acknowledged changes survive.
#[test]
fn acknowledged_changes_survive_errors_of_a_store() {
    let (mut cases, mut failed, mut stopped, mut retried) = (0, 0, 0, 0);
    each_seed(300, |seed| {
        cases += 1;
        let (mut log, mut home) = (SimOptions::new(LOG_CAPACITY), SimOptions::new(CAPACITY));
        if seed % 3 == 0 {
            log.write_error_rate = 0.01;
            log.flush_error_rate = 0.01;
        } else {
            home.write_error_rate = 0.1;
            home.flush_error_rate = 0.1;
        }
        // `Wal::open` returns an error that occurs during the opening. The same seed gives the same
        // errors.
        if seed % 3 == 0 && Wal::open(&volume(&log, seed), &options()).is_err() {
            return;
        }
        let rig = Rig::with(seed, 0.1, blank(), log, home);
        let mut harness = harness(&rig, seed);
        harness.allow_errors();
        let mut inspect = |model: &ModelDisk| {
            rig.check_crashes(model);
        };
        harness.run(&mut workload(seed), 150, &mut inspect);
        harness.drain(&mut inspect);
        failed += harness.statistics().failed;
        let status = rig.wal.status();
        stopped += u64::from(status.log_failed.is_some());
        retried += u64::from(status.home_failed.is_some() || status.rounds > 0);
        // Acknowledged changes can be read in either case.
        harness.verify(CAPACITY);
    });
    assert!(
        failed > cases && stopped * 10 > cases && retried * 3 > cases,
        "{failed}, {stopped}, {retried}"
    );
}

fn volume(options: &SimOptions, seed: u64) -> Arc<LogVolume> {
    Arc::new(LogVolume::new(Arc::new(SimBackend::new(options.clone(), seed))))
}

/// A queue of a store in which some reads take very long.
struct SlowReads {
    inner: Box<dyn BackendQueue>,
    slow: Vec<(u32, Box<Request>)>,
}

impl BackendQueue for SlowReads {
    fn submit(&mut self, request: Box<Request>, context: &mut BackendContext<'_>) {
        if request.operation == Operation::Read && request.id % 5 == 0 {
            self.slow.push((150, request));
        } else {
            self.inner.submit(request, context);
        }
    }

    fn event(&mut self, event: &Event, context: &mut BackendContext<'_>) {
        self.inner.event(event, context);
    }

    fn advance(&mut self, context: &mut BackendContext<'_>) {
        for (rounds, _) in &mut self.slow {
            *rounds -= 1;
        }
        let (due, slow) =
            std::mem::take(&mut self.slow).into_iter().partition::<Vec<_>, _>(|slow| slow.0 == 0);
        self.slow = slow;
        for (_, request) in due {
            self.inner.submit(request, context);
        }
        self.inner.advance(context);
    }
}

/// Space of the log that is being read is not overwritten, even after its content was written back.
#[test]
fn space_is_not_overwritten_while_it_is_read() {
    each_seed(60, |seed| {
        let log =
            SimBackend::new(SimOptions { rounds_max: 2, ..SimOptions::new(LOG_CAPACITY) }, seed);
        let log = Arc::new(log);
        let slow = Around::new(&log, log.capabilities(), |_, inner| {
            Box::new(SlowReads { inner, slow: Vec::new() })
        });
        let volume = Arc::new(LogVolume::new(Arc::new(slow)));
        let wal = Wal::open(&volume, &options()).unwrap();
        let home = SimOptions { rounds_max: 2, ..SimOptions::new(CAPACITY) };
        let home = Arc::new(SimBackend::new(home, seed + 1));
        let disk = Disk::new(DiskOptions::default(), vec![Arc::new(wal)], home).unwrap();
        let options = HarnessOptions { queues: 3, depth: 8, simulated: true };
        let mut harness = Harness::new(&disk, &options, seed);
        harness.run(&mut workload(seed), 400, |_| {});
        harness.verify(CAPACITY);
    });
}

/// Disks on one volume use separate regions, and share flushes.
#[test]
fn disks_on_one_volume_share_its_flushes() {
    const DISKS: u64 = 50;
    const SIZE: u64 = RING_OFFSET + (16 << 10);
    let log = SimOptions { rounds_max: 3, ..SimOptions::new(DISKS * SIZE.next_multiple_of(4096)) };
    let volume = volume(&log, 1);
    let mut harnesses = Vec::new();
    for number in 0..DISKS {
        let name = number.to_string();
        let offset = number * SIZE.next_multiple_of(4096);
        let wal =
            Wal::open(&volume, &WalOptions { name, offset, size: SIZE, ..options() }).unwrap();
        let home = Arc::new(SimBackend::new(SimOptions::new(CAPACITY), number));
        let disk = Disk::new(DiskOptions::default(), vec![Arc::new(wal)], home).unwrap();
        // With simulated time a flush would soon exceed its time limit.
        let options = HarnessOptions { queues: 1, depth: 1, simulated: false };
        harnesses.push(Harness::new(&disk, &options, number));
    }
    let flushes = volume.flush_count();
    let mut workload = Workload::new(WorkloadOptions::new(CAPACITY), 1);
    for _ in 0..20 {
        for harness in &mut harnesses {
            let action = workload.find(|action| action.operation == Operation::Write).unwrap();
            harness.submit(0, &Action { length: action.length.min(4096), ..action });
        }
        // Advances all threads in parallel.
        while harnesses.iter_mut().map(Harness::step).max() != Some(0) {}
    }
    let flushes = volume.flush_count() - flushes;
    assert!(flushes < DISKS * 20 / 5, "{flushes} flushes for {} writes", DISKS * 20);
    for harness in &mut harnesses {
        harness.verify(CAPACITY);
    }
}

fn write(offset: u64, content: u64) -> Action {
    let (operation, flags) = (Operation::Write, Flags::default());
    Action { operation, offset, length: 4096, flags, content }
}

/// A thread that hangs with its own disk while it has a flush of the volume does not delay another
/// disk.
#[test]
fn a_thread_that_hangs_delays_no_other_disk_of_the_volume() {
    const SIZE: u64 = RING_OFFSET + (64 << 10);
    let log = SimOptions { rounds_max: 2, ..SimOptions::new(2 * SIZE) };
    let volume = volume(&log, 1);
    let mut harnesses = Vec::new();
    for number in 0..2 {
        let (name, offset) = (number.to_string(), number * SIZE);
        let wal =
            Wal::open(&volume, &WalOptions { name, offset, size: SIZE, ..options() }).unwrap();
        let home = Arc::new(SimBackend::new(SimOptions::new(CAPACITY), number));
        let disk = Disk::new(DiskOptions::default(), vec![Arc::new(wal)], home).unwrap();
        let options = HarnessOptions { queues: 1, depth: 1, simulated: true };
        harnesses.push(Harness::new(&disk, &options, number));
    }
    let [hanging, other] = &mut harnesses[..] else { unreachable!() };
    let before = volume.flush_count();
    hanging.submit(0, &write(0, 1));
    for _ in 0..1000 {
        if volume.flush_count() > before {
            break;
        }
        hanging.step();
    }
    assert_eq!(volume.flush_count(), before + 1, "the flush has begun");
    other.submit(0, &write(0, 2));
    let mut rounds = 0;
    while other.step() > 0 {
        rounds += 1;
        assert!(rounds < 1000, "the other disk waits for the thread that hangs");
    }
    assert!(other.now_ns() > 900_000_000, "it shares a flush for as long as one may take");
    // The late completion does no harm.
    hanging.drain(|_| {});
    for harness in &mut harnesses {
        harness.verify(CAPACITY);
    }
}

/// An idle queue writes back what another queue left in the log.
#[test]
fn an_idle_queue_writes_back_what_another_left() {
    let rig = Rig::new(1, 0.0, blank());
    let one_queue = HarnessOptions { queues: 1, ..Default::default() };
    let mut idle = Harness::new(&rig.disk, &one_queue, 1);
    idle.rest(|_| {});
    let mut leaving = Harness::new(&rig.disk, &one_queue, 2);
    leaving.submit(0, &write(0, 1));
    leaving.drain(|_| {});
    assert!(rig.wal.status().used > 0);
    drop(leaving);
    for _ in 0..1000 {
        idle.step();
    }
    assert_eq!(rig.wal.status().used, 0);
}

/// The tap above sees in the request which layer answered it.
#[test]
fn the_tap_sees_which_layer_answered() {
    let volume = volume(&SimOptions::new(LOG_CAPACITY), 1);
    let wal = Wal::open(&volume, &WalOptions { age_ns: u64::MAX, ..options() }).unwrap();
    let tap = Tap::new(1, Labels::default());
    let home = Arc::new(SimBackend::new(SimOptions::new(CAPACITY), 2));
    let layers: Vec<Arc<dyn Layer>> = vec![Arc::new(tap.clone()), Arc::new(wal)];
    let disk = Disk::new(DiskOptions::default(), layers, home).unwrap();
    let mut reader = tap.attach().unwrap();
    let mut harness = Harness::new(&disk, &HarnessOptions::default(), 1);
    let read = |offset, length| Action { operation: Operation::Read, length, ..write(offset, 0) };
    for action in [write(4096, 1), read(4096, 4096), read(0, 8192), read(16384, 4096)] {
        harness.submit(0, &action);
        harness.drain(|_| {});
    }
    let mut events = Vec::new();
    reader.drain(&mut events);
    let answered = events.iter().filter(|event| event.record_type == EventType::Response as u8);
    let answered: Vec<_> = answered.map(|event| (event.layer, event.cache_hit)).collect();
    assert_eq!(answered, [(2, 0), (2, 2), (2, 3), (0, 0)]);
}

/// Events of changes that wait for space in the log show that the log has held them.
#[test]
fn a_change_that_waits_for_space_is_held_by_the_log() {
    // The log has 40 KiB.
    let volume = volume(&SimOptions::new(LOG_CAPACITY), 1);
    let wal = Wal::open(&volume, &WalOptions { age_ns: u64::MAX, ..options() }).unwrap();
    let tap = Tap::new(1, Labels::default());
    let home = Arc::new(SimBackend::new(SimOptions::new(CAPACITY), 2));
    let layers: Vec<Arc<dyn Layer>> = vec![Arc::new(tap.clone()), Arc::new(wal)];
    let disk = Disk::new(DiskOptions::default(), layers, home).unwrap();
    let mut reader = tap.attach().unwrap();
    let mut harness = Harness::new(&disk, &HarnessOptions::default(), 1);
    let mut held = |writes: &[u64]| {
        for place in writes {
            harness.submit(0, &Action { length: 8 << 10, ..write(place << 13, *place) });
        }
        harness.drain(|_| {});
        let mut events = Vec::new();
        reader.drain(&mut events);
        let answered = events.iter().filter(|event| event.record_type == EventType::Response as u8);
        answered.map(|event| event.held_by).collect::<Vec<_>>()
    };
    assert_eq!(held(&[0, 1]), [HeldBy::None as u8; 2]);
    let full = held(&[2, 3, 4, 5, 6, 7, 0, 1]);
    assert!(full.contains(&(HeldBy::Wal as u8)), "{full:?}");
    assert!(full.contains(&(HeldBy::None as u8)), "{full:?}");
}

/// Other queues do not wait for a queue that ended with records half written.
#[test]
fn a_queue_that_ended_delays_no_other() {
    each_seed(200, |seed| {
        let rig = Rig::new(seed, 0.0, blank());
        let flags = Flags { force_unit_access: true, ..Flags::default() };
        let write = |offset, content| Action { flags, ..write(offset, content) };
        let mut lost =
            Harness::new(&rig.disk, &HarnessOptions { queues: 1, ..Default::default() }, 1);
        let mut kept =
            Harness::new(&rig.disk, &HarnessOptions { queues: 2, ..Default::default() }, 2);
        // Each queue has its half of the disk.
        for number in 0..6 {
            lost.submit(0, &write(number * 4096, number + 1));
            kept.submit(number as usize % 2, &write((number + 8) * 4096, number + 100));
        }
        drop(lost);
        kept.drain(|_| {});
        assert_eq!(kept.statistics().succeeded, 6);
        let image = recovered(&rig.record.crash());
        let half = CAPACITY as usize / 2;
        let mut whole = rig.home.image();
        whole[half..].copy_from_slice(&image[half..]);
        whole[..half].fill(0);
        assert_eq!(kept.model().check_now(&whole), Ok(()));
    });
}

#[test]
fn a_log_of_another_disk_is_rejected() {
    let store = SimOptions { rounds_max: 0, ..SimOptions::new(LOG_CAPACITY) };
    let volume = volume(&store, 1);
    Wal::open(&volume, &options()).unwrap();
    let home = SimOptions { rounds_max: 0, ..SimOptions::new(CAPACITY) };
    let home: Arc<dyn Backend> = Arc::new(SimBackend::new(home, 2));
    let refusal = |change: fn(&mut WalOptions)| {
        let mut options = options();
        change(&mut options);
        match Wal::open(&volume, &options) {
            Ok(_) => String::new(),
            Err(error) => format!("{:#}", error.failure("disk")),
        }
    };
    let other = refusal(|options| options.name = "another".into());
    assert!(other.contains("belongs to the disk \"disk\"") && other.contains(';'), "{other}");
    // An empty log stays with the disk when its image changes.
    assert_eq!(refusal(|options| options.home = "copy".into()), "");
    assert_eq!(refusal(|_| ()), "");
    let wal = Wal::open(&volume, &options()).unwrap();
    let layers = vec![Arc::new(wal) as _];
    let disk = Disk::new(DiskOptions::default(), layers, home).unwrap();
    let mut harness = Harness::new(&disk, &HarnessOptions::default(), 1);
    let mut workload = workload(1);
    harness.run(&mut workload, 5, |_| {});
    harness.rest(|_| {});
    let meets = refusal(|_| ());
    assert!(meets.contains("another disk's log"), "{meets}");
    // Changes in the log beyond the new end would reappear after a growth.
    assert_eq!(disk.resize(CAPACITY / 2), Err(ErrorKind::Unsupported));
    assert_eq!(disk.capacity(), CAPACITY);
    harness.submit(0, &workload.find(|action| action.operation == Operation::Write).unwrap());
    harness.drain(|_| {});
    drop((harness, disk));
    assert!(refusal(|options| options.home = "copy".into()).contains("for \"image\""));
    let small = refusal(|options| options.size = 8192);
    assert!(small.contains("make the place as large as it was"), "{small}");
    assert!(refusal(|options| options.offset = 512).contains("4 KiB"));
    assert!(refusal(|options| options.size = 1 << 30).contains("correct `offset` and `size`"));
    assert!(refusal(|options| options.expected = Some(Identity([1; 16]))).contains("not the log"));
    assert!(matches!(
        Wal::open(&volume, &WalOptions { name: "a".repeat(200), ..options() }),
        Err(WalError::Name(_))
    ));
}

/// Disks find their logs among the places of a volume, and each log has its own.
#[test]
fn a_disk_finds_its_log_among_several() {
    let places = LogPlaces { offset: 4096, length: 128 << 10, count: 3 };
    let store = SimOptions { rounds_max: 0, ..SimOptions::new(4096 + (3 * 128 << 10)) };
    let volume = volume(&store, 1);
    let of = |name: &str, identity: u8, expected: Option<u8>| {
        let options = WalOptions {
            name: name.into(),
            identity: Identity([identity; 16]),
            expected: expected.map(|expected| Identity([expected; 16])),
            ..options()
        };
        Wal::open_among(&volume, &places, &options)
    };
    let one = of("a", 1, None).unwrap();
    let two = of("b", 2, None).unwrap();
    let three = of("c\u{1b}", 3, None).unwrap();
    assert_eq!(
        [&one, &two, &three].map(Wal::identity),
        [1, 2, 3].map(|number| Identity([number; 16]))
    );
    let Err(error) = of("d", 4, None) else { panic!("there is no fourth place") };
    let error = error.to_string();
    assert!(error.contains("all its 3 places") && error.contains("\"c\\u{1b}\""), "{error}");
    drop((one, two, three));
    // Whatever identities the disks propose, they get their logs again.
    assert_eq!(of("b", 9, None).unwrap().identity(), Identity([2; 16]));
    assert_eq!(of("a", 9, Some(1)).unwrap().identity(), Identity([1; 16]));
    assert!(matches!(of("a", 9, Some(7)), Err(WalError::NotExpected)));
    // A log that is expected is not taken for that of another disk.
    assert!(matches!(of("a", 9, Some(2)), Err(WalError::OtherDisk(_))));

    // A log with changes is not erased, and stays with its disk.
    let wal = of("b", 9, Some(2)).unwrap();
    let home = Arc::new(SimBackend::new(SimOptions::new(CAPACITY), 2));
    let layers = vec![Arc::new(wal.clone()) as _];
    let disk = Disk::new(DiskOptions::default(), layers, home).unwrap();
    let mut harness = Harness::new(&disk, &HarnessOptions::default(), 1);
    harness.submit(0, &write(0, 1));
    harness.drain(|_| {});
    assert!(wal.erase().is_err());
    harness.rest(|_| {});
    drop(harness);
    wal.drain(&disk, Duration::from_secs(20)).unwrap();
    // An empty one is. While it is open, its place is not given to another disk.
    wal.erase().unwrap();
    assert!(of("d", 4, None).is_err());
    drop((wal, disk));
    assert_eq!(of("d", 4, None).unwrap().identity(), Identity([4; 16]));
    assert!(of("b", 2, None).is_err());
}
