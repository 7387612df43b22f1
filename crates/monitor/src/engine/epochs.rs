//! How the processes of a cluster agree on what is over.
//!
//! Each says up to when it has told everything. The first takes the least of these, as timely
//! dataflow's progress shows it, and tells all of them that everything before it is over: so each
//! has the same epochs. Only so many of them are on their way at a time, which bounds what waits
//! for a process that is slow.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use timely::communication::Allocate;
use timely::dataflow::InputHandle;
use timely::dataflow::operators::probe::Handle;
use timely::dataflow::operators::{Broadcast, Input, Inspect, Probe};
use timely::worker::Worker;

/// So many epochs are on their way at most.
const UNDER_WAY_MAX: usize = 3;

/// See the module.
pub(super) struct Turns {
    /// What this process has told; none, where it tells nothing more.
    told: Option<InputHandle<u64, ()>>,
    /// What all have.
    all_told: Handle<u64>,
    /// What the first process says is over; the others say nothing.
    ends: Option<InputHandle<u64, u64>>,
    /// What is over and has not been taken.
    over: Rc<RefCell<VecDeque<u64>>>,
    /// Whether more may come to be over.
    goes_on: Handle<u64>,
    /// The last epochs' ends, of those that the first process has ended.
    under_way: VecDeque<u64>,
    last: u64,
}

impl Turns {
    pub(super) fn new<A: Allocate>(worker: &mut Worker<A>) -> Self {
        let (all_told, goes_on) = (Handle::new(), Handle::new());
        let over: Rc<RefCell<VecDeque<u64>>> = Rc::default();
        let is_first = worker.index() == 0;
        let (told, ends) = worker.dataflow::<u64, _, _>(|scope| {
            let (told, stream) = scope.new_input::<()>();
            stream.probe_with(&all_told);
            let (ends, stream) = scope.new_input::<u64>();
            let over = Rc::clone(&over);
            let stream = stream.broadcast().inspect(move |&end| over.borrow_mut().push_back(end));
            stream.probe_with(&goes_on);
            (told, ends)
        });
        let (told, ends) = (Some(told), Some(ends).filter(|_| is_first));
        Self { told, all_told, ends, over, goes_on, under_way: VecDeque::new(), last: 0 }
    }

    /// This process has told everything before an instant, and has ended what is before another.
    /// While what it told last is not ended it tells nothing more: so one message is for much where
    /// there is much to do, and none waits where there is little.
    pub(super) fn tell(&mut self, time_ns: u64, ended_ns: u64) {
        let is_news =
            |told: &&mut InputHandle<_, _>| time_ns > *told.time() && *told.time() <= ended_ns;
        if let Some(told) = self.told.as_mut().filter(is_news) {
            told.advance_to(time_ns);
        }
    }

    /// This process tells nothing more.
    pub(super) fn leave(&mut self) {
        self.told = None;
    }

    /// Whether no process tells anything more, and everything has been taken.
    pub(super) fn is_over(&self) -> bool {
        self.goes_on.done() && self.over.borrow().is_empty()
    }

    /// Ends what all have told, if this is the first process; `is_done` is whether everything
    /// before an instant has been worked on.
    pub(super) fn lead(&mut self, is_done: &dyn Fn(u64) -> bool) {
        let Some(ends) = &mut self.ends else { return };
        while self.under_way.front().is_some_and(|&end| is_done(end)) {
            self.under_way.pop_front();
        }
        let all_told = self.all_told.with_frontier(|frontier| frontier.first().copied());
        let Some(end) = all_told else {
            // Everybody has left.
            self.ends = None;
            return;
        };
        if end > self.last && self.under_way.len() < UNDER_WAY_MAX {
            ends.send(end);
            ends.advance_to(end);
            ends.flush();
            self.under_way.push_back(end);
            self.last = end;
        }
    }

    /// The next instant before which everything is over.
    pub(super) fn next(&mut self) -> Option<u64> {
        self.over.borrow_mut().pop_front()
    }
}
