//! A limit and the disks that share it.
//!
//! Waiting disks get equal shares of the limit by start-time fair queueing: a disk yields to a
//! waiting disk that has used less of the limit. The use of a request is the time in which the
//! limit admits its cost. A disk that does not wait reserves nothing, so the limit is used in full.

use std::sync::Arc;

use fathom_block::{Shared, Waker};

use super::rates::{Buckets, Cost, Direction, Rates};

/// The most by which the use of a disk may exceed that of a waiting disk, in seconds of the limit.
/// With a high limit, disks alternate in steps of this size. It is also the credit of an idle disk.
const LEAD_MAX: f64 = 0.001;
/// The most by which the disk with the least use may exceed the limit, in nanoseconds of the limit.
const OVERDRAFT_NS_MAX: u64 = 1_000_000;
/// The longest time for which disks yield to a disk that does not take its share, in nanoseconds.
/// Its thread may not be scheduled, or its queue may be closed.
const PATIENCE_NS: u64 = 10_000_000;
/// The longest time for which a disk pays for requests that passed without admission, in
/// nanoseconds.
const DEBT_NS_MAX: u64 = 60_000_000_000;
/// The shortest wait, in nanoseconds. With a high limit, several requests are admitted in one step,
/// because a thread that sleeps and wakes for each request would use most of its processor's time
/// for that. The buckets are many times larger, so the rate is not reduced.
pub const WAIT_NS_MIN: u64 = 250_000;

/// A disk within a group.
#[derive(Clone, Copy, Debug, Default)]
struct Member {
    /// Whether a disk uses this place.
    is_used: bool,
    /// The disk's use of the limit by reads and by writes, in seconds. Only the first is used if
    /// both share a rate.
    used: [f64; 2],
    /// For each direction in which the disk waits, the time at which its next request can be
    /// admitted, in nanoseconds.
    due_ns: [Option<u64>; 2],
    /// The time until which the disk has to wait for what has passed without admission, in
    /// nanoseconds.
    debt_ns: u64,
}

struct State {
    rates: Rates,
    buckets: Buckets,
    time_ns: u64,
    members: Vec<Member>,
    /// The number of directions in which members wait.
    waiting: usize,
    /// The least use among the active disks, by reads and by writes, in seconds: the use with which
    /// another disk begins.
    start: [f64; 2],
}

/// A limit, shared by the queues of one or more disks.
pub struct Group {
    state: Shared<State>,
}

impl Group {
    /// A limit of `rates`.
    pub fn new(rates: Rates) -> Self {
        Self {
            state: Shared::new(State {
                rates,
                buckets: Buckets::default(),
                time_ns: 0,
                members: Vec::new(),
                waiting: 0,
                start: [0.0; 2],
            }),
        }
    }

    /// The current rates.
    pub fn rates(&self) -> Rates {
        self.state.access(|state| state.rates)
    }

    /// Sets other rates. The buckets keep their levels. The new rates also apply to waiting
    /// requests.
    pub fn set_rates(&self, rates: Rates) {
        self.state.access(|state| {
            let old = std::mem::replace(&mut state.rates, rates);
            state.buckets.change(&old, &rates);
        });
        self.state.wake();
    }

    /// Adds a disk.
    pub fn join(self: &Arc<Self>) -> Arc<Place> {
        let index = self.state.access(|state| {
            let free = state.members.iter().position(|member| !member.is_used);
            let index = free.unwrap_or_else(|| {
                state.members.push(Member::default());
                state.members.len() - 1
            });
            state.members[index] = Member { is_used: true, used: state.start, ..Member::default() };
            index
        });
        Arc::new(Place { group: Arc::clone(self), index })
    }
}

/// The place of a disk in a group, shared by the disk's queues. The disk leaves the group when the
/// last owner drops the place.
pub struct Place {
    group: Arc<Group>,
    index: usize,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.settle();
        self.group.state.access(|state| state.members[self.index].is_used = false);
    }
}

impl Place {
    /// The group.
    pub fn group(&self) -> &Arc<Group> {
        &self.group
    }

    /// Admits requests at `now_ns`, under one lock. `requests` gets a [`Gate`] and returns the time
    /// after which to try again, in nanoseconds; `None` if no request waits. A change of the rates
    /// uses `waker` before that time.
    pub fn admit(
        &self,
        now_ns: u64,
        waker: &Waker,
        requests: impl FnOnce(&mut Gate<'_>) -> Option<u64>,
    ) -> Option<u64> {
        let mut wait_ns = None;
        self.group.state.attempt(waker, |state| {
            state.leak(now_ns);
            wait_ns = requests(&mut Gate { state, index: self.index, now_ns });
            wait_ns.is_none().then_some(())
        });
        wait_ns
    }

    /// Marks the disk as not waiting.
    pub fn settle(&self) {
        self.group.state.access(|state| {
            for direction in Direction::ALL {
                state.set_due(self.index, direction, None);
            }
        });
    }

    /// Charges the cost of a request that is passed on without admission at `now_ns`. If the limit
    /// would not have admitted it, the other disks do not pay for it: this disk waits for as long
    /// as the limit needs for the request.
    pub fn charge(&self, cost: Cost, now_ns: u64) {
        self.group.state.access(|state| {
            state.leak(now_ns);
            if state.buckets.wait_ns(&state.rates, cost.direction) == 0 {
                return state.charge(self.index, cost);
            }
            // No bucket of the limit is charged.
            let needed_ns = (Buckets::default().charge(&state.rates, cost) * 1e9) as u64;
            let member = &mut state.members[self.index];
            let debt_ns = member.debt_ns.max(now_ns).saturating_add(needed_ns);
            member.debt_ns = debt_ns.min(now_ns.saturating_add(DEBT_NS_MAX));
        });
    }
}

/// Admits requests of one disk.
pub struct Gate<'a> {
    state: &'a mut State,
    index: usize,
    now_ns: u64,
}

impl Gate<'_> {
    /// Admits a request.
    ///
    /// # Errors
    /// If the request has to wait: the time after which to try again, in nanoseconds.
    pub fn admit(&mut self, cost: Cost) -> Result<(), u64> {
        let Self { index, now_ns, .. } = *self;
        let debt_ns = self.state.members[index].debt_ns;
        if debt_ns > now_ns && self.state.rates.is_limited() {
            self.state.set_due(index, cost.direction, Some(debt_ns));
            return Err((debt_ns - now_ns).max(WAIT_NS_MIN));
        }
        let wait_ns = self.state.buckets.wait_ns(&self.state.rates, cost.direction);
        if wait_ns > 0 && !self.state.may_overdraw(index, cost.direction, now_ns, wait_ns) {
            let due_ns = now_ns.saturating_add(wait_ns);
            self.state.set_due(index, cost.direction, Some(due_ns));
            return Err(wait_ns.max(WAIT_NS_MIN));
        }
        if wait_ns == 0 && self.state.must_yield(index, cost.direction, now_ns) {
            self.state.set_due(index, cost.direction, Some(now_ns));
            return Err(WAIT_NS_MIN);
        }
        self.state.charge(index, cost);
        Ok(())
    }

    /// Admits a request of a queue in which older requests of the other direction wait. If both
    /// directions share a rate, the older requests are first.
    ///
    /// # Errors
    /// If the request has to wait: the time after which to try again, in nanoseconds.
    pub fn admit_behind(&mut self, cost: Cost) -> Result<(), u64> {
        if self.state.rates.has_total() {
            self.state.set_due(self.index, cost.direction, Some(self.now_ns));
            return Err(WAIT_NS_MIN);
        }
        self.admit(cost)
    }

    /// Marks the disk as not waiting in `direction`.
    pub fn settle(&mut self, direction: Direction) {
        self.state.set_due(self.index, direction, None);
    }
}

impl State {
    fn leak(&mut self, now_ns: u64) {
        let elapsed_ns = now_ns.saturating_sub(self.time_ns);
        if elapsed_ns > 0 {
            self.time_ns = now_ns;
            self.buckets.leak(&self.rates, elapsed_ns);
        }
    }

    /// The position in `used` and `start` for the requests of a direction.
    fn account(&self, direction: Direction) -> usize {
        if self.rates.has_total() { 0 } else { direction as usize }
    }

    fn set_due(&mut self, index: usize, direction: Direction, due_ns: Option<u64>) {
        let account = self.account(direction);
        let start = self.start[account];
        let member = &mut self.members[index];
        let place = &mut member.due_ns[direction as usize];
        match (place.is_some(), due_ns.is_some()) {
            (false, true) => {
                self.waiting += 1;
                // The credit of an idle disk is limited.
                member.used[account] = member.used[account].max(start - LEAD_MAX);
            }
            (true, false) => self.waiting -= 1,
            _ => {}
        }
        *place = due_ns;
    }

    /// The least use among the other disks that wait and whose next request can be admitted.
    fn least_used(&self, index: usize, account: usize, now_ns: u64) -> Option<f64> {
        if self.waiting == 0 {
            return None;
        }
        let shared = self.rates.has_total();
        let can_go_on = |member: &Member| {
            let due_ns = if shared {
                member.due_ns[0].into_iter().chain(member.due_ns[1]).min()
            } else {
                member.due_ns[account]
            };
            due_ns.is_some_and(|due_ns| {
                due_ns <= now_ns.saturating_add(WAIT_NS_MIN)
                    && now_ns <= due_ns.saturating_add(PATIENCE_NS)
            })
        };
        let others = self.members.iter().enumerate().filter(|(other, _)| *other != index);
        let used =
            others.filter(|(_, member)| can_go_on(member)).map(|(_, member)| member.used[account]);
        used.min_by(f64::total_cmp)
    }

    /// Whether the disk yields to another disk.
    fn must_yield(&self, index: usize, direction: Direction, now_ns: u64) -> bool {
        let account = self.account(direction);
        let least = self.least_used(index, account, now_ns);
        least.is_some_and(|least| self.members[index].used[account] > least + LEAD_MAX)
    }

    /// Whether a disk is admitted although the bucket is full, because a waiting disk has used
    /// more. That disk then waits longer. So a disk with few requests in flight also gets its
    /// share, with short waits.
    fn may_overdraw(&self, index: usize, direction: Direction, now_ns: u64, wait_ns: u64) -> bool {
        let account = self.account(direction);
        let used = self.members[index].used[account].max(self.start[account] - LEAD_MAX);
        wait_ns <= OVERDRAFT_NS_MAX
            && self.least_used(index, account, now_ns).is_some_and(|least| used < least)
    }

    fn charge(&mut self, index: usize, cost: Cost) {
        let account = self.account(cost.direction);
        let rates = self.rates;
        let seconds = self.buckets.charge(&rates, cost);
        let start = self.start[account];
        let member = &mut self.members[index];
        let used = member.used[account].max(start - LEAD_MAX);
        member.used[account] = used + seconds;
        // If no other disk waits, the next disk begins with the use of this disk.
        let others = self.least_used(index, account, self.time_ns);
        self.start[account] = start.max(others.map_or(used, |least| least.min(used)));
    }
}
