//! How a queue waits, closes, and comes to its end.

use std::io;
use std::time::{Duration, Instant};

use fathom_reactor::Reactor;

use super::Stack;

impl Stack {
    /// Has `successor` take this stack's place as soon as nothing is under way in this one: its
    /// layers finish what they have begun. Nothing of the owner's may be under way, and nothing may
    /// be submitted while the stack [is closing](Self::is_closing).
    pub fn replace(&mut self, successor: Self, reactor: &mut Reactor) {
        if let Some(mut earlier) = self.successor.replace(Box::new(successor)) {
            earlier.end(reactor);
        }
        self.close(reactor);
        self.succeed(reactor);
    }

    /// Has the layers finish what they have begun. Nothing of the owner's may be under way, and
    /// nothing may be submitted afterwards. [`is_drained`](Self::is_drained) says when they have.
    pub fn close(&mut self, reactor: &mut Reactor) {
        debug_assert_eq!(self.in_flight, 0, "a front end drains its queue first");
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

    /// Whether another stack is about to take this one's place.
    pub fn is_closing(&self) -> bool {
        self.successor.is_some()
    }

    /// Lets the successor in, if there is one and nothing is under way any more.
    pub(super) fn succeed(&mut self, reactor: &mut Reactor) {
        if !self.is_drained() {
            return;
        }
        let Some(successor) = self.successor.take() else { return };
        let mut closed = std::mem::replace(self, *successor);
        closed.end(reactor);
    }

    /// Ends a queue, while its thread goes on. It must be dropped next.
    pub fn end(&mut self, reactor: &mut Reactor) {
        reactor.retire_group(self.group);
        if let Some(mut successor) = self.successor.take() {
            successor.end(reactor);
        }
    }
}
