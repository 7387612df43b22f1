//! What a layer can reach, and the steps of requests between layers.

use std::cmp::Ordering;
use std::collections::VecDeque;

use crate::aside::{Aside, StoreId};
use crate::clock::Moment;
#[expect(unused_imports, reason = "for the documentation")]
use crate::layer::LayerQueue;
use crate::request::{Outcome, Request};
use crate::split::Split;

/// A step of a request through the stack.
pub(crate) enum Step {
    /// Towards `level`, from above.
    Down { level: usize, request: Box<Request> },
    /// From `level`, which is done with it.
    Up { level: usize, request: Box<Request>, outcome: Outcome },
    /// Back to `level`, which split it.
    Gathered { level: usize, parent: Box<Request>, outcome: Outcome },
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
    /// The requests of layers that are not back.
    own: usize,
}

impl Pool {
    /// More boxes than this are not kept.
    const KEPT_MAX: usize = 1024;
    /// The bits of a request's number that count within its queue.
    const COUNT_BITS: u32 = 44;

    pub(crate) fn new(queue: u64) -> Self {
        Self { prefix: queue << Self::COUNT_BITS, ..Self::default() }
    }

    pub(crate) fn take(&mut self, origin: usize) -> Box<Request> {
        let mut request = self.boxes.pop().unwrap_or_default();
        request.id = self.prefix | self.made & ((1 << Self::COUNT_BITS) - 1);
        request.origin = origin;
        self.made += 1;
        self.own += usize::from(origin > 0);
        request
    }

    /// How many requests of layers are under way.
    pub(crate) fn own(&self) -> usize {
        self.own
    }

    pub(crate) fn give(&mut self, mut request: Box<Request>) {
        self.own -= usize::from(request.origin > 0);
        if self.boxes.len() < Self::KEPT_MAX {
            request.reset();
            self.boxes.push(request);
        }
    }
}

/// What a layer can reach while it is called: its neighbours, its further stores, the time, and
/// fresh requests.
pub struct Crossing<'a> {
    pub(crate) level: usize,
    pub(crate) steps: &'a mut Steps,
    pub(crate) held: &'a mut Vec<Held>,
    pub(crate) pool: &'a mut Pool,
    pub(crate) aside: &'a mut Aside,
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

    /// Submits a request of this layer's own to a further store of this queue. It is checked as one
    /// that goes down, against what the store offers. Its outcome arrives at
    /// [`returned`](LayerQueue::returned).
    pub fn submit_to(&mut self, store: StoreId, mut request: Box<Request>) {
        debug_assert_eq!(request.origin, self.level + 1, "a guest's request takes the way down");
        request.store = Some(store);
        self.aside.sending.push(request);
    }

    /// Keeps `parent`, a request that came to this layer, for as long as [pieces](Self::piece) of it
    /// are under way. Say [`join`](Self::join) when all pieces are made.
    pub fn split(&mut self, parent: Box<Request>) -> Split {
        self.aside.splits.begin(self.level, parent)
    }

    /// A request of this layer's own for `length` bytes of the parent of `split`, from its byte
    /// `from` on: the same operation and flags, the same place, the same memory, and what is known
    /// of its meaning. All of it may be changed but the memory. To be submitted below or to a store;
    /// its outcome arrives at [`returned`](LayerQueue::returned), and its first error also at
    /// [`gathered`](LayerQueue::gathered).
    pub fn piece(&mut self, split: Split, from: u64, length: u64) -> Box<Request> {
        let mut piece = self.pool.take(self.level + 1);
        self.aside.splits.piece(split, &mut piece, from, length);
        piece
    }

    /// No further pieces follow: once those that were made have come back,
    /// [`gathered`](LayerQueue::gathered) gets the parent.
    pub fn join(&mut self, split: Split) {
        if let Some(step) = self.aside.splits.join(split) {
            self.steps.push(step);
        }
    }

    /// Takes back the box of a request that this layer made.
    pub fn recycle(&mut self, mut request: Box<Request>) {
        debug_assert_eq!(request.origin, self.level + 1, "only the maker ends a request");
        // The memory of a piece is the parent's: the piece lets go of it first.
        let split = request.split.take();
        self.pool.give(request);
        if let Some(step) = split.and_then(|split| self.aside.splits.give_back(split)) {
            self.steps.push(step);
        }
    }

    /// Asks for a call of [`advance`](LayerQueue::advance) at `deadline_ns` of the clock; the
    /// earliest of several holds. A call later than now costs no time until then.
    pub fn wake_at(&mut self, deadline_ns: u64) {
        self.aside.wakes.set(self.level, deadline_ns);
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
