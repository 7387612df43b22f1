//! Stacks that have been replaced while a store of a layer does not answer.
//!
//! The kernel may still use the memory of the layer's requests, and write into it at any time. So
//! the closed stack stays beside the one that serves the queue, with the part of this layer, until
//! the store has answered. It has no request of the front end.

use fathom_reactor::{Event, Reactor};

use super::Stack;
use crate::layer::LayerPart;
use crate::observer::{Observer, ObserverPosition};
use crate::request::{Outcome, Request};

/// The part of a layer that does not wait for anything.
struct Ended;

impl Observer for Ended {
    fn down(&mut self, _: &mut [Box<Request>], _: ObserverPosition<'_>) {}

    fn up(&mut self, _: &mut [(Box<Request>, Outcome)], _: ObserverPosition<'_>) {}
}

impl Stack {
    /// Whether layers have requests of their own in flight that must complete before the queue is
    /// closed.
    pub(super) fn are_own_awaited(&self) -> bool {
        let mut levels = self.layers.iter().enumerate();
        levels.any(|(level, layer)| {
            let may_be_left = matches!(layer, LayerPart::Queue(queue) if queue.may_be_left());
            self.pool.own_of(level) > 0 && !may_be_left
        })
    }

    /// Whether the queue can be closed: it [is drained](Self::is_drained), and the kernel has no
    /// operation of it, unless one is of a request that may be left.
    pub fn has_finished(&self) -> bool {
        self.is_drained() && (!self.is_pending() || self.is_left())
    }

    /// Whether requests are left, of a queue that is drained.
    pub fn is_left(&self) -> bool {
        self.pool.own() > 0
    }

    /// Whether the kernel may use the memory of requests of the owner.
    pub fn holds_memory(&self) -> bool {
        self.in_flight > 0 && self.is_pending()
    }

    /// Keeps a stack that this one has replaced, or ends it.
    pub(super) fn keep_left(&mut self, mut closed: Self, reactor: &mut Reactor) {
        self.left = std::mem::take(&mut closed.left);
        if !closed.is_left() {
            return closed.end(reactor);
        }
        // The other parts do not stay: what they do has gone to the parts of the new stack.
        for (level, layer) in closed.layers.iter_mut().enumerate() {
            if closed.pool.own_of(level) == 0 {
                *layer = LayerPart::observer(Ended);
            }
        }
        self.left.push(closed);
    }

    /// Passes an event to the stack that was left and has it. Returns whether there is one.
    #[cold]
    pub(super) fn take_event_of_left(&mut self, event: &Event, reactor: &mut Reactor) -> bool {
        let Some(left) = self.left.iter_mut().find(|left| left.owns(event)) else { return false };
        left.event(event, reactor);
        self.end_left(reactor);
        true
    }

    /// Makes a round of the stacks that were left.
    #[cold]
    pub(super) fn advance_left(&mut self, reactor: &mut Reactor) {
        for left in &mut self.left {
            left.advance(reactor);
        }
        self.end_left(reactor);
    }

    /// Ends the stacks whose stores have answered.
    fn end_left(&mut self, reactor: &mut Reactor) {
        while let Some(at) =
            self.left.iter().position(|left| left.pool.own() == 0 && !left.is_pending())
        {
            self.left.swap_remove(at).end(reactor);
        }
    }
}
