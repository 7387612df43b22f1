//! A disk under simulated time, for tests of single layers.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use fathom_backend::Memory;
use fathom_block::{Clock, Disk, DiskOptions, Layer, Operation, Outcome, Stack};
use fathom_reactor::Reactor;

pub const CAPACITY: u64 = 1 << 20;

/// One queue over memory.
pub struct Bench {
    pub disk: Arc<Disk>,
    pub stack: Stack,
    pub reactor: Reactor,
    pub time_ns: Rc<Cell<u64>>,
}

impl Bench {
    pub fn new(layers: Vec<Arc<dyn Layer>>) -> Self {
        let backend = Arc::new(Memory::new(CAPACITY));
        let disk = Disk::new(DiskOptions::default(), layers, backend).unwrap();
        let mut reactor = Reactor::new(8).unwrap();
        let time_ns = Rc::new(Cell::new(1_000_000));
        let stack = disk.open_queue(&mut reactor, Clock::Simulated(Rc::clone(&time_ns))).unwrap();
        Self { disk, stack, reactor, time_ns }
    }

    /// Submits a request whose buffers, if any, are filled with `fill`.
    pub fn submit(&mut self, operation: Operation, offset: u64, length: u64, fill: u8) {
        let mut request = self.stack.request();
        request.operation = operation;
        request.offset = offset;
        request.length = length;
        if operation.carries_data() {
            request.buffers.allocate(length as usize);
            request.buffers.owned_mut().unwrap().fill(fill);
        }
        self.stack.submit(request, &mut self.reactor);
    }

    /// Advances the simulated time until the next request completes.
    pub fn outcome(&mut self) -> Outcome {
        self.finish().0
    }

    /// Like [`Self::outcome`], and returns the content of the request's buffers as well.
    pub fn finish(&mut self) -> (Outcome, Vec<u8>) {
        loop {
            if let Some((request, outcome)) = self.stack.completed() {
                let data = request.buffers.owned().unwrap_or_default().to_vec();
                self.stack.recycle(request);
                return (outcome, data);
            }
            let deadline_ns = self.stack.deadline_ns().expect("a request is in flight");
            self.time_ns.set(self.time_ns.get().max(deadline_ns));
            self.stack.advance(&mut self.reactor);
        }
    }

    pub fn run(&mut self, operation: Operation, offset: u64, length: u64, fill: u8) -> Outcome {
        self.submit(operation, offset, length, fill);
        self.outcome()
    }

    pub fn read(&mut self, offset: u64, length: u64) -> Vec<u8> {
        self.submit(Operation::Read, offset, length, 0);
        let (outcome, data) = self.finish();
        assert_eq!(outcome, Ok(()));
        data
    }
}
