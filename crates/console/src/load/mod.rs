//! A vhost-user-blk client without a guest: puts a disk under load and measures it.
//!
//! Ours, because fio reaches such a socket only where it is built with libblkio, as distributions
//! do not, and then tells neither the server's CPU time nor how often either side was woken.
//!
//! [`load`] connects to a disk's vhost-user socket as a guest's driver would, keeps a fixed number
//! of requests under way on each queue for a fixed time, and reports rates, latency percentiles and
//! the server's CPU time. One thread drives one queue. It waits for completions by eventfd like a
//! guest, or spins when told to ([`Waiting`]).
//!
//! With [`LoadOptions::verify`] each block written carries its number and generation, every read
//! of a block written before is compared, and at the end all of them are read back.

#![expect(
    unsafe_code,
    reason = "memory that is shared with the server, and the driver library's descriptors"
)]

mod connection;
mod memory;
mod memory_table;
mod pin;
mod report;
mod verify;
mod worker;

use std::{
    fmt,
    ops::Range,
    path::PathBuf,
    sync::atomic::{AtomicU8, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use crate::process::CpuClock;
use connection::Connection;
pub(crate) use memory::SharedMemory;
use pin::Pinned;
pub use report::{LoadReport, OperationReport};
use worker::{Worker, WorkerResult};

/// In what order blocks are accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Any block of the range, evenly.
    Random,
    /// One block after the other; each queue in its own part of the range.
    Sequential,
}

/// How a queue's thread waits for completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// Sleep on the eventfd that the server signals, as guests do.
    Event,
    /// Spin on the used ring, with notifications switched off.
    Poll,
}

/// What [`load`] is to do.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// The disk's vhost-user socket.
    pub socket: PathBuf,
    /// In what order blocks are accessed.
    pub order: Order,
    /// How many of a hundred requests are reads; the others are writes and **destroy data**.
    pub read_percent: u8,
    /// Bytes of a request: a multiple of 512.
    pub block_size: u32,
    /// Requests under way on each queue, 1 to [`DEPTH_MAX`].
    pub depth: u16,
    /// Queues, each driven by one thread.
    pub queues: u16,
    /// How long to measure.
    pub duration: Duration,
    /// How long to run before measuring.
    pub warmup: Duration,
    /// How to wait for completions.
    pub waiting: Waiting,
    /// The bytes of the disk to touch; all of it if absent.
    pub range: Option<Range<u64>>,
    /// Compares what is read with what was written.
    pub verify: bool,
    /// Announces all memory at once (`SET_MEM_TABLE`), as to a server without memory slots.
    pub memory_table: bool,
    /// Has the server run on one processor and the client on another.
    pub pin: bool,
    /// Seed of the block numbers and of the data.
    pub seed: u64,
    /// Gives up when a queue completes nothing for this long.
    pub stall_limit: Duration,
}

/// The most requests that one queue keeps under way: each takes three of a queue's 1024
/// descriptors.
pub const DEPTH_MAX: u16 = 256;

impl LoadOptions {
    /// Random 4 KiB reads at depth 1 on one queue for three seconds.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            order: Order::Random,
            read_percent: 100,
            block_size: 4096,
            depth: 1,
            queues: 1,
            duration: Duration::from_secs(3),
            warmup: Duration::from_millis(300),
            waiting: Waiting::Event,
            range: None,
            verify: false,
            memory_table: false,
            pin: false,
            seed: 1,
            stall_limit: Duration::from_secs(30),
        }
    }
}

/// Why [`load`] failed.
#[derive(Debug)]
pub enum LoadError {
    /// An option makes no sense for this disk.
    Option(String),
    /// The socket could not be connected or the protocol's negotiation failed.
    Connect(PathBuf, std::io::Error),
    /// The server closed the connection while requests were under way.
    Closed,
    /// A queue completed nothing for the stall limit.
    Stalled(u16),
    /// A system call failed.
    System(&'static str, std::io::Error),
}

impl fmt::Display for LoadError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Option(message) => formatter.write_str(message),
            Self::Connect(path, error) => {
                write!(formatter, "cannot drive the disk at {}: {error}", path.display())
            }
            Self::Closed => formatter
                .write_str("the server closed the connection while requests were under way"),
            Self::Stalled(queue) => {
                write!(formatter, "queue {queue} completed no request within the stall limit")
            }
            Self::System(call, error) => write!(formatter, "{call}: {error}"),
        }
    }
}

impl std::error::Error for LoadError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Connect(_, error) | Self::System(_, error) => Some(error),
            _ => None,
        }
    }
}

/// What the threads are told, in this order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
enum Phase {
    Warmup,
    Measure,
    Drain,
    Abort,
}

/// What the driving thread and the queue threads share.
struct Shared {
    phase: AtomicU8,
    completed: Vec<AtomicU64>,
    finished: AtomicU64,
}

impl Shared {
    fn phase(&self) -> u8 {
        self.phase.load(Ordering::Relaxed)
    }

    fn enter(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Relaxed);
    }
}

/// Puts the disk under load and measures it.
///
/// # Errors
/// When the options do not fit the disk, the disk cannot be reached, or it stops answering.
/// Requests that fail and data that differs are not errors of `load`: the report counts them.
pub fn load(options: &LoadOptions) -> Result<LoadReport, LoadError> {
    let mut connection = Connection::open(options)?;
    let server = connection.server();
    let range = connection.range(options)?;
    // Before the server starts its queues' threads, which run where those that start them do.
    let process_id = server.as_ref().map(CpuClock::process_id);
    let _pinned = options.pin.then(|| Pinned::new(process_id)).transpose()?;
    let workers = connection.workers(options, &range)?;
    let completion_fds: Vec<_> = workers.iter().map(Worker::completion_fd).collect();
    let shared = Shared {
        phase: AtomicU8::new(Phase::Warmup as u8),
        completed: (0..options.queues).map(|_| AtomicU64::new(0)).collect(),
        finished: AtomicU64::new(0),
    };

    let (measured, results) = thread::scope(|scope| {
        let threads: Vec<_> =
            workers.into_iter().map(|worker| scope.spawn(|| worker.run(&shared))).collect();
        let measured = conduct(options, &connection, &shared, server.as_ref());
        if measured.is_err() {
            shared.enter(Phase::Abort);
            for completion_fd in &completion_fds {
                // A thread that sleeps on its eventfd has to be woken; if that fails it is
                // because the counter is full, and then the thread does not sleep.
                let _ = completion_fd.write(1);
            }
        }
        let results: Vec<WorkerResult> = threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect();
        (measured, results)
    });
    Ok(measured?.report(options, results))
}

/// What the driving thread measured over the whole of the time.
struct Measured {
    elapsed: Duration,
    server_cpu: Option<Duration>,
    client_cpu: Duration,
    server_process_id: Option<i32>,
}

/// Leads the queue threads through their phases and watches that they get on.
fn conduct(
    options: &LoadOptions,
    connection: &Connection,
    shared: &Shared,
    server: Option<&CpuClock>,
) -> Result<Measured, LoadError> {
    let mut watch = Watch::new(options, connection, shared);
    watch.until(Instant::now() + options.warmup)?;
    let started = Instant::now();
    let server_before = server.and_then(CpuClock::now);
    let client_before = CpuClock::own().now().unwrap_or_default();
    shared.enter(Phase::Measure);
    watch.until(started + options.duration)?;
    shared.enter(Phase::Drain);
    let elapsed = started.elapsed();
    let client_after = CpuClock::own().now().unwrap_or_default();
    let server_after = server.and_then(CpuClock::now);
    watch.until_finished()?;
    Ok(Measured {
        elapsed,
        server_cpu: server_before
            .zip(server_after)
            .map(|(before, after)| after.saturating_sub(before)),
        client_cpu: client_after.saturating_sub(client_before),
        server_process_id: server.map(CpuClock::process_id),
    })
}

/// Sees a queue that stands still and a server that left.
struct Watch<'a> {
    stall_limit: Duration,
    connection: &'a Connection,
    shared: &'a Shared,
    progress: Vec<(u64, Instant)>,
}

impl<'a> Watch<'a> {
    fn new(options: &LoadOptions, connection: &'a Connection, shared: &'a Shared) -> Self {
        let progress = vec![(0, Instant::now()); shared.completed.len()];
        Self { stall_limit: options.stall_limit, connection, shared, progress }
    }

    /// Sleeps until the deadline, a tenth of a second at a time.
    fn until(&mut self, deadline: Instant) -> Result<(), LoadError> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            thread::sleep(left.min(Duration::from_millis(100)));
            self.look()?;
        }
    }

    fn until_finished(&mut self) -> Result<(), LoadError> {
        while self.shared.finished.load(Ordering::Acquire) < self.shared.completed.len() as u64 {
            thread::sleep(Duration::from_millis(1));
            self.look()?;
        }
        Ok(())
    }

    fn look(&mut self) -> Result<(), LoadError> {
        let finished =
            self.shared.finished.load(Ordering::Acquire) >= self.shared.completed.len() as u64;
        if finished {
            return Ok(());
        }
        if self.connection.is_closed() {
            return Err(LoadError::Closed);
        }
        let now = Instant::now();
        for (index, (seen, when)) in self.progress.iter_mut().enumerate() {
            let completed = self.shared.completed[index].load(Ordering::Relaxed);
            if completed == *seen {
                // A queue that is done counts up no more; its thread says so by the maximum.
                if now - *when > self.stall_limit && completed != u64::MAX {
                    return Err(LoadError::Stalled(index as u16));
                }
            } else {
                (*seen, *when) = (completed, now);
            }
        }
        Ok(())
    }
}
