//! Random requests, against a plain model of the rules.

use std::collections::HashMap;
use std::sync::Arc;

use fathom_block::{Disk, Operation};
use fathom_insight::RequestFlags;
use fathom_layers::{Schedule, ScheduleOptions};
use fathom_options::{Bytes, Nanoseconds};

use crate::support::{
    Bench, CAPACITY, Client, FLUSH, MS, Mark, Passed, READ, WRITE, WRITE_BACK, figure, run,
};

/// The longest time after its bound at which a held request is passed on, in nanoseconds.
const SLACK_NS: u64 = 10 * MS;
/// The greatest length of a request that passes in one piece, in bytes.
const PIECE: u64 = 128 << 10;
/// The bytes at the device with which a request that is no longer held waits for its share.
const WHOLE_MAX: u64 = 4 << 20;
/// The number of tokens of a client.
const TOKENS: u64 = 1 << 32;

/// The model's view of a request.
#[derive(Clone, Copy, Debug)]
struct Known {
    client: usize,
    disk: usize,
    mark: Mark,
    offset: u64,
    since_ns: u64,
    is_background: bool,
    /// The time from which a process waits for it, if it was held then.
    released_ns: Option<u64>,
    passed_ns: Option<u64>,
}

impl Known {
    /// The time at which it is no longer held.
    fn due_ns(&self, hold_max_ns: u64) -> u64 {
        self.released_ns.unwrap_or(u64::MAX).min(self.since_ns + hold_max_ns)
    }

    fn meets(&self, other: &Self) -> bool {
        self.offset < other.offset + other.mark.length
            && other.offset < self.offset + self.mark.length
    }
}

/// Whether the arrival of `new` releases the held request `held`.
fn releases(new: &Known, held: &Known) -> bool {
    if new.disk != held.disk {
        return false;
    }
    let is_write = !new.is_background && new.mark.operation.modifies();
    let is_discard = |known: &Known| known.mark.operation == Operation::Discard;
    new.mark.operation == Operation::Flush
        || new.meets(held)
        || is_write && new.mark.inode != 0 && new.mark.inode == held.mark.inode
        || is_write && is_discard(new) && is_discard(held)
}

fn draw(random: &mut fastrand::Rng) -> Mark {
    let inode = random.u64(0..4);
    let length = 4096 << random.u32(0..8);
    let discard = Mark { operation: Operation::Discard, ..WRITE_BACK };
    let marks = [READ, READ, READ, READ, WRITE, WRITE_BACK, WRITE_BACK, WRITE_BACK, discard];
    if random.u32(0..60) == 0 {
        return FLUSH;
    }
    let mut mark = Mark { inode, length, ..marks[random.usize(0..marks.len())] };
    if mark.operation == Operation::Discard && random.u32(0..4) == 0 {
        mark.flags = RequestFlags::SYNCHRONOUS;
    }
    mark
}

struct Case {
    bench: Bench,
    layers: Vec<Arc<Schedule>>,
    clients: Vec<Client>,
    options: ScheduleOptions,
    known: HashMap<u64, Known>,
    /// The recorded events that the model has seen, and the waited-for requests at the device.
    seen: usize,
    waited: usize,
    /// The bytes at the device, and the last time at which there were too many for what is no
    /// longer held.
    bytes: u64,
    crowded_ns: u64,
    /// The last time at which the amounts of each disk were exceeded, in nanoseconds.
    surplus_ns: Vec<u64>,
    /// The last time at which a request of each client was due, in nanoseconds.
    due_ns: Vec<u64>,
    is_draining: bool,
}

impl Case {
    fn new(random: &mut fastrand::Rng) -> Self {
        let bench = Bench::new(random.usize(1..5), random.u64(1..40) * MS / 8);
        let options = ScheduleOptions {
            hold_max: Nanoseconds(random.u64(20..400) * MS),
            held_requests: random.u64(1..40),
            held_bytes: Bytes(random.u64(1..8) << 20),
            depth: random.u32(1..20),
            ..ScheduleOptions::default()
        };
        let made: Vec<(Arc<Disk>, Arc<Schedule>)> = (0..2).map(|_| bench.disk(&options)).collect();
        let mut clients: Vec<Client> =
            [0, 0, 1].iter().map(|disk| bench.client(&made[*disk].0, READ, 0)).collect();
        for (number, client) in clients.iter_mut().enumerate() {
            client.tokens = number as u64 * TOKENS;
        }
        let layers = made.into_iter().map(|(_, layer)| layer).collect();
        let (known, surplus_ns, due_ns) = (HashMap::new(), vec![0; 2], vec![0; 3]);
        Self {
            bench,
            layers,
            clients,
            options,
            known,
            seen: 0,
            waited: 0,
            bytes: 0,
            crowded_ns: 0,
            surplus_ns,
            due_ns,
            is_draining: false,
        }
    }

    fn run(&mut self, time_ns: u64) {
        let end_ns = self.bench.now() + time_ns;
        while self.bench.now() < end_ns {
            let mut clients: Vec<&mut Client> = self.clients.iter_mut().collect();
            // In small steps while requests are held, so that the model sees the state between
            // them.
            let is_left = self.known.values().any(|known| known.passed_ns.is_none());
            let step_ns = if is_left { MS } else { time_ns };
            run(&mut clients, &self.bench.time, (self.bench.now() + step_ns).min(end_ns));
            self.check();
        }
    }

    fn submit(&mut self, random: &mut fastrand::Rng) {
        let number = random.usize(0..self.clients.len());
        let mark = draw(random);
        let is_flush = mark.operation == Operation::Flush;
        let offset = if is_flush { 0 } else { random.u64(0..2000) * 4096 };
        let is_read = mark.operation == Operation::Read;
        let is_background = !is_read && !is_flush && mark.flags == RequestFlags(0);
        let now_ns = self.bench.now();
        let new = Known {
            client: number,
            disk: number / 2,
            mark,
            offset,
            since_ns: now_ns,
            is_background,
            released_ns: None,
            passed_ns: None,
        };
        self.check();
        for held in self.known.values_mut() {
            if held.is_background && held.passed_ns.is_none() && releases(&new, held) {
                held.released_ns.get_or_insert(now_ns);
            }
        }
        assert!(offset + mark.length <= CAPACITY);
        self.known.insert(self.clients[number].tokens, new);
        self.note_surplus();
        self.clients[number].submit_at(mark, offset);
        self.check();
    }

    fn note_surplus(&mut self) {
        for disk in 0..2 {
            let held = || {
                let held = self.known.values();
                held.filter(|it| it.disk == disk && it.is_background && it.passed_ns.is_none())
            };
            let length =
                |it: &Known| if it.mark.operation.carries_data() { it.mark.length } else { 0 };
            let bytes: u64 = held().map(length).sum();
            if held().count() as u64 > self.options.held_requests
                || bytes > self.options.held_bytes.0
            {
                self.surplus_ns[disk] = self.bench.now();
            }
        }
    }

    /// Compares what has reached the device with the rules.
    fn check(&mut self) {
        let passed: Vec<Passed> = self.bench.service.passed.lock()[self.seen..].to_vec();
        self.seen += passed.len();
        let hold_max_ns = self.options.hold_max.0;
        for Passed { time_ns, token, length, is_completed } in passed {
            let known = self.known[&token];
            self.bytes = if is_completed { self.bytes - length } else { self.bytes + length };
            if self.bytes >= WHOLE_MAX {
                self.crowded_ns = time_ns;
            }
            // A request that a process waits for by now counts as one.
            let is_waited = !known.is_background || known.released_ns.is_some();
            if is_completed {
                self.waited -= usize::from(is_waited);
                continue;
            }
            if known.passed_ns.is_some() {
                // A piece of a large request.
                let may_split = is_waited || known.passed_ns >= Some(known.due_ns(hold_max_ns));
                assert!(may_split && known.mark.length > PIECE, "passed twice: {known:?}");
                self.waited += usize::from(is_waited);
                continue;
            }
            let held_ns = time_ns - known.since_ns;
            if known.is_background && !is_waited && !self.is_draining {
                // A burst passes on what is held when it begins.
                let mut held = self.known.values().filter(|it| {
                    it.client == known.client && it.is_background && it.passed_ns.is_none()
                });
                if held.any(|it| time_ns - it.since_ns >= hold_max_ns / 4 * 3) {
                    self.due_ns[known.client] = time_ns;
                }
                let burst_ns = self.due_ns[known.client].max(self.surplus_ns[known.disk]);
                let is_allowed = self.waited == 0 || known.since_ns <= burst_ns;
                assert!(is_allowed, "at {time_ns} beside {} waited-for: {known:?}", self.waited);
            }
            if known.is_background {
                let due_ns = known.due_ns(hold_max_ns);
                let slack_ns = if known.released_ns.is_some() { 0 } else { SLACK_NS };
                // It does not overtake one that waits since the device was crowded.
                let is_behind = self.known.values().any(|it| {
                    let passed_ns = it.passed_ns.unwrap_or(u64::MAX);
                    it.client == known.client
                        && it.is_background
                        && it.due_ns(hold_max_ns) < passed_ns
                        && passed_ns >= due_ns
                });
                let was_crowded = self.crowded_ns >= due_ns || is_behind;
                let is_late = time_ns > due_ns + slack_ns;
                assert!(!is_late || was_crowded, "held for too long: {known:?}");
            }
            if known.mark.operation == Operation::Flush {
                assert_eq!(held_ns, 0, "a flush waited");
            }
            self.check_order(&known, token);
            self.waited += usize::from(is_waited);
            self.known.get_mut(&token).unwrap().passed_ns = Some(time_ns);
        }
        self.note_surplus();
    }

    /// Equal requests of a queue keep their order: those that a process waits for, and background
    /// requests for the same place.
    fn check_order(&self, known: &Known, token: u64) {
        let is_flush = |known: &Known| known.mark.operation == Operation::Flush;
        let older = self.known.iter().filter(|(other, it)| {
            **other < token && it.client == known.client && it.passed_ns.is_none()
        });
        for (_, older) in older {
            let is_equal = if known.is_background {
                older.is_background && older.offset == known.offset
            } else {
                !older.is_background && !is_flush(older) && !is_flush(known)
            };
            assert!(!is_equal, "{known:?} overtakes {older:?}");
        }
    }
}

#[test]
fn random_requests_obey_the_rules_and_none_is_lost() {
    let mut totals = HashMap::new();
    for seed in 0..12 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut case = Case::new(&mut random);
        let pace_ns = random.u64(1..6) * MS;
        for _ in 0..250 {
            // Bursts, and pauses.
            let burst = if random.u32(0..8) == 0 { random.u32(1..30) } else { 1 };
            (0..burst).for_each(|_| case.submit(&mut random));
            let pause = if random.u32(0..40) == 0 { 50 } else { 1 };
            case.run(random.u64(0..pace_ns * pause));
            let is_full =
                case.known.len() - case.clients.iter().map(|it| it.done.len()).sum::<usize>() > 200;
            if is_full {
                case.run(300 * MS);
            }
            if random.u32(0..100) == 0 {
                case.is_draining = true;
                let client = &mut case.clients[random.usize(0..3)];
                client.stack.drain(&mut client.reactor);
                case.check();
                case.is_draining = false;
            }
        }
        case.run(20_000 * MS);
        let done: usize = case.clients.iter().map(|client| client.done.len()).sum();
        assert_eq!(done, case.known.len(), "requests are lost with seed {seed}");
        assert_eq!(case.waited, 0);
        for layer in &case.layers {
            assert_eq!((figure(layer, "held"), figure(layer, "waiting")), (0, 0));
            for name in ["quiet", "due", "surplus", "flush", "overlap", "file", "drain", "waited"] {
                *totals.entry(name).or_insert(0) += figure(layer, &format!("{name}_total"));
            }
        }
    }
    // Each rule has been in use.
    assert!(totals.values().all(|total| *total > 10), "{totals:?}");
}
