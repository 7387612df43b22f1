//! A layer that does nothing.

use fathom_block::{
    Capabilities, Crossing, Layer, LayerPart, LayerQueue, OpenContext, Outcome, Request,
};
use std::io;

/// A layer that passes everything on unchanged. It serves to measure the cost of a crossing, and as
/// an example for authors of layers.
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
