//! The contract of a layer that only observes requests.

use std::ops::Deref;

use fathom_guest_memory::Buffers;
use fathom_insight::Insight;

use crate::clock::Moment;
use crate::request::{Outcome, Request};

/// The part in one queue of a layer that only observes. It sees each request on its way down and on
/// its way up, and changes nothing but its [`Insight`].
///
/// Such a layer does not answer, hold or make requests, and its capabilities are those of the level
/// below. So a request needs no second check after it, and does not move while it is observed.
/// Requests of one batch are observed together: an observer costs one call each way for the whole
/// batch.
pub trait Observer {
    /// Observes requests on their way down.
    fn down(&mut self, requests: &mut [Box<Request>], place: ObserverPosition<'_>);

    /// Called before [`up`](Self::up) of this observer and of all observers next to it: the buffers
    /// of reads have their data. So what this observer learns from the data, and adds to the
    /// insight, is also known to observers below it.
    fn arrive(&mut self, requests: &mut [(Box<Request>, Outcome)], place: ObserverPosition<'_>) {
        let _ = (requests, place);
    }

    /// Observes requests on their way up. The batches need not be those of the way down.
    fn up(&mut self, requests: &mut [(Box<Request>, Outcome)], place: ObserverPosition<'_>);

    /// What the layer has outside its queues, such as the disk's guest, may be another: the
    /// observer drops what it has of it, as it does at the next request.
    fn refresh(&mut self) {}
}

/// The position of an observer in its stack, and the time of the call.
#[derive(Clone, Copy)]
pub struct ObserverPosition<'a> {
    pub(crate) level: usize,
    pub(crate) moment: Moment<'a>,
}

impl ObserverPosition<'_> {
    /// `request` as the observer at this place sees it.
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

    /// The time at which the clock was last read in this round, in nanoseconds; see
    /// [`Crossing::round_ns`](crate::Crossing::round_ns).
    pub fn round_ns(self) -> u64 {
        self.moment.round_ns()
    }
}

/// A request as an observer sees it: read-only except for its insight and the observer's word.
pub struct Observed<'a> {
    request: &'a mut Request,
    level: usize,
}

impl Observed<'_> {
    /// The memory of the request, and its insight.
    pub fn buffers_and_insight(&mut self) -> (&Buffers, &mut Insight) {
        (&self.request.buffers, &mut self.request.insight)
    }

    /// The observer's own word on the request, initially 0: it carries data from the way down to
    /// the way up.
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
