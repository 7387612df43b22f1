//! Files whose length changes while they are served, by the disk's own resize or from outside.

#![allow(unsafe_code)]

mod support;

#[path = "support/queue.rs"]
mod queue;

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fathom_backend::{FileBackend, FileOptions, Memory};
use fathom_block::{Backend, BackendProblem, Disk, ErrorKind};

use queue::{BLOCK, Queue};

const CAPACITY: u64 = 1 << 20;

fn image() -> tempfile::NamedTempFile {
    let image = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    image.as_file().set_len(CAPACITY).unwrap();
    image
}

fn open(path: &Path, direct: bool) -> Option<Arc<Disk>> {
    let options = FileOptions { path: path.into(), direct, ..FileOptions::default() };
    match FileBackend::open(&options) {
        Ok(backend) => Some(support::disk(Vec::new(), Arc::new(backend))),
        Err(error) if direct => {
            eprintln!("skipped: no direct I/O here: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn writes_in_flight_do_not_undo_a_shrink() {
    let image = image();
    let disk = open(image.path(), false).unwrap();
    let (ended, written) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for durable in [false, false, true] {
            let (disk, ended, written) = (&disk, &ended, &written);
            scope.spawn(move || {
                let mut queue = Queue::open(disk);
                while !ended.load(Ordering::Relaxed) {
                    // The last quarter, which the resizes remove and add.
                    for token in 0..4 {
                        let offset = CAPACITY * 3 / 4 + token * (64 << 10);
                        queue.begin_write(offset, 64 << 10, 7, durable, token);
                    }
                    for (_, outcome) in queue.finish() {
                        match outcome {
                            Ok(()) => drop(written.fetch_add(1, Ordering::Relaxed)),
                            Err(ErrorKind::OutOfRange) => {}
                            Err(error) => panic!("{error}"),
                        }
                    }
                    queue.round(Duration::ZERO);
                }
            });
        }
        let begun = Instant::now();
        for round in 0..60 {
            let before = written.load(Ordering::Relaxed);
            while written.load(Ordering::Relaxed) == before {
                assert!(begun.elapsed() < Duration::from_secs(120), "nothing is written");
                std::thread::yield_now();
            }
            disk.resize(CAPACITY / 2).unwrap();
            for _ in 0..4 {
                std::thread::sleep(Duration::from_millis(1));
                let length = image.path().metadata().unwrap().len();
                assert_eq!(length, CAPACITY / 2, "grown back in round {round}");
            }
            disk.resize(CAPACITY).unwrap();
        }
        ended.store(true, Ordering::Relaxed);
    });
    assert!(disk.backend().problems().is_empty());
}

#[test]
fn a_memory_disk_that_grows_again_reads_as_zeroes() {
    const LARGE: u64 = 64 << 20;
    const LENGTH: u64 = 1 << 20;
    let backend: Arc<dyn Backend> = Arc::new(Memory::new(LARGE));
    let disk = support::disk(Vec::new(), Arc::clone(&backend));
    // Requests through this disk are not refused when the other disk has shrunk.
    let view = support::disk(Vec::new(), Arc::clone(&backend));
    let ended = AtomicBool::new(false);
    let (written, refused) = ([const { AtomicU64::new(0) }; 2], [const { AtomicU64::new(0) }; 2]);
    std::thread::scope(|scope| {
        for part in 0..2 {
            let (disk, ended, written, refused) = (&disk, &ended, &written[part], &refused[part]);
            scope.spawn(move || {
                let mut queue = Queue::open(disk);
                // The last pieces, which the resizes remove and add.
                let offset = LARGE - (part as u64 + 1) * LENGTH;
                while !ended.load(Ordering::Relaxed) {
                    queue.begin_write(offset, LENGTH, 7, false, 0);
                    match queue.finish()[0].1 {
                        Ok(()) => written.fetch_add(1, Ordering::Relaxed),
                        Err(ErrorKind::OutOfRange) => refused.fetch_add(1, Ordering::Relaxed),
                        Err(error) => panic!("{error}"),
                    };
                }
            });
        }
        let begun = Instant::now();
        let more = |counts: &[AtomicU64; 2]| {
            let before = counts.each_ref().map(|count| count.load(Ordering::Relaxed));
            while counts.iter().zip(before).any(|(now, old)| now.load(Ordering::Relaxed) == old) {
                assert!(begun.elapsed() < Duration::from_secs(120), "a writer makes no progress");
                std::thread::yield_now();
            }
        };
        let mut queue = Queue::open(&view);
        let mut round = 0;
        while round < 200 {
            more(&written);
            disk.resize(LARGE / 2).unwrap();
            // No earlier request is in flight any more.
            more(&refused);
            backend.resize(LARGE).unwrap();
            let found = queue.read(LARGE - 2 * LENGTH, 2 * LENGTH, 0).unwrap();
            let old = found.iter().filter(|byte| **byte != 0).count();
            if old > 0 {
                ended.store(true, Ordering::Relaxed);
            }
            assert_eq!(old, 0, "bytes of a write before the shrink in round {round}");
            disk.resize(LARGE).unwrap();
            round += 1;
        }
        ended.store(true, Ordering::Relaxed);
    });
}

#[test]
fn reads_of_a_truncated_image_fail_and_writes_do_not_hide_the_truncation() {
    for direct in [false, true] {
        let image = image();
        let Some(disk) = open(image.path(), direct) else { continue };
        let mut queue = Queue::open(&disk);
        assert_eq!(queue.write(CAPACITY - BLOCK, 6, false), Ok(()));
        let before = disk.backend().losses();
        // To a length that is aligned to no block.
        let length = CAPACITY / 2 + 1000;
        image.as_file().set_len(length).unwrap();
        let offset = length / BLOCK * BLOCK;
        for shift in [0, 1, 512] {
            assert!(queue.read(offset, 4 * BLOCK, shift).is_err(), "across the end");
            assert!(queue.read(CAPACITY - BLOCK, BLOCK, shift).is_err(), "past the end");
            assert!(queue.read(0, 4 * BLOCK, shift).is_ok(), "before the end");
        }
        disk.backend().inspect();
        let problems = disk.backend().problems();
        let cut = BackendProblem::CutShort { length, capacity: CAPACITY };
        assert!(problems.contains(&cut), "{problems:?}");
        assert_eq!(queue.write(CAPACITY - BLOCK, 6, false), Err(ErrorKind::Io));
        assert_eq!(queue.flush(), Err(ErrorKind::Io));
        assert_eq!(image.path().metadata().unwrap().len(), length);
        let lost = disk.backend().losses();
        assert!(lost > before);
        assert!(disk.backend().recover().is_err(), "the image is still too short");
        image.as_file().set_len(CAPACITY).unwrap();
        disk.backend().recover().unwrap();
        assert!(disk.backend().losses() > lost);
        assert!(disk.backend().problems().is_empty());
        assert_eq!(queue.write(CAPACITY - BLOCK, 6, true), Ok(()));
    }
}

#[test]
fn a_deleted_image_is_a_problem_and_can_be_copied() {
    let image = image();
    let disk = open(image.path(), false).unwrap();
    disk.backend().inspect();
    assert!(disk.backend().problems().is_empty());
    let mut queue = Queue::open(&disk);
    assert_eq!(queue.write(0, 8, true), Ok(()));
    image.close().unwrap();
    disk.backend().inspect();
    let problems = disk.backend().problems();
    let [BackendProblem::Deleted { path }] = &problems[..] else { panic!("{problems:?}") };
    let mut start = vec![0; BLOCK as usize];
    std::os::unix::fs::FileExt::read_exact_at(&File::open(path).unwrap(), &mut start, 0).unwrap();
    assert_eq!(start, [8; BLOCK as usize]);
    assert_eq!(queue.write(0, 8, true), Ok(()), "it is still served");
}
