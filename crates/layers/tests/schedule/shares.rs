//! The shares of disks and of control groups.

use std::collections::BTreeMap;

use fathom_layers::ScheduleOptions;
use fathom_options::Nanoseconds;

use crate::patient;
use crate::support::{Bench, Client, Mark, READ, SECOND, WRITE, WRITE_BACK, disk_of, figure, run};

const US: u64 = 1000;

fn weighted(weight: u32) -> ScheduleOptions {
    ScheduleOptions { weight, ..ScheduleOptions::default() }
}

/// The share of the first of two clients, in thousandths.
fn share(clients: &mut [Client; 2], bench: &Bench, service_ns: u64) -> usize {
    let from_ns = bench.now() + SECOND / 4 + 400 * service_ns;
    let end_ns = from_ns + 2000 * service_ns;
    let [first, second] = clients;
    run(&mut [first, second], &bench.time, end_ns);
    let [first, second] = clients.each_ref().map(|it| it.done_within(from_ns, end_ns));
    1000 * first / (first + second)
}

#[test]
fn disks_share_by_weight_whatever_their_depth() {
    for (weights, depths, expected) in [
        ([100, 100], [40, 40], 500),
        ([100, 100], [40, 256], 500),
        ([50, 50], [128, 33], 500),
        ([100, 300], [64, 64], 250),
        ([300, 100], [64, 256], 750),
        ([10_000, 10], [64, 64], 999),
    ] {
        for service_ns in [80 * US, 5000 * US] {
            let bench = Bench::new(8, service_ns);
            let mut clients = [0, 1].map(|index| {
                let (disk, _) = bench.disk(&weighted(weights[index]));
                bench.client(&disk, READ, depths[index])
            });
            let share = share(&mut clients, &bench, service_ns);
            let error = share.abs_diff(expected);
            assert!(error <= 12, "{share} for {weights:?} at {depths:?} with {service_ns} ns");
        }
    }
}

#[test]
fn a_weight_changes_while_it_is_in_use() {
    let bench = Bench::new(8, 500 * US);
    let (first, layer) = bench.disk(&weighted(100));
    let (second, _) = bench.disk(&weighted(100));
    let mut clients = [first, second].map(|disk| bench.client(&disk, READ, 64));
    let [one, other] = &mut clients;
    run(&mut [one, other], &bench.time, 2 * SECOND);
    layer.set_options(&weighted(300));
    let share = share(&mut clients, &bench, 500 * US);
    assert!((735..=765).contains(&share), "{share}");
}

#[test]
fn an_idle_disk_saves_nothing_up_and_the_rest_is_used() {
    let bench = Bench::new(8, 500 * US);
    let disks = [0, 1, 2].map(|_| bench.disk(&weighted(100)).0);
    let [mut first, mut second, mut third] =
        disks.each_ref().map(|disk| bench.client(disk, READ, 64));
    run(&mut [&mut first], &bench.time, 5 * SECOND);
    assert!(first.done_within(4 * SECOND, 5 * SECOND) >= 15_900);
    run(&mut [&mut first, &mut second], &bench.time, 6 * SECOND);
    let counts = [&first, &second].map(|it| it.done_within(5 * SECOND, 6 * SECOND));
    assert!(counts[0].abs_diff(counts[1]) <= 400, "{counts:?}");
    // It has had nothing while the others have shared the device.
    run(&mut [&mut first, &mut second, &mut third], &bench.time, 7 * SECOND);
    let counts = [&first, &second, &third].map(|it| it.done_within(6 * SECOND, 7 * SECOND));
    assert!(counts.iter().all(|count| count.abs_diff(5333) <= 400), "{counts:?}");
}

#[test]
fn a_disk_that_uses_less_than_its_share_saves_nothing_up() {
    for holds in [false, true] {
        let bench = Bench::new(8, 500 * US);
        let disks = [0, 1].map(|_| bench.disk(&weighted(100)).0);
        let mut modest = bench.client(&disks[0], READ, 2);
        let mut holder = bench.client(&disks[0], WRITE_BACK, usize::from(holds));
        let mut busy = bench.client(&disks[1], READ, 64);
        let all = &mut [&mut modest, &mut holder, &mut busy];
        run(all, &bench.time, 11 * SECOND);
        let modest_count = all[0].done_within(10 * SECOND, 11 * SECOND);
        assert!((500..5000).contains(&modest_count), "{modest_count}");
        all[0].deepen(256);
        run(all, &bench.time, 12 * SECOND);
        let counts = [0, 2].map(|index| all[index].done_within(11 * SECOND, 12 * SECOND));
        assert!(counts[0].abs_diff(counts[1]) <= 800, "{holds}: {counts:?}");
    }
}

#[test]
fn a_disk_that_holds_too_much_uses_its_share_and_no_more() {
    let bench = Bench::new(1, 5000 * US);
    let options = ScheduleOptions { held_requests: 4, ..ScheduleOptions::default() };
    let (reads, writes) = (bench.disk(&options).0, bench.disk(&options));
    let mut reader = bench.client(&reads, Mark { length: 64 << 10, ..READ }, 2);
    let mut writer = bench.client(&writes.0, WRITE_BACK, 0);
    run(&mut [&mut reader, &mut writer], &bench.time, 2 * SECOND);
    (0..8).for_each(|_| _ = writer.submit(WRITE_BACK));
    // They cost as much as more than four reads.
    run(&mut [&mut reader, &mut writer], &bench.time, 2 * SECOND + 15_000 * US);
    assert_eq!((figure(&writes.1, "surplus_total"), figure(&writes.1, "held")), (0, 8));
    run(&mut [&mut reader, &mut writer], &bench.time, 2 * SECOND + 60_000 * US);
    assert_eq!((figure(&writes.1, "surplus_total"), figure(&writes.1, "held")), (8, 0));
}

#[test]
fn a_neighbour_that_hangs_does_not_extend_the_bound() {
    let bench = Bench::new(8, 5000 * US);
    let hold_max = Nanoseconds(SECOND * 2 / 5);
    let options = ScheduleOptions { hold_max, depth: 3, ..ScheduleOptions::default() };
    let (reads, (writes, layer)) = (bench.disk(&options).0, bench.disk(&options));
    let hung = disk_of(&bench.layer(&options, None), &bench.service.hanging());
    let mut stuck = bench.client(&hung, WRITE_BACK, 1);
    let mut reader = bench.client(&reads, READ, 0);
    let mut writer = bench.client(&writes, WRITE_BACK, 0);
    let begun_ns = bench.now();
    run(&mut [&mut stuck], &bench.time, begun_ns + SECOND / 100);
    reader.depth = 1;
    reader.submit(READ);
    run(&mut [&mut stuck, &mut reader], &bench.time, begun_ns + SECOND / 20);
    // The request that hangs takes the room of bursts.
    let since_ns = bench.now();
    writer.submit(WRITE_BACK);
    let end_ns = since_ns + hold_max.0 - SECOND / 100;
    run(&mut [&mut stuck, &mut reader, &mut writer], &bench.time, end_ns);
    assert_eq!(figure(&layer, "held"), 1);
    let end_ns = since_ns + hold_max.0 + SECOND / 100;
    run(&mut [&mut stuck, &mut reader, &mut writer], &bench.time, end_ns);
    assert_eq!((figure(&layer, "held"), figure(&layer, "due_total")), (0, 1));
}

#[test]
fn control_groups_share_the_part_of_their_disk() {
    for (service_ns, depths) in [(500 * US, [64, 64]), (5000 * US, [128, 48])] {
        let bench = Bench::new(8, service_ns);
        let names = ["/docker/web", "/docker/backup"].map(|text| bench.names.number(text));
        let weights = BTreeMap::from([("*".into(), 100), ("/docker/web".into(), 300)]);
        let options = ScheduleOptions { weights, ..weighted(100) };
        let (disk, _) = bench.disk(&options);
        let (other, _) = bench.disk(&weighted(100));
        let mut groups = [0, 1].map(|index| {
            let mark = Mark { group: names[index].0, ..READ };
            bench.client(&disk, mark, depths[index])
        });
        let mut neighbour = bench.client(&other, READ, 64);
        let [web, backup] = &mut groups;
        run(&mut [web, backup, &mut neighbour], &bench.time, 5 * SECOND);
        let [web, backup] = groups.each_ref().map(|it| it.done_within(2 * SECOND, 5 * SECOND));
        let neighbour = neighbour.done_within(2 * SECOND, 5 * SECOND);
        let part = 1000 * web / (web + backup);
        assert!((735..=765).contains(&part), "{web} {backup} with {service_ns} ns");
        let part = 1000 * neighbour / (web + backup + neighbour);
        assert!((485..=515).contains(&part), "{web} {backup} {neighbour} with {service_ns} ns");
    }
}

#[test]
fn who_marks_everything_as_waited_for_gets_a_fair_share() {
    for service_ns in [80 * US, 2000 * US] {
        // Beside a guest whose processes wait.
        let bench = Bench::new(8, service_ns);
        let disks = [0, 1].map(|_| bench.disk(&ScheduleOptions::default()));
        let mut clients =
            [bench.client(&disks[0].0, WRITE, 256), bench.client(&disks[1].0, READ, 40)];
        let part = share(&mut clients, &bench, service_ns);
        assert!((488..=512).contains(&part), "{part}");
        // Beside a guest that marks its background writes honestly.
        let bench = Bench::new(8, service_ns);
        let disks = [0, 1].map(|_| bench.disk(&ScheduleOptions::default()));
        let mut clients =
            [bench.client(&disks[0].0, WRITE, 256), bench.client(&disks[1].0, WRITE_BACK, 128)];
        let part = share(&mut clients, &bench, service_ns);
        assert!((480..=550).contains(&part), "{part} with {service_ns} ns");
        assert!(figure(&disks[1].1, "surplus_total") > 0);
    }
}

#[test]
fn background_requests_of_two_disks_share_the_quiet_time() {
    let bench = Bench::new(4, 500 * US);
    let disks = [0, 1].map(|_| bench.disk(&patient()).0);
    let mut clients =
        [bench.client(&disks[0], WRITE_BACK, 256), bench.client(&disks[1], WRITE_BACK, 64)];
    let part = share(&mut clients, &bench, 500 * US);
    assert!((475..=525).contains(&part), "{part}");
}

#[test]
fn a_disk_that_hangs_does_not_stop_its_neighbours() {
    let bench = Bench::new(8, 500 * US);
    let (healthy, _) = bench.disk(&ScheduleOptions::default());
    let layer = bench.layer(&ScheduleOptions::default(), None);
    let hung = disk_of(&layer, &bench.service.hanging());
    let mut stuck = bench.client(&hung, READ, 128);
    let mut reader = bench.client(&healthy, READ, 64);
    run(&mut [&mut reader, &mut stuck], &bench.time, 4 * SECOND);
    let count = reader.done_within(3 * SECOND, 4 * SECOND);
    assert!(count >= 15_900, "{count} of 16,000");
    assert!(figure(&layer, "stuck_total") >= 1);
    // Its background requests are not held either.
    let mut writer = bench.client(&healthy, WRITE_BACK, 0);
    reader.stop();
    run(&mut [&mut reader, &mut stuck], &bench.time, 6 * SECOND);
    writer.submit(WRITE_BACK);
    run(&mut [&mut reader, &mut stuck, &mut writer], &bench.time, 7 * SECOND);
    assert_eq!(writer.done.len(), 1);
}

#[test]
fn a_disk_that_hangs_in_part_does_not_stop_its_neighbours() {
    let bench = Bench::new(8, 500 * US);
    let (healthy, _) = bench.disk(&ScheduleOptions::default());
    let layer = bench.layer(&ScheduleOptions::default(), None);
    let mut service = bench.service.hanging();
    service.reads_complete = true;
    let hung = disk_of(&layer, &service);
    let mut stuck = bench.client(&hung, READ, 4);
    let mut reader = bench.client(&healthy, READ, 64);
    (0..40).for_each(|_| _ = stuck.submit(WRITE));
    stuck.depth += 40;
    run(&mut [&mut reader, &mut stuck], &bench.time, 7 * SECOND);
    let counts = [&reader, &stuck].map(|it| it.done_within(3 * SECOND, 7 * SECOND) / 4);
    assert!(counts[0] >= 12_000 && counts[1] >= 500, "{counts:?}");
}

#[test]
fn a_thread_that_does_not_run_does_not_stop_its_neighbours() {
    let bench = Bench::new(8, 500 * US);
    let disks = [0, 1].map(|_| bench.disk(&ScheduleOptions::default()).0);
    let [mut first, mut second] = disks.each_ref().map(|disk| bench.client(disk, READ, 64));
    run(&mut [&mut first, &mut second], &bench.time, 2 * SECOND);
    // The requests of the second wait, and it takes no turn.
    run(&mut [&mut first], &bench.time, 5 * SECOND);
    let count = first.done_within(4 * SECOND, 5 * SECOND);
    assert!(count >= 15_000, "{count} of 16,000");
}
