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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_beyond_the_last_track_take_bounded_time() {
        let mut meter = Meter::hdd(HddParameters::default(), 1);
        let mut random = fastrand::Rng::with_seed(1);
        let mut now_ns = 0;
        for number in 0..2000 {
            let offset =
                if number % 3 == 0 { random.u64(..1 << 62) } else { (2 << 40) + number * 4096 };
            let time_ns = meter.transfer(now_ns, random.bool(), offset, 4096);
            assert!(time_ns < 100_000_000, "{number}: {time_ns}");
            now_ns += random.u64(0..100_000_000);
        }
    }

    #[test]
    fn a_sequence_is_faster_than_random_places() {
        let time_ns = |step: u64, mut meter: Meter| -> u64 {
            (0..200).map(|number| meter.transfer(0, false, number * step, 65536)).sum()
        };
        let hdd = || Meter::hdd(HddParameters::default(), 1);
        assert!(8 * time_ns(65536, hdd()) < time_ns(4 << 30, hdd()));
        let ssd = || Meter::ssd(SsdParameters::nvme(), 1);
        assert!(time_ns(4 << 30, ssd()) < 2 * time_ns(65536, ssd()));
        assert!(time_ns(65536, ssd()) > 0);
    }
}
