//! The requests of a queue that are not at the device: those that wait for their turn, and those
//! that are held.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fathom_block::{Crossing, Request};

use super::Inner;
use super::device::Gate;
use super::held::{Held, HeldList, Release, length};
use super::pieces::{Item, PIECE, Parents, Part, SMALL_PIECE};
use super::state::{BACKGROUND, Flow, WAITED};

/// The most bytes of adjoining background requests that follow the first one of a step.
const RUN_BYTES_MAX: u64 = 2 << 20;
/// The most held requests that are checked at a time.
const PROBES_MAX: usize = 64;
/// The most pages of a request that are examined at a time, besides the first.
const PAGES_MAX: usize = 3;
/// The number of control groups from which unused ones are dropped.
const GROUPS_KEPT: usize = 64;

/// A request that waits for its turn.
pub(super) struct Waiting {
    pub item: Item,
    pub since_ns: u64,
    pub was_held: bool,
}

/// The waiting requests of a control group, in the order of arrival.
struct Group {
    flow: Flow,
    waiting: VecDeque<Waiting>,
}

/// An admitted request that is to be passed on.
pub(super) struct Admitted {
    pub part: Part,
    pub since_ns: u64,
    pub class: usize,
    /// Why it is no longer held; `None` if it has only waited for its turn.
    pub release: Option<Release>,
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
pub(super) struct Requests {
    pub inner: Arc<Inner>,
    pub number: u64,
    groups: Vec<Group>,
    /// The number of waiting requests, and the number that the disk's figures have.
    waiting: u64,
    reported: u64,
    /// The number of waiting requests that were held before.
    were_held: u64,
    pub held: HeldList,
    burst: Option<Burst>,
    /// The held requests that a process waits for by now.
    pub marked: Vec<(u64, Release)>,
    pub admitted: Vec<Admitted>,
    /// The numbers of the released requests that are in the disk's index.
    pub removed: Vec<u64>,
    /// The number of checks for processes that wait.
    probes: usize,
    pub parents: Parents,
}

impl Requests {
    pub(super) fn new(inner: &Arc<Inner>, number: u64) -> Self {
        Self {
            number,
            groups: Vec::new(),
            waiting: 0,
            reported: 0,
            were_held: 0,
            held: HeldList::default(),
            burst: None,
            marked: Vec::new(),
            admitted: Vec::new(),
            removed: Vec::new(),
            probes: 0,
            parents: Parents::default(),
            inner: Arc::clone(inner),
        }
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.waiting > 0
    }

    /// Brings the disk's figures up to date.
    pub(super) fn report(&mut self) {
        if self.waiting != self.reported {
            let change = self.waiting.wrapping_sub(self.reported);
            self.inner.waiting.fetch_add(change, Ordering::Relaxed);
            self.reported = self.waiting;
        }
    }

    pub(super) fn wait(&mut self, item: Item, flow: Flow, since_ns: u64, was_held: bool) {
        self.waiting += 1;
        self.were_held += u64::from(was_held);
        let found = self.groups.iter().position(|group| group.flow == flow);
        let index = found.unwrap_or_else(|| {
            if self.groups.len() >= GROUPS_KEPT {
                self.groups.retain(|group| !group.waiting.is_empty());
            }
            self.groups.push(Group { flow, waiting: VecDeque::new() });
            self.groups.len() - 1
        });
        self.groups[index].waiting.push_back(Waiting { item, since_ns, was_held });
    }

    pub(super) fn hold(&mut self, request: Box<Request>, since_ns: u64) {
        self.inner.held.fetch_add(1, Ordering::Relaxed);
        self.inner.held_bytes.fetch_add(length(&request), Ordering::Relaxed);
        self.held.push(request, since_ns);
    }

    /// Takes a held request out of the disk's amount of held requests.
    fn forget(&self, held: &Held) {
        self.inner.held.fetch_sub(1, Ordering::Relaxed);
        self.inner.held_bytes.fetch_sub(length(&held.request), Ordering::Relaxed);
    }

    /// Has a held request passed on.
    fn release(&mut self, held: Held, release: Release) {
        self.forget(&held);
        let Held { request, since_ns } = held;
        let class = if release.is_waited() { WAITED } else { BACKGROUND };
        let part = Part::Whole(request);
        self.admitted.push(Admitted { part, since_ns, class, release: Some(release) });
    }

    /// Passes a held request on, of which the time to be held is over. If too much work is at the
    /// device, it waits for the disk's share from now on.
    fn release_or_wait(
        &mut self,
        held: Held,
        release: Release,
        gate: &mut Gate<'_>,
        next: &mut Crossing<'_>,
    ) {
        let bytes = length(&held.request);
        // One that was held longer is not overtaken.
        if self.were_held == 0 && gate.has_space(bytes) {
            let class = if release.is_waited() { WAITED } else { BACKGROUND };
            gate.pass(class, bytes, Flow::WHOLE);
            return self.release(held, release);
        }
        self.forget(&held);
        let (Held { mut request, since_ns }, now_ns) = (held, next.round_ns());
        self.removed.push(request.id);
        self.inner.counters.note_release(release, now_ns.saturating_sub(since_ns), &mut request);
        let item =
            if bytes > PIECE { self.parents.begin(request, next) } else { Item::Whole(request) };
        self.wait(item, Flow::WHOLE, now_ns, true);
    }

    /// Releases the held requests that a process waits for by now. They are passed on at once: the
    /// process has waited already.
    pub(super) fn release_marked(&mut self, gate: &mut Gate<'_>, next: &mut Crossing<'_>) {
        for (id, release) in std::mem::take(&mut self.marked) {
            let Some(held) = self.held.take_numbered(id) else { continue };
            self.release_or_wait(held, release, gate, next);
        }
    }

    /// Admits waiting requests of all groups, the group with the least tag first. Returns the tag
    /// of the first group that still waits.
    pub(super) fn admit_waiting(&mut self, gate: &mut Gate<'_>) -> Option<f64> {
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
            let Waiting { item, since_ns, was_held } = group.waiting.pop_front()?;
            let (part, left) = item.next(piece);
            if let Some(item) = left {
                group.waiting.push_front(Waiting { item, since_ns, was_held });
            } else {
                self.waiting -= 1;
                self.were_held -= u64::from(was_held);
            }
            self.admitted.push(Admitted { part, since_ns, class: WAITED, release: None });
        }
    }

    /// Releases the requests that have been held for the longest time.
    pub(super) fn release_due(&mut self, gate: &mut Gate<'_>, next: &mut Crossing<'_>) {
        let hold_max_ns = self.inner.hold_max_ns.load(Ordering::Relaxed);
        let now_ns = next.round_ns();
        let is_due = |since_ns: u64| since_ns.saturating_add(hold_max_ns) <= now_ns;
        while self.held.oldest_ns().is_some_and(is_due) {
            let Some(held) = self.held.pop_oldest() else { break };
            self.release_or_wait(held, Release::Due, gate, next);
        }
    }

    /// Admits held requests. Returns the time after which to try again, in nanoseconds.
    pub(super) fn admit_held(&mut self, gate: &mut Gate<'_>, now_ns: u64) -> Option<u64> {
        let hold_max_ns = self.inner.hold_max_ns.load(Ordering::Relaxed);
        let left_ns = |held: &HeldList, time_ns: u64| {
            let oldest_ns = held.oldest_ns()?;
            Some(oldest_ns.saturating_add(time_ns).saturating_sub(now_ns))
        };
        let burst_ns = hold_max_ns / 4 * 3;
        if left_ns(&self.held, burst_ns) == Some(0) {
            self.burst.get_or_insert(Burst { begun_ns: now_ns, is_due: true });
        }
        let mut wait_ns = None;
        while !self.held.is_empty() && self.were_held == 0 {
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
    pub(super) fn burst_behind(&self) -> Option<f64> {
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
    pub(super) fn probe(&mut self) {
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
    pub(super) fn take_all(&mut self) {
        for Waiting { item, since_ns, .. } in self.take_waiting() {
            let part = item.whole();
            self.admitted.push(Admitted { part, since_ns, class: WAITED, release: None });
        }
        self.take_held();
    }

    pub(super) fn take_waiting(&mut self) -> Vec<Waiting> {
        let groups = std::mem::take(&mut self.groups);
        (self.waiting, self.were_held) = (0, 0);
        self.report();
        groups.into_iter().flat_map(|group| group.waiting).collect()
    }

    pub(super) fn take_held(&mut self) {
        while let Some(held) = self.held.pop_oldest() {
            self.release(held, Release::Drain);
        }
        self.marked.clear();
        self.inner.index.remove_queue(self.number);
    }
}
