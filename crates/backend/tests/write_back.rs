//! Real write-back errors under the real file back end: data that could not be written is never
//! reported as durable, whichever request took the kernel's one report.

#![allow(unsafe_code)]

mod support;

#[path = "support/queue.rs"]
mod queue;

use std::path::Path;
use std::sync::{Arc, Barrier};

use fathom_backend::{FileBackend, FileOptions};
use fathom_block::{BackendProblem, Disk, ErrorKind};
use fathom_image::{LogMark, MarkedLog};
use fathom_persistence::Identity;
use fathom_sim::FaultyDevice;

use queue::{BLOCK, Queue};

/// The length of the image in blocks, and the offset of the broken block.
const BLOCKS: u64 = 64;
const BAD: u64 = 21 * BLOCK;

fn open(path: &Path, direct: bool) -> Arc<Disk> {
    let options = FileOptions { path: path.into(), direct, ..FileOptions::default() };
    let backend = FileBackend::open(&options).unwrap();
    support::disk(Vec::new(), Arc::new(backend))
}

/// An image with one broken block, on its own device.
fn faulty() -> Option<(FaultyDevice, Arc<Disk>)> {
    let device = FaultyDevice::new()?;
    let image = device.image("a.img", BLOCKS);
    device.break_block(&image, BAD / BLOCK);
    let disk = open(&image, false);
    Some((device, disk))
}

fn is_lost(disk: &Disk) -> bool {
    disk.backend().has_lost_writes()
}

/// Asserts that no write or flush succeeds any more, on any queue.
fn assert_poisoned(disk: &Arc<Disk>, queues: &mut [Queue]) {
    assert!(is_lost(disk));
    let mut late = Queue::open(disk);
    for queue in queues.iter_mut().chain([&mut late]) {
        assert_eq!(queue.flush(), Err(ErrorKind::Io));
        assert_eq!(queue.write(0, 9, false), Err(ErrorKind::Io));
        assert_eq!(queue.write(0, 9, true), Err(ErrorKind::Io));
        assert!(queue.read(0, BLOCK, 0).is_ok(), "existing data can be read");
    }
    assert_eq!(disk.resize((BLOCKS + 1) * BLOCK), Err(ErrorKind::Io));
}

#[test]
fn a_durable_write_that_takes_the_report_fails_all_later_flushes() {
    let Some((device, disk)) = faulty() else { return };
    let mut queues = [Queue::open(&disk), Queue::open(&disk)];
    assert_eq!(queues[0].write(BAD, 1, false), Ok(()), "into the cache");
    device.write_back();
    assert_eq!(queues[1].write(0, 2, true), Err(ErrorKind::Io), "it takes the report");
    assert_eq!(queues[1].write(0, 2, true), Err(ErrorKind::Io), "and does not make up for it");
    assert_poisoned(&disk, &mut queues);
}

#[test]
fn no_flush_succeeds_beside_one_that_takes_the_report() {
    let Some((device, disk)) = faulty() else { return };
    for round in 0..8 {
        let mut writer = Queue::open(&disk);
        assert_eq!(writer.write(BAD, 1, false), Ok(()));
        if round % 2 == 0 {
            device.write_back();
        }
        let start = Barrier::new(4);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let mut queue = Queue::open(&disk);
                    start.wait();
                    // Several concurrent flushes on one queue, too.
                    for token in 0..3 {
                        queue.begin_flush(token);
                    }
                    for (token, outcome) in queue.finish() {
                        assert_eq!(outcome, Err(ErrorKind::Io), "flush {token} in round {round}");
                    }
                });
            }
        });
        assert_poisoned(&disk, &mut [writer]);
        disk.backend().recover().unwrap();
        assert!(disk.backend().problems().is_empty());
    }
}

#[test]
fn a_durable_write_of_a_broken_block_never_succeeds_beside_others() {
    let Some((_device, disk)) = faulty() else { return };
    for round in 0..100 {
        let start = Barrier::new(3);
        std::thread::scope(|scope| {
            for index in 0..3 {
                let (disk, start) = (&disk, &start);
                scope.spawn(move || {
                    let mut queue = Queue::open(disk);
                    start.wait();
                    // One of the queues has both writes in flight.
                    let both = index == 2;
                    if index == 0 || both {
                        queue.begin_write(BAD, BLOCK, 3, true, 1);
                    }
                    if index == 1 || both {
                        queue.begin_write(BAD + 8 * BLOCK, BLOCK, 3, true, 2);
                    }
                    for (token, outcome) in queue.finish() {
                        if token == 1 {
                            assert_eq!(outcome, Err(ErrorKind::Io), "round {round}");
                        }
                    }
                });
            }
        });
        assert!(is_lost(&disk));
        disk.backend().recover().unwrap();
    }
}

#[test]
fn direct_durable_writes_of_a_broken_block_never_succeed() {
    let Some(device) = FaultyDevice::new() else { return };
    let image = device.image("a.img", BLOCKS);
    device.break_block(&image, BAD / BLOCK);
    let disk = open(&image, true);
    let mut queue = Queue::open(&disk);
    for _ in 0..20 {
        for token in 0..8 {
            queue.begin_write(BAD + token * BLOCK, BLOCK, 4, true, token);
        }
        for (token, outcome) in queue.finish() {
            if token == 0 {
                assert!(outcome.is_err());
            }
        }
        disk.backend().recover().unwrap();
    }
}

#[test]
fn the_sync_of_a_resize_hides_nothing() {
    let Some((device, disk)) = faulty() else { return };
    let mut queues = [Queue::open(&disk), Queue::open(&disk)];
    assert_eq!(queues[0].write(BAD, 1, false), Ok(()));
    device.write_back();
    let larger = (BLOCKS + 8) * BLOCK;
    assert_eq!(disk.resize(larger), Err(ErrorKind::Io), "its sync takes the report");
    let length = device.mount().join("a.img").metadata().unwrap().len();
    assert_eq!((disk.capacity(), length), (larger, larger), "the true size is reported");
    assert_poisoned(&disk, &mut queues);
}

#[test]
fn a_later_daemon_finds_the_record_of_an_earlier_loss() {
    let Some((device, disk)) = faulty() else { return };
    let image = device.mount().join("a.img");
    let mut queue = Queue::open(&disk);
    assert_eq!(queue.write(BAD, 1, false), Ok(()));
    // A daemon's last flush takes the report.
    assert_eq!(queue.flush(), Err(ErrorKind::Io));
    drop((queue, disk));
    for _ in 0..2 {
        let disk = open(&image, false);
        let problems = disk.backend().problems();
        assert_eq!(problems, [BackendProblem::WritesLost { errno: libc::ENOSPC, earlier: true }]);
        assert_poisoned(&disk, &mut [Queue::open(&disk)]);
    }
    let disk = open(&image, false);
    let mut queue = Queue::open(&disk);
    device.mend();
    disk.backend().recover().unwrap();
    assert!(disk.backend().problems().is_empty());
    assert_eq!(queue.write(BAD, 5, false), Ok(()), "an open queue continues");
    assert_eq!(queue.flush(), Ok(()));
    drop((queue, disk));
    let disk = open(&image, false);
    assert!(disk.backend().problems().is_empty(), "the next daemon finds no problem");
    assert_eq!(Queue::open(&disk).read(BAD, BLOCK, 0).unwrap(), [5; BLOCK as usize]);
}

#[test]
fn a_failure_that_no_daemon_has_seen_is_found_at_the_next_opening() {
    let Some((device, disk)) = faulty() else { return };
    assert_eq!(Queue::open(&disk).write(BAD, 1, false), Ok(()));
    drop(disk);
    device.write_back();
    let disk = open(&device.mount().join("a.img"), false);
    assert_poisoned(&disk, &mut [Queue::open(&disk)]);
}

#[test]
fn a_disk_that_still_fails_is_not_recovered() {
    let Some((device, disk)) = faulty() else { return };
    let mut queue = Queue::open(&disk);
    assert_eq!(queue.write(BAD, 1, false), Ok(()));
    assert_eq!(queue.flush(), Err(ErrorKind::Io));
    disk.backend().recover().unwrap();
    // The loss is acknowledged, but the fault still exists, so it is found again.
    assert_eq!(queue.write(BAD, 1, false), Ok(()));
    assert_eq!(queue.flush(), Err(ErrorKind::Io));
    assert_poisoned(&disk, &mut [queue]);
    drop(device);
}

#[test]
fn the_loss_of_a_block_device_is_recorded_in_the_daemons_folder() {
    let Some(mut device) = FaultyDevice::new() else { return };
    let folder = tempfile::tempdir().unwrap();
    let options = FileOptions {
        path: device.path(),
        records: Some(folder.path().into()),
        ..FileOptions::default()
    };
    let image = device.image("a.img", BLOCKS);
    device.break_block(&image, 0);
    let place = device.place_of(&image, 0) * BLOCK;
    // The file system is unmounted, but the broken block stays.
    device.unmount();
    let backend = Arc::new(FileBackend::open(&options).unwrap());
    let disk = support::disk(Vec::new(), backend);
    let mut queue = Queue::open(&disk);
    assert_eq!(queue.write(place, 1, false), Ok(()));
    assert_eq!(queue.flush(), Err(ErrorKind::Io));
    drop((queue, disk));
    let backend = Arc::new(FileBackend::open(&options).unwrap());
    let disk = support::disk(Vec::new(), backend);
    assert!(is_lost(&disk));
    disk.backend().recover().unwrap();
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "no record is left");
}

/// An image's mark is written and removed although writes were lost before: the kernel's report is
/// not about the mark.
#[test]
fn a_mark_is_changed_after_writes_were_lost() {
    let Some((device, disk)) = faulty() else { return };
    let image = device.mount().join("a.img");
    let mark = LogMark::open(&image, device.mount().as_path()).unwrap();
    let log = MarkedLog {
        identity: Identity(*b"0123456789abcdef"),
        age: Some(7),
        offset: 0,
        path: "/fast/logs".into(),
    };
    let mut queue = Queue::open(&disk);
    assert_eq!(queue.write(BAD, 1, false), Ok(()));
    device.write_back();
    mark.write(&log).unwrap();
    assert_eq!(mark.read().unwrap(), Some(log));
    assert_eq!(queue.flush(), Err(ErrorKind::Io));
    disk.backend().recover().unwrap();
    let mut queue = Queue::open(&disk);
    assert_eq!(queue.write(BAD, 2, false), Ok(()));
    device.write_back();
    mark.clear().unwrap();
    assert_eq!(mark.read().unwrap(), None);
    assert_eq!(queue.flush(), Err(ErrorKind::Io));
}
