//! Schedulers whose devices overlap, with the clock of the test.

use std::io;

use fathom_backend::Null;
use fathom_block::{Capabilities, Disk, DiskOptions, Layer, LayerPart, OpenContext};
use fathom_reactor::Reactor;

use super::activity::ActivityQueue;
use super::probe::ProbeQueue;
use super::*;

const MS: u64 = 1_000_000;

/// A placement on modelled devices.
fn placement(names: &[&str]) -> Placement {
    let medium = |name: &&str| Medium::new(MediumKind::Model, *name);
    Placement { media: names.iter().map(medium).collect(), ..Placement::default() }
}

fn step(deadline_ns: u64) -> BackgroundStep {
    BackgroundStep { bytes: 4096, waiting_bytes: 4096, waiting_steps: 1, deadline_ns, pause: 0 }
}

/// A layer that only gives away a waker.
#[derive(Clone, Default)]
struct Probe(Arc<Mutex<Option<Waker>>>);

impl Layer for Probe {
    fn name(&self) -> &'static str {
        "probe"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn open_queue(&self, context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        *self.0.lock() = Some(context.waker()?);
        let device = BackgroundWork::default().of(&placement(&["probe"]), true).unwrap();
        Activity::new(device, "probe").open_queue(context)
    }
}

/// A waker whose queue is closed.
fn waker() -> Waker {
    let probe = Probe::default();
    let layers: Vec<Arc<dyn Layer>> = vec![Arc::new(probe.clone())];
    let disk = Disk::new(DiskOptions::default(), layers, Arc::new(Null::new(1 << 20))).unwrap();
    let mut reactor = Reactor::new(8).unwrap();
    drop(disk.open_queue(&mut reactor, Clock::System).unwrap());
    probe.0.lock().take().unwrap()
}

/// A scheduler with one part.
fn with_part(work: &BackgroundWork, names: &[&str]) -> (Arc<Scheduled>, u64) {
    let device = work.of(&placement(names), true).unwrap();
    let part = device.open("disk", "wal", waker());
    (device, part)
}

#[test]
fn disks_are_observed_if_they_share_a_device_with_work() {
    let work = BackgroundWork::default();
    assert!(work.of(&placement(&["a"]), false).is_none());
    let begun = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&begun);
    work.on_begin(move || {
        counter.fetch_add(1, Ordering::Relaxed);
    });
    let both = work.of(&placement(&["a", "b"]), true).unwrap();
    assert_eq!((begun.load(Ordering::Relaxed), work.beginnings()), (1, 1));
    let first = work.of(&placement(&["a"]), false).unwrap();
    assert!(work.of(&placement(&["c"]), false).is_none());
    // A disk that shares no device with work is not observed, although a neighbour is.
    assert!(work.of(&placement(&["b"]), false).is_some());
    assert_eq!(begun.load(Ordering::Relaxed), 1, "the second disk with work is no beginning");
    assert_eq!(work.list().devices.len(), 1, "only devices with work are listed");
    assert_eq!(work.idle_time(&Medium::new(MediumKind::Model, "a")).unwrap().devices, ["a"]);
    drop(both);
    drop(first);
    assert!(work.is_empty());
}

#[test]
fn overlapping_schedulers_see_each_others_requests() {
    let work = BackgroundWork::default();
    let first = work.of(&placement(&["a"]), true).unwrap();
    let probe = ProbeQueue::new(first.probes().open("a"));
    let mut queue = ActivityQueue::new(Arc::clone(&first), probe);
    queue.in_flight = 2;
    queue.report(|device| device.begin(2, 5 * MS));
    // A scheduler that is made while requests are in flight.
    let both = work.of(&placement(&["a", "b"]), true).unwrap();
    let other = work.of(&placement(&["b"]), true).unwrap();
    queue.refresh(6 * MS);
    let in_flight = |device: &Scheduled| device.in_flight.load(Ordering::Relaxed);
    assert_eq!([&first, &both, &other].map(|device| in_flight(device)), [2, 2, 0]);
    assert!(!both.idle_time(7 * MS).is_idle && other.idle_time(7 * MS).is_idle);
    queue.refresh(7 * MS);
    drop(queue);
    assert_eq!([&first, &both, &other].map(|device| in_flight(device)), [0, 0, 0]);
    assert!(both.idle_time(9 * MS).is_idle);
}

#[test]
fn steps_of_overlapping_schedulers_exclude_each_other_and_take_turns() {
    let work = BackgroundWork::default();
    let (first, of_first) = with_part(&work, &["a"]);
    let (both, of_both) = with_part(&work, &["a", "b"]);
    let (other, of_other) = with_part(&work, &["c"]);
    let now_ns = Clock::System.now_ns() + 1000 * MS;
    let far_ns = now_ns + 3_600_000 * MS;
    assert_eq!(first.ask(of_first, step(far_ns), now_ns), Permission::Begin);
    // Another device has a step of its own.
    assert_eq!(other.ask(of_other, step(far_ns), now_ns), Permission::Begin);
    let Permission::Wait(again_ns) = both.ask(of_both, step(far_ns), now_ns + MS) else {
        panic!("a step is in flight at one of its devices");
    };
    assert!(again_ns > now_ns + MS);
    first.end(of_first, now_ns + 10 * MS);
    // The one that has waited is first.
    assert!(matches!(first.ask(of_first, step(far_ns), now_ns + 11 * MS), Permission::Wait(_)));
    assert_eq!(both.ask(of_both, step(far_ns), now_ns + 11 * MS), Permission::Begin);
    // A deadline does not wait.
    let soon_ns = now_ns + 12 * MS;
    assert_eq!(first.ask(of_first, step(soon_ns), now_ns + 12 * MS), Permission::Begin);
    assert_eq!(first.status(soon_ns).forced_steps, 1);
}
