//! Counters of requests: cells that one thread writes while others read, and plain accounts for
//! tables under a lock.

use std::sync::atomic::{AtomicU64, Ordering};

use fathom_block::{CacheHit, Operation};

/// The number of latency steps: powers of two, from below 1 µs to above 68 s.
pub const LATENCY_STEPS: usize = 28;
/// The exponent of the first step's lower bound, in nanoseconds.
const FIRST_POWER: u32 = 9;

/// The direction of a request's data. Accounts distinguish only these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Direction {
    /// It reads.
    Read = 0,
    /// It writes.
    Write = 1,
    /// Any other operation, such as a discard or zeroes.
    Other = 2,
    /// It makes durable what was written before it.
    Flush = 3,
}

impl Direction {
    /// All directions, in order.
    pub const ALL: [Self; 4] = [Self::Read, Self::Write, Self::Other, Self::Flush];

    /// The direction of `operation`.
    pub fn of(operation: Operation) -> Self {
        match operation {
            Operation::Read => Self::Read,
            Operation::Write => Self::Write,
            Operation::Flush => Self::Flush,
            Operation::Discard | Operation::WriteZeroes | Operation::GetId | Operation::Extents => {
                Self::Other
            }
        }
    }

    /// The name used in metrics and the control interface.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Other => "other",
            Self::Flush => "flush",
        }
    }
}

/// The step that a latency belongs to.
pub fn latency_step(latency_ns: u64) -> usize {
    let power = (latency_ns | 1).ilog2();
    (power.saturating_sub(FIRST_POWER) as usize).min(LATENCY_STEPS - 1)
}

/// A latency in the middle of a step, in nanoseconds.
pub fn latency_of_step(step: usize) -> u64 {
    let low = 1_u64 << (step as u32 + FIRST_POWER);
    // The factor √2, which lies in the middle between two powers of two.
    low + low * 414 / 1000
}

/// Counts of requests that succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Account {
    /// The number of requests. A request of several parts counts once for each row that it is in.
    pub requests: u64,
    /// The sum of their bytes.
    pub bytes: u64,
    /// The sum of their latencies, in nanoseconds.
    pub latency_sum_ns: u64,
    /// The longest latency, in nanoseconds.
    pub latency_max_ns: u64,
    /// The number of requests by [`latency_step`].
    pub latency: [u64; LATENCY_STEPS],
    /// The requests of which a cache has reported whether it had the data.
    pub cache_requests: u64,
    /// Those of which it had all data.
    pub cache_hits: u64,
}

impl Default for Account {
    fn default() -> Self {
        Self {
            requests: 0,
            bytes: 0,
            latency_sum_ns: 0,
            latency_max_ns: 0,
            latency: [0; LATENCY_STEPS],
            cache_requests: 0,
            cache_hits: 0,
        }
    }
}

impl Account {
    /// Counts one request.
    pub(super) fn add(&mut self, bytes: u64, latency_ns: u64, cache_hit: CacheHit) {
        self.requests += 1;
        self.cache_requests += u64::from(cache_hit != CacheHit::Unknown);
        self.cache_hits += u64::from(cache_hit == CacheHit::Hit);
        self.bytes += bytes;
        self.latency_sum_ns = self.latency_sum_ns.wrapping_add(latency_ns);
        self.latency_max_ns = self.latency_max_ns.max(latency_ns);
        self.latency[latency_step(latency_ns)] += 1;
    }

    /// Adds the counts of `other`.
    pub fn merge(&mut self, other: &Self) {
        self.requests += other.requests;
        self.bytes += other.bytes;
        self.latency_sum_ns = self.latency_sum_ns.wrapping_add(other.latency_sum_ns);
        self.latency_max_ns = self.latency_max_ns.max(other.latency_max_ns);
        for (mine, theirs) in self.latency.iter_mut().zip(&other.latency) {
            *mine += theirs;
        }
        self.cache_requests += other.cache_requests;
        self.cache_hits += other.cache_hits;
    }
}

/// One [`Account`] for each [`Direction`].
pub type Accounts = [Account; Direction::ALL.len()];

/// Adds the counts of `from`, direction by direction.
pub(super) fn merge(into: &mut Accounts, from: &Accounts) {
    for (into, from) in into.iter_mut().zip(from) {
        into.merge(from);
    }
}

/// An account that one thread writes, with plain loads and stores, while others read.
#[derive(Debug, Default)]
struct Cell {
    bytes: AtomicU64,
    latency_sum_ns: AtomicU64,
    latency_max_ns: AtomicU64,
    latency: [AtomicU64; LATENCY_STEPS],
    cache_requests: AtomicU64,
    cache_hits: AtomicU64,
}

fn add(cell: &AtomicU64, value: u64) {
    cell.store(cell.load(Ordering::Relaxed).wrapping_add(value), Ordering::Relaxed);
}

impl Cell {
    fn add(&self, bytes: u64, latency_ns: u64, cache_hit: CacheHit) {
        if cache_hit != CacheHit::Unknown {
            add(&self.cache_requests, 1);
            add(&self.cache_hits, u64::from(cache_hit == CacheHit::Hit));
        }
        add(&self.bytes, bytes);
        add(&self.latency_sum_ns, latency_ns);
        if latency_ns > self.latency_max_ns.load(Ordering::Relaxed) {
            self.latency_max_ns.store(latency_ns, Ordering::Relaxed);
        }
        add(&self.latency[latency_step(latency_ns)], 1);
    }

    fn read(&self) -> Account {
        let load = |cell: &AtomicU64| cell.load(Ordering::Relaxed);
        let latency = std::array::from_fn(|step| load(&self.latency[step]));
        Account {
            requests: latency.iter().sum(),
            bytes: load(&self.bytes),
            latency_sum_ns: load(&self.latency_sum_ns),
            latency_max_ns: load(&self.latency_max_ns),
            latency,
            cache_requests: load(&self.cache_requests),
            cache_hits: load(&self.cache_hits),
        }
    }
}

/// The counts of all whole requests of one queue.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct Totals {
    /// Requests without a known meaning.
    unknown: [Cell; Direction::ALL.len()],
    /// Requests with a known meaning.
    known: [Cell; Direction::ALL.len()],
    errors: [AtomicU64; Direction::ALL.len()],
}

impl Totals {
    pub(super) fn add(
        &self,
        direction: Direction,
        known: bool,
        bytes: u64,
        latency_ns: u64,
        cache_hit: CacheHit,
    ) {
        let cells = if known { &self.known } else { &self.unknown };
        cells[direction as usize].add(bytes, latency_ns, cache_hit);
    }

    pub(super) fn add_error(&self, direction: Direction) {
        add(&self.errors[direction as usize], 1);
    }

    pub(super) fn read(&self) -> TotalsSnapshot {
        let load =
            |cells: &[Cell; Direction::ALL.len()]| std::array::from_fn(|index| cells[index].read());
        TotalsSnapshot {
            unknown: load(&self.unknown),
            known: load(&self.known),
            errors: std::array::from_fn(|index| self.errors[index].load(Ordering::Relaxed)),
        }
    }
}

/// The counts of whole requests.
#[derive(Clone, Debug, Default)]
pub struct TotalsSnapshot {
    /// Requests that succeeded, without a known meaning.
    pub unknown: Accounts,
    /// Requests that succeeded, with a known meaning.
    pub known: Accounts,
    /// Requests that failed, by [`Direction`].
    pub errors: [u64; Direction::ALL.len()],
}

impl TotalsSnapshot {
    pub(super) fn merge(&mut self, other: &Self) {
        merge(&mut self.unknown, &other.unknown);
        merge(&mut self.known, &other.known);
        for (mine, theirs) in self.errors.iter_mut().zip(&other.errors) {
            *mine += theirs;
        }
    }

    /// All requests that succeeded.
    pub fn all(&self) -> Accounts {
        let mut all = self.known;
        merge(&mut all, &self.unknown);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_latency_lies_in_its_step() {
        for (latency_ns, step) in
            [(0, 0), (1023, 0), (1024, 1), (2047, 1), (2048, 2), (1 << 36, 27), (u64::MAX, 27)]
        {
            assert_eq!(latency_step(latency_ns), step, "{latency_ns}");
        }
        for step in 0..LATENCY_STEPS {
            assert_eq!(latency_step(latency_of_step(step)), step);
        }
    }
}
