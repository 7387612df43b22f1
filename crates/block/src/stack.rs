//! One queue's way through a disk, and the checked crossing.

mod life;

use std::cell::Cell;
use std::collections::{BinaryHeap, VecDeque};
use std::io;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fathom_reactor::{Event, Group, Pending, Reactor};

use crate::aside::Aside;
use crate::backend::{BackendContext, BackendQueue};
use crate::change::Registration;
use crate::clock::{Clock, Moment};
use crate::crossing::{Crossing, Held, Pool, Step, Steps};
use crate::disk::Disk;
use crate::geometry::Capabilities;
use crate::layer::{Layer, LayerPart, LayerQueue};
use crate::observer::Place;
use crate::open::{Offer, OpenContext};
use crate::request::{Allocation, ErrorKind, Extent, Operation, Outcome, Request};

/// What a crossing refused, counted for the whole disk.
#[derive(Debug, Default)]
pub struct StackCounters {
    /// Requests that contradicted themselves or asked for what the disk does not offer.
    pub refused: AtomicU64,
}

/// A disk's layers and back end, opened for one queue and used by that queue's thread alone.
///
/// The owner calls [`submit`](Self::submit) for each request, [`event`](Self::event) for each
/// event of the reactor, [`advance`](Self::advance) once a round, and takes what is done from
/// [`completed`](Self::completed). [`deadline_ns`](Self::deadline_ns) says how long it may sleep.
pub struct Stack {
    disk: Arc<Disk>,
    /// The layers, and the part of each in this queue.
    members: Vec<Arc<dyn Layer>>,
    layers: Vec<LayerPart>,
    backend: Box<dyn BackendQueue>,
    /// What each level offers to the one above: the layers', then the back end's.
    offers: Vec<Offer>,
    /// The back end's capacity when the offers were made.
    store_capacity: u64,
    /// The first of the layers above the back end that only look on, or the number of layers.
    tail: usize,
    clock: Clock,
    pool: Pool,
    steps: Steps,
    /// What has gone through all layers that take requests. Those of the tail and the back end
    /// get what came together together: their code and data are warm for all but the first.
    #[expect(clippy::vec_box, reason = "a request travels in its box")]
    sending: Vec<Box<Request>>,
    /// What the back end has given back and no layer has seen yet.
    finished: Vec<(Box<Request>, Outcome)>,
    /// What layers asked to be held during this call.
    holding: Vec<Held>,
    held: BinaryHeap<Held>,
    held_count: u64,
    aside: Aside,
    /// The reactor's owners that belong to this stack, and what the kernel has of their memory.
    group: Group,
    pending: Pending,
    /// What takes this stack's place, and the events that it gets then.
    successor: Option<Box<Stack>>,
    late_events: Vec<Event>,
    /// That the queue takes part in changes of the layers, and the phase that it has come to.
    registration: Option<Registration>,
    seen: u64,
    reported: u64,
    /// The layers have been told to finish, and, by whoever owns the queue, for good.
    is_closed: bool,
    is_leaving: bool,
    /// When layers that could not be opened are tried again, by the stack's clock.
    retry_ns: u64,
    completed: VecDeque<(Box<Request>, Outcome)>,
    /// What [`wait`](Self::wait) has collected.
    events: Vec<Event>,
    in_flight: usize,
    /// The time of this round by the clock, or 0 where nobody has asked yet.
    round_ns: Cell<u64>,
    /// The reactor's count of rounds when `round_ns` was cleared.
    rounds: u64,
}

impl Stack {
    /// Opens the layers and the back end of `disk` for one queue. What it registers with the reactor
    /// is a group of its own.
    ///
    /// # Errors
    /// When the back end, a layer, or a store of a layer cannot be opened.
    pub(crate) fn open(
        disk: &Arc<Disk>,
        queue: u64,
        members: Vec<Arc<dyn Layer>>,
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
        group: Group,
        disk: Arc<Disk>,
        queue: u64,
        members: Vec<Arc<dyn Layer>>,
        reactor: &mut Reactor,
        clock: Clock,
    ) -> io::Result<Self> {
        let backend = disk.backend().open_queue(reactor)?;
        let offers = disk.ladder(&members);
        let mut aside = Aside::default();
        let mut layers = Vec::with_capacity(members.len());
        for (level, layer) in members.iter().enumerate() {
            let mut context = OpenContext {
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
        Ok(Self {
            store_capacity: offers[members.len()].capacity,
            disk,
            members,
            layers,
            backend,
            offers,
            tail,
            clock,
            pool: Pool::new(queue),
            steps: Steps::default(),
            sending: Vec::new(),
            finished: Vec::new(),
            holding: Vec::new(),
            held: BinaryHeap::new(),
            held_count: 0,
            aside,
            group,
            pending: reactor.pending(),
            successor: None,
            late_events: Vec::new(),
            registration: None,
            seen: 0,
            reported: 0,
            is_closed: false,
            is_leaving: false,
            retry_ns: u64::MAX,
            completed: VecDeque::new(),
            events: Vec::new(),
            in_flight: 0,
            round_ns: Cell::new(0),
            rounds: 0,
        })
    }

    /// The disk that this stack belongs to.
    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    /// What the disk offers to its front end.
    pub fn capabilities(&self) -> Capabilities {
        self.offers[0].capabilities
    }

    /// A blank request for the front end to fill in.
    pub fn request(&mut self) -> Box<Request> {
        self.pool.take(0)
    }

    /// Takes back the box of a request that is done.
    pub fn recycle(&mut self, request: Box<Request>) {
        self.pool.give(request);
    }

    /// Sends `request` on its way. It comes back through [`completed`](Self::completed) exactly
    /// once, perhaps before this call returns.
    pub fn submit(&mut self, request: Box<Request>, reactor: &mut Reactor) {
        self.begin(request, reactor);
        self.run(reactor);
    }

    /// Sends `request` on its way as one of several: through the layers, and as far as
    /// [`settle`](Self::settle).
    pub fn begin(&mut self, mut request: Box<Request>, reactor: &Reactor) {
        debug_assert_eq!(request.origin, 0, "a front end submits its own requests");
        debug_assert!(!self.is_closed, "a queue that closes takes no requests");
        request.course.ahead = u32::try_from(self.in_flight).unwrap_or(u32::MAX);
        self.in_flight += 1;
        self.look_at_round(reactor);
        self.down(0, request);
        self.take_steps();
    }

    /// Lets the back end have what has [begun](Self::begin), hands that to the kernel, and lets
    /// what is done at once go up.
    ///
    /// # Errors
    /// When the kernel refuses the reactor's ring itself. What is done has gone up all the same.
    pub fn settle(&mut self, reactor: &mut Reactor) -> io::Result<()> {
        self.send(reactor);
        let submitted = reactor.submit();
        self.look_at_round(reactor);
        self.run(reactor);
        submitted
    }

    /// Lets the back end have an event of the reactor.
    pub fn event(&mut self, event: &Event, reactor: &mut Reactor) {
        if self.successor.as_ref().is_some_and(|successor| successor.owns(event)) {
            // It does nothing before it has taken over.
            return self.late_events.push(*event);
        }
        self.look_at_round(reactor);
        let mut context =
            BackendContext { reactor, clock: &self.clock, completed: &mut self.finished };
        self.backend.event(event, &mut context);
        if self.aside.has_stores() {
            self.aside.event(event, reactor, &self.clock);
        }
        let woken = self.aside.alarm.as_ref().map_or(0, |alarm| alarm.take(event, reactor));
        self.advance_layers(woken);
        self.run(reactor);
        if self.successor.is_some() {
            self.succeed(reactor);
        }
    }

    /// Resumes held requests that are due, lets layers that asked for it make their round, and the
    /// back end and further stores make theirs.
    pub fn advance(&mut self, reactor: &mut Reactor) {
        self.round_ns.set(0);
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
        let mut context =
            BackendContext { reactor, clock: &self.clock, completed: &mut self.finished };
        self.backend.advance(&mut context);
        if self.aside.has_stores() {
            self.aside.advance(reactor, &self.clock);
        }
        self.run(reactor);
        self.round_ns.set(0);
        if self.registration.is_some() && self.disk.life().value() != self.seen {
            self.take_part(reactor);
        } else if self.successor.is_some() {
            self.succeed(reactor);
        }
    }

    /// Lets the layers at `levels`, bits, make their round.
    fn advance_layers(&mut self, mut levels: u32) {
        while levels != 0 {
            let level = levels.trailing_zeros() as usize;
            levels &= levels - 1;
            if let Some((layer, mut crossing)) = self.layer(level) {
                layer.advance(&mut crossing);
            }
        }
    }

    /// Whether `event` is of this stack, or of the one that is about to take its place.
    pub fn owns(&self, event: &Event) -> bool {
        event.group == self.group
            || self.successor.as_ref().is_some_and(|successor| successor.owns(event))
    }

    /// Forgets the time of the round when another has begun.
    fn look_at_round(&mut self, reactor: &Reactor) {
        if self.rounds != reactor.rounds() {
            self.rounds = reactor.rounds();
            self.round_ns.set(0);
        }
    }

    /// When [`advance`](Self::advance) must be called at the latest, by the stack's clock.
    pub fn deadline_ns(&self) -> Option<u64> {
        let held_ns = self.held.peek().map_or(u64::MAX, |held| held.deadline_ns);
        let deadline_ns = held_ns.min(self.aside.wakes.next_ns()).min(self.retry_ns);
        (deadline_ns != u64::MAX).then_some(deadline_ns)
    }

    /// The time by the stack's clock, in nanoseconds.
    pub fn now_ns(&self) -> u64 {
        self.clock.now_ns()
    }

    /// The next request that is done.
    pub fn completed(&mut self) -> Option<(Box<Request>, Outcome)> {
        let done = self.completed.pop_front()?;
        if let Err(kind) = done.1 {
            self.disk.failures().note(kind);
        }
        self.in_flight -= 1;
        Some(done)
    }

    /// Whether a request that is done waits to be taken.
    pub fn has_completed(&self) -> bool {
        !self.completed.is_empty()
    }

    /// How many requests have been submitted and not yet taken back.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// How many requests of layers' own are under way: background work, and parts of requests that
    /// were submitted.
    pub fn in_flight_of_layers(&self) -> usize {
        self.pool.own()
    }

    /// Whether nothing is under way, neither of the owner's nor of the layers'.
    pub fn is_drained(&self) -> bool {
        self.in_flight == 0
            && self.pool.own() == 0
            && self.aside.computing.load(Ordering::Relaxed) == 0
    }

    /// The layer at `level`, and what it can reach; `None` for one that looks on.
    fn layer(&mut self, level: usize) -> Option<(&mut dyn LayerQueue, Crossing<'_>)> {
        let crossing = Crossing {
            level,
            steps: &mut self.steps,
            held: &mut self.holding,
            pool: &mut self.pool,
            aside: &mut self.aside,
            moment: Moment { clock: &self.clock, round_ns: &self.round_ns },
        };
        match &mut self.layers[level] {
            LayerPart::Queue(queue) => Some((&mut **queue, crossing)),
            LayerPart::Observer(_) => None,
        }
    }

    /// Takes steps until every request waits for something outside.
    fn run(&mut self, reactor: &mut Reactor) {
        loop {
            self.take_steps();
            self.send(reactor);
            if self.aside.is_busy() {
                let refused = self.aside.send(reactor, &self.clock);
                self.disk.counters().refused.fetch_add(refused, Ordering::Relaxed);
                self.come_back();
            } else if self.finished.is_empty() {
                break;
            }
            self.rise();
        }
        if !self.holding.is_empty() {
            for mut held in self.holding.drain(..) {
                held.sequence = self.held_count;
                self.held_count += 1;
                self.held.push(held);
            }
        }
    }

    /// Lets what the back end is done with go up.
    fn rise(&mut self) {
        let moment = Moment { clock: &self.clock, round_ns: &self.round_ns };
        for (level, layer) in self.layers.iter_mut().enumerate().skip(self.tail).rev() {
            let LayerPart::Observer(observer) = layer else { continue };
            observer.up(&mut self.finished, Place { level, moment });
        }
        if self.tail == 0 {
            self.completed.extend(self.finished.drain(..));
            return;
        }
        // Each goes all the way up before the next. What a layer submits meanwhile may finish at
        // once: it has its turn afterwards.
        let mut finished = std::mem::take(&mut self.finished);
        for (mut request, outcome) in finished.drain(..) {
            request.course.returned_ns = self.round_ns.get();
            self.up(self.tail, request, outcome);
            self.take_steps();
        }
        self.finished = finished;
    }

    /// Lets the layers have what their further stores are done with.
    fn come_back(&mut self) {
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

    /// Takes the steps of the layers until none is left.
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

    /// Lets the layers of the tail see what has come down to them, and the back end have it.
    fn send(&mut self, reactor: &mut Reactor) {
        if self.sending.is_empty() {
            return;
        }
        let moment = Moment { clock: &self.clock, round_ns: &self.round_ns };
        for (level, layer) in self.layers.iter_mut().enumerate().skip(self.tail) {
            let LayerPart::Observer(observer) = layer else { continue };
            observer.down(&mut self.sending, Place { level, moment });
        }
        let knows_extents = self.offers[self.layers.len()].capabilities.extents;
        let mut context =
            BackendContext { reactor, clock: &self.clock, completed: &mut self.finished };
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

    /// The crossing downward: the one place where a request is checked against what the part
    /// below it offers. Layers that look on see it on the way to the part that takes it, and need
    /// no check of their own: they can change neither the request nor what is offered.
    fn down(&mut self, level: usize, mut request: Box<Request>) {
        if let Err(error) = self.check(level, &request) {
            self.disk.counters().refused.fetch_add(1, Ordering::Relaxed);
            self.steps.push(Step::Up { level, request, outcome: Err(error) });
            return;
        }
        for level in level..self.tail {
            let moment = Moment { clock: &self.clock, round_ns: &self.round_ns };
            if let LayerPart::Observer(observer) = &mut self.layers[level] {
                observer.down(slice::from_mut(&mut request), Place { level, moment });
            } else if let Some((layer, mut crossing)) = self.layer(level) {
                request.course.layer = 1 + level as u8;
                return layer.submit(request, &mut crossing);
            }
        }
        self.sending.push(request);
    }

    /// The crossing upward: to the maker of the request, or to the layer above `level`.
    fn up(&mut self, level: usize, request: Box<Request>, outcome: Outcome) {
        if let Some(split) = request.split {
            self.aside.splits.note(split, outcome);
        }
        let mut done = (request, outcome);
        for above in (0..level).rev() {
            let moment = Moment { clock: &self.clock, round_ns: &self.round_ns };
            if let LayerPart::Observer(observer) = &mut self.layers[above] {
                observer.up(slice::from_mut(&mut done), Place { level: above, moment });
            } else if let Some((layer, mut crossing)) = self.layer(above) {
                let (request, outcome) = done;
                return if request.origin == above + 1 {
                    layer.returned(request, outcome, &mut crossing);
                } else {
                    layer.complete(request, outcome, &mut crossing);
                };
            }
        }
        debug_assert_eq!(done.0.origin, 0, "a request goes no further than to its maker");
        self.completed.push_back(done);
    }

    /// Whether `level` may be asked for `request`.
    fn check(&mut self, level: usize, request: &Request) -> Result<(), ErrorKind> {
        let store_capacity = self.disk.store_capacity();
        if store_capacity != self.store_capacity {
            self.store_capacity = store_capacity;
            self.measure();
        }
        let offer = &self.offers[level];
        let alignment_mask = u64::from(offer.geometry.alignment) - 1;
        request.check(&offer.capabilities, offer.capacity, alignment_mask)
    }

    /// Takes up the capacity of the store.
    #[cold]
    fn measure(&mut self) {
        let mut capacity = self.store_capacity;
        self.offers[self.members.len()].capacity = capacity;
        let levels = self.members.len();
        for (offer, layer) in self.offers[..levels].iter_mut().zip(&self.members).rev() {
            capacity = layer.capacity(capacity);
            offer.capacity = capacity;
        }
    }
}

impl Drop for Stack {
    /// The memory of what is split over requests that the kernel still works on must stay, as that
    /// of requests themselves does.
    fn drop(&mut self) {
        if self.pending.count() > 0 {
            self.aside.splits.leak();
        }
    }
}
