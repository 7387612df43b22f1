//! Requests to a store, one at a time, outside of any queue: for the opening of a log, a cache or
//! a pool. These functions block.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_reactor::{Event, Reactor};

use crate::backend::Backend;
use crate::clock::Clock;
use crate::disk::{Disk, DiskOptions};
use crate::request::{Extent, Operation, Request};
use crate::stack::Stack;

/// The time limit of one request.
pub const REQUEST_TIME_MAX: Duration = Duration::from_secs(60);

/// Sends requests to a store, one at a time.
pub struct StoreAccess {
    reactor: Reactor,
    stack: Stack,
    events: Vec<Event>,
    /// The time limit of each request.
    limit: Duration,
}

impl StoreAccess {
    /// Opens a queue of the store.
    ///
    /// # Errors
    /// If the store cannot open a queue.
    pub fn open(backend: &Arc<dyn Backend>) -> io::Result<Self> {
        Self::open_within(backend, REQUEST_TIME_MAX)
    }

    /// Opens a queue of the store. Each request gets `limit`.
    ///
    /// # Errors
    /// If the store cannot open a queue.
    pub fn open_within(backend: &Arc<dyn Backend>, limit: Duration) -> io::Result<Self> {
        let backend = Arc::clone(backend);
        let disk =
            Disk::new(DiskOptions::default(), Vec::new(), backend).map_err(io::Error::other)?;
        let mut reactor = Reactor::new(8)?;
        let stack = disk.open_queue(&mut reactor, Clock::System)?;
        Ok(Self { reactor, stack, events: Vec::new(), limit })
    }

    /// Carries out an operation on as many bytes as `bytes` has.
    ///
    /// # Errors
    /// If the store fails, or does not answer within the time limit.
    pub fn carry_out(
        &mut self,
        operation: Operation,
        offset: u64,
        bytes: &mut [u8],
    ) -> io::Result<()> {
        let length = bytes.len() as u64;
        self.carry_out_long(operation, offset, length, bytes)
    }

    /// Carries out an operation on `length` bytes, of which `bytes` has those that carry data.
    ///
    /// # Errors
    /// As for [`carry_out`](Self::carry_out).
    pub fn carry_out_long(
        &mut self,
        operation: Operation,
        offset: u64,
        length: u64,
        bytes: &mut [u8],
    ) -> io::Result<()> {
        let mut request = self.stack.request();
        (request.operation, request.offset) = (operation, offset);
        request.length = length;
        if operation.carries_data() {
            request.buffers.allocate(bytes.len());
            request.buffers.copy_from(0, bytes);
        }
        let request = self.complete(request)?;
        if operation == Operation::Read {
            request.buffers.copy_to(0, bytes);
        }
        self.stack.recycle(request);
        Ok(())
    }

    /// The extents of a range, as far as the store describes them at once: they begin at `offset`,
    /// and may end before the range does.
    ///
    /// # Errors
    /// As for [`carry_out`](Self::carry_out).
    pub fn extents(&mut self, offset: u64, length: u64) -> io::Result<Vec<Extent>> {
        let mut request = self.stack.request();
        (request.operation, request.offset) = (Operation::Extents, offset);
        request.length = length;
        let mut request = self.complete(request)?;
        let extents = std::mem::take(&mut request.extents);
        self.stack.recycle(request);
        Ok(extents)
    }

    /// Waits until a request has completed.
    fn complete(&mut self, request: Box<Request>) -> io::Result<Box<Request>> {
        self.stack.submit(request, &mut self.reactor);
        let end = Instant::now() + self.limit;
        loop {
            self.stack.advance(&mut self.reactor);
            if let Some((request, outcome)) = self.stack.completed() {
                return match outcome {
                    Ok(()) => Ok(request),
                    Err(kind) => {
                        self.stack.recycle(request);
                        Err(io::Error::other(kind))
                    }
                };
            }
            if Instant::now() > end {
                self.reactor.leave_behind();
                return Err(io::ErrorKind::TimedOut.into());
            }
            // A store without requests in the kernel advances only in rounds, so do not wait.
            let is_awaited = self.reactor.pending().count() > 0;
            self.reactor.wait(Some(Duration::from_millis(u64::from(is_awaited))))?;
            self.events.clear();
            self.reactor.collect(&mut self.events)?;
            for event in &self.events {
                self.stack.event(event, &mut self.reactor);
            }
        }
    }

    /// Reads `length` bytes.
    ///
    /// # Errors
    /// As for [`carry_out`](Self::carry_out).
    pub fn read(&mut self, offset: u64, length: u64) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; length as usize];
        self.carry_out(Operation::Read, offset, &mut bytes)?;
        Ok(bytes)
    }
}

impl Drop for StoreAccess {
    fn drop(&mut self) {
        self.reactor.drain(Duration::from_secs(2));
    }
}
