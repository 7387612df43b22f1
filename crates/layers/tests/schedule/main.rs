//! The order of the requests of disks on one device, under simulated time.

mod model;
mod shares;
mod support;
mod work;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use fathom_block::{ErrorKind, Operation};
use fathom_insight::{RequestFlags, Waiters};
use fathom_layers::ScheduleOptions;
use fathom_options::Nanoseconds;

use support::{Bench, FLUSH, MS, Mark, READ, SECOND, WRITE, WRITE_BACK, disk_of, figure, run};

/// Options under which only `hold_max` bounds the time for which requests are held.
fn patient() -> ScheduleOptions {
    let defaults = ScheduleOptions::default();
    ScheduleOptions { hold_max: Nanoseconds(20 * SECOND), held_requests: 1 << 20, ..defaults }
}

/// Options with which requests are held for 1 s at most.
fn one_second() -> ScheduleOptions {
    ScheduleOptions { hold_max: Nanoseconds(SECOND), ..ScheduleOptions::default() }
}

#[test]
fn background_requests_wait_while_a_process_waits_and_no_longer_than_the_bound() {
    let bench = Bench::new(1, 5 * MS);
    let (mut reader, mut writer, layer) = bench.reader_and_writer(&one_second(), 2);
    run(&mut [&mut reader, &mut writer], &bench.time, 2 * SECOND);
    (0..20).for_each(|_| _ = writer.submit(WRITE_BACK));
    let begun_ns = bench.now();
    run(&mut [&mut reader, &mut writer], &bench.time, begun_ns + 749 * MS);
    assert_eq!((writer.done.len(), figure(&layer, "held")), (0, 20));
    run(&mut [&mut reader, &mut writer], &bench.time, begun_ns + SECOND);
    assert_eq!(figure(&layer, "held"), 0);
    run(&mut [&mut reader, &mut writer], &bench.time, begun_ns + 2 * SECOND);
    assert_eq!((writer.done.len(), figure(&layer, "due_total")), (20, 20));
    assert!(writer.done.iter().all(|done| done.is_held));
    assert_eq!((figure(&layer, "held"), figure(&layer, "held_bytes")), (0, 0));
    let held_ns = figure(&layer, "held_nanoseconds_total");
    assert!((20 * 750 * MS..20 * SECOND).contains(&held_ns), "{held_ns}");
    assert_eq!(figure(&layer, "quiet_total"), 0);
}

#[test]
fn held_requests_of_a_client_that_has_gone_are_given_back() {
    let bench = Bench::new(1, 5 * MS);
    let (mut reader, mut writer, layer) = bench.reader_and_writer(&patient(), 2);
    run(&mut [&mut reader, &mut writer], &bench.time, 2 * SECOND);
    (0..20).for_each(|_| _ = writer.submit(WRITE_BACK));
    run(&mut [&mut reader, &mut writer], &bench.time, 2 * SECOND + 50 * MS);
    assert_eq!((writer.done.len(), figure(&layer, "held")), (0, 20));
    let before = bench.service.passed.lock().len();
    writer.stack.withdraw(&mut writer.reactor);
    let mut withdrawn = 0;
    while let Some((request, outcome)) = writer.stack.completed() {
        assert_eq!(outcome, Err(ErrorKind::Withdrawn));
        writer.stack.recycle(request);
        withdrawn += 1;
    }
    assert_eq!((withdrawn, writer.stack.in_flight()), (20, 0));
    assert_eq!((figure(&layer, "held"), figure(&layer, "held_bytes")), (0, 0));
    assert_eq!(bench.service.passed.lock().len(), before, "none reaches the device");
    // The reader is not disturbed.
    run(&mut [&mut reader], &bench.time, 3 * SECOND);
    assert!(reader.done_within(2 * SECOND, 3 * SECOND) >= 199);
}

#[test]
fn all_held_requests_are_passed_on_in_one_burst() {
    let bench = Bench::new(1, 5 * MS);
    let (mut reader, mut writer, layer) = bench.reader_and_writer(&one_second(), 2);
    run(&mut [&mut reader, &mut writer], &bench.time, 2 * SECOND);
    // One a hundredth of a second, in the reverse of their order on the disk.
    for number in (0..10).rev() {
        writer.submit_at(WRITE_BACK, number << 20);
        let next_ns = bench.now() + 10 * MS;
        run(&mut [&mut reader, &mut writer], &bench.time, next_ns);
    }
    let end_ns = bench.now() + 800 * MS;
    run(&mut [&mut reader, &mut writer], &bench.time, end_ns);
    assert_eq!((figure(&layer, "due_total"), figure(&layer, "held")), (10, 0));
    // The requests were numbered in the order of their arrival.
    let numbers: Vec<u64> = writer.done.iter().map(|done| done.token).collect();
    assert_eq!(numbers, (0..10).rev().collect::<Vec<u64>>());
}

#[test]
fn background_requests_run_at_once_while_no_process_waits() {
    let bench = Bench::new(4, 5 * MS);
    let (disk, layer) = bench.disk(&patient());
    let mut writer = bench.client(&disk, WRITE_BACK, 32);
    run(&mut [&mut writer], &bench.time, 3 * SECOND);
    // Four servers, 200 requests a second each; at first one at a time.
    let count = writer.done_within(SECOND, 3 * SECOND);
    assert!((1560..=1600).contains(&count), "{count}");
    assert_eq!(figure(&layer, "due_total") + figure(&layer, "surplus_total"), 0);
}

#[test]
fn pauses_that_are_long_enough_are_used_and_others_are_not() {
    // The reader is at the device for 5 ms, and pauses.
    for (pause_ns, writes_min, writes_max) in [(8 * MS, 150, 156), (2 * MS, 0, 0)] {
        let bench = Bench::new(1, 5 * MS);
        let (mut reader, mut writer, layer) = bench.reader_and_writer(&patient(), 1);
        reader.pause_ns = pause_ns;
        run(&mut [&mut reader, &mut writer], &bench.time, 2 * SECOND);
        // The first pauses are not known before a background request comes.
        writer.submit(WRITE_BACK);
        run(&mut [&mut reader, &mut writer], &bench.time, 3 * SECOND);
        writer.depth = 40;
        (0..40).for_each(|_| _ = writer.submit(WRITE_BACK));
        let warm = writer.done.len();
        run(&mut [&mut reader, &mut writer], &bench.time, 5 * SECOND);
        let count = writer.done.len() - warm;
        assert!((writes_min..=writes_max).contains(&count), "{count} in pauses of {pause_ns} ns");
        assert!(
            reader.mean_ns(3 * SECOND) <= 5 * MS + 5 * MS / 20,
            "{}",
            reader.mean_ns(3 * SECOND)
        );
        assert_eq!(figure(&layer, "due_total") + figure(&layer, "surplus_total"), 0);
    }
}

#[test]
fn a_disk_that_holds_too_much_does_not_disturb_the_reader_after_a_pause() {
    let bench = Bench::new(1, 5 * MS);
    let options = ScheduleOptions { held_requests: 64, ..patient() };
    let (mut reader, mut writer, layer) = bench.reader_and_writer(&options, 1);
    reader.pause_ns = 200 * MS;
    run(&mut [&mut reader, &mut writer], &bench.time, 4 * SECOND);
    writer.depth = 128;
    (0..128).for_each(|_| _ = writer.submit(WRITE_BACK));
    run(&mut [&mut reader, &mut writer], &bench.time, 14 * SECOND);
    // The first pauses are not known.
    let late = reader.done.iter().filter(|done| done.time_ns > 7 * SECOND);
    let longest_ns = late.map(|done| done.time_ns - done.since_ns).max().unwrap();
    assert!(longest_ns <= 10 * MS, "{longest_ns}");
    assert_eq!(figure(&layer, "due_total") + figure(&layer, "surplus_total"), 0);
    // The pauses are used for more than half.
    let count = writer.done_within(7 * SECOND, 14 * SECOND);
    assert!(count >= 700, "{count}");
}

#[test]
fn adjoining_requests_run_together_as_far_as_the_pause_suffices() {
    let bench = Bench::new(1, 5 * MS);
    let (mut reader, mut writer, layer) = bench.reader_and_writer(&patient(), 1);
    reader.pause_ns = 17 * MS;
    run(&mut [&mut reader, &mut writer], &bench.time, 2 * SECOND);
    for number in 0..400 {
        writer.submit_at(WRITE_BACK, number * WRITE_BACK.length);
    }
    run(&mut [&mut reader, &mut writer], &bench.time, 4 * SECOND);
    let late = reader.done.iter().filter(|done| done.time_ns > 2 * SECOND + 200 * MS);
    let longest_ns = late.map(|done| done.time_ns - done.since_ns).max().unwrap();
    assert!(longest_ns <= 10 * MS, "{longest_ns}");
    assert!(writer.done_within(3 * SECOND, 4 * SECOND) >= 80, "{}", writer.done.len());
    assert_eq!(figure(&layer, "due_total") + figure(&layer, "surplus_total"), 0);
}

#[test]
fn a_waited_for_request_meets_at_most_one_background_request() {
    let bench = Bench::new(1, 5 * MS);
    let (reads, _) = bench.disk(&patient());
    let (writes, _) = bench.disk(&patient());
    let mut reader = bench.client(&reads, READ, 1);
    reader.pause_ns = 9 * MS;
    let mut writer = bench.client(&writes, WRITE_BACK, 40);
    run(&mut [&mut reader, &mut writer], &bench.time, 4 * SECOND);
    assert!(writer.done_within(2 * SECOND, 4 * SECOND) > 100);
    let late = reader.done.iter().filter(|done| done.time_ns > 2 * SECOND);
    let longest_ns = late.map(|done| done.time_ns - done.since_ns).max().unwrap();
    assert!(longest_ns <= 10 * MS, "{longest_ns}");
}

/// Two queues of a disk, each with 6 held writes of file 2 at known places, beside a busy reader.
fn releases(mark: Mark, offset: u64, queue: usize) -> (usize, Vec<(&'static str, u64)>) {
    let bench = Bench::new(1, 5 * MS);
    let (reads, _) = bench.disk(&patient());
    let (writes, layer) = bench.disk(&patient());
    let mut reader = bench.client(&reads, READ, 2);
    let mut writers = [0, 1].map(|_| bench.client(&writes, WRITE_BACK, 0));
    let [first, second] = &mut writers;
    run(&mut [&mut reader, first, second], &bench.time, 2 * SECOND);
    for (queue, writer) in [&mut *first, &mut *second].into_iter().enumerate() {
        for number in 0..6 {
            let file = Mark { inode: 2 + number % 2, ..WRITE_BACK };
            writer.submit_at(file, (number * 2 + queue as u64) << 20);
        }
    }
    run(&mut [&mut reader, first, second], &bench.time, 3 * SECOND);
    assert_eq!(first.done.len() + second.done.len(), 0);
    [&mut *first, &mut *second][queue].submit_at(mark, offset);
    run(&mut [&mut reader, first, second], &bench.time, 4 * SECOND);
    let count = first.done.len() + second.done.len();
    let names = ["flush_total", "overlap_total", "file_total"];
    (count, names.map(|name| (name, figure(&layer, name))).into())
}

#[test]
fn what_a_process_waits_for_releases_held_requests() {
    let counts = |flush, overlap, file| {
        vec![("flush_total", flush), ("overlap_total", overlap), ("file_total", file)]
    };
    let far = 100 << 20;
    // A flush releases the requests of both queues; a write of the same file those of the file.
    assert_eq!(releases(FLUSH, 0, 0), (13, counts(12, 0, 0)));
    assert_eq!(releases(WRITE, far, 1), (7, counts(0, 0, 6)));
    assert_eq!(releases(Mark { inode: 9, ..WRITE }, far, 0), (1, counts(0, 0, 0)));
    // A read of the same file does not wait for the writes.
    assert_eq!(releases(Mark { inode: 2, ..READ }, far, 0), (1, counts(0, 0, 0)));
    // Requests for the same bytes.
    assert_eq!(releases(READ, 1 << 20, 0), (2, counts(0, 1, 0)));
    let long = Mark { length: 2 << 20, inode: 9, ..WRITE };
    assert_eq!(releases(long, 4096, 0), (3, counts(0, 2, 0)));
    let again = Mark { inode: 9, ..WRITE_BACK };
    assert_eq!(releases(again, 2 << 20, 0), (1, counts(0, 1, 0)));
}

#[test]
fn a_flush_of_another_disk_releases_nothing() {
    let bench = Bench::new(1, 5 * MS);
    let (mut reader, mut writer, layer) = bench.reader_and_writer(&patient(), 2);
    run(&mut [&mut reader, &mut writer], &bench.time, 2 * SECOND);
    writer.submit(WRITE_BACK);
    run(&mut [&mut reader, &mut writer], &bench.time, 3 * SECOND);
    reader.submit(FLUSH);
    run(&mut [&mut reader, &mut writer], &bench.time, 4 * SECOND);
    assert_eq!(figure(&layer, "held"), 1);
}

/// Reports that a process waits for every request.
#[derive(Default)]
struct Everything(AtomicBool);

impl Waiters for Everything {
    fn is_awaited(&self, pages: &mut dyn Iterator<Item = u64>) -> bool {
        // Requests without a guest have no pages.
        assert_eq!(pages.next(), None);
        self.0.load(Ordering::Relaxed)
    }
}

#[test]
fn a_process_that_waits_releases_the_held_requests_of_the_file() {
    let bench = Bench::new(1, 5 * MS);
    let (reads, _) = bench.disk(&patient());
    let waiters = Arc::new(Everything::default());
    let layer = bench.layer(&patient(), Some(Arc::<Everything>::clone(&waiters)));
    let writes = disk_of(&layer, &bench.service);
    let mut reader = bench.client(&reads, READ, 2);
    let mut writer = bench.client(&writes, WRITE_BACK, 0);
    run(&mut [&mut reader, &mut writer], &bench.time, 2 * SECOND);
    (0..5).for_each(|_| _ = writer.submit(WRITE_BACK));
    (0..5).for_each(|_| _ = writer.submit(Mark { inode: 7, ..WRITE_BACK }));
    run(&mut [&mut reader, &mut writer], &bench.time, 3 * SECOND);
    assert_eq!(figure(&layer, "held"), 10);
    waiters.0.store(true, Ordering::Relaxed);
    let begun_ns = bench.now();
    run(&mut [&mut reader, &mut writer], &bench.time, begun_ns + 3 * MS);
    // The oldest request is of file 2.
    assert_eq!((figure(&layer, "held"), figure(&layer, "waiter_total")), (5, 5));
    run(&mut [&mut reader, &mut writer], &bench.time, begun_ns + SECOND);
    assert_eq!((figure(&layer, "held"), figure(&layer, "waiter_total")), (0, 10));
}

/// Reports that a process waits for the requests with a page.
struct Page(AtomicU64);

impl Waiters for Page {
    fn is_awaited(&self, mut pages: &mut dyn Iterator<Item = u64>) -> bool {
        let awaited = self.0.load(Ordering::Relaxed);
        Iterator::any(&mut pages, |page| page == awaited)
    }
}

#[test]
fn a_process_that_waits_for_a_request_at_the_device_releases_the_held_ones_of_the_file() {
    let bench = Bench::new(1, 5 * MS);
    let (reads, _) = bench.disk(&patient());
    let waiters = Arc::new(Page(AtomicU64::new(0)));
    let layer = bench.layer(&patient(), Some(Arc::<Page>::clone(&waiters)));
    let writes = disk_of(&layer, &bench.service);
    let mut reader = bench.client(&reads, READ, 2);
    let mut writer = bench.client(&writes, WRITE_BACK, 0);
    // The first one is passed on, because no process waits for the device, and takes long.
    let slow = bench.service.hanging();
    let others = disk_of(&layer, &slow);
    let mut other_queue = bench.client(&others, WRITE_BACK, 0);
    other_queue.submit_page(WRITE_BACK, 0x5000);
    run(&mut [&mut other_queue], &bench.time, 2 * SECOND);
    run(&mut [&mut reader, &mut writer, &mut other_queue], &bench.time, 4 * SECOND);
    for page in 1..4 {
        writer.submit_page(WRITE_BACK, page << 20);
        writer.submit_page(Mark { inode: 7, ..WRITE_BACK }, page << 21 | 0x3000);
    }
    let all = &mut [&mut reader, &mut writer, &mut other_queue];
    run(all, &bench.time, 5 * SECOND);
    assert_eq!(figure(&layer, "held"), 6);
    waiters.0.store(0x5000, Ordering::Relaxed);
    run(all, &bench.time, 5 * SECOND + 3 * MS);
    assert_eq!((figure(&layer, "held"), figure(&layer, "waiter_total")), (3, 3));
    run(all, &bench.time, 6 * SECOND);
    assert_eq!((figure(&layer, "held"), figure(&layer, "waiter_total")), (3, 3));
}

#[test]
fn requests_without_insight_are_never_held() {
    let bench = Bench::new(1, 5 * MS);
    let (reads, _) = bench.disk(&patient());
    let (writes, layer) = bench.disk(&patient());
    let unknown = Mark { kind: fathom_block::Kind::Unknown, inode: 0, ..WRITE_BACK };
    let mut reader = bench.client(&reads, READ, 8);
    let mut writer = bench.client(&writes, unknown, 8);
    run(&mut [&mut reader, &mut writer], &bench.time, 5 * SECOND);
    let counts = [&reader, &writer].map(|client| client.done_within(2 * SECOND, 5 * SECOND));
    assert!(counts[0].abs_diff(counts[1]) <= 15, "{counts:?}");
    assert_eq!(figure(&layer, "held_nanoseconds_total"), 0);
}

#[test]
fn a_drain_releases_everything_in_order() {
    let bench = Bench::new(1, 5 * MS);
    let (mut reader, mut writer, layer) = bench.reader_and_writer(&patient(), 40);
    run(&mut [&mut reader, &mut writer], &bench.time, 2 * SECOND);
    let held: Vec<u64> = (0..10).map(|_| writer.submit_at(WRITE_BACK, 0)).collect();
    let waited: Vec<u64> = (0..60).map(|_| writer.submit(READ)).collect();
    assert!(figure(&layer, "waiting") > 0);
    writer.stack.drain(&mut writer.reactor);
    assert_eq!((figure(&layer, "held"), figure(&layer, "waiting")), (0, 0));
    run(&mut [&mut reader, &mut writer], &bench.time, 4 * SECOND);
    assert_eq!((writer.stack.in_flight(), writer.done.len()), (0, 70));
    let of = |tokens: &[u64]| {
        let done = writer.done.iter().map(|done| done.token);
        done.filter(|token| tokens.contains(token)).collect::<Vec<_>>()
    };
    assert_eq!((of(&held), of(&waited)), (held.clone(), waited.clone()));
}

#[test]
fn a_queue_that_is_closed_leaves_nothing_behind() {
    let bench = Bench::new(1, 5 * MS);
    let (reads, _) = bench.disk(&patient());
    let (writes, layer) = bench.disk(&patient());
    let mut reader = bench.client(&reads, READ, 40);
    let mut writer = bench.client(&writes, WRITE_BACK, 64);
    let mut other = bench.client(&writes, READ, 64);
    run(&mut [&mut reader, &mut writer, &mut other], &bench.time, 2 * SECOND);
    drop((writer, other));
    assert_eq!((figure(&layer, "held"), figure(&layer, "waiting")), (0, 0));
    let count = reader.done.len();
    run(&mut [&mut reader], &bench.time, 4 * SECOND);
    let count = reader.done.len() - count;
    // The requests that were at the device take their time there.
    assert!((365..=401).contains(&count), "{count}");
}

#[test]
fn discards_of_no_process_wait_for_those_of_one() {
    let bench = Bench::new(1, 5 * MS);
    let (reads, _) = bench.disk(&patient());
    let (writes, layer) = bench.disk(&patient());
    let discard = |flags| Mark { operation: Operation::Discard, flags, inode: 0, ..WRITE_BACK };
    let mut reader = bench.client(&reads, READ, 2);
    let mut writer = bench.client(&writes, WRITE_BACK, 0);
    run(&mut [&mut reader, &mut writer], &bench.time, 2 * SECOND);
    (0..3).for_each(|_| _ = writer.submit(discard(RequestFlags(0))));
    run(&mut [&mut reader, &mut writer], &bench.time, 3 * SECOND);
    assert_eq!(figure(&layer, "held"), 3);
    writer.submit(discard(RequestFlags::SYNCHRONOUS));
    run(&mut [&mut reader, &mut writer], &bench.time, 4 * SECOND);
    assert_eq!((figure(&layer, "held"), writer.done.len()), (0, 4));
}
