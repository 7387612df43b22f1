//! A limit, the disks that share it, and their queues.

use std::sync::Arc;

use fathom_block::{Shared, Waker};

use super::rates::{Cost, Rates};
use super::state::{State, TakenBack, Turn};

/// A limit, shared by the queues of one or more disks.
pub struct Group {
    state: Shared<State>,
}

impl Group {
    /// A limit of `rates`.
    pub fn new(rates: Rates) -> Self {
        Self { state: Shared::new(State::new(rates)) }
    }

    /// The current rates.
    pub fn rates(&self) -> Rates {
        self.state.access(|state| state.rates())
    }

    /// Sets other rates. The buckets keep their levels. The new rates also apply to waiting
    /// requests.
    pub fn set_rates(&self, rates: Rates) {
        let waiting = self.state.access(|state| state.set_rates(rates));
        waiting.iter().for_each(Waker::wake);
    }

    /// Adds a disk.
    pub fn join(self: &Arc<Self>) -> Arc<Place> {
        let index = self.state.access(State::join);
        Arc::new(Place { group: Arc::clone(self), index })
    }

    /// Calls the queues that `turn` names.
    fn turn<R>(&self, turn: impl FnOnce(&mut State, &mut Vec<Waker>) -> R) -> R {
        let mut calls = Vec::new();
        let result = self.state.access(|state| turn(state, &mut calls));
        calls.iter().for_each(Waker::wake);
        result
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
        self.group.state.access(|state| state.leave(self.index));
    }
}

impl Place {
    /// The group.
    pub fn group(&self) -> &Arc<Group> {
        &self.group
    }

    /// Adds a queue of the disk. `waker` calls it when another queue makes room for it.
    pub fn sit_down(self: Arc<Self>, waker: Waker) -> Seat {
        let index = self.group.state.access(|state| state.sit_down(self.index, waker));
        Seat { place: self, index }
    }
}

/// What a new request gets.
pub enum Entry {
    /// It is admitted.
    Admitted,
    /// It has a ticket with this number, and the queue has this turn.
    Ticket(u64, Turn),
}

/// The place of a queue in a group.
pub struct Seat {
    place: Arc<Place>,
    index: usize,
}

impl Seat {
    /// A request comes at `now_ns`. It is behind those of the queue with tickets, if there are any
    /// (`is_behind`).
    pub fn enter(&self, cost: Cost, is_behind: bool, now_ns: u64) -> Entry {
        self.place.group.turn(|state, calls| {
            if !is_behind && state.admit(self.index, cost, now_ns) {
                return Entry::Admitted;
            }
            let (number, turn) = state.enter(self.index, cost, now_ns, calls);
            Entry::Ticket(number, turn)
        })
    }

    /// The queue has been called, or the time has come.
    pub fn come(&self, now_ns: u64) -> Turn {
        self.place.group.turn(|state, calls| state.come(self.index, now_ns, calls))
    }

    /// Takes back requests, as `decide` does: it gets the numbers of granted requests by direction
    /// that the queue has not taken yet. Returns the time at which the queue has to come again, in
    /// nanoseconds; `None` if it is called.
    pub fn take_back(
        &self,
        now_ns: u64,
        decide: impl FnOnce([u32; 2]) -> TakenBack,
    ) -> Option<u64> {
        let group = &self.place.group;
        group.turn(|state, calls| state.take_back(self.index, decide, now_ns, calls))
    }

    /// Charges the cost of a request that is passed on without admission at `now_ns`. If the limit
    /// would not have admitted it, the other disks do not pay for it: this disk waits for as long
    /// as the limit needs for the request.
    pub fn charge(&self, cost: Cost, now_ns: u64) {
        let state = &self.place.group.state;
        state.access(|state| state.charge_unadmitted(self.index, cost, now_ns));
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.place.group.turn(|state, calls| state.stand_up(self.index, calls));
    }
}
