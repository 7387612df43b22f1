//! The slowest recent requests, and their insights.

use std::sync::atomic::{AtomicU64, Ordering};

use fathom_block::{Course, ErrorKind, Insight, Operation, Outcome, Request};
use parking_lot::Mutex;

/// The length of a window, in nanoseconds. A request is kept for one to two windows.
const WINDOW_NS: u64 = 60_000_000_000;
/// The most parts of a request that are kept.
const PARTS_MAX: usize = 16;

/// A slow request.
#[derive(Clone, Debug, Default)]
pub struct SlowRequest {
    /// The request's number.
    pub id: u64,
    /// The queue of the request.
    pub queue: u64,
    /// The operation.
    pub operation: Operation,
    /// The offset of its range, in bytes.
    pub offset: u64,
    /// The length of its range, in bytes.
    pub length: u64,
    /// When it arrived, in nanoseconds of the stack's clock.
    pub start_ns: u64,
    /// Its latency, in nanoseconds.
    pub latency_ns: u64,
    /// The times at which it passed the layers.
    pub course: Course,
    /// Its error, if it failed.
    pub error: Option<ErrorKind>,
    /// Its insight, with at most the first 16 parts.
    pub insight: Insight,
    /// The number of parts that the insight lacks.
    pub parts_left_out: usize,
}

impl SlowRequest {
    fn fill(
        &mut self,
        request: &Request,
        queue: u64,
        outcome: Outcome,
        start_ns: u64,
        latency_ns: u64,
    ) {
        self.id = request.id;
        self.queue = queue;
        self.operation = request.operation;
        self.offset = request.offset;
        self.length = request.length;
        self.start_ns = start_ns;
        self.latency_ns = latency_ns;
        self.course = request.course;
        self.error = outcome.err();
        let (mine, theirs) = (&mut self.insight, &request.insight);
        mine.facts = theirs.facts;
        mine.class = theirs.class;
        mine.io_priority = theirs.io_priority;
        mine.flags = theirs.flags;
        mine.file_offset = theirs.file_offset;
        mine.parts.clear();
        mine.parts.extend(theirs.parts.iter().take(PARTS_MAX).copied());
        self.parts_left_out = theirs.parts.len() - mine.parts.len();
    }
}

/// The slowest requests of two windows: the current one, and the one before.
#[derive(Debug, Default)]
struct Lists {
    now: Vec<SlowRequest>,
    before: Vec<SlowRequest>,
}

/// The slowest requests of a disk.
#[derive(Debug)]
pub(super) struct Slow {
    count_max: usize,
    /// The latency that a request must exceed to be among the slowest.
    floor_ns: AtomicU64,
    /// When the current window ends.
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

    /// Keeps a request that completed at `now_ns` if it is among the slowest. Usually costs two
    /// loads.
    #[inline]
    pub(super) fn offer(
        &self,
        request: &Request,
        queue: u64,
        outcome: Outcome,
        start_ns: u64,
        now_ns: u64,
    ) {
        let latency_ns = now_ns.saturating_sub(start_ns);
        let is_window_over = now_ns >= self.end_ns.load(Ordering::Relaxed);
        if is_window_over || latency_ns > self.floor_ns.load(Ordering::Relaxed) {
            self.keep(request, queue, outcome, start_ns, latency_ns);
        }
    }

    #[cold]
    fn keep(
        &self,
        request: &Request,
        queue: u64,
        outcome: Outcome,
        start_ns: u64,
        latency_ns: u64,
    ) {
        // The queue never waits: while a reader or another queue has the lock, the request is
        // dropped.
        let Some(mut lists) = self.lists.try_lock() else { return };
        let now_ns = start_ns + latency_ns;
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
                last.fill(request, queue, outcome, start_ns, latency_ns);
            }
        } else if let Some(least) = list.iter_mut().min_by_key(|slow| slow.latency_ns) {
            if least.latency_ns < latency_ns {
                least.fill(request, queue, outcome, start_ns, latency_ns);
            }
        }
        if list.len() == self.count_max {
            let least = list.iter().map(|slow| slow.latency_ns).min().unwrap_or(0);
            self.floor_ns.store(least, Ordering::Relaxed);
        }
    }

    /// The slowest requests of the last one to two minutes before `now_ns`: at most `count`, the
    /// slowest first.
    pub(super) fn list(&self, now_ns: u64, count: usize) -> Vec<SlowRequest> {
        let lists = self.lists.lock();
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
    fn the_slowest_recent_requests_are_kept() {
        let slow = Slow::new(3);
        let mut request = Request::default();
        for (id, latency_ns) in [5, 1, 9, 7, 3, 8].into_iter().enumerate() {
            request.id = id as u64;
            slow.offer(&request, 0, Ok(()), 10, 10 + latency_ns);
        }
        let latencies = |now_ns| -> Vec<u64> {
            slow.list(now_ns, 10).iter().map(|slow| slow.latency_ns).collect()
        };
        assert_eq!(latencies(20), [9, 8, 7]);
        // The next window begins with an empty list.
        slow.offer(&request, 0, Err(ErrorKind::Io), WINDOW_NS, WINDOW_NS + 50);
        assert_eq!(latencies(WINDOW_NS + 60), [50, 9, 8, 7]);
        assert_eq!(slow.list(WINDOW_NS + 60, 1)[0].error, Some(ErrorKind::Io));
        assert_eq!(latencies(2 * WINDOW_NS + 60), [50]);
    }
}
