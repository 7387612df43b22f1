//! Requests by seed.

use fathom_block::{Flags, Operation};

/// The parameters of a workload.
#[derive(Clone, Debug)]
pub struct WorkloadOptions {
    /// The size of the disk, in bytes.
    pub capacity: u64,
    /// The alignment of offsets and lengths, in bytes; at least a sector.
    pub alignment: u64,
    /// The longest read or write, in bytes.
    pub length_max: u64,
    /// The relative frequency of each operation, in the order of their declaration.
    pub weights: [u32; Operation::ALL.len()],
    /// The share of writes that force unit access, from 0 to 1.
    pub force_unit_access_rate: f64,
    /// The share of requests to a small part of the disk, where they overlap; from 0 to 1.
    pub hot_rate: f64,
}

impl WorkloadOptions {
    /// All operations, on `capacity` bytes.
    pub fn new(capacity: u64) -> Self {
        Self {
            capacity,
            alignment: 512,
            length_max: 32 << 10,
            weights: [40, 40, 6, 5, 5, 1, 3],
            force_unit_access_rate: 0.1,
            hot_rate: 0.4,
        }
    }
}

/// A request to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Action {
    /// The operation.
    pub operation: Operation,
    /// The offset, in bytes.
    pub offset: u64,
    /// The length, in bytes; 0 if the operation has no range.
    pub length: u64,
    /// The options.
    pub flags: Flags,
    /// For writes: the seed of the content, different for each request.
    pub content: u64,
}

/// An endless sequence of requests.
#[derive(Clone, Debug)]
pub struct Workload {
    options: WorkloadOptions,
    random: fastrand::Rng,
    made: u64,
}

impl Workload {
    /// The sequence that `seed` determines.
    pub fn new(options: WorkloadOptions, seed: u64) -> Self {
        Self { options, random: fastrand::Rng::with_seed(seed), made: 0 }
    }

    fn operation(&mut self) -> Operation {
        let total: u32 = self.options.weights.iter().sum();
        let mut left = self.random.u32(0..total.max(1));
        for (operation, weight) in Operation::ALL.into_iter().zip(self.options.weights) {
            if left < weight {
                return operation;
            }
            left -= weight;
        }
        Operation::Read
    }

    fn range(&mut self) -> (u64, u64) {
        let alignment = self.options.alignment;
        let units = self.options.capacity / alignment;
        let longest = (self.options.length_max / alignment).clamp(1, units);
        // Short requests are as frequent as long ones: the exponent is drawn, not the length.
        let bound = 1 << self.random.u32(0..=longest.ilog2());
        let length = self.random.u64(1..=bound.min(longest));
        let reach = if self.random.f64() < self.options.hot_rate {
            (units / 16).max(length)
        } else {
            units
        };
        let offset = match self.random.u8(0..16) {
            // Mistakes are most likely at the ends of the disk.
            0 => 0,
            1 => units - length,
            _ => self.random.u64(0..=reach.min(units) - length),
        };
        (offset * alignment, length * alignment)
    }
}

impl Iterator for Workload {
    type Item = Action;

    fn next(&mut self) -> Option<Action> {
        let operation = self.operation();
        let (offset, length) = if operation.has_range() { self.range() } else { (0, 0) };
        let mut flags = Flags::default();
        if operation.modifies() && self.random.f64() < self.options.force_unit_access_rate {
            flags.force_unit_access = true;
        }
        if operation == Operation::WriteZeroes {
            flags.keep_allocated = self.random.bool();
        }
        self.made += 1;
        Some(Action { operation, offset, length, flags, content: self.made })
    }
}

/// Fills `bytes` with the content number `content`.
pub fn pattern(bytes: &mut [u8], content: u64) {
    fastrand::Rng::with_seed(content).fill(bytes);
}
