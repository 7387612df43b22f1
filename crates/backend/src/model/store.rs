//! A back end with the timing of another disk, for the additional stores of layers, which have no
//! layers.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fathom_block::{
    Backend, BackendContext, BackendProblem, BackendQueue, Capabilities, ErrorKind, Geometry,
    Outcome, Request,
};
use fathom_reactor::{Event, Owner, Reactor};
use parking_lot::Mutex;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use super::{Due, Model, State, task};

/// The token of the timer's watch.
const TOKEN: u64 = 0;

/// A back end with the timing of a modelled disk.
pub struct Modelled {
    inner: Arc<dyn Backend>,
    model: Model,
    due_ns: Arc<AtomicU64>,
}

impl Modelled {
    /// `inner`, with the timing of `model`.
    pub fn new(inner: Arc<dyn Backend>, model: Model) -> Self {
        Self { inner, model, due_ns: Arc::new(AtomicU64::new(u64::MAX)) }
    }

    /// When the queue that was used last has to be called again, in nanoseconds of its clock;
    /// [`u64::MAX`] if nothing is in flight. In simulated time, the queue has no timer.
    pub fn due_ns(&self) -> u64 {
        self.due_ns.load(Ordering::Relaxed)
    }
}

impl Backend for Modelled {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn capacity(&self) -> u64 {
        self.inner.capacity()
    }

    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { rotational: self.model.rotational, ..self.inner.capabilities() }
    }

    fn open_queue(&self, reactor: &mut Reactor) -> io::Result<Box<dyn BackendQueue>> {
        let inner = self.inner.open_queue(reactor)?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = File::from(timerfd_create(TimerfdClockId::Monotonic, flags)?);
        let owner = reactor.register();
        reactor.watch_always(owner, TOKEN, timer.as_fd());
        Ok(Box::new(ModelledQueue {
            inner,
            state: Arc::clone(&self.model.state),
            offset: self.model.offset,
            timer,
            owner,
            armed_ns: u64::MAX,
            due_ns: Arc::clone(&self.due_ns),
            numbers: HashMap::new(),
            held: Vec::new(),
            completed: Vec::new(),
        }))
    }

    fn resize(&self, capacity: u64) -> Result<(), ErrorKind> {
        self.inner.resize(capacity)
    }

    fn problems(&self) -> Vec<BackendProblem> {
        self.inner.problems()
    }

    fn losses(&self) -> u64 {
        self.inner.losses()
    }

    fn may_act_late(&self) -> bool {
        self.inner.may_act_late()
    }

    fn inspect(&self) {
        self.inner.inspect();
    }

    fn recover(&self) -> io::Result<()> {
        self.inner.recover()
    }
}

/// A request that the back end has completed and the modelled disk has not.
struct Held {
    deadline_ns: u64,
    number: u64,
    request: Box<Request>,
    outcome: Outcome,
}

struct ModelledQueue {
    inner: Box<dyn BackendQueue>,
    state: Arc<Mutex<State>>,
    offset: u64,
    timer: File,
    owner: Owner,
    /// The time for which the timer is set, in nanoseconds.
    armed_ns: u64,
    /// See [`Modelled::due_ns`].
    due_ns: Arc<AtomicU64>,
    /// The model's numbers of requests in flight, by request.
    numbers: HashMap<u64, u64>,
    held: Vec<Held>,
    /// The requests that the back end has completed.
    completed: Vec<(Box<Request>, Outcome)>,
}

impl ModelledQueue {
    /// Completes the requests that the modelled disk has completed.
    fn settle(&mut self, context: &mut BackendContext<'_>) {
        for (request, outcome) in self.completed.drain(..) {
            match self.numbers.remove(&request.id) {
                Some(number) => self.held.push(Held { deadline_ns: 0, number, request, outcome }),
                None => context.complete(request, outcome),
            }
        }
        if self.held.is_empty() {
            self.due_ns.store(u64::MAX, Ordering::Relaxed);
            return;
        }
        let now_ns = context.now_ns();
        let mut next_ns = u64::MAX;
        for mut held in std::mem::take(&mut self.held) {
            if held.deadline_ns <= now_ns {
                let mut state = self.state.lock();
                let due = if held.outcome.is_ok() {
                    state.due(held.number, now_ns)
                } else {
                    Due::At(now_ns)
                };
                held.deadline_ns = match due {
                    Due::At(done_ns) if done_ns <= now_ns => {
                        state.forget(held.number);
                        drop(state);
                        context.complete(held.request, held.outcome);
                        continue;
                    }
                    Due::At(deadline_ns) | Due::Undecided(deadline_ns) => deadline_ns,
                };
            }
            next_ns = next_ns.min(held.deadline_ns);
            self.held.push(held);
        }
        self.due_ns.store(next_ns, Ordering::Relaxed);
        if next_ns < self.armed_ns && !context.is_simulated() {
            self.arm(next_ns, now_ns);
        }
    }

    fn arm(&mut self, deadline_ns: u64, now_ns: u64) {
        let left_ns = deadline_ns.saturating_sub(now_ns).max(1);
        let it_value = Timespec {
            tv_sec: (left_ns / 1_000_000_000) as i64,
            tv_nsec: (left_ns % 1_000_000_000) as _,
        };
        let it_interval = Timespec { tv_sec: 0, tv_nsec: 0 };
        let time = Itimerspec { it_interval, it_value };
        // Cannot fail: the descriptor is a timer, and the time is valid.
        if timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &time).is_ok() {
            self.armed_ns = deadline_ns;
        }
    }
}

impl BackendQueue for ModelledQueue {
    fn submit(&mut self, request: Box<Request>, context: &mut BackendContext<'_>) {
        if let Some(task) = task(&request) {
            let now_ns = context.now_ns();
            let mut state = self.state.lock();
            let offset = self.offset.saturating_add(request.offset);
            let number = state.arrive(task, offset, request.length, now_ns);
            self.numbers.insert(request.id, number);
        }
        self.inner.submit(request, &mut context.nested(&mut self.completed));
        self.settle(context);
    }

    fn event(&mut self, event: &Event, context: &mut BackendContext<'_>) {
        if event.owner == self.owner {
            let _ = (&self.timer).read(&mut [0; 8]);
            if !event.more {
                context.reactor().watch_always(self.owner, TOKEN, self.timer.as_fd());
            }
            self.armed_ns = u64::MAX;
        }
        self.inner.event(event, &mut context.nested(&mut self.completed));
        self.settle(context);
    }

    fn advance(&mut self, context: &mut BackendContext<'_>) {
        self.inner.advance(&mut context.nested(&mut self.completed));
        self.settle(context);
    }
}
