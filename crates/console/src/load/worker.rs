//! The thread of a queue: keeps requests in flight and measures their latencies.
use std::{
    ops::Range,
    os::fd::{AsRawFd, BorrowedFd},
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use hdrhistogram::Histogram;
use rustix::event::{PollFd, PollFlags, poll};
use virtio_driver::{EventFd, QueueNotifier, VirtioBlkQueue};

use super::{
    BlockOrder, LoadOptions, Phase, Shared, Waiting, memory::SharedMemory, verify::Ledger,
};
use crate::random::Random;

/// The units of data that stores may find equal, in bytes.
const UNIT: usize = 4096;
/// The different contents of units that are equal to others.
const EQUAL_CONTENTS: u64 = 1 << 14;
/// The longest latency that is recorded exactly, one minute; longer ones are recorded as this.
const LATENCY_NS_MAX: u64 = 60_000_000_000;

/// Sleeps until the eventfd is signalled, and resets it. Both sides share the descriptor, and a
/// server may have made it non-blocking, so a read alone does not wait.
fn wait_readable(event: &EventFd) {
    // SAFETY: the descriptor is open as long as the event, which is borrowed.
    let descriptor = unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) };
    let mut polls = [PollFd::from_borrowed_fd(descriptor, PollFlags::IN)];
    // `poll` fails only if interrupted, and then the caller checks again.
    if poll(&mut polls, None).is_ok() {
        let _ = event.read();
    }
}

/// The buffers of one queue, one for each request in flight.
pub struct Buffers {
    memory: Arc<SharedMemory>,
    offset: usize,
    block_size: usize,
    count: u16,
}

impl Buffers {
    /// Takes a queue's part of the memory and fills it with pseudo-random data: the same in each
    /// unit if units are to be equal.
    pub fn new(memory: Arc<SharedMemory>, offset: usize, options: &LoadOptions) -> Self {
        let block_size = options.block_size as usize;
        let mut buffers = Self { memory, offset, block_size, count: options.depth };
        let mut random = Random::new(options.seed ^ offset as u64);
        for slot in 0..buffers.count {
            for unit in buffers.get(slot).chunks_mut(UNIT) {
                if options.duplicate_percent > 0 {
                    random = Random::new(options.seed);
                }
                for chunk in unit.chunks_exact_mut(8) {
                    chunk.copy_from_slice(&random.next().to_le_bytes());
                }
            }
        }
        buffers
    }

    fn pointer(&self, slot: u16) -> *mut u8 {
        assert!(slot < self.count);
        self.memory.address().wrapping_add(self.offset + usize::from(slot) * self.block_size)
    }

    /// The buffer of a slot without a request in flight.
    fn get(&mut self, slot: u16) -> &mut [u8] {
        // SAFETY: the buffer lies within the mapping, this queue's part of it is borrowed, and the
        // server has finished with this slot. If a server still writes to it, the bytes change, and
        // at worst a comparison reports a difference.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(slot), self.block_size) }
    }
}

/// Makes each unit of what is written differ from all others, or equal to one of a few.
struct Stamps {
    run: u64,
    made: u64,
    duplicate_percent: u8,
}

impl Stamps {
    fn new(duplicate_percent: u8, seed: u64) -> Self {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { run: crate::random::mix(time.as_nanos() as u64 ^ seed), made: 0, duplicate_percent }
    }

    fn stamp(&mut self, buffer: &mut [u8], random: &mut Random) {
        for unit in buffer.chunks_mut(UNIT) {
            let is_equal =
                self.duplicate_percent > 0 && random.below(100) < self.duplicate_percent.into();
            let words = if is_equal {
                [0, random.below(EQUAL_CONTENTS)]
            } else {
                self.made += 1;
                [self.run, self.made]
            };
            for (target, word) in unit.chunks_exact_mut(8).zip(words) {
                target.copy_from_slice(&word.to_le_bytes());
            }
        }
    }
}

/// The work of a worker.
pub struct WorkerTask {
    pub order: BlockOrder,
    pub read_percent: u8,
    pub waiting: Waiting,
    pub blocks: Range<u64>,
    pub ledger: Option<Ledger>,
    pub flushes: bool,
    /// The share of units that are equal to others, in percent.
    pub duplicate_percent: u8,
    /// Whether a warm-up precedes the measured time.
    pub warms_up: bool,
    pub seed: u64,
}

/// The request of a slot.
#[derive(Clone, Copy)]
enum Request {
    Read { block: u64 },
    Write { block: u64, generation: u32 },
    Flush,
}

/// The results of one kind of request within the measured time.
pub struct Tally {
    pub requests: u64,
    pub latency_ns: Histogram<u64>,
}

impl Tally {
    pub fn new() -> Self {
        let latency_ns = Histogram::new_with_max(LATENCY_NS_MAX, 3).expect("the bounds are valid");
        Self { requests: 0, latency_ns }
    }
}

/// The measured time of a queue. Without a warm-up it begins with the first request; otherwise it
/// begins with the first completions of the phase, which it does not include. It ends with the
/// first ones after the phase, which it includes. So requests that complete together, because this
/// process or the server did not run for a moment, are counted with the time in which they were
/// served.
#[derive(Clone, Copy)]
enum Window {
    Ahead,
    Open(Instant),
    Closed(Duration),
}

impl Window {
    /// Completions have been reaped at `now`.
    fn reaped(&mut self, phase: u8, now: Instant) {
        match *self {
            Self::Ahead if phase >= Phase::Measure as u8 => *self = Self::Open(now),
            Self::Open(since) if phase >= Phase::Drain as u8 => *self = Self::Closed(now - since),
            _ => {}
        }
    }

    fn is_open(&self) -> bool {
        matches!(self, Self::Open(_))
    }

    fn length(&self) -> Duration {
        match self {
            Self::Closed(length) => *length,
            // No request completed after the phase.
            Self::Ahead | Self::Open(_) => Duration::ZERO,
        }
    }
}

/// The results of one queue.
pub struct WorkerResult {
    /// The time in which the requests completed.
    pub measured: Duration,
    pub reads: Tally,
    pub writes: Tally,
    pub errors: u64,
    pub blocks_verified: u64,
    pub blocks_wrong: u64,
    pub block_wrong_first: Option<u64>,
    pub wakeups: u64,
    pub notifications: u64,
}

/// One queue and its state.
pub struct Worker {
    index: usize,
    queue: VirtioBlkQueue<'static, u16>,
    notifier: Box<dyn QueueNotifier>,
    completion_fd: Arc<EventFd>,
    buffers: Buffers,
    work: WorkerTask,
    random: Random,
    stamps: Stamps,
    next_block: u64,
    slots: Vec<(Request, Instant)>,
    in_flight: u16,
    window: Window,
    result: WorkerResult,
}

impl Worker {
    pub fn new(
        index: usize,
        queue: VirtioBlkQueue<'static, u16>,
        notifier: Box<dyn QueueNotifier>,
        completion_fd: Arc<EventFd>,
        buffers: Buffers,
        work: WorkerTask,
    ) -> Self {
        let slots = vec![(Request::Flush, Instant::now()); buffers.count.into()];
        Self {
            index,
            queue,
            notifier,
            completion_fd,
            buffers,
            random: Random::new(work.seed),
            stamps: Stamps::new(work.duplicate_percent, work.seed),
            next_block: work.blocks.start,
            work,
            slots,
            in_flight: 0,
            window: Window::Ahead,
            result: WorkerResult {
                measured: Duration::ZERO,
                reads: Tally::new(),
                writes: Tally::new(),
                errors: 0,
                blocks_verified: 0,
                blocks_wrong: 0,
                block_wrong_first: None,
                wakeups: 0,
                notifications: 0,
            },
        }
    }

    /// The eventfd on which this worker may sleep.
    pub fn completion_fd(&self) -> Arc<EventFd> {
        Arc::clone(&self.completion_fd)
    }

    /// Works until the phase ends the load, and completes the requests in flight.
    pub fn run(mut self, shared: &Shared) -> WorkerResult {
        self.queue.set_used_notif_enabled(false);
        if !self.work.warms_up {
            self.window = Window::Open(Instant::now());
        }
        for slot in 0..self.buffers.count {
            self.begin(slot);
        }
        self.notify();
        self.drive(shared, |worker, slot, phase| {
            if phase < Phase::Drain as u8 {
                worker.begin(slot);
            }
        });
        self.result.measured = self.window.length();
        self.read_back(shared);
        shared.completed[self.index].store(u64::MAX, Ordering::Relaxed);
        shared.finished.fetch_add(1, Ordering::Release);
        self.result
    }

    /// Reaps completions until no request is in flight; `next` may begin another request in the
    /// slot.
    fn drive(&mut self, shared: &Shared, mut next: impl FnMut(&mut Self, u16, u8)) {
        let completed = &shared.completed[self.index];
        while self.in_flight > 0 {
            let phase = shared.phase();
            if phase == Phase::Abort as u8 {
                return;
            }
            let mut reaped = 0;
            while let Some(completion) = self.queue.completions().next() {
                self.in_flight -= 1;
                reaped += 1;
                self.complete(completion.context, completion.ret);
                next(self, completion.context, phase);
            }
            if reaped > 0 {
                self.window.reaped(phase, Instant::now());
                completed.fetch_add(reaped, Ordering::Relaxed);
                self.notify();
            } else {
                self.wait();
            }
        }
    }

    /// Waits for completions; may return without any.
    fn wait(&mut self) {
        match self.work.waiting {
            Waiting::Poll => std::hint::spin_loop(),
            Waiting::Event => {
                self.queue.set_used_notif_enabled(true);
                // No notification is sent for requests that completed before it was enabled.
                if !self.queue.completions().has_next() {
                    self.result.wakeups += 1;
                    wait_readable(&self.completion_fd);
                }
                self.queue.set_used_notif_enabled(false);
            }
        }
    }

    fn notify(&mut self) {
        if self.queue.avail_notif_needed() {
            self.result.notifications += 1;
            // If the counter is full, the server already has a notification to read.
            let _ = self.notifier.notify();
        }
    }

    fn begin(&mut self, slot: u16) {
        let span = self.work.blocks.end - self.work.blocks.start;
        let mut block = match self.work.order {
            BlockOrder::Random => self.work.blocks.start + self.random.below(span),
            BlockOrder::Sequential => {
                let block = self.next_block;
                self.next_block += 1;
                if self.next_block == self.work.blocks.end {
                    self.next_block = self.work.blocks.start;
                }
                block
            }
        };
        let is_read = match self.work.read_percent {
            100 => true,
            0 => false,
            percent => self.random.below(100) < percent.into(),
        };
        if let Some(ledger) = &mut self.work.ledger {
            // The range has at least one block for each slot, but all blocks nearby may be busy.
            match ledger.claim(block) {
                Some(claimed) => block = claimed,
                None => return,
            }
        }
        let request = if is_read {
            Request::Read { block }
        } else {
            let generation = self.work.ledger.as_ref().map_or(0, |l| l.generation(block) + 1);
            if let Some(ledger) = &self.work.ledger {
                ledger.fill(block, generation, self.buffers.get(slot));
            } else {
                self.stamps.stamp(self.buffers.get(slot), &mut self.random);
            }
            Request::Write { block, generation }
        };
        self.submit(slot, request);
    }

    fn submit(&mut self, slot: u16, request: Request) {
        let length = self.buffers.block_size;
        let pointer = self.buffers.pointer(slot);
        self.slots[usize::from(slot)] = (request, Instant::now());
        // SAFETY: the buffer lies within shared memory that outlives the queue (the worker holds
        // it), and the slot's buffer is not accessed until the request completes.
        let queued = unsafe {
            match request {
                Request::Read { block } => {
                    self.queue.read_raw(block * length as u64, pointer, length, slot)
                }
                Request::Write { block, .. } => {
                    self.queue.write_raw(block * length as u64, pointer, length, slot)
                }
                Request::Flush => self.queue.flush(slot),
            }
        };
        // The queue has four descriptors for each slot, and a request takes three.
        queued.expect("the queue has room for every slot");
        self.in_flight += 1;
    }

    fn complete(&mut self, slot: u16, status: i32) {
        let (request, started) = self.slots[usize::from(slot)];
        let failed = status != 0;
        self.result.errors += u64::from(failed);
        let tally = match request {
            Request::Read { block } => {
                self.check(slot, block, failed);
                &mut self.result.reads
            }
            Request::Write { block, generation } => {
                if let Some(ledger) = &mut self.work.ledger {
                    ledger.written(block, if failed { 0 } else { generation });
                }
                &mut self.result.writes
            }
            Request::Flush => return,
        };
        if self.window.is_open() {
            tally.requests += 1;
            tally.latency_ns.saturating_record(started.elapsed().as_nanos() as u64);
        }
    }

    fn check(&mut self, slot: u16, block: u64, failed: bool) {
        let Some(ledger) = &mut self.work.ledger else { return };
        ledger.release(block);
        let generation = ledger.generation(block);
        if failed || generation == 0 {
            return;
        }
        self.result.blocks_verified += 1;
        if !ledger.matches(block, generation, self.buffers.get(slot)) {
            self.result.blocks_wrong += 1;
            self.result.block_wrong_first.get_or_insert(block);
        }
    }

    /// Flushes, then reads and compares every written block.
    fn read_back(&mut self, shared: &Shared) {
        let Some(first) = self.work.ledger.as_ref().map(Ledger::first) else { return };
        if self.work.flushes {
            self.submit(0, Request::Flush);
            self.notify();
            self.drive(shared, |_, _, _| {});
        }
        let mut cursor = first;
        let mut next = move |worker: &mut Self, slot| {
            let written = worker.work.ledger.as_ref().and_then(|l| l.next_written(cursor));
            if let Some(block) = written {
                cursor = block + 1;
                worker.submit(slot, Request::Read { block });
            }
        };
        for slot in 0..self.buffers.count {
            next(self, slot);
        }
        self.notify();
        self.drive(shared, |worker, slot, _| next(worker, slot));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_measured_time_lies_between_completions() {
        let (warmup, measure, drain) =
            (Phase::Warmup as u8, Phase::Measure as u8, Phase::Drain as u8);
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut window = Window::Ahead;
        window.reaped(warmup, at(990));
        assert!(!window.is_open());
        window.reaped(measure, at(1015));
        assert!(window.is_open());
        window.reaped(measure, at(1980));
        window.reaped(drain, at(2020));
        assert!(!window.is_open());
        window.reaped(drain, at(2030));
        assert_eq!(window.length(), Duration::from_millis(1005));
        // No request completed in time.
        let mut window = Window::Ahead;
        window.reaped(drain, at(2020));
        assert_eq!(window.length(), Duration::ZERO);
    }
}
