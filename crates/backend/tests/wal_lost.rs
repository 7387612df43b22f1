//! The layer `wal` on a real log volume that loses writes: what a disk reads after its log was
//! opened again is durable, whichever disk's log was opened first.

#![allow(unsafe_code)]

mod support;

#[path = "support/queue.rs"]
mod queue;

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use fathom_backend::{FileBackend, FileOptions};
use fathom_block::{Backend, Disk, ErrorKind};
use fathom_layers::Wal;
use fathom_layers::wal::{Completion, LogVolume, WalOptions};
use fathom_persistence::Identity;
use fathom_sim::FaultyDevice;
use rustix::fs::{Advice, fadvise};

use queue::{BLOCK, Queue};

const CAPACITY: u64 = 1 << 20;
/// The length of each disk's log, and of the volume.
const LOG_LENGTH: u64 = 1 << 20;
const VOLUME_BLOCKS: u64 = 2 * LOG_LENGTH / BLOCK;
/// The names of the disks, and the places of their logs.
const DISKS: [(&str, u64); 2] = [("a", 0), ("b", LOG_LENGTH)];
/// The blocks of a disk that a test writes.
const BLOCKS: u64 = 24;

fn backend(path: &Path) -> Arc<dyn Backend> {
    let options = FileOptions { path: path.into(), ..FileOptions::default() };
    Arc::new(FileBackend::open(&options).unwrap())
}

/// The disk of `DISKS[number]`, whose changes stay in its log.
fn open(volume: &Arc<LogVolume>, number: usize, folder: &Path) -> Arc<Disk> {
    let (name, offset) = DISKS[number];
    let options = WalOptions {
        name: name.into(),
        home: name.into(),
        home_capacity: CAPACITY,
        home_alignment: 1,
        offset,
        size: LOG_LENGTH,
        block_size: 4096,
        identity: Identity([number as u8 + 1; 16]),
        age_ns: u64::MAX,
        completion: Completion::Durable,
        expected: None,
        mark: None,
        times: None,
        home_store: fathom_layers::wal::HomeStore::default(),
        clock_start_ns: 0,
    };
    let wal = Wal::open(volume, &options).unwrap();
    support::disk(vec![Arc::new(wal)], backend(&folder.join(name)))
}

fn contents(queue: &mut Queue) -> Vec<u8> {
    (0..BLOCKS).map(|block| queue.read(block * BLOCK, BLOCK, 0).unwrap()[0]).collect()
}

/// The volume cannot write a block of the log of "b". Later its device is sound again.
#[test]
fn what_any_log_of_a_volume_with_lost_writes_reads_is_durable() {
    for first in [0, 1] {
        let Some(device) = FaultyDevice::new() else { return };
        let folder = tempfile::tempdir().unwrap();
        for (name, _) in DISKS {
            File::create(folder.path().join(name)).unwrap().set_len(CAPACITY).unwrap();
        }
        let log = device.image("logs", VOLUME_BLOCKS);
        let volume = Arc::new(LogVolume::new(backend(&log)));
        let disks = [open(&volume, 0, folder.path()), open(&volume, 1, folder.path())];
        let mut queues = [Queue::open(&disks[0]), Queue::open(&disks[1])];
        for queue in &mut queues {
            assert_eq!(queue.write(0, 1, true), Ok(()), "acknowledged as durable");
        }
        device.break_block(&log, (LOG_LENGTH + (64 << 10)) / BLOCK);
        let mut written = (1..BLOCKS).map(|block| queues[1].write(block * BLOCK, 2, false));
        let outcome = written.find(Result::is_err);
        assert_eq!(outcome, Some(Err(ErrorKind::Io)), "a block of its log is broken");
        drop(written);
        drop((queues, disks, volume));
        device.mend();

        // A later daemon opens the logs in one order or the other.
        let volume = Arc::new(LogVolume::new(backend(&log)));
        assert!(volume.backend().has_lost_writes());
        let mut queues =
            [first, 1 - first].map(|number| Queue::open(&open(&volume, number, folder.path())));
        let of_b = &mut queues[1 - first];
        assert_eq!(of_b.flush(), Ok(()));
        let seen = contents(of_b);
        assert_eq!(seen[0], 1);
        drop((queues, volume));

        // The host forgets what it has in memory.
        fadvise(File::open(&log).unwrap(), 0, None, Advice::DontNeed).unwrap();
        let volume = Arc::new(LogVolume::new(backend(&log)));
        assert!(!volume.backend().has_lost_writes());
        let mut queue = Queue::open(&open(&volume, 1, folder.path()));
        assert_eq!(contents(&mut queue), seen, "the log of {first} was opened first");
    }
}
