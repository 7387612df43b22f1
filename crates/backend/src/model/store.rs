//! A back end with the timing of another disk, for the additional stores of layers, which have no
//! layers.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use fathom_block::{
    Backend, BackendContext, BackendOpenContext, BackendProblem, BackendQueue, Capabilities,
    ErrorKind, Figure, Geometry, Outcome, Request,
};
use fathom_reactor::Event;
use parking_lot::Mutex;

use super::{Due, Model, State, task};

/// A back end with the timing of a modelled disk.
pub struct Modelled {
    inner: Arc<dyn Backend>,
    model: Model,
}

impl Modelled {
    /// `inner`, with the timing of `model`.
    pub fn new(inner: Arc<dyn Backend>, model: Model) -> Self {
        Self { inner, model }
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

    fn open_queue(
        &self,
        context: &mut BackendOpenContext<'_>,
    ) -> io::Result<Box<dyn BackendQueue>> {
        Ok(Box::new(ModelledQueue {
            inner: self.inner.open_queue(context)?,
            state: Arc::clone(&self.model.state),
            offset: self.model.offset,
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

    fn figures(&self) -> Vec<Figure> {
        self.inner.figures()
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

    fn save_state(&self, limit: Duration) -> io::Result<()> {
        self.inner.save_state(limit)
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
    /// The model's numbers of requests in flight, by request.
    numbers: HashMap<u64, u64>,
    held: Vec<Held>,
    /// The requests that the back end has completed.
    completed: Vec<(Box<Request>, Outcome)>,
}

impl ModelledQueue {
    /// Completes the requests that the modelled disk has completed.
    fn complete_due(&mut self, context: &mut BackendContext<'_>) {
        for (request, outcome) in self.completed.drain(..) {
            match self.numbers.remove(&request.id) {
                Some(number) => self.held.push(Held { deadline_ns: 0, number, request, outcome }),
                None => context.complete(request, outcome),
            }
        }
        if self.held.is_empty() {
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
        context.wake_at(next_ns);
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
        self.complete_due(context);
    }

    fn event(&mut self, event: &Event, context: &mut BackendContext<'_>) {
        self.inner.event(event, &mut context.nested(&mut self.completed));
        self.complete_due(context);
    }

    fn advance(&mut self, context: &mut BackendContext<'_>) {
        self.inner.advance(&mut context.nested(&mut self.completed));
        self.complete_due(context);
    }

    fn close(&mut self, context: &mut BackendContext<'_>) {
        self.inner.close(&mut context.nested(&mut self.completed));
    }

    fn reopen(&mut self, context: &mut BackendContext<'_>) {
        self.inner.reopen(&mut context.nested(&mut self.completed));
    }

    fn is_idle(&self) -> bool {
        self.inner.is_idle()
    }
}
