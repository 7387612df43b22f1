//! A queue with one request at a time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_block::{Clock, Disk, ErrorKind, Operation, Stack};
use fathom_reactor::{Event, Reactor};

/// The longest time of a request.
const TIME_MAX: Duration = Duration::from_secs(60);
/// After so many rounds it waits between them.
const ROUNDS_MAX: u64 = 1000;

/// One queue of a disk, in real time.
pub struct OneRequest {
    reactor: Reactor,
    stack: Stack,
    events: Vec<Event>,
}

impl OneRequest {
    /// Opens a queue.
    ///
    /// # Panics
    /// If it cannot be opened.
    pub fn open(disk: &Arc<Disk>) -> Self {
        let mut reactor = Reactor::new(64).expect("an io_uring");
        let stack = disk.open_queue(&mut reactor, Clock::System).expect("a queue");
        Self { reactor, stack, events: Vec::new() }
    }

    /// Reads `length` bytes.
    ///
    /// # Errors
    /// The outcome of the request.
    pub fn read(&mut self, offset: u64, length: u64) -> Result<Vec<u8>, ErrorKind> {
        self.carry_out(Operation::Read, offset, vec![0; length as usize])
    }

    /// Writes bytes.
    ///
    /// # Errors
    /// The outcome of the request.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), ErrorKind> {
        self.carry_out(Operation::Write, offset, bytes.to_vec()).map(drop)
    }

    /// Fills a range with zeroes.
    ///
    /// # Errors
    /// The outcome of the request.
    pub fn write_zeroes(&mut self, offset: u64, length: u64) -> Result<(), ErrorKind> {
        self.carry_out(Operation::WriteZeroes, offset, vec![0; length as usize]).map(drop)
    }

    /// Makes completed writes durable.
    ///
    /// # Errors
    /// The outcome of the request.
    pub fn flush(&mut self) -> Result<(), ErrorKind> {
        self.carry_out(Operation::Flush, 0, Vec::new()).map(drop)
    }

    fn carry_out(
        &mut self,
        operation: Operation,
        offset: u64,
        mut bytes: Vec<u8>,
    ) -> Result<Vec<u8>, ErrorKind> {
        let mut request = self.stack.request();
        (request.operation, request.offset) = (operation, offset);
        request.length = bytes.len() as u64;
        request.buffers.allocate(bytes.len());
        request.buffers.copy_from(0, &bytes);
        self.stack.submit(request, &mut self.reactor);
        let end = Instant::now() + TIME_MAX;
        // A simulated store advances in rounds, for which nothing is to be awaited.
        for round in 0.. {
            self.stack.advance(&mut self.reactor);
            if let Some((request, outcome)) = self.stack.completed() {
                request.buffers.copy_to(0, &mut bytes);
                self.stack.recycle(request);
                return outcome.map(|()| bytes);
            }
            assert!(Instant::now() < end, "a request takes too long");
            let pause = Duration::from_millis(u64::from(round > ROUNDS_MAX));
            self.reactor.wait(Some(pause)).expect("a wait");
            self.reactor.collect(&mut self.events).expect("events");
            for event in self.events.drain(..) {
                self.stack.event(&event, &mut self.reactor);
            }
        }
        unreachable!("the loop has no end");
    }
}
