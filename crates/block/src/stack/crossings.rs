//! The crossings between the levels of a stack.

use std::slice;
use std::sync::atomic::Ordering;

use super::Stack;
use crate::clock::Moment;
use crate::crossing::Step;
use crate::layer::LayerPart;
use crate::observer::ObserverPosition;
use crate::request::{ErrorKind, Outcome, Request};

impl Stack {
    /// The crossing downward: the only place where a request is checked against the offer of the
    /// level below. Observers between two levels see the request on its way and need no check of
    /// their own: they can change neither the request nor the offer.
    pub(super) fn down(&mut self, level: usize, request: Box<Request>) {
        match self.check(level, &request) {
            Err(error) => self.refuse(level, request, error),
            Ok(()) => self.pass(level, request),
        }
    }

    pub(super) fn refuse(&mut self, level: usize, request: Box<Request>, error: ErrorKind) {
        self.disk.counters().refused.fetch_add(1, Ordering::Relaxed);
        self.steps.push(Step::Up { level, request, outcome: Err(error) });
    }

    /// Passes a request that was checked to the next layer that takes requests, from `level` on.
    pub(super) fn pass(&mut self, level: usize, mut request: Box<Request>) {
        for level in level..self.tail {
            let moment = Moment { clock: &self.clock, round_ns: &self.round_ns };
            if let LayerPart::Observer(observer) = &mut self.layers[level] {
                observer.down(slice::from_mut(&mut request), ObserverPosition { level, moment });
            } else if let Some((layer, mut crossing)) = self.layer(level) {
                request.course.layer = 1 + level as u8;
                return layer.submit(request, &mut crossing);
            }
        }
        self.sending.push(request);
    }

    /// The crossing upward: to the maker of the request, or to the layer above `level`.
    pub(super) fn up(&mut self, level: usize, request: Box<Request>, outcome: Outcome) {
        if let Some(split) = request.split {
            self.aside.splits.note(split, outcome);
        }
        let mut done = (request, outcome);
        if level == self.head && level > 0 {
            return self.leaving.push(done);
        }
        // The observers up to the next layer.
        for above in (0..level).rev() {
            let moment = Moment { clock: &self.clock, round_ns: &self.round_ns };
            let LayerPart::Observer(observer) = &mut self.layers[above] else { break };
            observer.arrive(slice::from_mut(&mut done), ObserverPosition { level: above, moment });
        }
        for above in (0..level).rev() {
            let moment = Moment { clock: &self.clock, round_ns: &self.round_ns };
            if let LayerPart::Observer(observer) = &mut self.layers[above] {
                observer.up(slice::from_mut(&mut done), ObserverPosition { level: above, moment });
            } else if let Some((layer, mut crossing)) = self.layer(above) {
                let (request, outcome) = done;
                return if request.origin == above + 1 {
                    layer.returned(request, outcome, &mut crossing);
                } else {
                    layer.complete(request, outcome, &mut crossing);
                };
            }
        }
        // A request that the first crossing has refused.
        debug_assert_eq!(done.0.origin, 0, "a request ends at its maker");
        self.completed.push_back(done);
    }

    /// Checks `request` against the offer of `level`.
    pub(super) fn check(&mut self, level: usize, request: &Request) -> Result<(), ErrorKind> {
        let store_capacity = self.disk.store_capacity();
        if store_capacity != self.store_capacity {
            self.store_capacity = store_capacity;
            self.measure();
        }
        let offer = &self.offers[level];
        let alignment_mask = u64::from(offer.geometry.alignment) - 1;
        request.check(&offer.capabilities, offer.capacity, alignment_mask)
    }

    /// Updates the offers to the current capacity of the store.
    #[cold]
    fn measure(&mut self) {
        let mut capacity = self.store_capacity;
        self.offers[self.members.layers.len()].capacity = capacity;
        let levels = self.members.layers.len();
        for (offer, layer) in self.offers[..levels].iter_mut().zip(&self.members.layers).rev() {
            capacity = layer.capacity(capacity);
            offer.capacity = capacity;
        }
    }
}

/// Passes a batch down to the observers among `layers`, the first of which is at level `first`.
pub(super) fn observe_down(
    layers: &mut [LayerPart],
    first: usize,
    batch: &mut [Box<Request>],
    moment: Moment<'_>,
) {
    for (level, layer) in (first..).zip(layers) {
        let LayerPart::Observer(observer) = layer else { continue };
        observer.down(batch, ObserverPosition { level, moment });
    }
}

/// Passes a batch up to the observers among `layers`, the first of which is at level `first`. All
/// of them know of its arrival before one passes it up.
pub(super) fn observe_up(
    layers: &mut [LayerPart],
    first: usize,
    batch: &mut [(Box<Request>, Outcome)],
    moment: Moment<'_>,
) {
    for (level, layer) in (first..).zip(layers.iter_mut()) {
        let LayerPart::Observer(observer) = layer else { continue };
        observer.arrive(batch, ObserverPosition { level, moment });
    }
    for (index, layer) in layers.iter_mut().enumerate().rev() {
        let LayerPart::Observer(observer) = layer else { continue };
        observer.up(batch, ObserverPosition { level: first + index, moment });
    }
}
