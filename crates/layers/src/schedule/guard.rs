//! How much lighter disks may delay a heavier one.
//!
//! A disk that has few requests at a time does not wait for its share, so that its weight alone
//! does not help it: its requests wait at the device for the work of others. So while a disk uses
//! the device without waiting for its share, the requests of lighter disks are admitted at a rate
//! at which its requests take little longer than they do alone. How long they take alone is
//! learned from those that meet no work of a lighter disk; a low rate leaves gaps for that.
//!
//! Disks of equal weight do not have a guard against each other: each gets its share.

/// The time for which the guard stays after the disk's last request, in nanoseconds.
const LATELY_NS: u64 = 1_000_000_000;
/// The time after a request of a lighter disk from which on it does not disturb others, in
/// nanoseconds: an SSD writes what it has accepted.
const AFTER_NS: u64 = 3_000_000;
/// The mean time of requests, of that alone, above which the rate of lighter disks falls, and the
/// time of one request: for example of a read from a part of an SSD that is being programmed.
const SLOW: f64 = 1.15;
const SLOW_ONE: f64 = 3.0;
/// The factors by which the time of a byte rises, because of the mean or of one request, and falls,
/// and by which it falls at first, until a request is slow.
const RISE: f64 = 1.5;
const RISE_ONE: f64 = 1.3;
const FALL: f64 = 0.96;
const FALL_FIRST: f64 = 0.85;
/// The times of a byte of a lighter disk: the first one, the least and the most, in nanoseconds.
const BYTE_NS: f64 = 100.0;
const BYTE_NS_MIN: f64 = 0.05;
const BYTE_NS_MAX: f64 = 2000.0;
/// The number of requests after which the rate changes, and a time after which some are enough, in
/// nanoseconds.
const REQUESTS: u32 = 16;
const FEW: u32 = 4;
const PERIOD_NS: u64 = 50_000_000;
/// The part of an average that is replaced by a new time.
const PART: f64 = 16.0;
/// The number of lengths that are told apart: powers of two from 4 KiB on.
const LENGTHS: usize = 8;

/// The guard of the heaviest disk that has lately used a device.
#[derive(Debug)]
pub(super) struct Guard {
    /// The disk, its weight, and the time of its last request, in nanoseconds.
    member: usize,
    weight: u32,
    last_ns: u64,
    /// The times of its requests without work of lighter disks, by length, in nanoseconds; 0 if
    /// they are not known.
    alone_ns: [f64; LENGTHS],
    /// The time that a byte of a lighter disk takes from them, in nanoseconds.
    byte_ns: f64,
    /// The time from which on a lighter disk may have the next request, in nanoseconds.
    next_ns: u64,
    /// The last time at which lighter disks had requests at the device, in nanoseconds.
    lighter_ns: u64,
    /// The times of its requests since a time, in nanoseconds, of those alone.
    sum: f64,
    count: u32,
    since_ns: u64,
    /// Whether a lighter disk has waited since then.
    has_held: bool,
    /// Whether a request has been slow since the guard began.
    was_slow: bool,
}

impl Default for Guard {
    fn default() -> Self {
        Self {
            member: usize::MAX,
            weight: 0,
            last_ns: 0,
            alone_ns: [0.0; LENGTHS],
            byte_ns: BYTE_NS,
            next_ns: 0,
            lighter_ns: 0,
            sum: 0.0,
            count: 0,
            since_ns: 0,
            has_held: false,
            was_slow: false,
        }
    }
}

impl Guard {
    /// The disk that has the guard, if it has lately used the device.
    pub(super) fn member(&self, now_ns: u64) -> Option<usize> {
        (self.weight > 0 && now_ns < self.last_ns.saturating_add(LATELY_NS)).then_some(self.member)
    }

    /// Notes a waited-for request of a disk.
    pub(super) fn note(&mut self, member: usize, weight: u32, now_ns: u64) {
        if member == self.member && weight == self.weight {
            self.last_ns = now_ns;
        } else if weight > self.weight || self.member(now_ns).is_none() {
            *self = Self { member, weight, last_ns: now_ns, since_ns: now_ns, ..Self::default() };
        }
    }

    /// Forgets a disk.
    pub(super) fn forget(&mut self, member: usize) {
        if member == self.member {
            *self = Self::default();
        }
    }

    /// Whether the guard is against disks with a weight.
    pub(super) fn is_against(&self, weight: u32, now_ns: u64) -> bool {
        weight < self.weight && self.member(now_ns).is_some()
    }

    /// The time until which lighter disks wait, in nanoseconds.
    pub(super) fn until_ns(&self) -> u64 {
        self.next_ns
    }

    /// Notes that a lighter disk waits.
    pub(super) fn hold(&mut self) {
        self.has_held = true;
    }

    /// Notes that a request of a lighter disk with a cost in bytes is admitted.
    pub(super) fn admit(&mut self, cost: f64, now_ns: u64) {
        self.lighter_ns = now_ns;
        self.next_ns = self.next_ns.max(now_ns).saturating_add((cost * self.byte_ns) as u64);
    }

    /// Notes that lighter disks have requests at the device, or that one has completed.
    pub(super) fn meet(&mut self, now_ns: u64) {
        self.lighter_ns = now_ns;
    }

    /// Notes a completed request of the disk.
    pub(super) fn learn(&mut self, begun_ns: u64, bytes: u64, now_ns: u64) {
        if bytes == 0 {
            return;
        }
        let time_ns = now_ns.saturating_sub(begun_ns).max(1) as f64;
        let length = (bytes >> 12).max(1).ilog2() as usize;
        let alone_ns = &mut self.alone_ns[length.min(LENGTHS - 1)];
        if self.lighter_ns.saturating_add(AFTER_NS) <= begun_ns {
            let is_first = *alone_ns == 0.0;
            *alone_ns += if is_first { time_ns } else { (time_ns - *alone_ns) / PART };
        }
        // A time that nothing can be compared with counts as long, until there is a gap.
        let is_known = *alone_ns > 0.0;
        let part = if is_known { time_ns / *alone_ns } else { 2.0 * SLOW };
        if part > SLOW_ONE {
            self.slow_down(RISE_ONE, is_known);
        }
        // One slow request does not count twice.
        self.sum += part.min(SLOW_ONE);
        self.count += 1;
        let is_over = now_ns >= self.since_ns.saturating_add(PERIOD_NS);
        if self.count < REQUESTS && !(self.count >= FEW && is_over) {
            return;
        }
        if self.sum > SLOW * f64::from(self.count) {
            self.slow_down(RISE, is_known);
        } else if self.has_held {
            let factor = if self.was_slow { FALL } else { FALL_FIRST };
            self.byte_ns = (self.byte_ns * factor).max(BYTE_NS_MIN);
        }
        (self.sum, self.count, self.since_ns, self.has_held) = (0.0, 0, now_ns, false);
    }

    fn slow_down(&mut self, factor: f64, is_known: bool) {
        self.byte_ns = (self.byte_ns * factor).min(BYTE_NS_MAX);
        self.was_slow |= is_known;
    }

    /// The most cost of requests of lighter disks at the device, in bytes: at their rate, so many
    /// come while two short requests run alone. More of them would be a queue.
    pub(super) fn cost_max(&self) -> f64 {
        let alone_ns = self.alone_ns.iter().copied().find(|time_ns| *time_ns > 0.0);
        2.0 * alone_ns.unwrap_or(0.0) / self.byte_ns
    }
}
