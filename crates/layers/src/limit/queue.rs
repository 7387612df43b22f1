//! The limit's part in one queue.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fathom_block::{Crossing, ErrorKind, HeldBy, LayerQueue, Outcome, Request, Waker};
use fathom_insight::Name;

use super::group::Place;
use super::rates::{Cost, Direction};
use super::{EACH_MAX, Inner, Selection};

/// The shortest time between two searches for unused lanes, in nanoseconds.
const PRUNE_NS: u64 = 1_000_000_000;

/// A waiting request.
struct Waiting {
    request: Box<Request>,
    cost: Cost,
    since_ns: u64,
}

/// The requests of one queue under one limit.
struct Lane {
    place: Arc<Place>,
    /// The waiting requests by direction, in the order of arrival.
    waiting: [VecDeque<Waiting>; 2],
}

impl Lane {
    fn new(place: Arc<Place>) -> Self {
        Self { place, waiting: Default::default() }
    }

    /// The direction with the oldest waiting request, of those in `open`.
    fn oldest(&self, open: [bool; 2]) -> Option<Direction> {
        let candidates = Direction::ALL.into_iter().filter(|direction| open[*direction as usize]);
        let first = |direction: Direction| self.waiting[direction as usize].front();
        let waiting = candidates.filter_map(|it| Some((first(it)?.since_ns, it)));
        waiting.min_by_key(|(since_ns, _)| *since_ns).map(|(_, direction)| direction)
    }

    /// Moves the requests that are admitted now into `released`. Returns the time until another may
    /// be admitted, in nanoseconds.
    fn release(&mut self, now_ns: u64, waker: &Waker, released: &mut Vec<Waiting>) -> Option<u64> {
        if self.is_empty() {
            return None;
        }
        let place = Arc::clone(&self.place);
        place.admit(now_ns, waker, |gate| {
            let (mut open, mut wait_ns) = ([true; 2], None::<u64>);
            while let Some(direction) = self.oldest(open) {
                let waiting = &mut self.waiting[direction as usize];
                let Some(first) = waiting.front() else { break };
                match gate.admit(first.cost) {
                    Ok(()) => released.extend(waiting.pop_front()),
                    Err(needed_ns) => {
                        open[direction as usize] = false;
                        wait_ns = Some(wait_ns.map_or(needed_ns, |wait_ns| wait_ns.min(needed_ns)));
                    }
                }
            }
            for direction in Direction::ALL {
                if open[direction as usize] {
                    gate.settle(direction);
                }
            }
            wait_ns
        })
    }

    /// Whether no request waits.
    fn is_empty(&self) -> bool {
        self.waiting.iter().all(VecDeque::is_empty)
    }
}

/// The lanes of one queue.
struct Lanes {
    common: Lane,
    /// The lanes of control groups with a limit of their own.
    each: HashMap<Name, Lane>,
    /// The time at which unused lanes were last dropped, in nanoseconds.
    pruned_ns: u64,
}

impl Lanes {
    /// The lane of a control group, which is made if necessary.
    fn of(&mut self, group: Name, inner: &Inner, now_ns: u64) -> &mut Lane {
        let mut name = group;
        if !self.each.contains_key(&group) {
            let is_due = now_ns >= self.pruned_ns.saturating_add(PRUNE_NS);
            if self.each.len() >= EACH_MAX && is_due {
                self.pruned_ns = now_ns;
                self.each.retain(|_, lane| !lane.is_empty());
            }
            let (found, place) = inner.place_of(group);
            self.each.entry(found).or_insert_with(|| Lane::new(place));
            name = found;
        }
        self.each.get_mut(&name).unwrap_or(&mut self.common)
    }

    fn all(&mut self) -> impl Iterator<Item = &mut Lane> {
        std::iter::once(&mut self.common).chain(self.each.values_mut())
    }
}

pub(super) struct LimitQueue {
    inner: Arc<Inner>,
    waker: Waker,
    /// The selection of requests; `None` for all requests.
    selection: Option<Selection>,
    lanes: Lanes,
    /// The admitted requests that are to be passed on.
    released: Vec<Waiting>,
}

impl LimitQueue {
    pub(super) fn new(inner: Arc<Inner>, waker: Waker) -> Self {
        let selection = Selection::of(&inner);
        let lanes = Lanes { common: Lane::new(inner.place()), each: HashMap::new(), pruned_ns: 0 };
        Self { inner, waker, selection, lanes, released: Vec::new() }
    }

    /// Passes on the admitted requests.
    fn send(&mut self, now_ns: u64, next: &mut Crossing<'_>) {
        if self.released.is_empty() {
            return;
        }
        let mut held_ns = 0;
        self.inner.waiting.fetch_sub(self.released.len() as u64, Ordering::Relaxed);
        for Waiting { mut request, since_ns, .. } in self.released.drain(..) {
            let waited_ns = now_ns.saturating_sub(since_ns);
            held_ns += waited_ns;
            request.course.hold(HeldBy::Limit, waited_ns);
            next.submit(request);
        }
        self.inner.held_ns.fetch_add(held_ns, Ordering::Relaxed);
    }
}

impl Drop for LimitQueue {
    /// The waiting requests are dropped with the queue.
    fn drop(&mut self) {
        for lane in self.lanes.all() {
            let count: usize = lane.waiting.iter().map(VecDeque::len).sum();
            self.inner.waiting.fetch_sub(count as u64, Ordering::Relaxed);
            lane.place.settle();
        }
    }
}

impl LayerQueue for LimitQueue {
    fn submit(&mut self, request: Box<Request>, next: &mut Crossing<'_>) {
        let Some(cost) = Cost::of(&request) else { return next.submit(request) };
        let mut group = None;
        if let Some(selection) = &mut self.selection {
            if !selection.includes(&request) {
                return next.submit(request);
            }
            if self.inner.each() {
                group = Some(request.insight.facts.cgroup);
            }
        }
        let lane = match group {
            None => &mut self.lanes.common,
            Some(group) => self.lanes.of(group, &self.inner, next.round_ns()),
        };
        if next.is_draining() {
            lane.place.charge(cost, next.round_ns());
            return next.submit(request);
        }
        let now_ns = next.round_ns();
        let others_wait = !lane.waiting[1 - cost.direction as usize].is_empty();
        let waiting = &mut lane.waiting[cost.direction as usize];
        if waiting.is_empty() {
            let wait_ns = lane.place.admit(now_ns, &self.waker, |gate| {
                // The waiting requests of the other direction are older.
                let admitted = if others_wait { gate.admit_behind(cost) } else { gate.admit(cost) };
                admitted.err()
            });
            let Some(wait_ns) = wait_ns else { return next.submit(request) };
            next.wake_at(now_ns.saturating_add(wait_ns));
        }
        self.inner.held.fetch_add(1, Ordering::Relaxed);
        self.inner.waiting.fetch_add(1, Ordering::Relaxed);
        waiting.push_back(Waiting { request, cost, since_ns: now_ns });
    }

    fn complete(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        next.complete(request, outcome);
    }

    fn advance(&mut self, next: &mut Crossing<'_>) {
        let (now_ns, mut wait_ns) = (next.round_ns(), None::<u64>);
        for lane in self.lanes.all() {
            let needed_ns = lane.release(now_ns, &self.waker, &mut self.released);
            wait_ns = wait_ns.into_iter().chain(needed_ns).min();
        }
        self.send(now_ns, next);
        if let Some(wait_ns) = wait_ns {
            next.wake_at(now_ns.saturating_add(wait_ns));
        }
    }

    /// Withdrawn requests cost nothing.
    fn withdraw(&mut self, next: &mut Crossing<'_>) {
        let mut withdrawn = 0;
        for lane in self.lanes.all().filter(|lane| !lane.is_empty()) {
            for waiting in &mut lane.waiting {
                let is_kept = |it: &Waiting| it.request.flags.is_work_of_layers();
                let (kept, taken): (VecDeque<_>, VecDeque<_>) =
                    std::mem::take(waiting).into_iter().partition(is_kept);
                *waiting = kept;
                withdrawn += taken.len() as u64;
                for Waiting { request, .. } in taken {
                    next.complete(request, Err(ErrorKind::Withdrawn));
                }
            }
            if lane.is_empty() {
                lane.place.settle();
            }
        }
        self.inner.waiting.fetch_sub(withdrawn, Ordering::Relaxed);
    }

    fn drain(&mut self, next: &mut Crossing<'_>) {
        let now_ns = next.round_ns();
        for lane in self.lanes.all() {
            for waiting in lane.waiting.iter_mut().flat_map(|waiting| waiting.drain(..)) {
                lane.place.charge(waiting.cost, now_ns);
                self.released.push(waiting);
            }
            lane.place.settle();
        }
        self.send(now_ns, next);
    }
}
