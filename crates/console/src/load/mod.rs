//! A vhost-user-blk client without a guest: puts a disk under load and measures it.
//!
//! fio cannot do this: it can drive such a socket only if it is built with libblkio, which
//! distributions do not do, and then it reports neither the server's CPU time nor the number of
//! wake-ups of either side.
//!
//! [`load`] connects to a disk's vhost-user socket as a guest's driver does, keeps a fixed number
//! of requests in flight on each queue for a fixed time, and reports rates, latency percentiles and
//! the server's CPU time. One thread drives one queue. It waits for completions by eventfd like a
//! guest, or it spins ([`Waiting`]).
//!
//! With [`LoadOptions::verify`] each block written carries its number and generation. Every read of
//! a block written earlier is compared, and at the end all written blocks are read back.

#![expect(
    unsafe_code,
    reason = "memory shared with the server, and the driver library's descriptors"
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

/// The order in which blocks are accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockOrder {
    /// Blocks of the range in random order, uniformly distributed.
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

/// Options of [`load`].
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// The disk's vhost-user socket.
    pub socket: PathBuf,
    /// The order in which blocks are accessed.
    pub order: BlockOrder,
    /// The percentage of reads, 0 to 100; the other requests are writes and **destroy data**.
    pub read_percent: u8,
    /// Bytes of a request: a multiple of 512, at most 16 MiB.
    pub block_size: u32,
    /// Requests in flight on each queue, 1 to [`DEPTH_MAX`].
    pub depth: u16,
    /// Queues, each driven by one thread.
    pub queues: u16,
    /// The time to measure.
    pub duration: Duration,
    /// The time to run before measuring.
    pub warmup: Duration,
    /// How to wait for completions.
    pub waiting: Waiting,
    /// The bytes of the disk to access; all if absent.
    pub range: Option<Range<u64>>,
    /// Compares the data read with the data written.
    pub verify: bool,
    /// The share of 4 KiB units of writes that are equal to others, in percent, 0 to 100. All
    /// others differ.
    pub duplicate_percent: u8,
    /// Announces all memory in one table (`SET_MEM_TABLE`), as to a server without memory slots.
    pub memory_table: bool,
    /// Runs the server on one processor and the client on another.
    pub pin: bool,
    /// Seed of the block numbers and of the data.
    pub seed: u64,
    /// The time without a completion on a queue after which [`load`] fails.
    pub stall_limit: Duration,
}

/// The most requests in flight on a queue: each takes three of a queue's 1024 descriptors.
pub const DEPTH_MAX: u16 = 256;

impl LoadOptions {
    /// Random 4 KiB reads at depth 1 on one queue for three seconds.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            order: BlockOrder::Random,
            read_percent: 100,
            block_size: 4096,
            depth: 1,
            queues: 1,
            duration: Duration::from_secs(3),
            warmup: Duration::from_millis(300),
            waiting: Waiting::Event,
            range: None,
            verify: false,
            duplicate_percent: 0,
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
    /// An option does not fit this disk.
    Option(String),
    /// The socket could not be connected, or the negotiation failed.
    Connect(PathBuf, std::io::Error),
    /// The server closed the connection while requests were in flight.
    Closed,
    /// A queue completed no request within the stall limit.
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
                .write_str("the server closed the connection while requests were in flight"),
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

/// The phases of a load, in order. The driving thread sets them for the queues' threads.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
enum Phase {
    Warmup,
    Measure,
    Drain,
    Abort,
}

/// State shared by the driving thread and the queues' threads.
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
/// If the options do not fit the disk, the disk cannot be reached, or it stops answering. Failed
/// requests and wrong data are no errors of `load`: the report counts them.
pub fn load(options: &LoadOptions) -> Result<LoadReport, LoadError> {
    let mut connection = Connection::open(options)?;
    let server = connection.server();
    let range = connection.range(options)?;
    // This precedes the start of the server's queue threads, which inherit the processors of the
    // thread that starts them.
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
                // A thread that sleeps on its eventfd has to be woken. The write fails only if the
                // counter is full, and then the thread does not sleep.
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

/// Measurements of the driving thread over the measured time.
struct Measured {
    elapsed: Duration,
    server_cpu: Option<Duration>,
    client_cpu: Duration,
    server_process_id: Option<i32>,
}

/// Leads the queues' threads through the phases, and checks that they make progress.
fn conduct(
    options: &LoadOptions,
    connection: &Connection,
    shared: &Shared,
    server: Option<&CpuClock>,
) -> Result<Measured, LoadError> {
    let mut watch = Watch::new(options, connection, shared);
    watch.until(Instant::now() + options.warmup)?;
    let server_before = server.and_then(CpuClock::now);
    let client_before = CpuClock::own().now().unwrap_or_default();
    let started = Instant::now();
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

/// Detects a queue that makes no progress, and a server that has closed the connection.
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

    /// Sleeps until the deadline, and checks every 100 ms.
    fn until(&mut self, deadline: Instant) -> Result<(), LoadError> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            thread::sleep(left.min(Duration::from_millis(100)));
            self.check()?;
        }
    }

    fn until_finished(&mut self) -> Result<(), LoadError> {
        while self.shared.finished.load(Ordering::Acquire) < self.shared.completed.len() as u64 {
            thread::sleep(Duration::from_millis(1));
            self.check()?;
        }
        Ok(())
    }

    fn check(&mut self) -> Result<(), LoadError> {
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
                // A thread that has finished stores the maximum, and its count no longer grows.
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
