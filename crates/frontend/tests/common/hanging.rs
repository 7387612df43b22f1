//! A layer that simulates a disk that hangs.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fathom_block::{
    Capabilities, Crossing, Layer, LayerPart, LayerQueue, OpenContext, Operation, Outcome, Request,
};

/// While the flag is set, holds reads of the first block, as a disk that hangs does.
#[derive(Clone, Default)]
pub struct Hanging(pub Arc<AtomicBool>);

impl Hanging {
    fn pass(&self, request: Box<Request>, next: &mut Crossing<'_>) {
        let hangs = request.operation == Operation::Read && request.offset == 0;
        if hangs && self.0.load(Ordering::Relaxed) {
            let deadline_ns = next.now_ns() + 1_000_000;
            next.hold(request, None, deadline_ns);
        } else {
            next.submit(request);
        }
    }
}

impl Layer for Hanging {
    fn name(&self) -> &'static str {
        "hanging"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn open_queue(&self, _: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        Ok(LayerPart::queue(self.clone()))
    }
}

impl LayerQueue for Hanging {
    fn submit(&mut self, request: Box<Request>, next: &mut Crossing<'_>) {
        self.pass(request, next);
    }

    fn complete(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        next.complete(request, outcome);
    }

    fn resume(&mut self, request: Box<Request>, _: Option<Outcome>, next: &mut Crossing<'_>) {
        self.pass(request, next);
    }
}
