//! A queue's waits, its part in changes of the layers, and its end.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_reactor::Reactor;

use super::Stack;
use crate::backend::{BackendContext, BackendQueue};
use crate::change::{CLOSE, Composition, PREPARE, phase};
use crate::crossing::Crossing;
use crate::layer::LayerQueue;
use crate::request::ErrorKind;

/// The interval between attempts to open the layers of a queue, in nanoseconds.
const RETRY_NS: u64 = 1_000_000_000;

/// The longest sleep of a queue that closes, if the kernel has none of its operations.
const FINISH_INTERVAL: Duration = Duration::from_millis(10);

impl Stack {
    /// Carries out the queue's part in a change of the disk's layers. All queues go through the
    /// phases together. The queue takes no requests meanwhile ([`is_closing`](Self::is_closing)).
    #[cold]
    pub(super) fn take_part(&mut self, reactor: &mut Reactor) {
        if self.in_flight > 0 {
            return self.drain(reactor);
        }
        let value = self.disk.life().value();
        if self.is_leaving {
            // It does not delay the change once its layers have finished.
            if self.has_finished() {
                self.report(value);
            }
            return;
        }
        match phase(value) {
            PREPARE => {
                self.prepare(value, reactor);
                self.report(value);
            }
            CLOSE => {
                // This prepares a queue that was opened after the previous phase.
                self.prepare(value, reactor);
                self.close_layers(reactor);
                if self.has_finished() {
                    self.report(value);
                }
            }
            _ => self.finish_change(value, reactor),
        }
    }

    /// Has the layers pass on the requests that they hold back by their own rules, because the
    /// front end waits for all requests in flight. Ends with the next request. May be called
    /// repeatedly.
    pub fn drain(&mut self, reactor: &mut Reactor) {
        if self.in_flight == 0 || std::mem::replace(&mut self.is_draining, true) {
            return;
        }
        self.each_layer(|layer, next| layer.drain(next));
        self.run(reactor);
    }

    /// Calls `visit` with each layer, the uppermost first.
    pub(super) fn each_layer(&mut self, visit: impl Fn(&mut dyn LayerQueue, &mut Crossing<'_>)) {
        for level in 0..self.layers.len() {
            if let Some((layer, mut crossing)) = self.layer(level) {
                visit(layer, &mut crossing);
            }
        }
    }

    /// Calls `call` with the queue of the disk's own store, and with those of further stores.
    #[inline]
    pub(super) fn each_backend(
        &mut self,
        reactor: &mut Reactor,
        call: impl Fn(&mut dyn BackendQueue, &mut BackendContext<'_>),
    ) {
        let mut context = BackendContext {
            reactor,
            clock: &self.clock,
            completed: &mut self.finished,
            wake_ns: &mut self.aside.wakes.backends_ns,
        };
        call(&mut *self.backend, &mut context);
        self.aside.each_store(reactor, &self.clock, call);
    }

    /// Opens the new layers, if they are not open yet.
    fn prepare(&mut self, value: u64, reactor: &mut Reactor) {
        if self.successor.is_none() {
            let Some(next) = self.disk.life().next() else { return };
            if let Err(error) = self.open_successor(next, reactor) {
                self.disk.life().fail(value, &error);
            }
        }
    }

    fn open_successor(&mut self, members: Composition, reactor: &mut Reactor) -> io::Result<()> {
        let (disk, queue) = (Arc::clone(&self.disk), self.disk.next_queue());
        let successor = Self::open(&disk, queue, members, None, reactor, self.clock.clone())?;
        self.successor = Some(Box::new(successor));
        Ok(())
    }

    /// Ends the change: the disk's current layers take over, if the queue has others or has closed
    /// them.
    fn finish_change(&mut self, value: u64, reactor: &mut Reactor) {
        let now = self.disk.composition();
        let has_them = |stack: &Self| stack.members.is_same(&now.layers, &now.home);
        if self.successor.as_ref().is_some_and(|successor| !has_them(successor)) {
            self.drop_successor(reactor);
        }
        if self.is_closed && has_them(self) {
            // The change has failed. What the layers have in flight may hang, and must not delay
            // requests.
            self.reopen_layers(reactor);
        }
        if self.is_closed || !has_them(self) {
            if self.successor.is_none() {
                if self.retry_ns != u64::MAX && self.retry_ns > self.clock.now_ns() {
                    return;
                }
                self.retry_ns = u64::MAX;
                if self.open_successor(now, reactor).is_err() {
                    // The queue serves no requests until the layers can be opened. The failure is
                    // reported to the disk's watcher.
                    self.disk.failures().note(ErrorKind::Io);
                    self.retry_ns = self.clock.now_ns() + RETRY_NS;
                    return;
                }
            }
            self.close_layers(reactor);
            self.seen = value;
            return self.succeed(reactor);
        }
        self.drop_successor(reactor);
        self.seen = value;
        self.report(value);
    }

    fn drop_successor(&mut self, reactor: &mut Reactor) {
        if let Some(mut successor) = self.successor.take() {
            successor.end(reactor);
        }
        self.late_events.clear();
    }

    fn report(&mut self, value: u64) {
        if let Some(registration) = self.registration.as_ref().filter(|_| self.reported != value) {
            self.disk.life().report(registration.queue, value);
            self.reported = value;
        }
    }

    /// Makes the layers finish the work that they have started. The owner must have no requests in
    /// flight and must not submit any afterwards. [`is_drained`](Self::is_drained) returns true
    /// when the layers have finished.
    pub fn close(&mut self, reactor: &mut Reactor) {
        self.is_leaving = true;
        self.close_layers(reactor);
    }

    fn close_layers(&mut self, reactor: &mut Reactor) {
        debug_assert_eq!(self.in_flight, 0, "a front end drains its queue first");
        if std::mem::replace(&mut self.is_closed, true) {
            return;
        }
        // Layers may hold back requests of the layers above them.
        self.is_draining = true;
        self.each_layer(|layer, next| layer.drain(next));
        self.each_layer(|layer, next| layer.close(next));
        self.run(reactor);
        self.each_backend(reactor, |queue, context| queue.close(context));
        self.run(reactor);
    }

    fn reopen_layers(&mut self, reactor: &mut Reactor) {
        (self.is_closed, self.is_draining) = (false, false);
        self.each_backend(reactor, |queue, context| queue.reopen(context));
        self.each_layer(|layer, next| layer.reopen(next));
        self.run(reactor);
    }

    /// [Closes](Self::close) the queue, and waits for its layers to finish, for at most `limit`.
    /// For the owner of a reactor without other users. Returns whether they have finished.
    ///
    /// # Errors
    /// When the kernel refuses the reactor's ring itself.
    pub fn finish(&mut self, reactor: &mut Reactor, limit: Duration) -> io::Result<bool> {
        self.close(reactor);
        let end = Instant::now() + limit;
        while !self.has_finished() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            // A store without operations in the kernel does not wake the thread: it continues in
            // the next round.
            let limit = if self.is_pending() { left } else { left.min(FINISH_INTERVAL) };
            self.wait(reactor, Some(limit))?;
        }
        if self.is_left() || !self.left.is_empty() {
            reactor.leave_behind();
        }
        Ok(true)
    }

    /// Makes a round and sleeps until there is an event, a layer is due, or `limit` has passed.
    /// Does not sleep if a request has completed. For the owner of a reactor without other users.
    ///
    /// # Errors
    /// When the kernel refuses the reactor's ring itself.
    pub fn wait(&mut self, reactor: &mut Reactor, limit: Option<Duration>) -> io::Result<()> {
        self.advance(reactor);
        if self.has_completed() {
            return Ok(());
        }
        let due = self.deadline_ns().map(|deadline_ns| {
            Duration::from_nanos(deadline_ns.saturating_sub(self.clock.now_ns()))
        });
        let limit = [limit, due].into_iter().flatten().min();
        reactor.wait(limit)?;
        let mut events = std::mem::take(&mut self.events);
        let collected = reactor.collect(&mut events);
        for event in events.drain(..) {
            self.event(&event, reactor);
        }
        self.events = events;
        collected
    }

    /// Whether the kernel has operations of this queue, and so uses the memory of its requests.
    pub fn is_pending(&self) -> bool {
        self.pending.count() > 0
    }

    /// Whether the layers are changing. The queue must not get requests then.
    pub fn is_closing(&self) -> bool {
        self.successor.is_some()
            || self.registration.is_some() && self.disk.life().value() != self.seen
    }

    /// Replaces this stack by its successor, if there is one and this stack is drained.
    pub(super) fn succeed(&mut self, reactor: &mut Reactor) {
        if !self.is_closed || self.is_leaving || !self.is_drained() {
            return;
        }
        let is_awaited = self.registration.is_some() && self.disk.life().value() != self.seen;
        if is_awaited {
            return;
        }
        let Some(successor) = self.successor.take() else { return };
        let mut closed = std::mem::replace(self, *successor);
        self.registration = closed.registration.take();
        (self.seen, self.reported) = (closed.seen, closed.reported);
        let events = std::mem::take(&mut closed.late_events);
        self.keep_left(closed, reactor);
        for event in &events {
            self.event(event, reactor);
        }
        self.report(self.seen);
    }

    /// Ends a queue whose thread continues. The stack must be dropped next.
    pub fn end(&mut self, reactor: &mut Reactor) {
        reactor.retire_group(self.group);
        if let Some(mut successor) = self.successor.take() {
            successor.end(reactor);
        }
        for left in &mut self.left {
            left.end(reactor);
            reactor.leave_behind();
        }
    }
}
