//! The contract of a layer that looks on, and what it can reach.

use std::ops::Deref;

use fathom_insight::Insight;

use crate::buffer::Buffers;
use crate::clock::Moment;
use crate::request::{Outcome, Request};

/// The part in one queue of a layer that only looks on: it sees each request on its way down and
/// on its way up and changes nothing but its [`Insight`].
///
/// Such a layer neither answers, holds nor makes requests, and its capabilities are those below
/// it. So a request needs no second check behind it and stays where it is while it is looked at:
/// an observer costs one call each way.
pub trait Observer {
    /// A request is on its way down.
    fn down(&mut self, request: &mut Observed<'_>);

    /// A request that went down is on its way up.
    fn up(&mut self, request: &mut Observed<'_>, outcome: Outcome);

    /// [`down`](Self::down) for requests that came together.
    fn all_down(&mut self, requests: &mut [Box<Request>], place: Place<'_>) {
        for request in requests {
            self.down(&mut place.observe(request));
        }
    }

    /// [`up`](Self::up) for requests that came back together.
    fn all_up(&mut self, requests: &mut [(Box<Request>, Outcome)], place: Place<'_>) {
        for (request, outcome) in requests {
            self.up(&mut place.observe(request), *outcome);
        }
    }
}

/// Where in a stack an observer is, and when.
#[derive(Clone, Copy)]
pub struct Place<'a> {
    pub(crate) level: usize,
    pub(crate) moment: Moment<'a>,
}

impl<'a> Place<'a> {
    /// `request` as the observer in this place sees it.
    #[inline]
    pub fn observe(self, request: &'a mut Request) -> Observed<'a> {
        Observed { request, level: self.level, moment: self.moment }
    }

    /// The observer's own word on `request`.
    pub fn word(self, request: &Request) -> u64 {
        request.words[self.level]
    }

    /// The time, in nanoseconds of the stack's clock.
    pub fn now_ns(self) -> u64 {
        self.moment.now_ns()
    }

    /// The time at which anyone last looked at the clock in this round; see
    /// [`Crossing::round_ns`](crate::Crossing::round_ns).
    pub fn round_ns(self) -> u64 {
        self.moment.round_ns()
    }
}

/// A request as an observer sees it: to be read, but for its insight and the observer's word.
pub struct Observed<'a> {
    pub(crate) request: &'a mut Request,
    pub(crate) level: usize,
    pub(crate) moment: Moment<'a>,
}

impl Observed<'_> {
    /// The memory of the request, and what is known about its meaning.
    pub fn buffers_and_insight(&mut self) -> (&Buffers, &mut Insight) {
        (&self.request.buffers, &mut self.request.insight)
    }

    /// The observer's own word on the request, 0 at first: to remember something on the way down.
    pub fn word(&mut self) -> &mut u64 {
        &mut self.request.words[self.level]
    }

    /// The time, in nanoseconds of the stack's clock.
    pub fn now_ns(&self) -> u64 {
        self.moment.now_ns()
    }

    /// The time at which anyone last looked at the clock in this round; see
    /// [`Crossing::round_ns`](crate::Crossing::round_ns).
    pub fn round_ns(&self) -> u64 {
        self.moment.round_ns()
    }
}

impl Deref for Observed<'_> {
    type Target = Request;

    fn deref(&self) -> &Request {
        self.request
    }
}
