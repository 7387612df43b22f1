//! Which lane is next, of those with requests that wait for their turn or are held.
//!
//! The disks with a claim are ranked by their tags ([`Ranking`]), so that a turn does not look at
//! all lanes. A lane that was called and takes no turn for [`PATIENCE_NS`] is **silent**: it has no
//! claim until it takes one.

use fathom_block::Waker;

use super::rank::{Claim, Ranking};
use super::state::{Entry, Flow, LEAD, Member, PATIENCE_NS, RECENT_NS, State, WAITED};

/// The disks, in the order of their tags.
#[derive(Debug)]
pub(super) struct Order {
    /// Those with waiting and with held requests in lanes that are not silent.
    pub waiting: Ranking,
    pub holding: Ranking,
    /// Those with any requests.
    pub active: Ranking,
    /// A time before which no lane was called that has neither taken a turn nor become silent, in
    /// nanoseconds.
    pub called_ns: u64,
}

impl Default for Order {
    fn default() -> Self {
        let [waiting, holding, active] = [(); 3].map(|()| Ranking::default());
        Self { waiting, holding, active, called_ns: u64::MAX }
    }
}

impl Order {
    /// Adds a disk to the active ones, or removes it, if this has changed.
    pub(super) fn set_active(&mut self, index: usize, member: &Member, was_active: bool) {
        let is_active = member.is_active();
        if is_active != was_active {
            let claim = Claim { tag: member.tag, head: 0.0, lane: index };
            self.active.set(index, is_active.then_some(claim));
        }
    }
}

/// The least tags of disks with waited-for requests.
pub(super) struct LeastWaiting {
    member: usize,
    tag: f64,
    /// The least one of the others.
    second: f64,
}

impl LeastWaiting {
    /// The least tag without that of a disk; `None` if there is no other disk.
    pub(super) fn without(&self, member: usize) -> Option<f64> {
        let least = if self.member == member { self.second } else { self.tag };
        least.is_finite().then_some(least)
    }
}

impl State {
    /// The least tags of the disks with waited-for requests, now or a short time ago.
    pub(super) fn least_waiting(&self, now_ns: u64) -> LeastWaiting {
        let (member, tag, second) = (usize::MAX, f64::INFINITY, f64::INFINITY);
        let mut least = LeastWaiting { member, tag, second };
        for (index, member) in self.members.iter().enumerate() {
            let is_waiting = member.flight[WAITED] > 0
                || member.waiting > 0
                || now_ns < member.waited_ns.saturating_add(RECENT_NS);
            if !member.is_used || !is_waiting {
                continue;
            }
            if member.tag < least.tag {
                least = LeastWaiting { member: index, tag: member.tag, second: least.tag };
            } else {
                least.second = least.second.min(member.tag);
            }
        }
        least
    }

    /// Whether a disk may pass on a request of a burst, if its tag is to be `behind` the `least`
    /// one of the waiting disks. While no process waits, background requests pass in steps, which
    /// end in time: a burst would meet the next request that a process waits for. Only one that is
    /// due begins then.
    pub(super) fn may_burst(&self, member: usize, behind: f64, least: Option<f64>) -> bool {
        least
            .map_or(behind == f64::NEG_INFINITY, |least| self.members[member].tag + behind <= least)
    }

    /// Raises the tag of a disk that does not wait: a disk saves up no service that it has not
    /// asked for. Its tag is at least the least tag of the active disks, or else that of the last
    /// disk. If the disk is active, it may be behind the last disk by what it holds.
    pub(super) fn raise(&mut self, index: usize) {
        let member = &self.members[index];
        let least = if !member.is_active() {
            let least = self.order.active.least();
            if least.is_finite() { least } else { self.last_tag }
        } else if member.waiting == 0 {
            let last = self.last_tag.min(self.order.waiting.least());
            last - LEAD - member.burst_lag(member.held_cost)
        } else {
            return;
        };
        if member.tag < least {
            self.set_tag(index, least);
        }
    }

    /// Sets the tag of a disk.
    pub(super) fn set_tag(&mut self, index: usize, tag: f64) {
        self.members[index].tag = tag;
        let Order { waiting, holding, active, .. } = &mut self.order;
        for ranking in [waiting, holding, active] {
            ranking.set_tag(index, tag);
        }
    }

    /// Ranks a disk after a change of its lanes.
    pub(super) fn rank(&mut self, index: usize) {
        let Member { tag, lanes, .. } = &self.members[index];
        let least = |head: fn(&Entry) -> Option<f64>| {
            let claims = lanes.iter().filter_map(|lane| {
                let entry = &self.lanes[*lane];
                let head = head(entry).filter(|_| !entry.is_silent)?;
                Some(Claim { tag: *tag, head, lane: *lane })
            });
            claims.reduce(|one, other| if other.is_before(&one) { other } else { one })
        };
        let waiting = least(|entry| entry.waiting);
        let holding = least(|entry| (entry.held > 0).then_some(0.0));
        self.order.waiting.set(index, waiting);
        self.order.holding.set(index, holding);
    }

    /// Notes that a lane takes a turn.
    pub(super) fn answer(&mut self, lane: usize) {
        let entry = &mut self.lanes[lane];
        entry.called_ns = 0;
        if std::mem::take(&mut entry.is_silent) {
            let member = entry.member;
            self.rank(member);
        }
    }

    /// Notes the lanes that were called long ago.
    pub(super) fn silence(&mut self, now_ns: u64) {
        if now_ns < self.order.called_ns.saturating_add(PATIENCE_NS) {
            return;
        }
        self.order.called_ns = u64::MAX;
        for index in 0..self.lanes.len() {
            let entry = &mut self.lanes[index];
            if entry.called_ns == 0 || entry.is_silent {
                continue;
            }
            if now_ns < entry.called_ns.saturating_add(PATIENCE_NS) {
                self.order.called_ns = self.order.called_ns.min(entry.called_ns);
            } else {
                entry.is_silent = true;
                let member = entry.member;
                self.rank(member);
            }
        }
    }

    /// Whether lighter disks wait for the time of the guard.
    fn has_held(&self) -> bool {
        self.is_weighted
            && self.time_ns < self.guard.until_ns()
            && self.guard.member(self.time_ns).is_some()
    }

    /// The least tag of the disks with waiting requests that a disk may have to wait for.
    fn least_claim(&self, index: usize) -> f64 {
        let weight = self.members[index].weight;
        if !self.has_held() || self.guard.is_against(weight, self.time_ns) {
            return self.order.waiting.least();
        }
        // Lighter disks do not keep it from its share while they wait for their time.
        let others = self.members.iter().filter(|it| {
            it.is_used && it.waiting > 0 && !self.guard.is_against(it.weight, self.time_ns)
        });
        others.map(|it| it.tag).fold(f64::INFINITY, f64::min)
    }

    /// Whether a request of a lane waits for the waiting requests of another lane.
    pub(super) fn must_yield(&self, lane: usize, flow: Flow) -> bool {
        let own = &self.lanes[lane];
        let member = &self.members[own.member];
        // The disk itself is not behind itself.
        if self.least_claim(own.member) + LEAD < member.tag {
            return true;
        }
        let others = member.waiting - u32::from(own.waiting.is_some());
        if others > 0 {
            let limit = member.group_tag(flow.key);
            let heads = member.lanes.iter().filter(|index| **index != lane);
            let mut heads = heads.map(|index| &self.lanes[*index]).filter(|it| !it.is_silent);
            if heads.any(|other| other.waiting.is_some_and(|head| head + LEAD < limit)) {
                return true;
            }
        }
        !self.bursts.is_empty() && self.has_burst_room() && {
            let mut bursts = self.bursts.iter().map(|index| &self.lanes[*index]);
            bursts.any(|other| {
                let is_other = other.member != own.member && !other.is_silent;
                is_other
                    && other.waiting.is_none()
                    && other.burst.is_some_and(|behind| {
                        self.members[other.member].tag + behind + LEAD < member.tag
                    })
            })
        }
    }

    /// The lane that is next, of those with a claim to a share or of those with held requests.
    pub(super) fn next(&self, now_ns: u64, is_claim: bool) -> Option<usize> {
        let ranking = if is_claim { &self.order.waiting } else { &self.order.holding };
        let mut first = ranking.first();
        if is_claim && !self.bursts.is_empty() && self.has_burst_room() {
            let least = self.least_waiting(now_ns);
            for index in &self.bursts {
                let entry = &self.lanes[*index];
                let tag = self.members[entry.member].tag;
                let others = least.without(entry.member);
                let may_burst = |behind| self.may_burst(entry.member, behind, others);
                // Others yield to a burst that is due, whatever its disk has had.
                let is_due = entry.burst == Some(f64::NEG_INFINITY);
                let tag = if is_due { f64::NEG_INFINITY } else { tag };
                let claim = Claim { tag, head: 0.0, lane: *index };
                if entry.waiting.is_none()
                    && !entry.is_silent
                    && entry.burst.is_some_and(may_burst)
                    && first.is_none_or(|first| claim.is_before(&first))
                {
                    first = Some(claim);
                }
            }
        }
        let is_held = |lane: usize| {
            let index = self.lanes[lane].member;
            self.has_held() && self.is_guarded_against(index, self.time_ns)
        };
        if is_claim && first.is_some_and(|first| is_held(first.lane)) {
            // It comes by itself.
            return self.heaviest_claim();
        }
        first.map(|first| first.lane)
    }

    /// The lane that is next, of those of disks that the guard is not against.
    #[cold]
    fn heaviest_claim(&self) -> Option<usize> {
        let claims = self.lanes.iter().enumerate().filter_map(|(lane, entry)| {
            let member = &self.members[entry.member];
            let head = entry.waiting.filter(|_| entry.is_used && !entry.is_silent)?;
            let is_against = self.guard.is_against(member.weight, self.time_ns);
            (!is_against).then_some(Claim { tag: member.tag, head, lane })
        });
        let first = claims.reduce(|one, other| if other.is_before(&one) { other } else { one });
        first.map(|first| first.lane)
    }

    /// The waker of the lane that is next; `None` if that is `lane` itself, or if it was called
    /// already.
    pub(super) fn call(&mut self, lane: usize, now_ns: u64, is_claim: bool) -> Option<Waker> {
        let next = self.next(now_ns, is_claim)?;
        let entry = &mut self.lanes[next];
        if next == lane || entry.called_ns > 0 {
            return None;
        }
        entry.called_ns = now_ns;
        self.order.called_ns = self.order.called_ns.min(now_ns);
        Some(entry.waker.clone())
    }
}
