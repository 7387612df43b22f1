//! Agreement of a cluster's processes on the ends of epochs.
//!
//! Each process reports the instant before which it has received all of its events. Process 0 takes
//! the least of these reports, as timely dataflow's progress tracking shows it, and announces it to
//! all processes as the end of an epoch. So all processes have the same epochs. The number of
//! epochs in flight is limited, which bounds the data that waits for a slow process.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use timely::communication::Allocate;
use timely::dataflow::InputHandle;
use timely::dataflow::operators::probe::Handle;
use timely::dataflow::operators::{Broadcast, Input, Inspect, Probe};
use timely::worker::Worker;

/// The most epochs in flight.
const IN_FLIGHT_MAX: usize = 3;

/// See the module.
pub(super) struct EpochBarrier {
    /// The reports of this process; `None` after it has left.
    reported: Option<InputHandle<u64, ()>>,
    /// The least report of all processes.
    frontier: Handle<u64>,
    /// The announcements; `Some` in process 0 alone.
    ends: Option<InputHandle<u64, u64>>,
    /// Announced ends that have not been taken.
    announced: Rc<RefCell<VecDeque<u64>>>,
    /// The progress of the announcements, which shows whether more may follow.
    announcements: Handle<u64>,
    /// In process 0: the ends of the announced epochs that are still being processed.
    in_flight: VecDeque<u64>,
    /// The last announced end.
    last: u64,
}

impl EpochBarrier {
    pub(super) fn new<A: Allocate>(worker: &mut Worker<A>) -> Self {
        let (frontier, announcements) = (Handle::new(), Handle::new());
        let announced: Rc<RefCell<VecDeque<u64>>> = Rc::default();
        let is_first = worker.index() == 0;
        let (reported, ends) = worker.dataflow::<u64, _, _>(|scope| {
            let (reported, stream) = scope.new_input::<()>();
            stream.probe_with(&frontier);
            let (ends, stream) = scope.new_input::<u64>();
            let ends_seen = Rc::clone(&announced);
            let stream =
                stream.broadcast().inspect(move |&end| ends_seen.borrow_mut().push_back(end));
            stream.probe_with(&announcements);
            (reported, ends)
        });
        let (reported, ends) = (Some(reported), Some(ends).filter(|_| is_first));
        let in_flight = VecDeque::new();
        Self { reported, frontier, ends, announced, announcements, in_flight, last: 0 }
    }

    /// Reports that this process has received all events before `time_ns`. It has ended the epochs
    /// up to `ended_ns`. It makes no new report until the last reported instant has been ended. So
    /// under load one message covers many events, and without load no message waits.
    pub(super) fn report(&mut self, time_ns: u64, ended_ns: u64) {
        let is_new = |reported: &&mut InputHandle<_, _>| {
            time_ns > *reported.time() && *reported.time() <= ended_ns
        };
        if let Some(reported) = self.reported.as_mut().filter(is_new) {
            reported.advance_to(time_ns);
        }
    }

    /// Ends the reports: this process has no further events.
    pub(super) fn end_reports(&mut self) {
        self.reported = None;
    }

    /// Whether no further ends follow and all announced ends have been taken.
    pub(super) fn is_finished(&self) -> bool {
        self.announcements.done() && self.announced.borrow().is_empty()
    }

    /// In process 0, announces the end of an epoch at the least report. `is_done` returns whether
    /// all epochs up to an instant have been processed.
    pub(super) fn announce(&mut self, is_done: &dyn Fn(u64) -> bool) {
        let Some(ends) = &mut self.ends else { return };
        while self.in_flight.front().is_some_and(|&end| is_done(end)) {
            self.in_flight.pop_front();
        }
        let frontier = self.frontier.with_frontier(|frontier| frontier.first().copied());
        let Some(end) = frontier else {
            // All processes have left.
            self.ends = None;
            return;
        };
        if end > self.last && self.in_flight.len() < IN_FLIGHT_MAX {
            ends.send(end);
            ends.advance_to(end);
            ends.flush();
            self.in_flight.push_back(end);
            self.last = end;
        }
    }

    /// The next announced end of an epoch.
    pub(super) fn next(&mut self) -> Option<u64> {
        self.announced.borrow_mut().pop_front()
    }
}
