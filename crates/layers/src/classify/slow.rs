//! The slowest requests of late, and what is known of them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use fathom_block::{Course, ErrorKind, Insight, Operation, Outcome, Request};

/// How long a request is remembered, at least; and at most twice that, in nanoseconds.
const WINDOW_NS: u64 = 60_000_000_000;
/// The parts of a request that are kept.
const PARTS_MAX: usize = 16;

/// A request that was slow.
#[derive(Clone, Debug, Default)]
pub struct SlowRequest {
    /// Its number.
    pub id: u64,
    /// The queue that it came through.
    pub queue: u64,
    /// What was asked.
    pub operation: Operation,
    /// Where its range begins, in bytes.
    pub offset: u64,
    /// How long its range is, in bytes.
    pub length: u64,
    /// When it came, in nanoseconds of the stack's clock.
    pub start_ns: u64,
    /// How long it took, in nanoseconds.
    pub latency_ns: u64,
    /// How it went.
    pub course: Course,
    /// Why it failed, if it did.
    pub error: Option<ErrorKind>,
    /// What it meant; of its parts, the first 16.
    pub insight: Insight,
    /// How many parts were left out.
    pub parts_left_out: usize,
}

impl SlowRequest {
    fn fill(
        &mut self,
        request: &Request,
        queue: u64,
        outcome: Outcome,
        start_ns: u64,
        took_ns: u64,
    ) {
        self.id = request.id;
        self.queue = queue;
        self.operation = request.operation;
        self.offset = request.offset;
        self.length = request.length;
        self.start_ns = start_ns;
        self.latency_ns = took_ns;
        self.course = request.course;
        self.error = outcome.err();
        let (mine, theirs) = (&mut self.insight, &request.insight);
        mine.facts = theirs.facts;
        mine.class = theirs.class;
        mine.io_priority = theirs.io_priority;
        mine.flags = theirs.flags;
        mine.parts.clear();
        mine.parts.extend(theirs.parts.iter().take(PARTS_MAX).copied());
        self.parts_left_out = theirs.parts.len() - mine.parts.len();
    }
}

/// The slowest of two windows of time: the one that runs, and the one before.
#[derive(Debug, Default)]
struct Lists {
    now: Vec<SlowRequest>,
    before: Vec<SlowRequest>,
}

/// The slowest requests of a disk.
#[derive(Debug)]
pub(super) struct Slow {
    count_max: usize,
    /// Requests that took no longer than this are not among the slowest.
    floor_ns: AtomicU64,
    /// When the window ends.
    end_ns: AtomicU64,
    lists: Mutex<Lists>,
}

impl Slow {
    pub(super) fn new(count_max: usize) -> Self {
        Self {
            count_max: count_max.max(1),
            floor_ns: AtomicU64::new(0),
            end_ns: AtomicU64::new(0),
            lists: Mutex::default(),
        }
    }

    /// Looks whether a request that is done at `now_ns` is among the slowest. Two loads, mostly.
    #[inline]
    pub(super) fn offer(
        &self,
        request: &Request,
        queue: u64,
        outcome: Outcome,
        start_ns: u64,
        now_ns: u64,
    ) {
        let took_ns = now_ns.saturating_sub(start_ns);
        let over = now_ns >= self.end_ns.load(Ordering::Relaxed);
        if over || took_ns > self.floor_ns.load(Ordering::Relaxed) {
            self.keep(request, queue, outcome, start_ns, took_ns);
        }
    }

    #[cold]
    fn keep(&self, request: &Request, queue: u64, outcome: Outcome, start_ns: u64, took_ns: u64) {
        // While somebody reads or another queue writes, this one goes untold: nobody waits.
        let Ok(mut lists) = self.lists.try_lock() else { return };
        let now_ns = start_ns + took_ns;
        if now_ns >= self.end_ns.load(Ordering::Relaxed) {
            let lists = &mut *lists;
            std::mem::swap(&mut lists.now, &mut lists.before);
            lists.now.clear();
            self.floor_ns.store(0, Ordering::Relaxed);
            self.end_ns.store(now_ns + WINDOW_NS, Ordering::Relaxed);
        }
        let list = &mut lists.now;
        if list.len() < self.count_max {
            list.push(SlowRequest::default());
            if let Some(last) = list.last_mut() {
                last.fill(request, queue, outcome, start_ns, took_ns);
            }
        } else if let Some(least) = list.iter_mut().min_by_key(|slow| slow.latency_ns) {
            if least.latency_ns < took_ns {
                least.fill(request, queue, outcome, start_ns, took_ns);
            }
        }
        if list.len() == self.count_max {
            let least = list.iter().map(|slow| slow.latency_ns).min().unwrap_or(0);
            self.floor_ns.store(least, Ordering::Relaxed);
        }
    }

    /// The slowest of the last minute or two at `now_ns`, the slowest first.
    pub(super) fn list(&self, now_ns: u64, count: usize) -> Vec<SlowRequest> {
        let lists = self.lists.lock().unwrap_or_else(PoisonError::into_inner);
        let recent = |slow: &&SlowRequest| slow.start_ns + slow.latency_ns + 2 * WINDOW_NS > now_ns;
        let all = lists.now.iter().chain(&lists.before);
        let mut list: Vec<SlowRequest> = all.filter(recent).cloned().collect();
        drop(lists);
        list.sort_by_key(|slow| std::cmp::Reverse(slow.latency_ns));
        list.truncate(count);
        list
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_of_late_are_kept() {
        let slow = Slow::new(3);
        let mut request = Request::default();
        for (id, took_ns) in [5, 1, 9, 7, 3, 8].into_iter().enumerate() {
            request.id = id as u64;
            slow.offer(&request, 0, Ok(()), 10, 10 + took_ns);
        }
        let latencies = |now_ns| -> Vec<u64> {
            slow.list(now_ns, 10).iter().map(|slow| slow.latency_ns).collect()
        };
        assert_eq!(latencies(20), [9, 8, 7]);
        // The next window begins with room for all.
        slow.offer(&request, 0, Err(ErrorKind::Io), WINDOW_NS, WINDOW_NS + 50);
        assert_eq!(latencies(WINDOW_NS + 60), [50, 9, 8, 7]);
        assert_eq!(slow.list(WINDOW_NS + 60, 1)[0].error, Some(ErrorKind::Io));
        assert_eq!(latencies(2 * WINDOW_NS + 60), [50]);
    }
}
