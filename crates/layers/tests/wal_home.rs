//! The way home of changes, with disks beneath that hang or reject operations.

#![allow(unsafe_code, reason = "a request that the kernel does not complete")]

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use fathom_block::{
    BackendContext, BackendQueue, BackgroundScheduler, BackgroundStep, Capabilities, Disk,
    DiskOptions, ErrorKind, Flags, Operation, Permission, Request, Waker,
};
use fathom_layers::wal::{Completion, LogVolume, WalOptions};
use fathom_layers::{ChangeNotes, Wal};
use fathom_persistence::Identity;
use fathom_reactor::{Event, OperationOwner};
use fathom_sim::{Action, Harness, HarnessOptions, SimBackend, SimOptions};
use fathom_wal::RING_OFFSET;
use io_uring::{opcode, types};
use parking_lot::Mutex;

#[path = "support/around.rs"]
mod around;

use around::Around;

const CAPACITY: u64 = 4 << 20;
const LOG_CAPACITY: u64 = RING_OFFSET + (256 << 10);
/// The alignment of ranges of zeroes that a home may require.
const ZEROES_ALIGNMENT: u64 = 4096;

/// The faults of a home.
#[derive(Default)]
struct Faults {
    /// Flushes do not complete.
    flushes_hang: AtomicBool,
    /// Zeroes and discards fail if they are not aligned.
    rejects_misaligned: AtomicBool,
    /// Writes complete and are lost. The next flush finds that the operator has made the store
    /// accept writes again, and succeeds.
    loses_writes: AtomicBool,
    /// What the store counts as losses and recoveries.
    losses: OnceLock<Arc<AtomicU64>>,
    /// Whether a change that was given up may take effect.
    acts_late: OnceLock<Arc<AtomicBool>>,
    /// The next flush finds that a change was given up.
    gives_up: AtomicBool,
    /// The writes, zeroes and discards so far.
    changes: Mutex<Vec<(Operation, Flags, u64)>>,
}

/// A queue of a home with faults.
struct HomeQueue {
    inner: Box<dyn BackendQueue>,
    owner: OperationOwner,
    faults: Arc<Faults>,
    /// Nothing is written to it, so that a read does not end.
    silence: Arc<(UnixStream, UnixStream)>,
    #[expect(clippy::vec_box, reason = "a request travels in its box")]
    hanging: Vec<Box<Request>>,
}

/// A store with faults.
fn home(store: &Arc<SimBackend>, faults: &Arc<Faults>, capabilities: Capabilities) -> Around {
    let (faults, silence) = (Arc::clone(faults), Arc::new(UnixStream::pair().unwrap()));
    let for_queues = Arc::clone(&faults);
    let home = Around::new(store, capabilities, move |reactor, inner| {
        Box::new(HomeQueue {
            inner,
            owner: reactor.register(),
            faults: Arc::clone(&for_queues),
            silence: Arc::clone(&silence),
            hanging: Vec::new(),
        })
    });
    faults.losses.set(home.losses_counted()).expect("one home for each set of faults");
    faults.acts_late.set(home.acts_late()).expect("one home for each set of faults");
    home
}

impl BackendQueue for HomeQueue {
    fn submit(&mut self, request: Box<Request>, context: &mut BackendContext<'_>) {
        let Request { operation, flags, offset, length, .. } = *request;
        let is_set = |fault: &AtomicBool| fault.load(Ordering::Relaxed);
        if operation.modifies() {
            self.faults.changes.lock().push((operation, flags, length));
        }
        if operation == Operation::Flush && is_set(&self.faults.flushes_hang) {
            let memory = Box::leak(Box::new([0; 8]));
            let file = types::Fd(self.silence.0.as_raw_fd());
            let read = opcode::Read::new(file, memory.as_mut_ptr(), memory.len() as u32).build();
            // SAFETY: the memory stays valid, and the descriptor open until the reactor has ended.
            unsafe { context.reactor().push(self.owner, 0, read) };
            return self.hanging.push(request);
        }
        if operation == Operation::Write && is_set(&self.faults.loses_writes) {
            return context.complete(request, Ok(()));
        }
        if operation == Operation::Flush && self.faults.loses_writes.swap(false, Ordering::Relaxed)
        {
            self.faults.losses.get().unwrap().fetch_add(2, Ordering::Relaxed);
        }
        if operation == Operation::Flush && self.faults.gives_up.swap(false, Ordering::Relaxed) {
            self.faults.acts_late.get().unwrap().store(true, Ordering::Relaxed);
        }
        let zeroes = matches!(operation, Operation::WriteZeroes | Operation::Discard);
        let is_aligned = (offset | length) % ZEROES_ALIGNMENT == 0;
        if zeroes && !is_aligned && is_set(&self.faults.rejects_misaligned) {
            return context.complete(request, Err(ErrorKind::Io));
        }
        self.inner.submit(request, context);
    }

    fn event(&mut self, event: &Event, context: &mut BackendContext<'_>) {
        self.inner.event(event, context);
    }

    fn advance(&mut self, context: &mut BackendContext<'_>) {
        self.inner.advance(context);
    }
}

/// A disk with a log that is written back only when it is drained.
struct Rig {
    store: Arc<SimBackend>,
    faults: Arc<Faults>,
    wal: Wal,
    disk: Arc<Disk>,
}

impl Rig {
    fn new(capabilities: Capabilities) -> Self {
        let log = SimBackend::new(SimOptions::new(LOG_CAPACITY), 1);
        let volume = Arc::new(LogVolume::new(Arc::new(log)));
        let options = WalOptions {
            name: "disk".into(),
            home: "image".into(),
            home_capacity: CAPACITY,
            home_alignment: 1,
            offset: 0,
            size: 0,
            block_size: 512,
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
        let store = Arc::new(SimBackend::new(SimOptions::new(CAPACITY), 2));
        let faults = Arc::default();
        let home = Arc::new(home(&store, &faults, capabilities));
        let layers = vec![Arc::new(wal.clone()) as _];
        let disk = Disk::new(DiskOptions::default(), layers, home).unwrap();
        Self { store, faults, wal, disk }
    }

    fn harness(&self) -> Harness {
        Harness::new(&self.disk, &HarnessOptions { queues: 1, depth: 8, simulated: true }, 1)
    }

    fn drain(&self) {
        self.wal.drain(&self.disk, Duration::from_secs(10)).unwrap();
        assert_eq!(self.wal.status().used, 0);
    }
}

fn change(operation: Operation, offset: u64, length: u64) -> Action {
    Action { operation, offset, length, flags: Flags::default(), content: offset + 1 }
}

/// A queue that ends while the kernel has its flush of home leaves its round to another one.
#[test]
fn a_flush_that_hangs_does_not_stop_write_back_for_good() {
    let rig = Rig::new(Capabilities::ALL);
    let mut harness = rig.harness();
    harness.submit(0, &change(Operation::Write, 0, 4096));
    harness.drain(|_| {});
    rig.faults.flushes_hang.store(true, Ordering::Relaxed);
    let drained = rig.wal.drain(&rig.disk, Duration::from_millis(200));
    assert_eq!(drained.map_err(|error| error.kind()), Err(io::ErrorKind::TimedOut));
    assert!(!rig.faults.changes.lock().is_empty(), "the round had begun");
    rig.faults.flushes_hang.store(false, Ordering::Relaxed);
    rig.drain();
    assert_eq!(harness.model().check_now(&rig.store.image()), Ok(()));
}

/// Home loses the copies of a round, and the operator recovers the disk before the round's flush,
/// which then succeeds.
#[test]
fn a_round_that_outlives_a_recovery_is_written_again() {
    let rig = Rig::new(Capabilities::ALL);
    let mut harness = rig.harness();
    for offset in [0, 1 << 20] {
        harness.submit(0, &change(Operation::Write, offset, 16 << 10));
    }
    harness.drain(|_| {});
    rig.faults.loses_writes.store(true, Ordering::Relaxed);
    let drained = rig.wal.drain(&rig.disk, Duration::from_secs(10));
    assert!(drained.is_err(), "the copies are lost");
    assert!(rig.wal.status().used > 0);
    assert_eq!(rig.wal.status().home_failed, Some(ErrorKind::Io));
    // The next round needs no request: it begins after a while.
    rig.drain();
    assert_eq!(rig.wal.status().home_failed, None);
    assert_eq!(harness.model().check_now(&rig.store.image()), Ok(()));
}

/// A change that home has given up may replace what a round writes, until it is certain that it
/// takes no effect any more.
#[test]
fn a_log_keeps_its_changes_while_home_may_act_late() {
    let rig = Rig::new(Capabilities::ALL);
    let acts_late = Arc::clone(rig.faults.acts_late.get().unwrap());
    let mut harness = rig.harness();
    harness.submit(0, &change(Operation::Write, 0, 16 << 10));
    harness.drain(|_| {});
    acts_late.store(true, Ordering::Relaxed);
    let drained = rig.wal.drain(&rig.disk, Duration::from_millis(200));
    assert_eq!(drained.map_err(|error| error.kind()), Err(io::ErrorKind::TimedOut));
    assert!(rig.faults.changes.lock().is_empty(), "no round begins");
    acts_late.store(false, Ordering::Relaxed);
    // Home gives a change up while a round is flushed.
    rig.faults.gives_up.store(true, Ordering::Relaxed);
    assert!(rig.wal.drain(&rig.disk, Duration::from_secs(10)).is_err());
    assert!(rig.wal.status().used > 0);
    acts_late.store(false, Ordering::Relaxed);
    rig.drain();
    assert_eq!(harness.model().check_now(&rig.store.image()), Ok(()));
}

/// A round that fails begins again soon, however old changes may become.
#[test]
fn a_failed_round_begins_again_after_a_second() {
    const AGE_NS: u64 = 3_600_000_000_000;
    let rig = Rig::new(Capabilities::ALL);
    rig.wal.set_age(AGE_NS);
    let mut harness = rig.harness();
    harness.submit(0, &change(Operation::Write, 0, 16 << 10));
    harness.drain(|_| {});
    let begun_ns = harness.now_ns();
    rig.faults.loses_writes.store(true, Ordering::Relaxed);
    while rig.wal.status().rounds == 0 {
        harness.step();
        assert!(
            harness.now_ns() < begun_ns + AGE_NS + 60_000_000_000,
            "the round does not begin again"
        );
    }
    assert_eq!(harness.model().check_now(&rig.store.image()), Ok(()));
}

/// Zeroes that home cannot fill a range with are written as data.
#[test]
fn zeroes_that_home_refuses_are_written() {
    let rig = Rig::new(Capabilities::ALL);
    let mut harness = rig.harness();
    for offset in [0, 1 << 20, 2 << 20, (3 << 20) - 4096] {
        harness.submit(0, &change(Operation::Write, offset, 16 << 10));
    }
    harness.drain(|_| {});
    rig.drain();
    rig.faults.rejects_misaligned.store(true, Ordering::Relaxed);
    for (operation, offset, length) in [
        (Operation::WriteZeroes, 512, 4096),
        (Operation::WriteZeroes, 8192, 4096),
        // More than a copy.
        (Operation::Discard, (1 << 20) + 1024, 2 << 20),
    ] {
        harness.submit(0, &change(operation, offset, length));
    }
    harness.drain(|_| {});
    rig.faults.changes.lock().clear();
    rig.drain();
    assert_eq!(harness.model().check_now(&rig.store.image()), Ok(()));
    harness.verify(CAPACITY);
    let changes = rig.faults.changes.lock();
    let written = changes.iter().filter(|(operation, ..)| *operation == Operation::Write);
    let written: Vec<_> = written.map(|(_, _, length)| *length).collect();
    assert_eq!(written.iter().sum::<u64>(), 4096 + (2 << 20), "{changes:?}");
    assert!(written.iter().all(|length| *length <= 1 << 20), "{changes:?}");
}

/// A scheduler that lets each step begin, and notes of changes that are not durable at first.
#[derive(Default)]
struct Steps {
    begun: AtomicU64,
    ended: AtomicU64,
    are_durable: AtomicBool,
}

impl BackgroundScheduler for Steps {
    fn open(&self, _: &str, _: &'static str, _: Waker) -> u64 {
        1
    }

    fn ask(&self, _: u64, _: BackgroundStep, _: u64) -> Permission {
        self.begun.fetch_add(1, Ordering::Relaxed);
        Permission::Begin
    }

    fn end(&self, _: u64, _: u64) {
        self.ended.fetch_add(1, Ordering::Relaxed);
    }

    fn rest(&self, _: u64) {}

    fn close(&self, _: u64) {}
}

impl ChangeNotes for Steps {
    fn number(&self) -> u64 {
        1
    }

    fn are_durable(&self, _: u64, _: &Waker) -> bool {
        self.are_durable.load(Ordering::Relaxed)
    }
}

/// The step that was allowed ends, even if the log has filled since and the round no longer needs
/// permission.
#[test]
fn an_allowed_step_ends_if_the_log_fills_before_it_begins() {
    let rig = Rig::new(Capabilities::ALL);
    let steps = Arc::new(Steps::default());
    rig.disk.schedule_background(Arc::clone(&steps) as _);
    rig.wal.set_notes(Arc::clone(&steps) as _);
    let mut harness = rig.harness();
    harness.submit(0, &change(Operation::Write, 0, 4096));
    harness.drain(|_| {});
    rig.wal.set_age(1_000_000);
    harness.submit(0, &change(Operation::Write, 8192, 4096));
    let counts = || [&steps.begun, &steps.ended].map(|count| count.load(Ordering::Relaxed));
    let mut rounds = 0;
    while counts()[0] == counts()[1] {
        harness.step();
        rounds += 1;
        assert!(rounds < 1000, "a round begins in idle time");
    }
    // More than half of the log.
    for number in 1..4 {
        harness.submit(0, &change(Operation::Write, number << 16, 48 << 10));
    }
    harness.drain(|_| {});
    steps.are_durable.store(true, Ordering::Relaxed);
    // The queue asks again whether the notes are durable.
    harness.submit(0, &change(Operation::Write, 1 << 20, 4096));
    harness.drain(|_| {});
    for _ in 0..1000 {
        harness.step();
    }
    harness.rest(|_| {});
    rig.drain();
    let [begun, ended] = counts();
    assert!(begun > 0 && begun == ended, "{begun} steps have begun, and {ended} have ended");
}
