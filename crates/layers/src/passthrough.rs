//! The do-nothing layer.

use fathom_block::{
    Capabilities, Crossing, Layer, LayerPart, LayerQueue, OpenContext, Outcome, Request,
};
use std::io;

/// A layer that hands everything on, for measuring what a crossing costs and as a first page for
/// whoever writes a layer.
#[derive(Clone, Copy, Debug, Default)]
pub struct Passthrough;

impl Layer for Passthrough {
    fn name(&self) -> &'static str {
        "passthrough"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn open_queue(&self, _context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        Ok(LayerPart::queue(Self))
    }
}

impl LayerQueue for Passthrough {
    fn submit(&mut self, request: Box<Request>, next: &mut Crossing<'_>) {
        next.submit(request);
    }

    fn complete(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        next.complete(request, outcome);
    }
}
