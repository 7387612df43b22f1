//! One queue of a disk, driven by the test's thread.

#![allow(dead_code, reason = "each suite uses a part of it")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_block::{Clock, Disk, Operation, Outcome, Request, Stack};
use fathom_reactor::{Event, Reactor};

/// The length of a queue's requests, in bytes.
pub const BLOCK: u64 = 4096;

pub struct Queue {
    reactor: Reactor,
    stack: Stack,
    events: Vec<Event>,
}

impl Queue {
    pub fn open(disk: &Arc<Disk>) -> Self {
        let mut reactor = Reactor::new(64).unwrap();
        let stack = disk.open_queue(&mut reactor, Clock::System).unwrap();
        Self { reactor, stack, events: Vec::new() }
    }

    fn blank(&mut self, operation: Operation, token: u64) -> Box<Request> {
        let mut request = self.stack.request();
        request.operation = operation;
        request.token = token;
        request
    }

    /// Begins a write of `length` bytes, all of them `fill`.
    pub fn begin_write(&mut self, offset: u64, length: u64, fill: u8, durable: bool, token: u64) {
        let mut request = self.blank(Operation::Write, token);
        (request.offset, request.length) = (offset, length);
        request.flags.force_unit_access = durable;
        request.buffers.allocate(length as usize);
        request.buffers.owned_mut().unwrap().fill(fill);
        self.stack.submit(request, &mut self.reactor);
        self.reactor.submit().unwrap();
    }

    /// Begins a flush.
    pub fn begin_flush(&mut self, token: u64) {
        let request = self.blank(Operation::Flush, token);
        self.stack.submit(request, &mut self.reactor);
        self.reactor.submit().unwrap();
    }

    /// Waits until nothing is in flight. Returns the outcomes with their tokens, in the order of
    /// completion.
    pub fn finish(&mut self) -> Vec<(u64, Outcome)> {
        let mut outcomes = Vec::new();
        loop {
            self.stack.advance(&mut self.reactor);
            while let Some((request, outcome)) = self.stack.completed() {
                outcomes.push((request.token, outcome));
                self.stack.recycle(request);
            }
            if self.stack.in_flight() == 0 {
                return outcomes;
            }
            self.round(Duration::from_secs(30));
        }
    }

    /// Handles the events of the reactor; waits for at most `limit` if there are none.
    pub fn round(&mut self, limit: Duration) {
        self.reactor.wait(Some(limit)).unwrap();
        self.reactor.collect(&mut self.events).unwrap();
        for event in self.events.drain(..) {
            self.stack.event(&event, &mut self.reactor);
        }
        self.reactor.submit().unwrap();
    }

    pub fn write(&mut self, offset: u64, fill: u8, durable: bool) -> Outcome {
        self.begin_write(offset, BLOCK, fill, durable, 0);
        self.finish()[0].1
    }

    /// A durable write; `None` if it has not completed within `limit`.
    pub fn write_within(&mut self, limit: Duration, offset: u64, fill: u8) -> Option<Outcome> {
        self.begin_write(offset, BLOCK, fill, true, 0);
        let end = Instant::now() + limit;
        while Instant::now() < end {
            self.stack.advance(&mut self.reactor);
            if let Some((request, outcome)) = self.stack.completed() {
                self.stack.recycle(request);
                return Some(outcome);
            }
            self.round(Duration::from_millis(10));
        }
        None
    }

    /// Lets the layers do what is due.
    pub fn advance(&mut self) {
        self.stack.advance(&mut self.reactor);
    }

    /// The requests that the layers made themselves and that have not completed.
    pub fn layers_in_flight(&self) -> usize {
        self.stack.in_flight_of_layers()
    }

    pub fn flush(&mut self) -> Outcome {
        self.begin_flush(0);
        self.finish()[0].1
    }

    /// Reads into memory that begins `shift` bytes after an aligned address.
    pub fn read(&mut self, offset: u64, length: u64, shift: usize) -> Result<Vec<u8>, ()> {
        let mut memory = vec![0_u8; length as usize + 2 * BLOCK as usize];
        let base = memory.as_mut_ptr();
        let start = base.align_offset(BLOCK as usize) + shift;
        let mut request = self.blank(Operation::Read, 0);
        (request.offset, request.length) = (offset, length);
        // SAFETY: the memory lives until the request has completed, below.
        unsafe { request.buffers.push(base.add(start), length as usize, None) };
        self.stack.submit(request, &mut self.reactor);
        self.reactor.submit().unwrap();
        let outcome = self.finish()[0].1;
        outcome.map(|()| memory[start..start + length as usize].to_vec()).map_err(|_| ())
    }
}
