//! Limits on requests and bytes, under simulated time.

mod queues;

use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use fathom_backend::{Memory, Null};
use fathom_block::{Clock, Disk, DiskOptions, ErrorKind, HeldBy, Kind, Layer, Operation, Stack};
use fathom_insight::Names;
use fathom_layers::{Limit, LimitGroups, LimitOptions};
use fathom_options::Bytes;
use fathom_reactor::Reactor;
use fathom_sim::{Harness, HarnessOptions, Workload, WorkloadOptions};

const SECOND: u64 = 1_000_000_000;
const CAPACITY: u64 = 1 << 30;

type Time = Rc<Cell<u64>>;

/// A client that always has `depth` requests in flight on one queue.
struct Client {
    stack: Stack,
    reactor: Reactor,
    depth: usize,
    operation: Operation,
    length: u64,
    group: u32,
    kind: Kind,
    /// The completion times of its requests.
    completed_ns: Vec<u64>,
    next: u64,
    time: Time,
    order: Vec<u64>,
    /// The times of the requests in flight, and the longest time that one has taken.
    sent_ns: VecDeque<u64>,
    longest_ns: u64,
    is_stopped: bool,
    held: u64,
    withdrawn: usize,
}

impl Client {
    fn new(disk: &Arc<Disk>, time: &Time, depth: usize) -> Self {
        let mut reactor = Reactor::new(8).unwrap();
        let stack = disk.open_queue(&mut reactor, Clock::Simulated(Rc::clone(time))).unwrap();
        Self {
            stack,
            reactor,
            depth,
            operation: Operation::Read,
            length: 4096,
            group: 0,
            kind: Kind::Unknown,
            completed_ns: Vec::new(),
            next: 0,
            order: Vec::new(),
            sent_ns: VecDeque::new(),
            longest_ns: 0,
            time: Rc::clone(time),
            is_stopped: false,
            held: 0,
            withdrawn: 0,
        }
    }

    fn submit(&mut self) {
        let mut request = self.stack.request();
        (request.operation, request.length) = (self.operation, self.length);
        if self.operation.carries_data() {
            request.buffers.allocate(self.length as usize);
        } else if self.operation == Operation::Flush {
            request.length = 0;
        }
        request.insight.facts.cgroup.0 = self.group;
        request.insight.facts.kind = self.kind;
        request.token = self.next;
        self.next += 1;
        self.sent_ns.push_back(self.time.get());
        self.stack.submit(request, &mut self.reactor);
    }

    /// Makes a round. Returns whether a request has completed.
    fn round(&mut self, now_ns: u64) -> bool {
        let mut events = Vec::new();
        self.reactor.submit().unwrap();
        if self.reactor.is_ready() {
            self.reactor.collect(&mut events).unwrap();
        }
        for event in &events {
            self.stack.event(event, &mut self.reactor);
        }
        // Other queues may be called in this round.
        let is_due = self.stack.deadline_ns().is_some_and(|due_ns| due_ns <= now_ns);
        self.stack.advance(&mut self.reactor);
        while !self.is_stopped && self.stack.in_flight() < self.depth {
            self.submit();
        }
        let before = self.completed_ns.len();
        while let Some((request, outcome)) = self.stack.completed() {
            if outcome == Err(ErrorKind::Withdrawn) {
                self.withdrawn += 1;
                self.sent_ns.clear();
                self.stack.recycle(request);
                continue;
            }
            assert_eq!(outcome, Ok(()));
            self.completed_ns.push(now_ns);
            if let Some(sent_ns) = self.sent_ns.pop_front() {
                self.longest_ns = self.longest_ns.max(now_ns - sent_ns);
            }
            self.order.push(request.token);
            self.held += u64::from(request.course.held_by == HeldBy::Limit);
            self.stack.recycle(request);
        }
        self.completed_ns.len() > before || !events.is_empty() || is_due
    }

    fn completed_within(&self, from_ns: u64, to_ns: u64) -> usize {
        self.completed_ns.iter().filter(|time| (from_ns..to_ns).contains(*time)).count()
    }
}

/// Makes rounds of all clients until `end_ns`.
fn run(clients: &mut [&mut Client], time: &Time, end_ns: u64) {
    loop {
        let mut is_busy = false;
        for client in clients.iter_mut() {
            is_busy |= client.round(time.get());
        }
        if is_busy {
            continue;
        }
        let deadlines = clients.iter().filter_map(|client| client.stack.deadline_ns());
        let next_ns = deadlines.min().unwrap_or(u64::MAX).max(time.get() + 1);
        if next_ns >= end_ns {
            time.set(end_ns);
            return;
        }
        time.set(next_ns);
    }
}

fn limit(options: &LimitOptions, names: &Arc<Names>, groups: &LimitGroups) -> Arc<Limit> {
    Arc::new(Limit::new(options, names, groups))
}

fn disk(layer: Arc<Limit>) -> Arc<Disk> {
    let layers: Vec<Arc<dyn Layer>> = vec![layer];
    Disk::new(DiskOptions::default(), layers, Arc::new(Null::new(CAPACITY))).unwrap()
}

/// A client of a disk with one limit.
fn one(options: &LimitOptions, depth: usize) -> (Client, Arc<Limit>, Time) {
    let layer = limit(options, &Arc::default(), &LimitGroups::default());
    let time = Rc::new(Cell::new(SECOND));
    let client = Client::new(&disk(Arc::clone(&layer)), &time, depth);
    (client, layer, time)
}

fn figure(layer: &Limit, name: &str) -> u64 {
    layer.status().figures.iter().find(|figure| figure.name == name).unwrap().value
}

#[test]
fn the_rate_of_requests_holds_within_a_percent_of_a_second() {
    for rate in [1000, 10_000, 100_000] {
        for depth in [1, 32, 128] {
            let options = LimitOptions { total_iops_sec: rate, ..LimitOptions::default() };
            let (mut client, layer, time) = one(&options, depth);
            run(&mut [&mut client], &time, 4 * SECOND);
            for second in 2..4 {
                let count = client.completed_within(second * SECOND, (second + 1) * SECOND);
                let error = (count as f64 - rate as f64).abs() / rate as f64;
                assert!(error <= 0.01, "{count} of {rate} at depth {depth}");
            }
            assert!(client.order.is_sorted(), "requests overtake each other");
            assert_eq!(figure(&layer, "held_total"), client.held + figure(&layer, "waiting"));
        }
    }
}

#[test]
fn the_rate_of_bytes_holds_and_directions_are_apart() {
    let options = LimitOptions {
        write_bytes_sec: Bytes(10 << 20),
        read_iops_sec: 500,
        ..LimitOptions::default()
    };
    let layer = limit(&options, &Arc::default(), &LimitGroups::default());
    let (disk, time) = (disk(layer), Rc::new(Cell::new(SECOND)));
    let mut writer = Client::new(&disk, &time, 16);
    (writer.operation, writer.length) = (Operation::Write, 64 << 10);
    let mut reader = Client::new(&disk, &time, 16);
    run(&mut [&mut writer, &mut reader], &time, 4 * SECOND);
    let writes = writer.completed_within(2 * SECOND, 4 * SECOND);
    assert!((318..=322).contains(&writes), "{writes} of 320 writes of 64 KiB in 2 s");
    let reads = reader.completed_within(2 * SECOND, 4 * SECOND);
    assert!((995..=1005).contains(&reads), "{reads} of 1000 reads in 2 s");
}

#[test]
fn a_discard_counts_as_one_write_without_data() {
    let options = LimitOptions {
        total_iops_sec: 1000,
        total_bytes_sec: Bytes(1 << 20),
        iops_size: Bytes(4096),
        ..LimitOptions::default()
    };
    let (mut client, _, time) = one(&options, 8);
    (client.operation, client.length) = (Operation::Discard, CAPACITY);
    run(&mut [&mut client], &time, 4 * SECOND);
    let count = client.completed_within(2 * SECOND, 4 * SECOND);
    assert!((1990..=2010).contains(&count), "{count} of 2,000");
}

#[test]
fn a_write_of_zeroes_counts_with_its_length() {
    let options = LimitOptions { total_bytes_sec: Bytes(64 << 20), ..LimitOptions::default() };
    let (mut client, _, time) = one(&options, 8);
    (client.operation, client.length) = (Operation::WriteZeroes, 32 << 20);
    run(&mut [&mut client], &time, 22 * SECOND);
    let count = client.completed_within(2 * SECOND, 22 * SECOND);
    assert!((39..=41).contains(&count), "{count} of 40");
}

#[test]
fn a_burst_is_exact() {
    let options = LimitOptions {
        total_iops_sec: 100,
        total_iops_sec_max: 1000,
        total_iops_sec_max_length: 3,
        ..LimitOptions::default()
    };
    let (mut client, _, time) = one(&options, 64);
    run(&mut [&mut client], &time, 8 * SECOND);
    // The burst is 3,000 requests at 1,000 per second, longer by the 100 per second that drain
    // meanwhile. At most a tenth of a second of the burst's rate is admitted immediately.
    let counts: Vec<usize> = (1..8)
        .map(|second| client.completed_within(second * SECOND, (second + 1) * SECOND))
        .collect();
    for (count, expected) in counts.iter().zip([1100_usize, 1000, 1000, 300, 100, 100, 100]) {
        assert!(count.abs_diff(expected) <= 1, "{counts:?}");
    }
    assert!(counts.iter().sum::<usize>().abs_diff(3700) <= 1, "{counts:?}");
}

#[test]
fn long_requests_count_as_several() {
    let options = LimitOptions {
        total_iops_sec: 1000,
        iops_size: Bytes(16 << 10),
        ..LimitOptions::default()
    };
    let (mut client, _, time) = one(&options, 8);
    client.length = 64 << 10;
    run(&mut [&mut client], &time, 4 * SECOND);
    let count = client.completed_within(2 * SECOND, 4 * SECOND);
    assert!((495..=505).contains(&count), "{count} of 500");
}

#[test]
fn disks_of_a_group_share_equally_whatever_their_depth() {
    let groups = LimitGroups::default();
    let options = |rate| LimitOptions {
        total_iops_sec: rate,
        group: "gold".into(),
        ..LimitOptions::default()
    };
    for rate in [20, 1000, 50_000] {
        let time = Rc::new(Cell::new(SECOND));
        let mut clients: Vec<Client> = [1, 2, 128]
            .into_iter()
            .map(|depth| {
                let layer = limit(&options(rate), &Arc::default(), &groups);
                Client::new(&disk(layer), &time, depth)
            })
            .collect();
        run(&mut clients.iter_mut().collect::<Vec<_>>(), &time, 11 * SECOND);
        let counts: Vec<usize> =
            clients.iter().map(|client| client.completed_within(2 * SECOND, 11 * SECOND)).collect();
        let sum: usize = counts.iter().sum();
        let expected = (9 * rate) as f64;
        assert!((sum as f64 - expected).abs() <= expected * 0.02 + 2.0, "{sum} of {expected}");
        for count in &counts {
            let share = *count as f64 / (expected / 3.0);
            assert!((0.93..=1.07).contains(&share), "{counts:?} at {rate}");
        }
    }
}

#[test]
fn a_disk_with_few_requests_has_short_waits_and_the_rest_is_used() {
    let groups = LimitGroups::default();
    let options =
        LimitOptions { total_iops_sec: 10_000, group: "gold".into(), ..LimitOptions::default() };
    let make = || disk(limit(&options, &Arc::default(), &groups));
    let time = Rc::new(Cell::new(SECOND));
    let mut greedy = Client::new(&make(), &time, 128);
    let mut modest = Client::new(&make(), &time, 1);
    run(&mut [&mut greedy], &time, 3 * SECOND);
    // The modest disk has a request every 10 ms, after the other disk was alone for 2 s.
    modest.is_stopped = true;
    let mut longest_ns = 0;
    for _ in 0..100 {
        modest.submit();
        let (begun, count) = (time.get(), modest.order.len());
        while modest.order.len() == count {
            run(&mut [&mut greedy, &mut modest], &time, time.get() + 100_000);
        }
        longest_ns = longest_ns.max(time.get() - begun);
        run(&mut [&mut greedy, &mut modest], &time, begun + 10_000_000);
    }
    assert!(longest_ns <= 1_000_000, "a request of the modest disk took {longest_ns} ns");
    let count = greedy.completed_within(3 * SECOND, 4 * SECOND);
    assert!((9800..=10_000).contains(&count), "the other disk got {count} of 9,900");
}

#[test]
fn flushes_and_requests_that_are_not_selected_never_wait() {
    let names = Arc::<Names>::default();
    let options = LimitOptions {
        total_iops_sec: 10,
        containers: vec!["/docker/*".into()],
        kinds: vec!["data".into()],
        ..LimitOptions::default()
    };
    let layer = limit(&options, &names, &LimitGroups::default());
    let (disk, time) = (disk(Arc::clone(&layer)), Rc::new(Cell::new(SECOND)));
    let mut container = Client::new(&disk, &time, 8);
    (container.group, container.kind) = (names.number("/docker/web").0, Kind::Data);
    run(&mut [&mut container], &time, 2 * SECOND);
    assert_eq!(figure(&layer, "waiting"), 8);
    for (group, kind, operation) in [
        ("/docker/web", Kind::Data, Operation::Flush),
        ("/docker/web", Kind::Journal, Operation::Write),
        ("/system.slice", Kind::Data, Operation::Write),
    ] {
        let mut other = Client::new(&disk, &time, 1);
        (other.group, other.kind) = (names.number(group).0, kind);
        (other.operation, other.is_stopped) = (operation, true);
        for _ in 0..1000 {
            other.submit();
        }
        other.round(time.get());
        assert_eq!((other.order.len(), other.held), (1000, 0), "{group} {kind:?} {operation}");
    }
    let mut unknown = Client::new(&disk, &time, 1);
    unknown.is_stopped = true;
    (0..100).for_each(|_| unknown.submit());
    unknown.round(time.get());
    assert_eq!(unknown.order.len(), 100);
}

#[test]
fn each_container_can_have_its_own_limit() {
    let names = Arc::<Names>::default();
    let options = LimitOptions {
        total_iops_sec: 100,
        containers: vec!["/docker/*".into()],
        each: true,
        ..LimitOptions::default()
    };
    let layer = limit(&options, &names, &LimitGroups::default());
    let (disk, time) = (disk(layer), Rc::new(Cell::new(SECOND)));
    let mut clients: Vec<Client> = (0..3)
        .map(|number| {
            let mut client = Client::new(&disk, &time, 1 + 30 * number);
            client.group = names.number(&format!("/docker/{number}")).0;
            client
        })
        .collect();
    run(&mut clients.iter_mut().collect::<Vec<_>>(), &time, 4 * SECOND);
    for client in &clients {
        let count = client.completed_within(2 * SECOND, 4 * SECOND);
        assert!((198..=202).contains(&count), "{count} of 200");
    }
    // Control groups beyond the most with limits of their own share a limit.
    let mut flood = Client::new(&disk, &time, 1);
    flood.is_stopped = true;
    for number in 0..2000 {
        flood.group = names.number(&format!("/docker/flood-{number}")).0;
        flood.submit();
    }
    let begun = time.get();
    run(&mut [&mut flood], &time, begun + SECOND);
    let passed = flood.completed_ns.len();
    assert!((300..=500).contains(&passed), "{passed} of 2,000 requests passed in a second");
    // Control groups that have ended make room for others.
    run(&mut [&mut flood], &time, begun + 100 * SECOND);
    assert_eq!(flood.stack.in_flight(), 0);
    let mut late = Client::new(&disk, &time, 1);
    drop(flood);
    late.is_stopped = true;
    for number in 0..100 {
        late.group = names.number(&format!("/docker/late-{number}")).0;
        (0..11).for_each(|_| late.submit());
    }
    late.round(time.get());
    assert_eq!((late.completed_ns.len(), late.held), (1100, 0));
}

#[test]
fn a_drain_releases_all_and_their_cost_stays() {
    let options = LimitOptions { total_iops_sec: 10, ..LimitOptions::default() };
    let (mut client, layer, time) = one(&options, 100);
    run(&mut [&mut client], &time, SECOND + 1_000_000);
    assert_eq!((client.stack.in_flight(), figure(&layer, "waiting")), (100, 100));
    client.is_stopped = true;
    client.stack.drain(&mut client.reactor);
    client.round(time.get());
    assert_eq!((client.stack.in_flight(), figure(&layer, "waiting")), (0, 0));
    assert!(client.order.is_sorted());
    // The following requests wait for the cost of the 100: 10 s.
    client.is_stopped = false;
    client.depth = 1;
    let count = client.order.len();
    run(&mut [&mut client], &time, 10 * SECOND);
    assert_eq!(client.order.len(), count);
    run(&mut [&mut client], &time, 12 * SECOND);
    assert!(client.order.len() > count);
}

#[test]
fn a_disk_that_is_reset_again_and_again_pays_for_itself() {
    let groups = LimitGroups::default();
    let options =
        LimitOptions { total_iops_sec: 1000, group: "all".into(), ..LimitOptions::default() };
    let time = Rc::new(Cell::new(SECOND));
    let mut clients = [100, 4].map(|depth| {
        let layer = limit(&options, &Arc::default(), &groups);
        Client::new(&disk(layer), &time, depth)
    });
    let [resetting, other] = &mut clients;
    for step in 1..=300 {
        run(&mut [resetting, other], &time, SECOND + step * SECOND / 100);
        resetting.stack.drain(&mut resetting.reactor);
    }
    assert!(resetting.order.len() > 10_000, "{}", resetting.order.len());
    let count = other.order.len();
    assert!(count >= 1300, "{count} of 3 s at half of 1,000 a second");
    // The disk waits for what it has got too much.
    resetting.round(time.get());
    let count = resetting.order.len();
    run(&mut [resetting, other], &time, 8 * SECOND);
    assert!(resetting.order.len() <= count + 10, "{} of {count}", resetting.order.len());
    assert!(other.order.len() > 4000);
}

#[test]
fn rates_change_while_requests_wait() {
    let options = LimitOptions { total_iops_sec: 10, ..LimitOptions::default() };
    let (mut client, layer, time) = one(&options, 50);
    run(&mut [&mut client], &time, 2 * SECOND);
    let count = client.order.len();
    assert_eq!(count, 2 + 9, "a tenth of a second, one more, and those of a second");
    // The change wakes requests that would wait for much longer.
    layer.set_rates(&LimitOptions { total_iops_sec: 1000, ..LimitOptions::default() });
    client.reactor.wait(Some(Duration::from_millis(100))).unwrap();
    run(&mut [&mut client], &time, 3 * SECOND);
    let count = client.order.len() - count;
    assert!((1090..=1105).contains(&count), "{count} of 1,000, and the slack of 100");
    // Without a limit, no request waits.
    layer.set_rates(&LimitOptions::default());
    client.is_stopped = true;
    client.reactor.wait(Some(Duration::from_millis(100))).unwrap();
    client.round(time.get());
    assert_eq!(client.stack.in_flight(), 0);
    // A limit after none begins with an empty bucket.
    layer.set_rates(&LimitOptions { total_iops_sec: 100, ..LimitOptions::default() });
    let held = client.held;
    (0..11).for_each(|_| client.submit());
    client.round(time.get());
    assert_eq!((client.stack.in_flight(), client.held), (0, held));
}

#[test]
fn a_stuck_queue_does_not_delay_others() {
    let groups = LimitGroups::default();
    let options =
        LimitOptions { total_iops_sec: 1000, group: "gold".into(), ..LimitOptions::default() };
    let make = || disk(limit(&options, &Arc::default(), &groups));
    let time = Rc::new(Cell::new(SECOND));
    let mut client = Client::new(&make(), &time, 8);
    // Its requests wait, and its thread does not run any more.
    let mut stuck = Client::new(&make(), &time, 8);
    run(&mut [&mut client, &mut stuck], &time, 2 * SECOND);
    let count = client.order.len();
    run(&mut [&mut client], &time, 4 * SECOND);
    let count = client.order.len() - count;
    assert!((1900..=2100).contains(&count), "{count} of 2,000 beside a queue that is stuck");
    drop(stuck);
    run(&mut [&mut client], &time, 5 * SECOND);
    assert!(client.completed_within(4 * SECOND, 5 * SECOND) >= 990);
}

#[test]
fn random_requests_obey_the_model_and_none_is_lost() {
    for seed in 0..40 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut draw = |most: u64| if random.bool() { random.u64(1..=most) } else { 0 };
        let options = LimitOptions {
            read_iops_sec: draw(5000),
            write_iops_sec: draw(5000),
            total_bytes_sec: Bytes(draw(64 << 20)),
            iops_size: Bytes(draw(64 << 10)),
            ..LimitOptions::default()
        };
        let layer = limit(&options, &Arc::default(), &LimitGroups::default());
        let layers: Vec<Arc<dyn Layer>> = vec![layer];
        let backend = Arc::new(Memory::new(1 << 20));
        let disk = Disk::new(DiskOptions::default(), layers, backend).unwrap();
        let harness_options = HarnessOptions { queues: 3, ..HarnessOptions::default() };
        let mut harness = Harness::new(&disk, &harness_options, seed);
        let mut workload = Workload::new(WorkloadOptions::new(1 << 20), seed);
        harness.run(&mut workload, 500, |_| {});
        harness.drain(|_| {});
        harness.verify(1 << 20);
    }
}
