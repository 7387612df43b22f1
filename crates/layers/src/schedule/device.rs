//! A device, and the queues of all disks that lie on it.
//!
//! Each queue of a disk is a **lane**. A lane counts its requests in flight itself and publishes
//! the counts. While the requests of only one disk are at the device, and a process waits for each
//! of them, no lane takes the lock for a request: it checks the device once a millisecond
//! ([`Lane::check`]). Otherwise the device is **attentive**, and each lane takes a **turn** under
//! the lock for each request and each completion ([`Lane::turn`]). In a turn, a [`Gate`] admits
//! requests:
//!
//! - **Waited-for requests** by start-time fair queueing. Each disk has a tag: the service that it
//!   has received, divided by its weight. If more requests come than the device may have in flight,
//!   the disk with the least tag is next. The control groups of a disk share its part in the same
//!   way.
//! - **Background requests** while the device has no waited-for request, and is not expected to get
//!   one during the step ([`Think`](super::think::Think)). At first one at a time; more after the
//!   device has been quiet for longer.
//! - **A burst of background requests**, if a disk holds more than it may and is behind its share,
//!   or if its oldest request was held for long.
//!
//! If a lane makes no progress for [`STUCK_NS`](super::state::STUCK_NS), its requests do not count
//! as in flight any more. A lane that was called and takes no turn is not waited for.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fathom_block::{Shared, Waker};

use super::state::{
    ATTENTION_NS, BACKGROUND, Completed, Entry, Flow, LAG_MAX, LEAD, Member, PATIENCE_NS,
    Published, Rest, State, Turn, WAITED, WHOLE_MAX, cost,
};

/// The shortest time between two checks by a lane, in nanoseconds.
const CHECK_NS: u64 = 1_000_000;

/// A device on which disks lie.
pub(super) struct Device {
    is_attentive: AtomicBool,
    /// Whether several disks lie on it.
    is_shared: AtomicBool,
    state: Shared<State>,
}

impl Device {
    /// A device that gets at most `depth` requests at a time while disks compete for it.
    pub(super) fn new(depth: u32) -> Self {
        let state = State { depth, ..State::default() };
        let is_attentive = AtomicBool::new(false);
        Self { is_attentive, is_shared: AtomicBool::new(false), state: Shared::new(state) }
    }

    /// Sets the most requests in flight while disks compete.
    pub(super) fn set_depth(&self, depth: u32) {
        self.state.access(|state| state.depth = depth);
    }

    /// The number of times at which the requests of a lane ceased to count.
    pub(super) fn stuck_total(&self) -> u64 {
        self.state.access(|state| state.stuck_total)
    }

    /// Adds a disk.
    pub(super) fn join(self: &Arc<Self>, weight: u32) -> Place {
        let index = self.state.access(|state| {
            let free = state.members.iter().position(|member| !member.is_used);
            let index = free.unwrap_or_else(|| {
                state.members.push(Member::default());
                state.members.len() - 1
            });
            state.members[index] = Member { is_used: true, weight, ..Member::default() };
            self.note_members(state);
            index
        });
        Place { device: Arc::clone(self), index }
    }

    /// Counts the disks, and compares their weights.
    fn note_members(&self, state: &mut State) {
        let mut weights = state.members.iter().filter(|it| it.is_used).map(|it| it.weight);
        let first = weights.next();
        let (mut others, mut is_weighted) = (0, false);
        for weight in weights {
            others += 1;
            is_weighted |= Some(weight) != first;
        }
        (state.is_shared, state.is_weighted) = (others > 0, is_weighted);
        self.is_shared.store(state.is_shared, Ordering::Relaxed);
    }
}

/// The place of a disk at a device, shared by the disk's queues. The disk leaves when the last
/// owner drops the place.
pub(super) struct Place {
    device: Arc<Device>,
    index: usize,
}

impl Place {
    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(super) fn set_weight(&self, weight: u32) {
        self.device.state.access(|state| {
            state.members[self.index].weight = weight;
            self.device.note_members(state);
        });
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.device.state.access(|state| {
            state.members[self.index].is_used = false;
            state.guard.forget(self.index);
            self.device.note_members(state);
        });
    }
}

/// A queue's lane to its device.
pub(super) struct Lane {
    place: Arc<Place>,
    index: usize,
    flight: [u32; 2],
    /// The bytes of the requests in flight.
    bytes: u64,
    published: Arc<Published>,
    checked_ns: u64,
}

impl Lane {
    pub(super) fn new(place: Arc<Place>, waker: Waker) -> Self {
        let published = Arc::new(Published::default());
        let index = place.device.state.access(|state| {
            let entry = Entry {
                is_used: true,
                member: place.index,
                published: Arc::clone(&published),
                counted: [0; 2],
                counted_bytes: 0,
                is_hung: false,
                stuck: [0; 2],
                stuck_ns: 0,
                progress_ns: 0,
                waiting: None,
                held: 0,
                held_cost: 0.0,
                burst: None,
                called_ns: 0,
                is_silent: false,
                waker,
            };
            let free = state.lanes.iter().position(|lane| !lane.is_used);
            let index = free.unwrap_or(state.lanes.len());
            state.members[place.index].lanes.push(index);
            match state.lanes.get_mut(index) {
                Some(lane) => *lane = entry,
                None => state.lanes.push(entry),
            }
            index
        });
        Self { place, index, flight: [0; 2], bytes: 0, published, checked_ns: 0 }
    }

    /// Whether each request needs a turn.
    #[inline]
    pub(super) fn is_attentive(&self) -> bool {
        self.place.device.is_attentive.load(Ordering::Acquire)
    }

    /// Whether several disks lie on the device.
    #[inline]
    pub(super) fn is_shared(&self) -> bool {
        self.place.device.is_shared.load(Ordering::Relaxed)
    }

    /// Counts a request of `bytes` that is passed on without a turn.
    #[inline]
    pub(super) fn begin(&mut self, class: usize, bytes: u64) {
        self.flight[class] += 1;
        self.bytes += bytes;
        self.publish();
    }

    /// Counts a completed request.
    #[inline]
    pub(super) fn end(&mut self, class: usize, bytes: u64, now_ns: u64) {
        self.flight[class] = self.flight[class].saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes);
        if self.flight[WAITED] == 0 && class == WAITED {
            self.published.quiet_ns.store(now_ns, Ordering::Relaxed);
        }
        self.publish();
    }

    #[inline]
    fn publish(&self) {
        let [waited, background] = self.flight.map(u64::from);
        self.published.flight.store(background << 32 | waited, Ordering::Relaxed);
        self.published.bytes.store(self.bytes, Ordering::Relaxed);
    }

    /// Checks whether other disks use the device, if the last check was long ago.
    #[inline]
    pub(super) fn check(&mut self, now_ns: u64) {
        if now_ns >= self.checked_ns.saturating_add(CHECK_NS) {
            self.checked_ns = now_ns;
            let (device, member) = (&self.place.device, self.place.index);
            device.state.access(|state| {
                state.members[member].waited_ns = now_ns;
                state.note_flow(member, 0, now_ns);
                if state.is_weighted {
                    state.guard.note(member, state.members[member].weight, now_ns);
                }
                device.is_attentive.store(state.is_attentive, Ordering::Release);
            });
        }
    }

    /// Takes a turn, in which `requests` admits requests.
    pub(super) fn turn(
        &mut self,
        now_ns: u64,
        completed: Option<Completed>,
        requests: impl FnOnce(&mut Gate<'_>) -> Rest,
    ) -> Turn {
        let (device, index) = (&self.place.device, self.index);
        let (flight, bytes) = (&mut self.flight, &mut self.bytes);
        let turn = device.state.access(|state| {
            state.time_ns = state.time_ns.max(now_ns);
            state.attend(now_ns);
            // Other lanes pass on requests without turns until they see this.
            device.is_attentive.store(true, Ordering::Release);
            state.sync(index, *flight, *bytes, completed.as_ref(), now_ns);
            if let Some(completed) = completed {
                state.learn(index, &completed, now_ns);
            }
            state.expire(now_ns);
            state.silence(now_ns);
            let mut gate = Gate { state, lane: index, now_ns, flight, bytes, later_ns: None };
            let rest = requests(&mut gate);
            let turn = state.finish(index, &rest, now_ns);
            device.is_attentive.store(state.is_attentive, Ordering::Release);
            turn
        });
        self.publish();
        turn
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.place.device.state.access(|state| {
            state.rest(self.index, &Rest::default());
            let time_ns = state.time_ns;
            state.count(self.index, [0; 2], 0, time_ns);
            state.members[self.place.index].lanes.retain(|lane| *lane != self.index);
            let entry = &mut state.lanes[self.index];
            entry.is_used = false;
            // The device is not quiet for longer than since the lane's last request.
            let quiet_ns = entry.published.quiet_ns.load(Ordering::Relaxed);
            state.left_ns = state.left_ns.max(quiet_ns);
            entry.published = Arc::default();
        });
    }
}

/// Admits requests of one lane.
pub(super) struct Gate<'a> {
    state: &'a mut State,
    lane: usize,
    now_ns: u64,
    flight: &'a mut [u32; 2],
    bytes: &'a mut u64,
    /// The time at which a request may be admitted that waits because of the guard, in nanoseconds.
    later_ns: Option<u64>,
}

impl Gate<'_> {
    fn member(&self) -> usize {
        self.state.lanes[self.lane].member
    }

    /// The tag of a group of the disk.
    pub(super) fn tag(&self, flow: Flow) -> f64 {
        self.state.members[self.member()].group_tag(flow.key)
    }

    /// Admits a waited-for request of `bytes`, if it is its turn.
    pub(super) fn admit(&mut self, bytes: u64, flow: Flow) -> bool {
        let (member, now_ns) = (self.member(), self.now_ns);
        self.state.note_flow(member, flow.key, now_ns);
        self.state.members[member].waited_ns = now_ns;
        self.state.raise(member);
        if self.state.is_weighted {
            self.state.guard.note(member, self.state.members[member].weight, now_ns);
        }
        let is_guarded_against = self.is_guarded_against();
        if is_guarded_against && now_ns < self.state.guard.until_ns() {
            self.state.guard.hold();
            self.later_ns = Some(self.state.guard.until_ns());
            return false;
        }
        if !self.state.has_room(now_ns) || self.state.must_yield(self.lane, flow) {
            return false;
        }
        if is_guarded_against {
            let cost = cost(bytes);
            if !self.state.has_lighter_room(cost, now_ns) {
                self.state.guard.hold();
                return false;
            }
            self.state.guard.admit(cost, now_ns);
        }
        self.pass(WAITED, bytes, flow);
        true
    }

    /// Whether a heavier disk has a guard against the disk.
    pub(super) fn is_guarded_against(&self) -> bool {
        self.state.is_weighted && self.state.is_guarded_against(self.member(), self.now_ns)
    }

    /// The time after which a waiting request may be admitted that waits because of the guard, in
    /// nanoseconds.
    pub(super) fn later_ns(&self) -> Option<u64> {
        self.later_ns.map(|later_ns| later_ns.saturating_sub(self.now_ns))
    }

    /// Whether a request of `bytes` that is no longer held may be passed on at once.
    pub(super) fn has_space(&self, bytes: u64) -> bool {
        let is_short = !self.state.is_shared || bytes <= WHOLE_MAX;
        is_short && self.state.has_space() && !self.is_guarded_against()
    }

    /// Counts and charges a request of `bytes` that is passed on in any case.
    pub(super) fn pass(&mut self, class: usize, bytes: u64, flow: Flow) {
        let (member, state) = (self.member(), &mut *self.state);
        let is_hung = state.lanes[self.lane].is_hung;
        if class == WAITED {
            if !is_hung {
                state.end_quiet(self.now_ns);
            }
        } else {
            state.until_ns = self.now_ns.saturating_add(ATTENTION_NS);
        }
        state.raise(member);
        state.charge(member, cost(bytes), flow);
        self.flight[class] += 1;
        *self.bytes += bytes;
        if is_hung {
            return;
        }
        let Entry { mut counted, counted_bytes, .. } = state.lanes[self.lane];
        let is_idle = counted == [0, 0];
        counted[class] += 1;
        state.count(self.lane, counted, counted_bytes + bytes, self.now_ns);
        if is_idle {
            state.lanes[self.lane].progress_ns = self.now_ns;
        }
    }

    /// Admits a background request in a quiet time, as a step. Its length is only looked up in a
    /// quiet time.
    ///
    /// # Errors
    /// If the request is held back: the time after which to try again, in nanoseconds, or `None` if
    /// the lane is called then.
    pub(super) fn admit_step(&mut self, bytes: impl FnOnce() -> u64) -> Result<(), Option<u64>> {
        self.state.until_ns = self.now_ns.saturating_add(ATTENTION_NS);
        let member = self.member();
        self.state.raise(member);
        if !self.state.is_quiet() {
            return Err(None);
        }
        let bytes = bytes();
        let wait_ns = self.state.background_wait_ns(bytes, self.now_ns)?;
        if wait_ns > 0 {
            return Err(Some(wait_ns));
        }
        // The disk itself is not behind itself.
        if self.state.order.holding.least() + LEAD < self.state.members[member].tag {
            return Err(Some(PATIENCE_NS));
        }
        self.pass(BACKGROUND, bytes, Flow::WHOLE);
        self.state.begin_step(bytes, false, self.now_ns);
        Ok(())
    }

    /// Admits a request of `bytes` that adjoins the last one of a step, if it probably completes in
    /// the quiet time.
    pub(super) fn extend_step(&mut self, bytes: u64) -> bool {
        let quiet_ns = self.now_ns.saturating_sub(self.state.quiet_ns);
        let safe_ns = self.state.think.safe_ns(quiet_ns);
        if !self.state.has_space() || bytes > self.state.pace.bytes(safe_ns, self.now_ns) {
            return false;
        }
        self.pass(BACKGROUND, bytes, Flow::WHOLE);
        self.state.begin_step(bytes, true, self.now_ns);
        true
    }

    /// Admits a background request of `bytes` as a part of a burst, if the disk has had less than
    /// its share of the device by at least the cost `behind`.
    pub(super) fn admit_burst(&mut self, bytes: u64, behind: f64) -> bool {
        let member = self.member();
        if !self.state.has_burst_room() || self.is_guarded_against() {
            return false;
        }
        let behind = self.state.members[member].burst_lag(behind);
        let least = self.state.least_waiting(self.now_ns).without(member);
        if !self.state.may_burst(member, behind, least) {
            return false;
        }
        if let Some(least) = least {
            let tag = self.state.members[member].tag.max(least - LAG_MAX);
            self.state.set_tag(member, tag);
        }
        self.state.note_burst(self.now_ns);
        self.pass(BACKGROUND, bytes, Flow::WHOLE);
        true
    }
}

#[cfg(test)]
mod tests;
