use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use fathom_reactor::Reactor;

use super::*;
use crate::waker::Alarm;

/// The idle time after which the threads of these tests end.
const IDLE_TIME: Duration = Duration::from_millis(50);
const PATIENCE: Duration = Duration::from_secs(20);

/// A queue with several parts.
struct Queue {
    alarm: Alarm,
    _reactor: Reactor,
    computing: Arc<AtomicUsize>,
    pool: Arc<Pool>,
}

impl Queue {
    fn new(threads_max: usize) -> Self {
        let mut reactor = Reactor::new(8).unwrap();
        let alarm = Alarm::open(&mut reactor).unwrap();
        Self {
            alarm,
            _reactor: reactor,
            computing: Arc::default(),
            pool: Pool::new(threads_max, IDLE_TIME),
        }
    }

    fn work(&self, urgency: Urgency) -> Work<u64> {
        let mut work = Work::new(urgency, self.alarm.waker(0), &self.computing, false);
        work.pool = Some(Arc::clone(&self.pool));
        work
    }
}

/// Blocks the pool's only thread until the returned sender is used or dropped.
fn hold(work: &mut Work<u64>) -> Sender<()> {
    let (sender, receiver): (_, Receiver<()>) = channel();
    assert!(work.begin(0, move || u64::from(receiver.recv().is_err())));
    sender
}

fn answers(work: &mut Work<u64>, count: usize) -> Vec<(u64, Option<u64>)> {
    let begun = Instant::now();
    let mut answers = Vec::new();
    while answers.len() < count {
        match work.answer() {
            Some(answer) => answers.push(answer),
            None => std::thread::sleep(Duration::from_millis(1)),
        }
        assert!(begun.elapsed() < PATIENCE, "{} of {count} answers", answers.len());
    }
    answers
}

#[test]
fn each_computation_is_answered_once() {
    let queue = Queue::new(3);
    let mut work = queue.work(Urgency::Request);
    let here = std::thread::current().id();
    for token in 0..IN_FLIGHT_MAX as u64 {
        assert!(work.begin(token, move || {
            assert_ne!(std::thread::current().id(), here);
            token * token
        }));
    }
    assert!(!work.begin(0, || 0), "the limit");
    assert_eq!(queue.computing.load(Ordering::Relaxed), IN_FLIGHT_MAX);
    let mut found = answers(&mut work, IN_FLIGHT_MAX);
    found.sort_unstable();
    assert!(found.iter().enumerate().all(|(index, answer)| {
        let token = index as u64;
        *answer == (token, Some(token * token))
    }));
    assert_eq!((work.in_flight(), work.answer()), (0, None));
    assert_eq!(queue.computing.load(Ordering::Relaxed), 0);
    assert!(queue.pool.state().threads <= 3);
}

#[test]
fn parts_are_served_in_rotation_and_requests_first() {
    let queue = Queue::new(1);
    let mut holder = queue.work(Urgency::Request);
    let go = hold(&mut holder);
    let order = Arc::new(Mutex::new(Vec::new()));
    let note = |name: &'static str| {
        let order = Arc::clone(&order);
        move || {
            order.lock().push(name);
            0
        }
    };
    let mut parts = [
        ("background", queue.work(Urgency::Background)),
        ("many", queue.work(Urgency::Request)),
        ("few", queue.work(Urgency::Request)),
    ];
    for (name, part) in &mut parts {
        for token in 0..if *name == "few" { 2 } else { 20 } {
            assert!(part.begin(token, note(name)));
        }
    }
    go.send(()).unwrap();
    for (name, part) in &mut parts {
        answers(part, if *name == "few" { 2 } else { 20 });
    }
    let order = order.lock();
    let last_of_few = order.iter().rposition(|name| *name == "few").unwrap();
    assert!(last_of_few < 6, "{order:?}");
    let begins = order.iter().position(|name| *name == "background").unwrap();
    let requests_end = order.iter().rposition(|name| *name == "many").unwrap();
    assert!(begins < requests_end, "background work makes progress while requests wait: {order:?}");
    let early = order[..requests_end].iter().filter(|name| **name == "background").count();
    assert!(early <= 22 / (BACKGROUND_SHARE as usize - 1), "{order:?}");
}

#[test]
fn a_computation_that_panics_is_answered_and_harms_no_other() {
    let queue = Queue::new(1);
    let mut work = queue.work(Urgency::Request);
    for token in 0..10 {
        assert!(work.begin(token, move || {
            assert!(token % 2 == 0, "the panic of this test");
            token
        }));
    }
    let found = answers(&mut work, 10);
    let expected = (0..10).map(|token| (token, (token % 2 == 0).then_some(token)));
    assert_eq!(found, expected.collect::<Vec<_>>());
}

#[test]
fn computations_that_have_not_started_when_their_part_is_dropped_never_start() {
    let queue = Queue::new(1);
    let mut holder = queue.work(Urgency::Request);
    let go = hold(&mut holder);
    let ran = Arc::new(AtomicUsize::new(0));
    let mut dropped = queue.work(Urgency::Request);
    for token in 0..10 {
        let ran = Arc::clone(&ran);
        assert!(dropped.begin(token, move || ran.fetch_add(1, Ordering::Relaxed) as u64));
    }
    assert_eq!(queue.computing.load(Ordering::Relaxed), 11);
    drop(dropped);
    assert_eq!(queue.computing.load(Ordering::Relaxed), 1);
    assert_eq!(Arc::strong_count(&ran), 1, "their contents are dropped");
    let mut after = queue.work(Urgency::Background);
    assert!(after.begin(7, || 8));
    drop(go);
    assert_eq!(answers(&mut holder, 1), [(0, Some(1))]);
    assert_eq!(answers(&mut after, 1), [(7, Some(8))]);
    assert_eq!(ran.load(Ordering::Relaxed), 0);
}

#[test]
fn threads_end_after_their_idle_time() {
    let queue = Queue::new(2);
    let mut work = queue.work(Urgency::Request);
    for _ in 0..2 {
        assert!(work.begin(1, || 1));
        answers(&mut work, 1);
        let begun = Instant::now();
        while queue.pool.state().threads > 0 {
            assert!(begun.elapsed() < PATIENCE);
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
