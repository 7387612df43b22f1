//! The layer's part in one queue.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use fathom_block::{Crossing, ErrorKind, HeldBy, LayerQueue, Outcome, Request, Waker};

use super::device::Lane;
use super::held::{Release, length};
use super::need::Need;
use super::pieces::{Item, PIECE, Part};
use super::requests::{Admitted, Requests, Waiting};
use super::state::{BACKGROUND, Completed, Flow, MARK_BITS, Rest, WAITED, WHOLE_MAX};
use super::{Inner, Weights};

/// The interval at which waiting and held requests are reconsidered without a reason, in
/// nanoseconds.
const REVIEW_NS: u64 = 10_000_000;
/// The interval at which held requests are checked for processes that wait for them, in
/// nanoseconds.
const PROBE_NS: u64 = 2_000_000;
/// The mark of a background request in a quiet time. That of other requests is their class.
const STEP: usize = 2;

pub(super) struct ScheduleQueue {
    lane: Lane,
    waker: Waker,
    weights: Option<Weights>,
    requests: Requests,
    /// The time of the next check for processes that wait, in nanoseconds.
    probe_ns: u64,
}

impl ScheduleQueue {
    pub(super) fn new(inner: &Arc<Inner>, number: u64, waker: Waker) -> Self {
        let requests = Requests::new(inner, number);
        Self {
            lane: Lane::new(Arc::clone(&inner.place), waker.clone()),
            waker,
            weights: Weights::of(inner),
            requests,
            probe_ns: 0,
        }
    }

    /// Passes on a request that is counted already.
    #[inline]
    fn pass(mut request: Box<Request>, mark: usize, now_ns: u64, next: &mut Crossing<'_>) {
        *next.word(&mut request) = now_ns & !MARK_BITS | (mark as u64 + 1);
        next.submit(request);
    }

    /// Takes a turn at the device, and passes on the admitted requests. A flush is passed on in any
    /// case.
    fn turn(
        &mut self,
        completed: Option<Completed>,
        flush: Option<Box<Request>>,
        next: &mut Crossing<'_>,
    ) {
        let now_ns = next.round_ns();
        let requests = &mut self.requests;
        requests.inner.index.take_marked(requests.number, &mut requests.marked);
        let mut retry_ns = None;
        let turn = self.lane.turn(now_ns, completed, |gate| {
            requests.release_marked(gate, next);
            requests.release_due(gate, next);
            if let Some(request) = flush {
                gate.pass(WAITED, 0, Flow::WHOLE);
                let class = WAITED;
                let part = Part::Whole(request);
                requests.admitted.push(Admitted { part, since_ns: now_ns, class, release: None });
            }
            let waiting = requests.admit_waiting(gate);
            retry_ns = requests.admit_held(gate, now_ns);
            retry_ns = retry_ns.into_iter().chain(gate.later_ns()).min();
            let (held, held_cost) = (requests.held.len(), requests.held.cost());
            Rest { waiting, held, held_cost, burst: requests.burst_behind() }
        });
        if let Some(waker) = turn.call {
            waker.wake();
        }
        self.requests.report();
        self.send(now_ns, next);
        let is_held = !self.requests.held.is_empty();
        let is_left = is_held || self.requests.is_waiting();
        let review_ns = is_left.then_some(REVIEW_NS);
        let probe_ns = (is_held && self.requests.inner.waiters.is_some()).then_some(PROBE_NS);
        let waits = [retry_ns, turn.wait_ns, review_ns, probe_ns];
        if let Some(wait_ns) = waits.into_iter().flatten().min() {
            next.wake_at(now_ns.saturating_add(wait_ns.max(1)));
        }
    }

    /// Passes on the admitted requests.
    fn send(&mut self, now_ns: u64, next: &mut Crossing<'_>) {
        let Requests { inner, number, admitted, removed, parents, .. } = &mut self.requests;
        let counters = &inner.counters;
        for Admitted { part, since_ns, class, release } in admitted.drain(..) {
            let waited_ns = now_ns.saturating_sub(since_ns);
            let mut request = match part {
                Part::Whole(request) => request,
                Part::Piece(piece) => parents.make(&piece, waited_ns, next),
            };
            if let Some(release) = release {
                removed.push(request.id);
                // A request that came in a quiet time was not held.
                if waited_ns > 0 || release != Release::Quiet {
                    counters.note_release(release, waited_ns, &mut request);
                }
            } else if waited_ns > 0 {
                counters.waited.fetch_add(1, Ordering::Relaxed);
                counters.waited_ns.fetch_add(waited_ns, Ordering::Relaxed);
                request.course.hold(HeldBy::Schedule, waited_ns);
            }
            if class == BACKGROUND && inner.waiters.is_some() {
                inner.sent.add(*number, &request);
            }
            let is_step = release == Some(Release::Quiet);
            Self::pass(request, if is_step { STEP } else { class }, now_ns, next);
        }
        inner.index.remove(removed);
    }

    /// A request with this word, number and length, in bytes, has left the device.
    #[inline]
    fn end(&mut self, word: u64, id: u64, bytes: u64, next: &mut Crossing<'_>) {
        let Some(mark) = (word & MARK_BITS).checked_sub(1) else { return };
        let is_step = mark as usize == STEP;
        let class = if is_step { BACKGROUND } else { mark as usize };
        if class == BACKGROUND {
            self.requests.inner.sent.remove(id);
        }
        self.lane.end(class, bytes, next.round_ns());
        if self.lane.is_attentive() {
            let completed = Completed { class, is_step, begun_ns: word & !MARK_BITS, bytes };
            self.turn(Some(completed), None, next);
        }
    }
}

impl Drop for ScheduleQueue {
    /// The requests that are not at the device are dropped with the queue.
    fn drop(&mut self) {
        self.requests.take_all();
        self.requests.inner.sent.remove_queue(self.requests.number);
    }
}

impl LayerQueue for ScheduleQueue {
    fn submit(&mut self, request: Box<Request>, next: &mut Crossing<'_>) {
        let mut need = Need::of(&request);
        if need == Need::None {
            return next.submit(request);
        }
        if need == Need::Background && self.lane.is_shared() && length(&request) > WHOLE_MAX {
            need = Need::Waited;
        }
        let now_ns = next.round_ns();
        if next.is_draining() {
            let class = if need == Need::Background { BACKGROUND } else { WAITED };
            self.lane.begin(class, length(&request));
            return Self::pass(request, class, now_ns, next);
        }
        let requests = &mut self.requests;
        requests.inner.index.meet(requests.number, &request, need);
        match need {
            Need::Background => {
                let id = request.id;
                requests.hold(request, now_ns);
                self.turn(None, None, next);
                let requests = &self.requests;
                if let Some(held) = requests.held.last().filter(|held| held.request.id == id) {
                    requests.inner.index.add(requests.number, &held.request, &self.waker);
                }
            }
            Need::Flush if self.lane.is_attentive() => self.turn(None, Some(request), next),
            Need::Flush => {
                self.lane.begin(WAITED, 0);
                Self::pass(request, WAITED, now_ns, next);
            }
            Need::Waited | Need::None => {
                let bytes = length(&request);
                let has_groups = self.weights.is_some();
                let is_large = bytes > PIECE && (has_groups || self.lane.is_shared());
                if !is_large && !has_groups && !self.lane.is_attentive() {
                    self.lane.check(now_ns);
                    if !self.lane.is_attentive() {
                        self.lane.begin(WAITED, bytes);
                        return Self::pass(request, WAITED, now_ns, next);
                    }
                }
                let flow = self.weights.as_mut().map_or(Flow::WHOLE, |it| it.flow(&request));
                let item = if is_large {
                    self.requests.parents.begin(request, next)
                } else {
                    Item::Whole(request)
                };
                self.requests.wait(item, flow, now_ns, false);
                self.turn(None, None, next);
            }
        }
    }

    fn complete(&mut self, mut request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        let word = std::mem::take(next.word(&mut request));
        let (id, bytes) = (request.id, length(&request));
        next.complete(request, outcome);
        self.end(word, id, bytes, next);
    }

    /// A piece.
    fn returned(&mut self, mut request: Box<Request>, _: Outcome, next: &mut Crossing<'_>) {
        let word = std::mem::take(next.word(&mut request));
        let (id, bytes) = (request.id, length(&request));
        next.recycle(request);
        self.end(word, id, bytes, next);
    }

    fn gathered(&mut self, mut parent: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        let outcome = self.requests.parents.end(parent.id, outcome, &mut parent.course);
        next.complete(parent, outcome);
    }

    fn advance(&mut self, next: &mut Crossing<'_>) {
        if self.requests.held.is_empty() && !self.requests.is_waiting() && !self.lane.is_attentive()
        {
            return;
        }
        let now_ns = next.round_ns();
        if !self.requests.held.is_empty() && now_ns >= self.probe_ns {
            self.probe_ns = now_ns.saturating_add(PROBE_NS);
            self.requests.probe();
        }
        self.turn(None, None, next);
    }

    fn withdraw(&mut self, next: &mut Crossing<'_>) {
        if self.requests.held.is_empty() && !self.requests.is_waiting() {
            return;
        }
        for Waiting { item, since_ns, .. } in self.requests.take_waiting() {
            if item.is_work_of_layers() {
                let part = item.whole();
                self.lane.begin(WAITED, part.length());
                let kept = Admitted { part, since_ns, class: WAITED, release: None };
                self.requests.admitted.push(kept);
                continue;
            }
            match item {
                Item::Whole(request) => next.complete(request, Err(ErrorKind::Withdrawn)),
                Item::Left(rest) => self.requests.parents.withdraw(&rest, next),
            }
        }
        let kept = std::mem::take(&mut self.requests.admitted);
        self.requests.take_held();
        let held = std::mem::replace(&mut self.requests.admitted, kept);
        for Admitted { part, since_ns, class, release } in held {
            // Background requests are held as a whole.
            let Part::Whole(request) = part else { continue };
            if request.flags.is_work_of_layers() {
                let part = Part::Whole(request);
                self.lane.begin(class, part.length());
                self.requests.admitted.push(Admitted { part, since_ns, class, release });
            } else {
                next.complete(request, Err(ErrorKind::Withdrawn));
            }
        }
        self.send(next.round_ns(), next);
        self.turn(None, None, next);
    }

    fn drain(&mut self, next: &mut Crossing<'_>) {
        let now_ns = next.round_ns();
        self.requests.take_all();
        for admitted in &self.requests.admitted {
            self.lane.begin(admitted.class, admitted.part.length());
        }
        self.send(now_ns, next);
        self.turn(None, None, next);
    }
}
