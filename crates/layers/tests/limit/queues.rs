//! The queues of a disk at one limit.

use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_block::{Clock, Operation};
use fathom_layers::{LimitGroups, LimitOptions};
use fathom_reactor::Reactor;

use crate::{Client, SECOND, disk, figure, limit, run};

/// Requests of all queues of a disk are served in the order of arrival, so that none waits longer
/// than in one common queue.
#[test]
fn queues_of_a_disk_are_served_in_the_order_of_arrival() {
    for (seed, (rate, depths)) in [
        (400, vec![16; 4]),
        (400, vec![16; 8]),
        (50, vec![16; 8]),
        (20_000, vec![16; 4]),
        (1000, vec![1; 16]),
        (1000, vec![1, 4, 64]),
        (100_000, vec![1, 32, 32, 128]),
    ]
    .into_iter()
    .enumerate()
    {
        let options = LimitOptions { total_iops_sec: rate, ..LimitOptions::default() };
        let layer = limit(&options, &Arc::default(), &LimitGroups::default());
        let (disk, time) = (disk(Arc::clone(&layer)), Rc::new(Cell::new(SECOND)));
        let mut clients: Vec<Client> =
            depths.iter().map(|depth| Client::new(&disk, &time, *depth)).collect();
        let mut random = fastrand::Rng::with_seed(seed as u64);
        let mut all: Vec<&mut Client> = clients.iter_mut().collect();
        // The threads come in any order.
        let seconds = if rate > 1000 { 2 } else { 10 };
        for step in 1..=20 * (seconds + 1) {
            random.shuffle(&mut all);
            run(&mut all, &time, SECOND + step * SECOND / 20);
        }
        let total: usize = depths.iter().sum();
        let wait_ns = total as u64 * SECOND / rate + 1_000_000;
        for (client, depth) in clients.iter().zip(&depths) {
            let longest_ns = client.longest_ns;
            assert!(longest_ns <= wait_ns, "{rate} {depths:?}: {longest_ns}, not {wait_ns} ns");
            let count = client.completed_within(2 * SECOND, (2 + seconds) * SECOND);
            // The requests of a queue come together.
            let expected = seconds * rate * *depth as u64 / total as u64;
            let error = count.abs_diff(expected as usize);
            let error_max = depth + 1 + expected as usize / 50;
            assert!(
                error <= error_max,
                "{rate} {depths:?}: {count} of {expected} at depth {depth}"
            );
        }
        assert_eq!(figure(&layer, "waiting") as usize, total);
    }
}

/// Queues come and go, take their requests back, and stop, while the rates change: no request is
/// forgotten, and no more pass than the limit has room for.
#[test]
fn queues_that_come_and_go_leave_nothing_behind() {
    for seed in 0..60 {
        let mut random = fastrand::Rng::with_seed(seed);
        let groups = LimitGroups::default();
        let options = |rate| LimitOptions {
            total_iops_sec: rate,
            group: "gold".into(),
            ..LimitOptions::default()
        };
        let time = Rc::new(Cell::new(SECOND));
        let layers = [(); 2].map(|()| limit(&options(2000), &Arc::default(), &groups));
        let disks = layers.each_ref().map(|layer| disk(Arc::clone(layer)));
        let open = |random: &mut fastrand::Rng| {
            let mut client = Client::new(&disks[random.usize(..2)], &time, random.usize(1..40));
            client.operation = *random.choice([Operation::Read, Operation::Write].iter()).unwrap();
            client
        };
        let mut clients: Vec<Client> = (0..6).map(|_| open(&mut random)).collect();
        let (mut passed, mut rate, mut room) = (0, 2000, 200.0);
        for _ in 0..200 {
            random.shuffle(&mut clients);
            let count = random.usize(1..=clients.len());
            // Not all of the threads run.
            let mut running: Vec<&mut Client> = clients[..count].iter_mut().collect();
            let from_ns = time.get();
            run(&mut running, &time, from_ns + random.u64(1..20_000_000));
            room += (time.get() - from_ns) as f64 / 1e9 * rate as f64;
            let index = random.usize(..clients.len());
            match random.u32(..5) {
                0 => {
                    let client = &mut clients[index];
                    client.stack.withdraw(&mut client.reactor);
                }
                1 => {
                    passed += clients[index].order.len();
                    clients[index] = open(&mut random);
                }
                2 => {
                    rate = random.u64(200..3000);
                    layers[random.usize(..2)].set_rates(&options(rate));
                    // The time since the last request counts with the new rate.
                    room += 0.02 * rate as f64;
                }
                3 => clients[index].is_stopped = random.bool(),
                _ => {}
            }
        }
        passed += clients.iter().map(|client| client.order.len()).sum::<usize>();
        // The greatest bucket, the least time, and what may be overdrawn.
        assert!(passed as f64 <= room + 300.0 + 10.0, "seed {seed}: {passed}, {room}");
        for client in &mut clients {
            client.is_stopped = true;
        }
        run(&mut clients.iter_mut().collect::<Vec<_>>(), &time, time.get() + 3 * SECOND);
        for client in &clients {
            assert_eq!(client.stack.in_flight(), 0, "seed {seed}");
        }
        assert!(layers.iter().all(|layer| figure(layer, "waiting") == 0), "seed {seed}");
    }
}

/// The queues of a disk on threads of their own, which call each other.
#[test]
fn queues_on_threads_are_served_in_the_order_of_arrival() {
    let options = LimitOptions { total_iops_sec: 2000, ..LimitOptions::default() };
    let disk = disk(limit(&options, &Arc::default(), &LimitGroups::default()));
    let begun = Instant::now();
    let work = |depth: usize| {
        let mut reactor = Reactor::new(8).unwrap();
        let mut stack = disk.open_queue(&mut reactor, Clock::System).unwrap();
        let (mut sent, mut count, mut longest) = (VecDeque::new(), 0_u32, Duration::ZERO);
        while begun.elapsed() < Duration::from_secs(3) || stack.in_flight() > 0 {
            while begun.elapsed() < Duration::from_secs(3) && stack.in_flight() < depth {
                let mut request = stack.request();
                (request.operation, request.length) = (Operation::Read, 4096);
                request.buffers.allocate(4096);
                sent.push_back(Instant::now());
                stack.submit(request, &mut reactor);
            }
            stack.wait(&mut reactor, Some(Duration::from_secs(10))).unwrap();
            while let Some((request, outcome)) = stack.completed() {
                assert_eq!(outcome, Ok(()));
                longest = longest.max(sent.pop_front().unwrap().elapsed());
                count += 1;
                stack.recycle(request);
            }
        }
        (count, longest)
    };
    let found: Vec<(u32, Duration)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| work(16))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    // 128 requests wait for 64 ms, and threads of a busy machine for their processors. The first
    // 200 requests may be of one queue.
    for (count, longest) in &found {
        assert!((300..=1500).contains(count) && longest.as_millis() < 2000, "{found:?}");
    }
}
