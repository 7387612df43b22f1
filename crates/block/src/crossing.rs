//! The interface of a layer to its stack, and the steps of requests between layers.

use std::cmp::Ordering;
use std::collections::VecDeque;
use std::ops::Range;

use crate::aside::{Aside, StoreId};
use crate::clock::Moment;
use crate::layer::LAYERS_MAX;
#[expect(unused_imports, reason = "for the documentation")]
use crate::layer::LayerQueue;
use crate::request::{Operation, Outcome, Request};
use crate::split::Split;

/// A step of a request through the stack.
pub(crate) enum Step {
    /// To `level`, from above.
    Down { level: usize, request: Box<Request> },
    /// From `level`, which has completed it.
    Up { level: usize, request: Box<Request>, outcome: Outcome },
    /// To `level`, which had split it.
    Gathered { level: usize, parent: Box<Request>, outcome: Outcome },
}

/// The pending steps, oldest first.
///
/// There is nearly always one step, the last action of the layer that was just called. It bypasses
/// the queue.
#[derive(Default)]
pub(crate) struct Steps {
    /// Older than all steps in `rest`.
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

/// A request that a layer holds until a deadline.
pub(crate) struct Held {
    pub(crate) deadline_ns: u64,
    /// Orders requests with equal deadlines by the time of their holding.
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

/// Boxes of ended requests, for reuse.
#[derive(Default)]
pub(crate) struct Pool {
    #[expect(clippy::vec_box, reason = "a request travels in its box; the box is what is kept")]
    boxes: Vec<Box<Request>>,
    made: u64,
    prefix: u64,
    /// The number of requests in flight of the layer at each level.
    own: [usize; LAYERS_MAX],
}

impl Pool {
    /// The most boxes that are kept.
    const KEPT_MAX: usize = 1024;
    /// The number of bits of a request's number that count within its queue.
    const COUNT_BITS: u32 = 44;

    pub(crate) fn new(queue: u64) -> Self {
        Self { prefix: queue << Self::COUNT_BITS, ..Self::default() }
    }

    pub(crate) fn take(&mut self, origin: usize) -> Box<Request> {
        let mut request = self.boxes.pop().unwrap_or_default();
        request.id = self.prefix | self.made & ((1 << Self::COUNT_BITS) - 1);
        request.origin = origin;
        self.made += 1;
        if let Some(level) = origin.checked_sub(1) {
            self.own[level] += 1;
        }
        request
    }

    /// The number of requests of layers in flight.
    pub(crate) fn own(&self) -> usize {
        self.own.iter().sum()
    }

    /// The number of requests in flight of the layer at `level`.
    pub(crate) fn own_of(&self, level: usize) -> usize {
        self.own[level]
    }

    pub(crate) fn give(&mut self, mut request: Box<Request>) {
        if let Some(level) = request.origin.checked_sub(1) {
            self.own[level] -= 1;
        }
        if self.boxes.len() < Self::KEPT_MAX {
            request.reset();
            self.boxes.push(request);
        }
    }
}

/// What a layer can reach during a call: its neighbours, its further stores, the time, and new
/// requests.
pub struct Crossing<'a> {
    pub(crate) level: usize,
    pub(crate) steps: &'a mut Steps,
    pub(crate) held: &'a mut Vec<Held>,
    pub(crate) pool: &'a mut Pool,
    pub(crate) aside: &'a mut Aside,
    pub(crate) moment: Moment<'a>,
    pub(crate) is_draining: bool,
}

impl Crossing<'_> {
    /// Passes `request` to the next layer, or to the back end. It is checked on the way: a request
    /// that the level below does not offer completes with an error.
    pub fn submit(&mut self, request: Box<Request>) {
        self.steps.push(Step::Down { level: self.level + 1, request });
    }

    /// Completes `request`: passes it to the layer above, or to the front end.
    pub fn complete(&mut self, request: Box<Request>, outcome: Outcome) {
        debug_assert!(
            request.origin <= self.level,
            "a layer completes no request of its own: it recycles it"
        );
        self.steps.push(Step::Up { level: self.level, request, outcome });
    }

    /// Holds `request` until `deadline_ns` of the stack's clock. Then the layer's
    /// [`resume`](LayerQueue::resume) gets it back together with `outcome`.
    pub fn hold(&mut self, request: Box<Request>, outcome: Option<Outcome>, deadline_ns: u64) {
        self.held.push(Held { deadline_ns, sequence: 0, level: self.level, request, outcome });
    }

    /// A blank request of this layer's own, to be submitted below. Its outcome arrives at
    /// [`returned`](LayerQueue::returned).
    pub fn request(&mut self) -> Box<Request> {
        self.pool.take(self.level + 1)
    }

    /// Submits a request of this layer's own to a further store of this queue. It is checked
    /// against what the store offers, like a request on its way down. Its outcome arrives at
    /// [`returned`](LayerQueue::returned).
    pub fn submit_to(&mut self, store: StoreId, mut request: Box<Request>) {
        debug_assert_eq!(request.origin, self.level + 1, "a guest's request takes the way down");
        request.store = Some(store);
        self.aside.sending.push(request);
    }

    /// Reads from a further store of this queue, from its byte `offset` on, into the bytes `range`
    /// of the memory of `request`, if the store is memory, so that this takes no longer than a
    /// copy. Returns `None` if nothing was read, for example because the store is no memory or does
    /// not have these bytes: the layer then submits a request.
    #[inline]
    pub fn read_now(
        &mut self,
        store: StoreId,
        offset: u64,
        request: &mut Request,
        range: Range<u64>,
    ) -> Option<Outcome> {
        debug_assert!(request.operation == Operation::Read, "only a read is filled");
        self.aside.read_now(store, offset, request, range)
    }

    /// Writes `bytes` to a further store of this queue, from its byte `offset` on, if the store is
    /// memory, so that this takes no longer than a copy. Returns `None` if nothing was written: the
    /// layer then submits a request.
    #[inline]
    pub fn write_now(&mut self, store: StoreId, offset: u64, bytes: &[u8]) -> Option<Outcome> {
        self.aside.write_now(store, offset, bytes)
    }

    /// Fetches the first bytes of a coming read from a further store of this queue into the
    /// processor's caches, if the store is memory.
    #[inline]
    pub fn expect(&mut self, store: StoreId, offset: u64) {
        self.aside.expect(store, offset);
    }

    /// Keeps `parent`, a request that came to this layer, while [pieces](Self::piece) of it are in
    /// flight. The layer calls [`join`](Self::join) after it has made all pieces.
    pub fn split(&mut self, parent: Box<Request>) -> Split {
        self.aside.splits.begin(self.level, parent)
    }

    /// Makes a request of this layer's own for `length` bytes of the parent of `split`, from its
    /// byte `from` on. It has the parent's operation, flags, position on the disk, memory and
    /// insight, each for these bytes; the layer may change all but the memory. The layer submits it
    /// below or to a store. Its outcome arrives at [`returned`](LayerQueue::returned); the first
    /// error of all pieces also arrives at [`gathered`](LayerQueue::gathered).
    pub fn piece(&mut self, split: Split, from: u64, length: u64) -> Box<Request> {
        let mut piece = self.pool.take(self.level + 1);
        self.aside.splits.piece(split, &mut piece, from, length);
        piece
    }

    /// Called after the last piece was made. When all pieces have returned,
    /// [`gathered`](LayerQueue::gathered) gets the parent.
    pub fn join(&mut self, split: Split) {
        if let Some(step) = self.aside.splits.join(split) {
            self.steps.push(step);
        }
    }

    /// Takes back the box of a request that this layer made.
    pub fn recycle(&mut self, mut request: Box<Request>) {
        debug_assert_eq!(request.origin, self.level + 1, "only the maker ends a request");
        // The memory of a piece is the parent's: the piece releases it first.
        let split = request.split.take();
        self.pool.give(request);
        if let Some(step) = split.and_then(|split| self.aside.splits.give_back(split)) {
            self.steps.push(step);
        }
    }

    /// Requests a call of [`advance`](LayerQueue::advance) at `deadline_ns` of the stack's clock.
    /// Of several requests the earliest holds. A pending request costs nothing until its time.
    pub fn wake_at(&mut self, deadline_ns: u64) {
        self.aside.wakes.set(self.level, deadline_ns);
    }

    /// The layer's own word on `request`, initially 0: it carries data from the way down to the way
    /// up.
    pub fn word<'r>(&self, request: &'r mut Request) -> &'r mut u64 {
        &mut request.words[self.level]
    }

    /// Whether the front end waits for all requests in flight; see [`drain`](LayerQueue::drain).
    pub fn is_draining(&self) -> bool {
        self.is_draining
    }

    /// The time, in nanoseconds of the stack's clock.
    pub fn now_ns(&self) -> u64 {
        self.moment.now_ns()
    }

    /// The time at which the clock was last read in this round, in nanoseconds. This function reads
    /// the clock at most once for all requests that a thread takes, or that complete, in one batch.
    pub fn round_ns(&self) -> u64 {
        self.moment.round_ns()
    }
}
