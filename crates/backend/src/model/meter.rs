//! A modelled disk that carries out one request after the other, without any data: what requests
//! would cost.

use super::{Due, Hdd, HddParameters, Mechanism, Ssd, SsdParameters, State, Task};

/// A modelled disk for estimates of time.
pub struct Meter {
    state: State,
    free_ns: u64,
}

impl Meter {
    /// A hard disk.
    pub fn hdd(parameters: HddParameters, seed: u64) -> Self {
        Self::new(Mechanism::Hdd(Box::new(Hdd::new(parameters, seed))))
    }

    /// A solid-state disk.
    pub fn ssd(parameters: SsdParameters, seed: u64) -> Self {
        Self::new(Mechanism::Ssd(Box::new(Ssd::new(parameters, seed))))
    }

    fn new(mechanism: Mechanism) -> Self {
        Self { state: State::new(mechanism), free_ns: 0 }
    }

    /// The time from which the disk is free, in nanoseconds.
    pub fn free_ns(&self) -> u64 {
        self.free_ns
    }

    /// Carries out a read or a write at `now_ns`, or as soon as the disk is free. Returns the time
    /// that it takes, in nanoseconds.
    pub fn transfer(&mut self, now_ns: u64, is_write: bool, offset: u64, length: u64) -> u64 {
        let start_ns = now_ns.max(self.free_ns);
        let task = if is_write { Task::Write(false) } else { Task::Read };
        let number = self.state.arrive(task, offset, length, start_ns);
        let mut time_ns = start_ns;
        let done_ns = loop {
            match self.state.due(number, time_ns) {
                Due::At(done_ns) => break done_ns,
                Due::Undecided(later_ns) => time_ns = later_ns,
            }
        };
        self.state.forget(number);
        self.free_ns = done_ns.max(start_ns);
        self.free_ns - start_ns
    }
}
