//! The contract of a layer, and what it can reach.

use std::cmp::Ordering;
use std::collections::VecDeque;

use crate::clock::Moment;
use crate::geometry::Capabilities;
use crate::observer::Observer;
use crate::request::{Outcome, Request};

/// The most layers that a disk can have.
pub const LAYERS_MAX: usize = 9;

/// A layer of one disk: what all its queues share.
///
/// The do-nothing version is `fathom_layers::Passthrough`.
pub trait Layer: Send + Sync {
    /// One word for status, logs and the configuration, for example `tap`.
    fn name(&self) -> &'static str;

    /// What a disk can do through this layer, given what it can do `below`. Never more than the
    /// layer honours: an operation that is passed on unchanged stays as it is below.
    fn capabilities(&self, below: Capabilities) -> Capabilities;

    /// The layer's part in one queue. `queue` counts up from 0 for each queue that is opened while
    /// the daemon runs, so it can seed a generator or pick a shard.
    fn open_queue(&self, queue: u64) -> LayerPart;
}

/// What a layer does in one queue.
pub enum LayerPart {
    /// It takes requests and hands them on.
    Queue(Box<dyn LayerQueue>),
    /// It looks on. Its [`Layer::capabilities`] must be those below.
    Observer(Box<dyn Observer>),
}

impl LayerPart {
    /// The part of a layer that takes requests.
    pub fn queue(queue: impl LayerQueue + 'static) -> Self {
        Self::Queue(Box::new(queue))
    }

    /// The part of a layer that looks on.
    pub fn observer(observer: impl Observer + 'static) -> Self {
        Self::Observer(Box::new(observer))
    }
}

/// A layer's part in one queue, called by that queue's thread alone.
///
/// **Callers** guarantee what [`Crossing::submit`] checks: the range lies within the disk and is
/// aligned, the buffers add up, the operation is among the layer's capabilities.
///
/// **Implementors** see each request once on its way down ([`submit`](Self::submit)) and once on
/// its way up ([`complete`](Self::complete)), unless they answer it themselves, and they hand on
/// every box that they get exactly once. They spawn no threads, read no ambient clock and no
/// ambient randomness, and do not block.
///
/// A layer that answers with less than it promised (a write that it only remembers) must stand in
/// for [`Operation::Flush`](crate::Operation::Flush) too, or what a guest was told is on disk is
/// not.
pub trait LayerQueue {
    /// A request from above: pass it on ([`Crossing::submit`]), answer it
    /// ([`Crossing::complete`]) or keep it for a while ([`Crossing::hold`]).
    fn submit(&mut self, request: Box<Request>, next: &mut Crossing<'_>);

    /// A request that this layer passed on has been carried out: hand its outcome on
    /// ([`Crossing::complete`]), or keep it for a while ([`Crossing::hold`]).
    fn complete(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>);

    /// A request that this layer made itself ([`Crossing::request`]) has been carried out. It ends
    /// here: give the box back with [`Crossing::recycle`].
    fn returned(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        debug_assert!(false, "a layer that makes requests of its own receives them");
        let _ = outcome;
        next.recycle(request);
    }

    /// A request that this layer held is due. `outcome` is what it was held with.
    fn resume(&mut self, request: Box<Request>, outcome: Option<Outcome>, next: &mut Crossing<'_>) {
        match outcome {
            None => next.submit(request),
            Some(outcome) => next.complete(request, outcome),
        }
    }
}

/// A step of a request through the stack.
pub(crate) enum Step {
    /// Towards `level`, from above.
    Down { level: usize, request: Box<Request> },
    /// From `level`, which is done with it.
    Up { level: usize, request: Box<Request>, outcome: Outcome },
}

/// The steps that wait to be taken, oldest first.
///
/// Nearly always there is one, the last act of the layer that was just called: it never sees the
/// queue.
#[derive(Default)]
pub(crate) struct Steps {
    /// Older than everything in `rest`.
    first: Option<Step>,
    rest: VecDeque<Step>,
}

impl Steps {
    pub(crate) fn push(&mut self, step: Step) {
        if self.first.is_none() && self.rest.is_empty() {
            self.first = Some(step);
        } else {
            self.rest.push_back(step);
        }
    }

    #[inline]
    pub(crate) fn pop(&mut self) -> Option<Step> {
        if self.is_empty() {
            return None;
        }
        self.first.take().or_else(|| self.rest.pop_front())
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.first.is_none() && self.rest.is_empty()
    }
}

/// A request that a layer keeps until a time.
pub(crate) struct Held {
    pub(crate) deadline_ns: u64,
    /// Makes equal deadlines come out in the order in which they went in.
    pub(crate) sequence: u64,
    pub(crate) level: usize,
    pub(crate) request: Box<Request>,
    pub(crate) outcome: Option<Outcome>,
}

impl Ord for Held {
    /// The earliest is the greatest, for a max-heap.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.deadline_ns, other.sequence).cmp(&(self.deadline_ns, self.sequence))
    }
}

impl PartialOrd for Held {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Held {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Held {}

/// Boxes of requests that have come back, for use again.
#[derive(Default)]
pub(crate) struct Pool {
    #[expect(clippy::vec_box, reason = "a request travels in its box; the box is what is kept")]
    boxes: Vec<Box<Request>>,
    made: u64,
    prefix: u64,
}

impl Pool {
    /// More boxes than this are not kept.
    const KEPT_MAX: usize = 1024;
    /// The bits of a request's number that count within its queue.
    const COUNT_BITS: u32 = 44;

    pub(crate) fn new(queue: u64) -> Self {
        Self { boxes: Vec::new(), made: 0, prefix: queue << Self::COUNT_BITS }
    }

    pub(crate) fn take(&mut self, origin: usize) -> Box<Request> {
        let mut request = self.boxes.pop().unwrap_or_default();
        request.id = self.prefix | self.made & ((1 << Self::COUNT_BITS) - 1);
        request.origin = origin;
        self.made += 1;
        request
    }

    pub(crate) fn give(&mut self, mut request: Box<Request>) {
        if self.boxes.len() < Self::KEPT_MAX {
            request.reset();
            self.boxes.push(request);
        }
    }
}

/// What a layer can reach while it is called: its neighbours, the time, and fresh requests.
pub struct Crossing<'a> {
    pub(crate) level: usize,
    pub(crate) steps: &'a mut Steps,
    pub(crate) held: &'a mut Vec<Held>,
    pub(crate) pool: &'a mut Pool,
    pub(crate) moment: Moment<'a>,
}

impl Crossing<'_> {
    /// Passes `request` to the next layer, or to the back end. It is checked on the way: what the
    /// part below does not offer comes back as a completion with an error.
    pub fn submit(&mut self, request: Box<Request>) {
        self.steps.push(Step::Down { level: self.level + 1, request });
    }

    /// Hands `request` to the layer above, or to the front end, as done.
    pub fn complete(&mut self, request: Box<Request>, outcome: Outcome) {
        debug_assert!(
            request.origin <= self.level,
            "a layer completes no request of its own: it recycles it"
        );
        self.steps.push(Step::Up { level: self.level, request, outcome });
    }

    /// Keeps `request` until `deadline_ns` of the clock; then the layer's
    /// [`resume`](LayerQueue::resume) gets it back together with `outcome`.
    pub fn hold(&mut self, request: Box<Request>, outcome: Option<Outcome>, deadline_ns: u64) {
        self.held.push(Held { deadline_ns, sequence: 0, level: self.level, request, outcome });
    }

    /// A blank request of this layer's own, to be submitted below. Its outcome arrives at
    /// [`returned`](LayerQueue::returned).
    pub fn request(&mut self) -> Box<Request> {
        self.pool.take(self.level + 1)
    }

    /// Takes back the box of a request that this layer made.
    pub fn recycle(&mut self, request: Box<Request>) {
        debug_assert_eq!(request.origin, self.level + 1, "only the maker ends a request");
        self.pool.give(request);
    }

    /// The layer's own word on `request`, 0 at first: to remember something on the way down.
    pub fn word<'r>(&self, request: &'r mut Request) -> &'r mut u64 {
        &mut request.words[self.level]
    }

    /// The time, in nanoseconds of the stack's clock.
    pub fn now_ns(&self) -> u64 {
        self.moment.now_ns()
    }

    /// The time at which anyone last looked at the clock in this round, in nanoseconds: the clock
    /// is read at most once for all the requests that a thread takes or gets back at one go.
    pub fn round_ns(&self) -> u64 {
        self.moment.round_ns()
    }
}
