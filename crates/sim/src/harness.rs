//! Drives a disk with a workload and compares the disk with the model.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use fathom_block::{Clock, Disk, Flags, Operation, Outcome, SERIAL_LENGTH, Stack};
use fathom_reactor::{Event, Reactor};

use crate::model::ModelDisk;
use crate::workload::{Action, Workload, pattern};

/// The parameters of a run.
#[derive(Clone, Debug)]
pub struct HarnessOptions {
    /// The number of open queues, all driven by this thread.
    pub queues: usize,
    /// The most requests in flight on each queue.
    pub depth: usize,
    /// Whether time is simulated: it then advances only when every request waits for time.
    pub simulated: bool,
}

impl Default for HarnessOptions {
    fn default() -> Self {
        Self { queues: 2, depth: 16, simulated: true }
    }
}

/// The result of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Requests that succeeded.
    pub succeeded: u64,
    /// Requests that failed.
    pub failed: u64,
}

struct Queue {
    reactor: Reactor,
    stack: Stack,
    events: Vec<Event>,
}

/// See the module.
pub struct Harness {
    queues: Vec<Queue>,
    model: ModelDisk,
    random: fastrand::Rng,
    depth: usize,
    time_ns: Option<Rc<Cell<u64>>>,
    next_id: u64,
    statistics: Statistics,
    /// Whether requests may fail.
    may_fail: bool,
    memory: Vec<u8>,
}

impl Harness {
    /// Opens `disk`, whose content must be zeroes. `seed` selects the queue of each request.
    ///
    /// # Panics
    /// When the disk cannot be opened.
    pub fn new(disk: &Arc<Disk>, options: &HarnessOptions, seed: u64) -> Self {
        let time_ns = options.simulated.then(|| Rc::new(Cell::new(1)));
        let queues = (0..options.queues.max(1))
            .map(|_| {
                let mut reactor = Reactor::new(64).expect("an io_uring");
                let clock =
                    time_ns.as_ref().map_or(Clock::System, |t| Clock::Simulated(Rc::clone(t)));
                let stack = disk.open_queue(&mut reactor, clock).expect("a queue");
                Queue { reactor, stack, events: Vec::new() }
            })
            .collect();
        Self {
            queues,
            model: if options.simulated {
                ModelDisk::new(disk.capacity())
            } else {
                ModelDisk::racing(disk.capacity())
            },
            random: fastrand::Rng::with_seed(seed),
            depth: options.depth.max(1),
            time_ns,
            next_id: 0,
            statistics: Statistics::default(),
            may_fail: false,
            memory: Vec::new(),
        }
    }

    /// Allows requests to fail. Without this call, an error fails the test.
    pub fn allow_errors(&mut self) {
        self.may_fail = true;
    }

    /// The model.
    pub fn model(&self) -> &ModelDisk {
        &self.model
    }

    /// The model, for a restart after a crash.
    pub fn model_mut(&mut self) -> &mut ModelDisk {
        &mut self.model
    }

    /// The requests that have completed so far.
    pub fn statistics(&self) -> Statistics {
        self.statistics
    }

    /// The simulated time, in nanoseconds; 0 if time is not simulated.
    pub fn now_ns(&self) -> u64 {
        self.time_ns.as_ref().map_or(0, |time_ns| time_ns.get())
    }

    /// Submits `count` requests of `workload` as the depth allows. Calls `inspect` after each
    /// round, before the model is updated with the round's completions. Requests may still be in
    /// flight at the end.
    ///
    /// # Panics
    /// When the disk violates the model.
    pub fn run(
        &mut self,
        workload: &mut Workload,
        count: usize,
        mut inspect: impl FnMut(&ModelDisk),
    ) {
        let mut left = count;
        while left > 0 {
            let queue = self.random.usize(0..self.queues.len());
            let batch = self.random.usize(1..=self.depth).min(left);
            let mut submitted = 0;
            while submitted < batch && self.queues[queue].stack.in_flight() < self.depth {
                let action = workload.next().expect("a workload has no end");
                self.submit(queue, &action);
                submitted += 1;
            }
            left -= submitted;
            self.round(submitted == 0, &mut inspect);
        }
    }

    /// Waits until no request is in flight.
    ///
    /// # Panics
    /// When the disk violates the model, or requests never complete.
    pub fn drain(&mut self, mut inspect: impl FnMut(&ModelDisk)) {
        let mut rounds = 0_u64;
        while self.queues.iter().any(|queue| queue.stack.in_flight() > 0) {
            self.round(true, &mut inspect);
            rounds += 1;
            assert!(rounds < 10_000_000, "requests never complete");
        }
    }

    /// Makes one round, and returns the number of requests still in flight.
    ///
    /// # Panics
    /// When the disk violates the model.
    pub fn step(&mut self) -> usize {
        self.step_with(|_| {})
    }

    /// As [`step`](Self::step). Calls `inspect` before the model is updated with the round's
    /// completions.
    ///
    /// # Panics
    /// When the disk violates the model.
    pub fn step_with(&mut self, mut inspect: impl FnMut(&ModelDisk)) -> usize {
        self.round(true, &mut inspect);
        self.queues.iter().map(|queue| queue.stack.in_flight()).sum()
    }

    /// Makes one round while other threads work on the disk. Calls `inspect` before the model is
    /// updated with the round's completions. A reactor that never sleeps may miss what another
    /// thread wakes it for, so that each sleeps for a moment.
    ///
    /// # Panics
    /// When the disk violates the model.
    pub fn step_beside(&mut self, mut inspect: impl FnMut(&ModelDisk)) {
        self.round(true, &mut inspect);
        for queue in &mut self.queues {
            queue
                .reactor
                .wait(Some(Duration::from_micros(10)))
                .expect("the ring can be waited for");
        }
    }

    /// Waits until no request is in flight, including the layers' own.
    ///
    /// # Panics
    /// When the disk violates the model, or the layers' requests never complete.
    pub fn rest(&mut self, mut inspect: impl FnMut(&ModelDisk)) {
        let mut rounds = 0_u64;
        while self.queues.iter().any(|queue| !queue.stack.is_drained()) {
            self.round(true, &mut inspect);
            rounds += 1;
            assert!(rounds < 1_000_000, "requests of layers never complete");
        }
    }

    /// Reads the whole disk and compares it with the model.
    ///
    /// # Panics
    /// When the content of the disk violates the model.
    pub fn verify(&mut self, capacity: u64) {
        self.drain(|_| {});
        let chunk = 64 << 10;
        for offset in (0..capacity).step_by(chunk as usize) {
            let length = chunk.min(capacity - offset);
            let flags = Flags::default();
            let action = Action { operation: Operation::Read, offset, length, flags, content: 0 };
            self.submit(0, &action);
            self.drain(|_| {});
        }
    }

    /// Submits one request to queue `queue`.
    ///
    /// # Panics
    /// When the disk violates the model.
    pub fn submit(&mut self, queue: usize, action: &Action) {
        let id = self.next_id;
        self.next_id += 1;
        let queue = &mut self.queues[queue];
        let mut request = queue.stack.request();
        request.operation = action.operation;
        request.offset = action.offset;
        request.length = action.length;
        request.flags = action.flags;
        request.token = id;
        let length = action.length as usize;
        match action.operation {
            Operation::Read => request.buffers.allocate(length),
            Operation::Write => {
                request.buffers.allocate(length);
                let memory = request.buffers.owned_mut().expect("memory was allocated above");
                pattern(memory, action.content);
            }
            Operation::GetId => request.buffers.allocate(SERIAL_LENGTH),
            Operation::Flush | Operation::Discard | Operation::WriteZeroes | Operation::Extents => {
            }
        }
        self.model.begin(id, action, request.buffers.owned().unwrap_or_default());
        queue.stack.submit(request, &mut queue.reactor);
    }

    /// Makes a round of every queue.
    fn round(&mut self, idle: bool, inspect: &mut impl FnMut(&ModelDisk)) {
        for queue in &mut self.queues {
            queue.reactor.submit().expect("the ring takes entries");
            queue.reactor.collect(&mut queue.events).expect("the ring gives events");
            for event in queue.events.drain(..) {
                queue.stack.event(&event, &mut queue.reactor);
            }
            queue.stack.advance(&mut queue.reactor);
        }
        inspect(&self.model);
        let mut done = 0;
        for index in 0..self.queues.len() {
            while let Some((mut request, outcome)) = self.queues[index].stack.completed() {
                done += 1;
                self.finish(&mut request, outcome);
                self.queues[index].stack.recycle(request);
            }
        }
        if done == 0 && idle {
            self.wait();
        }
    }

    fn finish(&mut self, request: &mut fathom_block::Request, outcome: Outcome) {
        match outcome {
            Ok(()) => self.statistics.succeeded += 1,
            Err(error) => {
                self.statistics.failed += 1;
                assert!(self.may_fail, "{} failed: {error}", describe(request));
            }
        }
        if request.operation == Operation::Extents && outcome.is_ok() {
            let mut offset = request.offset;
            for extent in &request.extents {
                assert!(extent.offset == offset && extent.length > 0, "extents have a gap");
                offset += extent.length;
            }
            assert!(offset > request.offset, "no extents for {}", describe(request));
        }
        self.memory.clear();
        if request.operation == Operation::Read {
            self.memory.resize(request.length as usize, 0);
            request.buffers.copy_to(0, &mut self.memory);
        }
        let result = self.model.finish(request.token, request.operation, outcome, &self.memory);
        if let Err(violation) = result {
            panic!("{}: {violation}", describe(request));
        }
    }

    /// Lets time pass after a round without completions.
    fn wait(&mut self) {
        if let Some(time_ns) = &self.time_ns {
            // A back end that works in rounds needs no time; a level that holds requests has a
            // deadline.
            let deadline = self.queues.iter().filter_map(|queue| queue.stack.deadline_ns()).min();
            if let Some(deadline_ns) = deadline {
                time_ns.set(time_ns.get().max(deadline_ns));
                return;
            }
        }
        let mut limit = Duration::from_millis(1);
        for queue in &mut self.queues {
            if let (None, Some(deadline_ns)) = (&self.time_ns, queue.stack.deadline_ns()) {
                let left_ns = deadline_ns.saturating_sub(queue.stack.now_ns());
                limit = limit.min(Duration::from_nanos(left_ns));
            }
        }
        for queue in &mut self.queues {
            if queue.stack.in_flight() > 0 && !queue.stack.has_completed() {
                // Waits briefly for each back end, one after the other.
                limit = limit.min(Duration::from_micros(50));
                queue.reactor.wait(Some(limit)).expect("the ring can be waited for");
            }
        }
    }
}

fn describe(request: &fathom_block::Request) -> String {
    format!("{} {}+{} #{}", request.operation, request.offset, request.length, request.token)
}
