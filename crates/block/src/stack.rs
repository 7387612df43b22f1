//! A disk opened for one queue, and the checked crossing.

mod crossings;
mod left;
mod life;
mod withdraw;

use std::cell::Cell;
use std::collections::{BinaryHeap, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossings::{observe_down, observe_up};
use fathom_reactor::{Event, OwnerGroup, Pending, Reactor};

use crate::aside::Aside;
use crate::backend::{BACKENDS, BackendContext, BackendOpenContext, BackendQueue};
use crate::change::{Composition, Registration};
use crate::clock::{Clock, Moment};
use crate::crossing::{Crossing, Held, Pool, Step, Steps};
use crate::disk::Disk;
use crate::geometry::Capabilities;
use crate::layer::{LayerPart, LayerQueue};
use crate::open::{Offer, OpenContext};
use crate::request::{Allocation, Extent, Operation, Outcome, Request};

/// Counters of what the crossings of a whole disk refused.
#[derive(Debug, Default)]
pub struct StackCounters {
    /// Requests that contradicted themselves or needed more than the disk offers.
    pub refused: AtomicU64,
}

/// A disk's layers and back end, opened for one queue and used by that queue's thread alone.
///
/// The owner calls [`submit`](Self::submit) for each request, [`event`](Self::event) for each event
/// of the reactor and [`advance`](Self::advance) once a round, and takes completed requests from
/// [`completed`](Self::completed). It may sleep until [`deadline_ns`](Self::deadline_ns).
pub struct Stack {
    disk: Arc<Disk>,
    /// The layers and the back end, and the part of each layer in this queue.
    members: Composition,
    layers: Vec<LayerPart>,
    backend: Box<dyn BackendQueue>,
    /// The offer of each level to the level above: first the layers', then the back end's.
    offers: Vec<Offer>,
    /// The back end's capacity when the offers were made.
    store_capacity: u64,
    /// The number of layers down to the last one that takes requests. The tail is the layers after
    /// it, which only observe.
    tail: usize,
    /// The number of layers above the first one that takes requests, which only observe; 0 if none
    /// takes requests.
    head: usize,
    clock: Clock,
    pool: Pool,
    steps: Steps,
    /// Requests of a batch that no layer has seen yet, and requests that have passed all layers
    /// upward that take requests. The layers of the head get each batch as a whole, for the same
    /// reason as those of the tail.
    #[expect(clippy::vec_box, reason = "a request travels in its box")]
    entering: Vec<Box<Request>>,
    leaving: Vec<(Box<Request>, Outcome)>,
    /// Requests that have passed all layers that take requests. The layers of the tail and the back
    /// end get each batch as a whole, so that their code and data stay in the processor's caches.
    #[expect(clippy::vec_box, reason = "a request travels in its box")]
    sending: Vec<Box<Request>>,
    /// Requests that the back end has completed and that no layer has seen yet.
    finished: Vec<(Box<Request>, Outcome)>,
    /// Requests that layers have held during this call.
    holding: Vec<Held>,
    held: BinaryHeap<Held>,
    held_count: u64,
    aside: Aside,
    /// The group of the stack's owners in the reactor.
    group: OwnerGroup,
    /// The count of kernel operations that use this stack's memory.
    pending: Pending,
    /// The stack that will replace this one.
    successor: Option<Box<Stack>>,
    /// Stacks that this one has replaced, and of which a layer has requests in a store that does
    /// not answer.
    left: Vec<Stack>,
    /// Events of the successor, which it gets when it takes over.
    late_events: Vec<Event>,
    /// The queue's participation in changes of the layers, and the phases that it has completed
    /// and reported.
    registration: Option<Registration>,
    seen: u64,
    reported: u64,
    /// Whether the layers have been closed, and whether the owner has closed the queue.
    is_closed: bool,
    is_leaving: bool,
    /// The front end waits for all requests in flight.
    is_draining: bool,
    /// When to retry to open layers that could not be opened, by the stack's clock.
    retry_ns: u64,
    completed: VecDeque<(Box<Request>, Outcome)>,
    /// The events that [`wait`](Self::wait) has collected.
    events: Vec<Event>,
    in_flight: usize,
    /// Requests that wait for [leftovers](crate::Leftovers), each with the number of the first one
    /// that it does not wait for; and when to look again, in nanoseconds.
    delayed: Vec<(Box<Request>, u64)>,
    look_ns: u64,
    /// The time at which the clock was last read in this round, in nanoseconds, or 0.
    round_ns: Cell<u64>,
    /// The reactor's count of rounds when `round_ns` was cleared.
    rounds: u64,
}

impl Stack {
    /// Opens the layers and the back end of `disk` for one queue. Its owners in the reactor are a
    /// separate group.
    ///
    /// # Errors
    /// When the back end, a layer, or a store of a layer cannot be opened.
    pub(crate) fn open(
        disk: &Arc<Disk>,
        queue: u64,
        members: Composition,
        registered: Option<(Registration, u64)>,
        reactor: &mut Reactor,
        clock: Clock,
    ) -> io::Result<Self> {
        let (outer, outer_pending) = (reactor.group(), reactor.pending());
        let group = reactor.begin_group();
        let stack = Self::open_group(group, Arc::clone(disk), queue, members, reactor, clock);
        if stack.is_err() {
            reactor.retire_group(group);
        }
        reactor.enter(outer, &outer_pending);
        let mut stack = stack?;
        if let Some((registration, seen)) = registered {
            (stack.registration, stack.seen, stack.reported) = (Some(registration), seen, seen);
        }
        Ok(stack)
    }

    fn open_group(
        group: OwnerGroup,
        disk: Arc<Disk>,
        queue: u64,
        members: Composition,
        reactor: &mut Reactor,
        clock: Clock,
    ) -> io::Result<Self> {
        let mut aside = Aside::default();
        let mut context =
            BackendOpenContext { disk: &disk, queue, clock: &clock, reactor, aside: &mut aside };
        let backend = members.home.open_queue(&mut context)?;
        let offers = disk.ladder(&members.layers, &*members.home);
        let mut layers = Vec::with_capacity(members.layers.len());
        for (level, layer) in members.layers.iter().enumerate() {
            let mut context = OpenContext {
                disk: &disk,
                home: &members.home,
                queue,
                level,
                below: offers[level + 1],
                clock: &clock,
                reactor,
                aside: &mut aside,
            };
            layers.push(layer.open_queue(&mut context)?);
        }
        let takes = |layer: &LayerPart| matches!(layer, LayerPart::Queue(_));
        let tail = layers.iter().rposition(takes).map_or(0, |last| last + 1);
        let head = layers.iter().position(takes).unwrap_or(0);
        Ok(Self {
            store_capacity: offers[members.layers.len()].capacity,
            disk,
            members,
            layers,
            backend,
            offers,
            tail,
            head,
            clock,
            pool: Pool::new(queue),
            steps: Steps::default(),
            entering: Vec::new(),
            leaving: Vec::new(),
            sending: Vec::new(),
            finished: Vec::new(),
            holding: Vec::new(),
            held: BinaryHeap::new(),
            held_count: 0,
            aside,
            group,
            pending: reactor.pending(),
            successor: None,
            left: Vec::new(),
            late_events: Vec::new(),
            registration: None,
            seen: 0,
            reported: 0,
            is_closed: false,
            is_leaving: false,
            is_draining: false,
            retry_ns: u64::MAX,
            completed: VecDeque::new(),
            events: Vec::new(),
            in_flight: 0,
            delayed: Vec::new(),
            look_ns: u64::MAX,
            round_ns: Cell::new(0),
            rounds: 0,
        })
    }

    /// The disk that this stack belongs to.
    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    /// The capabilities that the disk offers to its front end.
    pub fn capabilities(&self) -> Capabilities {
        self.offers[0].capabilities
    }

    /// A blank request for the front end to fill in.
    pub fn request(&mut self) -> Box<Request> {
        self.pool.take(0)
    }

    /// Takes back the box of a completed request.
    pub fn recycle(&mut self, request: Box<Request>) {
        self.pool.give(request);
    }

    /// Submits `request`. It completes through [`completed`](Self::completed) exactly once, perhaps
    /// before this call returns.
    pub fn submit(&mut self, request: Box<Request>, reactor: &mut Reactor) {
        self.begin(request, reactor);
        self.run(reactor);
    }

    /// Submits `request` as one of a batch, which reaches the back end with
    /// [`run_round`](Self::run_round).
    pub fn begin(&mut self, mut request: Box<Request>, reactor: &Reactor) {
        debug_assert_eq!(request.origin, 0, "a front end submits its own requests");
        debug_assert!(!self.is_closed, "a queue that closes takes no requests");
        self.is_draining = false;
        request.course.ahead = u32::try_from(self.in_flight).unwrap_or(u32::MAX);
        self.in_flight += 1;
        self.update_round(reactor);
        match self.check(0, &request) {
            Err(error) => self.refuse(0, request, error),
            Ok(()) if !self.disk.leftovers().is_empty() => self.meet_leftovers(request),
            Ok(()) => self.admit(request),
        }
        self.take_steps();
    }

    /// Passes a request that was checked to the first layer.
    fn admit(&mut self, request: Box<Request>) {
        if self.head > 0 { self.entering.push(request) } else { self.pass(0, request) }
    }

    /// Passes the begun requests to the observers of the head, and then to the layers below.
    fn enter(&mut self) {
        let moment = Moment { clock: &self.clock, round_ns: &self.round_ns };
        observe_down(&mut self.layers[..self.head], 0, &mut self.entering, moment);
        let mut entering = std::mem::take(&mut self.entering);
        if entering.len() > 1 {
            for level in self.head..self.tail {
                if let Some((layer, mut crossing)) = self.layer(level) {
                    layer.expect(&entering, &mut crossing);
                }
            }
        }
        for request in entering.drain(..) {
            self.pass(self.head, request);
            self.take_steps();
        }
        self.entering = entering;
    }

    /// Passes the requests that have come up to the observers of the head, and then to the front
    /// end.
    fn hand_up(&mut self) {
        let moment = Moment { clock: &self.clock, round_ns: &self.round_ns };
        observe_up(&mut self.layers[..self.head], 0, &mut self.leaving, moment);
        self.completed.extend(self.leaving.drain(..));
    }

    /// Passes the [begun](Self::begin) requests to the back end, submits its operations to the
    /// kernel, and passes up the requests that have completed.
    ///
    /// # Errors
    /// When the kernel refuses the reactor's ring itself. Completed requests have been passed up
    /// even then.
    pub fn run_round(&mut self, reactor: &mut Reactor) -> io::Result<()> {
        self.send(reactor);
        let submitted = reactor.submit();
        self.update_round(reactor);
        self.run(reactor);
        submitted
    }

    /// Handles an event of the reactor.
    pub fn event(&mut self, event: &Event, reactor: &mut Reactor) {
        if self.successor.as_ref().is_some_and(|successor| successor.owns(event)) {
            // The successor handles no events before it has taken over.
            return self.late_events.push(*event);
        }
        if !self.left.is_empty() && self.take_event_of_left(event, reactor) {
            return;
        }
        self.update_round(reactor);
        self.each_backend(reactor, |queue, context| queue.event(event, context));
        let woken = self.aside.alarm.as_ref().map_or(0, |alarm| alarm.take(event, reactor));
        // The back ends get their round before the thread sleeps.
        self.advance_layers(woken & !(1 << BACKENDS));
        self.run(reactor);
        if self.successor.is_some() {
            self.succeed(reactor);
        }
    }

    /// Resumes held requests that are due, and runs a round of each layer that has requested one,
    /// of the back end and of further stores.
    pub fn advance(&mut self, reactor: &mut Reactor) {
        self.round_ns.set(0);
        if !self.left.is_empty() {
            self.advance_left(reactor);
        }
        if self.look_ns != u64::MAX {
            self.look_at_leftovers();
        }
        if !self.held.is_empty() {
            let now_ns = self.clock.now_ns();
            self.round_ns.set(now_ns);
            while self.held.peek().is_some_and(|held| held.deadline_ns <= now_ns) {
                let Some(Held { level, request, outcome, .. }) = self.held.pop() else { break };
                if let Some((layer, mut crossing)) = self.layer(level) {
                    layer.resume(request, outcome, &mut crossing);
                }
                self.run(reactor);
            }
        }
        if self.aside.wakes.next_ns() != u64::MAX {
            let now_ns = self.clock.now_ns();
            if self.aside.wakes.next_ns() <= now_ns {
                let due = self.aside.wakes.take_due(now_ns);
                self.advance_layers(due);
            }
        }
        self.aside.wakes.backends_ns = u64::MAX;
        self.each_backend(reactor, |queue, context| queue.advance(context));
        self.run(reactor);
        self.round_ns.set(0);
        if self.registration.is_some() && self.disk.life().value() != self.seen {
            self.take_part(reactor);
        } else if self.successor.is_some() {
            self.succeed(reactor);
        }
    }

    /// Runs a round of the layers at `levels`, which are bits.
    fn advance_layers(&mut self, mut levels: u32) {
        while levels != 0 {
            let level = levels.trailing_zeros() as usize;
            levels &= levels - 1;
            if let Some((layer, mut crossing)) = self.layer(level) {
                layer.advance(&mut crossing);
            }
        }
    }

    /// Has the observers [drop](crate::Observer::refresh) what is not current any more.
    pub fn refresh_observers(&mut self) {
        let successors = self.successor.iter_mut().flat_map(|next| next.layers.iter_mut());
        for layer in self.layers.iter_mut().chain(successors) {
            if let LayerPart::Observer(observer) = layer {
                observer.refresh();
            }
        }
        self.left.iter_mut().for_each(Self::refresh_observers);
    }

    /// Whether `event` belongs to this stack or its successor.
    pub fn owns(&self, event: &Event) -> bool {
        event.group == self.group
            || self.successor.as_ref().is_some_and(|successor| successor.owns(event))
            || self.left.iter().any(|left| left.owns(event))
    }

    /// Clears the time of the round if a new round has begun.
    fn update_round(&mut self, reactor: &Reactor) {
        if self.rounds != reactor.rounds() {
            self.rounds = reactor.rounds();
            self.round_ns.set(0);
        }
    }

    /// The latest time for the next call of [`advance`](Self::advance), in nanoseconds of the
    /// stack's clock; `None` if there is none.
    pub fn deadline_ns(&self) -> Option<u64> {
        let held_ns = self.held.peek().map_or(u64::MAX, |held| held.deadline_ns);
        let deadline_ns =
            held_ns.min(self.aside.wakes.next_ns()).min(self.retry_ns).min(self.look_ns);
        let deadline_ns = deadline_ns.min(self.aside.wakes.backends_ns);
        let left_ns = self.left.iter().filter_map(Self::deadline_ns).min();
        let deadline_ns = deadline_ns.min(left_ns.unwrap_or(u64::MAX));
        (deadline_ns != u64::MAX).then_some(deadline_ns)
    }

    /// The time by the stack's clock, in nanoseconds.
    pub fn now_ns(&self) -> u64 {
        self.clock.now_ns()
    }

    /// Takes the next completed request.
    pub fn completed(&mut self) -> Option<(Box<Request>, Outcome)> {
        let done = self.completed.pop_front()?;
        if let Err(kind) = done.1 {
            self.disk.failures().note(kind);
        }
        self.in_flight -= 1;
        Some(done)
    }

    /// Whether there is a completed request to take.
    pub fn has_completed(&self) -> bool {
        !self.completed.is_empty()
    }

    /// The number of requests submitted and not yet taken from [`completed`](Self::completed).
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// The number of the layers' own requests in flight: background work, and parts of submitted
    /// requests.
    pub fn in_flight_of_layers(&self) -> usize {
        self.pool.own()
    }

    /// Whether neither the owner nor the layers have requests or computations in flight, but for
    /// requests that [may be left](LayerQueue::may_be_left), and the back ends are idle.
    pub fn is_drained(&self) -> bool {
        self.in_flight == 0
            && (self.pool.own() == 0 || !self.are_own_awaited())
            && self.aside.computing.load(Ordering::Relaxed) == 0
            && self.backend.is_idle()
            && self.aside.is_idle()
    }

    /// The layer at `level` and its crossing; `None` for an observer.
    fn layer(&mut self, level: usize) -> Option<(&mut dyn LayerQueue, Crossing<'_>)> {
        let crossing = Crossing {
            level,
            steps: &mut self.steps,
            held: &mut self.holding,
            pool: &mut self.pool,
            aside: &mut self.aside,
            moment: Moment { clock: &self.clock, round_ns: &self.round_ns },
            is_draining: self.is_draining,
        };
        match &mut self.layers[level] {
            LayerPart::Queue(queue) => Some((&mut **queue, crossing)),
            LayerPart::Observer(_) => None,
        }
    }

    /// Takes steps until every request is completed, held, or waits for the back end or a store.
    fn run(&mut self, reactor: &mut Reactor) {
        loop {
            self.take_steps();
            self.send(reactor);
            if self.aside.is_busy() {
                let refused = self.aside.send(reactor, &self.clock);
                self.disk.counters().refused.fetch_add(refused, Ordering::Relaxed);
                self.return_from_stores();
            } else if self.finished.is_empty() {
                break;
            }
            self.rise();
        }
        if !self.leaving.is_empty() {
            self.hand_up();
        }
        if !self.holding.is_empty() {
            for mut held in self.holding.drain(..) {
                held.sequence = self.held_count;
                self.held_count += 1;
                self.held.push(held);
            }
        }
    }

    /// Passes up the requests that the back end has completed.
    fn rise(&mut self) {
        let moment = Moment { clock: &self.clock, round_ns: &self.round_ns };
        observe_up(&mut self.layers[self.tail..], self.tail, &mut self.finished, moment);
        if self.tail == 0 {
            self.completed.extend(self.finished.drain(..));
            return;
        }
        // Each request goes all the way up before the next. Requests that layers submit meanwhile
        // may complete immediately; they are passed up afterwards.
        let mut finished = std::mem::take(&mut self.finished);
        for (mut request, outcome) in finished.drain(..) {
            request.course.returned_ns = self.round_ns.get();
            self.up(self.tail, request, outcome);
            self.take_steps();
        }
        self.finished = finished;
    }

    /// Returns requests that further stores have completed to their layers.
    fn return_from_stores(&mut self) {
        let mut finished = self.aside.finished();
        for (request, outcome) in finished.drain(..) {
            if let Some(split) = request.split {
                self.aside.splits.note(split, outcome);
            }
            let level = self.aside.level(&request).unwrap_or_default();
            if let Some((layer, mut crossing)) = self.layer(level) {
                layer.returned(request, outcome, &mut crossing);
            }
            self.take_steps();
        }
        self.aside.reuse(finished);
    }

    /// Takes all pending steps.
    fn take_steps(&mut self) {
        while let Some(step) = self.steps.pop() {
            match step {
                Step::Down { level, request } => self.down(level, request),
                Step::Up { level, request, outcome } => self.up(level, request, outcome),
                Step::Gathered { level, parent, outcome } => {
                    if let Some((layer, mut crossing)) = self.layer(level) {
                        layer.gathered(parent, outcome, &mut crossing);
                    }
                }
            }
        }
    }

    /// Passes the requests that have come down to the observers of the tail, and then to the back
    /// end.
    fn send(&mut self, reactor: &mut Reactor) {
        if !self.entering.is_empty() {
            self.enter();
        }
        if self.sending.is_empty() {
            return;
        }
        let moment = Moment { clock: &self.clock, round_ns: &self.round_ns };
        observe_down(&mut self.layers[self.tail..], self.tail, &mut self.sending, moment);
        let knows_extents = self.offers[self.layers.len()].capabilities.extents;
        let mut context = BackendContext {
            reactor,
            clock: &self.clock,
            completed: &mut self.finished,
            wake_ns: &mut self.aside.wakes.backends_ns,
        };
        for mut request in self.sending.drain(..) {
            request.course.sent_ns = self.round_ns.get();
            request.course.layer = 0;
            match request.operation {
                Operation::GetId => {
                    request.buffers.copy_from(0, self.disk.serial());
                    context.complete(request, Ok(()));
                }
                Operation::Extents if !knows_extents => {
                    let (offset, length) = (request.offset, request.length);
                    request.extents.push(Extent { offset, length, allocation: Allocation::Data });
                    context.complete(request, Ok(()));
                }
                Operation::Read
                | Operation::Write
                | Operation::Flush
                | Operation::Discard
                | Operation::WriteZeroes
                | Operation::Extents => self.backend.submit(request, &mut context),
            }
        }
    }
}

impl Drop for Stack {
    /// If the kernel still works on requests, the memory of split requests must stay valid, like
    /// that of the requests themselves.
    fn drop(&mut self) {
        if self.pending.count() > 0 {
            self.aside.splits.leak();
        }
    }
}
