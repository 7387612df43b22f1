//! The layer's part in one queue.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fathom_block::{Crossing, ErrorKind, HeldBy, LayerQueue, Outcome, Request, Waker};

use super::device::{Gate, Lane};
use super::held::{Held, HeldList, Release, length};
use super::need::Need;
use super::pieces::{Item, PIECE, Parents, Part, SMALL_PIECE};
use super::state::{BACKGROUND, Completed, Flow, MARK_BITS, Rest, WAITED};
use super::{Inner, Weights};

/// The interval at which waiting and held requests are reconsidered without a reason, in
/// nanoseconds.
const REVIEW_NS: u64 = 10_000_000;
/// The interval at which held requests are checked for processes that wait for them, in
/// nanoseconds.
const PROBE_NS: u64 = 2_000_000;
/// The most bytes of adjoining background requests that follow the first one of a step.
const RUN_BYTES_MAX: u64 = 2 << 20;
/// The most held requests that are checked at a time.
const PROBES_MAX: usize = 64;
/// The most pages of a request that are examined at a time, besides the first.
const PAGES_MAX: usize = 3;
/// The number of control groups from which unused ones are dropped.
const GROUPS_KEPT: usize = 64;
/// The mark of a background request in a quiet time. That of other requests is their class.
const STEP: usize = 2;

/// A request that waits for its turn.
struct Waiting {
    item: Item,
    since_ns: u64,
}

/// The waiting requests of a control group, in the order of arrival.
struct Group {
    flow: Flow,
    waiting: VecDeque<Waiting>,
}

/// An admitted request that is to be passed on.
struct Admitted {
    part: Part,
    since_ns: u64,
    class: usize,
    /// Why it is no longer held; `None` if it has only waited for its turn.
    release: Option<Release>,
}

/// The passing on of held requests although a process waits for the device. It includes the
/// requests that are held when it begins: many at a time disturb the device for less time than one
/// by one.
#[derive(Clone, Copy)]
struct Burst {
    begun_ns: u64,
    /// Whether it began because a request was held for long; otherwise the disk held more than it
    /// may.
    is_due: bool,
}

/// The requests of the queue that are not at the device.
struct Requests {
    inner: Arc<Inner>,
    number: u64,
    groups: Vec<Group>,
    /// The number of waiting requests, and the number that the disk's figures have.
    waiting: u64,
    reported: u64,
    held: HeldList,
    burst: Option<Burst>,
    /// The held requests that a process waits for by now.
    marked: Vec<(u64, Release)>,
    admitted: Vec<Admitted>,
    /// The number of checks for processes that wait.
    probes: usize,
    parents: Parents,
}

impl Requests {
    fn is_waiting(&self) -> bool {
        self.waiting > 0
    }

    /// Brings the disk's figures up to date.
    fn report(&mut self) {
        if self.waiting != self.reported {
            let change = self.waiting.wrapping_sub(self.reported);
            self.inner.waiting.fetch_add(change, Ordering::Relaxed);
            self.reported = self.waiting;
        }
    }

    fn wait(&mut self, item: Item, flow: Flow, since_ns: u64) {
        self.waiting += 1;
        let found = self.groups.iter().position(|group| group.flow == flow);
        let index = found.unwrap_or_else(|| {
            if self.groups.len() >= GROUPS_KEPT {
                self.groups.retain(|group| !group.waiting.is_empty());
            }
            self.groups.push(Group { flow, waiting: VecDeque::new() });
            self.groups.len() - 1
        });
        self.groups[index].waiting.push_back(Waiting { item, since_ns });
    }

    fn hold(&mut self, request: Box<Request>, since_ns: u64) {
        self.inner.held.fetch_add(1, Ordering::Relaxed);
        self.inner.held_bytes.fetch_add(length(&request), Ordering::Relaxed);
        self.held.push(request, since_ns);
    }

    /// Takes a held request out of the disk's amount of held requests.
    fn release(&mut self, held: Held, release: Release) {
        self.inner.held.fetch_sub(1, Ordering::Relaxed);
        self.inner.held_bytes.fetch_sub(length(&held.request), Ordering::Relaxed);
        let Held { request, since_ns } = held;
        let class = if release.is_waited() { WAITED } else { BACKGROUND };
        let part = Part::Whole(request);
        self.admitted.push(Admitted { part, since_ns, class, release: Some(release) });
    }

    /// Releases the held requests that a process waits for by now. They are passed on at once: the
    /// process has waited already.
    fn release_marked(&mut self, gate: &mut Gate<'_>) {
        for (id, release) in std::mem::take(&mut self.marked) {
            let Some(held) = self.held.take_numbered(id) else { continue };
            let class = if release.is_waited() { WAITED } else { BACKGROUND };
            gate.pass(class, length(&held.request), Flow::WHOLE);
            self.release(held, release);
        }
    }

    /// Admits waiting requests of all groups, the group with the least tag first. Returns the tag
    /// of the first group that still waits.
    fn admit_waiting(&mut self, gate: &mut Gate<'_>) -> Option<f64> {
        loop {
            if self.waiting == 0 {
                return None;
            }
            let waiting = self.groups.iter_mut().filter(|group| !group.waiting.is_empty());
            let (tag, group) = waiting
                .map(|group| (gate.tag(group.flow), group))
                .min_by(|(one, _), (other, _)| one.total_cmp(other))?;
            let first = group.waiting.front()?;
            let piece = if gate.is_guarded_against() { SMALL_PIECE } else { PIECE };
            if !gate.admit(first.item.next_length(piece), group.flow) {
                return Some(tag);
            }
            let Waiting { item, since_ns } = group.waiting.pop_front()?;
            let (part, left) = item.next(piece);
            match left {
                Some(item) => group.waiting.push_front(Waiting { item, since_ns }),
                None => self.waiting -= 1,
            }
            self.admitted.push(Admitted { part, since_ns, class: WAITED, release: None });
        }
    }

    /// Admits held requests. Returns the time after which to try again, in nanoseconds.
    fn admit_held(&mut self, gate: &mut Gate<'_>, now_ns: u64) -> Option<u64> {
        let hold_max_ns = self.inner.hold_max_ns.load(Ordering::Relaxed);
        let left_ns = |held: &HeldList, time_ns: u64| {
            let oldest_ns = held.oldest_ns()?;
            Some(oldest_ns.saturating_add(time_ns).saturating_sub(now_ns))
        };
        while left_ns(&self.held, hold_max_ns) == Some(0) {
            let Some(held) = self.held.pop_oldest() else { break };
            gate.pass(BACKGROUND, length(&held.request), Flow::WHOLE);
            self.release(held, Release::Due);
        }
        let burst_ns = hold_max_ns / 4 * 3;
        if left_ns(&self.held, burst_ns) == Some(0) {
            self.burst.get_or_insert(Burst { begun_ns: now_ns, is_due: true });
        }
        let mut wait_ns = None;
        while !self.held.is_empty() {
            let mut next = None;
            let bytes = || {
                next = self.held.next(u64::MAX);
                next.map_or(0, |index| self.held.length(index))
            };
            match gate.admit_step(bytes) {
                Ok(()) => {
                    let Some(index) = next else { break };
                    let Some(held) = self.held.take(index) else { break };
                    self.release(held, Release::Quiet);
                    self.continue_run(gate);
                }
                Err(_) if self.admit_burst(gate, now_ns) => {}
                Err(later_ns) => {
                    wait_ns = later_ns;
                    break;
                }
            }
        }
        let oldest_ns = self.held.oldest_ns();
        self.burst = self.burst.filter(|burst| oldest_ns.is_some_and(|it| it <= burst.begun_ns));
        let bound_ns = if self.burst.is_some() { hold_max_ns } else { burst_ns };
        wait_ns.into_iter().chain(left_ns(&self.held, bound_ns)).min()
    }

    /// How much service the disk has to be behind for a burst, as a cost; `None` if there is no
    /// reason for one.
    fn burst_behind(&self) -> Option<f64> {
        match self.burst {
            _ if self.held.is_empty() => None,
            // It has paid already, or is due.
            Some(_) => Some(f64::NEG_INFINITY),
            None => self.inner.has_surplus().then(|| self.held.cost()),
        }
    }

    /// Passes on a held request as a part of a burst, if there is a reason for one.
    fn admit_burst(&mut self, gate: &mut Gate<'_>, now_ns: u64) -> bool {
        let Some(behind) = self.burst_behind() else { return false };
        let begun = Burst { begun_ns: now_ns, is_due: false };
        let burst = self.burst.unwrap_or(begun);
        let Some(index) = self.held.next(burst.begun_ns) else { return false };
        if !gate.admit_burst(self.held.length(index), behind) {
            return false;
        }
        let Some(held) = self.held.take(index) else { return false };
        self.release(held, if burst.is_due { Release::Due } else { Release::Surplus });
        self.burst = Some(burst);
        true
    }

    /// Admits the requests that adjoin the last released one, as parts of the same step: on a hard
    /// disk they take little longer than the first.
    fn continue_run(&mut self, gate: &mut Gate<'_>) {
        let mut left = RUN_BYTES_MAX;
        while let Some(index) = self.held.adjoining() {
            let length = self.held.length(index);
            left = match left.checked_sub(length) {
                Some(left) if length > 0 => left,
                _ => break,
            };
            if !gate.extend_step(length) {
                break;
            }
            let Some(held) = self.held.take(index) else { break };
            self.release(held, Release::Quiet);
        }
    }

    /// Marks the held requests for which processes of the guest wait, and those of a file if a
    /// process waits for a background request of the file at the device.
    fn probe(&mut self) {
        self.probes = self.probes.wrapping_add(1);
        let Some(waiters) = &self.inner.waiters else { return };
        let awaited = self.inner.sent.awaited(waiters.as_ref());
        let mut has_marked = false;
        for files in &awaited {
            has_marked |= self.inner.index.meet_files(self.number, files);
        }
        if has_marked {
            return;
        }
        for held in self.held.iter().take(PROBES_MAX) {
            let addresses = held.request.buffers.addresses();
            // `fsync` waits for the pages of a file in order: the first one of a request is the
            // most likely. Other processes wait for any page, so others are examined in turn.
            let start = self.probes.wrapping_mul(PAGES_MAX) % addresses.len().max(1);
            let others = addresses.iter().skip(start.max(1)).take(PAGES_MAX);
            let pages = addresses.first().into_iter().chain(others);
            let mut pages = pages.flatten().map(|address| address.0);
            if waiters.is_awaited(&mut pages) {
                self.inner.index.meet_waiter(self.number, held.request.id);
                // The other requests of the file are marked with it.
                return;
            }
        }
    }

    /// Takes all requests, in the order of their arrival within each list.
    fn take_all(&mut self) {
        for Waiting { item, since_ns } in self.take_waiting() {
            let part = item.whole();
            self.admitted.push(Admitted { part, since_ns, class: WAITED, release: None });
        }
        self.take_held();
    }

    fn take_waiting(&mut self) -> Vec<Waiting> {
        let groups = std::mem::take(&mut self.groups);
        self.waiting = 0;
        self.report();
        groups.into_iter().flat_map(|group| group.waiting).collect()
    }

    fn take_held(&mut self) {
        while let Some(held) = self.held.pop_oldest() {
            self.release(held, Release::Drain);
        }
        self.marked.clear();
        self.inner.index.remove_queue(self.number);
    }
}

pub(super) struct ScheduleQueue {
    lane: Lane,
    waker: Waker,
    weights: Option<Weights>,
    requests: Requests,
    /// The numbers of the released requests that are in the disk's index.
    removed: Vec<u64>,
    /// The time of the next check for processes that wait, in nanoseconds.
    probe_ns: u64,
}

impl ScheduleQueue {
    pub(super) fn new(inner: &Arc<Inner>, number: u64, waker: Waker) -> Self {
        let requests = Requests {
            number,
            groups: Vec::new(),
            waiting: 0,
            reported: 0,
            held: HeldList::default(),
            burst: None,
            marked: Vec::new(),
            admitted: Vec::new(),
            probes: 0,
            parents: Parents::default(),
            inner: Arc::clone(inner),
        };
        Self {
            lane: Lane::new(Arc::clone(&inner.place), waker.clone()),
            waker,
            weights: Weights::of(inner),
            requests,
            removed: Vec::new(),
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
            requests.release_marked(gate);
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
        let Requests { inner, number, admitted, parents, .. } = &mut self.requests;
        let counters = &inner.counters;
        for Admitted { part, since_ns, class, release } in admitted.drain(..) {
            let waited_ns = now_ns.saturating_sub(since_ns);
            let mut request = match part {
                Part::Whole(request) => request,
                Part::Piece(piece) => parents.make(&piece, waited_ns, next),
            };
            if let Some(release) = release {
                self.removed.push(request.id);
                // A request that came in a quiet time was not held.
                if waited_ns > 0 || release != Release::Quiet {
                    counters.released[release as usize].fetch_add(1, Ordering::Relaxed);
                    counters.held_ns.fetch_add(waited_ns, Ordering::Relaxed);
                    request.course.hold(HeldBy::Schedule, waited_ns);
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
        inner.index.remove(&mut self.removed);
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
        let need = Need::of(&request);
        if need == Need::None {
            return next.submit(request);
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
                self.requests.wait(item, flow, now_ns);
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
        for Waiting { item, since_ns } in self.requests.take_waiting() {
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
