//! The rules that the disks of a device share: what a lane's gate decides by.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fathom_block::Waker;

use super::guard::Guard;
use super::order::Order;
use super::pace::Pace;
use super::think::Think;

/// The position of waited-for and of background requests in counts.
pub(super) const WAITED: usize = 0;
pub(super) const BACKGROUND: usize = 1;

/// The bits of a request's word with its mark, plus 1. The other bits have the time at which the
/// request was passed on, in nanoseconds.
pub(super) const MARK_BITS: u64 = 3;

/// The cost of a request besides its bytes, in bytes.
pub(super) const REQUEST_COST: u64 = 64 << 10;
/// The bytes at a device for each request that it may have in flight.
pub(super) const BYTES_EACH: u64 = 128 << 10;
/// The longest background request that is held and passed on as a whole on a device with several
/// disks, and the bytes in flight from which on it gets no further ones, in bytes. The kernel's
/// write-back has no longer ones by default.
pub(super) const WHOLE_MAX: u64 = 4 << 20;
/// The weight of a disk or a control group by default.
pub(super) const WEIGHT: u32 = 100;
/// The most by which the tag of a disk may exceed that of a waiting disk, in bytes at the default
/// weight. Lanes alternate in steps of this size, which saves calls between threads.
pub(super) const LEAD: f64 = (4 * REQUEST_COST) as f64;
/// The most service that a disk can catch up with a burst of background requests, in the same unit.
pub(super) const LAG_MAX: f64 = (64 << 20) as f64;
/// The time for which a disk counts as one that waits after its last waited-for request, in
/// nanoseconds.
pub(super) const RECENT_NS: u64 = 50_000_000;
/// The time after which a device is no longer attentive without a reason, in nanoseconds.
pub(super) const ATTENTION_NS: u64 = 100_000_000;
/// The time in which the number of background requests in flight doubles while the device is quiet,
/// in nanoseconds.
pub(super) const RAMP_NS: u64 = 10_000_000;
/// The longest time for which lanes yield to a called lane, in nanoseconds.
pub(super) const PATIENCE_NS: u64 = 10_000_000;
/// The time without progress after which the requests of a lane no longer count, in nanoseconds.
pub(super) const STUCK_NS: u64 = 1_000_000_000;
/// The most control groups of a disk with a tag of their own.
pub(super) const GROUPS_MAX: usize = 1024;

/// The cost of a request of `length` bytes.
pub(super) fn cost(length: u64) -> f64 {
    length.saturating_add(REQUEST_COST) as f64
}

/// A flow within a disk: a control group, and its weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Flow {
    /// The number of the group's name; 0 for none.
    pub key: u32,
    pub weight: u32,
}

impl Flow {
    /// The flow of requests without a group.
    pub(super) const WHOLE: Self = Self { key: 0, weight: WEIGHT };
}

/// A disk.
#[derive(Debug, Default)]
pub(super) struct Member {
    pub is_used: bool,
    pub weight: u32,
    /// The service that the disk has received, in bytes at the default weight.
    pub tag: f64,
    /// The same for each control group.
    pub groups: HashMap<u32, f64>,
    /// The tag with which another group begins.
    pub groups_start: f64,
    /// The time of the last waited-for request, in nanoseconds.
    pub waited_ns: u64,
    pub flight: [u32; 2],
    /// The bytes of these requests.
    pub bytes: u64,
    /// The number of lanes with waiting and with held requests.
    pub waiting: u32,
    pub holding: u32,
    /// The cost of the held requests.
    pub held_cost: f64,
    pub lanes: Vec<usize>,
}

impl Member {
    pub(super) fn is_active(&self) -> bool {
        self.flight != [0, 0] || self.waiting > 0 || self.holding > 0
    }

    /// What a cost adds to the tag.
    pub(super) fn service(&self, cost: f64) -> f64 {
        cost * f64::from(WEIGHT) / f64::from(self.weight.max(1))
    }

    /// How far the tag has to be behind for a burst with a cost.
    pub(super) fn burst_lag(&self, cost: f64) -> f64 {
        self.service(cost).min(LAG_MAX)
    }

    pub(super) fn group_tag(&self, key: u32) -> f64 {
        self.groups.get(&key).map_or(self.groups_start, |tag| tag.max(self.groups_start))
    }
}

/// What a lane reports without a turn.
#[derive(Debug, Default)]
pub(super) struct Published {
    /// The requests in flight: background requests in the upper 32 bits, waited-for ones in the
    /// others.
    pub flight: AtomicU64,
    /// Their bytes.
    pub bytes: AtomicU64,
    /// The time since which the lane has no waited-for request in flight, in nanoseconds; 0 before
    /// the first one.
    pub quiet_ns: AtomicU64,
}

/// The device's view of a lane.
pub(super) struct Entry {
    pub is_used: bool,
    pub member: usize,
    pub published: Arc<Published>,
    /// The requests in flight that count.
    pub counted: [u32; 2],
    /// Their bytes.
    pub counted_bytes: u64,
    /// Whether the lane has made no progress for long: none of its requests count.
    pub is_hung: bool,
    /// Those of its requests that began by a time, in nanoseconds, when it was hung. They do not
    /// count.
    pub stuck: [u32; 2],
    pub stuck_ns: u64,
    pub progress_ns: u64,
    /// The least tag of the groups with waiting requests; `None` if no request waits.
    pub waiting: Option<f64>,
    pub held: usize,
    pub held_cost: f64,
    /// How far the disk's tag has to be behind those of the other disks for the lane's burst;
    /// `None` if the lane has no reason for one.
    pub burst: Option<f64>,
    /// The time at which the lane was called; 0 if it has taken a turn since.
    pub called_ns: u64,
    /// Whether it was called so long ago that it is not waited for.
    pub is_silent: bool,
    pub waker: Waker,
}

/// The state of a device.
#[derive(Default)]
pub(super) struct State {
    pub depth: u32,
    pub members: Vec<Member>,
    /// The tag of the disk that was charged last.
    pub last_tag: f64,
    pub lanes: Vec<Entry>,
    /// Whether several disks lie on the device, and whether some have other weights.
    pub is_shared: bool,
    pub is_weighted: bool,
    pub guard: Guard,
    pub flight: [u32; 2],
    /// The bytes of the requests in flight.
    pub bytes: u64,
    /// The number of lanes with waiting and with held requests.
    pub waiting: u32,
    pub holding: u32,
    /// The lanes with a reason for a burst.
    pub bursts: Vec<usize>,
    pub order: Order,
    /// The time since which no waited-for request is in flight, in nanoseconds.
    pub quiet_ns: u64,
    pub think: Think,
    pub pace: Pace,
    /// Whether a step has begun in the quiet time.
    pub has_step: bool,
    /// The time of the first waited-for request since the last quiet time, in nanoseconds, and
    /// whether a step had begun in that time.
    pub first: Option<(u64, bool)>,
    /// The time of the last request of a burst, in nanoseconds.
    pub burst_ns: u64,
    /// The last disk and control group, and the last time at which they changed, in nanoseconds.
    pub flow: Option<(usize, u32)>,
    pub rivals_ns: Option<u64>,
    /// Whether the device is attentive, and until when at least, in nanoseconds.
    pub is_attentive: bool,
    pub until_ns: u64,
    /// The last time since which a lane that has left had no waited-for request, in nanoseconds.
    pub left_ns: u64,
    pub expired_ns: u64,
    /// The time of the last turn, in nanoseconds.
    pub time_ns: u64,
    pub stuck_total: u64,
}

/// A completed request.
pub(super) struct Completed {
    pub class: usize,
    /// Whether it was a background request in a quiet time.
    pub is_step: bool,
    /// The time at which it was passed on, in nanoseconds.
    pub begun_ns: u64,
    /// Its length, in bytes.
    pub bytes: u64,
}

/// The state of a lane after a turn.
#[derive(Default)]
pub(super) struct Rest {
    /// The least tag of the groups with waiting requests; `None` if no request waits.
    pub waiting: Option<f64>,
    /// The number of held requests, and their cost.
    pub held: usize,
    pub held_cost: f64,
    /// How much service the disk has to be behind for the lane's burst, as a cost; `None` if the
    /// lane has no reason for one.
    pub burst: Option<f64>,
}

/// The result of a turn.
#[derive(Default)]
pub(super) struct Turn {
    /// The lane to be called.
    pub call: Option<Waker>,
    /// The time after which a held request of any lane may be admitted, in nanoseconds.
    pub wait_ns: Option<u64>,
}

impl State {
    /// Makes the device attentive.
    pub(super) fn attend(&mut self, now_ns: u64) {
        if self.is_attentive {
            return;
        }
        self.is_attentive = true;
        self.until_ns = now_ns.saturating_add(ATTENTION_NS);
        let mut quiet_ns = self.left_ns;
        for index in 0..self.lanes.len() {
            if self.lanes[index].is_used {
                let published = &self.lanes[index].published;
                quiet_ns = quiet_ns.max(published.quiet_ns.load(Ordering::Relaxed));
                let bytes = published.bytes.load(Ordering::Relaxed);
                let published = published.flight.load(Ordering::Relaxed);
                self.lanes[index].progress_ns = now_ns;
                self.lanes[index].stuck = [0; 2];
                let flight = [published as u32, (published >> 32) as u32];
                self.sync(index, flight, bytes, None, now_ns);
            }
        }
        if self.flight[WAITED] == 0 {
            self.quiet_ns = quiet_ns;
        }
    }

    /// Takes over a lane's own counts, with a completed request.
    pub(super) fn sync(
        &mut self,
        lane: usize,
        flight: [u32; 2],
        bytes: u64,
        completed: Option<&Completed>,
        now_ns: u64,
    ) {
        self.answer(lane);
        let entry = &mut self.lanes[lane];
        if let Some(Completed { class, begun_ns, .. }) = completed {
            if std::mem::take(&mut entry.is_hung) {
                (entry.stuck, entry.stuck_ns) = (flight, now_ns);
            } else if *begun_ns <= entry.stuck_ns {
                entry.stuck[*class] = entry.stuck[*class].saturating_sub(1);
            }
            entry.progress_ns = now_ns;
        } else if !entry.is_hung && entry.counted == [0, 0] {
            entry.progress_ns = now_ns;
        }
        let mut counted = flight;
        for class in [WAITED, BACKGROUND] {
            entry.stuck[class] = entry.stuck[class].min(flight[class]);
            counted[class] -= entry.stuck[class];
        }
        let (counted, bytes) = match counted {
            _ if entry.is_hung => ([0; 2], 0),
            _ if counted == flight => (counted, bytes),
            // The lengths of those that are stuck are not known.
            [waited, background] => {
                let part = u64::from(waited + background);
                (counted, bytes / u64::from(flight[0] + flight[1]).max(1) * part)
            }
        };
        self.count(lane, counted, bytes, now_ns);
    }

    /// Sets the requests of a lane that count as in flight.
    pub(super) fn count(&mut self, lane: usize, counted: [u32; 2], bytes: u64, now_ns: u64) {
        let before = std::mem::replace(&mut self.lanes[lane].counted_bytes, bytes);
        self.bytes = (self.bytes + bytes).saturating_sub(before);
        let member = &mut self.members[self.lanes[lane].member];
        member.bytes = (member.bytes + bytes).saturating_sub(before);
        if self.lanes[lane].counted == counted {
            return;
        }
        let index = self.lanes[lane].member;
        let was_active = self.members[index].is_active();
        if !was_active {
            self.raise(index);
        }
        let (entry, member) = (&mut self.lanes[lane], &mut self.members[index]);
        for class in [WAITED, BACKGROUND] {
            let (old, new) = (entry.counted[class], counted[class]);
            member.flight[class] = (member.flight[class] + new).saturating_sub(old);
            let before = self.flight[class];
            self.flight[class] = (before + new).saturating_sub(old);
            if class == WAITED && before > 0 && self.flight[class] == 0 {
                self.quiet_ns = now_ns;
            }
        }
        entry.counted = counted;
        self.order.set_active(index, &self.members[index], was_active);
    }

    /// Notes the end of a quiet time.
    pub(super) fn end_quiet(&mut self, now_ns: u64) {
        if self.flight[WAITED] > 0 || self.quiet_ns == 0 {
            return;
        }
        self.think.add(now_ns.saturating_sub(self.quiet_ns));
        let is_burst = now_ns < self.burst_ns.saturating_add(RECENT_NS);
        self.first = (!is_burst).then_some((now_ns & !MARK_BITS, self.has_step));
        self.has_step = false;
    }

    /// Notes that a request of a step has begun, or one that adjoins it.
    pub(super) fn begin_step(&mut self, bytes: u64, is_adjoining: bool, now_ns: u64) {
        self.has_step = true;
        self.pace.begin(bytes, is_adjoining, now_ns);
    }

    /// Notes a request of a burst.
    pub(super) fn note_burst(&mut self, now_ns: u64) {
        if now_ns >= self.burst_ns.saturating_add(RECENT_NS) {
            self.pace.relax();
        }
        self.burst_ns = now_ns;
    }

    /// Learns from a completed request of a lane.
    pub(super) fn learn(&mut self, lane: usize, completed: &Completed, now_ns: u64) {
        let begun_ns = completed.begun_ns;
        if self.is_weighted {
            self.learn_weighted(lane, completed, now_ns);
        }
        if completed.is_step {
            let is_last = self.flight[BACKGROUND] == 0;
            self.pace.complete(begun_ns, completed.bytes, is_last, now_ns);
        } else if completed.class == WAITED {
            let first = self.first.take_if(|(first_ns, _)| *first_ns == begun_ns);
            if let Some((_, had_step)) = first {
                self.pace.meet(now_ns.saturating_sub(begun_ns), had_step);
            }
        }
    }

    #[cold]
    fn learn_weighted(&mut self, lane: usize, completed: &Completed, now_ns: u64) {
        let (index, guard) = (self.lanes[lane].member, &mut self.guard);
        if guard.is_against(self.members[index].weight, now_ns) {
            guard.meet(now_ns);
        } else if completed.class == WAITED && guard.member(now_ns) == Some(index) {
            let is_lighter = |member: &Member| {
                member.flight != [0, 0] && guard.is_against(member.weight, now_ns)
            };
            if self.members.iter().any(is_lighter) {
                guard.meet(now_ns);
            }
            guard.learn(completed.begun_ns, completed.bytes, now_ns);
        }
    }

    /// Whether the disks that the [`Guard`] is against may have another request with a cost.
    pub(super) fn has_lighter_room(&self, cost: f64, now_ns: u64) -> bool {
        let lighter = self.members.iter().filter(|it| self.guard.is_against(it.weight, now_ns));
        let costs =
            lighter.map(|it| it.bytes + u64::from(it.flight[0] + it.flight[1]) * REQUEST_COST);
        let sum: u64 = costs.sum();
        sum == 0 || sum as f64 + cost <= self.guard.cost_max()
    }

    /// Whether the requests of a disk are admitted at the rate of the [`Guard`].
    pub(super) fn is_guarded_against(&self, index: usize, now_ns: u64) -> bool {
        let Some(guarded) = self.guard.member(now_ns) else { return false };
        self.guard.is_against(self.members[index].weight, now_ns)
            && self.members[guarded].waiting == 0
    }

    /// Ceases to count the requests of lanes without progress.
    pub(super) fn expire(&mut self, now_ns: u64) {
        if now_ns < self.expired_ns.saturating_add(PATIENCE_NS) {
            return;
        }
        self.expired_ns = now_ns;
        for index in 0..self.lanes.len() {
            let entry = &mut self.lanes[index];
            let is_late = now_ns >= entry.progress_ns.saturating_add(STUCK_NS);
            if entry.is_used && entry.counted != [0, 0] && is_late {
                entry.is_hung = true;
                self.stuck_total += 1;
                self.count(index, [0; 2], 0, now_ns);
            }
        }
    }

    /// Notes the source of a waited-for request.
    pub(super) fn note_flow(&mut self, member: usize, group: u32, now_ns: u64) {
        if self.flow.is_some_and(|flow| flow != (member, group)) {
            self.rivals_ns = Some(now_ns);
            self.attend(now_ns);
        }
        self.flow = Some((member, group));
    }

    /// Whether disks or control groups compete for the device.
    pub(super) fn has_rivals(&self, now_ns: u64) -> bool {
        self.rivals_ns.is_some_and(|time_ns| now_ns < time_ns.saturating_add(ATTENTION_NS))
    }

    /// Whether another request may be at the device. While disks compete, their number is bounded;
    /// on a device with several disks also their bytes, so that a disk that begins to use it meets
    /// no more of its neighbours' work.
    pub(super) fn has_room(&self, now_ns: u64) -> bool {
        let depth = self.depth;
        let has_rivals = self.has_rivals(now_ns);
        let has_place = self.flight[WAITED] + self.flight[BACKGROUND] < depth
            || self.bursts.is_empty() && !has_rivals;
        let is_bounded = self.is_shared || has_rivals;
        has_place && (!is_bounded || self.bytes < u64::from(depth) * BYTES_EACH)
    }

    /// Whether a background request may be at the device besides the bytes in flight.
    pub(super) fn has_space(&self) -> bool {
        !self.is_shared || self.bytes < WHOLE_MAX
    }

    /// Whether another background request of a burst may be in flight. Several may, so that the
    /// device can sort them, and so that a disk can use its share.
    pub(super) fn has_burst_room(&self) -> bool {
        self.flight[BACKGROUND] < (self.depth / 2).max(1) && self.has_space()
    }

    pub(super) fn charge(&mut self, index: usize, cost: f64, flow: Flow) {
        let member = &self.members[index];
        self.last_tag = member.tag;
        self.set_tag(index, member.tag + member.service(cost));
        let member = &mut self.members[index];
        if flow.key == 0 && member.groups.is_empty() {
            return;
        }
        let start = member.group_tag(flow.key);
        // Another group begins with the least tag of the waiting ones.
        let waiting = member.lanes.iter().filter_map(|lane| self.lanes[*lane].waiting);
        let least = waiting.fold(start, f64::min);
        member.groups_start = member.groups_start.max(least);
        if member.groups.len() >= GROUPS_MAX && !member.groups.contains_key(&flow.key) {
            member.groups.clear();
        }
        let used = cost * f64::from(WEIGHT) / f64::from(flow.weight.max(1));
        member.groups.insert(flow.key, start + used);
    }

    /// Whether no waited-for request is in flight or waits for its turn.
    pub(super) fn is_quiet(&self) -> bool {
        self.flight[WAITED] == 0 && self.waiting == 0
    }

    /// The number of background requests that may be in flight.
    pub(super) fn background_depth(&self, now_ns: u64) -> u32 {
        let doublings = now_ns.saturating_sub(self.quiet_ns) / RAMP_NS;
        1_u32.checked_shl(doublings.min(31) as u32).unwrap_or(u32::MAX).min(self.depth)
    }

    /// The time after which a background request of `bytes` may be admitted, in nanoseconds.
    ///
    /// # Errors
    /// If a request has to complete before that: the time after which to try again, in nanoseconds;
    /// `None` if the completion is enough.
    pub(super) fn background_wait_ns(&self, bytes: u64, now_ns: u64) -> Result<u64, Option<u64>> {
        if !self.is_quiet() || !self.has_space() {
            return Err(None);
        }
        if self.flight[BACKGROUND] >= self.background_depth(now_ns) {
            return Err(Some(RAMP_NS));
        }
        let quiet_ns = now_ns.saturating_sub(self.quiet_ns);
        // A longer pause than those that are remembered ends the wait.
        Ok(self.think.wait_ns(quiet_ns, self.pace.step_ns(bytes, now_ns)))
    }

    pub(super) fn rest(&mut self, lane: usize, rest: &Rest) {
        let entry = &mut self.lanes[lane];
        let (index, member) = (entry.member, &mut self.members[entry.member]);
        member.held_cost +=
            rest.held_cost - std::mem::replace(&mut entry.held_cost, rest.held_cost);
        let has_changed = entry.waiting != rest.waiting || (entry.held > 0) != (rest.held > 0);
        if !has_changed && entry.burst.is_none() && rest.burst.is_none() {
            entry.held = rest.held;
            return;
        }
        let was_active = member.is_active();
        let change = |count: &mut u32, before: bool, after: bool| {
            *count = (*count + u32::from(after)).saturating_sub(u32::from(before));
        };
        for count in [&mut self.waiting, &mut member.waiting] {
            change(count, entry.waiting.is_some(), rest.waiting.is_some());
        }
        for count in [&mut self.holding, &mut member.holding] {
            change(count, entry.held > 0, rest.held > 0);
        }
        if entry.burst.is_some() != rest.burst.is_some() {
            self.bursts.retain(|other| *other != lane);
            self.bursts.extend(rest.burst.map(|_| lane));
        }
        (entry.waiting, entry.held) = (rest.waiting, rest.held);
        entry.burst = rest.burst.map(|cost| member.burst_lag(cost));
        self.order.set_active(index, &self.members[index], was_active);
        if has_changed {
            self.rank(index);
        }
    }

    /// Ends a turn.
    pub(super) fn finish(&mut self, lane: usize, rest: &Rest, now_ns: u64) -> Turn {
        self.rest(lane, rest);
        if self.waiting == 0 && self.holding == 0 {
            let is_over = now_ns >= self.until_ns && self.flight[BACKGROUND] == 0;
            if is_over && !self.has_rivals(now_ns) {
                self.is_attentive = false;
            }
            return Turn::default();
        }
        if self.waiting > 0 || !self.bursts.is_empty() {
            let call = self.has_room(now_ns).then(|| self.call(lane, now_ns, true)).flatten();
            if call.is_some() || self.waiting > 0 {
                return Turn { call, wait_ns: None };
            }
        }
        match self.background_wait_ns(0, now_ns) {
            Ok(0) => Turn { call: self.call(lane, now_ns, false), wait_ns: None },
            Ok(wait_ns) | Err(Some(wait_ns)) => Turn { call: None, wait_ns: Some(wait_ns) },
            Err(None) => Turn::default(),
        }
    }
}
