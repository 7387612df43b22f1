//! Disks on modelled devices beside neighbours with large requests.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use fathom_backend::Null;
use fathom_backend::model::{HddParameters, Model, SsdParameters};
use fathom_block::{Disk, DiskOptions, ErrorKind, Layer};
use fathom_layers::{Schedule, ScheduleDevices, ScheduleOptions};

use crate::support::{
    Bench, CAPACITY, Client, FLUSH, MS, Mark, READ, SECOND, Time, WRITE, WRITE_BACK, figure, run,
};

/// The load of a disk: its weight, its requests, their number in flight, and the pause after each,
/// in nanoseconds.
type Load = (u32, Mark, usize, u64);

/// Disks with these loads on a device.
fn clients(model: &Model, time: &Time, loads: &[Load]) -> Vec<Client> {
    let devices = ScheduleDevices::default();
    let client = |(index, (weight, mark, depth, pause_ns)): (usize, &Load)| {
        let options = ScheduleOptions { weight: *weight, ..ScheduleOptions::default() };
        let schedule = Schedule::new(&options, "device", &devices, &Arc::default(), None);
        let model = model.at(index as u64 * CAPACITY);
        let layers: Vec<Arc<dyn Layer>> = vec![Arc::new(schedule), Arc::new(model)];
        let disk =
            Disk::new(DiskOptions::default(), layers, Arc::new(Null::new(CAPACITY))).unwrap();
        let mut client = Client::new(&disk, time, *mark, *depth);
        client.pause_ns = *pause_ns;
        client
    };
    loads.iter().enumerate().map(client).collect()
}

/// The mean time of the requests of a client since `from_ns`, the 99th percentile, and the longest.
fn times(client: &Client, from_ns: u64) -> (u64, u64, u64) {
    let done = client.done.iter().filter(|done| done.time_ns >= from_ns);
    let mut times: Vec<u64> = done.map(|done| done.time_ns - done.since_ns).collect();
    times.sort_unstable();
    let mean = times.iter().sum::<u64>() / times.len().max(1) as u64;
    (mean, times[times.len() * 99 / 100], times[times.len() - 1])
}

fn ssd(parameters: SsdParameters) -> Model {
    Model::ssd(parameters, 1)
}

/// A reader with one read at a time, that pauses or not, beside what neighbours of weight 1 send.
#[test]
fn a_heavy_reader_waits_little_longer_than_alone_whatever_its_neighbours_send() {
    for (parameters, pauses) in
        [(SsdParameters::sata(), [0, 2 * MS]), (SsdParameters::nvme(), [MS, 3 * MS])]
    {
        for pause_ns in pauses {
            let time: Time = Rc::new(Cell::new(SECOND));
            let mut alone = clients(&ssd(parameters.clone()), &time, &[(1000, READ, 1, pause_ns)]);
            run(&mut [&mut alone[0]], &time, 2 * SECOND);
            let (alone_ns, ..) = times(&alone[0], 0);
            for (mark, depth, late) in [
                (Mark { length: 32 << 20, ..WRITE }, 60, 7),
                (Mark { length: 1 << 20, ..WRITE }, 60, 7),
                (Mark { length: 8 << 20, ..READ }, 20, 2),
                (READ, 64, 2),
            ] {
                time.set(SECOND);
                let loads = [(1000, READ, 1, pause_ns), (1, mark, depth, 0)];
                let mut clients = clients(&ssd(parameters.clone()), &time, &loads);
                let [reader, neighbour] = &mut clients[..] else { unreachable!() };
                run(&mut [reader, neighbour], &time, 3 * SECOND);
                let (mean_ns, late_ns, longest_ns) = times(reader, 3 * SECOND / 2);
                let case = format!("{depth} {mark:?} {pause_ns}: {mean_ns} {late_ns} {longest_ns}");
                assert!(mean_ns * 4 <= alone_ns * 5, "{case}, alone {alone_ns}");
                // A part of an SSD programs a write for ten times as long as a read takes.
                assert!(late_ns <= late * alone_ns, "{case}, alone {alone_ns}");
                assert!(longest_ns <= 2 * MS, "{case}");
                // The neighbour gets what is left.
                let least = if mark.length < 2 << 20 { 5 } else { 0 };
                assert!(neighbour.done_within(SECOND, 3 * SECOND) >= least, "{case}");
            }
        }
    }
}

/// A disk that begins to use a device meets a bounded amount of its neighbours' work, without
/// weights, too.
#[test]
fn large_requests_pass_in_pieces_so_that_none_waits_for_all_of_them() {
    let time: Time = Rc::new(Cell::new(SECOND));
    let large = Mark { length: 32 << 20, ..WRITE };
    let loads = [(100, READ, 0, 0), (100, large, 60, 0)];
    let mut clients = clients(&ssd(SsdParameters::sata()), &time, &loads);
    let [reader, writer] = &mut clients[..] else { unreachable!() };
    run(&mut [reader, writer], &time, 3 * SECOND);
    let written = writer.done_within(2 * SECOND, 3 * SECOND);
    assert!((15..=17).contains(&written), "{written} of 32 MiB in a second");
    reader.deepen(1);
    run(&mut [reader, writer], &time, 5 * SECOND);
    let (mean_ns, _, longest_ns) = times(reader, 0);
    assert!(mean_ns < 10 * MS && longest_ns < 20 * MS, "{mean_ns} {longest_ns}");
    let written = writer.done_within(3 * SECOND, 5 * SECOND);
    assert!(written >= 30, "{written} of 32 MiB in two seconds");
}

/// What releases many held requests of a neighbour together: their time, a flush, and a file that
/// is written. A heavier disk has its guard; others wait for as much as a device may have.
#[test]
fn held_requests_that_are_released_together_delay_others_within_the_bound() {
    for (weight, length, depth, longest_max_ns) in [
        (1000, 32 << 20, 60, 2 * MS),
        (1000, 4 << 20, 100, 2 * MS),
        (1000, 256 << 10, 1000, 2 * MS),
        (100, 32 << 20, 60, 30 * MS),
    ] {
        for release in [None, Some(FLUSH), Some(WRITE)] {
            let time: Time = Rc::new(Cell::new(SECOND));
            let held = Mark { length, ..WRITE_BACK };
            let loads = [(weight, READ, 1, MS), (100, held, 0, 0)];
            let mut clients = clients(&ssd(SsdParameters::nvme()), &time, &loads);
            let [reader, writer] = &mut clients[..] else { unreachable!() };
            run(&mut [reader, writer], &time, 2 * SECOND);
            let begun_ns = time.get();
            (0..depth).for_each(|_| _ = writer.submit(held));
            if let Some(mark) = release {
                run(&mut [reader, writer], &time, begun_ns + MS / 10);
                writer.submit(mark);
            }
            run(&mut [reader, writer], &time, begun_ns + 8 * SECOND);
            let (mean_ns, _, longest_ns) = times(reader, begun_ns);
            let done = writer.done.len();
            let case =
                format!("{weight} {depth} {length} {release:?}: {mean_ns} {longest_ns} {done}");
            assert!(longest_ns <= longest_max_ns, "{case}");
            assert!(done > 0, "{case}");
        }
    }
}

/// The service of two disks by their cost: the bytes, and 64 KiB for each request or piece.
#[test]
fn weights_hold_for_all_lengths_where_both_have_work() {
    for (parameters, weight, lengths, depths, operation) in [
        (SsdParameters::sata(), 1000, [4096, 4096], [32, 32], READ),
        (SsdParameters::sata(), 1000, [64 << 10, 4 << 20], [32, 8], READ),
        (SsdParameters::nvme(), 1000, [64 << 10, 64 << 10], [32, 32], WRITE),
        (SsdParameters::nvme(), 300, [1 << 20, 4 << 20], [8, 8], WRITE),
        (SsdParameters::nvme(), 300, [8 << 20, 64 << 10], [8, 64], READ),
    ] {
        let time: Time = Rc::new(Cell::new(SECOND));
        let loads = [0, 1].map(|it| {
            let mark = Mark { length: lengths[it], ..operation };
            ([weight, 100][it], mark, depths[it], 0)
        });
        let mut clients = clients(&ssd(parameters), &time, &loads);
        let [first, second] = &mut clients[..] else { unreachable!() };
        run(&mut [first, second], &time, 3 * SECOND);
        let costs = [&*first, &*second].map(|client| {
            let length = client.mark.length;
            let pieces = length.div_ceil(128 << 10);
            let count = client.done_within(3 * SECOND / 2, 3 * SECOND) as u64;
            (count * (length + pieces * (64 << 10))) as f64
        });
        let error = (costs[0] / costs[1] / (f64::from(weight) / 100.0) - 1.0).abs();
        assert!(error <= 0.1, "{weight} {lengths:?} {depths:?}: {error}");
    }
}

/// The arm of a hard disk moves for each read: its time varies, and neighbours cost more.
#[test]
fn a_heavy_reader_of_a_hard_disk_is_little_slower_beside_a_flood() {
    let time: Time = Rc::new(Cell::new(SECOND));
    let model = || Model::hdd(HddParameters::spanning(2 * CAPACITY), 1);
    let mut alone = clients(&model(), &time, &[(1000, READ, 1, 0)]);
    run(&mut [&mut alone[0]], &time, 20 * SECOND);
    time.set(SECOND);
    let flood = Mark { length: 8 << 20, ..WRITE };
    let mut clients = clients(&model(), &time, &[(1000, READ, 1, 0), (1, flood, 20, 0)]);
    let [reader, writer] = &mut clients[..] else { unreachable!() };
    run(&mut [reader, writer], &time, 40 * SECOND);
    let [beside_ns, alone_ns] = [&*reader, &alone[0]].map(|it| it.mean_ns(10 * SECOND));
    assert!(beside_ns * 2 <= alone_ns * 3, "{beside_ns} ns, alone {alone_ns}");
}

/// What is left of a large request is given back when its client has gone; its pieces at the device
/// complete first.
#[test]
fn a_large_request_is_given_back_in_the_middle() {
    let bench = Bench::new(1, 5 * MS);
    let options = ScheduleOptions { depth: 2, ..ScheduleOptions::default() };
    let (_other, layer) = (bench.disk(&options), bench.disk(&options));
    let mut client = bench.client(&layer.0, WRITE, 0);
    client.submit_at(Mark { length: 2 << 20, ..WRITE }, 0);
    client.submit_at(Mark { length: 1 << 20, ..WRITE }, 4 << 20);
    run(&mut [&mut client], &bench.time, SECOND + 12 * MS);
    let passed = |is_completed: bool| {
        let passed = bench.service.passed.lock();
        passed.iter().filter(|it| it.is_completed == is_completed).count()
    };
    assert_eq!((passed(false), passed(true), figure(&layer.1, "waiting")), (4, 2, 2));
    client.stack.withdraw(&mut client.reactor);
    let (request, outcome) = client.stack.completed().unwrap();
    assert_eq!((request.token, outcome), (1, Err(ErrorKind::Withdrawn)), "no piece has passed");
    client.stack.recycle(request);
    assert!(!client.stack.has_completed(), "two pieces are at the device");
    bench.time.set(SECOND + 40 * MS);
    client.stack.withdraw(&mut client.reactor);
    client.stack.advance(&mut client.reactor);
    let (request, outcome) = client.stack.completed().unwrap();
    assert_eq!((request.token, outcome), (0, Err(ErrorKind::Withdrawn)));
    assert!(request.course.held_ns == 0, "its first piece did not wait");
    client.stack.recycle(request);
    assert_eq!((passed(false), passed(true), figure(&layer.1, "waiting")), (4, 4, 0));
    assert_eq!((client.stack.in_flight(), client.stack.in_flight_of_layers()), (0, 0));
    // The device is free for others.
    client.submit_at(READ, 0);
    bench.time.set(SECOND + 60 * MS);
    client.stack.advance(&mut client.reactor);
    assert!(client.stack.has_completed());
}
