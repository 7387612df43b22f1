//! Copies the data of one back end to another.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use fathom_block::{Allocation, Backend, Clock, Disk, DiskOptions, Operation, Request, Stack};
use fathom_reactor::{Event, Reactor};

/// The bytes of a request, and the requests in flight.
const CHUNK: u64 = 1 << 20;
const DEPTH: usize = 8;

/// Copies the data of one back end to another of at least its size, whose content is zeroes, and
/// makes it durable. `progress` is called with the place up to which this is done, in bytes.
/// Returns the bytes that were copied: holes are left out.
///
/// # Errors
/// If one of them fails. The target is incomplete then.
pub fn copy(
    source: &Arc<dyn Backend>,
    target: &Arc<dyn Backend>,
    mut progress: impl FnMut(u64),
) -> io::Result<u64> {
    Copy::open(source, target)?.run(&mut progress)
}

/// A copy: reads of the source become writes of the target.
struct Copy {
    reactor: Reactor,
    source: Stack,
    target: Stack,
    events: Vec<Event>,
    capacity: u64,
    copied: u64,
}

impl Copy {
    fn open(source: &Arc<dyn Backend>, target: &Arc<dyn Backend>) -> io::Result<Self> {
        let capacity = source.capacity();
        let mut reactor = Reactor::new(64)?;
        let mut open = |backend: &Arc<dyn Backend>| {
            let backend = Arc::clone(backend);
            let disk = Disk::new(DiskOptions::default(), Vec::new(), backend);
            disk.map_err(io::Error::other)?.open_queue(&mut reactor, Clock::System)
        };
        let (source, target) = (open(source)?, open(target)?);
        Ok(Self { reactor, source, target, events: Vec::new(), capacity, copied: 0 })
    }

    fn run(&mut self, progress: &mut impl FnMut(u64)) -> io::Result<u64> {
        let (mut at, mut ready) = (0, VecDeque::new());
        loop {
            while ready.len() + self.source.in_flight() + self.target.in_flight() < DEPTH {
                if ready.is_empty() && at < self.capacity {
                    at = self.find(at, &mut ready)?;
                    continue;
                }
                break;
            }
            while self.source.in_flight() + self.target.in_flight() < DEPTH {
                let Some((offset, length)) = ready.pop_front() else { break };
                let mut request = self.source.request();
                (request.operation, request.offset) = (Operation::Read, offset);
                request.length = length;
                request.buffers.allocate(length as usize);
                self.source.submit(request, &mut self.reactor);
            }
            self.round()?;
            while let Some((read, outcome)) = self.source.completed() {
                outcome.map_err(io::Error::other)?;
                self.write(&read);
                self.source.recycle(read);
            }
            while let Some((written, outcome)) = self.target.completed() {
                outcome.map_err(io::Error::other)?;
                self.copied += written.length;
                progress(written.offset + written.length);
                self.target.recycle(written);
            }
            let is_idle = self.source.in_flight() + self.target.in_flight() == 0;
            if is_idle && ready.is_empty() && at >= self.capacity {
                break;
            }
        }
        let mut flush = self.target.request();
        flush.operation = Operation::Flush;
        self.target.submit(flush, &mut self.reactor);
        loop {
            if let Some((_, outcome)) = self.target.completed() {
                return outcome.map(|()| self.copied).map_err(io::Error::other);
            }
            self.round()?;
        }
    }

    /// Finds data from `at` on. Returns where the next look begins.
    fn find(&mut self, at: u64, ready: &mut VecDeque<(u64, u64)>) -> io::Result<u64> {
        let mut request = self.source.request();
        (request.operation, request.offset) = (Operation::Extents, at);
        request.length = (self.capacity - at).min(DEPTH as u64 * CHUNK);
        self.source.submit(request, &mut self.reactor);
        // Reads may be in flight: their answers stay in the queue.
        let mut others: Vec<(Box<Request>, _)> = Vec::new();
        let found = loop {
            match self.source.completed() {
                Some((request, outcome)) if request.operation == Operation::Extents => {
                    outcome.map_err(io::Error::other)?;
                    break request;
                }
                Some(other) => others.push(other),
                None => self.round()?,
            }
        };
        for (read, outcome) in others {
            outcome.map_err(io::Error::other)?;
            self.write(&read);
            self.source.recycle(read);
        }
        let mut end = at;
        for extent in &found.extents {
            end = extent.offset + extent.length;
            let mut from = extent.offset;
            while extent.allocation == Allocation::Data && from < end {
                let length = (end - from).min(CHUNK);
                ready.push_back((from, length));
                from += length;
            }
        }
        self.source.recycle(found);
        Ok(end)
    }

    fn write(&mut self, read: &Request) {
        let mut request = self.target.request();
        (request.operation, request.offset) = (Operation::Write, read.offset);
        request.length = read.length;
        request.buffers.allocate(read.length as usize);
        if let Some(bytes) = read.buffers.owned() {
            request.buffers.copy_from(0, bytes);
        }
        self.target.submit(request, &mut self.reactor);
    }

    /// Waits for the device, and lets both queues go on.
    fn round(&mut self) -> io::Result<()> {
        self.source.advance(&mut self.reactor);
        self.target.advance(&mut self.reactor);
        if self.source.has_completed() || self.target.has_completed() {
            return Ok(());
        }
        self.reactor.wait(Some(Duration::from_millis(10)))?;
        self.reactor.collect(&mut self.events)?;
        for event in self.events.drain(..) {
            self.source.event(&event, &mut self.reactor);
            self.target.event(&event, &mut self.reactor);
        }
        Ok(())
    }
}
