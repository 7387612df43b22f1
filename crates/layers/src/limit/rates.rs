//! The rates of a limit, and the cost of a request.

use fathom_block::{Operation, Request};

use crate::bucket::{Bucket, Rate};

/// The direction of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Reads.
    Read = 0,
    /// Writes, discards and zeroes.
    Write = 1,
}

impl Direction {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Read, Self::Write];

    /// The direction of an operation; `None` for operations without a limit. A flush moves no data
    /// of its own, and a process of the guest waits for it.
    pub fn of(operation: Operation) -> Option<Self> {
        match operation {
            Operation::Read => Some(Self::Read),
            Operation::Write | Operation::Discard | Operation::WriteZeroes => Some(Self::Write),
            Operation::Flush | Operation::GetId | Operation::Extents => None,
        }
    }
}

/// The position of the rates of both directions together.
pub const TOTAL: usize = 0;
/// The number of rates of one resource: the total, reads, writes.
const SCOPES: usize = 3;

/// All rates of a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    /// Requests per second: in total, reads, writes.
    pub requests: [Rate; SCOPES],
    /// Bytes per second: in total, reads, writes.
    pub bytes: [Rate; SCOPES],
    /// The length above which a request counts as several requests, in bytes; 0 for none.
    pub request_size: f64,
}

impl Rates {
    /// Whether there is any limit.
    pub fn is_limited(&self) -> bool {
        self.requests.iter().chain(&self.bytes).any(Rate::is_limited)
    }

    /// Whether reads and writes share a rate.
    pub fn has_total(&self) -> bool {
        self.requests[TOTAL].is_limited() || self.bytes[TOTAL].is_limited()
    }
}

/// The cost of a request.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// Its direction.
    pub direction: Direction,
    /// Its length, in bytes, also that of a write of zeroes: storage may have to write them. A
    /// discard counts as empty, because a guest discards whole file systems with one request.
    pub bytes: u64,
}

impl Cost {
    /// The cost of `request`; `None` for operations without a limit.
    pub fn of(request: &Request) -> Option<Self> {
        let direction = Direction::of(request.operation)?;
        let bytes = if request.operation == Operation::Discard { 0 } else { request.length };
        Some(Self { direction, bytes })
    }
}

/// The state of all rates of a limit.
#[derive(Clone, Copy, Debug, Default)]
pub struct Buckets {
    requests: [Bucket; SCOPES],
    bytes: [Bucket; SCOPES],
}

impl Buckets {
    /// Drains all buckets by `elapsed_ns` nanoseconds.
    pub fn leak(&mut self, rates: &Rates, elapsed_ns: u64) {
        for (bucket, rate) in self.pairs(rates) {
            if rate.is_limited() {
                bucket.leak(rate, elapsed_ns);
            }
        }
    }

    /// The time until a request of `direction` is admitted, in nanoseconds; 0 for now.
    pub fn wait_ns(&self, rates: &Rates, direction: Direction) -> u64 {
        let wait_ns = |buckets: &[Bucket; SCOPES], rates: &[Rate; SCOPES]| {
            let of = |scope: usize| buckets[scope].wait_ns(&rates[scope]);
            of(TOTAL).max(of(scope(direction)))
        };
        wait_ns(&self.requests, &rates.requests).max(wait_ns(&self.bytes, &rates.bytes))
    }

    /// Adds the cost of an admitted request. Returns the time in which the slowest of the rates
    /// admits that cost, in seconds.
    pub fn charge(&mut self, rates: &Rates, cost: Cost) -> f64 {
        self.each(rates, cost, Bucket::charge)
    }

    /// Takes back the cost of an admitted request that is not carried out. Returns the same time.
    pub fn give_back(&mut self, rates: &Rates, cost: Cost) -> f64 {
        self.each(rates, cost, Bucket::give_back)
    }

    /// Calls `change` with each bucket that limits a request, its rate, and the amount of the
    /// request.
    #[inline]
    fn each(&mut self, rates: &Rates, cost: Cost, change: impl Fn(&mut Bucket, &Rate, f64)) -> f64 {
        let bytes = cost.bytes as f64;
        let requests = if rates.request_size > 0.0 && bytes > rates.request_size {
            bytes / rates.request_size
        } else {
            1.0
        };
        let mut longest: f64 = 0.0;
        for scope in [TOTAL, scope(cost.direction)] {
            for (bucket, rate, amount) in [
                (&mut self.requests[scope], &rates.requests[scope], requests),
                (&mut self.bytes[scope], &rates.bytes[scope], bytes),
            ] {
                if rate.is_limited() {
                    change(bucket, rate, amount);
                    longest = longest.max(amount / rate.average);
                }
            }
        }
        longest
    }

    /// Prepares the buckets for other rates.
    pub fn change(&mut self, from: &Rates, to: &Rates) {
        for ((bucket, from), to) in self.requests.iter_mut().zip(&from.requests).zip(&to.requests) {
            bucket.change(from, to);
        }
        for ((bucket, from), to) in self.bytes.iter_mut().zip(&from.bytes).zip(&to.bytes) {
            bucket.change(from, to);
        }
    }

    fn pairs<'a>(
        &'a mut self,
        rates: &'a Rates,
    ) -> impl Iterator<Item = (&'a mut Bucket, &'a Rate)> {
        let requests = self.requests.iter_mut().zip(&rates.requests);
        requests.chain(self.bytes.iter_mut().zip(&rates.bytes))
    }
}

/// The position of the rates of one direction.
fn scope(direction: Direction) -> usize {
    1 + direction as usize
}
