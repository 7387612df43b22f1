//! The rules of a limit: which of the waiting requests is next, and when.
//!
//! Each waiting request of each queue has a ticket. The tickets of a disk are served in the order
//! of arrival, whatever queues they are of: the longest wait is that of one common queue. Disks get
//! equal shares by start-time fair queueing: the disk is next that has used least of the limit.
//!
//! Tickets are granted in rounds. One of the queues with tickets holds the timer of the next round;
//! it grants tickets of all queues, and calls those that got some. If its thread does not run, the
//! next queue takes over after [`PATIENCE_NS`].

use std::collections::VecDeque;

use fathom_block::Waker;

use super::rates::{Buckets, Cost, Direction, Rates};

/// The credit of an idle disk, in seconds of the limit.
const LEAD_MAX: f64 = 0.001;
/// The most by which the disk with the least use may exceed the limit, in nanoseconds of the limit.
const OVERDRAFT_NS_MAX: u64 = 1_000_000;
/// The time by which the holder of the timer may be late before another queue takes over, in
/// nanoseconds.
const PATIENCE_NS: u64 = 10_000_000;
/// The longest time for which a disk pays for requests that passed without admission, in
/// nanoseconds.
const DEBT_NS_MAX: u64 = 60_000_000_000;
/// The shortest time between two rounds, in nanoseconds. With a high limit, several requests are
/// admitted in one round, because threads that sleep and wake for each request would use most of
/// their processors' time for that. The buckets are many times larger, so the rate is not reduced.
const ROUND_NS_MIN: u64 = 250_000;

/// The most by which a round may be late without another queue taking over, in nanoseconds: times
/// are rounded.
const SLACK_NS: u64 = 1_000;

/// A waiting request.
struct Ticket {
    seat: usize,
    /// The position in the order of arrival.
    number: u64,
    cost: Cost,
}

/// A disk.
#[derive(Default)]
struct Member {
    is_used: bool,
    /// The disk's use of the limit by reads and by writes, in seconds. Only the first is used if
    /// both share a rate.
    used: [f64; 2],
    /// Its tickets by direction, in the order of arrival.
    tickets: [VecDeque<Ticket>; 2],
    /// The time until which the disk has to wait for what has passed without admission, in
    /// nanoseconds; 0 if it has paid.
    debt_ns: u64,
}

/// A queue of a disk.
struct Seat {
    is_used: bool,
    member: usize,
    /// The number of its tickets.
    tickets: usize,
    /// The number of granted requests by direction that the queue has not taken yet.
    granted: [u32; 2],
    /// Whether the queue has been called and has not come yet.
    is_called: bool,
    waker: Waker,
}

/// The next round.
#[derive(Clone, Copy)]
struct Timer {
    seat: usize,
    due_ns: u64,
}

/// What a queue gets from the limit.
#[derive(Debug, Default)]
pub struct Turn {
    /// The number of the queue's oldest waiting requests by direction that are admitted now.
    pub granted: [u32; 2],
    /// The time at which the queue has to come again, in nanoseconds; `None` if it is called.
    pub again_ns: Option<u64>,
}

/// The requests that a queue takes back.
#[derive(Debug, Default)]
pub struct TakenBack {
    /// The numbers of the tickets that stay, sorted.
    pub kept: Vec<u64>,
    /// The costs of granted requests that are not carried out: the limit gets them back.
    pub spent: Vec<Cost>,
    /// The costs of requests without a grant that are passed on.
    pub passed: Vec<Cost>,
}

/// The state of a limit.
pub struct State {
    rates: Rates,
    buckets: Buckets,
    time_ns: u64,
    members: Vec<Member>,
    seats: Vec<Seat>,
    /// The number of all tickets, and of those that have been given out.
    waiting: usize,
    numbers: u64,
    /// `None` if no request waits.
    timer: Option<Timer>,
    /// The least use among the active disks, by reads and by writes, in seconds: the use with which
    /// another disk begins.
    start: [f64; 2],
}

impl State {
    pub fn new(rates: Rates) -> Self {
        Self {
            rates,
            buckets: Buckets::default(),
            time_ns: 0,
            members: Vec::new(),
            seats: Vec::new(),
            waiting: 0,
            numbers: 0,
            timer: None,
            start: [0.0; 2],
        }
    }

    pub fn rates(&self) -> Rates {
        self.rates
    }

    /// Sets other rates. Returns the wakers of the queues with waiting requests, for which the new
    /// rates apply, too.
    pub fn set_rates(&mut self, rates: Rates) -> Vec<Waker> {
        let old = std::mem::replace(&mut self.rates, rates);
        self.buckets.change(&old, &rates);
        // The first queue that comes makes a round.
        self.timer = None;
        let seats = self.seats.iter().filter(|seat| seat.is_used && seat.tickets > 0);
        seats.map(|seat| seat.waker.clone()).collect()
    }

    /// Adds a disk.
    pub fn join(&mut self) -> usize {
        let free = self.members.iter().position(|member| !member.is_used);
        let index = free.unwrap_or(self.members.len());
        let member = Member { is_used: true, used: self.start, ..Member::default() };
        match self.members.get_mut(index) {
            Some(place) => *place = member,
            None => self.members.push(member),
        }
        index
    }

    /// Removes a disk, whose queues have all been closed.
    pub fn leave(&mut self, index: usize) {
        self.members[index].is_used = false;
    }

    /// Adds a queue of a disk.
    pub fn sit_down(&mut self, member: usize, waker: Waker) -> usize {
        let free = self.seats.iter().position(|seat| !seat.is_used);
        let index = free.unwrap_or(self.seats.len());
        let seat =
            Seat { is_used: true, member, tickets: 0, granted: [0; 2], is_called: false, waker };
        match self.seats.get_mut(index) {
            Some(place) => *place = seat,
            None => self.seats.push(seat),
        }
        index
    }

    /// Removes a queue with its tickets.
    pub fn stand_up(&mut self, seat: usize, calls: &mut Vec<Waker>) {
        self.take_back(seat, |_| TakenBack::default(), self.time_ns, calls);
        self.seats[seat].is_used = false;
    }

    pub fn leak(&mut self, now_ns: u64) {
        let elapsed_ns = now_ns.saturating_sub(self.time_ns);
        if elapsed_ns > 0 {
            self.time_ns = now_ns;
            self.buckets.leak(&self.rates, elapsed_ns);
        }
    }

    /// Admits a request if no request waits and the limit has room for it.
    #[inline]
    pub fn admit(&mut self, seat: usize, cost: Cost, now_ns: u64) -> bool {
        self.leak(now_ns);
        let member = self.seats[seat].member;
        if self.waiting > 0
            || self.is_indebted(member, now_ns)
            || self.buckets.wait_ns(&self.rates, cost.direction) > 0
        {
            return false;
        }
        self.charge(member, cost);
        true
    }

    /// Gives a ticket to a request. Returns its number and what the queue gets.
    pub fn enter(
        &mut self,
        seat: usize,
        cost: Cost,
        now_ns: u64,
        calls: &mut Vec<Waker>,
    ) -> (u64, Turn) {
        self.leak(now_ns);
        let (number, index) = (self.numbers, self.seats[seat].member);
        self.numbers += 1;
        if !self.has_tickets(index, self.account(cost.direction)) {
            self.raise(index);
        }
        let tickets = &mut self.members[index].tickets[cost.direction as usize];
        tickets.push_back(Ticket { seat, number, cost });
        self.seats[seat].tickets += 1;
        self.waiting += 1;
        if self.timer.is_some_and(|timer| timer.due_ns > now_ns) {
            // The others are served in the next round.
            let next = self.next(cost.direction, now_ns, true);
            let is_first = |(index, direction): (usize, Direction)| {
                let first = self.members[index].tickets[direction as usize].front();
                first.is_some_and(|first| first.number == number)
            };
            if next.is_some_and(is_first) {
                self.grant(index, cost.direction, seat, calls);
            }
        } else {
            self.serve(seat, now_ns, calls);
        }
        (number, self.end(seat, now_ns, calls))
    }

    /// A queue with waiting requests comes because it was called, or because of the time.
    pub fn come(&mut self, seat: usize, now_ns: u64, calls: &mut Vec<Waker>) -> Turn {
        self.leak(now_ns);
        if self.timer.is_none_or(|timer| timer.due_ns <= now_ns) {
            self.serve(seat, now_ns, calls);
        }
        self.end(seat, now_ns, calls)
    }

    /// Takes back requests of a queue. `decide` gets the numbers of granted requests by direction
    /// that the queue has not taken yet.
    pub fn take_back(
        &mut self,
        seat: usize,
        decide: impl FnOnce([u32; 2]) -> TakenBack,
        now_ns: u64,
        calls: &mut Vec<Waker>,
    ) -> Option<u64> {
        self.leak(now_ns);
        let granted = std::mem::take(&mut self.seats[seat].granted);
        let TakenBack { kept, spent, passed } = decide(granted);
        let (index, rates) = (self.seats[seat].member, self.rates);
        for cost in &spent {
            let account = self.account(cost.direction);
            self.members[index].used[account] -= self.buckets.give_back(&rates, *cost);
        }
        let mut left = 0;
        for tickets in &mut self.members[index].tickets {
            let before = tickets.len();
            tickets.retain(|it| it.seat != seat || kept.binary_search(&it.number).is_ok());
            left += before - tickets.len();
        }
        self.seats[seat].tickets -= left;
        self.waiting -= left;
        for cost in passed {
            self.charge_unadmitted(seat, cost, now_ns);
        }
        if !spent.is_empty() {
            // There may be room for others now.
            self.timer = None;
        }
        self.end(seat, now_ns, calls).again_ns
    }

    /// The requests that the queue gets, and the time of the next round.
    fn end(&mut self, seat: usize, now_ns: u64, calls: &mut Vec<Waker>) -> Turn {
        let again_ns = self.arm(seat, now_ns, calls);
        let own = &mut self.seats[seat];
        own.is_called = false;
        Turn { granted: std::mem::take(&mut own.granted), again_ns }
    }

    /// Decides who makes the next round, and when. Returns when the queue has to come again.
    fn arm(&mut self, seat: usize, now_ns: u64, calls: &mut Vec<Waker>) -> Option<u64> {
        let has_tickets = self.seats[seat].tickets > 0;
        let Some(due_ns) = self.next_round_ns(now_ns) else {
            self.timer = None;
            return None;
        };
        if let Some(timer) = self.timer {
            let is_good = timer.due_ns > now_ns && timer.due_ns <= due_ns.saturating_add(SLACK_NS);
            if is_good && self.seats[timer.seat].tickets > 0 {
                let late_ns = if timer.seat == seat { 0 } else { PATIENCE_NS };
                return has_tickets.then(|| timer.due_ns.saturating_add(late_ns));
            }
        }
        let holder = if has_tickets { Some(seat) } else { self.first_seat() };
        self.timer = holder.map(|seat| Timer { seat, due_ns });
        if let Some(holder) = holder.filter(|holder| *holder != seat) {
            self.call(holder, calls);
        }
        has_tickets.then_some(due_ns)
    }

    /// The time of the next round, in nanoseconds; `None` if no request waits.
    fn next_round_ns(&self, now_ns: u64) -> Option<u64> {
        if self.waiting == 0 {
            return None;
        }
        let waits = self.waits_ns();
        let due = self.members.iter().enumerate().flat_map(|(index, member)| {
            let is_indebted = self.is_indebted(index, now_ns);
            let debt_ns = if is_indebted { member.debt_ns - now_ns } else { 0 };
            let directions = Direction::ALL.into_iter().map(|it| it as usize);
            let waiting = directions.filter(|it| !member.tickets[*it].is_empty());
            waiting.map(move |direction| waits[direction].max(debt_ns))
        });
        due.min().map(|wait_ns| now_ns.saturating_add(wait_ns.max(ROUND_NS_MIN)))
    }

    /// The queue of the oldest ticket.
    fn first_seat(&self) -> Option<usize> {
        let tickets = self.members.iter().flat_map(|member| &member.tickets);
        let first = tickets.filter_map(VecDeque::front).min_by_key(|ticket| ticket.number);
        first.map(|ticket| ticket.seat)
    }

    /// Makes a round: grants what the limit has room for.
    fn serve(&mut self, seat: usize, now_ns: u64, calls: &mut Vec<Waker>) {
        for index in 0..self.members.len() {
            let debt_ns = self.members[index].debt_ns;
            if debt_ns > 0 && debt_ns <= now_ns {
                self.members[index].debt_ns = 0;
                // It has not waited for its share meanwhile.
                self.raise(index);
            }
        }
        for direction in Direction::ALL {
            while let Some((index, direction)) = self.next(direction, now_ns, false) {
                self.grant(index, direction, seat, calls);
            }
        }
    }

    /// The next disk with its direction, of those that the limit has room for. If both directions
    /// share a rate, `direction` stands for both.
    ///
    /// If `may_overdraw`, a disk is also next although the bucket is full, if all other disks that
    /// wait have used more. They then wait longer. So a disk with few requests in flight also gets
    /// its share, with short waits.
    fn next(
        &self,
        direction: Direction,
        now_ns: u64,
        may_overdraw: bool,
    ) -> Option<(usize, Direction)> {
        if self.waiting == 0 {
            return None;
        }
        let (waits, account) = (self.waits_ns(), self.account(direction));
        let is_meant = |it: Direction| self.account(it) == account;
        let oldest = |member: &Member, wait_ns_max: u64| {
            let directions = Direction::ALL.into_iter().filter(|it| is_meant(*it));
            let open = directions.filter(|it| waits[*it as usize] <= wait_ns_max);
            let first = |it: Direction| Some((member.tickets[it as usize].front()?.number, it));
            open.filter_map(first).min_by_key(|(number, _)| *number)
        };
        let before = |one: &(f64, u64), other: &(f64, u64)| {
            one.0.total_cmp(&other.0).then(one.1.cmp(&other.1))
        };
        let mut next: Option<((f64, u64), (usize, Direction))> = None;
        // The disk with the least use that may overdraw, and the least use of the others.
        let mut least: Option<((f64, u64), (usize, Direction))> = None;
        let mut second = f64::INFINITY;
        for (index, member) in self.members.iter().enumerate() {
            if !member.is_used || self.is_indebted(index, now_ns) {
                continue;
            }
            let used = member.used[account];
            if let Some((number, direction)) = oldest(member, 0) {
                let key = (used, number);
                if next.as_ref().is_none_or(|(other, _)| before(&key, other).is_lt()) {
                    next = Some((key, (index, direction)));
                }
            }
            if !may_overdraw {
                continue;
            }
            if let Some((number, direction)) = oldest(member, OVERDRAFT_NS_MAX) {
                let key = (used, number);
                if least.as_ref().is_none_or(|(other, _)| before(&key, other).is_lt()) {
                    second = least.map_or(second, |((used, _), _)| used);
                    least = Some((key, (index, direction)));
                } else {
                    second = second.min(used);
                }
            }
        }
        let overdraws = least.filter(|((used, _), _)| second.is_finite() && *used < second);
        overdraws.or(next).map(|(_, it)| it)
    }

    /// Admits the oldest ticket of a disk in a direction. Calls its queue, unless that is `own`.
    fn grant(&mut self, index: usize, direction: Direction, own: usize, calls: &mut Vec<Waker>) {
        let Some(ticket) = self.members[index].tickets[direction as usize].pop_front() else {
            return;
        };
        self.waiting -= 1;
        self.charge(index, ticket.cost);
        let seat = &mut self.seats[ticket.seat];
        seat.tickets -= 1;
        seat.granted[direction as usize] += 1;
        if ticket.seat != own {
            self.call(ticket.seat, calls);
        }
    }

    fn call(&mut self, seat: usize, calls: &mut Vec<Waker>) {
        let seat = &mut self.seats[seat];
        if !std::mem::replace(&mut seat.is_called, true) {
            calls.push(seat.waker.clone());
        }
    }

    /// Charges the cost of a request that is passed on without admission. If the limit would not
    /// have admitted it, the other disks do not pay for it: this disk waits for as long as the
    /// limit needs for the request.
    pub fn charge_unadmitted(&mut self, seat: usize, cost: Cost, now_ns: u64) {
        self.leak(now_ns);
        let index = self.seats[seat].member;
        if self.buckets.wait_ns(&self.rates, cost.direction) == 0 {
            return self.charge(index, cost);
        }
        // No bucket of the limit is charged.
        let needed_ns = (Buckets::default().charge(&self.rates, cost) * 1e9) as u64;
        let member = &mut self.members[index];
        let debt_ns = member.debt_ns.max(now_ns).saturating_add(needed_ns);
        member.debt_ns = debt_ns.min(now_ns.saturating_add(DEBT_NS_MAX));
    }

    /// The position in `used` and `start` for the requests of a direction.
    fn account(&self, direction: Direction) -> usize {
        if self.rates.has_total() { 0 } else { direction as usize }
    }

    fn waits_ns(&self) -> [u64; 2] {
        Direction::ALL.map(|direction| self.buckets.wait_ns(&self.rates, direction))
    }

    #[inline]
    fn is_indebted(&self, index: usize, now_ns: u64) -> bool {
        self.members[index].debt_ns > now_ns && self.rates.is_limited()
    }

    /// Whether a disk has tickets that count for an account.
    fn has_tickets(&self, index: usize, account: usize) -> bool {
        let mut directions = Direction::ALL.into_iter().filter(|it| self.account(*it) == account);
        directions.any(|it| !self.members[index].tickets[it as usize].is_empty())
    }

    /// The credit of a disk that has not waited is limited.
    fn raise(&mut self, index: usize) {
        let member = &mut self.members[index];
        for (used, start) in member.used.iter_mut().zip(self.start) {
            *used = used.max(start - LEAD_MAX);
        }
    }

    #[inline]
    fn charge(&mut self, index: usize, cost: Cost) {
        let account = self.account(cost.direction);
        let seconds = self.buckets.charge(&self.rates, cost);
        let start = self.start[account];
        let used = self.members[index].used[account].max(start - LEAD_MAX);
        self.members[index].used[account] = used + seconds;
        // If no other disk waits, the next disk begins with the use of this disk.
        let mut least = used;
        if self.waiting > 0 && self.members.len() > 1 {
            let time_ns = self.time_ns;
            for other in (0..self.members.len()).filter(|other| *other != index) {
                if self.has_tickets(other, account) && !self.is_indebted(other, time_ns) {
                    least = least.min(self.members[other].used[account]);
                }
            }
        }
        self.start[account] = start.max(least);
    }
}
