//! The layer `wal` on real files: a queue ends while the kernel has its I/O to home or to the log.
//! A frozen file system keeps the I/O in the kernel, where nothing can cancel it.

#![allow(unsafe_code)]

mod support;

#[path = "support/queue.rs"]
mod queue;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_backend::{FileBackend, FileOptions};
use fathom_block::{Backend, Disk, ErrorKind};
use fathom_layers::Wal;
use fathom_layers::wal::{Completion, LogVolume, WalOptions};
use fathom_persistence::Identity;

use queue::{BLOCK, Queue};

const CAPACITY: u64 = 1 << 20;
const LOG_CAPACITY: u64 = 2 << 20;
/// The content of memory that is allocated after a queue has ended.
const POISON: u8 = 0xee;
/// The age at which changes are written back.
const AGE: Duration = Duration::from_secs(1);
/// An age at which no change is written back in a test.
const NEVER: Duration = Duration::from_secs(3600);
/// A limit on every wait of a test.
const LIMIT: Duration = Duration::from_secs(20);

/// A file system of its own with one file, which can be frozen.
struct FileSystem {
    folder: tempfile::TempDir,
}

fn run(program: &str, arguments: &[&Path]) -> bool {
    Command::new(program).args(arguments).output().is_ok_and(|output| output.status.success())
}

impl FileSystem {
    /// Mounts it; `None`, with a message, if this host cannot.
    fn mount(length: u64) -> Option<Self> {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let (image, point) = (folder.path().join("image"), folder.path().join("point"));
        File::create(&image).unwrap().set_len(16 << 20).unwrap();
        std::fs::create_dir(&point).unwrap();
        let made = run("mkfs.ext4", &[Path::new("-q"), &image])
            && run("mount", &[Path::new("-o"), Path::new("loop,noatime"), &image, &point]);
        if !made {
            eprintln!("SKIPPED: no ext4 on a loop device can be mounted here");
            return None;
        }
        let file_system = Self { folder };
        // Allocated, so that a write changes the file's data alone.
        std::fs::write(file_system.file(), vec![0; length as usize]).unwrap();
        assert!(run("sync", &[&file_system.file()]));
        Some(file_system)
    }

    fn point(&self) -> PathBuf {
        self.folder.path().join("point")
    }

    fn file(&self) -> PathBuf {
        self.point().join("file")
    }

    fn freeze(&self) {
        assert!(run("fsfreeze", &[Path::new("-f"), &self.point()]));
    }

    fn thaw(&self) {
        assert!(run("fsfreeze", &[Path::new("-u"), &self.point()]));
    }

    fn content(&self, offset: u64, length: u64) -> Vec<u8> {
        let mut content = vec![0; length as usize];
        File::open(self.file()).unwrap().read_exact_at(&mut content, offset).unwrap();
        content
    }
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        // A test that has failed may have left it frozen.
        run("fsfreeze", &[Path::new("-u"), &self.point()]);
        run("umount", &[Path::new("-l"), &self.point()]);
    }
}

/// The disk with these files as log and home.
fn open(log: &Path, home: &Path, age: Duration) -> Arc<Disk> {
    let backend = |path: &Path| -> Arc<dyn Backend> {
        let options = FileOptions { path: path.into(), direct: true, ..FileOptions::default() };
        Arc::new(FileBackend::open(&options).unwrap())
    };
    let volume = Arc::new(LogVolume::new(backend(log)));
    let options = WalOptions {
        name: "disk".into(),
        home: "image".into(),
        home_capacity: CAPACITY,
        home_alignment: 1,
        offset: 0,
        size: 0,
        block_size: 0,
        identity: Identity(*b"identity of test"),
        age_ns: age.as_nanos() as u64,
        completion: Completion::Durable,
        expected: None,
        mark: None,
        times: None,
        home_store: fathom_layers::wal::HomeStore::default(),
        clock_start_ns: 0,
    };
    let wal = Wal::open(&volume, &options).unwrap();
    support::disk(vec![Arc::new(wal)], backend(home))
}

/// A queue of the disk as a later daemon opens it: on copies of the files, because the queue that
/// ended keeps its files, and so their locks, as long as the process.
fn reopen(log: &FileSystem, home: &FileSystem) -> Queue {
    let copy = |file_system: &FileSystem| {
        let copy = file_system.folder.path().join("copy");
        std::fs::copy(file_system.file(), &copy).unwrap();
        copy
    };
    Queue::open(&open(&copy(log), &copy(home), NEVER))
}

/// Handles a queue's events until its I/O hangs in the kernel.
fn hang(queue: &mut Queue, is_begun: impl Fn(&Queue) -> bool) {
    let begun = Instant::now();
    while !is_begun(queue) {
        assert!(begun.elapsed() < LIMIT, "no I/O has begun");
        queue.advance();
        queue.round(Duration::from_millis(10));
    }
    let end = Instant::now() + Duration::from_millis(300);
    while Instant::now() < end {
        queue.round(Duration::from_millis(10));
    }
    assert!(is_begun(queue), "the I/O does not hang");
}

/// Takes memory that has been freed, and fills it.
fn poison() -> Vec<Vec<u8>> {
    let lengths = [4096, 4608, 8192, 16 << 10, 32 << 10, 36 << 10, 64 << 10, 128 << 10, 1 << 20];
    lengths.iter().cycle().take(400).map(|length| vec![POISON; *length]).collect()
}

/// Waits until the kernel has written `expected` to the file.
fn until_written(file_system: &FileSystem, length: u64, expected: &[u8]) {
    let begun = Instant::now();
    loop {
        let content = file_system.content(0, length);
        assert!(!content.contains(&POISON), "the kernel wrote freed memory");
        if content.windows(expected.len()).step_by(512).any(|part| part == expected) {
            return;
        }
        assert!(begun.elapsed() < LIMIT, "the kernel's write has not arrived");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_queue_ends_while_its_write_back_is_in_the_kernel() {
    let Some(log) = FileSystem::mount(LOG_CAPACITY) else { return };
    let Some(home) = FileSystem::mount(CAPACITY) else { return };
    let disk = open(&log.file(), &home.file(), AGE);
    let (mut first, mut second) = (Queue::open(&disk), Queue::open(&disk));
    first.begin_write(0, 8 * BLOCK, 7, true, 0);
    assert_eq!(first.finish()[0].1, Ok(()));
    home.freeze();
    hang(&mut first, |queue| queue.layers_in_flight() > 0);
    drop(first);
    let _memory = poison();
    // The other queue acknowledges changes and reads both its own and the first queue's.
    assert_eq!(second.write_within(LIMIT, 64 * BLOCK, 9), Some(Ok(())));
    assert_eq!(second.read(0, 8 * BLOCK, 0).unwrap(), vec![7; 8 * BLOCK as usize]);
    assert_eq!(second.read(64 * BLOCK, BLOCK, 0).unwrap(), [9; BLOCK as usize]);
    // It does not write back to places to which the kernel may still write.
    let end = Instant::now() + 2 * AGE;
    while Instant::now() < end {
        second.advance();
        second.round(Duration::from_millis(10));
    }
    assert_eq!(second.layers_in_flight(), 0, "a second write-back has begun");
    assert_eq!(home.content(0, BLOCK), [0; BLOCK as usize], "the write-back did not hang");
    home.thaw();
    until_written(&home, CAPACITY, &vec![7; 8 * BLOCK as usize]);
    drop((second, disk));

    let mut queue = reopen(&log, &home);
    assert_eq!(queue.read(0, 8 * BLOCK, 0).unwrap(), vec![7; 8 * BLOCK as usize]);
    assert_eq!(queue.read(64 * BLOCK, BLOCK, 0).unwrap(), [9; BLOCK as usize]);
}

#[test]
fn a_queue_ends_while_its_record_is_in_the_kernel() {
    let Some(log) = FileSystem::mount(LOG_CAPACITY) else { return };
    let Some(home) = FileSystem::mount(CAPACITY) else { return };
    let disk = open(&log.file(), &home.file(), NEVER);
    let (mut first, mut second) = (Queue::open(&disk), Queue::open(&disk));
    assert_eq!(first.write(64 * BLOCK, 5, true), Ok(()));
    log.freeze();
    first.begin_write(0, 8 * BLOCK, 7, true, 0);
    hang(&mut first, |queue| queue.layers_in_flight() > 0);
    drop(first);
    let _memory = poison();
    // The place of the record is unusable while the kernel may still write to it, so the log takes
    // no change. The other queue rejects changes at once, and reads.
    assert_eq!(second.write_within(LIMIT, 128 * BLOCK, 9), Some(Err(ErrorKind::Io)));
    assert_eq!(second.read(64 * BLOCK, BLOCK, 0).unwrap(), [5; BLOCK as usize]);
    log.thaw();
    until_written(&log, LOG_CAPACITY, &vec![7; 8 * BLOCK as usize]);
    drop((second, disk));

    let mut queue = reopen(&log, &home);
    assert_eq!(queue.read(64 * BLOCK, BLOCK, 0).unwrap(), [5; BLOCK as usize]);
    assert_eq!(queue.read(128 * BLOCK, BLOCK, 0).unwrap(), [0; BLOCK as usize]);
    // The record is complete, although the write was not acknowledged.
    assert_eq!(queue.read(0, 8 * BLOCK, 0).unwrap(), vec![7; 8 * BLOCK as usize]);
    assert_eq!(queue.write(0, 3, true), Ok(()), "the log takes changes again");
}
