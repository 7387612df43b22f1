//! Moves of a disk under load: the target becomes equal to the store, whatever fails and whenever
//! it does, and guests notice nothing.

use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use fathom_block::{
    Attendance, Backend, CHANGE_TIME_MAX, Clock, Disk, DiskOptions, Layer, RestackError, Stack,
};
use fathom_layers::{
    BRAKE_MAX_NS, MoveCopier, MoveFailure, MoveOptions, MovePart, MoveStage, MoveState, MoveWatch,
};
use fathom_reactor::{Event, Reactor};
use fathom_sim::{
    Harness, HarnessOptions, SimBackend, SimOptions, Workload, WorkloadOptions, each_seed,
};

const CAPACITY: u64 = 512 << 10;

/// A copier in simulated time.
struct Copier {
    state: Arc<MoveState>,
    reactor: Reactor,
    stack: Stack,
    events: Vec<Event>,
    time_ns: Rc<Cell<u64>>,
}

fn disk(layers: Vec<Arc<dyn Layer>>, home: &Arc<SimBackend>) -> Arc<Disk> {
    Disk::new(DiskOptions::default(), layers, Arc::clone(home) as _).unwrap()
}

impl Copier {
    fn open(state: &Arc<MoveState>, source: &Arc<SimBackend>, target: &Arc<SimBackend>) -> Self {
        let copier = MoveCopier::new(Arc::clone(state), Arc::clone(target) as _);
        let disk = disk(vec![Arc::new(copier)], source);
        let time_ns = Rc::new(Cell::new(1));
        let mut reactor = Reactor::new(16).unwrap();
        let clock = Clock::Simulated(Rc::clone(&time_ns));
        let stack = disk.open_queue(&mut reactor, clock).unwrap();
        Self { state: Arc::clone(state), reactor, stack, events: Vec::new(), time_ns }
    }

    /// One round. Time passes if the copier waits for it.
    fn step(&mut self) {
        self.stack.advance(&mut self.reactor);
        self.reactor.wait(Some(Duration::ZERO)).unwrap();
        self.reactor.collect(&mut self.events).unwrap();
        for event in self.events.drain(..) {
            self.stack.event(&event, &mut self.reactor);
        }
        if self.stack.in_flight_of_layers() == 0 {
            if let Some(deadline_ns) = self.stack.deadline_ns() {
                self.time_ns.set(self.time_ns.get().max(deadline_ns));
            }
        }
    }

    /// Makes rounds until the stage is none of `while_in`.
    fn run(&mut self, while_in: &[MoveStage]) -> MoveStage {
        for _ in 0..1_000_000 {
            let stage = self.state.stage();
            if !while_in.contains(&stage) {
                return stage;
            }
            self.step();
        }
        panic!("the copier does not get further: {:?}", self.state.progress());
    }
}

/// A run: what fails, and whether the disk has the watch.
#[derive(Clone, Copy, Default)]
struct Faults {
    target_fails: bool,
    source_fails: bool,
    is_unwatched: bool,
}

/// Moves a disk under load, by seed. Returns whether the copy is equal; `None` if it has failed.
fn run(seed: u64, faults: Faults) -> Option<bool> {
    let mut random = fastrand::Rng::with_seed(seed);
    let plain = SimOptions { rounds_max: random.u32(0..6), ..SimOptions::new(CAPACITY) };
    let source = SimOptions {
        read_error_rate: if faults.source_fails { 0.02 } else { 0.0 },
        write_error_rate: if faults.source_fails { 0.02 } else { 0.0 },
        ..plain.clone()
    };
    let mut target = plain;
    if faults.target_fails {
        match random.u32(0..3) {
            0 => target.write_error_rate = 0.01,
            1 => target.flush_error_rate = 0.5,
            _ => target.room = CAPACITY / 3,
        }
    }
    let source = Arc::new(SimBackend::new(source, seed));
    let is_blank = random.bool();
    let content = vec![if is_blank { 0 } else { 0xee }; CAPACITY as usize];
    let room = target.room;
    let content = if room < CAPACITY { vec![0; CAPACITY as usize] } else { content };
    let target = Arc::new(SimBackend::with_image(target, seed + 1, content));
    let speed = random.bool().then_some(1 << 20);
    let options = MoveOptions { speed, urgent: random.bool(), is_blank };
    let state = MoveState::new(CAPACITY, options);
    let mut layers: Vec<Arc<dyn Layer>> = Vec::new();
    if !faults.is_unwatched {
        layers.push(Arc::new(MoveWatch::new(Arc::clone(&state))));
    }
    let disk = disk(layers, &source);
    let mut harness = Harness::new(&disk, &HarnessOptions::default(), seed);
    if faults.source_fails {
        harness.allow_errors();
    }
    let mut workload = Workload::new(WorkloadOptions::new(CAPACITY), seed);
    harness.run(&mut workload, random.usize(0..300), |_| {});
    let mut copier = Copier::open(&state, &source, &target);
    loop {
        harness.run(&mut workload, random.usize(1..20), |_| {});
        for _ in 0..random.u32(1..60) {
            copier.step();
        }
        match state.stage() {
            MoveStage::Copying => {}
            MoveStage::Level if random.bool() => {}
            MoveStage::Level => {
                harness.drain(|_| {});
                state.begin_finish();
                if copier.run(&[MoveStage::Finishing]) != MoveStage::Equal {
                    continue;
                }
                if random.u32(0..3) == 0 {
                    // The disk did not change over after all.
                    state.resume();
                    continue;
                }
                break;
            }
            MoveStage::Failed(MoveFailure { part, .. }) => {
                let may_fail = match part {
                    MovePart::Source => faults.source_fails,
                    MovePart::Target => faults.target_fails,
                };
                assert!(may_fail, "seed {seed}: {:?}", state.stage());
                // The guests go on as if nothing had happened.
                harness.run(&mut workload, 100, |_| {});
                harness.drain(|_| {});
                harness.model().check_now(&source.image()).unwrap();
                return None;
            }
            stage => panic!("seed {seed}: {stage:?}"),
        }
    }
    let is_equal = target.image() == source.image() && target.durable() == source.image();
    if is_equal {
        for crash in 0..4 {
            harness.model().check_crash(&target.crash(seed + crash)).unwrap();
        }
    }
    Some(is_equal)
}

#[test]
fn the_target_becomes_equal_and_durable_under_load() {
    each_seed(150, |seed| assert_eq!(run(seed, Faults::default()), Some(true), "seed {seed}"));
}

#[test]
fn a_side_that_fails_ends_the_move_and_not_the_disk() {
    let (mut failed, mut equal) = (0, 0);
    each_seed(150, |seed| {
        let target_fails = seed % 2 == 0;
        let faults = Faults { target_fails, source_fails: !target_fails, ..Faults::default() };
        match run(seed, faults) {
            Some(is_equal) => {
                assert!(is_equal, "seed {seed}");
                equal += 1;
            }
            None => failed += 1,
        }
    });
    assert!(failed > 0 || equal < 10, "no side has failed");
}

/// The control of these tests: they notice what the watch does.
#[test]
fn without_the_watch_a_copy_lacks_changes() {
    let faults = Faults { is_unwatched: true, ..Faults::default() };
    assert!((0..20).any(|seed| run(seed, faults) == Some(false)));
}

/// A guest that changes more than the copier may copy is slowed down, and the move comes to an end.
#[test]
fn a_guest_faster_than_the_copy_is_slowed_down() {
    let source = Arc::new(SimBackend::new(SimOptions::new(CAPACITY), 1));
    let target = Arc::new(SimBackend::new(SimOptions::new(CAPACITY), 2));
    let state = MoveState::new(CAPACITY, MoveOptions { urgent: true, is_blank: true, speed: None });
    let watched = disk(vec![Arc::new(MoveWatch::new(Arc::clone(&state)))], &source);
    let mut harness = Harness::new(&watched, &HarnessOptions::default(), 1);
    let mut workload = Workload::new(WorkloadOptions::new(CAPACITY), 1);
    let mut copier = Copier::open(&state, &source, &target);
    let mut brake_ns = 0;
    let mut rounds = 0;
    while state.stage() == MoveStage::Copying {
        // As long as it is not slowed down, the guest changes nearly everything in each pass.
        let begun_ns = harness.now_ns();
        harness.run(&mut workload, 40, |_| {});
        let steps = 20 + (harness.now_ns() - begun_ns) / 100_000;
        (0..steps).for_each(|_| copier.step());
        brake_ns = brake_ns.max(state.progress().brake_ns);
        rounds += 1;
        assert!(rounds < 10_000, "{:?}", state.progress());
    }
    assert!(brake_ns > 0 && brake_ns <= BRAKE_MAX_NS, "{brake_ns}");
    assert_eq!(state.stage(), MoveStage::Level);
    harness.drain(|_| {});
    state.begin_finish();
    assert_eq!(copier.run(&[MoveStage::Finishing]), MoveStage::Equal);
    assert_eq!(target.image(), source.image());
}

/// The real change of the back end, beside a guest that goes on.
#[test]
fn a_disk_changes_over_while_requests_go_on() {
    each_seed(6, |seed| {
        // Requests complete at once, because a thread sleeps while its stores have no events.
        let options = SimOptions { rounds_max: 0, ..SimOptions::new(CAPACITY) };
        let source = Arc::new(SimBackend::new(options.clone(), seed));
        let target = Arc::new(SimBackend::new(options, seed + 1));
        let move_options = MoveOptions { urgent: true, is_blank: true, speed: None };
        let state = MoveState::new(CAPACITY, move_options);
        let watched = disk(vec![Arc::new(MoveWatch::new(Arc::clone(&state)))], &source);
        let harness_options = HarnessOptions { simulated: false, ..HarnessOptions::default() };
        let mut harness = Harness::new(&watched, &harness_options, seed);
        let mut workload = Workload::new(WorkloadOptions::new(CAPACITY), seed);
        let copier = MoveCopier::new(Arc::clone(&state), Arc::clone(&target) as _);
        let copying = disk(vec![Arc::new(copier)], &source);
        let (attendance, ended) = (Arc::new(Attendance::default()), Arc::clone(&state));
        attendance.begin(&copying, move || ended.is_stopping(), || {}).unwrap();
        for round in 0_u64.. {
            harness.run(&mut workload, 10, |_| {});
            if round > 100 && state.stage() == MoveStage::Level {
                break;
            }
            thread::sleep(Duration::from_micros(100));
        }
        // The queues make no requests meanwhile, but those in flight complete.
        let home: Arc<dyn Backend> = Arc::clone(&target) as _;
        let (moving, next) = (Arc::clone(&watched), Arc::clone(&home));
        let refusing = thread::spawn(move || {
            moving.rehome(Vec::new(), next, CHANGE_TIME_MAX, || Err(io::Error::other("not yet")))
        });
        while !refusing.is_finished() {
            harness.step_beside(|_| {});
        }
        assert!(matches!(refusing.join().unwrap(), Err(RestackError::Commit(_))));
        assert_eq!(watched.layers().len(), 1, "the disk goes on as before");
        harness.run(&mut workload, 100, |_| {});
        let (moving, finishing) = (Arc::clone(&watched), Arc::clone(&state));
        let changing = thread::spawn(move || {
            let commit = || finishing.finish(Duration::from_secs(100));
            moving.rehome(Vec::new(), home, CHANGE_TIME_MAX, commit)
        });
        while !changing.is_finished() {
            harness.step_beside(|_| {});
        }
        changing.join().unwrap().unwrap();
        let at_change = source.image();
        assert_eq!(target.durable(), at_change);
        state.stop();
        attendance.end();
        harness.run(&mut workload, 500, |_| {});
        harness.drain(|_| {});
        assert_eq!(source.image(), at_change, "nothing changes the source any more");
        harness.model().check_now(&target.image()).unwrap();
        harness.verify(CAPACITY);
    });
}
