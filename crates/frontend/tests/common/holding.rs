//! A layer that holds writes.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fathom_block::{
    Capabilities, Crossing, ErrorKind, Layer, LayerPart, LayerQueue, OpenContext, Operation,
    Outcome, Request,
};

/// While the flag is set, holds writes: as a layer does that waits for space, or, if it gives none
/// back, as the kernel does.
#[derive(Clone, Default)]
pub struct Holding {
    pub holds: Arc<AtomicBool>,
    pub gives_none_back: bool,
}

impl Holding {
    fn pass(&self, request: Box<Request>, next: &mut Crossing<'_>) {
        if request.operation == Operation::Write && self.holds.load(Ordering::Relaxed) {
            let deadline_ns = next.now_ns() + 1_000_000;
            next.hold(request, None, deadline_ns);
        } else {
            next.submit(request);
        }
    }
}

impl Layer for Holding {
    fn name(&self) -> &'static str {
        "holding"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn open_queue(&self, _: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        Ok(LayerPart::queue(self.clone()))
    }
}

impl LayerQueue for Holding {
    fn submit(&mut self, request: Box<Request>, next: &mut Crossing<'_>) {
        self.pass(request, next);
    }

    fn complete(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        next.complete(request, outcome);
    }

    fn withdraw_held(
        &mut self,
        request: Box<Request>,
        _: Option<Outcome>,
        next: &mut Crossing<'_>,
    ) -> Option<Box<Request>> {
        if self.gives_none_back {
            return Some(request);
        }
        next.complete(request, Err(ErrorKind::Withdrawn));
        None
    }

    fn resume(&mut self, request: Box<Request>, _: Option<Outcome>, next: &mut Crossing<'_>) {
        self.pass(request, next);
    }
}
