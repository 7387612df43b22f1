//! A queue whose disk changes its layers.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use fathom_block::{Clock, Disk, Layer, Operation, Outcome, RestackError, Stack};
use fathom_reactor::Reactor;

/// A stack with its reactor and a running clock.
pub struct Queue {
    pub reactor: Reactor,
    pub stack: Stack,
}

impl Queue {
    pub fn open(disk: &Arc<Disk>) -> Self {
        let mut reactor = Reactor::new(8).unwrap();
        let stack = disk.open_queue(&mut reactor, Clock::System).unwrap();
        Self { reactor, stack }
    }

    /// Runs one round, which sleeps for at most `limit` if there are no events.
    pub fn round(&mut self, limit: Duration) {
        let mut events = Vec::new();
        self.reactor.wait(Some(limit)).unwrap();
        self.reactor.collect(&mut events).unwrap();
        for event in &events {
            self.stack.event(event, &mut self.reactor);
        }
        self.stack.advance(&mut self.reactor);
    }

    pub fn outcome_of(&mut self, operation: Operation, offset: u64, length: u64) -> Outcome {
        let mut request = self.stack.request();
        (request.operation, request.offset, request.length) = (operation, offset, length);
        if operation.carries_data() {
            request.buffers.allocate(length as usize);
        }
        self.stack.submit(request, &mut self.reactor);
        loop {
            if let Some((request, outcome)) = self.stack.completed() {
                self.stack.recycle(request);
                return outcome;
            }
            self.round(Duration::from_millis(1));
        }
    }
}

/// Changes the layers on a separate thread, while `round` runs the rounds of the queues.
pub fn restack(
    disk: &Arc<Disk>,
    layers: Vec<Arc<dyn Layer>>,
    limit: Duration,
    mut round: impl FnMut(),
) -> Result<(), RestackError> {
    let disk = Arc::clone(disk);
    let change = thread::spawn(move || disk.restack(layers, limit));
    while !change.is_finished() {
        round();
    }
    change.join().unwrap()
}

/// The time limit of each phase of a change in these tests.
pub const LIMIT: Duration = Duration::from_secs(20);
