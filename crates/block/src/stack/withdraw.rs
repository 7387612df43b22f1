//! Requests that a front end takes back, and those that wait for the changes of clients that have
//! gone.

use fathom_reactor::Reactor;

use super::Stack;
use crate::crossing::Held;
use crate::layer::LAYERS_MAX;
use crate::leftovers::Meeting;
use crate::request::{Course, ErrorKind, Request};

/// The interval at which requests that wait for leftovers are reconsidered, in nanoseconds.
const LOOK_NS: u64 = 2_000_000;

impl Stack {
    /// Takes back the requests that layers hold, because their maker has gone or its ring is
    /// stopped: those of which nothing is in flight complete with [`ErrorKind::Withdrawn`]. The
    /// others stay in flight. To be called in each round until all have completed, because a
    /// request may get to a layer that holds it after this call.
    pub fn withdraw(&mut self, reactor: &mut Reactor) {
        if self.in_flight == 0 {
            return;
        }
        for (request, _) in std::mem::take(&mut self.delayed) {
            self.refuse_delayed(request, ErrorKind::Withdrawn);
        }
        self.look_ns = u64::MAX;
        self.each_layer(|layer, next| layer.withdraw(next));
        for mut held in std::mem::take(&mut self.held) {
            let Held { level, request, outcome, .. } = held;
            let Some((layer, mut crossing)) = self.layer(level) else { continue };
            if let Some(request) = layer.withdraw_held(request, outcome, &mut crossing) {
                held.request = request;
                self.held.push(held);
            }
        }
        self.run(reactor);
    }

    /// Submits a request again that was [withdrawn](Self::withdraw).
    pub fn repeat(&mut self, mut request: Box<Request>, reactor: &mut Reactor) {
        request.course = Course::default();
        request.extents.clear();
        request.words = [0; LAYERS_MAX];
        self.submit(request, reactor);
    }

    /// Begins a request, while changes of clients that have gone are in flight: it waits for those
    /// of its range.
    #[cold]
    pub(super) fn meet_leftovers(&mut self, request: Box<Request>) {
        let leftovers = self.disk.leftovers();
        let before = leftovers.next();
        if !request.operation.has_range() {
            return self.admit(request);
        }
        match leftovers.meet(&request.range(), before) {
            Meeting::Free => self.admit(request),
            Meeting::Stuck => self.refuse_delayed(request, ErrorKind::Io),
            Meeting::Change => {
                self.delayed.push((request, before));
                self.look_ns = self.look_ns.min(self.clock.now_ns().saturating_add(LOOK_NS));
            }
        }
    }

    /// Begins the requests that do not have to wait for leftovers any more.
    #[cold]
    pub(super) fn look_at_leftovers(&mut self) {
        let now_ns = self.clock.now_ns();
        if now_ns < self.look_ns {
            return;
        }
        self.look_ns = u64::MAX;
        for (request, before) in std::mem::take(&mut self.delayed) {
            match self.disk.leftovers().meet(&request.range(), before) {
                Meeting::Free => self.admit(request),
                Meeting::Stuck => self.refuse_delayed(request, ErrorKind::Io),
                Meeting::Change => {
                    self.delayed.push((request, before));
                    self.look_ns = now_ns.saturating_add(LOOK_NS);
                }
            }
            self.take_steps();
        }
    }

    /// Completes a request that no layer has seen.
    fn refuse_delayed(&mut self, request: Box<Request>, error: ErrorKind) {
        self.completed.push_back((request, Err(error)));
    }
}
