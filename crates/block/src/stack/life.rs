//! How a queue waits, closes, and comes to its end.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_reactor::Reactor;

use super::Stack;
use crate::change::{CLOSE, PREPARE, phase};
use crate::layer::Layer;
use crate::request::ErrorKind;

/// When a queue that could open no layers tries again, in nanoseconds.
const RETRY_NS: u64 = 1_000_000_000;

impl Stack {
    /// The queue's part in a change of the disk's layers: it goes from phase to phase with all
    /// others. It takes no requests meanwhile ([`is_closing`](Self::is_closing)).
    #[cold]
    pub(super) fn take_part(&mut self, reactor: &mut Reactor) {
        if self.in_flight > 0 {
            return;
        }
        let value = self.disk.life().value();
        if self.is_leaving {
            // It is out of the way once its layers have finished.
            if self.is_drained() && !self.is_under_way() {
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
                // A queue that was opened only now.
                self.prepare(value, reactor);
                self.close_layers(reactor);
                if self.is_drained() && !self.is_under_way() {
                    self.report(value);
                }
            }
            _ => self.go_on(value, reactor),
        }
    }

    /// Opens the new layers, if that has not been tried.
    fn prepare(&mut self, value: u64, reactor: &mut Reactor) {
        if self.successor.is_none() {
            let next = self.disk.life().next();
            if let Err(error) = self.open_successor(next, reactor) {
                self.disk.life().fail(value, &error);
            }
        }
    }

    fn open_successor(
        &mut self,
        members: Vec<Arc<dyn Layer>>,
        reactor: &mut Reactor,
    ) -> io::Result<()> {
        let (disk, queue) = (Arc::clone(&self.disk), self.disk.next_queue());
        let successor = Self::open(&disk, queue, members, None, reactor, self.clock.clone())?;
        self.successor = Some(Box::new(successor));
        Ok(())
    }

    /// The change is over: the layers that the disk has now take over, where the queue has others or
    /// has closed them.
    fn go_on(&mut self, value: u64, reactor: &mut Reactor) {
        let layers = self.disk.layers();
        let has_them = |stack: &Self| {
            let pairs = || stack.members.iter().zip(&layers);
            stack.members.len() == layers.len()
                && pairs().all(|(one, other)| Arc::ptr_eq(one, other))
        };
        if self.successor.as_ref().is_some_and(|successor| !has_them(successor)) {
            self.drop_successor(reactor);
        }
        if self.is_closed || !has_them(self) {
            if self.successor.is_none() {
                if self.retry_ns != u64::MAX && self.retry_ns > self.clock.now_ns() {
                    return;
                }
                self.retry_ns = u64::MAX;
                if self.open_successor(layers, reactor).is_err() {
                    // The queue stands still. Whoever watches over the disk learns of it.
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

    /// Has the layers finish what they have begun. Nothing of the owner's may be under way, and
    /// nothing may be submitted afterwards. [`is_drained`](Self::is_drained) says when they have.
    pub fn close(&mut self, reactor: &mut Reactor) {
        self.is_leaving = true;
        self.close_layers(reactor);
    }

    fn close_layers(&mut self, reactor: &mut Reactor) {
        debug_assert_eq!(self.in_flight, 0, "a front end drains its queue first");
        if std::mem::replace(&mut self.is_closed, true) {
            return;
        }
        for level in 0..self.layers.len() {
            if let Some((layer, mut crossing)) = self.layer(level) {
                layer.close(&mut crossing);
            }
        }
        self.run(reactor);
    }

    /// [Closes](Self::close) the queue, and waits until its layers have finished, for `limit` at the
    /// longest. For the owner of a reactor that nothing else uses. Returns whether they have.
    ///
    /// # Errors
    /// When the kernel refuses the reactor's ring itself.
    pub fn finish(&mut self, reactor: &mut Reactor, limit: Duration) -> io::Result<bool> {
        self.close(reactor);
        let end = Instant::now() + limit;
        while !self.is_drained() || self.is_under_way() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            self.wait(reactor, Some(left))?;
        }
        Ok(true)
    }

    /// Makes a round and sleeps until something has come back, a layer is due, or `limit` has passed.
    /// For the owner of a reactor that nothing else uses. Does not sleep where a request is done.
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

    /// Whether the kernel has memory of this queue's requests.
    pub fn is_under_way(&self) -> bool {
        self.pending.count() > 0
    }

    /// Whether the layers change: no requests are taken.
    pub fn is_closing(&self) -> bool {
        self.successor.is_some()
            || self.registration.is_some() && self.disk.life().value() != self.seen
    }

    /// Lets the successor in, if there is one and nothing is under way any more.
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
        closed.end(reactor);
        self.registration = closed.registration.take();
        (self.seen, self.reported) = (closed.seen, closed.reported);
        let events = std::mem::take(&mut closed.late_events);
        drop(closed);
        for event in &events {
            self.event(event, reactor);
        }
        self.report(self.seen);
    }

    /// Ends a queue, while its thread goes on. It must be dropped next.
    pub fn end(&mut self, reactor: &mut Reactor) {
        reactor.retire_group(self.group);
        if let Some(mut successor) = self.successor.take() {
            successor.end(reactor);
        }
    }
}
