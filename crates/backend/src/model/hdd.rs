//! The mechanism of a hard disk: one arm, one rotation, one request at a time.
//!
//! A place on the disk is one real number, the **track coordinate**: its integer part is the track,
//! counted from the outer edge, and its fraction the place on the track. The length of tracks falls
//! linearly from the outer to the inner edge, so the coordinate of a byte is the root of a
//! quadratic equation. The angle of a place is the fraction plus a skew for each track: the next
//! track begins under the head exactly when the head has switched to it.
//!
//! The mechanism has no clock or thread. A call with the current time makes all decisions that were
//! due before it, each with the requests that had arrived by the time of the decision.

use std::collections::HashMap;

use super::{Task, transfer_ns};

/// The parameters of a hard disk. The defaults are those of a 7200 rpm SATA disk; `docs/model.md`
/// has their sources.
#[derive(Clone, Debug, PartialEq)]
pub struct HddParameters {
    /// The capacity of all tracks, in bytes. A disk that uses fewer bytes lies at the outer edge,
    /// and has shorter seeks.
    pub capacity: u64,
    /// The speed of rotation, in revolutions a minute.
    pub revolutions_per_minute: f64,
    /// The rate at the outermost track, in bytes a second.
    pub rate_outer: f64,
    /// The rate at the innermost track, in bytes a second.
    pub rate_inner: f64,
    /// A seek to the next track, in nanoseconds.
    pub seek_track_ns: u64,
    /// The mean of seeks between random places, in nanoseconds.
    pub seek_mean_ns: u64,
    /// A seek from edge to edge, in nanoseconds.
    pub seek_full_ns: u64,
    /// The additional settling time of the arm before a write, in nanoseconds.
    pub settle_write_ns: u64,
    /// The time that the head needs to continue on the next track, in nanoseconds.
    pub switch_ns: u64,
    /// The controller's time for each request, in nanoseconds; the arm does not wait for it.
    pub overhead_ns: u64,
    /// The rate of the cable, in bytes a second.
    pub rate_bus: f64,
    /// The number of oldest requests among which the next is chosen (32 for NCQ).
    pub queue_depth: usize,
    /// The time after which a waiting request is served next, wherever it is, in nanoseconds.
    pub wait_max_ns: u64,
    /// The length that an idle disk reads ahead after a read, in bytes.
    pub read_ahead: u64,
    /// The length of writes that the disk accepts before they are on its tracks, in bytes; 0 for
    /// none.
    pub write_cache: u64,
}

impl Default for HddParameters {
    fn default() -> Self {
        Self {
            capacity: 1_000_000_000_000,
            revolutions_per_minute: 7200.0,
            rate_outer: 210e6,
            rate_inner: 100e6,
            seek_track_ns: 800_000,
            seek_mean_ns: 8_500_000,
            seek_full_ns: 16_000_000,
            settle_write_ns: 500_000,
            switch_ns: 800_000,
            overhead_ns: 100_000,
            rate_bus: 550e6,
            queue_depth: 32,
            wait_max_ns: 1_000_000_000,
            read_ahead: 8 << 20,
            write_cache: 0,
        }
    }
}

impl HddParameters {
    /// The default disk with `capacity` bytes on all of its tracks: seeks are as long as on a full
    /// disk of any size.
    pub fn spanning(capacity: u64) -> Self {
        Self { capacity, ..Self::default() }
    }
}

/// A request that waits for the arm.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    /// The request's number, or `None` for a write from the write cache.
    number: Option<u64>,
    write: bool,
    offset: u64,
    length: u64,
    arrived_ns: u64,
    /// The number of the write in the cache, which flushes wait for.
    cached: u64,
}

/// The range that the disk has read ahead.
#[derive(Clone, Copy, Debug)]
struct ReadAhead {
    start: u64,
    /// The end of the range at `since_ns`.
    end: u64,
    since_ns: u64,
    /// The end at which reading ahead stops.
    limit: u64,
    /// Whether the head still reads ahead.
    active: bool,
}

/// A hard disk; see the module documentation.
pub(super) struct Hdd {
    parameters: HddParameters,
    rotation_ns: f64,
    tracks: f64,
    /// The length of the outermost and of the innermost track, in bytes.
    track_outer: f64,
    track_inner: f64,
    skew: f64,
    /// The seek curve: `seek_track + root · √d + line · d` for a distance d from 0 to 1.
    seek_root: f64,
    seek_line: f64,
    phase: f64,
    random: fastrand::Rng,
    /// The track coordinate of the arm, and the time from which it is free.
    place: f64,
    free_ns: u64,
    waiting: Vec<Waiting>,
    ahead: Option<ReadAhead>,
    dirty: u64,
    cached_count: u64,
    /// Flushes: the number, and the last cached write that the flush waits for.
    flushes: Vec<(u64, u64)>,
}

impl Hdd {
    pub(super) fn new(parameters: HddParameters, seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let rotation_ns = 60e9 / parameters.revolutions_per_minute;
        let track_outer = parameters.rate_outer * rotation_ns / 1e9;
        let track_inner = parameters.rate_inner * rotation_ns / 1e9;
        let tracks =
            (parameters.capacity as f64 / f64::midpoint(track_outer, track_inner)).max(1.0);
        // Random distances have the mean 1/3, and their roots 8/15; see docs/model.md.
        let track_ns = parameters.seek_track_ns as f64;
        let mean_ns = parameters.seek_mean_ns as f64 - track_ns;
        let full_ns = parameters.seek_full_ns as f64 - track_ns;
        let seek_root = (mean_ns - full_ns / 3.0) / (8.0 / 15.0 - 1.0 / 3.0);
        let phase = random.f64();
        Self {
            skew: parameters.switch_ns as f64 / rotation_ns,
            parameters,
            rotation_ns,
            tracks,
            track_outer,
            track_inner,
            seek_root,
            seek_line: full_ns - seek_root,
            phase,
            random,
            place: 0.0,
            free_ns: 0,
            waiting: Vec::new(),
            ahead: None,
            dirty: 0,
            cached_count: 0,
            flushes: Vec::new(),
        }
    }

    /// The time from which the arm is free after the decisions so far, in nanoseconds.
    pub(super) fn free_ns(&self) -> u64 {
        self.free_ns
    }

    /// Removes a request that failed.
    /// The number of requests whose completion times are not decided.
    pub(super) fn undecided(&self) -> usize {
        let waiting = self.waiting.iter().filter(|waiting| waiting.number.is_some()).count();
        waiting + self.flushes.len()
    }

    pub(super) fn cancel(&mut self, number: u64) {
        self.waiting.retain(|waiting| waiting.number != Some(number));
        self.flushes.retain(|(flush, _)| *flush != number);
    }

    pub(super) fn arrive(
        &mut self,
        number: u64,
        task: Task,
        offset: u64,
        length: u64,
        now_ns: u64,
        done_ns: &mut HashMap<u64, u64>,
    ) {
        self.advance(now_ns, done_ns);
        let quick_ns = now_ns + self.parameters.overhead_ns;
        let bus_ns = transfer_ns(length, self.parameters.rate_bus);
        let mut waiting = Waiting {
            number: Some(number),
            write: false,
            offset,
            length,
            arrived_ns: now_ns,
            cached: 0,
        };
        match task {
            Task::Read => {
                let cached = self.waiting.iter().any(|waiting| {
                    waiting.number.is_none()
                        && waiting.offset <= offset
                        && offset + length <= waiting.offset + waiting.length
                });
                if cached {
                    done_ns.insert(number, quick_ns + bus_ns);
                } else if let Some(read_ns) = self.read_ahead(offset, length, now_ns) {
                    done_ns
                        .insert(number, read_ns.max(now_ns + bus_ns) + self.parameters.overhead_ns);
                } else {
                    self.waiting.push(waiting);
                }
            }
            Task::Write(durable) => {
                let end = offset + length;
                if self.ahead.is_some_and(|ahead| offset < ahead.limit && ahead.start < end) {
                    self.ahead = None;
                }
                waiting.write = true;
                if !durable && self.dirty + length <= self.parameters.write_cache {
                    self.dirty += length;
                    self.cached_count += 1;
                    waiting.number = None;
                    waiting.cached = self.cached_count;
                    done_ns.insert(number, quick_ns + bus_ns);
                }
                self.waiting.push(waiting);
            }
            Task::Flush => {
                if self.dirty == 0 {
                    done_ns.insert(number, quick_ns);
                } else {
                    self.flushes.push((number, self.cached_count));
                }
            }
            Task::Deallocate => {
                done_ns.insert(number, quick_ns);
            }
        }
        self.advance(now_ns, done_ns);
    }

    /// Makes all decisions that were due by `now_ns`.
    pub(super) fn advance(&mut self, now_ns: u64, done_ns: &mut HashMap<u64, u64>) {
        loop {
            let Some(earliest_ns) = self.waiting.iter().map(|waiting| waiting.arrived_ns).min()
            else {
                return;
            };
            let start_ns = self.free_ns.max(earliest_ns);
            if start_ns > now_ns {
                return;
            }
            let Some(index) = self.choose(start_ns) else { return };
            let chosen = self.waiting.remove(index);
            let end_ns = self.serve(&chosen, start_ns);
            match chosen.number {
                Some(number) => {
                    done_ns.insert(number, end_ns + self.parameters.overhead_ns);
                }
                None => self.dirty -= chosen.length,
            }
            let oldest = self.waiting.iter().filter(|waiting| waiting.number.is_none());
            let oldest = oldest.map(|waiting| waiting.cached).min().unwrap_or(u64::MAX);
            let overhead_ns = self.parameters.overhead_ns;
            self.flushes.retain(|(number, last)| {
                let waits = oldest <= *last;
                if !waits {
                    done_ns.insert(*number, end_ns + overhead_ns);
                }
                waits
            });
        }
    }

    /// The request that the head reaches soonest, among the oldest ones.
    fn choose(&self, start_ns: u64) -> Option<usize> {
        // Cached writes come after requests of the host, unless a flush waits or the cache is
        // nearly full.
        let pressing = !self.flushes.is_empty() || self.dirty > self.parameters.write_cache / 4 * 3;
        let host = self
            .waiting
            .iter()
            .any(|waiting| waiting.number.is_some() && waiting.arrived_ns <= start_ns);
        let place = self.place_at(start_ns);
        let mut best: Option<(f64, usize)> = None;
        let mut seen = 0;
        for (index, waiting) in self.waiting.iter().enumerate() {
            let behind = waiting.number.is_none() && host && !pressing;
            if waiting.arrived_ns > start_ns || behind {
                continue;
            }
            if start_ns - waiting.arrived_ns > self.parameters.wait_max_ns
                && waiting.number.is_some()
            {
                return Some(index);
            }
            seen += 1;
            if seen > self.parameters.queue_depth.max(1) {
                break;
            }
            let cost = self.positioning_ns(place, waiting, start_ns, 1.0);
            if best.is_none_or(|(least, _)| cost < least) {
                best = Some((cost, index));
            }
        }
        best.map(|(_, index)| index)
    }

    /// Carries out `chosen` from `start_ns`. Returns the time of its end, in nanoseconds.
    fn serve(&mut self, chosen: &Waiting, start_ns: u64) -> u64 {
        let place = self.place_at(start_ns);
        // The time of a seek varies.
        let noise = 0.97 + 0.06 * self.random.f64();
        let positioning_ns = self.positioning_ns(place, chosen, start_ns, noise);
        let (first, last) =
            (self.coordinate(chosen.offset), self.coordinate(chosen.offset + chosen.length));
        let end_ns = start_ns + (positioning_ns + self.media_ns(first, last)) as u64;
        if let Some(ahead) = &mut self.ahead {
            ahead.active = false;
        }
        if !chosen.write {
            let end = chosen.offset + chosen.length;
            let limit = (end + self.parameters.read_ahead).min(self.parameters.capacity);
            let start = chosen.offset;
            self.ahead = Some(ReadAhead { start, end, since_ns: end_ns, limit, active: true });
        }
        self.place = last;
        self.free_ns = end_ns;
        end_ns
    }

    /// The time at which the disk has read the range ahead, in nanoseconds; `None` if it does not.
    fn read_ahead(&mut self, offset: u64, length: u64, now_ns: u64) -> Option<u64> {
        let mut ahead = self.ahead?;
        let reached = self.reached(&ahead, now_ns.max(ahead.since_ns));
        let end = offset + length;
        if offset < ahead.start || offset > reached {
            return None;
        }
        if end <= reached {
            if ahead.active {
                // Older bytes make room for more.
                ahead.limit = ahead
                    .limit
                    .max((end + self.parameters.read_ahead).min(self.parameters.capacity));
                if reached == self.ahead?.limit {
                    // Reading ahead had stopped at the limit, and continues from there.
                    ahead.end = reached;
                    ahead.since_ns = now_ns.max(ahead.since_ns);
                }
                self.ahead = Some(ahead);
            }
            return Some(now_ns.max(ahead.since_ns));
        }
        // Only if the head is still reading ahead and no request waits.
        if !ahead.active || !self.waiting.is_empty() {
            return None;
        }
        if reached == ahead.limit {
            ahead.end = reached;
            ahead.since_ns = now_ns.max(ahead.since_ns);
        }
        let media_ns = self.media_ns(self.coordinate(ahead.end), self.coordinate(end)) as u64;
        let done_ns = ahead.since_ns + media_ns;
        ahead.limit =
            ahead.limit.max((end + self.parameters.read_ahead).min(self.parameters.capacity));
        ahead.start = ahead.start.max(end.saturating_sub(self.parameters.read_ahead * 2));
        self.ahead = Some(ahead);
        self.free_ns = self.free_ns.max(done_ns);
        Some(done_ns)
    }

    /// The end of the range read ahead at `now_ns`, in bytes.
    fn reached(&self, ahead: &ReadAhead, now_ns: u64) -> u64 {
        if !ahead.active || now_ns <= ahead.since_ns {
            return ahead.end;
        }
        let passed = (now_ns - ahead.since_ns) as f64;
        let start = self.coordinate(ahead.end);
        // Each track takes a rotation and a switch.
        let coordinate = start + passed / (self.rotation_ns * (1.0 + self.skew));
        // A place beyond the last track has its limit before its end.
        (self.byte(coordinate) as u64).clamp(ahead.end, ahead.limit.max(ahead.end))
    }

    /// The place of the arm at `now_ns`: it moves while the disk reads ahead.
    fn place_at(&self, now_ns: u64) -> f64 {
        match &self.ahead {
            Some(ahead) if ahead.active => self.coordinate(self.reached(ahead, now_ns)),
            _ => self.place,
        }
    }

    /// The track coordinate of a byte.
    fn coordinate(&self, byte: u64) -> f64 {
        let (outer, inner) = (self.track_outer, self.track_inner);
        let bytes = (byte.min(self.parameters.capacity)) as f64;
        if (outer - inner).abs() < 1.0 {
            return bytes / outer;
        }
        let root = (outer * outer - 2.0 * (outer - inner) * bytes / self.tracks).max(0.0).sqrt();
        (outer - root) / (outer - inner) * self.tracks
    }

    /// The byte at a track coordinate.
    fn byte(&self, coordinate: f64) -> f64 {
        let part = (coordinate / self.tracks).clamp(0.0, 1.0);
        let falling = (self.track_outer - self.track_inner) / 2.0;
        self.tracks * (self.track_outer * part - falling * part * part)
    }

    /// The time under the head from one coordinate to another, in nanoseconds.
    fn media_ns(&self, first: f64, last: f64) -> f64 {
        (last - first) * self.rotation_ns
            + (last.floor() - first.floor()) * self.parameters.switch_ns as f64
    }

    fn angle(&self, coordinate: f64) -> f64 {
        (coordinate + coordinate.floor() * self.skew + self.phase).fract()
    }

    /// The time until the first byte of `waiting` is under the head, in nanoseconds.
    fn positioning_ns(&self, place: f64, waiting: &Waiting, start_ns: u64, noise: f64) -> f64 {
        let target = self.coordinate(waiting.offset);
        let distance = (target.floor() - place.floor()).abs();
        // A distance of less than half a nanosecond of rotation counts as none, because of
        // rounding.
        if (target - place).abs() * self.rotation_ns < 0.5 && self.is_under_head(target, start_ns) {
            return 0.0;
        }
        let mut seek_ns = 0.0;
        if distance > 0.0 {
            let part = distance / self.tracks;
            seek_ns = self.parameters.seek_track_ns as f64
                + self.seek_root * part.sqrt()
                + self.seek_line * part;
            seek_ns *= noise;
            if waiting.write {
                seek_ns += self.parameters.settle_write_ns as f64;
            }
        }
        let arrival = (start_ns as f64 + seek_ns) / self.rotation_ns;
        let wait = (self.angle(target) - arrival.fract()).rem_euclid(1.0);
        // Less than a microsecond late counts as in time, because the head reads before a request.
        let wait = if (1.0 - wait) * self.rotation_ns < 1000.0 { 0.0 } else { wait };
        seek_ns + wait * self.rotation_ns
    }

    /// Whether the place is under the head at `now_ns`: the request continues where the last one
    /// ended, and arrived in time.
    fn is_under_head(&self, target: f64, now_ns: u64) -> bool {
        let rotation = (now_ns as f64 / self.rotation_ns).fract();
        let off = (self.angle(target) - rotation).rem_euclid(1.0);
        off.min(1.0 - off) * self.rotation_ns < 2000.0
    }
}
