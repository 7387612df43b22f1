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
/// it. So a request needs no second check behind it and stays where it is while it is looked at,
/// and requests that came together are looked at together: an observer costs one call each way for
/// all of them.
pub trait Observer {
    /// Requests are on their way down.
    fn down(&mut self, requests: &mut [Box<Request>], place: Place<'_>);

    /// Requests that went down are on their way up, not always together.
    fn up(&mut self, requests: &mut [(Box<Request>, Outcome)], place: Place<'_>);
}

/// Where in a stack an observer is, and when.
#[derive(Clone, Copy)]
pub struct Place<'a> {
    pub(crate) level: usize,
    pub(crate) moment: Moment<'a>,
}

impl Place<'_> {
    /// `request` as the observer in this place sees it.
    #[inline]
    pub fn observe(self, request: &mut Request) -> Observed<'_> {
        Observed { request, level: self.level }
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
    request: &'a mut Request,
    level: usize,
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
}

impl Deref for Observed<'_> {
    type Target = Request;

    fn deref(&self) -> &Request {
        self.request
    }
}
