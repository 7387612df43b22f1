//! The limit's part in one queue.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fathom_block::{Crossing, ErrorKind, HeldBy, LayerQueue, Outcome, Request, Waker};
use fathom_insight::Name;

use super::group::{Entry, Place, Seat};
use super::rates::Cost;
use super::state::{TakenBack, Turn};
use super::{EACH_MAX, Inner, Selection};

/// The shortest time between two searches for unused lanes, in nanoseconds.
const PRUNE_NS: u64 = 1_000_000_000;

/// A waiting request.
struct Waiting {
    request: Box<Request>,
    cost: Cost,
    since_ns: u64,
    /// The number of its ticket.
    number: u64,
}

/// The requests of one queue under one limit.
struct Lane {
    seat: Seat,
    /// The waiting requests by direction, in the order of arrival.
    waiting: [VecDeque<Waiting>; 2],
}

impl Lane {
    fn new(place: Arc<Place>, waker: &Waker) -> Self {
        Self { seat: place.sit_down(waker.clone()), waiting: Default::default() }
    }

    /// Moves the requests that are `granted`, by direction, into `released`, in the order of their
    /// arrival.
    fn release(&mut self, mut granted: [u32; 2], released: &mut Vec<Waiting>) {
        loop {
            let directions = (0..2).filter(|it| granted[*it] > 0);
            let first = |it: usize| Some((self.waiting[it].front()?.number, it));
            let Some((_, direction)) = directions.filter_map(first).min() else { return };
            granted[direction] -= 1;
            released.extend(self.waiting[direction].pop_front());
        }
    }

    /// Takes back all requests but those that `is_kept`, and returns them; the limit gets back the
    /// costs of those that it has admitted by now. Kept ones that it has admitted go into
    /// `released`. Returns also when to come again, in nanoseconds.
    fn withdraw(
        &mut self,
        is_kept: impl Fn(&Waiting) -> bool,
        now_ns: u64,
        released: &mut Vec<Waiting>,
    ) -> (Vec<Waiting>, Option<u64>) {
        let (mut withdrawn, waiting) = (Vec::new(), &mut self.waiting);
        let again_ns = self.seat.take_back(now_ns, |granted| {
            let mut back = TakenBack::default();
            for (waiting, granted) in waiting.iter_mut().zip(granted) {
                for (index, it) in std::mem::take(waiting).into_iter().enumerate() {
                    let is_granted = index < granted as usize;
                    match (is_kept(&it), is_granted) {
                        (true, true) => released.push(it),
                        (true, false) => {
                            back.kept.push(it.number);
                            waiting.push_back(it);
                        }
                        (false, _) => {
                            back.spent.extend(is_granted.then_some(it.cost));
                            withdrawn.push(it);
                        }
                    }
                }
            }
            back.kept.sort_unstable();
            back
        });
        (withdrawn, again_ns)
    }

    /// Moves all requests into `released`.
    fn drain(&mut self, now_ns: u64, released: &mut Vec<Waiting>) {
        let waiting = &mut self.waiting;
        self.seat.take_back(now_ns, |granted| {
            let mut back = TakenBack::default();
            for (waiting, granted) in waiting.iter_mut().zip(granted) {
                let others = waiting.iter().skip(granted as usize);
                back.passed.extend(others.map(|it| it.cost));
                released.extend(waiting.drain(..));
            }
            back
        });
    }

    /// Whether no request waits.
    fn is_empty(&self) -> bool {
        self.waiting.iter().all(VecDeque::is_empty)
    }
}

/// The lanes of one queue.
struct Lanes {
    waker: Waker,
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
            self.each.entry(found).or_insert_with(|| Lane::new(place, &self.waker));
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
    /// The selection of requests; `None` for all requests.
    selection: Option<Selection>,
    lanes: Lanes,
    /// The admitted requests that are to be passed on.
    released: Vec<Waiting>,
}

impl LimitQueue {
    pub(super) fn new(inner: Arc<Inner>, waker: Waker) -> Self {
        let selection = Selection::of(&inner);
        let common = Lane::new(inner.place(), &waker);
        let lanes = Lanes { waker, common, each: HashMap::new(), pruned_ns: 0 };
        Self { inner, selection, lanes, released: Vec::new() }
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
        let now_ns = next.round_ns();
        let lane = match group {
            None => &mut self.lanes.common,
            Some(group) => self.lanes.of(group, &self.inner, now_ns),
        };
        if next.is_draining() {
            lane.seat.charge(cost, now_ns);
            return next.submit(request);
        }
        let waiting = &lane.waiting[cost.direction as usize];
        let is_behind = !waiting.is_empty();
        let Entry::Ticket(number, Turn { mut granted, again_ns }) =
            lane.seat.enter(cost, is_behind, now_ns)
        else {
            return next.submit(request);
        };
        if let Some(again_ns) = again_ns {
            next.wake_at(again_ns);
        }
        let own = &mut granted[cost.direction as usize];
        if *own as usize > waiting.len() {
            // The request itself is admitted, with all those of its direction that it is behind.
            *own -= 1;
            lane.release(granted, &mut self.released);
            self.send(now_ns, next);
            return next.submit(request);
        }
        self.inner.held.fetch_add(1, Ordering::Relaxed);
        self.inner.waiting.fetch_add(1, Ordering::Relaxed);
        let waiting = Waiting { request, cost, since_ns: now_ns, number };
        lane.waiting[cost.direction as usize].push_back(waiting);
        lane.release(granted, &mut self.released);
        self.send(now_ns, next);
    }

    fn complete(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        next.complete(request, outcome);
    }

    fn advance(&mut self, next: &mut Crossing<'_>) {
        let now_ns = next.round_ns();
        for lane in self.lanes.all().filter(|lane| !lane.is_empty()) {
            let Turn { granted, again_ns } = lane.seat.come(now_ns);
            lane.release(granted, &mut self.released);
            if let Some(again_ns) = again_ns {
                next.wake_at(again_ns);
            }
        }
        self.send(now_ns, next);
    }

    /// Withdrawn requests cost nothing.
    fn withdraw(&mut self, next: &mut Crossing<'_>) {
        let now_ns = next.round_ns();
        let is_kept = |it: &Waiting| it.request.flags.is_work_of_layers();
        for lane in self.lanes.all().filter(|lane| !lane.is_empty()) {
            let (withdrawn, again_ns) = lane.withdraw(is_kept, now_ns, &mut self.released);
            self.inner.waiting.fetch_sub(withdrawn.len() as u64, Ordering::Relaxed);
            for Waiting { request, .. } in withdrawn {
                next.complete(request, Err(ErrorKind::Withdrawn));
            }
            if let Some(again_ns) = again_ns {
                next.wake_at(again_ns);
            }
        }
        self.send(now_ns, next);
    }

    fn drain(&mut self, next: &mut Crossing<'_>) {
        let now_ns = next.round_ns();
        for lane in self.lanes.all() {
            lane.drain(now_ns, &mut self.released);
        }
        self.send(now_ns, next);
    }
}
