//! The do-nothing back end.

use std::io;

use fathom_block::{
    Backend, BackendContext, BackendOpenContext, BackendProblem, BackendQueue, Capabilities,
    ErrorKind, Geometry, Operation, Request,
};
use fathom_reactor::Event;

/// A disk that drops every write and reads as zeroes, to measure everything else.
#[derive(Debug)]
pub struct Null {
    capacity: u64,
}

impl Null {
    /// A null disk of `capacity` bytes.
    pub fn new(capacity: u64) -> Self {
        Self { capacity }
    }
}

impl Backend for Null {
    fn name(&self) -> &'static str {
        "null"
    }

    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn geometry(&self) -> Geometry {
        Geometry::default()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { extents: false, ..Capabilities::ALL }
    }

    fn open_queue(
        &self,
        _context: &mut BackendOpenContext<'_>,
    ) -> io::Result<Box<dyn BackendQueue>> {
        Ok(Box::new(NullQueue))
    }

    fn resize(&self, _capacity: u64) -> Result<(), ErrorKind> {
        Err(ErrorKind::Unsupported)
    }

    fn problems(&self) -> Vec<BackendProblem> {
        Vec::new()
    }

    fn losses(&self) -> u64 {
        0
    }

    fn inspect(&self) {}

    fn recover(&self) -> io::Result<()> {
        Ok(())
    }
}

struct NullQueue;

impl BackendQueue for NullQueue {
    fn submit(&mut self, mut request: Box<Request>, context: &mut BackendContext<'_>) {
        if request.operation == Operation::Read {
            let length = request.buffers.length() as usize;
            request.buffers.fill_zero(0, length);
        }
        context.complete(request, Ok(()));
    }

    fn event(&mut self, _event: &Event, _context: &mut BackendContext<'_>) {}

    fn advance(&mut self, _context: &mut BackendContext<'_>) {}
}
